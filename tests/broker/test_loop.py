"""The broker on real sockets: clients, workers, strangers, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

import reelwire
from reelwire import messages as m
from reelwire import wire
from reelwire.broker.config import BrokerConfig
from reelwire.broker.endpoint import claimed
from reelwire.broker.events import Unreachable
from reelwire.broker.loop import Loop, _weight, run
from reelwire.errors import ConfigError

LIMIT_S = 30.0
M = TypeVar("M")
ANY_PORT = "tcp://127.0.0.1:*"
OURS = b"reelwire" + bytes([wire.PROTOCOL])


class Peer:
    """A DEALER that says what the test wants."""

    def __init__(self, endpoint: str, direction: wire.Direction[Any] = wire.TO_CLIENT, **options: Any) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self.direction = direction
        self.attachment = 0
        self.unread: deque[Any] = deque()

    def say(self, message: Any) -> None:
        """Send a message."""
        self.socket.send_multipart(wire.encode(message, self.attachment))

    def expect(self, kind: type[M]) -> M:
        """The next message of the kind; others are skipped."""
        until = time.monotonic() + LIMIT_S
        while True:
            while self.unread:
                if isinstance(message := self.unread.popleft(), kind):
                    return message
            left_s = max(0.0, until - time.monotonic())
            assert self.socket.poll(int(left_s * 1000)), f"no {kind.__name__} came"
            self.receive()

    def receive(self) -> None:
        """Take in what comes next, which may be several messages."""
        envelope = wire.decode(self.socket.recv_multipart(), self.direction, wire.Limits())
        if any(isinstance(message, m.Welcome) for message in envelope.messages):
            self.attachment = envelope.attachment
        self.unread += envelope.messages

    def hello(self, version: str = reelwire.__version__) -> Peer:
        """Attach as a client."""
        self.say(m.ClientHello(version, "test"))
        self.expect(m.Welcome)
        return self

    def counters(self) -> dict[str, int]:
        """What the broker counted so far."""
        self.say(m.AskStatus(1))
        counters = self.expect(m.Status).state["counters"]
        assert isinstance(counters, dict)
        return {name: int(str(count)) for name, count in counters.items()}

    def wait_for(self, counter: str, least: int = 1) -> None:
        """Ask until the broker has counted so many."""
        until = time.monotonic() + LIMIT_S
        while self.counters().get(counter, 0) < least:
            assert time.monotonic() < until, f"{counter} isn't {least}"

    def close(self) -> None:
        """Close at once."""
        self.context.destroy(linger=0)


Start = Callable[..., Loop]
Connect = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Brokers, each on a thread of this process."""
    running: list[tuple[Loop, threading.Thread, Any]] = []

    def one(**settings: Any) -> Loop:
        config = BrokerConfig(**{"listen": ANY_PORT, **settings})
        claim = claimed(config.listen, insecure=config.insecure)
        claim.__enter__()
        loop = Loop(config)
        thread = threading.Thread(target=loop.serve)
        thread.start()
        running.append((loop, thread, claim))
        return loop

    yield one
    for loop, thread, claim in running:
        loop.wake.ask()
        loop.wake.ask()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        loop.close()
        claim.__exit__(None, None, None)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Peers that are closed at the end."""
    peers: list[Peer] = []

    def one(loop: Loop | str, *args: Any, **options: Any) -> Peer:
        peers.append(Peer(loop if isinstance(loop, str) else loop.endpoint, *args, **options))
        return peers[-1]

    yield one
    for peer in peers:
        peer.close()


def test_it_says_where_it_listens_and_stops_when_asked(tmp_path: Path) -> None:
    """`run` calls back with the endpoint it got; SIGTERM on the main thread ends it with 0; handlers are put back."""
    before = signal.getsignal(signal.SIGTERM)
    endpoints: list[str] = []

    def ready(endpoint: str) -> None:
        endpoints.append(endpoint)
        signal.raise_signal(signal.SIGTERM)

    assert run(BrokerConfig(listen=ANY_PORT), ready) == 0
    assert run(BrokerConfig(listen=f"ipc://{tmp_path}/b.sock"), ready) == 0
    host, port = endpoints[0].rsplit(":", 1)
    assert host == "tcp://127.0.0.1"
    assert int(port) > 0
    assert endpoints[1] == f"ipc://{tmp_path}/b.sock"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_broker_needs_no_torch_and_no_media() -> None:
    """What the daemon imports stays small: it is up before a model library would be."""
    names = ("torch", "av", "PIL", "typer", "diffusers", "transformers", "prometheus_client")
    code = f"import sys, reelwire.broker.loop; print([name for name in {names} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"


def command(*flags: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-P", "-m", "reelwire", "broker", "--json", *flags]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_streaming_37_sigterm_tells_everybody_and_exits_with_zero(connect: Connect) -> None:
    """The process says when it is ready; its peers hear goodbye; logs are JSON on standard error."""
    process = command("--listen", ANY_PORT)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["event"], ready["version"]) == ("ready", reelwire.__version__)
    client = connect(ready["endpoint"]).hello()
    process.send_signal(signal.SIGTERM)
    client.expect(m.Goodbye)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in errors.splitlines()] == ["attached", "draining"]


def test_streaming_37_a_second_sigterm_ends_it_now(start: Start, connect: Connect, kit: Any) -> None:
    """A session whose stage doesn't answer holds up the first, not the second."""
    process = command("--listen", ANY_PORT)
    assert process.stdout is not None
    endpoint = json.loads(process.stdout.readline())["endpoint"]
    worker = connect(endpoint, wire.TO_WORKER)
    offers = tuple(m.StageOffer("world", stage.name, 1, 1) for stage in kit.world().stages)
    worker.say(m.WorkerHello(reelwire.__version__, "w", "cpu", (kit.world(),), offers))
    worker.expect(m.Welcome)
    for offer in offers:
        worker.say(m.StageReady("world", offer.stage, 1))
    client = connect(endpoint).hello()
    client.say(m.OpenSession("k", "world", 3))
    client.expect(m.SessionOpened)
    worker.expect(m.InitializeStage)
    process.send_signal(signal.SIGTERM)
    worker.expect(m.ReleaseStage)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


def test_a_second_broker_on_the_same_port_is_refused(start: Start) -> None:
    """The sentence names the endpoint; the first one isn't disturbed."""
    loop = start()
    with pytest.raises(ConfigError, match="in use") as caught:
        run(BrokerConfig(listen=loop.endpoint), lambda _endpoint: None)
    assert caught.value.field == "listen"
    assert loop.endpoint in str(caught.value)


def test_an_endpoint_that_cannot_be_bound_is_refused() -> None:
    """An address that isn't this machine's, said to be meant."""
    with pytest.raises(ConfigError, match="can't be bound"):
        run(BrokerConfig(listen="tcp://192.0.2.1:7461", insecure=True), lambda _endpoint: None)


def test_a_second_broker_on_the_same_path_is_refused_and_a_stale_path_is_not(
    start: Start, connect: Connect, tmp_path: Path
) -> None:
    """A live broker keeps its path; what a dead one left is taken over."""
    path = tmp_path / "broker.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    loop = start(listen=f"ipc://{path}")
    client = connect(loop).hello()
    with pytest.raises(ConfigError, match="in use"):
        run(BrokerConfig(listen=f"ipc://{path}"), lambda _endpoint: None)
    assert client.counters() == {}


def test_streaming_38_another_version_hears_both_versions(start: Start, connect: Connect) -> None:
    """Of reelwire, and of the protocol itself."""
    loop = start()
    client = connect(loop)
    client.say(m.ClientHello("7.8.9"))
    rejected = client.expect(m.Rejected)
    assert rejected.code == "version"
    assert reelwire.__version__ in rejected.message
    assert "7.8.9" in rejected.message
    stranger = connect(loop)
    header, *rest = wire.encode(m.ClientHello(reelwire.__version__), 0)
    stranger.socket.send_multipart([bytes(header).replace(OURS, b"reelwire\x63", 1), *rest])
    rejected = stranger.expect(m.Rejected)
    assert rejected.code == "version"
    assert "99" in rejected.message
    assert str(wire.PROTOCOL) in rejected.message


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"\xc1\xff garbage"],
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    [b"x" * 5000],
    [b"a", b"b", b"c"],
    [b""] * 300,
    [b"\x94\xa8" + OURS + b"\x00\x92\xa3Ack\xc4\x03\x92\xa1s"],
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_streaming_34_garbage_is_answered_once_and_changes_nothing(
    start: Start, connect: Connect, frames: list[bytes]
) -> None:
    """Whatever the frames are, their sender is told once; a client beside it doesn't notice."""
    loop = start(frame_bytes_max=4000)
    client, stranger = connect(loop).hello(), connect(loop)
    for _ in range(3):
        stranger.socket.send_multipart(frames)
    assert stranger.expect(m.Rejected).code == "malformed"
    client.wait_for("malformed", 3)
    assert not stranger.socket.poll(0)


def test_streaming_34_a_far_too_large_frame_costs_the_connection(start: Start, connect: Connect) -> None:
    """It is never taken into memory; a client beside it doesn't notice."""
    loop = start(frame_bytes_max=10_000, header_bytes_max=10_000)
    client, stranger = connect(loop).hello(), connect(loop)
    monitor = stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.socket.send_multipart([bytes(1_000_000)])
    assert monitor.poll(int(LIMIT_S * 1000))
    stranger.socket.disable_monitor()
    monitor.close()
    assert client.counters() == {}


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x00" * 64, b"\xff" * 10_000, b""])
def test_streaming_34_raw_tcp_changes_nothing(start: Start, connect: Connect, sent: bytes) -> None:
    """HTTP, noise, and a connection that says nothing."""
    loop = start()
    client = connect(loop).hello()
    host, port = loop.endpoint.removeprefix("tcp://").split(":")
    raw = [socket.create_connection((host, int(port)), timeout=LIMIT_S) for _ in range(20)]
    for one in raw:
        one.sendall(sent)
    assert client.counters() == {}
    assert connect(loop).hello().attachment > client.attachment
    for one in raw:
        one.close()


def test_streaming_35_a_heartbeat_counts_as_much_as_it_says() -> None:
    """A turn reads a bounded number of acks, whether each travels alone or in a heartbeat."""
    acks = tuple(m.Ack(str(number), 0) for number in range(3))
    assert [_weight(message) for message in (m.Heartbeat(), m.Heartbeat(acks=acks), acks[0])] == [1, 4, 1]


def test_streaming_35_a_peer_that_does_not_read_is_dropped_alone(
    start: Start, connect: Connect, tmp_path: Path
) -> None:
    """Its bounded outbox fills, it is given up, and the memory is free; another client is served all the while."""
    loop = start(listen=f"ipc://{tmp_path}/b.sock", outbox_messages_max=20, heartbeat_s=60.0)
    client = connect(loop).hello()
    deaf = connect(loop, rcvhwm=1, sndhwm=0).hello()
    until = time.monotonic() + LIMIT_S
    while "outbox_full" not in client.counters():
        assert time.monotonic() < until
        for _ in range(200):
            deaf.say(m.AskStatus(2))
    assert not loop._outboxes.blocked
    while "clients_lost" not in client.counters():  # when all that it said was read
        assert time.monotonic() < until
    assert client.counters()["clients_lost"] == 1


def test_streaming_35_a_slow_reader_gets_everything_in_order(start: Start, connect: Connect, tmp_path: Path) -> None:
    """What didn't fit into the socket waits, and follows when the peer is heard again."""
    loop = start(listen=f"ipc://{tmp_path}/b.sock")
    slow = connect(loop, rcvhwm=1, sndhwm=0).hello()
    asked = 1500
    for number in range(asked):
        slow.say(m.AskStatus(number))
    got: list[int] = []
    until = time.monotonic() + LIMIT_S
    while len(got) < asked:
        assert time.monotonic() < until, len(got)
        if not slow.socket.poll(20):
            slow.say(m.Heartbeat())
            continue
        slow.receive()
        got += [message.request for message in slow.unread if isinstance(message, m.Status)]
        slow.unread.clear()
    assert got == list(range(asked))


def test_streaming_35_large_messages_to_a_deaf_peer_are_bounded_in_bytes(tmp_path: Path) -> None:
    """Neither the outbox nor the socket gathers more than the limit; when the peer reads, all of it comes in order."""
    size, limit = 4 << 20, 16 << 20
    loop = Loop(BrokerConfig(listen=f"ipc://{tmp_path}/b.sock", outbox_bytes_max=limit))
    deaf = Peer(loop.endpoint, rcvhwm=1)
    boxes = loop._outboxes
    try:
        deaf.socket.send(b"hello")
        assert loop._socket.poll(int(LIMIT_S * 1000))
        route = loop._socket.recv_multipart()[0]
        sent = 0
        until = time.monotonic() + LIMIT_S
        while boxes.send(route, [bytes([sent]), bytes(size)]) == "ok":
            sent += 1
            assert max(boxes.leaving(route), boxes.nbytes(route)) <= limit
            assert time.monotonic() < until
        assert boxes.leaving(route) > 0
        for number in range(sent):
            assert not boxes.retry(boxes.blocked)
            while not deaf.socket.poll(20):
                assert not boxes.retry(boxes.blocked)
                assert time.monotonic() < until
            assert deaf.socket.recv_multipart() == [bytes([number]), bytes(size)]
        while boxes.leaving(route):
            assert time.monotonic() < until
        assert not boxes.blocked
    finally:
        deaf.close()
        loop.close()


def test_streaming_32_a_connection_that_is_gone_is_noticed(start: Start, connect: Connect) -> None:
    """The next heartbeat to it can't be sent, and its client counts as lost."""
    loop = start(heartbeat_s=0.1)
    client = connect(loop).hello()
    gone = connect(loop).hello()
    gone.close()
    until = time.monotonic() + LIMIT_S
    while client.counters().get("clients_lost", 0) < 1:
        client.say(m.Heartbeat())
        assert time.monotonic() < until
    client.say(m.AskStatus(3))
    assert client.expect(m.Status).state["clients"] == 1


def test_streaming_32_a_process_that_stood_still_hears_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """After oversleeping by more than an interval nobody is called silent for one interval."""
    loop = Loop(BrokerConfig(listen=ANY_PORT, heartbeat_s=5.0))
    try:
        now = time.monotonic()
        monkeypatch.setattr(loop, "_core", types.SimpleNamespace(wake_at=now - 20.0))
        loop._awake_at = now - 20.0
        loop._wait()
        assert loop._backlog_until >= now + 5.0
        loop._backlog_until = 0.0
        loop._wait()
        assert loop._backlog_until == 0.0, "it was on time"
    finally:
        loop.close()


def test_streaming_35_any_number_of_peers_may_be_gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is handled after the other, not inside of it."""
    loop = Loop(BrokerConfig(listen=ANY_PORT))
    handled: list[Any] = []

    def handle(event: Any) -> list[Any]:
        handled.append(event)
        return []

    try:
        monkeypatch.setattr(loop, "_core", types.SimpleNamespace(handle=handle))
        loop._pending.extend(Unreachable(0.0, b"") for _ in range(10_000))
        loop._handle(Unreachable(0.0, b""))
    finally:
        loop.close()
    assert len(handled) == 10_001


def test_a_loop_without_peers_sleeps_until_it_is_woken(start: Start) -> None:
    """There is no deadline, so it takes no turns."""
    loop = start()
    assert loop._core.wake_at is None
    assert loop.wake.clear() == 0


def test_waking_never_blocks() -> None:
    """A pipe that is full means that the loop will wake anyway."""
    loop = Loop(BrokerConfig(listen=ANY_PORT))
    try:
        for _ in range(100_000):
            loop.wake.ask()
        assert loop.wake.clear() > 0
    finally:
        loop.close()


def descriptors() -> int:
    """Files that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_descriptor_is_left() -> None:
    """Opening and closing many loops, and failing to open, leaves no file open."""
    taken = Loop(BrokerConfig(listen=ANY_PORT))
    try:
        for _ in range(3):
            Loop(BrokerConfig(listen=ANY_PORT)).close()
        before = descriptors()
        for _ in range(5):
            Loop(BrokerConfig(listen=ANY_PORT)).close()
            with pytest.raises(ConfigError):
                Loop(BrokerConfig(listen=taken.endpoint))
        assert descriptors() <= before
    finally:
        taken.close()
