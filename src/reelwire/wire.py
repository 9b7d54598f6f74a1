"""Frames to messages and back: pure, bounded, and nothing is ever pickled.

One or several messages travel together: one header frame, and one frame per inline tensor. The header is msgpack::

    ["reelwire", protocol, attachment, [message name, body, message name, body, ...]]

`attachment` is the number that the broker issued to this connection in answer to its hello (0 before that); frames
that carry another one are not from the peer they claim to be. A body is msgpack in bytes of its own, so that each message has a
size, and is encoded without regard to its neighbours: ``[field, field, ...]`` in the order of the message's class. A
nested message is a list of its fields, a tensor is ``[dtype, shape, number of its frame]``, or for one in shared memory
``[dtype, shape, [owner, segment, generation, offset]]``. Frames are numbered within their message, in the order in
which its fields refer to them, and each is referred to exactly once; those of the first message come first.

`codec` compiles encoders and decoders from type hints, so that `messages.py` is the one description of the protocol.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar, cast

import msgpack

from . import group_messages, messages
from .codec import Buffer as Buffer
from .codec import Decoder, Frames, decoder, encoder
from .errors import VersionMismatch, WireError

MAGIC = "reelwire"
PROTOCOL = 3
TOGETHER_MAX = 256
"""Messages that may travel together."""
TOGETHER_HEADER_BYTES_MAX = 128 << 10
"""Above this header, and above these bytes of tensors, a message travels alone."""
TOGETHER_TENSOR_BYTES_MAX = 64 << 10
HEADER_BYTES = 32
"""No header takes more beside its messages, and no message more in it than this beside its name and its body."""
ENTRY_BYTES = 8

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
        nbytes = sizes[0]
        if len(sizes) > 1:
            nbytes, largest = sum(sizes), max(sizes[1:])
            if largest > self.frame_bytes_max:
                return f"frame of {largest} bytes; accepted: {self.frame_bytes_max}"
        if nbytes > self.message_bytes_max:
            return f"message of {nbytes} bytes; accepted: {self.message_bytes_max}"
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
        limits: what the peer accepts.

    Attributes:
        attachment: the peer's number.
        nbytes: what all of them take; a few bytes less may be sent.
    """

    __slots__ = (
        "_entries",
        "_frames_left",
        "_header_left",
        "_limits",
        "_tensors",
        "_tensors_left",
        "attachment",
        "nbytes",
    )

    def __init__(self, attachment: int, first: Packed, limits: Limits) -> None:
        """Begin with one message."""
        self.attachment = attachment
        self._entries: list[str | bytes] = [first.name, first.body]
        self._tensors = list(first.buffers)
        self._limits: Limits | None = limits  # until it is known what is left of them; most messages travel alone
        self._header_left = self._tensors_left = self._frames_left = 0
        self.nbytes = HEADER_BYTES + ENTRY_BYTES + len(first.name) + len(first.body)
        if first.buffers:
            self.nbytes += sum(sizes_of(first.buffers))

    def add(self, attachment: int, packed: Packed) -> bool:
        """Whether one more message travels with these; not when that would be too much of them."""
        if self._limits is not None:
            self._divide(self._limits)
        name, body, entries = packed.name, packed.body, self._entries
        entry_bytes = ENTRY_BYTES + len(name) + len(body)
        if entry_bytes > self._header_left or attachment != self.attachment or len(entries) >= 2 * TOGETHER_MAX:
            return False
        if packed.buffers and not self._add_tensors(packed.buffers):
            return False
        entries += (name, body)
        self._header_left -= entry_bytes
        self.nbytes += entry_bytes
        return True

    def _divide(self, limits: Limits) -> None:
        """Beforehand, between header and tensors: what all messages together may have, less the first of them."""
        tensors_nbytes = sum(sizes_of(self._tensors))
        tensors_most = min(TOGETHER_TENSOR_BYTES_MAX, limits.message_bytes_max // 2)
        header_most = min(TOGETHER_HEADER_BYTES_MAX, limits.header_bytes_max, limits.message_bytes_max // 2)
        self._tensors_left = tensors_most - tensors_nbytes
        self._frames_left = limits.frames_max - 1 - len(self._tensors)
        self._header_left = header_most + tensors_nbytes - self.nbytes if self._tensors_left >= 0 else -1
        self._limits = None

    def _add_tensors(self, buffers: list[Buffer]) -> bool:
        tensors_nbytes = sum(sizes_of(buffers))
        if tensors_nbytes > self._tensors_left or len(buffers) > self._frames_left:
            return False
        self._tensors += buffers
        self._tensors_left -= tensors_nbytes
        self._frames_left -= len(buffers)
        self.nbytes += tensors_nbytes
        return True

    def frames(self) -> list[Buffer]:
        """What is to be sent."""
        return [_header(self.attachment, self._entries), *self._tensors]


class Direction(Generic[M]):
    """The messages that may travel one way, by name."""

    def __init__(self, union: object) -> None:
        """Take them from the closed union of the direction."""
        self.kinds: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(union)}
        self._decoders: dict[str, Decoder] = {}

    def decoder(self, name: str) -> Decoder:
        """What makes a message of its body.

        Raises:
            WireError: no message has that name.
        """
        found = self._decoders.get(name)
        if found is None:
            kind = self.kinds.get(name)
            if kind is None:
                raise WireError(f"message {name[:40]!r} is unknown in this direction")
            found = self._decoders[name] = decoder(kind)
        return found


TO_BROKER: Direction[messages.ToBroker] = Direction(messages.ToBroker)
TO_CLIENT: Direction[messages.ToClient] = Direction(messages.ToClient)
TO_WORKER: Direction[messages.ToWorker] = Direction(messages.ToWorker)
TO_RANK: Direction[group_messages.ToRank] = Direction(group_messages.ToRank)
TO_LEADER: Direction[group_messages.ToLeader] = Direction(group_messages.ToLeader)
Sendable = messages.Message | group_messages.ToRank | group_messages.ToLeader


def prepare(receives: Direction[Any], sends: object) -> None:
    """Compile now what is otherwise compiled when the first message of a kind comes or goes: tens of milliseconds in all.

    Args:
        receives: the direction whose messages are decoded here.
        sends: the closed union of those that are encoded here.
    """
    for name in receives.kinds:
        receives.decoder(name)
    for kind in typing.get_args(sends):
        encoder(kind)


def encode(what: Sendable | Sequence[Sendable], attachment: int) -> list[Buffer]:
    """The frames of one message, or of several that travel together; tensors' bytes are not copied.

    Raises:
        ValueError: a plain value in one has no place on the wire (a numpy scalar, say).
    """
    entries: list[str | bytes] = []
    tensors: list[Buffer] = []
    for message in what if isinstance(what, Sequence) else (what,):
        packed = pack(message)
        entries += (packed.name, packed.body)
        tensors += packed.buffers
    return [_header(attachment, entries), *tensors]


def pack(message: Sendable) -> Packed:
    """A message by itself; a `Batch` puts it on its way.

    Raises:
        ValueError: as `encode`.
    """
    buffers: list[Buffer] = []
    kind: Any = type(message)
    body = encoder(kind)(message, buffers)
    try:
        data = cast("bytes", msgpack.packb(body))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{kind.__name__} can't be encoded: {error}") from error
    return Packed(kind.__name__, data, buffers)


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
    taken = Frames(frames)
    found: list[M] = []
    nbytes: list[int] = []
    for name, body in zip(entries[::2], entries[1::2], strict=True):
        if type(name) is not str:
            raise WireError("the message's name is not a text")
        decode_body = direction.decoder(name)
        if type(body) is not bytes:
            raise WireError(f"{name}'s body is not bytes")
        first = taken.begin()
        found.append(decode_body(_unpacked(body, name), taken, name))
        size = len(name) + len(body)
        nbytes.append(size if first == taken.next else size + sum(sizes[first : taken.next]))
    if taken.next < len(frames):
        raise WireError(f"{_names(entries)} refers to {taken.next - 1} of {len(frames) - 1} frames")
    return Envelope(attachment, tuple(found), tuple(nbytes))


def _header(attachment: int, entries: list[str | bytes]) -> bytes:
    return cast("bytes", msgpack.packb((MAGIC, PROTOCOL, attachment, entries)))


def _unpacked(data: Buffer, what: str) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True, raw=False, ext_hook=_refuse_extension)
    except Exception as error:  # the unpacker's errors have no common root, and the bytes are a stranger's
        raise WireError(f"{what} is not msgpack: {error}") from error


def _names(entries: Sequence[str]) -> str:
    return entries[0] if len(entries) == 2 else f"a batch of {len(entries) // 2} messages"


def sizes_of(frames: Sequence[Buffer]) -> list[int]:
    """The frames' sizes, in bytes."""
    return [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]


def _refuse_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"msgpack extension {code}")
