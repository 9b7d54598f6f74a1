"""Latents that were made before, in memory: the least recently used ones leave when a limit of bytes is reached.

What a key stands for is `latent_key`'s business. Nothing is locked: a cache belongs to one stage actor, which does one
thing at a time, and it is shared by the sessions that live there, one after the other or side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ENTRY_BYTES = 1024
"""What an entry takes beside the values of its latent: key, objects, the allocator's rounding."""


class LatentStore(Protocol):
    """Where latents are kept. Whatever it raises, a stage makes the chunk all the same."""

    def get(self, key: bytes) -> Tensor | None:
        """The latent of a key, on the CPU, for the caller to keep; None if it isn't here."""
        ...

    def put(self, key: bytes, latent: Tensor) -> None:
        """Keep a copy of a latent, or don't."""
        ...

    def clear(self) -> None:
        """Give everything back."""
        ...


@dataclass(slots=True)
class CacheStats:
    """What a cache did since it was made.

    Attributes:
        hits: latents that were found.
        misses: latents that weren't.
        evictions: latents that had to leave.
        entries: latents that are here.
        nbytes: memory that they take, in bytes.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    nbytes: int = 0


class LatentCache:
    """A `LatentStore` in memory.

    Args:
        nbytes_max: most memory that it takes, in bytes.

    Attributes:
        stats: what it did, and holds.
    """

    def __init__(self, nbytes_max: int) -> None:
        """Start empty."""
        self.stats = CacheStats()
        self._most = nbytes_max
        self._latents: dict[bytes, Tensor] = {}

    def get(self, key: bytes) -> Tensor | None:
        """A copy of a latent, so that nobody can change the one that is kept; it counts as used."""
        latent = self._latents.pop(key, None)
        if latent is None:
            self.stats.misses += 1
            return None
        self._latents[key] = latent
        self.stats.hits += 1
        return latent.clone()

    def put(self, key: bytes, latent: Tensor) -> None:
        """Keep a copy of a latent and let old ones leave for it; one that is too large for all of it isn't kept."""
        needed = latent.nbytes + ENTRY_BYTES
        if key in self._latents or needed > self._most:
            return
        while self.stats.nbytes + needed > self._most:
            self._forget(next(iter(self._latents)))
            self.stats.evictions += 1
        self._latents[key] = latent.cpu().clone()
        self.stats.nbytes += needed
        self.stats.entries += 1

    def clear(self) -> None:
        """Forget all latents."""
        self._latents.clear()
        self.stats.nbytes = self.stats.entries = 0

    def _forget(self, key: bytes) -> None:
        self.stats.nbytes -= self._latents.pop(key).nbytes + ENTRY_BYTES
        self.stats.entries -= 1
