"""Shared memory at the broker: who can open whose, what may be in it, and what goes back when."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.events import Unreachable
from reelwire.messages import Artifact
from reelwire.tensors import Shared, TensorRef


def shared(segment: str, owner: str = "w-0", generation: int = 1) -> Artifact:
    """An artifact with one tensor in shared memory."""
    return Artifact({"from": "a test"}, {"t": TensorRef("uint8", (9,), Shared(owner, segment, generation))})


def told(worker: Any, stage: str) -> list[tuple[str, ...]]:
    """What the tasks of a stage said that may be in shared memory."""
    return [task.shared for task in worker.heard(m.RunTask) if task.stage == stage]


def uses(worker: Any) -> list[m.SegmentUse]:
    """All that came back to a worker."""
    return [use for returns in worker.heard(m.ReturnSegments) for use in returns.segments]


# --- who can open whose --------------------------------------------------------------------------------------------------


def test_everybody_is_asked_whose_memory_it_can_open(rig: Any) -> None:
    """Those that were there, about a newcomer's, and the newcomer about theirs; nobody about its own."""
    early = rig.client(b"early")
    one = rig.worker("one", memory=True)
    two = rig.worker("two", memory=True)
    late, plain = rig.client(b"late"), rig.worker("plain")
    asked = {
        peer.route: [probe.owner for probe in peer.heard(m.ProbeMemory)] for peer in (early, one, two, late, plain)
    }
    assert asked == {
        b"early": ["one-0", "two-1"],
        b"one": ["two-1"],
        b"two": ["one-0"],
        b"late": ["one-0", "two-1"],
        b"plain": ["one-0", "two-1"],
    }
    numbers = {one.attachment, two.attachment}
    for peer, maps in ((early, numbers), (one, {two.attachment}), (two, {one.attachment}), (plain, numbers)):
        assert rig.core._peers.by_route[peer.route].maps == maps


def test_only_the_right_probe_counts(rig: Any) -> None:
    """An empty or a wrong answer, one about memory that nobody offered or about one's own, maps nothing."""
    worker = rig.worker(memory=True)
    client = rig.client(maps=False)
    for probe in (b"", b"guessed", bytes(16)):
        client.say(m.MemoryProbed("w-0", probe))
    client.say(m.MemoryProbed("nobody", bytes(16)))
    worker.say(m.MemoryProbed("w-0", worker.memory.offer.probe))
    assert rig.counter("memory_not_mapped") == 6
    assert all(not peer.maps for peer in rig.core._peers.by_route.values())


def test_who_left_is_forgotten_by_its_readers(rig: Any) -> None:
    """A worker that comes back is asked about anew, and its readers are."""
    client, worker = rig.client(), rig.worker(memory=True)
    for _ in range(5):
        worker = rig.worker(memory=True)
        assert rig.core._peers.by_route[client.route].maps == {worker.attachment}
    worker.say(m.Goodbye())
    assert rig.core._peers.by_route[client.route].maps == set()
    assert rig.core._peers.owners == {}


@pytest.mark.parametrize("offer", [m.MemoryOffer("../../etc", bytes(16)), m.MemoryOffer("ok", b"short")])
def test_streaming_34_a_hostile_offer_is_refused(rig: Any, kit: Any, offer: m.MemoryOffer) -> None:
    """A worker whose memory can't be what it says isn't taken."""
    peer = rig.stranger(b"hostile")
    peer.say(m.WorkerHello(kit.VERSION, "hostile", "cpu", (kit.world(),), (), {}, {}, offer), attachment=0)
    assert peer.last(m.Rejected).code == "malformed"
    assert "memory" in peer.last(m.Rejected).message
    assert rig.core._peers.owners == {}


def test_streaming_34_nobody_takes_anothers_memory_for_his(rig: Any, kit: Any) -> None:
    """The owner's name is taken while the owner is there; under its own name it may say hello again."""
    worker = rig.worker(memory=True)
    offer = worker.memory.offer
    thief = rig.stranger(b"thief")
    thief.say(m.WorkerHello(kit.VERSION, "thief", "cpu", (kit.world(),), (), {}, {}, offer), attachment=0)
    assert thief.last(m.Rejected).code == "malformed"
    again = rig.stranger(b"again")
    again.say(m.WorkerHello(kit.VERSION, "w", "cpu", (kit.world(),), (), {}, {}, offer), attachment=0)
    assert again.attachment > worker.attachment


# --- what may be in it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maps", [True, False])
def test_a_task_says_what_may_be_in_shared_memory(rig: Any, maps: bool) -> None:
    """What the worker itself reads always, frames if the client can open them."""
    worker = rig.worker(memory=True)
    client = rig.client(maps=maps)
    session = client.open()
    client.submit(session, 0)
    worker.make("encode", "denoise", "decode")
    assert told(worker, "encode")[0] == ("condition",)
    assert told(worker, "denoise") == [("latent",)]
    assert told(worker, "decode") == [("frames",) if maps else ()]
    assert client.chunks(session)[0].outputs["frames"].is_inline is not maps


@pytest.mark.parametrize("maps", [True, False])
def test_stages_of_several_workers_share_what_they_can_open(rig: Any, maps: bool) -> None:
    """Memory of a worker is used towards another one that can open it, and nothing is where there is none."""
    ends = rig.worker("ends", stages=("encode", "decode"), memory=True, maps=maps)
    middle = rig.worker("middle", stages=("denoise",))
    client = rig.client()
    session = client.open()
    client.submit(session, 0)
    ends.make("encode")
    middle.make("denoise")
    ends.make("decode")
    assert told(ends, "encode")[0] == ("condition",)
    assert told(middle, "denoise") == [()]
    assert told(ends, "decode") == [("frames",)]
    assert len(client.chunks(session)) == 1


def test_a_client_that_answers_late_is_shared_with_from_then_on(rig: Any) -> None:
    """A session that has its places needn't be placed again."""
    worker = rig.worker(memory=True)
    client = rig.client(maps=False)
    session = client.open(chunks=9)
    client.submit(session, 0)
    worker.make("encode", "denoise", "decode")
    client.say(m.MemoryProbed("w-0", worker.memory.offer.probe))
    client.ack(session, 1)
    client.submit(session, 1)
    worker.make("encode", "denoise", "decode")
    assert told(worker, "decode") == [(), ("frames",)]


def test_a_worker_without_memory_is_told_of_none(rig: Any) -> None:
    """Everything travels inside of messages, and nothing is said of segments."""
    worker, client, session = rig.start(chunks=1, controls=1)
    worker.make("encode", "denoise", "decode")
    client.ack(session, 1)
    rig.turn()
    assert {task.shared for task in worker.heard(m.RunTask)} == {()}
    assert worker.heard(m.ReturnSegments) == worker.heard(m.ProbeMemory) == []
    assert client.ended(session).state == "completed"


def test_a_client_cannot_refer_to_shared_memory(rig: Any) -> None:
    """It writes none: such a request, or control, is refused by name."""
    rig.worker(memory=True)
    client = rig.client()
    image = TensorRef("uint8", (2, 2, 3), Shared("w-0", "s0", 1))
    assert client.open("k", tensors={"image": image}) == ""
    failure = client.last(m.SessionRefused).failure
    assert (failure.kind, failure.field) == ("request", "image")
    session = client.open("other")
    poses = TensorRef("float32", (3, 4, 4), Shared("w-0", "s0", 1))
    assert client.submit(session, 0, Artifact({}, {"poses": poses})).code == "malformed"


def test_what_stages_hand_on_is_inside_of_messages(rig: Any) -> None:
    """A stage that refers to memory when it is initialized has failed, and its session with it."""
    worker = rig.worker(memory=True)
    worker.silent.add(m.InitializeStage)
    client = rig.client()
    session = client.open()
    worker.initialized(worker.last(m.InitializeStage), handed=shared("s0"))
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind, ended.failure.stage) == ("failed", "stage", "encode")
    assert "shared memory" in ended.failure.message
    assert rig.core.status()["workers"]


# --- what goes back ------------------------------------------------------------------------------------------------------


def test_what_came_back_in_a_turn_is_said_together(rig: Any) -> None:
    """One message per worker and turn, when consumers are done and the client has acknowledged."""
    worker = rig.worker(memory=True)
    client = rig.client()
    session = client.open(chunks=2)
    for index in range(2):
        client.submit(session, index)
    worker.make("encode", "denoise", "encode", "denoise")
    assert uses(worker) == []
    rig.turn()
    assert [use.segment for use in uses(worker)] == ["s0", "s2"]  # both conditions
    worker.make("decode", "decode")
    client.ack(session, 1)
    rig.turn()
    assert [len(returns.segments) for returns in worker.heard(m.ReturnSegments)] == [2, 3]
    client.ack(session, 2)
    rig.turn()
    assert worker.memory.out == {}
    assert not any(use.broken for use in uses(worker))
    assert len(worker.heard(m.ReturnSegments)) == 3


def test_a_client_that_is_lost_breaks_what_it_was_sent(rig: Any) -> None:
    """It may still read it; what it was never sent comes back whole."""
    worker = rig.worker(memory=True)
    client = rig.client()
    session = client.open(chunks=9)
    for index in range(2):
        client.submit(session, index)
    worker.make("encode", "encode", "denoise", "decode", "denoise")
    frames = client.chunks(session)[0].outputs["frames"].tensors["t"].place
    rig.handle(Unreachable(rig.now, client.route))
    rig.turn()
    client.attachment = 0
    rig.advance(rig.config.client_grace_s + 1)
    assert session not in rig.core.sessions
    assert worker.memory.out == {}
    assert [use.segment for use in uses(worker) if use.broken] == [frames.segment]


def test_a_cancelled_session_breaks_what_its_client_may_still_read(rig: Any) -> None:
    """A chunk that is on its way when the client cancels isn't overwritten; the rest comes back whole."""
    worker = rig.worker(memory=True)
    client = rig.client()
    session = client.open(chunks=9)
    for index in range(2):
        client.submit(session, index)
    worker.make("encode", "encode", "denoise", "decode", "denoise")
    client.end(session, "cancel")
    rig.turn()
    assert client.ended(session).state == "cancelled"
    assert worker.memory.out == {}
    frames = client.chunks(session)[0].outputs["frames"].tensors["t"].place
    assert [use.segment for use in uses(worker) if use.broken] == [frames.segment]


def test_results_that_come_too_late_come_back(rig: Any) -> None:
    """Of a session that is being released, of one that is over, and of one that nobody knows."""
    worker = rig.worker(memory=True)
    client = rig.client()
    session = client.open(chunks=9)
    client.submit(session, 0)
    client.end(session, "cancel")
    rig.turn()
    assert worker.memory.out == {}
    for name in (session, "nobody"):
        worker.say(m.TaskDone(name, "encode", 1, 1, 3, {"condition": shared(f"lie-{name[:3]}")}, {}, 0.0))
    rig.turn()
    assert [use.segment[:3] for use in uses(worker)[-2:]] == ["lie", "lie"]
    assert rig.counter("orphans") == 2


LIES = {
    "of nobody": shared("lie", owner="nobody"),
    "of another worker": shared("lie", owner="other-1"),
    "still read": shared("s0", generation=2),
    "twice": Artifact({}, {name: TensorRef("uint8", (1,), Shared("w-0", "lie", 1)) for name in "ab"}),
    "too large": Artifact({}, {"t": TensorRef("uint8", (1 << 40,), Shared("w-0", "lie", 1))}),
}


@pytest.mark.parametrize("lie", LIES)
def test_streaming_23_a_worker_that_lies_about_memory_fails_that_session(rig: Any, lie: str) -> None:
    """Kind stage, with the chunk and a sentence; the chunk below is delivered, neighbours and worker stay."""
    worker = rig.worker(memory=True)
    rig.worker("other", memory=True, ready=False)
    client = rig.client()
    bystander = client.open("bystander")
    session = client.open("victim")
    for name in (session, bystander):
        client.submit(name, 0)
    while worker.jobs["encode"][0].session == bystander:
        worker.finish("encode")
    worker.finish("encode", outputs={"condition": LIES[lie]})
    while worker.jobs["encode"]:
        worker.finish("encode")
    ended = client.ended(session)
    assert (ended.state, ended.failure.kind) == ("failed", "stage")
    assert (ended.failure.stage, ended.failure.index) == ("encode", 0)
    worker.make("denoise", "decode")
    assert len(client.chunks(bystander)) == 1
    rig.turn()
    client.ack(bystander, 1)
    client.end(bystander, "cancel")
    rig.turn()
    assert worker.memory.out == {}


def test_a_worker_that_shares_what_it_should_not_fails_that_session(rig: Any) -> None:
    """A client that can't open the memory isn't sent there."""
    worker = rig.worker(memory=True)
    client = rig.client(maps=False)
    session = client.open(chunks=3)
    client.submit(session, 0)
    worker.make("encode", "denoise")
    worker.finish("decode", outputs={"frames": Artifact({}, {"t": worker.memory.take("frames")})})
    assert "not all of its readers" in client.ended(session).failure.message
    assert client.chunks(session) == []
    rig.turn()
    assert worker.memory.out == {}


def test_a_status_says_how_much_is_lent(rig: Any) -> None:
    """Of each worker: whether it writes shared memory, and how many pieces of it may be read now."""
    worker = rig.worker(memory=True)
    client = rig.client()
    client.submit(client.open(chunks=9), 0)
    worker.make("encode", "denoise")
    rig.turn()
    rig.worker("plain")
    shown = {one["name"]: (one["shared_memory"], one["pieces_lent"]) for one in rig.core.status()["workers"]}
    assert shown == {"w": (True, len(worker.memory.out)), "plain": (False, 0)}


def test_a_lost_producer_is_told_nothing_and_its_readers_end(rig: Any) -> None:
    """Its sessions fail; a new attachment begins with nothing lent."""
    worker = rig.worker(memory=True)
    client = rig.client()
    session = client.open()
    client.submit(session, 0)
    worker.make("encode", "denoise", "decode")
    said = len(worker.inbox)
    rig.handle(Unreachable(rig.now, worker.route))
    rig.turn()
    client.ack(session, 1)
    rig.turn()
    assert client.ended(session).failure.kind == "worker_lost"
    assert len(worker.inbox) == said
    assert rig.worker(memory=True).attachment > 0
    assert all(not peer.lent for peer in rig.core._peers.workers.values())
