"""`reelwire cancel`: end a job."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import JobError, RequestError
from .shared import ConfigFile, Endpoint, Json, load_settings, print_json, print_table


def cancel(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Of jobs, as `reelwire status` and `reelwire edit` say them."),
    ] = None,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """End jobs: one that runs ends at its next step, on all ranks of its group; one that has ended stays as it is."""
    from .. import Client
    from ..settings import ClientSettings

    if not jobs:
        raise RequestError("jobs", "are missing; accepted: the ids of jobs, as `reelwire status` lists them")
    settings = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint}).value
    states: dict[str, str] = {}
    unknown: list[str] = []
    with Client(settings.endpoint, connect_timeout_s=settings.connect_timeout_s) as client:
        for name in jobs:
            try:
                states[name] = client.job(name).cancel().state
            except JobError as error:
                unknown.append(str(error))
    if as_json:
        print_json(states)
    elif states:
        print_table("Jobs", ("job", "state"), states.items())
    if unknown:
        raise JobError("; ".join(unknown))
