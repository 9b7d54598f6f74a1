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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import ReelwireError, RequestError
from .shared import console, print_json, print_table, tell

Cell = bool | int | float | str | None
Kind = Literal["most", "least", "near"]
T = TypeVar("T")

FOLDER = Path("benchmarks")
VERSIONS_OF = ("reelwire", "pyzmq", "numpy", "torch")
GIT_LIMIT_S = 10.0
BOUNDS_SHOWN_MAX = 16
LOAD_SHARE_MOST = 0.5
"""Of the cores: a machine that was busier before measures what else it does."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A measured number and what it is held against.

    Attributes:
        what: what was measured, with its unit.
        measured: the number; NaN holds nowhere; None: it couldn't be measured here.
        bound: what it is compared to.
        kind: ``most`` and ``least`` compare with the bound itself, ``near`` with both sides of it.
        slack: how far from the bound it may lie, in the unit of the bound.
        row: the number of the report's row that it is about, if one says it.
        of: what of that row is held against it, in a word.
    """

    what: str
    measured: float | None
    bound: float
    kind: Kind = "most"
    slack: float = 0.0
    row: int | None = None
    of: str = ""

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
        rows: one line of the table and of the CSV each; where a column is called ``verdict``, the bounds of rows aren't
            listed again under the table.
        bounds: numbers with what they are held against; one that doesn't hold is printed as missed.
        notes: sentences that the reader of the numbers should know.
        legend: lines under the table without which it can't be read.
        heads: what stands over the columns of the table, if not their names.
        asked: what was asked for, by the names of the flags.
        load: of the machine before it began, as processes that ran or wanted to on average of the last minute.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    bounds: Sequence[Bound] = ()
    notes: Sequence[str] = ()
    legend: Sequence[str] = ()
    heads: Sequence[str] = ()
    asked: Mapping[str, Cell] = field(default_factory=dict)
    load: float | None = None

    def kept(self) -> list[dict[str, Cell]]:
        """Its rows by column, each with its bounds and whether they hold."""
        found = []
        for number, row in enumerate(self.rows):
            mine = [bound for bound in self.bounds if bound.row == number]
            said: dict[str, Cell] = {
                "bound": "; ".join(f"{bound.of} {bound.accepted}" for bound in mine),
                "verdict": verdict(mine),
            }
            found.append({**dict(zip(self.columns, row, strict=True)), **said})
        return found

    def faults(self) -> str:
        """How many bounds don't hold, in words; empty if all do."""
        counts = {what: sum(bound.verdict == what for bound in self.bounds) for what in ("MISSED", "not measured")}
        return ", ".join(f"{count} of {len(self.bounds)} {what.lower()}" for what, count in counts.items() if count)

    def doubt(self) -> str:
        """A sentence for a machine that had something else to do; else empty."""
        if self.load is None or self.load <= LOAD_SHARE_MOST * cores():
            return ""
        return (
            f"the load of the machine before was {self.load:.2f} on {cores()} cores: these numbers are of what else ran "
            "there too; measure again on a machine that does nothing else"
        )


def verdict(bounds: Sequence[Bound]) -> str:
    """Whether the bounds of a row hold, and which don't; empty if there are none."""
    for fault in ("MISSED", "not measured"):
        found = [bound.of for bound in bounds if bound.verdict == fault]
        if found:
            return f"{fault} {' '.join(found)}"
    return "holds" if bounds else ""


def check_csv(path: Path | None) -> None:
    """Refuse a file that can't be where it is asked for, before anything is measured.

    Raises:
        RequestError: its folder isn't there, or it is a folder.
    """
    if path is not None and not path.parent.is_dir():
        raise RequestError("csv", f"the folder {path.parent} is not there; accepted: a folder that exists")
    if path is not None and path.is_dir():
        raise RequestError("csv", f"{path} is a folder; accepted: a file")


def publish(report: Report, *, as_json: bool, path: Path | None = None, strict: bool = False) -> None:
    """Print a report, and append its rows to its CSV.

    Args:
        report: what was found.
        as_json: one JSON document instead of tables.
        path: the CSV; None: ``benchmarks/NAME.csv`` of the working folder, which is made.
        strict: a bound that doesn't hold is an error, after all was printed and kept.

    Raises:
        RequestError: the CSV can't be written.
        ReelwireError: a bound doesn't hold, and `strict` asks for it.
    """
    place = path or FOLDER / f"{report.name}.csv"
    where = {**origin(), "load_before": report.load}
    if as_json:
        print_json(
            {
                "benchmark": report.name,
                **where,
                "asked": dict(report.asked),
                "rows": report.kept(),
                "bounds": [{**asdict(bound), "holds": bound.holds} for bound in report.bounds],
                "missed": _count(report, "MISSED"),
                "not_measured": _count(report, "not measured"),
                "notes": [*report.legend, *report.notes, *filter(None, (report.doubt(),))],
                "csv": str(place),
            }
        )
    else:
        _print(report)
    asked = {f"asked_{name}": cell for name, cell in report.asked.items()}
    try:
        if path is None:
            FOLDER.mkdir(exist_ok=True)
        append(place, [{**where, **asked, **row} for row in report.kept()])
    except OSError as error:
        raise RequestError("csv", f"{place} can't be written ({error.strerror}); accepted: a file") from None
    if strict and report.faults():
        raise ReelwireError(f"bench {report.name}: bounds: {report.faults()}")


def _count(report: Report, verdict: str) -> int:
    return sum(bound.verdict == verdict for bound in report.bounds)


def _print(report: Report) -> None:
    """The rows, and the bounds that they don't tell of: all of a few, of many those that don't hold."""
    columns = report.heads or [column.replace("_", " ") for column in report.columns]
    print_table(report.title, columns, report.rows, number=".4g", lines=False)
    screen = console()
    for line in report.legend:
        screen.print(line)
    told = "verdict" in report.columns
    listed = [each for each in report.bounds if not (told and each.row is not None)]
    printed = [each for each in listed if len(listed) <= BOUNDS_SHOWN_MAX or not each.holds]
    title = f"Bounds: {report.faults() or f'all {len(report.bounds)} hold'}"
    if printed:
        lines = [(each.what, each.measured, each.accepted, each.verdict) for each in printed]
        print_table(title, ("what", "measured", "accepted", ""), lines, number=".4g", lines=False)
    elif report.bounds:
        screen.print(title)
    if report.doubt():
        screen.print(report.doubt())
    for note in report.notes:
        tell(note)


def phases(name: str, expected: str, found: Sequence[T], words: Callable[[T], str]) -> Iterator[T]:
    """Say on standard error how long a benchmark takes, and in the course of its phases where it stands.

    Args:
        name: of the benchmark.
        expected: how long it takes, in words.
        found: the phases.
        words: one of them, in words.
    """
    tell(f"bench {name} takes {expected}")

    def told() -> Iterator[T]:
        for number, phase in enumerate(found, start=1):
            tell(f"bench {name}: {number} of {len(found)}: {words(phase)}")
            yield phase

    return told()


def asked_for(plan: Any) -> dict[str, Cell]:
    """The fields of a plan as cells; several numbers as one text."""
    fields = asdict(plan).items()
    return {name: ",".join(map(str, cell)) if isinstance(cell, tuple) else cell for name, cell in fields}


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


def load_before() -> float:
    """How busy the machine is: to be asked before a benchmark begins."""
    return os.getloadavg()[0]


def append(path: Path, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Append rows to a CSV, made if it isn't there; older rows lack the columns that came later.

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
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as new:
        writer = csv.DictWriter(new, names, restval="", lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(before)
        writer.writerows({name: _shown(cell) for name, cell in row.items()} for row in rows)


def origin() -> dict[str, Cell]:
    """When and with what something is measured: time, commit, versions, kernel, processor, cores."""
    versions: dict[str, Cell] = dict.fromkeys(VERSIONS_OF, "")
    for name in VERSIONS_OF:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        **versions,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": processor(),
        "cores": cores(),
    }


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's model, where the system tells it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


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
