"""What a kind of job is to the workers that do it: a description, and a generator that yields between its steps.

Nothing here needs torch. A job runs on every rank of a worker group at once, in the same order of steps: a chunk of a stream
may run between any two of them, a cancel or a checkpoint may come there, and nowhere else.

What runs in between runs on the same thread: a generator holds no context of torch's (`inference_mode`, a stream) while it
yields. And the worker's signs of life come from another thread of the process: a single call that keeps the interpreter for
itself for longer than the broker waits for them (its settings ``heartbeat_s`` times ``missed``, 3 s) looks like a dead rank.
Calls of torch, and most of numpy, let it go.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from reelwire.job_spec import JobSpec

from .stage import Ranks, Values


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job was asked to do; checked against its `JobSpec`.

    Attributes:
        kind: name of the spec.
        parameters: complete, defaults filled in.
        media: name of the input to the files of it, in the order of the request; they are only read.
        checkpoint: what a `JobStep.state` of an earlier attempt gave, with arrays of the job's `array_library`; None: from
            the beginning.
    """

    kind: str
    parameters: Values
    media: Mapping[str, tuple[Path, ...]]
    checkpoint: Values | None = None


@dataclass(frozen=True, slots=True)
class JobStep:
    """Where a job stands; what a generator yields before each step, and between its stages.

    Attributes:
        stage: the stage that follows, one of `JobSpec.stages`.
        step: steps of that stage that are done.
        steps: steps that it has.
        state: gives what `JobRequest.checkpoint` of a later attempt needs to go on from here, bit for bit; called, if at
            all, before the generator goes on, and on rank 0 alone, so it runs no collective. Named values: plain ones and
            arrays. None: nothing can be kept here.
    """

    stage: str
    step: int
    steps: int
    state: Callable[[], Values] | None = None


@dataclass(frozen=True, slots=True)
class JobOutput:
    """What a job has made; of rank 0 alone it counts.

    Attributes:
        frames: uint8 [frames, height, width, 3], RGB; of one frame a picture is made. They are encoded after the end of the
            generator, while the next job runs: nobody writes to them any more.
        fps: frames per second.
        facts: small plain values that go to the client.
    """

    frames: NDArray[np.uint8]
    fps: float = 16.0
    facts: Mapping[str, Any] = field(default_factory=dict)


JobRun = Generator[JobStep, None, JobOutput]


class JobModel(Protocol):
    """Kinds of jobs with their weights, on one rank."""

    def run(self, request: JobRequest) -> JobRun:
        """Do a job; called on every rank of the group with the same request.

        The generator is closed (`GeneratorExit`) when the job is cancelled or a rank of the group has failed: whatever was
        moved or made for it is put back then, in a ``finally``.

        Raises:
            RequestError: the request can't be served; the field says why.
        """
        ...


class JobPipeline(Protocol):
    """Kinds of jobs that a worker can do.

    Attributes:
        jobs: the kinds.
        array_library: what arrays of a checkpoint are.
    """

    jobs: tuple[JobSpec, ...]
    array_library: Literal["numpy", "torch"]

    def check_group(self, world: int) -> None:
        """Check that a group of `world` ranks can do them; loads nothing.

        Raises:
            RequestError: it can't; the field is ``world``.
        """
        ...

    def build(self, device: str, ranks: Ranks) -> JobModel:
        """Load the weights of all kinds onto `device`; `ranks` as of `ParallelPipeline.build_parallel`."""
        ...
