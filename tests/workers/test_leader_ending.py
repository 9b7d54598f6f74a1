"""How a group ends: a rank that is gone or late, the broker's word, a lost broker, and processes that are asked to stop."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.group_messages import Farewell
from reelwire.workers import events, group_events
from reelwire.workers.group_events import CloseJob, FilesFound, FindFiles, KeepJob, KillRanks, LeaveGroup, ResultMade
from reelwire.workers.leader_jobs import HAND_BACK_S
from reelwire.workers.lockstep import LEAVE_S

from .group_rig import EPOCH, LeadRig, initialize, offer, release, run_job, task
from .test_leader_jobs import RESULT, encoding, made


def stop(rig: LeadRig) -> None:
    """Somebody asks the process to."""
    rig.do(events.ShutdownRequested(rig.now))


def code(rig: LeadRig) -> int | None:
    """The exit code; None: it goes on."""
    return None if rig.stopped is None else rig.stopped.exit_code


# --- ranks that are gone ---------------------------------------------------------------------------------------------


def test_groups_04_a_rank_that_is_gone_ends_the_epoch(toy: Any) -> None:
    """The broker is told, it is killed for certain, the others hear of it, and the process ends with a sentence."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.do(group_events.RankExited(rig.now, 1, "its process has ended"))
    (lost, _) = rig.take(m.RanksLost, m.Goodbye)
    assert (lost.epoch, lost.ranks) == (EPOCH, (1,))
    assert rig.wanted(KillRanks) == [KillRanks((1,))]
    assert isinstance(rig.told[-1], Farewell)
    assert code(rig) == 1
    assert rig.stopped is not None
    assert rig.stopped.reason == ("rank 1 of group g is gone: its process has ended; the group is to be started anew")


def test_groups_04_a_rank_that_does_not_answer_is_treated_as_dead(toy: Any) -> None:
    """After step_timeout_s: whoever hasn't answered is named and killed."""
    rig = LeadRig(toy.spec, world=4).formed()
    rig.body(initialize(1))
    rig.done()
    rig.answer(2)
    rig.tick(29.0)
    assert code(rig) is None
    rig.tick(2.0)
    (lost,) = rig.take(m.RanksLost)
    assert lost.ranks == (1, 3)
    assert "ranks 1, 3 of group g didn't answer within 30 s (initialize)" in lost.reason
    assert rig.wanted(KillRanks) == [KillRanks((1, 3))]
    assert code(rig) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_groups_04_a_leader_whose_own_thread_hangs_ends_itself(toy: Any, world: int) -> None:
    """Nobody else can say so, and nobody else is killed."""
    rig = LeadRig(toy.spec, world=world).formed()
    rig.body(initialize(1)) if world > 1 else rig.hear(initialize(1))
    if world > 1:
        rig.answer()
    rig.tick(31.0)
    assert code(rig) == 1
    assert not rig.wanted(KillRanks)
    assert rig.take(m.RanksLost)[0].ranks == (0,)


def test_groups_04_loading_takes_as_long_as_it_takes(toy: Any) -> None:
    """No limit is on weights; the broker is told for how long the process may be silent."""
    rig = LeadRig(toy.spec, world=2)
    rig.start()
    rig.tick(500.0)
    assert code(rig) is None
    assert rig.take(m.Heartbeat)[-1].busy_for_s > 0


@pytest.mark.parametrize(("epoch", "ends"), [(EPOCH, True), (EPOCH - 1, False), (EPOCH + 1, False)])
def test_groups_04_the_broker_ends_the_epoch_that_is_meant(toy: Any, epoch: int, ends: bool) -> None:
    """Its word on another epoch is stale. The lost are killed by whoever can; the broker knows already."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.hear(m.EndGroup(epoch, (0, 2), "rank 2 is silent"))
    assert (code(rig) == 1) == ends
    assert rig.wanted(KillRanks) == ([KillRanks((2,))] if ends else [])
    assert not rig.take(m.RanksLost)


def test_groups_04_a_rank_without_an_epoch_heeds_any_end(toy: Any) -> None:
    """It was told to leave before it was told of an epoch."""
    rig = LeadRig(toy.spec)
    rig.start()
    rig.hear(m.EndGroup(EPOCH, (), "another rank is gone"))
    assert code(rig) == 1


def test_groups_01_a_group_of_one_keeps_its_weights_when_the_broker_ends_it(toy: Any) -> None:
    """Nothing of it is lost: it attaches again, with its epoch and its job."""
    rig = LeadRig(toy.spec, world=1).formed()
    rig.hear(run_job(1))
    rig.do(FilesFound(rig.now, 1))
    rig.done(stage="high", step=0, steps=3)
    rig.hear(m.EndGroup(EPOCH, (0,), "it was silent"))
    assert code(rig) is None
    (hello,) = rig.take(m.WorkerHello)
    assert (hello.group.epoch, hello.held) == (EPOCH, (m.HeldJob("j", 1),))


# --- brokers that are gone ---------------------------------------------------------------------------------------------


def test_groups_07_sessions_of_a_lost_broker_are_released_by_decisions(toy: Any) -> None:
    """Silently and in order, while the job goes on; then the stage is ready for the next broker."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.running(2)
    rig.body(task(3))
    rig.cut()
    rig.welcome()
    rig.attachment = 2
    assert {each.stage for each in rig.take(m.StageReady)} == {"show"}
    rig.step(1)
    assert (rig.decided().act, rig.decided().session) == ("release", "s")
    rig.settle()
    assert [each.stage for each in rig.take(m.StageReady, m.StageReleased)] == ["draw"]
    assert rig.decided().act == "step"


def test_groups_03_a_long_step_is_not_taken_for_a_stage_that_hangs(toy: Any) -> None:
    """Sessions of a lost broker may wait longer than stuck_s for their release: the step has a limit of its own."""
    rig = LeadRig(toy.spec, stuck_s=5.0).formed()
    rig.live(1)
    rig.running(2)
    rig.cut()
    rig.welcome()
    rig.tick(20.0)
    assert code(rig) is None


# --- processes that are asked to stop ------------------------------------------------------------------------------------


def test_groups_11_an_idle_group_leaves_together(toy: Any) -> None:
    """The other ranks are told by a decision; when all have left, the broker hears it of the leader first."""
    rig = LeadRig(toy.spec, world=3).formed()
    stop(rig)
    assert isinstance(rig.order, LeaveGroup)
    assert rig.decided().act == "leave"
    rig.done()
    rig.answer(1)
    rig.do(group_events.RankExited(rig.now, 2, "its process has ended"))
    assert code(rig) == 0
    assert [type(each) for each in rig.take(m.RanksLost, m.Goodbye)] == [m.Goodbye]
    assert isinstance(rig.told[-1], Farewell)


def test_groups_11_a_leader_waits_for_others_to_leave_but_not_for_long(toy: Any) -> None:
    """A rank that says nothing any more has left, or will be found out by whoever started it."""
    rig = LeadRig(toy.spec).formed()
    stop(rig)
    rig.done()
    rig.tick(LEAVE_S + 1.0)
    assert code(rig) == 0


def test_groups_11_the_broker_may_end_what_leaves(toy: Any) -> None:
    """Another rank's goodbye came first: that is no failure."""
    rig = LeadRig(toy.spec).formed()
    stop(rig)
    rig.hear(m.EndGroup(EPOCH, (), "rank 1 has left"))
    assert code(rig) == 0


def test_groups_11_sessions_end_before_the_group_leaves(toy: Any) -> None:
    """Their chunks come, and their release; the job goes on meanwhile, and no other is begun."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.running(2)
    stop(rig)
    assert len(rig.take(m.Draining)) == 1
    rig.hear(run_job(3, "next"))
    assert not [each for each in rig.wanted(FindFiles) if each.run.job == "next"]
    rig.step(1)
    assert rig.decided().act == "step"
    rig.hear(release())
    rig.step(2, keeps=False)
    assert rig.decided().act == "release"
    rig.settle()
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    assert isinstance(rig.order, LeaveGroup)
    assert not rig.take(m.JobEnded)


def test_groups_12_a_running_job_is_handed_back_as_far_as_it_came(toy: Any) -> None:
    """Its state is kept, it is closed, and the group leaves when the broker says that it has it for good."""
    rig = LeadRig(toy.spec).formed()
    rig.running()
    rig.step(1)
    stop(rig)
    rig.step(2)
    assert isinstance(rig.order, KeepJob)
    rig.keep(offer("kept", 3))
    assert rig.take(m.JobFile)[0].step == 2
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    assert rig.order is None
    rig.tick(HAND_BACK_S - 1.0)
    rig.hear(m.WantFile("kept", 0, 2))
    rig.tick(HAND_BACK_S - 1.0)
    rig.hear(m.WantFile("kept", 2, 3), m.CheckpointKept("j", 1, 1), m.CheckpointKept("j", 2, 2))
    rig.tick(HAND_BACK_S - 1.0)
    assert rig.order is None
    rig.hear(m.CheckpointKept("j", 1, 2))
    assert isinstance(rig.order, LeaveGroup)
    assert not rig.take(m.JobEnded)


def test_groups_12_a_checkpoint_that_is_stored_already_is_not_waited_for(toy: Any) -> None:
    """Nothing was done since: the job is closed, and the group leaves."""
    rig = LeadRig(toy.spec).formed()
    rig.running(kept_every=1)
    rig.step(1)
    rig.keep(offer("kept"))
    rig.hear(m.CheckpointKept("j", 1, 1))
    stop(rig)
    rig.step(2, keeps=False)
    assert isinstance(rig.order, CloseJob)
    rig.settle()
    assert isinstance(rig.order, LeaveGroup)


def test_groups_12_a_broker_that_reads_the_checkpoint_itself_is_given_time(toy: Any) -> None:
    """Its word may be lost, or there is no room for the file: that stays for a while, and no longer."""
    rig = LeadRig(toy.spec).formed()
    rig.running()
    rig.step(1)
    stop(rig)
    rig.step(2)
    rig.keep(offer("kept"))
    rig.settle()
    rig.tick(HAND_BACK_S - 1.0)
    assert rig.order is None
    rig.tick(2.0)
    assert isinstance(rig.order, LeaveGroup)


def test_groups_11_a_job_that_was_handed_back_can_be_cancelled_still(toy: Any) -> None:
    """While its checkpoint waits to be taken: nobody needs that any more."""
    rig = LeadRig(toy.spec).formed()
    rig.running()
    rig.step(1)
    stop(rig)
    rig.step(2)
    rig.keep(offer("kept"))
    rig.settle()
    rig.hear(m.StopJob("j", 1))
    assert rig.take(m.JobEnded) == [m.JobEnded("j", 1, "cancelled")]
    assert isinstance(rig.order, LeaveGroup)


def test_groups_12_what_cannot_be_kept_is_handed_back_as_it_is(toy: Any) -> None:
    """The disk is full at the end: the job goes on from its checkpoint before, or from the beginning."""
    rig = LeadRig(toy.spec).formed()
    rig.running()
    rig.step(1)
    stop(rig)
    rig.step(2)
    rig.done(m.Failure("overload", "the disk is full"))
    assert isinstance(rig.order, CloseJob)


@pytest.mark.parametrize("begin", [encoding, made])
def test_groups_15_a_result_is_waited_for(toy: Any, begin: Any) -> None:
    """A job that is done isn't done again: the group leaves when the broker has its result."""
    rig = LeadRig(toy.spec).formed()
    begin(rig)
    stop(rig)
    if begin is encoding:
        rig.do(ResultMade(rig.now, "j", 1, RESULT))
    assert rig.order is None
    rig.hear(m.ForgetJob("j", 1))
    assert isinstance(rig.order, LeaveGroup)


def test_groups_15_a_result_that_nobody_takes_is_waited_for_no_longer_than_the_drain(toy: Any) -> None:
    """The process ends in an error that says so."""
    rig = LeadRig(toy.spec, drain_s=20.0).formed()
    made(rig)
    stop(rig)
    rig.tick(21.0)
    assert code(rig) == 1
    assert rig.stopped is not None
    assert "job j is made" in rig.stopped.reason


def test_groups_11_a_rank_that_is_asked_to_stop_stops_the_group(toy: Any) -> None:
    """Its farewell drains the leader, once."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.live(1)
    rig.link(2, Farewell("asked to stop"))
    rig.link(1, Farewell("asked to stop"))
    assert len(rig.take(m.Draining)) == 1
    assert code(rig) is None
    rig.hear(release())
    rig.settle()
    assert isinstance(rig.order, LeaveGroup)


def test_groups_11_all_ranks_may_be_asked_to_stop_at_once(toy: Any) -> None:
    """Whoever sends that to the whole group has asked this process once, also where another rank's farewell came first."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.link(1, Farewell("asked to stop", in_order=True))
    stop(rig)
    assert code(rig) is None
    assert len(rig.take(m.Draining)) == 1
    rig.hear(release())
    rig.settle()
    assert isinstance(rig.order, LeaveGroup)
    stop(rig)
    assert code(rig) == 1


def test_groups_11_two_requests_end_it_at_once(toy: Any) -> None:
    """As with any worker; the other ranks are told."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    stop(rig)
    stop(rig)
    assert code(rig) == 1
    assert isinstance(rig.told[-1], Farewell)


@pytest.mark.parametrize("loaded", [False, True])
def test_groups_11_a_leader_without_a_group_leaves_at_once(toy: Any, loaded: bool) -> None:
    """While it loads, and while it waits for the others."""
    rig = LeadRig(toy.spec)
    rig.start()
    if loaded:
        rig.load()
    stop(rig)
    assert code(rig) == 0
