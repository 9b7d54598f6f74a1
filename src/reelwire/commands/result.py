"""`reelwire result`: what came of a job, written to a file; waits for it where it isn't over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import JobError, ReelwireError, RequestError
from .job_results import awaited, check_place, left, report, row_of, telling_of_breaks, why, written
from .shared import ConfigFile, Endpoint, Json, load_settings, tell

if TYPE_CHECKING:
    from .. import Job


def result(
    job: Annotated[
        str | None, typer.Argument(metavar="ID", help="Of a job, as `reelwire status` and `reelwire edit` say it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write. (default: ID.mp4, or .png for a picture)")
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="How long to wait for its end. (default: as long as it takes)"),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Have the broker forget the job when its result is written.")
    ] = False,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Wait for a job and write its result. Ctrl-C leaves the job where it is; the broker keeps results for a while."""
    from .. import Client
    from ..settings import ClientSettings
    from .local import stopped_by_signals

    if job is None:
        raise RequestError("job", "is missing; accepted: the id of a job, as `reelwire status` lists them")
    if out is not None:
        check_place(out)
    settings = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint}).value
    failed = ""
    with stopped_by_signals(), Client(settings.endpoint, connect_timeout_s=settings.connect_timeout_s) as client:
        found = client.job(job)
        try:
            with telling_of_breaks(client, [found.id]):
                status = awaited(found, quiet=as_json, wait_s=wait)
                place = out or Path(f"{found.id}{status.suffix}")
                row: dict[str, Any]
                try:
                    row = written(found, status, place)
                except JobError as error:
                    failed = why(found, error)
                    row = row_of(status, reason=str(error))
                if delete and not failed:
                    _delete(found, place)
        except KeyboardInterrupt:
            raise left([found.id]) from None
    report([row], as_json=as_json)
    if failed:
        tell(failed)
        raise typer.Exit(1)


def _delete(job: Job, out: Path) -> None:
    try:
        job.delete()
    except ReelwireError as error:
        error.add_note(f"the result is in {out}; the broker may know the job still")
        raise
