"""The life of a job as data: (state, event) -> handler and the states it may lead to.

A job is *checked* before it exists for anybody, and *committed* when its record is durable: only then it is acknowledged, and
clients can ask anything of it.
A result for which there is no room is *unstored*: its leader keeps it until there is. What clients are told of a state
stands in `PHASES`. A pair that isn't listed is our own error for an inner event, and a counted refusal for a worker's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reelwire.messages import Failure, JobEnded, JobFile, JobPhase, JobProgress

from .groups import Group
from .job_record import StoredFile
from .peers import Peer

State = Literal[
    "checking",
    "committing",
    "queued",
    "rejoining",
    "preparing",
    "running",
    "encoding",
    "stopping",
    "taking",
    "unstored",
    "exporting",
    "ending",
    "succeeded",
    "failed",
    "cancelled",
    "refused",
    "forgotten",
]
WAITING: tuple[State, ...] = ("checking", "committing", "queued")
"""What counts against the limits of the queue."""
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")
GONE: tuple[State, ...] = ("refused", "forgotten")
"""Nothing happens to such a job any more: it is in no table."""
PHASES: dict[State, JobPhase] = {
    "checking": "queued",
    "committing": "queued",
    "queued": "queued",
    "rejoining": "running",
    "preparing": "preparing",
    "running": "running",
    "encoding": "encoding",
    "taking": "encoding",
    "unstored": "encoding",
    "exporting": "encoding",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""What clients are told; while it is stopped, and until its end is durable, a job is what it was before."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The request is right, and all of its files are in the store."""

    media: Mapping[str, tuple[StoredFile, ...]]


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is wrong, or there is no room for it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Committed:
    """The record of the job, or of its end, is durable."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A group is free for the job."""

    group: Group


@dataclass(frozen=True, slots=True)
class Adopted:
    """A group that has come back has the job already; `is_over`: the attempt has ended there."""

    group: Group
    attempt: int
    is_over: bool


@dataclass(frozen=True, slots=True)
class NotHeld:
    """The leader of the group that had the job is back, and hasn't it: it never heard of it, or hadn't begun it."""


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The group that had the job is over, or hasn't come to the next broker; `was_asked`: it had been asked to stop."""

    reason: str
    was_asked: bool = False


@dataclass(frozen=True, slots=True)
class LeaderAway:
    """The leader of the group that had the job isn't attached, and may come back with it."""


@dataclass(frozen=True, slots=True)
class FileTaken:
    """The file that the job's leader announced has come into the store, or can't."""

    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class TakeDue:
    """It is time to take the result again, for which there was no room."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result was written to the path that was asked for, or can't be."""

    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A client wants the job to end; it is answered when that, or the end itself, is durable."""

    peer: Peer
    request: int


@dataclass(frozen=True, slots=True)
class DeleteAsked:
    """A client wants the job to be forgotten; it is answered when that is durable."""

    peer: Peer
    request: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Somebody says that they have the whole result."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The result makes room for other files."""


@dataclass(frozen=True, slots=True)
class KeepExpired:
    """The job is remembered no longer."""


WorkerSays = JobProgress | JobFile | JobEnded
Inner = (
    Checked
    | Refused
    | Committed
    | Begun
    | Adopted
    | NotHeld
    | GroupLost
    | LeaderAway
    | FileTaken
    | TakeDue
    | Exported
    | CancelAsked
    | DeleteAsked
    | Fetched
    | Evicted
    | KeepExpired
)
JobEvent = WorkerSays | Inner


@dataclass(frozen=True, slots=True)
class Step:
    """A handler of `Job`, by name, and the states that it may lead to besides the one it starts from."""

    handler: str
    to: tuple[State, ...] = field(default=())


_CHECKING: dict[type, Step] = {
    Checked: Step("on_checked", ("committing",)),
    Refused: Step("on_refused", ("refused",)),
}
_COMMITTING: dict[type, Step] = {Committed: Step("on_accepted", ("queued",))}
_QUEUED: dict[type, Step] = {
    Begun: Step("on_begun", ("preparing", "ending")),
    Adopted: Step("on_adopted", ("running",)),
    CancelAsked: Step("on_cancel_waiting", ("ending",)),
    DeleteAsked: Step("on_delete_early"),
}
_REJOINING: dict[type, Step] = {
    Adopted: Step("on_adopted", ("running",)),
    NotHeld: Step("on_not_held", ("queued",)),
    GroupLost: Step("on_group_lost", ("queued", "ending")),
    CancelAsked: Step("on_cancel_waiting", ("ending",)),
    DeleteAsked: Step("on_delete_early"),
}
_AT_WORK: dict[type, Step] = {
    JobProgress: Step("on_progress", ("preparing", "running", "encoding")),
    JobFile: Step("on_file", ("taking", "unstored", "exporting", "ending")),
    JobEnded: Step("on_ended", ("ending",)),
    FileTaken: Step("on_checkpoint_taken"),
    GroupLost: Step("on_group_lost", ("queued",)),
    LeaderAway: Step("on_leader_away", ("rejoining",)),
    CancelAsked: Step("on_cancel_running", ("stopping",)),
    DeleteAsked: Step("on_delete_early"),
}
_STOPPING: dict[type, Step] = {
    JobProgress: Step("on_late_progress"),
    JobFile: Step("on_file", ("taking", "exporting", "ending")),
    JobEnded: Step("on_ended", ("ending",)),
    GroupLost: Step("on_group_lost", ("ending",)),
    LeaderAway: Step("on_leader_away", ("ending",)),
    CancelAsked: Step("on_cancel_noted"),
    DeleteAsked: Step("on_delete_early"),
}
_TAKING: dict[type, Step] = {
    JobFile: Step("on_file_again"),
    FileTaken: Step("on_result_taken", ("unstored", "exporting", "ending")),
    GroupLost: Step("on_group_lost", ("queued", "ending")),
    LeaderAway: Step("on_leader_away", ("rejoining", "ending")),
    CancelAsked: Step("on_cancel_noted"),
    DeleteAsked: Step("on_delete_early"),
}
_UNSTORED: dict[type, Step] = {
    JobFile: Step("on_file", ("taking", "exporting", "ending")),
    TakeDue: Step("on_take_due", ("taking", "exporting", "ending")),
    GroupLost: Step("on_group_lost", ("queued",)),
    LeaderAway: Step("on_leader_away", ("rejoining",)),
    CancelAsked: Step("on_cancel_waiting", ("ending",)),
    DeleteAsked: Step("on_delete_early"),
}
_EXPORTING: dict[type, Step] = {
    JobFile: Step("on_file_again"),
    Exported: Step("on_exported", ("ending",)),
    GroupLost: Step("on_group_left"),
    LeaderAway: Step("on_group_left"),
    CancelAsked: Step("on_cancel_noted"),
    DeleteAsked: Step("on_delete_early"),
}
_ENDING: dict[type, Step] = {
    JobFile: Step("on_file_again"),
    JobEnded: Step("on_ended_again"),
    Committed: Step("on_end_durable", ENDED),
    GroupLost: Step("on_group_left"),
    LeaderAway: Step("on_group_left"),
    CancelAsked: Step("on_cancel_noted"),
    DeleteAsked: Step("on_delete_early"),
}
_ENDED: dict[type, Step] = {
    CancelAsked: Step("on_cancel_late"),
    DeleteAsked: Step("on_delete", ("forgotten",)),
    KeepExpired: Step("on_keep_expired", ("forgotten",)),
}
_SUCCEEDED: dict[type, Step] = _ENDED | {Fetched: Step("on_fetched"), Evicted: Step("on_evicted")}

_TABLE: tuple[tuple[State, dict[type, Step]], ...] = (
    ("checking", _CHECKING),
    ("committing", _COMMITTING),
    ("queued", _QUEUED),
    ("rejoining", _REJOINING),
    ("preparing", _AT_WORK),
    ("running", _AT_WORK),
    ("encoding", _AT_WORK),
    ("stopping", _STOPPING),
    ("taking", _TAKING),
    ("unstored", _UNSTORED),
    ("exporting", _EXPORTING),
    ("ending", _ENDING),
    ("succeeded", _SUCCEEDED),
    ("failed", _ENDED),
    ("cancelled", _ENDED),
)
TRANSITIONS: dict[tuple[State, type], Step] = {
    (state, event): step for state, steps in _TABLE for event, step in steps.items()
}
"""Everything that can happen to a job."""


def mermaid() -> str:
    """The state diagram, printed from the table: one arrow per pair of states, with the events that lead along it."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, event), step in TRANSITIONS.items():
        for target in step.to:
            if target != state:
                arrows.setdefault((state, target), []).append(event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> checking", "    [*] --> rejoining"]
    lines += [f"    {state} --> {target}: {', '.join(events)}" for (state, target), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in GONE]
    return "\n".join(lines) + "\n"
