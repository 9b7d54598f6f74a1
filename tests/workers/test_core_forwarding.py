"""The worker's core: what a stage has made is given to the task that awaits it here, and the broker is told of both."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reelwire import wire
from reelwire.controls import KeyState
from reelwire.messages import (
    Artifact,
    Failure,
    Goodbye,
    ReleaseStage,
    Reservation,
    RunTask,
    SegmentUse,
    StageFailed,
    StageReleased,
    TaskDone,
    TaskStarted,
    WorkerHello,
)
from reelwire.workers.actions import Action, Run, Send, TakeBack
from reelwire.workers.actor import with_inputs
from reelwire.workers.events import Finished, OutboxFull


def ahead(toy: Any, index: int, session: str = "s", **more: Any) -> Any:
    """A task of `show` that awaits what `draw` makes for its chunk."""
    return replace(toy.task(index, session, "show"), **{"inputs": {}, "awaits": ("picture",), **more})


def picture(index: int) -> Artifact:
    return Artifact({"from": index})


def report_of(worker: Any, **more: Any) -> Finished:
    """What `draw` reports of a picture."""
    job = worker.jobs["draw"]
    work = job.work
    whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
    return Finished("draw", job, TaskDone(*whose, {"picture": picture(work.index)}, {}, 0.1), **more)


def drawn(worker: Any, **more: Any) -> list[Action]:
    """`draw` reports a picture."""
    return list(worker.finish("draw", report_of(worker).reply, **more))


def kinds(messages: list[Any]) -> list[tuple[type, str, int]]:
    return [(type(message), message.stage, message.index) for message in messages]


def begun(worker: Any) -> tuple[str, int, Any] | None:
    """What `show` is at: session, chunk and inputs."""
    job = worker.jobs.get("show")
    return None if job is None else (job.work.session, job.work.index, job.work.inputs)


@pytest.fixture
def worker(rig: Any) -> Any:
    """With a session at both stages."""
    return rig(mailbox=1).ready().live().live(stage="show")


# --- giving ----------------------------------------------------------------------------------------------------------------


def test_a_worker_says_that_it_forwards(rig: Any) -> None:
    """Only then may the broker send it tasks that await something."""
    worker = rig()
    worker.start()
    (hello,) = [message for message in worker.sent if isinstance(message, WorkerHello)]
    assert hello.forwards


def test_what_is_made_is_given_to_the_task_that_awaits_it(worker: Any, toy: Any) -> None:
    """It begins with that input beside those that it had, and awaits nothing any more."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0, inputs={"control": Artifact()}))
    assert begun(worker) is None
    drawn(worker)
    assert begun(worker) == ("s", 0, {"control": Artifact(), "picture": picture(0)})
    assert worker.jobs["show"].work.awaits == ()


def test_the_broker_is_told_of_the_result_and_then_of_what_began(worker: Any, toy: Any) -> None:
    """So it never hears that a task began whose input it doesn't know; the result is as complete as ever."""
    worker.hear(toy.task(0))
    worker.hear(toy.task(1))
    worker.hear(ahead(toy, 0))
    worker.sent.clear()
    drawn(worker)
    assert kinds(worker.sent) == [(TaskDone, "draw", 0), (TaskStarted, "draw", 1), (TaskStarted, "show", 0)]
    assert worker.sent[0].outputs == {"picture": picture(0)}


def test_the_stages_go_on_before_the_broker_is_told(worker: Any, toy: Any) -> None:
    """Who needs the result has it: nothing that is said comes before it, nor is the result put in words before."""
    order: list[str] = []
    packed = wire.pack(Goodbye(""))

    def pack() -> wire.Packed:
        order.append("packed")
        return packed

    worker.hear(toy.task(0))
    worker.hear(toy.task(1))
    worker.hear(ahead(toy, 0))
    for action in worker.core.reported(report_of(worker, pack=pack)):
        order.append(type(action).__name__)  # noqa: PERF401  between them `pack` is called
    assert order == ["Run", "packed", "Send", "Send", "Send", "Run"]


def test_a_stages_own_next_task_goes_after_all_else(worker: Any, toy: Any) -> None:
    """It is the one stage that is awake already, and its thread may be the one that tells of the result."""
    worker.hear(toy.task(0))
    worker.hear(toy.task(1))
    worker.hear(ahead(toy, 0))
    assert [action.stage for action in drawn(worker) if isinstance(action, Run)] == ["show", "draw"]


def test_a_result_that_fits_in_no_message_is_a_failure_although_it_was_given_to_another_stage(
    worker: Any, toy: Any
) -> None:
    """The broker hears of the failure alone, and of what began with the result; what was lent for it is taken back."""
    piece = SegmentUse("segment", 1)
    worker.hear(toy.task(0))
    worker.hear(toy.task(1))
    worker.hear(ahead(toy, 0))
    failed = StageFailed("s", "draw", 1, 1, "run", 0, Failure("stage", "can't be sent", "draw", 0))
    actions = drawn(worker, pack=lambda: failed, pieces=(piece,))
    told = [action.message for action in actions if isinstance(action, Send)]
    assert kinds(told) == [(StageFailed, "draw", 0), (StageFailed, "draw", 1), (TaskStarted, "show", 0)]
    assert [action.stage for action in actions if isinstance(action, Run)] == ["show"]
    assert [action.segments for action in actions if isinstance(action, TakeBack)] == [(piece,)]


def test_a_task_has_begun_before_the_broker_is_told_so(worker: Any, toy: Any) -> None:
    """The stage's thread has its job first, also when the task is one that has just come."""
    assert [type(action) for action in worker.hear(toy.task(0))] == [Run, Send]


def test_a_task_with_other_inputs_is_the_same_in_all_else(toy: Any) -> None:
    """No field is forgotten, whatever it holds."""
    plain = toy.task(3)
    marked = RunTask(**{field.name: object() for field in fields(RunTask)})  # type: ignore[arg-type]
    inputs = {"picture": picture(3)}
    for task in (plain, marked):
        assert with_inputs(task, inputs, ("control",)) == replace(task, inputs=inputs, awaits=("control",))


def test_a_result_that_nobody_awaits_leaves_before_anything_else(worker: Any, toy: Any) -> None:
    """The broker sends it on: it is told first."""
    worker.hear(toy.task(0))
    worker.hear(toy.task(1))
    assert [type(action) for action in drawn(worker)] == [Send, Send, Run]


def test_what_arrives_at_a_busy_stage_waits_in_order(worker: Any, toy: Any) -> None:
    """One task at a time: the broker hears that the second began when the first is done."""
    for index in range(2):
        worker.hear(toy.task(index))
        worker.hear(ahead(toy, index))
    drawn(worker)
    drawn(worker)
    assert begun(worker) == ("s", 0, {"picture": picture(0)})
    assert (TaskStarted, "show", 1) not in kinds(worker.sent)
    worker.finish("show")
    assert begun(worker) == ("s", 1, {"picture": picture(1)})
    assert kinds(worker.sent)[-2:] == [(TaskDone, "show", 0), (TaskStarted, "show", 1)]


def test_what_is_made_is_given_to_its_own_session_and_chunk(rig: Any, toy: Any) -> None:
    """Neither to a neighbour's task of the same chunk nor to the same session's next one."""
    worker = rig(mailbox=1).ready().live("a").live("b").live("a", "show").live("b", "show")
    worker.hear(ahead(toy, 0, "b"))
    worker.hear(ahead(toy, 1, "a"))
    worker.hear(toy.task(0, "a"))
    drawn(worker)
    assert begun(worker) is None
    worker.hear(toy.task(0, "b"))
    drawn(worker)
    assert begun(worker) == ("b", 0, {"picture": picture(0)})


def test_a_task_goes_on_waiting_for_what_is_still_missing(worker: Any, toy: Any) -> None:
    """Of two inputs that it awaits it keeps the first."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0, awaits=("picture", "sound")))
    drawn(worker)
    assert begun(worker) is None
    (job,) = worker.core.actors["show"].ahead
    assert (job.work.inputs, job.work.awaits) == ({"picture": picture(0)}, ("sound",))


def test_streaming_15_a_reservation_that_awaits_an_input_is_bound_when_it_begins(worker: Any, toy: Any) -> None:
    """To the newest keys that came until then, which is after its task came."""
    keys = KeyState(revision=3, held=("a",), tap_revision=3, tap_keys=("a",))
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0, reservation=Reservation("control", KeyState())))
    worker.hear(replace(toy.set_keys(keys), stage="show"))
    drawn(worker)
    assert worker.jobs["show"].applied.control.values["keys"] == ["a"]
    (started,) = [m for m in worker.sent if isinstance(m, TaskStarted) and m.stage == "show"]
    assert started.applied == worker.jobs["show"].applied


# --- what was made before --------------------------------------------------------------------------------------------------


def test_a_task_that_comes_after_what_it_awaits_begins_at_once(worker: Any, toy: Any) -> None:
    """The broker sent it before it knew that the picture is there."""
    worker.hear(toy.task(0))
    drawn(worker)
    worker.sent.clear()
    worker.hear(ahead(toy, 0))
    assert begun(worker) == ("s", 0, {"picture": picture(0)})
    assert kinds(worker.sent) == [(TaskStarted, "show", 0)]


@pytest.mark.parametrize("mailbox", [0, 1, 3])
def test_so_much_is_kept_as_the_broker_may_not_know_of(rig: Any, toy: Any, mailbox: int) -> None:
    """One running and the mailbox, whatever the length of the session; what was made before that isn't there any more."""
    worker = rig(mailbox=mailbox).ready().live().live(stage="show")
    for index in range(6):
        worker.hear(toy.task(index))
        drawn(worker)
    actor = worker.core.actors["draw"]
    assert list(actor.held["s"].made) == list(range(5 - mailbox, 6))
    worker.hear(ahead(toy, 4 - mailbox))
    assert begun(worker) is None
    worker.hear(ahead(toy, 5 - mailbox))
    assert begun(worker) == ("s", 5 - mailbox, {"picture": picture(5 - mailbox)})


def test_nothing_is_kept_where_no_stage_would_take_it(rig: Any, toy: Any) -> None:
    """What goes to the client, or to another worker's stage, isn't held here longer than it takes to send it."""
    alone = rig(stages=("draw",)).ready().live()
    alone.hear(toy.task(0))
    drawn(alone)
    assert alone.core.actors["draw"].held["s"].made == {}
    both = rig().ready().live().live(stage="show")
    both.hear(toy.task(0, stage="show"))
    both.finish("show")
    assert both.core.actors["show"].held["s"].made == {}


def test_what_was_made_is_forgotten_with_its_session(worker: Any, toy: Any) -> None:
    """Nothing of it is left when the stage was released."""
    worker.hear(toy.task(0))
    drawn(worker)
    worker.hear(toy.release())
    worker.finish("draw")
    assert worker.core.actors["draw"].held == {}
    worker.hear(ahead(toy, 0))
    assert begun(worker) is None


# --- what never comes ------------------------------------------------------------------------------------------------------


def test_streaming_22_a_release_drops_what_awaits(worker: Any, toy: Any) -> None:
    """The picture is told to the broker, and nothing is begun for a session that leaves."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0))
    worker.hear(toy.release(stage="show"))
    assert worker.core.actors["show"].ahead == []
    drawn(worker)
    worker.finish("show")
    assert begun(worker) is None
    assert isinstance(worker.sent[-1], StageReleased)
    assert (TaskStarted, "show", 0) not in kinds([m for m in worker.sent if not isinstance(m, StageReleased)])


def test_what_a_released_stage_still_makes_is_given_to_nobody(worker: Any, toy: Any) -> None:
    """The broker hears of the end of the task alone, so the worker's other stage doesn't begin with it."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0))
    worker.hear(toy.release())
    worker.sent.clear()
    drawn(worker)
    assert kinds(worker.sent) == [(TaskDone, "draw", 0)]
    assert worker.sent[0].outputs == {}
    assert begun(worker) is None


def test_streaming_33_a_newer_epoch_drops_what_the_older_one_awaits(worker: Any, toy: Any) -> None:
    """Neither the older task nor a picture of the older epoch is of use any more."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0))
    worker.hear(toy.initialize(stage="show", epoch=2))
    assert worker.core.actors["show"].ahead == []
    while "show" in worker.jobs:  # the older one is released, the newer one initialized
        worker.finish("show")
    worker.hear(ahead(toy, 0, epoch=2))
    drawn(worker)
    assert begun(worker) is None, "the picture is of the older epoch"


def test_a_lost_attachment_drops_what_awaits(worker: Any, toy: Any) -> None:
    """All sessions are released; what is still made is told to nobody and given to nobody."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0))
    worker.do(OutboxFull(worker.now))
    assert worker.core.actors["show"].ahead == []
    worker.sent.clear()
    drawn(worker)
    assert worker.sent == []
    assert isinstance(worker.jobs["show"].work, ReleaseStage)


def test_streaming_23_what_a_failed_task_would_have_made_never_comes(worker: Any, toy: Any) -> None:
    """Its follower awaits it until the session is released, and answers nothing."""
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0))
    worker.fail("draw")
    assert begun(worker) is None
    assert kinds([m for m in worker.sent if isinstance(m, StageFailed)]) == [(StageFailed, "draw", 0)]
    worker.hear(toy.release(stage="show"))
    worker.finish("show")
    assert worker.core.actors["show"].ahead == []
    assert isinstance(worker.sent[-1], StageReleased)


def test_streaming_23_a_failed_stage_answers_what_it_is_given(worker: Any, toy: Any) -> None:
    """A task that awaited its input while an earlier chunk failed there fails too, when it would have begun."""
    for index in range(2):
        worker.hear(toy.task(index))
        worker.hear(ahead(toy, index))
    drawn(worker)
    worker.fail("show")
    assert [m.index for m in worker.sent if isinstance(m, StageFailed)] == [0], "the other one awaits its picture"
    drawn(worker)
    failed = [m for m in worker.sent if isinstance(m, StageFailed)]
    assert [(m.stage, m.phase, m.index) for m in failed] == [("show", "run", 0), ("show", "run", 1)]
    assert begun(worker) is None


def test_streaming_23_a_session_that_could_not_begin_answers_what_awaits(rig: Any, toy: Any) -> None:
    """Every task that was taken has one answer, also one that came before the initialization failed."""
    worker = rig(mailbox=1).ready().live()
    worker.hear(toy.initialize(stage="show"))
    worker.hear(toy.task(0))
    worker.hear(ahead(toy, 0))
    worker.fail("show")
    failed = [(m.phase, m.index) for m in worker.sent if isinstance(m, StageFailed)]
    assert failed == [("initialize", None), ("run", 0)]
    assert worker.core.actors["show"].ahead == []
    drawn(worker)
    assert begun(worker) is None


def test_more_tasks_than_may_await_are_refused(rig: Any, toy: Any) -> None:
    """Those that await are counted with those that wait: memory is bounded whatever the broker does."""
    worker = rig(slots=1, mailbox=1).ready().live(stage="show")
    for index in range(10):
        worker.hear(ahead(toy, index))
    refused = [m for m in worker.sent if isinstance(m, StageFailed)]
    assert [m.index for m in refused] == [5, 6, 7, 8, 9]
    assert {m.failure.kind for m in refused} == {"overload"}
    assert len(worker.core.actors["show"].ahead) == 5


STEPS = st.tuples(
    st.sampled_from(
        ("initialize", "task", "task", "ahead", "ahead", "release", "lose", "finish", "finish", "finish", "fail")
    ),
    st.sampled_from(("draw", "show")),
    st.sampled_from("ab"),
    st.integers(1, 2),
    st.integers(0, 3),
)


@settings(max_examples=150)
@given(steps=st.lists(STEPS, max_size=60))
def test_streaming_09_no_order_of_messages_begins_a_task_without_its_input(
    rig: Any, toy: Any, steps: list[tuple[str, str, str, int, int]]
) -> None:
    """Whatever comes, invariants hold, a task begins with the picture of its own chunk, and all can be released."""
    worker = rig(mailbox=1).ready()
    attachment = 1
    for what, stage, session, epoch, index in steps:
        if what == "initialize":
            worker.hear(toy.initialize(session, stage, epoch), attachment)
        elif what == "task":
            worker.hear(toy.task(index, session, epoch=epoch), attachment)
        elif what == "ahead":
            worker.hear(ahead(toy, index, session, epoch=epoch), attachment)
        elif what == "release":
            worker.hear(toy.release(session, stage, epoch), attachment)
        elif what == "lose":
            attachment += 1
            worker.welcome(attachment)
        elif stage in worker.jobs and what == "fail":
            worker.fail(stage)
        elif stage in worker.jobs:
            is_drawn = stage == "draw" and isinstance(worker.jobs["draw"].work, RunTask)
            drawn(worker) if is_drawn else worker.finish(stage)
        job = worker.jobs.get("show")
        if job is not None and isinstance(job.work, RunTask):
            assert job.work.inputs == {"picture": picture(job.work.index)}
    for stage in ("draw", "show"):
        for session in "ab":
            worker.hear(toy.release(session, stage, 9), attachment)
        while stage in worker.jobs:
            worker.finish(stage)
        assert worker.core.actors[stage].held == {}
        assert worker.core.actors[stage].ahead == []
