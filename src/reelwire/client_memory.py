"""What workers on this machine wrote for a client into shared memory: copied out as soon as it is named.

So an application may keep a chunk's arrays for as long as it likes, whatever becomes of the worker, and the worker gets
its memory back with the acknowledgement of the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .messages import Artifact, Chunk, Failure
from .segments import MemoryLostError, Reader
from .tensors import Inline, Shared, TensorRef


class ClientMemory:
    """Reads shared memory, or nothing when that isn't wanted.

    Args:
        wanted: whether to read any; without it every probe fails, so that the broker has everything sent in messages.
        frame_bytes_max: largest tensor that is accepted, in bytes.
    """

    def __init__(self, wanted: bool, frame_bytes_max: int) -> None:
        """Nothing is mapped yet."""
        self._reader = Reader() if wanted else None
        self._frame_bytes_max = frame_bytes_max

    def probe(self, owner: str) -> bytes:
        """What stands in a worker's probe; empty when it can't be read here."""
        return b"" if self._reader is None else self._reader.probe(owner)

    def sweep(self) -> None:
        """Let go of what its workers have given up; to be called now and then."""
        if self._reader is not None:
            self._reader.sweep()

    def with_bytes(self, chunk: Chunk) -> Chunk | Failure:
        """The chunk with all its bytes in this process, or why they can't be had."""
        artifacts = (*chunk.outputs.values(), chunk.applied.control)
        refs = [ref for artifact in artifacts for ref in artifact.tensors.values() if isinstance(ref.place, Shared)]
        if not refs:
            return chunk
        largest = max(ref.nbytes for ref in refs)
        if largest > self._frame_bytes_max:
            sentence = f"a tensor of chunk {chunk.index} takes {largest} bytes; accepted: {self._frame_bytes_max}"
            return Failure("stage", sentence, index=chunk.index)
        try:
            outputs = {name: self._inside(artifact) for name, artifact in chunk.outputs.items()}
            applied = replace(chunk.applied, control=self._inside(chunk.applied.control))
        except MemoryLostError as error:
            sentence = f"the worker that made chunk {chunk.index} is lost: {error.strerror}"
            return Failure("worker_lost", sentence, index=chunk.index)
        return replace(chunk, outputs=outputs, applied=applied)

    def close(self) -> None:
        """Keep no mapping; a connection is over, and with it all that was named over it."""
        if self._reader is not None:
            self._reader.close()

    def _inside(self, artifact: Artifact) -> Artifact:
        tensors: Mapping[str, TensorRef] = {name: self._copied(ref) for name, ref in artifact.tensors.items()}
        return replace(artifact, tensors=tensors)

    def _copied(self, ref: TensorRef) -> TensorRef:
        if not isinstance(ref.place, Shared):
            return ref
        if self._reader is None:
            raise MemoryLostError(0, "shared memory isn't read by this client")
        return replace(ref, place=Inline(bytes(self._reader.view(ref.place, ref.nbytes))))
