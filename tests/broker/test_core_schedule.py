"""Schedules in simulated time: stages that take as long as they are said to, and messages that take a moment.

What comes out is exact and the same on every machine: periods and latencies beside what can't be beaten.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.binding import bind
from reelwire.broker.actions import Send
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.broker.events import Received, TurnEnded
from reelwire.commands.bench_best import Best, Times
from reelwire.controls import Keys, KeyState
from reelwire.messages import Artifact

STAGES = {"encode": 0.030, "denoise": 0.120, "decode": 0.025}
HOP_S = 0.0002
"""A message takes so long; a chunk's way has eight of them that nothing else hides, when its stages wait for each other."""
WARM = 5


class Simulation:
    """A client, a broker and a worker whose stages take their time. All that happens, happens at a time in the heap."""

    def __init__(self, kit: Any, *, binding: str, refill: str, steered: str, chunks: int) -> None:
        spec = kit.world(chunks_max=1000)
        self.spec = replace(spec, prefetch=replace(spec.prefetch, refill=refill))
        self.steered = steered
        self.chunks = chunks
        self.core = BrokerCore(BrokerConfig(heartbeat_s=1e5), kit.VERSION)
        self.now = 0.0
        self.out: list[tuple[float, m.Chunk]] = []
        self.shown: list[float] = []
        self._chance = random.Random(7)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._attachments: dict[bytes, int] = {}
        self._jobs: dict[str, deque[m.RunTask]] = {stage: deque() for stage in STAGES}
        self._registers: dict[str, KeyState] = {}
        self._keys = Keys(self.spec)
        self._changes: deque[tuple[int, float]] = deque()
        offers = tuple(m.StageOffer("world", stage, 1, 1000) for stage in STAGES)
        self._say(b"worker", m.WorkerHello(kit.VERSION, "worker", "cpu", (self.spec,), offers))
        self._say(b"client", m.ClientHello(kit.VERSION))
        self._run()
        for stage in STAGES:
            self._say(b"worker", m.StageReady("world", stage, 1))
        self._say(b"client", m.OpenSession("k", "world", chunks, control_binding=binding))  # type: ignore[arg-type]
        self._run()
        assert len(self.out) == chunks

    @property
    def periods(self) -> list[float]:
        """From one chunk's arrival at the client to the next one's."""
        return [later - before for (before, _), (later, _) in itertools.pairwise(self.out[WARM:])]

    @property
    def latencies(self) -> list[float]:
        """From each chunk's control to its commit, by the broker's clock."""
        return [chunk.timing.latency_s for _, chunk in self.out[WARM:]]

    def _at(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, next(self._count), call))

    def _run(self) -> None:
        while self._heap:
            self.now, _, call = heapq.heappop(self._heap)
            call()

    def _say(self, route: bytes, message: Any) -> None:
        self._at(self.now + HOP_S, lambda: self._received(route, message))

    def _received(self, route: bytes, message: Any) -> None:
        number = self._attachments.get(route, 0)
        self._handle(Received(self.now, route, number, message, 100, bytes(16)))
        self._handle(TurnEnded(self.now, drained=True))

    def _handle(self, event: Received | TurnEnded) -> None:
        for action in self.core.handle(event):
            if isinstance(action, Send):
                if isinstance(action.message, m.Welcome):
                    self._attachments[action.route] = action.attachment
                hear = self._worker if action.route == b"worker" else self._client
                self._at(self.now + HOP_S, lambda hear=hear, said=action.message: hear(said))  # type: ignore[misc]
        self.core.check()

    def _worker(self, said: Any) -> None:
        match said:
            case m.InitializeStage():
                self._say(b"worker", m.StageInitialized(said.session, said.stage, 1, 1, Artifact(), 1))
            case m.ReleaseStage():
                self._say(b"worker", m.StageReleased(said.session, said.stage, 1, 1))
            case m.SetStageKeys():
                self._registers[said.session] = said.keys
            case m.RunTask():
                self._jobs[said.stage].append(said)
                if len(self._jobs[said.stage]) == 1:
                    self._begin(said)

    def _begin(self, task: m.RunTask) -> None:
        applied = None
        if task.reservation is not None:
            applied = bind(task.reservation, self._registers.get(task.session, KeyState()))
        self._say(b"worker", m.TaskStarted(task.session, task.stage, 1, 1, task.index, applied))
        self._at(self.now + STAGES[task.stage], lambda: self._end(task, applied))

    def _end(self, task: m.RunTask, applied: m.Applied | None) -> None:
        outputs = {name: Artifact() for name in self.spec.stage(task.stage).produces}
        at = (task.session, task.stage, 1, 1, task.index)
        self._say(b"worker", m.TaskDone(*at, outputs, {}, STAGES[task.stage], applied))
        jobs = self._jobs[task.stage]
        jobs.popleft()
        if jobs:
            self._begin(jobs[0])

    def _client(self, said: Any) -> None:
        match said:
            case m.SessionChanged(state="ready"):
                if self.steered == "reacting":
                    self._say(b"client", m.SubmitControl(said.session, 0, Artifact({"keys": ["w"]})))
                else:
                    self._press(said.session, "w")
            case m.Chunk():
                self.out.append((self.now, said))
                while self._changes and self._changes[0][0] <= said.applied.revision:
                    self.shown.append(self.now - self._changes.popleft()[1])
                taken = said.index + 1
                self._say(b"client", m.Ack(said.session, taken, m.Credit(taken + 2, 1 << 40)))
                if self.steered == "reacting" and taken < self.chunks:
                    self._say(b"client", m.SubmitControl(said.session, taken, Artifact({"keys": ["w"]})))

    def _press(self, session: str, key: str) -> None:
        """Hold one key; a client that changes it holds another one at a random moment."""
        keys = self._keys.set_keys([key])
        self._say(b"client", m.SetKeys(session, keys))
        self._changes.append((keys.revision, self.now))
        if self.steered == "changing" and len(self.out) < self.chunks - 5:
            other = "a" if key == "w" else "w"
            self._at(self.now + self._chance.uniform(0.15, 0.6), lambda: self._press(session, other))


def near(bound: float) -> Any:
    """What can't be beaten, and the way of the messages."""
    return pytest.approx(bound + 4 * HOP_S, abs=4 * HOP_S + 1e-9)


@pytest.mark.parametrize(("refill", "bound"), [("never", 0.175), ("with_control", 0.145), ("after_stage", 0.145)])
def test_streaming_07_a_client_that_reacts_waits_for_denoise_and_decode(kit: Any, refill: str, bound: float) -> None:
    """Its condition is made while it looks at the frames before; only without a window it waits for encode as well."""
    done = Simulation(kit, binding="early", refill=refill, steered="reacting", chunks=20)
    assert all(period == near(bound) for period in done.periods)
    assert all(latency == near(bound) for latency in done.latencies)


@pytest.mark.parametrize("refill", ["never", "with_control", "after_stage"])
@pytest.mark.parametrize(("binding", "bound"), [("early", 0.240), ("late", 0.145)])
def test_streaming_15_a_held_key_keeps_the_slowest_stage_busy(
    kit: Any, refill: str, binding: str, bound: float
) -> None:
    """The period is that of the slowest stage, however keys are bound; bound late a control waits for nothing."""
    done = Simulation(kit, binding=binding, refill=refill, steered="holding", chunks=20)
    assert done.periods == pytest.approx([STAGES["denoise"]] * len(done.periods))
    assert all(latency == near(bound) for latency in done.latencies)


def test_streaming_15_bound_late_a_change_shows_a_quarter_sooner_and_more(kit: Any) -> None:
    """From the press to the first frame that applied it, at the same period."""
    means = {}
    for binding in ("early", "late"):
        done = Simulation(kit, binding=binding, refill="after_stage", steered="changing", chunks=120)
        assert done.periods == pytest.approx([STAGES["denoise"]] * len(done.periods))
        assert len(done.shown) > 30
        means[binding] = mean(done.shown)
    assert means["late"] < 0.75 * means["early"]
    assert means["late"] == pytest.approx(STAGES["denoise"] / 2 + 0.145, abs=0.02)


@pytest.mark.parametrize("refill", ["never", "with_control", "after_stage"])
@pytest.mark.parametrize("binding", ["early", "late"])
@pytest.mark.parametrize("steered", ["reacting", "holding"])
@pytest.mark.parametrize(
    "seconds", [(0.03, 0.12, 0.025), (0.03, 0.12, 0.2), (0.2, 0.12, 0.03), (0.1, 0.1, 0.1), (0.05, 0.04, 0.07)]
)
def test_the_best_of_the_benchmark_is_what_the_rules_allow(
    kit: Any,
    refill: Any,
    binding: Any,
    steered: Any,
    seconds: tuple[float, float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever stage is the slowest: each chunk is made at the time that the arithmetic says, but for the messages' way."""
    for stage, each in zip(STAGES, seconds, strict=True):
        monkeypatch.setitem(STAGES, stage, each)
    done = Simulation(kit, binding=binding, refill=refill, steered=steered, chunks=16)
    best = Best.of(Times(*seconds), refill, steered, binding, 16)
    assert done.periods == pytest.approx(best.periods(WARM + 1), abs=8 * HOP_S + 1e-9)
    assert done.latencies == pytest.approx(best.latencies(WARM), abs=8 * HOP_S + 1e-9)
