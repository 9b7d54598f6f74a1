"""Noise without a history."""

from __future__ import annotations

import torch

from reelwire.pipeline.world.noise import SeededNoise, draw

SHAPE = (1, 16, 3, 6, 10)


def source(seed: int = 7) -> SeededNoise:
    return SeededNoise(seed, SHAPE, torch.device("cpu"))


def test_a_draw_does_not_depend_on_earlier_draws() -> None:
    """The same chunk and step give the same values, whatever was drawn before and from whichever source."""
    noise = source()
    expected = noise.initial(5), noise.renoise(5, 2)
    torch.randn(1000)
    for index in range(4):
        noise.initial(index)
    assert torch.equal(source().renoise(5, 2), expected[1])
    assert torch.equal(source().initial(5), expected[0])


def test_a_draw_leaves_the_global_generator_alone() -> None:
    """Drawing noise moves no state that others use."""
    before = torch.get_rng_state()
    source().initial(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_coordinate_matters() -> None:
    """Seed, stream, chunk and step each give other values."""
    draws = [
        draw(7, "initial", 0, 0, SHAPE),
        draw(8, "initial", 0, 0, SHAPE),
        draw(7, "renoise", 0, 0, SHAPE),
        draw(7, "renoise", 1, 0, SHAPE),
        draw(7, "renoise", 0, 1, SHAPE),
        draw(71, "renoise", 0, 0, SHAPE),
        draw(7, "renoise", 10, 0, SHAPE),
    ]
    for number, one in enumerate(draws):
        for other in draws[number + 1 :]:
            assert abs(float((one * other).mean())) < 0.1
            assert not torch.equal(one, other)


def test_noise_is_standard_normal_float32() -> None:
    """Values have zero mean and unit variance, in float32 and the shape of a chunk's latent."""
    values = torch.cat([source().initial(index).flatten() for index in range(20)])
    assert source().initial(0).shape == SHAPE
    assert values.dtype == torch.float32
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.var()) - 1) < 0.02


def test_thread_count_does_not_matter() -> None:
    """One thread and several draw the same bits."""
    threads = torch.get_num_threads()
    shape = (1, 16, 3, 60, 104)
    try:
        torch.set_num_threads(1)
        single = draw(1, "initial", 0, 0, shape)
        torch.set_num_threads(4)
        several = draw(1, "initial", 0, 0, shape)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(single, several)


def test_values_are_pinned() -> None:
    """The hash, the streams' names and the generator are part of a session's contract: these values may not change."""
    first = draw(0, "initial", 0, 0, (16,))[:3]
    torch.testing.assert_close(first, torch.tensor([-0.61688983, 0.66087800, -0.68616134]), atol=1e-6, rtol=0)
