"""Who is attached to the broker: hellos, refusals, signs of life, and how a peer is dropped.

`core.BrokerCore` adds what peers say once they are attached, and what follows from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from reelwire import messages as m
from reelwire import versions
from reelwire.checks import shown
from reelwire.job_spec import JobSpec
from reelwire.parts import NAME_CHARACTERS_MAX
from reelwire.spec import StreamSpec

from . import transitions as t
from .config import BrokerConfig
from .desk import Desk, shortened
from .events import Malformed, Received
from .fitting import limits_of
from .groups import Groups
from .leases import offer_objection
from .peers import Kind, Peer, Peers, Told
from .placement import AdmitSpec, Placement
from .session import Session
from .timers import Timers

UNREACHABLE = "unreachable"
"""Why nothing can be sent along a connection that broke."""
GRANT_BYTES = 128
"""What one grant takes of a header, and more."""


class Attaching(ABC):
    """What `BrokerCore` is made of towards whoever comes and goes.

    Args:
        config: settings.
        version: of reelwire; peers must have the same major and minor one.
        admit_spec: raises SpecError for a dataflow that the broker doesn't serve.
        incarnation: how many brokers there were with this one's state, this one included.
    """

    def __init__(self, config: BrokerConfig, version: str, admit_spec: AdmitSpec, incarnation: int) -> None:
        """Start with nobody attached."""
        self._config = config
        self._version = version
        self._desk = Desk(config)
        self._peers = Peers(incarnation)
        self._told = Told(config.peers_max)
        self._placement = Placement(admit_spec)
        self._groups = Groups(self._desk, incarnation)
        self._incarnation = incarnation
        self._beats: Timers[int] = Timers()
        self._silences: Timers[int] = Timers()
        self._mute: dict[Peer, None] = {}

    @abstractmethod
    def _settle(self) -> None:
        """Do what follows from what was just done."""

    @abstractmethod
    def _client_gone(self, peer: Peer) -> None:
        """A client is detached."""

    def _hello(self, event: Received, hello: m.ClientHello | m.WorkerHello) -> None:
        route = event.route
        desk, name = self._desk, hello.name
        kind: Kind = "worker" if isinstance(hello, m.WorkerHello) else "client"
        if not versions.fit(hello.version, self._version):
            self._reject(route, "version", f"the broker has reelwire {self._version}, you have {hello.version}")
            return
        same = (self._peers.by_route.get(route), self._peers.workers.get(name) if kind == "worker" else None)
        replaced = {old.attachment: old for old in same if old is not None}
        objection = self._objection(hello, replaced)
        limits = limits_of(hello.limits, self._config)
        if objection is not None or limits is None:
            self._reject(route, *(objection or ("malformed", "limits: accepted: numbers of 1 and more")))
            return
        is_back = isinstance(hello, m.WorkerHello) and self._groups.is_back(hello)
        for old in replaced.values():
            self._drop(old, "said hello again", returns=is_back)
        self._settle()
        if replaced and isinstance(hello, m.WorkerHello):
            objection = self._placement.objection(hello) or self._groups.objection(hello, ())
            if objection is not None:  # what a session of its old self made is still read, in another dataflow
                self._reject(route, *objection)
                return
        peer = self._peers.attach(route, kind, name, desk.now)
        peer.limits = limits
        self._told.discard(route)
        self._beats.set(peer.attachment, desk.now + self._config.heartbeat_s)
        self._watch(peer)
        self._welcome(peer)
        desk.log("info", "attached", peer=peer.name, kind=kind, attachment=peer.attachment)
        if isinstance(hello, m.WorkerHello):
            peer.device, peer.packages, peer.forwards = hello.device, dict(hello.packages), hello.forwards
            before = self._offered()
            self._groups.add(peer, hello, event.entropy)
            if is_back and peer.group is not None and 0 in peer.group.ranks:
                self._share(peer.group.leader.sessions.values())  # it has yet to say whose shared memory it can open
            self._placement.add(peer, hello)
            self._tell_offered(before)
            if hello.memory is not None:
                self._peers.lend(peer, hello.memory)
        self._probe(peer)

    def _objection(self, hello: m.ClientHello | m.WorkerHello, replaced: Mapping[int, Peer]) -> tuple[str, str] | None:
        """Why a peer isn't taken in the place of those that it would replace; they stay as they are when it isn't."""
        name = hello.name
        if len(name) > NAME_CHARACTERS_MAX:
            return "limit", f"a name of {len(name)} characters; accepted: {NAME_CHARACTERS_MAX}"
        if not name.isprintable():
            return "limit", f"name: {shown(name)} isn't accepted; accepted: characters that can be shown"
        if len(self._peers) - len(replaced) >= self._config.peers_max:
            return "limit", f"{self._config.peers_max} peers are attached already"
        if isinstance(hello, m.ClientHello):
            return None
        owners = [owner for owner, worker in self._peers.owners.items() if worker.attachment not in replaced]
        return (
            self._placement.objection(hello, self._groups.going_with(hello, replaced))
            or self._groups.objection(hello, replaced)
            or offer_objection(hello.memory, owners)
        )

    def _welcome(self, peer: Peer) -> None:
        limits, (specs, jobs) = self._config.limits(), self._offered() if peer.kind == "client" else ((), ())
        beat_s, missed = self._config.heartbeat_s, self._config.missed
        self._desk.send(
            peer, m.Welcome(peer.name, self._version, beat_s, missed, limits, specs, jobs, self._incarnation)
        )

    def _offered(self) -> tuple[tuple[StreamSpec, ...], tuple[JobSpec, ...]]:
        """What clients can ask for now."""
        return self._placement.specs(), self._groups.kinds()

    def _tell_offered(self, before: tuple[tuple[StreamSpec, ...], tuple[JobSpec, ...]]) -> None:
        """Welcome every client again when they can ask for something else than `before`."""
        if self._offered() != before:
            for peer in self._peers.by_route.values():
                if peer.kind == "client":
                    self._welcome(peer)

    def _probe(self, peer: Peer) -> None:
        """Find out whose shared memory a newcomer can open, and who can open its own."""
        for owner, worker in self._peers.owners.items():
            if worker is not peer:
                self._desk.send(peer, m.ProbeMemory(owner))
        if peer.memory is not None:
            for other in self._peers.by_route.values():
                if other is not peer:
                    self._desk.send(other, m.ProbeMemory(peer.memory.owner))

    def _memory_probed(self, peer: Peer, event: Received) -> None:
        """A peer that can tell a worker's probe reads what that worker writes from now on, in all sessions of both."""
        message = event.message
        assert isinstance(message, m.MemoryProbed)
        worker = self._peers.owners.get(message.owner)
        if worker is None or worker.memory is None or worker is peer or message.probe != worker.memory.probe:
            self._desk.count("memory_not_mapped", peer=peer.name)
            return
        if worker.attachment in peer.maps:
            return
        peer.maps.add(worker.attachment)
        # Of a group's rank those of its leader: what a stage of the group reads, every rank reads.
        own = peer.sessions if peer.group is None or 0 not in peer.group.ranks else peer.group.leader.sessions
        fewer, more = sorted((own, worker.sessions), key=len)
        self._share(session for name, session in fewer.items() if name in more)

    def _share(self, sessions: Iterable[Session]) -> None:
        """Find out anew what may be in shared memory for sessions."""
        for session in sessions:
            if session.seats is not None:
                session.seats.share(session.owner)

    def _reject(self, route: bytes, code: str, reason: str) -> None:
        self._desk.counters[f"rejected_{code}"] += 1
        self._desk.log("warning", "rejected", code=code, reason=reason)
        self._desk.answer(route, m.Rejected(code, shortened(reason)))

    def _malformed(self, event: Malformed) -> None:
        self._desk.count(event.code, reason=event.reason)
        peer = self._peers.by_route.get(event.route)
        if peer is not None:
            self._expel(peer, event.code, event.reason)
            self._told.add(event.route)
        elif self._told.add(event.route):
            self._reject(event.route, event.code, event.reason)

    def _expel(self, peer: Peer, code: str, reason: str) -> None:
        """Tell a peer that it is dropped, and why; then drop it."""
        self._desk.counters[f"rejected_{code}"] += 1
        self._desk.forget(peer.route)
        self._desk.answer(peer.route, m.Rejected(code, shortened(reason)))
        self._drop(peer, reason, forget=False)

    def _unsendable(self, route: bytes, reason: str) -> None:
        """Send nothing more along a route; its peer is dropped when what it had said by then was read."""
        peer = self._peers.by_route.get(route)
        self._desk.count(reason)
        self._desk.forget(route)
        if peer is not None and not peer.mute:
            peer.mute = reason
            self._mute[peer] = None

    def _drop_mute(self) -> None:
        """Drop those that nothing can be sent to: whatever they had to say is heard."""
        while self._mute:
            peer = next(iter(self._mute))
            # A connection that broke is no sign of death; who was asked to stop doesn't come back.
            self._drop(peer, peer.mute, returns=peer.mute == UNREACHABLE and not peer.draining)
            self._settle()

    def _drop(self, peer: Peer, reason: str, *, left: bool = False, forget: bool = True, returns: bool = False) -> None:
        """Detach a peer. A worker's sessions fail; a client's are cancelled if it left, else they get a grace.

        A rank of a group that `returns` is waited for by the others, if it doesn't come back at once.
        """
        desk, reason = self._desk, shortened(reason)
        desk.log("info" if left else "warning", "detached", peer=peer.name, kind=peer.kind, reason=reason)
        desk.counters[f"{peer.kind}s_{'left' if left else 'lost'}"] += 1
        if forget:
            desk.forget(peer.route)
        self._peers.detach(peer)
        self._mute.pop(peer, None)
        self._beats.drop(peer.attachment)
        self._silences.drop(peer.attachment)
        if peer.kind == "worker":
            for actor in peer.actors.values():
                desk.silences.drop(actor)
            before = self._offered()
            self._groups.lose(peer, reason, left=left, returns=returns)
            self._placement.remove(peer)
            self._tell_offered(before)
        else:
            self._client_gone(peer)
        event = t.WorkerLost(peer, reason) if peer.kind == "worker" else t.ClientLeft() if left else t.ClientLost()
        for session in list(peer.sessions.values()):
            session.handle(event)

    def _watch(self, peer: Peer) -> None:
        silent_at = peer.heard_at + self._config.missed * self._config.heartbeat_s
        self._silences.set(peer.attachment, max(silent_at, peer.busy_until))

    def _beat(self) -> None:
        """Give a sign of life to everybody whose interval is over; clients are told again what they were granted."""
        now = self._desk.now
        while (attachment := self._beats.pop_due(now)) is not None:
            self._beats.set(attachment, now + self._config.heartbeat_s)
            peer = self._peers.by_attachment[attachment]
            grants = _grants(peer) if peer.kind == "client" else []
            most = max(1, min(peer.limits.header_bytes_max // GRANT_BYTES, len(grants)))
            for at in range(0, max(1, len(grants)), most):
                self._desk.send(peer, m.Heartbeat(grants=tuple(grants[at : at + most])))

    def _look_at_silence(self) -> None:
        """Drop who was silent for too long, and who has a stage that was."""
        now = self._desk.now
        while (attachment := self._silences.pop_due(now)) is not None:
            peer = self._peers.by_attachment[attachment]
            limit_s = self._config.missed * self._config.heartbeat_s
            if max(peer.heard_at + limit_s, peer.busy_until) > now:
                self._watch(peer)
            else:
                self._drop(peer, f"not heard for {now - peer.heard_at:.1f} s")
        while (actor := self._desk.silences.pop_due(now)) is not None:
            if self._desk.look(actor):
                reason = f"stage {actor.offer.stage!r} said nothing for {now - actor.answered_at:.1f} s"
                self._desk.give_up(actor.worker, reason)
                self._settle()

    def _check_attached(self) -> None:
        """Assert that every peer has its timers."""
        self._peers.check()
        mute = {peer for peer in self._peers.by_route.values() if peer.mute}
        assert mute == set(self._mute), "a peer that can't be told anything stays, or another one goes"
        for timers in (self._beats, self._silences):
            timers.check()
            assert set(timers.all()) == set(self._peers.by_attachment), "a peer without a timer, or the other way round"


def _grants(client: Peer) -> list[m.ControlGrant]:
    """How far the controls of each of a client's sessions may go."""
    return [m.ControlGrant(name, session.control_limit) for name, session in client.sessions.items()]
