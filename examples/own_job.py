"""A kind of job of your own, in numpy alone: melts a clip, by mixing each frame with its neighbours, step after step.

Serve it, in one terminal, beside a pipeline that needs no model::

    reelwire up --pipeline emulated --jobs examples/own_job.py:jobs

and use it, in another, which draws a clip, ``in.mp4``, and writes what comes of it, ``melt.mp4``::

    python examples/own_job.py

or from the command line, with any clip; ``reelwire status --kinds`` shows what it takes::

    reelwire edit melt --video in.mp4 --set steps=20 --set strength=0.4 --out melt.mp4

A kind is a spec and a generator. The spec says what a request may bring; the broker reads it, refuses what doesn't fit before
any worker sees it, and does the rest: queue, files, progress, cancels, recovery. The generator runs on every rank of a
worker group and yields before each step: there a chunk of a stream may slip in, a cancel end the job, or the state be kept
from which another attempt goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any, Literal

import numpy as np

from reelwire import Client
from reelwire.job_spec import JobSpec, MediaInput
from reelwire.media import VideoWriter, read_video
from reelwire.pipeline.job import JobOutput, JobRequest, JobRun, JobStep
from reelwire.pipeline.stage import Ranks
from reelwire.spec import Parameter, RequestError

SPEC = JobSpec(
    name="melt",
    description="Mixes each frame of a clip with its neighbours, step after step",
    parameters=(
        Parameter("steps", "integer", "how often", default=20, minimum=1, maximum=1000),
        Parameter("strength", "number", "share of the neighbours in a step", default=0.4, minimum=0.0, maximum=0.5),
    ),
    media=(MediaInput("video", "video", least=1, most=1, frames_max=600, pixels_max=1920 * 1080),),
    stages=("melt",),
)


class Melt:
    """The model on one rank; it has no weights. All ranks do the same here; see `pipeline/parallel.py` to share work."""

    def run(self, request: JobRequest) -> JobRun:
        """Check what the spec can't say, then hand out the generator."""
        frames, fps = read_video(request.media["video"][0])
        if len(frames) < 3:
            raise RequestError("video", f"has {len(frames)} frames; accepted: 3 or more")
        return self._steps(request, frames, fps)

    def _steps(self, request: JobRequest, frames: Any, fps: float) -> Generator[JobStep, None, JobOutput]:
        steps, strength = request.parameters["steps"], np.float32(request.parameters["strength"])
        first, now = 0, frames.astype(np.float32)
        if request.checkpoint is not None:  # an earlier attempt came that far
            first, now = request.checkpoint["step"], request.checkpoint["frames"]
        for step in range(first, steps):

            def state(step: int = step, now: Any = now) -> dict[str, Any]:
                return {"step": step, "frames": now}

            yield JobStep("melt", step, steps, state)
            before, after = np.roll(now, 1, axis=0), np.roll(now, -1, axis=0)
            now = now + strength * ((before + after) / 2 - now)
        return JobOutput(np.clip(now, 0, 255).astype(np.uint8), fps, facts={"frames": len(now)})


class Jobs:
    """What a worker is given: the kinds, and how to build their model, once for each rank."""

    jobs = (SPEC,)
    array_library: Literal["numpy", "torch"] = "numpy"

    def check_group(self, world: int) -> None:
        """Any number of ranks will do."""

    def build(self, device: str, ranks: Ranks) -> Melt:  # noqa: ARG002  it doesn't matter which rank this is
        """Make the model; numpy knows no device but the CPU."""
        if device != "cpu":
            raise RequestError("device", f"{device!r} is not accepted; accepted: cpu")
        return Melt()


jobs = Jobs()


def draw(path: str) -> None:
    """Write a clip to begin with: a square that crosses a dark ground."""
    frames = np.full((24, 96, 128, 3), 24, np.uint8)
    for index, frame in enumerate(frames):
        frame[32:64, 4 * index : 4 * index + 32] = (240, 160, 32)
    with VideoWriter(path, 12.0) as video:
        video.write(frames)


def main(out: str = "melt.mp4") -> None:
    """Melt a clip, and write what comes of it."""
    draw("in.mp4")
    with Client() as client:
        job = client.submit_edit("melt", video="in.mp4", steps=20)
        for status in job.progress():
            print(status.state, f"{status.step}/{status.steps}" if status.state == "running" else "")
        print(f"wrote {job.result(out)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
