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
    pixels = check_image(image)
    scaled = (pixels.permute(2, 0, 1).to(torch.float32) / 255 - 0.5) / 0.5
    return F.interpolate(scaled[None], size=(height, width), mode="bicubic", align_corners=False)[0]


def check_image(image: np.ndarray | Tensor) -> Tensor:
    """The picture as a tensor, without a copy, if it is an RGB picture.

    Raises:
        RequestError: it has another shape or dtype.
    """
    pixels = torch.as_tensor(image)
    if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.numel() == 0:
        raise RequestError(
            "image", f"is {pixels.dtype} {list(pixels.shape)}; accepted: uint8 [rows, columns, 3], red green blue"
        )
    return pixels


def frames_to_bytes(frames: Tensor) -> Tensor:
    """Decoded frames as pictures.

    Args:
        frames: [3, frames, rows, columns] in [-1, 1]; what lies outside is clamped.

    Returns:
        uint8 [frames, rows, columns, 3]; truncated, not rounded.
    """
    unit = (frames.to(torch.float32) / 2 + 0.5).clamp(0, 1)
    return (unit * 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def _positive_integer(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(field, f"{value!r} is not a positive integer")
