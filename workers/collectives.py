"""The process group of a worker group: how it is met in, left and broken off, and what ranks exchange beside their models.

A process has one process group, PyTorch's default one. It is made anew for each *round* of an epoch, over one TCPStore on
the leader's machine whose keys begin with epoch and round; weights know nothing of it. With gloo a rank that leaves frees
whoever waits for it in a collective at once: their connection is closed. A collective of NCCL is a kernel that waits on
its GPU, so there the store is watched for the word that a rank has failed, and then one's own communicator is aborted.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reelwire.codec import Buffer
from reelwire.messages import FileOffer
from reelwire.writing import write_whole

from .rank_processes import address_of, interface_to

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from reelwire.pipeline.stage import Ranks

CONNECT_TIMEOUT_S = 30.0
"""How long a rank tries to reach the store."""
WATCH_S = 1.0
"""How long one look for the word that a rank has failed waits for it."""
SHARED_AT_ONCE_BYTES = 4 << 20
BACKLOG = 4096
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""Variables that say through which network interface a rank is reached."""
_BROKEN_KINDS = {"DistBackendError", "DistNetworkError", "DistStoreError", "GroupBrokenError"}
_BROKEN_WORDS = re.compile(
    r"gloo/|Connection (closed|reset|refused)|Timed out waiting|Application timeout|Broken pipe|Socket closed"
    r"|NCCL (error|communicator|watchdog)|ncclCommAbort|process group (was|has been) (aborted|destroyed)",
    re.IGNORECASE,
)


OfPart = Callable[[NDArray[np.uint8], int], None]
"""What is done with a part of what is broadcast; it is told where the part begins."""


class GroupBrokenError(RuntimeError):
    """Another rank of the group has failed, so what was exchanged with it can't be trusted."""


class RefusedElsewhereError(GroupBrokenError):
    """Another rank of the group refuses what was about to be begun; nothing was, on any of them."""


def is_broken(error: BaseException) -> bool:
    """Whether an error says that a collective failed, so that another rank is to blame, and not the one that raised.

    What was raised while such an error was handled counts as well: a model may put it into its own words. Memory that is
    used up is one's own fault, whoever says so.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if "out of memory" in str(each):
            return False
        kinds = {kind.__name__ for kind in type(each).__mro__}
        if kinds & _BROKEN_KINDS or ("RuntimeError" in kinds and _BROKEN_WORDS.search(str(each))):
            return True
        each = each.__cause__ or each.__context__
    return False


class Rendezvous:
    """At the leader: the TCPStore through which ranks find each other, at a port of the system's choice.

    Args:
        host: address or name of this machine by which the other ranks find it.

    Attributes:
        address: ``HOST:PORT``.

    Raises:
        ConfigError: `host` is no address of this machine.
        OSError: it can't be listened at.
    """

    def __init__(self, host: str) -> None:
        """Listen."""
        # The package first: whoever asks for a part of it while another thread imports the whole gets half of it.
        import torch  # noqa: F401
        import torch.distributed as dist

        at = address_of(host)
        with socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((at, 0))
            listener.listen(BACKLOG)
            port = listener.getsockname()[1]
            self._store: TCPStore | None = dist.TCPStore(  # type: ignore[attr-defined]
                at,
                port,
                None,
                is_master=True,
                timeout=dt.timedelta(seconds=CONNECT_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self.address = f"{at}:{port}"

    def close(self) -> None:
        """Close it."""
        self._store = None


class Communicator:
    """The process group of one rank, or none.

    Args:
        rank: which this is.
        world: how many there are.
        device: ``cpu``, where ranks talk by gloo, or ``cuda:N``: by NCCL.
        timeout_s: how long a collective may take; it is the backstop for hosts that are lost without a word.

    Attributes:
        is_local: all ranks are on this machine: nothing of it needs to be seen from outside.
    """

    def __init__(self, rank: int, world: int, device: str, timeout_s: float) -> None:
        """Begin without a group."""
        self.is_local = False
        self._rank = rank
        self._world = world
        self._device = device
        self._timeout = dt.timedelta(seconds=timeout_s)
        self._store: tuple[str, TCPStore] | None = None
        self._alarm: Alarm | None = None
        self._group: dist.ProcessGroup | None = None  # where there is an alarm
        self._joined = False
        self._chosen = ""  # the interface

    def form(self, epoch: int, round_: int, address: str) -> dist.ProcessGroup:
        """Leave the group, if there is one, and meet all other ranks in a new one.

        Raises:
            RuntimeError: they can't be met within the timeout.
        """
        import torch
        import torch.distributed as dist

        self.leave()
        if self._store is None or self._store[0] != address:
            self._store = (address, _client(address))
        store = dist.PrefixStore(f"{epoch}/{round_}", self._store[1])  # type: ignore[attr-defined]
        options: dict[str, Any] = {}
        backend = "gloo" if self._device == "cpu" else "nccl"
        self._choose_interface(backend, address)
        if backend == "nccl":
            # Or its watchdog ends the process when a rank fails; it is the alarm that aborts, and the process lives.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            options["device_id"] = torch.device(self._device)
            options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        self._joined = True  # from here on there may be something to be left
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=self._world, timeout=self._timeout, **options
        )
        group = dist.group.WORLD
        assert group is not None, "a process group was made, and isn't there"
        if backend == "nccl":
            self._group = group
            self._alarm = Alarm(address, f"{epoch}/{round_}/failed", partial(_abort, group))
        return group

    def check(self) -> None:
        """Check that nobody broke the group off while something was computed.

        Raises:
            GroupBrokenError: somebody did.
        """
        if self._alarm is not None and self._alarm.rang:
            raise GroupBrokenError("another rank of the group has failed")

    def leave(self) -> None:
        """Leave the group, if there is one."""
        self._end(failed=False)

    def break_off(self) -> None:
        """Leave the group because something went wrong here: whoever waits for this rank is freed."""
        self._end(failed=True)

    def _end(self, *, failed: bool) -> None:
        if not self._joined:
            return
        import torch.distributed as dist

        self._joined = False
        alarm, self._alarm = self._alarm, None
        group, self._group = self._group, None
        if alarm is not None:
            alarm.stop()
            if failed or alarm.rang:
                if self._store is not None:
                    alarm.tell(self._store[1])
                _abort(group)
        del group
        if not dist.is_initialized():  # the others weren't met
            return
        with contextlib.suppress(RuntimeError):  # a group that is broken already says so once more
            dist.destroy_process_group()
        if dist.is_initialized():  # it raised half-way
            dist.distributed_c10d._update_default_pg(None)  # noqa: SLF001

    def _choose_interface(self, backend: str, address: str) -> None:
        """Be reached through the loopback interface where that is enough, else through the one towards the leader.

        Left to themselves, transports guess it from the machine's name. What somebody chose by the variable stays.
        """
        variable = _INTERFACES[backend]
        if variable in os.environ and os.environ[variable] != self._chosen:
            return
        host = address.rpartition(":")[0]
        self._chosen = _LOOPBACK if self.is_local else interface_to(host)
        if self._chosen:
            os.environ[variable] = self._chosen
        else:
            os.environ.pop(variable, None)


class Alarm:
    """Waits, on a thread of its own, for the word that a rank of the group has failed, and then aborts.

    Args:
        address: of the store.
        key: what is set there by a rank that fails.
        abort: what to do then; called once, on the thread.

    Attributes:
        rang: it has come, or the store is gone with the leader.
    """

    def __init__(self, address: str, key: str, abort: Callable[[], None]) -> None:
        """Begin to wait."""
        self.rang = False
        self._key = key
        self._abort: Callable[[], None] | None = abort
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._store = _client(address)
        self._thread = threading.Thread(target=self._watch, name="group-alarm", daemon=True)
        self._thread.start()

    def tell(self, store: TCPStore) -> None:
        """Say that this rank has failed."""
        with contextlib.suppress(RuntimeError):  # the leader is gone
            store.set(self._key, str(os.getpid()))

    def stop(self) -> None:
        """Wait no more: from here on it doesn't abort, nor is it about to; the thread ends within `WATCH_S`."""
        self._stopped.set()
        with self._lock:
            self._abort = None  # and with it the process group

    def _watch(self) -> None:
        import torch.distributed as dist

        while not self._stopped.is_set():
            try:
                self._store.wait([self._key], dt.timedelta(seconds=WATCH_S))
            except dist.DistNetworkError:
                pass
            except dist.DistStoreError:  # nobody has said it yet
                continue
            with self._lock:
                if self._abort is not None:
                    self.rang = True
                    self._abort()
            return


def gather_numbers(ranks: Ranks, number: int) -> list[int]:
    """The numbers of all ranks, in their order; 64 bits each. Called by all ranks at once."""
    if ranks.world == 1:
        return [number]
    import torch
    import torch.distributed as dist

    group = _group(ranks)
    device = _device(group)
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(ranks.world)]
    dist.all_gather(all_of_them, mine, group=group)
    return [int(each.item()) for each in all_of_them]


def swap_bytes(ranks: Ranks, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Row r of [world, bytes] goes to rank r; row s of the result came from rank s. Called by all ranks at once."""
    if ranks.world == 1:
        return rows
    import torch
    import torch.distributed as dist

    group = _group(ranks)
    device = _device(group)
    sent = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    swapped: NDArray[np.uint8] = received.cpu().numpy()
    return swapped


def share_files(
    ranks: Ranks, offers: Sequence[FileOffer], have: Mapping[str, str], folder: Path
) -> tuple[dict[str, str], list[Path]]:
    """Give the leader's files to the ranks that lack them; called by all ranks at once.

    Args:
        ranks: the group.
        offers: the files, in the same order on all ranks.
        have: where those lie that this rank has; the leader has all.
        folder: where what comes is written.

    Returns:
        Path of each file on this rank, by its name, and those that were written.

    Raises:
        OSError: a file can't be read or written.
        ValueError: what came isn't what was offered.
        RuntimeError: a collective failed.
    """
    paths, written = dict(have), list[Path]()
    if ranks.world == 1:
        return paths, written
    try:
        for offer in {offer.file: offer for offer in offers}.values():
            lacks = gather_numbers(ranks, int(offer.file not in have))
            if any(lacks):
                path = folder / f"shared-{ranks.rank}-{offer.file}"
                if offer.file not in have:
                    written.append(path)
                    paths[offer.file] = str(path)
                _share_file(ranks, offer, have.get(offer.file, ""), path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return paths, written


def _share_file(ranks: Ranks, offer: FileOffer, source: str, path: Path) -> None:
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(Path(source).open("rb", buffering=0)) if ranks.rank == 0 else None
        write = None if source else stack.enter_context(path.open("wb", buffering=0))
        fill = None if read is None else partial(_read_part, read)
        take = None if write is None else partial(_write_part, write, digest)
        _broadcast(ranks, offer.nbytes, fill, take)
    if write is not None and digest.hexdigest() != offer.file:
        raise ValueError(f"what came for {offer.file} isn't what was offered")


def _read_part(file: FileIO, part: NDArray[np.uint8], _: int) -> None:
    if file.readinto(part.data) != part.nbytes:
        raise ValueError(f"{file.name} is shorter than it was")


def _write_part(file: FileIO, digest: hashlib._Hash, part: NDArray[np.uint8], _: int) -> None:
    write_whole(file.fileno(), part.data)
    digest.update(part.data)


def share_bytes(ranks: Ranks, mine: Buffer | None, nbytes: int) -> Buffer:
    """The leader's bytes, on all ranks; called by all at once.

    Args:
        ranks: the group.
        mine: the bytes; None on a rank that doesn't lead.
        nbytes: how many there are.

    Raises:
        ValueError: this rank leads, and has others or none.
        RuntimeError: a collective failed.
    """
    if ranks.rank == 0:
        if mine is None or len(source := np.frombuffer(mine, np.uint8)) != nbytes:
            raise ValueError(f"the leader lacks {nbytes} bytes that all ranks need")
        if ranks.world > 1:
            _broadcast(ranks, nbytes, lambda part, first: np.copyto(part, source[first : first + len(part)]), None)
        return mine
    made = np.empty(nbytes, np.uint8)
    _broadcast(ranks, nbytes, None, lambda part, first: np.copyto(made[first : first + len(part)], part))
    return made.data


def _broadcast(ranks: Ranks, nbytes: int, fill: OfPart | None, take: OfPart | None) -> None:
    """Send bytes from the leader to all other ranks.

    Args:
        ranks: the group.
        nbytes: how many.
        fill: at the leader: writes a part.
        take: at the others: reads one; they come in order.
    """
    import torch
    import torch.distributed as dist

    group = _group(ranks)
    device = _device(group)
    room = torch.empty(min(SHARED_AT_ONCE_BYTES, nbytes), dtype=torch.uint8)
    for first in range(0, nbytes, SHARED_AT_ONCE_BYTES):
        part = room[: min(SHARED_AT_ONCE_BYTES, nbytes - first)]
        if fill is not None:
            fill(part.numpy(), first)
        moved = part.to(device)
        dist.broadcast(moved, group_src=0, group=group)
        if take is not None:
            part.copy_(moved)  # waits for the device
            take(part.numpy(), first)


def _client(address: str) -> TCPStore:
    import torch  # noqa: F401  first, as in `Rendezvous`
    import torch.distributed as dist

    host, _, port = address.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        None,
        is_master=False,
        timeout=dt.timedelta(seconds=CONNECT_TIMEOUT_S),
        wait_for_workers=False,
    )


def _group(ranks: Ranks) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = getattr(ranks, "group", None)
    if group is None:
        raise RuntimeError(f"rank {ranks.rank} of {ranks.world} is in no process group")
    return group


def _device(group: dist.ProcessGroup) -> torch.device:
    import torch
    import torch.distributed as dist

    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _abort(group: dist.ProcessGroup | None) -> None:
    """End all collectives of NCCL that run on this rank in that process group, and all later ones; no other group's."""
    import torch.distributed as dist

    if group is None:
        return
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # another thread has done it
        dist.distributed_c10d._abort_process_group(group)  # noqa: SLF001
