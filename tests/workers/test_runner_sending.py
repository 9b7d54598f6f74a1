"""What a stage's thread lets through to the broker: nothing that would cost the worker its attachment."""

from __future__ import annotations

import queue
import threading
import types
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reelwire import wire
from reelwire.codec import PLAIN_DEPTH_MAX
from reelwire.errors import WireError
from reelwire.messages import Artifact, InitializeStage, RunTask, StageFailed, StageInitialized, TaskDone
from reelwire.pipeline.stage import Initialized, StageResult
from reelwire.workers.actions import BuildStage, Job
from reelwire.workers.events import Finished
from reelwire.workers.runner import StageThread, load

PIPELINE = f"{Path(__file__).parent / 'numpy_pipeline.py'}:build"
LIMIT_S = 30.0
SMALL = wire.Limits(frame_bytes_max=40, header_bytes_max=200, frames_max=4, message_bytes_max=250)
LARGEST_ATTACHMENT = (1 << 63) - 1


class Name(str):
    """A text of another type."""

    __slots__ = ()


def deep(levels: int) -> Any:
    """Lists in each other, the innermost empty."""
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


endless: list[Any] = []
endless.append(endless)
texts = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(["\ud800", "x" * 300])
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 66), 1 << 66)
    | st.floats()
    | st.binary(max_size=60)
    | texts
    | st.integers(PLAIN_DEPTH_MAX - 2, PLAIN_DEPTH_MAX + 3).map(deep)
)
plain = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))
odd = st.sampled_from(
    [
        np.float32(2), np.longdouble(1), np.datetime64("2020-01-01"), np.zeros((1,) * 9), np.zeros((1,) * 18, bool),
        np.zeros(2, np.complex64), np.array("text"), np.array([{"a": object()}]), np.arange(4, dtype=">i2"),
        np.zeros((2, 0, 3)), np.zeros(50, np.uint8), 1j, object(), {1: 2}, {b"x": 1}, {Name("x"): Name("y")}, {1, 2},
        range(3), (1, (2, 3)), endless, types.MappingProxyType({"a": (1,)}), deep(600),
    ]
)  # fmt: skip
names = texts | st.integers() | st.binary(max_size=3) | st.sampled_from([None, Name("named"), ("a",)])
maps = st.dictionaries(names, plain | odd, max_size=5)


class Given:
    """A stage that makes what it is told to, on a thread; and what becomes of it."""

    def __init__(self, threads: Any) -> None:
        self.result = StageResult({})
        self.handed: Any = {}
        self.threads = threads
        stage = types.SimpleNamespace(
            session_bytes=1,
            initialize=lambda *_: Initialized(self.handed),
            run=lambda *_, **__: self.result,
            release=lambda *_: None,
        )
        spec = load(PIPELINE, {}).spec
        threads.start(types.SimpleNamespace(spec=spec, array_library="numpy", build=lambda *_: stage))
        self.initialize()

    def limit(self, limits: wire.Limits) -> None:
        """So much the broker accepts."""
        self.threads.threads["draw"].limits = limits

    def initialize(self) -> Any:
        """Report of an initialization."""
        return self.threads.do(InitializeStage("s", "toy", "draw", 1, 1, 9, {}, {}, Artifact()))

    def run(self, outputs: Any, facts: Any) -> Any:
        """Report of a task that made this; if that fits in no message, of its failure."""
        self.result = StageResult(outputs, facts)
        report = self.threads.do(RunTask("s", "toy", "draw", 1, 1, 0, {"control": Artifact()}, True, False))
        packed = report.pack() if report.pack else None
        return replace(report, reply=packed) if isinstance(packed, StageFailed) else report


def arrives(report: Any, limits: wire.Limits) -> None:
    """What is sent for a report is what the broker takes for its reply."""
    packed = report.pack() if report.pack else wire.pack(report.reply)
    frames = wire.Batch(LARGEST_ATTACHMENT, packed, limits).frames()
    (message,) = wire.decode(frames, wire.TO_BROKER, limits).messages
    assert type(message) is type(report.reply)
    assert wire.encode(message, 0) == wire.encode(report.reply, 0)


def accepted(message: Any, limits: wire.Limits) -> bool:
    """Whether the broker would take a message, its header as long as any."""
    try:
        frames = wire.encode(message, LARGEST_ATTACHMENT)
        padded = wire.Limits(header_bytes_max=limits.header_bytes_max - wire.HEADER_BYTES)
        wire.decode(frames, wire.TO_BROKER, padded)
    except (ValueError, WireError):
        return False
    return True


@pytest.mark.parametrize("limits", [wire.Limits(), SMALL], ids=["large", "small"])
def test_streaming_34_what_the_broker_would_refuse_is_an_error_of_the_stage(threads: Any, limits: wire.Limits) -> None:
    """Whatever a stage makes: the broker takes the message, or it is a failure; values that are plain are no failure."""
    stage = Given(threads)
    stage.limit(limits)

    @settings(max_examples=150)
    @example({"a": "\ud800"}, {}, [])
    @example({}, {"a": deep(PLAIN_DEPTH_MAX)}, [])
    @example({}, {"a": deep(PLAIN_DEPTH_MAX + 1)}, [])
    @example({}, {"a": deep(PLAIN_DEPTH_MAX + 2)}, [])
    @example({"a": (1 << 64) - 1}, {"a": 1 << 64}, [])
    @example({"a": float("nan")}, {"b": float("inf")}, [])
    @example({}, {}, [(40,), (41,)])
    @example({}, {}, [(1,)] * 4)
    @given(values=maps, facts=maps, shapes=st.lists(st.tuples(st.integers(0, 45)), max_size=5))
    def check(values: Any, facts: Any, shapes: list[tuple[int, ...]]) -> None:
        tensors = {f"t{number}": np.ones(shape, np.uint8) for number, shape in enumerate(shapes)}
        report = stage.run({"picture": {**values, **tensors}}, facts)
        reply = report.reply
        if isinstance(reply, TaskDone):
            arrives(report, limits)
        else:
            assert isinstance(reply, StageFailed)
            assert reply.failure.kind == "stage"
            assert reply.index == 0

    check()


def test_what_is_plain_is_sent(threads: Any) -> None:
    """The stage's thread refuses nothing that the broker takes."""
    stage = Given(threads)

    @settings(max_examples=150)
    @given(values=st.dictionaries(texts, plain, max_size=5), facts=st.dictionaries(texts, plain, max_size=5))
    def check(values: Any, facts: Any) -> None:
        report = stage.run({"picture": values}, facts)
        done = TaskDone("s", "draw", 1, 1, 0, {"picture": Artifact(values)}, facts, 0.0)
        assert isinstance(report.reply, TaskDone) == accepted(done, wire.Limits())

    check()


def test_what_is_handed_to_other_stages_is_looked_at_as_well(threads: Any) -> None:
    """By the same rules, for the reply to an initialization."""
    stage = Given(threads)

    @settings(max_examples=50)
    @given(values=maps)
    def check(values: Any) -> None:
        stage.handed = values
        report = stage.initialize()
        if isinstance(report.reply, StageInitialized):
            arrives(report, wire.Limits())
        else:
            assert isinstance(report.reply, StageFailed)

    check()


class Made:
    """A result that can be watched."""

    def __init__(self) -> None:
        self.outputs: Any = {"picture": {}}
        self.facts: Any = {}
        self.constant = False


def test_an_idle_stage_holds_nothing_of_its_last_job(threads: Any) -> None:
    """What it was given and what it made are gone when the next job is reported, of whatever kind that is."""
    stage = Given(threads)
    task = RunTask("s", "toy", "draw", 1, 1, 0, {"control": Artifact()}, True, False)
    made = stage.result = Made()  # type: ignore[assignment]
    assert isinstance(threads.do(task).reply, TaskDone)
    gone = weakref.ref(made)
    stage.result = StageResult({})
    del made
    stage.initialize()
    assert gone() is None


def test_a_busy_thread_does_not_hold_up_whoever_has_more_for_it() -> None:
    """A job is left with it, and done in its turn; so is the one after that."""
    busy, go_on = threading.Event(), threading.Event()

    def run(*_: object, **__: object) -> StageResult:
        busy.set()
        assert go_on.wait(LIMIT_S)
        return StageResult({"picture": {}})

    made = types.SimpleNamespace(session_bytes=1, run=run)
    pipeline: Any = types.SimpleNamespace(spec=load(PIPELINE, {}).spec, array_library="numpy", build=lambda *_: made)
    reports: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    thread = StageThread(pipeline, "draw", "cpu", 1, reports.put, 1 << 20)
    thread.submit(Job(0, BuildStage("toy", "draw")))
    for index in range(3):
        thread.submit(Job(1, RunTask("s", "toy", "draw", 1, 1, index, {}, False, False)))
    assert busy.wait(LIMIT_S)
    go_on.set()
    done = [reports.get(timeout=LIMIT_S).job.work for _ in range(4)]
    assert [work.index for work in done if isinstance(work, RunTask)] == [0, 1, 2]
    thread.stop()
    assert thread.join(LIMIT_S)


def test_a_thread_may_give_itself_its_next_job() -> None:
    """It takes it when it has come back from its report, and doesn't wait for itself until then."""
    made = types.SimpleNamespace(session_bytes=1, run=lambda *_, **__: StageResult({"picture": {}}))
    pipeline: Any = types.SimpleNamespace(spec=load(PIPELINE, {}).spec, array_library="numpy", build=lambda *_: made)
    reports: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    jobs = [Job(1, RunTask("s", "toy", "draw", 1, 1, index, {}, False, False)) for index in range(3)]

    def post(report: Finished) -> None:
        if jobs:
            thread.submit(jobs.pop(0))
            assert not thread._taken_up.locked(), "it waited for itself"
        reports.put(report)

    thread = StageThread(pipeline, "draw", "cpu", 1, post, 1 << 20)
    thread.submit(Job(0, BuildStage("toy", "draw")))
    done = [reports.get(timeout=LIMIT_S).job.work for _ in range(4)]
    assert [work.index for work in done if isinstance(work, RunTask)] == [0, 1, 2]
    thread.stop()
    assert thread.join(LIMIT_S)
