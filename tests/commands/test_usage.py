"""Wrong usage ends with one sentence that names the field and what is accepted, and an exit code that says whose fault."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .conftest import Ended, Reelwire

NOBODY = "tcp://127.0.0.1:9"


def refused(ended: Ended, *words: str) -> None:
    """Exit code 2 and one sentence with these words."""
    sentence = ended.sentence()
    assert ended.code == 2, ended
    for word in words:
        assert word in sentence, sentence


def test_a_missing_picture_is_named(reelwire: Reelwire) -> None:
    """No such file."""
    refused(reelwire("stream", "nowhere.jpg", "--prompt", "x"), "image: ", "nowhere.jpg", "is not a file")
    refused(reelwire("stream", "--prompt", "x"), "image: ", "accepted: ")


def test_an_unreadable_picture_is_named(here: Reelwire, tmp_path: Path) -> None:
    """A file that is no picture, and one that is cut off."""
    (tmp_path / "text.png").write_text("no picture")
    refused(here("stream", "text.png", "--prompt", "x"), "image: ", "can't be read", "PNG")


def test_an_empty_prompt_is_refused(here: Reelwire, picture: Path) -> None:
    """Blanks are no prompt."""
    refused(here("stream", str(picture), "--prompt", "  "), "prompt: is empty; accepted: any text")


def test_a_bad_trace_says_its_line(here: Reelwire, picture: Path, tmp_path: Path) -> None:
    """In the flag or in a file."""
    refused(here("stream", str(picture), "--prompt", "x", "--keys", "0 w"), "keys: line 1", "accepted: ")
    (tmp_path / "trace.txt").write_text("0.0 +w\nsoon -w\n")
    refused(here("stream", str(picture), "--prompt", "x", "--keys", "trace.txt"), "keys: line 2", "soon")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chunks", "2", "--frames", "21"], ["--chunks and --frames", "accepted: one of them"]),
        (["--poses", "p", "--keys", "0 +w"], ["--poses", "--keys"]),
        (["--chunks", "0"], ["--chunks: is too small; accepted: 1 or more"]),
        (["--chunks", "many"], ["--chunks: is no integer; accepted: an integer"]),
        (["--seed", "x"], ["--seed"]),
        (["--out", "world.avi"], ["out: ", "accepted: a path that ends in .mp4"]),
        (["--out", "nowhere/world.mp4"], ["out: ", "nowhere"]),
        (["--set", "shift"], ["set: ", "NAME=VALUE"]),
        (["--from", "x.json"], ["--prompt", "--from"]),
        (["--colour", "red"], ["there is no option --colour; accepted: "]),
        (["--frames-policy", "round"], ["--frames-policy: 'round' is not accepted; accepted: 'strict', 'truncate'"]),
        (["--endpoint", "localhost"], ["endpoint", "accepted: tcp://HOST:PORT"]),
        (["--config", "nowhere.toml"], ["config: ", "nowhere.toml", "No such file", "accepted: a TOML file"]),
        (["--keys"], ["--keys: is given without a value; accepted: one value"]),
        (["other.jpg", "third.jpg"], ["other.jpg third.jpg: too many arguments; accepted: those of --help"]),
    ],
)
def test_flags_of_stream_that_cannot_be_right(
    here: Reelwire, picture: Path, flags: list[str], words: list[str]
) -> None:
    """Each names the flag."""
    refused(here("stream", str(picture), "--prompt", "x", *flags), *words)


def test_a_record_that_is_none_is_named(here: Reelwire, tmp_path: Path) -> None:
    """Missing, another JSON, and no JSON."""
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "text.json").write_text("no JSON")
    for name in ("missing.json", "other.json", "text.json"):
        refused(here("stream", "--from", name), "from: ", name, "accepted: ")


def test_nobody_listening_is_exit_code_3(reelwire: Reelwire, picture: Path) -> None:
    """The sentence names the endpoint and how long it was tried; a worker and a client alike."""
    for arguments in (["status"], ["stream", str(picture), "--prompt", "x"]):
        ended = reelwire(*arguments, "--endpoint", NOBODY, env={"REELWIRE_CLIENT_CONNECT_TIMEOUT_S": "0.3"}, limit_s=20)
        assert ended.code == 3
        assert NOBODY in ended.sentence()
    ended = reelwire("worker", "--broker", NOBODY, "--set", "connect_timeout_s=0.3", limit_s=30)
    assert ended.code == 3
    assert NOBODY in ended.err.splitlines()[-1]


def test_unknown_commands_and_none(reelwire: Reelwire) -> None:
    """A typing error is wrong usage; no command shows the help and is wrong usage too."""
    refused(reelwire("straem"), "there is no command 'straem'; accepted: 'stream'")
    ended = reelwire()
    assert ended.code == 2
    assert "stream" in ended.out + ended.err


@contextmanager
def taken_port() -> Iterator[int]:
    """A port that something else listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_named(reelwire: Reelwire) -> None:
    """A broker doesn't start where something listens already."""
    with taken_port() as port:
        refused(reelwire("broker", "--listen", f"tcp://127.0.0.1:{port}", limit_s=20), "listen", str(port), "in use")


def test_an_ipc_path_in_use_is_named(reelwire: Reelwire, tmp_path: Path) -> None:
    """A path where another broker listens, and one that is no socket at all, are left alone."""
    (tmp_path / "file.ipc").write_text("somebody's file")
    refused(reelwire("broker", "--listen", f"ipc://{tmp_path / 'file.ipc'}", limit_s=20), "listen", "file.ipc")
    assert (tmp_path / "file.ipc").read_text() == "somebody's file"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "localhost:7461"], ["broker.listen", "tcp://HOST:PORT"]),
        (["--set", "heartbeat_s=often"], ["broker.heartbeat_s", "(--set)", "a number"]),
        (["--set", "heartbeat_s=0"], ["broker.heartbeat_s"]),
        (["--set", "colour=red"], ["colour", "heartbeat_s"]),
    ],
)
def test_wrong_settings_of_a_broker(reelwire: Reelwire, flags: list[str], words: list[str]) -> None:
    """Each names the setting."""
    refused(reelwire("broker", *flags, limit_s=20), *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "gpu"], ["worker.device", "cuda:N"]),
        (["--pipeline", "nope"], ["pipeline: ", "nope", "world"]),
        (["--stages", "encode,dance"], ["stages: ", "dance", "encode"]),
        (["--option", "model=huge"], ["model: ", "huge", "tiny"]),
        (["--option", "colour=red"], ["colour", "model"]),
        (["--option", "model"], ["option: ", "NAME=VALUE"]),
        (["--broker", "localhost"], ["worker.broker", "tcp://HOST:PORT"]),
        (["--name", "two words"], ["worker.name"]),
        (["--set", "slots=0"], ["worker.slots"]),
    ],
)
def test_wrong_settings_of_a_worker(reelwire: Reelwire, flags: list[str], words: list[str]) -> None:
    """Each names the setting, before the broker is looked for."""
    refused(reelwire("worker", "--broker", NOBODY, *flags, limit_s=30), *words)


def test_wrong_topologies_of_up(here: Reelwire, tmp_path: Path) -> None:
    """Flags beside [[workers]], unknown settings, and two workers of one name are refused before anything starts."""
    (tmp_path / "up.toml").write_text("[[workers]]\ndevice = 'cpu'\n")
    refused(here("up", "--config", "up.toml", "--workers", "2"), "workers", "[[workers]]")
    (tmp_path / "bad.toml").write_text("[[workers]]\ndevcie = 'cpu'\n")
    refused(here("up", "--config", "bad.toml"), "devcie", "device")
    (tmp_path / "twice.toml").write_text("[[workers]]\nname = 'a'\n[[workers]]\nname = 'a'\n")
    refused(here("up", "--config", "twice.toml"), "'a'", "twice")


def test_settings_are_shown_with_where_they_came_from(reelwire: Reelwire, tmp_path: Path) -> None:
    """A table for eyes, JSON for programs, with the layer of each value."""
    (tmp_path / "reelwire.toml").write_text("[broker]\nheartbeat_s = 2\n[[workers]]\ndevice = 'cuda:1'\n")
    environ = {"REELWIRE_WORKER_SLOTS": "2", "REELWIRE_BROKER": NOBODY}
    shown = reelwire("config", "show", "--json", env=environ)
    assert shown.code == 0
    settings = json.loads(shown.out)["settings"]
    assert settings["broker"]["heartbeat_s"] == {"value": 2.0, "layer": "file", "from": "reelwire.toml"}
    assert settings["worker"]["slots"] == {"value": 2, "layer": "environment", "from": "REELWIRE_WORKER_SLOTS"}
    assert settings["client"]["endpoint"]["value"] == NOBODY
    assert settings["workers[1]"]["device"]["value"] == "cuda:1"
    assert settings["broker"]["missed"]["layer"] == "default"
    assert "REELWIRE_WORKER_SLOTS" in reelwire("config", "show", env=environ).out


def test_ctrl_c_while_a_command_imports_is_told(here: Reelwire, monkeypatch: pytest.MonkeyPatch) -> None:
    """One word and exit code 1, as later on."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reelwire.settings.Settings.load", interrupted)
    ended = here("up")
    assert (ended.code, ended.sentence()) == (1, "stopped")


def test_the_version_is_printed(reelwire: Reelwire) -> None:
    """By the flag, on standard output."""
    from reelwire import __version__

    ended = reelwire("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"reelwire {__version__}\n", "")


def test_debug_shows_where_an_error_was_raised(reelwire: Reelwire) -> None:
    """By flag or by variable; the sentence comes last."""
    for ended in (
        reelwire("--debug", "status", "--endpoint", "x"),
        reelwire("status", "--endpoint", "x", env={"REELWIRE_DEBUG": "1"}),
    ):
        assert "Traceback" in ended.err
        assert ended.err.splitlines()[-1].startswith("reelwire: client.endpoint")


def test_help_shows_what_stands_in_brackets(here: Reelwire) -> None:
    """Names of TOML tables are no markup."""
    said = " ".join(here("up", "--help").out.split())
    assert "[broker], any number of [[workers]]" in said
    assert "[[groups]]" in said
