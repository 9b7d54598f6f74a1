"""What clients are tested with: a bench for their core, and a broker made of plain messages on a real socket."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from reelwire import client_events as e
from reelwire import messages as m
from reelwire import tensors, wire
from reelwire.client_core import ClientCore
from reelwire.client_view import SessionView
from reelwire.job_spec import JobSpec
from reelwire.messages import Artifact
from reelwire.spec import Edge, Parameter, StageSpec, StreamSpec, TensorInput

CONTROL = Artifact({"keys": ["w"]})
WINDOW = m.Credit(2, 1000)
TIMING = m.ChunkTiming(0.0, 0.0, None, {})


class Rig:
    """A core with everything that it did so far."""

    def __init__(self) -> None:
        self.core = ClientCore("0.1.0", "me", window=WINDOW)
        self.now = 100.0
        self.sent: list[m.ClientMessage] = []
        self.attachments: list[int] = []
        self.done: dict[int, e.Done] = {}
        self.delivered: list[e.Delivery] = []
        self.parts: list[bytes] = []
        self.news: list[str] = []
        self.probes: list[str] = []
        self.reconnects = 0
        self.stopped = False
        self.calls = 0

    def feed(self, event: e.Event) -> None:
        """Hand an event in, and check the invariants."""
        for action in self.core.handle(event):
            match action:
                case e.Send(attachment=attachment, message=message):
                    self.sent.append(message)
                    self.attachments.append(attachment)
                case e.Done(call=call):
                    assert call not in self.done, "a call is answered once"
                    self.done[call] = action
                case e.Delivery():
                    self.delivered.append(action)
                case e.Part(data=data):
                    self.parts.append(bytes(data))
                case e.AnswerProbe(owner=owner):
                    self.probes.append(owner)
                case e.Reconnect():
                    self.reconnects += 1
                case e.Stop():
                    self.stopped = True
                case e.Changed(session=name):
                    self.news.append(name)
        self.core.check()

    def hear(self, message: m.ToClient, attachment: int = 7) -> None:
        """A message of the broker arrives."""
        self.feed(e.Received(self.now, attachment, message))

    def tick(self, seconds: float = 0.0) -> None:
        """Time goes by."""
        self.now += seconds
        self.feed(e.Tick(self.now))

    def call(self, kind: Any, *args: Any, **more: Any) -> int:
        """A call of the application; its number."""
        self.calls += 1
        self.feed(kind(self.now, self.calls, *args, **more))
        return self.calls

    def attach(self, **more: Any) -> None:
        """The broker answers the hello."""
        self.feed(e.Connect(self.now))
        self.hear(m.Welcome("me-1", more.get("version", "0.1.9"), 1.0, 3, {}))

    def open(self, chunks: int = 5, limit: int = 2, **more: Any) -> SessionView:
        """A session is opened and ready."""
        call = self.call(e.Open, "k", "toy", chunks, **more)
        self.hear(m.SessionOpened("k", "s", "token"))
        self.hear(m.SessionChanged("s", "ready", limit))
        assert self.done[call].value == "s"
        return self.core.sessions["s"]

    def chunk(
        self,
        index: int,
        source: m.ControlSource = "explicit",
        revision: int = 0,
        tap: int = 0,
        chunks: int = 5,
        nbytes: int = 0,
        limit: int = 0,
    ) -> None:
        """A chunk of so many bytes and with such a grant arrives; `tap` is the newest one-shot that was consumed by then."""
        applied = m.Applied(source, CONTROL, revision, tap)
        outputs = {"frames": Artifact({}, {"frames": tensors.from_array(np.zeros(nbytes, np.uint8))})}
        self.hear(m.Chunk("s", index, outputs, applied, {}, TIMING, index == chunks - 1, limit))

    def take(self) -> int | None:
        """The application asks for the next chunk; its index."""
        before = len(self.delivered)
        self.feed(e.Take(self.now, "s"))
        return self.delivered[-1].chunk.index if len(self.delivered) > before else None

    def said(self, kind: type) -> list[Any]:
        """What was sent of that kind, oldest first."""
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def acked(self) -> list[int]:
        """How many chunks each acknowledgement was for, oldest first."""
        return [message.chunks for message in self.said(m.Ack)]

    def error(self, call: int, kind: type[Exception], text: str = "") -> Any:
        """The error that a call was answered with."""
        error = self.done[call].error
        assert type(error) is kind
        assert text in str(error)
        return error


@pytest.fixture
def rig() -> Rig:
    """A client that isn't connected."""
    return Rig()


@pytest.fixture
def attached(rig: Rig) -> Rig:
    """A client that the broker knows as attachment 7."""
    rig.attach()
    return rig


SPEC = StreamSpec(
    "toy", (StageSpec("make", ("control",), ("frames",), ("image",)),), (Edge("control"), Edge("frames")), ("control",),
    ("frames",), ("make",), "control", chunks_max=10, frames_first=9, frames_next=12, frame_stride=4, fps=16.0,
    control_names=("a", "d", "w"), control_aliases={"up": "w"}, control_tensors=(TensorInput("poses", "float", (-1, 4, 4), required=True),),
    parameters=(Parameter("prompt", "string", "the world", default="", maximum=2_000_000),
                Parameter("seed", "integer", "of the noise", default=0), Parameter("size", "integer", "s", default=1)),
    tensors=(TensorInput("image", "uint8", (-1, -1, 3)), TensorInput("depth", "float32", (-1,))),
)  # fmt: skip
LIMIT_S = 10.0


class StandIn:
    """A broker made of plain messages on a real socket: one client, one session at a time; it answers as `answers` says.

    What that knows nothing of, jobs for example, `more` answers.
    """

    def __init__(self) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.version, self.heartbeat_s, self.limits = "0.1.0", 1.0, {"image_bytes_max": 3 * 64 * 64}
        self.attachment, self.chunks, self.route = 6, 0, b""
        self.session, self.opened = "s", 0
        self.jobs: tuple[JobSpec, ...] = ()
        self.more: Callable[[Any], list[Any]] = lambda _message: []
        self.silent: set[type] = set()
        self.before: Callable[[Any], Any] = lambda _message: None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.RCVHWM, 4)
        self.endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.said: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self.wake, self.waked = socket.socketpair()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        """Answer until `None` is to be said."""
        poller = zmq.Poller()
        poller.register(self.router, zmq.POLLIN)
        poller.register(self.waked.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self.waked.fileno() in ready:
                self.waked.recv(1)
                entry = self.said.get()
                if entry is None:
                    return
                self.send(*entry)
            if self.router in ready:
                route, *frames = self.router.recv_multipart()
                for message in wire.decode(frames, wire.TO_BROKER, wire.Limits()).messages:
                    if isinstance(message, m.ClientHello):
                        self.route = route
                    if route == self.route:  # what was left of an older connection is nobody's
                        self.hear(message)

    def hear(self, message: Any) -> None:
        """Answer, and keep what was said for the test."""
        self.before(message)
        if type(message) not in self.silent:
            for answer in self.answers(message):
                self.send(self.attachment, answer)
        if not isinstance(message, m.Heartbeat):
            self.heard.put(message)

    def answers(self, message: Any) -> list[Any]:
        """What a broker would say; every accepted control becomes a chunk at once."""
        match message:
            case m.ClientHello():
                self.attachment += 1
                return [m.Welcome("me-1", self.version, self.heartbeat_s, 3, self.limits, (SPEC,), self.jobs)]
            case m.Heartbeat():
                return [m.Heartbeat()]
            case m.OpenSession(key=key, chunks=chunks):
                self.chunks, self.opened = chunks, self.opened + 1
                self.session = "s" if self.opened == 1 else f"s{self.opened}"
                return [m.SessionOpened(key, self.session, "token"), m.SessionChanged(self.session, "ready", chunks)]
            case m.SubmitControl(index=int(index), control=control):
                return [m.ControlAccepted(self.session, index), self.chunk(index, m.Applied("explicit", control))]
            case m.SetKeys(keys=keys) if keys.held:
                applied = m.Applied("held", Artifact({"keys": list(keys.held), "reset_pose": False}), keys.revision)
                return [self.chunk(0, applied)]
            case m.Ack(chunks=self.chunks):
                return [m.SessionEnded(self.session, "completed")]
            case m.EndSession(mode=mode):
                return [m.SessionEnded(self.session, "closed" if mode == "drain" else "cancelled")]
            case m.AskStatus(request=request):
                return [m.Status(request, {"workers": 0})]
            case m.AskMetrics(request=request):
                return [m.Metrics(request, self.session, {"chunks": 1})]
        return self.more(message)

    def chunk(self, index: int, applied: m.Applied) -> m.Chunk:
        """A chunk whose frames show its number."""
        frames = tensors.from_array(np.full((2, 4, 4, 3), index, np.uint8))
        outputs = {"frames": Artifact({"codec": "none"}, {"frames": frames})}
        return m.Chunk(self.session, index, outputs, applied, {"pose": [1.0]}, TIMING, index == self.chunks - 1)

    def send(self, attachment: int, message: Any) -> None:
        """Send a message, or bytes as they are."""
        frames = [message] if isinstance(message, bytes) else wire.encode(message, attachment)
        self.router.send_multipart([self.route, *frames])

    def say(self, message: Any) -> None:
        """Have a message sent, from any thread."""
        self.said.put((self.attachment, message))
        self.wake.send(b"x")

    def next(self, kind: type) -> Any:
        """The next message of that kind; others before it are skipped."""
        until = time.monotonic() + LIMIT_S
        while not isinstance(message := self.heard.get(timeout=max(0.01, until - time.monotonic())), kind):
            pass
        return message

    def close(self) -> None:
        """End, and leave nothing behind."""
        self.said.put(None)
        self.wake.send(b"x")
        self.thread.join(LIMIT_S)
        self.wake.close()
        self.waked.close()
        self.router.close(linger=0)
        self.context.term()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A broker made of plain messages."""
    broker = StandIn()
    yield broker
    broker.close()


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], Any]], queue.SimpleQueue[Any]]]:
    """Run something in a thread; what it returned or raised is put into a queue."""
    threads: list[threading.Thread] = []

    def start(work: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put(work())
            except Exception as error:  # noqa: BLE001  # it is the outcome
                outcome.put(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return outcome

    yield start
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
