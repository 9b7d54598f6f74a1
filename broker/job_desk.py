"""What all jobs share: the journal, the store, the queue, who watches, and where each job is to be found."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reelwire.job_spec import JobSpec
from reelwire.messages import Failure, FileOffer

from .actions import Persist
from .desk import Desk
from .groups import Group, Groups
from .job_files import StoreIndex
from .job_incoming import Incoming
from .job_news import News
from .job_outgoing import Outgoing
from .job_queue import JobQueue
from .job_record import JobRecord, Saved, StoredFile
from .peers import Peer
from .timers import Timers

if TYPE_CHECKING:
    from .job_base import JobBase

DURATION_WEIGHT = 0.2
"""Of the newest duration in the mean of all."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a client has uploaded, and since when it is complete, in seconds of the desk's time."""

    file: str
    nbytes: int
    since: float


class JobDesk:
    """Shared by all jobs of a broker.

    Args:
        desk: of the core.
        groups: the worker groups.
        saved: what former brokers left.
        wall_s: seconds since 1970 when the desk's time is 0.

    Attributes:
        desk: where actions and lines of the log go.
        config: settings.
        groups: the worker groups.
        store: files of the store.
        incoming: files that come.
        outgoing: files that go.
        queue: jobs that wait for a group.
        news: who is told what of them.
        jobs: those that clients can ask for, by id, in order of arrival.
        keys: all of them, also those that aren't acknowledged yet, by key.
        ended: those that have ended, by id; who ended first is first.
        fetched: those whose results were fetched; who was fetched first is first.
        waiting: how many jobs of each client wait, from their submission on.
        at_group: which jobs a group has.
        changed: jobs of which watchers may have to be told.
        unstored: when jobs whose results had no room try again, by id.
        job_s: what a job takes from its start to its end, in seconds; 0: not known yet.
        number: the newest job's order of arrival.
        stalled: why the journal can't be written for the moment; empty: it can.
        draining: nothing new is accepted or begun.
        leaving: files that are let go of when the journal says so, and how often.
        uploads: files of each client that are part of no job yet, by the client's name for them; the oldest is first.
    """

    def __init__(self, desk: Desk, groups: Groups, saved: Saved, wall_s: float) -> None:
        """Start with nothing."""
        self.desk = desk
        self.config = desk.config
        self.groups = groups
        self.store = StoreIndex(desk)
        self.incoming = Incoming(desk, self.store)
        self.outgoing = Outgoing(self.store)
        self.queue = JobQueue()
        self.news = News(self)
        self.jobs: dict[str, JobBase] = {}
        self.keys: dict[str, JobBase] = {}
        self.ended: OrderedDict[str, JobBase] = OrderedDict()
        self.fetched: OrderedDict[str, JobBase] = OrderedDict()
        self.waiting: Counter[str] = Counter()
        self.waiting_total = 0
        self.at_group: dict[Group, dict[str, JobBase]] = {}
        self.changed: dict[str, None] = {}
        self.uploads: dict[Peer, dict[str, Upload]] = {}
        self.unstored: Timers[str] = Timers()
        self.stalled = ""
        self.draining = False
        self.job_s = 0.0
        self.number = max((record.number for record in saved.records), default=0)
        self._folder = saved.files
        self._wall_s = wall_s
        self.leaving: Counter[str] = Counter()
        self._tickets = self._durable = 0
        self._commits: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def wall(self) -> float:
        """Seconds since 1970."""
        return self._wall_s + self.desk.now

    # --- the journal ---------------------------------------------------------------------------------------------------

    def persist(
        self,
        job: str,
        record: JobRecord | None,
        *,
        without: Sequence[StoredFile] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        """Have a record written, or struck out.

        Args:
            job: whose.
            record: what is known of it; None: it is forgotten.
            without: files that it referred to before, and that are let go of when it is durable that it doesn't.
            then: called when it is durable.
        """
        self._tickets += 1
        self.desk.act(Persist(self._tickets, record, job))
        if without:
            self.leaving.update(stored.file for stored in without)
            self._commits.append((self._tickets, lambda: self._let_go(without)))
        if then is not None:
            self._commits.append((self._tickets, then))

    def when_durable(self, then: Callable[[], None]) -> None:
        """Call this when all is durable that was to be written up to now; at once if it is."""
        if self._durable == self._tickets:
            then()
        else:
            self._commits.append((self._tickets, then))

    def stored(self, ticket: int) -> None:
        """All that was to be written up to a ticket is durable."""
        self._durable = ticket
        while self._commits and self._commits[0][0] <= ticket:
            self._commits.popleft()[1]()

    @property
    def uncommitted(self) -> int:
        """How many answers wait for the journal."""
        return len(self._commits)

    # --- groups --------------------------------------------------------------------------------------------------------

    def spec(self, kind: str) -> JobSpec | None:
        """A kind that some group does."""
        return next((spec for spec in self.groups.kinds() if spec.name == kind), None)

    def rivals(self, kind: str) -> frozenset[str]:
        """The kinds that the same groups do, itself included: jobs of these take each other's turns."""
        found = {kind}
        for group in self.groups.by_name.values():
            kinds = [spec.name for spec in group.jobs] if group.state != "over" else []
            if kind in kinds:
                found.update(kinds)
        return frozenset(found)

    def enter(self, group: Group, job: JobBase) -> None:
        """A group has a job."""
        self.at_group.setdefault(group, {})[job.id] = job

    def leave(self, group: Group, job: JobBase) -> None:
        """A group has a job no more; another one may begin there."""
        held = self.at_group[group]
        del held[job.id]
        if not held:
            del self.at_group[group]
        self.free(group, job.id)

    def free(self, group: Group, job: str) -> None:
        """A group's ranks don't work at a job any more."""
        if group.job == job:
            group.job = ""
            self.desk.is_job_due = True

    def took(self, seconds: float) -> None:
        """A job has ended, so long after it began."""
        self.job_s += (seconds - self.job_s) * (DURATION_WEIGHT if self.job_s else 1.0)

    def not_now(self) -> Failure | None:
        """Why nothing that has to be durable is taken for the moment."""
        if not self.stalled:
            return None
        reason = f"the broker can't write to its disk ({self.stalled})"
        return Failure("overload", reason, retry_after_s=self.config.retry_after_s)

    def retry_after_s(self) -> float:
        """Seconds until the queue has room again, roughly: until the groups that there are begin one more job."""
        groups = sum(1 for group in self.groups.formed() if group.jobs)
        return max(self.config.retry_after_s, self.job_s / max(groups, 1))

    # --- files ---------------------------------------------------------------------------------------------------------

    def offer(self, stored: StoredFile) -> FileOffer:
        """A file of the store as it is offered to workers."""
        path = f"{self._folder}/{stored.file}" if self._folder else ""
        return FileOffer(stored.file, path, stored.nbytes)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of files that nobody but a record holds that is being written anew without them."""
        self.leaving = +self.leaving
        held = [(self.store.find(file), count) for file, count in self.leaving.items()]
        return sum(one.nbytes for one, count in held if one is not None and count == one.jobs + one.uploads)

    def uploads_used(self, peer: Peer, files: Iterable[str], requests: int = 1) -> None:
        """A job has come of uploads of a client, and keeps them from now on, or none will come.

        A client uploads a file once for each request that has it: what others of its requests have of the same content stays.
        """
        stored = self.uploads.get(peer, {})
        for file in set(files):
            for name in [name for name, upload in stored.items() if upload.file == file][:requests]:
                self.drop_upload(peer, name)

    def drop_upload(self, peer: Peer, name: str) -> None:
        """A client's upload isn't kept for its own sake any more."""
        stored = self.uploads[peer]
        self.store.release(stored.pop(name).file, "upload")
        if not stored:
            del self.uploads[peer]

    def _let_go(self, files: Sequence[StoredFile]) -> None:
        for stored in files:
            self.leaving[stored.file] -= 1
            self.store.release(stored.file)

    # --- limits --------------------------------------------------------------------------------------------------------

    def begin_waiting(self, client: str) -> None:
        """One more job of a client waits."""
        self.waiting[client] += 1
        self.waiting_total += 1

    def end_waiting(self, client: str) -> None:
        """One less does."""
        self.waiting[client] -= 1
        self.waiting_total -= 1
        if not self.waiting[client]:
            del self.waiting[client]
