"""Sessions that are dropped while something still asks about them: garbage is finalized in any order."""

from __future__ import annotations

import gc
import queue
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from reelwire import Client, Control, Session, SessionClosed
from reelwire import client_events as e
from reelwire import messages as m
from reelwire.controls import KeyState
from reelwire.messages import Artifact

StandIn = Any  # of conftest.py
Rig = Any
LIMIT_S = 10.0


def is_forgotten(session: Session) -> bool:
    """Whether the core knows nothing of it any more, within a limit."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        with session._link.lock:
            if session.id not in session._link.core.sessions:
                return True
    return False


def test_a_session_that_was_dropped_and_has_ended_still_answers(attached: Rig) -> None:
    """Its end is known, controls are refused, and the rest changes nothing; nothing is sent."""
    attached.open()
    attached.feed(e.Forget(attached.now, "s"))
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert "s" not in attached.core.sessions
    sent = len(attached.sent)
    assert attached.done[attached.call(e.End, "s", "drain")].value == "cancelled"
    attached.error(attached.call(e.Submit, "s", 0, Artifact()), SessionClosed, "dropped")
    attached.feed(e.ChangeKeys(attached.now, "s", KeyState()))
    attached.feed(e.Forget(attached.now, "s"))
    assert attached.take() is None
    assert len(attached.sent) == sent


def test_a_session_that_is_dropped_and_has_not_ended_still_answers(attached: Rig) -> None:
    """It is being cancelled: who asks for its end waits for that."""
    attached.open()
    attached.feed(e.Forget(attached.now, "s"))
    call = attached.call(e.End, "s", "drain")
    attached.error(attached.call(e.Submit, "s", 0, Artifact()), SessionClosed, "ending")
    assert call not in attached.done
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert attached.done[call].value == "cancelled"
    assert "s" not in attached.core.sessions


def test_streaming_32_what_is_collected_with_its_session_may_ask_it(stand_in: StandIn) -> None:
    """An object in a cycle that uses its session when it is finalized comes after the session's own finalizer."""
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()

    class Player:
        def __init__(self, session: Session) -> None:
            self.session, self.itself = session, self

        def __del__(self) -> None:
            try:
                outcomes.put(is_forgotten(self.session))
                with pytest.raises(SessionClosed):
                    self.session.submit(0, Control(keys=()), timeout=LIMIT_S)
                with pytest.raises(SessionClosed):
                    self.session.press("w")
                outcomes.put(self.session.next_chunk(LIMIT_S))
                outcomes.put(self.session.close(timeout=LIMIT_S))  # type: ignore[func-returns-value]
            except BaseException as error:  # noqa: BLE001  # nobody else hears of it
                outcomes.put(error)

    with Client(stand_in.endpoint) as client:
        Player(client.open_session("toy", chunks=3))
        gc.collect()
        assert [outcomes.get(timeout=LIMIT_S) for _ in range(3)] == [True, None, None]


def test_streaming_32_a_stream_that_is_collected_is_closed(stand_in: StandIn) -> None:
    """A generator that holds its session, and is part of a cycle, leaves its block when the session is gone already."""
    seen: queue.SimpleQueue[object] = queue.SimpleQueue()

    class Stream:
        def __init__(self, client: Client) -> None:
            self.chunks = self.play(client)
            next(self.chunks)

        def play(self, client: Client) -> Iterator[None]:
            with client.open_session("toy", chunks=3) as session:
                try:
                    yield  # holds itself by its frame
                finally:
                    seen.put(is_forgotten(session))

    with Client(stand_in.endpoint) as client:
        Stream(client)
        gc.collect()
        assert seen.get(timeout=LIMIT_S) is True


def test_a_dropped_session_takes_no_other_of_its_name_with_it(stand_in: StandIn) -> None:
    """A broker that was started again may use a name twice: only the session that was dropped is forgotten."""
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=3)
        link, old = client._link, session._view
        with link.lock:
            link.core.handle(e.Forget(0.0, "s"))
        stand_in.say(m.SessionEnded("s", "cancelled"))
        assert is_forgotten(session)
        stand_in.opened = 0
        again = client.open_session("toy", chunks=3)
        assert again.id == session.id
        gone = weakref.ref(session)
        del session
        gc.collect()
        assert gone() is None
        assert client.status() == {"workers": 0}  # the thread has turned since
        with link.lock:
            assert old is not link.core.sessions["s"]
        again.close(timeout=LIMIT_S)
        assert again.state == "closed"
