"""Kinds of jobs by reference."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from reelwire.job_spec import JobSpec
from reelwire.pipeline import registry
from reelwire.spec import RequestError

FILE = """
from reelwire.job_spec import JobSpec

class Jobs:
    array_library = "numpy"

    def __init__(self, name="toy", **options):
        self.jobs = (JobSpec(name, "for tests"),)
        self.options = options

    def check_group(self, world):
        pass

    def build(self, device, ranks):
        return None

ready = Jobs()
nothing = Jobs()
nothing.jobs = ()
twice = Jobs()
twice.jobs = ready.jobs * 2
wrong = Jobs(name="")
jax = Jobs()
jax.array_library = "jax"
stream = 7
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "kinds.py"
    path.write_text(FILE, encoding="utf-8")
    return str(path)


def test_jobs_of_a_file_are_made_with_their_options(file: str) -> None:
    """A ready object as it is, a callable with what was given."""
    assert [spec.name for spec in registry.load_jobs(f"{file}:ready").jobs] == ["toy"]
    made: Any = registry.load_jobs(f"{file}:Jobs", {"name": "other", "x": "1"})
    assert ([spec.name for spec in made.jobs], made.options) == (["other"], {"x": "1"})


def test_built_in_kinds_are_those_of_whoever_asks() -> None:
    """By their name."""
    made: Any = types.SimpleNamespace(jobs=(JobSpec("toy", "for tests"),))
    assert registry.load_jobs("mine", {}, {"mine": lambda _: made}) is made
    with pytest.raises(RequestError, match=r"accepted: a built-in name .*mine") as caught:
        registry.load_jobs("yours", {}, {"mine": lambda _: made})
    assert caught.value.field == "jobs"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "there is no kind of job"),
        ("twice", "two kinds of jobs are called 'toy'"),
        ("wrong", "empty name"),
        ("jax", "accepted: numpy, torch"),
        ("stream", "is a int; accepted: a JobPipeline"),
        ("absent", "has no 'absent'"),
        ("ready", "accepted: no options"),
    ],
)
def test_what_is_no_kind_of_job_is_refused(file: str, name: str, says: str) -> None:
    """With what is accepted in its place."""
    with pytest.raises(RequestError, match=says):
        registry.load_jobs(f"{file}:{name}", {"x": "1"} if name == "ready" else {})
