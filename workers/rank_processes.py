"""The processes of a group's other ranks, as far as they are on this machine: seen when they end, and killed for certain.

A pidfd stands for one process and never for another that is given its number later; that it was opened for the right one
is known by when that one was started. Where there are none (macOS), and for processes of other machines, nothing is seen
here, and the silence at the broker has to say it.
"""

from __future__ import annotations

import ipaddress
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import cast

from reelwire.errors import ConfigError
from reelwire.messages import Member

_SIOCGIFADDR = 0x8915  # linux/sockios.h


@cache
def this_machine() -> str:
    """Tells this machine, with the process ids and the network that are seen from here, from others; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        spaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net")]
    except OSError:
        return ""
    return ":".join((boot, *map(str, spaces)))


def started_at(pid: int) -> int:
    """When a process was started, in ticks since the machine's boot; 0: it isn't there, or the system doesn't say.

    Source: proc_pid_stat(5), field 22.
    """
    try:
        said = Path(f"/proc/{pid}/stat").read_bytes()
        return int(said.rpartition(b")")[2].split()[19])  # the second field, a name, may hold blanks and parentheses
    except (OSError, ValueError, IndexError):
        return 0


def is_local(members: Iterable[Member]) -> bool:
    """Whether all ranks of a group are on this machine."""
    here = this_machine()
    return bool(here) and all(member.machine == here for member in members)


def check_host(host: str, members: Iterable[Member], rank: int = 0) -> None:
    """Check that the other ranks can reach this machine by the name or address that they are told.

    Where nobody knows on which machines they are, nothing is refused.

    Raises:
        ConfigError: `host` leads every machine to itself, and a rank is on another one, or sees another network.
    """
    here = this_machine()
    far = [
        each.rank for each in members if each.rank != rank and each.machine and _network(each.machine) != _network(here)
    ]
    if not here or not far:
        return
    address = ipaddress.ip_address(address_of(host).partition("%")[0])
    if address.is_loopback or address.is_unspecified:
        who = f"rank {far[0]} is" if len(far) == 1 else f"ranks {', '.join(map(str, far))} are"
        reason = f"{host!r} leads every machine to itself, and {who} on another one; accepted: an address by which it is reached"
        raise ConfigError("group_host", reason)


def _network(machine: str) -> list[str]:
    """What of `this_machine` says from where its loopback interface is reached: the boot and the network."""
    return machine.split(":")[::2]


def address_of(host: str) -> str:
    """The numeric address of a host; ZeroMQ and sockets bind to nothing else.

    Raises:
        ConfigError: there is none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = f"{host!r} has no address ({error.strerror}); accepted: an address or a name of this machine"
        raise ConfigError("group_host", reason) from error
    return cast("str", found[0][4][0])


def interface_to(host: str) -> str:
    """Name of this machine's network interface that has the address by which `host` sees it; empty: unknown.

    Args:
        host: a numeric IPv4 address.
    """
    if sys.platform != "linux":
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                if _address_of_interface(probe, name) == own:
                    return name
    except OSError:
        pass
    return ""


def _address_of_interface(probe: socket.socket, name: str) -> bytes:
    import fcntl

    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:  # it has none
        return b""
    return answer[20:24]


class RankProcesses:
    """Watches the other ranks of a group.

    Args:
        members: all ranks.
        rank: which of them this process is.
    """

    def __init__(self, members: Iterable[Member], rank: int) -> None:
        """Open what can be opened; whoever has ended already is told of by `ended`."""
        self._open: dict[int, int] = {}
        self._gone: list[int] = []
        here = this_machine()
        if not here or sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return
        for member in members:
            if member.rank == rank or member.machine != here or member.pid <= 0 or member.started <= 0:
                continue
            try:
                descriptor = os.pidfd_open(member.pid)
            except ProcessLookupError:
                self._gone.append(member.rank)
                continue
            except OSError:  # an old kernel, or no descriptors left: the broker will notice
                continue
            if started_at(member.pid) == member.started:  # asked once the descriptor can't become another's any more
                self._open[member.rank] = descriptor
            else:  # somebody else's process
                os.close(descriptor)

    @property
    def descriptors(self) -> Mapping[int, int]:
        """Rank to the descriptor that becomes readable when its process ends."""
        return self._open

    def ended(self) -> list[int]:
        """Ranks whose process has ended; each is told of once, and its descriptor closed."""
        gone, self._gone = self._gone, []
        if self._open:
            poll = select.poll()
            ranks = {descriptor: rank for rank, descriptor in self._open.items()}
            for descriptor in ranks:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(0):
                gone.append(ranks[descriptor])
                os.close(self._open.pop(ranks[descriptor]))
        return gone

    def kill(self, ranks: Iterable[int]) -> list[int]:
        """SIGKILL processes of these ranks; those that were there to be killed. One that is stopped dies as well."""
        killed = []
        for rank in ranks:
            descriptor = self._open.get(rank)
            if descriptor is None or sys.platform != "linux":
                continue
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except OSError:  # it has ended just now, or isn't ours to kill
                continue
            killed.append(rank)
        return killed

    def close(self) -> None:
        """Watch nobody any more."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._gone.clear()
