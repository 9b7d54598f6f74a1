"""What a cancel that was answered is worth: the broker may be killed between any two steps of it, and the answer holds."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.events import StoreStalled
from reelwire.messages import HeldJob

from .fake_jobs import Shop, Worker

KILLED = ("asked", "written", "answered", "stopped")


@pytest.fixture
def shop() -> Shop:
    """A broker with nobody attached."""
    return Shop()


def running(shop: Shop, **more: Any) -> tuple[Any, Any, Any]:
    """A client, a worker, and a job that it does."""
    worker, client = shop.worker(), shop.client()
    client.accepted(**more)
    worker.progress(worker.runs[-1], 1)
    return client, worker, worker.runs[-1]


def back(shop: Shop, worker: Worker, run: m.RunJob, *, ended: bool = False) -> Worker:
    """A worker that finds the next broker, with the job that it has."""
    found = Worker(shop, worker.route, worker.name, worker.kinds)
    found.files, found.epoch = worker.files, worker.epoch
    return found.hello(held=(HeldJob(run.job, run.attempt, ended=ended),))


def killed(shop: Shop, client: Any, worker: Any, run: m.RunJob, when: str) -> Shop:
    """Cancel a job, and kill the broker at one of the steps; the next one, which nobody has found yet."""
    shop.commits = False
    assert client.ask(m.CancelJob, run.job) is None
    assert worker.heard(m.StopJob) == [m.StopJob(run.job, run.attempt)]
    if when in ("answered", "stopped"):
        shop.commit()
        assert client.heard(m.Jobs)[-1].jobs[0].state == "running"
    if when == "stopped":
        worker.fail(run, state="cancelled")
    return shop.restart(1 if when == "written" else 0)


def test_groups_11_a_cancel_is_answered_when_it_is_durable_and_the_leader_told_before(shop: Shop) -> None:
    """The stop doesn't wait for the journal, the answer does; whoever asks again is answered with the first."""
    client, worker, run = running(shop)
    shop.commits = False
    for _ in range(3):
        assert client.ask(m.CancelJob, run.job) is None
    assert worker.heard(m.StopJob) == [m.StopJob(run.job, 1)]
    shop.commit()
    assert [answer.jobs[0].state for answer in client.heard(m.Jobs)] == ["running"] * 3
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "running"


@pytest.mark.parametrize("when", KILLED)
@pytest.mark.parametrize("leader", ["runs", "stopped", "made", "gone"])
def test_groups_11_a_broker_that_is_killed_at_any_step_of_a_cancel_keeps_its_word(
    shop: Shop, when: str, leader: str
) -> None:
    """A cancel that was written ends the job, whatever its leader says of it or made; it is told so, and then takes the next."""
    client, worker, run = running(shop)
    shop = killed(shop, client, worker, run, when)
    client = shop.client()
    if leader != "gone":
        worker = back(shop, worker, run, ended=leader != "runs")
    if when == "asked":  # nobody was told that it is cancelled
        assert client.info(run.job).state == "running"
        return
    assert client.info(run.job).state == "cancelled"
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "cancelled"
    if leader == "gone":
        other = shop.worker("other")
        following = client.accepted("k2")
        assert [each.job for each in other.runs] == [following]
        return
    following = client.accepted("k2")
    if leader == "runs":
        assert worker.heard(m.StopJob) == [m.StopJob(run.job, 1)]
        assert not worker.runs
    worker.finish(run) if leader == "made" else worker.fail(run, state="cancelled")
    assert m.ForgetJob(run.job, 1) in worker.heard(m.ForgetJob)
    assert [each.job for each in worker.runs] == [following]
    assert client.info(run.job).state == "cancelled"


def test_groups_11_a_leader_that_comes_before_the_next_broker_looks_at_its_jobs_is_told_to_stop(shop: Shop) -> None:
    """It isn't taken for one that goes on, although the end of the job is written later."""
    client, worker, run = running(shop)
    shop = killed(shop, client, worker, run, "answered")
    shop.turns = shop.commits = False
    worker = back(shop, worker, run)
    assert worker.heard(m.StopJob) == [m.StopJob(run.job, 1)]
    assert shop.job(run.job).state == "rejoining"
    shop.turn()
    shop.commit()
    assert shop.disk.records[run.job].standing == "cancelled"


@pytest.mark.parametrize("when", ["asked", "written"])
def test_groups_11_the_end_of_a_cancelled_job_outlives_a_kill_between_it_and_the_leaders_word(
    shop: Shop, when: str
) -> None:
    """A killed broker that is killed again before the end is written says the same a third time."""
    client, worker, run = running(shop)
    shop = killed(shop, client, worker, run, "answered")
    shop.commits = False
    shop.turn()
    shop = shop.restart(int(when == "written"))
    worker = back(shop, worker, run)
    assert worker.heard(m.StopJob) == [m.StopJob(run.job, 1)]
    assert shop.client().info(run.job).state == "cancelled"
    assert shop.disk.records[run.job].losses == 0


def test_groups_07_an_end_that_came_before_a_cancel_is_kept(shop: Shop) -> None:
    """A cancel of what has ended, durably or not yet, is answered when the end is durable: with that end, for good."""
    client, worker, run = running(shop)
    shop.commits = False
    worker.finish(run, b"done")
    assert client.ask(m.CancelJob, run.job) is None
    shop.commit()
    assert client.heard(m.Jobs)[-1].jobs[0].state == "succeeded"
    shop = shop.restart()
    client = shop.client()
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "succeeded"
    assert client.fetch(run.job) == b"done"


@pytest.mark.parametrize("state", ["taking", "exporting"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_groups_11_a_result_that_was_made_before_the_cancel_counts_unless_the_broker_dies(
    shop: Shop, state: str, is_killed: bool
) -> None:
    """The broker that has the result in hand takes it; the next one has only the cancel, and keeps to that."""
    client, worker, run = running(shop, output="/out/a.mp4" if state == "exporting" else "")
    worker.gives, shop.works = state == "exporting", False
    worker.finish(run, b"done")
    while shop.job(run.job).state != state:
        shop.work()
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "encoding"
    if is_killed:
        shop = shop.restart()
        worker, client = back(shop, worker, run, ended=True), shop.client()
        worker.finish(run, b"done")
        assert client.info(run.job).state == "cancelled"
        assert worker.heard(m.ForgetJob)
        return
    shop.works = True
    shop.settle()
    if state == "taking":
        worker.gives = True
        worker.give(worker.heard(m.WantFile)[-1])
        shop.settle()
    assert client.info(run.job).state == "succeeded"


def test_groups_11_while_nothing_can_be_made_durable_a_cancel_is_kept_once(shop: Shop) -> None:
    """The leader stops all the same, the first answer leaves when the disk can be written; others are told to come again."""
    client, worker, run = running(shop)
    shop.commits = False
    shop.handle(StoreStalled(shop.now, "the disk is full"))
    assert client.ask(m.CancelJob, run.job) is None
    assert worker.heard(m.StopJob)
    for _ in range(3):
        assert client.ask(m.CancelJob, run.job).failure.kind == "overload"
    assert shop.jobs.status()["uncommitted"] == 1
    shop.handle(StoreStalled(shop.now, ""))
    shop.commit()
    assert client.heard(m.Jobs)[-1].jobs[0].state == "running"
