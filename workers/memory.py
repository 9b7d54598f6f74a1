"""The shared memory of one worker process: what it writes for its readers, and what it reads of others.

Without it (switched off, or not to be had on this machine) everything travels inside of messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from reelwire.messages import MemoryOffer, SegmentUse
from reelwire.segments import MemoryLostError, MemoryUnavailableError, Piece, Pool, Reader, reap
from reelwire.tensors import Shared


class SharedMemory:
    """A pool and a reader, or nothing; the threads of all stages use it at once.

    Args:
        nbytes_max: most bytes to write at once; 0: neither write nor read any.

    Attributes:
        offer: what the broker is told; None when nothing is written here.
        problem: why there is none although it was asked for; empty when there is.
        reaped: producers that had died without removing theirs, which was done here.
    """

    def __init__(self, nbytes_max: int) -> None:
        """Remove what the dead left behind, and make a pool."""
        self._pool: Pool | None = None
        self._reader = Reader() if nbytes_max else None
        self.offer: MemoryOffer | None = None
        self.problem = ""
        self.reaped = reap() if nbytes_max else []
        if not nbytes_max:
            return
        try:
            self._pool = Pool(nbytes_max)
        except MemoryUnavailableError as error:
            self.problem = str(error.strerror or error)
        else:
            self.offer = MemoryOffer(self._pool.owner, self._pool.probe)

    def take(self, nbytes: int) -> Piece | None:
        """Room for `nbytes` bytes; None when there is none."""
        return None if self._pool is None else self._pool.take(nbytes)

    def take_back(self, uses: Iterable[SegmentUse]) -> None:
        """Nobody reads these pieces any more."""
        if self._pool is not None:
            for use in uses:
                self._pool.give_back(use)

    def abandon(self) -> None:
        """Nobody will say when the pieces that are out have been read, and what was read here is over."""
        if self._pool is not None:
            self._pool.abandon()
        if self._reader is not None:
            self._reader.close()

    def probe(self, owner: str) -> bytes:
        """What stands in a producer's probe; empty when it can't be read here."""
        return b"" if self._reader is None else self._reader.probe(owner)

    def sweep(self) -> None:
        """Let go of what its producers have given up; to be called now and then."""
        if self._reader is not None:
            self._reader.sweep()

    def view(self, place: Shared, nbytes: int) -> memoryview:
        """The bytes of a tensor, read-only.

        Raises:
            MemoryLostError: they aren't there, or no shared memory is read here.
        """
        if self._reader is None:
            raise MemoryLostError(None, "this worker was told to read no shared memory")
        return self._reader.view(place, nbytes)

    def close(self) -> None:
        """Remove everything that was written here."""
        if self._pool is not None:
            self._pool.close()
        if self._reader is not None:
            self._reader.close()
