"""The SDK for event loops: the methods of `client`, awaitable, over the same link and the same core."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from . import client_events as e
from .client import CLOSE_TIMEOUT_S, Client, ClientShell, job_call, jobs_call, status_call, statuses
from .client_awaiting import Bell, Opening, call, with_parameters_of, within
from .client_job import JobStatus, only
from .client_job_async import AsyncJob, Wanted, submitted
from .client_job_request import job_request
from .client_loop import LINGER_S
from .client_request import session_request
from .client_session import ANSWER_TIMEOUT_S, CANCEL_TIMEOUT_S, Chunk, SessionShell
from .controls import Control
from .errors import BrokerUnreachable, ReelwireError
from .job_spec import JobSpec
from .messages import Welcome
from .spec import StreamSpec


class AsyncClient(ClientShell):
    """A connection to a broker for event loops: takes what `Client` takes, and has its methods, to be awaited.

    ``async with`` waits until the broker has answered, and closes the client in the end. A client that is made without
    it connects meanwhile, and the first method that needs the broker waits for that.

    Tasks of several event loops may use one client, and no thread waits for any of them; only files are read and written
    in a thread, of `asyncio.to_thread`: a session's picture, what a job takes and what it makes. A task that is cancelled
    while it awaits takes back what it asked for, as a timeout does: a session that it was opening is cancelled, a control
    that waited for its turn isn't sent. A job that the broker has accepted by then stays.

    Attributes:
        endpoint: where it connects to.

    Raises:
        RequestError: an argument is refused. What else `Client` raises is raised by ``async with``, or by the first
            method.
    """

    @property
    def name(self) -> str:
        """The name under which the broker knows this client.

        Raises:
            BrokerUnreachable: there is no connection now.
        """
        return self._welcomed().name

    @property
    def pipelines(self) -> dict[str, StreamSpec]:
        """What sessions can be opened of, by name. Raises as `name` does."""
        return {spec.name: spec for spec in self._welcomed().specs}

    @with_parameters_of(Client.open_session)
    def open_session(self, *args: Any, timeout: float | None = None, **given: Any) -> Opening[AsyncSession]:
        """Open a session: see `Client.open_session`; to be awaited, or entered by ``async with``."""
        return Opening(self._opened(args, given, timeout))

    @property
    def job_kinds(self) -> dict[str, JobSpec]:
        """What jobs can be submitted, by name. Raises as `name` does."""
        return {spec.name: spec for spec in self._welcomed().jobs}

    @with_parameters_of(Client.submit_edit)
    async def submit_edit(self, *args: Any, timeout: float | None = None, **given: Any) -> AsyncJob:
        """Submit a job: see `Client.submit_edit`."""
        async with within(timeout):
            still_wanted = Wanted()
            prepare = partial(job_request, await self._attached(), *args, proceed=still_wanted.check, **given)
            with still_wanted:
                request = await asyncio.to_thread(prepare)
            info = await submitted(self._link, request, self._connect_timeout_s)
        return AsyncJob(self, self._link, info)

    async def job(self, id: str, timeout: float = ANSWER_TIMEOUT_S) -> AsyncJob:  # noqa: A002  as of `Client`
        """A job that was submitted by whomever: see `Client.job`."""
        question = job_call(id)
        await self._attached()
        return AsyncJob(self, self._link, only(await call(self._link, question, timeout)))

    async def jobs(self, timeout: float = ANSWER_TIMEOUT_S) -> list[JobStatus]:
        """Where all jobs stand: see `Client.jobs`."""
        await self._attached()
        return statuses(await call(self._link, jobs_call, timeout))

    async def status(self, timeout: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """What the broker has: see `Client.status`."""
        await self._attached()
        return dict(cast("Mapping[str, Any]", await call(self._link, status_call, timeout)))

    async def close(self) -> None:
        """Say goodbye and disconnect: see `Client.close`."""
        self._link.leave()
        bell = Bell()
        self._link.when_ended(bell.ring)
        with suppress(TimeoutError):
            async with within(CLOSE_TIMEOUT_S):
                await bell.rung()
            self._link.join(LINGER_S)  # it has nothing left to do

    async def __aenter__(self) -> Self:
        try:
            await self._attached()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # its task was dropped, and may not wait any more
            self._link.leave()
        else:
            await self.close()

    async def _opened(self, args: Any, given: Any, timeout: float | None) -> AsyncSession:
        async with within(timeout):
            prepare = partial(session_request, await self._attached(), *args, **given)
            # A picture takes long to read and to reduce: the event loop's other tasks needn't wait for that.
            request = prepare() if given.get("image") is None else await asyncio.to_thread(prepare)
            answer = await call(self._link, request.event, None)
        return AsyncSession(self, self._link, request, self._view(answer))

    def _welcomed(self) -> Welcome:
        with self._link.lock:
            welcome = self._link.core.welcome
        if welcome is None:
            raise BrokerUnreachable(f"there is no connection to a broker at {self.endpoint} now")
        return welcome

    async def _attached(self) -> Welcome:
        try:
            return cast("Welcome", await call(self._link, e.Attach, self._connect_timeout_s))
        except TimeoutError:
            raise self._unanswered() from None


class AsyncSession(SessionShell):
    """One stream of chunks for event loops: `Session` with methods to await; `AsyncClient.open_session` makes it.

    ``async for chunk in session`` gives the chunks in order; one that is left or cancelled can be begun again, and goes on
    with the next chunk. ``async with`` ends the session as ``with`` does a `Session`. The attributes are its, too.
    """

    # --- keys ----------------------------------------------------------------------------------------------------------

    async def press(self, key: str) -> None:
        """Hold a key: see `Session.press`."""
        self._change(lambda keys: keys.press(key))

    async def release(self, key: str) -> None:
        """Let go of a key: see `Session.release`."""
        self._change(lambda keys: keys.release(key))

    async def tap(self, key: str) -> None:
        """Press and release a key at once: see `Session.tap`."""
        self._change(lambda keys: keys.tap(key))

    async def set_keys(self, keys: Iterable[str]) -> None:
        """Hold exactly these keys: see `Session.set_keys`."""
        self._change(lambda writer: writer.set_keys(keys))

    async def reset(self) -> None:
        """Let go of every key: see `Session.reset`."""
        self._change(lambda keys: keys.reset())

    async def reset_pose(self) -> None:
        """Let go of every key and go back to the first pose: see `Session.reset_pose`."""
        self._change(lambda keys: keys.reset_pose())

    # --- controls and chunks -------------------------------------------------------------------------------------------

    async def submit(self, index: int | None, control: Control, timeout: float | None = None) -> None:
        """Give the control for one chunk: see `Session.submit`."""
        await call(self._link, self._submission(index, control), timeout)

    def __aiter__(self) -> Self:
        """The chunks that weren't taken yet, in order: see `Session.__iter__`."""
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def next_chunk(self, timeout: float | None = None) -> Chunk | None:
        """The next chunk, or None when there is no further one: see `Session.next_chunk`."""
        async with within(timeout):
            bell = Bell()
            with self._link.watching(self.id, bell.ring):
                while (taken := self._take()) is None:
                    await bell.rung()
        return self._chunk(taken)

    # --- its end -------------------------------------------------------------------------------------------------------

    async def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the session, and wait until it has ended: see `Session.close`."""
        await call(self._link, self._ending(drain=drain), timeout)

    async def cancel(self, timeout: float | None = None) -> None:
        """End the session at once: see `Session.cancel`."""
        await self.close(drain=False, timeout=timeout)

    async def metrics(self, timeout: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The numbers of the session: see `Session.metrics`."""
        return dict(cast("Mapping[str, Any]", await call(self._link, self._asking, timeout)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        elif kind is GeneratorExit:  # its task was dropped, and may not wait any more
            self._link.ask(self._ending(drain=False), lambda _done: None)
        else:
            with suppress(ReelwireError, TimeoutError):  # what the block raised says more
                await self.cancel(CANCEL_TIMEOUT_S)
