"""What children of a command say, on its standard error."""

from __future__ import annotations

import json

import pytest

from reelwire.commands.logs import ChildLines


def test_a_sentence_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the command ends with is left out; the last ones of other children aren't lost."""
    lines = ChildLines()
    lines("a", "stderr", "reelwire: no such device")
    lines("b", "stderr", "reelwire: stopped")
    lines("b", "stdout", "{}")
    lines.release(but="a: no such device")
    lines.release()
    assert capsys.readouterr().err == "b: reelwire: stopped\n"


def test_a_sentence_before_a_restart_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """In its order, as soon as the same child is heard of again."""
    lines = ChildLines()
    lines("a", "stderr", "reelwire: broke")
    lines("a", "stderr", "starts again")
    assert capsys.readouterr().err == "a: reelwire: broke\na: starts again\n"


def test_json_lines_stay_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With the child's name inside; what is no object becomes one."""
    lines = ChildLines(as_json=True)
    for line in ('{"event": "attached", "level": "info"}', "plain words", "3"):
        lines("worker-1", "stderr", line)
    assert [json.loads(line) for line in capsys.readouterr().err.splitlines()] == [
        {"process": "worker-1", "event": "attached", "level": "info"},
        {"process": "worker-1", "event": "plain words"},
        {"process": "worker-1", "event": "3"},
    ]
