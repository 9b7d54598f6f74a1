"""Named values in a file: the state of a job, to go on from. Nothing is pickled.

It is taken, which copies it, where the job stands; and written while the job goes on.

::

    8 bytes      b"RWVALUE1"
    8 bytes      size of the header, little-endian
    header       msgpack: [an `Artifact` as `codec` has it, [bytes of each tensor, ...]]
    tensors      their bytes, one after the other

A file is named by its SHA-256, and appears under that name when it is whole.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgpack

from reelwire import codec
from reelwire.codec import Buffer
from reelwire.errors import WireError
from reelwire.messages import Artifact, FileOffer

from .values import Library, from_artifact, to_artifact

MAGIC = b"RWVALUE1"
HEADER_BYTES_MAX = 64 << 20
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Named values as they were at one moment; nobody else writes to these bytes.

    Attributes:
        header: of the file, packed.
        buffers: the bytes of its tensors.
    """

    header: bytes
    buffers: tuple[Buffer, ...]


def snapshot_of(values: Mapping[str, Any]) -> Snapshot:
    """Copy named values.

    Args:
        values: plain ones, and arrays of numpy or torch; those on a device are waited for.

    Raises:
        ValueError: one of them has no place in a file; the sentence names what is accepted.
    """
    buffers: list[Buffer] = []
    header = codec.encoder(Artifact)(to_artifact(values), buffers)
    packed = cast("bytes", msgpack.packb([header, [memoryview(buffer).nbytes for buffer in buffers]]))
    if len(packed) > HEADER_BYTES_MAX:
        raise ValueError(f"plain values of {len(packed)} bytes; accepted: {HEADER_BYTES_MAX}, and arrays beside them")
    return Snapshot(packed, tuple(buffers))


def write_snapshot(folder: Path, snapshot: Snapshot) -> FileOffer:
    """Write it into a new file of the folder.

    Raises:
        OSError: there is no room.
    """
    packed = snapshot.header
    digest, nbytes = hashlib.sha256(), 0
    part = folder / f"values-{secrets.token_hex(8)}.part"
    try:
        with part.open("xb") as out:
            for piece in (MAGIC, _LENGTH.pack(len(packed)), packed, *snapshot.buffers):
                out.write(piece)
                digest.update(piece)
                nbytes += memoryview(piece).nbytes
        path = folder / digest.hexdigest()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return FileOffer(digest.hexdigest(), str(path), nbytes)


def read_values(path: str | os.PathLike[str], library: Library) -> dict[str, Any]:
    """What `write_snapshot` wrote, bit for bit; arrays are of `library`, on the CPU, those of numpy read-only.

    Raises:
        ValueError: the file is none of ours, or cut short.
        OSError: it can't be read.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC) + _LENGTH.size)
        if len(start) < len(MAGIC) + _LENGTH.size or not start.startswith(MAGIC):
            raise ValueError(f"{path} holds no values of ours")
        (length,) = _LENGTH.unpack(start[len(MAGIC) :])
        if length > min(HEADER_BYTES_MAX, size - len(start)):
            raise ValueError(f"{path} is cut short")
        header, sizes = _header(file.read(length), path)
        if any(type(nbytes) is not int or nbytes < 0 for nbytes in sizes) or len(start) + length + sum(sizes) != size:
            raise ValueError(f"{path} is cut short, or has more in it than it says")
        buffers: list[Buffer] = [b""]
        for nbytes in sizes:
            buffer = bytearray(nbytes)
            if file.readinto(buffer) != nbytes:
                raise ValueError(f"{path} is cut short")
            buffers.append(memoryview(buffer))
    try:
        artifact: Artifact = codec.decoder(Artifact)(header, codec.Frames(buffers), "values")
    except WireError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    return from_artifact(artifact, library)


def _header(packed: bytes, path: object) -> tuple[Any, list[Any]]:
    try:
        header, sizes = msgpack.unpackb(packed, strict_map_key=True, raw=False)
        return header, list(sizes)
    except Exception as error:  # the unpacker's errors have no common root
        raise ValueError(f"{path} can't be read: {error}") from error
