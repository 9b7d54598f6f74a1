"""What `edit` and `result` do alike: wait for a job, whatever becomes of the broker meanwhile, and write its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import JobError, ReelwireError, RequestError
from .job_bar import job_bar, said_of
from .shared import print_json, print_table, tell

if TYPE_CHECKING:
    from .. import Client, Job, JobStatus


def check_place(out: Path) -> None:
    """Check that a result can lie there, before anybody waits for it.

    Raises:
        RequestError: of the field ``out``.
    """
    if out.exists() and not out.is_file():
        raise RequestError("out", f"{out} is something else than a file; accepted: the path of one")
    if not out.parent.is_dir():
        raise RequestError("out", f"the folder {out.parent} is not there; accepted: a folder that exists")


@contextlib.contextmanager
def telling_of_breaks(client: Client, waiting: Sequence[str]) -> Iterator[None]:
    """Say so when the broker can't be reached, and when it is back; `waiting` are the jobs that are waited for by then."""
    from ..client import watching_connection

    def changed(is_there: bool) -> None:
        if is_there:
            tell(f"the broker at {client.endpoint} is back")
            return
        jobs = f"job {waiting[0]} isn't" if len(waiting) == 1 else f"jobs {', '.join(waiting)} aren't"
        tell(f"the broker at {client.endpoint} can't be reached: {jobs} lost, and this goes on when it is back")

    with watching_connection(client, changed):
        yield


def awaited(job: Job, *, quiet: bool, wait_s: float | None = None) -> JobStatus:
    """Show a job up to its end; where it stands then.

    Raises:
        JobError: it hasn't ended after `wait_s`, or the broker doesn't know it.
    """
    status: JobStatus | None = None
    with job_bar(f"{job.kind} {job.id}", quiet=quiet) as moved:
        try:
            for status in job.progress(wait_s):
                moved(status)
        except TimeoutError:
            stands = "" if status is None else f" ({said_of(status)})"
            raise JobError(f"job {job.id} isn't over after {wait_s:g} s{stands}; it goes on") from None
    assert status is not None, "the last one says how it ended"
    return status


def written(job: Job, status: JobStatus, out: Path) -> dict[str, Any]:
    """Write the result of a job that has ended, and say what it is.

    Raises:
        JobError: it has none; also if its file can't be written.
    """
    if status.state == "succeeded" and out.suffix.lower() != status.suffix:
        tell(f"{out} will hold a {status.suffix} file")
    try:
        job.result(out)
    except OSError as error:
        reason = f"{out} can't be written ({error.strerror or error}); `reelwire result {job.id}` fetches it again"
        raise JobError(reason) from None
    return row_of(
        status,
        out=str(out),
        bytes=status.result_bytes,
        sha256=status.result_sha256,
        attempt=status.attempt,
        facts=dict(status.facts),
    )


def row_of(status: JobStatus, **more: object) -> dict[str, Any]:
    """What is said of a job that has ended."""
    return {"job": status.job, "state": status.state, **more, **({"note": status.note} if status.note else {})}


def report(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print them."""
    if as_json:
        print_json(rows)
        return
    columns = ["job", "state", "out", "bytes", "attempt"]
    if any("note" in row for row in rows):
        columns.append("note")
    print_table("Jobs", columns, [[row.get(name, "-") for name in columns] for row in rows])


def why(job: Job, error: JobError) -> str:
    """Why there is no result, with the job's id."""
    return str(error) if job.id in str(error) else f"{job.id}: {error}"


def left(jobs: Sequence[str]) -> ReelwireError:
    """What a Ctrl-C ends with, where these jobs go on."""
    if not jobs:
        return ReelwireError("stopped")
    return ReelwireError(f"left; goes on without this command: {', '.join(jobs)} (`reelwire result ID` waits for it)")
