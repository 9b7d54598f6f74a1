"""The causal video VAE of Wan 2.1 as two streams: frames to latents, and latents to frames, piece by piece.

The network is diffusers' `AutoencoderKLWan`. Each of its causal convolutions needs the last two frames that it saw; the
library keeps them on the model, so that only one clip can be in work. Here they are a `FeatureCache` that belongs to one
stream, and the network itself keeps nothing: any number of streams interleave on one model.

Every latent frame goes through the network alone (1 pixel frame for the first, 4 for each later one), so the result
doesn't depend on how a clip is cut into pieces, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .config import VaeConfig as VaeConfig
from .vae_cache import FeatureCache as FeatureCache
from .vae_cpu import NarrowOnCpu
from .vae_keys import diffusers_name, is_original


class _Half(nn.Module):
    """What encoder and decoder share: the network, its 1x1 convolution, the latents' statistics."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: VaeConfig, network: nn.Module, quant: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.network = network
        self.quant = quant
        per_channel = (1, config.z_dim, 1, 1, 1)
        self.register_buffer("mean", torch.tensor(config.latents_mean).view(per_channel), persistent=False)
        self.register_buffer("std", torch.tensor(config.latents_std).view(per_channel), persistent=False)
        self._slots = sum(isinstance(module, nn.Conv3d) for module in network.modules())
        self.requires_grad_(False).eval()

    def new_cache(self) -> FeatureCache:
        """An empty cache for one stream."""
        return FeatureCache(self._slots)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype

    def _fast(self) -> AbstractContextManager[Any]:
        return NarrowOnCpu() if self.mean.device.type == "cpu" else nullcontext()


class VaeEncoder(_Half):
    """Frames to normalised latents (the posterior's mean, without sampling), as a stream."""

    @torch.inference_mode()
    def forward(
        self, frames: Tensor, cache: FeatureCache, *, is_first: bool, is_last: bool = False, watch: bool = False
    ) -> Tensor:
        """Encode the next piece of a clip.

        Args:
            frames: [1, 3, T, H, W] in [-1, 1]; T is 1 + 4k in the first piece and 4k, k >= 1, in later ones; H and W
                are multiples of 8.
            cache: the stream's cache, from `new_cache`.
            is_first: the clip begins here.
            is_last: nothing follows.
            watch: find out whether the piece's last latent frame left the cache as it was, for `FeatureCache.still`.

        Returns:
            Latents [1, z_dim, 1 + k or k, H/8, W/8], float32: `(mean - latents_mean) / latents_std`.

        Raises:
            ValueError: another shape or count of frames.
            RuntimeError: the piece is out of order.
        """
        self._check(frames, is_first=is_first)
        cache.enter(is_first=is_first)
        stride = self.config.temporal
        ones = [1] if is_first else []
        pieces = torch.split(frames, ones + [stride] * (frames.shape[2] // stride), dim=2)
        dtype = self._dtype
        with self._fast():
            moments = [self.quant(cache.step(self.network, piece.to(dtype), watch=watch)).float() for piece in pieces]
        cache.started, cache.ended = True, is_last
        mean = torch.cat(moments, dim=2)[:, : self.config.z_dim]
        return self.normalise(mean)

    def normalise(self, latents: Tensor) -> Tensor:
        """Take the training data's mean off each channel and divide by its standard deviation."""
        return (latents - self.mean) / self.std

    def _check(self, frames: Tensor, *, is_first: bool) -> None:
        spatial, temporal = self.config.spatial, self.config.temporal
        shape = list(frames.shape)
        if frames.ndim != 5 or shape[0] != 1 or shape[1] != 3:
            raise ValueError(f"frames have shape {shape}; accepted: [1, 3, T, H, W]")
        count, height, width = shape[2:]
        if not height or not width or height % spatial or width % spatial:
            raise ValueError(f"frames are {height}x{width} pixels; accepted: multiples of {spatial} in both directions")
        if is_first and (count < 1 or (count - 1) % temporal):
            raise ValueError(
                f"the first piece has {count} frames; accepted: 1 + {temporal}*k, such as 1 or {1 + temporal}"
            )
        if not is_first and (count < 1 or count % temporal):
            raise ValueError(f"a later piece has {count} frames; accepted: multiples of {temporal}, from {temporal} on")


class VaeDecoder(_Half):
    """Normalised latents to frames, as a stream."""

    @torch.inference_mode()
    def forward(self, latents: Tensor, cache: FeatureCache, *, is_first: bool, is_last: bool = False) -> Tensor:
        """Decode the next piece of a clip.

        Args:
            latents: [1, z_dim, T, h, w], normalised, T >= 1.
            cache: the stream's cache, from `new_cache`.
            is_first: the clip begins here.
            is_last: nothing follows.

        Returns:
            Frames [1, 3, 1 + 4 * (T - 1) or 4 * T, 8h, 8w], float32, clamped to [-1, 1].

        Raises:
            ValueError: another shape.
            RuntimeError: the piece is out of order.
        """
        shape = list(latents.shape)
        if latents.ndim != 5 or shape[:2] != [1, self.config.z_dim] or 0 in shape:
            raise ValueError(f"latents have shape {shape}; accepted: [1, {self.config.z_dim}, T, h, w], nothing empty")
        cache.enter(is_first=is_first)
        raw = self.denormalise(latents.float()).to(self._dtype)
        frames = []
        with self._fast():
            for at, latent in enumerate(torch.split(raw, 1, dim=2)):
                frame = cache.step(self.network, self.quant(latent), first_chunk=is_first and at == 0)
                frames.append(frame.float().clamp(-1.0, 1.0))
        cache.started, cache.ended = True, is_last
        return torch.cat(frames, dim=2)

    def denormalise(self, latents: Tensor) -> Tensor:
        """The inverse of `VaeEncoder.normalise`."""
        return latents * self.std + self.mean


def vae_network(config: VaeConfig) -> Any:
    """An `AutoencoderKLWan` of diffusers of these sizes, with the library's own initial weights."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    network: Any = AutoencoderKLWan  # its constructor carries no types
    return network(
        base_dim=config.dim,
        z_dim=config.z_dim,
        dim_mult=list(config.dim_mult),
        num_res_blocks=config.num_res_blocks,
        temperal_downsample=list(config.temporal_downsample),
        latents_mean=list(config.latents_mean),
        latents_std=list(config.latents_std),
    )


def load_state(network: Any, config: VaeConfig, state: Mapping[str, Tensor]) -> None:
    """Load weights that carry diffusers' names or those of the original Wan 2.1 checkpoint.

    Raises:
        ValueError: a weight is missing, unknown or of another shape.
    """
    named = {diffusers_name(key, config): value for key, value in state.items()} if is_original(state) else dict(state)
    own = network.state_dict()
    missing, unknown = sorted(own.keys() - named.keys()), sorted(named.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            f"the VAE's weights don't fit its sizes: {len(missing)} missing ({', '.join(missing[:3]) or 'none'}), "
            f"{len(unknown)} unknown ({', '.join(unknown[:3]) or 'none'})"
        )
    for key, value in named.items():
        if value.shape != own[key].shape:
            raise ValueError(f"the VAE's {key} has shape {list(value.shape)}; its sizes need {list(own[key].shape)}")
    network.load_state_dict(named)


def encoder_of(network: Any, config: VaeConfig) -> VaeEncoder:
    """The encoding half of an `AutoencoderKLWan`; the other half isn't kept alive by it."""
    return VaeEncoder(config, network.encoder, network.quant_conv)


def decoder_of(network: Any, config: VaeConfig) -> VaeDecoder:
    """The decoding half of an `AutoencoderKLWan`; the other half isn't kept alive by it."""
    return VaeDecoder(config, network.decoder, network.post_quant_conv)


def cache_bytes(config: VaeConfig, half: Literal["encoder", "decoder"], height: int, width: int) -> int:
    """Memory that one stream's `FeatureCache` takes in float32 once it is full, in bytes, for frames of that size.

    Every 3x3x3 convolution remembers two frames of its input; a temporal downsampling one.
    """
    levels = len(config.dim_mult)
    widths = [config.dim * mult for mult in config.dim_mult]
    values = 0
    for level, dim in enumerate(widths):
        area = (height >> level) * (width >> level)
        if half == "encoder":
            before = widths[level - 1] if level else config.dim
            values += 2 * area * (before + dim * (2 * config.num_res_blocks - 1))
            if level < levels - 1 and config.temporal_downsample[level]:
                values += (height >> level + 1) * (width >> level + 1) * dim
            continue
        # Going up halves the channels, so a level's first block takes half of what the level below had.
        before = dim if level == levels - 1 else widths[level + 1] // 2
        values += 2 * area * (before + dim * (2 * config.num_res_blocks + 1))
        if level > 0 and config.temporal_downsample[level - 1]:
            values += 2 * area * dim
    area = (height >> (levels - 1)) * (width >> (levels - 1))
    values += 2 * area * widths[-1] * 4
    if half == "encoder":
        values += 2 * (height * width * 3 + area * widths[-1])
    else:
        values += 2 * (area * config.z_dim + height * width * widths[0])
    return values * 4
