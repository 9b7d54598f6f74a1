"""The group thread of one rank: does what the cores order, one thing after the other, and says what came of each.

All that ranks compute together runs here, stages of streams and jobs alike, so that their collectives come in one order
on all ranks. An order that raises breaks the process group off: whoever waits for this rank in a collective is freed, and
the ranks meet in a new one before they go on. Weights, sessions and a job that stands between two steps stay. A session is
begun when no rank refuses it: they ask each other first, so a refusal breaks nothing.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reelwire import wire
from reelwire.group_messages import LeaderTensor
from reelwire.messages import StageFailed
from reelwire.tensors import Inline, TensorRef, inline_buffer

from .bodies import B, completed
from .collectives import Communicator, GroupBrokenError, RefusedElsewhereError, gather_numbers, is_broken, share_bytes
from .config import WorkerConfig
from .device import Device
from .group_events import (
    AtStage,
    CloseJob,
    Form,
    KeepJob,
    LeaveGroup,
    LoadJobs,
    Order,
    OrderReport,
    StartJob,
    StepJob,
)
from .job_runner import JobWork, failure_of
from .memory import SharedMemory
from .stage_work import StageWork
from .threads import WorkThread

if TYPE_CHECKING:
    from reelwire.pipeline.job import JobPipeline
    from reelwire.pipeline.parallel import Parallel
    from reelwire.pipeline.stage import Pipeline, Ranks, Stage

_NAMES: dict[type, str] = {LoadJobs: "load", Form: "form", CloseJob: "close", LeaveGroup: "leave"}


@dataclass(frozen=True, slots=True)
class Alone:
    """A group of one, for pipelines without torch."""

    rank: int = 0
    world: int = 1


class GroupThread(WorkThread[Order]):
    """One rank's thread for the work of its group.

    Args:
        config: settings of the process.
        pipeline: what the grouped stages are part of.
        stages: their names.
        jobs: kinds of jobs; None: none.
        threads: torch threads inside one operation.
        post: takes each report; called on the thread.
        folder: where what the leader shares is written.
        memory: the shared memory of the process.

    Attributes:
        is_local: all ranks are on this machine; written by the loop when it is known.
    """

    def __init__(
        self,
        config: WorkerConfig,
        pipeline: Pipeline,
        stages: Sequence[str],
        jobs: JobPipeline | None,
        threads: int,
        post: Callable[[OrderReport], None],
        folder: Path,
        memory: SharedMemory | None = None,
    ) -> None:
        """Start the thread; it waits for its first order."""
        self._config = config
        self._pipeline = pipeline
        self._jobs_pipeline = jobs
        self._post = post
        self._communicator = Communicator(config.rank, config.world, config.device, config.step_timeout_s)
        self._ranks: Ranks | None = None
        self._parallel: Parallel | None = None
        self._broken = self._refused = False
        self._stages = {
            stage: StageWork(
                pipeline,
                stage,
                Device(config.device, threads),
                config.cache_bytes_max,
                memory,
                self._make,
                counts=config.rank == 0,
                raised=self._stage_raised,
                agree=self._agree,
                complete=self._complete,
            )
            for stage in stages
        }
        self._work = None if jobs is None else JobWork(jobs, Device(config.device, threads), self._group, folder)
        super().__init__("group")

    @property
    def limits(self) -> wire.Limits:
        """What the broker accepts of grouped stages."""
        return next(iter(self._stages.values())).limits if self._stages else wire.Limits()

    @limits.setter
    def limits(self, limits: wire.Limits) -> None:
        for work in self._stages.values():
            work.limits = limits

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this machine."""
        return self._communicator.is_local

    @is_local.setter
    def is_local(self, is_local: bool) -> None:
        self._communicator.is_local = is_local

    def _take(self, job: Order) -> None:
        self._post(self._do(job))

    def _rest(self) -> None:
        for work in self._stages.values():
            work.rest()

    def _serve(self) -> None:
        super()._serve()
        self._leave(failed=False)

    def _do(self, order: Order) -> OrderReport:
        began = time.perf_counter()
        self._broken = self._refused = False
        try:
            report = self._perform(order)
        except BaseException as error:  # noqa: BLE001  whatever a job raises fails it, not the worker
            report = self._failed(order, error)
        try:
            self._communicator.check()
        except GroupBrokenError as error:
            self._refused = False
            if report.failure is None:
                report = replace(self._failed(order, error), finished=report.finished)
        # A state is taken without a collective, so nobody waits for this rank where that fails, and the job stands as before.
        stays = self._refused or (isinstance(order, KeepJob) and not report.broken)
        if report.failure is not None and not stays:
            self._clear(order)  # out of the handler, where no frame of the job keeps its tensors, or the group, alive
        return replace(report, took_s=time.perf_counter() - began, apart=not stays)

    def _failed(self, order: Order, error: BaseException) -> OrderReport:
        trace = "".join(traceback.format_exception(error))
        return OrderReport(order, failure_of(error, self._name(order)), is_broken(error), trace)

    def _perform(self, order: Order) -> OrderReport:
        match order:
            case AtStage():
                return self._at_stage(order)
            case StepJob():
                return self._job_work().step(order)
            case StartJob():
                return self._job_work().start(order)
            case KeepJob():
                return self._job_work().keep(order)
            case CloseJob():
                if self._work is not None:
                    self._work.close()
            case LoadJobs():
                self._job_work().load()
            case Form():
                self._form(order)
            case LeaveGroup():
                self._leave(failed=False)
        return OrderReport(order)

    def _at_stage(self, order: AtStage) -> OrderReport:
        finished = self._stages[order.stage].do(order.job)
        if isinstance(finished.reply, StageFailed):
            return OrderReport(order, finished.reply.failure, self._broken, finished.traceback, finished)
        return OrderReport(order, finished=finished)

    def _agree(self, refuses: bool) -> None:
        """Hear of all ranks whether one refuses the session that is about to be begun.

        Raises:
            RefusedElsewhereError: another one does, and not this one.
            RuntimeError: the collective failed.
        """
        if self._parallel is None or self._config.world == 1:
            return
        self._refused = any(gather_numbers(self._parallel, int(refuses)))
        if self._refused and not refuses:
            raise RefusedElsewhereError("another rank of the group refuses the session")

    def _complete(self, work: B) -> B:
        """Exchange what the leader alone was sent; called by all ranks at once.

        Raises:
            ValueError: this rank leads, and wasn't sent it.
            RuntimeError: the collective failed.
        """
        return completed(work, self._shared) if work.broadcast else work

    def _shared(self, of: LeaderTensor, mine: TensorRef | None) -> TensorRef:
        assert self._ranks is not None, "a stage without a group"
        buffer = None if mine is None else inline_buffer(mine)
        return TensorRef(of.dtype, of.shape, Inline(share_bytes(self._ranks, buffer, of.nbytes)))

    def _stage_raised(self, error: BaseException) -> None:
        self._broken = is_broken(error)

    def _clear(self, order: Order) -> None:
        """Something was raised: let go of the job that raised, and free whoever waits for this rank."""
        if isinstance(order, LoadJobs):
            return
        if isinstance(order, StartJob | StepJob) and self._work is not None:
            with contextlib.suppress(BaseException):  # it has raised already, and its first error is told
                self._work.close()
        elif self._config.world > 1:
            gc.collect()  # the connections of a group close with the last reference to it, and errors hold some in cycles
        self._leave(failed=True)

    def _form(self, order: Form) -> None:
        self._group()
        if self._parallel is None:
            return
        self._parallel.use(None)
        self._parallel.use(self._communicator.form(order.epoch, order.round, order.store))

    def _leave(self, *, failed: bool) -> None:
        if self._parallel is not None:
            self._parallel.use(None)
        if failed:
            self._communicator.break_off()
        else:
            self._communicator.leave()

    def _group(self) -> Ranks:
        """The group as stages and jobs are given it: with torch only where somebody needs it."""
        if self._ranks is None:
            libraries = {self._pipeline.array_library if self._stages else "numpy"}
            if self._jobs_pipeline is not None:
                libraries.add(self._jobs_pipeline.array_library)
            if self._config.world == 1 and "torch" not in libraries:
                self._ranks = Alone()
            else:
                from reelwire.pipeline.parallel import Parallel

                self._ranks = self._parallel = Parallel(self._config.rank, self._config.world)
        return self._ranks

    def _make(self, stage: str, device: str) -> Stage:
        from reelwire.pipeline.stage import ParallelPipeline

        pipeline: object = self._pipeline
        if isinstance(pipeline, ParallelPipeline) and stage in pipeline.parallel_stages:
            return pipeline.build_parallel(stage, device, self._group())
        return self._pipeline.build(stage, device)

    def _job_work(self) -> JobWork:
        assert self._work is not None, "a job came to a worker that does none"
        return self._work

    def _name(self, order: Order) -> str:
        if isinstance(order, AtStage):
            return order.stage
        return _NAMES.get(type(order), "job")
