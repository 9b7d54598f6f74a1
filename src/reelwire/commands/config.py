"""`reelwire config show`: what holds, and where each value came from."""

from __future__ import annotations

import dataclasses
from typing import Any

from .shared import ConfigFile, Json, load_settings, plain, print_json, print_table


def show(config: ConfigFile = None, as_json: Json = False) -> None:
    """Print every setting, its value and where it came from."""
    from ..broker.config import BrokerConfig
    from ..settings import ClientSettings, Resolved
    from ..workers.config import WorkerConfig

    settings = load_settings(config)
    sections: dict[str, Resolved[Any]] = {
        "client": settings.resolve("client", ClientSettings),
        "broker": settings.resolve("broker", BrokerConfig),
        "worker": settings.resolve("worker", WorkerConfig),
    }
    for number, (_, worker) in enumerate(settings.workers(WorkerConfig), start=1):
        sections[f"workers[{number}]"] = worker
    rows = [
        (section, item.name, plain_setting(getattr(resolved.value, item.name)), resolved.origins[item.name])
        for section, resolved in sections.items()
        for item in dataclasses.fields(resolved.value)
        if item.name in resolved.origins
    ]
    if as_json:
        shown: dict[str, dict[str, object]] = {section: {} for section in sections}
        for section, name, value, origin in rows:
            shown[section][name] = {"value": value, "layer": origin.layer, "from": str(origin)}
        print_json({"file": settings.file or None, "settings": shown})
        return
    print_table(
        f"Settings ({settings.file or 'no file'})",
        ("setting", "value", "from"),
        [(f"{section}.{name}", value, origin) for section, name, value, origin in rows],
    )


def plain_setting(value: object) -> object:
    """A value as it is printed."""
    return value if isinstance(value, bool | int | float | str) or value is None else plain(value)
