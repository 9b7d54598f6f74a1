"""The thread of one stage actor: builds the stage, then does one job at a time (`stage_work`), and reports each."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reelwire import wire
from reelwire.errors import ConfigError

from .actions import Job
from .config import WorkerConfig
from .device import Device
from .events import Finished
from .memory import SharedMemory
from .stage_work import StageWork
from .threads import WorkThread

if TYPE_CHECKING:
    from reelwire.pipeline.job import JobPipeline
    from reelwire.pipeline.stage import Pipeline

FINGERPRINT_FILES_MAX = 10_000
FINGERPRINT_FILE_BYTES_MAX = 1 << 20
"""Files up to here count by their content as well: configurations, indices and programs, not weights."""


def load(reference: str, options: Mapping[str, str], stages: Sequence[str] = ()) -> Pipeline:
    """The pipeline that `reference` names; its weights aren't loaded yet.

    Raises:
        RequestError: there is none, or an option is refused.
        ConfigError: one of `stages` is none of the pipeline's.
    """
    from reelwire.pipeline import registry

    from . import emulated

    pipeline = registry.load(reference, options, {"emulated": lambda given: emulated.pipeline(**given)})
    known = pipeline.spec.initialize_order
    for stage in stages:
        if stage not in known:
            raise ConfigError("stages", f"{stage!r} is no stage of {pipeline.spec.name}; accepted: {', '.join(known)}")
    return pipeline


def load_jobs(reference: str, options: Mapping[str, str]) -> JobPipeline:
    """The kinds of jobs that `reference` names; their weights aren't loaded yet.

    Raises:
        RequestError: there are none, or an option is refused.
    """
    from reelwire.pipeline import registry

    from . import emulated_jobs

    return registry.load_jobs(reference, options, {"emulated": lambda given: emulated_jobs.pipeline(**given)})


def grouped_stages(config: WorkerConfig, pipeline: Pipeline, jobs: JobPipeline | None) -> tuple[str, ...]:
    """The stages that the group thread computes, on all ranks of a group, or on one that does jobs beside them.

    Raises:
        RequestError: a group of so many ranks can't compute them, or can't do the jobs.
        ConfigError: a group of several ranks has nothing to compute together.
    """
    from reelwire.pipeline.stage import ParallelPipeline

    stages: tuple[str, ...] = ()
    if jobs is not None:
        jobs.check_group(config.world)
    shared: object = pipeline
    if isinstance(shared, ParallelPipeline) and (config.group or jobs is not None):
        stages = tuple(name for name in shared.parallel_stages if not config.stages or name in config.stages)
        if stages:
            shared.check_group(config.world)
    if config.world > 1 and not stages and jobs is None:
        reason = f"{config.world} ranks have nothing to compute together; accepted: jobs, or a stage that can be shared"
        raise ConfigError("group", reason)
    return stages


def fingerprint(config: WorkerConfig) -> str:
    """Tells weights and options from others: what all ranks of a group must have the same.

    Files and folders that an option names count by what is in them, not by where they lie: by their names and sizes, and
    small ones by their content.
    """
    digest = hashlib.sha256()
    for reference, options in ((config.pipeline, config.options), (config.jobs, config.job_options)):
        place, colon, name = reference.rpartition(":")
        for said in (_content(place) if colon else reference, name if colon else ""):
            digest.update(f"{len(said)}:{said};".encode())
        for key, text in sorted(options.items()):
            said = _content(text)
            digest.update(f"{key}={len(said)}:{said};".encode())
    return digest.hexdigest()


def _content(text: str) -> str:
    """What a text stands for: a file's or folder's content, or itself where it names none."""
    path = Path(text)
    try:
        if not text or not path.exists():
            return text
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    except (OSError, ValueError):
        return text
    digest = hashlib.sha256()
    for file in files[:FINGERPRINT_FILES_MAX]:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()}:{size};".encode())
        if size <= FINGERPRINT_FILE_BYTES_MAX:
            digest.update(file.read_bytes())
    return f"content {digest.hexdigest()}"


def package_versions() -> dict[str, str]:
    """Versions of what the bits of a result may depend on; what isn't installed is left out."""
    versions = {}
    for name in ("numpy", "torch", "diffusers", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def threads_for(asked: int, stages: int) -> int:
    """Torch threads inside one operation: what was asked for, or this process's cores shared by its stages."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or max(1, cores // max(1, stages))


class StageThread(WorkThread[Job]):
    """One stage on a thread of its own.

    Args:
        pipeline: what the stage is part of.
        stage: its name.
        device: where it lives, ``cpu`` or ``cuda:N``.
        threads: torch threads inside one operation.
        post: takes each report; called on the stage's thread.
        cache_bytes_max: most bytes that all sessions together may hold here.
        memory: the shared memory of the process; None: everything travels inside of messages.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stage: str,
        device: str,
        threads: int,
        post: Callable[[Finished], None],
        cache_bytes_max: int,
        memory: SharedMemory | None = None,
    ) -> None:
        """Start the thread; it waits for its first job."""
        self._work = StageWork(pipeline, stage, Device(device, threads), cache_bytes_max, memory)
        self._post = post
        super().__init__(f"stage-{stage}")

    @property
    def limits(self) -> wire.Limits:
        """What the broker accepts."""
        return self._work.limits

    @limits.setter
    def limits(self, limits: wire.Limits) -> None:
        self._work.limits = limits

    def _take(self, job: Job) -> None:
        self._post(self._work.do(job))

    def _rest(self) -> None:
        self._work.rest()
