"""Files that go out in parts: a job's files to the workers that do it, results to clients.

Whoever wants a file says how many parts may come. Parts of one file are read one after the other; all files that one peer
wants take turns, and so do all peers, with bounds on how much is read and not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reelwire.job_parts import FILE_PART_BYTES, parts_of

from .actions import ReadPart
from .events import PartRead
from .job_files import FileEvent, StoreIndex
from .job_record import StoredFile
from .peers import Peer

READS_PER_PEER_MAX = 4
READS_MAX = 32
"""Parts that are read at once, for one peer and for all."""
AHEAD_PARTS_MAX = 8
"""Most parts that may be asked for and not be sent yet: more wouldn't have room on their way."""
HEADER_BYTES_MAX = 1024
"""What a message has beside a part, at most."""
Name = int | str


@dataclass(slots=True, eq=False)
class Sending:
    """A file on its way.

    Attributes:
        file: of the store.
        job: whose it is.
        send: tells the peer a part.
        over: told when the last part was sent, with an empty text, or why the file can't be read.
        next: the part that goes next.
        below: parts below it may go.
        ticket: of the part that is read; 0: none.
    """

    file: StoredFile
    job: str
    send: Callable[[int, bytes], None]
    over: Callable[[str], None]
    next: int = 0
    below: int = 0
    ticket: int = 0

    @property
    def parts(self) -> int:
        """In how many parts it goes."""
        return parts_of(self.file.nbytes)

    @property
    def is_ready(self) -> bool:
        """Whether a part may be read."""
        return not self.ticket and self.next < self.below


@dataclass(slots=True, eq=False)
class _Line:
    """What one peer wants, whose turn is next first, and how many parts are read for it."""

    sendings: dict[Name, Sending] = field(default_factory=dict)
    reads: int = 0

    def take(self) -> Sending | None:
        """The next part's file, which goes to the end of the line."""
        if self.reads >= READS_PER_PEER_MAX:
            return None
        for name, sending in self.sendings.items():
            if sending.is_ready:
                del self.sendings[name]
                self.sendings[name] = sending
                return sending
        return None


class Outgoing:
    """All files that are on their way to somebody.

    Args:
        store: the files of the store, and what is asked of it.
    """

    def __init__(self, store: StoreIndex) -> None:
        """Start with none."""
        self._store = store
        self._lines: dict[Peer, _Line] = {}
        self._turns: dict[Peer, None] = {}
        self._reads: dict[int, tuple[Peer, Name]] = {}

    def find(self, peer: Peer, name: Name) -> Sending | None:
        """What a peer wanted under that name and doesn't have yet."""
        line = self._lines.get(peer)
        return None if line is None else line.sendings.get(name)

    def count(self, peer: Peer) -> int:
        """How many files a peer wants."""
        line = self._lines.get(peer)
        return 0 if line is None else len(line.sendings)

    def begin(self, peer: Peer, name: Name, sending: Sending) -> None:
        """A peer wants a file, from part `sending.next` on; `more` says how far."""
        line = self._lines.setdefault(peer, _Line())
        assert name not in line.sendings, "wanted twice under one name"
        line.sendings[name] = sending

    def more(self, peer: Peer, name: Name, below: int) -> str:
        """Let parts below `below` go; why not, or an empty text."""
        sending = self._lines[peer].sendings[name]
        below = min(below, sending.parts)
        misfit = peer.limits.misfit([HEADER_BYTES_MAX, min(FILE_PART_BYTES, sending.file.nbytes)])
        if misfit is not None:
            return f"a part of it is a {misfit}"
        if below - sending.next > AHEAD_PARTS_MAX:
            return f"{below - sending.next} parts are wanted at once; accepted: {AHEAD_PARTS_MAX}"
        if below > sending.below:
            sending.below = below
            self._turns.setdefault(peer)
            self._read()
        return ""

    def give_up(self, peer: Peer, name: Name) -> None:
        """A peer wants no more of a file, if it still has any to come."""
        if self.find(peer, name) is not None:
            self._end(peer, name)
            self._read()

    def end_all(self, peer: Peer) -> None:
        """A peer is gone."""
        line = self._lines.get(peer)
        for name in list(line.sendings) if line is not None else ():
            self._end(peer, name)
        self._read()

    def end_job(self, job: str, reason: str) -> None:
        """Nobody gets any more of a job's files."""
        found = [
            (peer, name, sending)
            for peer, line in self._lines.items()
            for name, sending in line.sendings.items()
            if sending.job == job
        ]
        for peer, name, sending in found:
            self._end(peer, name)
            sending.over(reason)
        self._read()

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._reads) <= READS_MAX, "too much is read at once"
        for ticket, (peer, name) in self._reads.items():
            assert self._lines[peer].sendings[name].ticket == ticket, "a part is read for nobody"
        waiting = False
        for peer, line in self._lines.items():
            assert not peer.gone, "files go to somebody who is gone"
            assert line.sendings, "a peer that wants nothing"
            assert line.reads == sum(bool(each.ticket) for each in line.sendings.values()), "reads don't add up"
            assert line.reads <= READS_PER_PEER_MAX, "too much is read for one peer"
            for sending in line.sendings.values():
                assert 0 <= sending.next < sending.parts, "a file that was sent is kept"
                assert sending.below <= sending.parts, "more parts than there are"
            if line.reads < READS_PER_PEER_MAX and any(each.is_ready for each in line.sendings.values()):
                assert peer in self._turns, "a peer's turn never comes"
                waiting = True
        assert not waiting or len(self._reads) == READS_MAX, "parts that may go aren't read"

    def _end(self, peer: Peer, name: Name) -> None:
        """A peer gets no more of a file; whoever calls it lets others have their turn."""
        line = self._lines[peer]
        sending = line.sendings.pop(name)
        if sending.ticket:
            del self._reads[sending.ticket]
            line.reads -= 1
        if line.sendings:
            self._turns.setdefault(peer)  # another file of its may have waited for that
        else:
            del self._lines[peer]

    def _read(self) -> None:
        """Read for whoever's turn it is, as much as may be read."""
        while self._turns and len(self._reads) < READS_MAX:
            peer = next(iter(self._turns))
            del self._turns[peer]
            line = self._lines.get(peer)
            sending = None if line is None else line.take()
            if line is None or sending is None:
                continue
            file, index = sending.file.file, sending.next
            sending.ticket = self._store.ask(_reading(file, index), self._was_read)
            self._reads[sending.ticket] = (peer, next(reversed(line.sendings)))
            line.reads += 1
            self._turns[peer] = None

    def _was_read(self, event: FileEvent) -> None:
        assert isinstance(event, PartRead), "a part was read, and something else is said"
        found = self._reads.pop(event.ticket, None)
        if found is not None:
            peer, name = found
            line = self._lines[peer]
            sending = line.sendings[name]
            sending.ticket = 0
            line.reads -= 1
            if event.data:
                sending.send(sending.next, event.data)
                sending.next += 1
            self._turns.setdefault(peer)
            if not event.data or sending.next == sending.parts:
                self._end(peer, name)
                sending.over((event.reason or "it can't be read") if not event.data else "")
        self._read()


def _reading(file: str, index: int) -> Callable[[int], ReadPart]:
    return lambda ticket: ReadPart(ticket, file, index)
