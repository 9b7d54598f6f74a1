"""What is done with jobs on one rank: their weights loaded, a job begun, stepped, kept and closed; one job at a time.

A job is a generator (`pipeline.job`): between its steps nothing of it runs here, and whatever else the group has to do is
done there. It is closed when it ends, fails or is given up, and with that everything it holds is let go of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgpack
import numpy as np

from reelwire.errors import RequestError
from reelwire.messages import Failure, RunJob

from .checkpoints import Snapshot, read_values, snapshot_of
from .collectives import share_files
from .device import Device, is_out_of_memory
from .files import offers_of
from .group_events import KeepJob, OrderReport, StartJob, StepJob
from .stage_work import said, short
from .values import to_facts

if TYPE_CHECKING:
    from reelwire.job_spec import JobSpec
    from reelwire.pipeline.job import JobModel, JobOutput, JobPipeline, JobRun, JobStep
    from reelwire.pipeline.stage import Ranks

STEPS_MAX = 1_000_000_000
"""Most steps that a stage may say it has."""
FACTS_BYTES_MAX = 64 << 10
"""Most bytes of the facts of a result; they travel in a message's header, and stand in the broker's journal."""


class JobWork:
    """The jobs of one rank, and how they are called; all on one thread.

    Args:
        pipeline: the kinds.
        device: where they compute.
        ranks: the group, once it is asked for.
        folder: where what the leader shares is written.
    """

    def __init__(self, pipeline: JobPipeline, device: Device, ranks: Callable[[], Ranks], folder: Path) -> None:
        """Nothing is loaded yet."""
        self._pipeline = pipeline
        self._specs = {spec.name: spec for spec in pipeline.jobs}
        self._device = device
        self._ranks = ranks
        self._folder = folder
        self._model: JobModel | None = None
        self._spec: JobSpec | None = None
        self._run: RunJob | None = None
        self._generator: JobRun | None = None
        self._step: JobStep | None = None
        self._shared: list[Path] = []

    def load(self) -> None:
        """Load the weights of all kinds."""
        if self._pipeline.array_library == "torch":
            self._device.open()
        with self._device.current():
            self._model = self._pipeline.build(self._device.name, self._ranks())
        self._device.synchronize()

    def start(self, order: StartJob) -> OrderReport:
        """Begin a job, up to its first yield.

        Raises:
            Exception: whatever the job raises.
        """
        from reelwire.pipeline.job import JobRequest

        assert self._model is not None, "a job came before the weights"
        assert self._generator is None, "a job is begun before the last one is closed"
        run, paths, ranks = order.run, dict(order.files), self._ranks()
        self._run, self._spec = run, self._specs[run.kind]
        if order.share:
            paths, self._shared = share_files(ranks, list(offers_of(run)), paths, self._folder)
        checkpoint = None
        if run.checkpoint is not None:
            checkpoint = read_values(paths[run.checkpoint.file], self._pipeline.array_library)
        media = {name: tuple(Path(paths[each.file]) for each in offers) for name, offers in run.media.items()}
        with self._device.current():
            self._generator = self._model.run(JobRequest(run.kind, dict(run.parameters), media, checkpoint))
        del checkpoint
        return self._go_on(order)

    def step(self, order: StepJob) -> OrderReport:
        """Go on with the job, to its next yield or its end.

        Raises:
            Exception: whatever the job raises.
        """
        return self._go_on(order)

    def keep(self, order: KeepJob) -> OrderReport:
        """Take the state of the job where it stands.

        Raises:
            Exception: whatever the job raises, or a ValueError if its state has no place in a file.
        """
        assert self._run is not None, "no job is to be kept"
        assert self._step is not None, "no job is to be kept"
        if self._step.state is None:
            raise ValueError(f"the state of {self._run.kind} can't be kept before {self._step.stage}")
        with self._device.current():
            values = self._step.state()
        self._device.synchronize()
        return self._standing(order, snapshot=snapshot_of(values))

    def close(self) -> None:
        """Close the job, wherever it is, or do nothing if there is none; what it held is given back, whatever it raises.

        That includes what only holds itself: such objects would keep connections of a process group open.

        Raises:
            Exception: what the job raises when it is closed.
        """
        generator, held = self._generator, self._run is not None
        self._generator = self._step = self._run = self._spec = None
        try:
            if generator is not None:
                with self._device.current():
                    generator.close()
        finally:
            del generator
            for path in self._shared:
                path.unlink(missing_ok=True)
            self._shared = []
            if held:
                self._device.give_memory_back()

    def _go_on(self, order: StartJob | StepJob) -> OrderReport:
        from reelwire.pipeline.job import JobStep

        generator, spec = self._generator, self._spec
        if generator is None or spec is None:
            raise ValueError("there is no job to go on with")
        self._step = None
        try:
            with self._device.current():
                step = next(generator)
        except StopIteration as end:
            output = end.value
        else:
            self._device.synchronize()
            if not isinstance(step, JobStep):
                raise ValueError(f"{spec.name} yields a {type(step).__name__}; accepted: a JobStep")  # noqa: TRY004
            _check_step(spec, step)
            self._step = step
            return self._standing(order)
        self._device.synchronize()
        checked = _checked_output(spec, output, counts=self._ranks().rank == 0)
        self.close()
        return OrderReport(order, output=checked)

    def _standing(self, order: StartJob | StepJob | KeepJob, snapshot: Snapshot | None = None) -> OrderReport:
        step = self._step
        assert step is not None, "the job stands nowhere"
        keeps = step.state is not None and self._ranks().rank == 0
        return OrderReport(order, stage=step.stage, step=step.step, steps=step.steps, keeps=keeps, snapshot=snapshot)


def _check_step(spec: JobSpec, step: JobStep) -> None:
    if step.stage not in spec.stages:
        raise ValueError(f"{spec.name} is at stage {step.stage!r}; its spec says {', '.join(spec.stages)}")
    counts = (step.step, step.steps)
    if any(type(count) is not int for count in counts) or not 0 <= step.step <= step.steps <= STEPS_MAX:
        raise ValueError(f"{spec.name} is at step {step.step!r} of {step.steps!r} of {step.stage}")
    if step.state is not None and not callable(step.state):
        raise ValueError(f"{spec.name} has a {type(step.state).__name__} as its state; accepted: a function, or None")


def _checked_output(spec: JobSpec, output: Any, *, counts: bool) -> JobOutput:
    """What a job has made, if it can be made a file; of a rank whose output doesn't count nothing is kept."""
    from reelwire.pipeline.job import JobOutput

    if not isinstance(output, JobOutput):
        raise ValueError(f"{spec.name} ends with a {type(output).__name__}; accepted: a JobOutput")  # noqa: TRY004
    if not counts:
        return JobOutput(np.empty((0, 0, 0, 3), np.uint8))
    frames: Any = output.frames
    if not isinstance(frames, np.ndarray):
        raise ValueError(f"{spec.name} made a {type(frames).__name__}; accepted: uint8[frames, height, width, 3]")  # noqa: TRY004
    shape = frames.shape
    if frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
        raise ValueError(
            f"{spec.name} made {frames.dtype}{list(shape)}; accepted: uint8[frames, height, width, 3] with pixels in it"
        )
    if spec.suffix == ".png" and shape[0] != 1:
        raise ValueError(f"{spec.name} made {shape[0]} frames; of a picture one is accepted")
    fps = output.fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not math.isfinite(fps) or fps <= 0:
        raise ValueError(f"{spec.name} made {fps!r} frames per second; accepted: a number above 0")
    facts = to_facts(output.facts)
    try:
        nbytes = len(cast("bytes", msgpack.packb(facts)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{spec.name} says facts that can't be sent: {error}") from None
    if nbytes > FACTS_BYTES_MAX:
        raise ValueError(f"{spec.name} says facts of {nbytes} bytes; accepted: {FACTS_BYTES_MAX}")
    return JobOutput(frames, float(fps), facts)


def failure_of(error: BaseException, what: str) -> Failure:
    """Why an order failed, as others are told."""
    if isinstance(error, RequestError):
        return Failure("request", short(error.reason), what, field=error.field)
    text = said(error)
    return Failure("stage", short(f"out of memory: {text}") if is_out_of_memory(error) else text, what)
