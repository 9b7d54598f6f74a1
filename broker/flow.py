"""The dataflow of one session: edges, cursors, and who may go on. Pure arithmetic on indices.

Everything flows strictly in chunk order, so an edge is three counters: `issued` (indices below it were accepted from
outside, or reserved by a producer that was sent off), one `taken` per consumer, and what arrived in between. Its
occupancy is ``issued - min(taken)``: artifacts that wait and outputs that running producers reserved alike. The client
is the last consumer of each output: its counter is what it acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from reelwire.messages import Artifact
from reelwire.spec import StageSpec, StreamSpec

RefusalCode = Literal["malformed", "duplicate", "gap", "past_end", "no_room"]
CLIENT = ""
READY = "ready"
OVER = "end"
NOTHING = Artifact()
RESERVED = Artifact()
"""Stands on its edge for a control that its stage makes itself."""


class Edge:
    """The bounded buffer of one artifact.

    Attributes:
        capacity: chunks that fit.
        issued: indices below it are on the edge, or will be, or were.
        taken: consumer to the index below which it has taken everything.
        floor: the least of these; indices below it are gone from the edge.
        held: artifacts that arrived and that a consumer still needs.
        missing: what its consumer waits for when there is nothing on it.
        full: what its producer waits for when there is no room on it.
        producer: the stage that makes it; None for an external input.
        consumers: the stages that consume it.
    """

    __slots__ = (
        "artifact",
        "capacity",
        "consumers",
        "floor",
        "full",
        "held",
        "issued",
        "missing",
        "producer",
        "taken",
    )

    def __init__(self, artifact: str, capacity: int, consumers: tuple[str, ...]) -> None:
        """Start empty."""
        self.artifact = artifact
        self.capacity = capacity
        self.issued = 0
        self.taken = dict.fromkeys(consumers, 0)
        self.floor = 0
        self.held: dict[int, Artifact] = {}
        self.missing = f"input:{artifact}"
        self.full = "credit" if CLIENT in self.taken else f"edge:{artifact}"
        self.producer: StageFlow | None = None
        self.consumers: list[StageFlow] = []

    @property
    def occupancy(self) -> int:
        """Chunks that wait or are reserved."""
        return self.issued - self.floor

    @property
    def has_room(self) -> bool:
        """Whether one more fits."""
        return self.issued - self.floor < self.capacity

    def reserve(self) -> None:
        """Take the place of the next index."""
        assert self.has_room, f"{self.artifact}: reserved beyond its capacity"
        self.issued += 1

    def put(self, index: int, value: Artifact) -> None:
        """Fill a reserved place."""
        assert self.floor <= index < self.issued, f"{self.artifact}: {index} was not reserved"
        assert index not in self.held, f"{self.artifact}: {index} is there already"
        self.held[index] = value
        for stage in self.consumers:
            stage.is_stale = True

    def take(self, consumer: str, index: int) -> bool:
        """The consumer has `index`; the artifact goes with its last consumer. Whether its producer waited for the room."""
        taken = self.taken
        assert taken[consumer] == index, f"{self.artifact}: {consumer} took {index} out of order"
        taken[consumer] = index + 1
        if self.floor != index or (len(taken) > 1 and min(taken.values()) <= index):
            return False
        self.floor = index + 1
        self.held.pop(index, None)
        if self.producer is None or self.issued - index < self.capacity:
            return False
        self.producer.is_stale = True
        return True


class StageFlow:
    """How far one stage is: `finished <= started <= dispatched`, and what it consumes and produces.

    Attributes:
        told: that a chunk below it begins is no news.
        settled: its outputs, once they are the same for all later chunks.
        feeders: the stages whose outputs its worker gives to it by itself.
        awaits: of tasks that were sent off before their inputs were there: the index, and what is still to be made.
        is_stale: something happened that may let it go on, or stop it, and nobody has looked since.
    """

    __slots__ = (
        "awaits",
        "consumes",
        "dispatched",
        "feeders",
        "finished",
        "is_stale",
        "name",
        "produces",
        "settled",
        "started",
        "told",
    )

    def __init__(self, stage: StageSpec, edges: Mapping[str, Edge]) -> None:
        """Start at chunk 0."""
        self.name = stage.name
        self.consumes = tuple(edges[artifact] for artifact in stage.consumes)
        self.produces = tuple(edges[artifact] for artifact in stage.produces)
        self.dispatched = 0
        self.started = 0
        self.finished = 0
        self.told = 0
        self.settled: Mapping[str, Artifact] | None = None
        self.feeders: set[StageFlow] = set()
        self.awaits: dict[int, set[str]] = {}
        self.is_stale = True
        for edge in self.consumes:
            edge.consumers.append(self)
        for edge in self.produces:
            edge.producer = self


class Flow:
    """Edges and cursors of one session in one epoch.

    Args:
        spec: the dataflow; it was validated.
        chunks: length of the session.
    """

    def __init__(self, spec: StreamSpec, chunks: int) -> None:
        """Start with empty edges."""
        self.spec = spec
        self.chunks = chunks
        self.limit = chunks
        self.next_commit = 0
        self.acked = 0
        consumers: dict[str, list[str]] = {edge.artifact: [] for edge in spec.edges}
        for stage in spec.stages:
            for artifact in stage.consumes:
                consumers[artifact].append(stage.name)
        for artifact in spec.outputs:
            consumers[artifact].append(CLIENT)
        self.edges = {
            edge.artifact: Edge(edge.artifact, edge.capacity, (*consumers[edge.artifact],)) for edge in spec.edges
        }
        self.stages = {stage.name: StageFlow(stage, self.edges) for stage in spec.stages}
        self.control = self.edges[spec.control]
        self.outputs = tuple(self.edges[artifact] for artifact in spec.outputs)
        self.condition = None if spec.prefetch is None else self.edges[spec.prefetch.artifact]

    # --- admission -----------------------------------------------------------------------------------------------------

    @property
    def next_control_index(self) -> int:
        """nx: the control that is accepted next."""
        return self.control.issued

    @property
    def next_condition_index(self) -> int:
        """nc: the condition that is enqueued next; without a prefetched input, as far as nx."""
        return self.control.issued if self.condition is None else self.condition.issued

    @property
    def control_limit(self) -> int:
        """Controls below it will not be refused for room; it never goes back."""
        limit = min(self.chunks, self.control.floor + self.control.capacity)
        if self.condition is not None:
            limit = min(limit, max(self.condition.issued, self.condition.floor + self.condition.capacity))
        return limit

    def refusal(self, index: int) -> RefusalCode | None:
        """Why the control of chunk `index` can't be accepted now; asking changes nothing.

        Nothing here keeps a control from being more than one chunk ahead of the output: whoever submits by index may go
        as far as the edges have room, which is what the recorded traces of admission do. What is granted (`Chunk` and
        `SessionChanged`) is less, `control_limit` here and one chunk ahead in `Delivering`, so that a client that waits
        for the grant, as the SDK does, is never further ahead than keys are.
        """
        expected = self.next_control_index
        if index < 0:
            return "malformed"
        if index >= self.chunks:
            return "past_end"
        if index != expected:
            return "duplicate" if index < expected else "gap"
        return None if self.has_room_for_control() else "no_room"

    def has_room_for_control(self) -> bool:
        """Whether the next control, with its condition if that is missing, has room and a chunk to steer."""
        if self.next_control_index >= self.chunks or not self.control.has_room:
            return False
        if self.condition is None:
            return True
        assert self.condition.issued >= self.control.issued, "a control overtook its condition"
        return self.condition.issued > self.control.issued or self.condition.has_room

    def submit(self, control: Artifact | None) -> int:
        """Accept the next control, or reserve it, together with its condition if that is missing; the index it is for."""
        assert self.has_room_for_control(), "a control was accepted without room"
        index = self.next_control_index
        if self.condition is not None and self.condition.issued == index:
            self.condition.reserve()
            self.condition.put(index, NOTHING)
        self.control.reserve()
        self.control.put(index, RESERVED if control is None else control)
        return index

    @property
    def has_window(self) -> bool:
        """Whether the prefetch window has room for a condition, whatever its edge has."""
        condition, prefetch = self.condition, self.spec.prefetch
        if condition is None or prefetch is None or condition.issued >= self.limit:
            return False
        return condition.issued - self.control.issued < prefetch.depth

    def prefetch_one(self) -> bool:
        """Enqueue the next condition if the window and its edge have room; whether it was."""
        condition = self.condition
        if condition is None or not self.has_window or not condition.has_room:
            return False
        index = condition.issued
        condition.reserve()
        condition.put(index, NOTHING)
        return True

    # --- stages --------------------------------------------------------------------------------------------------------

    def is_ready(self, name: str) -> bool:
        """Whether the stage's next task has its inputs and room for its outputs."""
        return self.lack(self.stages[name]) == READY

    def lack(self, stage: StageFlow) -> str:
        """What a stage's next task lacks: ``input:NAME``, ``edge:NAME`` or ``credit``; `READY` or `OVER` when nothing."""
        index = stage.dispatched
        if index >= self.limit:
            return OVER
        for edge in stage.consumes:
            if index not in edge.held:
                return edge.missing
        for edge in stage.produces:
            if edge.issued - edge.floor >= edge.capacity:
                return edge.full
        return READY

    def lacking(self, stage: StageFlow) -> tuple[str, ...]:
        """The inputs of the stage's next task that aren't there."""
        return tuple([edge.artifact for edge in stage.consumes if stage.dispatched not in edge.held])

    def comes(self, stage: StageFlow) -> bool:
        """Whether what the stage's next task lacks are inputs that its own worker makes at the moment."""
        index = stage.dispatched
        if index >= self.limit:
            return False
        for edge in stage.consumes:
            if index not in edge.held and (edge.producer not in stage.feeders or edge.producer.dispatched <= index):
                return False
        return all(edge.has_room for edge in stage.produces)

    def peek(self, name: str) -> tuple[int, dict[str, Artifact]]:
        """The stage's next task: its index and those inputs that are there; a control that is reserved isn't."""
        stage = self.stages[name]
        index = stage.dispatched
        inputs = {}
        for edge in stage.consumes:
            artifact = edge.held.get(index)
            if artifact is not None and artifact is not RESERVED:
                inputs[edge.artifact] = artifact
        return index, inputs

    def dispatch(self, name: str) -> int:
        """Send the stage's next task off: its outputs are reserved, its inputs stay until it starts; its index."""
        stage = self.stages[name]
        index = stage.dispatched
        missing = self.lacking(stage) if stage.feeders else ()
        if missing:
            assert self.comes(stage), f"{name} was sent ahead of what doesn't come, or without room"
            stage.awaits[index] = set(missing)
        else:
            assert self.lack(stage) == READY, f"{name} was sent off without inputs or room"
        stage.dispatched += 1
        stage.is_stale = True
        for edge in stage.produces:
            edge.issued += 1
        return index

    def start(self, name: str) -> bool:
        """The stage began its oldest task that waits: the inputs leave their edges. Whether some stage waited for that."""
        stage = self.stages[name]
        assert stage.started < stage.dispatched, f"{name} started what wasn't sent"
        makes_room = False
        assert stage.started not in stage.awaits, f"{name} started without its inputs"
        for edge in stage.consumes:
            if edge.take(name, stage.started):
                makes_room = True
        stage.started += 1
        stage.is_stale = True
        return makes_room

    def finish(self, name: str, outputs: Mapping[str, Artifact]) -> int:
        """The stage's oldest task is done; its outputs go onto their edges, unless the session ends before them."""
        stage = self.stages[name]
        assert stage.finished < stage.started, f"{name} finished what hasn't started"
        index = stage.finished
        stage.finished += 1
        stage.is_stale = True
        if index < self.limit:
            for edge in stage.produces:
                edge.put(index, outputs[edge.artifact])
        return index

    def reuse(self, name: str) -> int | None:
        """Let a settled stage's outputs go onto their edges once more, if it could run and has no task; for which chunk."""
        stage = self.stages[name]
        if stage.settled is None or stage.finished < stage.dispatched or not self.is_ready(name):
            return None
        self.dispatch(name)
        self.start(name)
        return self.finish(name, stage.settled)

    def fail(self, name: str) -> None:
        """The stage's oldest task is over without outputs."""
        stage = self.stages[name]
        assert stage.finished < stage.started, f"{name} failed at what hasn't started"
        stage.finished += 1
        stage.is_stale = True

    # --- output --------------------------------------------------------------------------------------------------------

    def complete(self) -> dict[str, Artifact] | None:
        """All outputs of the next index, if they are there."""
        index = self.next_commit
        if index >= self.limit:
            return None
        outputs = {}
        for edge in self.outputs:
            if index not in edge.held:
                return None
            outputs[edge.artifact] = edge.held[index]
        return outputs

    def commit(self) -> dict[str, Artifact] | None:
        """All outputs of the next index, if they are there; the cursor moves on."""
        outputs = self.complete()
        self.next_commit += outputs is not None
        return outputs

    def acknowledge(self, chunks: int) -> bool:
        """All committed chunks below `chunks` were taken; a repeated or an older word changes nothing."""
        upto = min(chunks, self.next_commit)
        if upto <= self.acked:
            return False
        for edge in self.outputs:
            for index in range(self.acked, upto):
                edge.take(CLIENT, index)
        self.acked = upto
        return True

    # --- the end -------------------------------------------------------------------------------------------------------

    def cut(self, limit: int) -> None:
        """Make nothing from chunk `limit` on, and drop what is there for it."""
        self.limit = max(min(self.limit, limit), self.next_commit)
        for edge in self.edges.values():
            for index in [index for index in edge.held if index >= self.limit]:
                del edge.held[index]
        for stage in self.stages.values():
            stage.is_stale = True

    def clear(self) -> None:
        """Drop everything that is held and make nothing more."""
        self.limit = self.next_commit
        for stage in self.stages.values():
            stage.settled = None
        for edge in self.edges.values():
            edge.held.clear()

    def check(self) -> None:
        """Assert the invariants."""
        nc, nx = self.next_condition_index, self.next_control_index
        depth = 0 if self.spec.prefetch is None else self.spec.prefetch.depth
        assert 0 <= nc - nx <= depth, f"nc {nc}, nx {nx}"
        assert nc <= self.chunks, f"nc {nc} beyond the last chunk"
        assert 0 <= self.acked <= self.next_commit <= self.limit <= self.chunks, "commit cursor out of bounds"
        for stage in self.stages.values():
            assert 0 <= stage.finished <= stage.started <= stage.dispatched <= self.chunks, f"{stage.name}: counters"
            assert stage.told <= stage.dispatched, f"{stage.name}: a chunk begins that wasn't sent"
            sent = range(stage.started, stage.dispatched)
            assert all(index in sent for index in stage.awaits), f"{stage.name}: inputs of what wasn't sent are awaited"
            assert all(stage.awaits.values()), f"{stage.name}: what is awaited has come"
        for edge in self.edges.values():
            assert 0 <= edge.occupancy <= edge.capacity, f"{edge.artifact}: {edge.occupancy} of {edge.capacity}"
            assert all(edge.floor <= index < edge.issued for index in edge.held), f"{edge.artifact}: stray artifact"
            assert all(index < self.limit for index in edge.held), f"{edge.artifact}: beyond the end"
