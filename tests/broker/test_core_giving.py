"""Tasks that are sent ahead of the control of a client that steers chunk by chunk, through the whole core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.actions import Send
from reelwire.broker.events import Received
from reelwire.tensors import Inline, TensorRef

LATE = {"control_binding": "late"}


def tasks(worker: Any, stage: str = "denoise") -> list[tuple[int, tuple[str, ...]]]:
    """The chunks that a stage was sent tasks for, and what each awaits."""
    return [(task.index, task.awaits) for task in worker.heard(m.RunTask) if task.stage == stage]


def parked(worker: Any) -> list[tuple[str, int]]:
    """Tasks that were sent ahead of what comes with their control."""
    outside = {"control", "encode_request"}
    return [(task.stage, task.index) for task in worker.heard(m.RunTask) if outside & {*task.awaits}]


def given(worker: Any) -> list[tuple[str, int]]:
    """Those that were completed."""
    return [(message.stage, message.index) for message in worker.heard(m.GiveInputs)]


def counts(rig: Any, stage: str = "denoise") -> tuple[int, int, bool]:
    """What the broker counts at an actor: tasks with all their inputs, those ahead of some, and whether one is parked."""
    actor = rig.core._peers.workers["w"].actors["world", stage]
    return actor.outstanding, actor.awaiting, bool(actor.parked)


def conditions(worker: Any) -> None:
    """Make all that are asked for."""
    while worker.jobs["encode"]:
        worker.finish("encode")


def stepped(rig: Any, kit: Any, **more: Any) -> Any:
    """A session whose first chunk is being denoised: there is no second control yet, all else is there."""
    stream = kit.Stream(rig, **{"forwards": True, **more})
    conditions(stream.worker)
    stream.client.submit(stream.id, 0)
    rig.turn()
    return stream


@pytest.fixture
def stream(rig: Any, kit: Any) -> Any:
    return stepped(rig, kit)


def never(kit: Any) -> Any:
    """The dataflow of a stream that prefetches nothing: a request for a condition comes with each control."""
    spec = kit.world()
    return replace(spec, prefetch=replace(spec.prefetch, refill="never"))


# --- who is sent what ahead ------------------------------------------------------------------------------------------------


def test_streaming_11_the_next_task_lies_at_its_worker_while_the_client_looks(stream: Any) -> None:
    """With the condition, and without the control: that is all that is sent when it comes."""
    assert tasks(stream.worker) == [(0, ()), (1, ("control",))]
    assert {*stream.worker.heard(m.RunTask)[-1].inputs} == {"condition"}
    stream.make()
    assert isinstance(stream.client.submit(stream.id, 1), m.ControlAccepted)
    (message,) = stream.worker.heard(m.GiveInputs)
    assert (message.stage, message.index, {*message.inputs}) == ("denoise", 1, {"control"})
    assert message.reservation is None
    assert (1, ()) not in tasks(stream.worker)
    assert stream.queued("denoise") == [1]
    (running,) = stream.worker.jobs["denoise"]
    assert ({*running.inputs}, running.awaits) == ({"condition", "control"}, ())


def test_streaming_11_every_chunk_of_a_client_that_reacts_is_completed_so(stream: Any) -> None:
    """From the second on, and what it gets is what it would have got."""
    for index in range(1, 8):
        stream.make()
        stream.client.submit(stream.id, index)
    stream.make()
    assert given(stream.worker) == parked(stream.worker) == [("denoise", index) for index in range(1, 8)]
    assert [chunk.index for chunk in stream.got()] == list(range(8))
    assert all(chunk.applied.control == stream.got()[0].applied.control for chunk in stream.got())
    assert stream.client.ended(stream.id).state == "completed"


def test_the_broker_takes_what_it_has_completed_for_started(stream: Any) -> None:
    """At an actor that has nothing else to do: the grant for the next control grows in the same turn."""
    stream.make()
    stream.worker.starts = False
    stream.client.submit(stream.id, 1)
    flow = stream.session.flow
    assert (flow.stages["denoise"].started, counts(stream.rig)) == (2, (1, 0, False))
    assert flow.edges["control"].occupancy == flow.control.issued - 2 == 0


def test_what_completes_a_task_leaves_before_what_others_are_told(stream: Any) -> None:
    """As tasks do."""
    stream.make()
    rig, client = stream.rig, stream.client
    control = m.SubmitControl(stream.id, 1, m.Artifact({"keys": ["w"]}))
    actions = rig.core.handle(Received(rig.now, client.route, client.attachment, control, 100, rig.entropy()))
    sends = [action for action in actions if isinstance(action, Send)]
    assert [send.is_work for send in sends if isinstance(send.message, m.GiveInputs)] == [True]
    assert not any(send.is_work for send in sends if isinstance(send.message, m.ControlAccepted))


def test_streaming_11_a_control_that_comes_before_the_chunk_is_taken_is_given_too(stream: Any) -> None:
    """While the chunk before is still being made: the task waits behind it."""
    stream.client.submit(stream.id, 1)
    assert given(stream.worker) == [("denoise", 1)]
    assert (stream.queued("denoise"), counts(stream.rig)) == ([0, 1], (2, 0, False))
    assert stream.session.flow.stages["denoise"].started == 1
    stream.make(2)
    assert [chunk.index for chunk in stream.got()] == [0, 1]


@pytest.mark.parametrize(
    "why", ["no forwarding", "no mailbox", "no control yet", "a key", "the slot", "another", "end"]
)
def test_streaming_11_no_task_is_parked_otherwise(rig: Any, kit: Any, why: str) -> None:
    """Only for a session that is alone and has just been steered by index, at a worker that completes tasks."""
    chunks, mailbox = 1 if why == "end" else 8, 0 if why == "no mailbox" else 1
    stream = kit.Stream(rig, chunks=chunks, mailbox=mailbox, forwards=why != "no forwarding")
    if why == "another":
        stream.client.open("another")
    conditions(stream.worker)
    if why == "a key":
        stream.press("w")
    elif why == "the slot":
        stream.client.submit(stream.id, None)
    elif why != "no control yet":
        stream.client.submit(stream.id, 0)
    rig.turn()
    while stream.worker.jobs["denoise"]:
        stream.worker.finish("denoise")
        rig.turn()
    assert parked(stream.worker) == given(stream.worker) == []


def test_streaming_15_a_stream_with_keys_is_never_parked(rig: Any, kit: Any) -> None:
    """Nor does it cost a message more: with a worker that forwards there are the same ones whatever it was before."""
    stream = kit.Stream(rig, asked=LATE, forwards=True)
    stream.press("w")
    rig.turn()
    stream.make(7)
    assert len(stream.got()) == 7
    assert parked(stream.worker) == given(stream.worker) == []


def test_a_task_is_parked_when_the_one_before_has_begun(rig: Any, kit: Any) -> None:
    """Not in the turn in which that one is sent, which is in a hurry; a result says that it had begun as well."""
    stream = kit.Stream(rig, forwards=True)
    conditions(stream.worker)
    stream.worker.starts = False
    stream.client.submit(stream.id, 0)
    rig.turn()
    assert tasks(stream.worker) == [(0, ())]
    stream.worker.finish("denoise")
    assert tasks(stream.worker) == [(0, ()), (1, ("control",))]


def test_streaming_10_a_task_is_parked_only_with_room_for_what_it_makes(rig: Any, kit: Any) -> None:
    """Room that it has reserved; the next stage isn't sent ahead of it, before it has its control."""
    stream = stepped(rig, kit, spec=kit.world(capacities={"latent": 1}))
    assert tasks(stream.worker) == [(0, ())]
    stream.worker.finish("denoise")
    rig.turn()
    assert tasks(stream.worker) == [(0, ()), (1, ("control",))]
    assert stream.session.flow.edges["latent"].occupancy == 1
    stream.worker.finish("decode")
    rig.turn()
    assert [index for index, _ in tasks(stream.worker, "decode")] == [0]
    stream.client.submit(stream.id, 1)
    rig.turn()
    assert tasks(stream.worker, "decode")[1:] == [(1, ("latent",))]


def test_streaming_20_a_parked_task_waits_for_the_media_clock(rig: Any, kit: Any) -> None:
    """It isn't sent before its chunk may begin, and isn't given its control before that either."""
    asked = {"pace": "realtime", "credit": m.Credit(1, 1 << 30)}
    stream = stepped(rig, kit, chunks=20, asked=asked)
    stream.make(1, ack=False)
    stream.client.ack(stream.id, 1, m.Credit(2, 1 << 30))
    rig.turn()
    assert parked(stream.worker) == [("denoise", 1)]
    stream.client.submit(stream.id, 1)
    stream.make(1, ack=False)
    stream.client.ack(stream.id, 2, m.Credit(2, 1 << 30))  # it lets nothing wait for it
    rig.turn()
    assert parked(stream.worker) == [("denoise", 1)], "chunk 2 may not begin yet"


def test_streaming_20_a_clock_that_was_set_back_holds_a_parked_task(rig: Any, kit: Any) -> None:
    """The client wants less ahead than when the task was sent: its control is given when its chunk may begin."""
    stream = stepped(rig, kit, chunks=20, asked={"pace": "realtime", "credit": m.Credit(1, 1 << 30)})
    assert parked(stream.worker) == [("denoise", 1)]
    stream.make(1, ack=False)
    stream.client.ack(stream.id, 1, m.Credit(1, 1 << 30))
    stream.client.submit(stream.id, 1)
    rig.turn()
    assert given(stream.worker) == []
    (shown,) = rig.core.status()["sessions"]
    assert shown["waits_for"]["denoise"] == "pace"
    rig.advance(9 / 16)
    assert given(stream.worker) == [("denoise", 1)]


# --- what is given -----------------------------------------------------------------------------------------------------------


def test_streaming_15_keys_complete_a_parked_task_with_a_reservation(rig: Any, kit: Any) -> None:
    """It carries the register, newer ones follow it, and the chunk is made with the newest; then nothing is parked any more."""
    stream = stepped(rig, kit, asked=LATE)
    stream.make()
    stream.press("a")
    assert stream.worker.heard(m.SetStageKeys) == []
    rig.turn()
    (message,) = stream.worker.heard(m.GiveInputs)
    assert (message.inputs, message.reservation) == ({}, m.Reservation("control", stream.keys.state, 0, 0))
    assert stream.worker.heard(m.SetStageKeys) == []
    stream.worker.bound.clear()
    stream.make(2)
    assert stream.got()[1].applied.control.values["keys"] == ["a"]
    assert given(stream.worker) == parked(stream.worker) == [("denoise", 1)]


def test_streaming_15_newer_keys_follow_a_reservation_that_waits(rig: Any, kit: Any) -> None:
    """Behind the chunk that is being made they reach the actor, as they reach one whose task brought the reservation."""
    stream = stepped(rig, kit, asked=LATE)
    stream.press("a")
    rig.turn()
    assert given(stream.worker) == [("denoise", 1)]
    stream.release("a")
    stream.press("d")
    rig.turn()
    assert stream.worker.last(m.SetStageKeys).keys == stream.keys.state
    stream.make(2)
    assert stream.got()[1].applied.control.values["keys"] == ["d"]


def test_streaming_15_a_reservation_that_was_not_given_yet_carries_the_newest_keys(rig: Any, kit: Any) -> None:
    """While others have their turn newer keys aren't sent after it: it isn't there."""
    stream = stepped(rig, kit, asked=LATE)
    stream.make()
    others = [stream.client.open(key) for key in "ab"]
    conditions(stream.worker)
    for session in others:
        stream.client.submit(session, 0)
    stream.press("a")
    rig.turn()
    assert given(stream.worker) == []
    stream.press("d")
    rig.turn()
    assert stream.worker.heard(m.SetStageKeys) == []
    stream.worker.finish("denoise")
    rig.turn()
    (message,) = stream.worker.heard(m.GiveInputs)
    assert message.reservation.keys == stream.keys.state


def test_what_is_there_is_given_while_a_stage_makes_the_rest(rig: Any, kit: Any) -> None:
    """The control, while the condition is being made: the task is one like others that are ahead of a stage here."""
    stream = kit.Stream(rig, forwards=True)
    stream.client.submit(stream.id, 0)
    stream.worker.finish("encode")
    rig.turn()
    assert tasks(stream.worker)[1:] == [(1, ("condition", "control"))]
    stream.client.submit(stream.id, 1)
    assert given(stream.worker) == [("denoise", 1)]
    assert counts(rig) == (1, 1, False)
    stream.make(2)
    assert [chunk.index for chunk in stream.got()] == [0, 1]


def test_a_condition_that_comes_before_the_control_goes_to_the_parked_task(rig: Any, kit: Any) -> None:
    """Its worker gives it; the broker sends it nowhere."""
    stream = kit.Stream(rig, forwards=True)
    stream.client.submit(stream.id, 0)
    stream.worker.finish("encode")
    rig.turn()
    stream.worker.finish("encode")
    assert (given(stream.worker), counts(rig)) == ([], (1, 0, True))
    stream.make()
    stream.client.submit(stream.id, 1)
    assert {*stream.worker.last(m.GiveInputs).inputs} == {"control"}
    assert stream.queued("denoise") == [1]


def test_streaming_11_without_a_prefetch_both_stages_are_parked(rig: Any, kit: Any) -> None:
    """One control then completes the chunk's encode, and its denoise, which awaits its condition besides."""
    stream = kit.Stream(rig, forwards=True, spec=never(kit))
    stream.client.submit(stream.id, 0)
    rig.turn()
    stream.worker.finish("encode")
    rig.turn()
    assert parked(stream.worker) == [("encode", 1), ("denoise", 1)]
    assert tasks(stream.worker)[-1] == (1, ("condition", "control"))
    stream.make()
    before = len(stream.worker.heard(m.RunTask))
    stream.client.submit(stream.id, 1)
    assert sorted(given(stream.worker)) == [("denoise", 1), ("encode", 1)]
    assert [task.index for task in stream.worker.heard(m.RunTask)[before:] if task.stage != "decode"] == [2]
    stream.make()
    assert [chunk.index for chunk in stream.got()] == [0, 1]


def test_an_encode_that_settles_while_its_next_task_is_parked_runs_it(rig: Any, kit: Any) -> None:
    """It is there already; only those after it are spared."""
    spec = never(kit)
    encode, *others = spec.stages
    stream = kit.Stream(rig, forwards=True, spec=replace(spec, stages=(replace(encode, settles=True), *others)))
    stream.client.submit(stream.id, 0)
    rig.turn()
    assert parked(stream.worker) == [("encode", 1)]
    stream.worker.finish("encode", constant=True)
    rig.turn()
    for index in range(1, 4):
        stream.make()
        stream.client.submit(stream.id, index)
        rig.turn()
    stream.make()
    assert [chunk.index for chunk in stream.got()] == [0, 1, 2, 3]
    assert [index for index, _ in tasks(stream.worker, "encode")] == [0, 1]


# --- beside others ---------------------------------------------------------------------------------------------------------


def test_streaming_13_a_parked_task_has_its_turn_like_any_other(rig: Any, kit: Any) -> None:
    """Who came to live there meanwhile waits no longer for it than without, and is no longer kept waiting."""
    orders = {}
    for forwards in (True, False):
        rig = kit.Rig()
        stream = stepped(rig, kit, forwards=forwards)
        stream.make()
        others = [stream.client.open(key) for key in "abc"]
        conditions(stream.worker)
        for session in others[:2]:
            stream.client.submit(session, 0)
        stream.client.submit(stream.id, 1)
        stream.client.submit(others[2], 0)
        names = {stream.id: "stepped", **dict(zip(others, "abc", strict=True))}
        made = []
        while stream.worker.jobs["denoise"]:
            made.append(names[stream.worker.finish("denoise").session])
            rig.turn()
        orders[forwards] = made
        assert bool(given(stream.worker)) is forwards
    assert orders[True] == orders[False]


def test_streaming_13_a_parked_task_keeps_no_room_from_others(rig: Any, kit: Any) -> None:
    """Neither a place at the actor nor one ahead: another session is served as if there were none."""
    stream = stepped(rig, kit)
    stream.make()
    assert counts(rig) == (0, 0, True)
    other = stream.client.open("other")
    conditions(stream.worker)
    for index in range(2):
        stream.client.submit(other, index)
    assert counts(rig) == (2, 0, True)
    assert rig.core.sessions[other].flow.stages["denoise"].started == 1


# --- time ------------------------------------------------------------------------------------------------------------------


def test_streaming_30_a_stage_with_a_parked_task_waits_for_its_control(rig: Any, kit: Any) -> None:
    """In the status as in the idle gaps; and nobody takes it for hung, however long the client looks."""
    stream = stepped(rig, kit)
    stream.make()
    (shown,) = rig.core.status()["sessions"]
    assert shown["waits_for"]["denoise"] == "input:control"
    rig.now += 2.0
    stream.client.submit(stream.id, 1)
    rig.now += 1.0
    stream.make()
    stream.client.say(m.AskMetrics(1, stream.id))
    idle = stream.client.last(m.Metrics).values["stages"]["denoise"]["idle_s"]
    assert idle["input:control"]["seconds"] >= 2.0
    (_, chunk) = stream.got()
    assert chunk.timing.stages["denoise"].started_s - chunk.timing.stages["denoise"].ready_s < 1e-9


def test_a_parked_task_is_not_waited_for(rig: Any, kit: Any) -> None:
    """Its actor owes no answer: the session is closed when nobody has steered it for so long, and its worker stays."""
    stream = stepped(rig, kit)
    stream.make()
    conditions(stream.worker)
    rig.advance(rig.config.task_timeout_s + rig.config.control_idle_s + 1)
    assert stream.client.ended(stream.id).state == "closed"
    assert "w" in rig.core._peers.workers
    assert (counts(rig), stream.worker.ahead) == ((0, 0, False), [])


# --- the end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["drain", "cancel"])
@pytest.mark.parametrize("made", [0, 1])
def test_streaming_22_no_end_waits_for_a_parked_task(rig: Any, kit: Any, mode: Any, made: int) -> None:
    """What was accepted comes, or not, and the session ends at once; another one is made in its places."""
    stream = stepped(rig, kit)
    stream.make(made)
    stream.client.end(stream.id, mode)
    if mode == "drain":
        stream.make(1 - made)
        assert [chunk.index for chunk in stream.got()] == [0]
    assert stream.client.ended(stream.id).state == ("closed" if mode == "drain" else "cancelled")
    assert (counts(rig), counts(rig, "decode"), stream.worker.ahead) == ((0, 0, False), (0, 0, False), [])
    again = stream.client.open("again")
    conditions(stream.worker)
    stream.client.submit(again, 0)
    stream.worker.make("denoise", "decode")
    assert len(stream.client.chunks(again)) == 1


def test_streaming_22_a_control_and_the_end_after_it_complete_the_task(rig: Any, kit: Any) -> None:
    """A drain in the same turn makes what was accepted, which is at the worker without its control."""
    stream = stepped(rig, kit)
    stream.make()
    rig.only_takes = lambda event: isinstance(event, Received) and isinstance(event.message, m.SubmitControl)
    stream.client.submit(stream.id, 1)
    stream.client.end(stream.id, "drain")
    stream.make()
    assert [chunk.index for chunk in stream.got()] == [0, 1]
    assert stream.client.ended(stream.id).state == "closed"


def test_streaming_23_a_failed_chunk_leaves_the_parked_one_alone(rig: Any, kit: Any) -> None:
    """It is never given its control, and goes with its session."""
    stream = stepped(rig, kit)
    stream.worker.fail("denoise")
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure.index, given(stream.worker)) == ("failed", 0, [])
    assert stream.worker.ahead == []
    assert counts(rig) == (0, 0, False)


def test_streaming_23_a_lost_worker_takes_the_parked_task_with_it(rig: Any, kit: Any) -> None:
    """The session fails; whoever comes under its name has nothing parked."""
    stream = stepped(rig, kit)
    stream.worker.say(m.Goodbye("it was killed"))
    assert stream.client.ended(stream.id).failure.kind == "worker_lost"
    rig.worker(forwards=True)
    assert counts(rig) == (0, 0, False)


@pytest.mark.parametrize("said", ["started", "done"])
def test_streaming_34_a_parked_task_neither_begins_nor_ends(rig: Any, kit: Any, said: str) -> None:
    """A worker that says so is wrong: it is counted, nothing changes, and the session goes on."""
    stream = stepped(rig, kit)
    stream.make()
    (task,) = stream.worker.ahead
    at = (task.session, task.stage, task.epoch, task.stage_epoch, task.index)
    before = rig.counter("orphans")
    done = kit.done(task, {"latent": m.Artifact()}, {})
    stream.worker.say(m.TaskStarted(*at) if said == "started" else done)
    assert (rig.counter("orphans"), counts(rig)) == (before + 1, (0, 0, True))
    stream.client.submit(stream.id, 1)
    stream.make()
    assert [chunk.index for chunk in stream.got()] == [0, 1]


def test_a_control_that_the_worker_does_not_accept_fails_its_chunk(rig: Any, kit: Any) -> None:
    """As it would with its task: what lies below is delivered, and the failure names stage and chunk."""
    stream = stepped(rig, kit, limits={"frame_bytes_max": 1000})
    stream.make()
    poses = TensorRef("float32", (20, 4, 4), Inline(bytes(1280)))
    control = m.Artifact(tensors={"poses": poses})
    stream.client.submit(stream.id, 1, control)
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure.stage, ended.failure.index) == ("failed", "denoise", 1)
    assert (given(stream.worker), counts(rig)) == ([], (0, 0, False))


def test_the_memory_that_a_parked_task_was_to_read_comes_back(rig: Any, kit: Any) -> None:
    """It has the condition, in shared memory, until its place is given back."""
    stream = stepped(rig, kit, memory=True)
    stream.make()
    assert any("/condition/1" in text for text in stream.worker.memory._texts.values())
    assert stream.worker.memory.out
    stream.client.end(stream.id, "cancel")
    rig.turn()
    assert stream.worker.memory.out == {}
