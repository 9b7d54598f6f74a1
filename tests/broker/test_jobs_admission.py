"""What is accepted and what is refused, with which field, at what limits, and that nothing is left of what is refused."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.actions import Persist, Send
from reelwire.broker.events import Received, Stored
from reelwire.job_spec import JobSpec
from reelwire.messages import Media
from reelwire.wire import Limits

from .fake_jobs import T2V, Shop
from .fake_store import sha256

VIDEO = Media(path="/in/a.mp4")


@pytest.fixture
def shop() -> Shop:
    """A broker with a worker that has something else to do, so that jobs wait."""
    shop = Shop()
    shop.disk.outside = {"/in/a.mp4": b"video a", "/in/b.png": b"image b", "/in/c.txt": b"text"}
    return shop


def busy(shop: Shop) -> Any:
    """A client, at a broker whose only worker has a job already."""
    shop.worker()
    client = shop.client()
    shop.client("first").accepted("first")
    return client


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "kind": ("t9v", {}),
    "prompt": ("t2v", {"parameters": {"prompt": 5}}),
    "scale": ("t2v", {"parameters": {"scale": math.nan}}),
    "nothing": ("t2v", {"parameters": {"nothing": 1}}),
    "priority": ("t2v", {"priority": 101}),
    "output": ("t2v", {"output": "/elsewhere/a.mp4"}),
    "video": ("v2v", {"media": {"video": (Media(path="/in/c.txt"),)}}),
    "images": ("r2v", {"media": {"images": (VIDEO,) * 4}}),
    "images[1]": ("r2v", {"media": {"images": (Media(path="/in/b.png"), VIDEO)}}),
}


@pytest.mark.parametrize("field", list(REFUSED))
def test_groups_08_a_wrong_field_is_refused_by_its_name(shop: Shop, field: str) -> None:
    """With a sentence, and nothing is left in the store."""
    client = busy(shop)
    kind, more = REFUSED[field]
    failure = client.refused("k", kind, **more)
    assert (failure.kind, failure.field) == ("request", field)
    assert len(failure.message) > 10
    assert not shop.disk.files
    assert client.accepted("k")  # the key is free


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"parameters": {"scale": math.inf}}, "scale"),
        ({"parameters": {"scale": -math.inf}}, "scale"),
        ({"priority": -101}, "priority"),
        ({"priority": 1 << 62}, "priority"),
        ({"media": {"video": (VIDEO,)}}, "video"),
        ({"output": "/out/" + "x" * 5000}, "output"),
        ({"parameters": {"prompt": "x" * 70_000}}, "prompt"),
        ({"parameters": {"prompt": {"deep": [1, 2]}}}, "prompt"),
    ],
)
def test_groups_08_more_that_is_refused(shop: Shop, more: dict[str, Any], field: str) -> None:
    """Bounds, what isn't finite, inputs that a kind hasn't."""
    assert busy(shop).refused("k", **more).field == field


@pytest.mark.parametrize(
    "media",
    [
        Media(),
        Media("/in/a.mp4", "0" * 64),
        Media("/in/nothing.mp4"),
        Media("/in/" + "x" * 5000),
        Media(sha256="0" * 64),
        Media(sha256="../../etc/passwd"),
        Media(sha256="A" * 64),
    ],
)
def test_groups_09_a_file_that_isnt_there_is_refused(shop: Shop, media: Media) -> None:
    """Neither a path nor a hash, both, or one that leads nowhere: the field is named."""
    failure = busy(shop).refused("k", "v2v", media={"video": (media,)})
    assert (failure.kind, failure.field) == ("request", "video")


def test_groups_08_the_first_fault_is_named(shop: Shop) -> None:
    """Kind before parameters, these before priority, files and output: what costs least is looked at first."""
    client = busy(shop)
    wrong: dict[str, Any] = {
        "kind": "x",
        "parameters": {"prompt": 1},
        "priority": 1000,
        "media": {"video": (Media(path="/in/c.txt"),)},
        "output": "/elsewhere/x.mp4",
    }
    right = {"kind": "v2v", "parameters": {}, "priority": 0, "output": "", "media": {"video": (VIDEO,)}}
    for name, field in (
        ("kind", "kind"),
        ("parameters", "prompt"),
        ("priority", "priority"),
        ("output", "output"),
        ("media", "video"),
    ):
        assert client.refused("k", **wrong).field == field
        wrong[name] = right[name]
    assert client.accepted("k", **wrong)


@pytest.mark.parametrize("key", ["", "x" * 257, "x" * 100_000])
def test_a_key_of_another_length_is_refused(shop: Shop, key: str) -> None:
    """1 to 256 characters; a long one isn't repeated."""
    client = busy(shop)
    answer = client.submit(key)
    assert answer.failure.field == "key"
    assert len(answer.key) < 600


def test_a_kind_that_nobody_does_says_which_there_are(shop: Shop) -> None:
    """Also that there is none at all."""
    client = shop.client()
    assert client.refused("k").message.endswith("no worker that is attached does jobs")
    shop.worker()
    assert client.refused("k", "x").message.endswith("accepted: t2v, v2v, r2v")


def test_groups_07_submit_is_durable_when_acknowledged(shop: Shop) -> None:
    """Not before the journal says so."""
    client = busy(shop)
    shop.commits = False
    assert client.submit() is None
    assert client.ask(m.AskJobs).total == 1
    shop.commit()
    (accepted,) = client.heard(m.JobAccepted)
    assert accepted.job.job in shop.disk.records
    assert (accepted.job.state, accepted.job.position, accepted.job.waits_for) == ("queued", 0, "group")


def test_groups_07_submit_is_idempotent_by_its_key(shop: Shop) -> None:
    """From any client, while it is checked, while it is committed, while it runs, and when it has ended."""
    client, other = busy(shop), shop.client("other")
    shop.works = shop.commits = False
    request: dict[str, Any] = {"kind": "v2v", "media": {"video": (VIDEO,)}, "output": "/out/a.mp4"}
    assert client.submit("k", **request) is None
    assert other.submit("k", **request) is None
    shop.works = True
    shop.settle()
    assert other.submit("k", **request) is None
    assert client.submit("k", **request) is None
    assert other.refused("k", "t2v").field == "key"
    shop.commits = True
    shop.settle()
    (first,), (second,) = client.take(m.JobAccepted), other.take(m.JobAccepted)
    assert first == second
    assert client.accepted("k", **request) == first.job.job
    assert other.refused("k", **{**request, "parameters": {"prompt": "b"}}).field == "key"
    assert other.refused("k", **{**request, "media": {"video": (Media("/in/b.mp4"),)}}).field == "key"
    assert len(shop.disk.records) == 2


def test_everybody_who_asked_is_told_of_the_refusal(shop: Shop) -> None:
    """A request that is checked for two is refused to both, and its key is free again."""
    client, other = busy(shop), shop.client("other")
    shop.works = False
    request: dict[str, Any] = {"kind": "v2v", "media": {"video": (Media("/in/c.txt"),)}}
    client.submit("k", **request)
    other.submit("k", **request)
    shop.works = True
    shop.settle()
    assert [each.heard(m.JobRefused)[0].failure.field for each in (client, other)] == ["video", "video"]
    assert client.accepted("k")


def test_groups_14_the_queue_has_a_limit() -> None:
    """Above it a submission is refused with advice, before any file is touched; a key that is known is answered."""
    shop = Shop(jobs_queued_max=3, jobs_queued_per_client_max=2)
    shop.disk.outside = {"/in/a.mp4": b"video a"}
    client = busy(shop)
    known = client.accepted("k1")
    client.accepted("k2")
    failure = client.refused("k3", "v2v", media={"video": (VIDEO,)})
    assert (failure.kind, failure.retry_after_s) == ("overload", 5.0)
    assert "of this client" in failure.message
    shop.client("b").accepted("k4")
    failure = shop.client("c").refused("k5")
    assert failure.kind == "overload"
    assert failure.message.startswith("3 jobs wait")
    assert client.accepted("k1") == known
    assert client.refused("k6", parameters={"prompt": 1}).kind == "request"


def test_groups_14_the_advice_is_what_a_job_takes() -> None:
    """As soon as it is known how long jobs take: until the groups begin one more."""
    shop = Shop(jobs_queued_max=1)
    worker, client = shop.worker(), shop.client()
    client.accepted("k0")
    shop.advance(100.0)
    worker.finish(worker.runs[0])
    client.accepted("k1")
    client.accepted("k2")
    assert client.refused("k3").retry_after_s == 100.0
    shop.worker("idle", kinds=(worker.kinds[1],))
    assert client.refused("k3").retry_after_s == 50.0


def test_a_broker_that_stops_accepts_nothing(shop: Shop) -> None:
    """But it still knows what it has accepted."""
    client = busy(shop)
    known = client.accepted("k1")
    shop.jobs.drain()
    assert client.refused("k2").kind == "shutdown"
    assert client.accepted("k1") == known
    client.upload(b"video")
    assert client.heard(m.UploadRefused)[0].failure.kind == "shutdown"


def test_groups_09_a_path_is_copied_and_the_copy_is_what_runs(shop: Shop) -> None:
    """Whatever happens to the file later; two jobs with the same bytes have one copy, and the last one takes it along."""
    client = busy(shop)
    jobs = [client.accepted(key, "v2v", media={"video": (VIDEO,)}) for key in ("k1", "k2")]
    assert list(shop.disk.files.values()) == [b"video a"]
    shop.disk.outside.clear()
    worker = shop.worker("other")
    (run,) = worker.runs
    offer = run.media["video"][0]
    assert (offer.file, offer.path, offer.nbytes) == (sha256(b"video a"), f"/files/{sha256(b'video a')}", 7)
    worker.fail(run)
    assert shop.disk.files
    worker.fail(worker.runs[1])
    assert not shop.disk.files
    assert {run.job for run in worker.runs} == set(jobs)


def test_groups_09_an_upload_belongs_to_its_client_until_a_job_has_it(shop: Shop) -> None:
    """Nobody else can refer to it by guessing its hash; a file that a job needs anybody can."""
    client, other = busy(shop), shop.client("other")
    video = client.upload(b"video x")
    assert other.refused("o", "v2v", media={"video": (video,)}).field == "video"
    client.accepted("k", "v2v", media={"video": (video,)})
    other.accepted("o", "v2v", media={"video": (video,)})
    shop.drop(client)
    assert list(shop.disk.files.values()) == [b"video x"]


def test_a_refused_request_leaves_the_uploads_to_their_client(shop: Shop) -> None:
    """It may submit again without sending them again."""
    client = busy(shop)
    video = client.upload(b"video x")
    assert client.refused("k", "v2v", media={"video": (video,)}, output="/elsewhere").field == "output"
    assert client.accepted("k", "v2v", media={"video": (video,)})


def test_a_request_is_refused_when_there_is_no_room_for_its_files() -> None:
    """And nothing of it stays."""
    shop = Shop(state_bytes_max=10)
    shop.disk.outside = {"/in/a.mp4": b"video that is too large", "/in/b.mp4": b"video"}
    client = busy(shop)
    failure = client.refused("k", "v2v", media={"video": (VIDEO,)})
    assert (failure.kind, failure.field) == ("overload", "video")
    assert not shop.disk.files
    assert client.accepted("k", "v2v", media={"video": (Media("/in/b.mp4"),)})


def test_groups_07_what_is_another_request_under_one_key(shop: Shop) -> None:
    """Another output is; equal numbers aren't, whatever kind of number they are, nor is another priority."""
    client = busy(shop)
    request: dict[str, Any] = {"parameters": {"scale": 1}, "output": "/out/a.mp4"}
    job = client.accepted("k", priority=1, **request)
    same: list[dict[str, Any]] = [{"parameters": {"scale": 1.0, "prompt": None}}, {"priority": 5}]
    for more in same:
        assert client.accepted("k", **{**request, **more}) == job
    assert client.info(job).priority == 1
    others: list[dict[str, Any]] = [{"parameters": {"scale": 2}}, {"output": ""}, {"output": "/out/b.mp4"}]
    for more in others:
        assert client.refused("k", **{**request, **more}).field == "key"


def test_requests_are_looked_at_in_turns(shop: Shop) -> None:
    """One with many files doesn't hold up one with few; the disk has one thing of them to do at a time."""
    client = busy(shop)
    shop.works = False
    client.submit("many", "r2v", media={"images": (Media("/in/b.png"),) * 3})
    client.submit("few", "t2v", output="/out/a.mp4")
    assert len(shop.disk.errands) == 1
    shop.work()
    shop.work()
    shop.commit()
    assert [each.key for each in client.heard(m.JobAccepted)] == ["few"]
    shop.works = True
    shop.settle()
    assert [each.key for each in client.heard(m.JobAccepted)] == ["few", "many"]


def test_groups_14_clients_take_turns_while_their_requests_are_checked(shop: Shop) -> None:
    """Ten requests of one client, whose files take long to look into, hold up another client's for two at most."""
    client, other = busy(shop), shop.client("other")
    video = client.upload(b"video of many hours")
    shop.works = False
    for index in range(10):
        client.submit(f"long {index}", "v2v", media={"video": (video,)})
    other.submit("short", "t2v", output="/out/a.mp4")
    other.submit("short too", "v2v", media={"video": (VIDEO,)})
    kinds = [type(errand).__name__ for errand in shop.disk.errands]
    assert kinds == ["InspectFile", "CheckOutput"]  # side by side
    shop.disk.errands.rotate(1)
    shop.work()  # the disk doesn't wait for what is looked into
    assert [each.key for each in other.heard(m.JobAccepted)] == ["short"]
    shop.disk.errands.rotate(1)
    shop.work()
    for _ in range(3):  # two of the other client's, then its own
        shop.work()
    assert [each.key for each in other.heard(m.JobAccepted)] == ["short", "short too"]
    assert len(client.heard(m.JobAccepted)) == 2


def test_groups_14_what_is_checked_counts_as_waiting() -> None:
    """Of ten thousand requests with files so many are taken as may wait, of one client and of all; these are all checked."""
    shop = Shop(jobs_queued_max=50, jobs_queued_per_client_max=20)
    shop.disk.outside = {"/in/a.mp4": b"video a"}
    first, others = busy(shop), [shop.client(f"c{index}") for index in range(4)]
    shop.works = shop.checks = False
    for index in range(2000):
        first.submit(f"first {index}", "v2v", media={"video": (VIDEO,)})
    refused = first.take(m.JobRefused)
    assert len(refused) == 2000 - 20
    assert {(each.failure.kind, each.failure.retry_after_s) for each in refused} == {("overload", 5.0)}
    for index in range(2000):
        for client in others:
            client.submit(f"{client.name} {index}", "v2v", media={"video": (VIDEO,)})
    assert sum(len(client.heard(m.JobRefused)) for client in others) == 8000 - 30
    assert shop.jobs.status()["checking"] == 50
    assert not others[0].heard(m.JobAccepted)
    while not all(client.heard(m.JobAccepted) for client in others):
        shop.work()
        shop.commit()
    assert len(first.heard(m.JobAccepted)) <= 2  # nobody waits for more than one of each other client at a time
    shop.works = True
    shop.settle()
    assert sum(len(client.heard(m.JobAccepted)) for client in (first, *others)) == 50
    shop.core.check()


def test_a_client_that_goes_while_its_request_is_checked_gets_its_job(shop: Shop) -> None:
    """Also with an upload that was only its own."""
    client = busy(shop)
    video = client.upload(b"video x")
    shop.works = False
    client.submit("k", "v2v", media={"video": (video,)})
    shop.drop(client)
    shop.works = True
    shop.settle()
    assert shop.client("other").accepted("k", "v2v", media={"video": (video,)})
    assert len(shop.disk.records) == 2


def test_jobs_are_listed_newest_first_and_no_more_than_fit(shop: Shop) -> None:
    """256 at most, and within what the client accepts of a header."""
    shop = Shop(jobs_queued_max=1000, jobs_queued_per_client_max=1000)
    shop.checks = False
    client = busy(shop)
    jobs = [client.accepted(f"k{index}") for index in range(300)]
    answer = client.ask(m.AskJobs)
    assert answer.total == 301
    assert [info.job for info in answer.jobs] == jobs[:-257:-1]
    assert [info.position for info in answer.jobs] == list(range(299, 43, -1))
    small = shop.client("small")
    shop.core._peers.by_route[small.route].limits = Limits(header_bytes_max=4000)
    assert 0 < len(small.ask(m.AskJobs).jobs) < 40
    assert client.ask(m.AskJobs, "nobody").failure.field == "job"


def test_ten_thousand_submissions_at_once() -> None:
    """All are accepted, in order, each with its position; it takes a few seconds at most, and is told how long."""
    count = 10_000
    shop = Shop(jobs_queued_max=count + 5, jobs_queued_per_client_max=count)
    shop.checks = False
    busy(shop)
    clients = [shop.client(f"c{index}") for index in range(10)]
    core, entropy, actions = shop.core, bytes(16), []
    submissions = [
        Received(shop.now, client.route, client.attachment, m.SubmitJob(f"k{number}", "t2v"), 100, entropy)
        for number, client in zip(range(count), clients * (count // 10), strict=True)
    ]
    began = time.perf_counter()
    for event in submissions:
        core.take(event)
    actions += core.settle()
    taken = time.perf_counter() - began
    tickets = [action.ticket for action in actions if isinstance(action, Persist)]
    assert len(tickets) == count
    answers = core.handle(Stored(shop.now, tickets[-1]))
    stored = time.perf_counter() - began - taken
    told: list[Any] = [each.message for each in answers if isinstance(each, Send)]
    positions = [word.job.position for word in told if isinstance(word, m.JobAccepted)]
    assert positions == list(range(count))
    core.check()
    more = [
        Received(shop.now, clients[0].route, clients[0].attachment, m.SubmitJob(f"m{number}", "t2v"), 100, entropy)
        for number in range(count)
    ]
    began = time.perf_counter()
    for event in more:
        core.take(event)
    refused = time.perf_counter() - began
    print(
        f"per job: {taken / count:.1e} s to take, {stored / count:.1e} s to accept, {refused / count:.1e} s to refuse"
    )
    told = [each.message for each in core.settle() if isinstance(each, Send)]
    assert sum(isinstance(word, m.JobRefused) for word in told) >= count - 5


def test_a_kind_that_nobody_does_any_more_waits_for_a_worker(shop: Shop) -> None:
    """What it waits for is said."""
    client = shop.client()
    other = shop.worker("other", kinds=(JobSpec("x", "else"), T2V))
    other.group.job = "busy"
    shop.checks = False
    job = client.accepted()
    assert client.info(job).waits_for == "group"
    shop.drop(other)
    assert client.info(job).waits_for == "worker"
