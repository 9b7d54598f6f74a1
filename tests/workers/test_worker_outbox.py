"""What waits for the broker is counted in bytes, in our memory and in ZeroMQ's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from reelwire import wire
from reelwire.messages import Heartbeat
from reelwire.workers.outbox import FOLLOWED_BYTES_MIN, Frames, Outbox, Tracker

LARGE = 1 << 20
QUEUE_MAX = 3


ALONE = wire.TOGETHER_TENSOR_BYTES_MAX + 1


class Taken:
    """A message that was handed over."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.done = False

    @property
    def said(self) -> list[int]:
        """The numbers of the heartbeats in it."""
        messages = wire.decode(self.frames, wire.TO_BROKER, wire.Limits()).messages
        return [int(message.busy_for_s) for message in messages if isinstance(message, Heartbeat)]


class Wire:
    """Takes messages while it is open."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self.open = True

    def send(self, frames: Frames, follow: bool) -> Taken | bool:
        """Take a message, or not."""
        if not self.open:
            return False
        self.taken.append(Taken(frames))
        return self.taken[-1] if follow else True


def beat(number: int) -> wire.Packed:
    """A small message."""
    return wire.pack(Heartbeat(float(number)))


def large(nbytes: int = ALONE) -> wire.Packed:
    """A message that travels alone."""
    return wire.Packed("Heartbeat", b"", [bytes(nbytes)])


def test_streaming_35_bytes_count_until_they_are_written() -> None:
    """Handed over is not gone; what is written out is."""
    there = Wire()
    outbox = Outbox(there.send)
    outbox.put(1, large())
    outbox.put(1, large())
    both = outbox.nbytes
    assert both > 2 * ALONE
    outbox.flush()
    assert (outbox.nbytes, outbox.blocked) == (both, False)
    there.taken[0].done = True
    assert outbox.nbytes == both // 2
    there.taken[1].done = True
    assert outbox.nbytes == 0


def test_what_is_not_taken_waits_in_order() -> None:
    """And goes out before anything newer."""
    there = Wire()
    outbox = Outbox(there.send)
    there.open = False
    outbox.put(1, beat(1))
    outbox.flush()
    outbox.put(1, large())
    outbox.put(1, beat(2))
    outbox.flush()
    assert outbox.blocked
    there.open = True
    outbox.put(1, beat(3))
    outbox.flush()
    assert [len(taken.frames) for taken in there.taken] == [1, 2, 1]
    assert [there.taken[0].said, there.taken[2].said] == [[1], [2, 3]]
    assert not outbox.blocked


def test_streaming_11_small_messages_that_wait_together_are_sent_together() -> None:
    """In order, as far as the broker takes them together, and never under another number than they were said under."""
    there = Wire()
    outbox = Outbox(there.send)
    for number in range(3):
        outbox.put(1, beat(number))
    outbox.put(2, beat(3))
    outbox.flush()
    outbox.limits = wire.Limits(header_bytes_max=50)
    for number in range(4, 6):
        outbox.put(2, beat(number))
    outbox.flush()
    assert [taken.said for taken in there.taken] == [[0, 1, 2], [3], [4], [5]]
    assert outbox.nbytes == 0


def test_a_lost_connection_takes_everything_with_it() -> None:
    """Nothing is sent or counted afterwards."""
    there = Wire()
    outbox = Outbox(there.send)
    outbox.put(1, beat(1))
    outbox.flush()
    there.open = False
    outbox.put(1, beat(2))
    outbox.flush()
    outbox.clear()
    there.open = True
    outbox.flush()
    assert (outbox.nbytes, len(there.taken)) == (0, 1)


def test_streaming_35_only_large_messages_are_followed() -> None:
    """A small one counts while it waits here, and no more once it is taken; what comes after it counts on its own."""
    there = Wire()
    outbox = Outbox(there.send)
    for nbytes, attachment in ((FOLLOWED_BYTES_MIN - 200, 1), (FOLLOWED_BYTES_MIN, 2), (10, 3)):
        outbox.put(attachment, large(nbytes))
    assert outbox.nbytes > 2 * FOLLOWED_BYTES_MIN - 200
    outbox.flush()
    assert FOLLOWED_BYTES_MIN <= outbox.nbytes < FOLLOWED_BYTES_MIN + 200
    there.taken[1].done = True
    assert outbox.nbytes == 0


@pytest.fixture
def nowhere() -> Iterator[zmq.Socket[bytes]]:
    """A socket whose peer never comes; it keeps what it is given."""
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.sndhwm = QUEUE_MAX
    socket.connect("tcp://127.0.0.1:1")
    yield socket
    context.destroy(linger=0)


def test_streaming_35_what_zeromq_keeps_is_counted(nowhere: zmq.Socket[bytes]) -> None:
    """The socket takes some messages although nobody reads: they are in memory, so they count like those that wait."""

    def send(frames: Frames, follow: bool) -> Tracker | bool:
        assert follow, "a large message is sent as a small one"
        try:
            return nowhere.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True) or False
        except zmq.Again:
            return False

    outbox = Outbox(send)
    for _ in range(2 * QUEUE_MAX):
        outbox.put(1, large(LARGE))
        outbox.flush()
    assert outbox.blocked
    assert outbox.nbytes >= 2 * QUEUE_MAX * LARGE
