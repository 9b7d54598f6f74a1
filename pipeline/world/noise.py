"""Noise without a history: each draw is a function of (seed, stream, chunk index, step) and nothing else.

A chunk that comes from a latent cache, is retried or is replayed after a fault draws less or more than a cold run does.
With a generator that lives as long as the session, that would move every later chunk; here it moves none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Stream = Literal["initial", "renoise"]


class NoiseSource(Protocol):
    """Where a rollout gets its noise: drawn from a seed, or recorded."""

    def initial(self, index: int) -> Tensor:
        """The starting noise of chunk `index`: float32 [1, C, F, H, W]."""
        ...

    def renoise(self, index: int, step: int) -> Tensor:
        """The noise mixed in after denoising step `step` of chunk `index`: float32 [1, C, F, H, W]."""
        ...


@dataclass(frozen=True, slots=True)
class SeededNoise:
    """The noise of one session.

    Attributes:
        seed: the session's seed, any integer.
        shape: of a chunk's latent, [1, C, F, H, W].
        device: where the values are moved to; they are always drawn on the CPU, so that devices agree.
    """

    seed: int
    shape: tuple[int, int, int, int, int]
    device: torch.device

    def initial(self, index: int) -> Tensor:
        """The starting noise of chunk `index`."""
        return draw(self.seed, "initial", index, 0, self.shape).to(self.device)

    def renoise(self, index: int, step: int) -> Tensor:
        """The noise mixed in after denoising step `step` of chunk `index`."""
        return draw(self.seed, "renoise", index, step, self.shape).to(self.device)


def draw(seed: int, stream: Stream, index: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal values, float32 on the CPU, the same whatever was drawn before and by however many threads."""
    # 32 bits, because torch's CPU generator reads no more of a seed. That two of the 1364 draws of the longest session
    # share one, and so their noise, has a chance of 1 in 4600; it would do no harm.
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}/{step}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float32)
