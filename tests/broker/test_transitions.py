"""The table of a session's life: every pair, legal and not, and the diagram that is printed from it."""

from __future__ import annotations

import itertools
import typing
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker import transitions as t
from reelwire.broker.session import Session
from reelwire.controls import KeyState
from reelwire.messages import Artifact, Failure

STATES: tuple[t.State, ...] = typing.get_args(t.State)
LIVE = [state for state in STATES if state not in t.ENDED]
SAYS = [*typing.get_args(t.ClientSays), *typing.get_args(t.WorkerSays)]
INNER = list(typing.get_args(t.Inner))
ILLEGAL = [pair for pair in itertools.product(LIVE, [*SAYS, *INNER]) if pair not in t.TRANSITIONS]


class Scene:
    """A broker with one session in a state, reached by messages alone."""

    def __init__(self, kit: Any, state: str) -> None:
        self.rig = kit.Rig()
        self.worker = self.rig.worker(ready=state != "opening")
        self.client = self.rig.client()
        if state in ("initializing", "returning"):
            self.worker.silent.add(m.InitializeStage)
        self.id = self.client.open(chunks=4)
        if state == "returning":
            self.worker.silent.add(m.ReleaseStage)
            full = Failure("overload", "no room")
            self.worker.say(m.StageFailed(self.id, "encode", 1, 1, "initialize", None, full))
        if state in ("running", "draining"):
            self.client.submit(self.id, 0)
        if state == "draining":
            self.client.end(self.id)
        if state == "releasing":
            self.worker.silent.add(m.ReleaseStage)
            self.client.end(self.id, "cancel")
        self.session: Session = self.rig.core.sessions[self.id]
        assert self.session.state == state

    def event(self, kind: type) -> Any:
        """Some event of the kind, about this session."""
        at = (self.id, "encode", 1, 1)
        made: dict[type, Any] = {
            m.SetKeys: lambda: m.SetKeys(self.id, KeyState(1, ("w",), 1, ("w",))),
            m.SubmitControl: lambda: m.SubmitControl(self.id, 0, Artifact({"keys": ["w"]})),
            m.Ack: lambda: m.Ack(self.id, 1),
            m.EndSession: lambda: m.EndSession(self.id, "drain"),
            m.StageInitialized: lambda: m.StageInitialized(*at, Artifact(), 5),
            m.StageReleased: lambda: m.StageReleased(*at),
            m.StageFailed: lambda: m.StageFailed(*at, "run", 0, Failure("stage", "it broke")),
            m.TaskStarted: lambda: m.TaskStarted(*at, 0),
            m.TaskDone: lambda: m.TaskDone(*at, 0, {"condition": Artifact()}, {}, 0.0),
            t.Placed: lambda: t.Placed({s: self.worker_actor(s) for s in ("encode", "denoise", "decode")}),
            t.WorkerLost: lambda: t.WorkerLost(self.worker_actor("encode").worker, "a test"),
            t.Unfit: lambda: t.Unfit(Failure("stage", "too large", "encode", 0)),
            t.ShuttingDown: lambda: t.ShuttingDown(5.0),
        }
        return made[kind]() if kind in made else kind()

    def worker_actor(self, stage: str) -> Any:
        """The broker's view of a stage."""
        peer = next(iter(self.rig.core._peers.workers.values()))
        return peer.actors["world", stage]

    def story(self) -> object:
        """What a refused event must leave alone."""
        flow = self.session.flow
        stages = {name: (one.dispatched, one.started, one.finished) for name, one in flow.stages.items()}
        edges = {name: (edge.issued, sorted(edge.held)) for name, edge in flow.edges.items()}
        return self.session.state, stages, edges, self.session.controls.state, self.session.outcome


def test_every_handler_exists_and_every_step_leads_to_a_state() -> None:
    """The names in the table are methods of Session; the states in it are states."""
    for (state, _), step in t.TRANSITIONS.items():
        assert callable(getattr(Session, step.handler))
        assert {state, *step.to} <= set(STATES)


def test_an_ended_session_has_no_transition() -> None:
    """Nothing leads out of an ended state; everything else leads to one of them."""
    assert not [state for state, _ in t.TRANSITIONS if state in t.ENDED]
    reached = {"opening"}
    for _ in STATES:
        reached |= {target for (state, _), step in t.TRANSITIONS.items() if state in reached for target in step.to}
    assert reached == set(STATES)


def test_every_timer_has_its_event() -> None:
    """What a session sets a timer for is an inner event."""
    assert set(t.EXPIRED) == set(typing.get_args(t.Timer))
    assert {type(event) for event in t.EXPIRED.values()} <= set(INNER)


@pytest.mark.parametrize(
    ("state", "kind"), list(t.TRANSITIONS), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_listed_pair_is_handled(kit: Any, state: str, kind: type) -> None:
    """Each listed pair runs its handler and ends in a state that the table allows."""
    scene = Scene(kit, state)
    scene.session.handle(scene.event(kind))
    after = scene.session.state
    assert after == state or after in t.TRANSITIONS[state, kind].to  # type: ignore[index]


@pytest.mark.parametrize(("state", "kind"), [pair for pair in ILLEGAL if pair[1] in SAYS])
def test_streaming_34_an_unlisted_word_of_a_peer_is_counted_and_changes_nothing(
    kit: Any, state: str, kind: type
) -> None:
    """Through the core: no exception, one more counted, the session as it was."""
    scene = Scene(kit, state)
    before, count = scene.story(), scene.rig.counter("out_of_protocol") + scene.rig.counter("orphans")
    sender = scene.client if kind in typing.get_args(t.ClientSays) else scene.worker
    sender.say(scene.event(kind))
    assert scene.story() == before
    assert scene.rig.counter("out_of_protocol") + scene.rig.counter("orphans") == count + 1


@pytest.mark.parametrize(("state", "kind"), [pair for pair in ILLEGAL if pair[1] in INNER])
def test_an_unlisted_inner_event_is_our_own_error(kit: Any, state: str, kind: type) -> None:
    """The broker would have to have a bug for it to happen."""
    scene = Scene(kit, state)
    with pytest.raises(AssertionError, match=state):
        scene.session.handle(scene.event(kind))


def test_the_diagram_is_printed_from_the_table() -> None:
    """Each pair of states that the table connects is an arrow with the events that lead along it."""
    lines = t.mermaid().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> opening"]
    assert "    initializing --> ready: StageInitialized" in lines
    arrows = {(state, target) for (state, _), step in t.TRANSITIONS.items() for target in step.to if target != state}
    assert len(lines) == 2 + len(arrows) + len(t.ENDED)
    assert all(f"    {state} --> [*]" in lines for state in t.ENDED)
