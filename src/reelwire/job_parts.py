"""What messages about jobs and groups are made of: the values that several of them carry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .parts import Failure
from .spec import Plain

JobPhase = Literal["queued", "preparing", "running", "encoding", "succeeded", "failed", "cancelled"]
"""The states of a job; the last three are ends."""
FileRole = Literal["checkpoint", "result"]
FILE_PART_BYTES = 1 << 20
"""Files travel in parts of so many bytes; only the last one may be smaller."""
FILE_NAME = re.compile(r"[0-9a-f]{64}")
"""What files are called, all of it: the SHA-256 of their content, in hexadecimal."""
PRIORITY_MAX = 100
"""Jobs have a priority from minus this to this."""


@dataclass(frozen=True, slots=True)
class Media:
    """One file of a request: exactly one of the two is said.

    Attributes:
        path: where it lies on the broker's host, below one of its media roots.
        sha256: of a file that was uploaded before, in hexadecimal.
    """

    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class FileOffer:
    """A file that can be had, from the sender of the message that says so.

    Attributes:
        file: what it is asked for as: its SHA-256, in hexadecimal.
        path: where it lies on the sender's machine: whoever sees the same file there needn't ask.
        nbytes: its size.
    """

    file: str
    path: str
    nbytes: int

    @property
    def parts(self) -> int:
        """In how many parts it travels."""
        return parts_of(self.nbytes)


def parts_of(nbytes: int) -> int:
    """In how many parts a file of so many bytes travels; an empty one has none."""
    return -(-nbytes // FILE_PART_BYTES)


@dataclass(frozen=True, slots=True)
class JobInfo:
    """Where a job stands, as clients are told.

    Attributes:
        job: its id.
        kind: what it is.
        state: see `JobPhase`.
        key: that it was submitted under.
        client: who submitted it.
        priority: higher ones go first.
        position: while it is queued, how many start before it as things stand; else 0.
        stage: while it runs, the stage that it is at.
        step: steps of that stage that are done.
        steps: steps that it has; 0: not known yet.
        step_s: seconds per step, of late.
        left_s: seconds until the stage ends, as far as can be told; None when it can't.
        attempt: which attempt runs or ran, from 1; 0: none was begun.
        checkpoint_step: the newest step that it can go on from, counted over all stages; -1: none.
        waits_for: while it is queued: ``group`` (all that do its kind are busy), ``worker`` (none is attached) or ``broker``
            (this one stops, and begins nothing); while it runs: ``streaming`` when chunks of streams run in between at this
            moment; while its result is encoded and taken: ``room`` (the broker has none for it yet) or ``worker`` (which
            doesn't send it).
        submitted_s: seconds since it was submitted.
        ended_s: seconds since it ended; None while it hasn't.
        result_bytes: size of its result; 0 when there is none.
        result_sha256: of its result.
        suffix: of its result's file.
        facts: what the kind says of its result; a list of all jobs is without.
        failure: why it has failed.
        note: what else is to be known of it, as a sentence: its result couldn't be written to where it was asked for, or isn't
            kept any more, or nothing begins it; empty: nothing.
    """

    job: str
    kind: str
    state: JobPhase
    key: str = ""
    client: str = ""
    priority: int = 0
    position: int = 0
    stage: str = ""
    step: int = 0
    steps: int = 0
    step_s: float = 0.0
    left_s: float | None = None
    attempt: int = 0
    checkpoint_step: int = -1
    waits_for: str = ""
    submitted_s: float = 0.0
    ended_s: float | None = None
    result_bytes: int = 0
    result_sha256: str = ""
    suffix: str = ""
    facts: Mapping[str, Plain] = field(default_factory=dict)
    failure: Failure | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's place in a group, as its hello says it.

    Attributes:
        group: name of the group.
        rank: which of its ranks this is; 0 leads.
        world: how many ranks it has.
        epoch: which forming of the group it belongs to; 0: none yet.
        sequence: the highest number of a body that it has been sent in this epoch.
        machine: tells machines, and the process ids on them, from others: whoever has the same can watch and kill the process.
        pid: of the process.
        fingerprint: of the weights and options; ranks of one group have the same.
        started: when the process did, in the machine's ticks since its boot; tells it from others that had its number, or will.
            0: unknown.
    """

    group: str
    rank: int
    world: int
    epoch: int = 0
    sequence: int = 0
    machine: str = ""
    pid: int = 0
    fingerprint: str = ""
    started: int = 0


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that a leader has, as its hello says it.

    Attributes:
        job: its id.
        attempt: which attempt at it.
        ended: it has ended here, and the broker hasn't said yet that it knows.
    """

    job: str
    attempt: int
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group, as the others are told.

    Attributes:
        rank: which.
        machine: as of `Membership`.
        pid: as of `Membership`.
        started: as of `Membership`; without it a process is neither watched nor killed by the others.
    """

    rank: int
    machine: str
    pid: int
    started: int = 0
