"""Checking what a client asks for, before anything is started."""

from __future__ import annotations

from dataclasses import replace

from reelwire.errors import RequestError
from reelwire.messages import OpenSession
from reelwire.spec import StreamSpec, check_parameters, check_tensors

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
    for name, ref in request.tensors.items():
        if ref.nbytes > image_bytes_max:
            raise RequestError(name, f"has {ref.nbytes} bytes; accepted: {image_bytes_max}")
    check_tensors(spec.tensors, {name: (ref.dtype, ref.shape) for name, ref in request.tensors.items()})
    return replace(request, parameters=check_parameters(spec, request.parameters))
