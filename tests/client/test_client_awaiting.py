"""How event loops wait for the client's one thread: timeouts, cancelled tasks, several loops, closed ones."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from reelwire import AsyncClient, AsyncSession, Control, RequestError, SessionFailed
from reelwire import messages as m

from .event_loops import LIMIT_S, heard, run, threads

StandIn = Any  # of conftest.py


# --- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [float("nan"), -1, "1", True])
def test_a_timeout_that_is_none_is_refused_wherever_one_waits(stand_in: StandIn, timeout: Any) -> None:
    """At once, with nothing sent; the session goes on."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            session = await client.open_session("toy", chunks=2)
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: client.open_session("toy", chunks=1, timeout=timeout),
                lambda: client.status(timeout),
                lambda: session.next_chunk(timeout),
                lambda: session.submit(0, Control(keys=()), timeout),
                lambda: session.metrics(timeout),
                lambda: session.close(timeout=timeout),
                lambda: session.cancel(timeout),
            ]
            for call in calls:
                with pytest.raises(RequestError, match=r"timeout: .*accepted: seconds, 0 or more"):
                    await call()
            await session.submit(0, Control(keys=()), LIMIT_S)
            assert await session.next_chunk(LIMIT_S) is not None

    run(work())


def test_waiting_is_bounded_where_the_caller_says_so(stand_in: StandIn) -> None:
    """Chunk, control, numbers, end: each wait ends in a TimeoutError, and the session lives on."""
    stand_in.silent |= {m.SubmitControl, m.EndSession, m.AskMetrics}

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            session = await client.open_session("toy", chunks=2)
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: session.next_chunk(timeout=0),
                lambda: session.next_chunk(timeout=0.01),
                lambda: session.submit(0, Control(keys=()), timeout=0.01),
                lambda: session.metrics(timeout=0.01),
                lambda: session.close(timeout=0),
            ]
            for call in calls:
                with pytest.raises(TimeoutError, match="no answer within the time limit"):
                    await call()
            stand_in.silent.clear()
            assert await session.metrics(float("inf")) == {"chunks": 1}

    run(work())


def test_a_control_whose_task_is_cancelled_is_never_sent(stand_in: StandIn) -> None:
    """It waited for its grant; the next one goes through."""
    stand_in.silent.add(m.OpenSession)

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            opening = asyncio.create_task(client.open_session("toy", chunks=2))
            stand_in.say(m.SessionOpened((await heard(stand_in, m.OpenSession)).key, "s", "token"))
            stand_in.say(m.SessionChanged("s", "ready", 0))
            session = await opening
            submitting = asyncio.create_task(session.submit(0, Control(keys=["a"])))
            await client.status()
            submitting.cancel()
            await asyncio.wait([submitting])
            stand_in.say(m.SessionChanged("s", "ready", 2))
            await session.submit(0, Control(keys=["w"]))
            assert (await heard(stand_in, m.SubmitControl)).control.values["keys"] == ["w"]

    run(work())


def test_an_iteration_that_is_cancelled_loses_no_chunk(stand_in: StandIn) -> None:
    """Whatever moment a task is cancelled at, the next iteration goes on with the chunk that it would have had."""
    seen: list[int] = []

    async def read(session: AsyncSession) -> None:
        async for chunk in session:
            seen.append(chunk.index)  # noqa: PERF401  # the list is what tells where it was cancelled

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            session = await client.open_session("toy", chunks=9)
            for index in range(9):
                reading = asyncio.create_task(read(session))
                await asyncio.wait([reading], timeout=0)
                await session.submit(index, Control(keys=()))
                reading.cancel()
                await asyncio.wait([reading])
            await read(session)

    run(work())
    assert seen == list(range(9))


def test_a_lost_connection_is_told_to_every_task(stand_in: StandIn) -> None:
    """Whoever waits for a chunk gets the failure, and the same client opens another session."""
    stand_in.heartbeat_s = 0.05

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            session = await client.open_session("toy", chunks=3)
            reading = [asyncio.create_task(session.next_chunk()) for _ in range(3)]
            stand_in.silent.add(m.Heartbeat)
            for task in reading:
                with pytest.raises(SessionFailed, match="hasn't been heard of"):
                    await task
            stand_in.silent.clear()
            async with client.open_session("toy", chunks=3) as session:
                assert session.state == "ready"

    run(work())


# --- event loops -------------------------------------------------------------------------------------------------------


def test_two_event_loops_share_a_client(stand_in: StandIn, in_thread: Any) -> None:
    """Each task is woken in its own loop: one reads a session, the other gives its controls and ends it."""
    client = AsyncClient(stand_in.endpoint)
    session = run(client.open_session("toy", chunks=5))

    async def read() -> list[int]:
        return [chunk.index async for chunk in session]

    async def play() -> None:
        for index in range(3):
            await session.submit(index, Control(keys=()), LIMIT_S)
            assert await client.status() == {"workers": 0}
        await session.close(timeout=LIMIT_S)

    reading = in_thread(lambda: run(read()))
    run(play())
    assert reading.get(timeout=LIMIT_S) == [0, 1, 2]
    run(client.close())
    assert not threads()


def test_a_loop_that_was_closed_is_not_waited_for(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    """Its tasks are told nothing any more, without harm to the client's thread; another loop goes on with the session."""
    client = AsyncClient(stand_in.endpoint)
    session = run(client.open_session("toy", chunks=5))
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(session.next_chunk()), loop.create_task(session.submit(4, Control(keys=())))]
    stand_in.silent.add(m.SubmitControl)
    loop.run_until_complete(client.status())
    loop.close()
    stand_in.silent.clear()

    async def work() -> None:
        await session.submit(0, Control(keys=()))
        chunk = await session.next_chunk(LIMIT_S)
        assert chunk is not None
        assert chunk.index == 0
        await client.close()

    run(work())
    assert not threads()
    tasks.clear()
    gc.collect()
    assert all(record.message.startswith("Task was destroyed") for record in caplog.records)


def test_a_task_that_is_dropped_in_its_block_gives_up_what_it_had(stand_in: StandIn) -> None:
    """A coroutine that is closed can't wait; the broker is told all the same that session and client are over."""
    client, entered = AsyncClient(stand_in.endpoint), asyncio.Event()

    async def playing() -> None:
        async with client, client.open_session("toy", chunks=5) as session:
            entered.set()
            await session.next_chunk()

    loop = asyncio.new_event_loop()
    coroutine = playing()
    task = loop.create_task(coroutine)
    loop.run_until_complete(entered.wait())
    loop.close()
    coroutine.close()
    assert stand_in.next(m.EndSession).mode == "cancel"
    stand_in.next(m.Goodbye)
    for thread in threads():
        thread.join(LIMIT_S)
    assert not task.done()
