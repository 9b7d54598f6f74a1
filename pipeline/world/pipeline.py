"""The world model as a `Pipeline`: its spec at once, its stages, with their weights, when a worker builds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reelwire.spec import RequestError, StreamSpec

from ..stage import Ranks, Stage
from .config import WorldConfig, buildable_models
from .stream import world_spec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..parallel import Parallel
    from .decode_stage import DecodeStage
    from .denoise_stage import DenoiseStage
    from .dit import WorldDiT
    from .encode_stage import EncodeStage

LATENT_CACHE_BYTES = 1 << 30


@dataclass(slots=True)
class WorldPipeline:
    """A world model that a worker can serve.

    Attributes:
        config: sizes and defaults.
        spec: its dataflow.
        array_library: stages take and give CPU tensors.
        condition_constant: whether encode finds out from when on a session's condition is constant; the bits are the
            same without.
        latent_cache_bytes: memory that denoise may take to keep latents for sessions with the same beginning, in bytes;
            0: none. The bits are the same with any. Of a worker group rank 0 alone takes it.
        parallel_stages: which stages the ranks of a worker group can compute together.
    """

    config: WorldConfig
    spec: StreamSpec
    array_library: Literal["numpy", "torch"] = "torch"
    condition_constant: bool = True
    latent_cache_bytes: int = LATENT_CACHE_BYTES
    parallel_stages: tuple[str, ...] = ("denoise",)

    @classmethod
    def of(cls, config: WorldConfig) -> WorldPipeline:
        """The pipeline of a model.

        Raises:
            RequestError: the model's weights come from a checkpoint, and none was named.
        """
        if config.weights_seed is None and config.checkpoint is None:
            raise RequestError(
                "checkpoint",
                f"{config.model!r} needs a folder with weights; accepted: checkpoint=FOLDER, or a model that needs none "
                f"({', '.join(buildable_models())})",
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

    def check_group(self, world: int) -> None:
        """Check that `world` ranks can share the DiT's attention heads.

        Raises:
            RequestError: they can't; the field is ``world``.
        """
        from ..parallel import check_heads

        check_heads(self.config.dit.heads, world)

    def build_parallel(self, stage: str, device: str, ranks: Ranks) -> Stage:
        """Make a stage for one rank of a worker group; every rank has all of its weights.

        Args:
            stage: one of `parallel_stages`.
            device: ``"cpu"`` or ``"cuda:N"``.
            ranks: a `Parallel`, which has its process group when the stage is first run.

        Raises:
            RequestError: there is no such stage or device, or the ranks can't share it.
        """
        from ..parallel import Parallel

        assert isinstance(ranks, Parallel)
        if stage not in self.parallel_stages:
            accepted = ", ".join(self.parallel_stages)
            raise RequestError("stage", f"{stage!r} can't be computed by a group; accepted: {accepted}")
        self.check_group(ranks.world)
        return self._denoise(device, ranks)

    def _encode(self, device: str) -> EncodeStage:
        from ..device import Lane
        from ..wan.seeded import by_fan_in, fill_seeded
        from ..wan.text import PromptEncoder, byte_tokenizer, text_network
        from ..wan.vae import encoder_of
        from .encode_stage import EncodeStage

        lane, checkpoint = Lane(device), self.config.checkpoint
        encoder = encoder_of(self._vae(lane.device), self.config.vae)
        if checkpoint is not None:
            prompts = checkpoint.prompts(self.config.text, lane.device)
        else:
            text = text_network(self.config.text)
            fill_seeded(text, self._seed, by_fan_in)
            prompts = PromptEncoder(byte_tokenizer(), text.to(lane.device), self.config.text.text_len)
        weights, settle = self._weights_identity(), self.condition_constant
        return EncodeStage(self.config, encoder, prompts, lane, weights=weights, settle=settle)

    def _denoise(self, device: str, parallel: Parallel | None = None) -> DenoiseStage:
        from ..device import Lane
        from .denoise_stage import DenoiseStage
        from .dit import random_world_dit
        from .latent_cache import LatentCache

        lane, checkpoint, config = Lane(device), self.config.checkpoint, self.config.dit

        def model(dtype: torch.dtype) -> WorldDiT:
            if checkpoint is not None:
                return checkpoint.world_dit(config, dtype, lane.device)
            return random_world_dit(config, self._seed, dtype=dtype, device=lane.device)

        leads = parallel is None or parallel.rank == 0
        latents = LatentCache(self.latent_cache_bytes) if self.latent_cache_bytes and leads else None
        weights = self._weights_identity()
        return DenoiseStage(self.config, model, lane, weights=weights, latents=latents, parallel=parallel)

    def _decode(self, device: str) -> DecodeStage:
        from ..device import Lane
        from ..wan.vae import decoder_of
        from .decode_stage import DecodeStage

        lane = Lane(device)
        return DecodeStage(self.config, decoder_of(self._vae(lane.device), self.config.vae), lane)

    @property
    def _seed(self) -> int:
        assert self.config.weights_seed is not None
        return self.config.weights_seed

    def _weights_identity(self) -> str:
        checkpoint = self.config.checkpoint
        return f"seed {self._seed}" if checkpoint is None else f"checkpoint {checkpoint.fingerprint()}"

    def _vae(self, device: torch.device) -> nn.Module:
        from ..wan.seeded import fill_seeded, smooth_pictures
        from ..wan.vae import vae_network

        if self.config.checkpoint is not None:
            return self.config.checkpoint.vae_network(self.config.vae, device)
        vae: nn.Module = vae_network(self.config.vae)
        fill_seeded(vae, self._seed, smooth_pictures)
        return vae.to(device)
