"""A real worker process, with the broker's part played by a ROUTER socket of the test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import zmq

import reelwire
from reelwire import tensors, wire
from reelwire.messages import (
    Artifact,
    Draining,
    Goodbye,
    Heartbeat,
    InitializeStage,
    Rejected,
    ReleaseStage,
    RunTask,
    StageFailed,
    StageInitialized,
    StageReady,
    StageReleased,
    TaskDone,
    TaskStarted,
    Welcome,
    WorkerHello,
)

LIMIT_S = 30.0
PIPELINE = f"{Path(__file__).parent / 'numpy_pipeline.py'}:build"
M = TypeVar("M")


class FakeBroker:
    """A ROUTER that says what the test wants and answers heartbeats; it judges nobody."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.route = b""
        self.attachment = 0
        self.heartbeats: list[Heartbeat] = []
        self.unread: deque[Any] = deque()
        self.answers = True

    def receive(self, limit_s: float = LIMIT_S) -> Any:
        """The next message of any kind."""
        if not self.unread:
            assert self.socket.poll(int(limit_s * 1000)), "nothing came"
            self.route, *frames = self.socket.recv_multipart()
            envelope = wire.decode(frames, wire.TO_BROKER, wire.Limits())
            self.attachment = envelope.attachment
            self.unread += envelope.messages
        message = self.unread.popleft()
        if self.answers and isinstance(message, Heartbeat):
            self.say(Heartbeat(), self.attachment)
        return message

    def expect(self, kind: type[M], limit_s: float = LIMIT_S) -> M:
        """The next message that is no heartbeat."""
        until = time.monotonic() + limit_s
        while True:
            message = self.receive(max(0.0, until - time.monotonic()))
            if isinstance(message, kind):
                return message
            assert isinstance(message, Heartbeat), message
            self.heartbeats.append(message)

    def say(self, message: Any, attachment: int = 1) -> None:
        """To whoever spoke last."""
        self.socket.send_multipart([self.route, *wire.encode(message, attachment)])

    def welcome(self, attachment: int = 1, heartbeat_s: float = 10.0, version: str = "") -> None:
        """Attach whoever spoke last."""
        self.say(Welcome("w", version or reelwire.__version__, heartbeat_s, 3, {}), attachment)

    def attach(self, **how: Any) -> None:
        """Hear the hello, and wait until both stages are built."""
        hello = self.expect(WorkerHello)
        assert [offer.stage for offer in hello.stages] == ["draw", "show"]
        self.welcome(**how)
        assert {self.expect(StageReady).stage, self.expect(StageReady).stage} == {"draw", "show"}

    def close(self) -> None:
        """Close without waiting for anybody."""
        self.context.destroy(linger=0)


class Worker:
    """`reelwire worker` as a process."""

    def __init__(self, endpoint: str, errors: Path, *flags: str, **settings: object) -> None:
        command = [sys.executable, "-P", "-m", "reelwire", "worker", "--broker", endpoint, "--name", "w", "--json"]
        command += [*flags] if "--pipeline" in flags else [*flags, "--pipeline", PIPELINE]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self.errors = errors
        with errors.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, text=True)

    def ready(self) -> Any:
        """The line on standard output."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> int:
        """Its exit code, when it has ended by itself."""
        return self.process.wait(LIMIT_S)

    def said(self) -> str:
        """Its standard error so far."""
        return self.errors.read_text()


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker that is closed in the end."""
    fake = FakeBroker()
    yield fake
    fake.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers, none of which outlives the test."""
    workers: list[Worker] = []

    def start(endpoint: str, *flags: str, **settings: object) -> Worker:
        workers.append(Worker(endpoint, tmp_path / f"stderr-{len(workers)}", *flags, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.process.kill()
        worker.process.wait(LIMIT_S)
        if worker.process.stdout is not None:
            worker.process.stdout.close()


def initialize(stage: str = "draw", **parameters: int) -> InitializeStage:
    return InitializeStage("s", "toy", stage, 1, 1, 9, {"seed": 7, **parameters}, {}, Artifact())


def task(index: int, *keys: str) -> RunTask:
    return RunTask("s", "toy", "draw", 1, 1, index, {"control": Artifact({"keys": list(keys)})}, index == 0, False)


def show(index: int, picture: Artifact) -> RunTask:
    return RunTask("s", "toy", "show", 1, 1, index, {"picture": picture}, index == 0, False)


def test_a_session_from_hello_to_goodbye(broker: FakeBroker, start: Callable[..., Worker]) -> None:
    """Hello, Welcome, ready, two chunks through both stages, release, SIGTERM, Goodbye, exit code 0."""
    worker = start(broker.endpoint)
    broker.attach()
    assert worker.ready() == {
        "event": "ready",
        "name": "w",
        "broker": broker.endpoint,
        "version": reelwire.__version__,
    }
    broker.say(initialize())
    handed = broker.expect(StageInitialized).handed
    broker.say(InitializeStage("s", "toy", "show", 1, 1, 9, {"seed": 7}, {}, handed))
    assert broker.expect(StageInitialized).stage == "show"
    total = 0
    for index in range(2):
        broker.say(task(index, "w"))
        assert broker.expect(TaskStarted).index == index
        picture = broker.expect(TaskDone).outputs["picture"]
        broker.say(show(index, picture))
        assert broker.expect(TaskStarted).stage == "show"
        frames = broker.expect(TaskDone).outputs["frames"].tensors["frames"]
        total += 7 + index
        assert frames.shape == (1 + index, 1, 4, 3)
        assert set(tensors.to_array(frames).flat) == {total}
    for stage in ("show", "draw"):
        broker.say(ReleaseStage("s", "toy", stage, 1, 1))
        assert broker.expect(StageReleased).stage == stage
    assert broker.attachment == 1
    worker.process.send_signal(signal.SIGTERM)
    broker.expect(Goodbye)
    assert worker.end() == 0


def test_streaming_32_heartbeats_go_on_while_a_stage_holds_the_interpreter(
    broker: FakeBroker, start: Callable[..., Worker]
) -> None:
    """A stage in Python bytecode for long doesn't make its worker look dead."""
    start(broker.endpoint, "--option", "busy_s=2.5")
    broker.attach(heartbeat_s=0.4)
    broker.say(initialize())
    broker.expect(StageInitialized)
    broker.say(task(0, "a"))
    broker.expect(TaskStarted)
    broker.heartbeats.clear()
    while True:
        message = broker.receive()
        if isinstance(message, TaskDone):
            break
        assert isinstance(message, Heartbeat), message
        broker.heartbeats.append(message)
    assert len(broker.heartbeats) >= 3


def test_streaming_32_a_build_is_announced(broker: FakeBroker, start: Callable[..., Worker]) -> None:
    """The first message after the Welcome says how long the worker may be silent."""
    start(broker.endpoint, busy_for_s=12)
    broker.expect(WorkerHello)
    broker.welcome()
    assert broker.expect(Heartbeat) == Heartbeat(12.0)


def test_streaming_32_a_silent_broker_is_greeted_over_a_new_connection(
    broker: FakeBroker, start: Callable[..., Worker]
) -> None:
    """And is told again what is ready; the session of before is gone."""
    start(broker.endpoint)
    broker.attach(heartbeat_s=0.4)
    broker.say(initialize())
    broker.expect(StageInitialized)
    route = broker.route
    broker.answers = False
    broker.expect(WorkerHello)
    assert broker.route != route
    assert broker.attachment == 0
    broker.welcome(attachment=2)
    assert {broker.expect(StageReady).stage, broker.expect(StageReady).stage} == {"draw", "show"}
    broker.say(task(0), attachment=2)
    assert broker.expect(StageFailed).failure.message == "draw: the session isn't here"


def test_streaming_33_an_unknown_peer_says_hello_on(broker: FakeBroker, start: Callable[..., Worker]) -> None:
    """A broker that was restarted answers a stranger's heartbeat with Rejected, and gets a hello."""
    start(broker.endpoint)
    broker.attach()
    broker.say(Rejected("unknown_peer", "who are you"), attachment=0)
    broker.expect(WorkerHello)


def test_streaming_34_garbage_from_the_broker_changes_nothing(broker: FakeBroker, start: Callable[..., Worker]) -> None:
    """Wrong bytes, wrong direction and an empty message are logged; the session goes on."""
    worker = start(broker.endpoint)
    broker.attach()
    for frames in ([b"\xc1"], [b""], [b"GET / HTTP/1.1"], wire.encode(StageReady("toy", "draw", 1), 1)):
        broker.socket.send_multipart([broker.route, *frames])
    broker.say(initialize())
    assert broker.expect(StageInitialized).session == "s"
    assert worker.said().count("malformed") == 4


def test_large_tensors_arrive_whole(broker: FakeBroker, start: Callable[..., Worker]) -> None:
    """32 MiB in, and what depends on each byte of it out."""
    start(broker.endpoint)
    broker.attach()
    image = np.arange(32 << 20, dtype=np.uint32).astype(np.uint8)
    message = InitializeStage(
        "s", "toy", "draw", 1, 1, 9, {"seed": 0}, {"image": tensors.from_array(image)}, Artifact()
    )
    broker.say(message)
    embedding = tensors.to_array(broker.expect(StageInitialized).handed.tensors["embedding"])
    assert embedding.tolist() == [np.float32(image.sum(dtype=np.int64))] * 3


def test_a_hung_stage_does_not_keep_the_process(broker: FakeBroker, start: Callable[..., Worker]) -> None:
    """The first signal waits for the running task, the second ends the process although a thread never returns."""
    worker = start(broker.endpoint)
    broker.attach(heartbeat_s=0.4)
    broker.say(initialize())
    broker.expect(StageInitialized)
    broker.say(task(0, "d"))
    broker.expect(TaskStarted)
    worker.process.send_signal(signal.SIGINT)
    while True:
        assert isinstance(broker.receive(), Heartbeat | Draining), "it goes on saying that it is there"
        if "draining" in worker.said():
            break
    worker.process.send_signal(signal.SIGTERM)
    broker.expect(Goodbye)
    assert worker.end() == 1


def test_streaming_38_a_worker_that_does_not_fit_says_both_versions(
    broker: FakeBroker, start: Callable[..., Worker]
) -> None:
    """Exit code 3."""
    worker = start(broker.endpoint)
    broker.expect(WorkerHello)
    broker.welcome(version="99.1.0")
    assert worker.end() == 3
    assert "99.1.0" in worker.said()
    assert reelwire.__version__ in worker.said()


def test_a_worker_without_a_broker_gives_up(broker: FakeBroker, start: Callable[..., Worker]) -> None:
    """Exit code 3, and the endpoint is named."""
    broker.socket.close(linger=0)
    worker = start(broker.endpoint, connect_timeout_s=0.3)
    assert worker.end() == 3
    assert broker.endpoint in worker.said()


@pytest.mark.parametrize(
    ("trouble", "code", "says"), [("request", 2, "a folder with weights"), ("crash", 1, "the weights are broken")]
)
def test_a_stage_that_can_not_be_built_ends_the_worker(
    broker: FakeBroker, start: Callable[..., Worker], trouble: str, code: int, says: str
) -> None:
    """With the sentence, to the broker and on standard error."""
    worker = start(broker.endpoint, "--option", f"trouble={trouble}")
    broker.expect(WorkerHello)
    broker.welcome()
    assert says in broker.expect(Goodbye).reason
    assert worker.end() == code
    assert says in worker.said()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--pipeline", "no-such-pipeline"), "no-such-pipeline"),
        (("--stages", "paint"), "draw, show"),
    ],
)
def test_wrong_settings_end_the_worker_before_it_connects(
    broker: FakeBroker, start: Callable[..., Worker], flags: tuple[str, ...], says: str
) -> None:
    """Exit code 2, and nothing was said to the broker."""
    worker = start(broker.endpoint, *flags)
    assert worker.end() == 2
    assert says in worker.said()
    assert not broker.socket.poll(0)
