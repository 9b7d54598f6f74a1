"""Endpoints as texts: where a broker listens, and where clients and workers connect to.

::

    tcp://HOST:PORT    HOST is a name, an IPv4 address, or an IPv6 address in brackets
    ipc://PATH         the file of a Unix socket
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

DEFAULT_ENDPOINT = "tcp://127.0.0.1:7461"
IPC_PATH_BYTES_MAX = 107
"""A Unix socket's address has room for no more; the system would cut the rest off or refuse it without saying why."""
PORT_MAX = 65535

_TCP = re.compile(r"(\[[^\s\[\]/]+\]|[^\s:/\[\]]+):(\*|[0-9]{1,5})")
_FORMS = "tcp://HOST:PORT or ipc://PATH"


@dataclass(frozen=True, slots=True)
class Tcp:
    """A host, brackets included, and a port; None: any that is free."""

    host: str
    port: int | None


@dataclass(frozen=True, slots=True)
class Ipc:
    """The path of a Unix socket."""

    path: str


def parse(text: object, *, to_bind: bool = False) -> Tcp | Ipc:
    """Read an endpoint.

    Args:
        text: what somebody wrote.
        to_bind: it is to be listened at, so that the port may be ``*``.

    Raises:
        ValueError: it is none; the sentence says what is accepted.
    """
    scheme, found, rest = text.partition("://") if isinstance(text, str) else ("", "", "")
    if found and scheme == "ipc":
        length = len(rest.encode("utf-8", "surrogateescape"))
        if not 0 < length <= IPC_PATH_BYTES_MAX:
            raise ValueError(f"the path of {text!r} has {length} bytes; accepted: 1 to {IPC_PATH_BYTES_MAX}")
        return Ipc(rest)
    if not found or scheme != "tcp":
        raise ValueError(f"{text!r} is no endpoint; accepted: {_FORMS}")
    matched = _TCP.fullmatch(rest)
    # ZeroMQ would take a port beyond the largest modulo 65536.
    if matched is None or not (_is_port(matched[2]) or (to_bind and matched[2] == "*")):
        ports = f"1 to {PORT_MAX}{' or *' if to_bind else ''}"
        raise ValueError(f"{text!r} names no host and port; accepted: {_FORMS}, with a port of {ports}")
    if matched[1].startswith("[") and not _is_ipv6(matched[1][1:-1]):
        raise ValueError(f"{matched[1]} is no IPv6 address; accepted in brackets: such as [::1]")
    return Tcp(matched[1], None if matched[2] == "*" else int(matched[2]))


def _is_port(text: str) -> bool:
    return text != "*" and 1 <= int(text) <= PORT_MAX


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
