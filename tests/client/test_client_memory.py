"""Chunks that workers of this machine wrote into shared memory, in the hands of a client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reelwire import Client, RequestError, SessionFailed
from reelwire import client_events as e
from reelwire import messages as m
from reelwire.client_memory import ClientMemory
from reelwire.messages import Artifact, Failure, SegmentUse
from reelwire.segments import Pool
from reelwire.tensors import Shared, TensorRef, to_array

StandIn = Any  # of conftest.py
Rig = Any
LIMIT_S = 10.0
FRAMES = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
LOST = Failure("worker_lost", "the worker that made chunk 0 is lost: no such memory", index=0)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """What a worker writes into, where this process looks for it."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))
    pool = Pool(1 << 20)
    yield pool
    pool.close()


def lent(pool: Pool, array: NDArray[np.uint8]) -> tuple[TensorRef, SegmentUse]:
    """An array as a worker hands it on, and what gives it back."""
    piece = pool.take(array.nbytes)
    assert piece is not None
    piece.view[:] = array.tobytes()
    return TensorRef(array.dtype.name, array.shape, piece.place), piece.use


def made(ref: TensorRef, index: int = 0) -> m.Chunk:
    """A chunk of frames that are there."""
    applied = m.Applied("held", Artifact({"keys": ["w"], "reset_pose": False}), 1)
    outputs = {"frames": Artifact({"codec": "none"}, {"frames": ref})}
    return m.Chunk("s", index, outputs, applied, {}, m.ChunkTiming(0.0, 0.0, None, {}), False)


# --- reading it --------------------------------------------------------------------------------------------------------


def test_bytes_are_copied_out_of_shared_memory(pool: Pool) -> None:
    """Frames stay what they were when the worker writes something else there, and when it is gone."""
    memory = ClientMemory(wanted=True, frame_bytes_max=1 << 20)
    assert memory.probe(pool.owner) == pool.probe
    ref, use = lent(pool, FRAMES)
    chunk = memory.with_bytes(made(ref))
    assert isinstance(chunk, m.Chunk)
    pool.give_back(use)
    again, _ = lent(pool, np.zeros_like(FRAMES))
    assert isinstance(again.place, Shared)
    assert isinstance(ref.place, Shared)
    assert again.place.segment == ref.place.segment
    pool.close()
    frames = chunk.outputs["frames"]
    np.testing.assert_array_equal(to_array(frames.tensors["frames"]), FRAMES)
    assert frames.values == {"codec": "none"}
    memory.close()


def test_a_chunk_that_came_in_its_message_is_left_alone() -> None:
    """Nothing is copied for it."""
    from reelwire.tensors import from_array

    chunk = made(from_array(FRAMES))
    assert ClientMemory(wanted=True, frame_bytes_max=1).with_bytes(chunk) is chunk


def test_memory_that_is_gone_means_that_its_worker_is_lost(pool: Pool) -> None:
    """The failure says so, and which chunk it was; so does one whose control is nowhere."""
    memory = ClientMemory(wanted=True, frame_bytes_max=1 << 20)
    ref, _ = lent(pool, FRAMES)
    chunk = made(ref, index=3)
    pool.close()
    for lost in (chunk, replace(chunk, outputs={}, applied=m.Applied("held", chunk.outputs["frames"]))):
        failure = memory.with_bytes(lost)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.index) == ("worker_lost", 3)
        assert failure.message.startswith("the worker that made chunk 3 is lost: shared memory ")


def test_a_tensor_in_shared_memory_has_the_limit_of_one_in_a_message(pool: Pool) -> None:
    """It is not copied when it is larger than the client said."""
    ref, _ = lent(pool, FRAMES)
    failure = ClientMemory(wanted=True, frame_bytes_max=95).with_bytes(made(ref))
    assert failure == Failure("stage", "a tensor of chunk 0 takes 96 bytes; accepted: 95", index=0)


def test_a_client_that_wants_none_reads_none(pool: Pool) -> None:
    """Its probes fail, so that it is sent everything in messages; what is named all the same isn't read."""
    memory = ClientMemory(wanted=False, frame_bytes_max=1 << 20)
    assert memory.probe(pool.owner) == b""
    failure = memory.with_bytes(made(lent(pool, FRAMES)[0]))
    assert isinstance(failure, Failure)
    assert "isn't read by this client" in failure.message
    memory.close()


# --- what it means to a session ----------------------------------------------------------------------------------------


def test_a_probe_is_answered_by_whoever_can_look(attached: Rig) -> None:
    """The core has no files: it asks for the answer."""
    attached.hear(m.ProbeMemory("worker-1"))
    assert attached.probes == ["worker-1"]


def test_a_chunk_that_can_not_be_had_fails_its_session(attached: Rig) -> None:
    """After the chunks before it; the broker is told, and what it still says is dropped."""
    view = attached.open()
    attached.chunk(0)
    pending = attached.call(e.Submit, "s", 4, Artifact({"keys": []}))
    attached.feed(e.Unreadable(attached.now, 7, made(TensorRef("uint8", (0,), Shared("a", "b", 1)), 1), LOST))
    attached.error(pending, SessionFailed, "is lost")
    assert [attached.take(), attached.take()] == [0, None]
    assert (view.state, view.failure) == ("failed", LOST)
    assert attached.said(m.EndSession) == [m.EndSession("s", "cancel")]
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert view.state == "failed"


def test_memory_of_chunks_that_nobody_waits_for_may_be_gone(attached: Rig) -> None:
    """Repeated ones, those of a session that ends or has ended, those of another connection: nothing fails for them."""
    view = attached.open(chunks=1)
    lost = made(TensorRef("uint8", (0,), Shared("a", "b", 1)))
    attached.feed(e.Unreadable(attached.now, 6, lost, LOST))
    attached.chunk(0, chunks=1)
    for chunk in (lost, replace(lost, index=1)):
        attached.feed(e.Unreadable(attached.now, 7, chunk, LOST))
    attached.hear(m.SessionEnded("s", "completed"))
    attached.feed(e.Unreadable(attached.now, 7, lost, LOST))
    assert view.failure is None
    assert attached.core.dropped == {"another attachment": 1, "chunk out of order": 2, "unknown session": 1}


def test_a_cancelled_session_does_not_fail(attached: Rig) -> None:
    """The worker may have its memory back before the client hears of the chunk."""
    view = attached.open()
    attached.call(e.End, "s", "cancel")
    attached.feed(e.Unreadable(attached.now, 7, made(TensorRef("uint8", (0,), Shared("a", "b", 1))), LOST))
    attached.hear(m.SessionEnded("s", "cancelled"))
    assert (view.state, view.failure) == ("cancelled", None)


# --- on a socket -------------------------------------------------------------------------------------------------------


def test_chunks_in_shared_memory_stay_valid_for_ever(stand_in: StandIn, pool: Pool) -> None:
    """Probed, read, acknowledged, overwritten: a list of all chunks holds what each was made with."""
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=3)
        stand_in.say(m.ProbeMemory(pool.owner))
        assert stand_in.next(m.MemoryProbed) == m.MemoryProbed(pool.owner, pool.probe)
        chunks = []
        for index in range(3):
            ref, use = lent(pool, np.full_like(FRAMES, index))
            stand_in.say(made(ref, index))
            chunk = session.next_chunk(LIMIT_S)
            assert chunk is not None
            chunks.append(chunk)
            pool.give_back(use)
    assert [int(chunk.frames.max()) for chunk in chunks] == [0, 1, 2]
    assert not any(chunk.frames.flags.writeable for chunk in chunks)


def test_memory_of_a_worker_that_is_gone_is_let_go(stand_in: StandIn, pool: Pool) -> None:
    """Within a heartbeat, although no chunk comes any more that would be mapped."""
    stand_in.heartbeat_s = 0.05
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=3)
        stand_in.say(made(lent(pool, FRAMES)[0]))
        assert session.next_chunk(LIMIT_S) is not None
        reader = client._link._memory._reader
        assert reader is not None
        assert len(reader._mapped) == 1
        pool.close()
        until = time.monotonic() + LIMIT_S
        while reader._mapped and time.monotonic() < until:
            client.status()
        assert not reader._mapped


def test_a_worker_that_died_with_a_chunk_fails_the_session(stand_in: StandIn, pool: Pool) -> None:
    """Whoever waits for the chunk gets the reason; the client goes on."""
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=3)
        ref, _ = lent(pool, FRAMES)
        pool.close()
        stand_in.say(made(ref))
        with pytest.raises(SessionFailed, match="the worker that made chunk 0 is lost: ") as caught:
            session.next_chunk(LIMIT_S)
        assert caught.value.index == 0
        assert stand_in.next(m.EndSession).mode == "cancel"
        assert client.status() == {"workers": 0}


def test_shared_memory_can_be_switched_off(stand_in: StandIn, pool: Pool) -> None:
    """Then no worker's memory is found; a setting that is neither on nor off is refused."""
    with Client(stand_in.endpoint, shared_memory=False):
        stand_in.say(m.ProbeMemory(pool.owner))
        assert stand_in.next(m.MemoryProbed) == m.MemoryProbed(pool.owner, b"")
    with pytest.raises(RequestError, match="shared_memory: 1 is not accepted"):
        Client(stand_in.endpoint, shared_memory=1)  # type: ignore[arg-type]
