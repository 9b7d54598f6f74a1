"""Golden set ``denoise_rollout``: whole chunks from recorded noise to latent, over many chunks and cache policies.

Where a recorded chunk was skipped by a hit of a latent cache, ours is compared with the set up to that chunk, and from
there on with itself: a session in which the latent is known agrees bit for bit with one in which nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reelwire.pipeline.world.dit import WorldDiT
from reelwire.pipeline.world.rollout import denoise_chunk, write_cache
from reelwire.pipeline.world.sampler import clean_estimate, flow_schedule, select_steps

from .causal_dit import load_model, open_case
from .line import Comparison, Entry, Line, over_files, tensors

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
    recorded, inputs = tensors(folder, name), tensors(folder, entry["inputs"])
    rollout = _Rollout(load_model((folder / entry["weights"]).resolve()), inputs, entry, recorded)
    comparison.equal(
        "timesteps", torch.tensor([step.timestep for step in rollout.steps], dtype=torch.int64), recorded["timesteps"]
    )
    comparison.equal("kv_tokens", rollout.caches.rolling.layout.capacity, entry["kv_tokens"])
    fed: list[Tensor] = []
    flows: list[Tensor] = []

    def record(_module: Any, arguments: tuple[Any, ...], flow: Tensor) -> None:
        fed.append(arguments[0])
        flows.append(flow)

    skipped = entry["skipped_chunks"]
    handle = rollout.model.register_forward_hook(record)
    try:
        latents = [rollout.chunk(index) for index in range(entry["chunk_count"])]
    finally:
        handle.remove()
    for index, latent in enumerate(latents[: min(skipped, default=None)]):
        comparison.close(f"output of chunk {index}", latent, recorded["output"][index], ATOL)
    for index, cursors in enumerate(rollout.cursors):
        if index not in skipped:  # the recorded code moves its cursors with the chunk after
            comparison.equal(f"cursors after chunk {index}", cursors, recorded["cursors"][index])
    if "flow" in recorded:
        shape = recorded["flow"].shape
        comparison.close("model_input", torch.stack(fed).reshape(shape), recorded["model_input"], ATOL)
        comparison.close("flow", torch.stack(flows).reshape(shape), recorded["flow"], ATOL)
        _compare_estimates(recorded, [step.sigma for step in rollout.steps], comparison)
    if skipped:
        warm = _Rollout(rollout.model, inputs, entry, recorded)
        _compare_hits(rollout, warm, latents, skipped, comparison)


class _Rollout:
    """One session of a case, with the noises that were recorded.

    Attributes:
        cursors: after each chunk so far, global_end and local_end.
    """

    def __init__(self, model: WorldDiT, inputs: dict[str, Tensor], entry: Entry, recorded: dict[str, Tensor]) -> None:
        self.model = model
        self.steps = select_steps(flow_schedule(entry["sample_shift"]), entry["timestep_indices"])
        self.caches = open_case(model, inputs["prompt"], entry, inputs["x"][: entry["chunk_count"]])
        self.cursors: list[Tensor] = []
        self._inputs = inputs
        self._noise = RecordedNoise(recorded["initial_noise"], recorded["renoise"])

    def chunk(self, index: int, known: Tensor | None = None) -> Tensor:
        """The latent of the next chunk: denoised, or known already."""
        chunk = self.model.prepare(index, self._inputs["y"][index], self._inputs["control"][index])
        if known is None:
            latent = denoise_chunk(self.model, self.caches, chunk, self.steps, self._noise)
        else:
            latent = known
            write_cache(self.model, self.caches, chunk, latent)
        rolling = self.caches.rolling
        self.cursors.append(torch.tensor((rolling.global_end, rolling.local_end)))
        return latent


def _compare_hits(
    cold: _Rollout, warm: _Rollout, latents: list[Tensor], skipped: list[int], comparison: Comparison
) -> None:
    """Ours does the clean pass on a hit: all that follows has the bits of a cold run, and not those of the set."""
    forwards = 0

    def count(_module: Any, _arguments: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = warm.model.register_forward_pre_hook(count)
    try:
        for index, latent in enumerate(latents):
            made = warm.chunk(index, latent if index in skipped else None)
            comparison.equal(f"chunk {index} after a hit and cold", made, latent)
            comparison.equal(f"cursors of chunk {index} after a hit and cold", warm.cursors[index], cold.cursors[index])
    finally:
        handle.remove()
    whole = (len(latents) - len(skipped)) * (len(cold.steps) + 1)
    comparison.equal("forwards", forwards, whole + len(skipped))
    for layer in range(cold.model.config.layers):
        pairs = zip(cold.caches.rolling.ordered(layer), warm.caches.rolling.ordered(layer), strict=True)
        for name, (ours, other) in zip(("keys", "values"), pairs, strict=True):
            comparison.equal(f"{name} of layer {layer} after a hit and cold", other, ours)


def _compare_estimates(recorded: dict[str, Tensor], sigmas: list[float], comparison: Comparison) -> None:
    for k, sigma in enumerate(sigmas):
        clean = clean_estimate(recorded["model_input"][:, k], recorded["flow"][:, k], sigma)
        comparison.close(f"x0 of step {k}", clean, recorded["x0"][:, k], 1e-6)
