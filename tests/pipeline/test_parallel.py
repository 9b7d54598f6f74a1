"""Sequence parallelism: what the ranks of a group exchange, against plain indexing in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reelwire.pipeline.parallel import Parallel, Shard, check_heads
from reelwire.pipeline.stage import Ranks
from reelwire.spec import RequestError

from . import exchange_cases
from .rank_pool import LOST, RankPool
from .rank_program import Member

WORLDS = (2, 4, 8)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """The processes of groups of up to 8."""
    with RankPool(max(WORLDS)) as pool:
        yield pool


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No collective runs in this process: a group of one touches none."""

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of a group of one")

    for name in ("all_to_all_single", "all_to_all", "all_gather", "broadcast"):
        monkeypatch.setattr(dist, name, fails)
    yield
    assert not dist.is_initialized()


def lengths(world: int) -> list[int]:
    """Slices of one token, of padding alone, divisible and not."""
    return sorted({1, world - 1, world + 1, 3 * world, 5 * world + 3} - {0})


@pytest.mark.parametrize("world", WORLDS)
def test_an_exchange_is_indexing(ranks: RankPool, world: int) -> None:
    """One buffer, a list, several heads a rank, strided tensors: the bits of plain indexing, whatever length and dtype."""
    for heads in (world, 3 * world):
        assert ranks.run(world, exchange_cases.exchanged, lengths=lengths(world), heads=heads) == [[]] * world


def test_in_a_group_of_one_an_exchange_is_indexing_too() -> None:
    """The same cases, without any other process."""
    assert exchange_cases.exchanged(Member(), lengths(1), 3) == []
    assert exchange_cases.in_flight(Member(), 5, 3) == []
    assert exchange_cases.from_leader(Member()) == []


def test_a_group_of_one_copies_nothing() -> None:
    """Every tensor comes back as it was given."""
    parallel, x = Parallel(), torch.zeros(1, 5, 3, 2)
    shard = parallel.shard(5)
    assert shard.take(x) is x
    for call in (parallel.to_heads, parallel.to_tokens, parallel.gather):
        assert call(x, shard) is x
    assert parallel.start_to_heads(x, shard).wait() is parallel.start_to_tokens(x, shard).wait() is x
    assert parallel.from_leader(x, (1,), dtype=x.dtype, device=x.device) is x
    assert parallel.from_leader(None, (1,), dtype=x.dtype, device=x.device) is None
    assert parallel.group is None


@pytest.mark.parametrize("world", WORLDS)
def test_several_exchanges_may_be_on_their_way(ranks: RankPool, world: int) -> None:
    """They are told apart, in whatever order they are waited for."""
    for length in (1, world + 1, 4 * world):
        assert ranks.run(world, exchange_cases.in_flight, length=length, heads=2 * world) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_what_the_leader_holds_comes_to_all(ranks: RankPool, world: int) -> None:
    """A tensor or nothing, bit for bit."""
    assert ranks.run(world, exchange_cases.from_leader) == [[]] * world


def test_an_exchange_draws_no_random_number(ranks: RankPool) -> None:
    """So a task that slips in between two steps of a job moves nothing of the job."""
    assert ranks.run(2, exchange_cases.draws_nothing) == [[]] * 2


def test_groups_06_what_does_not_fit_is_refused_on_all_ranks_before_anything_is_sent(ranks: RankPool) -> None:
    """Heads that can't be shared, slices of another length, a group of another size; then the group still works."""
    assert ranks.run(4, exchange_cases.refuses) == [[]] * 4


@pytest.mark.parametrize(("heads", "world"), [(40, 3), (40, 16), (12, 5), (4, 8), (4, 0), (4, -1)])
def test_groups_06_heads_must_divide(heads: int, world: int) -> None:
    """The refusal names heads, ranks and all sizes that would do."""
    with pytest.raises(RequestError) as refused:
        check_heads(heads, world)
    assert refused.value.field == "world"
    accepted = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
    assert refused.value.reason == f"{heads} attention heads can't be shared by {world} ranks; accepted: {accepted}"
    for size in (1, heads):
        check_heads(heads, size)


def test_groups_04_a_group_formed_anew_serves_the_same_ranks(ranks: RankPool) -> None:
    """Left and met again, with an error in between instead of an exchange."""
    assert ranks.run(4, exchange_cases.formed_anew) == [[]] * 4


def test_groups_04_a_rank_that_is_killed_frees_the_others_for_a_new_group() -> None:
    """Whoever waits for it is told at once, keeps its own, and goes on with the replacement."""
    with RankPool(3) as pool:
        assert pool.run([0, 1], exchange_cases.loses, victim=1) == ["noticed", LOST]
        assert pool.processes[1].wait(10) == -9
        assert pool.run([0, 2], exchange_cases.goes_on) == [[], []]
        with pytest.raises(pytest.fail.Exception, match="gave no answer in time"):
            pool.run([0, 2], exchange_cases.hangs, limit_s=0.2)
        assert [process.wait(10) for process in pool.processes] == [-9] * 3, "a test doesn't hang with its ranks"


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_slices_are_equal_and_lose_nothing(length: int, world: int) -> None:
    """Joined in the order of the ranks they are the sequence, then less than a slice a rank of zeros."""
    whole = torch.arange(1, length + 1, dtype=torch.float32).view(1, length, 1)
    slices = [Shard(length, rank, world).take(whole) for rank in range(world)]
    assert {each.shape[1] for each in slices} == {Shard(length, 0, world).size}
    joined = torch.cat(slices, 1)
    assert torch.equal(joined[:, :length], whole)
    assert not joined[:, length:].any()
    assert joined.shape[1] - length < world


@pytest.mark.parametrize("cut", [(0, 0, 1), (-1, 0, 1), (4, 2, 2), (4, -1, 2), (4, 0, 0)])
def test_what_is_no_cut_is_refused(cut: tuple[int, int, int]) -> None:
    """An empty sequence, and a rank that isn't there."""
    with pytest.raises(ValueError, match="no slice"):
        Shard(*cut)


def test_only_the_sequence_is_cut() -> None:
    """A tensor of another length isn't trimmed or padded in silence."""
    with pytest.raises(ValueError, match="the tokens of the sequence"):
        Shard(4, 0, 2).take(torch.zeros(1, 5, 3))


def test_parallel_is_what_a_stage_takes_as_its_ranks() -> None:
    """It knows its rank and how many there are; another number is refused."""
    ranks: Ranks = Parallel(1, 4)
    assert (ranks.rank, ranks.world) == (1, 4)
    for rank, world in ((4, 4), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="there is no rank"):
            Parallel(rank, world)
