"""Whole worker processes of a group, with the broker's part played by a ROUTER socket of the test."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import reelwire
from reelwire import media, tensors, wire
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import (
    Artifact,
    FileOffer,
    FilePart,
    ForgetJob,
    GroupFormed,
    GroupOpened,
    Heartbeat,
    InitializeStage,
    JobEnded,
    JobFile,
    JobProgress,
    JoinGroup,
    LeadGroup,
    Member,
    RanksLost,
    ReleaseStage,
    RunJob,
    RunTask,
    StageInitialized,
    StageReady,
    StageReleased,
    StopJob,
    TaskDone,
    TaskStarted,
    WantFile,
    Welcome,
    WorkerHello,
)
from reelwire.workers import emulated, emulated_jobs

LIMIT_S = 60.0
SECRET = b"secret" * 5
PROGRAM = (
    "import json, sys\n"
    "from reelwire.workers.config import WorkerConfig\n"
    "from reelwire.workers.loop import run\n"
    "settings = json.loads(sys.argv[1])\n"
    "sys.exit(run(WorkerConfig(**settings), lambda name: print(json.dumps({'ready': name}), flush=True)))\n"
)


class Broker:
    """Says to each worker what the test wants, by its name, and answers heartbeats."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.routes: dict[str, bytes] = {}
        self.hellos: dict[str, WorkerHello] = {}
        self.unread: dict[str, deque[Any]] = {}
        self._names: dict[bytes, str] = {}

    def pump(self, limit_s: float) -> None:
        """Receive one batch."""
        assert self.socket.poll(int(max(0.0, limit_s) * 1000)), f"nothing came: {self.unread}"
        route, *frames = self.socket.recv_multipart()
        for message in wire.decode(frames, wire.TO_BROKER, wire.Limits()).messages:
            if isinstance(message, WorkerHello):
                self._names[route], self.routes[message.name] = message.name, route
                self.hellos[message.name] = message
                self.unread.setdefault(message.name, deque())
            name = self._names[route]
            if isinstance(message, Heartbeat):
                self.say(name, Heartbeat())
            else:
                self.unread[name].append(message)

    def expect(self, name: str, *kinds: type, skip: tuple[type, ...] = ()) -> Any:
        """The next message of one worker."""
        until = time.monotonic() + LIMIT_S
        while True:
            queue = self.unread.get(name, deque())
            while queue:
                message = queue.popleft()
                if isinstance(message, kinds):
                    return message
                assert isinstance(message, skip), message
            self.pump(until - time.monotonic())

    def say(self, name: str, message: Any) -> None:
        """To one worker."""
        self.socket.send_multipart([self.routes[name], *wire.encode(message, 1 + sorted(self.hellos).index(name))])

    def close(self) -> None:
        """Without waiting for anybody."""
        self.context.destroy(linger=0)


class Process:
    """One worker."""

    def __init__(self, broker: Broker, folder: Path, name: str, **settings: Any) -> None:
        given = {
            "broker": broker.endpoint,
            "name": name,
            "pipeline": "emulated",
            "options": {"encode_s": "0", "denoise_s": "0", "decode_s": "0"},
            "jobs": "emulated",
            "job_options": {"step_s": "0.02"},
            "scratch_dir": str(folder),
            "threads": 1,
            **settings,
        }
        self.errors = folder.parent / f"stderr-{name}"
        with self.errors.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, json.dumps(given)],
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def end(self) -> int:
        """Its exit code, when it has ended by itself."""
        return self.process.wait(LIMIT_S)

    def said(self) -> str:
        """What it has logged."""
        return self.errors.read_text()


@pytest.fixture
def broker() -> Iterator[Broker]:
    """Closed in the end."""
    made = Broker()
    yield made
    made.close()


@pytest.fixture
def start(broker: Broker, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts workers; none outlives the test, and none leaves a file."""
    started: list[Process] = []
    folder = tmp_path / "scratch"
    folder.mkdir()

    def start(name: str, **settings: Any) -> Process:
        started.append(Process(broker, folder, name, **settings))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(LIMIT_S)
        assert each.process.stdout is not None
        each.process.stdout.close()


def parameters(**given: Any) -> dict[str, Any]:
    kind = emulated_jobs.pipeline().jobs[0]
    return {each.name: given.get(each.name, each.default) for each in kind.parameters}


def group_of_two(broker: Broker, start: Callable[..., Process]) -> list[Process]:
    """Two ranks that have met."""
    names = ["r0", "r1"]
    processes = [start(name, group="g", rank=rank, world=2) for rank, name in enumerate(names)]
    for name in names:
        broker.expect(name, WorkerHello)
    for name in names:
        broker.say(name, Welcome(name, reelwire.__version__, 1.0, 30, {}))
    members = []
    for rank, name in enumerate(names):
        place = broker.hellos[name].group
        assert place is not None
        assert (place.group, place.rank, place.world, place.epoch) == ("g", rank, 2, 0)
        assert place.pid == processes[rank].process.pid
        members.append(Member(rank, place.machine, place.pid, place.started))
    assert len({broker.hellos[name].group.fingerprint for name in names}) == 1  # type: ignore[union-attr]
    broker.say("r0", LeadGroup(1, SECRET, tuple(members)))
    opened = broker.expect("r0", GroupOpened, skip=(StageReady,))
    broker.say("r1", JoinGroup(1, SECRET, tuple(members), opened.link, opened.store))
    broker.expect("r0", GroupFormed, skip=(StageReady,))
    return processes


def to_both(broker: Broker, body: Any) -> None:
    for name in ("r0", "r1"):
        broker.say(name, body)


def follow(broker: Broker, name: str, kind: type) -> tuple[list[JobProgress], Any]:
    """What is said of a job until a message of that kind comes."""
    told: list[JobProgress] = []
    while True:
        message = broker.expect(name, JobProgress, kind, skip=(StageReady,))
        if not isinstance(message, JobProgress):
            return told, message
        told.append(message)


def fetch(broker: Broker, name: str, offer: FileOffer) -> bytes:
    """A file that a worker has made, by its parts."""
    broker.say(name, WantFile(offer.file, 0, offer.parts))
    parts = [broker.expect(name, FilePart, skip=(JobProgress,)) for _ in range(offer.parts)]
    assert [part.index for part in parts] == list(range(offer.parts))
    data = b"".join(tensors.to_array(part.data).tobytes() for part in parts)
    assert hashlib.sha256(data).hexdigest() == offer.file
    return data


def chunk(index: int, sequence: int) -> RunTask:
    inputs = {"condition": Artifact({"mark": 1}), "control": Artifact()}
    return RunTask("s", "emulated", "denoise", 1, 1, index, inputs, index == 0, False, sequence=sequence)


def test_groups_02_a_group_from_its_forming_to_the_death_of_a_rank(
    broker: Broker, start: Callable[..., Process], tmp_path: Path
) -> None:
    """A job whose input nobody sees, a chunk that slips in, a result; then one rank is killed and the other leaves at once."""
    leader, rank = group_of_two(broker, start)
    content = np.random.default_rng(1).integers(0, 256, FILE_PART_BYTES + 5, np.uint8).tobytes()
    video = FileOffer(hashlib.sha256(content).hexdigest(), "/not/here", len(content))
    given = parameters(steps=30, switch=10, seed=4)
    to_both(broker, RunJob("j", 1, "emulated-v2v", given, {"video": (video,)}, None, 0, 12, 1))
    told, wanted = follow(broker, "r0", WantFile)
    assert [each.state for each in told] == ["preparing"]
    assert wanted == WantFile(video.file, 0, 2)
    for index in range(2):
        part = np.frombuffer(content[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES], np.uint8)
        broker.say("r0", FilePart(video.file, index, tensors.from_array(part)))
    told, _ = follow(broker, "r0", JobFile)
    to_both(broker, InitializeStage("s", "emulated", "denoise", 1, 1, 9, {"seed": 1}, {}, Artifact(), 2))
    broker.expect("r0", StageInitialized, skip=(JobProgress,))
    trails = []
    for index in range(2):
        to_both(broker, chunk(index, 3 + index))
        done = broker.expect("r0", TaskDone, skip=(JobProgress, TaskStarted))
        trails.append(done.facts["trail"])
    assert len(set(trails)) == 2
    broker.say("r0", ReleaseStage("s", "emulated", "denoise", 1, 1))
    broker.expect("r0", StageReleased, skip=(JobProgress, JobFile))
    told, made = follow(broker, "r0", JobFile)
    while made.role != "result":
        told, made = follow(broker, "r0", JobFile)
    assert told[-1].state == "encoding"
    frames, _ = media.read_video(_written(tmp_path, fetch(broker, "r0", made.offer)))
    shown = {(emulated.read(frame).index, emulated.read(frame).trail) for frame in frames}
    assert shown == {(30, made.facts["trail"])}
    (tmp_path / "video").write_bytes(content)
    assert made.facts["trail"] == emulated_jobs.expected_trail(given, {"video": (tmp_path / "video",)})
    broker.say("r0", ForgetJob("j", 1))

    to_both(broker, RunJob("k", 1, "emulated", parameters(steps=1000), {}, None, 0, 1000, 5))
    while broker.expect("r0", JobProgress, skip=(StageReady,)).step < 3:
        pass
    began = time.monotonic()
    rank.process.send_signal(signal.SIGKILL)
    lost = broker.expect("r0", RanksLost, skip=(JobProgress,))
    assert lost.ranks == (1,)
    assert leader.end() == 1
    assert time.monotonic() - began < 10.0
    assert "rank 1 of group g is gone" in leader.said()
    assert list((tmp_path / "scratch").glob("*/*")) == _folders_of(rank, tmp_path)


def _written(folder: Path, data: bytes) -> Path:
    path = folder / "result.mp4"
    path.write_bytes(data)
    return path


def _folders_of(killed: Process, tmp_path: Path) -> list[Path]:
    """What a killed process leaves behind, and nobody else does."""
    left = list((tmp_path / "scratch").glob("*/*"))
    assert len(left) == 1, f"{killed.process.pid} has left {left}"
    return left


def test_groups_11_a_cancelled_job_ends_and_all_ranks_leave_when_one_is_asked_to(
    broker: Broker, start: Callable[..., Process], tmp_path: Path
) -> None:
    """A job that is stopped is answered; SIGTERM to a rank that leads nobody has both leave in order, with exit code 0."""
    leader, rank = group_of_two(broker, start)
    to_both(broker, RunJob("j", 1, "emulated", parameters(steps=1000), {}, None, 0, 1000, 1))
    while broker.expect("r0", JobProgress, skip=(StageReady,)).step < 3:
        pass
    broker.say("r0", StopJob("j", 1))
    ended = broker.expect("r0", JobEnded, skip=(JobProgress,))
    assert (ended.state, ended.failure) == ("cancelled", None)
    broker.say("r0", ForgetJob("j", 1))
    to_both(broker, RunJob("f", 1, "emulated", parameters(steps=5, fail_at=2, fail_rank=1), {}, None, 0, 9, 2))
    ended = broker.expect("r0", JobEnded, skip=(JobProgress,))
    assert ended.failure.message == "rank 1: RuntimeError: step 2 fails, as asked for"
    broker.say("r0", ForgetJob("f", 1))
    to_both(broker, RunJob("n", 1, "emulated", parameters(steps=2), {}, None, 0, 9, 3))
    assert follow(broker, "r0", JobFile)[1].facts["steps"] == 2, "the ranks have met again"
    broker.say("r0", ForgetJob("n", 1))
    rank.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        while leader.process.poll() is None:
            broker.pump(0.2)  # both go on saying that they are there
    assert leader.end() == 0, leader.said()
    assert rank.end() == 0, rank.said()
    assert not list((tmp_path / "scratch").iterdir())


def test_groups_06_a_leader_that_others_can_not_reach_says_so(broker: Broker, start: Callable[..., Process]) -> None:
    """When it learns that one is on another machine; nobody waits until the time for the forming is over."""
    leader = start("r0", group="g", rank=0, world=2)
    broker.expect("r0", WorkerHello)
    broker.say("r0", Welcome("r0", reelwire.__version__, 1.0, 30, {}))
    place = broker.hellos["r0"].group
    assert place is not None
    members = (Member(0, place.machine, place.pid, place.started), Member(1, "far", place.pid, place.started))
    broker.say("r0", LeadGroup(1, SECRET, members))
    assert leader.end() == 1  # of a bare call; the command has a code for settings that are refused
    assert "group_host: '127.0.0.1' leads every machine to itself, and rank 1 is on another one" in leader.said()


def test_groups_12_a_worker_without_a_group_does_jobs_and_goes_on_from_a_checkpoint(
    broker: Broker, start: Callable[..., Process], tmp_path: Path
) -> None:
    """Whose file the broker has: read where it lies; no torch is needed for that, and no link."""
    worker = start("w")
    hello = broker.expect("w", WorkerHello)
    assert [spec.name for spec in hello.jobs] == ["emulated", "emulated-v2v", "emulated-rv2v"]
    broker.say("w", Welcome("w", reelwire.__version__, 1.0, 30, {}))
    broker.say("w", LeadGroup(1, SECRET, (Member(0, "m", 1),)))
    broker.expect("w", GroupFormed, skip=(StageReady,))
    given = parameters(steps=20, switch=5)
    broker.say("w", RunJob("j", 1, "emulated", given, {}, None, 0, 8, 1))
    _, kept = follow(broker, "w", JobFile)
    assert kept.role == "checkpoint"
    stored = tmp_path / "stored"
    stored.write_bytes(fetch(broker, "w", kept.offer))
    _, made = follow(broker, "w", JobFile)
    while made.role != "result":
        _, made = follow(broker, "w", JobFile)
    broker.say("w", ForgetJob("j", 1))
    offer = FileOffer(kept.offer.file, str(stored), kept.offer.nbytes)
    broker.say("w", RunJob("j", 2, "emulated", given, {}, offer, kept.step, 1000, 2))
    told, again = follow(broker, "w", JobFile)
    assert told[1].step + told[1].steps > 0
    assert [each.state for each in told][:2] == ["preparing", "running"]
    assert (again.offer.file, again.facts["trail"]) == (made.offer.file, made.facts["trail"]), "bit for bit"
    broker.say("w", ForgetJob("j", 2))
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 0, worker.said()
    assert not list((tmp_path / "scratch").iterdir())
