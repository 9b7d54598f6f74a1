"""`reelwire status`: what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .shared import ConfigFile, Endpoint, Json, load_settings, print_json, print_table

_WORDS = {
    "draining": "takes no new sessions (draining)",
    "clients": "clients now, with this command",
    "sessions_total": "sessions now",
}
"""What a name of the status is called in the table; other names are words already."""


def status(endpoint: Endpoint = None, config: ConfigFile = None, as_json: Json = False) -> None:
    """Print the broker's workers, stages and sessions."""
    from .. import Client
    from ..settings import ClientSettings

    client_settings = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint}).value
    with Client(client_settings.endpoint, connect_timeout_s=client_settings.connect_timeout_s) as client:
        state = client.status()
    if as_json:
        print_json(state)
        return
    print_state(client_settings.endpoint, state)


def print_state(endpoint: str, state: Mapping[str, Any]) -> None:
    """The state as tables: the broker, its workers with their stages, pipelines, sessions, and what was counted."""
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
    if state["counters"]:
        print_table("Counters since the start", ("what", "count"), state["counters"].items())


def _told(value: object) -> object:
    return ("no", "yes")[value] if isinstance(value, bool) else value


def _condition(stage: Mapping[str, Any]) -> str:
    if stage["failure"]:
        return f"failed: {stage['failure']}"
    return "ready" if stage["ready"] else "loading"
