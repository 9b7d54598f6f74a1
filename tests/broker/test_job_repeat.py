"""What a client is told who submits something else under a key that has a job already."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.job_record import JobRecord, StoredFile
from reelwire.broker.job_repeat import told_apart
from reelwire.job_spec import JobSpec, MediaInput
from reelwire.messages import Media
from reelwire.spec import Parameter

from .fake_jobs import Shop

PARAMETERS = (Parameter("steps", "integer", "", default=40), Parameter("prompt", "string", "", default=""))
SPEC = JobSpec("k", "", PARAMETERS, (MediaInput("video", "video"), MediaInput("images", "image", 0, 3)))
RECORD = JobRecord(
    "7-ab", 7, "key", "client", "k", parameters={"steps": 20, "prompt": ""}, media={"video": (StoredFile("a" * 64, 1),)}
)
FIRST: dict[str, Any] = {"parameters": {"steps": 20}, "media": {"video": (Media(sha256="a" * 64),)}}
OTHER_FILES = {"video": (Media(sha256="b" * 64),), "images": (Media(path="/a.png"), Media(path="/b.png"))}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kind": "other"}, "its kind is 'k', not 'other'"),
        ({"parameters": {"steps": 30}}, "its steps is 20, not 30"),
        ({"parameters": {}}, "its steps is 20, not 40"),
        ({"parameters": {"steps": 20.0, "prompt": "x"}, "output": "/a"}, "its prompt is '', not 'x'; its output is '', not '/a'"),
        ({"media": OTHER_FILES}, "its video is other files; its images are other files"),
        ({"media": {"video": (Media(path="/in/a.mp4"),)}}, "it left other values to their defaults, or its files were others"),
        ({"parameters": {"steps": 20, "prompt": ""}}, "it left other values to their defaults, or its files were others"),
        (
            {"parameters": {"steps": 1, "prompt": "x"}, "media": OTHER_FILES, "output": "/a"},
            "its steps is 20, not 1; its prompt is '', not 'x'; its video is other files; its images are other files; and 1 more",
        ),
    ],
)  # fmt: skip
def test_groups_07_what_differs_is_named(more: dict[str, Any], said: str) -> None:
    """Kind, parameters with both values, files, output; in plain words where the record can't tell."""
    request = m.SubmitJob(**{"key": "key", "kind": "k", **FIRST, **more})
    assert told_apart(request, RECORD, SPEC) == said


def test_groups_07_defaults_that_nobody_knows_any_more_are_not_compared() -> None:
    """No worker does that kind now: what wasn't said may be the same."""
    assert told_apart(m.SubmitJob("key", "k", {}, FIRST["media"]), RECORD, None).startswith("it left other values")
    assert (
        told_apart(m.SubmitJob("key", "k", {"steps": 3}), RECORD, None)
        == "its steps is 20, not 3; its video is other files"
    )


def test_groups_07_a_key_that_is_taken_is_refused_with_its_job_and_what_differs() -> None:
    """And with what to do."""
    shop = Shop()
    shop.worker()
    client = shop.client()
    job = client.accepted("k", parameters={"scale": 2})
    failure = client.refused("k", parameters={"scale": 3})
    assert failure.field == "key"
    assert (
        failure.message
        == f"is that of job {job} already, which is another one: its scale is 2, not 3; accepted: a new key"
    )
