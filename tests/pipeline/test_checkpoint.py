"""Checkpoints as safetensors folders: what is loaded is what was saved, and nothing else is taken for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reelwire.pipeline import registry
from reelwire.pipeline.stage import Stage
from reelwire.pipeline.wan.seeded import by_fan_in, fill_seeded, smooth_pictures
from reelwire.pipeline.wan.text import byte_tokenizer, text_network
from reelwire.pipeline.wan.vae import vae_network
from reelwire.pipeline.weights import Weights, load_strictly
from reelwire.pipeline.world.config import WorldConfig, tiny
from reelwire.pipeline.world.dit import random_world_dit
from reelwire.pipeline.world.pipeline import WorldPipeline
from reelwire.spec import RequestError

TINY = replace(tiny(), area=32 * 48)
DIT = "diffusion_pytorch_model"


def write_world(folder: Path, config: WorldConfig = TINY, *, shards: int = 1) -> Path:
    """The tiny model's seeded weights as a checkpoint folder."""
    seed = config.weights_seed
    assert seed is not None
    dit = {name: value.clone() for name, value in random_world_dit(config.dit, seed).state_dict().items()}
    write_dit(folder, dit, shards)
    (folder / "config.json").write_text(json.dumps({"num_heads": config.dit.heads, "text_len": config.text.text_len}))
    vae, text = vae_network(config.vae), text_network(config.text)
    fill_seeded(vae, seed, smooth_pictures)
    fill_seeded(text, seed, by_fan_in)
    vae.save_pretrained(folder / "vae")
    text.save_pretrained(folder / "text_encoder")
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def write_dit(folder: Path, state: dict[str, torch.Tensor], shards: int = 1) -> None:
    """A DiT's weights in one file, or in shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(state, folder / f"{DIT}.safetensors")
        return
    placed: dict[str, str] = {}
    for number in range(shards):
        part = dict(list(state.items())[number::shards])
        name = f"{DIT}-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / name)
        placed |= dict.fromkeys(part, name)
    (folder / f"{DIT}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder that no test writes to."""
    return write_world(tmp_path_factory.mktemp("checkpoint") / "world", shards=3)


@pytest.fixture
def copy(world: Path, tmp_path: Path) -> Path:
    """A checkpoint folder of the test's own, with the DiT in one file."""
    folder = tmp_path / "copy"
    folder.mkdir()
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(world.glob(f"{DIT}-*.safetensors")):
        state |= load_file(shard)
    write_dit(folder / "transformer", state)
    (folder / "transformer" / "config.json").write_bytes((world / "config.json").read_bytes())
    for part in ("vae", "text_encoder", "tokenizer"):
        (folder / part).mkdir()
        for file in (world / part).iterdir():
            (folder / part / file.name).write_bytes(file.read_bytes())
    return folder


def pipeline_of(folder: Path, **options: str) -> WorldPipeline:
    made = registry.load("world", {"checkpoint": str(folder), "dtype": "float32", **options})
    assert isinstance(made, WorldPipeline)
    return made


def chunk(pipeline: WorldPipeline) -> dict[str, torch.Tensor]:
    """The latent and the frames of a session's first chunk."""
    stages: dict[str, Stage] = {name: pipeline.build(name, "cpu") for name in ("encode", "decode", "denoise")}
    picture = torch.randint(0, 256, (30, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    request = {"prompt": "a stone bridge", "image": picture, "seed": 7, "area": TINY.area, "window": 12, "sink": 3}
    handed: dict[str, Any] = {}
    for stage in stages.values():
        handed.update(stage.initialize("s", 1, request, handed).handed)
    artifacts: dict[str, Any] = {"encode_request": {}, "control": {"keys": ["w"], "reset_pose": False}}
    for name in ("encode", "denoise", "decode"):
        artifacts.update(stages[name].run("s", 0, artifacts, is_first=True, is_last=True).outputs)
    return {"latent": artifacts["latent"]["latent"], "frames": artifacts["frames"]["frames"]}


def test_a_checkpoint_gives_what_its_weights_give(world: Path) -> None:
    """The seeded weights, written to sharded safetensors folders and loaded from them, make the same bits."""
    expected, loaded = chunk(WorldPipeline.of(TINY)), chunk(pipeline_of(world))
    assert torch.equal(loaded["latent"], expected["latent"])
    assert torch.equal(loaded["frames"], expected["frames"])


def test_sizes_are_read_off_the_files(world: Path) -> None:
    """The registry reads sizes, control and dtype from headers; the spec follows."""
    made = registry.load("world", {"checkpoint": str(world), "chunk_size": "1"})
    assert isinstance(made, WorldPipeline)
    config = made.config
    assert (config.dit, config.vae, config.text) == (TINY.dit, TINY.vae, TINY.text)
    assert (config.model, config.control, config.dtypes, made.spec.frames_first) == (
        "lingbot-world-fast",
        "cam",
        ("bfloat16",),
        1,
    )


def test_a_layout_with_a_transformer_folder_and_other_places(copy: Path, world: Path) -> None:
    """The DiT may lie in a folder of its own, and each part may be named by itself."""
    made = pipeline_of(copy, vae=str(world / "vae"))
    assert made.config.checkpoint is not None
    assert made.config.checkpoint.vae == world / "vae"
    assert torch.equal(chunk(made)["frames"], chunk(pipeline_of(world))["frames"])


def change(file: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write a file of weights anew, edited."""
    state = load_file(file)
    edit(state)
    save_file(state, file)


FILES = {
    "denoise": f"transformer/{DIT}.safetensors",
    "decode": f"vae/{DIT}.safetensors",
    "encode": "text_encoder/model.safetensors",
}
KEYS = {
    "denoise": "blocks.1.cam_scale_layer.weight",
    "decode": "decoder.mid_block.resnets.0.conv1.weight",
    "encode": "encoder.block.1.layer.0.SelfAttention.q.weight",
}


@pytest.mark.parametrize("stage", FILES)
@pytest.mark.parametrize("fault", ["missing", "surplus", "misshapen"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_key(copy: Path, stage: str, fault: str) -> None:
    """A key that is missing, left over or of another shape is named, for each part."""
    key = KEYS[stage]
    edits: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
        "missing": (lambda state: state.pop(key), f"1 missing ({key})"),
        "surplus": (lambda state: state.update({"extra.weight": torch.zeros(2)}), "1 left over (extra.weight)"),
        "misshapen": (lambda state: state.update({key: torch.zeros(2, 3)}), f"{key!r}"),
    }
    edit, words = edits[fault]
    change(copy / FILES[stage], edit)
    with pytest.raises(RequestError) as refused:
        pipeline_of(copy).build(stage, "cpu")
    assert refused.value.field == "checkpoint"
    assert words in str(refused.value)


BLOCK = "decoder.upsamples.{}.residual.2.weight"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ((BLOCK.format(0), "extra.weight"), "1 left over (extra.weight)"),
        ((BLOCK.format(0), "decoder.up_blocks.0.resnets.0.conv1.weight"), "1 left over (decoder.up_blocks.0."),
        ((BLOCK.format(0), BLOCK.format("00")), f"{BLOCK.format(0)!r} and {BLOCK.format('00')!r}"),
        ((BLOCK.format(99),), f"left over ({BLOCK.format(99)})"),
    ],
)
def test_an_original_vae_that_does_not_fit_is_refused_by_key(copy: Path, keys: tuple[str, ...], words: str) -> None:
    """A key that is left over among the original's names, or is another's second name, is named as the file has it."""
    save_file({key: torch.zeros(2) for key in keys}, copy / FILES["decode"])
    with pytest.raises(RequestError) as refused:
        pipeline_of(copy).build("decode", "cpu")
    assert refused.value.field == "checkpoint"
    assert words in str(refused.value)


def test_two_keys_that_mean_one_weight_are_refused(tmp_path: Path) -> None:
    """Whatever renames them: neither is loaded in place of the other."""
    save_file({"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(2, 2)}, tmp_path / "m.safetensors")
    network = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(RequestError, match=r"'a.weight' and 'b.weight' of .* both '0.weight'") as refused:
        load_strictly(network, Weights.open(tmp_path, "m"), torch.device("cpu"), rename=lambda _: "0.weight")
    assert refused.value.field == "checkpoint"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(96, dtype=torch.int8), "is int8; accepted: float32, bfloat16, float16"),
        (torch.full((96,), float("nan")), "values that aren't finite"),
    ],
)
def test_weights_that_are_no_numbers_to_compute_with_are_refused(copy: Path, value: torch.Tensor, words: str) -> None:
    """Another dtype, or a NaN, is found when the worker loads, not in a session's frames."""
    key = "c2ws_hidden_states_layer1.bias"
    change(copy / FILES["denoise"], lambda state: state.update({key: value}))
    with pytest.raises(RequestError, match=words) as refused:
        pipeline_of(copy).build("denoise", "cpu")
    assert refused.value.field == "checkpoint"
    assert key in str(refused.value)


def test_the_other_control_is_refused_by_key(world: Path) -> None:
    """Weights for camera control don't serve action control, and the key that says so is named."""
    with pytest.raises(RequestError, match=r"'patch_embedding_wancamctrl.weight'.* accepted: cam") as refused:
        pipeline_of(world, control="act")
    assert refused.value.field == "control"


def test_weights_of_something_else_are_refused_by_key(copy: Path) -> None:
    """A DiT without control input is no world model; the key that it lacks is named."""
    change(copy / FILES["denoise"], lambda state: state.pop("patch_embedding_wancamctrl.weight"))
    with pytest.raises(RequestError, match="patch_embedding_wancamctrl") as refused:
        pipeline_of(copy)
    assert refused.value.field == "checkpoint"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "vae" / "config.json").unlink(), "config.json can't be read"),
        (lambda folder: (folder / "vae" / "config.json").write_text("[1]"), "no JSON object"),
        (lambda folder: (folder / "vae" / "config.json").write_text('{"is_residual": true}'), "is_residual is True"),
        (
            lambda folder: (folder / "vae" / "config.json").write_text('{"z_dim": "x"}'),
            "z_dim is 'x'; accepted: an int",
        ),
        (lambda folder: (folder / "vae" / "config.json").write_text('{"base_dim": -1}'), "base_dim is -1; accepted"),
        (lambda folder: (folder / "vae" / "config.json").write_text('{"dim_mult": [[1]]}'), "dim_mult is"),
        (lambda folder: (folder / "vae" / "config.json").write_text('{"latents_std": [0.0]}'), "numbers above 0"),
        (lambda folder: (folder / "vae" / "config.json").write_text('{"latents_mean": ["a"]}'), "a list of numbers"),
        (lambda folder: (folder / "transformer" / "config.json").write_text('{"num_heads": 0}'), "0 heads; accepted"),
        (lambda folder: (folder / "vae" / "config.json").write_text('{"z_dim": 4}'), "latents_mean"),
        (
            lambda folder: (folder / "text_encoder" / "config.json").write_text('{"model_type": "t5"}'),
            "accepted: 'umt5'",
        ),
        (lambda folder: (folder / FILES["denoise"]).write_bytes(b"\x00" * 64), "accepted: a safetensors file"),
        (lambda folder: (folder / FILES["denoise"]).unlink(), f"neither {DIT}.safetensors nor"),
    ],
)
def test_a_broken_folder_is_refused(copy: Path, spoil: Callable[[Path], object], words: str) -> None:
    """What can't be read, or says what this model can't be, is refused with the file's name."""
    spoil(copy)
    with pytest.raises(RequestError, match=words) as refused:
        pipeline_of(copy)
    assert refused.value.field == "checkpoint"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"checkpoint": "/nowhere"}, "checkpoint"),
        ({"model": "tiny", "checkpoint": "."}, "checkpoint"),
        ({"model": "lingbot-world-fast"}, "checkpoint"),
        ({"vae": "somewhere"}, "vae"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_options_about_weights_are_checked(options: dict[str, str], field: str) -> None:
    """An option that leads nowhere, or says nothing to the model that was chosen, is refused by name."""
    with pytest.raises(RequestError) as refused:
        registry.load("world", options)
    assert refused.value.field == field


def test_a_tokenizer_that_is_larger_than_its_encoder_is_refused(copy: Path) -> None:
    """Tokens that the encoder has no rows for are found before the first prompt."""
    (copy / "text_encoder" / "config.json").write_text(
        json.dumps(json.loads((copy / "text_encoder" / "config.json").read_text()) | {"vocab_size": 100})
    )
    change(
        copy / FILES["encode"],
        lambda state: state.update({"shared.weight": state["shared.weight"][:100].contiguous()}),
    )
    with pytest.raises(RequestError, match=r"tokens; accepted: 100") as refused:
        pipeline_of(copy).build("encode", "cpu")
    assert refused.value.field == "tokenizer"


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    """A shard is a file beside its index, whatever the index says; one that lacks what the index promises is refused."""
    write_dit(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, shards=2)
    index = tmp_path / f"{DIT}.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(RequestError, match="a file of the same folder"):
        Weights.open(tmp_path, DIT)
    swapped = dict(zip(good["weight_map"], reversed(good["weight_map"].values()), strict=True))
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(RequestError, match="it isn't there"):
        Weights.open(tmp_path, DIT)


def test_a_fingerprint_tells_weights_apart(copy: Path) -> None:
    """It stays as long as the files do, and changes with them."""
    before = pipeline_of(copy).config.checkpoint
    assert before is not None
    first = before.fingerprint()
    assert before.fingerprint() == first
    change(copy / FILES["denoise"], lambda state: state["head.head.bias"].add_(1))
    assert before.fingerprint() != first
