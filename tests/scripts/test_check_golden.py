"""The golden checker's own behaviour, on sets made for the purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from reelwire.pipeline.world.sampler import flow_schedule

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_golden.py"


def run(folder: Path) -> tuple[int, list[dict[str, Any]], str]:
    command = [sys.executable, str(SCRIPT), str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def write_schedule(folder: Path, change: float = 0.0) -> None:
    """A sampler set with one schedule, of our own making or moved by `change`."""
    folder.mkdir(parents=True)
    schedule = flow_schedule(4.0)
    counts = torch.bincount(schedule.timesteps)
    entry = {"shift": 4.0, "distinct_timesteps": int((counts > 0).sum()), "max_duplicates": int(counts.max())}
    save_file({"timesteps": schedule.timesteps, "sigmas": schedule.sigmas + change}, folder / "s.safetensors")
    (folder / "index.json").write_text(json.dumps({"set": "sampler", "files": {"s.safetensors": entry}}))


def test_files_within_tolerance_pass(tmp_path: Path) -> None:
    """A set that agrees gives one line per file and exit status 0; sets are found in folders of any depth."""
    write_schedule(tmp_path / "a" / "b")
    code, lines, _ = run(tmp_path)
    assert code == 0
    assert [(line["folder"], line["file"], line["status"]) for line in lines] == [("a/b", "s.safetensors", "ok")]


def test_a_file_out_of_tolerance_fails(tmp_path: Path) -> None:
    """A moved number gives exit status 1, with the error, the tolerance and the field."""
    write_schedule(tmp_path / "a", change=1e-3)
    code, [line], _ = run(tmp_path)
    assert code == 1
    assert line["status"] == "out"
    assert line["error"] > line["tolerance"] == 1.0
    assert "sigmas" in line["note"]


def test_a_file_that_can_not_be_read_fails_alone(tmp_path: Path) -> None:
    """A missing file is out with the reason, and the other files are still compared."""
    write_schedule(tmp_path / "a")
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    index["files"]["gone.safetensors"] = index["files"]["s.safetensors"]
    (tmp_path / "a" / "index.json").write_text(json.dumps(index))
    code, lines, _ = run(tmp_path)
    assert code == 1
    assert {line["file"]: line["status"] for line in lines} == {"s.safetensors": "ok", "gone.safetensors": "out"}


def test_every_set_of_the_world_model_has_a_checker(tmp_path: Path) -> None:
    """A file that isn't there is out then, and not passed over as one of a model that isn't here."""
    names = ["causal_dit", "control", "denoise_rollout", "end_to_end", "geometry", "sampler", "service_traces"]
    names.append("vae_streaming")
    for name in names:
        (tmp_path / name).mkdir()
        index = {"set": name, "files": {"gone.safetensors": {}}}
        (tmp_path / name / "index.json").write_text(json.dumps(index))
    code, lines, _ = run(tmp_path)
    assert code == 1
    assert [(line["folder"], line["status"]) for line in lines] == [(name, "out") for name in names]


def test_sets_without_a_model_are_not_compared(tmp_path: Path) -> None:
    """A set of a model that isn't here is listed as such and fails nothing."""
    (tmp_path / "index.json").write_text(json.dumps({"set": "hologram", "files": {"x.safetensors": {}}}))
    code, [line], _ = run(tmp_path)
    assert code == 0
    assert (line["status"], line["note"]) == ("not compared", "no such model here yet")


@pytest.mark.parametrize("make", [False, True])
def test_nothing_to_check_is_wrong_usage(tmp_path: Path, make: bool) -> None:
    """A folder that isn't there, or one without any set, is answered with a sentence and exit status 2."""
    folder = tmp_path / "x"
    if make:
        folder.mkdir()
    code, lines, complaint = run(folder)
    assert (code, lines) == (2, [])
    assert str(folder) in complaint
