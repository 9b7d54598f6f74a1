"""Weights drawn from a seed, for models that need no checkpoint.

Each parameter has a generator of its own, seeded from the model's seed and its name, and its values are uniform, which
takes no transcendental function: the weights are the same in every process, on every CPU, with any number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

Shaping = Callable[[str, Tensor], Tensor]
"""Name of a parameter and random values of its shape, with mean 0 and deviation 1 -> the parameter's values."""


@torch.no_grad()
def fill_seeded(module: nn.Module, seed: int, shaping: Shaping) -> None:
    """Overwrite every parameter of a module, in its own dtype and on its own device."""
    for name, parameter in module.named_parameters():
        parameter.copy_(shaping(name, _unit(f"{seed}/{name}", parameter.shape)))


def by_fan_in(name: str, values: Tensor) -> Tensor:
    """Weights that keep the variance of what passes, gains near 1, small biases."""
    if name.endswith("bias"):
        return 0.02 * values
    if values.ndim == 1 or name.endswith("gamma"):
        return 1.0 + 0.1 * values
    return torch.mul(values, values[0].numel() ** -0.5)


def smooth_pictures(name: str, values: Tensor) -> Tensor:
    """Weights for a VAE whose pictures are soft shapes that change slowly, instead of noise that flickers.

    Channels are mixed at random, but every convolution blurs: its kernel is one channel mix times a low pass in space
    and time, with a little of everything else. Both frames that an upsampling in time makes of one start from the same mix.
    """
    if values.ndim < 4 or values.shape[-1] not in (1, 3) or name.endswith("gamma"):
        return by_fan_in(name, values)
    mix = values.flatten(2)[..., 0]
    mix = mix - mix.mean(1, keepdim=True)  # what an activation adds to all channels alike would tint the whole picture
    if name.endswith("upsamplers.0.time_conv.weight"):
        mix = mix[: len(mix) // 2].repeat(2, 1)
    low_pass = torch.ones(())
    for size in values.shape[2:]:
        taps = torch.tensor([1.0, 2.0, 1.0] if size == 3 else [1.0])
        low_pass = low_pass.unsqueeze(-1) * (taps / taps.sum())
    blurred: Tensor = mix.reshape(*mix.shape, *([1] * low_pass.ndim)) * low_pass
    return blurred * float(mix.shape[1] ** -0.5) + 0.1 * by_fan_in(name, values)


def _unit(label: str, shape: torch.Size) -> Tensor:
    digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    drawn: Tensor = torch.rand(shape, generator=generator)
    return (drawn * 2 - 1) * 3**0.5
