"""World-model sessions and video editing jobs over ZeroMQ: the client, and the errors that it raises.

Everything but the errors is loaded when it is first asked for, so that ``import reelwire`` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    BrokerUnreachable,
    ConfigError,
    ControlError,
    JobCancelled,
    JobError,
    JobFailed,
    OverloadError,
    ReelwireError,
    RequestError,
    SessionClosed,
    SessionError,
    SessionFailed,
    UsageError,
    VersionMismatch,
    WireError,
)

if TYPE_CHECKING:
    from .client import Client
    from .client_async import AsyncClient, AsyncSession
    from .client_job import Job, JobStatus
    from .client_job_async import AsyncJob
    from .client_session import Chunk, Session
    from .controls import Control, KeyTrace

    __version__: str

__all__ = [
    "Client",
    "AsyncClient",
    "Session",
    "AsyncSession",
    "Chunk",
    "Control",
    "KeyTrace",
    "Job",
    "AsyncJob",
    "JobStatus",
    "ReelwireError",
    "UsageError",
    "RequestError",
    "ConfigError",
    "ControlError",
    "SessionError",
    "SessionFailed",
    "SessionClosed",
    "JobError",
    "JobFailed",
    "JobCancelled",
    "OverloadError",
    "BrokerUnreachable",
    "VersionMismatch",
    "WireError",
    "__version__",
]


_LAZY = {
    "AsyncClient": "client_async",
    "AsyncSession": "client_async",
    "AsyncJob": "client_job_async",
    "Client": "client",
    "Chunk": "client_session",
    "Job": "client_job",
    "JobStatus": "client_job",
    "Session": "client_session",
    "Control": "controls",
    "KeyTrace": "controls",
}


if not TYPE_CHECKING:  # else checkers would take any name for one of ours

    def __getattr__(name: str) -> object:
        value: object
        if name == "__version__":
            from importlib.metadata import version  # slow to import

            value = version("reelwire")
        elif name in _LAZY:
            value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
