"""The emulated pipeline: what it shows, what it takes, and that its stages wait for their time."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from reelwire.errors import RequestError
from reelwire.pipeline.stage import StageResult
from reelwire.spec import check_registrable
from reelwire.workers import runner
from reelwire.workers.emulated import BITS, KEYS, Emulation, Shown, draw, emulated_spec, pipeline, read

FAST = {"encode_s": "0", "denoise_s": "0", "decode_s": "0"}


def stages(**options: str) -> dict[str, Any]:
    """The three stages with a session ``s`` of seed 7, without waiting."""
    made = pipeline(**{**FAST, **options})
    built = {name: made.build(name, "cpu") for name in made.spec.initialize_order}
    for stage in built.values():
        stage.initialize("s", 100, {"seed": 7}, {})
    return built


def chunk(built: dict[str, Any], index: int, keys: list[str]) -> tuple[StageResult, StageResult, Shown]:
    """Make one chunk: what encode gave, what denoise gave, what the first frame shows."""
    ends = {"is_first": index == 0, "is_last": False}
    condition = built["encode"].run("s", index, {"encode_request": {}}, **ends)
    inputs = {"condition": condition.outputs["condition"], "control": {"keys": keys, "reset_pose": False}}
    latent = built["denoise"].run("s", index, inputs, **ends)
    frames = built["decode"].run("s", index, {"latent": latent.outputs["latent"]}, **ends)
    return condition, latent, read(frames.outputs["frames"]["frames"][0])


def test_its_spec_can_be_registered_with_any_refill() -> None:
    """The dataflow of the world model, under any name and way of refilling, is one that a broker takes."""
    for refill in ("after_stage", "with_control", "never"):
        made = pipeline(name=f"emulated-{refill}", refill=refill, settles="3")
        check_registrable(made.spec)
        assert made.spec.prefetch is not None
        assert made.spec.prefetch.refill == refill
        assert made.spec.stage("encode").settles
    assert not emulated_spec(Emulation()).stage("encode").settles
    assert emulated_spec(Emulation()).chunks_max >= 100_000


@pytest.mark.parametrize(("height", "width"), [(4, BITS), (24, 48), (25, 67), (480, 832)])
def test_a_frame_shows_index_keys_and_trail(height: int, width: int) -> None:
    """Whatever is drawn is read again from every frame, at every size; frames of a chunk differ."""
    for shown in (
        Shown(0, (), 0),
        Shown(2**32 - 1, KEYS, 2**32 - 1),
        Shown(1234, ("w", "l"), 0xDEADBEEF),
    ):
        clip = draw(shown, 3, height, width)
        assert clip.shape == (3, height, width, 3)
        assert clip.dtype == np.uint8
        assert [read(frame) for frame in clip] == [shown] * 3
        assert not np.array_equal(clip[0], clip[1])


def test_a_chunk_is_a_function_of_seed_and_controls() -> None:
    """The same keys give the same frames; another key gives another trail from there on."""
    first, again, other = stages(), stages(), stages()
    held = [["w"], ["w", "d"], [], ["s"]]
    shown = [chunk(first, index, keys)[2] for index, keys in enumerate(held)]
    assert shown == [chunk(again, index, keys)[2] for index, keys in enumerate(held)]
    assert [each.index for each in shown] == [0, 1, 2, 3]
    assert [list(each.keys) for each in shown] == held
    moved = [chunk(other, index, keys)[2] for index, keys in enumerate([["w"], ["w"], [], ["s"]])]
    assert moved[0] == shown[0]
    assert all(one.trail != two.trail for one, two in zip(moved[1:], shown[1:], strict=True))


def test_payloads_have_the_size_that_was_asked_for_and_count() -> None:
    """Tensors of condition and latent are as large as asked, and a byte that isn't theirs changes the trail."""
    built = stages(condition_bytes="1000", latent_bytes="5000")
    condition, latent, _ = chunk(built, 0, ["w"])
    assert condition.outputs["condition"]["condition"].nbytes == 1000
    assert latent.outputs["latent"]["latent"].nbytes == 5000
    assert latent.facts == {"trail": latent.outputs["latent"]["trail"]}
    broken = dict(latent.outputs["latent"])
    broken["latent"] = broken["latent"].copy()
    broken["latent"][1234] ^= 1
    trails = []
    for values in (latent.outputs["latent"], broken):
        decode = stages()["decode"]
        frames = decode.run("s", 0, {"latent": values}, is_first=True, is_last=False)
        trails.append(read(frames.outputs["frames"]["frames"][0]).trail)
    assert trails[0] != trails[1]


def test_conditions_settle_where_it_was_asked_for() -> None:
    """From `settles` on they are the same, and encode says so; before, each is another one."""
    built = stages(settles="2", condition_bytes="16")
    made = [chunk(built, index, [])[0] for index in range(5)]
    assert [each.constant for each in made] == [False, False, True, True, True]
    marks = [each.outputs["condition"]["mark"] for each in made]
    assert len(set(marks)) == 3
    assert marks[2] == marks[3] == marks[4]
    assert not any(chunk(stages(), index, [])[0].constant for index in range(3))


def test_a_stage_gives_nothing_out_before_its_time() -> None:
    """A chunk takes at least as long as asked, measured on the clock that it waits on."""
    built = stages(denoise_s="0.02", jitter="0")
    for index in range(3):
        began = time.monotonic()
        chunk(built, index, ["w"])
        assert time.monotonic() - began >= 0.02


def test_jitter_is_drawn_from_its_seed() -> None:
    """The times vary within their share, the same at each run, and otherwise with another seed."""

    def stretches(seed: str) -> list[float]:
        stage = stages(jitter="0.25", jitter_seed=seed)["denoise"]
        return [stage._stretch(7, index) for index in range(50)]

    assert stretches("1") == stretches("1")
    assert stretches("1") != stretches("2")
    assert all(0.75 <= each <= 1.25 for each in stretches("1"))
    assert max(stretches("1")) - min(stretches("1")) > 0.1


def test_a_released_session_is_forgotten() -> None:
    """Nothing of it is kept, and releasing it again is no error."""
    for stage in stages().values():
        stage.release("s")
        stage.release("s")
        assert not stage._trails
        assert not stage._seeds


@pytest.mark.parametrize(
    ("option", "text", "accepted"),
    [
        ("denoise_s", "fast", "a number from 0 to 3600"),
        ("denoise_s", "nan", "a number from 0 to 3600"),
        ("jitter", "2", "a number from 0 to 1"),
        ("width", "31", "an integer from 32"),
        ("frames", "1.5", "an integer from 1"),
        ("refill", "often", "after_stage, with_control, never"),
        ("name", " ", "a name"),
        ("colour", "red", "name, encode_s"),
    ],
)
def test_an_option_is_refused_by_name(option: str, text: str, accepted: str) -> None:
    """What is accepted stands in the sentence."""
    with pytest.raises(RequestError, match=f"accepted: {accepted}") as refused:
        pipeline(**{option: text})
    assert refused.value.field == option


def test_it_is_built_in_for_a_worker() -> None:
    """A worker knows it by its name, with texts as options; it has no device but the CPU."""
    made = runner.load("emulated", {"denoise_s": "0.5"})
    assert made.spec.name == "emulated"
    assert runner.load("reelwire.workers.emulated:pipeline", {"fps": "8"}).spec.fps == 8
    with pytest.raises(RequestError, match="accepted: a built-in name \\(world, emulated\\)"):
        runner.load("imitated", {})
    with pytest.raises(RequestError, match="device"):
        made.build("encode", "cuda:0")
    assert math.isclose(pipeline(denoise_s="0.5").options.denoise_s, 0.5)
