"""The consumer of shared memory: what a reader maps, keeps, and refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reelwire import segments
from reelwire.parts import SegmentUse
from reelwire.segments import MemoryLostError, Piece, Pool, Reader
from reelwire.tensors import PROBE_BYTES, Shared

KB = 1 << 10


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(8 << 20, tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


def taken(pool: Pool, nbytes: int, fill: int = 0) -> Piece:
    """A piece of that size, all bytes the same."""
    piece = pool.take(nbytes)
    assert piece is not None
    piece.view[:] = bytes([fill]) * nbytes
    return piece


def folder(pool: Pool, base: Path) -> Path:
    """The pool's folder."""
    return base / f"reelwire-{os.geteuid()}" / pool.owner


def test_a_reader_sees_what_was_written_and_cannot_write(pool: Pool, reader: Reader) -> None:
    """Views are read-only, of exactly the tensor's bytes, and begin where the reference says."""
    piece = taken(pool, 1000, fill=3)
    piece.view[10:13] = b"abc"
    view = reader.view(piece.place, 1000)
    assert view == piece.view
    assert view.readonly
    inner = Shared(piece.place.owner, piece.place.segment, piece.place.generation, offset=10)
    assert bytes(reader.view(inner, 3)) == b"abc"
    with pytest.raises(TypeError):
        view[0] = 1


def test_the_probe_tells_whether_a_peer_can_read(pool: Pool, reader: Reader) -> None:
    """Who can open the folder knows its probe, which differs from producer to producer; others say nothing."""
    assert reader.probe(pool.owner) == pool.probe
    assert len(pool.probe) == PROBE_BYTES
    for owner in ("0" * 16, "", ".", "..", "a/b", "A", "x" * 65, f"{pool.owner}\n"):
        assert reader.probe(owner) == b""


def test_a_reader_that_has_mapped_goes_on(pool: Pool, reader: Reader) -> None:
    """A producer's end takes the name away and not the bytes."""
    piece = taken(pool, 1000, fill=3)
    view = reader.view(piece.place, 1000)
    pool.close()
    assert bytes(view) == b"\3" * 1000
    assert bytes(reader.view(piece.place, 1000)) == b"\3" * 1000
    reader.close()
    assert bytes(view) == b"\3" * 1000


def test_what_has_no_name_any_more_is_lost(pool: Pool, reader: Reader) -> None:
    """A segment or a folder that isn't there means that its producer is lost; the sentence names it."""
    piece = taken(pool, 1000)
    pool.abandon()
    with pytest.raises(MemoryLostError, match=f"'s1' of '{pool.owner}' can't be read: No such file"):
        reader.view(piece.place, 1000)
    pool.close()
    with pytest.raises(MemoryLostError, match="No such file") as caught:
        reader.view(piece.place, 1000)
    assert caught.value.errno == errno.ENOENT


def test_more_bytes_than_there_are_is_lost_too(pool: Pool, reader: Reader) -> None:
    """A reference beyond the end of its segment is refused before a byte of it is read."""
    place = taken(pool, 1000).place
    for offset, nbytes in ((0, 64 * KB + 1), (64 * KB, 1), (1 << 60, 1), (-1, 1)):
        with pytest.raises(MemoryLostError, match="has 65536 bytes"):
            reader.view(Shared(place.owner, place.segment, 1, offset), nbytes)


@pytest.mark.parametrize("name", ["..", ".", "", "../secret", "a/../../secret", "/etc/passwd", "S1", "s1\0", "x" * 65])
def test_a_hostile_name_leads_nowhere(pool: Pool, reader: Reader, tmp_path: Path, name: str) -> None:
    """Neither the owner's nor the segment's name in a message leaves the producers' folders."""
    (tmp_path / "secret").write_bytes(b"x" * 100)
    (folder(pool, tmp_path) / "secret").write_bytes(b"x" * 100)
    for place in (Shared(pool.owner, name, 1), Shared(name, "secret", 1)):
        with pytest.raises(MemoryLostError, match="can't be read"):
            reader.view(place, 1)
    (tmp_path / "secret").unlink()
    (folder(pool, tmp_path) / "secret").unlink()


def test_links_pipes_and_empty_files_are_no_segments(pool: Pool, reader: Reader, tmp_path: Path) -> None:
    """A link isn't followed, a pipe isn't waited for, and an empty file has nothing to map."""
    (tmp_path / "elsewhere").write_bytes(b"x" * 100)
    own = folder(pool, tmp_path)
    (own / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(own / "pipe")
    (own / "folder").mkdir()
    for name in ("link", "pipe", "folder", "lock"):
        with pytest.raises(MemoryLostError):
            reader.view(Shared(pool.owner, name, 1), 1)
    other = own.parent / "other"
    other.symlink_to(own)
    with pytest.raises(MemoryLostError):
        reader.view(Shared("other", taken(pool, 1).place.segment, 1), 1)
    for path in (own / "link", own / "pipe", other, tmp_path / "elsewhere"):
        path.unlink()
    (own / "folder").rmdir()


def test_folders_that_others_may_enter_are_refused(pool: Pool, reader: Reader, tmp_path: Path) -> None:
    """Memory that another user could have made or could change isn't read."""
    place = taken(pool, 1).place
    own = folder(pool, tmp_path)
    for path in (own, own.parent):
        path.chmod(0o750)
        with pytest.raises(MemoryLostError, match="open to others"):
            reader.view(place, 1)
        assert reader.probe(pool.owner) == b""
        path.chmod(0o700)
    assert bytes(reader.view(place, 1)) == b"\0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_files_of_another_user_are_refused(pool: Pool, reader: Reader, tmp_path: Path) -> None:
    """It is the owner in the file system that counts, whatever the names say."""
    place = taken(pool, 1).place
    own = folder(pool, tmp_path)
    for path in (own / place.segment, own, own.parent):
        os.chown(path, 12345, -1)
        with pytest.raises(MemoryLostError):
            reader.view(place, 1)
        os.chown(path, os.geteuid(), -1)


def test_mappings_are_kept_for_the_next_use_and_bounded(pool: Pool, tmp_path: Path) -> None:
    """The longest unused goes first, by number and by bytes; a view in somebody's hands isn't touched by that."""
    pieces = [taken(pool, 100 * KB, fill=fill) for fill in range(4)]
    for reader in (Reader(tmp_path, mappings_max=3), Reader(tmp_path, nbytes_max=3 * 112 * KB)):
        views = [reader.view(piece.place, 1) for piece in (*pieces[:3], pieces[0], pieces[3])]
        kept = [segment for _, segment in reader._mapped]
        assert kept == [pieces[index].place.segment for index in (2, 0, 3)]
        assert [view[0] for view in views] == [0, 1, 2, 0, 3]
        assert reader._nbytes == 3 * 112 * KB
        reader.close()
        assert (len(reader._mapped), reader._nbytes) == (0, 0)
    tiny = Reader(tmp_path, nbytes_max=1)
    assert [tiny.view(piece.place, 1)[0] for piece in pieces] == [0, 1, 2, 3]
    assert len(tiny._mapped) == 1


def test_a_new_mapping_lets_go_of_those_without_a_name(pool: Pool, reader: Reader) -> None:
    """A reader's mappings don't keep the memory of segments that their producer has unlinked."""
    first, second = taken(pool, 100), taken(pool, 100)
    reader.view(first.place, 100)
    reader.view(second.place, 100)
    pool.give_back(SegmentUse(first.place.segment, 1, broken=True))
    third = taken(pool, 100)
    reader.view(third.place, 100)
    assert [segment for _, segment in reader._mapped] == [second.place.segment, third.place.segment]


@pytest.mark.parametrize("how", ["a sweep", "a probe of whoever comes next"])
def test_a_reader_lets_go_of_a_producer_that_is_gone(
    pool: Pool, reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A machine that is full of it has room again, although nothing new is mapped; what lives stays mapped."""
    gone = Pool(8 << 20, tmp_path)
    reader.view(taken(gone, 100).place, 100)
    kept = taken(pool, 100)
    reader.view(kept.place, 100)
    gone.close()
    if how == "a sweep":
        reader.sweep()
    else:
        assert reader.probe(pool.owner) == pool.probe
    assert list(reader._mapped) == [(pool.owner, kept.place.segment)]
    assert reader._nbytes == segments.SEGMENT_BYTES_MIN

    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        reader.sweep()
    assert len(reader._mapped) == 1, "what couldn't be looked at is kept"


def test_a_sweep_after_the_last_producer_keeps_nothing(reader: Reader, tmp_path: Path) -> None:
    """The user's folder is gone with it."""
    last = Pool(1 << 20, tmp_path)
    reader.view(taken(last, 100).place, 100)
    last.close()
    assert list(tmp_path.iterdir()) == []
    reader.sweep()
    assert (len(reader._mapped), reader._nbytes) == (0, 0)
