"""`reelwire broker`, `worker`, `up`, `status` and `demo` as processes: ready, used, ended, with nothing left behind."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reelwire import Client, __version__
from reelwire.media import read_video

from .conftest import LAB, Reelwire, command, environment, left_running, marked, ready_line, running


@pytest.fixture
def mark() -> str:
    """Something in the environment that finds every process of a test again."""
    return secrets.token_hex(8)


def events_until(process: subprocess.Popen[str], wanted: str) -> list[dict[str, Any]]:
    """The JSON lines on standard output up to an event."""
    assert process.stdout is not None
    seen: list[dict[str, Any]] = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if seen[-1]["event"] == wanted:
            return seen
    assert process.stderr is not None
    raise AssertionError(f"no {wanted!r} in {seen}: {process.stderr.read()}")


def test_a_broker_says_where_it_listens_and_ends_on_sigterm(tmp_path: Path) -> None:
    """One JSON line on standard output, logs on standard error, exit code 0."""
    with running("broker", "--listen", "tcp://127.0.0.1:*", cwd=tmp_path) as process:
        said = ready_line(process)
        assert said["endpoint"].startswith("tcp://127.0.0.1:")
        assert said["version"] == __version__
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert all(json.loads(line)["event"] for line in err.splitlines())


def test_an_ipc_path_where_a_broker_listens_is_left_to_it(reelwire: Reelwire, tmp_path: Path) -> None:
    """A second broker is refused; the first one still answers, and takes the path away with it."""
    endpoint = f"ipc://{tmp_path / 'broker.ipc'}"
    with running("broker", "--listen", endpoint, cwd=tmp_path) as process:
        ready_line(process)
        second = reelwire("broker", "--listen", endpoint, limit_s=20)
        assert second.code == 2
        assert "in use" in second.sentence()
        with Client(endpoint) as client:
            assert client.status()["version"] == __version__
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert not (tmp_path / "broker.ipc").exists(), err


def test_status_shows_workers_and_stages(reelwire: Reelwire, lab: str) -> None:
    """As tables and as JSON."""
    shown = reelwire("status", "--endpoint", lab)
    assert shown.code == 0
    for word in ("lab-worker", "lab/draw", "ready", "sessions now", "takes no new sessions (draining) │ no"):
        assert word in shown.out
    state = json.loads(reelwire("status", "--json", "--endpoint", lab).out)
    assert sorted(stage["stage"] for stage in state["workers"][0]["stages"]) == ["draw", "mix", "show"]


def test_a_worker_on_a_device_that_is_not_there_is_told(reelwire: Reelwire, broker: str) -> None:
    """Exit code 2; the last line names the device and what there is."""
    ended = reelwire("worker", "--broker", broker, "--device", "cuda:4096", limit_s=60)
    assert ended.code == 2
    assert "'cuda:4096' isn't there; accepted: cpu" in ended.err.splitlines()[-1]


@pytest.mark.parametrize("who", ["worker", "client"])
def test_peers_of_another_version_are_refused_with_both(broker: str, tmp_path: Path, who: str) -> None:
    """Exit code 3; the sentence names the broker's version and the peer's."""
    program = (
        "import sys, importlib.metadata, reelwire\n"
        "reelwire.__version__ = '9.8.7'\n"
        "import reelwire.cli as cli\n"
        "sys.exit(cli.run(sys.argv[1:]))\n"
    )
    worker = ["worker", "--broker", broker, "--pipeline", LAB, "--set", "connect_timeout_s=20"]
    arguments = worker if who == "worker" else ["status", "--endpoint", broker]
    done = subprocess.run(
        [*command()[:2], "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "9.8.7" in last
    assert __version__ in last


def test_up_runs_a_topology_and_drains(reelwire: Reelwire, tmp_path: Path, mark: str) -> None:
    """Two workers with a stage set each; a stream goes through both; SIGINT ends everything with exit code 0."""
    topology = f"""
    [broker]
    listen = "tcp://127.0.0.1:*"
    [worker]
    pipeline = "{LAB}"
    [[workers]]
    name = "front"
    stages = ["mix", "draw"]
    [[workers]]
    name = "back"
    stages = ["show"]
    """
    (tmp_path / "up.toml").write_text(topology)
    with running("up", "--config", "up.toml", "--json", cwd=tmp_path, env={"REELWIRE_MARK": mark}) as process:
        first, *_, ready = events_until(process, "ready")
        assert first == {"event": "loading", "endpoint": ready["endpoint"], "workers": ["front", "back"]}
        assert ready["workers"] == ["front", "back"]
        assert len(left_running(mark)) == 4
        flags = ["--pipeline", "lab", "--chunks", "2", "--endpoint", ready["endpoint"], "--out", "lab.mp4", "--json"]
        streamed = reelwire("stream", *flags)
        assert streamed.code == 0, streamed.err
        used = json.loads(streamed.out)["versions"]["workers"]
        assert sorted(worker["name"] for worker in used) == ["back", "front"]
        process.send_signal(signal.SIGINT)
        assert events_until(process, "stopped")[-1]["in_order"] is True
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert left_running(mark) == []


def test_up_brings_a_broker_back_where_it_was(tmp_path: Path, mark: str) -> None:
    """Killed, it listens at the port that the system once chose: peers find it without being told."""
    flags = ["--listen", "tcp://127.0.0.1:*", "--pipeline", LAB, "--json"]
    with running("up", *flags, cwd=tmp_path, env={"REELWIRE_MARK": mark}) as process:
        endpoint = events_until(process, "ready")[-1]["endpoint"]
        (broker,) = [pid for pid, line in marked(mark).items() if "reelwire broker" in line]
        with open_process(broker) as exited:
            os.kill(broker, signal.SIGKILL)
            assert select.select([exited], [], [], 30)[0]
        with Client(endpoint, connect_timeout_s=30) as client:
            assert client.status()["version"] == __version__
        process.send_signal(signal.SIGINT)
        assert events_until(process, "stopped")[-1]["in_order"] is True
        process.communicate(timeout=60)
    assert left_running(mark) == []


@contextmanager
def open_process(pid: int) -> Iterator[int]:
    """A descriptor that is readable when the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_up_tells_what_a_worker_refused_and_leaves_nothing(reelwire: Reelwire, mark: str) -> None:
    """The worker's own sentence, exit code 2, and neither broker nor worker runs any more."""
    ended = reelwire(
        "up", "--listen", "tcp://127.0.0.1:*", "--option", "model=huge", env={"REELWIRE_MARK": mark}, limit_s=60
    )
    assert ended.code == 2
    assert "worker-1: model: there is no 'huge'; accepted: tiny" in ended.err.splitlines()[-1]
    assert ended.err.count("there is no 'huge'") == 1
    assert left_running(mark) == []


def test_a_second_ctrl_c_ends_up_at_once(tmp_path: Path, lab_gate: Path, mark: str) -> None:
    """While a session drains that would drain for long; exit code 1, nothing left."""
    flags = ["--listen", "tcp://127.0.0.1:*", "--pipeline", LAB, "--json"]
    with running("up", *flags, cwd=tmp_path, env={"REELWIRE_MARK": mark}) as process:
        endpoint = events_until(process, "ready")[-1]["endpoint"]
        with Client(endpoint) as client:
            session = client.open_session("lab", chunks=3, hang_stage="draw", hang_index=0, gate=str(lab_gate), seed=1)
            session.press("w")
            with lab_gate.open("wb"):  # blocks until the stage hangs
                process.send_signal(signal.SIGINT)
                events_until(process, "draining")
                process.send_signal(signal.SIGINT)
                assert events_until(process, "stopped")[-1]["in_order"] is False
                process.communicate(timeout=30)
    assert process.returncode == 1
    assert left_running(mark) == []


@pytest.fixture
def lab_gate(tmp_path: Path) -> Path:
    """A named pipe at which a stage of the lab pipeline waits."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    return gate


def test_the_demo_makes_a_world_from_a_photograph(reelwire: Reelwire, tmp_path: Path, mark: str) -> None:
    """A video of 9 + 12*(chunks-1) frames, its record, a contact sheet, a summary; and nothing runs afterwards."""
    ended = reelwire("demo", "--out", "made", "--chunks", "2", "--json", env={"REELWIRE_MARK": mark}, limit_s=115)
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert summary["result"]["state"] == "completed"
    assert summary["result"]["frames"] == 21
    assert read_video(tmp_path / "made" / "world.mp4")[0].shape[0] == 21
    assert summary["timings"]["live_change_to_frame_s"]["count"] > 0
    assert 0 < summary["peak_bytes"]["sum"] < 6 * 2**30
    record = json.loads((tmp_path / "made" / "world.json").read_text())
    assert record["request"]["image"]["path"].endswith("launch_pad.jpg")
    assert (tmp_path / "made" / "world.png").stat().st_size > 10_000
    assert (tmp_path / "made" / "timeline.png").stat().st_size > 5_000
    written = ["timeline.png", "timeline.trace.json", "world.json", "world.mp4", "world.png"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == written
    assert left_running(mark) == []


def test_ctrl_c_ends_the_demo_with_everything_it_started(tmp_path: Path, mark: str) -> None:
    """While the worker loads; exit code 1."""
    with running("demo", "--out", "made", cwd=tmp_path, env={"REELWIRE_MARK": mark}) as process:
        assert process.stderr is not None
        assert "broker at" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped" in err
    assert "Traceback" not in err
    assert not (tmp_path / "made").exists()
    assert left_running(mark) == []
