"""The processes of the other ranks: their end is seen at once, and they are killed for certain."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from reelwire.errors import ConfigError
from reelwire.messages import Member
from reelwire.workers.rank_processes import (
    RankProcesses,
    address_of,
    check_host,
    interface_to,
    is_local,
    started_at,
    this_machine,
)

LIMIT_S = 30.0
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd here: nothing is watched")


@pytest.fixture
def spawn() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that wait for the end of their input; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def spawn() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield spawn
    for process in started:
        process.kill()
        process.wait(LIMIT_S)
        assert process.stdin is not None
        process.stdin.close()


def members(*pids: int, machine: str = "") -> list[Member]:
    return [Member(rank, machine or this_machine(), pid, started_at(pid)) for rank, pid in enumerate(pids)]


def wait_for_one(watched: RankProcesses) -> None:
    poll = select.poll()
    for descriptor in watched.descriptors.values():
        poll.register(descriptor, select.POLLIN)
    assert poll.poll(LIMIT_S * 1000), "nobody has ended"


def test_groups_04_a_killed_rank_is_seen_at_once(spawn: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Its descriptor becomes readable; it is told of once, and the others are watched on."""
    processes = [spawn(), spawn()]
    watched = RankProcesses(members(os.getpid(), *(each.pid for each in processes)), 0)
    assert set(watched.descriptors) == {1, 2}
    assert watched.ended() == []
    began = time.monotonic()
    processes[0].send_signal(signal.SIGKILL)
    wait_for_one(watched)
    assert time.monotonic() - began < LIMIT_S
    assert watched.ended() == [1]
    assert watched.ended() == []
    assert set(watched.descriptors) == {2}
    watched.close()


def test_groups_04_a_stopped_rank_is_killed_for_certain(spawn: Callable[[], subprocess.Popen[bytes]]) -> None:
    """SIGSTOP keeps it from everything but SIGKILL; its end is seen although nobody has waited for it."""
    process = spawn()
    watched = RankProcesses(members(os.getpid(), process.pid), 0)
    process.send_signal(signal.SIGSTOP)
    assert watched.ended() == []
    assert watched.kill([0, 1, 7]) == [1]
    wait_for_one(watched)
    assert watched.ended() == [1]
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert watched.kill([1]) == []
    watched.close()


def test_a_rank_that_was_gone_before_is_told_of(spawn: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Between its hello and now it can have ended."""
    process = spawn()
    told = members(os.getpid(), process.pid)
    process.kill()
    process.wait(LIMIT_S)
    watched = RankProcesses(told, 0)
    assert watched.ended() == [1]
    assert watched.ended() == []
    watched.close()


def test_a_number_that_was_given_again_is_nobody_of_ours(spawn: Callable[[], subprocess.Popen[bytes]]) -> None:
    """A descriptor stands for the process that it was opened for: to kill that one again kills nobody."""
    process = spawn()
    watched = RankProcesses(members(os.getpid(), process.pid), 0)
    process.kill()
    process.wait(LIMIT_S)  # from here on the number is free
    assert watched.kill([1]) == []
    watched.close()


@pytest.mark.parametrize("started", [0, 1])
def test_groups_04_a_process_that_was_started_at_another_time_is_nobody_of_ours(
    spawn: Callable[[], subprocess.Popen[bytes]], started: int
) -> None:
    """Whoever says a number in its hello has nobody else's process killed by it; one that doesn't say when isn't watched."""
    process = spawn()
    watched = RankProcesses(
        [Member(0, this_machine(), os.getpid()), Member(1, this_machine(), process.pid, started)], 0
    )
    assert not watched.descriptors
    assert watched.kill([1]) == []
    assert watched.ended() == []
    assert process.poll() is None
    watched.close()


def test_the_start_of_a_process_is_known(spawn: Callable[[], subprocess.Popen[bytes]]) -> None:
    """One that is started later isn't earlier; one that isn't there has none."""
    process = spawn()
    assert 0 < started_at(os.getpid()) <= started_at(process.pid)
    assert started_at(process.pid) == started_at(process.pid)
    process.kill()
    process.wait(LIMIT_S)
    assert started_at(process.pid) == 0


def test_ranks_of_other_machines_are_not_watched(spawn: Callable[[], subprocess.Popen[bytes]]) -> None:
    """The same number is another process there."""
    process = spawn()
    others = members(os.getpid(), process.pid, machine="elsewhere")
    watched = RankProcesses(others, 0)
    assert not watched.descriptors
    assert watched.kill([1]) == []
    assert process.poll() is None
    assert not is_local(others)
    assert not is_local([*members(1), *others])
    assert is_local(members(1, 2))
    watched.close()


def test_a_machine_is_told_from_others() -> None:
    """By its boot, and by which processes and which network are seen; always the same for one process."""
    boot, processes, network = this_machine().split(":")
    assert len(boot) == 36
    assert processes.isdigit()
    assert network.isdigit()
    assert this_machine() == this_machine()


def test_an_address_is_numeric() -> None:
    """Names are looked up; one that there isn't is the setting's fault."""
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("::1") == "::1"
    with pytest.raises(ConfigError, match="group_host"):
        address_of("no.such.host.invalid")


def test_groups_06_other_machines_are_not_told_of_a_loopback_address() -> None:
    """They would wait for themselves; another name for processes on the same network is none, nor is one that nobody knows."""
    boot, processes, network = this_machine().split(":")
    for far in (f"{boot}:{processes}:1", f"other:{processes}:{network}"):
        others = [Member(0, this_machine(), 1), Member(1, this_machine(), 2), Member(2, far, 3), Member(3, far, 3)]
        for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::"):
            with pytest.raises(ConfigError, match=r"group_host.*rank 2 is on another"):
                check_host(host, others[:3])
        with pytest.raises(ConfigError, match="ranks 2, 3 are on another"):
            check_host("127.0.0.1", others)
        check_host("192.0.2.1", others)
        check_host("127.0.0.1", others[2:3], rank=2)
    for near in (this_machine(), f"{boot}:1:{network}", ""):
        check_host("127.0.0.1", [Member(0, this_machine(), 1), Member(1, near, 2)])


def test_the_interface_towards_a_host_is_known() -> None:
    """To one's own addresses it is the one that has them; nowhere leads none."""
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no address") == ""
