"""The link between ranks: whom it hears, whom it doesn't, and how it comes back."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from reelwire import wire
from reelwire.errors import ConfigError
from reelwire.group_messages import Decision, Farewell, Have, Outcome, RankHello
from reelwire.workers import link as module
from reelwire.workers.link import LIMITS, LeaderLink, Link, RankLink

LIMIT_S = 30.0
SECRET = b"s" * 32
EPOCH = 7 << 32 | 3


class Ends:
    """A leader's end, and others that connect to it."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.leader = LeaderLink(self.context, "127.0.0.1", SECRET, EPOCH, 4)
        self.ranks: list[RankLink] = []
        self._strangers: list[Any] = []

    def rank(self, number: int, secret: bytes = SECRET, epoch: int = EPOCH) -> RankLink:
        """A rank that has said hello."""
        link = RankLink(self.context, self.leader.endpoint, epoch)
        self.ranks.append(link)
        link.send(RankHello(epoch, secret, number))
        return link

    def stranger(self, routing_id: bytes = b"") -> Any:
        """A socket that says what the test wants."""
        stranger = self.context.socket(zmq.DEALER)
        if routing_id:
            stranger.setsockopt(zmq.ROUTING_ID, routing_id)
        stranger.connect(self.leader.endpoint)
        self._strangers.append(stranger)
        return stranger

    def close(self) -> None:
        """Everything."""
        self.leader.close()
        for rank in self.ranks:
            rank.close()
        for stranger in self._strangers:
            stranger.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    """All closed in the end."""
    made = Ends()
    yield made
    made.close()


def heard(link: Link, count: int = 1) -> list[Any]:
    """The next messages, as its loop would read them."""
    poller = zmq.Poller()
    poller.register(link.descriptor, zmq.POLLIN)
    got: list[Any] = []
    until = time.monotonic() + LIMIT_S
    while len(got) < count:
        got += link.receive()
        if len(got) < count and not link.readable:
            assert time.monotonic() < until, f"only {got} came"
            poller.poll(100)
    return got


def test_groups_02_decisions_reach_all_ranks_and_outcomes_the_leader(ends: Ends) -> None:
    """Each message comes from the rank whose hello came over that connection."""
    ranks = [ends.rank(number) for number in (1, 2, 3)]
    greeted = heard(ends.leader, 3)
    assert sorted(rank for rank, _ in greeted) == [1, 2, 3]
    ends.leader.send(Decision(1, "run", sequence=5))
    for number, link in enumerate(ranks, 1):
        assert heard(link) == [(0, Decision(1, "run", sequence=5))]
        link.send(Outcome(1))
        link.send(Have(6, lacks=True))
        assert heard(ends.leader, 2) == [(number, Outcome(1)), (number, Have(6, lacks=True))]
    assert not ends.leader.dropped


def test_strangers_are_counted_and_forgotten(ends: Ends) -> None:
    """A wrong secret, a rank that there isn't, the leader's own number, no hello at all: none of it is heard."""
    rank = ends.rank(1)
    heard(ends.leader)
    for number, secret in ((2, b"wrong"), (4, SECRET), (0, SECRET), (-1, SECRET), (2, b"")):
        ends.rank(number, secret).send(Outcome(1))
    silent = RankLink(ends.context, ends.leader.endpoint, EPOCH)
    ends.ranks.append(silent)
    silent.send(Outcome(1))
    until = time.monotonic() + LIMIT_S
    while ends.leader.dropped["stranger"] < 11:
        assert time.monotonic() < until, ends.leader.dropped
        assert list(ends.leader.receive()) == []
    ends.leader.send(Farewell("bye"))
    assert heard(rank) == [(0, Farewell("bye"))]
    assert not any(list(link.receive()) for link in ends.ranks[1:])


def test_garbage_and_other_epochs_are_counted(ends: Ends) -> None:
    """Bytes that are no message, messages for others, and words of an epoch that is over."""
    stranger = ends.stranger()
    hello = RankHello(EPOCH, SECRET, 1)
    for frames in ([b"\xc1"], [b""], [b"GET / HTTP/1.1", b"\r\n"], wire.encode(Decision(1, "run"), EPOCH)):
        stranger.send_multipart(frames)
    for epoch in (0, EPOCH - 1, EPOCH + 1):
        stranger.send_multipart(wire.encode(hello, epoch))
        stranger.send_multipart(wire.encode(RankHello(EPOCH - 1, SECRET, 1), EPOCH))
    stranger.send_multipart(wire.encode(hello, EPOCH))
    assert heard(ends.leader) == [(1, hello)]
    assert ends.leader.dropped == {"malformed": 4, "epoch": 3, "stranger": 3}


def test_what_is_too_large_ends_its_connection_alone(ends: Ends) -> None:
    """Nobody makes the leader hold more than a decision takes."""
    rank = ends.rank(1)
    heard(ends.leader)
    stranger = ends.stranger()
    stranger.send(b"x" * (LIMITS.part_bytes_max + 1))
    rank.send(Outcome(9))
    assert heard(ends.leader) == [(1, Outcome(9))]


def test_the_newest_hello_of_a_rank_wins(ends: Ends) -> None:
    """What the older connection still says isn't heard, and nothing is said to it."""
    older = ends.rank(2)
    heard(ends.leader)
    newer = ends.rank(2)
    heard(ends.leader)
    older.send(Outcome(1))
    newer.send(Outcome(2))
    assert heard(ends.leader) == [(2, Outcome(2))]
    ends.leader.send(Decision(3, "step"))
    assert heard(newer) == [(0, Decision(3, "step"))]
    assert list(older.receive()) == []


def test_one_connection_is_one_rank(ends: Ends) -> None:
    """A rank can't speak for another one."""
    rank = ends.rank(1)
    heard(ends.leader)
    rank.send(RankHello(EPOCH, SECRET, 2))
    rank.send(Outcome(1))
    assert heard(ends.leader) == [(1, Outcome(1))]
    assert ends.leader.dropped["stranger"] == 1


def test_a_rank_whose_connection_broke_is_known_by_its_route(ends: Ends) -> None:
    """It comes back under the same one, and nothing needs to be said again."""
    stranger = ends.stranger(b"\1" + os.urandom(15))
    route = stranger.getsockopt(zmq.ROUTING_ID)
    stranger.send_multipart(wire.encode(RankHello(EPOCH, SECRET, 1), EPOCH))
    heard(ends.leader)
    stranger.close(linger=0)
    again = ends.stranger(route)
    again.send_multipart(wire.encode(Outcome(4), EPOCH))
    assert heard(ends.leader) == [(1, Outcome(4))]
    ends.leader.send(Decision(5, "step"))
    assert again.poll(LIMIT_S * 1000)
    assert wire.decode(again.recv_multipart(), wire.TO_RANK, LIMITS).messages == (Decision(5, "step"),)


class Line:
    """A cable between a rank and its leader: what goes over a connection can be made to end nowhere, without a word."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._far = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.made = 0  # connections
        self._ends: dict[socket.socket, socket.socket] = {}
        self._cut: list[socket.socket] = []
        self._lock = threading.Lock()
        self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def cut(self) -> None:
        """All connections that there are; new ones can be made."""
        with self._lock:
            self._cut += self._ends
            self._ends.clear()

    def close(self) -> None:
        """End its thread, and close everything."""
        self._wake[1].send(b"1")
        self._thread.join(LIMIT_S)
        for each in (self._listener, *self._wake, *self._ends, *self._cut):
            each.close()

    def _serve(self) -> None:
        while True:
            with self._lock:
                watched = [self._wake[0], self._listener, *self._ends]
            ready, _, _ = select.select(watched, [], [], 0.05)
            if self._wake[0] in ready:
                return
            with self._lock:
                if self._listener in ready:
                    near, far = self._listener.accept()[0], socket.create_connection(self._far)
                    self._ends |= {near: far, far: near}
                    self.made += 1
                for each in [each for each in ready if each in self._ends]:
                    self._pass_on(each)

    def _pass_on(self, each: socket.socket) -> None:
        other = self._ends.get(each)
        if other is None:
            return
        try:
            data = each.recv(65536)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (each, other):
                del self._ends[end]
                end.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that give a silent connection up within half a second; to be asked for before they are made."""
    monkeypatch.setattr(module, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(module, "SILENCE_MS", 500)


@pytest.mark.usefixtures("hasty")
def test_groups_02_a_connection_that_ended_without_a_word_is_made_again(ends: Ends) -> None:
    """Both ends notice by themselves; the rank is known by its route, and what is said from then on arrives."""
    line = Line(ends.leader.endpoint)
    try:
        rank = RankLink(ends.context, line.endpoint, EPOCH)
        ends.ranks.append(rank)
        rank.send(RankHello(EPOCH, SECRET, 1))
        assert heard(ends.leader) == [(1, RankHello(EPOCH, SECRET, 1))]
        line.cut()
        until = time.monotonic() + LIMIT_S
        while line.made < 2:
            assert time.monotonic() < until, "nobody has noticed"
            list(ends.leader.receive())
        outcomes, decisions = list[Any](), list[Any]()
        while not outcomes or not decisions:  # what is said before the connection is there is lost, and said again
            assert time.monotonic() < until, ends.leader.dropped
            ends.leader.send(Decision(1, "run"))
            rank.send(Outcome(1))
            outcomes += ends.leader.receive()
            decisions += rank.receive()
        assert outcomes[0] == (1, Outcome(1))
        assert decisions[0] == (0, Decision(1, "run"))
    finally:
        line.close()


def test_each_reason_of_a_drop_is_told_once(ends: Ends) -> None:
    """However often it is dropped for."""
    stranger = ends.stranger()
    assert ends.leader.untold() == []
    for _ in range(2):
        stranger.send_multipart([b"\xc1"])
        stranger.send_multipart(wire.encode(RankHello(EPOCH, SECRET, 1), 1))
    stranger.send_multipart(wire.encode(RankHello(EPOCH, SECRET, 1), EPOCH))
    heard(ends.leader)
    assert ends.leader.untold() == ["epoch", "malformed"]
    assert ends.leader.untold() == []
    stranger.send_multipart(wire.encode(RankHello(EPOCH, b"", 2), EPOCH))
    stranger.send_multipart(wire.encode(Outcome(1), EPOCH))
    heard(ends.leader)
    assert ends.leader.untold() == ["stranger"]
    assert ends.leader.dropped == {"epoch": 2, "malformed": 2, "stranger": 1}


def test_what_nobody_takes_is_dropped_and_bounded(ends: Ends) -> None:
    """A rank that is gone, or doesn't read, holds nobody up."""
    gone = ends.rank(1)
    ends.rank(2)
    heard(ends.leader, 2)
    gone.close()
    until = time.monotonic() + LIMIT_S
    big = Decision(1, "run", session="x" * 65536)
    while not ends.leader.dropped["full"] or not ends.leader.dropped["unreachable"]:
        assert time.monotonic() < until, ends.leader.dropped
        ends.leader.send(big)


def test_a_host_that_is_not_ours_is_refused() -> None:
    """As the setting that it comes from."""
    with zmq.Context() as context:
        with pytest.raises(ConfigError, match="group_host"):
            LeaderLink(context, "192.0.2.1", SECRET, 1, 2)
        with pytest.raises(ConfigError, match="link"):
            RankLink(context, "no endpoint", 1)
