"""Control tensors: offline paths, explicit chunks, and a session's controls one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reelwire.pipeline.world.camera import Camera
from reelwire.pipeline.world.control import (
    CONTROL_CHANNELS,
    ControlKind,
    Steering,
    SteeringState,
    check_kind,
    chunk_control,
    control_of,
    first_frames,
    sequence_controls,
    steer,
)
from reelwire.pipeline.world.geometry import Geometry
from reelwire.spec import RequestError


def steering(kind: ControlKind = "cam", chunk_size: int = 3) -> Steering:
    return Steering(kind, Camera.of_session(Geometry(16, 32), 16, 32), chunk_size)


def line(frames: int, step: float = 0.1, start: int = 0) -> torch.Tensor:
    """Poses [frames, 4, 4] on a straight line forward."""
    poses = torch.eye(4).repeat(frames, 1, 1)
    poses[:, 2, 3] = torch.arange(start, start + frames) * step
    return poses


def origins(control: torch.Tensor) -> list[float]:
    """The z of each frame's ray origin, which for camera control stands in channels 128 to 191."""
    assert torch.equal(control[0, 128], control[0, 191])
    return [round(float(value), 5) for value in control[0, 128, :, 0, 0]]


def refused(call: Callable[[], object], field: str) -> str:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.field == field
    return caught.value.reason


def test_a_control_tensor_has_the_channels_of_its_kind() -> None:
    """6 times 64 for camera control, 7 times 64 for action control, one cell per 8 x 8 pixels."""
    assert chunk_control(steering(), line(3)).shape == (1, CONTROL_CHANNELS["cam"], 3, 2, 4)
    flags = torch.zeros(3, 4)
    assert chunk_control(steering("act"), line(3), action=flags).shape == (1, CONTROL_CHANNELS["act"], 3, 2, 4)


def test_a_chunk_is_normalized_on_its_own() -> None:
    """The largest step becomes 1 times the scale; without a pose before, the first frame stands still."""
    assert origins(chunk_control(steering(), line(3, 0.01))) == [0, 1, 1]
    assert origins(chunk_control(steering(), line(3), translation_scale="2.5")) == [0, 2.5, 2.5]


def test_the_pose_before_connects_a_chunk() -> None:
    """With it the step over the boundary is there, and takes part in the normalization."""
    connected = chunk_control(steering(), line(3, start=1), previous_pose=line(1)[0])
    assert origins(connected) == [1, 1, 1]
    jump = chunk_control(steering(), line(3, start=2), previous_pose=line(1)[0])
    assert origins(jump) == [1, 0.5, 0.5]


def test_of_intrinsics_the_first_row_counts() -> None:
    """Further rows change nothing, another first row does."""
    one = chunk_control(steering(), line(3), intrinsics=[900, 900, 416, 240])
    two = chunk_control(steering(), line(3), intrinsics=[[900, 900, 416, 240], [1, 1, 1, 1]])
    assert torch.equal(one, two)
    assert not torch.equal(one, chunk_control(steering(), line(3)))


def test_flags_may_come_at_video_rate() -> None:
    """Of one row per pixel frame every fourth is taken."""
    flags = torch.rand(9, 4, generator=torch.Generator().manual_seed(0))
    slow = chunk_control(steering("act"), line(3), action=flags[::4])
    assert torch.equal(chunk_control(steering("act"), line(3), action=flags), slow)


@pytest.mark.parametrize(
    ("kind", "poses", "more", "field"),
    [
        ("cam", None, {}, "poses"),
        ("cam", line(2), {}, "poses"),
        ("cam", torch.zeros(3, 3, 4), {}, "poses"),
        ("cam", torch.full((3, 4, 4), float("nan")), {}, "poses"),
        ("cam", line(3), {"action": torch.zeros(3, 4)}, "action"),
        ("act", line(3), {}, "action"),
        ("act", line(3), {"action": torch.zeros(4, 4)}, "action"),
        ("act", line(3), {"action": torch.zeros(4)}, "action"),
        ("cam", line(3), {"previous_pose": torch.zeros(3, 4)}, "previous_pose"),
        ("cam", line(3), {"translation_scale": 0}, "translation_scale"),
        ("cam", line(3), {"translation_scale": True}, "translation_scale"),
        ("cam", line(3), {"translation_scale": "wide"}, "translation_scale"),
        ("cam", line(3), {"translation_scale": float("inf")}, "translation_scale"),
        ("cam", line(3), {"intrinsics": [1, 2, 3]}, "intrinsics"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(kind: ControlKind, poses: Any, more: dict[str, Any], field: str) -> None:
    """The field that is wrong is named."""
    refused(lambda: chunk_control(steering(kind), poses, **more), field)


def test_a_whole_path_is_normalized_as_one() -> None:
    """The largest step of all is 1; chunks after the first are connected to the one before."""
    path = line(6)
    path[3:, 2, 3] += torch.tensor([0.1, 0.2, 0.3])  # the second half goes twice as fast
    controls = sequence_controls(steering(), path, 6)
    assert controls.shape == (2, 1, 384, 3, 2, 4)
    assert origins(control_of(controls, 0)) == [0, 0.5, 0.5]
    assert origins(control_of(controls, 1)) == [1, 1, 1]


def test_a_whole_path_is_resampled() -> None:
    """Two poses are enough: what lies between is interpolated."""
    controls = sequence_controls(steering(), line(2, step=5.0), 3)
    assert origins(controls[0]) == [0, 1, 1]


def test_a_whole_path_takes_flags_at_either_rate() -> None:
    """Rows per latent frame, or per pixel frame of the whole path."""
    flags = torch.rand(21, 4, generator=torch.Generator().manual_seed(0))
    slow = sequence_controls(steering("act"), line(2), 6, action=flags[::4])
    assert torch.equal(sequence_controls(steering("act"), line(2), 6, action=flags), slow)


def test_a_whole_path_that_does_not_fit_is_refused() -> None:
    """Too few poses, half a chunk, or a chunk that isn't there."""
    refused(lambda: sequence_controls(steering(), line(1), 3), "poses")
    refused(lambda: sequence_controls(steering(), line(9), 8), "frames")
    refused(lambda: sequence_controls(steering(), line(9), 0), "frames")
    controls = sequence_controls(steering(), line(9), 9)
    refused(lambda: control_of(controls, -1), "index")
    assert "0 to 2" in refused(lambda: control_of(controls, 3), "index")


def test_the_beginning_of_a_recording_fits_a_session() -> None:
    """As many rows as the session has frames; the first row of the intrinsics."""
    path = first_frames(line(12), 9, intrinsics=torch.ones(12, 4), action=torch.zeros(10, 4))
    assert path.poses.shape == (9, 4, 4)
    assert path.intrinsics is not None
    assert path.intrinsics.shape == (4,)
    assert path.action is not None
    assert path.action.shape == (9, 4)
    assert first_frames(line(1), 1).action is None


def test_a_recording_that_is_too_short_is_refused() -> None:
    """Rows must be there for each frame, and frames must be 4k+1."""
    refused(lambda: first_frames(line(8), 9), "poses")
    refused(lambda: first_frames(line(9), 9, action=torch.zeros(8, 4)), "action")
    refused(lambda: first_frames(line(9), 9, action=torch.zeros(9)), "action")
    refused(lambda: first_frames(torch.zeros(9, 4), 9), "poses")
    refused(lambda: first_frames(line(9), 8), "frames")


def test_the_kind_of_control_is_that_of_the_weights() -> None:
    """Another one, or none at all, is refused with the one that the weights have."""
    check_kind("act", "act")
    assert refused(lambda: check_kind("cam", "act"), "control_type").endswith("act")
    refused(lambda: check_kind("wheel", "wheel"), "control_type")


def test_keys_walk_on_over_explicit_poses() -> None:
    """Explicit poses don't move the walk; the keys after them go on from where the keys before stood."""
    first = steer(steering(), SteeringState(), {"keys": ["w"]})
    explicit = steer(steering(), first.state, {"poses": line(3, 7.0), "keys": None})
    last = steer(steering(), explicit.state, {"keys": ["w"]})
    direct = steer(steering(), first.state, {"keys": ["w"]})
    assert torch.equal(last.tensor, direct.tensor)
    assert torch.equal(last.pose, direct.pose)
    assert float(last.pose[2, 3]) == pytest.approx(1.0, abs=1e-5)


def test_keys_move_by_the_translation_scale() -> None:
    """The first chunk stands still once, later ones don't; a uniform step is the scale, 3, whatever its length."""
    first = steer(steering(), SteeringState(), {"keys": {"w"}})
    assert origins(first.tensor) == [0, 3, 3]
    assert origins(steer(steering(), first.state, {"keys": {"w"}}).tensor) == [3, 3, 3]


def test_no_keys_stand_still() -> None:
    """An empty control moves neither the pose nor the rays."""
    start = steer(steering(), SteeringState(), {"keys": ["l"]})
    still = steer(steering(), start.state, {"keys": []})
    assert torch.equal(still.pose, start.pose)
    assert origins(still.tensor) == [0, 0, 0]


def test_reset_pose_starts_the_walk_anew() -> None:
    """The chunk is what a first chunk would be."""
    walked = steer(steering(), SteeringState(), {"keys": ["w", "l"]})
    again = steer(steering(), walked.state, {"keys": ["w", "l"], "reset_pose": True})
    assert torch.equal(again.tensor, walked.tensor)
    assert torch.equal(again.pose, walked.pose)
    explicit = steer(steering(), walked.state, {"poses": line(3), "reset_pose": True})
    assert torch.equal(steer(steering(), explicit.state, {"keys": ["w", "l"]}).tensor, walked.tensor)


def test_explicit_chunks_in_a_row_are_connected() -> None:
    """The second continues from the last pose of the first, but not across a chunk of keys."""
    first = steer(steering(), SteeringState(), {"poses": line(3)})
    second = steer(steering(), first.state, {"poses": line(3, start=3)})
    assert origins(first.tensor) == [0, 1, 1]
    assert origins(second.tensor) == [1, 1, 1]
    assert float(second.pose[2, 3]) == pytest.approx(0.5)
    between = steer(steering(), first.state, {"keys": []})
    assert origins(steer(steering(), between.state, {"poses": line(3, start=3)}).tensor) == [0, 1, 1]


def test_keys_give_flags_to_a_model_with_action_control() -> None:
    """Channels 192 to 447 hold w, a, s, d; translations don't appear."""
    control = steer(steering("act"), SteeringState(), {"keys": ["w", "d", "l"]}).tensor
    flags = control[0, 192:].reshape(4, 64, 3, 2, 4)
    assert [float(channel.unique()) for channel in flags] == [1, 0, 0, 1]


def test_a_control_of_a_session_is_checked() -> None:
    """Exactly one of keys and poses, known keys, and four channels of flags."""
    refused(lambda: steer(steering(), SteeringState(), {}), "control")
    refused(lambda: steer(steering(), SteeringState(), {"keys": [], "poses": line(3)}), "control")
    refused(lambda: steer(steering(), SteeringState(), {"keys": ["q"]}), "keys")
    wide = {"poses": line(3), "action": torch.zeros(3, 5)}
    assert "[rows, 4]" in refused(lambda: steer(steering("act"), SteeringState(), wide), "action")
    fitting = {"poses": line(3), "action": torch.zeros(3, 4)}
    assert steer(steering("act"), SteeringState(), fitting).tensor.shape[1] == CONTROL_CHANNELS["act"]
