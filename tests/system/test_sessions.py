"""Sessions through real processes, on a pipeline without torch that fails and hangs when told to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from reelwire import (
    Chunk,
    Client,
    Control,
    ControlError,
    OverloadError,
    RequestError,
    Session,
    SessionClosed,
    SessionFailed,
)

LIMIT_S = 60.0
Take = Callable[[Session, int], list[Chunk]]


def bytes_of(chunks: list[Chunk]) -> bytes:
    """All frames' bytes, one after the other."""
    return b"".join(chunk.frames.tobytes() for chunk in chunks)


def play(client: Client, seed: int, chunks: int = 6) -> list[Chunk]:
    """A whole session, steered by index."""
    with client.open_session("lab", seed=seed, chunks=chunks) as session:
        made = []
        for index in range(chunks):
            session.submit(index, Control(keys=["w"] if index % 2 else ["w", "d"]), timeout=LIMIT_S)
            if index:
                made.append(session.next_chunk(LIMIT_S))
        made.append(session.next_chunk(LIMIT_S))
        assert session.next_chunk(LIMIT_S) is None
        assert all(chunk is not None for chunk in made)
        return [chunk for chunk in made if chunk is not None]


def rest(session: Session) -> list[Chunk]:
    """Every chunk that is still to come."""
    return list(iter(lambda: session.next_chunk(LIMIT_S), None))


def until(condition: Callable[[dict[str, Any]], bool], client: Client) -> dict[str, Any]:
    """The broker's status once it says so; each look is a question and its answer, and there is a limit."""
    give_up = time.monotonic() + LIMIT_S
    while True:
        status = client.status()
        if condition(status):
            return status
        assert time.monotonic() < give_up, status


def gated(folder: Path) -> Path:
    """A named pipe at which a stage waits until it is opened for writing."""
    gate = folder / "gate"
    os.mkfifo(gate)
    return gate


def test_a_session_is_ordered_and_complete(stack: Any) -> None:
    """Every chunk comes once and in order, with its control, and the session completes."""
    stack.broker()
    client = stack.client()  # before there is a worker
    with pytest.raises(OverloadError, match="no worker serves 'lab' now"):
        play(client, seed=3)
    stack.worker("one")
    chunks = play(client, seed=3, chunks=8)
    assert [chunk.index for chunk in chunks] == list(range(8))
    assert [chunk.control.keys for chunk in chunks] == [("d", "w"), ("w",)] * 4
    assert [len(chunk.frames) for chunk in chunks] == [5] + [4] * 7
    assert chunks[-1].is_last
    until(lambda status: not status["sessions"], client)


def test_sessions_side_by_side_have_the_bytes_they_have_alone(stack: Any) -> None:
    """What other sessions run beside a session doesn't move a bit of it."""
    stack.broker()
    stack.worker("one", slots=8)
    stack.worker("two", slots=8)
    alone = {seed: bytes_of(play(stack.client(), seed)) for seed in range(3)}
    together: dict[int, bytes] = {}

    def run(seed: int) -> None:
        together[seed] = bytes_of(play(stack.client(), seed % 3))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert {seed: together[seed] == alone[seed % 3] for seed in range(9)} == dict.fromkeys(range(9), True)


def test_stages_may_live_in_different_processes(stack: Any) -> None:
    """A session's stages are initialized and run wherever they are served."""
    stack.broker()
    stack.worker("front", stages="mix,show")
    stack.worker("back", stages="draw")
    assert [chunk.index for chunk in play(stack.client(), seed=1)] == list(range(6))


def test_streaming_23_a_stage_error_fails_its_session_only(stack: Any, take: Take) -> None:
    """The chunks below the failure come, then the stage's own words with its name and chunk; a neighbour goes on."""
    stack.broker()
    stack.worker("one")
    client = stack.client()
    good = client.open_session("lab", seed=5, chunks=6)
    bad = client.open_session("lab", seed=6, chunks=6, fail_stage="show", fail_index=3)
    bad.press("w")
    assert [chunk.index for chunk in take(bad, 3)] == [0, 1, 2]
    with pytest.raises(SessionFailed, match="show broke at chunk 3") as caught:
        bad.next_chunk(LIMIT_S)
    assert (caught.value.stage, caught.value.index) == ("show", 3)
    good.press("w")
    assert [chunk.index for chunk in take(good, 6)] == list(range(6))
    assert good.next_chunk(LIMIT_S) is None


def test_a_refused_initialization_names_the_field(stack: Any) -> None:
    """What a stage refuses of a request comes back as the request's error, and the place is free again."""
    stack.broker()
    stack.worker("one", slots=1)
    client = stack.client()
    with pytest.raises(RequestError, match="is refused by the stage") as caught:
        client.open_session("lab", chunks=2, refuse="window")
    assert caught.value.field == "window"
    with pytest.raises(SessionFailed, match="draw can't begin"):
        client.open_session("lab", chunks=2, fail_stage="draw", fail_index=-1)
    assert len(play(client, seed=1, chunks=2)) == 2


def test_streaming_23_a_killed_worker_fails_its_sessions_and_no_others(stack: Any, take: Take) -> None:
    """Within 4 s its sessions say that the worker is lost, others go on, and a restarted one takes new ones."""
    stack.broker()
    first = stack.worker("one", slots=1)
    client = stack.client()
    lost = client.open_session("lab", seed=1, chunks=64)
    lost.press("w")
    take(lost, 2)
    stack.worker("two", slots=1)
    other = client.open_session("lab", seed=2, chunks=8)
    first.kill()
    killed_at = time.monotonic()
    with pytest.raises(SessionFailed, match="one"):
        rest(lost)
    assert time.monotonic() - killed_at < 4.0
    other.press("w")
    assert [chunk.index for chunk in take(other, 8)] == list(range(8))
    stack.worker("one", slots=1)
    assert len(play(client, seed=3)) == 6


def test_streaming_12_a_client_that_stops_reading_stops_its_own_session_only(stack: Any, take: Take) -> None:
    """Two chunks wait for it and no third is made; its neighbour at the same stages doesn't notice."""
    stack.broker()
    stack.worker("one")
    idle, busy = stack.client("idle"), stack.client("busy")
    unread = idle.open_session("lab", seed=1, chunks=64)
    unread.press("w")
    status = until(lambda status: any(s["next_commit"] == 2 for s in status["sessions"]), busy)
    assert len(play(busy, seed=2, chunks=32)) == 32
    [state] = [s for s in busy.status()["sessions"] if s["session"] == unread.id]
    assert state["next_commit"] == 2, status
    assert [chunk.index for chunk in take(unread, 5)] == list(range(5))
    unread.cancel(LIMIT_S)


def test_streaming_27_a_vanished_client_is_given_its_grace_and_then_cancelled(stack: Any) -> None:
    """A client that dies without a word holds its place for the grace, and not longer."""
    stack.broker(client_grace_s=0.2, heartbeat_s=0.2)
    stack.worker("one", slots=1)
    code = "import os, sys; from reelwire import Client; c = Client(sys.argv[1]); "
    code += "s = c.open_session('lab', chunks=64); s.press('w'); next(iter(s)); os.kill(os.getpid(), 9)"
    died = subprocess.run([sys.executable, "-P", "-c", code, stack.endpoint], check=False, timeout=LIMIT_S)
    assert died.returncode == -9
    client = stack.client()
    until(lambda status: not status["sessions"], client)
    assert len(play(client, seed=1)) == 6


def test_streaming_22_close_delivers_what_was_accepted(stack: Any, take: Take) -> None:
    """A close while chunks are being made delivers the accepted ones, then the session has ended."""
    stack.broker()
    stack.worker("one")
    session = stack.client().open_session("lab", seed=1, chunks=64)
    for index in range(2):
        session.submit(index, Control(keys=["w"]), timeout=LIMIT_S)
    session.close(timeout=LIMIT_S)
    assert session.state == "closed"
    assert [chunk.index for chunk in take(session, 2)] == [0, 1]
    assert session.next_chunk(LIMIT_S) is None
    with pytest.raises(Exception, match="closed"):
        session.submit(2, Control(keys=["w"]), timeout=LIMIT_S)


def test_streaming_22_cancel_ends_a_session_whose_stage_hangs(stack: Any, tmp_path: Path) -> None:
    """Both ends have a limit: the hung stage's worker is declared lost, and the broker serves others."""
    gate = gated(tmp_path)
    stack.broker(close_timeout_s=0.5)
    hung = stack.worker("hung", slots=1, reconnect="false", drain_s=0.1, stuck_s=0.5)
    client = stack.client()
    session = client.open_session("lab", chunks=4, hang_stage="draw", hang_index=1, gate=str(gate))
    session.press("w")
    assert session.next_chunk(LIMIT_S) is not None
    session.cancel(LIMIT_S)
    assert session.state == "cancelled"
    until(lambda status: not status["workers"], client)
    hung.kill()
    stack.worker("fresh", slots=1)
    assert len(play(client, seed=1)) == 6


def test_streaming_22_cancel_while_running_frees_the_place(stack: Any, take: Take) -> None:
    """A cancel drops what is buffered, and the one slot takes the next session."""
    stack.broker()
    stack.worker("one", slots=1)
    client = stack.client()
    for seed in range(5):
        session = client.open_session("lab", seed=seed, chunks=64)
        session.press("w")
        take(session, 2)
        session.cancel(LIMIT_S)
        assert session.state == "cancelled"
    assert len(play(client, seed=9)) == 6


def test_streaming_03_refused_controls_change_nothing(stack: Any, take: Take) -> None:
    """A duplicate and a gap are refused with what was expected; the session goes on as if they hadn't come."""
    stack.broker()
    stack.worker("one")
    session = stack.client().open_session("lab", seed=1, chunks=4)
    session.submit(0, Control(keys=["w"]), timeout=LIMIT_S)
    with pytest.raises(ControlError) as duplicate:
        session.submit(0, Control(keys=["s"]), timeout=LIMIT_S)
    assert (duplicate.value.code, duplicate.value.expected) == ("duplicate", 1)
    with pytest.raises(ControlError) as unknown:
        session.submit(1, Control(keys=["q"]), timeout=LIMIT_S)
    assert unknown.value.code == "unknown_key"
    session.submit(1, Control(keys=["a"]), timeout=LIMIT_S)
    assert [chunk.control.keys for chunk in take(session, 2)] == [("w",), ("a",)]
    session.cancel(LIMIT_S)


def test_a_session_waits_for_a_place_and_then_is_refused_as_overload(stack: Any) -> None:
    """With every slot taken a session waits; when the wait is over the error says when to try again."""
    stack.broker(placement_timeout_s=0.3)
    stack.worker("one", slots=1)
    client = stack.client()
    first = client.open_session("lab", chunks=4)
    with pytest.raises(OverloadError) as caught:
        client.open_session("lab", chunks=4)
    assert caught.value.retry_after_s > 0
    first.cancel(LIMIT_S)
    assert len(play(client, seed=1)) == 6


def test_a_reader_that_submits_as_it_reads_is_not_held_up_by_a_drain(stack: Any) -> None:
    """A control that waits for its grant is refused when the broker drains, so its reader goes on to the end."""
    broker = stack.broker()
    stack.worker("one")
    session = stack.client().open_session("lab", chunks=64)
    for index in range(2):
        session.submit(index, Control(keys=["w"]), timeout=LIMIT_S)
    reached, refused = threading.Event(), threading.Event()

    def read() -> None:
        with suppress(SessionClosed):  # the broker stops
            for chunk in iter(lambda: session.next_chunk(LIMIT_S), None):
                try:
                    session.submit(chunk.index + 2, Control(keys=["w"]), timeout=LIMIT_S)
                except SessionClosed:
                    refused.set()
                if chunk.index == 4:
                    reached.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert reached.wait(LIMIT_S)
    assert broker.stop() == 0
    reader.join(LIMIT_S)
    assert refused.is_set()


def test_streaming_23_a_lost_worker_is_told_to_whoever_only_submits(stack: Any) -> None:
    """With two chunks unread, a control that waits for its grant fails with the worker's loss, within 4 s."""
    stack.broker()
    worker = stack.worker("one")
    session = stack.client().open_session("lab", chunks=64)
    for index in range(2):
        session.submit(index, Control(keys=["w"]), timeout=LIMIT_S)
    worker.kill()
    with pytest.raises(SessionFailed, match="'one' was lost"):
        session.submit(2, Control(keys=["w"]), timeout=4.0)


def test_a_stopped_broker_drains_and_says_goodbye(stack: Any, take: Take) -> None:
    """SIGTERM lets accepted chunks be delivered, exits with 0, and the worker outlives it until it is told to stop."""
    broker = stack.broker()
    worker = stack.worker("one")
    session = stack.client().open_session("lab", chunks=64)
    session.submit(0, Control(keys=["w"]), timeout=LIMIT_S)
    done: list[int] = []
    stopper = threading.Thread(target=lambda: done.append(broker.stop()))
    stopper.start()
    assert [chunk.index for chunk in take(session, 1)] == [0]
    with pytest.raises(Exception, match=r"stop|shut|left"):
        rest(session)
    stopper.join(LIMIT_S)
    assert done == [0]
    assert worker.process.poll() is None
    assert worker.stop() == 0
