"""How a session is steered: controls by index, from the pending slot and from the keys, bound early or late.

`making.Making` adds how chunks are made of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from reelwire.errors import ControlError
from reelwire.messages import (
    ControlAccepted,
    ControlRefused,
    FromBroker,
    OpenSession,
    SetKeys,
    SetStageKeys,
    SubmitControl,
    TaskDone,
    TaskStarted,
)
from reelwire.spec import StreamSpec

from .control import ControlDesk, check_control
from .desk import Desk, shortened
from .fitting import fitted
from .flow import Flow
from .peers import Peer
from .seats import STAGE_EPOCH, Seats
from .timing import Timing
from .transitions import Looked, SessionEvent, State, Timer

STEERED = ("ready", "running")
"""The states in which controls are taken."""
AHEAD_MAX = 1
"""Chunks that keys, the pending slot, and the grant for controls by index may be ahead of the output."""

_REFUSALS = {
    "malformed": "an index is 0 or more",
    "duplicate": "the control of this chunk was accepted before",
    "gap": "the controls before it are missing",
    "past_end": "the session has no such chunk",
    "no_room": "the chunks before it aren't far enough",
}


class Steering(ABC):
    """What `Session` is made of towards whoever steers it.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.

    Attributes:
        state: see `transitions`.
        owner: None while the client is lost.
        flow: edges and cursors.
        controls: the key register, the pending slot, and what chunks were given from them.
        timing: the clock.
        seats: the places at the actors; None until the session has them.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """Nothing is held and nothing flows."""
        self.desk = desk
        self.id, self.token = identity
        self.owner: Peer | None = owner
        self.spec = spec
        self.chunks = request.chunks
        self.epoch = 1
        self.state: State = "opening"
        self.flow = Flow(spec, request.chunks)
        self.controls = ControlDesk(spec, request.control_binding, desk.now)
        self.timing = Timing(spec, desk.now)
        self.seats: Seats | None = None
        self._steered = spec.control_stage().name
        self._refill = "never" if spec.prefetch is None else spec.prefetch.refill

    @abstractmethod
    def _prefetch(self) -> None:
        """Fill the prefetch window as far as its edge has room."""

    @abstractmethod
    def _stir(self) -> None:
        """Have it looked at which stages can go on now."""

    # --- controls ------------------------------------------------------------------------------------------------------

    def on_keys(self, event: SetKeys) -> None:
        """A newer register replaces the one before; what it offers is looked at when the turn ends.

        A reservation that waits at its actor gets it then as well, once for all changes of the turn.
        """
        try:
            is_newer = self.controls.set_keys(event.keys, self.desk.now)
        except ControlError as error:
            self._refuse_control(None, error)
        else:
            if is_newer and self.controls.unbound is not None:
                self.desk.rekeyed[self.id] = None
            self._touch()

    def on_early_control(self, event: SubmitControl) -> None:
        """Before the stages are there only the pending slot takes a control."""
        if event.index is None:
            self.on_control(event)
        else:
            self._refuse_control(event.index, ControlError("no_room", "the session isn't ready yet", 0))

    def on_control(self, event: SubmitControl) -> None:
        """An explicit control, for the next index or for the pending slot."""
        try:
            control = check_control(event.control, self.spec)
        except ControlError as error:
            self._refuse_control(event.index, error)
            return
        if event.index is None:
            self.controls.set_pending(control, self.desk.now)
            self._touch()
            return
        expected = self.flow.next_control_index
        code = self.flow.refusal(event.index)
        if code is None:
            self.controls.give(event.index, control)
            self._accept(by_index=True)
            return
        text = f"control {event.index} of {self.chunks}: {_REFUSALS[code]}; expected: {expected}"
        self._refuse_control(event.index, ControlError(code, text, expected))

    def on_looked(self, _event: Looked) -> None:
        """Take controls from the slot, the one-shot and the held keys, at most one chunk ahead of the output."""
        while self._takes_control():
            self.controls.take(self.flow.next_control_index)
            self._accept()

    def on_late_keys(self, event: SetKeys) -> None:
        """A register that crossed the end of the session changes nothing."""
        self.refuse("late_controls", event)

    def on_late_control(self, event: SubmitControl) -> None:
        """No control is taken any more."""
        self._refuse_control(
            event.index, ControlError("ended", f"the session takes no more controls: it is {self.state}")
        )

    def _takes_control(self) -> bool:
        """Whether the slot or the keys offer a control, and the next chunk can have it."""
        flow = self.flow
        return (
            flow.control.issued <= flow.next_commit + AHEAD_MAX and self.controls.offers and flow.has_room_for_control()
        )

    def _accept(self, *, by_index: bool = False) -> None:
        """The next chunk was given its control: let it flow."""
        now, flow = self.desk.now, self.flow
        before = flow.next_condition_index
        index = flow.next_control_index
        applied = self.controls.given[index].applied
        flow.submit(None if applied is None else applied.control)
        if flow.condition is not None and flow.next_condition_index > before:
            self.timing.entered(flow.condition.artifact, index, now)
        if applied is not None:
            self.timing.entered(self.spec.control, index, now)
        self.controls.active_at = now
        self.state = "running"
        if applied is not None and applied.source == "explicit":
            self._tell(ControlAccepted(self.id, index, by_index))
        if self._refill == "with_control":
            self._prefetch()
        self._stir()

    def _refuse_control(self, index: int | None, error: ControlError) -> None:
        self.desk.count("controls_refused", session=self.id, code=error.code)
        self._tell(ControlRefused(self.id, index, error.code, shortened(str(error)), error.expected))

    # --- reservations --------------------------------------------------------------------------------------------------

    def tell_keys(self) -> None:
        """Send the register after the reservation that is open, if it is at its actor already."""
        index = self.controls.unbound
        if index is None or self.flow.stages[self._steered].dispatched <= index:
            return  # it was bound meanwhile, or its task will carry the register
        assert self.seats is not None, "reserved without a place"
        worker = self.seats.actor(self._steered).worker
        keys = self.controls.state
        message = SetStageKeys(self.id, self.spec.name, self._steered, self.epoch, STAGE_EPOCH, keys)
        packed, reason = fitted(message, worker.limits)
        if reason is None:
            self.desk.send(worker, message, packed)
        else:
            self.desk.count("stage_keys_unfit", session=self.id, peer=worker.name)

    def _bound_early(self, event: TaskStarted) -> None:
        """An actor says what it bound a reservation to; nonsense is left for its result to be judged by."""
        if event.applied is None or not self._is_open(event.stage, event.index):
            return
        if self.controls.objection(event.applied) is None:
            self._bind(event)

    def _misbound(self, event: TaskDone) -> str | None:
        """Why what a result says of its control can't be; None when it can. It may be the first that says it."""
        if self._is_open(event.stage, event.index):
            reason = self.controls.objection(event.applied)
            if reason is None:
                self._bind(event)
            return reason
        if event.applied is None:
            return None
        snapshot = self.controls.given.get(event.index)
        if event.stage == self._steered and (snapshot is None or snapshot.applied == event.applied):
            return None
        return "it says that it applied another control than it did"

    def _is_open(self, stage: str, index: int) -> bool:
        """Whether a task has the reservation that isn't bound."""
        return index == self.controls.unbound and stage == self._steered

    def _bind(self, event: TaskStarted | TaskDone) -> None:
        """The chunk's control is known, and its clock starts; the next one may be reserved."""
        assert event.applied is not None, "bound to nothing"
        self.controls.bind(event.applied)
        self.timing.entered(self.spec.control, event.index, self.desk.now)
        self._touch()

    # --- helpers -------------------------------------------------------------------------------------------------------

    def refuse(self, reason: str, event: SessionEvent) -> None:
        """Count something that a peer said and that changes nothing here."""
        self.desk.count(reason, session=self.id, state=self.state, message=type(event).__name__)

    def _touch(self) -> None:
        """Have the slot and the keys looked at when the turn ends, if that can lead to anything."""
        touched = self.desk.touched
        if self.id not in touched and self.state in STEERED and self._takes_control():
            touched[self.id] = None

    def _tell(self, message: FromBroker) -> None:
        if self.owner is not None:
            self.desk.send(self.owner, message)

    def _timer(self, kind: Timer, in_s: float) -> None:
        self.desk.timers.set((kind, self.id), self.desk.now + in_s)

    def _drop_timers(self, *kinds: Timer) -> None:
        for kind in kinds:
            self.desk.timers.drop((kind, self.id))
