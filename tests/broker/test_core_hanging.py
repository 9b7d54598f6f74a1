"""What takes too long: who is hung, who only waits behind a neighbour, and when an end is over."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.broker.events import TurnEnded


def names(rig: Any) -> list[str]:
    """Workers that are attached."""
    return [worker["name"] for worker in rig.core.status()["workers"]]


def ready(rig: Any, key: str = "k", controls: int = 1, chunks: int = 4) -> tuple[Any, str]:
    """A client with a session that has so many controls."""
    client = rig.client(key.encode())
    session = client.open(key, chunks)
    for index in range(controls):
        assert isinstance(client.submit(session, index), m.ControlAccepted)
    return client, session


def test_streaming_12_a_cancel_behind_a_slow_initialization_costs_nobody(rig: Any) -> None:
    """Who cancels ends in time; the stage that loads for a neighbour meanwhile keeps its worker, and the neighbour it."""
    worker = rig.worker()
    worker.silent |= {m.InitializeStage, m.ReleaseStage}
    slow, leaving = rig.client(b"1"), rig.client(b"2")
    first, second = slow.open(), leaving.open()
    leaving.end(second, "cancel")
    rig.advance(29.5)
    assert leaving.ended(second) is None
    rig.advance(1.0)
    assert leaving.ended(second) == m.SessionEnded(second, "cancelled")
    rig.advance(20.0)
    assert (names(rig), slow.ended(first)) == (["w"], None)
    worker.silent.clear()
    worker.initialized(worker.heard(m.InitializeStage)[0])
    worker.released(worker.last(m.ReleaseStage))
    assert slow.state(first)[0] == "ready"
    assert list(rig.core.sessions) == [first]


def test_streaming_22_a_session_that_ended_behind_its_clients_back_is_over_for_it(rig: Any) -> None:
    """What the client still says about it is unknown, its key is free again, and its numbers can be asked for."""
    worker = rig.worker()
    worker.silent |= {m.InitializeStage, m.ReleaseStage}
    rig.client(b"1").open()
    client = rig.client(b"2")
    session = client.open()
    client.end(session, "cancel")
    rig.advance(31.0)
    before = rig.counter("unknown_session")
    client.end(session, "cancel")
    assert rig.counter("unknown_session") == before + 1
    client.say(m.AskMetrics(1, session))
    assert client.last(m.Metrics).values["state"] == "releasing"
    assert client.open() not in ("", session)
    client.say(m.Goodbye())
    assert rig.core.sessions[session].state == "releasing"
    assert len(client.heard(m.SessionEnded)) == 1


def test_streaming_23_a_neighbours_end_does_not_blame_a_stage_that_answers(rig: Any) -> None:
    """A drain that isn't done in time fails; the stage that worked on others all the while is no hung one."""
    worker = rig.worker()
    busy, busy_session = ready(rig, "busy", controls=2, chunks=50)
    client, session = ready(rig, "late")
    client.end(session, "drain")
    for _ in range(2):
        rig.advance(11.0)
        worker.finish("encode")
    rig.advance(9.0)
    assert client.ended(session).failure.kind == "timeout"
    rig.advance(20.0)
    assert names(rig) == ["w"]
    assert busy.ended(busy_session) is None


@pytest.mark.parametrize("mode", ["drain", "cancel"])
def test_streaming_22_three_hung_workers_take_no_longer_than_one(rig: Any, mode: Any) -> None:
    """There is one deadline for the whole end; each hung worker is given up when its own silence is long enough."""
    workers = [rig.worker(stage, stages=[stage]) for stage in ("encode", "denoise", "decode")]
    client, session = ready(rig)
    for worker in workers:
        worker.silent.add(m.ReleaseStage)
        for jobs in worker.jobs.values():
            jobs.clear()
    client.end(session, mode)
    rig.advance(29.5)
    assert client.ended(session) is None
    rig.advance(1.0)
    assert client.ended(session) is not None
    rig.advance(70.0)
    assert names(rig) == []
    assert not rig.core.sessions


def test_streaming_22_a_hang_that_begins_after_the_close_moves_no_deadline(rig: Any) -> None:
    """The release that hangs at the end of a drain has what is left of the drain's time."""
    worker = rig.worker()
    client, session = ready(rig)
    client.end(session, "drain")
    rig.advance(25.0)
    worker.silent.add(m.ReleaseStage)
    for stage in ("encode", "encode", "denoise", "decode"):
        worker.finish(stage)
    client.ack(session, 1)
    assert rig.core.sessions[session].state == "releasing"
    rig.advance(5.5)
    assert client.ended(session).state == "closed"
    assert names(rig) == ["w"], "it has been silent for a moment only"
    rig.advance(25.0)
    assert names(rig) == []
    assert not rig.core.sessions


@pytest.mark.parametrize(("field", "silent"), [("initialize_timeout_s", True), ("task_timeout_s", False)])
def test_streaming_22_a_hung_stage_is_noticed_without_a_close(kit: Any, field: str, silent: bool) -> None:
    """A stage that says nothing for its time, at an initialization or a task, costs its worker and fails its sessions."""
    limit: dict[str, Any] = {field: 40.0}
    rig = kit.Rig(BrokerConfig(**limit))
    worker = rig.worker()
    if silent:
        worker.silent.add(m.InitializeStage)
    client = rig.client()
    session = client.open()
    rig.advance(39.5)
    assert client.ended(session) is None
    rig.advance(1.0)
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind) == ("failed", "worker_lost")
    assert "stage 'encode' said nothing for" in ended.failure.message
    assert worker.last(m.Rejected).code == "unknown_peer"


def test_streaming_23_every_word_of_a_stage_starts_its_silence_anew(kit: Any) -> None:
    """A stage with much to do isn't hung, however long its list is; nor is one that has nothing to do."""
    rig = kit.Rig(BrokerConfig(task_timeout_s=10.0, control_idle_s=1000.0))
    worker = rig.worker()
    _, session = ready(rig, controls=0, chunks=50)
    for _ in range(2):
        rig.advance(8.0)
        worker.finish("encode")
    rig.advance(100.0)
    assert names(rig) == ["w"]
    assert rig.core.sessions[session].state == "ready"


def test_streaming_32_one_that_talks_without_end_stops_nobodys_clock(rig: Any) -> None:
    """With something unread in every turn deadlines still come, late by no more than a peer may be silent."""
    client = rig.client()
    rig.worker(ready=False)
    silent = rig.client(b"silent")
    session = client.open()

    def turns(seconds: float) -> None:
        end = rig.now + seconds
        while rig.now < end:
            rig.now += 0.5
            for peer in (client, rig.peers[b"w"]):
                peer.say(m.Heartbeat())
            rig.handle(TurnEnded(rig.now, drained=False))

    turns(2.5)
    assert rig.core.status()["clients"] == 2
    turns(1.0)
    assert rig.core.status()["clients"] == 1
    turns(26.0)
    assert client.ended(session) is None
    turns(1.0)
    assert client.ended(session).failure.kind == "overload"
    assert silent.route in rig.forgotten


def test_streaming_32_a_backlog_is_read_before_anybody_is_blamed(rig: Any) -> None:
    """A broker that stood still hears first what was said meanwhile; only then do deadlines count."""
    worker = rig.worker()
    client, session = ready(rig)
    rig.now += 1000.0
    rig.turn(drained=False)
    assert client.ended(session) is None
    for peer in (worker, client):
        peer.say(m.Heartbeat())
    worker.finish("encode")
    rig.turn()
    assert names(rig) == ["w"]
    assert client.ended(session) is None


def test_streaming_19_a_finished_session_shows_how_it_ended(rig: Any) -> None:
    """When only its reader is missing, the status tells the outcome and how many chunks weren't taken."""
    worker = rig.worker()
    client, session = ready(rig, chunks=1)
    for stage in ("encode", "denoise", "decode"):
        worker.finish(stage)
    (row,) = rig.core.status()["sessions"]
    assert (row["state"], row["unread"]) == ("completed", 1)
    client.ack(session, 1)
    assert client.ended(session).state == "completed"
