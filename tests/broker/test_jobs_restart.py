"""What outlives a broker: jobs, results, and what the next one does with those that groups hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.messages import HeldJob

from .fake_jobs import KINDS, Shop, Worker


@pytest.fixture
def shop() -> Shop:
    """A broker with nobody attached."""
    return Shop()


def back(shop: Shop, worker: Worker, *held: HeldJob) -> Worker:
    """A worker that finds the next broker, with all that it has."""
    found = Worker(shop, worker.route, worker.name, worker.kinds)
    found.files, found.epoch = worker.files, worker.epoch
    return found.hello(held=held)


def running(shop: Shop) -> tuple[Any, Any, Any]:
    """A client, a worker, and a job that it does."""
    worker, client = shop.worker(), shop.client()
    client.accepted()
    return client, worker, worker.runs[-1]


def test_groups_07_a_killed_broker_loses_no_job(shop: Shop) -> None:
    """What was acknowledged is there again: queued, ended with its result, and under its key."""
    client, worker, run = running(shop)
    waiting = client.accepted("k2", priority=3)
    worker.finish(run, b"done", frames=5)
    shop.drop(worker)
    shop = shop.restart()
    client = shop.client()
    assert [each.job for each in client.ask(m.AskJobs).jobs] == [waiting, run.job]
    assert client.info(waiting).priority == 3
    assert client.info(run.job).facts == {"frames": 5}
    assert client.fetch(run.job) == b"done"
    assert client.accepted("k2", priority=3) == waiting
    assert client.accepted("k") == run.job


def test_groups_07_a_repeated_submission_needs_no_worker(shop: Shop) -> None:
    """After a restart the job is found by its key although nobody does its kind yet; and other work under it is refused."""
    client, _, run = running(shop)
    client = shop.restart().client()
    assert client.accepted("k") == run.job
    assert client.refused("k", parameters={"prompt": "other"}).field == "key"


def test_groups_07_a_job_whose_group_lives_goes_on(shop: Shop) -> None:
    """The next broker adopts the attempt; nothing is said to the worker, and the queue isn't moved."""
    _, worker, run = running(shop)
    shop = shop.restart()
    client = shop.client()
    assert client.info(run.job).state == "running"
    worker = back(shop, worker, HeldJob(run.job, 1))
    assert worker.group.job == run.job
    assert not worker.heard(m.RunJob)
    worker.progress(run, 7)
    assert client.info(run.job).step == 7
    worker.finish(run, b"done")
    assert client.fetch(run.job) == b"done"
    assert worker.heard(m.ForgetJob)


def test_groups_12_a_leader_that_comes_back_hears_which_checkpoint_is_durable(shop: Shop) -> None:
    """At once, whether or not it offers it again: one that hands its job back waits for that alone."""
    _, worker, run = running(shop)
    worker.checkpoint(run, 5)
    kept = m.CheckpointKept(run.job, 1, 5)
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1))
    assert worker.take(m.CheckpointKept) == [kept]
    shop.commits = False
    worker.checkpoint(run, 5)
    assert worker.take(m.CheckpointKept) == [kept]
    worker.checkpoint(run, 6)
    worker.checkpoint(run, 6)
    assert not worker.heard(m.CheckpointKept)  # it is here, and not durable
    shop.commit()
    assert worker.heard(m.CheckpointKept) == [m.CheckpointKept(run.job, 1, 6)]
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1, ended=True))
    assert not worker.heard(m.CheckpointKept)


def test_groups_07_a_job_whose_group_doesnt_come_back_runs_again(shop: Shop) -> None:
    """After `rejoin_s`, as the next attempt, from its checkpoint; its workers are lost then, as far as anybody knows."""
    _, worker, run = running(shop)
    worker.checkpoint(run, 5)
    shop = shop.restart()
    other = shop.worker("other")
    shop.advance(9.0)
    assert not other.runs
    shop.advance(2.0)
    assert (other.runs[0].attempt, other.runs[0].checkpoint_step) == (2, 5)
    assert shop.disk.records[run.job].losses == 1
    late = back(shop, worker, HeldJob(run.job, 1))
    assert late.heard(m.StopJob) == [m.StopJob(run.job, 1)]
    late.say(m.JobEnded(run.job, 1, "cancelled"))
    assert late.heard(m.ForgetJob) == [m.ForgetJob(run.job, 1)]
    assert not late.group.job


def test_a_group_that_comes_late_still_has_its_job_if_nobody_else_began_it(shop: Shop) -> None:
    """It needn't be done again, and nobody was lost."""
    _, worker, run = running(shop)
    shop = shop.restart()
    shop.advance(11.0)
    assert shop.job(run.job).state == "queued"
    worker = back(shop, worker, HeldJob(run.job, 1))
    assert not worker.runs
    assert shop.disk.records[run.job].losses == 0
    assert shop.job(run.job).state == "running"


def test_groups_13_a_job_that_takes_its_broker_down_as_well_ends(shop: Shop) -> None:
    """Whoever had it died with the broker each time: it is begun `job_attempts` times, and fails with the reason."""
    _, worker, run = running(shop)
    attempts = [run.attempt]
    for _ in range(shop.config.job_attempts):
        shop = shop.restart()
        worker = shop.worker()  # another process: it has nothing
        shop.advance(11.0)
        attempts += [run.attempt for run in worker.runs]
    assert attempts == [1, 2, 3]
    failure = shop.client().info(run.job).failure
    assert failure is not None
    assert failure.kind == "worker_lost"
    assert failure.message == (
        "its workers were lost 3 times, the last time: nobody had it 10 s after the broker was started anew"
    )


def test_groups_13_silence_and_a_killed_broker_together_are_no_loss(shop: Shop) -> None:
    """The same process goes on with the same attempt, however often it is taken for lost and found again."""
    _, worker, run = running(shop)
    for _ in range(shop.config.job_attempts + 1):
        shop.peers.pop(worker.route)
        shop.advance(4.0)
        assert shop.job(run.job).state == "queued"
        shop = shop.restart()
        worker = back(shop, worker, HeldJob(run.job, 1))
        assert not worker.inbox
        record = shop.disk.records[run.job]
        assert (record.standing, record.attempt, record.losses) == ("running", 1, 0)


def test_groups_13_a_loss_that_was_not_durable_is_counted_with_the_attempt_that_followed(shop: Shop) -> None:
    """The journal knows of the first attempt alone; whoever comes has the second one."""
    client, worker, run = running(shop)
    shop.commits = False
    shop.drop(worker, "it died")
    other = shop.worker("other")
    assert other.runs[-1].attempt == 2
    shop = shop.restart()
    assert (shop.disk.records[run.job].attempt, shop.disk.records[run.job].losses) == (1, 0)
    back(shop, other, HeldJob(run.job, 2))
    assert (shop.disk.records[run.job].attempt, shop.disk.records[run.job].losses) == (2, 1)
    assert client.name == "app"


def test_work_that_was_sent_before_it_was_durable_is_adopted(shop: Shop) -> None:
    """The journal says queued, the leader has the attempt already."""
    shop.worker()
    client = shop.client()
    shop.worker("w").say(m.Heartbeat())
    shop.commits = False
    client.submit()
    shop.commit(1)
    worker = shop.peers[b"w-w"]
    (run,) = worker.runs
    assert shop.disk.records[run.job].standing == "queued"
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1))
    assert shop.disk.records[run.job].attempt == 1
    assert not worker.runs


def test_an_attempt_that_the_journal_never_knew_of_is_kept_until_the_cancel_is_durable(shop: Shop) -> None:
    """A broker that is killed before that has its result from the leader, and needn't do the job again."""
    worker, client = shop.worker(), shop.client()
    shop.commits = False
    client.submit()
    shop.commit(1)
    (run,) = worker.runs
    shop = shop.restart()
    shop.commits = False
    shop.client().ask(m.CancelJob, run.job)
    assert shop.job(run.job).state == "ending"
    worker = back(shop, worker, HeldJob(run.job, 1, ended=True))
    worker.finish(run, b"done")
    assert not worker.heard(m.ForgetJob)
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1, ended=True))
    worker.finish(run, b"done")
    assert shop.client().fetch(run.job) == b"done"
    assert worker.heard(m.ForgetJob)


def test_two_leaders_with_one_job_the_first_one_has_it(shop: Shop) -> None:
    """The other one is told to stop."""
    _, worker, run = running(shop)
    shop = shop.restart()
    first = back(shop, worker, HeldJob(run.job, 1))
    second = Worker(shop, b"w-x", "x", first.kinds).hello(held=(HeldJob(run.job, 1),))
    assert second.heard(m.StopJob)
    assert shop.job(run.job).group is first.group


def test_what_has_ended_at_a_leader_is_told_again(shop: Shop) -> None:
    """A result that the last broker didn't take is taken by the next one; one that it took is forgotten."""
    client, worker, run = running(shop)
    worker.gives = False
    worker.finish(run, b"done")
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1, ended=True), HeldJob("unknown", 4, ended=True))
    assert worker.heard(m.ForgetJob) == [m.ForgetJob("unknown", 4)]
    worker.finish(run, b"done")
    assert shop.client().fetch(run.job) == b"done"
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1, ended=True))
    assert worker.heard(m.ForgetJob) == [m.ForgetJob(run.job, 1)]
    assert client.name == "app"


def test_a_leader_may_hold_an_end_beside_what_it_works_at(shop: Shop) -> None:
    """It told its end, began the next job, and the broker died before the end was durable: both go on."""
    client, worker, run = running(shop)
    second = client.accepted("k2")
    shop.commits = False
    worker.fail(run, "it broke")
    (_, run2) = worker.runs
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1, ended=True), HeldJob(second, 1))
    assert worker.group.job == second
    worker.fail(run, "it broke")
    assert worker.group.job == second
    worker.finish(run2)
    records = shop.disk.records
    assert (records[run.job].standing, records[second].standing) == ("failed", "succeeded")


def test_a_leader_that_works_at_two_jobs_keeps_one(shop: Shop) -> None:
    """It can't, but whatever it says, a group has one job."""
    client, worker, run = running(shop)
    second = client.accepted("k2")
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, 1), HeldJob(second, 1))
    assert worker.group.job == run.job
    assert worker.heard(m.StopJob) == [m.StopJob(second, 1)]
    assert shop.job(second).state == "queued"


def test_a_job_that_nobody_has_yet_is_cancelled_while_it_is_waited_for(shop: Shop) -> None:
    """Its leader is told to stop when it comes."""
    _, worker, run = running(shop)
    shop = shop.restart()
    client = shop.client()
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "cancelled"
    worker = back(shop, worker, HeldJob(run.job, 1))
    assert worker.heard(m.StopJob)


@pytest.mark.parametrize("attempt", [5, 1 << 20])
def test_attempts_that_cant_be_are_ended(shop: Shop, attempt: int) -> None:
    """A leader that names an attempt from nowhere doesn't move the count."""
    _, worker, run = running(shop)
    shop = shop.restart()
    worker = back(shop, worker, HeldJob(run.job, attempt))
    assert worker.heard(m.StopJob)
    assert shop.disk.records[run.job].attempt == 1


def test_a_rank_that_speaks_before_its_group_is_there_isnt_told_to_stop(shop: Shop) -> None:
    """It says where it is when it attaches; the other ranks may still be missing."""
    _, _, run = running(shop)
    shop = shop.restart()
    leader = Worker(shop, b"w-r0", "r0", ())
    place = m.Membership("g", 0, 2, epoch=5, machine="host", pid=1)
    said = m.WorkerHello("0.1.0", "r0", "cpu", (), (), group=place, jobs=KINDS, held=(HeldJob(run.job, 1),))
    leader.say(said)
    leader.say(m.JobProgress(run.job, 1, "running"))
    leader.say(m.JobFile(run.job, 1, "result", leader.offer(b"r")))
    assert not leader.heard(m.StopJob)
    assert not leader.heard(m.ForgetJob)
    follower = Worker(shop, b"w-r1", "r1", ())
    follower.say(replace(said, name="r1", group=replace(place, rank=1, pid=2), jobs=(), held=()))
    assert shop.job(run.job).state == "running"
    follower.say(m.JobProgress(run.job, 1, "running", "s", 1, 2))
    assert shop.job(run.job).pace.step == 0


def test_the_order_of_the_queue_outlives_the_broker(shop: Shop) -> None:
    """Arrival counts over all brokers."""
    shop.worker("gone", kinds=shop.worker().kinds)
    client = shop.client()
    for name in ("w", "gone"):
        shop.peers[f"w-{name}".encode()].group.job = "busy"
    shop.checks = False
    jobs = [client.accepted(f"k{index}") for index in range(3)]
    shop = shop.restart()
    worker, client = shop.worker(), shop.client("late")
    later = client.accepted("k9")
    assert worker.runs[0].job == jobs[0]
    assert client.info(later).position == 1  # of the next round: the other client's second job came before
    assert shop.disk.records[later].number > shop.disk.records[jobs[2]].number
