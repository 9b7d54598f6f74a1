"""What peers say to the broker once they are attached, and where it is heard: sessions, groups, jobs.

`core.BrokerCore` adds time, and what follows from an event.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from reelwire import messages as m
from reelwire.messages import Failure
from reelwire.spec import Plain

from . import report
from . import transitions as t
from .attaching import Attaching
from .config import BrokerConfig
from .desk import cut, short
from .events import Received
from .job_record import Saved
from .jobs import Jobs
from .peers import KINDS, Kind, Peer
from .placement import AdmitSpec
from .requests import refusal
from .session import Session

_HELLOS = (m.ClientHello, m.WorkerHello)
JOBS_OF_CLIENTS = (
    m.BeginUpload, m.UploadPart, m.SubmitJob, m.AskJobs, m.WatchJob, m.CancelJob, m.DeleteJob, m.FetchResult,
)  # fmt: skip
JOBS_OF_WORKERS = (m.JobProgress, m.JobFile, m.JobEnded, m.WantFile, m.FilePart, m.FileGone)


class Hearing(Attaching):
    """What `BrokerCore` is made of towards peers that are attached.

    Args:
        config: settings.
        version: of reelwire; peers must have the same major and minor one.
        admit_spec: raises SpecError for a dataflow that the broker doesn't serve.
        saved: what former brokers left.
        wall_s: seconds since 1970 when the clock of events stands at 0.

    Attributes:
        sessions: live sessions by id.
    """

    def __init__(self, config: BrokerConfig, version: str, admit_spec: AdmitSpec, saved: Saved, wall_s: float) -> None:
        """Start with nobody attached."""
        super().__init__(config, version, admit_spec, saved.incarnation)
        self._jobs = Jobs(self._desk, self._groups, saved, wall_s)
        self._ended: OrderedDict[str, tuple[int, dict[str, Plain]]] = OrderedDict()
        self._opened = 0
        self._draining = False
        self._hears = self._heard()
        self.sessions: dict[str, Session] = {}

    def _received(self, event: Received) -> None:
        message = event.message
        if isinstance(message, _HELLOS):
            self._hello(event, message)
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
            **{("worker", kind): self._groups.hear for kind in (m.GroupOpened, m.GroupFormed, m.RanksLost)},
            **{("client", kind): self._jobs.hear for kind in JOBS_OF_CLIENTS},
            **{("worker", kind): self._jobs.hear for kind in JOBS_OF_WORKERS},
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

    def _client_gone(self, peer: Peer) -> None:
        self._jobs.client_gone(peer)

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
            self._desk.send(peer, m.SessionRefused(cut(request.key), short(refused)))
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
        message = replace(message, failure=short(message.failure))
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
        """Place nobody at a worker that stops, or whose group does; what its sessions accepted is delivered."""
        for rank in self._groups.drained(peer):
            self._drain_worker(rank)

    def _drain_worker(self, peer: Peer) -> None:
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
