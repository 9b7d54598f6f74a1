"""A rank of a group as a process of its own, which does what its standard input says: a group thread and nothing else."""

from __future__ import annotations

import hashlib
import json
import queue
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from reelwire.errors import RequestError
from reelwire.group_messages import LeaderTensor
from reelwire.messages import Artifact, FileOffer, InitializeStage, ReleaseStage, RunJob, RunTask, TaskDone
from reelwire.pipeline.stage import Initialized
from reelwire.tensors import Inline, TensorRef
from reelwire.workers import emulated, emulated_jobs
from reelwire.workers.actions import BuildStage, Job
from reelwire.workers.checkpoints import write_snapshot
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

LIMIT_S = 60.0
SIMPLE: dict[str, Order] = {
    "load": LoadJobs(),
    "step": StepJob(),
    "keep": KeepJob(),
    "close": CloseJob(),
    "leave": LeaveGroup(),
}


class Rank:
    """The thread, and the way from a command to its order."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[OrderReport] = queue.SimpleQueue()
        self.thread: GroupThread | None = None
        self.folder = Path()
        self.rank = 0

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command; what is answered."""
        what = command.pop("do")
        if what == "begin":
            return self.begin(**command)
        if what == "memory":
            with Path("/proc/self/statm").open(encoding="ascii") as file:
                return {"resident": int(file.read().split()[1]) * resource.getpagesize()}
        assert self.thread is not None
        self.thread.submit(self.order(what, command))
        return said(self.reports.get(timeout=LIMIT_S), self.folder)

    def begin(
        self, rank: int, world: int, timeout_s: float, folder: str, options: dict[str, str], library: str = "numpy"
    ) -> dict[str, Any]:
        """A new group thread in place of the one before."""
        self.rank = rank
        if self.thread is not None:
            self.thread.stop()
            assert self.thread.join(LIMIT_S)
        config = WorkerConfig(name=f"w{rank}", group="g", rank=rank, world=world, step_timeout_s=timeout_s)
        jobs = emulated_jobs.pipeline(**options)
        stream: Any = emulated.pipeline(denoise_s="0")
        stream.array_library = library
        self.folder = Path(folder)
        self.thread = GroupThread(config, stream, ("denoise",), jobs, 1, self.reports.put, self.folder)
        self.thread.is_local = True
        return {}

    def order(self, what: str, given: dict[str, Any]) -> Order:
        """What the thread is told."""
        if what in SIMPLE:
            return SIMPLE[what]
        if what == "form":
            return Form(given["epoch"], given["round"], given["store"])
        if what == "start":
            media = {name: tuple(FileOffer(**each) for each in offers) for name, offers in given["media"].items()}
            run = RunJob("j", 1, given["kind"], parameters(given["parameters"]), media, None, 0, 10, 1)
            return StartJob(run, given["files"], given["share"])
        return AtStage("denoise", Job(1, work(what, given, self.rank)))


def work(what: str, given: dict[str, Any], rank: int) -> Any:
    if what == "build":
        return BuildStage("emulated", "denoise")
    of_leader = tuple(
        LeaderTensor(at, name, dtype, tuple(shape)) for at, name, dtype, shape in given.get("tensors", ())
    )
    held = list(enumerate(of_leader)) if rank == 0 and not given.get("lacking") else []
    tensors = {
        each.artifact: {of.tensor: made(at, of) for at, of in held if of.artifact == each.artifact}
        for each in of_leader
    }
    if what == "initialize":
        asked = {"seed": 1, "refused_by": given.get("refused_by", []), "takes": given.get("takes", [])}
        handed = Artifact({"h": 1}, tensors.get("handed", {}))
        name = given.get("session", "s")
        return InitializeStage(
            name, "emulated", "denoise", 1, 1, 9, asked, tensors.get("tensors", {}), handed, broadcast=of_leader
        )
    if what == "release":
        return ReleaseStage("s", "emulated", "denoise", 1, 1)
    small = {"small": made(0, LeaderTensor("condition", "small", "uint8", (3,)))} if of_leader else {}
    condition = Artifact({"mark": 1}, {**tensors.get("condition", {}), **small})  # the small one all are sent
    inputs = {"condition": condition, "control": Artifact({}, tensors.get("control", {}))}
    index = given["index"]
    return RunTask("s", "emulated", "denoise", 1, 1, index, inputs, index == 0, False, broadcast=of_leader)


def made(seed: int, of: LeaderTensor) -> TensorRef:
    """A tensor with such bytes as its number has."""
    return TensorRef(of.dtype, of.shape, Inline(np.random.default_rng(seed).bytes(of.nbytes)))


SEEN: list[list[Any]] = []
"""What the stage was given last of arrays: name of artifact and array, dtype, shape, hash."""


def note(artifact: str, values: Any) -> None:
    import torch

    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            whole = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = str(value.dtype).removeprefix("torch.")
            SEEN.append([artifact, name, kind, list(value.shape), hashlib.sha256(whole).hexdigest()])


def initialize(stage: Any, session: str, chunks: int, request: Any, handed: Any) -> Initialized:
    """As the emulated one, which looks at no array; of some sessions it says that they take more than there is."""
    SEEN.clear()
    note("tensors", request)
    note("handed", handed)
    begun = INITIALIZE(stage, session, chunks, request, handed)
    return Initialized(cache_bytes=1 << 62) if stage._ranks.rank in request["takes"] else begun


def run(stage: Any, session: str, index: int, inputs: Any, **more: Any) -> Any:
    """As the emulated one, which looks at no array."""
    SEEN.clear()
    for name, values in inputs.items():
        note(name, values)
    return RUN(stage, session, index, inputs, **more)


INITIALIZE, RUN = emulated._Denoise.initialize, emulated._Denoise.run


def needed_bytes(stage: Any, chunks: int, request: Any, handed: Any, most: int) -> int:
    """As a sized stage says it: of some sessions some ranks say that they can't be served."""
    if stage._ranks.rank in request["refused_by"]:
        raise RequestError("area", f"is refused by rank {stage._ranks.rank}")
    return int(stage.session_bytes)


def parameters(given: dict[str, Any]) -> dict[str, Any]:
    kind = emulated_jobs.pipeline().jobs[0]
    return {each.name: given.get(each.name, each.default) for each in kind.parameters}


def said(report: OrderReport, folder: Path) -> dict[str, Any]:
    """A report as a line of JSON can say it; what was taken of a job is in a file."""
    names = ("broken", "apart", "stage", "step", "steps", "keeps")
    answer: dict[str, Any] = {name: getattr(report, name) for name in names}
    answer |= {"took_s": report.took_s, "traceback": report.traceback}
    answer["failure"] = None if report.failure is None else asdict(report.failure)
    answer["file"] = None if report.snapshot is None else asdict(write_snapshot(folder, report.snapshot))
    answer["output"], answer["seen"] = None, list(SEEN)
    if report.output is not None:
        frames = hashlib.sha256(report.output.frames.tobytes()).hexdigest()
        facts = report.output.facts
        answer["output"] = [frames, {name: fact for name, fact in facts.items() if not name.endswith("_s")}]
    if report.finished is not None and isinstance(report.finished.reply, TaskDone):
        answer["trail"] = report.finished.reply.facts.get("trail")
        answer["outputs"] = sorted(report.finished.reply.outputs)
    return answer


def main() -> None:
    """Until standard input ends."""
    import torch

    torch.set_num_threads(1)
    stage: Any = emulated._Denoise
    stage.needed_bytes, stage.initialize, stage.run = needed_bytes, initialize, run
    rank = Rank()
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(rank.do(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
