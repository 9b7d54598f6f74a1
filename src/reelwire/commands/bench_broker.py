"""`reelwire bench broker`: how many chunks a second the broker serves, and what it computes for each, beside a forwarder.

The broker is the real one in its own process. Its peers do nothing but speak (see `bench_lean`): three workers with a no-op
stage each, and clients whose sessions hold a key, so that in every session two chunks are on their way. The forwarder (see
`bench_forwarder`) passes as many messages around the same hops, each for itself. Both take turns within each number of
sessions, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RequestError
from .bench_forwarder import ForwarderPeers
from .bench_lean import LeanPeers
from .bench_report import Bound, Cell, Report, asked_for, load_before, phases
from .bench_stack import cpu_s, helper, stack

if TYPE_CHECKING:
    import zmq

SESSIONS = (1, 8, 64, 256, 1024)
SESSIONS_MAX = 4096
CLIENTS_MAX = 8
IN_FLIGHT = 2
"""Chunks that a session has on their way: a key may be one chunk ahead of the output."""
REFERENCE, MANY = 64, 1024
RATE_SHARE_LEAST, CPU_TIMES_MOST, MANY_SHARE_LEAST = 0.2, 8.0, 0.7
COLUMNS = (
    "sessions",
    "chunks_per_s",
    "broker_cpu_us",
    "forwarder_per_s",
    "forwarder_cpu_us",
    "rate_of_forwarder",
    "cpu_of_forwarder",
    f"rate_of_{REFERENCE}",
)
_FORWARDER = (
    "import sys; from reelwire.commands.bench_forwarder import forward; forward(sys.argv[1], *map(int, sys.argv[2:]))"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: numbers of sessions, and for each so many turns of broker and forwarder of so many seconds."""

    sessions: tuple[int, ...] = SESSIONS
    rounds: int = 3
    seconds: float = 1.5


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn found: chunks a second, and microseconds of the serving process per chunk, all its threads together."""

    rate: float
    cpu_us: float


def counts(text: str) -> tuple[int, ...]:
    """Numbers of sessions that are written with commas between.

    Raises:
        RequestError: there is something else, or a number that isn't accepted.
    """
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= SESSIONS_MAX for number in numbers):
        accepted = f"numbers from 1 to {SESSIONS_MAX}, with commas between"
        raise RequestError("sessions", f"{text!r} is not accepted; accepted: {accepted}")
    return numbers


def run(plan: Plan) -> Report:
    """Measure each number of sessions.

    Raises:
        ReelwireError: the broker, or a peer, failed.
    """
    import zmq

    load = load_before()
    measured_s = 2.1 * len(plan.sessions) * plan.rounds * plan.seconds
    expected = f"{measured_s:.0f} s, and with many sessions at least as long again to open and end them"
    numbers = phases("broker", expected, plan.sessions, lambda number: f"{number} at once, {plan.rounds} turns of each")
    found: dict[int, tuple[list[Turn], list[Turn]]] = {}
    with stack({}, {"sessions_per_client_max": SESSIONS_MAX}) as running, zmq.Context() as context:
        pid = running.pids()["broker"]
        for number in numbers:
            found[number] = ([], [])
            for _ in range(plan.rounds):
                found[number][0].append(_broker_turn(context, running.endpoint, pid, number, plan.seconds))
                found[number][1].append(_forwarder_turn(context, number, plan.seconds))
    return _report(plan, found, load)


def _broker_turn(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, pid: int, sessions: int, seconds: float
) -> Turn:
    from ..workers.emulated import Emulation, emulated_spec

    peers = LeanPeers(context, endpoint, emulated_spec(Emulation(name="no-op")), min(sessions, CLIENTS_MAX))
    try:
        peers.open(sessions)
        before = cpu_s(pid)
        took_s, chunks = peers.run_for(seconds)
        turn = _turn(took_s, chunks, cpu_s(pid) - before)
        peers.end(sessions)
    finally:
        peers.close()
    return turn


def _forwarder_turn(context: zmq.Context[zmq.Socket[bytes]], sessions: int, seconds: float) -> Turn:
    clients = min(sessions, CLIENTS_MAX)
    with _forwarder(clients) as (endpoint, pid):
        peers = ForwarderPeers(context, endpoint, clients)
        try:
            peers.start(IN_FLIGHT * sessions)
            peers.run_for(seconds / 10)
            before = cpu_s(pid)
            took_s, came = peers.run_for(seconds)
            return _turn(took_s, came, cpu_s(pid) - before)
        finally:
            peers.close()


def _turn(took_s: float, chunks: int, computed_s: float) -> Turn:
    return Turn(chunks / took_s, 1e6 * computed_s / max(chunks, 1))


@contextmanager
def _forwarder(clients: int) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="reelwire-") as folder:
        endpoint = f"ipc://{folder}/forwarder"
        with helper(_FORWARDER, endpoint, str(clients)) as process:
            yield endpoint, process.pid


def _report(plan: Plan, found: dict[int, tuple[list[Turn], list[Turn]]], load: float) -> Report:
    rows: list[tuple[Cell, ...]] = []
    bounds: list[Bound] = []
    reference = _medians(found[REFERENCE][0])[0] if REFERENCE in found else None
    for at, (number, (served, forwarded)) in enumerate(found.items()):
        rate, cpu_us = _medians(served)
        bare_rate, bare_cpu_us = _medians(forwarded)
        share, times = rate / bare_rate, cpu_us / bare_cpu_us
        of_reference = rate / reference if reference else None
        rows.append((number, rate, cpu_us, bare_rate, bare_cpu_us, share, times, of_reference))
        if number == REFERENCE:
            name = f"{number} sessions: rate, of the forwarder's"
            bounds.append(Bound(name, share, RATE_SHARE_LEAST, "least", 0.0, at, "rate_of_forwarder"))
            name = f"{number} sessions: broker's CPU per chunk, of the forwarder's"
            bounds.append(Bound(name, times, CPU_TIMES_MOST, "most", 0.0, at, "cpu_of_forwarder"))
        elif number == MANY and of_reference is not None:
            name = f"rate at {number} sessions, of that at {REFERENCE}"
            bounds.append(Bound(name, of_reference, MANY_SHARE_LEAST, "least", 0.0, at, f"rate_of_{REFERENCE}"))
    title = f"Broker: three no-op stages, medians of {plan.rounds} turns of {plan.seconds:g} s, and a bare forwarder between"
    note = f"load of the machine before: {load:.2f}"
    return Report("broker", title, COLUMNS, rows, bounds, [note], asked=asked_for(plan), load=load)


def _medians(turns: list[Turn]) -> tuple[float, float]:
    return statistics.median(turn.rate for turn in turns), statistics.median(turn.cpu_us for turn in turns)
