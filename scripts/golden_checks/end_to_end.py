"""Golden set ``end_to_end``: whole sessions through the product's own stages, from an image's bytes to frames' bytes.

Weights, prompt embedding and noise are the recorded ones; all else, the stages make themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reelwire.pipeline.device import Lane
from reelwire.pipeline.stage import Stage
from reelwire.pipeline.wan.config import TextConfig
from reelwire.pipeline.wan.vae import decoder_of, encoder_of
from reelwire.pipeline.world.camera import Camera
from reelwire.pipeline.world.config import WorldConfig
from reelwire.pipeline.world.control import Steering, SteeringState, steer
from reelwire.pipeline.world.decode_stage import DecodeStage
from reelwire.pipeline.world.denoise_stage import DenoiseStage
from reelwire.pipeline.world.encode_stage import EncodeStage
from reelwire.pipeline.world.geometry import Geometry, image_to_tensor

from .causal_dit import load_model
from .denoise_rollout import RecordedNoise
from .line import Comparison, Entry, Line, over_files, tensors
from .vae_streaming import network

LATENT_ATOL = 1e-3
VAE_ATOL = 2e-5
CONTROL_ATOL = 2e-6


def check(folder: Path) -> Iterator[Line]:
    """Compare every file of the set."""
    return over_files(folder, _compare)


@dataclass(frozen=True, slots=True)
class _RecordedPrompt:
    embedding: Tensor

    def encode(self, prompt: str) -> Tensor:
        assert prompt
        return self.embedding


def _compare(folder: Path, name: str, entry: Entry, comparison: Comparison) -> None:
    data = tensors(folder, name)
    config, stages = _build(folder, entry, data)
    image, chunks = data["image"], entry["chunk_count"]
    request = {
        "prompt": "recorded",
        "image": image,
        "seed": entry["session_seed"],
        "window": entry["local_attn_size"],
        "sink": entry["sink_size"],
        "attention": _attention(entry),
    }
    handed: dict[str, Any] = {}
    for stage in ("encode", "decode", "denoise"):
        handed.update(stages[stage].initialize("golden", chunks, request, handed).handed)
    comparison.equal("size", (handed["height"], handed["width"]), (entry["height"], entry["width"]))
    picture = image_to_tensor(image, entry["height"], entry["width"])
    comparison.close("image_tensor", picture, data["image_tensor"], 1e-6)

    pictures: list[Tensor] = []
    for index in range(chunks):
        made = _chunk(stages, index, chunks, entry["keys_per_chunk"][index])
        comparison.close(f"condition of chunk {index}", made["condition"], data["condition"][index], VAE_ATOL)
        comparison.close(f"latent of chunk {index}", made["latent"], data["latents"][index], LATENT_ATOL)
        pictures.append(made["frames"])
    comparison.equal("frames_per_chunk", [len(frames) for frames in pictures], entry["frames_per_chunk"])
    comparison.close("frames_uint8", torch.cat(pictures).int(), data["frames_uint8"].int(), 1.0)
    _compare_control(config, entry, data, comparison)
    _compare_frames(folder, entry, data, comparison)


def _attention(entry: Entry) -> int:
    """The limit in latent frames, as a request says it; -1 when all that the cache holds is seen."""
    limit = entry["max_attention_size"]
    return -1 if limit in (None, entry["kv_tokens"]) else int(limit // entry["frame_tokens"])


def _build(folder: Path, entry: Entry, data: Mapping[str, Tensor]) -> tuple[WorldConfig, dict[str, Stage]]:
    model = load_model((folder / entry["dit_weights"]).resolve())
    vae, vae_config = network(folder, entry["vae_weights"])
    config = WorldConfig(
        model="golden",
        dit=model.config,
        vae=vae_config,
        text=TextConfig(dim=model.config.text_dim, text_len=model.config.text_tokens),
        weights_seed=0,
        chunk_size=entry["chunk_size"],
        area=entry["max_area"],
        sample_shift=entry["sample_shift"],
        timestep_indices=tuple(entry["timestep_indices"]),
        dtypes=("float32",),
    )
    lane = Lane("cpu")
    noise = RecordedNoise(data["initial_noise"], data["renoise"])
    stages: dict[str, Stage] = {
        "encode": EncodeStage(config, encoder_of(vae, vae_config), _RecordedPrompt(data["prompt"]), lane),
        "denoise": DenoiseStage(config, lambda _dtype: model, lane, lambda _seed, _shape, _device: noise),
        "decode": DecodeStage(config, decoder_of(vae, vae_config), lane),
    }
    return config, stages


def _chunk(stages: Mapping[str, Stage], index: int, chunks: int, keys: list[str]) -> dict[str, Tensor]:
    """All that one chunk gives, artifact name to its one tensor."""
    artifacts: dict[str, Any] = {"encode_request": {}, "control": {"keys": keys, "reset_pose": False}}
    for stage in ("encode", "denoise", "decode"):
        result = stages[stage].run("golden", index, artifacts, is_first=index == 0, is_last=index == chunks - 1)
        artifacts.update(result.outputs)
    return {name: artifacts[name][name] for name in ("condition", "latent", "frames")}


def _compare_control(config: WorldConfig, entry: Entry, data: Mapping[str, Tensor], comparison: Comparison) -> None:
    height, width = data["image"].shape[:2]
    camera = Camera.of_session(Geometry(entry["height"], entry["width"]), height, width)
    steering, state = Steering(config.control, camera, config.chunk_size), SteeringState()
    for index, keys in enumerate(entry["keys_per_chunk"]):
        steered = steer(steering, state, {"keys": keys})
        state = steered.state
        if f"control_chunk{index}" in data:
            expected = data[f"control_chunk{index}"]
            comparison.close(f"control of chunk {index}", steered.tensor, expected, CONTROL_ATOL)


def _compare_frames(folder: Path, entry: Entry, data: Mapping[str, Tensor], comparison: Comparison) -> None:
    """The recorded float frames, decoded from the recorded latents: ``frames_chunkN`` or ``frames_chunkN_firstM``."""
    decoder = decoder_of(*network(folder, entry["vae_weights"]))
    cache = decoder.new_cache()
    for index, latents in enumerate(data["latents"]):
        frames = decoder(latents, cache, is_first=index == 0)[0]
        for field in (name for name in data if name.split("_")[:2] == ["frames", f"chunk{index}"]):
            expected = data[field]
            comparison.close(field, frames[:, : expected.shape[1]], expected, VAE_ATOL)
