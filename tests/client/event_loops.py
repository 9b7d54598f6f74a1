"""What tests of the SDK for event loops share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

StandIn = Any  # of conftest.py
LIMIT_S = 10.0
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run in an event loop of its own, in bounded time."""

    async def bounded() -> T:
        async with asyncio.timeout(3 * LIMIT_S):
            return await work

    return asyncio.run(bounded())


async def heard(stand_in: StandIn, kind: type) -> Any:
    """The next message of that kind that the broker hears, while the event loop goes on."""
    return await asyncio.to_thread(stand_in.next, kind)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reelwire-client"]
