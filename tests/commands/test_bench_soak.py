"""`reelwire bench soak`: what it counts, at a length that leaves nothing to be said about memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import pytest

from reelwire.commands.bench_soak import Plan, Span, run
from reelwire.commands.bench_stack import Others, Stack, Usage
from reelwire.errors import RequestError

from .conftest import Reelwire

SHORT = ("--chunks", "20", "--warmup", "10", "--sessions", "4", "--session-chunks", "3", "--warmup-sessions", "2")


def test_a_short_run_leaves_no_descriptor_thread_or_segment(reelwire: Reelwire, tmp_path: Path) -> None:
    """Both phases are run by a broker and two workers, every frame is read, and what is counted is as it was before."""
    done = reelwire("bench", "soak", *SHORT, "--csv", "mine.csv", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    phases = {(row["phase"], row["process"]) for row in said["rows"]}
    assert phases == {
        (phase, process) for phase in ("one session", "sessions") for process in ("broker", "worker-1", "worker-2")
    }
    assert {row["chunks"] for row in said["rows"]} == {9, 6}  # of the long session the last one is taken after the look
    assert all(row["growth_mb"] == pytest.approx(row["after_mb"] - row["before_mb"]) for row in said["rows"])
    counted = [bound for bound in said["bounds"] if not bound["what"].endswith("MB")]
    assert [bound["what"] for bound in counted if not bound["holds"]] == []
    assert len(counted) == 7
    assert {row["bound"] for row in said["rows"]} == {"growth_mb <= 5", "growth_mb <= 5; files <= 0; threads <= 0"}
    for bound in said["bounds"][:-1]:
        row = said["rows"][bound["row"]]
        assert bound["what"].startswith(f"{row['phase']}: {row['process']}")
    assert (tmp_path / "mine.csv").read_text().count("\n") == 1 + len(said["rows"])


@pytest.mark.parametrize(
    ("plan", "field"),
    [(Plan(chunks=10, warmup=9), "warmup"), (Plan(sessions=3, warmup_sessions=3), "warmup_sessions")],
)
def test_a_warm_up_that_leaves_nothing_is_refused(plan: Plan, field: str) -> None:
    """Before anything is started."""
    with pytest.raises(RequestError, match=field):
        run(plan)


def test_what_a_process_holds_is_read_from_the_system() -> None:
    """This process has memory, descriptors and threads; one that is gone has nothing."""
    import os

    mine = Usage.of(os.getpid())
    assert mine is not None
    assert mine.resident_bytes > 1 << 20
    assert mine.descriptors > 2
    assert mine.threads >= 1
    assert mine.cpu_s > 0
    assert Usage.of(2**22 + 1) is None


def test_what_was_not_measured_is_not_said_to_hold() -> None:
    """A process of which the system says nothing has empty cells and no bound that holds; growth counts in 1,000,000 bytes."""
    small, large = Usage(10_000_000, 8, 3, 0.0), Usage(15_000_001, 8, 4, 1.0)
    span = Span(
        "sessions",
        6,
        1.0,
        {"broker": small, "worker-1": None, "worker-2": small},
        {"broker": large, "worker-1": large, "worker-2": None},
    )
    rows = {row[1]: row for row in span.rows()}
    assert rows["broker"][4:] == pytest.approx((10.0, 15.000001, 5.000001, 8, 8, 3, 4))
    assert rows["worker-1"][4:] == rows["worker-2"][4:] == (None,) * 7
    verdicts = [bound.verdict for bound in span.bounds()]
    assert verdicts == ["MISSED", "holds", "MISSED", *["not measured"] * 6]


def test_it_is_said_what_others_took_of_the_machine() -> None:
    """Cores that were busy with the benchmark, with others, and with the host, since the begin."""

    class Nobody:
        @staticmethod
        def pids() -> dict[str, int]:
            return {}

    said = Others(cast(Stack, Nobody())).said()
    assert re.fullmatch(
        r"cores busy meanwhile: \d+\.\d\d with this, \d+\.\d\d with others, \d+\.\d\d taken by the host", said
    )
