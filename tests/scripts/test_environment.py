"""scripts/environment.sh: one environment, installed only when what it depends on has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/usr/bin/env bash
# Stands for the environment's interpreter: says which torch it has, and writes down what pip was asked for.
if [ "$1" = "-" ]; then exec {real} - ; fi
printf '%s\\n' "$@" > "$(dirname "$0")/../asked"
while [ "$#" -gt 0 ]; do
    if [ "$1" = "-c" ]; then cp "$2" "$(dirname "$0")/../limits"; fi
    shift
done
exit "${{PIP_EXIT:-0}}"
"""


class Tree:
    """A copy of what the script reads, in a path with a blank, with a stand-in for the interpreter."""

    def __init__(self, folder: Path) -> None:
        """Make it; the environment has no torch."""
        self.root = folder / "a tree"
        self.venv = self.root / ".venv"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "setup.cfg", "constraints.txt", "scripts/environment.sh"):
            shutil.copy(ROOT / name, self.root / name)
        (self.venv / "bin").mkdir(parents=True)
        self.interpreter("false")

    def interpreter(self, real: str) -> None:
        """Answer questions about torch with that program."""
        python = self.venv / "bin" / "python"
        python.write_text(PYTHON.format(real=real))
        python.chmod(0o755)

    def install(self, extras: str = "worker", **environ: str) -> subprocess.CompletedProcess[str]:
        """Source the script from another folder and install."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("REELWIRE_")}
        script = 'set -euo pipefail; source "$1/scripts/environment.sh"; install "$2"'
        return subprocess.run(
            ["bash", "-c", script, "bash", str(self.root), extras],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={**kept, **environ},
            timeout=60,
        )

    def asked(self) -> list[str]:
        """What pip was asked for since the last look; nothing if it wasn't run."""
        path = self.venv / "asked"
        words = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return words

    def limits(self) -> set[str]:
        """Names of the packages that the constraints pinned."""
        lines = (self.venv / "limits").read_text().splitlines()
        return {line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A tree of its own."""
    return Tree(tmp_path)


def test_it_installs_once_until_something_changes(tree: Tree) -> None:
    """Whoever installed the tools of development has what the demo needs; a new pin installs again."""
    assert tree.install("worker,dev").returncode == 0
    assert f"{tree.root}[worker,dev]" in tree.asked()
    assert tree.install("worker,dev").returncode == 0
    assert tree.install("worker").returncode == 0
    assert tree.asked() == []
    with (tree.root / "constraints.txt").open("a") as pins:
        pins.write("more==1\n")
    assert tree.install("worker").returncode == 0
    assert f"{tree.root}[worker]" in tree.asked()
    assert "more" in tree.limits()


def test_the_pinned_torch_is_installed_where_there_is_none(tree: Tree) -> None:
    """Its pin is among the constraints."""
    tree.install()
    assert {"torch", "triton", "numpy"} <= tree.limits()


def test_a_torch_that_is_there_is_kept(tree: Tree) -> None:
    """When the environment's interpreter finds a recent one, neither it nor its triton is pinned."""
    tree.interpreter("true")
    tree.install()
    assert "numpy" in tree.limits()
    assert not {"torch", "triton"} & tree.limits()


def test_another_torch_and_options_for_pip_can_be_asked_for(tree: Tree) -> None:
    """They are handed to pip, and asking for others installs again."""
    tree.install(REELWIRE_TORCH="torch==2.11.0", REELWIRE_PIP_ARGS="--no-cache-dir --pre")
    asked = tree.asked()
    assert "torch==2.11.0" in asked
    assert {"--no-cache-dir", "--pre"} <= set(asked)
    assert "torch" not in tree.limits()
    tree.install(REELWIRE_TORCH="torch==2.12.0")
    assert "torch==2.12.0" in tree.asked()


def test_a_failed_install_is_tried_again(tree: Tree) -> None:
    """It says so, and leaves nothing that looks installed."""
    failed = tree.install(PIP_EXIT="1")
    assert failed.returncode == 1
    assert "pip could not install reelwire[worker]" in failed.stderr
    tree.asked()
    assert tree.install().returncode == 0
    assert tree.asked()


def test_an_interpreter_that_is_too_old_is_refused(tree: Tree, tmp_path: Path) -> None:
    """By name, and no environment is left half made."""
    shutil.rmtree(tree.venv)
    old = tmp_path / "old-python"
    old.write_text("#!/usr/bin/env bash\nexit 1\n")
    old.chmod(0o755)
    failed = tree.install(PYTHON=str(old))
    assert failed.returncode == 1
    assert f"PYTHON: {old} is no Python 3.11 or later" in failed.stderr
    assert not tree.venv.exists()
