"""The state folder: which one, who has it, and what may be in it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from reelwire.broker.config import BrokerConfig
from reelwire.broker.state_folder import StateFolder, claim, endpoint_name
from reelwire.errors import ConfigError

ENDPOINT = "tcp://127.0.0.1:7461"
SHA = "ab" * 32


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        StateFolder(path)
    assert caught.value.field == "state_dir"
    assert "\n" not in caught.value.reason
    return caught.value.reason


def test_every_endpoint_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies below the user's state folder, has the endpoint's name, and is the user's alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = claim(BrokerConfig(), ENDPOINT)
    assert folder.path == tmp_path / "state" / "reelwire" / "tcp-127.0.0.1-7461"
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.path.iterdir()) == ["files", "incoming", "lock"]
    assert (folder.path / "lock").read_text() == f"{os.getpid()}\n"
    folder.close()
    folder.close()


@pytest.mark.parametrize("ignored", ["", "not/absolute"])
def test_without_xdg_it_is_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: str) -> None:
    """A state home that isn't absolute is ignored, as its specification says."""
    monkeypatch.setenv("XDG_STATE_HOME", ignored)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = claim(BrokerConfig(), "ipc:///run/reelwire/a.sock")
    assert folder.path.parent == tmp_path / ".local" / "state" / "reelwire"
    assert folder.path.name.startswith("ipc-a.sock-")
    folder.close()


def test_no_two_endpoints_share_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names are safe for a file system, differ where endpoints do, and are the same however one is written."""
    long = "x" * 300
    names = [
        endpoint_name(text)
        for text in (
            ENDPOINT, "tcp://127.0.0.1:7462", "tcp://*:7461", "tcp://[::1]:7461", "tcp://a_b:1", "tcp://a-b:1",
            f"tcp://{long}:1", f"tcp://{long}y:1", "ipc:///a/b.sock", "ipc:///b/b.sock", "ipc:///a/c?/../%b.sock",
        )
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    for name in names:
        assert name is not None
        assert "/" not in name
        assert len(name) <= 200
    monkeypatch.chdir(tmp_path)
    assert endpoint_name("ipc://b.sock") == endpoint_name(f"ipc://{tmp_path}/x/../b.sock")
    assert endpoint_name("tcp://LocalHost:07461") == endpoint_name("tcp://localhost:7461")


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "tcp://[::1]:*"])
def test_a_broker_at_any_port_has_a_folder_for_its_life(listen: str) -> None:
    """Nobody could come back to it, so it is gone with the broker."""
    folder = claim(BrokerConfig(), listen)
    assert folder.path.is_dir()
    (folder.files / SHA).write_bytes(b"x")
    folder.close()
    assert not folder.path.exists()


def test_temporary_folders_of_killed_brokers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next one; those of brokers that live stay, and so does what is no folder of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, living = (claim(BrokerConfig(), "tcp://127.0.0.1:*") for _ in range(2))
    (killed.files / SHA).write_bytes(b"x")
    os.close(killed._lock)
    (tmp_path / "reelwire-broker-mine").mkdir()
    (tmp_path / "reelwire-broker-link").symlink_to(living.path)
    (tmp_path / "reelwire-broker-file").write_text("")
    folder = claim(BrokerConfig(), "tcp://127.0.0.1:*")
    expected = {living.path.name, folder.path.name, *(f"reelwire-broker-{name}" for name in ("mine", "link", "file"))}
    assert {path.name for path in tmp_path.iterdir()} == expected
    folder.close()
    living.close()


def test_the_settings_say_which(tmp_path: Path) -> None:
    """A folder that is set is taken for every endpoint, and isn't removed at the end."""
    folder = claim(BrokerConfig(state_dir=str(tmp_path / "a" / "b")), "tcp://127.0.0.1:*")
    folder.close()
    assert (tmp_path / "a" / "b" / "lock").exists()
    with pytest.raises(ConfigError, match="is no endpoint"):
        claim(BrokerConfig(), "udp://x")


def test_without_a_home_a_folder_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, of the setting."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ConfigError, match="state_dir: there is no home folder"):
        claim(BrokerConfig(), ENDPOINT)


def test_two_brokers_never_share_a_folder(tmp_path: Path) -> None:
    """The second is told who has it, also by another name of the folder; it may have it when the first has gone."""
    (tmp_path / "link").symlink_to(tmp_path / "state")
    first = StateFolder(tmp_path / "state")
    for name in ("state", "link"):
        reason = refused(tmp_path / name)
        assert f"is in use by another broker (process {os.getpid()})" in reason
        assert "accepted: a folder of its own" in reason
    first.close()
    StateFolder(tmp_path / "link").close()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """An empty one is closed to them; in one that is in use they may have been already."""
    path = tmp_path / "state"
    path.mkdir(mode=0o755)
    StateFolder(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o750)
    assert "is open to other users (mode 750); accepted: mode 700" in refused(path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    """A file, a path through a file, one that no file can have, and one in a folder that can't be written to."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "\0", tmp_path / ("x" * 300)):
        assert "can't be used" in (reason := refused(path)) or "is no path" in reason
    (tmp_path / "s").mkdir(mode=0o700)
    (tmp_path / "s" / "files").write_text("")
    assert "can't be used" in refused(tmp_path / "s")
    StateFolder(tmp_path / "t").close()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns it could change what lies there."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to another user" in refused(tmp_path / "state")


def test_files_without_a_journal_are_not_thrown_away(tmp_path: Path) -> None:
    """Where the journal is gone nobody knows whose they are, so no broker starts there."""
    folder = StateFolder(tmp_path / "state")
    (folder.files / SHA).write_bytes(b"x")
    folder.close()
    assert "holds files but no journal.sqlite3" in refused(tmp_path / "state")
    assert (folder.files / SHA).exists()


def test_only_files_of_the_store_are_removed(tmp_path: Path) -> None:
    """Incomplete ones and those that nobody refers to go; what bears another name is somebody else's."""
    folder = StateFolder(tmp_path / "state")
    kept, gone = "1" * 64, "2" * 64
    for path in (folder.files / kept, folder.files / gone, folder.incoming / "7.part", folder.files / "notes.txt"):
        path.write_bytes(b"x")
    assert folder.clean({kept}) == 2
    assert sorted(path.name for path in folder.files.iterdir()) == [kept, "notes.txt"]
    assert not list(folder.incoming.iterdir())
    (folder.files / gone).mkdir()
    with pytest.raises(ConfigError, match="can't be cleaned"):
        folder.clean({kept})
    folder.close()
