"""The benchmark of payloads: it carries real bytes both ways, leaves nothing, and says what it can't do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire.commands import bench_payload, bench_stack
from reelwire.commands.bench_payload import Plan, run
from reelwire.errors import ReelwireError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs shared memory")


@LINUX
def test_every_way_is_measured_at_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows a size, the other process has seen the same bytes, and no file and no process is left."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))
    started: list[subprocess.Popen[Any]] = []

    def start(*args: Any, **words: Any) -> subprocess.Popen[Any]:
        started.append(subprocess.Popen(*args, **words))
        return started[-1]

    monkeypatch.setattr(bench_stack, "Popen", start)
    report = run(Plan(rounds=3, sizes=(300_000, 70_000)))
    ways = [row[:3] for row in report.rows]
    assert ways == [(nbytes, way, 3) for nbytes in (300_000, 70_000) for way in ("shared", "ipc", "copy")]
    assert all(len(row) == len(report.columns) for row in report.rows)
    assert [("300000" in bound.what, bound.kind) for bound in report.bounds] == [(True, "most"), (True, "most")]
    bounds = [str(row["bound"]) for row in report.kept()]
    assert [text.count("p50_ms <=") for text in bounds] == [2, 0, 0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == []
    assert [process.returncode is not None for process in started] == [True]


@LINUX
def test_wrong_bytes_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that doesn't fit the tensor ends the benchmark, however fast it came."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(bench_payload, "_answer", lambda content: bytes(((int(content[0]) + 1) % 256,)))
    with pytest.raises(ReelwireError, match="has read other bytes"):
        run(Plan(rounds=1, sizes=(70_000,)))
    assert list(tmp_path.iterdir()) == []


@LINUX
def test_a_silent_other_process_is_waited_for_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in a sentence instead of hanging."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(bench_payload, "_CONSUMER", "import sys")
    monkeypatch.setattr(bench_payload, "ANSWER_LIMIT_MS", 10)
    with pytest.raises(ReelwireError, match="didn't answer"):
        run(Plan(rounds=1, sizes=(70_000,)))
    assert list(tmp_path.iterdir()) == []


def test_without_shared_memory_there_is_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the folder that isn't there."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path / "nowhere"))
    with pytest.raises(ReelwireError, match="no shared memory below"):
        run(Plan(rounds=1, sizes=(70_000,)))


def test_the_answer_tells_tensors_apart() -> None:
    """It is made of the first byte, of one in 64 KiB, and of the last."""
    content = np.zeros(200_000, np.uint8)
    answers = {bench_payload._answer(content)}
    for index, value in ((0, 1), (65536, 2), (131072, 4), (199_999, 8)):
        content[index] = value
        answers.add(bench_payload._answer(content))
    assert len(answers) == 5
