"""A streaming pipeline of your own, in numpy alone: drops fall into a pond, and the keys say where.

Serve it, in two terminals::

    reelwire broker
    reelwire worker --pipeline examples/own_pipeline.py:pipeline

and use it, in a third, which writes ``ripple.mp4``::

    python examples/own_pipeline.py

A pipeline is a spec and stages. The spec says what flows between the stages; the broker reads it and does the rest:
order, backpressure, prefetch, placement, cleaning up::

    tick --(2)--> [source] --drops(2)--> [paint] --height(2)--> [finish] --frames(2)--> client
                              client --control(2)----^
    prefetch: tick, two chunks ahead of the control

``source`` doesn't need to know what the client does, so it works ahead; ``paint`` waits for the keys; ``finish`` colours.
"""

# ruff: noqa: ARG002  the signatures are those of `Stage`; not every stage needs every argument

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reelwire import Client
from reelwire.media import VideoWriter
from reelwire.pipeline.stage import Initialized, Stage, StageResult, Values
from reelwire.spec import Edge, Parameter, Prefetch, RequestError, StageSpec, StreamSpec

FPS = 16.0
FRAMES = 8
DROPS = 3
BORDER = 8
STEP = 4
DAMPING = 0.985

Field = NDArray[np.float32]

SPEC = StreamSpec(
    name="ripple",
    stages=(
        StageSpec("source", consumes=("tick",), produces=("drops",)),
        StageSpec("paint", consumes=("drops", "control"), produces=("height",)),
        StageSpec("finish", consumes=("height",), produces=("frames",)),
    ),
    edges=(Edge("tick"), Edge("drops"), Edge("control"), Edge("height"), Edge("frames")),
    external_inputs=("tick", "control"),
    outputs=("frames",),
    initialize_order=("source", "paint", "finish"),
    prefetch=Prefetch("tick", depth=2, follows="control", refill_after="paint"),
    control="control",
    latency_anchor="control",
    control_names=("w", "a", "s", "d"),
    control_aliases={"ArrowUp": "w", "ArrowLeft": "a", "ArrowDown": "s", "ArrowRight": "d"},
    chunks_max=10_000,
    frames_first=FRAMES,
    frames_next=FRAMES,
    fps=FPS,
    parameters=(
        Parameter("seed", "integer", "where the drops of the rain fall", default=0, minimum=0, maximum=2**63 - 1),
        Parameter("width", "integer", "columns of the picture", default=192, minimum=32, maximum=1024),
        Parameter("height", "integer", "rows of the picture", default=128, minimum=32, maximum=1024),
    ),
)


@dataclass(frozen=True, slots=True)
class Rain:
    """What `Source` keeps of a session: everything it needs to make any chunk again."""

    seed: int
    height: int
    width: int


class Source:
    """Decides where rain falls. Chunk i is a function of the seed and i, so a chunk that is made again is the same."""

    session_bytes = 100

    def __init__(self) -> None:
        """Start with no session."""
        self._sessions: dict[str, Rain] = {}

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:
        """Check the request, and hand the size of the picture to the other stages."""
        height, width = request["height"], request["width"]
        if height % 2 or width % 2:
            raise RequestError("width", f"{width} x {height} has an odd side, which an MP4 can't have; accepted: even")
        self._sessions[session] = Rain(request["seed"], height, width)
        return Initialized(handed={"height": height, "width": width}, cache_bytes=self.session_bytes)

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """The drops of a chunk: int64 [drops, 3], frame, row and column."""
        rain = self._sessions[session]
        low = (0, BORDER, BORDER)
        high = (FRAMES, rain.height - BORDER, rain.width - BORDER)
        drops = np.random.default_rng((rain.seed, index)).integers(low, high, (DROPS, 3))
        return StageResult(outputs={"drops": {"drops": drops}})

    def release(self, session: str) -> None:
        """Forget a session."""
        self._sessions.pop(session, None)


class Pond:
    """The water of one session: its height now and one frame ago, and where the boat is."""

    def __init__(self, height: int, width: int) -> None:
        """Still water, with the boat in the middle."""
        self.now: Field = np.zeros((height, width), np.float32)
        self.before: Field = self.now.copy()
        self.boat = (height // 2, width // 2)

    def drop(self, row: int, column: int, depth: float) -> None:
        """Push the water down at one place."""
        self.now[row - 2 : row + 3, column - 2 : column + 3] -= depth

    def steer(self, keys: list[str]) -> None:
        """Move the boat by a frame's worth of the held keys, within the borders."""
        height, width = self.now.shape
        row = self.boat[0] + STEP * (("s" in keys) - ("w" in keys))
        column = self.boat[1] + STEP * (("d" in keys) - ("a" in keys))
        self.boat = (min(max(row, BORDER), height - BORDER), min(max(column, BORDER), width - BORDER))

    def advance(self) -> Field:
        """The wave equation, one step: each place swings about the mean of its neighbours."""
        up, down = np.roll(self.now, 1, 0), np.roll(self.now, -1, 0)
        left, right = np.roll(self.now, 1, 1), np.roll(self.now, -1, 1)
        after = (((up + down + left + right) / 2 - self.before) * DAMPING).astype(np.float32)
        self.before, self.now = self.now, after
        return after


class Paint:
    """Moves the water: rain falls into it, and a boat that the keys steer ploughs through it."""

    session_bytes = 2 * 4 * 1024 * 1024

    def __init__(self) -> None:
        """Start with no session."""
        self._sessions: dict[str, Pond] = {}

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:
        """Make the pond."""
        pond = Pond(handed["height"], handed["width"])
        self._sessions[session] = pond
        return Initialized(cache_bytes=pond.now.nbytes + pond.before.nbytes)

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """The water of a chunk: float32 [frames, height, width]. The fact ``boat`` says where the boat is."""
        pond, keys = self._sessions[session], inputs["control"]["keys"]
        water = []
        for frame in range(FRAMES):
            for when, row, column in inputs["drops"]["drops"].tolist():
                if when == frame:
                    pond.drop(row, column, 1.0)
            pond.steer(keys)
            if keys:
                pond.drop(*pond.boat, 0.4)
            water.append(pond.advance())
        return StageResult(outputs={"height": {"water": np.stack(water)}}, facts={"boat": list(pond.boat)})

    def release(self, session: str) -> None:
        """Drain the pond."""
        self._sessions.pop(session, None)


class Finish:
    """Lights the water: slopes that face the sun are bright. It needs nothing of a session."""

    session_bytes = 0

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:
        """Nothing to make."""
        return Initialized()

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """The frames of a chunk: uint8 [frames, height, width, 3]."""
        water: Field = inputs["height"]["water"]
        slope = np.gradient(water, axis=1) + np.gradient(water, axis=2)
        light = np.clip(0.45 + 0.9 * slope, 0.0, 1.0)[..., None]
        deep, bright = np.array([8.0, 40.0, 80.0]), np.array([200.0, 240.0, 250.0])
        return StageResult(outputs={"frames": {"frames": (deep + (bright - deep) * light).astype(np.uint8)}})

    def release(self, session: str) -> None:
        """Nothing to drop."""


class Ripple:
    """The pipeline: its spec, and how to build a stage. A worker builds each stage once, on a thread of its own."""

    spec = SPEC
    array_library: Literal["numpy", "torch"] = "numpy"

    def build(self, stage: str, device: str) -> Stage:
        """Make a stage; numpy knows no device but the CPU."""
        if device != "cpu":
            raise RequestError("device", f"{device!r} is not accepted; accepted: cpu")
        makers: dict[str, Any] = {"source": Source, "paint": Paint, "finish": Finish}
        made: Stage = makers[stage]()
        return made


pipeline = Ripple()


def main(path: str = "ripple.mp4", chunks: int = 8) -> None:
    """Open a session, steer the boat, and write what comes to an MP4."""
    with (
        Client() as client,
        client.open_session("ripple", seed=7, chunks=chunks) as session,
        VideoWriter(path, FPS) as video,
    ):
        session.press("d")
        for chunk in session:
            video.write(chunk.frames)
            print(f"chunk {chunk.index}: {len(chunk.frames)} frames, the boat is at {chunk.facts['boat']!r}")
            if chunk.index == chunks // 4:
                session.set_keys({"s"})
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ripple.mp4")
