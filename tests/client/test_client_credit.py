"""The client's core alone: how much it lets the broker send, and how far it goes itself, whatever is lost on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire.client_core import HEARTBEAT_SESSIONS_MAX
from reelwire.messages import Artifact, Credit

CONTROL = Artifact({"keys": ["w"]})
Rig = Any  # of conftest.py


def test_streaming_11_credit_is_granted_with_the_opening_and_with_each_acknowledgement(attached: Rig) -> None:
    """Absolute and cumulative: the window, and all that was taken before it, in chunks and in bytes."""
    attached.open()
    assert attached.said(m.OpenSession)[0].credit == Credit(2, 1000)
    attached.chunk(0, nbytes=300)
    attached.chunk(1, nbytes=50)
    attached.take()
    attached.take()
    attached.take()
    attached.chunk(2, nbytes=7)
    attached.take()
    attached.take()
    assert attached.said(m.Ack) == [
        m.Ack("s", 1, Credit(3, 1300)),
        m.Ack("s", 2, Credit(4, 1350)),
        m.Ack("s", 3, Credit(5, 1357)),
    ]


def test_streaming_11_bytes_of_all_outputs_count(attached: Rig) -> None:
    """As the broker counts them: every tensor of every output."""
    attached.open()
    attached.chunk(0, nbytes=10)
    view = attached.core.sessions["s"]
    assert list(view.unacked) == [10]
    attached.call(e.End, "s", "drain")
    attached.chunk(1, nbytes=20)
    assert [ack.credit.nbytes for ack in attached.said(m.Ack)] == [1010, 1030]
    assert not view.unacked


def test_streaming_11_heartbeats_repeat_the_acknowledgements_of_all_live_sessions(attached: Rig) -> None:
    """One that was lost is made good within an interval; sessions that have ended are not spoken of."""
    attached.open()
    attached.call(e.Open, "k2", "toy", 5)
    attached.hear(m.SessionOpened("k2", "s2", "token"))
    attached.call(e.Open, "k3", "toy", 5)
    attached.hear(m.SessionOpened("k3", "s3", "token"))
    attached.hear(m.SessionEnded("s3", "cancelled"))
    attached.chunk(0, nbytes=5)
    attached.take()
    attached.take()
    attached.tick(1.0)
    acks = (m.Ack("s", 1, Credit(3, 1005)), m.Ack("s2", 0, Credit(2, 1000)))
    assert attached.said(m.Heartbeat) == [m.Heartbeat(acks=acks)]


def test_streaming_11_a_heartbeat_for_very_many_sessions_is_several(attached: Rig) -> None:
    """Each stays small; together they speak of every session once."""
    for number in range(HEARTBEAT_SESSIONS_MAX + 1):
        attached.call(e.Open, f"k{number}", "toy", 5)
        attached.hear(m.SessionOpened(f"k{number}", f"s{number}", "token"))
    attached.tick(1.0)
    spoken = [[ack.session for ack in message.acks] for message in attached.said(m.Heartbeat)]
    assert [len(sessions) for sessions in spoken] == [HEARTBEAT_SESSIONS_MAX, 1]
    assert len({session for sessions in spoken for session in sessions}) == HEARTBEAT_SESSIONS_MAX + 1


def test_streaming_11_a_heartbeat_makes_good_a_grant_that_was_lost(attached: Rig) -> None:
    """A control that waits for it is sent; sessions that aren't there or have ended are passed over in silence."""
    attached.open(limit=1)
    attached.call(e.Submit, "s", 2, CONTROL)
    attached.call(e.Submit, "s", 1, CONTROL)
    attached.hear(m.Heartbeat(grants=(m.ControlGrant("x", 9), m.ControlGrant("s", 3))))
    assert [control.index for control in attached.said(m.SubmitControl)] == [1, 2]
    attached.hear(m.SessionEnded("s", "failed"))
    attached.hear(m.Heartbeat(grants=(m.ControlGrant("s", 4),)))
    assert attached.core.sessions["s"].control_limit == 3
    assert attached.core.dropped == {}


def grants_of(limit: int) -> list[m.SessionChanged | m.Heartbeat]:
    return [m.SessionChanged("s", "running", limit), m.Heartbeat(grants=(m.ControlGrant("s", limit),))]


@pytest.mark.seeds(20)
def test_streaming_11_lost_repeated_and_reordered_grants_do_no_harm(attached: Rig, seed: int) -> None:
    """Only the largest that arrived counts: each control below it was sent once, in order, and none above it."""
    rng = random.Random(seed)
    attached.open(chunks=50, limit=2)
    for index in range(12):
        attached.call(e.Submit, "s", index, CONTROL)
    arriving = [message for limit in range(3, 11) for message in grants_of(limit) for _ in range(rng.randint(0, 2))]
    rng.shuffle(arriving)
    largest = 2
    for message in arriving:
        attached.hear(message)
        limit = message.control_limit if isinstance(message, m.SessionChanged) else message.grants[0].control_limit
        largest = max(largest, limit)
        assert [control.index for control in attached.said(m.SubmitControl)] == list(range(largest))
