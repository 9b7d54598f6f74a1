"""What is kept of jobs and their files, for how long, and what makes room for what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reelwire import messages as m
from reelwire.broker.events import StoreStalled
from reelwire.job_parts import FILE_PART_BYTES

from .fake_jobs import Shop

MIB = FILE_PART_BYTES


def done(shop: Shop, worker: Any, client: Any, key: str, data: bytes) -> str:
    """A job that has succeeded, with that result."""
    job: str = client.accepted(key)
    worker.finish(worker.runs[-1], data)
    return job


def test_groups_15_jobs_are_kept_for_so_long() -> None:
    """Then record and result are gone; also when the broker was restarted in between."""
    shop = Shop(result_keep_s=100.0)
    worker, client = shop.worker(), shop.client()
    done(shop, worker, client, "k", b"one")
    shop.advance(60.0)
    later = done(shop, worker, client, "k2", b"two")
    shop.drop(worker)
    shop = shop.restart()
    client = shop.client()
    shop.advance(50.0)
    assert [info.job for info in client.ask(m.AskJobs).jobs] == [later]
    assert list(shop.disk.files.values()) == [b"two"]
    shop.advance(100.0)
    assert not shop.disk.records
    assert not shop.disk.files


def test_groups_15_so_many_jobs_are_remembered() -> None:
    """Those that ended first are forgotten first."""
    shop = Shop(jobs_kept_max=2)
    worker, client = shop.worker(), shop.client()
    jobs = [done(shop, worker, client, f"k{index}", b"x") for index in range(4)]
    assert [info.job for info in client.ask(m.AskJobs).jobs] == jobs[:1:-1]


def test_groups_15_a_quota_is_kept_and_fetched_results_go_first() -> None:
    """Of these the oldest; then those that nobody has fetched, the oldest first; the jobs stay known."""
    shop = Shop(state_bytes_max=4 * MIB)
    worker, client = shop.worker(), shop.client()
    jobs = [done(shop, worker, client, f"k{index}", bytes([index]) * MIB) for index in range(4)]
    for index in (2, 1):
        shop.advance(1.0)
        client.fetch(jobs[index])
    gone = []
    for index in range(4, 8):
        jobs.append(done(shop, worker, client, f"k{index}", bytes([index]) * MIB))
        assert sum(map(len, shop.disk.files.values())) <= 4 * MIB
        gone.append([at for at, job in enumerate(jobs) if not client.info(job).result_bytes])
    assert gone == [[2], [1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert client.info(jobs[0]).state == "succeeded"
    assert "made room" in client.ask(m.FetchResult, jobs[0], first=0, parts=1).failure.message
    assert client.accepted("k0") == jobs[0]


def test_a_result_that_others_need_as_well_makes_no_room() -> None:
    """Two jobs have made the same bytes: to give one of them up would free nothing."""
    shop = Shop(state_bytes_max=2 * MIB)
    worker, client = shop.worker(), shop.client()
    same = [done(shop, worker, client, key, b"s" * MIB) for key in ("k1", "k2")]
    client.fetch(same[0])
    other = done(shop, worker, client, "k3", b"o" * MIB)
    done(shop, worker, client, "k4", b"n" * MIB)
    assert sum(map(len, shop.disk.files.values())) == 2 * MIB
    assert [client.info(job).result_bytes for job in (*same, other)] == [MIB, MIB, 0]


def test_groups_15_an_upload_pushes_out_only_what_was_fetched() -> None:
    """Else it is refused; a job's own files never go."""
    shop = Shop(state_bytes_max=4 * MIB)
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * (2 * MIB))
    client.upload(b"v" * (2 * MIB), "u1")
    assert client.heard(m.UploadRefused)[0].failure.kind == "overload"
    client.fetch(job)
    client.upload(b"v" * (2 * MIB), "u2")
    assert client.heard(m.UploadStored) == [m.UploadStored("u2")]
    assert list(shop.disk.files.values()) == [b"v" * (2 * MIB)]


def test_groups_15_a_result_for_which_there_will_never_be_room_fails_its_job() -> None:
    """A checkpoint is done without; nothing is pushed out for what doesn't fit anyway."""
    shop = Shop(state_bytes_max=2 * MIB)
    worker, client = shop.worker(), shop.client()
    kept = done(shop, worker, client, "k", b"r" * MIB)
    job = client.accepted("k2")
    worker.checkpoint(worker.runs[-1], 5, b"c" * (3 * MIB))
    assert shop.counter("checkpoints_without_room") == 1
    worker.finish(worker.runs[-1], b"s" * (3 * MIB))
    failure = client.info(job).failure
    assert failure is not None
    assert failure.kind == "overload"
    assert client.info(kept).result_bytes == MIB


def test_groups_15_what_is_only_announced_never_stops_a_result() -> None:
    """Uploads leave room to what jobs make, and give way to it, those first that aren't there yet; their clients are told."""
    shop = Shop(state_bytes_max=8 * MIB)
    worker, client, other = shop.worker(), shop.client(), shop.client("other")
    whole = [client.upload(bytes([index]) * MIB, f"whole {index}") for index in range(3)]
    for index in range(4):
        other.say(m.BeginUpload(f"u{index}", "video", MIB, f"{index:064x}"))
    assert [refused.upload for refused in other.take(m.UploadRefused)] == ["u3"]
    first = client.accepted("k1")
    worker.checkpoint(worker.runs[-1], 5, b"c" * MIB)
    assert shop.job(first).record.checkpoint_step == 5
    worker.finish(worker.runs[-1], b"r" * (2 * MIB))
    (refused,) = other.take(m.UploadRefused)
    assert (refused.upload, refused.failure.kind, refused.failure.field) == ("u0", "overload", "video")
    assert client.info(first).state == "succeeded"
    second = done(shop, worker, client, "k2", b"s" * (4 * MIB))
    assert [refused.upload for refused in other.take(m.UploadRefused)] == ["u1", "u2"]
    assert [client.info(job).result_bytes for job in (first, second)] == [2 * MIB, 4 * MIB]
    assert client.refused("k3", "v2v", media={"video": (whole[0],)}).field == "video"


def test_groups_15_one_client_has_so_many_bytes_of_uploads() -> None:
    """What it has announced counts; what is complete for a minute and part of no job makes place for more."""
    shop = Shop(upload_bytes_per_client_max=3 * MIB)
    client, other = shop.client(), shop.client("other")
    client.upload(b"a" * MIB, "u1")
    shop.advance(60.0)
    client.say(m.BeginUpload("u0", "video", 2 * MIB, "0" * 64))
    client.upload(b"b" * MIB, "u2")
    assert list(shop.disk.files.values()) == [b"b" * MIB]
    client.upload(b"c" * (2 * MIB), "u3")
    (refused,) = client.heard(m.UploadRefused)
    assert (refused.upload, refused.failure.kind) == ("u3", "overload")
    other.upload(b"c" * (3 * MIB), "u")
    assert other.heard(m.UploadStored)


def test_groups_15_a_result_waits_for_room() -> None:
    """Nothing of it is lost: its worker keeps it until it is taken; who asks is told what it waits for."""
    shop = Shop(state_bytes_max=4 * MIB)
    worker, client = shop.worker(), shop.client()
    job = client.accepted("k1")
    waiting = client.accepted("k2", "v2v", media={"video": (client.upload(b"video" * (3 * MIB // 5)),)})
    worker.finish(worker.runs[-1], b"r" * (2 * MIB))
    info = client.info(job)
    assert (info.state, info.waits_for) == ("encoding", "room")
    status: Any = shop.core.status()["jobs"]
    assert [each["waits_for"] for each in status["running"]] == ["room"]
    shop.advance(6.0)
    assert not worker.heard(m.ForgetJob)
    client.ask(m.CancelJob, waiting)
    shop.advance(6.0)
    assert (client.info(job).state, client.info(job).result_bytes) == ("succeeded", 2 * MIB)
    assert worker.heard(m.ForgetJob) == [m.ForgetJob(job, 1)]


def test_groups_15_a_result_waits_for_a_disk_that_is_full() -> None:
    """Whatever else fills it; and it isn't lost with a worker that is slow to send it. A client may still end it."""
    shop = Shop(stall_s=20.0)
    worker, client = shop.worker(), shop.client()
    job = client.accepted("k")
    shop.disk.is_full = True
    worker.finish(worker.runs[-1], b"r" * MIB)
    assert (client.info(job).state, client.info(job).waits_for) == ("encoding", "room")
    shop.disk.is_full, worker.gives = False, False
    shop.advance(26.0)
    assert (client.info(job).state, client.info(job).waits_for) == ("encoding", "worker")
    worker.gives = True
    shop.advance(6.0)
    assert client.fetch(job) == b"r" * MIB
    job = client.accepted("k2")
    shop.disk.is_full = True
    worker.finish(worker.runs[-1], b"s" * MIB)
    assert client.ask(m.CancelJob, job).jobs[0].state == "cancelled"


def test_a_broker_that_cannot_write_refuses_what_would_have_to_be_durable() -> None:
    """What it has accepted goes on, and is told when it can be written; then new jobs are taken as before."""
    shop = Shop()
    worker, client = shop.worker(), shop.client()
    job = client.accepted("k")
    shop.handle(StoreStalled(shop.now, "database or disk is full"))
    shop.commits = False
    assert client.refused("k2").kind == "overload"
    client.upload(b"video", "u1")
    (refused,) = client.take(m.UploadRefused)
    assert (refused.failure.kind, refused.failure.field) == ("overload", "video")
    assert client.submit("k").job.job == job
    worker.finish(worker.runs[-1])
    status: Any = shop.core.status()["jobs"]
    assert status["stalled"] == "database or disk is full"
    assert client.info(job).state != "succeeded"
    shop.handle(StoreStalled(shop.now, ""))
    shop.commits = True
    shop.settle()
    assert client.info(job).state == "succeeded"
    client.accepted("k2")


def test_groups_15_a_result_is_fetched_when_its_client_says_so() -> None:
    """Not when its parts were sent, which may be lost on the way; not when somebody has only the last one, or gives up."""
    shop = Shop()
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * (2 * MIB))
    for words in ([(0, 2)], [(1, 2), (1, 0)], [(0, 1), (0, 0)]):
        request = client.call()
        for first, parts in words:
            client.say(m.FetchResult(request, job, first, parts))
        assert shop.job(job).record.fetched_at is None
    assert [part.index for part in client.heard(m.ResultPart)] == [0, 1, 1, 0]
    before = len(client.inbox)
    client.say(m.FetchResult(client.call(), job, 2, 0))
    assert shop.disk.records[job].fetched_at is not None
    client.say(m.FetchResult(client.call(), "nobody", 2, 0))
    assert len(client.inbox) == before


def test_status_says_what_there_is() -> None:
    """As plain data: jobs by their state, those that run, files and bytes."""
    shop = Shop()
    worker, client = shop.worker(), shop.client()
    done(shop, worker, client, "k", b"r" * 10)
    job = client.accepted("k2")
    status: Any = shop.core.status()["jobs"]
    assert status["states"] == {"succeeded": 1, "preparing": 1}
    (row,) = status["running"]
    assert row == {"job": job, "kind": "t2v", "state": "preparing", "group": "g-w", "waits_for": "", "note": ""}
    assert (status["files"], status["files_bytes"]) == (1, 10)


def test_what_makes_room_counts_as_gone_at_once() -> None:
    """Before the journal has written it: the next file needs no more to go than it takes."""
    shop = Shop(state_bytes_max=4 * MIB)
    worker, client = shop.worker(), shop.client()
    for key in ("k1", "k2"):
        client.fetch(done(shop, worker, client, key, key.encode() * (MIB // 2)))
    shop.commits = False
    for name in ("u1", "u2", "u3"):
        client.upload(name.encode() * (MIB // 2), name)
    assert len(client.heard(m.UploadStored)) == 3
    shop.commit()
    shop.settle()
    assert len(shop.disk.files) == 3


def test_a_clock_that_was_set_back_keeps_nothing_for_ever() -> None:
    """What ended later than now has ended now."""
    shop = Shop(result_keep_s=100.0)
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"one")
    record = shop.disk.records[job]
    shop.disk.records[job] = replace(record, ended_at=(record.ended_at or 0.0) + 1e6)
    shop.drop(worker)
    shop = shop.restart()
    worker, client = shop.worker(), shop.client()
    done(shop, worker, client, "k2", b"two")
    shop.advance(101.0)
    assert not shop.disk.records
