"""A worker's attachment to the broker: how it greets, is welcomed, lost, greets again, and how the process ends. Pure.

::

    idle --Started--> greeting --Welcome--> attached
                       ^   |                   |
                       |   `-- too long: Stop  |
                       `--- silence, Rejected, Goodbye: what hung on it is given up

While greeting nothing but hellos is sent, each over a new connection, which leaves whatever waited on the old one
behind: so nothing can be said under a number that is no longer ours. Who would lose more than a start by giving
up, such as a job that has begun, greets on.

`core.WorkerCore` adds the stages, `rank.RankCore` what a rank does that leads nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Literal

from reelwire import versions, wire
from reelwire.messages import Draining, Goodbye, Heartbeat, Rejected, ToWorker, Welcome, WorkerHello

from .actions import AbandonMemory, Connect, Log, Ready, Send, SetLimits, Stop
from .config import WorkerConfig
from .events import Malformed, OutboxFull, Received, ShutdownRequested, Started, Tick
from .group_events import AnyAction

HELLO_RETRY_S = 3.0
"""Silence after a hello before the next one."""
HELLO_BACKOFF_MAX_S = 32.0
"""Longest pause before a hello of a worker that was rejected again and again (two processes of one name, say)."""
HELLO_STEADY_S = 30.0
"""An attachment that held so long ends the backoff."""

State = Literal["idle", "greeting", "attached", "stopped"]


class Attachment(ABC):
    """One worker process towards its broker.

    Args:
        config: its settings.
        version: version of reelwire.

    Attributes:
        config: its settings.
        counters: what was dropped or went wrong, by reason.
        limits: what is accepted from the broker, as the hello says.
    """

    def __init__(self, config: WorkerConfig, version: str) -> None:
        """Start with no connection."""
        self.config = config
        self.counters: Counter[str] = Counter()
        self.limits = wire.Limits(frame_bytes_max=config.frame_bytes_max)
        self._version = version
        self._state: State = "idle"
        self._attachment = 0
        self._began = False
        self._ready = False
        self._name = config.name
        self._heartbeat_s, self._missed = 1.0, 3
        self._hello_at = self._give_up_at = self._beat_at = self._silent_at = self._attached_at = 0.0
        self._rejections = 0
        self._refusal = ""
        self._incarnation = 0
        self._drain_until: float | None = None
        self._was_asked = False  # to stop, itself: whoever leads a group drains when another rank was asked, too

    @property
    def wake_at(self) -> float | None:
        """When time itself is the next event."""
        if self._state in ("idle", "stopped"):
            return None
        times = [self._hello_at, self._give_up_at] if self._state == "greeting" else [self._beat_at, self._silent_at]
        return min(time for time in (*times, self._due_at(), self._drain_until) if time is not None)

    @abstractmethod
    def _hello(self) -> WorkerHello:
        """What is said first."""

    @abstractmethod
    def _begin(self) -> list[AnyAction]:
        """The first broker has welcomed this worker: begin to load."""

    @abstractmethod
    def _joined(self) -> list[AnyAction]:
        """A broker has welcomed this worker: tell it what there is."""

    @abstractmethod
    def _heard(self, message: ToWorker, now: float) -> list[AnyAction]:
        """The broker says something that isn't about the attachment."""

    @abstractmethod
    def _abandon(self, now: float) -> list[AnyAction]:
        """The attachment is lost: give up what hung on it."""

    @abstractmethod
    def _drain(self) -> list[AnyAction]:
        """Take nothing new from here on."""

    @abstractmethod
    def _drained(self) -> list[AnyAction]:
        """Leave, if that was asked for and nothing is left to wait for."""

    @abstractmethod
    def _overdue(self) -> list[AnyAction]:
        """The drain has taken as long as it may: leave."""

    @abstractmethod
    def _is_loading(self) -> bool:
        """Whether it may be silent for long."""

    @abstractmethod
    def _waits_for(self) -> str:
        """What would be lost if it gave up waiting for a broker; empty: nothing that another start doesn't make good."""

    @abstractmethod
    def _due_at(self) -> float | None:
        """When `_due` is called, if there is such a time."""

    @abstractmethod
    def _due(self, now: float) -> list[AnyAction]:
        """That time has come."""

    def _handle_attachment(
        self, event: Started | Received | Malformed | OutboxFull | Tick | ShutdownRequested
    ) -> list[AnyAction]:
        match event:
            case Started():
                assert self._state == "idle", "a worker starts once"
                self._give_up_at = event.now + self.config.connect_timeout_s
                return self._greet(event.now)
            case Received():
                return self._received(event)
            case Malformed():
                return self._malformed(event)
            case OutboxFull():
                return self._lose(event.now, "the broker takes nothing")
            case Tick():
                return self._tick(event)
            case ShutdownRequested():
                return self._asked_to_stop(event.now)

    def _greet(self, now: float) -> list[AnyAction]:
        """Say hello over a new connection."""
        self._state, self._attachment = "greeting", 0
        self._hello_at = now + HELLO_RETRY_S
        return [Connect(), Send(0, self._hello())]

    def _received(self, event: Received) -> list[AnyAction]:
        message, attachment, now = event.message, event.attachment, event.now
        if isinstance(message, Welcome):
            return self._welcomed(message, attachment, now)
        if isinstance(message, Rejected) and attachment in (0, self._attachment):
            return self._rejected(message, now)
        if self._state != "attached" or attachment != self._attachment:
            self.counters["foreign_attachment"] += 1
            dropped = {"reason": "foreign_attachment", "message": type(message).__name__}
            return [Log("debug", "message_dropped", dropped)]
        self._silent_at = max(self._silent_at, now + self._missed * self._heartbeat_s)
        match message:
            case Heartbeat():
                self._silent_at = max(self._silent_at, now + message.busy_for_s)
                return []
            case Goodbye():
                reason = f"the broker left: {message.reason}" if message.reason else "the broker left"
                return self._lose(now, reason)
            case Rejected():
                return []
            case _:
                return self._heard(message, now)

    def _welcomed(self, message: Welcome, attachment: int, now: float) -> list[AnyAction]:
        if self._state != "greeting" and attachment <= self._attachment:
            self.counters["foreign_attachment"] += 1
            return []
        if not versions.fit(message.version, self._version):
            return self._stop(3, f"the broker has version {message.version}, this worker has {self._version}")
        if attachment < 1 or message.heartbeat_s <= 0 or message.missed < 1:
            self.counters["malformed"] += 1
            return [Log("warning", "message_dropped", {"reason": "malformed", "message": "Welcome"})]
        if self._drain_until is not None:  # whom it waited for is gone with the attachment before
            return self._stop(0, "stopped as asked for")
        actions: list[AnyAction] = []
        if self._state == "attached":
            actions += [AbandonMemory(), *self._abandon(now)]
        self._state, self._attachment, self._name = "attached", attachment, message.name
        self._heartbeat_s, self._missed = message.heartbeat_s, message.missed
        self._attached_at, self._refusal = now, ""
        if message.incarnation != self._incarnation:  # it was another broker that didn't know us any more
            self._incarnation, self._rejections = message.incarnation, 0
        self._silent_at = now + self._missed * self._heartbeat_s
        actions.append(SetLimits(wire.Limits.of(message.limits)))
        actions.append(Log("info", "attached", {"name": message.name, "broker_version": message.version}))
        actions += self._beat(now)
        if not self._began:
            # After the first heartbeat has said how long it may take: an import can hold the interpreter for seconds.
            self._began = True
            actions += self._begin()
        return [*actions, *self._joined()]

    def _rejected(self, message: Rejected, now: float) -> list[AnyAction]:
        match message.code:
            case "version":
                return self._stop(3, message.message)
            case "conflict":
                return self._stop(2, message.message)
            case "unknown_peer" | "malformed" if self._state == "greeting":
                if message.code == "malformed":
                    self._refusal = message.message
                return []  # said about something from before the hello; if not, what is said last tells why it never ended
            case "limit" if self._state == "greeting":
                self._hello_at, self._refusal = now + self._backoff(now), message.message
                return [Log("warning", "rejected", {"code": message.code, "reason": message.message})]
            case _:
                return self._lose(now, f"the broker rejected this worker: {message.message}", rejected=True)

    def _malformed(self, event: Malformed) -> list[AnyAction]:
        if event.code == "version":
            return self._stop(3, event.reason)
        self.counters["malformed"] += 1
        return [Log("warning", "message_dropped", {"reason": "malformed", "detail": event.reason})]

    def _lose(self, now: float, reason: str, *, rejected: bool = False) -> list[AnyAction]:
        """The attachment is over: give up all that hung on it, and say hello again."""
        if self._state != "attached":
            return []
        if self._drain_until is not None:
            return self._stop(0, "stopped while the broker was away")
        actions: list[AnyAction] = [Log("warning", "attachment_lost", {"reason": reason}), AbandonMemory()]
        actions += self._abandon(now)
        if not self.config.reconnect:
            return [*actions, *self._stop(3, reason)]
        self._give_up_at = now + self.config.connect_timeout_s
        hello = self._greet(now)
        pause = self._backoff(now) if rejected else 0.0
        if not pause:
            return [*actions, *hello]
        self._hello_at = now + pause
        self._give_up_at += pause
        return actions

    def _backoff(self, now: float) -> float:
        """Pause before the next hello: none the first time, then doubling from one second."""
        if self._attached_at and now - self._attached_at >= HELLO_STEADY_S:
            self._rejections = 0
        self._rejections += 1
        return 0.0 if self._rejections == 1 else min(2.0 ** (self._rejections - 2), HELLO_BACKOFF_MAX_S)

    def _tick(self, event: Tick) -> list[AnyAction]:
        now, due_at = event.now, self._due_at()
        if self._drain_until is not None and now >= self._drain_until:
            return self._overdue()
        if due_at is not None and now >= due_at:
            return self._due(now)
        if self._state == "greeting":
            if now >= self._give_up_at and (kept := self._waits_for()):
                self._give_up_at = now + self.config.connect_timeout_s
                return [Log("warning", "broker_away", {"broker": self.config.broker, "waits_for": kept})]
            if now >= self._give_up_at:
                limit, refusal = f"for {self.config.connect_timeout_s:g} s", self._refusal
                reason = f"the broker hasn't taken this worker {limit}; it said last: {refusal}"
                return self._stop(3, reason if refusal else f"no broker answers at {self.config.broker} {limit}")
            return self._greet(now) if now >= self._hello_at else []
        if self._state == "attached" and now >= self._silent_at and event.drained:
            silence = self._missed * self._heartbeat_s
            return self._lose(now, f"nothing was heard from the broker for {silence:g} s")
        if self._state == "attached" and now >= self._beat_at:
            return self._beat(now)
        return []

    def _beat(self, now: float) -> list[AnyAction]:
        self._beat_at = now + self._heartbeat_s
        return [Send(self._attachment, Heartbeat(self.config.busy_for_s if self._is_loading() else 0.0))]

    def _is_ready(self, what: str) -> list[AnyAction]:
        """Say once that everything is loaded."""
        if self._ready or self._state != "attached":
            return []
        self._ready = True
        return [Ready(self._name), Log("info", "ready", {"stages": what})]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _asked_to_stop(self, now: float) -> list[AnyAction]:
        if self._was_asked:
            return self._leave(1, "stopped at once, as asked for twice")
        self._was_asked = True
        return [] if self._drain_until is not None else self._shut_down(now)

    def _shut_down(self, now: float) -> list[AnyAction]:
        draining = self._drain()
        if self._state != "attached":
            return [*draining, *self._leave(0, "stopped as asked for")]
        self._drain_until = now + self.config.drain_s
        said = Log("info", "draining", {"limit_s": self.config.drain_s})
        return [*draining, *(self._drained() or [Send(self._attachment, Draining()), said])]

    def _leave(self, code: int, reason: str) -> list[AnyAction]:
        goodbye: list[AnyAction] = [Send(self._attachment, Goodbye(reason))] if self._state == "attached" else []
        return [*goodbye, *self._stop(code, reason)]

    def _stop(self, code: int, reason: str) -> list[AnyAction]:
        self._state, self._attachment = "stopped", 0
        return [
            Log("info" if code == 0 else "error", "stopped", {"reason": reason, "exit_code": code}),
            Stop(code, reason),
        ]
