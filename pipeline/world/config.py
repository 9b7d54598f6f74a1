"""A whole world model as data: the sizes of its parts and how its sessions run unless a request says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..wan.config import TextConfig, VaeConfig
from .keyboard import KeyboardParameters

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .dit_config import WorldDiTConfig

Dtype = Literal["float32", "bfloat16"]
ControlKind = Literal["cam", "act"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """Sizes and defaults of a world model; the defaults are those of LingBot-World-Fast.

    Attributes:
        model: the configuration's name.
        dit: sizes of the causal DiT.
        vae: sizes of the video VAE.
        text: sizes of the prompt encoder.
        weights_seed: what the weights are drawn from; None: they come from a checkpoint.
        checkpoint: where that is.
        chunk_size: latent frames per chunk.
        fps: frames per second of the output.
        area: pixels of a frame, about.
        area_max: most pixels of a frame that a request may ask for.
        sample_shift: timestep shift of the noise schedule.
        timestep_indices: which of the schedule's 1000 levels are the denoising steps.
        window: latent frames that the key/value cache holds; -1: all of the session.
        sink: how many of the first latent frames are never evicted from it.
        attention: how many of the newest latent frames are attended to; -1: all that the cache holds.
        dtypes: what the DiT can run in; the first is the default.
        keyboard: how far a held key moves the camera.

    Raises:
        ValueError: the parts don't fit each other.
    """

    model: str
    dit: WorldDiTConfig
    vae: VaeConfig = field(default_factory=VaeConfig)
    text: TextConfig = field(default_factory=TextConfig)
    weights_seed: int | None = None
    checkpoint: Checkpoint | None = None
    chunk_size: int = 3
    fps: float = 16.0
    area: int = 480 * 832
    area_max: int = 720 * 1280
    sample_shift: float = 10.0
    timestep_indices: tuple[int, ...] = (0, 179, 358, 679)
    window: int = -1
    sink: int = 0
    attention: int = -1
    dtypes: tuple[Dtype, ...] = ("bfloat16",)
    keyboard: KeyboardParameters = field(default_factory=KeyboardParameters)

    def __post_init__(self) -> None:
        """Refuse parts that don't fit each other."""
        pairs = {
            "width of a prompt embedding": (self.text.dim, self.dit.text_dim),
            "rows of a prompt embedding": (self.text.text_len, self.dit.text_tokens),
            "latent channels": (self.vae.z_dim, self.dit.out_channels),
        }
        for name, (made, taken) in pairs.items():
            if made != taken:
                raise ValueError(f"{self.model}: {name}: {made} are made, the DiT takes {taken}")
        if (self.vae.spatial, self.vae.temporal) != (8, 4):
            raise ValueError(f"{self.model}: the VAE must compress 8x in space and 4x in time")
        if self.chunk_size < 1:
            raise ValueError(f"{self.model}: chunk_size is {self.chunk_size}, below 1")

    @property
    def control(self) -> ControlKind:
        """What the weights take as control: camera rays, or ray directions and action flags."""
        return self.dit.control


def tiny(chunk_size: int = 3, control: ControlKind = "cam") -> WorldConfig:
    """A small model with weights drawn from a seed: same code, same shapes, no checkpoint, a chunk in under a second.

    It has learned nothing: its frames are coloured textures that follow the image, the prompt, the seed and the keys.
    """
    from .dit_config import WorldDiTConfig

    text = TextConfig(dim=64, text_len=64, vocab_size=384, layers=2, heads=2, head_dim=32, ffn_dim=128)
    return WorldConfig(
        model="tiny",
        dit=WorldDiTConfig(
            dim=96,
            layers=3,
            heads=4,
            ffn=256,
            text_dim=text.dim,
            text_tokens=text.text_len,
            freq_dim=64,
            control=control,
        ),
        vae=VaeConfig(dim=8, dim_mult=(1, 2, 2, 2), num_res_blocks=1),
        text=text,
        weights_seed=7,
        chunk_size=chunk_size,
        area=112 * 192,
        area_max=480 * 832,
        window=12,
        sink=3,
        dtypes=("float32", "bfloat16"),
    )


def lingbot_world_fast(chunk_size: int = 3, control: ControlKind = "cam") -> WorldConfig:
    """LingBot-World-Fast, 14B parameters. Its weights come from a checkpoint."""
    from .dit_config import WorldDiTConfig

    return WorldConfig(model="lingbot-world-fast", dit=WorldDiTConfig(control=control), chunk_size=chunk_size)


MODELS: Mapping[str, Callable[[int, ControlKind], WorldConfig]] = {
    "tiny": tiny,
    "lingbot-world-fast": lingbot_world_fast,
}
"""Name of a built-in configuration -> what makes it, from chunk size and control kind."""


def buildable_models() -> tuple[str, ...]:
    """Names of the built-in configurations whose weights are drawn from a seed, so that they need no checkpoint."""
    return tuple(name for name, make in MODELS.items() if make(1, "cam").weights_seed is not None)
