"""Sessions that are played while they are made, and those that are made as fast as it goes."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.broker.pace import MediaClock

FIRST_S, NEXT_S = 9 / 16, 12 / 16
"""How long the world's first chunk is played, and each later one."""


def test_streaming_20_the_clock_starts_with_the_first_chunk(kit: Any) -> None:
    """Until then nothing is held back; afterwards a chunk may begin a window before it is played."""
    clock = MediaClock(kit.world(), 9)
    assert clock.begins_at(5) == float("-inf")
    clock.committed(0, 100.0)
    assert [clock.played_at(index) - 100.0 for index in range(4)] == [
        0,
        FIRST_S,
        FIRST_S + NEXT_S,
        FIRST_S + 2 * NEXT_S,
    ]
    assert clock.begins_at(3) == clock.played_at(3) - 2 * NEXT_S


def test_streaming_20_a_late_chunk_makes_all_later_ones_late(kit: Any) -> None:
    """The picture stood still meanwhile, so nothing is made faster to catch up; an early one changes nothing."""
    clock = MediaClock(kit.world(), 9)
    clock.committed(0, 100.0)
    clock.committed(1, 100.1)
    assert clock.played_at(2) == 100.0 + FIRST_S + NEXT_S
    clock.committed(2, 110.0)
    assert clock.played_at(2) == 110.0
    assert clock.played_at(3) == 110.0 + NEXT_S


@pytest.mark.parametrize(
    ("capacity", "credit", "ahead"), [(1, 9, 1), (3, 9, 3), (3, 3, 3), (3, 2, 2), (2, 1, 1), (2, 0, 0)]
)
def test_streaming_20_the_window_is_what_may_wait_for_the_client(
    kit: Any, capacity: int, credit: int, ahead: int
) -> None:
    """As many chunks as the client grants and the output's edge holds, and of several outputs the smallest."""
    clock = MediaClock(kit.world(capacities={"frames": capacity}), credit)
    clock.committed(0, 0.0)
    assert clock.begins_at(9) == clock.played_at(9) - ahead * NEXT_S
    assert not clock.allow(credit)
    assert clock.allow(credit - 1) == (credit <= capacity)


def paced(kit: Any, rig: Any = None, chunks: int = 20, **asked: Any) -> Any:
    """A session that is played while it is made, and steered by a held key."""
    rig = kit.Rig() if rig is None else rig
    stream = kit.Stream(rig, chunks=chunks, asked={"pace": "realtime", **asked})
    stream.press("w")
    rig.turn()
    return stream


def play(stream: Any) -> None:
    """Make whatever can be made now, and take it at once; every stage takes no time."""
    while any(stream.worker.jobs[stage] for stage in ("encode", "denoise", "decode")):
        for stage in ("encode", "denoise", "decode"):
            if stream.worker.jobs[stage]:
                stream.worker.finish(stage)
        stream.client.ack(stream.id, len(stream.got()))
        stream.rig.turn()


def test_streaming_20_a_fast_pipeline_keeps_step_with_the_picture(kit: Any) -> None:
    """However fast its stages are, a denoise never begins earlier than a window before its chunk is played."""
    stream = paced(kit)
    start = stream.rig.now
    play(stream)
    sent = {0: start}
    while stream.rig.now < start + 10.0:
        stream.rig.advance(0.05)
        play(stream)
        for chunk in stream.got():
            sent.setdefault(chunk.index, stream.rig.now)
    for index, at in sent.items():
        played = start + (FIRST_S + (index - 1) * NEXT_S if index else 0.0)
        assert max(start, played - 2 * NEXT_S) <= at <= max(start, played - 2 * NEXT_S) + 0.06
    assert max(sent) == 15


@pytest.mark.parametrize("window", [1, 2, 3])
def test_streaming_20_a_small_credit_is_a_small_window(kit: Any, window: int) -> None:
    """However much the output's edge holds, no denoise begins earlier than what the client grants lets it."""
    rig = kit.Rig()
    spec = kit.world(capacities={"frames": 3})
    stream = kit.Stream(rig, 20, asked={"pace": "realtime", "credit": m.Credit(window, 1 << 30)}, spec=spec)
    stream.press("w")
    rig.turn()
    start, began = rig.now, dict[int, float]()
    while rig.now < start + 9.0:
        while any(stream.worker.jobs[stage] for stage in ("encode", "denoise", "decode")):
            for index in stream.queued("denoise"):
                began.setdefault(index, rig.now - start)
            for stage in ("encode", "denoise", "decode"):
                if stream.worker.jobs[stage]:
                    stream.worker.finish(stage)
            taken = len(stream.got())
            stream.client.ack(stream.id, taken, m.Credit(taken + window, 1 << 30))
            rig.turn()
        rig.advance(0.05)
    assert max(began) >= 10
    for index, at in began.items():
        earliest = max(0.0, FIRST_S + (index - 1 - window) * NEXT_S)
        assert earliest <= at <= earliest + 0.06


def test_streaming_20_a_window_that_the_client_opens_is_used_at_once(kit: Any) -> None:
    """What waits for the clock is looked at again when the client lets more of it wait."""
    rig = kit.Rig()
    stream = kit.Stream(rig, asked={"pace": "realtime", "credit": m.Credit(1, 1 << 30)})
    stream.press("w")
    rig.turn()
    stream.make(1, ack=False)
    stream.client.ack(stream.id, 1, m.Credit(1, 1 << 30))
    rig.turn()
    stream.worker.make("encode")
    rig.turn()
    assert stream.queued("denoise") == [], "no window at all: not before it is played"
    stream.client.ack(stream.id, 1, m.Credit(2, 1 << 30))
    assert stream.queued("denoise") == [1]


def test_streaming_20_asap_goes_as_fast_as_it_goes(kit: Any) -> None:
    """Without a pace the same pipeline makes all at once; it is the default."""
    assert m.OpenSession("k", "world", 1).pace == "asap"
    stream = paced(kit, pace="asap")
    play(stream)
    assert stream.client.ended(stream.id).state == "completed"


def test_streaming_20_the_broker_wakes_when_the_next_chunk_may_begin(kit: Any) -> None:
    """At that moment, not at some interval; the stage says that it waits for the pace."""
    stream = paced(kit)
    start = stream.rig.now
    play(stream)
    due = start + FIRST_S + 2 * NEXT_S - 2 * NEXT_S
    assert [chunk.index for chunk in stream.got()] == [0, 1, 2]
    shown = stream.rig.core.status()["sessions"][0]
    assert shown["waits_for"]["denoise"] == "pace"
    assert stream.rig.core.wake_at == due
    stream.rig.now = due - 0.001
    stream.rig.turn()
    assert stream.queued("denoise") == []
    stream.rig.now = due
    stream.rig.turn()
    assert stream.queued("denoise") == [3]


def test_streaming_20_a_slow_pipeline_is_not_held_back(kit: Any) -> None:
    """When every chunk is late the clock goes with them, and denoise never waits for it."""
    stream = paced(kit, chunks=6)
    for _ in range(6):
        stream.rig.advance(2.0)
        stream.make()
    assert stream.client.ended(stream.id).state == "completed"
    stream.client.say(m.AskMetrics(1, stream.id))
    idle = stream.client.last(m.Metrics).values["stages"]["denoise"]["idle_s"]
    assert "pace" not in idle


def test_streaming_20_a_chunk_that_has_its_turn_loses_it_when_the_clock_stands_still(kit: Any) -> None:
    """A late chunk moves the clock while a later one waits for its actor: that may not begin any more, and waits."""
    rig = kit.Rig()
    spec = kit.world(capacities={"latent": 3, "frames": 1})
    stream = kit.Stream(rig, asked={"pace": "realtime"}, spec=spec, mailbox=0)
    worker, client = stream.worker, stream.client
    for index in range(2):
        client.submit(stream.id, index)
        worker.finish("encode")
    worker.make("denoise", "decode")
    client.ack(stream.id, 1)
    worker.make("encode", "denoise")
    client.submit(stream.id, 2)
    rig.advance(FIRST_S)
    worker.make("encode", "denoise")
    client.submit(stream.id, 3)
    neighbour = client.open("neighbour")
    client.submit(neighbour, 0)
    while worker.jobs["encode"]:
        worker.finish("encode")
    assert [task.session for task in worker.jobs["denoise"]] == [neighbour]
    turns = stream.session.seats.actor("denoise").waiting
    assert stream.id not in turns
    rig.advance(NEXT_S)
    assert stream.id in turns
    rig.advance(3.0)
    worker.finish("decode")
    assert [chunk.index for chunk in stream.got()] == [0, 1]
    assert stream.id not in turns
    worker.finish("denoise")
    assert stream.queued("denoise") == []
    rig.advance(NEXT_S)
    assert stream.queued("denoise") == [3]


def test_streaming_20_a_drain_keeps_the_pace_and_is_no_hang(kit: Any) -> None:
    """What was accepted is made when its time has come, also after the time for the close."""
    rig = kit.Rig(BrokerConfig(close_timeout_s=0.2))
    stream = paced(kit, rig)
    play(stream)
    assert stream.cursors()[1] == 5, "two are accepted, and wait"
    stream.client.end(stream.id)
    for _ in range(40):
        rig.advance(0.05)
        play(stream)
    assert [chunk.index for chunk in stream.got()] == [0, 1, 2, 3, 4]
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure) == ("closed", None)


def test_streaming_20_a_session_that_ends_is_not_woken(kit: Any) -> None:
    """Its timer goes with it."""
    stream = paced(kit)
    play(stream)
    stream.client.end(stream.id, "cancel")
    assert stream.client.ended(stream.id).state == "cancelled"
    stream.rig.advance(3.0)


def test_streaming_30_a_chunk_says_what_each_stage_waited_for(kit: Any) -> None:
    """The last cause before its task was sent, and for how long; empty for a stage that had no gap."""
    rig = kit.Rig()
    stream = kit.Stream(rig, asked={"control_binding": "late"})
    stream.worker.make("encode", "encode")
    rig.now += 2.0
    stream.press("w")
    rig.turn()
    rig.turn()
    rig.now += 1.0
    stream.worker.finish("denoise")
    rig.now += 0.5
    stream.worker.finish("decode")
    rig.turn()
    rig.now += 0.25
    stream.worker.finish("denoise")
    stream.worker.finish("decode")
    first, second = (chunk.timing for chunk in stream.got())
    waited = {name: (one.waited_for, one.waited_s) for name, one in first.stages.items()}
    assert waited == {"encode": ("", 0.0), "denoise": ("input:control", 2.0), "decode": ("input:latent", 3.0)}
    assert (first.control_s, second.control_s) == (2.0, 3.0)
    assert (second.stages["denoise"].waited_for, second.stages["denoise"].waited_s) == ("", 0.0)
    assert (second.stages["decode"].waited_for, second.stages["decode"].waited_s) == ("input:latent", 0.25)


def test_streaming_30_the_pace_is_a_cause_of_its_own(kit: Any) -> None:
    """In the gaps of the stage, and in the times of the chunk that waited."""
    stream = paced(kit)
    play(stream)
    stream.rig.advance(0.6)
    play(stream)
    denoise = stream.got()[3].timing.stages["denoise"]
    assert denoise.waited_for == "pace"
    assert 0.5 < denoise.waited_s < 0.61
    stream.client.say(m.AskMetrics(1, stream.id))
    assert "pace" in stream.client.last(m.Metrics).values["stages"]["denoise"]["idle_s"]
