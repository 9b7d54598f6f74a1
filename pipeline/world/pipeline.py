"""The world model as a `Pipeline`: its spec at once, its stages, with their weights, when a worker builds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reelwire.spec import RequestError, StreamSpec

from ..stage import Stage
from .config import WorldConfig, buildable_models
from .stream import world_spec

if TYPE_CHECKING:
    from torch import nn

    from .stages import DecodeStage, DenoiseStage, EncodeStage


@dataclass(slots=True)
class WorldPipeline:
    """A world model that a worker can serve.

    Attributes:
        config: sizes and defaults.
        spec: its dataflow.
        array_library: stages take and give CPU tensors.
    """

    config: WorldConfig
    spec: StreamSpec
    array_library: Literal["numpy", "torch"] = "torch"

    @classmethod
    def of(cls, config: WorldConfig) -> WorldPipeline:
        """The pipeline of a model.

        Raises:
            RequestError: the model's weights come from a checkpoint, which can't be had here.
        """
        if config.weights_seed is None:
            raise RequestError(
                "model",
                f"{config.model!r} needs the weights of a checkpoint and can't be built without them; "
                f"accepted: {', '.join(buildable_models())}",
            )
        return cls(config, world_spec(config))

    def build(self, stage: str, device: str) -> Stage:
        """Make a stage with its weights on ``"cpu"`` or ``"cuda:N"``.

        Raises:
            RequestError: there is no such stage or device.
        """
        builders: dict[str, Callable[[str], Stage]] = {
            "encode": self._encode,
            "denoise": self._denoise,
            "decode": self._decode,
        }
        if stage not in builders:
            raise RequestError("stage", f"there is no {stage!r}; accepted: {', '.join(builders)}")
        return builders[stage](device)

    def _encode(self, device: str) -> EncodeStage:
        from ..device import Lane
        from ..wan.seeded import by_fan_in, fill_seeded
        from ..wan.text import PromptEncoder, byte_tokenizer, text_network
        from ..wan.vae import encoder_of
        from .stages import EncodeStage

        lane = Lane(device)
        vae = self._vae()
        text = text_network(self.config.text)
        fill_seeded(text, self._seed, by_fan_in)
        encoder = encoder_of(vae, self.config.vae).to(lane.device)
        prompts = PromptEncoder(byte_tokenizer(), text.to(lane.device), self.config.text.text_len)
        return EncodeStage(self.config, encoder, prompts, lane)

    def _denoise(self, device: str) -> DenoiseStage:
        from ..device import Lane
        from .dit import random_world_dit
        from .stages import DenoiseStage

        lane = Lane(device)
        config, seed = self.config.dit, self._seed
        return DenoiseStage(
            self.config, lambda dtype: random_world_dit(config, seed, dtype=dtype, device=lane.device), lane
        )

    def _decode(self, device: str) -> DecodeStage:
        from ..device import Lane
        from ..wan.vae import decoder_of
        from .stages import DecodeStage

        lane = Lane(device)
        return DecodeStage(self.config, decoder_of(self._vae(), self.config.vae).to(lane.device), lane)

    @property
    def _seed(self) -> int:
        assert self.config.weights_seed is not None
        return self.config.weights_seed

    def _vae(self) -> nn.Module:
        from ..wan.seeded import fill_seeded, smooth_pictures
        from ..wan.vae import vae_network

        vae: nn.Module = vae_network(self.config.vae)
        fill_seeded(vae, self._seed, smooth_pictures)
        return vae
