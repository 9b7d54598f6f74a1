"""The encode stage of the tiny model: from when on a session's condition is constant, and what it says of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reelwire.pipeline.stage import Stage, StageResult
from reelwire.pipeline.wan.vae_cache import same_bits
from reelwire.pipeline.world.config import tiny
from reelwire.pipeline.world.pipeline import WorldPipeline
from reelwire.pipeline.world.stream import world_spec

LATENTS = 27


def built(chunk_size: int, *, settle: bool) -> Stage:
    config = replace(tiny(chunk_size), area=32 * 32)
    return replace(WorldPipeline.of(config), condition_constant=settle).build("encode", "cpu")


def opened(stage: Stage, session: str, seed: int, rows: int = 30) -> None:
    picture = torch.randint(0, 256, (rows, 50, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    request: dict[str, Any] = {"prompt": "a stone bridge", "image": picture}
    stage.initialize(session, 100, request, {})


def chunk(stage: Stage, session: str, index: int) -> StageResult:
    return stage.run(session, index, {"encode_request": {}}, is_first=index == 0, is_last=index == 99)


def condition(result: StageResult) -> torch.Tensor:
    made: torch.Tensor = result.outputs["condition"]["condition"]
    return made


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_streaming_08_a_condition_is_the_same_with_and_without_settling(chunk_size: int) -> None:
    """Two sessions, one image each: every chunk has the same bits either way, and `constant` is said once it is true."""
    short, long = built(chunk_size, settle=True), built(chunk_size, settle=False)
    for session, seed in (("a", 1), ("b", 2)):
        opened(short, session, seed)
        opened(long, session, seed)
    said: dict[str, list[bool]] = {"a": [], "b": []}
    later: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for index in range(LATENTS // chunk_size):
        for session in ("a", "b"):
            ours, expected = chunk(short, session, index), chunk(long, session, index)
            assert same_bits(condition(ours), condition(expected))
            assert not expected.constant
            said[session].append(ours.constant)
            if ours.constant:
                later[session].append(condition(expected))
    assert said["a"] == said["b"] == sorted(said["a"]), "once constant, always constant"
    assert not said["a"][0]
    assert said["a"][-1]
    assert all(same_bits(each, later["a"][0]) for each in later["a"] + later["b"])


def test_streaming_08_what_is_handed_out_is_nobody_else_s() -> None:
    """Writing into a constant condition changes neither this session's later ones nor another session's."""
    stage = built(3, settle=True)
    for session, seed in (("a", 1), ("b", 2)):
        opened(stage, session, seed)
    made = {session: [chunk(stage, session, index) for index in range(LATENTS // 3)] for session in ("a", "b")}
    assert made["a"][-1].constant
    kept = condition(made["b"][-1]).clone()
    with torch.inference_mode():
        condition(made["a"][-1]).zero_()
        condition(made["b"][-1]).zero_()
    assert same_bits(condition(chunk(stage, "a", LATENTS // 3)), kept)
    assert same_bits(condition(chunk(stage, "b", LATENTS // 3)), kept)


def test_streaming_08_geometries_do_not_mix() -> None:
    """Sessions whose frames have another shape settle on a condition of their own, in turn on one stage."""
    stage = built(3, settle=True)
    opened(stage, "wide", 1)
    opened(stage, "tall", 1, rows=90)
    made = [(chunk(stage, "wide", index), chunk(stage, "tall", index)) for index in range(LATENTS // 3)]
    wide, tall = made[-1]
    assert wide.constant
    assert tall.constant
    assert condition(wide).shape == (1, 20, 3, 2, 4)
    assert condition(tall).shape == (1, 20, 3, 4, 2)


def test_streaming_08_the_spec_says_that_encode_settles() -> None:
    """And no other stage: their outputs follow the control."""
    spec = world_spec(tiny())
    assert [stage.name for stage in spec.stages if stage.settles] == ["encode"]
