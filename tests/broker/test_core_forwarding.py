"""Tasks that are sent ahead of inputs which their own worker makes, through the whole core."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.messages import Applied

LATE = {"control_binding": "late"}


def sent(worker: Any, since: int = 0) -> list[tuple[str, int, tuple[str, ...]]]:
    """The tasks that a worker was sent, and what each awaits."""
    return [(task.stage, task.index, task.awaits) for task in worker.heard(m.RunTask)][since:]


def ahead(worker: Any) -> list[tuple[str, int]]:
    """Those that were sent ahead of an input."""
    return [(stage, index) for stage, index, awaits in sent(worker) if awaits]


def books(rig: Any, name: str = "w") -> dict[str, tuple[int, int]]:
    """What the broker counts at each actor of a worker: tasks with all their inputs, and those ahead of some."""
    actors = rig.core._peers.workers[name].actors
    return {stage: (actor.outstanding, actor.awaiting) for (_, stage), actor in actors.items()}


def waits_for(rig: Any) -> dict[str, str]:
    """What the stages of the only session wait for."""
    (shown,) = rig.core.status()["sessions"]
    return dict(shown["waits_for"])


@pytest.fixture
def stream(rig: Any, kit: Any) -> Any:
    return kit.Stream(rig, forwards=True)


NOTHING = {"encode": (0, 0), "denoise": (0, 0), "decode": (0, 0)}


# --- who is sent what ahead ------------------------------------------------------------------------------------------------


def test_streaming_11_what_the_same_worker_makes_is_not_waited_for(stream: Any) -> None:
    """With its control, a chunk's denoise is sent while its condition is made, and its decode while denoise is at it."""
    assert sent(stream.worker) == [("encode", 0, ()), ("encode", 1, ())]
    stream.client.submit(stream.id, 0)
    assert sent(stream.worker, 2) == [("denoise", 0, ("condition",))]
    (denoise,) = [task for task in stream.worker.heard(m.RunTask) if task.stage == "denoise"]
    assert set(denoise.inputs) == {"control"}
    stream.worker.finish("encode")
    stream.rig.turn()
    assert sent(stream.worker, 3) == [("decode", 0, ("latent",))]
    stream.make()
    assert [chunk.index for chunk in stream.got()] == [0]
    assert stream.got()[0].facts == {"encode": 0, "denoise": 0, "decode": 0}


def test_streaming_11_a_condition_and_its_control_bring_the_whole_chain(rig: Any, kit: Any) -> None:
    """Where nothing is prefetched, one control sends its chunk off: each stage is sent ahead when the one before begins."""
    spec = kit.world()
    stream = kit.Stream(rig, forwards=True, spec=replace(spec, prefetch=replace(spec.prefetch, refill="never")))
    assert sent(stream.worker) == []
    before = len(stream.rig.sent)
    stream.client.submit(stream.id, 0)
    chain = [("encode", 0, ()), ("denoise", 0, ("condition",)), ("decode", 0, ("latent",))]
    assert sent(stream.worker) == chain[:2]
    told = [(type(message), getattr(message, "stage", "")) for _, message in stream.rig.sent[before:]]
    assert [stage for kind, stage in told if kind is m.RunTask] == ["encode", "denoise"]
    stream.worker.finish("encode")
    stream.rig.turn()
    assert sent(stream.worker) == chain
    stream.worker.make("denoise", "decode")
    assert sent(stream.worker) == chain
    assert [chunk.index for chunk in stream.got()] == [0]


def test_streaming_11_a_worker_that_does_not_forward_is_sent_nothing_ahead(rig: Any, kit: Any) -> None:
    """It would wait for ever."""
    stream = kit.Stream(rig)
    stream.client.submit(stream.id, 0)
    stream.make(1)
    assert len(stream.got()) == 1
    assert ahead(stream.worker) == []


def test_streaming_11_nothing_is_sent_ahead_of_another_worker(rig: Any) -> None:
    """Stages of two workers get their inputs from the broker, though both would forward."""
    ends = rig.worker("ends", stages=("encode", "decode"), forwards=True)
    middle = rig.worker("middle", stages=("denoise",), forwards=True)
    client = rig.client()
    session = client.open()
    for index in range(2):
        client.submit(session, index)
    for _ in range(2):
        ends.make("encode")
        middle.make("denoise")
        ends.make("decode")
    assert len(client.chunks(session)) == 2
    assert ahead(ends) + ahead(middle) == []


def test_streaming_11_only_what_comes_from_the_same_worker_is_awaited(rig: Any) -> None:
    """Decode lives with denoise and is sent ahead of its latent; denoise isn't ahead of a condition from elsewhere."""
    front = rig.worker("front", stages=("encode",), forwards=True)
    back = rig.worker("back", stages=("denoise", "decode"), forwards=True)
    client = rig.client()
    session = client.open()
    client.submit(session, 0)
    assert sent(back) == []
    front.make("encode")
    assert sent(back) == [("denoise", 0, ()), ("decode", 0, ("latent",))]
    back.make("denoise", "decode")
    assert len(client.chunks(session)) == 1


def test_streaming_11_without_a_mailbox_nothing_is_sent_ahead(rig: Any, kit: Any) -> None:
    """A worker whose actors let nothing wait is asked to keep nothing that awaits something either."""
    stream = kit.Stream(rig, forwards=True, mailbox=0)
    stream.client.submit(stream.id, 0)
    stream.make(1)
    assert len(stream.got()) == 1
    assert ahead(stream.worker) == []


@pytest.mark.parametrize("mailbox", [1, 2, 3])
def test_streaming_11_tasks_ahead_are_bounded_by_the_mailbox(kit: Any, mailbox: int) -> None:
    """An actor is sent no more of them than run and wait, however many sessions would have one."""
    rig = kit.Rig()
    stream = kit.Stream(rig, forwards=True, mailbox=mailbox)
    sessions = [stream.id, *(stream.client.open(key) for key in "abcde")]
    for session in sessions:
        stream.client.submit(session, 0)
    for _ in range(24):
        for stage in ("encode", "denoise", "decode"):
            assert sum(books(rig)[stage]) <= 2 * (1 + mailbox)
            if stream.worker.jobs[stage]:
                stream.worker.finish(stage)
    assert ahead(stream.worker)
    assert all(len(stream.client.chunks(session)) == 1 for session in sessions)


def conditions(worker: Any) -> None:
    """Make all that are asked for."""
    while worker.jobs["encode"]:
        worker.finish("encode")


def test_streaming_13_nothing_is_sent_ahead_while_somebody_waits(rig: Any, kit: Any) -> None:
    """A place that gets free at an actor is for whoever waits for a turn there, not for a task that has no inputs yet."""
    stream = kit.Stream(rig, forwards=True)
    others = [stream.client.open(key) for key in "ab"]
    worker = stream.worker
    conditions(worker)
    for index in range(2):
        stream.client.submit(stream.id, index)
    for session in others:
        stream.client.submit(session, 0)
    worker.make("denoise", "decode")
    stream.client.submit(stream.id, 2)
    actor = rig.core._peers.workers["w"].actors["world", "denoise"]
    assert stream.queued("encode")[0] == 2
    assert (list(actor.waiting), actor.outstanding) == ([others[1]], 2)
    worker.make("denoise")
    assert [job.session for job in worker.jobs["denoise"]] == others
    assert not [task for task in worker.heard(m.RunTask) if task.stage == "denoise" and task.awaits]


def test_streaming_10_nothing_is_sent_ahead_without_room_for_its_output(stream: Any) -> None:
    """Two chunks that nobody took fill the output: the third decode waits for credit, though its latent comes."""
    for index in range(3):
        stream.client.submit(stream.id, index)
        stream.make(min(1, 2 - min(index, 2)), ack=False)
    assert ("decode", 2) not in [(stage, index) for stage, index, _ in sent(stream.worker)]
    assert ("denoise", 2) in [(stage, index) for stage, index, _ in sent(stream.worker)]
    stream.client.ack(stream.id, 1)
    assert ("decode", 2) in [(stage, index) for stage, index, _ in sent(stream.worker)]


def test_streaming_10_what_is_sent_ahead_reserves_its_output_at_once(stream: Any) -> None:
    """Its input's place counts until it begins, its output's from the moment it is sent."""
    edges = stream.session.flow.edges
    stream.client.submit(stream.id, 0)
    assert (edges["control"].occupancy, edges["latent"].occupancy, edges["frames"].occupancy) == (1, 1, 0)
    stream.worker.finish("encode")
    stream.rig.turn()
    assert (edges["control"].occupancy, edges["latent"].occupancy, edges["frames"].occupancy) == (0, 1, 1)
    stream.worker.finish("denoise")
    assert (edges["latent"].occupancy, edges["frames"].occupancy) == (0, 1)


# --- when it arrives -------------------------------------------------------------------------------------------------------


def test_what_arrives_begins_at_once_where_nothing_else_runs(rig: Any, kit: Any) -> None:
    """The broker needn't be told: its input has left the edge before the worker says that the task began."""
    stream = kit.Stream(rig, forwards=True)
    stream.worker.starts = False
    stream.client.submit(stream.id, 0)
    assert books(rig)["denoise"] == (0, 1)
    stream.worker.finish("encode")
    assert books(rig)["denoise"] == (1, 0)
    assert stream.session.flow.stages["denoise"].started == 1


def test_what_arrives_waits_where_something_else_runs(rig: Any, kit: Any) -> None:
    """Behind another task of its actor it hasn't begun until the worker says so."""
    stream = kit.Stream(rig, forwards=True)
    for index in range(2):
        stream.client.submit(stream.id, index)
    stream.worker.finish("encode")
    stream.worker.finish("encode")
    flow = stream.session.flow.stages["denoise"]
    assert (books(rig)["denoise"], flow.started, flow.dispatched) == ((2, 0), 1, 2)
    stream.worker.finish("denoise")
    assert flow.started == 2


def test_a_task_that_is_sent_beside_one_ahead_is_not_taken_for_started(rig: Any, kit: Any) -> None:
    """The other one may have begun meanwhile, so the worker's word is waited for."""
    stream = kit.Stream(rig, forwards=True)
    worker = stream.worker
    worker.make("encode", "encode")
    second = stream.client.open("second")
    stream.client.submit(second, 0)
    assert books(rig)["denoise"] == (0, 1)
    worker.starts = False
    stream.client.submit(stream.id, 0)
    (task,) = worker.jobs["denoise"]
    assert (task.session, books(rig)["denoise"]) == (stream.id, (1, 1))
    flow = stream.session.flow.stages["denoise"]
    assert (flow.dispatched, flow.started) == (1, 0)
    worker.starts = True
    worker.started(task)
    assert flow.started == 1


@pytest.mark.parametrize(("said", "controls"), [("started", 1), ("started", 2), ("done", 1), ("done", 2)])
def test_streaming_34_a_task_that_awaits_its_inputs_neither_begins_nor_ends(
    rig: Any, kit: Any, said: str, controls: int
) -> None:
    """A worker that says so is wrong, beside a running task too: it is counted, nothing changes, and the session goes on."""
    stream = kit.Stream(rig, forwards=True)
    for index in range(controls):
        stream.client.submit(stream.id, index)
    if controls == 2:
        stream.worker.finish("encode")
        rig.turn()
    (task,) = [task for task in stream.worker.ahead if task.stage == "denoise"]
    assert task.index == controls - 1
    at = (task.session, task.stage, task.epoch, task.stage_epoch, task.index)
    before = books(rig), rig.counter("orphans")
    if said == "started":
        stream.worker.say(m.TaskStarted(*at))
    else:
        stream.worker.say(kit.done(task, {"latent": m.Artifact()}, {}))
    assert (books(rig), rig.counter("orphans")) == (before[0], before[1] + 1)
    assert stream.session.flow.stages["denoise"].started == controls - 1
    stream.make(controls)
    assert [chunk.index for chunk in stream.got()] == [0, 1][:controls]


def test_streaming_15_a_reservation_that_was_sent_ahead_follows_the_keys(rig: Any, kit: Any) -> None:
    """While its condition is made newer keys go to the actor, and its chunk is made with the newest."""
    stream = kit.Stream(rig, asked=LATE, forwards=True)
    stream.press("w")
    rig.turn()
    assert ahead(stream.worker) == [("denoise", 0)]
    (denoise,) = [task for task in stream.worker.heard(m.RunTask) if task.stage == "denoise"]
    assert denoise.reservation == m.Reservation("control", stream.keys.state, 0, 0)
    assert denoise.inputs == {}
    stream.release("w")
    stream.press("a")
    rig.turn()
    assert stream.worker.last(m.SetStageKeys).keys == stream.keys.state
    stream.make()
    (chunk,) = stream.got()
    assert isinstance(chunk.applied, Applied)
    assert chunk.applied.control.values["keys"] == ["a"]
    assert chunk.applied.revision == stream.keys.state.revision


def test_streaming_20_nothing_is_sent_ahead_of_the_media_clock(rig: Any, kit: Any) -> None:
    """A chunk that may not be begun yet isn't begun by its worker either, when its condition is there."""
    asked = {"pace": "realtime", "credit": m.Credit(1, 1 << 30)}
    stream = kit.Stream(rig, chunks=20, asked=asked, forwards=True)
    stream.press("w")
    rig.turn()
    for chunk in range(2):
        stream.make(1, ack=False)
        stream.client.ack(stream.id, chunk + 1, m.Credit(chunk + 2, 1 << 30))
        rig.turn()
    assert stream.queued("encode") == [2, 3]
    assert ("denoise", 1) in ahead(stream.worker)
    stream.worker.finish("encode")
    rig.turn()
    assert waits_for(rig)["denoise"] == "pace"
    assert ("denoise", 2) not in [(stage, index) for stage, index, _ in sent(stream.worker)]
    rig.advance(9 / 16)  # the first chunk was played
    assert stream.queued("denoise") == [2]


def test_streaming_30_a_stage_whose_task_is_ahead_waits_for_its_input(rig: Any, kit: Any) -> None:
    """Not for a busy actor: in the status as in the idle gaps."""
    stream = kit.Stream(rig, forwards=True)
    stream.client.submit(stream.id, 0)
    shown = waits_for(rig)
    assert (shown["denoise"], shown["decode"]) == ("input:condition", "input:latent")
    rig.now += 2.0
    stream.worker.finish("encode")
    rig.now += 3.0
    stream.worker.finish("denoise")
    rig.now += 1.0
    stream.worker.finish("decode")
    stream.client.say(m.AskMetrics(1, stream.id))
    stages = stream.client.last(m.Metrics).values["stages"]
    assert stages["denoise"]["idle_s"]["input:condition"]["seconds"] == pytest.approx(2.0)
    assert stages["decode"]["idle_s"]["input:latent"]["seconds"] == pytest.approx(5.0)
    assert "actor_busy" not in stages["decode"]["idle_s"]


def test_streaming_13_sessions_whose_tasks_are_ahead_get_equal_shares(rig: Any) -> None:
    """What arrives without a turn is charged as one, so neither of two gets more than the other."""
    worker = rig.worker(forwards=True)
    client = rig.client()
    sessions = [client.open(key, 90) for key in "ab"]
    made: Counter[str] = Counter()
    for _ in range(200):
        for session in sessions:
            client.ack(session, len(client.chunks(session)))
            flow = rig.core.sessions[session].flow
            while flow.refusal(flow.next_control_index) is None:
                client.submit(session, flow.next_control_index)
        for stage in ("decode", "encode"):
            while worker.jobs[stage]:
                worker.finish(stage)
        if sum(made.values()) == 40:
            break
        made[worker.finish("denoise").session] += 1
    assert ahead(worker)
    assert set(made) == set(sessions)
    assert max(made.values()) - min(made.values()) <= 2


def test_streaming_13_what_arrives_without_a_turn_counts_as_one(rig: Any) -> None:
    """Of two that wait, whoever had nothing yet is next, though the one whose task was ahead has waited longer."""
    worker = rig.worker(forwards=True)
    client = rig.client()
    early = client.open("early")
    client.submit(early, 0)
    assert ("denoise", 0) in ahead(worker)
    worker.make("encode", "denoise", "decode")
    client.ack(early, 1)
    one, other, late = (client.open(key) for key in ("one", "other", "late"))
    conditions(worker)
    for session, index in ((one, 0), (other, 0), (early, 1), (late, 0)):
        client.submit(session, index)
    order = []
    while worker.jobs["denoise"]:
        order.append(worker.finish("denoise").session)
    assert order == [one, other, late, early]


# --- the end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["encode", "denoise"])
def test_streaming_23_what_a_failed_task_would_have_made_is_awaited_no_longer(rig: Any, kit: Any, stage: str) -> None:
    """The chunks below are delivered, the session fails with the chunk's index, and no actor has anything in its books."""
    stream = kit.Stream(rig, forwards=True)
    for index in range(2):
        stream.client.submit(stream.id, index)
    stream.worker.finish("encode")
    if stage == "encode":
        stream.worker.fail("encode")
        stream.worker.finish("denoise")
    else:
        stream.worker.finish("encode")
        stream.worker.finish("denoise")
        assert books(rig)["decode"] == (1, 1)
        stream.worker.fail("denoise")
    stream.worker.finish("decode")
    assert [chunk.index for chunk in stream.got()] == [0]
    stream.client.ack(stream.id, 1)
    ended = stream.client.ended(stream.id)
    assert (ended.state, ended.failure.stage, ended.failure.index) == ("failed", stage, 1)
    assert books(rig) == NOTHING
    assert stream.worker.ahead == []


def test_streaming_22_a_cancel_drops_what_is_ahead(rig: Any, kit: Any) -> None:
    """Whatever its stages await, the session ends, its places are free, and another one is made in them."""
    stream = kit.Stream(rig, forwards=True)
    for index in range(2):
        stream.client.submit(stream.id, index)
    stream.worker.finish("encode")
    rig.turn()
    assert books(rig) == {"encode": (1, 0), "denoise": (1, 1), "decode": (0, 2)}
    stream.client.end(stream.id, "cancel")
    assert stream.client.ended(stream.id).state == "cancelled"
    assert books(rig) == NOTHING
    assert stream.worker.ahead == []
    again = stream.client.open("again")
    stream.client.submit(again, 0)
    stream.worker.make("encode", "denoise", "decode")
    assert [chunk.index for chunk in stream.client.chunks(again)] == [0]


def test_streaming_22_a_drain_makes_what_was_accepted_though_it_is_ahead(rig: Any, kit: Any) -> None:
    """Both chunks come, then the session is closed."""
    stream = kit.Stream(rig, forwards=True)
    for index in range(2):
        stream.client.submit(stream.id, index)
    stream.client.end(stream.id, "drain")
    stream.make(2)
    assert [chunk.index for chunk in stream.got()] == [0, 1]
    assert stream.client.ended(stream.id).state == "closed"
    assert books(rig) == NOTHING


def test_streaming_23_a_lost_worker_takes_what_is_ahead_with_it(rig: Any, kit: Any) -> None:
    """The session fails; whoever comes under its name begins with empty books."""
    stream = kit.Stream(rig, forwards=True)
    stream.client.submit(stream.id, 0)
    stream.worker.say(m.Goodbye("it was killed"))
    assert stream.client.ended(stream.id).failure.kind == "worker_lost"
    rig.worker(forwards=True)
    assert books(rig) == NOTHING


def test_a_result_on_its_way_when_its_session_ended_is_kept_for_who_was_given_it(rig: Any, kit: Any) -> None:
    """The broker drops the latent, but the worker's decode reads it: its memory comes back when that is over."""
    stream = kit.Stream(rig, forwards=True, memory=True)
    worker = stream.worker
    stream.client.submit(stream.id, 0)
    worker.finish("encode")
    rig.turn()
    assert ahead(worker) == [("denoise", 0), ("decode", 0)]
    worker.silent.add(m.ReleaseStage)  # it is on its way
    stream.client.end(stream.id, "cancel")
    worker.finish("denoise")
    (latent,) = [name for name, text in worker.memory._texts.items() if "/latent/" in text]
    rig.turn()
    assert rig.counter("late_answers") >= 1
    assert [task.index for task in worker.jobs["decode"]] == [0]
    assert latent in worker.memory.out, "decode reads it"
    worker.silent.clear()
    worker.finish("decode")
    rig.turn()
    assert latent not in worker.memory.out
    worker.released(worker.last(m.ReleaseStage))
    rig.turn()
    assert stream.client.ended(stream.id).state == "cancelled"
    assert worker.memory.out == {}
    assert books(rig) == NOTHING


def test_a_dropped_result_that_nobody_was_given_comes_back_at_once(rig: Any, kit: Any) -> None:
    """Without a task that awaits it there is no reader."""
    stream = kit.Stream(rig, memory=True)
    worker = stream.worker
    stream.client.submit(stream.id, 0)
    worker.finish("encode")
    worker.silent.add(m.ReleaseStage)
    stream.client.end(stream.id, "cancel")
    worker.finish("denoise")
    rig.turn()
    (latent,) = [name for name, text in worker.memory._texts.items() if "/latent/" in text]
    assert latent not in worker.memory.out
