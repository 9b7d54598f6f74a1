"""`reelwire broker`: the daemon that routes sessions between clients and workers."""

from __future__ import annotations

from typing import Annotated

import typer

from .shared import ConfigFile, Json, MediaRoots, StateDir, assignments, broker_flags, load_settings, print_json


def broker(
    listen: Annotated[
        str | None, typer.Option(help="Endpoint: tcp://HOST:PORT (a * lets the system choose) or ipc://PATH.")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Bind an address that other machines reach; nothing is encrypted.")
    ] = None,
    media_roots: MediaRoots = None,
    state_dir: StateDir = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of the broker.")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
    parent_pid: Annotated[int, typer.Option(hidden=True, help="End at once when this parent process is gone.")] = 0,
) -> None:
    """Run a broker until it is told to stop; SIGTERM and Ctrl-C drain, a second one ends it now.

    Prints one line of JSON on standard output when it listens. Logs go to standard error, as JSON where
    that is no terminal, or with --json.
    """
    from .. import __version__
    from ..broker.config import BrokerConfig
    from ..broker.loop import run
    from .logs import log_to_stderr

    if parent_pid:
        from ..workers.supervisor import die_with_parent

        die_with_parent(parent_pid)
    flags = broker_flags(listen, insecure, media_roots, state_dir)
    assigned = assignments(settings or (), "set")
    resolved = load_settings(config).resolve("broker", BrokerConfig, flags, assigned)

    def ready(endpoint: str) -> None:
        print_json({"event": "ready", "endpoint": endpoint, "version": __version__})

    log_to_stderr(as_json=as_json)
    raise typer.Exit(run(resolved.value, ready))
