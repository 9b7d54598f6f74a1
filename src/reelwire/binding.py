"""From keys to the control of one chunk. Pure; at the broker for early binding, at the stage's actor for late binding."""

from __future__ import annotations

from .controls import KeyState, merged, next_from_register
from .parts import Applied, Artifact, Reservation


def keys_control(keys: tuple[str, ...], *, reset_pose: bool) -> Artifact:
    """The control artifact of a set of keys."""
    return Artifact({"keys": list(keys), "reset_pose": reset_pose})


def bind(reservation: Reservation, newest: KeyState) -> Applied:
    """What a chunk that begins now applies: a one-shot that no chunk had, else what is held, else nothing moves.

    Args:
        reservation: what was consumed before, and the register when the task was sent.
        newest: the newest register that is known here; the higher revision of the two holds.
    """
    keys = merged(reservation.keys, newest)
    source, names = next_from_register(keys, reservation.tap_revision) or ("still", ())
    tap_revision = keys.tap_revision if source == "tap" else reservation.tap_revision
    pose_revision = max(reservation.pose_revision, keys.reset_pose_revision)
    control = keys_control(names, reset_pose=pose_revision > reservation.pose_revision)
    return Applied(source, control, keys.revision, tap_revision, pose_revision)
