"""One line per golden file: what was compared, how far off it was, and what was allowed.

A checker module has one function, ``check(folder) -> Iterator[Line]``. It hands `over_files` a function that compares
one file and notes each comparison in a `Comparison`; the line of a file is its worst comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

Status = Literal["ok", "out", "not compared"]
Entry = Mapping[str, Any]
"""What an index says of one file: scalar parameters, fields, shapes."""


@dataclass(frozen=True, slots=True)
class Line:
    """The verdict on one file.

    Attributes:
        set: name of the golden set.
        file: file name within the set's folder.
        error: the largest error, to be compared to `tolerance`; for a tolerance of the form atol + rtol * |b| the
            largest |a - b| - rtol * |b|, not below 0.
        tolerance: the largest error that is accepted; 0 for data that must agree exactly.
        status: ``"out"`` when the error is above the tolerance or the comparison failed.
        note: the field that was worst, or why nothing was compared.
    """

    set: str
    file: str
    error: float
    tolerance: float
    status: Status
    note: str


class NotCompared(Exception):
    """Raised by a comparison for a file that ours deliberately doesn't reproduce; the message says why."""


class Comparison:
    """All comparisons of one file."""

    def __init__(self, set_name: str, file: str) -> None:
        """Start with nothing compared."""
        self._set = set_name
        self._file = file
        self._found: list[tuple[str, float, float]] = []

    def close(self, name: str, actual: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float = 0.0) -> None:
        """Note how far `actual` is from `expected`: at most `atol + rtol * |expected|` is accepted, per element."""
        self._found.append((name, excess(actual, expected, rtol), atol))

    def equal(self, name: str, actual: object, expected: object) -> None:
        """Note whether two values are the same: tensors bit for bit and shape for shape, plain values by ``==``."""
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
            same = actual.shape == expected.shape and bool(torch.equal(actual, expected))
            error = 0.0 if same else max(excess(actual, expected), math.ulp(0.0))
        else:
            error = 0.0 if actual == expected else math.inf
        label = name if error == 0.0 or isinstance(actual, torch.Tensor) else f"{name}: {actual!r}, not {expected!r}"
        self._found.append((label, error, 0.0))

    def number(self, name: str, error: float, tolerance: float) -> None:
        """Note an error that the checker measured itself."""
        self._found.append((name, math.inf if math.isnan(error) else error, tolerance))

    def line(self) -> Line:
        """The worst comparison so far; a file in which nothing was compared is out."""
        if not self._found:
            return Line(self._set, self._file, math.inf, 0.0, "out", "nothing was compared")
        name, error, tolerance = max(self._found, key=_badness)
        status: Status = "out" if error > tolerance else "ok"
        return Line(self._set, self._file, error, tolerance, status, name)


def _badness(found: tuple[str, float, float]) -> tuple[float, float]:
    _, error, tolerance = found
    if tolerance > 0.0:
        return error / tolerance, tolerance
    return (math.inf if error > 0.0 else 0.0), 0.0


def excess(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 0.0) -> float:
    """The largest |actual - expected| - rtol * |expected|, not below 0; infinite when shapes differ or a value is NaN."""
    if actual.shape != expected.shape:
        return math.inf
    if actual.numel() == 0:
        return 0.0
    a, b = actual.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    over = float(((a - b).abs() - rtol * b.abs()).max())
    return math.inf if math.isnan(over) else max(over, 0.0)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a golden set."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    assert isinstance(index, dict)
    return index


def tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a file; `name` is relative to the set's folder, as indexes write it."""
    return load_file((folder / name).resolve())


def document(folder: Path, name: str) -> Any:
    """The content of a JSON file; `name` is relative to the set's folder."""
    return json.loads((folder / name).read_text(encoding="utf-8"))


def over_files(folder: Path, compare: Callable[[Path, str, Entry, Comparison], None]) -> Iterator[Line]:
    """Compare every file of a set and yield its line; what a comparison raises makes the file out, with the reason."""
    index = read_index(folder)
    for name, entry in index["files"].items():
        comparison = Comparison(index["set"], name)
        try:
            compare(folder, name, entry, comparison)
            yield comparison.line()
        except NotCompared as reason:
            yield Line(index["set"], name, 0.0, 0.0, "not compared", str(reason))
        except Exception as error:  # noqa: BLE001  a file that can't be compared is a finding of its own, not the end of the check
            yield failed(index["set"], name, error)


def failed(set_name: str, file: str, error: Exception) -> Line:
    """The line of a file that couldn't be compared because of an exception."""
    reason = " ".join(str(error).split())[:300]
    return Line(set_name, file, math.inf, 0.0, "out", f"{type(error).__name__}: {reason}")
