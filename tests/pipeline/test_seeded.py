"""Weights drawn from a seed."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from reelwire.pipeline.wan.seeded import by_fan_in, fill_seeded, smooth_pictures


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(4, 6, 3), nn.LayerNorm(6), nn.Linear(6, 5))


def digest(module: nn.Module) -> str:
    return hashlib.blake2b(
        b"".join(p.detach().numpy().tobytes() for p in module.parameters()), digest_size=8
    ).hexdigest()


def test_weights_are_the_same_everywhere() -> None:
    """Every process, thread count and machine draws these very bits."""
    module, threads = layers(), torch.get_num_threads()
    fill_seeded(module, 1, by_fan_in)
    first = digest(module)
    try:
        torch.set_num_threads(1)
        fill_seeded(module, 1, by_fan_in)
    finally:
        torch.set_num_threads(threads)
    assert digest(module) == first == "26711651da477baf"
    fill_seeded(module, 2, by_fan_in)
    assert digest(module) != first


def test_a_parameter_depends_on_its_name_alone() -> None:
    """Another layer more or less doesn't move the weights of the others."""
    whole, part = layers(), nn.Sequential(nn.Conv3d(4, 6, 3))
    fill_seeded(whole, 1, by_fan_in)
    fill_seeded(part, 1, by_fan_in)
    assert torch.equal(whole.state_dict()["0.weight"], part.state_dict()["0.weight"])


def test_smooth_weights_blur_and_do_not_tint() -> None:
    """A convolution of a picture VAE is a low pass whose channel mix sums to about nothing."""
    convolution = nn.Conv2d(64, 8, 3)
    fill_seeded(convolution, 1, smooth_pictures)
    kernel = convolution.weight.detach()
    assert float(kernel[..., 1, 1].abs().mean()) > 2.5 * float(kernel[..., 0, 0].abs().mean())
    assert float(kernel.sum((1, 2, 3)).abs().max()) < 0.2 * float(kernel.abs().sum((1, 2, 3)).min())
