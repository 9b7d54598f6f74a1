"""The emulated jobs: a job that goes on from any checkpoint ends as one that was never disturbed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire.errors import RequestError
from reelwire.job_spec import check_job, validate_job
from reelwire.pipeline.job import JobOutput, JobRequest, JobStep
from reelwire.workers.checkpoints import read_values, snapshot_of, write_snapshot
from reelwire.workers.emulated import read
from reelwire.workers.emulated_jobs import EmulatedJobs, expected_trail, pipeline
from reelwire.workers.group import Alone
from reelwire.workers.runner import load_jobs

STEPS = 7


def request(
    jobs: EmulatedJobs, kind: str = "emulated", checkpoint: Any = None, media: Any = None, **given: Any
) -> JobRequest:
    (spec,) = [each for each in jobs.jobs if each.name == kind]
    media = media or {}
    parameters = check_job(spec, {"steps": STEPS, "switch": 3, **given}, {name: len(media[name]) for name in media})
    return JobRequest(kind, parameters, media, checkpoint)


def steps(jobs: EmulatedJobs, asked: JobRequest) -> tuple[list[JobStep], list[Any], JobOutput]:
    """All steps of a job, copies of its states, and its output."""
    run = jobs.build("cpu", Alone()).run(asked)
    taken: list[JobStep] = []
    states: list[Any] = []
    while True:
        try:
            taken.append(next(run))
        except StopIteration as end:
            return taken, states, end.value
        assert taken[-1].state is not None
        states.append({name: np.copy(value) for name, value in taken[-1].state().items()})


def same(one: JobOutput, other: JobOutput) -> bool:
    return np.array_equal(one.frames, other.frames) and (one.fps, one.facts) == (other.fps, other.facts)


def test_the_kinds_contradict_nothing() -> None:
    """All three are accepted by the broker's own check; the registry knows them by name."""
    jobs = load_jobs("emulated", {"step_s": "0"})
    assert [spec.name for spec in jobs.jobs] == ["emulated", "emulated-v2v", "emulated-rv2v"]
    for spec in jobs.jobs:
        validate_job(spec)
    jobs.check_group(3)


def test_groups_10_steps_say_where_the_job_stands() -> None:
    """Before each step, by stage; the second expert takes over where it was asked to."""
    taken, _, output = steps(jobs := pipeline(step_s="0"), request(jobs))
    assert [(each.stage, each.step, each.steps) for each in taken] == [
        *(("denoise_high", step, 3) for step in range(3)),
        *(("denoise_low", step, 4) for step in range(4)),
    ]
    assert {(read(frame).index, read(frame).trail) for frame in output.frames} == {(STEPS, output.facts["trail"])}


@pytest.mark.parametrize("switch", [0, 99])
def test_one_expert_may_do_everything(switch: int) -> None:
    """The other stage has no steps then, and isn't spoken of."""
    taken, _, _ = steps(jobs := pipeline(step_s="0"), request(jobs, switch=switch))
    assert {(each.stage, each.steps) for each in taken} == {("denoise_low" if switch == 0 else "denoise_high", STEPS)}


def test_groups_12_from_every_checkpoint_the_result_is_the_same(tmp_path: Path) -> None:
    """Through a file, bit for bit: frames, trail and the checksum of the latent."""
    jobs = pipeline(step_s="0")
    _, states, undisturbed = steps(jobs, request(jobs, seed=5))
    for number, state in enumerate(states):
        values = {name: value if name == "latent" else int(value) for name, value in state.items()}
        kept = read_values(write_snapshot(tmp_path, snapshot_of(values)).path, "numpy")
        taken, _, output = steps(jobs, request(jobs, seed=5, checkpoint=kept))
        assert len(taken) == STEPS - number
        assert same(output, undisturbed), f"from step {number}"
    assert not same(steps(jobs, request(jobs, seed=6))[2], undisturbed)


def test_media_go_into_the_trail(tmp_path: Path) -> None:
    """Their content and their order, not their names."""
    jobs = pipeline(step_s="0")
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (tmp_path / name for name in "abc")
    trails = {}
    for images in ((a, b), (c, b), (b, a), (a,)):
        media: Mapping[str, tuple[Path, ...]] = {"video": (a,), "images": images}
        asked = request(jobs, "emulated-rv2v", media=media)
        trails[images] = steps(jobs, asked)[2].facts["trail"]
        assert trails[images] == expected_trail(asked.parameters, media)
    assert trails[a, b] == trails[c, b]
    assert len(set(trails.values())) == 3


@pytest.mark.parametrize(
    ("failure", "raises"), [("error", RuntimeError), ("memory", MemoryError), ("request", RequestError)]
)
def test_a_job_fails_where_it_was_asked_to(failure: str, raises: type[Exception]) -> None:
    """At that step, on that rank, with that error."""
    run = (jobs := pipeline(step_s="0")).build("cpu", Alone()).run(request(jobs, fail_at=2, failure=failure))
    for _ in range(3):
        next(run)
    with pytest.raises(raises, match="step 2"):
        next(run)
    assert len(steps(jobs, request(jobs, fail_at=2, fail_rank=1))[0]) == STEPS


@pytest.mark.parametrize("option", ["step_s=-1", "state_bytes=x", "jitter=2", "slow_rank=nan", "steps=1"])
def test_options_are_checked(option: str) -> None:
    """With their name and what is accepted."""
    name, _, text = option.partition("=")
    with pytest.raises(RequestError, match="accepted") as caught:
        load_jobs("emulated", {name: text})
    assert caught.value.field == name


def test_a_device_is_refused() -> None:
    """Nothing is computed on one."""
    with pytest.raises(RequestError, match="cpu"):
        pipeline().build("cuda:0", Alone())
    with pytest.raises(RequestError) as caught:
        load_jobs("no-such-jobs", {})
    assert caught.value.field == "jobs"
