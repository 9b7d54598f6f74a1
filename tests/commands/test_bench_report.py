"""What a benchmark found: its bounds, its tables and the CSV that keeps its rows."""

from __future__ import annotations

import csv
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from reelwire.cli import exit_code
from reelwire.commands import bench_report
from reelwire.commands.bench_broker import Plan
from reelwire.commands.bench_report import (
    Bound,
    Report,
    Spread,
    append,
    asked_for,
    check_csv,
    commit,
    origin,
    phases,
    publish,
)
from reelwire.errors import ReelwireError, RequestError

from .conftest import Reelwire

REPORT = Report(
    "paint",
    "How fast paint dries",
    ("colour", "dry_s", "coats"),
    [("red", 1.5, 2), ("blue", None, 3)],
    [Bound("dry, s", 1.5, 1.0, "most", 0.1, 0, "dry_s"), Bound("coats", 2, 2, "near")],
    ["it rained"],
    asked={"seconds": 3.0},
    load=0.25,
)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("kind", "holding", "missing"),
    [
        ("most", (9.0, 10.5), (10.6, math.nan)),
        ("least", (9.5, 12.0), (9.4, math.nan)),
        ("near", (9.5, 10.5), (9.4, 10.6)),
    ],
)
def test_a_bound_holds_up_to_its_slack(
    kind: bench_report.Kind, holding: tuple[float, ...], missing: tuple[float, ...]
) -> None:
    """A number may lie `slack` beyond its bound, on the sides that its kind looks at; NaN never holds."""
    assert all(Bound("x", value, 10.0, kind, 0.5).holds for value in holding)
    assert not any(Bound("x", value, 10.0, kind, 0.5).holds for value in missing)


def test_a_missed_bound_is_printed_as_missed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The tables show rows, bounds and verdicts; notes go to standard error."""
    publish(REPORT, as_json=False, path=tmp_path / "paint.csv")
    shown = capsys.readouterr()
    assert "How fast paint dries" in shown.out
    assert "1 of 2 missed" in shown.out
    assert "MISSED" in shown.out
    assert "<= 1.1" in shown.out
    assert "it rained" in shown.err


def test_what_could_not_be_measured_neither_holds_nor_is_missed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is said so, in words and as JSON."""
    report = replace(REPORT, bounds=[Bound("growth", None, 5.0), Bound("coats", 2, 2)])
    publish(report, as_json=False, path=tmp_path / "paint.csv")
    shown = capsys.readouterr().out
    assert "1 of 2 not measured" in shown
    assert "missed" not in shown.lower()
    publish(report, as_json=True, path=tmp_path / "paint.csv")
    said = json.loads(capsys.readouterr().out)
    assert (said["missed"], said["not_measured"]) == (0, 1)
    assert [(bound["measured"], bound["holds"]) for bound in said["bounds"]] == [(None, False), (2, True)]


def test_the_same_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One document with rows by column, bounds with verdicts, and where the numbers come from."""
    publish(REPORT, as_json=True, path=tmp_path / "paint.csv")
    said = json.loads(capsys.readouterr().out)
    assert said["benchmark"] == "paint"
    assert said["missed"] == 1
    assert said["rows"][0] == {
        "colour": "red",
        "dry_s": 1.5,
        "coats": 2,
        "bound": "dry_s <= 1.1",
        "verdict": "MISSED dry_s",
    }
    assert said["asked"] == {"seconds": 3.0}
    assert [bound["holds"] for bound in said["bounds"]] == [False, True]
    assert {
        "time",
        "commit",
        "reelwire",
        "python",
        "pyzmq",
        "kernel",
        "processor",
        "cores",
        "load_before",
    } <= said.keys()


def test_rows_are_appended_to_a_csv_of_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs leave the rows of both, with commit and versions, in ``benchmarks/NAME.csv``."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        publish(REPORT, as_json=True)
    rows = read(tmp_path / "benchmarks" / "paint.csv")
    assert [row["colour"] for row in rows] == ["red", "blue", "red", "blue"]
    assert rows[0]["dry_s"] == "1.5"
    assert rows[1]["dry_s"] == ""
    assert all(row["python"] and row["commit"] and row["processor"] and row["cores"] for row in rows)
    assert {(row["load_before"], row["asked_seconds"]) for row in rows} == {("0.25", "3")}
    assert [row["bound"] for row in rows[:2]] == ["dry_s <= 1.1", ""]
    assert [row["verdict"] for row in rows[:2]] == ["MISSED dry_s", ""]
    assert [path.name for path in (tmp_path / "benchmarks").iterdir()] == ["paint.csv"]


def test_a_column_that_came_later_leaves_older_rows_as_they_were(tmp_path: Path) -> None:
    """A CSV of an older version is kept: its rows lack the new column, and new rows lack the one that went."""
    path = tmp_path / "x.csv"
    append(path, [{"a": 1, "b": "two"}])
    append(path, [{"b": "three", "c": 4.0}])
    assert read(path) == [{"a": "1", "b": "two", "c": ""}, {"a": "", "b": "three", "c": "4"}]


def test_bounds_that_the_rows_tell_of_are_not_listed_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where a column says whether they hold; what can't be read without a legend stands with it on standard output."""
    rows = [("red", 1.5, "MISSED dry_s"), ("blue", None, "")]
    report = replace(
        REPORT,
        columns=("colour", "dry_s", "verdict"),
        rows=rows,
        heads=("", "dry", "verdict"),
        legend=["dry: to the touch"],
    )
    publish(report, as_json=False, path=tmp_path / "paint.csv")
    shown = capsys.readouterr().out
    assert "dry: to the touch" in shown
    assert "1 of 2 missed" in shown
    assert shown.count("MISSED") == 1
    assert "coats" in shown
    assert "dry, s" not in shown


def test_a_miss_is_a_failure_only_if_that_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With `strict`, after all was printed and kept; what wasn't measured counts too."""
    path = tmp_path / "paint.csv"
    publish(REPORT, as_json=False, path=path)
    with pytest.raises(ReelwireError, match="bench paint: bounds: 1 of 2 missed") as caught:
        publish(REPORT, as_json=False, path=path, strict=True)
    assert exit_code(caught.value) == 1
    assert len(read(path)) == 4
    assert capsys.readouterr().out.count("How fast paint dries") == 2
    unknown = replace(REPORT, bounds=[Bound("growth", None, 5.0)])
    with pytest.raises(ReelwireError, match="1 of 1 not measured"):
        publish(unknown, as_json=True, path=path, strict=True)
    publish(replace(REPORT, bounds=[Bound("coats", 2, 2)]), as_json=True, path=path, strict=True)


def test_a_machine_that_was_busy_before_is_told_under_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From half of the cores on, on standard output and in the JSON."""
    monkeypatch.setattr(bench_report, "cores", lambda: 2)
    for load, told in ((1.0, 0), (1.01, 1)):
        for as_json in (False, True):
            publish(replace(REPORT, load=load), as_json=as_json, path=tmp_path / "paint.csv")
            assert capsys.readouterr().out.count(f"before was {load:.2f} on 2 cores") == told


def test_phases_are_told_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    """How long it takes at once, each phase when it begins; on standard error."""
    going = phases("paint", "about 3 s", ("red", "blue"), str.upper)
    assert capsys.readouterr().err == "reelwire: bench paint takes about 3 s\n"
    assert next(going) == "red"
    assert capsys.readouterr().err == "reelwire: bench paint: 1 of 2: RED\n"
    assert list(going) == ["blue"]
    assert capsys.readouterr() == ("", "reelwire: bench paint: 2 of 2: BLUE\n")


def test_what_was_asked_for_is_kept_by_the_names_of_the_flags() -> None:
    """Several numbers as they are written on the command line."""
    assert asked_for(Plan((1, 8), 2, 0.5)) == {"sessions": "1,8", "rounds": 2, "seconds": 0.5}


def test_a_csv_is_refused_before_anything_is_measured(reelwire: Reelwire, tmp_path: Path) -> None:
    """Where its folder isn't there, or is in its place; wrong usage, with what is accepted."""
    for name in ("schedule", "broker", "payload", "soak"):
        done = reelwire("bench", name, "--csv", "nowhere/mine.csv")
        assert (done.code, done.out) == (2, "")
        assert "csv: the folder nowhere is not there; accepted: a folder that exists" in done.err
    with pytest.raises(RequestError, match="is a folder; accepted: a file"):
        check_csv(tmp_path)
    check_csv(tmp_path / "mine.csv")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["schedule", "broker", "payload", "soak"])
def test_help_says_that_a_miss_ends_with_0(name: str, reelwire: Reelwire) -> None:
    """And which flag makes it a failure."""
    shown = " ".join(reelwire("bench", name, "--help").out.split())
    assert "--strict" in shown
    assert "exit with 0, it only measures" in shown


def test_a_csv_that_cannot_be_written_is_refused_by_its_flag(tmp_path: Path) -> None:
    """The numbers were printed by then; the error names the flag."""
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"csv: .*can't be written"):
        publish(REPORT, as_json=True, path=tmp_path / "file" / "x.csv")


def test_outside_of_a_checkout_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed copy names no commit, also where somebody else's checkout lies around it."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(bench_report, "__file__", str(tmp_path / "bench_report.py"))
    assert commit() == "unknown"
    assert origin()["commit"] == "unknown"


def test_percentiles_are_of_the_nearest_rank() -> None:
    """Of a hundred values the 99th is the second largest."""
    spread = Spread.of([float(value) for value in range(100, 0, -1)])
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == (50.5, 50.0, 90.0, 99.0)
    assert Spread.of([2.0]).ms() == (2000.0, 2000.0, 2000.0, 2000.0)
