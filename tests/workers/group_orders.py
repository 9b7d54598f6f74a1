"""What the group threads of tests answer and are compared by; see `group_rank`."""

from __future__ import annotations

from typing import Any

from reelwire import messages as m
from reelwire.workers import actions
from reelwire.workers.group_events import AtStage, CloseJob, Form, LeaveGroup, StartJob, StepJob


def well_done(job: actions.Job) -> Any:
    """What is said of a job that went well."""
    match job.work:
        case actions.BuildStage() as build:
            return m.StageReady("toy", build.stage, 100)
        case m.InitializeStage() as work:
            return m.StageInitialized(work.session, work.stage, work.epoch, work.stage_epoch, m.Artifact(), 100)
        case m.RunTask() as work:
            name = {"draw": "picture", "show": "frames"}[work.stage]
            whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
            return m.TaskDone(*whose, {name: m.Artifact({"index": work.index})}, {}, 0.1, job.applied)
        case m.ReleaseStage() as work:
            return m.StageReleased(work.session, work.stage, work.epoch, work.stage_epoch)


def entry_of(order: Any) -> tuple[Any, ...]:
    """An order as all ranks must have it; empty: it is this rank's alone."""
    match order:
        case AtStage(job=actions.Job(work=m.InitializeStage() as work)):
            return "initialize", work.session, work.sequence
        case AtStage(job=actions.Job(work=m.RunTask() as work) as job):
            return "run", work.session, work.index, work.sequence, job.applied
        case AtStage(job=actions.Job(work=m.ReleaseStage() as work)):
            return "release", work.session, work.stage
        case StartJob():
            return "start", order.run.job, order.run.attempt, order.run.sequence, order.share
        case Form():
            return "form", order.epoch, order.round
        case StepJob() | CloseJob() | LeaveGroup():
            return ({"StepJob": "step", "CloseJob": "end", "LeaveGroup": "leave"}[type(order).__name__],)
        case _:
            return ()
