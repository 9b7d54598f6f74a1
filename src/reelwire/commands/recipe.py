"""What a stream is made from, and the JSON beside the MP4 that makes it again.

A *recipe* is everything that the frames depend on: picture, parameters and one control per chunk. A *record* is a recipe
with what came of it: the control that each chunk really was made with, versions, times, a digest of the frames. The
recipe read from a record submits the applied controls by index, so it gives the same frames, wall clock or not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..controls import Control, KeyTrace
from ..errors import RequestError
from ..spec import Plain
from .shared import Binding, Pace

FORMAT = "reelwire-stream-1"
_ACCEPTED = "accepted: the JSON that stands beside an MP4 of `reelwire stream`"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to ask for.

    Attributes:
        pipeline: name of the spec.
        image: the picture file; None for a pipeline that takes none.
        chunks: length of the session.
        parameters: those that were given; the spec has defaults for the others.
        controls: one per chunk, submitted by index; None: `trace` is played by the wall clock.
        trace: the keys as they were given, where they were.
        tensors: arrays of the request besides the image, by name, as nested lists.
        control_binding: when the keys of a trace that is played live become a chunk's control.
    """

    pipeline: str
    image: Path | None
    chunks: int
    parameters: Mapping[str, Plain]
    controls: tuple[Control, ...] | None
    trace: KeyTrace | None = None
    tensors: Mapping[str, Any] = field(default_factory=dict)
    control_binding: Binding = "late"


@dataclass(slots=True)
class Record:
    """A recipe and what came of it; made while the stream runs.

    Attributes:
        recipe: what was asked for.
        state: how it ended: ``completed``, ``closed``, ``stopped``, ``failed`` or ``cancelled``.
        reason: one sentence, unless it completed.
        applied: the control of each chunk, as plain data.
        chunks: index, frames and times of each chunk.
        facts: what the stages say about each chunk.
        frames: pixel frames written.
        fps: frames per second.
        frames_sha256: digest of the bytes of all frames, in order.
        mp4: name of the video, beside this record.
        versions: of everything that computed.
        timings: the table at the end, by name.
        metrics: the broker's numbers of the session.
        pace: whether the stream could run ahead of its own clock.
    """

    recipe: Recipe
    mp4: str
    fps: float
    state: str = "running"
    reason: str = ""
    applied: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    facts: list[Mapping[str, Any]] = field(default_factory=list)
    frames: int = 0
    frames_sha256: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pace: Pace = "asap"

    def to_json(self, folder: Path) -> dict[str, Any]:
        """The record as it is written into `folder`."""
        image = self.recipe.image
        return {
            "format": FORMAT,
            "request": {
                "pipeline": self.recipe.pipeline,
                "image": None if image is None else {"path": _relative(image, folder), "sha256": digest(image)},
                "chunks": self.recipe.chunks,
                "parameters": dict(self.recipe.parameters),
                "tensors": dict(self.recipe.tensors),
                "pace": self.pace,
                "control_binding": self.recipe.control_binding if self.recipe.controls is None else None,
            },
            "controls": self.applied,
            "result": {
                "state": self.state,
                "reason": self.reason,
                "mp4": self.mp4,
                "frames": self.frames,
                "fps": self.fps,
                "frames_sha256": self.frames_sha256,
            },
            "versions": self.versions,
            "timings": self.timings,
            "chunks": self.chunks,
            "facts": self.facts,
            "metrics": self.metrics,
        }


def recipe_from(path: Path, image: Path | None = None) -> tuple[Recipe, str]:
    """The recipe of a record, and the digest that its frames had.

    Args:
        path: the JSON file.
        image: the picture, if it isn't where the record says.

    Raises:
        RequestError: the file is no record, or the picture isn't the one that it was made from.
    """
    held = _read(path)
    try:
        request, result = held["request"], held["result"]
        _check_lengths(path, held)
        controls = tuple(_control(path, index, entry) for index, entry in enumerate(held["controls"]))
        recipe = Recipe(
            pipeline=str(request["pipeline"]),
            image=_picture(request["image"], path.parent, image),
            chunks=len(controls),
            parameters=dict(request["parameters"]),
            controls=controls,
            tensors=_tensors(path, request["tensors"]),
        )
        digest_then = str(result["frames_sha256"])
    except RequestError:
        raise
    except KeyError as error:
        raise RequestError("from", f"{path} has no {error.args[0]!r}; {_ACCEPTED}") from None
    except (OSError, ValueError, TypeError, AttributeError):
        raise RequestError("from", f"{path} has entries of another kind than a record's; {_ACCEPTED}") from None
    return recipe, digest_then


def control_from(entry: Mapping[str, Any]) -> Control:
    """The control that an entry of a record describes."""
    reset_pose = bool(entry.get("reset_pose", False))
    if entry.get("poses") is None:
        return Control(keys=entry["keys"], reset_pose=reset_pose)
    return Control(
        poses=entry["poses"],
        intrinsics=entry.get("intrinsics"),
        action=entry.get("action"),
        reset_pose=reset_pose,
        translation_norm=entry.get("translation_norm"),
    )


def plain_control(control: Control, source: str) -> dict[str, Any]:
    """A control as an entry of a record."""
    entry: dict[str, Any] = {"source": source, "reset_pose": control.reset_pose}
    if control.keys is not None:
        entry["keys"] = list(control.keys)
    if control.translation_norm is not None:
        entry["translation_norm"] = control.translation_norm
    for name, array in control.tensors().items():
        entry[name] = array.tolist()
    return entry


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def percentiles(values: Sequence[float]) -> dict[str, float | int]:
    """Count, mean and nearest-rank percentiles of what was measured; only the count when there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    ranks = {name: ordered[max(0, -(-len(ordered) * part // 100) - 1)] for name, part in _RANKS.items()}
    return {"count": len(ordered), "mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("from", f"{path} can't be read ({error.strerror or error}); {_ACCEPTED}") from None
    except (ValueError, RecursionError):  # a decoding error is a ValueError
        raise RequestError("from", f"{path} holds no JSON; {_ACCEPTED}") from None
    if not isinstance(held, dict) or "format" not in held:
        raise RequestError("from", f"{path} is no record; {_ACCEPTED}")
    if held["format"] != FORMAT:
        raise RequestError("from", f"{path} has the format {held['format']!r}; accepted: {FORMAT!r}")
    return held


def _check_lengths(path: Path, held: Mapping[str, Any]) -> None:
    """A record that was cut or edited must not make other frames in silence."""
    asked, controls, made = held["request"]["chunks"], held["controls"], held["chunks"]
    if made == []:
        raise RequestError("from", f"{path} has no chunk; {_ACCEPTED}")
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise RequestError("from", f"{path}: request.chunks is {asked!r}; accepted: an integer, 1 or more")
    for name, entries in (("controls", controls), ("chunks", made)):
        if not isinstance(entries, list):
            raise RequestError("from", f"{path}: {name} is no list; {_ACCEPTED}")
    if len(controls) != len(made):
        raise RequestError(
            "from", f"{path}: there are {len(controls)} controls for {len(made)} chunks; accepted: one for each"
        )
    if len(made) > asked or (held["result"]["state"] == "completed" and len(made) != asked):
        raise RequestError("from", f"{path}: request.chunks is {asked}; accepted: {len(made)}, as there are chunks")


def _tensors(path: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    for name, values in entries.items():
        try:
            fits = bool(np.isfinite(np.asarray(values, np.float32)).all())
        except (ValueError, TypeError, OverflowError):
            fits = False
        if not fits:
            raise RequestError("from", f"{path}: tensors.{name} is no array; accepted: lists of finite numbers")
    return dict(entries)


def _control(path: Path, index: int, entry: Mapping[str, Any]) -> Control:
    try:
        return control_from(entry)
    except RequestError as error:
        raise RequestError("from", f"{path}: controls[{index}]: {error}") from None
    except KeyError as error:
        raise RequestError("from", f"{path}: controls[{index}] has no {error.args[0]!r}; {_ACCEPTED}") from None


_RANKS = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}


def _picture(entry: Mapping[str, Any] | None, folder: Path, given: Path | None) -> Path | None:
    if entry is None:
        return given
    path = given or folder / entry["path"]
    if not path.is_file():
        raise RequestError("image", f"{path} is not a file; accepted: the picture that the record was made from")
    if digest(path) != entry["sha256"]:
        raise RequestError("image", f"{path} is another picture; accepted: the one that the record was made from")
    return path


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(path.resolve())
