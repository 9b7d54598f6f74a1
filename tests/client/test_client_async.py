"""The SDK for event loops on a real socket, against a broker made of plain messages."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import threading
from typing import Any

import numpy as np
import pytest

from reelwire import (
    AsyncClient,
    AsyncSession,
    BrokerUnreachable,
    Client,
    Control,
    OverloadError,
    RequestError,
    Session,
    SessionClosed,
    SessionFailed,
    UsageError,
    VersionMismatch,
)
from reelwire import messages as m
from reelwire.messages import Failure

from .event_loops import LIMIT_S, heard, run, threads

StandIn = Any  # of conftest.py


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


# --- the face ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), [(AsyncClient, Client), (AsyncSession, Session)])
def test_an_asynchronous_class_has_the_methods_of_the_other(ours: type, theirs: type) -> None:
    """The same names with the same parameters, and each has to be awaited; what is no method is the same."""
    assert public(ours).keys() == public(theirs).keys()
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    for name, value in public(theirs).items():
        mine = public(ours)[name]
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert inspect.signature(mine).parameters == signature.parameters, name
            assert inspect.iscoroutinefunction(mine) or name == "open_session"
            assert "see `" in mine.__doc__


def test_a_session_is_played_and_read(stand_in: StandIn) -> None:
    """Keys and controls in, chunks in order out, numbers in between; afterwards there is no thread."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint, name="tester") as client:
            assert (client.name, list(client.pipelines)) == ("me-1", ["toy"])
            assert await client.status() == {"workers": 0}
            async with client.open_session("toy", chunks=3, image=np.zeros((4, 4, 3), np.uint8), prompt="x") as session:
                await session.submit(0, Control(keys=["w"]))
                await session.submit(1, Control(keys=()), timeout=LIMIT_S)
                await session.submit(2, Control(keys=()))
                chunks = [chunk async for chunk in session]
                assert await session.metrics() == {"chunks": 1}
            assert [chunk.index for chunk in chunks] == [0, 1, 2]
            assert [int(chunk.frames.max()) for chunk in chunks] == [0, 1, 2]
            assert (session.state, session.prompt) == ("completed", "x")
            assert "AsyncSession" in repr(session)
            assert stand_in.endpoint in repr(client)

    run(work())
    assert stand_in.next(m.ClientHello).name == "tester"
    assert stand_in.next(m.OpenSession).parameters["prompt"] == "x"
    stand_in.next(m.Goodbye)
    assert not threads()


def test_key_events_are_one_register(stand_in: StandIn) -> None:
    """As those of the other client: each change is sent whole."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            session = await client.open_session("toy", chunks=3)
            await session.press("up")
            await session.release("up")
            await session.tap("d")
            await session.set_keys(["a"])
            await session.reset()
            await session.reset_pose()
            with pytest.raises(RequestError, match="unknown key"):
                await session.press("q")

    run(work())
    states = [stand_in.next(m.SetKeys).keys for _ in range(6)]
    assert [state.held for state in states] == [("w",), (), (), ("a",), (), ()]
    assert states[-1].reset_pose_revision == 1


def test_waiting_tasks_take_no_threads(stand_in: StandIn) -> None:
    """However many answers and chunks are awaited at once, there is one thread of the client's."""
    stand_in.silent |= {m.AskMetrics}

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            session = await client.open_session("toy", chunks=3)
            before = threading.active_count()
            tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(session.metrics()) for _ in range(50)]
            tasks += [asyncio.ensure_future(session.next_chunk()) for _ in range(50)]
            await client.status()
            assert threading.active_count() == before
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    run(work())


# --- connecting --------------------------------------------------------------------------------------------------------


def test_where_no_broker_answers_is_named() -> None:
    """By ``async with``, and by the first method of a client that was made without it; no thread is left."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        async def entered() -> None:
            async with AsyncClient(endpoint, connect_timeout_s=0.1):
                pytest.fail("there is nobody")

        async def made() -> None:
            client = AsyncClient(endpoint, connect_timeout_s=0.1)
            with pytest.raises(BrokerUnreachable, match="there is no connection"):
                assert client.pipelines
            try:
                await client.status()
            finally:
                await client.close()

        for work in (entered, made):
            with pytest.raises(BrokerUnreachable, match=f"no reelwire broker answered at {endpoint} within 0.1 s"):
                run(work())
    assert not threads()


def test_streaming_38_versions_that_do_not_fit_are_both_named(stand_in: StandIn) -> None:
    """The client refuses a broker of another minor version."""
    stand_in.version = "0.9.0"

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint):
            pytest.fail("it doesn't fit")

    with pytest.raises(VersionMismatch, match=r"reelwire 0\.9\.0"):
        run(work())
    assert not threads()


def test_settings_are_refused_without_an_event_loop() -> None:
    """As `Client` refuses them."""
    with pytest.raises(RequestError, match="endpoint"):
        AsyncClient("127.0.0.1:7461")
    with pytest.raises(RequestError, match="output_credit_chunks"):
        AsyncClient("tcp://127.0.0.1:1", output_credit_chunks=0)


def test_a_closed_client_says_so(stand_in: StandIn) -> None:
    """Closing again does nothing; whoever waits is answered."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            session = await client.open_session("toy", chunks=3)
            stand_in.silent.add(m.SubmitControl)
            reading = asyncio.create_task(session.next_chunk())
            submitting = asyncio.create_task(session.submit(0, Control(keys=())))
            await heard(stand_in, m.SubmitControl)
            await client.close()
            assert await reading is None
            with pytest.raises(SessionClosed):
                await submitting
            await client.close()
            with pytest.raises(UsageError, match="the client was closed"):
                await client.status()

    run(work())


# --- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"pace": "slow"}, {"control_binding": 1}, {"seed": "7"}, {"image": "no.png"}])
def test_what_can_not_be_opened_is_refused_before_anything_is_sent(stand_in: StandIn, given: dict[str, Any]) -> None:
    """By name; also where a picture is read aside."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            with pytest.raises(RequestError) as caught:
                await client.open_session("toy", chunks=1, **given)
            assert [caught.value.field] == list(given)

    run(work())
    stand_in.next(m.ClientHello)
    assert isinstance(stand_in.heard.get(timeout=LIMIT_S), m.Goodbye)


def test_a_refused_session_is_the_error_of_the_call(stand_in: StandIn) -> None:
    """The broker's reason is raised where the session was asked for, entered at once or awaited."""
    stand_in.silent.add(m.OpenSession)

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            opening = asyncio.create_task(client.open_session("toy", chunks=1))
            key = (await heard(stand_in, m.OpenSession)).key
            stand_in.say(m.SessionRefused(key, Failure("overload", "full", retry_after_s=3)))
            with pytest.raises(OverloadError, match="full"):
                await opening

    run(work())


@pytest.mark.parametrize("opened", [True, False])
def test_an_opening_that_is_cancelled_leaves_no_session(stand_in: StandIn, opened: bool) -> None:
    """Whether the broker had answered or not: the session is cancelled."""
    stand_in.silent.add(m.OpenSession)

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            opening = asyncio.create_task(client.open_session("toy", chunks=1))
            answer = m.SessionOpened((await heard(stand_in, m.OpenSession)).key, "s", "token")
            if opened:
                stand_in.say(answer)
                await client.status()  # answered after it
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            if not opened:
                stand_in.say(answer)
            assert await heard(stand_in, m.EndSession) == m.EndSession("s", "cancel")

    run(work())


def test_an_opening_that_is_cancelled_with_its_answer_leaves_no_session(stand_in: StandIn) -> None:
    """The answer is there when the task is cancelled, and nobody takes it."""
    stand_in.silent.add(m.OpenSession)
    arrived = threading.Event()

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            opening = asyncio.create_task(client.open_session("toy", chunks=1))
            key = (await heard(stand_in, m.OpenSession)).key
            with client._link.watching("s", arrived.set):
                stand_in.say(m.SessionOpened(key, "s", "token"))
                stand_in.say(m.SessionChanged("s", "ready", 1))
                assert arrived.wait(LIMIT_S)  # while the event loop stands still
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert await heard(stand_in, m.EndSession) == m.EndSession("s", "cancel")

    run(work())


# --- the end -----------------------------------------------------------------------------------------------------------


def test_streaming_22_leaving_the_block_drains_and_raising_in_it_cancels(stand_in: StandIn) -> None:
    """What was accepted can be read after a drain; the error of the block goes on, a cancellation too."""

    async def raising(client: AsyncClient, error: BaseException) -> None:
        async with client.open_session("toy", chunks=5):
            raise error

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            async with client.open_session("toy", chunks=5) as drained:
                await drained.submit(0, Control(keys=()))
            assert (await heard(stand_in, m.EndSession)).mode == "drain"
            assert [chunk.index async for chunk in drained] == [0]
            for error in (KeyError("x"), asyncio.CancelledError()):
                with pytest.raises(type(error)):
                    await raising(client, error)
                assert (await heard(stand_in, m.EndSession)).mode == "cancel"
            with pytest.raises(SessionClosed):
                await drained.press("w")

    run(work())


def test_a_session_whose_task_is_cancelled_in_its_block_is_cancelled(stand_in: StandIn) -> None:
    """The task ends as cancelled, and the broker is told before."""

    async def playing(client: AsyncClient, entered: asyncio.Event) -> None:
        async with client.open_session("toy", chunks=5) as session:
            entered.set()
            await session.next_chunk()

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            entered = asyncio.Event()
            task = asyncio.create_task(playing(client, entered))
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await heard(stand_in, m.EndSession)).mode == "cancel"

    run(work())


def test_streaming_23_a_failure_is_raised_after_the_chunks_before_it(stand_in: StandIn) -> None:
    """Stage and chunk are in the error; leaving the block raises nothing more."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client, client.open_session("toy", chunks=5) as session:
            await session.submit(0, Control(keys=()))
            stand_in.say(m.SessionEnded("s", "failed", Failure("stage", "boom", "make", 1)))
            assert (await anext(session)).index == 0
            with pytest.raises(SessionFailed, match="boom") as caught:
                await anext(session)
            assert (caught.value.stage, caught.value.index) == ("make", 1)

    run(work())


def test_what_is_dropped_is_given_up(stand_in: StandIn) -> None:
    """A session that nobody can reach is cancelled, and a client that nobody can reach leaves."""

    async def work() -> None:
        client = AsyncClient(stand_in.endpoint)
        session = await client.open_session("toy", chunks=5)
        del session
        gc.collect()
        assert await heard(stand_in, m.EndSession) == m.EndSession("s", "cancel")

    run(work())
    gc.collect()
    stand_in.next(m.Goodbye)
    for thread in threads():
        thread.join(LIMIT_S)
    assert not threads()
