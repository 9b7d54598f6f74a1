"""Jobs over connections that are lost, at every step, and over brokers that begin anew."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire import AsyncClient, BrokerUnreachable, Client, JobError, OverloadError, SessionFailed
from reelwire import client_events as e
from reelwire import messages as m
from reelwire.client import watching_connection
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import Failure

from .event_loops import run
from .scripted_jobs import KINDS, LOST, ScriptedJobs

StandIn = Any  # of conftest.py
InThread = Callable[[Callable[[], Any]], queue.SimpleQueue[Any]]
LIMIT_S = 10.0
CLIP = np.random.default_rng(1).integers(0, 256, 5 * FILE_PART_BYTES + 7, np.uint8).tobytes()
STEPS: list[tuple[str, list[type]]] = [
    ("lose_before", [m.BeginUpload]),
    ("lose_after", [m.BeginUpload]),
    ("lose_before", [m.UploadPart]),
    ("lose_after", [m.UploadPart]),
    ("lose_before", [m.SubmitJob]),
    ("lose_after", [m.SubmitJob]),
    ("lose_after", [m.UploadPart, m.UploadPart, m.SubmitJob, m.BeginUpload]),
]
WATCHED: list[tuple[str, type]] = [
    ("lose_before", m.WatchJob),
    ("lose_after", m.WatchJob),
]


@pytest.fixture
def jobs(stand_in: StandIn) -> ScriptedJobs:
    return ScriptedJobs(stand_in)


@pytest.fixture
def client(stand_in: StandIn, jobs: ScriptedJobs) -> Iterator[Client]:
    with Client(stand_in.endpoint) as client:
        yield client


@pytest.fixture
def clips(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    for number, path in enumerate(paths):
        path.write_bytes(CLIP[number:])
    return paths


@pytest.mark.parametrize("for_event_loops", [False, True])
@pytest.mark.parametrize(("hook", "kinds"), STEPS)
def test_groups_07_a_submission_outlives_a_lost_connection(
    stand_in: StandIn, jobs: ScriptedJobs, clips: list[Path], hook: str, kinds: list[type], for_event_loops: bool
) -> None:
    """Before and after a file was begun, in its middle, before and after it was submitted: one job, with whole files."""
    getattr(jobs, hook).extend(kinds)
    given: dict[str, Any] = {"video": clips, "timeout": LIMIT_S}

    async def awaited() -> str:
        async with AsyncClient(stand_in.endpoint) as client:
            return (await client.submit_edit("ads2v", **given)).id

    if for_event_loops:
        assert run(awaited()) == "j1"
    else:
        with Client(stand_in.endpoint) as client:
            assert client.submit_edit("ads2v", **given).id == "j1"
    assert list(jobs.jobs) == ["j1"]
    files = [jobs.files[file.sha256] for file in jobs.requests["j1"].media["video"]]
    assert files == [CLIP, CLIP[1:]]
    assert not getattr(jobs, hook)


@pytest.mark.parametrize("for_event_loops", [False, True])
def test_a_connection_that_does_not_come_back_ends_a_submission(
    stand_in: StandIn, jobs: ScriptedJobs, clips: list[Path], for_event_loops: bool
) -> None:
    """After as long as a connection may take; the key is named, under which it may be tried again."""

    def before(message: Any) -> None:
        if isinstance(message, m.SubmitJob):
            stand_in.silent |= {m.ClientHello, m.SubmitJob}
            stand_in.say(LOST)

    stand_in.before = before
    given: dict[str, Any] = {"video": clips, "key": "mine"}

    async def awaited() -> None:
        async with AsyncClient(stand_in.endpoint, connect_timeout_s=0.5) as client:
            await client.submit_edit("ads2v", **given)

    with pytest.raises(BrokerUnreachable, match=r"isn't back after 0.5 s.*'mine'"):  # noqa: PT012
        if for_event_loops:
            run(awaited())
        with Client(stand_in.endpoint, connect_timeout_s=0.5) as client:
            client.submit_edit("ads2v", **given)


@pytest.mark.parametrize("for_event_loops", [False, True])
def test_groups_07_a_submission_waits_for_the_workers_of_a_broker_that_begins_anew(
    stand_in: StandIn, jobs: ScriptedJobs, monkeypatch: pytest.MonkeyPatch, for_event_loops: bool
) -> None:
    """They come back after the client: the job is accepted then; if they don't in time, it is tried again later."""
    refused = m.JobRefused(Failure("request", "nobody does jobs", field="kind"), key="mine")
    heard: list[m.SubmitJob] = []
    come_back = True

    def more(message: Any) -> list[Any]:
        if not isinstance(message, m.SubmitJob):
            return jobs.answers(message)
        heard.append(message)
        if len(heard) % 3 == 1:
            stand_in.jobs = ()
            return [LOST]
        stand_in.jobs = KINDS
        if len(heard) % 3 == 2:
            return [refused, m.Welcome("me-1", "0.1.0", 1.0, 3, {}, (), KINDS)] if come_back else [refused]
        return jobs.answers(message)

    stand_in.more = more

    async def awaited() -> str:
        async with AsyncClient(stand_in.endpoint) as client:
            return (await client.submit_edit("t2i", prompt="x", key="mine")).id

    def submitted() -> str:
        if for_event_loops:
            return run(awaited())
        with Client(stand_in.endpoint) as client:
            return client.submit_edit("t2i", prompt="x", key="mine").id

    assert submitted() == "j1"
    assert len(heard) == 3
    come_back = False
    monkeypatch.setattr("reelwire.client_job.WORKERS_BACK_S", 0.2)
    with pytest.raises(OverloadError, match=r"no worker that does 't2i' is back after 0\.2 s"):
        submitted()


@pytest.mark.parametrize(("hook", "kind"), WATCHED)
def test_groups_07_progress_goes_on_over_the_next_connection(
    client: Client, jobs: ScriptedJobs, hook: str, kind: type
) -> None:
    """Wherever it is lost while the watch begins, the job is watched to its end."""
    job = client.submit_edit("t2i", prompt="x")
    getattr(jobs, hook).append(kind)
    states = []
    for status in job.progress(LIMIT_S):
        states.append(status.state)
        if status.state == "queued":
            jobs.change(job.id, state="running")
        elif status.state == "running":
            jobs.succeed(job.id, b"done")
    assert states == ["queued", "running", "succeeded"]
    assert not getattr(jobs, hook)


def test_groups_07_a_broker_that_begins_anew_does_not_end_progress(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs
) -> None:
    """Again and again; what didn't change meanwhile isn't told twice, and what did is told."""
    job = client.submit_edit("t2i", prompt="x")
    seen: list[tuple[str, int]] = []
    for status in job.progress(LIMIT_S):
        seen.append((status.state, status.step))
        if status.step < 3:
            stand_in.next(m.WatchJob)
            jobs.restart()
            jobs.change(job.id, state="running", step=status.step + 1)
        elif not status.ended:
            jobs.restart()
            jobs.succeed(job.id, b"done")
    assert seen == [("queued", 0), ("running", 1), ("running", 2), ("running", 3), ("succeeded", 3)]


def test_whoever_watches_the_connection_is_told_when_it_is_lost_and_when_it_is_back(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs
) -> None:
    """Once each, however often something else changes meanwhile, and at once if it is lost already."""
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
    job = client.submit_edit("t2i", prompt="x")
    with watching_connection(client, heard.put):
        for _ in range(2):
            stand_in.next(m.ClientHello)
            jobs.restart()
            assert [heard.get(timeout=LIMIT_S) for _ in range(2)] == [False, True]
    with client._link.lock:  # the connection can't be made again before this ends
        client._link.feed(e.OutboxFull)
        with watching_connection(client, heard.put):
            assert heard.get(timeout=LIMIT_S) is False
    assert heard.empty()
    jobs.succeed(job.id, b"done")
    assert job.wait(LIMIT_S).state == "succeeded"


def test_a_broker_that_has_forgotten_the_job_ends_progress_and_result(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, in_thread: InThread, tmp_path: Path
) -> None:
    """Everybody who waits is told, also whoever fetches."""
    job = client.submit_edit("t2i", prompt="x")
    outcomes = [in_thread(lambda: list(job.progress())), in_thread(lambda: job.result(tmp_path / "x.png"))]
    stand_in.next(m.WatchJob)
    jobs.restart(keeps=False)
    for outcome in outcomes:
        error = outcome.get(timeout=LIMIT_S)
        assert type(error) is JobError
        assert "there is no job j1" in str(error)
    other = client.submit_edit("t2i", prompt="x")
    jobs.succeed(other.id, CLIP)
    del jobs.results[other.id]
    with pytest.raises(JobError, match="has no result"):
        other.result(tmp_path / "x.png", LIMIT_S)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("for_event_loops", [False, True])
@pytest.mark.parametrize("lost", [[0], [1], [3, 5], [0, 1, 2, 3, 4, 5]])
def test_groups_07_a_download_goes_on_where_it_was(
    stand_in: StandIn, jobs: ScriptedJobs, tmp_path: Path, lost: list[int], for_event_loops: bool
) -> None:
    """Parts that came before the connection was lost aren't asked for again, and the file is whole."""
    sent: list[int] = []

    def part_of(part: m.ResultPart) -> list[Any]:
        if part.index in lost:
            lost.remove(part.index)
            return [LOST]
        sent.append(part.index)
        return [part, part]

    jobs.result_parts = part_of
    out = tmp_path / "out.mp4"

    async def awaited() -> Path:
        async with AsyncClient(stand_in.endpoint) as client:
            job = await client.submit_edit("t2i", prompt="x")
            jobs.succeed(job.id, CLIP)
            return await job.result(out, LIMIT_S)

    if for_event_loops:
        assert run(awaited()) == out
    else:
        with Client(stand_in.endpoint) as client:
            job = client.submit_edit("t2i", prompt="x")
            jobs.succeed(job.id, CLIP)
            assert job.result(out, LIMIT_S) == out
    assert out.read_bytes() == CLIP
    assert lost == []
    assert set(sent) == set(range(6))


def test_two_jobs_and_a_session_over_one_lost_connection(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, in_thread: InThread
) -> None:
    """The session fails, as it always did; both jobs come to their ends."""
    first, second = client.submit_edit("t2i", prompt="x"), client.submit_edit("t2i", prompt="y")
    session = client.open_session("toy", chunks=2)
    told = threading.Barrier(3)

    def watched(job: Any) -> list[str]:
        states = []
        for status in job.progress(LIMIT_S):
            states.append(status.state)
            if status.state == "queued":
                told.wait(LIMIT_S)
        return states

    outcomes = [in_thread(lambda: watched(first)), in_thread(lambda: watched(second))]
    told.wait(LIMIT_S)
    jobs.restart()
    with pytest.raises(SessionFailed):
        session.next_chunk(LIMIT_S)
    jobs.succeed(first.id, b"1")
    jobs.succeed(second.id, b"2")
    for outcome in outcomes:
        assert outcome.get(timeout=LIMIT_S) == ["queued", "succeeded"]
    assert (first.result(timeout=LIMIT_S), second.result(timeout=LIMIT_S)) == (b"1", b"2")
