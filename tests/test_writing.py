"""What goes into a file goes into it whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from reelwire.writing import write_whole


def test_a_write_that_takes_less_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it takes at once, all of it is there in the end, also of a view of larger items."""
    taken: list[int] = []
    write = os.write

    def some(descriptor: int, data: memoryview) -> int:
        taken.append(write(descriptor, data[:1000]))
        return taken[-1]

    monkeypatch.setattr(os, "write", some)
    numbers = np.arange(1300, dtype=np.uint16)
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        for data in (b"", b"head", numbers.data):
            write_whole(file.fileno(), data)
    assert path.read_bytes() == b"head" + numbers.tobytes()
    assert taken == [4, 1000, 1000, 600]


def test_no_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after a part of it is an error, not a shorter file."""
    answers = [3]

    def full(_: int, data: memoryview) -> int:
        if not answers:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return min(len(data), answers.pop())

    monkeypatch.setattr(os, "write", full)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="No space left"):
        write_whole(file.fileno(), b"12345")
