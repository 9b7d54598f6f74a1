"""Settings: flags over the environment over a file over defaults, and each refusal names the field and its origin."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from reelwire import Client
from reelwire.broker.config import BrokerConfig
from reelwire.errors import ConfigError
from reelwire.settings import ClientSettings, Settings, environment_name
from reelwire.workers.config import WorkerConfig


@dataclass(frozen=True)
class Sample:
    """One field of each type that a section may have."""

    count: int = 1
    wait_s: float = 2.0
    name: str = "a"
    on: bool = False
    mode: Literal["fast", "slow"] = "fast"
    stages: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError("count", f"{self.count} is negative; accepted: 0 or more")


@dataclass(frozen=True)
class Needy:
    """A section that can't be made without being told something."""

    name: str


def settings(tmp_path: Path, text: str = "", environ: Mapping[str, str] | None = None) -> Settings:
    """Layers of a file with that text and that environment."""
    file = tmp_path / "some.toml"
    file.write_text(text)
    return Settings.load(file, environ or {})


def test_defaults_hold_where_nobody_says_anything(tmp_path: Path) -> None:
    """An empty file changes nothing, and every origin is the default."""
    resolved = settings(tmp_path).resolve("broker", Sample)
    assert resolved.value == Sample()
    assert {origin.layer for origin in resolved.origins.values()} == {"default"}


def test_each_layer_is_over_the_one_below_it(tmp_path: Path) -> None:
    """A flag wins over a variable, a variable over the file, the file over the default; a flag not given is no flag."""
    layers = settings(
        tmp_path,
        "[broker]\ncount = 2\nwait_s = 3\nname = 'file'\n",
        {"REELWIRE_BROKER_WAIT_S": "4.5", "REELWIRE_BROKER_NAME": "variable"},
    )
    resolved = layers.resolve("broker", Sample, {"name": "flag", "on": None})
    assert (resolved.value.count, resolved.value.wait_s, resolved.value.name) == (2, 4.5, "flag")
    origins = {name: (origin.layer, str(origin)) for name, origin in resolved.origins.items()}
    assert origins["count"] == ("file", str(tmp_path / "some.toml"))
    assert origins["wait_s"] == ("environment", "REELWIRE_BROKER_WAIT_S")
    assert origins["name"] == ("flag", "--name")
    assert origins["on"] == ("default", "default")


def test_texts_become_what_their_field_is(tmp_path: Path) -> None:
    """Variables are read as numbers, truth values, lists, mappings and paths."""
    environ = {
        "REELWIRE_BROKER_COUNT": "7",
        "REELWIRE_BROKER_ON": "yes",
        "REELWIRE_BROKER_MODE": "slow",
        "REELWIRE_BROKER_STAGES": "encode, decode",
        "REELWIRE_BROKER_OPTIONS": "model=tiny,size=large",
        "REELWIRE_BROKER_PATH": "/tmp/x",
    }
    made = settings(tmp_path, "", environ).resolve("broker", Sample).value
    assert made == Sample(
        7, 2.0, "a", True, "slow", ("encode", "decode"), {"model": "tiny", "size": "large"}, Path("/tmp/x")
    )


@pytest.mark.parametrize(
    ("variable", "text", "accepted"),
    [
        ("COUNT", "many", "an integer"),
        ("COUNT", "1.5", "an integer"),
        ("WAIT_S", "soon", "a number"),
        ("ON", "perhaps", "true or false"),
        ("MODE", "medium", "fast, slow"),
        ("OPTIONS", "model", "NAME=VALUE"),
        ("OPTIONS", "=x", "NAME=VALUE"),
    ],
)
def test_a_wrong_variable_is_refused_with_what_is_accepted(
    tmp_path: Path, variable: str, text: str, accepted: str
) -> None:
    """The sentence names the field, the variable and what is accepted."""
    name = f"REELWIRE_BROKER_{variable}"
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, "", {name: text}).resolve("broker", Sample)
    assert caught.value.field == f"broker.{variable.lower()}"
    assert name in str(caught.value)
    assert f"accepted: {accepted}" in str(caught.value)


@pytest.mark.parametrize("line", ["count = 'x'", "on = 1", "name = 3", "stages = 4", "wait_s = true", "path = 4"])
def test_a_wrong_type_in_the_file_is_refused(tmp_path: Path, line: str) -> None:
    """TOML has types; a value of another one is no setting."""
    with pytest.raises(ConfigError, match=r"some\.toml"):
        settings(tmp_path, f"[broker]\n{line}\n").resolve("broker", Sample)


def test_what_the_section_itself_refuses_says_where_it_came_from(tmp_path: Path) -> None:
    """A check of the dataclass is reported with section and origin."""
    with pytest.raises(ConfigError, match=r"broker\.count: -1 is negative; accepted: 0 or more \(--count\)"):
        settings(tmp_path).resolve("broker", Sample, {"count": -1})


@pytest.mark.parametrize(
    ("text", "culprit"),
    [("[brokers]\n", "brokers"), ("[broker]\ncuont = 1\n", r"broker\.cuont"), ("broker = 3\n", "broker")],
)
def test_unknown_names_in_the_file_are_refused(tmp_path: Path, text: str, culprit: str) -> None:
    """A typing error doesn't silently leave a default in force."""
    with pytest.raises(ConfigError, match=culprit):
        settings(tmp_path, text).resolve("broker", Sample)


def test_unknown_names_in_the_environment_are_refused(tmp_path: Path) -> None:
    """A variable that starts like a section's but names no setting of it is refused."""
    with pytest.raises(ConfigError, match="REELWIRE_BROKER_CUONT"):
        settings(tmp_path, "", {"REELWIRE_BROKER_CUONT": "1"}).resolve("broker", Sample)


def test_a_file_that_was_named_must_be_there_and_be_toml(tmp_path: Path) -> None:
    """By flag or by variable; only the default file may be missing."""
    with pytest.raises(ConfigError, match="can't be read"):
        Settings.load(tmp_path / "nowhere.toml", {})
    with pytest.raises(ConfigError, match="can't be read"):
        Settings.load(None, {"REELWIRE_CONFIG": str(tmp_path / "nowhere.toml")})
    with pytest.raises(ConfigError, match="is no TOML"):
        settings(tmp_path, "[broker")


def test_the_file_of_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``reelwire.toml`` where the command runs counts without being named."""
    monkeypatch.chdir(tmp_path)
    assert Settings.load(None, {}).file == ""
    (tmp_path / "reelwire.toml").write_text("[broker]\ncount = 5\n")
    assert Settings.load(None, {}).resolve("broker", Sample).value.count == 5


def test_each_worker_of_a_topology_stands_on_the_common_table(tmp_path: Path) -> None:
    """[[workers]] gives one section each, over [worker], and how many of it are wanted."""
    layers = settings(tmp_path, "[worker]\nname = 'one'\n[[workers]]\n[[workers]]\nname = 'two'\ncount = 4\n")
    made: list[Any] = [(count, resolved.value) for count, resolved in layers.workers(Needy)]
    assert made == [(1, Needy("one")), (4, Needy("two"))]
    with pytest.raises(ConfigError, match=r"workers\[1\]\.count.*accepted: 1 or more"):
        settings(tmp_path, "[[workers]]\nname = 'x'\ncount = 0\n").workers(Needy)
    with pytest.raises(ConfigError, match=r"workers\[1\]\.colour"):
        settings(tmp_path, "[[workers]]\ncolour = 'red'\n").workers(Needy)
    with pytest.raises(ConfigError, match=r"workers\[1\]"):
        settings(tmp_path, "workers = [3]\n").workers(Sample)


def test_a_setting_without_default_is_asked_for(tmp_path: Path) -> None:
    """The sentence names it instead of showing a call that failed."""
    with pytest.raises(ConfigError, match=r"worker\.name: is missing; accepted: --name"):
        settings(tmp_path).resolve("worker", Needy)


def test_the_endpoint_of_clients_has_a_variable_of_its_own(tmp_path: Path) -> None:
    """REELWIRE_BROKER names the broker's endpoint, for commands as for the SDK."""
    assert environment_name("client", "endpoint") == "REELWIRE_BROKER"
    made = settings(tmp_path, "", {"REELWIRE_BROKER": "tcp://127.0.0.1:9"}).resolve("client", ClientSettings)
    assert made.value.endpoint == "tcp://127.0.0.1:9"
    with pytest.raises(ConfigError, match=r"client\.endpoint.*accepted: tcp://"):
        settings(tmp_path, "", {"REELWIRE_BROKER": "localhost"}).resolve("client", ClientSettings)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("connect_timeout_s", "1.5", 1.5),
        ("output_credit_chunks", "3", 3),
        ("output_credit_bytes", "1000", 1000),
        ("shared_memory", "false", False),
    ],
)
def test_what_a_client_takes_can_be_set_and_is_checked(tmp_path: Path, name: str, text: str, value: object) -> None:
    """By the names and within the bounds that the SDK's arguments have."""
    given = settings(tmp_path, f"[client]\n{name} = {text}\n").resolve("client", ClientSettings)
    assert getattr(given.value, name) == value
    assert name in inspect.signature(Client).parameters
    with pytest.raises(ConfigError, match=rf"client\.{name}.*accepted"):
        settings(tmp_path, f"[client]\n{name} = -1\n").resolve("client", ClientSettings)


@pytest.mark.parametrize("section", [BrokerConfig, WorkerConfig, ClientSettings])
def test_the_unit_of_a_setting_is_in_its_name(section: Any) -> None:
    """Seconds are floats and say so, bytes are integers and say so, and no other setting does."""
    for item in fields(section):
        parts = item.name.split("_")
        assert ("s" in parts) == (item.type == "float"), item.name
        assert "bytes" not in parts or item.type == "int", item.name
        if item.type == "int" and isinstance(item.default, int) and item.default > 1 << 14:
            assert "bytes" in parts, item.name
