"""The sessions of a client: what the broker says about them, and what the application asks of them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import assert_never

from . import client_events as e
from . import messages as m
from .client_desk import Desk
from .client_view import SessionView, error_of
from .errors import ControlError, ReelwireError, SessionClosed, WireError
from .messages import Artifact, Credit, Failure

SessionMessage = m.SessionChanged | m.ControlAccepted | m.ControlRefused | m.Chunk | m.SessionEnded


class Streams:
    """All sessions over one connection; an ended one stays until it is forgotten.

    Args:
        desk: takes actions and answers.
        window: how much of a session may be on its way and not taken yet, in chunks and in bytes.

    Attributes:
        views: sessions by the broker's name for them.
        opening: those that were asked for and don't exist yet, by key.
    """

    def __init__(self, desk: Desk, window: Credit) -> None:
        """Start without any."""
        self.views: dict[str, SessionView] = {}
        self.opening: dict[str, SessionView] = {}
        self._desk = desk
        self._window = window

    def acks(self) -> list[m.Ack]:
        """Where each session that lives stands, for heartbeats: an acknowledgement or its credit may have been lost."""
        return [self._ack_of(view) for view in self.views.values() if not view.ended]

    def granted(self, now: float, grants: Iterable[m.ControlGrant]) -> None:
        """How far controls may go, repeated by a heartbeat; the larger grant holds, whichever came last."""
        for grant in grants:
            view = self.views.get(grant.session)
            if view is not None and not view.ended:
                self._granted(now, view, grant.control_limit)

    def end_all(self, failure: Failure | None) -> None:
        """The connection is gone: by a failure, or because the application closed the client."""
        for view in list(self.views.values()):
            if not view.ended:
                self._ended(view, "closed" if failure is None else "failed", failure)
        self.opening.clear()

    def check(self) -> None:
        """Assert what must hold between any two events."""
        for view in (*self.views.values(), *self.opening.values()):
            assert 0 <= view.acked <= view.have <= view.chunks
            assert view.taken <= view.have
            assert view.ending == "cancel" or view.taken + len(view.waiting) == view.have
            assert view.ending == "cancel" or view.acked + len(view.unacked) == view.have
            assert not view.parked or view.takes_controls
            assert all(view.control_limit <= index for index, _, _ in view.parked)
            assert not view.ended or not (view.asked or view.end_calls)

    @property
    def any_live(self) -> bool:
        """Whether the broker has, or will have, one that hasn't ended."""
        return bool(self.opening) or any(not view.ended for view in self.views.values())

    # --- what the broker says ------------------------------------------------------------------------------------------

    def opened(self, message: m.SessionOpened) -> None:
        """A session exists."""
        view = self.opening.pop(message.key, None)
        if view is None:
            self._desk.drop("unknown session")
            return
        if message.session in self.views:
            error = WireError(f"the broker called a new session {message.session!r}, which another one is called")
            self._desk.done(view.open_call, error=error)
            return
        view.id, view.token = message.session, message.token
        self.views[view.id] = view
        if view.open_call not in self._desk.calls:  # nobody waits for it any more
            view.forgotten = True
            self._end(view, "cancel")
            return
        self._desk.calls[view.open_call] = view.id
        if not view.wait_ready:
            self._desk.done(view.open_call, value=view.id)

    def refused(self, message: m.SessionRefused) -> None:
        """A session can't be."""
        view = self.opening.pop(message.key, None)
        if view is None:
            self._desk.drop("unknown session")
        else:
            self._desk.done(view.open_call, error=error_of(message.failure))

    def said(self, now: float, message: SessionMessage) -> None:
        """Anything else about a session."""
        view = self.views.get(message.session)
        if view is None or view.ended:
            self._desk.drop("unknown session")
            return
        match message:
            case m.Chunk():
                self._chunk(now, view, message)
            case m.SessionChanged():
                view.state, view.failure = message.state, message.failure
                if view.ready:
                    self._desk.done(view.open_call, value=view.id)
                self._granted(now, view, message.control_limit)
                self._desk.act(e.Changed(view.id))
            case m.ControlAccepted():
                call = view.answered(message.index) if message.by_index else None
                if call is not None:
                    self._desk.done(call, value=message.index)
            case m.ControlRefused():
                self._control_refused(view, message)
            case m.SessionEnded():
                self._ended(view, message.state, message.failure)
                self._desk.act(e.Changed(view.id))
            case _:
                assert_never(message)

    def unreadable(self, chunk: m.Chunk, failure: Failure) -> None:
        """A chunk came whose bytes can't be had: its session can't go on, and the broker needn't keep it."""
        view = self.views.get(chunk.session)
        if view is None or view.ended:
            self._desk.drop("unknown session")
        elif chunk.index != view.have or view.have == view.chunks:
            self._desk.drop("chunk out of order")
        elif view.ending == "cancel":  # the broker may have given them back already
            view.have += 1
        else:
            self._desk.send(m.EndSession(view.id, "cancel"))
            self._ended(view, "failed", failure)
            self._desk.act(e.Changed(view.id))

    def _control_refused(self, view: SessionView, message: m.ControlRefused) -> None:
        if message.index is None:
            view.slot_refused = message
            return
        call = view.answered(message.index)
        if message.code != "duplicate":
            view.submitted.pop(message.index, None)
        if call is not None:
            self._desk.done(call, error=_control_error(message))

    def _chunk(self, now: float, view: SessionView, chunk: m.Chunk) -> None:
        if chunk.index != view.have or view.have == view.chunks:
            self._desk.drop("chunk out of order")
            return
        view.have += 1
        if view.ending == "cancel":
            view.submitted.pop(chunk.index, None)
            return
        nbytes = 0
        for artifact in chunk.outputs.values():
            for tensor in artifact.tensors.values():
                nbytes += tensor.nbytes
        view.unacked.append(nbytes)
        view.waiting.append(e.Delivery(chunk, now, view.submitted.pop(chunk.index, None), view.first_applied(chunk)))
        if view.ending == "drain":
            self._ack(view, view.have)
        self._desk.act(e.Changed(view.id))
        if chunk.control_limit > view.control_limit:
            self._granted(now, view, chunk.control_limit)

    def _ended(self, view: SessionView, state: str, failure: Failure | None) -> None:
        view.ended, view.state, view.failure = True, state, failure
        for _, call, _ in view.parked:
            self._desk.done(call, error=view.error())
        for calls in view.asked.values():
            for call in calls:
                self._desk.done(call, error=view.error())
        for call in view.end_calls:
            self._desk.done(call, value=state)
        view.parked.clear()
        view.asked.clear()
        view.end_calls.clear()
        if view.open_call in self._desk.calls:
            view.forgotten = True
            self._desk.done(view.open_call, error=view.error())
        if view.forgotten:
            del self.views[view.id]

    # --- what the application asks -------------------------------------------------------------------------------------

    def open(self, event: e.Open) -> None:
        """Ask the broker for a session."""
        self.opening[event.key] = SessionView(event.call, event.key, event.chunks, event.wait_ready)
        asked = (event.key, event.pipeline, event.chunks, event.parameters, event.tensors)
        self._desk.send(m.OpenSession(*asked, event.control_binding, event.pace, self._window))

    def asked(self, event: e.Submit | e.ChangeKeys | e.Take | e.End | e.Forget) -> None:
        """The application asks something of a session that it holds."""
        view = self.views.get(event.session)
        if view is None:
            self._asked_too_late(event)
            return
        match event:
            case e.Submit():
                self._submit(event, view)
            case e.ChangeKeys():
                if not view.ended and view.ending is None:
                    view.note_change(event.keys, event.now)
                    self._desk.send(m.SetKeys(view.id, event.keys))
            case e.Take():
                self._take(view)
            case e.End():
                self._desk.calls[event.call] = view.id
                if view.ended:
                    self._desk.done(event.call, value=view.state)
                else:
                    view.end_calls.append(event.call)
                    self._end(view, event.mode)
            case e.Forget():
                self._forget(view)
            case _:
                assert_never(event)

    def _asked_too_late(self, event: e.Submit | e.ChangeKeys | e.Take | e.End | e.Forget) -> None:
        """Answer for a session that was dropped and has ended since.

        Garbage that refers to itself is finalized in any order: a generator that streams, say, or an object that closes
        its session with itself, may still ask when the session's own finalizer has spoken.
        """
        if isinstance(event, e.Submit | e.End):
            self._desk.calls[event.call] = event.session
            if isinstance(event, e.End):
                self._desk.done(event.call, value="cancelled")
            else:
                self._desk.done(event.call, error=SessionClosed("the session was dropped"))

    def untaken(self, call: int) -> None:
        """The call had its answer, and nobody took it: a session that it opened is nobody's."""
        for view in self.views.values():
            if view.open_call == call:
                self._forget(view)
                return

    def withdraw(self, call: int, session: str) -> None:
        """Nobody waits any more for what was asked of a session."""
        view = self.views.get(session)
        if view is None or view.ended:
            return
        view.parked = [entry for entry in view.parked if entry[1] != call]
        if call in view.end_calls:
            view.end_calls.remove(call)
        if call == view.open_call:
            self._forget(view)

    def _forget(self, view: SessionView) -> None:
        view.forgotten = True
        if view.ended:
            del self.views[view.id]
        else:
            self._end(view, "cancel")

    def _submit(self, event: e.Submit, view: SessionView) -> None:
        self._desk.calls[event.call] = view.id
        index = event.index
        if not view.takes_controls:
            self._desk.done(event.call, error=view.error())
        elif index is None:
            refused, view.slot_refused = view.slot_refused, None
            self._desk.send(m.SubmitControl(view.id, None, event.control))
            self._desk.done(event.call, error=None if refused is None else _control_error(refused))
        elif view.control_limit <= index < view.chunks:
            view.parked.append((index, event.call, event.control))
        else:
            self._send_control(event.now, view, index, event.call, event.control)

    def _granted(self, now: float, view: SessionView, control_limit: int) -> None:
        view.control_limit = max(view.control_limit, control_limit)
        if not view.parked:
            return
        if not view.takes_controls:  # no grant will come any more
            for _, call, _ in view.parked:
                self._desk.done(call, error=view.error())
            view.parked.clear()
        granted = [entry for entry in view.parked if entry[0] < view.control_limit]
        view.parked = [entry for entry in view.parked if entry[0] >= view.control_limit]
        for index, call, control in sorted(granted, key=lambda entry: entry[0]):
            self._send_control(now, view, index, call, control)

    def _send_control(self, now: float, view: SessionView, index: int, call: int, control: Artifact) -> None:
        view.asked.setdefault(index, deque()).append(call)
        if view.have <= index < view.chunks:
            view.submitted.setdefault(index, now)
        self._desk.send(m.SubmitControl(view.id, index, control))

    def _take(self, view: SessionView) -> None:
        if not view.ended:  # an ended session is acknowledged, or was dropped
            self._ack(view, view.taken)
        if not view.waiting:
            return
        view.taken += 1
        self._desk.act(view.waiting.popleft())

    def _ack(self, view: SessionView, chunks: int) -> None:
        if chunks > view.acked:
            view.acknowledge(chunks)
            self._desk.send(self._ack_of(view))

    def _ack_of(self, view: SessionView) -> m.Ack:
        credit = Credit(view.acked + self._window.chunks, view.acked_bytes + self._window.nbytes)
        return m.Ack(view.id, view.acked, credit)

    def _end(self, view: SessionView, mode: m.EndMode) -> None:
        if view.ending == "cancel" or view.ending == mode:
            return
        view.ending = mode
        for _, call, _ in view.parked:
            self._desk.done(call, error=view.error())
        view.parked.clear()
        if mode == "cancel":
            view.waiting.clear()
            self._desk.act(e.Changed(view.id))
        else:  # the application keeps what comes now, so the broker needn't wait until it was looked at
            self._ack(view, view.have)
        if view.have < view.chunks or mode == "cancel":
            self._desk.send(m.EndSession(view.id, mode))


def _control_error(refused: m.ControlRefused) -> ReelwireError:
    if refused.code == "ended":
        return SessionClosed(refused.message)
    return ControlError(refused.code, refused.message, refused.expected)
