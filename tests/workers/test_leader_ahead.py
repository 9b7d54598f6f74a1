"""Steps of a job that don't wait for all ranks: when a leader goes ahead, and what comes of whatever goes wrong meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reelwire import messages as m
from reelwire.group_messages import Farewell, Outcome
from reelwire.pipeline.job import JobOutput
from reelwire.workers import events
from reelwire.workers.group_events import (
    CloseJob,
    KeepJob,
    KillRanks,
    MakeResult,
    OrderReport,
    RankExited,
    StartJob,
    StepJob,
)
from reelwire.workers.lockstep import Pending, Underway

from .group_rig import BROKE, EPOCH, NO, LeadRig, offer, task

NO_JOB = m.Failure("stage", "there is no job to go on with")
OOM = m.Failure("stage", "out of memory")
OUTPUT = JobOutput(np.zeros((1, 2, 2, 3), np.uint8))
ENDED = m.JobEnded("j", 1, "failed", m.Failure("stage", "rank 2: no"))


def stood(rig: LeadRig, step: int, **more: Any) -> None:
    """The leader's own thread has done a step."""
    rig.done(**{"stage": "high", "step": step, "steps": 9, "keeps": True, "took_s": 2.0, **more})


def ahead(toy: Any, world: int = 3) -> LeadRig:
    """The leader is at the second step of a job, the others at the first."""
    rig = LeadRig(toy.spec, world=world).formed()
    rig.running()
    stood(rig, 1)
    return rig


def outcome(rig: LeadRig, rank: int, behind: int, failure: m.Failure | None = None, *, is_broken: bool = False) -> None:
    """A rank answers the newest decision, or one before it."""
    number = rig.decided().number - behind
    rig.answered[rank] = max(rig.answered[rank], number)
    rig.link(rank, Outcome(number, failure, is_broken))


# --- when -----------------------------------------------------------------------------------------------------------------


def test_groups_02_a_step_is_decided_when_the_leader_has_done_the_one_before(toy: Any) -> None:
    """Without a word of the other ranks; but never a third before all of them have answered the first."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.running()
    number = rig.decided().number
    stood(rig, 1)
    assert (rig.decided().act, rig.decided().number) == ("step", number + 1)
    assert isinstance(rig.order, StepJob)
    stood(rig, 2)
    rig.answer(1)
    outcome(rig, 1, behind=0)
    assert rig.order is None
    rig.answer(2)
    assert rig.decided().number == number + 2
    assert isinstance(rig.order, StepJob)
    outcome(rig, 2, behind=1)
    stood(rig, 3)
    assert rig.decided().number == number + 3


def test_groups_02_the_first_step_may_follow_the_beginning_at_once(toy: Any) -> None:
    """It is a yield like any other."""
    rig = LeadRig(toy.spec).formed()
    rig.body_of_job()
    assert isinstance(rig.order, StartJob)
    stood(rig, 0)
    assert rig.decided().act == "step"


def test_groups_10_progress_is_told_when_the_leader_has_done_a_step(toy: Any) -> None:
    """Each step once, whoever is behind; what it took is the thread's own time."""
    rig = ahead(toy)
    assert [each.step for each in rig.take(m.JobProgress) if each.state == "running"] == [0, 1]
    rig.answer()
    assert not rig.take(m.JobProgress)
    stood(rig, 2, took_s=1.5)
    (told,) = rig.take(m.JobProgress)
    assert (told.step, told.step_s) == (2, 1.5)


@pytest.mark.parametrize("world", [1, 2])
def test_groups_03_what_a_job_gave_away_is_told_with_its_next_step_and_no_other_job(toy: Any, world: int) -> None:
    """Also where the job was cancelled before it could be told."""
    rig = LeadRig(toy.spec, world=world).formed()
    rig.live(1)
    rig.running(2)
    for index, seconds in enumerate((4.0, 3.0)):
        rig.body(task(3 + index, index))
        rig.step(1 + index)
        rig.now += seconds
        if index:
            rig.hear(m.StopJob("j", 1))
        rig.settle()
    assert [each.given_s for each in rig.take(m.JobProgress) if each.step == 2] == [4.0]
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    rig.body_of_job(5, "next")
    stood(rig, 0)
    assert rig.take(m.JobProgress)[-1].given_s == 0.0


@pytest.mark.parametrize("what", ["cancel", "forgotten", "stop", "failure", "chunk", "release", "checkpoint", "output"])
def test_groups_02_all_else_waits_for_all_ranks(toy: Any, what: str) -> None:
    """What is due at a yield is decided when nobody is at a step any more."""
    rig = LeadRig(toy.spec, world=3).formed()
    if what in ("chunk", "release"):
        rig.live(1)
    rig.running(2, kept_every=1 if what == "checkpoint" else 0)
    told = len(rig.told)
    match what:
        case "cancel":
            rig.hear(m.StopJob("j", 1))
        case "forgotten":
            rig.hear(m.ForgetJob("j", 1))
        case "stop":
            rig.do(events.ShutdownRequested(rig.now))
        case "failure":
            rig.answer(1, failure=NO)
        case "chunk":
            rig.body(task(3))
        case "release":
            rig.hear(m.ReleaseStage("s", "toy", "draw", 1, 1))
    stood(rig, 1, output=OUTPUT if what == "output" else None)
    assert rig.order is None
    assert len(rig.told) == told
    if what != "failure":
        rig.answer(1)
    assert rig.order is None
    rig.answer(2)
    if what == "output":
        assert len(rig.wanted(MakeResult)) == 1
        assert rig.order is None
    elif what in ("checkpoint", "stop"):
        assert isinstance(rig.order, KeepJob)
    else:
        act = {"chunk": "run", "release": "release"}.get(what, "end")
        assert (rig.decided().act, len(rig.told)) == (act, told + 1)


def test_groups_03_a_chunk_that_some_rank_lacks_holds_nothing_back(toy: Any) -> None:
    """It couldn't be run in any case; and once it can be, no step more is decided before it."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.live(1)
    rig.running(2)
    rig.hear(task(3))
    rig.have(3, 1)
    stood(rig, 1)
    assert rig.decided().act == "step"
    rig.have(3, 2)
    rig.answer()
    stood(rig, 2)
    assert rig.order is None
    rig.answer()
    assert rig.decided().act == "run"


def test_groups_12_a_state_is_kept_where_all_ranks_stand(toy: Any) -> None:
    """A checkpoint that becomes due at the second of two steps waits for the answers to both."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.running(kept_every=2)
    stood(rig, 1)
    stood(rig, 2)
    rig.answer()
    assert rig.order is None
    rig.answer(1)
    assert rig.order is None
    rig.answer(2)
    assert isinstance(rig.order, KeepJob)
    rig.keep(offer("kept"))
    assert [each.step for each in rig.take(m.JobFile)] == [2]
    assert isinstance(rig.order, StepJob)


def test_groups_02_a_group_of_one_is_never_ahead(toy: Any) -> None:
    """Its own answer is all that there is."""
    rig = LeadRig(toy.spec, world=1).formed()
    rig.running()
    stood(rig, 1)
    assert isinstance(rig.order, StepJob)
    stood(rig, 2)
    assert isinstance(rig.order, StepJob)
    assert not rig.told


def test_groups_02_a_rank_answers_the_first_before_the_second(toy: Any) -> None:
    """An answer in another order, or for the third time, is one to nothing; one to what nobody decided is strange."""
    rig = ahead(toy)
    outcome(rig, 1, behind=0, failure=NO)
    for behind in (1, 0, 1, 0):
        outcome(rig, 1, behind)
    assert rig.core.status()["dropped"] == {}
    rig.link(1, Outcome(rig.decided().number + 1))
    assert rig.core.status()["dropped"] == {"unexpected": 1}
    rig.answer(2)
    stood(rig, 2)
    assert isinstance(rig.order, StepJob)


def test_groups_02_what_is_underway_holds_two_and_only_a_step_behind_a_step() -> None:
    """Whoever decides more has a bug, and is told so."""
    at = Underway()
    at.add(Pending(StepJob(), None, 0.0, {0, 1}))
    with pytest.raises(AssertionError, match="at something"):
        at.add(Pending(StepJob(), None, 0.0, {0, 1}))
    at.done(OrderReport(StepJob()))
    with pytest.raises(AssertionError, match="at something"):
        at.add(Pending(CloseJob(), None, 0.0, {0, 1}))
    at.add(Pending(StepJob(), None, 0.0, {0, 1}))
    at.done(OrderReport(StepJob()))
    with pytest.raises(AssertionError, match="at something"):
        at.add(Pending(StepJob(), None, 0.0, {0, 1}))


# --- failures ----------------------------------------------------------------------------------------------------------------


def goes_on(rig: LeadRig, ended: m.JobEnded = ENDED) -> None:
    """The job is closed, has failed once and for this reason; the ranks meet again, and take the next one."""
    assert isinstance(rig.order, CloseJob)
    assert not rig.take(m.JobEnded)
    assert not rig.wanted(MakeResult)
    rig.settle()
    assert rig.take(m.JobEnded) == [ended]
    assert rig.logged.count("job_failed") == 1
    assert (rig.decided().act, rig.decided().round) == ("form", 2)
    rig.body_of_job(9, "next")
    rig.settle()
    assert rig.decided().act == "start"
    stood(rig, 0)
    assert rig.decided().act == "step"


SECOND: dict[str, dict[str, Any]] = {
    "broke": {"failure": BROKE, "is_broken": True},
    "raised": {"failure": OOM},
    "went well": {"stage": "high", "step": 2, "steps": 9},
    "ended": {"output": OUTPUT},
}


@pytest.mark.parametrize("second", list(SECOND))
@pytest.mark.parametrize("order", ["first before second", "leader first", "both of a rank first"])
def test_groups_13_a_step_that_failed_while_the_leader_was_at_the_next_fails_the_job(
    toy: Any, second: str, order: str
) -> None:
    """Whatever comes of the next one, which rank 2 can't do without a job: the cause is what failed first."""
    rig = ahead(toy)
    if order == "leader first":
        rig.done(**SECOND[second])
    if order == "both of a rank first":
        outcome(rig, 2, 1, NO)
        outcome(rig, 2, 0, NO_JOB)
        outcome(rig, 1, 1)
    else:
        outcome(rig, 1, 1)
        outcome(rig, 2, 1, NO)
    if order != "leader first":
        assert isinstance(rig.order, StepJob)
        rig.done(**SECOND[second])
    assert rig.order is None  # nobody is asked for anything while some rank is at it
    outcome(rig, 1, 0, BROKE, is_broken=True)
    if order != "both of a rank first":
        outcome(rig, 2, 0, NO_JOB)
    goes_on(rig)


@pytest.mark.parametrize("first", ["well", "broken", "failed"])
def test_groups_13_a_leader_that_fails_at_the_second_is_the_cause_unless_another_failed_before(
    toy: Any, first: str
) -> None:
    """Who was only thrown out of the end of the first, by that, isn't."""
    rig = ahead(toy)
    rig.done(OOM)
    outcome(rig, 1, 1)
    match first:
        case "well":
            outcome(rig, 2, 1)
            outcome(rig, 2, 0, BROKE, is_broken=True)
        case "broken":
            outcome(rig, 2, 1, BROKE, is_broken=True)
            outcome(rig, 2, 0, NO_JOB)
        case "failed":
            outcome(rig, 2, 1, NO)
            outcome(rig, 2, 0, NO_JOB)
    assert rig.order is None
    outcome(rig, 1, 0, BROKE, is_broken=True)
    goes_on(
        rig, ENDED if first == "failed" else m.JobEnded("j", 1, "failed", m.Failure("stage", "rank 0: out of memory"))
    )


def test_groups_13_no_progress_is_told_of_a_job_that_is_known_to_have_failed(toy: Any) -> None:
    """The leader's own thread may have done the next step, without a collective in it."""
    rig = ahead(toy)
    outcome(rig, 2, 1, NO)
    rig.sent.clear()
    stood(rig, 2)
    assert not rig.take(m.JobProgress)
    assert rig.order is None


def test_groups_13_a_result_waits_for_the_answers_to_both_steps(toy: Any) -> None:
    """The leader came to the end while others were at the step before: that may have failed yet."""
    rig = ahead(toy)
    rig.done(output=OUTPUT)
    rig.answer()
    rig.answer(1)
    assert not rig.wanted(MakeResult)
    rig.answer(2)
    assert len(rig.wanted(MakeResult)) == 1


def test_groups_13_what_all_ranks_raise_alike_is_nobody_s_fault(toy: Any) -> None:
    """At the second step, as at any other: the reason is told as it is."""
    rig = ahead(toy)
    rig.done(NO)
    rig.answer()
    rig.answer(failure=NO)
    goes_on(rig, m.JobEnded("j", 1, "failed", NO))


@pytest.mark.parametrize("first", [False, True])
def test_groups_13_a_job_that_was_cancelled_and_has_failed_is_closed_once(toy: Any, first: bool) -> None:
    """Whichever of both came first."""
    rig = ahead(toy)
    if first:
        rig.hear(m.StopJob("j", 1))
    rig.answer(1)
    outcome(rig, 2, 1, NO)
    if not first:
        rig.hear(m.StopJob("j", 1))
    rig.done(BROKE, is_broken=True)
    outcome(rig, 1, 0, BROKE, is_broken=True)
    outcome(rig, 2, 0, NO_JOB)
    goes_on(rig)


# --- ends --------------------------------------------------------------------------------------------------------------------


def test_groups_04_who_has_not_answered_the_first_is_to_blame(toy: Any) -> None:
    """The leader, and whoever waits with it in the second, can't go on for that."""
    rig = ahead(toy, world=4)
    rig.answer(1, 2)
    outcome(rig, 1, 0)
    rig.tick(31.0)
    (lost,) = rig.take(m.RanksLost)
    assert lost.ranks == (3,)
    assert "rank 3 of group g didn't answer within 30 s (step)" in lost.reason
    assert rig.wanted(KillRanks) == [KillRanks((3,))]


def test_groups_04_the_time_of_the_second_begins_when_all_have_answered_the_first(toy: Any) -> None:
    """A rank that was slow in the first has all of it."""
    rig = ahead(toy)
    rig.answer(1)
    rig.tick(25.0)
    rig.answer(2)
    rig.tick(28.0)
    assert rig.stopped is None
    outcome(rig, 1, 0)
    rig.tick(3.0)
    assert rig.take(m.RanksLost)[0].ranks == (0, 2)


@pytest.mark.parametrize("how", ["gone", "ended"])
def test_groups_04_a_rank_that_is_gone_ends_the_epoch_whatever_is_underway(toy: Any, how: str) -> None:
    """No job is told to have failed: it is begun again."""
    rig = ahead(toy)
    outcome(rig, 1, 1, BROKE, is_broken=True)
    if how == "gone":
        rig.do(RankExited(rig.now, 2, "its process has ended"))
    else:
        rig.hear(m.EndGroup(EPOCH, (2,), "it is silent"))
    assert rig.stopped is not None
    assert rig.stopped.exit_code == 1
    assert rig.wanted(KillRanks) == [KillRanks((2,))]
    assert not rig.take(m.JobEnded)


def test_groups_11_a_cancel_takes_effect_when_both_are_answered(toy: Any) -> None:
    """No third step; closed by all."""
    rig = ahead(toy)
    rig.hear(m.StopJob("j", 1))
    rig.answer()
    stood(rig, 2)
    rig.answer(1)
    assert rig.order is None
    rig.answer(2)
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    assert rig.take(m.JobEnded) == [m.JobEnded("j", 1, "cancelled")]
    assert rig.order is None


@pytest.mark.parametrize("who", ["leader", "another"])
def test_groups_12_a_stop_hands_back_what_all_ranks_have_done(toy: Any, who: str) -> None:
    """Both steps are in what is kept."""
    rig = ahead(toy)
    if who == "leader":
        rig.do(events.ShutdownRequested(rig.now))
    else:
        rig.link(2, Farewell("asked to stop", in_order=True))
    stood(rig, 2)
    rig.answer()
    assert rig.order is None
    rig.answer()
    assert isinstance(rig.order, KeepJob)
    rig.keep(offer("kept"))
    assert [each.step for each in rig.take(m.JobFile)] == [2]
    assert isinstance(rig.order, CloseJob)


def test_groups_07_a_lost_broker_changes_nothing_for_who_is_ahead(toy: Any) -> None:
    """The steps go on without it, and the next one is told where the leader stands."""
    rig = ahead(toy)
    rig.cut()
    rig.answer()
    stood(rig, 2)
    assert isinstance(rig.order, StepJob)
    rig.sent.clear()
    rig.welcome()
    (told,) = rig.take(m.JobProgress)
    assert told.step == 2
    assert rig.core._hello().held == (m.HeldJob("j", 1),)


def test_groups_07_what_a_lost_broker_began_is_answered_all_the_same(toy: Any) -> None:
    """A failure while it is away is kept for the next one, with its cause."""
    rig = ahead(toy)
    rig.cut()
    outcome(rig, 1, 1)
    outcome(rig, 2, 1, NO)
    rig.done(BROKE, is_broken=True)
    outcome(rig, 1, 0, BROKE, is_broken=True)
    outcome(rig, 2, 0, NO_JOB)
    rig.settle()
    rig.welcome()
    assert rig.take(m.JobEnded) == [ENDED]


def test_groups_02_files_are_found_and_bodies_come_while_two_are_underway(toy: Any) -> None:
    """The next job is made ready, and begins when this one has ended."""
    rig = ahead(toy)
    rig.body_of_job(5, "next")
    assert isinstance(rig.order, StepJob)
    rig.done(output=OUTPUT)
    rig.answer()
    assert rig.order is None
    rig.answer()
    assert isinstance(rig.order, StartJob)
    assert rig.order.run.job == "next"
