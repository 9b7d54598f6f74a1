"""The jobs of a client: what it submits, watches and fetches, and what the broker says of that. Pure.

A submission, a watch and the fetching of a result outlive the connection: what must be known is said again over the next
one (`attached`), and nothing else of the old one counts. That does no harm: files are named by their content, jobs by the
client's key, parts by their number.

::

    submission: file 0 .. file n-1 (BeginUpload, parts below the grant, UploadStored) --SubmitJob--> JobAccepted
    watch:      WatchJob --JobChanged ...--> the job's end
    fetch:      FetchResult (parts below ...) --ResultPart--> taken --FetchResult (parts below more)--> ... the last part
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from . import client_events as e
from . import messages as m
from .client_desk import Desk
from .client_view import RETRY_AFTER_S
from .errors import BrokerUnreachable, JobError, OverloadError, ReelwireError, RequestError, WireError
from .job_parts import FILE_PART_BYTES, parts_of
from .messages import Failure, JobInfo
from .tensors import Inline, TensorRef, inline_buffer

JOB_ENDED = frozenset({"succeeded", "failed", "cancelled"})
FETCH_PARTS_MAX = 4
"""Parts of one result that may be on their way and not taken yet."""
FETCHES_MAX = 4
UPLOADING_MAX = 4
"""Results that are fetched, and submissions whose files are uploaded, at once; others wait for their turn."""

JobAnswer = (
    m.UploadGrant
    | m.UploadStored
    | m.UploadRefused
    | m.JobAccepted
    | m.JobRefused
    | m.Jobs
    | m.JobChanged
    | m.ResultPart
)


@dataclass(slots=True)
class Submission:
    """A job that is to be.

    Attributes:
        call: who waits for it.
        request: what is sent in the end.
        files: what is uploaded before.
        is_begun: something was said of it over this connection.
        is_repeated: something was said of it over another one.
        is_parked: it was refused because nobody does its kind; somebody did when it was first said.
        place: the file that is uploaded now; when there is none left, the request was sent.
        granted: parts of that below it may be sent.
        sent: parts of that below it were.
    """

    call: int
    request: m.SubmitJob
    files: tuple[e.UploadFile, ...]
    is_begun: bool = False
    is_repeated: bool = False
    is_parked: bool = False
    place: int = 0
    granted: int = 0
    sent: int = 0

    @property
    def upload(self) -> str:
        """What the broker is told that the file is called; empty when none is uploaded."""
        return f"{self.call}.{self.place}" if self.is_begun and self.place < len(self.files) else ""

    @property
    def stored(self) -> tuple[e.UploadFile, ...]:
        """The files that the broker keeps for it."""
        return self.files[: self.place] if self.is_begun else ()

    @property
    def is_submitted(self) -> bool:
        """Whether the request was sent over this connection."""
        return self.is_begun and self.place == len(self.files)


@dataclass(slots=True)
class Watch:
    """A job that somebody watches: the calls that wait for its end, and the one of them that has asked for it."""

    job: str
    calls: list[int]
    asked: int = 0
    info: JobInfo | None = None


@dataclass(slots=True)
class Fetch:
    """A result on its way: parts below `have` came, below `taken` the application has them, below `asked` they may come."""

    call: int
    job: str
    nbytes: int
    is_begun: bool = False
    first: int = 0
    asked: int = 0
    have: int = 0
    waiting: deque[bytes | memoryview] = field(default_factory=deque)

    @property
    def parts(self) -> int:
        """In how many parts it comes."""
        return parts_of(self.nbytes)

    @property
    def taken(self) -> int:
        """How many of them the application has."""
        return self.have - len(self.waiting)


class Jobs:
    """All that is under way over one client.

    Args:
        desk: takes actions and answers.

    Attributes:
        submissions: by their call.
        watches: by the job's id.
        fetches: by their call.
    """

    def __init__(self, desk: Desk) -> None:
        """Start without any."""
        self.submissions: dict[int, Submission] = {}
        self.watches: dict[str, Watch] = {}
        self.fetches: dict[int, Fetch] = {}
        self._desk = desk
        self._asking: dict[int, Watch] = {}
        self._spare: Counter[str] = Counter()  # what the broker keeps of submissions that no job has come of
        self._kinds: frozenset[str] = frozenset()
        self._is_attached = False

    def outlives(self, call: int) -> bool:
        """Whether a call goes on when the connection is lost."""
        watched = any(call in watch.calls for watch in self.watches.values())
        return watched or call in self.submissions or call in self.fetches

    def wanted(self, call: int) -> tuple[int, int] | None:
        """What a submission wants to have supplied now: which of its files, and which part of that; None: nothing."""
        sub = self.submissions.get(call)
        if sub is None or sub.sent >= sub.granted:
            return None
        return sub.place, sub.sent

    def is_parked(self, call: int) -> bool:
        """Whether a submission waits for a worker that does its kind to come back."""
        sub = self.submissions.get(call)
        return sub is not None and sub.is_parked

    def info(self, job: str) -> JobInfo | None:
        """What is known of a job that is watched."""
        watch = self.watches.get(job)
        return None if watch is None else watch.info

    # --- connection ----------------------------------------------------------------------------------------------------

    def attached(self, kinds: Iterable[str]) -> None:
        """There is a connection, over which nothing was said yet; it knows jobs of these kinds."""
        self._is_attached = True
        for watch in self.watches.values():
            self._ask(watch)
        self.welcomed(kinds)
        self._go_on()

    def welcomed(self, kinds: Iterable[str]) -> None:
        """There are jobs of these kinds now."""
        self._kinds = frozenset(kinds)
        for sub in self.submissions.values():
            if sub.is_parked and sub.request.kind in self._kinds:
                sub.is_parked = False
                self._desk.send(sub.request)

    def lost(self) -> None:
        """The connection is gone: files that no job needs are gone with it, and so is what was on its way."""
        self._is_attached = False
        self._asking.clear()
        self._spare.clear()
        for sub in self.submissions.values():
            sub.is_repeated = sub.is_repeated or sub.is_begun
            sub.is_begun = sub.is_parked = False
            sub.place = sub.granted = sub.sent = 0
        for fetch in self.fetches.values():
            fetch.is_begun = False
            fetch.asked = fetch.have

    def end_all(self) -> None:
        """The client is gone; the core answers the calls."""
        self.lost()
        self.submissions.clear()
        self.watches.clear()
        self.fetches.clear()

    def check(self) -> None:
        """Assert what must hold between any two events."""
        for call, sub in self.submissions.items():
            assert call in self._desk.calls
            assert 0 <= sub.sent <= sub.granted
            assert self._is_attached or not sub.is_begun
            assert sub.is_begun or not sub.granted
            assert sub.is_submitted or not sub.is_parked
        assert sum(sub.is_begun and bool(sub.files) for sub in self.submissions.values()) <= UPLOADING_MAX
        assert sum(fetch.is_begun for fetch in self.fetches.values()) <= FETCHES_MAX
        for watch in self.watches.values():
            assert watch.calls
            assert all(call in self._desk.calls for call in watch.calls)
            assert watch.info is None or watch.info.state not in JOB_ENDED
        for call, fetch in self.fetches.items():
            assert call in self._desk.calls
            assert 0 <= fetch.taken <= fetch.have <= fetch.asked <= fetch.parts
            assert fetch.asked - fetch.taken <= FETCH_PARTS_MAX
            assert self._is_attached or not fetch.is_begun
        assert all(self.watches.get(watch.job) is watch for watch in self._asking.values())

    # --- what the application asks -------------------------------------------------------------------------------------

    def asked(self, event: e.JobEvent) -> None:
        """The application asks for something, or supplies a part."""
        match event:
            case e.SubmitJob():
                self.submissions[event.call] = Submission(event.call, event.request, event.files)
                self._go_on()
            case e.SupplyPart():
                self._supply(event)
            case e.WatchJob():
                self._watch(event)
            case e.FetchResult():
                self.fetches[event.call] = Fetch(event.call, event.job, event.nbytes)
                self._go_on()
            case e.TakePart():
                self._take(event.call)
            case _:
                assert_never(event)

    def withdraw(self, call: int) -> None:
        """Nobody waits any more for what was asked; a job that was submitted lives on."""
        sub = self.submissions.pop(call, None)
        if sub is not None and not sub.is_submitted:
            self._spare.update(file.sha256 for file in sub.stored)
        self._end_fetch(call)
        self._go_on()
        for watch in self.watches.values():
            if call in watch.calls:
                watch.calls.remove(call)
                if not watch.calls:
                    self._end_watch(watch)
                return

    def _go_on(self) -> None:
        """Begin what waits for its turn, oldest first."""
        if not self._is_attached:
            return
        uploading = sum(sub.is_begun and bool(sub.files) for sub in self.submissions.values())
        for sub in self.submissions.values():
            if not sub.is_begun and (not sub.files or uploading < UPLOADING_MAX):
                uploading += bool(sub.files)
                sub.is_begun = True
                self._upload(sub)
        while sum(fetch.is_begun for fetch in self.fetches.values()) < FETCHES_MAX:
            waiting = next((fetch for fetch in self.fetches.values() if not fetch.is_begun), None)
            if waiting is None:
                return
            self._fetch(waiting)

    def _upload(self, sub: Submission) -> None:
        """Upload the next file that the broker hasn't, or submit when all are there."""
        sub.granted = sub.sent = 0
        while sub.upload and self._spare[sub.files[sub.place].sha256]:
            self._spare[sub.files[sub.place].sha256] -= 1
            sub.place += 1
        if sub.upload:
            file = sub.files[sub.place]
            self._desk.send(m.BeginUpload(sub.upload, file.field, file.nbytes, file.sha256))
        else:
            self._desk.send(sub.request)

    def _supply(self, event: e.SupplyPart) -> None:
        if self.wanted(event.call) != (event.place, event.index):
            return
        sub = self.submissions[event.call]
        sub.sent += 1
        data = TensorRef("uint8", (len(event.data),), Inline(event.data))
        self._desk.send(m.UploadPart(sub.upload, event.index, data))

    def _watch(self, event: e.WatchJob) -> None:
        watch = self.watches.get(event.job)
        if watch is not None:
            watch.calls.append(event.call)
            return
        watch = self.watches[event.job] = Watch(event.job, [event.call])
        if self._is_attached:
            self._ask(watch)

    def _ask(self, watch: Watch) -> None:
        """Ask to be told of a job."""
        watch.asked = watch.calls[0]
        self._asking[watch.asked] = watch
        self._desk.send(m.WatchJob(watch.job, request=watch.asked))

    def _end_watch(self, watch: Watch) -> None:
        del self.watches[watch.job]
        self._asking.pop(watch.asked, None)
        if self._is_attached:
            self._desk.send(m.WatchJob(watch.job, on=False))

    def _fetch(self, fetch: Fetch) -> None:
        """Begin with the first part that isn't there, in a connection over which nothing of it was asked for."""
        fetch.is_begun, fetch.first = True, fetch.have
        fetch.asked = max(fetch.have, min(fetch.taken + FETCH_PARTS_MAX, fetch.parts))
        if fetch.have < fetch.parts:
            self._desk.send(m.FetchResult(fetch.call, fetch.job, fetch.first, fetch.asked))
        elif not fetch.waiting:
            self._fetched(fetch)

    def _take(self, call: int) -> None:
        fetch = self.fetches.get(call)
        if fetch is None or not fetch.waiting:
            return
        self._desk.act(e.Part(fetch.waiting.popleft()))
        asked = min(fetch.taken + FETCH_PARTS_MAX, fetch.parts)
        if fetch.taken == fetch.parts:
            self._fetched(fetch)
        elif fetch.is_begun and asked > fetch.asked:
            fetch.asked = asked
            self._desk.send(m.FetchResult(call, fetch.job, fetch.first, asked))

    def _fetched(self, fetch: Fetch) -> None:
        del self.fetches[fetch.call]
        if self._is_attached:
            self._desk.send(m.FetchResult(fetch.call, fetch.job, fetch.parts, 0))
        self._desk.done(fetch.call)
        self._go_on()

    def _end_fetch(self, call: int) -> None:
        """Have the broker send no more of a result: it would keep room for that."""
        fetch = self.fetches.pop(call, None)
        if fetch is not None and fetch.is_begun and fetch.have < fetch.parts:
            self._desk.send(m.FetchResult(call, fetch.job, fetch.first, 0))

    # --- what the broker says ------------------------------------------------------------------------------------------

    def said(self, message: JobAnswer) -> None:
        """Something about jobs or their files."""
        match message:
            case m.UploadGrant() | m.UploadStored() | m.UploadRefused():
                self._upload_said(message)
            case m.JobAccepted(key=key, job=job):
                for sub in self._submitted(key):
                    del self.submissions[sub.call]  # its files are the job's from now on
                    self._desk.done(sub.call, value=job)
                self._go_on()
            case m.JobRefused(failure=failure, key=key) if key:
                for sub in self._submitted(key):
                    self._refused(sub, failure)
                self._go_on()
            case m.JobRefused(request=request, failure=failure):
                self._not_answered(request, failure)
            case m.Jobs(request=request):
                self._desk.done(request, value=message)
            case m.JobChanged(job=job):
                self._changed(job)
            case m.ResultPart():
                self._part(message)
            case _:
                assert_never(message)

    def _upload_said(self, message: m.UploadGrant | m.UploadStored | m.UploadRefused) -> None:
        sub = next((sub for sub in self.submissions.values() if sub.upload == message.upload), None)
        if sub is None or not message.upload:
            self._desk.drop("unknown upload")
        elif isinstance(message, m.UploadGrant):
            sub.granted = max(sub.granted, min(message.parts, parts_of(sub.files[sub.place].nbytes)))
            self._desk.act(e.Changed(e.news_of_call(sub.call)))
        elif isinstance(message, m.UploadStored):
            sub.place += 1
            self._upload(sub)
        else:
            self._spare.update(file.sha256 for file in sub.stored)
            del self.submissions[sub.call]
            self._desk.done(sub.call, error=refusal_of(message.failure))
            self._go_on()

    def _refused(self, sub: Submission, failure: Failure) -> None:
        lacks_workers = failure.kind == "request" and failure.field == "kind" and sub.request.kind not in self._kinds
        if sub.is_repeated and lacks_workers:  # they come back to a broker that begins anew after their clients
            sub.is_parked = True
            self._desk.act(e.Changed(e.news_of_call(sub.call)))
            return
        # The broker may have needed the room of the one that it names: whoever asks anew uploads that again.
        self._spare.update(file.sha256 for file in sub.stored if file.field != failure.field)
        del self.submissions[sub.call]
        self._desk.done(sub.call, error=refusal_of(failure))

    def _submitted(self, key: str) -> list[Submission]:
        found = [sub for sub in self.submissions.values() if sub.request.key == key and sub.is_submitted]
        if not found:
            self._desk.drop("unknown job")
        return found

    def _changed(self, job: JobInfo) -> None:
        watch = self.watches.get(job.job)
        if watch is None:
            self._desk.drop("unknown job")
            return
        self._asking.pop(watch.asked, None)
        if job.state in JOB_ENDED:
            self._end_watch(watch)
            for call in watch.calls:
                self._desk.done(call, value=job)
        else:
            watch.info = job
        self._desk.act(e.Changed(e.news_of_job(job.job)))

    def _not_answered(self, request: int, failure: Failure) -> None:
        watch = self._asking.get(request)
        if watch is not None:
            self._end_watch(watch)
        self.fetches.pop(request, None)  # the broker has ended it
        self._go_on()
        for call in [request] if watch is None else watch.calls:
            self._desk.done(call, error=no_answer_of(failure))

    def _part(self, message: m.ResultPart) -> None:
        fetch = self.fetches.get(message.request)
        if fetch is None or message.index < fetch.have:
            self._desk.drop("part out of order")
            return
        fault = _fault_of(message, fetch)
        if fault:
            self._end_fetch(fetch.call)
            self._go_on()
            self._desk.done(fetch.call, error=WireError(f"the result of job {fetch.job} can't be fetched: {fault}"))
            return
        fetch.have += 1
        fetch.waiting.append(inline_buffer(message.data))
        self._desk.act(e.Changed(e.news_of_call(fetch.call)))


def refusal_of(failure: Failure) -> ReelwireError:
    """What is raised when a job, or a file of it, isn't taken."""
    match failure.kind:
        case "request":
            return RequestError(failure.field or "request", failure.message)
        case "overload":
            retry = failure.retry_after_s
            return OverloadError(failure.message, RETRY_AFTER_S if retry is None else retry)
        case "shutdown" | "unreachable":
            return BrokerUnreachable(failure.message)
        case _:
            return JobError(failure.message)


def no_answer_of(failure: Failure) -> ReelwireError:
    """What is raised when a question about a job isn't answered: what it can't be asked is no field of a request."""
    return JobError(failure.message) if failure.kind == "request" else refusal_of(failure)


def _fault_of(message: m.ResultPart, fetch: Fetch) -> str:
    """What is wrong with a part; empty when nothing is."""
    ref = message.data
    if message.index != fetch.have or message.index >= fetch.asked:
        return f"part {message.index} came where {fetch.have} was to come, below {fetch.asked}"
    size = min(FILE_PART_BYTES, fetch.nbytes - message.index * FILE_PART_BYTES)
    if not isinstance(ref.place, Inline) or (ref.dtype, ref.shape) != ("uint8", (size,)):
        return f"part {message.index} is {ref.dtype}{list(ref.shape)}, not uint8[{size}]"
    return ""
