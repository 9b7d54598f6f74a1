"""The broker as one pure state machine: `BrokerCore.handle(event) -> list[Action]`, or `take` for all but a turn's last.

No socket, no clock, no thread, no randomness: time and entropy come in with the events of `events`, what is to be done
goes out as the actions of `actions`. What a peer sends never raises; `assert` stands for our own errors only. The cost
of an event doesn't grow with the number of sessions, `status` and `check` aside.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from reelwire import messages as m
from reelwire.messages import Failure
from reelwire.spec import Plain, check_registrable

from . import report
from . import transitions as t
from .actions import Action, Stop
from .actors import Actor
from .attaching import Attaching
from .config import BrokerConfig
from .desk import TimerKey, shortened
from .events import Event, Malformed, OutboxFull, Received, ShutdownRequested, TurnEnded, Unreachable
from .peers import KINDS, Kind, Peer
from .placement import AdmitSpec
from .requests import refusal
from .session import Session

_HELLOS = (m.ClientHello, m.WorkerHello)
ENDED_KEPT_MAX = 256
"""Ended sessions whose numbers can still be asked for."""


class BrokerCore(Attaching):
    """Everything that a broker knows and decides.

    Args:
        config: settings.
        version: of reelwire; peers must have the same major and minor one.
        admit_spec: raises SpecError for a dataflow that the broker doesn't serve.

    Attributes:
        sessions: live sessions by id.
    """

    def __init__(self, config: BrokerConfig, version: str, admit_spec: AdmitSpec = check_registrable) -> None:
        """Start with nobody attached."""
        super().__init__(config, version, admit_spec)
        self._ended: OrderedDict[str, tuple[int, dict[str, Plain]]] = OrderedDict()
        self._opened = 0
        self._draining = False
        self._stopped = False
        self._unread_since: float | None = None
        self._hears = self._heard()
        self.sessions: dict[str, Session] = {}

    @property
    def wake_at(self) -> float | None:
        """When a TurnEnded is due although nothing arrived, in seconds; None when there is no such time."""
        if self._stopped:
            return None
        desk = self._desk
        if self._mute:
            return desk.now
        times = (desk.timers.next_at, desk.silences.next_at, self._beats.next_at, self._silences.next_at)
        return min((at for at in times if at is not None), default=None)

    def handle(self, event: Event) -> list[Action]:
        """Take one event in; what is to be done, in order, now and for those that were only taken before."""
        self.take(event)
        self._settle()
        return self._desk.finish()

    def take(self, event: Event) -> None:
        """Take one event in, and leave it to the next `handle` to find out which tasks can be sent.

        For all that a turn brings at once that takes much less time than each time anew.
        """
        if self._stopped:
            return
        self._desk.begin(event.now)
        match event:
            case Received():  # nearly all of them
                self._received(event)
            case Malformed():
                self._malformed(event)
            case Unreachable():
                self._unsendable(event.route, "unreachable")
            case OutboxFull():
                self._unsendable(event.route, "outbox_full")
            case TurnEnded():
                self._turn_ended(drained=event.drained)
            case ShutdownRequested():
                self._shut_down()
            case _:
                assert_never(event)
        self._put_right()

    def settle(self) -> list[Action]:
        """Find out which tasks can be sent, and whose keys follow a reservation; what is to be done for that alone.

        It may leave before the end of the turn is handled, which takes longer.
        """
        if not self._stopped:
            self._tell_keys()
            self._settle()
        return self._desk.finish()

    def status(self) -> dict[str, Plain]:
        """Everything there is, as plain data."""
        return report.status(
            self._desk, self._peers, self._placement, self.sessions, self._version, draining=self._draining
        )

    def check(self) -> None:
        """Assert every invariant; takes time in proportion to what there is."""
        desk = self._desk
        for left in (desk.unsettled, desk.stirred, desk.ended, desk.lost, desk.freed, desk.returned, desk.unfit):
            assert not left, "work was left undone"
        self._check_attached()
        self._placement.check()
        desk.memory.check([session.leases for session in self.sessions.values()], self._peers.workers.values())
        assert len(self.sessions) <= self._config.sessions_max, "too many sessions"
        assert len(self._ended) <= ENDED_KEPT_MAX, "too many ended sessions"
        assert set(desk.touched) | set(desk.rekeyed) <= set(self.sessions), "an ended session is to be looked at"
        assert {name for _, name in desk.timers.all() if name} <= set(self.sessions), "a stranger's timer"
        waiting = {name for served in self._placement.served.values() for name in served.waiting}
        kept = sum(session.request_bytes for session in self.sessions.values())
        assert desk.request_bytes == kept, "bytes of requests don't add up"
        for name, session in self.sessions.items():
            session.check()
            assert session.id == name, "a session under another id"
            assert (session.state == "opening") == (name in waiting), f"{name}: {session.state}, and waiting or not"
            assert session.owner is None or session.owner.sessions.get(name) is session, f"{name}: a stranger owns it"
        held = {(id(actor), name) for actor in self._actors() for name in actor.tenants}
        seats = [seat for s in self.sessions.values() if s.seats is not None for seat in s.seats.seats.values()]
        taken = {
            (id(seat.actor), s.id)
            for s in self.sessions.values()
            if s.seats is not None
            for seat in s.seats.seats.values()
            if seat.state != "gone"
        }
        assert held == taken, "sessions and actors disagree about who lives where"
        errands = sum(actor.errands.total() for actor in self._actors())
        assert errands == sum(len(seat.errands) for seat in seats), "errands"
        desk.check(self._actors())
        for peer in self._peers.by_route.values():
            assert set(peer.sessions) <= set(self.sessions), f"{peer.name} has a session that isn't there"

    # --- what arrives -------------------------------------------------------------------------------------------------

    def _received(self, event: Received) -> None:
        message = event.message
        if isinstance(message, _HELLOS):
            self._hello(event.route, message)
            return
        peer = self._peers.by_route.get(event.route)
        if peer is None or peer.attachment != event.attachment:
            self._desk.count("unknown_peer", message=type(message).__name__)
            if self._told.add(event.route):
                self._desk.answer(event.route, m.Rejected("unknown_peer", "say hello first"))
            return
        peer.heard_at = self._desk.now
        hear = self._hears.get((peer.kind, type(message)))
        if hear is None:
            self._expel(peer, "malformed", f"a {peer.kind} doesn't send {type(message).__name__}")
        else:
            hear(peer, event)

    def _heard(self) -> dict[tuple[Kind, type], Callable[[Peer, Received], None]]:
        """Who may say what, and where it is heard; hellos aside."""
        return {
            ("worker", m.TaskDone): self._task_done,
            ("worker", m.TaskStarted): self._stage_says,
            ("worker", m.StageInitialized): self._stage_initialized,
            ("worker", m.StageReleased): self._stage_says,
            ("worker", m.StageFailed): self._stage_failed,
            ("worker", m.StageReady): self._stage_ready,
            ("worker", m.Draining): self._worker_drains,
            ("client", m.Ack): self._client_says,
            ("client", m.SetKeys): self._client_steers,
            ("client", m.SubmitControl): self._client_steers,
            ("client", m.EndSession): self._client_says,
            ("client", m.OpenSession): self._client_opens,
            ("client", m.AskStatus): self._client_asks,
            ("client", m.AskMetrics): self._client_asks,
            **{(kind, m.Heartbeat): self._heartbeat for kind in KINDS},
            **{(kind, m.MemoryProbed): self._memory_probed for kind in KINDS},
            **{(kind, m.Goodbye): self._goodbye for kind in KINDS},
        }

    def _heartbeat(self, peer: Peer, event: Received) -> None:
        """A sign of life; a client's says again what it took, in case that was lost."""
        beat = event.message
        assert isinstance(beat, m.Heartbeat)
        peer.busy_until = self._desk.now + min(max(beat.busy_for_s, 0.0), self._config.busy_for_s_max)
        self._watch(peer)
        if beat.grants or (beat.acks and peer.kind != "client"):
            what = "grants" if beat.grants else "acks"
            self._expel(peer, "malformed", f"a {peer.kind}'s heartbeat has no {what}")
            return
        most, named = self._config.sessions_per_client_max, len({ack.session for ack in beat.acks})
        if named < len(beat.acks) or named > most:
            reason = f"a heartbeat has {len(beat.acks)} acks of {named} sessions; accepted: one each, {most} sessions"
            self._expel(peer, "malformed", reason)
            return
        for ack in beat.acks:
            session = peer.sessions.get(ack.session)
            if session is not None:  # else it ended a moment ago
                session.handle(ack)

    def _goodbye(self, peer: Peer, event: Received) -> None:
        assert isinstance(event.message, m.Goodbye)
        reason = event.message.reason
        self._drop(peer, "left" + (f": {reason}" if reason else ""), left=True)

    # --- what clients say ----------------------------------------------------------------------------------------------

    def _client_says(self, peer: Peer, event: Received) -> None:
        """Tell a client's session."""
        message = event.message
        assert isinstance(message, t.ClientSays)
        session = peer.sessions.get(message.session)
        if session is None:
            self._desk.count("unknown_session", message=type(message).__name__)
        else:
            session.handle(message)

    def _client_steers(self, peer: Peer, event: Received) -> None:
        """Tell a client's session, unless it is too much for keys or a control."""
        message = event.message
        assert isinstance(message, m.SetKeys | m.SubmitControl)
        if event.nbytes <= self._config.control_bytes_max or message.session not in peer.sessions:
            self._client_says(peer, event)
            return
        index = message.index if isinstance(message, m.SubmitControl) else None
        reason = f"the message has {event.nbytes} bytes; accepted: {self._config.control_bytes_max}"
        self._desk.count("controls_refused", session=message.session, code="malformed")
        self._desk.send(peer, m.ControlRefused(message.session, index, "malformed", reason))

    def _client_asks(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.AskStatus | m.AskMetrics)
        if isinstance(message, m.AskStatus):
            if peer.mute:
                return
            self._desk.asked.append((peer, message.request))
        else:
            values = self._metrics(peer, message.session)
            self._desk.send(peer, m.Metrics(message.request, message.session, values))

    def _client_opens(self, peer: Peer, event: Received) -> None:
        request, nbytes, entropy = event.message, event.nbytes, event.entropy
        assert isinstance(request, m.OpenSession)
        known = peer.keys.get(request.key)
        if known is not None:
            self._desk.send(peer, m.SessionOpened(request.key, known, self.sessions[known].token))
            return
        if self._draining:
            refused: Failure | m.OpenSession = Failure("shutdown", "the broker stops")
        else:
            refused = refusal(request, nbytes, peer, self._placement, self._desk, sessions=len(self.sessions))
        if isinstance(refused, Failure):
            self._desk.counters["sessions_refused"] += 1
            self._desk.log("info", "session_refused", failure=refused.kind, reason=refused.message)
            self._desk.send(peer, m.SessionRefused(shortened(request.key), _short(refused)))
            return
        self._opened += 1
        name = f"{self._opened}-{hashlib.blake2b(entropy, digest_size=4, person=b'session').hexdigest()}"
        token = hashlib.blake2b(entropy, digest_size=16, person=b"token").hexdigest()
        served = self._placement.served[request.pipeline]
        session = Session(self._desk, (name, token), peer, refused, served.spec)
        session.request_bytes = nbytes
        self._desk.request_bytes += nbytes
        self.sessions[name] = peer.sessions[name] = session
        self._desk.expect_stats(served.spec)
        peer.keys[request.key] = name
        self._placement.enter(session)
        self._desk.freed = True
        self._desk.counters["sessions_opened"] += 1
        self._desk.log("info", "session_opened", session=name, pipeline=request.pipeline, chunks=request.chunks)
        self._desk.send(peer, m.SessionOpened(request.key, name, token))

    def _metrics(self, peer: Peer, name: str) -> dict[str, Plain]:
        session = self.sessions.get(name)
        if session is not None and session.attachment == peer.attachment:
            return report.metrics(session)
        attachment, values = self._ended.get(name, (0, {}))
        return values if attachment == peer.attachment else {}

    # --- what workers say ----------------------------------------------------------------------------------------------

    def _task_done(self, peer: Peer, event: Received) -> None:
        """Tell the session; what it doesn't take of the shared memory that the result refers to goes back."""
        message, memory = event.message, self._desk.memory
        assert isinstance(message, m.TaskDone)
        memory.arrive(peer, message.outputs)
        self._tell_session(peer, message)
        if memory.arrived:
            memory.handled()

    def _stage_says(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.TaskStarted | m.StageReleased)
        self._tell_session(peer, message)

    def _stage_initialized(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.StageInitialized)
        if message.cache_bytes < 0:
            reason = f"StageInitialized.cache_bytes is {message.cache_bytes}; accepted: 0 and more"
            self._expel(peer, "malformed", reason)
        elif message.handed.is_inline:
            self._tell_session(peer, message)
        else:
            failure = Failure("stage", "handed something on in shared memory; accepted: tensors inside of the message")
            at = (message.session, message.stage, message.epoch, message.stage_epoch)
            self._tell_session(peer, m.StageFailed(*at, "initialize", None, failure))

    def _stage_failed(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.StageFailed)
        message = replace(message, failure=_short(message.failure))
        if message.phase != "build":
            self._tell_session(peer, message)
            return
        reason = message.failure.message
        for (_, stage), actor in peer.actors.items():
            if stage == message.stage:
                actor.failure = reason
        self._desk.log("error", "stage_not_built", peer=peer.name, stage=message.stage, reason=reason)

    def _tell_session(self, peer: Peer, message: t.WorkerSays) -> None:
        """Tell the session that a stage speaks of, if it lives there and the stage speaks of this attempt at it."""
        session = peer.sessions.get(message.session)
        seat = None if session is None or session.seats is None else session.seats.seats.get(message.stage)
        if session is None or seat is None or seat.actor.worker is not peer:
            self._desk.count("orphans", peer=peer.name, message=type(message).__name__)
        elif not session.is_current(message.epoch, message.stage_epoch):
            self._desk.count("stale_epochs", peer=peer.name, session=session.id, message=type(message).__name__)
        else:
            session.handle(message)

    def _worker_drains(self, peer: Peer, _event: Received) -> None:
        """Place nobody at a worker that stops; what its sessions accepted is delivered."""
        if peer.draining:
            return
        peer.draining = True
        self._desk.log("info", "worker_draining", peer=peer.name, sessions=len(peer.sessions))
        for name, session in list(self.sessions.items()):
            # Also those whose last chunks wait for their client: they keep what the worker lent for it.
            if name in peer.sessions or session.state == "releasing":
                session.handle(t.ShuttingDown(self._config.drain_s, peer))

    def _stage_ready(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.StageReady)
        actor = peer.actors.get((message.pipeline, message.stage))
        if actor is None or message.session_bytes < 0:
            self._expel(peer, "malformed", f"stage {message.pipeline}/{message.stage} can't be ready")
            return
        actor.is_ready, actor.session_bytes, actor.failure = True, message.session_bytes, ""
        self._desk.freed = True
        self._desk.log("info", "stage_ready", peer=peer.name, pipeline=message.pipeline, stage=message.stage)

    # --- time ----------------------------------------------------------------------------------------------------------

    def _turn_ended(self, *, drained: bool) -> None:
        now, desk = self._desk.now, self._desk
        self._tell_keys()
        self._beat()
        if self._has_heard_enough(drained=drained):
            self._drop_mute()
            self._look_at_silence()
            while (due := desk.timers.pop_due(now)) is not None:
                self._due(due)
        self._settle()
        while desk.touched:
            touched, desk.touched = desk.touched, {}
            for name in touched:
                self.sessions[name].handle(t.Looked())
            self._settle()
        for peer, returns in desk.memory.returns():
            desk.send(peer, returns)
        if desk.asked:
            asked, desk.asked = desk.asked, []
            state = self.status()
            for peer, request in asked:
                desk.send(peer, m.Status(request, state))

    def _tell_keys(self) -> None:
        """Before tasks are sent, which may take a while at the worker."""
        while self._desk.rekeyed:
            self.sessions[self._desk.rekeyed.popitem()[0]].tell_keys()

    def _has_heard_enough(self, *, drained: bool) -> bool:
        """Whether deadlines count now.

        What is still unread may be the very word that one waits for, so they wait until everything was read; but not
        longer than a peer may be silent, or whoever talks without end would keep everybody else's from coming.
        """
        if drained:
            self._unread_since = None
            return True
        if self._unread_since is None:
            self._unread_since = self._desk.now
        return self._desk.now >= self._unread_since + self._config.missed * self._config.heartbeat_s

    def _due(self, due: TimerKey) -> None:
        kind, name = due
        if kind == "retry":
            self._desk.retry()
            self._settle()
        elif kind == "drain":
            self._desk.log("warning", "drain_expired", sessions=len(self.sessions))
            self._stop()
        else:
            self.sessions[name].handle(t.EXPIRED[kind])
            self._settle()

    def _shut_down(self) -> None:
        if self._draining:
            self._stop()
            return
        self._draining = True
        self._desk.log("info", "draining", sessions=len(self.sessions))
        self._desk.timers.set(("drain", ""), self._desk.now + self._config.drain_s)
        for session in list(self.sessions.values()):
            session.handle(t.ShuttingDown(self._config.drain_s))

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            for peer in self._peers.by_route.values():
                self._desk.send(peer, m.Goodbye("the broker stops"))
            self._desk.act(Stop())

    # --- after each event ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do what follows, until nothing does, and send the tasks that can be sent."""
        desk = self._desk
        self._put_right()
        while desk.unsettled or desk.stirred:
            desk.send_tasks()
            self._put_right()

    def _put_right(self) -> None:
        """Do what can't wait until tasks are sent: lost workers, ended sessions, places that became free."""
        desk = self._desk
        while desk.lost or desk.ended or desk.unfit or desk.returned or desk.freed:
            self._put_one_right()
        if self._draining and not self.sessions:
            self._stop()

    def _put_one_right(self) -> None:
        desk = self._desk
        if desk.lost:
            peer = next(iter(desk.lost))
            reason = desk.lost.pop(peer)
            if not peer.gone:
                self._expel(peer, "unknown_peer", f"declared lost: {reason}")
        elif desk.ended:
            self._forget(self.sessions.pop(desk.ended.pop()))
        elif desk.unfit:
            name, failure = desk.unfit.popitem()
            self.sessions[name].handle(t.Unfit(failure))
        elif desk.returned:
            self._placement.enter_again(self.sessions[desk.returned.pop()])
            desk.freed = True
        else:
            desk.freed = False
            for session, actors in self._placement.next_placed():
                session.handle(t.Placed(actors))

    def _forget(self, session: Session) -> None:
        self._placement.leave(session)
        report.take_in(self._desk.stats, session)
        self._ended[session.id] = (session.attachment, report.metrics(session))
        if len(self._ended) > ENDED_KEPT_MAX:
            self._ended.popitem(last=False)

    def _actors(self) -> list[Actor]:
        return [actor for peer in self._peers.workers.values() for actor in peer.actors.values()]


def _short(failure: Failure) -> Failure:
    """A failure as it is told: what is in it may be a peer's own text."""
    return replace(failure, message=shortened(failure.message), field=shortened(failure.field))
