"""What a client knows and decides, without sockets, threads or a clock: `ClientCore.handle(event) -> actions`.

The connection goes through these phases; a new hello always goes over a new socket, so that nothing that was meant for
an older attachment can be taken for this one::

    idle --Connect--> greeting --Welcome--> attached --silence, Rejected, Goodbye, OutboxFull--> idle (Reconnect)
                      greeting --no answer for a while--> idle (Reconnect)
    any --Leave--> gone        greeting --another version--> gone

A lost connection fails the sessions that lived on it; later ones are opened over the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal, assert_never

from . import client_events as e
from . import messages as m
from . import versions
from .client_view import RETRY_AFTER_S, SessionView, error_of
from .errors import (
    BrokerUnreachable,
    ControlError,
    OverloadError,
    ReelwireError,
    SessionClosed,
    UsageError,
    VersionMismatch,
)
from .messages import Artifact, Failure

Phase = Literal["idle", "greeting", "attached", "gone"]

HELLO_RETRY_S = 2.0


class ClientCore:
    """The client's side of the protocol.

    Args:
        version: of this package; the broker's must agree in major and minor.
        name: how the client wishes to be called; the broker chooses if it is empty.
        limits: what it accepts, by name, as its hello says it.

    Attributes:
        phase: see the module.
        welcome: the broker's last welcome, while attached.
        sessions: sessions by id; an ended one stays until `Forget`.
        dropped: messages that were dropped, by reason.
    """

    def __init__(self, version: str, name: str = "", limits: Mapping[str, int] | None = None) -> None:
        """Start without a connection."""
        self.phase: Phase = "idle"
        self.welcome: m.Welcome | None = None
        self.sessions: dict[str, SessionView] = {}
        self.dropped: dict[str, int] = {}
        self._version = version
        self._name = name
        self._limits = {} if limits is None else dict(limits)
        self._attachment = 0
        self._opening: dict[str, SessionView] = {}
        self._calls: dict[int, str] = {}  # call -> id of the session it is about, or ""
        self._attaching: list[int] = []
        self._fatal: ReelwireError | None = None
        self._heard = self._said = self._busy_until = 0.0
        self._actions: list[e.Action] = []

    @property
    def wake_at(self) -> float | None:
        """When a `Tick` is due."""
        if self.phase == "greeting":
            return self._said + HELLO_RETRY_S
        if self.phase == "attached":
            assert self.welcome is not None
            return min(self._said + self.welcome.heartbeat_s, self._dead_at())
        return None

    def handle(self, event: e.Event) -> list[e.Action]:
        """Take one event in and say what is to be done about it, in order."""
        self._actions = []
        match event:
            case e.Received():
                self._received(event)
            case e.Tick():
                self._tick(event.now)
            case e.Connect():
                self._connect(event.now)
            case e.Malformed():
                self._malformed(event)
            case e.OutboxFull():
                if self.phase == "attached":
                    self._lose("the broker doesn't read what it is sent")
            case e.Broken():
                self._die(BrokerUnreachable(event.reason))
            case e.Leave():
                self._leave(event.now)
            case e.Withdraw():
                self._withdraw(event)
            case e.Attach() | e.Open() | e.Ask():
                self._call(event)
            case e.Submit() | e.ChangeKeys() | e.Take() | e.End() | e.Forget():
                self._about_session(event)
            case _:
                assert_never(event)
        return self._actions

    def check(self) -> None:
        """Assert what must hold between any two events."""
        for view in (*self.sessions.values(), *self._opening.values()):
            assert 0 <= view.acked <= view.have <= view.chunks
            assert view.taken <= view.have
            assert view.ending == "cancel" or view.taken + len(view.waiting) == view.have
            assert not view.parked or view.takes_controls
            assert all(view.control_limit <= index for index, _, _ in view.parked)
            assert not view.ended or not (view.asked or view.end_calls)
        live = {view.id for view in self.sessions.values() if not view.ended}
        assert not live or self.phase == "attached"
        assert not self._opening or self.phase == "attached"
        assert self.phase != "gone" or not self._calls

    # --- connection ----------------------------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        if self.phase == "idle":
            self.phase = "greeting"
            self._attachment = 0
            self._send(now, m.ClientHello(self._version, self._name, self._limits))

    def _tick(self, now: float) -> None:
        if self.phase == "greeting" and now >= self._said + HELLO_RETRY_S:
            self.phase = "idle"
            self._act(e.Reconnect())
        elif self.phase == "attached":
            assert self.welcome is not None
            if now >= self._dead_at():
                self._lose(f"the broker hasn't been heard of for {now - self._heard:.1f} s")
            elif now >= self._said + self.welcome.heartbeat_s:
                self._send(now, m.Heartbeat())

    def _dead_at(self) -> float:
        assert self.welcome is not None
        return max(self._busy_until, self._heard + self.welcome.missed * self.welcome.heartbeat_s)

    def _received(self, event: e.Received) -> None:
        message, now = event.message, event.now
        fits = event.attachment == self._attachment or (isinstance(message, m.Rejected) and event.attachment == 0)
        if self.phase == "greeting" and isinstance(message, m.Welcome) and event.attachment > 0:
            self._welcome(now, event.attachment, message)
        elif self.phase == "greeting" and isinstance(message, m.Rejected):
            self._hello_rejected(message)
        elif self.phase != "attached" or not fits:
            self._drop("another attachment")
        else:
            self._heard = now
            self._attached(now, message)

    def _welcome(self, now: float, attachment: int, welcome: m.Welcome) -> None:
        if not versions.fit(welcome.version, self._version):
            self._die(VersionMismatch(f"the broker has reelwire {welcome.version}, this client {self._version}"))
            return
        self.phase, self.welcome, self._attachment = "attached", welcome, attachment
        self._heard, self._said, self._busy_until = now, now, 0.0
        for call in self._attaching:
            self._done(call, value=welcome)
        self._attaching.clear()

    def _hello_rejected(self, message: m.Rejected) -> None:
        if message.code == "version":
            self._die(VersionMismatch(message.message))
            return
        for call in self._attaching:
            text = f"the broker rejects this client ({message.code}): {message.message}"
            overload = OverloadError(text, RETRY_AFTER_S)
            self._done(call, error=overload if message.code == "limit" else BrokerUnreachable(text))
        self._attaching.clear()

    def _malformed(self, event: e.Malformed) -> None:
        if event.version and self.phase == "greeting":
            self._die(VersionMismatch(event.reason))
        else:
            self._drop("malformed")

    def _lose(self, reason: str) -> None:
        self.phase, self.welcome = "idle", None
        self._act(e.Reconnect())
        self._end_all(Failure("unreachable", reason), BrokerUnreachable(reason))

    def _die(self, error: ReelwireError) -> None:
        if self.phase == "gone":
            return
        self.phase, self.welcome, self._fatal = "gone", None, error
        self._act(e.Stop())
        self._end_all(Failure("unreachable", str(error)), error)

    def _leave(self, now: float) -> None:
        if self.phase == "gone":
            return
        if self.phase == "attached":
            self._send(now, m.Goodbye("closed"))
        self.phase, self.welcome, self._fatal = "gone", None, UsageError("the client was closed")
        self._act(e.Stop())
        self._end_all(None, self._fatal)

    def _end_all(self, failure: Failure | None, error: ReelwireError) -> None:
        for view in list(self.sessions.values()):
            if not view.ended:
                self._ended(view, "closed" if failure is None else "failed", failure)
        self._opening.clear()
        if self.phase == "gone":
            self._attaching.clear()
        for call in [call for call in self._calls if call not in self._attaching]:
            self._done(call, error=_again(error))
        self._act(e.Changed())

    # --- what the broker says ------------------------------------------------------------------------------------------

    def _attached(self, now: float, message: m.ToClient) -> None:
        match message:
            case m.Heartbeat(busy_for_s=busy_for_s):
                self._busy_until = now + busy_for_s if busy_for_s > 0 else 0.0
            case m.Goodbye(reason=reason):
                self._lose(f"the broker left{': ' if reason else ''}{reason}")
            case m.Rejected(code="unknown_peer"):
                self._lose("the broker was restarted or has given this client up; its sessions are lost")
            case m.Rejected():
                self._lose(f"the broker dropped this client ({message.code}): {message.message}")
            case m.Welcome():  # again, over the same attachment: there are other pipelines now
                self.welcome = message
            case m.SessionOpened():
                self._opened(now, message)
            case m.SessionRefused():
                self._not_opened(message)
            case m.Status():
                self._done(message.request, value=message.state)
            case m.Metrics():
                self._done(message.request, value=message.values)
            case m.SessionChanged() | m.ControlAccepted() | m.ControlRefused() | m.Chunk() | m.SessionEnded():
                view = self.sessions.get(message.session)
                if view is None or view.ended:
                    self._drop("unknown session")
                else:
                    self._session_said(now, view, message)
            case m.ProbeMemory(owner=owner):
                self._send(now, m.MemoryProbed(owner, b""))
            case _:
                assert_never(message)

    def _opened(self, now: float, message: m.SessionOpened) -> None:
        view = self._opening.pop(message.key, None)
        if view is None:
            self._drop("unknown session")
            return
        view.id, view.token = message.session, message.token
        self.sessions[view.id] = view
        if view.open_call not in self._calls:  # nobody waits for it any more
            view.forgotten = True
            self._end(now, view, "cancel")
            return
        self._calls[view.open_call] = view.id
        if not view.wait_ready:
            self._done(view.open_call, value=view.id)

    def _not_opened(self, message: m.SessionRefused) -> None:
        view = self._opening.pop(message.key, None)
        if view is None:
            self._drop("unknown session")
        else:
            self._done(view.open_call, error=error_of(message.failure))

    def _session_said(
        self,
        now: float,
        view: SessionView,
        message: m.SessionChanged | m.ControlAccepted | m.ControlRefused | m.Chunk | m.SessionEnded,
    ) -> None:
        match message:
            case m.SessionChanged():
                view.state = message.state
                view.control_limit = max(view.control_limit, message.control_limit)
                view.failure = message.failure
                if view.ready:
                    self._done(view.open_call, value=view.id)
                self._send_granted(now, view)
                self._act(e.Changed())
            case m.ControlAccepted():
                call = view.answered(message.index) if message.by_index else None
                if call is not None:
                    self._done(call, value=message.index)
            case m.ControlRefused():
                self._control_refused(view, message)
            case m.Chunk():
                self._chunk(now, view, message)
            case m.SessionEnded():
                self._ended(view, message.state, message.failure)
                self._act(e.Changed())
            case _:
                assert_never(message)

    def _control_refused(self, view: SessionView, message: m.ControlRefused) -> None:
        if message.index is None:
            view.slot_refused = message
            return
        call = view.answered(message.index)
        if message.code != "duplicate":
            view.submitted.pop(message.index, None)
        if call is not None:
            self._done(call, error=_control_error(message))

    def _chunk(self, now: float, view: SessionView, chunk: m.Chunk) -> None:
        if chunk.index != view.have or view.have == view.chunks:
            self._drop("chunk out of order")
            return
        view.have += 1
        if view.ending == "cancel":
            view.submitted.pop(chunk.index, None)
            return
        view.waiting.append(e.Delivery(chunk, now, view.submitted.pop(chunk.index, None), view.first_applied(chunk)))
        if view.ending == "drain":
            self._ack(now, view, view.have)
        self._act(e.Changed())

    def _ended(self, view: SessionView, state: str, failure: Failure | None) -> None:
        view.ended, view.state, view.failure = True, state, failure
        for _, call, _ in view.parked:
            self._done(call, error=view.error())
        for calls in view.asked.values():
            for call in calls:
                self._done(call, error=view.error())
        for call in view.end_calls:
            self._done(call, value=state)
        view.parked.clear()
        view.asked.clear()
        view.end_calls.clear()
        if view.open_call in self._calls:
            view.forgotten = True
            self._done(view.open_call, error=view.error())
        if view.forgotten:
            del self.sessions[view.id]

    # --- what the application asks -------------------------------------------------------------------------------------

    def _call(self, event: e.Attach | e.Open | e.Ask) -> None:
        self._calls[event.call] = ""
        if self._fatal is not None:
            self._done(event.call, error=_again(self._fatal))
        elif self.phase != "attached":
            if isinstance(event, e.Attach):
                self._attaching.append(event.call)
            else:
                self._done(event.call, error=BrokerUnreachable("the connection to the broker is lost"))
        elif isinstance(event, e.Attach):
            self._done(event.call, value=self.welcome)
        elif isinstance(event, e.Open):
            self._opening[event.key] = SessionView(event.call, event.key, event.chunks, event.wait_ready)
            self._send(
                event.now, m.OpenSession(event.key, event.pipeline, event.chunks, event.parameters, event.tensors)
            )
        elif event.session is None:
            self._send(event.now, m.AskStatus(event.call))
        else:
            self._send(event.now, m.AskMetrics(event.call, event.session))

    def _about_session(self, event: e.Submit | e.ChangeKeys | e.Take | e.End | e.Forget) -> None:
        view = self.sessions.get(event.session)
        assert view is not None, "the shell names only sessions that were opened and not forgotten"
        match event:
            case e.Submit():
                self._submit(event, view)
            case e.ChangeKeys():
                if not view.ended and view.ending is None:
                    view.note_change(event.keys, event.now)
                    self._send(event.now, m.SetKeys(view.id, event.keys))
            case e.Take():
                self._take(event.now, view)
            case e.End():
                self._calls[event.call] = view.id
                if view.ended:
                    self._done(event.call, value=view.state)
                else:
                    view.end_calls.append(event.call)
                    self._end(event.now, view, event.mode)
            case e.Forget():
                view.forgotten = True
                if view.ended:
                    del self.sessions[view.id]
                else:
                    self._end(event.now, view, "cancel")
            case _:
                assert_never(event)

    def _submit(self, event: e.Submit, view: SessionView) -> None:
        self._calls[event.call] = view.id
        index = event.index
        if not view.takes_controls:
            self._done(event.call, error=view.error())
        elif index is None:
            refused, view.slot_refused = view.slot_refused, None
            self._send(event.now, m.SubmitControl(view.id, None, event.control))
            self._done(event.call, error=None if refused is None else _control_error(refused))
        elif view.control_limit <= index < view.chunks:
            view.parked.append((index, event.call, event.control))
        else:
            self._send_control(event.now, view, index, event.call, event.control)

    def _send_granted(self, now: float, view: SessionView) -> None:
        if not view.takes_controls:  # no grant will come any more
            for _, call, _ in view.parked:
                self._done(call, error=view.error())
            view.parked.clear()
        granted = [entry for entry in view.parked if entry[0] < view.control_limit]
        view.parked = [entry for entry in view.parked if entry[0] >= view.control_limit]
        for index, call, control in sorted(granted, key=lambda entry: entry[0]):
            self._send_control(now, view, index, call, control)

    def _send_control(self, now: float, view: SessionView, index: int, call: int, control: Artifact) -> None:
        view.asked.setdefault(index, deque()).append(call)
        if view.have <= index < view.chunks:
            view.submitted.setdefault(index, now)
        self._send(now, m.SubmitControl(view.id, index, control))

    def _take(self, now: float, view: SessionView) -> None:
        if not view.ended:  # an ended session is acknowledged, or was dropped
            self._ack(now, view, view.taken)
        if not view.waiting:
            return
        view.taken += 1
        self._act(view.waiting.popleft())

    def _ack(self, now: float, view: SessionView, chunks: int) -> None:
        if chunks > view.acked:
            view.acked = chunks
            self._send(now, m.Ack(view.id, chunks))

    def _end(self, now: float, view: SessionView, mode: m.EndMode) -> None:
        if view.ending == "cancel" or view.ending == mode:
            return
        view.ending = mode
        for _, call, _ in view.parked:
            self._done(call, error=view.error())
        view.parked.clear()
        if mode == "cancel":
            view.waiting.clear()
            self._act(e.Changed())
        else:  # the application keeps what comes now, so the broker needn't wait until it was looked at
            self._ack(now, view, view.have)
        if view.have < view.chunks or mode == "cancel":
            self._send(now, m.EndSession(view.id, mode))

    def _withdraw(self, event: e.Withdraw) -> None:
        session = self._calls.pop(event.call, None)
        if event.call in self._attaching:
            self._attaching.remove(event.call)
        view = self.sessions.get(session) if session else None
        if view is None or view.ended:
            return
        view.parked = [entry for entry in view.parked if entry[1] != event.call]
        if event.call in view.end_calls:
            view.end_calls.remove(event.call)
        if event.call == view.open_call:
            view.forgotten = True
            self._end(event.now, view, "cancel")

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _send(self, now: float, message: m.ClientMessage) -> None:
        self._said = now
        self._act(e.Send(self._attachment, message))

    def _done(self, call: int, value: object = None, error: ReelwireError | None = None) -> None:
        if self._calls.pop(call, None) is not None:
            self._act(e.Done(call, value, error))

    def _act(self, action: e.Action) -> None:
        self._actions.append(action)

    def _drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def _control_error(refused: m.ControlRefused) -> ReelwireError:
    if refused.code == "ended":
        return SessionClosed(refused.message)
    return ControlError(refused.code, refused.message, refused.expected)


def _again(error: ReelwireError) -> ReelwireError:
    return type(error)(str(error))
