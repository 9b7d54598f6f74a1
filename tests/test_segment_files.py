"""Where shared memory lies: whoever dies leaves a folder that a reaper removes, and nobody else's."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reelwire import segment_files
from reelwire.segments import MemoryLostError, MemoryUnavailableError, Pool, Reader, reap
from reelwire.tensors import Shared

LIMIT_S = 60.0

OWNER = """
import sys
from reelwire.segments import Pool
pool = Pool(8 << 20)
pieces = [pool.take(100_000), pool.take(100_000)]
pieces[0].view[:] = b"a" * 100_000
pool.give_back(pieces[1].use)
print(pool.owner, flush=True)
sys.stdin.read()
"""
FORKING = """
import os, sys
from reelwire.segments import Pool
pool = Pool(8 << 20)
piece = pool.take(100_000)
if os.fork() == 0:
    assert pool.take(1) is None
    pool.give_back(piece.use)
    pool.close()
    assert (pool.nbytes, pool.outstanding) == (0, 0)
    print(pool.owner, flush=True)
sys.stdin.read()
"""
SMALL = """
import resource
from reelwire.segments import Pool
pool = Pool(8 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
print(pool.take(1_000_000), pool.take(100_000) is not None, pool.outstanding)
pool.close()
"""


@contextmanager
def running(program: str, base: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process whose producers are below `base`, and the first line that it says."""
    environ = {**os.environ, segment_files.VARIABLE: str(base)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
            process.stdin.close()
            process.stdout.read()  # until nobody holds the other end, a forked child neither
            process.wait(LIMIT_S)


def root(base: Path) -> Path:
    """The user's folder."""
    return base / f"reelwire-{os.geteuid()}"


def test_what_a_killed_producer_leaves_is_removed_and_its_readers_go_on(tmp_path: Path) -> None:
    """SIGKILL leaves a folder without a lock: it is reaped once, whole, and nothing of the living."""
    living = Pool(1 << 20, tmp_path)
    reader = Reader(tmp_path)
    with running(OWNER, tmp_path) as (process, owner):
        assert reap(tmp_path) == []
        place = Shared(owner, "s1", 1)
        view = reader.view(place, 100_000)
        process.kill()
        process.wait(LIMIT_S)
        assert (root(tmp_path) / owner / "s1").exists()
        assert reap(tmp_path) == [owner]
    assert bytes(view) == b"a" * 100_000
    with pytest.raises(MemoryLostError, match="No such file"):
        Reader(tmp_path).view(place, 1)
    assert [path.name for path in root(tmp_path).iterdir()] == [living.owner]
    assert reap(tmp_path) == []
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_producer_keeps_its_memory(tmp_path: Path) -> None:
    """A process under SIGSTOP looks dead by every clock, and goes on later as if nothing had been."""
    with running(OWNER, tmp_path) as (process, owner):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert reap(tmp_path) == []
        assert Reader(tmp_path).probe(owner) != b""
        process.send_signal(signal.SIGCONT)
    assert reap(tmp_path) == [owner]
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_has_no_share_in_it(tmp_path: Path) -> None:
    """It takes nothing, removes nothing when it closes, and doesn't keep the folder of a parent that has died."""
    with running(FORKING, tmp_path) as (process, owner):
        assert (root(tmp_path) / owner / "s1").exists()
        assert reap(tmp_path) == []
        process.kill()
        process.wait(LIMIT_S)
        assert reap(tmp_path) == [owner]
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_an_answer(tmp_path: Path) -> None:
    """What the system refuses for real, beside a call that a test has replaced."""
    with running(SMALL, tmp_path) as (process, said):
        assert said == "None True 1"
        assert process.wait(LIMIT_S) == 0
    assert list(tmp_path.iterdir()) == []


def before(name: str, matches: Callable[..., bool], first: Callable[[], None]) -> Callable[..., Any]:
    """A call of the module `os` or `fcntl` that does something else first, once."""
    module = fcntl if name == "flock" else os
    original: Callable[..., Any] = getattr(module, name)
    waiting = [first]

    def call(*args: Any, **words: Any) -> Any:
        if waiting and matches(*args, **words):
            waiting.pop()()
        return original(*args, **words)

    return call


@pytest.mark.parametrize(
    "moment", ["before it is opened", "before its lock is made", "before it is locked", "before its lock can be found"]
)
def test_a_folder_that_is_being_made_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """A reaper that comes between two steps takes a folder that looks dead; its maker notices and makes another."""
    reaped: list[str] = []

    def reaping() -> None:
        reaped.extend(reap(tmp_path))

    name, matches = {
        "before it is opened": ("open", lambda path, *_, **__: path not in (root(tmp_path), "new")),
        "before its lock is made": ("open", lambda path, *_, **__: path == "new"),
        "before it is locked": ("flock", lambda *_: True),
        "before its lock can be found": ("link", lambda *_, **__: True),
    }[moment]
    monkeypatch.setattr(fcntl if name == "flock" else os, name, before(name, matches, reaping))
    pool = Pool(1 << 20, tmp_path)
    assert len(reaped) == 1
    assert [path.name for path in root(tmp_path).iterdir()] == [pool.owner] != reaped
    assert reap(tmp_path) == []
    assert Reader(tmp_path).probe(pool.owner) == pool.probe
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_a_reaper_holds_makes_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two who want one folder never both think that they have it."""
    held: list[int] = []

    def hold() -> None:
        (path,) = root(tmp_path).iterdir()
        held.append(os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600))
        fcntl.flock(held[0], fcntl.LOCK_EX)

    def first(descriptor: int, _how: int) -> bool:
        return not held

    monkeypatch.setattr(fcntl, "flock", before("flock", first, hold))
    pool = Pool(1 << 20, tmp_path)
    assert len(list(root(tmp_path).iterdir())) == 2
    os.close(held[0])
    assert len(reap(tmp_path)) == 1
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_not_found_before_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for the dead, and has a lock for a moment, comes in no producer's way, which leaves nothing behind."""
    flock = fcntl.flock

    def with_a_look(descriptor: int, how: int) -> None:
        looking = [os.open(path, os.O_RDONLY) for path in root(tmp_path).glob("*/lock")]
        try:
            for lock in looking:
                flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            flock(descriptor, how)
        finally:
            for lock in looking:
                os.close(lock)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", with_a_look)
        pool = Pool(1 << 20, tmp_path)
    assert [path.name for path in root(tmp_path).iterdir()] == [pool.owner]
    assert sorted(path.name for path in (root(tmp_path) / pool.owner).iterdir()) == ["lock", "probe"]
    assert segment_files.abandoned(tmp_path) == []
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_reaper_with_the_lock_of_another_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second reaper that waited with an old lock in its hands finds a producer there, which lives."""
    root(tmp_path).mkdir(0o700)
    (root(tmp_path) / "abc").mkdir(0o700)
    made: list[segment_files.OwnFolder] = []

    def somebody_comes() -> None:
        (root(tmp_path) / "abc" / "lock").unlink()
        (root(tmp_path) / "abc").rmdir()
        monkeypatch.setattr("secrets.token_hex", lambda _nbytes: "abc")
        made.append(segment_files.OwnFolder(root(tmp_path)))

    monkeypatch.setattr(fcntl, "flock", before("flock", lambda *_: not made, somebody_comes))
    reap(tmp_path)
    assert (root(tmp_path) / "abc" / "lock").exists()
    made[0].remove()
    assert list(tmp_path.iterdir()) == []


def test_producers_come_and_go_while_reapers_run(tmp_path: Path) -> None:
    """However the steps fall, nobody loses a folder that is in use, and nothing is left."""
    done = threading.Event()

    def again(work: Callable[[Path], object]) -> None:
        while not done.is_set():
            work(tmp_path)

    works = (reap, reap, segment_files.abandoned)
    reapers = [threading.Thread(target=again, args=(work,)) for work in works]
    for reaper in reapers:
        reaper.start()
    try:
        for _ in range(100):
            pool = Pool(1 << 20, tmp_path)
            piece = pool.take(10)
            assert piece is not None
            assert Reader(tmp_path).probe(pool.owner) == pool.probe
            pool.close()
    finally:
        done.set()
        for reaper in reapers:
            reaper.join()
    reap(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reaping_minds_its_own_business(tmp_path: Path) -> None:
    """What no producer made stays: files, links, folders of other names, folders that others may enter."""
    assert reap(tmp_path) == []
    user = root(tmp_path)
    user.mkdir(0o700)
    (user / "file").write_bytes(b"x")
    (user / "Folder").mkdir(0o700)
    (user / "open").mkdir(0o755)
    (tmp_path / "elsewhere").mkdir(0o700)
    (tmp_path / "elsewhere" / "kept").write_bytes(b"x")
    (user / "link").symlink_to(tmp_path / "elsewhere")
    (user / "dead").mkdir(0o700)
    (user / "dead" / "s1").write_bytes(b"x")
    (user / "dead" / "out").symlink_to(tmp_path / "elsewhere" / "kept")
    (user / "deep").mkdir(0o700)
    (user / "deep" / "folder").mkdir()
    assert reap(tmp_path) == ["dead"]
    assert {path.name for path in user.iterdir()} == {"file", "Folder", "open", "link", "deep"}
    assert (tmp_path / "elsewhere" / "kept").exists()


@pytest.mark.parametrize("wrong", ["open to others", "a link", "a file"])
def test_a_user_folder_that_is_not_ours_alone_is_refused(tmp_path: Path, wrong: str) -> None:
    """In a folder where everybody may write, somebody else may have been first: then there is no shared memory."""
    user = root(tmp_path)
    match wrong:
        case "open to others":
            user.mkdir(0o777)
            user.chmod(0o777)
        case "a link":
            (tmp_path / "elsewhere").mkdir(0o700)
            user.symlink_to(tmp_path / "elsewhere")
        case "a file":
            user.write_bytes(b"x")
    with pytest.raises(MemoryUnavailableError, match="no shared memory below"):
        Pool(1 << 20, tmp_path)
    assert reap(tmp_path) == []
    if user.is_dir():
        assert list(user.iterdir()) == []


@pytest.mark.parametrize("number", range(1, 5))
def test_a_folder_that_cannot_be_made_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Out of descriptors in the middle: the parts that were made are removed again."""
    original = os.open
    calls = iter(range(1, 100))

    def failing(*args: Any, **words: Any) -> int:
        if next(calls) == number:
            raise OSError(24, "Too many open files")
        return original(*args, **words)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing)
        with pytest.raises(MemoryUnavailableError, match="Too many open files"):
            Pool(1 << 20, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path != root(tmp_path)] == []
