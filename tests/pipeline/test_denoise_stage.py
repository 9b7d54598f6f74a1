"""The denoise stage with latents that are known: fewer forwards, and not a bit that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from reelwire.pipeline.device import Lane
from reelwire.pipeline.world import denoise_stage
from reelwire.pipeline.world.config import WorldConfig, tiny
from reelwire.pipeline.world.denoise_stage import DenoiseStage
from reelwire.pipeline.world.dit import WorldDiT, random_world_dit
from reelwire.pipeline.world.dit_config import WorldDiTConfig
from reelwire.pipeline.world.latent_cache import LatentCache, LatentStore
from reelwire.pipeline.world.latent_key import next_link
from reelwire.spec import RequestError

DIT = WorldDiTConfig(dim=24, layers=2, heads=2, ffn=40, text_dim=10, text_tokens=6, freq_dim=16)
CONFIG = replace(
    tiny(),
    dit=DIT,
    text=replace(tiny().text, dim=10, text_len=6),
    area=40 * 60,
    window=-1,
    sink=0,
)
MODEL = random_world_dit(DIT, 0)
HALF = random_world_dit(DIT, 0, dtype=torch.bfloat16)
CHUNKS = 7
FORWARDS = 5
"""Of a chunk that is made anew: four steps and the clean pass."""
PATH = torch.eye(4).repeat(3, 1, 1)
PATH[:, 0, 3] = torch.tensor([0.1, 0.3, 0.2])
CONTROLS: tuple[dict[str, Any], ...] = (
    {"keys": ["w"], "reset_pose": False},
    {"keys": ["w", "l"], "reset_pose": False},
    {"poses": PATH},
    {"poses": PATH, "translation_norm": 0.5},
    {"keys": ["w"], "reset_pose": True},
    {"keys": [], "reset_pose": False},
    {"keys": ["a", "i"], "reset_pose": False},
)
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"window": 7, "sink": 2},
    {"window": 9, "attention": 5},
    {"attention": 4},
    {"window": 6, "sink": 0},
    {"dtype": "bfloat16", "window": 8, "sink": 1},
)
"""What sessions may ask of the cache: all of it, a sink and a ring, less attention than is held."""


class Rig:
    """A denoise stage with a small model, whose forwards are counted."""

    def __init__(self, latents: LatentStore | None = None, config: WorldConfig = CONFIG) -> None:
        self.forwards = 0
        self.stage = DenoiseStage(config, self._model, Lane("cpu"), weights="seed 0", latents=latents)
        self.facts: dict[str, list[Mapping[str, Any]]] = {}

    def _model(self, dtype: torch.dtype) -> WorldDiT:
        return MODEL if dtype == torch.float32 else HALF

    def open(self, session: str, chunks: int = CHUNKS, *, source: bytes | None = b"picture", **given: Any) -> None:
        """A session, with what encode would have handed on."""
        handed: dict[str, Any] = {
            "prompt_embeds": torch.randn(1, 6, 10, generator=torch.Generator().manual_seed(1)),
            "image_height": 30,
            "image_width": 50,
        }
        if source is not None:
            handed["source_digest"] = source
        self.stage.initialize(session, chunks, {"prompt": "a bridge", "seed": 3, **given}, handed)
        self.facts[session] = []

    def chunk(self, session: str, index: int, control: Mapping[str, Any]) -> Tensor:
        """Its latent, from a condition that depends on the index alone."""
        shape = (1, 20, *self.stage._sessions[session].shape[2:])
        condition = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        inputs = {"condition": {"condition": condition}, "control": control}
        before = FORWARD_COUNT[0]
        made = self.stage.run(session, index, inputs, is_first=index == 0, is_last=False)
        self.forwards = FORWARD_COUNT[0] - before
        self.facts[session].append(made.facts)
        latent: Tensor = made.outputs["latent"]["latent"]
        return latent

    def run(self, session: str, controls: Sequence[Mapping[str, Any]], **given: Any) -> tuple[list[Tensor], list[int]]:
        """All chunks of a session, and how many forwards each took; the session is left open."""
        self.open(session, **given)
        latents, forwards = [], []
        for index, control in enumerate(controls):
            latents.append(self.chunk(session, index, control))
            forwards.append(self.forwards)
        return latents, forwards

    def remembered(self, session: str) -> list[Tensor]:
        """Keys and values of all layers, and the cursors."""
        rolling = self.stage._sessions[session].caches.rolling
        cursors = torch.tensor([rolling.global_end, rolling.local_end])
        return [cursors, *(each for layer in range(DIT.layers) for each in rolling.ordered(layer))]

    def hits(self, session: str) -> list[bool]:
        """Of each chunk, whether its latent was known."""
        return [bool(facts.get("latent_cached")) for facts in self.facts[session]]


FORWARD_COUNT = [0]


@pytest.fixture(scope="module", autouse=True)
def counted() -> Iterator[None]:
    def count(_module: Any, _arguments: Any) -> None:
        FORWARD_COUNT[0] += 1

    handles = [model.register_forward_pre_hook(count) for model in (MODEL, HALF)]
    yield
    for handle in handles:
        handle.remove()


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def cold(controls: Sequence[Mapping[str, Any]] = CONTROLS, **given: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Latents and what is remembered at the end, without any cache of latents."""
    rig = Rig()
    latents, forwards = rig.run("cold", controls, **given)
    assert forwards == [FORWARDS] * len(controls)
    assert not any(rig.hits("cold"))
    return latents, rig.remembered("cold")


def large() -> LatentCache:
    return LatentCache(1 << 24)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_streaming_28_a_second_session_is_decode_only_where_it_begins_alike(policy: dict[str, Any]) -> None:
    """One forward a chunk instead of five up to where the controls part, then bits of a cold run, to the caches' end."""
    rig = Rig(large())
    rig.run("first", CONTROLS, **policy)
    other = [*CONTROLS[:4], {"keys": ["s"]}, *CONTROLS[5:]]
    expected, remembered = cold(other, **policy)
    latents, forwards = rig.run("second", other, **policy)
    assert forwards == [1] * 4 + [FORWARDS] * 3
    assert rig.hits("second") == [True] * 4 + [False] * 3
    assert same(latents, expected)
    assert same(rig.remembered("second"), remembered)


class Forgetful(LatentCache):
    """Doesn't find what `knows` says no to, by the number of the call."""

    def __init__(self, knows: Callable[[int], bool]) -> None:
        super().__init__(1 << 24)
        self.knows = knows
        self.calls = 0

    def get(self, key: bytes) -> Tensor | None:
        """What is kept, or nothing."""
        self.calls += 1
        return super().get(key) if self.knows(self.calls - 1) else None


@pytest.mark.parametrize("policy", POLICIES[:3], ids=str)
@pytest.mark.parametrize("pattern", ["1010101", "0101010", "1100110", "0011001", "1111110", "0000001"])
def test_streaming_28_hits_and_misses_may_alternate(policy: dict[str, Any], pattern: str) -> None:
    """Whichever chunks are known, each latent and the caches at the end are those of a cold run."""
    expected, remembered = cold(**policy)
    store = Forgetful(lambda _call: False)
    rig = Rig(store)
    rig.run("first", CONTROLS, **policy)
    store.knows = lambda call: pattern[call - CHUNKS] == "1"
    latents, forwards = rig.run("second", CONTROLS, **policy)
    assert forwards == [1 if known == "1" else FORWARDS for known in pattern]
    assert same(latents, expected)
    assert same(rig.remembered("second"), remembered)


def test_streaming_28_sessions_that_take_turns_share_what_is_known() -> None:
    """Of two sessions with the same beginning that run side by side, the one behind finds what the one ahead made."""
    expected, _ = cold()
    rig = Rig(large())
    rig.open("a")
    rig.open("b")
    for index, control in enumerate(CONTROLS):
        for session, forwards in (("a", FORWARDS), ("b", 1)):
            assert torch.equal(rig.chunk(session, index, control), expected[index])
            assert rig.forwards == forwards
    assert rig.facts["a"][3]["pose"] == rig.facts["b"][3]["pose"]


@pytest.mark.parametrize("chunks", [4, 5, 12])
@pytest.mark.parametrize("policy", [{}, {"window": 15}, {"window": 9, "sink": 1}], ids=str)
def test_streaming_28_sessions_of_other_lengths_share_a_beginning(policy: dict[str, Any], chunks: int) -> None:
    """A cache of another size moves no bit as long as the same places are written and read: hits, and a cold run's bits."""
    rig = Rig(large())
    rig.run("first", CONTROLS, **policy)
    controls = [CONTROLS[index % CHUNKS] for index in range(chunks)]
    expected, remembered = cold(controls, chunks=chunks, **policy)
    latents, _ = rig.run("second", controls, chunks=chunks, **policy)
    assert rig.hits("second") == [index < CHUNKS for index in range(chunks)]
    assert same(latents, expected)
    assert same(rig.remembered("second"), remembered)


def test_streaming_28_a_cache_whose_layers_lie_otherwise_shares_nothing() -> None:
    """Where the length shifts the layers of the cache against the lines of the CPU's own, rounding might follow."""
    rig = Rig(large())
    odd, even = {"area": 32 * 48, "chunks": 3}, {"area": 32 * 48, "chunks": 4}
    rig.run("first", CONTROLS[:3], **odd)
    latents, forwards = rig.run("second", CONTROLS[:3], **even)
    assert forwards == [FORWARDS] * 3
    assert same(latents, cold(CONTROLS[:3], **even)[0])


@pytest.mark.parametrize(
    ("first", "second", "known"),
    [
        ({}, {"window": 9}, 3),
        ({"window": 9, "sink": 3}, {"window": 9, "sink": 0}, 3),
        ({"window": 9}, {"window": 12}, 3),
        ({}, {"attention": 6}, 2),
        ({}, {"window": 9, "attention": 3}, 1),
    ],
    ids=str,
)
def test_streaming_28_limits_count_from_where_they_bite(
    first: dict[str, Any], second: dict[str, Any], known: int
) -> None:
    """Sessions of other windows, sinks and attention share a beginning until one of them evicts or attends to less."""
    rig = Rig(large())
    rig.run("first", CONTROLS, **first)
    expected, remembered = cold(**second)
    latents, _ = rig.run("second", CONTROLS, **second)
    assert rig.hits("second") == [index < known for index in range(CHUNKS)]
    assert same(latents, expected)
    assert same(rig.remembered("second"), remembered)


@pytest.mark.parametrize(
    "given",
    [
        {"seed": 4},
        {"prompt": "a brook"},
        {"shift": 5.0},
        {"dtype": "bfloat16"},
        {"intrinsics": torch.tensor([300.0, 300.0, 416.0, 240.0])},
        {"source": b"another picture"},
        {"area": 32 * 48},
    ],
    ids=lambda given: next(iter(given)),
)
def test_streaming_28_another_request_finds_nothing(given: dict[str, Any]) -> None:
    """What moves a bit moves the key: no chunk of the other session is taken for one of this."""
    rig = Rig(large())
    rig.run("first", CONTROLS[:2])
    _, forwards = rig.run("second", CONTROLS[:2], **given)
    assert forwards == [FORWARDS] * 2


def test_streaming_28_without_knowing_the_source_nothing_is_kept() -> None:
    """A session whose encode stage said nothing of its image and weights is made anew, chunk by chunk."""
    store = large()
    rig = Rig(store)
    for session in ("a", "b"):
        assert rig.run(session, CONTROLS[:2], source=None)[1] == [FORWARDS] * 2
    assert store.stats.entries == store.stats.hits == store.stats.misses == 0


def test_streaming_28_with_too_little_memory_bits_are_the_same() -> None:
    """A cache of two latents forgets in time, is never above its limit, and hands out nothing wrong."""
    expected, remembered = cold()
    store = LatentCache(2 * (expected[0].nbytes + 1024))
    rig = Rig(store)
    rig.run("first", CONTROLS)
    assert store.stats.evictions == CHUNKS - 2
    latents, forwards = rig.run("second", CONTROLS)
    assert forwards == [FORWARDS] * CHUNKS, "the newest two left before their turn came"
    assert same(latents, expected)
    assert same(rig.remembered("second"), remembered)
    assert store.stats.nbytes <= 2 * (expected[0].nbytes + 1024)


class Failing:
    """A store that raises at the calls it is told to; else a `LatentCache`."""

    def __init__(self, error: BaseException, *calls: str) -> None:
        self.error = error
        self.calls = calls
        self.inner = large()

    def _maybe(self, call: str) -> None:
        if call in self.calls:
            raise self.error

    def get(self, key: bytes) -> Tensor | None:
        """Fail, or look."""
        self._maybe("get")
        return self.inner.get(key)

    def put(self, key: bytes, latent: Tensor) -> None:
        """Fail, or keep."""
        self._maybe("put")
        self.inner.put(key, latent)

    def clear(self) -> None:
        """Fail, or forget."""
        self._maybe("clear")
        self.inner.clear()


@pytest.mark.parametrize("calls", [("get",), ("put",), ("get", "put"), ("get", "clear"), ("put", "clear")])
@pytest.mark.parametrize(
    "error", [OSError("disk full"), MemoryError(), torch.OutOfMemoryError("none left")], ids=lambda e: type(e).__name__
)
def test_streaming_28_a_cache_that_fails_costs_no_chunk(error: BaseException, calls: tuple[str, ...]) -> None:
    """Each failure is a warning in the log and a chunk that is made anew, with the bits of a cold run."""
    expected, remembered = cold()
    rig = Rig(Failing(error, *calls))
    with capture_logs() as logs:
        rig.run("first", CONTROLS)
        latents, _ = rig.run("second", CONTROLS)
    assert same(latents, expected)
    assert same(rig.remembered("second"), remembered)
    warnings = [entry for entry in logs if entry["event"] == "latent_cache_failed"]
    assert {entry["call"] for entry in warnings} == set(calls) - {"clear"}
    assert all(entry["log_level"] == "warning" and type(error).__name__ in entry["error"] for entry in warnings)


def test_streaming_28_a_latent_of_another_shape_is_not_taken() -> None:
    """What a cache has come to hold by a fault of its own is a failure of the cache."""

    class Wrong(LatentCache):
        def get(self, key: bytes) -> Tensor | None:
            found = super().get(key)
            return None if found is None else found[:, :, :1]

    expected, _ = cold(CONTROLS[:3])
    rig = Rig(Wrong(1 << 24))
    with capture_logs() as logs:
        rig.run("first", CONTROLS[:3])
        latents, forwards = rig.run("second", CONTROLS[:3])
    assert forwards == [FORWARDS] * 3
    assert same(latents, expected)
    assert "a latent is [1, 16, 3, 4, 6]" in logs[0]["error"]


def test_streaming_28_a_key_that_can_t_be_made_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a chunk without a key on the session is made anew, since its later keys would leave that chunk out."""
    expected, _ = cold()
    rig = Rig(large())
    rig.run("first", CONTROLS)
    calls = iter(range(CHUNKS))

    def fails_once(*arguments: Any) -> bytes:
        if next(calls) == 2:
            raise TypeError("no such part")
        return next_link(*arguments)

    monkeypatch.setattr(denoise_stage, "next_link", fails_once)
    with capture_logs() as logs:
        latents, forwards = rig.run("second", CONTROLS)
    assert forwards == [1, 1] + [FORWARDS] * (CHUNKS - 2)
    assert same(latents, expected)
    assert [entry["call"] for entry in logs] == ["key"]


def test_streaming_28_a_chunk_that_failed_is_asked_for_again() -> None:
    """After a control that is refused, and after a fault half-way, the same chunk is found or made as if nothing was."""
    expected, remembered = cold()
    rig = Rig(large())
    rig.run("first", CONTROLS)
    rig.open("second")
    latents = []
    for index, control in enumerate(CONTROLS):
        with pytest.raises(RequestError, match="poses"):
            rig.chunk("second", index, {"poses": torch.eye(4)})
        rig.facts["second"].clear()
        latents.append(rig.chunk("second", index, control))
        assert rig.hits("second") == [True]
    assert same(latents, expected)
    assert same(rig.remembered("second"), remembered)


def test_streaming_28_writing_into_a_result_changes_nothing_that_is_kept() -> None:
    """Neither the latent of a chunk that was made nor that of one that was found is what the cache holds."""
    expected, _ = cold(CONTROLS[:1])
    rig = Rig(large())
    for session in ("a", "b", "c"):
        rig.open(session)
        made = rig.chunk(session, 0, CONTROLS[0])
        assert torch.equal(made, expected[0])
        with torch.inference_mode():
            made.zero_()
    assert rig.hits("c") == [True]
