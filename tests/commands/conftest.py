"""Commands as a person runs them: processes of this interpreter, whose ends are waited for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LAB = f"{Path(__file__).resolve().parents[1] / 'system' / 'lab_pipeline.py'}:pipeline"
LIMIT_S = 90.0


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one line that it wrote to standard error; fails the test when it is a traceback or more than one."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        assert lines[0].startswith("reelwire: ")
        return lines[0].removeprefix("reelwire: ")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without settings of reelwire, one thread for arithmetic, no width of somebody's terminal."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REELWIRE_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(extra or {})}


def command(*arguments: str) -> list[str]:
    """The argument list of a command."""
    return [sys.executable, "-P", "-m", "reelwire", *arguments]


Reelwire = Callable[..., Ended]


@pytest.fixture
def reelwire(tmp_path: Path) -> Reelwire:
    """Run a command in an empty folder and wait for its end."""

    def run(*arguments: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> Ended:
        done = subprocess.run(
            command(*arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            cwd=tmp_path,
            env=environment(env),
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reelwire:
    """Run a command in this process, which is faster; for those that end before they start anything."""
    for name in [name for name in os.environ if name.startswith("REELWIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        from reelwire.cli import run as run_command

        code = run_command(list(arguments))
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


def marked(mark: str) -> dict[int, str]:
    """Processes that were started, however deep, with ``REELWIRE_MARK=mark`` in their environment: command lines by id."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone by now
            if f"REELWIRE_MARK={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def left_running(mark: str) -> list[str]:
    """Command lines of the processes that `marked` finds."""
    return list(marked(mark).values())


@contextmanager
def running(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that runs while the block does; it is asked to end, and killed if it doesn't."""
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment(env)
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a daemon says on standard output when it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        raise AssertionError(f"ended before it was ready: {process.stderr.read()}")
    said: dict[str, Any] = json.loads(line)
    assert said["event"] == "ready", said
    return said


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A small picture file."""
    from PIL import Image

    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    """The endpoint of a broker of its own, on a port that the system chose."""
    with running("broker", "--listen", "tcp://127.0.0.1:*", "--json", cwd=tmp_path) as process:
        yield str(ready_line(process)["endpoint"])


@pytest.fixture
def lab(broker: str, tmp_path: Path) -> Iterator[str]:
    """The endpoint of a broker with one worker that serves the lab pipeline."""
    with running("worker", "--broker", broker, "--pipeline", LAB, "--name", "lab-worker", cwd=tmp_path) as process:
        ready_line(process)
        yield broker
