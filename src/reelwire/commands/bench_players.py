"""Who plays in `bench schedule`: a client that reacts to frames, one that holds a key, one that changes its keys.

Each session is played by a thread and a connection of its own, so that no player's frames wake another's thread.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..controls import Control

if TYPE_CHECKING:
    from .. import Chunk, Client, Session
    from ..parts import ChunkTiming, ControlBinding

Player = Literal["reacting", "holding", "changing"]

SWITCH_S = 0.0005
"""How long a thread of this process may keep the others waiting for the interpreter: far below what is measured."""
CHANGE_S = (0.2, 0.5)
"""Bounds of the time between two changes of the keys."""
HELD = ("w", "a", "s", "d")
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """One session to play.

    Attributes:
        pipeline: name of the stream.
        player: how the keys are played.
        binding: of the session's controls.
        chunks: its length.
        seed: of what is played at random.
        start_s: when it starts, in seconds after the others of its run.
    """

    pipeline: str
    player: Player
    binding: ControlBinding
    chunks: int
    seed: int
    start_s: float


@dataclass(slots=True)
class Played:
    """What was measured of one session, chunk by chunk.

    Attributes:
        timings: by the broker's clock.
        changes_s: for each chunk, seconds from the changes that it is the first to show until its frames were here.
    """

    timings: list[ChunkTiming] = field(default_factory=list)
    changes_s: list[tuple[float, ...]] = field(default_factory=list)

    def note(self, chunk: Chunk) -> None:
        """Keep the numbers of a chunk."""
        self.timings.append(chunk.timing)
        self.changes_s.append(chunk.change_to_frame_s)


def play(clients: Sequence[Client], parts: Sequence[Part]) -> list[Played]:
    """Play all parts at once, each on a client of its own.

    Raises:
        ReelwireError: the first thing that went wrong in any of them.
    """
    played = [Played() for _ in parts]
    errors: list[BaseException] = []
    began = time.monotonic() + 0.05

    def run(client: Client, part: Part, mine: Played) -> None:
        try:
            _until(began + part.start_s)
            _play(client, part, mine)
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=each, name=f"player-{at}", daemon=True)
        for at, each in enumerate(zip(clients, parts, played, strict=True))
    ]
    with undisturbed():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return played


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep this process from disturbing what it measures: no collection of garbage, short turns of its threads."""
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        if collects:
            gc.enable()


def _play(client: Client, part: Part, played: Played) -> None:
    players: dict[Player, Callable[[Session, Part, Played], None]] = {
        "reacting": _reacting,
        "holding": _holding,
        "changing": _changing,
    }
    # Nobody waits until the session is ready: what the first chunk is to show is known before.
    with client.open_session(
        part.pipeline, chunks=part.chunks, control_binding=part.binding, wait_ready=False, timeout=LIMIT_S
    ) as session:
        players[part.player](session, part, played)


def _reacting(session: Session, _part: Part, played: Played) -> None:
    """The control of a chunk is known only when the chunk before was seen."""
    control = Control(keys={HELD[0]})
    session.submit(None, control, LIMIT_S)
    while (chunk := session.next_chunk(LIMIT_S)) is not None:
        if not chunk.is_last:
            session.submit(chunk.index + 1, control, LIMIT_S)
        played.note(chunk)


def _holding(session: Session, _part: Part, played: Played) -> None:
    session.press(HELD[0])
    while (chunk := session.next_chunk(LIMIT_S)) is not None:
        played.note(chunk)


def _changing(session: Session, part: Part, played: Played) -> None:
    """Another key is held from random moments on; one is held always."""
    dice = random.Random(part.seed)  # noqa: S311
    count = 0
    session.set_keys({HELD[0]})
    change_at = time.monotonic() + dice.uniform(*CHANGE_S)
    while True:
        try:
            chunk = session.next_chunk(max(0.0, change_at - time.monotonic()))
        except TimeoutError:
            count += 1
            session.set_keys({HELD[count % len(HELD)]})
            change_at = time.monotonic() + dice.uniform(*CHANGE_S)
            continue
        if chunk is None:
            return
        played.note(chunk)


def _until(at: float) -> None:
    never = threading.Event()
    while (left := at - time.monotonic()) > 0:
        never.wait(left)
