"""What the world model is conditioned on: the latents of the clip [image, grey, grey, ...], chunk by chunk.

The clip is never made as a whole. Chunk 0 encodes the image and grey frames after it, every later chunk grey frames
alone, through the one feature cache of the session; so the condition of a chunk depends on the image only as far as
the encoder remembers it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..wan.vae import FeatureCache, VaeEncoder

MASK_CHANNELS = 4
"""One per pixel frame of a latent frame; all say the same: 1 where the frame is given, 0 where it is to be made."""


class ConditionStream:
    """The condition of one session.

    Args:
        encoder: the VAE's encoder; it is shared, the stream has a cache of its own.
        image: the first frame, [1, 3, H, W] in about [-1, 1] at the output size, on the encoder's device.
        chunk_size: latent frames per chunk.
    """

    def __init__(self, encoder: VaeEncoder, image: Tensor, chunk_size: int) -> None:
        """Keep the image until chunk 0 is encoded."""
        self._encoder = encoder
        self._image: Tensor | None = image
        self._blank = image.new_zeros(()).expand(1, 3, 1, *image.shape[-2:])
        self._chunk_size = chunk_size
        self._cache: FeatureCache = encoder.new_cache()
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._cache.nbytes + (0 if self._image is None else self._image.nbytes)

    def chunk(self, index: int, *, is_last: bool = False) -> Tensor:
        """The condition of chunk `index`; chunks come in order, each once.

        Returns:
            [1, 4 + 16, chunk_size, H/8, W/8], float32: mask channels, then normalised latents. Padding frames are 0.0,
            which is mid grey.

        Raises:
            RuntimeError: another chunk is due, or the last one is through.
        """
        if index != self._next:
            reason = " (the image was dropped after chunk 0)" if index == 0 else ""
            raise RuntimeError(f"the condition of chunk {index} was asked for, chunk {self._next} is due{reason}")
        frames = self._frames(first=index == 0)
        latents: Tensor = self._encoder(frames, self._cache, is_first=index == 0, is_last=is_last)
        self._image = None
        self._next += 1
        mask = condition_mask(latents, first=index == 0)
        return torch.cat([mask, latents], dim=1)

    def _frames(self, *, first: bool) -> Tensor:
        stride = self._encoder.config.temporal
        count = 1 + stride * (self._chunk_size - 1) if first else stride * self._chunk_size
        if not first:
            return self._blank.expand(-1, -1, count, -1, -1)
        assert self._image is not None
        return torch.cat([self._image.unsqueeze(2), self._blank.expand(-1, -1, count - 1, -1, -1)], dim=2)


def condition_mask(latents: Tensor, *, first: bool) -> Tensor:
    """The mask [1, 4, T, h, w] beside latents [1, C, T, h, w]: 1 on the very first latent frame of a session, else 0."""
    mask = latents.new_zeros((latents.shape[0], MASK_CHANNELS, *latents.shape[2:]))
    if first:
        mask[:, :, 0] = 1.0
    return mask
