"""`reelwire bench payload`: a tensor to another process and a one-byte answer, through shared memory and inside a message.

What crosses is what a worker sends, a `TaskDone` on the wire of this package over a Unix socket. A round is one turn each
of three, one after the other, so that whatever else the machine does falls on all of them::

    shared   room from the pool, one write, a reference to the other process, which looks at the tensor and answers
    ipc      the same tensor inside of the message, not copied here; the other process looks at the same bytes
    copy     one copy of the tensor within this process, and nothing else

Pool and reader are warm, as they are in a stream after its first chunks.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .. import segments, tensors, wire
from ..errors import ReelwireError
from ..messages import Artifact, TaskDone
from ..tensors import Inline, TensorRef
from .bench_report import Bound, Report, Spread, asked_for, load_before, phases
from .bench_stack import helper

if TYPE_CHECKING:
    import zmq
    from numpy.typing import NDArray

Way = Literal["shared", "ipc", "copy"]

FRAMES_BYTES = 14_000_000
"""A chunk of frames as the world model decodes them: twelve of 832 x 480 pixels in three colours, rounded down."""
SIZES = (FRAMES_BYTES, 1 << 20, 256 << 10, 64 << 10, 16 << 10)
COLUMNS = ("nbytes", "way", "count", "p50_ms", "p90_ms", "of_copy", "of_ipc")
WARM_UP = 10
LOOK_BYTES = 64 << 10
POOL_BYTES = 256 << 20
COPIED_PER_S, TURNS_S = 4e9, 0.001
"""Of bytes and of one round's turns: to say beforehand how long it takes, and for nothing else."""
ANSWER_LIMIT_MS = 20_000
COPY_SHARE, EXTRA_MS, IPC_SHARE = 1.5, 0.3, 0.5
_CONSUMER = "import sys; from reelwire.commands.bench_payload import consume; consume(sys.argv[1], int(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: rounds, and sizes in bytes, of which the first is held against the bounds."""

    rounds: int = 200
    sizes: tuple[int, ...] = SIZES


def run(plan: Plan) -> Report:
    """Measure each size.

    Raises:
        ReelwireError: there is no shared memory here, or the other process didn't answer.
    """
    try:
        pool = segments.Pool(POOL_BYTES)
    except segments.MemoryUnavailableError as error:
        raise ReelwireError(str(error.strerror or error)) from error
    load = load_before()
    crossing_s = 2 * sum(plan.sizes) / COPIED_PER_S + len(plan.sizes) * TURNS_S
    expected = f"about {math.ceil((plan.rounds + WARM_UP) * crossing_s)} s on an idle machine"
    sizes = phases("payload", expected, plan.sizes, lambda nbytes: f"{nbytes} bytes, {plan.rounds} rounds")
    try:
        with _consumer() as socket:
            times = {nbytes: _measured(pool, socket, nbytes, plan.rounds) for nbytes in sizes}
    finally:
        pool.close()
    return _report(plan, times, load)


def consume(endpoint: str, parent_pid: int) -> None:
    """Serve as the other process: answer each tensor with one byte, made of bytes from all over it."""
    import zmq

    from ..workers.supervisor import die_with_parent

    die_with_parent(parent_pid)
    reader = segments.Reader()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(endpoint)
        socket.send(b"\1")
        while True:
            frames = socket.recv_multipart(copy=False)
            (message,) = wire.decode([frame.buffer for frame in frames], wire.TO_BROKER, wire.Limits()).messages
            assert isinstance(message, TaskDone)
            ref = message.outputs["frames"].tensors["frames"]
            place = ref.place
            view = place.buffer if isinstance(place, Inline) else reader.view(place, ref.nbytes)
            content = np.frombuffer(view, np.uint8)
            socket.send(_answer(content))
            del content, view, place, ref, message, frames  # a message's memory goes back after the answer


@contextmanager
def _consumer() -> Iterator[zmq.Socket[bytes]]:
    import zmq

    with tempfile.TemporaryDirectory(prefix="reelwire-") as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/payload"
        with context.socket(zmq.PAIR) as socket:
            socket.linger = 0
            socket.rcvtimeo = ANSWER_LIMIT_MS
            socket.bind(endpoint)
            with helper(_CONSUMER, endpoint):
                try:
                    socket.recv()
                    yield socket
                except zmq.Again:
                    raise ReelwireError(f"the other process didn't answer within {ANSWER_LIMIT_MS // 1000} s") from None


def _measured(pool: segments.Pool, socket: zmq.Socket[bytes], nbytes: int, rounds: int) -> dict[Way, list[float]]:
    """Seconds of each turn of the three."""
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    expected = _answer(source)
    target = np.empty_like(source)

    def shared() -> bytes:
        piece = pool.take(nbytes)
        assert piece is not None, "the pool has room for one piece"
        np.copyto(np.frombuffer(piece.view, np.uint8), source)
        answer = _asked(socket, TensorRef("uint8", (nbytes,), piece.place))
        pool.give_back(piece.use)
        return answer

    def ipc() -> bytes:
        return _asked(socket, tensors.from_array(source))

    def copy() -> bytes:
        np.copyto(target, source)
        return expected

    turns: dict[Way, Callable[[], bytes]] = {"shared": shared, "ipc": ipc, "copy": copy}
    times: dict[Way, list[float]] = {way: [] for way in turns}
    for number in range(WARM_UP + rounds):
        for way, turn in turns.items():
            began = time.perf_counter()
            answer = turn()
            took = time.perf_counter() - began
            if answer != expected:
                raise ReelwireError(f"{way}: the other process has read other bytes")
            if number >= WARM_UP:
                times[way].append(took)
    return times


def _answer(content: NDArray[np.uint8]) -> bytes:
    """One byte that tells whether it is the same tensor: of every 64 KiB one, and the last."""
    return bytes(((int(content[::LOOK_BYTES].sum(dtype=np.int64)) + int(content[-1])) % 256,))


def _asked(socket: zmq.Socket[bytes], ref: TensorRef) -> bytes:
    artifact = Artifact(tensors={"frames": ref})
    message = TaskDone("session", "decode", 1, 1, 0, {"frames": artifact}, {}, 0.0)
    socket.send_multipart(wire.encode(message, 1), copy=False)
    return socket.recv()


def _report(plan: Plan, times: dict[int, dict[Way, list[float]]], load: float) -> Report:
    spreads = {nbytes: {way: Spread.of(taken) for way, taken in by.items()} for nbytes, by in times.items()}
    medians = {nbytes: {way: 1000 * spread.p50 for way, spread in by.items()} for nbytes, by in spreads.items()}
    rows = [
        (
            nbytes,
            way,
            len(taken),
            medians[nbytes][way],
            1000 * spreads[nbytes][way].p90,
            medians[nbytes][way] / medians[nbytes]["copy"],
            medians[nbytes][way] / medians[nbytes]["ipc"],
        )
        for nbytes, by in times.items()
        for way, taken in by.items()
    ]
    largest = medians[plan.sizes[0]]
    name = f"{plan.sizes[0]} bytes through shared memory"
    copied, half = COPY_SHARE * largest["copy"] + EXTRA_MS, IPC_SHARE * largest["ipc"]
    shared = next(at for at, row in enumerate(rows) if row[:2] == (plan.sizes[0], "shared"))
    beside = f"{name}, ms; {COPY_SHARE} x a copy + {EXTRA_MS} ms"
    bounds = [
        Bound(beside, largest["shared"], copied, "most", 0.0, shared, "p50_ms"),
        Bound(f"{name}, ms; half of ipc", largest["shared"], half, "most", 0.0, shared, "p50_ms"),
    ]
    title = f"Payload: a tensor to another process and one byte back, {plan.rounds} rounds after {WARM_UP}"
    note = f"load of the machine before: {load:.2f}"
    return Report("payload", title, COLUMNS, rows, bounds, [note], asked=asked_for(plan), load=load)
