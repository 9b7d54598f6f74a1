"""What the broker says about itself: plain data for `status` and for a session's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from reelwire.spec import Plain

from .desk import Desk
from .peers import Peer, Peers
from .placement import Placement
from .session import Session
from .stats import StreamStats


def status(
    desk: Desk, peers: Peers, placement: Placement, sessions: Mapping[str, Session], version: str, *, draining: bool
) -> dict[str, Plain]:
    """The whole broker: workers, stages, pipelines, the first sessions, counters. Takes time in proportion to them."""
    listed = islice(sessions.values(), desk.config.status_sessions_max)
    stats = _stats_of_all(desk, sessions.values())
    return {
        "version": version,
        "draining": draining,
        "clients": len(peers) - len(peers.workers),
        "workers": [_worker(peer, desk.now) for peer in peers.workers.values()],
        "pipelines": {
            name: {
                "workers": len(served.workers),
                "sessions": served.sessions,
                "waiting": len(served.waiting),
                "unserved_stage": served.unserved_stage() or "",
                "metrics": _stream(stats[name]) if name in stats else {},
            }
            for name, served in placement.served.items()
        },
        "sessions_total": len(sessions),
        "sessions": [_session(session) for session in listed],
        "counters": dict(sorted(desk.counters.items())),
    }


def metrics(session: Session) -> dict[str, Plain]:
    """The numbers of one session; durations in seconds."""
    controls = session.controls
    return {
        **_session(session),
        **_stream(session.timing.stats),
        "taps_overwritten": controls.taps_overwritten,
        "explicit_overwritten": controls.explicit_overwritten,
    }


def take_in(stats: Mapping[str, StreamStats], session: Session) -> None:
    """Add a session's numbers to those of its pipeline; by then another dataflow may be kept under that name."""
    mine, total = session.timing.stats, stats.get(session.spec.name)
    if total is not None and list(total.stages) == list(mine.stages):
        total.take_in(mine)


def _stats_of_all(desk: Desk, sessions: Iterable[Session]) -> dict[str, StreamStats]:
    """The numbers of all sessions by pipeline, of those that live and of those that ended."""
    stats = {}
    for name, ended in desk.stats.items():
        stats[name] = StreamStats(ended.stages)
        stats[name].take_in(ended)
    for session in sessions:
        take_in(stats, session)
    return stats


def _session(session: Session) -> dict[str, Plain]:
    flow = session.flow
    release_error = None if session.seats is None else session.seats.error
    return {
        "session": session.id,
        "pipeline": session.spec.name,
        "state": session.shown_state,
        "unread": len(session.ring),
        "detached": session.owner is None and not session.is_told,
        "chunks": session.chunks,
        "next_condition_index": flow.next_condition_index,
        "next_control_index": flow.next_control_index,
        "next_commit": flow.next_commit,
        "acked": flow.acked,
        "release_error": "" if release_error is None else release_error.message,
        "workers": {}
        if session.seats is None
        else {stage: seat.actor.worker.name for stage, seat in session.seats.seats.items()},
        "waits_for": {name: session.idle_cause(name) for name in flow.stages},
    }


def _worker(peer: Peer, now: float) -> dict[str, Plain]:
    return {
        "name": peer.name,
        "attachment": peer.attachment,
        "device": peer.device,
        "packages": dict(peer.packages),
        "ready": all(actor.is_ready for actor in peer.actors.values())
        and (peer.group is None or peer.group.state == "formed"),
        "draining": peer.draining,
        "group": "" if peer.group is None else peer.group.name,
        "rank": peer.rank,
        "silent_s": now - peer.heard_at,
        "shared_memory": peer.memory is not None,
        "pieces_lent": len(peer.lent),
        "stages": [
            {
                "pipeline": pipeline,
                "stage": stage,
                "ready": actor.is_ready,
                "failure": actor.failure,
                "slots": actor.offer.slots,
                "sessions": len(actor.tenants),
                "cache_bytes": actor.bytes_used,
                "cache_bytes_max": actor.offer.cache_bytes_max,
                "tasks": actor.outstanding,
                "waiting": len(actor.waiting),
            }
            for (pipeline, stage), actor in peer.actors.items()
        ],
    }


def _stream(stats: StreamStats) -> dict[str, Plain]:
    stages: dict[str, Plain] = {name: _plain(one.summary()) for name, one in stats.stages.items()}
    return {"chunks": stats.chunks, **_plain(stats.summary()), "stages": stages}


def _plain(values: Mapping[str, Any]) -> dict[str, Plain]:
    return {name: _plain(value) if isinstance(value, Mapping) else value for name, value in values.items()}
