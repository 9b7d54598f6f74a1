"""What outlives a broker: its journal and its files, behind threads of their own, so that no stream ever waits for a disk.

The journal's thread takes all that waits into one transaction, and says of it what is durable. If the disk is full, or the
journal locked, it says `StoreStalled` and tries the same again until it can. After any other failure it says `StoreFailed`
and no more, as nobody can tell then what the disk holds: also if somebody has removed the folders of files, or the journal,
which goes on to take all that is written. What isn't known to be durable is never acknowledged. Files have a thread, too; long copies make way for what
is short. A third one waits for the process that looks into files.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from .actions import FileAction, InspectFile, Persist
from .config import BrokerConfig
from .events import Event, Stored, StoreFailed, StoreStalled
from .files import Files
from .job_record import JobRecord, Saved, StoredFile
from .journal import Journal, JournalGone, NotNow
from .media_roots import MediaRoots
from .prober import Prober
from .state_folder import StateFolder, claim

BATCH_MAX = 1000
"""Most records of one transaction."""
RETRY_S = 1.0
"""How long the journal waits before it tries again to write to a disk that was full."""
HURRY_S = 1.0
"""How long a thread has, when the time to close is over, for what it is amidst of."""


class Store:
    """An open store, which belongs to this broker until `close`.

    Args:
        folder: the state folder, taken.
        journal: the journal in it.
        config: settings of the broker.
        post: takes events, on the store's threads.

    Attributes:
        saved: what the brokers before have left; a file that a record refers to may be gone, if somebody has removed it.
    """

    def __init__(
        self, folder: StateFolder, journal: Journal, config: BrokerConfig, post: Callable[[Event], None]
    ) -> None:
        """Read and clean what is there, and start the threads."""
        self._folder = folder
        self._journal = journal
        self._post = post
        self.saved = Saved(journal.begin(), journal.load(), str(folder.files))
        folder.clean({each.file for each in _referred(self.saved.records)})
        self._prober = Prober()
        self._files = Files(
            folder.files,
            folder.incoming,
            MediaRoots(config.media_roots, folder.path),
            self._prober.look,
            post,
            time.monotonic,
            config.retry_after_s,
        )
        self._is_hurried = threading.Event()
        self._persisting: queue.SimpleQueue[Persist | None] = queue.SimpleQueue()
        self._filing: queue.SimpleQueue[FileAction | None] = queue.SimpleQueue()
        self._looking: queue.SimpleQueue[InspectFile | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"reelwire-{name}", daemon=True)
            for name, run in (("journal", self._persist), ("files", self._file), ("probe", self._look))
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def open(cls, config: BrokerConfig, endpoint: str, post: Callable[[Event], None]) -> Self:
        """Take the state folder, count this broker, read the journal, and remove what nobody refers to.

        Args:
            config: settings of the broker.
            endpoint: where it will listen, as it was told; the folder's name follows from it if none is set.
            post: takes events, on the store's threads; must not block.

        Raises:
            ConfigError: of the field ``state_dir``: another broker has the folder, it can't be used, or what is in it can't
                be read.
        """
        with contextlib.ExitStack() as stack:
            folder = claim(config, endpoint)
            stack.callback(folder.close)
            journal = Journal(folder.journal, (folder.files, folder.incoming))
            stack.callback(journal.close)
            store = cls(folder, journal, config, post)
            stack.pop_all()
        return store

    def perform(self, action: Persist | FileAction) -> None:
        """Hand an action to the thread that does it; what comes of it is posted."""
        if isinstance(action, Persist):
            self._persisting.put(action)
        elif isinstance(action, InspectFile):
            self._looking.put(action)
        else:
            self._filing.put(action)

    def close(self, limit_s: float) -> None:
        """Do what was handed in, and give the folder back; files that aren't looked into yet are refused.

        What isn't done in time is left undone: nobody was told that it is durable. Closing again does nothing.

        Args:
            limit_s: how long that may take, in seconds.
        """
        threads, self._threads = self._threads, []
        if not threads:
            return
        until = time.monotonic() + limit_s
        for waiting in (self._persisting, self._filing, self._looking):
            waiting.put(None)
        self._prober.close()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._is_hurried.set()
        until = time.monotonic() + HURRY_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):  # else the lock goes with the process, not before
            self._journal.close()
            self._folder.close()

    # --- threads ---------------------------------------------------------------------------------------------------------

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except JournalGone as error:
            self._post(StoreFailed(time.monotonic(), str(error)))
        except Exception as error:  # noqa: BLE001  whatever it is, the broker must not go on without this thread
            self._post(StoreFailed(time.monotonic(), f"{type(error).__name__}: {error}"))

    def _persist(self) -> None:
        while True:
            taken = _taken(self._persisting, BATCH_MAX)
            batch = [action for action in taken if action is not None]
            if batch and self._write(batch):
                self._post(Stored(time.monotonic(), batch[-1].ticket))
            if len(batch) < len(taken):
                return

    def _write(self, batch: list[Persist]) -> bool:
        """Make a batch durable, as soon as that can be done; False: there is no time left."""
        is_stalled = False
        while not self._is_hurried.is_set():
            try:
                self._journal.write(batch)
            except NotNow as error:
                if not is_stalled:
                    is_stalled = True
                    self._post(StoreStalled(time.monotonic(), str(error)))
                self._is_hurried.wait(RETRY_S)
                continue
            if is_stalled:
                self._post(StoreStalled(time.monotonic(), ""))
            return True
        return False

    def _file(self) -> None:
        is_more = is_last = False
        while not self._is_hurried.is_set():
            if not is_last:
                with contextlib.suppress(queue.Empty):
                    action = self._filing.get(block=not is_more)
                    if action is None:
                        is_last = True
                    else:
                        self._files.perform(action)
            # One piece beside each action: neither waits for all of the other.
            is_more = self._files.work()
            if is_last and not is_more:
                return

    def _look(self) -> None:
        for action in iter(self._looking.get, None):
            self._files.inspect(action)


def _taken(waiting: queue.SimpleQueue[Persist | None], most: int) -> list[Persist | None]:
    """What waits, up to a bound; at least one."""
    taken = [waiting.get()]
    with contextlib.suppress(queue.Empty):
        while len(taken) < most:
            taken.append(waiting.get_nowait())
    return taken


def _referred(records: Iterable[JobRecord]) -> Iterator[StoredFile]:
    """All files that jobs need or have."""
    for record in records:
        for files in record.media.values():
            yield from files
        yield from (file for file in (record.checkpoint, record.result) if file is not None)
