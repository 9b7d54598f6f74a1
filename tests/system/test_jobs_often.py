"""What must hold for jobs every time, tried often: cancels at random steps, brokers and workers killed at random moments.

Minutes each, so behind the marker ``slow``: ``scripts/test -m slow``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from reelwire import Job, JobCancelled, JobStatus, OverloadError
from reelwire.workers.supervisor import Supervisor

LIMIT_S = 120.0
STEP_S = 0.05
JOBS = ("--pipeline", "emulated", "--jobs", "emulated", "--job-option", f"step_s={STEP_S}")
CANCELS = 50
KILLS = 20
GROWTH_BYTES_MAX = 16 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def digest(job: Job) -> str:
    """Of the result."""
    return hashlib.sha256(job.result(timeout=LIMIT_S)).hexdigest()


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def reached(job: Job, step: int) -> JobStatus:
    """Where a job stands once it has done so many steps of whatever stage, or has ended."""
    seen = 0
    last = ("", -1)
    for event in job.progress():
        if event.state == "running" and (event.stage, event.step) != last:
            seen, last = seen + 1, (event.stage, event.step)
        if seen > step or event.ended:
            return event
    return job.status()


def test_groups_11_a_cancel_at_any_step_gives_everything_back(stack: Any) -> None:
    """Fifty times: all ranks are back within a step, memory stays where it was, and the next job is right."""
    stack.broker()
    ranks = stack.group("edit", 2, *JOBS, "--job-option", f"state_bytes={8 << 20}")
    client = stack.client()
    random = Random(11)
    right = digest(client.submit_edit("emulated", seed=1, steps=6))
    backs: list[float] = []
    before: list[int] = []
    for number in range(CANCELS):
        job = client.submit_edit("emulated", seed=number, steps=60)
        reached(job, random.randrange(1, 12))
        began = time.monotonic()
        job.cancel()
        with pytest.raises(JobCancelled):
            job.result(timeout=LIMIT_S)
        backs.append(time.monotonic() - began)
        if number == CANCELS // 5:
            before = [resident_bytes(rank.process.pid) for rank in ranks]
        if number % 10 == 9:
            assert digest(client.submit_edit("emulated", seed=1, steps=6)) == right
    grown = [resident_bytes(rank.process.pid) - old for rank, old in zip(ranks, before, strict=True)]
    assert max(grown) < GROWTH_BYTES_MAX, grown
    # From the call to the client's knowledge of the end: a step, and the way through three processes on a busy machine.
    assert sorted(backs)[len(backs) // 2] < STEP_S + 0.1, backs


def test_groups_07_brokers_die_and_no_job_is_lost_or_done_twice(stack: Any, tmp_path: Path) -> None:
    """Twenty times kill -9 with jobs queued and running: each has one result, of its first attempt."""
    kept = {"state_dir": tmp_path / "state"}
    broker = stack.broker(**kept)
    stack.group("edit", 2, *JOBS)
    client = stack.client()
    random = Random(7)
    right = digest(client.submit_edit("emulated", seed=3, steps=8))
    jobs: list[Job] = []
    for _ in range(KILLS):
        jobs += [client.submit_edit("emulated", seed=3, steps=8) for _ in range(2)]
        running = next(job for job in jobs if not job.status().ended)
        reached(running, random.randrange(0, 6))
        broker.kill()
        broker = stack.broker_again(**kept)
    assert [digest(job) for job in jobs] == [right] * len(jobs)
    states = [job.status() for job in jobs]
    assert {state.state for state in states} == {"succeeded"}
    assert {state.attempt for state in states} == {1}
    assert len(client.jobs()) == len(jobs) + 1
    assert len({job.id for job in jobs}) == len(jobs)


def test_groups_12_workers_die_and_each_job_makes_what_it_would_have_made(stack: Any) -> None:
    """Ranks are killed at random; `up` starts the group anew, and every job goes on from what was kept."""
    stack.broker(job_attempts=50)
    random = Random(12)
    with Supervisor(forward=lambda _name, _kind, _line: None) as supervisor:
        stack.supervised_group(supervisor, "edit", 2, *JOBS)
        client = stack.client()
        right = digest(client.submit_edit("emulated", seed=5, steps=40))
        for _ in range(6):
            job = client.submit_edit("emulated", seed=5, steps=40)
            stood = reached(job, random.randrange(6, 30))
            if not stood.ended:
                os.kill(supervisor.pids()[f"edit-{random.randrange(2)}"], signal.SIGKILL)
            assert digest(job) == right
            assert stood.ended or job.status().attempt >= 2


def test_groups_14_thousands_of_submissions_are_taken_or_told_when_to_come_again(stack: Any, tmp_path: Path) -> None:
    """Above the limits each is refused with a time; the accepted ones are all there after kill -9 and a restart."""
    kept = {"state_dir": tmp_path / "state", "jobs_queued_max": 300, "jobs_queued_per_client_max": 200}
    broker = stack.broker(**kept)
    stack.worker("one", "emulated", jobs="emulated", job_options="step_s=60")
    clients = [stack.client(f"client-{number}") for number in range(4)]
    accepted: list[str] = []
    refused: list[float] = []
    for number in range(10_000):
        try:
            accepted.append(clients[number % 4].submit_edit("emulated", steps=2).id)
        except OverloadError as error:
            refused.append(error.retry_after_s)
    assert len(accepted) + len(refused) == 10_000
    assert min(refused) > 0
    assert 300 <= len(accepted) <= 302
    broker.kill()
    stack.broker_again(**kept)
    later = stack.client("later")
    for name in accepted:
        assert later.job(name).status().state in ("queued", "preparing", "running")
    with pytest.raises(OverloadError):
        later.submit_edit("emulated", steps=2)
