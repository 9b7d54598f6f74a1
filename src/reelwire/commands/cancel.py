"""`reelwire cancel`: end jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BrokerUnreachable, JobError, ReelwireError, RequestError
from .shared import ConfigFile, Endpoint, Json, load_settings, print_json, print_table

if TYPE_CHECKING:
    from .. import AsyncClient, JobStatus


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
    from ..settings import ClientSettings

    if not jobs:
        raise RequestError("jobs", "are missing; accepted: the ids of jobs, as `reelwire status` lists them")
    settings = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint}).value
    ids = tuple(dict.fromkeys(jobs))
    answers = asyncio.run(_answers(settings.endpoint, settings.connect_timeout_s, ids))
    found = [answer for answer in answers if not isinstance(answer, Exception)]
    failed = [
        _sentence(name, answer) for name, answer in zip(ids, answers, strict=True) if isinstance(answer, Exception)
    ]
    if as_json:
        print_json({status.job: status.state for status in found})
    elif found:
        print_table("Jobs", ("job", "state"), [(status.job, _shown(status)) for status in found])
    away = [answer for answer in answers if isinstance(answer, BrokerUnreachable)]
    if len(away) == len(answers):
        raise BrokerUnreachable(f"no reelwire broker answers at {settings.endpoint} any more: {away[0]}")
    if failed:
        raise JobError("; ".join(failed))


async def _answers(
    endpoint: str, connect_timeout_s: float, ids: Sequence[str]
) -> list[JobStatus | ReelwireError | TimeoutError]:
    """Ask for the end of all of them before the first answer is waited for; what each led to."""
    from .. import AsyncClient

    async with AsyncClient(endpoint, connect_timeout_s=connect_timeout_s) as client:
        return await asyncio.gather(*(_answer(client, name) for name in ids))


async def _answer(client: AsyncClient, name: str) -> JobStatus | ReelwireError | TimeoutError:
    try:
        return await (await client.job(name)).cancel()
    except (ReelwireError, TimeoutError) as error:
        return error


def _shown(status: JobStatus) -> str:
    return status.state if status.ended else f"{status.state}, and ends at its next step"


def _sentence(name: str, error: Exception) -> str:
    return str(error) if isinstance(error, JobError) else f"{name}: {error or 'the broker gave no answer'}"
