"""Arithmetic that every Wan-derived transformer shares: patches, norms, rotary positions, time, feed-forward.

Shape letters: B batch, C channels, F H W latent frames, rows, columns; T tokens, N heads, D head_dim, M model dim.
Tokens are ordered frame, row, column. Norms and rotations are computed in float32 whatever the dtype of the weights.
Source: Wan 2.1 technical report (arXiv:2503.20314) and its checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_POSITIONS_MAX = 1024
"""Positions per axis that the models were trained with; a clip or session beyond them is refused."""

_ROTARY_THETA = 10_000.0


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, float32 [T, 1, D / 2]: broadcast over heads."""

    cos: Tensor
    sin: Tensor


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467).

    Wan normalises queries and keys over the whole model dim, before they are split into heads.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., dim]; the dtype stays."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


def layer_norm(x: Tensor, eps: float, affine: nn.LayerNorm | None = None) -> Tensor:
    """Layer norm over the last axis, computed and returned in float32; without `affine` it has no weights."""
    weight = None if affine is None else affine.weight.float()
    bias = None if affine is None else affine.bias.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)


def linear_float32(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply an `nn.Linear` in float32, whatever its weights are kept in."""
    assert isinstance(layer, nn.Linear)
    return F.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())


def feed_forward(dim: int, hidden: int, out: int) -> nn.Sequential:
    """Linear, tanh-approximated GELU, linear: parameters ``0`` and ``2``."""
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, out))


def timestep_embedding(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoids of a timestep: `dim / 2` cosines, then as many sines, computed in float64.

    Args:
        timestep: [...], any real dtype.
        dim: even size of the embedding.

    Returns:
        float32 [..., dim].
    """
    half = dim // 2
    rates = _ROTARY_THETA ** -(torch.arange(half, dtype=torch.float64, device=timestep.device) / half)
    angles = timestep.double().unsqueeze(-1) * rates
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def rotary_split(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that carry the frame, row and column position: D - 2 * (D // 3), D // 3, D // 3.

    Raises:
        ValueError: a share is odd, so that channels can't be paired.
    """
    side = head_dim // 3
    if head_dim % 2 or side % 2 or side == 0:
        raise ValueError(f"head_dim {head_dim} can't carry three rotary axes: it and head_dim // 3 must be even")
    return head_dim - 2 * side, side, side


def rotary_table(
    head_dim: int, frames: int, rows: int, columns: int, *, start_frame: int = 0, device: torch.device | None = None
) -> Rotation:
    """Angles of all tokens of a clip whose first frame stands at the absolute position `start_frame`.

    Channel pair i of an axis with d channels turns by position / 10000^(2i/d) (RoFormer, arXiv:2104.09864), computed
    in float64.

    Raises:
        ValueError: a position lies outside of `ROTARY_POSITIONS_MAX`, or `head_dim` doesn't fit.
    """
    if start_frame < 0 or max(start_frame + frames, rows, columns) > ROTARY_POSITIONS_MAX:
        raise ValueError(
            f"frames {start_frame} to {start_frame + frames}, {rows} rows, {columns} columns: "
            f"positions must lie in 0 to {ROTARY_POSITIONS_MAX}"
        )
    spans = ((start_frame, frames), (0, rows), (0, columns))
    grids = []
    for axis, (channels, (first, count)) in enumerate(zip(rotary_split(head_dim), spans, strict=True)):
        rates = _ROTARY_THETA ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)
        angles = torch.outer(torch.arange(first, first + count, dtype=torch.float64), rates)
        shape = [1, 1, 1, channels // 2]
        shape[axis] = count
        grids.append(angles.view(shape).expand(frames, rows, columns, -1))
    angles = torch.cat(grids, -1).flatten(0, 2).unsqueeze(1)
    return Rotation(angles.cos().float().to(device), angles.sin().float().to(device))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn adjacent channel pairs (2i, 2i + 1) of [B, T, N, D] by each token's angles, in float32; the dtype stays."""
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = rotation
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def patchify(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """[B, C, F, H, W] to patch rows [B, T, C * pf * ph * pw]; within a row channel, frame, row, column.

    Raises:
        ValueError: a size isn't a multiple of the patch.
    """
    b, c, f, h, w = x.shape
    pf, ph, pw = patch
    if f % pf or h % ph or w % pw:
        raise ValueError(f"a tensor of {f} x {h} x {w} can't be cut into patches of {pf} x {ph} x {pw}")
    cut = x.reshape(b, c, f // pf, pf, h // ph, ph, w // pw, pw)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, -1, c * pf * ph * pw)


def unpatchify(rows: Tensor, patch: tuple[int, int, int], size: tuple[int, int, int]) -> Tensor:
    """Patch rows of a head back to [B, C, F, H, W]; within a row frame, row, column, channel: not `patchify`'s order.

    Args:
        rows: [B, T, pf * ph * pw * C].
        patch: pf, ph, pw.
        size: F, H, W of the result.
    """
    (pf, ph, pw), (f, h, w) = patch, size
    grid = rows.reshape(rows.shape[0], f // pf, h // ph, w // pw, pf, ph, pw, -1)
    return grid.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(rows.shape[0], -1, f, h, w)
