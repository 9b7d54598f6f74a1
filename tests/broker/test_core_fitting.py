"""What is too large for its receiver isn't sent: the session fails with a sentence, and the connection stays."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.config import BrokerConfig
from reelwire.errors import ConfigError
from reelwire.messages import Artifact
from reelwire.spec import Parameter
from reelwire.tensors import Inline, TensorRef
from reelwire.wire import Limits


def tensor(nbytes: int) -> Artifact:
    """An artifact of so many bytes."""
    return Artifact({}, {"x": TensorRef("uint8", (nbytes,), Inline(bytes(nbytes)))})


def make(worker: Any, *stages: str, **outputs: Artifact) -> None:
    """Finish a task of each stage, with outputs by the stage's name."""
    produces = {"encode": "condition", "denoise": "latent", "decode": "frames"}
    for stage in stages:
        more = {"outputs": {produces[stage]: outputs[stage]}} if stage in outputs else {}
        worker.finish(stage, **more)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"frame_bytes_max": 1000}, "chunk 1 can't be sent to the client: frame of 1001 bytes; accepted: 1000"),
        ({"message_bytes_max": 1000}, "accepted: 1000"),
        ({"frames_max": 1}, "message of 2 frames; accepted: 1"),
    ],
)
def test_streaming_38_a_chunk_too_large_for_its_client_fails_its_session(
    rig: Any, limits: dict[str, int], sentence: str
) -> None:
    """Chunks below it are delivered; the client stays attached, and its neighbour with wider limits gets the same."""
    worker, narrow = rig.worker(), rig.client(b"narrow", limits=limits)
    wide = rig.client(b"wide")
    first, second = narrow.open(), wide.open()
    for index in range(2):
        assert isinstance(narrow.submit(first, index), m.ControlAccepted)
    wide.submit(second, 0)
    for size in (None, 1001, 1001):
        more = {} if size is None else {"decode": tensor(size)}
        while not worker.jobs["denoise"]:
            make(worker, "encode")
        make(worker, "denoise", "decode", **more)
        narrow.ack(first, len(narrow.chunks(first)))
    assert [chunk.index for chunk in narrow.chunks(first)] == [0]
    ended = narrow.ended(first)
    assert (ended.state, ended.failure.kind, ended.failure.field) == ("failed", "request", "frame_bytes_max")
    assert sentence in ended.failure.message
    assert len(wide.chunks(second)) == 1
    assert not narrow.heard(m.Rejected)


def test_streaming_38_the_times_of_a_chunk_count(rig: Any) -> None:
    """A header that would be too large with the times that only the commit knows is found out before."""
    worker, client = rig.worker(), rig.client(limits={"header_bytes_max": 200})
    session = client.open()
    client.submit(session, 0)
    make(worker, "encode", "denoise", "decode")
    assert "header of" in client.ended(session).failure.message
    assert client.chunks(session) == []


def test_streaming_38_a_task_too_large_for_its_worker_fails_its_session(rig: Any) -> None:
    """The stage, the chunk and the worker are named; the chunks below are delivered; the worker isn't bothered."""
    worker, client = rig.worker(limits={"frame_bytes_max": 100}), rig.client()
    session = client.open()
    for index in range(2):
        client.submit(session, index)
    make(worker, "encode", "encode", "denoise", "decode")
    make(worker, "denoise", denoise=tensor(101))
    client.ack(session, 1)
    failure = client.ended(session).failure
    assert (failure.kind, failure.stage, failure.index) == ("stage", "decode", 1)
    assert failure.message == "the inputs can't be sent to worker 'w': frame of 101 bytes; accepted: 100"
    assert [chunk.index for chunk in client.chunks(session)] == [0]
    assert client.open("next")


def test_streaming_38_a_request_too_large_for_every_worker_is_refused_at_once(rig: Any, kit: Any) -> None:
    """It names its largest field; a worker that accepts more, if there is one, changes that."""
    spec = kit.world(parameters=(Parameter("prompt", "string", "a text"), Parameter("seed", "integer", "", default=0)))
    limits = {"header_bytes_max": 10_000}
    rig.worker("narrow", spec=spec, limits=limits)
    client = rig.client()
    assert client.open("1", parameters={"prompt": "x" * 8000}) == ""
    failure = client.last(m.SessionRefused).failure
    assert (failure.kind, failure.field) == ("request", "prompt")
    assert "accepted: 10000" in failure.message
    rig.worker("wide", spec=spec)
    assert client.open("2", parameters={"prompt": "x" * 8000})


def test_streaming_38_what_stages_hand_on_may_not_fit_either(rig: Any) -> None:
    """Then the session fails before the stage is asked; what was initialized is released."""
    worker, client = rig.worker(limits={"frame_bytes_max": 100}), rig.client()
    worker.silent.add(m.InitializeStage)
    session = client.open()
    worker.initialized(worker.last(m.InitializeStage), handed=tensor(101))
    failure = client.ended(session).failure
    assert (failure.kind, failure.stage) == ("request", "decode")
    assert "frame of 101 bytes; accepted: 100" in failure.message
    assert [x.stage for x in worker.heard(m.ReleaseStage)] == ["encode"]


def test_streaming_38_limits_that_are_none_are_refused(rig: Any) -> None:
    """A hello that accepts nothing is malformed; unknown names are for later versions."""
    assert rig.client(b"1", limits={"frame_bytes_max": 0}).last(m.Rejected).code == "malformed"
    assert rig.client(b"2", limits={"colour_max": 0}).attachment
    assert rig.client(b"2").last(m.Welcome).limits["message_bytes_max"] == Limits().message_bytes_max


def test_streaming_12_sessions_of_one_client_are_limited(kit: Any) -> None:
    """The one beyond is told to come again; another client isn't concerned."""
    rig = kit.Rig(BrokerConfig(sessions_per_client_max=2))
    rig.worker()
    one, other = rig.client(b"1"), rig.client(b"2")
    first = one.open("1")
    assert one.open("2")
    assert one.open("3") == ""
    failure = one.last(m.SessionRefused).failure
    assert (failure.kind, failure.retry_after_s) == ("overload", 5.0)
    assert other.open()
    one.end(first, "cancel")
    assert one.open("3")


def test_streaming_12_bytes_of_requests_that_wait_are_limited(kit: Any) -> None:
    """A request counts until its stages have it, or its session has ended."""
    rig = kit.Rig(BrokerConfig(request_bytes_max=250))
    worker, client = rig.worker(slots=1), rig.client()
    first, second = client.open("1"), client.open("2")
    assert client.open("3")
    assert client.open("4") == ""
    assert "requests of 200 bytes wait already" in client.last(m.SessionRefused).failure.message
    client.end(second, "cancel")
    fourth = client.open("4")
    client.end(first, "cancel")
    while worker.jobs["encode"]:
        worker.finish("encode")
    assert client.open("5")
    for session in (fourth, "k"):
        client.end(session, "cancel")


def test_a_message_holds_a_header_and_a_frame() -> None:
    """Limits that contradict each other are refused with the name of the setting."""
    with pytest.raises(ConfigError, match="message_bytes_max: 1000 is less than a header and a frame"):
        BrokerConfig(message_bytes_max=1000)


@pytest.mark.parametrize("maps", [True, False])
def test_streaming_38_where_a_tensor_is_makes_no_difference(rig: Any, maps: bool) -> None:
    """In shared memory or inside of its message: what its client doesn't accept fails its session by the same name."""
    worker, client = rig.worker(memory=True, maps=maps), rig.client(limits={"frame_bytes_max": 8}, maps=maps)
    rig.turn()
    session = client.open()
    client.submit(session, 0)
    made = {} if maps else {"decode": tensor(9)}
    make(worker, "encode", "denoise", "decode", **made)
    failure = client.ended(session).failure
    assert (failure.kind, failure.field) == ("request", "frame_bytes_max")
    assert failure.message == "chunk 0 can't be sent to the client: frame of 9 bytes; accepted: 8"
    assert client.chunks(session) == []


@pytest.mark.parametrize("maps", [True, False])
def test_streaming_38_nor_on_the_way_to_a_worker(rig: Any, maps: bool) -> None:
    """Else a stage would fail or not by where the stage before it runs."""
    rig.worker("producer", memory=True, stages=("encode", "denoise"))
    rig.worker("consumer", stages=("decode",), limits={"frame_bytes_max": 8}, maps=maps)
    producer, client = rig.peers[b"producer"], rig.client()
    rig.turn()
    session = client.open()
    client.submit(session, 0)
    make(producer, "encode")
    assert producer.jobs["denoise"][0].shared == (("latent",) if maps else ())
    made = {} if maps else {"denoise": tensor(9)}
    make(producer, "denoise", **made)
    failure = client.ended(session).failure
    assert (failure.kind, failure.stage, failure.index) == ("stage", "decode", 0)
    assert failure.message == "the inputs can't be sent to worker 'consumer': frame of 9 bytes; accepted: 8"
