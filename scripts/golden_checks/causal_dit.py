"""Golden set ``causal_dit``: flows, cursors, final cache contents and intermediate values of a tiny causal DiT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reelwire.pipeline.wan.blocks import rotary_split, rotary_table, rotate
from reelwire.pipeline.world.dit import WorldDiT
from reelwire.pipeline.world.dit_blocks import SessionCaches
from reelwire.pipeline.world.dit_config import WorldDiTConfig
from reelwire.pipeline.world.kv_cache import CacheLimits
from reelwire.pipeline.world.sampler import flow_schedule, select_steps

from .line import Comparison, Entry, Line, over_files, read_index, tensors

ATOL, RTOL = 2e-5, 1e-4


def check(folder: Path) -> Iterator[Line]:
    """Compare every file of the set."""
    return over_files(folder, _compare)


def _compare(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    if "model" in entry:
        _compare_weights(folder, name, entry, comparison)
    elif "sample_shift" in entry:
        _compare_inputs(folder, name, entry, comparison)
    elif "local_attn_size" in entry:
        _compare_case(folder, name, entry, comparison)
    else:
        _compare_probe(folder, name, entry, comparison)


@lru_cache(maxsize=2)
def load_model(path: Path) -> WorldDiT:
    """The model of a weights file, whose folder's index tells what shapes don't; every key must match."""
    entry = read_index(path.parent)["files"][path.name]["model"]
    weights = tensors(path.parent, path.name)
    shapes = {key: tuple(value.shape) for key, value in weights.items()}
    config = WorldDiTConfig.from_shapes(shapes, heads=entry["num_heads"], text_tokens=entry["text_len"])
    with torch.device("meta"):
        model = WorldDiT(replace(config, eps=entry["eps"]))
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def open_case(model: WorldDiT, prompt: Tensor, entry: Entry, x: Tensor) -> SessionCaches:
    """Session caches of a case's policy for latents [chunks, calls, 1, C, F, H, W].

    The attention limit of a case may be a number of tokens that is no number of frames.
    """
    limits = CacheLimits(window=entry["local_attn_size"], sink=entry["sink_size"])
    chunks, frames, height, width = x.shape[0], *x.shape[4:]
    layout = limits.layout(model.frame_tokens(height, width), chunks * frames)
    if entry["max_attention_size"] is not None:
        layout = replace(layout, attention=entry["max_attention_size"])
    return model.open_session(prompt, layout)


def _compare_weights(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    config = load_model((folder / name).resolve()).config
    expected = entry["model"]
    ours = {
        "dim": config.dim,
        "num_layers": config.layers,
        "ffn_dim": config.ffn,
        "text_dim": config.text_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "out_dim": config.out_channels,
        "head_dim": config.head_dim,
        "control_type": config.control,
        "rope_split_channels": dict(zip(("frame", "height", "width"), rotary_split(config.head_dim), strict=True)),
    }
    for field, value in ours.items():
        comparison.equal(field, value, expected[field])


def _compare_inputs(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    recorded = tensors(folder, name)
    steps = select_steps(flow_schedule(entry["sample_shift"]))
    comparison.equal("timesteps", torch.tensor([float(step.timestep) for step in steps] + [0.0]), recorded["timesteps"])
    x = recorded["x"]
    comparison.equal("chunks", (x.shape[0], x.shape[4]), (entry["chunk_count"], entry["chunk_size"]))


@torch.inference_mode()
def _compare_case(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    recorded, inputs = tensors(folder, name), tensors(folder, entry["inputs"])
    model = load_model((folder / entry["weights"]).resolve())
    x = inputs["x"]
    caches = open_case(model, inputs["prompt"], entry, x)
    flows, cursors = torch.empty_like(x), torch.empty((*x.shape[:2], 2), dtype=torch.int64)
    for index in range(x.shape[0]):
        chunk = model.prepare(index, inputs["y"][index], inputs["control"][index])
        for call, timestep in enumerate(inputs["timesteps"].tolist()):
            flows[index, call] = model(x[index, call], timestep, chunk, caches)
            cursors[index, call] = torch.tensor((caches.rolling.global_end, caches.rolling.local_end))
    comparison.close("flow", flows, recorded["flow"], ATOL, RTOL)
    comparison.equal("cursors", cursors, recorded["cursors"])
    comparison.equal("kv_tokens", caches.rolling.layout.capacity, entry["kv_tokens"])
    if "k_final" in recorded:
        rows = [caches.rolling.ordered(layer) for layer in range(model.config.layers)]
        comparison.close("k_final", torch.stack([k for k, _ in rows]), recorded["k_final"], ATOL, RTOL)
        comparison.close("v_final", torch.stack([v for _, v in rows]), recorded["v_final"], ATOL, RTOL)


@torch.inference_mode()
def _compare_probe(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    recorded, inputs = tensors(folder, name), tensors(folder, entry["inputs"])
    model = load_model((folder / entry["weights"]).resolve())
    x, y, control, times = inputs["x"], inputs["y"], inputs["control"], inputs["timesteps"].tolist()
    frames, height, width = x.shape[4:]
    tokens = model.frame_tokens(height, width)
    caches = model.open_session(inputs["prompt"], CacheLimits().layout(tokens, x.shape[0] * frames))
    model(x[0, 4], times[4], model.prepare(0, y[0], control[0]), caches)
    seen: dict[str, Tensor] = {}
    handles = [module.register_forward_hook(_recorder(seen, label)) for label, module in _probed(model).items()]
    try:
        seen["flow"] = model(x[1, 1], times[1], model.prepare(1, y[1], control[1]), caches)
    finally:
        for handle in handles:
            handle.remove()
    seen["t_embed"], seen["t_modulation"] = model.embed_time(times[1])
    seen["patch_tokens"] = model.patch_tokens(torch.cat((x[1, 1], y[1]), 1))
    seen["control_tokens"] = model.control_tokens(control[1])
    seen["context"] = model.embed_prompt(inputs["prompt"])
    table = rotary_table(model.config.head_dim, frames, height // 2, width // 2, start_frame=7)
    seen["rope_out_start7"] = rotate(recorded["rope_in"], table)
    k, v = caches.rolling.ordered(0)
    for label, expected in recorded.items():
        if label in ("k_cache_layer0", "v_cache_layer0"):
            row = k if label.startswith("k") else v
            comparison.close(label, row[:, : expected.shape[1]], expected, ATOL, RTOL)
        elif label != "rope_in":
            comparison.close(label, seen[label], expected, ATOL, RTOL)


def _probed(model: WorldDiT) -> Mapping[str, nn.Module]:
    modules = dict(model.named_modules())
    probed: dict[str, nn.Module] = {}
    for layer in range(model.config.layers):
        probed[f"block{layer}_out"] = modules[f"blocks.{layer}"]
        probed[f"block{layer}_self_attn_out"] = modules[f"blocks.{layer}.self_attn"]
        probed[f"block{layer}_cross_attn_out"] = modules[f"blocks.{layer}.cross_attn"]
    return probed


def _recorder(seen: dict[str, Tensor], label: str) -> Any:
    def record(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen[label] = output

    return record
