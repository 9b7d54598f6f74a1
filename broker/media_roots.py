"""Paths that requests name on the broker's host: only files and folders below the media roots, whatever links say.

What counts is where a descriptor really leads, and what was checked is what is used: a path is opened first, then the
kernel is asked for the descriptor's own path, so nobody can change it in between. Hard links can't be told from the
files that they are; whoever may make them in a root decides what lies there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from reelwire.checks import shown

_ASK = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Neither a pipe nor a terminal in a file's place makes us wait or is changed."""
_F_GETPATH = 50  # fcntl(2) of macOS


class Refused(Exception):
    """A file of a request isn't accepted; the sentence says what is."""


class MediaRoots:
    """The folders below which requests may name files.

    Args:
        roots: absolute paths; each may be a link itself, and needn't be there yet.
        kept_out: a folder that is nobody's to read from or to write to, also where it lies below a root.
    """

    def __init__(self, roots: Sequence[str], kept_out: Path) -> None:
        """Keep both; roots are resolved anew for each path."""
        self._roots = tuple(roots)
        self._kept_out = os.path.realpath(kept_out)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A descriptor, for reading, of a regular file below a root.

        Raises:
            Refused: there is no such file, it leads elsewhere, is no regular file, or can't be read.
        """
        self._check(path, "a file")
        with self._open(path, getattr(os, "O_PATH", os.O_RDONLY) | _ASK, "a file") as found:
            kind = os.fstat(found).st_mode
            if not stat.S_ISREG(kind):
                self._refuse(path, f"is {_named(kind)}", "a regular file")
            try:
                # By the descriptor, as anything may have that name by now; on Linux it was only a place, not opened yet.
                source = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | _ASK) if _has_proc() else os.dup(found)
            except OSError as error:
                self._refuse(path, f"can't be read ({error.strerror})", "a file", error)
        try:
            yield source
        finally:
            os.close(source)

    @contextlib.contextmanager
    def folder_of(self, path: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder, below a root or one itself, that a file is to lie in, and the file's name there.

        Raises:
            Refused: there is no such folder, it leads elsewhere, or the path is no file's.
        """
        self._check(path, "a new file")
        folder, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            self._refuse(path, "names no file", "a new file")
        with self._open(
            folder or "/", os.O_RDONLY | os.O_DIRECTORY | _ASK, "a new file in a folder that is there"
        ) as found:
            yield found, name

    def _check(self, path: str, wanted: str) -> None:
        """Refuse what needn't be looked at: nobody learns what lies outside."""
        if not self._roots:
            self._refuse(path, "can't be used, as this broker has no media root", wanted)
        if not path.startswith("/") or "\0" in path:
            self._refuse(path, "is no absolute path", wanted)
        plain = _plain(path)
        if not any(_is_below(plain, _plain(root)) for root in (*self._roots, *self._resolved())):
            self._refuse(path, "lies outside of the media roots", wanted)

    @contextlib.contextmanager
    def _open(self, path: str, flags: int, wanted: str) -> Iterator[int]:
        try:
            found = os.open(path, flags)
        except OSError as error:
            why = (
                "isn't there" if error.errno in (errno.ENOENT, errno.ENOTDIR) else f"can't be opened ({error.strerror})"
            )
            self._refuse(path, why, wanted, error)
        try:
            real = _path_of(found)
            if not any(_is_below(real, root) for root in self._resolved()) or _is_below(real, self._kept_out):
                self._refuse(path, "leads out of the media roots", wanted)
            yield found
        finally:
            os.close(found)

    def _resolved(self) -> list[str]:
        return [os.path.realpath(root) for root in self._roots]

    def _refuse(self, path: str, why: str, wanted: str, error: Exception | None = None) -> NoReturn:
        roots = " or ".join(repr(root) for root in self._roots)
        accepted = f"{wanted} below {roots}" if roots else "an upload, or a result that is fetched"
        raise Refused(f"{shown(path)} {why}; accepted: {accepted}") from error


def _plain(path: str) -> str:
    """An absolute path without dots; two slashes at its start are one, which POSIX leaves open."""
    return "/" + os.path.normpath(path).lstrip("/")


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _path_of(descriptor: int) -> str:
    if _has_proc():
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return os.fsdecode(fcntl.fcntl(descriptor, _F_GETPATH, bytes(1024)).rstrip(b"\0"))


def _has_proc() -> bool:
    return sys.platform == "linux"


def _named(kind: int) -> str:
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(kind), "a device")
