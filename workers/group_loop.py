"""What a loop does for its group: performs the actions of `group_events`, and brings their events. It decides nothing.

Everything here is called under the loop's lock, by the loop's thread or by the group's own. What takes long is done on
threads of its own and comes back as an event: files are looked for, written and sent by one, checkpoints are written by it
as well, results are encoded by another. Only a body's tensors are copied out of shared memory at once: a chunk waits for them, and they are no more than a
message's. What the group thread reports it takes to the core itself, as a stage's thread does with a result, so that between
the last rank's answer and the next decision no other thread of this process has to wake.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, assert_never

import structlog
import zmq

import reelwire
from reelwire import wire
from reelwire.errors import ConfigError, RequestError
from reelwire.messages import (
    Failure,
    FileGone,
    FileOffer,
    FilePart,
    InitializeStage,
    Member,
    Membership,
    RunTask,
)
from reelwire.segments import MemoryLostError

from .checkpoints import write_snapshot
from .collectives import Rendezvous
from .config import WorkerConfig
from .core import WorkerCore
from .files import Files, cannot_keep
from .group import GroupThread
from .group_events import (
    CheckpointWritten,
    Do,
    DropFiles,
    FilesFound,
    FindFiles,
    FrameEncoded,
    GroupAction,
    GroupEvent,
    JoinLink,
    KillRanks,
    LinkSaid,
    MakeResult,
    Opened,
    OpenLink,
    OrderReport,
    PartWritten,
    RankExited,
    ResultMade,
    SendParts,
    TakeIn,
    TakenIn,
    Tell,
    WriteCheckpoint,
    WritePart,
)
from .link import LeaderLink, Link, RankLink
from .memory import SharedMemory
from .rank import RankCore
from .rank_processes import RankProcesses, check_host, is_local, started_at, this_machine
from .results import write_result
from .runner import fingerprint, package_versions
from .stage_work import said, short
from .threads import ChoreThread
from .values import inlined

if TYPE_CHECKING:
    from reelwire.pipeline.job import JobPipeline
    from reelwire.pipeline.stage import Pipeline

_IN = int(zmq.POLLIN)


class Loop(Protocol):
    """The loop, as its group sees it; its methods take the lock."""

    def post(self, event: GroupEvent) -> None:
        """Something has happened on another thread."""
        ...

    def report(self, report: OrderReport) -> None:
        """The group thread has done an order; called on that thread."""
        ...

    def say(self, connection: int, attachment: int, message: FilePart | FileGone) -> bool:
        """Tell the broker something, unless the connection is another one by now: False then."""
        ...

    def broken(self, error: BaseException) -> None:
        """A fault of ours on another thread: the process ends with it."""
        ...


def place_of(config: WorkerConfig) -> Membership | None:
    """The place of this process in its group; None: it is none's."""
    if not config.group:
        return None
    return Membership(
        config.group,
        config.rank,
        config.world,
        machine=this_machine(),
        pid=os.getpid(),
        fingerprint=fingerprint(config),
        started=started_at(os.getpid()),
    )


def core_of(
    config: WorkerConfig, pipeline: Pipeline, jobs: JobPipeline | None, grouped: Sequence[str], memory: SharedMemory
) -> WorkerCore | RankCore:
    """What decides in this process: a worker's core, with a leader in it or without, or that of a rank that follows."""
    place = place_of(config)
    kinds = () if jobs is None else jobs.jobs
    versions = reelwire.__version__, package_versions()
    if place is not None and place.rank:
        return RankCore(config, pipeline.spec, *versions, memory.offer, place=place, kinds=kinds, grouped=grouped)
    return WorkerCore(config, pipeline.spec, *versions, memory.offer, place, kinds, grouped)


class GroupRuntime:
    """The group thread of a process, and all through which it is with the other ranks and with files.

    Args:
        config: settings of the process.
        pipeline: what the grouped stages are part of.
        stages: their names.
        jobs: kinds of jobs; None: none.
        threads: torch threads inside one operation.
        context: of ZeroMQ.
        poller: of the loop.
        memory: the shared memory of the process.
        loop: the loop.

    Raises:
        ConfigError: the folder for files can't be made.
    """

    def __init__(
        self,
        config: WorkerConfig,
        pipeline: Pipeline,
        stages: Sequence[str],
        jobs: JobPipeline | None,
        threads: int,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        memory: SharedMemory,
        loop: Loop,
    ) -> None:
        """Start the threads."""
        self._config = config
        self._context = context
        self._poller = poller
        self._memory = memory
        self._loop = loop
        self._log = structlog.get_logger().bind(worker=config.name)
        try:
            self._files = Files(config.scratch_dir)
        except OSError as error:
            raise ConfigError("scratch_dir", f"{config.scratch_dir!r} can't be used ({error.strerror})") from error
        self._link: Link | None = None
        self._processes: RankProcesses | None = None
        self._rendezvous: Rendezvous | None = None
        self._polled: set[int] = set()
        self._happened: list[GroupEvent] = []
        self._chores = ChoreThread("files", loop.broken)
        self._encoder = ChoreThread("results", loop.broken)
        self._thread = GroupThread(config, pipeline, stages, jobs, threads, loop.report, self._files.folder, memory)

    @property
    def reaped(self) -> list[str]:
        """Folders of dead processes that were removed at the start."""
        return self._files.reaped

    @property
    def readable(self) -> bool:
        """Whether something came over the link; to be asked after any use of it, as its descriptor may not tell again."""
        return self._link is not None and self._link.readable

    def set_limits(self, limits: wire.Limits) -> None:
        """What the broker accepts."""
        self._thread.limits = limits

    def perform(self, action: GroupAction, connection: int) -> None:
        """Do what the core asks; `connection` is the number of the one to the broker."""
        match action:
            case Tell():
                if self._link is not None:
                    self._link.send(action.message)
                    self._tell_dropped(self._link)
            case Do():
                self._thread.submit(action.order)
            case OpenLink():
                self._open(action)
            case JoinLink():
                self._join(action)
            case TakeIn():
                self._happened.append(self._take_in(action.body))
            case KillRanks():
                if self._processes is not None:
                    self._processes.kill(action.ranks)
            case MakeResult():
                self._encoder.do(partial(self._make_result, action))
            case FindFiles() | WritePart() | SendParts() | WriteCheckpoint() | DropFiles():
                self._chores.do(partial(self._with_files, action, connection))
            case _:
                assert_never(action)

    def happened(self) -> Iterator[GroupEvent]:
        """What came of actions at once."""
        while self._happened:
            yield self._happened.pop(0)

    def receive(self) -> Iterator[GroupEvent]:
        """What the other ranks say."""
        link = self._link
        if link is not None:
            for rank, message in link.receive():
                yield LinkSaid(time.monotonic(), rank, message)
            self._tell_dropped(link)

    def ended(self) -> Iterator[GroupEvent]:
        """Which of the other ranks have ended; only on the loop's thread, which polls their descriptors."""
        for rank in [] if self._processes is None else self._processes.ended():
            self._poll_processes()
            yield RankExited(time.monotonic(), rank, "its process has ended")

    def close(self, limit_s: float) -> list[str]:
        """End the threads, and close everything; the threads that didn't end."""
        until = time.monotonic() + limit_s
        threads: dict[str, GroupThread | ChoreThread]
        threads = {"group": self._thread, "files": self._chores, "results": self._encoder}
        for thread in threads.values():
            thread.stop()
        hung = [name for name, thread in threads.items() if not thread.join(max(0.0, until - time.monotonic()))]
        self._part()
        self._files.close()  # also under a thread that hangs: the process ends without it then, and nobody else tidies up
        return hung

    # --- the other ranks -------------------------------------------------------------------------------------------------

    def _open(self, action: OpenLink) -> None:
        self._part()
        check_host(self._config.group_host, action.members)
        self._thread.is_local = is_local(action.members)
        host = "127.0.0.1" if self._thread.is_local else self._config.group_host
        link = LeaderLink(self._context, host, action.secret, action.epoch, self._config.world)
        self._with(link, action.members)
        self._chores.do(partial(self._make_rendezvous, host, action.epoch, link.endpoint))

    def _join(self, action: JoinLink) -> None:
        self._part()
        self._thread.is_local = is_local(action.members)
        self._with(RankLink(self._context, action.link, action.epoch), action.members)

    def _with(self, link: Link, members: Sequence[Member]) -> None:
        self._link = link
        self._poller.register(link.descriptor, _IN)
        self._processes = RankProcesses(members, self._config.rank)
        self._poll_processes()

    def _part(self) -> None:
        """Close what is open towards the ranks of an earlier epoch."""
        if self._link is not None:
            if self._link.dropped:
                self._log.info("link_closed", epoch=self._link.epoch, dropped=dict(self._link.dropped))
            self._poller.unregister(self._link.descriptor)
            self._link.close()
        if self._processes is not None:
            self._processes.close()
        self._link = self._processes = None
        self._poll_processes()
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()

    def _tell_dropped(self, link: Link) -> None:
        """Strangers may send as much as they like: each reason is in the log once, and how often when the link is closed."""
        for reason in link.untold():
            self._log.warning("link_message_dropped", reason=reason, epoch=link.epoch)

    def _poll_processes(self) -> None:
        wanted = set() if self._processes is None else set(self._processes.descriptors.values())
        for descriptor in self._polled - wanted:
            self._poller.unregister(descriptor)
        for descriptor in wanted - self._polled:
            self._poller.register(descriptor, _IN)
        self._polled = wanted

    def _make_rendezvous(self, host: str, epoch: int, endpoint: str) -> None:
        rendezvous = Rendezvous(host)
        self._rendezvous = rendezvous
        self._loop.post(Opened(time.monotonic(), epoch, endpoint, rendezvous.address))

    # --- tensors, files and results --------------------------------------------------------------------------------------

    def _take_in(self, body: InitializeStage | RunTask) -> TakenIn:
        """Copy a body's tensors out of shared memory: whoever lent it isn't asked to wait until all ranks are done."""
        try:
            artifacts = {name: inlined(artifact, self._memory.view) for name, artifact in body.artifacts.items()}
        except MemoryLostError as error:
            failure = Failure("worker_lost", short(f"{body.stage}: {error.strerror or error}"), body.stage)
            return TakenIn(time.monotonic(), body, failure)
        return TakenIn(time.monotonic(), body.with_artifacts(artifacts))

    def _with_files(
        self, action: FindFiles | WritePart | SendParts | WriteCheckpoint | DropFiles, connection: int
    ) -> None:
        files, loop = self._files, self._loop
        match action:
            case FindFiles():
                found, missing = files.find(action.run, fetches=self._config.rank == 0)
                loop.post(FilesFound(time.monotonic(), action.run.sequence, found, missing))
            case WritePart():
                try:
                    parts, path = files.write(action.offer, action.part)
                except (OSError, ValueError) as error:
                    loop.post(PartWritten(time.monotonic(), action.offer.file, 0, failure=cannot_keep(error)))
                else:
                    loop.post(PartWritten(time.monotonic(), action.offer.file, parts, path))
            case SendParts():
                for message in files.parts(action.file, action.first, action.parts):
                    if not loop.say(connection, action.attachment, message):
                        return
            case WriteCheckpoint():
                loop.post(self._write_checkpoint(action))
            case DropFiles():
                files.drop(action.job, action.attempt, action.role, action.besides)

    def _write_checkpoint(self, action: WriteCheckpoint) -> CheckpointWritten:
        written = partial(CheckpointWritten, job=action.job, attempt=action.attempt, step=action.step)
        try:
            offer = write_snapshot(self._files.folder, action.snapshot)
        except OSError as error:
            return written(time.monotonic(), offer=None, failure=cannot_keep(error))
        self._files.hold(action.job, action.attempt, "checkpoint", offer)
        return written(time.monotonic(), offer=offer)

    def _make_result(self, action: MakeResult) -> None:
        job, attempt, output = action.job, action.attempt, action.output
        try:
            part, offer = write_result(self._files.folder, action.suffix, output, self._frame_encoded)
        except Exception as error:  # noqa: BLE001  whatever the encoder raises fails the job, not the worker
            if isinstance(error, OSError):
                failure = cannot_keep(error)
            else:
                text = error.reason if isinstance(error, RequestError) else said(error)
                failure = Failure("stage", short(f"the result can't be written: {text}"))
            self._loop.post(ResultMade(time.monotonic(), job, attempt, None, failure=failure))
            return
        self._chores.do(partial(self._adopt_result, action, part, offer))

    def _frame_encoded(self) -> None:
        self._loop.post(FrameEncoded(time.monotonic()))

    def _adopt_result(self, action: MakeResult, part: Path, offer: FileOffer) -> None:
        job, attempt = action.job, action.attempt
        try:
            self._files.adopt(part, job, attempt, "result", offer)
        except OSError as error:
            self._loop.post(ResultMade(time.monotonic(), job, attempt, None, failure=cannot_keep(error)))
        else:
            self._loop.post(ResultMade(time.monotonic(), job, attempt, offer, dict(action.output.facts)))
