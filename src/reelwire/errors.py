"""Every error that reelwire raises or sends: whose fault it is, and whether trying again can help.

::

    ReelwireError
    |-- UsageError           the caller's fault, found before anything was sent: fix the call
    |   `-- RequestError     a field of a request: `field` names it, the message says what is accepted
    |-- ControlError         the caller's fault: a control that doesn't fit the session; nothing changed
    |-- SessionError         the session is not (or no longer) there
    |   |-- SessionFailed    a stage or a worker failed; chunks below the failure were delivered
    |   `-- SessionClosed    it ended as asked for, or was cancelled
    |-- JobError             the job has no result
    |   |-- JobFailed        it failed: the request was wrong, a worker raised, or workers were lost too often
    |   `-- JobCancelled     somebody cancelled it
    |-- OverloadError        no room now: `retry_after_s` says when to try again
    |-- BrokerUnreachable    nobody answers at the endpoint
    |-- VersionMismatch      client, broker and worker don't fit: both versions are named
    |-- ConfigError          a setting: `field` names it
    `-- WireError            remote misbehaviour: bytes that are no message of ours
"""

from __future__ import annotations


class ReelwireError(Exception):
    """Root of all errors of this package."""


class UsageError(ReelwireError):
    """The call can't be right, whatever the state of the system: local misuse."""


class RequestError(UsageError):
    """A field of a request is refused; nothing was started.

    Args:
        field: name of the field as the caller wrote it (``"frames"``, ``"prompt"``).
        reason: one sentence that says what is wrong and what is accepted.
    """

    def __init__(self, field: str, reason: str) -> None:
        """Keep the field's name beside the sentence."""
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ConfigError(UsageError):
    """A setting is refused; `field` names it as it is written in the TOML file."""

    def __init__(self, field: str, reason: str) -> None:
        """Keep the setting's name beside the sentence."""
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ControlError(ReelwireError):
    """A control was refused and changed nothing.

    Attributes:
        code: ``duplicate``, ``gap``, ``past_end``, ``no_room``, ``unknown_key`` or ``malformed``. One that comes after the
            session's end is a `SessionClosed`.
        expected: the index that would have been accepted, if the fault was the index.
    """

    def __init__(self, code: str, reason: str, expected: int | None = None) -> None:
        """Keep the machine-readable code beside the sentence."""
        super().__init__(reason)
        self.code = code
        self.expected = expected


class SessionError(ReelwireError):
    """The session isn't there (any more)."""


class SessionFailed(SessionError):
    """A stage raised, or the worker that held the session was lost.

    Attributes:
        stage: the stage that failed, or an empty string when no single stage did.
        index: the chunk that could not be made, or None outside of a chunk.
    """

    def __init__(self, reason: str, stage: str = "", index: int | None = None) -> None:
        """Keep where it happened beside the worker's message."""
        super().__init__(reason)
        self.stage = stage
        self.index = index


class SessionClosed(SessionError):
    """The session has ended: closed, cancelled or complete."""


class JobError(ReelwireError):
    """The job has no result: it failed or was cancelled, or there is no such job (any more)."""


class JobFailed(JobError):
    """A job failed, with the worker's reason.

    Attributes:
        job: its id.
        kind: what was at fault, as in `messages.Failure`: ``request``, ``stage``, ``worker_lost`` ...
        field: the field of the request that is at fault, or an empty text.
    """

    def __init__(self, reason: str, job: str = "", kind: str = "", field: str = "") -> None:
        """Keep whose fault it was beside the sentence."""
        super().__init__(reason)
        self.job = job
        self.kind = kind
        self.field = field


class JobCancelled(JobError):
    """The job was cancelled."""


class OverloadError(ReelwireError):
    """There is no room for it now; nothing was started.

    Attributes:
        retry_after_s: seconds after which another try may succeed.
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        """Keep the advice beside the sentence."""
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class BrokerUnreachable(ReelwireError):
    """Nobody answered at the endpoint within the time limit."""


class VersionMismatch(ReelwireError):
    """Two peers speak different versions; the message names both."""


class WireError(ReelwireError):
    """Bytes that are not a message of this protocol; the sender's fault."""
