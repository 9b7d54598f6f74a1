"""A broker's core, worker cores and a client that wants everything, joined by wires that deliver when chance says so.

One thread, no clock. Shared memory is a table: what stands in a piece is who wrote it, so that whoever reads knows whether
it was written again meanwhile.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from reelwire import messages as m
from reelwire.broker import actions as broker_actions
from reelwire.broker import events as broker_events
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.controls import Keys
from reelwire.tensors import Shared, TensorRef
from reelwire.workers import actions, events
from reelwire.workers.config import WorkerConfig
from reelwire.workers.core import WorkerCore

VERSION = "1.2.3"
CLIENT = b"client"
SESSIONS, CHUNKS = 6, 5
WINDOW = 2
MAKES = {"draw": "picture", "show": "frames"}


@dataclass
class Memory:
    """The shared memory of one process: segment to generation and who wrote it; `out`: those that are in use."""

    offer: m.MemoryOffer
    written: dict[str, tuple[int, object]] = field(default_factory=dict)
    free: list[str] = field(default_factory=list)
    out: set[str] = field(default_factory=set)

    def write(self, content: object) -> Shared:
        """A piece, in a segment that is free if there is one."""
        segment = self.free.pop() if self.free else f"s{len(self.written)}"
        generation = self.written.get(segment, (0, None))[0] + 1
        self.written[segment] = generation, content
        self.out.add(segment)
        return Shared(self.offer.owner, segment, generation)

    def take_back(self, use: m.SegmentUse) -> None:
        """As the pool does."""
        if use.segment in self.out and self.written[use.segment][0] == use.generation:
            self.out.remove(use.segment)
            if not use.broken:
                self.free.append(use.segment)


class Process:
    """A worker process that may be started again, under its name and with other shared memory."""

    def __init__(self, world: World, name: str, stages: tuple[str, ...]) -> None:
        self.world, self.name, self.stages = world, name, stages
        self.route = b""
        self.inbox: deque[tuple[int, Any]] = deque()

    def start(self) -> None:
        """A new process under the old name."""
        world = self.world
        world.processes_started += 1
        owner = f"{self.name}-{world.processes_started}"
        self.memory = world.memories[owner] = Memory(m.MemoryOffer(owner, owner.encode().ljust(16)))
        config = WorkerConfig(name=self.name, stages=self.stages, slots=2, connect_timeout_s=1e6)
        self.core = WorkerCore(config, world.spec, VERSION, memory=self.memory.offer)
        self.jobs: dict[str, actions.Job] = {}
        self.stopping = False
        self.handle(events.Started(world.now))

    def handle(self, event: events.Event) -> None:
        """The worker's loop."""
        done = self.core.handle(event)
        self.core.check()
        for action in done:
            match action:
                case actions.Connect():
                    self.route = b"%s-%d" % (self.name.encode(), self.world.next_connection())
                    self.world.to_broker[self.route] = deque()
                    self.inbox.clear()
                case actions.Send():
                    self.world.to_broker[self.route].append((action.attachment, action.message))
                case actions.Run():
                    assert action.stage not in self.jobs
                    self.jobs[action.stage] = action.job
                    self.world.begins(action.job)
                case actions.AnswerProbe():
                    probe = self.world.probe_of(action.owner)
                    self.handle_out(action.attachment, m.MemoryProbed(action.owner, probe))
                case actions.TakeBack():
                    for use in action.segments:
                        self.memory.take_back(use)
                case actions.AbandonMemory():
                    self.memory.out.clear()  # and never free again
                case actions.Stop():
                    assert self.stopping, f"the worker stopped: {action.reason}"
                    self.start()

    def handle_out(self, attachment: int, message: Any) -> None:
        """The loop's own answer."""
        self.world.to_broker[self.route].append((attachment, message))

    def finish(self, stage: str, *, fails: bool) -> None:
        """A stage's thread reports."""
        job = self.jobs.pop(stage)
        work = job.work
        reply: Any
        pieces: tuple[m.SegmentUse, ...] = ()
        if fails and not isinstance(work, actions.BuildStage):
            reply = self.world.toy.failed(job)
        else:
            match work:
                case actions.BuildStage():
                    reply = m.StageReady("toy", stage, 100)
                case m.InitializeStage():
                    reply = m.StageInitialized(work.session, stage, work.epoch, work.stage_epoch, m.Artifact(), 100)
                case m.RunTask():
                    reply, pieces = self.made(job, work)
                case m.ReleaseStage():
                    reply = m.StageReleased(work.session, stage, work.epoch, work.stage_epoch)
        self.handle(events.Reported(self.world.now, events.Finished(stage, job, reply, "", pieces)))

    def made(self, job: actions.Job, work: m.RunTask) -> tuple[m.TaskDone, tuple[m.SegmentUse, ...]]:
        """The result of a task, in shared memory where all its readers can take it from there."""
        self.world.read_inputs(work)
        name = MAKES[work.stage]
        tensors: dict[str, TensorRef] = {}
        pieces: tuple[m.SegmentUse, ...] = ()
        if name in work.shared:
            place = self.memory.write((work.session, work.epoch, name, work.index))
            tensors["x"] = TensorRef("uint8", (1 << 16,), place)
            pieces = (m.SegmentUse(place.segment, place.generation),)
        outputs = {name: m.Artifact({"index": work.index, "epoch": work.epoch}, tensors)}
        whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
        return m.TaskDone(*whose, outputs, {}, 0.1, job.applied), pieces


class Film:
    """One session at the client: by explicit controls, or by keys; its chunks lie unread for a while."""

    def __init__(self, key: str, spec: Any, *, by_keys: bool) -> None:
        self.key = key
        self.by_keys = by_keys
        self.keys = Keys(spec)
        self.submitted = self.seen = 0
        self.unread: deque[m.Chunk] = deque()
        self.state = ""


class World:
    """All of them."""

    def __init__(self, spec: Any, toy: Any, seed: int) -> None:
        self.chance = random.Random(seed)
        self.spec, self.toy = spec, toy
        self.now = 0.0
        self.broker = BrokerCore(BrokerConfig(placement_timeout_s=20.0, close_timeout_s=20.0), VERSION)
        self.to_broker: dict[bytes, deque[tuple[int, Any]]] = {CLIENT: deque()}
        self.to_client: deque[Any] = deque()
        self.memories: dict[str, Memory] = {}
        self.connections = self.processes_started = 0
        self.client_maps = self.chance.random() < 0.8
        self.attachment = 0
        self.films: dict[str, Film] = {}
        self.living: dict[str, Film] = {}
        self.refused: list[str] = []
        self.applied: dict[tuple[str, int, int], m.Applied] = {}
        apart: dict[str, tuple[str, ...]] = {"one": ("draw",), "two": ("show",)}
        together: dict[str, tuple[str, ...]] = {"w": ()}
        layout = self.chance.choice([together, apart])
        self.processes = [Process(self, name, stages) for name, stages in layout.items()]
        for process in self.processes:
            process.start()
        self.pass_time()  # until the workers are known: a pipeline that nobody serves is refused
        self.tell(0, m.ClientHello(VERSION, "c"))

    @property
    def is_over(self) -> bool:
        """Whether every session has ended and everything was read."""
        ended = len(self.refused) + sum(bool(film.state) for film in self.living.values())
        return ended == SESSIONS and not any(film.unread for film in self.living.values())

    def next_connection(self) -> int:
        """A number that no connection had."""
        self.connections += 1
        return self.connections

    # --- shared memory -----------------------------------------------------------------------------------------------

    def probe_of(self, owner: str) -> bytes:
        """What a reader finds."""
        return self.memories[owner].offer.probe if owner in self.memories else b""

    def begins(self, job: actions.Job) -> None:
        """A thread has a job: a bound control is among its inputs."""
        work = job.work
        if isinstance(work, m.RunTask) and job.applied is not None:
            assert work.inputs["control"] == job.applied.control
            self.applied[work.session, work.epoch, work.index] = job.applied

    def read_inputs(self, work: m.RunTask) -> None:
        """A stage reads what its task brought."""
        for name, artifact in work.inputs.items():
            self.read(artifact, (work.session, work.epoch, name, work.index))

    def read(self, artifact: m.Artifact, expected: object) -> None:
        """Whoever reads finds what was written for him."""
        for ref in artifact.tensors.values():
            assert isinstance(ref.place, Shared)
            found = self.memories[ref.place.owner].written[ref.place.segment]
            assert found == (ref.place.generation, expected), "it was written again before it was read"

    # --- broker and client -------------------------------------------------------------------------------------------

    def to_serve(self, event: broker_events.Event) -> None:
        """The broker's loop."""
        done = self.broker.handle(event)
        self.broker.check()
        for action in done:
            if not isinstance(action, broker_actions.Send):
                continue
            process = next((each for each in self.processes if each.route == action.route), None)
            if action.route == CLIENT:
                self.to_client.append(action.message)
                if isinstance(action.message, m.Welcome):
                    self.attachment = action.attachment
            elif process is not None:
                process.inbox.append((action.attachment, action.message))
            else:
                self.to_serve(broker_events.Unreachable(self.now, action.route))

    def tell(self, attachment: int, message: Any) -> None:
        """The client says something."""
        self.to_broker[CLIENT].append((attachment, message))

    def client_hears(self, message: Any) -> None:
        """Submit as far as the grant goes, keep each chunk, note the end."""
        match message:
            case m.Welcome() if not self.films:  # later ones say which pipelines there are
                for number in range(SESSIONS):
                    film = self.films[str(number)] = Film(str(number), self.spec, by_keys=number % 2 == 1)
                    binding: m.ControlBinding = "early" if number == 1 else "late"
                    self.tell(self.attachment, m.OpenSession(film.key, "toy", CHUNKS, control_binding=binding))
            case m.SessionOpened():
                self.living[message.session] = self.films[message.key]
            case m.SessionRefused():
                self.refused.append(message.failure.kind)
            case m.SessionChanged():
                self.submit(message.session, message.control_limit)
            case m.Chunk():
                film = self.living[message.session]
                assert message.index == film.seen + len(film.unread), "a chunk out of order"
                film.unread.append(message)
                self.submit(message.session, message.control_limit)
            case m.SessionEnded():
                film = self.living[message.session]
                assert not film.state, "ended twice"
                film.state = message.state
            case m.ControlRefused():
                assert message.code == "ended", message
            case m.ProbeMemory():
                probe = self.probe_of(message.owner) if self.client_maps else b""
                self.tell(self.attachment, m.MemoryProbed(message.owner, probe))
            case _:
                pass

    def submit(self, session: str, limit: int) -> None:
        """The client gives each control that it may, unless it holds keys."""
        film = self.living[session]
        while not film.by_keys and film.submitted < limit:
            self.tell(self.attachment, m.SubmitControl(session, film.submitted, m.Artifact({"keys": []})))
            film.submitted += 1

    def take_chunk(self, session: str) -> None:
        """The application reads a chunk, and then says so."""
        film = self.living[session]
        chunk = film.unread.popleft()
        frames = chunk.outputs["frames"]
        assert frames.values["index"] == chunk.index == film.seen
        epoch = frames.values["epoch"]
        assert isinstance(epoch, int)
        self.read(frames, (session, epoch, "frames", chunk.index))
        bound = self.applied.get((session, epoch, chunk.index))
        assert bound is None or bound == chunk.applied
        assert (chunk.applied.source == "explicit") == (not film.by_keys)
        film.seen += 1
        self.tell(self.attachment, m.Ack(session, film.seen, m.Credit(film.seen + WINDOW, 64 << 20)))

    def press(self, session: str) -> None:
        """The keys change; one of them stays down, so that the session goes on."""
        film = self.living[session]
        before = film.keys.state
        film.keys.set_keys({"w", self.chance.choice("adsw")})
        if self.chance.random() < 0.3:
            film.keys.tap(self.chance.choice("ads"))
        if film.keys.state is not before:
            self.tell(self.attachment, m.SetKeys(session, film.keys.state))

    # --- chance ------------------------------------------------------------------------------------------------------

    def step(self, *, faults: bool) -> None:
        """One thing happens."""
        what: str
        which: Any
        can: list[tuple[str, Any]] = [("broker", route) for route, queue in self.to_broker.items() if queue]
        can += [("worker", process) for process in self.processes if process.inbox]
        can += [("client", None)] * bool(self.to_client)
        can += [("job", (process, stage)) for process in self.processes for stage in process.jobs]
        can += [("take", session) for session, film in self.living.items() if film.unread]
        going = [session for session, film in self.living.items() if film.by_keys and not film.state]
        what, which = self.chance.choice(can) if can and self.chance.random() < 0.95 else ("time", None)
        if going and self.chance.random() < 0.1:
            what, which = "keys", self.chance.choice(going)
        if faults and self.chance.random() < 0.01:
            what, which = self.chance.choice(["restart", "stop", "cut", "outbox", "cancel"]), None
        match what:
            case "broker":
                attachment, message = self.to_broker[which].popleft()
                entropy = self.chance.randbytes(16)
                self.to_serve(broker_events.Received(self.now, which, attachment, message, 100, entropy))
                self.to_serve(broker_events.TurnEnded(self.now, drained=False))
            case "worker":
                which.handle(events.Received(self.now, *which.inbox.popleft()))
            case "client":
                self.client_hears(self.to_client.popleft())
            case "job":
                which[0].finish(which[1], fails=faults and self.chance.random() < 0.02)
            case "take":
                self.take_chunk(which)
            case "keys":
                self.press(which)
            case "time":
                self.pass_time()
            case _:
                self.go_wrong(what, self.chance.choice(self.processes))

    def go_wrong(self, what: str, process: Process) -> None:
        """A process dies or is asked to stop, a connection breaks, somebody changes his mind."""
        match what:
            case "restart":
                process.start()
            case "stop":
                process.stopping = True
                process.handle(events.ShutdownRequested(self.now))
            case "cut":
                self.to_serve(broker_events.Unreachable(self.now, process.route))
            case "outbox":
                process.handle(events.OutboxFull(self.now))
            case "cancel":
                living = sorted(session for session, film in self.living.items() if not film.state)
                if living:
                    mode: m.EndMode = self.chance.choice(["drain", "cancel"])
                    self.tell(self.attachment, m.EndSession(self.chance.choice(living), mode))

    def pass_time(self) -> None:
        """Time goes on when everybody has read what was there for him, as loops do."""
        self.now += 0.3
        if self.attachment:
            self.tell(self.attachment, m.Heartbeat())
        for route in list(self.to_broker):
            while self.to_broker[route]:
                attachment, message = self.to_broker[route].popleft()
                received = broker_events.Received(self.now, route, attachment, message, 100, self.chance.randbytes(16))
                self.to_serve(received)
        self.to_serve(broker_events.TurnEnded(self.now, drained=True))
        for process in self.processes:
            while process.inbox:
                process.handle(events.Received(self.now, *process.inbox.popleft()))
            process.handle(events.Tick(self.now))
