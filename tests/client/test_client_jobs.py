"""Jobs that are submitted over a real socket, to a broker that is made of plain messages."""

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
    OverloadError,
    RequestError,
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
