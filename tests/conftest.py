"""What holds for every test: shared memory and state are written below folders of this run, and no memory is left of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from reelwire.segments import reap

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("reelwire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("reelwire")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seeds N`: more random schedules of each kind than there is time for in every run."""
    parser.addoption("--seeds", type=int, metavar="N", help="how often tests with random seeds run, from seed 0 on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked ``seeds(count)`` so often, or as often as was asked for."""
    marker = metafunc.definition.get_closest_marker("seeds")
    if marker is not None:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds") or marker.args[0]))


@pytest.fixture(scope="session", autouse=True)
def shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all processes of the tests write; in the end only what killed ones left, and that can be reaped."""
    machine = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="reelwire-tests-", dir=machine if os.access(machine, os.W_OK) else None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REELWIRE_SHARED_MEMORY", str(base))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # of brokers that are told of no folder
        yield base
    reap(base)
    left = sorted(base.rglob("*"))
    shutil.rmtree(base)
    assert not left, f"somebody still holds shared memory: {left}"
