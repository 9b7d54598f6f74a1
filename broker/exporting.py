"""How a file comes to lie in a folder of somebody else's: whole under its name or not at all, and never over another."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""What systems say that have no files without a name, or no ``/proc``."""
_UNNAMED: int = getattr(os, "O_TMPFILE", 0)


@dataclass(frozen=True, slots=True)
class Target:
    """A file that is being written.

    Attributes:
        descriptor: of the file.
        folder: descriptor of the folder that it will lie in.
        name: what it will be called there.
        hidden: what it is called there now; empty: it has no name, and goes with this process.
    """

    descriptor: int
    folder: int
    name: str
    hidden: str

    def give_name(self) -> None:
        """Let it appear.

        Raises:
            FileExistsError: there is something of that name.
            OSError: it can't be.
        """
        if self.hidden:
            os.link(self.hidden, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder, follow_symlinks=False)
        else:  # open(2): the way to give a name to a file that has none, without privileges
            os.link(f"/proc/self/fd/{self.descriptor}", self.name, dst_dir_fd=self.folder, follow_symlinks=True)


@contextlib.contextmanager
def placed(folder: int, name: str) -> Iterator[Target]:
    """A new file that will lie in a folder, which is given by a descriptor.

    Raises:
        OSError: there is no room, or it isn't allowed.
    """
    target = _unnamed(folder, name) or _hidden(folder, name)
    try:
        yield target
    finally:
        os.close(target.descriptor)
        if target.hidden:
            with contextlib.suppress(OSError):
                os.unlink(target.hidden, dir_fd=folder)


def existing(folder: int, name: str) -> os.stat_result | None:
    """What is in a folder under that name, a link itself rather than where it leads; None: nothing.

    Raises:
        OSError: it can't be looked at, as with a name that is too long.
    """
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _unnamed(folder: int, name: str) -> Target | None:
    if not _UNNAMED:
        return None
    try:
        descriptor = os.open(".", _UNNAMED | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_UNNAMED:
            return None
        raise
    return Target(descriptor, folder, name, "")


def _hidden(folder: int, name: str) -> Target:
    hidden = f".reelwire-{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return Target(os.open(hidden, flags, 0o666, dir_fd=folder), folder, name, hidden)
