"""What a leader waits for no longer: jobs that come no further, and ranks that don't say that they could begin one."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.group_messages import Farewell
from reelwire.workers.group_events import DropFiles, FilesFound, FrameEncoded, PartWritten, ResultMade, StartJob

from .group_rig import NO, LeadRig, offer, part, run_job
from .test_leader_jobs import OUTPUT, RESULT, encoding


@pytest.mark.parametrize("state", ["finding", "fetching", "encoding"])
def test_groups_13_a_job_that_comes_no_further_is_given_up(toy: Any, state: str) -> None:
    """After step_timeout_s without a part, or a word of the thread that looks or encodes; the group takes the next one."""
    rig = LeadRig(toy.spec).formed()
    if state == "encoding":
        encoding(rig)
    else:
        rig.hear(run_job(1, "j", 1, offer("a", 3)))
    if state == "fetching":
        rig.do(FilesFound(rig.now, 1, {}, (offer("a", 3),)))
        rig.tick(29.0)
        rig.hear(part("a", 0))
        rig.tick(29.0)
        rig.do(PartWritten(rig.now, "a", 1))
    rig.tick(29.0)
    assert not rig.take(m.JobEnded)
    rig.tick(2.0)
    (ended,) = rig.take(m.JobEnded)
    assert (ended.state, ended.failure.kind) == ("failed", "timeout")
    assert "within 30 s" in ended.failure.message
    assert rig.stopped is None
    if state == "encoding":
        rig.wanted(DropFiles)
        rig.do(ResultMade(rig.now, "j", 1, RESULT))
        assert rig.wanted(DropFiles) == [DropFiles("j", 1, "result")]
    rig.body_of_job(2, "next")
    assert isinstance(rig.order, StartJob)


def test_groups_13_a_clip_may_take_as_long_as_its_frames_do(toy: Any) -> None:
    """Nothing that the encoder moves at is given up, and nothing that waits behind it; the results come in the end."""
    rig = LeadRig(toy.spec).formed()
    encoding(rig)
    rig.body_of_job(2, "next")
    rig.settle(stage="high", step=0, steps=9, keeps=True)
    rig.settle(output=OUTPUT)
    for _ in range(4):
        rig.tick(20.0)
        rig.do(FrameEncoded(rig.now))
    rig.do(ResultMade(rig.now, "j", 1, RESULT))
    for _ in range(2):
        rig.tick(20.0)
        rig.do(FrameEncoded(rig.now))
    rig.do(ResultMade(rig.now, "next", 1, RESULT))
    assert [each.job for each in rig.take(m.JobFile, m.JobEnded) if each.job == "next"] == ["next"]
    assert rig.core._hello().held == (m.HeldJob("j", 1, ended=True), m.HeldJob("next", 1, ended=True))


def test_groups_13_an_encoder_that_stands_still_ends_one_job_after_the_other(toy: Any) -> None:
    """Each has the whole time since the one before was given up, as it may have been that one's fault."""
    rig = LeadRig(toy.spec).formed()
    encoding(rig)
    rig.tick(10.0)
    rig.body_of_job(2, "next")
    rig.settle(stage="high", step=0, steps=9, keeps=True)
    rig.settle(output=OUTPUT)
    rig.tick(21.0)
    assert [each.job for each in rig.take(m.JobEnded)] == ["j"]
    rig.tick(28.0)
    assert not [each for each in rig.take(m.JobEnded) if each.job == "next"]
    rig.tick(2.0)
    assert [each.job for each in rig.take(m.JobEnded) if each.job == "next"] == ["next"]


def test_groups_13_of_those_that_wait_for_the_encoder_the_first_is_given_up(toy: Any) -> None:
    """In the order in which they came to it, whichever was submitted first."""
    rig = LeadRig(toy.spec).formed()
    rig.hear(run_job(1, "early", 1, offer("a")))
    for number, job in ((2, "j"), (1, "early")):
        if number == 1:
            rig.do(FilesFound(rig.now, 1, {"a": "/there/a"}))
            rig.have(1)
        else:
            rig.body_of_job(number, job)
        rig.settle(stage="high", step=0, steps=9, keeps=True)
        rig.settle(output=OUTPUT)
        rig.tick(5.0)
    rig.do(FrameEncoded(rig.now))
    rig.tick(31.0)
    assert [each.job for each in rig.take(m.JobEnded)] == ["j"]


def test_groups_13_a_job_waits_its_turn_as_long_as_that_takes(toy: Any) -> None:
    """Whether all have what it needs, or another one's files are fetched first."""
    rig = LeadRig(toy.spec).formed()
    rig.running(1)
    rig.body_of_job(2, "next")
    rig.hear(run_job(3, "b", 1, offer("b", 9)), run_job(4, "c", 1, offer("c")))
    rig.do(FilesFound(rig.now, 3, {}, (offer("b", 9),)))
    rig.do(FilesFound(rig.now, 4, {}, (offer("c"),)))
    for step in range(1, 6):
        rig.tick(20.0)
        rig.hear(part("b", step - 1))
        rig.do(PartWritten(rig.now, "b", step))
        rig.step(step)
    assert not rig.take(m.JobEnded)
    assert rig.stopped is None


def test_groups_04_a_rank_that_never_has_what_a_job_needs_ends_the_epoch(toy: Any) -> None:
    """It is named, and whoever has it isn't."""
    rig = LeadRig(toy.spec, world=4).formed()
    rig.hear(run_job(1))
    rig.do(FilesFound(rig.now, 1))
    rig.have(1, 2)
    rig.tick(29.0)
    assert rig.stopped is None
    rig.tick(2.0)
    (lost,) = rig.take(m.RanksLost)
    assert lost.ranks == (1, 3)
    assert "ranks 1, 3 of group g didn't say within 30 s that what job j needs is there" in lost.reason
    assert rig.stopped is not None
    assert not rig.take(m.JobEnded)


@pytest.mark.parametrize("state", ["running", "encoding", "made"])
@pytest.mark.parametrize("world", [1, 2])
def test_groups_07_what_has_begun_waits_for_a_broker_however_long_that_takes(toy: Any, state: str, world: int) -> None:
    """A job goes on to its result, and that is kept until a broker comes; the log says now and then what is waited for."""
    rig = LeadRig(toy.spec, world).formed()
    rig.running() if state == "running" else encoding(rig)
    if state == "made":
        rig.do(ResultMade(rig.now, "j", 1, RESULT))
    rig.cut()
    for step in range(1, 9):
        rig.tick(15.0)
        if state == "running":
            rig.step(step)
        else:
            rig.do(FrameEncoded(rig.now))
    assert rig.stopped is None
    assert 3 <= rig.logged.count("broker_away") <= 4
    rig.sent.clear()
    rig.welcome()
    assert rig.take(m.JobFile if state == "made" else m.JobProgress)


@pytest.mark.parametrize("had", ["nothing", "a job that has failed", "a job that wasn't begun"])
def test_groups_07_a_leader_that_loses_nothing_gives_up_without_a_broker(toy: Any, had: str) -> None:
    """After connect_timeout_s, and tells the other ranks."""
    rig = LeadRig(toy.spec).formed()
    if had == "a job that has failed":
        rig.running()
        rig.settle(failure=NO)
        rig.settle()
        rig.settle()
    elif had == "a job that wasn't begun":
        rig.hear(run_job(1, "j", 1, offer("a")))
    rig.cut()
    rig.tick(29.0)
    assert rig.stopped is None
    rig.tick(2.0)
    assert rig.stopped is not None
    assert rig.stopped.exit_code == 3
    assert [each.in_order for each in rig.told if isinstance(each, Farewell)] == [False]
