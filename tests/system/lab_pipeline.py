"""A torch-free pipeline that fails, hangs and counts when a request says so; served by real workers in these tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from reelwire.pipeline.stage import Initialized, Stage, StageResult, Values
from reelwire.spec import Edge, Parameter, Prefetch, RequestError, StageSpec, StreamSpec

SIDE = 16
FIRST, NEXT = 5, 4

SPEC = StreamSpec(
    name="lab",
    stages=(
        StageSpec("mix", ("tick",), ("paint",)),
        StageSpec("draw", ("paint", "control"), ("sheet",)),
        StageSpec("show", ("sheet",), ("frames",)),
    ),
    edges=(Edge("tick"), Edge("paint"), Edge("control"), Edge("sheet"), Edge("frames")),
    external_inputs=("tick", "control"),
    outputs=("frames",),
    initialize_order=("mix", "show", "draw"),
    release_order=("show", "draw", "mix"),
    control="control",
    chunks_max=4096,
    frames_first=FIRST,
    frames_next=NEXT,
    fps=16.0,
    prefetch=Prefetch("tick", 2, "control", "draw"),
    latency_anchor="control",
    frame_stride=4,
    control_names=("w", "s", "a", "d"),
    control_aliases={"ArrowUp": "w"},
    parameters=(
        Parameter("seed", "integer", "what the frames depend on", default=0, minimum=0, maximum=2**63 - 1),
        Parameter("fail_stage", "string", "the stage that raises", default=""),
        Parameter("fail_index", "integer", "the chunk at which it raises; -1: in its initialization", default=0),
        Parameter("hang_stage", "string", "the stage that waits at `hang_index` until `gate` is opened", default=""),
        Parameter("hang_index", "integer", "the chunk at which it waits", default=0),
        Parameter(
            "gate", "string", "path of a named pipe; whoever opens it for writing lets the stage go on", default=""
        ),
        Parameter("refuse", "string", "a field that initialization refuses", default=""),
    ),
)


class LabStage:
    """One stage: its outputs depend on seed, chunk, inputs and on how many chunks of the session it made before."""

    session_bytes = 1 << 16

    def __init__(self, name: str, side: int) -> None:
        """Start without sessions."""
        self.name = name
        self.side = side
        self.sessions: dict[str, tuple[Values, int]] = {}

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:
        """Keep the request."""
        if request["refuse"] and self.name == "mix":
            raise RequestError(str(request["refuse"]), "is refused by the stage; accepted: something else")
        if request["fail_stage"] == self.name and request["fail_index"] == -1:
            raise RuntimeError(f"{self.name} can't begin")
        self.sessions[session] = (dict(request), 0)
        return Initialized({f"{self.name}_pid": os.getpid()}, cache_bytes=1024)

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """Make a chunk, or fail or wait as the request says."""
        request, made = self.sessions[session]
        assert made == index, f"{self.name} was given chunk {index} of {session} after {made} chunks"
        assert is_first == (index == 0)
        if request["fail_stage"] == self.name and request["fail_index"] == index:
            raise RuntimeError(f"{self.name} broke at chunk {index}")
        if request["hang_stage"] == self.name and request["hang_index"] == index:
            Path(str(request["gate"])).read_bytes()  # blocks until somebody opens the other end and closes it
        self.sessions[session] = (request, made + 1)
        if self.name == "mix":
            value = np.random.default_rng([int(request["seed"]), index]).integers(
                0, 200, (self.side, self.side), dtype=np.uint8
            )
            return StageResult({"paint": {"paint": value}})
        if self.name == "draw":
            keys = list(inputs["control"].get("keys", []))
            value = inputs["paint"]["paint"] + np.uint8(10 * len(keys))
            return StageResult({"sheet": {"sheet": value}}, {"keys": keys})
        frames = np.repeat(inputs["sheet"]["sheet"][None, :, :, None], 3, axis=3)
        return StageResult({"frames": {"frames": np.repeat(frames, FIRST if is_first else NEXT, axis=0)}})

    def release(self, session: str) -> None:
        """Forget the session."""
        self.sessions.pop(session, None)


class LabPipeline:
    """Serves `SPEC`, perhaps under another name, with frames of `side` x `side` pixels."""

    array_library: Literal["numpy", "torch"] = "numpy"

    def __init__(self, name: str, side: int) -> None:
        """Keep both."""
        self.spec = replace(SPEC, name=name)
        self._side = side

    def build(self, stage: str, device: str) -> Stage:
        """Make one stage; there is nothing to load."""
        return LabStage(stage, self._side)


def pipeline(name: str = SPEC.name, side: str = str(SIDE)) -> LabPipeline:
    """What the worker loads."""
    return LabPipeline(name, int(side))
