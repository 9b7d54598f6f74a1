"""`reelwire stream` against a real broker and worker: the MP4, its record, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from reelwire.media import read_video

from .conftest import LAB, Ended, Reelwire, running

FIRST, NEXT = 5, 4
"""Frames of the lab pipeline's chunks."""


def record_of(path: Path) -> dict[str, Any]:
    """The record beside a video."""
    held: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return held


def frames_of(path: Path) -> int:
    """Frames of a video, counted by decoding it."""
    return int(read_video(path)[0].shape[0])


def lab_stream(reelwire: Reelwire, endpoint: str, *flags: str) -> Ended:
    """Stream from the lab pipeline."""
    return reelwire("stream", "--pipeline", "lab", "--endpoint", endpoint, "--out", "out.mp4", *flags)


def test_a_trace_becomes_a_video_and_its_record(reelwire: Reelwire, lab: str, tmp_path: Path) -> None:
    """The MP4 plays, and the record says what was asked for, what was applied, and when."""
    ended = lab_stream(reelwire, lab, "--chunks", "3", "--keys", "0 +w; 0.4 tap d", "--set", "seed=4", "--json")
    assert ended.code == 0, ended.err
    assert frames_of(tmp_path / "out.mp4") == FIRST + 2 * NEXT
    record = record_of(tmp_path / "out.mp4")
    assert record["request"]["parameters"]["seed"] == 4
    assert (record["request"]["pace"], record["request"]["control_binding"]) == ("asap", None)
    assert [entry["keys"] for entry in record["controls"]] == [["w"], ["d", "w"], ["w"]]
    assert {entry["source"] for entry in record["controls"]} == {"explicit"}
    assert record["facts"] == [{"keys": ["w"]}, {"keys": ["d", "w"]}, {"keys": ["w"]}]
    assert record["result"]["state"] == "completed"
    assert record["result"]["frames"] == FIRST + 2 * NEXT
    assert record["versions"]["workers"][0]["name"] == "lab-worker"
    assert [chunk["index"] for chunk in record["chunks"]] == [0, 1, 2]
    assert record["timings"]["period_s"]["count"] == 2
    assert record["metrics"]["chunks"] == 3
    assert record["timings"]["first_output_s"] == record["metrics"]["first_output_s"]["max"] > 0
    assert json.loads(ended.out)["result"] == record["result"]


def test_a_table_is_printed_without_json(reelwire: Reelwire, lab: str) -> None:
    """Period and latency; no bar where standard error is no terminal."""
    ended = lab_stream(reelwire, lab, "--chunks", "2")
    assert (ended.code, ended.err) == (0, "")
    for word in ("completed", "chunk period", "control to frame", "out.mp4", "out.json"):
        assert word in ended.out


def test_a_record_makes_the_same_frames_again(reelwire: Reelwire, lab: str, tmp_path: Path) -> None:
    """From a live session by the wall clock too: what was applied then is submitted by index now."""
    assert lab_stream(reelwire, lab, "--chunks", "4", "--wall-clock", "--keys", "0 +w", "--set", "seed=9").code == 0
    first = (tmp_path / "out.mp4").read_bytes()
    again = reelwire("stream", "--from", "out.json", "--out", "again.mp4", "--endpoint", lab, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["same_frames"] is True
    assert {entry["source"] for entry in record_of(tmp_path / "again.mp4")["controls"]} == {"explicit"}
    assert hashlib.sha256((tmp_path / "again.mp4").read_bytes()).digest() == hashlib.sha256(first).digest()


def test_frames_that_differ_from_the_record_are_not_called_the_same(
    reelwire: Reelwire, lab: str, tmp_path: Path
) -> None:
    """Exit code 1 and a sentence, with the copy and its record kept, and the original as it was."""
    assert lab_stream(reelwire, lab, "--chunks", "2", "--set", "seed=9").code == 0
    record = record_of(tmp_path / "out.mp4")
    record["request"]["parameters"]["seed"] = 10  # what another version or device may do
    (tmp_path / "out.json").write_text(json.dumps(record))
    before = (tmp_path / "out.json").read_bytes(), (tmp_path / "out.mp4").read_bytes()
    again = reelwire("stream", "--from", "out.json", "--out", "again.mp4", "--endpoint", lab, "--json")
    assert again.code == 1
    assert "the frames of again.mp4 are not those of out.json" in again.sentence()
    assert json.loads(again.out)["same_frames"] is False
    assert record_of(tmp_path / "again.mp4")["result"]["frames_sha256"] != record["result"]["frames_sha256"]
    over = reelwire("stream", "--from", "out.json", "--out", "out.mp4", "--endpoint", lab)
    assert over.code == 2
    assert "out: " in over.sentence()
    assert ((tmp_path / "out.json").read_bytes(), (tmp_path / "out.mp4").read_bytes()) == before


def test_live_keys_end_with_what_they_asked_for(reelwire: Reelwire, lab: str, tmp_path: Path) -> None:
    """One tap is one chunk; with nothing held after it the session is closed instead of waiting."""
    flags = ("--chunks", "50", "--wall-clock", "--keys", "0 tap d", "--pace", "realtime", "--json")
    ended = lab_stream(reelwire, lab, *flags)
    assert ended.code == 0, ended.err
    record = record_of(tmp_path / "out.mp4")
    assert (record["request"]["pace"], record["request"]["control_binding"]) == ("realtime", "late")
    assert [(entry["source"], entry["keys"]) for entry in record["controls"]] == [("tap", ["d"])]
    assert record["result"]["state"] == "closed"
    assert len(record["chunks"][0]["change_to_frame_s"]) == 1


def test_frames_may_be_cut_to_whole_chunks(reelwire: Reelwire, lab: str, tmp_path: Path) -> None:
    """With the policy `truncate`."""
    lab_ended = lab_stream(reelwire, lab, "--frames", "13", "--frames-policy", "truncate")
    assert lab_ended.code == 0, lab_ended.err
    assert frames_of(tmp_path / "out.mp4") == 13


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--frames", "12"], ["frames: 12", "4k+1", "accepted: 5 + 4*n"]),
        (["--frames", "1"], ["frames: 1", "accepted: 5 + 4*n"]),
        (["--chunks", "5000"], ["chunks: 5000", "at most 4096"]),
        (["--keys", "0 +x"], ["keys: line 1", "unknown key 'x'", "w, s, a, d"]),
        (["--set", "colour=red"], ["colour: unknown parameter", "seed"]),
        (["--set", "seed=red"], ["seed", "an integer"]),
        (["--seed", "-1"], ["seed: -1", "least accepted, 0"]),
        (["--set", "refuse=mood"], ["mood: is refused by the stage"]),
        (["--window", "3"], ["window: unknown parameter"]),
    ],
)
def test_what_the_pipeline_does_not_take_is_refused(
    reelwire: Reelwire, lab: str, tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    """One sentence that names the field, exit code 2, and no file."""
    ended = lab_stream(reelwire, lab, *flags)
    assert ended.code == 2, ended
    for word in words:
        assert word in ended.sentence()
    assert not (tmp_path / "out.mp4").exists()
    assert not (tmp_path / "out.json").exists()


def test_an_unknown_pipeline_is_answered_with_the_known_ones(reelwire: Reelwire, lab: str) -> None:
    """As the broker has them."""
    ended = reelwire("stream", "--pipeline", "moon", "--endpoint", lab)
    assert ended.code == 2
    assert "pipeline: 'moon' is unknown; accepted: lab" in ended.sentence()


def test_a_stream_waits_for_the_first_worker(broker: str, tmp_path: Path) -> None:
    """Begun before any worker is there, it says that it waits, and is made when one has come."""
    flags = ["--pipeline", "lab", "--chunks", "1", "--worker-wait", "80", "--out", "lab.mp4", "--endpoint", broker]
    with running("stream", *flags, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert "waits up to 80 s for a worker" in process.stderr.readline()
        with running("worker", "--broker", broker, "--pipeline", LAB, cwd=tmp_path):
            _, err = process.communicate(timeout=80)
    assert process.returncode == 0, err
    assert (tmp_path / "lab.mp4").exists()


def test_without_any_worker_the_work_failed_and_the_usage_is_right(reelwire: Reelwire, broker: str) -> None:
    """Exit code 1 after the wait, so that a script can tell it from a wrong name."""
    ended = reelwire("stream", "--pipeline", "lab", "--worker-wait", "0", "--endpoint", broker)
    assert ended.code == 1
    assert "no worker has come yet" in ended.sentence()


def test_a_stage_error_keeps_what_was_made(reelwire: Reelwire, lab: str, tmp_path: Path) -> None:
    """Exit code 1, the worker's words, and the chunks below it in a video that plays."""
    ended = lab_stream(reelwire, lab, "--chunks", "5", "--set", "fail_stage=draw", "--set", "fail_index=2")
    assert ended.code == 1
    assert "draw broke at chunk 2" in ended.sentence()
    assert ended.sentence().endswith("; out.mp4 and its record hold the 9 frames so far")
    assert frames_of(tmp_path / "out.mp4") == FIRST + NEXT
    record = record_of(tmp_path / "out.mp4")
    assert record["result"]["state"] == "failed"
    assert "draw broke at chunk 2" in record["result"]["reason"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_video_so_far(lab: str, tmp_path: Path, number: signal.Signals) -> None:
    """The MP4 plays and the record says that it was stopped; the next stream is served."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    hang = ["--set", "hang_stage=show", "--set", "hang_index=2", "--set", f"gate={gate}"]
    flags = ["stream", "--pipeline", "lab", "--endpoint", lab, "--chunks", "9", "--out", "out.mp4", *hang]
    with running(*flags, cwd=tmp_path) as process:
        # blocks until the stage waits for chunk 2, which starts only when the client has taken chunk 0
        with gate.open("wb"):
            process.send_signal(number)
            assert process.stderr is not None
            assert not process.stdout or process.poll() is None
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped after" in err
    assert "so far" in err
    record = record_of(tmp_path / "out.mp4")
    assert record["result"]["state"] == "stopped"
    assert frames_of(tmp_path / "out.mp4") == record["result"]["frames"] in (FIRST, FIRST + NEXT)


def test_a_timeline_is_drawn_beside_the_video(reelwire: Reelwire, lab: str, tmp_path: Path) -> None:
    """A picture and a trace with every chunk of the stream; the table names the picture."""
    ended = lab_stream(reelwire, lab, "--chunks", "3", "--timeline", "when.png")
    assert ended.code == 0, ended.err
    assert "when.png" in ended.out
    assert (tmp_path / "when.png").read_bytes().startswith(b"\x89PNG")
    names = {event["name"] for event in json.loads((tmp_path / "when.trace.json").read_text())["traceEvents"]}
    assert {f"{name} {index}" for name in ("control", "mix", "draw", "show", "commit") for index in range(3)} <= names


@pytest.mark.parametrize(
    ("path", "reason"), [("when.jpg", "ends in .png"), ("nowhere/when.png", "the folder nowhere is not there")]
)
def test_a_timeline_that_cannot_be_written_is_refused_first(here: Reelwire, path: str, reason: str) -> None:
    """Before anybody is asked for anything."""
    ended = here("stream", "--pipeline", "lab", "--timeline", path)
    assert ended.code == 2
    assert reason in ended.sentence()
