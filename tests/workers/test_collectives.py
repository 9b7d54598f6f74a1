"""What is told from an error of a collective, and the word that a rank has failed; ranks themselves: `test_group_ranks`."""

from __future__ import annotations

import hashlib
import resource
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reelwire.errors import ConfigError
from reelwire.messages import FileOffer
from reelwire.workers.collectives import (
    Alarm,
    GroupBrokenError,
    Rendezvous,
    _abort,
    _client,
    _share_file,
    gather_numbers,
    is_broken,
    share_bytes,
    share_files,
    swap_bytes,
)
from reelwire.workers.group import Alone

LIMIT_S = 30.0
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner  # as `raise outer from inner` has it
    return outer


def while_handling(outer: Exception, inner: Exception) -> Exception:
    outer.__context__ = inner  # as `raise outer` has it in the handler of the other
    return outer


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:408. This is typically caused by a remote ..."),
        RuntimeError(GLOO + "Read error [127.0.0.1]:408: Connection reset by peer"),
        RuntimeError(GLOO + "Timed out waiting 1000ms for recv operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp, remote process exited"),
        dist.DistNetworkError("The client socket has failed to connect"),
        dist.DistStoreError("wait timeout after 1000ms, keys: /1/2"),
        GroupBrokenError("another rank of the group has failed"),
        chained(ValueError("the step can't be taken"), RuntimeError(GLOO + "Connection closed by peer")),
        while_handling(KeyError("cache"), RuntimeError(GLOO + "Connection closed by peer")),
    ],
)
def test_groups_13_an_error_of_a_collective_has_another_rank_to_blame(error: BaseException) -> None:
    """By its type, or by the words of the transport; also where a model put it into its own."""
    assert is_broken(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("Connection closed by peer"),
        torch.OutOfMemoryError("CUDA out of memory"),
        dist.DistBackendError("NCCL error: unhandled cuda error 'out of memory'"),
        MemoryError("gloo/"),
        KeyError("gloo/transport"),
        chained(ValueError("no"), KeyError("what")),
    ],
)
def test_groups_13_any_other_error_is_a_rank_s_own(error: BaseException) -> None:
    """Memory that is used up as well, whoever says so."""
    assert not is_broken(error)


def test_an_error_that_goes_round_in_circles_is_looked_at_once() -> None:
    """Such chains can be made."""
    error, other = ValueError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    assert not is_broken(error)


def test_groups_05_every_rendezvous_has_a_port_of_its_own() -> None:
    """Nobody chooses one, and each is there only where it was asked for."""
    rendezvous_ = [Rendezvous("127.0.0.1") for _ in range(3)]
    assert len({each.address for each in rendezvous_}) == 3
    assert all(each.address.startswith("127.0.0.1:") for each in rendezvous_)
    clients = [_client(each.address) for each in rendezvous_]
    clients[0].set("key", "one")
    assert not clients[1].check(["key"])
    del clients
    for each in rendezvous_:
        each.close()
    with pytest.raises(ConfigError, match="group_host"):
        Rendezvous("no.such.host.invalid")


def test_groups_13_the_word_that_a_rank_has_failed_rings_on_all_others() -> None:
    """There the communicator is aborted, on another thread than the one that is blocked; the one who says it isn't told."""
    rendezvous = Rendezvous("127.0.0.1")
    rang, own = threading.Event(), threading.Event()
    waits = Alarm(rendezvous.address, "1/2/failed", rang.set)
    says = Alarm(rendezvous.address, "1/2/failed", own.set)
    later = Alarm(rendezvous.address, "1/3/failed", own.set)
    assert not waits.rang
    says.stop()
    says.tell(_client(rendezvous.address))
    assert rang.wait(LIMIT_S)
    assert waits.rang
    later.stop()
    for alarm in (waits, says, later):
        alarm._thread.join(LIMIT_S)
        assert not alarm._thread.is_alive()
    assert not own.is_set()
    assert not later.rang
    rendezvous.close()


def test_groups_13_an_alarm_that_was_stopped_aborts_nothing_later() -> None:
    """Whoever stops it waits for what it is at, so that the next process group is none that it could meet."""
    rendezvous = Rendezvous("127.0.0.1")
    begun, go = threading.Event(), threading.Event()
    did: list[str] = []

    def abort() -> None:
        begun.set()
        assert go.wait(LIMIT_S)
        did.append("aborted")

    def stop() -> None:
        alarm.stop()
        did.append("stopped")

    alarm = Alarm(rendezvous.address, "1/2/failed", abort)
    alarm.tell(_client(rendezvous.address))
    assert begun.wait(LIMIT_S)
    stopper = threading.Thread(target=stop)
    stopper.start()
    stopper.join(0.2)
    go.set()
    stopper.join(LIMIT_S)
    assert did == ["aborted", "stopped"]
    alarm._thread.join(LIMIT_S)
    rendezvous.close()


def test_groups_13_only_the_group_of_an_alarm_is_aborted(tmp_path: Path) -> None:
    """Another one, the next one of this process, lives on."""
    groups: list[Any] = []
    for name in ("old", "new"):
        store = dist.FileStore(str(tmp_path / name), 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        groups.append(dist.group.WORLD)
        if name == "old":
            dist.destroy_process_group()
    try:
        _abort(groups[0])
        assert dist.is_initialized()
        dist.barrier()
        _abort(groups[1])
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_groups_04_the_alarm_rings_when_the_leader_is_gone() -> None:
    """With it the store is."""
    rendezvous = Rendezvous("127.0.0.1")
    rang = threading.Event()
    alarm = Alarm(rendezvous.address, "1/2/failed", rang.set)
    rendezvous.close()
    assert rang.wait(LIMIT_S)
    alarm._thread.join(LIMIT_S)


def test_a_disk_that_takes_a_part_of_a_write_fails_the_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has room for half of a file says so, and doesn't go on with half of it."""
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 1024)
    offer = FileOffer(hashlib.sha256(source.read_bytes()).hexdigest(), str(source), source.stat().st_size)

    def broadcast(moved: torch.Tensor, **_: Any) -> None:
        moved.copy_(torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8))

    ranks: Any = types.SimpleNamespace(rank=1, world=2, group=object())
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "broadcast", broadcast)
    _share_file(ranks, offer, "", tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == source.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (offer.nbytes // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _share_file(ranks, offer, "", tmp_path / "half")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_group_of_one_exchanges_nothing(tmp_path: Path) -> None:
    """What goes in comes out."""
    rows: Any = np.zeros((1, 4), np.uint8)
    assert gather_numbers(Alone(), 5) == [5]
    assert swap_bytes(Alone(), rows) is rows
    assert share_files(Alone(), [], {"a": "b"}, tmp_path) == ({"a": "b"}, [])
    assert share_bytes(Alone(), b"ab", 2) == b"ab"
    assert share_bytes(Alone(), b"", 0) == b""


@pytest.mark.parametrize("mine", [None, b"a", memoryview(b"abc")])
def test_groups_01_a_leader_that_lacks_bytes_says_so(mine: Any) -> None:
    """Before it sends any."""
    with pytest.raises(ValueError, match="lacks 2 bytes"):
        share_bytes(Alone(), mine, 2)
