"""`reelwire bench jobs` and `reelwire bench groups`: what they run and what they keep. No number of them is asserted."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from .conftest import Reelwire


def kept(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of a benchmark's file."""
    with (folder / "benchmarks" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def by_phase(said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a report, by what they are about."""
    return {row["phase"]: row for row in said["rows"]}


def test_a_short_run_submits_in_turn_at_once_and_too_much(reelwire: Reelwire, tmp_path: Path) -> None:
    """Each submission of each phase is accepted or refused, and what was accepted is there after a broker was killed."""
    done = reelwire("bench", "jobs", "--clients", "3", "--each", "2", "--flood", "30", "--queued", "5", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    rows = by_phase(said)
    for phase in ("in turn", "at once"):
        assert (rows[phase]["submitted"], rows[phase]["accepted"], rows[phase]["refused"]) == (6, 6, 0)
    flood = rows["flood"]
    assert flood["accepted"] + flood["refused"] == flood["submitted"] == 30
    assert flood["refused"] > 0
    assert flood["lost"] == 0
    assert rows["fdatasync beside"]["submitted"] == 6
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in said["rows"])
    assert len(kept(tmp_path, "jobs")) == len(said["rows"])


def test_a_short_run_plays_a_job_and_a_stream_alone_and_together(reelwire: Reelwire, tmp_path: Path) -> None:
    """Each of the four phases of a round is measured, and held against what it is compared with."""
    short = ("--steps", "30", "--step-s", "0.1", "--denoise-s", "0.01", "--rounds", "1")
    done = reelwire("bench", "groups", *short, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    rows = by_phase(said)
    assert list(rows) == ["job alone", "stream alone", "job beside", "stream beside"]
    assert all(row["seconds"] > 0 for row in said["rows"])
    assert rows["stream alone"]["chunks"] == rows["stream beside"]["chunks"] > 0
    assert {bound["row"] for bound in said["bounds"]} == {0, 2, 3}
    assert len(kept(tmp_path, "groups")) == len(said["rows"])
