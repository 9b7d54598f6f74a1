"""The client's core and the broker's core, joined by a wire that a seed schedules: see `joined_cores`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.controls import Keys
from reelwire.errors import ControlError, SessionError

from .joined_cores import Film, World, act, finish, keys_of


@pytest.mark.seeds(40)
def test_streaming_15_controls_by_index_are_applied_to_their_chunks_under_any_schedule(seed: int) -> None:
    """Whatever is delayed, every accepted control stands in its chunk, none is refused for room, and nothing is left."""
    world = World(seed)
    films = [Film(world.add(), f"k{number}", world.rng.randint(1, 9)) for number in range(3)]
    for _ in range(300):
        moves = world.moves()
        if moves and world.rng.random() < 0.8:
            world.rng.choice(moves)()
        elif world.rng.random() < 0.6:
            act(world.rng.choice(films), world.rng)
        else:
            world.pass_time()
    for film in films:
        finish(world, film)
        assert film.view is not None
        for chunk in film.seen:
            assert chunk.applied.source == "explicit"
            assert chunk.applied.control.values["keys"] == sorted(film.accepted[chunk.index])
        for error in film.refused:
            assert isinstance(error, SessionError)
        if film.view.state == "completed" and film.view.ending != "cancel":  # they may cross
            assert len(film.seen) == film.chunks
    world.settle()
    assert world.broker.sessions == {}
    assert world.worker.held == set()
    assert not any(app.waiting for app in world.apps)


@pytest.mark.parametrize("binding", ["late", "early"])
@pytest.mark.seeds(20)
def test_streaming_14_held_keys_drive_a_session_under_any_schedule(seed: int, binding: str) -> None:
    """Keys go up and down at random: chunks come in order, each with keys that were down, and the session completes."""
    world = World(seed)
    film = Film(world.add(), "k", 12, control_binding=binding)
    world.until(lambda: film.view is not None)
    assert film.view is not None
    down: list[set[str]] = [set()]
    while len(film.seen) < film.chunks:
        if world.rng.random() < 0.3 and not film.view.ended:
            key = world.rng.choice("adw")
            change = world.rng.choice((Keys.press, Keys.release, Keys.tap))
            film.press(lambda keys, change=change, key=key: change(keys, key))  # type: ignore[misc]
            down += [set(film.keys.state.held), set(film.keys.state.tap_keys)]
        moves = world.moves()
        if moves:
            world.rng.choice(moves)()
        elif world.rng.random() < 0.3:
            world.pass_time()
        film.take()
    finish(world, film)
    assert film.view.state == "completed"
    for chunk in film.seen:
        assert chunk.applied.source in (("tap", "held") if binding == "early" else ("tap", "held", "still"))
        assert set(keys_of(chunk)) in down
    revisions = [chunk.applied.revision for chunk in film.seen]
    assert revisions == sorted(revisions)


@pytest.mark.seeds(10)
def test_streaming_11_lost_credit_and_lost_grants_only_cost_time(seed: int) -> None:
    """Every acknowledgement and most news of grants are lost: heartbeats repeat them, and the session completes."""
    rng = random.Random(seed)

    def arrives(message: Any) -> Any:
        is_news = isinstance(message, m.Chunk) or (isinstance(message, m.SessionChanged) and message.state == "running")
        if isinstance(message, m.Ack):
            return None
        if not is_news or rng.random() >= 0.8:
            return message
        return replace(message, control_limit=0) if isinstance(message, m.Chunk) else None

    world = World(seed, arrives)
    film = Film(world.add(), "k", 9)
    finish(world, film)
    assert film.view is not None
    assert ([chunk.index for chunk in film.seen], film.view.state) == (list(range(9)), "completed")
    for chunk in film.seen:
        assert chunk.applied.control.values["keys"] == sorted(film.accepted[chunk.index])
    world.settle()
    assert world.broker.sessions == {}


@pytest.mark.seeds(10)
def test_streaming_23_a_stage_that_breaks_fails_its_session_after_the_chunks_before_it(seed: int) -> None:
    """The chunks below the broken one come, the error names it, and the other session completes."""
    world = World(seed)
    app = world.add()
    broken, whole = Film(app, "k1", 8), Film(app, "k2", 8)
    world.until(lambda: broken.view is not None and whole.view is not None)
    assert broken.view is not None and whole.view is not None  # noqa: PT018
    world.worker.breaks.add((broken.view.id, 5))
    for film in (broken, whole):
        finish(world, film)
    assert [chunk.index for chunk in broken.seen] == [0, 1, 2, 3, 4]
    assert (broken.view.state, whole.view.state, len(whole.seen)) == ("failed", "completed", 8)
    failure = broken.view.failure
    assert failure is not None
    assert (failure.stage, failure.index, failure.message) == ("draw", 5, "it broke")
    assert world.worker.held == set()


@pytest.mark.parametrize("mode", ["drain", "cancel"])
@pytest.mark.seeds(10)
def test_streaming_22_an_end_leaves_nothing_behind(seed: int, mode: m.EndMode) -> None:
    """Ended while chunks are under way and nobody reads: a drain still gives all that was accepted, a cancel nothing."""
    world = World(seed)
    film = Film(world.add(), "k", 30)
    world.until(lambda: film.view is not None)
    view = film.view
    assert view is not None
    for _ in range(world.rng.randint(1, 5)):
        film.submit(["a"])
    for _ in range(world.rng.randint(0, 30)):
        moves = world.moves()
        if moves:
            world.rng.choice(moves)()
    film.end(mode)
    world.until(lambda: view.ended)
    while film.take():
        pass
    assert view.state == ("closed" if mode == "drain" else "cancelled")
    assert (len(film.seen) == len(film.accepted)) if mode == "drain" else not film.seen
    world.settle()
    assert world.broker.sessions == {}
    assert world.worker.held == set()


@pytest.mark.seeds(10)
def test_a_cut_connection_fails_the_sessions_and_the_client_comes_back(seed: int) -> None:
    """The old session ends at the broker when its grace is over; a new one is opened over the new connection."""
    world = World(seed, client_grace_s=5.0)
    app = world.add()
    film = Film(app, "k1", 9)
    world.until(lambda: film.view is not None)
    assert film.view is not None
    film.submit(["w"])
    world.cut(app.route)
    view = film.view
    world.until(lambda: view.ended)
    assert view.state == "failed"
    world.until(lambda: app.core.phase == "attached")
    again = Film(app, "k2", 2)
    finish(world, again)
    assert again.view is not None
    assert again.view.state == "completed"
    world.until(lambda: not world.broker.sessions)
    assert world.worker.held == set()


def test_streaming_17_an_unknown_key_is_refused_by_the_broker_too() -> None:
    """A client that doesn't check gets the broker's refusal, with the names that are accepted."""
    world = World(0)
    film = Film(world.add(), "k", 2)
    world.until(lambda: film.view is not None)
    film.submit(["q"])
    world.until(lambda: bool(film.refused))
    error = film.refused[0]
    assert isinstance(error, ControlError)
    assert (error.code, "accepted: a, d, w" in str(error)) == ("unknown_key", True)
