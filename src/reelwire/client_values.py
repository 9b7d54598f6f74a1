"""Between what an application holds (arrays, controls) and what travels (artifacts, tensor references). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import messages as m
from . import tensors
from .controls import Control
from .errors import ControlError, RequestError, WireError
from .messages import Artifact
from .spec import Plain, StreamSpec
from .tensors import TensorRef

_ARRAYS = frozenset({"poses", "intrinsics", "action"})
"""Names that the arrays of a control may have."""

_UINT8 = np.dtype(np.uint8)


def control_artifact(control: Control, spec: StreamSpec) -> Artifact:
    """A control as it travels, with canonical key names.

    Raises:
        ControlError: the stream has no such key (``unknown_key``) or no such array (``malformed``).
    """
    try:
        checked = control.for_stream(spec)
    except RequestError as error:
        raise ControlError("unknown_key" if error.field == "control" else "malformed", str(error)) from None
    values: dict[str, Plain] = {"reset_pose": checked.reset_pose}
    if checked.keys is not None:
        values["keys"] = list(checked.keys)
    if checked.translation_norm is not None:
        values["translation_norm"] = checked.translation_norm
    if checked.poses is None:  # nothing stands beside keys
        return Artifact(values)
    return Artifact(values, {name: tensors.from_array(array) for name, array in checked.tensors().items()})


def control_of(artifact: Artifact) -> Control:
    """The control that an artifact holds.

    Raises:
        WireError: it holds none.
    """
    values: Mapping[str, Any] = artifact.values
    arrays: dict[str, Any] = {}
    if artifact.tensors:
        arrays = {name: array_of(name, ref) for name, ref in artifact.tensors.items()}
    keys = values.get("keys")
    if (keys is not None and type(keys) is not list) or not _ARRAYS.issuperset(arrays):
        raise WireError(f"the control of a chunk holds {', '.join(sorted(arrays.keys() - _ARRAYS)) or repr(keys)}")
    try:
        reset_pose, translation_norm = values.get("reset_pose", False), values.get("translation_norm")
        if not arrays:
            return Control(keys, None, None, None, reset_pose, translation_norm)
        return Control(keys, reset_pose=reset_pose, translation_norm=translation_norm, **arrays)
    except RequestError as error:
        raise WireError(f"the control of a chunk is none: {error}") from None


def session_length(
    spec: StreamSpec, chunks: int | None, frames: int | None, policy: Literal["strict", "truncate"] = "strict"
) -> int:
    """The length in chunks of a session that was asked for in chunks or in pixel frames.

    Raises:
        RequestError: both or neither is given, or the count is none that the stream can have.
    """
    if (chunks is None) == (frames is None):
        have = "neither chunks nor frames is given" if chunks is None else "chunks and frames are given"
        raise RequestError("chunks", f"{have}; accepted: one of them")
    if policy not in ("strict", "truncate"):
        raise RequestError("frames_policy", f"{policy!r} is not accepted; accepted: strict, truncate")
    field, given = ("chunks", chunks) if frames is None else ("frames", frames)
    if not isinstance(given, int) or isinstance(given, bool):
        raise RequestError(field, f"{given!r} is not an integer")
    length = given if frames is None else spec.chunks_in(given, policy)
    if not 1 <= length <= spec.chunks_max:
        most = spec.chunks_max if frames is None else spec.frames_in(spec.chunks_max)
        raise RequestError(field, f"{given} is not accepted; accepted: 1 to {most}")
    return length


def tensor_refs(given: Mapping[str, ArrayLike]) -> dict[str, TensorRef]:
    """Arrays as they travel.

    Raises:
        RequestError: one of them is no array that can be sent.
    """
    refs: dict[str, TensorRef] = {}
    for name, value in given.items():
        try:
            refs[name] = tensors.from_array(np.asarray(value))
        except (TypeError, ValueError) as error:
            raise RequestError(name, f"is no array that can be sent ({error})") from None
    return refs


def outputs_of(chunk: m.Chunk) -> dict[str, dict[str, Any]]:
    """All outputs of a chunk: artifact name to its plain values and arrays, by name.

    Raises:
        WireError: a tensor is of a type that numpy doesn't have.
    """
    outputs: dict[str, dict[str, Any]] = {}
    for name, artifact in chunk.outputs.items():
        values: dict[str, Any] = {**artifact.values}
        for key, ref in artifact.tensors.items():
            values[key] = array_of(key, ref)
        outputs[name] = values
    return outputs


def frames_of(outputs: Mapping[str, Mapping[str, Any]], spec: StreamSpec) -> NDArray[np.uint8]:
    """The pixel frames among the outputs: the tensor ``frames`` of the spec's first output, or its only tensor.

    Raises:
        WireError: there is no such tensor, or it isn't uint8 of shape [frames, height, width, 3].
    """
    values = outputs.get(spec.outputs[0], {})
    frames = values.get("frames")
    if not isinstance(frames, np.ndarray):
        only = [value for value in values.values() if isinstance(value, np.ndarray)]
        frames = only[0] if len(only) == 1 else None
    if frames is None or frames.dtype != _UINT8 or frames.ndim != 4 or frames.shape[3] != 3:
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        have = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items()) or "no tensor"
        raise WireError(f"a chunk of {spec.name!r} holds {have} instead of frames as uint8[frames, height, width, 3]")
    return frames


def array_of(name: str, ref: TensorRef) -> NDArray[Any]:
    """A read-only array over the bytes that came.

    Raises:
        WireError: numpy has no such dtype.
    """
    try:
        return tensors.to_array(ref)
    except ValueError as error:
        raise WireError(f"tensor {name!r}: {error}") from None
