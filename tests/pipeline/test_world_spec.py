"""The world model's dataflow and its configurations, as data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from reelwire import wire
from reelwire.pipeline.wan.config import TextConfig
from reelwire.pipeline.world.config import MODELS, lingbot_world_fast, tiny
from reelwire.pipeline.world.pipeline import WorldPipeline
from reelwire.pipeline.world.stream import world_spec
from reelwire.spec import RequestError, check_parameters, check_registrable


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_s_spec_can_be_registered(model: str, chunk_size: int) -> None:
    """The spec of each built-in model is valid, and its counts follow from the chunk size."""
    spec = world_spec(MODELS[model](chunk_size, "cam"))
    check_registrable(spec)
    assert (spec.frames_first, spec.frames_next) == (1 + 4 * (chunk_size - 1), 4 * chunk_size)
    assert spec.chunks_max == 1024 // chunk_size
    assert (spec.frame_stride, spec.fps) == (4, 16.0)


def test_streaming_02_two_conditions_are_prefetched() -> None:
    """The broker issues the encode request itself, two ahead of the control, refilled when a denoise ends."""
    spec = world_spec(tiny())
    assert spec.prefetch is not None
    assert (spec.prefetch.artifact, spec.prefetch.depth) == ("encode_request", 2)
    assert (spec.prefetch.follows, spec.prefetch.refill_after) == ("control", "denoise")
    assert all(
        spec.capacity(artifact) == 2 for artifact in ("encode_request", "condition", "control", "latent", "frames")
    )


def test_streaming_21_order_of_initialization_and_release() -> None:
    """Initialized in the order encode, decode, denoise; released decode, denoise, encode."""
    spec = world_spec(tiny())
    assert spec.initialize_order == ("encode", "decode", "denoise")
    assert spec.releases() == ("decode", "denoise", "encode")


def test_streaming_29_the_clock_starts_with_the_control() -> None:
    """The latency anchor is the control, never the condition."""
    assert world_spec(tiny()).latency_anchor == "control"


def test_keys_and_their_aliases() -> None:
    """Every accepted spelling stands for its key, case sensitive; nothing else is a key."""
    spec = world_spec(tiny())
    assert set(spec.control_names) == set("wasdijkl")
    for alias, key in {"ArrowUp": "w", "KeyA": "a", "backward": "s", "right": "d", "KeyL": "l", "i": "i"}.items():
        assert spec.canonical_key(alias) == key
    for name in ("W", "KeyUp", "arrowup", "UP", "space", "q", ""):
        with pytest.raises(RequestError, match="unknown key"):
            spec.canonical_key(name)


def test_defaults_of_a_request() -> None:
    """A request needs a prompt; all else has a default that the configuration gives."""
    config = tiny()
    complete = check_parameters(world_spec(config), {"prompt": "x"})
    assert complete["seed"] == 0
    assert complete["area"] == config.area
    assert (complete["window"], complete["sink"], complete["attention"]) == (config.window, config.sink, -1)
    assert (complete["shift"], complete["dtype"]) == (10.0, "float32")
    assert complete["calibration_width"] is complete["calibration_height"] is None
    with pytest.raises(RequestError, match="prompt"):
        check_parameters(world_spec(config), {})


def test_a_prompt_is_bounded() -> None:
    """So that no request outgrows a message: 16384 characters are taken, also such as take four bytes; one more isn't."""
    spec = world_spec(tiny())
    longest = "\N{ROCKET}" * 16384
    assert check_parameters(spec, {"prompt": longest})["prompt"] == longest
    assert len(longest.encode()) < wire.Limits().header_bytes_max // 8
    with pytest.raises(RequestError, match=r"^prompt: 16385.*16384"):
        check_parameters(spec, {"prompt": longest + "x"})
    with pytest.raises(RequestError, match=r"^prompt: "):
        check_parameters(spec, {"prompt": ""})


def test_the_full_model_has_the_published_sizes() -> None:
    """The configuration of LingBot-World-Fast: sizes of the DiT, VAE and text encoder, defaults of its sampler."""
    config = lingbot_world_fast()
    assert (config.dit.dim, config.dit.layers, config.dit.heads, config.dit.ffn) == (5120, 40, 40, 13824)
    assert (config.text.dim, config.text.text_len) == (4096, 512)
    assert (config.vae.dim, config.vae.z_dim, config.vae.spatial, config.vae.temporal) == (96, 16, 8, 4)
    assert (config.chunk_size, config.sample_shift, config.timestep_indices) == (3, 10.0, (0, 179, 358, 679))
    assert (config.area, config.dtypes) == (480 * 832, ("bfloat16",))


def test_a_model_without_weights_is_refused() -> None:
    """A configuration whose weights come from a checkpoint can't be built, and the message says what can."""
    with pytest.raises(RequestError, match=r"needs a folder with weights.*tiny"):
        WorldPipeline.of(lingbot_world_fast())


def test_parts_that_do_not_fit_are_refused() -> None:
    """The prompt encoder and the DiT must agree on the width of an embedding."""
    with pytest.raises(ValueError, match="width of a prompt embedding"):
        replace(tiny(), text=TextConfig(dim=32, text_len=64))
    with pytest.raises(ValueError, match="chunk_size"):
        replace(tiny(), chunk_size=0)


def test_the_spec_s_module_needs_no_torch() -> None:
    """Dataflow, configuration and registry are imported without torch."""
    modules = "reelwire.pipeline.registry, reelwire.pipeline.world.stream, reelwire.pipeline.world.config"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0
