"""Runs a recipe against a broker: frames into an MP4, and beside it the record that makes it again.

The MP4 is whole however the run ends: completed, failed, or stopped by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..controls import Control, KeyTrace
from ..errors import ReelwireError, SessionError
from .local import uninterrupted
from .recipe import Recipe, Record, percentiles, plain_control
from .shared import Pace, plain

if TYPE_CHECKING:
    from .. import Chunk, Client, Session
    from ..media import VideoWriter
    from ..spec import Plain, StreamSpec

AHEAD = 2
"""Controls that are handed in before the first chunk is taken: as many as a session may be ahead."""

CANCEL_S = 10.0

OnChunk = Callable[["Chunk", Record], None]


def record_stream(
    client: Client,
    spec: StreamSpec,
    recipe: Recipe,
    picture: NDArray[np.uint8] | None,
    mp4: Path,
    on_chunk: OnChunk = lambda _chunk, _record: None,
    *,
    pace: Pace = "asap",
) -> Record:
    """Stream a recipe into `mp4`, and write the record beside it.

    A `KeyboardInterrupt` ends the stream early and is not passed on: the record's state is ``stopped`` then.

    Args:
        client: connected.
        spec: of the recipe's pipeline.
        recipe: what to make.
        picture: what the recipe's image file holds, uint8 [height, width, 3].
        mp4: the file to write; the record has its name with ``.json``.
        on_chunk: called with every chunk when its frames are written.
        pace: whether the stream may run ahead of its own clock.

    Raises:
        ReelwireError: the session could not be opened, or it failed; then the MP4 and the record hold what was made, as
            they do whatever else is raised.
    """
    from ..media import VideoWriter, replacing

    record = Record(recipe, mp4.name, spec.fps, versions=versions(client), pace=pace)
    began = time.monotonic()
    failure: Exception | None = None
    try:
        with contextlib.closing(VideoWriter(mp4, spec.fps)) as writer:
            failure = _write(client, record, picture, writer, on_chunk)
    except Exception as error:  # noqa: BLE001  whatever it was, what was made is recorded before it goes on
        record.state, record.reason = "failed", str(error) or type(error).__name__
        failure = error
    except KeyboardInterrupt:  # while the session was opened or closed
        record.state, record.reason = "stopped", f"stopped after {len(record.chunks)} of {recipe.chunks} chunks"
    record.timings = _timings(record, time.monotonic() - began)
    if record.chunks:
        text = json.dumps(record.to_json(mp4.parent), indent=1, default=plain)
        with replacing(mp4.with_suffix(".json")) as part:
            part.write_text(text + "\n", encoding="utf-8")
    if failure is not None:
        if record.frames:
            failure.add_note(f"{mp4} and its record hold the {record.frames} frames so far")
        raise failure
    return record


def _write(
    client: Client, record: Record, picture: NDArray[np.uint8] | None, writer: VideoWriter, on_chunk: OnChunk
) -> ReelwireError | None:
    """Open the session and write its chunks; what it failed with, if it did after it was opened."""
    recipe, digest = record.recipe, hashlib.sha256()
    failure: ReelwireError | None = None
    with _opened(client, record, picture) as session:
        record.recipe = replace(recipe, parameters=_given(session.parameters))
        try:
            with contextlib.closing(_chunks(session, recipe)) as chunks:
                for chunk in chunks:
                    with uninterrupted():  # video and record hold whole chunks, and the same ones
                        writer.write(chunk.frames)
                        digest.update(chunk.frames.tobytes())
                        record.frames, record.frames_sha256 = writer.frames, digest.hexdigest()
                        _note(record, chunk)
                        on_chunk(chunk, record)
            record.state = "completed" if len(record.chunks) == recipe.chunks else "closed"
        except KeyboardInterrupt:
            record.state, record.reason = "stopped", f"stopped after {len(record.chunks)} of {recipe.chunks} chunks"
        except ReelwireError as error:
            record.state, record.reason = "failed", str(error)
            failure = error
        with contextlib.suppress(ReelwireError, TimeoutError):
            record.metrics = session.metrics()
        if record.state in ("stopped", "failed"):
            with contextlib.suppress(ReelwireError, TimeoutError):
                session.cancel(CANCEL_S)
    return failure


def _given(parameters: Mapping[str, Plain]) -> dict[str, Plain]:
    return {name: value for name, value in parameters.items() if value is not None}


def both(first: OnChunk, second: OnChunk) -> OnChunk:
    """Call one after the other."""

    def called(chunk: Chunk, record: Record) -> None:
        first(chunk, record)
        second(chunk, record)

    return called


def versions(client: Client) -> dict[str, Any]:
    """Versions of what made the frames: here, at the broker, and at each worker."""
    state = client.status()
    here = {"reelwire": importlib.metadata.version("reelwire"), "python": platform.python_version()}
    for name in ("numpy", "av", "pillow"):
        here[name] = importlib.metadata.version(name)
    workers = state.get("workers", [])
    listed = [
        {name: row[name] for name in ("name", "device", "packages") if name in row}
        for row in (workers if isinstance(workers, list) else [])
        if isinstance(row, Mapping)
    ]
    return {"client": here, "broker": state.get("version"), "workers": listed}


@contextlib.contextmanager
def _opened(client: Client, record: Record, picture: NDArray[np.uint8] | None) -> Iterator[Session]:
    recipe = record.recipe
    given: dict[str, Any] = dict(recipe.parameters)
    tensors = {name: np.asarray(value, np.float32) for name, value in recipe.tensors.items()}
    with client.open_session(
        recipe.pipeline,
        image=picture,
        chunks=recipe.chunks,
        tensors=tensors,
        control_binding=recipe.control_binding,
        pace=record.pace,
        **given,
    ) as session:
        yield session


def _chunks(session: Session, recipe: Recipe) -> Generator[Chunk]:
    if recipe.controls is None:
        assert recipe.trace is not None
        yield from _live_chunks(session, recipe.trace)
        return
    waiting = enumerate(recipe.controls)
    _submit(session, waiting, AHEAD)
    for chunk in session:
        _submit(session, waiting, 1)
        yield chunk


def _submit(session: Session, waiting: Iterator[tuple[int, Control]], count: int) -> None:
    """Hand in the next controls; when the session takes none any more, the chunks' iterator says why."""
    for _, (index, control) in zip(range(count), waiting, strict=False):
        try:
            session.submit(index, control)
        except SessionError:
            return


def _live_chunks(session: Session, trace: KeyTrace) -> Generator[Chunk]:
    """Chunks while a thread of its own plays the trace by the wall clock.

    When the trace is over and no key is held, nothing asks for another chunk: then the session is closed as soon as all
    that was asked for is made.
    """
    stopped, played = threading.Event(), threading.Event()
    thread = threading.Thread(target=_play, args=(session, trace, stopped, played), name="reelwire-keys", daemon=True)
    thread.start()
    try:
        for chunk in session:
            yield chunk
            if played.is_set():
                _close_if_quiet(session)
    finally:
        stopped.set()
        thread.join()


def _play(session: Session, trace: KeyTrace, stopped: threading.Event, played: threading.Event) -> None:
    began = time.monotonic()
    held: set[str] = set()
    with contextlib.suppress(ReelwireError, TimeoutError):  # the thread that takes the chunks says why it ended
        for event in trace.events:
            if stopped.wait(max(0.0, began + event.time_s - time.monotonic())):
                return
            match event.kind:
                case "press":
                    session.press(event.key)
                    held.add(event.key)
                case "release":
                    session.release(event.key)
                    held.discard(event.key)
                case "tap":
                    session.tap(event.key)
                case "reset" | "reset_pose":
                    held.clear()
                    session.reset() if event.kind == "reset" else session.reset_pose()
        if not held:
            played.set()  # before the look, so that one of the two threads sees the last chunk
            _close_if_quiet(session)


def _close_if_quiet(session: Session) -> None:
    """Close the session if everything that the keys asked for was made."""
    with contextlib.suppress(ReelwireError, TimeoutError):
        session.metrics()  # the keys that were sent before count in the turn after this answer
        state = session.metrics()
        if state and state["next_control_index"] == state["next_commit"]:
            session.close(timeout=0)


def _note(record: Record, chunk: Chunk) -> None:
    timing = chunk.timing
    record.applied.append(plain_control(chunk.control, chunk.control_source))
    record.facts.append(chunk.facts)
    record.chunks.append(
        {
            "index": chunk.index,
            "frames": int(chunk.frames.shape[0]),
            "committed_s": timing.committed_s,
            "control_to_output_s": timing.latency_s,
            "control_to_frame_s": chunk.control_to_frame_s,
            "period_s": timing.period_s,
            "change_to_frame_s": list(chunk.change_to_frame_s),
            "stages": {
                name: {
                    "ready_s": stage.ready_s,
                    "admitted_s": stage.admitted_s,
                    "started_s": stage.started_s,
                    "completed_s": stage.completed_s,
                }
                for name, stage in timing.stages.items()
            },
        }
    )


def _timings(record: Record, wall_s: float) -> dict[str, Any]:
    rows = record.chunks
    return {
        "wall_s": wall_s,
        "first_output_s": record.metrics.get("first_output_s", {}).get("max") if rows else None,
        "period_s": percentiles([row["period_s"] for row in rows if row["period_s"] is not None]),
        "control_to_output_s": percentiles([row["control_to_output_s"] for row in rows]),
        "control_to_frame_s": percentiles(
            [row["control_to_frame_s"] for row in rows if row["control_to_frame_s"] is not None]
        ),
        "change_to_frame_s": percentiles([change for row in rows for change in row["change_to_frame_s"]]),
    }
