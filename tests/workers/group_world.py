"""The ranks of a worker group with their cores, joined by a link, threads and a broker that a seed schedules.

One thread, no clock; a rank is in `group_rank`, the broker in `group_broker`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

from reelwire import messages as m
from reelwire.group_messages import Outcome, RankHello
from reelwire.tensors import Inline, TensorRef
from reelwire.workers import actions, events, group_events
from reelwire.workers.group_events import AtStage, Form, LeaveGroup, LoadJobs, StartJob, StepJob

from .group_broker import Broker, Work
from .group_rank import BROKE, NO_JOB, VERSION, Meet, Rank


class GroupWorld:
    """All of them, and chance."""

    version = VERSION
    a_tensor = TensorRef("uint8", (1,), Inline(b"x"))

    def __init__(self, spec: Any, toy: Any, seed: int, size: int) -> None:
        self.chance = random.Random(seed)
        self.spec, self.toy, self.size = spec, toy, size
        self.now = 0.0
        self.slow = self.chance.choice([*range(size), -1, -1])  # which rank takes longer than the others
        self.faults = False
        self.frailty = 0.0  # how likely a step of a job raises on a rank; clients cancel then and now, too
        self.loss = 0.0  # how likely a message between ranks is lost
        self.disorder = 0.0  # how likely it overtakes others, and how likely a copy of it comes later, too
        self.copies: list[tuple[Rank, Rank, Any]] = []
        self.known: set[tuple[int, int]] = set()  # processes of leaders and ranks whose hello came
        self.processes: dict[int, Rank] = {}
        self.contents: dict[str, tuple[int, int]] = {}
        self.applied: dict[tuple[str, int], Any] = {}
        self.meets: dict[str, Meet] = {}
        self.stopping: set[str] = set()
        self.asked_to_stop: set[int] = set()
        self.codes: list[int | None] = []
        self.counted: Counter[str] = Counter()
        self.causes: dict[tuple[str, int], list[tuple[int, str]]] = {}  # by attempt: decision, and what was raised
        self.failing_jobs: set[tuple[str, int]] = set()  # attempts of which a leader was told that a rank has failed
        self.failed: set[tuple[str, int]] = set()  # those that it has given up for that
        self.words: dict[tuple[str, int], set[str]] = {}
        self.to_broker: dict[int, deque[tuple[int, Any]]] = {}
        self.to_notice: deque[Rank] = deque()
        self.broker = Broker(self)
        self.ranks: list[Rank] = [Rank(self, number) for number in range(size)]
        for rank in self.ranks:
            rank.handle(events.Started(self.now))

    def start(self, number: int) -> None:
        """A process that has ended is started again, as whoever watches them does; it is another one."""
        self.ranks[number] = rank = Rank(self, number)
        rank.handle(events.Started(self.now))

    def next_pid(self) -> int:
        """A number that no process had."""
        return len(self.processes) + 1

    # --- what the world is to its parts --------------------------------------------------------------------------------

    def faulty(self, probability: float) -> bool:
        """Whether something goes wrong now."""
        return self.faults and self.chance.random() < probability

    def carries(self, sender: Rank, to: Rank, message: Any) -> bool:
        """Whether the link does: it may lose anything, and there is none with a leader that has yet to hear of a rank."""
        if sender.pid != to.others.get(sender.number, sender).pid:
            return False
        if self.loss and self.chance.random() < self.loss:
            self.counted["lost"] += 1
            return False
        leader, rank = (to, sender) if sender.number else (sender, to)
        if isinstance(message, RankHello):
            self.known.add((leader.pid, rank.pid))
        return (leader.pid, rank.pid) in self.known

    def put(self, sender: Rank, to: Rank, message: Any) -> None:
        """On its way: behind what was said before, or not, and once, or again at any time."""
        if self.disorder and self.chance.random() < self.disorder:
            self.counted["overtakes"] += bool(to.link)
            to.link.insert(self.chance.randint(0, len(to.link)), (sender.number, message))
        else:
            to.link.append((sender.number, message))
        if self.disorder and self.chance.random() < self.disorder:
            self.copies.append((sender, to, message))

    def copy_arrives(self, at: int) -> None:
        """A message comes again, unless it is of another epoch by now, which a link sees."""
        sender, to, message = self.copies.pop(at)
        if not to.is_over and to.others.get(sender.number) is sender:
            self.counted["copies"] += 1
            said = getattr(message, "number", None)  # decisions and their outcomes have one
            self.counted["stale"] += said is not None and said < len(self.ranks[0].thread.log) - 1
            to.link.append((sender.number, message))

    def failing(self, rank: Rank, meet: Meet | None) -> bool:
        """Whether the order of a rank raises there, apart from all others."""
        order = rank.thread.order
        if isinstance(order, LoadJobs | LeaveGroup) or (
            isinstance(order, AtStage) and isinstance(order.job.work, actions.BuildStage)
        ):
            return False
        if isinstance(order, StartJob | StepJob) and self.chance.random() < self.frailty:
            return True
        return self.faulty(0.001 if isinstance(order, Form) else 0.01)

    def deliver(self, rank: int, attachment: int, message: Any) -> None:
        """The broker's socket."""
        if not self.ranks[rank].is_over and not self.ranks[rank].is_cut:
            self.ranks[rank].inbox.append((attachment, message))

    def content_of(self, file: str) -> tuple[int, int]:
        """A file that somebody has made: steps and trail."""
        return self.contents[file]

    def epoch_of(self, rank: Rank) -> int:
        """Of the group."""
        return int(rank.core._hello().group.epoch)

    def check_end(self, job: Work, ended: m.JobEnded) -> None:
        """A job is cancelled only if that was asked for, and has failed by what went wrong first and suffered from nothing."""
        assert ended.state == "failed" or job.is_cancelled, "nobody asked for that"
        assert ended.state == "cancelled" or ended.failure is not None
        if ended.failure is None:
            return
        told, causes = ended.failure.message, self.causes.get((ended.job, ended.attempt), [])
        assert told not in (NO_JOB.message, BROKE.message), "what follows from a failure was taken for its cause"
        first = [reason for at, reason in causes if at == min(causes)[0]]
        assert not causes or any(told.endswith(reason) for reason in first), (told, causes)

    def note_cause(self, rank: Rank, failure: m.Failure) -> None:
        """A rank has raised in a step of a job, by its own fault."""
        run = self.running(rank)
        self.causes.setdefault((run.job, run.attempt), []).append((rank.thread.done, failure.message))

    def running(self, rank: Rank) -> m.RunJob:
        """The job that the ranks are at."""
        leader: Any = rank.others.get(0, rank).core
        run: m.RunJob = leader._leader.jobs.current.run
        return run

    def note_word(self, word: Any) -> None:
        """A leader says how an attempt has ended: there is no result of one that has failed."""
        if isinstance(word, m.JobEnded) or (isinstance(word, m.JobFile) and word.role == "result"):
            words = self.words.setdefault((word.job, word.attempt), set())
            words.add(word.state if isinstance(word, m.JobEnded) else "result")
            assert len(words & {"failed", "result"}) < 2, "two ends of one attempt"
            assert "result" not in words or (word.job, word.attempt) not in self.causes, "a result that some rank lacks"

    def note_failed(self, fields: Any) -> None:
        """A leader finds that an attempt has failed, which it does once."""
        attempt = fields["job"], fields["attempt"]
        assert attempt not in self.failed, "it had failed already"
        self.failed.add(attempt)

    def exits(self, rank: Rank, code: int | None) -> None:
        """A process has ended; None: killed."""
        rank.is_over, rank.code = True, code
        self.codes.append(code)
        rank.thread.round = 0
        for each in self.ranks:
            if each is not rank and each.others.get(rank.number) is rank:
                each.gone.append(rank.number)
        self.to_notice.append(rank)

    def kill(self, rank: Rank) -> None:
        """SIGKILL."""
        if not rank.is_over:
            self.to_broker[rank.number].clear()
            self.exits(rank, None)

    # --- what must always hold -------------------------------------------------------------------------------------------

    def compare(self, rank: Rank) -> None:
        """All ranks do the same in the same order; who isn't able says so instead."""
        leader, at = rank.others.get(0, rank).thread.log, len(rank.thread.log) - 1
        if rank.number:
            assert at < len(leader), "a rank does what the leader doesn't"
            assert rank.thread.log[at] in (leader[at], ("unable",)), (rank.number, rank.thread.log[at], leader[at])
        else:
            goes_ahead = leader[at] == ("step",) and leader[at - 1][0] in ("start", "step")
            least = min((each.thread.done for number, each in rank.others.items() if number), default=at)
            assert least >= at - goes_ahead, "the next decision came before the last one was answered"
            self.counted["steps"] += goes_ahead and self.size > 1
            self.counted["steps ahead"] += least < at

    def check_all_answered(self, rank: Rank) -> None:
        """What is kept has been confirmed by all ranks."""
        done = {each.thread.done for each in rank.others.values()} | {rank.thread.done}
        assert done == {len(rank.thread.log)}, "a state is kept that some rank hasn't come to"

    def watch(self, order: Any) -> None:
        """What the leader begins: streaming and checkpoints before steps, and no step of what was cancelled or failed."""
        if not isinstance(order, StepJob | StartJob):
            return
        leader: Any = self.ranks[0].core
        for actor in leader.actors.values():
            first = actor.first
            if actor.offer.grouped and first is not None:
                number = getattr(first.work, "sequence", 0)
                assert not leader._leader._bodies.everywhere(number), "streaming waits for a second step"
        if isinstance(order, StepJob):
            thread, attempt = self.ranks[0].thread, leader._leader.jobs.current
            run, every = attempt.run, attempt.run.checkpoint_steps
            assert thread.job is not None
            assert thread.job.run is run
            assert not leader._leader._is_winding_up, "a step of what is to be handed back"
            assert f"{run.job} {run.attempt}" not in self.stopping, "a step after the cancel came"
            assert (run.job, run.attempt) not in self.failing_jobs, "a step after a failure was told"
            is_moving = attempt.kept is not None and not attempt.is_stored
            limit = 2 * every if is_moving else every
            is_due = every and thread.keeps and not attempt.is_writing and thread.unkept >= limit
            assert not is_due, "a step, and a checkpoint is due"

    # --- chance ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One thing happens."""
        what, which = self.choose()
        match what:
            case "broker hears":
                self.broker.hear(which, *self.to_broker[which].popleft())
            case "hears":
                self.rank_hears(which)
            case "link":
                self.rank_reads(which)
            case "happened":
                which.handle(which.happened.popleft())
            case "copy":
                self.copy_arrives(which)
            case "written":
                which.checkpoint_written()
            case "gone":
                which.handle(group_events.RankExited(self.now, which.gone.popleft(), "its process has ended"))
            case "thread":
                which.go_on()
            case "stage":
                self.ranks[0].stage_done(which)
            case "cut":
                which.is_cut = False
                which.handle(events.OutboxFull(self.now))
            case "notice":
                self.notice()
            case "start":
                self.start(which)
            case "act":
                self.broker.act()
            case "time":
                self.pass_time()
            case _:
                self.go_wrong(what)

    def choose(self) -> tuple[str, Any]:
        """What may happen now."""
        chance = self.chance
        if chance.random() < 0.05:
            return "time", None
        if self.faults and chance.random() < 0.008:
            return chance.choice(["kill", "cut all", "stop", "cancel", "cancel", "cancel"]), None
        if self.frailty and chance.random() < 0.002:
            return "cancel", None
        can: list[tuple[str, Any]] = [("broker hears", rank) for rank, queue in self.to_broker.items() if queue]
        living = [rank for rank in self.ranks if not rank.is_over]
        can += [("hears", rank) for rank in living if rank.inbox and not rank.is_cut]
        can += [("link", rank) for rank in living if rank.link]
        can += [("copy", chance.randrange(len(self.copies)))] if self.copies else []
        can += [("happened", rank) for rank in living if rank.happened]
        can += [("written", rank) for rank in living if rank.to_write]
        can += [("gone", rank) for rank in living if rank.gone and not rank.link]
        threads = [("thread", rank) for rank in living if rank.can_go_on()]
        can += [each for each in threads if each[1].number != self.slow or chance.random() < 0.2] * 2
        can += [("stage", stage) for stage in self.ranks[0].stages if not self.ranks[0].is_over]
        can += [("cut", rank) for rank in living if rank.is_cut]
        can += [("notice", None)] * bool(self.to_notice)
        can += [("start", rank.number) for rank in self.ranks if rank.is_over]
        can += [("act", None)]
        return chance.choice(can)

    def rank_hears(self, rank: Rank) -> None:
        """From the broker."""
        attachment, message = rank.inbox.popleft()
        rank.handle(events.Received(self.now, attachment, message))
        if isinstance(message, m.StopJob):
            self.stopping.add(f"{message.job} {message.attempt}")

    def rank_reads(self, rank: Rank) -> None:
        """From another rank."""
        other, message = rank.link.popleft()
        if rank.number == 0 and isinstance(message, Outcome) and message.failure and self.awaits(rank, other, message):
            act = rank.thread.log[message.number - 1][0]
            if act in ("start", "step"):
                run = self.running(rank)
                self.failing_jobs.add((run.job, run.attempt))
                is_first = message.number < len(rank.thread.log) and rank.thread.log[message.number] == ("step",)
                self.counted["first failed"] += is_first and not message.broken
                self.counted["first broke"] += is_first and message.broken
        rank.handle(group_events.LinkSaid(self.now, other, message))

    def awaits(self, leader: Rank, rank: int, outcome: Outcome) -> bool:
        """Whether a leader has yet to hear this of a rank; not if it comes twice."""
        core: Any = leader.core
        return any(each.number == outcome.number and rank in each.missing for each in core._leader._underway._all)

    def notice(self) -> None:
        """The broker sees that a process is silent."""
        rank = self.to_notice.popleft()
        if self.ranks[rank.number] is rank:
            while self.to_broker[rank.number]:
                self.broker.hear(rank.number, *self.to_broker[rank.number].popleft())
            self.broker.lose(rank.number, "it is silent")

    def go_wrong(self, what: str) -> None:
        """A process dies or is asked to stop, the broker dies, somebody changes his mind."""
        living = [rank for rank in self.ranks if not rank.is_over]
        if not living:
            return
        match what:
            case "kill":
                if self.chance.random() < 0.3:
                    self.kill(self.chance.choice(living))
            case "stop":
                if self.chance.random() < 0.3:
                    self.stop(self.chance.choice(living))
            case "cut all":
                self.cut_all()
            case _:
                self.broker.cancel(self.chance.choice(self.broker.jobs))

    def stop(self, rank: Rank) -> None:
        """SIGTERM, once."""
        if rank.pid not in self.asked_to_stop:
            self.asked_to_stop.add(rank.pid)
            rank.handle(events.ShutdownRequested(self.now))

    def cut_all(self) -> None:
        """The broker is killed, and another one comes."""
        for rank in self.ranks:
            self.to_broker[rank.number] = deque()
            rank.inbox.clear()
            rank.is_cut = not rank.is_over
        self.to_notice.clear()
        self.broker.begin()

    def pass_time(self) -> None:
        """Time goes on when everybody has read what was there for him, as loops do."""
        self.now += 0.5
        for number in list(self.to_broker):
            while self.to_broker[number]:
                self.broker.hear(number, *self.to_broker[number].popleft())
        for number in list(self.broker.attached):
            self.broker.say(number, m.Heartbeat())
        for rank in self.ranks:
            while rank.inbox and not rank.is_over:
                self.rank_hears(rank)
            rank.handle(events.Tick(self.now))
