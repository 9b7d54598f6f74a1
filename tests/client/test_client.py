"""The SDK on a real socket, against a broker made of plain messages."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from reelwire import (
    BrokerUnreachable,
    Client,
    Control,
    ControlError,
    OverloadError,
    RequestError,
    Session,
    SessionClosed,
    SessionFailed,
    UsageError,
    VersionMismatch,
    WireError,
)
from reelwire import messages as m
from reelwire.client import DEFAULT_ENDPOINT
from reelwire.messages import Artifact, Failure
from reelwire.tensors import to_array

StandIn = Any  # of conftest.py
LIMIT_S = 10.0


@pytest.fixture
def client(stand_in: StandIn) -> Iterator[Client]:
    with Client(stand_in.endpoint, name="tester") as client:
        yield client


@contextmanager
def refused(field: str) -> Iterator[Any]:
    with pytest.raises(RequestError) as caught:
        yield caught
    assert caught.value.field == field


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reelwire-client"]


# --- connecting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["127.0.0.1:7461", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://h:65536",
                                      "tcp://a b:1", "http://h:1", "ipc://", "ipc://" + "x" * 108, "tcp://h:1/x",
                                      "inproc://x", "tcp://[::1:5", "tcp://[1::2::3]:5"])  # fmt: skip
def test_an_endpoint_of_another_form_is_refused(endpoint: str) -> None:
    """Before anything is connected; no thread is left."""
    with refused("endpoint"):
        Client(endpoint)
    with refused("connect_timeout_s"):
        Client("tcp://127.0.0.1:1", connect_timeout_s=0)
    with refused("name"):
        Client("tcp://127.0.0.1:1", name="\ud800")
    assert not threads()


def test_the_endpoint_comes_from_argument_or_environment_or_default(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument wins over the variable, which wins over the default."""
    monkeypatch.setenv("REELWIRE_BROKER", stand_in.endpoint)
    with Client() as client:
        assert client.endpoint == stand_in.endpoint
    monkeypatch.setenv("REELWIRE_BROKER", "tcp://127.0.0.1:1")
    with Client(stand_in.endpoint) as client:
        assert client.name == "me-1"
    monkeypatch.delenv("REELWIRE_BROKER")
    monkeypatch.setattr("reelwire.client.check_endpoint", pytest.fail)
    with pytest.raises(pytest.fail.Exception, match=DEFAULT_ENDPOINT):
        Client()


@pytest.mark.parametrize("listens", [True, False])
def test_where_no_broker_answers_is_named(listens: bool) -> None:
    """A closed port, and one where somebody accepts and says nothing: the endpoint is in the error, no thread is left."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if listens:
            listener.listen()
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BrokerUnreachable, match=f"no reelwire broker answered at {endpoint} within 0.2 s"):
            Client(endpoint, connect_timeout_s=0.2)
    assert not threads()


def test_streaming_38_versions_that_do_not_fit_are_both_named(stand_in: StandIn) -> None:
    """The client refuses a broker of another minor version."""
    stand_in.version = "0.9.0"
    with pytest.raises(VersionMismatch, match=r"reelwire 0\.9\.0, this client 0\.1"):
        Client(stand_in.endpoint)
    assert not threads()


def test_streaming_38_limits_are_said_both_ways(stand_in: StandIn) -> None:
    """The hello says what the client accepts; what the broker doesn't accept is refused here, by name."""
    for wrong in (0, -1, True, 1.5):
        with refused("frame_bytes_max"):
            Client(stand_in.endpoint, frame_bytes_max=wrong)  # type: ignore[arg-type]
    stand_in.limits = {"image_bytes_max": 3 * 64 * 64, "frame_bytes_max": 3 * 8 * 8}
    with Client(stand_in.endpoint, frame_bytes_max=100) as client:
        assert stand_in.next(m.ClientHello).limits == {"frame_bytes_max": 100, "header_bytes_max": 1 << 20}
        client.open_session("toy", image=np.zeros((8, 8, 3), np.uint8), chunks=3)
        with refused("image") as caught:
            client.open_session("toy", image=np.zeros((8, 9, 3), np.uint8), chunks=3)
        assert "takes 216 bytes; accepted by the broker: 192" in str(caught.value)


def test_a_client_takes_part_and_leaves(stand_in: StandIn, client: Client) -> None:
    """Hello and goodbye; status and pipelines in between; a closed client says so."""
    hello = stand_in.next(m.ClientHello)
    assert hello.name == "tester"
    assert hello.limits == {"frame_bytes_max": 256 << 20, "header_bytes_max": 1 << 20}
    assert client.status() == {"workers": 0}
    assert list(client.pipelines) == ["toy"]
    assert stand_in.endpoint in repr(client)
    client.close()
    client.close()
    stand_in.next(m.Goodbye)
    assert not threads()
    with pytest.raises(UsageError, match="the client was closed"):
        client.status()


def test_streaming_32_a_silent_broker_fails_the_session_and_is_connected_to_again(stand_in: StandIn) -> None:
    """A thread that waits for a chunk is woken by the failure; the same client then opens another session."""
    stand_in.heartbeat_s = 0.05
    with Client(stand_in.endpoint) as client:
        session = client.open_session("toy", chunks=3)
        stand_in.silent.add(m.Heartbeat)
        with pytest.raises(SessionFailed, match="hasn't been heard of"):
            session.next_chunk(LIMIT_S)
        assert session.state == "failed"
        stand_in.silent.clear()
        with client.open_session("toy", chunks=3) as session:
            assert session.state == "ready"


def test_streaming_34_garbage_from_the_broker_changes_nothing(stand_in: StandIn, client: Client) -> None:
    """Bytes that are no message are dropped; the connection lives on."""
    stand_in.say(b"HTTP/1.1 200 OK")
    stand_in.say(b"")
    assert client.status() == {"workers": 0}


# --- opening ---------------------------------------------------------------------------------------------------------


def test_what_can_not_be_opened_is_refused_before_anything_is_sent(stand_in: StandIn, client: Client) -> None:
    """Each fault names the field that the caller wrote."""
    picture = np.zeros((4, 4, 3), np.uint8)
    faults: list[tuple[str, str, dict[str, Any]]] = [
        ("pipeline", "town", {"chunks": 1}), ("chunks", "toy", {}), ("chunks", "toy", {"chunks": 1, "frames": 9}),
        ("chunks", "toy", {"chunks": 0}), ("chunks", "toy", {"chunks": 11}), ("chunks", "toy", {"chunks": 1.0}),
        ("chunks", "toy", {"chunks": True}), ("frames", "toy", {"frames": 10}), ("frames", "toy", {"frames": "9"}),
        ("frames", "toy", {"frames": 9 + 12 * 10}), ("frames_policy", "toy", {"frames": 9, "frames_policy": "x"}),
        ("colour", "toy", {"chunks": 1, "colour": "red"}), ("seed", "toy", {"chunks": 1, "seed": "7"}),
        ("prompt", "toy", {"chunks": 1, "prompt": 7}), ("size", "toy", {"chunks": 1, "size": 2**70}),
        ("parameters", "toy", {"chunks": 1, "prompt": "\ud800"}), ("image", "toy", {"chunks": 1, "image": "no.png"}),
        ("parameters", "toy", {"chunks": 1, "prompt": "x" * 1_500_000}),
        ("image", "toy", {"chunks": 1, "image": picture.astype(float)}), ("image", "toy", {"chunks": 1, "image": []}),
        ("depth", "toy", {"chunks": 1, "tensors": {"depth": picture}}),
        ("depth", "toy", {"chunks": 1, "tensors": {"depth": "far"}}),
        ("mask", "toy", {"chunks": 1, "tensors": {"mask": picture}}),
    ]  # fmt: skip
    for field, pipeline, given in faults:
        with refused(field):
            client.open_session(pipeline, **given)
    client.close()
    stand_in.next(m.ClientHello)
    assert isinstance(stand_in.heard.get(timeout=LIMIT_S), m.Goodbye)


def test_a_request_carries_everything(stand_in: StandIn, client: Client, tmp_path: Path) -> None:
    """Frames become chunks, parameters are complete, a picture comes from a file or an array and fits the limit."""
    Image.fromarray(np.full((4, 6, 3), 9, np.uint8)).save(tmp_path / "a.png")
    session = client.open_session("toy", image=tmp_path / "a.png", prompt="a hill", seed=7, frames=33, size=3,
                                  tensors={"depth": np.ones(2, np.float32)})  # fmt: skip
    request = stand_in.next(m.OpenSession)
    assert (request.pipeline, request.chunks) == ("toy", 3)
    assert request.parameters == {"prompt": "a hill", "seed": 7, "size": 3} == session.parameters
    np.testing.assert_array_equal(to_array(request.tensors["image"]), np.full((4, 6, 3), 9))
    np.testing.assert_array_equal(to_array(request.tensors["depth"]), [1, 1])
    assert (session.id, session.token, session.chunks, session.prompt) == ("s", "token", 3, "a hill")
    client.open_session("toy", image=np.zeros((100, 100, 3), np.uint8), frames=37, frames_policy="truncate")
    request = stand_in.next(m.OpenSession)
    assert (request.chunks, request.tensors["image"].shape) == (3, (50, 50, 3))


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure("request", "no", field="seed"), RequestError),
        (Failure("overload", "no", retry_after_s=3), OverloadError),
        (Failure("stage", "no", "make"), SessionFailed),
    ],
)
def test_a_refused_session_is_the_error_of_the_call(
    stand_in: StandIn, client: Client, failure: Failure, kind: type[Exception]
) -> None:
    """The broker's reason is raised where the session was asked for."""
    stand_in.silent.add(m.OpenSession)

    def answer() -> None:
        stand_in.say(m.SessionRefused(stand_in.next(m.OpenSession).key, failure))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(kind, match="no"):
        client.open_session("toy", chunks=1)
    thread.join()


def test_an_opening_that_takes_too_long_is_cancelled(stand_in: StandIn, client: Client) -> None:
    """The call ends with a TimeoutError, and the session that comes after all is cancelled."""
    stand_in.silent.add(m.OpenSession)
    with pytest.raises(TimeoutError):
        client.open_session("toy", chunks=1, timeout=0.05)
    stand_in.say(m.SessionOpened(stand_in.next(m.OpenSession).key, "s", "token"))
    assert stand_in.next(m.EndSession) == m.EndSession("s", "cancel")


# --- controls and chunks ---------------------------------------------------------------------------------------------


def test_streaming_16_a_chunk_says_everything_about_itself(stand_in: StandIn, client: Client) -> None:
    """Frames, control, facts and times; the arrays are read-only and stay valid while they are referred to."""
    with client.open_session("toy", chunks=2) as session:
        session.submit(0, Control(keys={"up", "a"}))
        session.submit(1, Control(poses=np.eye(4)[None], reset_pose=True))
        first, second = list(session)
    assert (first.index, first.frames.shape, first.is_last) == (0, (2, 4, 4, 3), False)
    assert first.frames.dtype == np.uint8
    assert (second.index, second.is_last, second.control_source) == (1, True, "explicit")
    assert first.control == Control(keys=["a", "w"])
    assert second.control == Control(poses=np.eye(4)[None], reset_pose=True)
    assert first.facts == {"pose": [1.0]}
    assert first.outputs["frames"]["codec"] == "none"
    assert first.control_to_frame_s is not None
    assert 0 < first.control_to_frame_s < LIMIT_S
    assert first.change_to_frame_s == ()
    assert not first.frames.flags.writeable
    assert (first.frames == 0).all()
    assert session.state == "completed"


def test_streaming_29_a_key_event_is_timed_to_its_first_frame(stand_in: StandIn, client: Client) -> None:
    """The chunk that first applies a press carries the time since then."""
    with client.open_session("toy", chunks=5) as session:
        session.press("w")
        chunk = session.next_chunk(LIMIT_S)
    assert chunk is not None
    assert (chunk.control, chunk.control_source, chunk.control_to_frame_s) == (Control(keys=["w"]), "held", None)
    assert len(chunk.change_to_frame_s) == 1
    assert 0 < chunk.change_to_frame_s[0] < LIMIT_S


def test_streaming_19_the_last_chunk_is_acknowledged_when_the_iteration_ends(stand_in: StandIn, client: Client) -> None:
    """Each turn of the loop acknowledges the chunk before."""
    session = client.open_session("toy", chunks=2)
    session.submit(0, Control(keys=()))
    session.submit(1, Control(keys=()))
    chunks = iter(session)
    next(chunks)
    next(chunks)
    assert stand_in.next(m.Ack).chunks == 1
    assert next(chunks, None) is None
    assert stand_in.next(m.Ack).chunks == 2
    assert session.next_chunk() is None


def test_streaming_17_keys_are_checked_before_they_are_sent(stand_in: StandIn, client: Client) -> None:
    """A key, or an array, that the pipeline doesn't have; a control says so by its code."""
    with client.open_session("toy", chunks=2) as session:
        with refused("control"):
            session.press("q")
        with pytest.raises(ControlError, match="accepted: a, d, w, up") as caught:
            session.submit(0, Control(keys=["q"]))
        assert caught.value.code == "unknown_key"
        with pytest.raises(ControlError) as caught:
            session.submit(0, Control(poses=np.eye(4)[None], intrinsics=np.ones(4)))
        assert caught.value.code == "malformed"
    assert isinstance(stand_in.next(m.EndSession), m.EndSession)


def test_key_events_are_one_register(stand_in: StandIn, client: Client) -> None:
    """Each change is sent whole with a higher revision; what changes nothing isn't sent."""
    session = client.open_session("toy", chunks=2)
    session.press("up")
    session.press("w")
    session.tap("d")
    session.set_keys({"a"})
    session.release("a")
    session.reset()
    session.reset_pose()
    states = [stand_in.next(m.SetKeys).keys for _ in range(6)]
    assert [state.revision for state in states] == [1, 2, 3, 4, 5, 6]
    assert [state.held for state in states] == [("w",), ("w",), ("a",), (), (), ()]
    assert states[-1].reset_pose_revision == 1


def test_key_events_of_many_threads_keep_their_order(stand_in: StandIn, client: Client) -> None:
    """However threads interleave, the broker sees every revision once and in order."""
    session = client.open_session("toy", chunks=2)

    def play(key: str) -> None:
        for _ in range(30):
            session.tap(key)

    players = [threading.Thread(target=play, args=(key,)) for key in "adw"]
    for player in players:
        player.start()
    for player in players:
        player.join()
    assert [stand_in.next(m.SetKeys).keys.revision for _ in range(90)] == list(range(1, 91))


def test_a_prompt_can_not_be_changed(client: Client) -> None:
    """The reason is said: text keys and values are computed once."""
    session = client.open_session("toy", chunks=2, prompt="a hill")
    with pytest.raises(UsageError, match="computed once"):
        session.prompt = "a lake"
    assert session.prompt == "a hill"
    assert "toy" in repr(session)


def test_waiting_is_bounded_where_the_caller_says_so(stand_in: StandIn, client: Client) -> None:
    """Chunk, control, end: each wait ends in a TimeoutError, and the session lives on."""
    session = client.open_session("toy", chunks=2)
    stand_in.silent |= {m.SubmitControl, m.EndSession, m.AskMetrics}
    with pytest.raises(TimeoutError):
        session.next_chunk(timeout=0.01)
    with pytest.raises(TimeoutError):
        session.submit(0, Control(keys=()), timeout=0.01)
    with pytest.raises(TimeoutError):
        session.metrics(timeout=0.01)
    with pytest.raises(TimeoutError):
        session.close(timeout=0.01)
    stand_in.silent.clear()
    assert session.metrics() == {"chunks": 1}


def test_a_chunk_without_frames_is_the_brokers_fault(stand_in: StandIn, client: Client) -> None:
    """What can't be shown is a WireError in the hands of the reader, and nothing breaks behind it."""
    session = client.open_session("toy", chunks=2)
    applied = m.Applied("held", Artifact({"keys": ["w"]}), 1)
    stand_in.say(m.Chunk("s", 0, {"frames": Artifact()}, applied, {}, m.ChunkTiming(0, 0, None, {}), False))
    with pytest.raises(WireError, match="holds no tensor instead of frames"):
        session.next_chunk(LIMIT_S)
    assert client.status() == {"workers": 0}


# --- the end ---------------------------------------------------------------------------------------------------------


def test_streaming_22_leaving_the_block_drains_and_raising_in_it_cancels(stand_in: StandIn, client: Client) -> None:
    """What was accepted can be read after a drain; the error of the block goes on."""
    with client.open_session("toy", chunks=5) as drained:
        drained.submit(0, Control(keys=()))
    assert stand_in.next(m.EndSession).mode == "drain"
    assert [chunk.index for chunk in drained] == [0]
    session = client.open_session("toy", chunks=5)

    def failing() -> None:
        with session:
            session.submit(0, Control(keys=()))
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert stand_in.next(m.EndSession).mode == "cancel"
    assert (list(session), session.state) == ([], "cancelled")
    with pytest.raises(SessionClosed, match="cancelled"):
        session.press("w")
    with pytest.raises(SessionClosed):
        session.submit(1, Control(keys=()))
    session.cancel()


def test_streaming_23_a_failure_is_raised_after_the_chunks_before_it(stand_in: StandIn, client: Client) -> None:
    """Stage and chunk are in the error; leaving the block raises nothing more."""
    with client.open_session("toy", chunks=5) as session:
        session.submit(0, Control(keys=()))
        stand_in.say(m.SessionEnded("s", "failed", Failure("stage", "boom", "make", 1)))
        chunks = iter(session)
        assert next(chunks).index == 0
        with pytest.raises(SessionFailed, match="boom") as caught:
            next(chunks)
    assert (caught.value.stage, caught.value.index) == ("make", 1)


def test_streaming_24_a_session_that_the_broker_closed_says_why(stand_in: StandIn, client: Client) -> None:
    """The reader of an idle session gets the reason."""
    session = client.open_session("toy", chunks=5)
    stand_in.say(m.SessionEnded("s", "closed", Failure("timeout", "no control for 300 s")))
    with pytest.raises(SessionClosed, match="no control for 300 s"):
        next(iter(session))


def test_whoever_waits_is_woken_when_the_client_is_closed(stand_in: StandIn, client: Client, in_thread: Any) -> None:
    """A reader gets the end of its session, a submitter its error."""
    session = client.open_session("toy", chunks=5)
    stand_in.silent.add(m.SubmitControl)
    reading = in_thread(session.next_chunk)
    submitting = in_thread(lambda: session.submit(0, Control(keys=())))
    stand_in.next(m.SubmitControl)
    client.close()
    assert reading.get(timeout=LIMIT_S) is None
    assert isinstance(submitting.get(timeout=LIMIT_S), SessionClosed)


def test_a_session_that_is_dropped_is_cancelled(stand_in: StandIn, client: Client) -> None:
    """Nobody has to remember to close what can't be reached any more."""
    session: Session | None = client.open_session("toy", chunks=5)
    gone = weakref.ref(session)
    session = None
    gc.collect()
    assert gone() is None
    assert stand_in.next(m.EndSession) == m.EndSession("s", "cancel")


def test_a_client_that_is_dropped_leaves(stand_in: StandIn) -> None:
    """Its thread ends and the broker is told; a session keeps its client alive."""
    client: Client | None = Client(stand_in.endpoint)
    assert client is not None
    session: Session | None = client.open_session("toy", chunks=5)
    client = None
    gc.collect()
    assert session is not None
    assert session.metrics() == {"chunks": 1}
    session = None
    gc.collect()
    assert stand_in.next(m.Goodbye)
    for thread in threads():
        thread.join(LIMIT_S)
    assert not threads()


def test_a_process_may_end_without_closing_anything(stand_in: StandIn) -> None:
    """The interpreter ends at once, and the broker hears a goodbye."""
    program = (
        "import reelwire, sys\n"
        f"client = reelwire.Client({stand_in.endpoint!r})\n"
        "session = client.open_session('toy', chunks=5)\n"
        "session.press('w')\n"
        "print(session.next_chunk(5).index)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", program], capture_output=True, text=True,
                          check=False, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    stand_in.next(m.Goodbye)


def test_a_forked_process_can_not_use_its_parents_client(client: Client) -> None:
    """The child is told so at once; the parent's client isn't disturbed."""
    child = os.fork()
    if child == 0:
        try:
            client.status()
        except UsageError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.status() == {"workers": 0}
