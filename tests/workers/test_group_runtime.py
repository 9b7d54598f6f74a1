"""What a loop does for its group, with the loop's part played by the test: files and results on threads of their own."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from reelwire import tensors, wire
from reelwire.errors import ConfigError
from reelwire.group_messages import RankHello
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import Artifact, FileGone, FileOffer, FilePart, InitializeStage, Member, RunJob, RunTask
from reelwire.pipeline.job import JobOutput
from reelwire.tensors import Shared, TensorRef
from reelwire.workers import emulated, emulated_jobs
from reelwire.workers.checkpoints import read_values, snapshot_of
from reelwire.workers.config import WorkerConfig
from reelwire.workers.group_events import (
    Do,
    DropFiles,
    FilesFound,
    FindFiles,
    FrameEncoded,
    LoadJobs,
    MakeResult,
    OpenLink,
    OrderReport,
    PartWritten,
    ResultMade,
    SendParts,
    TakeIn,
    TakenIn,
    WriteCheckpoint,
    WritePart,
)
from reelwire.workers.group_loop import GroupRuntime
from reelwire.workers.memory import SharedMemory

from .conftest import FULL_BYTES

LIMIT_S = 30.0
CONTENT = np.random.default_rng(3).integers(0, 256, FILE_PART_BYTES + 1, np.uint8)
FRAMES = np.zeros((1, 16, 16, 3), np.uint8)


class FakeLoop:
    """Keeps what it is told; the connection to the broker has the number 1."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.faults: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def post(self, event: Any) -> None:
        """An event of another thread."""
        self.events.put(event)

    def report(self, report: OrderReport) -> None:
        """Of the group thread."""
        self.events.put(report)

    def say(self, connection: int, attachment: int, message: FilePart | FileGone) -> bool:
        """A part of a file."""
        self.said.put((connection, attachment, message))
        return connection == 1

    def broken(self, error: BaseException) -> None:
        """A fault."""
        self.faults.put(error)


def runtime(scratch: Path, context: zmq.Context[Any], loop: FakeLoop) -> GroupRuntime:
    config = WorkerConfig(name="w", scratch_dir=str(scratch))
    jobs, stream = emulated_jobs.pipeline(), emulated.pipeline()
    return GroupRuntime(config, stream, (), jobs, 1, context, zmq.Poller(), SharedMemory(0), loop)


class Rig:
    """A `GroupRuntime` and its loop."""

    def __init__(self, scratch: Path) -> None:
        self.loop = FakeLoop()
        self.context: zmq.Context[Any] = zmq.Context()
        self.runtime = runtime(scratch, self.context, self.loop)
        self.frames = 0  # that were encoded

    def did(self, action: Any) -> Any:
        """What comes of an action in the end."""
        self.runtime.perform(action, 1)
        while isinstance(event := self.loop.events.get(timeout=LIMIT_S), FrameEncoded):
            self.frames += 1
        return event

    def close(self) -> None:
        """All threads have ended, and nothing is left."""
        assert self.runtime.close(LIMIT_S) == []
        self.context.term()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Closed in the end."""
    made = Rig(tmp_path / "scratch")
    yield made
    made.close()
    assert not list((tmp_path / "scratch").iterdir())
    assert not [each for each in threading.enumerate() if each.name in ("group", "files", "results")]


def test_strangers_on_the_link_are_in_the_log_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they knock; how often it was is said when the link is closed."""
    said: list[tuple[str, Any]] = []
    log = types.SimpleNamespace(
        warning=lambda event, **fields: said.append((event, fields["reason"])),
        info=lambda event, **fields: said.append((event, fields["dropped"])),
    )
    monkeypatch.setattr(rig.runtime, "_log", log)
    opened = rig.did(OpenLink(3, b"secret", (Member(0, "", 0),)))
    stranger = rig.context.socket(zmq.DEALER)
    try:
        stranger.connect(opened.link)
        until = time.monotonic() + LIMIT_S
        while len(said) < 2:
            assert time.monotonic() < until, "nothing is said"
            stranger.send(b"")
            stranger.send_multipart(wire.encode(RankHello(3, b"wrong", 1), 3))
            assert list(rig.runtime.receive()) == []
    finally:
        stranger.close(linger=0)
        rig.runtime._part()
    assert said[:2] == [("link_message_dropped", "malformed"), ("link_message_dropped", "stranger")]
    (closed,) = said[2:]
    assert closed[0] == "link_closed"
    assert closed[1].keys() == {"malformed", "stranger"}


def run(*offers: FileOffer) -> RunJob:
    return RunJob("j", 1, "emulated", {}, {"video": offers}, None, 0, 10, 7)


def test_a_file_is_fetched_and_dropped(rig: Rig) -> None:
    """It is missing, comes in parts, is found by the next job, and goes with the last one that holds it."""
    data = CONTENT.tobytes()
    offer = FileOffer(hashlib.sha256(data).hexdigest(), "/nowhere", len(data))
    found = rig.did(FindFiles(run(offer)))
    assert isinstance(found, FilesFound)
    assert (found.sequence, found.files, found.missing) == (7, {}, (offer,))
    written: list[Any] = []
    for index in range(2):
        part = CONTENT[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]
        written.append(rig.did(WritePart(offer, FilePart(offer.file, index, tensors.from_array(part)))))
    assert [(each.parts, bool(each.path), each.failure) for each in written] == [(1, False, None), (2, True, None)]
    assert rig.did(FindFiles(run(offer))).files == {offer.file: written[1].path}
    rig.runtime.perform(DropFiles("j", 1), 1)
    assert rig.did(FindFiles(run(offer))).missing == (offer,)


def test_a_part_that_is_wrong_is_a_failure(rig: Rig) -> None:
    """Told as one of the file, not of the process."""
    offer = FileOffer("0" * 64, "/nowhere", 5)
    written = rig.did(WritePart(offer, FilePart(offer.file, 0, tensors.from_array(np.zeros(5, np.uint8)))))
    assert isinstance(written, PartWritten)
    assert written.failure is not None
    assert "SHA-256" in written.failure.message


def test_groups_12_a_checkpoint_is_written_and_goes_with_its_attempt(rig: Rig) -> None:
    """It holds what was taken; an older one goes when it is named, and all of the attempt in the end."""
    written = [rig.did(WriteCheckpoint("j", 1, step, snapshot_of({"step": step}))) for step in (3, 4)]
    paths = [Path(each.offer.path) for each in written]
    assert [(each.step, each.failure) for each in written] == [(3, None), (4, None)]
    assert [read_values(path, "numpy") for path in paths] == [{"step": 3}, {"step": 4}]
    rig.runtime.perform(DropFiles("j", 1, "checkpoint", paths[1].name), 1)
    rig.did(FindFiles(run()))
    assert [path.exists() for path in paths] == [False, True]
    rig.runtime.perform(DropFiles("j", 1), 1)
    rig.did(FindFiles(run()))
    assert not paths[1].exists()


def test_groups_12_a_checkpoint_that_has_no_room_is_told(rig: Rig, full_disk: None) -> None:
    """As a lack of room; nothing of it stays."""
    written = rig.did(WriteCheckpoint("j", 1, 3, snapshot_of({"x": np.zeros(FULL_BYTES, np.uint8)})))
    assert (written.step, written.offer, written.failure.kind) == (3, None, "overload")
    assert [path.name for path in rig.runtime._files.folder.iterdir()] == ["lock"]


def test_a_result_is_made_and_sent(rig: Rig) -> None:
    """With its facts; its parts go to whoever asks over the connection that there is, and no further over another."""
    made = rig.did(MakeResult("j", 1, ".png", JobOutput(FRAMES, facts={"x": 1})))
    assert isinstance(made, ResultMade)
    assert made.offer is not None
    assert made.facts == {"x": 1}
    rig.runtime.perform(SendParts(4, made.offer.file, 0, 9), 1)
    connection, attachment, part = rig.loop.said.get(timeout=LIMIT_S)
    assert (connection, attachment, part.index) == (1, 4, 0)
    rig.runtime.perform(SendParts(4, "f" * 64, 0, 9), 2)
    assert isinstance(rig.loop.said.get(timeout=LIMIT_S)[2], FileGone)


@pytest.mark.parametrize(
    ("output", "says"),
    [(JobOutput(FRAMES, 5000.0), "5000.0 is not accepted"), (JobOutput(FRAMES[:, :0]), "the result can't be written")],
)
def test_a_result_that_can_not_be_written_is_a_failure_of_its_job(rig: Rig, output: JobOutput, says: str) -> None:
    """The encoder takes the next."""
    made = rig.did(MakeResult("j", 1, ".mp4", output))
    assert made.offer is None
    assert says in made.failure.message
    assert rig.did(MakeResult("j", 1, ".mp4", JobOutput(FRAMES))).failure is None
    assert rig.frames == len(FRAMES)


def test_groups_01_a_body_is_taken_in_at_once(rig: Rig) -> None:
    """Or it is told that its tensors are lost with the worker that made them."""
    lost = {"x": Artifact({}, {"x": TensorRef("uint8", (4,), Shared("gone", "segment", 1))})}
    bodies: list[Any] = [
        RunTask("s", "p", "denoise", 1, 1, 0, {"x": Artifact({"a": 1})}, True, False, sequence=3),
        RunTask("s", "p", "denoise", 1, 1, 0, lost, True, False, sequence=4),
        InitializeStage("s", "p", "denoise", 1, 1, 9, {}, {}, Artifact({"b": 2}), 5),
        InitializeStage("s", "p", "denoise", 1, 1, 9, {}, lost["x"].tensors, Artifact(), 6),
    ]
    for body in bodies:
        rig.runtime.perform(TakeIn(body), 1)
    taken: list[Any] = list(rig.runtime.happened())
    assert all(isinstance(each, TakenIn) for each in taken)
    assert [each.body for each in taken] == bodies
    assert [None if each.failure is None else each.failure.kind for each in taken] == [
        None,
        "worker_lost",
        None,
        "worker_lost",
    ]
    assert list(rig.runtime.happened()) == []


def test_a_fault_on_a_thread_of_ours_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process, and isn't lost with the thread; that goes on."""
    broken: Any = None
    monkeypatch.setattr(rig.runtime._files, "find", broken)
    rig.runtime.perform(FindFiles(run()), 1)
    assert isinstance(rig.loop.faults.get(timeout=LIMIT_S), TypeError)
    assert rig.did(Do(LoadJobs())).failure is None


def test_a_folder_that_can_not_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "file").write_text("no folder")
    with zmq.Context() as context, pytest.raises(ConfigError, match="scratch_dir"):
        runtime(tmp_path / "file", context, FakeLoop())


def test_a_thread_that_hangs_leaves_no_files_behind(tmp_path: Path) -> None:
    """It is named, because the process must end without it; nobody would remove the scratch folder after that."""
    scratch, began, go_on = tmp_path / "scratch", threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        go_on.wait(LIMIT_S)

    hung = Rig(scratch)
    hung.runtime._chores.do(hang)
    assert began.wait(LIMIT_S)
    assert "files" in hung.runtime.close(0.5)
    assert not list(scratch.iterdir())
    go_on.set()
    assert hung.runtime._chores.join(LIMIT_S)
    hung.context.term()
