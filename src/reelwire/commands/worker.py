"""`reelwire worker`: one process that serves stages of a pipeline."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .shared import ConfigFile, JobOptions, Json, Options, assignments, load_settings, print_json


def worker(
    broker: Annotated[
        str | None, typer.Option("--broker", "--endpoint", help="Where the broker listens. (default: REELWIRE_BROKER)")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name; a new worker under an old name replaces the old one.")] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="Name of a pipeline, or path/to/file.py:object. (default: world)")
    ] = None,
    stages: Annotated[str | None, typer.Option(help="Stages to serve, separated by commas. (default: all)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N. (default: cpu)")] = None,
    options: Options = None,
    group: Annotated[str | None, typer.Option(help="Name of the worker group that this is a rank of.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Which rank of the group; 0 leads. (default: 0)")] = None,
    world: Annotated[int | None, typer.Option(min=1, help="How many ranks the group has. (default: 1)")] = None,
    jobs: Annotated[
        str | None,
        typer.Option(help="Jobs to do beside the stream: a name, or path/to/file.py:object. (default: none)"),
    ] = None,
    job_options: JobOptions = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of the worker.")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Run a worker process until it is told to stop.

    Prints one line of JSON on standard output when the broker knows it and all its stages have their weights; the first
    rank of a group when all ranks have met. Logs go to standard error, as JSON where that is no terminal, or with --json.

    The ranks of a group are started one by one, each with its --rank, in any order and on any machine that reaches
    the broker; rank 0 must be found by the others at its setting `group_host`.
    """
    from .. import __version__
    from ..settings import ClientSettings
    from ..workers.config import WorkerConfig
    from ..workers.loop import run
    from .logs import log_to_stderr

    layers = load_settings(config)
    flags: dict[str, object] = {
        "broker": broker,
        "name": f"{group}-{rank or 0}" if group is not None and name is None else name,
        "pipeline": pipeline,
        "stages": stages,
        "device": device,
        "options": assignments(options, "option") if options else None,
        "group": group,
        "rank": rank,
        "world": world,
        "jobs": jobs,
        "job_options": assignments(job_options, "job-option") if job_options else None,
    }
    assigned = assignments(settings or (), "set")
    resolved = layers.resolve("worker", WorkerConfig, flags, assigned)
    if resolved.origins["broker"].layer == "default":
        client = layers.resolve("client", ClientSettings)
        flags["broker"] = client.value.endpoint
        resolved = layers.resolve("worker", WorkerConfig, flags, assigned)

    def ready(known_as: str) -> None:
        print_json({"event": "ready", "name": known_as, "broker": resolved.value.broker, "version": __version__})

    log_to_stderr(as_json=as_json)
    code = run(resolved.value, ready)
    # Everything is closed, and to take an interpreter with torch in it apart takes seconds that somebody waits for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
