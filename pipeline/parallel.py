"""Sequence parallelism over the ranks of a worker group, after Ulysses (DeepSpeed-Ulysses, arXiv:2309.14509).

What a transformer does token by token, each rank does for its slice of the sequence. Attention needs all tokens, but not
all heads at once: before it the ranks exchange, so that each has the whole sequence of its share of the heads, and after it
they exchange back. With P ranks, L tokens (padded to a multiple of P) and H heads of D channels::

    to_heads    [L/P, H, D] -> [L/P, P, H/P, D] -> permute(1, 0, 2, 3) -> all-to-all -> [L, H/P, D]
    to_tokens   [L, H/P, D] -> [P, L/P, H/P, D] -> all-to-all -> permute(1, 0, 2, 3) -> [L/P, H, D]

Padding stands at the very end of the sequence, so that of what `to_heads` received it can be cut off before attention sees
it; a rank at the end may have a slice of nothing else. An exchange moves bytes and computes nothing: it is exact in every
dtype, and a group of one exchanges nothing at all.

Shape letters: T tokens of the sequence, S of one rank's slice, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reelwire.spec import RequestError

Exchange = Literal["single", "list"]


def check_heads(heads: int, world: int) -> None:
    """Check that attention heads can be shared out evenly over the ranks of a group.

    Raises:
        RequestError: they can't; the field is ``world``.
    """
    if world < 1 or heads % world:
        accepted = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise RequestError("world", f"{heads} attention heads can't be shared by {world} ranks; accepted: {accepted}")


@dataclass(frozen=True, slots=True)
class Shard:
    """How a sequence is cut over ranks: slices of equal size in the order of the ranks, padding at the end of the last.

    Attributes:
        length: tokens of the sequence, 1 or more.
        rank: whose slice it is.
        world: how many ranks there are.
    """

    length: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no cut."""
        if self.length < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"no slice {self.rank} of {self.world} of a sequence of {self.length} tokens")

    @property
    def size(self) -> int:
        """Tokens of each slice, padding included."""
        return -(-self.length // self.world)

    def take(self, x: Tensor) -> Tensor:
        """This rank's slice [1, S, ...] of a sequence [1, T, ...]; what is beyond its end is zero.

        Raises:
            ValueError: the sequence has another length.
        """
        _check_tokens(x, self.length, "of the sequence")
        if self.world == 1:
            return x
        first = min(self.rank * self.size, self.length)
        mine = x[:, first : first + self.size]
        missing = self.size - mine.shape[1]
        return F.pad(mine, (*[0, 0] * (x.ndim - 2), 0, missing)) if missing else mine


class Pending:
    """A tensor that is on its way from the other ranks."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], Tensor]) -> None:
        """Made by `Parallel` alone."""
        self._work = work
        self._finish: Callable[[], Tensor] | None = finish
        self._arrived: Tensor | None = None

    def wait(self) -> Tensor:
        """The tensor; on a GPU the stream that is current goes on when it is there, and the caller at once.

        Raises:
            RuntimeError: a rank was lost, or the group's limit of time has passed.
        """
        if self._arrived is None:
            if self._work is not None:
                self._work.wait()
            assert self._finish is not None
            self._arrived = self._finish()
            self._work = self._finish = None
        return self._arrived


class Parallel:
    """A worker group as one of its ranks sees it, with the collectives of sequence parallelism; satisfies `stage.Ranks`.

    Every rank of the group calls the same methods in the same order, with tensors of the same sizes. `Parallel()` is a group
    of one: no process group is needed, and tensors come back as they were given.

    Args:
        rank: which this is, from 0; 0 leads.
        world: how many there are.
        exchange: ``"single"`` sends one buffer with one `all_to_all_single`; ``"list"`` a tensor to each rank with
            `all_to_all`, with the same result: for comparison.
    """

    def __init__(self, rank: int = 0, world: int = 1, exchange: Exchange = "single") -> None:
        if not 0 <= rank < world:
            raise ValueError(f"there is no rank {rank} of {world}")
        self._rank = rank
        self._world = world
        self._exchange = exchange
        self._group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._rank

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self._world

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Through which the ranks talk; all collectives go through it, and no other."""
        return self._group

    def use(self, group: dist.ProcessGroup | None) -> None:
        """Talk through this group from here on; None: through none, until another one is formed.

        Raises:
            ValueError: this rank has another number there, or the group another size.
        """
        if group is not None and (group.rank(), group.size()) != (self._rank, self._world):
            raise ValueError(
                f"rank {group.rank()} of {group.size()} in the group; accepted: rank {self._rank} of {self._world}"
            )
        self._group = group

    def shard(self, length: int) -> Shard:
        """How a sequence of `length` tokens is cut for this rank."""
        return Shard(length, self._rank, self._world)

    def to_heads(self, x: Tensor, shard: Shard) -> Tensor:
        """From a slice of the tokens with all heads to all tokens with a share of the heads.

        Args:
            x: [1, S, N, D], any dtype.
            shard: how the sequence is cut.

        Returns:
            [1, T, N / world, D], without padding: heads from ``rank * N / world`` on.

        Raises:
            RequestError: `world` doesn't divide the heads.
            ValueError: `x` isn't a slice of the sequence.
        """
        return self.start_to_heads(x, shard).wait()

    def to_tokens(self, x: Tensor, shard: Shard) -> Tensor:
        """The way back: [1, T, N / world, D] of this rank's heads to [1, S, N, D] of its tokens; padding is zero.

        Raises:
            ValueError: `x` isn't of all the sequence.
        """
        return self.start_to_tokens(x, shard).wait()

    def start_to_heads(self, x: Tensor, shard: Shard) -> Pending:
        """Start `to_heads`. Several may be on their way at once; `x` must not be written to until it has arrived."""
        _check_tokens(x, shard.size, "of a slice")
        if self._world == 1:
            return Pending(None, lambda: x)
        _, size, heads, channels = x.shape
        check_heads(heads, self._world)
        share = heads // self._world
        rows = x[0].reshape(size, self._world, share, channels).permute(1, 0, 2, 3)
        received, work = self._start(rows)
        return Pending(work, lambda: received().view(1, -1, share, channels)[:, : shard.length])

    def start_to_tokens(self, x: Tensor, shard: Shard) -> Pending:
        """Start `to_tokens`, as `start_to_heads`."""
        _check_tokens(x, shard.length, "of the sequence")
        if self._world == 1:
            return Pending(None, lambda: x)
        _, length, share, channels = x.shape
        padded = F.pad(x, (0, 0, 0, 0, 0, shard.size * self._world - length))
        received, work = self._start(padded.reshape(self._world, shard.size, share, channels))
        return Pending(work, lambda: received().permute(1, 0, 2, 3).reshape(1, shard.size, -1, channels))

    def gather(self, x: Tensor, shard: Shard) -> Tensor:
        """The whole sequence [1, T, ...] on all ranks, from the slice [1, S, ...] that each of them has.

        Raises:
            ValueError: `x` isn't a slice of the sequence.
        """
        _check_tokens(x, shard.size, "of a slice")
        if self._world == 1:
            return x
        whole = x.new_empty(self._world, *x.shape[1:])
        dist.all_gather(list(_bytes(whole).unbind()), _bytes(x.contiguous())[0], group=self._joined())
        return whole.view(1, -1, *x.shape[2:])[:, : shard.length]

    def from_leader(
        self, x: Tensor | None, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """What rank 0 holds, on all ranks: a tensor, or None.

        Args:
            x: on rank 0 a tensor of this shape and dtype, wherever it is, or None; on the others it isn't looked at.
            shape: what the tensor would have.
            dtype: the same.
            device: where it is in the end, and where the ranks talk.

        Raises:
            RuntimeError: a rank was lost.
        """
        if self._world == 1:
            return x
        given = x if self._rank == 0 else None
        there = torch.tensor([given is not None], dtype=torch.uint8, device=device)
        dist.broadcast(there, group_src=0, group=self._joined())
        if not there.item():
            return None
        shared = torch.empty(shape, dtype=dtype, device=device)
        if given is not None:
            shared.copy_(given)
        dist.broadcast(_bytes(shared[None]), group_src=0, group=self._joined())
        return shared

    def _start(self, sent: Tensor) -> tuple[Callable[[], Tensor], dist.Work | None]:
        """Send row r of [world, ...] to rank r; what gives the rows that came, once the work is done."""
        group, sent = self._joined(), sent.contiguous()
        rows = _bytes(sent)
        if self._exchange == "list":
            came = [torch.empty_like(row) for row in rows.unbind()]
            work = dist.all_to_all(came, list(rows.unbind()), group=group, async_op=True)
            return lambda: torch.stack(came).view(sent.dtype).view(sent.shape), work
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(_bytes(received), rows, group=group, async_op=True)
        return lambda: received, work

    def _joined(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError(f"rank {self._rank} of {self._world} is in no process group; `use` gives it one")
        return self._group


def _bytes(rows: Tensor) -> Tensor:
    """The bytes of a contiguous [rows, ...], [rows, bytes]: no transport knows every dtype, each knows this one."""
    return rows.view(rows.shape[0], -1).view(torch.uint8)


def _check_tokens(x: Tensor, count: int, of: str) -> None:
    if x.ndim < 2 or x.shape[:2] != (1, count):
        raise ValueError(f"a tensor {list(x.shape)} isn't [1, {count}, ...], the tokens {of}")
