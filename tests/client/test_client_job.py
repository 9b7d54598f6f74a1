"""A job in the hands of the application, on a real socket, against a broker made of plain messages."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire import (
    Client,
    JobCancelled,
    JobError,
    JobFailed,
    JobStatus,
    RequestError,
    UsageError,
    WireError,
)
from reelwire import messages as m
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import Failure

from .scripted_jobs import ScriptedJobs

StandIn = Any  # of conftest.py
InThread = Callable[[Callable[[], Any]], queue.SimpleQueue[Any]]
LIMIT_S = 10.0
CLIP = np.random.default_rng(0).integers(0, 256, 5 * FILE_PART_BYTES + 7, np.uint8).tobytes()


@pytest.fixture
def jobs(stand_in: StandIn) -> ScriptedJobs:
    return ScriptedJobs(stand_in)


@pytest.fixture
def client(stand_in: StandIn, jobs: ScriptedJobs) -> Iterator[Client]:
    with Client(stand_in.endpoint) as client:
        yield client


@contextmanager
def refused(field: str) -> Iterator[Any]:
    with pytest.raises(RequestError) as caught:
        yield caught
    assert caught.value.field == field


def test_groups_10_progress_tells_where_it_stands_up_to_its_end(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs
) -> None:
    """Queued with its position, stages with their steps, the end; the same thing twice is told once."""
    job = client.submit_edit("t2i", prompt="x")
    seen: list[JobStatus] = []
    script: list[dict[str, Any]] = [
        {"state": "preparing"},
        {"state": "running", "stage": "denoise", "step": 1, "steps": 4, "left_s": 3.0},
        {"state": "running", "stage": "denoise", "step": 2, "steps": 4, "step_s": 0.5},
        {"state": "encoding"},
        {"state": "succeeded"},
    ]
    for status in job.progress(LIMIT_S):
        seen.append(status)
        if script:
            jobs.change(job.id, submitted_s=1.0)
            jobs.change(job.id, **script.pop(0))
    assert [status.state for status in seen] == ["queued", "preparing", "running", "running", "encoding", "succeeded"]
    assert (seen[0].position, seen[3].stage, seen[3].step, seen[3].steps, seen[3].step_s) == (1, "denoise", 2, 4, 0.5)
    assert [status.ended for status in seen] == [False] * 5 + [True]
    assert [status.state for status in job.progress(LIMIT_S)] == ["succeeded"]
    assert job.wait(LIMIT_S).state == "succeeded"


def test_progress_that_is_left_watches_no_more(client: Client, stand_in: StandIn, jobs: ScriptedJobs) -> None:
    """The broker is told, and nobody is woken for it any more."""
    job = client.submit_edit("t2i", prompt="x")
    for status in job.progress():
        assert status.state == "queued"
        break
    assert [stand_in.next(m.WatchJob).on for _ in range(2)] == [True, False]
    for wait in (lambda: list(job.progress(0.05)), lambda: job.wait(0.05)):
        with pytest.raises(TimeoutError):
            wait()
        assert [stand_in.next(m.WatchJob).on for _ in range(2)] == [True, False]
    assert client._link._watching == {}
    with refused("timeout"):
        job.progress(-1)


def test_a_job_that_fails_tells_so_and_its_result_raises(client: Client, jobs: ScriptedJobs, tmp_path: Path) -> None:
    """Progress and wait raise nothing; result raises the worker's reason, and leaves no file."""
    job = client.submit_edit("t2i", prompt="x")
    jobs.change(job.id, state="failed", failure=Failure("request", "out of memory at this size", field="frames"))
    *_, last = job.progress(LIMIT_S)
    assert last.failure is not None
    assert (last.state, last.failure.message) == ("failed", "out of memory at this size")
    assert job.wait(LIMIT_S).state == "failed"
    with pytest.raises(JobFailed, match=r"^frames: out of memory at this size") as caught:
        job.result(tmp_path / "out.mp4", LIMIT_S)
    assert (caught.value.job, caught.value.kind, caught.value.field) == (job.id, "request", "frames")
    assert list(tmp_path.iterdir()) == []
    jobs.change(job.id, failure=None)
    with pytest.raises(JobFailed, match="job j1 has failed"):
        job.result(timeout=LIMIT_S)


def test_groups_11_a_job_is_cancelled(client: Client, jobs: ScriptedJobs) -> None:
    """Whoever waits for its result learns of it."""
    job = client.submit_edit("t2i", prompt="x")
    assert job.cancel().state == "cancelled"
    with pytest.raises(JobCancelled, match="job j1 was cancelled"):
        job.result(timeout=LIMIT_S)
    assert job.wait(LIMIT_S).state == "cancelled"


def test_a_result_is_a_file_or_bytes(client: Client, jobs: ScriptedJobs, tmp_path: Path) -> None:
    """Its path is returned, a file that was there is replaced, and nothing is left beside it."""
    job = client.submit_edit("t2i", prompt="x")
    jobs.succeed(job.id, CLIP)
    out = tmp_path / "out.mp4"
    out.write_text("old")
    assert job.result(str(out), LIMIT_S) == out
    assert out.read_bytes() == CLIP
    assert list(tmp_path.iterdir()) == [out]
    (tmp_path / "other").touch()
    assert out.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert job.result(timeout=LIMIT_S) == CLIP


@pytest.mark.parametrize("to", [{"result_sha256": "0" * 64}, {"result_bytes": len(CLIP) - FILE_PART_BYTES}])
def test_a_result_that_is_not_what_was_promised_is_not_kept(
    client: Client, jobs: ScriptedJobs, tmp_path: Path, to: dict[str, Any]
) -> None:
    """Another hash, another size: what was at the path stays, and nothing is left beside it."""
    job = client.submit_edit("t2i", prompt="x")
    jobs.succeed(job.id, CLIP, **to)
    out = tmp_path / "out.mp4"
    out.write_text("old")
    with pytest.raises(WireError):
        job.result(out, LIMIT_S)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("drops", [1, 4])
def test_a_part_of_a_result_that_is_missing_is_the_brokers_fault(
    client: Client, jobs: ScriptedJobs, tmp_path: Path, drops: int
) -> None:
    """Nobody waits for it for ever, and nothing is left."""
    job = client.submit_edit("t2i", prompt="x")
    jobs.succeed(job.id, CLIP)
    jobs.result_parts = lambda part: [] if part.index == drops else [part]
    with pytest.raises(WireError, match=f"part {drops + 1} came where {drops} was to come"):
        job.result(tmp_path / "out.mp4", LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_takes_too_long_is_given_up(client: Client, jobs: ScriptedJobs, tmp_path: Path) -> None:
    """While the job runs, and while its result travels: nothing is left, and both are there for the next time."""
    job = client.submit_edit("t2i", prompt="x")
    with pytest.raises(TimeoutError):
        job.result(tmp_path / "out.mp4", 0.05)
    jobs.succeed(job.id, CLIP)
    jobs.result_parts = lambda part: [part] if part.index < 2 else []
    with pytest.raises(TimeoutError):
        job.result(tmp_path / "out.mp4", 0.3)
    assert list(tmp_path.iterdir()) == []
    jobs.result_parts = lambda part: [part, part]
    assert job.result(tmp_path / "out.mp4", LIMIT_S).read_bytes() == CLIP


def test_where_no_file_can_be_is_refused_before_the_job_is_waited_for(
    client: Client, jobs: ScriptedJobs, tmp_path: Path
) -> None:
    """A folder, a folder that isn't there, what is no path; a disk that is full is what the system says."""
    job = client.submit_edit("t2i", prompt="x")
    for path in (tmp_path, tmp_path / "no" / "out.mp4", "", "a\0b", "x/", 7):
        with refused("path"):
            job.result(path)  # type: ignore[arg-type]
    jobs.succeed(job.id, CLIP)
    with pytest.raises(OSError, match="too long"):
        job.result(tmp_path / ("x" * 255 + "y"), LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_made_room_for_others_is_gone(client: Client, jobs: ScriptedJobs, tmp_path: Path) -> None:
    """The job is still known, and no file is written."""
    job = client.submit_edit("t2i", prompt="x")
    jobs.change(job.id, state="succeeded")
    with pytest.raises(JobError, match="isn't kept any more"):
        job.result(tmp_path / "out.mp4", LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_more_results_than_may_be_fetched_at_once_are_all_fetched(
    client: Client, jobs: ScriptedJobs, in_thread: InThread
) -> None:
    """They wait for their turn."""
    many = [client.submit_edit("t2i", prompt="x") for _ in range(9)]
    for number, job in enumerate(many):
        jobs.succeed(job.id, CLIP[number:])
    outcomes = [in_thread(lambda job=job: job.result(timeout=LIMIT_S)) for job in many]  # type: ignore[misc]
    for number, outcome in enumerate(outcomes):
        assert outcome.get(timeout=LIMIT_S) == CLIP[number:]


def test_jobs_are_found_again(client: Client, stand_in: StandIn, jobs: ScriptedJobs) -> None:
    """By id, from any client; all of them; and a deleted one is gone."""
    first, second = client.submit_edit("t2i", prompt="x", key="a"), client.submit_edit("t2i", prompt="y", key="b")
    found = client.job(first.id)
    assert (found.id, found.key, found.kind) == ("j1", "a", "t2i")
    assert [status.job for status in client.jobs()] == [second.id, first.id]
    assert found.status().state == "queued"
    assert found.delete().state == "queued"
    for ask in (found.status, found.cancel, found.delete, found.wait, found.result, lambda: list(found.progress())):
        with pytest.raises(JobError, match="there is no job j1"):
            ask()
    with pytest.raises(JobError):
        client.job("j9")
    with refused("id"):
        client.job("")
    assert list(client.job_kinds) == ["v2v", "ads2v", "t2i"]
    client.close()
    for call in (second.status, second.wait, client.jobs, lambda: list(second.progress())):
        with pytest.raises(UsageError, match="the client was closed"):
            call()


def test_whoever_waits_is_told_when_the_client_is_closed(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, in_thread: InThread
) -> None:
    """Progress and result end with it; the job goes on."""
    job = client.submit_edit("t2i", prompt="x")
    outcomes = [in_thread(lambda: list(job.progress())), in_thread(job.result)]
    stand_in.next(m.WatchJob)
    client.close()
    for outcome in outcomes:
        assert isinstance(outcome.get(timeout=LIMIT_S), UsageError)
    assert jobs.jobs[job.id].state == "queued"
