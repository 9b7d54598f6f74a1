"""Jobs of a group whose leader loses its connection and lives: they go on in the same attempt, and nobody is lost."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.events import Unreachable
from reelwire.messages import HeldJob

from .fake_jobs import Shop, Worker


@pytest.fixture
def shop() -> Shop:
    """A broker with nobody attached."""
    return Shop()


def running(shop: Shop) -> tuple[Any, Worker, Any]:
    """A client, a worker, and a job that it does."""
    worker, client = shop.worker(), shop.client()
    client.accepted()
    run = worker.runs[-1]
    worker.progress(run, 3)
    return client, worker, run


def cut(shop: Shop, worker: Worker) -> None:
    """The connection of a worker breaks, and the broker finds that out."""
    worker.attachment = 0
    shop.handle(Unreachable(shop.now, worker.route))
    shop.turn()
    assert worker.group.state == "waiting"


def back(worker: Worker, *held: HeldJob) -> None:
    """It says hello again."""
    worker.inbox.clear()
    worker.hello(held=held)


@pytest.mark.parametrize("is_cut", [False, True])
def test_groups_07_a_job_goes_on_when_its_leader_is_back(shop: Shop, is_cut: bool) -> None:
    """In the attempt that it had; what the leader says then counts, and the result is had as ever."""
    client, worker, run = running(shop)
    if is_cut:
        cut(shop, worker)
        assert client.info(run.job).state == "running"
        shop.advance(1.0)
    back(worker, HeldJob(run.job, run.attempt))
    assert worker.inbox == []
    worker.progress(run, 5)
    info = client.info(run.job)
    assert (info.state, info.step, info.attempt) == ("running", 5, 1)
    assert shop.job(run.job).record.losses == 0
    worker.finish(run, b"done")
    assert client.fetch(run.job) == b"done"
    assert shop.counter("groups_lost") == 0


def test_groups_13_a_job_that_its_leader_had_not_begun_is_done_again(shop: Shop) -> None:
    """It has dropped what it hadn't begun, or was never told: that is the next attempt, and no loss."""
    _, worker, run = running(shop)
    back(worker)
    again = worker.runs[-1]
    assert (again.job, again.attempt) == (run.job, 2)
    assert shop.job(run.job).record.losses == 0


def test_groups_13_a_job_whose_leader_does_not_come_back_is_a_loss(shop: Shop) -> None:
    """Its group is over, and another one has it from the newest checkpoint."""
    client, worker, run = running(shop)
    worker.checkpoint(run, 4)
    cut(shop, worker)
    other = shop.worker("other")
    assert other.runs == []
    shop.advance(4.0)
    assert shop.job(run.job).record.losses == 1
    again = other.runs[-1]
    assert (again.job, again.attempt, again.checkpoint_step) == (run.job, 2, 4)
    assert client.info(run.job).attempt == 2


def test_groups_13_the_last_loss_may_come_while_the_leader_is_away(shop: Shop) -> None:
    """The job fails, with the reason, where it would have to begin again: until then the leader may come back with it."""
    shop = Shop(job_attempts=1)
    client, worker, run = running(shop)
    cut(shop, worker)
    shop.advance(4.0)
    assert client.info(run.job).state == "queued"
    other = shop.worker("other")
    assert not other.runs
    info = client.info(run.job)
    assert (info.state, info.failure.kind) == ("failed", "worker_lost")


def test_groups_11_a_job_that_is_cancelled_while_its_leader_is_away_is_stopped_then(shop: Shop) -> None:
    """Its end doesn't wait for the leader, which is told when it is back, and takes the next job after that."""
    client, worker, run = running(shop)
    cut(shop, worker)
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "cancelled"
    following = client.accepted("k2")
    back(worker, HeldJob(run.job, run.attempt))
    assert worker.inbox == [m.StopJob(run.job, run.attempt)]
    worker.fail(run, state="cancelled")
    assert worker.runs[-1].job == following


def test_groups_11_a_cancel_that_was_lost_with_the_connection_is_said_again(shop: Shop) -> None:
    """A job that is to stop has ended when the leader is lost from sight."""
    client, worker, run = running(shop)
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "running"
    back(worker, HeldJob(run.job, run.attempt))
    assert client.info(run.job).state == "cancelled"
    assert worker.inbox == [m.StopJob(run.job, run.attempt)]


def test_groups_09_a_result_that_was_on_its_way_is_taken_again(shop: Shop) -> None:
    """Its leader offers it anew when it is back."""
    client, worker, run = running(shop)
    worker.gives = False
    worker.finish(run, b"done")
    assert shop.job(run.job).state == "taking"
    cut(shop, worker)
    worker.gives = True
    back(worker, HeldJob(run.job, run.attempt, ended=True))
    worker.finish(run, b"done")
    assert client.fetch(run.job) == b"done"


def test_groups_07_an_end_that_becomes_durable_while_its_leader_is_away_is_told_later(shop: Shop) -> None:
    """The leader holds it yet, and hears that nobody needs it any more."""
    _, worker, run = running(shop)
    shop.commits = False
    worker.finish(run, b"done")
    assert shop.job(run.job).state == "ending"
    cut(shop, worker)
    shop.commits = True
    shop.settle()
    back(worker, HeldJob(run.job, run.attempt, ended=True))
    assert worker.inbox == [m.ForgetJob(run.job, run.attempt)]


@pytest.mark.parametrize("state", ["exporting", "ending"])
def test_groups_07_a_leader_that_is_back_keeps_its_result_until_the_end_is_durable(shop: Shop, state: str) -> None:
    """Its result may be the only one that is safe: a broker that is killed before that has it from there."""
    worker, client = shop.worker(), shop.client()
    client.accepted(output="/out/a.mp4" if state == "exporting" else "")
    run, held = worker.runs[-1], HeldJob(worker.runs[-1].job, 1, ended=True)
    shop.commits = shop.works = False
    worker.finish(run, b"done")
    while shop.job(run.job).state != state:
        shop.work()
    cut(shop, worker)
    back(worker, held)
    worker.finish(run, b"done")  # as a leader says it every few seconds
    assert not worker.heard(m.ForgetJob)
    shop = shop.restart()
    client = shop.client()
    found = Worker(shop, worker.route, worker.name, worker.kinds)
    found.files, found.epoch = worker.files, worker.epoch
    found.hello(held=(held,))
    found.finish(run, b"done")
    assert (client.fetch(run.job), client.info(run.job).attempt) == (b"done", 1)
    assert found.heard(m.ForgetJob) == [m.ForgetJob(run.job, 1)]


def test_groups_07_a_leader_that_says_its_result_again_is_told_when_the_end_is_durable(shop: Shop) -> None:
    """Also where it was away when the job ended, and was told nothing when it came back."""
    _, worker, run = running(shop)
    shop.commits = False
    worker.finish(run, b"done")
    cut(shop, worker)
    back(worker, HeldJob(run.job, 1, ended=True))
    shop.commit()
    assert not worker.inbox
    worker.finish(run, b"done")
    assert worker.inbox == [m.ForgetJob(run.job, 1)]


def test_groups_11_a_job_that_nobody_wants_keeps_its_group_until_it_has_ended(shop: Shop) -> None:
    """Also where its leader was away meanwhile, whether or not it has it still."""
    client, worker, run = running(shop)
    worker.finish(run)
    for _ in range(2):
        back(worker, HeldJob("nobody's", 1))
        assert worker.inbox == [m.StopJob("nobody's", 1)]
        assert worker.group.job == "nobody's"
    back(worker)
    assert worker.group.job == ""
    assert client.accepted("k2") == worker.runs[-1].job


def test_groups_07_other_jobs_are_waited_for_on_their_own(shop: Shop) -> None:
    """A broker that waits for the groups of its predecessor gives those up in time, and not a job whose leader is away."""
    shop = Shop(rejoin_s=2.0)
    _, worker, run = running(shop)
    shop = shop.restart()
    client = shop.client()
    found = Worker(shop, worker.route, worker.name, worker.kinds)
    found.epoch = worker.epoch
    shop.turn()
    found.hello(held=(HeldJob(run.job, run.attempt),))
    shop.advance(1.0)
    cut(shop, found)
    shop.advance(1.5)
    assert client.info(run.job).state == "running"
    back(found, HeldJob(run.job, run.attempt))
    assert client.info(run.job).attempt == 1


def silent(shop: Shop, worker: Worker) -> None:
    """A worker says nothing for so long that the broker takes it for lost; it lives, and knows nothing of that."""
    worker.attachment = 0
    del shop.peers[worker.route]
    shop.advance(4.0)
    assert worker.name not in shop.core._peers.workers
    shop.peers[worker.route] = worker


def test_groups_13_a_worker_that_was_only_silent_is_no_loss(shop: Shop) -> None:
    """It may be silent as often as it likes: when it is back nobody has died, and its attempt goes on."""
    client, worker, run = running(shop)
    for _ in range(5):
        silent(shop, worker)
        assert client.info(run.job).state == "queued"
        back(worker, HeldJob(run.job, run.attempt))
    assert shop.disk.records[run.job].losses == 0
    info = client.info(run.job)
    assert (info.state, info.attempt) == ("running", 1)
    worker.finish(run, b"done")
    assert client.fetch(run.job) == b"done"


def test_groups_13_a_worker_whose_job_was_begun_again_is_a_loss(shop: Shop) -> None:
    """Once: what it had is of no use any more, and when it comes back it is told to stop."""
    client, worker, run = running(shop)
    silent(shop, worker)
    other = shop.worker("other")
    assert other.runs[-1].attempt == 2
    back(worker, HeldJob(run.job, 1))
    assert worker.inbox == [m.StopJob(run.job, 1)]
    back(worker, HeldJob(run.job, 1))
    assert shop.disk.records[run.job].losses == 1
    worker.fail(run, state="cancelled")
    shop.drop(other, "it died")
    assert shop.disk.records[run.job].losses == 2
    assert worker.runs[-1].attempt == 3
    worker.finish(worker.runs[-1])
    assert client.info(run.job).state == "succeeded"


def test_groups_13_a_job_whose_group_stops_while_its_leader_is_away_is_handed_back(shop: Shop) -> None:
    """Whoever was asked to stop is no loss, also of a job that waits for its leader."""
    ranks = [Worker(shop, f"w-r{rank}".encode(), f"r{rank}", ()) for rank in range(2)]
    for rank, one in enumerate(ranks):
        place = m.Membership("g", rank, 2, epoch=5, machine="host", pid=rank + 1)
        kinds = shop.worker().kinds if rank == 0 else ()
        one.say(m.WorkerHello("0.1.0", one.name, "cpu", (), (), group=place, jobs=kinds))
    shop.drop(shop.peers[b"w-w"])
    job = shop.client().accepted()
    assert ranks[0].runs[-1].job == job
    ranks[0].attachment = 0
    shop.handle(Unreachable(shop.now, ranks[0].route))
    shop.turn()
    assert shop.job(job).state == "rejoining"
    ranks[1].say(m.Draining())
    shop.drop(ranks[1])
    assert shop.job(job).state == "queued"
    assert shop.disk.records[job].losses == 0
