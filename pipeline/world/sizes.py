"""How much memory a session takes at each stage: known before any of it is made, with what to ask less of."""

from __future__ import annotations

import torch

from reelwire.spec import RequestError

from ..wan.vae import cache_bytes
from .config import WorldConfig
from .dit import session_bytes
from .request import WorldRequest


def encode_bytes(config: WorldConfig, height: int, width: int, most: int | None = None) -> int:
    """Feature cache and image of a session whose frames have this size, in bytes.

    Raises:
        RequestError: it is above `most`.
    """
    needed = cache_bytes(config.vae, "encoder", height, width) + 3 * 4 * height * width
    _check_area(needed, most, height, width)
    return needed


def decode_bytes(config: WorldConfig, height: int, width: int, most: int | None = None) -> int:
    """Feature cache of a session whose frames have this size, in bytes.

    Raises:
        RequestError: it is above `most`.
    """
    needed = cache_bytes(config.vae, "decoder", height, width)
    _check_area(needed, most, height, width)
    return needed


def denoise_bytes(config: WorldConfig, asked: WorldRequest, most: int, world: int = 1) -> int:
    """Keys and values of a session and of its prompt, in bytes, at each of the `world` ranks that share its heads.

    Raises:
        RequestError: it is above `most`: ``window`` is at fault, or ``sink`` when no window could hold it with a chunk,
            or ``area`` when not even a chunk fits.
    """
    dtype, tokens = getattr(torch, asked.dtype), asked.geometry.frame_tokens
    capacity = asked.limits.layout(tokens, asked.latent_frames).capacity
    needed = session_bytes(config.dit, capacity, dtype, world)
    if needed <= most:
        return needed
    prompt = session_bytes(config.dit, 0, dtype, world)
    frame = session_bytes(config.dit, tokens, dtype, world) - prompt
    fit, chunk, sink = (most - prompt) // frame, config.chunk_size, asked.limits.sink
    pixels = f"of {asked.geometry.height} x {asked.geometry.width} pixels"
    if fit < chunk:
        least = _size(prompt + chunk * frame)
        reason = f"the {chunk} latent frames of a chunk {pixels} take {least} of cache"
        raise RequestError("area", f"{reason}; accepted at this worker: what takes up to {_size(most)}")
    if fit < sink + chunk:
        reason = f"{sink} latent frames {pixels} and a chunk take {_size(prompt + (sink + chunk) * frame)} of cache"
        raise RequestError("sink", f"{reason}, this worker has {_size(most)}; accepted: up to {fit - chunk}")
    whole = asked.limits.window < 0
    held = f"{capacity // tokens} latent frames {pixels}{' (the whole session)' if whole else ''}"
    reason = f"{held} take {_size(needed)} of cache, this worker has {_size(most)}; accepted: {sink + chunk} to {fit}"
    raise RequestError("window", reason + (f", or -1 in a session of up to {fit // chunk} chunks" if whole else ""))


def _check_area(needed: int, most: int | None, height: int, width: int) -> None:
    if most is not None and needed > most:
        reason = f"frames of {height} x {width} pixels take {_size(needed)} of cache"
        raise RequestError("area", f"{reason}; accepted at this worker: what takes up to {_size(most)}")


def _size(nbytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} bytes"
