"""What holds for every test: shared memory is written below a folder of this run, and nothing is left of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reelwire.segments import reap


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seeds N`: more random schedules of each kind than there is time for in every run."""
    parser.addoption("--seeds", type=int, metavar="N", help="how often tests with random seeds run, from seed 0 on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked ``seeds(count)`` so often, or as often as was asked for."""
    marker = metafunc.definition.get_closest_marker("seeds")
    if marker is not None:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds") or marker.args[0]))


@pytest.fixture(scope="session", autouse=True)
def shared_memory() -> Iterator[Path]:
    """Where all processes of the tests write; in the end only what killed ones left, and that can be reaped."""
    machine = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="reelwire-tests-", dir=machine if os.access(machine, os.W_OK) else None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REELWIRE_SHARED_MEMORY", str(base))
        yield base
    reap(base)
    left = sorted(base.rglob("*"))
    shutil.rmtree(base)
    assert not left, f"somebody still holds shared memory: {left}"
