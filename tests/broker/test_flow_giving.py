"""Edges and cursors of a session whose tasks are sent ahead of their controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reelwire.broker.flow import NOTHING, OVER, READY, Flow
from reelwire.messages import Artifact

CONTROL = Artifact({"keys": []})


@pytest.fixture
def flow(kit: Any) -> Flow:
    """With a condition asked for, twice."""
    flow = Flow(kit.world(), 8)
    while flow.prefetch_one():
        pass
    flow.dispatch("encode")
    return flow


def test_a_task_that_awaits_its_control_counts_as_the_next_one(flow: Flow) -> None:
    """It lacks the control, then nothing, though its room was reserved when it was sent off; supplied, it is one like others."""
    denoise = flow.stages["denoise"]
    flow.start("encode")
    flow.finish("encode", {"condition": NOTHING})
    assert flow.comes(denoise, outside=True)
    assert not flow.comes(denoise)
    assert flow.dispatch("denoise", ("control",)) == 0
    flow.check()
    assert (denoise.outside, denoise.next, denoise.dispatched) == (0, 0, 1)
    assert (flow.lack(denoise), flow.given(denoise)) == ("input:control", {})
    assert flow.edges["latent"].occupancy == 1
    flow.submit(CONTROL)
    assert (flow.lack(denoise), flow.given(denoise)) == (READY, {"control": CONTROL})
    assert flow.supply(denoise, 0, ["control"])
    assert (denoise.outside, denoise.next, denoise.awaits) == (-1, 1, {})
    flow.start("denoise")
    flow.check()


def test_a_task_that_awaits_its_control_has_none_beyond_the_end(flow: Flow) -> None:
    """What it would have been given is dropped with the chunk."""
    denoise = flow.stages["denoise"]
    denoise.feeders.add(flow.stages["encode"])
    flow.dispatch("denoise", ("condition", "control"))
    assert flow.lack(denoise) == "input:condition"
    flow.submit(CONTROL)
    flow.cut(0)
    assert (flow.lack(denoise), flow.given(denoise)) == (OVER, {})
    flow.check()


def test_only_what_comes_with_the_control_is_awaited_from_outside(kit: Any) -> None:
    """A prefetched input comes by itself, and isn't in a hurry; without prefetching it comes with the control."""
    spec = kit.world()
    for refill, is_given in (("after_stage", False), ("with_control", False), ("never", True)):
        flow = Flow(replace(spec, prefetch=replace(spec.prefetch, refill=refill)), 8)
        given = {name for name, edge in flow.edges.items() if edge.is_given}
        assert given == ({"control", "encode_request"} if is_given else {"control"})
        assert flow.comes(flow.stages["encode"], outside=True) is is_given
