"""One layer of the causal world DiT, its head, and the values that a forward hands to them.

Shape letters: T tokens of the chunk, S those of this rank's slice, M model dim, N heads, D head_dim. In a worker group all but
the attention of tokens to each other is done by each rank for its slice; without one S is T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reelwire.kernels.attention import BackendChoice, attention

from ..parallel import Parallel, Shard
from ..wan.blocks import RMSNorm, Rotation, feed_forward, layer_norm, rotate
from .dit_config import PATCH, WorldDiTConfig
from .kv_cache import RollingCache, Slots

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class SessionCaches:
    """What a session keeps at the model: its rolling cache, and keys and values of its prompt per layer."""

    rolling: RollingCache
    prompt: tuple[Pair, ...]

    @property
    def cache_bytes(self) -> int:
        """Memory that the session holds until it is dropped."""
        return self.rolling.cache_bytes + sum(k.nbytes + v.nbytes for k, v in self.prompt)


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """What the forwards of one chunk share.

    Attributes:
        index: number of the chunk.
        start: its first token, counted from the session's start.
        condition: [1, condition channels, F, H, W].
        control: per layer the scale and shift [1, S, M] that the control injects.
        rotation: angles of all the chunk's tokens at their absolute positions.
        shard: how the chunk's tokens are cut over the ranks of a worker group.
    """

    index: int
    start: int
    condition: Tensor
    control: tuple[Pair, ...]
    rotation: Rotation
    shard: Shard

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.shard.length


class Block(nn.Module):
    """Self-attention, control, prompt, feed-forward."""

    def __init__(self, config: WorldDiTConfig, backend: BackendChoice) -> None:
        super().__init__()
        dim = config.dim
        self.eps = config.eps
        self.self_attn = SelfAttention(config, backend)
        self.cam_injector_layer1 = nn.Linear(dim, dim)
        self.cam_injector_layer2 = nn.Linear(dim, dim)
        self.cam_scale_layer = nn.Linear(dim, dim)
        self.cam_shift_layer = nn.Linear(dim, dim)
        self.norm3 = nn.LayerNorm(dim, eps=config.eps)
        self.cross_attn = CrossAttention(config, backend)
        self.ffn = feed_forward(dim, config.ffn, dim)
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))

    def control_modulation(self, tokens: Tensor) -> Pair:
        """Scale and shift [1, S, M] that control tokens [1, S, M] inject into this block."""
        hidden = self.cam_injector_layer2(F.silu(self.cam_injector_layer1(tokens))) + tokens
        return self.cam_scale_layer(hidden), self.cam_shift_layer(hidden)

    def forward(
        self, x: Tensor, modulation: Tensor, chunk: ChunkInputs, caches: SessionCaches, slots: Slots, layer: int
    ) -> Tensor:
        """Transform the float32 residual stream [1, S, M]."""
        dtype = self.self_attn.q.weight.dtype
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (self.modulation[0].float() + modulation).unbind()
        h = layer_norm(x, self.eps) * (1 + scale_a) + shift_a
        x = x + gate_a * self.self_attn(h.to(dtype), chunk, caches.rolling, slots, layer)
        scale_c, shift_c = chunk.control[layer]
        x = x + x * scale_c + shift_c
        x = x + self.cross_attn(layer_norm(x, self.eps, self.norm3).to(dtype), caches.prompt[layer])
        h = layer_norm(x, self.eps) * (1 + scale_f) + shift_f
        change: Tensor = self.ffn(h.to(dtype))
        return x + gate_f * change


class Attention(nn.Module):
    """Projections and the query and key norms that both attentions have."""

    def __init__(self, config: WorldDiTConfig, backend: BackendChoice) -> None:
        super().__init__()
        self.heads = config.heads
        self.backend: BackendChoice = backend
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.o = nn.Linear(config.dim, config.dim)
        self.norm_q = RMSNorm(config.dim, config.eps)
        self.norm_k = RMSNorm(config.dim, config.eps)

    def queries(self, x: Tensor) -> Tensor:
        """Project to normalised queries [1, S, N, D]."""
        return self._split(self.norm_q(self.q(x)))

    def keys(self, x: Tensor) -> Tensor:
        """Project to normalised keys [1, S, N, D]."""
        return self._split(self.norm_k(self.k(x)))

    def values(self, x: Tensor) -> Tensor:
        """Project to values [1, S, N, D]."""
        return self._split(self.v(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.heads, -1)


class SelfAttention(Attention):
    """The tokens of a chunk attend to each other and to what the rolling cache holds.

    In a worker group each rank attends with its share of the heads, which are all that its cache holds.
    """

    def __init__(self, config: WorldDiTConfig, backend: BackendChoice) -> None:
        super().__init__(config, backend)
        self.parallel = Parallel()

    def forward(self, x: Tensor, chunk: ChunkInputs, cache: RollingCache, slots: Slots, layer: int) -> Tensor:
        """Store the keys and values of [1, S, M] and attend; keys are stored rotated, by absolute positions."""
        parallel, shard, rotation = self.parallel, chunk.shard, chunk.rotation
        # Each of the three travels while the next one is computed.
        v = parallel.start_to_heads(self.values(x), shard)
        k = parallel.start_to_heads(self.keys(x), shard)
        q = parallel.start_to_heads(self.queries(x), shard)
        keys, values = cache.update(layer, rotate(k.wait(), rotation), v.wait(), slots)
        attended = attention(rotate(q.wait(), rotation), keys, values, backend=self.backend)
        out: Tensor = self.o(parallel.to_tokens(attended, shard).flatten(2))
        return out


class CrossAttention(Attention):
    """The tokens of a chunk attend to the prompt, its padding included."""

    def forward(self, x: Tensor, prompt: Pair) -> Tensor:
        """Attend from [1, S, M] to the keys and values of a prompt."""
        attended = attention(self.queries(x), *prompt, backend=self.backend)
        out: Tensor = self.o(attended.flatten(2))
        return out


class Head(nn.Module):
    """Norm, modulation by the time embedding, and the projection to patches."""

    def __init__(self, config: WorldDiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, math.prod(PATCH) * config.out_channels)
        self.modulation = nn.Parameter(torch.zeros(1, 2, config.dim))

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Float32 [1, S, patch elements * out_channels] from the residual stream and the time embedding [M]."""
        shift, scale = (self.modulation[0].float() + embedded).unbind()
        h = layer_norm(x, self.eps) * (1 + scale) + shift
        rows: Tensor = self.head(h.to(self.head.weight.dtype))
        return rows.float()
