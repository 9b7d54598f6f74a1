"""A recorded camera path: files at video rate in, the poses of each chunk out. Numpy, no torch.

A folder holds ``poses.npy`` [frames, 4, 4], camera-to-world at video rate, ``intrinsics.npy`` [4] or [rows, 4] (fx, fy,
cx, cy; the first row counts for every frame) and, for weights with action control, ``action.npy`` [frames, channels].

The model sees the direction of every step from latent frame to latent frame, and its length relative to the longest one.
LingBot-World takes the longest of the whole path where a path is recorded beforehand. A worker sees one chunk at a time,
so each control carries that number, `Control.translation_norm`.

Rotations are interpolated here and nowhere else: a worker is given one pose per latent frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .controls import Control
from .errors import RequestError
from .spec import StreamSpec

ROTATION_ERROR_MAX = 0.01
TRANSLATION_MAX = 1e9
"""Its square is far from the end of float32."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedPath:
    """A path, cut into chunks.

    Attributes:
        intrinsics: float64 [4], for the whole session, in pixels of 832 x 480 unless the request says another size.
        controls: one for each chunk.
    """

    intrinsics: FloatArray
    controls: tuple[Control, ...]


def read_path(
    folder: str | Path, spec: StreamSpec, chunks: int | None = None, policy: Literal["strict", "truncate"] = "truncate"
) -> RecordedPath:
    """Read a folder and cut it into chunks.

    Args:
        folder: holds the files that are named above.
        spec: the stream, whose counts of frames and `frame_stride` say how many latent frames a chunk has.
        chunks: length of the session; None: as many chunks as the path fills.
        policy: without `chunks`, whether frames that fill no chunk are refused or left out.

    Raises:
        RequestError: a file can't be read, has another shape or holds a number that is not finite, or the path is
            shorter than the session.
    """
    place = Path(folder)
    if not place.is_dir():
        raise RequestError("poses", f"{place} is no folder; accepted: one with poses.npy and intrinsics.npy")
    path = _load(place / "poses.npy", "poses", "[frames, 4, 4]")
    _check_path(path)
    intrinsics = _intrinsics(place / "intrinsics.npy")
    action = _action(place / "action.npy")
    fills = 1 + (path.shape[0] - spec.frames_first) // spec.frames_next
    length = min(max(fills, 1), spec.chunks_max) if chunks is None else chunks
    frames = spec.frames_in(length)
    if chunks is None and policy == "strict" and path.shape[0] > frames:
        more = "" if length == spec.chunks_max else f" or {frames + spec.frames_next}"
        raise RequestError(
            "poses",
            f"has {path.shape[0]} frames, which don't fill whole chunks; accepted: {spec.frames_first} + "
            f"{spec.frames_next}*n, such as {frames}{more}, or to cut them with --frames-policy truncate or --chunks",
        )
    for name, given in (("poses", path), ("action", action)):
        if given is not None and given.shape[0] < frames:
            raise RequestError(
                name, f"has {given.shape[0]} frames for a session of {frames}; accepted: {frames} or more"
            )
    flags = None if action is None else action[:frames]
    return RecordedPath(intrinsics, path_controls(path[:frames], spec, length, action=flags))


def path_controls(
    poses: FloatArray, spec: StreamSpec, chunks: int, *, action: FloatArray | None = None
) -> tuple[Control, ...]:
    """A path, resampled to the latent frames of a session, as one control per chunk.

    Args:
        poses: camera-to-world [frames, 4, 4], two or more, evenly spaced over the session.
        spec: the stream.
        chunks: length of the session, 1 or more.
        action: flags [latent frames, channels], or one row per pixel frame of the session.

    Raises:
        RequestError: the path or the flags have another shape.
    """
    _check_path(poses)
    first = (spec.frames_first - 1) // spec.frame_stride + 1
    ends = [first + index * (spec.frames_next // spec.frame_stride) for index in range(chunks)]
    latents, frames = ends[-1], spec.frames_in(chunks)
    if action is not None and action.shape[0] not in (latents, frames):
        raise RequestError("action", f"has {action.shape[0]} rows; accepted: {latents}, or {frames} at video rate")
    path = resampled_poses(poses, latents)
    norm = _largest_step(path)
    parts = np.split(path, ends[:-1])
    if action is None:
        return tuple(Control(poses=part, translation_norm=norm) for part in parts)
    rows = action if action.shape[0] == latents else action[:: spec.frame_stride]
    return tuple(
        Control(poses=part, action=flags, translation_norm=norm)
        for part, flags in zip(parts, np.split(rows, ends[:-1]), strict=True)
    )


def check_cameras(poses: FloatArray) -> None:
    """See that matrices [frames, 4, 4] place cameras: a rotation, a translation, and 0, 0, 0, 1 below.

    Rotations may be off by `ROTATION_ERROR_MAX` in any entry of R^T R, as those of estimated paths are.

    Raises:
        RequestError: one doesn't; the sentence says which and why.
    """
    turns, moves = np.asarray(poses[:, :3, :3], np.float64), np.asarray(poses[:, :3, 3], np.float64)
    bounded = np.abs(turns).max(axis=(1, 2)) <= 2
    turns = np.where(bounded[:, None, None], turns, 0.0)  # the square of a huge number isn't finite
    off = np.abs(turns.transpose(0, 2, 1) @ turns - np.eye(3)).max(axis=(1, 2))
    rules = (
        (np.abs(poses[:, 3] - [0, 0, 0, 1]).max(axis=1) <= 1e-6, "has another bottom row", "0, 0, 0, 1"),
        (bounded & (off <= ROTATION_ERROR_MAX), "turns by no rotation", "orthonormal upper left 3 x 3"),
        (np.linalg.det(turns) > 0, "mirrors", "rotations, of determinant 1"),
        (np.abs(moves).max(axis=1) <= TRANSLATION_MAX, "is too far away", f"translations up to {TRANSLATION_MAX:g}"),
    )
    for fits, fault, accepted in rules:
        if not fits.all():
            raise RequestError("poses", f"matrix {int(np.argmin(fits))} {fault}; accepted: {accepted}")


def resampled_poses(poses: FloatArray, count: int) -> FloatArray:
    """`count` poses at evenly spaced positions of a path [frames, 4, 4], its ends included.

    Translations are interpolated linearly, rotations along the shortest great arc of unit quaternions (Shoemake,
    "Animating rotation with quaternion curves", 1985). All of it in float64.

    Args:
        poses: two or more rigid poses.
        count: how many to make, 1 or more.
    """
    path = np.asarray(poses, dtype=np.float64)
    position = np.linspace(0.0, path.shape[0] - 1, count)
    before = np.minimum(position.astype(np.int64), path.shape[0] - 2)
    part = (position - before)[:, None]
    turns = _quaternions(path[:, :3, :3])
    made = np.tile(np.eye(4), (count, 1, 1))
    made[:, :3, 3] = (1 - part) * path[before, :3, 3] + part * path[before + 1, :3, 3]
    made[:, :3, :3] = _rotations(_slerp(turns[before], turns[before + 1], part))
    return made


def _largest_step(path: FloatArray) -> float:
    if path.shape[0] < 2:
        return 0.0
    # a rotation between the frames changes the direction of the step, not its length
    return float(np.linalg.norm(np.diff(path[:, :3, 3], axis=0), axis=-1).max())


def _check_path(path: FloatArray) -> None:
    if path.ndim != 3 or path.shape[1:] != (4, 4) or path.shape[0] < 2:
        raise RequestError("poses", f"have shape {list(path.shape)}; accepted: [frames, 4, 4], two frames or more")
    check_cameras(path)


def _slerp(start: FloatArray, end: FloatArray, part: FloatArray) -> FloatArray:
    cosine = np.sum(start * end, axis=-1, keepdims=True)
    end = np.where(cosine < 0, -end, end)  # a quaternion and its negative are one rotation: take the shorter way
    angle = np.arccos(np.clip(np.abs(cosine), 0.0, 1.0))
    sine = np.sin(angle)
    near = sine < 1e-8
    divisor = np.where(near, 1.0, sine)
    weight_start = np.where(near, 1 - part, np.sin((1 - part) * angle) / divisor)
    weight_end = np.where(near, part, np.sin(part * angle) / divisor)
    between = weight_start * start + weight_end * end
    unit: FloatArray = between / np.linalg.norm(between, axis=-1, keepdims=True)
    return unit


def _quaternions(rotations: FloatArray) -> FloatArray:
    """Unit quaternions w, x, y, z; of four equal formulas the one that divides by the largest number is taken."""
    r = rotations
    trace = np.trace(r, axis1=-2, axis2=-1)
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    x, y, z = r[:, 2, 1] - r[:, 1, 2], r[:, 0, 2] - r[:, 2, 0], r[:, 1, 0] - r[:, 0, 1]
    xy, xz, yz = r[:, 0, 1] + r[:, 1, 0], r[:, 0, 2] + r[:, 2, 0], r[:, 1, 2] + r[:, 2, 1]
    candidates = np.stack(
        [
            np.stack([1 + trace, x, y, z], axis=-1),
            np.stack([x, 1 + 2 * diagonal[:, 0] - trace, xy, xz], axis=-1),
            np.stack([y, xy, 1 + 2 * diagonal[:, 1] - trace, yz], axis=-1),
            np.stack([z, xz, yz, 1 + 2 * diagonal[:, 2] - trace], axis=-1),
        ],
        axis=1,
    )
    best = np.argmax(np.linalg.norm(candidates, axis=-1), axis=1)
    chosen = candidates[np.arange(r.shape[0]), best]
    unit: FloatArray = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    return unit


def _rotations(quaternions: FloatArray) -> FloatArray:
    w, x, y, z = np.moveaxis(quaternions, -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def _intrinsics(path: Path) -> FloatArray:
    accepted = "[4] or [rows, 4]"
    rows = _load(path, "intrinsics", accepted)
    if rows.shape == (4,):
        return rows
    if rows.ndim != 2 or rows.shape[1] != 4 or rows.shape[0] < 1:
        raise RequestError("intrinsics", f"{path} has shape {list(rows.shape)}; accepted: {accepted}")
    first: FloatArray = rows[0]
    return first


def _action(path: Path) -> FloatArray | None:
    if not path.exists():
        return None
    rows = _load(path, "action", "[frames, channels]")
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise RequestError("action", f"{path} has shape {list(rows.shape)}; accepted: [frames, channels]")
    return rows


def _load(path: Path, name: str, accepted: str) -> FloatArray:
    try:
        loaded = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise RequestError(name, f"{path} is not there; accepted: a .npy file of numbers, {accepted}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise RequestError(name, f"{path} can't be read ({reason}); accepted: a .npy file of numbers") from None
    except (ValueError, EOFError, SyntaxError, MemoryError):  # numpy's words are about its own arguments
        raise RequestError(
            name, f"{path} can't be read: it holds no array; accepted: a .npy file of numbers, {accepted}"
        ) from None
    if not isinstance(loaded, np.ndarray) or loaded.dtype.kind not in "fiu":
        raise RequestError(name, f"{path} holds no plain numbers; accepted: a .npy file of numbers, {accepted}")
    numbers: FloatArray = loaded.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise RequestError(name, f"{path} holds a number that is not finite; accepted: finite numbers")
    return numbers
