"""The attempts at jobs that a leader has, from the broker's word until it says that nobody wants to know of them. Pure.

::

    finding --> fetching --> ready --> running --> encoding --> made     (its result is offered)
       |           |           |          |            |
       `-----------+-----------+----------+------------`--> ended    (failed, cancelled)
                                          `--> handed    (the process is asked to stop: kept as far as it came)

What was begun outlives the broker: the next one is told of it. What wasn't is dropped with the broker that asked for it.
Which step comes when is the leader's business (`leader`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

from reelwire.job_spec import JobSpec
from reelwire.messages import (
    CheckpointKept,
    Failure,
    FileGone,
    FilePart,
    ForgetJob,
    HeldJob,
    JobEnded,
    JobFile,
    JobPhase,
    JobProgress,
    RunJob,
    StopJob,
    WantFile,
    WorkerMessage,
)
from reelwire.spec import Plain

from .actions import Log
from .attempts import UNBEGUN, Attempt
from .group_events import (
    AnyAction,
    CheckpointWritten,
    DropFiles,
    FilesFound,
    FindFiles,
    MakeResult,
    OrderReport,
    PartWritten,
    ResultMade,
    SendParts,
    WriteCheckpoint,
    WritePart,
)

if TYPE_CHECKING:
    from reelwire.pipeline.job import JobOutput

    from .checkpoints import Snapshot

WINDOW_PARTS = 4
"""Parts of a file that may be on their way from the broker."""
REPEAT_S = 10.0
"""How long an end waits for an answer before it is said again: the broker may not have known the group yet."""
HAND_BACK_S = 5.0
"""How long a process that was asked to stop waits for the broker to ask for more of the last checkpoint, or to have it."""


class LeaderJobs:
    """All attempts that a leader has.

    Args:
        kinds: the kinds of jobs that are done here.
        say: tells the broker something, if one is there.
        limit_s: how long one may come no further in a state that waits for something else than the ranks' steps.

    Attributes:
        now: seconds; kept by the leader.
        current: the one that the ranks are at.
        draining: none is begun any more.
        counters: what was dropped, by reason.
    """

    def __init__(
        self, kinds: Iterable[JobSpec], say: Callable[[WorkerMessage], list[AnyAction]], limit_s: float
    ) -> None:
        """Start with none."""
        self.now = 0.0
        self.current: Attempt | None = None
        self.draining = False
        self.counters: Counter[str] = Counter()
        self._suffixes = {kind.name: kind.suffix for kind in kinds}
        self._stages = {kind.name: kind.stages for kind in kinds}
        self._say = say
        self._limit_s = limit_s
        self._encoded_at = 0.0
        self._all: dict[tuple[str, int], Attempt] = {}

    # --- what the leader asks ------------------------------------------------------------------------------------------

    @property
    def held(self) -> tuple[HeldJob, ...]:
        """What a new broker is told first."""
        return tuple(
            HeldJob(*each.key, ended=each.state in ("made", "ended"))
            for each in self._all.values()
            if each.state not in UNBEGUN and not each.is_unwanted
        )

    @property
    def unbegun(self) -> list[int]:
        """Numbers of the bodies that will be asked for."""
        return [each.run.sequence for each in self._all.values() if each.state in UNBEGUN]

    @property
    def ready(self) -> list[Attempt]:
        """Those that could begin here, in the order in which they came."""
        return [each for each in self._all.values() if each.state == "ready"]

    @property
    def unsettled(self) -> str:
        """What keeps a process that was asked to stop, or that has no broker; empty: nothing."""
        return ", ".join(
            f"job {each.run.job} is {each.state}"
            for each in self._all.values()
            if each.state in ("running", "encoding", "made", "handed")
        )

    @property
    def due_at(self) -> float | None:
        """When `due` has something to do."""
        times = [time for each in self._all.values() for time in (each.due_at, self._late_at(each)) if time is not None]
        return min(times, default=None)

    # --- what the broker says ------------------------------------------------------------------------------------------

    def hear(
        self, message: RunJob | StopJob | ForgetJob | CheckpointKept | FilePart | FileGone | WantFile, attachment: int
    ) -> list[AnyAction]:
        """The broker says something about a job, or a file of one."""
        match message:
            case RunJob():
                return self._run(message)
            case StopJob():
                return self._stop(message)
            case ForgetJob():
                attempt = self._all.get((message.job, message.attempt))
                return [] if attempt is None else self._let_go(attempt)
            case CheckpointKept():
                return self._stored(message)
            case FilePart():
                return self._part(message)
            case FileGone():
                return self._gone(message)
            case WantFile():
                self._note_wanted(message)
                return [SendParts(attachment, message.file, message.first, message.parts)]

    def _run(self, run: RunJob) -> list[AnyAction]:
        if self.draining:
            return self._drop("draining", run)  # the broker asks somebody else when this one is gone
        if any(job == run.job and number >= run.attempt for job, number in self._all):
            return self._drop("duplicate", run)
        older = [each for each in self._all.values() if each.run.job == run.job]
        actions = [action for each in older for action in self._let_go(each)]
        attempt = self._all[run.job, run.attempt] = Attempt(run, moved_at=self.now)
        if run.kind not in self._suffixes:
            known = ", ".join(self._suffixes) or "none"
            failure = Failure("request", f"there is no {run.kind!r} here; accepted: {known}", field="kind")
            return [*actions, *self._end(attempt, failure)]
        attempt.progress = JobProgress(*attempt.key, "preparing")
        return [*actions, *self._say(attempt.progress), FindFiles(run)]

    def _stop(self, message: StopJob) -> list[AnyAction]:
        attempt = self._all.get((message.job, message.attempt))
        if attempt is None:
            return self._say(JobEnded(message.job, message.attempt, "cancelled"))
        if attempt.state == "running":
            attempt.is_stopped = True
        elif attempt.state in (*UNBEGUN, "encoding", "handed"):
            return self._end(attempt, None)
        word = attempt.result or attempt.ended  # it has ended already, and the first word on that counts
        return [] if word is None else self._say(word)

    def _let_go(self, attempt: Attempt) -> list[AnyAction]:
        """Nobody wants to know of it any more."""
        attempt.due_at = None
        if attempt.state in ("running", "encoding"):
            attempt.is_unwanted = attempt.is_stopped = True
            return []
        return self._remove(attempt)

    def _remove(self, attempt: Attempt) -> list[AnyAction]:
        del self._all[attempt.key]
        return [DropFiles(*attempt.key), *self._fetch()]

    # --- its files -----------------------------------------------------------------------------------------------------

    def found(self, event: FilesFound) -> list[AnyAction]:
        """Its files were looked for here."""
        for attempt in self._all.values():
            if attempt.run.sequence == event.sequence and attempt.state == "finding":
                attempt.files.update(event.files)
                attempt.missing = deque(event.missing)
                attempt.state, attempt.moved_at = "fetching" if attempt.missing else "ready", self.now
                return self._fetch()
        return []

    def _fetch(self) -> list[AnyAction]:
        """Ask for the next file that is missing; one after the other."""
        attempt = self._fetching()
        if attempt is None or attempt.asked:
            return []
        offer = attempt.missing[0]
        if not offer.parts:
            return self._end(attempt, Failure("request", f"file {offer.file} is empty; accepted: pictures and videos"))
        attempt.asked, attempt.moved_at = min(WINDOW_PARTS, offer.parts), self.now
        return self._say(WantFile(offer.file, 0, attempt.asked))

    def _fetching(self) -> Attempt | None:
        return next((each for each in self._all.values() if each.state == "fetching"), None)

    def _part(self, part: FilePart) -> list[AnyAction]:
        attempt = self._fetching()
        if attempt is None or attempt.missing[0].file != part.file or part.index != attempt.received:
            return self._drop("unexpected", part)
        if attempt.received >= attempt.asked:
            return self._drop("beyond_grant", part)
        attempt.received, attempt.moved_at = attempt.received + 1, self.now
        return [WritePart(attempt.missing[0], part)]

    def written(self, event: PartWritten) -> list[AnyAction]:
        """A part is on disk."""
        attempt = self._fetching()
        if attempt is None or attempt.missing[0].file != event.file:
            return []
        if event.failure is not None:
            return self._end(attempt, event.failure)
        attempt.moved_at = self.now
        if event.path:
            attempt.files[event.file] = event.path
            attempt.missing.popleft()
            attempt.asked = attempt.received = 0
            attempt.state = "fetching" if attempt.missing else "ready"
            return self._fetch()
        first, attempt.asked = attempt.asked, min(attempt.missing[0].parts, event.parts + WINDOW_PARTS)
        return self._say(WantFile(event.file, first, attempt.asked)) if attempt.asked > first else []

    def _gone(self, message: FileGone) -> list[AnyAction]:
        attempt = self._fetching()
        if attempt is None or attempt.missing[0].file != message.file:
            return self._drop("unexpected", message)
        return self._end(attempt, Failure("stage", f"a file of the job isn't there any more: {message.reason}"))

    def _note_wanted(self, message: WantFile) -> None:
        for attempt in self._all.values():
            if attempt.state == "handed" and attempt.kept is not None and attempt.kept.offer.file == message.file:
                attempt.moved_at = self.now
            if attempt.result is not None and attempt.result.offer.file == message.file:
                attempt.due_at = None

    def _stored(self, message: CheckpointKept) -> list[AnyAction]:
        attempt = self._all.get((message.job, message.attempt))
        if attempt is None or attempt.kept is None or attempt.kept.step != message.step:
            return []  # of one before the newest
        attempt.is_stored = True
        return self._wait_for_broker(attempt)

    # --- its steps -----------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """All ranks begin it now."""
        assert self.current is None, "another job is running"
        assert attempt.state == "ready", "it hasn't all that it needs"
        attempt.state, self.current = "running", attempt

    def stepped(self, report: OrderReport, given_s: float) -> list[AnyAction]:
        """This rank has done a step, the first one included, which ends before the first step of the model.

        The other ranks may be at it yet: what comes of the job when all have done it isn't said by that.
        """
        attempt = self.current
        assert attempt is not None, "a step of no job"
        before = attempt.progress
        if before is not None and before.state == "running":
            attempt.unkept += 1
            attempt.steps = attempt.steps + 1 if before.stage == report.stage else 0
            if before.stage != report.stage:
                attempt.done += before.steps
        elif attempt.run.checkpoint is not None:  # it goes on where an earlier attempt stood
            attempt.done = max(0, attempt.run.checkpoint_step - report.step)
        attempt.keeps = report.keeps
        step_s = report.took_s if attempt.steps > 1 else 0.0
        attempt.progress = JobProgress(
            *attempt.key, "running", report.stage, report.step, report.steps, step_s, given_s
        )
        return self._tell(attempt, attempt.progress)

    def succeeded(self, output: JobOutput) -> list[AnyAction]:
        """All ranks have come to the end of the current job; of one that was to end there in any case nothing is made."""
        attempt = self.current
        assert attempt is not None, "the end of no job"
        if attempt.is_stopped:
            return self.closed()
        self.current = None
        attempt.state, attempt.moved_at = "encoding", self.now
        attempt.progress = JobProgress(*attempt.key, "encoding")
        make = MakeResult(*attempt.key, self._suffixes[attempt.run.kind], output)
        return [*self._tell(attempt, attempt.progress), make]

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the state of the current job is to be kept where it stands.

        Not while the last one is written, or on its way to the broker, unless that takes it very long.
        """
        attempt = self.current
        if attempt is None or attempt.progress is None or not attempt.keeps or not attempt.run.checkpoint_steps:
            return False
        if attempt.is_writing:
            return False
        where, every = attempt.progress, attempt.run.checkpoint_steps
        if where.step >= where.steps and where.stage == self._stages[attempt.run.kind][-1]:
            return False
        is_moving = attempt.kept is not None and not attempt.is_stored
        return attempt.unkept >= (2 * every if is_moving else every)

    def keep(self, snapshot: Snapshot) -> list[AnyAction]:
        """The state of the current job was taken; it is written while the job goes on."""
        attempt = self.current
        assert attempt is not None and attempt.progress is not None, "a checkpoint of no job"  # noqa: PT018
        assert not attempt.is_writing, "two checkpoints at once"
        attempt.unkept, attempt.is_writing = 0, True
        return [WriteCheckpoint(*attempt.key, attempt.done + attempt.progress.step, snapshot)]

    def kept(self, event: CheckpointWritten) -> list[AnyAction]:
        """The state of a job is in a file, or can't be: then the job goes on, and the next one may be."""
        attempt = self._all.get((event.job, event.attempt))
        if attempt is None:
            return [DropFiles(event.job, event.attempt)]
        attempt.is_writing = False
        if attempt.state not in ("running", "encoding", "handed"):  # it has ended meanwhile
            return [DropFiles(*attempt.key, "checkpoint")]
        if event.offer is None:
            reason = "" if event.failure is None else event.failure.message
            fields = {"job": event.job, "attempt": event.attempt, "step": event.step, "reason": reason}
            return [Log("error", "checkpoint_failed", fields), *self._wait_for_broker(attempt)]
        attempt.is_stored = False
        attempt.kept = JobFile(*attempt.key, "checkpoint", event.offer, event.step)
        said = self._tell(attempt, attempt.kept)
        return [*said, DropFiles(*attempt.key, "checkpoint", event.offer.file), *self._wait_for_broker(attempt)]

    def not_kept(self) -> None:
        """The state couldn't be taken; the job goes on, and the next one may be."""
        if self.current is not None:
            self.current.unkept, self.current.keeps = 0, False

    def closed(self) -> list[AnyAction]:
        """All ranks have closed the current job before its end."""
        attempt, self.current = self.current, None
        assert attempt is not None, "no job was closed"
        if attempt.is_unwanted:
            return self._remove(attempt)
        if attempt.ends:
            return self._end(attempt, attempt.failure)
        attempt.state = "handed"
        return self._wait_for_broker(attempt)

    def _wait_for_broker(self, attempt: Attempt) -> list[AnyAction]:
        """What was handed back is let go of when the broker has the last checkpoint for good, if one was written."""
        if attempt.state != "handed":
            return []
        if not attempt.is_writing and (attempt.kept is None or attempt.is_stored):
            return self._remove(attempt)
        attempt.moved_at = self.now
        return []

    def encoder_moved(self) -> None:
        """The encoder writes: whoever waits for it, behind others too, isn't late."""
        self._encoded_at = self.now

    def made(self, event: ResultMade) -> list[AnyAction]:
        """The result of a job is in a file, or can't be."""
        self.encoder_moved()
        attempt = self._all.get((event.job, event.attempt))
        if attempt is None:
            return [DropFiles(event.job, event.attempt)]
        if attempt.state != "encoding":
            return [DropFiles(event.job, event.attempt, "result")]
        if attempt.is_unwanted:
            return self._remove(attempt)
        if event.failure is not None or event.offer is None:
            return self._end(attempt, event.failure or Failure("stage", "the result's file wasn't written"))
        facts = cast("Mapping[str, Plain]", event.facts)
        attempt.state, attempt.kept = "made", None
        attempt.result = JobFile(*attempt.key, "result", event.offer, facts=facts)
        attempt.due_at = self.now + REPEAT_S
        return [*self._say(attempt.result), DropFiles(*attempt.key, "checkpoint")]

    def _end(self, attempt: Attempt, failure: Failure | None) -> list[AnyAction]:
        """It has failed, or was cancelled."""
        state: JobPhase = "cancelled" if failure is None else "failed"
        attempt.state, attempt.failure, attempt.kept = "ended", failure, None
        attempt.missing.clear()
        attempt.ended = JobEnded(*attempt.key, state, failure)
        attempt.due_at = self.now + REPEAT_S
        reason = "" if failure is None else failure.message
        log = Log(
            "info",
            "job_ended",
            {"job": attempt.run.job, "attempt": attempt.run.attempt, "state": state, "reason": reason},
        )
        return [*self._say(attempt.ended), DropFiles(*attempt.key), log, *self._fetch()]

    # --- brokers come and go ---------------------------------------------------------------------------------------------

    def joined(self) -> list[AnyAction]:
        """A broker is there: say what holds."""
        actions: list[AnyAction] = []
        for attempt in [each for each in self._all.values() if not each.is_unwanted]:
            if attempt.state in ("running", "encoding"):
                words: tuple[WorkerMessage | None, ...] = (attempt.progress, attempt.kept)
            else:
                words = (attempt.result, attempt.ended)
                attempt.due_at = self.now + REPEAT_S
            actions += [action for word in words if word is not None for action in self._say(word)]
        return actions

    def abandon(self) -> list[AnyAction]:
        """The broker is lost, and with it whoever wanted what wasn't begun yet."""
        actions = self._drop_unbegun()
        for attempt in self._all.values():
            attempt.due_at = None
        return actions

    def drain(self) -> list[AnyAction]:
        """Begin none any more; the broker gives to others what it gave to this one."""
        self.draining = True
        return self._drop_unbegun()

    def due(self) -> list[AnyAction]:
        """Time has come: say again how those ended of which nobody wants to know, yet; give up those that don't move."""
        actions: list[AnyAction] = []
        for attempt in sorted(self._all.values(), key=lambda each: each.moved_at):
            late_at = self._late_at(attempt)
            if late_at is not None and late_at <= self.now:
                actions += self._give_up(attempt)
        for attempt in [each for each in self._all.values() if each.due_at is not None and each.due_at <= self.now]:
            attempt.due_at = self.now + REPEAT_S
            word = attempt.result or attempt.ended
            actions += [] if word is None else self._say(word)
        return actions

    def _late_at(self, attempt: Attempt) -> float | None:
        """When it has come no further for too long; what waits for other ranks isn't late by itself."""
        if attempt.state == "encoding":
            return max(attempt.moved_at, self._encoded_at) + self._limit_s
        if attempt.state == "finding" or attempt is self._fetching():
            return attempt.moved_at + self._limit_s
        if attempt.state == "handed":
            return attempt.moved_at + (self._limit_s if attempt.is_writing else HAND_BACK_S)
        return None

    def _give_up(self, attempt: Attempt) -> list[AnyAction]:
        if attempt.state == "encoding":
            self._encoded_at = self.now  # those behind have waited for this one until now, and have the whole time yet
        if attempt.is_unwanted or attempt.state == "handed":
            return self._remove(attempt)
        what = "its result came no further" if attempt.state == "encoding" else "its files weren't looked for"
        if attempt.state == "fetching":
            what = f"no more of its file {attempt.missing[0].file} came"
        return self._end(attempt, Failure("timeout", f"{what} within {self._limit_s:g} s"))

    def check(self) -> None:
        """Assert what always holds."""
        running = [each for each in self._all.values() if each.state == "running"]
        assert running == ([self.current] if self.current is not None else []), "the ranks are at another job"
        for key, attempt in self._all.items():
            assert key == attempt.key, "an attempt under another's name"
            assert (attempt.state == "made") == (attempt.result is not None), "a result in the wrong state"
            assert (attempt.state == "ended") == (attempt.ended is not None), "an end in the wrong state"
            assert (attempt.state == "fetching") == bool(attempt.missing), "files are missing in the wrong state"
            assert attempt.received <= attempt.asked, "a part that nobody asked for"
            assert not attempt.is_unwanted or attempt.state in ("running", "encoding"), "kept for nobody"
        moving = self._fetching()
        assert moving is None or moving.asked, "a file is missing, and nobody asks for it"

    def _drop_unbegun(self) -> list[AnyAction]:
        dropped = [each for each in self._all.values() if each.state in UNBEGUN]
        for each in dropped:
            del self._all[each.key]
        return [DropFiles(*each.key) for each in dropped]

    def _tell(self, attempt: Attempt, message: WorkerMessage) -> list[AnyAction]:
        return [] if attempt.is_unwanted else self._say(message)

    def _drop(self, reason: str, message: object) -> list[AnyAction]:
        self.counters[reason] += 1
        return [Log("debug", "message_dropped", {"reason": reason, "message": type(message).__name__})]
