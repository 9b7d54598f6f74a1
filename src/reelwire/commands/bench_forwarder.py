"""A bare ROUTER that passes every message on to the next of three workers, and peers that are as lean as can be.

It is what no broker in this language can be faster than: one message per hop, nothing is looked at but who it came from.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

STAGES = 3
MESSAGE_BYTES = 120
"""About what a task of a no-op takes."""
GO_LIMIT_MS = 20_000


def forward(endpoint: str, clients: int, parent_pid: int) -> None:
    """Serve as the forwarder, in a process of its own, until one of its peers has left."""
    import zmq

    from ..workers.supervisor import die_with_parent

    die_with_parent(parent_pid)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.router_mandatory = True
        router.linger = 0
        router.bind(endpoint)
        routes = [router.recv_multipart()[0] for _ in range(STAGES + clients)]
        for route in routes:
            router.send_multipart((route, b""))
        onward = {_worker(stage): _worker(stage + 1) for stage in range(STAGES - 1)}
        onward |= {route: _worker(0) for route in routes if route not in map(_worker, range(STAGES))}
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        while True:
            poller.poll()
            try:
                while True:
                    route, message = router.recv_multipart(zmq.NOBLOCK)
                    # From the last worker it goes back to the client whose name it begins with.
                    router.send_multipart((onward.get(route, message[:2]), message), zmq.NOBLOCK)
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                return  # peers leave at the end of a turn only, with messages on their way


class ForwarderPeers:
    """Three workers and some clients of a forwarder, in one thread.

    Args:
        context: of the sockets.
        endpoint: where the forwarder listens.
        clients: how many.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, clients: int) -> None:
        """Connect, and wait until all are.

        Raises:
            zmq.Again: there is no forwarder.
        """
        import zmq

        self._noblock, self._again = int(zmq.NOBLOCK), zmq.Again
        self._poller = zmq.Poller()
        self._workers = [self._connected(context, endpoint, _worker(stage)) for stage in range(STAGES)]
        self._clients = {self._connected(context, endpoint, _client(number)): number for number in range(clients)}
        for socket in (*self._workers, *self._clients):
            socket.rcvtimeo = GO_LIMIT_MS
            socket.recv()

    def _connected(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, route: bytes) -> zmq.Socket[bytes]:
        import zmq

        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.routing_id = route
        socket.connect(endpoint)
        socket.send(b"")
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def start(self, in_flight: int) -> None:
        """Let so many messages go around from now on."""
        sockets = list(self._clients)
        for number in range(in_flight):
            socket = sockets[number % len(sockets)]
            name = _client(self._clients[socket])
            socket.send_multipart((name + b"x" * (MESSAGE_BYTES - len(name)),))

    def run_for(self, seconds: float) -> tuple[float, int]:
        """Pass messages on; how long that took, in seconds, and how many came back to a client."""
        began, came = time.monotonic(), 0
        while (now := time.monotonic()) < began + seconds:
            for socket, _ in self._poller.poll(20):
                is_client = socket in self._clients
                try:
                    while True:
                        frames = socket.recv_multipart(self._noblock)
                        socket.send_multipart(frames)
                        came += is_client
                except self._again:
                    pass
        return now - began, came

    def close(self) -> None:
        """Close the sockets."""
        for socket in (*self._workers, *self._clients):
            socket.close()


def _worker(stage: int) -> bytes:
    return b"w%d" % stage


def _client(number: int) -> bytes:
    return bytes((ord("c"), number))
