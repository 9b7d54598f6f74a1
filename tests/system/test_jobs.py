"""Jobs over groups of real processes: gloo, links, journal and all; the emulated kind, whose clip shows every step."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from reelwire import Client, Job, JobCancelled, JobFailed, JobStatus, RequestError, SessionFailed
from reelwire.media import VideoWriter

LIMIT_S = 60.0
LOST_WITHIN_S = 4.0
JOBS = ("--pipeline", "emulated", "--jobs", "emulated")
QUICK = ("--job-option", "step_s=0.01")
SLOW = ("--job-option", "step_s=0.1")


def until(job: Job, condition: Callable[[JobStatus], bool]) -> JobStatus:
    """Where the job stands once the condition holds; there is a limit, and its end is one."""
    give_up = time.monotonic() + LIMIT_S
    for event in job.progress():
        if condition(event):
            return event
        assert time.monotonic() < give_up, event
    raise AssertionError(f"the job ended before: {job.status()}")


def digest(job: Job) -> str:
    """Of the result, which must be what the broker says that it is."""
    found = hashlib.sha256(job.result(timeout=LIMIT_S)).hexdigest()
    assert found == job.status().result_sha256
    return found


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A short clip of moving bars."""
    path = tmp_path / "bars.mp4"
    frames = np.zeros((9, 48, 64, 3), np.uint8)
    for index in range(9):
        frames[index, :, index * 6 : index * 6 + 6] = 200
    with VideoWriter(path, 16.0) as video:
        video.write(frames)
    return path


def test_groups_10_a_job_says_where_it_is_all_the_way_to_its_clip(stack: Any, clip: Path, tmp_path: Path) -> None:
    """Queued, preparing, running step by step, encoding, succeeded: in this order, and the clip is written."""
    stack.broker()
    stack.group("edit", 2, *JOBS, *QUICK)
    job = stack.client().submit_edit("emulated-v2v", prompt="as it was", video=clip, seed=3, steps=12)
    events = list(job.progress())
    order = ["queued", "preparing", "running", "encoding", "succeeded"]
    places = [order.index(event.state) for event in events]
    assert places == sorted(places)
    assert events[-1].state == "succeeded"
    steps = [(event.stage, event.step) for event in events if event.state == "running"]
    assert steps == sorted(steps, key=lambda step: ("denoise_high", "denoise_low").index(step[0]) * 100 + step[1])
    assert job.result(tmp_path / "out.mp4") == tmp_path / "out.mp4"
    assert digest(job) == hashlib.sha256((tmp_path / "out.mp4").read_bytes()).hexdigest()


def test_groups_03_a_stream_slips_in_and_the_job_makes_the_same_clip(stack: Any, take: Any) -> None:
    """While chunks of a session run between a job's steps, both make what they make alone."""
    stack.broker()
    stack.group("edit", 2, *JOBS, *SLOW, "--option", "denoise_s=0.02")
    client = stack.client()
    alone = digest(client.submit_edit("emulated", seed=5, steps=10))
    with client.open_session("emulated", seed=1, chunks=6) as session:
        session.press("w")
        quiet = [chunk.frames.tobytes() for chunk in take(session, 6)]
    job = client.submit_edit("emulated", seed=5, steps=30)
    until(job, lambda event: event.state == "running" and event.step > 0)
    with client.open_session("emulated", seed=1, chunks=6) as session:
        session.press("w")
        beside = [chunk.frames.tobytes() for chunk in take(session, 6)]
    assert job.status().state == "running"
    assert beside == quiet
    job.result(timeout=LIMIT_S)
    assert digest(client.submit_edit("emulated", seed=5, steps=10)) == alone


def test_groups_12_a_job_whose_rank_is_killed_goes_on_from_what_was_kept(stack: Any, take: Any) -> None:
    """The group ends within seconds, sessions on it fail clearly, and the job makes the same clip in a second attempt."""
    stack.broker()
    ranks = stack.group("edit", 2, *JOBS, *SLOW)
    client = stack.client()
    request = {"seed": 9, "steps": 20, "switch": 8}
    undisturbed = digest(client.submit_edit("emulated", **request))
    job = client.submit_edit("emulated", **request)
    session = client.open_session("emulated", seed=1, chunks=500)
    session.press("w")
    take(session, 1)
    until(job, lambda event: event.checkpoint_step >= 10)
    killed_at = time.monotonic()
    ranks[1].kill()
    with pytest.raises(SessionFailed):
        take(session, 500)
    until(job, lambda event: event.state == "queued")
    assert time.monotonic() - killed_at < LOST_WITHIN_S
    assert ranks[0].process.wait(LIMIT_S) == 1
    stack.expect_code(ranks[0], 1)
    stack.group("edit", 2, *JOBS, *SLOW)
    assert digest(job) == undisturbed
    assert job.status().attempt == 2


def test_groups_04_a_rank_that_stands_still_is_killed_for_certain(stack: Any) -> None:
    """A stopped process is silent: the broker ends the group, and whoever is left kills it."""
    stack.broker()
    ranks = stack.group("edit", 2, *JOBS, *SLOW)
    job = stack.client().submit_edit("emulated", seed=2, steps=200)
    until(job, lambda event: event.state == "running" and event.step > 1)
    stopped_at = time.monotonic()
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    until(job, lambda event: event.state == "queued")
    assert time.monotonic() - stopped_at < LOST_WITHIN_S
    assert ranks[1].process.wait(LIMIT_S) == -signal.SIGKILL
    assert ranks[0].process.wait(LIMIT_S) == 1
    stack.expect_code(ranks[0], 1)
    assert job.cancel().state == "cancelled"


def test_groups_07_a_job_outlives_its_broker(stack: Any, tmp_path: Path) -> None:
    """After kill -9 the running job goes on where it was, the queued one waits on, and both are done once."""
    kept = {"state_dir": tmp_path / "state"}
    broker = stack.broker(**kept)
    stack.group("edit", 2, *JOBS, *SLOW)
    client = stack.client()
    alone = digest(client.submit_edit("emulated", seed=4, steps=10))
    running, waiting = (client.submit_edit("emulated", seed=4, steps=steps) for steps in (40, 10))
    until(running, lambda event: event.state == "running" and event.step > 2)
    broker.kill()
    stack.broker_again(**kept)
    assert digest(waiting) == alone
    assert {job.status().attempt for job in (running, waiting)} == {1}
    assert len(client.jobs()) == 3


def test_groups_07_a_job_and_its_result_outlive_a_broker_that_is_away_for_long(stack: Any, tmp_path: Path) -> None:
    """Beyond connect_timeout_s: the group goes on to the result, and keeps it until a broker takes it."""
    kept = {"state_dir": tmp_path / "state"}
    broker = stack.broker(**kept)
    ranks = stack.group("edit", 2, *JOBS, *SLOW, connect_timeout_s=1)
    client = stack.client()
    alone = digest(client.submit_edit("emulated", seed=4, steps=30))
    job = client.submit_edit("emulated", seed=4, steps=30)
    until(job, lambda event: event.state == "running" and event.step > 2)
    broker.kill()
    ranks_say(ranks, "broker_away")
    ranks_say(ranks[:1], f"job {job.id} is made")
    stack.broker_again(**kept)
    assert digest(job) == alone
    assert job.status().attempt == 1


@pytest.mark.parametrize("away_s", [4.5, pytest.param(8.0, marks=pytest.mark.slow)])
def test_groups_07_a_job_outlives_a_broker_that_stood_still(stack: Any, tmp_path: Path, away_s: float) -> None:
    """Its ranks lose it and say hello again: they are the same group, and the job goes on in its first attempt."""
    broker = stack.broker(state_dir=tmp_path / "state")
    ranks = stack.group("edit", 2, *JOBS, *SLOW)
    client = stack.client()
    alone = digest(client.submit_edit("emulated", seed=4, steps=10))
    running, waiting = (client.submit_edit("emulated", seed=4, steps=steps) for steps in (150, 10))
    until(running, lambda event: event.state == "running" and event.step > 2)
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        ranks_say(ranks, "attachment_lost", away_s)
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)
    assert digest(waiting) == alone
    assert {job.status().attempt for job in (running, waiting)} == {1}
    assert all(rank.process.poll() is None for rank in ranks)
    assert "job_lost_its_group" not in broker.log.read_text()


def ranks_say(ranks: list[Any], words: str, least_s: float = 0.0) -> None:
    """Wait until all ranks have written something into their logs, and for so long at least; all of them go on."""
    stopped_at = time.monotonic()
    for rank in ranks:
        while words not in rank.log.read_text() or time.monotonic() - stopped_at < least_s:
            assert time.monotonic() - stopped_at < LIMIT_S
            with pytest.raises(subprocess.TimeoutExpired):  # whoever ends meanwhile has given up
                rank.process.wait(0.05)


def test_groups_11_a_cancelled_job_frees_its_group_at_the_next_step(stack: Any) -> None:
    """Cancelled while it runs and while it waits; the next job is right."""
    stack.broker()
    stack.group("edit", 2, *JOBS, *SLOW)
    client = stack.client()
    alone = digest(client.submit_edit("emulated", seed=6, steps=5))
    running, waiting = (client.submit_edit("emulated", seed=6, steps=300) for _ in range(2))
    until(running, lambda event: event.state == "running" and event.step > 0)
    assert waiting.cancel().state == "cancelled"
    running.cancel()
    for job in (running, waiting):
        with pytest.raises(JobCancelled):
            job.result(timeout=LIMIT_S)
    assert digest(client.submit_edit("emulated", seed=6, steps=5)) == alone


def test_groups_13_a_rank_that_fails_alone_fails_the_job_and_the_group_goes_on(stack: Any) -> None:
    """Its fellow, which waits for it in a collective, comes back; the reason is the one of the rank that raised."""
    stack.broker()
    stack.group("edit", 2, *JOBS, *QUICK)
    client = stack.client()
    with pytest.raises(JobFailed, match="rank 1"):
        client.submit_edit("emulated", steps=20, fail_at=7, fail_rank=1).result(timeout=LIMIT_S)
    failed = client.jobs()[0]
    assert failed.attempt == 1
    client.submit_edit("emulated", steps=5).result(timeout=LIMIT_S)


def bad_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files that are no video, each with a word of the refusal."""
    text = folder / "text.mp4"
    text.write_text("nothing of a video")
    yield "video", text
    empty = folder / "empty.mp4"
    empty.touch()
    yield "video", empty
    picture = folder / "picture.png"
    Image.new("RGB", (64, 48)).save(picture)
    yield "video", picture
    frameless = folder / "frameless.mp4"
    with av.open(str(frameless), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height = 64, 48
        container.start_encoding()
    yield "video", frameless
    large = folder / "large.mp4"
    with large.open("wb") as file:
        file.truncate(2 << 30)
    yield "video", large
    yield "video", folder


def test_groups_08_bad_requests_are_refused_by_field_and_leave_nothing(stack: Any, clip: Path, tmp_path: Path) -> None:
    """Before any worker sees them; the store holds what it held."""
    state, roots = tmp_path / "state", tmp_path / "media"
    roots.mkdir()
    (roots / "out").symlink_to(clip)
    os.mkfifo(roots / "pipe")
    stack.broker(state_dir=state, media_roots=roots)
    stack.worker("one", "emulated", jobs="emulated")
    client: Client = stack.client()
    requests: list[tuple[str, dict[str, Any]]] = [
        ("kind", {"task": "emulated-x"}),
        ("video", {"task": "emulated-v2v"}),
        ("images", {"task": "emulated-v2v", "video": clip, "images": [clip]}),
        ("images", {"task": "emulated-rv2v", "video": clip}),
        ("frames", {"task": "emulated", "frames": 6}),
        ("steps", {"task": "emulated", "steps": 0}),
        ("colour", {"task": "emulated", "colour": 3}),
        ("fps", {"task": "emulated", "fps": float("nan")}),
        ("steps", {"task": "emulated", "steps": 10**30}),
        ("priority", {"task": "emulated", "priority": 101}),
        ("output", {"task": "emulated", "output": f"{tmp_path}/elsewhere.mp4"}),
        ("video", {"task": "emulated-v2v", "video": f"broker:{roots}/pipe"}),
        ("video", {"task": "emulated-v2v", "video": "broker:/dev/zero"}),
        ("video", {"task": "emulated-v2v", "video": f"broker:{clip}"}),
        ("video", {"task": "emulated-v2v", "video": f"broker:{roots}/out"}),
        ("video", {"task": "emulated-v2v", "video": f"broker:{roots}/../{clip.name}"}),
        *((field, {"task": "emulated-v2v", "video": path}) for field, path in bad_files(tmp_path)),
    ]
    for field, request in requests:
        with pytest.raises(RequestError) as refused:
            client.submit_edit(**request)
        assert refused.value.field.split("[")[0] == field, str(refused.value)
    assert client.jobs() == []
    client.close()
    assert not list((state / "files").iterdir())
    assert not list((state / "incoming").iterdir())
