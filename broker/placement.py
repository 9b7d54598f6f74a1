"""Which pipelines are served, by whom, and where the next session goes.

A session stays at the actors that it was given. They are all of one worker if one worker has room for every stage, the
least loaded; else each stage goes to its least loaded actor. Who finds no room waits in order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from reelwire.checks import COUNT_MAX
from reelwire.messages import Welcome, WorkerHello
from reelwire.parts import NAME_CHARACTERS_MAX
from reelwire.spec import SpecError, StreamSpec
from reelwire.wire import encode

from .actors import Actor
from .peers import Peer
from .session import Session

AdmitSpec = Callable[[StreamSpec], None]
OFFERS_MAX = 256
PACKAGES_MAX = 64
SPECS_BYTES_MAX = 256 << 10
"""Of all specs together: each client is told of all in one header."""


@dataclass(slots=True)
class Served:
    """One pipeline.

    Attributes:
        spec: what every worker that serves it announced.
        workers: those, by attachment.
        actors: stage name to its actors, by the worker's attachment.
        waiting: sessions that have no place, in order of arrival.
        sessions: how many sessions it has, waiting ones included.
    """

    spec: StreamSpec
    workers: dict[int, Peer] = field(default_factory=dict)
    actors: dict[str, dict[int, Actor]] = field(default_factory=dict)
    waiting: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    sessions: int = 0

    def unserved_stage(self) -> str | None:
        """A stage that no attached worker offers."""
        return next((stage.name for stage in self.spec.stages if not self.actors.get(stage.name)), None)

    def goes_with(self, replaced: Container[int]) -> bool:
        """Whether only workers with these numbers serve it; false when no worker does, and sessions keep it."""
        return bool(self.workers) and all(number in replaced for number in self.workers)

    def choose(self) -> dict[str, Actor] | None:
        """An actor with room for each stage; None when there isn't."""
        whole = [worker for worker in self.workers.values() if self._fits(worker)]
        if whole:
            best = min(whole, key=lambda worker: (self._load(worker), worker.attachment))
            return {stage.name: best.actors[self.spec.name, stage.name] for stage in self.spec.stages}
        chosen: dict[str, Actor] = {}
        for stage in self.spec.stages:
            free = [actor for actor in self.actors.get(stage.name, {}).values() if actor.fits_one_more]
            if not free:
                return None
            chosen[stage.name] = min(free, key=lambda actor: (_load(actor), actor.worker.attachment))
        return chosen

    def _fits(self, worker: Peer) -> bool:
        places = [worker.actors.get((self.spec.name, stage.name)) for stage in self.spec.stages]
        return all(actor is not None and actor.fits_one_more for actor in places)

    def _load(self, worker: Peer) -> float:
        return sum(_load(worker.actors[self.spec.name, stage.name]) for stage in self.spec.stages)


class Placement:
    """All pipelines that are served, or that live sessions belong to.

    Args:
        admit_spec: raises SpecError for a dataflow that isn't served.
    """

    def __init__(self, admit_spec: AdmitSpec) -> None:
        """Start with none."""
        self.served: dict[str, Served] = {}
        self._admit_spec = admit_spec

    def specs(self) -> tuple[StreamSpec, ...]:
        """What can be asked for now."""
        return tuple(served.spec for served in self.served.values() if served.workers)

    def objection(self, hello: WorkerHello, replaced: Container[int] = ()) -> tuple[str, str] | None:
        """Why a worker isn't taken: a code of `Rejected` and a sentence; None when it is.

        Peers with the numbers `replaced` leave when it is taken, and sessions that live at them end.
        """
        specs = {spec.name: spec for spec in hello.specs}
        if not hello.name:
            return "malformed", "a worker has a name"
        if len(specs) != len(hello.specs):
            return "malformed", "a pipeline is announced twice"
        texts = (hello.name, hello.device, *hello.packages, *hello.packages.values())
        if len(hello.packages) > PACKAGES_MAX or any(len(text) > NAME_CHARACTERS_MAX for text in texts):
            return "limit", (
                f"accepted: names and versions of {NAME_CHARACTERS_MAX} characters, and {PACKAGES_MAX} packages"
            )
        for spec in hello.specs:
            try:
                self._admit_spec(spec)
            except SpecError as error:
                return "malformed", str(error)
            served = self.served.get(spec.name)
            if served is not None and served.spec != spec and not served.goes_with(replaced):
                return "conflict", f"pipeline {spec.name!r} is served already, with another dataflow"
        seen: set[tuple[str, str]] = set()
        for offer in hello.stages:
            spec_or_none = specs.get(offer.pipeline)
            if spec_or_none is None or offer.stage not in {stage.name for stage in spec_or_none.stages}:
                return "malformed", f"the announced pipelines have no stage {offer.pipeline}/{offer.stage}"
            if (offer.pipeline, offer.stage) in seen:
                return "malformed", f"stage {offer.pipeline}/{offer.stage} is offered twice"
            if not (1 <= offer.slots <= COUNT_MAX and 0 <= offer.mailbox <= COUNT_MAX and offer.cache_bytes_max >= 0):
                return (
                    "malformed",
                    f"stage {offer.stage}: accepted: 1 to {COUNT_MAX} slots, 0 to {COUNT_MAX} in the mailbox, 0 bytes and more",
                )
            seen.add((offer.pipeline, offer.stage))
        if len(seen) > OFFERS_MAX:
            return "limit", f"{len(seen)} stages; accepted: {OFFERS_MAX}"
        left = {
            name: served.spec
            for name, served in self.served.items()
            if served.workers and not served.goes_with(replaced)
        }
        known = left | specs
        if len(encode(Welcome("", "", 1.0, 1, {}, tuple(known.values())), 0)[0]) > SPECS_BYTES_MAX:
            return (
                "limit",
                f"all announced pipelines together take over {SPECS_BYTES_MAX} bytes; a client couldn't be told",
            )
        return None

    def add(self, worker: Peer, hello: WorkerHello) -> None:
        """Take a worker's actors in, where `Groups.add` has put it into its group; `objection` had none.

        A rank that leads nobody serves nothing by itself: what it does its leader offers.
        """
        if worker.rank or worker.dismissed:
            return
        for spec in hello.specs:
            self.served.setdefault(spec.name, Served(spec)).workers[worker.attachment] = worker
        for offer in hello.stages:
            actor = Actor(worker, offer, group=worker.group if offer.grouped else None)
            worker.actors[offer.pipeline, offer.stage] = actor
            self.served[offer.pipeline].actors.setdefault(offer.stage, {})[worker.attachment] = actor

    def remove(self, worker: Peer) -> None:
        """Forget a worker; a pipeline that nobody serves and no session belongs to is forgotten with it."""
        for name, served in list(self.served.items()):
            if served.workers.pop(worker.attachment, None) is not None:
                for actors in served.actors.values():
                    actors.pop(worker.attachment, None)
                self._forget_unused(name)

    def enter(self, session: Session) -> None:
        """A session waits for its place."""
        served = self.served[session.spec.name]
        served.sessions += 1
        served.waiting[session.id] = session

    def enter_again(self, session: Session) -> None:
        """A session that gave its places back waits again, before everybody else."""
        waiting = self.served[session.spec.name].waiting
        waiting[session.id] = session
        waiting.move_to_end(session.id, last=False)

    def leave(self, session: Session) -> None:
        """A session has ended."""
        served = self.served[session.spec.name]
        served.sessions -= 1
        served.waiting.pop(session.id, None)
        self._forget_unused(session.spec.name)

    def next_placed(self) -> Iterator[tuple[Session, dict[str, Actor]]]:
        """Sessions that have waited longest and have room now; each must be placed before the next is asked for."""
        for served in list(self.served.values()):
            while served.waiting and (actors := served.choose()) is not None:
                _, session = served.waiting.popitem(last=False)
                yield session, actors

    def _forget_unused(self, name: str) -> None:
        served = self.served[name]
        if not served.workers and served.sessions == 0:
            del self.served[name]

    def check(self) -> None:
        """Assert that tables agree and that nobody waits who could be placed."""
        for name, served in self.served.items():
            assert served.spec.name == name, "a pipeline under another name"
            assert served.workers or served.sessions, "a pipeline without use"
            assert len(served.waiting) <= served.sessions, "more wait than there are"
            assert all(session.state == "opening" for session in served.waiting.values()), "a placed session waits"
            for stage, actors in served.actors.items():
                for attachment, actor in actors.items():
                    assert served.workers[attachment].actors[name, stage] is actor, "an actor in one table only"
                    actor.check()
            assert not served.waiting or served.choose() is None, "room, and somebody waits"


def _load(actor: Actor) -> float:
    return len(actor.tenants) / actor.offer.slots
