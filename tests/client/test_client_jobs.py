"""Jobs in the SDK on a real socket, against a broker made of plain messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire import (
    BrokerUnreachable,
    Client,
    Control,
    Job,
    JobCancelled,
    JobError,
    JobFailed,
    JobStatus,
    OverloadError,
    RequestError,
    UsageError,
    WireError,
)
from reelwire import messages as m
from reelwire.client import first_job_kinds
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import Failure

from .scripted_jobs import KINDS, ScriptedJobs

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


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "in.mp4"
    path.write_bytes(CLIP)
    return path


@contextmanager
def refused(field: str) -> Iterator[Any]:
    with pytest.raises(RequestError) as caught:
        yield caught
    assert caught.value.field == field


def submit(client: Client, clip: Path, **more: Any) -> Job:
    return client.submit_edit("v2v", prompt="x", video=clip, timeout=LIMIT_S, **more)


# --- submitting --------------------------------------------------------------------------------------------------------


def test_a_job_carries_everything(client: Client, jobs: ScriptedJobs, clip: Path, tmp_path: Path) -> None:
    """Files are uploaded in parts and named by their content, each once; what is None isn't sent."""
    (tmp_path / "a.png").write_bytes(b"a picture")
    (tmp_path / "b.png").write_bytes(b"a picture")
    images: list[str | Path] = [tmp_path / "a.png", str(tmp_path / "b.png"), "broker:/roots/c.png"]
    job = client.submit_edit(task="v2v", prompt="make it snow", video=str(clip), images=images, seed=42, steps=8,
                             priority=-3, output="broker:/out/x.mp4", timeout=LIMIT_S)  # fmt: skip
    request = jobs.requests[job.id]
    assert (request.kind, request.priority, request.output) == ("v2v", -3, "/out/x.mp4")
    assert request.parameters == {"prompt": "make it snow", "seed": 42, "steps": 8}
    assert request.media.keys() == {"video", "images"}
    assert [jobs.files[file.sha256] for file in request.media["video"]] == [CLIP]
    first, second, third = request.media["images"]
    assert first == second
    assert jobs.files[first.sha256] == b"a picture"
    assert (third.path, third.sha256) == ("/roots/c.png", "")
    assert (job.id, job.kind, job.key) == ("j1", "v2v", request.key)
    assert len(job.key) == 36
    assert "j1" in repr(job)


def test_what_the_broker_has_is_not_sent_again(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, clip: Path
) -> None:
    """The second job takes the same clip: no part of it travels."""
    submit(client, clip)
    submit(client, clip)
    client.close()
    heard = [stand_in.heard.get(timeout=LIMIT_S) for _ in range(stand_in.heard.qsize())]
    assert sum(isinstance(message, m.UploadPart) for message in heard) == 6
    assert sum(isinstance(message, m.BeginUpload) for message in heard) == 2


def test_groups_07_submit_is_idempotent(client: Client, jobs: ScriptedJobs, clip: Path) -> None:
    """Twice under one key is one job; without a key each is another."""
    first, second = submit(client, clip, key="mine"), submit(client, clip, key="mine")
    assert (first.id, first.key) == (second.id, second.key) == ("j1", "mine")
    assert submit(client, clip).id != submit(client, clip).id


def test_inputs_of_other_names_and_several_files(
    client: Client, jobs: ScriptedJobs, clip: Path, tmp_path: Path
) -> None:
    """`media` takes inputs by name, and a list gives an input several files."""
    other = tmp_path / "other.mp4"
    other.write_bytes(b"other")
    job = client.submit_edit("v2v", prompt="x", video=[clip], media={"masks": [other, clip], "images": other})
    media = jobs.requests[job.id].media
    assert {name: len(files) for name, files in media.items()} == {"video": 1, "masks": 2, "images": 1}
    assert media["video"][0] == media["masks"][1]


def test_groups_08_what_can_not_be_done_is_refused_before_anything_is_sent(
    client: Client, stand_in: StandIn, clip: Path, tmp_path: Path
) -> None:
    """Each fault names the field, as the broker would."""
    (tmp_path / "empty").touch()
    ok: dict[str, Any] = {"prompt": "x", "video": clip}
    faults: list[tuple[str, dict[str, Any]]] = [
        ("kind", ok | {"task": "v3v"}), ("kind", ok | {"task": 7}), ("prompt", {"video": clip}), ("video", {"prompt": "x"}),
        ("video", ok | {"video": [clip] * 3}), ("video", ok | {"task": "t2i"}), ("steps", ok | {"steps": 0}),
        ("steps", ok | {"steps": "8"}), ("colour", ok | {"colour": "red"}), ("profile", ok | {"profile": "fast"}),
        ("seed", ok | {"seed": 1.5}), ("video", ok | {"video": tmp_path / "none.mp4"}), ("video", ok | {"video": tmp_path}),
        ("video", ok | {"video": tmp_path / "empty"}), ("video", ok | {"video": "a\0b"}), ("video", ok | {"video": 7}),
        ("video", ok | {"video": b"in.mp4"}), ("images[1]", ok | {"images": [clip, tmp_path / "no.png"]}),
        ("images[0]", ok | {"images": [7]}), ("images", ok | {"images": [clip] * 4}), ("sound", ok | {"media": {"sound": clip}}),
        ("media", ok | {"media": {"video": clip}}), ("media", ok | {"media": [clip]}),
        ("masks[1]", ok | {"media": {"masks": [clip, 7]}}), ("key", ok | {"key": "x" * 257}), ("priority", ok | {"priority": 101}),
        ("priority", ok | {"priority": True}), ("key", ok | {"key": ""}), ("key", ok | {"key": 7}),
        ("output", ok | {"output": "x.mp4"}), ("output", ok | {"output": 7}), ("video", ok | {"video": "broker:in.mp4"}),
        ("parameters", ok | {"prompt": "\ud800"}), ("prompt", ok | {"prompt": "x" * 1_500_000}),
        ("timeout", ok | {"timeout": -1}),
    ]  # fmt: skip
    for field, given in faults:
        with refused(field):
            client.submit_edit(**{"task": "v2v", **given})
    client.close()
    stand_in.next(m.ClientHello)
    assert isinstance(stand_in.heard.get(timeout=LIMIT_S), m.Goodbye)


def test_groups_08_a_file_that_is_too_large_is_refused_at_once(
    stand_in: StandIn, jobs: ScriptedJobs, clip: Path
) -> None:
    """By the limit that the broker has said, and by the field."""
    stand_in.limits = {"upload_bytes_max": len(CLIP) - 1}
    with Client(stand_in.endpoint) as client:
        with refused("video") as caught:
            submit(client, clip)
        assert f"takes {len(CLIP)} bytes; accepted by the broker: {len(CLIP) - 1}" in str(caught.value)
    stand_in.limits = {"upload_bytes_max": len(CLIP)}
    with Client(stand_in.endpoint) as client:
        submit(client, clip)


def test_without_workers_there_is_no_room(stand_in: StandIn, jobs: ScriptedJobs) -> None:
    """Which kinds there will be nobody knows, so that the kind can't be called wrong; later on there are some."""
    stand_in.jobs = ()
    with Client(stand_in.endpoint) as client:
        with pytest.raises(OverloadError, match="no worker that is attached does jobs"):
            client.submit_edit("v2v")
        assert client.job_kinds == {}
        with pytest.raises(TimeoutError):
            first_job_kinds(client, 0.05)
        stand_in.say(m.Welcome("me-1", "0.1.0", 1.0, 3, {}, (), KINDS))
        assert list(first_job_kinds(client, LIMIT_S)) == ["v2v", "ads2v", "t2i"]
        assert client.submit_edit("t2i", prompt="a hill").kind == "t2i"


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure("request", "is no clip", field="video"), RequestError),
        (Failure("overload", "full", retry_after_s=3.0), OverloadError),
        (Failure("shutdown", "the broker stops"), BrokerUnreachable),
    ],
)
def test_groups_14_a_refusal_is_raised(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, failure: Failure, kind: type[Exception]
) -> None:
    """Whose fault it is, which field, and when to try again."""
    stand_in.more = lambda message: [m.JobRefused(failure, key=message.key)] if isinstance(message, m.SubmitJob) else []
    with pytest.raises(kind, match=failure.message) as caught:
        client.submit_edit("t2i", prompt="x")
    assert getattr(caught.value, "retry_after_s", 3.0) == 3.0
    assert getattr(caught.value, "field", "video") == "video"


def test_a_submission_that_takes_too_long_is_given_up(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, clip: Path
) -> None:
    """While a file is awaited, and while the answer is: the same key tells afterwards what became of it."""
    stand_in.silent = {m.BeginUpload}
    with pytest.raises(TimeoutError):
        client.submit_edit("v2v", prompt="x", video=clip, timeout=0.1)
    stand_in.silent = {m.SubmitJob}
    with pytest.raises(TimeoutError):
        client.submit_edit("t2i", prompt="x", key="mine", timeout=0.1)
    stand_in.silent = set()
    assert client.submit_edit("t2i", prompt="x", key="mine", timeout=LIMIT_S).key == "mine"


def test_a_file_that_changes_while_it_is_uploaded_is_refused(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, clip: Path
) -> None:
    """Shorter: found here; other bytes: found by their hash; gone: named."""
    changes: list[tuple[Callable[[], object], str]] = [
        (lambda: clip.write_bytes(CLIP[:FILE_PART_BYTES]), "was changed while it was uploaded"),
        (lambda: clip.write_bytes(CLIP[:FILE_PART_BYTES] + CLIP[FILE_PART_BYTES:][::-1]), "has another hash"),
        (clip.unlink, "can't be read any more"),
    ]
    for change, sentence in changes:
        clip.write_bytes(CLIP)

        def before(message: Any, change: Callable[[], object] = change) -> None:
            if isinstance(message, m.BeginUpload):
                change()

        stand_in.before = before
        with refused("video") as caught:
            submit(client, clip)
        assert sentence in str(caught.value)


def test_two_jobs_at_once(client: Client, jobs: ScriptedJobs, tmp_path: Path, in_thread: InThread) -> None:
    """Two threads submit different clips over one client: each job has its own."""
    outcomes = []
    for number in range(2):
        path = tmp_path / f"{number}.mp4"
        path.write_bytes(CLIP[number:])
        outcomes.append(in_thread(lambda path=path: submit(client, path)))  # type: ignore[misc]
    for number, outcome in enumerate(outcomes):
        job = outcome.get(timeout=LIMIT_S)
        assert jobs.files[jobs.requests[job.id].media["video"][0].sha256] == CLIP[number:]


def test_a_session_is_steered_while_a_clip_is_uploaded(
    client: Client, stand_in: StandIn, jobs: ScriptedJobs, clip: Path, in_thread: InThread
) -> None:
    """The upload stands still for want of a grant, the session doesn't; and parts are no more than granted."""
    first, goes_on = threading.Event(), threading.Event()
    take = jobs.take

    def slowly(part: m.UploadPart) -> list[Any]:
        first.set()
        return [] if not goes_on.is_set() else take(part)

    jobs.take = slowly  # type: ignore[method-assign]
    outcome = in_thread(lambda: submit(client, clip))
    assert first.wait(LIMIT_S)
    with client.open_session("toy", chunks=2) as session:
        for index in range(2):
            session.submit(index, Control(keys=["w"]), timeout=LIMIT_S)
        assert [chunk.index for chunk in session] == [0, 1]
    assert outcome.empty()
    goes_on.set()
    jobs.restart()
    assert outcome.get(timeout=LIMIT_S).id == "j1"


def test_an_upload_leaves_room_for_what_is_small(
    stand_in: StandIn, jobs: ScriptedJobs, clip: Path, monkeypatch: pytest.MonkeyPatch, in_thread: InThread
) -> None:
    """However much is granted, parts are added only while little waits to be sent: a slow broker isn't given up for it."""
    monkeypatch.setattr("reelwire.client_loop.OUTBOX_BYTES_MAX", 3 * FILE_PART_BYTES)
    monkeypatch.setattr("reelwire.client_loop.ROOM_BYTES", FILE_PART_BYTES)
    monkeypatch.setattr("reelwire.client_loop._SNDHWM", 2)
    clip.write_bytes(CLIP * 12)
    reads, waits = threading.Event(), threading.Event()
    jobs.window_parts = 1000
    stand_in.before = lambda message: reads.wait(LIMIT_S) if isinstance(message, m.UploadPart) else None
    with Client(stand_in.endpoint) as client:
        has_room = client._link.has_room

        def asked(news: str) -> bool:
            if has_room(news):
                return True
            waits.set()
            return False

        monkeypatch.setattr(client._link, "has_room", asked)
        outcome = in_thread(lambda: submit(client, clip))
        assert waits.wait(LIMIT_S)
        assert client._link._outbox_bytes < 3 * FILE_PART_BYTES
        reads.set()
        assert outcome.get(timeout=LIMIT_S).id == "j1"
    heard = [stand_in.heard.get(timeout=LIMIT_S) for _ in range(stand_in.heard.qsize())]
    assert sum(isinstance(message, m.ClientHello) for message in heard) == 1


# --- the job -----------------------------------------------------------------------------------------------------------


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
        if status.state == "queued":
            stand_in.next(m.AskJobs)  # was answered as well
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
    assert stand_in.next(m.WatchJob).on
    assert not stand_in.next(m.WatchJob).on
    with pytest.raises(TimeoutError):
        list(job.progress(0.05))
    with pytest.raises(TimeoutError):
        job.wait(0.05)
    client.status()
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
    with pytest.raises(JobFailed, match="out of memory at this size") as caught:
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
