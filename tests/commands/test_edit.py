"""`reelwire edit`, `cancel` and what they show, as a person runs them: with real processes where a broker is needed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from reelwire import Client, JobStatus, RequestError
from reelwire.commands import cancel as cancel_module
from reelwire.commands.edit import read_tasks, typed
from reelwire.commands.job_bar import duration, said_of
from reelwire.commands.job_kinds import accepted
from reelwire.commands.job_results import report, row_of
from reelwire.commands.status import _print_jobs
from reelwire.errors import BrokerUnreachable, ConfigError
from reelwire.job_spec import JobSpec
from reelwire.spec import Parameter

from .conftest import LIMIT_S, Ended, Reelwire, ready_line, running

NOBODY = "tcp://127.0.0.1:9"


def refused(ended: Ended, *words: str) -> None:
    """Exit code 2 and one sentence with these words."""
    sentence = ended.sentence()
    assert ended.code == 2, ended
    for word in words:
        assert word in sentence, sentence


def test_a_broker_that_leaves_before_any_cancel_is_answered_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is exit code 3, and one sentence for all jobs, which names the endpoint."""

    async def left(_endpoint: str, _seconds: float, ids: tuple[str, ...]) -> list[BrokerUnreachable]:
        return [BrokerUnreachable("the broker left") for _ in ids]

    monkeypatch.setattr(cancel_module, "_answers", left)
    with pytest.raises(BrokerUnreachable, match=f"answers at {NOBODY} any more: the broker left$"):
        cancel_module.cancel(["5-a", "5-b"], endpoint=NOBODY)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["task: is missing", "accepted: "]),
        (["v2v", "--tasks", "x.json"], ["--tasks is given beside a request"]),
        (["v2v", "--out", "nowhere/x.mp4"], ["out: the folder nowhere is not there"]),
        (["v2v", "--set", "steps"], ["set: ", "NAME=VALUE"]),
        (["v2v", "--priority", "101"], ["--priority"]),
        (["--tasks", "nowhere.json"], ["tasks: nowhere.json can't be read"]),
    ],
)
def test_flags_of_edit_that_cannot_be_right(here: Reelwire, flags: list[str], words: list[str]) -> None:
    """Found before anybody is asked."""
    refused(here("edit", *flags), *words)


def test_a_result_takes_the_place_of_a_file_alone(here: Reelwire, tmp_path: Path) -> None:
    """Not of a pipe or a device, which would be gone."""
    os.mkfifo(tmp_path / "pipe.mp4")
    refused(here("edit", "v2v", "--out", "pipe.mp4"), "out: pipe.mp4 is something else than a file")
    refused(here("edit", "v2v", "--out", "/dev/null"), "out: /dev/null is something else than a file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON file"),
        ("{}", "holds no requests"),
        ("[]", "holds no requests"),
        ("[3]", "tasks[0]: is no object"),
        ('[{"task": "v2v", "colour": 1}]', "tasks[0].colour: is unknown"),
        ('[{"out": "x.mp4"}]', "tasks[0].task: is None"),
        ('[{"task": "v2v"}, {"task": "v2v", "out": 3}]', "tasks[1].out: is 3"),
        ('[{"task": "v2v", "parameters": []}]', "tasks[0].parameters: is no object"),
    ],
)
def test_a_file_of_requests_that_is_none_says_where(tmp_path: Path, text: str, words: str) -> None:
    """The entry, its field, and what is accepted."""
    path = tmp_path / "tasks.json"
    path.write_text(text)
    with pytest.raises(RequestError) as raised:
        read_tasks(path)
    assert words in str(raised.value)
    assert "accepted: " in str(raised.value)


def test_files_of_requests_lie_beside_their_list(tmp_path: Path) -> None:
    """Of inputs and results alike, but for those on the broker's machine; a result that isn't named has the list's name."""
    path = tmp_path / "tasks.json"
    entries = [
        {
            "task": "v2v",
            "video": "in.mp4",
            "images": ["a.png", "broker:/b.png"],
            "out": "x.mp4",
            "parameters": {"n": 3},
        },
        {"task": "t2v", "prompt": "snow"},
    ]
    path.write_text(json.dumps(entries))
    first, second = read_tasks(path)
    assert (first.task, first.out) == ("v2v", tmp_path / "x.mp4")
    files = {"video": str(tmp_path / "in.mp4"), "images": [str(tmp_path / "a.png"), "broker:/b.png"]}
    assert first.given == {**files, "n": 3}
    assert (second.out, second.given) == (tmp_path / "tasks-1.mp4", {"prompt": "snow"})


def test_texts_of_set_become_what_the_kind_takes() -> None:
    """By the type of the parameter; one that it doesn't have stays a text, for the broker to refuse by name."""
    spec = JobSpec("k", "", (Parameter("steps", "integer", ""), Parameter("scale", "number", "")))
    assert typed(spec, {"steps": "3", "scale": "2", "other": "x"}) == {"steps": 3, "scale": 2.0, "other": "x"}
    with pytest.raises(ConfigError, match="steps"):
        typed(spec, {"steps": "many"})


def test_where_a_job_stands_is_said_in_words() -> None:
    """Place in the queue, stage, steps, seconds per step, time left, and what it gives way to."""

    def said(**given: Any) -> str:
        return said_of(JobStatus("j", "k", **given))

    assert said(state="queued", position=3) == "queued, 3 before it"
    assert said(state="queued", waits_for="worker") == "queued, 0 before it, waits for a worker"
    going = {"state": "running", "stage": "denoise", "step": 2, "steps": 40}
    assert said(**going) == "denoise  2/40"
    more = {"step_s": 1.5, "left_s": 57.0, "waits_for": "streaming"}
    assert said(**going, **more) == "denoise  2/40  1.50 s per step  57 s left  gives way to streaming"
    assert said(state="encoding") == "encoding"
    assert [duration(seconds) for seconds in (0.2, 59.4, 61, 3727)] == ["0 s", "59 s", "1:01", "1:02:07"]


def test_what_a_kind_of_job_takes_is_said_in_words() -> None:
    """Bounds, lengths, choices and forms, as a request is checked against them."""
    said = {
        accepted(one)
        for one in (
            Parameter("a", "integer", "", minimum=1, maximum=9, multiple_of=4),
            Parameter("b", "string", "", maximum=80),
            Parameter("c", "string", "", choices=("even", "ramp")),
            Parameter("d", "number", "", minimum=0.5),
            Parameter("e", "boolean", ""),
            Parameter("f", "string", ""),
        )
    }
    assert said == {
        "1 to 9, of the form 4k+1", "up to 80 characters", "even, ramp", "0.5 or more", "true, false", "any",
    }  # fmt: skip


def test_what_is_remarkable_about_a_job_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside its result: such as that it couldn't be written to where it was wanted on the broker's machine."""
    note = "not written: no room"
    status = JobStatus("7-ab", "k", "succeeded", result_bytes=3, suffix=".mp4", note=note)
    _print_jobs({"jobs": {"states": {"succeeded": 1}}}, [status])
    assert f"3 bytes; {note}" in capsys.readouterr().out
    report([row_of(status, out="a.mp4")], as_json=False)
    assert note in capsys.readouterr().out
    report([row_of(status)], as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["note"] == note
    waiting = JobStatus("7-ab", "k", "encoding", waits_for="room", note="there is no room for it")
    assert said_of(waiting, with_note=True) == "encoding, waits for room (there is no room for it)"


def test_nobody_listening_is_exit_code_3(reelwire: Reelwire) -> None:
    """Of each command that asks a broker."""
    for arguments in (("edit", "v2v"), ("cancel", "1")):
        ended = reelwire(*arguments, "--endpoint", NOBODY, env={"REELWIRE_CLIENT_CONNECT_TIMEOUT_S": "0.3"})
        assert ended.code == 3, ended
        assert NOBODY in ended.sentence()


@pytest.fixture
def where(broker: str, tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment in which a broker with a worker that does jobs is found."""
    jobs = ("--pipeline", "emulated", "--jobs", "emulated", "--job-option", "step_s=0.01")
    with running("worker", "--broker", broker, "--name", "one", *jobs, cwd=tmp_path) as worker:
        ready_line(worker)
        yield {"REELWIRE_BROKER": broker}


def test_jobs_are_asked_for_shown_and_ended(reelwire: Reelwire, where: Mapping[str, str], tmp_path: Path) -> None:
    """One that is waited for, a list of them, one that is left to the workers and cancelled; and what is refused."""
    done = reelwire("edit", "emulated", "--set", "steps=5", "--out", "a.mp4", "--json", env=where)
    assert done.code == 0, done
    (row,) = json.loads(done.out)
    assert (row["state"], row["out"]) == ("succeeded", "a.mp4")
    assert (tmp_path / "a.mp4").stat().st_size == row["bytes"]
    entries = [{"task": "emulated", "parameters": {"steps": 3}, "out": f"{name}.mp4"} for name in "bc"]
    (tmp_path / "tasks.json").write_text(json.dumps(entries))
    both = reelwire("edit", "--tasks", "tasks.json", env=where)
    assert both.code == 0, both
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "c.mp4").read_bytes()
    refused(reelwire("edit", "emulated", "--set", "frames=6", env=where), "frames: 6 is not of the form 4k+1")
    refused(reelwire("edit", "nothing", env=where), "unknown kind 'nothing'; accepted: emulated")
    failed = reelwire("edit", "emulated", "--set", "fail_at=2", env=where)
    assert (failed.code, "step 2 fails, as asked for" in failed.err) == (1, True)
    left, again = (
        reelwire("edit", "emulated", "--set", "steps=9000", "--detach", "--key", "k", env=where) for _ in range(2)
    )
    job = left.out.strip()
    assert again.out.strip() == job
    assert job in reelwire("status", env=where).out
    assert json.loads(reelwire("status", "--json", env=where).out)["jobs"]["listed"][0]["job"] == job
    waits = reelwire("edit", "emulated", "--set", "steps=9000", "--detach", env=where).out.strip()
    ended = reelwire("cancel", "nobody", job, waits, job, "--json", env=where)
    stood = json.loads(ended.out)
    assert stood.pop(job) in ("preparing", "running")
    assert stood == {waits: "cancelled"}
    assert reelwire("result", job, env=where).sentence() == f"job {job} was cancelled"
    assert "cancelled" in reelwire("cancel", job, env=where).out
    assert (ended.code, "there is no job 'nobody'" in ended.sentence()) == (1, True)


def test_what_kinds_of_jobs_take_is_shown(reelwire: Reelwire, where: Mapping[str, str]) -> None:
    """Files and parameters of each, with flag, type, default and bounds; for programs the whole specs."""
    shown = " ".join(reelwire("status", "--kinds", env=where).out.split())
    for words in ("emulated-rv2v: ", "images │ --image │ image file │ required │ 1 to 5", "prompt │ --prompt │ string"):
        assert words in shown, shown
    assert "frames │ --set frames= │ integer │ 9 │ 1 to 4096, of the form 4k+1 │ of the clip" in shown
    kinds = json.loads(reelwire("status", "--kinds", "--json", env=where).out)
    assert {one["name"] for one in kinds} == {"emulated", "emulated-v2v", "emulated-rv2v"}
    steps = next(one for one in kinds[0]["parameters"] if one["name"] == "steps")
    assert (steps["kind"], steps["default"], steps["minimum"]) == ("integer", 40, 1)
    assert json.loads(reelwire("status", "--json", env=where).out)["jobs"]["kinds"] == kinds
    assert "emulated-v2v" in reelwire("status", env=where).out


def test_no_kinds_of_jobs_are_said_in_a_sentence(reelwire: Reelwire, broker: str) -> None:
    """As long as no worker does any."""
    ended = reelwire("status", "--kinds", "--endpoint", broker)
    assert (ended.code, ended.out, ended.sentence()) == (0, "", "no worker that is attached does jobs")


def test_what_was_submitted_before_a_request_that_is_refused_is_named(
    reelwire: Reelwire, where: Mapping[str, str], tmp_path: Path
) -> None:
    """It goes on, and can be asked for."""
    entries = [{"task": "emulated", "parameters": {"steps": steps}} for steps in (9000, 0)]
    (tmp_path / "tasks.json").write_text(json.dumps(entries))
    ended = reelwire("edit", "--tasks", "tasks.json", env=where)
    refused(ended, "tasks[1].steps: 0 is below the least accepted", "submitted already, and going on: ")
    (job,) = json.loads(reelwire("status", "--json", env=where).out)["jobs"]["listed"]
    assert job["job"] in ended.err
    assert reelwire("cancel", job["job"], env=where).code == 0


def test_ctrl_c_leaves_a_job_to_the_workers(reelwire: Reelwire, where: Mapping[str, str], tmp_path: Path) -> None:
    """The command ends with 1 and says which job goes on."""
    left = ("edit", "emulated", "--set", "steps=9000", "--key", "left")
    with running(*left, cwd=tmp_path, env=where) as process, Client(where["REELWIRE_BROKER"]) as client:
        while not client.jobs():
            pass  # each look is a question and its answer; the test's own limit ends it
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        (job,) = client.jobs()
        assert process.returncode == 1
        assert job.job in err or "perhaps the one under the key left" in err, err
        assert not job.ended
        client.job(job.job).cancel()


def test_up_starts_a_group_that_does_jobs(reelwire: Reelwire, tmp_path: Path) -> None:
    """By its flag; both ranks come up, and a job runs over them."""
    flags = ("--listen", "tcp://127.0.0.1:*", "--group", "edit=2", "--pipeline", "emulated", "--jobs", "emulated")
    with running("up", *flags, "--json", cwd=tmp_path) as process:
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "ready":
                break
        assert events[-1]["workers"] == ["edit-0", "edit-1"], events
        where = {"REELWIRE_BROKER": events[-1]["endpoint"]}
        done = reelwire("edit", "emulated", "--set", "steps=4", "--json", env=where)
        assert done.code == 0, done
        groups = json.loads(reelwire("status", "--json", env=where).out)["groups"]
        assert [(group["name"], group["state"], len(group["ranks"])) for group in groups] == [("edit", "formed", 2)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("", ["--group", "edit"], ["group: 'edit' is no group", "NAME=RANKS"]),
        ("", ["--group", "edit=0"], ["group: 'edit=0' is no group"]),
        ("[[groups]]\nworld = 2\n", [], ["groups[1].name: is missing"]),
        ('[[groups]]\nname = "e"\nrank = 1\n', [], ["groups[1].rank", "is no setting of a group"]),
        ('[[groups]]\nname = "e"\nworld = 2\ndevices = ["cpu"]\n', [], ["groups[1].devices", "beside world"]),
        (
            '[[groups]]\nname = "e"\nworld = 2\n',
            ["--workers", "1"],
            ["workers: is given beside [[workers]] or [[groups]]"],
        ),
        (
            '[[groups]]\nname = "e"\nworld = 2\n[[groups]]\nname = "e"\nworld = 2\n',
            [],
            ["groups[2].name: 'e' is that of groups[1]"],
        ),
    ],
)
def test_wrong_groups_of_up(here: Reelwire, tmp_path: Path, text: str, flags: list[str], words: list[str]) -> None:
    """Told before anything is started."""
    (tmp_path / "reelwire.toml").write_text(text)
    refused(here("up", *flags), *words)
