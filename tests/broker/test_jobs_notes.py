"""What is said of a job beside where it stands: in one sentence, to clients and in the status; most have nothing to say."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m

from .fake_jobs import Shop


@pytest.fixture
def shop() -> Shop:
    """A broker with nobody attached."""
    return Shop()


def fails_to_write(action: Any) -> str:
    """A store that writes no result to where it was asked for."""
    return "the folder is gone" if type(action).__name__ == "ExportFile" else ""


def test_a_job_with_nothing_to_say_has_no_note(shop: Shop) -> None:
    """Waiting, running and ended well: the sentence is empty, also in the status."""
    worker, client = shop.worker(), shop.client()
    jobs = [client.accepted(f"k{index}") for index in range(2)]
    assert [client.info(job).note for job in jobs] == ["", ""]
    assert [row["note"] for row in shop.jobs.status()["running"]] == [""]
    worker.finish(worker.runs[0])
    assert client.info(jobs[0]).note == ""


def test_a_result_that_couldnt_be_written_is_noted_wherever_the_job_is_told_of(shop: Shop) -> None:
    """To whoever watches it, asks for it or lists it; a worker that calls a fact of its own so doesn't make one."""
    worker, client = shop.worker(), shop.client()
    shop.disk.fails = fails_to_write
    job = client.accepted("k", output="/out/a.mp4")
    client.say(m.WatchJob(job))
    worker.finish(worker.runs[-1])
    note = "its result couldn't be written: the folder is gone (/out/a.mp4)"
    told = [client.heard(m.JobChanged)[-1].job, client.info(job), client.ask(m.AskJobs).jobs[0]]
    assert [info.note for info in told] == [note] * 3
    assert client.info(job).facts["output_error"] == "the folder is gone"
    own = client.accepted("k2")
    worker.finish(worker.runs[-1], output_error="none", frames=3)
    assert (client.info(own).note, client.info(own).facts) == ("", {"frames": 3})


def test_a_result_that_couldnt_be_written_can_be_fetched(shop: Shop) -> None:
    """The job has succeeded, and its note is there after a restart."""
    worker, client = shop.worker(), shop.client()
    shop.disk.fails = fails_to_write
    job = client.accepted("k", output="/out/a.mp4")
    worker.finish(worker.runs[-1], b"done")
    client = shop.restart().client()
    assert client.info(job).note == "its result couldn't be written: the folder is gone (/out/a.mp4)"
    assert client.fetch(job) == b"done"


def test_a_note_is_no_longer_than_other_texts(shop: Shop) -> None:
    """However long the path is that was asked for; what went wrong comes first."""
    worker, client = shop.worker(), shop.client()
    shop.disk.fails = fails_to_write
    job = client.accepted("k", output=f"/out/{'x' * 4000}.mp4")
    worker.finish(worker.runs[-1])
    note = client.info(job).note
    assert note.startswith("its result couldn't be written: the folder is gone")
    assert len(note) < 600


def test_a_result_that_isnt_kept_any_more_is_noted() -> None:
    """The job has succeeded, and there is nothing to be fetched."""
    shop = Shop(state_bytes_max=1000)
    worker, client = shop.worker(), shop.client()
    jobs = [client.accepted(f"k{index}") for index in range(2)]
    for size in (600, 700):
        worker.finish(worker.runs[-1], b"r" * size)
    assert [client.info(job).note for job in jobs] == ["its result made room for others", ""]


def test_a_result_that_isnt_taken_in_is_noted(shop: Shop) -> None:
    """Also in the status, beside the group that keeps it."""
    worker, client = shop.worker(), shop.client()
    job = client.accepted()
    shop.disk.is_full = True
    worker.finish(worker.runs[-1])
    note = "its result isn't taken in yet: the store has no room for it"
    assert client.info(job).note == note
    assert [(row["waits_for"], row["note"]) for row in shop.jobs.status()["running"]] == [("room", note)]


def test_a_job_that_waits_at_a_broker_that_stops_is_noted(shop: Shop) -> None:
    """Nothing begins it until the next broker is there, although its group is free; who watches it is told."""
    worker, client = shop.worker(), shop.client()
    jobs = [client.accepted(f"k{index}") for index in range(2)]
    client.say(m.WatchJob(jobs[1]))
    client.take(m.JobChanged)
    shop.jobs.drain()
    shop.turn()
    (told,) = client.take(m.JobChanged)
    assert told.job.note.startswith("the broker stops")
    assert told.job.waits_for == "broker"
    worker.fail(worker.runs[0])
    assert len(worker.runs) == 1
    assert client.info(jobs[1]).note.startswith("the broker stops")
