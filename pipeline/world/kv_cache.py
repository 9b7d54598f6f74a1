"""The rolling key/value cache of a session: a sink that stays, and a ring of the newest tokens behind it.

Seen from outside, the cache is a row of `capacity` tokens: `sink` tokens that are never evicted, then the rest in order
of time. When new tokens don't fit, the oldest behind the sink leave and everything after them moves up. Nothing moves
here: the part behind the sink is a ring, and eviction turns it::

    row      | sink | a b c d e f |       evict a b, append g h        | sink | c d e f g h |
    memory   | sink | a b c d e f |                                    | sink | g h c d e f |   offset 2

Attention doesn't depend on the order of its keys, and each key was rotated by its absolute position before it was
stored, so the ring is handed out as it lies, without a copy, whenever all of it is seen.

Two cursors, in tokens: `global_end` counts every token of the session up to the newest, `local_end` those in the row.
They are the same for all layers, so they move once per forward (`advance`), which also says where every layer writes
and reads (`Slots`). A repeated call for the same tokens overwrites the same slots and moves nothing: the denoising steps
of a chunk and its clean pass share their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reelwire.spec import RequestError

from ..wan.blocks import ROTARY_POSITIONS_MAX

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What a session remembers, in latent frames.

    Attributes:
        window: capacity; negative: the whole session.
        sink: how many of the first frames are never evicted.
        attention: how many of the newest frames are attended to; negative: all that the cache holds.
    """

    window: int = -1
    sink: int = 0
    attention: int = -1

    def layout(self, frame_tokens: int, frames: int) -> CacheLayout:
        """The same in tokens, for a session of `frames` latent frames of `frame_tokens` tokens each."""
        capacity = frame_tokens * (frames if self.window < 0 else self.window)
        attention = capacity if self.attention < 0 else frame_tokens * self.attention
        return CacheLayout(capacity, frame_tokens * self.sink, attention, evicts=self.window >= 0)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a rolling cache holds, in tokens.

    Attributes:
        capacity: slots per layer.
        sink: slots at the front that are not evicted.
        attention: how many of the newest tokens are attended to, the sink counted only when it is among them.
        evicts: whether old tokens make room; otherwise a token too many is an error.
    """

    capacity: int
    sink: int
    attention: int
    evicts: bool


def settle_limits(limits: CacheLimits, *, chunk_frames: int, chunks: int) -> CacheLimits:
    """Check what a session asks for and leave out what its length makes needless.

    Args:
        limits: as asked for.
        chunk_frames: latent frames of a chunk.
        chunks: chunks of the session.

    Returns:
        Limits that behave the same; a window that the session never fills is the whole session.

    Raises:
        RequestError: `chunks`, `window`, `sink` or `attention` can't be served; the reason says what is accepted.
    """
    frames = chunks * chunk_frames
    window, sink, attention = limits.window, limits.sink, limits.attention
    if chunks < 1 or frames > ROTARY_POSITIONS_MAX:
        most = ROTARY_POSITIONS_MAX // chunk_frames
        reason = f"{chunks} chunks of {chunk_frames} latent frames don't fit the model; accepted: 1 to {most}"
        raise RequestError("chunks", reason)
    if sink < 0:
        raise RequestError("sink", f"{sink} is negative; accepted: 0 or more latent frames")
    if window != -1 and window < sink + chunk_frames:
        least = sink + chunk_frames
        reason = f"{window} latent frames don't hold the sink ({sink}) and a chunk ({chunk_frames})"
        raise RequestError("window", f"{reason}; accepted: -1 (the whole session) or at least {least}")
    held = frames if window == -1 else min(window, frames)
    if attention != -1 and attention < chunk_frames:
        reason = f"{attention} latent frames are less than a chunk"
        raise RequestError("attention", f"{reason}; accepted: -1 (all that is held) or at least {chunk_frames}")
    if attention != -1 and sink and attention < held:
        reason = f"{attention} of {held} latent frames hide the sink"
        raise RequestError("attention", f"{reason}; accepted with a sink: -1 or at least {held}")
    return replace(limits, window=-1 if held == frames else window)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the layers write in one forward, and what they attend to: half-open ranges of memory.

    Attributes:
        write: in the order of the new tokens.
        read: in the order of memory, which is not the order of time.
    """

    write: tuple[Range, ...]
    read: tuple[Range, ...]


class RollingCache:
    """Keys and values of all layers of one session, [layers, 1, capacity, heads, head_dim] each.

    Args:
        layout: sizes in tokens.
        layers: layers of the model.
        heads: attention heads kept here (those of the model divided by the sequence-parallel degree).
        head_dim: channels of a head.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self, layout: CacheLayout, *, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.heads = heads
        self.global_end = 0
        self.local_end = 0
        self._sink = min(layout.sink, layout.capacity)
        self._offset = 0
        shape = (layers, 1, layout.capacity, heads, head_dim)
        # Zeros, not garbage: slots that a gap in the chunks leaves out are attended to.
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def cache_bytes(self) -> int:
        """Memory that the cache holds, from its first chunk to its last."""
        return self._k.nbytes + self._v.nbytes

    @property
    def layer_bytes(self) -> int:
        """How far apart the keys of two layers lie in memory."""
        return self._k[0].nbytes

    def advance(self, start: int, count: int) -> Slots:
        """Make room for the tokens [start, start + count) of the session; called once per forward, before any layer.

        Called again for the same tokens, it moves nothing and gives the same slots.

        Raises:
            RuntimeError: the tokens don't fit (more than the capacity, or past the end of a cache that doesn't evict),
                or they neither repeat the newest ones nor follow them.
        """
        end = start + count
        new = end - self.global_end
        if new != 0 and start < self.global_end:
            raise RuntimeError(f"tokens {start} to {end} neither repeat nor follow the {self.global_end} before them")
        evicted = max(0, count + self.local_end - self.layout.capacity) if self.layout.evicts and new > 0 else 0
        local_end = self.local_end + new - evicted
        if local_end > self.layout.capacity or count > local_end:
            raise RuntimeError(
                f"tokens {start} to {end} don't fit: the cache has {self.layout.capacity} slots, "
                f"{self.local_end} of them taken{'' if self.layout.evicts else ', and evicts nothing'}"
            )
        # When sink and new tokens together exceed the capacity nothing is left to move up, and the sink is overwritten.
        if self.local_end - evicted >= self.layout.sink:
            ring = self.layout.capacity - self._sink
            self._offset = (self._offset + evicted) % ring if ring else 0
        self.global_end, self.local_end = end, local_end
        seen = max(0, local_end - self.layout.attention)
        return Slots(
            write=tuple(self._memory(local_end - count, local_end)),
            read=_merged(self._memory(seen, local_end)),
        )

    def update(self, layer: int, k: Tensor, v: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values and give all that it attends to.

        Args:
            layer: number of the layer.
            k: [1, count, heads, head_dim], rotated.
            v: [1, count, heads, head_dim].
            slots: what `advance` gave for this forward.

        Returns:
            Keys and values [1, attended, heads, head_dim]: views of the cache where they lie in one piece. Their order
            is that of memory.
        """
        keys, values = self._k[layer], self._v[layer]
        done = 0
        for first, last in slots.write:
            fresh = slice(done, done + last - first)
            keys[:, first:last] = k[:, fresh]
            values[:, first:last] = v[:, fresh]
            done = fresh.stop
        return _gather(keys, slots.read), _gather(values, slots.read)

    def ordered(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's whole row, sink first and then in order of time, unused slots last: for comparison; it copies."""
        row = self._memory(0, self.layout.capacity)
        return _gather(self._k[layer], row), _gather(self._v[layer], row)

    def _memory(self, first: int, last: int) -> list[Range]:
        """Where the places [first, last) of the row lie in memory, in the order of the row."""
        sink = self._sink
        ranges = [(first, min(last, sink))]
        if last > sink:
            ring = self.layout.capacity - sink
            begin = sink + (max(first, sink) - sink + self._offset) % ring
            length = last - max(first, sink)
            straight = min(length, self.layout.capacity - begin)
            ranges += [(begin, begin + straight), (sink, sink + length - straight)]
        return [piece for piece in ranges if piece[0] < piece[1]]


def _merged(ranges: list[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _gather(row: Tensor, ranges: tuple[Range, ...] | list[Range]) -> Tensor:
    pieces = [row[:, first:last] for first, last in ranges] or [row[:, :0]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
