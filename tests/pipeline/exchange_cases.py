"""What the ranks of a group do in the tests of `parallel`; each case gives what was wrong, or nothing."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reelwire.pipeline.parallel import Parallel
from reelwire.spec import RequestError

if TYPE_CHECKING:
    from .rank_program import Member

DTYPES = (torch.float32, torch.bfloat16)
ODD_DTYPES = (torch.float64, torch.bool, torch.complex64)
KEPT: dict[str, Parallel] = {}


def bits(length: int, heads: int, channels: int, dtype: torch.dtype) -> Tensor:
    """[1, length, heads, channels] of random bits, the same on each rank: NaNs of all kinds and -0.0 are among them."""
    generator = torch.Generator().manual_seed(length)
    if dtype == torch.bool:
        return torch.rand(1, length, heads, channels, generator=generator) < 0.5
    width = channels * dtype.itemsize
    raw = torch.randint(0, 256, (1, length, heads, width), generator=generator, dtype=torch.uint8)
    whole = raw.view(dtype)
    whole[0, 0, 0, 0] = -0.0
    return whole


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes."""
    alike = (left.shape, left.dtype) == (right.shape, right.dtype)
    return alike and torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (left, right)))


def slice_of(whole: Tensor, rank: int, world: int) -> Tensor:
    """By indices alone: the tokens of a rank, zeros where there are none."""
    length = whole.shape[1]
    size = (length + world - 1) // world
    mine = torch.zeros(1, size, *whole.shape[2:], dtype=whole.dtype)
    for place in range(size):
        if rank * size + place < length:
            mine[0, place] = whole[0, rank * size + place]
    return mine


def share_of(whole: Tensor, rank: int, world: int) -> Tensor:
    """By indices alone: the heads of a rank."""
    share = whole.shape[2] // world
    return torch.stack([whole[:, :, rank * share + head] for head in range(share)], 2)


def exchanged(member: Member, lengths: list[int], heads: int) -> list[str]:
    """Single, list and asynchronous exchange give what indexing gives, bit for bit, there and back."""
    rank, world = member.parallel.rank, member.parallel.world
    listed = Parallel(rank, world, "list")
    listed.use(member.parallel.group)
    wrong: list[str] = []
    sizes = [(length, 6, dtype) for length in lengths for dtype in DTYPES]
    for length, channels, dtype in [*sizes, *((lengths[-1], 1, dtype) for dtype in ODD_DTYPES)]:
        whole = bits(length, heads, channels, dtype)
        shard = member.parallel.shard(length)
        mine, share = slice_of(whole, rank, world), share_of(whole, rank, world)
        found = {"take": same(shard.take(whole), mine), "gather": same(member.parallel.gather(mine, shard), whole)}
        for name, parallel in (("single", member.parallel), ("list", listed)):
            found[f"{name} to_heads"] = same(parallel.to_heads(mine, shard), share)
            found[f"{name} to_tokens"] = same(parallel.to_tokens(share, shard), mine)
        found["strided"] = same(member.parallel.to_tokens(strided(share), shard), mine)
        found["strided slice"] = same(member.parallel.to_heads(strided(mine), shard), share)
        wrong += [f"{what} of {length} x {heads} x {channels} {dtype}" for what, good in found.items() if not good]
    return wrong


def strided(x: Tensor) -> Tensor:
    """The same values, as attention leaves them: heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_flight(member: Member, length: int, heads: int) -> list[str]:
    """Several exchanges are on their way at once, and are waited for in another order, and twice."""
    parallel, wrong = member.parallel, []
    shard = parallel.shard(length)
    wholes = [bits(length, heads, 4, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    mine = [slice_of(whole, parallel.rank, parallel.world) for whole in wholes]
    share = [share_of(whole, parallel.rank, parallel.world) for whole in wholes]
    there = [parallel.start_to_heads(each, shard) for each in mine]
    back = [parallel.start_to_tokens(each, shard) for each in share]
    for number in (2, 0, 1):
        if not same(there[number].wait(), share[number]) or there[number].wait() is not there[number].wait():
            wrong.append(f"to_heads {number}")
        if not same(back[number].wait(), mine[number]):
            wrong.append(f"to_tokens {number}")
    return wrong


def from_leader(member: Member) -> list[str]:
    """A tensor of rank 0 comes to all, or its absence does, whatever the others hold."""
    parallel, wrong = member.parallel, []
    whole = bits(5, 2, 3, torch.float32)
    other = torch.zeros_like(whole) if parallel.rank else None
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    if parallel.from_leader(other, tuple(whole.shape), **kind) is not None:  # type: ignore[arg-type]
        wrong.append("what a follower held")
    found = parallel.from_leader(other if parallel.rank else whole, tuple(whole.shape), **kind)  # type: ignore[arg-type]
    if found is None or not same(found, whole):
        wrong.append("a tensor")
    return wrong


def draws_nothing(member: Member) -> list[str]:
    """The exchange leaves torch's global generator as it was."""
    before = torch.get_rng_state()
    wrong = exchanged(member, [5], member.parallel.world)
    return wrong if torch.equal(torch.get_rng_state(), before) else [*wrong, "the generator moved"]


def refuses(member: Member) -> list[str]:
    """What doesn't fit is refused on all ranks, before anything is sent: the group is as good as before."""
    parallel, wrong = member.parallel, []
    shard = parallel.shard(5)
    heads = torch.zeros(1, shard.size, parallel.world + 1, 2)
    try:
        parallel.to_heads(heads, shard)
        wrong.append("heads")
    except RequestError as refused:
        if refused.field != "world":
            wrong.append(refused.field)
    for call, x in (
        (parallel.to_heads, heads[:, :0]),
        (parallel.to_tokens, torch.zeros(1, 6, 1, 2)),
        (parallel.gather, torch.zeros(2, shard.size, 3)),
    ):
        try:
            call(x, shard)
            wrong.append(str(call))
        except ValueError:
            pass
    try:
        Parallel(0, parallel.world + 1).use(parallel.group)
        wrong.append("a group of another size")
    except ValueError:
        pass
    return wrong + exchanged(member, [5], parallel.world)


def formed_anew(member: Member) -> list[str]:
    """A group that is left and formed again serves the same `Parallel`; in between nothing can be exchanged."""
    parallel = member.parallel
    wrong = exchanged(member, [7], parallel.world)
    member.leave()
    try:
        parallel.to_heads(torch.zeros(1, 1, parallel.world, 2), parallel.shard(1))
        wrong.append("exchanged without a group")
    except RuntimeError:
        pass
    member.meet()
    return wrong + exchanged(member, [7], parallel.world)


def loses(member: Member, victim: int) -> str:
    """The process of one rank is killed between the two halves of an exchange; the others say what became of it."""
    KEPT["parallel"] = parallel = member.parallel
    shard = parallel.shard(4)
    parallel.to_heads(torch.zeros(1, shard.size, 4, 2), shard)
    if parallel.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        parallel.to_heads(torch.zeros(1, shard.size, 4, 2), shard)
    except RuntimeError:
        return "noticed"
    return "went on"


def hangs(member: Member) -> None:
    """Rank 0 never comes to the exchange for which the others wait."""
    if member.parallel.rank == 0:
        signal.pause()
    member.parallel.to_tokens(torch.zeros(1, 2, 1, 1), member.parallel.shard(2))


def goes_on(member: Member) -> list[str]:
    """The rank that was left has its `Parallel` still, which talks to the replacement through the new group."""
    if "parallel" in KEPT:
        KEPT["parallel"].use(member.parallel.group)
        member.parallel = KEPT["parallel"]
    return exchanged(member, [5], 4)
