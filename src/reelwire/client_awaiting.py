"""From the link's one thread to event loops: answers and news are handed over by `call_soon_threadsafe`.

No thread waits for anything here. A task that is cancelled, or whose loop is closed, simply isn't told any more.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from . import client_events as e
from .client_door import TOO_LATE, Door, deadline, value_of

P = ParamSpec("P")
R = TypeVar("R")


class _Block(Protocol):
    """What an asynchronous block can be entered with."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


S = TypeVar("S", bound=_Block)


async def call(door: Door, event: Callable[[float, int], e.Event], timeout_s: float | None) -> object:
    """Hand a call in and await its answer; without one in time, or when the task is cancelled, it is withdrawn.

    Raises:
        RequestError: the timeout is refused, and nothing was handed in.
        TimeoutError: there was no answer within `timeout_s`.
        ReelwireError: whatever the answer says.
    """
    async with within(timeout_s):
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[e.Done] = loop.create_future()
        number = door.ask(event, partial(_hand_over, loop, partial(_settle, answer)))
        try:
            done = await answer
        except BaseException:
            door.withdraw(number)
            raise
    return value_of(done)


@asynccontextmanager
async def within(timeout_s: float | None) -> AsyncIterator[None]:
    """Bound what the block awaits.

    Raises:
        RequestError: the timeout is refused, before the block is entered.
        TimeoutError: the block wasn't done in time.
    """
    until = deadline(timeout_s)
    try:
        async with asyncio.timeout(None if until == math.inf else until - time.monotonic()):
            yield
    except TimeoutError:
        raise TimeoutError(TOO_LATE) from None


class Bell:
    """Rung in any thread, it wakes the task that made it."""

    def __init__(self) -> None:
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake the task, or let its next wait end at once."""
        _hand_over(self._loop, self._event.set)

    async def rung(self) -> None:
        """Wait until it was rung since the last wait ended."""
        await self._event.wait()
        self._event.clear()


class Opening(Coroutine[Any, Any, S]):
    """A coroutine that opens something, to be awaited, or entered at once: ``async with opening as opened``."""

    def __init__(self, opening: Coroutine[Any, Any, S]) -> None:
        """Nothing is opened yet."""
        self._opening = opening
        self._opened: S | None = None

    def __await__(self) -> Generator[Any, Any, S]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        """As of any coroutine."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        """As of any coroutine."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """As of any coroutine."""
        self._opening.close()

    async def __aenter__(self) -> S:
        self._opened = await self._opening
        return await self._opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._opened is not None, "left before it was entered"
        await self._opened.__aexit__(kind, error, traceback)


def with_parameters_of(
    pattern: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Let a method that passes its arguments on be known, to checkers and to `help`, by those of another."""

    def dressed(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        returns = inspect.signature(method).return_annotation
        method.__signature__ = inspect.signature(pattern).replace(return_annotation=returns)  # type: ignore[attr-defined]
        return method

    return dressed


def _hand_over(loop: asyncio.AbstractEventLoop, work: Callable[..., None], *values: object) -> None:
    """Have the loop do something: at once when it is the one that runs here, and never when it is closed."""
    with suppress(RuntimeError):  # no loop runs here
        if asyncio.get_running_loop() is loop:
            work(*values)
            return
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(work, *values)


def _settle(answer: asyncio.Future[e.Done], done: e.Done) -> None:
    if not answer.done():
        answer.set_result(done)
