"""Control tensors: offline paths, explicit chunks, and a session's controls one after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reelwire.client_values import control_artifact, control_of
from reelwire.pipeline.world.camera import Camera, packed, ray_directions, ray_maps, relative_poses
from reelwire.pipeline.world.config import ControlKind, tiny
from reelwire.pipeline.world.control import (
    Steering,
    SteeringState,
    chunk_control,
    steer,
)
from reelwire.pipeline.world.dit_config import CONTROL_CHANNELS
from reelwire.pipeline.world.geometry import Geometry
from reelwire.pipeline.world.stream import world_spec
from reelwire.poses import path_controls
from reelwire.spec import RequestError, StreamSpec

CAM, ACT = world_spec(tiny(3, "cam")), world_spec(tiny(3, "act"))


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


def recorded(spec: StreamSpec, poses: torch.Tensor, chunks: int, action: torch.Tensor | None = None) -> torch.Tensor:
    """What a client sends of a recorded path, steered chunk by chunk: [chunks, 1, channels, chunk, h, w]."""
    flags = None if action is None else action.numpy()
    state, made = SteeringState(), []
    for control in path_controls(poses.numpy(), spec, chunks, action=flags):
        sent = control_of(control_artifact(control, spec))
        values = {**sent.tensors(), "translation_norm": sent.translation_norm, "reset_pose": sent.reset_pose}
        steered = steer(steering("cam" if action is None else "act"), state, values)
        state = steered.state
        made.append(steered.tensor)
    return torch.stack(made)


def test_chunks_of_a_recorded_path_keep_their_speeds() -> None:
    """The largest step of the whole path is 1, wherever it is; chunks are connected to the one before."""
    path = line(21)
    path[9:, 2, 3] += 0.1 * torch.arange(1, 13)  # from the second chunk on it goes twice as fast
    controls = recorded(CAM, path, 2)
    assert controls.shape == (2, 1, 384, 3, 2, 4)
    assert origins(controls[0]) == [0, 0.5, 0.5]
    assert origins(controls[1]) == [1, 1, 1]


def test_a_recorded_path_chunk_by_chunk_is_the_whole_path_at_once() -> None:
    """Cut into chunks and divided by the whole path's largest step, a random walk gives the same rays."""
    generator = torch.Generator().manual_seed(5)
    path = line(33).double()
    path[:, :3, 3] += torch.randn(33, 3, generator=generator).cumsum(0) * torch.linspace(0.1, 3, 33)[:, None]
    whole = relative_poses(path[::4].float())
    camera = steering().camera
    directions = ray_directions(whole, camera.model_intrinsics().expand(9, 4), 16, 32)
    wanted = torch.stack(torch.split(packed(ray_maps(whole, directions)), 3, dim=2))
    assert torch.allclose(recorded(CAM, path, 3), wanted, atol=2e-6)


def test_a_recorded_path_that_stands_still_stays_where_it_is() -> None:
    """With no step at all there is nothing to divide by."""
    assert origins(recorded(CAM, line(9, step=0.0), 1)[0]) == [0, 0, 0]


def test_a_recorded_path_is_resampled() -> None:
    """Two poses are enough: what lies between is interpolated."""
    assert origins(recorded(CAM, line(2, step=5.0), 1)[0]) == [0, 1, 1]


def test_a_recorded_path_takes_flags_at_either_rate() -> None:
    """Rows per latent frame, or per pixel frame of the whole path."""
    flags = torch.rand(21, 4, generator=torch.Generator().manual_seed(0))
    slow = recorded(ACT, line(2), 2, flags[::4])
    assert torch.equal(recorded(ACT, line(2), 2, flags), slow)


def golden_files() -> list[Any]:
    root = os.environ.get("REELWIRE_GOLDEN")
    if not root:
        return [pytest.param(Path(), marks=pytest.mark.skip(reason="REELWIRE_GOLDEN names no folder"))]
    found = sorted((Path(root) / "world" / "control").glob("offline_*.safetensors"))
    assert found
    return [pytest.param(path, id=path.stem) for path in found]


@pytest.mark.parametrize("file", golden_files())
def test_a_recorded_path_gives_the_published_offline_controls(file: Path) -> None:
    """What a client sends and a worker makes of it agrees with the published sequence within 2e-6."""
    data = load_file(file)
    entry = json.loads((file.parent / "index.json").read_text(encoding="utf-8"))["files"][file.name]
    kind: ControlKind = "act" if "action" in data else "cam"
    geometry = Geometry(entry["height"], entry["width"])
    rows, columns = entry["calibration_size"]
    camera = Camera.of_session(geometry, rows, columns, data["intrinsics"], rows, columns)
    session = Steering(kind, camera, entry["chunk_size"])
    spec = world_spec(tiny(session.chunk_size, kind))
    flags = data["action"].numpy() if "action" in data else None
    controls = path_controls(data["poses"].numpy(), spec, entry["latent_frames"] // session.chunk_size, action=flags)
    wanted = data["controls"] if "controls" in data else data["control_chunk0"][None]
    state = SteeringState()
    for control, theirs in zip(controls, wanted, strict="controls" in data):
        steered = steer(session, state, {**control.tensors(), "translation_norm": control.translation_norm})
        state = steered.state
        torch.testing.assert_close(steered.tensor, theirs, atol=2e-6, rtol=0)


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
