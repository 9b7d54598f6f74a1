"""Leases on shared memory: who still reads what, and what goes back to the worker that wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire.broker.flow import CLIENT, Flow
from reelwire.broker.leases import PIECES_MAX, Leases, Memory, offer_objection, sharable
from reelwire.broker.peers import Peer
from reelwire.messages import Artifact, MemoryOffer, ReturnSegments, SegmentUse
from reelwire.tensors import Inline, Shared, TensorRef
from reelwire.wire import Limits


def peer(number: int, owner: str | None = None, *, maps: tuple[int, ...] = ()) -> Peer:
    """A worker, or a client when it has no memory."""
    memory = None if owner is None else MemoryOffer(owner, bytes(16))
    return Peer(b"%d" % number, number, "client" if owner is None else "worker", "", 0.0, memory=memory, maps=set(maps))


def tensor(segment: str, generation: int = 1, owner: str = "one", nbytes: int = 100) -> TensorRef:
    """A tensor in shared memory."""
    return TensorRef("uint8", (nbytes,), Shared(owner, segment, generation))


def artifact(*segments: str, **more: Any) -> Artifact:
    """An artifact of tensors in these segments."""
    return Artifact({}, {f"t{number}": tensor(segment, **more) for number, segment in enumerate(segments)})


class Session:
    """A flow and its leases, moved by hand; every step is checked."""

    def __init__(self, kit: Any, chunks: int = 9) -> None:
        self.worker = peer(1, "one")
        self.memory = Memory(1000)
        self.flow = Flow(kit.world(), chunks)
        self.leases = Leases(self.flow, self.memory)

    def check(self) -> None:
        """All invariants."""
        self.flow.check()
        self.leases.check()
        self.memory.check([self.leases], [self.worker])

    def run(self, stage: str) -> int:
        """Send a stage's next task off; it starts."""
        index = self.flow.dispatch(stage)
        self.flow.start(stage)
        self.check()
        return index

    def done(self, stage: str, **outputs: Artifact) -> None:
        """The oldest task of a stage is over."""
        index = self.flow.stages[stage].finished
        self.memory.arrive(self.worker, outputs)
        assert self.leases.objection(self.flow.spec.stage(stage).produces) is None
        self.leases.task_over(stage, index)
        self.flow.finish(stage, outputs)
        if index < self.flow.limit:
            self.leases.begin(index)
        self.memory.handled()
        self.check()

    def chunk(self, name: str) -> None:
        """Make a chunk whose artifacts are in segments of that name, and commit it."""
        self.flow.submit(Artifact())
        for stage, made in (("encode", "condition"), ("denoise", "latent"), ("decode", "frames")):
            self.run(stage)
            self.done(stage, **{made: artifact(f"{name}-{made}")})
        assert self.flow.commit() is not None
        self.check()

    def returned(self) -> list[SegmentUse]:
        """What went back to the worker."""
        return [use for _, returns in self.memory.returns() for use in returns.segments]


def test_a_stage_keeps_its_inputs_until_its_task_is_over(kit: Any) -> None:
    """A piece leaves its edge when its reader starts, and goes back when that one is done."""
    session = Session(kit)
    session.flow.submit(Artifact())
    session.run("encode")
    session.done("encode", condition=artifact("a", "b"))
    session.run("denoise")
    assert not session.flow.edges["condition"].held
    assert session.returned() == []
    session.done("denoise", latent=artifact("c"))
    assert session.returned() == [SegmentUse("a", 1), SegmentUse("b", 1)]
    assert set(session.worker.lent) == {"c"}


def test_frames_come_back_when_the_client_acknowledges(kit: Any) -> None:
    """Acknowledging twice, or less than before, gives nothing back twice."""
    session = Session(kit)
    session.chunk("a")
    session.chunk("b")
    session.returned()
    for acked, back in ((1, ["a-frames"]), (1, []), (0, []), (2, ["b-frames"]), (2, [])):
        session.flow.acknowledge(acked)
        session.leases.acknowledged()
        session.check()
        assert session.returned() == [SegmentUse(name, 1) for name in back]
    assert session.worker.lent == {}


def test_frames_that_nobody_waits_for_are_never_written_again(kit: Any) -> None:
    """A client that is lost, or doesn't want the rest, may still read what it was sent."""
    session = Session(kit)
    session.chunk("a")
    session.returned()
    session.flow.acknowledge(1)
    session.leases.abandon()
    session.check()
    assert session.returned() == [SegmentUse("a-frames", 1, broken=True)]


def test_what_was_not_sent_comes_back_when_it_is_dropped(kit: Any) -> None:
    """A cut drops what lies beyond it, a clear everything; running tasks and unread chunks keep what they read."""
    session = Session(kit)
    session.chunk("a")
    for name in "bc":
        session.flow.submit(Artifact())
        session.run("encode")
        session.done("encode", condition=artifact(name))
    session.run("denoise")
    session.returned()
    session.flow.cut(2)
    session.leases.drop(2)
    session.check()
    assert session.returned() == [SegmentUse("c", 1)]
    session.flow.clear()
    session.leases.clear()
    session.check()
    assert session.returned() == []
    session.leases.task_over("denoise", 1)
    session.flow.fail("denoise")
    session.check()
    assert session.returned() == [SegmentUse("b", 1)]
    assert set(session.worker.lent) == {"a-frames"}


def test_a_task_that_waits_at_its_actor_keeps_its_inputs(kit: Any) -> None:
    """It was sent them, although it hasn't begun, and nobody knows when it does."""
    session = Session(kit)
    session.flow.submit(Artifact())
    session.run("encode")
    session.done("encode", condition=artifact("a"))
    session.flow.dispatch("denoise")
    session.flow.clear()
    session.leases.clear()
    session.check()
    assert session.returned() == []
    session.flow.start("denoise")
    session.leases.task_over("denoise", 0)
    assert session.returned() == [SegmentUse("a", 1)]


def test_what_a_lost_stage_was_reading_is_never_written_again(kit: Any) -> None:
    """What only waited for it is."""
    session = Session(kit)
    for name in "ab":
        session.flow.submit(Artifact())
        session.run("encode")
        session.done("encode", condition=artifact(name))
    session.run("denoise")
    session.leases.vacated("denoise", lost=True)
    assert session.returned() == [SegmentUse("a", 1, broken=True), SegmentUse("b", 1)]


def test_a_stage_that_was_released_reads_nothing_any_more(kit: Any) -> None:
    """Its tasks are over with it, in order."""
    session = Session(kit)
    session.flow.submit(Artifact())
    session.run("encode")
    session.done("encode", condition=artifact("a"))
    session.run("denoise")
    session.flow.clear()
    session.leases.clear()
    assert session.returned() == []
    session.leases.vacated("denoise", lost=False)
    assert session.returned() == [SegmentUse("a", 1)]


def test_results_that_nobody_takes_come_back_at_once(kit: Any) -> None:
    """Those of a session that is over, or that fails because of them."""
    session = Session(kit)
    session.memory.arrive(session.worker, {"condition": artifact("a", "b")})
    session.memory.handled()
    session.check()
    assert session.returned() == [SegmentUse("a", 1), SegmentUse("b", 1)]
    session.memory.arrive(session.worker, {"condition": artifact("a", generation=2)})
    session.memory.handled()
    assert session.returned() == [SegmentUse("a", 2)]


def test_streaming_08_a_settled_artifact_is_kept_until_the_session_is_released(kit: Any) -> None:
    """It goes onto its edge again and again, and comes back once."""
    session = Session(kit)
    session.flow.submit(Artifact())
    session.run("encode")
    session.memory.arrive(session.worker, {"condition": artifact("a")})
    session.flow.finish("encode", {"condition": artifact("a")})
    session.leases.begin(0)
    session.leases.keep()
    session.memory.handled()
    session.run("denoise")
    session.done("denoise", latent=artifact("l"))
    assert session.returned() == []
    for index in (1, 2):
        session.flow.submit(Artifact())
        session.run("encode")
        session.flow.finish("encode", {"condition": artifact("a")})
        session.leases.begin_kept("condition", index)
        session.check()
    session.flow.clear()
    session.leases.clear()
    session.leases.begin_kept("condition", 3)
    assert session.returned() == [SegmentUse("l", 1), SegmentUse("a", 1)]


def test_a_stage_that_settles_twice_keeps_the_newer_artifact(kit: Any) -> None:
    """The older one comes back when its readers are done."""
    session = Session(kit)
    for name in "ab":
        session.memory.arrive(session.worker, {"condition": artifact(name)})
        session.leases.keep()
        session.memory.handled()
    assert session.returned() == [SegmentUse("a", 1)]
    assert set(session.worker.lent) == {"b"}


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ({"condition": artifact("a", owner="another")}, "isn't its worker's"),
        ({"condition": artifact("a", "a")}, "isn't free"),
        ({"condition": artifact("a"), "latent": artifact("a", generation=2)}, "isn't free"),
        ({"condition": artifact("lent", generation=1)}, "isn't free"),
        ({"condition": artifact("lent", generation=7)}, "isn't free"),
        ({"condition": artifact("a", nbytes=1001)}, "accepted: 1000"),
        ({"condition": artifact(*(f"s{number}" for number in range(PIECES_MAX + 1)))}, str(PIECES_MAX)),
    ],
)
def test_a_worker_that_lies_about_its_memory_is_objected_to(kit: Any, outputs: Any, reason: str) -> None:
    """Memory of others, a segment that is still read, twice the same, too large, too many: the sentence says which."""
    session = Session(kit)
    session.flow.submit(Artifact())
    session.run("encode")
    session.done("encode", condition=artifact("lent"))
    session.memory.arrive(session.worker, outputs)
    assert reason in str(session.leases.objection(("condition", "latent")))
    session.memory.handled()
    session.check()
    assert all(use.segment != "lent" for use in session.returned())
    assert set(session.worker.lent) == {"lent"}


def test_a_worker_without_memory_has_none(kit: Any) -> None:
    """It can't refer to anybody's."""
    session = Session(kit)
    session.memory.arrive(peer(2), {"condition": artifact("a")})
    assert "isn't its worker's" in str(session.leases.objection(("condition",)))
    session.memory.handled()
    session.check()


def test_only_what_all_readers_can_open_may_be_in_shared_memory(kit: Any) -> None:
    """A worker that was told to send an artifact inside of its messages must."""
    session = Session(kit)
    session.memory.arrive(session.worker, {"frames": artifact("a")})
    assert "not all of its readers" in str(session.leases.objection(("latent",)))
    assert session.leases.objection(("frames",)) is None
    session.memory.handled()
    session.memory.arrive(session.worker, {"frames": Artifact({}, {"t": TensorRef("uint8", (2,), Inline(b"12"))})})
    assert session.leases.objection(()) is None


def test_returns_fit_their_worker(kit: Any) -> None:
    """Many are said in several messages, each within its limits."""
    session = Session(kit)
    session.worker.limits = Limits(header_bytes_max=300)
    session.memory.arrive(session.worker, {"condition": artifact(*"abcde")})
    session.memory.handled()
    returns = [said for _, said in session.memory.returns()]
    assert [len(said.segments) for said in returns] == [2, 2, 1]
    assert all(isinstance(said, ReturnSegments) for said in returns)
    assert session.worker.lent == {}


def test_a_segment_is_free_when_its_worker_was_told_so(kit: Any) -> None:
    """Before that it can't come back as something else; nobody who tells the truth would try."""
    session = Session(kit)
    session.memory.arrive(session.worker, {"condition": artifact("a")})
    session.memory.handled()
    session.memory.arrive(session.worker, {"condition": artifact("a", generation=2)})
    assert "isn't free" in str(session.leases.objection(("condition",)))
    session.memory.handled()
    session.check()
    assert session.returned() == [SegmentUse("a", 1)]
    session.memory.arrive(session.worker, {"condition": artifact("a", generation=2)})
    assert session.leases.objection(("condition",)) is None
    session.memory.handled()
    assert session.returned() == [SegmentUse("a", 2)]


def test_what_may_be_shared_follows_from_who_reads_it(kit: Any) -> None:
    """All consumers' workers, and for outputs the client, must be able to open it; a worker reads itself."""
    one, two, none = peer(1, "one"), peer(2, "two"), peer(3)
    client = peer(4)
    alone = {"encode": one, "denoise": one, "decode": one}
    assert sharable(kit.world(), alone, client) == {"encode": ("condition",), "denoise": ("latent",), "decode": ()}
    client.maps.add(1)
    assert sharable(kit.world(), alone, client)["decode"] == ("frames",)
    assert sharable(kit.world(), alone, None)["decode"] == ()
    split = {"encode": one, "denoise": two, "decode": none}
    assert sharable(kit.world(), split, client) == {"encode": (), "denoise": (), "decode": ()}
    two.maps.add(1)
    none.maps.add(2)
    assert sharable(kit.world(), split, client) == {"encode": ("condition",), "denoise": ("latent",), "decode": ()}


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (MemoryOffer("../up", bytes(16)), "memory.owner"),
        (MemoryOffer("", bytes(16)), "memory.owner"),
        (MemoryOffer("x" * 65, bytes(16)), "memory.owner"),
        (MemoryOffer("one", b""), "memory.probe"),
        (MemoryOffer("one", bytes(1 << 20)), "memory.probe"),
        (MemoryOffer("taken", bytes(16)), "another worker's"),
    ],
)
def test_streaming_34_an_offer_of_memory_is_checked(offer: MemoryOffer, reason: str) -> None:
    """A name that is no name, an empty or a huge probe, and somebody else's memory are refused in a sentence."""
    objection = offer_objection(offer, {"taken"})
    assert objection is not None
    assert objection[0] == "malformed"
    assert reason in objection[1]


def test_an_honest_offer_is_taken() -> None:
    """With or without memory."""
    assert offer_objection(None, ()) is None
    assert offer_objection(MemoryOffer("w-1", bytes(16)), {"w-2"}) is None


def test_the_reader_of_frames_is_called_as_the_flow_calls_it() -> None:
    """Stages have names, the client has none."""
    assert CLIENT == ""


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ({"latent": artifact("big", nbytes=1001)}, "latent has a tensor of 1001 bytes; accepted: 1000"),
        (
            {"latent": artifact(*[f"s{number}" for number in range(PIECES_MAX + 1)])},
            f"latent has too many tensors in shared memory; accepted: {PIECES_MAX} of one result",
        ),
        ({"latent": artifact("small", "big", "other"), "more": artifact("huge", nbytes=2000)}, "more has a tensor"),
    ],
)
def test_a_result_that_is_too_much_goes_back_to_its_worker(outputs: dict[str, Artifact], reason: str) -> None:
    """All of it: the worker lent it in good faith, and would wait for it for ever."""
    memory, worker = Memory(1000), peer(1, "one")
    memory.arrive(worker, outputs)
    assert memory.objection is not None
    assert memory.objection.startswith(reason)
    memory.handled()
    ((producer, returned),) = memory.returns()
    assert producer is worker
    segments = {
        x.place.segment for one in outputs.values() for x in one.tensors.values() if isinstance(x.place, Shared)
    }
    assert set(returned.segments) == {SegmentUse(segment, 1) for segment in segments}
    assert worker.lent == {}
    memory.check([], [worker])
