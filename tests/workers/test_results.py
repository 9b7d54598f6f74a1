"""Files of results: equal frames give equal bytes, and what was encoded can be read again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reelwire import media
from reelwire.errors import RequestError
from reelwire.messages import FileOffer
from reelwire.pipeline.job import JobOutput
from reelwire.workers import results
from reelwire.workers.emulated import Shown, draw, read

CLIP = draw(Shown(40, (), 0xDEADBEEF), 5, 96, 128)


def write_result(folder: Path, suffix: str, output: JobOutput, written: Callable[[], None] = lambda: None) -> FileOffer:
    """Under the name that it is offered by."""
    part, offer = results.write_result(folder, suffix, output, written)
    part.replace(offer.path)
    return offer


@pytest.mark.parametrize("suffix", [".mp4", ".png"])
def test_groups_12_equal_frames_give_equal_bytes(tmp_path: Path, suffix: str) -> None:
    """A result that is made again has the hash of the first."""
    offers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        offers.append(write_result(tmp_path / name, suffix, JobOutput(CLIP[:1] if suffix == ".png" else CLIP)))
    data = Path(offers[0].path).read_bytes()
    assert offers[0].file == offers[1].file == hashlib.sha256(data).hexdigest()
    assert offers[0].nbytes == len(data)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [offers[0].file]


def test_a_clip_shows_what_was_drawn(tmp_path: Path) -> None:
    """Frames and their rate come out of the file; the patterns survive the encoder, which says each frame that it has."""
    told: list[int] = []
    offer = write_result(tmp_path, ".mp4", JobOutput(CLIP, 24.0), lambda: told.append(1))
    frames, fps = media.read_video(offer.path)
    assert frames.shape == CLIP.shape
    assert fps == 24.0
    assert len(told) == len(CLIP)
    assert {(read(frame).index, read(frame).trail) for frame in frames} == {(40, 0xDEADBEEF)}


def test_a_picture_is_exact(tmp_path: Path) -> None:
    """PNG loses nothing."""
    offer = write_result(tmp_path, ".png", JobOutput(CLIP[2:3]))
    assert np.array_equal(media.load_image(offer.path), CLIP[2])


def test_what_the_encoder_refuses_leaves_no_file(tmp_path: Path) -> None:
    """A rate of frames that no file has."""
    with pytest.raises(RequestError, match="fps"):
        write_result(tmp_path, ".mp4", JobOutput(CLIP, 5000.0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("suffix", "shape"), [(".mp4", (200, 16, 256)), (".mp4", (12, 256, 256)), (".png", (1, 512, 512))]
)
def test_groups_13_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, full_disk: None, suffix: str, shape: tuple[int, int, int]
) -> None:
    """Whether it is full while frames are written or at the end of the file: the room is free again at once."""
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    with pytest.raises(OSError, match="File too large"):
        write_result(tmp_path, suffix, JobOutput(noise))
    assert not list(tmp_path.iterdir())
