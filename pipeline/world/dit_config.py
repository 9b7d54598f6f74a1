"""Sizes of a world DiT: given, or read off a checkpoint's tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from ..wan.blocks import rotary_split
from .config import ControlKind

PATCH = (1, 2, 2)
CONTROL_CHANNELS: Mapping[ControlKind, int] = {"cam": 6 * 64, "act": 7 * 64}
"""Channels of the control tensor: ray origin and direction, or direction and four action flags, of 8 x 8 pixels."""

_CONTROL_KINDS: tuple[ControlKind, ...] = get_args(ControlKind)
_PATCH_ELEMENTS = PATCH[0] * PATCH[1] * PATCH[2]
_TRAINED_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldDiTConfig:
    """Sizes of a `WorldDiT`; the defaults are those of LingBot-World-Fast.

    Attributes:
        dim: model width.
        layers: blocks.
        heads: attention heads; `dim // heads` must fit `rotary_split`.
        ffn: inner width of the feed-forward.
        text_dim: channels of a prompt embedding.
        text_tokens: rows of a prompt embedding; shorter ones are padded with zeros, which are attended to.
        freq_dim: size of the sinusoidal timestep embedding.
        in_channels: noise (`out_channels`), then condition (4 mask channels and a latent).
        out_channels: channels of the latent.
        control: ``"cam"`` (camera rays) or ``"act"`` (ray directions and action flags).
        eps: of all norms.

    Raises:
        ValueError: sizes contradict each other.
    """

    dim: int = 5120
    layers: int = 40
    heads: int = 40
    ffn: int = 13824
    text_dim: int = 4096
    text_tokens: int = 512
    freq_dim: int = 256
    in_channels: int = 36
    out_channels: int = 16
    control: ControlKind = "cam"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"{self.heads} heads; accepted: 1 or more")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} isn't a multiple of {self.heads} heads")
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim {self.freq_dim} is odd; it holds cosines and as many sines")
        if self.in_channels <= self.out_channels:
            raise ValueError(f"{self.in_channels} input channels leave none for the condition")
        if self.control not in CONTROL_CHANNELS:
            raise ValueError(f"control {self.control!r} is unknown; accepted: {', '.join(CONTROL_CHANNELS)}")
        rotary_split(self.head_dim)

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads

    @property
    def condition_channels(self) -> int:
        """Channels of the condition: mask, then latent of the encoded image."""
        return self.in_channels - self.out_channels

    @property
    def control_channels(self) -> int:
        """Channels of the control tensor."""
        return CONTROL_CHANNELS[self.control]

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, Sequence[int]], *, heads: int | None = None, text_tokens: int = 512
    ) -> WorldDiTConfig:
        """Read the sizes off a checkpoint.

        Args:
            shapes: parameter name to shape.
            heads: attention heads, which no shape tells; by default heads of 128 channels.
            text_tokens: rows of a prompt embedding, which no shape tells.

        Raises:
            ValueError: the checkpoint isn't one of a world DiT; the message names the parameter.
        """

        def size(name: str, axis: int) -> int:
            if name not in shapes or len(shapes[name]) <= axis:
                raise ValueError(f"checkpoint has no {name!r} of the expected rank: not a world DiT")
            return shapes[name][axis]

        dim = size("patch_embedding.weight", 0)
        width = size("patch_embedding_wancamctrl.weight", 1)
        controls: list[ControlKind] = [n for n in _CONTROL_KINDS if CONTROL_CHANNELS[n] * _PATCH_ELEMENTS == width]
        if not controls:
            raise ValueError(
                f"'patch_embedding_wancamctrl.weight' takes {width} values, neither camera nor action control"
            )
        return cls(
            dim=dim,
            layers=len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
            heads=max(1, dim // _TRAINED_HEAD_DIM) if heads is None else heads,
            ffn=size("blocks.0.ffn.0.weight", 0),
            text_dim=size("text_embedding.0.weight", 1),
            text_tokens=text_tokens,
            freq_dim=size("time_embedding.0.weight", 1),
            in_channels=size("patch_embedding.weight", 1),
            out_channels=size("head.head.bias", 0) // _PATCH_ELEMENTS,
            control=controls[0],
        )
