"""The client's core and the broker's core on one fake wire, under random schedules that a seed replays.

Everything but the wire and the worker is the real thing; the worker is a few plain messages. Every message goes
through its bytes, both cores check themselves after every event, and the application knows what must come out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from reelwire import client_events as e
from reelwire import messages as m
from reelwire import tensors, wire
from reelwire.binding import bind
from reelwire.broker.actions import Forget, Send
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.broker.events import Received, TurnEnded
from reelwire.client_core import ClientCore
from reelwire.client_view import SessionView
from reelwire.controls import Keys, KeyState, merged
from reelwire.errors import ReelwireError
from reelwire.messages import Artifact, Failure
from reelwire.spec import Edge, Prefetch, StageSpec, StreamSpec

VERSION = "0.1.0"
LIMITS = wire.Limits()
SPEC = StreamSpec(
    "toy", (StageSpec("draw", ("tick", "control"), ("sheet",)), StageSpec("show", ("sheet",), ("frames",))),
    (Edge("tick"), Edge("control"), Edge("sheet"), Edge("frames")), ("tick", "control"), ("frames",),
    ("show", "draw"), "control", chunks_max=50, frames_first=5, frames_next=4, fps=16.0, latency_anchor="control",
    prefetch=Prefetch("tick", 2, "control", "draw"), control_names=("a", "d", "w"),
)  # fmt: skip
STEP_S, DELAY_MAX_S = 0.05, 0.4


class Pipe:
    """One direction of one connection: messages in order, each as its bytes."""

    def __init__(self, direction: wire.Direction[Any], arrives: Callable[[Any], Any]) -> None:
        self.direction, self.arrives = direction, arrives
        self.frames: deque[tuple[float, list[bytes]]] = deque()
        self.cut = False

    def put(self, now: float, attachment: int, message: Any) -> None:
        """Send."""
        arriving = None if self.cut else self.arrives(message)
        if arriving is not None:
            self.frames.append((now, [bytes(frame) for frame in wire.encode(arriving, attachment)]))

    def take(self) -> tuple[int, Any, int]:
        """Receive the oldest: attachment, message, bytes."""
        frames = self.frames.popleft()[1]
        envelope = wire.decode(frames, self.direction, LIMITS)
        return envelope.attachment, envelope.messages[0], envelope.sizes[0]


class Worker:
    """Does what it is told, one stage task after the other, when the schedule lets it."""

    def __init__(self, world: World) -> None:
        self.world, self.attachment, self.said_at = world, 0, 0.0
        self.held: set[tuple[str, str]] = set()
        self.jobs: dict[str, deque[Any]] = {"draw": deque(), "show": deque()}
        self.keys: dict[str, KeyState] = {}
        self.breaks: set[tuple[str, int]] = set()
        offers = tuple(m.StageOffer("toy", stage.name, 8, 1 << 30) for stage in SPEC.stages)
        self.say(m.WorkerHello(VERSION, "w", "cpu", (SPEC,), offers))

    def say(self, message: Any) -> None:
        """Send to the broker."""
        self.said_at = self.world.now
        self.world.up[b"worker"].put(self.world.now, self.attachment, message)

    def hear(self, attachment: int, message: Any) -> None:
        """Take a message of the broker in."""
        if isinstance(message, m.Welcome):
            self.attachment = attachment
            for stage in self.jobs:
                self.say(m.StageReady("toy", stage, 1))
        elif isinstance(message, m.SetStageKeys):
            self.keys[message.session] = merged(self.keys.get(message.session, KeyState()), message.keys)
        elif not isinstance(message, m.Heartbeat):
            assert not isinstance(message, m.Rejected), message
            self.jobs[message.stage].append(message)

    def work(self, stage: str) -> None:
        """Do the oldest job of a stage."""
        job = self.jobs[stage].popleft()
        base = (job.session, stage, job.epoch, job.stage_epoch)
        if isinstance(job, m.InitializeStage):
            self.held.add((job.session, stage))
            self.say(m.StageInitialized(*base, Artifact(), 1))
        elif isinstance(job, m.ReleaseStage):
            self.held.discard((job.session, stage))
            self.jobs[stage] = deque(waiting for waiting in self.jobs[stage] if waiting.session != job.session)
            self.say(m.StageReleased(*base))
        else:
            assert (job.session, stage) in self.held
            inputs, applied = dict(job.inputs), None
            if job.reservation is not None:
                applied = bind(job.reservation, self.keys.get(job.session, KeyState()))
                inputs[job.reservation.artifact] = applied.control
            self.say(m.TaskStarted(*base, job.index, applied))
            if (job.session, job.index) in self.breaks and stage == "draw":
                failure = Failure("stage", "it broke")
                self.say(m.StageFailed(*base, "run", job.index, failure))
                return
            made = inputs["control" if stage == "draw" else "sheet"]
            keys = made.values["keys"] if stage == "draw" else made.values["drawn"]
            frames = tensors.from_array(np.full((1, 1, 1, 3), job.index, np.uint8))
            values = {"drawn": keys}
            out = {"sheet": Artifact(values)} if stage == "draw" else {"frames": Artifact(values, {"frames": frames})}
            self.say(m.TaskDone(*base, job.index, out, {}, 0.0, applied))


class App:
    """An application on a client core."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.connections = world, number, 0
        self.core = ClientCore(VERSION, f"app-{number}")
        self.route = b""
        self.calls = 0
        self.waiting: dict[int, Callable[[e.Done], None]] = {}
        self.delivery: e.Delivery | None = None
        self.films: list[Film] = []
        self.connect()

    def connect(self) -> None:
        """Make a new connection."""
        self.connections += 1
        self.route = f"app-{self.number}-{self.connections}".encode()
        self.world.open_route(self.route, wire.TO_CLIENT)
        self.feed(e.Connect(self.world.now))

    def feed(self, event: e.Event) -> None:
        """Hand an event in and do what the core says."""
        for action in self.core.handle(event):
            match action:
                case e.Send(attachment=attachment, message=message):
                    self.world.up[self.route].put(self.world.now, attachment, message)
                case e.Done(call=call):
                    self.waiting.pop(call)(action)
                case e.Delivery():
                    self.delivery = action
                case e.Reconnect():
                    self.world.close_route(self.route)
                    self.world.later.append(self.connect)
                case e.AnswerProbe() | e.Stop() | e.Changed() | e.Part():
                    pass
        self.core.check()

    def call(self, event: Callable[[float, int], e.Event], done: Callable[[e.Done], None]) -> int:
        """A call; `done` is called with its answer."""
        self.calls += 1
        self.waiting[self.calls] = done
        self.feed(event(self.world.now, self.calls))
        return self.calls

    def take(self, session: str) -> e.Delivery | None:
        """Ask for the next chunk."""
        self.delivery = None
        self.feed(e.Take(self.world.now, session))
        return self.delivery


class Film:
    """One session as its application sees it, with what it expects."""

    def __init__(self, app: App, key: str, chunks: int, **asked: Any) -> None:
        self.app, self.chunks = app, chunks
        self.view: SessionView | None = None
        self.keys = Keys(SPEC)
        self.accepted: dict[int, list[str]] = {}
        self.refused: list[ReelwireError] = []
        self.seen: list[m.Chunk] = []
        self.next_index = 0
        app.films.append(self)
        app.call(lambda now, call: e.Open(now, call, key, "toy", chunks, **asked), self.opened)

    def opened(self, done: e.Done) -> None:
        """The answer to opening."""
        assert isinstance(done.value, str), done
        self.view = self.app.core.sessions[done.value]

    def submit(self, keys: list[str]) -> None:
        """Give the next control by index."""
        assert self.view is not None
        index, session = self.next_index, self.view.id
        self.next_index += 1

        def answered(done: e.Done) -> None:
            if done.error is None:
                self.accepted[index] = keys
            else:
                self.refused.append(done.error)

        control = Artifact({"keys": list(keys), "reset_pose": False})
        self.app.call(lambda now, call: e.Submit(now, call, session, index, control), answered)

    def press(self, change: Callable[[Keys], object]) -> None:
        """Change the keys."""
        assert self.view is not None
        change(self.keys)
        self.app.feed(e.ChangeKeys(self.app.world.now, self.view.id, self.keys.state))

    def take(self) -> bool:
        """Take the next chunk, if it is there, and check it."""
        assert self.view is not None
        delivery = self.app.take(self.view.id)
        if delivery is None:
            return False
        chunk = delivery.chunk
        assert chunk.index == len(self.seen), "chunks come in order, each once"
        frames = chunk.outputs["frames"]
        assert tensors.to_array(frames.tensors["frames"]).flat[0] == chunk.index
        assert frames.values["drawn"] == chunk.applied.control.values["keys"], "a chunk says what it was made with"
        self.seen.append(chunk)
        return True

    def end(self, mode: m.EndMode) -> None:
        """Ask for the end."""
        assert self.view is not None
        session = self.view.id
        self.app.call(lambda now, call: e.End(now, call, session, mode), lambda _done: None)


class World:
    """Broker, worker, applications, a schedule, and what arrives of a message; None: it is lost."""

    def __init__(self, seed: int, arrives: Callable[[Any], Any] = lambda message: message, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.arrives = arrives
        self.now = 1000.0
        self.broker = BrokerCore(BrokerConfig(**config), VERSION)
        self.up: dict[bytes, Pipe] = {}
        self.down: dict[bytes, Pipe] = {}
        self.later: list[Callable[[], None]] = []
        self.apps: list[App] = []
        self.open_route(b"worker", wire.TO_WORKER)
        self.worker = Worker(self)
        self.settle()

    def open_route(self, route: bytes, direction: wire.Direction[Any]) -> None:
        """A connection begins."""
        self.up[route], self.down[route] = Pipe(wire.TO_BROKER, self.arrives), Pipe(direction, self.arrives)

    def close_route(self, route: bytes) -> None:
        """A connection is gone."""
        del self.up[route], self.down[route]

    def cut(self, route: bytes) -> None:
        """Swallow what is sent either way, from now on."""
        for pipe in (self.up[route], self.down[route]):
            pipe.cut = True
            pipe.frames.clear()

    def to_broker(self, event: Any) -> None:
        """Hand an event to the broker."""
        for action in self.broker.handle(event):
            if isinstance(action, Send) and action.route in self.down:
                self.down[action.route].put(self.now, action.attachment, action.message)
            elif isinstance(action, Forget) and action.route in self.down:
                self.down[action.route].frames.clear()
        self.broker.check()

    def deliver_up(self, route: bytes) -> None:
        """One message reaches the broker."""
        attachment, message, nbytes = self.up[route].take()
        self.to_broker(Received(self.now, route, attachment, message, nbytes, self.rng.randbytes(16)))
        if self.rng.random() < 0.7:
            self.to_broker(TurnEnded(self.now, drained=False))

    def deliver_down(self, route: bytes) -> None:
        """One message reaches its peer."""
        attachment, message, _ = self.down[route].take()
        if route == b"worker":
            self.worker.hear(attachment, message)
            return
        app = next(app for app in self.apps if app.route == route)
        app.feed(e.Received(self.now, attachment, message))

    def moves(self, waited_s: float = 0.0) -> list[Callable[[], None]]:
        """What can happen next; with a time, only what waits for so long already."""
        found: list[Callable[[], None]] = []
        for pipes, deliver in ((self.up, self.deliver_up), (self.down, self.deliver_down)):
            for route, pipe in pipes.items():
                if pipe.frames and pipe.frames[0][0] <= self.now - waited_s:
                    found.append(lambda deliver=deliver, route=route: deliver(route))  # type: ignore[misc]
        found += [lambda stage=stage: self.worker.work(stage) for stage, jobs in self.worker.jobs.items() if jobs]  # type: ignore[misc]
        return found

    def pass_time(self) -> None:
        """Let a step of time go by; nothing on the wire is older than DELAY_MAX_S then."""
        while moves := self.moves(DELAY_MAX_S):
            self.rng.choice(moves)()
        self.now += STEP_S
        if self.now - self.worker.said_at > 0.5:
            self.worker.say(m.Heartbeat())
        for app in self.apps:
            app.feed(e.Tick(self.now))
        self.to_broker(TurnEnded(self.now, drained=True))
        while self.later:
            self.later.pop()()

    def settle(self) -> None:
        """Deliver everything."""
        for _ in range(5):
            while moves := self.moves():
                self.rng.choice(moves)()
            self.to_broker(TurnEnded(self.now, drained=True))

    def add(self) -> App:
        """An application that is attached."""
        app = App(self, len(self.apps))
        self.apps.append(app)
        self.until(lambda: app.core.phase == "attached")
        return app

    def until(self, true: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Let everything go on until something is true."""
        until = self.now + limit_s
        while not true():
            assert self.now < until, "it didn't happen"
            self.settle()
            self.pass_time()


def keys_of(chunk: m.Chunk) -> list[str]:
    """The keys that a chunk was made with."""
    keys = chunk.applied.control.values["keys"]
    assert isinstance(keys, list)
    return [str(key) for key in keys]


def act(film: Film, rng: random.Random) -> None:
    """One random thing that an application does."""
    view = film.view
    if view is None:
        return
    kind = rng.randrange(10)
    if kind < 3 and film.next_index < film.chunks and not view.ended:
        film.submit(rng.sample(["a", "d", "w"], rng.randint(0, 3)))
    elif kind < 9:
        film.take()
    elif rng.random() < 0.02:
        film.end(rng.choice(("drain", "cancel")))


def finish(world: World, film: Film) -> None:
    """Read to the end, however the session ends."""
    world.until(lambda: film.view is not None)
    view = film.view
    assert view is not None

    def over() -> bool:
        while film.take():
            pass
        if film.next_index < film.chunks and view.ending is None and not view.ended:
            film.submit(["w"])
        return view.ended

    world.until(over)
    while film.take():
        pass
