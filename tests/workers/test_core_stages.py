"""The worker's core: sessions at stages, one job at a time, epochs, releases and failures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reelwire.messages import (
    Heartbeat,
    InitializeStage,
    ReleaseStage,
    RunTask,
    StageFailed,
    StageInitialized,
    StageReleased,
    TaskDone,
    TaskStarted,
)
from reelwire.workers.actions import Log
from reelwire.workers.actor import SEEN_MAX
from reelwire.workers.events import ShutdownRequested


def kinds(messages: list[Any]) -> list[str]:
    return [type(message).__name__ for message in messages]


def test_a_task_is_started_and_done(rig: Any, toy: Any) -> None:
    """Started is said when the thread gets it, done when the thread reports."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    assert worker.sent == [TaskStarted("s", "draw", 1, 1, 0)]
    worker.finish("draw")
    assert worker.sent[1:] == [TaskDone("s", "draw", 1, 1, 0, {}, {}, 0.1)]


def test_one_job_at_a_time_in_order_of_receipt(rig: Any, toy: Any) -> None:
    """Initialize, task and release of all sessions share one queue per stage; the other stage isn't held up."""
    worker = rig().ready()
    worker.hear(toy.initialize("a"))
    worker.hear(toy.initialize("b"))
    worker.hear(toy.task(0, "a"))
    worker.hear(toy.initialize("a", "show"))
    worker.hear(toy.task(0, "b"))
    order = []
    while "draw" in worker.jobs:
        work = worker.jobs["draw"].work
        order.append((type(work), work.session))
        worker.finish("draw")
    assert order == [(InitializeStage, "a"), (InitializeStage, "b"), (RunTask, "a"), (RunTask, "b")]
    assert "show" in worker.jobs


def test_streaming_33_a_duplicate_changes_nothing(rig: Any, toy: Any) -> None:
    """Initialize, task and release that came before are counted and dropped."""
    worker = rig().ready()
    worker.hear(toy.initialize())
    worker.hear(toy.initialize())
    worker.finish("draw")
    worker.hear(toy.initialize())
    worker.hear(toy.task(0))
    worker.hear(toy.task(0))
    worker.finish("draw")
    worker.hear(toy.task(0))
    worker.hear(toy.release())
    worker.hear(toy.release())
    worker.finish("draw")
    worker.hear(toy.initialize())
    assert kinds(worker.sent) == ["StageInitialized", "TaskStarted", "TaskDone", "StageReleased"]
    assert worker.core.status()["dropped"] == {"duplicate": 6}
    assert not worker.jobs


def test_streaming_23_an_older_epoch_is_dropped(rig: Any, toy: Any) -> None:
    """What an earlier attempt at the session still sends does nothing, not even to the newer one's caches."""
    worker = rig().ready().live(epoch=5)
    for message in (toy.initialize(epoch=4), toy.task(0, epoch=4), toy.release(epoch=4)):
        worker.hear(message)
    worker.hear(toy.initialize(epoch=5, stage_epoch=0))
    assert not worker.sent
    assert not worker.jobs
    assert worker.core.status()["dropped"] == {"stale": 4}
    worker.hear(toy.task(0, epoch=5))
    assert kinds(worker.sent) == ["TaskStarted"]


def test_streaming_23_a_newer_epoch_replaces_the_older(rig: Any, toy: Any) -> None:
    """The old caches are released first, the old waiting tasks are dropped, the running one ends."""
    worker = rig().ready().live(epoch=1)
    worker.hear(toy.task(0))
    worker.hear(toy.task(1))
    worker.hear(toy.initialize(epoch=2))
    worker.hear(toy.task(0, epoch=2))
    order = []
    while "draw" in worker.jobs:
        work = worker.jobs["draw"].work
        order.append((type(work), work.epoch))
        worker.finish("draw")
    assert order == [(RunTask, 1), (ReleaseStage, 1), (InitializeStage, 2), (RunTask, 2)]
    assert kinds(worker.sent) == [
        "TaskStarted",
        "TaskDone",
        "StageInitialized",
        "TaskStarted",
        "TaskDone",
    ]


def test_a_new_epoch_right_behind_a_release_keeps_both_answers(rig: Any, toy: Any) -> None:
    """Release and initialize may be on their way together."""
    worker = rig().ready().live(epoch=1)
    worker.hear(toy.task(0))
    worker.hear(toy.release(epoch=1))
    worker.hear(toy.initialize(epoch=2))
    while "draw" in worker.jobs:
        worker.finish("draw")
    assert kinds(worker.sent) == ["TaskStarted", "TaskDone", "StageReleased", "StageInitialized"]
    worker.hear(toy.task(0, epoch=2))
    assert "draw" in worker.jobs


def test_streaming_21_a_release_drops_the_tasks_that_wait(rig: Any, toy: Any) -> None:
    """They get no answer; those of other sessions stay."""
    worker = rig().ready().live("a").live("b")
    worker.hear(toy.task(0, "a"))
    worker.hear(toy.task(1, "a"))
    worker.hear(toy.task(0, "b"))
    worker.hear(toy.release("a"))
    worker.hear(toy.task(2, "a"))
    worker.sent.clear()
    while "draw" in worker.jobs:
        worker.finish("draw")
    assert [(type(m), m.session) for m in worker.sent] == [
        (TaskDone, "a"),
        (TaskStarted, "b"),
        (TaskDone, "b"),
        (StageReleased, "a"),
    ]
    assert worker.core.status()["dropped"] == {"late": 1}


def test_streaming_21_a_release_before_the_initialization_ran(rig: Any, toy: Any) -> None:
    """Nothing was made, so only the release is answered."""
    worker = rig().ready().live("a")
    worker.hear(toy.task(0, "a"))
    worker.hear(toy.initialize("b"))
    worker.hear(toy.release("b"))
    worker.sent.clear()
    while "draw" in worker.jobs:
        worker.finish("draw")
    assert kinds(worker.sent) == ["TaskDone", "StageReleased"]


def test_streaming_21_releasing_what_is_not_there_succeeds(rig: Any, toy: Any) -> None:
    """All attempted on failure: a stage that never had the session says that it is gone."""
    worker = rig().ready()
    worker.hear(toy.release())
    assert worker.sent == [StageReleased("s", "draw", 1, 1)]


def test_streaming_21_a_failed_release_can_be_tried_again(rig: Any, toy: Any) -> None:
    """The failure is told; the session stays until a release succeeds, and takes no slot meanwhile."""
    worker = rig(slots=1).ready().live()
    worker.hear(toy.release())
    worker.fail("draw")
    assert worker.sent[-1].phase == "release"
    worker.hear(toy.task(0))
    assert "draw" not in worker.jobs
    worker.hear(toy.initialize("other"))
    worker.finish("draw")
    worker.hear(toy.release())
    worker.finish("draw")
    assert worker.sent[-1] == StageReleased("s", "draw", 1, 1)
    assert worker.core.status()["sessions"] == {"draw": ["other"], "show": []}


def test_streaming_23_a_failing_task_fails_its_session_only(rig: Any, toy: Any) -> None:
    """Waiting and later tasks of the session get the same failure with their own index; the others go on."""
    worker = rig().ready().live("a").live("b")
    worker.hear(toy.task(3, "a"))
    worker.hear(toy.task(4, "a"))
    worker.hear(toy.task(0, "b"))
    worker.sent.clear()
    actions = worker.fail("draw", message="RuntimeError: burnt")
    worker.hear(toy.task(5, "a"))
    worker.finish("draw")
    failures = [m for m in worker.sent if isinstance(m, StageFailed)]
    assert [(m.session, m.phase, m.index, m.failure.index, m.failure.message) for m in failures] == [
        ("a", "run", 3, None, "RuntimeError: burnt"),
        ("a", "run", 4, 4, "RuntimeError: burnt"),
        ("a", "run", 5, 5, "RuntimeError: burnt"),
    ]
    assert worker.sent[-1] == TaskDone("b", "draw", 1, 1, 0, {}, {}, 0.1)
    (line,) = [action for action in actions if isinstance(action, Log) and action.event == "stage_failed"]
    assert line.fields["traceback"] == "Traceback: here"
    worker.hear(toy.release("a"))
    worker.finish("draw")
    assert isinstance(worker.sent[-1], StageReleased)


def test_the_traceback_is_logged_and_not_sent(rig: Any, toy: Any) -> None:
    """What goes over the wire is the exception's type and message."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.fail("draw")
    assert "Traceback" not in repr(worker.sent)


def test_a_refused_request_names_the_field_and_is_no_error_in_the_log(rig: Any, toy: Any) -> None:
    """It is the caller's fault."""
    worker = rig().ready()
    worker.hear(toy.initialize())
    actions = worker.fail("draw", "request", "is negative")
    assert worker.sent[-1].failure.kind == "request"
    assert worker.sent[-1].failure.field == "seed"
    assert [action.level for action in actions if isinstance(action, Log)] == ["info"]


def test_a_failed_initialization_leaves_nothing(rig: Any, toy: Any) -> None:
    """Its waiting tasks fail too, its slot is free, and a release of it is answered."""
    worker = rig(slots=1).ready()
    worker.hear(toy.initialize())
    worker.hear(toy.task(0))
    worker.fail("draw")
    assert [(m.phase, m.index) for m in worker.sent] == [("initialize", None), ("run", 0)]
    worker.hear(toy.release())
    assert isinstance(worker.sent[-1], StageReleased)
    worker.hear(toy.initialize("other"))
    worker.finish("draw")
    assert isinstance(worker.sent[-1], StageInitialized)


def test_a_task_of_an_unknown_session_is_refused(rig: Any, toy: Any) -> None:
    """The broker hears of it, so that it doesn't wait for ever."""
    worker = rig().ready()
    worker.hear(toy.task(4))
    (reply,) = worker.sent
    assert (reply.phase, reply.index, reply.failure.kind, reply.failure.stage) == ("run", 4, "stage", "draw")
    worker.live(epoch=2)
    worker.hear(toy.task(0, epoch=3))
    assert isinstance(worker.sent[-1], StageFailed)


def test_a_session_beyond_the_slots_is_refused(rig: Any, toy: Any) -> None:
    """The worker never holds more than it offered."""
    worker = rig(slots=1).ready().live("a")
    worker.hear(toy.initialize("b"))
    assert worker.sent[-1].failure.kind == "overload"
    assert not worker.jobs


def test_more_tasks_than_may_wait_are_refused(rig: Any, toy: Any) -> None:
    """Memory is bounded whatever the broker does."""
    worker = rig(slots=1, mailbox=1).ready().live()
    for index in range(10):
        worker.hear(toy.task(index))
    refused = [m for m in worker.sent if isinstance(m, StageFailed)]
    assert [m.index for m in refused] == [6, 7, 8, 9]
    assert {m.failure.kind for m in refused} == {"overload"}


def test_streaming_34_work_for_a_stage_that_is_not_here_is_dropped(rig: Any, toy: Any) -> None:
    """Another stage, or another pipeline."""
    worker = rig(stages=("draw",)).ready()
    worker.hear(toy.initialize(stage="show"))
    worker.hear(InitializeStage("s", "other", "draw", 1, 1, 3, {}, {}, toy.task(0).inputs["control"]))
    assert not worker.sent
    assert worker.core.counters["unknown_stage"] == 2


def test_work_that_comes_before_the_weights_waits(rig: Any, toy: Any) -> None:
    """The build is a job like others."""
    worker = rig()
    worker.start()
    worker.welcome()
    worker.hear(toy.initialize())
    worker.finish("draw")
    assert worker.jobs["draw"].work == toy.initialize()


def test_indices_may_be_left_out(rig: Any, toy: Any) -> None:
    """A broker that reuses a constant runs no task for it; only what isn't newer is a duplicate."""
    worker = rig().ready().live()
    for index in (2, 3, 7):
        worker.hear(toy.task(index))
        worker.finish("draw")
    assert [m.index for m in worker.sent if isinstance(m, TaskDone)] == [2, 3, 7]


def test_memory_of_epochs_is_bounded(rig: Any, toy: Any) -> None:
    """Sessions come and go; only the newest are remembered, and those that are here."""
    worker = rig().ready().live("stays", epoch=9)
    for number in range(SEEN_MAX + 10):
        worker.hear(toy.release(f"s{number}"))
    worker.hear(toy.task(0, "stays", epoch=8))
    assert worker.core.status()["dropped"] == {"stale": 1}


def test_a_silent_release_that_fails_is_the_end_of_it(rig: Any, toy: Any) -> None:
    """Nobody waits for it; it is logged, and the stage goes on."""
    worker = rig().ready().live()
    worker.welcome(2)
    worker.fail("draw")
    assert worker.core.status()["sessions"]["draw"] == []
    worker.hear(toy.initialize(), attachment=2)
    assert "draw" in worker.jobs


def test_a_release_on_its_way_is_not_repeated_when_the_broker_is_lost(rig: Any, toy: Any) -> None:
    """Each at most once on success."""
    worker = rig().ready().live("a").live("b")
    worker.hear(toy.release("a"))
    worker.hear(toy.release("b"))
    worker.welcome(2)
    released = []
    while "draw" in worker.jobs:
        released.append(worker.jobs["draw"].work.session)
        worker.finish("draw")
    assert released == ["a", "b"]


def test_releases_go_on_in_a_drain(rig: Any, toy: Any) -> None:
    """A broker that takes leave of its sessions is answered."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.do(ShutdownRequested(worker.now))
    worker.hear(toy.release())
    worker.finish("draw")
    worker.finish("draw")
    assert kinds(worker.sent) == ["TaskStarted", "Draining", "TaskDone", "StageReleased", "Goodbye"]


STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["initialize", "task", "release"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 3),
        st.integers(0, 4),
    ),
    st.tuples(st.sampled_from(["finish", "fail", "lose", "tick"]), st.just(""), st.just(0), st.just(0)),
)


@settings(max_examples=300)
@given(steps=st.lists(STEPS, max_size=40))
def test_streaming_21_no_order_of_messages_breaks_an_actor(
    rig: Any, toy: Any, steps: list[tuple[str, str, int, int]]
) -> None:
    """Whatever comes, invariants hold, tasks of an epoch run in order, and in the end everything can be released."""
    worker = rig().ready()
    attachment = 1
    for what, session, epoch, index in steps:
        if what == "initialize":
            worker.hear(toy.initialize(session, epoch=epoch), attachment)
        elif what == "task":
            worker.hear(toy.task(index, session, epoch=epoch), attachment)
        elif what == "release":
            worker.hear(toy.release(session, epoch=epoch), attachment)
        elif what == "lose":
            attachment += 1
            worker.welcome(attachment)
        elif what == "tick":
            worker.tick(0.1)
            worker.hear(Heartbeat(), attachment)
        elif "draw" in worker.jobs:
            worker.finish("draw") if what == "finish" else worker.fail("draw")
    for session in ("a", "b", "c"):
        worker.hear(toy.release(session, epoch=9), attachment)
    while "draw" in worker.jobs:
        worker.finish("draw")
    assert worker.core.status()["sessions"]["draw"] == []
    done = [(m.session, m.epoch, m.index) for m in worker.sent if isinstance(m, TaskStarted)]
    newest: dict[tuple[str, int], int] = {}
    if attachment == 1:
        for session, epoch, index in done:
            assert index > newest.get((session, epoch), -1)
            newest[session, epoch] = index


@pytest.mark.parametrize("phase", ["initialize", "run"])
def test_a_failure_of_an_older_epoch_does_not_touch_the_newer(rig: Any, toy: Any, phase: str) -> None:
    """It ran out while the new attempt was already asked for."""
    worker = rig().ready()
    worker.hear(toy.initialize(epoch=1))
    if phase == "run":
        worker.finish("draw")
        worker.hear(toy.task(0))
    worker.hear(toy.initialize(epoch=2))
    worker.fail("draw")
    worker.finish("draw")
    worker.finish("draw")
    worker.hear(toy.task(0, epoch=2))
    worker.finish("draw")
    assert isinstance(worker.sent[-1], TaskDone)
