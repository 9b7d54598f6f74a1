"""A real worker process, with the broker's part played by a ROUTER socket of the test."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

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
    WorkerHello,
)
from reelwire.workers.config import WorkerConfig
from reelwire.workers.loop import _Loop, run
from reelwire.workers.stage_work import StageWork

PIPELINE = f"{Path(__file__).parent / 'numpy_pipeline.py'}:build"
LIMIT_S = 30.0


def initialize(stage: str = "draw", **parameters: int) -> InitializeStage:
    return InitializeStage("s", "toy", stage, 1, 1, 9, {"seed": 7, **parameters}, {}, Artifact())


def task(index: int, *keys: str) -> RunTask:
    return RunTask("s", "toy", "draw", 1, 1, index, {"control": Artifact({"keys": list(keys)})}, index == 0, False)


def show(index: int, picture: Artifact) -> RunTask:
    return RunTask("s", "toy", "show", 1, 1, index, {"picture": picture}, index == 0, False)


def test_a_session_from_hello_to_goodbye(broker: Any, start: Callable[..., Any]) -> None:
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
    broker: Any, start: Callable[..., Any]
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


def test_streaming_32_a_build_is_announced(broker: Any, start: Callable[..., Any]) -> None:
    """The first message after the Welcome says how long the worker may be silent."""
    start(broker.endpoint, busy_for_s=12)
    broker.expect(WorkerHello)
    broker.welcome()
    assert broker.expect(Heartbeat) == Heartbeat(12.0)


def test_streaming_32_a_silent_broker_is_greeted_over_a_new_connection(broker: Any, start: Callable[..., Any]) -> None:
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


def test_streaming_33_an_unknown_peer_says_hello_on(broker: Any, start: Callable[..., Any]) -> None:
    """A broker that was restarted answers a stranger's heartbeat with Rejected, and gets a hello."""
    start(broker.endpoint)
    broker.attach()
    broker.say(Rejected("unknown_peer", "who are you"), attachment=0)
    broker.expect(WorkerHello)


def test_streaming_34_garbage_from_the_broker_changes_nothing(broker: Any, start: Callable[..., Any]) -> None:
    """Wrong bytes, wrong direction and an empty message are logged; the session goes on."""
    worker = start(broker.endpoint)
    broker.attach()
    for frames in ([b"\xc1"], [b""], [b"GET / HTTP/1.1"], wire.encode(StageReady("toy", "draw", 1), 1)):
        broker.socket.send_multipart([broker.route, *frames])
    broker.say(initialize())
    assert broker.expect(StageInitialized).session == "s"
    assert worker.said().count("malformed") == 4


def test_large_tensors_arrive_whole(broker: Any, start: Callable[..., Any]) -> None:
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


def test_a_hung_stage_does_not_keep_the_process(broker: Any, start: Callable[..., Any]) -> None:
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


def test_streaming_38_a_worker_that_does_not_fit_says_both_versions(broker: Any, start: Callable[..., Any]) -> None:
    """Exit code 3."""
    worker = start(broker.endpoint)
    broker.expect(WorkerHello)
    broker.welcome(version="99.1.0")
    assert worker.end() == 3
    assert "99.1.0" in worker.said()
    assert reelwire.__version__ in worker.said()


def test_a_worker_without_a_broker_gives_up(broker: Any, start: Callable[..., Any]) -> None:
    """Exit code 3, and the endpoint is named."""
    broker.socket.close(linger=0)
    worker = start(broker.endpoint, connect_timeout_s=0.3)
    assert worker.end() == 3
    assert broker.endpoint in worker.said()


@pytest.mark.parametrize(
    ("trouble", "code", "says"), [("request", 2, "a folder with weights"), ("crash", 1, "the weights are broken")]
)
def test_a_stage_that_can_not_be_built_ends_the_worker(
    broker: Any, start: Callable[..., Any], trouble: str, code: int, says: str
) -> None:
    """With the sentence, to the broker and on standard error."""
    worker = start(broker.endpoint, "--option", f"trouble={trouble}")
    broker.expect(WorkerHello)
    broker.welcome()
    assert says in broker.expect(Goodbye).reason
    assert worker.end() == code
    assert says in worker.said()


@contextmanager
def inside(broker: Any) -> Iterator[Future[int]]:
    """A worker in this process that has a session and is given a task, and how it ends."""
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(1) as pool:
        try:
            ended = pool.submit(run, WorkerConfig(broker=broker.endpoint, name="w", pipeline=PIPELINE), lambda _: None)
            broker.attach()
            broker.say(initialize())
            broker.expect(StageInitialized)
            broker.say(task(0))
            yield ended
        finally:
            sys.setswitchinterval(interval)
            gc.unfreeze()


def test_a_result_does_not_wait_for_the_loop(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stage's own thread sends it, while the one that waits for the broker does nothing."""
    still, go_on = threading.Event(), threading.Event()
    wait, do = _Loop._wait, StageWork.do

    def wait_longer(self: Any) -> Any:
        job = self._core.actors["draw"].running
        if job is not None and isinstance(job.work, RunTask):
            still.set()
            assert go_on.wait(LIMIT_S)
        return wait(self)

    def do_then(self: Any, job: Any) -> Any:
        report = do(self, job)
        assert not isinstance(job.work, RunTask) or still.wait(LIMIT_S)
        return report

    monkeypatch.setattr(_Loop, "_wait", wait_longer)
    monkeypatch.setattr(StageWork, "do", do_then)
    with inside(broker) as ended:
        broker.expect(TaskStarted)
        assert broker.expect(TaskDone).index == 0
        assert not go_on.is_set()
        go_on.set()
        broker.say(Rejected("version", "too old"))
        assert ended.result(LIMIT_S) == 3


def test_what_goes_wrong_with_a_result_ends_the_worker(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it does so on a stage's thread: a fault of ours is not lost with that."""

    def broken(*_: object) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(StageWork, "_pack", broken)
    with inside(broker) as ended, pytest.raises(ZeroDivisionError):
        ended.result(LIMIT_S)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--pipeline", "no-such-pipeline"), "no-such-pipeline"),
        (("--stages", "paint"), "draw, show"),
    ],
)
def test_wrong_settings_end_the_worker_before_it_connects(
    broker: Any, start: Callable[..., Any], flags: tuple[str, ...], says: str
) -> None:
    """Exit code 2, and nothing was said to the broker."""
    worker = start(broker.endpoint, *flags)
    assert worker.end() == 2
    assert says in worker.said()
    assert not broker.socket.poll(0)
