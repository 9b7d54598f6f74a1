"""`reelwire bench jobs`: what the acknowledgement of a job costs, and ten thousand submissions at once.

First 100 clients submit in turn, one submission on the way at a time: what one costs from the call to the durable answer.
Beside each of them a page is appended to a file on the same disk and synchronized, which is the least that any durable answer
costs there. Then all of them at once, each with one on its way. Last of all many more submissions than may be queued, over all clients
at once; the broker is killed right after the last answer, started again, and asked what it has.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import JobError, OverloadError, ReelwireError
from .bench_report import Bound, Cell, Report, asked_for, load_before
from .bench_stack import Stack, stack
from .local import BROKER, READY_BROKER_S, wait_ready

if TYPE_CHECKING:
    from .. import Client

COLUMNS = ("phase", "clients", "submitted", "accepted", "refused", "lost", "p50_ms", "p99_ms", "max_ms", "each_ms")
ACK_MS_MOST = 2.0
LIMIT_S = 300.0
PAGE = bytes(4096)
"""What is synchronized beside each submission: about as much as the journal writes of one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        clients: attached at once.
        each: submissions of each client in the first two phases.
        flood: submissions in the last one, all clients together.
        queued: most jobs that the broker queues.
    """

    clients: int = 100
    each: int = 10
    flood: int = 10_000
    queued: int = 1000


def run(plan: Plan) -> Report:
    """Submit.

    Raises:
        ReelwireError: something else went wrong than too many submissions.
    """
    from .. import Client

    load, began = load_before(), time.monotonic()
    queue = max(plan.queued, 0)
    broker = {
        "jobs_queued_max": queue + 2 * plan.clients * plan.each,
        "jobs_queued_per_client_max": queue + 2 * plan.clients * plan.each,
    }
    worker: dict[str, object] = {"pipeline": "emulated", "jobs": "emulated", "job_options": {"step_s": "60"}}
    rows: list[tuple[Cell, ...]] = []
    with stack({"worker-1": worker}, broker) as running, ExitStack() as attached:
        clients = [
            attached.enter_context(Client(running.endpoint, name=f"client-{number}", connect_timeout_s=30.0))
            for number in range(plan.clients)
        ]
        turn, synchronized = _in_turn(clients, plan.each)
        rows.append(_row("in turn", plan.clients, turn, 1))
        at_once_began = time.monotonic()
        at_once = _at_once(clients, lambda client: [_submitted(client) for _ in range(plan.each)])
        rows.append(_row("at once", plan.clients, at_once, plan.clients, time.monotonic() - at_once_began))
        keys, refused, flood = _flooded(clients, plan)
        lost = _lost_over_restart(running, keys)
        rows.append(_row("flood", plan.clients, flood, plan.clients, refused=refused, lost=lost))
        rows.append(("fdatasync beside", 0, len(synchronized), None, None, None, *_numbers(synchronized)))
    p99 = rows[0][7]
    assert isinstance(p99, float)
    bounds = [
        Bound("an acknowledged submission, ms (p99, in turn)", p99, ACK_MS_MOST, row=0, of="p99"),
        Bound("an acknowledged submission, ms (each, at once)", rows[1][9], ACK_MS_MOST, row=1, of="each"),  # type: ignore[arg-type]
        Bound("accepted jobs that are gone after kill -9", float(lost), 0, row=2, of="lost"),
        Bound("submissions neither accepted nor refused", float(plan.flood - refused - len(keys)), 0, row=2, of="both"),
        Bound("submissions that were refused", float(refused), 1, "least", row=2, of="refused"),
    ]
    title = f"Submissions of {plan.clients} clients"
    notes = [f"{time.monotonic() - began:.1f} s in all; in ms from the call to the durable answer, at the client"]
    return Report("jobs", title, COLUMNS, rows, bounds, notes, asked=asked_for(plan), load=load)


def _in_turn(clients: list[Client], each: int) -> tuple[list[float], list[float]]:
    """Seconds of each submission, and of a page that was synchronized after it."""
    took, synchronized = [], []
    with tempfile.TemporaryFile(prefix="reelwire-", buffering=0) as file:
        for _ in range(each):
            for client in clients:
                took.append(_submitted(client))
                began = time.perf_counter()
                file.write(PAGE)
                os.fdatasync(file.fileno())
                synchronized.append(time.perf_counter() - began)
    return took, synchronized


def _submitted(client: Client) -> float:
    """Seconds that a submission took."""
    began = time.perf_counter()
    client.submit_edit("emulated", steps=1)
    return time.perf_counter() - began


def _at_once(clients: list[Client], work: Callable[[Client], list[float]]) -> list[float]:
    """What all clients measure, each on a thread, begun together."""
    gate = threading.Barrier(len(clients))

    def begun(client: Client) -> list[float]:
        gate.wait(LIMIT_S)
        return work(client)

    with ThreadPoolExecutor(len(clients)) as pool:
        return [seconds for measured in pool.map(begun, clients) for seconds in measured]


def _flooded(clients: list[Client], plan: Plan) -> tuple[set[str], int, list[float]]:
    """Ids of the accepted jobs, how many were refused with an advice, and what each answer took."""
    accepted: set[str] = set()
    refused: list[float] = []
    lock = threading.Lock()
    share = math.ceil(plan.flood / len(clients))

    def flood(client: Client) -> list[float]:
        took = []
        for _ in range(share):
            began = time.perf_counter()
            try:
                job = client.submit_edit("emulated", steps=1)
            except OverloadError as error:
                with lock:
                    refused.append(error.retry_after_s)
            else:
                with lock:
                    accepted.add(job.id)
            took.append(time.perf_counter() - began)
        return took

    took = _at_once(clients, flood)
    if any(seconds <= 0 for seconds in refused):
        raise ReelwireError("a submission was refused without a time to try again")
    return accepted, len(refused), took


def _lost_over_restart(running: Stack, accepted: set[str]) -> int:
    """Kill the broker, and count the accepted jobs that the next one doesn't know."""
    from .. import Client

    killed = running.pids()[BROKER]
    os.kill(killed, signal.SIGKILL)
    until = time.monotonic() + READY_BROKER_S
    while running.pids().get(BROKER, killed) == killed and time.monotonic() < until:
        running.supervisor.wait(0.05)
    wait_ready(running.supervisor, BROKER, READY_BROKER_S)
    with Client(running.endpoint, connect_timeout_s=READY_BROKER_S) as client:
        known = {job for job in accepted if _is_known(client, job)}
    return len(accepted - known)


def _is_known(client: Client, job: str) -> bool:
    try:
        return client.job(job, timeout=LIMIT_S).id == job
    except JobError:
        return False


def _row(
    phase: str,
    clients: int,
    took: list[float],
    at_once: int,
    seconds: float | None = None,
    *,
    refused: int = 0,
    lost: int = 0,
) -> tuple[Cell, ...]:
    numbers = _numbers(took, None if seconds is None else seconds / len(took), at_once)
    return (phase, clients, len(took), len(took) - refused, refused, lost, *numbers)


def _numbers(took: list[float], each: float | None = None, at_once: int = 1) -> tuple[float, float, float, float]:
    """Median, 99th percentile, most and share, in milliseconds."""
    ordered = sorted(took)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    share = sum(took) / at_once / len(took) if each is None else each
    return 1000 * statistics.median(ordered), 1000 * p99, 1000 * ordered[-1], 1000 * share
