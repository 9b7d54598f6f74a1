"""A broker and its workers as children of this process: their command lines, and waiting until all are ready."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import ReelwireError, UsageError

if TYPE_CHECKING:
    from ..settings import Resolved
    from ..workers.supervisor import Child, Supervisor

BROKER = "broker"
READY_BROKER_S = 15.0
READY_WORKER_S = 900.0
"""Loading the weights of a big model from a slow disk takes minutes."""


def broker_child(resolved: Resolved[Any]) -> Child:
    """The broker with these settings; started again, it listens where it said that it does, where its peers look."""
    from ..workers.supervisor import Child

    def command(listen: object) -> tuple[str, ...]:
        flags = set_flags(resolved, leave_out=("listen",))
        return (*_reelwire("broker"), "--parent-pid", str(os.getpid()), "--listen", str(listen), *flags)

    return Child(BROKER, command(resolved.value.listen), stop_rank=0, again=lambda said: command(said["endpoint"]))


@contextmanager
def with_state(resolved: Resolved[Any]) -> Iterator[Resolved[Any]]:
    """The broker's settings, with a state folder that a broker which is started again finds too.

    At an endpoint with any free port a broker has a folder of its own otherwise, and the next one listens elsewhere.
    """
    if resolved.value.state_dir or not resolved.value.listen.endswith((":*", ":0")):
        yield resolved
        return
    from ..settings import Origin

    with tempfile.TemporaryDirectory(prefix="reelwire-state-") as folder:
        origins = {**resolved.origins, "state_dir": Origin("flag", "")}
        yield dataclasses.replace(
            resolved, value=dataclasses.replace(resolved.value, state_dir=folder), origins=origins
        )


def worker_child(name: str, resolved: Resolved[Any], endpoint: str) -> Child:
    """A worker with these settings, at that broker."""
    from ..workers.supervisor import Child

    config = resolved.value
    fixed: tuple[str, ...] = ("--broker", endpoint, "--name", name, "--set", f"parent_pid={os.getpid()}")
    if config.group:
        ranks = ("--rank", str(config.rank), "--world", str(config.world))
        fixed += ("--group", config.group, *ranks, "--device", config.device)
    told = ("broker", "name", "parent_pid", "options", "job_options", "group", "rank", "world")
    flags = set_flags(resolved, leave_out=(*told, "device") if config.group else told)
    options = [part for pair in config.options.items() for part in ("--option", "=".join(pair))]
    options += [part for pair in config.job_options.items() for part in ("--job-option", "=".join(pair))]
    return Child(name, (*_reelwire("worker"), *fixed, *flags, *options), stop_rank=1)


def set_flags(resolved: Resolved[Any], leave_out: tuple[str, ...] = ()) -> list[str]:
    """``--set`` flags for every setting that isn't left at its default."""
    flags = []
    for item in dataclasses.fields(resolved.value):
        origin = resolved.origins.get(item.name)
        if origin is None or origin.layer == "default" or item.name in leave_out:
            continue
        value = getattr(resolved.value, item.name)
        text = ",".join(str(part) for part in value) if isinstance(value, tuple) else str(value)
        flags += ["--set", f"{item.name}={text}"]
    return flags


def wait_ready(supervisor: Supervisor, name: str, limit_s: float) -> Mapping[str, object]:
    """What a child said when it was ready.

    Raises:
        UsageError: it refused its settings; the sentence is the child's own.
        ReelwireError: it fell over, or said nothing in time.
    """
    from ..workers.supervisor import ChildFailed

    try:
        return supervisor.wait_ready(name, limit_s)
    except ChildFailed as error:
        raise told(error) from None
    except TimeoutError as error:
        raise ReelwireError(str(error)) from None


def told(error: Any) -> ReelwireError:
    """A child's failure as an error of this command: wrong usage stays wrong usage."""
    if error.exit_code == 2 and error.last_line:
        return UsageError(f"{error.name}: {error.last_line.removeprefix('reelwire: ')}")
    failure: ReelwireError = error
    return failure


Handler = Callable[[int, FrameType | None], None]


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def stopped_by_signals(handler: Handler = _interrupt) -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, so that both clean up on their way out.

    SIGINT is taken too, because a shell starts a command in the background with that signal ignored.
    """
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block run to its end; a signal that came meanwhile interrupts then."""
    came: list[int] = []
    with stopped_by_signals(lambda number, _frame: came.append(number)):
        yield
    if came:
        raise KeyboardInterrupt


class Endings:
    """What SIGTERM and Ctrl-C do to a command with children: the first one interrupts, a later one ends it now.

    A signal that arrives between the two, while nothing is stopped yet, is remembered: it must not be raised there, where
    it would be taken for the first.
    """

    def __init__(self) -> None:
        """None came."""
        self._count = 0
        self._supervisor: Supervisor | None = None
        self._killed = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self._count += 1
        if self._supervisor is not None:
            self._kill(self._supervisor)
        elif self._count == 1:
            raise KeyboardInterrupt

    def stop(self, supervisor: Supervisor) -> bool:
        """End all children in order, or at once if asked again. Whether they ended in order."""
        self._supervisor = supervisor
        if self._count > 1:
            self._kill(supervisor)
        supervisor.stop()
        return not self._killed

    def _kill(self, supervisor: Supervisor) -> None:
        self._killed = True
        supervisor.kill()


def _reelwire(command: str) -> tuple[str, ...]:
    return sys.executable, "-P", "-m", "reelwire", command
