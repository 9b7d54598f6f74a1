"""What a benchmark found: rows, the bounds that they are held against, and how both are printed and kept.

A benchmark is a module ``bench_NAME.py`` with a function ``run(...) -> Report``; its command in `bench` takes the flags,
and hands the report to `publish`.
"""

from __future__ import annotations

import csv
import datetime as dt
import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..errors import RequestError
from .shared import print_json, print_table, tell

Cell = bool | int | float | str | None
Kind = Literal["most", "least", "near"]

FOLDER = Path("benchmarks")
VERSIONS_OF = ("reelwire", "pyzmq", "numpy", "torch")
GIT_LIMIT_S = 10.0
BOUNDS_SHOWN_MAX = 16


@dataclass(frozen=True, slots=True)
class Bound:
    """A measured number and what it is held against.

    Attributes:
        what: what was measured, with its unit.
        measured: the number; NaN holds nowhere; None: it couldn't be measured here.
        bound: what it is compared to.
        kind: ``most`` and ``least`` compare with the bound itself, ``near`` with both sides of it.
        slack: how far from the bound it may lie, in the unit of the bound.
    """

    what: str
    measured: float | None
    bound: float
    kind: Kind = "most"
    slack: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the number keeps its bound; one that wasn't measured doesn't."""
        if self.measured is None:
            return False
        above, below = self.bound + self.slack, self.bound - self.slack
        return {
            "most": self.measured <= above,
            "least": self.measured >= below,
            "near": below <= self.measured <= above,
        }[self.kind]

    @property
    def verdict(self) -> str:
        """The same in words."""
        return "not measured" if self.measured is None else "holds" if self.holds else "MISSED"

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        if self.kind == "near":
            return f"{self.bound:.4g} +- {self.slack:.4g}"
        sign, limit = ("<=", self.bound + self.slack) if self.kind == "most" else (">=", self.bound - self.slack)
        return f"{sign} {limit:.4g}"


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of a benchmark found.

    Attributes:
        name: the benchmark; its rows are kept in ``benchmarks/NAME.csv``.
        title: stands over the table.
        columns: names of the rows' cells, units in the names.
        rows: one line of the table and of the CSV each.
        bounds: numbers with what they are held against; one that doesn't hold is printed as missed.
        notes: sentences that the reader of the numbers should know.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    bounds: Sequence[Bound] = ()
    notes: Sequence[str] = ()


def publish(report: Report, *, as_json: bool, path: Path | None = None) -> None:
    """Print a report, and append its rows to its CSV.

    Args:
        report: what was found.
        as_json: one JSON document instead of tables.
        path: the CSV; None: ``benchmarks/NAME.csv`` of the working folder.

    Raises:
        RequestError: the CSV can't be written.
    """
    path = path or FOLDER / f"{report.name}.csv"
    where = origin()
    if as_json:
        print_json(
            {
                "benchmark": report.name,
                **where,
                "rows": [dict(zip(report.columns, row, strict=True)) for row in report.rows],
                "bounds": [{**asdict(bound), "holds": bound.holds} for bound in report.bounds],
                "missed": _count(report, "MISSED"),
                "not_measured": _count(report, "not measured"),
                "notes": list(report.notes),
                "csv": str(path),
            }
        )
    else:
        _print(report)
    try:
        append(path, [{**where, **dict(zip(report.columns, row, strict=True))} for row in report.rows])
    except OSError as error:
        raise RequestError("csv", f"{path} can't be written ({error.strerror}); accepted: a file") from None


def _count(report: Report, verdict: str) -> int:
    return sum(bound.verdict == verdict for bound in report.bounds)


def _print(report: Report) -> None:
    """The rows, and the bounds: all of a few, of many those that don't hold."""
    columns = [column.replace("_", " ") for column in report.columns]
    print_table(report.title, columns, report.rows, number=".4g", lines=False)
    printed = [each for each in report.bounds if len(report.bounds) <= BOUNDS_SHOWN_MAX or not each.holds]
    counts = [(_count(report, "MISSED"), "missed"), (_count(report, "not measured"), "not measured")]
    faults = ", ".join(f"{count} of {len(report.bounds)} {what}" for count, what in counts if count)
    title = f"Bounds: {faults or f'all {len(report.bounds)} hold'}"
    if printed:
        lines = [(each.what, each.measured, each.accepted, each.verdict) for each in printed]
        print_table(title, ("what", "measured", "accepted", ""), lines, number=".4g", lines=False)
    elif report.bounds:
        tell(title)
    for note in report.notes:
        tell(note)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and nearest-rank percentiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        ranks = [ordered[max(0, math.ceil(len(ordered) * part) - 1)] for part in (0.5, 0.9, 0.99)]
        return cls(sum(ordered) / len(ordered), *ranks)

    def ms(self) -> tuple[float, float, float, float]:
        """The same in milliseconds."""
        return 1e3 * self.mean, 1e3 * self.p50, 1e3 * self.p90, 1e3 * self.p99


def load_before() -> str:
    """A note: how busy the machine was before a benchmark began."""
    return f"load of the machine before: {os.getloadavg()[0]:.2f}"


def append(path: Path, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Append rows to a CSV, made with its folder if it isn't there; older rows lack the columns that came later.

    Raises:
        OSError: it can't be written.
    """
    from ..media import replacing

    if not rows:
        return
    before: list[dict[str, str]] = []
    names: list[str] = []
    with suppress(FileNotFoundError), path.open(newline="", encoding="utf-8") as old:
        reader = csv.DictReader(old)
        before, names = list(reader), list(reader.fieldnames or ())
    names += [name for name in rows[0] if name not in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as new:
        writer = csv.DictWriter(new, names, restval="", lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(before)
        writer.writerows({name: _shown(cell) for name, cell in row.items()} for row in rows)


def origin() -> dict[str, Cell]:
    """When and with what something is measured: time, commit, versions, kernel, cores."""
    versions: dict[str, Cell] = dict.fromkeys(VERSIONS_OF, "")
    for name in VERSIONS_OF:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        **versions,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": cores,
    }


def commit() -> str:
    """The commit of the checkout that this code runs from, with ``-dirty`` if it was changed; else ``unknown``."""
    folder = Path(__file__).resolve().parent
    git = ("git", "-C", str(folder))
    ours = (*git, "ls-files", "--error-unmatch", Path(__file__).name)  # not a checkout that we are merely installed in
    described = (*git, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    try:
        subprocess.run(ours, capture_output=True, check=True, timeout=GIT_LIMIT_S)
        done = subprocess.run(described, capture_output=True, check=True, timeout=GIT_LIMIT_S, text=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _shown(cell: Cell) -> Cell:
    return f"{cell:.6g}" if isinstance(cell, float) else cell
