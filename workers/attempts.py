"""What a leader knows of one attempt at a job. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from reelwire.messages import Failure, FileOffer, JobEnded, JobFile, JobProgress, RunJob

State = Literal["finding", "fetching", "ready", "running", "encoding", "made", "ended", "handed"]
UNBEGUN = ("finding", "fetching", "ready")


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a job, as its leader knows it.

    Attributes:
        run: what is to be done.
        state: see `leader_jobs`.
        files: path of each of its files, by its name in the store.
        missing: files that must be fetched, the one that is being fetched first.
        asked: parts of that one that were asked for.
        received: parts of it that came.
        is_stopped: it ends at the next step.
        is_unwanted: nobody wants to know of it.
        failure: why it has failed.
        progress: where it stands.
        steps: steps of this stage that this attempt did.
        done: steps of all stages before this one.
        unkept: steps since its state was taken, or since the beginning.
        keeps: its state could be kept where it stands.
        is_writing: the state that was taken last is being written.
        kept: the newest checkpoint.
        is_stored: that is durable at the broker.
        result: the result.
        ended: how it has ended otherwise.
        due_at: when an end that nobody answered is said again.
        moved_at: when it came into this state, or a bit further in it.
    """

    run: RunJob
    state: State = "finding"
    files: dict[str, str] = field(default_factory=dict)
    missing: deque[FileOffer] = field(default_factory=deque)
    asked: int = 0
    received: int = 0
    is_stopped: bool = False
    is_unwanted: bool = False
    failure: Failure | None = None
    progress: JobProgress | None = None
    steps: int = 0
    done: int = 0
    unkept: int = 0
    keeps: bool = False
    is_writing: bool = False
    kept: JobFile | None = None
    is_stored: bool = False
    result: JobFile | None = None
    ended: JobEnded | None = None
    due_at: float | None = None
    moved_at: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """Job and number of the attempt."""
        return self.run.job, self.run.attempt

    @property
    def ends(self) -> bool:
        """Whether it is closed at the next step."""
        return self.is_stopped or self.failure is not None
