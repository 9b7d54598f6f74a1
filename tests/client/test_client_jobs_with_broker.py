"""The client's core and the broker's core about jobs, joined by a wire that a seed schedules, with brokers that are killed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire import wire
from reelwire.client_core import ClientCore
from reelwire.errors import JobError, OverloadError
from reelwire.job_parts import FILE_PART_BYTES

from ..broker.fake_jobs import Shop
from ..broker.fake_peers import VERSION
from ..broker.fake_store import sha256

LIMITS = wire.Limits()
CLIPS = [b"video" + bytes([number]) * (number * FILE_PART_BYTES + number) for number in range(4)]
FILES = {sha256(clip): clip for clip in CLIPS}
STEP_S = 0.1


def result_of(job: str) -> bytes:
    """What a job makes."""
    nbytes = 1 + sum(job.encode()) * 9973 % (6 * FILE_PART_BYTES)
    return (job.encode() * (nbytes // len(job) + 1))[:nbytes]


class App:
    """A client core on one route after the other; what is on the wire either way waits until it is delivered."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.connections = world, number, 0
        self.core = ClientCore(VERSION, f"app-{number}")
        self.route, self.attachment = b"", 0
        self.up: deque[tuple[int, list[bytes]]] = deque()
        self.down: deque[tuple[int, list[bytes]]] = deque()
        self.calls = 0
        self.done: dict[int, e.Done] = {}
        self.part: bytes | memoryview | None = None
        self.fetched: dict[int, bytearray] = {}
        self.sent: dict[int, m.SubmitJob] = {}
        self.connect()

    def connect(self) -> None:
        """Make a new connection."""
        self.world.shop.peers.pop(self.route, None)
        self.connections += 1
        self.route = f"app-{self.number}-{self.connections}".encode()
        self.up.clear()
        self.down.clear()
        self.world.shop.peers[self.route] = self
        self.feed(e.Connect(self.world.shop.now))

    def cut(self) -> None:
        """The socket finds another broker at the other end, or the same once more; what was on its way may be lost."""
        self.world.shop.peers.pop(self.route, None)
        self.route += b"'"
        self.world.shop.peers[self.route] = self
        for line in (self.up, self.down):
            for _ in range(self.world.rng.randint(0, len(line))):
                line.popleft() if line is self.up else line.pop()

    def hear(self, attachment: int, message: Any) -> None:
        """The broker sends something."""
        self.down.append((attachment, [bytes(frame) for frame in wire.encode(message, attachment)]))

    def deliver_up(self) -> None:
        """The broker hears what was said first."""
        _, frames = self.up.popleft()
        envelope = wire.decode(frames, wire.TO_BROKER, LIMITS)
        self.attachment = envelope.attachment
        self.world.shop.say(self, envelope.messages[0])

    def deliver_down(self) -> None:
        """The core hears what was said first."""
        _, frames = self.down.popleft()
        envelope = wire.decode(frames, wire.TO_CLIENT, LIMITS)
        self.feed(e.Received(self.world.shop.now, envelope.attachment, envelope.messages[0]))

    def feed(self, event: e.Event) -> None:
        """Hand an event in, and do what the core says."""
        for action in self.core.handle(event):
            match action:
                case e.Send(attachment=attachment, message=message):
                    self.up.append((attachment, [bytes(frame) for frame in wire.encode(message, attachment)]))
                case e.Done(call=call):
                    assert call not in self.done
                    self.done[call] = action
                case e.Part(data=data):
                    self.part = data
                case e.Reconnect():
                    self.world.later.append(self.connect)
                case e.AnswerProbe() | e.Stop() | e.Changed() | e.Delivery():
                    pass
        self.core.check()

    def call(self, event: Callable[[float, int], e.Event]) -> int:
        """A call; its number."""
        self.calls += 1
        self.feed(event(self.world.shop.now, self.calls))
        return self.calls

    def submit(self, key: str, clip: bytes | None) -> int:
        """Submit a job of a clip, or of none."""
        files: tuple[e.UploadFile, ...] = ()
        if clip is None:
            request = m.SubmitJob(key, "t2v", {"prompt": key})
        else:
            request = m.SubmitJob(key, "v2v", {"prompt": key}, {"video": (m.Media(sha256=sha256(clip)),)})
            files += (e.UploadFile("video", len(clip), sha256(clip)),)
        call = self.call(lambda now, number: e.SubmitJob(now, number, request, files))
        self.sent[call] = request
        return call

    def supply(self) -> bool:
        """Supply a part that is wanted; whether there was one."""
        for call, sub in self.core.jobs.submissions.items():
            wanted = self.core.jobs.wanted(call)
            if wanted is not None:
                place, index = wanted
                data = FILES[sub.files[place].sha256][index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]
                self.feed(e.SupplyPart(self.world.shop.now, call, place, index, data))
                return True
        return False

    def info(self, call: int) -> m.JobInfo:
        """What a call was answered with."""
        info = self.done[call].value
        assert isinstance(info, m.JobInfo), self.done[call].error
        return info

    def watch(self, job: str) -> int:
        """Wait for a job's end."""
        return self.call(lambda now, number: e.WatchJob(now, number, job))

    def fetch(self, job: m.JobInfo) -> int:
        """Fetch a result."""
        call = self.call(lambda now, number: e.FetchResult(now, number, job.job, job.result_bytes))
        self.fetched[call] = bytearray()
        return call

    def take(self) -> bool:
        """Take a part of a result; whether there was one."""
        for call in list(self.core.jobs.fetches):
            self.part = None
            self.feed(e.TakePart(self.world.shop.now, call))
            if self.part is not None:
                self.fetched[call] += self.part
                return True
        return False


class World:
    """Brokers, one after the other, one worker at a time, applications, and a schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_lazy = seed % 2 == 1
        self.later: list[Callable[[], None]] = []
        self.finished: set[tuple[str, int]] = set()
        self.result_of = result_of
        self.shop = Shop(None, job_attempts=1000, uploads_per_client_max=8, heartbeat_s=1.0)
        self.begin(self.shop)
        self.apps = [App(self, number) for number in range(2)]

    def begin(self, shop: Any) -> None:
        """A broker is there, and a worker that has forgotten everything finds it."""
        self.shop = shop
        shop.checks = False  # `settle` checks: all of it after each event takes too long
        self.worker = shop.worker()
        shop.commits = shop.works = shop.turns = not self.is_lazy

    def restart(self) -> None:
        """The broker is killed; the sockets find the next one."""
        self.begin(self.shop.restart(self.rng.randint(0, 2)))
        for app in self.apps:
            app.cut()

    def work(self) -> bool:
        """The worker goes on with what it was told first."""
        for run in self.worker.runs:
            if (run.job, run.attempt) not in self.finished:
                self.finished.add((run.job, run.attempt))
                self.worker.progress(run, 1)
                self.worker.finish(run, self.result_of(run.job))
                return True
        return False

    def moves(self) -> list[Callable[[], Any]]:
        """What can happen next without anybody wishing it."""
        found: list[Callable[[], Any]] = [*self.later]
        self.later.clear()
        for app in self.apps:
            found += [app.deliver_up] * bool(app.up) + [app.deliver_down] * bool(app.down) + [app.supply, app.take]
        shop = self.shop
        return (
            [*found, self.work, shop.turn]
            + [shop.commit] * bool(shop.disk.unwritten)
            + [shop.work] * bool(shop.disk.errands)
        )

    def step(self) -> None:
        """Let one thing happen."""
        now, self.later = self.later, []
        for connect in now:
            connect()
        self.rng.choice(self.moves())()

    def tick(self) -> None:
        """A step of time."""
        self.shop.now += STEP_S
        for app in self.apps:
            app.feed(e.Tick(self.shop.now))
        if self.worker.attachment:
            self.worker.say(m.Heartbeat())
        self.shop.turn()

    def until(self, true: Callable[[], bool]) -> None:
        """Let everything go on, fairly, until something is true."""
        for _ in range(3000):
            if true():
                return
            for _ in range(30):
                self.step()
            for app in self.apps:
                while app.down:
                    app.deliver_down()
            self.tick()
        raise AssertionError("it didn't happen")

    def settle(self) -> None:
        """Deliver everything, and check."""
        for _ in range(20):
            for app in self.apps:
                while app.up:
                    app.deliver_up()
                while app.down:
                    app.deliver_down()
            for connect in self.later:
                connect()
            self.later.clear()
            while self.shop.disk.errands:
                self.shop.work()
            self.shop.commit()
            self.shop.turn()
        self.shop.core.check()


@pytest.mark.seeds(12)
def test_groups_07_jobs_come_to_their_ends_under_any_schedule(seed: int) -> None:
    """Lost connections, killed brokers, calls that are given up: one job per key, its end is told, its result is whole."""
    world = World(seed)
    rng = world.rng
    submitted: list[tuple[App, int]] = []
    given_up: set[tuple[App, int]] = set()
    for _ in range(400):
        chance = rng.random()
        app = rng.choice(world.apps)
        if chance < 0.03:
            key = f"k{rng.randint(0, 5)}"  # the same clip whenever it is the same key
            submitted.append((app, app.submit(key, (None, *CLIPS)[int(key[1:]) % 5])))
        elif chance < 0.035:
            app.feed(e.Received(world.shop.now, 0, m.Rejected("unknown_peer", "who?")))
        elif chance < 0.04:
            world.restart()
        elif chance < 0.05 and submitted:
            where, call = rng.choice(submitted)
            if call not in where.done:
                where.feed(e.Withdraw(world.shop.now, call))
                given_up.add((where, call))
        elif chance < 0.1:
            world.tick()
        else:
            world.step()
    world.until(lambda: all(call in app.done or (app, call) in given_up for app, call in submitted))
    jobs: dict[str, str] = {}
    for app, call in submitted:
        if (app, call) in given_up:
            continue
        info = app.info(call)
        assert jobs.setdefault(app.sent[call].key, info.job) == info.job, "one key, one job"
    ends: dict[str, tuple[App, int]] = {}
    for job in jobs.values():
        app = rng.choice(world.apps)
        ends[job] = (app, app.watch(job))
    for _ in range(100):
        world.step() if rng.random() > 0.02 else world.restart()
    world.until(lambda: all(call in app.done for app, call in ends.values()))
    fetches = []
    for job, (app, call) in ends.items():
        info = app.info(call)
        assert info.state == "succeeded", info
        fetches.append((job, app, app.fetch(info)))
        if rng.random() < 0.3:  # and another one, which is given up somewhere
            given_up.add((app, app.fetch(info)))
    for _ in range(100):
        world.step() if rng.random() > 0.02 else world.restart()
    for app, call in given_up:
        if call not in app.done:
            app.feed(e.Withdraw(world.shop.now, call))
    world.until(lambda: all(call in app.done for _, app, call in fetches))
    for job, app, call in fetches:
        assert app.done[call].error is None
        assert bytes(app.fetched[call]) == result_of(job)
    world.settle()
    for app in world.apps:
        underway = app.core.jobs
        assert (underway.submissions, underway.watches, underway.fetches) == ({}, {}, {})
    assert not world.shop.jobs._at.outgoing._lines, "nothing is sent that nobody waits for"


def test_a_job_that_was_deleted_is_an_error_for_whoever_watches_it() -> None:
    """The broker's own answer to the question after one that it doesn't know."""
    world = World(0)
    app = world.apps[0]
    world.until(lambda: app.core.phase == "attached")
    call = app.watch("nobody's")
    fetch = app.call(lambda now, number: e.FetchResult(now, number, "nobody's", 5))
    cancel = app.call(lambda now, number: e.AskJob(now, number, "nobody's", "cancel"))
    world.until(lambda: len(app.done) == 3)
    for number in (call, fetch, cancel):
        assert type(app.done[number].error) is JobError


def test_groups_10_a_watch_that_the_broker_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever waits: the job goes on, and can be waited for later."""
    world = World(0)
    app = world.apps[0]
    world.until(lambda: app.core.phase == "attached")
    submitted = app.submit("k", None)
    world.until(lambda: submitted in app.done)
    with monkeypatch.context() as patch:
        patch.setattr("reelwire.broker.job_news.WATCHES_PER_CLIENT_MAX", 0)
        refused = app.watch(app.info(submitted).job)
        world.until(lambda: refused in app.done)
    assert type(app.done[refused].error) is OverloadError
    watch = app.watch(app.info(submitted).job)
    world.until(lambda: watch in app.done)
    assert app.info(watch).state == "succeeded"


def test_results_that_are_given_up_take_no_room_at_the_broker() -> None:
    """However many: the next one can still be fetched."""
    world = World(0)
    world.result_of = lambda job: job.encode() * FILE_PART_BYTES
    app = world.apps[0]
    world.until(lambda: app.core.phase == "attached")
    submitted = app.submit("k", None)
    world.until(lambda: submitted in app.done)
    watch = app.watch(app.info(submitted).job)
    world.until(lambda: watch in app.done)
    info = app.info(watch)
    assert info.result_bytes > 8 * FILE_PART_BYTES
    jobs = world.shop.jobs
    for _ in range(6):
        call = app.fetch(info)
        while not jobs._at.outgoing._lines and app.up:
            app.deliver_up()
        app.feed(e.Withdraw(world.shop.now, call))
        world.settle()
        assert not jobs._at.outgoing._lines
    last = app.fetch(info)
    world.until(lambda: last in app.done)
    assert bytes(app.fetched[last]) == world.result_of(info.job)
