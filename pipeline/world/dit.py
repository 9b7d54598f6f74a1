"""The causal diffusion transformer of the world model (LingBot-World-Fast, on Wan 2.2).

One forward predicts the flow of one chunk: its tokens attend to each other in both directions and, through the rolling
cache, to those of earlier chunks. What doesn't change between the five forwards of a chunk (four denoising steps and
the clean pass) is computed once by `WorldDiT.prepare`; what doesn't change within a session, the keys and values of the
prompt, by `WorldDiT.open_session`. Parameter names are those of the checkpoint.

The timestep is one number per chunk, so time embedding and modulation are vectors and are broadcast over tokens. They,
the norms, the rotations and the residual stream are float32 whatever the dtype of the weights.

In a worker group (`WorldDiT.join`) every rank is given the same inputs and gives the same flow. Each works on its slice of the
chunk's tokens, but for self-attention, which see; the prompt's keys and values are whole on all ranks.

Shape letters: T tokens of the chunk, S those of this rank's slice, M model dim, N heads, D head_dim, L prompt tokens,
F H W latent sizes.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reelwire.kernels.attention import Backend, BackendChoice, choose_backend

from ..parallel import Parallel, check_heads
from ..wan.blocks import feed_forward, linear_float32, patchify, rotary_table, timestep_embedding, unpatchify
from .dit_blocks import Block, ChunkInputs, Head, Pair, SessionCaches
from .dit_config import PATCH, WorldDiTConfig
from .kv_cache import CacheLayout, RollingCache


class WorldDiT(nn.Module):
    """Predicts the flow of a chunk from its noisy latent, its condition, its control, the prompt and the cache.

    Args:
        config: sizes.
        backend: attention backend of `reelwire.kernels.attention`.
    """

    def __init__(self, config: WorldDiTConfig, backend: BackendChoice = "auto") -> None:
        super().__init__()
        self.config = config
        self.parallel = Parallel()
        dim = config.dim
        self.patch_embedding = nn.Conv3d(config.in_channels, dim, kernel_size=PATCH, stride=PATCH)
        self.patch_embedding_wancamctrl = nn.Linear(config.control_channels * math.prod(PATCH), dim)
        self.c2ws_hidden_states_layer1 = nn.Linear(dim, dim)
        self.c2ws_hidden_states_layer2 = nn.Linear(dim, dim)
        self.text_embedding = feed_forward(config.text_dim, dim, dim)
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.layers))
        self.head = Head(config)

    def join(self, parallel: Parallel) -> None:
        """Compute as one of the ranks of a group from here on; sessions that are open already don't fit any more.

        Raises:
            RequestError: the ranks can't share the attention heads.
        """
        check_heads(self.config.heads, parallel.world)
        self.parallel = parallel
        for block in self._layers():
            block.self_attn.parallel = parallel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, in which matrix products and caches are kept."""
        return self.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch_embedding.weight.device

    @property
    def attention_backend(self) -> Backend:
        """The attention backend that computes, for this device and dtype."""
        choice = self._layers()[0].self_attn.backend
        probe = torch.empty(1, 1, 1, self.config.head_dim, dtype=self.dtype, device=self.device)
        return choose_backend(probe) if choice == "auto" else choice

    def frame_tokens(self, height: int, width: int) -> int:
        """Tokens of one latent frame of `height` x `width`."""
        return height // PATCH[1] * (width // PATCH[2])

    def session_bytes(self, layout: CacheLayout) -> int:
        """Memory that the caches of a session of this layout take here: known before they are made."""
        return session_bytes(self.config, layout.capacity, self.dtype, self.parallel.world)

    @torch.inference_mode()
    def open_session(self, prompt: Tensor, layout: CacheLayout) -> SessionCaches:
        """Make the caches of a session: an empty rolling cache, and the prompt's keys and values.

        Args:
            prompt: embedding [1, up to text_tokens, text_dim], any float dtype.
            layout: sizes of the rolling cache.

        Raises:
            ValueError: the prompt's shape doesn't fit.
        """
        config = self.config
        rolling = RollingCache(
            layout,
            layers=config.layers,
            heads=config.heads // self.parallel.world,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        context = self.embed_prompt(prompt)
        attentions = [block.cross_attn for block in self._layers()]
        return SessionCaches(rolling, tuple((each.keys(context), each.values(context)) for each in attentions))

    @torch.inference_mode()
    def prepare(self, index: int, condition: Tensor, control: Tensor) -> ChunkInputs:
        """Compute what the forwards of chunk `index` share.

        The control's scales and shifts are the same in all forwards and cost four of a layer's matrix products. Kept,
        they take 2 * layers * S * M values until the chunk is done.

        Args:
            index: number of the chunk; all chunks of a session have the same size.
            condition: [1, condition channels, F, H, W].
            control: [1, control channels, F, H, W].

        Raises:
            ValueError: a shape doesn't fit the model or the other one, or the chunk lies past the last rotary position.
        """
        config = self.config
        frames, height, width = condition.shape[2:]
        for name, tensor, channels in (
            ("condition", condition, config.condition_channels),
            ("control", control, config.control_channels),
        ):
            if tensor.shape != (1, channels, frames, height, width):
                expected = f"[1, {channels}, {frames}, {height}, {width}]"
                raise ValueError(f"{name} is {list(tensor.shape)}, the model takes {expected}")
        start, frame_tokens = index * frames, self.frame_tokens(height, width)
        shard = self.parallel.shard(frames * frame_tokens)
        tokens = self.control_tokens(control)
        return ChunkInputs(
            index=index,
            start=start * frame_tokens,
            condition=condition.to(self.device, torch.float32),
            control=tuple(block.control_modulation(tokens) for block in self._layers()),
            rotation=rotary_table(
                config.head_dim,
                frames,
                height // PATCH[1],
                width // PATCH[2],
                start_frame=start,
                device=self.device,
            ),
            shard=shard,
        )

    @torch.inference_mode()
    def forward(self, x: Tensor, timestep: float, chunk: ChunkInputs, caches: SessionCaches) -> Tensor:
        """Predict the flow of a chunk and write its keys and values into the rolling cache.

        Args:
            x: noisy latent [1, out_channels, F, H, W], float32.
            timestep: the integer timestep of the schedule, 0 for a clean latent.
            chunk: what `prepare` gave.
            caches: those of the session.

        Returns:
            The flow, float32, of the shape of `x`.

        Raises:
            RuntimeError: the chunk doesn't fit the cache (see `RollingCache.advance`), or another rank was lost.
        """
        tokens = self.patch_tokens(torch.cat((x, chunk.condition), 1))
        slots = caches.rolling.advance(chunk.start, chunk.tokens)
        embedded, modulation = self.embed_time(timestep)
        for number, block in enumerate(self._layers()):
            tokens = block(tokens, modulation, chunk, caches, slots, number)
        rows = self.parallel.gather(self.head(tokens, embedded), chunk.shard)
        return unpatchify(rows, PATCH, (x.shape[2], x.shape[3], x.shape[4]))

    def patch_tokens(self, x: Tensor) -> Tensor:
        """Embed the patches of [1, in_channels, F, H, W]: float32 [1, S, M]."""
        # A convolution whose stride is its kernel is a matrix product of patches.
        weight, bias = self.patch_embedding.weight.flatten(1), self.patch_embedding.bias
        return F.linear(self._patches(x).to(weight.dtype), weight, bias).float()

    def control_tokens(self, control: Tensor) -> Tensor:
        """Embed the patches of a control tensor, with a two-layer residual: [1, S, M] in the weights' dtype."""
        tokens: Tensor = self.patch_embedding_wancamctrl(self._patches(control.to(self.device, self.dtype)))
        residual: Tensor = self.c2ws_hidden_states_layer2(F.silu(self.c2ws_hidden_states_layer1(tokens)))
        return tokens + residual

    def embed_prompt(self, prompt: Tensor) -> Tensor:
        """Pad a prompt embedding with zero rows and project it: [1, text_tokens, M] in the weights' dtype."""
        rows, channels = self.config.text_tokens, self.config.text_dim
        if prompt.ndim != 3 or prompt.shape[0] != 1 or prompt.shape[2] != channels or prompt.shape[1] > rows:
            raise ValueError(f"prompt is {list(prompt.shape)}, the model takes [1, up to {rows}, {channels}]")
        padded = F.pad(prompt.to(self.device, self.dtype), (0, 0, 0, rows - prompt.shape[1]))
        context: Tensor = self.text_embedding(padded)
        return context

    def embed_time(self, timestep: float) -> Pair:
        """The time embedding of the head [M], and the modulation of all blocks [6, M]; both float32.

        Order of the six: shift, scale, gate of the attention, then of the feed-forward.
        """
        sinusoids = timestep_embedding(torch.tensor(timestep, device=self.device), self.config.freq_dim)
        hidden = F.silu(linear_float32(self.time_embedding[0], sinusoids))
        embedded = linear_float32(self.time_embedding[2], hidden)
        projected = linear_float32(self.time_projection[1], F.silu(embedded))
        return embedded, projected.reshape(6, self.config.dim)

    def _patches(self, x: Tensor) -> Tensor:
        """This rank's slice of the patch rows of [1, C, F, H, W]: [1, S, C * patch elements]."""
        rows = patchify(x, PATCH)
        return self.parallel.shard(rows.shape[1]).take(rows)

    def _layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]


def session_bytes(config: WorldDiTConfig, capacity: int, dtype: torch.dtype, world: int = 1) -> int:
    """Memory in bytes that a session takes at a model: keys and values of `capacity` tokens and of the prompt.

    Of the tokens each of `world` ranks keeps its share of the heads, of the prompt all.
    """
    return 2 * config.layers * (capacity * (config.dim // world) + config.text_tokens * config.dim) * dtype.itemsize


def random_world_dit(
    config: WorldDiTConfig,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: BackendChoice = "auto",
) -> WorldDiT:
    """A model with weights drawn from a seed: the same on every machine of a kind, whatever the thread count.

    Nothing is zero, so every path moves the result. Each parameter has its own generator on the CPU, seeded from `seed`
    and its name.
    """
    with torch.device("meta"):
        model = WorldDiT(config, backend)
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, values))
    return model.requires_grad_(False).eval()


def _scaled(name: str, values: Tensor) -> Tensor:
    if name.endswith("modulation"):
        return values / math.sqrt(values.shape[-1])
    if name.endswith("bias"):
        return values * 0.02
    if "norm" in name:
        return 1 + 0.1 * values
    return values / math.sqrt(values[0].numel())
