"""What a stream through the VAE remembers: whether a step changed it, to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reelwire.pipeline.wan.vae_cache import FeatureCache, same_bits


class Delay(nn.Module):
    """Remembers its input and the one before it, as a causal convolution does; slot 1 stays empty."""

    def forward(self, x: Tensor, feat_cache: list[Tensor | None], feat_idx: list[int]) -> Tensor:
        """Add the input of two steps ago."""
        before = feat_cache[0]
        feat_cache[0] = x.clone() if before is None else torch.cat([before[-1:], x])
        feat_idx[0] += 1
        return x if before is None else x + before[0]


def test_bits_decide() -> None:
    """Two zeros differ, a NaN is itself, and shape and dtype count."""
    assert same_bits(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    halves = torch.ones(3, 4, dtype=torch.bfloat16)
    assert same_bits(halves.t(), torch.ones(4, 3, dtype=torch.bfloat16))


def test_streaming_08_a_step_is_still_when_it_changes_no_bit() -> None:
    """Watched steps say whether the cache stayed as it was; without watching, nothing is said."""
    cache, network = FeatureCache(2), Delay()
    grey = torch.zeros(1)
    still = []
    for x in (torch.ones(1), grey, grey, grey, torch.ones(1), grey):
        cache.step(network, x, watch=True)
        still.append(cache.still)
    assert still == [False, False, False, True, False, False]
    for _ in range(4):
        cache.step(network, grey)
    assert not cache.still
    cache.step(network, grey, watch=True)
    assert cache.still


def test_streaming_08_watching_keeps_no_second_copy() -> None:
    """While a step runs, what it replaced is not kept alive by the watching."""
    seen: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor, feat_cache: list[Tensor | None], feat_idx: list[int]) -> Tensor:
            for at in range(3):
                feat_cache[at] = x.clone()
                seen.append(sum(slot.nbytes for slot in feat_cache if slot is not None))
            return x

    cache = FeatureCache(3)
    for _ in range(2):
        cache.step(Counting(), torch.zeros(8), watch=True)
    assert cache.still
    assert max(seen) == cache.nbytes == 3 * 32
