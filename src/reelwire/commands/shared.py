"""What the commands share: common flags, settings, and printing as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import Settings

Policy = Literal["strict", "truncate"]
"""What to do with a count of frames that doesn't fill whole chunks."""
Binding = Literal["late", "early"]
"""When live keys become the control of a chunk: when it begins, or when its turn is fixed."""
Pace = Literal["asap", "realtime"]
"""As fast as it goes, or along the media clock."""

WIDTH_MIN = 120
"""Columns of a table that goes to no terminal."""

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with settings. (default: REELWIRE_CONFIG, or ./reelwire.toml)"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables and bars.")]
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint", help="Where the broker listens. (default: REELWIRE_BROKER, or tcp://127.0.0.1:7461)"),
]

Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="Option of the pipeline.")
]
JobOptions = Annotated[list[str] | None, typer.Option("--job-option", metavar="NAME=VALUE", help="Option of the jobs.")]
MediaRoots = Annotated[
    list[str] | None, typer.Option("--media-root", help="Folder below which jobs may name files. (default: none)")
]
StateDir = Annotated[
    str | None, typer.Option(help="Folder for jobs and their files. (default: one per endpoint and user)")
]


def broker_flags(
    listen: str | None, insecure: bool | None, media_roots: Sequence[str] | None, state_dir: str | None
) -> dict[str, object]:
    """What flags say of a broker; folders are those of here."""
    return {
        "listen": listen,
        "insecure": insecure,
        "media_roots": tuple(str(Path(root).absolute()) for root in media_roots) if media_roots else None,
        "state_dir": str(Path(state_dir).absolute()) if state_dir else None,
    }


def load_settings(config: Path | None) -> Settings:
    """The layers below the flags."""
    from ..settings import Settings

    return Settings.load(config)


def print_json(value: object) -> None:
    """One JSON document on standard output, on one line."""
    sys.stdout.write(json.dumps(value, default=plain) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, paths as texts, mappings of other kinds as objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return str(value)


def console(*, stderr: bool = False) -> Console:
    """A console of its own for each command, so that tests and redirections are seen; a file is `WIDTH_MIN` wide."""
    from rich.console import Console

    screen = Console(stderr=stderr, highlight=False, soft_wrap=False, markup=False)
    if not screen.is_terminal:
        screen.width = max(screen.width, WIDTH_MIN)
    return screen


def tell(sentence: str) -> None:
    """A sentence on standard error, as the command's errors are."""
    sys.stderr.write(f"reelwire: {sentence}\n")
    sys.stderr.flush()


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    number: str = ".3f",
    lines: bool = True,
) -> None:
    """A table on standard output; columns of numbers to the right.

    Args:
        title: stands over it.
        columns: their heads.
        rows: their cells.
        number: how a float is printed.
        lines: between columns and around them.
    """
    from rich import box
    from rich.table import Table

    listed = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", box=box.HEAVY_HEAD if lines else box.SIMPLE)
    for at, column in enumerate(columns):
        numeric = bool(listed) and all(isinstance(row[at], int | float | None) for row in listed)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        table.add_row(*(shown(cell, number) for cell in row))
    console().print(table)


def shown(cell: object, number: str = ".3f") -> str:
    """A cell of a table."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return format(cell, number)
    if isinstance(cell, list | tuple):
        return ", ".join(str(item) for item in cell)
    return str(cell)


def assignments(texts: Iterable[str], field: str) -> dict[str, str]:
    """``NAME=VALUE`` pairs of a flag that may be given several times.

    Raises:
        RequestError: one of them is no pair.
    """
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.strip() and equals):
            raise RequestError(field, f"{text!r} is no pair; accepted: NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs
