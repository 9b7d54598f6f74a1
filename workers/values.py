"""Values on the border between messages and pipelines: plain ones as they are, tensors as arrays of a library.

What comes in with a message is a view of it for numpy pipelines, read-only, and a copy for torch pipelines: the CPU's
matrix kernels give the same bits only for buffers of the same alignment, and a message's buffers have none that can be
counted on. What comes in through shared memory is always a copy: a stage may keep its inputs, and their producer has the
memory back when the task is over. What goes out is always a copy, so that a stage may reuse its buffers while a message
still waits to be sent; a large tensor is written straight into shared memory if all its readers can take it from there.
Torch is imported only for a torch pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from reelwire import tensors
from reelwire.codec import LEAVES, PLAIN_DEPTH_MAX
from reelwire.messages import Artifact
from reelwire.spec import Plain
from reelwire.tensors import Inline, Shared, TensorRef

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from reelwire.segments import Piece

Library = Literal["numpy", "torch"]
View = Callable[[Shared, int], memoryview]
"""Gives the bytes that stand at a place in shared memory, read-only."""
Take = Callable[[int], "Piece | None"]
"""Gives room for so many bytes in shared memory; None when there is none."""

SHARED_BYTES_MIN = 64 << 10
"""Smaller tensors travel with their message, which costs less than to map them."""


def from_artifact(artifact: Artifact, library: Library, view: View | None = None) -> dict[str, Any]:
    """Plain values as they are, tensors as arrays of `library` (torch: on the CPU).

    Raises:
        ValueError: a bfloat16 tensor is wanted as a numpy array.
        MemoryLostError: a tensor isn't in shared memory any more.
    """
    values: dict[str, Any] = dict(artifact.values)
    for name, ref in artifact.tensors.items():
        is_shared = isinstance(ref.place, Shared)
        here = _mapped(ref, ref.place, view) if isinstance(ref.place, Shared) else ref
        values[name] = _torch_tensor(here) if library == "torch" else _numpy_array(here, copy=is_shared)
    return values


def to_artifact(values: Mapping[str, Any], take: Take | None = None) -> Artifact:
    """The artifact of named values; arrays are copied, and those on a device wait for what computes them.

    Args:
        values: arrays of numpy or torch, and plain values.
        take: gives shared memory for the large ones; None, or where it gives none: they travel with the message.

    Raises:
        ValueError: a value is neither an array nor plain, its dtype has no place on the wire, or its name is no text.
    """
    plain: dict[str, Plain] = {}
    arrays: dict[str, TensorRef] = {}
    for key, value in values.items():
        name = _name(key)
        if isinstance(value, np.ndarray):
            arrays[name] = _numpy_reference(value, take)
        elif not isinstance(value, _PLAIN) and _is_torch_tensor(value):
            arrays[name] = _torch_reference(value, take)
        else:
            plain[name] = to_plain(value)
    return Artifact(plain, arrays)


def inlined(artifact: Artifact, view: View) -> Artifact:
    """The same with copies of all that stands in shared memory.

    Raises:
        MemoryLostError: a tensor isn't there any more.
    """
    if artifact.is_inline:
        return artifact
    tensors_ = {
        name: replace(ref, place=Inline(bytes(view(ref.place, ref.nbytes)))) if isinstance(ref.place, Shared) else ref
        for name, ref in artifact.tensors.items()
    }
    return Artifact(artifact.values, tensors_)


def to_facts(values: Mapping[str, Any]) -> dict[str, Plain]:
    """Named values, each in plain types.

    Raises:
        ValueError: a name is no text, or a value is of no plain type or too deep.
    """
    return {_name(name): to_plain(value) for name, value in values.items()}


def to_plain(value: Any, depth: int = 0) -> Plain:
    """The value in plain types: numpy and torch scalars become numbers, small arrays nested lists.

    Args:
        value: it.
        depth: lists and maps around it, which count with those in it.

    Raises:
        ValueError: it is of no plain type, or holds lists and maps deeper than `PLAIN_DEPTH_MAX`.
    """
    if type(value) in LEAVES:
        return value  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)):
        return _plain_list(list(value), depth)
    if isinstance(value, _NUMPY) or _is_torch_tensor(value):
        listed = value.tolist()
        if type(listed) is not type(value):  # a long double stays what it is
            return to_plain(listed, depth)
    if isinstance(value, Mapping):
        items = dict(value)
        if items and depth >= PLAIN_DEPTH_MAX:
            raise ValueError(_TOO_DEEP)
        return {_name(key): to_plain(each, depth + 1) for key, each in items.items()}
    raise ValueError(
        f"a {type(value).__name__} is no plain value; accepted: None, bool, int, float, str, bytes, lists, dicts"
    )


_NUMPY = (np.ndarray, np.generic)
_NAMES = {np.dtype(name): name for name in tensors.ITEM_BYTES if name != "bfloat16"}  # numpy works a name out anew
_PLAIN = (*LEAVES, list, tuple, dict)
_TOO_DEEP = f"lists and maps more than {PLAIN_DEPTH_MAX} deep can't be sent"


def _plain_list(items: list[Any], depth: int) -> Plain:
    if items and depth >= PLAIN_DEPTH_MAX:
        raise ValueError(_TOO_DEEP)
    if LEAVES.issuperset(map(type, items)):
        return items
    return [to_plain(each, depth + 1) for each in items]


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r:.40} names a value; accepted: a text")  # noqa: TRY004 - as what has no plain type
    return name


def _mapped(ref: TensorRef, place: Shared, view: View | None) -> TensorRef:
    assert view is not None, "a tensor in shared memory, and nobody to read it"
    return replace(ref, place=Inline(view(place, ref.nbytes)))


def _numpy_array(ref: TensorRef, *, copy: bool) -> Any:
    array = tensors.to_array(ref)
    if array.flags.aligned and not copy:
        return array
    array = array.copy()
    array.flags.writeable = False
    return array


def _torch_tensor(ref: TensorRef) -> torch.Tensor:
    import torch

    tensor = torch.empty(ref.shape, dtype=getattr(torch, ref.dtype))
    flat = tensor.reshape(-1).view(torch.uint8)
    flat.numpy()[:] = np.frombuffer(tensors.inline_buffer(ref), dtype=np.uint8)
    return tensor


def _is_torch_tensor(value: Any) -> bool:
    # By the name of its type, so that a pipeline without torch doesn't pay for an import.
    return any(f"{kind.__module__}.{kind.__qualname__}" == "torch.Tensor" for kind in type(value).__mro__)


def _numpy_reference(array: NDArray[Any], take: Take | None) -> TensorRef:
    known = _NAMES.get(array.dtype)
    if known and array.nbytes < SHARED_BYTES_MIN and type(array) is np.ndarray and array.flags.c_contiguous:
        return TensorRef(known, array.shape, Inline(array.tobytes()))  # a small one needs no more than this
    name = known or array.dtype.name
    piece = _room(array.nbytes, take) if name in tensors.ITEM_BYTES else None
    if piece is None:
        return tensors.from_array(np.array(array, order="C", copy=True))
    room = np.frombuffer(piece.view, dtype=np.uint8).view(array.dtype.newbyteorder("<")).reshape(array.shape)
    np.copyto(room, array)
    return TensorRef(name, tuple(array.shape), piece.place)


def _torch_reference(tensor: torch.Tensor, take: Take | None) -> TensorRef:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in tensors.ITEM_BYTES:
        raise ValueError(f"dtype {name} can't be sent; accepted: {', '.join(tensors.ITEM_BYTES)}")
    place: Inline | Shared
    piece = _room(tensor.numel() * tensor.element_size(), take)
    if piece is None:
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        place = Inline(room.reshape(-1).view(torch.uint8).numpy().data)
    else:
        room = torch.frombuffer(piece.view, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
        place = piece.place
    room.copy_(tensor.detach())  # blocks until the device has made and copied it
    return TensorRef(name, tuple(tensor.shape), place)


def _room(nbytes: int, take: Take | None) -> Piece | None:
    return take(nbytes) if take is not None and nbytes >= SHARED_BYTES_MIN else None
