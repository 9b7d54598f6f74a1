"""What a worker process is told when it starts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from reelwire import checks, endpoints
from reelwire.errors import ConfigError

_DEVICE = re.compile(r"(cpu|cuda:\d+)\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
RANKS_MAX = 1024
"""Most ranks of a group."""


def default_name() -> str:
    """A name for this process: host and process id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80] or "worker"
    return f"{host}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of one worker process; each is checked when the object is made.

    Attributes:
        broker: endpoint of the broker.
        name: name of the worker; a new worker under an old name replaces the old one, unless that is a group's rank.
        pipeline: a registered name, or ``path/to/file.py:object``.
        options: options of the pipeline, such as ``model=tiny``.
        stages: the stages to serve; empty: all of the pipeline.
        device: ``cpu`` or ``cuda:N``.
        slots: most sessions at once at each stage.
        cache_bytes_max: most bytes of all sessions' caches at each stage; a session that doesn't fit is refused.
        mailbox: tasks that may wait at each stage behind the running one.
        threads: torch threads inside one operation; 0: the cores of this process divided by its stages.
        connect_timeout_s: how long the broker may be away before the worker gives up, unless it has a job that has begun, or
            a result that nobody has: that it keeps until a broker comes. The other ranks of a group give up when rank 0 does.
        reconnect: whether to wait for the broker when it was lost; if not, the worker ends then.
        busy_for_s: how long the worker may be silent while it imports or loads, as it announces with each heartbeat.
        drain_s: how long the worker's sessions may take to end after the first request to stop, and its readers to be done
            with its shared memory; with clients that aren't done by then it leaves all the same, with exit code 0.
        stuck_s: how long a stage may take to drop the sessions of a lost broker before the process gives itself up.
        parent_pid: end at once when this parent process is gone; 0: outlive it.
        frame_bytes_max: most bytes of one frame that the broker may send.
        outbox_bytes_max: most bytes that may wait for a broker that doesn't read, before it counts as lost; those that
            ZeroMQ has yet to write count too.
        shared_memory_bytes_max: most bytes of shared memory that the worker writes for readers on its machine; 0: it
            neither writes nor reads any, and everything travels inside of messages. Where it lies the environment says to
            all processes alike, ``REELWIRE_SHARED_MEMORY``.
        group: name of the worker group that this process is a rank of; empty: none.
        rank: which of its ranks; 0 leads.
        world: how many ranks the group has.
        group_host: address of this machine under which the other ranks find rank 0; one that isn't a loopback address where
            some are on other machines.
        jobs: kinds of jobs to do beside the stream: a registered name, or ``path/to/file.py:object``; empty: none.
        job_options: options of the jobs.
        step_timeout_s: how long the ranks of a group may take for one step of a job or one chunk, before they are given up; and
            how long a job may come no further in what isn't a step, before it fails: its files are looked for, the next part
            of one is fetched, the next frame of its result is encoded.
        scratch_dir: folder for checkpoints, results and inputs of jobs while they are here; empty: a temporary one.
    """

    broker: str = endpoints.DEFAULT_ENDPOINT
    name: str = field(default_factory=default_name)
    pipeline: str = "world"
    options: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    device: str = "cpu"
    slots: int = 4
    cache_bytes_max: int = 8 << 30
    mailbox: int = 1
    threads: int = 0
    connect_timeout_s: float = 30.0
    reconnect: bool = True
    busy_for_s: float = 30.0
    drain_s: float = 60.0
    stuck_s: float = 60.0
    parent_pid: int = 0
    frame_bytes_max: int = 256 << 20
    outbox_bytes_max: int = 256 << 20
    shared_memory_bytes_max: int = 1 << 30
    group: str = ""
    rank: int = 0
    world: int = 1
    group_host: str = "127.0.0.1"
    jobs: str = ""
    job_options: Mapping[str, str] = field(default_factory=dict)
    step_timeout_s: float = 300.0
    scratch_dir: str = ""

    def __post_init__(self) -> None:
        """Check each setting.

        Raises:
            ConfigError: one is refused; it names the setting and what is accepted.
        """
        _check_endpoint(self.broker)
        _check_text("name", self.name, _NAME, "1 to 100 letters, digits, dots, dashes and underscores")
        _check_text("device", self.device, _DEVICE, "cpu or cuda:N, such as cuda:0")
        if not isinstance(self.pipeline, str) or not self.pipeline.strip():
            raise ConfigError(
                "pipeline", f"{self.pipeline!r} is no name; accepted: a pipeline or path/to/file.py:object"
            )
        _check_options("options", self.options)
        _check_options("job_options", self.job_options)
        _check_stages(self.stages)
        checks.check_truth("reconnect", self.reconnect)
        for name, (least, most) in _COUNTS.items():
            checks.check_count(name, getattr(self, name), least, most)
        _check_group(self)
        for name in ("connect_timeout_s", "busy_for_s", "drain_s", "stuck_s", "step_timeout_s"):
            checks.check_seconds(name, getattr(self, name))


_COUNTS = {
    "slots": (1, checks.COUNT_MAX),
    "cache_bytes_max": (1, checks.BYTES_MAX),
    "mailbox": (0, checks.COUNT_MAX),
    "threads": (0, 4096),
    "parent_pid": (0, (1 << 31) - 1),
    "frame_bytes_max": (1 << 10, checks.BYTES_MAX),
    "outbox_bytes_max": (1 << 10, checks.BYTES_MAX),
    "shared_memory_bytes_max": (0, checks.BYTES_MAX),
    "rank": (0, RANKS_MAX - 1),
    "world": (1, RANKS_MAX),
}


def _check_endpoint(endpoint: object) -> None:
    try:
        endpoints.parse(endpoint)
    except ValueError as error:
        raise ConfigError("broker", str(error)) from None


def _check_text(name: str, value: object, accepted: re.Pattern[str], words: str) -> None:
    if not isinstance(value, str) or not accepted.match(value):
        raise ConfigError(name, f"{value!r} is not accepted; accepted: {words}")


def _check_group(config: WorkerConfig) -> None:
    if config.group:
        _check_text("group", config.group, _NAME, "1 to 100 letters, digits, dots, dashes and underscores")
    for name in ("group", "jobs", "scratch_dir", "group_host"):
        if not isinstance(getattr(config, name), str):
            raise ConfigError(name, f"{getattr(config, name)!r} is not accepted; accepted: a text")
    if not config.group and (config.rank, config.world) != (0, 1):
        raise ConfigError("group", "is missing beside rank and world; accepted: the name of the group")
    if config.rank >= config.world:
        raise ConfigError("rank", f"{config.rank} is none of {config.world} ranks; accepted: 0 to {config.world - 1}")


def _check_options(name: str, options: object) -> None:
    pairs = options.items() if isinstance(options, Mapping) else [(options, None)]
    for key, value in pairs:
        if not isinstance(key, str) or not key or not isinstance(value, str):
            raise ConfigError(name, f"{key!r}: {value!r} is no pair of texts; accepted: names with texts, model=tiny")


def _check_stages(stages: object) -> None:
    if not isinstance(stages, tuple) or not all(isinstance(stage, str) and stage for stage in stages):
        raise ConfigError("stages", f"{stages!r} is no list of names; accepted: names of stages, or none for all")
    for stage in stages:
        if stages.count(stage) > 1:
            raise ConfigError("stages", f"{stage!r} is named twice; accepted: each stage once")
