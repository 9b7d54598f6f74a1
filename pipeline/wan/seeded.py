"""Weights drawn from a seed, for models that need no checkpoint.

Each parameter has a generator of its own, seeded from the model's seed and its name, and its values are uniform, which
takes no transcendental function: the weights are the same in every process, on every CPU, with any number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

Spread = Callable[[str, nn.Parameter], tuple[float, float]]
"""Name and parameter -> mean and standard deviation of its values."""


@torch.no_grad()
def fill_seeded(module: nn.Module, seed: int, spread: Spread) -> None:
    """Overwrite every parameter of a module, in its own dtype and on its own device."""
    for name, parameter in module.named_parameters():
        mean, deviation = spread(name, parameter)
        parameter.copy_(mean + deviation * _unit(f"{seed}/{name}", parameter.shape))


def fan_in_spread(name: str, parameter: nn.Parameter) -> tuple[float, float]:
    """Weights that keep the variance of what passes, gains near 1, small biases."""
    if name.endswith("bias"):
        return 0.0, 0.02
    if parameter.ndim == 1 or name.endswith("gamma"):
        return 1.0, 0.1
    return 0.0, float(parameter[0].numel() ** -0.5)


def _unit(label: str, shape: torch.Size) -> Tensor:
    digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return (torch.rand(shape, generator=generator) * 2 - 1) * 3**0.5
