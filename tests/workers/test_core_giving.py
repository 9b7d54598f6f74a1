"""The worker's core: a task that was sent ahead of what comes from outside is completed by a message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reelwire.controls import KeyState
from reelwire.messages import (
    Artifact,
    GiveInputs,
    Reservation,
    RunTask,
    StageFailed,
    StageReleased,
    TaskDone,
    TaskStarted,
)
from reelwire.workers.actions import Log, Run, Send
from reelwire.workers.events import OutboxFull

CONTROL = Artifact({"keys": ["w"]})
KEYS = KeyState(revision=3, held=("a",))


def ahead(toy: Any, index: int, session: str = "s", stage: str = "draw", **more: Any) -> Any:
    """A task that awaits its control."""
    return replace(toy.task(index, session, stage), **{"inputs": {}, "awaits": ("control",), **more})


def give(index: int, session: str = "s", stage: str = "draw", epoch: int = 1, **more: Any) -> GiveInputs:
    """What completes it."""
    return GiveInputs(session, "toy", stage, epoch, 1, index, more.pop("inputs", {"control": CONTROL}), **more)


def kinds(messages: list[Any]) -> list[tuple[type, str, int]]:
    return [(type(message), message.stage, message.index) for message in messages]


def begun(worker: Any, stage: str = "draw") -> tuple[int, Any] | None:
    """What a stage is at: chunk and inputs."""
    job = worker.jobs.get(stage)
    return None if job is None or not isinstance(job.work, RunTask) else (job.work.index, dict(job.work.inputs))


def drawn(worker: Any) -> None:
    """`draw` reports a picture."""
    work = worker.jobs["draw"].work
    whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
    picture = {"picture": Artifact({"from": work.index})}
    worker.finish("draw", TaskDone(*whose, picture, {}, 0.1, worker.jobs["draw"].applied))


@pytest.fixture
def worker(rig: Any) -> Any:
    """With a session at both stages."""
    return rig(mailbox=1).ready().live().live(stage="show")


def test_what_comes_from_outside_completes_its_task(worker: Any, toy: Any) -> None:
    """It begins with the control beside the inputs that it had; its thread has it before the broker is told."""
    worker.hear(ahead(toy, 0, inputs={"condition": Artifact()}))
    assert begun(worker) is None
    actions = worker.hear(give(0))
    assert begun(worker) == (0, {"condition": Artifact(), "control": CONTROL})
    assert worker.jobs["draw"].work.awaits == ()
    assert [type(action) for action in actions] == [Run, Send]
    assert kinds(worker.sent) == [(TaskStarted, "draw", 0)]
    assert worker.core.status()["dropped"] == {}


def test_a_completed_task_waits_behind_the_one_that_runs(worker: Any, toy: Any) -> None:
    """One at a time, in order of receipt of what completes them."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 1))
    worker.hear(give(1))
    assert begun(worker) == (0, {"control": Artifact()})
    drawn(worker)
    assert begun(worker) == (1, {"control": CONTROL})


def test_streaming_15_a_reservation_completes_a_task_too(worker: Any, toy: Any) -> None:
    """It is bound when the task begins, to the newest keys that came until then."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 1))
    worker.hear(give(1, inputs={}, reservation=Reservation("control", KeyState(revision=1, held=("w",)))))
    worker.hear(toy.set_keys(KEYS))
    drawn(worker)
    assert worker.jobs["draw"].applied.control.values["keys"] == ["a"]
    assert begun(worker) == (1, {"control": worker.jobs["draw"].applied.control})
    assert worker.sent[-1] == TaskStarted("s", "draw", 1, 1, 1, worker.jobs["draw"].applied)


@pytest.mark.parametrize("first", ["control", "picture"])
def test_what_a_stage_makes_and_what_comes_from_outside_may_come_in_either_order(
    worker: Any, toy: Any, first: str
) -> None:
    """A task that awaits both begins with the second."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0, stage="show", awaits=("picture", "control")))
    if first == "control":
        worker.hear(give(0, stage="show"))
        assert begun(worker, "show") is None
        drawn(worker)
    else:
        drawn(worker)
        assert begun(worker, "show") is None
        worker.hear(give(0, stage="show"))
    assert begun(worker, "show") == (0, {"picture": Artifact({"from": 0}), "control": CONTROL})


def test_streaming_15_a_reservation_may_come_before_what_a_stage_makes(worker: Any, toy: Any) -> None:
    """The task keeps it meanwhile."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0, stage="show", awaits=("picture", "control")))
    worker.hear(give(0, stage="show", inputs={}, reservation=Reservation("control", KEYS)))
    drawn(worker)
    assert worker.jobs["show"].applied.control.values["keys"] == ["a"]
    assert {*worker.jobs["show"].work.inputs} == {"picture", "control"}


@pytest.mark.parametrize("which", ["another chunk", "another session", "another epoch", "given before", "gone"])
def test_what_no_task_awaits_is_dropped(rig: Any, toy: Any, which: str) -> None:
    """It is counted, and changes nothing."""
    worker = rig(mailbox=1).ready().live().live("t")
    worker.hear(ahead(toy, 0))
    message = {
        "another chunk": give(1),
        "another session": give(0, "t"),
        "another epoch": give(0, epoch=2),
    }.get(which, give(0))
    if which == "given before":
        worker.hear(give(0))
    if which == "gone":
        worker.hear(toy.release())
        worker.finish("draw")
    before, said = dict(worker.jobs), list(worker.sent)
    (log,) = worker.hear(message)
    assert isinstance(log, Log)
    assert (worker.jobs, worker.sent) == (before, said)
    assert worker.core.status()["dropped"] == {"late": 1}


def test_what_came_for_a_newer_epoch_before_is_stale(worker: Any, toy: Any) -> None:
    """As all that is said of an older one."""
    worker.hear(toy.initialize(epoch=2))
    worker.hear(give(0))
    assert worker.core.status()["dropped"] == {"stale": 1}


@pytest.mark.parametrize(
    "more",
    [
        {"inputs": {"control": CONTROL, "sound": Artifact()}},
        {"inputs": {"control": CONTROL}, "reservation": Reservation("sound", KEYS)},
    ],
)
def test_what_a_task_does_not_await_is_left_out(worker: Any, toy: Any, more: dict[str, Any]) -> None:
    """It is counted; what the task awaits is given."""
    worker.hear(ahead(toy, 0))
    worker.hear(give(0, **more))
    assert begun(worker) == (0, {"control": CONTROL})
    assert worker.jobs["draw"].work.reservation is None
    assert worker.core.status()["dropped"] == {"unawaited": 1}


def test_a_message_for_a_stage_that_is_not_here_is_dropped(rig: Any) -> None:
    """As a task is."""
    worker = rig(stages=("draw",)).ready().live()
    worker.hear(give(0, stage="show"))
    assert worker.core.status()["dropped"] == {"unknown_stage": 1}


# --- the end ---------------------------------------------------------------------------------------------------------------


def test_streaming_22_a_release_drops_a_task_that_awaits_its_control(worker: Any, toy: Any) -> None:
    """The session is gone at once; what would have completed the task comes too late."""
    worker.hear(ahead(toy, 0))
    worker.hear(toy.release())
    worker.finish("draw")
    assert (type(worker.sent[-1]), worker.core.actors["draw"].ahead) == (StageReleased, [])
    worker.hear(give(0))
    assert worker.jobs == {}


def test_a_lost_attachment_drops_a_task_that_awaits_its_control(worker: Any, toy: Any) -> None:
    """It is of a broker that is gone."""
    worker.hear(ahead(toy, 0))
    worker.do(OutboxFull(worker.now))
    assert worker.core.actors["draw"].ahead == []


def test_streaming_23_a_failed_stage_answers_what_is_completed(worker: Any, toy: Any) -> None:
    """Every task that was taken has one answer: the chunk before failed while this one's control was on its way."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 1))
    worker.fail("draw")
    worker.sent.clear()
    worker.hear(give(1))
    assert kinds(worker.sent) == [(StageFailed, "draw", 1)]
    assert (begun(worker), worker.core.actors["draw"].ahead) == (None, [])


STEPS = st.tuples(
    st.sampled_from(
        ("task", "ahead", "ahead", "give", "give", "reserve", "release", "lose", "finish", "finish", "fail")
    ),
    st.sampled_from("ab"),
    st.integers(1, 2),
    st.integers(0, 3),
)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_streaming_09_no_order_of_messages_begins_a_task_without_its_control(
    rig: Any, toy: Any, steps: list[tuple[str, str, int, int]]
) -> None:
    """Whatever comes, invariants hold, a task begins with a control, and all can be released."""
    worker, attachment = rig(mailbox=1).ready(), 1
    for what, session, epoch, index in steps:
        if what == "task":
            worker.hear(toy.initialize(session, epoch=epoch), attachment)
            worker.hear(toy.task(index, session, epoch=epoch), attachment)
        elif what == "ahead":
            worker.hear(ahead(toy, index, session, epoch=epoch), attachment)
        elif what == "give":
            worker.hear(give(index, session, epoch=epoch), attachment)
        elif what == "reserve":
            reservation = Reservation("control", KEYS)
            worker.hear(give(index, session, epoch=epoch, inputs={}, reservation=reservation), attachment)
        elif what == "release":
            worker.hear(toy.release(session, epoch=epoch), attachment)
        elif what == "lose":
            attachment += 1
            worker.welcome(attachment)
        elif "draw" in worker.jobs:
            worker.fail("draw") if what == "fail" else worker.finish("draw")
        assert begun(worker) is None or {*begun(worker)[1]} == {"control"}  # type: ignore[index]
    for session in "ab":
        worker.hear(toy.release(session, epoch=9), attachment)
    while "draw" in worker.jobs:
        worker.finish("draw")
    assert (worker.core.actors["draw"].held, worker.core.actors["draw"].ahead) == ({}, [])
