"""How a running stream looks on a terminal, and the table at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .shared import console, print_table

if TYPE_CHECKING:
    from .. import Chunk
    from .recipe import Record
    from .recording import OnChunk


@contextlib.contextmanager
def stream_bar(title: str, chunks: int, *, quiet: bool = False) -> Iterator[OnChunk]:
    """A bar that moves with each chunk and shows its period and latency; nothing when standard error is no terminal."""
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda _chunk, _record: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("chunks"),
        TimeElapsedColumn(),
        TextColumn("period {task.fields[period]}  control to frame {task.fields[latency]}"),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(title, total=chunks, period="-", latency="-")

        def moved(chunk: Chunk, _record: Record) -> None:
            bar.update(task, advance=1, period=_ms(chunk.timing.period_s), latency=_ms(chunk.timing.latency_s))

        yield moved


def summary_rows(record: Record) -> list[tuple[str, str]]:
    """The table at the end: name and value, with units."""
    timings = record.timings
    rows = [
        ("state", record.state),
        ("chunks", f"{len(record.chunks)} of {record.recipe.chunks}"),
        ("frames", f"{record.frames} at {record.fps:g} per second"),
        ("wall time", f"{timings['wall_s']:.2f} s"),
        ("first frame, from opening", _ms(timings["first_output_s"])),
        ("chunk period", spread(timings["period_s"])),
        ("control to frame, at the broker", spread(timings["control_to_output_s"])),
        ("control to frame, here", spread(timings["control_to_frame_s"])),
    ]
    if timings["change_to_frame_s"]["count"]:
        rows.append(("key change to frame, here", spread(timings["change_to_frame_s"])))
    return rows


def print_summary(record: Record, extra: list[tuple[str, str]]) -> None:
    """Print the table at the end."""
    print_table(f"{record.mp4}", ("what", "value"), [*summary_rows(record), *extra])


def spread(measured: dict[str, Any]) -> str:
    """Mean, median, 95th percentile and maximum of what was measured, in milliseconds."""
    if not measured["count"]:
        return "-"
    return "  ".join(f"{name} {_ms(measured[name])}" for name in ("mean", "p50", "p95", "max"))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
