"""What the world model is conditioned on: the latents of the clip [image, grey, grey, ...], chunk by chunk.

The clip is never made as a whole. Chunk 0 encodes the image and grey frames after it, every later chunk grey frames
alone, through the one feature cache of the session; so the condition of a chunk depends on the image only as far as
the encoder remembers it.

It remembers a few seconds. From there on every grey frame finds the cache as the one before it left it, and the condition
is the same for ever. That is found out, not assumed: the first latent frame of each chunk is watched, and when it changes
no bit of the cache, the stream has settled. It needs neither cache nor image any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..wan.vae import FeatureCache, VaeEncoder
from ..wan.vae_cache import same_bits

MASK_CHANNELS = 4
"""One per pixel frame of a latent frame; all say the same: 1 where the frame is given, 0 where it is to be made."""
GEOMETRIES_MAX = 16
"""Geometries whose constant condition is kept for sessions to share."""

Shape = tuple[int, ...]


class Constants:
    """The constant conditions of one encoder, which is the same whatever the image was: one tensor per geometry.

    Not locked: it belongs to one stage actor, whose sessions take turns.
    """

    def __init__(self, most: int = GEOMETRIES_MAX) -> None:
        """Start with none; keep `most` of them, those that were asked for last."""
        self._most = most
        self._of: dict[Shape, Tensor] = {}

    def __len__(self) -> int:
        return len(self._of)

    def shared(self, condition: Tensor) -> Tensor:
        """The tensor that all sessions of this condition's shape hold, if it has the same bits; else the given one."""
        shape = tuple(condition.shape)
        known = self._of.pop(shape, None)
        if known is None or not same_bits(known, condition):
            known = condition
        self._of[shape] = known
        if len(self._of) > self._most:
            del self._of[next(iter(self._of))]
        return known


class ConditionStream:
    """The condition of one session.

    Args:
        encoder: the VAE's encoder; it is shared, the stream has a cache of its own.
        image: the first frame, [1, 3, H, W] in about [-1, 1] at the output size, on the encoder's device.
        chunk_size: latent frames per chunk.
        constants: those of the encoder; None: the stream never settles, and encodes chunk after chunk.
    """

    def __init__(self, encoder: VaeEncoder, image: Tensor, chunk_size: int, constants: Constants | None = None) -> None:
        """Keep the image until chunk 0 is encoded."""
        self._encoder = encoder
        self._image: Tensor | None = image
        self._blank = image.new_zeros(()).expand(1, 3, 1, *image.shape[-2:])
        self._chunk_size = chunk_size
        self._constants = constants
        self._cache: FeatureCache | None = encoder.new_cache()
        self._constant: Tensor | None = None
        self._next = 0
        self._ended = False

    @property
    def nbytes(self) -> int:
        """Memory held for this session alone, in bytes."""
        return sum(held.nbytes for held in (self._cache, self._image) if held is not None)

    @property
    def settled(self) -> bool:
        """Whether the chunk that was made last, and with it every later one, is the constant condition."""
        return self._constant is not None

    def chunk(self, index: int, *, is_last: bool = False) -> Tensor:
        """The condition of chunk `index`; chunks come in order, each once.

        Returns:
            [1, 4 + 16, chunk_size, H/8, W/8], float32: mask channels, then normalised latents. Padding frames are 0.0,
            which is mid grey.

        Raises:
            RuntimeError: another chunk is due, or the last one is through.
        """
        if self._ended:
            raise RuntimeError("the last piece of this stream is through; nothing can follow it")
        if index != self._next:
            reason = " (the image was dropped after chunk 0)" if index == 0 else ""
            raise RuntimeError(f"the condition of chunk {index} was asked for, chunk {self._next} is due{reason}")
        condition = self._first() if index == 0 else self._later()
        self._next, self._ended = index + 1, is_last
        return condition

    def _first(self) -> Tensor:
        assert self._image is not None
        assert self._cache is not None
        grey = self._grey(self._encoder.config.temporal * (self._chunk_size - 1))
        latents = self._encoder(torch.cat([self._image.unsqueeze(2), grey], dim=2), self._cache, is_first=True)
        self._image = None
        return torch.cat([condition_mask(latents, first=True), latents], dim=1)

    def _later(self) -> Tensor:
        if self._constant is None:
            return self._encoded()
        return self._constant.clone()

    def _encoded(self) -> Tensor:
        cache, stride, rest = self._cache, self._encoder.config.temporal, self._chunk_size - 1
        assert cache is not None
        watch = self._constants is not None
        pieces = [self._encoder(self._grey(stride), cache, is_first=False, watch=watch)]
        settled = watch and cache.still
        if settled:
            pieces *= self._chunk_size
        elif rest:
            pieces.append(self._encoder(self._grey(stride * rest), cache, is_first=False))
        latents = torch.cat(pieces, dim=2)
        condition = torch.cat([condition_mask(latents, first=False), latents], dim=1)
        if settled:
            assert self._constants is not None
            self._constant = self._constants.shared(condition.clone())
            self._cache = None
        return condition

    def _grey(self, count: int) -> Tensor:
        return self._blank.expand(-1, -1, count, -1, -1)


def condition_mask(latents: Tensor, *, first: bool) -> Tensor:
    """The mask [1, 4, T, h, w] beside latents [1, C, T, h, w]: 1 on the very first latent frame of a session, else 0."""
    mask = latents.new_zeros((latents.shape[0], MASK_CHANNELS, *latents.shape[2:]))
    if first:
        mask[:, :, 0] = 1.0
    return mask
