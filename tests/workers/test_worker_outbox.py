"""What waits for the broker is counted in bytes, in our memory and in ZeroMQ's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from reelwire.workers.outbox import Frames, Outbox

LARGE = 1 << 20
QUEUE_MAX = 3


class Taken:
    """A message that was handed over."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.done = False


class Wire:
    """Takes messages while it is open."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self.open = True

    def send(self, frames: Frames) -> Taken | None:
        """Take a message, or not."""
        if not self.open:
            return None
        self.taken.append(Taken(frames))
        return self.taken[-1]


def test_streaming_35_bytes_count_until_they_are_written() -> None:
    """Handed over is not gone; what is written out is."""
    wire = Wire()
    outbox = Outbox(wire.send)
    outbox.put([b"12", b"345"])
    outbox.put([b"6"])
    assert (outbox.nbytes, outbox.blocked) == (6, False)
    wire.taken[0].done = True
    assert outbox.nbytes == 1
    wire.taken[1].done = True
    assert outbox.nbytes == 0


def test_what_is_not_taken_waits_in_order() -> None:
    """And goes out before anything newer."""
    wire = Wire()
    outbox = Outbox(wire.send)
    wire.open = False
    outbox.put([b"1"])
    outbox.put([b"2"])
    assert (outbox.nbytes, outbox.blocked) == (2, True)
    wire.open = True
    outbox.put([b"3"])
    assert [taken.frames for taken in wire.taken] == [[b"1"], [b"2"], [b"3"]]
    assert not outbox.blocked


def test_a_lost_connection_takes_everything_with_it() -> None:
    """Nothing is sent or counted afterwards."""
    wire = Wire()
    outbox = Outbox(wire.send)
    outbox.put([b"1"])
    wire.open = False
    outbox.put([b"2"])
    outbox.clear()
    wire.open = True
    outbox.flush()
    assert (outbox.nbytes, len(wire.taken)) == (0, 1)


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

    def send(frames: Frames) -> zmq.MessageTracker | None:
        try:
            return nowhere.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            return None

    outbox = Outbox(send)
    for _ in range(2 * QUEUE_MAX):
        outbox.put([bytes(LARGE)])
    assert outbox.blocked
    assert outbox.nbytes == 2 * QUEUE_MAX * LARGE
