"""A world model's checkpoint: where its parts are, what sizes they have, and the parts themselves.

::

    FOLDER/  or  FOLDER/transformer/   diffusion_pytorch_model*.safetensors [, .index.json] [, config.json]: the DiT
    FOLDER/vae/                        config.json, diffusion_pytorch_model.safetensors: an AutoencoderKLWan of diffusers
    FOLDER/text_encoder/               config.json, model*.safetensors [, .index.json]: a UMT5EncoderModel of transformers
    FOLDER/tokenizer/                  its tokenizer, as transformers saves it

`scripts/convert_checkpoint.py` makes `vae` and `text_encoder` of the original ``.pth`` files. Everything is read from
files that are there; nothing is downloaded, nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reelwire.spec import RequestError

from ..wan.config import TextConfig, VaeConfig
from ..wan.text import PromptEncoder
from ..wan.vae import vae_network
from ..wan.vae_keys import diffusers_name, is_original
from ..weights import FIELD, Weights, load_strictly, read_config
from .config import ControlKind, Dtype, WorldConfig, lingbot_world_fast
from .dit import WorldDiT
from .dit_config import CONTROL_CHANNELS, PATCH, WorldDiTConfig

DIFFUSION, TEXT = "diffusion_pytorch_model", "model"
_VAE_FIXED: Mapping[str, tuple[object, ...]] = {
    "attn_scales": ([],),
    "is_residual": (False,),
    "in_channels": (3,),
    "out_channels": (3,),
    "patch_size": (None, 1),
    "decoder_base_dim": (None,),
}
"""What else a diffusers config may say, and the values for which this VAE is the same."""
_VAE_SIZES: Mapping[str, str] = {
    "dim": "base_dim",
    "z_dim": "z_dim",
    "dim_mult": "dim_mult",
    "num_res_blocks": "num_res_blocks",
    "temporal_downsample": "temperal_downsample",  # diffusers' own spelling
    "latents_mean": "latents_mean",
    "latents_std": "latents_std",
}
_VAE_LISTS = ("dim_mult", "temperal_downsample", "latents_mean", "latents_std")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the parts of a world model are.

    Attributes:
        transformer: the DiT's folder or file.
        vae: the VAE's folder.
        text_encoder: the prompt encoder's folder.
        tokenizer: the tokenizer's folder.
    """

    transformer: Path
    vae: Path
    text_encoder: Path
    tokenizer: Path

    @classmethod
    def at(cls, folder: str, parts: Mapping[str, str]) -> Checkpoint:
        """The parts in a folder; `parts` names others, by attribute.

        Raises:
            RequestError: there is no such folder or part; the field names which.
        """
        top = Path(folder).expanduser()
        if not top.is_dir():
            raise RequestError(FIELD, f"{folder!r} is no folder; accepted: one that holds a world model")
        inner = top / "transformer"
        places = {
            "transformer": inner if inner.is_dir() else top,
            **{name: top / name for name in ("vae", "text_encoder", "tokenizer")},
            **{name: Path(place).expanduser() for name, place in parts.items()},
        }
        for name, place in places.items():
            if not place.exists():
                raise RequestError(
                    name if name in parts else FIELD, f"{place} isn't there; accepted: the {name} of a world model"
                )
        return cls(**places)

    def config(self, chunk_size: int, control: ControlKind | None, dtype: Dtype) -> WorldConfig:
        """The sizes of all parts, read off the files' headers.

        Args:
            chunk_size: latent frames per chunk.
            control: what the weights have to take; None: whatever they do.
            dtype: what the DiT computes in.

        Raises:
            RequestError: a part isn't what it should be, or takes the other control; the key is named.
        """
        weights = Weights.open(self.transformer, DIFFUSION)
        dit = _dit_config(weights, self.transformer)
        if control is not None and control != dit.control:
            width = CONTROL_CHANNELS[dit.control] * PATCH[0] * PATCH[1] * PATCH[2]
            wanted = CONTROL_CHANNELS[control] * PATCH[0] * PATCH[1] * PATCH[2]
            raise RequestError(
                "control",
                f"'patch_embedding_wancamctrl.weight' of {self.transformer} takes {width} values ({dit.control}), "
                f"control {control!r} has {wanted}; accepted: {dit.control}",
            )
        base = lingbot_world_fast(chunk_size, dit.control)
        vae, text = _vae_config(self.vae), _text_config(self.text_encoder, dit.text_tokens)
        try:
            return replace(base, dit=dit, vae=vae, text=text, dtypes=(dtype,), checkpoint=self)
        except ValueError as error:
            raise RequestError(FIELD, str(error)) from None

    def fingerprint(self) -> str:
        """What tells these weights from others, without reading them all; see `Weights.fingerprint`."""
        parts = (
            Weights.open(self.transformer, DIFFUSION),
            Weights.open(self.vae, DIFFUSION),
            Weights.open(self.text_encoder, TEXT),
        )
        return hashlib.blake2b("/".join(part.fingerprint() for part in parts).encode(), digest_size=16).hexdigest()

    def world_dit(self, config: WorldDiTConfig, dtype: torch.dtype, device: torch.device) -> WorldDiT:
        """The DiT, in a dtype, on a device.

        Raises:
            RequestError: a key is missing or left over, or a tensor has another shape; the key is named.
        """
        with torch.device("meta"):
            model = WorldDiT(config)
        load_strictly(model, Weights.open(self.transformer, DIFFUSION), device, dtype)
        return model

    def vae_network(self, config: VaeConfig, device: torch.device) -> nn.Module:
        """The VAE, in float32, on a device. Raises as `world_dit` does."""
        with torch.device("meta"):
            network: nn.Module = vae_network(config)
        weights = Weights.open(self.vae, DIFFUSION)
        if is_original(weights.shapes):
            load_strictly(network, weights, device, torch.float32, rename=lambda key: diffusers_name(key, config))
        else:
            load_strictly(network, weights, device, torch.float32)
        return network

    def prompts(self, config: TextConfig, device: torch.device) -> PromptEncoder:
        """The prompt encoder with its tokenizer, in the dtype of the file. Raises as `world_dit` does."""
        from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

        with torch.device("meta"):
            network: Any = UMT5EncoderModel(UMT5Config(**_text_settings(self.text_encoder)))
        tied = {"encoder.embed_tokens.weight": "shared.weight"}
        load_strictly(network, Weights.open(self.text_encoder, TEXT), device, tied=tied)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(self.tokenizer), local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            reason = f"{self.tokenizer} can't be read ({error}); accepted: a tokenizer that transformers saved"
            raise RequestError("tokenizer", reason) from None
        if len(tokenizer) > config.vocab_size:
            raise RequestError(
                "tokenizer", f"{self.tokenizer} has {len(tokenizer)} tokens; accepted: {config.vocab_size} at most"
            )
        return PromptEncoder(tokenizer, network, config.text_len)


def _dit_config(weights: Weights, place: Path) -> WorldDiTConfig:
    said = read_config(place) if (place / "config.json").is_file() else {}
    heads, text_tokens, eps = said.get("num_heads"), said.get("text_len", 512), said.get("eps", 1e-6)
    if not (heads is None or type(heads) is int) or type(text_tokens) is not int or not isinstance(eps, float):
        raise RequestError(FIELD, f"{place / 'config.json'}: accepted: integers num_heads and text_len, a number eps")
    try:
        return replace(WorldDiTConfig.from_shapes(weights.shapes, heads=heads, text_tokens=text_tokens), eps=eps)
    except ValueError as error:
        raise RequestError(FIELD, f"{weights.path}: {error}") from None


def _vae_config(folder: Path) -> VaeConfig:
    said = read_config(folder)
    for name, accepted in _VAE_FIXED.items():
        if name in said and said[name] not in accepted:
            raise RequestError(FIELD, f"{folder}: {name} is {said[name]!r}; accepted: {accepted[0]!r}")
    values: dict[str, Any] = {}
    for mine, theirs in _VAE_SIZES.items():
        if theirs in said:
            value = said[theirs]
            kind, words = _kinds(theirs)
            parts = value if isinstance(value, list) else [value]
            if isinstance(value, list) != (theirs in _VAE_LISTS) or not all(map(kind, parts)):
                raise RequestError(FIELD, f"{folder / 'config.json'}: {theirs} is {value!r}; accepted: {words}")
            values[mine] = tuple(value) if isinstance(value, list) else value
    try:
        return VaeConfig(**values)
    except ValueError as error:
        raise RequestError(FIELD, f"{folder / 'config.json'}: {error}") from None


def _kinds(name: str) -> tuple[Callable[[Any], bool], str]:
    """What a value of a VAE's config, or each value of its list, has to be: a test, and in words."""
    match name:
        case "temperal_downsample":
            return lambda value: isinstance(value, bool), "a list of true and false"
        case "latents_mean":
            return _is_number, "a list of numbers"
        case "latents_std":
            return lambda value: _is_number(value) and value > 0, "a list of numbers above 0"
        case _:
            words = "a list of integers of 1 and more" if name in _VAE_LISTS else "an integer of 1 and more"
            return lambda value: type(value) is int and value > 0, words


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text_settings(folder: Path) -> dict[str, Any]:
    said = read_config(folder)
    if said.get("model_type") != "umt5":
        raise RequestError(FIELD, f"{folder} holds a model of type {said.get('model_type')!r}; accepted: 'umt5'")
    return {name: value for name, value in said.items() if name not in ("model_type", "architectures")}


def _text_config(folder: Path, text_len: int) -> TextConfig:
    said = _text_settings(folder)
    names = {
        "dim": "d_model",
        "vocab_size": "vocab_size",
        "layers": "num_layers",
        "heads": "num_heads",
        "head_dim": "d_kv",
        "ffn_dim": "d_ff",
    }
    for theirs in names.values():
        if type(said.get(theirs)) is not int:
            raise RequestError(
                FIELD, f"{folder / 'config.json'}: {theirs} is {said.get(theirs)!r}; accepted: an integer"
            )
    return TextConfig(text_len=text_len, **{mine: said[theirs] for mine, theirs in names.items()})
