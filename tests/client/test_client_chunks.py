"""The client's core alone: chunks, acknowledgements, times, and the end of a session."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire.client_view import CHANGES_MAX
from reelwire.controls import KeyState
from reelwire.errors import SessionClosed, SessionFailed
from reelwire.messages import Artifact, Failure

CONTROL = Artifact({"keys": ["w"]})
Rig = Any  # of conftest.py


def change(rig: Rig, keys: KeyState) -> None:
    rig.feed(e.ChangeKeys(rig.now, "s", keys))


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_streaming_18_chunks_are_taken_in_order_and_once(attached: Rig) -> None:
    """A chunk counts only if it is the next one: what was had before and what leaves a gap is dropped."""
    attached.open()
    for index in (1, 0, 0, 2, 1, 1):
        attached.chunk(index)
    assert [attached.take() for _ in range(3)] == [0, 1, None]
    assert attached.core.dropped == {"chunk out of order": 4}


def test_streaming_18_a_chunk_behind_the_last_is_dropped(attached: Rig) -> None:
    """A session of two chunks has no third."""
    attached.open(chunks=2)
    for index in range(3):
        attached.chunk(index, chunks=2)
    assert [attached.take() for _ in range(3)] == [0, 1, None]


def test_streaming_19_a_chunk_is_acknowledged_when_the_next_one_is_asked_for(attached: Rig) -> None:
    """Taking a chunk says nothing; asking for the next one says that the application is done with those before."""
    attached.open(chunks=2)
    attached.chunk(0, chunks=2)
    assert attached.take() == 0
    assert attached.acked == []
    assert attached.take() is None
    assert attached.take() is None
    assert attached.acked == [1]
    attached.chunk(1, chunks=2)
    assert attached.take() == 1
    assert attached.acked == [1]
    attached.take()
    assert attached.acked == [1, 2]


def test_streaming_12_unread_chunks_are_not_acknowledged(attached: Rig) -> None:
    """What only waits in the client keeps its place at the broker, so a client that stops reading stops its session."""
    attached.open()
    attached.chunk(0)
    attached.chunk(1)
    attached.tick(0.5)
    assert attached.acked == []


def test_streaming_23_chunks_before_a_failure_are_delivered(attached: Rig) -> None:
    """The failure counts only when all chunks below it were taken; nothing is acknowledged after the end."""
    view = attached.open()
    attached.chunk(0)
    attached.chunk(1)
    attached.hear(m.SessionEnded("s", "failed", Failure("stage", "boom", "make", 2)))
    assert [attached.take() for _ in range(3)] == [0, 1, None]
    assert (view.ended, view.error().args) == (True, ("boom",))
    assert attached.acked == []


# --- times -----------------------------------------------------------------------------------------------------------


def test_streaming_29_the_time_from_control_to_frame_starts_when_it_is_sent(attached: Rig) -> None:
    """A control that waits for its grant isn't on its way yet; keys have no such time."""
    attached.open(limit=1)
    attached.call(e.Submit, "s", 0, CONTROL)
    attached.call(e.Submit, "s", 1, CONTROL)
    attached.now += 1.0
    attached.hear(m.SessionChanged("s", "running", 2))
    sent = attached.now
    attached.now += 0.25
    attached.chunk(0)
    attached.chunk(1)
    attached.chunk(2, "held", 1)
    for _ in range(3):
        attached.take()
    assert [delivery.submitted for delivery in attached.delivered] == [sent - 1.0, sent, None]
    assert [delivery.received for delivery in attached.delivered] == [sent + 0.25] * 3


def test_streaming_29_a_refused_control_starts_no_clock(attached: Rig) -> None:
    """Unless it was a repetition of one that was accepted."""
    attached.open()
    for index, code in ((1, "gap"), (0, "duplicate")):
        attached.call(e.Submit, "s", index, CONTROL)
        attached.hear(m.ControlRefused("s", index, code, "no"))
    attached.chunk(0)
    attached.chunk(1)
    attached.take()
    attached.take()
    assert [delivery.submitted for delivery in attached.delivered] == [attached.now, None]


def test_streaming_29_each_key_event_is_timed_to_the_first_chunk_that_applies_it(attached: Rig) -> None:
    """A chunk names the revision it applied: it answers for all events up to that one, and each only once."""
    attached.open()
    change(attached, KeyState(1, ("w",), 1, ("w",)))
    attached.now += 0.1
    change(attached, KeyState(2, ("d", "w"), 2, ("d", "w")))
    attached.now += 0.1
    attached.chunk(0, "tap", 1, 1)
    attached.chunk(1, "tap", 2, 2)
    attached.chunk(2, "held", 2, 2)
    for _ in range(3):
        attached.take()
    assert [delivery.changes for delivery in attached.delivered] == [(100.0,), (100.1,), ()]


def test_streaming_29_a_change_that_no_chunk_will_show_is_not_timed(attached: Rig) -> None:
    """Letting go of everything makes the session wait: the next press must not be charged with that time."""
    attached.open()
    change(attached, KeyState(1, ("w",), 1, ("w",)))
    attached.chunk(0, "tap", 1, 1)
    change(attached, KeyState(2, (), 1, ("w",)))
    attached.now += 50.0
    change(attached, KeyState(3, ("a",), 2, ("a",)))
    attached.now += 0.2
    attached.chunk(1, "tap", 3, 2)
    attached.take()
    attached.take()
    assert [delivery.changes for delivery in attached.delivered] == [(100.0,), (150.0,)]


def test_a_release_that_crosses_its_own_one_shot_is_not_timed_either(attached: Rig) -> None:
    """A press and its release come before the chunk that shows the press; nothing will show the release."""
    attached.open()
    change(attached, KeyState(1, ("w",), 1, ("w",)))
    change(attached, KeyState(2, (), 1, ("w",)))
    attached.chunk(0, "tap", 1, 1)
    attached.now += 50.0
    change(attached, KeyState(3, ("a",), 2, ("a",)))
    attached.chunk(1, "tap", 3, 2)
    assert [attached.take(), attached.take()] == [0, 1]
    assert [delivery.changes for delivery in attached.delivered] == [(100.0,), (150.0,)]


def test_streaming_15_a_release_shows_in_the_chunk_that_stands_still(attached: Rig) -> None:
    """Bound when it began, a chunk that was asked for by a key may find it up: the release is timed to that chunk."""
    attached.open()
    change(attached, KeyState(1, ("w",), 1, ("w",)))
    attached.chunk(0, "tap", 1, 1)
    attached.now += 0.5
    change(attached, KeyState(2, (), 1, ("w",)))
    attached.chunk(1, "still", 2, 1)
    attached.now += 50.0
    change(attached, KeyState(3, ("w",), 2, ("w",)))
    attached.chunk(2, "tap", 3, 2)
    for _ in range(3):
        attached.take()
    assert [delivery.changes for delivery in attached.delivered] == [(100.0,), (100.5,), (150.5,)]


def test_streaming_15_a_pause_before_a_chunk_that_stands_still_is_not_timed(attached: Rig) -> None:
    """Released, and much later pressed and taken back before the chunk began: only the later two are its own."""
    attached.open()
    change(attached, KeyState(1, ("w",), 1, ("w",)))
    attached.chunk(0, "tap", 1, 1)
    change(attached, KeyState(2, (), 1, ("w",)))
    attached.now += 50.0
    change(attached, KeyState(3, ("w",), 2, ("w",)))
    attached.now += 0.1
    change(attached, KeyState(4, (), 2, ()))
    attached.chunk(1, "still", 4, 1)
    attached.take()
    attached.take()
    assert [delivery.changes for delivery in attached.delivered] == [(100.0,), (150.0, 150.1)]


def test_streaming_15_an_early_bound_chunk_does_not_answer_for_a_later_change(attached: Rig) -> None:
    """Two chunks were bound to the key when a second was pressed: the third is the first that shows it."""
    attached.open()
    change(attached, KeyState(1, ("w",), 1, ("w",)))
    attached.now += 0.1
    change(attached, KeyState(2, ("d", "w"), 2, ("d", "w")))
    attached.chunk(0, "tap", 1, 1)
    attached.chunk(1, "held", 1, 1)
    attached.chunk(2, "explicit", 0, 1)
    attached.chunk(3, "tap", 2, 2)
    for _ in range(4):
        attached.take()
    assert [delivery.changes for delivery in attached.delivered] == [(100.0,), (), (), (100.1,)]


def test_unanswered_key_events_are_bounded(attached: Rig) -> None:
    """A session that stands still while keys go up and down keeps the newest events only."""
    view = attached.open()
    for revision in range(1, 2 * CHANGES_MAX):
        change(attached, KeyState(revision, ("w",), revision, ("w",)))
    assert len(view.changes) == CHANGES_MAX


# --- the end ---------------------------------------------------------------------------------------------------------


def test_streaming_22_a_drain_takes_what_comes_without_being_asked(attached: Rig) -> None:
    """From then on chunks are acknowledged as they come, so that the end waits for nobody; they can still be taken."""
    attached.open()
    attached.chunk(0)
    attached.take()
    call = attached.call(e.End, "s", "drain")
    assert attached.said(m.EndSession) == [m.EndSession("s", "drain")]
    attached.chunk(1)
    attached.chunk(2)
    assert attached.acked == [1, 2, 3]
    assert call not in attached.done
    attached.hear(m.SessionEnded("s", "closed"))
    assert attached.done[call].value == "closed"
    assert [attached.take() for _ in range(3)] == [1, 2, None]


def test_streaming_22_a_cancelled_session_delivers_nothing(attached: Rig) -> None:
    """What waits is dropped, and so is what still comes."""
    attached.open()
    attached.chunk(0)
    call = attached.call(e.End, "s", "cancel")
    attached.chunk(1)
    assert attached.take() is None
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert attached.done[call].value == "cancelled"
    assert attached.acked == []
    assert attached.said(m.EndSession) == [m.EndSession("s", "cancel")]


def test_a_drain_can_become_a_cancel_but_not_the_other_way_round(attached: Rig) -> None:
    """The broker is told each once; every call is answered by the end."""
    attached.open()
    calls = [attached.call(e.End, "s", mode) for mode in ("drain", "drain", "cancel", "drain")]
    assert attached.said(m.EndSession) == [m.EndSession("s", "drain"), m.EndSession("s", "cancel")]
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert [attached.done[call].value for call in calls] == ["cancelled"] * 4
    assert attached.done[attached.call(e.End, "s", "drain")].value == "cancelled"


def test_a_complete_session_only_has_its_last_chunks_acknowledged(attached: Rig) -> None:
    """When all chunks are there it ends by itself as completed: no end is asked for."""
    attached.open(chunks=2)
    attached.chunk(0, chunks=2)
    attached.chunk(1, chunks=2)
    call = attached.call(e.End, "s", "drain")
    assert attached.said(m.EndSession) == []
    assert attached.acked == [2]
    attached.hear(m.SessionEnded("s", "completed"))
    assert attached.done[call].value == "completed"


def test_nothing_is_taken_while_a_session_ends(attached: Rig) -> None:
    """Controls that wait for their grant are refused at once, later ones and keys too."""
    attached.open(limit=1)
    parked, sent = attached.call(e.Submit, "s", 2, CONTROL), attached.call(e.Submit, "s", 0, CONTROL)
    attached.call(e.End, "s", "drain")
    attached.error(parked, SessionClosed, "ending")
    attached.hear(m.ControlAccepted("s", 0))
    assert attached.done[sent].value == 0
    attached.error(attached.call(e.Submit, "s", 1, CONTROL), SessionClosed)
    change(attached, KeyState(1, ("w",)))
    assert attached.said(m.SetKeys) == []


def test_a_withdrawn_end_still_happens(attached: Rig) -> None:
    """Whoever stops waiting for the end doesn't take it back."""
    view = attached.open()
    call = attached.call(e.End, "s", "drain")
    attached.feed(e.Withdraw(attached.now, call))
    attached.hear(m.SessionEnded("s", "closed"))
    assert call not in attached.done
    assert view.ended


@pytest.mark.parametrize("ended_first", [True, False])
def test_a_session_that_the_application_dropped_is_cancelled_and_forgotten(attached: Rig, ended_first: bool) -> None:
    """Nothing of it stays, whichever comes first."""
    attached.open()
    attached.chunk(0)
    if ended_first:
        attached.hear(m.SessionEnded("s", "closed"))
    attached.feed(e.Forget(attached.now, "s"))
    assert attached.said(m.EndSession) == ([] if ended_first else [m.EndSession("s", "cancel")])
    if not ended_first:
        attached.hear(m.SessionEnded("s", "cancelled"))
    assert attached.core.sessions == {}


def test_the_first_end_of_a_session_holds(attached: Rig) -> None:
    """What is said about it later is dropped."""
    view = attached.open()
    attached.hear(m.SessionEnded("s", "closed", Failure("timeout", "no control for 300 s")))
    attached.hear(m.SessionEnded("s", "failed", Failure("stage", "boom")))
    assert (view.state, str(view.error())) == ("closed", "no control for 300 s")
    assert type(view.error()) is SessionClosed
    assert attached.core.dropped == {"unknown session": 1}


def test_numbers_are_asked_for_by_call(attached: Rig) -> None:
    """Status and metrics are answered by the number of the call that asked."""
    status, metrics = attached.call(e.Ask, None), attached.call(e.Ask, "s")
    assert attached.sent[-2:] == [m.AskStatus(status), m.AskMetrics(metrics, "s")]
    attached.hear(m.Metrics(metrics, "s", {"chunks": 1}))
    attached.hear(m.Status(status, {"workers": []}))
    assert (attached.done[status].value, attached.done[metrics].value) == ({"workers": []}, {"chunks": 1})


def test_a_failure_is_the_exception_that_fits(attached: Rig) -> None:
    """A session that failed raises SessionFailed with stage and chunk."""
    view = attached.open()
    attached.hear(m.SessionEnded("s", "failed", Failure("worker_lost", "worker 'w' was lost")))
    error = view.error()
    assert isinstance(error, SessionFailed)
    assert (error.stage, error.index) == ("", None)
