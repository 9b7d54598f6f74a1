"""A broker and workers for the length of a benchmark: the commands of this package as children, and what they take."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from ..errors import ReelwireError
from .local import (
    BROKER,
    READY_BROKER_S,
    READY_WORKER_S,
    Endings,
    broker_child,
    stopped_by_signals,
    wait_ready,
    worker_child,
)
from .shared import tell

if TYPE_CHECKING:
    from ..workers.supervisor import Supervisor

OUTPUT_LINES = 40


@dataclass(frozen=True, slots=True)
class Stack:
    """What runs.

    Attributes:
        endpoint: of the broker.
        supervisor: whose children broker and workers are.
    """

    endpoint: str
    supervisor: Supervisor

    def pids(self) -> dict[str, int]:
        """Process ids by name; the broker's is ``broker``."""
        return self.supervisor.pids()


@contextmanager
def stack(workers: Mapping[str, Mapping[str, object]], broker: Mapping[str, object] | None = None) -> Iterator[Stack]:
    """A broker on an ipc path of its own and workers at it, ready; all are gone when the block is left.

    Neither a file of settings nor the environment counts, so that a benchmark is the same everywhere.

    Args:
        workers: name to settings of a worker, other than the defaults.
        broker: settings of the broker, other than the defaults.

    Raises:
        ReelwireError: a child fell over, or the benchmark was stopped by a signal.
    """
    from ..broker.config import BrokerConfig
    from ..settings import Settings
    from ..workers.config import WorkerConfig
    from ..workers.supervisor import Supervisor

    layers = Settings({}, "", {})
    said: deque[str] = deque(maxlen=OUTPUT_LINES)
    endings = Endings()
    try:
        with tempfile.TemporaryDirectory(prefix="reelwire-") as folder, stopped_by_signals(endings):
            flags = {"listen": f"ipc://{folder}/broker", "state_dir": f"{folder}/state", **(broker or {})}
            supervisor = Supervisor(forward=lambda name, kind, line: _keep(said, name, kind, line))
            try:
                supervisor.start(broker_child(layers.resolve("broker", BrokerConfig, flags)))
                endpoint = str(wait_ready(supervisor, BROKER, READY_BROKER_S)["endpoint"])
                for name, settings in workers.items():
                    supervisor.start(worker_child(name, layers.resolve("worker", WorkerConfig, settings), endpoint))
                for name in workers:
                    wait_ready(supervisor, name, READY_WORKER_S)
                yield Stack(endpoint, supervisor)
            finally:
                endings.stop(supervisor)
    except KeyboardInterrupt:
        raise ReelwireError("stopped; nothing of the benchmark runs any more") from None
    except ReelwireError:
        if os.environ.get("REELWIRE_DEBUG"):
            tell("what the processes said last:\n" + "\n".join(said))
        raise


def _keep(said: deque[str], name: str, kind: str, line: str) -> None:
    if kind == "stderr":
        said.append(f"{name}: {line}")


class Others:
    """How much of the machine others take while a benchmark runs: what that measures is theirs too.

    Args:
        running: the benchmark's processes, this one besides.
    """

    def __init__(self, running: Stack) -> None:
        """It begins now."""
        self._running = running
        self._began = time.monotonic()
        self._then = self._now()

    def said(self) -> str:
        """A sentence about them since the begin; empty where the system doesn't say."""
        now, wall_s = self._now(), time.monotonic() - self._began
        if now is None or self._then is None or not wall_s:
            return ""
        busy, stolen, ours = ((after - before) / wall_s for before, after in zip(self._then, now, strict=True))
        others = max(0.0, busy - ours)
        return f"cores busy meanwhile: {ours:.2f} with this, {others:.2f} with others, {stolen:.2f} taken by the host"

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds that all cores were busy, that the host kept them, and that our processes computed."""
        usages = [Usage.of(pid) for pid in (os.getpid(), *self._running.pids().values())]
        ours_s = sum(usage.cpu_s for usage in usages if usage is not None)
        with suppress(OSError, ValueError, IndexError):
            ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
            user, nice, system, _idle, _wait, hard, soft, stolen = (tick / os.sysconf("SC_CLK_TCK") for tick in ticks)
            return user + nice + system + hard + soft, stolen, ours_s
        return None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds now.

    Attributes:
        resident_bytes: its memory.
        descriptors: open files.
        threads: of it.
        cpu_s: seconds that it has computed since its start.
    """

    resident_bytes: int
    descriptors: int
    threads: int
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> Usage | None:
        """Read from the proc filesystem; None where there is none, or no such process."""
        place = Path(f"/proc/{pid}")
        with suppress(OSError, ValueError, IndexError):
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            ticks = (place / "stat").read_text().rpartition(")")[2].split()[11:13]
            return cls(
                int(status["VmRSS"].split()[0]) * 1024,
                len(list((place / "fd").iterdir())),
                int(status["Threads"]),
                sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
            )
        return None


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed since its start.

    Raises:
        ReelwireError: the system doesn't say.
    """
    usage = Usage.of(pid)
    if usage is None:
        raise ReelwireError(
            f"the system doesn't say what process {pid} has computed; this benchmark needs Linux's /proc"
        )
    return usage.cpu_s


@contextmanager
def helper(program: str, *arguments: str) -> Iterator[Popen[bytes]]:
    """A process of this interpreter for the length of the block.

    Args:
        program: what it runs; it finds the arguments in ``sys.argv``, last the id of this process.
        arguments: texts.
    """
    process = Popen([sys.executable, "-P", "-c", program, *arguments, str(os.getpid())])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
