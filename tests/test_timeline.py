"""The picture and the trace of a session's chunks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reelwire import timeline
from reelwire.parts import ChunkTiming, StageTiming
from reelwire.spec import StreamSpec
from reelwire.timeline import BAND_CHUNKS, BANDS_MAX, WIDTH, Chunks, control_at, draw_timeline, save_timeline, trace
from reelwire.workers.emulated import Emulation, emulated_spec

SPEC: StreamSpec = emulated_spec(Emulation())
PERIOD = 0.15
CAUSES = {*timeline._CAUSES.values(), *timeline._OTHER_CAUSES}


def chunks(count: int, *, waited_for: str = "input:control", control_s: bool = True) -> Chunks:
    """A session whose client reacts: each chunk's control comes when the chunk before was committed."""
    made = []
    for index in range(count):
        begin = 0.03 + index * PERIOD
        encoded = begin - 0.03
        stages = {
            "encode": StageTiming(encoded, encoded, encoded, encoded + 0.02, "input:encode_request", 0.05),
            "denoise": StageTiming(begin, begin, begin, begin + 0.12, waited_for, 0.02 if waited_for else 0.0),
            "decode": StageTiming(begin + 0.12, begin + 0.12, begin + 0.12, begin + 0.145, "input:latent", 0.12),
        }
        made.append((index, ChunkTiming(begin + 0.145, 0.145, PERIOD, stages, begin if control_s else None)))
    return made


def colours(picture: Image.Image) -> set[tuple[int, ...]]:
    """Every colour in a picture."""
    packed = np.asarray(picture).astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    return {(value >> 16, value >> 8 & 255, value & 255) for value in map(int, np.unique(packed))}


class Seen:
    """A picture of one band, and where its rows and its times lie."""

    def __init__(self, held: Chunks) -> None:
        self.pixels = np.asarray(draw_timeline(SPEC, held))
        rows = timeline._Rows(SPEC)
        self.tops = {name: timeline._TOP + top + 8 for name, top in rows.tops.items()}
        self.bottom = timeline._TOP + rows.height
        (self.begin, end) = timeline._range(held)
        self.scale = (WIDTH - timeline._LEFT - timeline._RIGHT) / (end - self.begin)

    def x(self, at_s: float) -> float:
        """The column of a time."""
        return timeline._LEFT + (at_s - self.begin) * self.scale

    def columns(self, colour: tuple[int, ...], top: float, bottom: float) -> tuple[int, int] | None:
        """The first and the last column that has the colour between two lines."""
        found = np.flatnonzero((self.pixels[int(top) : int(bottom)] == colour).all(-1).any(0))
        return (int(found[0]), int(found[-1])) if found.size else None

    def bar(self, stage: str, index: int) -> tuple[int, int] | None:
        """The columns of a chunk's bar."""
        return self.columns(timeline._CHUNKS[index], self.tops[stage], self.tops[stage] + timeline._BAR_H)

    def has(self, colour: tuple[int, ...], x: float, y: float) -> bool:
        """Whether a point has the colour, or its next neighbour."""
        around = self.pixels[int(y), round(x) - 2 : round(x) + 3]
        return bool((around == colour).all(-1).any())


def test_bars_lie_where_their_times_are() -> None:
    """From the start to the result, each in the row of its stage; waits under them, until they were admitted."""
    held = chunks(6)
    seen = Seen(held)
    assert seen.x(0.0) > timeline._LEFT
    causes = {"encode": "input:encode_request", "denoise": "input:control", "decode": "input:latent"}
    for index, timing in held:
        for name, stage in timing.stages.items():
            expected = (seen.x(stage.started_s), seen.x(stage.completed_s))
            assert seen.bar(name, index) == pytest.approx(expected, abs=2), (name, index)
    for name, cause in causes.items():
        under = seen.tops[name] + timeline._BAR_H + 5
        first, last = (timing.stages[name] for timing in (held[0][1], held[-1][1]))
        since = max(seen.x(first.admitted_s - first.waited_s), timeline._LEFT)
        found = seen.columns(timeline._CAUSES[cause], under + 2, under + 5)
        assert found == pytest.approx((since, seen.x(last.admitted_s)), abs=2), name


def test_an_arrow_leads_from_what_was_waited_for() -> None:
    """Down from the control that came, up from the consumer that made room; of what can't be placed there is none."""
    colour = timeline._CAUSES["input:control"]
    seen = Seen(held := chunks(6))
    for _, timing in held:
        (at, denoise) = (control_at(timing), timing.stages["denoise"])
        x = (seen.x(at) + seen.x(denoise.started_s)) / 2
        assert seen.has(colour, x, seen.tops["denoise"] - 12), "through the row between"
    (room,) = [edge.capacity for edge in SPEC.edges if edge.artifact == "latent"]
    seen = Seen(held := chunks(6, waited_for="edge:latent"))
    colour = timeline._CAUSES["edge:latent"]
    (bottom, top) = (seen.tops["denoise"] + timeline._BAR_H, seen.tops["decode"])
    for index, timing in held:
        (began, y) = (timing.stages["denoise"].started_s, bottom + 16)
        taken = held[index - room][1].stages["decode"].started_s if index >= room else began
        x = seen.x(began + (taken - began) * (y - bottom) / (top - bottom))
        assert seen.has(colour, x, y) == (index >= room), index
    for cause in ("credit", "actor_busy", "edge:x"):
        seen = Seen(held := chunks(6, waited_for=cause))
        colour = timeline._colours(iter(held))[cause]
        assert seen.columns(colour, bottom + 14, top - 1) is None
        assert seen.columns(colour, seen.tops["encode"], seen.tops["denoise"]) is None


def test_the_picture_is_a_function_of_the_timings() -> None:
    """The same chunks give the same pixels, others give others."""
    one, again, other = (draw_timeline(SPEC, each) for each in (chunks(8), chunks(8), chunks(9)))
    assert one.mode == "RGB"
    assert one.width == WIDTH
    assert one.tobytes() == again.tobytes()
    assert one.tobytes() != other.tobytes()


def test_each_chunk_has_its_colour_and_each_cause_its_own() -> None:
    """Bars of six chunks show six colours; a cause that nothing waited for shows none."""
    found = colours(draw_timeline(SPEC, chunks(6)))
    assert set(timeline._CHUNKS) <= found
    mine = {timeline._CAUSES[f"input:{artifact}"] for artifact in ("control", "encode_request", "latent")}
    assert CAUSES & found == mine
    less = mine - {timeline._CAUSES["input:control"]}
    assert CAUSES & colours(draw_timeline(SPEC, chunks(6, waited_for=""))) == less


def test_a_cause_has_the_same_colour_in_every_picture() -> None:
    """Whatever else is waited for; of those that have no colour of their own, two in one picture still differ."""
    causes = [*timeline._CAUSES, *(f"input:other_{number}" for number in range(len(timeline._OTHER_CAUSES)))]
    alone = {cause: timeline._colours(iter(chunks(2, waited_for=cause)))[cause] for cause in causes}
    assert all(alone[cause] == colour for cause, colour in timeline._CAUSES.items())
    assert all(alone[cause] in timeline._OTHER_CAUSES for cause in causes if cause not in timeline._CAUSES)
    together = [each for cause in causes for each in chunks(1, waited_for=cause)]
    assert len(set(timeline._colours(iter(together)).values())) == len(causes) == len(CAUSES)


@pytest.mark.parametrize(
    "cause", ["edge:latent", "credit", "actor_busy", "pace", "placement", "something new", "edge:x"]
)
def test_any_cause_can_be_drawn(cause: str) -> None:
    """Also one that this version has no words for, or whose artifact the spec doesn't have."""
    drawn, other = (draw_timeline(SPEC, chunks(5, waited_for=each)) for each in (cause, ""))
    assert drawn.size == other.size
    assert len(colours(drawn) & CAUSES) == 1 + len(colours(other) & CAUSES)
    waits = [event for event in trace(SPEC, chunks(5, waited_for=cause))["traceEvents"] if event.get("cat") == "wait"]
    assert [event["name"] for event in waits].count(timeline._words(cause)) == 5


def test_long_sessions_go_on_in_bands_up_to_a_limit() -> None:
    """A band holds so many chunks; what is beyond the last band is left out."""
    heights = [draw_timeline(SPEC, chunks(count)).height for count in (1, BAND_CHUNKS, BAND_CHUNKS + 1)]
    assert heights[0] == heights[1] < heights[2]
    most = draw_timeline(SPEC, chunks(BAND_CHUNKS * BANDS_MAX))
    assert draw_timeline(SPEC, chunks(BAND_CHUNKS * BANDS_MAX + 50)).height == most.height


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_chunk_can_be_drawn(count: int) -> None:
    """Nothing, and a single chunk."""
    shown = set(timeline._CHUNKS) & colours(draw_timeline(SPEC, chunks(count), "a title"))
    assert shown == set(timeline._CHUNKS[:count])
    bars = [event for event in trace(SPEC, chunks(count))["traceEvents"] if event.get("cat") == "stage"]
    assert len(bars) == 3 * count


def test_a_chunk_without_a_stage_that_settled_is_drawn() -> None:
    """A stage that settled doesn't run for later chunks: their bars stand without an arrow from it."""
    held = chunks(4)
    for _, timing in held[2:]:
        assert isinstance(timing.stages, dict)
        del timing.stages["encode"]
    seen = Seen(held)
    assert [seen.bar("encode", index) is not None for index in range(4)] == [True, True, False, False]
    assert all(seen.bar("denoise", index) for index in range(4))


def test_a_control_is_where_the_broker_said_or_where_the_clock_began() -> None:
    """Peers of an older version don't say when a control was accepted."""
    (_, said), (_, silent) = chunks(1)[0], chunks(1, control_s=False)[0]
    assert control_at(said) == pytest.approx(control_at(silent)) == pytest.approx(0.03)


def test_the_trace_has_a_track_for_every_row_and_the_same_times() -> None:
    """Chrome's format: names of tracks, bars in microseconds, waits with their cause, controls and commits as points."""
    events = trace(SPEC, chunks(3), "mine")["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == [
        "control",
        "encode",
        "encode waits",
        "denoise",
        "denoise waits",
        "decode",
        "decode waits",
        "commit",
    ]
    (bar,) = [event for event in events if event["name"] == "denoise 1"]
    assert names[bar["tid"]] == "denoise"
    assert (bar["ph"], bar["ts"], bar["dur"]) == ("X", 180_000, 120_000)
    waits = [event for event in events if event.get("cat") == "wait"]
    assert {names[event["tid"]] for event in waits} == {"encode waits", "denoise waits", "decode waits"}
    assert {"the client's control", "its latent", "the request to encode"} == {event["name"] for event in waits}
    points = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert ("control 2", 330_000) in points
    assert ("commit 2", 475_000) in points


def test_both_are_saved_beside_each_other(tmp_path: Path) -> None:
    """A PNG, and the trace under its name."""
    beside = save_timeline(tmp_path / "mine.png", SPEC, chunks(3))
    assert beside == tmp_path / "mine.trace.json"
    with Image.open(tmp_path / "mine.png") as picture:
        assert picture.format == "PNG"
    assert json.loads(beside.read_text())["displayTimeUnit"] == "ms"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.png", "mine.trace.json"]
