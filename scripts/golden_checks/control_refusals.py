"""What the world model's controls refuse, compared with ``control/rejected.json``.

A case is a few words; its numbers are read off them, so that other numbers in the same words are compared too.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reelwire.broker.control import check_control
from reelwire.broker.flow import Flow
from reelwire.client_values import control_artifact, session_length
from reelwire.errors import ControlError
from reelwire.pipeline.world.camera import Camera
from reelwire.pipeline.world.config import ControlKind, tiny
from reelwire.pipeline.world.control import Steering, chunk_control
from reelwire.pipeline.world.geometry import Geometry
from reelwire.pipeline.world.stream import world_spec
from reelwire.poses import path_controls, read_path
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
    except (RequestError, ControlError):
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
    poses, chunk_size, latents = _poses(7), CHUNK, LATENTS
    action = torch.zeros(LATENTS, 4) if kind == "act" else None
    sides = _sides(words)
    if match := re.match(r"(\d+) poses?$", words):
        poses = _poses(int(match[1]))
    elif words.startswith("poses") and sides is not None:
        poses = sides
    elif match := re.match(r"(\d+) latent frames with chunk_size (\d+)", words):
        latents, chunk_size = int(match[1]), int(match[2])
    elif match := re.match(r"action rows (\d+)", words):
        action = torch.zeros(int(match[1]), 4)
    elif words == "action given":
        action = torch.zeros(LATENTS, 4)
    elif words != "action rows equal to latent frames":
        return None
    spec = world_spec(tiny(chunk_size, kind))
    rows = None if action is None else action.numpy()

    def served() -> None:
        chunks = session_length(spec, None, spec.frame_stride * (latents - 1) + 1)
        for control in path_controls(poses.numpy(), spec, chunks, action=rows):
            check_control(control_artifact(control, spec), spec)

    return served


def _offline(words: str) -> Callable[[], object] | None:
    match = re.match(r"chunk (-?\d+)", words)
    if match is None:
        return None
    index, spec = int(match[1]), world_spec(tiny(CHUNK))

    def admitted() -> None:
        code = Flow(spec, LATENTS // CHUNK).refusal(index)
        if code is not None:
            raise ControlError(code, f"chunk {index}")

    return admitted


def _truncate(words: str) -> Callable[[], object] | None:
    frames = 9
    files: dict[str, Tensor] = {"poses": _poses(33), "intrinsics": torch.ones(4)}
    sides = _sides(words)
    if match := re.match(r"frame_num (\d+)(?: with (\d+) poses)?", words):
        frames, files["poses"] = int(match[1]), _poses(int(match[2] or 33))
    elif match := re.match(r"intrinsics (\d+) values", words):
        files["intrinsics"] = torch.ones(int(match[1]))
    elif match := re.match(r"intrinsics (\d+)-D", words):
        files["intrinsics"] = torch.ones([1] * (int(match[1]) - 1) + [4])
    elif words.startswith("intrinsics") and sides is not None:
        files["intrinsics"] = sides
    elif match := re.match(r"action of (\d+) rows for (\d+)", words):
        files["action"], frames = torch.zeros(int(match[1]), 4), int(match[2])
    else:
        return None
    spec = world_spec(tiny(1))  # every count of the form 4k+1 fills its chunks

    def read() -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, values in files.items():
                np.save(Path(folder) / f"{name}.npy", values.numpy())
            read_path(folder, spec, session_length(spec, None, frames))

    return read
