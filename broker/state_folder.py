"""The folder of what must outlive a broker: which one it is, who has it, and what lies where in it.

::

    lock             held, as long as it lives, by the one broker that uses the folder; says its process id
    journal.sqlite3  see `journal`
    files/           complete files, each under its SHA-256; see `files`
    incoming/        files that aren't complete; whatever lies there at a start is a dead broker's
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from reelwire.endpoints import Ipc
from reelwire.endpoints import parse as parse_endpoint
from reelwire.errors import ConfigError
from reelwire.job_parts import FILE_NAME

from .config import BrokerConfig

_INCOMING_NAME = re.compile(r"[0-9]+\.part")
_FILES, _INCOMING, _JOURNAL, _LOCK = "files", "incoming", "journal.sqlite3", "lock"
_TEMPORARY = "reelwire-broker-"
_NAME_CHARS_MAX = 100
_PID_BYTES_MAX = 32


class StateFolder:
    """A state folder that this broker has until `close`.

    Args:
        path: which; it is made when it isn't there.
        is_temporary: it goes with the broker.

    Attributes:
        path: the folder, absolute, no link in it.
        journal: where the journal lies.
        files: folder of the complete files.
        incoming: folder of the others.

    Raises:
        ConfigError: of the field ``state_dir``: another broker has it, it can't be used, others have access to it, or it
            holds files of a broker whose journal is gone.
    """

    def __init__(self, path: Path, *, is_temporary: bool = False) -> None:
        """Make what isn't there yet, and take the lock."""
        self._is_temporary = is_temporary
        self._lock = -1
        try:
            self.path = _made(path)
            self._lock = _locked(self.path, is_fresh=is_temporary)
            self.journal = self.path / _JOURNAL
            self.files, self.incoming = self.path / _FILES, self.path / _INCOMING
            for folder in (self.files, self.incoming):
                folder.mkdir(mode=0o700, exist_ok=True)
                sync_folder(self.path)
            if not self.journal.exists() and any(self.files.iterdir()):
                _refuse(
                    path, f"holds {_FILES} but no {_JOURNAL}; accepted: a broker's folder as it left it, or a new one"
                )
        except OSError as error:
            self.close()
            _refuse(path, f"can't be used ({error.strerror}: {error.filename})", error)
        except ConfigError:
            self.close()
            raise

    def clean(self, referred: Container[str]) -> int:
        """Remove what is incomplete, and complete files that aren't among those referred to; how many there were.

        Raises:
            ConfigError: it can't be removed.
        """
        removed = 0
        try:
            for folder, is_ours in ((self.incoming, _INCOMING_NAME), (self.files, FILE_NAME)):
                for path in folder.iterdir():
                    if is_ours.fullmatch(path.name) and not (folder == self.files and path.name in referred):
                        path.unlink()
                        removed += 1
            sync_folder(self.files)  # what a killed broker renamed there may not be durable yet
        except OSError as error:
            _refuse(self.path, f"can't be cleaned ({error.strerror}: {error.filename})", error)
        return removed

    def close(self) -> None:
        """Let others have it; a temporary one is removed first. Closing again does nothing."""
        if self._lock < 0:
            return
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def claim(config: BrokerConfig, endpoint: str) -> StateFolder:
    """Take the folder that the settings name, else the one of the endpoint.

    That is ``reelwire/NAME`` below ``$XDG_STATE_HOME`` or ``~/.local/state`` (XDG Base Directory Specification 0.8). An
    endpoint with any free port has no name that anybody could come back to: its folder is temporary.

    Raises:
        ConfigError: as `StateFolder` does, or there is no home folder.
    """
    try:
        if config.state_dir:
            return StateFolder(Path(config.state_dir))
        name = endpoint_name(endpoint)
        if name is None:
            _reap()
            return StateFolder(Path(tempfile.mkdtemp(prefix=_TEMPORARY)), is_temporary=True)
        base = Path(os.environ.get("XDG_STATE_HOME", ""))
        if not base.is_absolute():  # the specification: such a value is to be ignored
            base = Path.home() / ".local" / "state"
        return StateFolder(base / "reelwire" / name)
    except RuntimeError as error:
        raise ConfigError("state_dir", f"there is no home folder ({error}); accepted: the path of a folder") from error


def endpoint_name(endpoint: str) -> str | None:
    """The name of an endpoint's folder, another one for every endpoint; None when its port is any.

    Raises:
        ConfigError: of the field ``listen``: it is none.
    """
    if endpoint.startswith("tcp://") and endpoint.rpartition(":")[2] in ("0", "*"):
        return None
    try:
        parsed = parse_endpoint(endpoint, to_bind=True)
    except ValueError as error:
        raise ConfigError("listen", str(error)) from None
    if isinstance(parsed, Ipc):
        path = os.path.abspath(parsed.path)  # noqa: PTH100  resolve() would ask the disk, and links may change
        return f"ipc-{quote(Path(path).name[:40], safe='')}-{_digest(path)}"
    name = f"tcp-{quote(parsed.host.lower(), safe='')}-{parsed.port}"
    return name if len(name) <= _NAME_CHARS_MAX else f"tcp-{_digest(parsed.host.lower())}-{parsed.port}"


def sync_folder(path: Path) -> None:
    """Make durable which names a folder holds.

    Raises:
        OSError: it can't be.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _made(given: Path) -> Path:
    """The folder, which is there, absolute and for its user alone."""
    path = given.absolute()
    if "\0" in str(path):
        _refuse(given, "is no path of a folder")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve()
    found = path.stat()
    if found.st_uid != os.geteuid():
        _refuse(given, "belongs to another user; accepted: a folder of the user that the broker runs as")
    if stat.S_IMODE(found.st_mode) & 0o077:
        if any(path.iterdir()):
            _refuse(given, f"is open to other users (mode {stat.S_IMODE(found.st_mode):o}); accepted: mode 700")
        path.chmod(0o700)
    return path


def _locked(path: Path, *, is_fresh: bool) -> int:
    """A descriptor that holds the folder's lock, which ends with the process however that ends.

    A fresh one gets its name when it is held: whoever looks for dead brokers' folders never finds it free.
    """
    name = path / (f"{_LOCK}.new" if is_fresh else _LOCK)
    lock = os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, _PID_BYTES_MAX, 0).decode("ascii", "replace").strip()
        os.close(lock)
        _refuse(path, f"is in use by another broker (process {owner or 'unknown'}); accepted: a folder of its own")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    if is_fresh:
        name.rename(path / _LOCK)
    return lock


def _reap() -> None:
    """Remove the temporary folders of this user's brokers that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _refuse(path: Path, reason: str, error: Exception | None = None) -> NoReturn:
    raise ConfigError("state_dir", f"{str(path)!r} {reason}") from error
