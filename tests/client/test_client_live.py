"""The SDK with a real broker and a real worker, each in its own process, over TCP."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from reelwire import AsyncClient, Client, Control, ControlError, RequestError, SessionFailed

PIPELINE = Path(__file__).resolve().parents[1] / "workers" / "numpy_pipeline.py"
LIMIT_S = 60.0


@contextmanager
def daemon(*arguments: str) -> Iterator[dict[str, Any]]:
    """A daemon that is ready, with what it said then; it is asked to stop, and must do so cleanly."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "reelwire", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    late = threading.Timer(LIMIT_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, f"{arguments[0]} ended before it was ready: {process.wait(LIMIT_S)}"
        late.cancel()  # what the tests wait for has limits of its own
        yield json.loads(ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        late.cancel()
        late.join(LIMIT_S)
        process.kill()
        process.wait(LIMIT_S)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A broker with one worker that serves a small pipeline of numpy."""
    with ExitStack() as stack:
        ready = stack.enter_context(daemon("broker", "--listen", "tcp://127.0.0.1:*"))
        worker = ("worker", "--broker", ready["endpoint"], "--pipeline", f"{PIPELINE}:build")
        stack.enter_context(daemon(*worker))
        yield ready["endpoint"]


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    with Client(endpoint) as client:
        yield client


def played(client: Client, seed: int, image: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """The frames of a short session that is steered by index, in one thread."""
    frames = []
    with client.open_session("toy", chunks=6, seed=seed, image=image) as session:
        for index in (0, 1):
            session.submit(index, Control(keys=["w"]), timeout=LIMIT_S)
        while (chunk := session.next_chunk(LIMIT_S)) is not None:
            frames.append(chunk.frames)
            if chunk.index + 2 < session.chunks:
                session.submit(chunk.index + 2, Control(keys=()), timeout=LIMIT_S)
    assert session.state == "completed"
    return np.concatenate(frames)


def test_a_session_is_a_function_of_its_request(client: Client) -> None:
    """Equal requests and controls give equal frames; another seed or another picture gives others."""
    first = played(client, 3)
    assert first.shape == (1 + 5 * 2, 1, 4, 3)
    np.testing.assert_array_equal(first, played(client, 3))
    assert not np.array_equal(first, played(client, 4))
    picture = np.full((2, 2, 3), 1, np.uint8)
    np.testing.assert_array_equal(played(client, 3, picture), played(client, 3, picture))


def test_streaming_15_a_held_key_makes_chunk_after_chunk(client: Client) -> None:
    """With a key down the session runs to its end, and each chunk says that it was held."""
    with client.open_session("toy", chunks=8) as session:
        session.press("w")
        chunks = []
        while (chunk := session.next_chunk(LIMIT_S)) is not None:
            chunks.append(chunk)
    assert [chunk.index for chunk in chunks] == list(range(8))
    assert [chunk.control_source for chunk in chunks] == ["tap"] + ["held"] * 7
    assert all(chunk.control == Control(keys=["w"]) for chunk in chunks)
    assert [len(chunk.change_to_frame_s) for chunk in chunks] == [1] + [0] * 7
    assert (chunks[0].facts["first"], chunks[-1].facts["last"], chunks[-1].is_last) == (True, True, True)
    assert set(chunks[3].timing.stages) == {"draw", "show"}


@pytest.mark.parametrize("binding", ["late", "early"])
def test_streaming_15_frames_depend_on_what_was_applied_and_not_on_when_it_was_bound(
    client: Client, binding: Literal["late", "early"]
) -> None:
    """Keys that go up and down while chunks are made: the applied controls, submitted by index, give the same bytes."""
    live = []
    with client.open_session("toy", chunks=12, seed=5, control_binding=binding) as session:
        session.press("w")
        while (chunk := session.next_chunk(LIMIT_S)) is not None:
            live.append(chunk)
            session.release("a") if chunk.index % 3 == 2 else session.press("a")
    assert {chunk.control_source for chunk in live} <= {"tap", "held"}
    again = []
    with client.open_session("toy", chunks=12, seed=5) as session:
        controls = iter(enumerate(chunk.control for chunk in live))
        for index, control in itertools.islice(controls, 2):
            session.submit(index, control, LIMIT_S)
        while (chunk := session.next_chunk(LIMIT_S)) is not None:
            again.append(chunk)
            for index, control in itertools.islice(controls, 1):
                session.submit(index, control, LIMIT_S)
    assert [chunk.frames.tobytes() for chunk in again] == [chunk.frames.tobytes() for chunk in live]


def test_an_event_loop_plays_sessions_side_by_side(endpoint: str) -> None:
    """Several tasks with one client, each with a session: each reads its own chunks, in order, to the end."""

    async def play(client: AsyncClient, seed: int) -> list[int]:
        async with client.open_session("toy", chunks=8, seed=seed, timeout=LIMIT_S) as session:
            await session.press("w")
            return [chunk.index async for chunk in session]

    async def work() -> list[list[int]]:
        async with AsyncClient(endpoint) as client, asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(play(client, seed) for seed in range(4)))

    assert asyncio.run(work()) == [list(range(8))] * 4


def test_controls_of_one_thread_and_chunks_of_another(client: Client) -> None:
    """A writer that submits as fast as it is allowed and a reader that takes as it likes end together."""
    with client.open_session("toy", chunks=20) as session:

        def write() -> None:
            for index in range(20):
                session.submit(index, Control(keys=()), LIMIT_S)

        writer = threading.Thread(target=write)
        writer.start()
        indices = []
        while (chunk := session.next_chunk(LIMIT_S)) is not None:
            indices.append(chunk.index)
        writer.join(LIMIT_S)
    assert (indices, session.state) == (list(range(20)), "completed")


def test_a_control_that_does_not_fit_changes_nothing(client: Client) -> None:
    """A gap, a repetition and an index behind the end have their codes, and the session goes on."""
    with client.open_session("toy", chunks=2) as session:
        for index, code in ((1, "gap"), (-1, "malformed"), (2, "past_end")):
            with pytest.raises(ControlError) as caught:
                session.submit(index, Control(keys=()), LIMIT_S)
            assert (caught.value.code, caught.value.expected) == (code, 0)
        session.submit(0, Control(keys=()), LIMIT_S)
        with pytest.raises(ControlError) as caught:
            session.submit(0, Control(keys=()), LIMIT_S)
        assert caught.value.code == "duplicate"
        session.submit(None, Control(keys=["a"]))
        chunks = [session.next_chunk(LIMIT_S), session.next_chunk(LIMIT_S)]
    assert [chunk.control for chunk in chunks if chunk] == [Control(keys=()), Control(keys=["a"])]


def test_an_initialization_that_fails_is_raised_at_the_opening(client: Client) -> None:
    """A refused field as RequestError, anything else as SessionFailed with the stage's words."""
    with pytest.raises(RequestError, match="-1 is negative") as refused:
        client.open_session("toy", chunks=2, seed=-1)
    assert refused.value.field == "seed"
    with pytest.raises(SessionFailed, match="no room for the caches") as failed:
        client.open_session("toy", chunks=2, seed=666)
    assert (failed.value.stage, failed.value.index) == ("draw", None)


def test_streaming_23_a_stage_that_raises_fails_the_session_after_the_chunks_before(client: Client) -> None:
    """Chunks 0 and 1 come, then the stage's words with the chunk's number."""
    session = client.open_session("toy", chunks=6)
    for index, keys in enumerate([(), (), ("s",)]):
        threading.Thread(target=session.submit, args=(index, Control(keys=keys))).start()
        if index < 2:
            chunk = session.next_chunk(LIMIT_S)
            assert chunk is not None
            assert chunk.index == index
    with pytest.raises(SessionFailed, match="no way back at 2") as failed:
        session.next_chunk(LIMIT_S)
    assert (failed.value.stage, failed.value.index, session.state) == ("draw", 2, "failed")


def test_streaming_22_ends_in_both_ways(client: Client) -> None:
    """A drain gives what was accepted, a cancel nothing; the broker counts both, and no session is left."""
    drained = client.open_session("toy", chunks=50)
    for index in range(2):
        drained.submit(index, Control(keys=()), LIMIT_S)
    drained.close(timeout=LIMIT_S)
    assert ([chunk.index for chunk in drained], drained.state) == ([0, 1], "closed")
    cancelled = client.open_session("toy", chunks=50)
    cancelled.press("w")
    assert cancelled.next_chunk(LIMIT_S) is not None
    cancelled.cancel(LIMIT_S)
    assert (cancelled.next_chunk(), cancelled.state) == (None, "cancelled")
    assert client.status()["sessions"] in ([], {}, 0)


def test_numbers_of_a_session_and_of_the_broker(client: Client) -> None:
    """Metrics are plain data of the session; the status names the worker's pipeline."""
    with client.open_session("toy", chunks=2) as session:
        session.submit(0, Control(keys=()), LIMIT_S)
        session.next_chunk(LIMIT_S)
        assert json.dumps(session.metrics())
    assert "toy" in json.dumps(client.status())
