"""What the journal keeps of a job: everything that must outlive the broker, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reelwire.messages import Failure
from reelwire.spec import Plain

Standing = Literal["queued", "running", "succeeded", "failed", "cancelled"]
"""As durable states go: ``running`` is an attempt that was begun, of which nobody has said that it is over. A job whose workers
are lost is so too, until it begins again: they may come back."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the store: its SHA-256 in hexadecimal, which is its name there, and its size."""

    file: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job.

    Attributes:
        job: its id.
        number: order of arrival, over all brokers of this state folder.
        key: that it was submitted under; unique.
        client: who submitted it.
        kind: name of its spec.
        suffix: of its result's file.
        parameters: complete.
        media: name of an input to its files.
        priority: higher ones go first.
        output: where its result is to be written to as well; empty: nowhere.
        standing: see `Standing`.
        attempt: the newest attempt, from 1; 0: none was begun.
        losses: how many attempts were lost with their workers; counted when the next one begins.
        checkpoint: the newest state to go on from.
        checkpoint_step: the step that it stands at.
        result: what it has made.
        facts: what its kind says of that.
        failure: why it has failed.
        submitted_at: seconds since 1970.
        ended_at: the same; None while it hasn't ended.
        fetched_at: when its result was first fetched whole.
        asked: digest of the request as it was asked for: what else comes under its key is another one.
        is_cancelled: somebody has cancelled it while a group had it: it isn't begun again, and no other broker takes its result.
    """

    job: str
    number: int
    key: str
    client: str
    kind: str
    suffix: str = ".mp4"
    parameters: Mapping[str, Plain] = field(default_factory=dict)
    media: Mapping[str, tuple[StoredFile, ...]] = field(default_factory=dict)
    priority: int = 0
    output: str = ""
    standing: Standing = "queued"
    attempt: int = 0
    losses: int = 0
    checkpoint: StoredFile | None = None
    checkpoint_step: int = -1
    result: StoredFile | None = None
    facts: Mapping[str, Plain] = field(default_factory=dict)
    failure: Failure | None = None
    submitted_at: float = 0.0
    ended_at: float | None = None
    fetched_at: float | None = None
    asked: str = ""
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """What a broker finds of its former selves.

    Attributes:
        incarnation: how many brokers this state folder has had, this one included; durable before it is used.
        records: all jobs, in order of arrival.
        files: folder of the store: a file of it lies there under its SHA-256.
    """

    incarnation: int = 1
    records: tuple[JobRecord, ...] = ()
    files: str = ""
