"""The example programs of jobs, run as their texts say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from reelwire import Client
from reelwire.media import read_video

from .conftest import LIMIT_S, Reelwire, environment, ready_line, running

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def ran(example: str, *arguments: str, broker: str, folder: Path) -> str:
    """What an example prints."""
    program = [sys.executable, "-P", str(EXAMPLES / example), *arguments]
    given = environment({"REELWIRE_BROKER": broker})
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=folder, env=given)
    assert done.returncode == 0, done
    return done.stdout


def test_a_kind_of_job_of_ones_own_runs_from_its_file(reelwire: Reelwire, broker: str, tmp_path: Path) -> None:
    """Its program makes a clip and has it melted; the command does so by its flags, and refuses what the spec doesn't take."""
    jobs = ("--pipeline", "emulated", "--jobs", f"{EXAMPLES / 'own_job.py'}:jobs")
    with running("worker", "--broker", broker, "--name", "one", *jobs, cwd=tmp_path) as worker:
        ready_line(worker)
        assert ran("own_job.py", broker=broker, folder=tmp_path).endswith("wrote melt.mp4\n")
        where = {"REELWIRE_BROKER": broker}
        edit = ("edit", "melt", "--video", "in.mp4", "--set", "strength=0.5", "--json")
        done = reelwire(*edit, "--out", "more.mp4", env=where)
        assert done.code == 0, done
        assert json.loads(done.out)[0]["facts"] == {"frames": 24}
        wrong = reelwire(*edit, "--set", "steps=0", env=where)
        assert (wrong.code, "steps: 0 is below the least accepted, 1" in wrong.sentence()) == (2, True)
    clips = [read_video(tmp_path / name)[0].astype(float) for name in ("in.mp4", "melt.mp4", "more.mp4")]
    assert {clip.shape for clip in clips} == {(24, 96, 128, 3)}
    sharp = [
        float(np.square(np.diff(clip, axis=0)).mean()) for clip in clips
    ]  # how much frames differ from the next ones
    assert sharp[0] > 2 * sharp[1] > 2 * sharp[2]


def test_the_state_of_an_own_job_is_where_another_attempt_goes_on(broker: str, tmp_path: Path) -> None:
    """Its leader is stopped in the middle, another one goes on from what was kept, to the same bytes."""
    jobs = ("--pipeline", "emulated", "--jobs", f"{EXAMPLES / 'own_job.py'}:jobs")
    with (
        running("worker", "--broker", broker, "--name", "one", *jobs, cwd=tmp_path) as worker,
        Client(broker) as client,
    ):
        ready_line(worker)
        ran("own_job.py", broker=broker, folder=tmp_path)
        first = client.submit_edit("melt", video=tmp_path / "in.mp4", steps=1000)
        for status in first.progress(LIMIT_S):
            if status.step >= 100 and worker.poll() is None:
                worker.terminate()
                worker.wait(LIMIT_S)
                break
        with running("worker", "--broker", broker, "--name", "two", *jobs, cwd=tmp_path) as other:
            ready_line(other)
            again = client.submit_edit("melt", video=tmp_path / "in.mp4", steps=1000)
            assert first.result(timeout=LIMIT_S) == again.result(timeout=LIMIT_S)
            assert first.status().attempt == 2
            assert again.status().attempt == 1


def test_the_example_that_edits_a_clip_runs(reelwire: Reelwire, broker: str, tmp_path: Path) -> None:
    """With the kind that it names, on a clip that the kind `emulated` has drawn."""
    jobs = ("--pipeline", "emulated", "--jobs", "emulated", "--job-option", "step_s=0.01")
    with running("worker", "--broker", broker, "--name", "one", *jobs, cwd=tmp_path) as worker:
        ready_line(worker)
        drawn = reelwire("edit", "emulated", "--out", "in.mp4", env={"REELWIRE_BROKER": broker})
        assert drawn.code == 0, drawn
        said = ran("edit_clip.py", "in.mp4", "make it snow", "out.mp4", broker=broker, folder=tmp_path)
    assert said.endswith("wrote out.mp4\n")
    assert (tmp_path / "out.mp4").is_file()
