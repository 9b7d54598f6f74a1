"""What the broker knows of its store of files: who needs which, how many bytes they take, and what was asked of the store.

A file stays as long as somebody holds it: the record of a job, a request that is checked, or an upload of a client. When
nobody does it is removed, with one exception. A file that is copied into the store, or comes in parts, may turn out to be
the very one that nobody held any more; the store, which does one thing after the other, would then have kept the old one,
and removed it a moment later. So nothing is removed while something is imported, nor what is coming.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .actions import DropFile, FileAction, RemoveFile
from .desk import Desk
from .events import FileDone, PartRead, PartStored

FileEvent = FileDone | PartStored | PartRead
Holder = Literal["job", "upload"]


@dataclass(slots=True)
class IndexedFile:
    """A file of the store: its size, and how often it is held, by jobs and by uploads that are part of none yet."""

    nbytes: int
    jobs: int = 0
    uploads: int = 0


class StoreIndex:
    """All files of the store, and what is on its way into it.

    Args:
        desk: where actions go.

    Attributes:
        nbytes: of all files that are held, and of those that are coming.
    """

    def __init__(self, desk: Desk) -> None:
        """Start empty."""
        self._desk = desk
        self._files: dict[str, IndexedFile] = {}
        self._unheld: dict[str, None] = {}
        self._coming: Counter[str] = Counter()
        self._coming_bytes = 0
        self._held_bytes = 0
        self._imports = 0
        self._asked: dict[int, Callable[[FileEvent], None]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are held, and of those that are coming."""
        return self._held_bytes + self._coming_bytes

    def find(self, file: str) -> IndexedFile | None:
        """A file that is there and held."""
        return self._files.get(file)

    def hold(self, file: str, nbytes: int, by: Holder = "job") -> None:
        """Keep a file that is in the store."""
        indexed = self._files.get(file)
        if indexed is None:
            indexed = self._files[file] = IndexedFile(nbytes)
            self._held_bytes += nbytes
            self._unheld.pop(file, None)
        if by == "job":
            indexed.jobs += 1
        else:
            indexed.uploads += 1

    def release(self, file: str, by: Holder = "job") -> None:
        """Somebody needs a file no more; it goes when nobody does."""
        indexed = self._files[file]
        if by == "job":
            assert indexed.jobs > 0, f"{file} is held by no job"
            indexed.jobs -= 1
        else:
            assert indexed.uploads > 0, f"{file} is held by no upload"
            indexed.uploads -= 1
        if not indexed.jobs and not indexed.uploads:
            del self._files[file]
            self._held_bytes -= indexed.nbytes
            self._unheld[file] = None
            self._tidy()

    def expect(self, file: str, nbytes: int) -> None:
        """A file comes in parts: its room is taken."""
        self._coming[file] += 1
        self._coming_bytes += nbytes

    def came(self, file: str, nbytes: int) -> None:
        """A file that was expected has come and is held, or doesn't come."""
        self._coming[file] -= 1
        if not self._coming[file]:
            del self._coming[file]
        self._coming_bytes -= nbytes
        self._tidy()

    def begin_import(self) -> None:
        """Some file is copied into the store."""
        self._imports += 1

    def end_import(self) -> None:
        """It was, and is held, or it wasn't."""
        self._imports -= 1
        self._tidy()

    # --- what the store is asked ---------------------------------------------------------------------------------------

    def ask(self, make: Callable[[int], FileAction], then: Callable[[FileEvent], None]) -> int:
        """Have something done; whatever comes of it is handed to `then`.

        Args:
            make: the action for a ticket.
            then: takes each event with that ticket.

        Returns:
            The ticket.
        """
        self._tickets += 1
        self._asked[self._tickets] = then
        self._desk.act(make(self._tickets))
        return self._tickets

    def drop(self, ticket: int) -> None:
        """Give up a file that comes in parts."""
        if self._asked.pop(ticket, None) is not None:
            self._desk.act(DropFile(ticket))

    def answered(self, event: FileEvent) -> None:
        """Hand on what the store says, unless nobody waits for it any more."""
        then = self._asked.get(event.ticket)
        if then is None:
            if isinstance(event, FileDone) and event.sha256 and event.sha256 not in self._files:
                self._unheld[event.sha256] = None  # it was given up when it was complete already
                self._tidy()
            return
        if not isinstance(event, PartStored):
            del self._asked[event.ticket]
        then(event)

    def check(self, jobs: Counter[str], uploads: Counter[str], coming: Counter[str]) -> None:
        """Assert that files are held exactly as often as these say, and that their bytes add up."""
        held = {file: (indexed.jobs, indexed.uploads) for file, indexed in self._files.items()}
        wanted = {file: (jobs[file], uploads[file]) for file in {*jobs, *uploads}}
        assert held == wanted, "files are held more often than they are needed, or less"
        assert self._held_bytes == sum(indexed.nbytes for indexed in self._files.values()), "bytes don't add up"
        assert self._coming == coming, "other files are expected than come"
        assert not self._unheld or self._imports or set(self._unheld) <= set(coming), "a file is left that nobody needs"
        assert not set(self._unheld) & set(self._files), "a file that is needed would be removed"

    def _tidy(self) -> None:
        if self._unheld and not self._imports:
            for file in [file for file in self._unheld if file not in self._coming]:
                del self._unheld[file]
                self._desk.act(RemoveFile(file))
