"""Clients and workers made of plain messages, on a fake wire, and the dataflow that they ask for and serve."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from reelwire import messages as m
from reelwire.binding import bind
from reelwire.broker.events import Received
from reelwire.controls import Keys, KeyState
from reelwire.messages import Artifact, Failure
from reelwire.spec import Edge, Parameter, Prefetch, StageSpec, StreamSpec, TensorInput
from reelwire.tensors import Inline, TensorRef

if TYPE_CHECKING:
    from .conftest import Rig

VERSION = "0.1.0"
PLENTY = m.Credit(1 << 40, 1 << 60)
EDGES = ("encode_request", "condition", "control", "latent", "frames")


def world(**changes: Any) -> StreamSpec:
    """The dataflow of the world model; `capacities` maps artifacts to their edges' capacity."""
    capacities: Mapping[str, int] = changes.pop("capacities", {})
    depth: int = changes.pop("depth", 2)
    spec = StreamSpec(
        name="world",
        stages=(
            StageSpec("encode", ("encode_request",), ("condition",), request_tensors=("image",)),
            StageSpec("denoise", ("condition", "control"), ("latent",)),
            StageSpec("decode", ("latent",), ("frames",)),
        ),
        edges=tuple(Edge(name, capacities.get(name, 2)) for name in EDGES),
        external_inputs=("encode_request", "control"),
        outputs=("frames",),
        initialize_order=("encode", "decode", "denoise"),
        control="control",
        chunks_max=100,
        frames_first=9,
        frames_next=12,
        fps=16.0,
        prefetch=Prefetch("encode_request", depth=depth, follows="control", refill_after="denoise"),
        latency_anchor="control",
        frame_stride=4,
        control_names=("w", "a", "s", "d"),
        control_aliases={"up": "w"},
        control_tensors=(TensorInput("poses", "float", (-1, 4, 4), required=True),),
        parameters=(Parameter("seed", "integer", "seed", default=0),),
        tensors=(TensorInput("image", "uint8", (-1, -1, 3)),),
    )
    return dataclasses.replace(spec, **changes)


def image(*shape: int) -> TensorRef:
    """A picture of zeros."""
    size = shape or (2, 2, 3)
    nbytes = 1
    for side in size:
        nbytes *= side
    return TensorRef("uint8", size, Inline(bytes(nbytes)))


def keys_of(*names: str, reset_pose: bool = False) -> Artifact:
    """A control made of keys."""
    keys: list[Any] = sorted(names)
    return Artifact({"keys": keys, "reset_pose": reset_pose})


class Peer:
    """One end of the fake wire; `inbox` holds everything it was sent. `maps`: it can open others' shared memory."""

    def __init__(self, rig: Rig, route: bytes, *, maps: bool = True) -> None:
        self.rig = rig
        self.route = route
        self.maps = maps
        self.attachment = 0
        self.inbox: list[Any] = []
        self.silent: set[type] = set()
        self.acked: dict[str, int] = {}

    def say(self, message: Any, *, attachment: int | None = None, nbytes: int = 100) -> None:
        """Send a message to the broker."""
        number = self.attachment if attachment is None else attachment
        rig = self.rig
        rig.handle(Received(rig.now, self.route, number, message, nbytes, rig.entropy()))

    def hear(self, attachment: int, message: Any) -> None:
        """Take a message of the broker in."""
        if isinstance(message, m.Welcome):
            self.attachment = attachment
        self.inbox.append(message)
        if isinstance(message, m.ProbeMemory) and type(message) not in self.silent:
            probe = self.rig.memory.probe(message.owner) if self.maps else b""
            self.rig.later(lambda: self.say(m.MemoryProbed(message.owner, probe)))

    def heard(self, kind: type) -> list[Any]:
        """What was said of that kind, oldest first."""
        return [message for message in self.inbox if isinstance(message, kind)]

    def last(self, kind: type) -> Any:
        """The newest of that kind."""
        return self.heard(kind)[-1]


class Client(Peer):
    """An application."""

    def hello(self, version: str = VERSION, name: str = "app", limits: Mapping[str, int] | None = None) -> Client:
        """Attach."""
        self.say(m.ClientHello(version, name, limits or {}), attachment=0)
        return self

    def open(self, key: str = "k", chunks: int = 5, pipeline: str = "world", **more: Any) -> str:
        """Ask for a session; its id, or an empty text when it was refused."""
        asked = {"control_binding": "early", "credit": PLENTY, **more}
        self.say(m.OpenSession(key, pipeline, chunks, **asked))
        answers = [x for x in self.inbox if isinstance(x, m.SessionOpened | m.SessionRefused) and x.key == key]
        return answers[-1].session if isinstance(answers[-1], m.SessionOpened) else ""

    def submit(self, session: str, index: int | None, control: Artifact | None = None) -> Any:
        """Give a control; the answer, if there is one at once."""
        before = len(self.inbox)
        self.say(m.SubmitControl(session, index, keys_of("w") if control is None else control))
        answers = [x for x in self.inbox[before:] if isinstance(x, m.ControlAccepted | m.ControlRefused)]
        return answers[0] if answers else None

    def keys(self, session: str, keys: Keys) -> None:
        """Send the register."""
        self.say(m.SetKeys(session, keys.state))

    def hear(self, attachment: int, message: Any) -> None:
        """Chunks are read until they are acknowledged; one that was before it came isn't."""
        super().hear(attachment, message)
        if isinstance(message, m.Chunk) and message.index >= self.acked.get(message.session, 0):
            self.rig.memory.read((self.attachment, message.session, "", message.index), message.outputs)

    def ack(self, session: str, chunks: int, credit: m.Credit | None = None) -> None:
        """Say that all chunks below were taken."""
        self.acked[session] = max(chunks, self.acked.get(session, 0))
        for index in range(min(chunks, len(self.chunks(session)))):
            self.rig.memory.has_read((self.attachment, session, "", index))
        self.say(m.Ack(session, chunks, PLENTY if credit is None else credit))

    def end(self, session: str, mode: m.EndMode = "drain") -> None:
        """Ask for the end."""
        self.say(m.EndSession(session, mode))

    def chunks(self, session: str) -> list[m.Chunk]:
        """Chunks that arrived."""
        return [chunk for chunk in self.heard(m.Chunk) if chunk.session == session]

    def ended(self, session: str) -> m.SessionEnded | None:
        """How it ended."""
        return next((x for x in self.heard(m.SessionEnded) if x.session == session), None)

    def state(self, session: str) -> tuple[str, int]:
        """State and grant that it was told last."""
        said = [x for x in self.inbox if isinstance(x, m.SessionChanged | m.Chunk) and x.session == session]
        states = [x.state for x in said if isinstance(x, m.SessionChanged)]
        return (states[-1], said[-1].control_limit) if states else ("opening", 0)


class Worker(Peer):
    """A worker that initializes and releases at once, and runs tasks when the test says so.

    `jobs` holds per stage what it has and didn't finish, oldest first; the first one has started. A reservation is bound
    when it starts, to the newest register that is in `keys`; `bound` holds to what. Tasks in `ahead` await what another
    stage is to make here; what was `forwarded` lately is there for those that come too late for it.
    """

    def __init__(self, rig: Rig, route: bytes, name: str, *, maps: bool = True) -> None:
        super().__init__(rig, route, maps=maps)
        self.name = name
        self.jobs: dict[str, deque[m.RunTask]] = {}
        self.starts = True
        self.memory: Any = None
        self.keys: dict[str, KeyState] = {}
        self.bound: dict[tuple[str, int], m.Applied] = {}
        self.ahead: list[m.RunTask] = []
        self.forwarded: dict[tuple[str, str, int], Artifact] = {}

    def hello(self, spec: StreamSpec | None = None, **more: Any) -> Worker:
        """Attach and load the weights at once."""
        spec = world() if spec is None else spec
        stages = more.get("stages", [stage.name for stage in spec.stages])
        slots, mailbox = more.get("slots", 8), more.get("mailbox", 1)
        nbytes, grouped = more.get("bytes_max", 1000), more.get("grouped", ())
        offers = tuple(m.StageOffer(spec.name, name, slots, nbytes, mailbox, name in grouped) for name in stages)
        self.jobs = {name: deque() for name in stages}
        version = more.get("version", VERSION)
        limits = more.get("limits", {})
        memory = None
        if more.get("memory"):
            self.memory = self.rig.memory.add(self.name)
            memory = self.memory.offer
        packages, forwards = {"numpy": "2"}, more.get("forwards", False)
        group = {name: more[name] for name in ("group", "jobs", "held") if name in more}
        hello = m.WorkerHello(version, self.name, "cpu", (spec,), offers, packages, limits, memory, forwards, **group)
        self.say(hello, attachment=0)
        if more.get("ready", True) and self.attachment:
            for name in stages:
                self.say(m.StageReady(spec.name, name, more.get("session_bytes", 10)))
        return self

    def hear(self, attachment: int, message: Any) -> None:
        """Answer what needs no decision."""
        super().hear(attachment, message)
        if type(message) in self.silent:
            return
        match message:
            case m.InitializeStage():
                self.rig.later(lambda: self.initialized(message))
            case m.ReleaseStage():
                jobs = self.jobs[message.stage]
                kept = [job for i, job in enumerate(jobs) if job.session != message.session or i == 0]
                self.jobs[message.stage] = deque(kept)
                at = (message.session, message.stage)
                self.ahead = [task for task in self.ahead if (task.session, task.stage) != at]
                self.rig.later(lambda: self.released(message))
            case m.SetStageKeys():
                self.keys[message.session] = message.keys
            case m.ReturnSegments() if self.memory is not None:
                for use in message.segments:
                    self.memory.give_back(use)
            case m.RunTask():
                self.ahead.append(message)
                self.forward()

    def forward(self) -> None:
        """Take the tasks in whose inputs are there."""
        ahead, self.ahead = self.ahead, []
        for task in ahead:
            places = {name: (task.session, name, task.index) for name in task.awaits}
            if any(place not in self.forwarded for place in places.values()):
                self.ahead.append(task)
                continue
            made = {name: self.forwarded[place] for name, place in places.items()}
            self.rig.memory.read(self.reader(task), {**task.inputs, **made})
            self.jobs[task.stage].append(task)
            if len(self.jobs[task.stage]) == 1:
                self.rig.later(partial(self.started, task))

    def initialized(self, x: m.InitializeStage, handed: Artifact | None = None, cache_bytes: int = 20) -> None:
        """Say that a stage has its caches."""
        made = Artifact({x.stage: "made"}) if handed is None else handed
        self.say(m.StageInitialized(x.session, x.stage, x.epoch, x.stage_epoch, made, cache_bytes))

    def released(self, x: m.ReleaseStage) -> None:
        """Say that a stage dropped its caches; what it still ran is over before that."""
        jobs = self.jobs[x.stage]
        if jobs and jobs[0].session == x.session:
            self.finish(x.stage)
        self.rig.memory.has_read((self.attachment, x.session, x.stage))
        self.say(m.StageReleased(x.session, x.stage, x.epoch, x.stage_epoch))

    def started(self, x: m.RunTask) -> None:
        """Say that a task began, and what its reservation is bound to."""
        applied = self.applied(x)
        if self.starts:
            self.say(m.TaskStarted(x.session, x.stage, x.epoch, x.stage_epoch, x.index, applied))

    def applied(self, x: m.RunTask) -> m.Applied | None:
        """What a task's reservation was bound to, or is now."""
        if x.reservation is None:
            return None
        at = (x.session, x.index)
        if at not in self.bound:
            self.bound[at] = bind(x.reservation, self.keys.get(x.session, KeyState()))
        return self.bound[at]

    def finish(self, stage: str, **more: Any) -> m.RunTask:
        """Finish the running task of a stage; the next one starts."""
        task = self.jobs[stage].popleft()
        produces = world().stage(stage).produces if stage in ("encode", "denoise", "decode") else (stage + "_out",)
        outputs = more["outputs"] if "outputs" in more else {name: self.made(task, name) for name in produces}
        self.rig.memory.has_read(self.reader(task))
        facts = more.get("facts", {stage: task.index})
        applied, constant = more.get("applied", self.applied(task)), more.get("constant", False)
        if "outputs" not in more:  # what the broker sends when it knows of it comes after what awaits it
            self.forwarded.update(((task.session, name, task.index), made) for name, made in outputs.items())
            self.forward()
        self.say(done(task, outputs, facts, applied=applied, constant=constant))
        if "outputs" in more:  # what a test makes up may be wrong
            self._forget(task)
            self.forwarded.update(((task.session, name, task.index), made) for name, made in outputs.items())
        self._next(stage)
        self.forward()
        return task

    def made(self, task: m.RunTask, name: str) -> Artifact:
        """What a task makes, in shared memory where all its readers can open that."""
        text = f"{task.session}/{name}/{task.index}"
        return Artifact({"from": text}, {"t": self.memory.take(text)} if name in task.shared else {})

    def reader(self, task: m.RunTask) -> tuple[Any, ...]:
        """Who reads the inputs of a task."""
        return (self.attachment, task.session, task.stage, task.index)

    def fail(self, stage: str, message: str = "it broke") -> m.RunTask:
        """Let the running task of a stage raise."""
        task = self.jobs[stage].popleft()
        self.rig.memory.has_read(self.reader(task))
        self._forget(task)
        failure = Failure("stage", message)
        self.say(m.StageFailed(task.session, stage, task.epoch, task.stage_epoch, "run", task.index, failure))
        self._next(stage)
        return task

    def make(self, *stages: str) -> None:
        """Finish the oldest task of each."""
        for stage in stages:
            self.finish(stage)

    def released_stages(self) -> list[str]:
        """Stages that it was told to release, in order."""
        return [message.stage for message in self.heard(m.ReleaseStage)]

    def _forget(self, task: m.RunTask) -> None:
        """Nothing comes of what awaits a task's outputs."""
        self.ahead = [each for each in self.ahead if each.session != task.session or each.index < task.index]

    def _next(self, stage: str) -> None:
        if self.jobs[stage]:
            self.started(self.jobs[stage][0])


def done(task: m.RunTask, outputs: Mapping[str, Artifact], facts: Mapping[str, Any], **more: Any) -> m.TaskDone:
    """The result of a task."""
    at = (task.session, task.stage, task.epoch, task.stage_epoch)
    return m.TaskDone(*at, task.index, outputs, facts, 0.01, **more)
