"""The producer of shared memory: what a pool hands out and takes back, and what it keeps on the disk."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reelwire import segments
from reelwire.parts import SegmentUse
from reelwire.segments import MemoryUnavailableError, Piece, Pool, Reader
from reelwire.tensors import PROBE_BYTES, TensorRef, check

MB = 1 << 20
KB = 1 << 10


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(8 * MB, tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def taken(pool: Pool, nbytes: int, fill: int = 0) -> Piece:
    """A piece of that size, all bytes the same."""
    piece = pool.take(nbytes)
    assert piece is not None
    piece.view[:] = bytes([fill]) * nbytes
    return piece


def folder(pool: Pool, base: Path) -> Path:
    """The pool's folder."""
    return base / f"reelwire-{os.geteuid()}" / pool.owner


def on_disk(pool: Pool, base: Path) -> dict[str, int]:
    """Names and sizes of the pool's segments, as others find them."""
    sizes = {path.name: path.stat().st_size for path in folder(pool, base).iterdir()}
    assert sizes.pop("lock") == 0
    assert sizes.pop("probe") == PROBE_BYTES
    return sizes


# --- the producer ----------------------------------------------------------------------------------------------------


def test_a_piece_has_room_for_exactly_its_bytes_and_a_reference_that_is_valid(pool: Pool) -> None:
    """What is handed out is writable, as long as asked for, and its place passes the checks of the wire."""
    piece = pool.take(100_001)
    assert piece is not None
    assert (piece.view.nbytes, piece.view.readonly, piece.view.format) == (100_001, False, "B")
    check(TensorRef("uint8", (100_001,), piece.place))
    assert piece.use == SegmentUse(piece.place.segment, piece.place.generation)
    assert pool.outstanding == 1


def test_files_and_folders_are_open_to_their_user_alone(pool: Pool, tmp_path: Path) -> None:
    """Folders are 0700 and files 0600: what is generated for one user isn't shown to others."""
    taken(pool, 1)
    own = folder(pool, tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (own.parent, own)] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in own.iterdir()} == {0o600}


def test_a_segment_that_came_back_is_used_again_in_a_new_generation(pool: Pool) -> None:
    """A piece of the same size gets the segment of the one that came back last."""
    first, second = taken(pool, 100 * KB), taken(pool, 100 * KB)
    assert first.place.segment != second.place.segment
    pool.give_back(first.use)
    pool.give_back(second.use)
    again = taken(pool, 99 * KB)
    assert again.place.segment == second.place.segment
    assert again.place.generation == second.place.generation + 1
    assert pool.outstanding == 1


def test_sizes_are_rounded_up_to_few_classes_and_by_a_quarter_at_most() -> None:
    """Tensors that differ a little share segments; the smallest segment has 64 KiB."""
    sizes = [segments._rounded(nbytes) for nbytes in range(1, 4 * MB, 4097)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 1 + 6 * 4
    for nbytes in (0, 1, 64 * KB, 64 * KB + 1, 80 * KB, 14_000_000, 1 << 30):
        assert max(nbytes, 64 * KB) <= segments._rounded(nbytes) <= max(1.25 * nbytes, 64 * KB)
        assert segments._rounded(nbytes) % mmap.PAGESIZE == 0


def test_what_would_go_over_the_limit_is_not_handed_out(pool: Pool, tmp_path: Path) -> None:
    """`take` gives None when all bytes are out, and has room again for what comes back."""
    pieces = [taken(pool, 2 * MB) for _ in range(4)]
    assert pool.nbytes == 8 * MB
    assert pool.take(1) is None
    assert sum(on_disk(pool, tmp_path).values()) == 8 * MB
    pool.give_back(pieces[0].use)
    assert pool.take(2 * MB) is not None
    assert pool.take(9 * MB) is None


def test_idle_segments_make_room_for_others(pool: Pool, tmp_path: Path) -> None:
    """A size that isn't there is made at the cost of segments that nobody uses, the longest idle first."""
    pieces = [taken(pool, 2 * MB) for _ in range(3)]
    for piece in pieces[:2]:
        pool.give_back(piece.use)
    taken(pool, 3 * MB)
    assert set(on_disk(pool, tmp_path)) == {pieces[1].place.segment, pieces[2].place.segment, "s4"}


def test_idle_segments_keep_half_of_the_bytes_at_most(pool: Pool, tmp_path: Path) -> None:
    """A pool doesn't hold on to what a burst took; what came back last stays, however big it is."""
    pieces = [taken(pool, 1 * MB) for _ in range(8)]
    for piece in pieces:
        pool.give_back(piece.use)
    assert set(on_disk(pool, tmp_path)) == {piece.place.segment for piece in pieces[4:]}
    big = taken(pool, 7 * MB)
    pool.give_back(big.use)
    assert set(on_disk(pool, tmp_path)) == {big.place.segment}


def test_what_has_been_idle_for_long_is_unlinked(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that isn't needed while others go to and fro makes way."""
    monkeypatch.setattr(segments, "IDLE_TAKES_MAX", 10)
    old = taken(pool, 1 * MB)
    pool.give_back(old.use)
    for count in range(11):
        assert (old.place.segment in on_disk(pool, tmp_path)) is (count < 11)
        pool.give_back(taken(pool, 64 * KB).use)
    assert old.place.segment not in on_disk(pool, tmp_path)


def test_segments_are_bounded_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may cost a file descriptor."""
    monkeypatch.setattr(segments, "SEGMENTS_MAX", 3)
    pool = Pool(8 * MB, tmp_path)
    pieces = [taken(pool, 1) for _ in range(3)]
    assert pool.take(1) is None
    pool.give_back(pieces[0].use)
    assert pool.take(1 * MB) is not None
    assert pieces[0].place.segment not in on_disk(pool, tmp_path)
    pool.close()


def test_a_broken_piece_is_unlinked_and_never_used_again(pool: Pool, tmp_path: Path) -> None:
    """Its reader was lost without a word and may still read."""
    piece = taken(pool, 100 * KB)
    pool.give_back(SegmentUse(piece.place.segment, piece.place.generation, broken=True))
    assert on_disk(pool, tmp_path) == {}
    assert (pool.nbytes, pool.outstanding) == (0, 0)
    assert taken(pool, 100 * KB).place.segment != piece.place.segment


def test_what_is_not_out_cannot_come_back(pool: Pool) -> None:
    """Unknown names, older generations and repetitions are ignored: a segment never goes to two at once."""
    piece = taken(pool, 1)
    pool.give_back(piece.use)
    pool.give_back(piece.use)
    again = taken(pool, 1)
    for use in (
        piece.use,
        SegmentUse("s9", 1),
        SegmentUse("../lock", 1),
        SegmentUse(again.use.segment, 7, broken=True),
    ):
        pool.give_back(use)
    assert pool.outstanding == 1
    assert taken(pool, 1).place.segment != again.place.segment


def test_abandoned_pieces_are_unlinked_and_idle_ones_kept(pool: Pool, tmp_path: Path) -> None:
    """When nobody will say any more what has been read, nothing that is out is written again."""
    out, idle = taken(pool, 1), taken(pool, 1)
    pool.give_back(idle.use)
    pool.abandon()
    assert set(on_disk(pool, tmp_path)) == {idle.place.segment}
    assert pool.outstanding == 0
    pool.give_back(out.use)
    assert [taken(pool, 1).place.segment for _ in range(2)] == [idle.place.segment, "s3"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_a_full_disk_is_an_answer(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """`take` gives None, leaves nothing behind, and tries again the next time."""

    def full(_descriptor: int, _offset: int, _size: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert pool.take(1 * MB) is None
    assert (on_disk(pool, tmp_path), pool.nbytes, pool.outstanding) == ({}, 0, 0)
    assert pool.take(1 * MB) is not None


def test_no_address_space_and_no_descriptors_are_answers_too(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system can't give, the tensor travels inside of its message instead."""

    def refused(*_args: object, **_words: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    for name in ("mmap", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(mmap if name == "mmap" else os, name, refused)
            assert pool.take(1 * MB) is None
        assert (on_disk(pool, tmp_path), pool.nbytes) == ({}, 0)


def test_a_segment_that_somebody_removed_is_not_used_again(pool: Pool, tmp_path: Path) -> None:
    """A user's last logout may empty the folder: then there is no shared memory, and no reference to nothing."""
    pieces = [taken(pool, 1), taken(pool, 1)]
    for piece in pieces:
        pool.give_back(piece.use)
    (folder(pool, tmp_path) / pieces[1].place.segment).unlink()
    assert taken(pool, 1).place.segment == pieces[0].place.segment
    assert pool.nbytes == 64 * KB


def test_closing_unlinks_everything_and_views_stay_good(tmp_path: Path) -> None:
    """Neither the pool's close nor its second one minds who still holds a view; nothing is handed out any more."""
    pool = Pool(8 * MB, tmp_path)
    out, back = taken(pool, 100, fill=7), taken(pool, 100)
    pool.give_back(back.use)
    pool.close()
    pool.close()
    assert list(tmp_path.iterdir()) == []
    out.view[0] = 9
    assert bytes(out.view[:2]) == b"\x09\x07"
    assert pool.take(1) is None
    pool.give_back(out.use)
    pool.abandon()
    assert (pool.nbytes, pool.outstanding) == (0, 0)


def test_a_segment_that_is_made_while_the_pool_closes_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes last, close or the new segment, leaves nothing."""
    pool = Pool(8 * MB, tmp_path)
    reserve = os.posix_fallocate

    def closing(descriptor: int, offset: int, size: int) -> None:
        reserve(descriptor, offset, size)
        pool.close()

    monkeypatch.setattr(os, "posix_fallocate", closing)
    assert pool.take(1) is None
    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_open(tmp_path: Path) -> None:
    """A pool and a reader that are closed hold no descriptor, once their views are gone."""
    gc.collect()
    before = set(os.listdir("/dev/fd"))  # noqa: PTH208
    pool, reader = Pool(8 * MB, tmp_path), Reader(tmp_path)
    pieces = [taken(pool, 1) for _ in range(5)]
    views = [reader.view(piece.place, 1) for piece in pieces]
    pool.close()
    reader.close()
    del pieces, views
    gc.collect()
    assert set(os.listdir("/dev/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("count", [4])
def test_threads_never_share_a_piece(tmp_path: Path, count: int) -> None:
    """Stages take while the loop gives back; what one wrote stands there until it has come back."""
    pool, reader = Pool(2 * MB, tmp_path), Reader(tmp_path)
    failures: list[str] = []

    def work(fill: int) -> None:
        for turn in range(200):
            nbytes = (64 + 16 * (turn % 3)) * KB
            piece = pool.take(nbytes)
            if piece is None:
                continue
            piece.view[:] = bytes([fill]) * nbytes
            if bytes(reader.view(piece.place, nbytes)) != bytes([fill]) * nbytes:
                failures.append(f"{piece.place} was written by another")
            pool.give_back(piece.use)

    threads = [threading.Thread(target=work, args=(fill,)) for fill in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.outstanding == 0
    assert sum(on_disk(pool, tmp_path).values()) == pool.nbytes <= 2 * MB
    pool.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 700 * KB)),
        st.tuples(st.sampled_from(["back", "broken", "stale"]), st.integers(0, 30)),
        st.tuples(st.just("abandon"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(STEPS)
def test_any_order_of_takes_and_returns(steps: list[tuple[str, int]]) -> None:
    """No segment is out twice, the bytes are the files' and within the limit, the broken are never seen again."""
    limit = 2 * MB
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        pool, reader = Pool(limit, base), Reader(base, mappings_max=3)
        out: dict[str, tuple[Piece, bytes]] = {}
        gone: set[str] = set()
        past: list[SegmentUse] = []
        for number, (step, value) in enumerate(steps):
            if step == "take":
                piece = pool.take(value)
                if piece is None:
                    assert sum(segments._rounded(each.view.nbytes) for each, _ in out.values()) + value > limit * 3 // 4
                    continue
                assert piece.place.segment not in {*out, *gone}
                assert piece.use not in past
                piece.view[:] = content = bytes([number % 251]) * value
                out[piece.place.segment] = (piece, content)
            elif step == "abandon":
                pool.abandon()
                gone |= set(out)
                out.clear()
            elif step == "stale" and past:
                pool.give_back(past[value % len(past)])
            elif step in ("back", "broken") and out:
                key = sorted(out)[value % len(out)]
                piece, content = out.pop(key)
                assert reader.view(piece.place, len(content)) == content
                past.append(piece.use)
                if step == "broken":
                    gone.add(key)
                pool.give_back(SegmentUse(key, piece.use.generation, broken=step == "broken"))
            sizes = on_disk(pool, base)
            assert sum(sizes.values()) == pool.nbytes <= limit
            assert set(out) <= set(sizes)
            assert not gone & set(sizes)
            assert pool.outstanding == len(out)
            assert all(piece.view == content for piece, content in out.values())
        pool.close()
        assert list(base.iterdir()) == []


def test_on_a_full_machine_idle_segments_make_way(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle first, and no more than is needed; what is out stays, and what can't fit is still refused."""
    room, reserve = 3 * MB, os.posix_fallocate

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        if sum(on_disk(pool, tmp_path).values()) + size > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    out, *back = [taken(pool, MB // 2) for _ in range(6)]
    assert pool.take(MB // 2) is None, "nothing is idle"
    for piece in back:
        pool.give_back(piece.use)
    larger = taken(pool, MB, fill=1)
    assert sorted(on_disk(pool, tmp_path)) == sorted(each.place.segment for each in (out, *back[2:], larger)), (
        "the two longest idle went"
    )
    assert pool.take(4 * MB) is None
    assert pool.outstanding == 2
    assert pool.nbytes == sum(on_disk(pool, tmp_path).values())
    again = taken(pool, MB, fill=2)
    assert set(bytes(larger.view)) == {1}
    assert again.place.segment != larger.place.segment


# --- whether there is any --------------------------------------------------------------------------------------------


def test_without_a_folder_for_it_there_is_no_shared_memory(tmp_path: Path) -> None:
    """A machine without /dev/shm is told so in a sentence that names the folder."""
    with pytest.raises(MemoryUnavailableError, match=r"no shared memory below .*nowhere.*: No such file") as caught:
        Pool(MB, tmp_path / "nowhere")
    assert isinstance(caught.value, OSError)


def test_a_system_that_cannot_reserve_room_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without posix_fallocate a full disk would be a SIGBUS."""
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(MemoryUnavailableError, match="can't reserve room"):
        Pool(MB, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_probe_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full from the start is no shared memory."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryUnavailableError, match="No space left"):
        Pool(MB, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REELWIRE_SHARED_MEMORY stands in for /dev/shm, for producers and readers alike."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))
    pool = Pool(MB)
    piece = taken(pool, 3, fill=5)
    assert folder(pool, tmp_path).is_dir()
    assert bytes(Reader().view(piece.place, 3)) == b"\5\5\5"
    assert segments.reap() == []
    pool.close()
