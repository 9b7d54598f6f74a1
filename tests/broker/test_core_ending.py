"""How sessions end: delivered, closed, cancelled, failed; by clients, stages, workers and time."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.controls import Keys
from reelwire.messages import Artifact, Failure


def test_streaming_21_released_in_reverse_each_once(rig: Any) -> None:
    """Denoise, decode, encode here: the reverse of the initialization, one after the other."""
    worker, client, session = rig.start()
    worker.silent.add(m.ReleaseStage)
    client.end(session, "cancel")
    for stages in (["denoise"], ["denoise", "decode"], ["denoise", "decode", "encode"]):
        assert worker.released_stages() == stages
        worker.released(worker.last(m.ReleaseStage))
    assert worker.released_stages() == ["denoise", "decode", "encode"]
    assert client.ended(session).state == "cancelled"


def test_streaming_21_the_order_of_release_may_be_given(rig: Any, kit: Any) -> None:
    """The world model's own order is decode, denoise, encode."""
    worker, client, session = rig.start(spec=kit.world(release_order=("decode", "denoise", "encode")))
    client.end(session, "cancel")
    assert worker.released_stages() == ["decode", "denoise", "encode"]


def test_streaming_21_a_failed_release_is_tried_again_and_keeps_nobody(rig: Any) -> None:
    """Three attempts, then the others; the first error is kept in the numbers, and the session has ended."""
    worker, client, session = rig.start()
    worker.silent.add(m.ReleaseStage)
    client.end(session, "cancel")
    for number in range(3):
        asked = worker.last(m.ReleaseStage)
        failure = Failure("stage", f"error {number}")
        worker.say(m.StageFailed(session, asked.stage, 1, 1, "release", None, failure))
    assert worker.released_stages() == ["denoise", "denoise", "denoise", "decode"]
    worker.silent.clear()
    worker.released(worker.last(m.ReleaseStage))
    assert worker.released_stages()[-2:] == ["decode", "encode"]
    assert client.ended(session).state == "cancelled"
    client.say(m.AskMetrics(1, session))
    assert client.last(m.Metrics).values["release_error"] == "error 0"
    assert rig.counter("releases_failed") == 1


def test_streaming_21_a_release_that_succeeds_at_the_second_try(rig: Any) -> None:
    """The order goes on as if nothing had been; a stray release is dropped."""
    worker, client, session = rig.start()
    worker.silent.add(m.ReleaseStage)
    client.end(session, "cancel")
    worker.say(m.StageReleased(session, "encode", 1, 1))
    assert rig.counter("orphans") == 1
    worker.say(m.StageFailed(session, "denoise", 1, 1, "release", None, Failure("stage", "busy")))
    worker.silent.clear()
    worker.released(worker.last(m.ReleaseStage))
    assert worker.released_stages() == ["denoise", "denoise", "decode", "encode"]
    assert client.ended(session).state == "cancelled"


def test_streaming_22_a_drain_delivers_what_was_accepted(rig: Any, kit: Any) -> None:
    """No new control, no new condition; the accepted chunks come, then the session is closed."""
    worker, client, session = rig.start(chunks=8, controls=2)
    client.end(session, "drain")
    client.end(session, "drain")
    assert client.state(session)[0] == "draining"
    refused = client.submit(session, 2)
    assert refused.code == "ended"
    keys = Keys(kit.world())
    keys.press("w")
    client.keys(session, keys)
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    assert rig.core.sessions[session].flow.next_condition_index == 2
    assert [chunk.index for chunk in client.chunks(session)] == [0, 1]
    assert worker.released_stages() == ["denoise", "decode", "encode"]
    assert client.ended(session) is None
    client.ack(session, 2)
    assert client.ended(session) == m.SessionEnded(session, "closed", None)


def test_streaming_22_a_drain_of_everything_completes(rig: Any) -> None:
    """If every chunk was delivered the session is complete, whoever asked for its end."""
    worker, client, session = rig.start(chunks=1, controls=1)
    client.end(session, "drain")
    worker.make("encode", "denoise", "decode")
    client.ack(session, 1)
    assert client.ended(session).state == "completed"


def test_streaming_22_a_drain_without_controls_ends_at_once(rig: Any) -> None:
    """There is nothing to deliver; conditions that run don't hold it up beyond their end."""
    worker, client, session = rig.start()
    client.end(session, "drain")
    assert client.ended(session).state == "closed"
    assert worker.released_stages() == ["denoise", "decode", "encode"]


def test_streaming_22_a_cancel_drops_what_is_buffered(rig: Any) -> None:
    """Nothing more is sent to the stages but releases, and no chunk to the client."""
    worker, client, session = rig.start(controls=2)
    worker.make("encode", "encode", "denoise")
    worker.silent.add(m.ReleaseStage)
    client.end(session, "cancel")
    before = len(worker.heard(m.RunTask))
    worker.finish("decode")
    assert rig.counter("late_answers") >= 1
    worker.silent.clear()
    worker.released(worker.last(m.ReleaseStage))
    assert len(worker.heard(m.RunTask)) == before
    assert client.chunks(session) == []
    assert client.ended(session).state == "cancelled"


def test_streaming_22_a_cancel_while_it_drains(rig: Any) -> None:
    """The stronger word holds."""
    _, client, session = rig.start(controls=2)
    client.end(session, "drain")
    client.end(session, "cancel")
    assert client.ended(session).state == "cancelled"


def test_streaming_22_a_cancel_of_a_session_whose_chunks_are_unread(rig: Any) -> None:
    """The ring is dropped, so nothing is waited for."""
    worker, client, session = rig.start(chunks=1, controls=1)
    worker.make("encode", "denoise", "decode")
    assert client.ended(session) is None
    client.end(session, "cancel")
    assert client.ended(session).state == "completed"


@pytest.mark.parametrize("mode", ["drain", "cancel"])
def test_streaming_22_a_hung_stage_costs_its_worker(rig: Any, mode: Any) -> None:
    """Within its timeout the session has ended; the worker is told that it was given up; others go on elsewhere."""
    worker, client, session = rig.start(controls=1)
    worker.silent.add(m.ReleaseStage)
    worker.jobs["encode"].clear()
    client.end(session, mode)
    rig.advance(29.5)
    assert client.ended(session) is None
    rig.advance(1.0)
    assert client.ended(session).state == ("failed" if mode == "drain" else "cancelled")
    assert worker.last(m.Rejected).code == "unknown_peer"
    assert rig.core.status()["workers"] == []


def test_streaming_22_a_slow_drain_ends_without_blame(rig: Any) -> None:
    """Stages that work, but not fast enough, keep their worker; what wasn't made is given up."""
    worker, client, session = rig.start(controls=2)
    client.end(session, "drain")
    for stage in ("encode", "encode", "denoise"):
        rig.advance(9.0)
        worker.finish(stage)
    rig.advance(4.0)
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind) == ("failed", "timeout")
    assert len(rig.core.status()["workers"]) == 1


def test_streaming_22_a_drain_that_waits_for_its_client_is_no_hang(rig: Any) -> None:
    """Output without room isn't the worker's fault: the drain goes on when the client reads."""
    worker, client, session = rig.start(chunks=8, controls=2)
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    client.submit(session, 2)
    worker.make("encode", "denoise")
    client.end(session, "drain")
    rig.advance(70.0)
    assert client.ended(session) is None
    client.ack(session, 2)
    worker.finish("decode")
    client.ack(session, 3)
    assert client.ended(session).state == "closed"
    assert len(rig.core.status()["workers"]) == 1


def test_streaming_23_a_stage_error_comes_after_the_chunks_below_it(rig: Any) -> None:
    """The failed chunk is named with the worker's sentence; those before it are delivered and taken first."""
    worker, client, session = rig.start(controls=2)
    worker.make("encode", "encode", "denoise")
    worker.fail("denoise", "out of memory")
    assert client.state(session)[0] == "draining"
    worker.finish("decode")
    assert [chunk.index for chunk in client.chunks(session)] == [0]
    assert client.ended(session) is None
    client.ack(session, 1)
    failure = Failure("stage", "out of memory", "denoise", 1)
    assert client.ended(session) == m.SessionEnded(session, "failed", failure)


def test_streaming_23_of_two_errors_the_lower_chunk_counts(rig: Any) -> None:
    """A later failure below the first one replaces it, one above is dropped."""
    worker, client, session = rig.start(chunks=8, controls=2)
    worker.make("encode")
    worker.fail("encode", "at 1")
    worker.finish("denoise")
    worker.fail("decode", "at 0")
    failure = client.ended(session).failure
    assert (failure.message, failure.stage, failure.index) == ("at 0", "decode", 0)
    worker, client, session = rig.start(controls=2, key="other")
    worker.make("encode", "encode")
    worker.fail("denoise", "at 0")
    assert client.ended(session).failure.message == "at 0"


def test_streaming_23_an_error_above_the_end_changes_nothing(rig: Any) -> None:
    """A condition that nobody will use may fail while the session drains."""
    worker, client, session = rig.start(controls=1)
    client.end(session, "drain")
    worker.finish("encode")
    worker.fail("encode")
    worker.make("denoise", "decode")
    client.ack(session, 1)
    assert client.ended(session).state == "closed"


def test_streaming_23_an_error_before_any_control_fails_at_once(rig: Any) -> None:
    """Chunks below the failed one that nobody asked for aren't waited for."""
    worker, client, session = rig.start()
    worker.finish("encode")
    worker.fail("encode", "bad picture")
    assert client.ended(session).failure.index == 1


def test_streaming_23_a_stage_error_touches_no_other_session(rig: Any) -> None:
    """The neighbour at the same actors goes on."""
    worker, client, session = rig.start(controls=1)
    other = client.open("other")
    client.submit(other, 0)
    worker.fail("encode")
    assert client.ended(session).state == "failed"
    while worker.jobs["encode"]:
        worker.finish("encode")
    worker.make("denoise", "decode")
    assert [chunk.index for chunk in client.chunks(other)] == [0]


@pytest.mark.parametrize("outputs", [{}, {"wrong": Artifact()}, {"condition": Artifact(), "more": Artifact()}])
def test_streaming_23_wrong_outputs_fail_the_session_only(rig: Any, outputs: dict[str, Artifact]) -> None:
    """A stage that makes something else than it announced is a failed stage, not a failed broker."""
    worker, client, session = rig.start(controls=1)
    worker.finish("encode", outputs=outputs)
    failure = client.ended(session).failure
    assert (failure.kind, failure.stage, failure.index) == ("stage", "encode", 0)
    assert "instead of condition" in failure.message
    assert client.open("next")


def test_streaming_23_a_lost_worker_fails_its_sessions_and_no_others(rig: Any) -> None:
    """What survives at other workers is released; sessions elsewhere don't notice."""
    vae = rig.worker("vae", stages=["encode", "decode"])
    lost = rig.worker("dit1", stages=["denoise"])
    rig.worker("dit2", stages=["denoise"])
    client = rig.client()
    first, second = client.open("1"), client.open("2")
    lost.say(m.Goodbye("a fault"))
    ended = client.ended(first)
    assert (ended.state, ended.failure.kind) == ("failed", "worker_lost")
    assert "'dit1'" in ended.failure.message
    assert "a fault" in ended.failure.message
    assert [(x.session, x.stage) for x in vae.heard(m.ReleaseStage)] == [(first, "decode"), (first, "encode")]
    assert client.ended(second) is None


def test_streaming_23_what_was_committed_before_a_loss_can_still_be_taken(rig: Any) -> None:
    """The session ends when its ring was acknowledged."""
    worker, client, session = rig.start(controls=1)
    worker.make("encode", "denoise", "decode")
    worker.say(m.Goodbye())
    assert client.ended(session) is None
    client.ack(session, 1)
    assert client.ended(session).failure.kind == "worker_lost"


def test_streaming_23_a_worker_lost_during_releases_doesn_t_hold_them_up(rig: Any) -> None:
    """The outcome stays what it was; what is left elsewhere is released."""
    vae = rig.worker("vae", stages=["encode", "decode"])
    dit = rig.worker("dit", stages=["denoise"])
    client = rig.client()
    session = client.open()
    dit.silent.add(m.ReleaseStage)
    client.end(session, "cancel")
    assert vae.released_stages() == []
    dit.say(m.Goodbye())
    assert vae.released_stages() == ["decode", "encode"]
    assert client.ended(session).state == "cancelled"


def test_completed_when_all_is_taken(rig: Any) -> None:
    """Stages are released as soon as everything is made; the session ends with the last acknowledgement."""
    worker, client, session = rig.start(chunks=2, controls=2)
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    assert worker.released_stages() == ["denoise", "decode", "encode"]
    assert client.state(session)[0] == "releasing"
    client.ack(session, 1)
    assert client.ended(session) is None
    client.ack(session, 2)
    assert client.ended(session) == m.SessionEnded(session, "completed", None)


def test_streaming_19_unread_last_chunks_are_kept_for_a_while(kit: Any) -> None:
    """Without its stages a session costs only its ring, which is kept for `result_keep_s`."""
    rig = kit.Rig(BrokerConfig(result_keep_s=500.0))
    worker, client, session = rig.start(chunks=1, controls=1)
    worker.make("encode", "denoise", "decode")
    rig.advance(499.0)
    assert client.ended(session) is None
    rig.advance(2.0)
    assert client.ended(session).state == "completed"


def test_streaming_24_an_idle_session_is_closed(rig: Any) -> None:
    """No control for five minutes: closed, its stages released."""
    worker, client, session = rig.start()
    worker.make("encode", "encode")
    rig.advance(299.0)
    assert client.ended(session) is None
    client.submit(session, 0)
    worker.make("denoise", "decode", "encode")
    client.ack(session, 1)
    rig.advance(299.0)
    assert client.ended(session) is None
    rig.advance(2.0)
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind) == ("closed", "timeout")
    assert worker.released_stages() == ["denoise", "decode", "encode"]


def test_streaming_24_a_held_key_and_unfinished_work_are_activity(kit: Any) -> None:
    """Neither a person who holds a key nor a slow stage makes a session idle."""
    rig = kit.Rig(BrokerConfig(task_timeout_s=3600.0))
    worker, client, session = rig.start(controls=1)
    rig.advance(700.0)
    worker.make("encode", "denoise", "decode")
    client.ack(session, 1)
    keys = Keys(kit.world())
    keys.press("w")
    client.keys(session, keys)
    rig.advance(700.0)
    assert client.ended(session) is None


def test_streaming_24_a_client_that_never_reads_is_closed(rig: Any, kit: Any) -> None:
    """Two minutes without an acknowledgement while chunks wait; each acknowledgement starts them again."""
    worker, client, session = rig.start(chunks=8, controls=2)
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    rig.advance(119.0)
    client.ack(session, 1)
    rig.advance(119.0)
    assert client.ended(session) is None
    rig.advance(2.0)
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind) == ("closed", "stalled")


def test_streaming_24_a_stalled_reader_who_caught_up_is_left_alone(rig: Any) -> None:
    """The timer finds nothing unread."""
    worker, client, session = rig.start(controls=1)
    worker.make("encode", "denoise", "decode")
    client.ack(session, 1)
    rig.advance(130.0)
    assert client.ended(session) is None


def test_streaming_24_a_failed_session_whose_client_never_reads_stays_failed(rig: Any) -> None:
    """The first failure is the one that is told."""
    worker, client, session = rig.start(chunks=8, controls=2)
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    client.submit(session, 2)
    client.submit(session, 3)
    worker.make("encode", "encode", "denoise")
    worker.fail("denoise", "broke")
    rig.advance(130.0)
    ended = client.ended(session)
    assert (ended.state, ended.failure.message) == ("failed", "broke")


def test_streaming_21_answers_that_nobody_waits_for_are_dropped(rig: Any) -> None:
    """About a stage that isn't asked now, in whatever phase; the session isn't disturbed."""
    worker = rig.worker()
    worker.silent |= {m.InitializeStage, m.ReleaseStage}
    client = rig.client()
    session = client.open()
    failure = Failure("stage", "a lie")
    worker.say(m.StageInitialized(session, "denoise", 1, 1, Artifact(), 1))
    worker.say(m.StageFailed(session, "denoise", 1, 1, "initialize", None, failure))
    worker.say(m.StageFailed(session, "encode", 1, 1, "release", None, failure))
    assert rig.counter("orphans") == 3
    assert client.state(session)[0] == "initializing"
    asked = worker.last(m.InitializeStage)
    client.end(session, "cancel")
    worker.say(m.StageFailed(session, asked.stage, 1, 1, "initialize", None, failure))
    worker.say(m.StageFailed(session, "decode", 1, 1, "release", None, failure))
    worker.say(m.StageFailed(session, "encode", 1, 1, "run", 0, failure))
    assert rig.counter("orphans") == 5
    worker.released(worker.last(m.ReleaseStage))
    assert client.ended(session).state == "cancelled"


def test_streaming_23_a_task_that_fails_while_its_session_is_released(rig: Any) -> None:
    """The actor is free again; the outcome stays."""
    worker, client, session = rig.start(controls=1)
    worker.silent.add(m.ReleaseStage)
    client.end(session, "cancel")
    worker.fail("encode")
    assert rig.counter("late_answers") == 2, "the failure, and the start of the task behind it"
    worker.silent.clear()
    worker.released(worker.last(m.ReleaseStage))
    assert client.ended(session).state == "cancelled"


def test_a_worker_that_is_lost_after_everything_was_made(rig: Any) -> None:
    """The last chunks are in the ring; what happens to their stages doesn't matter any more."""
    worker, client, session = rig.start(chunks=1, controls=1)
    worker.silent.add(m.ReleaseStage)
    worker.make("encode", "denoise", "decode")
    worker.say(m.Goodbye())
    client.ack(session, 1)
    assert client.ended(session) == m.SessionEnded(session, "completed", None)
