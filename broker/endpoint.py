"""Where a broker listens: what may be bound, and a lock so that no second one takes an ipc path over.

A Unix socket's file is replaced silently by whoever binds next, and stays when its owner dies. So the path belongs to
the holder of an advisory lock on ``PATH.lock``: the kernel gives it up with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from reelwire.endpoints import Ipc, parse
from reelwire.errors import ConfigError

IN_USE = "is in use: another broker listens there"


@contextlib.contextmanager
def claimed(listen: str, *, insecure: bool) -> Iterator[None]:
    """Hold whatever must be held while a broker listens at an endpoint.

    Raises:
        ConfigError: it may not be bound, or another broker has it.
    """
    try:
        endpoint = parse(listen, to_bind=True)
    except ValueError as error:
        raise ConfigError("listen", str(error)) from None
    if isinstance(endpoint, Ipc):
        with _claimed_path(endpoint.path):
            yield
        return
    if not insecure and not is_loopback(endpoint.host):
        raise ConfigError(
            "listen",
            f"{listen!r} can be reached from other machines, and nothing is encrypted or checked; accepted: a loopback "
            "address, an ipc path, or --insecure said as well",
        )
    yield


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address, name or interface."""
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _claimed_path(name: str) -> Iterator[None]:
    path = Path(name)
    if name[0] in "@*":
        raise ConfigError(
            "listen", f"'ipc://{name}' is no path; accepted: the path of a file, so that its folder guards it"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _locked(f"{name}.lock")
    except OSError as error:
        raise ConfigError("listen", f"'ipc://{name}' can't be used ({error.strerror})") from error
    try:
        _remove_socket(path)
        yield
        _remove_socket(path)
    finally:
        Path(f"{name}.lock").unlink(missing_ok=True)
        os.close(lock)


def _locked(name: str) -> int:
    """A file descriptor that holds the lock on the file that has this name now."""
    while True:
        lock = os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError("listen", f"'ipc://{name.removesuffix('.lock')}' {IN_USE}") from None
        # The one before removes the file as it leaves; a lock on a file without a name would keep nobody out.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == os.stat(name).st_ino:  # noqa: PTH116  both by the same call
                return lock
        os.close(lock)


def _remove_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("listen", f"'ipc://{path}' is a file already, and not a socket")
    path.unlink()
