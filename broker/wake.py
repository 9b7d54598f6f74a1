"""A pipe that a signal handler or another thread wakes the loop with."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

ASKED_MAX = 64


class Wake:
    """Counts how often the end was asked for, in a way that a poll notices."""

    def __init__(self) -> None:
        """Open the pipe."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """What becomes readable."""
        return self._read

    def set(self) -> None:
        """Ask once; from any thread or signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"!")

    def clear(self) -> int:
        """How often was asked since the last time."""
        with contextlib.suppress(BlockingIOError):
            return len(os.read(self._read, ASKED_MAX))
        return 0

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT ask; only on the main thread."""

        def asked(_number: int, _frame: FrameType | None) -> None:
            self.set()

        before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
