"""Settings of a broker."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from reelwire.broker.config import BrokerConfig
from reelwire.checks import BYTES_MAX, SECONDS_MAX
from reelwire.errors import ConfigError


def test_the_defaults_are_those_of_the_design() -> None:
    """A broker without settings has the limits that the documents name."""
    config = BrokerConfig()
    assert (config.heartbeat_s, config.missed, config.client_grace_s, config.control_idle_s) == (1, 3, 30, 300)
    assert (config.placement_timeout_s, config.drain_s, config.stall_s, config.close_timeout_s) == (30, 60, 120, 30)
    assert (config.sessions_max, config.peers_max, config.result_keep_s) == (4096, 10_000, 86400)
    assert (config.frame_bytes_max, config.control_bytes_max) == (256 << 20, 64 << 10)
    assert (config.image_bytes_max, config.outbox_bytes_max) == (32 << 20, 64 << 20)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BrokerConfig)])
def test_each_setting_is_checked_by_name(field: str) -> None:
    """A value of another kind, and for numbers 0, less or not finite, is refused with the field's name."""
    kind = type(getattr(BrokerConfig(), field))
    wrong: list[Any] = [None, [], {}]
    if kind is not str:
        wrong.append("1")
    if kind in (int, float):
        wrong += [0, -1, float("nan"), float("inf"), True]
        wrong += [10**400, 2**63 - 1 if kind is int else 1e300, -(10**5000)]
    if kind is int:
        wrong.append(1.5)
    if kind is str:
        wrong += [7, "http://x", "7461", *([] if field == "state_dir" else [""])]
    if kind is tuple:
        wrong += [("media",), (7,)]
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            BrokerConfig(**{field: value})
        assert caught.value.field == field
        assert "accepted: " in caught.value.reason
        assert len(caught.value.reason) < 250


def test_limits_for_peers_have_their_units_in_their_names() -> None:
    """What a welcome says is whole numbers under names that end in their unit or in max."""
    limits = BrokerConfig().limits()
    assert limits["frame_bytes_max"] == 256 << 20
    assert all(name.endswith("_max") and isinstance(value, int) for name, value in limits.items())


def test_the_largest_settings_can_be_said_on_the_wire() -> None:
    """At the upper bounds what a welcome says still fits 63 bits."""
    config = BrokerConfig(frame_bytes_max=BYTES_MAX - (1 << 20), message_bytes_max=BYTES_MAX, heartbeat_s=SECONDS_MAX)
    assert max(config.limits().values()) < 1 << 63
    assert config.wire_limits().message_bytes_max == BYTES_MAX
