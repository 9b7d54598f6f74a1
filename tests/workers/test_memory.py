"""The shared memory of one worker process: there, switched off, or not to be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reelwire.messages import SegmentUse
from reelwire.segments import MemoryLostError, Pool
from reelwire.tensors import Shared
from reelwire.workers.memory import SharedMemory


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory lies where the test looks."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))


def test_what_is_written_can_be_read_and_is_gone_in_the_end(tmp_path: Path) -> None:
    """By the process itself as by others; the offer says how others find it."""
    memory = SharedMemory(1 << 20)
    assert memory.offer is not None
    assert memory.probe(memory.offer.owner) == memory.offer.probe
    piece = memory.take(70_000)
    assert piece is not None
    piece.view[:3] = b"abc"
    assert bytes(memory.view(piece.place, 3)) == b"abc"
    memory.take_back([piece.use, SegmentUse("s9", 1)])
    again = memory.take(70_000)
    assert again is not None
    assert again.place.generation == 2
    assert memory.probe("../etc") == memory.probe("nobody") == b""
    memory.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_abandoned_is_neither_read_nor_written_again(tmp_path: Path) -> None:
    """Whoever has it mapped may read on."""
    memory = SharedMemory(1 << 20)
    piece = memory.take(70_000)
    assert piece is not None
    piece.view[:3] = b"abc"
    mapped = memory.view(piece.place, 3)
    memory.abandon()
    memory.take_back([piece.use])
    other = memory.take(70_000)
    assert other is not None
    assert other.place.segment != piece.place.segment
    assert bytes(mapped) == b"abc"
    with pytest.raises(MemoryLostError):
        memory.view(piece.place, 3)
    memory.close()


def test_memory_that_is_switched_off_is_neither_written_nor_read(tmp_path: Path) -> None:
    """Nothing is offered, no probe is answered, and no folder is made."""
    other = Pool(1 << 20, tmp_path)
    memory = SharedMemory(0)
    assert (memory.offer, memory.problem, memory.take(1), memory.probe(other.owner)) == (None, "", None, b"")
    with pytest.raises(MemoryLostError, match="read no shared memory"):
        memory.view(Shared(other.owner, "s1", 1), 1)
    memory.take_back([SegmentUse("s1", 1)])
    memory.abandon()
    memory.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_memory_everything_travels_in_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is kept for the log."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path / "nothing" / "here"))
    memory = SharedMemory(1 << 20)
    assert memory.offer is None
    assert "nothing/here" in memory.problem
    assert memory.take(100_000) is None
    memory.close()


def test_what_the_dead_left_is_removed_at_the_start(tmp_path: Path) -> None:
    """Those that live keep theirs."""
    alive = Pool(1 << 20, tmp_path)
    left = tmp_path / f"reelwire-{os.geteuid()}" / "dead"
    left.mkdir(mode=0o700)
    (left / "lock").touch(0o600)
    (left / "s1").touch(0o600)
    memory = SharedMemory(1 << 20)
    assert memory.reaped == ["dead"]
    assert not left.exists()
    assert memory.probe(alive.owner) == alive.probe
    memory.close()
    alive.close()


def test_a_sweep_lets_go_of_what_has_no_name_any_more(tmp_path: Path) -> None:
    """What a producer unlinked isn't kept by those who have read it; what it still uses is."""
    other, memory = Pool(1 << 20, tmp_path), SharedMemory(1 << 20)
    pieces = [other.take(70_000), other.take(70_000)]
    for piece in pieces:
        assert piece is not None
        memory.view(piece.place, 3)
    assert pieces[0] is not None
    other.give_back(SegmentUse(pieces[0].place.segment, 1, broken=True))
    memory.sweep()
    assert memory._reader is not None
    assert [segment for _, segment in memory._reader._mapped] == ["s2"]
    other.close()
    memory.close()
    SharedMemory(0).sweep()
