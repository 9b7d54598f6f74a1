"""What steers a session at the broker: its key register and the one pending slot become controls, one per chunk.

Early binding: a control is made when it is accepted, and is what the chunk is denoised with, whatever the keys do later.
Late binding: a control of the keys is accepted as a *reservation*, at most one of which is open; the stage's actor binds
it when the chunk begins and says to what. Either way the consumed one-shot and the pose follow from what was applied.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from reelwire.binding import bind, keys_control
from reelwire.checks import shown
from reelwire.controls import KeyState, canonical_keys, merged
from reelwire.errors import ControlError, RequestError
from reelwire.messages import Applied, Artifact, ControlBinding, Reservation
from reelwire.spec import StreamSpec, check_tensors

CHANGES_MAX = 32
CONTROL_VALUES = ("keys", "reset_pose", "translation_norm")
"""Plain values of a control; they are on the wire beside its tensors."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The control of one chunk.

    Attributes:
        applied: where it came from, and its content; None for a reservation that isn't bound.
        changes_at: when the key changes arrived that it is the first to apply, in seconds.
    """

    applied: Applied | None
    changes_at: tuple[float, ...] = ()


class ControlDesk:
    """The register, the pending slot, and what chunks were given from both.

    Args:
        spec: says which keys there are.
        binding: when a control of the keys is made.
        now: when the session was asked for, in seconds.

    Attributes:
        state: the register.
        pending: the explicit control without an index that waits.
        given: the controls of chunks that were accepted and aren't committed, by index.
        unbound: the chunk whose control is a reservation that isn't bound; None when there is none.
        consumed_tap: number of the newest one-shot that a chunk applied.
        consumed_pose: number of the newest request for the first pose that a chunk followed.
        active_at: when the register or the slot last changed, in seconds.
        taps_overwritten: one-shots that a newer one replaced before a chunk took them.
        explicit_overwritten: pending controls that a newer one replaced.
    """

    def __init__(self, spec: StreamSpec, binding: ControlBinding, now: float) -> None:
        """Start with nothing held and nothing pending."""
        self._spec = spec
        self._is_late = binding == "late"
        self.state = KeyState()
        self.pending: Artifact | None = None
        self.given: dict[int, Snapshot] = {}
        self.unbound: int | None = None
        self.consumed_tap = 0
        self.consumed_pose = 0
        self.active_at = now
        self.taps_overwritten = 0
        self.explicit_overwritten = 0
        self._newest_tap = 0
        self._newest_pose = 0
        self._changes: deque[tuple[int, float]] = deque(maxlen=CHANGES_MAX)
        self._replaced: deque[int] = deque(maxlen=CHANGES_MAX)

    def set_keys(self, keys: KeyState, now: float) -> bool:
        """Take a register over if it is newer than ours; whether it was.

        Raises:
            ControlError: it names a key that the stream doesn't have; nothing changed.
        """
        try:
            held, tap = canonical_keys(keys.held, self._spec), canonical_keys(keys.tap_keys, self._spec)
        except RequestError as error:
            raise ControlError("unknown_key", error.reason) from None
        newer = merged(self.state, replace(keys, held=held, tap_keys=tap))
        if newer is self.state:
            return False
        if self._tap_pending and newer.tap_revision > self.state.tap_revision:
            self.taps_overwritten += 1
            self._replaced.append(self.state.tap_revision)
        self.state = newer
        self._newest_tap = max(self._newest_tap, newer.tap_revision)
        self._newest_pose = max(self._newest_pose, newer.reset_pose_revision)
        self.active_at = now
        self._changes.append((newer.revision, now))
        self._forget_changes()
        return True

    def set_pending(self, control: Artifact, now: float) -> None:
        """Put an explicit control into the slot; the newest wins."""
        if self.pending is not None:
            self.explicit_overwritten += 1
        self.pending = control
        self.active_at = now

    @property
    def offers(self) -> bool:
        """Whether `take` would give a control."""
        return self.pending is not None or (self.unbound is None and self._keys_offer)

    @property
    def holds(self) -> bool:
        """Whether a key is down."""
        return bool(self.state.held)

    def take(self, index: int) -> None:
        """Give chunk `index` what is offered: the pending control, else a one-shot that no chunk had, else what is held."""
        assert self.offers, "taken from nothing"
        if self.pending is not None:
            control, self.pending = self.pending, None
            self.give(index, control)
            return
        self.unbound = index
        self.given[index] = Snapshot(None)
        if not self._is_late:
            self.bind(bind(self.reservation(), self.state))

    def give(self, index: int, control: Artifact) -> None:
        """Give chunk `index` an explicit control."""
        self.given[index] = Snapshot(Applied("explicit", control, 0, self.consumed_tap, self.consumed_pose))

    def reservation(self) -> Reservation:
        """What the actor needs to bind the open reservation."""
        return Reservation(self._spec.control, self.state, self.consumed_tap, self.consumed_pose)

    def objection(self, applied: Applied | None) -> str | None:
        """Why the open reservation can't have been bound to this, whatever the keys were; None when it can."""
        if applied is None:
            return "it doesn't say which control it applied"
        taps, poses = applied.tap_revision - self.consumed_tap, applied.pose_revision - self.consumed_pose
        keys, is_reset = applied.control.values.get("keys"), applied.control.values.get("reset_pose")
        known = self._spec.control_names
        if (
            applied.control.tensors
            or len(applied.control.values) != 2
            or not isinstance(keys, list)
            or len(keys) > len(known)
            or not all(isinstance(key, str) and key in known for key in keys)
        ):
            return "the control that it says it applied has no keys, others, or more than keys"
        if not (
            applied.source in ("tap", "held", "still")
            and (applied.source == "still") == (not keys)
            and (applied.source == "tap") == (taps > 0)
            and is_reset is (poses > 0)
            and 0 <= applied.revision <= self.state.revision
            and self.consumed_tap <= applied.tap_revision <= self._newest_tap
            and self.consumed_pose <= applied.pose_revision <= self._newest_pose
        ):
            return "the control that it says it applied isn't one of the keys' register"
        return None

    def bind(self, applied: Applied) -> None:
        """The open reservation is bound; what was accepted after it follows what it consumed."""
        assert self.unbound is not None, "bound twice"
        index, self.unbound = self.unbound, None
        self.consumed_tap, self.consumed_pose = applied.tap_revision, applied.pose_revision
        changes_at = tuple(at for revision, at in self._changes if revision <= applied.revision)
        for _ in changes_at:
            self._changes.popleft()
        self._forget_changes()
        if applied.source == "tap" and applied.tap_revision in self._replaced:
            self.taps_overwritten -= 1  # the chunk had begun with it when the newer one came
        self._replaced.clear()
        self.given[index] = Snapshot(applied, changes_at)
        for later in range(index + 1, index + len(self.given)):
            explicit = self.given.get(later)
            if explicit is not None and explicit.applied is not None:
                self.give(later, explicit.applied.control)

    def committed(self, index: int) -> None:
        """A chunk was committed: its control is nobody's any more."""
        del self.given[index]

    def cut(self, limit: int) -> None:
        """Chunks from `limit` on won't be made."""
        for index in [index for index in self.given if index >= limit]:
            del self.given[index]
        if self.unbound is not None and self.unbound >= limit:
            self.unbound = None

    def check(self) -> None:
        """Assert the invariants."""
        unbound = [index for index, snapshot in self.given.items() if snapshot.applied is None]
        assert unbound == ([] if self.unbound is None else [self.unbound]), f"open: {self.unbound}, of {unbound}"
        assert self._is_late or self.unbound is None, "early binding leaves a reservation open"
        assert 0 <= self.consumed_tap <= self._newest_tap, "a one-shot was consumed that nobody sent"
        assert 0 <= self.consumed_pose <= self._newest_pose, "a pose was followed that nobody asked for"
        assert len(self._changes) <= CHANGES_MAX, "more changes than are remembered"

    @property
    def _tap_pending(self) -> bool:
        return self.state.tap_revision > self.consumed_tap and bool(self.state.tap_keys)

    @property
    def _keys_offer(self) -> bool:
        return bool(self.state.held) or self._tap_pending

    def _forget_changes(self) -> None:
        """Changes that no chunk will show are forgotten: nothing is offered, and no reservation is open."""
        if self.unbound is None and not self._keys_offer:
            self._changes.clear()


def check_control(control: Artifact, spec: StreamSpec) -> Artifact:
    """An explicit control with canonical key names: keys, or tensors that the spec lists.

    Raises:
        ControlError: it is neither; the message says what is accepted.
    """
    for name in control.values:
        if name not in CONTROL_VALUES:
            accepted = ", ".join(CONTROL_VALUES)
            raise ControlError("malformed", f"{shown(name)} is no value of a control; accepted: {accepted}")
    reset_pose = control.values.get("reset_pose", False)
    if not isinstance(reset_pose, bool):
        raise ControlError("malformed", "reset_pose is not true or false")
    keys = control.values.get("keys")
    if (keys is None) == (not control.tensors):
        raise ControlError("malformed", "a control has either keys or tensors, and exactly one of them")
    _check_norm(control)
    if not control.is_inline:
        raise ControlError("malformed", "a tensor is in shared memory; accepted: tensors inside of the message")
    if keys is None:
        try:
            check_tensors(spec.control_tensors, {name: (ref.dtype, ref.shape) for name, ref in control.tensors.items()})
        except RequestError as error:
            raise ControlError("malformed", str(error)) from None
        return control
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ControlError("malformed", "keys is not a list of key names")
    try:
        return keys_control(canonical_keys([str(key) for key in keys], spec), reset_pose=reset_pose)
    except RequestError as error:
        raise ControlError("unknown_key", error.reason) from None


def _check_norm(control: Artifact) -> None:
    norm = control.values.get("translation_norm")
    if norm is None:
        return
    if not control.tensors:
        raise ControlError("malformed", "translation_norm is given without poses; accepted: only beside poses")
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not (math.isfinite(norm) and norm >= 0):
        raise ControlError("malformed", f"translation_norm is {shown(norm)}; accepted: a finite number, 0 or more")
