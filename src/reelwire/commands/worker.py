"""`reelwire worker`: one process that serves stages of a pipeline."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .shared import ConfigFile, Json, assignments, load_settings, print_json


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
    options: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="Option of the pipeline.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of the worker.")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Run a worker process until it is told to stop.

    Prints one line of JSON on standard output when the broker knows it and all its stages have their weights. Logs go
    to standard error, as JSON where that is no terminal, or with --json.
    """
    from .. import __version__
    from ..settings import ClientSettings
    from ..workers.config import WorkerConfig
    from ..workers.loop import run
    from .logs import log_to_stderr

    layers = load_settings(config)
    flags: dict[str, object] = {
        "broker": broker,
        "name": name,
        "pipeline": pipeline,
        "stages": stages,
        "device": device,
        "options": assignments(options, "option") if options else None,
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
