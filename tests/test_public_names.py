"""The public face: what `import reelwire` gives, and how little it loads."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import reelwire
from reelwire import errors

NAMES = {
    "Client",
    "AsyncClient",
    "Session",
    "AsyncSession",
    "Chunk",
    "Control",
    "KeyTrace",
    "Job",
    "AsyncJob",
    "JobStatus",
    "ReelwireError",
    "UsageError",
    "RequestError",
    "ConfigError",
    "ControlError",
    "SessionError",
    "SessionFailed",
    "SessionClosed",
    "JobError",
    "JobFailed",
    "JobCancelled",
    "OverloadError",
    "BrokerUnreachable",
    "VersionMismatch",
    "WireError",
    "__version__",
}


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_the_public_names_are_these() -> None:
    """Nobody's import breaks by accident, and nothing becomes public by accident."""
    assert set(reelwire.__all__) == NAMES
    assert len(reelwire.__all__) == len(NAMES)
    assert set(dir(reelwire)) >= NAMES


def test_every_public_name_is_there() -> None:
    """Lazily loaded or not: each name gives its object, and another name an AttributeError."""
    for name in NAMES:
        assert getattr(reelwire, name) is not None
    assert reelwire.Client.__module__ == "reelwire.client"
    with pytest.raises(AttributeError, match="module 'reelwire' has no attribute 'Clint'"):
        _ = reelwire.Clint  # type: ignore[attr-defined]


def test_every_error_is_public() -> None:
    """Whatever the package raises can be named by whoever catches it."""
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert found <= NAMES


def test_there_is_one_version() -> None:
    """It is the distribution's."""
    assert reelwire.__version__ == metadata.version("reelwire")


def test_importing_the_package_loads_next_to_nothing() -> None:
    """Numpy, sockets and media come with the names that need them; torch never."""
    heavy = {"av", "PIL", "msgpack", "numpy", "torch", "zmq", "reelwire.client"}
    assert printed(f"import sys, reelwire; print(sorted({heavy!r} & set(sys.modules)))") == "[]"
    loaded = printed(f"import sys; from reelwire import Client; print(sorted({heavy!r} & set(sys.modules)))")
    assert loaded == "['msgpack', 'numpy', 'reelwire.client', 'zmq']"


def test_the_package_is_a_command() -> None:
    """``python -P -m reelwire`` is the command ``reelwire``."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "reelwire", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, ["reelwire", reelwire.__version__])
