"""From what an application asks of a job to a request that can be sent: whatever can be checked here is. Pure but for files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import client_events as e
from . import wire
from .checks import shown
from .client_files import examined
from .client_view import RETRY_AFTER_S
from .errors import OverloadError, RequestError
from .job_parts import PRIORITY_MAX
from .job_spec import JobSpec, check_job, unknown_kind
from .messages import Media, SubmitJob, Welcome
from .parts import KEY_CHARACTERS_MAX
from .spec import Plain

MediaPath = str | os.PathLike[str]
MediaPaths = MediaPath | Sequence[MediaPath]

AT_BROKER = "broker:"


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job that can be submitted.

    Attributes:
        message: what is sent in the end.
        files: what is uploaded before, each content once.
        paths: where each of them is.
    """

    message: SubmitJob
    files: tuple[e.UploadFile, ...]
    paths: tuple[Path, ...]

    def event(self, now: float, call: int) -> e.SubmitJob:
        """The call that submits it."""
        return e.SubmitJob(now, call, self.message, self.files)


def job_request(
    welcome: Welcome,
    task: str,
    *,
    prompt: str | None = None,
    video: MediaPaths | None = None,
    images: MediaPaths = (),
    media: Mapping[str, MediaPaths] | None = None,
    seed: int | None = None,
    profile: str | None = None,
    key: str | None = None,
    priority: int = 0,
    output: MediaPath | None = None,
    proceed: Callable[[], object],
    **parameters: Plain,
) -> JobRequest:
    """What `Client.submit_edit` is asked for, checked against what the broker said in its welcome; files are hashed.

    `proceed` is called now and then, and raises when nobody wants to know any more.

    Raises:
        RequestError: a field is refused; `field` names it.
        OverloadError: no worker does jobs now.
    """
    spec = _spec(task, welcome)
    said = {"prompt": prompt, "seed": seed, "profile": profile, **parameters}
    given = {name: value for name, value in said.items() if value is not None}
    paths = _paths(video, images, {} if media is None else media)
    check_job(spec, given, {name: len(files) for name, files in paths.items()})
    message = SubmitJob(_key(key), spec.name, given, {}, _priority(priority), _output(output))
    _check_encodable(message, welcome)  # before files are read for it
    return _with_files(message, spec, paths, welcome, proceed)


def _spec(task: object, welcome: Welcome) -> JobSpec:
    if not isinstance(task, str):
        raise RequestError("kind", f"{shown(task)} is not a text; accepted: the name of a kind of job")
    if not welcome.jobs:  # which ones there will be only the workers know, so that the name can't be called wrong
        raise OverloadError(f"no worker that is attached does jobs: nobody can do {shown(task)} now", RETRY_AFTER_S)
    for spec in welcome.jobs:
        if spec.name == task:
            return spec
    raise unknown_kind(task, welcome.jobs)


def _paths(video: object, images: object, others: object) -> dict[str, list[object]]:
    """Name of each input to what is given for it."""
    if not isinstance(others, Mapping):
        raise RequestError("media", f"is a {type(others).__name__}; accepted: a mapping of inputs to paths")
    found = {"video": _listed("video", video), "images": _listed("images", images)}
    for name, files in others.items():
        if found.get(name):
            raise RequestError("media", f"names {name!r}, which is given already")
        found[name] = _listed(name, files)
    return {name: files for name, files in found.items() if files}


def _listed(name: str, files: object) -> list[object]:
    if files is None:
        return []
    if isinstance(files, str | os.PathLike):
        return [files]
    if not isinstance(files, Sequence) or isinstance(files, bytes | bytearray | memoryview):
        raise RequestError(name, f"{shown(files)} is not accepted; accepted: a path, or several in a list")
    return list(files)


def _with_files(
    message: SubmitJob,
    spec: JobSpec,
    given: Mapping[str, Sequence[object]],
    welcome: Welcome,
    proceed: Callable[[], object],
) -> JobRequest:
    nbytes_max = welcome.limits.get("upload_bytes_max", wire.Limits().message_bytes_max)
    media: dict[str, list[Media]] = {}
    uploads: dict[str, tuple[e.UploadFile, Path]] = {}
    for name, files in given.items():
        for place, path in enumerate(files):
            field = name if spec.input(name).most == 1 else f"{name}[{place}]"
            if not isinstance(path, str | os.PathLike):
                raise RequestError(field, f"{shown(path)} is no path")
            if isinstance(path, str) and path.startswith(AT_BROKER):
                media.setdefault(name, []).append(Media(path=_at_broker(field, path)))
                continue
            file = examined(field, Path(path), nbytes_max, proceed)
            uploads.setdefault(file.sha256, (file, Path(path)))
            media.setdefault(name, []).append(Media(sha256=file.sha256))
    complete = replace(message, media={name: tuple(files) for name, files in media.items()})
    _check_encodable(complete, welcome)
    files_of, paths_of = zip(*uploads.values(), strict=True) if uploads else ((), ())
    return JobRequest(complete, files_of, paths_of)


def _at_broker(field: str, path: str) -> str:
    there = path.removeprefix(AT_BROKER)
    if not there.startswith("/"):
        raise RequestError(field, f"{shown(path)} is not accepted; accepted: {AT_BROKER}/absolute/path")
    return there


def _key(key: object) -> str:
    if key is None:
        return str(uuid.uuid4())
    if not isinstance(key, str) or not 0 < len(key) <= KEY_CHARACTERS_MAX:
        raise RequestError(
            "key", f"{shown(key)} is not accepted; accepted: a text of 1 to {KEY_CHARACTERS_MAX} characters"
        )
    return key


def _priority(priority: object) -> int:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > PRIORITY_MAX:
        accepted = f"a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX}"
        raise RequestError("priority", f"{shown(priority)} is not accepted; accepted: {accepted}")
    return priority


def _output(output: object) -> str:
    if output is None:
        return ""
    path = os.fspath(output) if isinstance(output, os.PathLike) else output
    if not isinstance(path, str):
        raise RequestError("output", f"{shown(output)} is no path")
    path = path.removeprefix(AT_BROKER)
    if not path.startswith("/"):
        raise RequestError(
            "output", f"{shown(output)} is not accepted; accepted: an absolute path on the broker's host"
        )
    return path


def _check_encodable(message: SubmitJob, welcome: Welcome) -> None:
    try:
        packed = wire.pack(message)
    except ValueError as error:
        raise RequestError("parameters", f"hold a value that can't be sent ({error})") from None
    limits, header_max = welcome.limits, wire.Limits().header_bytes_max
    most = min(limits.get("header_bytes_max", header_max), limits.get("control_bytes_max", header_max))
    nbytes = len(packed.name) + len(packed.body)
    if nbytes + wire.HEADER_BYTES + wire.ENTRY_BYTES > most:
        raise RequestError(message.largest_field, f"the request takes {nbytes} bytes; accepted by the broker: {most}")
