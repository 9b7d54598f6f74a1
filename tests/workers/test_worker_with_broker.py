"""A worker process and a broker process: losing each other, and coming back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reelwire import Client, Control, SessionClosed
from reelwire.workers.supervisor import Backoff, Child, Supervisor

LIMIT_S = 60.0
PIPELINE = f"{Path(__file__).parent / 'numpy_pipeline.py'}:build"
REELWIRE = (sys.executable, "-P", "-m", "reelwire")


class Machine:
    """A broker and a worker under a supervisor, with everything that they say."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.supervisor = Supervisor(self._hear, lambda: Backoff(0.01))
        self.start_broker("broker", "tcp://127.0.0.1:*")
        self.endpoint = str(self.supervisor.wait_ready("broker", LIMIT_S)["endpoint"])
        flags = ("--broker", self.endpoint, "--name", "w", "--pipeline", PIPELINE, "--json")
        self.supervisor.start(Child("worker", (*REELWIRE, "worker", *flags), stop_rank=1))
        self.supervisor.wait_ready("worker", LIMIT_S)

    def start_broker(self, name: str, endpoint: str) -> None:
        """At that endpoint."""
        flags = ("--listen", endpoint, "--set", "heartbeat_s=0.2", "--json")
        self.supervisor.start(Child(name, (*REELWIRE, "broker", *flags)))

    def _hear(self, name: str, kind: str, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait_for(self, part: str, times: int) -> None:
        """Until that many lines hold `part`."""
        with self._changed:
            came = self._changed.wait_for(lambda: sum(part in line for line in self.lines) >= times, LIMIT_S)
        assert came, "\n".join(self.lines)

    def stream(self) -> list[Any]:
        """Frames of a session of three chunks."""
        with (
            Client(self.endpoint) as client,
            client.open_session("toy", seed=3, chunks=3, timeout=LIMIT_S) as session,
        ):
            session.press("w")
            return [chunk.frames.tolist() for chunk in session]


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A broker and a ready worker, which are gone in the end."""
    made = Machine()
    try:
        yield made
    finally:
        made.supervisor.stop()
    assert made.supervisor.pids() == {}


def test_streaming_33_a_killed_worker_is_replaced_under_its_name(machine: Machine) -> None:
    """The new process has a new attachment; sessions run as before."""
    frames = machine.stream()
    os.kill(machine.supervisor.pids()["worker"], signal.SIGKILL)
    machine.wait_for("stage_ready", 4)
    assert machine.stream() == frames


def test_streaming_33_a_worker_finds_a_broker_that_was_killed_and_started_again(machine: Machine) -> None:
    """Its process and its weights stay; it says hello and is ready."""
    frames = machine.stream()
    before = machine.supervisor.pids()
    os.kill(before["broker"], signal.SIGSTOP)
    machine.wait_for("attachment_lost", 1)
    os.kill(before["broker"], signal.SIGKILL)
    machine.wait_for("starts again", 1)
    machine.start_broker("second", machine.endpoint)
    machine.wait_for("stage_ready", 4)
    assert machine.stream() == frames
    assert machine.supervisor.pids()["worker"] == before["worker"]


def test_a_worker_that_was_asked_to_stop_delivers_what_was_accepted(machine: Machine) -> None:
    """Sessions that live there are closed after their accepted chunks; then the worker ends, with exit code 0."""
    expected = machine.stream()
    seen: list[Any] = []
    with (
        Client(machine.endpoint) as client,
        client.open_session("toy", seed=3, chunks=3, timeout=LIMIT_S) as session,
    ):
        session.submit(0, Control(keys=["w"]))
        os.kill(machine.supervisor.pids()["worker"], signal.SIGTERM)
        machine.wait_for("worker_draining", 1)
        with pytest.raises(SessionClosed, match="'w' stops"):
            seen.extend(chunk.frames.tolist() for chunk in session)
    assert seen == expected[:1]
    machine.wait_for('"exit_code": 0', 1)


def test_the_broker_leaves_first_and_the_worker_after_it(machine: Machine) -> None:
    """Each with exit code 0."""
    machine.stream()
    machine.supervisor.stop()
    assert machine.supervisor.wait(0) is None
    assert not [line for line in machine.lines if "exit code" in line]
    assert [line for line in machine.lines if '"stopped"' in line and '"exit_code": 0' in line]
