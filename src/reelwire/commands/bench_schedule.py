"""`reelwire bench schedule`: what prefetch and late binding are good for, beside what can't be beaten.

The emulated pipeline takes exactly the times that it is told, so the best that a scheduler can do is arithmetic
(`bench_best`). Where denoise is the slowest stage and encode no longer than the way from its begin to the frame, it is::

    reacting   (a) encode + denoise + decode; (b), (c) denoise + decode: the next control is known only then
    holding    a chunk per denoise; from control to frame 2 x denoise when it is bound early, one period and the way
               through denoise; denoise + decode when it is bound late

Everything is real: a broker process, a worker process for each session, and clients over ZeroMQ. The rounds of one kind
of client run side by side, the kinds one after the other.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .bench_best import Best, Refill, Times
from .bench_report import Bound, Cell, Report, Spread, asked_for, load_before, phases, verdict

if TYPE_CHECKING:
    from ..parts import ControlBinding
    from .bench_players import Played, Player

Mode = Literal["a", "b", "c"]

REFILLS: dict[Mode, Refill] = {"a": "never", "b": "with_control", "c": "after_stage"}
KINDS: tuple[tuple[Player, ControlBinding], ...] = (
    ("reacting", "late"),
    ("holding", "early"),
    ("holding", "late"),
    ("changing", "early"),
    ("changing", "late"),
)
MEAN_SHARE, P99_S = 0.02, 0.005
CHANGE_SHARE = 0.75
COLUMNS = ("mode", "client", "binding", "what", "count", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "bound_ms", "verdict")
HEADS = ("mode", "client", "binding", "what", "count", "mean", "p50", "p90", "p99", "bound", "verdict")
LEGEND = (
    "modes: a, condition and control together; b, conditions ahead, refilled with a control; c, refilled after denoise",
    "by the broker's clock: period, control to frame, first chunk since the session was ready; change to frame here",
    f"bound: of the mean, within {100 * MEAN_SHARE:g} %; p99 at most {1000 * P99_S:g} ms above the best that there can be",
    f"change to frame, late: its bound is {CHANGE_SHARE:g} of the mean that early has",
    "p99 of less than 100 values is the largest",
)
TOTAL_S = 60.0
APART_S = 0.02
"""Between two starts: opening a session takes the broker longer than a chunk does."""
DRAWN_CHUNKS = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        encode_s: time of that stage for a chunk, in seconds.
        denoise_s: the same.
        decode_s: the same.
        chunks: chunks of each session that are measured.
        warmup: chunks before them.
        rounds: sessions of each mode and kind of client, side by side.
    """

    encode_s: float = 0.030
    denoise_s: float = 0.120
    decode_s: float = 0.025
    chunks: int = 60
    warmup: int = 5
    rounds: int = 5

    @property
    def sessions_s(self) -> float:
        """How long the sessions take at least, in seconds: in each mode and round at once, by kind one after the other."""
        takes = 0.0
        for kind in KINDS:
            starts = zip(self.modes, self.starts(*kind), strict=True)
            takes += max(start_s + self._takes_s(mode, *kind) for mode, start_s in starts)
        return takes

    @property
    def modes(self) -> list[Mode]:
        """Of the sessions that are played at once."""
        return [mode for mode in REFILLS for _ in range(self.rounds)]

    def starts(self, player: Player, binding: ControlBinding) -> list[float]:
        """When each of these sessions starts, in seconds.

        Each has two moments in a chunk at which messages go and threads wake: the end of denoise and that of decode. No
        two sessions of one period have theirs together, or they would wait for each other's at every chunk anew.
        """
        best = {mode: self.best(mode, player, binding)["period"].mean for mode in REFILLS}
        return apart([best[mode] for mode in self.modes], self.decode_s, APART_S)

    def _takes_s(self, mode: Mode, player: Player, binding: ControlBinding) -> float:
        best = self.best(mode, player, binding)
        return best["first chunk"].mean + (self.warmup + self.chunks - 1) * best["period"].mean

    def best(self, mode: Mode, player: Player, binding: ControlBinding) -> dict[str, Spread]:
        """What can't be beaten, of the chunks that are measured: period, control to frame, first chunk."""
        times = Times(self.encode_s, self.denoise_s, self.decode_s)
        best = Best.of(times, REFILLS[mode], player, binding, self.warmup + self.chunks)
        return {
            "period": Spread.of(best.periods(self.warmup)),
            "control to frame": Spread.of(best.latencies(self.warmup)),
            "first chunk": Spread.of(best.committed[:1]),
        }

    def gains(self, mode: Mode) -> bool:
        """Whether these times let late binding show a change so much sooner as it is held against."""
        shown = {}
        for binding in ("early", "late"):
            best = self.best(mode, "changing", binding)
            shown[binding] = best["period"].mean / 2 + best["control to frame"].mean  # a change comes at any moment
        return shown["late"] <= CHANGE_SHARE * shown["early"]


def apart(periods: Sequence[float], between_s: float, apart_s: float) -> list[float]:
    """When sessions start, so that those of one period are at different points of it all the time.

    Args:
        periods: how long a round of each session takes, in seconds.
        between_s: seconds between two moments of a round at which something is done; as far as the rounds have room for
            that, the one doesn't meet the other of another session.
        apart_s: seconds between two starts, at least.
    """
    points: dict[float, list[float]] = {}
    for period, count in Counter(periods).items():
        step = period / count
        if between_s > step / 2:
            # A number of steps and a half go into it: the other moments lie in the middle of a step.
            step = between_s / (math.ceil(between_s / step - 0.5) + 0.5)
        points[period] = [number * step for number in range(count)]
    starts, earliest = [], 0.0
    for period in periods:
        start, point = min((earliest + (point - earliest) % period, point) for point in points[period])
        points[period].remove(point)
        starts.append(start)
        earliest = start + apart_s
    return starts


def run(plan: Plan, timelines: Path | None = None) -> Report:
    """Play every kind of client in every mode.

    Args:
        plan: times and counts.
        timelines: a folder for a picture of some chunks of each.
    """
    from .. import Client
    from .bench_players import Part, play
    from .bench_stack import Others, stack

    load, began = load_before(), time.monotonic()
    modes = plan.modes
    measured: dict[tuple[Mode, Player, ControlBinding], list[Played]] = {}
    expected = f"{plan.sessions_s:.0f} s, and before it as long as {len(modes) + 1} processes need to start"
    kinds = phases("schedule", expected, KINDS, lambda kind: f"sessions {kind[0]}, {_bound_as(*kind)}")
    with stack(_workers(plan)) as running, ExitStack() as clients:
        others = Others(running)
        connected = [clients.enter_context(Client(running.endpoint)) for _ in modes]
        for player, binding in kinds:
            starts = enumerate(zip(modes, plan.starts(player, binding), strict=True))
            chunks = plan.warmup + plan.chunks
            parts = [Part(_stream(mode), player, binding, chunks, seed, at) for seed, (mode, at) in starts]
            for mode, played in zip(modes, play(connected, parts), strict=True):
                measured.setdefault((mode, player, binding), []).append(played)
        said = others.said()
    total_s = time.monotonic() - began
    if timelines is not None:
        _draw(timelines, measured, plan)
    rows, bounds = _judged(plan, measured)
    bounds.append(Bound("all of it, s", total_s, TOTAL_S))
    times = "/".join(f"{1000 * each:g}" for each in (plan.encode_s, plan.denoise_s, plan.decode_s))
    title = f"Schedule, in ms: stages of {times}, {plan.rounds} rounds of {plan.chunks} chunks after {plan.warmup}"
    unjudged = [mode for mode in REFILLS if not plan.gains(mode)]
    notes = ["; ".join(filter(None, (f"{total_s:.1f} s in all", said))), f"load of the machine before: {load:.2f}"]
    if unjudged:
        notes.insert(0, f"change to frame has no bound in {', '.join(unjudged)}: these times leave little to be gained")
    return Report("schedule", title, COLUMNS, rows, bounds, notes, LEGEND, HEADS, asked_for(plan), load)


def _stream(mode: Mode) -> str:
    return f"emulated-{mode}"


def _workers(plan: Plan) -> dict[str, dict[str, object]]:
    """One for each session that is played at once: an actor that two sessions share would be late for one of them."""
    workers: dict[str, dict[str, object]] = {}
    for mode, refill in REFILLS.items():
        options = {
            "name": _stream(mode),
            "refill": refill,
            "encode_s": f"{plan.encode_s!r}",
            "denoise_s": f"{plan.denoise_s!r}",
            "decode_s": f"{plan.decode_s!r}",
        }
        for number in range(plan.rounds):
            workers[f"{mode}{number}"] = {"pipeline": "emulated", "options": options, "slots": 1}
    return workers


def _draw(folder: Path, measured: Mapping[tuple[Mode, Player, ControlBinding], list[Played]], plan: Plan) -> None:
    """A picture of the first measured chunks of each kind's first round, and their trace beside it."""
    from ..timeline import save_timeline
    from ..workers.emulated import Emulation, emulated_spec

    folder.mkdir(parents=True, exist_ok=True)
    for (mode, player, binding), played in measured.items():
        shown = list(enumerate(played[0].timings))[plan.warmup : plan.warmup + DRAWN_CHUNKS]
        bound_as = _bound_as(player, binding)
        title = f"Mode {mode}, {player}, {bound_as}"
        spec = emulated_spec(Emulation(name=_stream(mode), refill=REFILLS[mode]))
        save_timeline(folder / f"{mode}-{player}-{bound_as.replace(' ', '-')}.png", spec, shown, title)


def _judged(
    plan: Plan, measured: Mapping[tuple[Mode, Player, ControlBinding], list[Played]]
) -> tuple[list[tuple[Cell, ...]], list[Bound]]:
    rows: list[tuple[Cell, ...]] = []
    bounds: list[Bound] = []
    changed: dict[tuple[Mode, ControlBinding], float] = {}
    for (mode, player, binding), played in measured.items():
        best = plan.best(mode, player, binding)
        for what, values in _samples(played, plan.warmup).items():
            spread = Spread.of(values)
            bound_as = _bound_as(player, binding)
            name = f"{mode} {player} {bound_as}: {what}"
            mine: list[Bound] = []
            if what in best:
                mine = _beside(name, spread, best[what], len(rows))
            elif what == "change to frame":
                changed[mode, binding] = spread.mean
                if binding == "late" and (mode, "early") in changed and plan.gains(mode):
                    bound = CHANGE_SHARE * changed[mode, "early"]
                    name += ", mean, ms"
                    mine = [Bound(name, 1e3 * spread.mean, 1e3 * bound, "most", 0.0, len(rows), "mean")]
            beside = mine[0].bound if mine else None
            rows.append((mode, player, bound_as, what, len(values), *spread.ms(), beside, verdict(mine)))
            bounds += mine
    return rows, bounds


def _beside(name: str, spread: Spread, best: Spread, row: int) -> list[Bound]:
    """Bounds of a mean and of a 99th percentile."""
    mean, p99 = 1e3 * best.mean, 1e3 * best.p99
    return [
        Bound(f"{name}, mean, ms", 1e3 * spread.mean, mean, "near", MEAN_SHARE * mean, row, "mean"),
        Bound(f"{name}, p99, ms", 1e3 * spread.p99, p99, "most", 1e3 * P99_S, row, "p99"),
    ]


def _bound_as(player: Player, binding: ControlBinding) -> str:
    return "by index" if player == "reacting" else binding


def _samples(played: Iterable[Played], warmup: int) -> dict[str, list[float]]:
    """What was measured of all rounds together, in seconds."""
    found: dict[str, list[float]] = {"period": [], "control to frame": [], "change to frame": [], "first chunk": []}
    for one in played:
        timings = one.timings[warmup:]
        found["period"] += [each.period_s for each in timings if each.period_s is not None]
        found["control to frame"] += [each.latency_s for each in timings]
        found["change to frame"] += [seconds for each in one.changes_s[warmup:] for seconds in each]
        found["first chunk"].append(one.timings[0].committed_s)
    return {what: values for what, values in found.items() if values}
