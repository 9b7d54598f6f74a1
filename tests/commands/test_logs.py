"""What children of a command say, on its standard error."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from reelwire.commands.logs import FOR_EYES, ChildLines, child_environment

from .conftest import ready_line, running


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


@pytest.mark.parametrize(
    ("terminal", "as_json", "for_eyes"), [(True, False, "1"), (True, True, "0"), (False, False, "0")]
)
def test_children_log_for_eyes_when_their_command_does(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, as_json: bool, for_eyes: str
) -> None:
    """They write into a pipe either way, so they are told what is at its other end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert child_environment(as_json=as_json) == {FOR_EYES: for_eyes}


def test_a_daemon_that_is_told_so_logs_as_people_read_it(tmp_path: Path) -> None:
    """Lines of words, without JSON and without the colours of a terminal, though standard error is a pipe."""
    with running("broker", "--listen", "tcp://127.0.0.1:*", cwd=tmp_path, env={FOR_EYES: "1"}) as process:
        ready_line(process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert err
    assert "{" not in err
    assert "\x1b" not in err
