"""From the key register and the pending slot to one snapshot per chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reelwire.broker.control import CHANGES_MAX, ControlDesk, Snapshot, check_control
from reelwire.controls import Keys, KeyState
from reelwire.errors import ControlError
from reelwire.messages import Applied, Artifact
from reelwire.tensors import from_array


@pytest.fixture
def desk(kit: Any) -> ControlDesk:
    return ControlDesk(kit.world(), "early", 0.0)


@pytest.fixture
def keys(kit: Any) -> Keys:
    return Keys(kit.world())


def take(desk: ControlDesk) -> Snapshot | None:
    """What the next chunk is given, if anything is offered."""
    index = max(desk.given, default=-1) + 1
    if not desk.offers:
        return None
    desk.take(index)
    desk.check()
    return desk.given[index]


def taken(desk: ControlDesk) -> tuple[str, object, int] | None:
    snapshot = take(desk)
    if snapshot is None:
        return None
    assert snapshot.applied is not None
    return snapshot.applied.source, snapshot.applied.control.values.get("keys"), snapshot.applied.revision


def test_streaming_14_explicit_then_tap_then_held(desk: ControlDesk, keys: Keys, kit: Any) -> None:
    """The pending control goes first, then the one-shot, once, then what is held, as often as asked."""
    assert not desk.offers
    assert taken(desk) is None
    desk.set_keys(keys.press("w"), 1.0)
    desk.set_pending(kit.keys_of("s"), 1.0)
    assert desk.offers
    assert [taken(desk) for _ in range(4)] == [
        ("explicit", ["s"], 0),
        ("tap", ["w"], 1),
        ("held", ["w"], 1),
        ("held", ["w"], 1),
    ]


def test_streaming_14_a_snapshot_does_not_change_with_the_keys(desk: ControlDesk, keys: Keys) -> None:
    """What was taken stays what it was; a release changes the next one."""
    desk.set_keys(keys.press("w"), 1.0)
    snapshot = take(desk)
    desk.set_keys(keys.release("w"), 2.0)
    assert snapshot is not None
    assert snapshot.applied == Applied("tap", Artifact({"keys": ["w"], "reset_pose": False}), 1, 1, 0)
    assert taken(desk) is None


def test_streaming_14_the_newest_pending_control_wins(desk: ControlDesk, kit: Any) -> None:
    """There is one slot, and what it lost is counted."""
    desk.set_pending(kit.keys_of("a"), 1.0)
    desk.set_pending(kit.keys_of("d"), 2.0)
    assert taken(desk) == ("explicit", ["d"], 0)
    assert taken(desk) is None
    assert desk.explicit_overwritten == 1


def test_streaming_14_the_newest_tap_wins(desk: ControlDesk, keys: Keys) -> None:
    """A one-shot that no chunk took is replaced by a newer one, and counted; a consumed one isn't."""
    desk.set_keys(keys.tap("w"), 1.0)
    desk.set_keys(keys.tap("a"), 1.0)
    assert taken(desk) == ("tap", ["a"], 2)
    desk.set_keys(keys.tap("d"), 1.0)
    assert desk.taps_overwritten == 1


def test_streaming_14_the_higher_revision_wins(desk: ControlDesk, keys: Keys) -> None:
    """An older or repeated register changes nothing."""
    old = keys.press("w")
    new = keys.release("w")
    assert desk.set_keys(new, 1.0)
    assert not desk.set_keys(old, 2.0)
    assert not desk.set_keys(new, 3.0)
    assert desk.state == new
    assert desk.active_at == 1.0
    assert not desk.holds


def test_streaming_14_a_pose_reset_marks_the_next_snapshot_of_keys_only(
    desk: ControlDesk, keys: Keys, kit: Any
) -> None:
    """The first snapshot after it carries the mark, an explicit control in between doesn't take it away."""
    desk.set_keys(keys.press("w"), 1.0)
    take(desk)
    desk.set_keys(keys.reset_pose(), 2.0)
    assert not desk.offers
    desk.set_pending(kit.keys_of("a"), 2.0)
    desk.set_keys(keys.press("d"), 3.0)
    marks = []
    for _ in range(3):
        snapshot = take(desk)
        assert snapshot is not None
        assert snapshot.applied is not None
        marks.append((snapshot.applied.source, snapshot.applied.control.values["reset_pose"]))
    assert marks == [("explicit", False), ("tap", True), ("held", False)]


def test_streaming_15_taps_and_explicit_controls_are_never_repeated(desk: ControlDesk, keys: Keys, kit: Any) -> None:
    """Once taken they are gone, also when the same register comes again."""
    desk.set_keys(keys.tap("w"), 1.0)
    desk.set_pending(kit.keys_of("a"), 1.0)
    assert take(desk) is not None
    assert take(desk) is not None
    desk.set_keys(keys.state, 2.0)
    assert taken(desk) is None


@pytest.mark.parametrize(
    "wrong", [KeyState(9, ("w", "x"), 9), KeyState(9, (), 9, ("w", "x"))], ids=["held", "tap_keys"]
)
def test_streaming_17_an_unknown_key_in_the_register_changes_nothing(
    desk: ControlDesk, keys: Keys, wrong: KeyState
) -> None:
    """It is refused with the names that are accepted, and the register stays."""
    desk.set_keys(keys.press("w"), 1.0)
    with pytest.raises(ControlError, match="accepted: w, a, s, d, up") as caught:
        desk.set_keys(wrong, 2.0)
    assert caught.value.code == "unknown_key"
    assert desk.state == keys.state


def test_streaming_17_aliases_become_canonical(desk: ControlDesk, kit: Any) -> None:
    """A register or a control may use other spellings; what a chunk gets is canonical, each key once."""
    desk.set_keys(KeyState(1, ("up", "w"), 1, ("up",)), 1.0)
    assert desk.state.held == ("w",)
    assert taken(desk) == ("tap", ["w"], 1)
    assert check_control(kit.keys_of("up", "a"), kit.world()) == kit.keys_of("a", "w")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_control_of_tensors_passes_as_it_is(kit: Any, dtype: type) -> None:
    """The broker looks at dtype and shape of the tensors that the spec lists, not into them."""
    control = Artifact({}, {"poses": from_array(np.zeros((1, 4, 4), dtype))})
    assert check_control(control, kit.world()) is control
    path = Artifact({"translation_norm": 0.5, "reset_pose": True}, control.tensors)
    assert check_control(path, kit.world()) is path


@pytest.mark.parametrize("shape", [(4, 4), (1, 3, 4), (1, 4, 4, 1)])
def test_streaming_17_poses_of_another_shape_are_refused(kit: Any, shape: tuple[int, ...]) -> None:
    """What the stage couldn't use is refused here, where it costs nothing; the sentence says what is accepted."""
    control = Artifact({}, {"poses": from_array(np.zeros(shape))})
    with pytest.raises(ControlError, match=r"poses: is float64.*accepted: float\[any, 4, 4\]") as caught:
        check_control(control, kit.world())
    assert caught.value.code == "malformed"


@pytest.mark.parametrize("norm", [-0.1, float("nan"), float("inf"), True, "1", [1.0]])
def test_streaming_17_a_path_is_divided_by_a_number(kit: Any, norm: Any) -> None:
    """Of 0 and more; anything else would fail the session at the stage, and is refused here."""
    control = Artifact({"translation_norm": norm}, {"poses": from_array(np.zeros((1, 4, 4)))})
    with pytest.raises(ControlError, match="accepted: a finite number, 0 or more") as caught:
        check_control(control, kit.world())
    assert caught.value.code == "malformed"


@pytest.mark.parametrize(
    ("values", "tensors", "code"),
    [
        ({}, (), "malformed"),
        ({"keys": ["w"]}, ("poses",), "malformed"),
        ({"keys": "w"}, (), "malformed"),
        ({"keys": [1]}, (), "malformed"),
        ({"keys": ["w"], "reset_pose": 1}, (), "malformed"),
        ({"keys": ["w"], "speed": 2}, (), "malformed"),
        ({"keys": ["w"], "translation_norm": 1.0}, (), "malformed"),
        ({}, ("depth",), "malformed"),
        ({"keys": ["w", "q"]}, (), "unknown_key"),
    ],
)
def test_streaming_17_a_bad_control_is_refused_with_its_reason(
    kit: Any, values: dict[str, Any], tensors: tuple[str, ...], code: str
) -> None:
    """Neither or both of keys and tensors, other names, other kinds: each has a sentence."""
    with pytest.raises(ControlError) as caught:
        check_control(Artifact(values, {name: kit.image() for name in tensors}), kit.world())
    assert caught.value.code == code


def test_streaming_29_the_first_chunk_that_applies_a_change_knows_when_it_came(desk: ControlDesk, keys: Keys) -> None:
    """Changes since the last snapshot of keys belong to the next one; a change that leaves nothing is forgotten."""
    desk.set_keys(keys.press("w"), 1.0)
    desk.set_keys(keys.press("d"), 2.0)
    snapshot = take(desk)
    assert snapshot is not None
    assert snapshot.changes_at == (1.0, 2.0)
    desk.set_keys(keys.release("w"), 3.0)
    desk.set_keys(keys.release("d"), 4.0)
    desk.set_keys(keys.press("a"), 9.0)
    snapshot = take(desk)
    assert snapshot is not None
    assert snapshot.changes_at == (9.0,)
    held = take(desk)
    assert held is not None
    assert held.changes_at == ()


def test_streaming_12_waiting_changes_are_bounded(desk: ControlDesk, keys: Keys) -> None:
    """However many key events come before a chunk, only the newest are remembered."""
    for at in range(1000):
        desk.set_keys(keys.tap("w"), float(at))
    snapshot = take(desk)
    assert snapshot is not None
    assert len(snapshot.changes_at) == CHANGES_MAX
