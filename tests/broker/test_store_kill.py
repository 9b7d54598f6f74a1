"""A broker's store whose process is killed at any moment: what it acknowledged is there, and nothing is half there."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reelwire.broker.config import BrokerConfig
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

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def live():
    events = queue.SimpleQueue()
    say("pid", os.getpid())
    store = Store.open(BrokerConfig(state_dir=sys.argv[1]), "tcp://127.0.0.1:7461", events.put)
    life = store.saved.incarnation
    owed = {}
    jobs = {}
    ticket = 0

    def begin(number):
        content = os.urandom(FILE_PART_BYTES + 999) if number % 5 == 0 else os.urandom(999)
        sha = hashlib.sha256(content).hexdigest()
        store.perform(ReceiveFile(number, len(content), sha))
        for index in range(-(-len(content) // FILE_PART_BYTES)):
            store.perform(AppendPart(number, index, content[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]))

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

for _ in sys.stdin:  # each line begins a life; what takes long to import is there by then
    pid = os.fork()
    if not pid:
        live()
    say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


class Known:
    """What killed brokers have said."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.gone: set[str] = set()

    def hear(self, line: str) -> None:
        """A line of one of them."""
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
        assert files == {record.result.file for record in found.values() if record.result}
        for job, record in found.items():
            assert record.result is not None
            assert self.kept.get(job, record.result.file) == record.result.file


def lived(nursery: subprocess.Popen[bytes], known: Known, lines: int) -> None:
    """Let a broker live until it has said so much, and hear all that it has said."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(b"\n")
    nursery.stdin.flush()
    pid = int(nursery.stdout.readline().split()[1])
    for number, line in enumerate(nursery.stdout, 1):
        if line.startswith(b"ended"):
            assert int(line.split()[1]) == -signal.SIGKILL
            return
        known.hear(line.decode())
        if number == lines:
            os.kill(pid, signal.SIGKILL)
    pytest.fail("the process that starts brokers has ended")


def test_groups_07_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Twenty brokers one after the other, each killed while it writes records and files as fast as it can."""
    state = tmp_path / "state"
    known, chance = Known(), random.Random(7)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as nursery:
        for life in range(KILLS):
            lived(nursery, known, chance.randrange(1, 60))
            store = Store.open(BrokerConfig(state_dir=str(state)), "tcp://127.0.0.1:7461", lambda _event: None)
            try:
                known.check(store)
                assert not list((state / "incoming").iterdir())
                for path in Path(store.saved.files).iterdir():
                    assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
                assert store.saved.incarnation == 2 * (life + 1)
            finally:
                store.close(LIMIT_S)
        assert nursery.stdin is not None
        nursery.stdin.close()
    assert nursery.returncode == 0
    assert len(known.kept) > KILLS
    assert known.gone
    assert max(path.stat().st_size for path in (state / "files").iterdir()) > FILE_PART_BYTES
