"""A journal and a store of files as the broker's core sees them: what was asked of them is done when the test says so."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

from reelwire.broker import actions as a
from reelwire.broker.events import FileDone, PartRead, PartStored
from reelwire.broker.job_record import JobRecord, Saved
from reelwire.job_parts import FILE_PART_BYTES, parts_of
from reelwire.messages import Failure


def sha256(data: bytes) -> str:
    """What a file of these bytes is called."""
    return hashlib.sha256(data).hexdigest()


def referred(records: Any) -> set[str]:
    """Files that records refer to."""
    found = set()
    for record in records:
        found |= {stored.file for files in record.media.values() for stored in files}
        found |= {stored.file for stored in (record.checkpoint, record.result) if stored is not None}
    return found


class Disk:
    """What is durable, and what was asked for and isn't done yet.

    Attributes:
        records: the journal.
        files: the store.
        outside: files of the broker's host that requests may name, and results that were written there.
        unwritten: what is to be written into the journal.
        errands: what the store is to do.
        is_full: no file can be written.
        fails: why an action of the store fails; empty: it doesn't.
    """

    def __init__(self) -> None:
        self.incarnation = 1
        self.records: dict[str, JobRecord] = {}
        self.files: dict[str, bytes] = {}
        self.outside: dict[str, bytes] = {}
        self.unwritten: deque[a.Persist] = deque()
        self.errands: deque[a.FileAction] = deque()
        self.fails: Callable[[a.FileAction], str] = lambda _action: ""
        self.is_full = False
        self.last = 0
        self._incoming: dict[int, tuple[bytearray, str, int]] = {}

    def saved(self) -> Saved:
        """What the next broker finds."""
        return Saved(self.incarnation, tuple(sorted(self.records.values(), key=lambda each: each.number)), "/files")

    def crash(self, written: int = 0) -> None:
        """Lose what wasn't written, but for so many; what no record refers to is removed when the next broker begins."""
        for _ in range(min(written, len(self.unwritten))):
            self.write_one()
        self.unwritten.clear()
        self.errands.clear()
        self._incoming.clear()
        wanted = referred(self.records.values())
        assert wanted <= set(self.files), "a record refers to a file that isn't there"
        self.files = {file: data for file, data in self.files.items() if file in wanted}
        self.incarnation += 1
        self.last = 0

    def write_one(self) -> int:
        """Make the next record durable; its ticket."""
        action = self.unwritten.popleft()
        assert action.ticket == self.last + 1, "tickets of the journal rise by one"
        self.last = action.ticket
        if action.record is None:
            del self.records[action.job]
        else:
            assert action.record.job == action.job
            others = [each for each in self.records.values() if each.key == action.record.key]
            assert not others or others[0].job == action.job, "two jobs under one key"
            self.records[action.job] = action.record
        return action.ticket

    def do_one(self, now: float) -> Any:
        """Do the next errand; the event that comes of it, or None."""
        action = self.errands.popleft()
        reason = self.fails(action)
        if isinstance(action, a.RemoveFile):
            self.files.pop(action.file, None)
            assert action.file not in referred(self.records.values()), "a file is removed that a record refers to"
            return None
        if isinstance(action, a.DropFile):
            self._incoming.pop(action.ticket, None)
            return None
        if reason and isinstance(action, a.ReadPart):
            return PartRead(now, action.ticket, b"", reason)
        if self.is_full and isinstance(action, a.ReceiveFile | a.AppendPart | a.ImportFile):
            known = self._incoming.pop(action.ticket, None)
            gone = isinstance(action, a.AppendPart) and known is None
            return None if gone else FileDone(now, action.ticket, Failure("overload", "no space left on device"))
        if reason:
            self._incoming.pop(action.ticket, None)
            return FileDone(now, action.ticket, Failure("request", reason))
        return self._do(action, now)

    def _do(self, action: Any, now: float) -> Any:
        match action:
            case a.ReceiveFile():
                self._incoming[action.ticket] = (bytearray(), action.sha256, action.nbytes)
                return None if action.nbytes else self._complete(action.ticket, now)
            case a.AppendPart():
                if action.ticket not in self._incoming:
                    return None  # it has failed
                data, _, nbytes = self._incoming[action.ticket]
                assert len(data) == action.index * FILE_PART_BYTES, "parts come in order"
                data += bytes(action.data)
                assert len(data) <= nbytes, "more bytes than there are"
                if len(data) < nbytes:
                    return PartStored(now, action.ticket, action.index + 1)
                return self._complete(action.ticket, now)
            case a.ImportFile():
                found = self.outside.get(action.path)
                if found is None:
                    return FileDone(now, action.ticket, Failure("request", f"{action.path} isn't there"))
                if len(found) > action.nbytes_max:
                    return FileDone(now, action.ticket, Failure("request", f"has {len(found)} bytes"))
                return self._keep(action.ticket, found, now)
            case a.InspectFile():
                data_ = self.files[action.file]
                if not data_.startswith(action.wanted.kind.encode()):
                    return FileDone(now, action.ticket, Failure("request", f"is no {action.wanted.kind}"))
                return FileDone(now, action.ticket)
            case a.CheckOutput():
                is_right = action.path.startswith("/out/") and action.path.endswith(action.suffix)
                is_right = is_right and action.path not in self.outside
                return FileDone(now, action.ticket, None if is_right else Failure("request", "can't be written"))
            case a.ExportFile():
                data_ = self.files[action.file]
                if self.outside.setdefault(action.path, data_) != data_:
                    return FileDone(now, action.ticket, Failure("request", "another file is there already"))
                return FileDone(now, action.ticket)
            case a.ReadPart():
                data_ = self.files.get(action.file, b"")
                part = data_[action.index * FILE_PART_BYTES : (action.index + 1) * FILE_PART_BYTES]
                assert action.index < max(parts_of(len(data_)), 1), "a part that isn't there"
                return PartRead(now, action.ticket, part, "" if part else "it isn't there")
            case _:
                assert_never(action)

    def _complete(self, ticket: int, now: float) -> FileDone:
        data, file, _ = self._incoming.pop(ticket)
        if sha256(bytes(data)) != file:
            return FileDone(now, ticket, Failure("request", "has another hash than was said"))
        return self._keep(ticket, bytes(data), now)

    def _keep(self, ticket: int, data: bytes, now: float) -> FileDone:
        self.files[sha256(data)] = data
        return FileDone(now, ticket, sha256=sha256(data), nbytes=len(data))
