"""From the flags of `reelwire stream` to a recipe: what can be checked before anybody is asked, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..controls import Control, KeyTrace, controls_for
from ..errors import RequestError, UsageError
from ..spec import Plain, StreamSpec
from .recipe import Recipe, recipe_from
from .shared import Binding, Pace, Policy

PIPELINE_DEFAULT = "world"
KEYS_DEFAULT = "0.0 +w"
CHUNKS_DEFAULT = 8


@dataclass(frozen=True, slots=True)
class StreamFlags:
    """What was said on the command line; None where nothing was.

    Attributes:
        image: the picture.
        parameters: those that have a flag of their own.
        texts: those of ``--set``, which aren't typed yet.
        keys: a trace or the file of one.
        poses: a folder.
        wall_clock: play the trace live.
        chunks: length.
        frames: length in frames.
        policy: what to do with frames that don't fill chunks.
        pipeline: name of the spec.
        replay: a record to make again.
        out: the MP4.
        control_binding: when live keys become the control of a chunk.
        pace: whether the stream may run ahead of its own clock.
        timeline: the picture to draw of it.
    """

    image: Path | None
    parameters: Mapping[str, Plain]
    texts: Mapping[str, str]
    keys: str | None
    poses: Path | None
    wall_clock: bool
    chunks: int | None
    frames: int | None
    policy: Policy
    pipeline: str | None
    replay: Path | None
    out: Path
    control_binding: Binding | None = None
    pace: Pace = "asap"
    timeline: Path | None = None


def check_flags(flags: StreamFlags) -> None:
    """Refuse what can't be right whatever the pipeline is.

    Raises:
        UsageError: flags that exclude each other.
        RequestError: a value that is refused; the field names it.
    """
    if flags.out.suffix.lower() != ".mp4":
        raise RequestError("out", f"{flags.out} is no name of an MP4; accepted: a path that ends in .mp4")
    if not flags.out.parent.is_dir():
        raise RequestError("out", f"the folder {flags.out.parent} is not there; accepted: a folder that exists")
    _check_timeline(flags.timeline)
    said: dict[str, Any] = {
        **flags.parameters,
        "set": flags.texts or None,
        "keys": flags.keys,
        "poses": flags.poses,
        "wall-clock": flags.wall_clock or None,
        "control-binding": flags.control_binding,
        "chunks": flags.chunks,
        "frames": flags.frames,
        "pipeline": flags.pipeline,
    }
    given = [f"--{name}" for name, value in said.items() if value is not None]
    if flags.replay is not None:
        if given:
            accepted = "an image, --out, --pace and --endpoint"
            raise UsageError(f"{given[0]} is given beside --from; accepted with --from: {accepted}")
        return
    prompt = flags.parameters.get("prompt")
    if prompt is None and "prompt" not in flags.texts and flags.pipeline in (None, PIPELINE_DEFAULT):
        raise RequestError("prompt", "is missing; accepted: --prompt with any text")
    if isinstance(prompt, str) and not prompt.strip():
        raise RequestError("prompt", "is empty; accepted: any text")
    if flags.chunks is not None and flags.frames is not None:
        raise UsageError("--chunks and --frames are both given; accepted: one of them")
    if flags.poses is not None and (flags.keys is not None or flags.wall_clock):
        raise UsageError("--poses is given beside --keys or --wall-clock; accepted: one of them")
    if flags.control_binding is not None and not flags.wall_clock:
        raise UsageError(
            "--control-binding is given without --wall-clock, but only live keys are bound; accepted: both, or neither"
        )
    if flags.image is None and flags.pipeline in (None, PIPELINE_DEFAULT):
        raise RequestError("image", "is missing; accepted: the path of a picture")


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What is known before anybody is asked.

    Attributes:
        pipeline: name of the spec.
        image: the picture, if there is one.
        replayed: the recipe of the record that is made again; None without ``--from``.
        frames_sha256: the digest of the record's frames; empty without ``--from``.
    """

    pipeline: str
    image: Path | None
    replayed: Recipe | None = None
    frames_sha256: str = ""


def first_look(flags: StreamFlags) -> FirstLook:
    """Check the flags, and read every file but the poses once to see that it can be.

    Raises:
        UsageError: flags exclude each other.
        RequestError: a file can't be read, or ``--out`` would overwrite the record that is made again, or its video.
    """
    check_flags(flags)
    if flags.replay is None:
        read_trace(flags.keys)
        return FirstLook(flags.pipeline or PIPELINE_DEFAULT, flags.image)
    recipe, frames_sha256 = recipe_from(flags.replay, flags.image)
    if flags.out.with_suffix(".json").resolve() == flags.replay.resolve():
        raise RequestError(
            "out",
            f"{flags.out} and its record are those of --from {flags.replay}; accepted: another name, for the copy",
        )
    return FirstLook(recipe.pipeline, recipe.image, recipe, frames_sha256)


def recipe_of(flags: StreamFlags, spec: StreamSpec) -> Recipe:
    """The recipe for a pipeline, of what was said on the command line without ``--from``.

    Raises:
        RequestError: something doesn't fit the pipeline.
        ConfigError: a parameter of ``--set`` has another type.
    """
    assert flags.replay is None, "a record has its recipe in it"
    chunks = length_of(spec, flags.chunks, flags.frames, flags.policy)
    parameters = {**flags.parameters, **typed(spec, flags.texts)}
    if flags.poses is not None:
        from ..poses import read_path

        path = read_path(flags.poses, spec, chunks, flags.policy)
        tensors = {"intrinsics": path.intrinsics.tolist()}
        return Recipe(spec.name, flags.image, len(path.controls), parameters, path.controls, tensors=tensors)
    trace = read_trace(flags.keys)
    length = chunks or CHUNKS_DEFAULT
    # also with a wall clock, because it refuses unknown keys before anything was started
    controls = tuple(_controls(trace, spec, length))
    if flags.wall_clock:
        binding = flags.control_binding or "late"
        return Recipe(spec.name, flags.image, length, parameters, None, trace, control_binding=binding)
    return Recipe(spec.name, flags.image, length, parameters, controls, trace)


def check_controls(recipe: Recipe, spec: StreamSpec, field: str | None = None) -> None:
    """See that every control fits the pipeline, while nothing has been started.

    Args:
        recipe: whose controls; one that is played by the wall clock has none yet.
        spec: of its pipeline.
        field: what the controls came from, such as ``from``; None: the fault's own field.

    Raises:
        RequestError: one doesn't fit; of a record, the sentence says which.
    """
    for index, control in enumerate(recipe.controls or ()):
        try:
            control.for_stream(spec)
        except RequestError as error:
            reason = error.reason if field is None else f"controls[{index}]: {error}"
            raise RequestError(field or error.field, reason) from None


def read_trace(keys: str | None) -> KeyTrace:
    """The trace that the flag names or is.

    Raises:
        RequestError: it can't be read.
    """
    text = KEYS_DEFAULT if keys is None else keys
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        is_file = False
    if not is_file and not any(mark in text for mark in "; +#\n") and Path(text).suffix[1:].isalpha():
        raise RequestError("keys", f"there is no file {text}; accepted: a key trace or the path of one")
    try:
        return KeyTrace.load(text) if is_file else KeyTrace.parse(text)
    except RequestError as error:
        raise RequestError("keys", error.reason) from None


def length_of(spec: StreamSpec, chunks: int | None, frames: int | None, policy: Policy) -> int | None:
    """The length in chunks; None if nothing was said.

    Raises:
        RequestError: it isn't one that the stream can have.
    """
    if frames is not None:
        chunks = spec.chunks_in(frames, policy)
    if chunks is not None and chunks > spec.chunks_max:
        most = f"{spec.chunks_max} chunks, which are {spec.frames_in(spec.chunks_max)} frames"
        field, given = ("chunks", chunks) if frames is None else ("frames", frames)
        raise RequestError(field, f"{given} is more than {spec.name!r} can have; accepted: at most {most}")
    return chunks


def typed(spec: StreamSpec, texts: Mapping[str, str]) -> dict[str, Plain]:
    """Texts of ``--set`` as the spec's parameters have them; what they mean is checked with all other parameters.

    Raises:
        ConfigError: a text isn't of its parameter's type.
    """
    from ..settings import Origin, convert

    kinds = {parameter.name: parameter.kind for parameter in spec.parameters}
    types = {"string": str, "integer": int, "number": float, "boolean": bool}
    origin = Origin("flag", "--set")
    return {
        name: convert(name, types[kinds[name]], text, origin) if name in kinds else text for name, text in texts.items()
    }


def _check_timeline(path: Path | None) -> None:
    if path is not None and path.suffix.lower() != ".png":
        raise RequestError("timeline", f"{path} is no name of a picture; accepted: a path that ends in .png")
    if path is not None and not path.parent.is_dir():
        raise RequestError("timeline", f"the folder {path.parent} is not there; accepted: a folder that exists")


def _controls(trace: KeyTrace, spec: StreamSpec, chunks: int) -> list[Control]:
    try:
        return controls_for(trace, spec, chunks)
    except RequestError as error:
        raise RequestError("keys", error.reason) from None
