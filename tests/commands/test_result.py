"""`reelwire result`, and how commands that wait for a job bear with a broker that is away: with real processes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from reelwire import Client

from .conftest import LIMIT_S, Ended, Reelwire, command, environment, ready_line, running

NOBODY = "tcp://127.0.0.1:9"
JOBS = ("--pipeline", "emulated", "--jobs", "emulated", "--job-option", "step_s=0.01")


def refused(ended: Ended, *words: str) -> None:
    """Exit code 2 and one sentence with these words."""
    sentence = ended.sentence()
    assert ended.code == 2, ended
    for word in words:
        assert word in sentence, sentence


@pytest.fixture
def where(broker: str, tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment in which a broker with a worker that does jobs is found."""
    with running("worker", "--broker", broker, "--name", "one", *JOBS, cwd=tmp_path) as worker:
        ready_line(worker)
        yield {"REELWIRE_BROKER": broker}


def test_flags_of_result_and_cancel_that_cannot_be_right(here: Reelwire) -> None:
    """Found before anybody is asked; each says what is accepted."""
    refused(here("result"), "job: is missing; accepted: the id of a job, as `reelwire status` lists them")
    refused(here("cancel"), "jobs: are missing; accepted: the ids of jobs, as `reelwire status` lists them")
    refused(here("result", "1", "--out", "nowhere/x.mp4"), "out: the folder nowhere is not there")
    refused(here("result", "1", "--wait", "-1"), "--wait: is too small; accepted: 0")


def test_a_job_that_nobody_waits_for_gets_no_file(here: Reelwire) -> None:
    """``--out`` beside ``--detach`` is refused, with the command that writes the file later."""
    refused(here("edit", "v2v", "--detach", "--out", "x.mp4"), "--detach", "`reelwire result ID --out x.mp4`")


def test_a_result_without_a_broker_is_exit_code_3(reelwire: Reelwire) -> None:
    """As of all commands that ask one."""
    ended = reelwire("result", "1", "--endpoint", NOBODY, env={"REELWIRE_CLIENT_CONNECT_TIMEOUT_S": "0.3"})
    assert ended.code == 3, ended
    assert NOBODY in ended.sentence()


def test_groups_10_the_result_of_a_detached_job_is_fetched(
    reelwire: Reelwire, where: Mapping[str, str], tmp_path: Path
) -> None:
    """It is waited for, written where it is wanted or under the job's id, and the job is forgotten if that is asked for."""
    left = reelwire("edit", "emulated", "--set", "steps=50", "--detach", env=where)
    assert (left.code, "reelwire result ID --out FILE" in left.err) == (0, True)
    job = left.out.strip()
    done = reelwire("result", job, "--out", "a.mp4", "--json", env=where)
    assert done.code == 0, done
    (row,) = json.loads(done.out)
    assert (row["job"], row["state"], row["out"]) == (job, "succeeded", "a.mp4")
    assert (tmp_path / "a.mp4").stat().st_size == row["bytes"]
    again = reelwire("result", job, "--delete", env=where)
    assert again.code == 0, again
    assert (tmp_path / f"{job}.mp4").read_bytes() == (tmp_path / "a.mp4").read_bytes()
    gone = reelwire("result", job, env=where)
    assert (gone.code, f"there is no job '{job}'" in gone.sentence()) == (1, True)


def test_a_result_that_is_not_there_is_exit_code_1(
    reelwire: Reelwire, where: Mapping[str, str], tmp_path: Path
) -> None:
    """Of a job that has failed, with the worker's reason, and of one that isn't over in time, which goes on."""
    failed = reelwire("edit", "emulated", "--set", "fail_at=2", "--detach", env=where).out.strip()
    ended = reelwire("result", failed, "--delete", "--json", env=where)
    assert (ended.code, json.loads(ended.out)[0]["state"]) == (1, "failed")
    assert f"{failed}: " in ended.sentence()
    assert "step 2 fails, as asked for" in ended.sentence()
    job = reelwire("edit", "emulated", "--set", "steps=9000", "--detach", env=where).out.strip()
    early = reelwire("result", job, "--wait", "0.2", env=where)
    assert (early.code, f"job {job} isn't over after 0.2 s (" in early.sentence()) == (1, True)
    assert {one["job"] for one in json.loads(reelwire("status", "--json", env=where).out)["jobs"]["listed"]} == {
        failed,
        job,
    }
    assert reelwire("cancel", job, env=where).code == 0
    cancelled = reelwire("result", job, env=where)
    assert (cancelled.code, cancelled.sentence()) == (1, f"job {job} was cancelled")
    assert list(tmp_path.glob("*.mp4")) == []


class Screen:
    """A command with a terminal for its standard error, whose text is kept."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        """Start it."""
        self.text = ""
        self._more = threading.Condition()
        self._ours, theirs = pty.openpty()
        given = {**environment(), "TERM": "xterm"}
        self.process = subprocess.Popen(
            command(*arguments), stdout=subprocess.DEVNULL, stderr=theirs, cwd=cwd, env=given
        )
        os.close(theirs)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):  # so Linux says that nobody has the other end any more
            while data := os.read(self._ours, 1 << 16):
                with self._more:
                    self.text += data.decode()
                    self._more.notify()

    def until(self, text: str) -> None:
        """Wait until that has been shown."""
        with self._more:
            assert self._more.wait_for(lambda: text in self.text, LIMIT_S), self.text

    def close(self) -> int:
        """Wait for its end, or end it."""
        try:
            return self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._thread.join()
            os.close(self._ours)


def test_groups_07_commands_that_wait_say_when_the_broker_is_away_and_go_on(tmp_path: Path) -> None:
    """In one line, with the job's id, within the heartbeat's silence; and when it is back they end as if it had been there."""
    state = ("--state-dir", "state", "--set", "heartbeat_s=0.2", "--json")
    with ExitStack() as stack:
        broker = stack.enter_context(running("broker", "--listen", "tcp://127.0.0.1:*", *state, cwd=tmp_path))
        endpoint = str(ready_line(broker)["endpoint"])
        ready_line(stack.enter_context(running("worker", "--broker", endpoint, "--name", "one", *JOBS, cwd=tmp_path)))
        with Client(endpoint) as client:
            job = client.submit_edit("emulated", key="k", steps=800).id
        again = ("edit", "emulated", "--set", "steps=800", "--key", "k", "--out", "edited.mp4")
        fetch = ("result", job, "--out", "fetched.mp4")
        screens = [Screen(*each, "--endpoint", endpoint, cwd=tmp_path) for each in (again, fetch)]
        for screen in screens:
            stack.callback(screen.close)
            screen.until("denoise_")  # it is told of the job
        broker.kill()
        for screen in screens:
            screen.until(
                f"the broker at {endpoint} can't be reached: job {job} isn't lost, and this goes on when it is"
            )
        ready_line(stack.enter_context(running("broker", "--listen", endpoint, *state, cwd=tmp_path)))
        for screen in screens:
            screen.until(f"the broker at {endpoint} is back")
            assert screen.process.wait(LIMIT_S) == 0, screen.text
            assert screen.text.count("can't be reached") == 1
    assert (tmp_path / "edited.mp4").read_bytes() == (tmp_path / "fetched.mp4").read_bytes()
