"""Cameras: poses relative to each other, intrinsics, the rays of pixels, and their packing into latent cells.

Poses are camera-to-world [..., 4, 4] with axes x right, y down, z forward. Intrinsics are fx, fy, cx, cy in pixels. Sizes
are given as height, width. Nothing here moves a tensor to another device or changes its dtype unless it says so.

Shape names: N frames, H W pixels, h w latent cells of 8 x 8 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reelwire.spec import RequestError

from .geometry import SPATIAL_STRIDE, Geometry

CALIBRATION_DEFAULT = (480, 832)
"""Height and width that given intrinsics belong to when the request doesn't say."""


@dataclass(frozen=True, slots=True, eq=False)
class Camera:
    """The one camera of a session.

    Attributes:
        intrinsics: float32 [4], in pixels of the calibration size.
        calibration_height: rows of the picture that the intrinsics were measured in.
        calibration_width: its columns.
        geometry: the output that they are rescaled to.
    """

    intrinsics: Tensor
    calibration_height: int
    calibration_width: int
    geometry: Geometry

    @classmethod
    def of_session(
        cls,
        geometry: Geometry,
        image_height: int,
        image_width: int,
        intrinsics: Any = None,
        calibration_height: int | None = None,
        calibration_width: int | None = None,
    ) -> Camera:
        """The camera of a session; without intrinsics, focal length = image width and the centre of the image.

        Args:
            geometry: the output.
            image_height: rows of the session's image.
            image_width: its columns.
            intrinsics: [4] or [rows, 4], of which the first row counts; None for the default.
            calibration_height: rows of the picture that given intrinsics belong to, with the width or not at all.
            calibration_width: its columns.

        Raises:
            RequestError: intrinsics of another shape, or half a calibration size, or one without intrinsics.
        """
        size = {"calibration_height": calibration_height, "calibration_width": calibration_width}
        for (name, side), (other, beside) in zip(size.items(), reversed(size.items()), strict=True):
            if side is None and beside is not None:
                raise RequestError(name, f"is missing beside {other}; accepted: both or neither")
            if side is not None and intrinsics is None:
                raise RequestError(name, "is given without intrinsics; accepted: only beside intrinsics")
            if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 1):
                raise RequestError(name, f"{side!r} is not a positive integer")
        if intrinsics is None:
            default = torch.tensor([image_width, image_width, image_width / 2, image_height / 2], dtype=torch.float32)
            return cls(default, image_height, image_width, geometry)
        rows, columns = CALIBRATION_DEFAULT
        return cls(first_intrinsics(intrinsics), calibration_height or rows, calibration_width or columns, geometry)

    def model_intrinsics(self, intrinsics: Tensor | None = None) -> Tensor:
        """The intrinsics [4] in pixels of the output; others of the same calibration size if given."""
        output = (self.geometry.height, self.geometry.width)
        given = self.intrinsics if intrinsics is None else intrinsics
        return transform_intrinsics(given, (self.calibration_height, self.calibration_width), output, output)


def first_intrinsics(intrinsics: Any) -> Tensor:
    """The first row of a sequence of intrinsics, float32 [4].

    Raises:
        RequestError: it is neither [4] nor [rows, 4], or has no row, or a number is not finite or a focal length is 0.
    """
    rows = array("intrinsics", intrinsics, "fx, fy, cx, cy as [4] or [rows, 4]")
    if rows.shape == (4,):
        rows = rows[None]
    if rows.ndim != 2 or rows.shape[0] == 0 or rows.shape[1] != 4:
        raise RequestError("intrinsics", f"has shape {list(rows.shape)}; accepted: [4] or [rows, 4]")
    first = rows[0]
    if bool((first[:2] == 0).any()):
        raise RequestError("intrinsics", f"{first.tolist()} have a focal length of 0; accepted: any other number")
    return first


def array(field: str, given: Any, accepted: str) -> Tensor:
    """Numbers that somebody gave, as float32.

    Raises:
        RequestError: they are no rectangular array of finite numbers.
    """
    try:
        copied = (
            np.array(given) if isinstance(given, np.ndarray) else given
        )  # it may be read-only, which torch warns of
        numbers = torch.as_tensor(copied).to(torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(field, f"is not an array of numbers ({error}); accepted: {accepted}") from None
    if not bool(torch.isfinite(numbers).all()):
        raise RequestError(field, f"holds a number that is not finite; accepted: finite numbers, {accepted}")
    return numbers


def transform_intrinsics(
    intrinsics: Tensor, original: tuple[int, int], resized: tuple[int, int], final: tuple[int, int]
) -> Tensor:
    """Intrinsics [..., 4] after resizing the picture and cropping its centre; sizes are height, width."""
    fx, fy, cx, cy = intrinsics.unbind(-1)
    scale_y, scale_x = (after / before for after, before in zip(resized, original, strict=True))
    crop_y, crop_x = ((before - after) / 2 for before, after in zip(resized, final, strict=True))
    return torch.stack([fx * scale_x, fy * scale_y, cx * scale_x - crop_x, cy * scale_y - crop_y], dim=-1)


def inverse(poses: Tensor) -> Tensor:
    """The inverse [..., 4, 4] of rigid motions."""
    turned = poses[..., :3, :3].transpose(-1, -2)
    inverted = torch.zeros_like(poses)
    inverted[..., :3, :3] = turned
    inverted[..., :3, 3:] = -(turned @ poses[..., :3, 3:])
    inverted[..., 3, 3] = 1
    return inverted


def relative_poses(
    poses: Tensor,
    *,
    framewise: bool = True,
    normalize: bool = True,
    norm: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Poses [N, 4, 4] as seen from the previous frame; the first becomes the identity.

    Args:
        poses: camera-to-world.
        framewise: False for poses as seen from the first frame.
        normalize: divide all translations by the largest of their norms, unless that is 0.
        norm: what to divide by instead, unless that is 0.
        scale: factor for the translations after that.
    """
    relative = inverse(poses[:1]) @ poses
    relative[0] = torch.eye(4, dtype=poses.dtype, device=poses.device)
    if framewise:
        # by way of the first frame: float32 sums in this order are what the weights and the golden numbers come from
        relative = torch.cat([relative[:1], inverse(relative[:-1]) @ relative[1:]])
    if normalize:
        largest = relative[:, :3, 3].norm(dim=-1).max() if norm is None else norm
        if largest > 0:
            relative[:, :3, 3] /= largest
    if scale is not None:
        relative[:, :3, 3] *= scale
    return relative


def ray_directions(poses: Tensor, intrinsics: Tensor, height: int, width: int) -> Tensor:
    """Unit directions [N, H, W, 3], in world axes, of the rays through the centres of the pixels.

    Args:
        poses: [N, 4, 4], camera-to-world.
        intrinsics: [N, 4] in pixels of the picture.
        height: H.
        width: W.
    """
    fx, fy, cx, cy = intrinsics[:, :, None, None].unbind(1)
    row = torch.arange(height, dtype=poses.dtype, device=poses.device)[None, :, None] + 0.5
    column = torch.arange(width, dtype=poses.dtype, device=poses.device)[None, None, :] + 0.5
    to_x, to_y = (column - cx) / fx, (row - cy) / fy
    length = torch.sqrt(to_x * to_x + to_y * to_y + 1)
    x, y, z = to_x / length, to_y / length, 1 / length
    r = poses[:, :3, :3, None, None]
    # sums of products rather than a matmul: no setting of TensorFloat-32 may touch them
    rows = [r[:, i, 0] * x + r[:, i, 1] * y + r[:, i, 2] * z for i in range(3)]
    return torch.stack(rows, dim=-1)


def ray_maps(poses: Tensor, directions: Tensor) -> Tensor:
    """Origin and direction [N, H, W, 6] of each ray. The origin is the camera's centre itself, not a moment."""
    return torch.cat([poses[:, None, None, :3, 3].expand(directions.shape), directions], dim=-1)


def action_maps(directions: Tensor, action: Tensor) -> Tensor:
    """Direction of each ray and the frame's flags [N, H, W, 3 + channels]; the origin is left out."""
    flags = action[:, None, None, :].expand(*directions.shape[:3], -1)
    return torch.cat([directions, flags], dim=-1)


def packed(maps: Tensor) -> Tensor:
    """Maps [N, H, W, C] with the pixels of a latent cell as channels: [1, C*64, N, h, w], channel = (C, row, column)."""
    n, height, width, channels = maps.shape
    h, w, s = height // SPATIAL_STRIDE, width // SPATIAL_STRIDE, SPATIAL_STRIDE
    cells = maps.reshape(n, h, s, w, s, channels).permute(5, 2, 4, 0, 1, 3)
    return cells.reshape(1, channels * s * s, n, h, w)
