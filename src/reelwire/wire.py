"""Frames to messages and back: pure, bounded, and nothing is ever pickled.

One or several messages travel together: one header frame, and one frame per inline tensor. The header is msgpack::

    ["reelwire", protocol, attachment, [message name, body, message name, body, ...]]

`attachment` is the number that the broker issued to this connection in answer to its hello (0 before that); frames
that carry another one are not from the peer they claim to be. A body is msgpack in bytes of its own, so that each message has a
size, and is encoded without regard to its neighbours: ``[field, field, ...]`` in the order of the message's class. A
nested message is a list of its fields, a tensor is ``[dtype, shape, number of its frame]``, or for one in shared memory
``[dtype, shape, [owner, segment, generation, offset]]``. Frames are numbered within their message, in the order in
which its fields refer to them, and each is referred to exactly once; those of the first message come first.

Encoders and decoders are compiled once per class from its type hints, so that `messages.py` is the one description of
the protocol.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeVar, Union, cast

import msgpack

from . import messages, tensors
from .errors import VersionMismatch, WireError
from .tensors import Inline, Shared, TensorRef

MAGIC = "reelwire"
PROTOCOL = 2
PLAIN_DEPTH_MAX = 16
TOGETHER_MAX = 256
"""Messages that may travel together."""
TOGETHER_HEADER_BYTES_MAX = 128 << 10
"""Above this header, and above these bytes of tensors, a message travels alone."""
TOGETHER_TENSOR_BYTES_MAX = 64 << 10
HEADER_BYTES = 32
"""No header takes more beside its messages, and no message more in it than this beside its name and its body."""
ENTRY_BYTES = 8

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

    @classmethod
    def of(cls, said: Mapping[str, int]) -> Limits:
        """What a peer says that it accepts, by these names; what it doesn't say, or nonsense, is as by default."""
        return cls(**{one.name: said[one.name] for one in fields(cls) if said.get(one.name, 0) > 0})

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
    """Decoded messages, in order, and the attachment number that their sender claims.

    Attributes:
        attachment: the number.
        messages: one or more.
        sizes: bytes of each, its frames included.
    """

    attachment: int
    messages: tuple[M, ...]
    sizes: tuple[int, ...] = field(default=(), compare=False)


@dataclass(slots=True, eq=False)
class Packed:
    """One encoded message, ready to be put beside others.

    Attributes:
        name: of the message.
        body: its fields.
        buffers: its tensors, not copied.
    """

    name: str
    body: bytes
    buffers: list[Buffer]


class Batch:
    """Messages to one peer that travel together, in order, for as long as they are small.

    Args:
        attachment: the peer's number.
        first: the first of them; it may be large, and is alone then.
    """

    __slots__ = ("_frames", "_header_bytes", "_packed", "_tensor_bytes", "attachment")

    def __init__(self, attachment: int, first: Packed) -> None:
        """Begin with one message."""
        self.attachment = attachment
        self._packed = [first]
        self._header_bytes = HEADER_BYTES + _entry_bytes(first)
        self._tensor_bytes = sum(sizes_of(first.buffers))
        self._frames = 1 + len(first.buffers)

    def add(self, attachment: int, packed: Packed, limits: Limits) -> bool:
        """Whether one more message travels with these; not when the peer, which has these limits, might refuse them."""
        header_bytes = self._header_bytes + _entry_bytes(packed)
        if attachment != self.attachment or header_bytes > min(TOGETHER_HEADER_BYTES_MAX, limits.header_bytes_max):
            return False
        tensor_bytes = self._tensor_bytes + sum(sizes_of(packed.buffers))
        if tensor_bytes > min(TOGETHER_TENSOR_BYTES_MAX, limits.message_bytes_max - header_bytes):
            return False
        if len(self._packed) >= TOGETHER_MAX or self._frames + len(packed.buffers) > limits.frames_max:
            return False
        self._packed.append(packed)
        self._header_bytes, self._tensor_bytes = header_bytes, tensor_bytes
        self._frames += len(packed.buffers)
        return True

    @property
    def nbytes(self) -> int:
        """What all of them take, in bytes; a few less may be sent."""
        return self._header_bytes + self._tensor_bytes

    def frames(self) -> list[Buffer]:
        """What is to be sent."""
        return joined(self._packed, self.attachment)


class Direction(Generic[M]):
    """The messages that may travel one way, by name."""

    def __init__(self, union: object) -> None:
        """Take them from the closed union of the direction."""
        self.kinds: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(union)}


TO_BROKER: Direction[messages.ToBroker] = Direction(messages.ToBroker)
TO_CLIENT: Direction[messages.ToClient] = Direction(messages.ToClient)
TO_WORKER: Direction[messages.ToWorker] = Direction(messages.ToWorker)


def encode(what: messages.Message | Sequence[messages.Message], attachment: int) -> list[Buffer]:
    """The frames of one message, or of several that travel together; tensors' bytes are not copied.

    Raises:
        ValueError: a plain value in one has no place on the wire (a numpy scalar, say).
    """
    several = what if isinstance(what, Sequence) else (what,)
    return joined([pack(message) for message in several], attachment)


def pack(message: messages.Message) -> Packed:
    """A message by itself; `joined` puts it on its way.

    Raises:
        ValueError: as `encode`.
    """
    buffers: list[Buffer] = []
    kind = type(message)
    body = _encoder(cast("Any", kind))(message, buffers)
    try:
        return Packed(kind.__name__, cast("bytes", msgpack.packb(body)), buffers)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{kind.__name__} can't be encoded: {error}") from error


def joined(packed: Iterable[Packed], attachment: int) -> list[Buffer]:
    """The frames of messages that travel together."""
    entries: list[str | bytes] = []
    frames: list[Buffer] = [b""]
    for one in packed:
        entries += (one.name, one.body)
        frames += one.buffers
    frames[0] = cast("bytes", msgpack.packb((MAGIC, PROTOCOL, attachment, entries)))
    return frames


def decode(frames: Sequence[Buffer], direction: Direction[M], limits: Limits) -> Envelope[M]:
    """The messages that the frames hold: all of them, or an error.

    Raises:
        VersionMismatch: the frames are of another version of the protocol.
        WireError: they are no messages of this direction, or exceed a limit. Nothing else is ever raised.
    """
    sizes = sizes_of(frames)
    reason = limits.misfit(sizes)
    if reason is not None:
        raise WireError(reason)
    header = _unpacked(frames[0], "header")
    if not isinstance(header, list) or len(header) < 2 or header[0] != MAGIC:
        raise WireError("header is not one of reelwire")
    if type(header[1]) is not int:
        raise WireError("the protocol's version is not a number")
    if header[1] != PROTOCOL:
        raise VersionMismatch(f"the peer speaks protocol {header[1]}, this side {PROTOCOL}")
    if len(header) != 4:
        raise WireError(f"header has {len(header)} parts instead of 4")
    attachment, entries = header[2:]
    if type(attachment) is not int or attachment < 0:
        raise WireError("attachment is not a number of 0 and more")
    if not isinstance(entries, list) or not entries or len(entries) % 2 or len(entries) > 2 * TOGETHER_MAX:
        raise WireError(f"the messages are not a list of 1 to {TOGETHER_MAX} names, each with its body")
    taken = _Frames(frames)
    found: list[M] = []
    nbytes: list[int] = []
    for at in range(0, len(entries), 2):
        first = taken.begin()
        found.append(_message(entries[at], entries[at + 1], direction, taken))
        nbytes.append(len(entries[at]) + len(entries[at + 1]) + sum(sizes[first : taken.next]))
    if taken.next < len(frames):
        raise WireError(f"{_names(entries)} refers to {taken.next - 1} of {len(frames) - 1} frames")
    return Envelope(attachment, tuple(found), tuple(nbytes))


def _message(name: object, body: object, direction: Direction[M], frames: _Frames) -> M:
    if not isinstance(name, str):
        raise WireError("the message's name is not a text")
    kind = direction.kinds.get(name)
    if kind is None:
        raise WireError(f"message {name[:40]!r} is unknown in this direction")
    if not isinstance(body, bytes):
        raise WireError(f"{name}'s body is not bytes")
    return cast("M", _decoder(kind)(_unpacked(body, name), frames, name))


def _unpacked(data: Buffer, what: str) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True, raw=False, ext_hook=_refuse_extension)
    except Exception as error:  # the unpacker's errors have no common root, and the bytes are a stranger's
        raise WireError(f"{what} is not msgpack: {error}") from error


def _names(entries: Sequence[str]) -> str:
    return entries[0] if len(entries) == 2 else f"a batch of {len(entries) // 2} messages"


def _entry_bytes(packed: Packed) -> int:
    return ENTRY_BYTES + len(packed.name) + len(packed.body)


def sizes_of(frames: Sequence[Buffer]) -> list[int]:
    """The frames' sizes, in bytes."""
    return [memoryview(frame).nbytes for frame in frames]


class _Frames:
    """The frames of tensors; they are taken in order, each once, and numbered anew for each message."""

    __slots__ = ("_first", "_frames", "next")

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = frames
        self._first = self.next = 1  # the header comes before them

    def begin(self) -> int:
        """The next message begins; the place of its first frame."""
        self._first = self.next
        return self._first

    def take(self, number: int, path: str) -> Buffer:
        """The frame of that number in this message."""
        place = self._first + number
        if number < 0 or place >= len(self._frames):
            raise WireError(f"{path}: frame {number} of {len(self._frames) - self._first} isn't there")
        if place != self.next:
            raise WireError(f"{path}: frame {number} is referred to in place of frame {self.next - self._first}")
        self.next += 1
        return self._frames[place]


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
