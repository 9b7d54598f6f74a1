"""Workers that stop or have no room after all: their sessions drain, wait again, or fail with a sentence."""

from __future__ import annotations

from typing import Any

from reelwire import messages as m
from reelwire.messages import Failure

FULL = Failure("overload", "all slots are taken")


def refuse(worker: Any, failure: Failure = FULL) -> None:
    """Say that the newest initialization has no room."""
    x = worker.last(m.InitializeStage)
    worker.say(m.StageFailed(x.session, x.stage, x.epoch, x.stage_epoch, "initialize", None, failure))


def test_streaming_37_a_draining_worker_delivers_what_was_accepted(rig: Any) -> None:
    """Its sessions take no more controls, come to their end, and say which worker stopped; new ones go elsewhere."""
    worker, client = rig.worker("old"), rig.client()
    session = client.open("1")
    client.submit(session, 0)
    worker.say(m.Draining())
    worker.say(m.Draining())
    assert client.submit(session, 1).code == "ended"
    assert rig.core.status()["workers"][0]["draining"] is True
    other = client.open("2")
    assert client.state(other)[0] == "opening"
    rig.worker("new")
    assert client.state(other)[0] == "ready"
    for stage in ("encode", "denoise", "decode"):
        worker.finish(stage)
    client.ack(session, 1)
    assert client.ended(session) == m.SessionEnded(session, "closed", Failure("shutdown", "worker 'old' stops"))
    assert [x.session for x in worker.heard(m.InitializeStage)] == [session] * 3


def test_streaming_37_a_session_that_is_initialized_at_a_draining_worker_ends(rig: Any) -> None:
    """Nothing was accepted, so nothing is waited for."""
    worker, client = rig.worker(), rig.client()
    worker.silent.add(m.InitializeStage)
    session = client.open()
    worker.say(m.Draining())
    assert client.ended(session).failure.kind == "shutdown"


def test_a_session_without_room_after_all_is_placed_elsewhere(rig: Any) -> None:
    """It gives back what it has, waits before everybody else, and starts anew with another epoch."""
    vae = rig.worker("vae", stages=["encode", "decode"])
    full = rig.worker("full", stages=["denoise"])
    full.silent.add(m.InitializeStage)
    client = rig.client()
    first = client.open("1")
    refuse(full)
    second = client.open("2")
    assert [client.state(name)[0] for name in (first, second)] == ["opening", "opening"]
    assert [x.stage for x in vae.heard(m.ReleaseStage)] == ["decode", "encode"]
    roomy = rig.worker("roomy", stages=["denoise"], slots=1)
    assert client.state(first)[0] == "ready"
    assert client.state(second)[0] == "opening"
    assert roomy.last(m.InitializeStage).epoch == 2
    assert client.submit(first, 0) == m.ControlAccepted(first, 0)
    vae.say(m.TaskStarted(first, "encode", 1, 1, 0))
    assert rig.counter("stale_epochs") == 1


def test_a_worker_without_room_is_asked_again_after_a_while(rig: Any) -> None:
    """Not at once, or the two would go on for ever."""
    worker, client = rig.worker(), rig.client()
    worker.silent.add(m.InitializeStage)
    session = client.open()
    refuse(worker)
    rig.advance(4.5)
    assert len(worker.heard(m.InitializeStage)) == 1
    worker.silent.clear()
    rig.advance(1.0)
    assert client.state(session)[0] == "ready"


def test_a_session_that_finds_no_room_within_its_time_fails(rig: Any) -> None:
    """All attempts together have the time that one would have; the client may try again later."""
    worker, client = rig.worker(), rig.client()
    worker.silent.add(m.InitializeStage)
    session = client.open()
    while client.ended(session) is None:
        if len(worker.heard(m.InitializeStage)) > len(worker.heard(m.StageFailed)):
            refuse(worker)
        rig.advance(1.0)
        assert rig.now < 1032.0
    failure = client.ended(session).failure
    assert (failure.kind, failure.retry_after_s) == ("overload", 5.0)


def test_a_late_refusal_is_final(rig: Any) -> None:
    """An initialization that took longer than there was time to find a place isn't tried again."""
    worker, client = rig.worker(), rig.client()
    worker.silent.add(m.InitializeStage)
    session = client.open()
    rig.advance(40.0)
    refuse(worker)
    assert client.ended(session).failure.kind == "overload"


def test_what_ends_a_session_that_gives_its_places_back(rig: Any) -> None:
    """Its client cancels it, or leaves, while a release is on its way: the release is waited for, and sent once."""
    vae = rig.worker("vae", stages=["encode", "decode"])
    full = rig.worker("full", stages=["denoise"])
    full.silent |= {m.InitializeStage, m.ReleaseStage}
    client = rig.client()
    session = client.open()
    refuse(full)
    assert client.state(session)[0] == "returning"
    client.end(session, "cancel")
    assert client.ended(session) is None
    full.released(full.last(m.ReleaseStage))
    assert client.ended(session).state == "cancelled"
    assert len(full.heard(m.ReleaseStage)) == 1
    assert [x.stage for x in vae.heard(m.ReleaseStage)] == ["decode", "encode"]


def test_a_session_larger_than_its_stage_allows_fails_with_both_numbers(rig: Any) -> None:
    """What the worker says that it took is held against what it said that it has."""
    worker, client = rig.worker(bytes_max=1000), rig.client()
    worker.silent.add(m.InitializeStage)
    session = client.open()
    worker.initialized(worker.last(m.InitializeStage), cache_bytes=1001)
    failure = client.ended(session).failure
    assert (failure.kind, failure.stage) == ("request", "encode")
    assert failure.message == "the session takes 1001 bytes at stage 'encode' of worker 'w'; accepted: 1000"
    assert [x.stage for x in worker.heard(m.ReleaseStage)] == ["encode"]


def test_streaming_34_bytes_below_zero_are_malformed(rig: Any) -> None:
    """The worker that says so is told and dropped; its session fails."""
    worker, client = rig.worker(), rig.client()
    worker.silent.add(m.InitializeStage)
    session = client.open()
    worker.initialized(worker.last(m.InitializeStage), cache_bytes=-1)
    assert worker.last(m.Rejected).code == "malformed"
    assert client.ended(session).failure.kind == "worker_lost"
