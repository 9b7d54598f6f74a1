"""Edges and cursors of one session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reelwire.broker.flow import NOTHING, Edge, Flow
from reelwire.messages import Artifact
from reelwire.spec import Edge as EdgeSpec
from reelwire.spec import Prefetch, StageSpec, StreamSpec, validate

CONTROL = Artifact({"keys": []})
EDGES = ("encode_request", "condition", "control", "latent", "frames")


@pytest.fixture
def flow(kit: Any) -> Flow:
    return Flow(kit.world(), 8)


def fill(flow: Flow) -> None:
    """Prefetch as far as it goes."""
    while flow.prefetch_one():
        pass


def run(flow: Flow, stage: str) -> int:
    """One task from the start to the end."""
    index = flow.dispatch(stage)
    flow.start(stage)
    return flow.finish(stage, {edge.artifact: Artifact({"at": index}) for edge in flow.stages[stage].produces})


def cursors(flow: Flow) -> tuple[int, int]:
    return flow.next_condition_index, flow.next_control_index


def snapshot(flow: Flow) -> object:
    """Everything that could change."""
    edges = {name: (edge.issued, dict(edge.taken), dict(edge.held)) for name, edge in flow.edges.items()}
    stages = {name: (stage.dispatched, stage.started, stage.finished) for name, stage in flow.stages.items()}
    return edges, stages, flow.next_commit, flow.limit


def test_streaming_02_the_window_is_filled_before_any_control(flow: Flow) -> None:
    """Two conditions are enqueued when nothing was accepted yet, and no third."""
    fill(flow)
    assert cursors(flow) == (2, 0)
    assert not flow.prefetch_one()


def test_streaming_02_accepting_a_control_enqueues_no_condition_ahead(flow: Flow) -> None:
    """An accepted control opens the window, but nothing is enqueued until somebody asks for it."""
    fill(flow)
    run(flow, "encode")
    flow.submit(CONTROL)
    assert cursors(flow) == (2, 1)
    assert flow.prefetch_one()
    assert cursors(flow) == (3, 1)


def test_streaming_02_a_full_edge_ends_the_refill_without_error(kit: Any) -> None:
    """With one place on its edge the first condition is enqueued, the second refused, and the cursor stays."""
    flow = Flow(kit.world(capacities={"encode_request": 1, "control": 1}), 8)
    assert flow.prefetch_one()
    assert not flow.prefetch_one()
    assert cursors(flow) == (1, 0)
    flow.dispatch("encode")
    assert not flow.prefetch_one(), "an artifact stays on its edge until its consumer starts"
    flow.start("encode")
    assert flow.prefetch_one()


def test_streaming_02_prefetch_ends_with_the_session(kit: Any) -> None:
    """No condition beyond the last chunk is enqueued."""
    flow = Flow(kit.world(), 1)
    fill(flow)
    assert cursors(flow) == (1, 0)


@pytest.mark.parametrize(
    ("index", "code"), [(-1, "malformed"), (0, "duplicate"), (1, "duplicate"), (3, "gap"), (7, "gap"), (8, "past_end")]
)
def test_streaming_03_a_wrong_index_is_refused_with_its_own_code(flow: Flow, index: int, code: str) -> None:
    """Duplicate, gap and past the end have distinct codes, also when there is no room, and change nothing."""
    fill(flow)
    flow.submit(CONTROL)
    flow.submit(CONTROL)
    before = snapshot(flow)
    assert flow.refusal(index) == code
    assert snapshot(flow) == before
    assert flow.refusal(2) == "no_room"


def test_streaming_03_a_control_needs_room_on_its_edge(flow: Flow) -> None:
    """Two controls fit; the third is refused until a denoise starts."""
    fill(flow)
    for index in range(2):
        assert flow.refusal(index) is None
        assert flow.submit(CONTROL) == index
    assert flow.refusal(2) == "no_room"
    run(flow, "encode")
    flow.dispatch("denoise")
    assert flow.refusal(2) == "no_room"
    flow.start("denoise")
    assert flow.refusal(2) is None


def test_streaming_04_control_and_condition_are_admitted_together(flow: Flow) -> None:
    """With both cursors equal both move in one step."""
    assert flow.submit(CONTROL) == 0
    assert cursors(flow) == (1, 1)
    assert 0 in flow.edges["encode_request"].held


def test_streaming_04_without_room_for_the_condition_neither_is_admitted(kit: Any) -> None:
    """A control edge with room doesn't help when the missing condition has none."""
    flow = Flow(kit.world(capacities={"encode_request": 1, "control": 4}), 8)
    flow.prefetch_one()
    flow.submit(CONTROL)
    before = snapshot(flow)
    assert flow.refusal(1) == "no_room"
    assert snapshot(flow) == before
    flow.dispatch("encode")
    flow.start("encode")
    assert flow.refusal(1) is None
    flow.submit(CONTROL)
    assert cursors(flow) == (2, 2)


def test_streaming_05_the_window_alone_never_refuses_a_control(flow: Flow) -> None:
    """With an empty window a control is still accepted, as its condition goes with it."""
    flow.submit(CONTROL)
    flow.submit(CONTROL)
    assert cursors(flow) == (2, 2)


def test_streaming_06_asking_for_capacity_changes_nothing(flow: Flow) -> None:
    """`has_room_for_control` says what submitting would, and is the same a second time."""
    fill(flow)
    before = snapshot(flow)
    assert [flow.has_room_for_control(), flow.has_room_for_control()] == [True, True]
    assert [flow.refusal(0), flow.refusal(0), flow.control_limit, flow.lack(flow.stages["denoise"])] == [
        None,
        None,
        2,
        "input:condition",
    ]
    assert snapshot(flow) == before


def test_streaming_09_the_join_is_by_index(flow: Flow) -> None:
    """Denoise gets the condition and the control of one index; one without the other isn't enough."""
    fill(flow)
    run(flow, "encode")
    run(flow, "encode")
    assert flow.lack(flow.stages["denoise"]) == "input:control"
    flow.submit(Artifact({"number": 0}))
    flow.submit(Artifact({"number": 1}))
    for index in range(2):
        got, inputs = flow.peek("denoise")
        assert flow.dispatch("denoise") == got
        assert got == index
        assert inputs["control"].values == {"number": index}
        assert inputs["condition"].values == {"at": index}
        flow.start("denoise")
        flow.finish("denoise", {"latent": Artifact()})


def test_streaming_10_a_producer_reserves_its_output(flow: Flow) -> None:
    """The condition edge holds two: one that waits and one that is being made; a third isn't started."""
    fill(flow)
    run(flow, "encode")
    flow.dispatch("encode")
    assert flow.edges["condition"].occupancy == 2
    flow.start("encode")
    assert flow.prefetch_one() is False
    flow.submit(CONTROL)
    assert flow.prefetch_one() is True
    assert flow.lack(flow.stages["encode"]) == "edge:condition"
    flow.dispatch("denoise")
    assert not flow.is_ready("encode")
    flow.start("denoise")
    assert flow.is_ready("encode")


def test_streaming_10_an_artifact_leaves_when_its_consumer_starts(flow: Flow) -> None:
    """Sent but not started still counts."""
    fill(flow)
    edge = flow.edges["encode_request"]
    flow.dispatch("encode")
    assert edge.occupancy == 2
    flow.start("encode")
    assert edge.occupancy == 1
    assert list(edge.held) == [1]


def test_streaming_10_backpressure_reaches_from_the_output_to_the_control(flow: Flow) -> None:
    """Nobody acknowledges: decode, denoise and at last the controls stop; one acknowledgement moves them all again."""
    fill(flow)
    for _ in range(100):
        for stage in flow.stages:
            while flow.is_ready(stage):
                run(flow, stage)
                fill(flow)
        while flow.commit() is not None:
            pass
        if flow.has_room_for_control():
            flow.submit(CONTROL)
    assert flow.next_commit == 2
    assert flow.lack(flow.stages["decode"]) == "credit"
    assert flow.lack(flow.stages["denoise"]) == "edge:latent"
    assert flow.lack(flow.stages["encode"]) == "edge:condition"
    assert flow.next_control_index == 6
    assert flow.refusal(6) == "no_room"
    assert flow.acknowledge(1)
    assert flow.is_ready("decode")


def test_streaming_18_all_outputs_of_an_index_are_committed_together() -> None:
    """A chunk with two outputs of two stages is complete when both are there, in whatever order they come."""
    spec = StreamSpec(
        name="two",
        stages=(StageSpec("left", ("control",), ("a", "b")), StageSpec("right", ("b",), ("c",))),
        edges=tuple(EdgeSpec(name) for name in ("control", "a", "b", "c")),
        external_inputs=("control",),
        outputs=("a", "c"),
        initialize_order=("left", "right"),
        control="control",
        chunks_max=9,
        frames_first=1,
        frames_next=1,
        fps=1.0,
    )
    validate(spec)
    flow = Flow(spec, 3)
    assert not flow.prefetch_one()
    flow.submit(CONTROL)
    assert flow.next_condition_index == 1
    run(flow, "left")
    assert flow.commit() is None
    run(flow, "right")
    outputs = flow.commit()
    assert outputs is not None
    assert sorted(outputs) == ["a", "c"]
    assert flow.edges["a"].occupancy == 1
    assert flow.acknowledge(1)
    assert flow.edges["a"].occupancy == 0


def test_streaming_12_an_artifact_goes_with_its_last_consumer() -> None:
    """With two consumers an artifact is held until both have started."""
    edge = Edge("x", 2, ("one", "two"))
    edge.reserve()
    edge.put(0, CONTROL)
    edge.take("one", 0)
    assert edge.held
    assert edge.occupancy == 1
    edge.take("two", 0)
    assert not edge.held
    assert edge.has_room


def test_streaming_19_acknowledging_is_a_cursor(flow: Flow) -> None:
    """An older or repeated word changes nothing, one beyond the committed chunks counts as far as they go."""
    flow.submit(CONTROL)
    for stage in ("encode", "denoise", "decode"):
        run(flow, stage)
    assert flow.commit() is not None
    assert flow.commit() is None
    assert flow.acknowledge(5)
    assert flow.acked == 1
    assert not flow.acknowledge(1)
    assert not flow.acknowledge(0)


def test_the_end_may_be_cut_off(flow: Flow) -> None:
    """What lies at or above the cut is dropped and never made; what lies below goes on; a lower cut wins."""
    fill(flow)
    flow.submit(CONTROL)
    flow.submit(CONTROL)
    run(flow, "encode")
    flow.dispatch("encode")
    flow.start("encode")
    flow.cut(1)
    flow.cut(5)
    flow.check()
    assert flow.limit == 1
    assert all(index < 1 for edge in flow.edges.values() for index in edge.held)
    flow.finish("encode", {"condition": Artifact()})
    assert flow.lack(flow.stages["encode"]) == "end"
    assert run(flow, "denoise") == 0
    assert run(flow, "decode") == 0
    assert flow.commit() is not None
    assert flow.commit() is None


def test_a_failed_task_leaves_no_output(flow: Flow) -> None:
    """The stage's counter moves on, nothing arrives on the edge."""
    fill(flow)
    flow.dispatch("encode")
    flow.start("encode")
    flow.fail("encode")
    assert not flow.edges["condition"].held


def feed(flow: Flow, *links: tuple[str, str]) -> None:
    """Say which stage gives what it makes to which other one by itself."""
    for maker, taker in links:
        flow.stages[taker].feeders.add(flow.stages[maker])


def test_what_a_stage_lacks_comes_only_from_who_feeds_it(flow: Flow) -> None:
    """And only when that has been sent off: what nobody makes yet doesn't come."""
    denoise, decode = flow.stages["denoise"], flow.stages["decode"]
    fill(flow)
    flow.submit(CONTROL)
    flow.dispatch("encode")
    assert not flow.comes(denoise), "made elsewhere"
    feed(flow, ("encode", "denoise"), ("denoise", "decode"))
    assert flow.comes(denoise)
    assert flow.lack(denoise) == "input:condition"
    assert not flow.comes(decode), "nobody was sent off for it"
    flow.dispatch("denoise")
    assert flow.comes(decode)
    assert not flow.comes(denoise), "neither the next condition nor its control is on the way"


def test_what_comes_from_outside_is_not_awaited(flow: Flow) -> None:
    """A denoise whose condition is being made still needs its control, which no stage makes."""
    feed(flow, ("encode", "denoise"))
    fill(flow)
    flow.dispatch("encode")
    assert not flow.comes(flow.stages["denoise"])
    flow.submit(CONTROL)
    assert flow.comes(flow.stages["denoise"])
    assert flow.peek("denoise") == (0, {"control": CONTROL})


def test_streaming_10_a_task_ahead_reserves_its_output_and_needs_the_room(kit: Any) -> None:
    """Without a place for what it will make it doesn't count as one that comes."""
    flow = Flow(kit.world(capacities={"latent": 1}), 8)
    feed(flow, ("encode", "denoise"))
    fill(flow)
    for _ in range(2):
        flow.submit(CONTROL)
        flow.dispatch("encode")
    assert flow.dispatch("denoise") == 0
    assert (flow.stages["denoise"].awaits, flow.edges["latent"].occupancy) == ({0: {"condition"}}, 1)
    assert not flow.comes(flow.stages["denoise"])
    flow.check()


def test_a_task_ahead_begins_when_nothing_is_awaited(flow: Flow) -> None:
    """Its inputs leave their edges then, and not before."""
    feed(flow, ("encode", "denoise"))
    fill(flow)
    flow.submit(CONTROL)
    flow.dispatch("encode")
    flow.dispatch("denoise")
    with pytest.raises(AssertionError, match="without its inputs"):
        flow.start("denoise")
    flow.start("encode")
    flow.finish("encode", {"condition": NOTHING})
    del flow.stages["denoise"].awaits[0]
    flow.start("denoise")
    flow.check()
    assert flow.edges["control"].occupancy == flow.edges["condition"].occupancy == 0


def test_nothing_comes_beyond_the_end(flow: Flow) -> None:
    """A session that makes nothing from a chunk on isn't sent ahead of it."""
    feed(flow, ("encode", "denoise"))
    fill(flow)
    flow.submit(CONTROL)
    flow.dispatch("encode")
    flow.cut(0)
    assert not flow.comes(flow.stages["denoise"])


def test_clearing_drops_everything(flow: Flow) -> None:
    """After it nothing is held and nothing is ready."""
    fill(flow)
    flow.submit(CONTROL)
    flow.clear()
    flow.check()
    assert not any(edge.held for edge in flow.edges.values())
    assert not any(flow.is_ready(stage) for stage in flow.stages)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda flow: flow.dispatch("denoise"),
        lambda flow: flow.start("encode"),
        lambda flow: flow.finish("encode", {}),
        lambda flow: flow.fail("encode"),
        lambda flow: flow.edges["latent"].put(0, CONTROL),
        lambda flow: flow.edges["latent"].take("decode", 1),
        lambda flow: [flow.submit(CONTROL) for _ in range(3)],
        lambda flow: [flow.edges["control"].reserve() for _ in range(3)],
    ],
)
def test_our_own_errors_are_asserted(flow: Flow, wrong: Callable[[Flow], object]) -> None:
    """Calls that no peer can cause and that would break an invariant stop at once."""
    with pytest.raises(AssertionError):
        wrong(flow)


@settings(max_examples=200)
@given(
    capacities=st.tuples(*[st.integers(1, 3)] * len(EDGES)),
    depth=st.integers(1, 4),
    chunks=st.integers(1, 7),
    moves=st.lists(st.integers(0, 11), max_size=150),
)
def test_streaming_01_cursors_stay_in_bounds_whatever_happens(
    capacities: tuple[int, ...], depth: int, chunks: int, moves: list[int]
) -> None:
    """0 <= nc - nx <= depth, all counters monotone and within the session, grants never go back and always hold."""
    spec = dataclasses.replace(
        _spec(),
        edges=tuple(map(EdgeSpec, EDGES, capacities)),
        prefetch=Prefetch("encode_request", depth, "control", "denoise"),
    )
    flow = Flow(spec, chunks)
    before = (0, 0, 0, 0)
    granted = 0
    for move in moves:
        _move(flow, move)
        flow.check()
        now = (*cursors(flow), flow.next_commit, flow.acked)
        assert all(a <= b for a, b in zip(before, now, strict=True)), "a cursor went back"
        before = now
        assert flow.control_limit >= granted, "a grant went back"
        granted = flow.control_limit
        if capacities[2] <= min(capacities[0], capacities[1]) and flow.next_control_index < granted:
            assert flow.refusal(flow.next_control_index) is None, "refused within the grant"


def _spec() -> StreamSpec:
    return StreamSpec(
        name="world",
        stages=(
            StageSpec("encode", ("encode_request",), ("condition",)),
            StageSpec("denoise", ("condition", "control"), ("latent",)),
            StageSpec("decode", ("latent",), ("frames",)),
        ),
        edges=(),
        external_inputs=("encode_request", "control"),
        outputs=("frames",),
        initialize_order=("encode", "decode", "denoise"),
        control="control",
        chunks_max=100,
        frames_first=9,
        frames_next=12,
        fps=16.0,
    )


def _move(flow: Flow, move: int) -> None:
    stage = ("encode", "denoise", "decode")[move % 3]
    one = flow.stages[stage]
    match move // 3:
        case 0 if flow.is_ready(stage):
            flow.dispatch(stage)
        case 1 if one.started < one.dispatched:
            flow.start(stage)
        case 2 if one.finished < one.started:
            flow.finish(stage, {edge.artifact: CONTROL for edge in one.produces})
        case 3 if move == 9:
            if flow.has_room_for_control():
                flow.submit(CONTROL)
        case 3 if move == 10:
            fill(flow)
        case 3:
            if flow.commit() is None:
                flow.acknowledge(flow.next_commit)
        case _:
            pass
