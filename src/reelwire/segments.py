"""Shared memory: tensors that their producer writes once and that readers on the same machine map.

Plain files in a folder per producer, `<base>/reelwire-<uid>/<owner>/`, all of it open to its user alone::

    lock     held with flock for as long as the producer lives; whoever gets it may remove the folder
    probe    random bytes: a peer that can tell them could open the rest as well
    s1 ...   segments: made, written and unlinked by the producer, mapped read-only by everybody else

A segment is reserved on the disk when it is made, so that a full disk is an error there and never a SIGBUS. It carries no
flags: that its bytes are complete, and that they may be overwritten, is said by messages. It goes from hand to hand and
is used again, because the first touch of a page costs more than the copy of its bytes; each use has a generation.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .parts import SegmentUse
from .segment_files import PROBE, OwnFolder, exists, folder_of_user, mapping, opened, opened_file
from .segment_files import reap as reap
from .tensors import MEMORY_NAME, PROBE_BYTES, Shared

SEGMENT_BYTES_MIN = 64 << 10
SEGMENTS_MAX = 256
"""Segments of one pool, and mappings of one reader: each may cost a file descriptor."""
READER_BYTES_MAX = 2 << 30
IDLE_TAKES_MAX = 512
"""A segment that isn't needed for more takes than this is unlinked."""


class MemoryUnavailableError(OSError):
    """This process can't write shared memory; what would go there travels inside of messages."""


class MemoryLostError(OSError):
    """A segment can't be read: its producer is gone, or it isn't what a producer of ours makes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Room for one tensor.

    Attributes:
        place: where it is, for its readers.
        view: writable, of exactly the bytes that were asked for; not to be touched once the reference was sent.
    """

    place: Shared
    view: memoryview

    @property
    def use(self) -> SegmentUse:
        """What gives it back, for a piece that is never sent."""
        return SegmentUse(self.place.segment, self.place.generation)


@dataclass(slots=True)
class _Segment:
    name: str
    size: int
    memory: mmap.mmap
    generation: int = 0
    is_out: bool = False
    idle_since: int = 0


class Pool:
    """A producer's segments. Threads may take while others give back.

    It keeps what comes back for the next piece of that size, so `nbytes` is what it holds and not what is in use. A
    forked child has no share in it: there it is closed, and the parent's files stay.

    Args:
        nbytes_max: most bytes of all segments together, in use or not.
        base: folder to use in place of `/dev/shm`.

    Attributes:
        owner: name of its folder.
        probe: the bytes that stand in its probe.

    Raises:
        MemoryUnavailableError: there is no such memory on this machine, or the user's folder isn't his alone.
    """

    def __init__(self, nbytes_max: int, base: Path | None = None) -> None:
        """Make the folder, lock it, and leave the probe."""
        self.probe = secrets.token_bytes(PROBE_BYTES)
        self._nbytes_max = nbytes_max
        self._mutex = threading.Lock()
        self._segments: dict[str, _Segment] = {}
        self._idle: OrderedDict[str, _Segment] = OrderedDict()  # the longest idle first
        self._nbytes = 0
        self._making = 0
        self._takes = 0
        self._numbers = itertools.count(1)
        self._closed = False
        if not hasattr(os, "posix_fallocate"):
            raise MemoryUnavailableError("this system can't reserve room for shared memory")
        root = folder_of_user(base)
        try:
            self._folder = OwnFolder(root)
        except OSError as error:
            raise _unavailable(root, error) from error
        try:
            self._folder.write(PROBE, self.probe)
        except OSError as error:
            self._folder.remove()
            raise _unavailable(root, error) from error
        self.owner = self._folder.owner
        _pools.add(self)

    @property
    def outstanding(self) -> int:
        """How many pieces are out."""
        with self._mutex:
            return len(self._segments) - len(self._idle)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        with self._mutex:
            return self._nbytes

    def take(self, nbytes: int) -> Piece | None:
        """Room for `nbytes` bytes, whatever stands in it; None when there is no more, here or on the machine."""
        size = _rounded(nbytes)
        with self._mutex:
            self._takes += 1
            segment = self._reuse(size)
            if segment is None and not self._reserve(size):
                return None
        if segment is None:
            segment = self._made(size)  # takes milliseconds, in which others may give back
        if segment is None and self._make_way(size):
            segment = self._made(size)
        if segment is None:
            return None
        place = Shared(self.owner, segment.name, segment.generation)
        return Piece(place, memoryview(segment.memory)[:nbytes])

    def give_back(self, use: SegmentUse) -> None:
        """A piece came back. One that isn't out, or not in that generation, is ignored."""
        with self._mutex:
            segment = self._segments.get(use.segment)
            if segment is None or not segment.is_out or segment.generation != use.generation:
                return
            if use.broken:
                self._drop(segment)
                return
            segment.is_out, segment.idle_since = False, self._takes
            self._idle[segment.name] = segment
            self._trim()

    def abandon(self) -> None:
        """Nobody will say when the pieces that are out have been read: unlink them, and never write them again."""
        with self._mutex:
            for segment in [each for each in self._segments.values() if each.is_out]:
                self._drop(segment)

    def close(self) -> None:
        """Unlink everything. Views that are still held stay readable and writable; nobody else finds them any more."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            for segment in list(self._segments.values()):
                self._drop(segment)
            if not self._making:
                self._folder.remove()

    # --- under the mutex ---------------------------------------------------------------------------------------------

    def _reuse(self, size: int) -> _Segment | None:
        """The segment of this size that came back last: its bytes may still be in the processor's caches."""
        for segment in [each for each in reversed(self._idle.values()) if each.size == size]:
            if not self._folder.has(segment.name):  # somebody removed it: systemd does that at a user's last logout
                self._drop(segment)
                continue
            del self._idle[segment.name]
            segment.generation += 1
            segment.is_out = True
            return segment
        return None

    def _reserve(self, size: int) -> bool:
        """Keep room for a new segment, at the cost of idle ones; whether there is any."""
        out = len(self._segments) - len(self._idle) + self._making
        in_use = self._nbytes - sum(each.size for each in self._idle.values())
        if self._closed or out >= SEGMENTS_MAX or in_use + size > self._nbytes_max:
            return False
        while self._nbytes + size > self._nbytes_max or len(self._segments) + self._making >= SEGMENTS_MAX:
            self._drop(next(iter(self._idle.values())))
        self._nbytes += size
        self._making += 1
        return True

    def _trim(self) -> None:
        """Unlink what has been idle longest, beyond half of all bytes or out of use; never what came back last."""
        idle = sum(each.size for each in self._idle.values())
        for segment in list(self._idle.values())[:-1]:
            if idle <= self._nbytes_max // 2 and self._takes - segment.idle_since <= IDLE_TAKES_MAX:
                return
            idle -= segment.size
            self._drop(segment)

    def _drop(self, segment: _Segment) -> None:
        self._folder.unlink(segment.name)
        del self._segments[segment.name]
        self._idle.pop(segment.name, None)
        self._nbytes -= segment.size

    # -----------------------------------------------------------------------------------------------------------------

    def _made(self, size: int) -> _Segment | None:
        """A new segment for the room that was reserved; None when the machine has none."""
        name = f"s{next(self._numbers)}"
        memory = self._folder.reserve(name, size)
        with self._mutex:
            self._making -= 1
            if memory is None or self._closed:
                self._nbytes -= size
                self._folder.unlink(name)
                if self._closed and not self._making:
                    self._folder.remove()
                return None
            segment = self._segments[name] = _Segment(name, size, memory, generation=1, is_out=True)
            return segment

    def _make_way(self, size: int) -> bool:
        """The machine is full: unlink what has been idle longest, for so many bytes; whether another try is worth it."""
        with self._mutex:
            freed = 0
            while self._idle and freed < size:
                segment = next(iter(self._idle.values()))
                freed += segment.size
                self._drop(segment)
            return bool(freed) and self._reserve(size)

    def _disown(self) -> None:
        """In a forked child: leave everything to the parent, also the lock, which ends with its last descriptor."""
        self._mutex = threading.Lock()  # a thread that isn't here may have held it
        if not self._closed:
            self._closed = True
            self._segments.clear()
            self._idle.clear()
            self._nbytes = 0
            self._folder.leave()


class Reader:
    """Maps what others wrote, read-only, and keeps the mappings for their segments' next use. Threads may share it.

    A view stays good for as long as it is held, whatever happens to the mapping's place here or to the producer; what
    stands in it stays the same until the broker was told that its reader is done.

    Args:
        base: folder to use in place of `/dev/shm`.
        nbytes_max: most bytes of mappings that are kept; the last one is kept however big it is.
        mappings_max: most mappings that are kept.
    """

    def __init__(
        self, base: Path | None = None, nbytes_max: int = READER_BYTES_MAX, mappings_max: int = SEGMENTS_MAX
    ) -> None:
        """Nothing is mapped yet."""
        self._root = folder_of_user(base)
        self._nbytes_max = nbytes_max
        self._mappings_max = mappings_max
        self._mutex = threading.Lock()
        self._mapped: OrderedDict[tuple[str, str], memoryview] = OrderedDict()  # the longest unused first
        self._nbytes = 0

    def probe(self, owner: str) -> bytes:
        """What stands in a producer's probe; empty when it can't be read here. Lets go of what `sweep` does, too."""
        self.sweep()  # a newcomer needs the room that the one before it had
        try:
            with self._opened(owner) as (_, folder), opened_file(PROBE, folder) as (descriptor, _):
                return os.read(descriptor, PROBE_BYTES)
        except OSError:
            return b""

    def view(self, place: Shared, nbytes: int) -> memoryview:
        """The bytes of a tensor, read-only.

        Raises:
            MemoryLostError: they aren't there, or aren't this user's, or are fewer.
        """
        end = place.offset + nbytes
        with self._mutex:
            key = (place.owner, place.segment)
            view = self._mapped.get(key)
            if view is None:
                view = self._map(key)
            self._mapped.move_to_end(key)
            self._trim()
        if not 0 <= place.offset <= end <= view.nbytes:
            sentence = f"shared memory {place.segment!r} of {place.owner!r} has {view.nbytes} bytes; needed: {end}"
            raise MemoryLostError(errno.EINVAL, sentence)
        return view[place.offset : end]

    def sweep(self) -> None:
        """Keep no mapping of a segment that has no name any more: it would keep the memory of a producer that is gone.

        To be called now and then: a producer that finds the machine full hands nothing over that would be mapped.
        """
        with self._mutex:
            if not self._mapped:
                return
            try:
                with opened(self._root) as root:
                    self._drop_unlinked(root)
            except FileNotFoundError:  # the last producer took the folder with it
                self._drop_all()
            except OSError:  # no descriptor is left, say: what is mapped now can still be read
                return

    def close(self) -> None:
        """Keep no mapping at all."""
        with self._mutex:
            self._drop_all()

    @contextlib.contextmanager
    def _opened(self, owner: str) -> Iterator[tuple[int, int]]:
        """Descriptors of the user's folder and of a producer's in it."""
        if not MEMORY_NAME.fullmatch(owner):
            raise FileNotFoundError(errno.ENOENT, "no name of a producer", owner)
        with opened(self._root) as root, opened(owner, root) as folder:
            yield root, folder

    # --- under the mutex ---------------------------------------------------------------------------------------------

    def _map(self, key: tuple[str, str]) -> memoryview:
        owner, segment = key
        try:
            with self._opened(owner) as (root, folder):
                if not MEMORY_NAME.fullmatch(segment):
                    raise FileNotFoundError(errno.ENOENT, "no name of a segment", segment)
                with opened_file(segment, folder) as (descriptor, size):
                    view = memoryview(mapping(descriptor, size, mmap.PROT_READ))
                self._drop_unlinked(root)
        except (OSError, ValueError) as error:  # a ValueError: it has shrunk meanwhile
            reason = error.strerror if isinstance(error, OSError) else str(error)
            sentence = f"shared memory {segment[:40]!r} of {owner[:40]!r} can't be read: {reason}"
            raise MemoryLostError(getattr(error, "errno", None) or errno.ENOENT, sentence) from error
        self._mapped[key] = view
        self._nbytes += view.nbytes
        return view

    def _drop_unlinked(self, root: int) -> None:
        """A mapping keeps the memory of a segment that has no name any more, and will never be asked for again."""
        for owner, segment in list(self._mapped):
            if not exists(f"{owner}/{segment}", root):
                self._drop((owner, segment))

    def _trim(self) -> None:
        while len(self._mapped) > 1 and (self._nbytes > self._nbytes_max or len(self._mapped) > self._mappings_max):
            self._drop(next(iter(self._mapped)))

    def _drop_all(self) -> None:
        self._mapped.clear()
        self._nbytes = 0

    def _drop(self, key: tuple[str, str]) -> None:
        # Not closed but let go: the mapping ends with the last view of it.
        self._nbytes -= self._mapped.pop(key).nbytes


def _unavailable(root: Path, error: OSError) -> MemoryUnavailableError:
    return MemoryUnavailableError(error.errno, f"there is no shared memory below {root}: {error.strerror}")


def _rounded(nbytes: int) -> int:
    """The size of a segment for so many bytes: four sizes between a power of two and the next, so that few differ."""
    assert nbytes >= 0
    if nbytes <= SEGMENT_BYTES_MIN:
        return SEGMENT_BYTES_MIN
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _in_forked_child() -> None:
    for pool in list(_pools):
        pool._disown()  # noqa: SLF001


os.register_at_fork(after_in_child=_in_forked_child)
