"""What is recorded of a stream, however it ends; the session is one that the test makes."""

# ruff: noqa: D102  the methods are those of the real ones

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

from reelwire import Chunk
from reelwire.commands.recipe import Recipe, Record, recipe_from
from reelwire.commands.recording import record_stream
from reelwire.controls import Control
from reelwire.errors import ControlError, ReelwireError, RequestError, SessionClosed, SessionFailed, WireError
from reelwire.media import read_video
from reelwire.messages import ChunkTiming
from reelwire.spec import Edge, StageSpec, StreamSpec

SPEC = StreamSpec(
    "toy", (StageSpec("make", ("control",), ("frames",)),), (Edge("control"), Edge("frames")), ("control",), ("frames",),
    ("make",), "control", 9, 2, 2, 16.0, control_names=("w",),
)  # fmt: skip


class Session:
    """Gives chunks until one is told to raise; a control that is told to be refused is."""

    parameters: Mapping[str, Any] = {"seed": 1}

    def __init__(self, chunks: int, breaks: dict[int, Exception], refused: dict[int, Exception]) -> None:
        self.chunks, self.breaks, self.refused = chunks, breaks, refused
        self.cancelled = False

    def submit(self, index: int, control: Control) -> None:
        assert control.keys == ("w",)
        if index in self.refused:
            raise self.refused[index]

    def __iter__(self) -> Iterator[Chunk]:
        for index in range(self.chunks):
            if index in self.breaks:
                raise self.breaks[index]
            frames = np.full((2, 16, 16, 3), 50 * index, np.uint8)
            timing = ChunkTiming(0.1, 0.1 * index, None, {})
            control = Control(keys=["w"])
            yield Chunk(index, frames, control, "explicit", {}, timing, False, {}, 0.0, None, ())

    def metrics(self) -> dict[str, Any]:
        return {}

    def cancel(self, timeout: float) -> None:
        assert timeout > 0
        self.cancelled = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.cancelled = self.cancelled or kind is not None


class Client:
    """Opens the one session."""

    def __init__(self, session: Session | Exception) -> None:
        self.session = session

    def status(self) -> dict[str, Any]:
        return {}

    def open_session(self, _pipeline: str, **_given: object) -> Session:
        if isinstance(self.session, Exception):
            raise self.session
        return self.session


def streamed(session: Session | Exception, mp4: Path) -> Record:
    recipe = Recipe("toy", None, 4, {}, tuple(Control(keys=["w"]) for _ in range(4)))
    client: Any = Client(session)
    return record_stream(client, SPEC, recipe, None, mp4)


def result_of(mp4: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(mp4.with_suffix(".json").read_text())
    result: dict[str, Any] = held["result"]
    return result


@pytest.mark.parametrize(
    ("breaks", "refused", "error"),
    [
        ({2: SessionFailed("the stage broke")}, {}, SessionFailed),
        ({2: WireError("a chunk holds nonsense")}, {}, WireError),
        ({2: OSError("no space left")}, {}, OSError),
        ({}, {3: ControlError("malformed", "not like that")}, ControlError),
    ],
)
def test_whatever_ends_a_stream_what_was_made_is_recorded(
    tmp_path: Path, breaks: dict[int, Exception], refused: dict[int, Exception], error: type[Exception]
) -> None:
    """The video plays, its record says why it is short and makes its frames again, the session is cancelled."""
    mp4 = tmp_path / "out.mp4"
    session = Session(4, breaks, refused)
    with pytest.raises(error):
        streamed(session, mp4)
    made = 2 if breaks else 1
    result = result_of(mp4)
    assert (result["state"], result["frames"]) == ("failed", 2 * made)
    assert result["reason"] == str(next(iter({**breaks, **refused}.values())))
    assert read_video(mp4)[0].shape[0] == 2 * made
    assert recipe_from(mp4.with_suffix(".json"))[0].chunks == made
    assert session.cancelled


def test_a_session_that_has_ended_takes_no_control_and_says_why_itself(tmp_path: Path) -> None:
    """A control that comes too late is not what the stream failed of."""
    refused = dict.fromkeys(range(1, 4), SessionClosed("over"))
    record = streamed(Session(3, {}, dict(refused)), tmp_path / "out.mp4")
    assert (record.state, len(record.chunks)) == ("closed", 3)


def test_a_record_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it can't be written the one before stays, and no part of it lies beside."""
    mp4 = tmp_path / "out.mp4"
    streamed(Session(4, {}, {}), mp4)
    before = mp4.with_suffix(".json").read_bytes()

    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        streamed(Session(2, {}, {}), mp4)
    assert mp4.with_suffix(".json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.mp4"]


def test_a_session_that_was_not_opened_leaves_no_file(tmp_path: Path) -> None:
    """What is refused makes nothing."""
    error: ReelwireError = RequestError("seed", "is odd")
    with pytest.raises(RequestError):
        streamed(error, tmp_path / "out.mp4")
    assert not list(tmp_path.iterdir())
