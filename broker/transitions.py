"""The life of a session as data: (state, event) -> handler and the states it may lead to.

What peers say and what happens inside the broker are events alike. A pair that isn't listed is our own error for an
inner event, and a counted refusal for a peer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reelwire.messages import (
    Ack,
    EndSession,
    Failure,
    SetKeys,
    StageFailed,
    StageInitialized,
    StageReleased,
    SubmitControl,
    TaskDone,
    TaskStarted,
)

from .actors import Actor
from .peers import Peer

State = Literal[
    "opening",
    "initializing",
    "returning",
    "ready",
    "running",
    "draining",
    "releasing",
    "completed",
    "cancelled",
    "failed",
    "closed",
]
ENDED: tuple[State, ...] = ("completed", "cancelled", "failed", "closed")


@dataclass(frozen=True, slots=True)
class Placed:
    """There is room for the session: an actor for each stage."""

    actors: Mapping[str, Actor]


@dataclass(frozen=True, slots=True)
class PlacementExpired:
    """It waited for room long enough."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The turn's messages are all in: the keyboard may supply controls."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Something of the session is larger than its receiver accepts, and wasn't sent."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker that holds stages of the session is gone."""

    worker: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class ClientLost:
    """The client is gone without a word. A client that comes back is another one: nothing is resumed in this version."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client said goodbye."""


@dataclass(frozen=True, slots=True)
class GraceExpired:
    """The time for which a session outlives its lost client is over."""


@dataclass(frozen=True, slots=True)
class IdleExpired:
    """No control came for a long time, perhaps."""


@dataclass(frozen=True, slots=True)
class StallExpired:
    """Nothing was acknowledged for a long time, perhaps."""


@dataclass(frozen=True, slots=True)
class PaceExpired:
    """The picture has come far enough for the next chunk to be begun."""


@dataclass(frozen=True, slots=True)
class CloseExpired:
    """The time of the end is over, or a stage that it still waits for would be hung by now."""


@dataclass(frozen=True, slots=True)
class KeepExpired:
    """Nobody came for the last chunks."""


@dataclass(frozen=True, slots=True)
class ShuttingDown:
    """The broker stops, or a worker that the session lives at."""

    within_s: float
    worker: Peer | None = None


ClientSays = SetKeys | SubmitControl | Ack | EndSession
WorkerSays = StageInitialized | StageReleased | StageFailed | TaskStarted | TaskDone
Inner = (
    Placed
    | PlacementExpired
    | Looked
    | Unfit
    | WorkerLost
    | ClientLost
    | ClientLeft
    | GraceExpired
    | IdleExpired
    | StallExpired
    | PaceExpired
    | CloseExpired
    | KeepExpired
    | ShuttingDown
)
SessionEvent = ClientSays | WorkerSays | Inner
Timer = Literal["placement", "grace", "idle", "stall", "pace", "close", "keep"]
EXPIRED: dict[Timer, Inner] = {
    "placement": PlacementExpired(),
    "grace": GraceExpired(),
    "idle": IdleExpired(),
    "stall": StallExpired(),
    "pace": PaceExpired(),
    "close": CloseExpired(),
    "keep": KeepExpired(),
}
"""What a session is told when one of its timers is due."""


@dataclass(frozen=True, slots=True)
class Step:
    """A handler of `Session`, by name, and the states that it may lead to besides the one it starts from."""

    handler: str
    to: tuple[State, ...] = field(default=())


_GIVEN_UP: tuple[State, ...] = ("releasing",)
_TO_THE_END: tuple[State, ...] = ("draining", "releasing")

_UNPLACED: dict[type, Step] = {
    SetKeys: Step("on_keys"),
    SubmitControl: Step("on_early_control"),
    Ack: Step("on_early_ack"),
    EndSession: Step("on_end_unplaced", ("cancelled", "closed")),
    Placed: Step("on_placed", ("initializing",)),
    PlacementExpired: Step("on_placement_expired", ("failed",)),
    ClientLost: Step("on_client_lost"),
    ClientLeft: Step("on_give_up", ("cancelled",)),
    GraceExpired: Step("on_give_up", ("cancelled",)),
    ShuttingDown: Step("on_shutting_down", ("closed",)),
}
_INITIALIZING: dict[type, Step] = {
    SetKeys: Step("on_keys"),
    SubmitControl: Step("on_early_control"),
    Ack: Step("on_early_ack"),
    EndSession: Step("on_end", _GIVEN_UP),
    StageInitialized: Step("on_initialized", ("ready", "releasing")),
    StageFailed: Step("on_stage_failed", ("returning", "releasing")),
    Unfit: Step("on_unfit", _GIVEN_UP),
    WorkerLost: Step("on_worker_lost", ("releasing", "failed")),
    ClientLost: Step("on_client_lost"),
    ClientLeft: Step("on_give_up", _GIVEN_UP),
    GraceExpired: Step("on_give_up", _GIVEN_UP),
    ShuttingDown: Step("on_shutting_down", _GIVEN_UP),
}
_RETURNING: dict[type, Step] = {
    SetKeys: Step("on_keys"),
    SubmitControl: Step("on_early_control"),
    Ack: Step("on_early_ack"),
    EndSession: Step("on_end", _GIVEN_UP),
    StageReleased: Step("on_released", ("opening",)),
    StageFailed: Step("on_stage_failed", ("opening",)),
    WorkerLost: Step("on_worker_lost", ("opening",)),
    PlacementExpired: Step("on_placement_expired", _GIVEN_UP),
    ClientLost: Step("on_client_lost"),
    ClientLeft: Step("on_give_up", _GIVEN_UP),
    GraceExpired: Step("on_give_up", _GIVEN_UP),
    ShuttingDown: Step("on_shutting_down", _GIVEN_UP),
}
_LIVE: dict[type, Step] = {
    SetKeys: Step("on_keys"),
    SubmitControl: Step("on_control", ("running",)),
    Looked: Step("on_looked", ("running",)),
    Ack: Step("on_ack", _GIVEN_UP),
    EndSession: Step("on_end", _TO_THE_END),
    TaskStarted: Step("on_started"),
    TaskDone: Step("on_done", _TO_THE_END),
    StageFailed: Step("on_stage_failed", _TO_THE_END),
    Unfit: Step("on_unfit", _TO_THE_END),
    WorkerLost: Step("on_worker_lost", ("releasing", "failed")),
    ClientLost: Step("on_client_lost"),
    ClientLeft: Step("on_give_up", _GIVEN_UP),
    GraceExpired: Step("on_give_up", _GIVEN_UP),
    IdleExpired: Step("on_idle_expired", _TO_THE_END),
    StallExpired: Step("on_stall_expired", _GIVEN_UP),
    PaceExpired: Step("on_pace"),
    ShuttingDown: Step("on_shutting_down", _TO_THE_END),
}
_DRAINING: dict[type, Step] = {
    SetKeys: Step("on_late_keys"),
    SubmitControl: Step("on_late_control"),
    Ack: Step("on_ack", _GIVEN_UP),
    EndSession: Step("on_end", _GIVEN_UP),
    TaskStarted: Step("on_started"),
    TaskDone: Step("on_done", _GIVEN_UP),
    StageFailed: Step("on_stage_failed", _GIVEN_UP),
    Unfit: Step("on_unfit", _GIVEN_UP),
    WorkerLost: Step("on_worker_lost", ("releasing", "failed", "closed")),
    ClientLost: Step("on_client_lost", _GIVEN_UP),
    ClientLeft: Step("on_give_up", _GIVEN_UP),
    GraceExpired: Step("on_give_up", _GIVEN_UP),
    StallExpired: Step("on_stall_expired", _GIVEN_UP),
    PaceExpired: Step("on_pace"),
    CloseExpired: Step("on_drain_expired", _GIVEN_UP),
    ShuttingDown: Step("on_shutting_down", _GIVEN_UP),
}
_RELEASING: dict[type, Step] = {
    SetKeys: Step("on_late_keys"),
    SubmitControl: Step("on_late_control"),
    Ack: Step("on_ack", ENDED),
    EndSession: Step("on_end", ENDED),
    StageInitialized: Step("on_late_answer"),
    StageReleased: Step("on_released", ENDED),
    TaskStarted: Step("on_late_answer"),
    TaskDone: Step("on_late_answer"),
    StageFailed: Step("on_stage_failed", ENDED),
    Unfit: Step("on_unfit"),
    WorkerLost: Step("on_worker_lost", ENDED),
    ClientLost: Step("on_client_lost", ENDED),
    ClientLeft: Step("on_give_up", ENDED),
    GraceExpired: Step("on_give_up", ENDED),
    CloseExpired: Step("on_release_expired"),
    KeepExpired: Step("on_keep_expired", ENDED),
    ShuttingDown: Step("on_shutting_down", ENDED),
}

_TABLE: tuple[tuple[State, dict[type, Step]], ...] = (
    ("opening", _UNPLACED),
    ("initializing", _INITIALIZING),
    ("returning", _RETURNING),
    ("ready", _LIVE),
    ("running", _LIVE),
    ("draining", _DRAINING),
    ("releasing", _RELEASING),
)
TRANSITIONS: dict[tuple[State, type], Step] = {
    (state, event): step for state, steps in _TABLE for event, step in steps.items()
}
"""Everything that can happen to a session; an ended one is in no table any more, so nothing happens to it."""


def mermaid() -> str:
    """The state diagram, printed from the table: one arrow per pair of states, with the events that lead along it."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, event), step in TRANSITIONS.items():
        for target in step.to:
            if target != state:
                arrows.setdefault((state, target), []).append(event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> opening"]
    lines += [f"    {state} --> {target}: {', '.join(events)}" for (state, target), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in ENDED]
    return "\n".join(lines) + "\n"
