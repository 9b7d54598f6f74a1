"""The ranks of a worker group under a seeded schedule: they never hang, and never come out of step; see `group_world`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from .group_rank import Rank, expected
from .group_world import GroupWorld

EVENTS_MAX = 40_000


def play(world: GroupWorld, faulty_steps: int) -> None:
    """With faults for a while, and then until all that was asked for is answered."""
    world.faults = True
    for _ in range(faulty_steps):
        world.step()
    world.faults = False
    for _ in range(EVENTS_MAX):
        if world.broker.is_over:
            break
        world.step()
    assert world.broker.is_over, describe(world)


def describe(world: GroupWorld) -> str:
    """Where it hangs."""
    ranks = [f"{rank.number}: {rank.core.status()} {rank.thread.order} over={rank.is_over}" for rank in world.ranks]
    return "\n".join([*ranks, world.broker.state, str(world.broker.jobs), str(world.broker.films)])


def check_results(world: GroupWorld) -> None:
    """Whatever slipped in, was lost and began again: a result is what an undisturbed job gives."""
    for job in world.broker.jobs:
        if job.state == "succeeded":
            assert job.result == expected(job.name, job.parameters["steps"])


def settle(world: GroupWorld) -> None:
    """Everything arrives, also what a stuck thread ends in, and nothing is left of what nobody needs any more."""
    for _ in range(EVENTS_MAX):
        if all(is_clean(rank) for rank in world.ranks):
            return
        world.step()
    raise AssertionError(f"caches, jobs or files that nobody needs\n{describe(world)}")


def is_clean(rank: Rank) -> bool:
    """Whether a rank holds nothing."""
    left = rank.thread.sessions or rank.thread.job or rank.made or rank.thread.order or rank.to_write
    return not rank.is_over and not left


@pytest.mark.seeds(500)
@pytest.mark.rule("groups_03", "groups_04", "groups_11", "groups_12", "groups_13")
def test_groups_02_the_ranks_never_hang_and_never_get_out_of_step(toy: Any, seed: int) -> None:
    """Whatever fails, dies, is cut off, cancelled or stopped: all is answered, and all ranks did the same in one order."""
    world = GroupWorld(toy.spec, toy, seed, size=1 + seed % 4)
    world.loss = 0.01 * (seed % 3 == 0)
    world.disorder = 0.1 * (seed % 5 == 0)
    play(world, 700)
    check_results(world)
    settle(world)


@pytest.mark.seeds(120)
@pytest.mark.rule("groups_02", "groups_11")
def test_groups_13_a_job_fails_on_all_ranks_once_and_by_what_went_wrong_first(toy: Any, seed: int) -> None:
    """Also while some ranks are at the step behind it: no result, one cause, and then the next job; no process is lost."""
    world = frail(toy, seed)
    while not world.broker.is_over:
        world.step()
    settle(world)
    check_results(world)
    assert world.codes == []
    assert {job.attempt for job in world.broker.jobs} <= {0, 1}  # begun once at most
    for job in world.broker.jobs:
        assert ((job.name, 1) in world.causes) <= (job.state == "failed")


def frail(toy: Any, seed: int) -> GroupWorld:
    """Nothing goes wrong but steps of jobs, on any rank."""
    world = GroupWorld(toy.spec, toy, seed, size=2 + seed % 3)
    world.frailty = 0.1
    return world


def test_groups_02_the_schedules_come_to_every_way_of_going_ahead(toy: Any) -> None:
    """Most steps don't wait for all ranks; sometimes the one that was left behind fails, by its own fault or another's."""
    counted: Counter[str] = Counter()
    for seed in range(120):
        world = frail(toy, seed)
        while not world.broker.is_over:
            world.step()
        counted += world.counted
    assert counted["steps ahead"] > counted["steps"] / 4, counted
    assert counted["first failed"] > 5, counted
    assert counted["first broke"] > 5, counted


@pytest.mark.seeds(40)
def test_groups_03_without_faults_all_is_done_and_no_message_is_out_of_protocol(toy: Any, seed: int) -> None:
    """Whatever the order in which things happen: each session is completed, each job done at its first attempt."""
    world = GroupWorld(toy.spec, toy, seed, size=1 + seed % 4)
    while not world.broker.is_over:
        world.step()
    settle(world)
    check_results(world)
    assert {film.outcome for film in world.broker.films} == {"completed"}
    assert {job.attempt for job in world.broker.jobs} == {1}
    assert {job.state for job in world.broker.jobs if not job.parameters["fails"]} <= {"succeeded"}
    assert world.codes == []
    assert all(rank.was_ready for rank in world.ranks)
    for rank in world.ranks:
        assert rank.core.status()["dropped"] == {}


@pytest.mark.seeds(500)
@pytest.mark.rule("groups_03", "groups_12")
def test_groups_02_whatever_is_lost_between_ranks_is_said_again(toy: Any, seed: int) -> None:
    """One message in a hundred: no process is lost by that, and no job is begun twice; all is done as if nothing was."""
    world = GroupWorld(toy.spec, toy, seed, size=2 + seed % 3)
    world.loss = 0.01
    play(world, 0)
    settle(world)
    check_results(world)
    assert {film.outcome for film in world.broker.films} == {"completed"}
    assert {job.attempt for job in world.broker.jobs} == {1}
    assert {job.state for job in world.broker.jobs if not job.parameters["fails"]} <= {"succeeded"}
    assert world.codes == []


@pytest.mark.seeds(400)
@pytest.mark.rule("groups_03", "groups_12")
def test_groups_02_what_comes_twice_or_out_of_order_moves_no_rank(toy: Any, seed: int) -> None:
    """However old it is, and if others are lost meanwhile: no step is done twice or left out, and all is done."""
    world = GroupWorld(toy.spec, toy, seed, size=2 + seed % 3)
    world.disorder = (0.1, 0.4)[seed % 2]
    world.loss = 0.01 * (seed % 3 == 0)
    play(world, 0)
    settle(world)
    check_results(world)
    assert {film.outcome for film in world.broker.films} == {"completed"}
    assert {job.attempt for job in world.broker.jobs} == {1}
    assert {job.state for job in world.broker.jobs if not job.parameters["fails"]} <= {"succeeded"}
    assert world.codes == []


def test_groups_02_the_schedules_come_to_disorder_of_every_kind(toy: Any) -> None:
    """Messages come twice, before others, and when what they are about is long over."""
    counted: Counter[str] = Counter()
    for seed in range(20):
        world = GroupWorld(toy.spec, toy, seed, size=2 + seed % 3)
        world.disorder = 0.4
        play(world, 0)
        counted += world.counted
    assert min(counted["copies"], counted["overtakes"], counted["stale"]) > 20, counted


@pytest.mark.seeds(60)
def test_groups_11_ranks_that_are_asked_to_stop_leave_together_and_lose_nothing(toy: Any, seed: int) -> None:
    """Whichever rank is asked, and when: no session is lost, the job goes on elsewhere, and no process ends in an error."""
    world = GroupWorld(toy.spec, toy, seed, size=1 + seed % 4)
    world.loss = 0.01 * (seed % 3 == 0)
    later = world.chance.randint(1, 400)
    while world.broker.state != "formed":
        world.step()
    for _ in range(later):
        world.step()
    world.stop(world.chance.choice(world.ranks))
    while not world.broker.is_over:
        world.step()
    settle(world)
    check_results(world)
    for film in world.broker.films:  # one that came too late is refused, or finds nobody
        assert film.outcome == "completed" or (film.outcome in ("failed", "lost") and not film.sent)
    assert set(world.codes) <= {0}
    assert {job.state for job in world.broker.jobs if not job.parameters["fails"]} <= {"succeeded"}
