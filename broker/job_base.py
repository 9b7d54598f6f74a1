"""What a job has and what its handlers share; the handlers stand in `job`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace

from reelwire import messages as m
from reelwire.messages import Failure, FileOffer, FileRole, JobPhase
from reelwire.spec import Plain

from . import job_states as t
from .events import FileDone
from .groups import Group
from .job_desk import JobDesk
from .job_files import FileEvent
from .job_incoming import Taker
from .job_news import info_of
from .job_pace import StepPace
from .job_queue import Place
from .job_quota import Quota
from .job_record import JobRecord, Standing, StoredFile
from .job_states import ENDED, GONE, PHASES, WAITING, State
from .peers import Peer

AT_WORK: tuple[State, ...] = ("preparing", "running", "encoding", "stopping", "taking", "unstored")


@dataclass(slots=True, eq=False)
class Arriving:
    """A file that the leader announced: what it is, and who is told when it is there."""

    role: FileRole
    offer: FileOffer
    step: int = 0
    facts: dict[str, Plain] = field(default_factory=dict)
    taker: Taker | None = None


@dataclass(slots=True)
class Request:
    """What is only known while a request is checked and committed: who asked how often, and which files are held for it."""

    askers: Counter[Peer] = field(default_factory=Counter)
    files: list[StoredFile] = field(default_factory=list)


class JobBase(ABC):
    """A job, from its submission until it is forgotten.

    Args:
        at: what all jobs share.
        quota: makes room for its files.
        record: what is known of it.
        state: where it begins: ``checking``, or as an earlier broker left it.

    Attributes:
        id: its id.
        record: what is known of it; not all of it is durable before the journal says so.
        state: see `job_states`.
        phase: what clients are told of that.
        request: askers and files, until it is accepted.
        group: who has it.
        pace: where it stands, and how fast it is.
        unstored: the result that its leader keeps as long as it can't be taken.
        unstored_for: what it waits for then: ``room``, or its ``worker``, which doesn't send it.
        ended_now: when it ended, in seconds of the desk's time.
    """

    def __init__(self, at: JobDesk, quota: Quota, record: JobRecord, state: State) -> None:
        """Take its place in the tables."""
        self._at = at
        self._quota = quota
        self.id = record.job
        self.record = record
        self.state: State = state
        self.phase: JobPhase = PHASES[state]
        self.request = Request()
        self.group: Group | None = None
        self.pace = StepPace()
        self.ended_now = 0.0
        self.unstored: Arriving | None = None
        self.unstored_for = ""
        self._arriving: Arriving | None = None
        self._result: StoredFile | None = None
        self._begun_at: float | None = None
        self._kept_step = record.checkpoint_step
        self._lost = ""

    @abstractmethod
    def handle(self, event: t.JobEvent) -> None:
        """Take one event in."""

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """What its workers need."""
        media = [stored for files in self.record.media.values() for stored in files]
        return (*media, *([self.record.checkpoint] if self.record.checkpoint else []))

    @property
    def kept(self) -> tuple[StoredFile, ...]:
        """What its record refers to."""
        return (*self.files, *([self.record.result] if self.record.result else []))

    def is_at(self, group: Group, attempt: int) -> bool:
        """Whether a group has this attempt."""
        return self.group is group and self.record.attempt == attempt

    def check(self) -> Counter[str]:
        """Assert the invariants; how often it holds each file."""
        at, state, record = self._at, self.state, self.record
        assert state not in GONE, f"{self.id} is gone, and still there"
        assert (self.id in at.queue) == (state == "queued"), f"{self.id} is {state}, and in the queue or not"
        assert (self.id in at.ended) == (state in ENDED), f"{self.id} is {state}, and ended or not"
        is_fetched = state in ENDED and record.fetched_at is not None and record.result is not None
        assert (self.id in at.fetched) == is_fetched, f"{self.id} was fetched, or not"
        assert (self.group is not None) >= (state in AT_WORK), f"{self.id} is {state} nowhere"
        assert self.group is None or state in (*AT_WORK, "exporting", "ending"), f"{self.id} is {state} somewhere"
        assert self.group is None or at.at_group[self.group].get(self.id) is self, f"{self.id} isn't at its group"
        assert self._arriving is None or state in AT_WORK, f"{self.id} is {state}, and a file comes"
        assert state != "taking" or self._arriving is not None, f"{self.id} waits for nothing"
        assert (state == "unstored") == (self.unstored is not None), (
            f"{self.id} is {state}, and its result waits or not"
        )
        assert (state == "unstored") == (self.id in at.unstored), f"{self.id} is {state}, and tries again or not"
        ends = ("rejoining", "stopping", "taking", "exporting", "ending", *ENDED)
        assert not record.is_cancelled or state in ends, f"{self.id} is {state}, and was cancelled"
        assert state not in ENDED or record.standing == state, f"{self.id} is {state}, its record {record.standing}"
        assert (state == "ending" or state in ENDED) == (record.standing in ENDED), f"{self.id} has ended, or not"
        assert state not in AT_WORK or record.standing == "running", f"{self.id} is {state}, its record isn't"
        assert record.standing not in ENDED or not self.files, f"{self.id} has ended, and keeps files"
        is_lost = state == "queued" and record.standing == "running"
        assert not is_lost or self._lost, f"{self.id} has lost its workers, and nobody knows why"
        assert not self.request.files or state == "checking", f"{self.id} was checked, and keeps files"
        held = [*self.request.files, *self.kept]
        if state == "exporting" and self._result is not None:
            held.append(self._result)
        return Counter(stored.file for stored in held)

    # --- what handlers share -------------------------------------------------------------------------------------------

    def _moved(self, before: State) -> None:
        """Keep queue, limits and news in step with the state."""
        at, state = self._at, self.state
        self.phase = PHASES.get(state, self.phase)
        at.changed[self.id] = None
        if state == before:
            return
        if before == "unstored":
            at.unstored.drop(self.id)
            self.unstored = None
        is_queued = self.id in at.queue
        if state == "queued" and not is_queued:
            self._enter_queue(again=True)
        elif is_queued and state in ("preparing", "running"):
            at.queue.start(self.id)
        elif is_queued and state != "queued":
            at.queue.remove(self.id)
        if before in WAITING and state not in WAITING:
            at.end_waiting(self.record.client)
        elif state in WAITING and before not in WAITING:
            at.begin_waiting(self.record.client)

    def _enter_queue(self, *, again: bool) -> None:
        record = self.record
        place = Place(self.id, record.number, record.client, record.priority, record.kind)
        self._at.queue.add(place, again=again)
        self._at.desk.is_job_due = True

    def _remember(self) -> None:
        """Keep it for a while."""
        self._at.ended[self.id] = self
        if self.record.fetched_at is not None and self.record.result is not None:
            self._at.fetched[self.id] = self

    def _join(self, group: Group, *, is_over: bool = False) -> None:
        """A group has it; where its attempt is over, the group may have another one as well."""
        self.group = group
        self._at.enter(group, self)
        if not is_over or not group.job:
            group.job = self.id

    def _leave(self) -> None:
        """No group has it any more."""
        if self.group is not None:
            self._at.leave(self.group, self)
            self.group = None

    def _tell_leader(self, message: m.ForgetJob | m.StopJob | m.CheckpointKept) -> None:
        leader = None if self.group is None else self.group.ranks.get(0)
        if leader is not None:
            self._at.desk.send(leader, message)

    def _tell_kept(self) -> None:
        """From which step a later attempt would go on: as long as its leader doesn't know that, it doesn't leave."""
        self._tell_leader(m.CheckpointKept(self.id, self.record.attempt, self._kept_step))

    def _next(self, attempt: int) -> JobRecord:
        """Its record when an attempt is begun: the one before, if nobody has said that it is over, is lost for good now."""
        record = self.record
        is_lost = record.standing == "running" and attempt > record.attempt
        return replace(record, standing="running", attempt=attempt, losses=record.losses + is_lost)

    def _wait_again(self, lost: str = "") -> None:
        """Wait for a group, where it was before in the queue; `lost`: why its workers seem lost, who may yet come back."""
        if not lost:
            self.record = replace(self.record, standing="queued")
            self._at.persist(self.id, self.record)
        self._lost = lost
        self.state = "queued"
        self.pace = StepPace()

    def _take(self, arriving: Arriving) -> bool:
        """Have a file come; whether that is clear. False: there is no room for it."""
        at, offer = self._at, arriving.offer
        self._drop_arriving()
        indexed = at.store.find(offer.file)
        if indexed is not None and indexed.nbytes == offer.nbytes:
            at.store.hold(offer.file, offer.nbytes)
            self._arriving = arriving
            self._take_in(None)
            return True
        leader = None if self.group is None else self.group.ranks.get(0)
        if leader is None or not self._quota.make_room(offer.nbytes, arriving.role):
            return False
        self._arriving = arriving

        def grant(first: int, below: int) -> None:
            at.desk.send(leader, m.WantFile(offer.file, first, below))

        what = offer.file, offer.nbytes
        arriving.taker = at.incoming.begin((leader, offer.file), what, "job", grant, self._file_came)
        if arriving.role == "result":
            self.state = "taking"
        return True

    def _cannot_take(self, arriving: Arriving, why: str, waits_for: str) -> None:
        """Leave a result with its leader, and try again; without it the job ends if somebody wants that anyway."""
        at = self._at
        if self.record.is_cancelled:
            self._end("cancelled")
            return
        at.unstored.set(self.id, at.desk.now + at.config.retry_after_s)
        self.unstored, self.unstored_for = arriving, waits_for
        if self.state != "unstored":
            self.state = "unstored"
            at.desk.log("warning", "result_not_taken", job=self.id, nbytes=arriving.offer.nbytes, reason=why)

    @abstractmethod
    def _take_in(self, failure: Failure | None) -> None:
        """The file that was to come is there, or isn't."""

    def _drop_arriving(self) -> None:
        """No file is waited for."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving.taker is not None:
            self._at.incoming.drop(arriving.taker)

    def _end(self, standing: Standing, failure: Failure | None = None) -> None:
        """Make the end durable; nothing of what its workers needed is kept."""
        self._drop_arriving()
        self._at.outgoing.end_job(self.id, "the job has ended")
        files = self.files
        self.record = replace(
            self.record,
            standing=standing,
            media={},
            checkpoint=None,
            checkpoint_step=-1,
            result=self._result if standing == "succeeded" else None,
            failure=failure,
            ended_at=self._at.wall,
        )
        self._result = None
        self.state = "ending"
        self._at.persist(self.id, self.record, without=files, then=self._committed)

    def _forget(self, why: str) -> tuple[StoredFile, ...]:
        """Be in no table any more; what its record refers to, until that is struck out."""
        at = self._at
        at.news.forget(self)
        self.state = "forgotten"
        del at.jobs[self.id], at.keys[self.record.key], at.ended[self.id]
        at.fetched.pop(self.id, None)
        at.outgoing.end_job(self.id, f"there is no such job any more: {why}")
        at.desk.log("info", "job_forgotten", job=self.id, reason=why)
        return self.kept

    def _answer(self, asked: t.CancelAsked) -> None:
        """Say where it stands."""
        self._at.desk.send(asked.peer, m.Jobs(asked.request, (info_of(self._at, self),), 1))

    def _refuse(self, counter: str) -> None:
        self._at.desk.count(counter, job=self.id, state=self.state)

    def _committed(self) -> None:
        self.handle(t.Committed())

    def _file_came(self, failure: Failure | None) -> None:
        self.handle(t.FileTaken(failure))

    def _exported(self, event: FileEvent) -> None:
        assert isinstance(event, FileDone), "a result was written, and something else is said"
        self.handle(t.Exported(event.failure))
