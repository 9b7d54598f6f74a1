"""Threads of a worker: one that does what it is given, one thing after the other, and reports each; and one for chores."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

TAKEN_WITHIN_S = 0.001
"""How long `submit` waits for the thread to have its job; that takes a tenth of it, when the thread is free."""

J = TypeVar("J")


class WorkThread(ABC, Generic[J]):
    """A thread that does one job at a time; it starts at once, and waits for its first.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        """Start the thread; what `_take` needs must be there."""
        self._jobs: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._taken_up = threading.Lock()
        # A daemon: a job that hangs in one long call must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _take(self, job: J) -> None:
        """Do a job and report it."""

    @abstractmethod
    def _rest(self) -> None:
        """Let go of what the last job held."""

    def submit(self, job: J) -> None:
        """Give the thread its next job, and the interpreter with it.

        A thread that was woken stands back for as long as its waker has Python to run, between two system calls as well.
        One that gives the job to itself takes it when it has come back from reporting the one before.
        """
        if threading.get_ident() == self._thread.ident:
            self._jobs.put(job)
            return
        self._taken_up.acquire(blocking=False)
        self._jobs.put(job)
        self._taken_up.acquire(timeout=TAKEN_WITHIN_S)

    def stop(self) -> None:
        """Have the thread end after the job that it has."""
        self._jobs.put(None)

    def join(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds for the end of the thread; whether it has ended."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._taken_up.locked():
                self._taken_up.release()
            self._take(job)
            # An idle thread holds no tensors of its last job; to free them takes its time, and the result has left.
            del job
            self._rest()


class ChoreThread:
    """A thread for what takes long and holds nothing up: chores are done in order.

    Args:
        name: of the thread.
        broken: told what a chore raised, which is a bug of ours.
    """

    def __init__(self, name: str, broken: Callable[[BaseException], None]) -> None:
        """Start the thread."""
        self._chores: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._broken = broken
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def do(self, chore: Callable[[], None]) -> None:
        """Have a chore done after those before it."""
        self._chores.put(chore)

    def stop(self) -> None:
        """Have the thread end after the chore that it is at; those behind it are dropped."""
        self._stopped = True
        self._chores.put(None)

    def join(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds for the end of the thread; whether it has ended."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (chore := self._chores.get()) is not None and not self._stopped:
            try:
                chore()
            except BaseException as error:  # noqa: BLE001  raised again where the process is served
                self._broken(error)
            del chore
