"""Settings of a worker are checked when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire.errors import ConfigError
from reelwire.settings import Settings
from reelwire.workers.config import WorkerConfig, default_name


def test_the_defaults_are_accepted() -> None:
    """A worker needs no settings on the broker's machine."""
    config = WorkerConfig()
    assert config.broker == "tcp://127.0.0.1:7461"
    assert config.name == default_name()
    assert config.mailbox == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("broker", "127.0.0.1:7461"),
        ("broker", "tcp://127.0.0.1"),
        ("broker", "tcp://127.0.0.1:*"),
        ("broker", "tcp://127.0.0.1:0"),
        ("broker", "tcp://127.0.0.1:65536"),
        ("broker", "tcp://127.0.0.1:1\n"),
        ("broker", "ipc://"),
        ("broker", "ipc:///" + "x" * 107),
        ("broker", 7461),
        ("name", ""),
        ("name", "two words"),
        ("name", "x" * 101),
        ("device", "cuda"),
        ("device", "gpu:0"),
        ("pipeline", " "),
        ("options", {"model": 1}),
        ("options", {"": "tiny"}),
        ("options", "model=tiny"),
        ("stages", ["draw"]),
        ("stages", ("draw", "")),
        ("stages", ("draw", "draw")),
        ("slots", 0),
        ("slots", True),
        ("slots", 1.5),
        ("mailbox", -1),
        ("threads", -1),
        ("cache_bytes_max", 0),
        ("parent_pid", -1),
        ("frame_bytes_max", 10),
        ("outbox_bytes_max", 10),
        ("shared_memory_bytes_max", -1),
        ("shared_memory_bytes_max", 2**63 - 1),
        ("connect_timeout_s", 0),
        ("connect_timeout_s", float("inf")),
        ("busy_for_s", float("nan")),
        ("drain_s", -1),
        ("stuck_s", "5"),
        ("stuck_s", 1e300),
        ("drain_s", 10**400),
        ("slots", 10**400),
        pytest.param("mailbox", 10**5000, id="mailbox-5000 digits"),
        ("threads", 2**31),
        ("parent_pid", 2**31),
        ("cache_bytes_max", 2**63 - 1),
        ("frame_bytes_max", 2**63 - 1),
        ("reconnect", 1),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_accepted(field: str, value: Any) -> None:
    """The error carries the field's name as it is written in the file."""
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**{field: value})
    assert caught.value.field == field
    if not (isinstance(value, str) and "ipc" in value):
        assert "accepted" in caught.value.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("broker", "tcp://[::1]:7461"),
        ("broker", "tcp://broker.example:65535"),
        ("broker", "ipc:///run/reelwire/broker"),
        ("name", "host-1_a.b"),
        ("device", "cuda:3"),
        ("mailbox", 0),
        ("threads", 0),
        ("shared_memory_bytes_max", 0),
        ("stages", ("draw", "show")),
        ("options", {"model": "tiny", "note": ""}),
    ],
)
def test_what_is_accepted(field: str, value: Any) -> None:
    """The edges of what is."""
    assert getattr(WorkerConfig(**{field: value}), field) == value


def test_where_shared_memory_lies_is_no_setting_of_a_worker() -> None:
    """One variable says it to all processes alike, or some would look where nobody writes and reap what isn't there."""
    resolved = Settings({}, "", {"REELWIRE_SHARED_MEMORY": "/run/shm"}).resolve("worker", WorkerConfig)
    assert not [name for name in resolved.origins if "folder" in name]
    with pytest.raises(ConfigError, match="shared_memory_folder"):
        Settings({"worker": {"shared_memory_folder": "/mnt/shm"}}, "a.toml", {}).resolve("worker", WorkerConfig)
