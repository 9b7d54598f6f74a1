"""The files of jobs at a worker: its scratch folder, and what is found, fetched, kept and sent.

Inputs are read where they lie, if that place can be opened here and holds what the offer says; else they are fetched into
the scratch folder, beside the checkpoints and results that are made here. Everything in it is named by its SHA-256, and
belongs to one or more attempts at jobs: when the last of them lets go of it, it is removed. The folder is held as one of
shared memory is (`segment_files`), so that what a dead process left is found by the next, and removed.

`Files` is used by one thread, which is none that anybody waits for: to hash a large file takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from reelwire.job_parts import FILE_NAME, FILE_PART_BYTES
from reelwire.messages import Failure, FileGone, FileOffer, FilePart, FileRole, RunJob
from reelwire.segment_files import OwnFolder, folder_of_user, reap
from reelwire.tensors import Inline, TensorRef, inline_buffer
from reelwire.writing import write_whole

KNOWN_MAX = 1024
"""Files whose hash is remembered."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a file's place must not make us wait
_HASHED_AT_ONCE = 1 << 20
_Holder = tuple[str, int, FileRole | None]
"""Job, attempt, and what the file is to it; None: an input."""


def digest_of(descriptor: int) -> tuple[str, int]:
    """SHA-256, in hexadecimal, and size of an open file."""
    digest, at = hashlib.sha256(), 0
    while data := os.pread(descriptor, _HASHED_AT_ONCE, at):
        digest.update(data)
        at += len(data)
    return digest.hexdigest(), at


class Files:
    """The scratch folder of one process, and the files in it.

    Args:
        scratch_dir: the folder above it; empty: the machine's for temporary files.

    Attributes:
        folder: where this process keeps its files.
        reaped: folders of processes that had died without removing theirs, which was done here.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, scratch_dir: str = "") -> None:
        """Remove what the dead left behind, and make a folder."""
        base = Path(scratch_dir or tempfile.gettempdir())
        base.mkdir(parents=True, exist_ok=True)
        self.reaped = reap(base)
        self._own = OwnFolder(folder_of_user(base))
        self.folder = folder_of_user(base) / self._own.owner
        self._holders: dict[str, set[_Holder]] = {}
        self._known: OrderedDict[tuple[str, int, int, int, int], str] = OrderedDict()
        self._fetched: dict[str, _Fetched] = {}

    def find(self, run: RunJob, *, fetches: bool = True) -> tuple[dict[str, str], tuple[FileOffer, ...]]:
        """Path of each of a job's files that can be read here, by its name, and those that can't.

        Args:
            run: the job.
            fetches: the missing ones may be fetched: the attempt holds them until they are dropped.
        """
        found: dict[str, str] = {}
        missing: dict[str, FileOffer] = {}
        for offer in offers_of(run):
            if offer.file in found or offer.file in missing:
                continue
            path = self._place(offer)
            if path:
                found[offer.file] = path
            else:
                missing[offer.file] = offer
            if fetches and (not path or Path(path).parent == self.folder):
                self._holders.setdefault(offer.file, set()).add((run.job, run.attempt, None))
        return found, tuple(missing.values())

    def write(self, offer: FileOffer, part: FilePart) -> tuple[int, str]:
        """Write the next part of a file that is fetched; one that is there already changes nothing.

        Returns:
            How many parts are there, and the file's path, if those are all.

        Raises:
            ValueError: the part isn't the next one, has another size, or with it the file isn't what was offered.
            OSError: there is no room.
        """
        done = self.folder / offer.file
        if done.exists():
            return offer.parts, str(done)
        fetched = self._fetched.get(offer.file)
        if fetched is None:
            _check_name(offer.file)
            fetched = self._fetched[offer.file] = _Fetched(self.folder / f"{offer.file}.part", offer)
        try:
            if not fetched.add(part):
                return fetched.parts, ""
        except (OSError, ValueError):
            fetched.drop()
            del self._fetched[offer.file]
            raise
        fetched.path.replace(done)
        del self._fetched[offer.file]
        return offer.parts, str(done)

    def parts(self, file: str, first: int, parts: int) -> Iterator[FilePart | FileGone]:
        """The parts from `first` below `parts` of a file that was made here."""
        try:
            _check_name(file)
            with (self.folder / file).open("rb", buffering=0) as opened:
                opened.seek(first * FILE_PART_BYTES)
                for index in range(first, parts):
                    data = opened.read(FILE_PART_BYTES)
                    if not data:
                        return
                    yield FilePart(file, index, TensorRef("uint8", (len(data),), Inline(data)))
        except (OSError, ValueError) as error:
            yield FileGone(file, f"it isn't at its worker any more: {error}")

    def adopt(self, part: Path, job: str, attempt: int, role: FileRole, offer: FileOffer) -> None:
        """A file was made for an attempt, under another name: here, so that nobody drops it before it is held.

        Raises:
            OSError: it can't be named.
        """
        part.replace(self.folder / offer.file)
        self.hold(job, attempt, role, offer)

    def hold(self, job: str, attempt: int, role: FileRole | None, offer: FileOffer) -> None:
        """A file in the folder was made for an attempt."""
        self._holders.setdefault(offer.file, set()).add((job, attempt, role))

    def drop(self, job: str, attempt: int, role: FileRole | None = None, besides: str = "") -> None:
        """An attempt lets go of its files, of all `besides` one; `role`: only of those. What nobody holds is removed."""
        for file, holders in list(self._holders.items()):
            if file == besides:
                continue
            left = {each for each in holders if each[:2] != (job, attempt) or (role is not None and each[2] != role)}
            if left:
                self._holders[file] = left
                continue
            del self._holders[file]
            with contextlib.suppress(OSError):  # what can't be removed is in nobody's way
                if fetched := self._fetched.pop(file, None):
                    fetched.drop()
                (self.folder / file).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything; a thread that hangs may still be at it."""
        for fetched in list(self._fetched.values()):
            fetched.drop()
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            if self._own.has(path.name) and path.name != "lock":
                self._own.unlink(path.name)
        self._own.remove()

    def _place(self, offer: FileOffer) -> str:
        """Where the file can be read here; empty: nowhere."""
        if not FILE_NAME.fullmatch(offer.file):
            return ""
        own = self.folder / offer.file
        if offer.nbytes == 0 and offer.file == hashlib.sha256().hexdigest():
            with contextlib.suppress(OSError):  # then it is missing
                own.touch(0o600)  # no part of it ever comes
        for path in (str(own), offer.path):
            if path and self._holds(path, offer):
                return path
        return ""

    def _holds(self, path: str, offer: FileOffer) -> bool:
        try:
            descriptor = os.open(path, _READ)
        except (OSError, ValueError):
            return False
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != offer.nbytes:
                return False
            key = (path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if key not in self._known:
                self._known[key] = digest_of(descriptor)[0]
            self._known.move_to_end(key)
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            return self._known[key] == offer.file
        except OSError:
            return False
        finally:
            os.close(descriptor)


def offers_of(run: RunJob) -> Iterator[FileOffer]:
    """All files that a job needs, in the order that all ranks go through them; some may come twice."""
    for name in sorted(run.media):
        yield from run.media[name]
    if run.checkpoint is not None:
        yield run.checkpoint


def cannot_keep(error: Exception) -> Failure:
    """What is said of a file that can't be kept here."""
    if isinstance(error, OSError):
        return Failure("overload", f"a file can't be kept at the worker: {error.strerror or error}")
    return Failure("stage", f"a file didn't arrive as it was offered: {error}")


def _check_name(file: str) -> None:
    if not FILE_NAME.fullmatch(file):
        raise ValueError(f"{file[:80]!r} is no name of a file; accepted: a SHA-256 in hexadecimal")


class _Fetched:
    """A file that is on its way here."""

    def __init__(self, path: Path, offer: FileOffer) -> None:
        self.path = path
        self.parts = 0
        self._offer = offer
        self._digest = hashlib.sha256()
        self._file: BinaryIO = path.open("wb", buffering=0)

    def add(self, part: FilePart) -> bool:
        """Write a part; whether that was the last, and the file is right."""
        if part.index < self.parts:
            return False
        if part.index > self.parts:
            raise ValueError(f"part {part.index} came in place of part {self.parts}")
        data = memoryview(inline_buffer(part.data))
        expected = min(FILE_PART_BYTES, self._offer.nbytes - part.index * FILE_PART_BYTES)
        if data.nbytes != expected:
            raise ValueError(f"part {part.index} has {data.nbytes} bytes in place of {expected}")
        write_whole(self._file.fileno(), data)
        self._digest.update(data)
        self.parts += 1
        if self.parts < self._offer.parts:
            return False
        self._file.close()
        if self._digest.hexdigest() != self._offer.file:
            raise ValueError("its SHA-256 is another one")
        return True

    def drop(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)
