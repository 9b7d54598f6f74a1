"""What the values of settings may be: kinds and bounds, with the sentence that says what is accepted."""

from __future__ import annotations

import sys

from .errors import ConfigError

SECONDS_MAX = 1_000_000
"""Eleven days and a half; in milliseconds it still fits the 32 bits that ZeroMQ has for a time."""
BYTES_MAX = 1 << 44
"""16 TiB; sums of a few such bounds stay far below the 63 bits of ZeroMQ's and msgpack's integers."""
COUNT_MAX = 1_000_000
"""More than one process can have of anything that is counted."""


def check_text(name: str, value: object) -> None:
    """Check a text that isn't empty.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(name, f"{shown(value)} is not accepted; accepted: a text that isn't empty")


def check_truth(name: str, value: object) -> None:
    """Check a truth value.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, bool):
        raise ConfigError(name, f"{shown(value)} is not accepted; accepted: true or false")


def check_count(name: str, value: object, least: int = 1, most: int = COUNT_MAX) -> None:
    """Check a whole number from `least` to `most`.

    Raises:
        ConfigError: it is none, or out of its bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(name, f"{shown(value)} is not accepted; accepted: a whole number from {least} to {most}")


def check_seconds(name: str, value: object) -> None:
    """Check a time above 0 and of at most `SECONDS_MAX`, in seconds.

    Raises:
        ConfigError: it is none, or out of its bounds.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= SECONDS_MAX:
        raise ConfigError(
            name, f"{shown(value)} is not accepted; accepted: seconds, a number above 0 and up to {SECONDS_MAX}"
        )


def shown(value: object) -> str:
    """A value as an error shows it: cut where it is long, whatever it is."""
    if isinstance(value, int) and value.bit_length() > sys.int_info.str_digits_check_threshold:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write the longest ones
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def printable(text: str) -> str:
    """A text of somebody else in one line that does nothing to a terminal: blanks for line ends, escapes for all control."""
    if text.isprintable():
        return text
    line = " ".join(text.split())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)
