"""Relative poses, intrinsics, rays and their packing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from reelwire.pipeline.world.camera import (
    Camera,
    action_maps,
    array,
    first_intrinsics,
    inverse,
    packed,
    ray_directions,
    ray_maps,
    relative_poses,
    transform_intrinsics,
)
from reelwire.pipeline.world.geometry import Geometry
from reelwire.spec import RequestError


def turned(degrees: float, x: float = 0.0, z: float = 0.0) -> torch.Tensor:
    """A pose [4, 4] turned about y, standing at x, z."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, 0, s, x], [0, 1, 0, 0], [-s, 0, c, z], [0, 0, 0, 1]], dtype=torch.float32)


def random_path(frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    rotations = torch.linalg.qr(torch.randn(frames, 3, 3, generator=generator)).Q
    rotations = rotations * torch.linalg.det(rotations)[:, None, None].sign()
    poses = torch.eye(4).repeat(frames, 1, 1)
    poses[:, :3, :3] = rotations
    poses[:, :3, 3] = torch.randn(frames, 3, generator=generator)
    return poses


def test_the_inverse_undoes_a_pose() -> None:
    """A rigid motion times its inverse is the identity."""
    poses = random_path(5)
    assert torch.allclose(inverse(poses) @ poses, torch.eye(4).expand(5, 4, 4), atol=1e-6)


def test_poses_are_relative_to_the_frame_before() -> None:
    """The first is the identity, and multiplying them up gives the path as seen from its first frame."""
    path = random_path(4)
    steps = relative_poses(path, normalize=False)
    seen = relative_poses(path, framewise=False, normalize=False)
    assert torch.equal(steps[0], torch.eye(4))
    total = steps[0]
    for step, expected in zip(steps[1:], seen[1:], strict=True):
        total = total @ step
        assert torch.allclose(total, expected, atol=1e-5)
    assert torch.allclose(path[0] @ seen[3], path[3], atol=1e-5)


def test_where_a_path_lies_does_not_matter() -> None:
    """Moving and turning the whole path leaves its relative poses as they are."""
    path = random_path(4)
    assert torch.allclose(relative_poses(turned(33, 2, -1) @ path), relative_poses(path), atol=1e-5)


def test_the_largest_step_becomes_one() -> None:
    """Translations are divided by the largest norm, then multiplied by the scale; standing still stays so."""
    path = torch.stack([turned(0), turned(0, z=0.1), turned(0, z=0.3)])
    assert relative_poses(path)[:, 2, 3].tolist() == pytest.approx([0, 0.5, 1])
    assert relative_poses(path, scale=3.0)[:, 2, 3].tolist() == pytest.approx([0, 1.5, 3])
    still = torch.stack([turned(0), turned(90)])
    assert torch.isfinite(relative_poses(still, scale=3.0)).all()
    assert not relative_poses(still)[:, :3, 3].any()


def test_relative_poses_leave_the_path_alone() -> None:
    """The argument isn't written to."""
    path = random_path(3)
    before = path.clone()
    relative_poses(path, scale=2.0)
    assert torch.equal(path, before)


def test_intrinsics_follow_resizing_and_cropping() -> None:
    """Halving the picture halves them; cropping its centre moves only the principal point."""
    given = torch.tensor([100.0, 200.0, 60.0, 40.0])
    assert transform_intrinsics(given, (80, 120), (40, 60), (40, 60)).tolist() == [50, 100, 30, 20]
    assert transform_intrinsics(given, (80, 120), (80, 120), (60, 100)).tolist() == [100, 200, 50, 30]


def test_the_default_camera_looks_at_the_centre() -> None:
    """Its focal length is the image's width for both axes, rescaled to the output."""
    camera = Camera.of_session(Geometry(240, 416), 480, 832)
    assert camera.intrinsics.tolist() == [832, 832, 416, 240]
    assert camera.model_intrinsics().tolist() == [416, 416, 208, 120]


def test_given_intrinsics_belong_to_a_calibration_size() -> None:
    """832 x 480 unless the request says another; of several rows the first counts."""
    geometry = Geometry(240, 416)
    rows = [[800, 800, 400, 240], [1, 1, 1, 1]]
    assert Camera.of_session(geometry, 99, 99, rows).model_intrinsics().tolist() == [400, 400, 200, 120]
    sized = Camera.of_session(geometry, 99, 99, rows, 960, 1664)
    assert sized.model_intrinsics().tolist() == [200, 200, 100, 60]
    assert sized.model_intrinsics(torch.tensor([16.0, 16, 16, 16])).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("intrinsics", "height", "width", "field"),
    [
        (None, 480, 832, "calibration_height"),
        ([1, 1, 1, 1], None, 832, "calibration_height"),
        ([1, 1, 1, 1], 480, None, "calibration_width"),
        ([1, 1, 1, 1], 0, 832, "calibration_height"),
        ([1, 1, 1, 1], 480, 64.0, "calibration_width"),
        ([1, 1, 1], None, None, "intrinsics"),
        ([[[1, 1, 1, 1]]], None, None, "intrinsics"),
        (np.zeros((0, 4)), None, None, "intrinsics"),
        ([0, 1, 1, 1], None, None, "intrinsics"),
        ([math.inf, 1, 1, 1], None, None, "intrinsics"),
        ([[1, 1, 1, 1], [1]], None, None, "intrinsics"),
        ("wide", None, None, "intrinsics"),
    ],
)
def test_a_camera_that_cannot_be_is_refused(intrinsics: Any, height: Any, width: Any, field: str) -> None:
    """Half a calibration size, one without intrinsics, and intrinsics of another shape are refused."""
    with pytest.raises(RequestError) as caught:
        Camera.of_session(Geometry(16, 16), 16, 16, intrinsics, height, width)
    assert caught.value.field == field


def test_focal_lengths_may_be_negative() -> None:
    """A mirrored picture has a camera too."""
    assert first_intrinsics([-50, 50, 8, 8]).tolist() == [-50, 50, 8, 8]


def test_read_only_arrays_are_taken() -> None:
    """Arrays that came over the wire can't be written to, and needn't be."""
    given = np.ones((2, 4))
    given.setflags(write=False)
    assert array("intrinsics", given, "").dtype == torch.float32


def test_rays_go_through_the_centres_of_pixels() -> None:
    """With the principal point on a pixel's centre that pixel looks straight ahead; one focal length aside is 45 deg."""
    intrinsics = torch.tensor([[2.0, 2.0, 1.5, 0.5]])
    rays = ray_directions(torch.eye(4)[None], intrinsics, 2, 4)
    assert rays.shape == (1, 2, 4, 3)
    assert rays[0, 0, 1].tolist() == [0, 0, 1]
    assert rays[0, 0, 3].tolist() == pytest.approx([math.sqrt(0.5), 0, math.sqrt(0.5)])
    assert torch.allclose(rays.norm(dim=-1), torch.ones(1, 2, 4))


def test_rays_turn_with_the_camera() -> None:
    """They are given in world axes: a camera that is turned to the right looks along x."""
    rays = ray_directions(turned(90)[None], torch.tensor([[2.0, 2.0, 0.5, 0.5]]), 1, 1)
    assert rays[0, 0, 0].tolist() == pytest.approx([1, 0, 0], abs=1e-6)


def test_maps_hold_origin_and_direction_or_direction_and_flags() -> None:
    """The origin is the camera's centre; with action control there is none, so translations don't reach the model."""
    pose = turned(0, x=5, z=7)[None]
    rays = ray_directions(pose, torch.ones(1, 4), 2, 2)
    assert ray_maps(pose, rays)[0, 1, 1].tolist() == [5, 0, 7, *rays[0, 1, 1].tolist()]
    flags = torch.tensor([[1.0, 0, 0, 1]])
    assert action_maps(rays, flags)[0, 1, 0].tolist() == [*rays[0, 1, 0].tolist(), 1, 0, 0, 1]


def test_packing_takes_a_cells_pixels_as_channels() -> None:
    """Channel c*64 + row*8 + column of cell (h, w) is the map's channel c at that pixel of the cell."""
    maps = torch.arange(2 * 16 * 24 * 3).reshape(2, 16, 24, 3)
    cells = packed(maps)
    assert cells.shape == (1, 3 * 64, 2, 2, 3)
    for c, row, column, n, h, w in ((0, 0, 0, 0, 0, 0), (2, 7, 1, 1, 1, 2), (1, 3, 5, 0, 1, 0)):
        assert cells[0, c * 64 + row * 8 + column, n, h, w] == maps[n, h * 8 + row, w * 8 + column, c]
