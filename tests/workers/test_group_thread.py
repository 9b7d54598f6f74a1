"""The group thread of a group of one: jobs and stages in one order, and whatever a job does wrong is its failure alone."""

from __future__ import annotations

import gc
import queue
import re
import subprocess
import sys
import threading
import tracemalloc
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire.job_spec import JobSpec, MediaInput
from reelwire.messages import (
    Artifact,
    FileOffer,
    InitializeStage,
    ReleaseStage,
    RunJob,
    RunTask,
    StageFailed,
    StageReady,
    TaskDone,
)
from reelwire.pipeline.job import JobOutput, JobStep
from reelwire.workers import emulated, emulated_jobs
from reelwire.workers.actions import BuildStage, Job
from reelwire.workers.checkpoints import read_values, write_snapshot
from reelwire.workers.collectives import Communicator, GroupBrokenError
from reelwire.workers.config import WorkerConfig
from reelwire.workers.group import GroupThread
from reelwire.workers.group_events import (
    AtStage,
    CloseJob,
    Form,
    KeepJob,
    LeaveGroup,
    LoadJobs,
    Order,
    OrderReport,
    StartJob,
    StepJob,
)

LIMIT_S = 30.0
SPEC = JobSpec("toy", "for tests", media=(MediaInput("video", "video"),), stages=("denoise",))
PICTURE = JobSpec("picture", "for tests", suffix=".png")
HALF: Any = 0.5
LIST: Any = [[1]]
FRAMES: Any = np.zeros((2, 4, 4, 3), np.uint8)


def jobs_of(run: Callable[[Any], Any], library: str = "numpy", spec: JobSpec = SPEC) -> Any:
    """Kinds of jobs whose model does `run`."""
    model = types.SimpleNamespace(run=run)
    return types.SimpleNamespace(
        jobs=(spec,), array_library=library, check_group=lambda _: None, build=lambda *_: model
    )


def run_job(kind: str = "toy", checkpoint: FileOffer | None = None, **parameters: Any) -> RunJob:
    return RunJob("j", 1, kind, parameters, {}, checkpoint, 0, 10, 1)


class Group:
    """A group thread whose reports are waited for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reports: queue.SimpleQueue[OrderReport] = queue.SimpleQueue()
        self._thread: GroupThread | None = None

    def begin(self, jobs: Any = None, pipeline: Any = None, stages: tuple[str, ...] = ()) -> None:
        """Start it, and have it load what there is."""
        pipeline = pipeline or emulated.pipeline(denoise_s="0")
        self._thread = GroupThread(
            WorkerConfig(name="w"),
            pipeline,
            stages,
            jobs,
            1,
            self._reports.put,
            self.folder,
        )
        for stage in stages:
            report = self.at_stage(BuildStage(pipeline.spec.name, stage))
            assert report.finished is not None
            assert isinstance(report.finished.reply, StageReady)
        if jobs is not None:
            assert self.do(LoadJobs()).failure is None

    def do(self, order: Order) -> OrderReport:
        """One order, until it is reported."""
        assert self._thread is not None
        self._thread.submit(order)
        report = self._reports.get(timeout=LIMIT_S)
        assert report.order is order
        return report

    def at_stage(self, work: Any) -> OrderReport:
        """Something to do at a stage."""
        return self.do(AtStage(work.stage, Job(1, work)))

    def start(self, job: RunJob, **files: str) -> OrderReport:
        """Begin a job."""
        return self.do(StartJob(job, files, share=False))

    def failure(self, order: Order) -> str:
        """What an order fails with: always a stage's fault here."""
        report = self.do(order)
        assert report.failure is not None
        assert not report.broken
        assert report.traceback
        assert report.failure.kind == "stage"
        return report.failure.message

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.stop()
            assert self._thread.join(LIMIT_S)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """Whose thread has ended when the test has."""
    made = Group(tmp_path)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "group"]


def parameters(**given: Any) -> dict[str, Any]:
    kind = emulated_jobs.pipeline().jobs[0]
    return {each.name: given.get(each.name, each.default) for each in kind.parameters}


def said_of(output: JobOutput) -> dict[str, Any]:
    """Its facts, but for what was measured."""
    return {name: fact for name, fact in output.facts.items() if not name.endswith("_s")}


def test_a_job_from_its_start_to_its_output(group: Group) -> None:
    """Each report says where it stands; the last one has what was made."""
    group.begin(emulated_jobs.pipeline(step_s="0"))
    report = group.start(run_job("emulated", **parameters(steps=3, switch=1)))
    places = []
    while report.output is None:
        assert report.keeps
        places.append((report.stage, report.step, report.steps))
        report = group.do(StepJob())
        assert report.took_s >= 0
    assert places == [("denoise_high", 0, 1), ("denoise_low", 0, 2), ("denoise_low", 1, 2)]
    assert report.output.facts["steps"] == 3
    assert group.start(run_job("emulated", **parameters(steps=1))).failure is None, "the next one begins"


def test_groups_12_a_job_goes_on_from_what_was_kept(group: Group) -> None:
    """What was taken is written when the job has gone on, to its end; what comes of it is the same."""
    group.begin(emulated_jobs.pipeline(step_s="0"))
    job = run_job("emulated", **parameters(steps=4, switch=2))
    group.start(job)
    group.do(StepJob())
    report = group.do(KeepJob())
    assert (report.stage, report.step) == ("denoise_high", 1)
    snapshot = report.snapshot
    assert snapshot is not None
    while (report := group.do(StepJob())).output is None:
        pass
    undisturbed = report.output
    offer = write_snapshot(group.folder, snapshot)
    again = run_job("emulated", offer, **parameters(steps=4, switch=2))
    report = group.start(again, **{offer.file: offer.path})
    assert (report.stage, report.step) == ("denoise_high", 1)
    while report.output is None:
        report = group.do(StepJob())
    assert said_of(report.output) == said_of(undisturbed)
    assert np.array_equal(report.output.frames, undisturbed.frames)


def test_groups_03_a_chunk_slips_in_between_two_steps(group: Group) -> None:
    """Stage and job share the thread, and neither sees the other: results are as by themselves."""
    group.begin(emulated_jobs.pipeline(step_s="0"), stages=("denoise",))
    initialize = InitializeStage("s", "emulated", "denoise", 1, 1, 9, {"seed": 1}, {}, Artifact())
    inputs = {"condition": Artifact({"mark": 1}), "control": Artifact()}
    trails, facts = [], []
    for slips_in in (True, False):
        if slips_in:
            group.start(run_job("emulated", **parameters(steps=2)))
            group.do(StepJob())
        group.at_stage(initialize)
        done = group.at_stage(RunTask("s", "emulated", "denoise", 1, 1, 0, inputs, True, False)).finished
        assert done is not None
        assert isinstance(done.reply, TaskDone)
        trails.append(done.reply.facts["trail"])
        group.at_stage(ReleaseStage("s", "emulated", "denoise", 1, 1))
        report = group.do(StepJob()) if slips_in else group.start(run_job("emulated", **parameters(steps=2)))
        while report.output is None:
            report = group.do(StepJob())
        facts.append(said_of(report.output))
    assert trails[0] == trails[1]
    assert facts[0] == facts[1]


def test_what_a_stage_raises_is_told_as_its_thread_would(group: Group) -> None:
    """With the reply for the broker; the job beside it goes on."""
    group.begin(emulated_jobs.pipeline(step_s="0"), stages=("denoise",))
    group.start(run_job("emulated", **parameters(steps=2)))
    report = group.at_stage(RunTask("nobody", "emulated", "denoise", 1, 1, 0, {}, True, False))
    assert report.finished is not None
    assert isinstance(report.finished.reply, StageFailed)
    assert report.failure == report.finished.reply.failure
    assert not report.broken
    assert report.apart
    assert group.do(StepJob()).failure is None


def test_groups_13_a_group_that_broke_under_a_chunk_fails_it(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made of it is told all the same, so that whatever it lies in is given back."""
    group.begin(stages=("denoise",))
    initialize = InitializeStage("s", "emulated", "denoise", 1, 1, 9, {"seed": 1}, {}, Artifact())
    assert group.at_stage(initialize).failure is None

    def broken(_: Communicator) -> None:
        raise GroupBrokenError("another rank of the group has failed")

    monkeypatch.setattr(Communicator, "check", broken)
    inputs = {"condition": Artifact({"mark": 1}), "control": Artifact()}
    report = group.at_stage(RunTask("s", "emulated", "denoise", 1, 1, 0, inputs, True, False))
    assert report.failure is not None
    assert (report.broken, report.apart) == (True, True)
    assert report.finished is not None
    assert isinstance(report.finished.reply, TaskDone)
    report = group.at_stage(RunTask("nobody", "emulated", "denoise", 1, 1, 0, inputs, True, False))
    assert report.finished is not None
    assert isinstance(report.finished.reply, StageFailed)
    assert report.failure == report.finished.reply.failure, "its own reason is the better one"


class Watched:
    """A generator that says when it was closed, and something large that it holds."""

    def __init__(self) -> None:
        self.closed = 0
        self.large: Any = None

    def run(self, _: Any) -> Any:
        """A job of three steps."""
        return self._steps()

    def _steps(self) -> Any:
        large = np.zeros(8 << 20, np.uint8)
        self.large = weakref.ref(large)
        try:
            for step in range(3):
                yield JobStep("denoise", step, 3)
                large += 1
        finally:
            self.closed += 1
        return JobOutput(FRAMES)


def test_groups_11_a_closed_job_gives_everything_back(group: Group) -> None:
    """Its generator is closed where it stands, and nothing of it is alive when that is reported."""
    watched = Watched()
    group.begin(jobs_of(watched.run))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        group.start(run_job())
        group.do(StepJob())
        assert tracemalloc.get_traced_memory()[0] - before > 8 << 20
        assert group.do(CloseJob()).failure is None
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()
    assert (watched.closed, watched.large()) == (1, None)
    assert group.do(CloseJob()).failure is None, "there is nothing to close"
    assert watched.closed == 1


def test_a_job_that_has_ended_holds_nothing(group: Group) -> None:
    """It is closed before its output is reported."""
    watched = Watched()
    group.begin(jobs_of(watched.run))
    report = group.start(run_job())
    while report.output is None:
        assert not report.keeps, "a job without a state can't be kept"
        report = group.do(StepJob())
    assert (watched.closed, watched.large()) == (1, None)
    assert "there is no job" in group.failure(StepJob())


@pytest.mark.parametrize("error", [MemoryError("full"), SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("no")])
def test_groups_13_whatever_a_job_raises_fails_it_alone(group: Group, error: BaseException) -> None:
    """Memory that is used up is said to be; the frame that raised keeps nothing alive; the next job begins."""
    held: list[Any] = []

    def run(_: Any) -> Any:
        large = np.zeros(1 << 20, np.uint8)
        held.append(weakref.ref(large))
        yield JobStep("denoise", 0, 1)
        raise error

    group.begin(jobs_of(run))
    group.start(run_job())
    message = group.failure(StepJob())
    assert type(error).__name__ in message
    assert message.startswith("out of memory: ") == isinstance(error, MemoryError)
    error.__traceback__ = None  # this test holds the error itself
    gc.collect()
    assert held[0]() is None
    assert group.do(CloseJob()).failure is None
    assert group.start(run_job()).failure is None


def steps_of(*steps: Any, output: Any = None) -> Callable[[Any], Any]:
    def run(_: Any) -> Any:
        yield from steps
        return output if output is not None else JobOutput(FRAMES)

    return run


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (steps_of("a step"), "yields a str; accepted: a JobStep"),
        (steps_of(JobStep("encode", 0, 1)), "stage 'encode'; its spec says denoise"),
        (steps_of(JobStep("denoise", 2, 1)), "step 2 of 1"),
        (steps_of(JobStep("denoise", HALF, 1)), "step 0.5"),
        (steps_of(JobStep("denoise", 10**30, 10**31)), "step 10{30} of 10{31}"),
        (steps_of(JobStep("denoise", 0, 1, HALF)), "has a float as its state"),
        (steps_of(output="a clip"), "ends with a str"),
        (steps_of(output=JobOutput(LIST)), "made a list"),
        (steps_of(output=JobOutput(FRAMES[0])), r"made uint8\[4, 4, 3\]"),
        (steps_of(output=JobOutput(FRAMES[:0])), "with pixels in it"),
        (steps_of(output=JobOutput(FRAMES.astype(np.float32))), "made float32"),
        (steps_of(output=JobOutput(FRAMES[..., :1])), "accepted: uint8"),
        (steps_of(output=JobOutput(FRAMES, float("nan"))), "frames per second"),
        (steps_of(output=JobOutput(FRAMES, facts={"x": object()})), "plain value"),
        (steps_of(output=JobOutput(FRAMES, facts={"x": 10**30})), "facts that can't be sent"),
        (steps_of(output=JobOutput(FRAMES, facts={"x": "z" * (1 << 20)})), "facts of 10485.. bytes; accepted: 65536"),
        (lambda _: 7, "int"),
        (lambda _: iter(()), "ends with a NoneType"),
    ],
)
def test_a_job_that_breaks_its_word_fails_with_a_sentence(group: Group, run: Any, says: str) -> None:
    """Whatever it yields or makes in place of what its spec says."""
    group.begin(jobs_of(run))
    message = group.failure(StartJob(run_job(), {}, share=False))
    assert re.search(says, message), message


def test_a_picture_has_one_frame(group: Group) -> None:
    """Of a kind whose result is one."""
    group.begin(jobs_of(steps_of(), spec=PICTURE))
    assert "2 frames" in group.failure(StartJob(run_job("picture"), {}, share=False))


def test_a_state_that_can_not_be_kept_fails_the_keeping_alone(group: Group) -> None:
    """The job goes on, and no rank has left the process group for that."""
    group.begin(jobs_of(steps_of(JobStep("denoise", 0, 2, lambda: {"x": object()}), JobStep("denoise", 1, 2))))
    group.start(run_job())
    report = group.do(KeepJob())
    assert report.failure is not None
    assert "plain value" in report.failure.message
    assert not report.apart
    assert group.do(StepJob()).step == 1
    assert "can't be kept" in group.failure(KeepJob())
    assert group.do(StepJob()).output is not None


def test_a_job_that_can_not_be_closed_is_gone_all_the_same(group: Group) -> None:
    """With the reason; the next one begins."""

    def run(_: Any) -> Any:
        try:
            yield JobStep("denoise", 0, 1)
        finally:
            raise OSError("a pointer is lost")

    group.begin(jobs_of(run))
    group.start(run_job())
    assert "a pointer is lost" in group.failure(CloseJob())
    assert group.start(run_job()).failure is None
    group.failure(CloseJob())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), OSError("no")])
def test_a_job_that_raises_again_when_it_is_closed_has_failed_once(group: Group, error: BaseException) -> None:
    """By what it raised first; whatever it raises, the thread lives and does the next job."""

    def run(_: Any) -> Any:
        try:
            yield JobStep("denoise", 0, 1)
            yield "nonsense"
        finally:
            raise error

    group.begin(jobs_of(run))
    group.start(run_job())
    assert "yields a str" in group.failure(StepJob())
    assert group.start(run_job()).failure is None
    group.failure(CloseJob())


def test_checkpoints_come_as_arrays_of_the_library(group: Group, tmp_path: Path) -> None:
    """Torch tensors in all their dtypes, to a torch job."""
    import torch

    got: list[Any] = []

    def run(request: Any) -> Any:
        got.append(request.checkpoint)
        yield JobStep("denoise", 0, 1, lambda: {"x": torch.arange(3).to(torch.bfloat16), "step": 4})
        return JobOutput(FRAMES)

    group.begin(jobs_of(run, "torch"))
    group.start(run_job())
    snapshot = group.do(KeepJob()).snapshot
    assert snapshot is not None
    offer = write_snapshot(tmp_path, snapshot)
    group.do(CloseJob())
    group.start(run_job(checkpoint=offer), **{offer.file: offer.path})
    assert got[0] is None
    assert got[1]["step"] == 4
    assert torch.equal(got[1]["x"], torch.tensor([0, 1, 2], dtype=torch.bfloat16))
    assert read_values(offer.path, "torch").keys() == {"x", "step"}
    group.do(CloseJob())


def test_a_group_of_one_needs_no_torch(tmp_path: Path) -> None:
    """To load, form, do a job with a checkpoint, and leave."""
    program = (
        "import queue, sys\n"
        "from pathlib import Path\n"
        "from reelwire.messages import RunJob\n"
        "from reelwire.workers import emulated, emulated_jobs, loop\n"
        "from reelwire.workers.config import WorkerConfig\n"
        "from reelwire.workers.group import GroupThread\n"
        "from reelwire.workers.group_events import Form, KeepJob, LeaveGroup, LoadJobs, StartJob, StepJob\n"
        "jobs, reports = emulated_jobs.pipeline(step_s='0'), queue.SimpleQueue()\n"
        "given = {each.name: each.default for each in jobs.jobs[0].parameters} | {'steps': 2}\n"
        "thread = GroupThread(WorkerConfig(name='w'), emulated.pipeline(), ('denoise',), jobs, 1, reports.put,\n"
        f"                     Path({str(tmp_path)!r}))\n"
        "run = RunJob('j', 1, 'emulated', given, {}, None, 0, 1, 1)\n"
        "for order in (LoadJobs(), Form(1, 1, ''), StartJob(run, {}, False), KeepJob(), StepJob(), StepJob(),\n"
        "              LeaveGroup()):\n"
        "    thread.submit(order)\n"
        "    report = reports.get(timeout=30)\n"
        "    print(type(order).__name__, report.failure)\n"
        "thread.stop()\n"
        "assert thread.join(30)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    names = [order.__name__ for order in (LoadJobs, Form, StartJob, KeepJob, StepJob, StepJob, LeaveGroup)]
    assert done.stdout.splitlines() == [*(f"{name} None" for name in names), "False"], done.stderr
