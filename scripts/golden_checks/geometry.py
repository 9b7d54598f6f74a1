"""Sizes, frame counts, cache sizes, intrinsics and pictures of the world model, compared with the set ``geometry``."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reelwire.client_values import session_length
from reelwire.pipeline.registry import load
from reelwire.pipeline.world.camera import Camera
from reelwire.pipeline.world.geometry import (
    AREA_DEFAULT,
    Geometry,
    image_to_tensor,
    output_size,
)
from reelwire.pipeline.world.kv_cache import CacheLimits
from reelwire.spec import Plain, RequestError, StreamSpec, check_parameters

if TYPE_CHECKING:
    from scripts.golden_checks.line import Comparison, Entry, Line, document, over_files, tensors
else:
    from golden_checks.line import Comparison, Entry, Line, document, over_files, tensors

Case = dict[str, Any]


def check(folder: Path) -> Iterator[Line]:
    """Compare every file of the set: integers exactly, intrinsics to 1e-6 relative, pictures to 1e-5."""
    return over_files(folder, _compare)


def _compare(folder: Path, name: str, entry: Entry, found: Comparison) -> None:
    if not name.endswith(".json"):
        _images(tensors(folder, name), entry, found)
        return
    content = document(folder, name)
    for section, compare in SECTIONS.items():
        for number, case in enumerate(content[section]["cases"]):
            compare(case, found, f"{section} {number}")
    for case in content["frame_count"].get("invalid", []):
        _invalid(case, found)
    for chunk_size, frames in content["warmup_frame_num"].items():
        found.equal(f"warmup {chunk_size}", _spec(int(chunk_size)).frames_in(2), frames)


def _images(data: dict[str, torch.Tensor], entry: Entry, found: Comparison) -> None:
    for case in entry["cases"]:
        seed, (height, width) = case["seed"], case["out"]
        ours = image_to_tensor(data[f"image{seed}"], height, width)
        found.close(f"tensor{seed}", ours, data[f"tensor{seed}"], 1e-5)


def _spec(chunk_size: object) -> StreamSpec:
    """The stream of a worker that was started with that chunk size; options are texts."""
    return load("world", {"chunk_size": repr(chunk_size)}).spec


def _frames(pixel_frames: Any, chunk_size: object, policy: Any = "strict") -> tuple[int, int, int]:
    """Pixel frames, latent frames and chunks of a session that was asked for in pixel frames."""
    spec = _spec(chunk_size)
    chunks = session_length(spec, None, pixel_frames, policy)
    frames = spec.frames_in(chunks)
    return frames, (frames - 1) // spec.frame_stride + 1, chunks


def _accepted(call: Callable[[], object]) -> bool:
    try:
        call()
    except RequestError:
        return False
    return True


def _output_size(case: Case, found: Comparison, label: str) -> None:
    height, width = output_size(case["image_height"], case["image_width"], case["max_area"])
    geometry = Geometry(height, width)
    ours = (height, width, geometry.latent_height, geometry.latent_width, geometry.frame_tokens)
    theirs = tuple(case[key] for key in ("out_height", "out_width", "latent_h", "latent_w", "frame_tokens"))
    found.equal(label, ours, theirs)


def _frame_count(case: Case, found: Comparison, label: str) -> None:
    arguments = (case["frame_num"], case["chunk_size"], case["policy"])
    if "error" in case:
        found.equal(f"{label} {arguments} accepted", _accepted(lambda: _frames(*arguments)), False)
        return
    theirs = (case["effective_frame_num"], case["latent_frames"], case["chunk_count"])
    found.equal(f"{label} {arguments}", _frames(*arguments), theirs)


def _invalid(case: Case, found: Comparison) -> None:
    arguments = tuple(ast.literal_eval(case[key]) for key in ("frame_num", "chunk_size", "policy"))
    if "error" in case:
        found.equal(f"frames {arguments} accepted", _accepted(lambda: _frames(*arguments)), False)
        return
    found.equal(f"frames {arguments}", list(_frames(*arguments)[:2]), case["result"])


def _duration(case: Case, found: Comparison, label: str) -> None:
    seconds, fps, chunk_size = arguments = (case["max_duration_seconds"], case["fps"], case["chunk_size"])
    stride = _spec(chunk_size).frame_stride
    frames = stride * math.floor(seconds * fps / stride) + 1  # whole latent frames beside the first
    if "error" in case:
        found.equal(f"{label} {arguments} accepted", _accepted(lambda: _frames(frames, chunk_size, "truncate")), False)
        return
    found.equal(f"{label} {arguments}", _frames(frames, chunk_size, "truncate")[0], case["frame_num"])


def _chunks(case: Case, found: Comparison, label: str) -> None:
    size, spec = case["chunk_size"], _spec(case["chunk_size"])
    for chunk in case["chunks"]:
        index = chunk["chunk"]
        pixels = (spec.frames_in(index), spec.frames_in(index + 1), spec.frames_of(index))
        ours = (index * size, (index + 1) * size, *pixels)
        keys = ("latent_start", "latent_end", "pixel_start", "pixel_end", "pixel_frames")
        found.equal(f"{label} chunk {chunk['chunk']}", ours, tuple(chunk[key] for key in keys))
    found.equal(f"{label} length", _frames(case["frame_num"], size)[2], case["chunk_count"])


def _kv(case: Case, found: Comparison, label: str) -> None:
    width, height = case["image"]
    geometry = Geometry(*output_size(height, width, case["max_area"]))
    size = case["chunk_size"]
    layout = CacheLimits(window=case["local_attn_size"]).layout(geometry.frame_tokens, case["latent_frames"])
    limit = case["session_max_attention_size"]  # in tokens, where our requests speak of latent frames
    starts = [index * size * geometry.frame_tokens for index in range(len(case["current_start_of_chunk"]))]
    ours = {
        "out": [geometry.width, geometry.height],
        "frame_tokens": geometry.frame_tokens,
        "kv_tokens": layout.capacity,
        "max_attention_size": layout.attention if limit is None else limit,
        "current_start_of_chunk": starts,
        "tokens_per_chunk": size * geometry.frame_tokens,
    }
    for key, value in ours.items():
        found.equal(f"{label} {key}", value, case[key])


def _session_intrinsics(case: Case, found: Comparison, label: str) -> None:
    image_width, image_height = case["image"]
    geometry = Geometry.of_image(image_height, image_width, case["max_area"])
    width, height = case["intrinsics_size"]
    camera = Camera.of_session(geometry, image_height, image_width, case["session_intrinsics"], height, width)
    found.equal(f"{label} out", [geometry.width, geometry.height], case["out"])
    found.equal(f"{label} latent", [geometry.latent_height, geometry.latent_width], case["latent"][1:])
    calibration = (camera.calibration_width, camera.calibration_height)
    found.equal(f"{label} calibration", calibration, (case["calibration_width"], case["calibration_height"]))
    for key, ours in (("base_intrinsics", camera.intrinsics), ("model_intrinsics", camera.model_intrinsics())):
        theirs = torch.tensor(case[key])
        found.number(f"{label} {key}", float(((ours - theirs).abs() / theirs.abs().clamp(min=1e-9)).max()), 1e-6)


def _session_rejections(case: Case, found: Comparison, label: str) -> None:
    name = case["case"]
    found.equal(f"{label} ({name}) accepted", _accepted(_session(name)), case["error"] is None)


def _session(name: str) -> Callable[[], object]:
    """What the words of a case ask for: a session with a 64 x 48 image, 81 frames, chunks of 3, truncated."""
    frames: dict[str, Any] = {"pixel_frames": 81, "chunk_size": 3, "policy": "truncate"}
    lens: dict[str, Any] = {}
    parameters: dict[str, Plain] = {}
    if match := re.fullmatch(r"chunk_size (\S+)", name):
        frames["chunk_size"] = ast.literal_eval(match[1].capitalize())
    elif match := re.fullmatch(r"frame_num (\d+)(?: (strict|truncate))?(?: chunk (\d+))?", name):
        frames = {"pixel_frames": int(match[1]), "chunk_size": int(match[3] or 3), "policy": match[2] or "truncate"}
    elif match := re.fullmatch(r"intrinsics (?:of )?(\d+(?:x\d+)*)", name):
        lens = {"intrinsics": torch.ones([int(side) for side in match[1].split("x")])}
    elif match := re.fullmatch(r"calibration (width|height) (\S+)", name):
        size = {
            "calibration_width": 64,
            "calibration_height": 48,
            f"calibration_{match[1]}": ast.literal_eval(match[2]),
        }
        lens = {"intrinsics": [50.0, 50.0, 32.0, 24.0], **size}
    else:
        known: dict[str, tuple[dict[str, Plain], dict[str, Any]]] = {
            "plain": ({}, {}),
            # the weights alone say it: no request has such a parameter
            "control mode differs from the model": ({"control": "act"}, {}),
            "only intrinsics_width": ({}, {"intrinsics": [50.0, 50.0, 32.0, 24.0], "calibration_width": 64}),
            "calibration size without intrinsics": ({}, {"calibration_width": 64, "calibration_height": 48}),
            "negative focal length": ({}, {"intrinsics": [-50.0, 50.0, 32.0, 24.0]}),
        }
        parameters, lens = known[name]

    def session() -> None:
        check_parameters(_spec(3), {"prompt": "a world", **parameters})
        _frames(**frames)
        Camera.of_session(Geometry.of_image(48, 64, AREA_DEFAULT), 48, 64, **lens)

    return session


SECTIONS: dict[str, Callable[[Case, Comparison, str], None]] = {
    "output_size": _output_size,
    "frame_count": _frame_count,
    "duration": _duration,
    "chunks": _chunks,
    "kv": _kv,
    "session_intrinsics": _session_intrinsics,
    "session_rejections": _session_rejections,
}
