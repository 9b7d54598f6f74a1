"""Clients that go, and the broker's own end."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.events import Unreachable


def test_streaming_27_a_lost_client_has_a_grace(rig: Any) -> None:
    """The session goes on as far as its output has room, and is cancelled when the grace is over."""
    worker, client, session = rig.start(controls=2)
    rig.handle(Unreachable(rig.now, client.route))
    rig.turn()
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    assert rig.core.sessions[session].flow.next_commit == 2
    client.attachment = 0
    rig.advance(29.5)
    assert session in rig.core.sessions
    rig.advance(1.0)
    assert not rig.core.sessions
    assert worker.released_stages() == ["denoise", "decode", "encode"]
    assert rig.counter("sessions_cancelled") == 1


def test_streaming_27_a_client_that_says_goodbye_leaves_nothing(rig: Any) -> None:
    """Its sessions are cancelled at once, whatever state they are in."""
    worker = rig.worker(slots=2)
    client = rig.client()
    running, ready, waiting = client.open("1"), client.open("2"), client.open("3")
    client.submit(running, 0)
    client.end(running, "drain")
    assert client.state(ready)[0] == "ready"
    assert client.state(waiting)[0] == "opening"
    client.say(m.Goodbye())
    while worker.jobs["encode"]:
        worker.finish("encode")
    assert not rig.core.sessions
    assert rig.counter("sessions_cancelled") == 3


def test_streaming_27_a_lost_client_of_a_session_that_is_done(rig: Any) -> None:
    """Its last chunks wait for the grace."""
    worker, client, session = rig.start(chunks=1, controls=1)
    worker.make("encode", "denoise", "decode")
    client.attachment = 0
    rig.advance(5.0)
    assert session in rig.core.sessions
    rig.advance(35.0)
    assert not rig.core.sessions
    assert rig.counter("sessions_completed") == 1


def test_streaming_37_the_first_request_drains(rig: Any) -> None:
    """No new sessions; accepted chunks are delivered; then everybody is told and the broker stops."""
    worker, client, session = rig.start(controls=1)
    waiting_client = rig.client(b"2")
    rig.shut_down()
    assert waiting_client.open("late") == ""
    assert waiting_client.last(m.SessionRefused).failure.kind == "shutdown"
    worker.make("encode", "denoise", "decode")
    assert not rig.stopped
    client.ack(session, 1)
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind) == ("closed", "shutdown")
    assert rig.stopped
    for peer in (worker, client, waiting_client):
        assert peer.heard(m.Goodbye)
    assert rig.core.wake_at is None
    client.say(m.Heartbeat())
    assert rig.core.handle(object()) == []


@pytest.mark.parametrize("state", ["opening", "initializing", "ready"])
def test_streaming_37_sessions_that_wait_end_at_once(rig: Any, state: str) -> None:
    """Nothing was accepted, so nothing is waited for."""
    worker = rig.worker(ready=state != "opening")
    if state == "initializing":
        worker.silent.add(m.InitializeStage)
    client = rig.client()
    session = client.open()
    assert client.state(session)[0] == state
    rig.shut_down()
    assert client.ended(session).failure.kind == "shutdown"
    assert rig.stopped


def test_streaming_37_a_drain_has_its_time(rig: Any) -> None:
    """After `drain_s` the broker stops whatever runs; workers' heartbeats go on all the while."""
    _, _, session = rig.start(controls=1)
    rig.shut_down()
    rig.advance(59.0)
    assert not rig.stopped
    assert session in rig.core.sessions
    rig.advance(2.0)
    assert rig.stopped


@pytest.mark.parametrize("who", ["the broker", "the worker"])
@pytest.mark.parametrize("lost", ["before", "after"])
@pytest.mark.parametrize("state", ["opening", "initializing", "ready", "running", "made"])
def test_streaming_37_a_lost_client_is_not_waited_for(rig: Any, who: str, lost: str, state: str) -> None:
    """Nobody comes for what it hasn't taken: a stop ends its sessions at once, and a loss during a stop does."""
    worker = rig.worker(ready=state != "opening", memory=True)
    if state == "initializing":
        worker.silent.add(m.InitializeStage)
    client = rig.client()
    session = client.open(chunks=1 if state == "made" else 5)
    if state in ("running", "made"):
        client.submit(session, 0)
    if state == "made":
        worker.make("encode", "denoise", "decode")
        assert worker.memory.out
    events = [lambda: rig.handle(Unreachable(rig.now, client.route)), rig.turn]
    stop = rig.shut_down if who == "the broker" else lambda: worker.say(m.Draining())
    for event in (*events, stop) if lost == "before" else (stop, *events):
        event()
    if state == "initializing":
        worker.initialized(worker.last(m.InitializeStage))
    if who == "the worker" and state == "opening":
        assert list(rig.core.sessions) == [session], "another worker may come"
        return
    assert not rig.core.sessions
    rig.turn()
    assert worker.memory.out == {} or rig.stopped
    assert rig.stopped == (who == "the broker")


def test_streaming_37_the_second_request_ends_it_now(rig: Any) -> None:
    """Without a look at what runs."""
    _, client, _ = rig.start(controls=1)
    rig.shut_down()
    rig.shut_down()
    assert rig.stopped
    assert client.heard(m.Goodbye)
    assert len(rig.core.sessions) == 1


def test_streaming_37_an_idle_broker_stops_at_once(rig: Any) -> None:
    """There is nothing to wait for."""
    rig.shut_down()
    assert rig.stopped
