"""A pipeline whose stages take the time that they are told to, and compute next to nothing: for benchmarks and tests.

Its dataflow is that of the world model, without a model and without torch::

    encode_request --(2)--> [encode] --condition(2)--> [denoise] --latent(2)--> [decode] --frames(2)--> client
                                        client --control(2)----^

    reelwire worker --pipeline emulated --option denoise_s=0.12

A stage does its little work and then waits for the end of its time on the monotonic clock, so that a chunk takes what was
asked for, whatever the work was. What comes out is a function of seed and controls: every chunk carries a *trail*, a
checksum over all that went into it and into the chunks before, and the frames show index, keys and trail as patterns that
`read` finds again. So a chunk that was lost, made twice or made from other bytes shows.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reelwire.errors import RequestError
from reelwire.pipeline.stage import Initialized, Ranks, Stage, StageResult, Values
from reelwire.spec import Edge, Parameter, Prefetch, StageSpec, StreamSpec

from .collectives import gather_numbers

Refill = Literal["after_stage", "with_control", "never"]

KEYS = ("w", "a", "s", "d", "i", "j", "k", "l")
ALIASES = {"ArrowUp": "w", "ArrowLeft": "a", "ArrowDown": "s", "ArrowRight": "d"}
CHUNKS_MAX = 1 << 20
SECONDS_MAX = 3600.0
BYTES_MAX = 1 << 30
BITS = 32
"""Columns of cells in the patterns of index and trail; a frame is at least so wide."""
WAKES_LATE_S = 0.0002
"""How late a thread may wake from a wait: so long before its end a stage stops waiting and watches the clock."""
LIT, DARK = 224, 32


@dataclass(frozen=True, slots=True)
class Emulation:
    """The options of the pipeline; on a command line each is a text.

    Attributes:
        name: of the stream, so that pipelines with other options can be served beside it.
        encode_s: seconds that encode takes for a chunk.
        denoise_s: the same of denoise.
        decode_s: the same of decode.
        jitter: share of its time by which a stage may be faster or slower, 0 to 1, drawn anew for every chunk.
        jitter_seed: what the draws depend on.
        condition_bytes: size of the tensor from encode to denoise.
        latent_bytes: size of the tensor from denoise to decode.
        frames: frames of a chunk.
        height: rows of a frame.
        width: columns of a frame.
        fps: frames per second of media time.
        capacity: chunks that each edge holds.
        refill: when conditions are asked for ahead of their controls, as in `Prefetch.refill`.
        settles: index from which on all conditions are the same, and encode says so; -1: they never are.
    """

    name: str = "emulated"
    encode_s: float = 0.030
    denoise_s: float = 0.120
    decode_s: float = 0.025
    jitter: float = 0.0
    jitter_seed: int = 0
    condition_bytes: int = 0
    latent_bytes: int = 0
    frames: int = 12
    height: int = 24
    width: int = 48
    fps: float = 16.0
    capacity: int = 2
    refill: Refill = "after_stage"
    settles: int = -1


class EmulatedPipeline:
    """Serves the stream of an `Emulation`."""

    array_library: Literal["numpy", "torch"] = "numpy"
    parallel_stages: tuple[str, ...] = ("denoise",)

    def __init__(self, options: Emulation) -> None:
        """Nothing is built yet."""
        self.options = options
        self.spec = emulated_spec(options)

    def build(self, stage: str, device: str) -> Stage:
        """Make a stage; it knows no device but the CPU."""
        check_device(device)
        made: dict[str, type[_Stage]] = {"encode": _Encode, "denoise": _Denoise, "decode": _Decode}
        return made[stage](self.options)

    def check_group(self, world: int) -> None:
        """Any number of ranks will do."""

    def build_parallel(self, stage: str, device: str, ranks: Ranks) -> Stage:
        """Make the stage that all ranks of a group compute; each takes its time, and then waits for the others."""
        check_device(device)
        if stage not in self.parallel_stages:
            raise RequestError("stage", f"{stage!r} is not accepted; accepted: {', '.join(self.parallel_stages)}")
        return _Denoise(self.options, ranks)


def pipeline(**given: str) -> EmulatedPipeline:
    """The pipeline of these options, as they come from a command line.

    Raises:
        RequestError: there is no such option, or its value is refused; the message says what is accepted.
    """
    kinds = {item.name: type(item.default) for item in fields(Emulation)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in kinds:
            raise RequestError(name, f"unknown option of 'emulated'; accepted: {', '.join(kinds)}")
        values[name] = _value(name, text, kinds[name])
    return EmulatedPipeline(Emulation(**values))


def check_device(device: str) -> None:
    """Check that it is one on which nothing is computed.

    Raises:
        RequestError: it isn't.
    """
    if device != "cpu":
        raise RequestError("device", f"{device!r} is not accepted by the emulated pipeline; accepted: cpu")


def emulated_spec(options: Emulation) -> StreamSpec:
    """The dataflow of the world model, with these names and numbers."""
    artifacts = ("encode_request", "condition", "control", "latent", "frames")
    return StreamSpec(
        name=options.name,
        stages=(
            StageSpec("encode", ("encode_request",), ("condition",), settles=options.settles >= 0),
            StageSpec("denoise", ("condition", "control"), ("latent",)),
            StageSpec("decode", ("latent",), ("frames",)),
        ),
        edges=tuple(Edge(artifact, options.capacity) for artifact in artifacts),
        external_inputs=("encode_request", "control"),
        outputs=("frames",),
        initialize_order=("encode", "decode", "denoise"),
        release_order=("decode", "denoise", "encode"),
        control="control",
        chunks_max=CHUNKS_MAX,
        frames_first=options.frames,
        frames_next=options.frames,
        fps=options.fps,
        prefetch=Prefetch("encode_request", 2, "control", "denoise", options.refill),
        latency_anchor="control",
        control_names=KEYS,
        control_aliases=ALIASES,
        parameters=(
            Parameter("seed", "integer", "what the trail begins with", default=0, minimum=0, maximum=2**63 - 1),
        ),
    )


# --- pictures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """What a frame shows.

    Attributes:
        index: its chunk.
        keys: what was applied, in the order of `KEYS`.
        trail: checksum over all that went into this chunk and those before.
    """

    index: int
    keys: tuple[str, ...]
    trail: int


_YELLOW, _CYAN = np.array([1, 1, 0], np.uint8), np.array([0, 1, 1], np.uint8)


def draw(shown: Shown, frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """The frames of a chunk, uint8 [frames, height, width, 3]; the blue of the top band counts the frames."""
    picture = np.zeros((height, width, 3), np.uint8)
    top, middle = height // 3, 2 * height // 3
    lit = [key in shown.keys for key in KEYS]
    picture[:top] = _cells(_bits(shown.index), width)[:, None] * _YELLOW
    picture[top:middle] = _cells(lit, width)[:, None] * _YELLOW
    picture[middle:] = _cells(_bits(shown.trail), width)[:, None] * _CYAN
    clip = np.empty((frames, *picture.shape), np.uint8)
    for number in range(frames):  # one by one: a large clip made at once keeps the interpreter from every other thread
        clip[number] = picture
        clip[number, :top, :, 2] = number % 256
    return clip


def read(frame: NDArray[np.uint8]) -> Shown:
    """What `draw` showed, from one frame [height, width, 3]."""
    height = frame.shape[0]
    bands = [frame[row, :, 1] for row in (0, height // 3, 2 * height // 3)]
    keys = tuple(key for key, lit in zip(KEYS, _lit(bands[1], len(KEYS)), strict=True) if lit)
    return Shown(_number(bands[0]), keys, _number(bands[2]))


def _bits(number: int) -> list[bool]:
    return [bool(number >> at & 1) for at in reversed(range(BITS))]


def _cells(lit: list[bool], width: int) -> NDArray[np.uint8]:
    levels = np.where(lit, LIT, DARK).astype(np.uint8)
    return levels[np.arange(width) * len(lit) // width]


def _lit(band: NDArray[np.uint8], cells: int) -> list[bool]:
    first = [-(-cell * len(band) // cells) for cell in range(cells)]
    return [int(level) > (LIT + DARK) // 2 for level in band[first]]


def _number(band: NDArray[np.uint8]) -> int:
    return sum(1 << (BITS - 1 - at) for at, lit in enumerate(_lit(band, BITS)) if lit)


# --- stages ----------------------------------------------------------------------------------------------------------


class _Stage(ABC):
    """What the three stages share: a trail per session, and the wait for the end of a chunk's time."""

    session_bytes = 1024
    name = ""

    def __init__(self, options: Emulation) -> None:
        self._options = options
        self._seconds: float = getattr(options, f"{self.name}_s")
        self._never = threading.Event()
        self._seeds: dict[str, int] = {}
        self._trails: dict[str, int] = {}

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:  # noqa: ARG002
        """Begin a trail with the seed."""
        self._seeds[session] = request["seed"]
        self._trails[session] = zlib.crc32(str(request["seed"]).encode())
        return Initialized(cache_bytes=self.session_bytes)

    def run(
        self,
        session: str,
        index: int,
        inputs: Mapping[str, Values],
        *,
        is_first: bool,  # noqa: ARG002
        is_last: bool,  # noqa: ARG002
    ) -> StageResult:
        """Make a chunk, and give it out when its time is over."""
        until = time.monotonic() + self._seconds * self._stretch(self._seeds[session], index)
        result = self._make(session, index, inputs)
        while (left := until - WAKES_LATE_S - time.monotonic()) > 0:
            self._never.wait(left)
        while time.monotonic() < until:
            pass
        return result

    def release(self, session: str) -> None:
        """Forget a session."""
        self._seeds.pop(session, None)
        self._trails.pop(session, None)

    @abstractmethod
    def _make(self, session: str, index: int, inputs: Mapping[str, Values]) -> StageResult:
        """Make a chunk."""

    def _stretch(self, seed: int, index: int) -> float:
        """A factor for the time of a chunk: of seeds, stage and index, not of what was drawn before."""
        if not self._options.jitter:
            return 1.0
        draw = Random(f"{self._options.jitter_seed} {self.name} {seed} {index}").uniform(-1, 1)  # noqa: S311
        return 1.0 + self._options.jitter * draw


class _Encode(_Stage):
    """Makes conditions: nothing but a function of the seed and the index, up to where they settle."""

    name = "encode"

    def _make(self, session: str, index: int, inputs: Mapping[str, Values]) -> StageResult:  # noqa: ARG002
        settles = self._options.settles
        settled = 0 <= settles <= index
        mark = _onward(self._trails[session], settles if settled else index)
        tensor = _payload("condition", self._options.condition_bytes, mark)
        return StageResult({"condition": {"mark": mark, **tensor}}, constant=settled)


class _Denoise(_Stage):
    """Applies the control: its trail goes on from chunk to chunk, as a key/value cache does.

    In a group every rank has the whole trail, and a chunk is done when the trails of all have been seen to be the same.
    """

    name = "denoise"

    def __init__(self, options: Emulation, ranks: Ranks | None = None) -> None:
        super().__init__(options)
        self._ranks = ranks

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """Make a chunk, and give it out when the others have theirs."""
        result = super().run(session, index, inputs, is_first=is_first, is_last=is_last)
        if self._ranks is not None:
            trails = set(gather_numbers(self._ranks, self._trails[session]))
            if len(trails) > 1:
                raise RuntimeError(f"the ranks of the group made {len(trails)} chunks {index} in place of one")
        return result

    def _make(self, session: str, index: int, inputs: Mapping[str, Values]) -> StageResult:
        condition, control = inputs["condition"], inputs["control"]
        held = control.get("keys", [])
        keys = [key for key in KEYS if key in held]
        came = (condition["mark"], _checksum(condition, "condition"), keys, bool(control.get("reset_pose", False)))
        trail = self._trails[session] = _onward(self._trails[session], index, *came)
        tensor = _payload("latent", self._options.latent_bytes, trail)
        return StageResult({"latent": {"trail": trail, "keys": keys, **tensor}}, {"trail": trail})


class _Decode(_Stage):
    """Shows what a chunk was made from; its own trail goes on too, as a decoder's feature cache does."""

    name = "decode"

    def _make(self, session: str, index: int, inputs: Mapping[str, Values]) -> StageResult:
        latent, options = inputs["latent"], self._options
        trail = _onward(self._trails[session], latent["trail"], _checksum(latent, "latent"))
        self._trails[session] = trail
        shown = Shown(index, tuple(latent["keys"]), trail)
        return StageResult({"frames": {"frames": draw(shown, options.frames, options.height, options.width)}})


def _onward(trail: int, *parts: object) -> int:
    return zlib.crc32(repr(parts).encode(), trail)


def _payload(name: str, nbytes: int, mark: int) -> dict[str, Any]:
    """A tensor of that size, or none; its bytes are a function of `mark`, and no two neighbours are the same."""
    if not nbytes:
        return {}
    pattern = np.resize(np.arange(251, dtype=np.uint8), nbytes)  # a prime, so that whole pages don't look alike
    return {name: (pattern + np.uint8(mark & 0xFF)) ^ np.uint8(mark >> 8 & 0xFF)}


def _checksum(values: Values, name: str) -> int:
    return zlib.crc32(values[name]) if name in values else 0


# --- options ---------------------------------------------------------------------------------------------------------

_INTEGERS = {
    "jitter_seed": (0, 1 << 63),
    "condition_bytes": (0, BYTES_MAX),
    "latent_bytes": (0, BYTES_MAX),
    "frames": (1, 4096),
    "height": (4, 8192),
    "width": (BITS, 8192),
    "capacity": (1, 64),
    "settles": (-1, CHUNKS_MAX),
}
_NUMBERS = {
    "encode_s": (0.0, SECONDS_MAX),
    "denoise_s": (0.0, SECONDS_MAX),
    "decode_s": (0.0, SECONDS_MAX),
    "jitter": (0.0, 1.0),
    "fps": (0.01, 1000.0),
}


def _value(name: str, text: str, kind: type) -> str | int | float:
    if name == "refill":
        if text not in get_args(Refill):
            raise RequestError(name, f"{text!r} is not accepted; accepted: {', '.join(get_args(Refill))}")
        return text
    if kind is str:
        if not text.strip():
            raise RequestError(name, "is empty; accepted: a name")
        return text
    least, most = _INTEGERS[name] if kind is int else _NUMBERS[name]
    try:
        value: int | float = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        what = "an integer" if kind is int else "a number"
        raise RequestError(name, f"{text!r} is not accepted; accepted: {what} from {least:g} to {most:g}")
    return value
