"""The order in which jobs start: against a slow oracle, and what it promises in words."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reelwire.broker.job_queue import JobQueue, Place

KINDS = ("a", "b", "c")
ALL = frozenset(KINDS)


class Oracle:
    """The rule word for word, in lists that are searched each time."""

    def __init__(self) -> None:
        self.waiting: list[Place] = []
        self.rounds: dict[int, int] = {}
        self.tags: dict[tuple[int, str], int] = {}

    def add(self, place: Place, *, again: bool) -> None:
        """A job waits."""
        line = (place.priority, place.client)
        if line not in self.tags:
            self.tags[line] = self.rounds.get(place.priority, -1) + 1
        if again:
            self.tags[line] = max(self.tags[line] - 1, 0)
        self.waiting.append(place)

    def first(self, kinds: Any) -> Place | None:
        """The next one of these kinds."""

        def rank(place: Place) -> tuple[int, int, int]:
            own = [each for each in self.waiting if (each.priority, each.client) == (place.priority, place.client)]
            later = sum(each.number < place.number and each.kind in kinds for each in own)
            return -place.priority, self.tags[place.priority, place.client] + later, place.number

        return min((place for place in self.waiting if place.kind in kinds), key=rank, default=None)

    def order(self, kinds: Any) -> list[str]:
        """All of these kinds, one after the other, on a copy."""
        copy = Oracle()
        copy.waiting, copy.rounds, copy.tags = list(self.waiting), dict(self.rounds), dict(self.tags)
        found = []
        while (place := copy.first(kinds)) is not None:
            found.append(place.job)
            copy.start(place)
        return found

    def start(self, place: Place) -> None:
        """A job starts."""
        line = (place.priority, place.client)
        self.rounds[place.priority] = max(self.rounds.get(place.priority, -1), self.tags[line])
        self.tags[line] += 1
        self.remove(place)

    def remove(self, place: Place) -> None:
        """A job waits no longer."""
        self.waiting.remove(place)
        here = [each for each in self.waiting if each.priority == place.priority]
        if not here:
            self.rounds.pop(place.priority, None)
        if not [each for each in here if each.client == place.client]:
            del self.tags[place.priority, place.client]


@pytest.mark.seeds(40)
def test_groups_14_the_order_is_the_oracles(seed: int) -> None:
    """First job, whole order and every position, for every set of kinds, after every change."""
    chance = random.Random(seed)
    queue, oracle, number = JobQueue(), Oracle(), 0
    started: list[Place] = []
    for _ in range(60):
        choice = chance.random()
        if choice < 0.55 or not oracle.waiting:
            number += 1
            again = bool(started) and chance.random() < 0.3
            place = started.pop(chance.randrange(len(started))) if again else None
            if place is None:
                client, priority = chance.choice("xyz"), chance.choice((0, 0, 1))
                place = Place(f"j{number}", number, client, priority, chance.choice(KINDS))
            queue.add(place, again=again)
            oracle.add(place, again=again)
        elif choice < 0.9:
            kinds = chance.sample(KINDS, chance.randint(1, 3))
            first = oracle.first(kinds)
            assert queue.first(kinds) == (first and first.job)
            if first is not None:
                queue.start(first.job)
                oracle.start(first)
                started.append(first)
        else:
            place = chance.choice(oracle.waiting)
            queue.remove(place.job)
            oracle.remove(place)
        queue.check()
        assert set(queue) == {place.job for place in oracle.waiting}
        for some in (ALL, frozenset("a"), frozenset("ab")):
            order = oracle.order(some)
            assert list(queue.order(some)) == order
            assert [queue.position(job, some) for job in order] == list(range(len(order)))


def fill(queue: JobQueue, client: str, count: int, first: int, priority: int = 0) -> list[str]:
    """Jobs of one client."""
    for number in range(first, first + count):
        queue.add(Place(f"{client}{number}", number, client, priority, "a"))
    return [f"{client}{number}" for number in range(first, first + count)]


def test_groups_14_priority_goes_before_everything() -> None:
    """A job with a higher priority starts first, whoever else has waited longer."""
    queue = JobQueue()
    low, high = fill(queue, "x", 2, 1), fill(queue, "x", 1, 3, priority=5)
    assert list(queue.order(ALL)) == [*high, *low]


def test_groups_14_clients_of_one_priority_take_turns() -> None:
    """Whoever has many jobs doesn't hold up others; within one client arrival counts."""
    queue = JobQueue()
    fill(queue, "x", 4, 1)
    fill(queue, "y", 2, 5)
    assert list(queue.order(ALL)) == ["x1", "y5", "x2", "y6", "x3", "x4"]


def test_groups_14_a_client_that_comes_late_waits_for_one_job_of_each() -> None:
    """It isn't owed the turns that it wasn't there for, and owes none."""
    queue = JobQueue()
    fill(queue, "x", 10, 1)
    for number in range(1, 6):
        queue.start(f"x{number}")
    fill(queue, "y", 2, 20)
    assert list(queue.order(ALL)) == ["x6", "y20", "x7", "y21", "x8", "x9", "x10"]


def test_groups_14_a_stream_of_new_clients_starves_nobody() -> None:
    """However many come with one job each, a job waits only for those whose round is before its own."""
    queue = JobQueue()
    fill(queue, "x", 3, 1)
    started = []
    for number in range(10, 40):
        fill(queue, f"new{number}-", 2, 10 * number)
        first = queue.first(ALL)
        assert first is not None
        queue.start(first)
        started.append(first)
    assert {"x1", "x2", "x3"} <= set(started)


def test_groups_14_a_job_that_lost_its_group_is_next() -> None:
    """Before the others of its client, and before clients whose round hasn't begun."""
    queue = JobQueue()
    fill(queue, "x", 3, 1)
    fill(queue, "y", 3, 4)
    lost = Place("x1", 1, "x", 0, "a")
    queue.start("x1")
    queue.start("y4")
    queue.add(lost, again=True)
    assert list(queue.order(ALL))[:3] == ["x1", "x2", "y5"]


def test_a_group_takes_the_first_job_of_its_kinds() -> None:
    """What others do isn't in its way."""
    queue = JobQueue()
    queue.add(Place("one", 1, "x", 0, "a"))
    queue.add(Place("two", 2, "x", 0, "b"))
    assert queue.first({"b"}) == "two"
    assert queue.first({"c"}) is None
    assert queue.position("two", {"b"}) == 0
    assert queue.position("two", {"a", "b"}) == 1
