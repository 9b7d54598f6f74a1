"""`reelwire up`: a broker and its workers on this machine, kept running until Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    with_state,
    worker_child,
)
from .shared import (
    ConfigFile,
    JobOptions,
    Json,
    MediaRoots,
    Options,
    StateDir,
    assignments,
    broker_flags,
    load_settings,
    print_json,
    tell,
)

if TYPE_CHECKING:
    from ..settings import Resolved, Settings
    from ..workers.supervisor import Supervisor

_Workers = Annotated[
    int | None, typer.Option(min=1, help="How many workers beside those of groups. (default: 1 without any group)")
]
_Groups = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="NAME=RANKS", help="A group of workers that compute together, such as edit=2."),
]
_Device = Annotated[
    str | None,
    typer.Option(help="Device of the workers, cpu or cuda:N; the ranks of a group have this and those that follow."),
]


def up(
    listen: Annotated[str | None, typer.Option(help="Endpoint of the broker.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Bind an address that other machines reach; nothing is encrypted.")
    ] = None,
    workers: _Workers = None,
    groups: _Groups = None,
    device: _Device = None,
    pipeline: Annotated[str | None, typer.Option(help="What they serve. (default: world)")] = None,
    stages: Annotated[str | None, typer.Option(help="Stages that each serves. (default: all)")] = None,
    options: Options = None,
    jobs: Annotated[str | None, typer.Option(help="Jobs that each does beside the stream. (default: none)")] = None,
    job_options: JobOptions = None,
    media_roots: MediaRoots = None,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Run a broker and workers on this machine until Ctrl-C; a second one ends them now.

    The first Ctrl-C ends every session: the chunks that it was given controls for are still made and delivered, within
    the broker's `drain_s`, and no more. Only a worker that is asked to stop by itself lets its sessions go on.

    The file may hold a topology: [broker], any number of [[workers]], each with count, device, stages, pipeline,
    options and every other setting of a worker, and of [[groups]], each with name, devices, and the same settings.
    Without either the flags say what is started.
    """
    from ..broker.config import BrokerConfig
    from ..workers.supervisor import Supervisor
    from .logs import ChildLines

    layers = load_settings(config)
    flags = broker_flags(listen, insecure, media_roots, state_dir)
    broker = layers.resolve("broker", BrokerConfig, flags)
    of_workers = {
        "device": device,
        "pipeline": pipeline,
        "stages": stages,
        "options": assignments(options, "option") if options else None,
        "jobs": jobs,
        "job_options": assignments(job_options, "job-option") if job_options else None,
    }
    wanted = planned(layers, Asked(workers, tuple(groups or ()), of_workers))
    in_order, refused = True, ""
    endings = Endings()
    lines = ChildLines(as_json=as_json)
    with contextlib.ExitStack() as stack, stopped_by_signals(endings):
        broker = stack.enter_context(with_state(broker))
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


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags say of workers.

    Attributes:
        workers: how many that belong to no group; None: nothing was said.
        groups: ``NAME=RANKS`` of each group.
        settings: those of all of them.
    """

    workers: int | None
    groups: tuple[str, ...]
    settings: Mapping[str, Any]


def planned(layers: Settings, asked: Asked) -> list[tuple[str, Resolved[Any]]]:
    """Names and settings of the processes to start, a group's ranks one after the other.

    Raises:
        ConfigError: the file has a topology and flags say something else, or two workers have one name.
    """
    from ..workers.config import WorkerConfig

    workers, groups = layers.workers(WorkerConfig), layers.groups(WorkerConfig)
    if workers or groups:
        for name, value in {"workers": asked.workers, "group": asked.groups or None, **asked.settings}.items():
            if value is not None:
                raise ConfigError(
                    name, f"is given beside [[workers]] or [[groups]] in {layers.file}; accepted: one of the two"
                )
    else:
        base = layers.resolve("worker", WorkerConfig, asked.settings)
        count = asked.workers or (0 if asked.groups else 1)
        workers = [(count, base)] if count else []
        groups = [((), _grouped(base, text)) for text in asked.groups]
        said = [resolved.value.group for _, resolved in groups]
        for name in said:
            if said.count(name) > 1:
                raise ConfigError("group", f"{name!r} is given twice; accepted: another name for each group")
    wanted: list[tuple[str, Resolved[Any]]] = []
    for repeat, resolved in workers:
        named = resolved.origins["name"].layer != "default"
        for number in range(1, repeat + 1):
            own = f"{resolved.value.name}-{number}" if repeat > 1 else resolved.value.name
            wanted.append((own if named else f"worker-{len(wanted) + 1}", resolved))
    for devices, resolved in groups:
        wanted += _ranks(resolved, devices)
    names = [name for name, _ in wanted]
    for name in names:
        if names.count(name) > 1 or name == BROKER:
            raise ConfigError("workers.name", f"{name!r} is taken twice; accepted: names that differ")
    return wanted


def _grouped(base: Resolved[Any], text: str) -> Resolved[Any]:
    """Rank 0 of the group that ``NAME=RANKS`` says."""
    name, equals, ranks = text.partition("=")
    if not (name and equals and ranks.isdecimal() and int(ranks) > 0):
        raise ConfigError("group", f"{text!r} is no group; accepted: NAME=RANKS, such as edit=2")
    return replace(base, value=replace(base.value, group=name, world=int(ranks)))


def _ranks(first: Resolved[Any], devices: Sequence[str]) -> Iterator[tuple[str, Resolved[Any]]]:
    """Every rank of a group: on the devices that are listed, or on the first one's and those with the next numbers."""
    config = first.value
    kind, colon, number = config.device.partition(":")
    for rank in range(config.world):
        device = devices[rank] if devices else f"{kind}:{int(number) + rank}" if colon else config.device
        name = f"{config.group}-{rank}"
        yield name, replace(first, value=replace(config, name=name, rank=rank, device=device))


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
