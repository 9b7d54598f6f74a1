"""What a benchmark found: its bounds, its tables and the CSV that keeps its rows."""

from __future__ import annotations

import csv
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from reelwire.commands import bench_report
from reelwire.commands.bench_report import Bound, Report, Spread, append, commit, origin, publish
from reelwire.errors import RequestError

REPORT = Report(
    "paint",
    "How fast paint dries",
    ("colour", "dry_s", "coats"),
    [("red", 1.5, 2), ("blue", None, 3)],
    [Bound("dry, s", 1.5, 1.0, "most", 0.1), Bound("coats", 2, 2, "near")],
    ["it rained"],
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
    assert said["rows"][0] == {"colour": "red", "dry_s": 1.5, "coats": 2}
    assert [bound["holds"] for bound in said["bounds"]] == [False, True]
    assert {"time", "commit", "reelwire", "python", "pyzmq", "kernel", "cores"} <= said.keys()


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
    assert all(row["python"] and row["commit"] for row in rows)
    assert [path.name for path in (tmp_path / "benchmarks").iterdir()] == ["paint.csv"]


def test_a_column_that_came_later_leaves_older_rows_as_they_were(tmp_path: Path) -> None:
    """A CSV of an older version is kept: its rows lack the new column, and new rows lack the one that went."""
    path = tmp_path / "x.csv"
    append(path, [{"a": 1, "b": "two"}])
    append(path, [{"b": "three", "c": 4.0}])
    assert read(path) == [{"a": "1", "b": "two", "c": ""}, {"a": "", "b": "three", "c": "4"}]


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
