"""Sizes of world sessions, and pictures in and out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from reelwire.pipeline.world.geometry import (
    Geometry,
    frames_to_bytes,
    image_to_tensor,
    output_size,
)
from reelwire.spec import RequestError


def refused(call: Callable[[], object], field: str) -> str:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.field == field
    return caught.value.reason


def test_a_landscape_picture_of_the_default_area_loses_a_row_of_tokens() -> None:
    """Rounding twice gives 832 x 464 for a picture of 832 x 480, while the upright one keeps its size."""
    assert output_size(480, 832) == (464, 832)
    assert output_size(832, 480) == (832, 480)


@pytest.mark.parametrize("height", [31, 240, 480, 1080])
@pytest.mark.parametrize("width", [57, 240, 832, 1921])
def test_output_sizes_are_whole_tokens_within_the_area(height: int, width: int) -> None:
    """Both sides are multiples of 16, and the area isn't exceeded."""
    rows, columns = output_size(height, width, 100_000)
    assert rows % 16 == columns % 16 == 0
    assert rows * columns <= 100_000


def test_an_extreme_picture_is_refused_for_a_session() -> None:
    """The bare function gives 0, a session says why it can't be."""
    assert output_size(1, 10_000) == (0, 63184)
    assert "63184 x 0" in refused(lambda: Geometry.of_image(1, 10_000), "image")
    refused(lambda: Geometry.of_image(0, 100), "image")
    refused(lambda: Geometry.of_image(100, 100, area=-5), "area")


def test_a_geometry_counts_latents_and_tokens() -> None:
    """A latent cell is 8 x 8 pixels, a token 2 x 2 cells."""
    geometry = Geometry.of_image(832, 480)
    assert (geometry.height, geometry.width) == (832, 480)
    assert (geometry.latent_height, geometry.latent_width, geometry.frame_tokens) == (104, 60, 1560)


def test_a_picture_is_scaled_to_minus_one_to_one() -> None:
    """Without a change of size pixels map one to one: 0 to -1, 255 to 1, channels first."""
    image = np.zeros((16, 32, 3), dtype=np.uint8)
    image[..., 1] = 255
    tensor = image_to_tensor(image, 16, 32)
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, torch.tensor([-1.0, 1.0, -1.0])[:, None, None].expand(3, 16, 32))


def test_stretching_may_overshoot() -> None:
    """Bicubic interpolation of a hard edge leaves [-1, 1] and isn't clamped."""
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    image[:, 4:] = 255
    tensor = image_to_tensor(image, 16, 32)
    assert tensor.shape == (3, 16, 32)
    assert tensor.max() > 1
    assert tensor.min() < -1


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4), (0, 4, 3)])
def test_what_is_no_rgb_picture_is_refused(shape: tuple[int, ...]) -> None:
    """Grey, transparent and empty pictures are refused, and so are floats."""
    refused(lambda: image_to_tensor(np.zeros(shape, dtype=np.uint8), 16, 16), "image")
    refused(lambda: image_to_tensor(np.zeros((4, 4, 3), dtype=np.float32), 16, 16), "image")


def test_bytes_of_frames_are_truncated() -> None:
    """0 is 127.5 and becomes 127; what lies outside of [-1, 1] is clamped; channels come last."""
    frames = torch.tensor([-1.0, 0.0, 1.0, 7.0]).reshape(1, 1, 2, 2).expand(3, 1, 2, 2)
    pixels = frames_to_bytes(frames)
    assert pixels.shape == (1, 2, 2, 3)
    assert pixels[0, :, :, 0].flatten().tolist() == [0, 127, 255, 255]
    assert pixels.is_contiguous()


def test_a_picture_survives_there_and_back() -> None:
    """Bytes to tensor to bytes loses at most one level by truncation."""
    image = torch.arange(256, dtype=torch.uint8).reshape(16, 16, 1).expand(16, 16, 3)
    back = frames_to_bytes(image_to_tensor(image, 16, 16)[:, None])[0]
    assert (image.int() - back.int()).abs().max() <= 1
