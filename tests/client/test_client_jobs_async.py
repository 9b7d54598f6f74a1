"""Jobs in the SDK for event loops, against a broker made of plain messages."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire import (
    AsyncClient,
    AsyncJob,
    Client,
    Job,
    JobCancelled,
    JobError,
    JobFailed,
    JobStatus,
    RequestError,
    WireError,
)
from reelwire import messages as m
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import Failure

from .event_loops import LIMIT_S, heard, run, threads
from .scripted_jobs import ScriptedJobs

StandIn = Any  # of conftest.py
CLIP = np.random.default_rng(2).integers(0, 256, 5 * FILE_PART_BYTES + 7, np.uint8).tobytes()


@pytest.fixture
def jobs(stand_in: StandIn) -> ScriptedJobs:
    return ScriptedJobs(stand_in)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "in.mp4"
    path.write_bytes(CLIP)
    return path


def test_a_job_for_event_loops_has_the_methods_of_the_other() -> None:
    """The same names with the same parameters, and each has to be awaited, or iterated."""
    ours = {name: value for name, value in inspect.getmembers(AsyncJob) if not name.startswith("_")}
    theirs = {name: value for name, value in inspect.getmembers(Job) if not name.startswith("_")}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert inspect.signature(ours[name]).parameters == inspect.signature(value).parameters
        assert inspect.iscoroutinefunction(ours[name]) or name == "progress"
        assert "see `" in ours[name].__doc__
    assert inspect.signature(AsyncClient.submit_edit).parameters == inspect.signature(Client.submit_edit).parameters


def test_a_job_is_submitted_watched_and_fetched(stand_in: StandIn, jobs: ScriptedJobs, clip: Path) -> None:
    """All of it in tasks; afterwards there is no thread of the client."""

    async def work() -> list[JobStatus]:
        async with AsyncClient(stand_in.endpoint) as client:
            assert list(client.job_kinds) == ["v2v", "ads2v", "t2i"]
            job = await client.submit_edit("v2v", prompt="x", video=clip, seed=3, timeout=LIMIT_S)
            seen = []
            async for status in job.progress(LIMIT_S):
                seen.append(status)
                if status.state == "queued":
                    jobs.change(job.id, state="running", stage="denoise", step=1, steps=2)
                elif status.state == "running":
                    jobs.succeed(job.id, CLIP)
            out = clip.with_name("out.mp4")
            assert await job.result(out, LIMIT_S) == out
            assert out.read_bytes() == CLIP
            assert await job.result(timeout=LIMIT_S) == CLIP
            found = await client.job(job.id)
            assert (found.key, found.kind, found.id) == (job.key, "v2v", "j1")
            assert [status.job for status in await client.jobs()] == ["j1"]
            assert (await found.status()).state == (await found.wait()).state == "succeeded"
            assert (await found.delete()).state == "succeeded"
            with pytest.raises(JobError, match="no job j1"):
                await found.status()
            with pytest.raises(RequestError):
                await client.job("")
            assert "AsyncJob" in repr(job)
            return seen

    seen = run(work())
    assert [status.state for status in seen] == ["queued", "running", "succeeded"]
    assert jobs.files[jobs.requests["j1"].media["video"][0].sha256] == CLIP
    assert list(clip.parent.iterdir()) != []
    assert not threads()


def test_jobs_run_beside_each_other(stand_in: StandIn, jobs: ScriptedJobs, tmp_path: Path) -> None:
    """Two uploads at once, then two downloads at once, each with its own bytes."""
    paths = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    for number, path in enumerate(paths):
        path.write_bytes(CLIP[number:])

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            submitted = await asyncio.gather(*(client.submit_edit("v2v", prompt="x", video=path) for path in paths))
            for job in submitted:
                (file,) = jobs.requests[job.id].media["video"]
                jobs.succeed(job.id, jobs.files[file.sha256])
            assert await asyncio.gather(*(job.result() for job in submitted)) == [CLIP, CLIP[1:]]

    run(work())


def test_what_a_job_has_come_to_is_raised(stand_in: StandIn, jobs: ScriptedJobs, tmp_path: Path) -> None:
    """Failed, cancelled, another hash than was promised: no file is left."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            failed, cancelled, wrong = [await client.submit_edit("t2i", prompt="x") for _ in range(3)]
            jobs.change(failed.id, state="failed", failure=Failure("stage", "it broke"))
            jobs.succeed(wrong.id, CLIP, result_sha256="0" * 64)
            with pytest.raises(JobFailed, match="it broke"):
                await failed.result(tmp_path / "x.png")
            assert (await cancelled.cancel()).state == "cancelled"
            with pytest.raises(JobCancelled):
                await cancelled.result(tmp_path / "x.png")
            with pytest.raises(WireError, match="SHA-256"):
                await wrong.result(tmp_path / "x.png")
            with pytest.raises(RequestError, match="path"):
                await wrong.result(tmp_path)

    run(work())
    assert list(tmp_path.iterdir()) == []


def test_faults_of_a_request_are_found_before_anything_is_sent(
    stand_in: StandIn, jobs: ScriptedJobs, tmp_path: Path
) -> None:
    """As by the other client: `field` names them."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            faults: list[tuple[str, dict[str, Any]]] = [
                ("video", {"video": tmp_path / "no.mp4"}), ("steps", {"steps": 0}), ("kind", {"task": "x"}),
            ]  # fmt: skip
            for field, given in faults:
                with pytest.raises(RequestError) as caught:
                    await client.submit_edit(**{"task": "v2v", "prompt": "x", "video": __file__, **given})
                assert caught.value.field == field

    run(work())
    assert not jobs.requests


def test_progress_that_is_left_or_takes_too_long_watches_no_more(stand_in: StandIn, jobs: ScriptedJobs) -> None:
    """The broker is told each time."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            job = await client.submit_edit("t2i", prompt="x")

            async def told() -> bool:
                return [(await heard(stand_in, m.WatchJob)).on for _ in range(2)] == [True, False]

            async for status in job.progress():
                assert status.state == "queued"
                break
            assert await told()
            with pytest.raises(TimeoutError):
                async for _ in job.progress(0.05):
                    pass
            assert await told()
            with pytest.raises(TimeoutError):
                await job.wait(0.05)
            assert await told()
            with pytest.raises(RequestError):
                job.progress(-1)

    run(work())


@pytest.mark.parametrize("at", [m.BeginUpload, m.UploadPart, m.SubmitJob])
def test_a_cancelled_submission_is_withdrawn(stand_in: StandIn, jobs: ScriptedJobs, clip: Path, at: type) -> None:
    """Whatever it waits for; the client is as it was, and the same job can be submitted again."""
    stand_in.silent = {at}

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            task = asyncio.ensure_future(client.submit_edit("v2v", prompt="x", video=clip, key="mine"))
            await heard(stand_in, at)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.status()
            assert not client._link.core.jobs.submissions
            assert client._link._watching == {}
            stand_in.silent = set()
            assert (await client.submit_edit("v2v", prompt="x", video=clip, key="mine", timeout=LIMIT_S)).id == "j1"

    run(work())


def test_a_cancelled_hash_reads_no_further(
    stand_in: StandIn, jobs: ScriptedJobs, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads a large file for a task learns that nobody waits any more."""
    started, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    check = "reelwire.client_job_async.Wanted.check"
    from reelwire.client_job_async import Wanted

    real = Wanted.check

    def slow(wanted: Wanted) -> None:
        started.set()
        assert goes_on.wait(LIMIT_S)
        try:
            real(wanted)
        except TimeoutError:
            ended.set()
            raise

    monkeypatch.setattr(check, slow)

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            task = asyncio.ensure_future(client.submit_edit("v2v", prompt="x", video=clip))
            assert await asyncio.to_thread(started.wait, LIMIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            goes_on.set()
            assert await asyncio.to_thread(ended.wait, LIMIT_S)

    run(work())


def test_a_cancelled_download_leaves_nothing(stand_in: StandIn, jobs: ScriptedJobs, tmp_path: Path) -> None:
    """In its middle; and the next one is whole."""
    jobs.result_parts = lambda part: [part] if part.index < 3 else []

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            job = await client.submit_edit("t2i", prompt="x")
            jobs.succeed(job.id, CLIP)
            task = asyncio.ensure_future(job.result(tmp_path / "x.png"))
            for _ in range(3):
                await heard(stand_in, m.FetchResult)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert list(tmp_path.iterdir()) == []
            with pytest.raises(TimeoutError):
                await job.result(tmp_path / "x.png", 0.2)
            assert list(tmp_path.iterdir()) == []
            jobs.result_parts = lambda part: [part]
            assert (await job.result(tmp_path / "x.png", LIMIT_S)).read_bytes() == CLIP

    run(work())


def test_waiting_for_jobs_takes_no_threads(stand_in: StandIn, jobs: ScriptedJobs) -> None:
    """However many are waited for."""

    async def work() -> None:
        async with AsyncClient(stand_in.endpoint) as client:
            job = await client.submit_edit("t2i", prompt="x")
            before = threading.active_count()
            tasks = [asyncio.ensure_future(job.wait()) for _ in range(50)]
            await client.status()
            assert threading.active_count() == before
            jobs.succeed(job.id, b"x")
            assert {(await task).state for task in tasks} == {"succeeded"}

    run(work())
