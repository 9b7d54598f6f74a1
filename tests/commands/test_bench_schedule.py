"""`reelwire bench schedule`: what it runs, what it holds against what, and what it keeps. No number of it is asserted."""

from __future__ import annotations

import csv
import json
from itertools import pairwise, product
from pathlib import Path

import pytest
from PIL import Image

from reelwire.commands.bench_players import Played, Player
from reelwire.commands.bench_schedule import Mode, Plan, _judged, apart
from reelwire.parts import ChunkTiming, ControlBinding

from .conftest import Reelwire

SHORT = ("--encode-s", "0.002", "--denoise-s", "0.006", "--decode-s", "0.002", "--chunks", "6", "--warmup", "1")
MODES: tuple[Mode, ...] = ("a", "b", "c")
HOLD: tuple[Player, ...] = ("holding", "changing")


def played(period_s: float, latency_s: float, change_s: float | None = None, chunks: int = 20) -> Played:
    """A session whose every chunk took the same."""
    timings = [ChunkTiming(0.175 + index * period_s, latency_s, period_s, {}) for index in range(chunks)]
    return Played(timings, [() if change_s is None else (change_s,)] * chunks)


def test_a_short_run_plays_every_client_in_every_mode(reelwire: Reelwire, tmp_path: Path) -> None:
    """Real processes, every kind of client in each mode; rows for each are printed and kept, and a picture is drawn."""
    done = reelwire("bench", "schedule", *SHORT, "--rounds", "1", "--timeline", "pictures", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["benchmark"] == "schedule"
    kinds = {("reacting", "by index"), *product(("holding", "changing"), ("early", "late"))}
    seen = {(row["mode"], row["client"], row["binding"]) for row in said["rows"]}
    assert seen == {(mode, *kind) for mode in "abc" for kind in kinds}
    for row in said["rows"]:
        if row["what"] in ("period", "control to frame"):
            assert row["count"] == 6
            assert row["bound_ms"] > 0
            assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
    with (tmp_path / "benchmarks" / "schedule.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(said["rows"])
    assert "modes: a, condition and control together" in said["notes"][0]
    phases = [line for line in done.err.splitlines() if " of 5: sessions " in line]
    assert [line.partition("sessions ")[2] for line in phases] == [
        "reacting, by index",
        "holding, early",
        "holding, late",
        "changing, early",
        "changing, late",
    ]
    pictures = sorted(path.name for path in (tmp_path / "pictures").glob("*.png"))
    assert len(pictures) == 15
    assert "c-holding-late.png" in pictures
    with Image.open(tmp_path / "pictures" / "c-holding-late.png") as picture:
        assert picture.width > 1000


def best_ms(plan: Plan, mode: Mode, player: Player, binding: ControlBinding) -> dict[str, float]:
    """Means in milliseconds, after a look at whether every chunk has the mean."""
    best = plan.best(mode, player, binding)
    assert all(spread.p99 == pytest.approx(spread.mean) for spread in best.values())
    return {what: round(1e3 * spread.mean, 6) for what, spread in best.items()}


def test_what_cannot_be_beaten_follows_from_the_times() -> None:
    """With denoise the slowest stage the bounds are sums and maxima of the stages' times, by mode, client and binding."""
    plan = Plan()
    whole = {"period": 175.0, "control to frame": 175.0, "first chunk": 175.0}
    assert best_ms(plan, "a", "reacting", "late") == whole
    for mode in MODES:
        if mode != "a":
            assert best_ms(plan, mode, "reacting", "late") == {**whole, "period": 145.0, "control to frame": 145.0}
        for player in HOLD:
            early, late = best_ms(plan, mode, player, "early"), best_ms(plan, mode, player, "late")
            assert early == {**whole, "period": 120.0, "control to frame": 240.0}
            assert late == {**whole, "period": 120.0, "control to frame": 145.0}
        assert plan.gains(mode)


def test_where_another_stage_is_the_slowest_the_bounds_are_other_ones() -> None:
    """Latents that wait for decode count, and an encode that nobody hides; a gain is asked for only where one can be."""
    slow_decode = Plan(decode_s=0.2)
    assert best_ms(slow_decode, "c", "holding", "late") == {
        "period": 200.0,
        "control to frame": 400.0,
        "first chunk": 350.0,
    }
    assert best_ms(Plan(encode_s=0.2), "c", "reacting", "late")["control to frame"] == 200.0
    assert best_ms(Plan(encode_s=0.2), "b", "holding", "late")["control to frame"] == 145.0
    uneven = Plan(0.1, 0.1, 0.1).best("a", "holding", "late")["period"]
    assert (uneven.mean, uneven.p99) == pytest.approx((0.15, 0.2))
    assert not slow_decode.gains("c")
    changing: dict[tuple[Mode, Player, ControlBinding], list[Played]] = {
        ("c", "changing", "early"): [played(0.2, 0.4, 0.500)],
        ("c", "changing", "late"): [played(0.2, 0.4, 0.500)],
    }
    rows, bounds = _judged(slow_decode, changing)
    assert [row[-1] for row in rows if row[3] == "change to frame"] == ["", ""]
    assert [bound.what for bound in bounds if not bound.holds and "first chunk" not in bound.what] == []


def test_a_miss_is_told_and_a_hit_too() -> None:
    """A mean beyond 2 % or a p99 beyond 5 ms of the bound is called missed, and so is too small a gain of late binding."""
    plan = Plan()
    rows, bounds = _judged(
        plan,
        {
            ("c", "holding", "early"): [played(0.121, 0.241)],
            ("c", "holding", "late"): [played(0.121, 0.151)],
            ("c", "changing", "early"): [played(0.120, 0.240, 0.300)],
            ("c", "changing", "late"): [played(0.120, 0.145, 0.230)],
        },
    )
    told = {(row[1], row[2], row[3]): row[-1] for row in rows}
    assert told["holding", "early", "period"] == "holds"
    assert told["holding", "late", "control to frame"] == "MISSED mean p99"
    assert told["changing", "early", "change to frame"] == ""
    assert told["changing", "late", "change to frame"] == "MISSED mean"
    assert sum(not bound.holds for bound in bounds) == 3


@pytest.mark.parametrize("between_s", [0.0, 0.002, 0.025, 0.09, 0.3])
@pytest.mark.parametrize("counts", [{0.12: 15}, {0.175: 5, 0.145: 10}, {0.12: 1}], ids=["one", "two", "alone"])
def test_sessions_of_one_period_are_never_at_the_same_point_of_it(counts: dict[float, int], between_s: float) -> None:
    """They are at least a third as far from each other as there is room for; all starts are apart."""
    periods = [period for period, count in counts.items() for _ in range(count)]
    starts = apart(periods, between_s, 0.02)
    assert all(later - earlier > 0.0199 for earlier, later in pairwise(starts))
    for period, count in counts.items():
        points = [start for start, each in zip(starts, periods, strict=True) if each == period]
        assert nearest(points, period) > 0.33 * period / count


def test_no_end_of_a_stage_meets_another_sessions() -> None:
    """With the usual times: the ends of denoise and those of decode are 2 ms from each other, or more."""
    plan = Plan()
    bindings: tuple[ControlBinding, ...] = ("early", "late")
    for player, binding in product(HOLD, bindings):
        starts = plan.starts(player, binding)
        assert nearest([*starts, *(start + 0.025 for start in starts)], 0.12) > 0.002
    starts = plan.starts("reacting", "late")
    b_and_c = [start for mode, start in zip(plan.modes, starts, strict=True) if mode != "a"]
    assert nearest([*b_and_c, *(start - 0.025 for start in b_and_c)], 0.145) > 0.002


def nearest(moments: list[float], period: float) -> float:
    """How near the two nearest of these are to each other in rounds of that length."""
    points = sorted(moment % period for moment in moments)
    return min(later - earlier for earlier, later in pairwise([*points, points[0] + period]))
