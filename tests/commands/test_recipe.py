"""A record holds what makes its frames again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire.commands.recipe import Recipe, Record, digest, percentiles, plain_control, recipe_from
from reelwire.commands.shared import plain
from reelwire.controls import Control
from reelwire.errors import RequestError


def written(folder: Path, controls: list[Control], image: Path | None) -> Path:
    """A record of these controls."""
    recipe = Recipe(
        "world", image, len(controls), {"prompt": "p", "seed": 3}, None, tensors={"intrinsics": [1, 2, 3, 4]}
    )
    record = Record(recipe, "world.mp4", 16.0, "completed", frames_sha256="abc")
    record.chunks = [{"index": index} for index in range(len(controls))]
    record.applied = [plain_control(control, "held") for control in controls]
    path = folder / "world.json"
    path.write_text(json.dumps(record.to_json(folder), default=plain))
    return path


def test_a_record_gives_its_recipe_back(tmp_path: Path) -> None:
    """Keys, resets and poses come back exactly; so do parameters, tensors and the picture's place."""
    image = tmp_path / "picture.png"
    image.write_bytes(b"pixels")
    poses = np.tile(np.eye(4), (3, 1, 1))
    poses[:, :3, 3] = np.random.default_rng(0).standard_normal((3, 3))
    controls = [Control(keys={"w", "d"}), Control(keys=(), reset_pose=True), Control(poses=poses, translation_norm=0.1)]
    recipe, frames = recipe_from(written(tmp_path, controls, image))
    assert recipe.controls == tuple(controls)
    assert (recipe.pipeline, recipe.chunks, recipe.image) == ("world", 3, image)
    assert recipe.parameters == {"prompt": "p", "seed": 3}
    assert recipe.tensors == {"intrinsics": [1, 2, 3, 4]}
    assert frames == "abc"


def test_the_picture_is_checked_and_may_have_moved(tmp_path: Path) -> None:
    """By its digest, wherever it lies now."""
    image = tmp_path / "picture.png"
    image.write_bytes(b"pixels")
    path = written(tmp_path, [Control(keys=())], image)
    moved = tmp_path / "moved.png"
    image.rename(moved)
    with pytest.raises(RequestError, match=r"^image: .*is not a file"):
        recipe_from(path)
    assert recipe_from(path, moved)[0].image == moved
    moved.write_bytes(b"other pixels")
    with pytest.raises(RequestError, match=r"^image: .*is another picture"):
        recipe_from(path, moved)


def test_a_record_without_a_picture_needs_none(tmp_path: Path) -> None:
    """Not every pipeline starts from one."""
    assert recipe_from(written(tmp_path, [Control(keys=())], None))[0].image is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', '{"format": "reelwire-stream-1"}', "\x00"])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    """Whatever it is."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=r"^from: "):
        recipe_from(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"request": {"chunks": 0}}, r"request\.chunks is 0; accepted: an integer, 1 or more"),
        ({"request": {"chunks": "x"}}, r"request\.chunks is 'x'; accepted: an integer"),
        ({"request": {"chunks": 3}}, r"request\.chunks is 3; accepted: 2, as there are chunks"),
        ({"controls": [{"keys": []}]}, "there are 1 controls for 2 chunks; accepted: one for each"),
        ({"controls": [{"keys": []}] * 3}, "there are 3 controls for 2 chunks"),
        ({"controls": [{"keys": []}, {}]}, r"controls\[1\] has no 'keys'; accepted: "),
        ({"controls": [{"keys": []}, {"keys": 3}]}, r"controls\[1\]: keys: 3 is not a collection"),
        ({"controls": [{"keys": []}, 3]}, "entries of another kind than a record's"),
        ({"request": {"tensors": {"intrinsics": ["x"]}}}, r"tensors\.intrinsics is no array; accepted: lists of"),
        ({"request": {"tensors": {"intrinsics": [[1], [1, 2]]}}}, r"tensors\.intrinsics is no array"),
        ({"controls": 3}, "controls is no list"),
    ],
)
def test_a_record_that_was_cut_or_edited_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    """Its lengths must fit each other; the sentence names the entry, not what Python said about it."""
    path = written(tmp_path, [Control(keys=()), Control(keys=())], None)
    held = json.loads(path.read_text())
    for name, value in changed.items():
        held[name] = {**held[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(held))
    with pytest.raises(RequestError, match=f"^from: .*{words}") as refused:
        recipe_from(path)
    assert "Error" not in str(refused.value)


def test_a_stopped_record_gives_what_was_made(tmp_path: Path) -> None:
    """It asked for more chunks than it has, and that is no fault of it."""
    path = written(tmp_path, [Control(keys=())], None)
    held = json.loads(path.read_text())
    held["request"]["chunks"], held["result"]["state"] = 9, "stopped"
    path.write_text(json.dumps(held))
    assert recipe_from(path)[0].chunks == 1


def test_a_record_without_chunks_makes_nothing(tmp_path: Path) -> None:
    """It is refused instead of being an empty video."""
    with pytest.raises(RequestError, match=r"^from: .*no chunk"):
        recipe_from(written(tmp_path, [], None))


def test_percentiles_are_by_nearest_rank() -> None:
    """Of 1 to 100 the p-th percentile is p; of one value all are that one; of none there is only the count."""
    many = percentiles([float(value) for value in range(100, 0, -1)])
    assert many == {"count": 100, "mean": 50.5, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert percentiles([2.0]) == {"count": 1, "mean": 2.0, "p50": 2.0, "p90": 2.0, "p95": 2.0, "p99": 2.0, "max": 2.0}
    assert percentiles([]) == {"count": 0}


def test_a_digest_is_of_the_files_bytes(tmp_path: Path) -> None:
    """SHA-256 of nothing is the known one."""
    (tmp_path / "empty").write_bytes(b"")
    assert digest(tmp_path / "empty") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
