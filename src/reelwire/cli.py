"""The command `reelwire`: its subcommands, and how their errors end the process.

Exit codes: 0 done, 1 the work failed, 2 wrong usage, 3 the broker can't be reached or doesn't fit. An error is one sentence
on standard error; ``--debug`` or ``REELWIRE_DEBUG`` shows where it was raised.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from .commands.bench import bench
from .commands.broker import broker
from .commands.cancel import cancel
from .commands.config import show
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.edit import edit
from .commands.result import result
from .commands.status import status
from .commands.stream import stream
from .commands.up import up
from .commands.worker import worker
from .errors import BrokerUnreachable, ReelwireError, UsageError, VersionMismatch

DONE, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
_INTERRUPTED = 130
"""What the parser makes of a Ctrl-C that nobody took, such as one that comes while a command imports."""

app = typer.Typer(
    name="reelwire",
    help="Interactive world models as streaming sessions, and jobs that edit clips, from one pool of workers over ZeroMQ.",
    no_args_is_help=True,
    rich_markup_mode=None,  # it would swallow what stands in brackets, such as the name of a TOML table
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config = typer.Typer(help="Settings: what holds and where it came from.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config, name="config")
app.add_typer(bench, name="bench")
for command in (demo, up, broker, worker, stream, edit, result, status, cancel, doctor):
    app.command()(command)
config.command()(show)


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"reelwire {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error was raised. (or REELWIRE_DEBUG=1)")
    ] = False,
) -> None:
    """Take the flags that come before the command."""
    if debug:
        os.environ["REELWIRE_DEBUG"] = "1"


def main() -> NoReturn:
    """Run the command line and end the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors are printed here and nowhere else."""
    try:
        code = app(args=arguments, prog_name="reelwire", standalone_mode=False)
    except KeyboardInterrupt:
        return _told("stopped", FAILED)
    except ReelwireError as error:
        return _told("; ".join([str(error), *getattr(error, "__notes__", ())]), exit_code(error))
    except BrokenPipeError:
        # whoever read our output has enough of it; nothing may be written at the interpreter's end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001  the last place that can turn it into a sentence
        return _unexpected(error)
    if code == _INTERRUPTED:
        return _told("stopped", FAILED)
    return code if isinstance(code, int) else DONE


def exit_code(error: ReelwireError) -> int:
    """The exit code of an error."""
    if isinstance(error, BrokerUnreachable | VersionMismatch):
        return UNREACHABLE
    return USAGE if isinstance(error, UsageError) else FAILED


def _unexpected(error: Exception) -> int:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, typer.Abort):
        return _told("stopped", FAILED)
    # typer brings the parser's exceptions under names of its own, so they are asked for by name
    if "NoArgsIsHelpError" in kinds:
        sys.stderr.write(f"{error.format_message()}\n")  # type: ignore[attr-defined]  # the help
        return USAGE
    if "ClickException" in kinds:
        return _told(_usage(str(error.format_message())), USAGE)  # type: ignore[attr-defined]
    return _told(f"{type(error).__name__}: {error} (a fault of reelwire; --debug shows where)", FAILED)


_WORDS = (
    (r"Value error, '(.*)' is not one of (.*?)\.?$", r"'\1' is not accepted; accepted: \2"),
    (r"Input should be a valid integer.*", "is no integer; accepted: an integer"),
    (r"Input should be a valid number.*", "is no number; accepted: a number"),
    (r"Input should be greater than or equal to (\S+)", r"is too small; accepted: \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"is too large; accepted: \1 or less"),
    (
        r"^No such option: (\S+) \(Possible options?: (.*)\)",
        r"there is no option \1; accepted: \2, and those of --help",
    ),
    (r"^No such option: (\S+?)\.?$", r"there is no option \1; accepted: those of --help"),
    (
        r"^No such command '(.*?)'\. Did you mean (.*)\?$",
        r"there is no command '\1'; accepted: \2, and those of --help",
    ),
    (r"^No such command '(.*?)'\.?$", r"there is no command '\1'; accepted: those of --help"),
    (r"^Option '(\S+)' requires an argument\.?$", r"\1: is given without a value; accepted: one value"),
    (r"^Got unexpected extra argument\S* \((.*)\)\.?$", r"\1: too many arguments; accepted: those of --help"),
    (r"^Invalid value for '?([^':]+)'?: ", r"\1: "),
)
"""What the parser says, in the words of all other sentences."""


def _usage(sentence: str) -> str:
    for pattern, words in _WORDS:
        sentence = re.sub(pattern, words, sentence)
    return sentence


def _told(sentence: str, code: int) -> int:
    if os.environ.get("REELWIRE_DEBUG"):
        traceback.print_exc()
    sys.stderr.write(f"reelwire: {' '.join(sentence.split())}\n")
    return code
