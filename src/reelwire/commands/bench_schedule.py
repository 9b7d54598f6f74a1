"""`reelwire bench schedule`: what prefetch and late binding are good for, beside what can't be beaten.

The emulated pipeline takes exactly the times that it is told, so the best that a scheduler can do is arithmetic::

    reacting   (a) encode + denoise + decode; (b), (c) denoise + decode: the next control is known only then
    holding    a chunk per slowest stage; from control to frame 2 x slowest when it is bound early, one period and the
               way through the slowest stage; denoise + decode when it is bound late

Everything is real: a broker process, a worker process for each session, and clients over ZeroMQ. The rounds of one kind
of client run side by side, the kinds one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .bench_report import Bound, Cell, Report

if TYPE_CHECKING:
    from ..parts import ControlBinding
    from .bench_players import Played, Player

Mode = Literal["a", "b", "c"]
Refill = Literal["never", "with_control", "after_stage"]

REFILLS: dict[Mode, Refill] = {"a": "never", "b": "with_control", "c": "after_stage"}
KINDS: tuple[tuple[Player, ControlBinding], ...] = (
    ("reacting", "late"),
    ("holding", "early"),
    ("holding", "late"),
    ("changing", "early"),
    ("changing", "late"),
)
COLUMNS = ("mode", "client", "binding", "what", "count", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "bound_ms", "verdict")
NOTES = (
    "modes: a, condition and control together; b, conditions ahead, refilled with a control; c, refilled after denoise",
    "by the broker's clock: period, control to frame, first chunk since the session was ready; change to frame here",
)
MEAN_SHARE, P99_S = 0.02, 0.005
CHANGE_SHARE = 0.75
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
    def slowest_s(self) -> float:
        """The period that no schedule can beat."""
        return max(self.encode_s, self.denoise_s, self.decode_s)

    def bounds_s(self, mode: Mode, player: Player, binding: ControlBinding) -> dict[str, float]:
        """What can't be beaten: period, control to frame, first chunk."""
        through = self.denoise_s + self.decode_s
        whole = self.encode_s + through
        if player == "reacting":
            turn = whole if mode == "a" else through
            return {"period": turn, "control to frame": turn, "first chunk": whole}
        control = 2 * self.slowest_s if binding == "early" else through
        return {"period": self.slowest_s, "control to frame": control, "first chunk": whole}


def run(plan: Plan, timelines: Path | None = None) -> Report:
    """Play every kind of client in every mode.

    Args:
        plan: times and counts.
        timelines: a folder for a picture of some chunks of each.
    """
    from .. import Client
    from .bench_players import Part, play
    from .bench_stack import Others, stack

    began = time.monotonic()
    modes: list[Mode] = [mode for mode in REFILLS for _ in range(plan.rounds)]
    measured: dict[tuple[Mode, Player, ControlBinding], list[Played]] = {}
    with stack(_workers(plan)) as running, ExitStack() as clients:
        others = Others(running)
        connected = [clients.enter_context(Client(running.endpoint)) for _ in modes]
        for player, binding in KINDS:
            apart = max(plan.slowest_s / len(modes), APART_S)
            parts = [
                Part(_stream(mode), player, binding, plan.warmup + plan.chunks, seed, seed * apart)
                for seed, mode in enumerate(modes)
            ]
            for mode, played in zip(modes, play(connected, parts), strict=True):
                measured.setdefault((mode, player, binding), []).append(played)
        said = others.said()
    total_s = time.monotonic() - began
    if timelines is not None:
        _draw(timelines, measured, plan)
    rows, bounds = _judged(plan, measured)
    bounds.append(Bound("all of it, s", total_s, TOTAL_S))
    times = "/".join(f"{1000 * each:g}" for each in (plan.encode_s, plan.denoise_s, plan.decode_s))
    title = f"Schedule: stages of {times} ms, {plan.rounds} rounds of {plan.chunks} chunks after {plan.warmup}"
    notes = [*NOTES, f"{total_s:.1f} s in all; {said}"]
    return Report("schedule", title, COLUMNS, rows, bounds, notes)


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
        bound_as = "by index" if player == "reacting" else binding
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
        best = plan.bounds_s(mode, player, binding)
        for what, values in _samples(played, plan.warmup).items():
            spread = Spread.of(values)
            bound_as = "by index" if player == "reacting" else binding
            name = f"{mode} {player} {bound_as}: {what}"
            mine: list[Bound] = []
            bound = best.get(what)
            if bound is not None:
                mine += [
                    Bound(f"{name}, mean, ms", 1e3 * spread.mean, 1e3 * bound, "near", 1e3 * MEAN_SHARE * bound),
                    Bound(f"{name}, p99, ms", 1e3 * spread.p99, 1e3 * bound, "most", 1e3 * P99_S),
                ]
            elif what == "change to frame":
                changed[mode, binding] = spread.mean
                if binding == "late" and (mode, "early") in changed:
                    bound = CHANGE_SHARE * changed[mode, "early"]
                    mine.append(Bound(f"{name}, mean, ms", 1e3 * spread.mean, 1e3 * bound))
            missed = [each.what.split(", ")[1] for each in mine if not each.holds]
            verdict = f"MISSED {' '.join(missed)}" if missed else "holds" if mine else ""
            rows.append((mode, player, bound_as, what, len(values), *spread.ms(), _ms(bound), verdict))
            bounds += mine
    return rows, bounds


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


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and nearest-rank percentiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        ranks = [ordered[max(0, math.ceil(len(ordered) * part) - 1)] for part in (0.5, 0.9, 0.99)]
        return cls(sum(ordered) / len(ordered), *ranks)

    def ms(self) -> tuple[float, float, float, float]:
        """The same in milliseconds."""
        return 1e3 * self.mean, 1e3 * self.p50, 1e3 * self.p90, 1e3 * self.p99


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
