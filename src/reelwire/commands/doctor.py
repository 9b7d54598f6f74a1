"""`reelwire doctor`: devices, attention, packages, limits, shared memory and the broker, each with what can be done."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from .shared import ConfigFile, Endpoint, Json, load_settings, print_json, print_table


def doctor(
    reap: Annotated[bool, typer.Option("--reap", help="Remove shared memory that dead processes left.")] = False,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Look at this machine: what can run here, what is missing, what is tight.

    Ends with 1 if something doesn't work that everybody needs or that was asked for: a package of the base that is missing,
    any that is too old, a torch that can't be imported, fewer than 256 open files, a broker that was named and doesn't
    answer.
    """
    from ..settings import ClientSettings
    from . import diagnosis

    client = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint})
    named = client.origins["endpoint"].layer != "default"
    settings = client.value
    findings = [
        *diagnosis.machine(),
        *diagnosis.limits(),
        *diagnosis.shared_memory(reap=reap),
        *diagnosis.packages(),
        *diagnosis.devices(),
        *diagnosis.broker(settings.endpoint, settings.connect_timeout_s, asked_for=named),
    ]
    bad = [finding for finding in findings if finding.state == "bad"]
    if as_json:
        print_json({"ok": not bad, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        rows = [(each.area, each.what, each.found, each.state, each.hint) for each in findings]
        print_table("What is here", ("area", "what", "found", "", "what to do"), rows)
    if bad:
        raise typer.Exit(1)
