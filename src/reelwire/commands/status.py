"""`reelwire status`: what is there: workers, groups, sessions, jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .job_bar import duration, said_of
from .job_kinds import plain_kinds, print_details, print_kinds
from .shared import ConfigFile, Endpoint, Json, load_settings, print_json, print_table, tell

if TYPE_CHECKING:
    from .. import JobStatus
    from ..job_spec import JobSpec

JOBS_SHOWN_MAX = 20
_WORDS = {
    "draining": "takes no new sessions (draining)",
    "clients": "clients now, with this command",
    "sessions_total": "sessions now",
}
"""What a name of the status is called in the table; other names are words already."""


def status(
    kinds: Annotated[
        bool, typer.Option("--kinds", help="Print which jobs can be asked for, with what each takes, and nothing else.")
    ] = False,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Print the broker's workers and groups, its sessions, and its jobs, the newest first."""
    from .. import Client
    from ..settings import ClientSettings

    client_settings = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint}).value
    with Client(client_settings.endpoint, connect_timeout_s=client_settings.connect_timeout_s) as client:
        specs = list(client.job_kinds.values())
        if kinds:
            _print_kinds(specs, as_json=as_json)
            return
        state = client.status()
        jobs = client.jobs()
    if as_json:
        listed = [asdict(job) for job in jobs]
        print_json({**state, "jobs": {**state["jobs"], "listed": listed, "kinds": plain_kinds(specs)}})
        return
    print_state(client_settings.endpoint, state, jobs, specs)


def _print_kinds(specs: Sequence[JobSpec], *, as_json: bool) -> None:
    if as_json:
        print_json(plain_kinds(specs))
    elif specs:
        print_details(specs)
    else:
        tell("no worker that is attached does jobs")


def print_state(
    endpoint: str, state: Mapping[str, Any], jobs: Sequence[JobStatus], kinds: Sequence[JobSpec] = ()
) -> None:
    """The state as tables: the broker, its workers with their stages, groups, pipelines, sessions, jobs, and what was counted."""
    single = [
        (_WORDS.get(name, name), _told(value)) for name, value in state.items() if not isinstance(value, list | Mapping)
    ]
    print_table(f"Broker at {endpoint}", ("what", "value"), single)
    stages = [
        [
            worker["name"],
            worker["device"],
            f"{stage['pipeline']}/{stage['stage']}",
            _condition(stage),
            f"{stage['sessions']} of {stage['slots']}",
            f"{stage['cache_bytes'] / 2**20:.0f} of {stage['cache_bytes_max'] / 2**20:.0f} MiB",
            stage["tasks"],
            stage["waiting"],
        ]
        for worker in state["workers"]
        for stage in worker["stages"]
    ]
    if stages:
        print_table("Workers", ("worker", "device", "stage", "state", "sessions", "caches", "tasks", "waiting"), stages)
    _print_groups(state)
    pipelines = [
        [name, row["workers"], row["sessions"], row["waiting"], row["unserved_stage"] or "-"]
        for name, row in state["pipelines"].items()
    ]
    if pipelines:
        print_table("Pipelines", ("pipeline", "workers", "sessions", "waiting", "stage without worker"), pipelines)
    sessions = [
        [
            row["session"],
            row["pipeline"],
            row["state"] + (" (client gone)" if row["detached"] else ""),
            f"{row['next_commit']} of {row['chunks']}",
            row["acked"],
            ", ".join(sorted(set(row["workers"].values()))) or "-",
            ", ".join(f"{stage}: {cause}" for stage, cause in row["waits_for"].items() if cause) or "-",
        ]
        for row in state["sessions"]
    ]
    if sessions:
        print_table(
            "Sessions", ("session", "pipeline", "state", "made", "acknowledged", "worker", "waits for"), sessions
        )
    print_kinds(kinds)
    _print_jobs(state, jobs)
    if state["counters"]:
        print_table("Counters since the start", ("what", "count"), state["counters"].items())


def _print_groups(state: Mapping[str, Any]) -> None:
    groups = [
        [
            group["name"],
            group["state"] + (" (draining)" if group["draining"] else ""),
            f"{len(group['ranks'])} of {group['world']}",
            ", ".join(f"{rank['name']} on {rank['device']}" for rank in group["ranks"]),
            group["kinds"] or "-",
            group["job"] or "-",
        ]
        for group in state["groups"]
    ]
    if groups:
        print_table("Groups", ("group", "state", "ranks", "which", "jobs that it does", "job"), groups)


def _print_jobs(state: Mapping[str, Any], jobs: Sequence[JobStatus]) -> None:
    if not jobs:
        return
    rows = [
        [
            job.job,
            job.kind,
            said_of(job),
            job.client,
            job.priority,
            job.attempt,
            duration(job.submitted_s),
            _outcome(job),
        ]
        for job in jobs[:JOBS_SHOWN_MAX]
    ]
    total = sum(state["jobs"]["states"].values())
    title = "Jobs" if total <= len(rows) else f"Jobs, the newest {len(rows)} of {total}"
    print_table(title, ("job", "kind", "state", "client", "priority", "attempt", "age", "result"), rows)


def _outcome(job: JobStatus) -> str:
    parts = [
        job.failure.message if job.failure else f"{job.result_bytes} bytes" if job.result_bytes else "",
        job.note,
    ]
    return "; ".join(part for part in parts if part) or "-"


def _told(value: object) -> object:
    return ("no", "yes")[value] if isinstance(value, bool) else value


def _condition(stage: Mapping[str, Any]) -> str:
    if stage["failure"]:
        return f"failed: {stage['failure']}"
    return "ready" if stage["ready"] else "loading"
