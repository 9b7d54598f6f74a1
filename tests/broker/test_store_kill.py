"""A broker's store whose process is killed at any moment: what it acknowledged is there, and nothing is half there."""

from __future__ import annotations

import hashlib
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from reelwire.broker.config import BrokerConfig
from reelwire.broker.events import Event
from reelwire.broker.store import Store
from reelwire.job_parts import FILE_PART_BYTES

KILLS = 20
LIMIT_S = 20.0
PROGRAM = """
import os, queue, sys, hashlib
from reelwire.broker.actions import *
from reelwire.broker.config import BrokerConfig
from reelwire.broker.events import *
from reelwire.broker.job_record import JobRecord, StoredFile
from reelwire.broker.store import Store
from reelwire.job_parts import FILE_PART_BYTES

events = queue.SimpleQueue()
store = Store.open(BrokerConfig(state_dir=sys.argv[1]), "tcp://127.0.0.1:7461", events.put)
life = store.saved.incarnation
owed = {}
jobs = {}
ticket = 0

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def begin(number):
    content = os.urandom(FILE_PART_BYTES + 999) if number % 5 == 0 else os.urandom(999)
    sha = hashlib.sha256(content).hexdigest()
    store.perform(ReceiveFile(number, len(content), sha))
    for index in range(-(-len(content) // FILE_PART_BYTES)):
        store.perform(AppendPart(number, index, content[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]))

say("life", life)
number = 4
for first in range(1, number + 1):
    begin(first)
while True:
    match events.get():
        case FileDone(ticket=came, sha256=sha, nbytes=nbytes):
            job = f"{life}-{came}"
            ticket += 1
            record = JobRecord(job, life * 1_000_000 + came, job, "app", "v2v", result=StoredFile(sha, nbytes))
            owed[ticket] = ("put", job, sha)
            jobs[job] = record
            store.perform(Persist(ticket, record, job))
            if came % 3 == 0:
                gone = next(iter(jobs))
                ticket += 1
                owed[ticket] = ("gone", gone, jobs.pop(gone).result.file)
                say("leaves", gone)
                store.perform(Persist(ticket, None, gone))
            number += 1
            begin(number)
        case Stored(ticket=until):
            for each in [each for each in owed if each <= until]:
                what, job, sha = owed.pop(each)
                say(what, job, sha)
                if what == "gone":
                    store.perform(RemoveFile(sha))
        case StoreFailed(reason=reason):
            sys.exit(reason)
"""


class Known:
    """What killed brokers have said."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.gone: set[str] = set()

    def hear(self, line: str) -> None:
        """A whole line of one of them."""
        what, job, *rest = line.split()
        if what == "put":
            self.kept[job] = rest[0]
        elif what == "leaves":
            self.leaving.add(job)
        elif what == "gone":
            self.gone.add(job)

    def check(self, store: Store) -> None:
        """Compare with what the next broker finds."""
        found = {record.job: record for record in store.saved.records}
        assert self.kept.keys() - self.leaving <= found.keys()
        assert not self.gone & found.keys()
        files = {path.name for path in Path(store.saved.files).iterdir()}
        assert store.missing == ()
        assert files == {record.result.file for record in found.values() if record.result}
        for job, record in found.items():
            assert record.result is not None
            assert self.kept.get(job, record.result.file) == record.result.file


def lines(process: subprocess.Popen[bytes], count: int) -> Iterator[str]:
    """So many lines of what it says, and, when it was killed, the others."""
    assert process.stdout is not None
    for number, line in enumerate(process.stdout, 1):
        if line.endswith(b"\n"):
            yield line.decode().strip()
        if number == count:
            process.kill()


def test_groups_07_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Twenty brokers one after the other, each killed while it writes records and files as fast as it can."""
    state = tmp_path / "state"
    known, chance = Known(), random.Random(7)
    lives = 0
    for _ in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(state)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:
            watchdog = threading.Timer(LIMIT_S, process.kill)
            watchdog.start()
            for line in lines(process, chance.randrange(1, 60)):
                known.hear(line)
            watchdog.cancel()
        assert process.returncode == -9
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        store = Store.open(BrokerConfig(state_dir=str(state)), "tcp://127.0.0.1:7461", events.put)
        try:
            known.check(store)
            assert not list((state / "incoming").iterdir())
            for path in Path(store.saved.files).iterdir():
                assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
            lives += 2
            assert store.saved.incarnation == lives
        finally:
            store.close(LIMIT_S)
    assert len(known.kept) > KILLS
    assert known.gone
    assert max(path.stat().st_size for path in (state / "files").iterdir()) > FILE_PART_BYTES
