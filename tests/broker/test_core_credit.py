"""Credits of the client: absolute grants in chunks and bytes, and what a client that gives none holds up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.broker.credit import Window
from reelwire.messages import Artifact, Credit

GRANTS = st.lists(st.builds(Credit, st.integers(-5, 50), st.integers(-5, 5000)), max_size=20)


@given(GRANTS, st.randoms(use_true_random=False))
def test_streaming_11_lost_repeated_and_reordered_grants_do_no_harm(
    grants: list[Credit], chance: random.Random
) -> None:
    """Whatever arrives and how often: the largest of each holds, and a grant says whether it is news."""
    window, other = Window(Credit(2, 100)), Window(Credit(2, 100))
    for grant in grants:
        before = (window.chunks, window.nbytes)
        assert window.grant(grant) == ((window.chunks, window.nbytes) != before)
        assert not window.grant(grant)
    shuffled = [*grants, *grants]
    chance.shuffle(shuffled)
    for grant in shuffled:
        other.grant(grant)
    most = (max(2, *(x.chunks for x in grants), 2), max(100, *(x.nbytes for x in grants), 100))
    assert (window.chunks, window.nbytes) == (other.chunks, other.nbytes) == most


def test_streaming_11_one_chunk_may_go_over_the_bytes() -> None:
    """Else one that is larger than the window could never be sent; the next waits."""
    window = Window(Credit(10, 100))
    assert window.allows(0)
    window.send(1000)
    assert not window.allows(1)
    window.grant(Credit(0, 1100))
    assert window.allows(1)
    assert not Window(Credit(1, 0)).allows(0)
    assert not Window(Credit(1, 1)).allows(1)


def opened(kit: Any, credit: Credit, rig: Any = None, **more: Any) -> Any:
    """A stream with so much credit, that is steered by a held key."""
    rig = kit.Rig() if rig is None else rig
    stream = kit.Stream(rig, asked={"credit": credit, "control_binding": "late"}, **more)
    stream.press("w")
    rig.turn()
    return stream


def indices(stream: Any) -> list[int]:
    """The chunks that the client has."""
    return [chunk.index for chunk in stream.got()]


def test_streaming_11_no_chunk_is_sent_beyond_the_credit(kit: Any) -> None:
    """What is made beyond it stays on its edge, and goes when the client lets it."""
    stream = opened(kit, Credit(1, 1 << 30))
    stream.make(2, ack=False)
    assert indices(stream) == [0]
    assert sorted(stream.session.flow.edges["frames"].held) == [0, 1]
    stream.client.ack(stream.id, 0, Credit(2, 0))
    assert indices(stream) == [0, 1]
    stream.client.ack(stream.id, 2, Credit(2, 0))
    stream.rig.turn()
    stream.make(1, ack=False)
    assert indices(stream) == [0, 1]


def test_streaming_11_bytes_are_counted_over_all_chunks(kit: Any) -> None:
    """The client grants those of its window and of what it took."""
    stream = opened(kit, Credit(100, 100))
    frames = {"frames": Artifact({}, {"video": kit.image(10, 10, 3)})}
    for _ in range(2):
        while not stream.worker.jobs["denoise"]:
            stream.worker.finish("encode")
        stream.worker.finish("denoise")
        stream.worker.finish("decode", outputs=frames)
        stream.rig.turn()
    assert indices(stream) == [0], "it was over the 100 bytes; the next isn't sent"
    stream.client.ack(stream.id, 1, Credit(100, 100))
    assert indices(stream) == [0]
    stream.client.ack(stream.id, 1, Credit(100, 301))
    assert indices(stream) == [0, 1]
    assert stream.session.credit.sent_nbytes == 600


def test_streaming_11_a_lack_of_credit_reaches_back_to_the_controls(kit: Any) -> None:
    """What nobody may be sent stays on its edge, and keys are no further ahead than that."""
    stream = opened(kit, Credit(0, 0))
    for _ in range(20):
        for stage in ("encode", "denoise", "decode"):
            if stream.worker.jobs[stage]:
                stream.worker.finish(stage)
        stream.rig.turn()
    assert indices(stream) == []
    assert sorted(stream.session.flow.edges["frames"].held) == [0, 1]
    assert stream.cursors()[1] == 2


def test_streaming_11_the_idle_cause_is_credit(kit: Any) -> None:
    """Whoever gives controls by index fills the edges; what decode then waits for is the client."""
    stream = kit.Stream(kit.Rig(), asked={"credit": Credit(0, 0)})
    for index in range(6):
        stream.client.submit(stream.id, index)
        for stage in ("encode", "denoise", "decode"):
            if stream.worker.jobs[stage]:
                stream.worker.finish(stage)
    shown = stream.rig.core.status()["sessions"][0]
    assert shown["waits_for"]["decode"] == "credit"
    assert sorted(stream.session.flow.edges["frames"].held) == [0, 1]


@pytest.mark.parametrize(
    "repeat", [(0, Credit(0, 0)), (1, Credit(3, 50)), (2, Credit(4, 1 << 30)), (1, Credit(-1, -1))]
)
def test_streaming_19_a_repeated_or_older_acknowledgement_changes_nothing(kit: Any, repeat: tuple[int, Credit]) -> None:
    """Neither cursors nor credit go back, nobody is told anything, and no deadline moves."""
    stream = opened(kit, Credit(2, 1 << 30))
    stream.make(2, ack=False)
    stream.client.ack(stream.id, 2, Credit(4, 1 << 30))
    stream.rig.turn()
    flow, credit = stream.session.flow, stream.session.credit
    before = (flow.acked, credit.chunks, credit.nbytes, stream.cursors(), len(stream.client.inbox))
    timers = stream.rig.core.wake_at
    stream.rig.now += 0.1
    stream.client.ack(stream.id, repeat[0], repeat[1])
    stream.client.say(m.Heartbeat(acks=(m.Ack(stream.id, *repeat),)))
    assert (flow.acked, credit.chunks, credit.nbytes, stream.cursors(), len(stream.client.inbox)) == before
    assert stream.rig.core.wake_at == timers


def test_streaming_19_a_lost_acknowledgement_is_made_up_for_by_a_heartbeat(kit: Any) -> None:
    """It says where each session stands: chunks and credit go on from there."""
    stream = opened(kit, Credit(1, 1 << 30))
    stream.make(2, ack=False)
    assert indices(stream) == [0]
    stream.client.say(m.Heartbeat(acks=(m.Ack(stream.id, 1, Credit(3, 0)),)))
    assert indices(stream) == [0, 1]
    assert [chunk.index for chunk in stream.session.ring] == [1]


def test_streaming_19_the_ring_is_bounded_by_edge_and_credit(kit: Any) -> None:
    """Whatever the credit, no more is kept for the client than the output's edge holds."""
    for credit, most in ((Credit(1, 1 << 30), 1), (Credit(99, 1 << 30), 2)):
        stream = opened(kit, credit)
        for _ in range(20):
            for stage in ("encode", "denoise", "decode"):
                if stream.worker.jobs[stage]:
                    stream.worker.finish(stage)
            stream.rig.turn()
        assert len(stream.session.ring) == most


def test_streaming_11_credit_that_comes_before_the_stages_are_there_counts(kit: Any) -> None:
    """An acknowledgement of nothing may raise it while the session is still initialized."""
    rig = kit.Rig()
    worker = rig.worker(ready=False)
    client = rig.client()
    session = client.open(credit=Credit(0, 0))
    client.ack(session, 0, Credit(2, 100))
    client.ack(session, 1, Credit(1, 1))
    assert rig.counter("acks_beyond_the_end") == 1
    assert rig.counter("out_of_protocol") == 0
    credit = rig.core.sessions[session].credit
    assert (credit.chunks, credit.nbytes) == (2, 100)
    for stage in ("encode", "denoise", "decode"):
        worker.say(m.StageReady("world", stage, 10))
    assert client.state(session)[0] == "ready"


def test_streaming_18_the_last_chunk_may_be_sent_by_an_acknowledgement(kit: Any) -> None:
    """Everything is made and waits for credit: when it comes the session is released, and completed when it is taken."""
    stream = opened(kit, Credit(1, 1 << 30), chunks=2)
    stream.make(2, ack=False)
    assert stream.session.state == "running"
    stream.client.ack(stream.id, 1, Credit(2, 0))
    assert indices(stream) == [0, 1]
    assert stream.session.state == "releasing"
    stream.client.ack(stream.id, 2, Credit(2, 0))
    assert stream.client.ended(stream.id).state == "completed"


def test_streaming_22_a_drain_waits_for_credit(kit: Any) -> None:
    """What was accepted is delivered when the client lets it, also after the time for the close: no stage hangs."""
    rig = kit.Rig(BrokerConfig(close_timeout_s=2))
    stream = opened(kit, Credit(0, 0), rig)
    stream.client.end(stream.id)
    stream.make(1, ack=False)
    rig.advance(7.0)
    assert stream.session.state == "draining"
    stream.client.ack(stream.id, 0, Credit(1, 1))
    stream.client.ack(stream.id, 1)
    assert indices(stream) == [0]
    assert stream.client.ended(stream.id).state == "closed"


def test_streaming_24_a_client_that_gives_no_credit_is_closed(kit: Any) -> None:
    """It holds up what is made for it as one does that never reads; a little credit begins the time anew."""
    rig = kit.Rig(BrokerConfig(stall_s=10))
    stream = opened(kit, Credit(0, 1 << 30), rig)
    rig.advance(20.0)
    assert stream.session.state == "running", "nothing is there for it yet"
    stream.make(1, ack=False)
    rig.advance(9.0)
    stream.client.ack(stream.id, 0, Credit(1, 0))
    assert indices(stream) == [0]
    stream.client.ack(stream.id, 1, Credit(1, 0))
    rig.advance(20.0)
    stream.make(1, ack=False)
    rig.advance(9.0)
    assert stream.client.ended(stream.id) is None
    rig.advance(2.0)
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure.kind) == ("closed", "stalled")


def test_streaming_24_credit_for_what_nobody_takes_puts_nothing_off(kit: Any) -> None:
    """A client that grants more and more, and takes nothing, is closed like one that says nothing."""
    rig = kit.Rig(BrokerConfig(stall_s=10))
    stream = opened(kit, Credit(1, 1 << 30), rig)
    stream.make(2, ack=False)
    rig.advance(6.0)
    stream.client.ack(stream.id, 0, Credit(2, 1 << 30))
    assert indices(stream) == [0, 1]
    for more in range(1, 10):
        rig.advance(1.0)
        stream.client.ack(stream.id, 0, Credit(2 + more, (1 << 30) + more))
    assert stream.client.ended(stream.id) is None, "what was sent by a grant had its time from then on"
    rig.advance(1.5)
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure.kind) == ("closed", "stalled")


@pytest.mark.parametrize("credit", [Credit(-1, 1), Credit(1, -1)])
def test_streaming_34_a_credit_of_less_than_nothing_is_refused(kit: Any, credit: Credit) -> None:
    """By its field; later ones are no more than those before, so they change nothing."""
    rig = kit.Rig()
    rig.worker()
    client = rig.client()
    assert client.open(credit=credit) == ""
    failure = client.last(m.SessionRefused).failure
    assert (failure.kind, failure.field) == ("request", "credit")
    session = client.open(credit=Credit(1, 1))
    client.ack(session, -5, credit)
    window = rig.core.sessions[session].credit
    assert (window.chunks, window.nbytes) == (1, 1)
