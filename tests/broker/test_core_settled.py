"""Stages whose output stays the same, and when the prefetch window is filled."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.controls import Keys
from reelwire.messages import Artifact, Failure

CONSTANT = {"condition": Artifact({"from": "the constant"})}


def settling(kit: Any, **changes: Any) -> Any:
    """The world's dataflow, whose encode may settle."""
    spec = kit.world(**changes)
    encode, *others = spec.stages
    return replace(spec, stages=(replace(encode, settles=True), *others))


@pytest.fixture
def stream(rig: Any, kit: Any) -> Any:
    return kit.Stream(rig, chunks=12, spec=settling(kit))


def encodes(stream: Any) -> list[int]:
    """Chunks that encode was sent."""
    return [task.index for task in stream.worker.heard(m.RunTask) if task.stage == "encode"]


def conditions(stream: Any) -> list[Any]:
    """Where the conditions came from that denoise was sent, in order."""
    tasks = [task for task in stream.worker.heard(m.RunTask) if task.stage == "denoise"]
    assert [task.index for task in tasks] == list(range(len(tasks)))
    return [task.inputs["condition"].values["from"] for task in tasks]


def test_streaming_08_a_settled_stage_is_not_run_again(stream: Any) -> None:
    """Its output goes to all later chunks, in order; what it was sent before is still taken from its results."""
    stream.press("w")
    stream.rig.turn()
    stream.worker.finish("encode", outputs=CONSTANT, constant=True)
    assert stream.queued("encode") == [1], "it had this one already"
    stream.make(12)
    assert [chunk.index for chunk in stream.got()] == list(range(12))
    assert encodes(stream) == [0, 1]
    assert conditions(stream) == ["the constant", f"{stream.id}/condition/1", *["the constant"] * 10]
    assert stream.client.ended(stream.id).state == "completed"
    for chunk in stream.got():
        times, stages = chunk.timing, ["encode", "denoise", "decode"] if chunk.index < 2 else ["denoise", "decode"]
        assert sorted(times.stages) == sorted(stages)
        moments = [0.0]
        for stage in stages:
            one = times.stages[stage]
            moments += [one.ready_s, one.admitted_s, one.started_s, one.completed_s]
        assert moments[-1] <= times.committed_s
        assert all(begin <= end for begin, end in pairwise(moments)), "a constant's chunk has the times of an order"


def test_streaming_30_a_turn_that_a_constant_makes_needless_leaves_no_time(kit: Any) -> None:
    """A chunk whose stage waited for its turn when a chunk before it turned out constant isn't timed there.

    Two sessions take turns at a stage that is busy for a while; all times of all chunks are those of an order of events,
    which is asserted of every chunk that waits for its client.
    """
    rig = kit.Rig()
    worker, client = rig.worker(spec=settling(kit)), rig.client()
    sessions = [client.open(key, chunks=30) for key in "ab"]
    for session in sessions:
        client.keys(session, keys := Keys(kit.world()))
        keys.press("w")
        client.keys(session, keys)
    rig.turn()

    def step(*stages: str, **encoded: Any) -> None:
        for stage in stages:
            if worker.jobs[stage]:
                worker.finish(stage, **(encoded if stage == "encode" else {}))
        for session in sessions:
            client.ack(session, len(client.chunks(session)))
        rig.advance(0.5)

    for _ in range(9):
        step("encode", "encode", "encode", "denoise", "decode")
    for _ in range(4):
        step("denoise", "decode")
    turns = rig.core.sessions[sessions[0]].seats.actor("encode").waiting
    assert any(session in turns for session in sessions), "else nothing is made needless"
    for _ in range(60):
        step("encode", "denoise", "decode", outputs=CONSTANT, constant=True)
    for session in sessions:
        chunks = client.chunks(session)
        assert len(chunks) == 30
        encoded = [chunk.index for chunk in chunks if "encode" in chunk.timing.stages]
        assert encoded == list(range(len(encoded))), "and from some chunk on there is none"
        assert len(encoded) < 12
        assert all(chunk.timing.stages["encode"].completed_s >= 0 for chunk in chunks[: len(encoded)])


def test_streaming_08_what_is_under_way_comes_first(stream: Any) -> None:
    """As long as the stage has a task the constant waits, so that order is kept on the edge."""
    stream.press("w")
    stream.rig.turn()
    stream.worker.finish("encode", outputs=CONSTANT, constant=True)
    stream.worker.finish("denoise")
    assert sorted(stream.session.flow.edges["condition"].held) == []
    stream.worker.finish("encode", constant=True)
    held = stream.session.flow.edges["condition"].held
    assert [held[index] for index in (2, 3)] == [CONSTANT["condition"]] * 2


def test_streaming_08_a_constant_is_bounded_like_any_output(stream: Any) -> None:
    """It is put on its edge as far as that has room and requests were enqueued, never ahead of them."""
    for _ in range(2):
        stream.worker.finish("encode", outputs=CONSTANT, constant=True)
    flow = stream.session.flow
    assert sorted(flow.edges["condition"].held) == [0, 1]
    assert flow.edges["condition"].occupancy == 2
    assert stream.cursors() == (2, 0)
    stream.client.submit(stream.id, 0)
    assert sorted(flow.edges["condition"].held) == [1], "the denoise began, and the refill comes when it ends"
    stream.worker.finish("denoise")
    assert sorted(flow.edges["condition"].held) == [1, 2]
    shown = stream.rig.core.status()["sessions"][0]
    assert shown["waits_for"]["encode"] == ""


def test_streaming_08_only_a_stage_that_may_settle_does(kit: Any) -> None:
    """Of another stage the word is passed over: its inputs may be others next time."""
    stream = kit.Stream(kit.Rig(), chunks=4)
    stream.press("w")
    stream.rig.turn()
    for _ in range(4):
        while not stream.worker.jobs["denoise"]:
            stream.worker.finish("encode", constant=True)
        stream.worker.finish("denoise", constant=True)
        stream.worker.finish("decode", constant=True)
        stream.client.ack(stream.id, len(stream.got()))
        stream.rig.turn()
    assert encodes(stream) == [0, 1, 2, 3]
    assert stream.client.ended(stream.id).state == "completed"


def test_streaming_08_a_stage_that_makes_what_the_client_gets_runs_on(kit: Any) -> None:
    """Each of its chunks is committed when it is done, so it may say what it likes."""
    spec = settling(kit, outputs=("frames", "condition"))
    rig = kit.Rig()
    stream = kit.Stream(rig, chunks=3, spec=spec)
    stream.press("w")
    rig.turn()
    for _ in range(3):
        while not stream.worker.jobs["denoise"]:
            stream.worker.finish("encode", constant=True)
        stream.worker.finish("denoise")
        stream.worker.finish("decode")
        stream.client.ack(stream.id, len(stream.got()))
        rig.turn()
    assert encodes(stream) == [0, 1, 2]
    assert [sorted(chunk.outputs) for chunk in stream.got()] == [["condition", "frames"]] * 3


def test_streaming_08_a_task_that_was_under_way_may_still_fail(stream: Any) -> None:
    """Then its session fails, after what lies below it, as ever."""
    stream.press("w")
    stream.rig.turn()
    stream.worker.finish("encode", outputs=CONSTANT, constant=True)
    stream.worker.fail("encode", "out of memory")
    stream.worker.finish("denoise")
    stream.worker.finish("decode")
    stream.client.ack(stream.id, 1)
    ended = stream.client.ended(stream.id)
    assert ended.failure == Failure("stage", "out of memory", "encode", 1)
    assert [chunk.index for chunk in stream.got()] == [0]


def test_streaming_08_a_drain_uses_what_settled(stream: Any) -> None:
    """What was accepted is delivered without the stage."""
    for _ in range(2):
        stream.worker.finish("encode", outputs=CONSTANT, constant=True)
    for index in range(2):
        stream.client.submit(stream.id, index)
    stream.worker.finish("denoise")
    stream.client.submit(stream.id, 2)
    stream.client.end(stream.id)
    for _ in range(2):
        stream.worker.finish("denoise")
    for index in range(3):
        stream.worker.finish("decode")
        stream.client.ack(stream.id, index + 1)
    assert [chunk.index for chunk in stream.got()] == [0, 1, 2]
    assert stream.client.ended(stream.id).state == "closed"
    assert encodes(stream) == [0, 1]


def refilled(kit: Any, refill: str) -> Any:
    """A stream whose window is filled otherwise."""
    spec = kit.world()
    assert spec.prefetch is not None
    return kit.Stream(kit.Rig(), spec=replace(spec, prefetch=replace(spec.prefetch, refill=refill)))


def test_streaming_02_a_window_that_is_refilled_with_each_control(kit: Any) -> None:
    """To be measured against: the condition after next begins beside the denoise, and none when that ends."""
    stream = refilled(kit, "with_control")
    assert encodes(stream) == [0, 1]
    stream.worker.make("encode", "encode")
    stream.client.submit(stream.id, 0)
    assert encodes(stream) == [0, 1, 2]
    stream.worker.make("encode", "denoise", "decode")
    assert stream.cursors() == (3, 1)
    stream.client.submit(stream.id, 1)
    assert stream.cursors() == (4, 2)


def test_streaming_04_a_window_that_is_never_filled(kit: Any) -> None:
    """To be measured against: nothing is encoded before its control is there; both are admitted together."""
    stream = refilled(kit, "never")
    assert encodes(stream) == []
    for index in range(3):
        stream.client.submit(stream.id, index)
        assert stream.cursors() == (index + 1, index + 1)
        assert encodes(stream) == list(range(index + 1))
        stream.worker.make("encode", "denoise", "decode")
        stream.client.ack(stream.id, index + 1)
        assert encodes(stream) == list(range(index + 1))
    assert [chunk.index for chunk in stream.got()] == [0, 1, 2]
