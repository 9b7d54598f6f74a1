"""Files of jobs on this machine: looked at and read part by part on their way up, complete or absent on their way down."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from .checks import shown
from .client_events import UploadFile
from .errors import RequestError, WireError
from .job_parts import FILE_PART_BYTES


def examined(field: str, path: Path, nbytes_max: int, proceed: Callable[[], object]) -> UploadFile:
    """What is to be known of a file before it is uploaded.

    Args:
        field: of the request, as the caller wrote it.
        path: where the file is.
        nbytes_max: most bytes that are accepted.
        proceed: called before each part is read; raises when nobody wants to know any more.

    Raises:
        RequestError: of the field: there is no such file, it can't be read, it is empty or too large.
    """
    digest, nbytes = hashlib.sha256(), 0
    with closing(_parts(field, path, nbytes_max)) as parts:
        for data in parts:
            proceed()
            nbytes += len(data)
            _check_size(field, nbytes, nbytes_max)
            digest.update(data)
    if nbytes == 0:
        raise RequestError(field, f"{shown(str(path))} is empty")
    return UploadFile(field, nbytes, digest.hexdigest())


def read_part(file: UploadFile, path: Path, index: int) -> bytes:
    """A part of a file that was examined.

    Raises:
        RequestError: it can't be read any more, or is shorter than it was.
    """
    start = index * FILE_PART_BYTES
    wanted = min(FILE_PART_BYTES, file.nbytes - start)
    try:
        with path.open("rb") as opened:
            opened.seek(start)
            data = opened.read(wanted)
    except OSError as error:
        raise RequestError(file.field, f"{shown(str(path))} can't be read any more: {_reason(error)}") from None
    if len(data) != wanted:
        raise RequestError(file.field, f"{shown(str(path))} was changed while it was uploaded")
    return data


def target_of(path: str | os.PathLike[str]) -> Path:
    """Where a result is to be written.

    Raises:
        RequestError: of the field ``path``: no file can be there.
    """
    if not isinstance(path, str | os.PathLike):
        raise RequestError("path", f"{shown(path)} is no path")
    said, target = os.fspath(path), Path(path)
    if "\0" in said:
        raise RequestError("path", f"{shown(said)} is no path")
    if not target.name or said.endswith(os.sep) or target.is_dir():
        raise RequestError("path", f"{shown(said)} is no file; accepted: the path of one")
    try:
        if not target.parent.is_dir():
            raise RequestError("path", f"there is no folder {shown(str(target.parent))}")
        if target.exists() and not target.is_file():  # a device or a pipe would be replaced by the file
            raise RequestError("path", f"{shown(said)} is something else than a file; accepted: the path of one")
    except OSError as error:  # a name that is too long
        raise RequestError("path", f"{shown(said)} can't be used: {_reason(error)}") from None
    return target


class Download:
    """A result on its way into a file, or into memory without one; to be used in a ``with`` block.

    A file is written under another name beside the target, which it takes when it is complete and its hash is right.
    Otherwise nothing is left of it when the block ends, and what was at the target is as it was.

    Args:
        sha256: of the whole, in hexadecimal.
        target: where it is to be; None: in memory.
    """

    def __init__(self, sha256: str, target: Path | None) -> None:
        """Nothing was written yet."""
        self._sha256 = sha256
        self._target = target
        self._digest = hashlib.sha256()
        self._held = bytearray()
        self._lock = threading.Lock()  # an event loop's task may be cancelled while a thread writes for it
        self._is_over = False
        self._temporary: Path | None = None
        self._file: IO[bytes] | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Add the next bytes.

        Raises:
            OSError: the file can't be written.
        """
        with self._lock:
            if self._is_over:
                return
            self._digest.update(data)
            if self._target is None:
                self._held += data
            else:
                self._opened(self._target).write(data)

    def finish(self) -> Path | bytes:
        """The file at its place, or the bytes.

        Raises:
            WireError: they aren't what was promised.
            OSError: the file can't be written.
        """
        with self._lock:
            if self._digest.hexdigest() != self._sha256:
                raise WireError(f"the result has the SHA-256 {self._digest.hexdigest()}, not {self._sha256}")
            if self._target is None:
                return bytes(self._held)
            self._opened(self._target).close()
            assert self._temporary is not None
            self._temporary.replace(self._target)
            self._temporary = None
            return self._target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
            self._held = bytearray()
            if self._file is not None:
                with suppress(OSError):  # a full disk says so once more
                    self._file.close()
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)

    def _opened(self, target: Path) -> IO[bytes]:
        if self._file is None:
            self._temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(4)}.part")
            try:
                self._file = self._temporary.open("xb")
            except OSError as error:
                self._temporary = None
                raise RequestError("path", f"{shown(str(target))} can't be written: {_reason(error)}") from None
        return self._file


def _parts(field: str, path: Path, nbytes_max: int) -> Generator[bytes, None, None]:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for its writer
            raise RequestError(field, f"{shown(str(path))} is no file; accepted: the path of one")
        _check_size(field, found.st_size, nbytes_max)
        with path.open("rb", buffering=0) as file:
            while data := file.read(FILE_PART_BYTES):
                yield data
    except (OSError, ValueError) as error:  # a path with a zero in it is a ValueError
        raise RequestError(field, f"{shown(str(path))} can't be read: {_reason(error)}") from None


def _check_size(field: str, nbytes: int, nbytes_max: int) -> None:
    if nbytes > nbytes_max:
        raise RequestError(field, f"takes {nbytes} bytes; accepted by the broker: {nbytes_max}")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
