"""Jobs in the client's core: submissions with their uploads, watches and fetches, against scripted messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from reelwire import client_events as e
from reelwire import messages as m
from reelwire.errors import (
    BrokerUnreachable,
    JobError,
    OverloadError,
    ReelwireError,
    RequestError,
    UsageError,
    WireError,
)
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import Failure, JobInfo
from reelwire.tensors import Inline, Shared, TensorRef

Rig = Any  # of conftest.py

A, B = e.UploadFile("video", 3 * FILE_PART_BYTES, "aa"), e.UploadFile("images[0]", 10, "bb")
REQUEST = m.SubmitJob("key", "v2v", {"seed": 7}, {"video": (m.Media(sha256="aa"),)})
QUEUED, RUNNING = JobInfo("j", "v2v", "queued", position=2), JobInfo("j", "v2v", "running", stage="denoise", step=1)
DONE = JobInfo("j", "v2v", "succeeded", result_bytes=20)
LOST = m.Rejected("unknown_peer", "who?")
NBYTES = 6 * FILE_PART_BYTES + 5


def data(nbytes: int) -> TensorRef:
    return TensorRef("uint8", (nbytes,), Inline(bytes(nbytes)))


def part(rig: Rig, call: int, index: int, nbytes: int = FILE_PART_BYTES) -> None:
    rig.hear(m.ResultPart(call, index, data(nbytes)))


def supply(rig: Rig, call: int, place: int, index: int) -> None:
    rig.feed(e.SupplyPart(rig.now, call, place, index, bytes(4)))


def lose(rig: Rig) -> None:
    """The broker gives the client up, and takes it again as the same attachment."""
    rig.hear(LOST, 0)
    rig.sent.clear()
    rig.attach()
    assert isinstance(rig.sent.pop(0), m.ClientHello)


# --- submitting --------------------------------------------------------------------------------------------------------


def test_files_go_one_after_the_other_and_the_request_last(attached: Rig) -> None:
    """Each is named by its content; parts go below the grant; what the broker has already isn't sent."""
    call = attached.call(e.SubmitJob, REQUEST, (A, B))
    assert attached.said(m.BeginUpload) == [m.BeginUpload("1.0", "video", A.nbytes, "aa")]
    assert attached.core.jobs.wanted(call) is None
    attached.hear(m.UploadGrant("1.0", 2))
    assert attached.core.jobs.wanted(call) == (0, 0)
    assert attached.news[-1] == e.news_of_call(call)
    supply(attached, call, 0, 0)
    supply(attached, call, 0, 1)
    assert attached.core.jobs.wanted(call) is None
    attached.hear(m.UploadGrant("1.0", 3))
    supply(attached, call, 0, 2)
    assert [message.index for message in attached.said(m.UploadPart)] == [0, 1, 2]
    attached.hear(m.UploadStored("1.0"))
    assert attached.said(m.BeginUpload)[1] == m.BeginUpload("1.1", "images[0]", 10, "bb")
    assert not attached.said(m.SubmitJob)
    attached.hear(m.UploadStored("1.1"))
    assert attached.said(m.SubmitJob) == [REQUEST]
    assert call not in attached.done
    attached.hear(m.JobAccepted("key", QUEUED))
    assert attached.done[call].value == QUEUED


def test_grants_come_twice_go_back_or_too_far(attached: Rig) -> None:
    """The largest holds, and no more than the file has is sent; another upload's says nothing."""
    call = attached.call(e.SubmitJob, REQUEST, (A,))
    attached.hear(m.UploadGrant("1.0", 2))
    attached.hear(m.UploadGrant("1.0", 1))
    supply(attached, call, 0, 0)
    attached.hear(m.UploadGrant("1.0", 2))
    attached.hear(m.UploadGrant("1.1", 9))
    attached.hear(m.UploadGrant("", 9))
    supply(attached, call, 0, 1)
    assert attached.core.jobs.wanted(call) is None
    attached.hear(m.UploadGrant("1.0", 1000))
    assert attached.core.jobs.wanted(call) == (0, 2)
    supply(attached, call, 0, 2)
    assert attached.core.jobs.wanted(call) is None
    assert attached.core.dropped == {"unknown upload": 2}


def test_a_part_that_is_not_wanted_is_not_sent(attached: Rig) -> None:
    """Another part, another file, another call, one that was supplied already."""
    call = attached.call(e.SubmitJob, REQUEST, (A,))
    supply(attached, call, 0, 0)
    attached.hear(m.UploadGrant("1.0", 2))
    supply(attached, call, 0, 1)
    supply(attached, call, 1, 0)
    supply(attached, call + 1, 0, 0)
    assert not attached.said(m.UploadPart)
    supply(attached, call, 0, 0)
    supply(attached, call, 0, 0)
    assert [message.index for message in attached.said(m.UploadPart)] == [0]


@pytest.mark.parametrize("steps", range(7))
def test_groups_07_what_was_lost_is_said_again_under_the_same_key(rig: Rig, steps: int) -> None:
    """Wherever the connection is lost, the next one hears all of it from the first file on, and the answer is one."""
    says: list[Callable[[int], None]] = [
        lambda _call: rig.attach(),
        lambda _call: rig.hear(m.UploadGrant("1.0", 2)),
        lambda call: supply(rig, call, 0, 0),
        lambda call: supply(rig, call, 0, 1),
        lambda _call: rig.hear(m.UploadStored("1.0")),
        lambda _call: rig.hear(m.UploadStored("1.1")),
    ]
    call = rig.call(e.SubmitJob, REQUEST, (A, B))
    for say in says[:steps]:
        say(call)
    if steps:
        lose(rig)
    else:
        rig.attach()
        rig.sent.pop(0)
    assert rig.sent == [m.BeginUpload("1.0", "video", A.nbytes, "aa")]
    assert rig.core.jobs.wanted(call) is None
    rig.hear(m.UploadGrant("1.0", 1))
    assert rig.core.jobs.wanted(call) == (0, 0)
    rig.hear(m.UploadStored("1.0"))
    rig.hear(m.UploadStored("1.1"))
    assert rig.said(m.SubmitJob) == [REQUEST]
    rig.hear(m.JobAccepted("key", QUEUED))
    rig.hear(m.JobAccepted("key", QUEUED))
    assert rig.done[call].value == QUEUED


REFUSALS: list[tuple[Failure, type[ReelwireError]]] = [
    (Failure("request", "no video", field="video"), RequestError),
    (Failure("overload", "full", retry_after_s=3.0), OverloadError),
    (Failure("shutdown", "the broker stops"), BrokerUnreachable),
    (Failure("stage", "it broke"), JobError),
]


def test_files_of_a_refused_request_are_asked_for_again(attached: Rig) -> None:
    """The broker may have given them up for something else: it says itself whether it has them."""
    for call in (1, 2):
        assert attached.call(e.SubmitJob, REQUEST, (B,)) == call
        assert attached.sent[-1] == m.BeginUpload(f"{call}.0", B.field, B.nbytes, B.sha256)
        attached.hear(m.UploadStored(f"{call}.0"))
        attached.hear(m.JobRefused(Failure("request", "it isn't here", field=B.field), key="key"))


@pytest.mark.parametrize(("failure", "kind"), REFUSALS)
@pytest.mark.parametrize("at_upload", [True, False])
def test_a_refusal_is_the_error_of_the_submission(
    attached: Rig, failure: Failure, kind: type[ReelwireError], at_upload: bool
) -> None:
    """Of a file or of the job: whose fault it is, the field, and when to try again."""
    call = attached.call(e.SubmitJob, REQUEST, (B,) if at_upload else ())
    attached.hear(m.UploadRefused("1.0", failure) if at_upload else m.JobRefused(failure, key="key"))
    error = attached.error(call, kind, failure.message)
    assert getattr(error, "field", failure.field) == failure.field
    assert getattr(error, "retry_after_s", failure.retry_after_s) == failure.retry_after_s
    assert not attached.core.jobs.submissions


def test_two_submissions_under_one_key_get_one_job(attached: Rig) -> None:
    """Both are answered; one that still uploads is answered when its turn is."""
    first = attached.call(e.SubmitJob, REQUEST)
    second = attached.call(e.SubmitJob, REQUEST)
    third = attached.call(e.SubmitJob, REQUEST, (B,))
    attached.hear(m.JobAccepted("other", QUEUED))
    attached.hear(m.JobAccepted("key", QUEUED))
    assert attached.done[first].value == attached.done[second].value == QUEUED
    assert third not in attached.done
    assert attached.core.dropped == {"unknown job": 1}


def test_a_withdrawn_submission_is_forgotten(attached: Rig) -> None:
    """Its answer, and grants of its files, say nothing any more; nor is it said again."""
    call = attached.call(e.SubmitJob, REQUEST, (A,))
    attached.feed(e.Withdraw(attached.now, call))
    attached.hear(m.UploadGrant("1.0", 1))
    attached.hear(m.JobAccepted("key", QUEUED))
    lose(attached)
    assert attached.sent == []
    assert call not in attached.done


# --- watching ----------------------------------------------------------------------------------------------------------


def test_groups_10_a_watched_job_is_known_until_its_end(attached: Rig) -> None:
    """It is asked for; the newest state is there, and the end answers the call."""
    call = attached.call(e.WatchJob, "j")
    assert attached.sent[1:] == [m.WatchJob("j", request=call)]
    assert attached.core.jobs.info("j") is None
    attached.hear(m.JobChanged(QUEUED))
    attached.hear(m.JobChanged(RUNNING))
    assert attached.core.jobs.info("j") == RUNNING
    assert attached.news[-1] == e.news_of_job("j")
    attached.hear(m.JobChanged(DONE))
    assert attached.done[call].value == DONE
    assert attached.sent[-1] == m.WatchJob("j", on=False)
    attached.hear(m.JobChanged(DONE))
    assert attached.core.dropped == {"unknown job": 1}


def test_a_job_that_has_ended_is_answered_at_once(attached: Rig) -> None:
    """By the first that is told of it."""
    call = attached.call(e.WatchJob, "j")
    attached.hear(m.JobChanged(DONE))
    assert attached.done[call].value == DONE


def test_several_watch_one_job(attached: Rig) -> None:
    """It is asked for once, everybody is answered, and it is watched until the last one leaves."""
    first, second = attached.call(e.WatchJob, "j"), attached.call(e.WatchJob, "j")
    assert len(attached.said(m.WatchJob)) == 1
    attached.feed(e.Withdraw(attached.now, first))
    assert len(attached.said(m.WatchJob)) == 1
    attached.hear(m.JobChanged(QUEUED))
    assert attached.core.jobs.info("j") == QUEUED
    attached.feed(e.Withdraw(attached.now, second))
    assert attached.sent[-1] == m.WatchJob("j", on=False)
    assert attached.core.jobs.info("j") is None
    third, fourth = attached.call(e.WatchJob, "j"), attached.call(e.WatchJob, "j")
    attached.hear(m.JobChanged(DONE))
    assert attached.done[third].value == attached.done[fourth].value == DONE


def test_groups_07_a_watch_goes_on_over_the_next_connection(attached: Rig) -> None:
    """What is known stays, it is asked for again, and a broker that knows no such job is an error for all who wait."""
    calls = [attached.call(e.WatchJob, "j"), attached.call(e.WatchJob, "j")]
    attached.hear(m.JobChanged(RUNNING))
    lose(attached)
    assert attached.sent == [m.WatchJob("j", request=calls[0])]
    assert attached.core.jobs.info("j") == RUNNING
    attached.hear(m.JobRefused(Failure("request", "no such job", field="job"), request=calls[0]))
    for call in calls:
        attached.error(call, JobError, "no such job")
    assert not attached.core.jobs.watches


def test_groups_10_a_watch_too_many_is_an_error_and_not_waited_for(attached: Rig) -> None:
    """All who wait for that job are told, the others' watches go on, and who asks again asks the broker again."""
    other = attached.call(e.WatchJob, "i")
    calls = [attached.call(e.WatchJob, "j"), attached.call(e.WatchJob, "j")]
    attached.hear(m.JobRefused(Failure("overload", "watches 1024 jobs already", retry_after_s=2.0), request=calls[0]))
    for call in calls:
        assert attached.error(call, OverloadError, "1024").retry_after_s == 2.0
    assert set(attached.core.jobs.watches) == {"i"}
    again = attached.call(e.WatchJob, "j")
    assert attached.sent[-1] == m.WatchJob("j", request=again)
    for job in ("i", "j"):
        attached.hear(m.JobChanged(replace(DONE, job=job)))
    assert set(attached.done) >= {other, again}


def test_questions_are_answered_or_refused(attached: Rig) -> None:
    """Where it stands, its cancellation, its deletion; a lost connection fails them, as it does a status."""
    asked = [
        attached.call(e.AskJob, "j"),
        attached.call(e.AskJob, "j", "cancel"),
        attached.call(e.AskJob, "j", "delete"),
    ]
    assert attached.sent[1:] == [m.AskJobs(1, "j"), m.CancelJob(2, "j"), m.DeleteJob(3, "j")]
    attached.hear(m.Jobs(1, (QUEUED,)))
    attached.hear(m.JobRefused(Failure("request", "it runs", field="job"), request=3))
    assert attached.done[asked[0]].value.jobs == (QUEUED,)
    attached.error(asked[2], JobError, "it runs")
    attached.hear(LOST, 0)
    attached.error(asked[1], BrokerUnreachable)
    attached.error(attached.call(e.AskJob, ""), BrokerUnreachable)


# --- fetching ----------------------------------------------------------------------------------------------------------


def test_a_result_comes_in_parts_and_within_a_window(attached: Rig) -> None:
    """Parts are asked for as they are taken; the last one answers the call."""
    call = attached.call(e.FetchResult, "j", NBYTES)
    assert attached.sent[-1] == m.FetchResult(call, "j", 0, 4)
    for index in range(4):
        part(attached, call, index)
    for asked in (5, 6, 7):
        attached.feed(e.TakePart(attached.now, call))
        assert attached.sent[-1] == m.FetchResult(call, "j", 0, asked)
    for index in (4, 5):
        part(attached, call, index)
    part(attached, call, 6, 5)
    for _ in range(4):
        assert call not in attached.done
        attached.feed(e.TakePart(attached.now, call))
    assert attached.done[call].error is None
    assert [len(taken) for taken in attached.parts] == [FILE_PART_BYTES] * 6 + [5]
    assert len(attached.said(m.FetchResult)) == 5
    assert attached.sent[-1] == m.FetchResult(call, "j", 7, 0)  # the broker may count it as fetched now
    attached.feed(e.TakePart(attached.now, call))
    assert len(attached.parts) == 7


@pytest.mark.parametrize(
    ("index", "ref"),
    [
        (1, data(FILE_PART_BYTES)),
        (0, data(FILE_PART_BYTES - 1)),
        (0, TensorRef("int8", (FILE_PART_BYTES,), Inline(bytes(FILE_PART_BYTES)))),
        (0, TensorRef("uint8", (1, FILE_PART_BYTES), Inline(bytes(FILE_PART_BYTES)))),
        (0, TensorRef("uint8", (FILE_PART_BYTES,), Shared("w", "s", 1))),
    ],
)
def test_streaming_34_a_part_that_can_not_be_is_the_brokers_fault(attached: Rig, index: int, ref: TensorRef) -> None:
    """A gap, another size, another type, bytes elsewhere: nobody waits for what won't come."""
    call = attached.call(e.FetchResult, "j", NBYTES)
    attached.hear(m.ResultPart(call, index, ref))
    attached.error(call, WireError, f"part {index}")
    part(attached, call, 0)
    assert attached.core.dropped == {"part out of order": 1}


def test_a_part_that_was_not_asked_for_is_the_brokers_fault(attached: Rig) -> None:
    """What waits to be taken is bounded, whatever the broker sends."""
    call = attached.call(e.FetchResult, "j", NBYTES)
    for index in range(5):
        part(attached, call, index)
    attached.error(call, WireError, "part 4 came where 4 was to come, below 4")


@pytest.mark.parametrize("taken", [0, 2])
def test_groups_07_a_fetch_goes_on_where_it_was(attached: Rig, taken: int) -> None:
    """Parts that came stay; the next connection is asked for the others, and what comes twice is dropped."""
    call = attached.call(e.FetchResult, "j", NBYTES)
    part(attached, call, 0)
    part(attached, call, 1)
    part(attached, call, 1)
    for _ in range(taken):
        attached.feed(e.TakePart(attached.now, call))
    lose(attached)
    assert attached.sent == [m.FetchResult(call, "j", 2, 4 + taken)]
    part(attached, call, 1)
    part(attached, call, 2)
    for _ in range(3 - taken):
        attached.feed(e.TakePart(attached.now, call))
    assert attached.sent[-1] == m.FetchResult(call, "j", 2, 7)
    assert attached.core.dropped == {"part out of order": 2}


def test_a_fetch_that_has_everything_asks_for_nothing(attached: Rig) -> None:
    """Also over the next connection, and also when there is nothing to come at all."""
    call = attached.call(e.FetchResult, "j", 5)
    part(attached, call, 0, 5)
    lose(attached)
    assert attached.sent == []
    attached.feed(e.TakePart(attached.now, call))
    assert attached.done[call].error is None
    empty = attached.call(e.FetchResult, "j", 0)
    assert attached.done[empty].error is None


def test_a_part_can_be_taken_while_there_is_no_connection(attached: Rig) -> None:
    """More are asked for when there is one."""
    call = attached.call(e.FetchResult, "j", NBYTES)
    part(attached, call, 0)
    attached.hear(LOST, 0)
    attached.sent.clear()
    attached.feed(e.TakePart(attached.now, call))
    assert attached.sent == []
    attached.attach()
    assert attached.sent[-1] == m.FetchResult(call, "j", 1, 5)


def test_a_result_that_is_gone_is_the_error_of_its_fetch(attached: Rig) -> None:
    """Deleted by somebody, say."""
    call = attached.call(e.FetchResult, "j", NBYTES)
    attached.hear(m.JobRefused(Failure("request", "it has no result"), request=call))
    attached.error(call, JobError, "it has no result")
    other = attached.call(e.FetchResult, "j", NBYTES)
    attached.feed(e.Withdraw(attached.now, other))
    part(attached, other, 0)
    attached.hear(m.JobRefused(Failure("request", "it has no result"), request=other))
    assert other not in attached.done


# --- all of it ---------------------------------------------------------------------------------------------------------


def test_a_client_that_is_gone_answers_everybody(attached: Rig) -> None:
    """Whatever would have gone on over the next connection, and whatever is asked afterwards."""
    asked = [
        attached.call(e.SubmitJob, REQUEST, (A,)),
        attached.call(e.WatchJob, "j"),
        attached.call(e.FetchResult, "j", NBYTES),
    ]
    attached.feed(e.Leave(attached.now))
    asked += [attached.call(e.SubmitJob, REQUEST), attached.call(e.WatchJob, "j"), attached.call(e.AskJob, "j")]
    for call in asked:
        attached.error(call, UsageError, "the client was closed")
    assert attached.core.jobs.wanted(asked[0]) is None


def test_jobs_wait_for_a_connection_that_sessions_do_not_outlive(attached: Rig) -> None:
    """One lost connection: the session fails, its calls too, and what is under way about jobs isn't answered."""
    attached.open()
    watch, end = attached.call(e.WatchJob, "j"), attached.call(e.End, "s", "drain")
    attached.hear(LOST, 0)
    assert attached.done[end].value == "failed"
    assert watch not in attached.done
    assert attached.core.jobs.outlives(watch)


def test_streaming_34_answers_to_what_was_never_asked_change_nothing(attached: Rig) -> None:
    """Whatever the broker says out of turn is dropped."""
    for message in (
        m.UploadGrant("1.0", 1), m.UploadStored("1.0"), m.UploadRefused("1.0", Failure("request", "no")),
        m.JobAccepted("key", QUEUED), m.JobRefused(Failure("request", "no"), key="key"),
        m.JobRefused(Failure("request", "no"), request=9), m.JobRefused(Failure("request", "no")), m.Jobs(9, (QUEUED,)),
        m.JobChanged(QUEUED), m.ResultPart(9, 0, data(1)),
    ):  # fmt: skip
        attached.hear(message)
    assert attached.done == {}
    assert len(attached.sent) == 1
