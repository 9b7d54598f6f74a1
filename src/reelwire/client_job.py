"""A job in the hands of the application: where it stands, its result, its end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self, cast, overload

from . import client_events as e
from . import messages as m
from .client_door import Alarm, Errand, deadline, left
from .client_files import Download, read_part, target_of
from .client_job_request import JobRequest
from .client_jobs import JOB_ENDED
from .client_loop import Link
from .client_session import ANSWER_TIMEOUT_S
from .client_view import RETRY_AFTER_S
from .errors import BrokerUnreachable, JobCancelled, JobError, JobFailed, OverloadError
from .messages import JobInfo

WORKERS_BACK_S = 30.0
"""How long a job that is submitted waits for the workers to come back to a broker that began anew."""


@dataclass(frozen=True, slots=True)
class JobStatus(JobInfo):
    """Where a job stands; the attributes are those of `job_parts.JobInfo`.

    `state` goes from ``queued`` (`position`: how many start before it) over ``preparing``, ``running`` (`stage`, `step` of
    `steps`, `step_s`, `left_s`) and ``encoding`` to ``succeeded``, ``failed`` (`failure` says why) or ``cancelled``.
    """

    @classmethod
    def of(cls, info: JobInfo) -> Self:
        """The same, for the application."""
        return cls(**{one.name: getattr(info, one.name) for one in fields(info)})

    @property
    def ended(self) -> bool:
        """Whether it is over, however."""
        return self.state in JOB_ENDED


class Sending:
    """A job on its way to the broker: what is asked of whoever submits it, until the answer is there.

    Args:
        link: the connection.
        request: the job.
        ring: called when there may be something to do.
        patience_s: how long a connection may be away.
    """

    def __init__(self, link: Link, request: JobRequest, ring: Callable[[], None], patience_s: float) -> None:
        """Begin."""
        self._link, self._request, self._patience_s = link, request, patience_s
        self._since: tuple[bool, float] | None = None  # whether workers are away, or the connection, and since when
        self.errand = Errand(link, request.event, ring)

    def wanted(self) -> tuple[int, int] | None:
        """The part that is wanted now, as which file and which part of it; None: nothing, for the moment."""
        with self._link.lock:
            found = self._link.core.jobs.wanted(self.errand.call)
            return found if found is not None and self._link.has_room(self.errand.news) else None

    def read(self, wanted: tuple[int, int]) -> bytes:
        """Read it from the disk. Raises as `read_part`."""
        place, index = wanted
        return read_part(self._request.files[place], self._request.paths[place], index)

    def supply(self, wanted: tuple[int, int], data: bytes) -> None:
        """Hand it in."""
        self._link.feed(lambda now: e.SupplyPart(now, self.errand.call, *wanted, data))

    def wait_until(self) -> float:
        """When it has to be given up if nothing happens, in seconds of the monotonic clock.

        Raises:
            BrokerUnreachable: now, since the connection is away for too long.
            OverloadError: now, since the workers are: the broker began anew, and they didn't come back to it.
        """
        with self._link.lock:
            is_away = self._link.core.phase != "attached"
            is_parked = self._link.core.jobs.is_parked(self.errand.call)
        if not (is_away or is_parked):
            self._since = None
            return math.inf
        now = time.monotonic()
        if self._since is None or self._since[0] != is_parked:
            self._since = is_parked, now
        patience_s = WORKERS_BACK_S if is_parked else self._patience_s
        give_up_at = self._since[1] + patience_s
        if now < give_up_at:
            return give_up_at
        request = self._request.message
        if is_parked:
            reason = f"the broker began anew, and no worker that does {request.kind!r} is back after {patience_s:g} s"
            raise OverloadError(reason, RETRY_AFTER_S)
        raise BrokerUnreachable(
            f"the connection was lost while a job was submitted, and isn't back after {patience_s:g} s; "
            f"submitting it again under its key, {request.key!r}, makes no second one"
        )


def submitted(link: Link, request: JobRequest, patience_s: float, until: float) -> JobInfo:
    """Submit a job, and supply what is wanted of its files.

    Raises:
        TimeoutError: `until` is over, in seconds of the monotonic clock.
        BrokerUnreachable: the connection was lost, and not made again within `patience_s`.
        OverloadError: the broker began anew, and no worker that does it came back.
        ReelwireError: the job isn't accepted.
    """
    alarm = Alarm()
    sending = Sending(link, request, alarm.ring, patience_s)
    errand = sending.errand
    try:
        while not errand.answered:
            wanted = sending.wanted()
            if wanted is not None:
                left(until)
                sending.supply(wanted, sending.read(wanted))
                continue
            give_up_at = sending.wait_until()
            try:
                alarm.wait(min(until, give_up_at))
            except TimeoutError:
                left(until)  # else it is the patience that is over
        return cast("JobInfo", errand.value())
    finally:
        errand.end()


class JobShell:
    """What a job is to threads and to event loops alike; its attributes stand with `Job`."""

    def __init__(self, client: object, link: Link, info: JobInfo) -> None:
        """Take over a job that the broker knows."""
        self.id = info.job
        self.key = info.key
        self.kind = info.kind
        self._client = client  # keeps the connection while the job is used
        self._link = link

    def _watching(self, now: float, call: int) -> e.Event:
        return e.WatchJob(now, call, self.id)

    def _watch(self, ring: Callable[[], None]) -> Errand:
        return Errand(self._link, self._watching, ring, e.news_of_job(self.id))

    def _news(self, watch: Errand, shown: JobStatus | None) -> JobStatus | None:
        """Where the job stands now, if that is another place than `shown`; a moment later is none."""
        if watch.answered:
            return JobStatus.of(cast("JobInfo", watch.value()))
        with self._link.lock:
            info = self._link.core.jobs.info(self.id)
        if info is None:
            return None
        status = JobStatus.of(info)
        return None if shown is not None and _timeless(status) == _timeless(shown) else status

    def _asking(self, what: e.JobQuestion) -> Callable[[float, int], e.Event]:
        return lambda now, call: e.AskJob(now, call, self.id, what)

    def _fetching(self, info: JobInfo) -> Callable[[float, int], e.Event]:
        return lambda now, call: e.FetchResult(now, call, self.id, info.result_bytes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.kind!r}>"


class Job(JobShell):
    """One job; `Client.submit_edit` makes it, `Client.job` finds it again.

    A job is durable: it goes on without this object, without its client and through a restart of the broker. Methods that
    wait for it do so too, for as long as it takes or for a `timeout` in seconds; connections are made again meanwhile.
    Every method may be called from any thread.

    Attributes:
        id: the broker's name for it.
        key: that it was submitted under; submitting under it again gives this job.
        kind: what it is, as of `Client.job_kinds`.
    """

    def progress(self, timeout: float | None = None) -> Iterator[JobStatus]:
        """Where it stands, now and whenever that changes, up to its end: the last one says how it ended, and isn't raised.

        What passed while the application was busy is skipped.

        Args:
            timeout: seconds to wait at most, in all.

        Raises:
            JobError: the broker knows no such job.
            OverloadError: the client watches too many jobs already: 1024.
            TimeoutError: it hasn't ended in time; it goes on.
        """
        until = deadline(timeout)
        return self._progress(until)

    def _progress(self, until: float) -> Iterator[JobStatus]:
        alarm = Alarm()
        watch = self._watch(alarm.ring)
        try:
            shown: JobStatus | None = None
            while shown is None or not shown.ended:
                status = self._news(watch, shown)
                if status is None:
                    alarm.wait(until)
                else:
                    shown = status
                    yield status
        finally:
            watch.end_later()

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait for its end, whichever that is: nothing is raised for a job that has failed. Raises as `progress` does."""
        return JobStatus.of(cast("JobInfo", self._link.call(self._watching, timeout)))

    @overload
    def result(self, path: None = None, timeout: float | None = None) -> bytes: ...

    @overload
    def result(self, path: str | os.PathLike[str], timeout: float | None = None) -> Path: ...

    def result(self, path: str | os.PathLike[str] | None = None, timeout: float | None = None) -> Path | bytes:
        """Wait for its end, and fetch its result; the hash is checked.

        Args:
            path: the file that is to be written, complete or not at all; one that is there is replaced by it.
            timeout: seconds that all of it may take.

        Returns:
            The path, or without one the bytes of the result.

        Raises:
            JobFailed: it has failed, with the worker's reason.
            JobCancelled: somebody cancelled it.
            JobError: the broker knows no such job, or has its result no more.
            OverloadError: the client waits for too many jobs already: 1024.
            RequestError: no file can be at `path`.
            TimeoutError: it took longer; the job, and its result, stay.
            WireError: what came isn't the result.
            OSError: the file can't be written.
        """
        until = deadline(timeout)
        target = None if path is None else target_of(path)
        info = succeeded(self.wait(left(until)))
        with Download(info.result_sha256, target) as download:
            self._fetch(info, download, until)
            return download.finish()

    def _fetch(self, info: JobInfo, download: Download, until: float) -> None:
        alarm = Alarm()
        fetch = Errand(self._link, self._fetching(info), alarm.ring)
        try:
            while True:
                part = self._link.take_part(fetch.call)
                if part is not None:
                    download.write(part)
                    left(until)
                elif fetch.answered:
                    fetch.value()
                    return
                else:
                    alarm.wait(until)
        finally:
            fetch.end()

    def status(self, timeout: float = ANSWER_TIMEOUT_S) -> JobStatus:
        """Where it stands now.

        Raises:
            JobError: the broker knows no such job.
            BrokerUnreachable: the connection is lost.
            TimeoutError: no answer within `timeout` seconds.
        """
        return only(self._link.call(self._asking("status"), timeout))

    def cancel(self, timeout: float = ANSWER_TIMEOUT_S) -> JobStatus:
        """Have it end at its next step; one that has ended stays as it is. Raises as `status` does.

        Returns:
            Where it stood then: ``cancelled`` for good if nobody worked at it; else `wait` waits for its step to end.
        """
        return only(self._link.call(self._asking("cancel"), timeout))

    def delete(self, timeout: float = ANSWER_TIMEOUT_S) -> JobStatus:
        """Have the broker forget it, with its result. Raises as `status` does, also for a job that hasn't ended.

        Returns:
            Where it stood.
        """
        return only(self._link.call(self._asking("delete"), timeout))


def succeeded(info: JobInfo) -> JobInfo:
    """A job that has ended, when it has a result.

    Raises:
        JobFailed: it has failed.
        JobCancelled: it was cancelled.
        JobError: its result isn't kept any more.
    """
    if info.state == "succeeded":
        if not info.result_bytes:
            raise JobError(f"the result of job {info.job} isn't kept any more: it made room for others")
        return info
    failure = info.failure
    if info.state == "cancelled":
        raise JobCancelled(f"job {info.job} was cancelled")
    if failure is None:
        raise JobFailed(f"job {info.job} has failed", info.job)
    reason = f"{failure.field}: {failure.message}" if failure.field else failure.message
    raise JobFailed(reason, info.job, failure.kind, failure.field)


def only(answer: object) -> JobStatus:
    """The one job that the broker has answered with.

    Raises:
        JobError: there is none.
    """
    jobs = cast("m.Jobs", answer).jobs
    if not jobs:
        raise JobError("there is no such job")
    return JobStatus.of(jobs[0])


def _timeless(status: JobStatus) -> JobStatus:
    return replace(status, submitted_s=0.0, ended_s=None, left_s=None)
