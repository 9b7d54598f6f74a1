"""Deadlines by key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reelwire.broker.timers import SPARE, Timers


def test_the_earliest_is_due_first_and_once() -> None:
    """Keys come out in the order of their deadlines, each once, and none before its time."""
    timers: Timers[str] = Timers()
    timers.set("b", 2.0)
    timers.set("a", 1.0)
    assert timers.next_at == 1.0
    assert timers.pop_due(0.5) is None
    assert [timers.pop_due(5.0), timers.pop_due(5.0), timers.pop_due(5.0)] == ["a", "b", None]
    assert timers.next_at is None


def test_a_deadline_is_replaced_and_dropped() -> None:
    """A key has one deadline, the last that was set; a dropped one has none."""
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 3.0)
    assert timers.next_at == 3.0
    assert "a" in timers
    timers.drop("a")
    timers.drop("a")
    assert timers.pop_due(9.0) is None
    assert len(timers) == 0


def test_streaming_12_the_heap_is_bounded_by_what_lives() -> None:
    """Setting one key again and again, or setting and dropping many, leaves no heap of the dead."""
    timers: Timers[int] = Timers()
    for at in range(10_000):
        timers.set(0, float(at))
        timers.check()
    for key in range(1000):
        timers.set(key, 1.0)
    for key in range(1000):
        timers.drop(key)
        timers.check()
    assert timers.all() == ()
    assert len(timers._heap) <= SPARE


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10), st.booleans())))
def test_it_agrees_with_a_plain_dict(moves: list[tuple[int, float, bool]]) -> None:
    """Whatever is set and dropped, the order of what is due is that of a sorted dict."""
    timers: Timers[int] = Timers()
    plain: dict[int, float] = {}
    for key, at, drop in moves:
        if drop:
            timers.drop(key)
            plain.pop(key, None)
        else:
            timers.set(key, at)
            plain[key] = at
        timers.check()
    assert sorted(timers.all()) == sorted(plain)
    due = []
    while (key_or_none := timers.pop_due(11.0)) is not None:
        due.append(plain.pop(key_or_none))
    assert due == sorted(due)
    assert not plain
