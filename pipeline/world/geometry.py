"""Sizes of a world session: pixels, latents, tokens, chunks; and pictures on their way in and out.

A latent frame covers 4 pixel frames and 8 x 8 pixels, the very first one a single pixel frame; a token covers 2 x 2
latent cells. Sizes are given as height, width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reelwire.spec import RequestError

SPATIAL_STRIDE = 8
TEMPORAL_STRIDE = 4
PATCH = 2
SIZE_MULTIPLE = SPATIAL_STRIDE * PATCH
AREA_DEFAULT = 480 * 832


@dataclass(frozen=True, slots=True)
class Geometry:
    """The size of a session's frames.

    Attributes:
        height: pixel rows of the output.
        width: pixel columns of the output.
    """

    height: int
    width: int

    @classmethod
    def of_image(cls, height: int, width: int, area: int = AREA_DEFAULT) -> Geometry:
        """The geometry that a session with this image gets.

        Raises:
            RequestError: the output would have no rows or no columns.
        """
        rows, columns = output_size(height, width, area)
        if min(rows, columns) < SIZE_MULTIPLE:
            raise RequestError(
                "image",
                f"{width} x {height} pixels stretched to an area of {area} give a video of {columns} x {rows}; "
                f"accepted: an aspect ratio and an area that leave at least {SIZE_MULTIPLE} pixels each way",
            )
        return cls(rows, columns)

    @property
    def latent_height(self) -> int:
        """Latent rows."""
        return self.height // SPATIAL_STRIDE

    @property
    def latent_width(self) -> int:
        """Latent columns."""
        return self.width // SPATIAL_STRIDE

    @property
    def frame_tokens(self) -> int:
        """Tokens of one latent frame."""
        return self.latent_height * self.latent_width // (PATCH * PATCH)


@dataclass(frozen=True, slots=True)
class Frames:
    """How long a session is.

    Attributes:
        pixel_frames: frames of the video, ``4 * (latent_frames - 1) + 1``.
        latent_frames: a multiple of the chunk size.
        chunks: number of chunks.
    """

    pixel_frames: int
    latent_frames: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Span:
    """The frames of one chunk, each range without its end.

    Attributes:
        latent_start: its first latent frame.
        latent_end: the latent frame after its last one.
        pixel_start: its first pixel frame.
        pixel_end: the pixel frame after its last one.
    """

    latent_start: int
    latent_end: int
    pixel_start: int
    pixel_end: int


def output_size(height: int, width: int, area: int = AREA_DEFAULT) -> tuple[int, int]:
    """Height and width of the video that an image of this size gives; 0 for an extreme aspect ratio.

    Each side is floored to a multiple of 16 on its own, so the image is stretched a little, and rounding twice costs 832 x
    480 a row of tokens: it gives 832 x 464 (LingBot-World-Fast; kept because the weights saw these sizes).

    Raises:
        RequestError: a number isn't a positive integer.
    """
    for name, value in (("image", height), ("image", width), ("area", area)):
        _positive_integer(name, value)
    aspect = height / width
    rows, columns = (int(math.sqrt(pixels) // SIZE_MULTIPLE) for pixels in (area * aspect, area / aspect))
    return rows * SIZE_MULTIPLE, columns * SIZE_MULTIPLE


def frames_of(pixel_frames: int, chunk_size: int, policy: str = "strict") -> Frames:
    """The length of a session that was asked for in pixel frames.

    Args:
        pixel_frames: a number of the form 4k+1.
        chunk_size: latent frames of a chunk.
        policy: what happens when the last chunk isn't full: ``"strict"`` refuses, ``"truncate"`` drops it.

    Raises:
        RequestError: the number of frames doesn't fit, or leaves no chunk, or a value is of another kind.
    """
    _positive_integer("chunk_size", chunk_size)
    _positive_integer("frames", pixel_frames)
    if policy not in ("strict", "truncate"):
        raise RequestError("policy", f"{policy!r} is not accepted; accepted: strict, truncate")
    if (pixel_frames - 1) % TEMPORAL_STRIDE:
        raise RequestError("frames", f"{pixel_frames} is not a count of the form {TEMPORAL_STRIDE}k+1")
    latents = (pixel_frames - 1) // TEMPORAL_STRIDE + 1
    chunks, rest = divmod(latents, chunk_size)
    if chunks == 0 or (rest and policy == "strict"):
        fewer, more = (_pixel_frames(max(count, 1) * chunk_size) for count in (chunks, chunks + 1))
        raise RequestError(
            "frames",
            f"{pixel_frames} are {latents} latent frames, which don't fill chunks of {chunk_size}; "
            f"accepted: {fewer}" + (f" or {more}" if more != fewer else ""),
        )
    return Frames(_pixel_frames(chunks * chunk_size), chunks * chunk_size, chunks)


def frames_within(seconds: float, fps: float, chunk_size: int) -> Frames:
    """The longest session of whole chunks that isn't longer than a time, but for the first frame.

    Raises:
        RequestError: not even one chunk fits.
    """
    _positive_integer("chunk_size", chunk_size)
    if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(fps) and fps > 0):
        raise RequestError("seconds", f"{seconds} s at {fps} frames per second; accepted: positive numbers")
    latents = math.floor(seconds * fps / TEMPORAL_STRIDE) + 1
    chunks = latents // chunk_size
    if chunks == 0:
        least = (chunk_size - 1) * TEMPORAL_STRIDE / fps
        raise RequestError("seconds", f"{seconds} s hold no chunk of {chunk_size}; accepted: {least:g} s or more")
    return Frames(_pixel_frames(chunks * chunk_size), chunks * chunk_size, chunks)


def span_of(index: int, chunk_size: int) -> Span:
    """The latent and pixel frames of chunk `index`."""
    start, end = index * chunk_size, (index + 1) * chunk_size
    return Span(start, end, _pixel_frames(start), _pixel_frames(end))


def warmup_frames(chunk_size: int) -> int:
    """Pixel frames of the shortest session in which every kind of chunk occurs: the first one and one that follows."""
    return _pixel_frames(2 * chunk_size)


def image_to_tensor(image: np.ndarray | Tensor, height: int, width: int) -> Tensor:
    """An RGB picture as the model takes it.

    Args:
        image: uint8 [rows, columns, 3].
        height: pixel rows of the output.
        width: pixel columns of the output.

    Returns:
        float32 [3, height, width]: scaled to [-1, 1], then stretched with bicubic interpolation (a = -0.75, half-pixel
        centres, no antialiasing). Not clamped: edges may overshoot.

    Raises:
        RequestError: the picture has another shape or dtype.
    """
    pixels = torch.as_tensor(image)
    if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.numel() == 0:
        raise RequestError(
            "image", f"is {pixels.dtype} {list(pixels.shape)}; accepted: uint8 [rows, columns, 3], red green blue"
        )
    scaled = (pixels.permute(2, 0, 1).to(torch.float32) / 255 - 0.5) / 0.5
    return F.interpolate(scaled[None], size=(height, width), mode="bicubic", align_corners=False)[0]


def frames_to_bytes(frames: Tensor) -> Tensor:
    """Decoded frames as pictures.

    Args:
        frames: [3, frames, rows, columns] in [-1, 1]; what lies outside is clamped.

    Returns:
        uint8 [frames, rows, columns, 3]; truncated, not rounded.
    """
    unit = (frames.to(torch.float32) / 2 + 0.5).clamp(0, 1)
    return (unit * 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def _pixel_frames(latents: int) -> int:
    return 0 if latents == 0 else (latents - 1) * TEMPORAL_STRIDE + 1


def _positive_integer(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(field, f"{value!r} is not a positive integer")
