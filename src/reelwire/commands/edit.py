"""`reelwire edit`: a request in, a clip out; or many requests from a file, one clip each."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import JobError, OverloadError, ReelwireError, RequestError, UsageError
from .job_results import awaited, check_place, left, report, row_of, telling_of_breaks, why, written
from .shared import ConfigFile, Endpoint, Json, assignments, load_settings, print_json, tell

if TYPE_CHECKING:
    from .. import Client, Job
    from ..job_spec import JobSpec

_FIELDS = ("task", "prompt", "video", "images", "seed", "profile", "out", "priority", "key", "output", "parameters")
"""What an entry of a tasks.json may say."""


@dataclass(frozen=True, slots=True)
class Task:
    """One request.

    Attributes:
        out: where its result goes.
        task: the kind.
        given: what `Client.submit_edit` is given beside it.
        texts: parameters as texts, which the kind's spec makes values of.
    """

    out: Path
    task: str
    given: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict)


def edit(
    task: Annotated[
        str | None, typer.Argument(help="What to do, such as v2v; `reelwire status --kinds` lists the kinds.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What the clip shall look like.")] = None,
    video: Annotated[
        str | None, typer.Option(help="The clip to edit; broker:PATH names a file on the broker's machine.")
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option("--image", help="A reference picture; may be given again.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise.")] = None,
    profile: Annotated[str | None, typer.Option(help="How it is computed, where the kind has a choice.")] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other parameter of the kind, as `reelwire status --kinds` lists them.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write. (default: TASK.mp4, or .png for a picture)")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", help="JSON list of requests, each with task, out, prompt, video, images ..."),
    ] = None,
    priority: Annotated[int | None, typer.Option(min=-100, max=100, help="Higher ones go first.")] = None,
    key: Annotated[str | None, typer.Option(help="Asking again under one key gives the same job.")] = None,
    worker_wait: Annotated[
        float, typer.Option("--worker-wait", min=0, help="Seconds to wait for a worker that does jobs.")
    ] = 30.0,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id, and leave it to the workers.")] = False,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Have a clip edited, watch it, and write the result. Ctrl-C leaves the job where it is; `reelwire cancel` ends it."""
    named = {"prompt": prompt, "video": video, "seed": seed, "profile": profile, "priority": priority, "key": key}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if images:
        given["images"] = list(images)
    texts = assignments(parameters or (), "set")
    if tasks is not None:
        if task is not None or given or texts or out is not None:
            raise UsageError("--tasks is given beside a request; accepted: one of them")
        wanted = read_tasks(tasks)
    elif task is None:
        raise RequestError("task", "is missing; accepted: the name of a kind, such as v2v, or --tasks FILE")
    else:
        wanted = [Task(out or Path(f"{task}.mp4"), task, given, texts)]
    if detach and out is not None:
        raise UsageError(
            f"--out is given beside --detach, which waits for no result; accepted: one of them, and then "
            f"`reelwire result ID --out {out}`"
        )
    _check_places(wanted)
    _run(wanted, endpoint, config, worker_wait, named_out=out is not None, detach=detach, as_json=as_json)


def read_tasks(path: Path) -> list[Task]:
    """The requests of a JSON file; files in it are taken from the folder that it lies in.

    Raises:
        RequestError: it can't be read, or isn't a list of requests.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("tasks", f"{path} can't be read ({error.strerror}); accepted: a JSON file") from None
    except ValueError as error:
        raise RequestError("tasks", f"{path} is no JSON file ({error}); accepted: a list of requests") from None
    if not isinstance(listed, list) or not listed:
        raise RequestError("tasks", f"{path} holds no requests; accepted: a list of objects with task and out")
    return [_task(path, f"tasks[{number}]", entry) for number, entry in enumerate(listed)]


def _task(path: Path, name: str, entry: object) -> Task:
    if not isinstance(entry, dict):
        raise RequestError(name, f"is no object in {path}; accepted: {', '.join(_FIELDS)}")
    for field_name in entry:
        if field_name not in _FIELDS:
            raise RequestError(f"{name}.{field_name}", f"is unknown in {path}; accepted: {', '.join(_FIELDS)}")
    kind, out = entry.get("task"), entry.get("out")
    if not isinstance(kind, str) or not kind:
        raise RequestError(f"{name}.task", f"is {kind!r} in {path}; accepted: the name of a kind")
    if not isinstance(out, str | None):
        raise RequestError(f"{name}.out", f"is {out!r} in {path}; accepted: the path of a file")
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(f"{name}.parameters", f"is no object in {path}; accepted: names with values")
    given = {
        key: value for key, value in entry.items() if key not in ("task", "out", "parameters") and value is not None
    }
    here = path.parent
    if isinstance(given.get("video"), str):
        given["video"] = _placed(here, given["video"])
    if isinstance(given.get("images"), list):
        given["images"] = [_placed(here, image) if isinstance(image, str) else image for image in given["images"]]
    stem = path.with_name(f"{path.stem}-{name.partition('[')[2].rstrip(']')}.mp4")
    return Task(here / out if out else stem, kind, {**given, **parameters})


def _placed(folder: Path, text: str) -> str:
    return text if text.startswith("broker:") else str(folder / text)


def _check_places(tasks: list[Task]) -> None:
    seen: set[Path] = set()
    for task in tasks:
        check_place(task.out)
        if task.out.resolve() in seen:
            raise RequestError("out", f"{task.out} is said twice; accepted: a file of its own for each request")
        seen.add(task.out.resolve())


def _run(
    tasks: list[Task],
    endpoint: str | None,
    config: Path | None,
    worker_wait: float,
    *,
    named_out: bool,
    detach: bool,
    as_json: bool,
) -> None:
    from .. import Client
    from ..settings import ClientSettings
    from .local import stopped_by_signals

    settings = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint}).value
    jobs: list[tuple[Task, Job]] = []
    keys: list[str] = []
    failed: list[str] = []
    with stopped_by_signals(), Client(settings.endpoint, connect_timeout_s=settings.connect_timeout_s) as client:
        try:
            _await_workers(client, worker_wait)
            for number, task in enumerate(tasks):
                where = f"tasks[{number}]." if len(tasks) > 1 else ""
                keys.append(str(task.given.get("key") or uuid.uuid4()))
                jobs.append((task, _submitted(client, task, keys[-1], [job for _, job in jobs], where)))
            if detach:
                _say_ids(jobs, as_json)
                return
            rows = _results(client, jobs, failed, named_out=named_out or len(tasks) > 1, as_json=as_json)
        except KeyboardInterrupt:
            ids = [job.id for _, job in jobs]
            if len(keys) > len(ids):
                ids.append(f"perhaps the one under the key {keys[-1]}")
            raise left(ids) from None
        except ReelwireError as error:
            if jobs:
                error.add_note(f"submitted already, and going on: {', '.join(job.id for _, job in jobs)}")
            raise
    report(rows, as_json=as_json)
    if failed:
        tell("; ".join(failed))
        raise typer.Exit(1)


def _await_workers(client: Client, wait_s: float) -> None:
    """Wait for the first worker that does jobs; without one the submission says what is missing."""
    from ..client import first_job_kinds

    if not client.job_kinds and wait_s > 0:
        tell(f"waits up to {wait_s:g} s for a worker that does jobs to come to the broker at {client.endpoint}")
        with contextlib.suppress(TimeoutError):
            first_job_kinds(client, wait_s)


def _submitted(client: Client, task: Task, key: str, before: list[Job], where: str) -> Job:
    """Submit a request; where the queue is full with those before it, when the oldest of them has ended."""
    spec = client.job_kinds.get(task.task)
    values: dict[str, Any] = dict(task.texts) if spec is None else typed(spec, task.texts)
    waiting = list(before)
    while True:
        try:
            return client.submit_edit(task.task, **{**task.given, "key": key}, **values)
        except RequestError as error:
            raise RequestError(f"{where}{error.field}", error.reason) from None
        except OverloadError as error:
            if not waiting:
                raise
            tell(f"waits for {waiting[0].id}: {error}")
            with telling_of_breaks(client, [waiting[0].id]):
                waiting.pop(0).wait()


def typed(spec: JobSpec, texts: Mapping[str, str]) -> dict[str, Any]:
    """Texts of ``--set`` as the kind's parameters have them; what they mean is checked with all others.

    Raises:
        ConfigError: a text isn't of its parameter's type.
    """
    from ..settings import Origin, convert

    kinds = {parameter.name: parameter.kind for parameter in spec.parameters}
    types = {"string": str, "integer": int, "number": float, "boolean": bool}
    origin = Origin("flag", "--set")
    return {
        name: convert(name, types[kinds[name]], text, origin) if name in kinds else text for name, text in texts.items()
    }


def _results(
    client: Client, jobs: list[tuple[Task, Job]], failed: list[str], *, named_out: bool, as_json: bool
) -> list[dict[str, Any]]:
    """Wait for all jobs, write their results, and say what they are; whatever has failed is added to `failed`."""
    rows, waiting = [], [job.id for _, job in jobs]
    with telling_of_breaks(client, waiting):
        for task, job in jobs:
            status = awaited(job, quiet=as_json)
            out = task.out if named_out or not status.suffix else task.out.with_suffix(status.suffix)
            try:
                rows.append(written(job, status, out))
            except JobError as error:
                failed.append(why(job, error))
                rows.append(row_of(status, reason=str(error)))
            waiting.remove(job.id)
    return rows


def _say_ids(jobs: list[tuple[Task, Job]], as_json: bool) -> None:
    if as_json:
        print_json([{"job": job.id, "key": job.key, "task": task.task, "out": str(task.out)} for task, job in jobs])
    else:
        for _, job in jobs:
            typer.echo(job.id)
    tell("`reelwire result ID --out FILE` waits for a result and writes it")
