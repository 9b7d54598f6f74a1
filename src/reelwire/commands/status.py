"""`reelwire status`: what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .shared import ConfigFile, Endpoint, Json, load_settings, print_json, print_table


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
    """The state as tables: one for each list of it, one for the single values."""
    single = [(name, value) for name, value in state.items() if not isinstance(value, list | Mapping)]
    print_table(f"Broker at {endpoint}", ("what", "value"), single)
    for name, value in state.items():
        if isinstance(value, Mapping) and value and all(not isinstance(item, Mapping) for item in value.values()):
            print_table(name, ("what", "value"), value.items())
        elif isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            columns = list(dict.fromkeys(column for row in value for column in row))
            print_table(name, columns, [[row.get(column) for column in columns] for row in value])
