"""A worker's core and a broker's core, joined by a wire that delivers when chance says so; one thread, no clock."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker import actions as broker_actions
from reelwire.broker import events as broker_events
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.workers import actions, events
from reelwire.workers.config import WorkerConfig
from reelwire.workers.core import WorkerCore

VERSION = "1.2.3"
CLIENT = b"client"
SESSIONS, CHUNKS = 6, 5


class World:
    """One broker, one worker process that may be started again, and one client that wants everything."""

    def __init__(self, spec: Any, toy: Any, seed: int) -> None:
        self.chance = random.Random(seed)
        self.spec, self.toy = spec, toy
        self.now = 0.0
        self.broker = BrokerCore(BrokerConfig(placement_timeout_s=20.0, close_timeout_s=20.0), VERSION)
        self.to_broker: dict[bytes, deque[tuple[int, Any]]] = {CLIENT: deque()}
        self.to_worker: deque[tuple[int, Any]] = deque()
        self.to_client: deque[Any] = deque()
        self.connections = 0
        self.attachment = 0
        self.opened = False
        self.submitted: dict[str, int] = {}
        self.chunks: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.start_worker()
        self.pass_time()  # until the worker is known: a pipeline that nobody serves is refused
        self.tell(0, m.ClientHello(VERSION, "c"))

    # --- the three of them -------------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        """A new process under the old name."""
        self.worker = WorkerCore(WorkerConfig(name="w", slots=2, connect_timeout_s=1e6), self.spec, VERSION)
        self.jobs: dict[str, actions.Job] = {}
        self.stopping = False
        self.to_work(events.Started(self.now))

    def to_work(self, event: events.Event) -> None:
        """The worker's loop."""
        done = self.worker.handle(event)
        self.worker.check()
        for action in done:
            match action:
                case actions.Connect():
                    self.connections += 1
                    self.route = b"worker-%d" % self.connections
                    self.to_broker[self.route] = deque()
                    self.to_worker.clear()
                case actions.Send():
                    self.to_broker[self.route].append((action.attachment, action.message))
                case actions.Run():
                    assert action.stage not in self.jobs
                    self.jobs[action.stage] = action.job
                case actions.Stop():
                    assert self.stopping, f"the worker stopped: {action.reason}"
                    self.start_worker()

    def to_serve(self, event: broker_events.Event) -> None:
        """The broker's loop."""
        done = self.broker.handle(event)
        self.broker.check()
        for action in done:
            if not isinstance(action, broker_actions.Send):
                continue
            if action.route == CLIENT:
                self.to_client.append(action.message)
                if isinstance(action.message, m.Welcome):
                    self.attachment = action.attachment
            elif action.route == self.route:
                self.to_worker.append((action.attachment, action.message))
            else:
                self.to_serve(broker_events.Unreachable(self.now, action.route))

    def tell(self, attachment: int, message: Any) -> None:
        """The client says something."""
        self.to_broker[CLIENT].append((attachment, message))

    def client_hears(self, message: Any) -> None:
        """Submit as far as the grant goes, take each chunk, note the end."""
        match message:
            case m.Welcome() if not self.opened:  # later ones say which pipelines there are
                self.opened = True
                for number in range(SESSIONS):
                    self.tell(self.attachment, m.OpenSession(str(number), "toy", CHUNKS))
            case m.SessionOpened():
                self.submitted[message.session] = self.chunks[message.session] = 0
            case m.SessionRefused():
                self.submitted[message.key] = 0
                self.ended[message.key] = message.failure.kind
            case m.SessionChanged():
                while self.submitted[message.session] < message.control_limit:
                    index = self.submitted[message.session]
                    self.submitted[message.session] += 1
                    self.tell(self.attachment, m.SubmitControl(message.session, index, m.Artifact({"keys": []})))
            case m.Chunk():
                assert message.index == self.chunks[message.session], "a chunk out of order"
                assert message.outputs["frames"].values["index"] == message.index
                self.chunks[message.session] += 1
                self.tell(self.attachment, m.Ack(message.session, message.index + 1))
            case m.SessionEnded():
                assert message.session not in self.ended, "ended twice"
                self.ended[message.session] = message.state
            case m.ControlRefused():
                assert message.code == "ended", message
            case _:
                pass

    def finish(self, stage: str, *, fails: bool) -> None:
        """A stage's thread reports."""
        job = self.jobs.pop(stage)
        work = job.work
        reply: Any
        if fails and not isinstance(work, actions.BuildStage):
            reply = self.toy.failed(job)
        else:
            match work:
                case actions.BuildStage():
                    reply = m.StageReady("toy", stage, 100)
                case m.InitializeStage():
                    reply = m.StageInitialized(work.session, stage, work.epoch, work.stage_epoch, m.Artifact(), 100)
                case m.RunTask():
                    made = {"draw": "picture", "show": "frames"}[stage]
                    outputs = {made: m.Artifact({"index": work.index})}
                    reply = m.TaskDone(work.session, stage, work.epoch, work.stage_epoch, work.index, outputs, {}, 0.1)
                case m.ReleaseStage():
                    reply = m.StageReleased(work.session, stage, work.epoch, work.stage_epoch)
        self.to_work(events.Reported(self.now, events.Finished(stage, job, reply)))

    # --- chance ------------------------------------------------------------------------------------------------------

    def step(self, *, faults: bool) -> None:
        """One thing happens."""
        what: str
        which: Any
        can: list[tuple[str, Any]] = [("broker", route) for route, queue in self.to_broker.items() if queue]
        can += [("worker", None)] * bool(self.to_worker) + [("client", None)] * bool(self.to_client)
        can += [("job", stage) for stage in self.jobs]
        what, which = self.chance.choice(can) if can and self.chance.random() < 0.95 else ("time", None)
        if faults and self.chance.random() < 0.01:
            what = self.chance.choice(["restart", "stop", "cut", "outbox", "cancel"])
        match what:
            case "broker":
                attachment, message = self.to_broker[which].popleft()
                entropy = self.chance.randbytes(16)
                self.to_serve(broker_events.Received(self.now, which, attachment, message, 100, entropy))
                self.to_serve(broker_events.TurnEnded(self.now, drained=False))
            case "worker":
                self.to_work(events.Received(self.now, *self.to_worker.popleft()))
            case "client":
                self.client_hears(self.to_client.popleft())
            case "job":
                self.finish(which, fails=faults and self.chance.random() < 0.02)
            case "time":
                self.pass_time()
            case "restart":
                self.start_worker()
            case "stop":
                self.stopping = True
                self.to_work(events.ShutdownRequested(self.now))
            case "cut":
                self.to_serve(broker_events.Unreachable(self.now, self.route))
            case "outbox":
                self.to_work(events.OutboxFull(self.now))
            case "cancel":
                living = sorted(set(self.submitted) - set(self.ended))
                if living:
                    modes: list[m.EndMode] = ["drain", "cancel"]
                    self.tell(self.attachment, m.EndSession(self.chance.choice(living), self.chance.choice(modes)))

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
        while self.to_worker:
            self.to_work(events.Received(self.now, *self.to_worker.popleft()))
        self.to_work(events.Tick(self.now))


@pytest.mark.parametrize("seed", range(40))
def test_streaming_22_every_session_ends_and_nothing_is_left(toy: Any, seed: int) -> None:
    """With workers that restart or drain, connections that break and stages that raise: each session ends once, in order."""
    world = World(toy.spec, toy, seed)
    for _ in range(600):
        world.step(faults=True)
    for _ in range(20_000):
        if len(world.ended) == SESSIONS:
            break
        world.step(faults=False)
    assert len(world.ended) == SESSIONS, world.broker.status()
    for _ in range(200):
        world.step(faults=False)
    assert world.worker.status()["sessions"] == {"draw": [], "show": []}
    assert not world.broker.sessions
    for session, state in world.ended.items():
        assert state != "completed" or world.chunks[session] == CHUNKS


def test_streaming_23_without_faults_every_session_is_completed(toy: Any) -> None:
    """Whatever the order in which things happen, no message is out of protocol."""
    for seed in range(10):
        world = World(toy.spec, toy, seed)
        while len(world.ended) < SESSIONS:
            world.step(faults=False)
        assert set(world.ended.values()) == {"completed"}
        assert world.worker.status()["dropped"] == {}
