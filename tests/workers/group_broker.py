"""A broker as far as a worker group can tell: it forms it, asks for sessions and jobs, and takes what comes back.

It keeps what a journal would keep over its own end: the jobs. Everything else it forgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from reelwire import messages as m
from reelwire.controls import KeyState
from reelwire.job_parts import FILE_PART_BYTES, FileOffer
from reelwire.messages import LeadGroup, Member
from reelwire.tensors import Inline, Shared, TensorRef

if TYPE_CHECKING:
    from .group_world import GroupWorld

SESSIONS, CHUNKS, JOBS = 4, 3, 3
SHIFT = 32


@dataclass
class Film:
    """One session, as the broker knows it."""

    name: str
    state: str = "new"
    sent: int = 0
    done: int = 0
    waiting: set[str] = field(default_factory=set)
    outcome: str = ""
    keys: int = 0


@dataclass
class Work:
    """One job, as the journal knows it: `state` queued, running or an end."""

    name: str
    parameters: dict[str, Any]
    media: tuple[FileOffer, ...]
    state: str = "queued"
    attempt: int = 0
    checkpoint: FileOffer | None = None
    checkpoint_step: int = -1
    is_cancelled: bool = False
    result: int = 0
    taking: dict[str, tuple[m.JobFile, int]] = field(default_factory=dict)


class Broker:
    """All of it, one incarnation after the other."""

    def __init__(self, world: GroupWorld) -> None:
        self.world = world
        self.jobs: list[Work] = []
        self.films = [Film(f"s{number}") for number in range(SESSIONS)]
        self.incarnation = 0
        self.numbers = 0
        self.draining: set[int] = set()  # attachments
        self.raised = 0
        chance = world.chance
        for number in range(JOBS):
            steps = chance.randint(1, 8)
            parameters = {"steps": steps, "switch": chance.randint(0, steps), "fails": chance.random() < 0.1}
            parameters["meets"] = chance.random() < 0.7
            files = [f"in-{number}-{each}" for each in range(chance.randint(0, 2))]
            offers = tuple(FileOffer(name, "", chance.randint(1, 7) * FILE_PART_BYTES) for name in files)
            self.jobs.append(Work(f"j{number}", parameters, offers))
        self.begin()

    def begin(self) -> None:
        """A new process, with the journal of the one before."""
        self.incarnation += 1
        self.attached: dict[int, tuple[int, m.WorkerHello]] = {}
        self.epoch = self.sequence = 0
        self.state = "gathering"
        self.ready: set[str] = set()
        self.rejoining = {job.name for job in self.jobs if job.state == "running"}
        self.lose_sessions()
        for job in self.jobs:
            job.taking.clear()

    @property
    def is_over(self) -> bool:
        """Whether all that was asked for is answered."""
        return all(film.outcome for film in self.films) and all(
            job.state in ("succeeded", "failed", "cancelled") for job in self.jobs
        )

    @property
    def is_draining(self) -> bool:
        """Whether a rank that is attached was asked to stop."""
        return any(number in self.draining for number, _ in self.attached.values())

    # --- what leaves -------------------------------------------------------------------------------------------------

    def say(self, rank: int, message: Any) -> None:
        """To one rank."""
        self.world.deliver(rank, self.attached[rank][0], message)

    def fan_out(self, body: Any) -> None:
        """To all, with the next number."""
        self.sequence += 1
        numbered = replace(body, sequence=self.sequence)
        for rank in self.attached:
            self.say(rank, numbered)

    # --- the group -----------------------------------------------------------------------------------------------------

    def hello(self, rank: int, hello: m.WorkerHello) -> None:
        """A rank comes; its old attachment is gone with that."""
        if rank in self.attached:
            self.lose(rank, "another one came")
        place = hello.group
        assert place is not None
        self.numbers += 1
        self.attached[rank] = self.numbers, hello
        self.say(rank, m.Welcome("w", self.world.version, 1.0, 3, {}))
        epoch = place.epoch
        others = {each: said for each, (_, said) in self.attached.items() if each != rank}
        is_void = epoch >> SHIFT == self.incarnation and self.world.size > 1
        if self.state != "gathering" or is_void:
            self.dismiss(rank, "not in this epoch")
            return
        gathered = {said.group.epoch for said in others.values() if said.group}
        if gathered and gathered != {epoch}:
            leaving = [rank] if epoch and (0 in gathered or max(gathered) > epoch) else list(others)
            for each in leaving:
                self.dismiss(each, "mixed epochs")
        self.gather()

    def gather(self) -> None:
        """All are there: adopt them, or have them meet."""
        if len(self.attached) < self.world.size:
            return
        places = [hello.group for _, hello in self.attached.values() if hello.group]
        if places[0].epoch:
            self.epoch, self.sequence = places[0].epoch, max(place.sequence for place in places)
            self.formed()
            self.adopt(self.attached[0][1].held)
            return
        self.raised += 1
        self.state, self.epoch, self.sequence = "opening", self.incarnation << SHIFT | self.raised, 0
        members = self.members()
        self.say(0, LeadGroup(self.epoch, b"secret", members))

    def members(self) -> tuple[Member, ...]:
        """As the ranks are told of each other."""
        places = {rank: hello.group for rank, (_, hello) in self.attached.items()}
        return tuple(Member(rank, "here", place.pid) for rank, place in sorted(places.items()) if place)

    def formed(self) -> None:
        """It takes work."""
        self.state = "formed"

    def adopt(self, held: tuple[m.HeldJob, ...]) -> None:
        """A leader comes with jobs."""
        for each in held:
            job = next(job for job in self.jobs if job.name == each.job)
            if job.state == "running" and job.attempt == each.attempt:
                self.rejoining.discard(job.name)
                if job.is_cancelled and not each.ended:
                    self.say(0, m.StopJob(job.name, job.attempt))
            else:
                self.say(0, m.StopJob(each.job, each.attempt))
                self.say(0, m.ForgetJob(each.job, each.attempt))
        for job in self.jobs:
            if job.name in self.rejoining:
                self.requeue(job)

    def requeue(self, job: Work) -> None:
        """Its attempt is lost."""
        self.rejoining.discard(job.name)
        job.taking.clear()
        job.state = "cancelled" if job.is_cancelled else "queued"

    def lose(self, rank: int, reason: str) -> None:
        """A rank is gone."""
        if rank not in self.attached:
            return
        del self.attached[rank]
        if self.state != "gathering":
            self.end((rank,), reason)

    def end(self, lost: tuple[int, ...], reason: str) -> None:
        """The epoch is over."""
        epoch, self.state = self.epoch, "gathering"
        self.ready.clear()
        for each in list(self.attached):
            self.say(each, m.EndGroup(epoch, lost, reason))
            del self.attached[each]
        self.lose_sessions()
        for job in self.jobs:
            if job.state == "running" and job.name not in self.rejoining:
                self.requeue(job)

    def dismiss(self, rank: int, reason: str) -> None:
        """A rank isn't wanted as it is."""
        _, hello = self.attached[rank]
        assert hello.group is not None
        self.say(rank, m.EndGroup(hello.group.epoch, (), reason))
        del self.attached[rank]

    def lose_sessions(self) -> None:
        """Those that are on their way have failed."""
        for film in self.films:
            if film.state not in ("new", "over"):
                film.state, film.outcome = "over", film.outcome or "lost"

    # --- what comes ------------------------------------------------------------------------------------------------------

    def hear(self, rank: int, attachment: int, message: Any) -> None:
        """A worker says something."""
        if isinstance(message, m.WorkerHello):
            self.hello(rank, message)
            return
        if rank not in self.attached or self.attached[rank][0] != attachment:
            return
        match message:
            case m.Draining():
                self.draining.add(attachment)
            case m.Goodbye():
                self.lose(rank, "it has left")
            case m.RanksLost():
                if message.epoch == self.epoch and self.state != "gathering":
                    self.end(message.ranks, message.reason)
            case m.GroupOpened() if message.epoch == self.epoch and self.state == "opening":
                self.state = "forming"
                members = self.members()
                for each in self.attached:
                    if each:
                        self.say(each, m.JoinGroup(self.epoch, b"secret", members, message.link, message.store))
            case m.GroupFormed() if message.epoch == self.epoch and self.state in ("opening", "forming"):
                self.formed()
                for job in self.jobs:  # of a broker before, and nobody brought them
                    if job.name in self.rejoining:
                        self.requeue(job)
            case m.StageReady():
                self.ready.add(message.stage)
            case m.JobProgress() | m.JobFile() | m.JobEnded() if self.state == "formed":
                self.hear_of_job(message)
            case m.FilePart():
                self.take_part(message)
            case m.WantFile():
                for index in range(message.first, message.parts):
                    self.say(rank, m.FilePart(message.file, index, TensorRef("uint8", (1,), Inline(b"x"))))
            case m.StageInitialized() | m.StageReleased() | m.StageFailed() | m.TaskDone():
                self.hear_of_session(message)
            case _:
                pass

    # --- jobs --------------------------------------------------------------------------------------------------------------

    def hear_of_job(self, message: m.JobProgress | m.JobFile | m.JobEnded) -> None:
        """Of attempts that aren't wanted nobody wants to hear again."""
        job = next(job for job in self.jobs if job.name == message.job)
        if job.state != "running" or job.attempt != message.attempt or job.name in self.rejoining:
            if not isinstance(message, m.JobProgress):
                self.say(0, m.ForgetJob(message.job, message.attempt))
            return
        match message:
            case m.JobEnded():
                self.world.check_end(job, message)
                job.state = message.state
                self.say(0, m.ForgetJob(job.name, job.attempt))
            case m.JobFile() if message.offer.file not in job.taking:
                if self.world.chance.random() < 0.5:  # its path can be read from here
                    self.taken(job, message)
                else:
                    job.taking[message.offer.file] = message, 0
                    self.say(0, m.WantFile(message.offer.file, 0, min(2, message.offer.parts)))
            case _:
                pass

    def take_part(self, part: m.FilePart) -> None:
        """A part of a checkpoint or a result."""
        for job in self.jobs:
            if part.file in job.taking:
                offer, came = job.taking[part.file]
                assert part.index == came, "parts out of order"
                job.taking[part.file] = offer, came + 1
                if came + 1 == offer.offer.parts:
                    self.taken(job, offer)
                elif (came + 1) % 2 == 0:
                    until = min(came + 3, offer.offer.parts)
                    self.say(0, m.WantFile(part.file, came + 1, until))

    def taken(self, job: Work, message: m.JobFile) -> None:
        """A file is here, and the journal knows."""
        job.taking.pop(message.offer.file, None)
        content = self.world.content_of(message.offer.file)
        if message.role == "checkpoint":
            assert content[0] == message.step >= job.checkpoint_step, "another state than it says, or an older one"
            job.checkpoint, job.checkpoint_step = FileOffer(message.offer.file, "", 3 * FILE_PART_BYTES), message.step
            self.say(0, m.CheckpointKept(job.name, job.attempt, message.step))
            return
        job.state, job.result = "succeeded", content[1]
        self.say(0, m.ForgetJob(job.name, job.attempt))

    def cancel(self, job: Work) -> None:
        """A client has changed its mind."""
        if job.state == "queued":
            job.state = "cancelled"
        elif job.state == "running" and not job.is_cancelled:
            job.is_cancelled = True
            if self.state == "formed" and job.name not in self.rejoining:
                self.say(0, m.StopJob(job.name, job.attempt))

    def assign(self) -> None:
        """Give the group a job, when it has none."""
        queued = [job for job in self.jobs if job.state == "queued"]
        if not queued or any(job.state == "running" for job in self.jobs):
            return
        job = queued[0]
        job.state, job.attempt = "running", job.attempt + 1
        every = self.world.chance.choice([0, 1, 2, 3])
        self.fan_out(
            m.RunJob(
                job.name,
                job.attempt,
                "edit",
                job.parameters,
                {"video": job.media},
                job.checkpoint,
                job.checkpoint_step,
                every,
                0,
            )
        )

    # --- sessions ----------------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Ask for something that may be asked for now."""
        if self.state != "formed":
            return
        chance = self.world.chance
        if chance.random() < 0.3 and not self.is_draining:
            self.assign()
        if self.ready != {"draw", "show"}:
            return
        living = [film for film in self.films if film.state not in ("new", "over")]
        new = [film for film in self.films if film.state == "new"]
        if new and len(living) < 2 and not self.is_draining:
            film = new[0]
            film.state = "draw"
            self.fan_out(m.InitializeStage(film.name, "toy", "draw", 1, 1, CHUNKS, {}, {}, m.Artifact()))
        for film in living:
            self.play(film)

    def play(self, film: Film) -> None:
        """Send its next task, if it may have one more, or its keys."""
        chance = self.world.chance
        if film.state != "live" or film.sent - film.done >= 2 or film.sent == CHUNKS:
            return
        if chance.random() < 0.3:
            film.keys += 1
            keys = KeyState(revision=film.keys, held=("w",))
            self.say(0, m.SetStageKeys(film.name, "toy", "draw", 1, 1, keys))
        index, film.sent = film.sent, film.sent + 1
        place = Shared("o", "s", 1) if chance.random() < 0.3 else Inline(b"x")
        control = m.Artifact({}, {"x": TensorRef("uint8", (1,), place)})
        reservation = m.Reservation("control", keys=KeyState()) if chance.random() < 0.5 else None
        inputs = {} if reservation is not None else {"control": control}
        first = index == 0
        self.fan_out(m.RunTask(film.name, "toy", "draw", 1, 1, index, inputs, first, index == CHUNKS - 1, reservation))
        awaits = m.RunTask(film.name, "toy", "show", 1, 1, index, {}, first, index == CHUNKS - 1, awaits=("picture",))
        self.say(0, awaits)

    def hear_of_session(self, message: Any) -> None:
        """An answer; of those that are over nobody waits for one."""
        film = next(film for film in self.films if film.name == message.session)
        match message:
            case m.StageFailed(phase="release"):
                self.released(film, message.stage)
            case m.StageFailed():
                self.release(film, "failed")
            case m.StageInitialized() if film.state == "draw":
                film.state = "show"
                self.say(0, m.InitializeStage(film.name, "toy", "show", 1, 1, CHUNKS, {}, {}, m.Artifact()))
            case m.StageInitialized() if film.state == "show":
                film.state = "live"
            case m.TaskDone(stage="show") if film.state == "live":
                assert message.index == film.done, "a chunk out of order"
                film.done += 1
                if film.done == CHUNKS:
                    self.release(film, "completed")
            case m.StageReleased() if film.state == "releasing":
                self.released(film, message.stage)
            case _:
                pass

    def released(self, film: Film, stage: str) -> None:
        """Nothing of it is at a stage any more, though that may have raised."""
        film.waiting.discard(stage)
        if film.state == "releasing" and not film.waiting:
            film.state = "over"

    def release(self, film: Film, outcome: str) -> None:
        """It ends, once."""
        if film.state in ("releasing", "over"):
            return
        film.state, film.outcome, film.waiting = "releasing", outcome, {"draw", "show"}
        for stage in ("draw", "show"):
            self.say(0, m.ReleaseStage(film.name, "toy", stage, 1, 1))
