"""Who is attached: handshake, identity, liveness, and what strangers may do (nothing)."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.broker.events import Malformed, OutboxFull, Unreachable
from reelwire.messages import Artifact, Failure
from reelwire.spec import Edge


def test_streaming_38_a_welcome_says_version_limits_and_specs(rig: Any, kit: Any) -> None:
    """A client learns who it is, the broker's version and limits, and what it can ask for."""
    rig.worker()
    client = rig.client(name="")
    welcome = client.last(m.Welcome)
    assert welcome.version == kit.VERSION
    assert welcome.name == f"client-{welcome.incarnation}.{client.attachment}"
    assert (welcome.heartbeat_s, welcome.missed) == (1.0, 3)
    assert welcome.limits == BrokerConfig().limits()
    assert welcome.specs == (kit.world(),)
    assert rig.peers[b"w"].last(m.Welcome).specs == ()


def test_streaming_38_a_client_is_told_when_pipelines_come_and_go(rig: Any, kit: Any) -> None:
    """A client that was there first is welcomed again, under its old number, whenever there is something else to ask for."""
    client = rig.client()
    assert client.last(m.Welcome).specs == ()
    worker = rig.worker()
    assert client.last(m.Welcome).specs == (kit.world(),)
    rig.worker("second")
    assert len(client.heard(m.Welcome)) == 2
    worker.say(m.Goodbye())
    assert len(client.heard(m.Welcome)) == 2
    rig.peers[b"second"].say(m.Goodbye())
    assert client.last(m.Welcome).specs == ()
    assert len(client.heard(m.Welcome)) == 3


@pytest.mark.parametrize("version", ["0.2.0", "1.1.0", "", "0"])
def test_streaming_38_another_version_is_refused_with_both_named(rig: Any, kit: Any, version: str) -> None:
    """Major and minor must agree; the refusal names both versions, for clients and workers."""
    client = rig.stranger(b"old").hello(version=version)
    worker = rig.worker("old-worker", version=version)
    for peer in (client, worker):
        rejected = peer.last(m.Rejected)
        assert rejected.code == "version"
        assert kit.VERSION in rejected.message
        assert rejected.message.endswith(version)
        assert peer.attachment == 0


def test_streaming_38_another_patch_version_fits(rig: Any) -> None:
    """The third number doesn't matter."""
    assert rig.stranger(b"patched").hello(version="0.1.7").attachment > 0


def test_streaming_38_announced_is_not_ready(rig: Any) -> None:
    """A worker that loads its weights is there, and status shows that it isn't ready; then it is."""
    worker = rig.worker(ready=False)
    (shown,) = rig.core.status()["workers"]
    assert not shown["ready"]
    for stage in ("encode", "denoise", "decode"):
        worker.say(m.StageReady("world", stage, 1))
    (shown,) = rig.core.status()["workers"]
    assert shown["ready"]


def test_streaming_33_every_attachment_has_its_own_number(rig: Any) -> None:
    """Numbers are never given twice, also not to a peer that comes back."""
    numbers = [rig.client(b"a").attachment, rig.worker("w").attachment]
    numbers += [rig.client(b"a").attachment, rig.worker("w").attachment]
    assert len(set(numbers)) == 4
    assert numbers == sorted(numbers)


def test_streaming_33_a_worker_under_an_old_name_fences_the_old_one_off(rig: Any) -> None:
    """Its sessions fail, what the old process still says is dropped, and it is told once."""
    old = rig.worker()
    client = rig.client()
    session = client.open()
    task = old.jobs["encode"][0]
    new = kit_worker(rig, b"elsewhere", old.name)
    assert client.ended(session).failure.kind == "worker_lost"
    before = rig.core.status()
    old.finish("encode")
    old.say(m.Heartbeat())
    assert [rejected.code for rejected in old.heard(m.Rejected)] == ["unknown_peer"]
    assert rig.counter("unknown_peer") >= 2
    assert new.attachment > old.attachment
    assert len(before["workers"]) == 1
    assert client.open("again")
    new.say(m.TaskDone(task.session, "encode", 1, 1, 0, {"condition": Artifact()}, {}, 0.0))
    assert rig.counter("orphans") == 1


def kit_worker(rig: Any, route: bytes, name: str) -> Any:
    """A worker of that name over another connection."""
    kind = type(rig.peers[b"w"])
    worker = rig.peers[route] = kind(rig, route, name)
    return worker.hello()


def test_streaming_33_a_second_hello_on_a_route_replaces_the_first(rig: Any) -> None:
    """A worker that says hello again loses what it had; a client's sessions get their grace."""
    worker = rig.worker()
    client = rig.client()
    session = client.open()
    number = client.attachment
    client.hello()
    assert client.attachment > number
    assert rig.core.sessions[session].owner is None
    client.ack(session, 0)
    assert rig.counter("unknown_session") == 1
    worker.hello()
    assert not rig.core.sessions


def test_streaming_33_a_message_with_an_old_number_changes_nothing(rig: Any) -> None:
    """The route alone isn't trusted: another attachment's message is dropped."""
    rig.worker()
    client = rig.client()
    session = client.open()
    client.say(m.EndSession(session, "cancel"), attachment=client.attachment - 1)
    assert session in rig.core.sessions
    assert client.last(m.Rejected).code == "unknown_peer"


def test_streaming_34_a_stranger_is_told_once(rig: Any) -> None:
    """Whatever it sends, it gets one answer; after a hello and a loss it may be told again."""
    stranger = rig.stranger(b"x")
    for message in (m.Heartbeat(), m.Ack("s", 1), m.Goodbye()):
        stranger.say(message, attachment=7)
    rig.handle(Malformed(rig.now, b"x", "malformed", "garbage"))
    assert [type(message) for message in stranger.inbox] == [m.Rejected]
    assert (rig.counter("unknown_peer"), rig.counter("malformed")) == (3, 1)
    stranger.hello()
    stranger.say(m.Goodbye())
    stranger.say(m.Heartbeat())
    assert [type(message) for message in stranger.inbox] == [m.Rejected, m.Welcome, m.Rejected]


@pytest.mark.parametrize("code", ["malformed", "version"])
def test_streaming_34_a_peer_that_sends_garbage_is_told_and_dropped(rig: Any, code: Any) -> None:
    """Its sessions are treated as for a lost client; the others don't notice."""
    worker = rig.worker()
    bad, good = rig.client(b"bad"), rig.client(b"good")
    mine, theirs = good.open(), bad.open()
    rig.handle(Malformed(rig.now, b"bad", code, "not a message"))
    rig.handle(Malformed(rig.now, b"bad", code, "not a message"))
    assert [rejected.code for rejected in bad.heard(m.Rejected)] == [code]
    assert rig.core.sessions[theirs].owner is None
    assert good.submit(mine, 0) == m.ControlAccepted(mine, 0)
    assert not worker.heard(m.Rejected)


def test_streaming_34_strangers_that_were_told_are_forgotten_at_last(kit: Any) -> None:
    """The memory of who was told has a bound."""
    rig = kit.Rig(BrokerConfig(peers_max=4))
    for number in range(20):
        rig.handle(Malformed(rig.now, b"%d" % number, "malformed", "garbage"))
    assert len(rig.core._told) == 4


def test_every_word_of_a_peer_is_heard(rig: Any) -> None:
    """Of clients and workers, each message of their direction but the hello, and no other."""
    words = {"client": set(get_args(m.ClientMessage)), "worker": set(get_args(m.WorkerMessage))}
    words["client"].remove(m.ClientHello)
    words["worker"].remove(m.WorkerHello)
    assert set(rig.core._hears) == {(kind, word) for kind, said in words.items() for word in said}


@pytest.mark.parametrize(
    "message",
    [
        m.StageReady("world", "encode", 1),
        m.TaskStarted("s", "encode", 1, 1, 0),
        m.StageFailed("s", "encode", 1, 1, "run", 0, Failure("stage", "x")),
    ],
)
def test_streaming_34_a_client_that_speaks_as_a_worker_is_dropped(rig: Any, message: Any) -> None:
    """And the other way round: each kind of peer has its own words."""
    client = rig.client()
    client.say(message)
    assert client.last(m.Rejected).code == "malformed"
    assert rig.core.status()["clients"] == 0


def test_streaming_34_a_worker_that_speaks_as_a_client_is_dropped(rig: Any) -> None:
    """A worker can't open sessions."""
    worker = rig.worker()
    worker.say(m.OpenSession("k", "world", 1))
    assert worker.last(m.Rejected).code == "malformed"
    assert rig.core.status()["workers"] == []


@pytest.mark.parametrize("ready", [m.StageReady("world", "paint", 1), m.StageReady("world", "encode", -1)])
def test_streaming_34_a_worker_that_lies_about_its_stages_is_dropped(rig: Any, ready: m.StageReady) -> None:
    """A stage that it never announced can't be ready, nor can one take less than nothing."""
    worker = rig.worker()
    worker.say(ready)
    assert worker.last(m.Rejected).code == "malformed"


def test_streaming_32_a_silent_peer_is_dead_after_three_intervals(rig: Any) -> None:
    """Not before, and any message counts as life."""
    worker, client = rig.worker(), rig.client()
    rig.advance(2.9, alive=False)
    worker.say(m.Heartbeat())
    rig.advance(0.5, alive=False)
    status = rig.core.status()
    assert (len(status["workers"]), status["clients"]) == (1, 0)
    rig.advance(2.3, alive=False)
    assert len(rig.core.status()["workers"]) == 1
    rig.advance(0.5, alive=False)
    assert rig.core.status()["workers"] == []
    assert client.route in rig.forgotten
    assert worker.route in rig.forgotten


def test_streaming_32_a_busy_worker_says_until_when(rig: Any) -> None:
    """It may be silent for so long and no longer; a bound holds whatever it says."""
    worker = rig.worker()
    worker.say(m.Heartbeat(busy_for_s=20.0))
    rig.advance(19.5, alive=False)
    assert len(rig.core.status()["workers"]) == 1
    rig.advance(1.0, alive=False)
    assert rig.core.status()["workers"] == []
    worker = rig.worker()
    worker.say(m.Heartbeat(busy_for_s=1e12))
    worker.say(m.Heartbeat(busy_for_s=-5.0))
    rig.advance(3.5, alive=False)
    assert rig.core.status()["workers"] == []


def test_streaming_32_nobody_is_declared_dead_over_an_unread_backlog(rig: Any) -> None:
    """A broker that stood still reads what came meanwhile first."""
    client = rig.client()
    rig.now += 60.0
    rig.turn(drained=False)
    assert rig.core.status()["clients"] == 1
    assert rig.core.wake_at <= rig.now
    client.say(m.Heartbeat())
    rig.turn()
    assert rig.core.status()["clients"] == 1


def test_streaming_32_the_broker_gives_signs_of_life(rig: Any) -> None:
    """Each peer gets a heartbeat every interval, whatever else it hears: it carries what may have been lost."""
    client, worker = rig.client(), rig.worker()
    rig.advance(10.0)
    assert [len(peer.heard(m.Heartbeat)) for peer in (client, worker)] == [10, 10]
    for _ in range(20):
        rig.advance(0.5)
        client.say(m.AskStatus(1))
    assert len(client.heard(m.Heartbeat)) == 20


@pytest.mark.parametrize("event", [Unreachable, OutboxFull])
def test_streaming_35_a_peer_that_cannot_be_sent_to_is_lost(rig: Any, event: Any) -> None:
    """A connection that is gone, or doesn't read, costs its peer the attachment; its outbox is freed at once."""
    rig.worker()
    client = rig.client()
    session = client.open()
    rig.handle(event(rig.now, client.route))
    assert client.route in rig.forgotten
    rig.turn()
    assert rig.core.status()["clients"] == 0
    assert rig.core.sessions[session].owner is None
    rig.handle(event(rig.now, b"nobody"))
    assert b"nobody" in rig.forgotten


def test_peers_are_bounded(kit: Any) -> None:
    """One more than there may be is refused, and told so."""
    rig = kit.Rig(BrokerConfig(peers_max=2))
    rig.client(b"1")
    rig.client(b"2")
    third = rig.stranger(b"3").hello()
    assert third.last(m.Rejected).code == "limit"
    rig.peers[b"1"].say(m.Goodbye())
    assert third.hello().attachment > 0


def hello(rig: Any, spec: Any, *offers: m.StageOffer, name: str = "new", device: str = "cpu", **more: Any) -> Any:
    """A worker's hello as given."""
    peer = rig.stranger(name.encode() or b"nameless")
    specs = spec if isinstance(spec, tuple) else (spec,)
    peer.say(m.WorkerHello("0.1.0", name, device, specs, offers, **more), attachment=0)
    return peer


def test_two_workers_must_agree_on_a_dataflow(rig: Any, kit: Any) -> None:
    """Another spec under the same name is refused while somebody serves the first, and accepted afterwards."""
    worker = rig.worker()
    other = dataclasses.replace(kit.world(), fps=30.0)
    assert hello(rig, other).last(m.Rejected).code == "conflict"
    worker.say(m.Goodbye())
    assert hello(rig, other).last(m.Welcome)


def test_a_worker_may_come_back_with_another_dataflow(rig: Any, kit: Any) -> None:
    """Its own old attachment isn't in its way."""
    rig.worker()
    assert hello(rig, dataclasses.replace(kit.world(), fps=30.0), name="w").last(m.Welcome)


def test_a_dataflow_must_keep_the_promise_of_its_grants(rig: Any, kit: Any) -> None:
    """A control edge larger than what its condition has to pass isn't served; nor is a broken spec."""
    rejected = hello(rig, kit.world(capacities={"control": 3})).last(m.Rejected)
    assert (rejected.code, "control" in rejected.message) == ("malformed", True)
    broken = dataclasses.replace(kit.world(), edges=(Edge("control"),))
    assert hello(rig, broken).last(m.Rejected).code == "malformed"


@pytest.mark.parametrize(
    "offers",
    [
        [m.StageOffer("world", "paint", 1, 1)],
        [m.StageOffer("moon", "encode", 1, 1)],
        [m.StageOffer("world", "encode", 0, 1)],
        [m.StageOffer("world", "encode", 1, -1)],
        [m.StageOffer("world", "encode", 1_000_001, 1)],
        [m.StageOffer("world", "encode", 1, 1, 1_000_001)],
        [m.StageOffer("world", "encode", 1, 1, -1)],
        [m.StageOffer("world", "encode", 1, 1), m.StageOffer("world", "encode", 1, 1)],
    ],
)
def test_a_worker_offers_what_exists_in_whole_numbers(rig: Any, kit: Any, offers: list[m.StageOffer]) -> None:
    """An unknown stage, one that is offered twice, or counts below their least are refused with a sentence."""
    assert hello(rig, kit.world(), *offers).last(m.Rejected).code == "malformed"


def test_a_worker_has_a_name_and_announces_each_pipeline_once(rig: Any, kit: Any) -> None:
    """Without a name, or with a pipeline twice, it isn't taken."""
    assert hello(rig, kit.world(), name="").last(m.Rejected).code == "malformed"
    assert hello(rig, (kit.world(), kit.world())).last(m.Rejected).code == "malformed"


def test_a_stage_that_could_not_be_built_is_shown(rig: Any) -> None:
    """The worker's reason stands in the status until the stage is ready."""
    worker = rig.worker(ready=False)
    failure = Failure("stage", "no such file")
    worker.say(m.StageFailed("", "denoise", 0, 0, "build", None, failure))
    (shown,) = rig.core.status()["workers"]
    reasons = {stage["stage"]: stage["failure"] for stage in shown["stages"]}
    assert reasons == {"encode": "", "denoise": "no such file", "decode": ""}
    assert [log.event for log in rig.logs if log.level == "error"] == ["stage_not_built"]


def test_every_log_line_carries_the_number_of_its_event(rig: Any) -> None:
    """Lines of one event share its number; numbers grow."""
    rig.worker()
    rig.client().open()
    numbers = [log.fields["event_id"] for log in rig.logs]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 3


@pytest.mark.parametrize(
    "more",
    [
        {"name": "n" * 257},
        {"device": "d" * 257},
        {"packages": {"p": "1" * 257}},
        {"packages": dict.fromkeys(map(str, range(65)), "1")},
    ],
)
def test_what_a_worker_calls_itself_is_bounded(rig: Any, kit: Any, more: dict[str, Any]) -> None:
    """Names and versions that a status would have to repeat are refused when they are long or many."""
    assert hello(rig, kit.world(), **more).last(m.Rejected).code == "limit"
    assert rig.core.status()["workers"] == []


def test_a_client_has_a_short_name(rig: Any) -> None:
    """So that a table of clients stays one."""
    assert rig.client(name="n" * 257).last(m.Rejected).code == "limit"


def test_streaming_34_specs_that_a_client_could_not_be_told_are_refused(rig: Any, kit: Any) -> None:
    """All specs together fit a header, so that no worker keeps clients from attaching."""
    one, two = (
        kit.world(name=name, control_aliases={}, control_names=tuple(name + "k" * 600 + str(i) for i in range(250)))
        for name in "ab"
    )
    assert hello(rig, one, name="one").last(m.Welcome)
    assert hello(rig, two, name="two").last(m.Rejected).code == "limit"
    assert [spec.name for spec in rig.client().last(m.Welcome).specs] == ["a"]


def test_a_log_line_repeats_little_of_what_a_peer_said(rig: Any) -> None:
    """A stranger can't fill the disk through the log."""
    rig.stranger(b"loud").hello(version="9" * 100_000)
    assert max(len(str(value)) for log in rig.logs for value in log.fields.values()) < 600


@pytest.mark.parametrize(
    "refused",
    [
        {"stages": (m.StageOffer("world", "paint", 1, 100),)},
        {"stages": (m.StageOffer("world", "encode", 0, 100),)},
        {"memory": m.MemoryOffer("No Name", bytes(16))},
        {"memory": m.MemoryOffer("other-0", bytes(16))},
        {"limits": {"frame_bytes_max": 0}},
        {"packages": {"numpy": "x" * 1000}},
    ],
)
@pytest.mark.parametrize("route", [b"second", b"w"])
def test_streaming_33_a_refused_hello_costs_nobody_the_attachment(
    rig: Any, kit: Any, refused: dict[str, Any], route: bytes
) -> None:
    """Whose name a newcomer has isn't dropped for one that isn't taken; nor by its own second hello."""
    rig.worker("other", ready=False, memory=True)
    stream = kit.Stream(rig, memory=True)
    hello = {"stages": (), "packages": {}, **refused}
    second = rig.peers[route] if route == b"w" else rig.stranger(route)
    second.say(m.WorkerHello("0.1.0", "w", "cpu", (kit.world(),), **hello), attachment=0)
    assert second.last(m.Rejected)
    assert [worker["name"] for worker in rig.core.status()["workers"]] == ["other", "w"]
    stream.press("w")
    rig.turn()
    stream.make(3)
    assert [chunk.index for chunk in stream.got()] == [0, 1, 2]


def test_streaming_33_a_worker_may_come_back_to_a_full_broker(kit: Any) -> None:
    """Its old attachment's place is its own, and so is its shared memory."""
    rig = kit.Rig(BrokerConfig(peers_max=1))
    old = rig.worker(memory=True)
    new = rig.stranger(b"new")
    offers = (m.StageOffer("world", "encode", 1, 100),)
    new.say(m.WorkerHello("0.1.0", "w", "cpu", (kit.world(),), offers, memory=old.memory.offer), attachment=0)
    assert new.attachment > old.attachment
    assert [worker["name"] for worker in rig.core.status()["workers"]] == ["w"]


def test_a_dataflow_that_somebody_still_reads_is_in_the_way_of_another(rig: Any, kit: Any) -> None:
    """A worker that comes back with another one is refused while chunks of its old self aren't taken."""
    stream = kit.Stream(rig)
    stream.press("w")
    rig.turn()
    stream.make(1, ack=False)
    other = dataclasses.replace(kit.world(), fps=30.0)
    assert hello(rig, other, name="w").last(m.Rejected).code == "conflict"
    assert rig.core.status()["workers"] == []
    stream.client.ack(stream.id, 1)
    assert hello(rig, other, name="w").last(m.Welcome)
