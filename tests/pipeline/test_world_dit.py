"""The causal world DiT with small random weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reelwire.pipeline.world.dit import WorldDiT, random_world_dit
from reelwire.pipeline.world.dit_blocks import SessionCaches
from reelwire.pipeline.world.dit_config import WorldDiTConfig
from reelwire.pipeline.world.kv_cache import CacheLimits

SMALL = WorldDiTConfig(dim=24, layers=2, heads=2, ffn=40, text_dim=10, text_tokens=6, freq_dim=16)
FRAMES, HEIGHT, WIDTH = 2, 4, 6

TOP = ["patch_embedding", "patch_embedding_wancamctrl", "c2ws_hidden_states_layer1", "c2ws_hidden_states_layer2"]
TOP += [
    "text_embedding.0",
    "text_embedding.2",
    "time_embedding.0",
    "time_embedding.2",
    "time_projection.1",
    "head.head",
]
BLOCK = [f"{attn}.{part}" for attn in ("self_attn", "cross_attn") for part in "qkvo"]
BLOCK += ["norm3", "ffn.0", "ffn.2", "cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer"]


def latent(seed: int, channels: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, channels, FRAMES, HEIGHT, WIDTH, generator=generator)


def open_session(model: WorldDiT, limits: CacheLimits | None = None, chunks: int = 4) -> SessionCaches:
    prompt = torch.randn(1, 4, model.config.text_dim, generator=torch.Generator().manual_seed(1))
    limits = limits or CacheLimits()
    return model.open_session(prompt, limits.layout(model.frame_tokens(HEIGHT, WIDTH), chunks * FRAMES))


def run(model: WorldDiT, caches: SessionCaches, index: int, timestep: float = 500) -> torch.Tensor:
    control = latent(200 + index, model.config.control_channels)
    chunk = model.prepare(index, latent(100 + index, model.config.condition_channels), control)
    flow = model(latent(index), timestep, chunk, caches)
    assert isinstance(flow, torch.Tensor)
    return flow


def test_parameter_names_are_those_of_the_checkpoint() -> None:
    """The full-size model has exactly the checkpoint's keys, and its sizes can be read off their shapes."""
    with torch.device("meta"):
        model = WorldDiT(WorldDiTConfig())
    expected = {f"{name}.{kind}" for name in TOP for kind in ("weight", "bias")} | {"head.modulation"}
    for n in range(40):
        expected |= {f"blocks.{n}.{name}.{kind}" for name in BLOCK for kind in ("weight", "bias")}
        expected |= {f"blocks.{n}.{attn}.norm_{x}.weight" for attn in ("self_attn", "cross_attn") for x in "qk"}
        expected.add(f"blocks.{n}.modulation")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert set(shapes) == expected
    assert shapes["blocks.39.modulation"] == (1, 6, 5120)
    assert shapes["patch_embedding.weight"] == (5120, 36, 1, 2, 2)
    assert WorldDiTConfig.from_shapes(shapes) == WorldDiTConfig()


@pytest.mark.parametrize("control", ["cam", "act"])
def test_sizes_are_read_off_a_small_checkpoint(control: str) -> None:
    """What shapes tell is found, control type included; heads and prompt rows are given."""
    config = replace(SMALL, control=control)  # type: ignore[arg-type]
    shapes = {name: tuple(value.shape) for name, value in random_world_dit(config, 0).state_dict().items()}
    assert WorldDiTConfig.from_shapes(shapes, heads=2, text_tokens=6) == config


def test_a_checkpoint_of_something_else_is_refused() -> None:
    """A missing parameter or a control input of unknown width is named."""
    shapes = {name: tuple(value.shape) for name, value in random_world_dit(SMALL, 0).state_dict().items()}
    with pytest.raises(ValueError, match=r"'patch_embedding_wancamctrl\.weight' takes 99 values"):
        WorldDiTConfig.from_shapes({**shapes, "patch_embedding_wancamctrl.weight": (24, 99)}, heads=2)
    shapes.pop("blocks.0.ffn.0.weight")
    with pytest.raises(ValueError, match=r"no 'blocks\.0\.ffn\.0\.weight'"):
        WorldDiTConfig.from_shapes(shapes, heads=2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"heads": 5}, "multiple of 5 heads"),
        ({"freq_dim": 15}, "odd"),
        ({"in_channels": 16}, "condition"),
        ({"control": "joystick"}, "accepted: cam, act"),
        ({"dim": 32}, "rotary axes"),
    ],
)
def test_contradicting_sizes_are_refused(change: dict[str, object], match: str) -> None:
    """Sizes that can't make a model are refused with what contradicts."""
    with pytest.raises(ValueError, match=match):
        replace(SMALL, **change)  # type: ignore[arg-type]


def test_random_weights_are_a_function_of_the_seed() -> None:
    """Two models of one seed are equal, of two seeds are not, and no parameter is left at zero."""
    one, same, other = random_world_dit(SMALL, 5), random_world_dit(SMALL, 5), random_world_dit(SMALL, 6)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert bool(a.any()), name
        assert not a.requires_grad


def test_flow_has_the_shape_of_the_latent() -> None:
    """A forward gives a finite float32 flow, and both cursors have moved by the chunk's tokens."""
    model = random_world_dit(SMALL, 0)
    caches = open_session(model)
    flow = run(model, caches, 0)
    assert flow.shape == (1, 16, FRAMES, HEIGHT, WIDTH)
    assert flow.dtype == torch.float32
    assert bool(flow.isfinite().all())
    assert (caches.rolling.global_end, caches.rolling.local_end) == (12, 12)


def test_a_repeated_forward_is_bitwise_the_same() -> None:
    """A second call with the same inputs overwrites its own slots and gives the same bits."""
    model = random_world_dit(SMALL, 0)
    caches = open_session(model)
    run(model, caches, 0, 0)
    first = run(model, caches, 1)
    run(model, caches, 1, 250)
    assert torch.equal(run(model, caches, 1), first)


@pytest.mark.parametrize("what", ["x", "condition", "control", "prompt", "timestep", "cache"])
def test_every_input_moves_the_flow(what: str) -> None:
    """Latent, condition, control, prompt, timestep and what earlier chunks left all reach the output."""
    model = random_world_dit(SMALL, 0)
    caches = open_session(model)
    run(model, caches, 0, 0)
    expected = run(model, caches, 1)
    control, condition, x, timestep = latent(201, 384), latent(101, 20), latent(1), 500.0
    if what == "x":
        x = x + 0.1
    elif what == "condition":
        condition = condition + 0.1
    elif what == "control":
        control = control + 0.1
    elif what == "timestep":
        timestep = 501.0
    elif what == "prompt":
        prompt = torch.randn(1, 4, 10, generator=torch.Generator().manual_seed(2))
        caches = replace(caches, prompt=model.open_session(prompt, caches.rolling.layout).prompt)
    else:
        caches = open_session(model)
    changed = model(x, timestep, model.prepare(1, condition, control), caches)
    assert float((changed - expected).abs().max()) > 1e-4


def test_missing_prompt_rows_are_attended_as_zeros() -> None:
    """A short prompt and the same prompt with zero rows written out are the same."""
    model = random_world_dit(SMALL, 0)
    layout = CacheLimits().layout(6, 4)
    short = torch.randn(1, 4, 10)
    padded = torch.cat((short, torch.zeros(1, 2, 10)), 1)
    for (k, v), (k2, v2) in zip(
        model.open_session(short, layout).prompt, model.open_session(padded, layout).prompt, strict=True
    ):
        assert k.shape == (1, 6, 2, 12)
        assert torch.equal(k, k2)
        assert torch.equal(v, v2)


def test_session_size_is_known_before_it_is_made() -> None:
    """`session_bytes` foretells what the caches then hold."""
    for dtype in (torch.float32, torch.bfloat16):
        model = random_world_dit(SMALL, 0, dtype=dtype)
        caches = open_session(model, CacheLimits(window=3))
        assert caches.cache_bytes == model.session_bytes(caches.rolling.layout)


def test_bfloat16_weights_give_nearly_the_same_flow() -> None:
    """With bfloat16 weights, caches are bfloat16, the flow is float32 and close to that of float32 weights."""
    exact, coarse = random_world_dit(SMALL, 0), random_world_dit(SMALL, 0, dtype=torch.bfloat16)
    flows = []
    for model in (exact, coarse):
        caches = open_session(model, CacheLimits(window=5, sink=1))
        flows.append([run(model, caches, index) for index in range(4)])
        assert caches.rolling.ordered(0)[0].dtype == model.dtype
    for a, b in zip(*flows, strict=True):
        assert b.dtype == torch.float32
        assert float((a - b).abs().max()) < 0.1 * float(a.abs().max())


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Condition, control and prompt of other shapes are refused by name."""
    model = random_world_dit(SMALL, 0)
    with pytest.raises(ValueError, match="condition is"):
        model.prepare(0, latent(0, 16), latent(0, 384))
    with pytest.raises(ValueError, match="control is"):
        model.prepare(0, latent(0, 20), latent(0, 448))
    layout = CacheLimits().layout(6, 4)
    for shape in ((1, 7, 10), (1, 4, 9), (2, 4, 10)):
        with pytest.raises(ValueError, match="prompt is"):
            model.open_session(torch.zeros(shape), layout)


def test_a_session_ends_at_the_last_rotary_position() -> None:
    """The chunk that would pass latent frame 1024 is refused."""
    model = random_world_dit(SMALL, 0)
    model.prepare(511, latent(0, 20), latent(0, 384))
    with pytest.raises(ValueError, match="must lie in 0 to 1024"):
        model.prepare(512, latent(0, 20), latent(0, 384))
