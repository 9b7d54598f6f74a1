"""`reelwire bench soak`: a long session and many short ones, after which nothing may be left that wasn't there before.

Two workers share the emulated pipeline, so that what flows between its stages crosses processes, through shared memory
where there is some. Every frame is read: it must show its chunk and the keys that were held. Memory is compared after a
warm-up, in the middle of the long session and between the short ones; descriptors and threads while nothing runs;
segments of shared memory when all processes are gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ReelwireError, RequestError
from .bench_report import Bound, Cell, Report, asked_for, load_before, phases
from .bench_stack import Stack, Usage, stack

if TYPE_CHECKING:
    from .. import Client, Session

COLUMNS = (
    "phase",
    "process",
    "chunks",
    "seconds",
    "before_mb",
    "after_mb",
    "growth_mb",
    "files_before",
    "files_after",
    "threads_before",
    "threads_after",
)
HEADS = ("phase", "process", "chunks", "seconds", "MB", "after", "growth", "files", "after", "threads", "after")
LONG, SHORT = "one session", "sessions"
MB = 1e6
GROWTH_MB = 5.0
WORKERS = {"worker-1": ("encode", "decode"), "worker-2": ("denoise",)}
OPTIONS = {
    "encode_s": "0.0005",
    "denoise_s": "0.001",
    "decode_s": "0.0005",
    "latent_bytes": str(256 << 10),
    "condition_bytes": str(64 << 10),
    "frames": "4",
    "height": "128",
    "width": "192",
}
KEYS = ("w", "d")
LIMIT_S = 60.0
CHUNK_S, SESSION_S = 0.005, 0.04
"""Of a chunk and of a session's opening: to say beforehand how long it takes, and for nothing else."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        chunks: of the long session.
        warmup: its chunks before memory is first looked at.
        sessions: short ones, one after the other.
        session_chunks: of each.
        warmup_sessions: those of them before memory is first looked at.
    """

    chunks: int = 2000
    warmup: int = 300
    sessions: int = 200
    session_chunks: int = 5
    warmup_sessions: int = 30


@dataclass(frozen=True, slots=True)
class Span:
    """What the processes held at the begin and at the end of a phase; None where the system doesn't say."""

    phase: str
    chunks: int
    seconds: float
    before: dict[str, Usage | None]
    after: dict[str, Usage | None]

    def rows(self) -> Iterator[tuple[Cell, ...]]:
        """A row for each process."""
        for process, before in self.before.items():
            after = self.after[process]
            held: tuple[Cell, ...] = (None,) * 7
            if before is not None and after is not None:
                growth = after.resident_bytes - before.resident_bytes
                memory = [nbytes / MB for nbytes in (before.resident_bytes, after.resident_bytes, growth)]
                held = (*memory, before.descriptors, after.descriptors, before.threads, after.threads)
            yield self.phase, process, self.chunks, self.seconds, *held

    def bounds(self, first: int = 0) -> Iterator[Bound]:
        """What no process may do in this phase; descriptors and threads are counted between sessions alone.

        Args:
            first: number of this phase's first row in the report.
        """
        for row, (process, before) in enumerate(self.before.items(), start=first):
            after = self.after[process]
            memory = files = threads = None
            if before is not None and after is not None:
                memory = (after.resident_bytes - before.resident_bytes) / MB
                files, threads = after.descriptors - before.descriptors, after.threads - before.threads
            name = f"{self.phase}: {process}"
            yield Bound(f"{name} grows by, MB", memory, GROWTH_MB, "most", 0.0, row, "growth_mb")
            if self.phase == SHORT:
                yield Bound(f"{name}, more descriptors", files, 0, "most", 0.0, row, "files")
                yield Bound(f"{name}, more threads", threads, 0, "most", 0.0, row, "threads")


def run(plan: Plan) -> Report:
    """Play the long session, then the short ones.

    Raises:
        RequestError: a warm-up leaves nothing to look at.
        ReelwireError: a frame shows something else than it should.
    """
    from .. import Client, segment_files

    if plan.warmup > plan.chunks - 2:
        raise RequestError("warmup", f"{plan.warmup} is not accepted; accepted: less than chunks - 1")
    if plan.warmup_sessions >= plan.sessions:
        raise RequestError("warmup_sessions", f"{plan.warmup_sessions} is not accepted; accepted: less than sessions")
    there = set(segment_files.abandoned())
    load, began = load_before(), time.monotonic()
    options: dict[str, object] = {"pipeline": "emulated", "options": OPTIONS}
    expected_s = plan.chunks * CHUNK_S + plan.sessions * (SESSION_S + plan.session_chunks * CHUNK_S)
    words = {_long: f"{plan.chunks} chunks in one session", _short: f"{plan.sessions} sessions one after the other"}
    played = phases("soak", f"about {math.ceil(expected_s)} s on an idle machine", list(words), words.__getitem__)
    workers = {name: {**options, "stages": stages} for name, stages in WORKERS.items()}
    with stack(workers) as running, Client(running.endpoint) as client:
        spans = [play(running, client, plan) for play in played]
    left = set(segment_files.abandoned()) - there
    rows = [row for span in spans for row in span.rows()]
    title = f"Soak: {plan.chunks} chunks in one session, then {plan.sessions} sessions of {plan.session_chunks}"
    notes = [f"{time.monotonic() - began:.1f} s in all; memory is resident, in 1,000,000 bytes"]
    notes.append(f"load of the machine before: {load:.2f}")
    bounds = [bound for span in spans for bound in span.bounds([row[0] for row in rows].index(span.phase))]
    bounds.append(Bound("folders of segments left", len(left), 0))
    return Report("soak", title, COLUMNS, rows, bounds, notes, heads=HEADS, asked=asked_for(plan), load=load)


def _long(running: Stack, client: Client, plan: Plan) -> Span:
    with client.open_session("emulated", chunks=plan.chunks, timeout=LIMIT_S) as session:
        _hold(session)
        chunks = _checked(session)
        _take(chunks, plan.warmup)
        began, before = time.monotonic(), _usage(running)
        measured = plan.chunks - plan.warmup - 1  # the session still lives
        _take(chunks, measured)
        span = Span(LONG, measured, time.monotonic() - began, before, _usage(running))
        _take(chunks, 1)
    return span


def _short(running: Stack, client: Client, plan: Plan) -> Span:
    began, before = time.monotonic(), _usage(running)
    for number in range(plan.sessions):
        if number == plan.warmup_sessions:
            began, before = time.monotonic(), _usage(running)
        with client.open_session("emulated", chunks=plan.session_chunks, seed=number, timeout=LIMIT_S) as session:
            _hold(session)
            _take(_checked(session), plan.session_chunks)
    chunks = (plan.sessions - plan.warmup_sessions) * plan.session_chunks
    return Span(SHORT, chunks, time.monotonic() - began, before, _usage(running))


def _hold(session: Session) -> None:
    session.set_keys(KEYS)


def _checked(session: Session) -> Iterator[int]:
    """The chunks' numbers, after a look at their frames."""
    from ..workers.emulated import read

    while (chunk := session.next_chunk(LIMIT_S)) is not None:
        for frame in chunk.frames:
            shown = read(frame)
            if (shown.index, sorted(shown.keys)) != (chunk.index, sorted(KEYS)):
                raise ReelwireError(f"chunk {chunk.index} shows {shown.index} with {', '.join(shown.keys) or 'no key'}")
        yield chunk.index


def _take(chunks: Iterator[int], count: int) -> None:
    for _ in range(count):
        if next(chunks, None) is None:
            raise ReelwireError("the session ended before its last chunk")


def _usage(running: Stack) -> dict[str, Usage | None]:
    return {name: Usage.of(pid) for name, pid in sorted(running.pids().items())}
