"""The few-step flow-matching sampler of the world model: schedule, clean estimate, re-noising.

The model is distilled to four steps of a 1000-step schedule. Its timesteps are whole numbers, so neighbouring levels of
the schedule share one, and the published sampler finds the noise level by searching for the timestep: the clean estimate
takes the first level with it, re-noising the second. Neither needs to be the level that was selected; a model trained
with this must be sampled with it.

Source: LingBot-World-Fast; flow matching (arXiv:2210.02747), timestep shift (arXiv:2403.03206).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TRAIN_STEPS = 1000
DEFAULT_SHIFT = 10.0
DEFAULT_INDICES = (0, 179, 358, 679)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All noise levels, from noise to clean.

    Attributes:
        timesteps: int64 [1000], what the model is told; neighbours may be equal.
        sigmas: float32 [1001], share of noise in x = (1 - sigma) * clean + sigma * noise; the last is 0.
    """

    timesteps: Tensor
    sigmas: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One denoising step.

    Attributes:
        timestep: what the model is told.
        sigma: the noise level that the clean estimate uses.
        renoise_sigma: the noise level to which the clean estimate of the step before is noised again.
    """

    timestep: int
    sigma: float
    renoise_sigma: float


def flow_schedule(shift: float = DEFAULT_SHIFT) -> Schedule:
    """The schedule of 1000 levels: base levels b from 0.999 towards 0, shifted to s * b / (1 + (s - 1) * b).

    Raises:
        ValueError: `shift` isn't positive.
    """
    if not shift > 0:
        raise ValueError(f"shift {shift} isn't positive")
    highest = torch.tensor(1 - 1 / TRAIN_STEPS, dtype=torch.float32).double().item()  # as rounded where it was trained
    base = torch.linspace(highest, 0.0, TRAIN_STEPS + 1, dtype=torch.float64)[:-1]
    shifted = shift * base / (1 + (shift - 1) * base)
    sigmas = torch.cat((shifted, torch.zeros(1, dtype=torch.float64))).float()
    return Schedule((shifted * TRAIN_STEPS).long(), sigmas)


def select_steps(schedule: Schedule, indices: Sequence[int] = DEFAULT_INDICES) -> tuple[Step, ...]:
    """The steps at `indices` of the schedule, with the noise levels that are really used there.

    Raises:
        ValueError: `indices` is empty, not strictly increasing, or holds anything but integers from 0 to 999.
    """
    last = TRAIN_STEPS - 1
    if not indices:
        raise ValueError(f"no timestep indices; accepted: one or more integers from 0 to {last}")
    for index in indices:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= last:
            raise ValueError(f"timestep index {index!r} isn't an integer from 0 to {last}")
    if any(later <= earlier for earlier, later in itertools.pairwise(indices)):
        raise ValueError(f"timestep indices {list(indices)} aren't strictly increasing")
    steps = []
    for index in indices:
        timestep = schedule.timesteps[index]
        same = (schedule.timesteps == timestep).nonzero().flatten()
        first, second = same[0], same[min(1, len(same) - 1)]
        steps.append(Step(int(timestep), float(schedule.sigmas[first]), float(schedule.sigmas[second])))
    return tuple(steps)


def clean_estimate(x: Tensor, flow: Tensor, sigma: float) -> Tensor:
    """The clean latent that a flow points to: x - sigma * flow in float64, rounded to the dtype of `x`."""
    return (x.double() - sigma * flow.double()).to(x.dtype)


def renoise(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Noise a clean latent to a level: (1 - sigma) * clean + sigma * noise, in the dtype of `clean`."""
    return (1 - sigma) * clean + sigma * noise
