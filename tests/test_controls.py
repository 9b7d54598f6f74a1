"""The key register, controls and key traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reelwire.controls import (
    Control,
    KeyEvent,
    Keys,
    KeyState,
    KeyTrace,
    canonical_keys,
    controls_for,
    merged,
    next_from_register,
)
from reelwire.errors import RequestError
from reelwire.spec import Edge, StageSpec, StreamSpec, TensorInput, validate

SPEC = StreamSpec(
    name="toy",
    stages=(StageSpec("make", ("control",), ("frames",)),),
    edges=(Edge("control"), Edge("frames")),
    external_inputs=("control",),
    outputs=("frames",),
    initialize_order=("make",),
    control="control",
    chunks_max=10,
    frames_first=9,
    frames_next=12,
    frame_stride=4,
    fps=16.0,
    control_names=("a", "d", "s", "w"),
    control_aliases={"ArrowUp": "w", "left": "a"},
    control_tensors=(
        TensorInput("poses", "float", (-1, 4, 4), required=True),
        TensorInput("intrinsics", "float", (4,)),
    ),
)
IDENTITY = np.eye(4, dtype=np.float32)[None]


def keys() -> Keys:
    return Keys(SPEC)


def refused(call: Callable[[], object], field: str) -> str:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.field == field
    return caught.value.reason


def test_streaming_14_a_new_press_queues_a_one_shot_of_all_held_keys() -> None:
    """A press that newly holds a key queues a snapshot of every key that is down then."""
    writer = keys()
    writer.press("w")
    state = writer.press("d")
    assert state == KeyState(revision=2, held=("d", "w"), tap_revision=2, tap_keys=("d", "w"))


def test_streaming_14_a_repeated_press_does_nothing() -> None:
    """A press of a key that is down already, under any of its names, leaves the very same register."""
    writer = keys()
    state = writer.press("w")
    assert writer.press("w") is state
    assert writer.press("ArrowUp") is state


def test_streaming_14_a_release_leaves_the_pending_one_shot_alone() -> None:
    """A release takes the key out of what is held; the one-shot still names it."""
    writer = keys()
    writer.press("w")
    writer.press("d")
    state = writer.release("w")
    assert state.held == ("d",)
    assert (state.tap_revision, state.tap_keys) == (2, ("d", "w"))
    assert writer.release("w") is state


def test_streaming_14_a_tap_is_press_and_release_at_once() -> None:
    """A tap ends as a press and a release do, in one change."""
    tapped, pressed = keys(), keys()
    for writer in (tapped, pressed):
        writer.press("a")
    tapped.tap("w")
    pressed.press("w")
    pressed.release("w")
    assert tapped.state == dataclasses.replace(pressed.state, revision=2)


def test_streaming_14_a_tap_of_a_held_key_ends_its_hold() -> None:
    """Of a tap on a key that is down the press does nothing and the release counts."""
    writer = keys()
    before = writer.press("w")
    state = writer.tap("w")
    assert state.held == ()
    assert state.tap_revision == before.tap_revision


def test_streaming_14_setting_the_whole_set_queues_only_for_new_keys() -> None:
    """The whole held set at once: a one-shot if a key is new, none if keys only leave."""
    writer = keys()
    first = writer.set_keys({"w", "left"})
    assert first == KeyState(1, ("a", "w"), 1, ("a", "w"))
    second = writer.set_keys(["a"])
    assert second == KeyState(2, ("a",), 1, ("a", "w"))
    assert writer.set_keys(("a", "left")) is second
    assert writer.set_keys([]).held == ()


def test_streaming_14_reset_takes_back_what_is_held_and_pending() -> None:
    """A reset leaves nothing held and nothing to consume, and the number of the one-shot still grows after it."""
    writer = keys()
    assert writer.reset() is writer.state
    writer.press("w")
    state = writer.reset()
    assert state == KeyState(revision=2, tap_revision=1)
    assert next_from_register(state, 0) is None
    assert writer.reset() is state
    assert writer.press("d").tap_revision == 2


def test_streaming_14_reset_pose_resets_and_is_always_a_change() -> None:
    """Going back to the first pose clears the keys too, and asking twice asks twice."""
    writer = keys()
    writer.press("w")
    state = writer.reset_pose()
    assert (state.held, state.tap_keys, state.reset_pose_revision) == ((), (), 1)
    assert writer.reset_pose().reset_pose_revision == 2


def test_streaming_14_a_one_shot_is_offered_before_held_keys_and_once() -> None:
    """The register offers the newest unconsumed one-shot, then what is held, then nothing."""
    writer = keys()
    writer.press("w")
    writer.tap("d")
    state = writer.tap("a")
    assert next_from_register(state, 1) == ("tap", ("a", "w"))
    assert next_from_register(state, 3) == ("held", ("w",))
    assert next_from_register(writer.release("w"), 3) is None
    assert next_from_register(KeyState(), 0) is None


def test_streaming_17_unknown_keys_are_refused_with_the_known_ones() -> None:
    """A key that the stream doesn't list is refused wherever it is named, and nothing changes."""
    writer = keys()
    state = writer.press("w")
    calls: list[Callable[[], object]] = [
        lambda: writer.press("q"),
        lambda: writer.release("W"),
        lambda: writer.tap(""),
        lambda: writer.set_keys(["w", "q"]),
        lambda: Control(keys={"q"}).for_stream(SPEC),
        lambda: canonical_keys(["q"], SPEC),
    ]
    for call in calls:
        assert "accepted: a, d, s, w, ArrowUp, left" in refused(call, "control")
    assert writer.state is state


@given(st.lists(st.tuples(st.sampled_from(["press", "release", "tap"]), st.sampled_from(["a", "d", "s", "w"]))))
def test_every_change_of_the_register_raises_its_revision(events: list[tuple[str, str]]) -> None:
    """A register differs from the one before exactly if its revision is one higher, and its sets are sorted."""
    writer = keys()
    for method, key in events:
        before = writer.state
        after = getattr(writer, method)(key)
        assert after.revision == before.revision + (after != before)
        assert (after is before) == (after == before)
        assert list(after.held) == sorted(set(after.held))
        assert list(after.tap_keys) == sorted(set(after.tap_keys))


def test_the_higher_revision_holds() -> None:
    """A register that arrives late or twice is dropped; a newer one replaces all."""
    old, new = KeyState(revision=3, held=("w",)), KeyState(revision=4)
    assert merged(old, new) is new
    assert merged(new, old) is new
    assert merged(new, KeyState(revision=4, held=("a",))) is new


def test_a_writer_goes_on_from_a_given_register() -> None:
    """A client that resumes numbers on from what it had."""
    assert Keys(SPEC, KeyState(revision=7, tap_revision=3)).press("w") == KeyState(8, ("w",), 4, ("w",))


def test_a_control_needs_exactly_one_of_keys_and_poses() -> None:
    """Neither and both are refused; an empty set of keys stands still."""
    refused(Control, "control")
    refused(lambda: Control(keys=(), poses=IDENTITY), "control")
    assert Control(keys=()).keys == ()
    assert Control(keys=["w", "a", "w"]).keys == ("a", "w")


def test_a_control_refuses_what_is_no_collection_of_names() -> None:
    """A text would be read letter by letter, so it is refused, and so is what isn't text."""
    refused(lambda: Control(keys="wd"), "keys")
    refused(lambda: Control(keys=3), "keys")  # type: ignore[arg-type]
    refused(lambda: Control(keys=[1]), "keys")  # type: ignore[list-item]
    refused(lambda: Control(keys=[], reset_pose=1), "reset_pose")  # type: ignore[arg-type]


def test_a_control_refuses_arrays_that_cannot_be_right() -> None:
    """Shape, numbers and finiteness are checked; arrays beside keys have no meaning."""
    refused(lambda: Control(keys=(), intrinsics=[1, 1, 1, 1]), "intrinsics")
    refused(lambda: Control(keys=(), action=[[1, 0, 0, 0]]), "action")
    assert "[3, 4]" in refused(lambda: Control(poses=np.zeros((3, 4))), "poses")
    refused(lambda: Control(poses=np.zeros((0, 4, 4))), "poses")
    refused(lambda: Control(poses=np.full((1, 4, 4), np.nan)), "poses")
    refused(lambda: Control(poses=[["x"]]), "poses")
    refused(lambda: Control(poses=[[1], [1, 2]]), "poses")
    refused(lambda: Control(poses=IDENTITY, intrinsics=[1, 2, 3]), "intrinsics")
    refused(lambda: Control(poses=IDENTITY, intrinsics=np.zeros((0, 4))), "intrinsics")
    refused(lambda: Control(poses=IDENTITY, action=[1, 0, 0, 0]), "action")


def test_a_controls_arrays_are_its_own() -> None:
    """They are copied, can't be written to, and keep single precision if they had it."""
    given_poses = IDENTITY.copy()
    control = Control(poses=given_poses, intrinsics=[[1, 1, 0, 0]], action=[[1, 0, 0, 0]], reset_pose=True)
    given_poses[:] = 0
    assert control.poses is not None
    assert control.intrinsics is not None
    assert (control.poses == IDENTITY).all()
    assert control.poses.dtype == np.float32
    assert control.intrinsics.dtype == np.float64
    assert not control.poses.flags.writeable
    assert set(control.tensors()) == {"poses", "intrinsics", "action"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        control.reset_pose = False  # type: ignore[misc]


def test_controls_compare_by_content() -> None:
    """Two controls are equal if all their parts are; they are not hashable, since they hold arrays."""
    assert Control(poses=IDENTITY) == Control(poses=IDENTITY)
    assert Control(poses=IDENTITY) != Control(poses=IDENTITY.astype(np.float64))
    assert Control(poses=IDENTITY) != Control(poses=IDENTITY, action=[[1]])
    assert Control(keys={"w"}) != Control(keys={"w"}, reset_pose=True)
    assert Control(keys={"w"}) != "w"
    with pytest.raises(TypeError):
        hash(Control(keys=()))


def test_a_control_is_fitted_to_a_stream() -> None:
    """Names become canonical; an array that the stream doesn't list is refused."""
    assert Control(keys={"ArrowUp", "left"}, reset_pose=True).for_stream(SPEC) == Control(
        keys={"a", "w"}, reset_pose=True
    )
    control = Control(poses=IDENTITY)
    assert control.for_stream(SPEC) is control
    reason = refused(lambda: Control(poses=IDENTITY, action=[[1, 0, 0, 0]]).for_stream(SPEC), "action")
    assert "poses, intrinsics" in reason


def test_a_trace_is_read_in_order_of_time() -> None:
    """Entries stand on lines or between semicolons; comments end with the line; equal times keep their order."""
    trace = KeyTrace.parse("# a walk; not this\n1.5 -w +left ; 0 +w  # go; on\n\n1.5 tap d reset\n 2e0 reset_pose;")
    assert trace.events == (
        KeyEvent(0.0, "press", "w", 2),
        KeyEvent(1.5, "release", "w", 2),
        KeyEvent(1.5, "press", "left", 2),
        KeyEvent(1.5, "tap", "d", 4),
        KeyEvent(1.5, "reset", "", 4),
        KeyEvent(2.0, "reset_pose", "", 5),
    )
    assert KeyTrace.parse("") == KeyTrace()


@pytest.mark.parametrize("entry", ["w", "+w", "-1 +w", "nan +w", "inf +w", "1", "1 w", "1 +", "1 tap", "1 hold w"])
def test_a_bad_entry_is_refused_with_its_line(entry: str) -> None:
    """What can't be read is refused with the line and what is accepted."""
    reason = refused(lambda: KeyTrace.parse(f"0 +w\n{entry}"), "trace")
    assert reason.startswith("line 2: ")
    assert "accepted: a time in seconds" in reason


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    """A file gives the same trace as its text; one that isn't there or isn't text is refused."""
    path = tmp_path / "walk.txt"
    path.write_text("0 +w\n1 -w\n", encoding="utf-8")
    assert KeyTrace.load(path) == KeyTrace.parse("0 +w\n1 -w\n")
    refused(lambda: KeyTrace.load(tmp_path / "none.txt"), "trace")
    for wrong in ("a\0b", "\ud800", "x" * 5000, None, tmp_path):
        refused(lambda wrong=wrong: KeyTrace.load(wrong), "trace")  # type: ignore[misc]
    path.write_bytes(b"\xff\xfe\xff")
    refused(lambda: KeyTrace.load(str(path)), "trace")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 +w", ["w", "w", "w", "w"]),
        ("0 +w; 1 -w", ["w", "w", "", ""]),
        ("0.1 +w; 0.2 -w", ["w", "", "", ""]),
        ("0.6 tap d", ["", "d", "", ""]),
        ("0.5625 +w", ["", "w", "w", "w"]),
        ("0 +w; 0.5625 -w", ["w", "", "", ""]),
        ("0 +w; 0.5625 -w +w", ["w", "w", "w", "w"]),
        ("0.5625 +w -w", ["", "w", "", ""]),
        ("0.5625 tap w", ["", "w", "", ""]),
        ("0 +w; 0.6 +d; 0.7 reset; 0.8 +a", ["w", "a", "a", "a"]),
        ("0 +w; 0.6 reset; 0.7 +w", ["w", "w", "w", "w"]),
        ("0 +ArrowUp +left; 0.1 -w", ["aw", "a", "a", "a"]),
        ("99 +w", ["", "", "", ""]),
    ],
)
def test_controls_follow_from_the_trace(text: str, expected: list[str]) -> None:
    """Chunks start at 0, 9/16, 21/16 and 33/16 s; each has the keys held at its start and those newly pressed in it."""
    validate(SPEC)
    controls = controls_for(KeyTrace.parse(text), SPEC, 4)
    assert ["".join(control.keys or ()) for control in controls] == expected
    assert not any(control.reset_pose for control in controls)


def test_reset_pose_marks_the_chunk_it_falls_in() -> None:
    """The chunk starts at the first pose and has only the keys pressed after the reset."""
    controls = controls_for(KeyTrace.parse("0 +w; 0.6 +d; 0.7 reset_pose; 0.8 tap a reset"), SPEC, 3)
    assert controls == [Control(keys={"w"}), Control(keys=(), reset_pose=True), Control(keys=())]


def test_streaming_17_an_unknown_key_in_a_trace_is_refused_with_its_line() -> None:
    """A trace is parsed without a stream, so its keys are checked when controls are made of it, all at once."""
    reason = refused(lambda: controls_for(KeyTrace.parse("0 +w\n99 +q"), SPEC, 1), "trace")
    assert reason.startswith("line 2: unknown key 'q'; accepted: a, d, s, w")


def test_the_number_of_chunks_may_be_zero_but_not_less() -> None:
    """No chunks need no controls."""
    assert controls_for(KeyTrace.parse("0 +w"), SPEC, 0) == []
    refused(lambda: controls_for(KeyTrace(), SPEC, -1), "chunks")


@pytest.mark.parametrize("norm", [-1, float("nan"), float("inf"), True, "1"])
def test_what_steps_are_divided_by_is_a_number_of_0_or_more(norm: object) -> None:
    """Anything else is refused, and so is one beside keys."""
    with pytest.raises(RequestError, match=r"^translation_norm: .*accepted: a finite number, 0 or more"):
        Control(poses=np.eye(4)[None], translation_norm=norm)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^translation_norm: is given without poses"):
        Control(keys=(), translation_norm=1.0)
    assert Control(poses=np.eye(4)[None], translation_norm=0).translation_norm == 0.0
    assert Control(poses=np.eye(4)[None], translation_norm=1.0) != Control(poses=np.eye(4)[None])
