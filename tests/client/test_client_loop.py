"""The client's I/O thread where things go wrong: a broker that doesn't read, a socket that can't be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from reelwire import BrokerUnreachable, Client, Control, SessionFailed
from reelwire import messages as m
from reelwire.client_loop import Link, check_endpoint

StandIn = Any  # of conftest.py
LIMIT_S = 10.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reelwire-client"]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://host.example:65535", "tcp://[::1]:7461",
                                      "ipc:///run/reelwire/broker", "ipc://@abstract"])  # fmt: skip
def test_endpoints_of_these_forms_are_accepted(endpoint: str) -> None:
    """Addresses, names, IPv6 in brackets, and paths."""
    check_endpoint(endpoint)


def test_streaming_35_a_broker_that_does_not_read_costs_bounded_memory(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call ever blocks on the socket; when too much waits the connection is given up, and made again."""
    monkeypatch.setattr("reelwire.client_loop.OUTBOX_BYTES_MAX", 1 << 20)
    control = Control(poses=np.tile(np.eye(4), (1000, 1, 1)))
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=5)
        reads = threading.Event()
        stand_in.before = lambda message: reads.wait(LIMIT_S) if isinstance(message, m.SubmitControl) else None
        with pytest.raises(SessionFailed, match="doesn't read what it is sent"):  # noqa: PT012  # which one is its affair
            for _ in range(3000):
                session.submit(None, control)
        reads.set()
        assert client.status() == {"workers": 0}


def test_streaming_35_what_had_to_wait_is_sent_in_order(stand_in: StandIn) -> None:
    """A broker that reads late gets everything, in the order in which it was said."""
    control = Control(poses=np.tile(np.eye(4), (1000, 1, 1)))
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=5)
        reads = threading.Event()
        stand_in.before = lambda message: reads.wait(LIMIT_S) if isinstance(message, m.SubmitControl) else None
        for _ in range(200):
            session.submit(None, control)
            session.tap("w")
        reads.set()
        assert [stand_in.next(m.SetKeys).keys.revision for _ in range(200)] == list(range(1, 201))


class Nosy:
    """The socket, with something that happens once while a thread of the application sends over it."""

    def __init__(self, client: Client) -> None:
        self.dealer: Any = client._link._dealer
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        link: Any = client._link
        link._dealer = self

    def send(self, *args: Any) -> None:
        """Send, and do what is to be done before and after it."""
        while self.before:
            self.before.pop()()
        self.dealer.send(*args)
        while self.after:
            self.after.pop()()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dealer, name)


def test_what_is_small_does_not_wait_for_the_io_thread(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that says it sends it: it leaves although nobody wakes the other one."""
    stand_in.heartbeat_s = 1000.0
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=5)
        with monkeypatch.context() as patched:
            patched.setattr(client._link._wake, "set", lambda: None)
            session.tap("w")
            assert stand_in.next(m.SetKeys).keys.revision == 1


def test_no_message_waits_for_a_heartbeat_when_many_threads_send(stand_in: StandIn) -> None:
    """Whichever thread used the socket last, the I/O thread learns of what came meanwhile."""
    stand_in.heartbeat_s = 1000.0
    errors: list[BaseException] = []
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=10)

        def run(work: Callable[[], object], times: int) -> None:
            try:
                for _ in range(times):
                    work()
            except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
                errors.append(error)

        def play() -> None:
            for index in range(10):
                session.submit(index, Control(keys={"w"}), LIMIT_S)
                chunk = session.next_chunk(LIMIT_S)
                assert chunk is not None
                assert chunk.index == index

        work = [(lambda: session.tap("w"), 400), (lambda: session.tap("a"), 400), (play, 1)]
        asks = [(lambda: client.status(LIMIT_S), 200), (lambda: session.metrics(LIMIT_S), 200)]
        running = [threading.Thread(target=run, args=each) for each in (*work, *asks)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not errors
        revisions = [stand_in.next(m.SetKeys).keys.revision for _ in range(800)]
        assert revisions == sorted(revisions)


def test_what_is_said_while_something_is_sent_comes_after_it(stand_in: StandIn) -> None:
    """Garbage may be collected while a thread sends, and a finalizer in that thread say something more."""
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=5)
        nosy = Nosy(client)
        nosy.before.append(lambda: session.tap("a"))
        session.tap("w")
        assert [stand_in.next(m.SetKeys).keys.revision for _ in range(2)] == [1, 2]


def test_an_interrupt_while_something_is_sent_leaves_the_connection_whole(stand_in: StandIn) -> None:
    """The handler of a signal may raise in the thread that sends; what was sent is not sent again."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=5)
        nosy = Nosy(client)
        nosy.after.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.tap("w")
        session.tap("w")
        assert client.status() == {"workers": 0}
        assert [stand_in.next(m.SetKeys).keys.revision for _ in range(2)] == [1, 2]


def test_whoever_waits_is_told_when_there_can_be_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that can't be made ends the client with the reason; nothing hangs, no thread is left."""

    def refused(*_: object) -> None:
        raise zmq.ZMQError(24)

    monkeypatch.setattr(Link, "_connected", refused)
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1 broke: Too many open files"):
        Client("tcp://127.0.0.1:1")
    for thread in threads():
        thread.join(LIMIT_S)
    assert not threads()


def test_whoever_waits_is_told_when_the_thread_has_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own in the thread isn't swallowed, and still nobody is left waiting."""
    seen: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))

    def faulty(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(Link, "_turn", faulty)
    with pytest.raises(BrokerUnreachable, match="broke: a fault"):
        Client("tcp://127.0.0.1:1")
    for thread in threads():
        thread.join(LIMIT_S)
    assert [type(error) for error in seen] == [ZeroDivisionError]
