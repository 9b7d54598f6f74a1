"""What a client knows and decides, without sockets, threads or a clock: `ClientCore.handle(event) -> actions`.

The connection goes through these phases; a new hello always goes over a new socket, so that nothing that was meant for
an older attachment can be taken for this one::

    idle --Connect--> greeting --Welcome--> attached --silence, Rejected, Goodbye, OutboxFull--> idle (Reconnect)
                      greeting --no answer for a while--> idle (Reconnect)
    any --Leave--> gone        greeting --another version--> gone

A lost connection fails the sessions that lived on it; later ones are opened over the next one. What is said about
sessions is the affair of `client_streams`, what is said about jobs that of `client_jobs`: what is under way there goes on
over the next connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, assert_never

from . import client_events as e
from . import messages as m
from . import versions
from .client_desk import Desk
from .client_jobs import Jobs
from .client_streams import Streams
from .client_view import RETRY_AFTER_S, SessionView
from .errors import BrokerUnreachable, OverloadError, ReelwireError, UsageError, VersionMismatch
from .messages import Credit, Failure

Phase = Literal["idle", "greeting", "attached", "gone"]

HELLO_RETRY_S = 2.0
HEARTBEAT_SESSIONS_MAX = 1000
"""Sessions that one heartbeat speaks of, so that its header stays small; for more there are several."""


class ClientCore:
    """The client's side of the protocol.

    Args:
        version: of this package; the broker's must agree in major and minor.
        name: how the client wishes to be called; the broker chooses if it is empty.
        limits: what it accepts, by name, as its hello says it.
        window: how much of a session may be on its way and not taken yet, in chunks and in bytes.

    Attributes:
        phase: see the module.
        welcome: the broker's last welcome, while attached.
        jobs: what is under way about jobs.
    """

    def __init__(
        self, version: str, name: str = "", limits: Mapping[str, int] | None = None, window: Credit | None = None
    ) -> None:
        """Start without a connection."""
        self.phase: Phase = "idle"
        self.welcome: m.Welcome | None = None
        self._version = version
        self._name = name
        self._limits = {} if limits is None else dict(limits)
        self._desk = Desk()
        self._streams = Streams(self._desk, Credit() if window is None else window)
        self.jobs = Jobs(self._desk)
        self._attaching: list[int] = []
        self._fatal: ReelwireError | None = None
        self._greeted = self._heard = self._beaten = self._busy_until = 0.0

    @property
    def sessions(self) -> Mapping[str, SessionView]:
        """Sessions by id; an ended one stays until `Forget`."""
        return self._streams.views

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages that were dropped, by reason."""
        return self._desk.dropped

    @property
    def wake_at(self) -> float | None:
        """When a `Tick` is due."""
        if self.phase == "greeting":
            return self._greeted + HELLO_RETRY_S
        if self.phase == "attached":
            assert self.welcome is not None
            return min(self._beaten + self.welcome.heartbeat_s, self._dead_at())
        return None

    def handle(self, event: e.Event) -> list[e.Action]:
        """Take one event in and say what is to be done about it, in order."""
        match event:
            case e.Received():
                self._received(event)
            case e.Submit() | e.ChangeKeys() | e.Take() | e.End() | e.Forget():
                self._streams.asked(event)
            case e.Tick():
                self._tick(event.now)
            case e.Connect():
                self._connect(event.now)
            case e.Malformed():
                self._malformed(event)
            case e.Unreadable():
                if self.phase == "attached" and event.attachment == self._desk.attachment:
                    self._heard = event.now
                    self._streams.unreadable(event.chunk, event.failure)
                else:
                    self._desk.drop("another attachment")
            case e.OutboxFull():
                if self.phase == "attached":
                    self._lose("the broker doesn't read what it is sent")
            case e.Broken():
                self._die(BrokerUnreachable(event.reason))
            case e.Leave():
                self._leave()
            case e.Withdraw():
                self._withdraw(event.call)
            case e.Attach() | e.Open() | e.Ask() | e.AskJob():
                self._call(event)
            case e.SupplyPart() | e.TakePart():
                self.jobs.asked(event)
            case e.SubmitJob() | e.WatchJob() | e.FetchResult():
                self._job_call(event)
            case _:
                assert_never(event)
        return self._desk.finish()

    def check(self) -> None:
        """Assert what must hold between any two events."""
        self._streams.check()
        self.jobs.check()
        assert not self._streams.any_live or self.phase == "attached"
        assert self.phase != "gone" or not self._desk.calls

    # --- connection ----------------------------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        if self.phase == "idle":
            self.phase = "greeting"
            self._desk.attachment, self._greeted = 0, now
            self._desk.send(m.ClientHello(self._version, self._name, self._limits))

    def _tick(self, now: float) -> None:
        if self.phase == "greeting" and now >= self._greeted + HELLO_RETRY_S:
            self.phase = "idle"
            self._desk.act(e.Reconnect())
        elif self.phase == "attached":
            assert self.welcome is not None
            if now >= self._dead_at():
                self._lose(f"the broker hasn't been heard of for {now - self._heard:.1f} s")
            elif now >= self._beaten + self.welcome.heartbeat_s:
                self._beaten = now
                self._beat()

    def _beat(self) -> None:
        acks = self._streams.acks()
        for start in range(0, max(1, len(acks)), HEARTBEAT_SESSIONS_MAX):
            self._desk.send(m.Heartbeat(acks=tuple(acks[start : start + HEARTBEAT_SESSIONS_MAX])))

    def _dead_at(self) -> float:
        assert self.welcome is not None
        return max(self._busy_until, self._heard + self.welcome.missed * self.welcome.heartbeat_s)

    def _received(self, event: e.Received) -> None:
        message, now = event.message, event.now
        ours = event.attachment == self._desk.attachment
        if self.phase == "attached" and (ours or (event.attachment == 0 and isinstance(message, m.Rejected))):
            self._heard = now
            self._attached(now, message)
        elif self.phase == "greeting" and isinstance(message, m.Welcome) and event.attachment > 0:
            self._welcome(now, event.attachment, message)
        elif self.phase == "greeting" and isinstance(message, m.Rejected):
            self._hello_rejected(message)
        else:
            self._desk.drop("another attachment")

    def _welcome(self, now: float, attachment: int, welcome: m.Welcome) -> None:
        if not versions.fit(welcome.version, self._version):
            self._die(VersionMismatch(f"the broker has reelwire {welcome.version}, this client {self._version}"))
            return
        self.phase, self.welcome, self._desk.attachment = "attached", welcome, attachment
        self._heard, self._beaten, self._busy_until = now, now, 0.0
        for call in self._attaching:
            self._desk.done(call, value=welcome)
        self._attaching.clear()
        self.jobs.attached(spec.name for spec in welcome.jobs)
        self._desk.act(e.Changed())

    def _hello_rejected(self, message: m.Rejected) -> None:
        if message.code == "version":
            self._die(VersionMismatch(message.message))
            return
        for call in self._attaching:
            text = f"the broker rejects this client ({message.code}): {message.message}"
            overload = OverloadError(text, RETRY_AFTER_S)
            self._desk.done(call, error=overload if message.code == "limit" else BrokerUnreachable(text))
        self._attaching.clear()

    def _malformed(self, event: e.Malformed) -> None:
        if event.version and self.phase == "greeting":
            self._die(VersionMismatch(event.reason))
        else:
            self._desk.drop("malformed")

    def _lose(self, reason: str) -> None:
        self.phase, self.welcome = "idle", None
        self._desk.act(e.Reconnect())
        self._end_all(Failure("unreachable", reason), BrokerUnreachable(reason))

    def _die(self, error: ReelwireError) -> None:
        if self.phase == "gone":
            return
        self.phase, self.welcome, self._fatal = "gone", None, error
        self._desk.act(e.Stop())
        self._end_all(Failure("unreachable", str(error)), error)

    def _leave(self) -> None:
        if self.phase == "gone":
            return
        if self.phase == "attached":
            self._desk.send(m.Goodbye("closed"))
        self.phase, self.welcome, self._fatal = "gone", None, UsageError("the client was closed")
        self._desk.act(e.Stop())
        self._end_all(None, self._fatal)

    def _end_all(self, failure: Failure | None, error: ReelwireError) -> None:
        self._streams.end_all(failure)
        if self.phase == "gone":
            self._attaching.clear()
            self.jobs.end_all()
        else:
            self.jobs.lost()
        for call in [call for call in self._desk.calls if call not in self._attaching and not self.jobs.outlives(call)]:
            self._desk.done(call, error=_again(error))
        self._desk.act(e.Changed())

    # --- what the broker says ------------------------------------------------------------------------------------------

    def _attached(self, now: float, message: m.ToClient) -> None:
        match message:
            case m.Chunk() | m.SessionChanged() | m.ControlAccepted() | m.ControlRefused() | m.SessionEnded():
                self._streams.said(now, message)
            case m.Heartbeat(busy_for_s=busy_for_s, grants=grants):
                self._busy_until = now + busy_for_s if busy_for_s > 0 else 0.0
                self._streams.granted(now, grants)
            case m.Goodbye(reason=reason):
                self._lose(f"the broker left{': ' if reason else ''}{reason}")
            case m.Rejected(code="unknown_peer"):
                self._lose("the broker was restarted or has given this client up; its sessions are lost")
            case m.Rejected():
                self._lose(f"the broker dropped this client ({message.code}): {message.message}")
            case m.Welcome():  # again, over the same attachment: there are other pipelines now
                self.welcome = message
                self.jobs.welcomed(spec.name for spec in message.jobs)
                self._desk.act(e.Changed())
            case m.SessionOpened():
                self._streams.opened(message)
            case m.SessionRefused():
                self._streams.refused(message)
            case m.Status():
                self._desk.done(message.request, value=message.state)
            case m.Metrics():
                self._desk.done(message.request, value=message.values)
            case m.ProbeMemory(owner=owner):
                self._desk.act(e.AnswerProbe(self._desk.attachment, owner))
            case (
                m.UploadGrant() | m.UploadStored() | m.UploadRefused() | m.JobAccepted() | m.JobRefused() | m.Jobs()
                | m.JobChanged() | m.ResultPart()
            ):  # fmt: skip
                self.jobs.said(message)
            case _:
                assert_never(message)

    # --- what the application asks -------------------------------------------------------------------------------------

    def _call(self, event: e.Attach | e.Open | e.Ask | e.AskJob) -> None:
        self._desk.calls[event.call] = ""
        if self._fatal is not None:
            self._desk.done(event.call, error=_again(self._fatal))
        elif self.phase != "attached":
            if isinstance(event, e.Attach):
                self._attaching.append(event.call)
            else:
                self._desk.done(event.call, error=BrokerUnreachable("the connection to the broker is lost"))
        elif isinstance(event, e.Attach):
            self._desk.done(event.call, value=self.welcome)
        elif isinstance(event, e.Open):
            self._streams.open(event)
        elif isinstance(event, e.AskJob):
            self._desk.send(_question(event))
        elif event.session is None:
            self._desk.send(m.AskStatus(event.call))
        else:
            self._desk.send(m.AskMetrics(event.call, event.session))

    def _job_call(self, event: e.JobCall) -> None:
        self._desk.calls[event.call] = ""
        if self._fatal is None:
            self.jobs.asked(event)
        else:
            self._desk.done(event.call, error=_again(self._fatal))

    def _withdraw(self, call: int) -> None:
        session = self._desk.calls.pop(call, None)
        if call in self._attaching:
            self._attaching.remove(call)
        self.jobs.withdraw(call)
        if session is None:
            self._streams.untaken(call)
        else:
            self._streams.withdraw(call, session)


def _question(event: e.AskJob) -> m.AskJobs | m.CancelJob | m.DeleteJob:
    match event.what:
        case "status":
            return m.AskJobs(event.call, event.job)
        case "cancel":
            return m.CancelJob(event.call, event.job)
        case "delete":
            return m.DeleteJob(event.call, event.job)
        case _:
            assert_never(event.what)


def _again(error: ReelwireError) -> ReelwireError:
    return type(error)(str(error))
