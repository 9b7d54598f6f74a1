"""Random schedules of clients, workers, faults of the store and killed brokers; every event is followed by `check()`.

What is promised, for every schedule: a job that was acknowledged is there until it is deleted, it ends at most once, and
what is fetched is what the attempt made that the broker acknowledged. A job whose cancel was answered is begun by nobody
and goes on at nobody's; it succeeds only if its result was made before, and if no broker died between the answer and its end.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.events import Unreachable
from reelwire.job_parts import FILE_PART_BYTES
from reelwire.messages import HeldJob, Media

from .fake_jobs import ENDED, Client, Shop, Worker
from .fake_store import sha256

STEPS = 120


class Guest(Client):
    """A client that notes which cancels were answered before the job had ended."""

    def __init__(self, chaos: Chaos, name: str) -> None:
        super().__init__(chaos.shop, f"c-{name}".encode(), name)
        self.chaos = chaos
        self.cancels: set[int] = set()

    def cancel(self, job: str) -> None:
        """Want a job to end."""
        request = self.call()
        self.cancels.add(request)
        self.say(m.CancelJob(request, job))

    def answer(self, message: Any) -> None:
        """Note what was answered."""
        if isinstance(message, m.Jobs) and message.request in self.cancels:
            self.chaos.cancelled.update(info.job for info in message.jobs if info.state not in ENDED)
        super().answer(message)


class Hand(Worker):
    """A worker whose leader keeps what it has begun until it is told to forget it, as a real one does."""

    def __init__(self, chaos: Chaos, name: str) -> None:
        super().__init__(chaos.shop, f"w-{name}".encode(), name, chaos.kinds)
        self.chaos = chaos
        self.work: dict[tuple[str, int], Any] = {}
        self.steps: dict[tuple[str, int], int] = {}
        self.unheard: set[tuple[str, int]] = set()

    def answer(self, message: Any) -> None:
        """Keep jobs; stop them; forget them."""
        match message:
            case m.RunJob(job=job, attempt=attempt):
                assert not [key for key in self.work if key[0] == job and key[1] >= attempt], "told twice"
                assert not [key for key, end in self.work.items() if end is None], "told while it has another one"
                assert job not in self.chaos.cancelled, "begun after a cancel that was answered"
                self.work[job, attempt] = None
                self.steps[job, attempt] = max(message.checkpoint_step, 0)
                if message.checkpoint is not None:
                    found = self.shop.disk.files.get(message.checkpoint.file)
                    assert found == f"{job} at {message.checkpoint_step}".encode(), "another checkpoint"
            case m.StopJob(job=job, attempt=attempt):
                key = (job, attempt)
                if self.work.get(key, "") is None and self.chaos.random.random() < 0.5:
                    self.unheard.add(key)  # it hears that after its step, if its connection lives as long
                    return
                if self.work.get(key, "") is None:
                    self.work[key] = m.JobEnded(job, attempt, "cancelled")
                if key not in self.work or isinstance(self.work[key], m.JobEnded):
                    end = self.work.get(key, m.JobEnded(job, attempt, "cancelled"))
                    self.reply(end)
            case m.ForgetJob(job=job, attempt=attempt):
                end = self.work.pop((job, attempt), "")
                assert end is not None, "forgotten while it runs"
                record, known = self.shop.disk.records.get(job), self.shop.jobs._at.jobs.get(job)
                was_stopped = isinstance(end, m.JobEnded) and end.state == "cancelled"
                # One that was cancelled before its broker came can't end otherwise.
                is_sure = known is not None and known.state == "rejoining" and known.record.is_cancelled
                if record is not None and record.standing not in ENDED and not was_stopped and not is_sure:
                    assert known is not None, "in the journal alone"
                    is_others = known.record.attempt != attempt or known.group not in (None, self.group)
                    assert is_others, "forgotten before the end is durable"
            case m.CheckpointKept(job=job, step=step):
                record = self.shop.disk.records.get(job)
                if record is not None and record.standing not in ENDED:
                    assert record.checkpoint_step >= step, "a checkpoint that isn't durable"
            case m.WantFile() if message.file not in self.files:
                self.reply(m.FileGone(message.file, "lost"))
            case m.WantFile() if self.chaos.random.random() < 0.1:
                self.reply(m.FileGone(message.file, "a fault"))
            case m.EndGroup():
                self.die()
            case _:
                super().answer(message)

    def die(self) -> None:
        """All that it had is gone."""
        self.attachment = self.epoch = 0
        self.work.clear()
        self.unheard.clear()
        self.shop.peers.pop(self.route, None)
        if self in self.chaos.workers:
            self.chaos.workers.remove(self)

    def part(self, file: str, index: int) -> None:
        """Send one part of a file, if it is still there."""
        if file in self.files:
            super().part(file, index)

    def cut(self) -> None:
        """Its connection breaks, and it lives."""
        self.attachment = 0
        self.shop.peers.pop(self.route, None)
        self.shop.handle(Unreachable(self.shop.now, self.route))
        self.shop.turn()

    def sleep(self) -> None:
        """The broker hears nothing of it for too long, and it lives."""
        core = self.shop.core
        peer = core._peers.workers.get(self.name)
        self.attachment = 0
        self.shop.peers.pop(self.route, None)
        if peer is not None:
            peer.heard_at = -1e9
            core._silences.set(peer.attachment, self.shop.now)
            self.shop.turn()

    def stop(self) -> None:
        """It is asked to stop: it begins nothing any more, hands back what it is at, and leaves."""
        if not self.attachment:
            return
        self.say(m.Draining())
        for key, end in list(self.work.items()):
            if end is None and self.chaos.random.random() < 0.7:
                self.steps[key] += 1
                offer = self.offer(f"{key[0]} at {self.steps[key]}".encode())
                self.say(m.JobFile(*key, "checkpoint", offer, self.steps[key]))
        self.shop.drop(self)
        self.die()

    def join(self) -> None:
        """Find the broker, or the next one."""
        self.shop = self.chaos.shop
        self.shop.peers[self.route] = self
        held = tuple(HeldJob(*key, ended=end is not None) for key, end in self.work.items())
        self.attachment = 0
        self.unheard.clear()
        self.hello(held=held)
        for end in list(self.work.values()):
            if end is not None and self.attachment:
                self.say(end)

    def do(self) -> None:
        """Do something about what it has."""
        mine = [key for key, end in self.work.items() if end is None]
        if not mine or not self.attachment:
            return
        key = mine[0]
        job, attempt = key
        choice = self.chaos.random.random()
        if key in self.unheard and choice < 0.6:
            self.unheard.remove(key)
            self.work[key] = m.JobEnded(job, attempt, "cancelled")
            self.say(self.work[key])
            return
        assert key in self.unheard or job not in self.chaos.cancelled, "it goes on after a cancel that was answered"
        self.steps[key] += 1
        if choice < 0.4:
            self.say(m.JobProgress(job, attempt, "running", "denoise", self.steps[key], 100, 1.0))
        elif choice < 0.6:
            offer = self.offer(f"{job} at {self.steps[key]}".encode())
            self.say(m.JobFile(job, attempt, "checkpoint", offer, self.steps[key]))
        elif choice < 0.9:
            offer = self.offer(self.chaos.result(job))
            self.work[key] = m.JobFile(job, attempt, "result", offer)
            self.say(self.work[key])
        elif choice < 0.95:
            self.work[key] = m.JobEnded(job, attempt, "failed", m.Failure("stage", "it broke"))
            self.say(self.work[key])


class Chaos:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.settings = {
            "jobs_queued_max": self.random.choice((3, 10, 50)),
            "jobs_queued_per_client_max": self.random.choice((2, 5)),
            "jobs_kept_max": self.random.choice((2, 1000)),
            "result_keep_s": self.random.choice((20.0, 10_000.0)),
            "state_bytes_max": self.random.choice((10_000, 16 * FILE_PART_BYTES, 1 << 30)),
            "heartbeat_s": 100.0,
            "uploads_per_client_max": 2,
            "result_bytes_max": 2 * FILE_PART_BYTES,
            "job_attempts": self.random.choice((1, 3)),
        }
        self.shop = Shop(None, **self.settings)
        self.kinds = Shop().worker().kinds
        self.is_lazy = seed % 2 == 1
        self.workers: list[Hand] = []
        self.away: list[Hand] = []
        self.clients: list[Any] = []
        self.names = 0
        self.asked: dict[str, dict[str, Any]] = {}
        self.accepted: dict[str, str] = {}
        self.ends: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.cancelled: set[str] = set()
        self.outlived: set[str] = set()
        self.set_up()

    def set_up(self) -> None:
        """How the broker's disk behaves."""
        shop = self.shop
        shop.commits = shop.works = shop.turns = not self.is_lazy
        faults = self.random.random() < 0.5
        shop.disk.fails = lambda action: (
            "a fault"
            if faults and self.random.random() < 0.1 and type(action).__name__ not in ("RemoveFile", "DropFile")
            else ""
        )

    def result(self, job: str) -> bytes:
        """What every attempt at a job makes, bit for bit."""
        return sha256(job.encode()).encode() * (1 + int(sha256(job.encode()), 16) % 20_000)

    def name(self) -> str:
        """A new one."""
        self.names += 1
        return f"n{self.names}"

    def look(self) -> None:
        """What clients were told: each key has one job, each job one end."""
        told, self.shop.told = self.shop.told, []
        for message in told:
            if isinstance(message, m.JobAccepted):
                before = self.accepted.setdefault(message.key, message.job.job)
                if before != message.job.job:
                    assert before in self.deleted or self.may_be_forgotten, "two jobs under one key"
                    self.accepted[message.key] = message.job.job
            if isinstance(message, m.JobAccepted | m.JobChanged):
                self.note(message.job)
            for info in message.jobs if isinstance(message, m.Jobs) else ():
                self.note(info)

    @property
    def may_be_forgotten(self) -> bool:
        """Whether jobs are forgotten without anybody's word."""
        return self.settings["jobs_kept_max"] == 2 or self.settings["result_keep_s"] == 20.0

    def note(self, info: m.JobInfo) -> None:
        """A job's end is for good."""
        if info.state in ENDED:
            assert self.ends.setdefault(info.job, info.state) == info.state, "a job ended twice"
            assert info.job not in self.outlived or info.state == "cancelled", "a cancel was lost with its broker"
            if info.result_bytes:
                assert info.result_sha256 == sha256(self.result(info.job)), "another result"
        else:
            assert info.job not in self.ends, f"{info.job} had ended"

    def check_nothing_lost(self) -> None:
        """All that was acknowledged is in the journal, ends included, but for what was deleted or kept long enough."""
        records = self.shop.disk.records
        for job in self.accepted.values():
            if job not in self.deleted and not self.may_be_forgotten:
                assert job in records, f"{job} was lost"
                if job in self.ends:
                    assert records[job].standing == self.ends[job], f"the end of {job} was lost"

    def client(self) -> Any:
        """Some client."""
        if not self.clients or (len(self.clients) < 4 and self.random.random() < 0.3):
            self.clients.append(Guest(self, self.name()).hello())
        return self.random.choice(self.clients)

    def submit(self) -> None:
        """Ask for a job, or again for one."""
        client = self.client()
        if self.asked and self.random.random() < 0.3:
            key = self.random.choice(list(self.asked))
            client.submit(key, **self.asked[key])
            return
        kind, media = self.random.choice(("t2v", "v2v", "r2v")), {}
        if kind != "t2v":
            name, right = ("video", "video") if kind == "v2v" else ("images", "image")
            count = 1 if kind == "v2v" else self.random.randint(1, 3)
            media = {name: tuple(self.media(client, right) for _ in range(count))}
        output = f"/out/{self.name()}.mp4" if self.random.random() < 0.3 else ""
        key = self.name()
        self.asked[key] = {"kind": kind, "media": media, "priority": self.random.choice((0, 0, 1)), "output": output}
        client.submit(key, **self.asked[key])

    def media(self, client: Any, right: str) -> Media:
        """A file that was uploaded, or lies at the broker's."""
        data = f"{right} {self.random.randrange(5)}".encode()
        if self.random.random() < 0.2:
            data += b"x" * FILE_PART_BYTES
        if self.random.random() < 0.5:
            self.shop.disk.outside["/in/" + sha256(data)[:8]] = data
            return Media(path="/in/" + sha256(data)[:8])
        media: Media = client.upload(data, self.name())
        return media

    def ask(self) -> None:
        """A client asks something about some job."""
        if not self.accepted:
            return
        client, job = self.client(), self.random.choice(list(self.accepted.values()))
        match self.random.randrange(6):
            case 0:
                client.say(m.WatchJob(job, on=self.random.random() < 0.8))
            case 1:
                client.ask(m.AskJobs, self.random.choice((job, "")))
            case 2:
                client.cancel(job)
            case 3:
                client.say(m.DeleteJob(client.call(), job))
                if not any(each.id == job for each in self.shop.jobs._at.jobs.values()):
                    self.deleted.add(job)
            case 4:
                client.say(m.FetchResult(client.call(), job, self.random.choice((0, 0, 1)), self.random.choice((1, 4))))
            case _:
                client.say(m.CancelJob(client.call(), "nobody"))

    def kill(self) -> None:
        """The broker dies; clients and workers find the next one."""
        self.look()
        self.check_nothing_lost()
        for _ in range(self.random.randrange(4)):  # the store may have done what it couldn't say any more
            if self.shop.disk.errands:
                self.shop.disk.do_one(self.shop.now)
        self.shop = self.shop.restart(self.random.randrange(4))
        records = self.shop.disk.records
        self.outlived |= {job for job in self.cancelled if job in records and records[job].standing not in ENDED}
        self.set_up()
        for client in self.clients:
            client.shop, client.attachment = self.shop, 0
            client.uploads.clear()
            self.shop.peers[client.route] = client
            client.hello()
        self.clients = [client for client in self.clients if client.attachment]
        for worker in list(self.workers):
            fate = self.random.random()
            if fate < 0.15:
                worker.die()
            elif fate < 0.5:
                self.workers.remove(worker)
                self.away.append(worker)
            else:
                worker.join()

    def step(self) -> None:
        """Something happens."""
        if self.away and self.random.random() < 0.1:
            self.workers.append(self.away.pop(0))
            self.workers[-1].join()
        if self.shop.disk.unwritten and self.workers and self.random.random() < 0.1:
            self.part(self.random.choice(self.workers))
            return
        choice = self.random.random()
        if choice < 0.08 and len(self.workers) < 3:
            worker = Hand(self, self.name())
            self.workers.append(worker)
            worker.hello()
        elif choice < 0.12 and self.workers:
            worker = self.random.choice(self.workers)
            self.shop.drop(worker)
            worker.die()
        elif choice < 0.13 and self.workers:
            worker = self.random.choice(self.workers)
            worker.stop() if self.random.random() < 0.3 else self.part(worker)
        elif choice < 0.15 and self.clients:
            client = self.random.choice(self.clients)
            self.clients.remove(client)
            self.shop.drop(client)
        elif choice < 0.18:
            self.kill()
        elif choice < 0.4:
            self.submit()
        elif choice < 0.55:
            self.ask()
        elif choice < 0.8 and self.workers:
            self.random.choice(self.workers).do()
        elif choice < 0.82:
            self.shop.disk.is_full = not self.shop.disk.is_full
        elif choice < 0.85:
            self.shop.advance(self.random.choice((0.5, 3.0, 12.0)))
        else:
            self.let()

    def part(self, worker: Hand) -> None:
        """A worker and the broker lose each other; it comes back at once, or later."""
        worker.cut() if self.random.random() < 0.5 else worker.sleep()
        if self.random.random() < 0.5:
            worker.join()
        else:
            self.workers.remove(worker)
            self.away.append(worker)

    def let(self) -> None:
        """Journal and store do some of what they were asked for."""
        for _ in range(self.random.randrange(6)):
            if self.shop.disk.errands:
                self.shop.work()
        if self.random.random() < 0.5:
            self.shop.commit(self.random.randrange(1, 5))
        self.shop.turn()

    def finish(self) -> None:
        """Everything comes to its end when nothing goes wrong any more."""
        shop = self.shop
        shop.commits = shop.works = shop.turns = True
        shop.disk.fails = lambda _action: ""
        shop.disk.is_full = False
        self.random.seed(0)
        for worker in list(self.workers):
            shop.drop(worker)
            worker.die()
        last = shop.worker("last")
        shop.advance(301.0)  # whose connection broke isn't waited for any longer
        for _ in range(1000):
            shop.settle()
            busy = [run for run in last.runs if last.group.job == run.job]
            if not busy:
                break
            last.finish(busy[-1], self.result(busy[-1].job))
        self.look()
        self.check_nothing_lost()
        open_ = [job.id for job in shop.jobs._at.keys.values() if job.state not in ENDED]
        assert not open_, "jobs that never end"
        for job in list(shop.jobs._at.ended.values()):
            if job.state == "succeeded" and job.record.output and "output_error" not in job.record.facts:
                assert shop.disk.outside[job.record.output] == self.result(job.id), "another result was written"
            if job.state == "succeeded" and job.record.result is not None:
                assert shop.disk.files[job.record.result.file] == self.result(job.id)
        for client in self.clients:
            shop.drop(client)
        shop.settle()
        kept = {job.record.result.file for job in shop.jobs._at.ended.values() if job.record.result is not None}
        assert set(shop.disk.files) == kept, "files that nobody needs"


@pytest.mark.seeds(60)
def test_groups_07_random_schedules_lose_nothing_and_do_nothing_twice(seed: int) -> None:
    """Whatever happens, in whatever order, the promises hold, and so do all invariants after each event."""
    chaos = Chaos(seed)
    for _ in range(STEPS):
        chaos.step()
        chaos.look()
    chaos.finish()
