"""From the request of a session to its first state that takes controls: checks, places, initialization."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.messages import Artifact, Failure
from reelwire.spec import Parameter, TensorInput


def refusal(client: Any, **request: Any) -> Failure:
    """The answer to a request that isn't accepted."""
    assert client.open(**request) == ""
    failure = client.last(m.SessionRefused).failure
    assert isinstance(failure, Failure)
    return failure


def test_a_session_is_opened_placed_and_initialized(rig: Any) -> None:
    """The client hears each state once, and its grant when the session is ready."""
    rig.worker()
    client = rig.client()
    session = client.open()
    opened = client.last(m.SessionOpened)
    assert (opened.key, opened.session) == ("k", session)
    changes = [(x.state, x.control_limit) for x in client.heard(m.SessionChanged)]
    assert changes == [("initializing", 0), ("ready", 2)]


def test_tokens_and_ids_differ_and_cannot_be_guessed_from_each_other(rig: Any) -> None:
    """A token has 128 bits, and no part of it stands in the id."""
    rig.worker()
    client = rig.client()
    client.open("a")
    client.open("b")
    a, b = client.heard(m.SessionOpened)
    assert a.token != b.token
    assert a.session != b.session
    assert len(bytes.fromhex(a.token)) == 16
    assert a.session.split("-")[1] not in a.token


def test_opening_twice_with_one_key_gives_one_session(rig: Any) -> None:
    """The answer is repeated, token included; another client's same key is another session."""
    rig.worker()
    client, other = rig.client(b"1"), rig.client(b"2")
    assert client.open("k") == client.open("k")
    first, second = client.heard(m.SessionOpened)
    assert first == second
    assert other.open("k") != client.open("k")
    assert len(rig.core.sessions) == 2


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"pipeline": "moon"}, "pipeline"),
        ({"chunks": 0}, "chunks"),
        ({"chunks": 101}, "chunks"),
        ({"key": ""}, "key"),
        ({"key": "k" * 300}, "key"),
        ({"parameters": {"speed": 1}}, "speed"),
        ({"parameters": {"seed": "x"}}, "seed"),
    ],
)
def test_a_bad_request_is_refused_with_its_field(rig: Any, request_: dict[str, Any], field: str) -> None:
    """Nothing was started; the sentence says what is accepted."""
    rig.worker()
    failure = refusal(rig.client(), **request_)
    assert (failure.kind, failure.field) == ("request", field)
    assert not rig.core.sessions


def test_an_unknown_pipeline_is_refused_with_the_known_ones(rig: Any) -> None:
    """Also when there is none."""
    client = rig.client()
    assert "accepted: none" in refusal(client, pipeline="world").message
    rig.worker()
    assert "accepted: world" in refusal(client, pipeline="moon").message


def test_tensors_of_a_request_are_checked(kit: Any) -> None:
    """Name, dtype, number and size of dimensions, bytes; and one that is required must be there."""
    rig = kit.Rig(BrokerConfig(image_bytes_max=100))
    spec = kit.world(
        tensors=(TensorInput("image", "uint8", (-1, -1, 3), required=True), TensorInput("k", "float32", (4,)))
    )
    rig.worker(spec=spec)
    client = rig.client()
    good = {"image": kit.image(2, 2, 3)}
    assert refusal(client).field == "image"
    assert refusal(client, tensors={**good, "mask": kit.image()}).field == "mask"
    for wrong in (kit.image(2, 3), kit.image(2, 2, 4), kit.image(6, 6, 3), kit.image(0, 2, 3)):
        assert refusal(client, tensors={"image": wrong}).field == "image"
    assert refusal(client, tensors={**good, "k": kit.image(4)}).field == "k"
    assert client.open(tensors=good)


def test_streaming_21_initialized_in_order_handing_on_what_each_made(rig: Any, kit: Any) -> None:
    """Encode, decode, denoise: one after the other, each with what all before it handed out, complete parameters,
    and the tensors that its stage asks for.
    """
    worker = rig.worker()
    worker.silent.add(m.InitializeStage)
    client = rig.client()
    client.open(tensors={"image": kit.image()})
    seen = []
    for _ in range(3):
        asked = worker.last(m.InitializeStage)
        seen.append((asked.stage, dict(asked.handed.values), sorted(asked.tensors), dict(asked.parameters)))
        assert client.state(asked.session)[0] == "initializing"
        worker.initialized(asked)
    assert seen == [
        ("encode", {}, ["image"], {"seed": 0}),
        ("decode", {"encode": "made"}, [], {"seed": 0}),
        ("denoise", {"encode": "made", "decode": "made"}, [], {"seed": 0}),
    ]
    assert client.state(worker.last(m.InitializeStage).session)[0] == "ready"


def test_an_initialization_that_refuses_the_request_ends_the_session(rig: Any) -> None:
    """The field and the worker's sentence reach the client; every stage that was touched is released."""
    worker = rig.worker()
    worker.silent.add(m.InitializeStage)
    client = rig.client()
    session = client.open()
    worker.initialized(worker.last(m.InitializeStage))
    asked = worker.last(m.InitializeStage)
    failure = Failure("request", "too wide", field="image")
    worker.say(m.StageFailed(session, asked.stage, 1, 1, "initialize", None, failure))
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind, ended.failure.field) == ("failed", "request", "image")
    assert [x.stage for x in worker.heard(m.ReleaseStage)] == ["decode", "encode"]


def test_what_a_stage_really_takes_replaces_the_estimate(rig: Any) -> None:
    """Before the initialization the announced size counts, afterwards the real one."""
    worker = rig.worker()
    worker.silent.add(m.InitializeStage)
    rig.client().open()

    def sizes() -> dict[str, int]:
        (shown,) = rig.core.status()["workers"]
        return {stage["stage"]: stage["cache_bytes"] for stage in shown["stages"]}

    assert sizes() == {"encode": 10, "denoise": 10, "decode": 10}
    worker.initialized(worker.last(m.InitializeStage), cache_bytes=77)
    assert sizes() == {"encode": 77, "denoise": 10, "decode": 10}


def test_a_session_prefers_one_worker_and_the_least_loaded(rig: Any) -> None:
    """All stages in one place if possible; the next session goes elsewhere; it stays where it is."""
    rig.worker("a")
    rig.worker("b")
    client = rig.client()
    places = []
    for key in ("1", "2", "3"):
        session = rig.core.sessions[client.open(key)]
        places.append({seat.actor.worker.name for seat in session.seats.seats.values()})
    assert places == [{"a"}, {"b"}, {"a"}]


def test_stages_may_live_at_several_workers(rig: Any) -> None:
    """If no worker has them all, each stage goes to the least loaded actor."""
    rig.worker("vae", stages=["encode", "decode"])
    rig.worker("dit1", stages=["denoise"])
    rig.worker("dit2", stages=["denoise"])
    client = rig.client()
    places = []
    for key in ("1", "2"):
        session = rig.core.sessions[client.open(key)]
        places.append({stage: seat.actor.worker.name for stage, seat in session.seats.seats.items()})
    assert places[0] == {"encode": "vae", "denoise": "dit1", "decode": "vae"}
    assert places[1]["denoise"] == "dit2"


@pytest.mark.parametrize("limit", [{"slots": 1}, {"bytes_max": 25, "session_bytes": 20}])
def test_without_room_sessions_wait_in_order_of_arrival(rig: Any, limit: dict[str, int]) -> None:
    """Slots and bytes both count; who waited longest is placed when one leaves."""
    rig.worker(**limit)
    client = rig.client()
    first, second, third = client.open("1"), client.open("2"), client.open("3")
    assert [client.state(x)[0] for x in (first, second, third)] == ["ready", "opening", "opening"]
    client.end(first, "cancel")
    assert [client.state(x)[0] for x in (second, third)] == ["ready", "opening"]


def test_a_session_waits_only_so_long_for_a_place(rig: Any) -> None:
    """Then it fails as overload, with an advice when to come back; the next in line isn't touched by it."""
    rig.worker(slots=1)
    client = rig.client()
    client.open("1")
    waiting = client.open("2")
    rig.advance(29.5)
    assert client.ended(waiting) is None
    rig.advance(1.0)
    ended = client.ended(waiting)
    assert (ended.state, ended.failure.kind, ended.failure.retry_after_s) == ("failed", "overload", 5.0)


def test_a_session_waits_for_weights_and_for_workers_that_come(rig: Any) -> None:
    """A worker that is still loading counts as one that could serve it."""
    worker = rig.worker(ready=False)
    client = rig.client()
    session = client.open()
    assert client.state(session)[0] == "opening"
    for stage in ("encode", "decode", "denoise"):
        worker.say(m.StageReady("world", stage, 1))
    assert client.state(session)[0] == "ready"


def test_a_stage_that_nobody_has_is_overload_at_once(rig: Any) -> None:
    """Waiting wouldn't help; the sentence names the stage."""
    rig.worker(stages=["encode", "decode"])
    failure = refusal(rig.client())
    assert (failure.kind, failure.retry_after_s) == ("overload", 5.0)
    assert "'denoise'" in failure.message


def test_sessions_are_bounded(kit: Any) -> None:
    """One more than there may be is refused as overload; when one ends there is room."""
    rig = kit.Rig(BrokerConfig(sessions_max=1))
    rig.worker()
    client = rig.client()
    first = client.open("1")
    assert refusal(client, key="2").kind == "overload"
    client.end(first, "cancel")
    assert client.open("3")


@pytest.mark.parametrize(("mode", "state"), [("cancel", "cancelled"), ("drain", "closed")])
def test_a_waiting_session_can_be_ended(rig: Any, mode: str, state: str) -> None:
    """It has nothing to release; its key can be used again."""
    rig.worker(ready=False)
    client = rig.client()
    session = client.open()
    client.end(session, mode)
    assert client.ended(session).state == state
    assert client.open() != session


def test_a_waiting_session_survives_its_pipelines_last_worker(rig: Any, kit: Any) -> None:
    """The dataflow is kept for it until it ends, so no other one can take the name."""
    worker = rig.worker(ready=False)
    client = rig.client()
    session = client.open()
    worker.say(m.Goodbye())
    assert client.ended(session) is None
    assert "no worker" in refusal(client, key="2").message or "unknown" in refusal(client, key="2").message
    other = rig.worker("other", spec=dataclasses.replace(kit.world(), fps=1.0))
    assert other.last(m.Rejected).code == "conflict"
    rig.worker("new")
    assert client.state(session)[0] == "ready"


def test_parameters_are_completed_with_defaults(rig: Any, kit: Any) -> None:
    """What the request leaves out, the stages are told all the same."""
    spec = kit.world(
        parameters=(
            Parameter("prompt", "string", "text", required=True, minimum=1),
            Parameter("seed", "integer", "seed", default=3),
        )
    )
    worker = rig.worker(spec=spec)
    client = rig.client()
    assert refusal(client).field == "prompt"
    client.open(parameters={"prompt": "a road"})
    assert worker.last(m.InitializeStage).parameters == {"prompt": "a road", "seed": 3}


def test_a_control_before_the_session_is_ready(rig: Any, kit: Any) -> None:
    """By index it is refused without harm; keys and the pending slot are kept for when the session is ready."""
    worker = rig.worker(ready=False)
    client = rig.client()
    session = client.open()
    refused = client.submit(session, 0)
    assert (refused.code, refused.expected) == ("no_room", 0)
    assert client.submit(session, None, kit.keys_of("a")) is None
    for stage in ("encode", "decode", "denoise"):
        worker.say(m.StageReady("world", stage, 1))
    rig.turn()
    assert client.last(m.ControlAccepted) == m.ControlAccepted(session, 0, by_index=False)


def test_a_late_answer_to_an_initialization_is_dropped(rig: Any) -> None:
    """A session that was cancelled meanwhile is released in order of receipt, whatever the stage still says."""
    worker = rig.worker()
    worker.silent |= {m.InitializeStage, m.ReleaseStage}
    client = rig.client()
    session = client.open()
    asked = worker.last(m.InitializeStage)
    client.end(session, "cancel")
    worker.initialized(asked)
    assert rig.counter("late_answers") == 1
    assert [x.stage for x in worker.heard(m.ReleaseStage)] == ["encode"]
    worker.say(m.StageInitialized(session, "encode", 1, 1, Artifact(), 1))
    assert rig.counter("orphans") == 1
    worker.released(worker.last(m.ReleaseStage))
    assert client.ended(session).state == "cancelled"
