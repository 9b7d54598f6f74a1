"""What becomes of a job at its leader: files, steps, checkpoints, its result, and every way in which it ends early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reelwire import messages as m
from reelwire.pipeline.job import JobOutput
from reelwire.workers.group_events import (
    CloseJob,
    DropFiles,
    FilesFound,
    FindFiles,
    KeepJob,
    MakeResult,
    PartWritten,
    ResultMade,
    SendParts,
    StartJob,
    StepJob,
    WritePart,
)
from reelwire.workers.leader_jobs import REPEAT_S, WINDOW_PARTS

from .group_rig import NO, LeadRig, offer, part, run_job, task

OUTPUT = JobOutput(np.zeros((1, 2, 2, 3), np.uint8))
RESULT = offer("result", 3)


def encoding(rig: LeadRig) -> None:
    """A job has ended with an output, which is being written."""
    rig.running()
    rig.settle(output=OUTPUT)


def made(rig: LeadRig) -> None:
    """Its result is offered."""
    encoding(rig)
    rig.do(ResultMade(rig.now, "j", 1, RESULT, {"steps": 9}))
    rig.sent.clear()
    rig.asked.clear()


def test_groups_10_a_job_is_prepared_begun_and_stepped(toy: Any) -> None:
    """Its files are looked for, all ranks begin it together, and each step is told."""
    rig = LeadRig(toy.spec).formed()
    run = run_job(1, "j", 1, offer("in"))
    rig.hear(run)
    assert rig.wanted(FindFiles) == [FindFiles(run)]
    assert [each.state for each in rig.take(m.JobProgress)] == ["preparing"]
    rig.do(FilesFound(rig.now, 1, {"in": "/there/in"}))
    assert rig.order is None
    rig.have(1)
    assert rig.order == StartJob(run, {"in": "/there/in"}, share=False)
    rig.settle(stage="high", step=0, steps=2, keeps=True)
    assert rig.decided().act == "step"
    rig.step(1, 2)
    rig.step(0, 3, stage="low")
    told = [(each.state, each.stage, each.step, each.steps) for each in rig.take(m.JobProgress)]
    assert told == [("running", "high", 0, 2), ("running", "high", 1, 2), ("running", "low", 0, 3)]


def test_groups_01_files_that_some_rank_lacks_are_shared_by_the_leader(toy: Any) -> None:
    """The decision says so to all."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.hear(run_job(1, "j", 1, offer("in")))
    rig.do(FilesFound(rig.now, 1, {"in": "/there/in"}))
    rig.have(1, 1)
    rig.have(1, 2, lacks=True)
    assert rig.decided().share
    assert rig.order.share


def test_groups_09_missing_files_are_fetched_in_a_window(toy: Any) -> None:
    """Parts are asked for as others are written, each once; then comes the next file, and then the job begins."""
    rig = LeadRig(toy.spec).formed()
    files = offer("a", WINDOW_PARTS + 2), offer("b", 1)
    rig.hear(run_job(1, "j", 1, *files))
    rig.have(1)
    rig.do(FilesFound(rig.now, 1, {}, files))
    assert rig.take(m.WantFile) == [m.WantFile("a", 0, WINDOW_PARTS)]
    for index in range(WINDOW_PARTS + 2):
        rig.hear(part("a", index))
        assert rig.wanted(WritePart) == [WritePart(files[0], part("a", index))]
        path = "/got/a" if index == WINDOW_PARTS + 1 else ""
        rig.do(PartWritten(rig.now, "a", index + 1, path))
    asked = [(each.file, each.first, each.parts) for each in rig.take(m.WantFile)]
    assert asked == [("a", WINDOW_PARTS, WINDOW_PARTS + 1), ("a", WINDOW_PARTS + 1, WINDOW_PARTS + 2), ("b", 0, 1)]
    rig.hear(part("b", 0))
    rig.do(PartWritten(rig.now, "b", 1, "/got/b"))
    assert rig.order.files == {"a": "/got/a", "b": "/got/b"}


def test_groups_09_parts_that_nobody_asked_for_are_dropped(toy: Any) -> None:
    """Another file's, out of order, beyond what was asked for."""
    rig = LeadRig(toy.spec).formed()
    rig.hear(part("a", 0), m.FileGone("a", "never"))
    files = (offer("a", WINDOW_PARTS + 2),)
    rig.hear(run_job(1, "j", 1, *files))
    rig.do(FilesFound(rig.now, 1, {}, files))
    rig.hear(part("b", 0), part("a", 1), *[part("a", index) for index in range(WINDOW_PARTS + 1)])
    assert len(rig.wanted(WritePart)) == WINDOW_PARTS
    dropped = rig.core.status()["dropped"]
    assert (dropped["unexpected"], dropped["beyond_grant"]) == (4, 1)


@pytest.mark.parametrize("how", ["gone", "wrong", "empty"])
def test_groups_13_a_job_whose_files_cannot_be_had_fails_before_it_begins(toy: Any, how: str) -> None:
    """No rank is asked for anything."""
    rig = LeadRig(toy.spec).formed()
    files = (offer("a", 0 if how == "empty" else 2),)
    rig.hear(run_job(1, "j", 1, *files))
    rig.have(1)
    rig.do(FilesFound(rig.now, 1, {}, files))
    if how == "gone":
        rig.hear(m.FileGone("a", "removed"))
    elif how == "wrong":
        rig.do(PartWritten(rig.now, "a", 1, failure=NO))
    (ended,) = rig.take(m.JobEnded)
    assert ended.state == "failed"
    assert rig.wanted(DropFiles) == [DropFiles("j", 1)]
    assert rig.order is None


def test_groups_08_a_kind_that_is_not_done_here_is_refused(toy: Any) -> None:
    """It names the field, and the kinds that are."""
    rig = LeadRig(toy.spec).formed()
    rig.hear(run_job(1, kind="other"))
    (ended,) = rig.take(m.JobEnded)
    assert (ended.failure.kind, ended.failure.field) == ("request", "kind")
    assert "edit" in ended.failure.message


def test_groups_12_the_state_is_kept_every_so_many_steps(toy: Any) -> None:
    """Where it can be, by this rank alone; the file is offered, and older ones are dropped."""
    rig = LeadRig(toy.spec).formed()
    rig.running(kept_every=2)
    rig.step(1)
    rig.step(2, keeps=False)
    assert isinstance(rig.order, StepJob)
    rig.step(3)
    assert isinstance(rig.order, KeepJob)
    decisions = len(rig.told)
    rig.keep(offer("kept"))
    assert rig.take(m.JobFile) == [m.JobFile("j", 1, "checkpoint", offer("kept"), 3)]
    assert rig.wanted(DropFiles) == [DropFiles("j", 1, "checkpoint", "kept")]
    assert len(rig.told) == decisions + 1  # nobody was told but of the next step
    rig.step(4)
    assert isinstance(rig.order, StepJob)


def test_groups_12_nothing_is_kept_after_the_last_step(toy: Any) -> None:
    """The result comes next; but between two stages a state is as good as any other."""
    rig = LeadRig(toy.spec).formed()
    rig.running(kept_every=1, steps=1)
    rig.step(1, 1)
    assert isinstance(rig.order, KeepJob)
    rig.keep(offer("kept"))
    rig.step(0, 1, stage="low", keeps=False)
    rig.step(1, 1, stage="low")
    assert isinstance(rig.order, StepJob)


@pytest.mark.parametrize("resumed", [False, True])
def test_groups_12_a_checkpoint_counts_the_steps_of_all_stages(toy: Any, resumed: bool) -> None:
    """So a later one has a higher number, whichever stage it stands at, and also in a later attempt."""
    rig = LeadRig(toy.spec).formed()
    more: dict[str, Any] = {"checkpoint": offer("old"), "checkpoint_step": 7} if resumed else {}
    rig.hear(run_job(1, checkpoint_steps=1, **more))
    rig.do(FilesFound(rig.now, 1, {"old": "/there/old"} if resumed else {}))
    rig.have(1)
    if resumed:  # five of the first stage, two of the second
        rig.settle(stage="low", step=2, steps=9, keeps=True)
    else:
        rig.settle(stage="high", step=4, steps=5, keeps=True)
        rig.step(5, 5, keeps=False)
        rig.step(0, 9, stage="low", keeps=False)
        rig.step(1, 9, stage="low", keeps=False)
        rig.step(2, 9, stage="low", keeps=False)
    rig.step(3, 9, stage="low")
    rig.keep(offer("kept"))
    assert [each.step for each in rig.take(m.JobFile)] == [8]


def test_groups_12_no_new_checkpoint_while_the_last_one_is_on_its_way(toy: Any) -> None:
    """It would never be durable; but a broker that takes ever so long, or is away, keeps nobody from it."""
    rig = LeadRig(toy.spec).formed()
    rig.running(kept_every=1)
    rig.step(1)
    rig.keep(offer("one", 3))
    rig.hear(m.WantFile("one", 0, 2))
    assert rig.wanted(SendParts) == [SendParts(1, "one", 0, 2)]
    rig.step(2)
    assert isinstance(rig.order, StepJob)
    rig.step(3)
    assert isinstance(rig.order, KeepJob)
    rig.keep(offer("two", 3))
    rig.hear(m.CheckpointKept("j", 1, 1))
    rig.step(4)
    assert isinstance(rig.order, StepJob)
    rig.hear(m.CheckpointKept("j", 1, 3))
    rig.step(5)
    assert isinstance(rig.order, KeepJob)


def test_groups_12_a_checkpoint_that_cannot_be_kept_costs_the_job_nothing(toy: Any) -> None:
    """Its state can't be taken: nobody leaves the process group for that, and the next one is taken when it is due."""
    rig = LeadRig(toy.spec).formed()
    rig.running(kept_every=1)
    rig.step(1)
    rig.done(NO, apart=False)
    assert rig.logged.count("order_failed") == 1
    assert isinstance(rig.order, StepJob)
    rig.step(2)
    assert isinstance(rig.order, KeepJob)
    rig.keep(offer("kept"))
    assert {each.act for each in rig.told} == {"start", "step"}
    assert [each.step for each in rig.take(m.JobFile)] == [2]


def test_groups_12_a_process_group_that_broke_while_a_state_was_taken_is_met_anew(toy: Any) -> None:
    """Another rank is to blame: the ranks meet, and the job goes on."""
    rig = LeadRig(toy.spec).formed()
    rig.running(kept_every=1)
    rig.step(1)
    rig.done(NO, is_broken=True)
    assert rig.decided().act == "form"
    rig.settle()
    assert rig.decided().act == "step"
    assert not rig.take(m.JobFile, m.JobEnded)


def test_groups_15_the_result_is_offered_until_the_broker_forgets_it(toy: Any) -> None:
    """It is written beside the group thread, sent in the parts that are asked for, and dropped then."""
    rig = LeadRig(toy.spec).formed()
    encoding(rig)
    assert rig.wanted(MakeResult) == [MakeResult("j", 1, ".mp4", OUTPUT)]
    assert rig.take(m.JobProgress)[-1].state == "encoding"
    rig.do(ResultMade(rig.now, "j", 1, RESULT, {"steps": 9}))
    assert rig.take(m.JobFile) == [m.JobFile("j", 1, "result", RESULT, facts={"steps": 9})]
    rig.hear(m.WantFile("result", 0, 2), m.WantFile("result", 2, 3))
    assert rig.wanted(SendParts) == [SendParts(1, "result", 0, 2), SendParts(1, "result", 2, 3)]
    rig.wanted(DropFiles)
    rig.hear(m.ForgetJob("j", 1))
    assert rig.wanted(DropFiles) == [DropFiles("j", 1)]
    assert rig.core._hello().held == ()


def test_groups_03_the_group_goes_on_while_a_result_is_written(toy: Any) -> None:
    """The next job begins, and streaming too."""
    rig = LeadRig(toy.spec).formed()
    encoding(rig)
    rig.hear(run_job(2, "next"))
    rig.do(FilesFound(rig.now, 2))
    rig.have(2)
    assert isinstance(rig.order, StartJob)


@pytest.mark.parametrize("broken_here", [False, True])
def test_groups_13_a_job_that_fails_on_one_rank_fails_on_all(toy: Any, broken_here: bool) -> None:
    """It is closed by all first, then told with its root cause; the ranks meet again, and take what comes next."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.running()
    oom = m.Failure("stage", "out of memory")
    rig.done(m.Failure("stage", "broke") if broken_here else None, is_broken=broken_here, stage="high", step=1, steps=2)
    rig.answer(1, failure=m.Failure("stage", "broke too"), is_broken=True)
    rig.answer(2, failure=oom)
    if not broken_here:  # this rank is at the next step already, and is thrown out of that
        rig.done(m.Failure("stage", "broke"), is_broken=True)
        rig.answer(failure=m.Failure("stage", "there is no job"))
    assert isinstance(rig.order, CloseJob)
    assert not rig.take(m.JobEnded)
    rig.done()
    rig.answer(1)
    assert not rig.take(m.JobEnded)
    rig.answer(2)
    assert rig.take(m.JobEnded) == [m.JobEnded("j", 1, "failed", m.Failure("stage", "rank 2: out of memory"))]
    assert (rig.decided().act, rig.decided().round) == ("form", 2)
    rig.hear(run_job(2, "next"))
    rig.do(FilesFound(rig.now, 2))
    rig.have(2)
    rig.settle()
    assert rig.decided().act == "start"


def test_groups_13_an_output_counts_only_if_no_rank_has_failed(toy: Any) -> None:
    """The last step raised on another rank: there is no result."""
    rig = LeadRig(toy.spec).formed()
    rig.running()
    rig.done(output=OUTPUT)
    rig.answer(failure=NO)
    assert not rig.wanted(MakeResult)
    rig.settle()
    assert [each.state for each in rig.take(m.JobEnded)] == ["failed"]


def test_groups_13_a_result_that_cannot_be_written_fails_the_job(toy: Any) -> None:
    """With what the disk, or the encoder, says."""
    rig = LeadRig(toy.spec).formed()
    encoding(rig)
    rig.do(ResultMade(rig.now, "j", 1, None, failure=NO))
    assert rig.take(m.JobEnded) == [m.JobEnded("j", 1, "failed", NO)]


def test_groups_11_a_running_job_is_cancelled_at_its_next_yield(toy: Any) -> None:
    """On all ranks, by a decision; the broker is told when all have closed it."""
    rig = LeadRig(toy.spec).formed()
    rig.running()
    rig.hear(m.StopJob("j", 1))
    assert isinstance(rig.order, StepJob)
    rig.step(1)
    assert isinstance(rig.order, CloseJob)
    rig.done()
    assert not rig.take(m.JobEnded)
    rig.answer()
    assert rig.take(m.JobEnded) == [m.JobEnded("j", 1, "cancelled")]
    assert rig.order is None


def test_groups_11_a_cancel_during_the_last_step_takes_effect_at_its_end(toy: Any) -> None:
    """Nothing is encoded of what nobody wants any more."""
    for word in (m.StopJob("j", 1), m.ForgetJob("j", 1)):
        rig = LeadRig(toy.spec).formed()
        rig.running()
        rig.hear(word)
        rig.sent.clear()
        rig.settle(output=OUTPUT)
        assert not rig.wanted(MakeResult)
        assert [each.state for each in rig.take(m.JobEnded)] == ["cancelled"] * isinstance(word, m.StopJob)
        assert DropFiles("j", 1) in rig.wanted(DropFiles)
        assert rig.order is None


@pytest.mark.parametrize("state", ["unknown", "finding", "fetching", "ready"])
def test_groups_11_a_job_that_has_not_begun_is_cancelled_at_once(toy: Any, state: str) -> None:
    """No rank is asked for anything; one that nobody knows is answered as well."""
    rig = LeadRig(toy.spec).formed()
    if state != "unknown":
        rig.hear(run_job(1, "j", 1, offer("a")))
    if state == "fetching":
        rig.do(FilesFound(rig.now, 1, {}, (offer("a"),)))
    elif state == "ready":
        rig.do(FilesFound(rig.now, 1, {"a": "/there/a"}))
    rig.hear(m.StopJob("j", 1))
    assert rig.take(m.JobEnded) == [m.JobEnded("j", 1, "cancelled")]
    rig.have(1)
    rig.do(PartWritten(rig.now, "a", 1, "/got/a"))
    assert rig.order is None


def test_groups_11_a_cancel_while_the_result_is_written_wins(toy: Any) -> None:
    """The result is dropped when it is there; after the result was offered a cancel is answered by that."""
    rig = LeadRig(toy.spec).formed()
    encoding(rig)
    rig.hear(m.StopJob("j", 1))
    assert [each.state for each in rig.take(m.JobEnded)] == ["cancelled"]
    rig.wanted(DropFiles)
    rig.do(ResultMade(rig.now, "j", 1, RESULT))
    assert rig.wanted(DropFiles) == [DropFiles("j", 1, "result")]
    assert not rig.take(m.JobFile)
    rig = LeadRig(toy.spec).formed()
    made(rig)
    rig.hear(m.StopJob("j", 1))
    assert [type(each) for each in rig.take(m.JobEnded, m.JobFile)] == [m.JobFile]


@pytest.mark.parametrize("state", ["finding", "running", "encoding", "made"])
def test_groups_12_what_nobody_wants_is_let_go_without_a_word(toy: Any, state: str) -> None:
    """ForgetJob, or a later attempt at the same job: it ends on all ranks, and its files go."""
    for later in (m.ForgetJob("j", 1), run_job(9, "j", 2)):
        rig = LeadRig(toy.spec).formed()
        match state:
            case "finding":
                rig.hear(run_job(1))
            case "running":
                rig.running()
            case "encoding":
                encoding(rig)
            case _:
                made(rig)
        rig.sent.clear()
        rig.hear(later)
        if state == "running":
            rig.step(1)
            assert isinstance(rig.order, CloseJob)
            rig.settle()
        if state == "encoding":
            rig.do(ResultMade(rig.now, "j", 1, RESULT))
        assert DropFiles("j", 1) in rig.wanted(DropFiles)
        assert not rig.take(m.JobEnded, m.JobFile)
        assert not [each for each in rig.core._hello().held if each.attempt == 1]


@pytest.mark.parametrize("attempt", [1, 2])
def test_groups_12_an_attempt_is_taken_once_and_an_older_one_never(toy: Any, attempt: int) -> None:
    """It comes again, or comes late."""
    rig = LeadRig(toy.spec).formed()
    rig.hear(run_job(1, "j", 2))
    rig.wanted(FindFiles)
    rig.hear(run_job(2, "j", attempt))
    assert not rig.wanted(FindFiles)
    assert rig.core.status()["dropped"]["duplicate"] == 1


def test_groups_07_a_job_that_has_begun_outlives_its_broker(toy: Any) -> None:
    """It goes on meanwhile, and the next broker is told where it stands and of its newest checkpoint."""
    rig = LeadRig(toy.spec).formed()
    rig.running(kept_every=1)
    rig.step(1)
    rig.keep(offer("kept"))
    rig.cut()
    rig.step(2, keeps=False)
    rig.step(3, keeps=False)
    rig.sent.clear()
    rig.welcome()
    held = rig.core._hello().held
    assert held == (m.HeldJob("j", 1),)
    progress, file = rig.take(m.JobProgress, m.JobFile)
    assert (progress.step, file.offer.file) == (3, "kept")


def test_groups_07_a_job_that_has_not_begun_is_dropped_with_its_broker(toy: Any) -> None:
    """The next one will ask somebody for it; what was fetched for it goes."""
    rig = LeadRig(toy.spec).formed()
    rig.hear(run_job(1, "j", 1, offer("a", 2)))
    rig.do(FilesFound(rig.now, 1, {}, (offer("a", 2),)))
    rig.cut()
    assert rig.wanted(DropFiles) == [DropFiles("j", 1)]
    rig.do(PartWritten(rig.now, "a", 1))
    rig.welcome()
    assert rig.core._hello().held == ()
    rig.sent.clear()
    rig.hear(run_job(2, "j", 2))
    assert [each.state for each in rig.take(m.JobProgress)] == ["preparing"]


def test_groups_07_ends_are_kept_for_the_next_broker(toy: Any) -> None:
    """A result, and an end without one, are said again until they are forgotten."""
    rig = LeadRig(toy.spec).formed()
    made(rig)
    rig.hear(run_job(2, "k"), m.StopJob("k", 1))
    rig.cut()
    (hello,) = rig.take(m.WorkerHello)
    assert hello.held == (m.HeldJob("j", 1, ended=True), m.HeldJob("k", 1, ended=True))
    rig.welcome()
    assert [type(each) for each in rig.take(m.JobFile, m.JobEnded)] == [m.JobFile, m.JobEnded]


def test_groups_07_an_end_that_nobody_answers_is_said_again(toy: Any) -> None:
    """A broker that has yet to hear of all ranks may not have known the job; one that takes the file has heard."""
    rig = LeadRig(toy.spec).formed()
    made(rig)
    rig.tick(REPEAT_S + 2.0)
    assert len(rig.take(m.JobFile)) == 1
    rig.hear(m.WantFile("result", 0, 2))
    rig.tick(3 * REPEAT_S)
    assert not rig.take(m.JobFile)


def test_groups_03_a_task_waits_for_the_step_that_runs_and_no_other(toy: Any) -> None:
    """A job of many short steps doesn't keep a chunk waiting."""
    rig = LeadRig(toy.spec).formed()
    rig.live(1)
    rig.running(2)
    for step in range(1, 4):
        rig.body(task(2 + step, step - 1))
        rig.step(step)
        assert rig.decided().act == "run"
        rig.settle()
        assert rig.decided().act == "step"
