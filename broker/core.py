"""The broker as one pure state machine: `BrokerCore.handle(event) -> list[Action]`, or `take` for all but a turn's last.

No socket, no clock, no thread, no randomness: time and entropy come in with the events of `events`, what is to be done
goes out as the actions of `actions`. What a peer sends never raises; `assert` stands for our own errors only. The cost
of an event doesn't grow with the number of sessions, `status` and `check` aside.
"""

from __future__ import annotations

from typing import assert_never

from reelwire import messages as m
from reelwire.spec import Plain, check_registrable

from . import report
from . import transitions as t
from .actions import Action, Stop
from .actors import Actor
from .attaching import UNREACHABLE
from .config import BrokerConfig
from .desk import TimerKey
from .events import (
    Event,
    FileDone,
    Malformed,
    OutboxFull,
    PartRead,
    PartStored,
    Received,
    ShutdownRequested,
    Stored,
    StoreFailed,
    StoreStalled,
    TurnEnded,
    Unreachable,
)
from .hearing import Hearing
from .job_record import Saved
from .placement import AdmitSpec
from .session import Session

ENDED_KEPT_MAX = 256
"""Ended sessions whose numbers can still be asked for."""


class BrokerCore(Hearing):
    """Everything that a broker knows and decides.

    Args:
        config: settings.
        version: of reelwire; peers must have the same major and minor one.
        admit_spec: raises SpecError for a dataflow that the broker doesn't serve.
        saved: what former brokers left.
        wall_s: seconds since 1970 when the clock of events stands at 0.

    Attributes:
        sessions: live sessions by id.
    """

    def __init__(
        self,
        config: BrokerConfig,
        version: str,
        admit_spec: AdmitSpec = check_registrable,
        saved: Saved | None = None,
        wall_s: float = 0.0,
    ) -> None:
        """Start with nobody attached."""
        super().__init__(config, version, admit_spec, saved or Saved(), wall_s)
        self._stopped = False
        self._unread_since: float | None = None

    @property
    def wake_at(self) -> float | None:
        """When a TurnEnded is due although nothing arrived, in seconds; None when there is no such time."""
        if self._stopped:
            return None
        desk = self._desk
        if self._mute:
            return desk.now
        times = (desk.timers.next_at, desk.silences.next_at, self._beats.next_at, self._silences.next_at)
        rarer = (self._groups.wake_at, self._jobs.wake_at)
        return min((at for at in (*times, *rarer) if at is not None), default=None)

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
                self._unsendable(event.route, UNREACHABLE)
            case OutboxFull():
                self._unsendable(event.route, "outbox_full")
            case TurnEnded():
                self._turn_ended(drained=event.drained)
            case ShutdownRequested():
                self._shut_down()
            case Stored():
                self._jobs.stored(event.ticket)
            case PartStored() | FileDone() | PartRead():
                self._jobs.file(event)
            case StoreStalled():
                self._jobs.store_stalled(event.reason)
            case StoreFailed():
                self._desk.log("error", "store_failed", reason=event.reason)
                self._stop(event.reason)
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
        streams = report.status(
            self._desk, self._peers, self._placement, self.sessions, self._version, draining=self._draining
        )
        groups: list[Plain] = list(self._groups.status())
        return {**streams, "groups": groups, "jobs": self._jobs.status()}

    def check(self) -> None:
        """Assert every invariant; takes time in proportion to what there is."""
        desk = self._desk
        for left in (desk.unsettled, desk.stirred, desk.ended, desk.lost, desk.freed, desk.returned, desk.unfit):
            assert not left, "work was left undone"
        self._check_attached()
        assert not desk.formed, "a group was left alone"
        assert not desk.parted, "a group without its leader was left alone"
        assert not desk.over, "a group that is over was left alone"
        assert not desk.is_job_due, "jobs were left alone"
        self._groups.check()
        self._jobs.check()
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
            self._groups.due(now)
            self._jobs.due(now)
        self._settle()
        while desk.touched:
            touched, desk.touched = desk.touched, {}
            for name in touched:
                self.sessions[name].handle(t.Looked())
            self._settle()
        for peer, returns in desk.memory.returns():
            desk.send(peer, returns)
        self._jobs.tell()
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
        self._jobs.drain()
        self._desk.log("info", "draining", sessions=len(self.sessions))
        self._desk.timers.set(("drain", ""), self._desk.now + self._config.drain_s)
        for session in list(self.sessions.values()):
            session.handle(t.ShuttingDown(self._config.drain_s))

    def _stop(self, failure: str = "") -> None:
        if not self._stopped:
            self._stopped = True
            for peer in self._peers.by_route.values():
                self._desk.send(peer, m.Goodbye("the broker stops"))
            self._desk.act(Stop(failure))

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
        while (
            desk.lost
            or desk.ended
            or desk.unfit
            or desk.returned
            or desk.freed
            or desk.over
            or desk.formed
            or desk.parted
        ):
            self._put_one_right()
        if desk.is_job_due:
            desk.is_job_due = False
            if not self._draining:
                self._jobs.assign()
        if self._draining and not self.sessions:
            self._stop()

    def _put_one_right(self) -> None:
        desk = self._desk
        if desk.lost:
            peer = next(iter(desk.lost))
            reason = desk.lost.pop(peer)
            if peer.dismissed and not peer.gone:
                self._drop(peer, reason, left=True, forget=False)  # it was told why, and that has yet to leave
            elif not peer.gone:
                self._expel(peer, "unknown_peer", f"declared lost: {reason}")
        elif desk.ended:
            self._forget(self.sessions.pop(desk.ended.pop()))
        elif desk.unfit:
            name, failure = desk.unfit.popitem()
            self.sessions[name].handle(t.Unfit(failure))
        elif desk.parted:
            self._jobs.leader_away(*desk.parted.popitem())
        elif desk.over:  # what it had is asked for again before anybody else is asked
            self._jobs.group_over(*desk.over.popitem())
        elif desk.formed:
            group, _ = desk.formed.popitem()
            self._jobs.held(group, group.held)
            group.held = ()
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
