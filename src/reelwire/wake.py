"""What wakes a loop that waits on a socket: other threads, and signals."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_READ_BYTES = 4096


class Wake:
    """A pair of sockets: one end is written to by anybody, the other is polled by the loop."""

    def __init__(self) -> None:
        """Open the pair."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the loop; from any thread."""
        try:  # noqa: SIM105 - half of the time, in a process that has just slept
            self._writer.send(b"\0")
        except OSError:  # full: it is awake already; closed: nobody waits
            pass

    def ask(self) -> None:
        """Wake the loop, and ask it to end as SIGTERM does; from any thread."""
        with contextlib.suppress(OSError):
            self._writer.send(bytes((signal.SIGTERM,)))

    def clear(self) -> int:
        """Let the loop wait again; how often it was asked to end, by signals or by `ask`."""
        asked = 0
        while True:
            try:
                data = self._reader.recv(_READ_BYTES)
            except BlockingIOError:
                return asked
            if data.strip(b"\0"):
                asked += sum(byte in SIGNALS for byte in data)
            if len(data) < _READ_BYTES:
                return asked

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Have SIGTERM and SIGINT wake the loop instead of raising; for the main thread only.

        Python's own handler of a signal runs between two instructions of the main thread, but the number is written
        here by the C handler, at once.
        """
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
