"""Frames to messages and back: pure, bounded, and nothing is ever pickled.

A message is one header frame and one frame per inline tensor. The header is msgpack::

    ["reelwire", protocol, attachment, message name, [field, field, ...]]

`attachment` is the number that the broker issued to this connection in answer to its hello (0 before that); a frame
that carries another one is not from the peer it claims to be. A message's fields stand in the order of its class; a
nested message is a list of its fields, a tensor is ``[dtype, shape, number of its frame]``, or for one in shared memory
``[dtype, shape, [owner, segment, generation, offset]]``. Frames are numbered in the order in which the fields refer to them, and each is referred to exactly once.

Encoders and decoders are compiled once per class from its type hints, so that `messages.py` is the one description of
the protocol.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeVar, Union, cast

import msgpack

from . import messages, tensors
from .errors import VersionMismatch, WireError
from .tensors import Inline, Shared, TensorRef

MAGIC = "reelwire"
PROTOCOL = 1
PLAIN_DEPTH_MAX = 16

Buffer = bytes | memoryview
Encoder = Callable[[Any, list[Buffer]], Any]
Decoder = Callable[[Any, "_Frames", str], Any]
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver accepts of one message, in bytes and frames.

    Attributes:
        frame_bytes_max: largest frame of a tensor.
        header_bytes_max: largest header.
        frames_max: most frames, the header's included.
        message_bytes_max: most bytes of all frames.
    """

    frame_bytes_max: int = 256 << 20
    header_bytes_max: int = 1 << 20
    frames_max: int = 256
    message_bytes_max: int = 512 << 20

    @property
    def part_bytes_max(self) -> int:
        """The largest frame of either sort: what a socket may take in at once."""
        return max(self.frame_bytes_max, self.header_bytes_max)

    def misfit(self, sizes: Sequence[int]) -> str | None:
        """Why a message isn't accepted whose frames have these bytes, header first; None when it is."""
        if not sizes:
            return "message without a frame"
        if len(sizes) > self.frames_max:
            return f"message of {len(sizes)} frames; accepted: {self.frames_max}"
        if sizes[0] > self.header_bytes_max:
            return f"header of {sizes[0]} bytes; accepted: {self.header_bytes_max}"
        largest = max(sizes[1:], default=0)
        if largest > self.frame_bytes_max:
            return f"frame of {largest} bytes; accepted: {self.frame_bytes_max}"
        if sum(sizes) > self.message_bytes_max:
            return f"message of {sum(sizes)} bytes; accepted: {self.message_bytes_max}"
        return None


@dataclass(frozen=True, slots=True)
class Envelope(Generic[M]):
    """A decoded message and the attachment number that its sender claims."""

    attachment: int
    message: M


class Direction(Generic[M]):
    """The messages that may travel one way, by name."""

    def __init__(self, union: object) -> None:
        """Take them from the closed union of the direction."""
        self.kinds: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(union)}


TO_BROKER: Direction[messages.ToBroker] = Direction(messages.ToBroker)
TO_CLIENT: Direction[messages.ToClient] = Direction(messages.ToClient)
TO_WORKER: Direction[messages.ToWorker] = Direction(messages.ToWorker)


def encode(message: messages.Message, attachment: int) -> list[Buffer]:
    """The frames of a message; tensors' bytes are not copied.

    Raises:
        ValueError: a plain value in it has no place on the wire (a numpy scalar, say).
    """
    buffers: list[Buffer] = []
    kind = type(message)
    body = _encoder(cast("Any", kind))(message, buffers)
    try:
        header = cast("bytes", msgpack.packb([MAGIC, PROTOCOL, attachment, kind.__name__, body]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{kind.__name__} can't be encoded: {error}") from error
    return [header, *buffers]


def decode(frames: Sequence[Buffer], direction: Direction[M], limits: Limits) -> Envelope[M]:
    """The message that the frames hold.

    Raises:
        VersionMismatch: the frames are of another version of the protocol.
        WireError: they are no message of this direction, or exceed a limit. Nothing else is ever raised.
    """
    reason = limits.misfit(sizes_of(frames))
    if reason is not None:
        raise WireError(reason)
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=True, raw=False, ext_hook=_refuse_extension)
    except Exception as error:  # the unpacker's errors have no common root, and the bytes are a stranger's
        raise WireError(f"header is not msgpack: {error}") from error
    if not isinstance(header, list) or len(header) < 2 or header[0] != MAGIC:
        raise WireError("header is not one of reelwire")
    if type(header[1]) is not int:
        raise WireError("the protocol's version is not a number")
    if header[1] != PROTOCOL:
        raise VersionMismatch(f"the peer speaks protocol {header[1]}, this side {PROTOCOL}")
    if len(header) != 5:
        raise WireError(f"header has {len(header)} parts instead of 5")
    attachment, name, body = header[2:]
    if type(attachment) is not int or attachment < 0:
        raise WireError("attachment is not a number of 0 and more")
    if not isinstance(name, str):
        raise WireError("the message's name is not a text")
    kind = direction.kinds.get(name)
    if kind is None:
        raise WireError(f"message {name[:40]!r} is unknown in this direction")
    tensors_of = _Frames(frames[1:])
    message = cast("M", _decoder(kind)(body, tensors_of, kind.__name__))
    if tensors_of.taken < len(tensors_of.frames):
        raise WireError(f"{kind.__name__} refers to {tensors_of.taken} of {len(tensors_of.frames)} frames")
    return Envelope(attachment, message)


def sizes_of(frames: Sequence[Buffer]) -> list[int]:
    """The frames' sizes, in bytes."""
    return [memoryview(frame).nbytes for frame in frames]


class _Frames:
    """The tensors' frames of one message; they are taken in order, each once."""

    __slots__ = ("frames", "taken")

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self.frames = frames
        self.taken = 0

    def take(self, number: int, path: str) -> Buffer:
        if not 0 <= number < len(self.frames):
            raise WireError(f"{path}: frame {number} of {len(self.frames)} isn't there")
        if number != self.taken:
            raise WireError(f"{path}: frame {number} is referred to in place of frame {self.taken}")
        self.taken += 1
        return self.frames[number]


def _refuse_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"msgpack extension {code}")


# --- compiled from type hints ----------------------------------------------------------------------------------------


@cache
def _encoder(hint: Any) -> Encoder:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is TensorRef:
        return _encode_tensor
    if hint in _SCALARS or origin is Literal or _is_plain(hint):
        return lambda value, _buffers: value
    if is_dataclass(hint):
        members = [(name, _encoder(member)) for name, member in _members(hint)]
        return lambda value, buffers: [encode(getattr(value, name), buffers) for name, encode in members]
    if origin is tuple:
        item = _encoder(args[0])
        return lambda value, buffers: [item(each, buffers) for each in value]
    if origin is Mapping:
        item = _encoder(args[1])
        return lambda value, buffers: {key: item(each, buffers) for key, each in value.items()}
    if origin in (Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        some = _encoder(args[0])
        return lambda value, buffers: None if value is None else some(value, buffers)
    if origin in (Union, types.UnionType):
        return lambda value, _buffers: value  # a union of scalars
    raise TypeError(f"no encoding for {hint}")


@cache
def _decoder(hint: Any) -> Decoder:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is TensorRef:
        return _decode_tensor
    if _is_plain(hint):
        return _decode_plain
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return _choice(args)
    if is_dataclass(hint):
        return _record(hint)
    if origin is tuple:
        return _sequence(_decoder(args[0]))
    if origin is Mapping:
        return _mapping(_decoder(args[1]))
    if origin in (Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        return _optional(_decoder(args[0]))
    if origin in (Union, types.UnionType) and all(arg in (*_SCALARS, type(None)) for arg in args):
        return _scalar_of(args)
    raise TypeError(f"no decoding for {hint}")


def _is_plain(hint: Any) -> bool:
    """Whether it is `spec.Plain`, which refers to itself and so equals nothing once it is resolved."""
    return any(typing.get_origin(arg) is dict for arg in typing.get_args(hint))


def _members(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return [(member.name, hints[member.name]) for member in fields(kind)]


def _wrong(path: str, accepted: str) -> WireError:
    return WireError(f"{path} is not {accepted}")


def _scalar(kind: type, accepted: str) -> Decoder:
    def decode(value: Any, _frames: _Frames, path: str) -> Any:
        if type(value) is not kind:
            raise _wrong(path, accepted)
        return value

    return decode


def _decode_int(value: Any, _frames: _Frames, path: str) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise _wrong(path, "a 64-bit integer")
    return value


def _decode_float(value: Any, _frames: _Frames, path: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(path, "a finite number")
    return float(value)


_SCALARS: dict[Any, Decoder] = {
    bool: _scalar(bool, "true or false"),
    int: _decode_int,
    float: _decode_float,
    str: _scalar(str, "a text"),
    bytes: _scalar(bytes, "bytes"),
}


def _scalar_of(kinds: tuple[Any, ...]) -> Decoder:
    def decode(value: Any, frames: _Frames, path: str) -> Any:
        if type(value) not in kinds:
            raise _wrong(path, f"one of {', '.join(kind.__name__ for kind in kinds)}")
        return None if value is None else _SCALARS[type(value)](value, frames, path)

    return decode


def _choice(accepted: tuple[Any, ...]) -> Decoder:
    def decode(value: Any, _frames: _Frames, path: str) -> Any:
        if not isinstance(value, str) or value not in accepted:
            raise _wrong(path, f"one of {', '.join(accepted)}")
        return value

    return decode


def _optional(some: Decoder) -> Decoder:
    return lambda value, frames, path: None if value is None else some(value, frames, path)


def _sequence(item: Decoder) -> Decoder:
    def decode(value: Any, frames: _Frames, path: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, "a list")
        return tuple(item(each, frames, path) for each in value)

    return decode


def _mapping(item: Decoder) -> Decoder:
    def decode(value: Any, frames: _Frames, path: str) -> Any:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _wrong(path, "a map with texts as keys")
        return {key: item(each, frames, f"{path}[{key[:40]!r}]") for key, each in value.items()}

    return decode


def _record(kind: Any) -> Decoder:
    members = [(f"{kind.__name__}.{name}", _decoder(member)) for name, member in _members(kind)]

    def decode(value: Any, frames: _Frames, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(members):
            raise _wrong(path, f"a list of the {len(members)} fields of {kind.__name__}")
        return kind(*(item(each, frames, name) for each, (name, item) in zip(value, members, strict=True)))

    return decode


def _decode_plain(value: Any, frames: _Frames, path: str, depth: int = 0) -> Any:
    if depth > PLAIN_DEPTH_MAX:
        raise _wrong(path, f"nested {PLAIN_DEPTH_MAX} or fewer deep")
    if isinstance(value, list):
        return [_decode_plain(each, frames, path, depth + 1) for each in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise _wrong(path, "a map with texts as keys")
        return {key: _decode_plain(each, frames, path, depth + 1) for key, each in value.items()}
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise _wrong(path, "a plain value")


def _encode_tensor(ref: TensorRef, buffers: list[Buffer]) -> Any:
    tensors.check(ref)
    place = ref.place
    if isinstance(place, Shared):
        return [ref.dtype, list(ref.shape), [place.owner, place.segment, place.generation, place.offset]]
    buffers.append(place.buffer)
    return [ref.dtype, list(ref.shape), len(buffers) - 1]


def _decode_tensor(value: Any, frames: _Frames, path: str) -> TensorRef:
    if not isinstance(value, list) or len(value) != 3:
        raise _wrong(path, "a tensor")
    dtype, shape, where = value
    sizes = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not isinstance(dtype, str) or not sizes:
        raise _wrong(path, "a tensor")
    if type(where) is int:
        ref = TensorRef(dtype, tuple(shape), Inline(frames.take(where, path)))
    elif isinstance(where, list) and tuple(map(type, where)) == (str, str, int, int):
        ref = TensorRef(dtype, tuple(shape), Shared(*where))
    else:
        raise _wrong(path, "a tensor")
    tensors.check(ref)
    return ref
