"""One chunk of a session: from noise to a clean latent in a few steps, then into the cache.

A chunk whose latent is known already (it was made before, from the same inputs) needs `write_cache` alone: the cache,
and with it every later chunk, is then bit for bit what a cold run leaves, because the clean pass overwrites whatever the
denoising steps wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dit import WorldDiT
from .dit_blocks import ChunkInputs, SessionCaches
from .noise import NoiseSource
from .sampler import Step, clean_estimate, renoise

CLEAN_TIMESTEP = 0


@torch.inference_mode()
def denoise_chunk(
    model: WorldDiT, caches: SessionCaches, chunk: ChunkInputs, steps: Sequence[Step], noise: NoiseSource
) -> Tensor:
    """Make the latent of a chunk and write it into the session's cache.

    Args:
        model: the causal DiT.
        caches: those of the session, written up to the chunk before.
        chunk: what `WorldDiT.prepare` gave for this chunk.
        steps: the denoising steps.
        noise: where the chunk's noise comes from; on the model's device.

    Returns:
        The clean latent, float32 [1, C, F, H, W].
    """
    x = noise.initial(chunk.index)
    for number, step in enumerate(steps):
        if number > 0:
            x = renoise(x, noise.renoise(chunk.index, number - 1), step.renoise_sigma)
        flow = model(x, step.timestep, chunk, caches)
        x = clean_estimate(x, flow, step.sigma)
    write_cache(model, caches, chunk, x)
    return x


@torch.inference_mode()
def write_cache(model: WorldDiT, caches: SessionCaches, chunk: ChunkInputs, latent: Tensor) -> None:
    """Write the keys and values of a chunk's clean latent, [1, C, F, H, W] on the model's device, into the cache."""
    model(latent, CLEAN_TIMESTEP, chunk, caches)
