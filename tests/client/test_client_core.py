"""The client's core alone: what it says and what it answers, message by message, with a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire.client_core import HELLO_RETRY_S
from reelwire.controls import KeyState
from reelwire.errors import (
    BrokerUnreachable,
    ControlError,
    OverloadError,
    RequestError,
    SessionClosed,
    SessionFailed,
    UsageError,
    VersionMismatch,
    WireError,
)
from reelwire.messages import Artifact, Failure

CONTROL = Artifact({"keys": ["w"]})
Rig = Any  # of conftest.py


# --- connection ------------------------------------------------------------------------------------------------------


def test_streaming_38_a_hello_says_version_and_name(rig: Rig) -> None:
    """The first message goes out without an attachment; the welcome's number is used from then on."""
    call = rig.call(e.Attach)
    rig.attach()
    assert rig.sent == [m.ClientHello("0.1.0", "me")]
    assert rig.done[call].value == rig.core.welcome
    rig.call(e.Ask, None)
    assert rig.attachments == [0, 7]


def test_streaming_38_a_broker_that_does_not_fit_is_refused(rig: Rig) -> None:
    """Another minor version in the welcome ends the client; both versions are named."""
    call = rig.call(e.Attach)
    rig.attach(version="0.2.0")
    rig.error(call, VersionMismatch, "the broker has reelwire 0.2.0, this client 0.1.0")
    assert rig.stopped
    rig.error(rig.call(e.Ask, None), VersionMismatch)


@pytest.mark.parametrize("event", [e.Received(0.0, 0, m.Rejected("version", "0.2 and 0.1")),
                                   e.Malformed(0.0, "0.2 and 0.1", version=True)])  # fmt: skip
def test_streaming_38_a_broker_that_refuses_the_version_ends_the_client(rig: Rig, event: e.Event) -> None:
    """So does a broker of another protocol, whose answer can't be read."""
    call = rig.call(e.Attach)
    rig.feed(e.Connect(0.0))
    rig.feed(event)
    rig.error(call, VersionMismatch, "0.2 and 0.1")
    assert rig.stopped


def test_a_broker_that_takes_nobody_is_asked_again_later(rig: Rig) -> None:
    """A refusal for now is raised to whoever waits; the next attempt goes over a new socket."""
    first, second = rig.call(e.Attach), rig.call(e.Attach)
    rig.feed(e.Connect(rig.now))
    rig.hear(m.Rejected("limit", "full"), attachment=0)
    assert rig.error(first, OverloadError, "full").retry_after_s > 0
    rig.error(second, OverloadError)
    rig.tick(HELLO_RETRY_S)
    assert (rig.reconnects, rig.core.phase) == (1, "idle")
    third = rig.call(e.Attach)
    rig.feed(e.Connect(rig.now))
    rig.hear(m.Rejected("conflict", "no"), attachment=0)
    rig.error(third, BrokerUnreachable, "conflict")


def test_an_unanswered_hello_is_said_again_over_a_new_socket(rig: Rig) -> None:
    """Whoever waits for the connection goes on waiting; only the shell's time limit ends that."""
    call = rig.call(e.Attach)
    rig.feed(e.Connect(rig.now))
    assert rig.core.wake_at == rig.now + HELLO_RETRY_S
    rig.tick(HELLO_RETRY_S - 0.1)
    assert rig.reconnects == 0
    rig.tick(0.1)
    rig.feed(e.Connect(rig.now))
    rig.hear(m.Welcome("me", "0.1.0", 1.0, 3, {}))
    assert rig.said(m.ClientHello) == [m.ClientHello("0.1.0", "me")] * 2
    assert rig.done[call].error is None


def test_streaming_33_messages_of_another_attachment_are_dropped(attached: Rig) -> None:
    """What was meant for an older connection changes nothing and is counted."""
    view = attached.open()
    attached.hear(m.SessionEnded("s", "failed"), attachment=6)
    attached.hear(m.SessionEnded("s", "failed"), attachment=0)
    assert not view.ended
    assert attached.core.dropped == {"another attachment": 2}


def test_streaming_32_heartbeats_go_out_at_each_interval(attached: Rig) -> None:
    """Whatever else was said: they also repeat what may have been lost."""
    attached.tick(0.9)
    attached.call(e.Ask, None)
    attached.hear(m.Heartbeat())
    assert attached.core.wake_at == pytest.approx(attached.now + 0.1)
    attached.tick(0.1)
    assert attached.said(m.Heartbeat) == [m.Heartbeat()]
    attached.tick(0.9)
    assert len(attached.said(m.Heartbeat)) == 1
    attached.tick(0.1)
    assert len(attached.said(m.Heartbeat)) == 2


def test_streaming_32_a_silent_broker_is_lost_after_the_missed_intervals(attached: Rig) -> None:
    """The sessions fail, calls are answered, and a new connection is made; what was delivered can still be taken."""
    view = attached.open()
    attached.chunk(0)
    pending = [attached.call(e.Submit, "s", 0, CONTROL), attached.call(e.Submit, "s", 4, CONTROL)]
    status, opening = attached.call(e.Ask, None), attached.call(e.Open, "k2", "toy", 3)
    attached.tick(2.9)
    assert not view.ended
    attached.tick(0.1)
    for call in pending:
        attached.error(call, SessionFailed, "hasn't been heard of for 3.0 s")
    attached.error(status, BrokerUnreachable)
    attached.error(opening, BrokerUnreachable)
    assert (attached.reconnects, view.state) == (1, "failed")
    assert (attached.take(), attached.take()) == (0, None)
    assert attached.acked == []
    attached.error(attached.call(e.Open, "k3", "toy", 3), BrokerUnreachable, "is lost")
    attached.attach()
    attached.call(e.Open, "k4", "toy", 3)
    assert attached.said(m.OpenSession)[-1].key == "k4"


def test_streaming_32_a_busy_broker_may_be_silent_for_as_long_as_it_said(attached: Rig) -> None:
    """`busy_for_s` extends the deadline; the next heartbeat without it ends that."""
    attached.hear(m.Heartbeat(busy_for_s=10.0))
    attached.tick(9.9)
    assert attached.reconnects == 0
    attached.hear(m.Heartbeat())
    attached.tick(2.9)
    assert attached.reconnects == 0
    attached.tick(0.1)
    assert attached.reconnects == 1


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (e.Received(0.0, 0, m.Rejected("unknown_peer", "say hello")), "was restarted or has given this client up"),
        (e.Received(0.0, 7, m.Rejected("malformed", "what?")), "malformed"),
        (e.Received(0.0, 7, m.Goodbye("shutdown")), "the broker left: shutdown"),
        (e.OutboxFull(0.0), "doesn't read"),
    ],
)
def test_a_connection_that_is_lost_fails_its_sessions_and_is_made_again(
    attached: Rig, event: e.Event, text: str
) -> None:
    """Dropped by the broker, left by it, or stuck: the session says why."""
    view = attached.open()
    attached.feed(event)
    assert isinstance(view.error(), SessionFailed)
    assert text in str(view.error())
    assert attached.reconnects == 1


def test_a_client_that_leaves_says_goodbye_and_answers_everybody(attached: Rig) -> None:
    """Calls that wait end, sessions are closed, and later calls say that the client is."""
    view = attached.open()
    status, end = attached.call(e.Ask, None), attached.call(e.End, "s", "drain")
    attached.feed(e.Leave(attached.now))
    attached.feed(e.Leave(attached.now))
    assert attached.said(m.Goodbye) == [m.Goodbye("closed")]
    assert attached.stopped
    attached.error(status, UsageError, "the client was closed")
    assert attached.done[end].value == "closed"
    assert (view.state, view.failure) == ("closed", None)
    attached.error(attached.call(e.Attach), UsageError)


def test_a_broken_loop_answers_everybody(attached: Rig) -> None:
    """When there can be no socket any more, nobody is left waiting."""
    call = attached.call(e.Ask, None)
    attached.feed(e.Broken(attached.now, "no more files"))
    attached.error(call, BrokerUnreachable, "no more files")
    attached.error(attached.call(e.Attach), BrokerUnreachable, "no more files")


def test_streaming_34_bytes_of_a_stranger_change_nothing(attached: Rig) -> None:
    """What is no message is counted; the connection lives on."""
    attached.feed(e.Malformed(attached.now, "noise"))
    attached.feed(e.Malformed(attached.now, "protocol 2", version=True))
    assert attached.core.dropped == {"malformed": 2}
    assert attached.core.phase == "attached"


def test_a_second_welcome_over_the_same_attachment_brings_news(attached: Rig) -> None:
    """Limits and pipelines may change while the client is attached; whoever watches is told."""
    again = m.Welcome("me-1", "0.1.9", 1.0, 3, {"image_bytes_max": 5})
    assert attached.core.handle(e.Received(attached.now, 7, again)) == [e.Changed()]
    assert attached.core.welcome is not None
    assert attached.core.welcome.limits == {"image_bytes_max": 5}
    assert attached.said(m.ClientHello) == [m.ClientHello("0.1.0", "me")]


def test_there_is_nothing_to_wake_for_without_a_connection(rig: Rig) -> None:
    """No deadline before the first connection and after the end; a socket that comes too late isn't greeted."""
    assert rig.core.wake_at is None
    rig.tick(100.0)
    rig.feed(e.OutboxFull(rig.now))
    rig.attach()
    rig.feed(e.Connect(rig.now))
    rig.feed(e.Leave(rig.now))
    rig.feed(e.Broken(rig.now, "late"))
    rig.feed(e.Connect(rig.now))
    assert rig.core.wake_at is None
    assert rig.sent == [m.ClientHello("0.1.0", "me"), m.Goodbye("closed")]


# --- opening ---------------------------------------------------------------------------------------------------------


def test_opening_waits_until_the_session_is_ready(attached: Rig) -> None:
    """A session that exists isn't enough, unless the application says so."""
    call = attached.call(e.Open, "k", "toy", 5)
    attached.hear(m.SessionOpened("k", "s", "token"))
    attached.hear(m.SessionChanged("s", "initializing", 0))
    assert call not in attached.done
    attached.hear(m.SessionChanged("s", "ready", 2))
    assert attached.done[call].value == "s"
    early = attached.call(e.Open, "k2", "toy", 5, wait_ready=False)
    attached.hear(m.SessionOpened("k2", "s2", "token"))
    assert attached.done[early].value == "s2"


def test_streaming_15_an_opening_says_when_keys_are_bound_and_at_which_pace(attached: Rig) -> None:
    """Late and as fast as it goes, unless the application says otherwise."""
    attached.call(e.Open, "k", "toy", 5)
    attached.call(e.Open, "k2", "toy", 5, control_binding="early", pace="realtime")
    said = [(message.control_binding, message.pace) for message in attached.said(m.OpenSession)]
    assert said == [("late", "asap"), ("early", "realtime")]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure("request", "no such seed", field="seed"), RequestError),
        (Failure("overload", "full", retry_after_s=4.0), OverloadError),
        (Failure("overload", "full"), OverloadError),
        (Failure("stage", "boom", stage="make"), SessionFailed),
    ],
)
@pytest.mark.parametrize("moment", ["refused", "initializing"])
def test_a_session_that_can_not_be_is_the_error_of_its_opening(
    attached: Rig, failure: Failure, kind: type[Exception], moment: str
) -> None:
    """Refused at once or while it is initialized: the same error, and nothing of it is kept."""
    call = attached.call(e.Open, "k", "toy", 5)
    if moment == "refused":
        attached.hear(m.SessionRefused("k", failure))
    else:
        attached.hear(m.SessionOpened("k", "s", "token"))
        attached.hear(m.SessionChanged("s", "initializing", 0))
        attached.hear(m.SessionChanged("s", "releasing", 0))
        attached.hear(m.SessionEnded("s", "failed", failure))
    error = attached.error(call, kind, failure.message)
    if kind is RequestError:
        assert error.field == "seed"
    if kind is OverloadError:
        assert error.retry_after_s in (4.0, 1.0)
    assert attached.core.sessions == {}


@pytest.mark.parametrize("opened", [True, False])
def test_a_session_that_nobody_waits_for_any_more_is_cancelled(attached: Rig, opened: bool) -> None:
    """A withdrawn opening leaves no session behind, whether the broker had answered or not."""
    call = attached.call(e.Open, "k", "toy", 5)
    if opened:
        attached.hear(m.SessionOpened("k", "s", "token"))
    attached.feed(e.Withdraw(attached.now, call))
    if not opened:
        attached.hear(m.SessionOpened("k", "s", "token"))
    assert attached.said(m.EndSession) == [m.EndSession("s", "cancel")]
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert attached.core.sessions == {}
    assert call not in attached.done


def test_an_opening_whose_answer_nobody_took_is_cancelled(attached: Rig) -> None:
    """Whoever waited was gone when the answer was there; withdrawing any other answered call changes nothing."""
    attached.open()
    other = attached.call(e.Submit, "s", None, CONTROL)
    attached.feed(e.Withdraw(attached.now, other))
    assert attached.said(m.EndSession) == []
    for _ in range(2):
        attached.feed(e.Withdraw(attached.now, 1))
    assert attached.said(m.EndSession) == [m.EndSession("s", "cancel")]
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert attached.core.sessions == {}


def test_a_name_that_another_session_has_is_the_brokers_fault(attached: Rig) -> None:
    """Whoever opened gets a WireError, and the session of that name goes on."""
    view = attached.open()
    call = attached.call(e.Open, "k2", "toy", 5)
    attached.hear(m.SessionOpened("k2", "s", "token"))
    attached.error(call, WireError, "'s', which another one is called")
    attached.chunk(0)
    assert (attached.take(), attached.core.sessions["s"]) == (0, view)


def test_answers_to_what_was_never_asked_are_dropped(attached: Rig) -> None:
    """A session, a refusal, a control's answer, numbers that nobody asked for: counted, or without effect."""
    attached.open()
    attached.hear(m.SessionOpened("other", "x", "token"))
    attached.hear(m.SessionRefused("other", Failure("overload", "full")))
    attached.hear(m.SessionChanged("x", "ready", 2))
    attached.hear(m.ControlAccepted("s", 3))
    attached.hear(m.ControlRefused("s", 3, "gap", "no"))
    attached.hear(m.Status(99, {}))
    attached.hear(m.Metrics(99, "s", {}))
    assert attached.core.dropped == {"unknown session": 3}
    assert len(attached.done) == 1


# --- controls --------------------------------------------------------------------------------------------------------


def test_streaming_15_a_control_waits_for_its_grant(attached: Rig) -> None:
    """Controls below the grant go out at once, later ones when it rises, in order of their indices."""
    attached.open(limit=2)
    for index in (0, 1, 3, 2):
        attached.call(e.Submit, "s", index, CONTROL)
    assert [control.index for control in attached.said(m.SubmitControl)] == [0, 1]
    attached.hear(m.SessionChanged("s", "running", 4))
    assert [control.index for control in attached.said(m.SubmitControl)] == [0, 1, 2, 3]


def test_streaming_15_a_control_that_waits_leaves_with_the_chunk_that_grants_it(attached: Rig) -> None:
    """Behind the chunk itself, in the same pass; what is beyond the grant goes on waiting."""
    view = attached.open(limit=2)
    for index in range(4):
        attached.call(e.Submit, "s", index, CONTROL)
    attached.chunk(0, limit=3)
    assert [delivery.chunk.index for delivery in view.waiting] == [0]
    assert [control.index for control in attached.said(m.SubmitControl)] == [0, 1, 2]
    assert view.submitted.keys() == {1, 2}
    attached.chunk(1)
    assert view.control_limit == 3
    attached.chunk(2, limit=4)
    assert [control.index for control in attached.said(m.SubmitControl)] == [0, 1, 2, 3]


def test_streaming_15_a_chunk_grants_nothing_that_was_given_up(attached: Rig) -> None:
    """Of a session that the application has ended nothing waits, whatever a chunk that crossed that grants."""
    view = attached.open(limit=1)
    parked = attached.call(e.Submit, "s", 1, CONTROL)
    attached.call(e.End, "s", "drain")
    attached.error(parked, SessionClosed)
    attached.chunk(0, limit=3)
    attached.call(e.End, "s", "cancel")
    attached.chunk(1, limit=4)
    attached.error(attached.call(e.Submit, "s", 1, CONTROL), SessionClosed)
    assert attached.said(m.SubmitControl) == []
    assert view.have == 2


def test_streaming_11_a_grant_never_goes_back(attached: Rig) -> None:
    """Grants are absolute: an older, smaller one changes nothing, also where a chunk has it that comes again."""
    attached.open(limit=4)
    attached.hear(m.SessionChanged("s", "running", 2))
    attached.chunk(0, limit=3)
    attached.chunk(0, limit=3)
    attached.call(e.Submit, "s", 3, CONTROL)
    assert [control.index for control in attached.said(m.SubmitControl)] == [3]


def test_each_control_gets_its_own_answer(attached: Rig) -> None:
    """Answers for one index go to the calls in the order in which they asked; a refusal names code and index."""
    attached.open()
    first, second, other = (attached.call(e.Submit, "s", index, CONTROL) for index in (0, 0, 1))
    attached.hear(m.ControlAccepted("s", 0))
    attached.hear(m.ControlRefused("s", 1, "gap", "expected 5", 5))
    attached.hear(m.ControlRefused("s", 0, "duplicate", "had it", 1))
    assert attached.done[first].value == 0
    error = attached.error(second, ControlError, "had it")
    assert (error.code, error.expected) == ("duplicate", 1)
    assert attached.error(other, ControlError).code == "gap"


@pytest.mark.parametrize("index", [-1, 5, 99])
def test_an_index_that_can_not_be_is_refused_by_the_broker(attached: Rig, index: int) -> None:
    """There is no grant to wait for, so it is sent and its answer raised."""
    attached.open(limit=2)
    call = attached.call(e.Submit, "s", index, CONTROL)
    assert attached.said(m.SubmitControl)[-1].index == index
    attached.hear(m.ControlRefused("s", index, "past_end", "no such chunk"))
    assert attached.error(call, ControlError).code == "past_end"


def test_streaming_14_the_pending_slot_does_not_wait(attached: Rig) -> None:
    """A control without an index is answered when it is sent; where it went doesn't answer another call."""
    attached.open()
    slot, by_index = attached.call(e.Submit, "s", None, CONTROL), attached.call(e.Submit, "s", 0, CONTROL)
    assert attached.done[slot].error is None
    attached.hear(m.ControlAccepted("s", 0, by_index=False))
    assert by_index not in attached.done
    attached.hear(m.ControlRefused("s", 0, "duplicate", "had it", 1))
    assert attached.error(by_index, ControlError).code == "duplicate"


def test_a_refused_slot_is_raised_by_the_next_one(attached: Rig) -> None:
    """Nothing waits for it, so the refusal reaches the application with its next control for the slot."""
    attached.open()
    attached.call(e.Submit, "s", None, CONTROL)
    attached.hear(m.ControlRefused("s", None, "malformed", "odd"))
    assert attached.error(attached.call(e.Submit, "s", None, CONTROL), ControlError, "odd").code == "malformed"
    assert attached.done[attached.call(e.Submit, "s", None, CONTROL)].error is None
    assert len(attached.said(m.SubmitControl)) == 3


def test_a_withdrawn_control_is_never_sent(attached: Rig) -> None:
    """One that still waits for its grant is dropped; one that was sent only loses its listener."""
    attached.open(limit=1)
    sent, parked = attached.call(e.Submit, "s", 0, CONTROL), attached.call(e.Submit, "s", 1, CONTROL)
    for call in (sent, parked):
        attached.feed(e.Withdraw(attached.now, call))
    attached.hear(m.SessionChanged("s", "running", 3))
    again = attached.call(e.Submit, "s", 0, CONTROL)
    attached.hear(m.ControlAccepted("s", 0))
    assert again not in attached.done
    attached.hear(m.ControlRefused("s", 0, "duplicate", "had it", 1))
    assert attached.error(again, ControlError).code == "duplicate"
    assert [control.index for control in attached.said(m.SubmitControl)] == [0, 0]
    assert {sent, parked}.isdisjoint(attached.done)


def test_a_session_that_has_ended_takes_no_controls(attached: Rig) -> None:
    """Controls that wait get the session's error, and so do later ones; keys are not sent any more."""
    view = attached.open(limit=1)
    parked, sent = attached.call(e.Submit, "s", 2, CONTROL), attached.call(e.Submit, "s", 0, CONTROL)
    attached.hear(m.ControlRefused("s", 0, "ended", "it drains"))
    attached.error(sent, SessionClosed, "it drains")
    attached.hear(m.SessionEnded("s", "failed", Failure("stage", "boom", "make", 1)))
    error = attached.error(parked, SessionFailed, "boom")
    assert (error.stage, error.index) == ("make", 1)
    attached.error(attached.call(e.Submit, "s", 1, CONTROL), SessionFailed)
    attached.feed(e.ChangeKeys(attached.now, "s", KeyState(1, ("w",))))
    assert attached.said(m.SetKeys) == []
    assert isinstance(view.error(), SessionFailed)
