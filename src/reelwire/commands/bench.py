"""`reelwire bench NAME`: the benchmarks, as tables, as JSON, and as rows of a CSV.

One command per benchmark: it takes the flags, calls ``run`` of its module ``bench_NAME.py``, which is imported only then,
and hands the report to `publish`. A bound that is missed is printed as missed; it is no failure of the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    help="Benchmarks: tables, JSON, and rows in benchmarks/NAME.csv.", no_args_is_help=True, rich_markup_mode=None
)

Csv = Annotated[
    Path | None, typer.Option("--csv", help="Where the rows are appended. (default: benchmarks/NAME.csv here)")
]
