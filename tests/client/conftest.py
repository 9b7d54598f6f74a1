"""A client's core on a test bench: everything it does is kept, and the test turns its clock."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire.client_core import ClientCore
from reelwire.client_view import SessionView
from reelwire.messages import Artifact

CONTROL = Artifact({"keys": ["w"]})
TIMING = m.ChunkTiming(0.0, 0.0, None, {})


class Rig:
    """A core with everything that it did so far."""

    def __init__(self) -> None:
        self.core = ClientCore("0.1.0", "me")
        self.now = 100.0
        self.sent: list[m.ClientMessage] = []
        self.attachments: list[int] = []
        self.done: dict[int, e.Done] = {}
        self.delivered: list[e.Delivery] = []
        self.reconnects = 0
        self.stopped = False
        self.calls = 0

    def feed(self, event: e.Event) -> None:
        """Hand an event in, and check the invariants."""
        for action in self.core.handle(event):
            match action:
                case e.Send(attachment=attachment, message=message):
                    self.sent.append(message)
                    self.attachments.append(attachment)
                case e.Done(call=call):
                    assert call not in self.done, "a call is answered once"
                    self.done[call] = action
                case e.Delivery():
                    self.delivered.append(action)
                case e.Reconnect():
                    self.reconnects += 1
                case e.Stop():
                    self.stopped = True
                case e.Changed():
                    pass
        self.core.check()

    def hear(self, message: m.ToClient, attachment: int = 7) -> None:
        """A message of the broker arrives."""
        self.feed(e.Received(self.now, attachment, message))

    def tick(self, seconds: float = 0.0) -> None:
        """Time goes by."""
        self.now += seconds
        self.feed(e.Tick(self.now))

    def call(self, kind: Any, *args: Any, **more: Any) -> int:
        """A call of the application; its number."""
        self.calls += 1
        self.feed(kind(self.now, self.calls, *args, **more))
        return self.calls

    def attach(self, **more: Any) -> None:
        """The broker answers the hello."""
        self.feed(e.Connect(self.now))
        self.hear(m.Welcome("me-1", more.get("version", "0.1.9"), 1.0, 3, {}))

    def open(self, chunks: int = 5, limit: int = 2, **more: Any) -> SessionView:
        """A session is opened and ready."""
        call = self.call(e.Open, "k", "toy", chunks, **more)
        self.hear(m.SessionOpened("k", "s", "token"))
        self.hear(m.SessionChanged("s", "ready", limit))
        assert self.done[call].value == "s"
        return self.core.sessions["s"]

    def chunk(self, index: int, source: m.ControlSource = "explicit", revision: int = 0, chunks: int = 5) -> None:
        """A chunk arrives."""
        applied = m.Applied(source, CONTROL, revision)
        self.hear(m.Chunk("s", index, {}, applied, {}, TIMING, index == chunks - 1))

    def take(self) -> int | None:
        """The application asks for the next chunk; its index."""
        before = len(self.delivered)
        self.feed(e.Take(self.now, "s"))
        return self.delivered[-1].chunk.index if len(self.delivered) > before else None

    def said(self, kind: type) -> list[Any]:
        """What was sent of that kind, oldest first."""
        return [message for message in self.sent if isinstance(message, kind)]

    def error(self, call: int, kind: type[Exception], text: str = "") -> Any:
        """The error that a call was answered with."""
        error = self.done[call].error
        assert type(error) is kind
        assert text in str(error)
        return error


@pytest.fixture
def rig() -> Rig:
    """A client that isn't connected."""
    return Rig()


@pytest.fixture
def attached(rig: Rig) -> Rig:
    """A client that the broker knows as attachment 7."""
    rig.attach()
    return rig
