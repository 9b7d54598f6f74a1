"""Uploads of clients, and files on their way to clients and workers: in parts, within grants, in turns."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.actions import InspectFile, RemoveFile
from reelwire.broker.job_incoming import WINDOW_PARTS
from reelwire.broker.job_outgoing import AHEAD_PARTS_MAX, READS_PER_PEER_MAX
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.tensors import Inline, Shared, TensorRef
from reelwire.wire import Limits

from .fake_jobs import Shop
from .fake_store import sha256

MIB = FILE_PART_BYTES


@pytest.fixture
def shop() -> Shop:
    """A broker with nobody attached."""
    return Shop()


def part(data: bytes, dtype: str = "uint8") -> TensorRef:
    """A part of a file."""
    return TensorRef(dtype, (len(data),), Inline(data))


def done(shop: Shop, worker: Any, client: Any, key: str, data: bytes) -> str:
    """A job that has succeeded, with that result."""
    job: str = client.accepted(key)
    worker.finish(worker.runs[-1], data)
    return job


# --- uploads -----------------------------------------------------------------------------------------------------------


def test_protocol_6_parts_of_an_upload_are_granted_a_few_ahead_of_what_is_written(shop: Shop) -> None:
    """Absolute numbers, which only rise; the last one is all parts."""
    client = shop.client()
    shop.works = False
    client.upload(b"v" * (10 * MIB + 1))
    assert client.heard(m.UploadGrant) == [m.UploadGrant("u", WINDOW_PARTS)]
    assert client.sent["u"] == WINDOW_PARTS
    shop.works = True
    shop.settle()
    grants = [grant.parts for grant in client.heard(m.UploadGrant)]
    assert grants == [*range(WINDOW_PARTS, 12)]
    assert client.heard(m.UploadStored) == [m.UploadStored("u")]


def test_an_empty_upload_is_there_at_once(shop: Shop) -> None:
    """It has no parts; whether it is of any use is another question."""
    client = shop.client()
    client.upload(b"")
    assert client.heard(m.UploadStored)
    assert not client.heard(m.UploadGrant)


def test_groups_09_what_the_broker_has_isnt_asked_for_again(shop: Shop) -> None:
    """Of this client, or of a job; another client's file isn't admitted to be there."""
    client, other = shop.client(), shop.client("other")
    client.upload(b"video", "u1")
    client.upload(b"video", "u2")
    assert len(client.heard(m.UploadGrant)) == 1
    assert len(client.heard(m.UploadStored)) == 2
    other.upload(b"video", "o1")
    assert other.heard(m.UploadGrant)
    client.say(m.BeginUpload("u3", "video", 99, sha256(b"video")))
    assert client.heard(m.UploadRefused)[0].failure.field == "video"


@pytest.mark.parametrize(
    ("nbytes", "file"), [(-1, "0" * 64), (1001, "0" * 64), (1 << 62, "0" * 64), (5, "x"), (5, "A" * 64), (5, "")]
)
def test_an_upload_that_cant_be_is_refused_with_its_field(nbytes: int, file: str) -> None:
    """Its size and its hash are looked at before anything comes."""
    shop = Shop(upload_bytes_max=1000)
    client = shop.client()
    client.say(m.BeginUpload("u", "images[3]", nbytes, file))
    (refused,) = client.heard(m.UploadRefused)
    assert (refused.upload, refused.failure.kind, refused.failure.field) == ("u", "request", "images[3]")
    assert not shop.disk.errands


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_an_upload_with_a_strange_name_is_refused(shop: Shop, name: str) -> None:
    """1 to 256 characters."""
    client = shop.client()
    client.say(m.BeginUpload(name, "f" * 5000, 5, "0" * 64))
    (refused,) = client.heard(m.UploadRefused)
    assert len(refused.failure.field) < 600


def test_a_client_has_so_many_uploads() -> None:
    """That are part of no job yet: a further one takes the place of one that is complete for a minute, or is refused."""
    shop = Shop(uploads_per_client_max=2)
    shop.worker()
    client = shop.client()
    oldest = client.upload(b"video", "u1")
    newer = client.upload(b"video too", "u2")
    shop.advance(59.0)
    client.upload(b"more", "u3")
    (refused_upload,) = client.take(m.UploadRefused)
    assert (refused_upload.upload, refused_upload.failure.kind) == ("u3", "overload")
    assert "(uploads_per_client_max)" in refused_upload.failure.message
    assert refused_upload.failure.retry_after_s == shop.config.retry_after_s
    shop.advance(1.0)
    client.upload(b"more", "u4")
    assert not client.heard(m.UploadRefused)
    refused = client.submit("k1", "v2v", media={"video": (oldest,)})
    assert isinstance(refused, m.JobRefused)
    assert refused.failure.field == "video"
    client.accepted("k2", "v2v", media={"video": (newer,)})
    shop.advance(60.0)
    for name in ("u5", "u6", "u7"):
        client.say(m.BeginUpload(name, "video", 2 * MIB, name[1] * 64))
    (refused_upload,) = client.heard(m.UploadRefused)
    assert (refused_upload.upload, refused_upload.failure.kind) == ("u7", "overload")


def test_an_upload_that_is_no_video_is_kept_for_nobody() -> None:
    """It is refused with the request, and the store holds what it held."""
    shop = Shop()
    shop.worker()
    client = shop.client()
    text = client.upload(b"nothing of a video")
    shop.disk.fails = lambda action: "is no video" if isinstance(action, InspectFile) else ""
    refused = client.submit("k", "v2v", media={"video": (text,)})
    assert isinstance(refused, m.JobRefused)
    assert refused.failure.field == "video"
    assert not shop.disk.files


@pytest.mark.parametrize(
    ("index", "data"),
    [
        (1, part(b"v" * MIB)),
        (0, part(b"v" * (MIB - 1))),
        (0, part(b"")),
        (-1, part(b"v" * MIB)),
        (0, part(b"v" * MIB, "int8")),
        (0, TensorRef("uint8", (MIB, 1), Inline(b"v" * MIB))),
        (0, TensorRef("uint8", (MIB,), Shared("owner", "segment", 1))),
        (1 << 62, part(b"v" * MIB)),
    ],
)
def test_a_part_that_isnt_the_next_one_ends_the_upload(shop: Shop, index: int, data: TensorRef) -> None:
    """Out of order, of another size, of another sort: nothing of it is kept, and later parts are dropped."""
    client = shop.client()
    client.say(m.BeginUpload("u", "video", 2 * MIB, "0" * 64))
    client.say(m.UploadPart("u", index, data))
    assert client.heard(m.UploadRefused)[0].failure.field == "video"
    client.say(m.UploadPart("u", 0, part(b"v" * MIB)))
    assert shop.counter("parts_of_no_upload") == 1
    assert not shop.disk._incoming


def test_a_part_beyond_the_grant_ends_the_upload(shop: Shop) -> None:
    """Whoever doesn't wait for room has none."""
    client = shop.client()
    shop.works = False
    client.say(m.BeginUpload("u", "video", 9 * MIB, "0" * 64))
    for index in range(WINDOW_PARTS + 1):
        client.say(m.UploadPart("u", index, part(b"v" * MIB)))
    assert client.heard(m.UploadRefused)
    shop.works = True
    shop.settle()
    assert not shop.disk._incoming


@pytest.mark.parametrize("fault", ["hash", "disk"])
def test_an_upload_that_cant_be_stored_is_refused(shop: Shop, fault: str) -> None:
    """Its hash is another one, or the disk says no."""
    client = shop.client()
    if fault == "disk":
        shop.disk.fails = lambda action: "no room" if type(action).__name__ == "AppendPart" else ""
    client.upload(b"video", file="0" * 64 if fault == "hash" else "")
    assert client.heard(m.UploadRefused)[0].failure.field == "video"
    assert not shop.disk.files


def test_a_name_that_is_in_use_ends_both_uploads(shop: Shop) -> None:
    """Nobody could tell which of them an answer is about."""
    client = shop.client()
    client.upload(b"video")
    client.say(m.BeginUpload("u", "video", 5, "0" * 64))
    assert client.heard(m.UploadRefused)
    assert not shop.disk.files


def test_an_upload_that_stands_still_is_given_up() -> None:
    """After `stall_s`: it takes room that others need."""
    shop = Shop(stall_s=10.0)
    client = shop.client()
    client.say(m.BeginUpload("u", "video", 9 * MIB, "0" * 64))
    shop.advance(8.0)
    client.say(m.UploadPart("u", 0, part(b"v" * MIB)))
    shop.advance(8.0)
    assert not client.heard(m.UploadRefused)
    shop.advance(3.0)
    assert client.heard(m.UploadRefused)[0].failure.kind == "timeout"


@pytest.mark.parametrize("is_complete", [True, False])
def test_what_a_client_leaves_behind_is_dropped(shop: Shop, is_complete: bool) -> None:
    """Complete or not: no job needs it."""
    client = shop.client()
    shop.works = is_complete
    client.upload(b"v" * (5 * MIB))
    shop.drop(client)
    shop.works = True
    shop.settle()
    assert not shop.disk.files
    assert not shop.disk._incoming


def test_what_is_complete_when_it_is_given_up_is_removed(shop: Shop) -> None:
    """The store had it a moment before it was told not to want it."""
    client = shop.client()
    shop.works = False
    client.upload(b"video")
    events: deque[Any] = deque()
    while shop.disk.errands:
        events.append(shop.disk.do_one(shop.now))
    assert shop.disk.files
    shop.drop(client)
    while events:
        event = events.popleft()
        if event is not None:
            shop.handle(event)
    shop.works = True
    shop.settle()
    assert not shop.disk.files


def test_a_file_that_is_imported_while_the_last_one_lets_go_of_it_stays(shop: Shop) -> None:
    """The store finds that it has the file already, and the order to remove it must not come after that."""
    shop.disk.outside["/in/a.mp4"] = b"video"
    worker, client = shop.worker(), shop.client()
    client.accepted("k1", "v2v", media={"video": (client.upload(b"video"),)})
    shop.works = False
    client.submit("k2", "v2v", media={"video": (m.Media(path="/in/a.mp4"),)})
    worker.fail(worker.runs[0])
    assert [type(errand).__name__ for errand in shop.disk.errands] == ["ImportFile"]
    shop.works = True
    shop.settle()
    assert list(shop.disk.files.values()) == [b"video"]
    assert len(worker.runs) == 2


def test_a_file_that_comes_while_the_last_one_lets_go_of_it_stays(shop: Shop) -> None:
    """It is sent for the second time, by somebody who couldn't know that it is here, and the first job ends meanwhile."""
    worker, client, other = shop.worker(), shop.client(), shop.client("other")
    client.upload(b"video")
    shop.works = False
    other.upload(b"video")
    shop.drop(client)
    assert not [errand for errand in shop.disk.errands if isinstance(errand, RemoveFile)]
    shop.works = True
    shop.settle()
    assert other.heard(m.UploadStored)
    assert list(shop.disk.files.values()) == [b"video"]
    shop.drop(other)
    assert not shop.disk.files
    assert not worker.runs


def test_groups_09_what_clients_may_have_on_its_way_is_bounded(shop: Shop) -> None:
    """For each and for all; one that doesn't send holds up no others, and whoever leaves gives others their turn."""
    clients = [shop.client(f"c{index}") for index in range(18)]
    shop.checks = False
    for client in clients:
        for index in range(5):
            client.say(m.BeginUpload(f"u{index}", "video", 8 * MIB, sha256(f"{client.name} {index}".encode())))
    shop.checks = True
    shop.turn()

    def granted(client: Any) -> int:
        below = {grant.upload: grant.parts for grant in client.heard(m.UploadGrant)}
        return sum(below.values())

    assert [granted(client) for client in clients] == [16] * 16 + [0, 0]
    for index in range(3):  # what is written makes room, in turns
        clients[0].say(m.UploadPart("u0", index, TensorRef("uint8", (MIB,), Inline(bytes(MIB)))))
    assert [granted(client) for client in clients] == [17, *[16] * 15, 1, 1]
    for client in clients[1:3]:
        shop.drop(client)
    assert [granted(client) for client in clients[16:]] == [16, 16]
    for client in clients[3:]:
        shop.drop(client)
    assert granted(clients[0]) == 3 + 16


def test_parts_of_a_result_that_come_too_late_are_passed_over(shop: Shop) -> None:
    """After a silence it is asked for again from its first part; what was sent before is neither a fault nor taken."""
    worker, client = shop.worker(), shop.client()
    client.accepted()
    run, data = worker.runs[-1], bytes(range(256)) * (6 * MIB // 256)
    worker.gives = False
    worker.finish(run, data)
    for index in (0, 1):
        worker.part(sha256(data), index)
    shop.advance(shop.config.stall_s + 1.0)
    assert shop.job(run.job).state == "unstored"
    shop.advance(shop.config.retry_after_s + 1.0)
    assert worker.take(m.WantFile)[-1] == m.WantFile(sha256(data), 0, WINDOW_PARTS)
    for index in (2, WINDOW_PARTS, -1):
        worker.part(sha256(data), index)
    assert shop.counter("parts_of_no_file") == 3
    shop.works = False
    for index in range(WINDOW_PARTS + 1):  # the last of these isn't granted before others are written
        worker.part(sha256(data), index)
    assert shop.counter("parts_of_no_file") == 4
    shop.works = True
    shop.settle()
    for want in worker.take(m.WantFile):
        worker.give(want)
    shop.settle()
    assert client.fetch(run.job) == data


# --- results -----------------------------------------------------------------------------------------------------------


def test_a_result_is_sent_as_far_as_it_is_wanted(shop: Shop) -> None:
    """Parts below the number that was said, once each; a number that was said before does nothing."""
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * (6 * MIB))
    for below in (2, 1, 2, 4):
        client.say(m.FetchResult(7, job, 0, below))
    assert [each.index for each in client.heard(m.ResultPart)] == [0, 1, 2, 3]
    assert shop.disk.records[job].fetched_at is None
    client.say(m.FetchResult(7, job, 0, 99))
    assert [each.index for each in client.heard(m.ResultPart)] == [*range(6)]
    client.say(m.FetchResult(8, job, 5, 6))
    assert client.heard(m.ResultPart)[-1].request == 8


@pytest.mark.parametrize(
    ("first", "parts", "field"), [(-1, 2, "first"), (3, 9, "first"), (1 << 62, 9, "first"), (0, 0, ""), (0, -5, "")]
)
def test_parts_that_arent_there_are_refused(shop: Shop, first: int, parts: int, field: str) -> None:
    """No part at all is none too few."""
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * (3 * MIB))
    answer = client.ask(m.FetchResult, job, first=first, parts=parts)
    assert (answer.failure.field if answer else "") == field


def test_a_result_cant_be_had_from_any_job(shop: Shop) -> None:
    """One that isn't there, hasn't ended, or has failed: a sentence says so."""
    worker, client = shop.worker(), shop.client()
    job = client.accepted()
    assert "preparing" in client.ask(m.FetchResult, job, first=0, parts=1).failure.message
    assert "no job" in client.ask(m.FetchResult, "x" * 10_000, first=0, parts=1).failure.message
    worker.fail(worker.runs[0])
    assert "failed" in client.ask(m.FetchResult, job, first=0, parts=1).failure.message


def test_a_client_fetches_within_bounds(shop: Shop) -> None:
    """So many results at once, so many parts ahead, one job per number."""
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * ((AHEAD_PARTS_MAX + 2) * MIB))
    other = done(shop, worker, client, "k2", b"s" * (2 * MIB))
    refused = client.ask(m.FetchResult, job, first=0, parts=AHEAD_PARTS_MAX + 1)
    assert refused.failure.field == "parts"
    for number in range(100, 104):
        client.say(m.FetchResult(number, job, 0, 1))
    client.say(m.FetchResult(104, job, 0, 1))
    assert client.heard(m.JobRefused)[-1].failure.kind == "overload"
    client.say(m.FetchResult(100, other, 0, 1))
    assert client.heard(m.JobRefused)[-1].failure.field == "request"


def test_parts_are_read_in_turns_and_a_few_at_a_time(shop: Shop) -> None:
    """Neither one result nor one client has all of the store."""
    worker, clients = shop.worker(), [shop.client("a"), shop.client("b")]
    jobs = [done(shop, worker, clients[0], f"k{index}", bytes([index]) * (8 * MIB)) for index in range(4)]
    shop.works = False
    for client in clients:
        for number, job in enumerate(jobs):
            client.say(m.FetchResult(number, job, 0, 8))
    assert len(shop.disk.errands) == 2 * READS_PER_PEER_MAX
    for _ in range(16):
        shop.work()
    assert [len(client.heard(m.ResultPart)) for client in clients] == [8, 8]
    assert {each.request for each in clients[0].heard(m.ResultPart)[:4]} == {0, 1, 2, 3}
    shop.drop(clients[0])
    shop.works = True
    shop.settle()
    assert len(clients[1].heard(m.ResultPart)) == 32


def test_a_result_that_cant_be_read_is_said_so(shop: Shop) -> None:
    """It isn't taken for fetched."""
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"result")
    shop.disk.fails = lambda _action: "the disk is broken"
    assert "the disk is broken" in client.ask(m.FetchResult, job, first=0, parts=1).failure.message
    assert shop.disk.records[job].fetched_at is None


def test_only_what_has_ended_can_be_deleted(shop: Shop) -> None:
    """It is answered when that is durable; the key is free then, and the file is gone."""
    worker, client = shop.worker(), shop.client()
    job = client.accepted()
    assert client.ask(m.DeleteJob, job).failure.field == "job"
    client.say(m.WatchJob(job))
    worker.finish(worker.runs[0])
    shop.commits = False
    assert client.ask(m.DeleteJob, job) is None
    assert shop.disk.files
    shop.commit()
    shop.settle()
    assert client.heard(m.Jobs)[-1].jobs[0].state == "succeeded"
    assert not shop.disk.files
    assert not shop.disk.records
    shop.commits = True
    assert client.accepted() != job


def test_a_deleted_result_is_sent_no_further(shop: Shop) -> None:
    """Whoever fetches it is told why."""
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * (5 * MIB))
    client.say(m.FetchResult(70, job, 0, 2))
    client.ask(m.DeleteJob, job)
    refused = client.heard(m.JobRefused)[-1]
    assert refused.request == 70
    assert "deleted" in refused.failure.message


def test_a_client_gives_a_result_up(shop: Shop) -> None:
    """No part of it comes any more, and another one has its turn."""
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * (6 * MIB))
    shop.works = False
    client.say(m.FetchResult(7, job, 0, 4))
    client.say(m.FetchResult(7, job, 0, 0))
    client.say(m.FetchResult(8, job, 0, 1))
    shop.works = True
    shop.settle()
    assert [each.request for each in client.heard(m.ResultPart)] == [8]


def test_parts_that_a_peer_cant_take_are_refused(shop: Shop) -> None:
    """Instead of messages that cost it its connection."""
    worker, client = shop.worker(), shop.client()
    job = done(shop, worker, client, "k", b"r" * (6 * MIB))
    shop.core._peers.by_route[client.route].limits = Limits(frame_bytes_max=1000)
    assert client.ask(m.FetchResult, job, first=0, parts=1).failure.field == "parts"


def test_a_worker_is_sent_the_files_of_its_job_and_no_others(shop: Shop) -> None:
    """From the part on that it names, as far as it says; what can't be read is said."""
    worker, client = shop.worker(), shop.client()
    video = client.upload(b"video" + b"v" * (5 * MIB))
    client.accepted("k", "v2v", media={"video": (video,)})
    other = client.upload(b"video of somebody else", "u2")
    (run,) = worker.runs
    file = run.media["video"][0].file
    for first, below in ((0, 2), (2, 4), (4, 99)):
        worker.say(m.WantFile(file, first, below))
    assert [each.index for each in worker.heard(m.FilePart)] == [*range(6)]
    worker.say(m.WantFile(file, 5, 6))
    assert worker.heard(m.FilePart)[-1].index == 5
    for wrong in (m.WantFile(other.sha256, 0, 1), m.WantFile(file, 6, 7), m.WantFile(file, 0, 99)):
        worker.inbox.clear()
        shop.works = False
        worker.say(wrong)
        assert worker.heard(m.FileGone) or wrong.parts == 99
        shop.works = True
        shop.settle()
    shop.disk.fails = lambda _action: "the disk is broken"
    worker.say(m.WantFile(file, 3, 4))
    assert worker.heard(m.FileGone)[-1].reason == "the disk is broken"


def test_what_goes_to_a_worker_stops_with_its_job(shop: Shop) -> None:
    """It failed while its video was on its way."""
    worker, client = shop.worker(), shop.client()
    client.accepted("k", "v2v", media={"video": (client.upload(b"video" + b"v" * (5 * MIB)),)})
    (run,) = worker.runs
    shop.works = False
    worker.say(m.WantFile(run.media["video"][0].file, 0, 4))
    worker.fail(run)
    shop.works = True
    shop.settle()
    assert not worker.heard(m.FilePart)
    assert not shop.disk.files
