"""A pipeline in numpy alone, whose stages can be told to misbehave; loaded as ``numpy_pipeline.py:build``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from reelwire.pipeline.stage import Initialized, StageResult, Values
from reelwire.spec import Edge, Parameter, RequestError, StageSpec, StreamSpec, TensorInput

SPEC = StreamSpec(
    name="toy",
    stages=(
        StageSpec("draw", ("control",), ("picture",), ("image",)),
        StageSpec("show", ("picture",), ("frames",)),
    ),
    edges=(Edge("control"), Edge("picture"), Edge("frames")),
    external_inputs=("control",),
    outputs=("frames",),
    initialize_order=("draw", "show"),
    control="control",
    chunks_max=100,
    frames_first=1,
    frames_next=2,
    fps=16.0,
    control_names=("a", "d", "s", "w"),
    parameters=(Parameter("seed", "integer", "the seed", default=0),),
    tensors=(TensorInput("image", "uint8", (-1, -1, 3)),),
)


class ToyStage:
    """Counts and adds; keeps what each session was given."""

    session_bytes = 1000

    def __init__(self, name: str, options: Mapping[str, str]) -> None:
        self.name = name
        self.options = options
        self.sessions: dict[str, int] = {}
        self.width = int(options.get("width", "4"))
        self.buffer = np.zeros(self.width, np.int64)
        self.threads: set[str] = set()

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:
        """Keep the seed; a negative one is refused, 666 is too much."""
        self.threads.add(threading.current_thread().name)
        seed = int(request["seed"])
        self.sessions[session] = seed
        self.buffer[:] = 0
        if seed < 0:
            raise RequestError("seed", f"{seed} is negative; accepted: 0 or more")
        if seed == 666:
            raise MemoryError("no room for the caches")
        image = request.get("image")
        total = 0 if image is None else int(image.sum())
        return Initialized({"embedding": np.full(3, seed + total, np.float32), "from": self.name}, 1000)

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """Draw or show; key s raises, d hangs, a holds the interpreter for a while."""
        self.threads.add(threading.current_thread().name)
        seed = self.sessions[session]
        if self.name == "draw":
            return self._draw(seed, index, inputs["control"])
        line = inputs["picture"]["pixels"].astype(np.uint8)[None, None, :, None]
        frames = np.broadcast_to(line, (SPEC.frames_of(index), 1, self.width, 3))
        return StageResult({"frames": {"frames": frames}}, {"first": is_first, "last": np.bool_(is_last)})

    def _draw(self, seed: int, index: int, control: Values) -> StageResult:
        keys = control.get("keys", [])
        if "s" in keys:
            raise RuntimeError(f"no way back at {index}")
        if "d" in keys:
            threading.Event().wait()  # hangs for ever
        if "a" in keys:
            busy_until = time.monotonic() + float(self.options.get("busy_s", "0.1"))
            while time.monotonic() < busy_until:
                sum(range(1000))
        self.buffer += seed + index  # the same buffer again and again
        return StageResult(
            {"picture": {"pixels": self.buffer, "index": index}},
            {"pose": np.eye(2), "scale": np.float32(0.5), "keys": tuple(keys)},
        )

    def release(self, session: str) -> None:
        """Forget the session; for seed 13 only the second time."""
        if self.sessions.get(session) == 13:
            self.sessions[session] = 14
            raise OSError("the first release of an unlucky session fails")
        self.sessions.pop(session, None)


class ToyPipeline:
    """Two stages, nothing else."""

    spec = SPEC
    array_library: Literal["numpy", "torch"] = "numpy"

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def build(self, stage: str, device: str) -> Any:
        """A stage, or the trouble that the options ask for."""
        trouble = self.options.get("trouble")
        if trouble == "request":
            raise RequestError("weights", "no such file; accepted: a folder with weights")
        if trouble == "crash":
            raise RuntimeError("the weights are broken")
        if trouble == "torch" and "torch" in sys.modules:
            raise RuntimeError("torch was imported")
        return ToyStage(stage, self.options)


def build(**options: str) -> ToyPipeline:
    """The factory that the registry calls."""
    return ToyPipeline(options)
