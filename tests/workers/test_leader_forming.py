"""How a leader brings its group together: weights, link, process group, and what the broker hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.workers import group_events
from reelwire.workers.actions import BuildStage, Ready
from reelwire.workers.config import WorkerConfig
from reelwire.workers.core import WorkerCore
from reelwire.workers.group_events import AtStage, Form, KillRanks, LoadJobs, OpenLink

from .group_rig import EPOCH, KINDS, NO, LeadRig, initialize


def test_groups_04_a_leader_says_its_place_and_the_kinds_of_jobs(toy: Any) -> None:
    """The hello has group, epoch, sequence and jobs; only the stages that all compute are grouped."""
    rig = LeadRig(toy.spec)
    rig.start()
    (hello,) = rig.take(m.WorkerHello)
    assert hello.group == m.Membership("g", 0, 2)
    assert hello.jobs == KINDS
    assert {each.stage: each.grouped for each in hello.stages} == {"draw": True, "show": False}


def test_groups_04_weights_come_first_and_one_after_the_other(toy: Any) -> None:
    """The group thread builds its stages, then loads the jobs; a stage of the leader alone has its own thread."""
    rig = LeadRig(toy.spec)
    rig.start()
    assert isinstance(rig.order, AtStage)
    assert isinstance(rig.order.job.work, BuildStage)
    assert set(rig.jobs) == {"show"}
    rig.done()
    assert isinstance(rig.order, LoadJobs)
    rig.done()
    assert rig.order is None


def test_groups_04_the_group_meets_when_all_are_there_with_their_weights(toy: Any) -> None:
    """`form` is decided when the link is open, all ranks have said hello and this one has loaded; not before."""
    rig = LeadRig(toy.spec, world=3)
    rig.start()
    rig.lead()
    assert rig.wanted(OpenLink) == [OpenLink(EPOCH, b"secret", rig.members)]
    rig.do(group_events.Opened(rig.now, EPOCH, "tcp://link", "host:1"))
    assert rig.take(m.GroupOpened) == [m.GroupOpened(EPOCH, "tcp://link", "host:1")]
    rig.greet(1)
    rig.load()
    assert not rig.told
    rig.greet(2)
    assert rig.order == Form(EPOCH, 1, "host:1")
    assert (rig.decided().act, rig.decided().round, rig.decided().number) == ("form", 1, 1)


def test_groups_04_the_broker_hears_that_the_group_is_formed_before_its_stages_are_ready(toy: Any) -> None:
    """GroupFormed, then StageReady of the grouped stage, and only then is the process ready."""
    rig = LeadRig(toy.spec)
    rig.start()
    rig.load()
    assert {each.stage for each in rig.take(m.StageReady)} == {"show"}
    rig.lead()
    rig.do(group_events.Opened(rig.now, EPOCH, "tcp://link", "host:1"))
    rig.greet()
    rig.done()
    assert not rig.wanted(Ready)
    rig.take()
    rig.answer()
    formed, ready = rig.take(m.GroupFormed, m.StageReady)
    assert formed == m.GroupFormed(EPOCH)
    assert ready.stage == "draw"
    assert len(rig.wanted(Ready)) == 1


def test_groups_01_a_group_of_one_needs_no_link(toy: Any) -> None:
    """It is formed as soon as it is told to lead and has its weights."""
    rig = LeadRig(toy.spec, world=1)
    rig.start()
    rig.lead()
    rig.load()
    assert rig.take(m.GroupFormed) == [m.GroupFormed(EPOCH)]
    assert not rig.told
    assert not rig.wanted(OpenLink)


def test_groups_01_a_worker_that_does_jobs_leads_itself(toy: Any) -> None:
    """Without a group's name it is a group of its own, with no grouped stage; without jobs it is a worker like any other."""
    config = WorkerConfig(name="w", jobs="toy")
    alone = WorkerCore(config, toy.spec, "1.2.3", kinds=KINDS)
    assert alone._hello().group == m.Membership("w", 0, 1)
    plain = WorkerCore(WorkerConfig(name="w"), toy.spec, "1.2.3")
    assert plain._hello().group is None
    assert plain._leader is None


def test_groups_04_a_group_that_cannot_meet_is_over(toy: Any) -> None:
    """A failure of `form`, on whichever rank: the broker is told, nobody is killed, and all begin anew."""
    rig = LeadRig(toy.spec)
    rig.start()
    rig.load()
    rig.lead()
    rig.do(group_events.Opened(rig.now, EPOCH, "tcp://link", "host:1"))
    rig.greet()
    rig.done()
    rig.answer(failure=NO)
    (lost,) = rig.take(m.RanksLost)
    assert lost.ranks == ()
    assert not rig.wanted(KillRanks)
    assert rig.stopped is not None
    assert rig.stopped.exit_code == 1
    assert "group g can't meet: rank 1: no" in rig.stopped.reason


@pytest.mark.parametrize(("epoch", "ends"), [(EPOCH, False), (EPOCH - 1, False), (EPOCH + 1, True)])
def test_groups_04_another_epoch_is_a_stale_one_or_the_end(toy: Any, epoch: int, ends: bool) -> None:
    """LeadGroup of the same or an older epoch changes nothing; a later one can't be entered with ranks of this one."""
    rig = LeadRig(toy.spec).formed()
    rig.lead(epoch)
    assert (rig.stopped is not None) == ends
    assert not rig.wanted(OpenLink)


def test_groups_01_a_group_of_one_enters_any_later_epoch(toy: Any) -> None:
    """It has met itself: what it has goes on, and the new epoch is formed at once."""
    rig = LeadRig(toy.spec, world=1).formed()
    rig.lead(EPOCH + 1)
    assert rig.take(m.GroupFormed) == [m.GroupFormed(EPOCH + 1)]


@pytest.mark.parametrize(("kind", "code"), [("request", 2), ("stage", 1)])
@pytest.mark.parametrize("builds", [0, 1])
def test_groups_06_weights_that_cannot_be_loaded_end_the_process(toy: Any, kind: Any, code: int, builds: int) -> None:
    """With the exit code that a wrong setting, or a fault, has."""
    rig = LeadRig(toy.spec)
    rig.start()
    for _ in range(builds):
        rig.done()
    rig.done(m.Failure(kind, "no such weights", field="model"))
    assert rig.stopped is not None
    assert rig.stopped.exit_code == code
    assert "model: no such weights" in rig.stopped.reason


def test_groups_04_a_new_broker_finds_the_epoch_and_what_was_numbered(toy: Any) -> None:
    """The hello after a lost broker says epoch and the highest number; the stages are ready at once, formed as they are."""
    rig = LeadRig(toy.spec).formed()
    rig.body(initialize(4))
    rig.settle()
    rig.cut()
    (hello,) = rig.take(m.WorkerHello)
    assert (hello.group.epoch, hello.group.sequence) == (EPOCH, 4)
    rig.settle()  # the session is released by all, silently
    rig.welcome()
    assert {each.stage for each in rig.take(m.StageReady)} == {"draw", "show"}
