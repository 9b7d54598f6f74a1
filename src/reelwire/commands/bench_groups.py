"""`reelwire bench groups`: a stream and a job on one worker group, and what each takes from the other.

The ranks are real processes with gloo between them; the job's steps and the stream's stages take the time that they are
told to. First the job alone, then the stream alone, then both, by turns, as often as asked for. The stream is played at the
pace of its media, with a key held, so that its chunks come at any moment of a step. What a yield costs is measured inside
of the job, from the end of one step to the begin of the next, where nothing slipped in.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ReelwireError
from .bench_report import Bound, Cell, Report, asked_for, load_before, phases
from .bench_stack import stack

if TYPE_CHECKING:
    from .. import Client, Job, Session

COLUMNS = (
    "round",
    "phase",
    "seconds",
    "chunks",
    "chunk_p50_s",
    "chunk_max_s",
    "own_p50_s",
    "yield_p50_ms",
    "yield_p99_ms",
)
GROUP = "edit"
LIMIT_S = 300.0
GROWTH_MOST = 0.02
YIELD_MS_MOST = 1.0
FPS = 20.0
"""Of the stream: a chunk has 12 frames, and is played for 0.6 s."""
SLACK_S = 0.02
"""What a chunk's way through broker and client may add to one step and its own time, on a machine with others on it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        world: ranks of the group.
        steps: of the job.
        step_s: seconds of a step.
        denoise_s: seconds of the stream's grouped stage for a chunk.
        rounds: how often all of it.
    """

    world: int = 2
    steps: int = 20
    step_s: float = 0.4
    denoise_s: float = 0.06
    rounds: int = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """One phase of a round.

    Attributes:
        seconds: that the job took from its first step to its last, or the stream from its first chunk.
        waits: seconds of each chunk at its grouped stage, from when it could begin, sent and with no chunk before it, to its
            end.
        yields_s: median and 99th percentile of a yield, in seconds; of a job alone.
    """

    phase: str
    seconds: float
    waits: tuple[float, ...] = ()
    yields_s: tuple[float, float] | None = None


def run(plan: Plan) -> Report:
    """Play all rounds.

    Raises:
        ReelwireError: a job failed, or a stream ended early.
    """
    from .. import Client

    load, began = load_before(), time.monotonic()
    stream = {"denoise_s": str(plan.denoise_s), "encode_s": "0.001", "decode_s": "0.001", "fps": str(FPS)}
    shared: dict[str, object] = {
        "pipeline": "emulated",
        "options": stream,
        "jobs": "emulated",
        "job_options": {"step_s": str(plan.step_s), "times": "1"},
        "group": GROUP,
        "world": plan.world,
    }
    workers = {f"{GROUP}-{rank}": {**shared, "rank": rank} for rank in range(plan.world)}
    chunks = max(4, int(plan.steps * plan.step_s / (12 / FPS)) - 2)
    seconds = plan.rounds * (2 * plan.steps * plan.step_s + chunks * 12 / FPS)
    words = {number: f"round {number + 1} of {plan.rounds}" for number in range(plan.rounds)}
    played = phases("groups", f"about {math.ceil(seconds) + 10} s", list(words), words.__getitem__)
    with stack(workers) as running, Client(running.endpoint) as client:
        _warm_up(client)
        rounds = [_round(client, plan, chunks) for _ in played]
    return _report(plan, rounds, load, time.monotonic() - began)


def _warm_up(client: Client) -> None:
    client.submit_edit("emulated", steps=2).result(timeout=LIMIT_S)
    with client.open_session("emulated", chunks=2, timeout=LIMIT_S) as session:
        _waits(session, 2)


def _round(client: Client, plan: Plan, chunks: int) -> tuple[Measured, Measured, Measured, Measured]:
    """A job alone, a stream alone, then both: the job's and the stream's."""
    alone, yields = _job(client, plan)
    with client.open_session("emulated", chunks=chunks, pace="realtime", timeout=LIMIT_S) as session:
        began = time.monotonic()
        waits = _waits(session, chunks)
        quiet = Measured("stream alone", time.monotonic() - began, waits)
    job = client.submit_edit("emulated", steps=plan.steps)
    _until_running(job)
    with client.open_session("emulated", chunks=chunks, pace="realtime", timeout=LIMIT_S) as session:
        began = time.monotonic()
        waits = _waits(session, chunks)
        stream_s = time.monotonic() - began
    state = job.status().state
    if state != "running":
        raise ReelwireError(f"the job was {state} before the stream was through: more steps are needed")
    beside, _ = _ended(job)
    return (
        Measured("job alone", alone, yields_s=yields),
        quiet,
        Measured("job beside", beside),
        Measured("stream beside", stream_s, waits),
    )


def _job(client: Client, plan: Plan) -> tuple[float, tuple[float, float]]:
    return _ended(client.submit_edit("emulated", steps=plan.steps))


def _ended(job: Job) -> tuple[float, tuple[float, float]]:
    """How long the steps took in all, as the job itself measured it, and its yields."""
    job.result(timeout=LIMIT_S)
    facts = job.status().facts
    return float(str(facts["steps_s"])), (float(str(facts["yield_p50_s"])), float(str(facts["yield_p99_s"])))


def _until_running(job: Job) -> None:
    for event in job.progress():
        if event.state == "running" and event.step > 0:
            return
    raise ReelwireError(f"the job ended before the stream began: {job.status()}")


def _waits(session: Session, chunks: int) -> tuple[float, ...]:
    """How long each chunk took at its grouped stage, with a key held."""
    session.press("w")
    waits, before = [], 0.0
    for _ in range(chunks):
        chunk = session.next_chunk(LIMIT_S)
        if chunk is None:
            raise ReelwireError("the stream ended before its last chunk")
        stage = chunk.timing.stages["denoise"]
        waits.append(stage.completed_s - max(stage.admitted_s, before))
        before = stage.completed_s
    return tuple(waits)


def _report(plan: Plan, rounds: Sequence[tuple[Measured, ...]], load: float | None, seconds: float) -> Report:
    rows: list[tuple[Cell, ...]] = []
    bounds: list[Bound] = []
    for number, (alone, quiet, beside, stream) in enumerate(rounds):
        own = statistics.median(quiet.waits)
        for measured in (alone, quiet, beside, stream):
            waits, yields = measured.waits, measured.yields_s
            rows.append(
                (
                    number + 1,
                    measured.phase,
                    measured.seconds,
                    len(waits),
                    statistics.median(waits) if waits else None,
                    max(waits) if waits else None,
                    own if measured is stream else None,
                    yields[0] * 1000 if yields else None,
                    yields[1] * 1000 if yields else None,
                )
            )
        first = 4 * number
        assert alone.yields_s is not None
        bounds.append(Bound("a yield, ms (median)", alone.yields_s[0] * 1000, YIELD_MS_MOST, row=first, of="yield"))
        most = plan.step_s + own
        bounds.append(Bound("longest wait of a chunk, s", max(stream.waits), most, "most", SLACK_S, first + 3, "wait"))
        given = len(stream.waits) * own
        grown = alone.seconds * (1 + GROWTH_MOST) + given
        bounds.append(Bound("the job beside a stream, s", beside.seconds, grown, row=first + 2, of="seconds"))
    title = f"A job of {plan.steps} steps of {plan.step_s:g} s and a stream, on {plan.world} ranks"
    notes = [f"{seconds:.1f} s in all; a chunk's time is from when its task was there to its result, at the broker"]
    return Report("groups", title, COLUMNS, rows, bounds, notes, asked=asked_for(plan), load=load)
