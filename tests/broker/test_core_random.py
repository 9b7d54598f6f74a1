"""Random schedules of clients, workers, faults and time. A seed replays one; every event is followed by `check()`.

With odd seeds several messages share a turn, as they do when they arrive together.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.broker.events import Malformed, OutboxFull, Received, Unreachable
from reelwire.broker.pace import MediaClock
from reelwire.controls import Keys
from reelwire.messages import Artifact, Failure
from reelwire.tensors import Shared, TensorRef

STEPS = 250
STAGES = ("encode", "denoise", "decode")
SMALL_TALK = (m.TaskDone, m.TaskStarted, m.StageInitialized, m.StageReleased, m.StageFailed, m.Ack, m.SetKeys)
"""What nobody waits for an answer to."""


class Chaos:
    """One run."""

    def __init__(self, kit: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.kit = kit
        config = BrokerConfig(
            task_timeout_s=12,
            initialize_timeout_s=15,
            client_grace_s=3,
            control_idle_s=20,
            stall_s=15,
            placement_timeout_s=5,
            close_timeout_s=4,
            result_keep_s=30,
        )
        self.rig = kit.Rig(config)
        if seed % 2:
            self.rig.only_takes = self.is_taken
        self.capacities = {name: self.random.choice((1, 2, 3)) for name in ("encode_request", "condition", "latent")}
        least = min(self.capacities["encode_request"], self.capacities["condition"])
        self.capacities["control"] = self.random.randint(1, least)
        self.capacities["frames"] = self.random.choice((1, 2, 3))
        self.spec = self.dataflow()
        self.mailbox = self.random.choice((0, 1, 2))
        self.is_split = self.random.random() < 0.4
        self.names = 0
        self.workers: list[Any] = []
        self.clients: list[Any] = []
        self.lies = False
        self.sessions: dict[str, tuple[Any, int, Keys]] = {}
        self.paced: set[str] = set()

    def dataflow(self) -> Any:
        """The world's, with other bounds; its encode may settle, and its window may be refilled otherwise."""
        spec = self.kit.world(capacities=self.capacities, depth=self.random.choice((1, 2, 3)))
        encode, *others = spec.stages
        encode = replace(encode, settles=self.random.random() < 0.5)
        refill = self.random.choice(("after_stage", "after_stage", "with_control", "never"))
        return replace(spec, stages=(encode, *others), prefetch=replace(spec.prefetch, refill=refill))

    def is_taken(self, event: Any) -> bool:
        """Whether an event shares its turn with what comes next."""
        together = isinstance(event, Received) and isinstance(event.message, SMALL_TALK)
        return together and self.random.random() < 0.6

    def add_worker(self) -> None:
        """Another worker, with all stages or with some."""
        self.names += 1
        parts: tuple[tuple[str, ...], ...] = (("encode", "decode"), ("denoise",))
        stages = parts[self.names % 2] if self.is_split else self.random.choice((STAGES, STAGES, *parts))
        name = f"w{self.names}"
        memory, maps = self.random.random() < 0.8, self.random.random() < 0.8
        more = {"memory": memory, "maps": maps, "forwards": self.random.random() < 0.6}
        worker = self.rig.worker(name, spec=self.spec, stages=stages, slots=2, mailbox=self.mailbox, **more)
        if self.random.random() < 0.2:
            worker.silent.add(m.ReleaseStage)  # its stages hang when they are released
        if self.random.random() < 0.3:
            worker.silent.add(m.InitializeStage)  # it is slow, and may have no room after all
        self.workers.append(worker)

    def add_client(self) -> None:
        """Another client."""
        self.names += 1
        self.clients.append(self.rig.client(f"c{self.names}".encode(), maps=self.random.random() < 0.8))

    def open(self) -> None:
        """A session of some client."""
        if self.clients:
            self.names += 1
            client, chunks = self.random.choice(self.clients), self.random.randint(1, 8)
            binding = self.random.choice(("late", "late", "early"))
            credit = self.random.choice((self.kit.PLENTY, m.Credit(1, 1 << 30), m.Credit(0, 0), m.Credit(9, 1)))
            pace = self.random.choice(("asap", "asap", "realtime"))
            session = client.open(f"k{self.names}", chunks, control_binding=binding, credit=credit, pace=pace)
            if session:
                if pace == "realtime":
                    self.paced.add(session)
                self.sessions[session] = (client, chunks, Keys(self.spec))

    def steer(self) -> None:
        """A client says something about a session, right or wrong."""
        if not self.sessions:
            return
        name = self.random.choice(list(self.sessions))
        client, chunks, keys = self.sessions[name]
        match self.random.randrange(9):
            case 0 | 1:
                self.random.choice((keys.press, keys.release, keys.tap))(self.random.choice("wasd"))
                client.keys(name, keys)
            case 2:
                keys.reset_pose()
                client.keys(name, keys)
            case 3 | 4:
                live = self.rig.core.sessions.get(name)
                right = live.flow.next_control_index if live else 0
                client.submit(name, self.random.choice((right, right, right, None, right + 1, -1, chunks)))
            case 5 | 6 | 7:
                have = len(client.chunks(name))
                credit = m.Credit(have + self.random.randint(0, 3), self.random.choice((0, 1 << 30)))
                taken = self.random.choice((have, have, max(have - 1, 0), have + 5))
                client.ack(name, taken, self.random.choice((credit, self.kit.PLENTY)))
            case 8 if self.random.random() < 0.3:
                client.end(name, self.random.choice(("drain", "cancel")))

    def work(self) -> None:
        """A stage ends its task."""
        busy = [(worker, stage) for worker in self.workers for stage, jobs in worker.jobs.items() if jobs]
        if busy:
            worker, stage = self.random.choice(busy)
            if self.random.random() < 0.03:
                worker.fail(stage)
            elif self.random.random() < 0.01:
                worker.finish(stage, outputs={"wrong": Artifact()})
            elif self.lies and self.random.random() < 0.03:
                worker.finish(stage, outputs=self.lying(worker, worker.jobs[stage][0]))
            else:
                worker.finish(stage, constant=self.random.random() < 0.2)

    def answer(self) -> None:
        """A slow worker says how an initialization went."""
        slow = [worker for worker in self.workers if m.InitializeStage in worker.silent]
        asked = [(worker, x) for worker in slow for x in worker.heard(m.InitializeStage)]
        if not asked:
            return
        worker, x = self.random.choice(asked[-3:])
        size = self.random.choice((20, 20, 20, 2000))
        if self.random.random() < 0.6:
            worker.initialized(x, cache_bytes=size)
        else:
            failure = Failure(self.random.choice(("overload", "overload", "stage")), "no")
            worker.say(m.StageFailed(x.session, x.stage, x.epoch, x.stage_epoch, "initialize", None, failure))

    def lose(self) -> None:
        """Somebody goes, with or without a word."""
        peers = [peer for peer in (*self.workers, *self.clients) if peer.attachment]
        if not peers or self.random.random() > 0.15:
            return
        peer = self.random.choice(peers)
        match self.random.randrange(6):
            case 0:
                peer.say(m.Goodbye())
            case 5 if peer in self.workers:
                peer.say(m.Draining())
                return
            case 1 | 5:
                self.rig.handle(Unreachable(self.rig.now, peer.route))
            case 2:
                self.rig.handle(OutboxFull(self.rig.now, peer.route))
                for session in [name for name, (client, *_) in self.sessions.items() if client is peer]:
                    if self.random.random() < 0.5:
                        peer.end(session, self.random.choice(("drain", "cancel")))
                if self.random.random() < 0.5:
                    peer.say(m.Goodbye())
            case 3:
                self.rig.handle(Malformed(self.rig.now, peer.route, "malformed", "garbage"))
            case 4:
                peer.say(m.ClientHello("9.9"), attachment=0)
                return
        peer.attachment = 0
        (self.workers if peer in self.workers else self.clients).remove(peer)

    def lie(self) -> None:
        """A peer says something that makes no sense now."""
        peers = [peer for peer in (*self.workers, *self.clients) if peer.attachment]
        session = self.random.choice([*self.sessions, "nobody"])
        stage, index = self.random.choice(STAGES), self.random.randint(0, 8)
        at = (session, stage, self.random.choice((1, 1, 0)), 1)
        keys = Artifact({"keys": ["w"], "reset_pose": False})
        applied = m.Applied(self.random.choice(("tap", "held", "still", "explicit")), keys, 1, index, 0)
        lies: list[Any] = [
            m.TaskStarted(*at, index),
            m.TaskStarted(*at, index, applied),
            m.TaskDone(*at, index, {}, {}, 0.0),
            m.TaskDone(*at, index, {"latent": Artifact()}, {}, 0.0, applied),
            m.StageInitialized(*at, Artifact(), 5),
            m.StageReleased(*at),
            m.StageFailed(*at, self.random.choice(("run", "initialize", "release")), index, Failure("stage", "a lie")),
        ]
        workers = [peer for peer in peers if peer in self.workers]
        if workers:
            worker, lie = self.random.choice(workers), self.random.choice(lies)
            self.rig.memory.has_read((worker.attachment, session, stage))  # whatever it may say of itself
            worker.say(lie)

    def lying(self, worker: Any, task: m.RunTask) -> dict[str, Artifact]:
        """What a task makes, with something wrong about where it is."""
        owners = [peer.memory.offer.owner for peer in self.workers if peer.memory] or ["nobody"]
        own = worker.memory.offer.owner if worker.memory else "nobody"
        lent = list(worker.memory.out) if worker.memory else []
        generation = self.random.randint(0, 3)
        places = [
            Shared(self.random.choice(owners), "lie", generation),
            Shared(own, self.random.choice([*lent, "lie-1"]), generation),
            Shared(own, "lie-2", generation),
            Shared(own, "lie-2", generation),
        ]
        false = {str(number): TensorRef("uint8", (9,), place) for number, place in enumerate(places)}
        outputs = {name: worker.made(task, name) for name in self.spec.stage(task.stage).produces}
        name = self.random.choice(list(outputs))
        true = outputs[name]
        outputs[name] = Artifact(true.values, {**true.tensors, **false})
        return outputs

    def run(self, *, lies: bool) -> None:
        """Play the schedule, then let everything end."""
        self.lies = lies
        for add in (self.add_worker, self.add_worker, self.add_client, self.add_client):
            add()
        moves = [self.steer, self.steer, self.steer, self.work, self.work, self.work, self.open, self.lose]
        moves += [self.answer]
        for _ in range(STEPS):
            self.random.choice(moves)()
            if self.random.random() < 0.02:
                self.random.choice((self.add_worker, self.add_client))()
            if lies and self.random.random() < 0.1:
                self.lie()
            if self.random.random() < 0.5:
                self.rig.turn(drained=self.random.random() < 0.8)
            if self.random.random() < 0.1:
                self.rig.advance(self.random.choice((0.1, 0.5, 2.0)))
        for client in self.clients:
            client.say(m.Goodbye())
            client.attachment = 0
        for _ in range(100):
            if not self.rig.core.sessions:
                break
            self.work()
            self.rig.advance(1.0)
        self.rig.turn()


def check_memory(chaos: Chaos) -> None:
    """All segments of the workers that are left came back; that none came back twice or too early, `Memory` asserts."""
    attached = {peer.attachment for peer in chaos.rig.core._peers.workers.values()}
    left = [worker for worker in chaos.workers if worker.attachment in attached and worker.memory is not None]
    assert all(worker.memory.out == {} for worker in left)


def check_pace(chaos: Chaos) -> None:
    """No denoise of a session that keeps the pace was sent earlier than a window before its chunk is played.

    The window is an output edge here: how much less the client lets wait `Session.check` looks at.
    """
    clocks = {name: MediaClock(chaos.spec, chaos.kit.PLENTY.chunks) for name in chaos.paced}
    for at, message in chaos.rig.sent:
        if isinstance(message, m.Chunk) and message.session in clocks:
            clocks[message.session].committed(message.index, at)
        elif isinstance(message, m.RunTask) and message.session in clocks and message.stage == "denoise":
            assert clocks[message.session].begins_at(message.index) <= at


def check_applied(chaos: Chaos, chunks: list[m.Chunk]) -> None:
    """Each chunk says what its actor bound it to; one-shots are applied once, in order, and cursors never go back."""
    bound = {at: applied for worker in chaos.rig.peers.values() for at, applied in getattr(worker, "bound", {}).items()}
    taps = [chunk.applied.tap_revision for chunk in chunks if chunk.applied.source == "tap"]
    assert taps == sorted(set(taps))
    cursors = [(chunk.applied.tap_revision, chunk.applied.pose_revision) for chunk in chunks]
    assert cursors == sorted(cursors)
    for chunk in chunks:
        applied = chunk.applied
        assert bound.get((chunk.session, chunk.index), applied) == applied
        assert (applied.source == "still") <= ((chunk.session, chunk.index) in bound)


@pytest.mark.seeds(60)
def test_streaming_18_any_schedule_delivers_in_order_once_and_ends(kit: Any, seed: int) -> None:
    """Whatever happens: chunks come in order, each once; every session ends; nothing is left in a table."""
    chaos = Chaos(kit, seed)
    chaos.run(lies=False)
    assert not chaos.rig.core.sessions
    check_memory(chaos)
    for name, (client, chunks, _) in chaos.sessions.items():
        got = [chunk.index for chunk in client.chunks(name)]
        assert got == list(range(len(got)))
        ended = [x for x in client.heard(m.SessionEnded) if x.session == name]
        assert len(ended) <= 1
        if ended and ended[0].state == "completed":
            assert len(got) == chunks
        for chunk in client.chunks(name):
            assert chunk.outputs["frames"].values == {"from": f"{name}/frames/{chunk.index}"}
        check_applied(chaos, client.chunks(name))
    check_pace(chaos)
    status = chaos.rig.core.status()
    for worker in status["workers"]:
        assert all(stage["sessions"] == stage["tasks"] == stage["cache_bytes"] == 0 for stage in worker["stages"])


@pytest.mark.seeds(30)
def test_streaming_34_lies_in_any_schedule_break_nothing(kit: Any, seed: int) -> None:
    """Messages that make no sense never raise, never break an invariant, and leave nothing behind."""
    chaos = Chaos(kit, 1000 + seed)
    chaos.run(lies=True)
    assert not chaos.rig.core.sessions
    check_memory(chaos)
    for name, (client, _, _) in chaos.sessions.items():
        got = [chunk.index for chunk in client.chunks(name)]
        assert got == list(range(len(got)))
