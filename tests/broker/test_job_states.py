"""The table of a job's life: every pair, legal and not, and the diagram that is printed from it."""

from __future__ import annotations

import itertools
import typing
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker import job_states as t
from reelwire.broker.events import FileDone
from reelwire.broker.job import Job
from reelwire.messages import Failure

from .fake_jobs import Shop
from .fake_store import sha256

STATES: tuple[t.State, ...] = typing.get_args(t.State)
LIVE = [state for state in STATES if state not in t.GONE]
SAYS = list(typing.get_args(t.WorkerSays))
INNER = list(typing.get_args(t.Inner))
ILLEGAL = [pair for pair in itertools.product(LIVE, [*SAYS, *INNER]) if pair not in t.TRANSITIONS]


class Scene:
    """A broker with one job in a state, reached by messages alone."""

    def __init__(self, state: str) -> None:
        self.shop = Shop(job_attempts=2)
        self.worker, self.client = self.shop.worker(), self.shop.client()
        self.worker.gives = False
        getattr(self, f"_{state}", self._at_work)(state)
        (self.job,) = self.shop.jobs._at.keys.values()
        assert self.job.state == state

    def _checking(self, _state: str) -> None:
        self.shop.works = False
        self.client.submit(output="/out/a.mp4")

    def _committing(self, _state: str) -> None:
        self.shop.commits = False
        self.client.submit()

    def _queued(self, _state: str) -> None:
        self.worker.group.job = "busy"
        self.shop.checks = False
        self.client.submit()

    def _rejoining(self, _state: str) -> None:
        self.client.submit()
        self.shop = self.shop.restart()
        self.worker, self.client = self.shop.worker("other"), self.shop.client()

    def _at_work(self, state: str) -> None:
        self.client.accepted(output="/out/a.mp4" if state == "exporting" else "")
        (self.run,) = self.worker.runs
        if state in ("running", "encoding"):
            self.worker.progress(self.run, 1, state=state)
        if state in ("running", "preparing", "encoding"):
            self.worker.checkpoint(self.run, 1)
        if state == "stopping":
            self.client.ask(m.CancelJob, self.run.job)
        if state == "taking":
            self.worker.finish(self.run)
        if state == "unstored":
            self.shop.works = False
            self.worker.finish(self.run)
            self.shop.handle(FileDone(self.shop.now, 1, Failure("overload", "the disk is full")))
            self.shop.disk.errands.clear()
        if state == "exporting":
            self.worker.gives, self.shop.works = True, False
            self.worker.finish(self.run)
            while not any(type(errand).__name__ == "ExportFile" for errand in self.shop.disk.errands):
                self.shop.work()
        if state in ("ending", "succeeded"):
            self.worker.gives, self.shop.commits = True, state == "succeeded"
            self.worker.finish(self.run)
        if state == "failed":
            self.worker.fail(self.run)
        if state == "cancelled":
            self.client.ask(m.CancelJob, self.run.job)
            self.worker.fail(self.run, state="cancelled")

    def event(self, kind: type) -> Any:
        """Some event of the kind, about this job."""
        job, attempt, at = self.job.id, self.job.record.attempt, self.shop.jobs._at
        peer = next(peer for peer in self.shop.core._peers.by_route.values() if peer.kind == "client")
        offer = m.FileOffer(sha256(b"y"), "", 1)
        made: dict[type, Any] = {
            m.JobProgress: lambda: m.JobProgress(job, attempt, "running", "denoise", 2, 10),
            m.JobFile: lambda: m.JobFile(job, attempt, "result", offer),
            m.JobEnded: lambda: m.JobEnded(job, attempt, "failed", Failure("stage", "it broke")),
            t.Checked: lambda: t.Checked({}),
            t.Refused: lambda: t.Refused(Failure("request", "a test")),
            t.Begun: lambda: t.Begun(self.worker.group),
            t.Adopted: lambda: t.Adopted(self.worker.group, attempt + 1, False),
            t.GroupLost: lambda: t.GroupLost("a test"),
            t.CancelAsked: lambda: t.CancelAsked(peer, 7),
            t.DeleteAsked: lambda: t.DeleteAsked(peer, 7),
        }
        assert at.keys
        return made[kind]() if kind in made else kind()


def test_every_handler_exists_and_every_step_leads_to_a_state() -> None:
    """The names in the table are methods of Job; the states in it are states."""
    for (state, _), step in t.TRANSITIONS.items():
        assert callable(getattr(Job, step.handler))
        assert {state, *step.to} <= set(STATES)


def test_every_state_can_be_reached_and_only_gone_ones_lead_nowhere() -> None:
    """From a submission, or from what an earlier broker left, to the end of every job."""
    assert not [state for state, _ in t.TRANSITIONS if state in t.GONE]
    reached = {"checking", "rejoining"}
    for _ in STATES:
        reached |= {target for (state, _), step in t.TRANSITIONS.items() if state in reached for target in step.to}
    assert reached == set(STATES)


def test_terminal_states_lead_to_no_other_end() -> None:
    """The first durable end of a job is its end."""
    for (state, _), step in t.TRANSITIONS.items():
        if state in t.ENDED:
            assert set(step.to) <= {"forgotten"}


def test_clients_are_told_a_phase_for_every_state() -> None:
    """While a job is stopped, or its end isn't durable, the last one holds."""
    assert set(t.PHASES) | {"stopping", "ending"} | set(t.GONE) == set(STATES)
    assert set(t.PHASES.values()) == set(typing.get_args(m.JobPhase))


@pytest.mark.parametrize(
    ("state", "kind"), list(t.TRANSITIONS), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_listed_pair_is_handled(state: str, kind: type) -> None:
    """Each listed pair runs its handler and ends in a state that the table allows."""
    scene = Scene(state)
    scene.job.handle(scene.event(kind))
    after = scene.job.state
    assert after == state or after in t.TRANSITIONS[state, kind].to  # type: ignore[index]


@pytest.mark.parametrize(("state", "kind"), [pair for pair in ILLEGAL if pair[1] in SAYS])
def test_an_unlisted_word_of_a_worker_is_counted_and_changes_nothing(state: str, kind: type) -> None:
    """No exception, one more counted, the job as it was."""
    scene = Scene(state)
    before, count = (scene.job.state, scene.job.record), scene.shop.counter("out_of_protocol")
    scene.job.handle(scene.event(kind))
    assert (scene.job.state, scene.job.record) == before
    assert scene.shop.counter("out_of_protocol") == count + 1


@pytest.mark.parametrize(("state", "kind"), [pair for pair in ILLEGAL if pair[1] in INNER])
def test_an_unlisted_inner_event_is_our_own_error(state: str, kind: type) -> None:
    """The broker would have to have a bug for it to happen."""
    scene = Scene(state)
    with pytest.raises(AssertionError, match=state):
        scene.job.handle(scene.event(kind))


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize("kind", [m.JobProgress, m.JobFile, m.JobEnded, m.CancelJob, m.DeleteJob, m.FetchResult])
def test_whatever_is_said_in_whatever_state_the_broker_goes_on(state: str, kind: type) -> None:
    """Through the core: the same words by messages, and by strangers; all invariants hold after them."""
    scene = Scene(state)
    job = scene.job.id
    if kind in SAYS:
        scene.worker.say(scene.event(kind))
        stranger = scene.shop.worker("stranger")
        stranger.gives = False
        stranger.say(scene.event(kind))
    elif kind is m.FetchResult:
        scene.client.ask(kind, job, first=0, parts=1)
    else:
        scene.client.ask(kind, job)
    scene.shop.commits = True
    scene.shop.settle()
    scene.client.accepted("another")


@pytest.mark.parametrize("state", ["checking", "committing"])
def test_a_job_that_isnt_acknowledged_yet_is_nobodys(state: str) -> None:
    """Whoever asks for it by its id, or wants it cancelled or deleted, is told that there is none; then it is accepted."""
    scene = Scene(state)
    for kind in (m.AskJobs, m.CancelJob, m.DeleteJob):
        assert "there is no job" in scene.client.ask(kind, scene.job.id).failure.message
    scene.shop.works = scene.shop.commits = True
    scene.shop.settle()
    assert len(scene.client.heard(m.JobAccepted)) == 1


@pytest.mark.parametrize("state", ["stopping", "taking", "exporting"])
def test_groups_11_a_cancel_of_what_ends_already_is_answered_at_once(state: str) -> None:
    """However many ask, nobody waits for the end, and nothing is kept of them once the journal has written."""
    scene = Scene(state)
    phase = scene.job.phase
    for _ in range(100):
        assert [info.state for info in scene.client.ask(m.CancelJob, scene.job.id).jobs] == [phase]
    assert scene.shop.jobs.status()["uncommitted"] == 0


def test_the_diagram_shows_every_state() -> None:
    """Printed from the table, with an arrow into each state and one out of the whole."""
    text = t.mermaid()
    assert text.startswith("stateDiagram-v2\n    [*] --> checking\n")
    assert all(f"--> {state}" in text for state in STATES)
    assert "running --> taking: JobFile" in text
    assert text.endswith("forgotten --> [*]\n")
