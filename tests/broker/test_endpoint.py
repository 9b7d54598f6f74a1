"""Where a broker may listen, and who holds a path."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from reelwire.broker.endpoint import claimed, is_loopback
from reelwire.endpoints import IPC_PATH_BYTES_MAX
from reelwire.errors import ConfigError


def refused(listen: str, *, insecure: bool = False) -> str:
    with pytest.raises(ConfigError) as caught, claimed(listen, insecure=insecure):
        pass
    assert caught.value.field == "listen"
    return caught.value.reason


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "[::1]", "localhost", "lo"])
def test_loopback_is_what_only_this_machine_reaches(host: str) -> None:
    """Addresses, the name and the interface."""
    assert is_loopback(host)
    with claimed(f"tcp://{host}:7461", insecure=False):
        pass


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "10.0.0.1", "[::]", "eth0", "example.org"])
def test_an_open_address_must_be_asked_for(host: str) -> None:
    """Without `insecure` it is refused, and the sentence says what is accepted; with it, it is taken."""
    assert "accepted: a loopback address" in refused(f"tcp://{host}:7461")
    with claimed(f"tcp://{host}:7461", insecure=True):
        pass


def test_an_endpoint_has_a_port() -> None:
    """A host alone isn't one."""
    assert "names no host and port" in refused("tcp://localhost")


def test_a_path_is_held_by_one(tmp_path: Path) -> None:
    """The second is refused while the first holds it, and may have it afterwards; nothing stays behind."""
    listen = f"ipc://{tmp_path}/new/deep/broker.sock"
    with claimed(listen, insecure=False):
        assert "is in use" in refused(listen)
        folder = tmp_path / "new" / "deep"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [path.name for path in folder.iterdir()] == ["broker.sock.lock"]
    assert list(folder.iterdir()) == []
    with claimed(listen, insecure=False):
        pass


def test_a_stale_socket_is_removed(tmp_path: Path) -> None:
    """What a killed broker left is no obstacle, lock file and all."""
    path = tmp_path / "broker.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    (tmp_path / "broker.sock.lock").touch()
    with claimed(f"ipc://{path}", insecure=False):
        assert not path.exists()


def test_the_lock_counts_not_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock got on a file that its last holder just removed isn't taken for the lock: the next file is locked."""
    name = tmp_path / "broker.sock.lock"
    honest = os.fstat
    seen: list[int] = []

    def late(descriptor: int) -> os.stat_result:
        if not seen:
            seen.append(descriptor)
            name.unlink()
        return honest(descriptor)

    monkeypatch.setattr(os, "fstat", late)
    with claimed(f"ipc://{tmp_path}/broker.sock", insecure=False):
        assert name.exists()
    assert seen


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    """A path that holds something else isn't deleted."""
    path = tmp_path / "notes.txt"
    path.write_text("keep")
    assert "not a socket" in refused(f"ipc://{path}")
    assert path.read_text() == "keep"
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The system would cut it off; both lengths are named."""
    name = str(tmp_path / ("x" * IPC_PATH_BYTES_MAX))
    assert str(len(name)) in refused(f"ipc://{name}")


@pytest.mark.parametrize("listen", ["ipc://@abstract", "ipc://*", "ipc://", "ipc:///dev/null/x.sock"])
def test_names_without_a_guarded_folder_are_refused(listen: str) -> None:
    """An abstract name is open to everybody, a wildcard is unknown to everybody, a file is no folder."""
    assert refused(listen)
