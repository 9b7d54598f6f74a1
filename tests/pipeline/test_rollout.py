"""Denoising whole chunks with a small random model."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from reelwire.pipeline.world.dit import WorldDiT, random_world_dit
from reelwire.pipeline.world.dit_blocks import ChunkInputs, SessionCaches
from reelwire.pipeline.world.dit_config import WorldDiTConfig
from reelwire.pipeline.world.kv_cache import CacheLimits
from reelwire.pipeline.world.noise import SeededNoise
from reelwire.pipeline.world.rollout import denoise_chunk, write_cache
from reelwire.pipeline.world.sampler import flow_schedule, select_steps

CONFIG = WorldDiTConfig(dim=24, layers=2, heads=2, ffn=40, text_dim=10, text_tokens=6, freq_dim=16)
FRAMES, HEIGHT, WIDTH = 3, 4, 6
CHUNKS = 6
STEPS = select_steps(flow_schedule())
NOISE = SeededNoise(3, (1, 16, FRAMES, HEIGHT, WIDTH), torch.device("cpu"))


def open_session(model: WorldDiT) -> SessionCaches:
    layout = CacheLimits(window=7, sink=2).layout(model.frame_tokens(HEIGHT, WIDTH), CHUNKS * FRAMES)
    return model.open_session(torch.randn(1, 4, 10, generator=torch.Generator().manual_seed(1)), layout)


def inputs(model: WorldDiT, index: int) -> ChunkInputs:
    generator = torch.Generator().manual_seed(index)
    condition = torch.randn(1, 20, FRAMES, HEIGHT, WIDTH, generator=generator)
    return model.prepare(index, condition, torch.randn(1, 384, FRAMES, HEIGHT, WIDTH, generator=generator))


def roll(
    model: WorldDiT, caches: SessionCaches, hits: Collection[int] = (), known: list[Tensor] | None = None
) -> list[Tensor]:
    """All chunks in order; those in `hits` take their latent from `known`."""
    latents = []
    for index in range(CHUNKS):
        if index in hits:
            assert known is not None
            latents.append(known[index])
            write_cache(model, caches, inputs(model, index), latents[-1])
        else:
            latents.append(denoise_chunk(model, caches, inputs(model, index), STEPS, NOISE))
    return latents


def test_a_chunk_is_four_steps_and_a_clean_pass() -> None:
    """The model sees the starting noise first, then falling timesteps, and last the result itself at timestep 0."""
    model = random_world_dit(CONFIG, 0)
    seen: list[tuple[Tensor, float]] = []
    handle = model.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[:2]))
    latent = denoise_chunk(model, open_session(model), inputs(model, 0), STEPS, NOISE)
    handle.remove()
    assert [timestep for _, timestep in seen] == [step.timestep for step in STEPS] + [0]
    assert torch.equal(seen[0][0], NOISE.initial(0))
    assert torch.equal(seen[-1][0], latent)
    assert latent.dtype == torch.float32
    assert latent.shape == (1, 16, FRAMES, HEIGHT, WIDTH)


def test_a_long_rollout_stays_bounded() -> None:
    """Latents of a random model neither vanish nor blow up, and the cache keeps its size."""
    model = random_world_dit(CONFIG, 0)
    caches = open_session(model)
    before = caches.cache_bytes
    for latent in roll(model, caches):
        assert 0.1 < float(latent.std()) < 10
    assert caches.cache_bytes == before
    assert (caches.rolling.global_end, caches.rolling.local_end) == (CHUNKS * FRAMES * 6, 7 * 6)


def test_a_rollout_is_a_function_of_its_inputs() -> None:
    """Two sessions of the same inputs, run in turn on one model, are bitwise equal."""
    model = random_world_dit(CONFIG, 0)
    one, two = open_session(model), open_session(model)
    for index in range(CHUNKS):
        first = denoise_chunk(model, one, inputs(model, index), STEPS, NOISE)
        second = denoise_chunk(model, two, inputs(model, index), STEPS, NOISE)
        assert torch.equal(first, second)


def test_streaming_28_a_hit_changes_nothing_after_it() -> None:
    """With any chunks' latents taken from a cold run, later latents and the cache are bitwise those of the cold run."""
    model = random_world_dit(CONFIG, 0)
    caches = open_session(model)
    cold = roll(model, caches)
    for hits in ({2}, {0, 1, 2}, {3, 4}, set(range(CHUNKS))):
        warm = open_session(model)
        for a, b in zip(cold, roll(model, warm, hits, cold), strict=True):
            assert torch.equal(a, b)
        for layer in range(CONFIG.layers):
            for a, b in zip(caches.rolling.ordered(layer), warm.rolling.ordered(layer), strict=True):
                assert torch.equal(a, b)


def test_a_retried_chunk_changes_nothing() -> None:
    """A chunk that is denoised again, as after a fault half-way, gives the same latent and the same future."""
    model = random_world_dit(CONFIG, 0)
    cold = roll(model, open_session(model))
    caches = open_session(model)
    for index in range(CHUNKS):
        chunk = inputs(model, index)
        model(torch.randn(1, 16, FRAMES, HEIGHT, WIDTH), 999, chunk, caches)
        assert torch.equal(denoise_chunk(model, caches, chunk, STEPS, NOISE), cold[index])
