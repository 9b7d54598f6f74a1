"""Make safetensors folders of the original ``.pth`` files of the Wan VAE and text encoder.

::

    python scripts/convert_checkpoint.py vae Wan2.1_VAE.pth MODEL/vae
    python scripts/convert_checkpoint.py text-encoder models_t5_umt5-xxl-enc-bf16.pth MODEL/text_encoder

The result is what diffusers' `AutoencoderKLWan` and transformers' `UMT5EncoderModel` load, and `checkpoint=MODEL`. The
files are read with ``weights_only=True``: nothing in them is run. Tensors keep their dtype.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from reelwire.errors import ReelwireError
from reelwire.pipeline.wan.text_keys import text_sizes, transformers_name
from reelwire.pipeline.wan.vae_keys import diffusers_name, original_sizes

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Source = Annotated[Path, typer.Argument(help="the .pth file")]
Target = Annotated[Path, typer.Argument(help="the folder to make; it may not hold anything")]


@app.command()
def vae(source: Source, target: Target) -> None:
    """The Wan 2.1 VAE."""
    from reelwire.pipeline.wan.vae import vae_network

    state = _read(source)
    config = original_sizes(_shapes(state))
    with torch.device("meta"):
        network = vae_network(config)
    settings = {"_class_name": "AutoencoderKLWan", **{k: v for k, v in network.config.items() if not k.startswith("_")}}
    fitting = _fitting(state, lambda key: diffusers_name(key, config), network.state_dict(), source)
    _write(fitting, target, "diffusion_pytorch_model", settings)


@app.command()
def text_encoder(source: Source, target: Target) -> None:
    """The UMT5 text encoder of Wan."""
    from reelwire.pipeline.wan.text import text_network

    state = _read(source)
    config = text_sizes(_shapes(state))
    with torch.device("meta"):
        network = text_network(config)
    needed = {key: value for key, value in network.state_dict().items() if key != "encoder.embed_tokens.weight"}
    fitting = _fitting(state, transformers_name, needed, source)
    settings = {**network.config.to_diff_dict(), "architectures": ["UMT5EncoderModel"]}
    _write(fitting, target, "model", settings)


def _read(source: Path) -> dict[str, Tensor]:
    if not source.is_file():
        raise ValueError(f"{source} is no file; accepted: a .pth file")
    try:
        state: Any = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  the reader's errors have no common root
        raise ValueError(f"{source} can't be read as weights alone: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{source} holds no table of tensors")
    return state


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items()}


def _fitting(
    state: Mapping[str, Tensor], rename: Callable[[str], str], needed: Mapping[str, Tensor], source: Path
) -> dict[str, Tensor]:
    """All tensors under their new names, which are those that are needed."""
    from reelwire.pipeline.weights import check_fit, renamed

    names = renamed(state, rename, source)
    given = {mine: state[theirs] for mine, theirs in names.items()}
    check_fit(_shapes(needed), _shapes(given), source, names)
    return given


def _write(state: dict[str, Tensor], target: Path, stem: str, settings: Mapping[str, object]) -> None:
    """Write into a folder beside the target and rename it, so that a target is there as a whole or not at all."""
    from huggingface_hub import save_torch_state_dict

    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise ValueError(f"{target} isn't empty; accepted: a folder to be made")
    making = target.with_name(f"{target.name}.making")
    making.mkdir(parents=True)
    try:
        contiguous = {key: tensor.contiguous() for key, tensor in state.items()}
        save_torch_state_dict(contiguous, making, filename_pattern=f"{stem}{{suffix}}.safetensors")
        (making / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        making.replace(target)
    except BaseException:
        shutil.rmtree(making)
        raise
    sys.stdout.write(f"{target}: {len(state)} tensors\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; what can't be done is said in one sentence."""
    try:
        app(arguments)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    except (ReelwireError, ValueError, OSError) as error:
        sys.stderr.write(f"convert_checkpoint: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
