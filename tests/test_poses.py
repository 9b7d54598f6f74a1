"""A recorded path becomes one control of poses per chunk."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from reelwire.errors import RequestError
from reelwire.poses import path_controls, read_path, resampled_poses
from reelwire.spec import Edge, StageSpec, StreamSpec, TensorInput

WORLD = StreamSpec(
    name="world",
    stages=(StageSpec("denoise", ("control",), ("frames",)),),
    edges=(Edge("control"), Edge("frames")),
    external_inputs=("control",),
    outputs=("frames",),
    initialize_order=("denoise",),
    control="control",
    chunks_max=341,
    frames_first=9,
    frames_next=12,
    frame_stride=4,
    fps=16,
    control_tensors=(
        TensorInput("poses", "float", (-1, 4, 4), required=True),
        TensorInput("intrinsics", "float", (4,)),
        TensorInput("action", "float", (-1, 4)),
    ),
)


def pose(x: float, yaw_degrees: float = 0.0) -> NDArray[np.float64]:
    """Camera at (x, 0, 0), turned about y."""
    turned = np.eye(4)
    c, s = math.cos(math.radians(yaw_degrees)), math.sin(math.radians(yaw_degrees))
    turned[:3, :3] = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
    turned[0, 3] = x
    return turned


def write_path(folder: Path, frames: int, action: bool = False) -> NDArray[np.float64]:
    """A straight walk of that many frames."""
    path = np.stack([pose(0.1 * frame, frame) for frame in range(frames)])
    np.save(folder / "poses.npy", path)
    np.save(folder / "intrinsics.npy", np.tile([500.0, 500.0, 416.0, 240.0], (frames, 1)))
    if action:
        np.save(folder / "action.npy", np.arange(frames * 4).reshape(frames, 4))
    return path


def test_halfway_between_two_poses_is_half_the_way_and_half_the_turn() -> None:
    """Translation is linear; rotation turns at constant speed: 0 and 90 degrees give 22.5, 45, 67.5 between."""
    made = resampled_poses(np.stack([pose(0, 0), pose(4, 90)]), 5)
    for step, x, yaw in ((0, 0, 0), (1, 1, 22.5), (2, 2, 45), (3, 3, 67.5), (4, 4, 90)):
        np.testing.assert_allclose(made[step], pose(x, yaw), atol=1e-12)


def test_the_shorter_way_around_is_taken() -> None:
    """From 170 to -170 degrees the turn goes through 180, not through 0."""
    made = resampled_poses(np.stack([pose(0, 170), pose(0, -170)]), 3)
    np.testing.assert_allclose(made[1], pose(0, 180), atol=1e-12)


def test_resampled_rotations_are_rotations() -> None:
    """Also between poses that are far apart, and between matrices that are only nearly orthonormal."""
    generator = np.random.default_rng(1)
    turns = np.linalg.qr(generator.standard_normal((5, 3, 3)))[0]
    turns *= np.sign(np.linalg.det(turns))[:, None, None]
    path = np.tile(np.eye(4), (5, 1, 1))
    path[:, :3, :3] = turns + 1e-7 * generator.standard_normal((5, 3, 3))
    made = resampled_poses(path, 17)[:, :3, :3]
    np.testing.assert_allclose(made @ made.transpose(0, 2, 1), np.tile(np.eye(3), (17, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(made), 1.0)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("degrees", [0.0, 1e-7, 90.0, 179.999, 180.0])
def test_poses_at_positions_of_the_path_are_the_paths_own(axis: int, degrees: float) -> None:
    """With as many poses as there are, each comes back, half turns about each axis included."""
    a, b = [k for k in range(3) if k != axis]
    turned = np.eye(4)
    turned[a, a] = turned[b, b] = math.cos(math.radians(degrees))
    turned[a, b], turned[b, a] = -math.sin(math.radians(degrees)), math.sin(math.radians(degrees))
    path = np.stack([np.eye(4), turned, np.eye(4)])
    np.testing.assert_allclose(resampled_poses(path, 3), path, atol=1e-9)


def test_video_rate_gives_every_fourth_pose_in_chunks(tmp_path: Path) -> None:
    """21 frames at video rate are 6 latent frames: two chunks of three poses, those of frames 0, 4, 8, ..."""
    written = write_path(tmp_path, 21)
    path = read_path(tmp_path, WORLD, 2)
    assert len(path.controls) == 2
    for index, control in enumerate(path.controls):
        assert control.poses is not None
        np.testing.assert_allclose(control.poses, written[::4][3 * index : 3 * index + 3], atol=1e-12)
        assert control.action is None
        assert control.translation_norm == pytest.approx(0.4)
    assert path.intrinsics.tolist() == [500.0, 500.0, 416.0, 240.0]


def test_action_flags_are_those_of_the_latent_frames(tmp_path: Path) -> None:
    """Every fourth row goes with its pose."""
    write_path(tmp_path, 21, action=True)
    first, second = (control.action for control in read_path(tmp_path, WORLD, 2).controls)
    assert first is not None
    assert second is not None
    assert first[:, 0].tolist() == [0, 16, 32]
    assert second[:, 0].tolist() == [48, 64, 80]


def test_a_path_fills_as_many_chunks_as_it_can(tmp_path: Path) -> None:
    """37 frames are 9 + 12 + 12 and four more, which are left out."""
    write_path(tmp_path, 37)
    assert len(read_path(tmp_path, WORLD).controls) == 3


def test_every_chunk_carries_the_largest_step_of_the_whole_path() -> None:
    """Wherever it is, and whatever the camera turns meanwhile; a path of one latent frame has no step."""
    path = np.stack([pose(0.1 * frame, 10 * frame) for frame in range(21)])
    path[9:13, 0, 3] += 0.5 * np.arange(1, 5)
    path[13:, 0, 3] += 2.0
    for control in path_controls(path, WORLD, 2):
        assert control.translation_norm == pytest.approx(2.4)
    single = replace(WORLD, frames_first=1, frames_next=4)
    assert [control.translation_norm for control in path_controls(path, single, 1)] == [0.0]


@pytest.mark.parametrize("rows", [5, 7, 20, 22])
def test_flags_that_fit_no_rate_are_refused(rows: int) -> None:
    """For 21 pixel frames there are 6 or 21 of them."""
    with pytest.raises(RequestError, match=rf"^action: has {rows} rows; accepted: 6, or 21"):
        path_controls(np.tile(np.eye(4), (21, 1, 1)), WORLD, 2, action=np.zeros((rows, 4)))


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """A missing folder or file, a wrong shape, a short path and infinities each name their field."""
    with pytest.raises(RequestError, match="is no folder"):
        read_path(tmp_path / "nowhere", WORLD)
    with pytest.raises(RequestError, match=r"poses\.npy is not there"):
        read_path(tmp_path, WORLD)
    write_path(tmp_path, 9)
    with pytest.raises(RequestError, match="9 frames for a session of 21"):
        read_path(tmp_path, WORLD, 2)
    np.save(tmp_path / "poses.npy", np.full((9, 4, 4), np.inf))
    with pytest.raises(RequestError, match="not finite"):
        read_path(tmp_path, WORLD, 1)
    np.save(tmp_path / "poses.npy", np.zeros((9, 3, 4)))
    with pytest.raises(RequestError, match=r"\[9, 3, 4\]"):
        read_path(tmp_path, WORLD, 1)
    write_path(tmp_path, 9)
    (tmp_path / "intrinsics.npy").write_bytes(b"not numpy")
    with pytest.raises(RequestError, match=r"can't be read: it holds no array; accepted: a \.npy file"):
        read_path(tmp_path, WORLD, 1)
    np.save(tmp_path / "intrinsics.npy", np.array(["a"]))
    with pytest.raises(RequestError, match="no plain numbers"):
        read_path(tmp_path, WORLD, 1)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        ((3, 0), 0.5, "bottom row; accepted: 0, 0, 0, 1"),
        ((3, 3), 2.0, "bottom row"),
        ((0, 0), 0.0, "turns by no rotation; accepted: orthonormal"),
        ((0, 0), 1.1, "turns by no rotation"),
        ((0, 0), 1e30, "turns by no rotation"),
        ((0, 0), -1.0, "mirrors; accepted: rotations"),
        ((0, 3), 1e30, "is too far away; accepted: translations up to 1e\\+09"),
    ],
)
def test_matrices_that_place_no_camera_are_refused(at: tuple[int, int], value: float, words: str) -> None:
    """The sentence says which one, and what it should be."""
    path = np.tile(np.eye(4), (9, 1, 1))
    path[5][at] = value
    with pytest.raises(RequestError, match=f"^poses: matrix 5 .*{words}"):
        path_controls(path, WORLD, 1)


def read_safetensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """float32 tensors of a safetensors file: an 8-byte length, a JSON header, then the bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: np.frombuffer(body[entry["data_offsets"][0] : entry["data_offsets"][1]], np.float32).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
        if entry["dtype"] == "F32"
    }


def test_recorded_paths_are_resampled_as_recorded() -> None:
    """Dense and sparse recorded paths agree with the recorded latent poses within 2e-6."""
    golden = os.environ.get("REELWIRE_GOLDEN")
    if not golden:
        pytest.skip("REELWIRE_GOLDEN names no folder of recorded numbers")
    files = sorted((Path(golden) / "world" / "control").glob("offline_*.safetensors"))
    assert files
    for file in files:
        tensors = read_safetensors(file)
        wanted = tensors["resampled_poses"]
        made = resampled_poses(tensors["poses"].astype(np.float64), wanted.shape[0])
        np.testing.assert_allclose(made, wanted, atol=2e-6, rtol=0, err_msg=file.name)
