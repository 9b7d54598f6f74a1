"""The one door through which every thread, and every event loop, talks to a client's core.

The core is guarded by a lock: whoever holds it hands an event in and performs the actions. What is to be sent is left to
the thread that owns the socket: see `client_loop`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never

from . import client_events as e
from .checks import shown
from .client_core import ClientCore
from .errors import RequestError, UsageError

TOO_LATE = "no answer within the time limit"


def value_of(done: e.Done) -> object:
    """What a call was answered with.

    Raises:
        ReelwireError: the answer is that error.
    """
    if done.error is not None:
        raise done.error
    return done.value


class Alarm:
    """Wakes the one thread that waits for it; a condition variable takes twice as long, and its lock back first."""

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        """It is silent."""
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the thread, or have its next wait return at once; from any thread that holds the lock of the `Door`."""
        if self._silent.locked():
            try:  # noqa: SIM105 - in a third of the time, and somebody waits
                self._silent.release()
            except RuntimeError:  # a signal's handler came between, and has rung
                pass

    def wait(self, until: float) -> None:
        """Block until it rings, or it is about that time: look whether what was waited for is there.

        Raises:
            TimeoutError: it is `until` already, in seconds of the monotonic clock.
        """
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(TOO_LATE)
        self._silent.acquire(timeout=min(left, threading.TIMEOUT_MAX))


def deadline(timeout_s: float | None, field: str = "timeout") -> float:
    """When a wait that starts now is over, in seconds of the monotonic clock.

    Raises:
        RequestError: of the field: it is no number of seconds, negative or not a number at all.
    """
    if timeout_s is None:
        return math.inf
    # A NaN compares false with everything: a wait would never be over.
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s >= 0:
        raise RequestError(field, f"{shown(timeout_s)} is not accepted; accepted: seconds, 0 or more, or None")
    return time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)


def left(until: float) -> float | None:
    """Seconds until then, as a timeout; None when that is never.

    Raises:
        TimeoutError: it is over.
    """
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(TOO_LATE)
    return None if seconds == math.inf else seconds


class Door(ABC):
    """A core and its lock; a subclass performs what has to do with the socket.

    Args:
        core: the protocol.

    Attributes:
        core: read it and feed it only under `lock`.
        lock: guards the core.
    """

    def __init__(self, core: ClientCore) -> None:
        """Nobody has asked yet."""
        self.core = core
        self.lock = threading.RLock()
        self._next_call = 0
        self._asking: dict[int, Callable[[e.Done], None]] = {}
        self._watching: dict[str, list[Callable[[], None]]] = {}
        self._delivery: e.Delivery | None = None
        self._part: bytes | memoryview | None = None
        self._pid = os.getpid()

    def feed(self, event: Callable[[float], e.Event]) -> None:
        """Hand an event in, made from the time it is now.

        Raises:
            UsageError: the process was forked since the client was made.
        """
        self._check_process()
        with self.lock:
            self._perform(self.core.handle(event(time.monotonic())))

    def ask(self, event: Callable[[float, int], e.Event], answered: Callable[[e.Done], None]) -> int:
        """Hand a call in; its number.

        Args:
            event: the call, made from the time it is now and its number.
            answered: takes the answer, once, perhaps before this returns; under the lock, so it must not wait, and in
                whatever thread has it.

        Raises:
            UsageError: the process was forked since the client was made.
        """
        self._check_process()
        with self.lock:
            self._next_call += 1
            number = self._next_call
            self._asking[number] = answered
            self._perform(self.core.handle(event(time.monotonic(), number)))
        return number

    def withdraw(self, call: int) -> None:
        """Nobody waits for the answer any more, or nobody took it."""
        with self.lock:
            self._asking.pop(call, None)
            self.feed(lambda now: e.Withdraw(now, call))

    def call(self, event: Callable[[float, int], e.Event], timeout_s: float | None) -> object:
        """Hand a call in and block until its answer is there; without one in time it is withdrawn.

        Raises:
            RequestError: the timeout is refused, and nothing was handed in.
            TimeoutError: there was no answer within `timeout_s`.
            ReelwireError: whatever the answer says.
        """
        until, alarm = deadline(timeout_s), Alarm()
        answers: list[e.Done] = []

        def answered(done: e.Done) -> None:
            answers.append(done)
            alarm.ring()

        number = self.ask(event, answered)
        try:
            while not answers:
                alarm.wait(until)
        except BaseException:
            self.withdraw(number)
            raise
        return value_of(answers[0])

    def take(self, session: str) -> e.Delivery | None:
        """Acknowledge the chunks that were taken, and take the next one if it is there."""
        self._check_process()
        with self.lock:
            self._delivery = None
            self._perform(self.core.handle(e.Take(time.monotonic(), session)))
            return self._delivery

    def take_part(self, call: int) -> bytes | memoryview | None:
        """Take the next part of a result if it is there; the application is done with the one before."""
        self._check_process()
        with self.lock:
            self._part = None
            self._perform(self.core.handle(e.TakePart(time.monotonic(), call)))
            return self._part

    @contextmanager
    def watching(self, session: str, changed: Callable[[], None]) -> Iterator[None]:
        """Have `changed` called whenever something of the session did, as `ask` calls its `answered`."""
        self.watch(session, changed)
        try:
            yield
        finally:
            self.unwatch(session, changed)

    def watch(self, session: str, changed: Callable[[], None]) -> None:
        """Begin what `watching` does."""
        with self.lock:
            self._watching.setdefault(session, []).append(changed)

    def unwatch(self, session: str, changed: Callable[[], None]) -> None:
        """End it."""
        with self.lock:
            watching = self._watching[session]
            watching.remove(changed)
            if not watching:
                del self._watching[session]

    @abstractmethod
    def later(self, work: Callable[[], None]) -> None:
        """Have something done under the lock, by another thread; takes no lock, so that a finalizer may call it."""

    @abstractmethod
    def has_room(self, news: str) -> bool:
        """Whether something large may be sent now; if not, `Changed` will name `news` when it may. Under the lock."""

    # --- under the lock ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _act(self, action: e.Send | e.AnswerProbe | e.Reconnect | e.Stop) -> None:
        """Perform an action that has to do with the socket."""

    @abstractmethod
    def _acted(self) -> None:
        """Something was done that the thread of the socket may have to look at."""

    def _perform(self, actions: list[e.Action]) -> None:
        acted = False
        for action in actions:
            match action:
                case e.Send() | e.AnswerProbe() | e.Reconnect() | e.Stop():
                    self._act(action)
                    acted = True
                case e.Delivery():
                    self._delivery = action
                case e.Part(data=data):
                    self._part = data
                case e.Changed(session=session):
                    self._changed(session)
                case e.Done(call=call):
                    self._asking.pop(call)(action)
                case _:
                    assert_never(action)
        if acted:
            self._acted()

    def _changed(self, session: str) -> None:
        if session:
            watched = tuple(self._watching.get(session, ()))
        else:
            watched = tuple(changed for watching in self._watching.values() for changed in watching)
        for changed in watched:
            changed()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("a client can't be used in a forked process; make one there")


class Errand:
    """A call that has news before its answer, for whoever made it.

    Args:
        door: takes the call.
        event: makes the call, from the time and its number.
        ring: called at each news and at the answer, as `Door.ask` calls its `answered`.
        news: what `Changed` names when there is any; by default that of the call.

    Attributes:
        call: its number.
    """

    def __init__(
        self, door: Door, event: Callable[[float, int], e.Event], ring: Callable[[], None], news: str = ""
    ) -> None:
        """Hand the call in."""
        self._door, self._ring = door, ring
        self._answers: list[e.Done] = []
        self.call = door.ask(event, self._answered)
        self.news = news or e.news_of_call(self.call)
        door.watch(self.news, ring)

    @property
    def answered(self) -> bool:
        """Whether the answer is there."""
        return bool(self._answers)

    def value(self) -> object:
        """The answer.

        Raises:
            ReelwireError: it is that error.
        """
        return value_of(self._answers[0])

    def end(self) -> None:
        """Nobody wants to know any more; without an answer the call is withdrawn."""
        with self._door.lock:
            self._end()

    def end_later(self) -> None:
        """The same, soon; takes no lock: a generator that was dropped ends wherever the collector comes across it."""
        self._door.later(self._end)

    def _answered(self, done: e.Done) -> None:
        self._answers.append(done)
        self._ring()

    def _end(self) -> None:
        self._door.unwatch(self.news, self._ring)
        if not self._answers:
            self._door.withdraw(self.call)
