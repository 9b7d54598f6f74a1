"""What a leader decides next: when all have answered, in order, and only what all ranks have."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.controls import KeyState
from reelwire.group_messages import Decision, Have, Outcome
from reelwire.workers import group_events
from reelwire.workers.actions import TakeBack
from reelwire.workers.group_events import AtStage, CloseJob, Form, KeepJob, StartJob, StepJob

from .group_rig import BROKE, NO, LeadRig, initialize, release, run_job, task

OFFER = m.FileOffer("kept", "/made/kept", 9)


@pytest.mark.parametrize("first", ["thread", "others"])
def test_groups_02_the_next_decision_comes_when_all_have_answered_the_last(toy: Any, first: str) -> None:
    """Whoever is last: the leader's own thread or another rank."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.body(initialize(1, "a"))
    rig.body(initialize(2, "b"))
    number = rig.decided().number
    if first == "thread":
        rig.done()
        rig.answer(1)
        assert rig.order is None
        rig.answer(2)
    else:
        rig.answer()
        rig.answer()  # said twice, it is answered once
        assert rig.decided().number == number
        rig.done()
    assert rig.decided().number == number + 1
    assert rig.decided().sequence == 2


def test_groups_02_a_body_is_chosen_only_when_all_ranks_have_it(toy: Any) -> None:
    """One rank that hasn't said so holds it back; the leader must have it too."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.have(1)
    assert rig.order is None
    rig = LeadRig(toy.spec, world=3).formed()
    rig.hear(initialize(1))
    rig.have(1, 1)
    rig.have(1, 1)
    assert rig.order is None
    rig.have(1, 2)
    assert isinstance(rig.order, AtStage)
    assert (rig.decided().act, rig.decided().sequence) == ("initialize", 1)


def test_groups_02_a_later_task_does_not_overtake_one_that_is_missing_somewhere(toy: Any) -> None:
    """A stage's tasks begin in the order in which they came, whoever has which."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.hear(task(2, 0), task(3, 1))
    rig.have(3)
    assert rig.order is None
    rig.have(2)
    assert rig.decided().sequence == 2


def test_groups_02_the_oldest_of_several_stages_comes_first(toy: Any) -> None:
    """Also a release, which has no number: it is as old as what came before it."""
    rig = LeadRig(toy.spec, grouped=("draw", "show")).formed()
    rig.live(1)
    rig.body(initialize(2, "s", "show"))
    rig.body(task(3, 0))
    rig.hear(release("s", "show"))
    rig.body(task(4, 1))
    rig.settle()
    order = []
    for _ in range(3):
        order.append((rig.decided().act, rig.decided().sequence))
        rig.settle()
    assert order == [("run", 3), ("release", 0), ("run", 4)]


def test_groups_03_streaming_slips_in_between_two_steps(toy: Any) -> None:
    """A chunk that comes while a job runs is decided at the next yield, and the job goes on after it."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.running(2)
    assert isinstance(rig.order, StepJob)
    rig.body(task(3))
    assert isinstance(rig.order, StepJob)
    rig.step(1)
    assert rig.decided().act == "run"
    rig.settle()
    assert rig.decided().act == "step"


def test_groups_03_progress_says_what_a_job_gave_to_streams(toy: Any) -> None:
    """The seconds between the decision and the last answer; what the step took is told apart, from the second one on."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.running(2)
    rig.step(1)
    rig.body(task(3))
    rig.step(2, took_s=1.5)
    rig.now += 4.0
    rig.settle()
    rig.step(3, took_s=1.25)
    told = [(each.step, each.step_s, each.given_s) for each in rig.take(m.JobProgress) if each.state == "running"]
    assert told == [(0, 0.0, 0.0), (1, 0.0, 0.0), (2, 1.5, 0.0), (3, 1.25, 4.0)]


def test_groups_02_at_a_yield_an_end_comes_before_all_else(toy: Any) -> None:
    """Then meeting again, a checkpoint, streaming and the next step, in this order."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.running(2, kept_every=1)
    rig.body(task(3))
    rig.step(1)
    assert isinstance(rig.order, KeepJob)
    rig.keep(OFFER)
    assert rig.decided().act == "run"
    rig.hear(m.StopJob("j", 1))
    rig.body(task(4, 1))
    rig.done()
    rig.answer(failure=NO)
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    assert isinstance(rig.order, Form)
    rig.settle()
    assert rig.order is None  # the session has failed with its chunk, and is released when the broker says so
    rig.hear(release())
    assert rig.decided().act == "release"


def test_streaming_15_a_control_is_bound_when_the_chunk_is_decided(toy: Any) -> None:
    """Keys that come before that are applied, on all ranks alike; the broker is told what was."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.hear(task(2, reservation=m.Reservation("control", KeyState())))
    rig.hear(m.SetStageKeys("s", "toy", "draw", 1, 1, KeyState(1, ("w",))))
    rig.have(2)
    applied = rig.decided().applied
    assert applied is not None
    assert applied.control.values["keys"] == ["w"]
    assert rig.order.job.applied is applied
    (started,) = rig.take(m.TaskStarted)
    assert started.applied is applied


def test_groups_02_ranks_are_told_what_they_may_drop(toy: Any) -> None:
    """Bodies below what waits here: a session that was released takes its tasks along."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    assert rig.decided().below == 1
    rig.hear(initialize(2, "b"), task(3), run_job(4))
    rig.have(2)
    assert rig.decided().below == 2
    rig.hear(release())
    rig.settle()
    assert (rig.decided().act, rig.decided().below) == ("release", 4)  # the job's, which nobody has begun
    rig.hear(m.StopJob("j", 1))
    rig.settle()
    rig.hear(release("b"))
    assert rig.decided().below == 5


def test_groups_13_a_failure_on_another_rank_fails_the_task_with_its_reason(toy: Any) -> None:
    """Though it went well here: what it made is taken back, and the root cause is told, not what followed from it."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.live(1)
    rig.body(task(2))
    pieces = (m.SegmentUse("s1", 1),)
    rig.answer(1, failure=BROKE, is_broken=True)
    rig.answer(2, failure=NO)
    rig.done(pieces=pieces)
    (failed,) = rig.take(m.StageFailed, m.TaskDone)
    assert (failed.phase, failed.index, failed.failure.message, failed.failure.stage) == (
        "run",
        0,
        "rank 2: no",
        "draw",
    )
    assert rig.wanted(TakeBack) == [TakeBack(pieces)]
    assert rig.decided().act == "form"
    assert rig.decided().round == 2


def test_groups_13_what_only_broke_here_is_told_by_its_cause(toy: Any) -> None:
    """This rank's thread was thrown out of a collective: the session fails by what the other rank says."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.body(task(2))
    rig.done(BROKE, is_broken=True)
    rig.answer(failure=NO)
    (failed,) = rig.take(m.StageFailed)
    assert failed.failure.message == "rank 1: no"


def test_groups_13_a_session_that_some_ranks_have_is_released_there(toy: Any) -> None:
    """One rank had no room for it: the broker is told that it failed, and nobody keeps its caches."""
    rig = LeadRig(toy.spec).formed()
    rig.body(initialize(1))
    rig.done()
    rig.answer(failure=NO)
    assert [each.phase for each in rig.take(m.StageFailed, m.StageInitialized)] == ["initialize"]
    assert rig.decided().act == "form"
    rig.settle()
    assert (rig.decided().act, rig.decided().session) == ("release", "s")
    rig.settle()
    assert not rig.take(m.StageReleased, m.StageFailed)
    rig.body(initialize(2, epoch=2))
    rig.settle()
    assert len(rig.take(m.StageInitialized)) == 1


def test_groups_13_a_session_that_no_rank_has_is_not_released(toy: Any) -> None:
    """All ranks refused it alike, and dropped what they had made of it."""
    rig = LeadRig(toy.spec).formed()
    rig.body(initialize(1))
    rig.done(NO)
    rig.answer(failure=NO)
    rig.settle()
    assert rig.order is None


@pytest.mark.parametrize("refuses", [0, 1])
def test_groups_13_a_session_that_is_refused_costs_no_meeting(toy: Any, refuses: int) -> None:
    """No rank has begun it, none has left the process group: what comes next does, and nothing is to be released."""
    rig = LeadRig(toy.spec).formed()
    rig.body(initialize(1))
    elsewhere = m.Failure("stage", "another rank refuses it")
    rig.done(elsewhere if refuses else NO, is_broken=refuses == 1, apart=False)
    rig.answer(failure=NO if refuses else elsewhere, is_broken=refuses == 0, is_apart=False)
    (failed,) = rig.take(m.StageFailed)
    assert failed.failure.message == f"rank {refuses}: no"
    assert rig.order is None
    rig.body(initialize(2, "t"))
    assert rig.decided().act == "initialize"


def test_groups_13_a_session_that_is_refused_where_a_rank_broke_off_costs_a_meeting(toy: Any) -> None:
    """One of them has left the process group all the same."""
    rig = LeadRig(toy.spec).formed()
    rig.body(initialize(1))
    rig.done(NO, apart=False)
    rig.answer(failure=BROKE, is_broken=True)
    assert rig.decided().act == "form"


def test_groups_13_a_job_outlives_a_failure_of_streaming(toy: Any) -> None:
    """The ranks meet again, and it goes on where it stood."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.running(2)
    rig.body(task(3))
    rig.step(1)
    rig.done()
    rig.answer(failure=NO)
    assert rig.decided().act == "form"
    rig.settle()
    assert rig.decided().act == "step"


def test_streaming_23_a_result_of_the_group_is_passed_on_here(toy: Any) -> None:
    """The stage of this rank that awaits it begins before the broker is told, as between any two stages of a worker."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.hear(m.InitializeStage("s", "toy", "show", 1, 1, 9, {}, {}, m.Artifact()))
    rig.stage_done("show")
    rig.body(task(2))
    rig.hear(m.RunTask("s", "toy", "show", 1, 1, 0, {}, True, False, awaits=("picture",)))
    rig.settle()
    work = rig.jobs["show"].work
    assert isinstance(work, m.RunTask)
    assert set(work.inputs) == {"picture"}


@pytest.mark.parametrize("sequence", [0, 1])
def test_groups_02_what_has_no_number_of_its_own_is_not_taken(toy: Any, sequence: int) -> None:
    """The other ranks couldn't be told which it is."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.hear(task(sequence))
    rig.have(sequence or 2)
    assert rig.order is None
    assert rig.core.status()["dropped"]["unnumbered"] == 1


def test_groups_02_a_group_awaits_nothing_that_only_its_leader_makes(toy: Any) -> None:
    """The other ranks would never be given it: such a task is refused."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.body(task(2, awaits=("control",)))
    (failed,) = rig.take(m.StageFailed)
    assert "control" in failed.failure.message


def test_groups_02_strangers_and_late_answers_change_nothing(toy: Any) -> None:
    """A rank that isn't in the group, an answer to an older decision, a decision sent to the leader."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.body(task(2))
    rig.link(5, Have(2))
    rig.link(1, Outcome(rig.decided().number - 1, NO))
    rig.link(1, Decision(1, "step"))
    rig.done()
    assert not rig.take(m.TaskDone, m.StageFailed)
    rig.answer()
    assert len(rig.take(m.TaskDone)) == 1


def test_groups_02_a_group_of_one_decides_without_anybody(toy: Any) -> None:
    """The same order of things, no messages between ranks."""
    rig = LeadRig(toy.spec, world=1).formed()
    rig.hear(initialize(1))
    rig.done()
    rig.hear(run_job(2))
    rig.do(group_events.FilesFound(rig.now, 2))
    assert isinstance(rig.order, StartJob)
    rig.hear(task(3))
    rig.done(stage="high", step=0, steps=2)
    assert isinstance(rig.order, AtStage)
    rig.done(NO)  # nobody else has to be met again
    assert isinstance(rig.order, StepJob)
    assert not rig.told


@pytest.mark.parametrize("world", [1, 2])
def test_groups_02_a_leader_forgets_the_sessions_that_are_over(toy: Any, world: int) -> None:
    """However many come and go, alone or with others: what it keeps of them doesn't grow."""
    rig = LeadRig(toy.spec, world=world).formed()
    for number in range(1, 30):
        rig.live(number, f"s{number}")
        rig.hear(release(f"s{number}"))
        rig.settle()
    numbers = rig.core._leader._bodies
    assert len(numbers._releases) + len(numbers._haves) <= 2
