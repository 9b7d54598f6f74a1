"""Recorded numbers of the published world model: one test per file of the folder that REELWIRE_GOLDEN names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_golden.py"
TIMEOUT_S = 600


def golden_root() -> Path | None:
    named = os.environ.get("REELWIRE_GOLDEN")
    if not named:
        return None
    return Path(named) / "world" if (Path(named) / "world").is_dir() else Path(named)


def golden_files() -> list[Any]:
    """Folder and file of all sets, as the script names them; one skipped entry when there is no data."""
    root = golden_root()
    if root is None:
        return [pytest.param("", "", marks=pytest.mark.skip(reason="REELWIRE_GOLDEN names no folder"))]
    found = []
    for index in sorted(root.rglob("index.json")):
        folder = index.parent.relative_to(root).as_posix()
        files = json.loads(index.read_text(encoding="utf-8"))["files"]
        found += [pytest.param(folder, file, id=f"{folder}/{file}") for file in files]
    assert found, f"no golden set in {root}"
    return found


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """All lines of the script, by folder and file."""
    root = golden_root()
    assert root is not None
    command = [sys.executable, str(SCRIPT), str(root), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for text in done.stdout.splitlines():
        line = json.loads(text)
        lines.setdefault((line["folder"], line["file"]), []).append(line)
    return lines


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("folder", "file"), golden_files())
def test_golden(folder: str, file: str, verdicts: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Our numbers for this file are within its tolerance."""
    for line in verdicts[folder, file]:
        assert line["status"] == "ok", f"{line['note']}: {line['error']} of {line['tolerance']}"
