"""Recorded traces of admission and of live input, played to the broker's core over messages.

Nothing of the rules is repeated here: a session is opened, steered, run and ended by the very messages that clients and
workers send, and its cursors are read from the core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.golden_checks.admission_traces import check_admission
    from scripts.golden_checks.input_traces import check_input
    from scripts.golden_checks.line import Comparison, Entry, Line, NotCompared, document, over_files
else:
    from golden_checks.admission_traces import check_admission
    from golden_checks.input_traces import check_input
    from golden_checks.line import Comparison, NotCompared, document, over_files


def check(folder: Path) -> Iterator[Line]:
    """One line per file of traces; the note names the comparison that was worst."""
    return over_files(folder, _compare)


def _compare(folder: Path, name: str, _entry: Entry, comparison: Comparison) -> None:
    content = document(folder, name)
    traces: list[dict[str, Any]] = content["traces"]
    steps = any("steps" in trace for trace in traces)
    for trace in traces:
        try:
            (check_admission if steps else check_input)(trace, comparison)
        except NotCompared:
            continue
