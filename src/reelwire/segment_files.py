"""Where shared memory lies: folders, locks and files; what dead producers left behind is removed here.

Everything is opened relative to a descriptor of its folder, follows no link, and is checked to be this user's alone, so
that neither a name in a message nor another user of the machine can lead anywhere else. See `segments`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from .tensors import MEMORY_NAME
from .writing import write_whole

VARIABLE = "REELWIRE_SHARED_MEMORY"
"""Names the folder to use in place of `/dev/shm`."""

LOCK, PROBE = "lock", "probe"
_NEW_LOCK = "new"
_TRIES_MAX = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a file's place must not make us wait
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)


def folder_of_user(base: Path | None = None) -> Path:
    """The folder of this user's producers: below `base`, else below what `REELWIRE_SHARED_MEMORY` names."""
    return (base or Path(os.environ.get(VARIABLE) or "/dev/shm")) / f"reelwire-{os.geteuid()}"  # noqa: S108


def reap(base: Path | None = None) -> list[str]:
    """Remove what dead producers left behind; their names.

    A producer that is alive holds its lock, also while it is stopped. One whose folder is taken between its making and
    its locking notices that, and makes another.
    """
    reaped = []
    path = folder_of_user(base)
    with contextlib.suppress(OSError), opened(path) as root:
        for name in sorted(os.listdir(root)):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if MEMORY_NAME.fullmatch(name) and _reaped(name, root):
                    reaped.append(name)
        with contextlib.suppress(OSError):
            path.rmdir()
    return reaped


def abandoned(base: Path | None = None) -> list[str]:
    """Names of what dead producers left behind; `reap` removes it."""
    found = []
    with contextlib.suppress(OSError), opened(folder_of_user(base)) as root:
        for name in sorted(os.listdir(root)):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if MEMORY_NAME.fullmatch(name) and _is_abandoned(name, root):
                    found.append(name)
    return found


def _is_abandoned(owner: str, root: int) -> bool:
    with opened(owner, root) as folder:
        try:
            lock = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
    return True


def _reaped(owner: str, root: int) -> bool:
    with opened(owner, root) as folder:
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), os.stat(LOCK, dir_fd=folder)):  # another's, who was here before
                return False
            for name in sorted(os.listdir(folder), key=lambda name: name == LOCK):  # noqa: PTH208
                unlink(name, folder)
            os.rmdir(owner, dir_fd=root)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
    return True


class OwnFolder:
    """A producer's own folder, whose lock it holds until it removes it, leaves it, or dies.

    Attributes:
        owner: its name.

    Raises:
        OSError: it can't be made, or the user's folder is open to others.
    """

    def __init__(self, path: Path) -> None:
        """Make a folder of a new name below `path`, the user's folder, which is made if it isn't there."""
        self._path = path
        for _ in range(_TRIES_MAX):
            if self._claim(path, secrets.token_hex(8)):
                return
        raise FileExistsError(errno.EEXIST, "the new folder is taken again and again", str(path))

    def _claim(self, path: Path, owner: str) -> bool:
        """Make and lock it; False: a reaper was faster, or another producer has just removed the user's folder."""
        self.owner = owner
        self._descriptors: list[int] = []
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
            self._descriptors.append(_open_folder(path))
            os.mkdir(owner, 0o700, dir_fd=self._root)
            self._descriptors.append(_open_folder(owner, self._root))
            self._descriptors.append(os.open(_NEW_LOCK, _NEW, 0o600, dir_fd=self._folder))
            fcntl.flock(self._descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only now can it be found, so that nobody who looks for the dead ever holds it for a moment.
            os.link(_NEW_LOCK, LOCK, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            unlink(_NEW_LOCK, self._folder)
        except (FileExistsError, FileNotFoundError):
            self._give_up()
            if not path.parent.is_dir():
                raise
            return False
        except OSError:
            self._give_up()
            raise
        return True

    def _give_up(self) -> None:
        """Remove what was made so far, but nothing of a reaper's."""
        if len(self._descriptors) > 1:
            unlink(_NEW_LOCK, self._folder)
        if self._descriptors:
            with contextlib.suppress(OSError):
                os.rmdir(self.owner, dir_fd=self._root)
        self.leave()

    @property
    def _root(self) -> int:
        return self._descriptors[0]

    @property
    def _folder(self) -> int:
        return self._descriptors[1]

    def write(self, name: str, content: bytes) -> None:
        """A new small file.

        Raises:
            OSError: there is no room.
        """
        descriptor = os.open(name, _NEW, 0o600, dir_fd=self._folder)
        try:
            os.posix_fallocate(descriptor, 0, len(content))
            write_whole(descriptor, content)
        finally:
            os.close(descriptor)

    def reserve(self, name: str, size: int) -> mmap.mmap | None:
        """A new file of that size, mapped, its pages there; None when there is no room for it."""
        try:
            descriptor = os.open(name, _NEW, 0o600, dir_fd=self._folder)
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, size)
            return mapping(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            self.unlink(name)
            return None
        finally:
            os.close(descriptor)

    def has(self, name: str) -> bool:
        """Whether a file is still there."""
        return exists(name, self._folder)

    def unlink(self, name: str) -> None:
        """Take a file's name away, if it has one."""
        unlink(name, self._folder)

    def remove(self) -> None:
        """Remove the folder, of which nothing but probe and lock is left, and the user's if it was the last in it."""
        for name in (PROBE, LOCK):  # the lock last: without it the folder is anybody's to remove
            self.unlink(name)
        with contextlib.suppress(OSError):
            os.rmdir(self.owner, dir_fd=self._root)
            self._path.rmdir()
        self.leave()

    def leave(self) -> None:
        """Close what is open; the lock ends with its last descriptor, in whichever process that is."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def _open_folder(name: Path | str, above: int | None = None) -> int:
    """A descriptor of a folder that is this user's alone, and no link."""
    descriptor = os.open(name, _FOLDER, dir_fd=above)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is open to others than its user", str(name))
    return descriptor


@contextlib.contextmanager
def opened(name: Path | str, above: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is this user's alone, and no link.

    Raises:
        OSError: it isn't there, or isn't that.
    """
    descriptor = _open_folder(name, above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_file(name: str, folder: int) -> Iterator[tuple[int, int]]:
    """Descriptor, for reading, and size of a file that a producer of ours may have made.

    Raises:
        OSError: it isn't there, or isn't that.
    """
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not found.st_size:
            raise PermissionError(errno.EPERM, "it is no file of ours with bytes in it", name)
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


def mapping(descriptor: int, size: int, protection: int) -> mmap.mmap:
    """A shared mapping of a file's first `size` bytes, with its pages there; it outlives the descriptor.

    Raises:
        OSError: there is no room for it.
        ValueError: the file is shorter.
    """
    flags = mmap.MAP_SHARED | _POPULATE
    if sys.version_info >= (3, 13):  # before, each mapping keeps a descriptor
        return mmap.mmap(descriptor, size, flags=flags, prot=protection, trackfd=False)
    return mmap.mmap(descriptor, size, flags=flags, prot=protection)


def exists(path: str, folder: int) -> bool:
    """Whether something of that name is below the folder."""
    try:
        os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def unlink(name: str, folder: int) -> None:
    """Take a file's name away, if it has one."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
