"""The sessions that live at one stage, each with a state of its own."""

from __future__ import annotations

from typing import Generic, TypeVar

State = TypeVar("State")


class Sessions(Generic[State]):
    """Session id -> what a stage keeps for it, from `open` to `close`."""

    def __init__(self) -> None:
        """Start with no session."""
        self._states: dict[str, State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, session: object) -> bool:
        return session in self._states

    def __getitem__(self, session: str) -> State:
        """The state of a session.

        Raises:
            KeyError: it isn't there: never initialized, or released.
        """
        try:
            return self._states[session]
        except KeyError:
            raise KeyError(f"session {session!r} isn't initialized here") from None

    def open(self, session: str, state: State) -> None:
        """Take a session in.

        Raises:
            ValueError: it is here already.
        """
        if session in self._states:
            raise ValueError(f"session {session!r} is initialized here already")
        self._states[session] = state

    def close(self, session: str) -> bool:
        """Forget a session; False when it wasn't there, which is no error."""
        return self._states.pop(session, None) is not None
