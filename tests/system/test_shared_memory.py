"""Frames and latents through shared memory, between real processes: the same bytes, and nothing left of the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reelwire import Chunk, Client, Control, Session, SessionFailed
from reelwire.segments import SEGMENTS_MAX, reap
from reelwire.tensors import PROBE_BYTES

LIMIT_S = 60.0
WIDE = "side=320"  # 100 KiB between the stages, above 1 MB of frames
Take = Callable[[Session, int], list[Chunk]]

DYING = """
import os, sys
from reelwire import Client
client = Client(sys.argv[1])
session = client.open_session("lab", chunks=64)
session.press("w")
next(iter(session))
print("a chunk is out", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's producers, in a place of its own."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory" / f"reelwire-{os.geteuid()}"


def segments(memory: Path) -> dict[str, set[str]]:
    """Of each producer, the segments that it has."""
    found: dict[str, set[str]] = {}
    for path in memory.glob("*/*"):
        found.setdefault(path.parent.name, set())
        if path.name not in ("lock", "probe"):
            found[path.parent.name].add(path.name)
    return found


def is_frames(path: Path) -> bool:
    """Whether it is a segment with room for a chunk."""
    return path.stat().st_size > 4 * 320 * 320 * 3


def until(condition: Callable[[], bool], client: Client) -> None:
    """Wait for it; each look is behind a question to the broker and its answer, and there is a limit."""
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up
        client.status()


def two_workers(stack: Any, *names: str, **settings: object) -> list[Any]:
    """One that makes sheets and one that shows them, so that both latents and frames leave their process."""
    first, second = names
    making = stack.worker(first, stages="mix,draw", options=WIDE, **settings)
    return [making, stack.worker(second, stages="show", options=WIDE, **settings)]


def play(client: Client, pipeline: str = "lab", chunks: int = 8) -> bytes:
    """The frames of a whole session, steered by index."""
    made = []
    with client.open_session(pipeline, seed=5, chunks=chunks) as session:
        for index in range(chunks):
            session.submit(index, Control(keys=["w"] if index % 3 else ["w", "d"]), timeout=LIMIT_S)
            chunk = session.next_chunk(LIMIT_S)
            assert chunk is not None
            made.append(chunk.frames.tobytes())
    return b"".join(made)


def settle(stack: Any, client: Client, memory: Path) -> None:
    """Play until all that is large goes through shared memory: the peers have found out that they can."""
    until(lambda: play(client) != b"" and len([one for one in segments(memory).values() if one]) == 2, client)


def test_the_same_bytes_with_shared_memory_and_inside_of_messages(stack: Any, memory: Path) -> None:
    """Whether frames are written once and mapped, or travel through the broker, not one byte differs."""
    stack.broker()
    shared = two_workers(stack, "making", "showing")
    client = stack.client()
    settle(stack, client, memory)
    through_memory = play(client)
    for worker in shared:
        assert worker.stop() == 0
    assert not memory.exists()
    two_workers(stack, "making", "showing", shared_memory_bytes_max=0)
    assert play(client) == through_memory
    assert not memory.exists()


def test_a_long_session_uses_few_segments(stack: Any, memory: Path, take: Take) -> None:
    """What was read comes back and is used again: segments are bounded by what is under way, not by the chunks."""
    stack.broker()
    two_workers(stack, "making", "showing")
    client = stack.client()
    settle(stack, client, memory)
    with client.open_session("lab", chunks=64) as session:
        session.press("w")
        most = 0
        for index in range(64):
            [chunk] = take(session, 1)
            assert chunk.index == index
            most = max(most, sum(map(len, segments(memory).values())))
    assert 2 <= most <= 12
    assert most < SEGMENTS_MAX


def test_memory_that_is_too_small_is_made_up_for_by_messages(stack: Any, memory: Path) -> None:
    """A worker that may write less than one chunk of frames sends them inside of messages; the bytes are the same."""
    stack.broker()
    stack.worker("small", options=WIDE, shared_memory_bytes_max=200_000)
    client = stack.client()
    until(lambda: play(client) != b"" and any(segments(memory).values()), client)
    frames = play(client)
    [sizes] = [[path.stat().st_size for path in folder.iterdir()] for folder in memory.iterdir()]
    assert 0 < sum(sizes) - PROBE_BYTES <= 200_000
    stack.worker("plenty", options=f"{WIDE},name=plenty")
    client = stack.client()
    until(lambda: play(client, "plenty") == frames and any(map(is_frames, memory.glob("*/*"))), client)


def test_a_client_that_sees_other_memory_gets_messages(
    stack: Any, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers are asked what they can open: the workers share, and this client, as in another container, doesn't."""
    stack.broker()
    two_workers(stack, "making", "showing")
    (tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path / "elsewhere"))
        apart = stack.client()
    until(lambda: play(apart) != b"" and any(segments(memory).values()), apart)
    assert len([held for held in segments(memory).values() if held]) == 1
    frames = play(apart)
    client = stack.client()
    settle(stack, client, memory)
    assert play(client) == frames


def test_a_killed_producer_leaves_what_a_reaper_removes(stack: Any, memory: Path, take: Take) -> None:
    """Its session fails, another pipeline's session goes on, and a restarted worker finds the place clean."""
    stack.broker()
    _, showing = two_workers(stack, "making", "showing")
    stack.worker("other", options=f"{WIDE},name=other")
    client = stack.client()
    settle(stack, client, memory)
    expected = play(client, "other")
    owners = set(segments(memory))
    lost = client.open_session("lab", chunks=64)
    lost.press("w")
    [first] = take(lost, 1)
    kept = first.frames.tobytes()
    with client.open_session("other", seed=5, chunks=8) as session:
        session.submit(0, Control(keys=["w", "d"]), timeout=LIMIT_S)
        made = [take(session, 1)[0].frames.tobytes()]
        showing.kill()
        with pytest.raises(SessionFailed, match="showing"):
            list(lost)
        assert first.frames.tobytes() == kept
        for index in range(1, 8):
            session.submit(index, Control(keys=["w"] if index % 3 else ["w", "d"]), timeout=LIMIT_S)
            made.append(take(session, 1)[0].frames.tobytes())
    assert b"".join(made) == expected
    assert set(segments(memory)) == owners  # nobody has looked after the dead yet
    stack.worker("showing", stages="show", options=WIDE)
    assert len(owners & set(segments(memory))) == 2
    assert reap(memory.parent) == []
    assert play(client) == expected


def test_a_killed_client_costs_no_memory_and_no_one_else(stack: Any, memory: Path) -> None:
    """What it may still have read is unlinked and not written again; the session beside it doesn't notice."""
    stack.broker(client_grace_s=0.2, heartbeat_s=0.2)
    workers = two_workers(stack, "making", "showing")
    client = stack.client()
    settle(stack, client, memory)
    frames = play(client)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", DYING, stack.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"a chunk is out\n"
        with client.open_session("lab", seed=5, chunks=8) as session:
            dying.kill()
            dying.wait(LIMIT_S)
            made = []
            for index in range(8):
                session.submit(index, Control(keys=["w"] if index % 3 else ["w", "d"]), timeout=LIMIT_S)
                chunk = session.next_chunk(LIMIT_S)
                assert chunk is not None
                made.append(chunk.frames.tobytes())
    assert b"".join(made) == frames
    until(lambda: not client.status()["sessions"], client)
    assert play(client) == frames
    for worker in workers:  # a worker that still missed a piece would wait for it
        assert worker.stop() == 0
    assert not memory.exists()


def test_a_stopped_worker_keeps_its_memory(stack: Any, memory: Path, take: Take) -> None:
    """SIGSTOP is no death: nobody reaps it, and it goes on where it was."""
    stack.broker()
    _, showing = two_workers(stack, "making", "showing")
    client = stack.client()
    settle(stack, client, memory)
    with client.open_session("lab", chunks=8) as session:
        session.press("w")
        take(session, 2)
        showing.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, showing.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert reap(memory.parent) == []
        showing.process.send_signal(signal.SIGCONT)
        assert [chunk.index for chunk in take(session, 6)] == list(range(2, 8))
