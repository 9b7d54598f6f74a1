"""A job in the hands of an event loop: `client_job`, awaitable."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, cast, overload

from .client_awaiting import Bell, call, within
from .client_door import Errand, deadline
from .client_files import Download, target_of
from .client_job import JobShell, JobStatus, Sending, only, succeeded
from .client_job_request import JobRequest
from .client_loop import Link
from .client_session import ANSWER_TIMEOUT_S
from .messages import JobInfo


class Wanted:
    """Tells a thread that works for a task whether the task still waits for it; a ``with`` block is the waiting."""

    def __init__(self) -> None:
        """It does."""
        self._is_over = False

    def check(self) -> None:
        """Raises TimeoutError when it doesn't."""
        if self._is_over:
            raise TimeoutError("nobody waits for it any more")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True


async def submitted(link: Link, request: JobRequest, patience_s: float) -> JobInfo:
    """Submit a job, and supply what is wanted of its files: see `client_job.submitted`."""
    bell = Bell()
    sending = Sending(link, request, bell.ring, patience_s)
    errand = sending.errand
    try:
        while not errand.answered:
            wanted = sending.wanted()
            if wanted is not None:
                sending.supply(wanted, await asyncio.to_thread(sending.read, wanted))
                continue
            await _rung(bell, sending.wait_until())
        return cast("JobInfo", errand.value())
    finally:
        errand.end()


class AsyncJob(JobShell):
    """One job for event loops: `Job` with methods to await; `AsyncClient.submit_edit` makes it. The attributes are its, too.

    ``async for status in job.progress()`` tells where it stands, up to its end.
    """

    def progress(self, timeout: float | None = None) -> AsyncIterator[JobStatus]:
        """Where it stands, now and whenever that changes, up to its end: see `Job.progress`."""
        return self._progress(deadline(timeout))

    async def _progress(self, until: float) -> AsyncIterator[JobStatus]:
        bell = Bell()
        watch = self._watch(bell.ring)
        try:
            shown: JobStatus | None = None
            while shown is None or not shown.ended:
                status = self._news(watch, shown)
                if status is not None:
                    shown = status
                    yield status
                    continue
                async with within(None if until == math.inf else max(0.0, until - time.monotonic())):
                    await bell.rung()
        finally:
            watch.end_later()

    async def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait for its end, whichever that is: see `Job.wait`."""
        return JobStatus.of(cast("JobInfo", await call(self._link, self._watching, timeout)))

    @overload
    async def result(self, path: None = None, timeout: float | None = None) -> bytes: ...

    @overload
    async def result(self, path: str | os.PathLike[str], timeout: float | None = None) -> Path: ...

    async def result(self, path: str | os.PathLike[str] | None = None, timeout: float | None = None) -> Path | bytes:
        """Wait for its end, and fetch its result: see `Job.result`."""
        async with within(timeout):
            target = None if path is None else target_of(path)
            info = succeeded(await self.wait())
            with Download(info.result_sha256, target) as download:
                await self._fetch(info, download)
                return await asyncio.to_thread(download.finish)

    async def _fetch(self, info: JobInfo, download: Download) -> None:
        bell = Bell()
        fetch = Errand(self._link, self._fetching(info), bell.ring)
        try:
            while True:
                part = self._link.take_part(fetch.call)
                if part is not None:
                    await asyncio.to_thread(download.write, part)
                elif fetch.answered:
                    fetch.value()
                    return
                else:
                    await bell.rung()
        finally:
            fetch.end()

    async def status(self, timeout: float = ANSWER_TIMEOUT_S) -> JobStatus:
        """Where it stands now: see `Job.status`."""
        return only(await call(self._link, self._asking("status"), timeout))

    async def cancel(self, timeout: float = ANSWER_TIMEOUT_S) -> JobStatus:
        """Have it end at its next step: see `Job.cancel`."""
        return only(await call(self._link, self._asking("cancel"), timeout))

    async def delete(self, timeout: float = ANSWER_TIMEOUT_S) -> JobStatus:
        """Have the broker forget it: see `Job.delete`."""
        return only(await call(self._link, self._asking("delete"), timeout))


async def _rung(bell: Bell, until: float) -> None:
    """Wait for the bell, or until a time of the monotonic clock."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None if until == math.inf else until - time.monotonic()):
            await bell.rung()
