"""Admission traces: operations on sessions, what each gave, and both cursors, edges and stages after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reelwire import messages as m
from reelwire.broker.actors import Tenant
from reelwire.broker.session import Session
from reelwire.broker.turns import Turns
from reelwire.messages import Artifact

if TYPE_CHECKING:
    from scripts.golden_checks.broker_rig import CLIENT, STAGES, BrokerRig, world
    from scripts.golden_checks.line import Comparison, NotCompared
else:
    from golden_checks.broker_rig import CLIENT, STAGES, BrokerRig, world
    from golden_checks.line import NotCompared

ONLY = "A"
"""Name of the session in traces that have one and don't name it."""


def check_admission(trace: dict[str, Any], comparison: Comparison) -> None:
    """Play one trace and note every comparison.

    Raises:
        NotCompared: a creation that fails; ours doesn't fail for a refused prefetch.
    """
    if any(step["op"][0] == "create" and str(step["result"]).startswith("error") for step in trace["steps"]):
        raise NotCompared("opening a session doesn't fail for a refused prefetch")
    play = _Play(trace)
    for number, step in enumerate(trace["steps"]):
        name = step.get("session", ONLY)
        after = step["after"] if "session" in step else {name: step["after"]}
        play.prefer(after)
        given = play.operate(step["op"], name)
        label = f"{trace['name']} step {number} {step['op']}"
        expected = step["result"]
        if step["op"][0] in ("submit", "stale_submit"):
            comparison.equal(f"{label} result", given, _answer(expected))
        elif not play.is_over(name) or step["op"][0] == "can_submit":
            comparison.equal(f"{label} result", given, expected)
        for each, state in after.items():
            if state is not None:
                play.compare(f"{label} {each}", each, state, comparison)


def _answer(expected: str) -> str:
    """Of an error only that it is one counts: ours has other names, and says nothing to an ended session."""
    return "error" if expected.startswith("error") else expected


class _Play:
    def __init__(self, trace: dict[str, Any]) -> None:
        spec = world(trace["capacities"], trace.get("prefetch_depth", 2), trace["chunk_count"], ("w",), {})
        self.rig = BrokerRig(spec)
        self.chunks = trace["chunk_count"]
        self.hits = set(trace.get("world_kv_hits", ()))
        self.named = any("session" in step for step in trace["steps"])
        self.sessions: dict[str, Session] = {}

    def is_over(self, name: str) -> bool:
        """Whether the session failed or was closed: then ours goes on delivering what lies below."""
        session = self.sessions.get(name)
        return session is None or (session.outcome is not None and session.outcome.state != "completed")

    def prefer(self, after: dict[str, Any]) -> None:
        """Which session goes first at a shared stage isn't normative: take the one that the trace took."""
        for name, state in after.items():
            session = self.sessions.get(name)
            for stage in STAGES:
                wanted = state is not None and state["running"][stage] is not None
                if wanted and session is not None and session.seats is not None:
                    self._give_turn(session.seats.actor(stage).waiting, session.id)

    def _give_turn(self, turns: Turns[Tenant], first: str) -> None:
        """Let a session that waits be the next one: all that wait come anew, after it."""
        if first in turns:
            for name in sorted(turns, key=lambda name: name != first):
                turns.forget(name)
                turns.add(name, self.rig.core.sessions[name], 1.0)

    def operate(self, op: list[Any], name: str) -> object:
        """One operation; what it gave, in the words of the traces."""
        kind, session = op[0], self.sessions.get(name)
        given: object
        if kind == "create":
            self.sessions[name] = self.rig.core.sessions[self.rig.open(name, self.chunks)]
            given = "ok"
        elif session is None:
            given = "error"
        elif kind == "submit":
            given = self._submit(session, op[1], self.rig.attachments[CLIENT])
        elif kind == "stale_submit":
            given = self._submit(session, op[1], self.rig.attachments[CLIENT] + 1000)
        elif kind == "can_submit":
            given = session.state in ("ready", "running") and session.flow.has_room_for_control()
        elif kind == "poll":
            given = [chunk.index for chunk in session.ring]
            self.rig.say(CLIENT, m.Ack(session.id, session.flow.next_commit))
        elif kind == "close":
            self.rig.say(CLIENT, m.EndSession(session.id, "cancel"))
            given = "ok"
        else:
            given = self._end_task(kind)
        while self._is_hit():
            self.rig.finish("denoise")
        return given

    def _submit(self, session: Session, index: int, attachment: int) -> str:
        told = self.rig.say(CLIENT, m.SubmitControl(session.id, index, Artifact({"keys": ["w"]})), attachment)
        if any(isinstance(message, m.ControlAccepted) for message in told):
            return "accepted"
        return "refused" if any(isinstance(x, m.ControlRefused) and x.code == "no_room" for x in told) else "error"

    def _end_task(self, kind: str) -> str:
        how, _, stage = kind.partition("_")
        task = self.rig.running.get(stage)
        if task is None:
            return "nothing running"
        (self.rig.finish if how == "finish" else self.rig.fail)(stage)
        if not self.named:
            return f"chunk {task.index}"
        return f"chunk {task.index} of session {self._name(task.session)}"

    def _is_hit(self) -> bool:
        """Whether denoise runs a chunk that the trace skips: ours does its clean pass, which is over at once."""
        task = self.rig.running.get("denoise")
        return task is not None and task.index in self.hits

    def _name(self, session: str) -> str:
        return next(name for name, each in self.sessions.items() if each.id == session)

    def _awaits_clean_pass(self, session: Session) -> bool:
        """Whether a chunk that the trace skips, without asking the actor, waits at ours for the actor to be free."""
        edges = session.flow.edges
        return any(all(index in edges[name].held for name in ("condition", "control")) for index in self.hits)

    def compare(self, label: str, name: str, state: dict[str, Any], comparison: Comparison) -> None:
        """Cursors, once no clean pass is ahead; edges and stages as long as ours doesn't deliberately do more."""
        session = self.sessions[name]
        flow = session.flow
        if self._awaits_clean_pass(session):
            return
        cursors = {
            "next_condition_index": flow.next_condition_index,
            "next_control_index": flow.next_control_index,
        }
        comparison.equal(f"{label} cursors", cursors, {key: state[key] for key in cursors})
        failed = session.outcome is not None and session.outcome.state == "failed"
        comparison.equal(f"{label} status", "failed" if failed else "running", state["status"])
        if (self.is_over(name) and failed) or self.hits:
            return
        ours = {
            "waiting": {edge: sorted(flow.edges[edge].held) for edge in state["waiting"]},
            "running": {stage: self._running(session, stage) for stage in state["running"]},
            "outputs_ready": [chunk.index for chunk in session.ring],
        }
        comparison.equal(f"{label} edges", ours, {key: state[key] for key in ours})

    def _running(self, session: Session, stage: str) -> int | None:
        task = self.rig.running.get(stage)
        return task.index if task is not None and task.session == session.id else None
