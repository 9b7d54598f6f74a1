"""What clients are told of jobs: where one stands, when they ask or whenever that changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from reelwire import messages as m
from reelwire.messages import Failure, JobInfo
from reelwire.spec import Plain

from .desk import shortened
from .job_states import ENDED
from .peers import Peer

if TYPE_CHECKING:
    from .job_base import JobBase
    from .job_desk import JobDesk

WATCHES_PER_CLIENT_MAX = 1024
POSITIONS_S = 0.2
"""How often those who watch are told other positions at most: to find them all takes time in proportion to the queue."""
ONE_BY_ONE_MAX = 8
"""For more positions than these the whole queue is gone through once."""
LISTED_MAX = 256
"""Jobs that one answer lists."""
ROW_BYTES = 512
"""More than a row of that list takes without its texts, and the rest of the message."""
STATUS_JOBS_MAX = 64
"""Jobs that a status lists one by one: those that run."""
OUTPUT_ERROR = "output_error"
"""Among the facts of a result: why it couldn't be written to where it was asked for."""
UNSTORED = {"room": "the store has no room for it", "worker": "its worker doesn't send it"}


def info_of(at: JobDesk, job: JobBase, position: int | None = None, *, is_row: bool = False) -> JobInfo:
    """Where a job stands, as clients are told.

    Args:
        at: all jobs.
        job: which.
        position: how many jobs start before it, where that is known already.
        is_row: it is one of many: without its facts, of which there may be many.
    """
    record, pace, phase, now = job.record, job.pace, job.phase, at.wall
    if position is None:
        position = at.queue.position(job.id, at.rivals(record.kind)) if job.id in at.queue else 0
    is_known, result = job.state in ENDED, record.result if job.state in ENDED else None
    is_running = phase == "running"
    waits_for = ""
    if phase == "queued":
        waits_for = "broker" if at.draining else "worker" if at.spec(record.kind) is None else "group"
    elif job.state == "unstored":
        waits_for = job.unstored_for
    elif is_running and pace.is_streaming:
        waits_for = "streaming"
    return JobInfo(
        job=job.id,
        kind=record.kind,
        state=phase,
        key=record.key,
        client=record.client,
        priority=record.priority,
        position=position,
        stage=pace.stage if is_running else "",
        step=pace.step if is_running else 0,
        steps=pace.steps if is_running else 0,
        step_s=pace.step_s if is_running else 0.0,
        left_s=pace.left_s if is_running else None,
        attempt=record.attempt,
        checkpoint_step=record.checkpoint_step,
        waits_for=waits_for,
        submitted_s=max(now - record.submitted_at, 0.0),
        ended_s=max(now - (record.ended_at or now), 0.0) if is_known else None,
        result_bytes=0 if result is None else result.nbytes,
        result_sha256="" if result is None else result.file,
        suffix=record.suffix,
        facts=record.facts if is_known and not is_row else {},
        failure=record.failure if is_known else None,
        note=note_of(at, job),
    )


def note_of(at: JobDesk, job: JobBase) -> str:
    """What a person should know of a job beside where it stands, as a sentence; empty: nothing."""
    state, record, notes = job.state, job.record, []
    if state == "queued" and at.draining:
        notes.append("the broker stops, and begins nothing any more: the next one does")
    elif state == "unstored":
        notes.append(f"its result isn't taken in yet: {UNSTORED[job.unstored_for]}")
    elif state == "succeeded":
        if isinstance(error := record.facts.get(OUTPUT_ERROR), str):
            notes.append(f"its result couldn't be written: {error} ({record.output})")
        if record.result is None:
            notes.append("its result made room for others")
    return shortened("; ".join(notes))


def rows_of(at: JobDesk) -> list[Plain]:
    """The jobs that groups have, as plain data for a status."""
    running = [job for jobs in at.at_group.values() for job in jobs.values()]
    return [
        {
            "job": job.id,
            "kind": job.record.kind,
            "state": job.phase,
            "group": job.group.name if job.group else "",
            "waits_for": job.unstored_for if job.state == "unstored" else "",
            "note": note_of(at, job),
        }
        for job in running[:STATUS_JOBS_MAX]
    ]


def positions_of(at: JobDesk, jobs: Collection[str]) -> Mapping[str, int]:
    """How many jobs start before each of these, of those that wait."""
    waiting = [job for job in jobs if job in at.queue]
    rivals = {kind: at.rivals(kind) for kind in {at.jobs[job].record.kind for job in waiting}}
    if len(waiting) <= ONE_BY_ONE_MAX:
        return {job: at.queue.position(job, rivals[at.jobs[job].record.kind]) for job in waiting}
    found: dict[str, int] = {}
    for kinds in set(rivals.values()):
        order = {job: place for place, job in enumerate(at.queue.order(kinds))}
        found.update({job: order[job] for job in waiting if rivals[at.jobs[job].record.kind] == kinds})
    return found


def nbytes_of(row: JobInfo) -> int:
    """Bytes that a row of a list takes in a message at most."""
    failure = row.failure
    texts = [row.job, row.kind, row.key, row.client, row.stage, row.suffix, row.note]
    if failure is not None:
        texts += [failure.message, failure.stage, failure.field]
    return ROW_BYTES + sum([len(text.encode()) for text in texts])


class News:
    """Who watches which jobs, and who has asked for all of them.

    Args:
        at: all jobs.
    """

    def __init__(self, at: JobDesk) -> None:
        """Nobody watches."""
        self._at = at
        self._watchers: dict[str, dict[Peer, None]] = {}
        self._watched: dict[Peer, dict[str, None]] = {}
        self._told: dict[str, int] = {}
        self._asked: list[tuple[Peer, int]] = []
        self._version = 0
        self._looks_at = 0.0

    def watch(self, peer: Peer, job: JobBase) -> Failure | None:
        """Tell a client where a job stands, now and whenever that changes until it ends; why not, if it watches too many."""
        watched = self._watched.get(peer, {})
        if job.id not in watched and len(watched) >= WATCHES_PER_CLIENT_MAX:
            reason = f"the client watches {len(watched)} jobs already; accepted: {WATCHES_PER_CLIENT_MAX} at once"
            return Failure("overload", reason, retry_after_s=self._at.config.retry_after_s)
        info = info_of(self._at, job)
        self._at.desk.send(peer, m.JobChanged(info))
        if job.state not in ENDED:
            self._watched.setdefault(peer, {})[job.id] = None
            self._watchers.setdefault(job.id, {})[peer] = None
            self._told.setdefault(job.id, info.position)
        return None

    def unwatch(self, peer: Peer, job: str) -> None:
        """A client needn't be told any more; it needn't have been."""
        watched = self._watched.get(peer, {})
        if job not in watched:
            return
        del watched[job]
        if not watched:
            del self._watched[peer]
        watchers = self._watchers[job]
        del watchers[peer]
        if not watchers:
            del self._watchers[job], self._told[job]

    def forget(self, job: JobBase) -> None:
        """A job is about to be forgotten: who watches it is told of its end, if that is still to come."""
        if job.id in self._told:
            self._tell(job, 0)

    def gone(self, peer: Peer) -> None:
        """A client is gone."""
        for job in list(self._watched.get(peer, ())):
            self.unwatch(peer, job)

    @property
    def wake_at(self) -> float | None:
        """When somebody is to be told of another position, in seconds."""
        return self._looks_at if self._version != self._at.queue.version and self._told else None

    def list_for(self, peer: Peer, request: int) -> None:
        """Tell a client of all jobs, at the end of the turn: the list is made once for all that ask for it."""
        self._asked.append((peer, request))

    def tell(self) -> None:
        """Tell everybody what has changed, once for each job, and those that have asked what there is."""
        self._tell_watchers()
        if self._asked:
            asked, self._asked = self._asked, []
            self._tell_list(asked)

    def _tell_list(self, asked: list[tuple[Peer, int]]) -> None:
        """To each client the newest jobs, as many as fit what it accepts of a message."""
        at = self._at
        listed = list(islice(reversed(at.jobs.values()), LISTED_MAX))
        positions = positions_of(at, [job.id for job in listed])
        rows = tuple(info_of(at, job, positions.get(job.id, 0), is_row=True) for job in listed)
        sizes = list(accumulate(map(nbytes_of, rows), initial=ROW_BYTES))
        for peer, request in asked:
            room = min(peer.limits.header_bytes_max, peer.limits.message_bytes_max)
            most = max(bisect_right(sizes, room) - 1, 0)
            at.desk.send(peer, m.Jobs(request, rows[:most], len(at.jobs)))

    def _tell_watchers(self) -> None:
        at = self._at
        changed, at.changed = at.changed, {}
        if not self._told:
            return
        jobs = [job for job in changed if job in self._told]
        if self._version != at.queue.version and at.desk.now >= self._looks_at:
            self._version, self._looks_at = at.queue.version, at.desk.now + POSITIONS_S
            positions = positions_of(at, self._told)
            jobs += [job for job, place in positions.items() if place != self._told[job] and job not in changed]
        else:
            positions = positions_of(at, jobs)
        for job in jobs:
            self._tell(at.jobs[job], positions.get(job, 0))

    def _tell(self, job: JobBase, position: int) -> None:
        changed = m.JobChanged(info_of(self._at, job, position))
        self._told[job.id] = position
        for peer in list(self._watchers[job.id]):
            self._at.desk.send(peer, changed)
            if job.state in ENDED:
                self.unwatch(peer, job.id)

    def check(self) -> None:
        """Assert the invariants."""
        pairs = {(peer, job) for peer, jobs in self._watched.items() for job in jobs}
        assert pairs == {(peer, job) for job, peers in self._watchers.items() for peer in peers}, "who watches what"
        assert all(self._watched.values()), "somebody watches nothing"
        assert set(self._watchers) == set(self._told), "positions of jobs that nobody watches"
        for peer, jobs in self._watched.items():
            assert not peer.gone, "somebody watches who is gone"
            assert len(jobs) <= WATCHES_PER_CLIENT_MAX, "somebody watches too many jobs"
        for job in self._watchers:
            assert job in self._at.jobs, "a job is watched that isn't there"
            assert self._at.jobs[job].state not in ENDED or job in self._at.changed, "an ended job is watched"
