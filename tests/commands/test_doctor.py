"""`reelwire doctor`: what it finds here, what it makes of what is missing, and how it ends."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
from pathlib import Path

import pytest

from reelwire import segment_files, segments
from reelwire.commands import diagnosis
from reelwire.commands.diagnosis import Finding

from .conftest import Reelwire

NOBODY = "tcp://127.0.0.1:9"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of our own for shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setenv(segment_files.VARIABLE, str(folder))
    return folder


def found(findings: list[Finding], what: str) -> Finding:
    """The one finding of that name."""
    (one,) = [finding for finding in findings if finding.what == what]
    return one


def leave_a_dead_producer() -> str:
    """Do what a producer does that is killed: its lock is gone, its folder is there."""
    pool = segments.Pool(1 << 20)
    assert pool.take(1000) is not None
    pool._folder.leave()
    segments._pools.discard(pool)
    return pool.owner


def test_it_ends_with_0_where_nothing_is_bad(here: Reelwire, memory: Path) -> None:
    """Nobody asked for a broker, so that none is there is a note; all areas are looked at."""
    ended = here("doctor", "--json")
    said = json.loads(ended.out)
    assert ended.code == 0, [each for each in said["findings"] if each["state"] == "bad"]
    assert said["ok"] is True
    areas = {each["area"] for each in said["findings"]}
    assert {"machine", "limits", "shared memory", "base", "extra worker", "devices", "attention", "broker"} <= areas
    assert not list(memory.rglob("*"))


def test_a_broker_that_was_named_and_does_not_answer_is_bad(here: Reelwire, memory: Path) -> None:
    """The command ends with 1, and the table names the endpoint."""
    ended = here("doctor", "--endpoint", NOBODY)
    assert ended.code == 1
    assert NOBODY in ended.out
    assert "bad" in ended.out


def test_a_broker_and_its_workers_are_shown(lab: str) -> None:
    """What answers is told with its version, and each worker with its device."""
    findings = list(diagnosis.broker(lab, 10.0, asked_for=True))
    assert {each.state for each in findings} == {"ok"}
    assert found(findings, "worker lab-worker").found == "on cpu"


def test_what_the_dead_left_is_told_and_removed_when_asked(memory: Path) -> None:
    """Looking changes nothing; `--reap` removes it; a living producer's memory stays in both cases."""
    dead = leave_a_dead_producer()
    alive = segments.Pool(1 << 20)
    try:
        looked = list(diagnosis.shared_memory(reap=False))
        assert found(looked, "left by the dead") == Finding(
            "shared memory",
            "left by the dead",
            "1 folders",
            "note",
            "`reelwire doctor --reap` removes them, as every worker does when it starts",
        )
        assert segment_files.abandoned() == [dead]
        reaped = list(diagnosis.shared_memory(reap=True))
        assert found(reaped, "left by the dead").found == "1 folders removed"
        assert segment_files.abandoned() == []
        assert (segment_files.folder_of_user() / alive.owner).is_dir()
    finally:
        alive.close()


def test_shared_memory_that_cannot_be_had_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors go inside of messages then."""
    monkeypatch.setenv(segment_files.VARIABLE, str(tmp_path / "nowhere"))
    assert found(list(diagnosis.shared_memory(reap=False)), "use").state == "note"


def test_packages_are_held_against_what_the_package_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old is bad; missing is bad in the base and a note in an extra, with how to install it; markers count."""
    asked = [
        "numpy>=1.26",
        "rich>=900",
        "no-such-base>=1",
        'torch>=2.11; extra == "worker"',
        'no-such-extra>=1; extra == "worker"',
        'winonly>=1; platform_system == "Windows" and extra == "worker"',
        'pyright[nodejs]>=1; extra == "dev"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: asked)
    findings = list(diagnosis.packages())
    states = {each.what: each.state for each in findings}
    assert states["numpy"] == states["torch"] == "ok"
    assert states["rich"] == states["no-such-base"] == "bad"
    assert states["no-such-extra"] == "note"
    assert found(findings, "is for").hint == "pip install 'reelwire[worker]'"
    assert not {"winonly", "pyright"} & states.keys()


@pytest.mark.parametrize(
    ("less", "more"), [("2.9", "2.10"), ("2.13", "2.13.1"), ("1.26.4", "2"), ("0.9+cpu", "1.0"), ("2.10rc1", "2.11")]
)
def test_versions_are_compared_by_number(less: str, more: str) -> None:
    """Not as texts; trailing zeros and local parts don't count."""
    assert diagnosis._numbers(less) < diagnosis._numbers(more)
    assert diagnosis._numbers("2.0") == diagnosis._numbers("2") == diagnosis._numbers("2.0.0+cu126")


def test_tight_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few open files are a note, hardly any are bad; no limit is no finding to act on."""
    given = {"files": (1000, 2000), "locked": (1 << 16, 1 << 16)}

    def limit(which: int) -> tuple[int, int]:
        return given["files" if which == resource.RLIMIT_NOFILE else "locked"]

    monkeypatch.setattr(resource, "getrlimit", limit)
    findings = list(diagnosis.limits())
    assert found(findings, "open files").state == found(findings, "locked memory").state == "note"
    given["files"], given["locked"] = (100, 100), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    findings = list(diagnosis.limits())
    assert found(findings, "open files").state == "bad"
    assert found(findings, "locked memory") == Finding("limits", "locked memory", "no limit")


def test_without_torch_there_is_a_note_and_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers and clients need none."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert [(each.what, each.state) for each in diagnosis.devices()] == [("torch", "note")]


def test_a_torch_that_cannot_be_imported_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was installed, so that somebody wants it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    assert [(each.what, each.state) for each in diagnosis.devices()] == [("torch", "bad")]


def test_sizes_are_told_in_their_largest_unit() -> None:
    """Down to bytes."""
    assert [diagnosis._size(size) for size in (3 << 30, 5 << 20, 1536, 7)] == [
        "3.0 GiB",
        "5.0 MiB",
        "1.5 KiB",
        "7 bytes",
    ]
