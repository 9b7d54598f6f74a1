"""`reelwire demo`: the whole of it on this machine, with the small built-in model and a real photograph."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ReelwireError, RequestError
from .local import (
    BROKER,
    READY_BROKER_S,
    READY_WORKER_S,
    Endings,
    broker_child,
    stopped_by_signals,
    wait_ready,
    worker_child,
)
from .shared import Json, print_json, tell

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .. import Chunk, Client
    from ..parts import ChunkTiming
    from ..workers.supervisor import Supervisor
    from .plan import StreamFlags
    from .recipe import Record

PICTURE = "launch_pad.jpg"
PROMPT = "a launch pad at dusk, floodlights, a clear sky"
TRACE = "0.0 +w; 1.5 +l; 2.5 -l; 3.5 -w +d; 4.5 -d +j; 5.0 -j +w"
WORKER = "demo"
OUTPUT_LINES = 40
LIVE_CHUNKS = 6
TIMELINE = "timeline.png"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the MP4, its record and pictures.")] = Path("reelwire-demo"),
    chunks: Annotated[int, typer.Option(min=1, max=341, help="Length; a chunk is 0.75 s of video.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 7,
    as_json: Json = False,
) -> None:
    """Start a broker and a worker here, stream a world from a photograph with a trace of keys, and end both.

    The model is the built-in `tiny`: the real architecture with weights drawn from a seed. It has learned nothing, so
    its world is a texture that follows picture, prompt and keys; what is shown is the serving, not the picture.
    """
    was_there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError("out", f"{out} can't be made ({error.strerror}); accepted: a folder") from None
    began = time.monotonic()
    try:
        endings = Endings()
        with stopped_by_signals(endings):
            record, changes, memory = _run(out, chunks, seed, endings, quiet=as_json)
    except KeyboardInterrupt:
        raise ReelwireError("stopped; nothing of the demo runs any more") from None
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # it holds something, which is kept
                out.rmdir()
    _report(out, record, changes, memory, time.monotonic() - began, as_json)
    if record.state == "stopped":
        tell(f"{record.reason}; nothing of the demo runs any more")
        raise typer.Exit(1)


def _run(
    out: Path, chunks: int, seed: int, endings: Endings, *, quiet: bool
) -> tuple[Record, list[float], dict[str, int]]:
    from ..media import contact_sheet, load_image
    from ..timeline import save_timeline
    from .plan import recipe_of
    from .progress import stream_bar
    from .recording import both, record_stream

    shown: list[tuple[NDArray[np.uint8], float, str]] = []
    timings: list[tuple[int, ChunkTiming]] = []

    def keep(chunk: Chunk, record: Record) -> None:
        """The last frame of each chunk, its time and its keys, and when the chunk passed what."""
        timings.append((chunk.index, chunk.timing))
        held = "+".join(chunk.control.keys or ()) or "-"
        shown.append((chunk.frames[-1].copy(), (record.frames - 1) / record.fps, held))

    with importlib.resources.as_file(importlib.resources.files("reelwire") / "assets" / PICTURE) as path:
        picture = load_image(path)
        flags = _flags(path, out / "world.mp4", chunks, seed)
        with _local(endings, quiet=quiet) as (supervisor, endpoint):
            from .. import Client

            with Client(endpoint) as client:
                spec = client.pipelines["world"]
                recipe = recipe_of(flags, spec)
                with stream_bar("world", chunks, quiet=quiet) as on_chunk:
                    record = record_stream(client, spec, recipe, picture, flags.out, both(keep, on_chunk))
                changes = live_changes(client, picture, seed) if record.state == "completed" else []
            memory = peak_memory({"this process": os.getpid(), **supervisor.pids()})
    if shown:
        frames, times, labels = zip(*shown, strict=True)
        contact_sheet(picture, frames, out / "world.png", times_s=times, labels=labels)
        save_timeline(out / TIMELINE, spec, timings, f"The demo's world: {record.recipe.chunks} chunks")
    return record, changes, memory


def live_changes(client: Client, picture: NDArray[np.uint8], seed: int) -> list[float]:
    """Hold keys as a person does, in a short session of its own: seconds from each change to its first frame.

    A trace that is submitted by index has no such moments.
    """
    from .recording import AHEAD

    changes: list[float] = []
    with client.open_session("world", image=picture, prompt=PROMPT, seed=seed, chunks=LIVE_CHUNKS) as session:
        session.press("w")
        for chunk in session:
            changes += chunk.change_to_frame_s
            if chunk.index < LIVE_CHUNKS - AHEAD:  # a later change would show in no chunk
                session.release("l") if chunk.index % 2 else session.press("l")
    return changes


def _flags(picture: Path, mp4: Path, chunks: int, seed: int) -> StreamFlags:
    from .plan import StreamFlags

    return StreamFlags(
        image=picture,
        parameters={"prompt": PROMPT, "seed": seed},
        texts={},
        keys=TRACE,
        poses=None,
        wall_clock=False,
        chunks=chunks,
        frames=None,
        policy="strict",
        pipeline=None,
        replay=None,
        out=mp4,
    )


@contextlib.contextmanager
def _local(endings: Endings, *, quiet: bool) -> Iterator[tuple[Supervisor, str]]:
    """A broker on a port that the system picks and one worker with all stages; both are gone afterwards."""
    from ..broker.config import BrokerConfig
    from ..settings import Settings
    from ..workers.config import WorkerConfig
    from ..workers.supervisor import Supervisor

    said: deque[str] = deque(maxlen=OUTPUT_LINES)
    # neither a file nor the environment: the demo is the same everywhere
    layers = Settings({}, "", {})
    broker = layers.resolve("broker", BrokerConfig, {"listen": "tcp://127.0.0.1:*"})
    worker = layers.resolve("worker", WorkerConfig, {"pipeline": "world", "options": {"model": "tiny"}})

    def keep(name: str, kind: str, line: str) -> None:
        if kind == "stderr":
            said.append(f"{name}: {line}")

    supervisor = Supervisor(forward=keep)
    try:
        supervisor.start(broker_child(broker))
        endpoint = str(wait_ready(supervisor, BROKER, READY_BROKER_S)["endpoint"])
        supervisor.start(worker_child(WORKER, worker, endpoint))
        if not quiet:
            tell(f"broker at {endpoint}; the worker loads")
        wait_ready(supervisor, WORKER, READY_WORKER_S)
        yield supervisor, endpoint
    except ReelwireError:
        if os.environ.get("REELWIRE_DEBUG"):
            tell("what the processes said last:\n" + "\n".join(said))
        raise
    finally:
        endings.stop(supervisor)


def peak_memory(pids: dict[str, int]) -> dict[str, int]:
    """Most resident bytes that each process has had so far; nothing where the system doesn't say."""
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            (line,) = (line for line in lines if line.startswith("VmHWM:"))
            found[name] = int(line.split()[1]) * 1024
    return found


def _report(
    out: Path, record: Record, changes: list[float], memory: dict[str, int], total_s: float, as_json: bool
) -> None:
    from .progress import print_summary, spread
    from .recipe import percentiles

    total = sum(memory.values())
    if as_json:
        held: dict[str, Any] = {
            "total_s": total_s,
            "peak_bytes": {**memory, "sum": total},
            "folder": str(out),
            "result": record.to_json(out)["result"],
            "timings": {**record.timings, "live_change_to_frame_s": percentiles(changes)},
        }
        print_json(held)
        return
    rows = [("key change to frame, live", spread(percentiles(changes))), ("whole demo", f"{total_s:.1f} s")]
    if memory:
        each = ", ".join(f"{name} {count / 2**20:.0f}" for name, count in memory.items())
        rows.append(("peak memory", f"{total / 2**20:.0f} MiB ({each})"))
    written = ("world.mp4", "world.json", "world.png", TIMELINE)
    rows += [(name, str(out / name)) for name in written if (out / name).exists()]
    print_summary(record, rows)
