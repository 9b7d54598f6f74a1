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
import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire import tensors, wire
from reelwire.broker.actions import Forget, Send
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.broker.events import Received, TurnEnded
from reelwire.client_core import ClientCore
from reelwire.client_view import SessionView
from reelwire.controls import Keys
from reelwire.errors import ControlError, ReelwireError, SessionError
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

    def __init__(self, direction: wire.Direction[Any]) -> None:
        self.direction = direction
        self.frames: deque[tuple[float, list[bytes]]] = deque()
        self.cut = False

    def put(self, now: float, attachment: int, message: Any) -> None:
        """Send."""
        if self.cut:
            return
        self.frames.append((now, [bytes(frame) for frame in wire.encode(message, attachment)]))

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
            self.say(m.TaskStarted(*base, job.index))
            if (job.session, job.index) in self.breaks and stage == "draw":
                failure = Failure("stage", "it broke")
                self.say(m.StageFailed(*base, "run", job.index, failure))
                return
            made = job.inputs["control" if stage == "draw" else "sheet"]
            keys = made.values["keys"] if stage == "draw" else made.values["drawn"]
            frames = tensors.from_array(np.full((1, 1, 1, 3), job.index, np.uint8))
            values = {"drawn": keys}
            out = {"sheet": Artifact(values)} if stage == "draw" else {"frames": Artifact(values, {"frames": frames})}
            self.say(m.TaskDone(*base, job.index, out, {}, 0.0))


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
                case e.Stop() | e.Changed():
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

    def __init__(self, app: App, key: str, chunks: int) -> None:
        self.app, self.chunks = app, chunks
        self.view: SessionView | None = None
        self.keys = Keys(SPEC)
        self.accepted: dict[int, list[str]] = {}
        self.refused: list[ReelwireError] = []
        self.seen: list[m.Chunk] = []
        self.next_index = 0
        app.films.append(self)
        app.call(lambda now, call: e.Open(now, call, key, "toy", chunks), self.opened)

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
    """Broker, worker, applications, and a schedule."""

    def __init__(self, seed: int, **config: Any) -> None:
        self.rng = random.Random(seed)
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
        self.up[route], self.down[route] = Pipe(wire.TO_BROKER), Pipe(direction)

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


@pytest.mark.parametrize("seed", range(40))
def test_streaming_15_controls_by_index_are_applied_to_their_chunks_under_any_schedule(seed: int) -> None:
    """Whatever is delayed, every accepted control stands in its chunk, none is refused for room, and nothing is left."""
    world = World(seed)
    films = [Film(world.add(), f"k{number}", world.rng.randint(1, 9)) for number in range(3)]
    for _ in range(300):
        moves = world.moves()
        if moves and world.rng.random() < 0.8:
            world.rng.choice(moves)()
        elif world.rng.random() < 0.6:
            act(world.rng.choice(films), world.rng)
        else:
            world.pass_time()
    for film in films:
        finish(world, film)
        assert film.view is not None
        for chunk in film.seen:
            assert chunk.applied.source == "explicit"
            assert chunk.applied.control.values["keys"] == sorted(film.accepted[chunk.index])
        for error in film.refused:
            assert isinstance(error, SessionError)
        if film.view.state == "completed" and film.view.ending != "cancel":  # they may cross
            assert len(film.seen) == film.chunks
    world.settle()
    assert world.broker.sessions == {}
    assert world.worker.held == set()
    assert not any(app.waiting for app in world.apps)


@pytest.mark.parametrize("seed", range(20))
def test_streaming_14_held_keys_drive_a_session_under_any_schedule(seed: int) -> None:
    """Keys go up and down at random: chunks come in order, each with keys that were down, and the session completes."""
    world = World(seed)
    film = Film(world.add(), "k", 12)
    world.until(lambda: film.view is not None)
    assert film.view is not None
    down: list[set[str]] = [set()]
    while len(film.seen) < film.chunks:
        if world.rng.random() < 0.3 and not film.view.ended:
            key = world.rng.choice("adw")
            change = world.rng.choice((Keys.press, Keys.release, Keys.tap))
            film.press(lambda keys, change=change, key=key: change(keys, key))  # type: ignore[misc]
            down += [set(film.keys.state.held), set(film.keys.state.tap_keys)]
        moves = world.moves()
        if moves:
            world.rng.choice(moves)()
        elif world.rng.random() < 0.3:
            world.pass_time()
        film.take()
    finish(world, film)
    assert film.view.state == "completed"
    for chunk in film.seen:
        assert chunk.applied.source in ("tap", "held")
        assert set(keys_of(chunk)) in down
    revisions = [chunk.applied.revision for chunk in film.seen]
    assert revisions == sorted(revisions)


@pytest.mark.parametrize("seed", range(10))
def test_streaming_23_a_stage_that_breaks_fails_its_session_after_the_chunks_before_it(seed: int) -> None:
    """The chunks below the broken one come, the error names it, and the other session completes."""
    world = World(seed)
    app = world.add()
    broken, whole = Film(app, "k1", 8), Film(app, "k2", 8)
    world.until(lambda: broken.view is not None and whole.view is not None)
    assert broken.view is not None and whole.view is not None  # noqa: PT018
    world.worker.breaks.add((broken.view.id, 5))
    for film in (broken, whole):
        finish(world, film)
    assert [chunk.index for chunk in broken.seen] == [0, 1, 2, 3, 4]
    assert (broken.view.state, whole.view.state, len(whole.seen)) == ("failed", "completed", 8)
    failure = broken.view.failure
    assert failure is not None
    assert (failure.stage, failure.index, failure.message) == ("draw", 5, "it broke")
    assert world.worker.held == set()


@pytest.mark.parametrize("mode", ["drain", "cancel"])
@pytest.mark.parametrize("seed", range(10))
def test_streaming_22_an_end_leaves_nothing_behind(seed: int, mode: m.EndMode) -> None:
    """Ended while chunks are under way and nobody reads: a drain still gives all that was accepted, a cancel nothing."""
    world = World(seed)
    film = Film(world.add(), "k", 30)
    world.until(lambda: film.view is not None)
    view = film.view
    assert view is not None
    for _ in range(world.rng.randint(1, 5)):
        film.submit(["a"])
    for _ in range(world.rng.randint(0, 30)):
        moves = world.moves()
        if moves:
            world.rng.choice(moves)()
    film.end(mode)
    world.until(lambda: view.ended)
    while film.take():
        pass
    assert view.state == ("closed" if mode == "drain" else "cancelled")
    assert (len(film.seen) == len(film.accepted)) if mode == "drain" else not film.seen
    world.settle()
    assert world.broker.sessions == {}
    assert world.worker.held == set()


@pytest.mark.parametrize("seed", range(10))
def test_a_cut_connection_fails_the_sessions_and_the_client_comes_back(seed: int) -> None:
    """The old session ends at the broker when its grace is over; a new one is opened over the new connection."""
    world = World(seed, client_grace_s=5.0)
    app = world.add()
    film = Film(app, "k1", 9)
    world.until(lambda: film.view is not None)
    assert film.view is not None
    film.submit(["w"])
    world.cut(app.route)
    view = film.view
    world.until(lambda: view.ended)
    assert view.state == "failed"
    world.until(lambda: app.core.phase == "attached")
    again = Film(app, "k2", 2)
    finish(world, again)
    assert again.view is not None
    assert again.view.state == "completed"
    world.until(lambda: not world.broker.sessions)
    assert world.worker.held == set()


def test_streaming_17_an_unknown_key_is_refused_by_the_broker_too() -> None:
    """A client that doesn't check gets the broker's refusal, with the names that are accepted."""
    world = World(0)
    film = Film(world.add(), "k", 2)
    world.until(lambda: film.view is not None)
    film.submit(["q"])
    world.until(lambda: bool(film.refused))
    error = film.refused[0]
    assert isinstance(error, ControlError)
    assert (error.code, "accepted: a, d, w" in str(error)) == ("unknown_key", True)
