"""Tensor references: what numpy can send, what comes back, and what is no tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from reelwire.errors import WireError
from reelwire.tensors import DIMENSIONS_MAX, ITEM_BYTES, Inline, TensorRef, check, from_array, inline_buffer, to_array

NUMPY_NAMES = sorted(set(ITEM_BYTES) - {"bfloat16"})


@given(st.sampled_from(NUMPY_NAMES).flatmap(lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, min_side=0))))
def test_an_array_comes_back_bit_for_bit(array: NDArray[np.generic]) -> None:
    """Any array of a dtype that can be sent is the same after the way there and back, and read-only."""
    ref = from_array(array)
    check(ref)
    back = to_array(TensorRef(ref.dtype, ref.shape, Inline(bytes(inline_buffer(ref)))))
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert not back.flags.writeable


def test_views_and_foreign_byte_orders_are_sent_as_little_endian_rows() -> None:
    """A transposed, strided or big-endian array arrives with the same values."""
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for array in (base.T, base[::2, ::3], base.astype(">i4"), base[:, ::-1]):
        back = to_array(from_array(array))
        np.testing.assert_array_equal(back, array)
        assert back.dtype == np.dtype("<i4")


def test_contiguous_bytes_are_shared() -> None:
    """Making a reference to a contiguous array copies nothing."""
    array = np.zeros((2, 3), np.float32)
    ref = from_array(array)
    array[1, 2] = 7
    assert to_array(ref)[1, 2] == 7


@pytest.mark.parametrize("dtype", ["complex64", "U3", "O", "M8[s]", "uint16", "uint64"])
def test_a_dtype_without_a_place_on_the_wire_is_refused(dtype: str) -> None:
    """Objects, texts, complex numbers and the unsigned types that torch lacks can't be sent."""
    with pytest.raises(ValueError, match="can't be sent; accepted: bool, uint8"):
        from_array(np.zeros(2, dtype))


def test_bfloat16_is_for_torch_only() -> None:
    """A bfloat16 tensor is valid on the wire, but numpy can't show it."""
    ref = TensorRef("bfloat16", (3,), Inline(bytes(6)))
    check(ref)
    assert ref.nbytes == 6
    with pytest.raises(ValueError, match="numpy has no bfloat16"):
        to_array(ref)


@pytest.mark.parametrize(
    ("ref", "sentence"),
    [
        (TensorRef("float8", (1,), Inline(b"1")), "tensor dtype 'float8' is unknown; accepted: bool, uint8"),
        (TensorRef("x" * 1000, (1,), Inline(b"1")), f"tensor dtype '{'x' * 40}' is unknown"),
        (TensorRef("uint8", (1,) * (DIMENSIONS_MAX + 1), Inline(b"1")), "tensor of 9 dimensions; accepted: 8"),
        (TensorRef("uint8", (-1, -1), Inline(b"1")), "tensor shape [-1, -1] has a negative size"),
        (TensorRef("int16", (2, 3), Inline(bytes(11))), "tensor int16[2, 3] needs 12 bytes, the frame has 11"),
        (TensorRef("uint8", (1 << 62, 1 << 62), Inline(b"")), "the frame has 0"),
    ],
)
def test_streaming_34_a_tensor_that_contradicts_itself_is_refused(ref: TensorRef, sentence: str) -> None:
    """Dtype, shape and number of bytes must belong together; the sentence says what doesn't, and stays short."""
    with pytest.raises(WireError) as caught:
        check(ref)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300
