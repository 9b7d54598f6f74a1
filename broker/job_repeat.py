"""Requests that are said again under a key that has a job already: whether they are the same one, and what differs if not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from reelwire import messages as m
from reelwire.checks import shown
from reelwire.job_spec import JobSpec
from reelwire.spec import Plain

from .job_record import JobRecord

EXACT_MAX = 1 << 53
"""Whole numbers up to here are floats as well (IEEE 754, binary64)."""
DIFFERENCES_MAX = 4
"""More of them aren't listed."""


def digest(request: m.SubmitJob) -> str:
    """What tells requests apart: their kind, parameters, files and output, as they were asked for.

    Not as they are completed: a request that is said again is the same one, whatever its workers' defaults are by now, and
    whether there are any. Nor does the priority count, which says when a job is done and not which.
    """
    parameters = sorted((name, _same(value)) for name, value in request.parameters.items() if value is not None)
    media = sorted((name, [(each.path, each.sha256) for each in files]) for name, files in request.media.items())
    text = repr((request.kind, parameters, media, request.output))
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def told_apart(request: m.SubmitJob, record: JobRecord, spec: JobSpec | None) -> str:
    """How a request differs from the one that has its key, in words, as far as the record of that tells.

    The record says how a request was completed, not what was left to a default; and of its files what they held, not where
    they lay, and neither before they were looked at nor when the job has ended. So there may be nothing to name.

    Args:
        request: the later one.
        record: what is kept of the first one.
        spec: the kind of both, for its defaults; None: nobody does it now.
    """
    if request.kind != record.kind:
        return f"its kind is {shown(record.kind)}, not {shown(request.kind)}"
    found = list(_differences(request, record, spec))
    if not found:
        return "it left other values to their defaults, or its files were others"
    more = len(found) - DIFFERENCES_MAX
    return "; ".join([*found[:DIFFERENCES_MAX], *([f"and {more} more"] if more > 0 else [])])


def _differences(request: m.SubmitJob, record: JobRecord, spec: JobSpec | None) -> Iterator[str]:
    defaults = {} if spec is None else {one.name: one.default for one in spec.parameters}
    asked = {name: value for name, value in request.parameters.items() if value is not None}
    for name in dict.fromkeys((*asked, *record.parameters)):
        then, now = record.parameters.get(name), asked.get(name, defaults.get(name))
        if (name in asked or name in defaults) and _same(then) != _same(now):
            yield f"its {name} is {shown(then)}, not {shown(now)}"
    for name in dict.fromkeys((*request.media, *record.media)) if record.media else ():
        before = [each.file for each in record.media.get(name, ())]
        hashes = [each.sha256 for each in request.media.get(name, ())]
        # where a file came from a path nobody knows any more
        if len(before) != len(hashes) or any(new and new != old for new, old in zip(hashes, before, strict=True)):
            yield f"its {name} {'are' if max(len(before), len(hashes)) > 1 else 'is'} other files"
    if request.output != record.output:
        yield f"its output is {shown(record.output)}, not {shown(request.output)}"


def _same(value: Plain) -> Plain:
    """A value such that equal numbers look the same: some clients' languages know one kind of them."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= EXACT_MAX:
        return float(value)
    if isinstance(value, float):
        return value + 0.0  # there is a zero below zero
    if isinstance(value, Mapping):
        return {name: _same(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_same(each) for each in value]
    return value
