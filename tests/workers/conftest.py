"""What tests of a worker stand on: a core whose surroundings the test plays, threads of stages, and whole processes."""

from __future__ import annotations

import json
import queue
import resource
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

import reelwire
from reelwire import wire
from reelwire.controls import KeyState
from reelwire.messages import (
    Applied,
    Artifact,
    Failure,
    FailureKind,
    Heartbeat,
    InitializeStage,
    MemoryOffer,
    ReleaseStage,
    Reservation,
    RunTask,
    SetStageKeys,
    StageFailed,
    StageInitialized,
    StageReady,
    StageReleased,
    TaskDone,
    Welcome,
    WorkerHello,
)
from reelwire.spec import Edge, StageSpec, StreamSpec
from reelwire.workers.actions import BuildStage, Job, Run, Send, Stop, Work
from reelwire.workers.config import WorkerConfig
from reelwire.workers.core import WorkerCore
from reelwire.workers.events import Finished, Received, Reply, Reported, Started, Tick
from reelwire.workers.group_events import AnyAction, AnyEvent
from reelwire.workers.memory import SharedMemory
from reelwire.workers.runner import StageThread

LIMIT_S = 30.0
FULL_BYTES = 1 << 18
CACHE_BYTES_MAX = 2500
PIPELINE = f"{Path(__file__).parent / 'numpy_pipeline.py'}:build"
M = TypeVar("M")

SPEC = StreamSpec(
    name="toy",
    stages=(StageSpec("draw", ("control",), ("picture",)), StageSpec("show", ("picture",), ("frames",))),
    edges=(Edge("control"), Edge("picture"), Edge("frames")),
    external_inputs=("control",),
    outputs=("frames",),
    initialize_order=("draw", "show"),
    control="control",
    chunks_max=100,
    frames_first=1,
    frames_next=2,
    fps=16.0,
    control_names=("a", "d", "s", "w"),
)


class Rig:
    """A core whose invariants are asserted after every event, and short ways to say what happens to it."""

    def __init__(self, memory: MemoryOffer | None = None, **settings: Any) -> None:
        settings = {"name": "w", "slots": 2, **settings}
        self.core = WorkerCore(WorkerConfig(**settings), SPEC, "1.2.3", {"numpy": "9"}, memory)
        self.now = 100.0
        self.jobs: dict[str, Job] = {}
        self.sent: list[Any] = []
        self.stopped: Stop | None = None

    def do(self, event: AnyEvent) -> list[AnyAction]:
        """One event; its jobs, messages and the end are kept."""
        actions = self.core.handle(event)
        self.core.check()
        for action in actions:
            if isinstance(action, Run):
                assert action.stage not in self.jobs, "a thread was given two jobs"
                self.jobs[action.stage] = action.job
            if isinstance(action, Send):
                self.sent.append(action.message)
            if isinstance(action, Stop):
                self.stopped = action
        return actions

    def start(self) -> list[AnyAction]:
        """The process is up."""
        return self.do(Started(self.now))

    def tick(self, after_s: float = 0.0, *, drained: bool = True) -> list[AnyAction]:
        """Time passes."""
        self.now += after_s
        return self.do(Tick(self.now, drained))

    def hear(self, message: Any, attachment: int = 1) -> list[AnyAction]:
        """The broker says something."""
        return self.do(Received(self.now, attachment, message))

    def welcome(
        self, attachment: int = 1, version: str = "1.2.9", heartbeat_s: float = 1.0, incarnation: int = 1
    ) -> list[AnyAction]:
        """The broker attaches the worker."""
        return self.hear(Welcome("w", version, heartbeat_s, 3, {}, incarnation=incarnation), attachment)

    def finish(self, stage: str, reply: Reply | None = None, traceback: str = "", **more: Any) -> list[AnyAction]:
        """The stage's thread reports its job: well done, if `reply` doesn't say otherwise."""
        job = self.jobs.pop(stage)
        return self.do(Reported(self.now, Finished(stage, job, reply or well_done(job), traceback, **more)))

    def fail(self, stage: str, kind: FailureKind = "stage", message: str = "no") -> list[AnyAction]:
        """The stage's thread reports that its job raised."""
        return self.finish(stage, failed(self.jobs[stage], kind, message), "Traceback: here")

    def ready(self) -> Rig:
        """Attached, with all weights, and nothing of that left in `sent`."""
        self.start()
        self.welcome()
        for stage in list(self.jobs):
            self.finish(stage)
        self.sent.clear()
        return self

    def live(self, session: str = "s", stage: str = "draw", epoch: int = 1) -> Rig:
        """With a session at a stage."""
        self.hear(initialize(session, stage, epoch))
        self.finish(stage)
        self.sent.clear()
        return self


def initialize(session: str = "s", stage: str = "draw", epoch: int = 1, stage_epoch: int = 1) -> InitializeStage:
    return InitializeStage(session, "toy", stage, epoch, stage_epoch, 9, {}, {}, Artifact())


def task(index: int, session: str = "s", stage: str = "draw", epoch: int = 1, stage_epoch: int = 1) -> RunTask:
    return RunTask(session, "toy", stage, epoch, stage_epoch, index, {"control": Artifact()}, index == 0, False)


def reserve(index: int, session: str = "s", epoch: int = 1, **reservation: Any) -> RunTask:
    """A task of `draw` whose control is bound when it begins."""
    given = {"keys": KeyState(), **reservation}
    return RunTask(
        session, "toy", "draw", epoch, 1, index, {}, index == 0, False, reservation=Reservation("control", **given)
    )


def set_keys(keys: KeyState, session: str = "s", epoch: int = 1, stage_epoch: int = 1) -> SetStageKeys:
    return SetStageKeys(session, "toy", "draw", epoch, stage_epoch, keys)


def release(session: str = "s", stage: str = "draw", epoch: int = 1, stage_epoch: int = 1) -> ReleaseStage:
    return ReleaseStage(session, "toy", stage, epoch, stage_epoch)


def well_done(job: Job) -> Reply:
    match job.work:
        case BuildStage():
            return StageReady("toy", job.work.stage, 500)
        case InitializeStage() as work:
            return StageInitialized(work.session, work.stage, work.epoch, work.stage_epoch, Artifact(), 400)
        case RunTask() as work:
            whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
            return TaskDone(*whose, {}, {}, 0.1, job.applied)
        case ReleaseStage() as work:
            return StageReleased(work.session, work.stage, work.epoch, work.stage_epoch)


def failed(job: Job, kind: FailureKind = "stage", message: str = "no") -> StageFailed:
    failure = Failure(kind, message, job.work.stage, field="seed" if kind == "request" else "")
    match job.work:
        case BuildStage() as build:
            return StageFailed("", build.stage, 0, 0, "build", None, failure)
        case InitializeStage() as work:
            return StageFailed(work.session, work.stage, work.epoch, work.stage_epoch, "initialize", None, failure)
        case RunTask() as work:
            return StageFailed(work.session, work.stage, work.epoch, work.stage_epoch, "run", work.index, failure)
        case ReleaseStage() as work:
            return StageFailed(work.session, work.stage, work.epoch, work.stage_epoch, "release", None, failure)


class Threads:
    """Stage threads of a pipeline whose reports can be waited for."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self.threads: dict[str, StageThread] = {}

    def start(
        self, pipeline: Any, stage: str = "draw", device: str = "cpu", memory: SharedMemory | None = None
    ) -> Finished:
        """Start the thread of a stage and have it build."""
        self.threads[stage] = StageThread(pipeline, stage, device, 1, self.reports.put, CACHE_BYTES_MAX, memory)
        return self.do(BuildStage(pipeline.spec.name, stage), stage)

    def do(self, work: Work, stage: str = "draw", applied: Applied | None = None) -> Finished:
        """One job, until it is reported."""
        self.threads[stage].submit(Job(1, work, applied))
        report = self.reports.get(timeout=LIMIT_S)
        assert report.job.work is work
        return report

    def told(self, work: Work, stage: str = "draw") -> Reply:
        """What the broker is told of one job in the end: a result that fits in no message is a failure."""
        report = self.do(work, stage)
        packed = report.pack() if report.pack else None
        return packed if isinstance(packed, StageFailed) else report.reply

    def close(self) -> None:
        """End all threads."""
        for thread in self.threads.values():
            thread.stop()
        for name, thread in self.threads.items():
            assert thread.join(LIMIT_S), f"{name} hangs"


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process becomes larger than `FULL_BYTES`; whoever writes more is told as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Threads that have all ended when the test has."""
    started = Threads()
    yield started
    started.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stage-")]


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

    def attach(self, *stages: str, **how: Any) -> WorkerHello:
        """Hear the hello, and wait until all stages are built."""
        hello = self.expect(WorkerHello)
        names = [offer.stage for offer in hello.stages]
        assert names == list(stages or ("draw", "show"))
        self.welcome(**how)
        assert {self.expect(StageReady).stage for _ in names} == set(names)
        return hello

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
def another_broker() -> Iterator[FakeBroker]:
    """A second one: each worker's part of a broker is played apart from the other's."""
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


class Toy:
    """What tests of the core take from here: importlib mode has no module to import from."""

    Rig = Rig
    spec = SPEC
    initialize = staticmethod(initialize)
    task = staticmethod(task)
    reserve = staticmethod(reserve)
    set_keys = staticmethod(set_keys)
    release = staticmethod(release)
    failed = staticmethod(failed)


@pytest.fixture(scope="session")
def toy() -> type[Toy]:
    return Toy


@pytest.fixture(scope="session")
def rig() -> Callable[..., Rig]:
    return Rig
