"""What steers a session: the register of its keys, controls for one chunk, and key traces. Pure; no clock.

A live session's keys are a *register*, `KeyState`: it is sent whole, and of two the one with the higher revision holds.
`Keys` writes it, `next_from_register` reads it when a chunk asks for its control. A `Control` is what one chunk is
denoised with; a `KeyTrace` is a script of key events that becomes one `Control` per chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import RequestError
from .spec import StreamSpec, check_tensors

Source = Literal["tap", "held"]
EventKind = Literal["press", "release", "tap", "reset", "reset_pose"]
FloatArray = NDArray[np.float32 | np.float64]

_USUAL = frozenset({list, tuple, set, frozenset})
"""What names usually come in: whether any other object is a collection takes longer to find out."""
_TRACE_ACCEPTED = "accepted: a time in seconds, then +key, -key, tap key, reset or reset_pose, such as '1.5 -w +d'"


@dataclass(frozen=True, slots=True)
class KeyState:
    """The keys of a session as one register that is sent whole; the higher revision wins.

    Attributes:
        revision: raised by every change.
        held: canonical names of the keys that are down, sorted.
        tap_revision: number of the newest one-shot; the one that a chunk consumes is never applied again.
        tap_keys: the newest one-shot, sorted: all keys that were down when a key was newly pressed. Empty when a reset
            took it back.
        reset_pose_revision: number of the newest request to go back to the first pose.
    """

    revision: int = 0
    held: tuple[str, ...] = ()
    tap_revision: int = 0
    tap_keys: tuple[str, ...] = ()
    reset_pose_revision: int = 0


def merged(ours: KeyState, theirs: KeyState) -> KeyState:
    """The register that holds when `theirs` arrives: a repeated or an overtaken one changes nothing."""
    return theirs if theirs.revision > ours.revision else ours


def next_from_register(state: KeyState, consumed_tap: int) -> tuple[Source, tuple[str, ...]] | None:
    """The keys that the register offers a chunk: a one-shot that wasn't consumed yet, else what is held.

    Args:
        state: the register.
        consumed_tap: `tap_revision` of the newest one-shot that a chunk was given; 0 before the first.

    Returns:
        Where the keys come from and the keys; None when nothing is pending and nothing is held.
    """
    if state.tap_revision > consumed_tap and state.tap_keys:
        return "tap", state.tap_keys
    if state.held:
        return "held", state.held
    return None


class Keys:
    """The writer of a register: each method applies one event and returns the register after it.

    An event that changes nothing (a press that the keyboard repeats, the release of a key that is up) returns the very
    same object, so `is` tells whether there is something to send. A refused name changes nothing.

    Args:
        spec: the stream that says which keys there are.
        state: where to go on from; a client that resumes gives what it had.
    """

    def __init__(self, spec: StreamSpec, state: KeyState | None = None) -> None:
        """Start from `state`, or with nothing held."""
        self._spec = spec
        self.state = KeyState() if state is None else state

    def press(self, name: str) -> KeyState:
        """Hold a key; if it was up, also queue the one-shot of all keys that are down now.

        Raises:
            RequestError: the stream has no such key.
        """
        return self._hold({*self.state.held, self._spec.canonical_key(name)})

    def release(self, name: str) -> KeyState:
        """Let go of a key; a one-shot that is still pending stays.

        Raises:
            RequestError: the stream has no such key.
        """
        return self._hold({*self.state.held} - {self._spec.canonical_key(name)})

    def tap(self, name: str) -> KeyState:
        """Press and release a key at once: one change, one one-shot.

        Raises:
            RequestError: the stream has no such key.
        """
        key = self._spec.canonical_key(name)
        if key in self.state.held:
            return self.release(key)
        return self._change(**self._one_shot({*self.state.held, key}))

    def set_keys(self, names: Iterable[str]) -> KeyState:
        """Hold exactly these keys; if one of them was up, also queue the one-shot of them all.

        Raises:
            RequestError: the stream has no such key.
        """
        return self._hold(set(canonical_keys(names, self._spec)))

    def reset(self) -> KeyState:
        """Let go of every key and take back the pending one-shot."""
        if not self.state.held and not self.state.tap_keys:
            return self.state
        return self._change(held=(), tap_keys=())

    def reset_pose(self) -> KeyState:
        """Reset, and ask for the first pose; always a change."""
        return self._change(held=(), tap_keys=(), reset_pose_revision=self.state.reset_pose_revision + 1)

    def _hold(self, keys: set[str]) -> KeyState:
        held = tuple(sorted(keys))
        if held == self.state.held:
            return self.state
        newly = keys.difference(self.state.held)
        return self._change(held=held, **(self._one_shot(keys) if newly else {}))

    def _one_shot(self, keys: set[str]) -> dict[str, Any]:
        return {"tap_revision": self.state.tap_revision + 1, "tap_keys": tuple(sorted(keys))}

    def _change(self, **fields: Any) -> KeyState:
        self.state = replace(self.state, revision=self.state.revision + 1, **fields)
        return self.state


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Control:
    """What one chunk is denoised with: keys, or a camera path. Give exactly one of `keys` and `poses`.

    Arrays are copied and can't be written to: float32 stays float32, everything else becomes float64.

    Attributes:
        keys: names of the keys that are down throughout the chunk, sorted; empty means standing still.
        poses: camera-to-world matrices [latent frames of the chunk, 4, 4]; x right, y down, z forward.
        intrinsics: fx, fy, cx, cy as [4]; of [rows, 4] the first row is kept. Only beside `poses`.
        action: flags [rows, channels] in the order w, a, s, d; only beside `poses`.
        reset_pose: the pose that keys move goes back to the first one before this chunk.
        translation_norm: what the chunk's steps from frame to frame are divided by, in units of the poses; 0 leaves
            them as they are, None stands for the chunk's own largest step. A recorded path gives the largest step of
            the whole path with every chunk, so that the chunks keep their speeds relative to each other. Only beside
            `poses`.

    Raises:
        RequestError: both or neither of `keys` and `poses`, or an array of another shape or with a value that is not
            finite.
    """

    keys: tuple[str, ...] | None
    poses: FloatArray | None
    intrinsics: FloatArray | None
    action: FloatArray | None
    reset_pose: bool
    translation_norm: float | None

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        poses: ArrayLike | None = None,
        intrinsics: ArrayLike | None = None,
        action: ArrayLike | None = None,
        reset_pose: bool = False,
        translation_norm: float | None = None,
    ) -> None:
        """Check and keep what was given."""
        if keys is None and poses is None:
            raise RequestError("control", "says nothing; accepted: keys (an empty set stands still) or poses")
        if keys is not None and poses is not None:
            raise RequestError("control", "has keys and poses; accepted: exactly one of them")
        if poses is None and not (intrinsics is None and action is None and translation_norm is None):
            beside: dict[str, object] = {
                "intrinsics": intrinsics,
                "action": action,
                "translation_norm": translation_norm,
            }
            for name, given in beside.items():
                if given is not None:
                    raise RequestError(name, "is given without poses; accepted: only beside poses")
        if not isinstance(reset_pose, bool):
            raise RequestError("reset_pose", f"{reset_pose!r} is not true or false")
        put, first_row = partial(object.__setattr__, self), None
        put("keys", None if keys is None else _names(keys))
        put("poses", None if poses is None else _array("poses", poses, "[frames, 4, 4]"))
        if intrinsics is not None:
            first_row = _array("intrinsics", intrinsics, "[4] or [rows, 4]").reshape(-1, 4)[0]
        put("intrinsics", first_row)
        put("action", None if action is None else _array("action", action, "[rows, channels]"))
        put("reset_pose", reset_pose)
        put("translation_norm", None if translation_norm is None else _norm(translation_norm))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Control):
            return NotImplemented
        mine_plain = (self.keys, self.reset_pose, self.translation_norm)
        return mine_plain == (other.keys, other.reset_pose, other.translation_norm) and all(
            (mine is None and theirs is None)
            or (mine is not None and theirs is not None and mine.dtype == theirs.dtype and np.array_equal(mine, theirs))
            for mine, theirs in (
                (self.poses, other.poses),
                (self.intrinsics, other.intrinsics),
                (self.action, other.action),
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def tensors(self) -> dict[str, FloatArray]:
        """The arrays that are there, by name."""
        named = {"poses": self.poses, "intrinsics": self.intrinsics, "action": self.action}
        return {name: value for name, value in named.items() if value is not None}

    def for_stream(self, spec: StreamSpec) -> Control:
        """The same control with canonical key names.

        Raises:
            RequestError: a key isn't one of the stream's, or the arrays aren't: another name, another shape.
        """
        if self.keys is None:
            given = {name: (array.dtype.name, array.shape) for name, array in self.tensors().items()}
            check_tensors(spec.control_tensors, given)
            return self
        keys = canonical_keys(self.keys, spec)
        return self if keys == self.keys else Control(keys=keys, reset_pose=self.reset_pose)


def canonical_keys(names: Iterable[str], spec: StreamSpec) -> tuple[str, ...]:
    """Canonical names of the keys, each once, sorted.

    Raises:
        RequestError: the stream has no such key, or `names` is no collection of names.
    """
    return tuple(sorted({spec.canonical_key(name) for name in _names(names)}))


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """One event of a trace.

    Attributes:
        time_s: seconds of media time.
        kind: what happens.
        key: the key as it was written; empty for the resets.
        line: line of the text that it stands on, from 1.
    """

    time_s: float
    kind: EventKind
    key: str
    line: int


@dataclass(frozen=True, slots=True)
class KeyTrace:
    """A script of key events, in order of time; events of one time keep the order of the text.

    The text has one entry per line or per ``;``: a time in seconds of *media* time, then one or more events::

        0.0 +w          # walk
        1.5 -w +d; 2.0 tap l
        3.0 reset_pose

    ``+k`` presses, ``-k`` releases, ``tap k`` does both at once, ``reset`` lets go of everything, ``reset_pose`` also
    goes back to the first pose. A ``#`` starts a comment.
    """

    events: tuple[KeyEvent, ...] = ()

    @classmethod
    def parse(cls, text: str) -> KeyTrace:
        """Read a trace.

        Raises:
            RequestError: an entry can't be read; the message says the line and what is accepted.
        """
        events = [
            event
            for number, line in enumerate(text.splitlines(), start=1)
            for entry in line.partition("#")[0].split(";")
            for event in _events(entry.split(), number)
        ]
        return cls(tuple(sorted(events, key=lambda event: event.time_s)))

    @classmethod
    def load(cls, path: str | Path) -> KeyTrace:
        """Read a trace from a UTF-8 file.

        Raises:
            RequestError: the file or an entry of it can't be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:  # ValueError: no UTF-8, or a path with a NUL in it
            raise RequestError("trace", f"{str(path)!r} can't be read ({error}); accepted: a UTF-8 text file") from None
        return cls.parse(text)


def controls_for(trace: KeyTrace, spec: StreamSpec, chunks: int) -> list[Control]:
    """One control of keys for each of the first `chunks` chunks; it depends on the trace alone.

    Chunk i covers the media time [start, end) with start = ``spec.frames_in(i) / spec.fps`` and end = the start of
    chunk i+1. Its keys are

    * those held at its start: after every event with time <= start, in order;
    * and those newly pressed or tapped at a time in [start, end), so that a press shorter than a chunk isn't lost.

    So a press at exactly the start counts for the chunk, a release at exactly the start does too, and a later release
    shows from the next chunk on. A `reset` or `reset_pose` drops what the chunk it falls in had so far, held keys
    included: only keys pressed after it, within the chunk, count. `reset_pose` sets `Control.reset_pose` of that chunk.
    Events at or after the end of the last chunk have no effect.

    Raises:
        RequestError: the stream has no such key (the message says the line), or `chunks` is negative.
    """
    if chunks < 0:
        raise RequestError("chunks", f"{chunks} is negative; accepted: 0 or more")
    checked = [(event, _canonical(event, spec)) for event in trace.events]
    held: set[str] = set()
    controls: list[Control] = []
    at = 0
    for index in range(chunks):
        start, end = spec.frames_in(index) / spec.fps, spec.frames_in(index + 1) / spec.fps
        carried, newly, reset_pose = set(held), set[str](), False
        while at < len(checked) and checked[at][0].time_s < end:
            event, key = checked[at]
            at += 1
            if event.kind in ("reset", "reset_pose"):
                for keys in (held, carried, newly):
                    keys.clear()
                reset_pose = reset_pose or event.kind == "reset_pose"
                continue
            if event.kind == "tap" or (event.kind == "press" and key not in held):
                newly.add(key)
            if event.kind == "press":
                held.add(key)
                continue
            held.discard(key)
            if event.time_s <= start:
                carried.discard(key)
        controls.append(Control(keys=carried | newly, reset_pose=reset_pose))
    return controls


def _names(names: Iterable[str]) -> tuple[str, ...]:
    accepted = "accepted: a collection of key names, such as {'w', 'd'}"
    if type(names) not in _USUAL and (isinstance(names, str | bytes) or not isinstance(names, Iterable)):
        raise RequestError("keys", f"{names!r} is not a collection; {accepted}")
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise RequestError("keys", f"{name!r} is not a text; {accepted}")
    return tuple(sorted(set(listed)))


def _norm(given: object) -> float:
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float | np.floating)
        or not (math.isfinite(given) and given >= 0)
    ):
        raise RequestError("translation_norm", f"{given!r} is not accepted; accepted: a finite number, 0 or more")
    return float(given)


def _array(field: str, given: ArrayLike, accepted: str) -> FloatArray:
    try:
        raw = np.asarray(given)
    except (ValueError, TypeError) as error:
        raise RequestError(field, f"is not an array of numbers ({error}); accepted: {accepted}") from None
    if raw.dtype.kind not in "fiub":
        raise RequestError(field, f"holds {raw.dtype}; accepted: numbers, {accepted}")
    array: FloatArray = raw.astype(np.float32, "C") if raw.dtype == np.float32 else raw.astype(np.float64, "C")
    shape = array.shape
    fits = {
        "poses": array.ndim == 3 and shape[0] >= 1 and shape[1:] == (4, 4),
        "intrinsics": shape == (4,) or (array.ndim == 2 and shape[0] >= 1 and shape[1] == 4),
        "action": array.ndim == 2 and shape[0] >= 1 and shape[1] >= 1,
    }[field]
    if not fits:
        raise RequestError(field, f"has shape {list(shape)}; accepted: {accepted}")
    if not np.isfinite(array).all():
        raise RequestError(field, "holds a value that is not finite; accepted: finite numbers")
    array.setflags(write=False)
    return array


def _events(words: list[str], line: int) -> Iterator[KeyEvent]:
    if not words:
        return
    time_s = _time(words[0], line)
    rest = iter(words[1:])
    empty = True
    for word in rest:
        empty = False
        if word == "reset":
            yield KeyEvent(time_s, "reset", "", line)
        elif word == "reset_pose":
            yield KeyEvent(time_s, "reset_pose", "", line)
        elif word == "tap":
            key = next(rest, None)
            if key is None:
                raise RequestError("trace", f"line {line}: 'tap' names no key; {_TRACE_ACCEPTED}")
            yield KeyEvent(time_s, "tap", key, line)
        elif word[0] in "+-" and len(word) > 1:
            yield KeyEvent(time_s, "press" if word[0] == "+" else "release", word[1:], line)
        else:
            raise RequestError("trace", f"line {line}: {word!r} is no event; {_TRACE_ACCEPTED}")
    if empty:
        raise RequestError("trace", f"line {line}: nothing happens at {words[0]!r}; {_TRACE_ACCEPTED}")


def _time(word: str, line: int) -> float:
    try:
        time_s = float(word)
    except ValueError:
        raise RequestError("trace", f"line {line}: {word!r} is no time; {_TRACE_ACCEPTED}") from None
    if not (math.isfinite(time_s) and time_s >= 0):
        raise RequestError("trace", f"line {line}: the time {word!r} is negative or not finite; {_TRACE_ACCEPTED}")
    return time_s


def _canonical(event: KeyEvent, spec: StreamSpec) -> str:
    if not event.key:
        return ""
    try:
        return spec.canonical_key(event.key)
    except RequestError as error:
        raise RequestError("trace", f"line {event.line}: {error.reason}") from None
