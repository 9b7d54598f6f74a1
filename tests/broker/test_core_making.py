"""From controls to delivered chunks, through the whole core."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.controls import KeyState
from reelwire.messages import Artifact


@pytest.fixture
def stream(rig: Any, kit: Any) -> Any:
    return kit.Stream(rig)


def test_streaming_02_two_conditions_run_before_any_control(stream: Any) -> None:
    """When the session becomes ready both are sent; what encode ends brings no more."""
    assert stream.queued("encode") == [0, 1]
    stream.worker.finish("encode")
    stream.worker.finish("encode")
    assert stream.cursors() == (2, 0)
    assert stream.queued("encode") == []


def test_streaming_02_a_control_does_not_start_an_encode(stream: Any) -> None:
    """The window that it opens is filled when its denoise ends."""
    stream.worker.finish("encode")
    stream.worker.finish("encode")
    stream.client.submit(stream.id, 0)
    assert stream.queued("encode") == []
    stream.worker.finish("denoise")
    assert stream.queued("encode") == [2]


def test_streaming_03_duplicate_control_is_refused_and_changes_nothing(stream: Any) -> None:
    """Each fault of the index has its code and says what was expected."""
    assert stream.client.submit(stream.id, 0) == m.ControlAccepted(stream.id, 0)
    before = stream.cursors()
    for index, code in ((0, "duplicate"), (2, "gap"), (-1, "malformed"), (8, "past_end"), (99, "past_end")):
        refused = stream.client.submit(stream.id, index)
        assert (refused.index, refused.code, refused.expected) == (index, code, 1)
    assert stream.cursors() == before


def test_streaming_03_a_control_without_room_is_refused_and_accepted_later(kit: Any) -> None:
    """No room isn't an error of the index: the same control is taken when a denoise has started."""
    stream = kit.Stream(kit.Rig())
    for index in range(2):
        assert isinstance(stream.client.submit(stream.id, index), m.ControlAccepted)
    refused = stream.client.submit(stream.id, 2)
    assert (refused.code, refused.expected) == ("no_room", 2)
    stream.worker.finish("encode")
    assert isinstance(stream.client.submit(stream.id, 2), m.ControlAccepted)


def test_streaming_07_the_refill_is_in_the_step_that_sends_the_latent(stream: Any) -> None:
    """One event brings the next condition's task and the decode."""
    stream.client.submit(stream.id, 0)
    stream.worker.finish("encode")
    stream.worker.finish("encode")
    before = len(stream.worker.heard(m.RunTask))
    stream.worker.finish("denoise")
    new = stream.worker.heard(m.RunTask)[before:]
    assert [(task.stage, task.index) for task in new] == [("encode", 2), ("decode", 0)]


def test_streaming_09_denoise_gets_condition_and_control_of_its_chunk(stream: Any, kit: Any) -> None:
    """Whatever arrives first, a task's inputs are of one index."""
    for index, key in enumerate("wa"):
        stream.client.submit(stream.id, index, kit.keys_of(key))
    stream.worker.finish("encode")
    stream.worker.finish("encode")
    for index, key in enumerate("wa"):
        task = stream.worker.jobs["denoise"][0]
        assert task.index == index
        assert task.inputs["condition"].values == {"from": f"{stream.id}/condition/{index}"}
        assert task.inputs["control"] == kit.keys_of(key)
        assert (task.is_first, task.is_last) == (index == 0, False)
        stream.worker.finish("denoise")


def test_streaming_10_waiting_in_a_mailbox_still_counts(stream: Any) -> None:
    """The second condition waits at the actor, and its request keeps its place until it starts."""
    edge = stream.session.flow.edges["encode_request"]
    assert stream.queued("encode") == [0, 1]
    assert edge.occupancy == 1
    stream.worker.finish("encode")
    assert edge.occupancy == 0


@pytest.mark.parametrize("mailbox", [0, 1, 3])
def test_streaming_11_an_actor_has_one_running_and_its_mailbox(kit: Any, mailbox: int) -> None:
    """No more tasks are sent, over all sessions, than the worker announced to take."""
    rig = kit.Rig()
    stream = kit.Stream(rig, mailbox=mailbox)
    for key in "abc":
        stream.client.open(key)
    assert len(stream.worker.jobs["encode"]) == 1 + mailbox
    stream.worker.finish("encode")
    assert len(stream.worker.jobs["encode"]) == 1 + mailbox


def test_streaming_11_at_most_two_chunks_are_unacknowledged(stream: Any) -> None:
    """The third is made when the first was taken."""
    stream.press("w")
    stream.rig.turn()
    stream.make(2, ack=False)
    for _ in range(3):
        stream.worker.finish("encode")
    stream.worker.finish("denoise")
    assert stream.queued("decode") == []
    stream.client.ack(stream.id, 1)
    assert stream.queued("decode") == [2]


def test_streaming_14_the_messages_of_a_turn_are_applied_before_the_look(stream: Any) -> None:
    """A press and a release that arrive together give one chunk of the one-shot, and no more."""
    stream.press("w")
    stream.release("w")
    assert stream.cursors()[1] == 0
    stream.rig.turn()
    assert stream.cursors()[1] == 1
    stream.make()
    (chunk,) = stream.got()
    assert (chunk.applied.source, chunk.applied.control.values["keys"]) == ("tap", ["w"])


def test_streaming_14_an_explicit_control_by_index_is_taken_at_once(stream: Any, kit: Any) -> None:
    """It doesn't wait for the end of the turn; keys come after it."""
    stream.press("w")
    assert stream.client.submit(stream.id, 0, kit.keys_of("s")) == m.ControlAccepted(stream.id, 0)
    stream.rig.turn()
    stream.make(2)
    assert [chunk.applied.source for chunk in stream.got()] == ["explicit", "tap"]


def test_streaming_14_the_pending_slot_goes_where_there_is_room(stream: Any, kit: Any) -> None:
    """Without an index the newest one is applied to the next free chunk, and the client hears which."""
    assert stream.client.submit(stream.id, None, kit.keys_of("a")) is None
    assert stream.client.submit(stream.id, None, kit.keys_of("d")) is None
    stream.rig.turn()
    assert stream.client.heard(m.ControlAccepted) == [m.ControlAccepted(stream.id, 0, by_index=False)]
    stream.make()
    assert stream.got()[0].applied.control == kit.keys_of("d")


def test_streaming_14_a_running_chunk_keeps_its_control(stream: Any) -> None:
    """A release changes later chunks only."""
    stream.press("w")
    stream.rig.turn()
    stream.release("w")
    stream.rig.turn()
    stream.make(2)
    assert [chunk.applied.control.values["keys"] for chunk in stream.got()] == [["w"], ["w"]]
    assert stream.cursors()[1] == 2


def test_streaming_15_a_held_key_is_one_chunk_ahead_and_no_more(stream: Any) -> None:
    """Submitted <= output + 1, after each output again; without a key the session waits."""
    stream.press("w")
    for output in range(4):
        stream.rig.turn()
        assert stream.cursors()[1] == output + 2
        stream.make()
    stream.release("w")
    stream.rig.turn()
    stream.make(1)
    stream.rig.turn()
    assert stream.cursors()[1] == 6
    stream.make(1)
    assert [chunk.applied.source for chunk in stream.got()] == ["tap", *["held"] * 5]


def test_streaming_15_the_grant_follows_the_output(stream: Any) -> None:
    """Controls below it are accepted; it is one beyond what is output, and never goes back."""
    grants = [stream.client.state(stream.id)[1]]
    for index in range(8):
        if index < grants[-1]:
            assert isinstance(stream.client.submit(stream.id, index), m.ControlAccepted)
        stream.make()
        if stream.id in stream.rig.core.sessions:
            grants.append(stream.client.state(stream.id)[1])
    assert grants == [2, 3, 4, 5, 6, 7, 8, 8]


def test_streaming_16_a_chunk_says_its_control_its_facts_and_its_times(stream: Any) -> None:
    """What was applied with the revision of the keys, what the stages told, and when it passed each stage."""
    stream.press("w")
    stream.rig.turn()
    stream.worker.finish("encode", facts={"tile": 1})
    stream.rig.now += 1.0
    stream.worker.finish("denoise", facts={"pose": [1.0]})
    stream.rig.now += 0.5
    stream.worker.finish("decode", facts={})
    (chunk,) = stream.got()
    assert chunk.applied.revision == 1
    assert chunk.facts == {"tile": 1, "pose": [1.0]}
    assert sorted(chunk.timing.stages) == ["decode", "denoise", "encode"]
    denoise = chunk.timing.stages["denoise"]
    assert denoise.completed_s - denoise.started_s == 1.0
    assert chunk.timing.committed_s == 1.5
    assert (chunk.index, chunk.is_last) == (0, False)


@pytest.mark.parametrize("control", [Artifact({"keys": ["q"]}), Artifact({}, {})])
def test_streaming_17_an_unknown_key_is_refused_and_the_session_goes_on(stream: Any, control: Artifact) -> None:
    """By index, in the slot, in the register: refused with a code, and the next right one is accepted."""
    code = stream.client.submit(stream.id, 0, control).code
    assert code == ("unknown_key" if control.values else "malformed")
    assert stream.client.submit(stream.id, None, control).code == code
    stream.client.say(m.SetKeys(stream.id, KeyState(5, ("q",))))
    refused = stream.client.last(m.ControlRefused)
    assert (refused.code, refused.index) == ("unknown_key", None)
    assert "w, a, s, d" in refused.message
    stream.rig.turn()
    assert stream.cursors()[1] == 0
    assert isinstance(stream.client.submit(stream.id, 0), m.ControlAccepted)


def test_streaming_34_an_oversized_control_is_refused(kit: Any) -> None:
    """The session isn't touched by it, nor is its client."""
    stream = kit.Stream(kit.Rig(BrokerConfig(control_bytes_max=1000)))
    stream.client.say(m.SubmitControl(stream.id, 0, kit.keys_of("w")), nbytes=1001)
    stream.client.say(m.SetKeys(stream.id, KeyState(1, ("w",))), nbytes=1001)
    assert [(x.index, x.code) for x in stream.client.heard(m.ControlRefused)] == [(0, "malformed"), (None, "malformed")]
    assert isinstance(stream.client.submit(stream.id, 0), m.ControlAccepted)


def test_streaming_18_chunks_come_in_order_with_a_last_one(kit: Any) -> None:
    """The stages are told which chunk is first and which is last; so is the client."""
    stream = kit.Stream(kit.Rig(), chunks=3)
    stream.press("w")
    stream.rig.turn()
    stream.make(3)
    assert [(chunk.index, chunk.is_last) for chunk in stream.got()] == [(0, False), (1, False), (2, True)]
    for stage in ("encode", "denoise", "decode"):
        tasks = [task for task in stream.worker.heard(m.RunTask) if task.stage == stage]
        assert [(task.is_first, task.is_last) for task in tasks] == [(True, False), (False, False), (False, True)]


def test_streaming_19_the_ring_holds_what_was_not_acknowledged(stream: Any) -> None:
    """An acknowledgement empties it up to its cursor; an older one and one beyond the end do no harm."""
    stream.press("w")
    stream.rig.turn()
    stream.make(2, ack=False)
    assert [chunk.index for chunk in stream.session.ring] == [0, 1]
    stream.client.ack(stream.id, 1)
    stream.client.ack(stream.id, 0)
    assert [chunk.index for chunk in stream.session.ring] == [1]
    stream.client.ack(stream.id, 99)
    assert not stream.session.ring
    assert stream.rig.counter("acks_beyond_the_end") == 1


def test_streaming_23_old_double_and_stray_results_are_counted_and_dropped(stream: Any, kit: Any) -> None:
    """Another epoch, a result twice, one that was never asked for, one out of turn, one of a stage it hasn't."""
    task = stream.worker.jobs["encode"][0]
    outputs = {"condition": Artifact()}
    stream.worker.say(m.TaskDone(stream.id, "encode", 0, 1, 0, outputs, {}, 0.0))
    assert stream.rig.counter("stale_epochs") == 1
    stream.worker.finish("encode")
    stream.worker.say(kit.done(task, outputs, {}))
    for index in (2, 7):
        stream.worker.say(m.TaskDone(stream.id, "encode", 1, 1, index, outputs, {}, 0.0))
    stream.worker.say(m.TaskDone(stream.id, "paint", 1, 1, 0, outputs, {}, 0.0))
    stream.worker.say(m.TaskDone("nobody", "encode", 1, 1, 0, outputs, {}, 0.0))
    stream.worker.say(m.TaskStarted(stream.id, "encode", 1, 1, 1))
    assert stream.rig.counter("orphans") == 6
    stream.press("w")
    stream.rig.turn()
    stream.make(2)
    assert [chunk.index for chunk in stream.got()] == [0, 1]


def test_streaming_23_another_workers_word_about_a_session_is_dropped(stream: Any) -> None:
    """Only the worker that holds a stage speaks for it."""
    other = stream.rig.worker("other")
    other.say(m.TaskDone(stream.id, "encode", 1, 1, 0, {"condition": Artifact()}, {}, 0.0))
    assert stream.rig.counter("orphans") == 1
    assert stream.queued("encode") == [0, 1]


def test_a_result_implies_its_start(kit: Any) -> None:
    """A worker whose TaskStarted never came isn't stuck: its result says as much."""
    rig = kit.Rig()
    stream = kit.Stream(rig)
    stream.worker.starts = False
    stream.press("w")
    rig.turn()
    stream.make(3)
    assert [chunk.index for chunk in stream.got()] == [0, 1, 2]


def test_streaming_29_the_clock_of_a_chunk_starts_with_its_control(kit: Any) -> None:
    """Conditions that were made long before don't start it; from key to frame is measured besides."""
    rig = kit.Rig()
    stream = kit.Stream(rig)
    stream.worker.finish("encode")
    stream.worker.finish("encode")
    rig.advance(10.0)
    stream.press("w")
    rig.now += 0.25
    rig.turn()
    rig.now += 1.0
    stream.worker.finish("denoise")
    rig.now += 0.5
    stream.worker.finish("decode")
    (chunk,) = stream.got()
    assert chunk.timing.latency_s == 1.5
    assert chunk.timing.period_s is None
    stream.client.say(m.AskMetrics(1, stream.id))
    values = stream.client.last(m.Metrics).values
    assert values["control_to_output_s"]["max"] == 1.5
    assert values["change_to_frame_s"]["max"] == 1.75
    assert values["first_output_s"]["max"] == 11.75


@pytest.mark.parametrize(("anchor", "latency_s"), [(None, 3.0), ("encode_request", 3.0), ("control", 1.0)])
def test_streaming_29_another_anchor_starts_it_earlier(kit: Any, anchor: str | None, latency_s: float) -> None:
    """Without an anchor the first external input counts, which here is the prefetched condition."""
    rig = kit.Rig()
    stream = kit.Stream(rig, spec=kit.world(latency_anchor=anchor))
    stream.worker.finish("encode")
    rig.now += 2.0
    stream.client.submit(stream.id, 0)
    rig.now += 1.0
    stream.worker.finish("denoise")
    stream.worker.finish("decode")
    assert stream.got()[0].timing.latency_s == latency_s


def test_streaming_30_periods_and_idle_causes_are_reported(kit: Any) -> None:
    """Per session and in sum: chunks, periods, and what each stage waited for; numbers outlive the session."""
    rig = kit.Rig()
    stream = kit.Stream(rig, chunks=3)
    stream.press("w")
    rig.turn()
    for _ in range(3):
        rig.now += 2.0
        stream.make()
    assert stream.client.ended(stream.id).state == "completed"
    stream.client.say(m.AskMetrics(7, stream.id))
    answer = stream.client.last(m.Metrics)
    assert (answer.request, answer.values["chunks"], answer.values["state"]) == (7, 3, "completed")
    assert answer.values["period_s"]["count"] == 2
    assert answer.values["period_s"]["mean"] == 2.0
    assert answer.values["stages"]["decode"]["idle_s"]["input:latent"]["seconds"] > 0
    assert rig.core.status()["pipelines"]["world"]["metrics"]["chunks"] == 3


def test_streaming_30_waiting_behind_another_session_is_named(kit: Any) -> None:
    """A stage that could go on but for its actor says so; a full output says credit."""
    rig = kit.Rig()
    stream = kit.Stream(rig)
    second = stream.client.open("second")
    stream.press("w")
    rig.turn()
    shown = {x["session"]: x["waits_for"] for x in rig.core.status()["sessions"]}
    assert shown[second]["encode"] == "actor_busy"
    assert shown[stream.id]["denoise"] == "input:condition"
    stream.client.end(second, "cancel")
    for _ in range(2):
        stream.make(ack=False)
    for _ in range(2):
        stream.worker.finish("encode")
    stream.worker.finish("denoise")
    shown = {x["session"]: x["waits_for"] for x in rig.core.status()["sessions"]}
    assert shown[stream.id]["decode"] == "credit"


def test_numbers_are_told_to_the_owner_only(stream: Any) -> None:
    """Another client's question, and one about nobody, is answered with nothing."""
    other = stream.rig.client(b"other")
    for name in (stream.id, "nobody"):
        other.say(m.AskMetrics(3, name))
        assert other.last(m.Metrics) == m.Metrics(3, name, {})


def test_status_is_answered(stream: Any) -> None:
    """The same plain data that the core gives, under the number of the question, when the turn ends."""
    stream.client.say(m.AskStatus(9))
    stream.rig.turn()
    status = stream.client.last(m.Status)
    assert status.request == 9
    assert status.state == stream.rig.core.status()
    assert stream.session.token not in repr(status.state)


def test_streaming_12_a_status_is_put_together_once_a_turn(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked for: everybody who asked in the turn gets the same, in order."""
    core, made = stream.rig.core, []
    whole = core.status

    def counted() -> Any:
        made.append(1)
        return whole()

    monkeypatch.setattr(core, "status", counted)
    other = stream.rig.client(b"other")
    for number in range(100):
        stream.client.say(m.AskStatus(number))
    other.say(m.AskStatus(7))
    assert made == []
    stream.rig.turn()
    assert made == [1]
    answers = stream.client.heard(m.Status)
    assert [answer.request for answer in answers] == list(range(100))
    assert all(answer.state is other.last(m.Status).state for answer in answers)
    other.say(m.AskStatus(8))
    other.say(m.Goodbye())
    stream.rig.turn()
    assert len(other.heard(m.Status)) == 1


@pytest.mark.parametrize("run_s", [-1.0, -1e308, 1e308, 3.5])
def test_streaming_30_a_stage_computes_no_longer_than_it_had(stream: Any, run_s: float) -> None:
    """Whatever number a worker says, means stay numbers: nothing below 0, nothing before the task was sent."""
    for _ in range(4):
        task = stream.worker.jobs["encode"].popleft()
        stream.rig.now += 2.0
        outputs = {"condition": Artifact()}
        at = (task.session, "encode", task.epoch, task.stage_epoch, task.index)
        stream.worker.say(m.TaskDone(*at, outputs, {}, run_s))
        stream.client.submit(stream.id, task.index)
        if not stream.worker.jobs["encode"]:
            break
    total = stream.rig.core.status()["pipelines"]["world"]["metrics"]["stages"]["encode"]["run_s"]
    assert total["count"] >= 2
    assert 0.0 <= total["mean"] <= total["max"] <= 4.0
    assert total["max"] == (0.0 if run_s < 0 else min(run_s, 4.0))


def test_streaming_30_each_stage_says_where_its_time_went(rig: Any) -> None:
    """How long tasks waited, for the actor and in its mailbox, and how long they took, by both clocks; in sum as well."""
    worker, client = rig.worker(ready=False), rig.client()
    sessions = [client.open(key) for key in "ab"]
    rig.now += 1.0
    for stage in ("encode", "denoise", "decode"):
        worker.say(m.StageReady("world", stage, 10))
    rig.now += 3.0
    worker.finish("encode")
    rig.now += 4.0
    for run_s in (0.0, 0.0, 0.01):
        rig.now += run_s
        worker.finish("encode")
    numbers = []
    for number, session in enumerate(sessions):
        client.say(m.AskMetrics(number, session))
        numbers.append(client.last(m.Metrics).values["stages"]["encode"])
    first, second = numbers
    assert (first["started_to_completed_s"]["count"], second["started_to_completed_s"]["count"]) == (2, 2)
    assert first["started_to_completed_s"]["max"] == 4.0
    assert first["admitted_to_started_s"]["max"] == 3.0
    assert second["ready_to_admitted_s"]["max"] == 4.0
    total = rig.core.status()["pipelines"]["world"]["metrics"]["stages"]["encode"]
    assert total["run_s"]["count"] == 4
    assert total["run_s"]["mean"] == pytest.approx(0.01)
    assert total["ready_to_admitted_s"]["max"] == 4.0
    assert total["idle_s"]["placement"] == {"count": 2, "seconds": 2.0}
    assert "actor_busy" not in first["idle_s"], "what took no time is no gap"
