"""Workers' stage actors as the broker sees them: who lives there, what was sent there, and who is next."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from reelwire.messages import StageOffer
from reelwire.wire import Limits

from .peers import Peer
from .turns import Turns

if TYPE_CHECKING:
    from .groups import Group

Errand = Literal["initialize", "release"]


class Tenant(Protocol):
    """A session that lives at actors."""

    id: str

    def run_next(self, stage: str) -> None:
        """Send the session's next task at `stage` to its actor, which has room for it."""
        ...


@dataclass(slots=True, eq=False)
class Actor:
    """One stage actor of one worker.

    Attributes:
        worker: the peer that has it.
        offer: pipeline, stage, slots, bytes and mailbox, as the worker announced them.
        is_ready: it has its weights.
        session_bytes: what a session is expected to take, until it says what it took.
        tenants: session id to the bytes that it takes.
        bytes_used: their sum.
        tasks: session id to how many tasks were sent for it and aren't over; those of a session end in order.
        outstanding: their sum; one running and `mailbox` waiting, and those that were sent ahead and have arrived.
        ahead: session id to how many tasks were sent for it that await what another stage of the worker makes; they
            aren't among `tasks` until that is made.
        awaiting: their sum.
        errands: how many initializations and releases were sent and aren't answered.
        answered_at: since when its next word is waited for: its last one, or the first that was sent after a pause.
        looked_at_by: when it is looked at whether it hangs, in seconds; no later than it would count as hung.
        refuses: it had no room lately, although it should have had.
        failure: why its weights couldn't be loaded.
        waiting: sessions whose next task could run, with the media time of its chunk.
        group: the group whose ranks compute the stage together; None: the worker does it alone.
    """

    worker: Peer
    offer: StageOffer
    is_ready: bool = False
    session_bytes: int = 0
    tenants: dict[str, int] = field(default_factory=dict)
    bytes_used: int = 0
    tasks: dict[str, int] = field(default_factory=dict)
    outstanding: int = 0
    ahead: dict[str, int] = field(default_factory=dict)
    awaiting: int = 0
    errands: Counter[Errand] = field(default_factory=lambda: Counter({"initialize": 0, "release": 0}))
    answered_at: float = 0.0
    looked_at_by: float = math.inf
    refuses: bool = False
    failure: str = ""
    waiting: Turns[Tenant] = field(default_factory=Turns)
    group: Group | None = None

    @property
    def readers(self) -> tuple[Peer, ...]:
        """All who read the inputs of its tasks."""
        return (self.worker,) if self.group is None else tuple(self.group.ranks.values())

    @property
    def limits(self) -> Limits:
        """What all who are sent its tasks accept."""
        return self.worker.limits if self.group is None else self.group.limits()

    @property
    def has_room(self) -> bool:
        """Whether one more task may be sent."""
        return self.outstanding <= self.offer.mailbox

    @property
    def has_room_ahead(self) -> bool:
        """Whether one more task may be sent ahead: only where nobody waits, and within what the mailbox takes.

        Tasks that await something keep no room from others, so an actor never stands still for what is yet to be made.
        """
        return not self.waiting and 0 < self.offer.mailbox >= self.outstanding + self.awaiting

    @property
    def is_idle(self) -> bool:
        """Whether no word is waited for."""
        return not self.outstanding and not self.has_errands

    @property
    def has_errands(self) -> bool:
        """Whether an initialization or a release isn't answered."""
        return self.errands["initialize"] > 0 or self.errands["release"] > 0

    @property
    def fits_one_more(self) -> bool:
        """Whether another session can live here."""
        return (
            self.is_ready
            and not self.refuses
            and not self.worker.draining
            and not self.worker.mute
            and (self.group is None or self.group.is_open)
            and len(self.tenants) < self.offer.slots
            and self.bytes_used + self.session_bytes <= self.offer.cache_bytes_max
        )

    def admit(self, session: str) -> None:
        """Keep a slot, and the bytes that a session is expected to take."""
        assert session not in self.tenants, f"{session} lives at {self.offer.stage} already"
        self.tenants[session] = 0
        self.resize(session, self.session_bytes)

    def resize(self, session: str, nbytes: int) -> None:
        """Note what a session really takes."""
        self.bytes_used += nbytes - self.tenants[session]
        self.tenants[session] = nbytes

    def evict(self, session: str) -> None:
        """Give the slot back, with everything that was sent there for the session and isn't over."""
        self.bytes_used -= self.tenants.pop(session)
        self.waiting.forget(session)
        self.outstanding -= self.tasks.pop(session, 0)
        self.awaiting -= self.ahead.pop(session, 0)

    def send(self, session: str, now: float) -> None:
        """Note a task that is sent to the actor."""
        assert self.has_room, f"{self.offer.stage}: more tasks than its mailbox takes"
        self._add(session, now)

    def send_ahead(self, session: str) -> None:
        """Note a task that is sent to the actor and awaits what is yet to be made."""
        assert self.has_room_ahead, f"{self.offer.stage}: more tasks ahead than its mailbox takes"
        self.ahead[session] = self.ahead.get(session, 0) + 1
        self.awaiting += 1

    def arrive(self, session: str, now: float) -> None:
        """Note that what the oldest task of a session awaited is made."""
        _count_down(self.ahead, session)
        self.awaiting -= 1
        self._add(session, now)

    def strike(self, session: str) -> None:
        """Note that the oldest task of a session is over."""
        _count_down(self.tasks, session)
        self.outstanding -= 1

    def _add(self, session: str, now: float) -> None:
        self.begin(now)
        self.tasks[session] = self.tasks.get(session, 0) + 1
        self.outstanding += 1

    def send_errand(self, errand: Errand, now: float) -> None:
        """Note an initialization or a release that is sent to the actor."""
        self.begin(now)
        self.errands[errand] += 1

    def begin(self, now: float) -> None:
        """Wait for a word from now on, unless one is waited for already."""
        if self.is_idle:
            self.answered_at = now

    def silent_limit_s(self, initialize_s: float, task_s: float, release_s: float) -> float | None:
        """How long the actor may say nothing, in seconds; None when nothing is waited for.

        It is the longest time that anything it was sent may take: which of them it is at isn't known here, and whoever
        waits behind a slow neighbour must not take it for hung.
        """
        limit_s = task_s if self.outstanding else 0.0
        if self.errands["initialize"]:
            limit_s = max(limit_s, initialize_s)
        if self.errands["release"]:
            limit_s = max(limit_s, release_s)
        return limit_s or None  # there is no setting of 0 s

    def pump(self) -> None:
        """Send tasks, by turns, as long as there is room."""
        waiting, most = self.waiting, self.offer.mailbox
        while self.outstanding <= most and waiting:
            waiting.take().run_next(self.offer.stage)

    def check(self) -> None:
        """Assert the invariants."""
        most = 1 + self.offer.mailbox  # and as many again that were sent ahead
        assert self.outstanding + self.awaiting <= 2 * most, f"{self.offer.stage}: too many tasks"
        assert self.outstanding == sum(self.tasks.values()), f"{self.offer.stage}: tasks don't add up"
        assert self.awaiting == sum(self.ahead.values()), f"{self.offer.stage}: tasks that were sent ahead don't add up"
        counts = (*self.tasks.values(), *self.ahead.values())
        assert all(count > 0 for count in counts), f"{self.offer.stage}: no task is counted"
        assert len(self.tenants) <= self.offer.slots, f"{self.offer.stage}: too many sessions"
        assert self.bytes_used == sum(self.tenants.values()), f"{self.offer.stage}: bytes don't add up"
        assert set(self.errands) == {"initialize", "release"}, f"{self.offer.stage}: an errand of another kind"
        assert all(count >= 0 for count in self.errands.values()), f"{self.offer.stage}: more answers than errands"
        assert all(session in self.tenants for session in (*self.tasks, *self.ahead)), (
            f"{self.offer.stage}: task of a stranger"
        )
        self.waiting.check(self.tenants)
        assert not (self.waiting and self.has_room), f"{self.offer.stage}: room, and nobody is sent"


def _count_down(counts: dict[str, int], session: str) -> None:
    """One less for a session; none is no entry."""
    left = counts[session] - 1
    if left:
        counts[session] = left
    else:
        del counts[session]
