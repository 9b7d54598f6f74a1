"""How fast a job's steps go, and how long its stage will take: what is told of its progress."""

from __future__ import annotations

import math

from reelwire.messages import JobProgress

from .desk import shortened

STEP_WEIGHT = 0.3
"""Of the newest step in the mean of all; the first one of a stage, which compiles and loads, isn't in it."""
STEPS_MAX = 1 << 31
STEP_S_MAX = 1e6


class StepPace:
    """Where a job stands in its stage.

    Attributes:
        stage: its name.
        step: steps that are done.
        steps: steps that it has; 0: not known yet.
        step_s: seconds per step, of late, without those given to streams; 0: not known yet.
        is_streaming: chunks of streams ran between the last two steps.
    """

    __slots__ = ("is_streaming", "stage", "step", "step_s", "steps")

    def __init__(self) -> None:
        """Nothing is done yet."""
        self.stage = ""
        self.step = 0
        self.steps = 0
        self.step_s = 0.0
        self.is_streaming = False

    @property
    def left_s(self) -> float | None:
        """Seconds until the stage ends if nothing else runs; None when that can't be told."""
        return self.step_s * (self.steps - self.step) if self.step_s and self.steps else None

    def take(self, said: JobProgress) -> None:
        """Note what the leader says; `is_sensible` is for finding out whether it can be noted."""
        stage = shortened(said.stage)
        if stage != self.stage:
            self.stage, self.step_s = stage, 0.0
        self.step, self.steps = said.step, said.steps
        if said.step_s:
            self.step_s += (said.step_s - self.step_s) * (STEP_WEIGHT if self.step_s else 1.0)
        self.is_streaming = said.given_s > 0


def is_sensible(said: JobProgress) -> bool:
    """Whether all numbers can be true."""
    if not (0 <= said.step < STEPS_MAX and 0 <= said.steps < STEPS_MAX) or (said.steps and said.step > said.steps):
        return False
    return all(math.isfinite(each) and 0 <= each <= STEP_S_MAX for each in (said.step_s, said.given_s))
