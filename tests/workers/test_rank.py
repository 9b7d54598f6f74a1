"""A rank that follows: weights, bodies, decisions, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.controls import KeyState
from reelwire.group_messages import Decision, Farewell, Have, Outcome, RankHello
from reelwire.workers import events, group_events
from reelwire.workers.actions import AnswerProbe, BuildStage, Job, Ready
from reelwire.workers.group_events import (
    AtStage,
    CloseJob,
    FilesFound,
    FindFiles,
    Form,
    JoinLink,
    KillRanks,
    LeaveGroup,
    LoadJobs,
    RankExited,
    StartJob,
    StepJob,
    TakeIn,
    TakenIn,
)
from reelwire.workers.lockstep import LEAVE_S
from reelwire.workers.rank import MARGIN_S

from .group_rig import BROKE, EPOCH, NO, FollowRig, initialize, offer, run_job, task


def code(rig: FollowRig) -> int | None:
    """The exit code; None: it goes on."""
    return None if rig.stopped is None else rig.stopped.exit_code


def stop(rig: FollowRig) -> None:
    """Somebody asks the process to."""
    rig.do(events.ShutdownRequested(rig.now))


# --- before it can follow ------------------------------------------------------------------------------------------------


def test_groups_01_a_rank_that_follows_offers_nothing(toy: Any) -> None:
    """Its hello says the pipeline and its place; stages and jobs are the leader's."""
    rig = FollowRig(toy.spec)
    rig.start()
    (hello,) = rig.take(m.WorkerHello)
    assert (hello.stages, hello.jobs, hello.held) == ((), (), ())
    assert hello.group == m.Membership("g", 1, 3)
    assert hello.specs == (toy.spec,)


def test_groups_04_it_is_ready_when_its_weights_are_there(toy: Any) -> None:
    """The grouped stages, then the jobs, one after the other on the group thread."""
    rig = FollowRig(toy.spec)
    rig.start()
    assert rig.order == AtStage("draw", Job(0, BuildStage("toy", "draw")))
    rig.done()
    assert rig.order == LoadJobs()
    assert not rig.wanted(Ready)
    assert rig.take(m.Heartbeat)[0].busy_for_s > 0
    rig.done()
    assert len(rig.wanted(Ready)) == 1
    rig.tick(1.5)
    assert rig.take(m.Heartbeat)[-1].busy_for_s == 0


@pytest.mark.parametrize("first", ["weights", "link"])
def test_groups_04_it_greets_its_leader_when_it_has_weights_and_link(toy: Any, first: str) -> None:
    """Not before: the leader decides as soon as it was greeted by all."""
    rig = FollowRig(toy.spec)
    rig.start()
    if first == "weights":
        rig.load()
        assert not rig.told
        rig.join()
    else:
        rig.join()
        assert not rig.told
        rig.load()
    assert rig.wanted(JoinLink) == [JoinLink(EPOCH, rig.members, "tcp://link")]
    assert rig.told == [RankHello(EPOCH, b"secret", 1)]


def test_groups_02_what_it_has_is_said_after_the_greeting(toy: Any) -> None:
    """Nobody would know who says it, before."""
    rig = FollowRig(toy.spec)
    rig.start()
    rig.join()
    rig.hear(initialize(3), run_job(4))
    rig.do(FilesFound(rig.now, 4, {}, (offer("a"),)))
    assert not rig.told
    rig.load()
    assert rig.told == [RankHello(EPOCH, b"secret", 1), Have(3), Have(4, lacks=True)]


@pytest.mark.parametrize(("kind", "exit_code"), [("request", 2), ("stage", 1)])
@pytest.mark.parametrize("builds", [0, 1])
def test_groups_06_weights_that_cannot_be_loaded_end_it(toy: Any, kind: Any, exit_code: int, builds: int) -> None:
    """With the exit code that a wrong setting, or a fault, has."""
    rig = FollowRig(toy.spec)
    rig.start()
    for _ in range(builds):
        rig.done()
    rig.done(m.Failure(kind, "no such weights", field="model"))
    assert code(rig) == exit_code
    assert rig.stopped is not None
    assert "model: no such weights" in rig.stopped.reason


@pytest.mark.parametrize(("epoch", "ends"), [(EPOCH, False), (EPOCH - 1, False), (EPOCH + 1, True)])
def test_groups_04_another_epoch_is_a_stale_one_or_the_end(toy: Any, epoch: int, ends: bool) -> None:
    """It belongs to one for life."""
    rig = FollowRig(toy.spec).greeted()
    rig.join(epoch)
    assert (code(rig) == 1) == ends
    assert not rig.wanted(JoinLink)


# --- bodies ----------------------------------------------------------------------------------------------------------------


def test_groups_02_a_body_is_had_when_its_tensors_are_copied(toy: Any) -> None:
    """What came in the message itself is there at once; the files of a job are looked for."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(initialize(1), task(2))
    assert rig.told == [Have(1), Have(2)]
    shared = task(3, 1, shared=True)
    rig.hear(shared)
    assert rig.wanted(TakeIn) == [TakeIn(shared)]
    rig.do(TakenIn(rig.now, task(3, 1)))
    run = run_job(4, "j", 1, offer("a"))
    rig.hear(run)
    assert rig.wanted(FindFiles) == [FindFiles(run)]
    rig.do(FilesFound(rig.now, 4, {"a": "/here/a"}))
    assert rig.told[2:] == [Have(3), Have(4)]


def test_groups_02_a_body_is_kept_once(toy: Any) -> None:
    """One that comes again, or out of order, is dropped; so is word of one that isn't kept any more."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(initialize(2), initialize(2), initialize(1))
    assert rig.told == [Have(2)]
    assert rig.core.status()["dropped"] == {"duplicate": 2}
    rig.do(TakenIn(rig.now, task(9)))
    rig.do(FilesFound(rig.now, 9))
    assert rig.told == [Have(2)]


def test_groups_02_bodies_that_will_not_be_asked_for_are_dropped(toy: Any) -> None:
    """As each decision says; and one that was asked for is gone, too."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(initialize(1), initialize(2, "b"), initialize(3, "c"))
    rig.decide("initialize", sequence=2, below=2)
    assert rig.core.status()["bodies"] == 1
    rig.done()
    rig.decide("step", below=4)
    assert rig.core.status()["bodies"] == 0


def test_groups_07_a_lost_broker_costs_a_rank_nothing(toy: Any) -> None:
    """Bodies and link stay, decisions go on, and the next broker is told epoch and highest number."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(initialize(5))
    rig.cut()
    rig.decide("initialize", sequence=5)
    rig.done()
    assert rig.told[-1] == Outcome(1)
    (hello,) = rig.take(m.WorkerHello)
    assert (hello.group.epoch, hello.group.sequence) == (EPOCH, 5)
    rig.welcome()
    assert code(rig) is None


@pytest.mark.parametrize("end", ["farewell", "process"])
def test_groups_07_a_rank_of_a_formed_group_waits_for_a_broker_as_long_as_its_leader(toy: Any, end: str) -> None:
    """What ends it is the leader's word or end; one that was asked for nothing yet gives up by itself."""
    rig = FollowRig(toy.spec).greeted()
    rig.cut()
    rig.tick(31.0)
    assert code(rig) == 3
    rig = FollowRig(toy.spec).greeted()
    rig.decide("form", round=1)
    rig.done()
    rig.cut()
    rig.tick(600.0)
    assert code(rig) is None
    if end == "farewell":
        rig.link(Farewell("no broker answers", in_order=False))
    else:
        rig.do(group_events.RankExited(rig.now, 0, "its process has ended"))
    assert code(rig) == 1


# --- decisions -------------------------------------------------------------------------------------------------------------


def test_groups_02_it_does_what_is_decided_and_says_so(toy: Any) -> None:
    """Each act becomes the order that the leader's own thread has."""
    rig = FollowRig(toy.spec).greeted()
    run = run_job(3, "j", 1, offer("a"))
    bodies = initialize(1), task(2), run
    rig.hear(*bodies)
    rig.do(FilesFound(rig.now, 3, {"a": "/here/a"}))
    released = m.ReleaseStage("s", "toy", "draw", 0, 0)
    decided: list[tuple[Any, dict[str, Any], Any]] = [
        ("form", {"round": 1}, Form(EPOCH, 1, "host:1")),
        ("initialize", {"sequence": 1}, AtStage("draw", Job(0, bodies[0]))),
        ("run", {"sequence": 2}, AtStage("draw", Job(0, bodies[1]))),
        ("start", {"sequence": 3, "share": True}, StartJob(run, {"a": "/here/a"}, share=True)),
        ("step", {"sequence": 3}, StepJob()),
        ("end", {"sequence": 3}, CloseJob()),
        ("release", {"session": "s", "stage": "draw"}, AtStage("draw", Job(0, released))),
        ("leave", {}, LeaveGroup()),
    ]
    for number, (act, more, order) in enumerate(decided, 1):
        rig.decide(act, **more)
        assert rig.order == order
        rig.done()
        assert rig.told[-1] == Outcome(number)


def test_streaming_15_a_reservation_is_filled_by_the_leader(toy: Any) -> None:
    """The control that the leader has bound is among the inputs, on all ranks the same."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(task(1, reservation=m.Reservation("control", KeyState())))
    applied = m.Applied("held", m.Artifact({"keys": ["w"]}), 1, 0, 0)
    rig.decide("run", sequence=1, applied=applied)
    job = rig.order.job
    assert job.applied == applied
    assert job.work.inputs == {"control": applied.control}


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("act", ["form", "run", "step", "end"])
def test_groups_13_a_failure_is_told_with_whether_another_is_to_blame(toy: Any, act: Any, is_broken: bool) -> None:
    """The leader looks for the root cause."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(task(1))
    failure = BROKE if is_broken else NO
    rig.decide(act, sequence=1, round=1)
    rig.done(failure, is_broken=is_broken)
    assert rig.told[-1] == Outcome(1, failure, is_broken)
    assert code(rig) is None


def test_groups_13_a_refusal_is_told_with_whether_it_broke_anything(toy: Any) -> None:
    """A rank that has refused is in its process group still; one that couldn't begin at all has left it."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(initialize(1))
    rig.decide("initialize", sequence=1)
    rig.done(NO, apart=False)
    assert rig.told[-1] == Outcome(1, NO, apart=False)
    rig.decide("initialize", sequence=2)
    rig.done()
    assert rig.told[-1].apart


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        ({"act": "run", "sequence": 9}, "no body 9"),
        ({"act": "start", "sequence": 9}, "no body 9"),
        ({"act": "run", "sequence": 1}, "body 1 is nothing to run"),
        ({"act": "initialize", "sequence": 2}, "body 2 is nothing to initialize"),
        ({"act": "start", "sequence": 2}, "body 2 is nothing to start"),
        ({"act": "run", "sequence": 3}, "chunk 1 has no control"),
    ],
)
def test_groups_02_a_decision_that_cannot_be_done_here_frees_the_others(toy: Any, decision: Any, words: str) -> None:
    """They may wait in a collective already: this rank leaves the process group, and then says why."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(initialize(1), task(2), task(3, 1, reservation=m.Reservation("control", KeyState())))
    rig.decide(**decision)
    assert rig.order == LeaveGroup()
    rig.done()
    outcome = rig.told[-1]
    assert words in outcome.failure.message
    assert not outcome.broken
    assert code(rig) is None


def test_groups_02_tensors_that_were_lost_fail_the_task_when_it_is_decided(toy: Any) -> None:
    """The rank has the body, so that nobody waits for it; what it lacks is told as the task's failure."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(task(1, shared=True))
    gone = m.Failure("worker_lost", "its writer is gone")
    rig.do(TakenIn(rig.now, task(1, shared=True), gone))
    assert rig.told == [Have(1)]
    rig.decide("run", sequence=1)
    assert rig.order == LeaveGroup()
    rig.done()
    assert rig.told[-1] == Outcome(1, gone)


def test_groups_02_a_decision_is_done_once(toy: Any) -> None:
    """One that comes again is answered again, if it was answered and the leader may wait for that still."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("form", round=1)
    form = Decision(1, "form", round=1)
    rig.link(form)
    assert not rig.told
    rig.done(NO)
    rig.link(form)
    assert rig.told == [Outcome(1, NO), Outcome(1, NO)]
    for _ in range(2):
        rig.decide("step")
        rig.done()
    rig.link(form)
    assert [each.number for each in rig.told] == [1, 1, 2, 3]
    assert rig.order is None
    assert code(rig) is None


@pytest.mark.parametrize(
    "acts",
    [
        ("form", "step"),
        ("run", "step"),
        ("end", "step"),
        ("step", "run"),
        ("step", "end"),
        ("step", "start"),
        ("step", "step", "step"),
        ("start", "step", "step"),
    ],
)
def test_groups_02_a_rank_that_is_out_of_step_ends_the_epoch(toy: Any, acts: tuple[Any, ...]) -> None:
    """A decision came before the one before was answered: nobody can tell what the others do."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(task(1), run_job(2))
    rig.do(FilesFound(rig.now, 2))
    for act in acts[:-1]:
        rig.decide(act, sequence=2 if act == "start" else 1)
    assert code(rig) is None
    rig.decide(acts[-1], sequence=2)
    assert code(rig) == 1
    assert rig.take(m.RanksLost)[0].epoch == EPOCH


# --- how it ends -----------------------------------------------------------------------------------------------------------


def test_groups_04_a_rank_that_is_gone_ends_the_epoch(toy: Any) -> None:
    """Whoever sees it says so, kills it for certain, and leaves to be started anew."""
    rig = FollowRig(toy.spec).greeted()
    rig.do(RankExited(rig.now, 2, "its process has ended"))
    assert rig.take(m.RanksLost)[0].ranks == (2,)
    assert rig.wanted(KillRanks) == [KillRanks((2,))]
    assert code(rig) == 1
    assert rig.stopped is not None
    assert rig.stopped.reason == "rank 2 of group g is gone: its process has ended; the group is to be started anew"


@pytest.mark.parametrize(("epoch", "ends"), [(EPOCH, True), (EPOCH - 1, False), (EPOCH + 1, False)])
def test_groups_04_the_broker_ends_the_epoch_that_is_meant(toy: Any, epoch: int, ends: bool) -> None:
    """A rank that hangs is killed by whoever can; never by itself."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(m.EndGroup(epoch, (1, 2), "rank 2 is silent"))
    assert (code(rig) == 1) == ends
    assert rig.wanted(KillRanks) == ([KillRanks((2,))] if ends else [])


def test_groups_04_a_leader_that_leaves_takes_the_group_along(toy: Any) -> None:
    """Its last word says why."""
    rig = FollowRig(toy.spec).greeted()
    rig.link(Farewell("no broker answers"))
    assert code(rig) == 1
    assert rig.stopped is not None
    assert "rank 0 of group g has left: no broker answers" in rig.stopped.reason


def test_groups_04_a_rank_whose_own_thread_hangs_ends_itself(toy: Any) -> None:
    """A bit later than its leader would have noticed."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("form", round=1)
    rig.tick(30.0 + MARGIN_S - 1.0)
    assert code(rig) is None
    rig.tick(2.0)
    assert code(rig) == 1
    assert rig.take(m.RanksLost)[0].ranks == (1,)


def test_groups_04_an_idle_rank_has_no_deadline(toy: Any) -> None:
    """It waits for decisions as long as there are none."""
    rig = FollowRig(toy.spec).greeted()
    rig.tick(300.0)
    assert code(rig) is None


def test_groups_11_a_rank_that_is_asked_to_stop_asks_its_leader(toy: Any) -> None:
    """It does what is decided until all leave, and goes when the leader has gone."""
    rig = FollowRig(toy.spec).greeted()
    stop(rig)
    assert [type(each) for each in rig.told] == [Farewell]
    rig.decide("form", round=1)
    rig.done()
    rig.decide("leave")
    rig.done()
    assert code(rig) is None
    rig.do(RankExited(rig.now, 2, "its process has ended"))
    assert code(rig) is None
    rig.do(RankExited(rig.now, 0, "its process has ended"))
    assert code(rig) == 0
    assert not rig.take(m.RanksLost)
    assert not rig.wanted(KillRanks)


@pytest.mark.parametrize("sign", ["farewell", "broker", "silence"])
def test_groups_11_a_rank_that_has_left_goes_at_any_sign(toy: Any, sign: str) -> None:
    """The leader's word, the broker's, or none for a while: it ends as asked for, whoever was asked."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("leave")
    rig.done()
    match sign:
        case "farewell":
            rig.link(Farewell("stopped as asked for"))
        case "broker":
            rig.hear(m.EndGroup(EPOCH, (), "rank 0 has left"))
        case _:
            rig.tick(2 * LEAVE_S + 1.0)
    assert code(rig) == 0


def test_groups_11_a_leader_that_does_not_let_go_is_left(toy: Any) -> None:
    """After drain_s, with a sentence."""
    rig = FollowRig(toy.spec, drain_s=20.0).greeted()
    stop(rig)
    rig.tick(21.0)
    assert code(rig) == 1
    assert rig.stopped is not None
    assert "group g didn't let this rank go within 20 s" in rig.stopped.reason


@pytest.mark.parametrize("loaded", [False, True])
def test_groups_11_a_rank_that_nobody_knows_leaves_at_once(toy: Any, loaded: bool) -> None:
    """While it loads, and while it waits for its group."""
    rig = FollowRig(toy.spec)
    rig.start()
    if loaded:
        rig.load()
    stop(rig)
    assert code(rig) == 0


def test_streaming_22_a_rank_answers_probes_of_shared_memory(toy: Any) -> None:
    """What a grouped stage consumes may stand there only if every rank can open it."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(m.ProbeMemory("somebody"))
    assert rig.wanted(AnswerProbe) == [AnswerProbe(1, "somebody")]


def test_groups_02_what_is_not_for_a_rank_is_dropped(toy: Any) -> None:
    """Words for a leader, from the broker or over the link."""
    rig = FollowRig(toy.spec).greeted()
    rig.hear(m.StopJob("j", 1), m.WantFile("a", 0, 1), m.ReturnSegments(()))
    rig.do(group_events.LinkSaid(rig.now, 0, Have(1)))
    assert rig.core.status()["dropped"] == {"unexpected": 4}
