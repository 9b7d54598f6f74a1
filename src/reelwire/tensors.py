"""Tensors on their way between processes: dtype, shape, and where the bytes are. Needs no torch.

The bytes are little-endian and C-contiguous. The broker never looks at them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import WireError

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
DIMENSIONS_MAX = 8

assert sys.byteorder == "little", "the wire format is little-endian"


@dataclass(frozen=True, slots=True)
class Inline:
    """The bytes travel as a frame of the message itself."""

    buffer: bytes | memoryview


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor by reference.

    Attributes:
        dtype: one of `ITEM_BYTES`.
        shape: its dimensions.
        place: where its bytes are.
    """

    dtype: str
    shape: tuple[int, ...]
    place: Inline

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def check(ref: TensorRef) -> None:
    """Check that dtype, shape and the number of bytes belong together.

    Raises:
        WireError: they don't.
    """
    if ref.dtype not in ITEM_BYTES:
        raise WireError(f"tensor dtype {ref.dtype[:40]!r} is unknown; accepted: {', '.join(ITEM_BYTES)}")
    if len(ref.shape) > DIMENSIONS_MAX:
        raise WireError(f"tensor of {len(ref.shape)} dimensions; accepted: {DIMENSIONS_MAX}")
    if any(size < 0 for size in ref.shape):
        raise WireError(f"tensor shape {list(ref.shape)} has a negative size")
    have = memoryview(ref.place.buffer).nbytes
    if have != ref.nbytes:
        raise WireError(f"tensor {ref.dtype}{list(ref.shape)} needs {ref.nbytes} bytes, the frame has {have}")


def from_array(array: NDArray[Any]) -> TensorRef:
    """A reference to a numpy array; the bytes are shared with it when it is contiguous.

    Raises:
        ValueError: the array's dtype has no place on the wire.
    """
    name = array.dtype.name
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype {name} can't be sent; accepted: {', '.join(ITEM_BYTES)}")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
    return TensorRef(name, tuple(array.shape), Inline(flat.data))


def to_array(ref: TensorRef) -> NDArray[Any]:
    """A read-only numpy view of the tensor's bytes.

    Raises:
        ValueError: the dtype is bfloat16, which numpy doesn't have.
    """
    if ref.dtype == "bfloat16":
        raise ValueError("numpy has no bfloat16; take the tensor with torch")
    view: NDArray[Any] = np.frombuffer(ref.place.buffer, dtype=np.dtype(ref.dtype)).reshape(ref.shape)
    view.flags.writeable = False
    return view
