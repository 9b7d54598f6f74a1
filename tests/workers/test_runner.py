"""The thread of a stage: values in and out, failures, and one job at a time."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire import tensors, wire
from reelwire.errors import ConfigError, RequestError
from reelwire.messages import (
    Applied,
    Artifact,
    InitializeStage,
    ReleaseStage,
    RunTask,
    StageFailed,
    StageInitialized,
    StageReady,
    StageReleased,
    TaskDone,
)
from reelwire.pipeline.stage import Initialized, StageResult
from reelwire.spec import Edge, StageSpec, StreamSpec
from reelwire.tensors import TensorRef
from reelwire.workers.actions import BuildStage
from reelwire.workers.runner import (
    load,
    package_versions,
    threads_for,
)

LIMIT_S = 30.0
CACHE_BYTES_MAX = 2500
PIPELINE = f"{Path(__file__).parent / 'numpy_pipeline.py'}:build"
NUMPY_DTYPES = [name for name in tensors.ITEM_BYTES if name != "bfloat16"]


def initialize(
    session: str = "s", stage: str = "draw", handed: Artifact | None = None, **given: Any
) -> InitializeStage:
    arrays = {name: tensors.from_array(value) for name, value in given.items() if isinstance(value, np.ndarray)}
    plain = {"seed": 0, **{name: value for name, value in given.items() if name not in arrays}}
    return InitializeStage(session, "toy", stage, 1, 1, 9, plain, arrays, handed or Artifact())


def task(index: int, stage: str = "draw", session: str = "s", **inputs: Artifact) -> RunTask:
    given = inputs or {"control": Artifact({"keys": ["w"]})}
    return RunTask(session, "toy", stage, 1, 1, index, given, index == 0, index == 8)


def release(session: str = "s", stage: str = "draw") -> ReleaseStage:
    return ReleaseStage(session, "toy", stage, 1, 1)


def array(ref: TensorRef) -> list[Any]:
    return tensors.to_array(ref).tolist()  # type: ignore[no-any-return]


def test_a_session_passes_both_stages(threads: Any) -> None:
    """Build, initialize, run, release; what one stage hands and makes reaches the other as arrays."""
    pipeline = load(PIPELINE, {})
    assert threads.start(pipeline, "draw").reply == StageReady("toy", "draw", 1000)
    threads.start(pipeline, "show")
    made = threads.do(initialize(seed=7, image=np.ones((2, 2, 3), np.uint8))).reply
    assert isinstance(made, StageInitialized)
    assert made.cache_bytes == 1000
    assert made.handed.values == {"from": "draw"}
    assert array(made.handed.tensors["embedding"]) == [19.0, 19.0, 19.0]
    threads.do(initialize(stage="show", handed=made.handed, seed=7), "show")
    drawn = threads.do(task(0)).reply
    assert isinstance(drawn, TaskDone)
    assert drawn.facts == {"pose": [[1.0, 0.0], [0.0, 1.0]], "scale": 0.5, "keys": ["w"]}
    assert drawn.outputs["picture"].values == {"index": 0}
    assert drawn.run_s >= 0
    shown = threads.do(task(0, "show", picture=drawn.outputs["picture"]), "show").reply
    assert isinstance(shown, TaskDone)
    assert array(shown.outputs["frames"].tensors["frames"]) == [[[[7] * 3] * 4]]
    assert shown.facts == {"first": True, "last": False}
    assert threads.do(release()).reply == StageReleased("s", "draw", 1, 1)


def test_each_stage_is_called_on_a_thread_of_its_own(threads: Any) -> None:
    """A stage needs no locks."""
    pipeline = load(PIPELINE, {})
    stages: dict[str, Any] = {}

    def build(stage: str, device: str) -> Any:
        assert threading.current_thread().name == f"stage-{stage}"
        stages[stage] = pipeline.build(stage, device)
        return stages[stage]

    watched = types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=build)
    for stage in ("draw", "show"):
        threads.start(watched, stage)
        threads.do(initialize(stage=stage), stage)
    assert {name: stage.threads for name, stage in stages.items()} == {
        "draw": {"stage-draw"},
        "show": {"stage-show"},
    }


def test_a_later_run_does_not_change_what_an_earlier_one_gave(threads: Any) -> None:
    """The toy stage reuses one buffer; each result keeps its own bytes."""
    threads.start(load(PIPELINE, {}))
    threads.do(initialize(seed=1))
    results = [threads.do(task(index)).reply for index in range(3)]
    pixels = [array(done.outputs["picture"].tensors["pixels"]) for done in results if isinstance(done, TaskDone)]
    assert pixels == [[1] * 4, [3] * 4, [6] * 4]


def test_streaming_23_whatever_a_stage_raises_fails_its_job_only(threads: Any) -> None:
    """Type and message travel, the traceback stays; the thread goes on with the next session."""
    threads.start(load(PIPELINE, {}))
    threads.do(initialize())
    report = threads.do(task(4, control=Artifact({"keys": ["s"]})))
    reply = report.reply
    assert isinstance(reply, StageFailed)
    assert (reply.phase, reply.index, reply.failure.kind) == ("run", 4, "stage")
    assert reply.failure.message == "RuntimeError: no way back at 4"
    assert (reply.failure.stage, reply.failure.index) == ("draw", 4)
    assert "numpy_pipeline.py" in report.traceback
    assert "Traceback" not in reply.failure.message
    threads.do(initialize("next"))
    assert isinstance(threads.do(task(0, session="next")).reply, TaskDone)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError("full"), GeneratorExit()])
def test_streaming_23_errors_of_every_root_are_caught(threads: Any, error: BaseException) -> None:
    """A stage that calls sys.exit doesn't end the worker."""
    pipeline = load(PIPELINE, {})
    stage = pipeline.build("draw", "cpu")

    def run(*_: object, **__: object) -> StageResult:
        raise error

    stage.run = run  # type: ignore[method-assign]
    threads.start(types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=lambda *_: stage))
    threads.do(initialize())
    reply = threads.do(task(0)).reply
    assert isinstance(reply, StageFailed)
    assert reply.failure.message.startswith(type(error).__name__)


def test_a_refused_request_carries_its_field(threads: Any) -> None:
    """RequestError is the caller's fault, in the message as it was said."""
    threads.start(load(PIPELINE, {}))
    reply = threads.do(initialize(seed=-4)).reply
    assert isinstance(reply, StageFailed)
    assert (reply.phase, reply.failure.kind, reply.failure.field) == ("initialize", "request", "seed")
    assert reply.failure.message == "-4 is negative; accepted: 0 or more"


def test_an_initialization_that_ran_out_of_memory_leaves_nothing(threads: Any) -> None:
    """What it had made is released before the failure is told."""
    pipeline = load(PIPELINE, {})
    stage: Any = pipeline.build("draw", "cpu")
    threads.start(types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=lambda *_: stage))
    reply = threads.do(initialize(seed=666)).reply
    assert isinstance(reply, StageFailed)
    assert reply.failure.message == "MemoryError: no room for the caches"
    assert stage.sessions == {}


def test_streaming_21_a_release_can_fail_and_be_tried_again(threads: Any) -> None:
    """The failure says the phase."""
    threads.start(load(PIPELINE, {}))
    threads.do(initialize(seed=13))
    reply = threads.do(release()).reply
    assert isinstance(reply, StageFailed)
    assert (reply.phase, reply.index) == ("release", None)
    assert isinstance(threads.do(release()).reply, StageReleased)


@pytest.mark.parametrize(("trouble", "kind", "field"), [("request", "request", "weights"), ("crash", "stage", "")])
def test_a_build_that_fails_is_reported(threads: Any, trouble: str, kind: str, field: str) -> None:
    """The core ends the process for it."""
    reply = threads.start(load(PIPELINE, {"trouble": trouble})).reply
    assert isinstance(reply, StageFailed)
    assert (reply.phase, reply.failure.kind, reply.failure.field) == ("build", kind, field)


def stage_giving(result: Any) -> Callable[[str, str], Any]:
    def build(_stage: str, _device: str) -> Any:
        return types.SimpleNamespace(
            session_bytes=1,
            initialize=lambda *_: Initialized(),
            run=lambda *_, **__: result,
            release=lambda *_: None,
        )

    return build


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (StageResult({}), "made nothing"),
        (StageResult({"picture": {}, "more": {}}), "made more, picture"),
        (StageResult({"picture": {"a": object()}}), "object is no plain value"),
        (StageResult({"picture": {"a": np.zeros(2, np.complex64)}}), "complex64"),
        (StageResult({"picture": {}}, {"big": 1 << 70}), "can't be"),
        (StageResult({"picture": {}}, {"deep": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]}), "can't be sent"),
        (StageResult({"picture": {}}, {"long": "x" * (2 << 20)}), "can't be sent"),
        (StageResult({"picture": {}}, {1: 2}), ""),  # type: ignore[dict-item]
        (None, "NoneType"),
    ],
    ids=["nothing", "too much", "object", "complex", "big integer", "deep", "long", "number as a name", "none"],
)
def test_streaming_34_a_result_that_can_not_be_sent_is_a_failure_of_the_stage(
    threads: Any, result: Any, says: str
) -> None:
    """It never reaches the socket, where it would cost the worker its attachment."""
    spec = load(PIPELINE, {}).spec
    threads.start(types.SimpleNamespace(spec=spec, array_library="numpy", build=stage_giving(result)))
    threads.do(initialize())
    reply = threads.told(task(0))
    assert isinstance(reply, StageFailed)
    assert says in reply.failure.message
    wire.decode(wire.encode(reply, 1), wire.TO_BROKER, wire.Limits())


def test_a_negative_size_is_a_failure_of_the_stage(threads: Any) -> None:
    """The broker would drop the worker for it."""
    pipeline = load(PIPELINE, {})
    stage: Any = pipeline.build("draw", "cpu")
    stage.initialize = lambda *_: Initialized(cache_bytes=-1)
    watched = types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=lambda *_: stage)
    threads.start(watched)
    reply = threads.do(initialize()).reply
    assert isinstance(reply, StageFailed)
    assert "cache_bytes is -1" in reply.failure.message
    stage.session_bytes = -1
    reply = threads.do(BuildStage("toy", "draw")).reply
    assert isinstance(reply, StageFailed)
    assert "session_bytes is -1" in reply.failure.message


def test_streaming_12_a_session_for_which_no_bytes_are_left_is_refused(threads: Any) -> None:
    """As overload, with what it had made released; when another one is gone there is room again."""
    stage: Any = load(PIPELINE, {}).build("draw", "cpu")
    spec = load(PIPELINE, {}).spec
    threads.start(types.SimpleNamespace(spec=spec, array_library="numpy", build=lambda *_: stage))
    threads.do(initialize("a"))
    threads.do(initialize("b"))
    reply = threads.do(initialize("c")).reply
    assert isinstance(reply, StageFailed)
    assert (reply.phase, reply.failure.kind) == ("initialize", "overload")
    assert reply.failure.message == "draw: the session takes 1000 bytes, and 2000 of 2500 are taken"
    assert set(stage.sessions) == {"a", "b"}
    threads.do(release("a"))
    assert isinstance(threads.do(initialize("c")).reply, StageInitialized)


@pytest.mark.parametrize(("needs", "kind"), [(2501, "request"), (1501, "overload")])
def test_streaming_12_a_stage_that_knows_its_needs_is_asked_first(threads: Any, needs: int, kind: str) -> None:
    """Nothing is made for a session that doesn't fit; what could never fit is the request's fault."""
    pipeline = load(PIPELINE, {})
    stage: Any = pipeline.build("draw", "cpu")
    asked: list[Any] = []

    def needed_bytes(chunks: int, request: Any, handed: Any, most: int) -> int:
        asked.append((chunks, request["seed"], dict(handed), most))
        return needs if request["seed"] == 5 else 1000

    stage.needed_bytes = needed_bytes
    threads.start(types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=lambda *_: stage))
    threads.do(initialize("a"))
    reply = threads.do(initialize("b", seed=5, handed=Artifact({"x": 1}))).reply
    assert isinstance(reply, StageFailed)
    assert reply.failure.kind == kind
    assert str(needs) in reply.failure.message
    assert asked[-1] == (9, 5, {"x": 1}, CACHE_BYTES_MAX)
    assert set(stage.sessions) == {"a"}


def test_a_stage_never_announces_more_than_it_has(threads: Any) -> None:
    """Or nobody could ask it for less than the default request."""
    pipeline = load(PIPELINE, {})
    stage: Any = pipeline.build("draw", "cpu")
    stage.session_bytes = 10 * CACHE_BYTES_MAX
    report = threads.start(types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=lambda *_: stage))
    assert report.reply == StageReady("toy", "draw", CACHE_BYTES_MAX)


def test_streaming_38_a_result_above_what_the_broker_accepts_fails_its_task(threads: Any) -> None:
    """The limit that the broker said holds, not the default; the thread goes on."""
    result = StageResult({"picture": {"pixels": np.zeros(1200, np.uint8)}})
    spec = load(PIPELINE, {}).spec
    threads.start(types.SimpleNamespace(spec=spec, array_library="numpy", build=stage_giving(result)))
    threads.do(initialize())
    threads.threads["draw"].limits = wire.Limits(frame_bytes_max=1199)
    reply = threads.do(task(1)).reply
    assert isinstance(reply, StageFailed)
    assert reply.failure.message == "ValueError: the result can't be sent: frame of 1200 bytes; accepted: 1199"
    threads.threads["draw"].limits = wire.Limits(frame_bytes_max=1200)
    assert isinstance(threads.do(task(2)).reply, TaskDone)


@pytest.mark.parametrize("settles", [True, False])
def test_streaming_08_only_a_stage_that_settles_may_say_that_its_outputs_stay(threads: Any, settles: bool) -> None:
    """What it says goes to the broker with the result; of any other stage it is an error."""
    spec = load(PIPELINE, {}).spec
    stages = tuple(dataclasses.replace(stage, settles=settles) for stage in spec.stages)
    build = stage_giving(StageResult({"picture": {}}, constant=True))
    spec = dataclasses.replace(spec, stages=stages)
    threads.start(types.SimpleNamespace(spec=spec, array_library="numpy", build=build))
    threads.do(initialize())
    reply = threads.do(task(0)).reply
    if settles:
        assert isinstance(reply, TaskDone)
        assert reply.constant
    else:
        assert isinstance(reply, StageFailed)
        assert reply.failure.message.endswith("the spec doesn't say that it settles")


def test_a_result_says_which_control_a_reservation_was_bound_to(threads: Any) -> None:
    """As the core gave it with the job; a fixed control is said by nobody, and nothing is constant by itself."""
    threads.start(load(PIPELINE, {}))
    threads.do(initialize())
    control = Artifact({"keys": ["w"]})
    done = threads.do(task(0), applied=Applied("held", control, 3)).reply
    assert isinstance(done, TaskDone)
    assert done.applied == Applied("held", control, 3)
    done = threads.do(task(1)).reply
    assert isinstance(done, TaskDone)
    assert done.applied is None
    assert not done.constant


def test_memory_of_the_device_is_given_back_only_when_it_was_full(
    threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emptying the allocator's cache holds up every stage of the device; a bad control is no reason for it."""
    import torch

    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    pipeline = load(PIPELINE, {})
    stage: Any = pipeline.build("draw", "cpu")
    threads.start(types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=lambda *_: stage))
    threads.do(initialize(seed=-1))
    assert emptied == []

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stage.initialize = full
    reply = threads.do(initialize("b")).reply
    assert isinstance(reply, StageFailed)
    assert reply.failure.message == "OutOfMemoryError: CUDA out of memory"
    assert emptied == [True]


def test_a_long_or_broken_message_still_travels(threads: Any) -> None:
    """An exception's text is cut, and what has no UTF-8, or isn't for terminals, is written as an escape."""
    pipeline = load(PIPELINE, {})

    def build(stage: str, device: str) -> Any:
        raise RuntimeError("\ud800\x1b[2J\n" + "x" * 100_000)

    reply = threads.start(types.SimpleNamespace(spec=pipeline.spec, array_library="numpy", build=build)).reply
    assert isinstance(reply, StageFailed)
    assert len(reply.failure.message) == 2000
    assert reply.failure.message.startswith(r"RuntimeError: \ud800\x1b[2J xxx")
    wire.decode(wire.encode(reply, 1), wire.TO_BROKER, wire.Limits())


def test_a_torch_pipeline_gets_torch_tensors(threads: Any) -> None:
    """And its outputs, bfloat16 among them, are sent."""
    import torch

    spec = StreamSpec(
        name="toy",
        stages=(StageSpec("draw", ("control",), ("frames",)),),
        edges=(Edge("control"), Edge("frames")),
        external_inputs=("control",),
        outputs=("frames",),
        initialize_order=("draw",),
        control="control",
        chunks_max=9,
        frames_first=1,
        frames_next=1,
        fps=1.0,
    )
    seen: dict[str, Any] = {}

    def run(_session: str, _index: int, inputs: Any, **_: Any) -> StageResult:
        seen.update(inputs["control"], threads=torch.get_num_threads())  # OpenMP keeps the number per thread
        return StageResult({"frames": {"x": seen["poses"].to(torch.bfloat16)}}, {"mean": seen["poses"].mean()})

    def build(_stage: str, _device: str) -> Any:
        return types.SimpleNamespace(
            session_bytes=torch.tensor(5), initialize=lambda *_: Initialized(), run=run, release=lambda *_: None
        )

    report = threads.start(types.SimpleNamespace(spec=spec, array_library="torch", build=build))
    assert report.reply == StageReady("toy", "draw", 5)
    threads.do(initialize())
    control = Artifact({"keys": ["w"]}, {"poses": tensors.from_array(np.ones((3, 4, 4), np.float32))})
    done = threads.do(task(0, control=control)).reply
    assert isinstance(done, TaskDone)
    assert isinstance(seen["poses"], torch.Tensor)
    assert done.outputs["frames"].tensors["x"].dtype == "bfloat16"
    assert done.facts == {"mean": 1.0}
    assert seen["threads"] == 1


def test_a_pipeline_without_torch_never_imports_it() -> None:
    """A numpy pipeline's worker needs no torch, from the import to a result."""
    program = (
        "import queue, sys\n"
        "from reelwire.messages import Artifact, InitializeStage, RunTask\n"
        "from reelwire.workers import loop\n"
        "from reelwire.workers.actions import BuildStage, Job\n"
        "from reelwire.workers.runner import StageThread, load\n"
        f"pipeline = load({PIPELINE!r}, {{'trouble': 'torch'}})\n"
        "reports = queue.SimpleQueue()\n"
        "thread = StageThread(pipeline, 'draw', 'cpu', 1, reports.put, 1 << 20)\n"
        "empty = Artifact()\n"
        "for work in (BuildStage('toy', 'draw'),\n"
        "             InitializeStage('s', 'toy', 'draw', 1, 1, 9, {'seed': 1}, {}, empty),\n"
        "             RunTask('s', 'toy', 'draw', 1, 1, 0, {'control': empty}, True, False)):\n"
        "    thread.submit(Job(1, work))\n"
        "    print(type(reports.get(timeout=30).reply).__name__)\n"
        "thread.stop()\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split() == ["StageReady", "StageInitialized", "TaskDone", "False"], done.stderr


def test_a_stage_that_is_not_there_is_named() -> None:
    """With the ones that are."""
    with pytest.raises(ConfigError, match="draw, show") as caught:
        load(PIPELINE, {}, ["draw", "paint"])
    assert caught.value.field == "stages"
    with pytest.raises(RequestError):
        load("no-such-pipeline", {})


def test_threads_and_versions() -> None:
    """Threads are shared by the stages unless they were asked for; versions are of what is installed."""
    assert threads_for(3, 8) == 3
    assert threads_for(0, 10_000) == 1
    assert threads_for(0, 1) >= 1
    assert package_versions()["numpy"] == np.__version__
