"""Workers' cores, a broker's core and a client, joined by wires that a seed schedules: see `joined_world`."""

from __future__ import annotations

from typing import Any

import pytest

from .joined_world import CHUNKS, SESSIONS, World


def settle(world: World) -> None:
    """Everything arrives and everything is read."""
    for _ in range(300):
        world.step(faults=False)


def check_nothing_is_left(world: World) -> None:
    assert not world.broker.sessions
    for process in world.processes:
        assert not any(actor.held for actor in process.core.actors.values())
        assert not process.memory.out, "shared memory that nobody gives back"


@pytest.mark.seeds(60)
def test_streaming_22_every_session_ends_and_nothing_is_left(toy: Any, seed: int) -> None:
    """With workers that restart or drain, connections that break and stages that raise: each session ends once, in order.

    Whoever reads shared memory finds what was written for him, and all of it comes back.
    """
    world = World(toy.spec, toy, seed)
    for _ in range(800):
        world.step(faults=True)
    for _ in range(20_000):
        if world.is_over:
            break
        world.step(faults=False)
    assert world.is_over, world.broker.status()
    settle(world)
    check_nothing_is_left(world)
    for film in world.living.values():
        assert film.state != "completed" or film.seen == CHUNKS


@pytest.mark.seeds(20)
def test_streaming_23_without_faults_every_session_is_completed(toy: Any, seed: int) -> None:
    """Whatever the order in which things happen, no message is out of protocol, and memory is used again."""
    world = World(toy.spec, toy, seed)
    while not world.is_over:
        world.step(faults=False)
    assert [film.state for film in world.living.values()] == ["completed"] * SESSIONS
    assert all(film.seen == CHUNKS for film in world.living.values())
    assert any(applied.source != "explicit" for applied in world.applied.values())
    settle(world)
    check_nothing_is_left(world)
    for process in world.processes:
        assert process.core.status()["dropped"] == {}
        assert len(process.memory.written) < SESSIONS * CHUNKS
    if world.client_maps:
        assert any(process.memory.written for process in world.processes)
