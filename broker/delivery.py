"""What is complete goes to the client: in order, within its credit, and kept until it is acknowledged.

`making.Making` adds how chunks are made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from reelwire.messages import Ack, Chunk, Failure, OpenSession, SessionChanged
from reelwire.spec import Plain, StreamSpec

from .credit import Window
from .desk import Desk
from .fitting import fitted
from .leases import Leases
from .pace import MediaClock
from .peers import Peer
from .steering import AHEAD_MAX, STEERED, Steering
from .transitions import ENDED, State


class Delivering(Steering):
    """What `Session` is made of towards whoever takes its chunks.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.

    Attributes:
        ring: committed chunks that weren't acknowledged; as many as the output's edge holds.
        credit: how far the client lets it go.
        clock: when its chunks are played; None when they are made as fast as it goes.
        leases: what stages and client read of shared memory.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """Nothing is there to take yet."""
        super().__init__(desk, identity, owner, request, spec)
        self.ring: deque[Chunk] = deque()
        self.credit = Window(request.credit)
        self.clock = MediaClock(spec, request.credit.chunks) if request.pace == "realtime" else None
        self.leases = Leases(self.flow, desk.memory)
        self._facts: dict[int, dict[str, Plain]] = {}
        self._told: tuple[State, int, Failure | None] = ("opening", 0, None)
        self._stalled_since: float | None = None

    @property
    @abstractmethod
    def failure(self) -> Failure | None:
        """Why it will have ended, once that is known."""

    @property
    def control_limit(self) -> int:
        """How far explicit controls may go; it never goes back."""
        return self._limit_at(self.flow.next_commit)

    def _limit_at(self, next_commit: int) -> int:
        """How far they may go when so many chunks are committed, and nothing else is different."""
        told, most = self._told[1], next_commit + AHEAD_MAX + 1
        if told >= most or self.state not in STEERED:
            return told
        return max(told, min(most, self.flow.control_limit))

    @abstractmethod
    def _all_made(self) -> None:
        """Go on to the end when no chunk is left to be made, or to be taken."""

    def _commit(self) -> None:
        """Send what is complete, in order, as far as the client's credit goes; what it doesn't take stays on its edge.

        Each chunk says how far controls may go once it is committed, so that `_announce` has nothing to say of that.
        """
        flow, now = self.flow, self.desk.now
        while (outputs := flow.complete()) is not None:
            index = flow.next_commit
            if not self.credit.allows(index):
                self._wait_for_client()
                return
            snapshot, facts = self.controls.given[index], self._facts.get(index, {})
            assert snapshot.applied is not None, "a chunk was made of a control that nobody knows"
            timing, limit = self.timing.of_chunk(index, now), self._limit_at(index + 1)
            chunk = Chunk(self.id, index, outputs, snapshot.applied, facts, timing, index == self.chunks - 1, limit)
            owner = self.owner
            if owner is not None:
                packed, reason = fitted(chunk, owner.limits, outputs.values())
                if reason is not None:
                    text = f"chunk {index} can't be sent to the client: {reason}"
                    self.desk.unfit[self.id] = Failure("request", text, index=index, field="frame_bytes_max")
                    return
                self.desk.send(owner, chunk, packed)
                state, told, failure = self._told
                if limit != told:
                    self._told = (state, limit, failure)
            flow.commit()
            self.controls.committed(index)
            self._facts.pop(index, None)
            self.timing.committed(index, timing, snapshot.changes_at, now)
            if self.clock is not None:
                self.clock.committed(index, now)
                flow.stages[self._steered].is_stale = True
            self.credit.send(sum(artifact.nbytes for artifact in outputs.values()))
            self.ring.append(chunk)
            self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Something is the client's to take: it has `stall_s` to do so."""
        if self._stalled_since is None:
            self._stalled_since = self.desk.now
            if self.state != "releasing" and ("stall", self.id) not in self.desk.timers:
                self._timer("stall", self.desk.config.stall_s)

    def on_ack(self, event: Ack) -> None:
        """The application took chunks: the ring and the output's edge have room again, and more may be sent.

        What was said before, or is overtaken by it, changes nothing.
        """
        flow = self.flow
        if event.chunks > flow.next_commit:
            self.refuse("acks_beyond_the_end", event)
        grew = self.credit.grant(event.credit)
        took = flow.acknowledge(event.chunks)
        if not took and not grew:
            return
        if took:
            self.leases.acknowledged()
            while self.ring and self.ring[0].index < flow.acked:
                self.ring.popleft()
            self._stalled_since = None
            if self.ring:
                self._wait_for_client()
        sent = flow.next_commit
        self._commit()
        if flow.next_commit > sent:  # else a client that takes nothing could grant more and more, and never be closed
            self._stalled_since = self.desk.now
        self._allow_ahead()
        self._stir()
        self._all_made()

    def on_early_ack(self, event: Ack) -> None:
        """There is nothing to take yet; the credit counts."""
        if event.chunks > 0:
            self.refuse("acks_beyond_the_end", event)
        self.credit.grant(event.credit)
        self._allow_ahead()

    def _allow_ahead(self) -> None:
        """A session at the pace of its media is as far ahead of it as the client lets chunks wait, and no further."""
        if self.clock is not None and self.clock.allow(self.credit.chunks - self.flow.acked):
            self.flow.stages[self._steered].is_stale = True

    def _announce(self) -> None:
        """Tell the client its state, how far controls may go, and why it ends, when that changes and no chunk says so."""
        state, limit, failure = told = self._told
        if self.state in STEERED:
            limit = self._limit_at(self.flow.next_commit)
            if limit == told[1] and self.state == state:
                return
        elif self.state in ENDED:
            return
        if limit != told[1] or self.state != state or self.failure != failure:
            self._told = (self.state, limit, self.failure)
            self._tell(SessionChanged(self.id, self.state, limit, self.failure))
