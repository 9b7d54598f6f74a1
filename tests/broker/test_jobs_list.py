"""The list of all jobs: made once for all that ask in a turn, bounded, and without what only one job's snapshot has."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire import wire
from reelwire.broker.events import Received
from reelwire.broker.job_news import LISTED_MAX, nbytes_of
from reelwire.wire import Limits

from .fake_jobs import Client, Shop

MANY: dict[str, Any] = {"jobs_queued_max": 1000, "jobs_queued_per_client_max": 1000}


def asked(shop: Shop, client: Client, count: int) -> list[m.Jobs]:
    """What a client is answered that asks for all jobs so many times in one turn."""
    client.inbox.clear()
    for request in range(count):
        shop.handle(Received(shop.now, client.route, client.attachment, m.AskJobs(request), 100, b""))
    assert not client.inbox, "the turn isn't over"
    shop.turn()
    answers = client.take(m.Jobs)
    assert [answer.request for answer in answers] == list(range(count))
    return answers


def test_groups_10_a_list_is_made_once_for_all_that_ask_in_a_turn() -> None:
    """However often it is asked for in a turn, every answer lists the very same rows, as they stand at its end."""
    shop = Shop()
    shop.worker()
    client = shop.client()
    for index in range(5):
        client.accepted(f"k{index}")
    answers = asked(shop, client, 64)
    assert [[info.key for info in answer.jobs] for answer in answers] == [[f"k{n}" for n in range(4, -1, -1)]] * 64
    assert len({id(answer.jobs[0]) for answer in answers}) == 1
    assert asked(shop, client, 1)[0].jobs[0] is not answers[0].jobs[0]


def test_groups_10_who_leaves_before_the_list_is_made_isnt_told() -> None:
    """A client that asks and is gone by the end of the turn has no answer; the others have theirs."""
    shop = Shop()
    leaves, stays = shop.client("leaves"), shop.client("stays")
    shop.turns = False
    leaves.say(m.AskJobs(1))
    stays.say(m.AskJobs(2))
    shop.drop(leaves)
    shop.turn()
    assert not leaves.heard(m.Jobs)
    assert [answer.request for answer in stays.heard(m.Jobs)] == [2]


def test_groups_10_facts_stand_in_one_jobs_snapshot_only() -> None:
    """What a kind says of a result is told to whoever asks for that job or watches it; a list has all but that."""
    shop = Shop()
    worker, client = shop.worker(), shop.client()
    job = client.accepted()
    client.say(m.WatchJob(job))
    worker.finish(worker.runs[-1], frames=81)
    (row,) = client.ask(m.AskJobs).jobs
    assert (row.state, row.facts) == ("succeeded", {})
    assert row.result_sha256 == client.info(job).result_sha256
    assert client.info(job).facts == client.heard(m.JobChanged)[-1].job.facts == {"frames": 81}


@pytest.mark.parametrize("reason", ["out of memory " * 100, "\N{SNOWMAN}" * 400, ""])
def test_groups_10_a_list_is_cut_to_what_its_client_accepts(reason: str) -> None:
    """The newest jobs are told, and the message is never larger than the client accepts, whatever their texts are."""
    shop = Shop(**MANY)
    shop.checks = False
    worker, client = shop.worker(), shop.client()
    for index in range(LISTED_MAX + 4):
        client.accepted(f"{index:0>200}")
        worker.fail(worker.runs[-1], reason)
    full = asked(shop, client, 1)[0]
    assert (len(full.jobs), full.total) == (LISTED_MAX, LISTED_MAX + 4)
    for most in (1, 600, 4000, 50_000, 1 << 20):
        shop.core._peers.by_route[client.route].limits = Limits(header_bytes_max=most)
        answer = asked(shop, client, 1)[0]
        assert answer.jobs == full.jobs[: len(answer.jobs)]
        nbytes = wire.HEADER_BYTES + wire.ENTRY_BYTES + len(wire.pack(answer).name) + len(wire.pack(answer).body)
        assert nbytes <= most or not answer.jobs
        assert len(answer.jobs) == LISTED_MAX or most < sum(map(nbytes_of, full.jobs[: len(answer.jobs) + 2]))


def test_groups_10_a_row_takes_less_than_is_reckoned() -> None:
    """Also with the largest numbers that a row can have."""
    most, text = (1 << 63) - 1, "\N{SNOWMAN}" * 256
    failure = m.Failure("worker_lost", text, stage=text, field=text, index=most, retry_after_s=1e300)
    row = m.JobInfo(
        text, text, "succeeded", text, text, most, most, text, most, most, 1e300, 1e300, most, most,
        "streaming", 1e300, 1e300, most, "0" * 64, text, {}, failure, text,
    )  # fmt: skip
    assert len(wire.pack(m.Jobs(most, (row,), most)).body) < nbytes_of(row)
