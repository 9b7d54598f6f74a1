"""Keys of latents: everything that moves a bit moves the key, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from reelwire.pipeline.world.config import WorldConfig, tiny
from reelwire.pipeline.world.dit import WorldDiT, random_world_dit
from reelwire.pipeline.world.keyboard import KeyboardParameters
from reelwire.pipeline.world.kv_cache import RollingCache, Slots
from reelwire.pipeline.world.latent_key import first_link, next_link, source_digest
from reelwire.pipeline.world.request import WorldRequest

CPU = torch.device("cpu")
SLOTS = Slots(write=((0, 6),), read=((0, 6),))
POSES = torch.eye(4).repeat(3, 1, 1)


@pytest.fixture(scope="module")
def models() -> Mapping[str, WorldDiT]:
    dit = tiny().dit
    return {
        "plain": random_world_dit(dit, 7),
        "bfloat16": random_world_dit(dit, 7, dtype=torch.bfloat16),
        "reference": random_world_dit(dit, 7, backend="reference"),
    }


def link_of(
    models: Mapping[str, WorldDiT],
    *,
    config: WorldConfig | None = None,
    weights: str = "seed 7",
    model: str = "plain",
    source: bytes = b"source",
    chunks: int = 4,
    size: tuple[int, int] = (30, 50),
    heads: int = 4,
    **given: Any,
) -> bytes:
    """The first link of a session with this request."""
    config = tiny() if config is None else config
    asked = WorldRequest.of(config, chunks, {"prompt": "a bridge", "area": 32 * 48, "window": -1, **given}, *size)
    layout = asked.limits.layout(asked.geometry.frame_tokens, asked.latent_frames)
    rolling = RollingCache(layout, layers=2, heads=heads, head_dim=24, dtype=torch.float32, device=CPU)
    return first_link(config, weights, models[model], rolling, asked, source)


def test_streaming_28_what_a_session_is_made_of_moves_its_key(models: Mapping[str, WorldDiT]) -> None:
    """Weights, source, prompt, seed, sizes, camera, sampler, dtype, attention and degree each give another first link."""
    base = link_of(models)
    others = {
        "weights": link_of(models, weights="seed 8"),
        "source": link_of(models, source=b"other"),
        "dtype": link_of(models, model="bfloat16", dtype="bfloat16"),
        "attention": link_of(models, model="reference"),
        "degree": link_of(models, heads=2),
        "prompt": link_of(models, prompt="a brook"),
        "seed": link_of(models, seed=1),
        "shift": link_of(models, shift=5.0),
        "timesteps": link_of(models, config=replace(tiny(), timestep_indices=(0, 179, 358))),
        "keyboard": link_of(models, config=replace(tiny(), keyboard=KeyboardParameters(move_step=0.1))),
        "chunk size": link_of(models, config=tiny(2)),
        "control": link_of(models, config=tiny(3, "act")),
        "area": link_of(models, area=48 * 64),
        "image size": link_of(models, size=(60, 100)),
        "intrinsics": link_of(models, intrinsics=torch.tensor([300.0, 300.0, 416.0, 240.0])),
        "calibration": link_of(
            models,
            intrinsics=torch.tensor([300.0, 300.0, 416.0, 240.0]),
            calibration_width=640,
            calibration_height=480,
        ),
    }
    assert len({base, *others.values()}) == 1 + len(others)


def test_streaming_28_what_moves_no_bit_moves_no_key(models: Mapping[str, WorldDiT]) -> None:
    """Length and limits of a session count by the places that a chunk writes and reads, and not here; nor does a name."""
    base = link_of(models)
    assert link_of(models) == base
    assert link_of(models, chunks=9) == base
    assert link_of(models, window=6, sink=1) == base
    assert link_of(models, config=replace(tiny(), window=9, model="other")) == base


def test_streaming_28_what_encode_alone_knows_moves_its_digest() -> None:
    """Image, its shape, prompt, and the weights and sizes of VAE and text encoder."""
    image = torch.zeros(4, 6, 3, dtype=torch.uint8)
    config = tiny()
    changed = image.clone()
    changed[3, 5, 2] = 1
    digests = [
        source_digest(config, "seed 7", CPU, image, "x"),
        source_digest(config, "seed 8", CPU, image, "x"),
        source_digest(config, "seed 7", CPU, changed, "x"),
        source_digest(config, "seed 7", CPU, image.reshape(6, 4, 3), "x"),
        source_digest(config, "seed 7", CPU, image, "y"),
        source_digest(replace(config, vae=replace(config.vae, dim=4)), "seed 7", CPU, image, "x"),
        source_digest(replace(config, text=replace(config.text, layers=1)), "seed 7", CPU, image, "x"),
    ]
    assert len(set(digests)) == len(digests)
    assert source_digest(config, "seed 7", CPU, image.clone(), "x") == digests[0]


def test_streaming_28_a_control_moves_the_key_of_its_chunk() -> None:
    """By content, bytes and dtype; and so do the link before it, and the places in the cache."""
    poses = POSES.clone()
    poses[2, 0, 3] = 1e-6
    controls: list[dict[str, Any]] = [
        {"keys": []},
        {"keys": ["w"]},
        {"keys": ["w", "l"]},
        {"keys": ["w"], "reset_pose": True},
        {"poses": POSES},
        {"poses": poses},
        {"poses": POSES.double()},
        {"poses": POSES, "translation_norm": 0.0},
        {"poses": POSES, "translation_norm": 0.5},
        {"poses": POSES, "intrinsics": torch.ones(4)},
        {"poses": POSES, "action": torch.zeros(3, 4)},
        {"poses": POSES, "action": torch.ones(3, 4)},
        {"poses": POSES, "reset_pose": True},
    ]
    links = [next_link(b"before", control, SLOTS) for control in controls]
    links.append(next_link(b"other", controls[0], SLOTS))
    links.append(next_link(b"before", controls[0], Slots(((6, 12),), SLOTS.read)))
    links.append(next_link(b"before", controls[0], Slots(SLOTS.write, ((0, 3), (4, 6)))))
    assert len(set(links)) == len(links)


def test_streaming_28_a_control_is_compared_as_it_is_applied() -> None:
    """Order and repetition of keys don't count, nor whether what isn't there is left out, nor where bytes lie."""
    base = next_link(b"x", {"keys": ["w", "l"]}, SLOTS)
    assert next_link(b"x", {"keys": ["l", "w", "w"], "reset_pose": False, "poses": None}, SLOTS) == base
    assert next_link(b"x", {"keys": ("l", "w"), "action": None, "translation_norm": None}, SLOTS) == base
    strided = torch.zeros(3, 4, 8)[..., ::2] + POSES
    assert next_link(b"x", {"poses": strided}, SLOTS) == next_link(b"x", {"poses": POSES}, SLOTS)
    assert next_link(b"x", {"poses": POSES, "translation_norm": 2}, SLOTS) == next_link(
        b"x", {"poses": POSES, "translation_norm": np.float32(2.0)}, SLOTS
    )


def test_streaming_28_parts_of_a_key_do_not_run_into_each_other() -> None:
    """Values are fed with kind and length, so texts that join to the same text give different keys."""
    image = torch.zeros(1, 1, 3, dtype=torch.uint8)
    assert source_digest(tiny(), "ab", CPU, image, "c") != source_digest(tiny(), "a", CPU, image, "bc")
    assert next_link(b"x", {"keys": ["ab"]}, SLOTS) != next_link(b"x", {"keys": ["a", "b"]}, SLOTS)
    with pytest.raises(TypeError, match="can't be part of a key"):
        next_link(b"x", {"poses": object()}, SLOTS)
