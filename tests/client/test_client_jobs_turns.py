"""Jobs in the client's core: whose turn it is, what the broker has already, and workers that come back late."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire.client_jobs import FETCHES_MAX, UPLOADING_MAX
from reelwire.errors import JobError, OverloadError, RequestError, WireError
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.job_spec import JobSpec
from reelwire.messages import Failure, JobInfo
from reelwire.tensors import Inline, TensorRef

Rig = Any  # of conftest.py
KINDS = (JobSpec("v2v", "edits"),)
NO_KIND = Failure("request", "no worker that is attached does jobs", field="kind")
FULL = Failure("overload", "full", retry_after_s=1.0)


def file(name: str) -> e.UploadFile:
    return e.UploadFile("video", 10, name)


def request(key: str) -> m.SubmitJob:
    return m.SubmitJob(key, "v2v")


def begun(rig: Rig) -> list[str]:
    return [message.sha256 for message in rig.said(m.BeginUpload)]


def lose(rig: Rig, *, kinds: tuple[JobSpec, ...] = ()) -> None:
    """The broker is another one, which knows workers that do these jobs."""
    rig.hear(m.Rejected("unknown_peer", "who?"), 0)
    rig.sent.clear()
    rig.feed(e.Connect(rig.now))
    rig.hear(m.Welcome("me-1", "0.1.9", 1.0, 3, {}, (), kinds))


# --- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["accepted", "refused", "upload refused", "withdrawn"])
def test_so_many_submissions_upload_at_once(attached: Rig, how: str) -> None:
    """The next one begins when one is over, however; one without files needn't wait."""
    calls = [attached.call(e.SubmitJob, request(f"k{n}"), (file(f"f{n}"),)) for n in range(UPLOADING_MAX + 1)]
    assert begun(attached) == [f"f{n}" for n in range(UPLOADING_MAX)]
    attached.call(e.SubmitJob, request("small"))
    assert attached.said(m.SubmitJob) == [request("small")]
    if how == "upload refused":
        attached.hear(m.UploadRefused(f"{calls[1]}.0", FULL))
    elif how == "withdrawn":
        attached.feed(e.Withdraw(attached.now, calls[1]))
    else:
        attached.hear(m.UploadStored(f"{calls[1]}.0"))
        assert begun(attached)[UPLOADING_MAX:] == []
        accepted = m.JobAccepted("k1", JobInfo("j", "v2v", "queued"))
        attached.hear(accepted if how == "accepted" else m.JobRefused(FULL, key="k1"))
    assert begun(attached)[UPLOADING_MAX:] == [f"f{UPLOADING_MAX}"]


@pytest.mark.parametrize("how", ["whole", "refused", "withdrawn", "wrong"])
def test_so_many_results_are_fetched_at_once(attached: Rig, how: str) -> None:
    """The next one is asked for when one is over, however."""
    calls = [attached.call(e.FetchResult, f"j{n}", 10) for n in range(FETCHES_MAX + 1)]
    assert [message.job for message in attached.said(m.FetchResult)] == [f"j{n}" for n in range(FETCHES_MAX)]
    right, wrong = (TensorRef("uint8", (nbytes,), Inline(bytes(nbytes))) for nbytes in (10, 9))
    if how == "whole":
        attached.hear(m.ResultPart(calls[0], 0, right))
        attached.feed(e.TakePart(attached.now, calls[0]))
    elif how == "refused":
        attached.hear(m.JobRefused(FULL, request=calls[0]))
        attached.error(calls[0], OverloadError)
    elif how == "withdrawn":
        attached.feed(e.Withdraw(attached.now, calls[0]))
    else:
        attached.hear(m.ResultPart(calls[0], 0, wrong))
        attached.error(calls[0], WireError)
    assert attached.sent[-1] == m.FetchResult(calls[-1], f"j{FETCHES_MAX}", 0, 1)


def test_over_the_next_connection_turns_are_as_before(attached: Rig) -> None:
    """No more is under way at once than over the first one."""
    for number in range(6):
        attached.call(e.SubmitJob, request(f"k{number}"), (file(f"f{number}"),))
        attached.call(e.FetchResult, f"j{number}", 10)
    lose(attached)
    assert begun(attached) == [f"f{n}" for n in range(UPLOADING_MAX)]
    assert [message.job for message in attached.said(m.FetchResult)] == [f"j{n}" for n in range(FETCHES_MAX)]


def test_a_fetch_that_is_given_up_is_given_up_at_the_broker(attached: Rig) -> None:
    """Unless everything of it has come, or nothing was asked for yet."""
    nbytes = 2 * FILE_PART_BYTES
    call = attached.call(e.FetchResult, "j", nbytes)
    attached.feed(e.Withdraw(attached.now, call))
    assert attached.sent[-1] == m.FetchResult(call, "j", 0, 0)
    call = attached.call(e.FetchResult, "j", 1)
    attached.hear(m.ResultPart(call, 0, TensorRef("uint8", (1,), Inline(b"x"))))
    said = len(attached.sent)
    attached.feed(e.Withdraw(attached.now, call))
    attached.hear(m.Rejected("unknown_peer", "who?"), 0)
    call = attached.call(e.FetchResult, "j", nbytes)
    attached.feed(e.Withdraw(attached.now, call))
    assert len(attached.sent) == said


# --- what the broker has -----------------------------------------------------------------------------------------------


def test_what_was_stored_is_not_uploaded_again_while_it_is_no_jobs(attached: Rig) -> None:
    """A job that was refused for want of room is tried again without its files; later they may be gone with the job."""
    call = attached.call(e.SubmitJob, request("k"), (file("a"), file("b")))
    attached.hear(m.UploadStored(f"{call}.0"))
    attached.hear(m.UploadStored(f"{call}.1"))
    attached.hear(m.JobRefused(FULL, key="k"))
    again = attached.call(e.SubmitJob, request("k"), (file("b"), file("c"), file("a")))
    attached.hear(m.UploadStored(f"{again}.1"))
    assert begun(attached) == ["a", "b", "c"]
    assert len(attached.said(m.SubmitJob)) == 2
    attached.hear(m.JobAccepted("k", JobInfo("j", "v2v", "queued")))
    third = attached.call(e.SubmitJob, request("l"), (file("a"),))
    assert begun(attached)[3:] == ["a"]
    attached.hear(m.UploadStored(f"{third}.0"))
    attached.hear(m.JobRefused(FULL, key="l"))
    lose(attached)
    attached.call(e.SubmitJob, request("l"), (file("a"),))
    assert begun(attached) == ["a"]


def test_groups_09_requests_with_one_file_each_have_an_upload_of_it(attached: Rig) -> None:
    """What the broker keeps for one goes with its job, so the other says it as well, unless a refused one has left it."""
    first = attached.call(e.SubmitJob, request("k"), (file("a"),))
    attached.hear(m.UploadStored(f"{first}.0"))
    second = attached.call(e.SubmitJob, request("l"), (file("a"), file("b")))
    assert begun(attached) == ["a", "a"]
    attached.hear(m.UploadStored(f"{second}.0"))
    attached.hear(m.JobAccepted("k", JobInfo("j", "v2v", "queued")))
    attached.hear(m.UploadRefused(f"{second}.1", FULL))
    attached.call(e.SubmitJob, request("m"), (file("a"),))
    attached.call(e.SubmitJob, request("n"), (file("a"),))
    assert begun(attached) == ["a", "a", "b", "a"]


def test_groups_09_what_was_uploaded_for_a_submission_that_is_withdrawn_serves_the_next_one(attached: Rig) -> None:
    """As long as its request wasn't sent: of what was sent a job may come, which takes its files."""
    for key, files in (("k", (file("a"), file("b"))), ("l", (file("b"),))):
        call = attached.call(e.SubmitJob, request(key), files)
        attached.hear(m.UploadStored(f"{call}.0"))
        attached.feed(e.Withdraw(attached.now, call))
    attached.call(e.SubmitJob, request("m"), (file("a"), file("b")))
    assert begun(attached) == ["a", "b", "b", "b"]


# --- workers -----------------------------------------------------------------------------------------------------------


def test_groups_07_a_job_waits_for_workers_to_come_back_to_a_broker_that_begins_anew(rig: Rig) -> None:
    """Its first submission was heard when there were some; it is said again as soon as one of its kind is there."""
    lose(rig, kinds=KINDS)
    call = rig.call(e.SubmitJob, request("k"))
    lose(rig)
    rig.hear(m.JobRefused(NO_KIND, key="k"))
    assert call not in rig.done
    assert rig.core.jobs.is_parked(call)
    assert rig.news[-1] == e.news_of_call(call)
    rig.hear(m.Welcome("me-1", "0.1.9", 1.0, 3, {}, (), (JobSpec("other", "x"),)))
    assert rig.said(m.SubmitJob) == [request("k")]
    rig.hear(m.Welcome("me-1", "0.1.9", 1.0, 3, {}, (), KINDS))
    assert rig.said(m.SubmitJob) == [request("k")] * 2
    assert not rig.core.jobs.is_parked(call)
    rig.hear(m.JobAccepted("k", JobInfo("j", "v2v", "queued")))
    assert rig.done[call].error is None


def test_a_job_that_waits_for_workers_is_said_again_over_the_next_connection(rig: Rig) -> None:
    """Also when they are there at once; and it can be given up."""
    lose(rig, kinds=KINDS)
    calls = [rig.call(e.SubmitJob, request("k")), rig.call(e.SubmitJob, request("l"))]
    lose(rig)
    for key in "kl":
        rig.hear(m.JobRefused(NO_KIND, key=key))
    rig.feed(e.Withdraw(rig.now, calls[1]))
    lose(rig, kinds=KINDS)
    assert rig.said(m.SubmitJob) == [request("k")]
    rig.hear(m.JobRefused(NO_KIND, key="k"))
    rig.error(calls[0], RequestError)


@pytest.mark.parametrize("failure", [NO_KIND, Failure("request", "no video", field="video"), Failure("stage", "x")])
def test_a_refusal_that_has_nothing_to_do_with_a_restart_is_one(rig: Rig, failure: Failure) -> None:
    """A kind that nobody does when it is first asked for; anything else at any time."""
    lose(rig)
    call = rig.call(e.SubmitJob, request("k"))
    if failure.field != "kind":
        lose(rig)
    rig.hear(m.JobRefused(failure, key="k"))
    rig.error(call, JobError if failure.kind == "stage" else RequestError)
