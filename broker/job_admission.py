"""Checking what a client asks for, before any worker sees it: the request first, then limits, then its files.

The request alone is checked at once. Its files are looked at in the store: whether the result may be written to where it
is wanted, what the files are, and whether they can be opened; of a request one thing after the other. Of all requests one
at a time is at the disk and one is looked into, which may take long: others need the store as well. Clients take turns at
both, so that nobody waits for more than one thing of each other client.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from reelwire import messages as m
from reelwire.checks import shown
from reelwire.errors import RequestError
from reelwire.job_parts import FILE_NAME, PRIORITY_MAX
from reelwire.job_spec import MediaInput, check_job, unknown_kind
from reelwire.messages import Failure, Media
from reelwire.parts import KEY_CHARACTERS_MAX
from reelwire.spec import Plain

from .actions import CheckOutput, ImportFile, InspectFile
from .desk import cut, short
from .events import FileDone, Received
from .job import Job
from .job_base import JobBase
from .job_desk import JobDesk
from .job_files import FileEvent
from .job_news import info_of
from .job_quota import Quota
from .job_record import JobRecord, StoredFile
from .job_repeat import digest, told_apart
from .job_states import Checked, Refused
from .job_uploads import Uploads
from .peers import Peer

PATH_CHARACTERS_MAX = 4096


@dataclass(slots=True, eq=False)
class _File:
    """One file of a request: which input it is for, what a refusal calls it, and where it is in the store, once it is."""

    wanted: MediaInput
    field: str
    asked: Media
    stored: StoredFile | None = None
    is_right: bool = False


@dataclass(slots=True, eq=False)
class _Checking:
    """A request of which something in the store is still to be looked at."""

    job: Job
    files: list[_File]
    is_output_right: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be looked at."""
        return self.is_output_right and all(file.is_right for file in self.files)

    @property
    def next_file(self) -> _File:
        """The file that is to be looked at."""
        return next(file for file in self.files if not file.is_right)

    @property
    def media(self) -> dict[str, tuple[StoredFile, ...]]:
        """All files by the names of their inputs."""
        found: dict[str, tuple[StoredFile, ...]] = {}
        for file in self.files:
            if file.stored is not None:
                found[file.wanted.name] = (*found.get(file.wanted.name, ()), file.stored)
        return found


@dataclass(slots=True, eq=False)
class _Line:
    """Requests that wait for one thing to be done in the store: each client's in order, the clients in turns."""

    active: _Checking | None = None
    clients: dict[str, deque[_Checking]] = field(default_factory=dict)

    def add(self, checking: _Checking) -> None:
        self.clients.setdefault(checking.job.record.client, deque()).append(checking)

    def pop(self) -> _Checking:
        client = next(iter(self.clients))
        waiting = self.clients.pop(client)
        checking = waiting.popleft()
        if waiting:
            self.clients[client] = waiting  # behind the others
        return checking

    def end(self) -> _Checking:
        checking, self.active = self.active, None
        assert checking is not None, "nobody asked for it"
        return checking

    def all(self) -> list[_Checking]:
        waiting = [checking for each in self.clients.values() for checking in each]
        return [*waiting, *([self.active] if self.active is not None else [])]


_Right = tuple[str, dict[str, Plain], list[_File]]


class Admission:
    """All requests that are checked.

    Args:
        at: all jobs.
        quota: makes room for files.
        uploads: files that clients have sent.
    """

    def __init__(self, at: JobDesk, quota: Quota, uploads: Uploads) -> None:
        """Nobody asks for anything."""
        self._at = at
        self._quota = quota
        self._uploads = uploads
        self._disk = _Line()
        self._looks = _Line()

    def submit(self, peer: Peer, event: Received) -> None:
        """Accept a request, refuse it, or have its files looked at first."""
        at, request = self._at, event.message
        assert isinstance(request, m.SubmitJob), "no request"
        known = at.keys.get(request.key)
        if known is not None:
            self._repeat(peer, request, known)
            return
        try:
            if at.draining:
                self._refuse(peer, request, Failure("shutdown", "the broker stops"))
                return
            suffix, parameters, files = self._checked(peer, event, request)
        except RequestError as error:
            self._refuse(peer, request, Failure("request", error.reason, field=error.field))
            return
        full = at.not_now() or self._full(peer.name)
        if full is not None:
            self._refuse(peer, request, full)
            return
        at.number += 1
        record = JobRecord(
            job=f"{at.number}-{hashlib.blake2b(event.entropy, digest_size=6, person=b'job').hexdigest()}",
            number=at.number,
            key=request.key,
            client=peer.name,
            kind=request.kind,
            suffix=suffix,
            parameters=parameters,
            priority=request.priority,
            output=request.output,
            submitted_at=at.wall,
            asked=digest(request),
        )
        job = Job(at, self._quota, record, "checking")
        job.request.askers[peer] = 1
        if not files and not request.output:
            job.handle(Checked({}))
            return
        for file in files:
            if file.asked.sha256:
                self._keep(job, file, file.asked.sha256)
        self._queue(_Checking(job, files, is_output_right=not request.output))
        self._go_on()

    @property
    def checking(self) -> int:
        """How many requests are checked."""
        return len(self._disk.all()) + len(self._looks.all())

    def check(self) -> None:
        """Assert the invariants."""
        for line in (self._disk, self._looks):
            assert line.active is not None or not line.clients, "nobody looks at a request"
            assert all(line.clients.values()), "a client's turn comes for nothing"
        jobs = [checking.job for checking in [*self._disk.all(), *self._looks.all()]]
        assert len({job.id for job in jobs}) == len(jobs), "a request is checked twice"
        found = {job.id for job in self._at.keys.values() if job.state == "checking"}
        assert found == {job.id for job in jobs}, "a request that nobody checks, or one that is over"

    # --- the request alone ---------------------------------------------------------------------------------------------

    def _repeat(self, peer: Peer, request: m.SubmitJob, known: JobBase) -> None:
        """One key, one job: whoever submits it again is told of the same one."""
        if known.record.asked != digest(request):
            what = told_apart(request, known.record, self._at.spec(request.kind))
            reason = f"is that of job {known.id} already, which is another one: {what}"
            self._refuse(peer, request, Failure("request", f"{reason}; accepted: a new key", field="key"))
        elif known.state in ("checking", "committing"):
            known.request.askers[peer] += 1
        else:
            self._at.uploads_used(peer, [file.sha256 for files in request.media.values() for file in files])
            self._at.desk.send(peer, m.JobAccepted(request.key, info_of(self._at, known)))

    def _checked(self, peer: Peer, event: Received, request: m.SubmitJob) -> _Right:
        """What the kind's results are called, the complete parameters, and the files of the request.

        Raises:
            RequestError: a field is wrong; it says which, and what is accepted.
        """
        at, most = self._at, self._at.config.control_bytes_max
        if not 0 < len(request.key) <= KEY_CHARACTERS_MAX:
            raise RequestError("key", f"has {len(request.key)} characters; accepted: 1 to {KEY_CHARACTERS_MAX}")
        if event.nbytes > most:
            raise RequestError(request.largest_field, f"the request has {event.nbytes} bytes; accepted: {most}")
        kinds = at.groups.kinds()
        spec = next((spec for spec in kinds if spec.name == request.kind), None)
        if spec is None:
            raise unknown_kind(request.kind, kinds)
        parameters = check_job(spec, request.parameters, {name: len(files) for name, files in request.media.items()})
        if not -PRIORITY_MAX <= request.priority <= PRIORITY_MAX:
            span = f"-{PRIORITY_MAX} to {PRIORITY_MAX}"
            raise RequestError("priority", f"{shown(request.priority)} is not accepted; accepted: {span}")
        files = [file for name, asked in request.media.items() for file in _files(spec.input(name), asked)]
        for file in files:
            self._check_file(peer, file)
        if len(request.output) > PATH_CHARACTERS_MAX:
            reason = f"a path of {len(request.output)} characters; accepted: {PATH_CHARACTERS_MAX}"
            raise RequestError("output", reason)
        return spec.suffix, {**parameters}, files

    def _check_file(self, peer: Peer, file: _File) -> None:
        asked = file.asked
        if bool(asked.path) == bool(asked.sha256):
            raise RequestError(file.field, "says a path and a SHA-256, or neither; accepted: one of the two")
        if len(asked.path) > PATH_CHARACTERS_MAX:
            reason = f"a path of {len(asked.path)} characters; accepted: {PATH_CHARACTERS_MAX}"
            raise RequestError(file.field, reason)
        if asked.sha256 and not FILE_NAME.fullmatch(asked.sha256):
            raise RequestError(file.field, f"{shown(asked.sha256)} is no SHA-256; accepted: 64 of 0-9 and a-f")
        if asked.sha256 and not self._uploads.has(peer, asked.sha256):
            raise RequestError(file.field, f"file {asked.sha256} isn't here; accepted: one that was uploaded before")

    def _full(self, client: str) -> Failure | None:
        """Why nobody may wait any more, or this client; None: they may."""
        at, config, own = self._at, self._at.config, self._at.waiting[client]
        if at.waiting_total >= config.jobs_queued_max:
            return Failure("overload", f"{at.waiting_total} jobs wait already", retry_after_s=at.retry_after_s())
        if own >= config.jobs_queued_per_client_max:
            return Failure("overload", f"{own} jobs of this client wait already", retry_after_s=at.retry_after_s())
        return None

    def _refuse(self, peer: Peer, request: m.SubmitJob, failure: Failure) -> None:
        """Nothing was begun yet."""
        self._at.desk.count("jobs_refused", key=request.key, failure=failure.kind, reason=failure.message)
        self._at.desk.send(peer, m.JobRefused(short(failure), cut(request.key)))

    # --- its files -----------------------------------------------------------------------------------------------------

    def _queue(self, checking: _Checking) -> None:
        """Have a request wait for the next thing of it."""
        is_here = checking.is_output_right and checking.next_file.stored is not None
        (self._looks if is_here else self._disk).add(checking)

    def _go_on(self) -> None:
        """Have the next things looked at, unless something is."""
        for line in (self._disk, self._looks):
            if line.active is None and line.clients:
                line.active = line.pop()
                self._look(line.active)

    def _look(self, checking: _Checking) -> None:
        """Have the next thing of a request looked at."""
        store, record = self._at.store, checking.job.record
        if not checking.is_output_right:
            store.ask(lambda ticket: CheckOutput(ticket, record.output, record.suffix), self._output_checked)
            return
        file = checking.next_file
        if file.stored is None:
            store.begin_import()
            store.ask(_importing(file, self._at.config.upload_bytes_max), self._imported)
        else:
            store.ask(_inspecting(file, file.stored), self._inspected)

    def _output_checked(self, event: FileEvent) -> None:
        checking = self._disk.end()
        assert isinstance(event, FileDone), "an output was checked, and something else is said"
        checking.is_output_right = True
        self._next(checking, event.failure, "output")

    def _imported(self, event: FileEvent) -> None:
        checking = self._disk.end()
        assert isinstance(event, FileDone), "a file was imported, and something else is said"
        file = checking.next_file
        failure = event.failure
        if failure is None:
            failure = self._keep_import(checking.job, file, StoredFile(event.sha256, event.nbytes))
        self._at.store.end_import()
        self._next(checking, failure, file.field)

    def _keep_import(self, job: Job, file: _File, stored: StoredFile) -> Failure | None:
        """Hold what came into the store, if there is room for it."""
        store = self._at.store
        is_new = store.find(stored.file) is None
        has_room = not is_new or self._quota.make_room(stored.nbytes, "request")
        store.hold(stored.file, stored.nbytes)
        if has_room:
            job.request.files.append(stored)
            file.stored = stored
            return None
        store.release(stored.file)
        advice = self._at.config.retry_after_s
        return Failure("overload", f"there is no room for its {stored.nbytes} bytes", retry_after_s=advice)

    def _inspected(self, event: FileEvent) -> None:
        checking = self._looks.end()
        assert isinstance(event, FileDone), "a file was looked into, and something else is said"
        file = checking.next_file
        file.is_right = True
        if event.failure is not None and event.failure.kind == "request" and file.stored is not None:
            # It is of no use to anybody; the other files may be asked for again.
            for peer, requests in checking.job.request.askers.items():
                self._at.uploads_used(peer, [file.stored.file], requests)
        self._next(checking, event.failure, file.field)

    def _next(self, checking: _Checking, failure: Failure | None, field: str) -> None:
        """Go on with a request, after the others."""
        if failure is not None:
            checking.job.handle(Refused(replace(failure, field=field)))
        elif checking.is_complete:
            checking.job.handle(Checked(checking.media))
        else:
            self._queue(checking)
        self._go_on()

    def _keep(self, job: Job, file: _File, sha256: str) -> None:
        """Hold a file that is here already."""
        indexed = self._at.store.find(sha256)
        assert indexed is not None, "a file that isn't here"
        file.stored = StoredFile(sha256, indexed.nbytes)
        self._at.store.hold(sha256, indexed.nbytes)
        job.request.files.append(file.stored)


def _files(wanted: MediaInput, asked: tuple[Media, ...]) -> list[_File]:
    one = wanted.most == 1
    return [_File(wanted, wanted.name if one else f"{wanted.name}[{at}]", each) for at, each in enumerate(asked)]


def _importing(file: _File, nbytes_max: int) -> Callable[[int], ImportFile]:
    return lambda ticket: ImportFile(ticket, file.asked.path, nbytes_max)


def _inspecting(file: _File, stored: StoredFile) -> Callable[[int], InspectFile]:
    return lambda ticket: InspectFile(ticket, stored.file, file.wanted)
