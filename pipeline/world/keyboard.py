"""From held keys to camera poses: one latent frame is four steps of a walk.

All of it in float64 on numpy arrays: a session walks thousands of steps, and its poses have to be the same wherever they
are integrated. Axes: x right, y down, z forward; poses are camera-to-world.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from reelwire.spec import RequestError

Pose = NDArray[np.float64]

STEPS_PER_LATENT = 4
"""Steps of a walk per latent frame, one per pixel frame; no frame rate enters."""

KEY_NAMES = ("w", "a", "s", "d", "i", "j", "k", "l")
"""Forward, left, backward, right; pitch up, yaw left, pitch down, yaw right."""

KEY_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{f"Key{key.upper()}": key for key in KEY_NAMES},
        "ArrowUp": "w",
        "ArrowLeft": "a",
        "ArrowDown": "s",
        "ArrowRight": "d",
        "up": "w",
        "left": "a",
        "down": "s",
        "right": "d",
        "forward": "w",
        "backward": "s",
    }
)
"""Other spellings of the keys, case sensitive."""

ACTION_KEYS = ("w", "a", "s", "d")
"""Channels of the action flags, in order; the rotation keys have none."""


@dataclass(frozen=True, slots=True)
class KeyboardParameters:
    """How far one step goes.

    Attributes:
        move_step: forward and backward, in units of the poses.
        lateral_step: to the left and right, in the same units.
        yaw_step_degrees: turn.
        pitch_step_degrees: nod.
        pitch_limit_degrees: largest pitch in either direction; a step beyond it is dropped whole.
        translation_scale: what the largest translation of a chunk becomes after normalization.
    """

    move_step: float = 0.05
    lateral_step: float = 0.05
    yaw_step_degrees: float = 2.0
    pitch_step_degrees: float = 2.0
    pitch_limit_degrees: float = 85.0
    translation_scale: float = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class CameraState:
    """Where a walk has come to: all that the next chunk needs of the ones before.

    Attributes:
        pose: camera-to-world [4, 4], float64.
        pitch: accumulated pitch in radians; kept beside the pose because the limit is checked against the sum itself.
    """

    pose: Pose
    pitch: float


@dataclass(frozen=True, slots=True, eq=False)
class CameraPath:
    """The camera of one chunk.

    Attributes:
        poses: camera-to-world [chunk, 4, 4], float64, one per latent frame.
        end: where the walk has come to after the chunk.
    """

    poses: Pose
    end: CameraState


def integrate(
    keys: Collection[str], start: CameraState | None, chunk_size: int, parameters: KeyboardParameters | None = None
) -> CameraPath:
    """Walk for one chunk with a set of keys held.

    Opposite keys cancel. Within a step the camera turns first (yaw about the world's y from the left, pitch about its
    own x from the right) and then walks along the horizontal part of its new axes.

    Args:
        keys: canonical names of the keys that are held.
        start: the end of the walk before; None for the first chunk and after going back to the first pose. Then the
            first latent frame is the identity pose and only ``chunk_size - 1`` intervals are walked.
        chunk_size: latent frames of the chunk.
        parameters: step sizes; None for the defaults.

    Raises:
        RequestError: a key has no direction.
    """
    for key in keys:
        if key not in KEY_NAMES:
            raise RequestError("keys", f"unknown key {key!r}; accepted: {', '.join(KEY_NAMES)}")
    parameters = KeyboardParameters() if parameters is None else parameters
    state = CameraState(np.eye(4), 0.0) if start is None else start
    poses = [state.pose] if start is None else []
    step = _Step.of(keys, parameters)
    while len(poses) < chunk_size:
        for _ in range(STEPS_PER_LATENT):
            state = step.taken_from(state)
        poses.append(state.pose)
    return CameraPath(np.stack(poses), state)


def action_flags(keys: Collection[str], chunk_size: int) -> NDArray[np.float32]:
    """The flags w, a, s, d [chunk, 4] that a model with action control is given; opposite keys don't cancel here."""
    row = np.array([key in keys for key in ACTION_KEYS], dtype=np.float32)
    return np.tile(row, (chunk_size, 1))


@dataclass(frozen=True, slots=True)
class _Step:
    forward: float
    right: float
    yaw: float
    pitch: float
    pitch_limit: float

    @classmethod
    def of(cls, keys: Collection[str], parameters: KeyboardParameters) -> _Step:
        def balance(plus: str, minus: str) -> int:
            return (plus in keys) - (minus in keys)

        return cls(
            forward=balance("w", "s") * parameters.move_step,
            right=balance("d", "a") * parameters.lateral_step,
            yaw=balance("l", "j") * math.radians(parameters.yaw_step_degrees),
            pitch=balance("i", "k") * math.radians(parameters.pitch_step_degrees),
            pitch_limit=math.radians(parameters.pitch_limit_degrees),
        )

    def taken_from(self, state: CameraState) -> CameraState:
        pose, pitch = state.pose.copy(), state.pitch
        rotation = pose[:3, :3]
        if self.yaw:
            rotation = _about_y(self.yaw) @ rotation
        if self.pitch and abs(pitch + self.pitch) <= self.pitch_limit:
            pitch += self.pitch
            rotation = rotation @ _about_x(self.pitch)
        pose[:3, :3] = rotation
        pose[:3, 3] += self.forward * _level(rotation[:, 2]) + self.right * _level(rotation[:, 0])
        return CameraState(pose, pitch)


def _level(axis: Pose) -> Pose:
    flat = np.array([axis[0], 0.0, axis[2]])
    level: Pose = flat / (np.linalg.norm(flat) + 1e-6)
    return level


def _about_y(angle: float) -> Pose:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def _about_x(angle: float) -> Pose:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])
