"""A session in the hands of the application: keys and controls in, chunks in order out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from . import client_events as e
from .client_door import Alarm, deadline
from .client_loop import Link
from .client_request import SessionRequest
from .client_values import control_artifact, control_of, frames_of, outputs_of
from .client_view import SessionView
from .controls import Control, Keys, KeyState
from .errors import ReelwireError, UsageError
from .messages import ChunkTiming, ControlSource, EndMode
from .spec import Plain, StreamSpec

ANSWER_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A chunk of a session: the frames, what made them, and when.

    The arrays can't be written to. They stay valid for as long as they are referred to, however they came.

    Attributes:
        index: number of the chunk, from 0.
        frames: pixel frames, uint8 [frames, height, width, 3], RGB.
        control: the control that it was denoised with.
        control_source: where that came from: ``explicit``, a control that was submitted; ``tap``, a key that was tapped or
            freshly pressed, in the first chunk that shows it; ``held``, keys that are still down after that; or
            ``still``: the keys that had asked for the chunk were up again when it began, so nothing moves in it.
        facts: what the stages say about it (such as the camera pose at its end).
        timing: times by the broker's clock, in seconds.
        is_last: no chunk follows.
        outputs: every output of the pipeline, with its plain values and arrays by name; `frames` is one of them.
        received_s: when it came, in seconds of this process's `time.monotonic`.
        control_to_frame_s: seconds from sending the control with this index until the frames came; None when the
            control wasn't submitted by index.
        change_to_frame_s: for each key event that this chunk is the first to apply, seconds from the event until the
            frames came.
    """

    index: int
    frames: NDArray[np.uint8]
    control: Control
    control_source: ControlSource
    facts: Mapping[str, Plain]
    timing: ChunkTiming
    is_last: bool
    outputs: Mapping[str, Mapping[str, Any]]
    received_s: float
    control_to_frame_s: float | None
    change_to_frame_s: tuple[float, ...]


class SessionShell:
    """What a session is to threads and to event loops alike; its attributes stand with `Session`."""

    def __init__(self, client: object, link: Link, request: SessionRequest, view: SessionView) -> None:
        """Take over a session that was opened."""
        self.id = view.id
        self.token = view.token
        self.chunks = view.chunks
        self.spec: StreamSpec = request.spec
        self.parameters: Mapping[str, Plain] = request.parameters
        self._client = client  # keeps the connection while the session is used
        self._link = link
        self._view = view
        self._keys = Keys(self.spec)
        self._finalizer = weakref.finalize(self, link.abandon, view)
        self._finalizer.atexit = False

    @property
    def state(self) -> str:
        """Its state, as the broker last said: from ``opening`` to ``completed``, ``closed``, ``cancelled``, ``failed``."""
        with self._link.lock:
            return self._view.state

    @property
    def prompt(self) -> str | None:
        """The prompt, if the pipeline has one. Setting it raises UsageError."""
        prompt = self.parameters.get("prompt")
        return prompt if isinstance(prompt, str) else None

    @prompt.setter
    def prompt(self, prompt: str) -> None:
        raise UsageError(
            f"the prompt of a running session can't become {prompt!r}: the keys and values of its text are computed "
            "once, when the session is initialized; open another session"
        )

    def _change(self, change: Callable[[Keys], KeyState]) -> None:
        with self._link.lock:
            if self._view.ended or self._view.ending is not None:
                raise self._view.error()
            before = self._keys.state
            after = change(self._keys)
            if after is not before:
                self._link.feed(lambda now: e.ChangeKeys(now, self.id, after))

    def _submission(self, index: int | None, control: Control) -> Callable[[float, int], e.Event]:
        artifact = control_artifact(control, self.spec)
        return lambda now, call: e.Submit(now, call, self.id, index, artifact)

    def _ending(self, *, drain: bool) -> Callable[[float, int], e.Event]:
        mode: EndMode = "drain" if drain else "cancel"
        return lambda now, call: e.End(now, call, self.id, mode)

    def _asking(self, now: float, call: int) -> e.Event:
        return e.Ask(now, call, self.id)

    def _take(self) -> tuple[e.Delivery, ...] | None:
        """The next chunk, or an empty tuple when there is no further one; None while one may come."""
        with self._link.lock:
            delivery, view = self._link.take(self.id), self._view
            if delivery is not None:
                return (delivery,)
            if view.taken == view.chunks or view.ending == "cancel":
                return ()
            if view.ended and view.failure is not None:
                raise view.error()
            return () if view.ended else None

    def _chunk(self, taken: tuple[e.Delivery, ...]) -> Chunk | None:
        if not taken:
            return None
        (delivery,) = taken
        chunk, at = delivery.chunk, delivery.received
        outputs = outputs_of(chunk)
        return Chunk(
            index=chunk.index,
            frames=frames_of(outputs, self.spec),
            control=control_of(chunk.applied.control),
            control_source=chunk.applied.source,
            facts=chunk.facts,
            timing=chunk.timing,
            is_last=chunk.is_last,
            outputs=outputs,
            received_s=at,
            control_to_frame_s=None if delivery.submitted is None else at - delivery.submitted,
            change_to_frame_s=tuple(at - change for change in delivery.changes),
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.id} of {self.spec.name!r}: {self.state}, "
            f"{self._view.taken} of {self.chunks} chunks taken>"
        )


class Session(SessionShell):
    """One stream of chunks; `Client.open_session` makes it.

    Every method may be called from any thread; those that wait take a `timeout` in seconds, 0 or more, and raise
    RequestError for another. As a context manager it closes when the block is left: what was accepted
    is still made, and can be read afterwards; if the block raised, it is cancelled. A session that is dropped without
    that is cancelled when it is collected.

    A prompt can't be changed while the session runs, because the keys and values of its text are computed once, when
    the session is initialized; open another session.

    Attributes:
        id: the broker's name for it.
        token: proves ownership, for a session that comes back after a disconnect, which this version doesn't have; keep
            it secret.
        chunks: how many chunks it has at most.
        spec: the pipeline.
        parameters: what was asked for, with the pipeline's defaults.
    """

    # --- keys ----------------------------------------------------------------------------------------------------------

    def press(self, key: str) -> None:
        """Hold a key until `release`; a press shorter than a chunk isn't lost.

        Raises:
            RequestError: the pipeline has no such key.
            SessionError: the session has ended.
        """
        self._change(lambda keys: keys.press(key))

    def release(self, key: str) -> None:
        """Let go of a key. Raises as `press` does."""
        self._change(lambda keys: keys.release(key))

    def tap(self, key: str) -> None:
        """Press and release a key at once: it shows in one chunk. Raises as `press` does."""
        self._change(lambda keys: keys.tap(key))

    def set_keys(self, keys: Iterable[str]) -> None:
        """Hold exactly these keys. Raises as `press` does."""
        self._change(lambda writer: writer.set_keys(keys))

    def reset(self) -> None:
        """Let go of every key. Raises as `press` does."""
        self._change(lambda keys: keys.reset())

    def reset_pose(self) -> None:
        """Let go of every key and go back to the first pose. Raises as `press` does."""
        self._change(lambda keys: keys.reset_pose())

    # --- controls ------------------------------------------------------------------------------------------------------

    def submit(self, index: int | None, control: Control, timeout: float | None = None) -> None:
        """Give the control for one chunk; returns when the broker has taken it, and it will be applied.

        A control may be given at most one chunk ahead of the output: an earlier call waits until it may be sent. A
        thread that also reads the chunks gives controls 0 and 1, and then, with chunk i in its hands, control i + 2.

        Args:
            index: the chunk; controls are given in order. None stands for the next chunk that has none: one such
                control is kept, the newest replaces it, and the call doesn't wait. What a chunk was made with stands in
                `Chunk.control`. A refusal is raised by the next call that gives no index.
            control: keys, or a camera path.
            timeout: seconds to wait at most.

        Raises:
            ControlError: it was refused and changed nothing; `code` says why.
            SessionError: the session has ended.
            TimeoutError: there was no answer in time. If it was sent already it may still be taken.
        """
        self._link.call(self._submission(index, control), timeout)

    # --- chunks --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks that weren't taken yet, in order, until the session has ended.

        Raises:
            SessionFailed: the session failed; the chunks below the failure came before.
            SessionClosed: the broker closed it (idle, stalled, shut down).
        """
        while (chunk := self.next_chunk()) is not None:
            yield chunk

    def next_chunk(self, timeout: float | None = None) -> Chunk | None:
        """The next chunk; None when there is no further one because the session is complete, closed or cancelled.

        Asking for it tells the broker that the application is done with the chunk before.

        Args:
            timeout: seconds to wait at most.

        Raises:
            SessionFailed: the session failed, and all chunks below the failure were taken.
            SessionClosed: the broker closed it (idle, stalled, shut down).
            RequestError: its initialization was refused (only after ``wait_ready=False``).
            TimeoutError: none came in time.
        """
        until = deadline(timeout)
        alarm = Alarm()
        self._link.watch(self.id, alarm.ring)
        try:
            while (taken := self._take()) is None:
                alarm.wait(until)
        finally:
            self._link.unwatch(self.id, alarm.ring)
        return self._chunk(taken)

    # --- its end -------------------------------------------------------------------------------------------------------

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the session, and wait until it has ended. Ending an ended session does nothing.

        Args:
            drain: what was accepted is still made, and can be read afterwards. False drops it: see `cancel`.
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: it hasn't ended in time; it will.
        """
        self._link.call(self._ending(drain=drain), timeout)

    def cancel(self, timeout: float | None = None) -> None:
        """End the session at once, drop what is not taken, and wait until it has ended.

        Raises:
            TimeoutError: it hasn't ended in time; it will.
        """
        self.close(drain=False, timeout=timeout)

    def metrics(self, timeout: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The numbers of the session, as the broker exports them.

        Raises:
            BrokerUnreachable: the connection is lost.
            TimeoutError: no answer within `timeout` seconds.
        """
        return dict(cast("Mapping[str, Any]", self._link.call(self._asking, timeout)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(ReelwireError, TimeoutError):  # what the block raised says more
            self.cancel(CANCEL_TIMEOUT_S)
