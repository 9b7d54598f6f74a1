"""How long opening a session may take: its timeout is for all of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from reelwire import AsyncClient, BrokerUnreachable, Client, RequestError
from reelwire import messages as m
from reelwire.client_request import session_request

from .event_loops import LIMIT_S, run

StandIn = Any  # of conftest.py


def lose(stand_in: StandIn) -> None:
    """End the connection; no further hello is answered."""
    stand_in.silent.add(m.ClientHello)
    stand_in.say(m.Goodbye())
    stand_in.next(m.ClientHello)


def test_connecting_again_counts(stand_in: StandIn) -> None:
    """The caller's limit is a TimeoutError; the client's own says that nobody answers."""
    with Client(stand_in.endpoint, connect_timeout_s=LIMIT_S) as client:
        stand_in.next(m.ClientHello)
        lose(stand_in)
        with pytest.raises(TimeoutError, match="within the time limit"):
            client.open_session("toy", chunks=1, timeout=0.05)
        with pytest.raises(RequestError, match="timeout"):
            client.open_session("toy", chunks=1, timeout=-1)
        client._connect_timeout_s = 0.05
        with pytest.raises(BrokerUnreachable, match=r"within 0\.05 s"):
            client.open_session("toy", chunks=1, timeout=LIMIT_S)
        with pytest.raises(BrokerUnreachable, match=r"within 0\.05 s"):
            client.open_session("toy", chunks=1)


def test_connecting_again_counts_for_event_loops(stand_in: StandIn) -> None:
    """The same, awaited."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint, connect_timeout_s=LIMIT_S) as client:
            stand_in.next(m.ClientHello)
            lose(stand_in)
            with pytest.raises(TimeoutError, match="within the time limit"):
                await client.open_session("toy", chunks=1, timeout=0.05)
            client._connect_timeout_s = 0.05
            with pytest.raises(BrokerUnreachable, match=r"within 0\.05 s"):
                await client.open_session("toy", chunks=1, timeout=LIMIT_S)

    run(work())


def test_reading_the_picture_counts(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent when it has taken the whole time, and what is left is for the broker's answer."""
    late: list[float] = [0.0]
    asked: list[Any] = []
    monkeypatch.setattr("reelwire.client_door.time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0]))

    def slow(*given: Any, **more: Any) -> Any:
        late[0] += 60.0
        return session_request(*given, **more)

    monkeypatch.setattr("reelwire.client.session_request", slow)
    stand_in.heartbeat_s = 1000.0
    with Client(stand_in.endpoint) as client:
        with pytest.raises(TimeoutError):
            client.open_session("toy", chunks=1, timeout=50.0)
        ask = client._link.call

        def noted(event: Any, limit_s: float | None) -> object:
            asked.append(limit_s)
            return ask(event, limit_s)

        monkeypatch.setattr(client._link, "call", noted)
        client.open_session("toy", chunks=1, timeout=100.0)
        assert 0 < asked[-1] <= 40.0
    assert stand_in.opened == 1


def test_reading_the_picture_counts_for_event_loops(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads isn't waited for."""
    read = threading.Event()

    def slow(*given: Any, **more: Any) -> Any:
        read.wait(LIMIT_S)
        return session_request(*given, **{**more, "image": None})

    monkeypatch.setattr("reelwire.client_async.session_request", slow)

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            try:
                with pytest.raises(TimeoutError, match="within the time limit"):
                    await client.open_session("toy", chunks=1, image="a.png", timeout=0.05)
            finally:
                read.set()

    run(work())
    assert stand_in.opened == 0
