"""A session as its client sees it: plain state, and what a failure says as an exception. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from . import messages as m
from .client_events import Delivery
from .controls import KeyState, next_from_register
from .errors import OverloadError, ReelwireError, RequestError, SessionClosed, SessionFailed
from .messages import Artifact, Failure

RETRY_AFTER_S = 1.0
CHANGES_MAX = 256
READY = frozenset({"ready", "running", "draining"})
"""States in which the stages are initialized; a session that is released may never have been."""
TAKES_CONTROLS = frozenset({"opening", "initializing", "ready", "running"})
ENDED = frozenset({"completed", "closed", "cancelled", "failed"})
FAILED = frozenset({"stage", "worker_lost", "unreachable"})
"""Kinds of failure that mean that a session has failed, also where the broker hasn't said so yet."""


@dataclass(slots=True)
class SessionView:
    """One session as its client sees it; `client_streams` writes it, the shell only reads.

    Attributes:
        open_call: the call that waits for the session to exist or to be ready.
        key: what the client calls it until it has an id.
        chunks: its length.
        wait_ready: whether `open_call` waits until the session is initialized.
        id: the broker's name for it; empty until it exists.
        token: proves ownership, for a session that comes back after a disconnect, which this version doesn't have.
        state: as the broker last said.
        control_limit: explicit controls below it may be sent.
        have: chunks that came.
        taken: chunks that the application took.
        acked: chunks that the broker was told to be taken.
        acked_bytes: of the tensors of these chunks.
        unacked: bytes of the tensors of each chunk that came since, oldest first.
        ending: how the application ended it.
        ended: nothing comes any more, except what waits in `waiting`.
        failure: why it ended, if not as asked.
        forgotten: the application has dropped it.
        waiting: chunks that came and weren't taken, with their times.
        parked: controls that wait for their grant: index, call, content.
        asked: calls that wait for the broker's answer, oldest first, by index.
        submitted: when controls were sent, by index.
        changes: registers that no chunk has applied yet, with their times.
        tap_applied: number of the newest one-shot that a chunk has applied, of those that came.
        end_calls: calls that wait for the end.
        slot_refused: the broker's last refusal of a control without an index.
    """

    open_call: int
    key: str
    chunks: int
    wait_ready: bool
    id: str = ""
    token: str = ""
    state: str = "opening"
    control_limit: int = 0
    have: int = 0
    taken: int = 0
    acked: int = 0
    acked_bytes: int = 0
    unacked: deque[int] = field(default_factory=deque)
    ending: m.EndMode | None = None
    ended: bool = False
    failure: Failure | None = None
    forgotten: bool = False
    waiting: deque[Delivery] = field(default_factory=deque)
    parked: list[tuple[int, int, Artifact]] = field(default_factory=list)
    asked: dict[int, deque[int]] = field(default_factory=dict)
    submitted: dict[int, float] = field(default_factory=dict)
    changes: deque[tuple[KeyState, float]] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    tap_applied: int = 0
    end_calls: list[int] = field(default_factory=list)
    slot_refused: m.ControlRefused | None = None

    @property
    def takes_controls(self) -> bool:
        """Whether the broker still takes controls, as far as is known here."""
        return not self.ended and self.ending is None and self.state in TAKES_CONTROLS

    @property
    def ready(self) -> bool:
        """Whether its stages are initialized."""
        return self.state in READY

    def error(self) -> ReelwireError:
        """The error that says why nothing can be asked of the session any more."""
        if self.failure is not None:
            return error_of(self.failure, self.state)
        return SessionClosed(f"the session is {'ending' if self.ending and not self.ended else self.state}")

    def note_change(self, keys: KeyState, now: float) -> None:
        """Remember when the keys changed, until a chunk applies it."""
        self.changes.append((keys, now))

    def first_applied(self, chunk: m.Chunk) -> tuple[float, ...]:
        """When the key events were that this chunk, the newest to come, is the first to apply.

        A register that offered nothing while a newer one took its place was shown by no chunk: the session waited, or
        stood still for less than a chunk. Such an event isn't timed, or a pause of the person would count.
        """
        if not self.changes:
            self.tap_applied = max(self.tap_applied, chunk.applied.tap_revision)
            return ()
        applied: list[tuple[KeyState, float]] = []
        while self.changes and self.changes[0][0].revision <= chunk.applied.revision:
            applied.append(self.changes.popleft())
        offered = [next_from_register(keys, self.tap_applied) is not None for keys, _ in applied]
        self.tap_applied = max(self.tap_applied, chunk.applied.tap_revision)
        return tuple(at for place, (_, at) in enumerate(applied) if offered[place] or not any(offered[place:]))

    def acknowledge(self, chunks: int) -> None:
        """Count all chunks below `chunks` as taken."""
        for _ in range(chunks - self.acked):
            self.acked_bytes += self.unacked.popleft()
        self.acked = chunks

    def answered(self, index: int) -> int | None:
        """The call that the broker's next answer for `index` is meant for."""
        calls = self.asked.get(index)
        if not calls:
            return None
        call = calls.popleft()
        if not calls:
            del self.asked[index]
        return call


def error_of(failure: Failure, state: str = "failed") -> ReelwireError:
    """The exception that says what a failure says."""
    match failure.kind:
        case "request":
            return RequestError(failure.field or "request", failure.message)
        case "overload":
            retry = failure.retry_after_s
            return OverloadError(failure.message, RETRY_AFTER_S if retry is None else retry)
        case kind if state == "failed" or (state not in ENDED and kind in FAILED):
            return SessionFailed(failure.message, failure.stage, failure.index)
        case _:
            return SessionClosed(failure.message)
