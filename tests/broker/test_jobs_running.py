"""Jobs from their acceptance to their end, through the whole core: progress, results, losses, cancelling, fencing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.job_incoming import WINDOW_PARTS
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import Failure
from reelwire.tensors import Inline, TensorRef

from .fake_jobs import Shop
from .fake_store import sha256


@pytest.fixture
def shop() -> Shop:
    """A broker with nobody attached."""
    return Shop()


def begun(shop: Shop, **more: Any) -> tuple[Any, Any, Any]:
    """A client, a worker and a job that it does."""
    worker, client = shop.worker(), shop.client()
    client.accepted(**more)
    return client, worker, worker.runs[-1]


def test_a_job_runs_and_its_result_is_fetched(shop: Shop) -> None:
    """From its submission to the bytes of its result, with a result of several parts."""
    client, worker, run = begun(shop)
    assert (run.kind, run.attempt, run.sequence) == ("t2v", 1, 1)
    assert run.parameters == {"prompt": "a", "scale": 1.0}
    assert client.info(run.job).state == "preparing"
    worker.progress(run, 1)
    assert client.info(run.job).state == "running"
    result = b"r" * (5 * FILE_PART_BYTES + 7)
    worker.finish(run, result, frames=81)
    info = client.info(run.job)
    assert (info.state, info.result_bytes, info.result_sha256) == ("succeeded", len(result), sha256(result))
    assert info.facts == {"frames": 81}
    assert client.fetch(run.job) == result
    assert worker.heard(m.ForgetJob) == [m.ForgetJob(run.job, 1)]
    assert shop.disk.records[run.job].fetched_at is not None


def test_the_parts_of_a_file_are_wanted_a_few_at_a_time(shop: Shop) -> None:
    """No part is wanted twice, and none that is more than a window ahead of what is written."""
    _, worker, run = begun(shop)
    worker.finish(run, b"r" * (7 * FILE_PART_BYTES))
    wants = worker.heard(m.WantFile)
    assert wants[0].first == 0
    assert wants[0].parts == WINDOW_PARTS
    assert [want.first for want in wants[1:]] == [want.parts for want in wants[:-1]]
    assert wants[-1].parts == 7


def test_protocol_2_an_end_is_told_when_it_is_durable(shop: Shop) -> None:
    """Neither the client nor the worker hears of a success that the journal may still forget."""
    client, worker, run = begun(shop)
    client.say(m.WatchJob(run.job))
    shop.commits = False
    worker.finish(run)
    assert client.info(run.job).state == "encoding"
    assert not worker.heard(m.ForgetJob)
    shop.commit()
    shop.turn()
    assert client.heard(m.JobChanged)[-1].job.state == "succeeded"
    assert worker.heard(m.ForgetJob)


def test_a_group_is_free_for_the_next_job_when_one_has_ended(shop: Shop) -> None:
    """After a success once it is stored, after a failure at once."""
    client, worker, run = begun(shop)
    client.accepted("k2")
    client.accepted("k3")
    shop.commits = False
    worker.finish(run)
    assert len(worker.runs) == 1
    shop.commit()
    assert len(worker.runs) == 2
    worker.fail(worker.runs[1])
    assert [one.sequence for one in worker.runs] == [1, 2, 3]


def test_groups_10_watchers_are_told_of_every_change_once_a_turn(shop: Shop) -> None:
    """Queue position, stage, step, seconds per step and time left; what happens in one turn is told once."""
    client, worker, _ = begun(shop)
    job = client.accepted("k2")
    client.say(m.WatchJob(job))
    assert client.take(m.JobChanged)[0].job.position == 0
    worker.fail(worker.runs[0])
    assert client.take(m.JobChanged)[-1].job.state == "preparing"
    run = worker.runs[1]
    worker.progress(run, 1)
    worker.progress(run, 2, step_s=2.0)
    worker.progress(run, 3, step_s=2.0, given_s=5.0)
    last = client.take(m.JobChanged)[-1].job
    assert (last.stage, last.step, last.steps, last.step_s, last.left_s) == ("denoise", 3, 10, 2.0, 14.0)
    assert last.waits_for == "streaming"
    shop.turns = False
    for step in (4, 5, 6):
        worker.progress(run, step, step_s=3.0)
    assert not client.take(m.JobChanged)
    shop.turn()
    (told,) = client.take(m.JobChanged)
    assert told.job.step == 6
    assert 2.0 < told.job.step_s < 3.0


def test_groups_10_who_watches_is_told_of_other_positions(shop: Shop) -> None:
    """A position that others move is told, but not in every turn."""
    client, worker, run = begun(shop)
    jobs = [client.accepted(f"k{index}", priority=-1) for index in range(20)]
    for job in jobs:
        client.say(m.WatchJob(job))
    told = client.take(m.JobChanged)
    assert [each.job.position for each in told[: len(jobs)]] == list(range(20))
    shop.advance(1.0)
    client.take(m.JobChanged)
    shop.client("other").accepted("first", priority=5)
    shop.advance(1.0)
    assert sorted(each.job.position for each in client.take(m.JobChanged)) == list(range(1, 21))
    worker.fail(run)
    shop.advance(1.0)
    assert client.info(jobs[3]).position == 3


def test_positions_are_told_a_few_times_a_second_at_most(shop: Shop) -> None:
    """To find them takes time in proportion to the queue, which many may watch while many submit."""
    client, _, _ = begun(shop)
    client.say(m.WatchJob(client.accepted("k2")))
    shop.advance(1.0)
    client.take(m.JobChanged)
    for index in range(5):
        shop.client("other").accepted(f"first{index}", priority=5)
    assert len(client.heard(m.JobChanged)) == 1
    shop.advance(1.0)
    assert [each.job.position for each in client.heard(m.JobChanged)] == [1, 5]


def test_a_watch_ends_with_its_job_or_when_it_isnt_wanted(shop: Shop) -> None:
    """The last thing that is told is the end; a watch that was given up tells nothing."""
    client, worker, run = begun(shop)
    other = shop.client("other")
    client.say(m.WatchJob(run.job))
    other.say(m.WatchJob(run.job))
    other.say(m.WatchJob(run.job, on=False))
    other.take(m.JobChanged)
    worker.fail(run, "no memory")
    last = client.take(m.JobChanged)[-1].job
    assert (last.state, last.failure) == ("failed", Failure("stage", "no memory"))
    assert not other.heard(m.JobChanged)
    client.say(m.WatchJob(run.job))
    assert [each.job.state for each in client.take(m.JobChanged)] == ["failed"]
    client.say(m.WatchJob("nobody", request=5))
    (refused,) = client.heard(m.JobRefused)
    assert (refused.request, refused.failure.field) == (5, "job")


def test_groups_11_a_client_that_disappears_doesnt_cancel_its_job(shop: Shop) -> None:
    """It runs on, and another client gets the result."""
    client, worker, run = begun(shop)
    shop.drop(client)
    worker.finish(run, b"done")
    assert shop.client("other").fetch(run.job) == b"done"


def test_groups_11_a_running_job_is_cancelled_by_its_leader(shop: Shop) -> None:
    """The leader alone is told; who cancelled is answered then, however long its step takes, and the group takes the next job."""
    client, worker, run = begun(shop)
    client.accepted("k2")
    client.say(m.WatchJob(run.job))
    worker.progress(run, 1)
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "running"
    assert worker.heard(m.StopJob) == [m.StopJob(run.job, 1)]
    shop.advance(60.0)
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "running"
    assert worker.heard(m.StopJob) == [m.StopJob(run.job, 1)]
    worker.fail(run, state="cancelled")
    assert client.heard(m.JobChanged)[-1].job.state == "cancelled"
    assert len(worker.runs) == 2
    assert client.ask(m.CancelJob, run.job).jobs[0].state == "cancelled"


def test_groups_11_a_result_that_comes_before_the_stop_counts(shop: Shop) -> None:
    """The first terminal word wins."""
    client, worker, run = begun(shop)
    assert client.ask(m.CancelJob, run.job)
    worker.finish(run)
    assert client.info(run.job).state == "succeeded"


def test_a_waiting_job_is_cancelled_at_once(shop: Shop) -> None:
    """When that is durable, the client is answered, and nothing is left of its files."""
    client, _, _ = begun(shop)
    job = client.accepted("k2", "v2v", media={"video": (client.upload(b"video"),)})
    shop.commits = False
    assert client.ask(m.CancelJob, job) is None
    assert shop.disk.files
    shop.commit()
    shop.settle()
    assert client.heard(m.Jobs)[-1].jobs[0].state == "cancelled"
    assert not shop.disk.files


def test_groups_12_a_job_goes_on_from_its_newest_checkpoint(shop: Shop) -> None:
    """Another group is offered it; the one before is removed when the journal says so."""
    client, worker, run = begun(shop)
    worker.progress(run, 5)
    worker.checkpoint(run, 5, b"first")
    worker.checkpoint(run, 10, b"second")
    assert client.info(run.job).checkpoint_step == 10
    assert list(shop.disk.files.values()) == [b"second"]
    shop.drop(worker, "it died")
    assert client.info(run.job).state == "queued"
    other = shop.worker("other")
    (again,) = other.runs
    assert (again.attempt, again.checkpoint_step) == (2, 10)
    assert again.checkpoint == m.FileOffer(sha256(b"second"), f"/files/{sha256(b'second')}", 6)
    other.say(m.WantFile(sha256(b"second"), 0, 1))
    assert other.heard(m.FilePart)[0].index == 0
    other.finish(again)
    assert list(shop.disk.files.values()) == [b"result"]


def test_groups_12_a_leader_is_told_when_its_checkpoint_is_durable(shop: Shop) -> None:
    """Not before the journal says so: one that is asked to stop waits for that."""
    _, worker, run = begun(shop)
    shop.commits = False
    worker.checkpoint(run, 5)
    assert not worker.heard(m.CheckpointKept)
    shop.commit()
    assert worker.heard(m.CheckpointKept) == [m.CheckpointKept(run.job, 1, 5)]


def test_groups_12_an_older_checkpoint_changes_nothing(shop: Shop) -> None:
    """Only a later step is taken in; of the newest one that is durable its leader is told so again."""
    _, worker, run = begun(shop)
    worker.checkpoint(run, 10)
    worker.checkpoint(run, 5)
    worker.checkpoint(run, 10)
    worker.checkpoint(run, -1)
    assert shop.disk.records[run.job].checkpoint_step == 10
    assert shop.counter("checkpoints_refused") == 2
    assert worker.heard(m.CheckpointKept) == [m.CheckpointKept(run.job, 1, 10)] * 2


def test_a_checkpoint_that_doesnt_come_is_done_without(shop: Shop) -> None:
    """It was superseded at the worker, or is broken: the job goes on."""
    _, worker, run = begun(shop)
    worker.gives = False
    worker.checkpoint(run, 5)
    worker.say(m.FileGone(sha256(b"at 5"), "it was superseded"))
    worker.checkpoint(run, 6)
    worker.files[sha256(b"at 6")] = b"xxxx"
    worker.part(sha256(b"at 6"), 0)
    assert shop.counter("checkpoints_lost") == 2
    worker.gives = True
    worker.finish(run)
    assert shop.disk.records[run.job].standing == "succeeded"


def test_groups_13_a_job_whose_groups_are_lost_too_often_fails(shop: Shop) -> None:
    """After so many losses, with a sentence that says so; it came first again each time."""
    client = shop.client()
    worker = shop.worker("w0")
    job = client.accepted()
    client.accepted("k2")
    for attempt in (1, 2, 3):
        assert (worker.runs[0].job, worker.runs[0].attempt) == (job, attempt)
        shop.drop(worker, "it died")
        worker = shop.worker(f"w{attempt}")
    info = client.info(job)
    assert info.state == "failed"
    assert info.failure is not None
    assert info.failure.kind == "worker_lost"
    assert "3 times" in info.failure.message
    assert worker.runs[0].job != job


def test_groups_13_a_job_that_raises_fails_at_once(shop: Shop) -> None:
    """Its reason is the worker's, fit to be shown; it isn't tried again, and the group takes the next job."""
    client, worker, run = begun(shop)
    client.accepted("k2")
    worker.say(m.JobEnded(run.job, 1, "failed", Failure("stage", "out of memory\x1b[2J, " + "x" * 1000)))
    failure = client.info(run.job).failure
    assert failure is not None
    assert failure.message.startswith("out of memory\\x1b[2J, x")
    assert len(failure.message) < 600
    assert [one.attempt for one in worker.runs] == [1, 1]
    worker.say(m.JobEnded(worker.runs[1].job, 1, "failed"))
    assert client.info(worker.runs[1].job).failure == Failure("stage", "the worker gave no reason")


def test_a_worker_that_was_asked_to_stop_hands_its_job_back(shop: Shop) -> None:
    """That is no loss: it may happen as often as it likes."""
    client = shop.client()
    job = client.accepted() if shop.worker("w0") else ""
    for attempt in range(1, 6):
        worker = shop.peers[f"w-w{attempt - 1}".encode()]
        assert worker.runs[-1].attempt == attempt
        worker.say(m.Draining())
        shop.worker(f"w{attempt}")
        shop.drop(worker)
    assert shop.disk.records[job].losses == 0
    assert client.info(job).attempt == 6


def test_a_group_that_is_lost_while_its_job_is_cancelled_ends_it(shop: Shop) -> None:
    """Nobody begins it again."""
    client, worker, run = begun(shop)
    assert client.ask(m.CancelJob, run.job)
    shop.drop(worker, "it died")
    assert client.info(run.job).state == "cancelled"
    assert not shop.worker("other").runs


def test_a_result_that_was_taken_in_outlives_its_group(shop: Shop) -> None:
    """What comes after it, the writing to its place and to the journal, needs no worker."""
    client, worker, run = begun(shop, output="/out/a.mp4")
    shop.commits = False
    worker.finish(run, b"done")
    shop.drop(worker)
    shop.commit()
    assert client.info(run.job).state == "succeeded"
    assert shop.disk.outside["/out/a.mp4"] == b"done"


@pytest.mark.parametrize("fault", ["gone", "hash", "size", "disk", "too large", "empty"])
def test_a_result_that_doesnt_come_fails_its_job(fault: str) -> None:
    """It is the stage's fault, or the disk's; nothing of it is left."""
    shop = Shop(result_bytes_max=1000)
    client, worker, run = begun(shop)
    worker.gives = fault in ("disk", "too large", "empty")
    if fault == "disk":
        shop.disk.fails = lambda action: "the disk is full" if type(action).__name__ == "AppendPart" else ""
    data = {"too large": b"x" * 1001, "empty": b""}.get(fault, b"result")
    worker.finish(run, data)
    if fault == "gone":
        worker.say(m.FileGone(sha256(data), "it was deleted"))
    elif fault in ("hash", "size"):
        worker.files[sha256(data)] = b"tluser" if fault == "hash" else b"short"
        worker.part(sha256(data), 0)
    if fault == "empty":  # no result at all: the leader may still make one
        assert client.info(run.job).state == "preparing"
        return
    info = client.info(run.job)
    assert info.state == "failed"
    assert info.failure is not None
    assert info.failure.kind == "stage"
    assert not shop.disk.files
    assert not worker.group.job


def test_two_groups_with_one_result_have_one_file(shop: Shop) -> None:
    """The second one isn't even sent; it is removed with the last job that has it."""
    client = shop.client()
    workers = [shop.worker("w1"), shop.worker("w2")]
    jobs = [client.accepted("k1"), client.accepted("k2")]
    for worker in workers:
        worker.finish(worker.runs[0], b"same")
    assert not workers[1].heard(m.WantFile)
    assert len(shop.disk.files) == 1
    assert client.ask(m.DeleteJob, jobs[0]).jobs[0].state == "succeeded"
    assert client.fetch(jobs[1]) == b"same"
    client.ask(m.DeleteJob, jobs[1])
    assert not shop.disk.files


def test_protocol_2_older_attempts_are_fenced(shop: Shop) -> None:
    """What a leader says of an attempt that isn't its own changes nothing, and it is told to let go."""
    client, worker, run = begun(shop)
    other = shop.worker("other")
    for wrong in (m.JobProgress(run.job, 1, "running"), m.JobProgress("nobody", 1, "running")):
        other.say(wrong)
        assert other.take(m.StopJob) == [m.StopJob(wrong.job, 1)]
        other.say(m.JobEnded(wrong.job, 1, "cancelled"))
        assert other.take(m.ForgetJob) == [m.ForgetJob(wrong.job, 1)]
        assert not other.group.job
    worker.say(m.JobFile(run.job, 2, "result", worker.offer(b"x")))
    worker.say(m.JobFile(run.job, 1, "checkpoint", m.FileOffer("no hash", "", 5), 3))
    assert client.info(run.job).state == "preparing"
    assert shop.counter("jobs_fenced") == 5
    shop.drop(client)


def test_a_leader_that_lets_go_isnt_free_until_it_says_so(shop: Shop) -> None:
    """While it does what nobody wants it can't begin anything."""
    worker, client = shop.worker(), shop.client()
    worker.say(m.JobProgress("nobody", 3, "running"))
    client.accepted()
    assert not worker.runs
    worker.say(m.JobProgress("nobody", 3, "running"))
    assert worker.heard(m.StopJob) == [m.StopJob("nobody", 3)]
    worker.say(m.JobEnded("nobody", 3, "cancelled"))
    assert len(worker.runs) == 1


def test_nonsense_of_a_worker_is_counted(shop: Shop) -> None:
    """Nothing that it says raises or moves a job that it hasn't."""
    _, worker, run = begun(shop)
    stranger = shop.worker("none", kinds=())
    for message in (
        m.JobProgress(run.job, 1, "queued"),
        m.JobProgress(run.job, 1, "running", "s", 5, 3),
        m.JobProgress(run.job, 1, "running", "s", -1, 3),
        m.JobProgress(run.job, 1, "running", "s", 1, 3, math.nan),
        m.JobProgress(run.job, 1, "running", "s", 1, 3, math.inf),
        m.JobProgress(run.job, 1, "running", "s", 1, 3, 1.0, -1.0),
        m.JobEnded(run.job, 1, "queued"),
        m.JobEnded(run.job, 1, "succeeded"),
        m.JobFile(run.job, 1, "result", m.FileOffer("../../etc/passwd", "", 5)),
        m.JobFile(run.job, 1, "result", m.FileOffer("0" * 64, "", -5)),
        m.JobFile(run.job, 1, "checkpoint", m.FileOffer("0" * 64, "", 5), 1 << 62),
        m.FilePart("0" * 64, 1 << 62, TensorRef("uint8", (1,), Inline(b"x"))),
        m.FileGone("0" * 64, "x" * 10_000),
        m.WantFile("0" * 64, 0, 5),
        m.WantFile("", -5, 5),
    ):
        worker.say(message)
        stranger.say(message)
    assert shop.job(run.job).state == "preparing"
    assert len(worker.heard(m.FileGone)) == 2
    assert max(len(each.file) for each in worker.heard(m.FileGone)) <= 64


def test_a_request_that_its_workers_cant_be_told_fails(shop: Shop) -> None:
    """Instead of a message that costs the worker its connection."""
    shop.worker(limits={"header_bytes_max": 1000})
    client = shop.client()
    job = client.accepted(parameters={"prompt": "x" * 2000})
    info = client.info(job)
    assert info.state == "failed"
    assert info.failure is not None
    assert info.failure.kind == "request"
    assert not shop.core._groups.by_name["g-w"].sequence


def test_a_client_watches_so_many_jobs(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused, so that nobody waits for ever; one that is watched already isn't counted again."""
    monkeypatch.setattr("reelwire.broker.job_news.WATCHES_PER_CLIENT_MAX", 2)
    client = begun(shop)[0]
    jobs = [client.accepted(f"k{index}") for index in range(3)]
    for request, job in enumerate([*jobs, jobs[0]]):
        client.say(m.WatchJob(job, request=request))
    assert shop.counter("watches_refused") == 1
    (refused,) = client.heard(m.JobRefused)
    assert (refused.request, refused.failure.kind) == (2, "overload")
    assert refused.failure.message == "the client watches 2 jobs already; accepted: 2 at once"
    assert [each.job.job for each in client.heard(m.JobChanged)] == [*jobs[:2], jobs[0]]
    shop.drop(client)
    shop.jobs.check()


def test_who_watches_a_job_that_is_forgotten_in_the_same_turn_is_told_of_its_end(shop: Shop) -> None:
    """The end comes before the oblivion."""
    client, worker, run = begun(shop)
    client.say(m.WatchJob(run.job))
    shop.turns = False
    worker.finish(run)
    client.take(m.JobChanged)
    client.ask(m.DeleteJob, run.job)
    shop.turn()
    assert [each.job.state for each in client.take(m.JobChanged)] == ["succeeded"]


def test_facts_that_are_too_large_are_left_out(shop: Shop) -> None:
    """Of all that is told of the job: its result is what counts."""
    client, worker, run = begun(shop)
    worker.finish(run, text="x" * 100_000)
    assert client.info(run.job).facts == {}
    assert client.info(run.job).state == "succeeded"


def test_a_newer_checkpoint_takes_the_place_of_one_that_comes(shop: Shop) -> None:
    """And the result that of both: nothing of them is left."""
    _, worker, run = begun(shop)
    worker.gives = False
    worker.checkpoint(run, 1)
    worker.checkpoint(run, 1)
    assert len(worker.heard(m.WantFile)) == 1
    worker.checkpoint(run, 2)
    worker.part(sha256(b"at 1"), 0)
    assert shop.counter("parts_of_no_file") == 1
    worker.gives = True
    worker.finish(run)
    assert list(shop.disk.files.values()) == [b"result"]
