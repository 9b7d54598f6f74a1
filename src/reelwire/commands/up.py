"""`reelwire up`: a broker and its workers on this machine, kept running until Ctrl-C."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, UsageError
from .local import (
    BROKER,
    READY_BROKER_S,
    READY_WORKER_S,
    Endings,
    broker_child,
    stopped_by_signals,
    told,
    wait_ready,
    worker_child,
)
from .shared import ConfigFile, Json, assignments, load_settings, print_json, tell

if TYPE_CHECKING:
    from ..settings import Resolved, Settings
    from ..workers.supervisor import Supervisor


def up(
    listen: Annotated[str | None, typer.Option(help="Endpoint of the broker.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Bind an address that other machines reach; nothing is encrypted.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="How many workers. (default: 1, or as the file says)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of the workers: cpu or cuda:N.")] = None,
    pipeline: Annotated[str | None, typer.Option(help="What they serve. (default: world)")] = None,
    stages: Annotated[str | None, typer.Option(help="Stages that each serves. (default: all)")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="Option of the pipeline.")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Run a broker and workers on this machine until Ctrl-C; a second one ends them now.

    The first Ctrl-C ends every session: the chunks that it was given controls for are still made and delivered, within
    the broker's `drain_s`, and no more. Only a worker that is asked to stop by itself lets its sessions go on.

    The file may hold a topology: [broker] and any number of [[workers]], each with count, device, stages, pipeline,
    options and every other setting of a worker. Without [[workers]] the flags say what is started.
    """
    from ..broker.config import BrokerConfig
    from ..workers.supervisor import Supervisor
    from .logs import ChildLines

    layers = load_settings(config)
    broker = layers.resolve("broker", BrokerConfig, {"listen": listen, "insecure": insecure})
    flags = {
        "device": device,
        "pipeline": pipeline,
        "stages": stages,
        "options": assignments(options, "option") if options else None,
    }
    wanted = planned(layers, workers, flags)
    in_order, refused = True, ""
    endings = Endings()
    lines = ChildLines(as_json=as_json)
    with stopped_by_signals(endings):
        supervisor = Supervisor(forward=lines)
        try:
            _start(supervisor, broker, wanted, as_json)
            failure = supervisor.wait()
            if failure is not None:
                raise told(failure)
        except UsageError as error:
            refused = str(error)
            raise
        except KeyboardInterrupt:
            _tell(as_json, {"event": "draining"}, "ends its sessions and stops; Ctrl-C again ends it now")
        finally:
            in_order = endings.stop(supervisor)
            lines.release(but=refused)
    _tell(as_json, {"event": "stopped", "in_order": in_order}, "stopped" if in_order else "stopped at once")
    if not in_order:
        raise typer.Exit(1)


def planned(layers: Settings, count: int | None, flags: dict[str, Any]) -> list[tuple[str, Resolved[Any]]]:
    """Names and settings of the workers to start.

    Raises:
        ConfigError: the file has a topology and flags say something else, or two workers have one name.
    """
    from ..workers.config import WorkerConfig

    topology = layers.workers(WorkerConfig)
    given = {"workers": count, **flags}
    if topology:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(name, f"is given beside [[workers]] in {layers.file}; accepted: one of the two")
    else:
        topology = [(count or 1, layers.resolve("worker", WorkerConfig, flags))]
    wanted: list[tuple[str, Resolved[Any]]] = []
    for repeat, resolved in topology:
        named = resolved.origins["name"].layer != "default"
        for number in range(1, repeat + 1):
            own = f"{resolved.value.name}-{number}" if repeat > 1 else resolved.value.name
            wanted.append((own if named else f"worker-{len(wanted) + 1}", resolved))
    names = [name for name, _ in wanted]
    for name in names:
        if names.count(name) > 1 or name == BROKER:
            raise ConfigError("workers.name", f"{name!r} is taken twice; accepted: names that differ")
    return wanted


def _start(
    supervisor: Supervisor, broker: Resolved[Any], wanted: list[tuple[str, Resolved[Any]]], as_json: bool
) -> None:
    """Start the broker and the workers, say so, and wait until all are ready."""
    from .logs import child_environment

    names = [name for name, _ in wanted]
    environment = child_environment(as_json=as_json)
    supervisor.start(replace(broker_child(broker), environment=environment))
    endpoint = str(wait_ready(supervisor, BROKER, READY_BROKER_S)["endpoint"])
    for name, resolved in wanted:
        supervisor.start(replace(worker_child(name, resolved, endpoint), environment=environment))
    loading = {"event": "loading", "endpoint": endpoint, "workers": names}
    _tell(as_json, loading, f"broker at {endpoint}; still to load: {', '.join(names)}")
    for name in names:
        wait_ready(supervisor, name, READY_WORKER_S)
        _tell(as_json, {"event": "worker_ready", "name": name}, f"{name} is ready")
    ready = {"event": "ready", "endpoint": endpoint, "workers": names}
    _tell(as_json, ready, f"ready at {endpoint} with {len(names)} worker(s); Ctrl-C ends sessions and all of it")


def _tell(as_json: bool, event: Mapping[str, object], sentence: str) -> None:
    if as_json:
        print_json(event)
    else:
        tell(sentence)
