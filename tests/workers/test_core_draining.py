"""The worker's core when it is asked to stop: what it finishes, what it refuses, and when it leaves."""

from __future__ import annotations

from typing import Any

from reelwire.messages import (
    Draining,
    Goodbye,
    Heartbeat,
    StageFailed,
    StageReleased,
    TaskDone,
    TaskStarted,
)
from reelwire.workers.events import ShutdownRequested


def test_an_idle_worker_leaves_at_once(rig: Any) -> None:
    """Goodbye, and exit code 0."""
    worker = rig().ready()
    worker.do(ShutdownRequested(worker.now))
    assert [type(message) for message in worker.sent] == [Goodbye]
    assert worker.stopped.exit_code == 0


def test_a_worker_drains_until_its_sessions_are_released(rig: Any, toy: Any) -> None:
    """It says so at once; tasks that wait or come are made, heartbeats go on, and the last release is the end."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.hear(toy.task(1))
    worker.sent.clear()
    worker.do(ShutdownRequested(worker.now))
    assert worker.sent == [Draining()]
    worker.finish("draw")
    worker.finish("draw")
    worker.tick(1.0)
    worker.hear(toy.task(2))
    worker.finish("draw")
    assert not any(isinstance(message, Goodbye) for message in worker.sent)
    worker.hear(toy.release())
    worker.finish("draw")
    kinds = [type(message) for message in worker.sent]
    assert kinds.count(TaskDone) == 3
    assert Heartbeat in kinds
    assert kinds[-2:] == [StageReleased, Goodbye]
    assert worker.stopped.exit_code == 0


def test_a_draining_worker_refuses_new_sessions_by_name(rig: Any, toy: Any) -> None:
    """As overload, so that they are placed elsewhere; nothing is dropped in silence."""
    worker = rig().ready().live()
    worker.do(ShutdownRequested(worker.now))
    worker.hear(toy.initialize("new"))
    refused = worker.sent[-1]
    assert isinstance(refused, StageFailed)
    assert (refused.session, refused.phase, refused.failure.kind) == ("new", "initialize", "overload")
    assert refused.failure.message == "draw: the worker was asked to stop"
    assert not worker.jobs
    worker.hear(toy.release("new"))
    assert worker.sent[-1] == StageReleased("new", "draw", 1, 1)
    assert worker.stopped is None


def test_a_session_that_nobody_can_release_does_not_hold_up_a_drain(rig: Any, toy: Any) -> None:
    """Its release raised and was given up."""
    worker = rig().ready().live()
    worker.do(ShutdownRequested(worker.now))
    worker.hear(toy.release())
    worker.fail("draw")
    assert worker.stopped.exit_code == 0


def test_a_new_attachment_ends_a_drain(rig: Any, toy: Any) -> None:
    """Whom the worker waited for is gone."""
    worker = rig().ready().live()
    worker.do(ShutdownRequested(worker.now))
    worker.welcome(2)
    assert worker.stopped.exit_code == 0


def test_a_drain_has_a_limit(rig: Any, toy: Any) -> None:
    """Then the worker leaves with exit code 1, and says which stages still had sessions."""
    worker = rig(drain_s=5.0).ready().live()
    worker.hear(toy.task(0))
    worker.do(ShutdownRequested(worker.now))
    for _ in range(5):
        worker.hear(Heartbeat())
        worker.tick(1.0)
    assert worker.stopped.exit_code == 1
    assert worker.sent[-1] == Goodbye("draw: sessions didn't end within 5 s")


def test_a_second_request_ends_it_now(rig: Any, toy: Any) -> None:
    """Without waiting for the running task."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.do(ShutdownRequested(worker.now))
    assert not worker.stopped
    worker.do(ShutdownRequested(worker.now))
    assert worker.stopped.exit_code == 1
    assert worker.sent[0] == TaskStarted("s", "draw", 1, 1, 0)


def test_builds_are_not_waited_for_at_the_end(rig: Any) -> None:
    """Loading weights for a process that leaves helps nobody."""
    worker = rig()
    worker.start()
    worker.welcome()
    worker.do(ShutdownRequested(worker.now))
    assert worker.stopped.exit_code == 0


def test_a_drain_whose_broker_is_gone_is_over(rig: Any, toy: Any) -> None:
    """There is nobody to tell the results."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.do(ShutdownRequested(worker.now))
    worker.tick(3.0)
    assert worker.stopped.exit_code == 0
