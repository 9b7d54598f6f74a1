"""When each chunk of a session passed what, and what waited for what: as a picture, and as a trace file.

Both are pure functions of the chunks' timings, which are by the broker's clock and begin when the session was ready. Rows
of the picture are the client's control, the stages in the order of the spec, and the commit; a bar is a chunk at a stage,
from its start to its result. Under it a thin bar says how long the stage stood still before, and for what: the colour is
the cause, and where the cause is another bar or a control, an arrow leads from there. The trace is in the
format of Chrome's about:tracing, which Perfetto opens too.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parts import ChunkTiming, StageTiming
from .spec import StreamSpec

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

Chunks = Sequence[tuple[int, ChunkTiming]]
"""Index and timing of chunks, in order."""
Colour = tuple[int, int, int]
Point = tuple[float, float]

WIDTH = 1600
BAND_CHUNKS = 16
"""Chunks of one band of the picture."""
BANDS_MAX = 12
"""Most bands of a picture; what doesn't fit is left out, and said to be."""

_LEFT, _RIGHT, _TOP, _LEGEND = 120, 24, 56, 44
_POINT_HALF = 7
_POINT_H, _STAGE_H, _BAR_H, _WAIT_H, _AXIS_H, _GAP_H = 34, 58, 26, 7, 34, 18
_INK, _FAINT, _GRID, _PAPER = (34, 38, 46), (150, 156, 166), (232, 234, 238), (255, 255, 255)
_CHUNKS: tuple[Colour, ...] = (
    (137, 180, 232),
    (244, 190, 130),
    (158, 212, 158),
    (226, 164, 190),
    (188, 174, 226),
    (214, 206, 130),
)
_CAUSES: dict[str, Colour] = {
    "input:control": (204, 51, 51),
    "input:encode_request": (120, 60, 170),
    "input:condition": (0, 140, 110),
    "input:latent": (25, 110, 190),
    "edge:condition": (90, 150, 20),
    "edge:latent": (0, 160, 200),
    "edge:frames": (140, 90, 40),
    "credit": (214, 120, 0),
    "actor_busy": (110, 110, 110),
    "pace": (170, 20, 120),
    "placement": (60, 60, 60),
}
"""The same in every picture, so that two can be compared."""
_OTHER_CAUSES: tuple[Colour, ...] = (
    (190, 70, 150),
    (70, 80, 200),
    (150, 130, 0),
    (0, 110, 60),
    (230, 90, 60),
    (80, 130, 160),
    (130, 30, 60),
    (160, 100, 220),
)
"""For what other pipelines wait for: a name keeps its colour as long as no other of the same picture has it."""
_STEPS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_TICKS_MAX = 16
_AT_ONCE_S = 0.005
"""What begins so soon after something else was caused by it."""


def draw_timeline(spec: StreamSpec, chunks: Chunks, title: str = "") -> Image:
    """The picture of some chunks of a session.

    Args:
        spec: names the stages, and what they take from each other.
        chunks: what is drawn, up to `BAND_CHUNKS` in a band and `BANDS_MAX` bands; all bands have the same scale.
        title: stands at the top.

    Returns:
        An RGB picture, `WIDTH` wide.
    """
    from PIL import Image, ImageDraw, ImageFont

    bands = _bands(chunks)
    rows = _Rows(spec)
    height = _TOP + max(1, len(bands)) * (rows.height + _AXIS_H + _GAP_H) + _LEGEND
    picture = Image.new("RGB", (WIDTH, height), _PAPER)
    draw = ImageDraw.Draw(picture)
    fonts = (ImageFont.load_default(20), ImageFont.load_default(15), ImageFont.load_default(13))
    causes = _colours(chunk for band in bands for chunk in band)
    draw.text((16, 14), title or spec.name, _INK, fonts[0])
    left_out = len(chunks) - sum(map(len, bands))
    said = _numbers(chunks) + (f"; the last {left_out} chunks are left out" if left_out else "")
    draw.text((WIDTH - _RIGHT, 20), said, _FAINT, fonts[1], anchor="ra")
    ranges = [_range(band) for band in bands]
    span = max((end - begin for begin, end in ranges), default=0.0)
    for number, (band, (begin, _)) in enumerate(zip(bands, ranges, strict=True)):
        top = _TOP + number * (rows.height + _AXIS_H + _GAP_H)
        _Band(draw, fonts, rows, top, band, (begin, begin + span), causes, dict(chunks)).draw()
    _legend(draw, fonts[1], height - _LEGEND + 6, causes)
    return picture


def trace(spec: StreamSpec, chunks: Chunks, title: str = "") -> dict[str, Any]:
    """The same as a trace: one track per stage, one for what it waits for, one for controls and one for commits."""
    tracks = ["control"]
    for one in spec.stages:
        tracks += [one.name, f"{one.name} waits"]
    tracks.append("commit")
    numbers = {name: number for number, name in enumerate(tracks, start=1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, title or spec.name)]
    for name, number in numbers.items():
        events += [_named("thread_name", number, name), _sorted_at(number)]
    for index, timing in chunks:
        about = {"chunk": index, "latency_s": timing.latency_s, "period_s": timing.period_s}
        for track, at in (("control", control_at(timing)), ("commit", timing.committed_s)):
            point = {"ph": "i", "s": "t", "name": f"{track} {index}", "cat": track, "ts": _us(at), "args": about}
            events.append({"pid": 1, "tid": numbers[track], **point})
        for name, stage in timing.stages.items():
            if name not in numbers:
                continue
            begins, ends = _us(stage.started_s), _us(stage.completed_s)
            held = {"ready_s": stage.ready_s, "admitted_s": stage.admitted_s, "waited_for": stage.waited_for}
            bar = {"ph": "X", "name": f"{name} {index}", "cat": "stage", "ts": begins, "dur": max(0, ends - begins)}
            events.append({"pid": 1, "tid": numbers[name], **bar, "args": {**about, **held}})
            if stage.waited_for and stage.waited_s > 0:
                since = _us(stage.admitted_s - stage.waited_s)
                gap = {"ph": "X", "name": _words(stage.waited_for), "cat": "wait", "ts": since}
                gap |= {"dur": _us(stage.waited_s), "args": {"chunk": index}}
                events.append({"pid": 1, "tid": numbers[f"{name} waits"], **gap})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_timeline(path: Path, spec: StreamSpec, chunks: Chunks, title: str = "") -> Path:
    """Write the picture to `path` as a PNG, and the trace beside it; the trace's path.

    Raises:
        OSError: one of them can't be written.
    """
    from .media import replacing

    beside = path.with_suffix(".trace.json")
    with replacing(path) as part:
        draw_timeline(spec, chunks, title).save(part, "PNG")
    with replacing(beside) as part:
        part.write_text(json.dumps(trace(spec, chunks, title)), encoding="utf-8")
    return beside


def control_at(timing: ChunkTiming) -> float:
    """When the control of a chunk was accepted or bound; where nobody said so, when its clock began."""
    return timing.committed_s - timing.latency_s if timing.control_s is None else timing.control_s


# --- the picture -----------------------------------------------------------------------------------------------------


class _Rows:
    """Which row lies where in a band, and what comes from where."""

    def __init__(self, spec: StreamSpec) -> None:
        self.names = ["control", *(stage.name for stage in spec.stages), "commit"]
        self.stages = {stage.name: stage for stage in spec.stages}
        self.makers = {artifact: stage.name for stage in spec.stages for artifact in stage.produces}
        self.makers[spec.control] = "control"
        self.outputs = spec.outputs
        self.capacities = {edge.artifact: edge.capacity for edge in spec.edges}
        ahead = spec.prefetch if spec.prefetch is not None and spec.prefetch.refill == "after_stage" else None
        self.prefetched = ahead.artifact if ahead else ""
        self.refill_after = ahead.refill_after if ahead else ""
        heights = [_POINT_H, *(_STAGE_H for _ in spec.stages), _POINT_H]
        self.tops = {name: sum(heights[:at]) for at, name in enumerate(self.names)}
        self.height = sum(heights)

    def consumer(self, artifact: str) -> str | None:
        """The first stage that takes an artifact."""
        return next((name for name, stage in self.stages.items() if artifact in stage.consumes), None)


@dataclass(slots=True)
class _Band:
    """A stretch of chunks with an axis of its own."""

    canvas: ImageDraw
    fonts: Sequence[FreeTypeFont | ImageFont]
    rows: _Rows
    top: int
    chunks: Chunks
    range_s: tuple[float, float]
    causes: Mapping[str, Colour]
    known: Mapping[int, ChunkTiming]

    def draw(self) -> None:
        """Rows from the back to the front: grid, arrows, bars."""
        begin, end = self.range_s
        span = max(end - begin, 1e-6)

        def x(at_s: float) -> float:
            return _LEFT + (at_s - begin) / span * (WIDTH - _LEFT - _RIGHT)

        self._grid(begin, end, x)
        for index, timing in self.chunks:
            self._flow(index, timing, x)
        for index, timing in self.chunks:
            for name, stage in timing.stages.items():
                if name in self.rows.stages:
                    self._bar(index, name, stage, x)
        for name, at in (("control", control_at), ("commit", lambda timing: timing.committed_s)):
            self._points(name, [(index, x(at(timing))) for index, timing in self.chunks])

    def _grid(self, begin: float, end: float, x: Callable[[float], float]) -> None:
        bottom = self.top + self.rows.height
        step = next((step for step in _STEPS_S if (end - begin) / step <= _TICKS_MAX), _STEPS_S[-1])
        first = int(begin / step) if begin >= 0 else 0
        for number in range(first, int(end / step) + 1):
            at = number * step
            if begin <= at <= end:
                self.canvas.line((x(at), self.top, x(at), bottom), _GRID)
                self.canvas.text((x(at), bottom + 5), f"{at:.10g} s", _FAINT, self.fonts[2], anchor="ma")
        for name in self.rows.names:
            y = self.top + self.rows.tops[name]
            self.canvas.line((_LEFT, y, WIDTH - _RIGHT, y), _GRID)
            height = _STAGE_H if name in self.rows.stages else _POINT_H
            self.canvas.text((_LEFT - 14, y + height / 2), name, _INK, self.fonts[1], anchor="rm")
        self.canvas.line((_LEFT, bottom, WIDTH - _RIGHT, bottom), _FAINT)

    def _flow(self, index: int, timing: ChunkTiming, x: Callable[[float], float]) -> None:
        """Where each bar's inputs came from; in the cause's colour what it waited for last."""
        for name, stage in timing.stages.items():
            if name not in self.rows.stages:
                continue
            into = (x(stage.started_s), self._bar_top(name))
            for artifact in self.rows.stages[name].consumes:
                waited = stage.waited_for == f"input:{artifact}"
                source = self._source(artifact, timing, x)
                if source is not None:
                    self._arrow(source, into, self.causes.get(stage.waited_for) if waited else None)
            below = self._below(index, stage, x)
            if below is not None:
                self._arrow(below, (into[0], into[1] + _BAR_H), self.causes.get(stage.waited_for))
        for maker in {self.rows.makers[artifact] for artifact in self.rows.outputs}.intersection(timing.stages):
            self._arrow(
                self._end(maker, timing, x), (x(timing.committed_s), self._middle("commit") - _POINT_HALF), None
            )

    def _source(self, artifact: str, timing: ChunkTiming, x: Callable[[float], float]) -> Point | None:
        """Where an input came from; None when nothing that is drawn made it."""
        maker = self.rows.makers.get(artifact, "")
        if maker == "control":
            return x(control_at(timing)), self._middle("control") + _POINT_HALF
        return self._end(maker, timing, x) if maker in timing.stages else None

    def _below(self, index: int, stage: StageTiming, x: Callable[[float], float]) -> Point | None:
        """What was waited for further down: room, which a consumer makes when it begins, or the end that refills."""
        kind, _, artifact = stage.waited_for.partition(":")
        if kind == "input" and artifact == self.rows.prefetched:
            name = self.rows.refill_after
            ends = [timing.stages[name].completed_s for timing in self.known.values() if name in timing.stages]
            at = max((end for end in ends if end <= stage.admitted_s), default=-math.inf)
            return (x(at), self._bar_top(name)) if stage.admitted_s - at < _AT_ONCE_S else None
        taker = self.rows.consumer(artifact)
        older = self.known.get(index - self.rows.capacities.get(artifact, 0))
        if kind != "edge" or taker is None or older is None or taker not in older.stages:
            return None
        return x(older.stages[taker].started_s), self._bar_top(taker)

    def _end(self, name: str, timing: ChunkTiming, x: Callable[[float], float]) -> Point:
        return x(timing.stages[name].completed_s), self._bar_top(name) + _BAR_H

    def _arrow(self, begin: Point, end: Point, colour: Colour | None) -> None:
        if colour is None:
            self.canvas.line((*begin, *end), (205, 209, 216), 1)
            return
        self.canvas.line((*begin, *end), colour, 2)
        x, y = end
        size = 5 if begin[1] < y else -5
        self.canvas.polygon(((x, y), (x - 4, y - size), (x + 4, y - size)), colour)

    def _bar(self, index: int, name: str, stage: StageTiming, x: Callable[[float], float]) -> None:
        top = self._bar_top(name)
        left, right = x(stage.started_s), max(x(stage.completed_s), x(stage.started_s) + 1)
        colour = _CHUNKS[index % len(_CHUNKS)]
        self.canvas.rectangle((left, top, right, top + _BAR_H), colour, _dark(colour))
        self.canvas.text(((left + right) / 2, top + _BAR_H / 2), str(index), _INK, self.fonts[2], anchor="mm")
        if stage.waited_for in self.causes and stage.waited_s > 0:
            under = top + _BAR_H + 5
            since = max(x(stage.admitted_s - stage.waited_s), _LEFT)
            until = max(x(stage.admitted_s), since + 2)
            self.canvas.rectangle((since, under, until, under + _WAIT_H), self.causes[stage.waited_for])

    def _points(self, name: str, points: Sequence[tuple[int, float]]) -> None:
        """Points with their numbers; of some that have no room between them the numbers stand behind the last."""
        y, half, font = self._middle(name), _POINT_HALF, self.fonts[2]
        said: list[str] = []
        for number, (index, x) in enumerate(points):
            corners = ((x, y - half), (x + half, y), (x, y + half), (x - half, y))
            colour = _CHUNKS[index % len(_CHUNKS)]
            self.canvas.polygon(corners, colour, _dark(colour))
            said.append(str(index))
            text = ", ".join(said)
            until = points[number + 1][1] - half if number + 1 < len(points) else math.inf
            if x + half + 3 + self.canvas.textlength(text, font) < until:
                self.canvas.text((x + half + 3, y), text, _INK, font, anchor="lm")
                said = []

    def _bar_top(self, name: str) -> float:
        return self.top + self.rows.tops[name] + 8

    def _middle(self, name: str) -> float:
        return self.top + self.rows.tops[name] + _POINT_H / 2


def _bands(chunks: Chunks) -> list[Chunks]:
    """As few bands as may be, as even as they can be."""
    drawn = chunks[: BAND_CHUNKS * BANDS_MAX]
    each = math.ceil(len(drawn) / max(1, math.ceil(len(drawn) / BAND_CHUNKS)))
    return [drawn[at : at + each] for at in range(0, len(drawn), max(1, each))]


def _range(chunks: Chunks) -> tuple[float, float]:
    """From the first control or start of some chunks to their last commit, with a margin, in seconds."""
    starts = [control_at(timing) for _, timing in chunks]
    for _, timing in chunks:
        starts += [stage.started_s for stage in timing.stages.values()]
    ends = [timing.committed_s for _, timing in chunks]
    margin = 0.012 * (max(ends) - min(starts))
    return min(starts) - margin, max(ends) + 2 * margin


def _legend(canvas: ImageDraw, font: FreeTypeFont | ImageFont, top: float, causes: Mapping[str, Colour]) -> None:
    x = float(_LEFT)
    text = "a stage stood still, waiting for:" if causes else "no stage waited for anything that was noted"
    canvas.text((x, top), text, _FAINT, font)
    x += canvas.textlength(text, font) + 20
    for cause, colour in causes.items():
        canvas.rectangle((x, top + 6, x + 26, top + 6 + _WAIT_H), colour)
        canvas.text((x + 34, top), _words(cause), _INK, font)
        x += 34 + canvas.textlength(_words(cause), font) + 24


def _colours(chunks: Iterator[tuple[int, ChunkTiming]]) -> dict[str, Colour]:
    """Causes to colours, by name."""
    stages = [stage for _, timing in chunks for stage in timing.stages.values()]
    found = sorted({stage.waited_for for stage in stages if stage.waited_for and stage.waited_s > 0})
    colours: dict[str, Colour] = {}
    for cause in found:
        at = zlib.crc32(cause.encode()) % len(_OTHER_CAUSES)
        mine = [*_OTHER_CAUSES[at:], *_OTHER_CAUSES[:at]]
        free = (colour for colour in mine if colour not in colours.values())
        colours[cause] = _CAUSES.get(cause) or next(free, mine[0])
    return colours


def _words(cause: str) -> str:
    """A cause as a reader has it."""
    kind, _, artifact = cause.partition(":")
    named = {"control": "the client's control", "encode_request": "the request to encode"}
    words = artifact.replace("_", " ")
    known = {
        "input": named.get(artifact, f"its {words}"),
        "edge": f"room for its {words}",
        "credit": "the client to take chunks",
        "actor_busy": "its actor, which was busy",
        "pace": "the media clock",
        "placement": "a place",
    }
    return known.get(kind, cause)


def _dark(colour: Colour) -> Colour:
    red, green, blue = colour
    return red * 2 // 3, green * 2 // 3, blue * 2 // 3


def _numbers(chunks: Chunks) -> str:
    return f"chunks {chunks[0][0]} to {chunks[-1][0]}" if chunks else "no chunk"


# --- the trace -------------------------------------------------------------------------------------------------------


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": kind, "args": {"name": name}}


def _sorted_at(track: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
