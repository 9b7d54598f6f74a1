"""Shared memory without any: who wrote what where, and who reads it, so that what is written too early is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reelwire.messages import Artifact, MemoryOffer, SegmentUse
from reelwire.tensors import Shared, TensorRef

Reader = tuple[Any, ...]
"""The number of an attachment, a session, a stage or nothing for the client, and the index of a chunk."""


class Memory:
    """The shared memory of one worker. What comes back is written again at once, which nobody may notice."""

    def __init__(self, memories: Memories, owner: str) -> None:
        self.offer = MemoryOffer(owner, owner.encode().ljust(16, b".")[:16])
        self.out: dict[str, int] = {}
        self.broken: set[str] = set()
        self.returned = 0
        self._memories = memories
        self._texts: dict[str, str] = {}
        self._generations: dict[str, int] = {}
        self._free: list[str] = []

    def take(self, text: str) -> TensorRef:
        """Write a text into a segment."""
        segment = self._free.pop() if self._free else f"s{len(self._texts)}"
        self.out[segment] = self._generations[segment] = self._generations.get(segment, 0) + 1
        self._texts[segment] = text
        return TensorRef("uint8", (9,), Shared(self.offer.owner, segment, self.out[segment]))

    def give_back(self, use: SegmentUse) -> None:
        """A piece came back: once, and nobody reads it any more, or it is never to be written again."""
        if use.segment.startswith("lie"):
            return
        assert self.out.pop(use.segment) == use.generation
        assert use.broken or (self.offer.owner, use.segment) not in self._memories.read_now()
        self.returned += 1
        if use.broken:
            self.broken.add(use.segment)
        else:
            self._free.append(use.segment)

    def check(self, place: Shared, text: str) -> None:
        """A reader finds what was written for it."""
        assert (self._generations[place.segment], self._texts[place.segment]) == (place.generation, text)


class Memories:
    """Those of all workers, and who reads them now."""

    def __init__(self) -> None:
        self._of: dict[str, Memory] = {}
        self._reading: dict[Reader, list[tuple[Memory, Shared, str]]] = {}

    def add(self, worker: str) -> Memory:
        """That of another worker."""
        owner = f"{worker}-{len(self._of)}"
        self._of[owner] = Memory(self, owner)
        return self._of[owner]

    def probe(self, owner: str) -> bytes:
        """What stands in a worker's probe."""
        return self._of[owner].offer.probe

    def read(self, who: Reader, artifacts: Mapping[str, Artifact]) -> None:
        """Somebody reads what is in shared memory of these, from now on."""
        for artifact in artifacts.values():
            for tensor in artifact.tensors.values():
                if isinstance(tensor.place, Shared):
                    memory, text = self._of[tensor.place.owner], str(artifact.values["from"])
                    memory.check(tensor.place, text)
                    self._reading.setdefault(who, []).append((memory, tensor.place, text))

    def is_reading(self, who: Reader) -> bool:
        """Whether somebody isn't through yet."""
        return who in self._reading

    def has_read(self, who: Reader) -> None:
        """Somebody is through, and found the same until now; or all whose names begin so."""
        for reader in [reader for reader in self._reading if reader[: len(who)] == who]:
            for memory, place, text in self._reading.pop(reader):
                memory.check(place, text)

    def renamed(self, before: int, now: int) -> None:
        """Somebody has another number, and reads what it read."""
        for reader in [reader for reader in self._reading if reader[0] == before]:
            self._reading.setdefault((now, *reader[1:]), []).extend(self._reading.pop(reader))

    def read_now(self) -> set[tuple[str, str]]:
        """Owners and segments that somebody reads."""
        return {(place.owner, place.segment) for read in self._reading.values() for _, place, _ in read}
