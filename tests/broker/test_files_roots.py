"""Paths of the broker's host that requests name: never out of the media roots, and never over another file."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from reelwire.broker import exporting
from reelwire.broker.actions import CheckOutput, ExportFile, FileAction, ImportFile, ReceiveFile
from reelwire.broker.events import FileDone
from reelwire.broker.files import PIECE_BYTES, Files
from reelwire.broker.media_roots import MediaRoots
from reelwire.messages import Failure

CONTENT = b"a clip"
SHA = hashlib.sha256(CONTENT).hexdigest()
LARGE = os.urandom(PIECE_BYTES) * 2 + b"x"
LARGE_SHA = hashlib.sha256(LARGE).hexdigest()
MOST = 1 << 30


class Host:
    """A host with a media root that is a link, what lies outside of it, and a store below the root itself."""

    def __init__(self, base: Path, roots: list[str] | None = None) -> None:
        self.base = base
        self.real, self.outside, self.state = base / "real", base / "outside", base / "real" / "state"
        for folder in (self.real, self.outside, self.state, self.state / "files", self.state / "incoming"):
            folder.mkdir(exist_ok=True)
        self.root = base / "media"
        self.root.symlink_to(self.real)
        (self.outside / "secret").write_bytes(b"secret")
        (self.state / "files" / SHA).write_bytes(CONTENT)
        (self.state / "files" / LARGE_SHA).write_bytes(LARGE)
        self.events: list[Any] = []
        self.files = Files(
            self.state / "files",
            self.state / "incoming",
            MediaRoots([str(self.root)] if roots is None else roots, self.state),
            lambda _path, _wanted: {},
            self.events.append,
            lambda: 5.0,
        )

    def do(self, action: FileAction) -> FileDone:
        """Do it, whatever it takes."""
        self.files.perform(action)
        while self.files.work():
            pass
        (done,) = self.events
        self.events.clear()
        assert list((self.state / "incoming").iterdir()) == []
        assert isinstance(done, FileDone)
        return done

    def take(self, path: Path | str, most: int = MOST) -> FileDone:
        """Import a file."""
        return self.do(ImportFile(1, str(path), most))

    def refused(self, path: Path | str, accepted: str = "a file below") -> str:
        """Why a file isn't imported; the sentence names the roots."""
        failure = self.take(path).failure
        assert failure is not None
        assert failure.kind == "request"
        assert failure.message.endswith(f"; accepted: {accepted} {str(self.root)!r}")
        return failure.message

    def check(self, path: Path | str, suffix: str = ".mp4") -> Failure | None:
        """Why a result may not be written there."""
        return self.do(CheckOutput(1, str(path), suffix)).failure

    def export(self, path: Path | str, file: str = SHA) -> Failure | None:
        """Why a file isn't written there."""
        return self.do(ExportFile(1, file, str(path))).failure


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


# --- in --------------------------------------------------------------------------------------------------------------


def test_groups_09_a_file_below_a_root_is_copied(host: Host) -> None:
    """By either name of the root, through links that stay inside, with dots in its path; a large one in pieces."""
    (host.real / "sub").mkdir()
    (host.real / "sub" / "a b.mp4").write_bytes(CONTENT)
    (host.real / "inside").symlink_to(host.real / "sub")
    for path in ("sub/a b.mp4", "sub/../sub/./a b.mp4", "inside/a b.mp4"):
        for root in (host.root, host.real, f"/{host.root}", f"//{host.real}"):
            assert host.take(f"{root}/{path}") == FileDone(5.0, 1, sha256=SHA, nbytes=len(CONTENT))
    (host.real / "large").write_bytes(LARGE)
    (host.state / "files" / LARGE_SHA).unlink()
    assert host.take(host.root / "large").sha256 == LARGE_SHA
    assert (host.state / "files" / LARGE_SHA).read_bytes() == LARGE


def test_groups_09_no_path_leads_out_of_the_roots(host: Host) -> None:
    """Neither an absolute one, nor dots, nor a link to a file or a folder, nor a neighbour whose name begins alike."""
    (host.real / "file").symlink_to(host.outside / "secret")
    (host.real / "folder").symlink_to(host.outside)
    (host.base / "media2").mkdir()
    (host.base / "media2" / "a").write_bytes(b"secret")
    for path in (host.outside / "secret", f"{host.root}/../outside/secret", host.base / "media2" / "a", "/etc/passwd"):
        assert "lies outside of the media roots" in host.refused(path)
    for path in (host.root / "file", host.root / "folder" / "secret"):
        assert "leads out of the media roots" in host.refused(path)
    assert "lies outside" in host.refused(host.base / "none"), "nobody learns what is there"


def test_groups_09_the_state_folder_is_nobodys(host: Host) -> None:
    """Also where it lies below a root: files of others have names that can be known."""
    (host.real / "link").symlink_to(host.state / "files" / SHA)
    for path in (host.root / "state" / "files" / SHA, host.root / "link"):
        assert "leads out of the media roots" in host.refused(path)
    failure = host.check(host.root / "state" / "files" / "a.mp4")
    assert failure is not None
    assert "leads out of the media roots" in failure.message


def test_what_is_no_regular_file_is_refused_at_once(host: Host) -> None:
    """A pipe that nobody writes to doesn't hang the broker, and a device isn't opened."""
    os.mkfifo(host.real / "pipe")
    (host.real / "dir").mkdir()
    (host.real / "loop").symlink_to(host.real / "loop")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(host.real)  # a socket's path must be short
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
    for name, kind in (("pipe", "a pipe"), ("dir", "a folder"), ("socket", "a socket")):
        assert f"is {kind}" in host.refused(host.root / name, "a regular file below")
    assert "Too many levels" in host.refused(host.root / "loop")
    assert "isn't there" in host.refused(host.root / "none")
    assert "isn't there" in host.refused(host.root / "dir" / "pipe" / "x")
    (host.base / "devices").mkdir()
    failure = Host(host.base / "devices", ["/dev"]).take("/dev/null").failure
    assert failure is not None
    assert "is a device; accepted: a regular file below '/dev'" in failure.message


def test_paths_that_no_file_can_have_are_refused(host: Host) -> None:
    """NUL, too long, relative, empty, not to be written in UTF-8: a sentence for each, cut where it is long."""
    for path in ("", "a", "./a", "\0", f"{host.root}/a\0b"):
        assert "is no absolute path" in host.refused(path)
    assert "can't be opened (File name too long)" in host.refused(f"{host.root}/{'x' * 300}")
    assert len(host.refused(f"{host.root}/{'x/' * 5000}")) < 500
    host.refused(f"{host.root}/\udc80").encode()


def test_a_broker_without_roots_takes_no_paths(tmp_path: Path) -> None:
    """It says what can be done instead."""
    host = Host(tmp_path, [])
    failure = host.take(tmp_path / "real" / "a").failure
    assert failure is not None
    assert "this broker has no media root; accepted: an upload" in failure.message


def test_a_file_that_is_too_large_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size before it is copied, and by what is read where it grows meanwhile."""
    (host.real / "a").write_bytes(LARGE)
    failure = host.take(host.root / "a", len(LARGE) - 1).failure
    assert failure is not None
    assert failure.message == f"it has {len(LARGE)} bytes or more; accepted: {len(LARGE) - 1}"
    assert host.take(host.root / "a", len(LARGE)).failure is None
    host.files.perform(ImportFile(1, str(host.root / "a"), len(LARGE)))
    assert host.files.work()
    with (host.real / "a").open("ab") as file:
        file.write(b"more")
    while host.files.work():
        pass
    failure = host.events.pop().failure
    assert "it has" in failure.message
    assert list((host.state / "incoming").iterdir()) == []


def test_what_is_checked_is_what_is_read(host: Host) -> None:
    """A link that changes all the time between a file inside and one outside gives the inner one or a refusal."""
    (host.real / "clip").write_bytes(CONTENT)
    link, spare = host.real / "link", host.real / "spare"
    link.symlink_to(host.real / "clip")
    ends = threading.Event()

    def change() -> None:
        while not ends.is_set():
            for target in (host.outside / "secret", host.real / "clip"):
                spare.symlink_to(target)
                spare.replace(link)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        seen = {host.take(host.root / "link").sha256 for _ in range(1500)}
    finally:
        ends.set()
        changing.join()
    assert seen <= {SHA, ""}


def test_a_file_that_may_not_be_read_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says."""
    (host.real / "a").write_bytes(CONTENT)
    real = os.open

    def opens(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", opens)
    assert "can't be read (Permission denied)" in host.refused(host.root / "a")


# --- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_result_is_written_whole_or_not_at_all(host: Host, monkeypatch: pytest.MonkeyPatch, unnamed: bool) -> None:
    """Until it is complete there is nothing of its name; nothing else stays in the folder, however it goes."""
    if not unnamed:
        monkeypatch.setattr(exporting, "_UNNAMED", 0)
    out = host.real / "out"
    out.mkdir()
    host.files.perform(ExportFile(1, LARGE_SHA, str(host.root / "out" / "a.mp4")))
    assert host.files.work()
    assert not (out / "a.mp4").exists()
    assert len(list(out.iterdir())) == (0 if unnamed else 1)
    while host.files.work():
        pass
    assert host.events.pop() == FileDone(5.0, 1, nbytes=len(LARGE))
    assert (out / "a.mp4").read_bytes() == LARGE
    assert [path.name for path in out.iterdir()] == ["a.mp4"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        failure = host.export(host.root / "out" / "b.mp4")
    assert failure is not None
    assert failure.kind == "overload"
    assert [path.name for path in out.iterdir()] == ["a.mp4"]


def full(_descriptor: int, _data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_files_have_names_from_the_start(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none without a name gets a hidden one; another error is an error."""
    real, code = os.open, errno.EOPNOTSUPP

    def opens(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & exporting._UNNAMED == exporting._UNNAMED:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", opens)
    assert host.export(host.root / "a.mp4") is None
    assert (host.real / "a.mp4").read_bytes() == CONTENT
    code = errno.EROFS
    failure = host.export(host.root / "b.mp4")
    assert failure is not None
    assert "Read-only file system" in failure.message


@pytest.mark.parametrize("unnamed", [True, False])
def test_nothing_is_overwritten(host: Host, monkeypatch: pytest.MonkeyPatch, unnamed: bool) -> None:
    """Neither a file, nor a folder, nor a link to nowhere, also where it appears while the result is written."""
    if not unnamed:
        monkeypatch.setattr(exporting, "_UNNAMED", 0)
    (host.real / "file.mp4").write_bytes(b"mine")
    (host.real / "dir.mp4").mkdir()
    (host.real / "link.mp4").symlink_to(host.outside / "new")
    for name in ("file.mp4", "dir.mp4", "link.mp4"):
        failure = host.check(host.root / name)
        assert failure is not None
        assert failure.message == f"{name!r} is there already; accepted: the path of a new file"
        failure = host.export(host.root / name)
        assert failure is not None
        assert failure.message == "another file is there already; accepted: the path of a new file"
    assert (host.real / "file.mp4").read_bytes() == b"mine"
    assert not (host.outside / "new").exists()
    host.files.perform(ExportFile(1, LARGE_SHA, str(host.root / "late.mp4")))
    assert host.files.work()
    (host.real / "late.mp4").write_bytes(b"mine")
    while host.files.work():
        pass
    assert "another file is there" in host.events.pop().failure.message
    assert (host.real / "late.mp4").read_bytes() == b"mine"


def synchronized(monkeypatch: pytest.MonkeyPatch, name: Path) -> list[tuple[int, int, bool]]:
    """What is made durable from now on: its inode, its size, and whether a file of that name is there by then."""
    found: list[tuple[int, int, bool]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        found.append((status.st_ino, status.st_size, name.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_a_file_that_is_copied_into_the_store_is_durable_before_it_has_its_name(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is its name before it is said to be there: a record that refers to it outlives a crash of the machine."""
    (host.real / "new").write_bytes(b"new" * 1000)
    stored = host.state / "files" / hashlib.sha256(b"new" * 1000).hexdigest()
    found = synchronized(monkeypatch, stored)
    assert host.do(ImportFile(1, str(host.root / "new"), MOST)).failure is None
    assert found[0] == (stored.stat().st_ino, 3000, False)
    assert [(inode, is_there) for inode, _, is_there in found[1:]] == [(stored.parent.stat().st_ino, True)]


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_result_is_durable_before_it_has_its_name(host: Host, monkeypatch: pytest.MonkeyPatch, unnamed: bool) -> None:
    """And its name before the job has ended; of one that lies there already nobody knows whether its name is, so again."""
    if not unnamed:
        monkeypatch.setattr(exporting, "_UNNAMED", 0)
    path = host.real / "a.mp4"
    found = synchronized(monkeypatch, path)
    assert host.export(host.root / "a.mp4") is None
    assert found[0] == (path.stat().st_ino, len(CONTENT), False)
    assert [(inode, is_there) for inode, _, is_there in found[1:]] == [(host.real.stat().st_ino, True)]
    found.clear()
    assert host.export(host.root / "a.mp4") is None
    assert [(inode, is_there) for inode, _, is_there in found] == [(host.real.stat().st_ino, True)]


def test_a_result_that_lies_there_already_is_done(host: Host) -> None:
    """A broker that was killed before it could say so finds the file that it has written."""
    for file in (SHA, LARGE_SHA):
        path = host.root / f"{file[:5]}.mp4"
        assert host.export(path, file) is None
        before = path.stat().st_ino
        assert host.export(path, file) is None
        assert path.stat().st_ino == before
    other = host.real / "other.mp4"
    other.write_bytes(bytes(len(CONTENT)))
    assert host.export(other) is not None


def test_an_output_is_checked_before_the_work(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is there and below a root, the name has the result's suffix and is new, and the broker may write there."""
    assert host.check(host.root / "a.mp4") is None
    assert not (host.real / "a.mp4").exists()
    (host.real / "out").symlink_to(host.outside)
    monkeypatch.setattr(os, "access", lambda *_args, **_named: False)
    for path, reason in (
        (host.root / "a.mp4", "the broker may not write to that folder"),
        (host.root / "a.png", "'a.png' is no name for this result; accepted: one that ends in '.mp4'"),
        (host.root / "none" / "a.mp4", "isn't there; accepted: a new file in a folder that is there below"),
        (host.root / "out" / "a.mp4", "leads out of the media roots"),
        (f"{host.root}/../a.mp4", "lies outside of the media roots"),
        ("/a.mp4", "lies outside of the media roots"),
        ("a.mp4", "is no absolute path"),
        (f"{host.root}/", "names no file"),
        (f"{host.root}/..", "lies outside"),
        (f"{host.root}/out/..", "names no file"),
        (f"{host.root}/{'x' * 300}.mp4", "File name too long"),
    ):
        failure = host.check(path)
        assert failure is not None
        assert reason in failure.message
    for path in (
        host.root / "none" / "a.mp4",
        host.root / "out" / "a.mp4",
        f"{host.root}/../a.mp4",
        "a.mp4",
        f"{host.root}/",
    ):
        assert host.export(path) is not None
    assert list(host.outside.iterdir()) == [host.outside / "secret"]


def test_a_result_that_is_gone_is_not_exported(host: Host) -> None:
    """The failure says that it can't be read."""
    failure = host.export(host.root / "a.mp4", "0" * 64)
    assert failure is not None
    assert "No such file" in failure.message
    assert list(host.real.glob("*.mp4")) == []


def test_a_store_takes_files_that_are_imported_beside_others(host: Host) -> None:
    """What is short is done between two pieces of what is long."""
    (host.real / "large").write_bytes(LARGE)
    host.files.perform(ImportFile(1, str(host.root / "large"), MOST))
    assert host.files.work()
    host.files.perform(ReceiveFile(2, 0, hashlib.sha256(b"").hexdigest()))
    assert [event.ticket for event in host.events] == [2]
    while host.files.work():
        pass
    assert [event.ticket for event in host.events] == [2, 1]
