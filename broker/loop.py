"""The one thread that holds the broker's socket and its clock. It decides nothing.

It sleeps in one poll until a message or a signal arrives or the core wants to be woken; nothing here is looked at by
turns.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
import zmq

import reelwire
from reelwire import wire
from reelwire.errors import ConfigError, VersionMismatch, WireError
from reelwire.messages import FromBroker, Heartbeat, Message, OpenSession, SubmitJob, WorkerHello
from reelwire.wake import Wake

from .actions import Action, FileAction, Forget, Log, Persist, Send, Stop
from .config import BrokerConfig
from .core import BrokerCore
from .endpoint import IN_USE, claimed
from .events import Event, Malformed, OutboxFull, Received, ShutdownRequested, TurnEnded, Unreachable
from .outbox import Outboxes, Sent, Tracker
from .store import Store

SEND_QUEUE_MESSAGES_MAX = 256
"""Messages that the socket itself keeps per connection; what doesn't fit waits in our own, bounded, outbox."""
FOLLOWED_BYTES_MIN = 64 << 10
"""Messages of this size and more are followed until their bytes have left; of smaller ones the socket keeps few bytes."""

WITH_ENTROPY = (OpenSession, SubmitJob, WorkerHello)
"""Messages of which something is made that nobody may guess."""


def run(config: BrokerConfig, on_ready: Callable[[str], None]) -> int:
    """Serve until asked to stop; on the main thread, SIGTERM and SIGINT ask, and a second one ends it now.

    Args:
        config: the settings.
        on_ready: called once with the endpoint that clients and workers connect to.

    Returns:
        The exit code: 0, or 1 when the state folder can't be written any more.

    Raises:
        ConfigError: the endpoint can't be bound, may not be, or another broker has it or the state folder.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(config.listen, insecure=config.insecure))
        loop = stack.enter_context(contextlib.closing(Loop(config)))
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(loop.wake.signals())
        wire.prepare(wire.TO_BROKER, FromBroker)  # or the first chunks would pay for it
        # What is here now stays: let the collector of cycles not walk over it while a chunk waits.
        gc.collect()
        gc.freeze()
        on_ready(loop.endpoint)
        return loop.serve()


class Loop:
    """A bound socket and the core behind it.

    Args:
        config: the settings; the endpoint is claimed.

    Attributes:
        endpoint: where to connect to.
        wake: asks for the end, from any thread.

    Raises:
        ConfigError: the endpoint can't be bound.
    """

    def __init__(self, config: BrokerConfig) -> None:
        """Bind."""
        self._config = config
        self._happened: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._limits = config.wire_limits()
        self._log = structlog.get_logger()
        self._lines: list[Log] = []
        self._context = zmq.Context()
        # Whoever connects meanwhile waits: nothing is read before the journal was. So a port in use is called that.
        self._socket = _bound(self._context, config)
        try:
            self._store = Store.open(config, config.listen, self._post)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._core = BrokerCore(
            config, reelwire.__version__, saved=self._store.saved, wall_s=time.time() - time.monotonic()
        )
        self.wake = Wake()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.wake.fileno(), zmq.POLLIN)
        self._outboxes = Outboxes(self._try_send, config.outbox_bytes_max, config.outbox_messages_max)
        self._batches: dict[bytes, wire.Batch] = {}
        self._workers: set[bytes] = set()
        self._pending: deque[Event] = deque()
        self._serving = True
        self._failure = ""
        self._awake_at = time.monotonic()
        self._backlog_until = 0.0
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self) -> int:
        """Turn after turn, until the core stops; the exit code."""
        try:
            while self._serving:
                self._turn()
        finally:
            self._write_lines()
        return 1 if self._failure else 0

    def _post(self, event: Event) -> None:
        """Take an event of the store, on one of its threads."""
        self._happened.put(event)
        self.wake.set()

    def _turn(self) -> None:
        if self._wait():
            for _ in range(self.wake.clear()):
                self._handle(ShutdownRequested(time.monotonic()))
            while not self._happened.empty():
                self._core.take(self._happened.get_nowait())
        drained = self._receive()
        for route in self._outboxes.retry(self._outboxes.blocked):
            self._handle(Unreachable(time.monotonic(), route))
            drained = False  # its last words may have come since
        self._end_turn(drained=drained)
        self._write_lines()

    def _write_lines(self) -> None:
        """Write to the log when all that the turn has to say has left: to write one line takes longer than to serve a chunk."""
        lines, self._lines = self._lines, []
        for line in lines:
            getattr(self._log, line.level)(line.event, **line.fields)

    def close(self) -> None:
        """Let the last messages leave, within `linger_s`, and close everything."""
        self._socket.close(linger=int(self._config.linger_s * 1000))
        self._context.term()
        self._store.close(self._config.linger_s)
        self.wake.close()

    def _wait(self) -> bool:
        """Sleep until there is something to do; whether that is, among others, what a signal asks for."""
        wake_at = self._core.wake_at
        if wake_at is not None:
            wake_at = max(wake_at, self._backlog_until)
        # Up to the next millisecond: rounded down, it would spin until the deadline.
        timeout_ms = None if wake_at is None else int(max(0.0, wake_at - time.monotonic()) * 1000) + 1
        ready = dict(self._poller.poll(timeout_ms))
        now = time.monotonic()
        if now > max(self._awake_at, wake_at or now) + self._config.heartbeat_s:
            # This process stood still, the thread that fills the socket's queue with it: what peers said meanwhile needs
            # a moment to get here, and until then nobody may be called silent.
            self._backlog_until = now + self._config.heartbeat_s
        self._awake_at = now
        return self.wake.fileno() in ready

    def _receive(self) -> bool:
        """Hand in what has arrived, up to a bound; whether that was all. What it leads to is said when the turn ends."""
        left = self._config.turn_messages_max
        while left > 0:
            try:
                route = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            now = time.monotonic()
            try:
                envelope = wire.decode(self._frames(), wire.TO_BROKER, self._limits)
            except VersionMismatch as error:
                self._core.take(Malformed(now, route, "version", str(error)))
                left -= 1
            except WireError as error:
                self._core.take(Malformed(now, route, "malformed", str(error)))
                left -= 1
            else:
                for message, nbytes in zip(envelope.messages, envelope.sizes, strict=True):
                    entropy = os.urandom(16) if isinstance(message, WITH_ENTROPY) else b""
                    self._core.take(Received(now, route, envelope.attachment, message, nbytes, entropy))
                left -= sum(map(_weight, envelope.messages))
        return False

    def _frames(self) -> list[wire.Buffer]:
        """The rest of the message of which the route was read: the header copied, tensors as ZeroMQ has them."""
        part = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames: list[wire.Buffer] = [part.bytes]
        while part.more:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(part.buffer)
        return frames

    def _end_turn(self, *, drained: bool) -> None:
        """Send what the turn has said, and say what follows from what couldn't be sent, until nothing does."""
        self._say(self._core.settle())
        self._flush()
        while True:
            self._handle_pending()
            now = time.monotonic()
            self._handle(TurnEnded(now, drained and now >= self._backlog_until))
            self._flush()
            if not self._pending:
                return
            drained = False  # the last words of whoever couldn't be told may have come since

    def _flush(self) -> None:
        """Send what waits for others of this turn; workers' tasks first."""
        batches, self._batches = self._batches, {}
        for route in self._workers:
            if (batch := batches.pop(route, None)) is not None:
                self._send(route, batch)
        self._workers.clear()
        for route, batch in batches.items():
            self._send(route, batch)

    def _handle(self, event: Event) -> None:
        """Hand an event in, and what follows from what can't be sent meanwhile."""
        self._do(event)
        self._handle_pending()

    def _handle_pending(self) -> None:
        while self._pending:
            self._do(self._pending.popleft())

    def _do(self, event: Event) -> None:
        self._say(self._core.handle(event))

    def _say(self, actions: Iterable[Action]) -> None:
        """Let messages leave with the others of this turn to the same peer, as far as they are small; do the rest at once."""
        batches = self._batches
        for action in actions:
            if not isinstance(action, Send):
                self._perform(action)
                continue
            packed = action.packed or wire.pack(action.message)
            batch = batches.get(action.route)
            if action.is_work:
                self._workers.add(action.route)
            if batch is None or not batch.add(action.attachment, packed):
                batches[action.route] = wire.Batch(action.attachment, packed, action.limits)
                if batch is not None:
                    self._send(action.route, batch)

    def _perform(self, action: Forget | Log | Stop | Persist | FileAction) -> None:
        match action:
            case Forget(route=route):
                self._batches.pop(route, None)
                self._outboxes.forget(route)
            case Log():
                self._lines.append(action)
            case Stop():
                self._serving, self._failure = False, action.failure
            case _:
                self._store.perform(action)

    def _send(self, route: bytes, batch: wire.Batch) -> None:
        # What a stranger is told is told now or never: nothing waits for somebody who isn't attached.
        sent = self._outboxes.send(route, batch.frames(), may_wait=batch.attachment > 0)
        if sent != "ok":
            failed = Unreachable if sent == "unreachable" else OutboxFull
            self._pending.append(failed(time.monotonic(), route))

    def _try_send(self, route: bytes, frames: Sequence[wire.Buffer], size: int) -> tuple[Sent, Tracker | None]:
        send, tracker = self._socket.send, None
        parts: list[Any] = list(frames)
        if is_large := size >= FOLLOWED_BYTES_MIN:
            parts = [zmq.Frame(frame, track=True, copy=False) for frame in frames]
            tracker = zmq.MessageTracker(*(part.tracker for part in parts))
        last = parts.pop()
        try:
            send(route, zmq.SNDMORE | zmq.NOBLOCK)
            for part in parts:
                send(part, zmq.SNDMORE | zmq.NOBLOCK, copy=not is_large)
            send(last, zmq.NOBLOCK, copy=not is_large)
        except zmq.Again:
            return "blocked", None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "unreachable", None
        return "sent", tracker


def _weight(message: Message) -> int:
    """As how many messages one counts: a heartbeat says as much as its acks would."""
    return 1 + len(message.acks) if type(message) is Heartbeat else 1


def _bound(context: zmq.Context[zmq.Socket[bytes]], config: BrokerConfig) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.router_mandatory = True
    socket.sndhwm = SEND_QUEUE_MESSAGES_MAX
    # Of one frame; a larger one is never taken into memory, and costs its sender the connection.
    socket.maxmsgsize = config.wire_limits().part_bytes_max
    socket.ipv6 = "[" in config.listen
    try:
        socket.bind(config.listen)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        reason = IN_USE if error.errno == zmq.EADDRINUSE else f"can't be bound ({error.strerror})"
        raise ConfigError("listen", f"{config.listen!r} {reason}") from error
    return socket
