"""Whole sessions through the three stages of the tiny model, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reelwire.pipeline.device import Lane
from reelwire.pipeline.stage import SizedStage, Stage
from reelwire.pipeline.world.config import WorldConfig, lingbot_world_fast, tiny
from reelwire.pipeline.world.denoise_stage import DenoiseStage
from reelwire.pipeline.world.pipeline import WorldPipeline
from reelwire.spec import RequestError

CHUNKS = 3
ORDER = ("encode", "decode", "denoise")
KEYS = (["w"], ["l", "w"], ["a"])
Stages = dict[str, Stage]
Run = list[dict[str, Any]]


def small(config: WorldConfig) -> WorldConfig:
    return replace(config, area=32 * 48)


def built(config: WorldConfig, **settings: Any) -> Stages:
    """The stages, without a latent cache if none is asked for: what is to be compared is computed anew."""
    pipeline = replace(WorldPipeline.of(config), **{"latent_cache_bytes": 0, **settings})
    return {name: pipeline.build(name, "cpu") for name in ORDER}


@pytest.fixture(scope="module")
def stages() -> Stages:
    return built(small(tiny()))


@pytest.fixture(scope="module")
def single() -> Stages:
    """Chunks of one latent frame, and action control."""
    return built(small(tiny(1, "act")))


def request_of(**given: Any) -> dict[str, Any]:
    picture = torch.randint(0, 256, (30, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return {"prompt": "a stone bridge", "image": picture, "seed": 7, **given}


def opened(stages: Stages, session: str, chunks: int = CHUNKS, **given: Any) -> dict[str, Any]:
    handed: dict[str, Any] = {}
    for name in ORDER:
        handed.update(stages[name].initialize(session, chunks, request_of(**given), handed).handed)
    return handed


def chunk_of(stages: Stages, session: str, index: int, control: dict[str, Any], chunks: int = CHUNKS) -> dict[str, Any]:
    """Everything that one chunk gives, facts included."""
    artifacts: dict[str, Any] = {"encode_request": {}, "control": control}
    facts: dict[str, Any] = {}
    for name in ("encode", "denoise", "decode"):
        result = stages[name].run(session, index, artifacts, is_first=index == 0, is_last=index == chunks - 1)
        artifacts.update(result.outputs)
        facts.update(result.facts)
    return {**{name: artifacts[name][name] for name in ("condition", "latent", "frames")}, "facts": facts}


def released(stages: Stages, session: str) -> None:
    for name in ("decode", "denoise", "encode"):
        stages[name].release(session)


def ran(stages: Stages, session: str, controls: Sequence[dict[str, Any]] | None = None, **given: Any) -> Run:
    opened(stages, session, **given)
    steps = [{"keys": keys, "reset_pose": False} for keys in KEYS] if controls is None else controls
    try:
        return [chunk_of(stages, session, index, control) for index, control in enumerate(steps)]
    finally:
        released(stages, session)


def same(left: Run, right: Run) -> bool:
    return all(torch.equal(a["frames"], b["frames"]) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("fixture", ["stages", "single"])
def test_a_session_gives_frames_chunk_by_chunk(fixture: str, request: pytest.FixtureRequest) -> None:
    """The first chunk has 1 + 4(n-1) frames and each later one 4n, uint8, at the size that the image's shape gives."""
    run = ran(request.getfixturevalue(fixture), "a")
    chunk = 3 if fixture == "stages" else 1
    assert [len(made["frames"]) for made in run] == [1 + 4 * (chunk - 1), 4 * chunk, 4 * chunk]
    for made in run:
        assert made["frames"].dtype == torch.uint8
        assert made["frames"].shape[1:] == (16, 48, 3)
        assert made["condition"].shape == (1, 20, chunk, 2, 6)
        assert made["latent"].shape == (1, 16, chunk, 2, 6)
        assert all(tensor.device.type == "cpu" for tensor in made.values() if isinstance(tensor, Tensor))


def test_frames_are_pictures(stages: Stages) -> None:
    """Frames of the tiny model are neither flat nor saturated, and they move without flickering."""
    frames = torch.cat([made["frames"] for made in ran(stages, "a")[1:]]).float()
    assert 10 < float(frames.std()) < 100
    assert float(((frames == 0) | (frames == 255)).float().mean()) < 0.2
    assert 0 < float((frames[1:] - frames[:-1]).abs().mean()) < 25


def test_a_session_is_a_function_of_its_request(stages: Stages) -> None:
    """The same request and controls give the same bytes; another seed, prompt, image or key gives others."""
    base = ran(stages, "a")
    assert same(base, ran(stages, "b"))
    assert not same(base, ran(stages, "a", seed=8))
    assert not same(base, ran(stages, "a", prompt="a wooden bridge"))
    assert not same(base, ran(stages, "a", image=torch.zeros(30, 50, 3, dtype=torch.uint8)))
    assert not same(base, ran(stages, "a", [{"keys": ["s"]}] * CHUNKS))


def test_stages_built_twice_agree(stages: Stages) -> None:
    """Weights come from a seed: a model that is built again gives the same bytes."""
    assert same(ran(stages, "a"), ran(built(small(tiny())), "a"))


def test_a_session_does_not_notice_its_neighbours(stages: Stages) -> None:
    """Two sessions whose chunks take turns at every stage give the bytes that each gives alone."""
    alone = {"a": ran(stages, "a"), "b": ran(stages, "b", seed=9, window=6)}
    opened(stages, "a")
    opened(stages, "b", seed=9, window=6)
    try:
        for index, keys in enumerate(KEYS):
            for session in ("b", "a"):
                made = chunk_of(stages, session, index, {"keys": keys, "reset_pose": False})
                for name in ("condition", "latent", "frames"):
                    assert torch.equal(made[name], alone[session][index][name])
    finally:
        released(stages, "a")
        released(stages, "b")


def test_streaming_28_known_latents_change_no_byte(stages: Stages) -> None:
    """With a latent cache, a second session with the same beginning finds it, and all of it has a cold run's bits."""
    cached = built(small(tiny()), latent_cache_bytes=1 << 20)
    path = torch.eye(4).repeat(3, 1, 1)
    path[:, 0, 3] = torch.tensor([0.1, 0.2, 0.4])
    begin: list[dict[str, Any]] = [{"keys": ["w", "l"]}, {"poses": path, "translation_norm": 0.4}]
    for session, end, known in (("a", ["w"], 0), ("b", ["s"], 2), ("c", ["w"], 3)):
        controls = [*begin, {"keys": end, "reset_pose": True}]
        ours, expected = ran(cached, session, controls), ran(stages, session, controls)
        assert [made["facts"].pop("latent_cached", False) for made in ours] == [at < known for at in range(CHUNKS)]
        for one, other in zip(ours, expected, strict=True):
            assert one["facts"] == other["facts"]
            for name in ("condition", "latent", "frames"):
                assert torch.equal(one[name], other[name])


def test_streaming_28_another_picture_or_prompt_finds_nothing() -> None:
    """Denoise sees neither picture nor text weights; encode tells it by a digest."""
    cached = built(small(tiny()), latent_cache_bytes=1 << 20)
    ran(cached, "a")
    picture = request_of()["image"].clone()
    picture[29, 49, 2] ^= 1
    others: tuple[dict[str, Any], ...] = ({"image": picture}, {"prompt": "a stone bridge."})
    for given in others:
        assert not any("latent_cached" in made["facts"] for made in ran(cached, "b", **given))
    assert all(made["facts"]["latent_cached"] for made in ran(cached, "c"))


def test_a_released_session_leaves_nothing(stages: Stages) -> None:
    """After its release a session is unknown and its name is free; releasing it again, or a stranger, does nothing."""
    opened(stages, "a")
    with pytest.raises(ValueError, match="initialized here already"):
        opened(stages, "a")
    released(stages, "a")
    released(stages, "a")
    for name in ORDER:
        with pytest.raises(KeyError, match="isn't initialized here"):
            stages[name].run("a", 0, {}, is_first=True, is_last=False)
    opened(stages, "a")
    released(stages, "a")


def test_the_pose_at_the_end_of_a_chunk_is_a_fact(stages: Stages) -> None:
    """Keys move the pose; explicit poses are reported but don't move it; `reset_pose` goes back to the start."""
    there = torch.eye(4).repeat(3, 1, 1)
    there[:, 0, 3] = torch.tensor([0.1, 0.2, 0.3])
    run = ran(stages, "a", [{"keys": ["w"]}, {"poses": there}, {"keys": ["w"], "reset_pose": True}])
    first, explicit, again = (torch.tensor(made["facts"]["pose"], dtype=torch.float64) for made in run)
    assert first[2, 3] == pytest.approx(8 * 0.05, abs=1e-4)
    assert torch.equal(explicit, there[-1].double())
    assert torch.equal(again, first)


def test_a_bad_control_is_refused(stages: Stages) -> None:
    """A control of the wrong shape raises with its field, and the chunk can still be made with a good one."""
    expected = ran(stages, "a")[0]
    opened(stages, "a")
    try:
        with pytest.raises(RequestError, match="poses"):
            chunk_of(stages, "a", 0, {"poses": torch.eye(4)})
        condition = {"condition": {"condition": expected["condition"]}, "control": {"keys": ["w"]}}
        with pytest.raises(RuntimeError, match="chunk 0 is due"):
            stages["denoise"].run("a", 1, condition, is_first=False, is_last=False)
        made = stages["denoise"].run("a", 0, condition, is_first=True, is_last=False)
        assert torch.equal(made.outputs["latent"]["latent"], expected["latent"])
    finally:
        released(stages, "a")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"image": None}, "image"),
        ({"image": torch.zeros(30, 50, dtype=torch.uint8)}, "image"),
        ({"image": torch.zeros(1, 5000, 3, dtype=torch.uint8)}, "image"),
        ({"seed": -1}, "seed"),
        ({"area": 100}, "area"),
        ({"window": 4}, "window"),
        ({"attention": 2}, "attention"),
        ({"shift": 0}, "shift"),
        ({"dtype": "float16"}, "dtype"),
        ({"steps": 4}, "steps"),
        ({"intrinsics": torch.zeros(4)}, "intrinsics"),
        ({"calibration_width": 640}, "calibration_height"),
        ({"chunks": 400}, "chunks"),
    ],
)
def test_encode_refuses_what_no_stage_can_serve(stages: Stages, given: dict[str, Any], field: str) -> None:
    """The first stage checks the whole request, names the field, and keeps nothing of the session."""
    chunks = given.pop("chunks", CHUNKS)
    with pytest.raises(RequestError) as refused:
        stages["encode"].initialize("bad", chunks, request_of(**given), {})
    assert refused.value.field == field
    with pytest.raises(KeyError):
        stages["encode"].run("bad", 0, {}, is_first=True, is_last=False)


def test_parameters_reach_the_model(stages: Stages) -> None:
    """Window, shift, dtype, intrinsics and area each change the frames."""
    base = ran(stages, "a", window=-1, sink=0)
    assert not same(base, ran(stages, "a", window=3, sink=0))
    assert same(base, ran(stages, "a", window=9, sink=0))
    assert not same(base, ran(stages, "a", shift=5.0))
    assert not same(base, ran(stages, "a", dtype="bfloat16"))
    assert not same(base, ran(stages, "a", intrinsics=torch.tensor([300.0, 300.0, 416.0, 240.0])))
    assert ran(stages, "a", area=48 * 64)[0]["frames"].shape[1:] == (32, 64, 3)


def test_memory_is_known_at_initialization(stages: Stages) -> None:
    """Each stage says what a session holds, and what one may hold at most before its request is known."""
    handed: dict[str, Any] = {}
    for name in ORDER:
        initialized = stages[name].initialize("a", CHUNKS, request_of(), handed)
        handed.update(initialized.handed)
        assert 0 < initialized.cache_bytes <= stages[name].session_bytes
    assert handed["prompt_embeds"].shape == (1, 64, 64)
    assert (handed["height"], handed["width"]) == (16, 48)
    assert (handed["image_height"], handed["image_width"]) == (30, 50)
    released(stages, "a")


def test_streaming_12_what_a_session_takes_is_known_before_it_is_made(stages: Stages) -> None:
    """`needed_bytes` says what `initialize` then holds, for every request, and makes nothing."""
    for given in ({}, {"window": -1, "sink": 0}, {"area": 48 * 64}, {"dtype": "bfloat16"}):
        handed: dict[str, Any] = {}
        for name in ORDER:
            stage = stages[name]
            assert isinstance(stage, SizedStage)
            needed = stage.needed_bytes(CHUNKS, request_of(**given), handed, 1 << 30)
            initialized = stage.initialize("a", CHUNKS, request_of(**given), handed)
            assert needed == initialized.cache_bytes
            handed.update(initialized.handed)
        released(stages, "a")


HANDED = {"height": 464, "width": 832, "image_height": 480, "image_width": 832}


@pytest.mark.parametrize(
    ("name", "given", "most", "field", "accepted"),
    [
        ("encode", {"area": 480 * 832}, 1 << 20, "area", "accepted at this worker: what takes up to 1.0 MiB"),
        ("decode", {}, 1 << 20, "area", "464 x 832 pixels take"),
        ("denoise", {"window": -1, "area": 480 * 832}, 256 << 20, "window", "accepted: 6 to 77, or -1 in a session of"),
        ("denoise", {"window": 200, "area": 480 * 832}, 256 << 20, "window", "accepted: 6 to 77"),
        ("denoise", {"window": 200, "sink": 100, "area": 480 * 832}, 256 << 20, "sink", "accepted: up to 74"),
        ("denoise", {"area": 480 * 832}, 4 << 20, "area", "the 3 latent frames of a chunk"),
    ],
)
def test_streaming_12_a_session_that_alone_is_too_large_is_told_what_to_ask_less_of(
    stages: Stages, name: str, given: dict[str, Any], most: int, field: str, accepted: str
) -> None:
    """The field, what it takes, and what would fit."""
    stage = stages[name]
    assert isinstance(stage, SizedStage)
    picture = torch.zeros(480, 832, 3, dtype=torch.uint8)
    with pytest.raises(RequestError) as refused:
        stage.needed_bytes(341, request_of(image=picture, **given), HANDED, most)
    assert refused.value.field == field
    assert accepted in refused.value.reason


def test_streaming_12_the_full_model_refuses_a_window_that_no_machine_holds() -> None:
    """LingBot-World-Fast with the whole of a long session in its cache: refused by name, without its weights."""
    stage = DenoiseStage(lingbot_world_fast(), lambda _dtype: torch.nn.Identity(), Lane("cpu"))  # type: ignore[arg-type, return-value]
    request = {name: value for name, value in request_of().items() if name != "image"}
    with pytest.raises(RequestError) as refused:
        stage.needed_bytes(341, request, HANDED, 64 << 30)
    assert refused.value.field == "window"
    assert refused.value.reason == (
        "1023 latent frames of 464 x 832 pixels (the whole session) take 1177.4 GiB of cache, this worker has 64.0 GiB; "
        "accepted: 3 to 55, or -1 in a session of up to 18 chunks"
    )
    assert stage.needed_bytes(18, request, HANDED, 64 << 30) <= 64 << 30
