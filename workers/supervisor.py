"""Keeps child processes running: the broker and the workers of one machine.

One thread holds everything: it starts the children, waits on their exits (pidfd), their output and its own deadlines in
one selector, and reaps them. It lives as long as any child does, because the kernel's parent-death signal is sent when
the *thread* that started a child ends. Children have a process group of their own, so that Ctrl-C on a terminal reaches
the supervisor alone, which then stops them in order. After each exit the shared memory of the dead is removed, and what they
had in the folder for temporary files: a child that was killed leaves its own behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from reelwire.errors import ReelwireError
from reelwire.segments import reap
from reelwire.wake import Wake

LINE_BYTES_MAX = 64 << 10
_PR_SET_PDEATHSIG = 1
_WRONG_USAGE = 2

Forward = Callable[[str, str, str], None]
"""Takes a child's name, ``stdout`` or ``stderr``, and a line of its output; called on the supervisor's thread."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread of `parent_pid` that started it is gone.

    Where the kernel can't, a thread waits for the end of standard input, which a `Supervisor` holds open.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_die_at_end_of_input, name="parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:  # it was gone before the line above
        os._exit(1)


def _die_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


class ChildFailed(ReelwireError):
    """A child was given up; `exit_code` is its last one, negative for a signal."""

    def __init__(self, name: str, exit_code: int, last_line: str) -> None:
        """Name the child, and repeat what it said last."""
        super().__init__(f"{name} {_ended(exit_code)}" + (f": {last_line}" if last_line else ""))
        self.name = name
        self.exit_code = exit_code
        self.last_line = last_line


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running.

    Attributes:
        name: what it is called in messages.
        command: its argument list. It says ``{"event": "ready", ...}`` on a line of its standard output.
        stop_rank: at the stop, lower ranks are ended first: the broker, which drains its workers, then the workers.
        environment: variables to add to ours.
        again: makes the argument list of every later start from what the child said when it was first ready, for one
            that must come back as what it was: a broker at the port that it was given.
    """

    name: str
    command: tuple[str, ...]
    stop_rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    again: Callable[[Mapping[str, object]], tuple[str, ...]] | None = None


@dataclass(slots=True)
class Backoff:
    """Pauses before restarts: doubling from `first_s` to `most_s`, from the start again after `stable_s` of life."""

    first_s: float = 1.0
    most_s: float = 32.0
    stable_s: float = 60.0
    _next_s: float = 0.0

    def after(self, lived_s: float) -> float:
        """Seconds to wait before the restart of a process that has lived for `lived_s`."""
        pause = self.first_s if lived_s >= self.stable_s or not self._next_s else self._next_s
        self._next_s = min(pause * 2, self.most_s)
        return pause


@dataclass(slots=True)
class _Watched:
    """A child and what is known about it; written by the supervisor's thread only, what others wait for under the lock."""

    child: Child
    backoff: Backoff
    command: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restart_at: float | None = None
    last_line: str = ""
    ready: Mapping[str, object] | None = None
    failure: ChildFailed | None = None
    ended: bool = False
    buffers: dict[str, bytearray] = field(default_factory=dict)


class Supervisor:
    """Starts children, restarts those that fall over, and stops them in order.

    A child that ends with exit code 2 (wrong usage) is given up, with 0 it is done; otherwise it is started again.

    Args:
        forward: takes the children's output; None: lines of standard error go to ours, under the child's name.
        backoff: makes the pauses of one child.
        stop_limit_s: how long each rank of children may take to end after SIGTERM, before SIGKILL.
    """

    def __init__(
        self,
        forward: Forward | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        stop_limit_s: float = 90.0,
    ) -> None:
        """Start the supervisor's thread."""
        self._forward = forward or _to_stderr
        self._backoff = backoff
        self._stop_limit_s = stop_limit_s
        self._watched: dict[str, _Watched] = {}
        self._changed = threading.Condition()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._read_wake)
        self._ranks: deque[list[_Watched]] = deque()
        self._stopping = False
        self._kill_at: float | None = None
        self._interrupted = False
        self._thread = threading.Thread(target=self._serve, name="supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, child: Child) -> None:
        """Start a child and keep it running.

        Raises:
            ValueError: one of that name is there, or the supervisor has stopped.
        """
        with self._changed:
            if self._stopping:
                raise ValueError("the supervisor has stopped")
            if child.name in self._watched:
                raise ValueError(f"there is a child {child.name!r} already")
            watched = self._watched[child.name] = _Watched(child, self._backoff(), child.command)
        self._order(lambda: self._spawn(watched))

    def wait_ready(self, name: str, timeout_s: float) -> Mapping[str, object]:
        """What the child said when it was ready (again), as soon as it has.

        Raises:
            ChildFailed: it was given up.
            TimeoutError: it said nothing within the limit; the message repeats the last line of its standard error.
        """
        with self._changed:
            watched = self._watched[name]
            done = self._changed.wait_for(lambda: watched.ready is not None or watched.ended, timeout_s)
        if watched.failure is not None:
            raise watched.failure
        if watched.ready is not None:
            return watched.ready
        if done:
            raise ChildFailed(name, 0, "ended before it was ready")
        raise TimeoutError(f"{name} isn't ready after {timeout_s:g} s" + _said(watched.last_line))

    def wait(self, timeout_s: float | None = None) -> ChildFailed | None:
        """Wait until `interrupt` was called, a child was given up (which is returned) or all have ended."""

        def over() -> bool:
            children = self._children()
            return self._interrupted or any(each.failure for each in children) or all(each.ended for each in children)

        with self._changed:
            self._changed.wait_for(over, timeout_s)
        return next((each.failure for each in self._children() if each.failure is not None), None)

    def interrupt(self) -> None:
        """Let `wait` return. Not from a signal handler: it takes a lock."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def pids(self) -> dict[str, int]:
        """The process ids of the children that run."""
        running = {each.child.name: each.process for each in self._children()}
        return {name: process.pid for name, process in running.items() if process is not None}

    def stop(self) -> None:
        """End all children, rank by rank: SIGTERM, and SIGKILL after the limit. Returns when all are gone."""
        with self._changed:
            first = not self._stopping
            self._stopping = True
        if first:
            self._order(self._begin_stop)
        self._thread.join()

    def kill(self) -> None:
        """Have a `stop` that runs on another thread end now: SIGKILL to all."""
        self._order(lambda: _signal(self._children(), signal.SIGKILL))

    def _children(self) -> list[_Watched]:
        """All of them now; `start` may add one from another thread meanwhile."""
        with self._changed:
            return list(self._watched.values())

    # --- on the supervisor's thread ----------------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._wake.set()

    def _serve(self) -> None:
        while not (self._stopping and not self._ranks and not any(each.process for each in self._children())):
            deadlines = [each.restart_at for each in self._children()] + [self._kill_at]
            due = min((at for at in deadlines if at is not None), default=None)
            timeout = None if due is None else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            self._look_at_the_clock(time.monotonic())
        self._selector.close()
        self._wake.close()

    def _read_wake(self) -> None:
        self._wake.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    def _look_at_the_clock(self, now: float) -> None:
        for watched in self._children():
            if watched.restart_at is not None and now >= watched.restart_at and not self._stopping:
                watched.restart_at = None
                self._spawn(watched)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            _signal(self._ranks[0], signal.SIGKILL)

    def _spawn(self, watched: _Watched) -> None:
        if self._stopping:
            return self._end(watched)
        child = watched.child
        try:
            process = subprocess.Popen(
                watched.command,
                stdin=subprocess.PIPE,  # held open; its end tells the child that we are gone
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **child.environment},
                start_new_session=True,
            )
        except OSError as error:
            return self._end(watched, ChildFailed(child.name, _WRONG_USAGE, str(error)))
        watched.process, watched.started_at = process, time.monotonic()
        assert process.stdout is not None
        assert process.stderr is not None
        for kind, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            os.set_blocking(pipe.fileno(), False)
            watched.buffers[kind] = bytearray()
            self._selector.register(pipe, selectors.EVENT_READ, lambda kind=kind: self._read(watched, process, kind))
        self._watch_exit(watched, process)
        return None

    def _end(self, watched: _Watched, failure: ChildFailed | None = None) -> None:
        with self._changed:
            watched.process, watched.ready, watched.restart_at = None, None, None
            watched.failure, watched.ended = failure, True
            self._changed.notify_all()

    def _watch_exit(self, watched: _Watched, process: subprocess.Popen[bytes]) -> None:
        if hasattr(os, "pidfd_open"):
            descriptor = os.pidfd_open(process.pid)

            def exited() -> None:
                self._selector.unregister(descriptor)
                os.close(descriptor)
                self._exited(watched, process)

            self._selector.register(descriptor, selectors.EVENT_READ, exited)
            return

        def wait() -> None:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self._order(lambda: self._exited(watched, process))

        threading.Thread(target=wait, name=f"exit-of-{watched.child.name}", daemon=True).start()

    def _read(self, watched: _Watched, process: subprocess.Popen[bytes], kind: str) -> bool:
        """Forward what has come through a pipe; whether more may come."""
        pipe = process.stdout if kind == "stdout" else process.stderr
        assert pipe is not None
        if pipe.closed:  # by its process's exit, in this turn
            return False
        try:
            data = os.read(pipe.fileno(), LINE_BYTES_MAX)
        except BlockingIOError:
            return False
        buffer = watched.buffers[kind]
        buffer += data
        *lines, rest = bytes(buffer).split(b"\n")
        if not data or len(rest) > LINE_BYTES_MAX:
            lines, rest = ([*lines, rest] if rest else lines), b""
        buffer[:] = rest
        for line in lines:
            self._said(watched, kind, line.decode("utf-8", "replace").rstrip())
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
        return bool(data)

    def _said(self, watched: _Watched, kind: str, line: str) -> None:
        if kind == "stderr" and line:
            watched.last_line = line
        if kind == "stdout" and watched.ready is None and (ready := _ready_line(line)) is not None:
            if watched.child.again is not None and watched.command == watched.child.command:
                watched.command = watched.child.again(ready)
            with self._changed:
                watched.ready = ready
                self._changed.notify_all()
        self._forward(watched.child.name, kind, line)

    def _exited(self, watched: _Watched, process: subprocess.Popen[bytes]) -> None:
        for kind, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            while self._read(watched, process, kind):
                pass
            if pipe is not None and not pipe.closed:  # a grandchild holds the other end
                self._selector.unregister(pipe)
                pipe.close()
        if process.stdin is not None:
            process.stdin.close()
        code = process.wait()
        reap()
        reap(Path(tempfile.gettempdir()))
        if self._stopping or code == 0:
            if not self._stopping:
                self._forward(watched.child.name, "stderr", "ended with exit code 0; it isn't started again")
            self._end(watched)
        elif code == _WRONG_USAGE:
            self._end(watched, ChildFailed(watched.child.name, code, watched.last_line))
        else:
            now = time.monotonic()
            pause = watched.backoff.after(now - watched.started_at)
            with self._changed:
                watched.process, watched.ready, watched.restart_at = None, None, now + pause
            self._forward(watched.child.name, "stderr", f"{_ended(code)}; starts again in {pause:g} s")
        if self._ranks and not any(each.process for each in self._ranks[0]):
            self._ranks.popleft()
            self._stop_next_rank()

    def _begin_stop(self) -> None:
        for watched in self._children():
            if watched.process is None:
                self._end(watched, watched.failure)
        running = [each for each in self._children() if each.process is not None]
        for rank in sorted({each.child.stop_rank for each in running}):
            self._ranks.append([each for each in running if each.child.stop_rank == rank])
        self._stop_next_rank()

    def _stop_next_rank(self) -> None:
        while self._ranks and not any(each.process for each in self._ranks[0]):
            self._ranks.popleft()
        self._kill_at = None
        if self._ranks:
            self._kill_at = time.monotonic() + self._stop_limit_s
            _signal(self._ranks[0], signal.SIGTERM)


def _signal(children: Sequence[_Watched], number: signal.Signals) -> None:
    for watched in children:
        if watched.process is not None:
            watched.process.send_signal(number)


def _ready_line(line: str) -> Mapping[str, object] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and said.get("event") == "ready" else None


def _said(last_line: str) -> str:
    return f"; it said last: {last_line}" if last_line else ""


def _to_stderr(name: str, kind: str, line: str) -> None:
    if kind == "stderr":
        sys.stderr.write(f"{name}: {line}\n")
        sys.stderr.flush()


def _ended(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
