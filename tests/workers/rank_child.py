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

from reelwire.errors import RequestError
from reelwire.messages import Artifact, FileOffer, InitializeStage, ReleaseStage, RunJob, RunTask, TaskDone
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

    def begin(self, rank: int, world: int, timeout_s: float, folder: str, options: dict[str, str]) -> dict[str, Any]:
        """A new group thread in place of the one before."""
        if self.thread is not None:
            self.thread.stop()
            assert self.thread.join(LIMIT_S)
        config = WorkerConfig(name=f"w{rank}", group="g", rank=rank, world=world, step_timeout_s=timeout_s)
        jobs = emulated_jobs.pipeline(**options)
        stream = emulated.pipeline(denoise_s="0")
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
        return AtStage("denoise", Job(1, work(what, given)))


def work(what: str, given: dict[str, Any]) -> Any:
    if what == "build":
        return BuildStage("emulated", "denoise")
    if what == "initialize":
        asked = {"seed": 1, "refused_by": given.get("refused_by", [])}
        return InitializeStage(given.get("session", "s"), "emulated", "denoise", 1, 1, 9, asked, {}, Artifact())
    if what == "release":
        return ReleaseStage("s", "emulated", "denoise", 1, 1)
    inputs = {"condition": Artifact({"mark": 1}), "control": Artifact()}
    return RunTask("s", "emulated", "denoise", 1, 1, given["index"], inputs, given["index"] == 0, False)


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
    answer["output"] = None
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
    emulated._Denoise.needed_bytes = needed_bytes  # type: ignore[attr-defined]
    rank = Rank()
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(rank.do(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
