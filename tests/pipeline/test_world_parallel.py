"""The world model's denoise stage on the ranks of a group, beside the same on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from reelwire.pipeline.parallel import Parallel
from reelwire.pipeline.stage import ParallelPipeline
from reelwire.pipeline.world.config import lingbot_world_fast, tiny
from reelwire.pipeline.world.dit import session_bytes
from reelwire.pipeline.world.pipeline import WorldPipeline
from reelwire.pipeline.world.request import WorldRequest
from reelwire.pipeline.world.sizes import denoise_bytes
from reelwire.spec import RequestError

from . import world_cases
from .rank_pool import RankPool
from .rank_program import Member

WORLDS = (2, 4)
PATH = torch.eye(4).repeat(3, 1, 1)
PATH[:, 0, 3] = torch.tensor([0.1, 0.3, 0.2])
CONTROLS: list[dict[str, Any]] = [
    {"keys": ["w"]},
    {"keys": ["w", "l"]},
    {"poses": PATH.tolist()},
    {"poses": PATH.tolist(), "translation_norm": 0.5},
    {"keys": ["w"], "reset_pose": True},
    {"keys": []},
]
KEYS: list[dict[str, Any]] = [control for control in CONTROLS if "keys" in control]
ACTIONS: list[dict[str, Any]] = [
    {"keys": ["w", "a"]},
    {"poses": PATH.tolist(), "action": [[1.0, 0.0, 0.0, 1.0]] * 3},
    {"keys": ["s"]},
]
SESSIONS: dict[str, dict[str, Any]] = {
    # 18 tokens a chunk
    "a ring behind a sink": {"controls": CONTROLS, "window": 7, "sink": 2},
    "less attended to than held": {"controls": CONTROLS[:4], "window": 9, "attention": 4},
    # 9 tokens a chunk: the last of 4 ranks has nothing but padding
    "small pictures": {"controls": CONTROLS[:4], "window": 6, "area": 32 * 48},
    # 3 tokens a chunk: fewer than ranks
    "chunks of one latent frame": {"controls": KEYS, "window": 2, "area": 32 * 48, "model": {"chunk_size": 1}},
    # 27 tokens a chunk
    "action control": {"controls": ACTIONS, "window": 5, "area": 64 * 48, "model": {"control": "act"}},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """The processes of groups of up to 4."""
    with RankPool(max(WORLDS)) as pool:
        yield pool


def latents(made: list[dict[str, Any]]) -> list[Tensor]:
    return [torch.tensor(each["latent"]) for each in made]


def furthest(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> float:
    """How far two runs are apart anywhere."""
    pairs = zip(latents(left), latents(right), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", SESSIONS)
def test_a_group_makes_the_latents_of_one_rank(ranks: RankPool, name: str) -> None:
    """To 1e-5, on every rank the same bits, whatever the tokens of a chunk, the window and the kind of control."""
    session = SESSIONS[name]
    alone = world_cases.rollout(Member(), **session)
    for world in WORLDS:
        results = ranks.run(world, world_cases.rollout, **session)
        assert all(result == results[0] for result in results)
        assert furthest(results[0]["made"], alone["made"]) < 1e-5
        assert [each["pose"] for each in results[0]["made"]] == [each["pose"] for each in alone["made"]]


def test_bfloat16_weights_give_nearly_the_same_on_a_group(ranks: RankPool) -> None:
    """Rounding differs where products are cut otherwise, and no further."""
    session: dict[str, Any] = {"controls": CONTROLS[:2], "dtype": "bfloat16"}
    alone = world_cases.rollout(Member(), **session)
    exact = world_cases.rollout(Member(), controls=CONTROLS[:2])
    results = ranks.run(4, world_cases.rollout, **session)
    assert all(result == results[0] for result in results)
    assert furthest(results[0]["made"], alone["made"]) < 2 * furthest(alone["made"], exact["made"])


def test_a_rank_holds_its_share_of_the_heads(ranks: RankPool) -> None:
    """What a session takes is foretold and is 1 / P of the rolling cache; the prompt's part stays whole."""
    session = SESSIONS["a ring behind a sink"]
    alone = world_cases.rollout(Member(), **session)
    assert alone["needed"] == alone["held"]
    prompt = alone["held"] - alone["rolling"]
    for world in WORLDS:
        for rank in ranks.run(world, world_cases.rollout, **session):
            assert rank["heads"] == world_cases.HEADS // world
            assert rank["needed"] == rank["held"] == alone["rolling"] // world + prompt
            assert prompt < rank["default"] < alone["default"]


def test_what_is_accepted_on_a_group_reckons_with_the_share_of_a_rank() -> None:
    """A window that one rank refuses with the largest it could hold is held by four, of which each needs a quarter."""
    config = lingbot_world_fast()
    asked = WorldRequest.of(config, 40, {"prompt": "a bridge"}, 480, 832)
    one, four = (denoise_bytes(config, asked, 1 << 50, world) for world in (1, 4))
    prompt = session_bytes(config.dit, 0, torch.bfloat16)
    assert four - prompt == (one - prompt) // 4
    with pytest.raises(RequestError, match=r"window: 120 latent frames .* accepted: 3 to "):
        denoise_bytes(config, asked, four)
    assert denoise_bytes(config, asked, four, 4) == four
    with pytest.raises(RequestError, match="accepted: 3 to 119"):
        denoise_bytes(config, asked, four - 1, 4)


def test_groups_04_a_session_goes_on_in_a_group_that_was_formed_anew(ranks: RankPool) -> None:
    """Between chunks the group is left and met again: weights and caches stay, and not a bit moves."""
    session = SESSIONS["a ring behind a sink"]
    steady = ranks.run(2, world_cases.rollout, **session)
    assert ranks.run(2, world_cases.rollout, anew=[0, 2, 5], **session) == steady


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("fails", "hits"),
    [([], [True] * 3 + [False] * 3), (["get"], [False] * 6), (["put"], [True] * 6), (["get", "clear"], [False] * 6)],
    ids=str,
)
def test_streaming_28_a_latent_is_known_on_all_ranks_or_on_none(
    ranks: RankPool, world: int, fails: list[str], hits: list[bool]
) -> None:
    """Only rank 0 keeps latents. What it finds, forgets and fails at is the same on all, and the bits are of a cold run."""
    results = ranks.run(world, world_cases.known, controls=CONTROLS, fails=fails)
    assert [result["keeps"] for result in results] == [True] + [False] * (world - 1)
    cold = results[0]["first"]
    assert not any("latent_cached" in each for each in cold)
    for result in results:
        assert [bool(each.pop("latent_cached", False)) for each in result["second"]] == hits
        assert result["first"] == result["second"] == cold


def test_groups_02_what_is_wrong_with_a_call_is_found_on_all_ranks_alike(ranks: RankPool) -> None:
    """A control, a request, a chunk too many: each rank raises the same, none is left waiting, and the next call works."""
    results = ranks.run(4, world_cases.refused, controls=CONTROLS[:3])
    alone = world_cases.refused(Member(), CONTROLS[:3])
    assert all(result == results[0] for result in results)
    assert results[0]["fields"] == alone["fields"] == ["poses"] * 3 + ["area"]
    assert results[0]["beyond"] == alone["beyond"]
    assert "evicts nothing" in alone["beyond"]
    assert furthest(results[0]["made"], alone["made"]) < 1e-5


def test_groups_06_a_group_is_checked_before_weights_are_loaded() -> None:
    """The full model says which groups it accepts, and a stage that isn't computed together isn't built so."""
    with pytest.raises(RequestError) as refused:
        WorldPipeline(lingbot_world_fast(), WorldPipeline.of(tiny()).spec).check_group(3)
    assert refused.value.field == "world"
    assert "40 attention heads can't be shared by 3 ranks; accepted: 1, 2, 4, 5, 8, 10, 20, 40" in refused.value.reason
    pipeline = WorldPipeline.of(tiny())
    assert isinstance(pipeline, ParallelPipeline)
    assert pipeline.parallel_stages == ("denoise",)
    for world in (1, 2, 4):
        pipeline.check_group(world)
    with pytest.raises(RequestError, match="world: 4 attention heads can't be shared by 3 ranks"):
        pipeline.build_parallel("denoise", "cpu", Parallel(0, 3))
    for stage in ("encode", "decode", "draw"):
        with pytest.raises(RequestError, match="accepted: denoise"):
            pipeline.build_parallel(stage, "cpu", Parallel(0, 2))
