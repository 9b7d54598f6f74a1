"""Golden set ``denoise_rollout``: whole chunks from recorded noise to latent, over many chunks and cache policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reelwire.pipeline.world.rollout import denoise_chunk
from reelwire.pipeline.world.sampler import clean_estimate, flow_schedule, select_steps

from .causal_dit import load_model, open_case
from .line import Comparison, Entry, Line, NotCompared, over_files, tensors

ATOL = 1e-4


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """The noises of a file: starting noise [chunks, ...] and re-noising [chunks, steps - 1, ...]."""

    starts: Tensor
    renoises: Tensor

    def initial(self, index: int) -> Tensor:
        """The starting noise of a chunk."""
        return self.starts[index]

    def renoise(self, index: int, step: int) -> Tensor:
        """The noise mixed in after a step."""
        return self.renoises[index, step]


def check(folder: Path) -> Iterator[Line]:
    """Compare every file of the set."""
    return over_files(folder, _compare)


def _compare(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    if entry["skipped_chunks"]:
        raise NotCompared("ours runs the clean pass on a latent-cache hit, so that later chunks equal a cold run")
    recorded, inputs = tensors(folder, name), tensors(folder, entry["inputs"])
    model = load_model((folder / entry["weights"]).resolve())
    steps = select_steps(flow_schedule(entry["sample_shift"]), entry["timestep_indices"])
    comparison.equal("timesteps", torch.tensor([step.timestep for step in steps]), recorded["timesteps"])
    chunks = entry["chunk_count"]
    caches = open_case(model, inputs["prompt"], entry, inputs["x"][:chunks])
    comparison.equal("kv_tokens", caches.rolling.layout.capacity, entry["kv_tokens"])
    noise = RecordedNoise(recorded["initial_noise"], recorded["renoise"])
    fed: list[Tensor] = []
    flows: list[Tensor] = []

    def record(_module: Any, arguments: tuple[Any, ...], flow: Tensor) -> None:
        fed.append(arguments[0])
        flows.append(flow)

    handle = model.register_forward_hook(record)
    try:
        for index in range(chunks):
            chunk = model.prepare(index, inputs["y"][index], inputs["control"][index])
            latent = denoise_chunk(model, caches, chunk, steps, noise)
            comparison.close(f"output of chunk {index}", latent, recorded["output"][index], ATOL)
            cursors = torch.tensor((caches.rolling.global_end, caches.rolling.local_end))
            comparison.equal(f"cursors after chunk {index}", cursors, recorded["cursors"][index])
    finally:
        handle.remove()
    if "flow" in recorded:
        shape = recorded["flow"].shape
        comparison.close("model_input", torch.stack(fed).reshape(shape), recorded["model_input"], ATOL)
        comparison.close("flow", torch.stack(flows).reshape(shape), recorded["flow"], ATOL)
        _compare_estimates(recorded, [step.sigma for step in steps], comparison)


def _compare_estimates(recorded: dict[str, Tensor], sigmas: list[float], comparison: Comparison) -> None:
    for k, sigma in enumerate(sigmas):
        clean = clean_estimate(recorded["model_input"][:, k], recorded["flow"][:, k], sigma)
        comparison.close(f"x0 of step {k}", clean, recorded["x0"][:, k], 1e-6)
