"""What is done with the jobs of one stage: built, given sessions, run and released, on whichever thread it lives.

It turns what a message holds into what a stage takes, and what a stage makes into a message (`values`); what went into
shared memory and isn't sent after all is taken back before anybody hears of it.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from reelwire import wire
from reelwire.checks import printable
from reelwire.errors import RequestError, WireError
from reelwire.messages import (
    Applied,
    Artifact,
    Failure,
    InitializeStage,
    Phase,
    ReleaseStage,
    RunTask,
    StageFailed,
    StageInitialized,
    StageReady,
    StageReleased,
    TaskDone,
)
from reelwire.segments import MemoryLostError, Piece
from reelwire.tensors import Inline

from .actions import BuildStage, Job
from .device import Device, is_out_of_memory
from .events import Finished, Reply
from .memory import SharedMemory
from .values import from_artifact, to_artifact, to_facts

if TYPE_CHECKING:
    from reelwire.pipeline.stage import Pipeline, Stage

MESSAGE_CHARS_MAX = 2000
_PHASES: dict[type, Phase] = {
    BuildStage: "build",
    InitializeStage: "initialize",
    RunTask: "run",
    ReleaseStage: "release",
}


T = TypeVar("T")
W = TypeVar("W", InitializeStage, RunTask)


class Complete(Protocol):
    """What gives the work of a stage with all of its tensors."""

    def __call__(self, work: W, /) -> W:
        """The same, complete."""
        ...


class StageWork:
    """One stage, and how it is called.

    Args:
        pipeline: what the stage is part of.
        stage: its name.
        device: where it lives.
        cache_bytes_max: most bytes that all sessions together may hold here.
        memory: the shared memory of the process; None: everything travels inside of messages.
        make: builds the stage from its name and the name of its device, in place of `pipeline.build`.
        counts: what the stage makes is told to somebody; on a rank that doesn't lead its group it isn't.
        raised: told of each error that the stage raised, before anything else is done about it.
        agree: asked when a session is about to be begun, and once more when it was, with whether it is refused here; it
            raises where it is refused elsewhere, and then it isn't begun.
        complete: gives what a session is begun with, or a chunk made of, with the tensors that another rank has of it.

    Attributes:
        limits: what the broker accepts; written by the loop when the broker says it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stage: str,
        device: Device,
        cache_bytes_max: int,
        memory: SharedMemory | None = None,
        make: Callable[[str, str], Stage] | None = None,
        *,
        counts: bool = True,
        raised: Callable[[BaseException], None] = lambda _: None,
        agree: Callable[[bool], None] = lambda _: None,
        complete: Complete = lambda work: work,
    ) -> None:
        """Nothing is built yet."""
        self.limits = wire.Limits()
        self._pipeline = pipeline
        self._name = stage
        self._device = device
        self._cache_bytes_max = cache_bytes_max
        self._memory = memory or SharedMemory(0)
        self._make = make or pipeline.build
        self._counts = counts
        self._raised = raised
        self._agree = agree
        self._complete = complete
        self._taken: list[Piece] = []
        self._held: dict[str, int] = {}
        self._stage: Stage | None = None
        self._spec = pipeline.spec.stage(stage)
        self._produces = frozenset(self._spec.produces)
        self._spent: list[object] = []

    def do(self, job: Job) -> Finished:
        """Do one job, whatever comes of it; on the thread of the stage."""
        try:
            with self._device.current():
                reply = self._perform(job)
            if isinstance(reply, TaskDone):
                # All that is likely to be too large, before another stage is given it.
                _check_tensors(reply, self.limits)
            else:
                _check_sendable(reply, self.limits)
        except BaseException as error:  # noqa: BLE001 - whatever a stage raises fails its session, not the worker
            trace = "".join(traceback.format_exception(error))
            failed, out_of_memory = self._failed(job, error), is_out_of_memory(error)
            self._raised(error)
        else:
            pieces = tuple([piece.use for piece in self._taken])
            self._taken.clear()
            pack = partial(self._pack, job, reply) if isinstance(reply, TaskDone) else None
            return Finished(self._name, job, reply, "", pieces, pack)
        # Out of the handler, where no frame of the stage keeps its tensors alive any more.
        self._spent.clear()
        self._memory.take_back(piece.use for piece in self._taken)
        self._taken.clear()
        if isinstance(job.work, InitializeStage):
            self._drop_partial(job.work.session)
        if out_of_memory:
            self._device.give_memory_back()
        return Finished(self._name, job, failed, trace)

    def _pack(self, job: Job, reply: TaskDone) -> wire.Packed | StageFailed:
        try:
            return _packed(reply, self.limits)
        except ValueError as error:
            return self._failed(job, error)

    def rest(self) -> None:
        """Let go of the tensors of the last job; that takes its time, and the result has left."""
        self._spent.clear()

    def _perform(self, job: Job) -> Reply:
        work = job.work
        if isinstance(work, BuildStage):
            return self._build(work)
        stage = self._stage
        assert stage is not None, "a job came before the build"
        match work:
            case RunTask():
                return self._run(stage, work, job.applied)
            case InitializeStage():
                return self._initialize(stage, work)
            case ReleaseStage():
                stage.release(work.session)
                self._held.pop(work.session, None)
                return StageReleased(work.session, work.stage, work.epoch, work.stage_epoch)

    def _build(self, work: BuildStage) -> StageReady:
        if self._pipeline.array_library == "torch":
            self._device.open()
        with self._device.current():
            self._stage = self._make(work.stage, self._device.name)
            expected = _bytes("session_bytes", self._stage.session_bytes)
        # More than there is would keep everybody away, also those who ask for less than a default request does.
        return StageReady(work.pipeline, work.stage, min(expected, self._cache_bytes_max))

    def _initialize(self, stage: Stage, work: InitializeStage) -> StageInitialized:
        work = self._complete(work)
        request, handed = self._agreed(partial(self._request, stage, work))
        made = stage.initialize(work.session, work.chunks, request, handed)
        held = _bytes("cache_bytes", made.cache_bytes)
        # Where this returned, the stage waits for no rank that is still at it.
        self._agreed(partial(self._check_room, held))
        self._held[work.session] = held
        artifact = to_artifact(made.handed)
        return StageInitialized(work.session, work.stage, work.epoch, work.stage_epoch, artifact, held)

    def _agreed(self, ask: Callable[[], T]) -> T:
        """What was asked for, if all ranks were given it."""
        try:
            given = ask()
        except Exception:
            self._agree(True)
            raise
        self._agree(False)
        return given

    def _request(self, stage: Stage, work: InitializeStage) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a session is begun with, if there is room for it."""
        from reelwire.pipeline.stage import SizedStage

        request = {**work.parameters, **self._values(Artifact({}, work.tensors))}
        handed = self._values(work.handed)
        if isinstance(stage, SizedStage):
            self._check_room(stage.needed_bytes(work.chunks, request, handed, self._cache_bytes_max))
        return request, handed

    def _check_room(self, needed: int) -> None:
        if needed > self._cache_bytes_max:
            reason = f"takes {needed} bytes at {self._name}; accepted at this worker: {self._cache_bytes_max}"
            raise RequestError("parameters", reason)
        held = sum(self._held.values())
        if held + needed > self._cache_bytes_max:
            reason = f"the session takes {needed} bytes, and {held} of {self._cache_bytes_max} are taken"
            raise _NoRoomError(f"{self._name}: {reason}")

    def _run(self, stage: Stage, work: RunTask, applied: Applied | None) -> TaskDone:
        work = self._complete(work)
        inputs = {name: self._input(name, work) for name in work.inputs}
        began = time.perf_counter()
        result = stage.run(work.session, work.index, inputs, is_first=work.is_first, is_last=work.is_last)
        self._spent += (inputs, result)
        self._device.synchronize()
        run_s = time.perf_counter() - began
        whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
        if not self._counts:
            return TaskDone(*whose, {}, {}, run_s, applied)
        if result.outputs.keys() != self._produces:
            made = ", ".join(sorted(result.outputs)) or "nothing"
            raise ValueError(f"made {made}; the spec says {', '.join(sorted(self._produces))}")
        constant = bool(result.constant)
        if constant and not self._spec.settles:
            raise ValueError("says that its outputs are constant from here on; the spec doesn't say that it settles")
        shared = dict.fromkeys(work.shared, self._take)
        outputs = {name: to_artifact(result.outputs[name], shared.get(name)) for name in self._spec.produces}
        facts = to_facts(result.facts)
        return TaskDone(*whose, outputs, facts, run_s, applied, constant)

    def _values(self, artifact: Artifact) -> dict[str, Any]:
        return from_artifact(artifact, self._pipeline.array_library, self._memory.view)

    def _input(self, name: str, work: RunTask) -> dict[str, Any]:
        try:
            return self._values(work.inputs[name])
        except MemoryLostError as error:
            lost = f"{name} of chunk {work.index} is lost with the worker that made it: {error.strerror or error}"
            raise MemoryLostError(error.errno, lost) from error

    def _take(self, nbytes: int) -> Piece | None:
        piece = self._memory.take(nbytes)
        if piece is not None:
            self._taken.append(piece)
        return piece

    def _drop_partial(self, session: str) -> None:
        """An initialization that raised may have made half of its caches."""
        self._held.pop(session, None)
        if self._stage is not None:
            with contextlib.suppress(Exception), self._device.current():
                self._stage.release(session)

    def _failed(self, job: Job, error: BaseException) -> StageFailed:
        work = job.work
        index = work.index if isinstance(work, RunTask) else None
        if isinstance(error, RequestError):
            failure = Failure("request", short(error.reason), self._name, index, error.field)
        elif isinstance(error, _NoRoomError):
            failure = Failure("overload", short(str(error)), self._name, index)
        elif isinstance(error, MemoryLostError):
            failure = Failure("worker_lost", short(f"{self._name}: {error.strerror or error}"), self._name, index)
        else:
            failure = Failure("stage", said(error), self._name, index)
        if isinstance(work, BuildStage):
            return StageFailed("", self._name, 0, 0, "build", None, failure)
        return StageFailed(work.session, self._name, work.epoch, work.stage_epoch, _PHASES[type(work)], index, failure)


def said(error: BaseException) -> str:
    """One sentence about what a stage or a job raised."""
    return short(f"{type(error).__name__}: {error}")


def short(text: str) -> str:
    """A text that can be sent, which a lone surrogate can't, and be shown on any terminal; cut where it is long."""
    text = printable(text[: MESSAGE_CHARS_MAX + 1])
    return text if len(text) <= MESSAGE_CHARS_MAX else text[: MESSAGE_CHARS_MAX - 3] + "..."


class _NoRoomError(Exception):
    """Other sessions hold what this one needs."""


def _bytes(name: str, value: Any) -> int:
    if int(value) < 0:
        raise ValueError(f"{name} is {value}; accepted: bytes, 0 or more")
    return int(value)


def _check_sendable(reply: Reply, limits: wire.Limits) -> None:
    """Check that the broker will accept the reply; if not, that is an error of the stage that made it.

    Raises:
        ValueError: the message has no place on the wire, or is too large for it.
    """
    try:
        wire.decode(wire.encode(reply, 0), wire.TO_BROKER, limits)
    except WireError as error:
        raise ValueError(f"the result can't be sent: {error}") from error


def _check_tensors(reply: TaskDone, limits: wire.Limits) -> None:
    """Check that the broker accepts a result's tensors, also those that stand in shared memory.

    Raises:
        ValueError: one is larger than any that it accepts in a message, or they are too much together.
    """
    sizes = [0]
    for name, artifact in reply.outputs.items():
        for tensor_name, tensor in artifact.tensors.items():
            if isinstance(tensor.place, Inline):
                sizes.append(tensor.nbytes)
            elif tensor.nbytes > limits.frame_bytes_max:
                what = f"{name}.{tensor_name} takes {tensor.nbytes} bytes; accepted: {limits.frame_bytes_max}"
                raise ValueError(f"the result can't be sent: {what}")
    _check_sizes(sizes, limits)


def _packed(reply: TaskDone, limits: wire.Limits) -> wire.Packed:
    """The result as it is sent.

    It is small enough, or not; for all else that the broker checks, its decoder needn't run here, because a `TaskDone`
    is made of what was decoded itself, by the rules of `values`, and of numbers of ours.

    Raises:
        ValueError: as of `_check_sendable`.
    """
    try:
        packed = wire.pack(reply)
    except WireError as error:
        raise ValueError(f"the result can't be sent: {error}") from error
    header_bytes = wire.HEADER_BYTES + wire.ENTRY_BYTES + len(packed.name) + len(packed.body)
    _check_sizes([header_bytes, *wire.sizes_of(packed.buffers)], limits)
    return packed


def _check_sizes(sizes: Sequence[int], limits: wire.Limits) -> None:
    if problem := limits.misfit(sizes):
        raise ValueError(f"the result can't be sent: {problem}")
