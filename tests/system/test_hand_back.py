"""Jobs whose workers are asked to stop: they hand them back as far as they came, and the next attempt goes on from there."""

from __future__ import annotations

import hashlib
import signal
from typing import Any

import pytest

from reelwire import Job, JobStatus

LIMIT_S = 60.0
STEPS_MIN = 8
REQUEST = {"seed": 9, "steps": 40, "switch": 12}


def digest(job: Job) -> str:
    """Of the result."""
    return hashlib.sha256(job.result(timeout=LIMIT_S)).hexdigest()


@pytest.mark.parametrize(("world", "state_bytes"), [(1, 64 << 10), (1, 8 << 20), (2, 8 << 20)])
def test_groups_12_a_job_is_handed_back_where_it_stands(
    stack: Any, world: int, state_bytes: int, tmp_path: Any
) -> None:
    """Nothing was kept before: the state goes to the broker, in one part or several, and no step is done twice."""
    stack.broker(state_dir=tmp_path / "state", checkpoint_steps=1000)
    jobs = ("--pipeline", "emulated", "--jobs", "emulated", "--job-option", f"state_bytes={state_bytes}")
    slow, quick = ("--job-option", "step_s=0.1"), ("--job-option", "step_s=0.001")
    ranks = stack.group("edit", world, *jobs, *slow)
    job = stack.client().submit_edit("emulated", **REQUEST)
    came_to = next(steps for event in job.progress() if (steps := done(event)) >= STEPS_MIN)
    for rank in ranks:
        rank.process.send_signal(signal.SIGTERM)
    assert [rank.process.wait(LIMIT_S) for rank in ranks] == [0] * world
    status = job.status()
    assert (status.state, status.attempt) == ("queued", 1)
    assert status.checkpoint_step >= came_to
    stack.group("next", 1, *jobs, *quick)
    handed_back = digest(job)
    assert job.status().attempt == 2
    assert digest(stack.client().submit_edit("emulated", **REQUEST)) == handed_back


def done(status: JobStatus) -> int:
    """Steps of both stages."""
    return status.step + (REQUEST["switch"] if status.stage == "denoise_low" else 0)
