"""Names of the VAE's weights: from those of the original Wan 2.1 checkpoint to diffusers' ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .config import VaeConfig

_TOP = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
_IN_HALF = {
    "conv1": "conv_in",
    "head.0": "norm_out",
    "head.2": "conv_out",
    "middle.0": "mid_block.resnets.0",
    "middle.1": "mid_block.attentions.0",
    "middle.2": "mid_block.resnets.1",
}
_IN_RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}


def is_original(keys: Iterable[str]) -> bool:
    """Whether these are the original checkpoint's names (``encoder.downsamples.0.residual.2.weight``)."""
    return any(key.startswith(("encoder.downsamples.", "decoder.upsamples.")) for key in keys)


def diffusers_name(key: str, config: VaeConfig) -> str:
    """The name in diffusers' `AutoencoderKLWan` of a weight of the original Wan 2.1 checkpoint.

    Raises:
        ValueError: the original layout has no such name.
    """
    half, _, rest = key.partition(".")
    if half in _TOP:
        return f"{_TOP[half]}.{rest}"
    if half in ("encoder", "decoder"):
        for old, new in _IN_HALF.items():
            if rest.startswith(f"{old}."):
                return f"{half}.{new}{_within_block(rest.removeprefix(old))}"
        levels, _, inner = rest.partition(".")
        index, _, tail = inner.partition(".")
        if index.isdecimal() and tail:
            if (half, levels) == ("encoder", "downsamples"):
                return f"encoder.down_blocks.{index}{_within_block(f'.{tail}')}"
            if (half, levels) == ("decoder", "upsamples"):
                return f"decoder.up_blocks.{_up_block(int(index), config)}{_within_block(f'.{tail}')}"
    raise ValueError(f"{key!r} is not a weight of a Wan 2.1 VAE")


def _up_block(index: int, config: VaeConfig) -> str:
    # The original decoder lists all blocks in one row; diffusers groups them by level: residual blocks, then a resample.
    residuals = config.num_res_blocks + 1
    level, place = divmod(index, residuals + 1)
    return f"{level}.upsamplers.0" if place == residuals else f"{level}.resnets.{place}"


def _within_block(dotted: str) -> str:
    for old, new in _IN_RESIDUAL.items():
        if dotted.startswith(f".{old}."):
            return f".{new}{dotted.removeprefix(f'.{old}')}"
    return dotted


def original_sizes(shapes: Mapping[str, Sequence[int]]) -> VaeConfig:
    """The sizes of an original checkpoint, read off its tensors' shapes; means and deviations are Wan 2.1's.

    Raises:
        ValueError: it isn't one of a Wan 2.1 VAE; the message names the key that is missing.
    """

    def size(key: str, axis: int = 0) -> int:
        if key not in shapes or len(shapes[key]) <= axis or shapes[key][axis] < 1:
            raise ValueError(f"there is no {key!r} of the expected rank: not a Wan 2.1 VAE")
        return int(shapes[key][axis])

    # Every level is a row of residual blocks, then, but for the last one, a step down.
    dim = size("encoder.conv1.weight")
    widths: list[int] = []
    counts: list[int] = [0]
    halves_time: list[bool] = []
    place = 0
    while (block := f"encoder.downsamples.{place}") and any(key.startswith(f"{block}.") for key in shapes):
        if f"{block}.resample.1.weight" in shapes:
            halves_time.append(f"{block}.time_conv.weight" in shapes)
            counts.append(0)
        else:
            if counts[-1] == 0:
                widths.append(size(f"{block}.residual.2.weight"))
            counts[-1] += 1
        place += 1
    if not widths or len(set(counts)) > 1:
        raise ValueError(f"levels of {counts} residual blocks: not a Wan 2.1 VAE")
    return VaeConfig(
        dim=dim,
        z_dim=size("conv2.weight"),
        dim_mult=tuple(width // dim for width in widths),
        num_res_blocks=counts[0],
        temporal_downsample=tuple(halves_time),
    )
