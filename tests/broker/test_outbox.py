"""Bounded outboxes per connection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from reelwire.broker.outbox import Outboxes, Sent, Tracker
from reelwire.wire import Buffer


class Tracked:
    """A large message that has left when the test says so."""

    def __init__(self) -> None:
        self.done = False


class Wire:
    """A socket whose connections block or are gone when the test says so; messages of 50 bytes and more are large."""

    def __init__(self) -> None:
        self.state: dict[bytes, Sent] = {}
        self.arrived: list[tuple[bytes, bytes]] = []
        self.tracked: list[Tracked] = []

    def __call__(self, route: bytes, frames: Sequence[Buffer], size: int) -> tuple[Sent, Tracker | None]:
        """Try to send."""
        state = self.state.get(route, "sent")
        if state != "sent":
            return state, None
        self.arrived.append((route, b"".join(frames)))
        if size < 50:
            return state, None
        self.tracked.append(Tracked())
        return state, self.tracked[-1]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_streaming_35_a_blocked_connection_keeps_its_order_and_blocks_nobody(wire: Wire) -> None:
    """What waits is sent in order when it can be, behind nothing of anybody else."""
    boxes = Outboxes(wire, 100, 10)
    wire.state[b"slow"] = "blocked"
    for word in (b"1", b"2", b"3"):
        assert boxes.send(b"slow", [word]) == "ok"
        assert boxes.send(b"fast", [word]) == "ok"
    assert list(boxes.blocked) == [b"slow"]
    assert boxes.nbytes(b"slow") == 3
    assert boxes.retry(boxes.blocked) == []
    wire.state[b"slow"] = "sent"
    boxes.send(b"slow", [b"4"])
    assert boxes.retry([b"slow", b"nobody"]) == []
    assert [word for route, word in wire.arrived if route == b"slow"] == [b"1", b"2", b"3", b"4"]
    assert not boxes.blocked
    assert boxes.nbytes(b"slow") == 0


def test_streaming_35_an_outbox_is_bounded_in_bytes_and_messages(wire: Wire) -> None:
    """More is refused; one message of any size may wait, since it would never leave otherwise."""
    wire.state[b"a"] = wire.state[b"b"] = "blocked"
    boxes = Outboxes(wire, 10, 3)
    assert boxes.send(b"a", [bytes(50)]) == "ok"
    assert boxes.send(b"a", [b"x"]) == "full"
    for _ in range(3):
        assert boxes.send(b"b", [b"x"]) == "ok"
    assert boxes.send(b"b", [b"x"]) == "full"
    assert boxes.nbytes(b"b") == 3


def test_streaming_35_an_outbox_is_freed_at_once(wire: Wire) -> None:
    """Forgetting a connection drops everything that waits for it."""
    wire.state[b"a"] = "blocked"
    boxes = Outboxes(wire, 10, 3)
    boxes.send(b"a", [b"x"])
    boxes.forget(b"a")
    boxes.forget(b"a")
    assert not boxes.blocked
    wire.state[b"a"] = "sent"
    boxes.retry([b"a"])
    assert wire.arrived == []


def test_streaming_35_what_may_not_wait_is_dropped(wire: Wire) -> None:
    """A word to a stranger that can't be sent leaves nothing behind."""
    wire.state[b"a"] = "blocked"
    boxes = Outboxes(wire, 10, 3)
    assert boxes.send(b"a", [b"x"], may_wait=False) == "ok"
    assert not boxes.blocked


def test_streaming_35_a_connection_that_is_gone_is_reported(wire: Wire) -> None:
    """At once, or when what waits is tried again."""
    boxes = Outboxes(wire, 10, 3)
    wire.state[b"a"] = "unreachable"
    assert boxes.send(b"a", [b"x"]) == "unreachable"
    wire.state[b"b"] = "blocked"
    boxes.send(b"b", [b"x"])
    wire.state[b"b"] = "unreachable"
    assert boxes.retry(boxes.blocked) == [b"b"]


def test_streaming_35_what_the_socket_has_and_has_not_sent_is_bounded_too(wire: Wire) -> None:
    """Above the bound a connection counts as blocked although the socket would take more; others don't notice."""
    boxes = Outboxes(wire, 100, 10)
    for _ in range(3):
        assert boxes.send(b"a", [bytes(50)]) == "ok"
    assert boxes.send(b"a", [b"x"]) == "ok"
    assert boxes.send(b"b", [bytes(50)]) == "ok"
    assert (boxes.leaving(b"a"), boxes.nbytes(b"a"), len(wire.arrived)) == (100, 51, 3)
    assert boxes.retry(boxes.blocked) == []
    assert boxes.nbytes(b"a") == 51
    wire.tracked[0].done = True
    assert boxes.retry(boxes.blocked) == []
    assert (boxes.leaving(b"a"), boxes.nbytes(b"a")) == (100, 1), "the small one waits for its turn"
    for each in wire.tracked:
        each.done = True
    assert boxes.retry(boxes.blocked) == []
    assert (boxes.leaving(b"a"), boxes.blocked) == (0, ())
    assert [len(word) for route, word in wire.arrived if route == b"a"] == [50, 50, 50, 1]


def test_streaming_35_one_message_may_always_leave(wire: Wire) -> None:
    """However large it is; and what is forgotten isn't counted any more."""
    boxes = Outboxes(wire, 100, 10)
    assert boxes.send(b"a", [bytes(500)]) == "ok"
    assert boxes.leaving(b"a") == 500
    assert boxes.send(b"a", [b"x"]) == "ok"
    assert boxes.blocked == (b"a",)
    boxes.forget(b"a")
    assert boxes.leaving(b"a") == 0
    assert not boxes.blocked
