"""Where the daemons' logs go: standard error, for eyes on a terminal, as one JSON object per line otherwise."""

from __future__ import annotations

import logging
import sys

import structlog


def log_to_stderr(*, as_json: bool = False, level: int = logging.INFO) -> None:
    """Configure structlog for this process.

    Args:
        as_json: JSON also on a terminal.
        level: entries below it are dropped.
    """
    for_eyes = sys.stderr.isatty() and not as_json
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if for_eyes else structlog.processors.JSONRenderer()
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
