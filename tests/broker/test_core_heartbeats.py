"""Grants and acknowledgements are absolute, and heartbeats repeat them: losing or repeating one does no harm.

Whether the client was told each grant, and none that goes back, the rig looks at after every event.
"""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.controls import Keys


def test_streaming_11_a_heartbeat_repeats_the_grants_of_each_session(rig: Any) -> None:
    """A client that lost a `SessionChanged` learns at the next beat how far its controls may go; a worker isn't told."""
    worker, client, session = rig.start(chunks=9)
    other = client.open("other", 9)
    granted = [client.state(name)[1] for name in (session, other)]
    rig.advance(1.0)
    assert client.last(m.Heartbeat).grants == tuple(map(m.ControlGrant, (session, other), granted))
    assert worker.last(m.Heartbeat).grants == ()
    client.submit(session, 0)
    worker.make("encode", "denoise", "decode")
    client.ack(session, 1)
    assert client.state(session)[1] > granted[0]
    rig.advance(1.0)
    assert client.last(m.Heartbeat).grants[0] == m.ControlGrant(session, client.state(session)[1])


def test_streaming_11_what_was_granted_is_accepted(rig: Any) -> None:
    """Every control below the limit of a heartbeat is taken, whenever the heartbeat is read."""
    worker, client, session = rig.start(chunks=9)
    given = 0
    while not client.ended(session):
        rig.advance(1.0)
        grants = client.last(m.Heartbeat).grants
        for index in range(given, {x.session: x.control_limit for x in grants}.get(session, 0)):
            assert isinstance(client.submit(session, index), m.ControlAccepted)
            given = index + 1
        for stage in ("encode", "denoise", "decode"):
            if worker.jobs[stage]:
                worker.finish(stage)
        client.ack(session, len(client.chunks(session)))
    assert client.ended(session).state == "completed"


def test_streaming_11_an_ended_session_is_granted_nothing(rig: Any) -> None:
    """A heartbeat speaks of live sessions."""
    _, client, session = rig.start()
    client.end(session, "cancel")
    rig.advance(1.0)
    assert client.last(m.Heartbeat).grants == ()


def test_streaming_11_a_heartbeat_acknowledges(rig: Any) -> None:
    """An Ack that was lost, repeated or overtaken is made up for by the next beat, which says the same and no less."""
    worker, client, session = rig.start(chunks=6, controls=2)
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    assert len(client.chunks(session)) == 2
    live = rig.core.sessions[session]
    assert live.flow.acked == 0
    client.say(m.Heartbeat(acks=(m.Ack(session, 2),)))
    assert live.flow.acked == 2
    client.say(m.Heartbeat(acks=(m.Ack(session, 1),)))
    client.ack(session, 1)
    client.say(m.Heartbeat(acks=(m.Ack(session, 2),)))
    assert live.flow.acked == 2
    assert rig.counter("acks_beyond_the_end") == 0


def test_streaming_11_a_heartbeat_may_speak_of_sessions_in_any_state(rig: Any) -> None:
    """Of one that waits for room, one that begins, and one that the broker has forgotten: nothing is refused for it."""
    client = rig.client()
    worker = rig.worker(ready=False)
    waits = client.open("waits")
    acks = (m.Ack(waits, 0), m.Ack("forgotten", 3))
    client.say(m.Heartbeat(acks=acks))
    worker.silent.add(m.InitializeStage)
    for stage in ("encode", "denoise", "decode"):
        worker.say(m.StageReady("world", stage, 10))
    assert rig.core.sessions[waits].state == "initializing"
    client.say(m.Heartbeat(acks=acks))
    assert rig.counter("out_of_protocol") == rig.counter("unknown_session") == 0


def test_streaming_11_a_heartbeat_acknowledges_each_session_once(kit: Any) -> None:
    """Nobody keeps the broker busy with one message: more acks than sessions there may be, or one twice, are no beat."""
    rig = kit.Rig(BrokerConfig(sessions_per_client_max=4))
    worker = rig.worker()
    stays, twice, many = (rig.client(name.encode(), name) for name in ("stays", "twice", "many"))
    session = twice.open()
    stays.say(m.Heartbeat(acks=tuple(m.Ack(str(number), 0) for number in range(4))))
    twice.say(m.Heartbeat(acks=tuple(m.Ack(session, 0, m.Credit(number, 0)) for number in range(2))))
    many.say(m.Heartbeat(acks=tuple(m.Ack(str(number), 0) for number in range(5))))
    assert not stays.heard(m.Rejected)
    assert [peer.last(m.Rejected).code for peer in (twice, many)] == ["malformed", "malformed"]
    assert not worker.heard(m.Rejected)
    assert rig.core.status()["clients"] == 1


@pytest.mark.parametrize("kind", ["client", "worker"])
def test_streaming_11_a_heartbeat_has_its_direction(rig: Any, kind: str) -> None:
    """A worker has taken no chunks, and nobody grants a broker controls: who says so is dropped."""
    peer = rig.worker() if kind == "worker" else rig.client()
    if kind == "worker":
        peer.say(m.Heartbeat(acks=(m.Ack("s", 1),)))
    else:
        peer.say(m.Heartbeat(grants=(m.ControlGrant("s", 1),)))
    assert peer.last(m.Rejected).code == "malformed"


def test_streaming_11_many_grants_are_told_in_several_heartbeats(kit: Any) -> None:
    """However many sessions a client has, no heartbeat is larger than it accepts, and each session is in one."""
    rig = kit.Rig(BrokerConfig(sessions_per_client_max=100))
    rig.worker(slots=100)
    client = rig.client(limits={"header_bytes_max": 4096})
    sessions = [client.open(str(number)) for number in range(100)]
    rig.advance(1.0)
    beats = client.heard(m.Heartbeat)
    assert [grant.session for beat in beats for grant in beat.grants] == sessions
    assert len(beats) == 4


def test_streaming_11_a_grant_is_told_when_it_changes_also_while_a_key_is_down(rig: Any, kit: Any) -> None:
    """Whoever submits by index beside a held key waits for no heartbeat."""
    worker, client, session = rig.start(chunks=9)
    keys = Keys(kit.world())
    keys.press("w")
    client.keys(session, keys)
    rig.turn()
    limits = [client.state(session)[1]]
    for count in range(1, 4):
        worker.make("encode", "denoise", "decode")
        client.ack(session, count)
        rig.turn()
        limits.append(client.state(session)[1])
        assert client.state(session) == ("running", rig.core.sessions[session].control_limit)
    assert len(client.chunks(session)) == 3
    assert limits == sorted(set(limits))
    rig.advance(1.0)
    assert client.last(m.Heartbeat).grants == (m.ControlGrant(session, limits[-1]),)


def test_streaming_11_a_chunk_carries_the_grant_that_its_commit_makes(rig: Any) -> None:
    """Nothing else is said of it: one message a chunk, whether keys are held or controls come by index."""
    worker, client, session = rig.start(chunks=9, controls=2)
    worker.make("encode", "encode", "denoise")
    before = len(client.heard(m.SessionChanged))
    worker.make("decode")
    rig.turn()
    assert client.last(m.Chunk).control_limit == 3 == rig.core.sessions[session].control_limit
    assert len(client.heard(m.SessionChanged)) == before
    assert isinstance(client.submit(session, 2), m.ControlAccepted)


def test_streaming_11_a_grant_that_grows_without_a_commit_is_told_by_itself(kit: Any) -> None:
    """Room on the control's edge comes when a chunk begins, and no chunk is committed by that."""
    rig = kit.Rig()
    spec = kit.world(capacities={"control": 1})
    worker, client, session = rig.start(chunks=9, spec=spec)
    assert client.state(session) == ("ready", 1)
    client.submit(session, 0)
    worker.make("encode")
    assert client.chunks(session) == []
    told = client.last(m.SessionChanged)
    assert (told.state, told.control_limit) == ("running", 2)
    assert isinstance(client.submit(session, 1), m.ControlAccepted)
    worker.make("encode", "denoise")  # denoise(1) begins, and makes room for the control that chunk 0 doesn't allow yet
    assert client.state(session) == ("running", 2)
    worker.make("decode")
    assert client.last(m.Chunk).control_limit == 3
    assert client.last(m.SessionChanged) == told


def test_streaming_11_a_chunk_of_a_session_that_ends_repeats_the_last_grant(rig: Any) -> None:
    """No control is taken any more, and the grant doesn't go back."""
    worker, client, session = rig.start(chunks=9, controls=2)
    client.end(session, "drain")
    worker.make("encode", "encode", "denoise", "denoise", "decode", "decode")
    assert [chunk.control_limit for chunk in client.chunks(session)] == [2, 2]


def test_streaming_11_a_chunk_that_fits_no_message_grants_nothing(kit: Any) -> None:
    """It isn't sent and not committed, and so what was granted before stands."""
    rig = kit.Rig()
    worker, client = rig.worker(), rig.client(limits={"frame_bytes_max": 1000})
    session = client.open(chunks=9)
    client.submit(session, 0)
    worker.make("encode", "denoise")
    worker.finish("decode", outputs={"frames": m.Artifact({}, {"frames": kit.image(1001)})})
    assert client.chunks(session) == []
    assert {grant.control_limit for grant in client.heard(m.SessionChanged)} == {0, 2}
    assert client.ended(session).failure.field == "frame_bytes_max"
