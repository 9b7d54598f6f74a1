"""Attention over whole sequences, without a mask.

    out[b, i, h] = sum_j softmax_j(scale * q[b, i, h] . k[b, j, h]) * v[b, j, h]        scale = 1 / sqrt(head_dim)

(Vaswani et al., 2017, arXiv:1706.03762.) Tensors are [batch, tokens, heads, head_dim], the layout in which projections
leave them; query and key counts may differ. Which code computes it is a backend:

    flash      flash-attn (Dao, 2023, arXiv:2307.08691): CUDA, float16 and bfloat16, head_dim up to 256
    sdpa       torch.nn.functional.scaled_dot_product_attention: everything
    reference  the formula in plain torch, in float32: the measure for the other two
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F

Backend = Literal["flash", "sdpa", "reference"]
BackendChoice = Literal["auto", "flash", "sdpa", "reference"]

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM_MAX = 256


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: BackendChoice = "auto") -> torch.Tensor:
    """Every query attends to every key.

    Args:
        q: [batch, queries, heads, head_dim].
        k: [batch, keys, heads, head_dim], of q's dtype.
        v: [batch, keys, heads, head_dim], of q's dtype.
        backend: ``"auto"`` takes the fastest that can serve these tensors.

    Returns:
        [batch, queries, heads, head_dim] in the dtype of `q`.

    Raises:
        ValueError: shapes don't fit each other, or the backend asked for can't serve these tensors.
    """
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} don't fit each other")
    chosen = choose_backend(q) if backend == "auto" else backend
    if chosen == "sdpa":
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
    if chosen == "reference":
        return reference(q, k, v)
    if chosen != "flash":
        raise ValueError(f"attention backend {chosen!r} is unknown; accepted: auto, flash, sdpa, reference")
    obstacle = _flash_obstacle(q)
    if obstacle:
        raise ValueError(f"attention backend 'flash' can't serve this call: {obstacle}")
    return cast(torch.Tensor, _flash_function()(q, k, v))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The formula in plain torch, computed in float32 (float64 for float64 inputs)."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bihd,bjhd->bhij", q.to(exact), k.to(exact)) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.to(exact)).to(q.dtype)


def choose_backend(q: torch.Tensor) -> Backend:
    """What ``"auto"`` takes for queries of this device, dtype and head size."""
    return "sdpa" if _flash_obstacle(q) else "flash"


def backends() -> dict[Backend, str]:
    """What can be used on this machine: the name of each backend, and what stands against it, or nothing."""
    return {"flash": _flash_missing(), "sdpa": "", "reference": ""}


def _flash_obstacle(q: torch.Tensor) -> str:
    if q.device.type != "cuda":
        return f"it needs CUDA tensors, these are on {q.device}"
    if q.dtype not in _FLASH_DTYPES:
        return f"it takes float16 and bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] > _FLASH_HEAD_DIM_MAX:
        return f"head_dim {q.shape[-1]} is above {_FLASH_HEAD_DIM_MAX}"
    return _flash_missing()


@functools.cache
def _flash_missing() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        _flash_function()
    except (ImportError, OSError) as error:  # a build for another torch fails with OSError when its library is loaded
        return f"flash-attn can't be imported: {error}"
    return ""


@functools.cache
def _flash_function() -> Callable[..., Any]:
    return cast(Callable[..., Any], importlib.import_module("flash_attn").flash_attn_func)
