"""A broker core on a fake wire: a clock that the test turns, and the peers of `fake_peers.py`."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.actions import Forget, Log, Send, Stop
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.broker.events import ShutdownRequested, TurnEnded
from reelwire.broker.steering import STEERED
from reelwire.controls import Keys
from reelwire.spec import check_registrable

from .fake_memory import Memories
from .fake_peers import PLENTY, VERSION, Client, Peer, Worker, done, image, keys_of, world


class Rig:
    """The broker, and what was sent at which time. Every event is followed by a check of all invariants."""

    def __init__(self, config: BrokerConfig | None = None, **more: Any) -> None:
        self.config = BrokerConfig() if config is None else config
        self.core = BrokerCore(self.config, VERSION, more.get("admit_spec", check_registrable), more.get("saved"))
        self.now = 1000.0
        self.peers: dict[bytes, Peer] = {}
        self.logs: list[Log] = []
        self.forgotten: list[bytes] = []
        self.stopped = False
        self.sent: list[tuple[float, Any]] = []
        self.granted: dict[str, int] = {}
        self.memory = Memories()
        self._entropy = 0
        self.only_takes: Callable[[Any], bool] = lambda _event: False
        self._later: deque[Callable[[], None]] = deque()
        self._busy = False

    def entropy(self) -> bytes:
        """Bytes that are random enough for a test: all different."""
        self._entropy += 1
        return self._entropy.to_bytes(16, "big")

    def later(self, call: Callable[[], None]) -> None:
        """Let a peer answer when the broker is done with what it does."""
        self._later.append(call)

    def client(self, route: bytes = b"app", name: str = "app", **more: Any) -> Client:
        """An attached client."""
        peer = self.peers[route] = Client(self, route, maps=more.pop("maps", True))
        return peer.hello(name=name, **more)

    def worker(self, name: str = "w", **more: Any) -> Worker:
        """An attached worker."""
        peer = self.peers[name.encode()] = Worker(self, name.encode(), name, maps=more.pop("maps", True))
        return peer.hello(**more)

    def start(self, chunks: int = 4, controls: int = 0, key: str = "k", **worker: Any) -> tuple[Worker, Client, str]:
        """A worker, a client and a ready session with so many accepted controls."""
        peer = self.worker(**worker)
        client = self.client()
        session = client.open(key, chunks)
        for index in range(controls):
            assert isinstance(client.submit(session, index), m.ControlAccepted)
        return peer, client, session

    def stranger(self, route: bytes) -> Client:
        """A connection that said nothing."""
        peer = self.peers[route] = Client(self, route)
        return peer

    def handle(self, event: Any) -> None:
        """Let the core handle an event, and deliver what it sends; some it only takes, as the loop does all but a turn's last."""
        if self.only_takes(event):
            self.core.take(event)
            return
        for action in self.core.handle(event):
            match action:
                case Send():
                    self.sent.append((self.now, action.message))
                    self.note_grant(action.message)
                    if action.route in self.peers:
                        self.peers[action.route].hear(action.attachment, action.message)
                case Log():
                    self.logs.append(action)
                case Forget():
                    self.forgotten.append(action.route)
                case Stop():
                    self.stopped = True
        self.core.check()
        self.check_grants()
        if not self._busy:
            self._busy = True
            try:
                while self._later:
                    self._later.popleft()()
            finally:
                self._busy = False

    def note_grant(self, message: Any) -> None:
        """How far controls may go, by whichever message that is told, never goes back."""
        if isinstance(message, m.SessionChanged | m.Chunk):
            assert message.control_limit >= self.granted.get(message.session, 0), "a grant went back"
            self.granted[message.session] = message.control_limit

    def check_grants(self) -> None:
        """A client that is there was told how far the controls of its sessions may go, once everything is settled."""
        for name, session in self.core.sessions.items():
            if session.state in STEERED and session.owner is not None and not session.owner.mute:
                assert self.granted[name] == session.control_limit, "another grant than the client was told"

    def turn(self, *, drained: bool = True) -> None:
        """Everything that was sent was read."""
        self.handle(TurnEnded(self.now, drained))

    def advance(self, seconds: float, *, alive: bool = True) -> None:
        """Let time pass; with `alive` every attached peer says so all the while."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            if alive:
                for peer in list(self.peers.values()):
                    if peer.attachment:
                        peer.say(m.Heartbeat())
            self.turn()

    def shut_down(self) -> None:
        """Ask the broker to stop."""
        self.handle(ShutdownRequested(self.now))

    def counter(self, name: str) -> int:
        """How often something was counted."""
        counters = self.core.status()["counters"]
        assert isinstance(counters, dict)
        return int(str(counters.get(name, 0)))


class Stream:
    """A ready session with its client and its worker."""

    def __init__(self, rig: Rig, chunks: int = 8, *, asked: Mapping[str, Any] | None = None, **worker: Any) -> None:
        self.rig = rig
        self.worker = rig.worker(**worker)
        self.client = rig.client()
        self.id = self.client.open(chunks=chunks, **(asked or {}))
        self.keys = Keys(world())
        assert self.client.state(self.id)[0] == "ready"

    @property
    def session(self) -> Any:
        """The broker's side of it."""
        return self.rig.core.sessions[self.id]

    def press(self, *names: str) -> None:
        """Hold keys."""
        for name in names:
            self.keys.press(name)
        self.client.keys(self.id, self.keys)

    def release(self, *names: str) -> None:
        """Let go of keys."""
        for name in names:
            self.keys.release(name)
        self.client.keys(self.id, self.keys)

    def make(self, chunks: int = 1, *, ack: bool = True) -> None:
        """Let so many more chunks be made; conditions come when they are needed."""
        for _ in range(chunks):
            while not self.worker.jobs["denoise"]:
                self.worker.finish("encode")
            self.worker.finish("denoise")
            self.worker.finish("decode")
            if ack:
                self.client.ack(self.id, len(self.got()))
            self.rig.turn()

    def got(self) -> list[m.Chunk]:
        """Chunks that the client has."""
        return self.client.chunks(self.id)

    def cursors(self) -> tuple[int, int]:
        """Nc and nx."""
        return self.session.flow.next_condition_index, self.session.flow.next_control_index

    def queued(self, stage: str) -> list[int]:
        """What the worker has to do."""
        return [task.index for task in self.worker.jobs[stage]]


@pytest.fixture
def kit() -> Any:
    """What tests of the core take from here: importlib mode has no module to import from."""
    return types.SimpleNamespace(
        Rig=Rig,
        Client=Client,
        Worker=Worker,
        Stream=Stream,
        world=world,
        image=image,
        keys_of=keys_of,
        done=done,
        VERSION=VERSION,
        PLENTY=PLENTY,
    )


@pytest.fixture
def rig() -> Any:
    """A broker with the default settings."""
    return Rig()
