"""Who still reads what workers wrote into shared memory, and what goes back to them. The broker itself never maps any.

A *piece* is one use of a segment: the bytes of one tensor. It has a lease for each stage that consumes its artifact, and
one for the client if it is an output. A stage's lease ends when its task is over, the client's when it acknowledged the
chunk; of what a session drops only those leases stay whose reader was sent it. When the last one ends the piece goes
back to its worker, which may write it again, unless a reader was lost without a word: then it must not.

What a worker refers to is checked when it arrives, so that nobody is sent to memory that isn't the worker's, or is still
read as something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from reelwire.messages import Artifact, MemoryOffer, ReturnSegments, SegmentUse
from reelwire.spec import StreamSpec
from reelwire.tensors import MEMORY_NAME, PROBE_BYTES, Shared, TensorRef

from .flow import CLIENT, Flow
from .peers import Peer

PIECES_MAX = 256
"""Most tensors of one result that are in shared memory."""
USE_BYTES = 128
"""What one piece takes of the header of a ReturnSegments, and more."""


@dataclass(slots=True, eq=False)
class Piece:
    """One use of a segment.

    Attributes:
        producer: the worker whose memory it is.
        use: its segment and generation; `broken` once a reader was lost.
        leases: how many haven't ended.
    """

    producer: Peer
    use: SegmentUse
    leases: int = 1


Pieces = tuple[Piece, ...]


class Memory:
    """All pieces that are out, and those that go back.

    Args:
        nbytes_max: most bytes of one tensor.

    Attributes:
        arrived: the pieces of the result that is handled, by artifact; artifacts without any aren't in it.
        objection: why that result can't be used, as a sentence; None when it can.
    """

    def __init__(self, nbytes_max: int) -> None:
        """Start with none."""
        self.arrived: dict[str, Pieces] = {}
        self.objection: str | None = None
        self._nbytes_max = nbytes_max
        self._returned: dict[Peer, list[Piece]] = {}

    def arrive(self, producer: Peer, outputs: Mapping[str, Artifact]) -> None:
        """Take the pieces of a result in; those that get no lease until it was `handled` go back."""
        self.objection = None
        count = 0
        for name, artifact in outputs.items():
            for tensor in artifact.tensors.values():
                if isinstance(tensor.place, Shared):
                    count += 1
                    reason = self._falsity(producer, tensor.place)
                    if reason is None:  # it is lent, and goes back also when it is too much
                        use = SegmentUse(tensor.place.segment, tensor.place.generation)
                        piece = producer.lent[use.segment] = Piece(producer, use)
                        self.arrived[name] = (*self.arrived.get(name, ()), piece)
                        reason = self._excess(tensor, count)
                    if reason is not None and self.objection is None:
                        self.objection = f"{name} {reason}"

    def handled(self) -> None:
        """Who was to take leases on what arrived has done so."""
        for pieces in self.arrived.values():
            self.end(pieces)
        self.arrived.clear()

    def lend(self, pieces: Pieces, leases: int) -> None:
        """Let so many leases begin on each."""
        for piece in pieces:
            piece.leases += leases

    def end(self, pieces: Pieces, *, broken: bool = False) -> None:
        """Let a lease on each end; `broken`: its reader is gone, or wasn't waited for, and may still read.

        A segment counts as free when its worker is told so: then it may come back as something else.
        """
        for piece in pieces:
            piece.leases -= 1
            if broken and not piece.use.broken:
                piece.use = SegmentUse(piece.use.segment, piece.use.generation, broken=True)
            if piece.leases == 0:
                self._returned.setdefault(piece.producer, []).append(piece)

    def returns(self) -> Iterable[tuple[Peer, ReturnSegments]]:
        """What is to be said to whom about pieces that came back since it was asked last."""
        returned, self._returned = self._returned, {}
        for producer, pieces in returned.items():
            uses = [piece.use for piece in pieces]
            for use in uses:
                del producer.lent[use.segment]
            most = max(1, producer.limits.header_bytes_max // USE_BYTES)
            for at in range(0, len(uses), most):
                yield producer, ReturnSegments(tuple(uses[at : at + most]))

    def _falsity(self, producer: Peer, place: Shared) -> str | None:
        if producer.memory is None or place.owner != producer.memory.owner:
            return "is in memory that isn't its worker's"
        if place.segment in producer.lent:
            return f"is in segment {place.segment!r}, which isn't free"
        return None

    def _excess(self, tensor: TensorRef, count: int) -> str | None:
        if tensor.nbytes > self._nbytes_max:
            return f"has a tensor of {tensor.nbytes} bytes; accepted: {self._nbytes_max}"
        if count > PIECES_MAX:
            return f"has too many tensors in shared memory; accepted: {PIECES_MAX} of one result"
        return None

    def check(self, sessions: Iterable[Leases], workers: Iterable[Peer]) -> None:
        """Assert that all sessions' leases are those of the pieces that are out."""
        assert not self.arrived, "a result was left unhandled"
        counts: Counter[Piece] = Counter()
        for leases in sessions:
            counts.update(leases.all())
        assert all(piece.leases == count for piece, count in counts.items()), "leases don't add up"
        for worker in workers:
            out = {piece for piece in counts if piece.producer is worker}.union(self._returned.get(worker, ()))
            assert out == set(worker.lent.values()), f"{worker.name}: pieces without a lease, or the other way round"


@dataclass(slots=True)
class _Held:
    """The pieces of one artifact, and who has a lease on them."""

    pieces: Pieces
    readers: set[str] = field(default_factory=set)


class Leases:
    """The leases of one session.

    Args:
        flow: its edges and cursors.
        memory: all pieces.
    """

    __slots__ = ("_acked", "_flow", "_held", "_kept", "_memory")

    def __init__(self, flow: Flow, memory: Memory) -> None:
        """Hold none."""
        self._flow = flow
        self._memory = memory
        self._held: dict[tuple[str, int], _Held] = {}
        self._kept: dict[str, Pieces] = {}
        self._acked = 0

    def objection(self, shared: Container[str]) -> str | None:
        """Why the result that is handled can't be used, of which only the artifacts `shared` may be in shared memory."""
        memory = self._memory
        if memory.objection is None:
            for name in memory.arrived:
                if name not in shared:
                    return f"{name} is in shared memory, which not all of its readers can open"
        return memory.objection

    def begin(self, index: int) -> None:
        """The result that is handled goes onto its edges: a lease for each consumer."""
        for name, pieces in self._memory.arrived.items():
            self._put(name, index, pieces, set(self._flow.edges[name].taken))

    def begin_dropped(self, index: int, readers: set[str]) -> None:
        """The result that is handled is dropped, but its worker gave it to these stages, which were sent their tasks."""
        for name, pieces in self._memory.arrived.items():
            if reading := readers.intersection(self._flow.edges[name].taken):
                self._put(name, index, pieces, reading)

    def keep(self) -> None:
        """The result that is handled holds for later chunks as well: one lease more, until the session is released."""
        for name, pieces in self._memory.arrived.items():
            self._memory.lend(pieces, 1)
            self._memory.end(self._kept.pop(name, ()))
            self._kept[name] = pieces

    def begin_kept(self, name: str, index: int) -> None:
        """An artifact that is kept goes onto its edge again."""
        if name in self._kept:
            self._put(name, index, self._kept[name], set(self._flow.edges[name].taken))

    def task_over(self, stage: str, index: int) -> None:
        """A stage's task is over: it reads its inputs no longer."""
        if self._held:
            for edge in self._flow.stages[stage].consumes:
                self._end((edge.artifact, index), stage)

    def acknowledged(self) -> None:
        """The client took what the flow says that it acknowledged."""
        before, self._acked = self._acked, self._flow.acked
        if self._held:
            for index in range(before, self._acked):
                for artifact in self._flow.spec.outputs:
                    self._end((artifact, index), CLIENT)

    def abandon(self) -> None:
        """Nobody waits for the client to take the chunks that were committed: it may still read them."""
        for key, held in list(self._held.items()):
            if CLIENT in held.readers and key[1] < self._flow.next_commit:
                self._end(key, CLIENT, broken=True)
        self._acked = self._flow.next_commit

    def drop(self, floor: int) -> None:
        """Artifacts from chunk `floor` on are dropped: only who was sent one still reads it."""
        for key, held in list(self._held.items()):
            if key[1] >= floor:
                for reader in [reader for reader in held.readers if not self._was_sent(reader, key[1])]:
                    self._end(key, reader)

    def clear(self) -> None:
        """All artifacts are dropped, those that are kept too."""
        self.drop(0)
        for pieces in self._kept.values():
            self._memory.end(pieces)
        self._kept.clear()

    def vacated(self, stage: str, *, lost: bool) -> None:
        """A stage gave its place back, or was lost with its worker: then nobody knows what it still reads."""
        for key, held in list(self._held.items()):
            if stage in held.readers:
                self._end(key, stage, broken=lost and self._was_sent(stage, key[1]))

    def _put(self, name: str, index: int, pieces: Pieces, readers: set[str]) -> None:
        self._memory.lend(pieces, len(readers))
        self._held[name, index] = _Held(pieces, readers)

    def _end(self, key: tuple[str, int], reader: str, *, broken: bool = False) -> None:
        held = self._held.get(key)
        if held is None or reader not in held.readers:
            return
        held.readers.remove(reader)
        if not held.readers:
            del self._held[key]
        self._memory.end(held.pieces, broken=broken)

    def _was_sent(self, reader: str, index: int) -> bool:
        return index < (self._flow.next_commit if reader == CLIENT else self._flow.stages[reader].dispatched)

    def all(self) -> Counter[Piece]:
        """Each piece, and how many leases this session has on it."""
        counts: Counter[Piece] = Counter()
        for held in self._held.values():
            for piece in held.pieces:
                counts[piece] += len(held.readers)
        for pieces in self._kept.values():
            counts.update(pieces)
        return counts

    def check(self) -> None:
        """Assert that who has a lease is who may still read: of what is on an edge, at an actor, or with the client."""
        flow = self._flow
        for name, edge in flow.edges.items():
            for index, artifact in edge.held.items():
                if not artifact.is_inline:
                    due = {reader for reader in edge.taken if not self._is_over(reader, index)}
                    assert self._held[name, index].readers == due, f"{name} {index}: on its edge with other leases"
        for (name, index), held in self._held.items():
            assert held.readers, f"{name} {index}: a lease of nobody"
            for reader in held.readers:
                assert not self._is_over(reader, index), f"{name} {index}: {reader or 'the client'} has read it"
                on_edge = index in flow.edges[name].held
                assert on_edge or self._was_sent(reader, index), f"{name} {index}: dropped, and kept"

    def _is_over(self, reader: str, index: int) -> bool:
        return index < (self._flow.acked if reader == CLIENT else self._flow.stages[reader].finished)


def sharable(
    spec: StreamSpec,
    workers: Mapping[str, Peer],
    client: Peer | None,
    ranks: Mapping[str, tuple[Peer, ...]] = MappingProxyType({}),
) -> dict[str, tuple[str, ...]]:
    """Of each stage, the artifacts that all their readers can take from its worker's shared memory.

    Args:
        spec: the dataflow.
        workers: stage name to the worker that writes what the stage makes.
        client: who reads the outputs.
        ranks: stage name to those who read its inputs, where that isn't its worker alone.
    """
    readers: dict[str, list[Peer | None]] = {artifact: [client] for artifact in spec.outputs}
    for stage in spec.stages:
        for artifact in stage.consumes:
            readers.setdefault(artifact, []).extend(ranks.get(stage.name) or (workers[stage.name],))
    return {
        stage.name: tuple(
            name for name in stage.produces if all(_maps(each, workers[stage.name]) for each in readers.get(name, ()))
        )
        for stage in spec.stages
    }


def offer_objection(offer: MemoryOffer | None, owners: Container[str]) -> tuple[str, str] | None:
    """Why a worker isn't taken that offers this memory while others own theirs: a code of `Rejected` and a sentence."""
    if offer is None:
        return None
    if not MEMORY_NAME.fullmatch(offer.owner):
        return "malformed", f"memory.owner is {offer.owner[:80]!r}; accepted: 1 to 64 of a-z, 0-9 and -"
    if len(offer.probe) != PROBE_BYTES:
        return "malformed", f"memory.probe has {len(offer.probe)} bytes; accepted: {PROBE_BYTES}"
    if offer.owner in owners:
        return "malformed", f"memory.owner {offer.owner!r} is another worker's"
    return None


def _maps(reader: Peer | None, producer: Peer) -> bool:
    """Whether a reader can open what a worker writes; a worker reads itself."""
    if producer.memory is None or reader is None:
        return False
    return reader is producer or producer.attachment in reader.maps
