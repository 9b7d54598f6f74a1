"""Golden set ``sampler``: schedules, the noise levels that are really used, clean estimates and re-noising."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from reelwire.pipeline.world.sampler import clean_estimate, flow_schedule, renoise, select_steps

from .line import Comparison, Entry, Line, document, over_files, tensors

CONVERT_ATOL = 1e-6


def check(folder: Path) -> Iterator[Line]:
    """Compare every file of the set."""
    return over_files(folder, _compare)


def _compare(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    if name.endswith(".json"):
        _compare_selected(document(folder, name), comparison)
    elif "indices" in entry:
        _compare_conversion(folder, name, entry, comparison)
    else:
        _compare_schedule(folder, name, entry, comparison)


def _compare_schedule(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    recorded, schedule = tensors(folder, name), flow_schedule(entry["shift"])
    comparison.equal("timesteps", schedule.timesteps, recorded["timesteps"])
    ulps = (schedule.sigmas.view(torch.int32) - recorded["sigmas"].view(torch.int32)).abs().max()
    comparison.number("sigmas, in ulps", float(ulps), 1.0)
    counts = torch.bincount(schedule.timesteps)
    comparison.equal("distinct_timesteps", int((counts > 0).sum()), entry["distinct_timesteps"])
    comparison.equal("max_duplicates", int(counts.max()), entry["max_duplicates"])


def _compare_selected(recorded: dict[str, Any], comparison: Comparison) -> None:
    for shift, cases in recorded["table"].items():
        schedule = flow_schedule(float(shift))
        for case in cases:
            label = f"shift {shift}, {case['indices']}"
            steps = select_steps(schedule, case["indices"])
            comparison.equal(f"{label} steps", len(steps), len(case["steps"]))
            for ours, theirs in zip(steps, case["steps"], strict=True):
                comparison.equal(f"{label} timestep", ours.timestep, theirs["timestep"])
                comparison.equal(f"{label} x0_sigma", ours.sigma, theirs["x0_sigma"])
                comparison.equal(f"{label} renoise_sigma", ours.renoise_sigma, theirs["renoise_sigma"])
    schedule = flow_schedule()
    for refused in recorded["rejected_index_sets"]:
        try:
            select_steps(schedule, refused["indices"])
            answer = "accepted"
        except ValueError:
            answer = "ValueError"
        comparison.equal(f"refusal of {refused['case']}", answer, refused["error"])


def _compare_conversion(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    recorded = tensors(folder, name)
    steps = select_steps(flow_schedule(entry["shift"]), entry["indices"])
    comparison.equal("timesteps", torch.tensor([step.timestep for step in steps]), recorded["timesteps"])
    for k, step in enumerate(steps):
        clean = clean_estimate(recorded["xt"][k], recorded["flow"][k], step.sigma)
        comparison.close(f"x0 of step {k}", clean, recorded["x0"][k], CONVERT_ATOL)
        if k + 1 < len(steps):
            noised = renoise(recorded["x0"][k], recorded["noise"][k], steps[k + 1].renoise_sigma)
            comparison.close(f"renoised after step {k}", noised, recorded["renoised"][k], CONVERT_ATOL)
