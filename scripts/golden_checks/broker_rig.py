"""A broker core with one client and one worker made of messages; the worker's tasks end when the trace says so."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from reelwire import messages as m
from reelwire.broker.actions import Send
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.broker.events import Received, TurnEnded
from reelwire.messages import Artifact, Failure
from reelwire.spec import Edge, Prefetch, StageSpec, StreamSpec, TensorInput, validate

VERSION = "0.1"
CLIENT, WORKER = b"client", b"worker"
STAGES = ("encode", "denoise", "decode")
FAR_S = 1e6


def world(
    capacities: dict[str, int], depth: int, chunks_max: int, keys: tuple[str, ...], aliases: dict[str, str]
) -> StreamSpec:
    """The world model's dataflow with other bounds; ``output`` is the capacity of the frames' edge."""
    edges = {"frames" if name == "output" else name: capacity for name, capacity in capacities.items()}
    return StreamSpec(
        name="world",
        stages=(
            StageSpec("encode", ("encode_request",), ("condition",)),
            StageSpec("denoise", ("condition", "control"), ("latent",)),
            StageSpec("decode", ("latent",), ("frames",)),
        ),
        edges=tuple(Edge(name, capacity) for name, capacity in edges.items()),
        external_inputs=("encode_request", "control"),
        outputs=("frames",),
        initialize_order=("encode", "decode", "denoise"),
        control="control",
        chunks_max=chunks_max,
        frames_first=9,
        frames_next=12,
        fps=16.0,
        prefetch=Prefetch("encode_request", depth=depth, follows="control", refill_after="denoise"),
        latency_anchor="control",
        control_names=keys,
        control_aliases=aliases,
        control_tensors=(TensorInput("poses", "float", (-1, 4, 4), required=True),),
    )


@dataclass(slots=True)
class BrokerRig:
    """The broker and what was said. The worker answers initializations and releases at once.

    Attributes:
        running: stage to the task that its actor runs.
        heard: what the client was sent.
    """

    spec: StreamSpec
    now: float = 0.0
    running: dict[str, m.RunTask] = field(default_factory=dict)
    heard: list[m.FromBroker] = field(default_factory=list)
    core: BrokerCore = field(init=False)
    attachments: dict[bytes, int] = field(default_factory=lambda: {CLIENT: 0, WORKER: 0})
    _inbox: deque[m.FromBroker] = field(default_factory=deque)
    _releasing: list[m.ReleaseStage] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Attach both."""
        # Traces have edges that a broker wouldn't register; the session core plays them all the same.
        config = BrokerConfig(heartbeat_s=FAR_S, control_idle_s=FAR_S, stall_s=FAR_S, close_timeout_s=FAR_S)
        self.core = BrokerCore(config, VERSION, validate)
        offers = tuple(m.StageOffer("world", stage, 64, 0, mailbox=0) for stage in STAGES)
        self.say(WORKER, m.WorkerHello(VERSION, "worker", "cpu", (self.spec,), offers))
        for stage in STAGES:
            self.say(WORKER, m.StageReady("world", stage, 0))
        self.say(CLIENT, m.ClientHello(VERSION))

    def say(self, route: bytes, message: Any, attachment: int | None = None) -> list[m.FromBroker]:
        """Send a message and let everything follow that follows at once; what the client was told."""
        before = len(self.heard)
        number = self.attachments[route] if attachment is None else attachment
        self._handle(Received(self.now, route, number, message, 0, b"entropy"))
        while self._inbox:
            self._serve(self._inbox.popleft())
        return self.heard[before:]

    def turn(self) -> None:
        """The end of a turn of the loop."""
        self._handle(TurnEnded(self.now, drained=True))
        while self._inbox:
            self._serve(self._inbox.popleft())

    def open(self, key: str, chunks: int) -> str:
        """A session that is ready, bound early and never short of credit, as the recorded ones are."""
        credit = m.Credit(chunks, 1 << 40)
        told = self.say(CLIENT, m.OpenSession(key, "world", chunks, control_binding="early", credit=credit))
        return next(message.session for message in told if isinstance(message, m.SessionOpened))

    def finish(self, stage: str) -> None:
        """The stage's task ends."""
        task = self.running.pop(stage)
        outputs = {name: Artifact() for name in self.spec.stage(stage).produces}
        self.say(WORKER, m.TaskDone(task.session, stage, task.epoch, task.stage_epoch, task.index, outputs, {}, 0.0))
        self._release(stage)

    def fail(self, stage: str) -> None:
        """The stage's task raises."""
        task = self.running.pop(stage)
        at = (task.session, stage, task.epoch, task.stage_epoch)
        self.say(WORKER, m.StageFailed(*at, "run", task.index, Failure("stage", "as recorded")))
        self._release(stage)

    def _release(self, stage: str) -> None:
        """Answer releases, but not those of a session that the stage is still at work for."""
        task = self.running.get(stage)
        for message in [each for each in self._releasing if each.stage == stage]:
            if task is None or task.session != message.session:
                self._releasing.remove(message)
                self.say(WORKER, m.StageReleased(message.session, stage, message.epoch, message.stage_epoch))

    def _handle(self, event: Received | TurnEnded) -> None:
        for action in self.core.handle(event):
            if isinstance(action, Send):
                if isinstance(action.message, m.Welcome):
                    self.attachments[action.route] = action.attachment
                elif action.route == CLIENT:
                    self.heard.append(action.message)
                else:
                    self._inbox.append(action.message)
        self.core.check()

    def _serve(self, message: m.FromBroker) -> None:
        match message:
            case m.InitializeStage():
                at = (message.session, message.stage, message.epoch, message.stage_epoch)
                self.say(WORKER, m.StageInitialized(*at, Artifact(), 0))
            case m.ReleaseStage():
                self._releasing.append(message)
                self._release(message.stage)
            case m.RunTask():
                self.running[message.stage] = message
                at = (message.session, message.stage, message.epoch, message.stage_epoch)
                self.say(WORKER, m.TaskStarted(*at, message.index))
            case _:
                pass
