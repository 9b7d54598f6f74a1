"""Pipelines by reference, and the devices that stages may be built on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from reelwire.pipeline import registry
from reelwire.pipeline.device import Lane, check_device
from reelwire.pipeline.world.pipeline import WorldPipeline
from reelwire.spec import RequestError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_pipeline.py"


def test_the_world_model_is_built_in() -> None:
    """`world` gives the tiny model; its options choose chunk size and control."""
    made = registry.load("world", {})
    assert isinstance(made, WorldPipeline)
    assert (made.config.model, made.config.chunk_size, made.config.control) == ("tiny", 3, "cam")
    assert made.array_library == "torch"
    other = registry.load("world", {"model": "tiny", "chunk_size": "1", "control": "act"})
    assert isinstance(other, WorldPipeline)
    assert (other.spec.frames_next, other.config.control) == (4, "act")
    plain = registry.load("world", {"condition_constant": "off", "latent_cache_bytes": "0"})
    assert isinstance(plain, WorldPipeline)
    assert (made.condition_constant, plain.condition_constant) == (True, False)
    assert (made.latent_cache_bytes, plain.latent_cache_bytes) == (1 << 30, 0)
    assert plain.spec == made.spec
    for text, value in (("on", True), ("true", True), ("false", False)):
        chosen = registry.load("world", {"condition_constant": text})
        assert isinstance(chosen, WorldPipeline)
        assert chosen.condition_constant is value


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"model": "huge"}, "model", "there is no 'huge'; accepted: tiny, lingbot-world-fast"),
        ({"model": "lingbot-world-fast"}, "checkpoint", "accepted: checkpoint=FOLDER, or a model that needs none"),
        ({"control": "keys"}, "control", "accepted: cam, act"),
        ({"chunk_size": "three"}, "chunk_size", "an integer from 1"),
        ({"condition_constant": "maybe"}, "condition_constant", "accepted: on, off"),
        ({"latent_cache_bytes": "1 GiB"}, "latent_cache_bytes", "accepted: an integer from 0"),
        ({"colour": "red"}, "colour", "accepted: model, checkpoint, transformer"),
    ],
)
def test_options_of_the_world_model_are_checked(options: dict[str, str], field: str, reason: str) -> None:
    """An option that isn't accepted is refused by name, with what is."""
    with pytest.raises(RequestError, match=reason) as refused:
        registry.load("world", options)
    assert refused.value.field == field


def test_a_pipeline_from_a_file(tmp_path: Path) -> None:
    """An object of a Python file, or what a callable of it gives for the options."""
    made = registry.load(f"{EXAMPLE}:pipeline", {})
    assert made.spec.name == "ripple"
    again = registry.load(f"{EXAMPLE}:Ripple", {})
    assert again.spec == made.spec
    path = tmp_path / "mine.py"
    path.write_text(
        f"from reelwire.pipeline import registry\n"
        f"def make(which):\n    return registry.load({str(EXAMPLE)!r} + ':' + which, {{}})\n"
        "number = 3\ndef wrong():\n    return 3\n",
        encoding="utf-8",
    )
    assert registry.load(f"{path}:make", {"which": "pipeline"}).spec.name == "ripple"
    cases: tuple[tuple[str, dict[str, str], str], ...] = (
        ("make", {}, "doesn't take these options"),
        ("number", {}, "is a int"),
        ("wrong", {}, "gives a int"),
        ("nothing", {}, "has no 'nothing'; it has: make"),
    )
    for name, options, reason in cases:
        with pytest.raises(RequestError, match=reason):
            registry.load(f"{path}:{name}", options)


def test_what_the_world_model_needs_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built: wrong usage, which nobody tries again."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RequestError, match=r"^pipeline: 'world' needs torch, .*; install reelwire\[worker\]$"):
        registry.load("world", {})


def test_a_file_that_is_no_python_is_not_taken_for_a_module(tmp_path: Path) -> None:
    """Its path is named, with what is accepted."""
    (tmp_path / "text.jpg").write_text("x")
    with pytest.raises(RequestError, match=r"text\.jpg is no Python file; accepted: a path that ends in \.py"):
        registry.load(f"{tmp_path / 'text.jpg'}:x", {})


def test_a_pipeline_from_a_module() -> None:
    """An object of a module that can be imported."""
    reference = "reelwire.pipeline.world.config:tiny"
    with pytest.raises(RequestError, match="gives a WorldConfig; accepted: an object with spec"):
        registry.load(reference, {})


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("word", "accepted: a built-in name"),
        ("", "accepted: a built-in name"),
        (":x", "incomplete"),
        ("world:", "incomplete"),
        ("no/such/file.py:x", "is not a file"),
        ("no_such_module:x", "can't be imported"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(reference: str, reason: str) -> None:
    """The message says what a reference looks like, or what is missing."""
    with pytest.raises(RequestError, match=reason) as refused:
        registry.load(reference, {})
    assert refused.value.field == "pipeline"


def test_what_a_file_raises_is_reported(tmp_path: Path) -> None:
    """A file that fails, or whose spec contradicts itself, is refused with the reason."""
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('not today')", encoding="utf-8")
    with pytest.raises(RequestError, match="ValueError: not today"):
        registry.load(f"{broken}:x", {})
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from dataclasses import replace\n"
        "from reelwire.pipeline import registry\n"
        f"base = registry.load({str(EXAMPLE)!r} + ':pipeline', {{}})\n"
        "class Bad:\n"
        "    spec = replace(base.spec, fps=0.0)\n"
        "    array_library = 'numpy'\n"
        "    def build(self, stage, device):\n        return None\n"
        "bad = Bad()\n"
        "bad_library = Bad()\nbad_library.array_library = 'jax'\n",
        encoding="utf-8",
    )
    with pytest.raises(RequestError, match="fps is 0"):
        registry.load(f"{wrong}:bad", {})
    with pytest.raises(RequestError, match="accepted: numpy, torch"):
        registry.load(f"{wrong}:bad_library", {})
    with pytest.raises(RequestError, match="ready pipeline; accepted: no options"):
        registry.load(f"{EXAMPLE}:pipeline", {"a": "b"})


def test_unknown_stages_and_devices_are_refused() -> None:
    """Building names the stages that there are, and the devices of this machine."""
    made = registry.load("world", {})
    with pytest.raises(RequestError, match="accepted: encode, denoise, decode"):
        made.build("paint", "cpu")
    for name in ("cuda", "cuda:99", "gpu", "cuda:-1", "cuda:1 "):
        with pytest.raises(RequestError, match="devices of this machine: cpu") as refused:
            check_device(name)
        assert refused.value.field == "device"
    assert check_device("cpu") == torch.device("cpu")


def test_a_lane_computes_without_gradients() -> None:
    """Within a lane's work nothing is recorded, and what it gives is contiguous on the CPU."""
    lane = Lane("cpu")
    with lane.work():
        assert torch.is_inference_mode_enabled()
        given = lane.give(lane.take(torch.ones(2, 3), torch.float64).t())
    assert given.is_contiguous()
    assert given.dtype == torch.float64
