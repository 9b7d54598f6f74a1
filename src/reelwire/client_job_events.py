"""What an application asks about jobs, and what comes of it: the part of `client_events` that is about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from . import messages

JobQuestion = Literal["status", "cancel", "delete"]


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A file that a submission brings; its parts are asked of whoever submits.

    Attributes:
        field: the input that it is for, as the caller wrote it.
        nbytes: its size.
        sha256: of its content, in hexadecimal.
    """

    field: str
    nbytes: int
    sha256: str


# --- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Call: answered with the `JobInfo` when the job is durable.

    The files are uploaded first, one after the other; `Jobs.wanted` says which part is wanted. All of it is said again
    over the next connection if one is lost.
    """

    now: float
    call: int
    request: messages.SubmitJob
    files: tuple[UploadFile, ...] = ()


@dataclass(frozen=True, slots=True)
class SupplyPart:
    """A part that a submission wanted; one that isn't wanted any more is dropped.

    Attributes:
        now: the time.
        call: the submission.
        place: which of its files.
        index: which part of that.
        data: its bytes.
    """

    now: float
    call: int
    place: int
    index: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AskJob:
    """Call: where a job stands, or with an empty text all of them; or its cancellation, or deletion.

    Answered with `messages.Jobs`.
    """

    now: float
    call: int
    job: str
    what: JobQuestion = "status"


@dataclass(frozen=True, slots=True)
class WatchJob:
    """Call: answered with the last `JobInfo` when the job has ended, however; meanwhile `Jobs.info` has the newest one.

    It outlives connections; a broker that doesn't know the job is an error.
    """

    now: float
    call: int
    job: str


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Call: the parts of a result, for `TakePart`; answered when the last one was taken. It outlives connections."""

    now: float
    call: int
    job: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TakePart:
    """The application asks for the next part of a result; it is done with the one before."""

    now: float
    call: int


JobCall = SubmitJob | WatchJob | FetchResult
"""Calls that go on over the next connection when one is lost."""
JobEvent = JobCall | SupplyPart | TakePart

# --- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """The next part of a result, in answer to `TakePart`."""

    data: bytes | memoryview
