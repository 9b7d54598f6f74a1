"""Files of the store: complete under their hash or not there, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reelwire.broker import files as files_module
from reelwire.broker.actions import (
    AppendPart,
    DropFile,
    FileAction,
    ImportFile,
    InspectFile,
    ReadPart,
    ReceiveFile,
    RemoveFile,
)
from reelwire.broker.events import FileDone, PartRead, PartStored
from reelwire.broker.files import Files
from reelwire.broker.media_roots import MediaRoots, Refused
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.job_spec import MediaInput
from reelwire.messages import Failure

VIDEO = MediaInput("video", "video")
CONTENT = b"".join(bytes([number]) * FILE_PART_BYTES for number in range(3)) + b"the end"
SHA = hashlib.sha256(CONTENT).hexdigest()
EMPTY = hashlib.sha256(b"").hexdigest()


class Disk:
    """Files in a folder, and what they have answered."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.media = base / "media"
        for folder in (base / "files", base / "incoming", self.media):
            folder.mkdir()
        self.events: list[PartStored | FileDone | PartRead] = []
        self.refused = ""
        roots = MediaRoots([str(self.media)], base / "files")
        self.files = Files(base / "files", base / "incoming", roots, self._look, self.events.append, lambda: 5.0, 7.0)

    def _look(self, path: Path, _wanted: MediaInput) -> None:
        assert path.parent == self.base / "files"
        if self.refused:
            raise Refused(self.refused)

    def do(self, *actions: FileAction) -> list[Any]:
        """What is answered; all long work is done."""
        for action in actions:
            self.files.perform(action)
        while self.files.work():
            pass
        answered, self.events[:] = list(self.events), []
        assert all(event.now == 5.0 for event in answered)
        return answered

    def send(self, ticket: int, content: bytes = CONTENT, sha256: str = "") -> list[Any]:
        """Receive a whole file."""
        parts = [content[at : at + FILE_PART_BYTES] for at in range(0, len(content), FILE_PART_BYTES)]
        return self.do(
            ReceiveFile(ticket, len(content), sha256 or hashlib.sha256(content).hexdigest()),
            *(AppendPart(ticket, index, part) for index, part in enumerate(parts)),
        )

    def failure(self, *actions: FileAction) -> Failure:
        """Why the last of them can't be done; nothing half done is left."""
        done = self.do(*actions)[-1]
        assert isinstance(done, FileDone)
        assert done.failure is not None
        assert done.failure.field == ""
        assert "\n" not in done.failure.message
        assert self.incoming() == []
        return done.failure

    def names(self) -> list[str]:
        """What complete files are called."""
        return sorted(path.name for path in (self.base / "files").iterdir())

    def incoming(self) -> list[str]:
        """What incomplete ones are."""
        return sorted(path.name for path in (self.base / "incoming").iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, after: int = 0) -> None:
    """Let a call of the system fail from some call on."""
    real: Callable[..., Any] = getattr(os, name)
    count = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    monkeypatch.setattr(os, name, call)


# --- files that come in parts ----------------------------------------------------------------------------------------


def test_a_file_comes_in_parts_and_is_read_in_parts(disk: Disk) -> None:
    """Each part is acknowledged when it is written; after the last one the file is there, under its hash."""
    answered = disk.send(1)
    assert [event.parts for event in answered[:-1]] == [1, 2, 3, 4]
    assert answered[-1] == FileDone(5.0, 1, sha256=SHA, nbytes=len(CONTENT))
    assert (disk.base / "files" / SHA).read_bytes() == CONTENT
    assert disk.incoming() == []
    parts = disk.do(*(ReadPart(ticket, SHA, ticket) for ticket in range(4)))
    assert b"".join(part.data for part in parts) == CONTENT
    assert [(part.ticket, part.reason) for part in parts] == [(ticket, "") for ticket in range(4)]


def test_an_empty_file_is_done_at_once(disk: Disk) -> None:
    """It has no parts to wait for."""
    assert disk.do(ReceiveFile(1, 0, EMPTY)) == [FileDone(5.0, 1, sha256=EMPTY, nbytes=0)]
    assert disk.names() == [EMPTY]
    assert disk.failure(ReceiveFile(2, 0, SHA)).message.startswith(f"its SHA-256 is {EMPTY}, not {SHA}")


def test_a_part_may_be_a_view_of_a_message(disk: Disk) -> None:
    """It is written as it lies in memory."""
    view = memoryview(bytearray(b"abcdef")).cast("B", [2, 3])
    done = disk.do(ReceiveFile(1, 6, hashlib.sha256(b"abcdef").hexdigest()), AppendPart(1, 0, view))[-1]
    assert done.failure is None


@pytest.mark.parametrize(
    ("parts", "nbytes", "reason"),
    [
        ([(0, b"x" * 8)], 7, "part 0 has 8 bytes; accepted: 7"),
        ([(0, b"x" * 7)], 8, "part 0 has 7 bytes; accepted: 8"),
        ([(0, b"")], 8, "part 0 has 0 bytes; accepted: 8"),
        ([(1, b"x" * 8)], 8, "part 1 came in place of part 0"),
        ([(-1, b"x" * 8)], 8, "part -1 came in place of part 0"),
        ([(0, CONTENT[:FILE_PART_BYTES])] * 2, len(CONTENT), "part 0 came in place of part 1"),
        ([(0, b"x" * 8)], 8, "its SHA-256 is "),
    ],
)
def test_what_was_not_announced_is_refused(
    disk: Disk, parts: list[tuple[int, bytes]], nbytes: int, reason: str
) -> None:
    """Too many bytes, too few, parts out of order, another content: nothing of it is left, and later parts are ignored."""
    failure = disk.failure(ReceiveFile(1, nbytes, SHA), *(AppendPart(1, index, data) for index, data in parts))
    assert failure.kind == "request"
    assert reason in failure.message
    assert disk.names() == []
    assert disk.do(AppendPart(1, 1, b"more")) == []
    assert disk.send(1)[-1].failure is None, "the ticket can be used again"


def test_a_hash_is_a_hash(disk: Disk) -> None:
    """It becomes a file's name, so it must be nothing else."""
    for name in ("", "../" + SHA[3:], SHA.upper(), SHA + "\n", "/etc/passwd"):
        assert "is no SHA-256" in disk.failure(ReceiveFile(1, 1, name)).message
        assert disk.do(ReadPart(2, name, 0)) == [PartRead(5.0, 2, b"", "it is no file of the store")]
        assert "is no file of the store" in disk.failure(InspectFile(3, name, VIDEO)).message
        assert disk.do(RemoveFile(name)) == []


def test_a_file_that_is_given_up_leaves_nothing(disk: Disk) -> None:
    """Nothing is answered any more, neither of it nor of parts that were on their way."""
    assert len(disk.do(ReceiveFile(1, len(CONTENT), SHA), AppendPart(1, 0, CONTENT[:FILE_PART_BYTES]))) == 1
    assert disk.incoming() == ["1.part"]
    assert disk.do(DropFile(1), DropFile(1), AppendPart(1, 1, CONTENT[:FILE_PART_BYTES])) == []
    assert disk.incoming() == []
    (disk.media / "a").write_bytes(CONTENT * 3)
    disk.files.perform(ImportFile(2, str(disk.media / "a"), 1 << 30))
    assert disk.files.work()
    assert disk.incoming() == ["2.part"]
    assert disk.do(DropFile(2)) == []
    assert disk.incoming() == []


# --- the same content twice ------------------------------------------------------------------------------------------


def test_the_same_content_is_kept_once(disk: Disk) -> None:
    """Two that come at once are both complete, and one file is left; it isn't touched by the second."""
    first, second = CONTENT[:FILE_PART_BYTES], CONTENT[FILE_PART_BYTES : 2 * FILE_PART_BYTES]
    content = first + second
    sha = hashlib.sha256(content).hexdigest()
    disk.do(ReceiveFile(1, len(content), sha), ReceiveFile(2, len(content), sha))
    disk.do(AppendPart(1, 0, first), AppendPart(2, 0, first))
    assert disk.do(AppendPart(2, 1, second))[-1].sha256 == sha
    kept = (disk.base / "files" / sha).stat()
    assert disk.do(AppendPart(1, 1, second))[-1].sha256 == sha
    after = (disk.base / "files" / sha).stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert disk.names() == [sha]
    assert disk.incoming() == []


def test_a_file_that_is_removed_while_it_comes_again_is_there_afterwards(disk: Disk) -> None:
    """Removed between two that bring it, it is brought again by the second."""
    disk.send(1)
    disk.do(ReceiveFile(2, len(CONTENT), SHA), AppendPart(2, 0, CONTENT[:FILE_PART_BYTES]), RemoveFile(SHA))
    assert disk.names() == []
    for index in (1, 2, 3):
        done = disk.do(AppendPart(2, index, CONTENT[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]))[-1]
    assert done.sha256 == SHA
    assert (disk.base / "files" / SHA).read_bytes() == CONTENT


def test_a_reader_keeps_what_it_has_open(disk: Disk) -> None:
    """To remove a file takes its name, not its bytes; who asks for a part afterwards is told."""
    disk.send(1)
    with (disk.base / "files" / SHA).open("rb") as reader:
        assert disk.do(RemoveFile(SHA), RemoveFile(SHA)) == []
        assert reader.read() == CONTENT
    (part,) = disk.do(ReadPart(2, SHA, 0))
    assert part == PartRead(5.0, 2, b"", "it can't be read or written on the broker's host (No such file or directory)")


def test_a_part_that_a_file_does_not_have_is_said(disk: Disk) -> None:
    """No bytes, and why."""
    disk.send(1)
    assert disk.do(ReadPart(2, SHA, 4)) == [PartRead(5.0, 2, b"", "it has no part 4")]


# --- failing disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_an_overload(disk: Disk, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """It can be tried again later, and nothing of the file takes up room."""
    (disk.media / "a").write_bytes(CONTENT)
    with monkeypatch.context() as patch:
        failing(patch, call, code)
        small = AppendPart(1, 0, b"12345678")
        failures = [
            disk.failure(ReceiveFile(1, 8, SHA), small),
            disk.failure(ImportFile(2, str(disk.media / "a"), 1 << 30)),
        ]
    for failure in failures:
        assert (failure.kind, failure.retry_after_s) == ("overload", 7.0)
        assert "there is no room for it on the broker's host" in failure.message
    assert disk.names() == []
    assert disk.send(1)[-1].failure is None


@pytest.mark.parametrize("call", ["parts", "import"])
def test_files_leave_room_for_the_journal(disk: Disk, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """What was announced counts, as far as it isn't written; a file is refused before anything of it is."""
    real, free = os.statvfs, files_module.FREE_BYTES + 2 * len(CONTENT)

    def statvfs(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[1], found[4] = 1, free
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert disk.do(ReceiveFile(1, len(CONTENT), SHA)) == []
    (disk.media / "a.mp4").write_bytes(CONTENT + b"x")
    (done,) = disk.do(
        ReceiveFile(2, len(CONTENT) + 1, SHA) if call == "parts" else ImportFile(2, str(disk.media / "a.mp4"), 1 << 30)
    )
    assert done.failure.kind == "overload"
    assert done.failure.retry_after_s == 7.0
    disk.do(DropFile(1))
    assert list((disk.base / "incoming").iterdir()) == []
    assert disk.do(ReceiveFile(3, len(CONTENT) + 1, SHA)) == []


def test_a_disk_that_fails_is_said(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file would have been named: a name that may not be durable is taken back."""
    with monkeypatch.context() as patch:
        failing(patch, "write", errno.EIO)
        failure = disk.failure(ReceiveFile(1, 8, SHA), AppendPart(1, 0, b"12345678"))
        assert failure.kind == "request"
        assert failure.message == "it can't be read or written on the broker's host (Input/output error)"
    with monkeypatch.context() as patch:
        failing(patch, "fsync", errno.EIO, after=1)  # the file's own goes well, the folder's doesn't
        done = disk.send(1, b"12345678")[-1]
    assert done.failure is not None
    assert disk.names() == []
    assert disk.incoming() == []


def test_a_write_may_take_less_than_it_is_given(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is written by the next one."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, memoryview(data)[:100_000]))
    assert disk.send(1)[-1].failure is None
    assert (disk.base / "files" / SHA).read_bytes() == CONTENT


def test_a_real_disk_that_is_full(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of 2 MiB takes no file of 3; what fits is taken afterwards."""
    monkeypatch.setattr(files_module, "FREE_BYTES", 0)
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=2m none {small} 2>/dev/null"):
        pytest.skip("no file system can be mounted here")
    try:
        full = Disk(small)
        done = full.send(1)[-1]
        assert done.failure is not None
        assert done.failure.kind == "overload"
        assert full.names() == full.incoming() == []
        assert full.send(2, CONTENT[: FILE_PART_BYTES + 5])[-1].failure is None
    finally:
        os.system(f"umount {small}")


# --- looking into files ----------------------------------------------------------------------------------------------


def test_a_file_is_looked_into(disk: Disk) -> None:
    """It is what is wanted, or it is said why it isn't."""
    disk.send(1)
    assert disk.do(InspectFile(2, SHA, VIDEO)) == [FileDone(5.0, 2)]
    disk.refused = "it is a picture"
    assert disk.failure(InspectFile(3, SHA, VIDEO)) == Failure("request", "it is a picture")
    assert disk.failure(InspectFile(4, EMPTY, VIDEO)).message == "the file isn't there any more"
