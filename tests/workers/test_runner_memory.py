"""The thread of a stage with shared memory: what it writes and reads there, and what it gives back."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire import tensors, wire
from reelwire.messages import Artifact, InitializeStage, RunTask, SegmentUse, StageFailed, TaskDone
from reelwire.pipeline.stage import Initialized, StageResult
from reelwire.segments import Pool
from reelwire.spec import Edge, StageSpec, StreamSpec
from reelwire.tensors import Inline, Shared, TensorRef
from reelwire.workers.memory import SharedMemory

SPEC = StreamSpec(
    name="toy",
    stages=(StageSpec("draw", ("control",), ("picture", "sketch")), StageSpec("show", ("picture",), ("frames",))),
    edges=(Edge("control"), Edge("picture"), Edge("sketch"), Edge("frames")),
    external_inputs=("control",),
    outputs=("frames", "sketch"),
    initialize_order=("draw", "show"),
    control="control",
    chunks_max=9,
    frames_first=1,
    frames_next=1,
    fps=1.0,
)
PIXELS = np.arange(50_000, dtype=np.float32)
SKETCH = np.arange(80_000).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it lies."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def memory(folder: Path) -> Iterator[SharedMemory]:
    """Shared memory of which nothing is left in the end."""
    made = SharedMemory(1 << 20)
    yield made
    made.close()
    assert list(folder.iterdir()) == []


def out(memory: SharedMemory) -> int:
    """How many pieces are out."""
    pool = memory._pool
    assert pool is not None
    return pool.outstanding


def pipeline(run: Callable[..., StageResult], library: str = "numpy") -> Any:
    stage = types.SimpleNamespace(
        session_bytes=1, initialize=lambda *_: Initialized(), run=run, release=lambda *_: None
    )
    return types.SimpleNamespace(spec=SPEC, array_library=library, build=lambda *_: stage)


def draw(*_: object, **__: object) -> StageResult:
    return StageResult({"picture": {"pixels": PIXELS, "n": 1}, "sketch": {"sketch": SKETCH}})


def begin(threads: Any, made: Any, memory: SharedMemory | None, stage: str = "draw") -> None:
    threads.start(made, stage, memory=memory)
    threads.do(InitializeStage("s", "toy", stage, 1, 1, 9, {}, {}, Artifact()), stage)


def task(index: int = 0, *shared: str) -> RunTask:
    return RunTask("s", "toy", "draw", 1, 1, index, {"control": Artifact()}, True, False, shared=shared)


def show(picture: Artifact, index: int = 0) -> RunTask:
    return RunTask("s", "toy", "show", 1, 1, index, {"picture": picture}, True, False, shared=("frames",))


def test_only_what_all_readers_can_map_is_shared(threads: Any, memory: SharedMemory) -> None:
    """By artifact, as the task says; the report says which pieces the result stands in."""
    begin(threads, pipeline(draw), memory)
    report = threads.do(task(0, "picture"))
    assert isinstance(report.reply, TaskDone)
    place = report.reply.outputs["picture"].tensors["pixels"].place
    assert isinstance(place, Shared)
    assert report.pieces == (SegmentUse(place.segment, place.generation),)
    assert bytes(memory.view(place, PIXELS.nbytes)) == PIXELS.tobytes()
    assert isinstance(report.reply.outputs["sketch"].tensors["sketch"].place, Inline)
    report = threads.do(task(1))
    assert report.pieces == ()
    assert isinstance(report.reply.outputs["picture"].tensors["pixels"].place, Inline)
    assert out(memory) == 1


def test_a_result_has_the_same_bytes_either_way(threads: Any, memory: SharedMemory) -> None:
    """Through both stages, shared and inline; a stage may keep its inputs, and they can't be written to."""
    kept: list[Any] = []

    def run(*given: Any, **how: Any) -> StageResult:
        if "picture" not in given[2]:
            return draw()
        kept.append(given[2]["picture"]["pixels"])
        return StageResult({"frames": {"frames": np.sqrt(kept[-1])}})

    made = pipeline(run)
    for stage in ("draw", "show"):
        begin(threads, made, memory, stage)
    results = []
    for index, shared in enumerate([("picture",), ()]):
        drawn = threads.do(task(index, *shared))
        shown = threads.do(show(drawn.reply.outputs["picture"], index), "show")
        frames = shown.reply.outputs["frames"].tensors["frames"]
        assert isinstance(frames.place, Shared)
        results.append(bytes(memory.view(frames.place, frames.nbytes)))
        memory.take_back([*drawn.pieces, *shown.pieces])
    assert results[0] == results[1]
    assert all(np.array_equal(each, PIXELS) and not each.flags.writeable for each in kept)


def test_a_full_pool_is_no_failure(threads: Any, folder: Path) -> None:
    """What doesn't fit travels with the message."""
    memory = SharedMemory(300_000)
    begin(threads, pipeline(draw), memory)
    report = threads.do(task(0, "picture", "sketch"))
    assert isinstance(report.reply.outputs["picture"].tensors["pixels"].place, Shared)
    assert isinstance(report.reply.outputs["sketch"].tensors["sketch"].place, Inline)
    assert len(report.pieces) == 1
    memory.close()


def test_without_shared_memory_everything_travels_in_messages(threads: Any) -> None:
    """Although the broker asks for it, which it doesn't."""
    begin(threads, pipeline(draw), None)
    report = threads.do(task(0, "picture"))
    assert isinstance(report.reply.outputs["picture"].tensors["pixels"].place, Inline)
    assert report.pieces == ()


@pytest.mark.parametrize(
    "result",
    [
        StageResult({"picture": {"pixels": PIXELS, "more": object()}, "sketch": {}}),
        StageResult({"picture": {"pixels": PIXELS}, "sketch": {"c": np.zeros(2, np.complex64)}}),
        StageResult({"picture": {"pixels": PIXELS}, "sketch": {}}, {"wrong": object()}),
    ],
    ids=["a value", "an array", "a fact"],
)
def test_a_stage_that_fails_after_it_took_memory_gives_it_back(
    threads: Any, memory: SharedMemory, result: StageResult
) -> None:
    """Before the failure is told; the report names no piece."""
    begin(threads, pipeline(lambda *_, **__: result), memory)
    report = threads.do(task(0, "picture", "sketch"))
    assert isinstance(report.reply, StageFailed)
    assert report.pieces == ()
    assert out(memory) == 0
    memory.take_back(threads.do(task(1, "picture")).pieces)


def test_a_result_that_fits_in_no_message_names_the_memory_that_it_took(threads: Any, memory: SharedMemory) -> None:
    """Another stage may have been given it by then, so whoever is told of the failure takes the memory back."""
    long = StageResult({"picture": {"pixels": PIXELS}, "sketch": {}}, {"long": "x" * (2 << 20)})
    begin(threads, pipeline(lambda *_, **__: long), memory)
    report = threads.do(task(0, "picture", "sketch"))
    assert isinstance(report.pack(), StageFailed)
    assert len(report.pieces) == out(memory) == 1
    memory.take_back(report.pieces)
    assert out(memory) == 0


def test_the_largest_tensor_is_the_same_either_way(threads: Any, memory: SharedMemory) -> None:
    """What the broker wouldn't take fails here, by name, and its memory is free; a message's sum counts no shared one."""
    begin(threads, pipeline(draw), memory)
    threads.threads["draw"].limits = wire.Limits(frame_bytes_max=PIXELS.nbytes, message_bytes_max=100_000)
    report = threads.do(task(0, "picture"))
    assert isinstance(report.reply, TaskDone)
    memory.take_back(report.pieces)
    threads.threads["draw"].limits = wire.Limits(frame_bytes_max=PIXELS.nbytes - 1)
    for index, shared in enumerate([("picture",), ()], start=1):
        report = threads.do(task(index, *shared))
        assert isinstance(report.reply, StageFailed)
        assert "200000 bytes; accepted: 199999" in report.reply.failure.message
        assert ("picture.pixels takes" in report.reply.failure.message) == bool(shared)
        assert report.pieces == ()
        assert out(memory) == 0


def test_an_input_whose_producer_is_lost_is_named(threads: Any, memory: SharedMemory, tmp_path: Path) -> None:
    """The failure is the lost worker's; the stage isn't run, and the thread goes on."""
    ran: list[Any] = []

    def run(*given: Any, **_: Any) -> StageResult:
        ran.append(given)
        return StageResult({"frames": {}})

    other = Pool(1 << 20, tmp_path)
    piece = other.take(PIXELS.nbytes)
    assert piece is not None
    lost = Artifact({}, {"pixels": TensorRef("float32", PIXELS.shape, piece.place)})
    other.close()
    begin(threads, pipeline(run), memory, "show")
    reply = threads.do(show(lost, 3), "show").reply
    assert isinstance(reply, StageFailed)
    assert (reply.failure.kind, reply.failure.stage, reply.failure.index) == ("worker_lost", "show", 3)
    assert reply.failure.message.startswith("show: picture of chunk 3 is lost with the worker that made it: ")
    assert piece.place.segment in reply.failure.message
    assert ran == []
    whole = Artifact({}, {"pixels": tensors.from_array(PIXELS)})
    assert isinstance(threads.do(show(whole, 4), "show").reply, TaskDone)


@pytest.mark.parametrize("nbytes", [(1 << 40), 1 << 21])
def test_an_input_that_claims_more_than_there_is_fails_its_task_only(
    threads: Any, memory: SharedMemory, tmp_path: Path, nbytes: int
) -> None:
    """Whoever sent the reference is wrong; nothing beyond the segment is touched."""
    other = Pool(1 << 20, tmp_path)
    piece = other.take(100_000)
    assert piece is not None
    wrong = Artifact({}, {"pixels": TensorRef("uint8", (nbytes,), piece.place)})
    begin(threads, pipeline(draw), memory, "show")
    reply = threads.do(show(wrong), "show").reply
    assert isinstance(reply, StageFailed)
    assert reply.failure.kind == "worker_lost"
    other.close()


def test_a_torch_pipeline_writes_and_reads_shared_memory(threads: Any, memory: SharedMemory) -> None:
    """Its inputs are its own, aligned and writable; bfloat16 goes both ways."""
    import torch

    seen: list[torch.Tensor] = []

    def run(*given: Any, **_: Any) -> StageResult:
        if "picture" in given[2]:
            seen.append(given[2]["picture"]["pixels"])
            return StageResult({"frames": {"frames": seen[-1].float()}})
        made = torch.arange(60_000).to(torch.bfloat16).reshape(200, 300).T
        return StageResult({"picture": {"pixels": made}, "sketch": {}})

    made = pipeline(run, "torch")
    for stage in ("draw", "show"):
        begin(threads, made, memory, stage)
    drawn = threads.do(task(0, "picture"))
    threads.do(show(drawn.reply.outputs["picture"]), "show")
    memory.take_back(drawn.pieces)
    assert threads.do(task(1, "picture")).pieces[0].generation == 2
    assert torch.equal(seen[0], torch.arange(60_000).to(torch.bfloat16).reshape(200, 300).T)
    assert seen[0].data_ptr() % 64 == 0
    seen[0].zero_()
