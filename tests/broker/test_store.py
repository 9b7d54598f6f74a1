"""The store of a broker: what it acknowledges, in which order, and what the next broker finds."""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from reelwire.broker import journal as journal_module
from reelwire.broker import store as store_module
from reelwire.broker.actions import (
    AppendPart,
    CheckOutput,
    ExportFile,
    ImportFile,
    InspectFile,
    Persist,
    ReadPart,
    ReceiveFile,
    RemoveFile,
)
from reelwire.broker.config import BrokerConfig
from reelwire.broker.events import FileDone, PartRead, PartStored, Stored, StoreFailed, StoreStalled
from reelwire.broker.job_record import JobRecord, StoredFile
from reelwire.broker.store import Store
from reelwire.errors import ConfigError
from reelwire.job_spec import MediaInput
from reelwire.media import VideoWriter

LIMIT_S = 20.0
ENDPOINT = "tcp://127.0.0.1:7461"
CONTENT = b"content"
SHA = hashlib.sha256(CONTENT).hexdigest()
E = TypeVar("E")


class Broker:
    """A store, and what it has posted."""

    def __init__(self, state: Path, **settings: Any) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.threads: set[int] = set()
        self.store = Store.open(BrokerConfig(state_dir=str(state), **settings), ENDPOINT, self.post)
        self.saved = self.store.saved

    def post(self, event: object) -> None:
        """As the loop takes it."""
        self.threads.add(threading.get_ident())
        self.events.put(event)

    def next(self, kind: type[E]) -> E:
        """The next event, which is of that kind."""
        event = self.events.get(timeout=LIMIT_S)
        assert isinstance(event, kind), event
        return event

    def persist(self, *records: JobRecord, first: int = 1) -> None:
        """Hand records in, and wait until all are durable."""
        for ticket, record in enumerate(records, first):
            self.store.perform(Persist(ticket, record, record.job))
        until = first + len(records) - 1
        while self.next(Stored).ticket < until:
            pass

    def send(self, ticket: int, content: bytes = CONTENT) -> str:
        """Receive a file of one part."""
        self.store.perform(ReceiveFile(ticket, len(content), hashlib.sha256(content).hexdigest()))
        self.store.perform(AppendPart(ticket, 0, content))
        assert self.next(PartStored).parts == 1
        return self.next(FileDone).sha256


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Opens brokers at one state folder; closed in the end."""
    made: list[Broker] = []

    def start(**settings: Any) -> Broker:
        made.append(Broker(tmp_path / "state", **settings))
        return made[-1]

    yield start
    for each in made:
        each.store.close(LIMIT_S)


def record(number: int, **more: Any) -> JobRecord:
    return JobRecord(f"job-{number}", number, f"key-{number}", "app", "v2v", **more)


def test_groups_07_what_is_stored_is_found_by_the_next_broker(broker: Callable[..., Broker], tmp_path: Path) -> None:
    """Records and the files that they refer to; another file is gone, and so is what was incomplete."""
    first = broker()
    assert (first.saved.incarnation, first.saved.records) == (1, ())
    assert Path(first.saved.files) == tmp_path / "state" / "files"
    kept = [first.send(ticket, bytes([ticket])) for ticket in range(1, 6)]
    first.store.perform(ReceiveFile(6, 9, SHA))
    jobs = (
        record(1, media={"video": (StoredFile(kept[0], 1),), "images": (StoredFile(kept[1], 1),)}),
        record(2, checkpoint=StoredFile(kept[2], 1), result=StoredFile(kept[3], 1)),
    )
    first.persist(*jobs)
    first.store.close(LIMIT_S)
    second = broker()
    assert (second.saved.incarnation, second.saved.records) == (2, jobs)
    assert sorted(path.name for path in Path(second.saved.files).iterdir()) == sorted(kept[:4])
    assert list((tmp_path / "state" / "incoming").iterdir()) == []


def test_a_file_that_a_record_refers_to_may_be_gone(broker: Callable[..., Broker]) -> None:
    """The broker starts nevertheless, as other jobs don't need it, and whoever does is told."""
    first = broker()
    first.persist(record(1, result=StoredFile(SHA, 7)), record(2))
    first.store.close(LIMIT_S)
    second = broker()
    assert len(second.saved.records) == 2
    second.store.perform(ReadPart(1, SHA, 0))
    part = second.next(PartRead)
    assert part.data == b""
    assert part.reason


def test_two_brokers_never_have_one_store(broker: Callable[..., Broker]) -> None:
    """The second is refused, counts for nothing, and changes nothing."""
    first = broker()
    first.send(1)
    with pytest.raises(ConfigError, match="is in use by another broker"):
        broker()
    assert (Path(first.saved.files) / SHA).exists()
    first.store.close(LIMIT_S)
    first.store.close(LIMIT_S)
    assert broker().saved.incarnation == 2


def test_a_store_that_cannot_be_read_is_left_as_it_is(broker: Callable[..., Broker], tmp_path: Path) -> None:
    """The lock is given back, and no file is removed before everything that refers to one is known."""
    first = broker()
    first.send(1)
    first.persist(record(1, result=StoredFile(SHA, 7)))
    first.store.close(LIMIT_S)
    database = sqlite3.connect(tmp_path / "state" / "journal.sqlite3")
    with database:
        data = database.execute("SELECT record FROM jobs").fetchone()[0]
        database.execute("UPDATE jobs SET record = x'00'")
    for _ in range(2):
        with pytest.raises(ConfigError, match="row 1 of jobs, job 'job-1'"):
            broker()
    assert (tmp_path / "state" / "files" / SHA).exists()
    with database:
        database.execute("UPDATE jobs SET record = ?", (data,))
    database.close()
    assert broker().saved.records == (record(1, result=StoredFile(SHA, 7)),)


def test_a_temporary_store_goes_with_its_broker() -> None:
    """One at any free port."""
    store = Store.open(BrokerConfig(), "tcp://127.0.0.1:*", lambda _event: None)
    assert Path(store.saved.files).is_dir()
    store.close(LIMIT_S)
    assert not Path(store.saved.files).parent.exists()


def test_all_that_waits_is_one_transaction(broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk writes one, others gather; the highest ticket is said once, and tickets only rise."""
    one = broker()
    begun, go = threading.Event(), threading.Event()
    batches: list[list[int]] = []
    real = one.store._journal.write

    def write(batch: list[Persist]) -> None:
        batches.append([action.ticket for action in batch])
        begun.set()
        assert go.wait(LIMIT_S)
        real(batch)

    monkeypatch.setattr(one.store._journal, "write", write)
    one.store.perform(Persist(1, record(1), "job-1"))
    assert begun.wait(LIMIT_S)
    for ticket in range(2, 1001):
        one.store.perform(Persist(ticket, record(ticket), f"job-{ticket}"))
    assert one.events.empty()
    go.set()
    assert one.next(Stored).ticket == 1
    assert one.next(Stored).ticket == 1000
    assert batches == [[1], list(range(2, 1001))]
    assert one.events.empty()


def test_a_disk_that_fails_ends_the_acknowledgements(broker: Callable[..., Broker]) -> None:
    """The broker is told once, with the reason; what follows is never said to be durable."""
    one = broker()
    one.persist(record(1))
    one.store._journal._connection.execute("PRAGMA query_only = ON")
    one.store.perform(Persist(2, record(2), "job-2"))
    failed = one.next(StoreFailed)
    assert failed.reason == "OperationalError: attempt to write a readonly database"
    one.store.perform(Persist(3, record(3), "job-3"))
    one.send(1)
    assert one.events.empty()
    one.store.close(LIMIT_S)
    assert one.events.empty()
    assert broker().saved.records == (record(1),)


@pytest.mark.parametrize(("removed", "said"), [("", "journal.sqlite3"), ("files", "files"), ("incoming", "incoming")])
def test_groups_07_nothing_is_acknowledged_once_the_state_folder_is_gone(
    broker: Callable[..., Broker], tmp_path: Path, removed: str, said: str
) -> None:
    """Or a folder in it: the broker is told in a sentence that names what; nothing after that is said to be durable."""
    one = broker()
    one.persist(record(1))
    shutil.rmtree(tmp_path / "state" / removed)
    one.store.perform(Persist(2, record(2), "job-2"))
    path = tmp_path / "state" / said
    reason = f"{str(path)!r} is gone while the broker runs (No such file or directory)"
    assert one.next(StoreFailed).reason == reason
    one.store.perform(Persist(3, record(3), "job-3"))
    one.store.close(LIMIT_S)
    assert one.events.empty()


@pytest.mark.parametrize("why", ["full", "locked"])
def test_a_disk_that_is_full_or_locked_is_waited_for(
    broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It is said once that nothing can be written, and once that it can be again; all is durable then, in order."""
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    monkeypatch.setattr(journal_module, "BUSY_S", 0.01)
    one = broker()
    one.persist(record(1))
    pages = one.store._journal._connection.execute("PRAGMA page_count").fetchone()[0]
    other = sqlite3.connect(tmp_path / "state" / "journal.sqlite3", isolation_level=None)
    if why == "full":
        one.store._journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    else:
        other.execute("BEGIN IMMEDIATE")
    one.store.perform(Persist(2, record(2, parameters={"prompt": "x" * 100_000}), "job-2"))
    stalled = one.next(StoreStalled)
    assert why in stalled.reason
    one.store.perform(Persist(3, record(3), "job-3"))
    one.send(1)
    assert one.events.empty()
    if why == "full":
        one.store._journal._connection.execute("PRAGMA max_page_count = 1000000")
    else:
        other.execute("ROLLBACK")
    other.close()
    assert one.next(StoreStalled).reason == ""
    assert one.next(Stored).ticket == 2
    assert one.next(Stored).ticket == 3
    one.store.close(LIMIT_S)
    assert [each.job for each in broker().saved.records] == ["job-1", "job-2", "job-3"]


def test_a_broker_stops_while_its_disk_is_full(broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be written in time is left undone."""
    monkeypatch.setattr(store_module, "RETRY_S", 60.0)
    one = broker()
    one.persist(record(1))
    threads = one.store._threads
    one.store._journal._connection.execute("PRAGMA max_page_count = 1")
    one.store.perform(Persist(2, record(2, parameters={"prompt": "x" * 100_000}), "job-2"))
    one.next(StoreStalled)
    one.store.close(0.01)
    assert not any(thread.is_alive() for thread in threads)
    assert [each.job for each in broker().saved.records] == ["job-1"]


def test_a_thread_for_files_that_breaks_is_said(broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours isn't hidden behind a broker that answers nothing any more."""
    one = broker()
    monkeypatch.setattr(one.store._files, "_roots", None)
    one.store.perform(CheckOutput(1, "/a.mp4", ".mp4"))
    assert one.next(StoreFailed).reason.startswith("AttributeError: ")


def test_nothing_that_is_handed_in_blocks_or_is_done_here(broker: Callable[..., Broker], tmp_path: Path) -> None:
    """A journal that somebody has locked by hand makes neither the caller nor the files wait."""
    one = broker()
    other = sqlite3.connect(tmp_path / "state" / "journal.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    one.store.perform(Persist(1, record(1), "job-1"))
    one.send(1)
    assert one.events.empty()
    other.execute("ROLLBACK")
    other.close()
    assert one.next(Stored).ticket == 1
    assert threading.get_ident() not in one.threads


def test_files_go_their_whole_way(broker: Callable[..., Broker], tmp_path: Path) -> None:
    """In by a path, looked into, read in parts, out to a path, and removed; answers come in the order of what is asked."""
    media = tmp_path / "media"
    media.mkdir()
    with VideoWriter(media / "a.mp4", 25) as writer:
        writer.write(np.zeros((3, 16, 32, 3), np.uint8))
    one = broker(media_roots=(str(media),))
    one.store.perform(ImportFile(1, str(media / "a.mp4"), 1 << 20))
    done = one.next(FileDone)
    assert (done.ticket, done.failure) == (1, None)
    one.store.perform(InspectFile(2, done.sha256, MediaInput("video", "video")))
    looked = one.next(FileDone)
    assert (looked.ticket, looked.failure) == (2, None)
    one.store.perform(ReadPart(3, done.sha256, 0))
    assert one.next(PartRead).data == (media / "a.mp4").read_bytes()
    for action in (CheckOutput(4, str(media / "b.mp4"), ".mp4"), ExportFile(5, done.sha256, str(media / "b.mp4"))):
        one.store.perform(action)
        assert one.next(FileDone).failure is None
    assert (media / "b.mp4").read_bytes() == (media / "a.mp4").read_bytes()
    one.store.perform(RemoveFile(done.sha256))
    one.store.perform(ReadPart(6, done.sha256, 0))
    assert one.next(PartRead).data == b""
    one.store.perform(ImportFile(7, str(tmp_path / "state" / "journal.sqlite3"), 1 << 20))
    assert one.next(FileDone).failure is not None


def test_what_is_short_does_not_wait_for_what_takes_long(broker: Callable[..., Broker], tmp_path: Path) -> None:
    """A part is read while a large file is copied; the copy goes on nevertheless."""
    large = tmp_path / "large"
    large.write_bytes(os.urandom(1 << 20) * 48)
    one = broker(media_roots=(str(tmp_path),))
    one.send(1)
    one.store.perform(ImportFile(2, str(large), 1 << 30))
    one.store.perform(ReadPart(3, SHA, 0))
    assert one.next(PartRead).data == CONTENT
    assert one.next(FileDone).nbytes == 48 << 20


def test_what_was_handed_in_is_done_before_the_end(broker: Callable[..., Broker], tmp_path: Path) -> None:
    """Records, parts and copies; no thread and no process is left."""
    (tmp_path / "a").write_bytes(CONTENT * 1_000_000)
    one = broker(media_roots=(str(tmp_path),))
    threads = one.store._threads
    for ticket in range(1, 501):
        one.store.perform(Persist(ticket, record(ticket), f"job-{ticket}"))
    one.store.perform(ImportFile(1, str(tmp_path / "a"), 1 << 30))
    one.store.perform(ExportFile(2, hashlib.sha256(CONTENT * 1_000_000).hexdigest(), str(tmp_path / "b")))
    one.store.close(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert len(broker().saved.records) == 500


def test_a_broker_that_has_no_time_leaves_work_undone(
    broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that takes too long is given up; nothing of it is left, and the folder can be had again."""
    source = tmp_path / "endless"
    with source.open("wb") as file:
        file.truncate(1 << 40)
    one = broker(media_roots=(str(tmp_path),))
    monkeypatch.setattr(one.store._files, "_check_room", lambda _nbytes: None)
    one.store.perform(ImportFile(1, str(source), 1 << 44))
    one.store.perform(ReadPart(2, SHA, 0))
    one.next(PartRead)
    one.store.close(0.01)
    assert one.events.empty()
    assert broker().saved.incarnation == 2
    assert list((tmp_path / "state" / "incoming").iterdir()) == []
