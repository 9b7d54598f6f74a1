"""The jobs of a broker: who says what of them, and when something is due. Pure, as the rest of the core.

`Jobs` takes in what clients and workers say, what comes of the journal and the store, and the beginning and end of groups,
and hands it to whom it belongs:

    job_admission  requests, until they are accepted or refused      job_queue     in which order jobs start
    job            one job: its life, as the table of `job_states`   job_quota     what is kept, and what makes room
    job_uploads    files of clients                                  job_news      what clients are told
    job_incoming   files that come in parts                          job_outgoing  files that go out in parts
    job_files      which files of the store are needed               job_desk      what all of these share
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

from reelwire import messages as m
from reelwire.checks import shown
from reelwire.job_parts import parts_of
from reelwire.messages import Failure, HeldJob
from reelwire.spec import Plain
from reelwire.tensors import Inline, TensorRef

from .desk import Desk, shortened
from .events import FileDone, PartRead, PartStored, Received
from .groups import Group, Groups
from .job import Job
from .job_admission import Admission
from .job_base import JobBase
from .job_desk import JobDesk
from .job_news import info_of, rows_of
from .job_outgoing import Sending
from .job_quota import Quota
from .job_record import Saved, StoredFile
from .job_states import (
    Adopted,
    Begun,
    CancelAsked,
    DeleteAsked,
    Fetched,
    GroupLost,
    LeaderAway,
    NotHeld,
    State,
    TakeDue,
)
from .job_uploads import Uploads
from .peers import Peer

FETCHES_PER_CLIENT_MAX = 4
Hears = Callable[[Peer, Received], None]


class Jobs:
    """All jobs that a broker remembers.

    Args:
        desk: of the core.
        groups: the worker groups.
        saved: what former brokers left.
        wall_s: seconds since 1970 when the desk's time is 0.
    """

    def __init__(self, desk: Desk, groups: Groups, saved: Saved, wall_s: float) -> None:
        """Go on where the last broker was."""
        self._desk = desk
        at = self._at = JobDesk(desk, groups, saved, wall_s)
        self._quota = Quota(at)
        self._uploads = Uploads(at, self._quota)
        self._admission = Admission(at, self._quota, self._uploads)
        # What a leader has been told to end, and nobody else has: it occupies the group until it has ended.
        self._unwanted: dict[Group, tuple[str, int]] = {}
        self._awaited: dict[Group, list[JobBase]] = {}
        self._rejoin_by: float | None = None
        self._has_begun = not saved.records
        for record in sorted(saved.records, key=lambda record: record.number):
            state: State = "rejoining" if record.standing == "running" else record.standing
            Job(at, self._quota, record, state)
        for job in sorted(at.ended.values(), key=lambda job: job.ended_now):
            at.ended.move_to_end(job.id)
        for job in sorted(at.fetched.values(), key=lambda job: job.record.fetched_at or 0.0):
            at.fetched.move_to_end(job.id)
        self._hears = self._heard()

    # --- what happens --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Accept and begin nothing new."""
        self._at.draining = True
        for job in self._at.queue:  # who watches them is told
            self._at.changed[job] = None

    def hear(self, peer: Peer, event: Received) -> None:
        """A client or a worker says something about jobs or their files."""
        if not peer.gone:
            self._hears[type(event.message)](peer, event)

    def stored(self, ticket: int) -> None:
        """The journal has written all that it was told up to a ticket."""
        self._at.stored(ticket)

    def store_stalled(self, reason: str) -> None:
        """The journal can't be written for the moment: what would have to be is refused; empty: it can be again."""
        self._at.stalled = shortened(reason)
        self._desk.log("error" if reason else "info", "store_stalled" if reason else "store_goes_on", reason=reason)

    def file(self, event: PartStored | FileDone | PartRead) -> None:
        """The store says something."""
        self._at.store.answered(event)

    def group_over(self, group: Group, reason: str) -> None:
        """A group is no more: what it had is done by another one."""
        self._unwanted.pop(group, None)
        was_asked = any(peer.draining for peer in group.ranks.values())
        for job in [*self._at.at_group.get(group, {}).values(), *self._pop_awaited(group)]:
            job.handle(GroupLost(reason, was_asked))
        for peer in group.ranks.values():
            self._at.outgoing.end_all(peer)

    def leader_away(self, group: Group, leader: Peer) -> None:
        """A group waits for its leader: what it has is known when that is back and says so; see `held`."""
        unwanted = self._unwanted.pop(group, None)
        if unwanted is not None:
            self._at.free(group, unwanted[0])
        jobs = list(self._at.at_group.get(group, {}).values())
        for job in jobs:
            job.handle(LeaderAway())
        self._awaited[group] = [*self._pop_awaited(group), *jobs]
        self._at.outgoing.end_all(leader)

    def _pop_awaited(self, group: Group) -> list[JobBase]:
        """The jobs that a group had when its leader was lost from sight; from now on they aren't waited for."""
        return [job for job in self._awaited.pop(group, []) if job.state == "rejoining"]

    def held(self, group: Group, jobs: tuple[HeldJob, ...]) -> None:
        """A group that comes has jobs already: it goes on with what nobody else does, and lets go of the rest.

        What it had before its leader was lost from sight, and hasn't any more, is done again.
        """
        for held in sorted(jobs, key=lambda held: held.ended):  # what it works at first: that occupies it
            job = self._at.jobs.get(held.job)
            if job is not None and self._is_wanted(group, job, held):
                job.handle(Adopted(group, held.attempt, held.ended))
            elif held.ended:
                self._forget_at(group, held.job, held.attempt)
            else:
                self._end_at(group, held.job, held.attempt)
        for missed in self._pop_awaited(group):
            missed.handle(NotHeld())

    def client_gone(self, peer: Peer) -> None:
        """A client is gone: its jobs go on without it."""
        self._uploads.gone(peer)
        self._at.news.gone(peer)
        self._at.outgoing.end_all(peer)

    def assign(self) -> None:
        """Let every group that is free begin the first job that it can do."""
        if self._at.draining or not self._at.queue:
            return
        for group in self._at.groups.formed():
            kinds = {spec.name for spec in group.jobs}
            while group.takes_jobs:
                first = self._at.queue.first(kinds)
                if first is None:
                    break
                self._at.jobs[first].handle(Begun(group))

    def tell(self) -> None:
        """At the end of a turn: tell those that watch what has changed."""
        self._at.news.tell()

    @property
    def wake_at(self) -> float | None:
        """When `due` or `tell` has something to do, in seconds; None when there is no such time."""
        at = self._at
        if not self._has_begun:
            return self._desk.now
        times = (self._rejoin_by, self._quota.wake_at, at.incoming.next_at, at.news.wake_at, at.unstored.next_at)
        return min((each for each in times if each is not None), default=None)

    def due(self, now: float) -> None:
        """Do what it is time for."""
        if not self._has_begun:
            self._begin(now)
        if self._rejoin_by is not None and self._rejoin_by <= now:
            self._rejoin_by = None
            awaited = {job for jobs in self._awaited.values() for job in jobs}
            for job in [job for job in self._at.jobs.values() if job.state == "rejoining" and job not in awaited]:
                rejoin_s = self._desk.config.rejoin_s
                job.handle(GroupLost(f"nobody had it {rejoin_s:g} s after the broker was started anew"))
        self._quota.due(now)
        self._at.incoming.due(now)
        while (waiting := self._at.unstored.pop_due(now)) is not None:
            self._at.jobs[waiting].handle(TakeDue())

    def status(self) -> dict[str, Plain]:
        """What there is, as plain data."""
        at = self._at
        states = Counter(job.phase for job in at.jobs.values())
        return {
            "states": {str(phase): count for phase, count in states.items()},
            "checking": self._admission.checking,
            "running": rows_of(at),
            "files": len(at.store),
            "files_bytes": at.store.nbytes,
            "files_bytes_max": at.config.state_bytes_max,
            "files_coming": len(at.incoming),
            "uncommitted": at.uncommitted,
            "stalled": at.stalled,
            "job_s": at.job_s,
        }

    def check(self) -> None:
        """Assert every invariant; takes time in proportion to what there is."""
        at = self._at
        at.queue.check()
        at.outgoing.check()
        at.unstored.check()
        at.news.check()
        self._admission.check()
        held = Counter({file: count for file, count in at.leaving.items() if count})
        for key, job in at.keys.items():
            assert job.record.key == key, "a job under another key"
            is_known = job.state not in ("checking", "committing")
            assert (at.jobs.get(job.id) is job) == is_known, f"{job.id} is known too early, or not at all"
            held.update(job.check())
        assert len(at.jobs) <= len(at.keys), "a job without a key"
        at.store.check(held, self._uploads.check(), at.incoming.check())
        waiting = Counter(job.record.client for job in at.keys.values() if job.state in ("checking", "committing"))
        waiting.update(at.jobs[job].record.client for job in at.queue)
        assert waiting == at.waiting, "jobs that wait don't add up"
        assert at.waiting_total == waiting.total(), "jobs that wait don't add up"
        for group, jobs in at.at_group.items():
            assert group.state != "over", f"{group.name} is over, and has jobs"
            assert jobs, f"{group.name} has no jobs"
            assert all(job.group is group for job in jobs.values()), f"{group.name} has somebody else's job"
        for group in at.groups.by_name.values():
            own = {*at.at_group.get(group, ()), *(job for job, _ in [self._unwanted.get(group, ("", 0))])}
            assert group.job in {"", *own}, f"{group.name} works at {group.job}, which it hasn't"
        assert all(group.state != "over" and group.job == job for group, (job, _) in self._unwanted.items()), "unwanted"
        ends = [job.ended_now for job in at.ended.values()]
        assert ends == sorted(ends), "ended jobs are out of order"
        waits = self._rejoin_by is not None or not self._has_begun
        awaited = {job for jobs in self._awaited.values() for job in jobs}
        rejoining = {job for job in at.jobs.values() if job.state == "rejoining"}
        assert waits or rejoining <= awaited, "a job is waited for without an end"
        assert all(group.state == "waiting" for group in self._awaited), "a group that is here is waited for"

    def _begin(self, now: float) -> None:
        """It is known what time it is: groups that have jobs are waited for from now on, and no job ended later than now.

        What was cancelled waits for nobody: a leader that has it yet is told to stop when it comes.
        """
        self._has_begun = True
        for job in [job for job in self._at.jobs.values() if job.state == "rejoining" and job.record.is_cancelled]:
            job.handle(GroupLost("it was cancelled, and the broker was started anew"))
        if any(job.state == "rejoining" for job in self._at.jobs.values()):
            self._rejoin_by = now + self._desk.config.rejoin_s
        for job in self._at.ended.values():
            job.ended_now = min(job.ended_now, now)

    # --- what clients say ----------------------------------------------------------------------------------------------

    def _heard(self) -> dict[type, Hears]:
        """Where each message is heard."""
        return {
            m.BeginUpload: self._begin_upload,
            m.UploadPart: self._upload_part,
            m.SubmitJob: self._submit,
            m.AskJobs: self._ask,
            m.WatchJob: self._watch,
            m.CancelJob: self._cancel,
            m.DeleteJob: self._delete,
            m.FetchResult: self._fetch,
            m.JobProgress: self._worker_says,
            m.JobFile: self._worker_says,
            m.JobEnded: self._worker_says,
            m.FilePart: self._file_part,
            m.FileGone: self._file_gone,
            m.WantFile: self._want_file,
        }

    def _begin_upload(self, peer: Peer, event: Received) -> None:
        assert isinstance(event.message, m.BeginUpload)
        self._uploads.begin(peer, event.message)

    def _upload_part(self, peer: Peer, event: Received) -> None:
        assert isinstance(event.message, m.UploadPart)
        self._uploads.part(peer, event.message)

    def _submit(self, peer: Peer, event: Received) -> None:
        self._admission.submit(peer, event)

    def _ask(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.AskJobs)
        if not message.job:
            self._at.news.list_for(peer, message.request)
            return
        job = self._job(peer, message.job, message.request)
        if job is not None:
            self._desk.send(peer, m.Jobs(message.request, (info_of(self._at, job),), 1))

    def _watch(self, peer: Peer, event: Received) -> None:
        message, news = event.message, self._at.news
        assert isinstance(message, m.WatchJob)
        if not message.on:
            news.unwatch(peer, message.job)
            return
        job = self._job(peer, message.job, message.request)
        full = None if job is None else news.watch(peer, job)
        if full is not None:
            self._desk.count("watches_refused", peer=peer.name, job=message.job)
            self._desk.send(peer, m.JobRefused(full, request=message.request))

    def _cancel(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.CancelJob)
        job = self._job(peer, message.job, message.request)
        if job is not None:
            job.handle(CancelAsked(peer, message.request))

    def _delete(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.DeleteJob)
        job = self._job(peer, message.job, message.request)
        if job is not None:
            job.handle(DeleteAsked(peer, message.request))

    def _fetch(self, peer: Peer, event: Received) -> None:
        message, outgoing = event.message, self._at.outgoing
        assert isinstance(message, m.FetchResult)
        request = message.request
        if not message.parts:
            outgoing.give_up(peer, request)
            self._close_fetch(message)
            return
        job = self._job(peer, message.job, request)
        if job is None:
            return
        result, sending = job.record.result, outgoing.find(peer, request)
        if job.state != "succeeded":
            self._decline(peer, request, f"{job.id} is {job.phase}; accepted: a job that has succeeded")
        elif result is None:
            self._decline(peer, request, f"the result of {job.id} made room for others")
        elif sending is not None and sending.job != job.id:
            self._decline(peer, request, "the request has another job already", field="request")
        elif sending is None and not 0 <= message.first < parts_of(result.nbytes):
            self._decline(peer, request, f"{message.first} is none of its {parts_of(result.nbytes)} parts", "first")
        elif sending is None and outgoing.count(peer) >= FETCHES_PER_CLIENT_MAX:
            advice = self._at.config.retry_after_s
            full = Failure("overload", "too many results are fetched already", retry_after_s=advice)
            self._desk.send(peer, m.JobRefused(full, request=request))
        else:
            if sending is None:
                outgoing.begin(peer, request, self._result(peer, request, job, result, message.first))
            reason = outgoing.more(peer, request, message.parts)
            if reason:
                outgoing.give_up(peer, request)
                self._decline(peer, request, reason, field="parts")

    def _close_fetch(self, message: m.FetchResult) -> None:
        """A client wants no more parts; what was sent to it may be lost on the way, so it says whether it has all of them."""
        job = self._at.jobs.get(message.job)
        result = job.record.result if job is not None and job.state == "succeeded" else None
        if job is not None and result is not None and message.first == parts_of(result.nbytes):
            job.handle(Fetched())

    def _result(self, peer: Peer, request: int, job: JobBase, result: StoredFile, first: int) -> Sending:
        def send(index: int, data: bytes) -> None:
            self._desk.send(peer, m.ResultPart(request, index, _bytes_ref(data)))

        def over(reason: str) -> None:
            if reason:
                self._decline(peer, request, f"the result of {job.id} can't be had: {reason}")

        return Sending(result, job.id, send, over, next=first)

    def _job(self, peer: Peer, name: str, request: int) -> JobBase | None:
        """The job that a client asks for; None, and the client is told so, when there is none."""
        job = self._at.jobs.get(name)
        if job is None:
            self._decline(peer, request, f"there is no job {shown(name)}, or not any more")
        return job

    def _decline(self, peer: Peer, request: int, reason: str, field: str = "job") -> None:
        failure = Failure("request", shortened(reason), field=field)
        self._desk.send(peer, m.JobRefused(failure, request=request))

    # --- what workers say ----------------------------------------------------------------------------------------------

    def _worker_says(self, peer: Peer, event: Received) -> None:
        """Tell the job, if the one who speaks leads the group that has this attempt at it."""
        message, group = cast("m.JobProgress | m.JobFile | m.JobEnded", event.message), peer.group
        job = self._at.jobs.get(message.job)
        is_its = group is not None and job is not None and job.is_at(group, message.attempt)
        is_here = group is not None and (group.state == "formed" or (group.state == "waiting" and is_its))
        if group is None or peer.rank or not is_here:
            # One that attaches again says where it is before its group is there: that is said again.
            self._desk.count("jobs_of_no_group", peer=peer.name, message=type(message).__name__)
        elif job is None or not job.is_at(group, message.attempt):
            self._fence(group, message)
        else:
            if isinstance(message, m.JobFile) and event.nbytes > self._at.config.control_bytes_max:
                self._desk.count("facts_dropped", peer=peer.name, nbytes=event.nbytes)
                message = m.JobFile(message.job, message.attempt, message.role, message.offer, message.step)
            job.handle(message)

    def _fence(self, group: Group, message: m.JobProgress | m.JobFile | m.JobEnded) -> None:
        """Have a leader let go of what nobody wants from it."""
        self._desk.count("jobs_fenced", group=group.name, job=message.job, message=type(message).__name__)
        is_over = isinstance(message, m.JobEnded) or (isinstance(message, m.JobFile) and message.role == "result")
        if is_over:
            self._forget_at(group, message.job, message.attempt)
            if self._unwanted.get(group) == (message.job, message.attempt):
                del self._unwanted[group]
                self._at.free(group, message.job)
        elif self._unwanted.get(group) != (message.job, message.attempt):
            self._end_at(group, message.job, message.attempt)

    def _forget_at(self, group: Group, job: str, attempt: int) -> None:
        """Have a leader forget an attempt that has ended, unless the job ends with it and that isn't durable yet.

        The leader may have the only result that is safe then. It says again what it has until it is told.
        """
        known = self._at.jobs.get(job)
        if known is None or known.state not in ("exporting", "ending") or attempt < known.record.attempt:
            self._desk.send(group.leader, m.ForgetJob(job, attempt))

    def _end_at(self, group: Group, job: str, attempt: int) -> None:
        """Have a leader end what nobody wants; if it has nothing else it isn't free until it says that it did."""
        self._desk.send(group.leader, m.StopJob(job, attempt))
        if not group.job:
            group.job = job
            self._unwanted[group] = (job, attempt)

    def _is_wanted(self, group: Group, job: JobBase, held: HeldJob) -> bool:
        """Whether what a group holds is the newest attempt of a job that isn't cancelled, and nobody else's.

        The journal may not know of the newest attempts: work was sent before they were durable.
        """
        known, most = job.record.attempt, self._at.config.job_attempts
        if job.record.is_cancelled:
            return False
        is_free = job.state in ("queued", "rejoining") and (held.ended or not group.job)
        return is_free and held.attempt >= 1 and known <= held.attempt <= known + most

    def _file_part(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.FilePart)
        if not self._at.incoming.part(peer, message.file, message.index, message.data):
            self._desk.count("parts_of_no_file", peer=peer.name)

    def _file_gone(self, peer: Peer, event: Received) -> None:
        message = event.message
        assert isinstance(message, m.FileGone)
        if not self._at.incoming.lost(peer, message.file, shortened(message.reason)):
            self._desk.count("parts_of_no_file", peer=peer.name)

    def _want_file(self, peer: Peer, event: Received) -> None:
        """Send a worker the files of the jobs that its group has, and no others."""
        message, outgoing, desk = event.message, self._at.outgoing, self._desk
        assert isinstance(message, m.WantFile)
        name = message.file
        sending = outgoing.find(peer, name)
        if sending is None:
            jobs = self._at.at_group.get(peer.group, {}) if peer.group is not None else {}
            found = [(job, stored) for job in jobs.values() for stored in job.files if stored.file == name]
            if not found or not 0 <= message.first < parts_of(found[0][1].nbytes):
                desk.count("files_refused", peer=peer.name)
                reason = "it is no file of a job of this worker's, or has no such part"
                desk.send(peer, m.FileGone(shortened(name), reason))
                return
            outgoing.begin(peer, name, self._job_file(peer, *found[0], message.first))
        reason = outgoing.more(peer, name, message.parts)
        if reason:
            outgoing.give_up(peer, name)
            desk.send(peer, m.FileGone(name, reason))

    def _job_file(self, peer: Peer, job: JobBase, stored: StoredFile, first: int) -> Sending:
        def send(index: int, data: bytes) -> None:
            self._desk.send(peer, m.FilePart(stored.file, index, _bytes_ref(data)))

        def over(reason: str) -> None:
            if reason:
                self._desk.send(peer, m.FileGone(stored.file, reason))

        return Sending(stored, job.id, send, over, next=first)


def _bytes_ref(data: bytes) -> TensorRef:
    return TensorRef("uint8", (len(data),), Inline(data))
