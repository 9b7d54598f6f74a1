"""What one event leads to: the desk that handlers work at. It collects actions and what is to be looked at again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from reelwire.messages import Failure, FromBroker

from .actions import Action, Forget, Level, Log, Send
from .actors import Actor
from .config import BrokerConfig
from .peers import Peer
from .stats import StreamStats
from .timers import Timers
from .transitions import Timer

if TYPE_CHECKING:
    from .making import Making

TimerKey = tuple[Timer | Literal["drain"], str]
"""What is due, and the session that it is due for; the broker's own drain has none."""


class Desk:
    """Shared by the core and its sessions.

    Attributes:
        config: settings.
        now: time of the event that is handled, in seconds.
        event_id: its running number.
        timers: deadlines of sessions and of the broker itself.
        counters: how often something was refused, dropped or lost, by reason.
        stats: pipeline name to the numbers of all its sessions.
        unsettled: sessions whose stages may be able to go on.
        stirred: actors that may have room.
        touched: sessions whose keys or pending control may be taken at the end of the turn.
        ended: sessions that ended in this event.
        lost: workers that must be given up, and why.
        freed: somebody who waits for a place may find one.
    """

    def __init__(self, config: BrokerConfig) -> None:
        """Start with a clean desk."""
        self.config = config
        self.now = 0.0
        self.event_id = 0
        self.timers: Timers[TimerKey] = Timers()
        self.counters: Counter[str] = Counter()
        self.stats: dict[str, StreamStats] = {}
        self.unsettled: dict[str, Making] = {}
        self.stirred: dict[Actor, None] = {}
        self.touched: dict[str, None] = {}
        self.ended: list[str] = []
        self.lost: dict[Peer, str] = {}
        self.freed = False
        self._actions: list[Action] = []

    def begin(self, now: float) -> None:
        """A new event is handled."""
        self.now = max(self.now, now)
        self.event_id += 1

    def finish(self) -> list[Action]:
        """What is to be done, in order."""
        actions, self._actions = self._actions, []
        return actions

    def send(self, peer: Peer, message: FromBroker) -> None:
        """Tell a peer something, unless it is gone."""
        if not peer.gone:
            peer.sent_at = self.now
            self._actions.append(Send(peer.route, peer.attachment, message))

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
        self._actions.append(Log(level, event, {"event_id": self.event_id, **fields}))

    def count(self, counter: str, **fields: object) -> None:
        """Count something that was refused or dropped, and say so at the level of details."""
        self.counters[counter] += 1
        self.log("debug", counter, **fields)

    def settle(self) -> None:
        """Send every task that can be sent."""
        while self.unsettled or self.stirred:
            while self.unsettled:
                self.unsettled.pop(next(iter(self.unsettled))).offer()
            while self.stirred:
                actor = next(iter(self.stirred))
                del self.stirred[actor]
                actor.pump()

    def give_up(self, worker: Peer, reason: str) -> None:
        """Declare a worker lost when this event is done."""
        self.lost.setdefault(worker, reason)


def described(failure: Failure | None) -> dict[str, object]:
    """A failure's fields for a log line."""
    if failure is None:
        return {}
    return {"failure": failure.kind, "reason": failure.message, "stage": failure.stage, "index": failure.index}
