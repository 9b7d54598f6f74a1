"""Late binding through the whole core: reservations, registers on their way to the actor, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.controls import KeyState
from reelwire.messages import Applied, Artifact

LATE = {"control_binding": "late"}


@pytest.fixture
def stream(rig: Any, kit: Any) -> Any:
    return kit.Stream(rig, asked=LATE)


def conditions(stream: Any, upto: int = 2) -> None:
    """Make the conditions that are asked for, below `upto`."""
    while stream.worker.jobs["encode"] and stream.queued("encode")[0] < upto:
        stream.worker.finish("encode")


def denoises(stream: Any) -> list[m.RunTask]:
    """The tasks that were sent to denoise."""
    return [task for task in stream.worker.heard(m.RunTask) if task.stage == "denoise"]


def told(stream: Any) -> list[KeyState]:
    """The registers that went to an actor."""
    return [message.keys for message in stream.worker.heard(m.SetStageKeys)]


def test_streaming_15_late_binding_is_the_default() -> None:
    """Whoever doesn't ask for it gets it."""
    assert m.OpenSession("k", "world", 1).control_binding == "late"


def test_streaming_15_a_held_key_is_a_reservation_until_its_denoise_starts(stream: Any, kit: Any) -> None:
    """Its task has the register in place of the control; what the actor says it bound it to is the chunk's control."""
    conditions(stream)
    stream.press("w")
    stream.rig.turn()
    (task,) = denoises(stream)
    assert task.reservation == m.Reservation("control", stream.keys.state, 0, 0)
    assert sorted(task.inputs) == ["condition"]
    stream.make()
    (chunk,) = stream.got()
    assert chunk.applied == Applied("tap", kit.keys_of("w"), 1, 1, 0)


def test_streaming_15_one_reservation_is_open_at_a_time(stream: Any) -> None:
    """The next waits until the actor said that the chunk began, and is one chunk ahead of the output at most."""
    stream.press("w")
    stream.rig.turn()
    assert stream.cursors()[1] == 1
    stream.worker.starts = False
    conditions(stream)
    stream.rig.turn()
    assert stream.cursors()[1] == 1, "nobody said that it began"
    first = denoises(stream)[0]
    stream.worker.starts = True
    stream.worker.started(first)
    stream.rig.turn()
    assert stream.cursors()[1] == 2
    assert [task.index for task in denoises(stream)] == [0, 1]
    assert denoises(stream)[1].reservation == m.Reservation("control", stream.keys.state, 1, 0)
    stream.rig.turn()
    assert stream.cursors()[1] == 2


def test_streaming_15_newer_keys_replace_those_of_a_reservation_at_its_actor(stream: Any) -> None:
    """The register goes there when the turn ends, and the chunk is made with it; bound ones aren't told any more."""
    conditions(stream)
    stream.press("w")
    stream.rig.turn()
    stream.rig.turn()
    assert [task.index for task in denoises(stream)] == [0, 1]
    assert told(stream) == []
    stream.press("d")
    stream.rig.turn()
    stream.release("w")
    stream.rig.turn()
    assert [keys.held for keys in told(stream)] == [("d", "w"), ("d",)]
    message = stream.worker.last(m.SetStageKeys)
    assert (message.session, message.pipeline, message.stage) == (stream.id, "world", "denoise")
    stream.make(2)
    assert [chunk.applied.control.values["keys"] for chunk in stream.got()] == [["w"], ["d", "w"]]
    assert [chunk.applied.source for chunk in stream.got()] == ["tap", "tap"]


def test_streaming_15_many_changes_in_a_turn_are_one_register_for_the_actor(stream: Any) -> None:
    """Only the newest counts, so a client that types without end doesn't flood a worker that others share."""
    conditions(stream)
    stream.press("w")
    stream.rig.turn()
    stream.rig.turn()
    for _ in range(500):
        stream.press("d")
        stream.release("d")
    stream.press("a")
    assert told(stream) == []
    stream.rig.turn()
    assert told(stream) == [stream.keys.state]
    stream.rig.turn()
    assert len(told(stream)) == 1


def test_streaming_15_a_register_of_the_same_turn_is_not_sent_after_what_it_was_bound_to(stream: Any) -> None:
    """The actor said in that turn that the chunk began, or the session ended: nobody waits for the keys any more."""
    conditions(stream)
    stream.press("w")
    stream.rig.turn()
    stream.rig.turn()
    stream.press("d")
    stream.worker.finish("denoise")
    stream.rig.turn()
    assert told(stream) == []
    stream.press("s")
    stream.client.end(stream.id, "cancel")
    stream.rig.turn()
    assert told(stream) == []


def test_streaming_15_a_reservation_at_the_broker_takes_the_register_along(stream: Any) -> None:
    """As long as its task wasn't sent nobody is told of newer keys: the task carries the newest."""
    stream.press("w")
    stream.rig.turn()
    stream.press("a")
    assert told(stream) == []
    conditions(stream, 1)
    reservation = denoises(stream)[0].reservation
    assert reservation is not None
    assert reservation.keys == stream.keys.state


def test_streaming_15_if_everything_was_released_nothing_moves(stream: Any, kit: Any) -> None:
    """A reservation whose keys were given up by the time its chunk begins is an empty control, and is delivered."""
    conditions(stream)
    stream.press("w")
    stream.rig.turn()
    stream.rig.turn()
    stream.make(1)
    stream.keys.reset()
    stream.client.keys(stream.id, stream.keys)
    stream.make(2)
    assert [chunk.applied.source for chunk in stream.got()] == ["tap", "held", "still"]
    assert stream.got()[2].applied.control == kit.keys_of()
    stream.rig.turn()
    assert stream.cursors()[1] == 3, "nothing is held and nothing pending"
    stream.press("s")
    stream.rig.turn()
    stream.keys.reset_pose()
    stream.client.keys(stream.id, stream.keys)
    stream.make(1)
    still = stream.got()[3].applied
    assert (still.source, still.control, still.pose_revision) == ("still", kit.keys_of(reset_pose=True), 1)


def test_streaming_15_a_tap_is_applied_once(stream: Any) -> None:
    """The actor says which one-shot it consumed; the next chunk's reservation doesn't get it again."""
    stream.keys.tap("w")
    stream.client.keys(stream.id, stream.keys)
    stream.rig.turn()
    stream.make(1)
    stream.rig.turn()
    assert stream.cursors()[1] == 1
    assert stream.session.controls.consumed_tap == 1
    stream.press("a")
    stream.rig.turn()
    stream.make(2)
    assert [(x.applied.source, x.applied.tap_revision) for x in stream.got()] == [("tap", 1), ("tap", 2), ("held", 2)]


def test_streaming_15_explicit_controls_are_fixed_and_take_the_next_index(stream: Any, kit: Any) -> None:
    """By index or from the slot, also while a reservation is open; what it consumes is known to the later ones."""
    stream.press("w")
    stream.rig.turn()
    assert stream.client.submit(stream.id, 1, kit.keys_of("s")) == m.ControlAccepted(stream.id, 1)
    assert stream.cursors()[1] == 2
    stream.make(2)
    stream.client.submit(stream.id, None, kit.keys_of("a"))
    stream.rig.turn()
    assert stream.client.last(m.ControlAccepted) == m.ControlAccepted(stream.id, 3, by_index=False)
    stream.make(2)
    got = [(chunk.applied.source, chunk.applied.tap_revision) for chunk in stream.got()]
    assert got == [("tap", 1), ("explicit", 1), ("held", 1), ("explicit", 1)]
    explicit = [task for task in denoises(stream) if task.index in (1, 3)]
    assert [task.reservation for task in explicit] == [None, None]
    assert explicit[0].inputs["control"] == kit.keys_of("s")


def test_streaming_22_close_delivers_an_open_reservation(stream: Any, kit: Any) -> None:
    """It was accepted; it is bound to the keys as they were, and newer ones change nothing."""
    stream.press("w")
    stream.rig.turn()
    stream.client.end(stream.id)
    stream.release("w")
    stream.make(1)
    assert [chunk.applied.control for chunk in stream.got()] == [kit.keys_of("w")]
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure) == ("closed", None)


def test_streaming_15_a_result_alone_binds(stream: Any, kit: Any) -> None:
    """A worker may leave out that a task began; its result says the same."""
    stream.worker.starts = False
    stream.press("w")
    stream.rig.turn()
    stream.make(3)
    assert [chunk.applied.control for chunk in stream.got()] == [kit.keys_of("w")] * 3


def test_streaming_29_a_reservation_is_accepted_when_it_is_bound(kit: Any) -> None:
    """Its clock starts then; a change of the keys counts for the chunk that says it applied it."""
    rig = kit.Rig()
    stream = kit.Stream(rig, asked=LATE)
    conditions(stream)
    stream.press("w")
    rig.turn()
    rig.turn()
    rig.now += 1.0
    stream.press("d")
    rig.turn()  # reaches the actor while chunk 0 runs, so chunk 1 is the first to apply it
    rig.now += 1.0
    stream.worker.finish("denoise")
    rig.now += 0.5
    stream.worker.finish("decode")
    rig.now += 1.5
    stream.worker.finish("denoise")
    stream.worker.finish("decode")
    assert [chunk.timing.latency_s for chunk in stream.got()] == [2.5, 2.0]
    stream.client.say(m.AskMetrics(1, stream.id))
    shown = stream.client.last(m.Metrics).values["change_to_frame_s"]
    assert (shown["count"], shown["max"]) == (2, 3.0)
    assert shown["mean"] == pytest.approx((2.5 + 3.0) / 2)


def test_streaming_29_a_change_that_no_chunk_shows_is_forgotten(kit: Any) -> None:
    """What arrived after the chunk had begun, and offers nothing, isn't measured by a chunk much later."""
    rig = kit.Rig()
    stream = kit.Stream(rig, asked=LATE)
    stream.worker.starts = False
    stream.keys.tap("w")
    stream.client.keys(stream.id, stream.keys)
    rig.turn()
    conditions(stream)
    first = stream.worker.jobs["denoise"][0]
    stream.worker.started(first)  # it begins, and says so in its result only
    stream.keys.reset()
    stream.client.keys(stream.id, stream.keys)
    stream.worker.finish("denoise")
    stream.worker.finish("decode")
    rig.advance(60.0)
    stream.press("d")
    rig.turn()
    stream.make(1)
    stream.client.say(m.AskMetrics(1, stream.id))
    shown = stream.client.last(m.Metrics).values["change_to_frame_s"]
    assert (shown["count"], shown["max"]) == (2, 0.0)


def test_a_tap_that_had_begun_was_not_overwritten(stream: Any) -> None:
    """The broker counts a newer one-shot before it knows that the chunk had begun with the older one."""
    stream.worker.starts = False
    conditions(stream)
    stream.keys.tap("w")
    stream.client.keys(stream.id, stream.keys)
    stream.rig.turn()
    stream.worker.started(stream.worker.jobs["denoise"][0])
    stream.keys.tap("a")
    stream.client.keys(stream.id, stream.keys)
    assert stream.session.controls.taps_overwritten == 1
    stream.make(2)
    assert stream.session.controls.taps_overwritten == 0
    assert [chunk.applied.control.values["keys"] for chunk in stream.got()] == [["w"], ["a"]]


def applying(keys: Any, **more: Any) -> Artifact:
    """A control that an actor says it applied."""
    return Artifact({"keys": keys, "reset_pose": False, **more})


GOOD = Applied("tap", applying(["w"]), 1, 1, 0)
NONSENSE = {
    "missing": None,
    "explicit": replace(GOOD, source="explicit"),
    "still with keys": replace(GOOD, source="still", tap_revision=0),
    "held, and a one-shot consumed": replace(GOOD, source="held"),
    "a one-shot from the future": replace(GOOD, tap_revision=9),
    "a one-shot that was consumed": replace(GOOD, tap_revision=-1),
    "keys from the future": replace(GOOD, revision=2),
    "keys from before": replace(GOOD, revision=-1),
    "a pose that nobody asked for": replace(GOOD, pose_revision=1),
    "an unknown key": replace(GOOD, control=applying(["q"])),
    "more keys than there are": replace(GOOD, control=applying(["w"] * 5)),
    "no list": replace(GOOD, control=applying("w")),
    "no names": replace(GOOD, control=applying([["w"]])),
    "no truth": replace(GOOD, control=applying(["w"], reset_pose=0)),
    "more than keys": replace(GOOD, control=applying(["w"], speed=2)),
    "nothing": replace(GOOD, control=Artifact()),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_streaming_23_a_binding_that_cannot_be_fails_its_session(kit: Any, name: str) -> None:
    """In the word that the chunk began it is passed over, in its result it fails the stage; neighbours go on."""
    rig = kit.Rig()
    stream = kit.Stream(rig, asked=LATE)
    other = stream.client.open("other", **LATE)
    stream.worker.starts = False
    stream.press("w")
    rig.turn()
    conditions(stream)
    task = stream.worker.jobs["denoise"][0]
    wrong = NONSENSE[name]
    stream.worker.say(m.TaskStarted(stream.id, "denoise", 1, 1, 0, wrong))
    assert stream.session.controls.unbound == 0
    assert stream.session.state == "running"
    stream.worker.bound[stream.id, 0] = GOOD
    stream.worker.finish("denoise", applied=wrong)
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure.kind, ended.failure.index) == ("failed", "stage", 0)
    assert "control" in ended.failure.message
    assert task.index == 0
    assert rig.core.sessions[other].state == "ready"


@pytest.mark.parametrize("stage", ["encode", "denoise"])
def test_streaming_23_a_control_that_was_not_asked_for_fails_its_session(kit: Any, stage: str) -> None:
    """A fixed control is applied as it is; nobody else binds anything."""
    stream = kit.Stream(kit.Rig())
    stream.client.submit(stream.id, 0, kit.keys_of("s"))
    if stage == "denoise":
        conditions(stream, 1)
    stream.worker.finish(stage, applied=GOOD)
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure.stage) == ("failed", stage)


def test_streaming_23_a_second_word_on_a_binding_must_be_the_first(stream: Any) -> None:
    """What a chunk was told to be made with can't change when it is done."""
    conditions(stream)
    stream.press("w")
    stream.rig.turn()
    other = replace(stream.worker.bound[stream.id, 0], source="held", tap_revision=0)
    stream.worker.finish("denoise", applied=other)
    assert stream.client.ended(stream.id).state == "failed"


def test_streaming_23_a_failure_drops_the_reservation_above_it(stream: Any) -> None:
    """Its actor may still bind it; that is an answer about nothing, and the worker lives on."""
    conditions(stream)
    stream.press("w")
    stream.rig.turn()
    stream.rig.turn()
    assert stream.session.controls.unbound == 1
    stream.worker.fail("denoise")
    assert stream.client.ended(stream.id).state == "failed"
    assert not stream.rig.core.sessions
    assert stream.worker.name in {worker["name"] for worker in stream.rig.core.status()["workers"]}


def test_a_register_that_its_worker_does_not_take_is_not_sent(kit: Any) -> None:
    """A worker with a small limit keeps the keys that came with the task; nobody is dropped for a key."""
    names = tuple(letter * 400 for letter in "abcdefgh")
    rig = kit.Rig()
    spec = kit.world(control_names=names, control_aliases={})
    worker = rig.worker(spec=spec, limits={"header_bytes_max": 5000})
    client = rig.client()
    session = client.open(**LATE)
    worker.starts = False
    worker.finish("encode")
    client.say(m.SetKeys(session, KeyState(1, names[:1], 1, names[:1])))
    rig.turn()
    client.say(m.SetKeys(session, KeyState(2, names, 2, names)))
    rig.turn()
    assert worker.heard(m.SetStageKeys) == []
    client.say(m.SetKeys(session, KeyState(3, names[:2], 3, names[:2])))
    rig.turn()
    assert [message.keys.revision for message in worker.heard(m.SetStageKeys)] == [3]
    assert rig.counter("stage_keys_unfit") == 1
    assert not worker.heard(m.Rejected)
