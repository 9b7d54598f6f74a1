"""Where the daemons' logs go: standard error, for eyes on a terminal, as one JSON object per line otherwise.

A daemon that a command started writes into a pipe; `FOR_EYES` tells it that a terminal is at the pipe's other end.
"""

from __future__ import annotations

import json
import logging
import os
import sys

import structlog

FOR_EYES = "REELWIRE_LOG_FOR_EYES"
"""The variable that a command sets for its children, to 1 when its own standard error is a terminal."""

_SENTENCE = "reelwire: "


def log_to_stderr(*, as_json: bool = False, level: int = logging.INFO) -> None:
    """Configure structlog for this process.

    Args:
        as_json: JSON also on a terminal.
        level: entries below it are dropped.
    """
    terminal = sys.stderr.isatty()
    for_eyes = (terminal or os.environ.get(FOR_EYES) == "1") and not as_json
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=terminal) if for_eyes else structlog.processors.JSONRenderer()
    )
    errors: list[structlog.typing.Processor] = [] if for_eyes else [structlog.processors.dict_tracebacks]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *errors,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def child_environment(*, as_json: bool) -> dict[str, str]:
    """What a command's children need to know to log as the command itself does."""
    return {FOR_EYES: str(int(sys.stderr.isatty() and not as_json))}


class ChildLines:
    """What child processes say on standard error, on ours: under their names, or as JSON that has them.

    A child's last sentence is held back until it is known whether the command repeats it as its own error.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        """Nothing was said yet."""
        self._as_json = as_json
        self._held: dict[str, str] = {}

    def __call__(self, name: str, kind: str, line: str) -> None:
        """Take a line of a child, as `Supervisor` hands it on."""
        if kind != "stderr":
            return
        if (before := self._held.pop(name, None)) is not None:
            self._write(name, before)
        if line.startswith(_SENTENCE):
            self._held[name] = line
        else:
            self._write(name, line)

    def release(self, *, but: str = "") -> None:
        """Write what is held back, except for the sentence that the command ends with itself."""
        held, self._held = self._held, {}
        for name, line in held.items():
            if f"{name}: {line.removeprefix(_SENTENCE)}" != but:
                self._write(name, line)

    def _write(self, name: str, line: str) -> None:
        sys.stderr.write((self._json(name, line) if self._as_json else f"{name}: {line}") + "\n")
        sys.stderr.flush()

    @staticmethod
    def _json(name: str, line: str) -> str:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        entry = said if isinstance(said, dict) else {"event": line}
        return json.dumps({"process": name, **entry})
