"""From flags to a recipe, for a pipeline that is at hand as data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reelwire.commands.plan import (
    FirstLook,
    StreamFlags,
    check_controls,
    check_flags,
    first_look,
    length_of,
    recipe_of,
    typed,
)
from reelwire.commands.recipe import Recipe, Record, plain_control
from reelwire.controls import Control
from reelwire.errors import ConfigError, RequestError, UsageError
from reelwire.pipeline.world.config import tiny
from reelwire.pipeline.world.stream import world_spec

WORLD = world_spec(tiny())


def flags(tmp_path: Path, **changed: object) -> StreamFlags:
    """Flags as they are when little is said."""
    plain = StreamFlags(
        image=tmp_path / "picture.png",
        parameters={"prompt": "a world"},
        texts={},
        keys=None,
        poses=None,
        wall_clock=False,
        chunks=None,
        frames=None,
        policy="strict",
        pipeline=None,
        replay=None,
        out=tmp_path / "world.mp4",
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def test_without_a_word_w_is_held_for_eight_chunks(tmp_path: Path) -> None:
    """The default is a walk straight on."""
    recipe = recipe_of(flags(tmp_path), WORLD)
    assert recipe.chunks == 8
    assert recipe.controls is not None
    assert {control.keys for control in recipe.controls} == {("w",)}


def test_a_trace_gives_one_control_per_chunk_of_media_time(tmp_path: Path) -> None:
    """Chunk 0 lasts 9/16 s, the others 12/16 s; a tap shows in its chunk only."""
    recipe = recipe_of(flags(tmp_path, keys="0.0 +w; 0.6 tap d; 1.4 -w", chunks=4), WORLD)
    assert recipe.controls is not None
    assert [control.keys for control in recipe.controls] == [("w",), ("d", "w"), ("w",), ()]


def test_a_trace_may_stand_in_a_file(tmp_path: Path) -> None:
    """The flag names the file or is the trace."""
    (tmp_path / "keys.txt").write_text("0.0 +s\n")
    recipe = recipe_of(flags(tmp_path, keys=str(tmp_path / "keys.txt"), chunks=1), WORLD)
    assert recipe.controls is not None
    assert recipe.controls[0].keys == ("s",)


def test_by_the_wall_clock_the_trace_is_kept_and_checked(tmp_path: Path) -> None:
    """There are no controls by index then, but an unknown key is refused all the same."""
    recipe = recipe_of(flags(tmp_path, wall_clock=True, keys="0.5 +w"), WORLD)
    assert recipe.controls is None
    assert recipe.trace is not None
    with pytest.raises(RequestError, match=r"keys: line 1: unknown key 'x'; accepted: w, a, s, d"):
        recipe_of(flags(tmp_path, wall_clock=True, keys="0.5 +x"), WORLD)


def test_streaming_15_only_live_keys_are_bound_late_or_early(tmp_path: Path) -> None:
    """A trace by the wall clock says when; controls by index are bound already, and there the flag is refused."""
    assert recipe_of(flags(tmp_path, wall_clock=True), WORLD).control_binding == "late"
    assert recipe_of(flags(tmp_path, wall_clock=True, control_binding="early"), WORLD).control_binding == "early"
    check_flags(flags(tmp_path, wall_clock=True, control_binding="early"))
    with pytest.raises(UsageError, match=r"--control-binding is given without --wall-clock.* accepted: "):
        check_flags(flags(tmp_path, control_binding="late"))
    with pytest.raises(UsageError, match="--control-binding is given beside --from"):
        check_flags(flags(tmp_path, parameters={}, control_binding="late", replay=tmp_path / "x.json"))


def test_streaming_20_a_replay_may_have_another_pace(tmp_path: Path) -> None:
    """Frames don't depend on it."""
    check_flags(flags(tmp_path, parameters={}, pace="realtime", replay=tmp_path / "x.json"))


def test_unknown_keys_are_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    """Aliases are names too."""
    with pytest.raises(RequestError, match=r"keys: line 1: unknown key 'q'.*ArrowUp"):
        recipe_of(flags(tmp_path, keys="0.0 +q"), WORLD)


@pytest.mark.parametrize(
    ("frames", "words"), [(32, "4k\\+1"), (37, r"9 \+ 12\*n, such as 33 or 45"), (0, "4k\\+1"), (5, "such as 9 or 21")]
)
def test_frames_that_do_not_fill_chunks_are_refused(frames: int, words: str) -> None:
    """The sentence says the form, or the counts nearby."""
    with pytest.raises(RequestError, match=f"^frames: {frames} .*{words}"):
        length_of(WORLD, None, frames, "strict")


def test_frames_are_cut_to_whole_chunks_when_asked() -> None:
    """45 frames are four chunks; 57 - 4 = 53 aren't, and are cut to 45."""
    assert length_of(WORLD, None, 45, "strict") == 4
    assert length_of(WORLD, None, 53, "truncate") == 4
    assert length_of(WORLD, None, None, "strict") is None


def test_more_chunks_than_the_rotary_table_holds_are_refused() -> None:
    """1024 positions are 341 chunks of three latent frames, 4089 pixel frames."""
    assert length_of(WORLD, 341, None, "strict") == 341
    with pytest.raises(RequestError, match=r"^chunks: 342 .*at most 341 chunks, which are 4089 frames"):
        length_of(WORLD, 342, None, "strict")
    with pytest.raises(RequestError, match=r"^frames: 4101 .*4089 frames"):
        length_of(WORLD, None, 4101, "strict")


def test_poses_give_controls_and_the_sessions_intrinsics(tmp_path: Path) -> None:
    """As many chunks as the path fills; intrinsics belong to the request, not to each chunk."""
    np.save(tmp_path / "poses.npy", np.tile(np.eye(4), (33, 1, 1)))
    np.save(tmp_path / "intrinsics.npy", np.tile([400.0, 401.0, 416.0, 240.0], (33, 1)))
    recipe = recipe_of(flags(tmp_path, poses=tmp_path), WORLD)
    assert recipe.chunks == 3
    assert recipe.tensors == {"intrinsics": [400.0, 401.0, 416.0, 240.0]}
    assert recipe.controls is not None
    assert all(control.poses is not None and control.poses.shape == (3, 4, 4) for control in recipe.controls)
    assert [control.translation_norm for control in recipe.controls] == [0.0] * 3
    with pytest.raises(RequestError, match=r"^poses: has 33 frames for a session of 45"):
        recipe_of(flags(tmp_path, poses=tmp_path, chunks=4), WORLD)


def test_poses_that_fill_no_whole_chunks_are_refused_or_cut(tmp_path: Path) -> None:
    """As counts of frames are: 30 of them only with the policy that cuts, or with a length."""
    np.save(tmp_path / "poses.npy", np.tile(np.eye(4), (30, 1, 1)))
    np.save(tmp_path / "intrinsics.npy", np.array([400.0, 401.0, 416.0, 240.0]))
    with pytest.raises(RequestError, match=r"^poses: has 30 frames, .*accepted: 9 \+ 12\*n, such as 21 or 33"):
        recipe_of(flags(tmp_path, poses=tmp_path), WORLD)
    assert recipe_of(flags(tmp_path, poses=tmp_path, policy="truncate"), WORLD).chunks == 2
    assert recipe_of(flags(tmp_path, poses=tmp_path, chunks=2), WORLD).chunks == 2


def test_controls_that_do_not_fit_are_refused_before_the_stream(tmp_path: Path) -> None:
    """Flags for a model without them, and a key of a record that the pipeline doesn't have."""
    np.save(tmp_path / "poses.npy", np.tile(np.eye(4), (9, 1, 1)))
    np.save(tmp_path / "intrinsics.npy", np.array([400.0, 401.0, 416.0, 240.0]))
    np.save(tmp_path / "action.npy", np.zeros((9, 4)))
    with pytest.raises(RequestError, match=r"^action: unknown tensor; accepted: poses, intrinsics"):
        check_controls(recipe_of(flags(tmp_path, poses=tmp_path), WORLD), WORLD)
    replayed = Recipe("world", None, 1, {}, (Control(keys=("x",)),))
    with pytest.raises(RequestError, match=r"^from: controls\[0\]: control: unknown key 'x'; accepted: w, a"):
        check_controls(replayed, WORLD, "from")
    check_controls(recipe_of(flags(tmp_path), WORLD), WORLD)


def test_other_parameters_are_read_as_the_pipeline_has_them(tmp_path: Path) -> None:
    """Numbers are numbers; a name that isn't known is left to the check of all parameters."""
    assert typed(WORLD, {"shift": "5", "calibration_width": "832", "dtype": "bfloat16", "what": "x"}) == {
        "shift": 5.0,
        "calibration_width": 832,
        "dtype": "bfloat16",
        "what": "x",
    }
    with pytest.raises(ConfigError, match=r"shift: 'wide' .*accepted: a number"):
        typed(WORLD, {"shift": "wide"})
    recipe = recipe_of(flags(tmp_path, texts={"shift": "5"}), WORLD)
    assert recipe.parameters == {"prompt": "a world", "shift": 5.0}


def test_what_cannot_be_right_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    """Without a broker: names of files, an empty prompt, flags that exclude each other."""
    check_flags(flags(tmp_path))
    with pytest.raises(RequestError, match=r"^out: "):
        check_flags(flags(tmp_path, out=tmp_path / "x.gif"))
    with pytest.raises(RequestError, match=r"^prompt: is empty"):
        check_flags(flags(tmp_path, parameters={"prompt": " "}))
    with pytest.raises(RequestError, match=r"^prompt: is missing; accepted: --prompt"):
        check_flags(flags(tmp_path, parameters={}))
    check_flags(flags(tmp_path, parameters={}, texts={"prompt": "x"}))
    with pytest.raises(RequestError, match=r"^keys: there is no file .*walk\.txt; accepted: "):
        first_look(flags(tmp_path, keys="walk.txt"))
    with pytest.raises(RequestError, match=r"^image: is missing"):
        check_flags(flags(tmp_path, image=None))
    with pytest.raises(UsageError, match="--chunks and --frames"):
        check_flags(flags(tmp_path, chunks=1, frames=9))
    with pytest.raises(UsageError, match="--seed is given beside --from"):
        check_flags(flags(tmp_path, parameters={"seed": 1}, replay=tmp_path / "x.json"))
    with pytest.raises(RequestError, match=r"^keys: line 1"):
        first_look(flags(tmp_path, keys="now +w"))


def test_a_pipeline_without_a_picture_needs_none(tmp_path: Path) -> None:
    """Only the world must have one, as far as can be said without asking."""
    assert first_look(flags(tmp_path, image=None, pipeline="lab")) == FirstLook("lab", None)


def test_a_record_is_not_overwritten_by_its_own_replay(tmp_path: Path) -> None:
    """Neither it nor the video beside it, however the path is written; what its frames were is read before."""
    recipe = Recipe("lab", None, 1, {"seed": 1}, (Control(keys=()),))
    record = Record(recipe, "world.mp4", 16.0, "completed", frames_sha256="abc")
    record.chunks = [{"index": 0}]
    record.applied = [plain_control(Control(keys=()), "held")]
    path = tmp_path / "world.json"
    path.write_text(json.dumps(record.to_json(tmp_path)))
    replay = flags(tmp_path, image=None, parameters={}, replay=path)
    with pytest.raises(RequestError, match=r"^out: .*world\.mp4 and its record are those of --from"):
        first_look(replay)
    (tmp_path / "sub").mkdir()
    with pytest.raises(RequestError, match=r"^out: "):
        first_look(replace(replay, out=tmp_path / "sub" / ".." / "world.MP4"))
    look = first_look(replace(replay, out=tmp_path / "again.mp4"))
    assert look.frames_sha256 == "abc"
    assert look.replayed is not None
    assert look.replayed.controls == (Control(keys=()),)
