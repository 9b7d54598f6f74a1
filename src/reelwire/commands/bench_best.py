"""The best that any scheduler can do within the rules of the stream: when each chunk of an emulated session passes what.

Stages take exactly the times that they are told, messages none, and everything happens as soon as it may::

    encode    one after the other; its request is there, and its output has room until denoise has begun two chunks before
    denoise   one after the other; condition and control are there, and the latent before the last was taken
    decode    one after the other

A control is given when the client knows it: one that reacts, when the frames before are there; a held key, one chunk ahead
of what was output. Bound early it counts from then, bound late from the begin of its denoise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..parts import ControlBinding
    from .bench_players import Player

Refill = Literal["never", "with_control", "after_stage"]
AHEAD = 2
"""Chunks that an edge holds, that conditions are ahead of controls, and that a held key is ahead of what was output."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that each stage takes for a chunk."""

    encode_s: float
    denoise_s: float
    decode_s: float


@dataclass(slots=True)
class Best:
    """When each chunk passes what, in seconds since the session was ready.

    Attributes:
        accepted: its control was given, or reserved.
        encoded: its condition is there.
        begun: its denoise began.
        denoised: its latent is there.
        taken: its decode began.
        committed: its frames are there.
        bound: what its control counts from.
    """

    accepted: list[float] = field(default_factory=list)
    encoded: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    denoised: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    committed: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, times: Times, refill: Refill, player: Player, binding: ControlBinding, chunks: int) -> Best:
        """Of the first chunks of a session.

        Args:
            times: of the stages.
            refill: when conditions are asked for, as in `Prefetch.refill`.
            player: when the client gives its controls; ``changing`` holds a key all the while.
            binding: of a held key.
            chunks: how many.
        """
        best = cls()
        late = player != "reacting" and binding == "late"
        for chunk in range(chunks):
            best.accepted.append(best._given(chunk, player, late=late))
            request = best._requested(chunk, refill)
            encode = max(request, _at(best.encoded, chunk - 1), _at(best.begun, chunk - AHEAD))
            best.encoded.append(encode + times.encode_s)
            inputs = max(best.accepted[chunk], best.encoded[chunk])
            begun = max(inputs, _at(best.denoised, chunk - 1), _at(best.taken, chunk - AHEAD))
            best.begun.append(begun)
            best.denoised.append(begun + times.denoise_s)
            best.taken.append(max(best.denoised[chunk], _at(best.committed, chunk - 1)))
            best.committed.append(best.taken[chunk] + times.decode_s)
            best.bound.append(begun if late else best.accepted[chunk])
        return best

    def _given(self, chunk: int, player: Player, *, late: bool) -> float:
        if player == "reacting":
            return _at(self.committed, chunk - 1)
        shown = _at(self.committed, chunk - AHEAD)
        return max(shown, _at(self.begun, chunk - 1)) if late else shown  # one reservation at a time is not bound yet

    def _requested(self, chunk: int, refill: Refill) -> float:
        """When encode may know of a chunk."""
        if refill == "never":
            return self.accepted[chunk]
        return _at(self.accepted if refill == "with_control" else self.denoised, chunk - AHEAD)

    def periods(self, warmup: int) -> list[float]:
        """From each chunk's commit to the next one's, after so many chunks."""
        return [self.committed[at] - self.committed[at - 1] for at in range(max(1, warmup), len(self.committed))]

    def latencies(self, warmup: int) -> list[float]:
        """From each chunk's control to its commit, after so many chunks."""
        return [done - bound for done, bound in zip(self.committed, self.bound, strict=True)][warmup:]


def _at(times: list[float], chunk: int) -> float:
    """A time, which for what was before the first chunk is 0."""
    return times[chunk] if chunk >= 0 else 0.0
