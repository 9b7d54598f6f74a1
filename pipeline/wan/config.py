"""Sizes of the Wan parts that both models use: the video VAE and the UMT5 text encoder. No torch."""

from __future__ import annotations

from dataclasses import dataclass

_LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
_LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VaeConfig:
    """Sizes of the causal video VAE; the defaults are the Wan 2.1 checkpoint's.

    Attributes:
        dim: channels at full resolution.
        z_dim: latent channels.
        dim_mult: channels per level, in units of `dim`, from full resolution down; 4 levels give 8x in space.
        num_res_blocks: residual blocks per level of the encoder; the decoder has one more.
        temporal_downsample: for each step down, whether it also halves time; two of them give 4x.
        latents_mean: mean of each latent channel over the training data, taken off by the encoder.
        latents_std: standard deviation of each latent channel, divided out by the encoder.
    """

    dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = _LATENTS_MEAN
    latents_std: tuple[float, ...] = _LATENTS_STD

    def __post_init__(self) -> None:
        """Refuse sizes that don't fit each other.

        Raises:
            ValueError: they don't; the message names the field.
        """
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(f"temporal_downsample must have {len(self.dim_mult) - 1} entries, one per step down")
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(f"{name} must have {self.z_dim} entries, one per latent channel")

    @property
    def spatial(self) -> int:
        """Pixels per latent column and row."""
        return int(2 ** (len(self.dim_mult) - 1))

    @property
    def temporal(self) -> int:
        """Pixel frames per latent frame after the first one."""
        return int(2 ** sum(self.temporal_downsample))


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Sizes of the UMT5 encoder; the defaults are UMT5-XXL's.

    Attributes:
        dim: width of an embedding.
        text_len: rows of an embedded prompt: longer ones are cut, shorter ones end in rows of zeros.
        vocab_size: entries of the tokenizer's vocabulary.
        layers: encoder layers.
        heads: attention heads per layer.
        head_dim: width of one head.
        ffn_dim: width within a feed-forward block.
    """

    dim: int = 4096
    text_len: int = 512
    vocab_size: int = 256384
    layers: int = 24
    heads: int = 64
    head_dim: int = 64
    ffn_dim: int = 10240
