"""What steers a session at the broker: its key register and the one pending slot become snapshots, one per chunk.

Early binding: a snapshot is made when a control is accepted, and is what the chunk is denoised with, whatever the keys
do later.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from reelwire.controls import KeyState, canonical_keys, merged, next_from_register
from reelwire.errors import ControlError, RequestError
from reelwire.messages import Applied, Artifact
from reelwire.spec import StreamSpec, check_tensors

CHANGES_MAX = 32
CONTROL_VALUES = ("keys", "reset_pose", "translation_norm")
"""Plain values of a control; they are on the wire beside its tensors."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The control of one chunk.

    Attributes:
        applied: where it came from, and its content.
        changes_at: when the key changes arrived that it is the first to apply, in seconds.
    """

    applied: Applied
    changes_at: tuple[float, ...] = ()


class ControlDesk:
    """The register, the pending slot, and what was taken from both.

    Args:
        spec: says which keys there are.

    Attributes:
        state: the register.
        pending: the explicit control without an index that waits.
        consumed_tap: number of the newest one-shot that a chunk was given.
        active_at: when the register or the slot last changed, in seconds.
        taps_overwritten: one-shots that a newer one replaced before a chunk took them.
        explicit_overwritten: pending controls that a newer one replaced.
    """

    def __init__(self, spec: StreamSpec, now: float) -> None:
        """Start with nothing held and nothing pending."""
        self._spec = spec
        self.state = KeyState()
        self.pending: Artifact | None = None
        self.consumed_tap = 0
        self.active_at = now
        self.taps_overwritten = 0
        self.explicit_overwritten = 0
        self._pose_revision = 0
        self._changes: deque[tuple[int, float]] = deque(maxlen=CHANGES_MAX)

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
        self.state = newer
        self.active_at = now
        if next_from_register(newer, self.consumed_tap) is None:
            self._changes.clear()
        else:
            self._changes.append((newer.revision, now))
        return True

    def set_pending(self, control: Artifact, now: float) -> None:
        """Put an explicit control into the slot; the newest wins."""
        if self.pending is not None:
            self.explicit_overwritten += 1
        self.pending = control
        self.active_at = now

    @property
    def offers(self) -> bool:
        """Whether `take` would give a snapshot."""
        return self.pending is not None or next_from_register(self.state, self.consumed_tap) is not None

    @property
    def holds(self) -> bool:
        """Whether a key is down."""
        return bool(self.state.held)

    def take(self) -> Snapshot | None:
        """Take the next chunk's control: the pending one, else a one-shot that no chunk had, else what is held."""
        if self.pending is not None:
            control, self.pending = self.pending, None
            return Snapshot(Applied("explicit", control))
        offered = next_from_register(self.state, self.consumed_tap)
        if offered is None:
            return None
        source, keys = offered
        if source == "tap":
            self.consumed_tap = self.state.tap_revision
        reset_pose = self.state.reset_pose_revision > self._pose_revision
        self._pose_revision = max(self._pose_revision, self.state.reset_pose_revision)
        changes = tuple(at for _, at in self._changes)
        self._changes.clear()
        return Snapshot(Applied(source, keys_control(keys, reset_pose=reset_pose), self.state.revision), changes)

    @property
    def _tap_pending(self) -> bool:
        return self.state.tap_revision > self.consumed_tap and bool(self.state.tap_keys)


def keys_control(keys: tuple[str, ...], *, reset_pose: bool) -> Artifact:
    """The control artifact of a set of keys."""
    return Artifact({"keys": list(keys), "reset_pose": reset_pose})


def check_control(control: Artifact, spec: StreamSpec) -> Artifact:
    """An explicit control with canonical key names: keys, or tensors that the spec lists.

    Raises:
        ControlError: it is neither; the message says what is accepted.
    """
    for name in control.values:
        if name not in CONTROL_VALUES:
            accepted = ", ".join(CONTROL_VALUES)
            raise ControlError("malformed", f"{name!r} is no value of a control; accepted: {accepted}")
    reset_pose = control.values.get("reset_pose", False)
    if not isinstance(reset_pose, bool):
        raise ControlError("malformed", "reset_pose is not true or false")
    keys = control.values.get("keys")
    if (keys is None) == (not control.tensors):
        raise ControlError("malformed", "a control has either keys or tensors, and exactly one of them")
    _check_norm(control)
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
        raise ControlError("malformed", f"translation_norm is {norm!r}; accepted: a finite number, 0 or more")
