"""The link between the ranks of a group: what they say to each other without the broker, so that the group outlives it.

The leader binds a ROUTER to a port of the system's choice, the others connect a DEALER each. A message travels as those of
the broker do (`wire`); the attachment's number in it is the group's epoch. A rank is known by its hello, which has to
have the secret that the broker gave to all: whatever else comes, from strangers or from other epochs, is counted and
forgotten. The newest hello of a rank wins.

Both ends ask each other whether they are still there, so that a connection which ended without a word, as where a cable was
pulled, is broken and made again. The rank is known then by its route, without another hello; but what was under way on the
old connection, the hello included, is lost, and whoever said it has to say it again.

Like the socket of the broker, a link is used by several threads under the loop's lock, and its descriptor tells only of
changes: whoever has used it asks `readable` before it lets go of the lock.
"""

from __future__ import annotations

import hmac
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence

import zmq

from reelwire import wire
from reelwire.errors import ConfigError, VersionMismatch, WireError
from reelwire.group_messages import RankHello, ToLeader, ToRank

from .rank_processes import address_of

RECEIVES_PER_TURN_MAX = 256
QUEUE_MESSAGES_MAX = 256
"""Messages that wait for one rank, or came from one; a group that works has one or two."""
LIMITS = wire.Limits(frame_bytes_max=16 << 20, header_bytes_max=1 << 20, frames_max=64, message_bytes_max=32 << 20)
"""Of a message over the link: a decision carries a control at most."""
LINGER_MS = 200
HEARTBEAT_MS = 1000
SILENCE_MS = 5000
"""After which a connection is given up; longer than a process that was only stopped for a moment is quiet."""


class Link(ABC):
    """One end of the link.

    Args:
        context: of ZeroMQ.
        kind: of the socket.
        epoch: of the group.

    Attributes:
        dropped: what came and was nothing for us, and what couldn't be sent, counted by reason.
        epoch: of the group.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, epoch: int) -> None:
        """Open the socket."""
        self.epoch = epoch
        self.dropped: Counter[str] = Counter()
        self._told: set[str] = set()
        self._socket: zmq.Socket[bytes] = context.socket(kind)
        self._socket.sndhwm = self._socket.rcvhwm = QUEUE_MESSAGES_MAX
        self._socket.maxmsgsize = LIMITS.part_bytes_max
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self._linger_ms = 0

    @abstractmethod
    def send(self, message: ToRank | ToLeader) -> None:
        """Say something: the leader to all whose hello came, the others to the leader."""

    @abstractmethod
    def receive(self) -> Iterator[tuple[int, ToRank | ToLeader]]:
        """What has come, up to a bound, and from which rank."""

    @property
    def descriptor(self) -> int:
        """Becomes readable when something changes."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def readable(self) -> bool:
        """Whether something is to be received."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))

    def untold(self) -> list[str]:
        """Reasons for which something was dropped for the first time; each is told once."""
        if len(self._told) == len(self.dropped):
            return []
        new = sorted(self.dropped.keys() - self._told)
        self._told.update(new)
        return new

    def close(self) -> None:
        """Close it; what was said last still leaves."""
        self._socket.close(linger=self._linger_ms)

    def _parts(self) -> Iterator[list[bytes]]:
        for _ in range(RECEIVES_PER_TURN_MAX):
            try:
                parts = [self._socket.recv(zmq.NOBLOCK)]
            except zmq.Again:
                return
            while self._socket.getsockopt(zmq.RCVMORE):
                parts.append(self._socket.recv(zmq.NOBLOCK))
            yield parts

    def _put(self, frames: Sequence[wire.Buffer]) -> None:
        self._linger_ms = LINGER_MS
        *others, last = frames
        try:
            for frame in others:  # as `send_multipart` does it, in half of the time
                self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(last, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped["full"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped["unreachable"] += 1

    def _read(self, frames: list[bytes], direction: wire.Direction[wire.M]) -> tuple[wire.M, ...]:
        try:
            envelope = wire.decode(frames, direction, LIMITS)
        except (WireError, VersionMismatch):
            self.dropped["malformed"] += 1
            return ()
        if envelope.attachment != self.epoch:
            self.dropped["epoch"] += 1
            return ()
        return envelope.messages


class LeaderLink(Link):
    """The leader's end.

    Args:
        context: of ZeroMQ.
        host: address or name of this machine by which the other ranks find it.
        secret: what a hello must have.
        epoch: of the group.
        world: how many ranks there are.

    Attributes:
        endpoint: where the others connect to.

    Raises:
        ConfigError: `host` is no address of this machine.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, secret: bytes, epoch: int, world: int
    ) -> None:
        """Bind it."""
        super().__init__(context, zmq.ROUTER, epoch)
        self._secret = secret
        self._world = world
        self._routes: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a rank whose connection broke comes back under its old route
        address = address_of(host)
        self._socket.ipv6 = ":" in address
        shown = f"[{address}]" if ":" in address else address
        try:
            self._socket.bind(f"tcp://{shown}:*")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            reason = f"{host!r} can't be bound ({error.strerror}); accepted: an address of this machine"
            raise ConfigError("group_host", reason) from error
        port = self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.endpoint = f"tcp://{shown}:{port}"

    def send(self, message: ToRank | ToLeader) -> None:
        """To all ranks whose hello has come."""
        frames = wire.encode(message, self.epoch)
        for route in self._routes.values():
            self._put([route, *frames])

    def receive(self) -> Iterator[tuple[int, ToRank | ToLeader]]:
        """What ranks say whose hello was right, the hello included."""
        for route, *frames in self._parts():
            for message in self._read(frames, wire.TO_LEADER):
                if isinstance(message, RankHello) and not self._greet(route, message):
                    self.dropped["stranger"] += 1
                    break
                rank = self._ranks.get(route)
                if rank is None:
                    self.dropped["stranger"] += 1
                    break
                yield rank, message

    def _greet(self, route: bytes, hello: RankHello) -> bool:
        right = hmac.compare_digest(hello.secret, self._secret)
        if not right or hello.epoch != self.epoch or not 0 < hello.rank < self._world:
            return False
        if self._ranks.get(route, hello.rank) != hello.rank:  # one connection, one rank
            return False
        before = self._routes.get(hello.rank)
        if before is not None:
            del self._ranks[before]
        self._routes[hello.rank], self._ranks[route] = route, hello.rank
        return True


class RankLink(Link):
    """The end of a rank that doesn't lead.

    Args:
        context: of ZeroMQ.
        endpoint: the leader's.
        epoch: of the group.

    Raises:
        ConfigError: the endpoint can't be used.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, epoch: int) -> None:
        """Connect it."""
        super().__init__(context, zmq.DEALER, epoch)
        self._socket.setsockopt(zmq.ROUTING_ID, b"\1" + os.urandom(15))  # ZeroMQ's own begin with 0
        self._socket.ipv6 = "[" in endpoint
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError("link", f"{endpoint!r} can't be used ({error.strerror})") from error

    def send(self, message: ToRank | ToLeader) -> None:
        """To the leader."""
        self._put(wire.encode(message, self.epoch))

    def receive(self) -> Iterator[tuple[int, ToRank | ToLeader]]:
        """What the leader says."""
        for frames in self._parts():
            for message in self._read(frames, wire.TO_RANK):
                yield 0, message
