"""The broker's files: what requests bring, states to go on from, results; each complete under its SHA-256, or not there.

A file is written below ``incoming/``, hashed on the way, made durable, and only then given its name. Whoever reads one
goes on reading what was there when it began: files are never changed, and one that is removed lives until its last
reader has closed it. Nothing here has a thread: `perform` does what is short, `work` a piece of what takes long.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

from reelwire.job_parts import FILE_NAME, FILE_PART_BYTES
from reelwire.job_spec import MediaInput
from reelwire.messages import Failure
from reelwire.writing import write_whole

from .actions import (
    AppendPart,
    CheckOutput,
    DropFile,
    ExportFile,
    FileAction,
    ImportFile,
    InspectFile,
    ReadPart,
    ReceiveFile,
    RemoveFile,
)
from .events import FileDone, PartRead, PartStored
from .exporting import existing, placed
from .media_roots import MediaRoots, Refused
from .state_folder import sync_folder

FileEvent = PartStored | FileDone | PartRead
FREE_BYTES = 64 << 20
"""Room that no file takes on its disk: the journal needs it, or nothing can be acknowledged any more."""
PIECE_BYTES = 4 << 20
"""What long work reads and writes before something else has its turn."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class _Coming:
    """A file that comes in parts; no descriptor is kept, as thousands may come at once."""

    path: Path
    nbytes: int
    sha256: str
    parts: int = 0
    written: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class Files:
    """The file work of a broker, done in the order in which it is asked for; only `inspect` may run on another thread.

    Args:
        files: folder of the complete files.
        incoming: folder of the others, on the same file system.
        roots: where requests may name files.
        look: raises `Refused` for a file that an input doesn't take.
        post: takes the answers.
        clock: seconds, monotonic.
        retry_after_s: what is advised when the disk is full.
    """

    def __init__(
        self,
        files: Path,
        incoming: Path,
        roots: MediaRoots,
        look: Callable[[Path, MediaInput], object],
        post: Callable[[FileEvent], None],
        clock: Callable[[], float],
        retry_after_s: float = 5.0,
    ) -> None:
        """Begin with nothing on its way."""
        self._files = files
        self._incoming = incoming
        self._roots = roots
        self._look = look
        self._post = post
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._coming: dict[int, _Coming] = {}
        self._long: deque[tuple[int, Generator[None]]] = deque()

    def perform(self, action: FileAction) -> None:
        """Do what is asked for, or take it up for `work`."""
        match action:
            case ReceiveFile():
                self.receive(action)
            case AppendPart():
                self.append(action)
            case DropFile():
                self.drop(action)
            case ImportFile():
                self.take(action)
            case InspectFile():
                self.inspect(action)
            case CheckOutput():
                self.check(action)
            case ExportFile():
                self.export(action)
            case ReadPart():
                self.read(action)
            case RemoveFile():
                self.remove(action)
            case _:
                assert_never(action)

    def work(self) -> bool:
        """Do a piece of what takes long; whether there is more of it."""
        if self._long:
            ticket, steps = self._long[0]
            with self._answering(ticket) as answered:
                if next(steps, answered) is None:
                    return True
            self._long.popleft()
        return bool(self._long)

    def receive(self, action: ReceiveFile) -> None:
        """Begin a file that comes in parts."""
        with self._answering(action.ticket):
            if not FILE_NAME.fullmatch(action.sha256):
                raise Refused("its hash is no SHA-256; accepted: 64 hexadecimal digits in lower case")
            self._check_room(action.nbytes)
            coming = _Coming(self._path(action.ticket), action.nbytes, action.sha256)
            os.close(os.open(coming.path, _NEW, 0o600))
            self._coming[action.ticket] = coming
            if coming.written == coming.nbytes:
                self._complete(action.ticket, coming)

    def append(self, action: AppendPart) -> None:
        """Write the next part; nothing happens when the file was given up or refused before."""
        coming = self._coming.get(action.ticket)
        if coming is None:
            return
        with self._answering(action.ticket):
            data = memoryview(action.data).cast("B")
            least = min(FILE_PART_BYTES, coming.nbytes - coming.written)
            if action.index != coming.parts:
                raise Refused(f"part {action.index} came in place of part {coming.parts}")
            if len(data) != least:
                raise Refused(f"part {action.index} has {len(data)} bytes; accepted: {least}")
            descriptor = os.open(coming.path, _MORE)
            try:
                write_whole(descriptor, data)
                if coming.written + least == coming.nbytes:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            coming.digest.update(data)
            coming.written += least
            coming.parts += 1
            self._post(PartStored(self._clock(), action.ticket, coming.parts))
            if coming.written == coming.nbytes:
                self._complete(action.ticket, coming)

    def drop(self, action: DropFile) -> None:
        """Give up what was begun under that ticket; nothing of it is left, and nothing is answered."""
        self._forget(action.ticket)
        for ticket, steps in [each for each in self._long if each[0] == action.ticket]:
            steps.close()
            self._long.remove((ticket, steps))

    def take(self, action: ImportFile) -> None:
        """Copy a file of the host into the store, in pieces."""
        self._long.append((action.ticket, self._taking(action)))

    def inspect(self, action: InspectFile) -> None:
        """Look whether a file of the store is what an input takes."""
        with self._answering(action.ticket):
            path = self._stored(action.file)
            if not path.exists():
                raise Refused("the file isn't there any more")
            self._look(path, action.wanted)
            self._post(FileDone(self._clock(), action.ticket))

    def check(self, action: CheckOutput) -> None:
        """Look whether a result could be written to a path."""
        with self._answering(action.ticket), self._roots.folder_of(action.path) as (folder, name):
            if not name.endswith(action.suffix):
                raise Refused(f"{name[:80]!r} is no name for this result; accepted: one that ends in {action.suffix!r}")
            if existing(folder, name) is not None:
                raise Refused(f"{name[:80]!r} is there already; accepted: the path of a new file")
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
                raise Refused("the broker may not write to that folder; accepted: one that it may write to")
            self._post(FileDone(self._clock(), action.ticket))

    def export(self, action: ExportFile) -> None:
        """Copy a file of the store to a path of the host, in pieces."""
        self._long.append((action.ticket, self._exporting(action)))

    def read(self, action: ReadPart) -> None:
        """Read a part of a file of the store."""
        data, reason = b"", ""
        try:
            with _opened(self._stored(action.file)) as source:
                data = _read_at(source, action.index * FILE_PART_BYTES)
                reason = "" if data else f"it has no part {action.index}"
        except (Refused, OSError) as error:
            reason = self._failure(error).message
        self._post(PartRead(self._clock(), action.ticket, data, reason))

    def remove(self, action: RemoveFile) -> None:
        """Take a file's name; whoever has it open keeps it."""
        with contextlib.suppress(Refused, OSError):
            self._stored(action.file).unlink(missing_ok=True)

    # --- what takes long -------------------------------------------------------------------------------------------------

    def _taking(self, action: ImportFile) -> Generator[None]:
        path, digest, nbytes = self._path(action.ticket), hashlib.sha256(), 0
        with self._roots.opened(action.path) as source:
            _check_size(os.fstat(source).st_size, action.nbytes_max)
            self._check_room(os.fstat(source).st_size)
            target = os.open(path, _NEW, 0o600)
            try:
                while data := os.read(source, PIECE_BYTES):
                    nbytes += len(data)
                    _check_size(nbytes, action.nbytes_max)  # it may grow while it is read
                    write_whole(target, data)
                    digest.update(data)
                    yield
                os.fsync(target)
                self._keep(action.ticket, path, digest.hexdigest(), nbytes)
            finally:
                os.close(target)
                path.unlink(missing_ok=True)

    def _exporting(self, action: ExportFile) -> Generator[None]:
        with self._roots.folder_of(action.path) as (folder, name), _opened(self._stored(action.file)) as source:
            size = os.fstat(source).st_size
            with placed(folder, name) as target:
                if not (yield from self._is_same(folder, name, action.file, size)):
                    while data := os.read(source, PIECE_BYTES):
                        write_whole(target.descriptor, data)
                        yield
                    os.fsync(target.descriptor)
                    target.give_name()
                os.fsync(folder)  # also where a broker was killed before it came so far
        self._post(FileDone(self._clock(), action.ticket, nbytes=size))

    def _is_same(self, folder: int, name: str, sha256: str, size: int) -> Generator[None, None, bool]:
        """Whether the file lies there already, as when a broker is killed before it could say that it had written it."""
        found = existing(folder, name)
        if found is None:
            return False
        digest = hashlib.sha256()
        if stat.S_ISREG(found.st_mode) and found.st_size == size:
            with _opened(name, folder) as descriptor:
                while data := os.read(descriptor, PIECE_BYTES):
                    digest.update(data)
                    yield
        if digest.hexdigest() != sha256:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        return True

    # --- how a file is kept ------------------------------------------------------------------------------------------------

    def _complete(self, ticket: int, coming: _Coming) -> None:
        if coming.digest.hexdigest() != coming.sha256:
            raise Refused(f"its SHA-256 is {coming.digest.hexdigest()}, not {coming.sha256} as was said")
        del self._coming[ticket]
        try:
            self._keep(ticket, coming.path, coming.sha256, coming.nbytes)
        finally:
            coming.path.unlink(missing_ok=True)

    def _keep(self, ticket: int, path: Path, sha256: str, nbytes: int) -> None:
        """Give a complete and durable file its name, if there is none of that content, and say so."""
        target = self._files / sha256
        if not target.exists():
            path.rename(target)
            try:
                sync_folder(self._files)
            except OSError:
                target.unlink(missing_ok=True)
                raise
        self._post(FileDone(self._clock(), ticket, sha256=sha256, nbytes=nbytes))

    def _check_room(self, nbytes: int) -> None:
        found = os.statvfs(self._incoming)
        announced = sum(coming.nbytes - coming.written for coming in self._coming.values())
        if found.f_bavail * found.f_frsize < announced + nbytes + FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _path(self, ticket: int) -> Path:
        return self._incoming / f"{ticket}.part"

    def _stored(self, file: str) -> Path:
        if not FILE_NAME.fullmatch(file):
            raise Refused("it is no file of the store")
        return self._files / file

    def _forget(self, ticket: int) -> None:
        coming = self._coming.pop(ticket, None)
        if coming is not None:
            with contextlib.suppress(OSError):
                coming.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _answering(self, ticket: int) -> Iterator[object]:
        """Answer with what went wrong, if something did, and leave nothing behind."""
        try:
            yield object()
        except (Refused, OSError) as error:
            self._forget(ticket)
            self._post(FileDone(self._clock(), ticket, self._failure(error)))

    def _failure(self, error: Refused | OSError) -> Failure:
        if isinstance(error, Refused):
            return Failure("request", str(error))
        if error.errno in _NO_ROOM:
            reason = f"there is no room for it on the broker's host ({error.strerror})"
            return Failure("overload", reason, retry_after_s=self._retry_after_s)
        if isinstance(error, FileExistsError):
            return Failure("request", "another file is there already; accepted: the path of a new file")
        return Failure("request", f"it can't be read or written on the broker's host ({error.strerror})")


def _check_size(nbytes: int, most: int) -> None:
    if nbytes > most:
        raise Refused(f"it has {nbytes} bytes or more; accepted: {most}")


@contextlib.contextmanager
def _opened(name: Path | str, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(name, _READ | os.O_NONBLOCK, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_at(source: int, offset: int) -> bytes:
    """The part of a file that begins there; short only where the file ends."""
    pieces: list[bytes] = []
    left = FILE_PART_BYTES
    while left and (data := os.pread(source, left, offset)):
        pieces.append(data)
        offset, left = offset + len(data), left - len(data)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
