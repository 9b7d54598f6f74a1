"""Peers that can't be told anything any more, and how much of what peers say is told to others."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire import wire
from reelwire.broker.events import OutboxFull, Unreachable
from reelwire.controls import KeyState


@pytest.mark.parametrize("event", [Unreachable, OutboxFull])
def test_streaming_27_the_last_words_of_a_peer_that_cannot_be_sent_to_are_heard(rig: Any, event: Any) -> None:
    """A client that ends its sessions and says goodbye hasn't been lost, however late that is read."""
    rig.worker()
    client = rig.client()
    sessions = [client.open(name) for name in ("a", "b", "c")]
    rig.handle(event(rig.now, client.route))
    told = len(client.inbox)
    rig.turn(drained=False)
    assert rig.core.status()["clients"] == 1
    client.end(sessions[0], "cancel")
    rig.handle(event(rig.now, client.route))
    assert list(rig.core.sessions) == sessions[1:]
    assert rig.core.wake_at == rig.now, "nobody may be there to end the turn"
    client.say(m.Goodbye())
    rig.turn()
    assert not rig.core.sessions
    assert len(client.inbox) == told
    assert (rig.counter("clients_left"), rig.counter("clients_lost")) == (1, 0)


def test_streaming_35_no_session_goes_to_a_worker_that_cannot_be_told(rig: Any) -> None:
    """It waits for another one, from the moment that the connection is gone."""
    gone = rig.worker("gone")
    client = rig.client()
    rig.handle(Unreachable(rig.now, gone.route))
    session = client.open()
    assert rig.core.sessions[session].state == "opening"
    assert rig.worker("new").heard(m.InitializeStage)
    rig.turn()
    assert client.state(session)[0] == "ready"


def test_what_peers_say_is_repeated_in_part(rig: Any) -> None:
    """However long a key, a pipeline, a reason or the text of an exception is, others are told a bounded part of it."""
    long = "x" * 100_000
    worker = rig.worker()
    client = rig.client()
    client.say(m.OpenSession(long, "world", 5))
    client.say(m.OpenSession("other", long, 5))
    client.say(m.OpenSession("more", "world", 5, {long: 1}))
    session = client.open(chunks=9)
    client.say(m.SetKeys(session, KeyState(1, (long,))))
    client.submit(session, 0, m.Artifact({"keys": [long]}))
    client.submit(session, 0, m.Artifact({long: 1}))
    client.submit(session, 0)
    worker.make("encode")
    worker.fail("denoise", long)
    rig.turn()
    left = client.open("left")
    assert left
    worker.say(m.Goodbye(long))
    ended = [client.ended(name).failure.kind for name in (session, left)]
    assert ended == ["stage", "worker_lost"]
    rig.stranger(b"odd").say(
        m.WorkerHello("0.1.0", "odd", "cpu", (), (m.StageOffer(long, long, 1, 1, 1),)), attachment=0
    )
    assert len(client.heard(m.SessionRefused)) == 3
    assert len(client.heard(m.ControlRefused)) == 3
    said = [message for _, message in rig.sent]
    assert max(len(wire.pack(message).body) for message in said if not isinstance(message, m.Welcome)) < 5_000
