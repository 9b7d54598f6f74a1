"""Walking with keys."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reelwire.pipeline.world.keyboard import (
    KEY_ALIASES,
    KEY_NAMES,
    KeyboardParameters,
    action_flags,
    integrate,
)
from reelwire.spec import RequestError

LEVEL = 1 / (1 + 1e-6)  # the length of a unit vector after the guarded normalization


def test_the_first_chunk_starts_at_the_identity() -> None:
    """Frame 0 stands still; two intervals of four steps of 0.05 follow in a chunk of three."""
    path = integrate({"w"}, None, 3)
    assert np.array_equal(path.poses[0], np.eye(4))
    assert path.poses[:, 2, 3] == pytest.approx([0, 0.2 * LEVEL, 0.4 * LEVEL], abs=1e-12)
    assert np.array_equal(path.end.pose, path.poses[-1])


def test_a_first_chunk_of_one_frame_does_not_move() -> None:
    """There is no interval to walk."""
    assert np.array_equal(integrate({"w", "l"}, None, 1).poses, np.eye(4)[None])


def test_a_later_chunk_walks_all_its_intervals() -> None:
    """Three frames are three intervals from where the walk stood; the start itself isn't repeated."""
    start = integrate({"w"}, None, 3).end
    path = integrate({"w"}, start, 3)
    assert path.poses[:, 2, 3] == pytest.approx([0.6 * LEVEL, 0.8 * LEVEL, LEVEL], abs=1e-12)


@pytest.mark.parametrize(("key", "axis", "sign"), [("w", 2, 1), ("s", 2, -1), ("d", 0, 1), ("a", 0, -1)])
def test_keys_walk_along_their_axes(key: str, axis: int, sign: int) -> None:
    """A key moves along one axis only: x is right, z forward."""
    moved = integrate({key}, None, 2).end.pose[:3, 3]
    expected = np.zeros(3)
    expected[axis] = sign * 0.2 * LEVEL
    assert moved == pytest.approx(expected, abs=1e-12)


def test_keys_turn_about_their_axes() -> None:
    """Key l turns right and i lifts the view (y points down), by 2 degrees a step and 8 a latent frame."""
    right = integrate({"l"}, None, 2).end.pose[:3, :3] @ [0, 0, 1]
    assert right == pytest.approx([math.sin(math.radians(8)), 0, math.cos(math.radians(8))], abs=1e-12)
    up = integrate({"i"}, None, 2).end
    assert up.pose[:3, :3] @ [0, 0, 1] == pytest.approx(
        [0, -math.sin(math.radians(8)), math.cos(math.radians(8))], abs=1e-12
    )
    assert up.pitch == pytest.approx(math.radians(8))


def test_opposite_keys_cancel() -> None:
    """All eight keys together stand still, and so does no key."""
    assert np.array_equal(integrate(set(KEY_NAMES), None, 3).poses, integrate(set(), None, 3).poses)


def test_walking_stays_level_when_looking_up() -> None:
    """Forward is the horizontal part of the view, so the height doesn't change and the speed hardly."""
    start = integrate({"i"}, None, 5).end
    moved = integrate({"w"}, start, 1).end.pose[:3, 3] - start.pose[:3, 3]
    assert moved == pytest.approx([0, 0, 0.2], abs=1e-6)


def test_a_pitch_step_beyond_the_limit_is_dropped() -> None:
    """With steps of 11 degrees and a limit of 30 the view stops at 22 and not at 30, in both directions."""
    parameters = KeyboardParameters(pitch_step_degrees=11, pitch_limit_degrees=30)
    for key, sign in (("i", 1), ("k", -1)):
        end = integrate({key}, None, 4, parameters).end
        assert math.degrees(end.pitch) == pytest.approx(sign * 22)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_chunks_join_to_one_long_walk(chunk_size: int) -> None:
    """Chunk by chunk gives bit for bit the poses of a single call."""
    keys = {"w", "d", "l", "i"}
    whole = integrate(keys, None, 6).poses
    path = integrate(keys, None, chunk_size)
    pieces = [path.poses]
    while sum(len(piece) for piece in pieces) < 6:
        path = integrate(keys, path.end, chunk_size)
        pieces.append(path.poses)
    assert np.array_equal(np.concatenate(pieces), whole)


def test_rotations_stay_rotations() -> None:
    """After thousands of steps the axes are still orthonormal."""
    rotation = integrate({"w", "j", "k"}, None, 1000).end.pose[:3, :3]
    assert rotation @ rotation.T == pytest.approx(np.eye(3), abs=1e-11)
    assert np.linalg.det(rotation) == pytest.approx(1)


def test_an_integration_leaves_its_start_alone() -> None:
    """The end of one chunk can be walked from twice."""
    start = integrate({"w"}, None, 2).end
    before = start.pose.copy()
    first, second = integrate({"l", "w"}, start, 2), integrate({"l", "w"}, start, 2)
    assert np.array_equal(start.pose, before)
    assert np.array_equal(first.poses, second.poses)


def test_a_key_without_a_direction_is_refused() -> None:
    """Aliases were resolved before; here only canonical names count."""
    with pytest.raises(RequestError, match=r"^keys: unknown key 'ArrowUp'; accepted: w, a, s, d, i, j, k, l"):
        integrate({"ArrowUp"}, None, 3)


def test_flags_tell_the_walking_keys() -> None:
    """w, a, s, d in this order, the same for each frame; turning has no flag, opposite keys keep theirs."""
    assert action_flags({"w", "s", "l"}, 2).tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]


def test_aliases_stand_for_keys() -> None:
    """Every alias names a key and is none itself."""
    assert set(KEY_ALIASES.values()) == set(KEY_NAMES)
    assert not set(KEY_ALIASES) & set(KEY_NAMES)
    assert KEY_ALIASES["ArrowUp"] == KEY_ALIASES["forward"] == KEY_ALIASES["KeyW"] == "w"
