"""What one event leads to at a client: its actions, and which calls are answered. Pure."""

from __future__ import annotations

from collections import Counter

from . import client_events as e
from . import messages as m
from .errors import ReelwireError


class Desk:
    """Shared by the core and its sessions.

    Attributes:
        attachment: the number that the broker gave this connection; 0 before it did.
        calls: calls that wait for their answer, each with the id of the session that it is about, or an empty text.
        dropped: messages that were dropped, by reason.
    """

    def __init__(self) -> None:
        """Start with a clean desk."""
        self.attachment = 0
        self.calls: dict[int, str] = {}
        self.dropped: Counter[str] = Counter()
        self._actions: list[e.Action] = []

    def finish(self) -> list[e.Action]:
        """What is to be done, in order."""
        actions, self._actions = self._actions, []
        return actions

    def send(self, message: m.ClientMessage) -> None:
        """Tell the broker something."""
        self.act(e.Send(self.attachment, message))

    def done(self, call: int, value: object = None, error: ReelwireError | None = None) -> None:
        """Answer a call, unless it was answered or withdrawn."""
        if self.calls.pop(call, None) is not None:
            self.act(e.Done(call, value, error))

    def act(self, action: e.Action) -> None:
        """Any other action."""
        self._actions.append(action)

    def drop(self, reason: str) -> None:
        """Count a message that changes nothing."""
        self.dropped[reason] += 1
