"""Latents in memory: the limit, what leaves first, and that nobody can change what is kept."""

from __future__ import annotations

import pytest
import torch

from reelwire.pipeline.world.latent_cache import ENTRY_BYTES, CacheStats, LatentCache

LATENT = torch.arange(64, dtype=torch.float32).reshape(1, 4, 1, 4, 4)
ENTRY = LATENT.nbytes + ENTRY_BYTES


def test_streaming_28_what_was_kept_is_found() -> None:
    """Bit for bit; what wasn't kept is a miss; both are counted, and so is the memory."""
    cache = LatentCache(10 * ENTRY)
    assert cache.get(b"a") is None
    cache.put(b"a", LATENT)
    found = cache.get(b"a")
    assert found is not None
    assert torch.equal(found, LATENT)
    assert cache.stats == CacheStats(hits=1, misses=1, evictions=0, entries=1, nbytes=ENTRY)
    cache.clear()
    assert cache.get(b"a") is None
    assert (cache.stats.entries, cache.stats.nbytes) == (0, 0)


def test_streaming_28_nothing_that_is_kept_can_be_written_to() -> None:
    """Neither through the tensor that was put in nor through one that was handed out."""
    cache = LatentCache(10 * ENTRY)
    given = LATENT.clone()
    cache.put(b"a", given)
    given.zero_()
    first = cache.get(b"a")
    assert first is not None
    first.zero_()
    again = cache.get(b"a")
    assert again is not None
    assert torch.equal(again, LATENT)


def test_streaming_28_the_least_recently_used_latents_leave() -> None:
    """The limit holds after every call; what was asked for last stays."""
    cache = LatentCache(3 * ENTRY)
    for key in (b"a", b"b", b"c"):
        cache.put(key, LATENT)
    assert cache.get(b"a") is not None
    cache.put(b"d", LATENT)
    assert cache.stats.nbytes <= 3 * ENTRY
    assert cache.stats.evictions == 1
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    cache.put(b"large", torch.zeros(1, 4, 2, 4, 16))
    assert cache.stats.nbytes <= 3 * ENTRY
    assert cache.stats.evictions == 4
    assert cache.get(b"large") is not None


def test_streaming_28_a_latent_that_is_there_is_not_counted_twice() -> None:
    """Putting it again changes nothing."""
    cache = LatentCache(3 * ENTRY)
    for _ in range(5):
        cache.put(b"a", LATENT)
    assert (cache.stats.entries, cache.stats.nbytes) == (1, ENTRY)


@pytest.mark.parametrize("limit", [0, 1, ENTRY - 1])
def test_streaming_28_a_latent_that_does_not_fit_is_not_kept(limit: int) -> None:
    """And drives nothing else out."""
    cache = LatentCache(limit)
    cache.put(b"a", LATENT)
    assert cache.get(b"a") is None
    assert cache.stats.evictions == cache.stats.nbytes == 0
