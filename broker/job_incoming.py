"""Files that come in parts: uploads of clients, checkpoints and results of workers.

Who sends may send the parts below a grant, which is a few parts ahead of what is written; each once, in order, in full. A
part that is anything else ends it, and so does a sender that owes parts and says nothing for `stall_s`. A worker's part that
isn't the next one is passed over: when its file is asked for again, parts of the time before may still be on their way. What
clients may have on its way is bounded for each and for all, as it is in memory until it is written; they take turns at that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from reelwire.job_parts import FILE_PART_BYTES, parts_of
from reelwire.messages import Failure
from reelwire.tensors import Inline, TensorRef

from .actions import AppendPart, ReceiveFile
from .desk import Desk
from .events import FileDone, PartStored
from .job_files import FileEvent, Holder, StoreIndex
from .peers import Peer
from .timers import Timers

WINDOW_PARTS = 4
"""Parts of a file that may be on their way, or not written yet."""
UPLOAD_PARTS_PER_CLIENT_MAX = 16
UPLOAD_PARTS_MAX = 256
"""The same of all uploads, of one client and of all: a client that doesn't send what it may holds up no others."""


@dataclass(slots=True, eq=False)
class Taker:
    """Somebody who waits for a file: told once, of why it doesn't come, or None when it has come and is held for it."""

    receiving: Receiving
    done: Callable[[Failure | None], None]


@dataclass(slots=True, eq=False)
class Receiving:
    """A file on its way.

    Attributes:
        peer: who sends it.
        name: what they call it.
        file: its SHA-256.
        nbytes: its size.
        by: as what it is held when it is there.
        grant: tells the sender which parts may come: from one that wasn't granted before, below another one.
        takers: who waits for it.
        ticket: of the store.
        next: the part that comes next.
        granted: parts below it may come.
        written: parts below it are in the store.
    """

    peer: Peer
    name: str
    file: str
    nbytes: int
    by: Holder
    grant: Callable[[int, int], None]
    takers: list[Taker] = field(default_factory=list)
    ticket: int = 0
    next: int = 0
    granted: int = 0
    written: int = 0

    @property
    def parts(self) -> int:
        """In how many parts it comes."""
        return parts_of(self.nbytes)

    @property
    def window(self) -> int:
        """Parts below it may be granted."""
        return min(self.written + WINDOW_PARTS, self.parts)


class Incoming:
    """All files that are on their way into the store.

    Args:
        desk: settings and time.
        store: the files of the store, and what is asked of it.
    """

    def __init__(self, desk: Desk, store: StoreIndex) -> None:
        """Start with none."""
        self._desk = desk
        self._store = store
        self._coming: dict[tuple[Peer, str], Receiving] = {}
        self._by_ticket: dict[int, Receiving] = {}
        self._stalls: Timers[int] = Timers()
        self._wanting: dict[Peer, dict[int, Receiving]] = {}
        self._given: Counter[Peer] = Counter()
        self._given_total = 0

    def __len__(self) -> int:
        return len(self._coming)

    def __contains__(self, at: tuple[Peer, str]) -> bool:
        return at in self._coming

    def begin(
        self,
        at: tuple[Peer, str],
        what: tuple[str, int],
        by: Holder,
        grant: Callable[[int, int], None],
        done: Callable[[Failure | None], None],
    ) -> Taker:
        """Take a file in.

        Args:
            at: who sends it, and what they call it; what comes already under that name is waited for.
            what: its SHA-256 and its size in bytes.
            by: as what it is held when it is there.
            grant: tells the sender which parts may come: from one that wasn't granted before, below another one.
            done: told once, at a later event.

        Returns:
            What `drop` takes.
        """
        receiving = self._coming.get(at)
        if receiving is None:
            receiving = self._coming[at] = Receiving(*at, *what, by, grant)
            self._store.expect(receiving.file, receiving.nbytes)
            receiving.ticket = self._store.ask(lambda ticket: ReceiveFile(ticket, what[1], what[0]), self._answered)
            self._by_ticket[receiving.ticket] = receiving
            self._grant(receiving, written=0)
        taker = Taker(receiving, done)
        receiving.takers.append(taker)
        return taker

    def part(self, peer: Peer, name: str, index: int, data: TensorRef) -> bool:
        """Take a part in; False when nobody waits for it."""
        receiving = self._coming.get((peer, name))
        if receiving is None:
            return False
        if receiving.by == "job" and not receiving.next == index < receiving.granted:
            return False
        reason = _objection(receiving, index, data)
        if reason:
            self.lost(peer, name, reason)
        elif isinstance(data.place, Inline):
            receiving.next += 1
            self._desk.act(AppendPart(receiving.ticket, index, data.place.buffer))
            self._watch(receiving)
        return True

    def lost(self, peer: Peer, name: str, reason: str) -> bool:
        """A file doesn't come after all; False when nobody waits for it."""
        receiving = self._coming.get((peer, name))
        if receiving is None:
            return False
        self._end(receiving, Failure("request", reason))
        return True

    def end(self, taker: Taker, failure: Failure) -> None:
        """A file isn't wanted after all: all who wait for it are told why."""
        self._end(taker.receiving, failure)

    def drop(self, taker: Taker) -> None:
        """Somebody waits for a file no more; nothing of it is kept when nobody does."""
        receiving = taker.receiving
        receiving.takers.remove(taker)
        if not receiving.takers:
            self._end(receiving, None)

    @property
    def next_at(self) -> float | None:
        """When somebody will have been silent for too long, in seconds."""
        return self._stalls.next_at

    def due(self, now: float) -> None:
        """Give up what is owed for too long."""
        while (ticket := self._stalls.pop_due(now)) is not None:
            receiving = self._by_ticket[ticket]
            if receiving.next < receiving.granted:
                reason = f"part {receiving.next} of {receiving.parts} didn't come for {self._desk.config.stall_s:g} s"
                self._end(receiving, Failure("timeout", reason))

    def check(self) -> Counter[str]:
        """Assert the invariants; how often each file is coming."""
        self._stalls.check()
        assert len(self._by_ticket) == len(self._coming), "a file under no name, or under two"
        for (peer, name), receiving in self._coming.items():
            assert (receiving.peer, receiving.name) == (peer, name), "a file under another name"
            assert self._by_ticket[receiving.ticket] is receiving, "a file with another ticket"
            assert not peer.gone, "a file of somebody who is gone"
            assert receiving.takers, "a file that nobody waits for"
            assert receiving.next <= receiving.granted <= receiving.parts, "a part that wasn't granted"
            owed = receiving.next < receiving.granted
            assert not owed or receiving.ticket in self._stalls, "a sender may be silent for ever"
        given: Counter[Peer] = Counter()
        for receiving in self._coming.values():
            if receiving.by == "upload":
                given[receiving.peer] += receiving.granted - receiving.written
                is_wanting = receiving.ticket in self._wanting.get(receiving.peer, {})
                assert is_wanting == (receiving.granted < receiving.window), (
                    "an upload's turn never comes, or for nothing"
                )
        assert +given == self._given, "parts of uploads don't add up"
        assert all(self._given.values()), "a client that is given nothing"
        assert self._given_total == given.total() <= UPLOAD_PARTS_MAX, "too many parts of uploads"
        assert max(given.values(), default=0) <= UPLOAD_PARTS_PER_CLIENT_MAX, "too many parts of one client"
        assert all(self._wanting.values()), "a client's turn comes for nothing"
        return Counter(receiving.file for receiving in self._coming.values())

    def _answered(self, event: FileEvent) -> None:
        receiving = self._by_ticket[event.ticket]
        if isinstance(event, PartStored):
            self._grant(receiving, written=event.parts)
        elif isinstance(event, FileDone):
            failure = event.failure
            if failure is None and (event.sha256, event.nbytes) != (receiving.file, receiving.nbytes):
                failure = Failure("request", "is another file than was announced")
            self._end(receiving, failure, is_done=True)

    def _grant(self, receiving: Receiving, written: int) -> None:
        freed, receiving.written = written - receiving.written, written
        if receiving.by == "job":
            self._allow(receiving, receiving.window)
            return
        self._give(receiving.peer, -freed)
        if receiving.granted < receiving.window:
            self._wanting.setdefault(receiving.peer, {})[receiving.ticket] = receiving
        self._share()

    def _share(self) -> None:
        """Grant what clients want, in turns, as far as the bounds allow."""
        while self._given_total < UPLOAD_PARTS_MAX:
            # Few can be passed over: those that have all that one may have.
            peer = next((each for each in self._wanting if self._given[each] < UPLOAD_PARTS_PER_CLIENT_MAX), None)
            if peer is None:
                break
            wanting = self._wanting.pop(peer)
            ticket = next(iter(wanting))
            receiving = wanting.pop(ticket)
            left = min(UPLOAD_PARTS_PER_CLIENT_MAX - self._given[peer], UPLOAD_PARTS_MAX - self._given_total)
            below = min(receiving.window, receiving.granted + left)
            self._give(peer, below - receiving.granted)
            if below < receiving.window:
                wanting[ticket] = receiving
            if wanting:
                self._wanting[peer] = wanting
            self._allow(receiving, below)

    def _give(self, peer: Peer, parts: int) -> None:
        self._given_total += parts
        self._given[peer] += parts
        if not self._given[peer]:
            del self._given[peer]

    def _allow(self, receiving: Receiving, granted: int) -> None:
        if granted > receiving.granted:
            before, receiving.granted = receiving.granted, granted
            receiving.grant(before, granted)
            self._watch(receiving)

    def _watch(self, receiving: Receiving) -> None:
        if receiving.next < receiving.granted:
            self._stalls.set(receiving.ticket, self._desk.now + self._desk.config.stall_s)
        else:
            self._stalls.drop(receiving.ticket)

    def _end(self, receiving: Receiving, failure: Failure | None, *, is_done: bool = False) -> None:
        """Tell all who wait, unless they have given up; `is_done`: the store has it, or has dropped it by itself."""
        del self._coming[receiving.peer, receiving.name]
        del self._by_ticket[receiving.ticket]
        self._stalls.drop(receiving.ticket)
        if receiving.by == "upload":
            self._give(receiving.peer, receiving.written - receiving.granted)
            wanting = self._wanting.get(receiving.peer, {})
            if wanting.pop(receiving.ticket, None) is not None and not wanting:
                del self._wanting[receiving.peer]
            self._share()
        if not is_done:
            self._store.drop(receiving.ticket)
        takers, receiving.takers = receiving.takers, []
        if failure is None:
            for _ in takers:
                self._store.hold(receiving.file, receiving.nbytes, receiving.by)
        self._store.came(receiving.file, receiving.nbytes)
        for taker in takers:
            taker.done(failure)


def _objection(receiving: Receiving, index: int, data: TensorRef) -> str:
    """Why a part isn't taken; empty when it is."""
    if index != receiving.next:
        return f"part {index} came in place of part {receiving.next}"
    if index >= receiving.granted:
        return f"part {index} came; granted: parts below {receiving.granted}"
    if data.dtype != "uint8" or len(data.shape) != 1 or not isinstance(data.place, Inline):
        return f"part {index} isn't bytes inside of the message"
    wanted = min(FILE_PART_BYTES, receiving.nbytes - index * FILE_PART_BYTES)
    if data.nbytes != wanted:
        return f"part {index} has {data.nbytes} bytes instead of {wanted}"
    return ""
