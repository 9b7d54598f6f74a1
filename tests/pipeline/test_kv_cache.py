"""The rolling cache against one that really shifts its tokens, as the published implementation does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from reelwire.pipeline.world.kv_cache import CacheLayout, CacheLimits, RollingCache, settle_limits
from reelwire.spec import RequestError

HEADS, HEAD_DIM, LAYERS = 2, 3, 2


class ShiftingRow:
    """One layer's row of values, written down as the facts describe it: tokens behind the sink move up to make room."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.row = torch.zeros(1, layout.capacity, HEADS, HEAD_DIM)
        self.global_end = 0
        self.local_end = 0

    def update(self, start: int, new: Tensor) -> Tensor:
        """Store new tokens and give the row that is attended to."""
        count, sink, end = new.shape[1], self.layout.sink, start + new.shape[1]
        local_end = self.local_end + end - self.global_end
        if self.layout.evicts and end > self.global_end and count + self.local_end > self.layout.capacity:
            evicted = count + self.local_end - self.layout.capacity
            kept = self.local_end - evicted - sink
            if kept > 0:
                self.row[:, sink : sink + kept] = self.row[:, sink + evicted : sink + evicted + kept].clone()
            local_end -= evicted
        self.row[:, local_end - count : local_end] = new
        self.global_end, self.local_end = end, local_end
        return self.row[:, max(0, local_end - self.layout.attention) : local_end]


def rolling(layout: CacheLayout) -> RollingCache:
    return RollingCache(
        layout, layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32, device=torch.device("cpu")
    )


def as_sets(tokens: Tensor) -> list[tuple[float, ...]]:
    return sorted(tuple(token.flatten().tolist()) for token in tokens[0])


def step(cache: RollingCache, naive: ShiftingRow, start: int, count: int, generator: torch.Generator) -> None:
    """Feed the same call to both and compare everything that can be seen."""
    fresh = torch.randn(LAYERS, 1, count, HEADS, HEAD_DIM, generator=generator)
    expected = naive.update(start, fresh[1])
    slots = cache.advance(start, count)
    cache.update(0, fresh[0], -fresh[0], slots)
    keys, values = cache.update(1, fresh[1], -fresh[1], slots)
    assert (cache.global_end, cache.local_end) == (naive.global_end, naive.local_end)
    assert as_sets(keys) == as_sets(expected)
    assert torch.equal(values, -keys)
    ordered_keys, ordered_values = cache.ordered(1)
    assert torch.equal(ordered_keys, naive.row)
    assert torch.equal(ordered_values, -naive.row)


@pytest.mark.seeds(60)
def test_ring_and_shift_can_not_be_told_apart(seed: int) -> None:
    """For random sizes, sinks, limits and calls the ring shows the same tokens, row and cursors as a real shift."""
    choice = random.Random(seed)
    frame, chunk = choice.randint(1, 3), choice.randint(1, 4)
    chunks = choice.randint(4, 12)
    window = choice.choice([-1, chunk, *range(chunk, 3 * chunk + 3)])
    limits = CacheLimits(window, choice.randint(0, 4), choice.choice([-1, *range(1, 4 * chunk)]))
    layout = limits.layout(frame, chunks * chunk)
    cache, naive = rolling(layout), ShiftingRow(layout)
    generator = torch.Generator().manual_seed(seed)
    for index in range(chunks):
        for _ in range(choice.randint(1, 5)):
            step(cache, naive, index * chunk * frame, chunk * frame, generator)


@pytest.mark.seeds(20)
def test_chunks_may_have_different_sizes(seed: int) -> None:
    """Calls of changing sizes, each following the one before, evict as a shift does."""
    choice = random.Random(seed)
    layout = CacheLayout(choice.randint(6, 14), choice.randint(0, 5), choice.randint(2, 20), evicts=True)
    cache, naive = rolling(layout), ShiftingRow(layout)
    generator = torch.Generator().manual_seed(seed)
    start = 0
    for _ in range(20):
        count = choice.randint(1, 6)
        for _ in range(choice.randint(1, 2)):
            step(cache, naive, start, count, generator)
        start += count


def test_a_gap_leaves_zeros_that_are_attended() -> None:
    """Tokens that were never written are zero, are attended to, and move the cursors, while nothing was evicted."""
    layout = CacheLimits(window=6).layout(1, 20)
    cache, naive = rolling(layout), ShiftingRow(layout)
    generator = torch.Generator().manual_seed(0)
    step(cache, naive, 0, 2, generator)
    step(cache, naive, 4, 2, generator)
    assert (cache.global_end, cache.local_end) == (6, 6)
    assert torch.equal(cache.ordered(0)[0][:, 2:4], torch.zeros(1, 2, HEADS, HEAD_DIM))


def test_a_gap_in_a_full_cache_is_an_error() -> None:
    """Once the window is full, or when the gap crosses its end, a gap can't be told from lost tokens."""
    cache = rolling(CacheLimits(window=4).layout(1, 20))
    for start in (0, 2, 4):
        cache.advance(start, 2)
    with pytest.raises(RuntimeError, match="don't fit"):
        cache.advance(8, 2)
    fresh = rolling(CacheLimits(window=4).layout(1, 20))
    fresh.advance(0, 1)
    with pytest.raises(RuntimeError, match="don't fit"):
        fresh.advance(4, 1)


def test_overruns_are_errors_and_change_nothing() -> None:
    """An empty cache, a chunk above the capacity, and a token past the end of an unlimited cache are refused."""
    with pytest.raises(RuntimeError, match="don't fit: the cache has 0 slots"):
        rolling(CacheLimits(window=0).layout(4, 20)).advance(0, 4)
    with pytest.raises(RuntimeError, match="has 8 slots"):
        rolling(CacheLimits(window=2).layout(4, 20)).advance(0, 12)
    unlimited = rolling(CacheLimits().layout(4, 3))
    unlimited.advance(0, 12)
    with pytest.raises(RuntimeError, match="evicts nothing"):
        unlimited.advance(12, 4)
    assert (unlimited.global_end, unlimited.local_end) == (12, 12)


def test_going_back_is_an_error() -> None:
    """A call that neither repeats the newest tokens nor follows them is refused."""
    cache = rolling(CacheLimits(window=6).layout(1, 20))
    cache.advance(0, 2)
    cache.advance(2, 2)
    with pytest.raises(RuntimeError, match="neither repeat nor follow"):
        cache.advance(0, 2)
    with pytest.raises(RuntimeError, match="neither repeat nor follow"):
        cache.advance(3, 2)


def test_a_full_ring_is_read_without_a_copy() -> None:
    """However often the ring has turned, all of it is handed out as one view of the cache's memory."""
    cache = rolling(CacheLimits(window=7, sink=1).layout(2, 60))
    fresh = torch.randn(1, 6, HEADS, HEAD_DIM)
    for index in range(9):
        slots = cache.advance(index * 6, 6)
        keys, _ = cache.update(0, fresh, fresh, slots)
        assert len(slots.read) == 1
        assert keys.untyped_storage().data_ptr() == cache._k.untyped_storage().data_ptr()


def test_the_sink_hides_behind_a_small_attention_limit() -> None:
    """With a limit below what is held, the newest tokens win and the sink is not seen."""
    cache = rolling(CacheLimits(window=5, sink=2, attention=3).layout(1, 20))
    seen: list[float] = []
    for index in range(6):
        fresh = torch.full((1, 1, HEADS, HEAD_DIM), float(index))
        keys, _ = cache.update(0, fresh, fresh, cache.advance(index, 1))
        seen = sorted(keys[0, :, 0, 0].tolist())
    assert seen == [3.0, 4.0, 5.0]
    assert cache.ordered(0)[0][0, :, 0, 0].tolist() == [0.0, 1.0, 3.0, 4.0, 5.0]


def test_bytes_are_those_of_keys_and_values() -> None:
    """The reported size is two tensors of layers x capacity x heads x head_dim."""
    assert rolling(CacheLayout(10, 0, 10, evicts=True)).cache_bytes == 2 * LAYERS * 10 * HEADS * HEAD_DIM * 4


@pytest.mark.parametrize(
    ("limits", "chunks", "field"),
    [
        (CacheLimits(window=4, sink=2), 6, "window"),
        (CacheLimits(window=0), 6, "window"),
        (CacheLimits(window=-2), 6, "window"),
        (CacheLimits(window=2), 6, "window"),
        (CacheLimits(window=9, sink=-1), 6, "sink"),
        (CacheLimits(window=9, sink=2, attention=8), 6, "attention"),
        (CacheLimits(sink=2, attention=8), 6, "attention"),
        (CacheLimits(attention=2), 6, "attention"),
        (CacheLimits(attention=0), 6, "attention"),
        (CacheLimits(), 342, "chunks"),
        (CacheLimits(), 0, "chunks"),
    ],
)
def test_impossible_limits_are_refused_by_field(limits: CacheLimits, chunks: int, field: str) -> None:
    """A session that can't keep what it asks for is refused before it starts, with the field's name."""
    with pytest.raises(RequestError, match="accepted") as refused:
        settle_limits(limits, chunk_frames=3, chunks=chunks)
    assert refused.value.field == field


def test_possible_limits_are_kept() -> None:
    """Limits at the very edge are accepted; a window that is never filled becomes the whole session."""
    edge = CacheLimits(window=5, sink=2, attention=5)
    assert settle_limits(edge, chunk_frames=3, chunks=341) == edge
    assert settle_limits(CacheLimits(window=99, sink=2), chunk_frames=3, chunks=4) == CacheLimits(-1, 2, -1)
    assert settle_limits(CacheLimits(9, 0, 3), chunk_frames=3, chunks=9) == CacheLimits(9, 0, 3)
