"""Tensors on their way between processes: dtype, shape, and where the bytes are. Needs no torch.

The bytes are little-endian and C-contiguous. The broker never looks at them.
"""

from __future__ import annotations

import math
import re
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
MEMORY_NAME = re.compile(r"[a-z0-9-]{1,64}")
"""What folders and segments of shared memory may be called."""
PROBE_BYTES = 16
"""What stands in the probe of an owner of shared memory: so many random bytes."""

assert sys.byteorder == "little", "the wire format is little-endian"


@dataclass(frozen=True, slots=True)
class Inline:
    """The bytes travel as a frame of the message itself."""

    buffer: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Shared:
    """The bytes are in shared memory, which their producer wrote once; see `segments`.

    Attributes:
        owner: name of the producer's folder.
        segment: name of the segment in it.
        generation: which use of the segment.
        offset: where the bytes begin in it.
    """

    owner: str
    segment: str
    generation: int
    offset: int = 0


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
    place: Inline | Shared

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def check(ref: TensorRef) -> None:
    """Check that dtype, shape and the number of bytes belong together.

    Raises:
        WireError: they don't; of shared memory only its reader can tell how much there is.
    """
    shape, place = ref.shape, ref.place
    if ref.dtype not in ITEM_BYTES:
        raise WireError(f"tensor dtype {ref.dtype[:40]!r} is unknown; accepted: {', '.join(ITEM_BYTES)}")
    if len(shape) > DIMENSIONS_MAX:
        raise WireError(f"tensor of {len(shape)} dimensions; accepted: {DIMENSIONS_MAX}")
    if shape and min(shape) < 0:
        raise WireError(f"tensor shape {list(shape)} has a negative size")
    if isinstance(place, Shared):
        _check_shared(place)
        return
    have = memoryview(place.buffer).nbytes
    need = ITEM_BYTES[ref.dtype] * math.prod(shape)
    if have != need:
        raise WireError(f"tensor {ref.dtype}{list(shape)} needs {need} bytes, the frame has {have}")


def _check_shared(place: Shared) -> None:
    for name in (place.owner, place.segment):
        if not MEMORY_NAME.fullmatch(name):
            raise WireError(f"{name[:40]!r} names no shared memory; accepted: 1 to 64 of a-z, 0-9 and -")
    if place.generation < 0 or place.offset < 0:
        raise WireError("shared memory has generations and offsets of 0 and more")


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
    buffer = inline_buffer(ref)
    if ref.dtype == "bfloat16":
        raise ValueError("numpy has no bfloat16; take the tensor with torch")
    view: NDArray[Any] = np.frombuffer(buffer, ref.dtype).reshape(ref.shape)
    view.flags.writeable = False
    return view


def inline_buffer(ref: TensorRef) -> bytes | memoryview:
    """The bytes of a tensor that came with its message, or was taken out of shared memory already."""
    assert isinstance(ref.place, Inline), "the bytes are in shared memory; `segments.Reader` has them"
    return ref.place.buffer
