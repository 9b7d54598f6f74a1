"""What is an endpoint, for those who connect and for those who listen."""

from __future__ import annotations

import pytest

from reelwire.endpoints import DEFAULT_ENDPOINT, IPC_PATH_BYTES_MAX, Ipc, Tcp, parse


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (DEFAULT_ENDPOINT, Tcp("127.0.0.1", 7461)),
        ("tcp://broker.example:1", Tcp("broker.example", 1)),
        ("tcp://[::1]:65535", Tcp("[::1]", 65535)),
        ("tcp://[fe80::1%eth0]:80", Tcp("[fe80::1%eth0]", 80)),
        ("ipc:///run/a b/broker", Ipc("/run/a b/broker")),
        ("ipc:///" + "x" * (IPC_PATH_BYTES_MAX - 1), Ipc("/" + "x" * (IPC_PATH_BYTES_MAX - 1))),
    ],
)
def test_what_is_accepted(text: str, read: Tcp | Ipc) -> None:
    """Both forms, with what they are made of; also to listen there."""
    assert parse(text) == read
    assert parse(text, to_bind=True) == read


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (7461, "is no endpoint"),
        ("", "is no endpoint"),
        ("127.0.0.1:7461", "is no endpoint"),
        ("udp://127.0.0.1:7461", "is no endpoint"),
        ("tcp://127.0.0.1", "names no host and port"),
        ("tcp://:7461", "names no host and port"),
        ("tcp://h:0", "1 to 65535"),
        ("tcp://h:65536", "1 to 65535"),
        ("tcp://h:1\n", "names no host and port"),
        ("tcp://h:٣", "names no host and port"),
        ("tcp://::1:7461", "names no host and port"),
        ("tcp://[h]:7461", "no IPv6 address"),
        ("ipc://", "has 0 bytes"),
        ("ipc:///" + "x" * IPC_PATH_BYTES_MAX, "has 108 bytes; accepted: 1 to 107"),
        ("ipc:///" + "é" * 54, "has 109 bytes"),
    ],
)
def test_what_is_refused(text: object, reason: str) -> None:
    """With what is accepted."""
    for to_bind in (False, True):
        with pytest.raises(ValueError, match=reason) as refused:
            parse(text, to_bind=to_bind)
        assert "accepted" in str(refused.value)


def test_any_port_is_for_those_who_listen() -> None:
    """Nobody can connect to it."""
    assert parse("tcp://*:*", to_bind=True) == Tcp("*", None)
    with pytest.raises(ValueError, match=r"a port of 1 to 65535$"):
        parse("tcp://127.0.0.1:*")
