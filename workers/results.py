"""The file of a result: a clip or a picture of the frames that a job has made."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from reelwire import media
from reelwire.messages import FileOffer

from .files import digest_of

if TYPE_CHECKING:
    from reelwire.pipeline.job import JobOutput


def write_result(folder: Path, suffix: str, output: JobOutput, written: Callable[[], None]) -> tuple[Path, FileOffer]:
    """Write frames into a file of the folder; equal frames give equal bytes.

    Args:
        folder: where.
        suffix: ``.mp4``: a clip of all frames, as `media.VideoWriter` has it; ``.png``: a picture of the first.
        output: frames uint8 [frames, height, width, 3], and how fast they follow.
        written: called after each frame of a clip.

    Returns:
        The file under a name that is nobody else's, and what it is offered as: `Files.adopt` gives it that name.

    Raises:
        RequestError: the encoder refuses them.
        OSError: there is no room.
    """
    part = folder / f"result-{secrets.token_hex(8)}{suffix}"
    try:
        if suffix == ".png":
            _write_picture(part, output.frames[0])
        else:
            with media.VideoWriter(part, output.fps) as video:
                for frame in output.frames:
                    video.write(frame)
                    written()
        with part.open("rb") as file:
            digest, nbytes = digest_of(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part, FileOffer(digest, str(folder / digest), nbytes)


def _write_picture(path: Path, frame: media.Pixels) -> None:
    from PIL import Image

    Image.fromarray(np.ascontiguousarray(frame)).save(path, "PNG")
