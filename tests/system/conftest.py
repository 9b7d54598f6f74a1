"""Brokers and workers as real processes, and clients on real sockets; each test ends with nothing left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from reelwire import Chunk, Client, Session
from reelwire.workers.supervisor import Child, Supervisor

LAB = f"{Path(__file__).with_name('lab_pipeline.py')}:pipeline"
LIMIT_S = 60.0


@dataclass
class Daemon:
    """A process of ours, and what it said when it was ready."""

    process: subprocess.Popen[str]
    said: dict[str, Any]
    log: Path

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def stop(self) -> int:
        """Ask it to end, and kill it if it doesn't; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class Stack:
    """A broker with its workers and clients."""

    def __init__(self, folder: Path) -> None:
        """Start nothing yet."""
        self._folder = folder
        self._daemons: list[Daemon] = []
        self._clients: list[Client] = []
        self._codes: dict[str, int] = {}
        self.endpoint = ""

    def broker(self, listen: str = "tcp://127.0.0.1:*", **settings: object) -> Daemon:
        """Start the broker, on a port that the system chooses unless one is said."""
        daemon = self._start("broker", "--listen", listen, *_set(settings))
        self.endpoint = daemon.said["endpoint"]
        return daemon

    def broker_again(self, **settings: object) -> Daemon:
        """Start the broker where it was, with the same settings."""
        return self.broker(self.endpoint, **settings)

    def worker(self, name: str, pipeline: str = LAB, stages: str = "", **settings: object) -> Daemon:
        """Start a worker, and wait until it is ready."""
        chosen = ("--stages", stages) if stages else ()
        flags = ("--broker", self.endpoint, "--name", name, "--pipeline", pipeline, *chosen, *_set(settings))
        return self._start("worker", *flags)

    def group(self, name: str, world: int, *flags: str, **settings: object) -> list[Daemon]:
        """Start a group of workers, and wait until it is formed; rank 0 comes first in the list."""
        ranks = []
        for rank in reversed(range(world)):
            place = ("--group", name, "--rank", str(rank), "--world", str(world))
            ranks.append(self._start("worker", "--broker", self.endpoint, *place, *flags, *_set(settings)))
        return ranks[::-1]

    def supervised_group(self, supervisor: Supervisor, name: str, world: int, *flags: str) -> None:
        """Have a group of workers started, and started again whenever its ranks end; wait until it is formed."""
        for rank in range(world):
            place = ("--group", name, "--rank", str(rank), "--world", str(world))
            flags_of_rank = ("--broker", self.endpoint, *place, *flags, "--set", f"parent_pid={os.getpid()}")
            command = (sys.executable, "-P", "-m", "reelwire", "worker", *flags_of_rank)
            supervisor.start(Child(f"{name}-{rank}", command, environment={"OMP_NUM_THREADS": "1"}))
        for rank in range(world):
            supervisor.wait_ready(f"{name}-{rank}", LIMIT_S)

    def expect_code(self, daemon: Daemon, code: int) -> None:
        """A process that ends otherwise than well, as it should."""
        self._codes[daemon.log.name] = code

    def client(self, name: str = "") -> Client:
        """Connect a client; it is closed at the end."""
        client = Client(self.endpoint, name=name)
        self._clients.append(client)
        return client

    def _start(self, *arguments: str) -> Daemon:
        log = self._folder / f"{len(self._daemons)}-{arguments[0]}.log"
        ours = [name for name in os.environ if name.startswith("REELWIRE_") and name != "REELWIRE_SHARED_MEMORY"]
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "reelwire", *arguments],
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**kept, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        daemon = Daemon(process, {}, log)
        self._daemons.append(daemon)
        assert process.stdout is not None
        line = _line_within(process.stdout, LIMIT_S)
        assert line, f"ended before it was ready: {log.read_text()}"
        daemon.said = json.loads(line)
        assert daemon.said["event"] == "ready", daemon.said
        return daemon

    def end(self) -> None:
        """End everything, then assert that it ended as it should."""
        for client in self._clients:
            client.close()
        codes = {}
        for daemon in reversed(self._daemons):
            code = daemon.stop() if daemon.process.poll() is None else daemon.process.returncode
            codes[daemon.log.name] = code
            assert daemon.process.stdout is not None
            daemon.process.stdout.close()
        for daemon in self._daemons:
            with pytest.raises(ProcessLookupError):  # nothing that it started is left either
                os.killpg(daemon.process.pid, 0)
            if "broker" in daemon.log.name:  # a worker logs what a stage raises; a broker has nothing to trace
                assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()
        wrong = {name: code for name, code in codes.items() if code not in (self._codes.get(name, 0), -signal.SIGKILL)}
        assert not wrong, wrong


def _set(settings: dict[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def _line_within(stream: IO[str], limit_s: float) -> str:
    """A line of the stream, or nothing when the limit is over; the reader ends with the stream."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(limit_s)
    return lines[0] if lines else ""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Processes that end with the test."""
    before = set(threading.enumerate())
    stack = Stack(tmp_path)
    try:
        yield stack
    finally:
        stack.end()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def take() -> Callable[[Session, int], list[Chunk]]:
    """The next so many chunks of a session."""

    def taken(session: Session, count: int) -> list[Chunk]:
        chunks = []
        for _ in range(count):
            chunk = session.next_chunk(LIMIT_S)
            assert chunk is not None
            chunks.append(chunk)
        return chunks

    return taken
