"""Keys of latents: a hash chain over everything that a chunk's latent is a function of.

The first link stands for a session before its first chunk: weights, image, prompt, seed, camera, sizes, sampler, kind of
device, versions. Each chunk adds its control as it is applied, and the places of the key/value cache that it writes and
reads. These are all that window, sink, attention limit and length of the session do to a chunk: as long as they agree,
two sessions share the latents of a common beginning, whatever their limits are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..device import arithmetic
from .config import WorldConfig
from .dit import WorldDiT
from .kv_cache import RollingCache, Slots
from .request import WorldRequest

NUMERICS = 1
"""Version of this code's arithmetic: to be raised by whoever moves a bit of a latent or of a seeded weight."""

_LINE_BYTES = 64
"""The CPU's matrix kernels may round differently for buffers that lie differently towards lines of its cache."""


def source_digest(config: WorldConfig, weights: str, device: torch.device, image: Tensor, prompt: str) -> bytes:
    """What a session's conditions and its prompt embedding are a function of, beside the sizes that denoise knows.

    Args:
        config: of the model.
        weights: what tells the weights of VAE and text encoder from others.
        device: where the two are.
        image: the session's picture, as it was given.
        prompt: as it was given.
    """
    return _digest(
        {
            "numerics": NUMERICS,
            "arithmetic": arithmetic(device, "diffusers", "transformers"),
            "weights": weights,
            "vae": asdict(config.vae),
            "text": asdict(config.text),
            "image": image,
            "prompt": prompt,
        }
    )


def first_link(
    config: WorldConfig, weights: str, model: WorldDiT, rolling: RollingCache, asked: WorldRequest, source: bytes
) -> bytes:
    """The link of a session before its first chunk.

    Args:
        config: of the model.
        weights: what tells the weights of the DiT from others.
        model: the DiT, in the dtype of the session.
        rolling: the session's cache.
        asked: the session's request.
        source: the `source_digest` that encode handed out.
    """
    backend = model.attention_backend
    return _digest(
        {
            "numerics": NUMERICS,
            "arithmetic": arithmetic(model.device, *(["flash_attn"] if backend == "flash" else [])),
            "attention": backend,
            "ulysses": config.dit.heads // rolling.heads,
            "dtype": str(model.dtype),
            "weights": weights,
            "dit": asdict(config.dit),
            "keyboard": asdict(config.keyboard),
            "chunk_size": config.chunk_size,
            "steps": [asdict(step) for step in asked.steps],
            "source": source,
            "prompt": asked.prompt,
            "seed": asked.seed,
            "size": [asked.geometry.height, asked.geometry.width],
            "intrinsics": asked.camera.intrinsics,
            "calibration": [asked.camera.calibration_height, asked.camera.calibration_width],
            "layer": rolling.layer_bytes % _LINE_BYTES,
        }
    )


def next_link(link: bytes, control: Mapping[str, Any], slots: Slots) -> bytes:
    """The link of a chunk, which is the key of its latent.

    Args:
        link: of the chunk before, or the first one.
        control: as the chunk applies it; of keys neither order nor repetition counts.
        slots: where the chunk's tokens are written, and what they attend to.
    """
    keys, norm = control.get("keys"), control.get("translation_norm")
    return _digest(
        {
            "before": link,
            "keys": None if keys is None else sorted(set(keys)),
            "reset_pose": bool(control.get("reset_pose")),
            "poses": control.get("poses"),
            "intrinsics": control.get("intrinsics"),
            "action": control.get("action"),
            "translation_norm": None if norm is None else float(norm),
            "write": slots.write,
            "read": slots.read,
        }
    )


def _digest(value: Any) -> bytes:
    hashed = hashlib.blake2b(digest_size=32)
    _feed(hashed, value)
    return hashed.digest()


def _feed(hashed: hashlib.blake2b, value: Any) -> None:
    """Feed a value so that no two different ones feed the same bytes: each part has its kind and its length in front."""
    if value is None or isinstance(value, bool):
        _part(hashed, "plain", str(value).encode())
    elif isinstance(value, int):
        _part(hashed, "integer", str(value).encode())
    elif isinstance(value, float):
        _part(hashed, "number", struct.pack("<d", value))
    elif isinstance(value, str):
        _part(hashed, "text", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        _part(hashed, "bytes", value)
    elif isinstance(value, Tensor):
        _part(hashed, f"tensor {value.dtype} {list(value.shape)}", _content(value))
    elif isinstance(value, np.ndarray):
        _part(hashed, f"array {value.dtype.str} {list(value.shape)}", value.tobytes())
    elif isinstance(value, Mapping):
        _part(hashed, "mapping", str(len(value)).encode())
        for name in sorted(value):
            _feed(hashed, name)
            _feed(hashed, value[name])
    elif isinstance(value, Sequence):
        _part(hashed, "sequence", str(len(value)).encode())
        for each in value:
            _feed(hashed, each)
    else:
        raise TypeError(f"a {type(value).__name__} can't be part of a key")


def _part(hashed: hashlib.blake2b, kind: str, content: bytes) -> None:
    hashed.update(f"{kind}:{len(content)}:".encode())
    hashed.update(content)


def _content(tensor: Tensor) -> bytes:
    content: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content
