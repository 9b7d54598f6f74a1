"""Which kinds of jobs can be asked for, and what each takes, as tables and as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .shared import print_table

if TYPE_CHECKING:
    from ..job_spec import JobSpec, MediaInput
    from ..spec import Parameter

_FLAGS = ("prompt", "seed", "profile")
"""Parameters for which `reelwire edit` has a flag of their own."""
_COLUMNS = ("what", "flag of edit", "takes", "default", "accepted", "meaning")


def print_kinds(kinds: Iterable[JobSpec]) -> None:
    """A line for each kind: what it does, and the files that it takes."""
    rows = [[spec.name, spec.description, [_named(one) for one in spec.media] or "-"] for spec in kinds]
    if rows:
        print_table("Kinds of jobs; more of them: reelwire status --kinds", ("kind", "what it does", "files"), rows)


def print_details(kinds: Iterable[JobSpec]) -> None:
    """A table for each kind: its files and its parameters, with types, defaults and what is accepted."""
    for spec in kinds:
        rows = [*map(_input_row, spec.media), *map(_parameter_row, spec.parameters)]
        print_table(f"{spec.name}: {spec.description}", _COLUMNS, rows, number="g")


def plain_kinds(kinds: Iterable[JobSpec]) -> list[dict[str, Any]]:
    """The same, for programs: the specs."""
    from dataclasses import asdict

    return [asdict(spec) for spec in kinds]


def _named(one: MediaInput) -> str:
    return f"{one.name} ({_count(one)})"


def _count(one: MediaInput) -> str:
    return str(one.least) if one.least == one.most else f"{one.least} to {one.most}"


def _input_row(one: MediaInput) -> list[object]:
    flag = {"video": "--video", "images": "--image"}.get(one.name, "- (media= of Client.submit_edit)")
    frames = f" of up to {one.frames_max} frames" if one.kind == "video" else ""
    accepted = f"{_count(one)}{frames}, up to {one.pixels_max} pixels each"
    return [one.name, flag, f"{one.kind} file", "required" if one.least else "-", accepted, "-"]


def _parameter_row(one: Parameter) -> list[object]:
    flag = f"--{one.name}" if one.name in _FLAGS else f"--set {one.name}="
    default = "required" if one.required else "-" if one.default is None else one.default
    return [one.name, flag, one.kind, repr(default) if default == "" else default, accepted(one), one.description]


def accepted(one: Parameter) -> str:
    """Which values a parameter may have, in words."""
    if one.choices:
        return ", ".join(one.choices)
    if one.kind == "boolean":
        return "true, false"
    if one.minimum is None and one.maximum is None:
        words = "any"
    elif one.maximum is None:
        words = f"{one.minimum} or more"
    elif one.minimum is None:
        words = f"up to {one.maximum}"
    else:
        words = f"{one.minimum} to {one.maximum}"
    if one.kind == "string" and words != "any":
        words += " characters"
    if one.multiple_of is not None:
        words += f", of the form {one.multiple_of}k+{one.minimum or 0}"
    return words
