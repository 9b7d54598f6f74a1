"""The few-step sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reelwire.pipeline.world.sampler import Schedule, clean_estimate, flow_schedule, renoise, select_steps


def test_schedule_starts_below_pure_noise() -> None:
    """The first level comes from 0.999 as float32 rounds it, not from 1; a final 0 is appended."""
    schedule = flow_schedule(1.0)
    assert schedule.timesteps.shape == (1000,)
    assert schedule.sigmas.shape == (1001,)
    assert float(schedule.sigmas[0]) == float(torch.tensor(0.999))
    assert float(schedule.sigmas[-1]) == 0.0
    assert bool((schedule.sigmas.diff() < 0).all())


def test_shift_moves_levels_towards_noise() -> None:
    """With shift s, level b becomes s * b / (1 + (s - 1) * b); timesteps are truncated, so that neighbours collide."""
    schedule = flow_schedule(10.0)
    base = 0.9990000128746033 * (1 - 500 / 1000)
    assert float(schedule.sigmas[500]) == pytest.approx(10 * base / (1 + 9 * base), abs=1e-7)
    assert int(schedule.timesteps[0]) == 999
    assert int(torch.bincount(schedule.timesteps).max()) == 10


def test_levels_are_found_by_timestep() -> None:
    """The clean estimate takes the first level with the step's timestep, re-noising the second, or the only one."""
    timesteps = torch.tensor([9, 7, 7, 7, 4])
    schedule = Schedule(timesteps, torch.tensor([0.9, 0.8, 0.7, 0.6, 0.4, 0.0]))
    single, shared = select_steps(schedule, [0, 3])
    assert (single.timestep, single.sigma, single.renoise_sigma) == pytest.approx((9, 0.9, 0.9))
    assert (shared.timestep, shared.sigma, shared.renoise_sigma) == pytest.approx((7, 0.8, 0.7))


@pytest.mark.parametrize(
    "indices", [[], [True, 5], [0, 1.5], [-1, 5], [0, 1000], [5, 3], [0, 5, 5], ["0", "1"], [0, None]]
)
def test_bad_index_sets_are_refused(indices: list[Any]) -> None:
    """Indices must be integers from 0 to 999 in strictly increasing order, and at least one."""
    with pytest.raises(ValueError, match="timestep ind"):
        select_steps(flow_schedule(), indices)


def test_a_shift_must_be_positive() -> None:
    """A shift of zero or below is refused."""
    with pytest.raises(ValueError, match="isn't positive"):
        flow_schedule(0.0)


def test_estimate_undoes_noise() -> None:
    """A latent noised to a level, and the flow noise - clean, give the clean latent back."""
    clean, noise = torch.randn(2, 1, 4, 3, 2, 2)
    sigma = 0.75
    x = renoise(clean, noise, sigma)
    torch.testing.assert_close(clean_estimate(x, noise - clean, sigma), clean, atol=1e-6, rtol=0)


def test_estimate_is_computed_in_float64() -> None:
    """The product and the difference are rounded once, at the end."""
    x, flow = torch.randn(2, 1000)
    sigma = 0.9577199220657349
    expected = [a - sigma * b for a, b in zip(x.tolist(), flow.tolist(), strict=True)]
    assert torch.equal(clean_estimate(x, flow, sigma), torch.tensor(expected, dtype=torch.float64).float())
