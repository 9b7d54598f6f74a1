"""Files of jobs at a worker: found where they lie, fetched in parts, sent, held and dropped."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reelwire import tensors
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import FileGone, FileOffer, FilePart, RunJob
from reelwire.workers import files as module
from reelwire.workers.files import Files, cannot_keep, offers_of

CONTENT = np.random.default_rng(0).integers(0, 256, 2 * FILE_PART_BYTES + 17, np.uint8).tobytes()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    """A scratch folder of which nothing is left in the end."""
    made = Files(str(tmp_path / "scratch"))
    yield made
    made.close()
    assert not list((tmp_path / "scratch").iterdir())


def offer(content: bytes, path: str | Path = "") -> FileOffer:
    return FileOffer(hashlib.sha256(content).hexdigest(), str(path), len(content))


def run(*offers: FileOffer, job: str = "j", attempt: int = 1, checkpoint: FileOffer | None = None) -> RunJob:
    return RunJob(job, attempt, "kind", {}, {"video": offers}, checkpoint, 0, 10, 1)


def part(of: FileOffer, index: int, content: bytes = CONTENT) -> FilePart:
    data = content[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]
    return FilePart(of.file, index, tensors.from_array(np.frombuffer(data, np.uint8)))


def test_groups_01_a_file_that_can_be_opened_here_is_read_where_it_lies(files: Files, tmp_path: Path) -> None:
    """If its size and its hash are right; each other one has to be fetched."""
    right, wrong, short = tmp_path / "right", tmp_path / "wrong", tmp_path / "short"
    right.write_bytes(CONTENT)
    wrong.write_bytes(CONTENT[::-1])
    short.write_bytes(CONTENT[:-1])
    offers = [
        offer(CONTENT, right),
        offer(CONTENT + b"1", wrong),
        offer(CONTENT + b"2", short),
        offer(b"x", "/nowhere"),
    ]
    found, missing = files.find(run(*offers, checkpoint=offer(CONTENT, right)))
    assert found == {offers[0].file: str(right)}
    assert missing == tuple(offers[1:])


def test_groups_09_nothing_but_a_plain_file_is_read(files: Files, tmp_path: Path) -> None:
    """No link, no folder, no pipe, no device, and no name that isn't a hash leads anywhere."""
    target = tmp_path / "target"
    target.write_bytes(b"")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    empty = hashlib.sha256(b"1").hexdigest()
    for path in (tmp_path / "link", tmp_path / "pipe", tmp_path, Path("/dev/null"), Path("a\0b")):
        assert files.find(run(FileOffer(empty, str(path), 0)))[0] == {}
    assert files.find(run(FileOffer("../target", str(target), 0)))[0] == {}


def test_a_hash_is_worked_out_once(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the file is the same: place, size and time."""
    hashed: list[int] = []
    digest_of = module.digest_of

    def counted(descriptor: int) -> tuple[str, int]:
        hashed.append(descriptor)
        return digest_of(descriptor)

    monkeypatch.setattr(module, "digest_of", counted)
    path = tmp_path / "file"
    path.write_bytes(b"one")
    for _ in range(3):
        assert files.find(run(offer(b"one", path)))[0]
    assert len(hashed) == 1
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert not files.find(run(offer(b"one", path)))[0]
    assert files.find(run(offer(b"two", path)))[0]
    assert len(hashed) == 2


def test_a_file_is_fetched_in_parts(files: Files) -> None:
    """It is found when the last has come; parts that come again change nothing; the next attempt finds it here."""
    wanted = offer(CONTENT)
    assert files.find(run(wanted))[1] == (wanted,)
    assert files.write(wanted, part(wanted, 0)) == (1, "")
    assert files.write(wanted, part(wanted, 0)) == (1, "")
    assert files.write(wanted, part(wanted, 1)) == (2, "")
    parts, path = files.write(wanted, part(wanted, 2))
    assert (parts, Path(path).read_bytes()) == (3, CONTENT)
    assert files.write(wanted, part(wanted, 1)) == (3, path)
    assert files.find(run(wanted, attempt=2))[0] == {wanted.file: path}
    files.drop("j", 1)
    assert Path(path).exists(), "another attempt has it"
    files.drop("j", 2)
    assert not Path(path).exists()


@pytest.mark.parametrize("trouble", ["gap", "size", "hash"])
def test_a_file_that_arrives_wrong_is_dropped(files: Files, trouble: str) -> None:
    """With a sentence; it can be fetched again from its first part."""
    wanted = offer(CONTENT)
    files.find(run(wanted))
    files.write(wanted, part(wanted, 0, CONTENT[::-1] if trouble == "hash" else CONTENT))
    with pytest.raises(ValueError, match=r"in place of|SHA-256"):  # noqa: PT012
        if trouble == "gap":
            files.write(wanted, part(wanted, 2))
        if trouble == "size":
            files.write(wanted, FilePart(wanted.file, 1, tensors.from_array(np.zeros(3, np.uint8))))
        files.write(wanted, part(wanted, 1))
        files.write(wanted, part(wanted, 2))
    assert not [path for path in files.folder.iterdir() if path.name.endswith(".part")]
    assert [files.write(wanted, part(wanted, index))[0] for index in range(3)] == [1, 2, 3]
    assert files.find(run(wanted))[0]


def test_a_full_disk_is_no_room() -> None:
    """Not an error of the job; what arrived wrong isn't one of room."""
    assert cannot_keep(OSError(28, "No space left on device")).kind == "overload"
    assert "No space left" in cannot_keep(OSError(28, "No space left on device")).message
    assert cannot_keep(ValueError("bad")).kind == "stage"


def test_an_empty_file_is_there_without_a_part(files: Files) -> None:
    """No part of it would ever come."""
    found, missing = files.find(run(offer(b"")))
    assert not missing
    assert [Path(path).read_bytes() for path in found.values()] == [b""]


def test_parts_of_what_was_made_here_are_sent(files: Files) -> None:
    """From the first that is asked for to the last, or word that it is gone; nothing outside the folder."""
    made = offer(CONTENT)
    (files.folder / made.file).write_bytes(CONTENT)
    files.hold("j", 1, "result", made)
    sent = [each for each in files.parts(made.file, 1, 99) if isinstance(each, FilePart)]
    assert [each.index for each in sent] == [1, 2]
    assert b"".join(tensors.to_array(each.data).tobytes() for each in sent) == CONTENT[FILE_PART_BYTES:]
    (gone,) = files.parts("0" * 64, 0, 1)
    assert isinstance(gone, FileGone)
    (gone,) = files.parts("../lock", 0, 1)
    assert isinstance(gone, FileGone)
    files.drop("j", 1)
    (gone,) = files.parts(made.file, 0, 1)
    assert isinstance(gone, FileGone)


def test_only_what_is_named_is_dropped(files: Files) -> None:
    """Older checkpoints go and the newest stays; then all goes."""
    offers = [offer(bytes([number])) for number in range(3)]
    for number, each in enumerate(offers):
        (files.folder / each.file).write_bytes(bytes([number]))
        files.hold("j", 1, "result" if number == 2 else "checkpoint", each)
    files.drop("j", 1, "checkpoint", offers[1].file)
    assert [(files.folder / each.file).exists() for each in offers] == [False, True, True]
    files.drop("j", 1, "checkpoint")
    assert [(files.folder / each.file).exists() for each in offers] == [False, False, True]
    files.drop("other", 1)
    files.drop("j", 1)
    assert not (files.folder / offers[2].file).exists()


def test_what_another_attempt_drops_is_not_lost_to_whoever_makes_it_again(files: Files) -> None:
    """Equal results have one name; the second comes by it only when it is held."""
    made = offer(b"result")
    for attempt in (1, 2):
        (files.folder / f"part-{attempt}").write_bytes(b"result")
    files.adopt(files.folder / "part-1", "j", 1, "result", made)
    files.drop("j", 1)
    assert not (files.folder / made.file).exists()
    files.adopt(files.folder / "part-2", "j", 2, "result", made)
    files.drop("j", 1)
    assert (files.folder / made.file).read_bytes() == b"result"
    files.drop("j", 2)


def test_a_file_that_can_not_be_removed_or_made_ends_nothing(files: Files) -> None:
    """Another one is in its place: it stays, and what comes after it is done."""
    one, two, empty = offer(b"1"), offer(b"2"), offer(b"")
    for each in (one, two):
        files.hold("j", 1, "result", each)
    (files.folder / one.file).mkdir()
    (files.folder / two.file).write_bytes(b"2")
    files.drop("j", 1)
    assert not (files.folder / two.file).exists()
    (files.folder / one.file).rmdir()
    (files.folder / empty.file).symlink_to(files.folder / "nowhere" / "else")
    assert files.find(run(empty))[1] == (empty,)


def test_files_of_a_job_are_gone_through_in_one_order() -> None:
    """All ranks share them in that order: inputs by name, then the checkpoint."""
    a, b, c = (offer(bytes([number])) for number in range(3))
    job = RunJob("j", 1, "kind", {}, {"video": (c,), "images": (a, b)}, c, 0, 10, 1)
    assert list(offers_of(job)) == [a, b, c, c]


def test_groups_19_what_a_dead_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """And what a living one has isn't."""
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom reelwire.workers.files import Files\n"
        f"files = Files({str(tmp_path)!r})\n(files.folder / ('0' * 64)).write_bytes(b'left')\n"
        "print(files.folder)\nsys.stdout.flush()\nos._exit(9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    left = Path(done.stdout.strip())
    assert (left / ("0" * 64)).exists(), done.stderr
    alive = Files(str(tmp_path))
    assert alive.reaped == [left.name]
    assert not left.exists()
    other = Files(str(tmp_path))
    assert other.reaped == []
    assert alive.folder.is_dir()
    for each in (other, alive):
        each.close()
