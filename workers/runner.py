"""The thread of one stage actor: builds the stage, then does one job at a time, and reports each.

It turns what a message holds into what a stage takes, and what a stage makes into a message (`values`); what went into
shared memory and isn't sent after all is taken back before anybody hears of it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from reelwire import wire
from reelwire.errors import ConfigError, RequestError, WireError
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
from .events import Finished, Reply
from .memory import SharedMemory
from .values import from_artifact, to_artifact, to_facts

if TYPE_CHECKING:
    import torch

    from reelwire.pipeline.stage import Pipeline, Stage

MESSAGE_CHARS_MAX = 2000
TAKEN_WITHIN_S = 0.001
"""How long `submit` waits for the thread to have its job; that takes a tenth of it, when the thread is free."""
_PHASES: dict[type, Phase] = {
    BuildStage: "build",
    InitializeStage: "initialize",
    RunTask: "run",
    ReleaseStage: "release",
}


def load(reference: str, options: Mapping[str, str], stages: Sequence[str] = ()) -> Pipeline:
    """The pipeline that `reference` names; its weights aren't loaded yet.

    Raises:
        RequestError: there is none, or an option is refused.
        ConfigError: one of `stages` is none of the pipeline's.
    """
    from reelwire.pipeline import registry

    from . import emulated

    pipeline = registry.load(reference, options, {"emulated": lambda given: emulated.pipeline(**given)})
    known = pipeline.spec.initialize_order
    for stage in stages:
        if stage not in known:
            raise ConfigError("stages", f"{stage!r} is no stage of {pipeline.spec.name}; accepted: {', '.join(known)}")
    return pipeline


def package_versions() -> dict[str, str]:
    """Versions of what the bits of a result may depend on; what isn't installed is left out."""
    versions = {}
    for name in ("numpy", "torch", "diffusers", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def threads_for(asked: int, stages: int) -> int:
    """Torch threads inside one operation: what was asked for, or this process's cores shared by its stages."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or max(1, cores // max(1, stages))


class StageThread:
    """One stage on a thread of its own.

    Args:
        pipeline: what the stage is part of.
        stage: its name.
        device: where it lives, ``cpu`` or ``cuda:N``.
        threads: torch threads inside one operation.
        post: takes each report; called on the stage's thread.
        cache_bytes_max: most bytes that all sessions together may hold here.
        memory: the shared memory of the process; None: everything travels inside of messages.

    Attributes:
        limits: what the broker accepts; written by the loop when the broker says it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stage: str,
        device: str,
        threads: int,
        post: Callable[[Finished], None],
        cache_bytes_max: int,
        memory: SharedMemory | None = None,
    ) -> None:
        """Start the thread; it waits for its first job."""
        self.limits = wire.Limits()
        self._pipeline = pipeline
        self._name = stage
        self._device = device
        self._threads = threads
        self._post = post
        self._cache_bytes_max = cache_bytes_max
        self._memory = memory or SharedMemory(0)
        self._taken: list[Piece] = []
        self._held: dict[str, int] = {}
        self._stage: Stage | None = None
        self._spec = pipeline.spec.stage(stage)
        self._produces = frozenset(self._spec.produces)
        self._spent: list[object] = []
        self._stream: torch.cuda.Stream | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._taken_up = threading.Lock()
        # A daemon: a stage that hangs in one long call must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=f"stage-{stage}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Give the thread its next job, and the interpreter with it.

        A thread that was woken stands back for as long as its waker has Python to run, between two system calls as well.
        One that gives the job to itself takes it when it has come back from reporting the one before.
        """
        if threading.get_ident() == self._thread.ident:
            self._jobs.put(job)
            return
        self._taken_up.acquire(blocking=False)
        self._jobs.put(job)
        self._taken_up.acquire(timeout=TAKEN_WITHIN_S)

    def stop(self) -> None:
        """Have the thread end after the job that it has."""
        self._jobs.put(None)

    def join(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds for the end of the thread; whether it has ended."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._taken_up.locked():
                self._taken_up.release()
            self._post(self._do(job))
            # An idle stage holds no tensors of its last job; to free them takes its time, and the result has left.
            del job
            self._spent.clear()

    def _do(self, job: Job) -> Finished:
        try:
            if self._stream is None:
                reply = self._perform(job)
            else:
                with self._on_device():
                    reply = self._perform(job)
            if isinstance(reply, TaskDone):
                # All that is likely to be too large, before another stage is given it.
                _check_tensors(reply, self.limits)
            else:
                _check_sendable(reply, self.limits)
        except BaseException as error:  # noqa: BLE001 - whatever a stage raises fails its session, not the worker
            trace = "".join(traceback.format_exception(error))
            failed, out_of_memory = self._failed(job, error), _is_out_of_device_memory(error)
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
            self._give_memory_back()
        return Finished(self._name, job, failed, trace)

    def _pack(self, job: Job, reply: TaskDone) -> wire.Packed | StageFailed:
        try:
            return _packed(reply, self.limits)
        except ValueError as error:
            return self._failed(job, error)

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
            import torch

            torch.set_num_threads(self._threads)
            if self._device != "cpu":
                _check_gpu(self._device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
                torch.cuda.set_device(self._device)
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with self._on_device():
            self._stage = self._pipeline.build(work.stage, self._device)
            expected = _bytes("session_bytes", self._stage.session_bytes)
        # More than there is would keep everybody away, also those who ask for less than a default request does.
        return StageReady(work.pipeline, work.stage, min(expected, self._cache_bytes_max))

    def _initialize(self, stage: Stage, work: InitializeStage) -> StageInitialized:
        from reelwire.pipeline.stage import SizedStage

        request = {**work.parameters, **self._values(Artifact({}, work.tensors))}
        handed = self._values(work.handed)
        if isinstance(stage, SizedStage):
            self._check_room(stage.needed_bytes(work.chunks, request, handed, self._cache_bytes_max))
        made = stage.initialize(work.session, work.chunks, request, handed)
        held = _bytes("cache_bytes", made.cache_bytes)
        self._check_room(held)
        self._held[work.session] = held
        artifact = to_artifact(made.handed)
        return StageInitialized(work.session, work.stage, work.epoch, work.stage_epoch, artifact, held)

    def _check_room(self, needed: int) -> None:
        if needed > self._cache_bytes_max:
            reason = f"takes {needed} bytes at {self._name}; accepted at this worker: {self._cache_bytes_max}"
            raise RequestError("parameters", reason)
        held = sum(self._held.values())
        if held + needed > self._cache_bytes_max:
            reason = f"the session takes {needed} bytes, and {held} of {self._cache_bytes_max} are taken"
            raise _NoRoomError(f"{self._name}: {reason}")

    def _run(self, stage: Stage, work: RunTask, applied: Applied | None) -> TaskDone:
        inputs = {name: self._input(name, work) for name in work.inputs}
        began = time.perf_counter()
        result = stage.run(work.session, work.index, inputs, is_first=work.is_first, is_last=work.is_last)
        self._spent += (inputs, result)
        if self._stream is not None:
            self._stream.synchronize()
        run_s = time.perf_counter() - began
        if result.outputs.keys() != self._produces:
            made = ", ".join(sorted(result.outputs)) or "nothing"
            raise ValueError(f"made {made}; the spec says {', '.join(sorted(self._produces))}")
        constant = bool(result.constant)
        if constant and not self._spec.settles:
            raise ValueError("says that its outputs are constant from here on; the spec doesn't say that it settles")
        shared = dict.fromkeys(work.shared, self._take)
        outputs = {name: to_artifact(result.outputs[name], shared.get(name)) for name in self._spec.produces}
        facts = to_facts(result.facts)
        whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
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

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(self._stream)

    def _give_memory_back(self) -> None:
        """The device is full: let its other stages have what the allocator kept for this one."""
        import torch

        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()

    def _drop_partial(self, session: str) -> None:
        """An initialization that raised may have made half of its caches."""
        self._held.pop(session, None)
        if self._stage is not None:
            with contextlib.suppress(Exception), self._on_device():
                self._stage.release(session)

    def _failed(self, job: Job, error: BaseException) -> StageFailed:
        work = job.work
        index = work.index if isinstance(work, RunTask) else None
        if isinstance(error, RequestError):
            failure = Failure("request", _short(error.reason), self._name, index, error.field)
        elif isinstance(error, _NoRoomError):
            failure = Failure("overload", _short(str(error)), self._name, index)
        elif isinstance(error, MemoryLostError):
            failure = Failure("worker_lost", _short(f"{self._name}: {error.strerror or error}"), self._name, index)
        else:
            failure = Failure("stage", _short(f"{type(error).__name__}: {error}"), self._name, index)
        if isinstance(work, BuildStage):
            return StageFailed("", self._name, 0, 0, "build", None, failure)
        return StageFailed(work.session, self._name, work.epoch, work.stage_epoch, _PHASES[type(work)], index, failure)


class _NoRoomError(Exception):
    """Other sessions hold what this one needs."""


def _is_out_of_device_memory(error: BaseException) -> bool:
    # By the name of its type, as for tensors: a pipeline without torch doesn't pay for an import.
    return any(f"{kind.__module__}.{kind.__qualname__}" == "torch.OutOfMemoryError" for kind in type(error).__mro__)


def _check_gpu(device: str, count: int) -> None:
    if int(device.removeprefix("cuda:")) >= count:
        there = {0: "", 1: " or cuda:0"}.get(count, f" or cuda:0 to cuda:{count - 1}")
        raise RequestError("device", f"{device!r} isn't there; accepted: cpu{there}")


def _bytes(name: str, value: Any) -> int:
    if int(value) < 0:
        raise ValueError(f"{name} is {value}; accepted: bytes, 0 or more")
    return int(value)


def _short(text: str) -> str:
    # A lone surrogate has no UTF-8, and the message has to travel whatever is in it.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MESSAGE_CHARS_MAX else text[: MESSAGE_CHARS_MAX - 3] + "..."


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
