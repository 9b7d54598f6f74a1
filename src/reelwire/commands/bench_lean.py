"""Peers that do nothing but speak: three workers with a no-op stage each, and clients that hold a key and count chunks.

They keep to the protocol (hello, ready, initialize, tasks, late binding, credits, acknowledgements, heartbeats, release)
over real sockets, and to nothing else: no core, no checks, what comes often is msgpack that is read and written in place,
and one thread has all sockets. So what a chunk costs beside them is the broker's. A no-op begins and ends in one turn, so
there is no `TaskStarted` (see there), and what a turn says to the broker leaves together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgpack

from .. import messages as m
from .. import wire
from ..controls import KeyState
from ..errors import ReelwireError

if TYPE_CHECKING:
    import zmq

    from ..spec import StreamSpec

SLOTS = 1 << 16
BYTES_MAX = 1 << 62
MAILBOX = 8
WINDOW = 2
"""Chunks that a client takes beyond those that it has acknowledged."""
RECEIVES_PER_TURN_MAX = 64
LIMIT_S = 60.0
GOODBYE_MS = 1000
HELD = KeyState(1, ("w",))

_unpack: Callable[[bytes], Any] = msgpack.unpackb
_pack: Callable[[Any], bytes] = msgpack.Packer().pack


class Peer(ABC):
    """One connection.

    Args:
        context: of the socket.
        endpoint: where the broker listens.
        hello: the first message.

    Attributes:
        socket: a DEALER.
        attached: the broker has answered.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, hello: m.ClientHello | m.WorkerHello
    ) -> None:
        """Connect and say hello."""
        import zmq

        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.attached = False
        self.beat_at = time.monotonic()
        self.out: list[str | bytes] = []
        self._noblock, self._again = int(zmq.NOBLOCK), zmq.Again
        self._attachment = 0
        self._heartbeat_s = 1.0
        self.say(hello)

    def say(self, message: m.Message) -> None:
        """Let a message leave with the next flush."""
        packed = wire.pack(message)
        self.out += (packed.name, packed.body)

    def flush(self, flags: int = 0) -> None:
        """Send what was said since the last one, as many messages together as may be."""
        if self.out:
            most = 2 * wire.TOGETHER_MAX
            for at in range(0, len(self.out), most):
                self.socket.send(_pack([wire.MAGIC, wire.PROTOCOL, self._attachment, self.out[at : at + most]]), flags)
            self.out = []

    def receive(self) -> None:
        """Take in what is there, up to a bound."""
        for _ in range(RECEIVES_PER_TURN_MAX):
            try:
                (header,) = self.socket.recv_multipart(self._noblock)
            except self._again:
                return
            _, _, attachment, entries = _unpack(header)
            for at in range(0, len(entries), 2):
                name, body = entries[at], _unpack(entries[at + 1])
                if name == "Welcome":
                    self._attachment, self._heartbeat_s, self.attached = attachment, body[2], True
                    self.welcomed()
                elif name == "Rejected":
                    raise ReelwireError(f"the broker rejects a peer of the benchmark: {body[1]}")
                elif name != "Heartbeat":
                    self.hear(name, body)

    def beat(self, now: float) -> None:
        """Say that it is there, once in each interval."""
        if self.attached and now >= self.beat_at:
            self.say(self.sign_of_life())
            self.beat_at = now + self._heartbeat_s

    def sign_of_life(self) -> m.Heartbeat:
        """What is said in each interval."""
        return m.Heartbeat()

    def leave(self) -> None:
        """Say goodbye, behind whatever was said already, unless the connection takes no more."""
        self.say(m.Goodbye())
        with suppress(self._again):
            self.flush(self._noblock)

    @abstractmethod
    def welcomed(self) -> None:
        """The broker has answered the hello."""

    @abstractmethod
    def hear(self, name: str, body: list[Any]) -> None:
        """Take in one message, as the list of its fields."""


class LeanWorker(Peer):
    """A worker with one stage, which makes empty artifacts.

    Attributes:
        held: sessions that live there.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, spec: StreamSpec, stage: str) -> None:
        """Offer the stage."""
        self._pipeline, self._stage = spec.name, stage
        self._outputs: dict[str, list[Any]] = {artifact: [{}, {}] for artifact in spec.stage(stage).produces}
        self._keys: dict[str, list[Any]] = {}
        self.held: set[str] = set()
        offer = m.StageOffer(spec.name, stage, SLOTS, BYTES_MAX, MAILBOX)
        super().__init__(context, endpoint, m.WorkerHello(_version(), f"lean-{stage}", "none", (spec,), (offer,)))

    def welcomed(self) -> None:
        """There are no weights to be loaded."""
        self.say(m.StageReady(self._pipeline, self._stage, 0))

    def hear(self, name: str, body: list[Any]) -> None:
        """Do at once what is asked for."""
        if name == "RunTask":
            session, _, stage, epoch, stage_epoch, index, _, _, _, reservation = body[:10]
            applied = None if reservation is None else self._bound(session, reservation)
            done = [session, stage, epoch, stage_epoch, index, self._outputs, {}, 0.0, applied, False]
            self.out += ("TaskDone", _pack(done))
        elif name == "SetStageKeys":
            self._keys[body[0]] = body[5]
        elif name == "InitializeStage":
            session, _, stage, epoch, stage_epoch = body[:5]
            self.held.add(session)
            self.say(m.StageInitialized(session, stage, epoch, stage_epoch, m.Artifact(), 0))
        elif name == "ReleaseStage":
            session, _, stage, epoch, stage_epoch = body
            self.held.discard(session)
            self._keys.pop(session, None)
            self.say(m.StageReleased(session, stage, epoch, stage_epoch))

    def _bound(self, session: str, reservation: list[Any]) -> list[Any]:
        """What a reservation is bound to: the keys that are held, since nobody taps."""
        _, keys, tap_revision, pose_revision = reservation
        newer = self._keys.get(session, keys)
        revision, held = max(keys, newer)[:2]
        source = "held" if held else "still"
        return [source, [{"keys": held, "reset_pose": False}, {}], revision, tap_revision, pose_revision]


class LeanClient(Peer):
    """A client that holds a key in all its sessions and acknowledges every chunk at once.

    Attributes:
        chunks: chunks that arrived, in all sessions.
        ready: sessions that are being made.
        ended: sessions that are over.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> None:
        """Say hello."""
        self.chunks = 0
        self.ready: set[str] = set()
        self.ended = 0
        self._taken: dict[str, int] = {}
        super().__init__(context, endpoint, m.ClientHello(_version(), name))

    def welcomed(self) -> None:
        """Nothing is asked for yet."""

    def open(self, spec: StreamSpec, sessions: int) -> None:
        """Ask for sessions that never come to their end."""
        self.chunks, self.ended = 0, 0
        self.ready.clear()
        self._taken.clear()
        for number in range(sessions):
            self.say(m.OpenSession(f"{time.monotonic_ns()}-{number}", spec.name, spec.chunks_max, credit=_credit(0)))

    def press(self) -> None:
        """Hold a key in all sessions from now on."""
        for session in self.ready:
            self.say(m.SetKeys(session, HELD))

    def end(self) -> None:
        """Give all sessions up."""
        for session in self._taken:
            self.say(m.EndSession(session, "cancel"))

    def hear(self, name: str, body: list[Any]) -> None:
        """Count a chunk and ask for the next; whatever ends a session is an error until the end was asked for."""
        if name == "Chunk":
            session, index = body[:2]
            if index != self._taken[session]:
                raise ReelwireError(f"chunk {index} of {session} came in place of {self._taken[session]}")
            self.chunks += 1
            self._taken[session] = taken = index + 1
            self.out += ("Ack", _pack([session, taken, [taken + WINDOW, BYTES_MAX]]))
        elif name == "SessionOpened":
            self._taken[body[1]] = 0
        elif name == "SessionChanged" and body[1] in ("ready", "running"):
            self.ready.add(body[0])
        elif name == "SessionRefused":
            raise ReelwireError(f"the broker refuses a session of the benchmark: {body[1][1]}")
        elif name == "SessionEnded":
            if body[1] != "cancelled":
                raise ReelwireError(f"a session of the benchmark has ended: {body[1:]}")
            self.ended += 1
            del self._taken[body[0]]

    def sign_of_life(self) -> m.Heartbeat:
        """It repeats where all sessions stand."""
        return m.Heartbeat(0.0, tuple(m.Ack(session, taken, _credit(taken)) for session, taken in self._taken.items()))


class LeanPeers:
    """Three workers and some clients, in one thread.

    Args:
        context: of the sockets.
        endpoint: where the broker listens.
        spec: a dataflow of three stages.
        clients: how many.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, spec: StreamSpec, clients: int) -> None:
        """Attach all."""
        import zmq

        self._spec = spec
        self._workers = [LeanWorker(context, endpoint, spec, stage.name) for stage in spec.stages]
        self._clients = [LeanClient(context, endpoint, f"lean-{number}") for number in range(clients)]
        self._peers = {peer.socket: peer for peer in (*self._workers, *self._clients)}
        self._poller = zmq.Poller()
        for socket in self._peers:
            self._poller.register(socket, zmq.POLLIN)
        self.run_until(lambda: all(peer.attached for peer in self._peers.values()), "be attached")

    @property
    def chunks(self) -> int:
        """Chunks that arrived in the sessions that are there."""
        return sum(client.chunks for client in self._clients)

    def open(self, sessions: int) -> None:
        """Have so many sessions, and a key held in each, until each has delivered some chunks."""
        share, more = divmod(sessions, len(self._clients))
        for number, client in enumerate(self._clients):
            client.open(self._spec, share + (number < more))
        self.run_until(lambda: sum(len(client.ready) for client in self._clients) == sessions, "open the sessions")
        for client in self._clients:
            client.press()
        self.run_until(lambda: self.chunks >= 8 * sessions, "make the first chunks")

    def run_for(self, seconds: float) -> tuple[float, int]:
        """Let chunks be made; how long that took, in seconds, and how many arrived."""
        began, before = time.monotonic(), self.chunks
        self.run_until(lambda: time.monotonic() >= began + seconds, "pass the time")
        return time.monotonic() - began, self.chunks - before

    def end(self, sessions: int) -> None:
        """Give all sessions up, and wait until nothing of them is left."""
        for client in self._clients:
            client.end()
        self.run_until(
            lambda: (
                sum(client.ended for client in self._clients) == sessions
                and not any(worker.held for worker in self._workers)
            ),
            "end the sessions",
        )

    def run_until(self, over: Callable[[], bool], what: str) -> None:
        """Take turns.

        Raises:
            ReelwireError: it isn't over in time, or the broker has refused something.
        """
        until = time.monotonic() + LIMIT_S
        while not over():
            now = time.monotonic()
            if now > until:
                raise ReelwireError(f"the peers of the benchmark couldn't {what} within {LIMIT_S:g} s")
            for peer in self._peers.values():
                peer.beat(now)
                peer.flush()
            for socket, _ in self._poller.poll(20):
                self._peers[socket].receive()

    def close(self) -> None:
        """Say goodbye, so that nobody is waited for, and close the sockets."""
        for peer in (*self._clients, *self._workers):
            if peer.attached:
                peer.leave()
            peer.socket.close(linger=GOODBYE_MS)


def _credit(taken: int) -> m.Credit:
    return m.Credit(taken + WINDOW, BYTES_MAX)


def _version() -> str:
    from .. import __version__

    return __version__
