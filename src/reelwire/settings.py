"""Settings: flags over ``REELWIRE_*`` over a TOML file over the defaults of a dataclass, and where each came from.

A *section* is a dataclass with its defaults: ``[broker]``, ``[worker]``, ``[client]``. Its field ``heartbeat_s`` is
``heartbeat_s`` in the file's table, ``REELWIRE_BROKER_HEARTBEAT_S`` in the environment, and a flag of the command. The file
is the one named by ``--config`` or ``REELWIRE_CONFIG``, or ``reelwire.toml`` in the working folder if it is there.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from . import checks, endpoints
from .errors import ConfigError

T = TypeVar("T")
Layer = Literal["flag", "environment", "file", "default"]

FILE_DEFAULT = "reelwire.toml"
SECTIONS = ("client", "broker", "worker")
TOPOLOGY = ("workers", "groups")
"""Names of the lists of tables that say which workers, and which groups of them, `reelwire up` starts."""

ENVIRONMENT_NAMES = {("client", "endpoint"): "REELWIRE_BROKER"}
"""Settings whose variable has a name of its own."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a command that talks to a broker needs.

    Attributes:
        endpoint: where the broker listens.
        connect_timeout_s: how long a command waits for the broker's first answer.
        output_credit_chunks: chunks of a stream that may be sent and not taken, up to what its output edge holds.
        output_credit_bytes: bytes of such chunks, at most; one chunk may go over it.
        shared_memory: whether chunks may come through shared memory.
    """

    endpoint: str = endpoints.DEFAULT_ENDPOINT
    connect_timeout_s: float = 5.0
    output_credit_chunks: int = 2
    output_credit_bytes: int = 64 << 20
    shared_memory: bool = True

    def __post_init__(self) -> None:
        try:
            endpoints.parse(self.endpoint)
        except ValueError as error:
            raise ConfigError("endpoint", str(error)) from None
        checks.check_seconds("connect_timeout_s", self.connect_timeout_s)
        checks.check_count("output_credit_chunks", self.output_credit_chunks)
        checks.check_count("output_credit_bytes", self.output_credit_bytes, most=checks.BYTES_MAX)
        checks.check_truth("shared_memory", self.shared_memory)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; `where` is the flag, the variable or the file."""

    layer: Layer
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.layer


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """A section with all layers applied, and the origin of each field."""

    value: T
    origins: Mapping[str, Origin] = field(default_factory=dict)


class Settings:
    """The layers below the flags: one file that was read, and the environment."""

    def __init__(self, tables: Mapping[str, Any], file: str, environ: Mapping[str, str]) -> None:
        """Use `load`; tests give the layers themselves."""
        self._tables = tables
        self._environ = environ
        self.file = file

    @classmethod
    def load(cls, config: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the file, if there is one.

        Raises:
            ConfigError: the file that was named can't be read, or has a section that isn't one.
        """
        environ = os.environ if environ is None else environ
        named = config or environ.get("REELWIRE_CONFIG")
        path = Path(named or FILE_DEFAULT)
        if not named and not path.is_file():
            return cls({}, "", environ)
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                "config", f"{path} can't be read ({error.strerror or error}); accepted: a TOML file"
            ) from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError("config", f"{path} is no TOML file ({error}); accepted: a TOML file") from None
        accepted = (*SECTIONS, *TOPOLOGY)
        for name, table in tables.items():
            if name not in accepted:
                raise ConfigError(name, f"unknown section in {path}; accepted: {', '.join(accepted)}")
            if not isinstance(table, list if name in TOPOLOGY else dict):
                written = f"[[{name}]]" if name in TOPOLOGY else f"[{name}]"
                raise ConfigError(name, f"is no table in {path}; accepted: {written} with names and values")
        return cls(tables, str(path), environ)

    def resolve(
        self,
        section: str,
        kind: type[T],
        flags: Mapping[str, Any] | None = None,
        assigned: Mapping[str, str] | None = None,
    ) -> Resolved[T]:
        """Apply all layers to a section.

        Args:
            section: its name.
            kind: the dataclass that has the fields and their defaults, and checks the whole when it is made.
            flags: field name to value; None stands for a flag that wasn't given.
            assigned: what ``--set`` said, field name to text; it is over the flags.

        Raises:
            ConfigError: a name is unknown or a value isn't accepted; the sentence says where it came from.
        """
        known = hints(kind)
        given: dict[str, tuple[Any, Origin]] = {}
        for name, value in self._table(section).items():
            _check_known(section, name, known, self.file)
            given[name] = value, Origin("file", self.file)
        for name, variable, text in self._variables(section, known):
            given[name] = text, Origin("environment", variable)
        for name, value in (flags or {}).items():
            if value is not None:
                _check_known(section, name, known, "the flags")
                given[name] = value, Origin("flag", flag_name(name))
        for name, text in (assigned or {}).items():
            _check_known(section, name, known, "--set")
            given[name] = text, Origin("flag", "--set")
        return _made(section, kind, known, given)

    def workers(self, kind: type[T]) -> list[tuple[int, Resolved[T]]]:
        """The workers of the file's topology, each on top of ``[worker]``, with how many of each are wanted.

        Raises:
            ConfigError: as `resolve`.
        """
        made = []
        for section, table in self._listed("workers"):
            count = convert(f"{section}.count", int, table.pop("count", 1), Origin("file", self.file))
            if count < 1:
                raise ConfigError(f"{section}.count", f"{count} ({self.file}) is not accepted; accepted: 1 or more")
            made.append((count, self._layered(section, kind, table)))
        return made

    def groups(self, kind: type[T]) -> list[tuple[tuple[str, ...], Resolved[T]]]:
        """The groups of the file's topology, each on top of ``[worker]``, with the devices of its ranks.

        ``name`` is the group's; ``devices`` lists those of its ranks, or ``world`` says how many there are, from ``device`` on.

        Raises:
            ConfigError: as `resolve`.
        """
        made: list[tuple[tuple[str, ...], Resolved[T]]] = []
        named: dict[str, str] = {}
        for section, table in self._listed("groups"):
            for name in ("rank", "count", "group"):
                if name in table:
                    accepted = "name, devices, and those of a worker"
                    raise ConfigError(f"{section}.{name}", f"is no setting of a group; accepted: {accepted}")
            devices = self._devices(section, table)
            name = table.pop("name", "")
            if name == "":
                raise ConfigError(f"{section}.name", "is missing; accepted: the name of the group")
            resolved = self._group(section, kind, {**table, "group": name}, devices)
            if name in named:
                reason = f"{name!r} is that of {named[name]}, too ({self.file}); accepted: another name for each group"
                raise ConfigError(f"{section}.name", reason)
            named[name] = section
            made.append((devices, resolved))
        return made

    def _devices(self, section: str, table: dict[str, Any]) -> tuple[str, ...]:
        """Take the devices of a group's ranks out of its table; what follows from them for the group is put there."""
        field_name, origin = f"{section}.devices", Origin("file", self.file)
        if "devices" not in table:
            return ()
        given = table.pop("devices")
        if not isinstance(given, list) or not given:
            raise _refused(field_name, given, origin, "a list that has the device of each rank")
        if "world" in table or "device" in table:
            raise ConfigError(
                field_name, "is given beside world or device; accepted: devices alone, or both of the others"
            )
        devices = _sequence(field_name, str, given, origin)
        for device in devices:
            if device != "cpu" and devices.count(device) > 1:
                raise _refused(field_name, given, origin, f"a device of its own for each rank, {device!r} once")
        table |= {"device": devices[0], "world": len(devices)}
        return devices

    def _group(self, section: str, kind: type[T], table: Mapping[str, Any], devices: tuple[str, ...]) -> Resolved[T]:
        """Rank 0 of a group; what is wrong is named as it is in the file."""
        written = {f"{section}.group": f"{section}.name"}
        if devices:
            written |= {f"{section}.{name}": f"{section}.devices" for name in ("device", "world")}
        try:
            resolved = self._layered(section, kind, table)
            for device in devices[1:]:
                self._layered(section, kind, {**table, "device": device})
        except ConfigError as error:
            raise ConfigError(written.get(error.field, error.field), error.reason) from None
        return resolved

    def _listed(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """The tables of a list, each with its name in errors."""
        listed = []
        for number, table in enumerate(self._tables.get(name, ()), start=1):
            section = f"{name}[{number}]"
            if not isinstance(table, Mapping):
                raise ConfigError(section, f"is no table in {self.file}; accepted: [[{name}]]")
            listed.append((section, dict(table)))
        return listed

    def _layered(self, section: str, kind: type[T], table: Mapping[str, Any]) -> Resolved[T]:
        known, origin = hints(kind), Origin("file", self.file)
        given: dict[str, tuple[Any, Origin]] = {}
        for name, value in {**self._table("worker"), **table}.items():
            _check_known(section, name, known, self.file)
            given[name] = value, origin
        return _made(section, kind, known, given)

    def _table(self, section: str) -> Mapping[str, Any]:
        table: Mapping[str, Any] = self._tables.get(section, {})
        return table

    def _variables(self, section: str, known: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        variables = {environment_name(section, name): name for name in known}
        prefix = f"REELWIRE_{section.upper()}_"
        found = []
        for variable, text in sorted(self._environ.items()):
            if variable in variables:
                found.append((variables[variable], variable, text))
            elif variable.startswith(prefix):
                accepted = ", ".join(sorted(variables))
                raise ConfigError(variable, f"unknown setting in the environment; accepted: {accepted}")
        return found


def environment_name(section: str, name: str) -> str:
    """The variable that sets a field."""
    return ENVIRONMENT_NAMES.get((section, name), f"REELWIRE_{section.upper()}_{name.upper()}")


def flag_name(name: str) -> str:
    """The flag that sets a field."""
    return f"--{name.replace('_', '-')}"


def hints(kind: type[Any]) -> dict[str, Any]:
    """Field name to type, of the fields that can be set."""
    resolved = typing.get_type_hints(kind)
    return {item.name: resolved[item.name] for item in dataclasses.fields(kind) if item.init}


def convert(field_name: str, kind: Any, value: Any, origin: Origin) -> Any:
    """A value as the type of its field; texts are read as numbers, lists and truth values where the field is one.

    Raises:
        ConfigError: it can't be.
    """
    options = typing.get_args(kind)
    base = typing.get_origin(kind)
    if base in (typing.Union, types.UnionType):
        if value in (None, "", "none") and type(None) in options:
            return None
        (kind,) = (option for option in options if option is not type(None)) if len(options) == 2 else (str,)
        return convert(field_name, kind, value, origin)
    if base is Literal:
        text = value if value in options else str(value)
        if text not in options:
            raise _refused(field_name, value, origin, ", ".join(str(option) for option in options))
        return text
    if base in (tuple, list):
        return _sequence(field_name, options[0] if options else str, value, origin)
    if base is not None and issubclass(base, Mapping):
        return _mapping(field_name, options[1] if len(options) == 2 else str, value, origin)
    return _scalar(field_name, kind, value, origin)


def _made(
    section: str, kind: type[T], known: Mapping[str, Any], given: Mapping[str, tuple[Any, Origin]]
) -> Resolved[T]:
    values = {name: convert(f"{section}.{name}", known[name], value, origin) for name, (value, origin) in given.items()}
    origins = {name: given[name][1] if name in given else Origin("default") for name in known}
    try:
        made = kind(**values)
    except ConfigError as error:
        origin = origins.get(error.field)
        came_from = f" ({origin})" if origin is not None and origin.layer != "default" else ""
        raise ConfigError(f"{section}.{error.field}", f"{error.reason}{came_from}") from None
    except TypeError:
        missing = [
            item.name
            for item in dataclasses.fields(typing.cast("Any", kind))
            if item.init
            and item.name not in values
            and item.default is dataclasses.MISSING
            and item.default_factory is dataclasses.MISSING
        ]
        if not missing:
            raise
        raise ConfigError(
            f"{section}.{missing[0]}", f"is missing; accepted: {flag_name(missing[0])}, or a value in the file"
        ) from None
    return Resolved(made, origins)


def _check_known(section: str, name: str, known: Mapping[str, Any], file: str) -> None:
    if name not in known:
        raise ConfigError(f"{section}.{name}", f"unknown setting in {file}; accepted: {', '.join(known)}")


def _sequence(field_name: str, kind: Any, value: Any, origin: Origin) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise _refused(field_name, value, origin, "a list")
    return tuple(convert(field_name, kind, item, origin) for item in value)


def _mapping(field_name: str, kind: Any, value: Any, origin: Origin) -> dict[str, Any]:
    pairs: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        pairs = [(str(name), item) for name, item in value.items()]
    else:
        for part in _sequence(field_name, str, value, origin):
            name, equals, text = part.partition("=")
            if not (name.strip() and equals):
                raise _refused(field_name, part, origin, "NAME=VALUE")
            pairs.append((name.strip(), text.strip()))
    if kind is not str:
        return dict(pairs)
    # a file may say 2 or true where a text is meant, as a flag does
    for name, item in pairs:
        if not isinstance(item, str | int | float):
            raise _refused(f"{field_name}.{name}", item, origin, "a text")
    return {name: str(item).lower() if isinstance(item, bool) else str(item) for name, item in pairs}


def _scalar(field_name: str, kind: Any, value: Any, origin: Origin) -> Any:
    if kind is bool:
        truth = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in truth:
            return truth[value.strip().lower()]
        raise _refused(field_name, value, origin, "true or false")
    if kind in (int, float):
        if isinstance(value, kind | int) and not isinstance(value, bool):
            return kind(value)
        try:
            return kind(value) if isinstance(value, str) else _not_a_number()
        except ValueError:
            raise _refused(field_name, value, origin, "an integer" if kind is int else "a number") from None
    if kind is Path:
        if isinstance(value, str | Path) and str(value):
            return Path(value)
        raise _refused(field_name, value, origin, "a path")
    if kind is str:
        if isinstance(value, str):
            return value
        raise _refused(field_name, value, origin, "a text")
    return value


def _not_a_number() -> Any:
    raise ValueError


def _refused(field_name: str, value: Any, origin: Origin, accepted: str) -> ConfigError:
    return ConfigError(field_name, f"{value!r} ({origin}) is not accepted; accepted: {accepted}")
