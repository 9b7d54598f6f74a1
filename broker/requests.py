"""Checking what a client asks for, before anything is started."""

from __future__ import annotations

from dataclasses import replace

from reelwire.errors import RequestError
from reelwire.messages import OpenSession
from reelwire.spec import StreamSpec, TensorInput, check_parameters
from reelwire.tensors import TensorRef

KEY_CHARACTERS_MAX = 256


def check_request(request: OpenSession, spec: StreamSpec, image_bytes_max: int) -> OpenSession:
    """The request with complete parameters.

    Raises:
        RequestError: a field is wrong; it says which, and what is accepted.
    """
    if not 0 < len(request.key) <= KEY_CHARACTERS_MAX:
        raise RequestError("key", f"has {len(request.key)} characters; accepted: 1 to {KEY_CHARACTERS_MAX}")
    if not 1 <= request.chunks <= spec.chunks_max:
        raise RequestError("chunks", f"{request.chunks} is not accepted; accepted: 1 to {spec.chunks_max}")
    known = {tensor.name: tensor for tensor in spec.tensors}
    for name, ref in request.tensors.items():
        if name not in known:
            raise RequestError(name, f"unknown tensor; accepted: {', '.join(known) or 'none'}")
        _check_tensor(known[name], ref, image_bytes_max)
    for name, tensor in known.items():
        if tensor.required and name not in request.tensors:
            raise RequestError(name, f"is required: a tensor {_described(tensor)}")
    return replace(request, parameters=check_parameters(spec, request.parameters))


def _check_tensor(tensor: TensorInput, ref: TensorRef, nbytes_max: int) -> None:
    fits = len(ref.shape) == len(tensor.shape) and all(
        wanted in (-1, have) for wanted, have in zip(tensor.shape, ref.shape, strict=True)
    )
    if ref.dtype != tensor.dtype or not fits:
        raise RequestError(tensor.name, f"is {ref.dtype}{list(ref.shape)}; accepted: {_described(tensor)}")
    if ref.nbytes > nbytes_max:
        raise RequestError(tensor.name, f"has {ref.nbytes} bytes; accepted: {nbytes_max}")
    if ref.nbytes == 0:
        raise RequestError(tensor.name, "is empty")


def _described(tensor: TensorInput) -> str:
    return f"{tensor.dtype}[{', '.join('any' if size == -1 else str(size) for size in tensor.shape)}]"
