"""Kinds of jobs that take the time that they are told to, and compute next to nothing: for benchmarks and tests.

::

    reelwire worker --pipeline emulated --jobs emulated --job-option step_s=0.2

A job goes through its steps as a diffusion model with two experts does: the first `switch` steps are of stage
``denoise_high``, the others of ``denoise_low``. It keeps a *latent*, which each step changes by a function of seed, media
and step, and a *trail*, a checksum over all that went in. Both are its state, so that a job which goes on from a checkpoint
ends as one that was never disturbed, bit for bit; and the clip that it makes shows, as patterns that `emulated.read` finds
again, how many steps were taken and which trail came out. A step that was lost or taken twice shows.

In a group of several ranks each takes its time, then the ranks exchange bytes, as attention over a shared sequence does, and
compare their trails: so they depend on each other at every step.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reelwire.errors import RequestError
from reelwire.job_spec import JobSpec, MediaInput
from reelwire.pipeline.job import JobModel, JobOutput, JobRequest, JobRun, JobStep
from reelwire.pipeline.stage import Ranks
from reelwire.spec import Parameter

from .collectives import gather_numbers, swap_bytes
from .emulated import Shown, check_device, draw

STEPS_MAX = 10_000
STAGES = ("denoise_high", "denoise_low")
LATENT_BYTES_MIN = 1 << 10
_BYTES_MAX = 1 << 30
_FAILURES = ("error", "memory", "request")
_KINDS = {
    "emulated": ("Takes its time, and draws how it was spent", ()),
    "emulated-v2v": ("The same, with a video that goes into it", (MediaInput("video", "video", 1, 1),)),
    "emulated-rv2v": (
        "The same, with a video and pictures that go into it",
        (MediaInput("video", "video", 1, 1), MediaInput("images", "image", 1, 5)),
    ),
}


@dataclass(frozen=True, slots=True)
class JobEmulation:
    """The options of these kinds of jobs; on a command line each is a text.

    Attributes:
        step_s: seconds that a step takes.
        jitter: share of it by which a step may be faster or slower, 0 to 1, drawn anew for every step and rank.
        slow_rank: a rank that takes twice the time; -1: none.
        state_bytes: size of the latent, and so of a checkpoint and of what a job holds in memory.
        exchange_bytes: bytes that a rank sends to each other one at every step; 0: ranks compare trails alone.
        times: 1: the facts of a job also say what its steps and the yields between them took, which is never the same.
    """

    step_s: float = 0.05
    jitter: float = 0.0
    slow_rank: int = -1
    state_bytes: int = 1 << 16
    exchange_bytes: int = 1 << 10
    times: int = 0


class EmulatedJobs:
    """The kinds of jobs of a `JobEmulation`."""

    array_library: Literal["numpy", "torch"] = "numpy"

    def __init__(self, options: JobEmulation) -> None:
        """There is nothing to load."""
        self.options = options
        self.jobs = tuple(
            JobSpec(name, description, _parameters(), media, STAGES) for name, (description, media) in _KINDS.items()
        )

    def check_group(self, world: int) -> None:
        """Any number of ranks will do."""

    def build(self, device: str, ranks: Ranks) -> JobModel:
        """Make the model; it knows no device but the CPU."""
        check_device(device)
        return _Model(self.options, ranks)


def pipeline(**given: str) -> EmulatedJobs:
    """The kinds of jobs of these options, as they come from a command line.

    Raises:
        RequestError: there is no such option, or its value is refused; the message says what is accepted.
    """
    kinds = {item.name: type(item.default) for item in fields(JobEmulation)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in kinds:
            raise RequestError(name, f"unknown option of the emulated jobs; accepted: {', '.join(kinds)}")
        values[name] = _value(name, text, kinds[name])
    return EmulatedJobs(JobEmulation(**values))


def expected_trail(parameters: Mapping[str, Any], media: Mapping[str, tuple[Path, ...]]) -> int:
    """The trail of an undisturbed job with this request."""
    trail = _first_trail(parameters, media)
    for step in range(parameters["steps"]):
        trail = _onward(trail, step)
    return trail


def _parameters() -> tuple[Parameter, ...]:
    return (
        Parameter("prompt", "string", "goes into the trail, and says nothing to anybody", default="", maximum=10_000),
        Parameter("seed", "integer", "what trail and latent begin with", default=0, minimum=0, maximum=2**63 - 1),
        Parameter("steps", "integer", "how many there are", default=40, minimum=1, maximum=STEPS_MAX),
        Parameter("switch", "integer", "steps of the first expert", default=20, minimum=0, maximum=STEPS_MAX),
        Parameter("frames", "integer", "of the clip", default=9, minimum=1, maximum=1 << 12, multiple_of=4),
        Parameter("width", "integer", "columns of a frame", default=128, minimum=64, maximum=4096),
        Parameter("height", "integer", "rows of a frame", default=96, minimum=24, maximum=4096),
        Parameter("fps", "number", "frames per second", default=16.0, minimum=0.01, maximum=240.0),
        Parameter("profile", "string", "ramp: late steps take half as long", default="even", choices=("even", "ramp")),
        Parameter("fail_at", "integer", "the step that raises; -1: none", default=-1, minimum=-1, maximum=STEPS_MAX),
        Parameter("fail_rank", "integer", "the rank that does; -1: all", default=-1, minimum=-1, maximum=1023),
        Parameter("failure", "string", "what is raised", default="error", choices=_FAILURES),
    )


# --- a job -----------------------------------------------------------------------------------------------------------


class _Model:
    """Does one job at a time."""

    def __init__(self, options: JobEmulation, ranks: Ranks) -> None:
        self._options = options
        self._ranks = ranks
        self._never = threading.Event()

    def run(self, request: JobRequest) -> JobRun:
        """See the module."""
        return self._steps(request.parameters, request)

    def _steps(self, given: Mapping[str, Any], request: JobRequest) -> Generator[JobStep, None, JobOutput]:
        steps, switch = given["steps"], min(given["switch"], given["steps"])
        nbytes = 3 * given["frames"] * given["height"] * given["width"]
        if nbytes > _BYTES_MAX:
            raise RequestError("frames", f"a clip of {nbytes} bytes is too large; accepted: {_BYTES_MAX}")
        if request.checkpoint is None:
            first, trail = 0, _first_trail(given, request.media)
            latent = np.random.default_rng(trail).standard_normal(self._size, np.float32)
        else:
            first, trail = request.checkpoint["step"], request.checkpoint["trail"]
            latent = request.checkpoint["latent"].copy()

        yields: list[float] = []
        began = time.perf_counter()
        for step in range(first, steps):

            def state(step: int = step, trail: int = trail) -> dict[str, Any]:
                return {"step": step, "trail": trail, "latent": latent}

            stood = time.perf_counter()
            if step < switch:
                yield JobStep(STAGES[0], step, switch, state)
            else:
                yield JobStep(STAGES[1], step - switch, steps - switch, state)
            went_on = time.perf_counter()
            if step == first:
                began = went_on  # what was before the first step is no yield between steps
            else:
                yields.append(went_on - stood)
            self._take_time(given, step)
            self._fail(given, step)
            trail = _onward(trail, step)
            _transform(latent, trail)
            self._meet(step, trail)
        mark = zlib.crc32(latent.data, trail)
        frames = given["frames"] if self._ranks.rank == 0 else 1  # of the others nobody wants a clip
        clip = draw(Shown(steps, (), trail), frames, given["height"], given["width"])
        times = _times(time.perf_counter() - began, yields) if self._options.times else {}
        return JobOutput(clip, given["fps"], {"trail": trail, "steps": steps, "latent": mark, **times})

    @property
    def _size(self) -> int:
        return max(self._options.state_bytes, LATENT_BYTES_MIN) // 4

    def _take_time(self, given: Mapping[str, Any], step: int) -> None:
        seconds, rank = self._options.step_s, self._ranks.rank
        if given["profile"] == "ramp":
            seconds *= 1.0 - 0.5 * step / given["steps"]
        if rank == self._options.slow_rank:
            seconds *= 2.0
        if self._options.jitter:
            draw_ = Random(f"{given['seed']} {rank} {step}").uniform(-1, 1)  # noqa: S311
            seconds *= 1.0 + self._options.jitter * draw_
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._never.wait(left)

    def _fail(self, given: Mapping[str, Any], step: int) -> None:
        if step != given["fail_at"] or given["fail_rank"] not in (-1, self._ranks.rank):
            return
        match given["failure"]:
            case "memory":
                raise MemoryError(f"no room for step {step}")
            case "request":
                raise RequestError("fail_at", f"step {step} can't be taken; accepted: another one")
            case _:
                raise RuntimeError(f"step {step} fails, as asked for")

    def _meet(self, step: int, trail: int) -> None:
        if self._ranks.world == 1:
            return
        if self._options.exchange_bytes:
            mine = np.full((self._ranks.world, self._options.exchange_bytes), trail & 0xFF, np.uint8)
            if not np.array_equal(swap_bytes(self._ranks, mine), mine):
                raise RuntimeError(f"other bytes came from the ranks of the group at step {step}")
        if len(set(gather_numbers(self._ranks, trail))) > 1:
            raise RuntimeError(f"the ranks of the group don't agree about step {step}")


def _times(seconds: float, yields: list[float]) -> dict[str, float]:
    """What the steps took in all, and what it took to go on from one to the next: decisions, and whatever slipped in."""
    yields.sort()
    middle, last = (yields[len(yields) // 2], yields[-1 - len(yields) // 100]) if yields else (0.0, 0.0)
    return {"steps_s": seconds, "yield_p50_s": middle, "yield_p99_s": last}


def _first_trail(given: Mapping[str, Any], media: Mapping[str, tuple[Path, ...]]) -> int:
    digest = hashlib.sha256(repr((given["seed"], given["prompt"], given["steps"])).encode())
    for name in sorted(media):
        for path in media[name]:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return zlib.crc32(digest.digest())


def _onward(trail: int, step: int) -> int:
    return zlib.crc32(step.to_bytes(4, "little"), trail)


def _transform(latent: NDArray[np.float32], trail: int) -> None:
    """A step of the latent, in place: float32 operations whose order and rounding are fixed."""
    scale, shift = np.float32(1.0 + (trail & 0xFF) / 1024.0), np.float32((trail >> 8 & 0xFFFF) / 65536.0 - 0.5)
    np.multiply(latent, scale, out=latent)
    np.add(latent, shift, out=latent)
    np.remainder(latent, np.float32(4.0), out=latent)


# --- options ---------------------------------------------------------------------------------------------------------

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "step_s": (0.0, 3600.0),
    "jitter": (0.0, 1.0),
    "slow_rank": (-1, 1023),
    "state_bytes": (0, _BYTES_MAX),
    "exchange_bytes": (0, _BYTES_MAX),
    "times": (0, 1),
}


def _value(name: str, text: str, kind: type) -> int | float:
    least, most = _BOUNDS[name]
    try:
        value: int | float = kind(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        what = "an integer" if kind is int else "a number"
        raise RequestError(name, f"{text!r} is not accepted; accepted: {what} from {least:g} to {most:g}")
    return value
