"""Compare this tree's models with recorded numbers: one line per file, with the largest error and what is accepted.

    python scripts/check_golden.py DIR [--json]

Every folder under DIR with an ``index.json`` is a set; the checker is chosen by the set's name. The exit status is 1 when
a file is out of tolerance or can't be compared, 2 when there is no such folder or no set in it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parent))  # `python -P` leaves the script's own folder out

if TYPE_CHECKING:
    from scripts.golden_checks.line import Line, failed, read_index
else:
    from golden_checks.line import Line, failed, read_index

CHECKERS = {
    "causal_dit": "causal_dit",
    "sampler": "sampler",
    "denoise_rollout": "denoise_rollout",
    "control": "control",
    "geometry": "geometry",
    "vae_streaming": "vae_streaming",
    "end_to_end": "end_to_end",
    "service_traces": "service_traces",
}
"""Name of a set -> module in ``golden_checks`` that compares it. Imported when the set is met."""


def check_folder(folder: Path) -> Iterator[Line]:
    """Yield the lines of one set, each file of its index exactly once or more, whatever its checker raises."""
    index = read_index(folder)
    name = str(index["set"])
    left = list(index["files"])
    if name not in CHECKERS:
        for file in left:
            yield Line(name, file, 0.0, 0.0, "not compared", "no such model here yet")
        return
    try:
        module = importlib.import_module(f"golden_checks.{CHECKERS[name]}")
        for line in module.check(folder):
            if line.file in left:
                left.remove(line.file)
            yield line
    except Exception as error:  # noqa: BLE001  one broken checker must not hide the verdict on the other sets
        for file in left:
            yield failed(name, file, error)
        return
    for file in left:
        yield failed(name, file, LookupError("its checker passed it over"))


def main() -> int:
    """Print the table; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description="Compare this tree's models with recorded numbers.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of sets, or one set")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of the table")
    arguments = parser.parse_args()
    root: Path = arguments.folder
    if not root.is_dir():
        print(f"{root} is not a folder", file=sys.stderr)
        return 2
    folders = sorted(path.parent for path in root.rglob("index.json"))
    if not folders:
        print(f"no index.json in {root} or below it", file=sys.stderr)
        return 2
    counts = {"ok": 0, "out": 0, "not compared": 0}
    for folder in folders:
        place = folder.relative_to(root).as_posix()
        for line in check_folder(folder):
            counts[line.status] += 1
            print(_as_json(place, line) if arguments.json else _as_row(place, line), flush=True)
    if not arguments.json:
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["out"] else 0


def _as_row(place: str, line: Line) -> str:
    where = line.file if place == "." else f"{place}/{line.file}"
    if line.status == "not compared":
        return f"--   {where:<68} not compared: {line.note}"
    verdict = "ok  " if line.status == "ok" else "OUT "
    return f"{verdict} {where:<68} {line.error:9.2e} of {line.tolerance:7.1e}  {line.note}"


def _as_json(place: str, line: Line) -> str:
    fields = {"folder": place, **{name: getattr(line, name) for name in Line.__slots__}}
    if not math.isfinite(line.error):  # JSON has no infinity
        fields["error"] = None
    return json.dumps(fields)


if __name__ == "__main__":
    sys.exit(main())
