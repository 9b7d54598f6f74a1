"""What is bounded: memory per session and in sum, the cost of an event, and what one bad client can do to others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import ENDED_KEPT_MAX
from reelwire.broker.events import Received
from reelwire.controls import Keys
from reelwire.messages import Artifact


def kept(session: Any) -> dict[str, int]:
    """How much a session remembers."""
    return {
        "held": sum(len(edge.held) for edge in session.flow.edges.values()),
        "given": len(session.controls.given),
        "facts": len(session._facts),
        "timing": len(session.timing._anchored) + sum(map(len, session.timing._passes.values())),
        "ring": len(session.ring),
        "causes": sum(len(stage.idle.causes) for stage in session.timing.stats.stages.values()),
    }


def test_streaming_12_memory_does_not_grow_with_the_length_of_a_session(rig: Any, kit: Any) -> None:
    """After ten chunks and after ninety the session remembers as much."""
    worker, client = rig.worker(), rig.client()
    session = client.open(chunks=100)
    keys = Keys(kit.world())
    keys.press("w")
    client.keys(session, keys)
    sizes = []
    for index in range(90):
        rig.turn()
        while not worker.jobs["denoise"]:
            worker.finish("encode")
        worker.finish("denoise")
        worker.finish("decode")
        client.ack(session, index + 1)
        sizes.append(kept(rig.core.sessions[session]))
    assert sizes[-1] == sizes[10]
    assert len(rig.core._desk.timers) == 2, "idle, and the stall that was armed with the last chunk"


def test_streaming_12_a_client_that_does_not_read_stops_itself_only(rig: Any, kit: Any) -> None:
    """Its session holds what its edges hold; a neighbour at the same actors makes all its chunks."""
    worker, client = rig.worker(), rig.client()
    lazy, busy = client.open("lazy", 50), client.open("busy", 20)
    for session in (lazy, busy):
        keys = Keys(kit.world())
        keys.press("w")
        client.keys(session, keys)
    for _ in range(1000):
        rig.turn()
        for stage in ("encode", "denoise", "decode"):
            if worker.jobs[stage]:
                worker.finish(stage)
        client.ack(busy, len(client.chunks(busy)))
    assert client.ended(busy).state == "completed"
    assert len(client.chunks(lazy)) == 2
    flow = rig.core.sessions[lazy].flow
    assert all(edge.occupancy <= edge.capacity for edge in flow.edges.values())


def test_streaming_12_numbers_of_ended_sessions_are_bounded(rig: Any) -> None:
    """However many end, only the last ones can be asked about."""
    rig.worker()
    client = rig.client()
    for number in range(ENDED_KEPT_MAX + 20):
        client.end(client.open(str(number)), "cancel")
    assert len(rig.core._ended) == ENDED_KEPT_MAX
    assert not client.rig.core._peers.by_route[b"app"].keys


def test_the_list_of_sessions_in_a_status_is_bounded(kit: Any) -> None:
    """The first ones are listed, all are counted, so that the answer fits a message."""
    rig = kit.Rig(BrokerConfig(status_sessions_max=3))
    rig.worker()
    client = rig.client()
    for number in range(5):
        client.open(str(number))
    status = rig.core.status()
    assert (len(status["sessions"]), status["sessions_total"]) == (3, 5)


def calls_of(work: Callable[[], object]) -> int:
    """How many Python functions are called: a cost that doesn't depend on the machine."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_the_cost_of_an_event_does_not_grow_with_the_number_of_sessions(kit: Any) -> None:
    """A result, a control, an acknowledgement and a turn cost as many calls among 500 sessions as among 5."""

    def costs(sessions: int) -> list[int]:
        rig = kit.Rig()
        rig.core.check = rig.check_grants = lambda: None
        worker = rig.worker(slots=10_000, bytes_max=10**9)
        client = rig.client()
        names = [client.open(str(number), 50) for number in range(sessions)]
        for _ in range(2 * sessions):
            worker.finish("encode")
        rig.turn()

        def handle(peer: Any, message: Any) -> None:
            rig.core.handle(Received(rig.now, peer.route, peer.attachment, message, 0, bytes(16)))

        name = names[sessions // 2]
        at = (name, "denoise", 1, 1, 0)
        steps: list[Callable[[], object]] = [
            lambda: handle(client, m.SubmitControl(name, 0, kit.keys_of("w"))),
            lambda: handle(worker, m.TaskStarted(*at)),
            lambda: handle(worker, m.TaskDone(*at, {"latent": Artifact()}, {}, 0.0)),
            lambda: handle(worker, m.TaskDone(name, "decode", 1, 1, 0, {"frames": Artifact()}, {}, 0.0)),
            lambda: handle(client, m.Ack(name, 1)),
            rig.turn,
        ]
        return [calls_of(step) for step in steps]

    few, many = costs(5), costs(500)
    assert all(abs(a - b) <= 10 for a, b in zip(many, few, strict=True)), (few, many)


def test_streaming_12_one_clients_sessions_end_without_the_others(rig: Any) -> None:
    """A client with many sessions leaves; the other's stay."""
    rig.worker(slots=50, bytes_max=10**6)
    leaving, staying = rig.client(b"1"), rig.client(b"2")
    for number in range(10):
        leaving.open(str(number))
    session = staying.open()
    leaving.say(m.Goodbye())
    assert list(rig.core.sessions) == [session]


ANGRY = "it \x1b[31mbroke\x1b[0m\x07\r\n  at line 2\x9b2J\u202e"
CALM = "it \\x1b[31mbroke\\x1b[0m\\x07 at line 2\\x9b2J\\u202e"


def test_what_stages_and_workers_say_is_harmless_to_terminals(rig: Any) -> None:
    """What raised chose the words: log, status and client have them in one line, with control characters as escapes."""
    worker, client = rig.worker(), rig.client()
    session = client.open(chunks=3)
    client.submit(session, 0)
    worker.fail("encode", ANGRY)
    rig.turn()
    assert client.ended(session).failure.message == CALM
    other = client.open("again", chunks=3)
    worker.say(m.StageFailed("", "encode", 0, 0, "build", None, m.Failure("stage", ANGRY)))
    assert CALM in [stage["failure"] for stage in rig.core.status()["workers"][0]["stages"]]
    worker.say(m.Goodbye(ANGRY))
    rig.turn()
    assert CALM in client.ended(other).failure.message
    said = [value for log in rig.logs for value in log.fields.values() if isinstance(value, str)]
    assert sum(CALM in value for value in said) >= 3
    assert all(value.isprintable() for value in said)


def test_a_name_of_a_peers_own_comes_back_as_it_was(rig: Any) -> None:
    """Whoever asks under a key that no terminal shows finds the answer to it; a name of a peer is shown, and must be shown."""
    client = rig.client()
    client.say(m.OpenSession(ANGRY, "no such pipeline", 1))
    assert client.last(m.SessionRefused).key == ANGRY
    other = rig.client(b"other", name=ANGRY)
    assert other.attachment == 0
    assert "characters that can be shown" in other.last(m.Rejected).message
