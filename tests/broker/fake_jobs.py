"""Clients that want jobs and workers that do them, made of plain messages, around a whole broker core."""

from __future__ import annotations

from typing import Any

from reelwire import messages as m
from reelwire.broker.actions import Log, Persist, Send, Stop
from reelwire.broker.config import BrokerConfig
from reelwire.broker.core import BrokerCore
from reelwire.broker.events import Received, Stored, TurnEnded
from reelwire.job_parts import FILE_PART_BYTES, parts_of
from reelwire.job_spec import JobSpec, MediaInput
from reelwire.messages import Failure, Media
from reelwire.spec import Parameter
from reelwire.tensors import Inline, TensorRef, inline_buffer

from .fake_peers import VERSION
from .fake_store import Disk, sha256

PROMPT = Parameter("prompt", "string", "what is to be seen", default="a")
SCALE = Parameter("scale", "number", "guidance", default=1.0)
T2V = JobSpec("t2v", "a video of a text", (PROMPT, SCALE))
V2V = JobSpec("v2v", "a video of a video", (PROMPT,), (MediaInput("video", "video", 1, 1),))
R2V = JobSpec("r2v", "a video of pictures", (PROMPT,), (MediaInput("images", "image", 1, 3),))
KINDS = (T2V, V2V, R2V)
ENDED = ("succeeded", "failed", "cancelled")


class Shop:
    """A broker with its journal and store; each event is followed by a check of all invariants.

    Attributes:
        commits: the journal writes at once.
        works: the store does at once what it is asked for.
        turns: each message is a turn of its own.
        told: what anybody was told, in order.
    """

    def __init__(self, disk: Disk | None = None, now: float = 1000.0, **settings: Any) -> None:
        self.settings = settings
        self.config = BrokerConfig(**settings)
        self.disk = disk or Disk()
        self.now = now
        self.core = BrokerCore(self.config, VERSION, saved=self.disk.saved(), wall_s=1e9)
        self.core._desk.begin(now)
        self.peers: dict[bytes, Any] = {}
        self.logs: list[Log] = []
        self.told: list[Any] = []
        self.commits = self.works = self.turns = True
        self.checks = True
        self._entropy = 0
        self._later: list[Any] = []
        self._busy = False

    @property
    def jobs(self) -> Any:
        """The broker's jobs."""
        return self.core._jobs

    def job(self, name: str) -> Any:
        """One of them, from the inside."""
        return self.jobs._at.jobs[name]

    def handle(self, event: Any) -> None:
        """Let the core handle an event, and do what it wants done."""
        for action in self.core.handle(event):
            match action:
                case Send():
                    peer = self.peers.get(action.route)
                    if peer is not None:
                        peer.hear(action.attachment, action.message)
                case Persist():
                    self.disk.unwritten.append(action)
                case Log():
                    self.logs.append(action)
                case Stop():
                    pass
                case _ if type(action).__name__ != "Forget":
                    self.disk.errands.append(action)  # type: ignore[arg-type]
        if self.checks:
            self.core.check()
        if not self._busy:
            self._busy = True
            try:
                self.settle()
            finally:
                self._busy = False

    def settle(self) -> None:
        """Let everybody do what they do at once."""
        while True:
            if self._later:
                self._later.pop(0)()
            elif self.works and self.disk.errands:
                self.work()
            elif self.commits and self.disk.unwritten:
                self.commit()
            else:
                return

    def later(self, call: Any) -> None:
        """Let a peer answer when the broker is done with what it does."""
        self._later.append(call)

    def say(self, peer: Any, message: Any) -> None:
        """Somebody says something."""
        self._entropy += 1
        entropy = sha256(f"{self.disk.incarnation} {self._entropy}".encode())[:16].encode()
        nbytes = 100 + getattr(getattr(message, "data", None), "nbytes", 0)
        nbytes += sum(len(str(value)) for value in getattr(message, "parameters", {}).values())
        nbytes += sum(len(str(value)) for value in getattr(message, "facts", {}).values())
        self.handle(Received(self.now, peer.route, peer.attachment, message, nbytes, entropy))
        if self.turns:
            self.turn()

    def turn(self) -> None:
        """All that was sent was read."""
        self.handle(TurnEnded(self.now, True))

    def commit(self, count: int = 1 << 30) -> None:
        """Let the journal write."""
        ticket = 0
        while self.disk.unwritten and count:
            ticket = self.disk.write_one()
            count -= 1
        if ticket:
            self.handle(Stored(self.now, ticket))

    def work(self) -> None:
        """Let the store do one thing."""
        event = self.disk.do_one(self.now)
        if event is not None:
            self.handle(event)

    def advance(self, seconds: float) -> None:
        """Let time pass; everybody says so all the while."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + self.config.heartbeat_s, end)
            for peer in list(self.peers.values()):
                if peer.attachment:
                    self.say(peer, m.Heartbeat())
            self.turn()

    def drop(self, peer: Any, reason: str = "") -> None:
        """Somebody leaves."""
        self.say(peer, m.Goodbye(reason))
        peer.attachment = 0
        self.peers.pop(peer.route, None)

    def client(self, name: str = "app") -> Client:
        """An attached client."""
        return Client(self, f"c-{name}".encode(), name).hello()

    def worker(self, name: str = "w", kinds: tuple[JobSpec, ...] = KINDS, **more: Any) -> Worker:
        """An attached worker that is a group of its own."""
        return Worker(self, f"w-{name}".encode(), name, kinds).hello(**more)

    def restart(self, written: int = 0) -> Shop:
        """Kill the broker; the next one, which nobody has found yet. Some of what wasn't written yet may have been."""
        self.disk.crash(written)
        return Shop(self.disk, self.now, **self.settings)

    def counter(self, name: str) -> int:
        """How often something was counted."""
        return self.core._desk.counters[name]


class Peer:
    """One end of the fake wire."""

    def __init__(self, shop: Shop, route: bytes, name: str) -> None:
        self.shop = shop
        self.route = route
        self.name = name
        self.attachment = 0
        self.inbox: list[Any] = []
        shop.peers[route] = self

    def hear(self, attachment: int, message: Any) -> None:
        """Keep what is said."""
        if attachment:
            self.attachment = attachment
        if not isinstance(message, m.Heartbeat | m.Welcome | m.ProbeMemory):
            self.inbox.append(message)
            self.shop.told.append(message)
            self.answer(message)

    def answer(self, message: Any) -> None:
        """Do what is done at once."""

    def say(self, message: Any) -> None:
        """Tell the broker something."""
        self.shop.say(self, message)

    def reply(self, message: Any) -> None:
        """Tell the broker something when it is done with what it does, if it is still there."""

        def tell() -> None:
            if self.attachment:
                self.say(message)

        self.shop.later(tell)

    def heard(self, kind: type) -> list[Any]:
        """All messages of a kind."""
        return [message for message in self.inbox if isinstance(message, kind)]

    def take(self, kind: type) -> list[Any]:
        """All messages of a kind, which are forgotten."""
        found = self.heard(kind)
        self.inbox = [message for message in self.inbox if not isinstance(message, kind)]
        return found


class Client(Peer):
    """Who wants jobs."""

    def __init__(self, shop: Shop, route: bytes, name: str) -> None:
        super().__init__(shop, route, name)
        self.uploads: dict[str, bytes] = {}
        self.sent: dict[str, int] = {}
        self.parts: dict[int, list[bytes]] = {}
        self._calls = 0

    def hello(self) -> Client:
        """Attach."""
        self.say(m.ClientHello(VERSION, self.name))
        assert self.attachment
        return self

    def call(self) -> int:
        """A new number."""
        self._calls += 1
        return self._calls

    def submit(self, key: str = "k", kind: str = "t2v", **more: Any) -> Any:
        """Ask for a job; the answer, if there was one."""
        before = len(self.inbox)
        self.say(m.SubmitJob(key, kind, **more))
        answers = [each for each in self.inbox[before:] if isinstance(each, m.JobAccepted | m.JobRefused)]
        return answers[-1] if answers else None

    def accepted(self, key: str = "k", kind: str = "t2v", **more: Any) -> str:
        """Ask for a job that is accepted; its id."""
        answer = self.submit(key, kind, **more)
        assert isinstance(answer, m.JobAccepted), answer
        return answer.job.job

    def refused(self, key: str = "k", kind: str = "t2v", **more: Any) -> Failure:
        """Ask for a job that is refused; why."""
        answer = self.submit(key, kind, **more)
        assert isinstance(answer, m.JobRefused), answer
        assert answer.key == key
        return answer.failure

    def ask(self, message: type, job: str = "", **more: Any) -> Any:
        """Ask a question that is numbered; the answer, if there was one."""
        before, request = len(self.inbox), self.call()
        self.say(message(request=request, job=job, **more))
        answers = [each for each in self.inbox[before:] if getattr(each, "request", 0) == request]
        return answers[-1] if answers else None

    def info(self, job: str) -> m.JobInfo:
        """Where a job stands."""
        answer = self.ask(m.AskJobs, job)
        assert isinstance(answer, m.Jobs), answer
        return answer.jobs[0]

    def upload(self, data: bytes, name: str = "u", field: str = "video", file: str = "") -> Media:
        """Send a file, as far as it is granted."""
        self.uploads[name] = data
        self.sent[name] = 0
        self.say(m.BeginUpload(name, field, len(data), file or sha256(data)))
        return Media(sha256=file or sha256(data))

    def fetch(self, job: str) -> bytes:
        """Fetch a result, in windows of two parts."""
        info, request = self.info(job), self.call()
        self.parts[request] = []
        for below in range(2, parts_of(info.result_bytes) + 2, 2):
            self.say(m.FetchResult(request, job, 0, below))
        self.say(m.FetchResult(request, job, parts_of(info.result_bytes), 0))
        return b"".join(self.parts[request])

    def answer(self, message: Any) -> None:
        """Send the parts that are granted; keep those that come."""
        match message:
            case m.UploadGrant(upload=name, parts=parts):
                data = self.uploads.get(name, b"")
                while self.sent.get(name, parts) < parts:
                    index = self.sent[name]
                    self.sent[name] += 1
                    self.shop.later(lambda index=index: self.part(name, index, data))
            case m.ResultPart() if message.request in self.parts:
                assert message.index == len(self.parts[message.request])
                self.parts[message.request].append(bytes(inline_buffer(message.data)))

    def part(self, name: str, index: int, data: bytes) -> None:
        """Send one part of an upload."""
        if self.attachment:
            part = data[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]
            self.say(m.UploadPart(name, index, TensorRef("uint8", (len(part),), Inline(part))))


class Worker(Peer):
    """Who does jobs: rank 0 of a group of one, or of more ranks with `place`."""

    def __init__(self, shop: Shop, route: bytes, name: str, kinds: tuple[JobSpec, ...]) -> None:
        super().__init__(shop, route, name)
        self.kinds = kinds
        self.files: dict[str, bytes] = {}
        self.epoch = 0
        self.gives = True

    def hello(self, **more: Any) -> Worker:
        """Attach, with its weights."""
        place = m.Membership(f"g-{self.name}", 0, 1, epoch=self.epoch, machine="host", pid=1)
        self.say(m.WorkerHello(VERSION, self.name, "cpu", (), (), group=place, jobs=self.kinds, **more))
        assert self.attachment
        return self

    @property
    def group(self) -> Any:
        """The broker's view of its group."""
        return self.shop.core._groups.by_name[f"g-{self.name}"]

    @property
    def runs(self) -> list[m.RunJob]:
        """The jobs that it was told to do."""
        return self.heard(m.RunJob)

    def answer(self, message: Any) -> None:
        """Form the group; give files that are wanted."""
        match message:
            case m.LeadGroup(epoch=epoch):
                self.epoch = epoch
                self.reply(m.GroupFormed(epoch))
            case m.WantFile() if self.gives:
                self.give(message)
            case m.EndGroup():
                self.attachment = self.epoch = 0

    def give(self, want: m.WantFile) -> None:
        """Send parts of a file, as they are wanted."""
        for index in range(want.first, want.parts):
            self.shop.later(lambda index=index: self.part(want.file, index))

    def part(self, file: str, index: int) -> None:
        """Send one part of a file."""
        if not self.attachment:
            return
        part = self.files[file][index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]
        self.say(m.FilePart(file, index, TensorRef("uint8", (len(part),), Inline(part))))

    def offer(self, data: bytes) -> m.FileOffer:
        """Have a file."""
        self.files[sha256(data)] = data
        return m.FileOffer(sha256(data), f"/worker/{sha256(data)}", len(data))

    def progress(self, run: m.RunJob, step: int, steps: int = 10, state: Any = "running", **more: Any) -> None:
        """Say where a job stands."""
        self.say(m.JobProgress(run.job, run.attempt, state, "denoise", step, steps, **more))

    def checkpoint(self, run: m.RunJob, step: int, data: bytes = b"") -> None:
        """A checkpoint is there."""
        self.say(m.JobFile(run.job, run.attempt, "checkpoint", self.offer(data or f"at {step}".encode()), step))

    def finish(self, run: m.RunJob, data: bytes = b"result", **facts: Any) -> None:
        """The result is there."""
        self.say(m.JobFile(run.job, run.attempt, "result", self.offer(data), facts=facts))

    def fail(self, run: m.RunJob, reason: str = "it broke", state: Any = "failed") -> None:
        """It has ended otherwise."""
        failure = Failure("stage", reason) if state == "failed" else None
        self.say(m.JobEnded(run.job, run.attempt, state, failure))
