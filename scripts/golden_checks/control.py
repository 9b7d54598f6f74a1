"""Relative poses, rays, control tensors and walks of the world model, compared with the set ``control``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reelwire.client_values import array_of, control_artifact
from reelwire.controls import Control
from reelwire.pipeline.world.camera import (
    Camera,
    action_maps,
    first_intrinsics,
    packed,
    ray_directions,
    ray_maps,
    relative_poses,
    transform_intrinsics,
)
from reelwire.pipeline.world.config import tiny
from reelwire.pipeline.world.control import Steering, SteeringState, chunk_control, steer
from reelwire.pipeline.world.geometry import Geometry
from reelwire.pipeline.world.keyboard import (
    KEY_ALIASES,
    KEY_NAMES,
    CameraState,
    KeyboardParameters,
    action_flags,
    integrate,
)
from reelwire.pipeline.world.stream import world_spec
from reelwire.poses import path_controls
from reelwire.spec import StreamSpec

if TYPE_CHECKING:
    from scripts.golden_checks.control_refusals import compare_refusals
    from scripts.golden_checks.line import Comparison, Entry, Line, document, over_files, tensors
else:
    from golden_checks.control_refusals import compare_refusals
    from golden_checks.line import Comparison, Entry, Line, document, over_files, tensors

ATOL = 2e-6
POSE_ATOL = 1e-9

Data = dict[str, Tensor]


def check(folder: Path) -> Iterator[Line]:
    """Compare every file of the set: float32 values to 2e-6, walked float64 poses to 1e-9."""
    return over_files(folder, _compare)


def _compare(folder: Path, name: str, entry: Entry, found: Comparison) -> None:
    if name == "rejected.json":
        compare_refusals(document(folder, name), found)
    elif name == "aliases.json":
        _aliases(document(folder, name), found)
    else:
        kind = name.partition("_seed")[0]
        COMPARE[kind](tensors(folder, name), entry, found)


def _aliases(content: dict[str, Any], found: Comparison) -> None:
    ours = {key: sorted([key, *(alias for alias, of in KEY_ALIASES.items() if of == key)]) for key in KEY_NAMES}
    found.equal("aliases", ours, {key: sorted(names) for key, names in content["aliases"].items()})
    for name in content["not_aliases"]:
        found.equal(f"{name!r} is a key", name in KEY_NAMES or name in KEY_ALIASES, False)


def _relative(data: Data, entry: Entry, found: Comparison) -> None:
    for name, theirs in data.items():
        if name.startswith("poses"):
            continue
        number, framewise, normalize, *scaled = name.removeprefix("rel").split("_")
        ours = relative_poses(
            data[f"poses{number}"],
            framewise=framewise == "framewise1",
            normalize=normalize == "norm1",
            scale=entry["scale"] if scaled else None,
        )
        found.close(name, ours, theirs, ATOL)


def _intrinsics(data: Data, entry: Entry, found: Comparison) -> None:
    for number, size in enumerate(entry["sizes"]):
        original, resized, final = ((int(size[key][0]), int(size[key][1])) for key in ("org", "resized", "final"))
        ours = transform_intrinsics(data["intrinsics"], original, resized, final)
        found.close(f"out{number}", ours, data[f"out{number}"], ATOL, rtol=1e-6)


def _rays(data: Data, entry: Entry, found: Comparison) -> None:
    directions = ray_directions(data["poses"], data["intrinsics"], entry["height"], entry["width"])
    maps = ray_maps(data["poses"], directions)
    found.close("dirs", directions, data["dirs"], ATOL)
    found.close("plucker", maps, data["plucker"], ATOL)
    found.close("packed_cam", packed(maps), data["packed_cam"], ATOL)
    found.close("packed_act", packed(action_maps(directions, data["action"])), data["packed_act"], ATOL)


def _steering(entry: Entry, kind: str, intrinsics: Any, keyboard: KeyboardParameters | None = None) -> Steering:
    height, width = entry["calibration_size"]
    camera = Camera(first_intrinsics(intrinsics), height, width, Geometry(entry["height"], entry["width"]))
    assert kind in ("cam", "act")
    return Steering("cam" if kind == "cam" else "act", camera, entry["chunk_size"], keyboard or KeyboardParameters())


def _offline(data: Data, entry: Entry, found: Comparison) -> None:
    steering, controls, spec = _recorded(data, entry, entry["control_type"], found)
    found.close("controls", torch.stack(_served(steering, controls, spec)), data["controls"], ATOL)


def _offline_sparse(data: Data, entry: Entry, found: Comparison) -> None:
    steering, controls, spec = _recorded(data, entry, "cam", found)
    found.close("control_chunk0", _served(steering, controls, spec)[0], data["control_chunk0"], ATOL)


def _recorded(
    data: Data, entry: Entry, kind: str, found: Comparison
) -> tuple[Steering, tuple[Control, ...], StreamSpec]:
    """The controls that a client makes of the whole path."""
    steering = _steering(entry, kind, data["intrinsics"])
    spec = world_spec(tiny(steering.chunk_size, steering.kind))
    action = data["action"].double().numpy() if "action" in data else None
    poses = data["poses"].double().numpy()
    controls = path_controls(poses, spec, entry["latent_frames"] // steering.chunk_size, action=action)
    resampled = np.concatenate([control.poses for control in controls if control.poses is not None])
    found.close("resampled_poses", torch.from_numpy(resampled), data["resampled_poses"], ATOL)
    return steering, controls, spec


def _served(steering: Steering, controls: tuple[Control, ...], spec: StreamSpec) -> list[Tensor]:
    """The control tensors that a worker makes of them, one chunk at a time."""
    state, made = SteeringState(), []
    for control in controls:
        artifact = control_artifact(control, spec)
        arrays = {name: array_of(name, ref) for name, ref in artifact.tensors.items()}
        steered = steer(steering, state, {**artifact.values, **arrays})
        state = steered.state
        made.append(steered.tensor)
    return made


def _explicit(data: Data, entry: Entry, found: Comparison) -> None:
    for case in entry["cases"]:
        for kind in ("cam", "act"):
            name = f"{kind}{case['case']}"
            if f"{name}_control" not in data:
                continue
            ours = chunk_control(
                _steering(entry, kind, entry["intrinsics"]),
                data[f"{name}_poses"],
                action=data.get(f"{name}_action"),
                previous_pose=data.get(f"{name}_previous_pose"),
                translation_scale=case["translation_scale"],
            )
            found.close(f"{name}_control", ours, data[f"{name}_control"], ATOL)


def _keyboard(data: Data, entry: Entry, found: Comparison) -> None:
    for case in entry["cases"]:
        kind = case["control_type"]
        parameters = KeyboardParameters(
            **{name.removeprefix("control_"): step for name, step in case["params"].items()}
        )
        steering = _steering(entry, kind, entry["intrinsics"], parameters)
        camera: CameraState | None = None
        state = SteeringState()
        for index, keys in enumerate(case["held_keys_per_chunk"]):
            label = f"{case['name']}_{kind}_chunk{index}"
            if camera is not None:
                found.close(
                    f"{label}_previous_pose", torch.from_numpy(camera.pose), data[f"{label}_previous_pose"], POSE_ATOL
                )
            path = integrate(keys, camera, entry["chunk_size"], parameters)
            steered = steer(steering, state, {"keys": keys})
            camera, state = path.end, steered.state
            found.close(f"{label}_poses", torch.from_numpy(path.poses), data[f"{label}_poses"], POSE_ATOL)
            found.close(f"{label}_end", steered.pose, data[f"{label}_poses"][-1], POSE_ATOL)
            found.number(f"{label}_pitch", abs(path.end.pitch - float(data[f"{label}_pitch"])), POSE_ATOL)
            if f"{label}_action" in data:
                flags = torch.from_numpy(action_flags(keys, entry["chunk_size"]))
                found.equal(f"{label}_action", flags, data[f"{label}_action"])
            if f"{label}_control" in data:
                found.close(f"{label}_control", steered.tensor, data[f"{label}_control"], ATOL)


COMPARE = {
    "relative": _relative,
    "intrinsics": _intrinsics,
    "rays": _rays,
    "offline_cam": _offline,
    "offline_act": _offline,
    "offline_sparse": _offline_sparse,
    "explicit": _explicit,
    "keyboard": _keyboard,
}
