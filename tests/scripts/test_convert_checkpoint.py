"""The original ``.pth`` files become folders that diffusers, transformers and the world model load."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reelwire.pipeline.wan.config import TextConfig, VaeConfig
from reelwire.pipeline.wan.seeded import by_fan_in, fill_seeded
from reelwire.pipeline.wan.text import text_network
from reelwire.pipeline.wan.text_keys import text_sizes, transformers_name
from reelwire.pipeline.wan.vae import vae_network
from reelwire.pipeline.wan.vae_keys import diffusers_name, original_sizes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "convert_checkpoint.py"
VAE = VaeConfig(dim=4, dim_mult=(1, 2, 2, 2), num_res_blocks=1)
TEXT = TextConfig(dim=16, vocab_size=384, layers=2, heads=2, head_dim=8, ffn_dim=32)

_RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
_TEXT_WORDS = {
    "layer.0.layer_norm": "norm1",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.0.SelfAttention": "attn",
    "layer.1.layer_norm": "norm2",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
}


def original_vae_name(name: str) -> str:
    """The original name of one of diffusers', for the sizes of this file."""
    top = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    first = name.partition(".")[0]
    if first in top:
        return name.replace(first, top[first], 1)
    for theirs, ours in (("conv_in", "conv1"), ("norm_out", "head.0"), ("conv_out", "head.2")):
        if name.split(".")[1] == theirs:
            return name.replace(theirs, ours, 1)
    name = re.sub(
        r"(resnets\.\d+|down_blocks\.\d+)\.(norm1|conv1|norm2|conv2)\b", lambda m: f"{m[1]}.{_RESIDUAL[m[2]]}", name
    )
    name = name.replace("conv_shortcut", "shortcut").replace("down_blocks", "downsamples")
    for theirs, ours in (("resnets.0", "middle.0"), ("attentions.0", "middle.1"), ("resnets.1", "middle.2")):
        name = name.replace(f"mid_block.{theirs}", ours)
    row = VAE.num_res_blocks + 2
    name = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda m: f"upsamples.{int(m[1]) * row + int(m[2])}", name)
    return re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"upsamples.{int(m[1]) * row + row - 1}", name)


def original_text_name(name: str) -> str:
    """The original name of one of transformers'."""
    name = {"shared.weight": "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}.get(name, name)
    for theirs, ours in _TEXT_WORDS.items():
        name = name.replace(theirs, ours)
    return name.replace("encoder.block.", "blocks.")


def vae_state() -> dict[str, Tensor]:
    """A small VAE's weights, by diffusers' names."""
    network = vae_network(VAE)
    fill_seeded(network, 1, by_fan_in)
    return dict(network.state_dict())


def text_state() -> dict[str, Tensor]:
    """A small text encoder's weights, by transformers' names, as its file has them."""
    network = text_network(TEXT).to(torch.bfloat16)
    fill_seeded(network, 2, by_fan_in)
    return {name: value for name, value in network.state_dict().items() if name != "encoder.embed_tokens.weight"}


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def convert(*arguments: object) -> int:
    """The exit code of the script's command."""
    found = importlib.util.spec_from_file_location("convert_checkpoint", SCRIPT)
    assert found is not None
    assert found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    code: int = script.main([str(argument) for argument in arguments])
    return code


def same(left: Mapping[str, Tensor], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_names_and_sizes_of_the_originals() -> None:
    """Every name has an original that maps back to it, and the originals' shapes tell the sizes."""
    vae = {original_vae_name(name): value for name, value in vae_state().items()}
    assert {diffusers_name(name, VAE) for name in vae} == vae_state().keys()
    assert original_sizes(shapes(vae)) == VAE
    text = {original_text_name(name): value for name, value in text_state().items()}
    assert {transformers_name(name) for name in text} == text_state().keys()
    assert text_sizes(shapes(text)) == TEXT


def test_the_vae_becomes_a_folder_of_diffusers(tmp_path: Path) -> None:
    """The library itself loads it, with every tensor as it was."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    state = vae_state()
    torch.save({original_vae_name(name): value for name, value in state.items()}, tmp_path / "vae.pth")
    command = [sys.executable, "-P", str(SCRIPT), "vae", str(tmp_path / "vae.pth"), str(tmp_path / "made" / "vae")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    network: Any = AutoencoderKLWan
    loaded = network.from_pretrained(tmp_path / "made" / "vae")
    assert same(state, loaded.state_dict())
    assert loaded.config.dim_mult == list(VAE.dim_mult)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["vae"]


def test_the_text_encoder_becomes_a_folder_of_transformers(tmp_path: Path) -> None:
    """The library itself loads it, in the dtype of the file, and gives the embeddings of the original."""
    from transformers import UMT5EncoderModel

    state = text_state()
    torch.save({original_text_name(name): value for name, value in state.items()}, tmp_path / "t5.pth")
    assert convert("text-encoder", tmp_path / "t5.pth", tmp_path / "text_encoder") == 0
    loaded = UMT5EncoderModel.from_pretrained(tmp_path / "text_encoder", dtype=torch.bfloat16)
    assert same(state, {name: loaded.state_dict()[name] for name in state})
    assert json.loads((tmp_path / "text_encoder" / "config.json").read_text())["model_type"] == "umt5"


class Harmful:
    """What a file must not be able to do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


def test_a_file_that_would_run_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in a file is run: it is weights, or it is refused, and nothing is written."""
    torch.save({"conv1.weight": Harmful()}, tmp_path / "bad.pth")
    assert convert("vae", tmp_path / "bad.pth", tmp_path / "made") == 2
    said = capsys.readouterr()
    assert "can't be read as weights alone" in said.err
    assert "ran" not in said.out
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"conv1.extra": torch.zeros(1)}, "left over (conv1.extra)"),
        ({"nonsense.weight": torch.zeros(1)}, "1 left over (nonsense.weight)"),
        ({"conv1.weight": torch.zeros(1)}, "'conv1.weight'"),
        ({"encoder.conv1.weight": torch.zeros(())}, "'encoder.conv1.weight'"),
        (
            {"decoder.upsamples.00.residual.2.weight": torch.zeros(1)},
            "'decoder.upsamples.0.residual.2.weight' and 'decoder.upsamples.00.residual.2.weight'",
        ),
    ],
)
def test_another_checkpoint_is_refused_by_key(
    tmp_path: Path, edit: dict[str, Tensor], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that doesn't belong, or is there twice, or a tensor of another shape, is named."""
    state = {original_vae_name(name): value for name, value in vae_state().items()}
    torch.save(state | edit, tmp_path / "vae.pth")
    assert convert("vae", tmp_path / "vae.pth", tmp_path / "made") == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("made*"))


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """What lies at the target is never overwritten."""
    torch.save({original_vae_name(name): value for name, value in vae_state().items()}, tmp_path / "vae.pth")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("mine")
    assert convert("vae", tmp_path / "vae.pth", tmp_path / "made") == 2
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["mine"]


@pytest.mark.parametrize("arguments", [(), ("nope",), ("vae",)])
def test_wrong_usage_is_said_without_a_traceback(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that are missing or unknown end with 2, and with what is accepted."""
    assert convert(*arguments) == 2
    said = capsys.readouterr()
    assert "Usage" in said.out + said.err
