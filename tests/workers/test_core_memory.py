"""The worker's core: what it lends of its shared memory, what comes back, and what is never lent again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from reelwire.messages import (
    Artifact,
    Draining,
    Goodbye,
    MemoryOffer,
    ProbeMemory,
    ReturnSegments,
    SegmentUse,
    StageReleased,
    TaskDone,
    WorkerHello,
)
from reelwire.tensors import Shared, TensorRef
from reelwire.workers.actions import AbandonMemory, AnswerProbe, Log, TakeBack
from reelwire.workers.events import Finished, OutboxFull, Reported, ShutdownRequested

ONE, TWO = SegmentUse("s1", 1), SegmentUse("s2", 4)
MADE = {"picture": Artifact({"index": 0})}


def finish(worker: Any, *pieces: SegmentUse, stage: str = "draw") -> list[Any]:
    """The thread reports a result that stands in these pieces."""
    job = worker.jobs.pop(stage)
    work = job.work
    whose = (work.session, work.stage, work.epoch, work.stage_epoch, work.index)
    done = TaskDone(*whose, MADE, {}, 0.1, job.applied)
    return list(worker.do(Reported(worker.now, Finished(stage, job, done, "", pieces))))


def memory_actions(actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, TakeBack | AbandonMemory | AnswerProbe)]


def test_the_hello_says_what_a_worker_can_write(rig: Any, toy: Any) -> None:
    """None if it has nothing."""
    offer = MemoryOffer("abc", b"\1" * 16)
    with_memory, without = rig(memory=offer), rig()
    with_memory.start()
    without.start()
    (hello,) = [message for message in with_memory.sent if isinstance(message, WorkerHello)]
    assert hello.memory == offer
    (hello,) = [message for message in without.sent if isinstance(message, WorkerHello)]
    assert hello.memory is None


def test_a_probe_is_answered_by_who_can_look(rig: Any, toy: Any) -> None:
    """The loop reads it; one over another attachment isn't answered."""
    worker = rig().ready()
    assert worker.hear(ProbeMemory("xyz")) == [AnswerProbe(1, "xyz")]
    assert memory_actions(worker.hear(ProbeMemory("xyz"), attachment=2)) == []


def test_what_was_sent_comes_back_once(rig: Any, toy: Any) -> None:
    """A repeated or an invented return changes nothing: a stage may be writing there."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    assert worker.hear(ReturnSegments((ONE,))) == []
    assert memory_actions(finish(worker, ONE, TWO)) == []
    assert worker.hear(ReturnSegments((ONE, SegmentUse("s2", 3)))) == [TakeBack((ONE,))]
    broken = replace(TWO, broken=True)
    assert worker.hear(ReturnSegments((ONE, broken))) == [TakeBack((broken,))]
    assert worker.hear(ReturnSegments((TWO,))) == []
    assert worker.core.counters["unknown_segment"] == 4


def test_a_result_of_a_session_that_was_released_meanwhile_is_dropped(rig: Any, toy: Any) -> None:
    """The broker hears that the task is over, and nothing else; what it stood in is free at once."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.hear(toy.release())
    assert memory_actions(finish(worker, ONE)) == [TakeBack((ONE,))]
    assert worker.sent[-1] == TaskDone("s", "draw", 1, 1, 0, {}, {}, 0.1)
    assert worker.hear(ReturnSegments((ONE,))) == []


def test_a_result_of_an_older_epoch_is_dropped(rig: Any, toy: Any) -> None:
    """The same, when a newer attempt has taken its place."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.hear(toy.initialize(epoch=2))
    assert memory_actions(finish(worker, ONE)) == [TakeBack((ONE,))]


def test_what_was_lent_over_a_lost_attachment_is_abandoned(rig: Any, toy: Any) -> None:
    """Nobody will say when it has been read. What the running task stands in was never sent, and is free."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    finish(worker, ONE)
    worker.hear(toy.task(1))
    lost = worker.do(OutboxFull(worker.now))
    assert memory_actions(lost) == [AbandonMemory()]
    assert memory_actions(finish(worker, TWO)) == [TakeBack((TWO,))]
    worker.welcome(2)
    assert worker.hear(ReturnSegments((ONE, TWO)), attachment=2) == []


@pytest.mark.parametrize("how", ["goodbye", "silence", "welcome"])
def test_memory_is_abandoned_however_the_attachment_ends(rig: Any, toy: Any, how: str) -> None:
    """Before anything is said under the next one."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    finish(worker, ONE)
    actions = {
        "goodbye": lambda: worker.hear(Goodbye()),
        "silence": lambda: worker.tick(60.0),
        "welcome": lambda: worker.welcome(2),
    }[how]()
    assert memory_actions(actions) == [AbandonMemory()]


def test_streaming_37_a_drain_waits_for_what_was_lent(rig: Any, toy: Any) -> None:
    """The sessions are released, but a client has yet to read its last frames."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    finish(worker, ONE, TWO)
    worker.hear(toy.release())
    worker.finish("draw")
    worker.sent.clear()
    worker.do(ShutdownRequested(worker.now))
    assert worker.sent == [Draining()]
    worker.hear(ReturnSegments((ONE,)))
    assert not worker.stopped
    worker.hear(ReturnSegments((TWO,)))
    assert worker.stopped.exit_code == 0
    assert isinstance(worker.sent[-1], Goodbye)


def test_streaming_37_a_drain_waits_for_sessions_and_memory_in_either_order(rig: Any, toy: Any) -> None:
    """What came back first doesn't end it."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    finish(worker, ONE)
    worker.do(ShutdownRequested(worker.now))
    worker.hear(ReturnSegments((ONE,)))
    assert not worker.stopped
    worker.hear(toy.release())
    worker.finish("draw")
    assert isinstance(worker.sent[-2], StageReleased)
    assert worker.stopped.exit_code == 0


def test_streaming_37_memory_that_never_comes_back_does_not_keep_a_worker(rig: Any, toy: Any) -> None:
    """The drain has its limit, and says what was missing."""
    worker = rig(drain_s=2.0).ready().live()
    worker.hear(toy.task(0))
    finish(worker, ONE)
    worker.hear(toy.release())
    worker.finish("draw")
    worker.do(ShutdownRequested(worker.now))
    worker.tick(2.0)
    assert worker.stopped.exit_code == 1
    assert worker.sent[-1] == Goodbye("what was lent of the shared memory didn't come back within 2 s")


def lend(worker: Any, toy: Any, stage: str, artifact: str, *uses: SegmentUse) -> None:
    """A stage's result, which stands in these pieces, is sent."""
    worker.hear(toy.task(0, stage=stage))
    job = worker.jobs.pop(stage)
    refs = {use.segment: TensorRef("uint8", (1,), Shared("abc", use.segment, use.generation)) for use in uses}
    done = TaskDone("s", stage, 1, 1, 0, {artifact: Artifact({}, refs)}, {}, 0.1, job.applied)
    worker.do(Reported(worker.now, Finished(stage, job, done, "", uses)))


def drain(worker: Any, toy: Any) -> None:
    """The session is over, and the worker is asked to stop."""
    for stage in ("draw", "show"):
        worker.hear(toy.release(stage=stage))
        worker.finish(stage)
    worker.do(ShutdownRequested(worker.now))
    assert not worker.stopped


def test_streaming_37_a_client_that_takes_no_further_chunk_does_not_fail_a_drain(rig: Any, toy: Any) -> None:
    """It has copied its frames long ago: when the limit is over the worker leaves with a warning, and exit code 0."""
    worker = rig(drain_s=2.0).ready().live().live(stage="show")
    lend(worker, toy, "show", "frames", ONE, TWO)
    drain(worker, toy)
    worker.hear(ReturnSegments((TWO,)))
    assert not worker.stopped
    actions = worker.tick(2.0)
    assert worker.stopped.exit_code == 0
    (warning,) = [action for action in actions if isinstance(action, Log) and action.level == "warning"]
    assert (warning.event, warning.fields["pieces"]) == ("clients_hold_memory", 1)


def test_streaming_37_a_stage_that_may_still_read_fails_a_drain(rig: Any, toy: Any) -> None:
    """Its session is lost with the memory, whatever clients hold besides."""
    worker = rig(drain_s=2.0).ready().live().live(stage="show")
    lend(worker, toy, "show", "frames", ONE)
    lend(worker, toy, "draw", "picture", TWO)
    drain(worker, toy)
    worker.tick(2.0)
    assert worker.stopped.exit_code == 1
    assert worker.sent[-1] == Goodbye("what was lent of the shared memory didn't come back within 2 s")


@pytest.mark.seeds(30)
def test_no_piece_is_free_while_somebody_may_read_it(rig: Any, toy: Any, seed: int) -> None:
    """Whatever the order: each piece is taken back once, and only when it came back or was never sent."""
    chance = random.Random(seed)
    worker = rig(slots=3, mailbox=3).ready()
    attachment, epoch, number = 1, 1, 0
    sent: set[str] = set()  # with the broker
    free: set[str] = set()  # taken back
    index = dict.fromkeys("ab", 0)

    def note(actions: list[Any], piece: str = "") -> None:
        back = {use.segment for action in actions if isinstance(action, TakeBack) for use in action.segments}
        assert not back & free, "taken back twice"
        free.update(back)
        told = [m for m in (getattr(action, "message", None) for action in actions) if isinstance(m, TaskDone)]
        if piece and told and told[0].outputs:
            assert piece not in back
            sent.add(piece)
        elif piece:
            assert back == {piece}, "dropped, and not taken back"
        if any(isinstance(action, AbandonMemory) for action in actions):
            sent.clear()

    for session in "ab":
        note(worker.hear(toy.initialize(session), attachment))
    for _ in range(600):
        session = chance.choice("ab")
        match chance.choices(["task", "finish", "return", "again", "lose", "invent"], [8, 12, 5, 1, 0.4, 1])[0]:
            case "task":
                note(worker.hear(toy.task(index[session], session, epoch=epoch), attachment))
                index[session] += 1
            case "finish" if "draw" in worker.jobs:
                if hasattr(worker.jobs["draw"].work, "index"):
                    number += 1
                    note(finish(worker, SegmentUse(f"s{number}", 1)), f"s{number}")
                else:
                    note(worker.finish("draw"))
            case "return" if sent:
                piece = chance.choice(sorted(sent))
                sent.remove(piece)
                actions = worker.hear(ReturnSegments((SegmentUse(piece, 1),)), attachment)
                assert actions == [TakeBack((SegmentUse(piece, 1),))]
                note(actions)
            case "invent":
                assert worker.hear(ReturnSegments((SegmentUse(f"s{number + 1}", 1),)), attachment) == []
            case "again" | "lose" as what:
                if what == "lose":
                    attachment += 1
                    note(worker.welcome(attachment))
                epoch += 1
                for each in "ab":
                    index[each] = 0
                    note(worker.hear(toy.initialize(each, epoch=epoch), attachment))
    assert number > 50
