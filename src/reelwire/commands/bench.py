"""`reelwire bench NAME`: the benchmarks, as tables, as JSON, and as rows of a CSV.

One command per benchmark: it takes the flags, calls ``run`` of its module ``bench_NAME.py``, which is imported only then,
and hands the report to `publish`. A bound that is missed is printed as missed; it is a failure of the command with
``--strict`` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .shared import Json

bench = typer.Typer(
    help="Benchmarks: tables, JSON, and rows in benchmarks/NAME.csv. They measure: a bound that is missed is printed as "
    "missed, and the exit code is 0 all the same, unless --strict is given.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Csv = Annotated[
    Path | None,
    typer.Option(
        "--csv", help="Where the rows are appended; its folder must be there. (default: benchmarks/NAME.csv here)"
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit with 1 if a bound is missed or couldn't be measured. (default: exit with 0, it only measures)",
    ),
]


@bench.command()
def schedule(
    encode_s: Annotated[float, typer.Option(min=0, help="Time of that stage for a chunk.")] = 0.030,
    denoise_s: Annotated[float, typer.Option(min=0, help="The same.")] = 0.120,
    decode_s: Annotated[float, typer.Option(min=0, help="The same.")] = 0.025,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a session that are measured.")] = 60,
    warmup: Annotated[int, typer.Option(min=1, help="Chunks before them.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Sessions of each kind, side by side.")] = 5,
    timeline: Annotated[Path | None, typer.Option(help="Folder for a picture of each kind's first chunks.")] = None,
    path: Csv = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Chunk period and latencies of emulated stages, beside what can't be beaten; takes about a minute."""
    from .bench_report import check_csv, publish
    from .bench_schedule import Plan, run

    check_csv(path)
    report = run(Plan(encode_s, denoise_s, decode_s, chunks, warmup, rounds), timeline)
    publish(report, as_json=as_json, path=path, strict=strict)


@bench.command()
def broker(
    sessions: Annotated[str, typer.Option(help="How many at once, one after the other.")] = "1,8,64,256,1024",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of broker and forwarder for each of them.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of a turn.")] = 1.5,
    path: Csv = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Chunks a second that the broker serves and what it computes for each, beside a bare forwarder; about two minutes."""
    from .bench_broker import Plan, counts, run
    from .bench_report import check_csv, publish

    check_csv(path)
    publish(run(Plan(counts(sessions), rounds, seconds)), as_json=as_json, path=path, strict=strict)


@bench.command()
def payload(
    rounds: Annotated[int, typer.Option(min=1, help="How often each size crosses, each way.")] = 200,
    path: Csv = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """A tensor to another process and one byte back: shared memory beside ZeroMQ's ipc, and beside one copy; some seconds."""
    from .bench_payload import Plan, run
    from .bench_report import check_csv, publish

    check_csv(path)
    publish(run(Plan(rounds)), as_json=as_json, path=path, strict=strict)


@bench.command()
def soak(
    chunks: Annotated[int, typer.Option(min=3, help="Chunks of the long session.")] = 2000,
    warmup: Annotated[int, typer.Option(min=1, help="Its chunks before memory is first looked at.")] = 300,
    sessions: Annotated[int, typer.Option(min=1, help="Short sessions, one after the other.")] = 200,
    session_chunks: Annotated[int, typer.Option(min=1, help="Chunks of each.")] = 5,
    warmup_sessions: Annotated[int, typer.Option(min=0, help="Those before memory is first looked at.")] = 30,
    path: Csv = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """What broker and workers hold after a long session and many short ones; about half a minute."""
    from .bench_report import check_csv, publish
    from .bench_soak import Plan, run

    check_csv(path)
    publish(
        run(Plan(chunks, warmup, sessions, session_chunks, warmup_sessions)), as_json=as_json, path=path, strict=strict
    )


@bench.command()
def groups(
    world: Annotated[int, typer.Option(min=1, help="Ranks of the group.")] = 2,
    steps: Annotated[int, typer.Option(min=8, help="Of the job.")] = 20,
    step_s: Annotated[float, typer.Option(min=0.01, help="Seconds of a step.")] = 0.4,
    denoise_s: Annotated[float, typer.Option(min=0, help="Seconds of the stream's grouped stage for a chunk.")] = 0.06,
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it is played.")] = 2,
    path: Csv = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """A stream and a job on one worker group: what a chunk waits, what the job loses, what a yield costs; about a minute."""
    from .bench_groups import Plan, run
    from .bench_report import check_csv, publish

    check_csv(path)
    publish(run(Plan(world, steps, step_s, denoise_s, rounds)), as_json=as_json, path=path, strict=strict)


@bench.command()
def jobs(
    clients: Annotated[int, typer.Option(min=1, help="Attached at once.")] = 100,
    each: Annotated[int, typer.Option(min=1, help="Submissions of each, in turn and then at once.")] = 10,
    flood: Annotated[int, typer.Option(min=1, help="Submissions in the end, all clients together.")] = 10_000,
    queued: Annotated[int, typer.Option(min=1, help="Most jobs that are queued beside those before.")] = 1000,
    path: Csv = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """What the durable acknowledgement of a job takes, and many more submissions than may be queued; about a minute."""
    from .bench_jobs import Plan, run
    from .bench_report import check_csv, publish

    check_csv(path)
    publish(run(Plan(clients, each, flood, queued)), as_json=as_json, path=path, strict=strict)
