"""How a job looks on a terminal: place in the queue, stage, steps, seconds per step, time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .shared import console

if TYPE_CHECKING:
    from .. import JobStatus

Moved = Callable[["JobStatus"], None]


@contextlib.contextmanager
def job_bar(title: str, *, quiet: bool = False) -> Iterator[Moved]:
    """A bar that follows a job; nothing when standard error is no terminal."""
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda _status: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(title, total=None, said="")

        def moved(status: JobStatus) -> None:
            bar.update(task, total=status.steps or None, completed=status.step, said=said_of(status, with_note=True))

        yield moved


def said_of(status: JobStatus, *, with_note: bool = False) -> str:
    """Where a job stands, in words; and on demand what else is to be known of it."""
    if with_note and status.note:
        return f"{said_of(status)} ({status.note})"
    if status.state == "queued":
        waits = f", waits for a {status.waits_for}" if status.waits_for else ""
        return f"queued, {status.position} before it{waits}"
    if status.state != "running":
        return f"{status.state}, waits for {status.waits_for}" if status.waits_for else status.state
    parts = [status.stage or "running", f"{status.step}/{status.steps}"]
    if status.step_s:
        parts.append(f"{status.step_s:.2f} s per step")
    if status.left_s is not None:
        parts.append(f"{duration(status.left_s)} left")
    if status.waits_for:
        parts.append(f"gives way to {status.waits_for}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 42 s, 3:05, 1:02:07."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
