"""Whose turn is next at an actor: start-time fair queueing, against a slow oracle and at the broker."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest

from reelwire.broker.turns import SPARE, Turns


class Oracle:
    """The rule word for word, in a list that is searched each time."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Fraction, Fraction]] = []
        self.given: dict[str, Fraction] = {}
        self.served = Fraction(0)

    def add(self, name: str, media_s: float) -> None:
        """Wait for a turn."""
        tag = max(self.given.get(name, Fraction(0)), self.served)
        self.waiting.append((name, tag, Fraction(media_s)))

    def take(self) -> str:
        """The next turn."""
        turn = min(self.waiting, key=lambda turn: turn[1])  # the first of several: who has waited longest
        self.waiting.remove(turn)
        name, tag, media_s = turn
        self.served = max(self.served, tag)
        self.given[name] = tag + media_s
        return name

    def charge(self, name: str, media_s: float) -> None:
        """Be served out of turn."""
        self.served = max(self.given.get(name, Fraction(0)), self.served)
        self.given[name] = self.served + Fraction(media_s)

    def discard(self, name: str) -> None:
        """Wait no longer."""
        self.waiting = [turn for turn in self.waiting if turn[0] != name]

    def forget(self, name: str) -> None:
        """Be gone."""
        self.discard(name)
        self.given.pop(name, None)


@pytest.mark.seeds(20)
def test_streaming_13_turns_are_those_of_the_rule_word_for_word(seed: int) -> None:
    """Whoever comes, waits no longer, leaves and comes back: the same turns as a search through all of them gives."""
    rng = random.Random(seed)
    turns: Turns[str] = Turns()
    oracle = Oracle()
    names = [f"s{number}" for number in range(rng.choice((2, 5, 40)))]
    for _ in range(600):
        name = rng.choice(names)
        match rng.choices(("add", "take", "charge", "discard", "forget"), (10, 8, 2, 1, 0.5))[0]:
            case "add" if name not in turns:
                media_s = rng.choice((0.5, 0.75, 0.75, 4.0))  # exact in binary, so that ties are ties in both
                turns.add(name, name, media_s)
                oracle.add(name, media_s)
            case "take" if turns:
                assert turns.take() == oracle.take()
            case "charge" if name not in turns:
                turns.charge(name, 0.75)
                oracle.charge(name, 0.75)
            case "discard":
                turns.discard(name)
                oracle.discard(name)
            case "forget":
                turns.forget(name)
                oracle.forget(name)
        turns.check(names)
        assert list(turns) == [turn[0] for turn in oracle.waiting]
        assert len(turns) == len(oracle.waiting)
        assert (name in turns) == any(turn[0] == name for turn in oracle.waiting)
    while turns:
        assert turns.take() == oracle.take()


def served(turns: Turns[str], costs: dict[str, float], count: int) -> list[str]:
    """So many turns of sessions that always have more work."""
    for name, media_s in costs.items():
        if name not in turns:
            turns.add(name, name, media_s)
    order = []
    for _ in range(count):
        name = turns.take()
        order.append(name)
        turns.add(name, name, costs[name])
    return order


def test_streaming_13_equal_shares_are_of_media_time() -> None:
    """A session whose chunks are three times as long gets a third of the turns of the others."""
    shares = Counter(served(Turns(), {"long": 1.5, "short": 0.5, "other": 0.5}, 70))
    assert shares == {"long": 10, "short": 30, "other": 30}


def test_streaming_13_ties_are_taken_in_order_of_arrival() -> None:
    """Sessions with the same tag take turns in the order in which they came."""
    assert served(Turns(), {"c": 0.75, "a": 0.75, "b": 0.75}, 7) == ["c", "a", "b", "c", "a", "b", "c"]


def test_streaming_13_whoever_paused_is_owed_nothing() -> None:
    """After a pause of any length a session gets its next turn at once, and no two in a row before its neighbour."""
    turns: Turns[str] = Turns()
    served(turns, {"busy": 0.75, "pausing": 0.75}, 10)
    turns.discard("pausing")
    served(turns, {"busy": 0.75}, 1000)
    order = served(turns, {"busy": 0.75, "pausing": 0.75}, 20)
    assert "pausing" in order[:2]
    assert abs(order.count("busy") - order.count("pausing")) <= 1
    assert all(set(pair) == {"busy", "pausing"} for pair in zip(order[::2], order[1::2], strict=True))


def test_streaming_13_whoever_was_alone_owes_nothing() -> None:
    """A newcomer doesn't make a session wait for what it did while nobody else wanted anything."""
    turns: Turns[str] = Turns()
    served(turns, {"first": 0.75}, 1000)
    order = served(turns, {"first": 0.75, "new": 0.75}, 10)
    assert abs(order.count("first") - order.count("new")) <= 1
    assert "first" in order[:2]


def test_streaming_13_whoever_was_served_without_a_turn_has_had_one() -> None:
    """Of two that were given as much, the one that was charged for another chunk waits for the other."""
    turns: Turns[str] = Turns()
    served(turns, {"ahead": 0.75, "behind": 0.75}, 10)
    for name in ("ahead", "behind"):
        turns.discard(name)
    turns.charge("ahead", 0.75)
    order = served(turns, {"ahead": 0.75, "behind": 0.75}, 6)
    assert order == ["behind", "ahead"] * 3
    turns.discard("ahead")
    turns.charge("ahead", 7.5)
    assert served(turns, {"ahead": 0.75, "behind": 0.75}, 12).count("ahead") == 1


def test_streaming_13_nobody_is_served_while_it_waits() -> None:
    """That would be two turns for one: our own error."""
    turns: Turns[str] = Turns()
    turns.add("one", "one", 0.75)
    with pytest.raises(AssertionError, match="waits"):
        turns.charge("one", 0.75)


def test_streaming_13_many_that_left_cost_nothing() -> None:
    """What is waited for no longer leaves the queue in bulk, so that its size follows who waits."""
    turns: Turns[int] = Turns()
    for number in range(10_000):
        turns.add(str(number), number, 0.75)
        if number % 100:
            turns.forget(str(number))
    assert len(turns) == 100
    assert len(turns._heap) <= 200 + SPARE
    assert [turns.take() for _ in range(100)] == list(range(0, 10_000, 100))
    turns.check([str(number) for number in range(10_000)])


# --- at the broker -------------------------------------------------------------------------------------------------------


class Two:
    """Sessions at one worker, each kept supplied by a client that reads at once."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.worker = rig.worker(mailbox=0)
        self.client = rig.client()

    def open(self, name: str) -> str:
        """A session of many chunks."""
        return str(self.client.open(name, 90))

    def supply(self, *sessions: str) -> None:
        """Give each as many controls as it may have, and take its chunks."""
        for session in sessions:
            self.client.ack(session, len(self.client.chunks(session)))
            flow = self.rig.core.sessions[session].flow
            while flow.refusal(flow.next_control_index) is None:
                self.client.submit(session, flow.next_control_index)

    def run(self, turns: int, *sessions: str) -> list[str]:
        """Who gets so many turns at denoise, while these sessions are supplied."""
        order: list[str] = []
        while len(order) < turns:
            self.supply(*sessions)
            while self.worker.jobs["encode"] or self.worker.jobs["decode"]:
                self.worker.make(*(stage for stage in ("decode", "encode") if self.worker.jobs[stage]))
            self.supply(*sessions)
            order.append(self.worker.finish("denoise").session)
        return order


def test_streaming_13_sessions_at_one_actor_share_it(rig: Any) -> None:
    """Three that always want more get equal turns, whoever was first."""
    two = Two(rig)
    names = [two.open(name) for name in "abc"]
    shares = Counter(two.run(30, *names))
    assert max(shares.values()) - min(shares.values()) <= 1
    assert set(shares) == set(names)


def test_streaming_13_a_session_that_paused_starves_nobody(rig: Any) -> None:
    """When it comes back, neither gets more than one turn ahead of the other."""
    two = Two(rig)
    steady, pausing = two.open("steady"), two.open("pausing")
    two.run(6, steady, pausing)
    assert set(islice(reversed(two.run(40, steady)), 20)) == {steady}
    order = two.run(20, steady, pausing)
    ahead = 0
    for name in order:
        ahead += 1 if name == pausing else -1
        assert abs(ahead) <= 2
    assert abs(ahead) <= 1


def test_streaming_13_a_session_that_ends_leaves_no_trace(rig: Any) -> None:
    """What it was given is forgotten with it."""
    two = Two(rig)
    first, second = two.open("first"), two.open("second")
    two.run(6, first, second)
    two.client.end(first, "cancel")
    two.run(6, second)
    (peer,) = rig.core._peers.workers.values()
    assert all(set(actor.waiting._given) <= {second} for actor in peer.actors.values())
