"""The attention operation: every backend against the formula."""

from __future__ import annotations

import math

import pytest
import torch

from reelwire.kernels.attention import attention, choose_backend, reference

SHAPES = [
    pytest.param((1, 6, 24, 2, 16), id="small"),
    pytest.param((2, 13, 29, 3, 22), id="odd"),
    pytest.param((1, 1, 1, 1, 8), id="one_token"),
]
TOLERANCES = [
    pytest.param(torch.float32, 2e-6, id="float32"),
    pytest.param(torch.bfloat16, 2e-2, id="bfloat16"),
    pytest.param(torch.float16, 3e-3, id="float16"),
]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    batch, queries, keys, heads, head_dim = shape
    generator = torch.Generator().manual_seed(3)
    sizes = [(batch, n, heads, head_dim) for n in (queries, keys, keys)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def test_reference_is_the_formula() -> None:
    """The plain-torch reference agrees with the formula written out for one query and head."""
    q, k, v = (x.double() for x in inputs((1, 3, 5, 2, 4)))
    scores = [float(q[0, 1, 1] @ k[0, j, 1]) / math.sqrt(4) for j in range(5)]
    total = sum(math.exp(s) for s in scores)
    expected = sum((math.exp(s) / total * v[0, j, 1] for j, s in enumerate(scores)), torch.zeros(4).double())
    torch.testing.assert_close(reference(q, k, v)[0, 1, 1], expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_sdpa_agrees_with_the_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    """Torch's own attention is within the dtype's rounding of the formula, for any shape."""
    q, k, v = inputs(shape, dtype)
    out = attention(q, k, v, backend="sdpa")
    assert out.dtype == dtype
    assert out.shape == q.shape
    torch.testing.assert_close(out.float(), reference(q.float(), k.float(), v.float()), atol=tolerance, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_auto_agrees_with_the_reference_on_cuda(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    """Whatever backend is chosen on a GPU is within the dtype's rounding of the formula."""
    q, k, v = inputs(shape, dtype)
    out = attention(q.cuda(), k.cuda(), v.cuda())
    torch.testing.assert_close(out.cpu().float(), reference(q.float(), k.float(), v.float()), atol=tolerance, rtol=0)


def test_auto_takes_sdpa_on_the_cpu() -> None:
    """Without CUDA tensors the choice is torch's attention, and ``auto`` gives its result."""
    q, k, v = inputs((1, 4, 6, 2, 8), torch.bfloat16)
    assert choose_backend(q) == "sdpa"
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend="sdpa"))


def test_flash_says_why_it_can_not_serve() -> None:
    """Asking for flash-attn where it can't run is refused with the reason."""
    q, k, v = inputs((1, 4, 6, 2, 8))
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        attention(q, k, v, backend="flash")


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Keys and values of different counts, or heads that differ from the queries', are refused."""
    q, k, v = inputs((1, 4, 6, 2, 8))
    with pytest.raises(ValueError, match="don't fit"):
        attention(q, k, v[:, :5])
    with pytest.raises(ValueError, match="don't fit"):
        attention(q[:, :, :1], k, v)


def test_an_unknown_backend_is_refused() -> None:
    """A backend of another name is refused with those that are accepted."""
    q, k, v = inputs((1, 4, 6, 2, 8))
    with pytest.raises(ValueError, match="accepted: auto, flash, sdpa, reference"):
        attention(q, k, v, backend="magic")  # type: ignore[arg-type]
