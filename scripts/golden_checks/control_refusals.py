"""What the world model's controls refuse, compared with ``control/rejected.json``.

A case is a few words; its numbers are read off them, so that other numbers in the same words are compared too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reelwire.pipeline.world.camera import Camera
from reelwire.pipeline.world.control import (
    ControlKind,
    Steering,
    chunk_control,
    control_of,
    first_frames,
    sequence_controls,
)
from reelwire.pipeline.world.geometry import Geometry
from reelwire.spec import RequestError

if TYPE_CHECKING:
    from scripts.golden_checks.line import Comparison
else:
    from golden_checks.line import Comparison

NOT_OURS = {
    "build: control_tensor of any shape (not checked by the builder)": "our controls carry no ready-made tensor",
    "offline source: creating chunk 3 of 3 without resolving": "our offline controls aren't deferred",
}
"""Cases that have no counterpart here, and why."""

LATENTS = 9
CHUNK = 3


def compare_refusals(content: dict[str, Any], found: Comparison) -> None:
    """Note for each case whether ours refuses exactly if theirs did."""
    for case in content["cases"]:
        name = case["case"]
        if name in NOT_OURS:
            continue
        attempt = _attempt(name)
        found.equal(name, "no such case is known" if attempt is None else _accepted(attempt), case["error"] is None)


def _accepted(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except RequestError:
        return False
    return True


def _attempt(name: str) -> Callable[[], object] | None:
    head, _, words = name.partition(": ")
    kind: ControlKind = "act" if head.endswith(" act") else "cam"
    match head.split()[0]:
        case "build":
            return _build(kind, words)
        case "build_sequence":
            return _sequence(kind, words)
        case "offline":
            return _offline(words)
        case "truncate":
            return _truncate(words)
    return None


def _steering(kind: ControlKind) -> Steering:
    geometry = Geometry(16, 32)
    return Steering(kind, Camera.of_session(geometry, 16, 32), CHUNK)


def _poses(count: int) -> Tensor:
    poses = torch.eye(4).repeat(count, 1, 1)
    poses[:, 2, 3] = torch.arange(count) * 0.1
    return poses


def _sides(words: str) -> Tensor | None:
    """The tensor that words such as ``intrinsics 0x4`` or ``poses 3x3x4`` speak of."""
    match = re.search(r"\d+(?:x\d+)+", words)
    return torch.ones([int(side) for side in match[0].split("x")]) if match else None


def _build(kind: ControlKind, words: str) -> Callable[[], object] | None:
    steering = _steering(kind)
    poses: Any = _poses(CHUNK)
    more: dict[str, Any] = {"action": torch.zeros(CHUNK, 4)} if kind == "act" else {}
    sides = _sides(words)
    if words == "no poses":
        poses = None
    elif match := re.match(r"(\d+) (?:video-rate )?poses", words):
        poses = _poses(int(match[1]))
    elif words.startswith("poses") and sides is not None:
        poses = sides
    elif words == "action given":
        more = {"action": torch.zeros(CHUNK, 4)}
    elif words == "action missing":
        more = {}
    elif match := re.match(r"action with (\d+) rows", words):
        more = {"action": torch.zeros(int(match[1]), 4)}
    elif match := re.match(r"action with (\d+) columns", words):
        more = {"action": torch.zeros(CHUNK, int(match[1]))}
    elif match := re.match(r"1-D action of (\d+)", words):
        more = {"action": torch.zeros(int(match[1]))}
    elif words.startswith("previous_pose") and sides is not None:
        more["previous_pose"] = sides
    elif match := re.match(r"translation_scale (\S+)", words):
        more["translation_scale"] = float(match[1]) if match[1] in ("nan", "inf") else ast.literal_eval(match[1])
    elif match := re.match(r"intrinsics of (\d+) numbers", words):
        more["intrinsics"] = torch.ones(int(match[1]))
    elif match := re.match(r"intrinsics with (\d+) rows", words):
        more["intrinsics"] = torch.ones(int(match[1]), 4)
    elif words.startswith("intrinsics") and sides is not None:
        more["intrinsics"] = sides
    else:
        return None
    return lambda: chunk_control(steering, poses, **more)


def _sequence(kind: ControlKind, words: str) -> Callable[[], object] | None:
    steering = _steering(kind)
    poses, latents = _poses(7), LATENTS
    action = torch.zeros(LATENTS, 4) if kind == "act" else None
    sides = _sides(words)
    if match := re.match(r"(\d+) poses?$", words):
        poses = _poses(int(match[1]))
    elif words.startswith("poses") and sides is not None:
        poses = sides
    elif match := re.match(r"(\d+) latent frames with chunk_size (\d+)", words):
        latents = int(match[1])
        steering = Steering(kind, steering.camera, int(match[2]))
    elif match := re.match(r"action rows (\d+)", words):
        action = torch.zeros(int(match[1]), 4)
    elif words == "action given":
        action = torch.zeros(LATENTS, 4)
    elif words != "action rows equal to latent frames":
        return None
    return lambda: sequence_controls(steering, poses, latents, action=action)


def _offline(words: str) -> Callable[[], object] | None:
    match = re.match(r"chunk (-?\d+)", words)
    if match is None:
        return None
    index = int(match[1])
    return lambda: control_of(sequence_controls(_steering("cam"), _poses(7), LATENTS), index)


def _truncate(words: str) -> Callable[[], object] | None:
    frames, poses = 9, _poses(33)
    more: dict[str, Any] = {}
    sides = _sides(words)
    if match := re.match(r"frame_num (\d+)(?: with (\d+) poses)?", words):
        frames, poses = int(match[1]), _poses(int(match[2] or 33))
    elif match := re.match(r"intrinsics (\d+) values", words):
        more["intrinsics"] = torch.ones(int(match[1]))
    elif match := re.match(r"intrinsics (\d+)-D", words):
        more["intrinsics"] = torch.ones([1] * (int(match[1]) - 1) + [4])
    elif words.startswith("intrinsics") and sides is not None:
        more["intrinsics"] = sides
    elif match := re.match(r"action of (\d+) rows for (\d+)", words):
        more["action"], frames = torch.zeros(int(match[1]), 4), int(match[2])
    else:
        return None
    return lambda: first_frames(poses, frames, **more)
