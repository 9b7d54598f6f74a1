"""Control tensors of the world model, chunk by chunk, from what a client sent: keys or camera poses.

A model for ``cam`` control sees origin and direction of every ray, 6 channels; one for ``act`` control sees directions
and action flags, 3 + 4 channels. Poses are relative to the frame before, so that only motion reaches the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reelwire.spec import RequestError

from .camera import (
    Camera,
    action_maps,
    array,
    first_intrinsics,
    packed,
    ray_directions,
    ray_maps,
    relative_poses,
)
from .config import ControlKind
from .geometry import TEMPORAL_STRIDE
from .keyboard import ACTION_KEYS, CameraState, KeyboardParameters, action_flags, integrate


@dataclass(frozen=True, slots=True, eq=False)
class Steering:
    """How a session's controls become control tensors; fixed for its life.

    Attributes:
        kind: what the model's weights were trained for.
        camera: the session's camera.
        chunk_size: latent frames of a chunk.
        keyboard: step sizes of the keys.
        device: where control tensors are made.
    """

    kind: ControlKind
    camera: Camera
    chunk_size: int
    keyboard: KeyboardParameters = field(default_factory=KeyboardParameters)
    device: str = "cpu"


@dataclass(frozen=True, slots=True, eq=False)
class SteeringState:
    """What the control of a chunk depends on besides the control itself; new ones come from `steer`.

    Attributes:
        keyboard: end of the last walk with keys; None before the first and after a `reset_pose`.
        path_end: last pose [4, 4] of the chunk before, if that had explicit poses.
    """

    keyboard: CameraState | None = None
    path_end: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Steered:
    """One chunk's control.

    Attributes:
        tensor: float32 [1, channels, chunk, h, w] on the device of the session's `Steering`.
        pose: camera-to-world [4, 4] float64 at the end of the chunk.
        state: what the next chunk needs.
    """

    tensor: Tensor
    pose: Tensor
    state: SteeringState


def steer(steering: Steering, state: SteeringState, control: Mapping[str, Any]) -> Steered:
    """Apply the control of one chunk.

    Keys walk on from the end of the last walk, whatever explicit poses came in between. Explicit poses don't move it;
    a chunk of them that directly follows another one is connected to its last pose.

    Args:
        steering: of the session.
        state: after the chunk before; `SteeringState()` for chunk 0.
        control: ``keys`` (canonical names) or ``poses`` [chunk, 4, 4] with ``intrinsics``, ``translation_norm`` and, for
            action control, ``action``; and ``reset_pose``. What is missing may also be None.

    Raises:
        RequestError: the control doesn't fit the session.
    """
    keyboard = None if control.get("reset_pose") else state.keyboard
    poses, keys = control.get("poses"), control.get("keys")
    if (poses is None) == (keys is None):
        raise RequestError("control", "needs exactly one of keys and poses")
    if poses is not None:
        _check_channels(control.get("action"))
        tensor = chunk_control(
            steering,
            poses,
            intrinsics=control.get("intrinsics"),
            action=control.get("action"),
            previous_pose=state.path_end,
            translation_norm=control.get("translation_norm"),
        )
        end = array("poses", poses, "[chunk, 4, 4]")[-1]
        return Steered(tensor, end.to(torch.float64), SteeringState(keyboard, end))
    assert keys is not None
    path = integrate(keys, keyboard, steering.chunk_size, steering.keyboard)
    tensor = chunk_control(
        steering,
        torch.from_numpy(path.poses),
        action=torch.from_numpy(action_flags(keys, steering.chunk_size)) if steering.kind == "act" else None,
        previous_pose=None if keyboard is None else torch.from_numpy(keyboard.pose),
        translation_scale=steering.keyboard.translation_scale,
    )
    return Steered(tensor, torch.from_numpy(path.end.pose.copy()), SteeringState(path.end, None))


def chunk_control(
    steering: Steering,
    poses: Any,
    *,
    intrinsics: Any = None,
    action: Any = None,
    previous_pose: Any = None,
    translation_norm: float | None = None,
    translation_scale: Any = None,
) -> Tensor:
    """The control tensor [1, channels, chunk, h, w] of one chunk with explicit poses.

    Without a `translation_norm` translations are normalized over this chunk alone, the step from `previous_pose`
    included. With the largest step of a whole path, the chunks of the path get what normalizing all of it would give.

    Args:
        steering: of the session.
        poses: camera-to-world [chunk, 4, 4], one per latent frame.
        intrinsics: [4] or [rows, 4], of which the first row counts; None for the session's.
        action: flags [chunk, channels], or one row per pixel frame of the chunk; for ``act`` only.
        previous_pose: [4, 4], of the latent frame before; None makes the first frame stand still.
        translation_norm: what translations are divided by; 0 leaves them as they are.
        translation_scale: a positive number (or its text) that multiplies the normalized translations.

    Raises:
        RequestError: something is missing, superfluous or of another shape.
    """
    scale = None if translation_scale is None else _positive("translation_scale", translation_scale)
    if poses is None:
        raise RequestError("poses", f"are missing; accepted: [{steering.chunk_size}, 4, 4]")
    path = array("poses", poses, f"[{steering.chunk_size}, 4, 4]")
    if path.shape != (steering.chunk_size, 4, 4):
        raise RequestError("poses", f"have shape {list(path.shape)}; accepted: [{steering.chunk_size}, 4, 4]")
    flags = _action_rows(steering, action, steering.chunk_size)
    given = None if intrinsics is None else first_intrinsics(intrinsics)
    if previous_pose is None:
        relative = relative_poses(path, norm=translation_norm, scale=scale)
    else:
        before = array("previous_pose", previous_pose, "[4, 4]")
        if before.shape != (4, 4):
            raise RequestError("previous_pose", f"has shape {list(before.shape)}; accepted: [4, 4]")
        relative = relative_poses(torch.cat([before[None], path]), norm=translation_norm, scale=scale)[1:]
    return _tensor(steering, relative, given, flags)


def _tensor(steering: Steering, relative: Tensor, intrinsics: Tensor | None, action: Tensor | None) -> Tensor:
    camera = steering.camera
    rows = camera.model_intrinsics(intrinsics).expand(relative.shape[0], 4).to(steering.device)
    relative = relative.to(steering.device)
    action = None if action is None else action.to(steering.device)
    directions = ray_directions(relative, rows, camera.geometry.height, camera.geometry.width)
    return packed(ray_maps(relative, directions) if action is None else action_maps(directions, action))


def _action_rows(steering: Steering, action: Any, latent_frames: int) -> Tensor | None:
    if steering.kind == "cam":
        if action is not None:
            raise RequestError("action", "is given, but the model has camera control; accepted: none")
        return None
    video_rate = (latent_frames - 1) * TEMPORAL_STRIDE + 1
    accepted = f"[{latent_frames}, {len(ACTION_KEYS)}], or {video_rate} rows at video rate"
    if action is None:
        raise RequestError("action", f"is missing, and the model has action control; accepted: {accepted}")
    flags = array("action", action, accepted)
    if flags.ndim != 2 or flags.shape[0] not in (latent_frames, video_rate):
        raise RequestError("action", f"has shape {list(flags.shape)}; accepted: {accepted}")
    return flags if flags.shape[0] == latent_frames else flags[::TEMPORAL_STRIDE]


def _check_channels(action: Any) -> None:
    if action is not None:
        flags = array("action", action, "[rows, 4]")
        if flags.shape[-1:] != (len(ACTION_KEYS),):
            raise RequestError("action", f"has shape {list(flags.shape)}; accepted: [rows, {len(ACTION_KEYS)}]")


def _positive(name: str, value: Any) -> float:
    accepted = "accepted: a finite number above 0"
    if isinstance(value, bool):
        raise RequestError(name, f"{value!r}; {accepted}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RequestError(name, f"{value!r} is no number; {accepted}") from None
    if not (math.isfinite(number) and number > 0):
        raise RequestError(name, f"{value!r}; {accepted}")
    return number
