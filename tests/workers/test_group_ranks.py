"""Ranks as processes, with real process groups between them: in step, broken off, met again, and killed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire.tensors import ITEM_BYTES
from reelwire.workers.collectives import Rendezvous

LIMIT_S = 60.0
PROGRAM = Path(__file__).parent / "rank_child.py"
AT_ONCE_S = 10.0
"""Far below the time limit of a collective here, and far above what a process takes on a busy machine."""


class Child:
    """One process."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def do(self, **command: Any) -> Any:
        """A command, until it is answered; None: the process has died."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next line that it says."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        assert ready, "a rank hangs"
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Killed, whatever it is at."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Ranks:
    """The first `world` of the processes as a group; `library`: whose arrays its stages take."""

    def __init__(
        self, children: list[Child], folder: Path, world: int, *, library: str = "numpy", **options: str
    ) -> None:
        self.children = children[:world]
        self.rendezvous = Rendezvous("127.0.0.1")
        self.pool = ThreadPoolExecutor(world)
        self.round = 0
        self.folders = [folder / str(rank) for rank in range(world)]
        for rank, (child, made) in enumerate(zip(self.children, self.folders, strict=True)):
            made.mkdir(exist_ok=True)
            child.do(
                do="begin",
                rank=rank,
                world=world,
                timeout_s=LIMIT_S,
                folder=str(made),
                options={"step_s": "0", **options},
                library=library,
            )
        for what in ("build", "load"):
            self.well(what)
        self.form()

    def all(self, what: str, **more: Any) -> list[Any]:
        """The same order on all ranks at once."""
        waiting = [self.pool.submit(child.do, do=what, **more) for child in self.children]
        return [each.result(LIMIT_S) for each in waiting]

    def well(self, what: str, **more: Any) -> list[Any]:
        """The same, and it goes well on all."""
        answers = self.all(what, **more)
        assert not [each for each in answers if each["failure"]], answers
        return answers

    def form(self) -> list[Any]:
        """A new process group."""
        self.round += 1
        return self.well("form", epoch=1, round=self.round, store=self.rendezvous.address)

    def start(self, kind: str = "emulated", **parameters: Any) -> list[Any]:
        """A job without files."""
        return self.well("start", kind=kind, parameters=parameters, media={}, files={}, share=False)

    def finish(self) -> list[Any]:
        """Steps to its end; what it made on rank 0."""
        while True:
            answers = self.well("step")
            ended = [each["output"] is not None for each in answers]
            if any(ended):
                assert all(ended)
                return answers[0]["output"]  # type: ignore[no-any-return]
            assert len({(each["stage"], each["step"]) for each in answers}) == 1

    def close(self) -> None:
        """The processes stay for the next test, without a group."""
        self.pool.shutdown()
        for child in self.children:
            if child.process.returncode is None:
                child.do(do="leave")
        self.rendezvous.close()


@pytest.fixture(scope="module")
def children() -> Iterator[list[Child]]:
    """Four processes for all tests: each start costs seconds."""
    started = [Child() for _ in range(4)]
    for child in started:
        assert child.answer() == {}
    yield started
    for child in started:
        child.close()


@pytest.fixture(params=[2, 4])
def ranks(children: list[Child], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A group of two, or of four, that has met."""
    made = Ranks(children, tmp_path, request.param)
    yield made
    made.close()


@pytest.fixture
def two(children: list[Child], tmp_path: Path) -> Iterator[Ranks]:
    """A group of two."""
    made = Ranks(children, tmp_path, 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(children: list[Child], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a job of four steps makes on one rank."""
    alone = Ranks(children, tmp_path_factory.mktemp("alone"), 1)
    alone.start(steps=4, switch=2, seed=3)
    made = alone.finish()
    alone.close()
    return made


def test_groups_03_a_chunk_slips_in_between_two_steps_on_all_ranks(ranks: Ranks, undisturbed: Any) -> None:
    """Job and chunk are as by themselves; only the leader's are copied out."""
    ranks.start(steps=4, switch=2, seed=3)
    ranks.well("step")
    ranks.well("initialize")
    answers = ranks.well("run", index=0)
    assert answers[0]["outputs"] == ["latent"]
    assert all(each["outputs"] == [] for each in answers[1:])
    ranks.well("step")
    assert ranks.well("run", index=1)[0]["trail"] != answers[0]["trail"]
    ranks.well("release")
    assert ranks.finish() == undisturbed


def test_groups_05_two_groups_live_side_by_side(children: list[Child], tmp_path: Path, undisturbed: Any) -> None:
    """Both in epoch 1 and round 1, on one machine: neither finds the other, and one that fails leaves the other alone."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    groups = [Ranks(children[:2], tmp_path / "a", 2), Ranks(children[2:], tmp_path / "b", 2)]
    groups[0].start(steps=4, switch=2, seed=3)
    groups[1].start(steps=4, fail_at=0, fail_rank=0)
    groups[0].well("step")
    assert all(each["failure"] for each in groups[1].all("step"))
    assert groups[0].finish() == undisturbed
    for each in groups:
        each.close()


@pytest.mark.parametrize("failure", ["error", "memory"])
def test_groups_13_a_failure_on_one_rank_frees_the_others(ranks: Ranks, failure: str, undisturbed: Any) -> None:
    """At once, and with another to blame; in a new process group all take the next job."""
    culprit = len(ranks.children) - 1
    ranks.start(steps=4, fail_at=1, fail_rank=culprit, failure=failure)
    ranks.well("step")
    began = time.monotonic()
    answers = ranks.all("step")
    assert time.monotonic() - began < AT_ONCE_S
    assert [each["broken"] for each in answers] == [rank != culprit for rank in range(len(answers))]
    assert all(each["failure"]["kind"] == "stage" for each in answers)
    said = answers[culprit]["failure"]["message"]
    assert said == (
        "out of memory: MemoryError: no room for step 1" if failure == "memory" else "RuntimeError: " + FAILS
    )
    ranks.well("close")
    began = time.monotonic()
    ranks.form()
    assert time.monotonic() - began < AT_ONCE_S
    ranks.start(steps=4, switch=2, seed=3)
    assert ranks.finish() == undisturbed


FAILS = "step 1 fails, as asked for"


def test_groups_13_a_stage_that_fails_on_one_rank_leaves_the_job(two: Ranks, undisturbed: Any) -> None:
    """It stands between two steps; when the ranks have met again it goes on, in the new process group."""
    two.start(steps=4, switch=2, seed=3)
    two.well("step")
    two.well("initialize")
    two.children[1].do(do="release")  # on one rank alone: it raises where the other one waits for it
    answers = two.all("run", index=0)
    assert [each["broken"] for each in answers] == [True, False]
    assert all(each["failure"] and each["apart"] for each in answers)
    two.form()
    two.all("release")
    two.well("initialize")
    two.well("run", index=0)
    assert two.finish() == undisturbed


def test_groups_12_a_state_that_can_not_be_taken_breaks_nothing(two: Ranks, undisturbed: Any) -> None:
    """The leader alone is at that: all go on in the process group that they have."""
    answer = two.children[0].do(do="keep")  # of no job
    assert answer["failure"]
    assert not answer["apart"]
    two.start(steps=4, switch=2, seed=3)
    assert two.finish() == undisturbed


@pytest.mark.parametrize("by_all", [True, False])
def test_groups_13_a_session_that_is_refused_breaks_nothing(ranks: Ranks, undisturbed: Any, by_all: bool) -> None:
    """Whether all ranks refuse it or one does: none begins it, and sessions and job go on in the same process group."""
    last = len(ranks.children) - 1
    ranks.start(steps=4, switch=2, seed=3)
    ranks.well("step")
    ranks.well("initialize")
    answers = ranks.all("initialize", session="t", refused_by=list(range(last + 1)) if by_all else [last])
    assert not any(each["apart"] for each in answers)
    refuse = [by_all or rank == last for rank in range(last + 1)]
    assert [each["failure"]["kind"] == "request" for each in answers] == refuse
    assert [each["broken"] for each in answers] == [not each for each in refuse]
    assert answers[last]["failure"]["message"] == f"is refused by rank {last}"
    ranks.well("run", index=0)
    ranks.well("initialize", session="t")
    assert ranks.finish() == undisturbed


def test_groups_13_a_rank_that_is_gone_is_seen_by_whoever_refuses(two: Ranks) -> None:
    """One that can't ask the others breaks off, as with any other collective."""
    two.children[1].do(do="leave")
    answer = two.children[0].do(do="initialize", refused_by=[0])
    assert (answer["broken"], answer["apart"]) == (True, True)
    two.form()
    two.well("initialize")


def test_groups_01_the_leader_s_files_reach_ranks_that_lack_them(ranks: Ranks) -> None:
    """In parts, whole, each that some rank lacks once; with the job what was written is gone."""
    contents = [
        np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes() for seed, size in enumerate(SIZES)
    ]
    offers, files = [], {}
    for content in contents:
        path = ranks.folders[0] / f"input-{len(content)}"
        path.write_bytes(content)
        offers.append({"file": hashlib.sha256(content).hexdigest(), "path": str(path), "nbytes": len(content)})
        files[offers[-1]["file"]] = str(path)
    order = {
        "kind": "emulated-rv2v",
        "parameters": {"steps": 2, "switch": 1},
        "media": {"video": offers[:1], "images": [*offers[1:], offers[0]]},
        "share": True,
    }
    waiting = [
        ranks.pool.submit(child.do, do="start", files=files if rank == 0 else {}, **order)
        for rank, child in enumerate(ranks.children)
    ]
    assert not [each.result()["failure"] for each in waiting if each.result()["failure"]]
    shared = [{path.name: path.stat().st_size for path in folder.glob("shared-*")} for folder in ranks.folders]
    assert shared[0] == {}
    for rank, there in enumerate(shared[1:], 1):
        assert there == {f"shared-{rank}-{each['file']}": each["nbytes"] for each in offers}
    output = ranks.finish()  # the trails of all ranks are the same, and so is what they read
    assert output[1]["steps"] == 2
    assert not [path for folder in ranks.folders for path in folder.glob("shared-*")]


SIZES = (9 << 20, 17, 4 << 20)


def test_groups_01_a_file_that_can_not_be_shared_fails_on_all_ranks(two: Ranks) -> None:
    """The leader says why; the others are freed."""
    file = hashlib.sha256(b"gone").hexdigest()
    media = {"video": [{"file": file, "path": "/nowhere", "nbytes": 4}]}
    order = {"kind": "emulated-v2v", "parameters": {}, "media": media, "share": True}
    waiting = [
        two.pool.submit(child.do, do="start", files={file: "/nowhere"} if rank == 0 else {}, **order)
        for rank, child in enumerate(two.children)
    ]
    answers = [each.result() for each in waiting]
    assert [each["broken"] for each in answers] == [False, True]
    assert "FileNotFoundError" in answers[0]["failure"]["message"]
    assert not [path for folder in two.folders for path in folder.iterdir()]


def hashes(tensors: Any) -> dict[tuple[str, str], str]:
    """Of the bytes of each tensor, by its artifact and its name, as the ranks make them."""
    sizes = [ITEM_BYTES[dtype] * math.prod(shape) for *_, dtype, shape in tensors]
    bytes_of = [np.random.default_rng(seed).bytes(size) for seed, size in enumerate(sizes)]
    names = [(artifact, name) for artifact, name, *_ in tensors]
    return {name: hashlib.sha256(each).hexdigest() for name, each in zip(names, bytes_of, strict=True)}


@pytest.mark.parametrize("world", [2, 4])
def test_groups_01_what_the_leader_alone_was_sent_reaches_all_ranks(
    children: list[Child], tmp_path: Path, world: int
) -> None:
    """Every dtype, bit for bit, in parts and empty, of a task and of a session's beginning: the same in the same order."""
    ranks = Ranks(children, tmp_path, world, library="torch")
    tensors = [["condition", dtype, dtype, [3, 5, 7001]] for dtype in ITEM_BYTES]
    tensors += [["control", "long", "uint8", [(9 << 20) + 1]], ["control", "none", "float32", [0, 4]]]
    tensors += [["control", "one", "int64", []]]
    asked = [["tensors", "image", "uint8", [300, 400, 3]], ["handed", "memory", "bfloat16", [1 << 16]]]
    small = [["condition", "small", "uint8", [3]]]
    for what, given, all_have in (("initialize", asked, []), ("run", tensors, small)):
        answers = ranks.well(what, index=0, tensors=given)
        seen = answers[0]["seen"]
        assert all(each["seen"] == seen for each in answers)
        assert {(artifact, name): found for artifact, name, *_, found in seen} == hashes(given) | hashes(all_have)
        assert sorted(each[:4] for each in seen) == sorted([*given, *all_have])
    ranks.close()


def test_groups_01_what_the_leader_lacks_fails_on_all_ranks(ranks: Ranks, undisturbed: Any) -> None:
    """It says why, the others are freed at once, and the next one is done in a new process group."""
    tensors = [["condition", "x", "uint8", [1 << 17]]]
    ranks.start(steps=4, switch=2, seed=3)
    for what in ("initialize", "run"):
        if what == "run":
            ranks.well("initialize")
        began = time.monotonic()
        answers = ranks.all(what, index=0, tensors=NAMED[what], lacking=True)
        assert time.monotonic() - began < AT_ONCE_S
        assert [each["broken"] for each in answers] == [rank > 0 for rank in range(len(answers))]
        assert all(each["apart"] for each in answers)
        assert answers[0]["failure"]["message"] == "ValueError: the leader lacks 131072 bytes that all ranks need"
        ranks.form()
    ranks.well("run", index=0, tensors=tensors)
    assert ranks.finish() == undisturbed


NAMED = {where: [[name, "x", "uint8", [1 << 17]]] for where, name in (("initialize", "handed"), ("run", "condition"))}


@pytest.mark.parametrize("gone", [0, 1])
def test_groups_01_a_rank_that_is_gone_is_seen_by_whoever_broadcasts(two: Ranks, gone: int) -> None:
    """Whether it is the one that gives or one that takes."""
    two.well("initialize")
    two.children[gone].do(do="leave")
    answer = two.children[1 - gone].do(do="run", index=0, tensors=[["condition", "x", "uint8", [9 << 20]]])
    assert (answer["broken"], answer["apart"]) == (True, True)
    two.form()


@pytest.mark.parametrize("by_all", [True, False])
def test_groups_13_a_session_that_turns_out_too_large_breaks_nothing(
    ranks: Ranks, undisturbed: Any, by_all: bool
) -> None:
    """What all ranks have begun and one has no room for ends on all, in the process group that they are in."""
    last = len(ranks.children) - 1
    ranks.start(steps=4, switch=2, seed=3)
    ranks.well("step")
    ranks.well("initialize")
    answers = ranks.all("initialize", session="t", takes=list(range(last + 1)) if by_all else [last])
    assert not any(each["apart"] for each in answers)
    assert [each["broken"] for each in answers] == [not by_all and rank < last for rank in range(last + 1)]
    assert answers[last]["failure"]["field"] == "parameters"
    ranks.well("run", index=0)
    ranks.well("initialize", session="t")
    assert ranks.finish() == undisturbed


def test_groups_11_a_closed_job_gives_its_memory_back(children: list[Child], tmp_path: Path) -> None:
    """On all ranks, to the system: 48 MiB of each."""
    ranks = Ranks(children, tmp_path, 2, state_bytes=str(48 << 20))
    ranks.start(steps=3)
    ranks.well("step")
    ranks.well("close")
    before = [child.do(do="memory")["resident"] for child in ranks.children]
    ranks.start(steps=3)
    ranks.well("step")
    during = [child.do(do="memory")["resident"] for child in ranks.children]
    ranks.well("close")
    after = [child.do(do="memory")["resident"] for child in ranks.children]
    assert all(there - first > 40 << 20 for there, first in zip(during, before, strict=True))
    assert all(left - first < 8 << 20 for left, first in zip(after, before, strict=True))
    ranks.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_groups_04_a_rank_that_is_killed_frees_the_others(children: list[Child], tmp_path: Path, stopped: bool) -> None:
    """At once, though they wait for it in a collective; one that was stopped as well. The last tests: nobody replaces it."""
    ranks = Ranks(children, tmp_path, len(children))
    ranks.start(steps=4)
    victim = children.pop(1)
    if stopped:
        victim.process.send_signal(signal.SIGSTOP)
    waiting = [ranks.pool.submit(child.do, do="step") for child in children]
    began = time.monotonic()
    victim.close()
    answers = [each.result(LIMIT_S) for each in waiting]
    assert time.monotonic() - began < AT_ONCE_S
    assert all(each["broken"] for each in answers)
    ranks.close()
