"""A job's state is taken where the job stands and written while it goes on: what a leader makes of that."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.workers import events
from reelwire.workers.group_events import (
    CloseJob,
    DropFiles,
    KeepJob,
    LeaveGroup,
    ResultMade,
    StepJob,
    WriteCheckpoint,
)
from reelwire.workers.leader_jobs import HAND_BACK_S

from .group_rig import NO, SNAPSHOT, LeadRig, offer
from .test_leader_jobs import OUTPUT, RESULT


def taken(toy: Any, *, kept_every: int = 1, world: int = 2) -> LeadRig:
    """A job whose state after its first step is being written."""
    rig = LeadRig(toy.spec, world).formed()
    rig.running(kept_every=kept_every)
    for step in range(1, kept_every + 1):
        rig.step(step)
    assert isinstance(rig.order, KeepJob)
    rig.done(snapshot=SNAPSHOT)
    return rig


def handing_back(toy: Any) -> LeadRig:
    """The process was asked to stop, and the job is closed; its last state is being written."""
    rig = LeadRig(toy.spec).formed()
    rig.running()
    rig.step(1)
    rig.do(events.ShutdownRequested(rig.now))
    rig.step(2)
    assert isinstance(rig.order, KeepJob)
    rig.done(snapshot=SNAPSHOT)
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    assert rig.order is None
    return rig


def test_groups_12_the_next_step_waits_for_no_disk(toy: Any) -> None:
    """It begins when the state is taken; the file is offered when it is written, as of the step at which it was taken."""
    rig = taken(toy)
    assert isinstance(rig.order, StepJob)
    rig.step(2)
    assert not rig.take(m.JobFile)
    rig.written(offer("kept"))
    assert rig.take(m.JobFile) == [m.JobFile("j", 1, "checkpoint", offer("kept"), 1)]
    assert rig.wanted(DropFiles) == [DropFiles("j", 1, "checkpoint", "kept")]


def test_groups_12_one_checkpoint_is_written_at_a_time(toy: Any) -> None:
    """However slow the disk is, steps go on; the next state is taken at the first yield after that."""
    rig = taken(toy)
    for step in range(2, 6):
        rig.step(step)
        assert isinstance(rig.order, StepJob)
    rig.written(offer("kept"))
    rig.step(6)
    assert isinstance(rig.order, KeepJob)
    rig.keep(offer("later"))
    assert [each.step for each in rig.take(m.JobFile)] == [1, 6]


def test_groups_12_a_full_disk_costs_the_job_nothing(toy: Any) -> None:
    """Nobody leaves the process group for that; the next state is taken when it would be in any case."""
    rig = taken(toy, kept_every=2)
    rig.written(None)
    assert "checkpoint_failed" in rig.logged
    rig.step(3)
    assert isinstance(rig.order, StepJob)
    rig.step(4)
    assert isinstance(rig.order, KeepJob)
    assert {each.act for each in rig.told} == {"start", "step"}
    assert not rig.take(m.JobFile, m.JobEnded)


def test_groups_12_a_full_disk_leaves_the_checkpoint_before(toy: Any) -> None:
    """It is what a new broker is told of."""
    rig = taken(toy)
    rig.written(offer("one"))
    rig.hear(m.CheckpointKept("j", 1, 1))
    rig.step(2)
    rig.done(snapshot=SNAPSHOT)
    rig.written(None)
    rig.cut()
    rig.sent.clear()
    rig.welcome()
    assert [each.offer.file for each in rig.take(m.JobFile)] == ["one"]
    assert [each.besides for each in rig.wanted(DropFiles)] == ["one"]


@pytest.mark.parametrize("how", ["cancelled", "failed", "made", "forgotten"])
def test_groups_11_what_is_written_of_a_job_that_has_ended_is_dropped(toy: Any, how: str) -> None:
    """Nothing waits for it, and nobody is offered it."""
    rig = taken(toy)
    match how:
        case "cancelled":
            rig.hear(m.StopJob("j", 1))
            rig.step(2)
            rig.settle()
        case "failed":
            rig.settle(failure=NO)
            rig.settle()
        case "made":
            rig.settle(output=OUTPUT)
            rig.do(ResultMade(rig.now, "j", 1, RESULT))
        case _:
            rig.hear(m.ForgetJob("j", 1))
            rig.step(2)
            rig.settle()
    rig.sent.clear()
    rig.wanted(DropFiles)
    rig.written(offer("kept"))
    assert rig.wanted(DropFiles) == [DropFiles("j", 1, None if how == "forgotten" else "checkpoint")]
    assert not rig.take(m.JobFile)


def test_groups_12_a_checkpoint_that_is_written_while_the_result_is_counts(toy: Any) -> None:
    """Until the result is there the job may have to go on from it."""
    rig = taken(toy)
    rig.settle(output=OUTPUT)
    rig.written(offer("kept"))
    assert [each.role for each in rig.take(m.JobFile)] == ["checkpoint"]


def test_groups_12_a_job_is_handed_back_when_its_last_state_is_written(toy: Any) -> None:
    """And the broker has it: not before, however long the disk takes, up to the limit of a step."""
    rig = handing_back(toy)
    rig.tick(HAND_BACK_S + 1.0)
    assert rig.order is None
    rig.written(offer("kept", 3))
    assert [each.step for each in rig.take(m.JobFile)] == [2]
    rig.tick(HAND_BACK_S - 1.0)
    assert rig.order is None
    rig.hear(m.CheckpointKept("j", 1, 2))
    assert isinstance(rig.order, LeaveGroup)


def test_groups_12_a_broker_that_takes_the_checkpoint_before_does_not_cut_the_last_one_short(toy: Any) -> None:
    """The disk has the limit of a step for it, whatever the broker asks for meanwhile."""
    rig = taken(toy)
    rig.do(events.ShutdownRequested(rig.now))
    rig.step(2)
    rig.written(offer("one", 8))
    rig.done(snapshot=SNAPSHOT)
    rig.settle()
    rig.hear(m.WantFile("one", 0, 4))
    rig.tick(HAND_BACK_S + 1.0)
    assert rig.order is None
    rig.written(offer("two", 8))
    for _ in range(3):
        rig.hear(m.WantFile("two", 0, 4))
        rig.tick(HAND_BACK_S - 1.0)
    assert rig.order is None
    rig.tick(2.0)
    assert isinstance(rig.order, LeaveGroup)


@pytest.mark.parametrize("how", ["full", "hangs", "cancelled"])
def test_groups_12_what_can_not_be_written_is_not_waited_for(toy: Any, how: str) -> None:
    """The disk is full, or says nothing, or nobody wants the job any more: the group leaves."""
    rig = handing_back(toy)
    match how:
        case "full":
            rig.written(None)
        case "hangs":
            rig.tick(31.0)
        case _:
            rig.hear(m.StopJob("j", 1))
    assert isinstance(rig.order, LeaveGroup)


def test_groups_12_the_last_state_is_taken_when_the_one_before_is_written(toy: Any) -> None:
    """A process that was asked to stop waits for that; streaming goes on meanwhile, and no step is done any more."""
    rig = taken(toy)
    rig.do(events.ShutdownRequested(rig.now))
    rig.step(2)
    assert rig.order is None
    rig.written(offer("one"))
    assert isinstance(rig.order, KeepJob)
    rig.done(snapshot=SNAPSHOT)
    rig.settle()
    rig.written(offer("two"))
    assert [each.step for each in rig.take(m.JobFile)] == [1, 2]
    assert [each.step for each in rig.wanted(WriteCheckpoint)] == []


def test_groups_11_a_cancel_is_not_kept_waiting_by_a_disk(toy: Any) -> None:
    """Also of a job that is about to be handed back."""
    rig = taken(toy)
    rig.do(events.ShutdownRequested(rig.now))
    rig.step(2)
    assert rig.order is None
    rig.hear(m.StopJob("j", 1))
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    assert [each.state for each in rig.take(m.JobEnded)] == ["cancelled"]
