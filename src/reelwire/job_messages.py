"""What clients, broker and workers say to each other about jobs and the files that belong to them; see `messages`.

Files travel in parts of `job_parts.FILE_PART_BYTES`, numbered from 0. Whoever takes them says how many may come, in absolute
numbers (parts below a grant): a grant that is lost or comes twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .job_parts import FileOffer, FileRole, JobInfo, JobPhase, Media
from .parts import Failure
from .spec import Plain
from .tensors import TensorRef

# --- client to broker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginUpload:
    """A file of a request that will be submitted.

    Attributes:
        upload: the client's name for it, unique for this attachment.
        field: the input that it is for: a refusal names it.
        nbytes: its size.
        sha256: of its content, in hexadecimal; one that the broker has already isn't asked for again.
    """

    upload: str
    field: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The next part of an upload, uint8 [bytes]; only below the grant."""

    upload: str
    index: int
    data: TensorRef


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Ask for a job.

    Attributes:
        key: chosen by the client, unique for all time: submitting twice under one key gives one job, as long as that is
            remembered. Another request under it is refused: another kind, other parameters, files or output. Another
            priority isn't: the first one holds.
        kind: name of a `JobSpec`.
        parameters: values that the kind names.
        media: name of an input to its files.
        priority: higher ones go first; see `job_parts.PRIORITY_MAX`.
        output: where the result is to lie on the broker's host, below one of its media roots; empty: only fetched.
    """

    key: str
    kind: str
    parameters: Mapping[str, Plain] = field(default_factory=dict)
    media: Mapping[str, tuple[Media, ...]] = field(default_factory=dict)
    priority: int = 0
    output: str = ""

    @property
    def largest_field(self) -> str:
        """The field that takes most of it."""
        sizes = {name: len(str(value)) for name, value in self.parameters.items()}
        sizes |= {name: sum(len(each.path) + len(each.sha256) for each in files) for name, files in self.media.items()}
        return max(sizes, key=lambda name: sizes[name], default="parameters")


@dataclass(frozen=True, slots=True)
class AskJobs:
    """Ask where jobs stand: of one, or of all when `job` is empty; answered by `Jobs` or `JobRefused`."""

    request: int
    job: str = ""


@dataclass(frozen=True, slots=True)
class WatchJob:
    """Be told whenever a job changes, by `JobChanged`, and at once where it stands; or no more.

    `request`: of the `JobRefused` that answers it if there is no such job, or if the client watches too many.
    """

    job: str
    on: bool = True
    request: int = 0


@dataclass(frozen=True, slots=True)
class CancelJob:
    """End a job at its next step; one that has ended stays as it is. Answered by `Jobs` or `JobRefused`.

    The answer doesn't wait for that step: it says where the job stood when it was durable that its leader is to stop. A job that
    nobody works at ends at once, for good when it is answered.
    """

    request: int
    job: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Forget a job that has ended, with its result. Answered by `Jobs` (its last state) or `JobRefused`."""

    request: int
    job: str


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Ask for the parts of a result below `parts`; said again with more parts to go on.

    Attributes:
        request: the client's number for it.
        job: whose.
        first: the part to begin with; beside `parts` = 0, how many parts the client has: the whole result counts as fetched.
        parts: how many may come in all, counted from part 0 of the file; 0: none any more, which has no answer.
    """

    request: int
    job: str
    first: int
    parts: int


# --- broker to client ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UploadGrant:
    """Parts of an upload below `parts` may be sent."""

    upload: str
    parts: int


@dataclass(frozen=True, slots=True)
class UploadStored:
    """An upload is complete, its hash is right, and it stays until a job has come of its request, or the client leaves.

    One whose request doesn't come for a minute may give way to others of its client, and any to what jobs make.
    """

    upload: str


@dataclass(frozen=True, slots=True)
class UploadRefused:
    """An upload isn't taken; nothing of it is kept."""

    upload: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class JobAccepted:
    """The job is durable: it will be done, whatever happens to the broker."""

    key: str
    job: JobInfo


@dataclass(frozen=True, slots=True)
class JobRefused:
    """A job isn't accepted, or a question about one isn't answered. `key`: of the submission; else `request` says which."""

    failure: Failure
    key: str = ""
    request: int = 0


@dataclass(frozen=True, slots=True)
class Jobs:
    """The answer to AskJobs, CancelJob and DeleteJob: one job, or a list of all without their facts, newest first.

    `total`: how many there are, if not all are listed.
    """

    request: int
    jobs: tuple[JobInfo, ...]
    total: int = 0


@dataclass(frozen=True, slots=True)
class JobChanged:
    """Where a job that is watched stands now."""

    job: JobInfo


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A part of a result, uint8 [bytes]."""

    request: int
    index: int
    data: TensorRef


# --- broker to worker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunJob:
    """Do a job; told to every rank of a group.

    Attributes:
        job: its id.
        attempt: which attempt at it, from 1.
        kind: name of the spec.
        parameters: complete.
        media: name of an input to its files.
        checkpoint: what an earlier attempt gave up; None: from the beginning.
        checkpoint_step: the step that it stands at, counted over all stages.
        checkpoint_steps: steps between two checkpoints.
        sequence: the number that the group's bodies have.
    """

    job: str
    attempt: int
    kind: str
    parameters: Mapping[str, Plain]
    media: Mapping[str, tuple[FileOffer, ...]]
    checkpoint: FileOffer | None
    checkpoint_step: int
    checkpoint_steps: int
    sequence: int


@dataclass(frozen=True, slots=True)
class StopJob:
    """To a leader: end an attempt at the next step, as cancelled; answered by JobEnded."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """To a leader: the end of an attempt is known for good, or nobody wants to know of it; drop what is kept of it."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CheckpointKept:
    """To a leader: a checkpoint that it made is durable here; a later attempt would go on from there.

    Attributes:
        job: its id.
        attempt: which attempt.
        step: the step that it stands at, as its `JobFile` said.
    """

    job: str
    attempt: int
    step: int


# --- worker to broker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Where a job stands.

    Attributes:
        job: its id.
        attempt: which attempt.
        state: ``preparing``, ``running`` or ``encoding``.
        stage: the stage that follows or runs.
        step: steps of it that are done.
        steps: steps that it has.
        step_s: what the last step took, in seconds; 0: there was none, or it was the first one.
        given_s: seconds that chunks of streams took between this step and the one before.
    """

    job: str
    attempt: int
    state: JobPhase
    stage: str = ""
    step: int = 0
    steps: int = 0
    step_s: float = 0.0
    given_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobFile:
    """A leader has made a file, which is wanted by the broker: a checkpoint that all ranks have passed, or the result.

    Attributes:
        job: its id.
        attempt: which attempt.
        role: what it is.
        offer: the file.
        step: of a checkpoint, the step that it stands at, counted over all stages.
        facts: of a result, what the kind says of it.
    """

    job: str
    attempt: int
    role: FileRole
    offer: FileOffer
    step: int = 0
    facts: Mapping[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobEnded:
    """An attempt has ended without a result. `state`: ``failed`` or ``cancelled``."""

    job: str
    attempt: int
    state: JobPhase
    failure: Failure | None = None


# --- both ways between broker and worker ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WantFile:
    """Send the parts of an offered file below `parts`, from `first` on; said again with more parts to go on."""

    file: str
    first: int
    parts: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file that was wanted, uint8 [bytes]."""

    file: str
    index: int
    data: TensorRef


@dataclass(frozen=True, slots=True)
class FileGone:
    """A file that was wanted isn't there any more."""

    file: str
    reason: str
