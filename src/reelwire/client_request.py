"""From what an application asks for to a request that can be sent: whatever can be checked here is. Pure but for files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import client_events as e
from . import media, wire
from .checks import shown
from .client_values import session_length, tensor_refs
from .client_view import RETRY_AFTER_S
from .errors import OverloadError, RequestError
from .messages import ControlBinding, OpenSession, Pace, Welcome
from .spec import Plain, StreamSpec, check_parameters, check_tensors
from .tensors import TensorRef

Image = str | os.PathLike[str] | ArrayLike
FramesPolicy = Literal["strict", "truncate"]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A session that can be asked for.

    Attributes:
        spec: of the pipeline.
        chunks: its length.
        parameters: of the pipeline, with its defaults.
        tensors: of the pipeline, by name.
        control_binding: when the keys become the control of a chunk.
        pace: whether it may run ahead of the media clock.
        wait_ready: whether the answer waits until the session is initialized.
        key: what the client calls it until it has an id.
    """

    spec: StreamSpec
    chunks: int
    parameters: Mapping[str, Plain]
    tensors: Mapping[str, TensorRef]
    control_binding: ControlBinding
    pace: Pace
    wait_ready: bool
    key: str

    def event(self, now: float, call: int) -> e.Open:
        """The call that asks for it."""
        return e.Open(
            now,
            call,
            self.key,
            self.spec.name,
            self.chunks,
            self.parameters,
            self.tensors,
            self.wait_ready,
            self.control_binding,
            self.pace,
        )


def session_request(
    welcome: Welcome,
    pipeline: str,
    *,
    image: Image | None = None,
    prompt: str | None = None,
    seed: int = 0,
    chunks: int | None = None,
    frames: int | None = None,
    frames_policy: FramesPolicy = "strict",
    tensors: Mapping[str, ArrayLike] | None = None,
    control_binding: ControlBinding = "late",
    pace: Pace = "asap",
    wait_ready: bool = True,
    **parameters: Plain,
) -> SessionRequest:
    """What `Client.open_session` is asked for, checked against what the broker said in its welcome.

    Raises:
        RequestError: a field is refused; `field` names it.
        OverloadError: there is no worker at all.
    """
    spec = _spec(pipeline, welcome)
    _check_choice("control_binding", control_binding, get_args(ControlBinding))
    _check_choice("pace", pace, get_args(Pace))
    length = session_length(spec, chunks, frames, frames_policy)
    complete = check_parameters(spec, _given(spec, prompt, seed, parameters))
    image_bytes_max = welcome.limits.get("image_bytes_max", media.IMAGE_BYTES_MAX)
    refs = _tensors(spec, image, {} if tensors is None else tensors, image_bytes_max)
    _check_sizes(refs, welcome)
    key = secrets.token_hex(16)
    _check_encodable(OpenSession(key, pipeline, length, complete, refs), welcome)
    return SessionRequest(spec, length, complete, refs, control_binding, pace, bool(wait_ready), key)


def _spec(pipeline: object, welcome: Welcome) -> StreamSpec:
    known = {spec.name: spec for spec in welcome.specs}
    if not isinstance(pipeline, str):
        raise RequestError("pipeline", f"{pipeline!r} is not a text; accepted: {', '.join(sorted(known)) or 'a name'}")
    if not known:  # which ones there will be only the workers know, so that the name can't be called wrong
        raise OverloadError(f"no worker serves {pipeline!r} now: the broker has no worker", RETRY_AFTER_S)
    if pipeline not in known:
        raise RequestError("pipeline", f"{pipeline!r} is unknown; accepted: {', '.join(sorted(known))}")
    return known[pipeline]


def _check_choice(field: str, value: object, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise RequestError(field, f"{shown(value)} is not accepted; accepted: {', '.join(accepted)}")


def _check_sizes(refs: Mapping[str, TensorRef], welcome: Welcome) -> None:
    most = welcome.limits.get("frame_bytes_max", wire.Limits().frame_bytes_max)
    for name, ref in refs.items():
        if ref.nbytes > most:
            raise RequestError(name, f"takes {ref.nbytes} bytes; accepted by the broker: {most}")


def _check_encodable(message: OpenSession, welcome: Welcome) -> None:
    try:
        header = wire.encode(message, 0)[0]
    except ValueError as error:
        raise RequestError("parameters", f"hold a value that can't be sent ({error})") from None
    most = welcome.limits.get("header_bytes_max", wire.Limits().header_bytes_max)
    if len(header) > most:
        raise RequestError("parameters", f"take {len(header)} bytes; accepted: {most}")


def _given(spec: StreamSpec, prompt: str | None, seed: int, parameters: Mapping[str, Plain]) -> dict[str, Plain]:
    given: dict[str, Plain] = dict(parameters)
    if prompt is not None:
        given["prompt"] = prompt
    if seed != 0 or any(parameter.name == "seed" for parameter in spec.parameters):
        given["seed"] = seed
    return given


def _tensors(
    spec: StreamSpec, image: Image | None, others: Mapping[str, ArrayLike], image_bytes_max: int
) -> dict[str, TensorRef]:
    if not isinstance(others, Mapping):
        raise RequestError("tensors", f"are a {type(others).__name__}; accepted: a mapping of names to arrays")
    given = dict(others)
    if image is not None:
        if all(tensor.name != "image" for tensor in spec.tensors):
            raise RequestError("image", f"{spec.name!r} takes no picture")
        if isinstance(image, str | os.PathLike):
            given["image"] = media.load_image(image, image_bytes_max)
        else:
            given["image"] = media.shrink(_as_array(image), image_bytes_max)
    refs = tensor_refs(given)
    check_tensors(spec.tensors, {name: (ref.dtype, ref.shape) for name, ref in refs.items()})
    return refs


def _as_array(image: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(image)
    except (TypeError, ValueError) as error:
        raise RequestError("image", f"is no array ({error}); accepted: a file, or uint8[height, width, 3]") from None
