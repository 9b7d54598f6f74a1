"""Real worker processes and their shared memory: from one to the other, and nothing left however they end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire.messages import (
    Artifact,
    Draining,
    Goodbye,
    Heartbeat,
    InitializeStage,
    MemoryProbed,
    ProbeMemory,
    ReleaseStage,
    ReturnSegments,
    RunTask,
    SegmentUse,
    StageFailed,
    StageInitialized,
    StageReleased,
    TaskDone,
    TaskStarted,
)
from reelwire.segments import Pool, Reader
from reelwire.tensors import Inline, Shared, TensorRef, to_array
from reelwire.workers.values import from_artifact

LIMIT_S = 30.0
WIDTH = 32_768
WIDE = ("--option", f"width={WIDTH}")


@pytest.fixture
def folder(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all processes of a test write; nothing is left there in the end."""
    with tempfile.TemporaryDirectory(dir=shared_memory) as made:
        monkeypatch.setenv("REELWIRE_SHARED_MEMORY", made)
        yield Path(made)
        assert list(Path(made).iterdir()) == []


@pytest.fixture
def reader(folder: Path) -> Iterator[Reader]:
    """Another process's eyes: the test's own."""
    made = Reader(folder)
    yield made
    made.close()


def own(folder: Path, owner: str) -> Path:
    """The folder of one worker."""
    return folder / f"reelwire-{os.geteuid()}" / owner


def initialize(stage: str = "draw") -> InitializeStage:
    return InitializeStage("s", "toy", stage, 1, 1, 9, {"seed": 7}, {}, Artifact())


def draw(index: int, *keys: str, shared: tuple[str, ...] = ("picture",)) -> RunTask:
    control = Artifact({"keys": list(keys)})
    return RunTask("s", "toy", "draw", 1, 1, index, {"control": control}, index == 0, False, shared=shared)


def show(index: int, picture: Artifact) -> RunTask:
    return RunTask("s", "toy", "show", 1, 1, index, {"picture": picture}, index == 0, False, shared=("frames",))


def live(broker: Any, stage: str = "draw", **how: Any) -> Any:
    """Attach a worker of one stage, with a session; its hello."""
    hello = broker.attach(stage, **how)
    broker.say(initialize(stage))
    broker.expect(StageInitialized)
    return hello


def done(broker: Any, task: RunTask) -> TaskDone:
    broker.say(task)
    broker.expect(TaskStarted)
    result: TaskDone = broker.expect(TaskDone)
    return result


def use(ref: TensorRef) -> SegmentUse:
    assert isinstance(ref.place, Shared)
    return SegmentUse(ref.place.segment, ref.place.generation)


def test_a_chunk_passes_two_processes_through_shared_memory(
    broker: Any, another_broker: Any, start: Callable[..., Any], folder: Path, reader: Reader
) -> None:
    """Written by one, mapped by the other and by the client; the messages hold references, the frames are the same."""
    drawing = start(broker.endpoint, *WIDE, "--stages", "draw")
    showing = start(another_broker.endpoint, *WIDE, "--stages", "show")
    hellos = live(broker), live(another_broker, "show")
    assert hellos[0].memory.owner != hellos[1].memory.owner
    for offer in (hellos[0].memory, hellos[1].memory):
        for each in (broker, another_broker):
            each.say(ProbeMemory(offer.owner))
            assert each.expect(MemoryProbed) == MemoryProbed(offer.owner, offer.probe)
        assert reader.probe(offer.owner) == offer.probe
    total = 0
    for index in range(3):
        picture = done(broker, draw(index, "w")).outputs["picture"]
        frames = done(another_broker, show(index, picture)).outputs["frames"]
        total += 7 + index
        pixels = from_artifact(frames, "numpy", reader.view)["frames"]
        assert pixels.shape == (1 + (index > 0), 1, WIDTH, 3)
        assert set(pixels.flat) == {total}
        assert use(picture.tensors["pixels"]) == SegmentUse("s1", index + 1), "the same segment, used again"
        assert frames.tensors["frames"].place.owner == hellos[1].memory.owner  # type: ignore[union-attr]
        broker.say(ReturnSegments((use(picture.tensors["pixels"]),)))
        another_broker.say(ReturnSegments((use(frames.tensors["frames"]),)))
    inline = done(broker, draw(3, shared=())).outputs["picture"]
    assert isinstance(inline.tensors["pixels"].place, Inline)
    shown = done(another_broker, show(3, inline)).outputs["frames"]
    assert set(from_artifact(shown, "numpy", reader.view)["frames"].flat) == {total + 10}
    for worker, each in ((drawing, broker), (showing, another_broker)):
        each.say(ReleaseStage("s", "toy", "draw" if each is broker else "show", 1, 1))
        each.expect(StageReleased)
        if each is another_broker:
            each.say(ReturnSegments((use(shown.tensors["frames"]),)))
        worker.process.send_signal(signal.SIGTERM)
        assert worker.end() == 0


def test_streaming_37_a_worker_that_is_asked_to_stop_waits_for_its_readers(
    broker: Any, start: Callable[..., Any], folder: Path, reader: Reader
) -> None:
    """Its sessions are gone, but somebody has yet to map what it made; then it leaves, and nothing is left of it."""
    worker = start(broker.endpoint, *WIDE, "--stages", "draw")
    hello = live(broker, heartbeat_s=0.2)
    pixels = done(broker, draw(0, "w")).outputs["picture"].tensors["pixels"]
    broker.say(ReleaseStage("s", "toy", "draw", 1, 1))
    broker.expect(StageReleased)
    worker.process.send_signal(signal.SIGTERM)
    broker.expect(Draining)
    for _ in range(3):
        assert isinstance(broker.receive(), Heartbeat), "it goes on saying that it is there"
    assert isinstance(pixels.place, Shared)
    array = np.frombuffer(reader.view(pixels.place, pixels.nbytes), np.int64)
    assert set(array.flat) == {7}
    broker.say(ReturnSegments((use(pixels),)))
    broker.expect(Goodbye)
    assert worker.end() == 0
    assert not own(folder, hello.memory.owner).exists()
    assert set(array.flat) == {7}, "a mapping outlives its name"


def test_memory_that_went_over_a_lost_attachment_is_never_written_again(
    broker: Any, start: Callable[..., Any], folder: Path, reader: Reader
) -> None:
    """It has no name any more, who has it mapped reads on, and the next attachment gets other segments."""
    worker = start(broker.endpoint, *WIDE, "--stages", "draw")
    hello = live(broker)
    before = done(broker, draw(0, "w")).outputs["picture"].tensors["pixels"]
    assert isinstance(before.place, Shared)
    array = np.frombuffer(reader.view(before.place, before.nbytes), np.int64)
    broker.say(Goodbye("the broker leaves"))
    again = live(broker)
    assert again.memory == hello.memory
    assert sorted(path.name for path in own(folder, hello.memory.owner).iterdir()) == ["lock", "probe"]
    broker.say(ReturnSegments((use(before),)))
    after = done(broker, draw(0, "w")).outputs["picture"].tensors["pixels"]
    assert use(after).segment != use(before).segment
    assert set(array.flat) == {7}
    worker.process.send_signal(signal.SIGTERM)
    broker.expect(Draining)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 1


def test_a_lost_producer_fails_the_task_that_would_read(
    broker: Any, another_broker: Any, start: Callable[..., Any], folder: Path
) -> None:
    """By kind and by name. The next worker removes what the killed one left, and says so."""
    drawing = start(broker.endpoint, *WIDE, "--stages", "draw")
    hello = live(broker)
    picture = done(broker, draw(0, "w")).outputs["picture"]
    drawing.process.kill()
    drawing.process.wait()
    assert own(folder, hello.memory.owner).exists()
    showing = start(another_broker.endpoint, *WIDE, "--stages", "show")
    live(another_broker, "show")
    assert not own(folder, hello.memory.owner).exists()
    assert hello.memory.owner in showing.said()
    another_broker.say(show(0, picture))
    another_broker.expect(TaskStarted)
    failure = another_broker.expect(StageFailed).failure
    assert (failure.kind, failure.stage, failure.index) == ("worker_lost", "show", 0)
    assert hello.memory.owner in failure.message
    another_broker.say(Goodbye())
    another_broker.welcome(2)
    showing.process.send_signal(signal.SIGTERM)
    assert showing.end() == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of a process's mappings here")
def test_memory_of_a_producer_that_is_gone_is_let_go(broker: Any, start: Callable[..., Any], folder: Path) -> None:
    """Within a heartbeat, although no task comes any more that would map something."""
    worker = start(broker.endpoint, *WIDE, "--stages", "show")
    live(broker, "show", heartbeat_s=0.1)
    other = Pool(1 << 20)
    nbytes = 8 * WIDTH
    piece = other.take(nbytes)
    assert piece is not None
    piece.view[:] = bytes(nbytes)
    picture = Artifact({}, {"pixels": TensorRef("int64", (WIDTH,), piece.place)})
    done(broker, show(0, picture))
    maps = Path(f"/proc/{worker.process.pid}/maps")
    assert other.owner in maps.read_text()
    other.close()
    until = time.monotonic() + LIMIT_S
    while other.owner in maps.read_text():
        assert time.monotonic() < until
        broker.receive()
    worker.process.send_signal(signal.SIGTERM)
    broker.expect(Draining)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 1


def test_a_worker_without_shared_memory_says_nothing_of_it(
    broker: Any, start: Callable[..., Any], folder: Path
) -> None:
    """Switched off: no offer, no folder, no probe, and the tensors in the message."""
    worker = start(broker.endpoint, *WIDE, "--stages", "draw", shared_memory_bytes_max=0)
    assert live(broker).memory is None
    broker.say(ProbeMemory("abc"))
    assert broker.expect(MemoryProbed) == MemoryProbed("abc", b"")
    pixels = done(broker, draw(0, "w")).outputs["picture"].tensors["pixels"]
    assert set(to_array(pixels).flat) == {7}
    worker.process.kill()


def test_a_machine_without_shared_memory_is_told_once(
    broker: Any, start: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log; the worker serves as ever."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(folder / "missing"))
    worker = start(broker.endpoint, *WIDE, "--stages", "draw")
    assert live(broker).memory is None
    assert worker.said().count("no_shared_memory") == 1
    assert isinstance(done(broker, draw(0)).outputs["picture"].tensors["pixels"].place, Inline)
    worker.process.kill()


def test_a_hung_stage_does_not_keep_the_memory(broker: Any, start: Callable[..., Any], folder: Path) -> None:
    """The process that ends itself under a thread that never returns removes it first."""
    worker = start(broker.endpoint, *WIDE, "--stages", "draw")
    live(broker)
    done(broker, draw(0, "w"))
    broker.say(draw(1, "d"))
    broker.expect(TaskStarted)
    worker.process.send_signal(signal.SIGTERM)
    broker.expect(Draining)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 1


@pytest.mark.parametrize(
    ("flags", "version", "code"),
    [
        (("--option", "trouble=request"), "", 2),
        (("--option", "trouble=crash"), "", 1),
        (("--stages", "paint"), None, 2),
        ((), "99.1.0", 3),
    ],
    ids=["a setting", "a crash", "before it connects", "a version"],
)
def test_nothing_is_left_of_a_worker_that_never_served(
    broker: Any, start: Callable[..., Any], folder: Path, flags: tuple[str, ...], version: str | None, code: int
) -> None:
    """Whatever ends it."""
    worker = start(broker.endpoint, *flags)
    if version is not None:
        assert broker.receive().memory is not None
        broker.welcome(version=version)
    assert worker.end() == code
