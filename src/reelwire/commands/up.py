"""`reelwire up`: a broker and its workers on this machine, kept running until Ctrl-C."""

from __future__ import annotations

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
    """Run a broker and workers on this machine until Ctrl-C, which drains; a second one ends them now.

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
            supervisor.start(broker_child(broker))
            said = wait_ready(supervisor, BROKER, READY_BROKER_S)
            endpoint = str(said["endpoint"])
            for name, resolved in wanted:
                supervisor.start(worker_child(name, resolved, endpoint))
            for name, _ in wanted:
                wait_ready(supervisor, name, READY_WORKER_S)
                _tell(as_json, {"event": "worker_ready", "name": name}, f"{name} is ready")
            _tell(
                as_json,
                {"event": "ready", "endpoint": endpoint, "workers": [name for name, _ in wanted]},
                f"ready at {endpoint} with {len(wanted)} worker(s); Ctrl-C drains and ends",
            )
            failure = supervisor.wait()
            if failure is not None:
                raise told(failure)
        except UsageError as error:
            refused = str(error)
            raise
        except KeyboardInterrupt:
            _tell(as_json, {"event": "draining"}, "draining; Ctrl-C again ends it now")
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


def _tell(as_json: bool, event: dict[str, object], sentence: str) -> None:
    if as_json:
        print_json(event)
    else:
        tell(sentence)
