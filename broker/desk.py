"""What one event leads to: the desk that handlers work at. It collects actions and what is to be looked at again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from reelwire.checks import printable
from reelwire.messages import Failure, FromBroker
from reelwire.spec import StreamSpec
from reelwire.wire import Packed

from .actions import Action, Forget, Level, Log, Send
from .actors import Actor
from .config import BrokerConfig
from .leases import Memory
from .peers import Peer
from .stats import StreamStats
from .timers import Timers
from .transitions import Timer

if TYPE_CHECKING:
    from .groups import Group
    from .making import Making

TimerKey = tuple[Timer | Literal["drain", "retry"], str]
"""What is due, and the session that it is due for; the broker's own drain, and a new look for places, have none."""


STATS_KEPT_MAX = 256
"""Pipelines whose numbers are kept; those that were first asked for are forgotten first."""
TEXT_CHARACTERS_MAX = 500
"""Most of a text of a peer that is repeated, to others or in a line of the log."""


class Desk:
    """Shared by the core and its sessions.

    Attributes:
        config: settings.
        now: time of the event that is handled, in seconds.
        event_id: its running number.
        timers: deadlines of sessions and of the broker itself.
        silences: when it is looked at whether actors hang.
        counters: how often something was refused, dropped or lost, by reason.
        stats: pipeline name to the numbers of all its sessions that have ended.
        unsettled: sessions whose stages may be able to go on.
        stirred: actors that may have room.
        touched: sessions whose keys or pending control may be taken at the end of the turn.
        rekeyed: sessions whose open reservation is to be followed by a newer register at the end of the turn.
        asked: clients that are told of everything at the end of the turn, and the numbers of their questions.
        ended: sessions that ended in this event.
        lost: workers that must be given up, and why.
        unfit: sessions of which something doesn't fit its receiver.
        request_bytes: of all requests that are kept.
        returned: sessions that gave their places back and wait for others.
        refusing: actors that had no room although they should have; asked again after `retry_after_s`.
        freed: somebody who waits for a place may find one.
        memory: what is read of the workers' shared memory.
        formed: groups that were formed in this event.
        parted: groups whose leader isn't attached any more in this event, and may come back, and who that was.
        over: groups that ended in this event, and why.
        is_job_due: a job may find a group.
    """

    def __init__(self, config: BrokerConfig) -> None:
        """Start with a clean desk."""
        self.config = config
        self.now = 0.0
        self.event_id = 0
        self.timers: Timers[TimerKey] = Timers()
        self.silences: Timers[Actor] = Timers()
        self.counters: Counter[str] = Counter()
        self.stats: dict[str, StreamStats] = {}
        self.unsettled: dict[str, Making] = {}
        self.stirred: dict[Actor, None] = {}
        self.touched: dict[str, None] = {}
        self.rekeyed: dict[str, None] = {}
        self.asked: list[tuple[Peer, int]] = []
        self.ended: list[str] = []
        self.lost: dict[Peer, str] = {}
        self.unfit: dict[str, Failure] = {}
        self.request_bytes = 0
        self.returned: list[str] = []
        self.refusing: list[Actor] = []
        self.freed = False
        self.memory = Memory(config.frame_bytes_max)
        self.formed: dict[Group, None] = {}
        self.parted: dict[Group, Peer] = {}
        self.over: dict[Group, str] = {}
        self.is_job_due = False
        self._actions: list[Action] = []

    def begin(self, now: float) -> None:
        """A new event is handled."""
        if now > self.now:
            self.now = now
        self.event_id += 1

    def finish(self) -> list[Action]:
        """What is to be done, in order."""
        actions, self._actions = self._actions, []
        return actions

    def expect_stats(self, spec: StreamSpec) -> None:
        """Keep numbers of a pipeline from now on; one of another dataflow under that name starts anew."""
        names = [stage.name for stage in spec.stages]
        stats = self.stats.get(spec.name)
        if stats is None or list(stats.stages) != names:
            while len(self.stats) >= STATS_KEPT_MAX:
                del self.stats[next(iter(self.stats))]
            self.stats[spec.name] = StreamStats(names)

    def send(self, peer: Peer, message: FromBroker, packed: Packed | None = None) -> None:
        """Tell a peer something, unless that can't be sent; `packed`: the message as it is sent, if that was made already."""
        if not peer.gone and not peer.mute and not peer.dismissed:
            is_work = peer.kind == "worker"
            self._actions.append(Send(peer.route, peer.attachment, message, peer.limits, packed, is_work))

    def answer(self, route: bytes, message: FromBroker) -> None:
        """Tell a connection something that isn't attached."""
        self._actions.append(Send(route, 0, message))

    def forget(self, route: bytes) -> None:
        """Have what waits for a connection dropped."""
        self._actions.append(Forget(route))

    def act(self, action: Action) -> None:
        """Any other action."""
        self._actions.append(action)

    def log(self, level: Level, event: str, **fields: object) -> None:
        """A structured line that carries the number of the event."""
        short = {name: shortened(value) if isinstance(value, str) else value for name, value in fields.items()}
        self._actions.append(Log(level, event, {"event_id": self.event_id, **short}))

    def count(self, counter: str, **fields: object) -> None:
        """Count something that was refused or dropped, and say so at the level of details."""
        self.counters[counter] += 1
        self.log("debug", counter, **fields)

    def send_tasks(self) -> None:
        """Send every task that can be sent."""
        while self.unsettled or self.stirred:
            unsettled, self.unsettled = self.unsettled, {}
            for session in unsettled.values():
                session.offer()
            stirred, self.stirred = self.stirred, {}
            for actor in stirred:
                actor.pump()

    def answered(self, actor: Actor) -> None:
        """An actor said something about what it was sent."""
        actor.answered_at = self.now
        if actor.has_errands:
            self.watch(actor)

    def watch(self, actor: Actor) -> None:
        """Look at an actor no later than it counts as hung, after it was sent something, or answered an errand.

        An answer puts that off, but what was to be looked at earlier stays: `look` finds out.
        """
        hangs_at = self._hangs_at(actor)
        if hangs_at < actor.looked_at_by:
            actor.looked_at_by = hangs_at
            self.silences.set(actor, hangs_at)

    def look(self, actor: Actor) -> bool:
        """Whether an actor that was to be looked at by now hangs; if not, it is looked at again."""
        actor.looked_at_by = math.inf
        if self._hangs_at(actor) <= self.now:
            return True
        self.watch(actor)
        return False

    def _hangs_at(self, actor: Actor) -> float:
        config = self.config
        limit_s = actor.silent_limit_s(config.initialize_timeout_s, config.task_timeout_s, config.close_timeout_s)
        return math.inf if limit_s is None or actor.worker.gone else actor.answered_at + limit_s

    def hung_at(self, actor: Actor) -> float | None:
        """When an actor counts as hung for a session that ends; None when it owes nothing.

        A task that runs while a session ends has only the time that the end has: whoever waits for the end waits no
        longer. An initialization keeps its own, because it loads and compiles.
        """
        config = self.config
        limit_s = actor.silent_limit_s(config.initialize_timeout_s, config.close_timeout_s, config.close_timeout_s)
        return None if limit_s is None else actor.answered_at + limit_s

    def refuses(self, actor: Actor) -> None:
        """An actor had no room for a session that was sent there: place nobody there for a while."""
        if not actor.refuses:
            actor.refuses = True
            self.refusing.append(actor)
        if ("retry", "") not in self.timers:
            self.timers.set(("retry", ""), self.now + self.config.retry_after_s)

    def retry(self) -> None:
        """Ask those that refused again."""
        for actor in self.refusing:
            actor.refuses = False
        self.refusing.clear()
        self.freed = True

    def check(self, actors: Sequence[Actor]) -> None:
        """Assert that all timers are right, and that no actor would hang unseen."""
        self.timers.check()
        self.silences.check()
        assert set(self.silences.all()) <= set(actors), "an actor that is gone is looked at"
        for actor in actors:
            assert (actor in self.silences) == (actor.looked_at_by < math.inf), (
                f"{actor.offer.stage}: looked at, or not"
            )
            assert actor.looked_at_by <= self._hangs_at(actor), f"{actor.offer.stage}: would hang unseen"

    def give_up(self, worker: Peer, reason: str) -> None:
        """Declare a worker lost when this event is done."""
        self.lost.setdefault(worker, reason)


def described(failure: Failure | None) -> dict[str, object]:
    """A failure's fields for a log line."""
    if failure is None:
        return {}
    return {"failure": failure.kind, "reason": failure.message, "stage": failure.stage, "index": failure.index}


def shortened(text: str) -> str:
    """A text that others said, as it is repeated, shown and kept: one line that is cut where it is long, and `printable`."""
    return printable(cut(text))


def cut(text: str) -> str:
    """A name that a peer gave to what it asks for, as that peer is told it again: unchanged but where it is too long."""
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}... ({len(text)} characters)"


def short(failure: Failure) -> Failure:
    """A failure as it is told and kept: what is in it may be a peer's own text, and its numbers nonsense."""
    advice = failure.retry_after_s
    if advice is not None and not (math.isfinite(advice) and advice >= 0):
        advice = None
    message, stage, field = shortened(failure.message), shortened(failure.stage), shortened(failure.field)
    return replace(failure, message=message, stage=stage, field=field, retry_after_s=advice)
