"""A rank that follows, and is told of the next step of a job while it is at the one before."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.group_messages import Have, Outcome
from reelwire.workers.group_events import CloseJob, FilesFound, LeaveGroup, RankExited, StartJob, StepJob
from reelwire.workers.rank import MARGIN_S

from .group_rig import NO, FollowRig, run_job
from .test_rank import code


@pytest.mark.parametrize("first", ["start", "step"])
def test_groups_02_the_next_step_waits_for_the_one_before(toy: Any, first: Any) -> None:
    """One decision may come early; it is begun when the first is answered, and answered too."""
    rig = FollowRig(toy.spec).greeted()
    run = run_job(1)
    rig.hear(run)
    rig.do(FilesFound(rig.now, 1))
    rig.decide(first, sequence=1)
    order = StartJob(run, {}, share=False) if first == "start" else StepJob()
    assert rig.order == order
    rig.decide("step", sequence=1, below=2)
    assert rig.order == order
    assert rig.told[-1] == Have(1)
    rig.done()
    assert rig.told[-1] == Outcome(1)
    assert rig.order == StepJob()
    rig.decide("step", sequence=1)
    rig.done()
    assert rig.told[-1] == Outcome(2)
    rig.done()
    assert rig.told[-2:] == [Outcome(2), Outcome(3)]
    assert rig.order is None


def test_groups_13_a_step_behind_one_that_failed_is_done_and_answered_too(toy: Any) -> None:
    """It fails here at once, as there is no job; the leader knows what that comes from."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("step")
    rig.decide("step")
    rig.done(NO)
    assert rig.told == [Outcome(1, NO)]
    assert rig.order == StepJob()
    no_job = m.Failure("stage", "there is no job")
    rig.done(no_job)
    assert rig.told == [Outcome(1, NO), Outcome(2, no_job)]
    rig.decide("end")
    assert rig.order == CloseJob()


def test_groups_13_a_step_behind_a_beginning_that_cannot_be_done_here_is_answered_too(toy: Any) -> None:
    """With the reason of each."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("start", sequence=9)
    rig.decide("step", sequence=9)
    assert rig.order == LeaveGroup()
    rig.done()
    assert "no body 9" in rig.told[-1].failure.message
    assert rig.order == StepJob()
    rig.done(NO)
    assert rig.told[-1] == Outcome(2, NO)


def test_groups_04_a_step_that_waited_has_its_own_time(toy: Any) -> None:
    """And twice as much: the others may begin with it when they have had all of theirs for the one before."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("step")
    rig.tick(20.0)
    rig.decide("step")
    rig.tick(30.0)
    rig.done()
    rig.tick(60.0 + MARGIN_S - 1.0)
    assert code(rig) is None
    rig.tick(2.0)
    assert code(rig) == 1
    assert "within 60 s" in rig.take(m.RanksLost)[0].reason


def test_groups_07_a_lost_broker_leaves_a_step_that_waits(toy: Any) -> None:
    """It is the leader's word, and comes next in any case."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("step")
    rig.decide("step")
    rig.cut()
    rig.welcome()
    rig.done()
    assert rig.order == StepJob()
    rig.do(RankExited(rig.now, 2, "its process has ended"))
    assert code(rig) == 1
