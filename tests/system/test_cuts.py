"""Connections between a group's ranks and its broker that break, while all processes live."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from reelwire import Client

LIMIT_S = 60.0
FLAGS = ("--pipeline", "emulated", "--jobs", "emulated", "--job-option", "step_s=0.1")


class Relay:
    """Passes connections on to a broker, until they are cut; new ones are passed on again."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Break all connections that there are."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Pass nothing on any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(LIMIT_S)
        self.cut()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            with self._lock:
                self._pairs.append((near, far))
            ends = [threading.Thread(target=_pump, args=pair) for pair in ((near, far), (far, near))]
            self._threads += ends
            for thread in ends:
                thread.start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass on what comes until one side ends; then end both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()


@contextlib.contextmanager
def relayed(stack: Any) -> Iterator[Relay]:
    """A way to the broker that can be cut; all processes end before it does."""
    relay = Relay(stack.endpoint)
    try:
        yield relay
    finally:
        try:
            stack.end()
        finally:
            relay.close()


def until_back(broker: Any, client: Client, count: int) -> None:
    """Wait until ranks have taken their places back so many times, and their group was whole again then."""
    give_up = time.monotonic() + LIMIT_S
    while broker.log.read_text().count("rank_back") < count or not broker.log.read_text().count("group_whole_again"):
        assert time.monotonic() < give_up, broker.log.read_text()
        client.status()  # each look is a question and its answer


@pytest.mark.parametrize("ranks", [(1,), (0,), (0, 1)])
def test_groups_04_a_short_cut_costs_no_group(stack: Any, take: Any, ranks: tuple[int, ...]) -> None:
    """The job goes on in its first attempt; a session lives on unless its leader's own connection was cut."""
    broker = stack.broker()
    with relayed(stack) as relay:
        workers = []
        for rank in (1, 0):
            place = ("--group", "edit", "--rank", str(rank), "--world", "2")
            endpoint = relay.endpoint if rank in ranks else stack.endpoint
            workers.append(stack._start("worker", "--broker", endpoint, *place, *FLAGS))
        client = stack.client()
        job = client.submit_edit("emulated", seed=4, steps=60)
        for event in job.progress():
            if event.state == "running" and event.step > 2:
                break
        with client.open_session("emulated", seed=1, chunks=500) as session:
            session.press("w")
            take(session, 2)
            relay.cut()
            until_back(broker, client, len(ranks))
            if 0 not in ranks:
                take(session, 4)
        with client.open_session("emulated", seed=1, chunks=3) as session:
            session.press("w")
            take(session, 3)
        job.result(timeout=LIMIT_S)
        assert job.status().attempt == 1
        assert all(worker.process.poll() is None for worker in workers)
