"""The worker's core: hello, heartbeats, losing and finding the broker, and the end."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import wire
from reelwire.messages import (
    Goodbye,
    Heartbeat,
    Rejected,
    StageFailed,
    StageReady,
    Welcome,
    WorkerHello,
)
from reelwire.workers.actions import BuildStage, Connect, Ready, Send, SetLimits
from reelwire.workers.attachment import HELLO_BACKOFF_MAX_S, HELLO_RETRY_S, HELLO_STEADY_S
from reelwire.workers.events import Malformed, OutboxFull


def hellos(rig: Any) -> int:
    return sum(isinstance(message, WorkerHello) for message in rig.sent)


def test_streaming_38_the_first_message_says_version_specs_and_stages(rig: Any, toy: Any) -> None:
    """Before anything is loaded the worker says who it is, and connects first."""
    worker = rig(slots=3, mailbox=2)
    actions = worker.start()
    assert isinstance(actions[0], Connect)
    hello = actions[1].message
    assert (actions[1].attachment, hello.version, hello.name, hello.device) == (0, "1.2.3", "w", "cpu")
    assert hello.specs == (toy.spec,)
    assert [(offer.stage, offer.slots, offer.mailbox) for offer in hello.stages] == [("draw", 3, 2), ("show", 3, 2)]
    assert hello.packages == {"numpy": "9"}
    assert not worker.jobs


def test_streaming_38_hello_and_welcome_say_what_either_side_accepts(rig: Any) -> None:
    """The hello names the worker's limits; the broker's go to the stages, which make nothing larger."""
    worker = rig(frame_bytes_max=5000)
    hello = worker.start()[1].message
    assert hello.limits["frame_bytes_max"] == 5000
    assert hello.limits["header_bytes_max"] == wire.Limits().header_bytes_max
    said = {"frame_bytes_max": 7000, "sessions_max": 3, "header_bytes_max": 0}
    actions = worker.hear(Welcome("w", "1.2.3", 1.0, 3, said))
    assert [action.limits for action in actions if isinstance(action, SetLimits)] == [wire.Limits(frame_bytes_max=7000)]


def test_a_worker_may_serve_some_stages_only(rig: Any) -> None:
    """`stages` picks; the spec is announced whole."""
    worker = rig(stages=("show",))
    hello = worker.start()[1].message
    assert [offer.stage for offer in hello.stages] == ["show"]


def test_streaming_32_the_long_silence_is_announced_before_the_weights_are_loaded(rig: Any) -> None:
    """The heartbeat that says `busy_for_s` goes out before the builds start, and again until the last has ended."""
    worker = rig(busy_for_s=20.0)
    worker.start()
    actions = worker.welcome()
    kinds = [type(action).__name__ for action in actions]
    assert kinds.index("Send") < kinds.index("Run")
    assert [action.message for action in actions if isinstance(action, Send)] == [Heartbeat(20.0)]
    assert [type(job.work) for job in worker.jobs.values()] == [BuildStage, BuildStage]
    worker.finish("draw")
    assert worker.tick(1.0)[0].message == Heartbeat(20.0)
    worker.finish("show")
    assert worker.tick(1.0)[0].message == Heartbeat(0.0)


def test_streaming_38_ready_is_said_when_all_weights_are_loaded(rig: Any) -> None:
    """Each stage is announced as it is built; the process says once that it is ready."""
    worker = rig()
    worker.start()
    worker.welcome()
    first = worker.finish("show")
    assert [action.message for action in first if isinstance(action, Send)] == [StageReady("toy", "show", 500)]
    assert not any(isinstance(action, Ready) for action in first)
    last = worker.finish("draw")
    assert [action.name for action in last if isinstance(action, Ready)] == ["w"]


def test_streaming_32_heartbeats_go_out_at_the_interval_that_the_broker_said(rig: Any) -> None:
    """Also while a stage computes; `wake_at` is the next one."""
    worker = rig().ready().live()
    worker.hear(Heartbeat())
    worker.tick(1.0)
    assert worker.sent == [Heartbeat(0.0)]
    assert worker.core.wake_at == worker.now + 1.0
    worker.tick(0.5)
    assert worker.sent == [Heartbeat(0.0)]


def test_streaming_32_any_message_counts_as_life(rig: Any, toy: Any) -> None:
    """A broker that sends work is alive."""
    worker = rig().ready()
    for index in range(4):
        worker.tick(2.0)
        worker.hear(toy.initialize(f"s{index}", epoch=index + 1))
    assert not any(isinstance(message, WorkerHello) for message in worker.sent)


def test_streaming_32_a_silent_broker_is_lost_and_greeted_again(rig: Any) -> None:
    """After three intervals without a word: the sessions are dropped, their caches released, and hello goes out."""
    worker = rig().ready().live()
    worker.tick(2.9)
    assert not hellos(worker)
    actions = worker.tick(0.1)
    assert any(isinstance(action, Connect) for action in actions)
    assert hellos(worker) == 1
    assert worker.jobs["draw"].attachment == 0
    worker.finish("draw")
    assert worker.core.status()["sessions"] == {"draw": [], "show": []}


def test_streaming_32_a_broker_that_said_it_is_busy_is_waited_for(rig: Any) -> None:
    """`busy_for_s` moves the deadline."""
    worker = rig().ready()
    worker.hear(Heartbeat(10.0))
    worker.tick(9.0)
    assert not hellos(worker)
    worker.tick(1.0)
    assert hellos(worker) == 1


def test_streaming_32_silence_is_not_judged_before_the_backlog_is_read(rig: Any) -> None:
    """A worker that was stopped itself reads first."""
    worker = rig().ready()
    worker.tick(60.0, drained=False)
    assert not hellos(worker)
    worker.hear(Heartbeat())
    worker.tick()
    assert not hellos(worker)


def test_streaming_33_messages_of_another_attachment_are_dropped(rig: Any, toy: Any) -> None:
    """They are counted, and no sign of life."""
    worker = rig().ready()
    worker.tick(2.0)
    worker.hear(toy.initialize(), attachment=2)
    worker.hear(Heartbeat(50.0), attachment=7)
    assert not worker.jobs
    assert worker.core.counters["foreign_attachment"] == 2
    worker.tick(1.0)
    assert hellos(worker) == 1


def test_streaming_33_a_new_attachment_starts_with_empty_stages(rig: Any, toy: Any) -> None:
    """A later Welcome replaces the attachment: stages are announced again once nothing old is left in them."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    assert "draw" in worker.jobs
    worker.welcome(attachment=5)
    assert [m for m in worker.sent if isinstance(m, StageReady)] == [StageReady("toy", "show", 500)]
    worker.sent.clear()
    worker.finish("draw")
    assert not worker.sent, "what the old attachment asked for is told to nobody"
    worker.finish("draw")
    assert worker.sent == [StageReady("toy", "draw", 500)]
    actions = worker.hear(toy.initialize(), attachment=5)
    assert actions, "the session may come again"
    worker.finish("draw")
    assert worker.sent[-1].session == "s"


def test_streaming_33_an_older_welcome_changes_nothing(rig: Any) -> None:
    """Attachment numbers only rise."""
    worker = rig()
    worker.start()
    worker.welcome(attachment=4)
    assert worker.welcome(attachment=3) == []
    assert worker.core.status()["attachment"] == 4


def test_streaming_33_a_restarted_broker_may_give_the_same_number(rig: Any, toy: Any) -> None:
    """It counts from one again; what still runs for the broker before isn't told to it."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.hear(Rejected("unknown_peer", "who are you"), attachment=0)
    worker.sent.clear()
    worker.welcome(attachment=1)
    assert [m.stage for m in worker.sent if isinstance(m, StageReady)] == ["show"]
    worker.sent.clear()
    worker.finish("draw")
    assert not worker.sent
    worker.finish("draw")
    assert worker.sent == [StageReady("toy", "draw", 500)]


def test_streaming_33_while_greeting_nothing_but_hellos_is_sent(rig: Any, toy: Any) -> None:
    """Neither heartbeats nor results of before."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.tick(3.0)
    worker.sent.clear()
    worker.finish("draw")
    worker.tick(1.0)
    assert not worker.sent
    worker.tick(HELLO_RETRY_S - 1.0)
    assert hellos(worker) == 1
    assert len(worker.sent) == 1


def test_streaming_33_a_rejected_worker_says_hello_again_and_slows_down(rig: Any) -> None:
    """Two processes of one name must not push each other out at full speed."""
    worker = rig().ready()
    pauses = []
    for attachment in range(2, 12):
        worker.sent.clear()
        worker.hear(Rejected("unknown_peer", "who are you"), attachment=0)
        began = worker.now
        while not hellos(worker):
            worker.now = worker.core.wake_at
            worker.tick()
        pauses.append(worker.now - began)
        worker.welcome(attachment)
    assert pauses[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == HELLO_BACKOFF_MAX_S
    for _ in range(int(HELLO_STEADY_S)):
        worker.tick(1.0)
        worker.hear(Heartbeat(), attachment=11)
    worker.sent.clear()
    worker.hear(Rejected("unknown_peer", "who are you"), attachment=0)
    assert hellos(worker) == 1


def test_groups_07_a_worker_comes_at_once_to_each_broker_that_is_started_anew(rig: Any) -> None:
    """However often the one before died: it is another broker that doesn't know the worker, and not another worker."""
    worker = rig().ready()
    for incarnation in range(2, 8):
        worker.sent.clear()
        worker.hear(Rejected("unknown_peer", "say hello first"), attachment=0)
        assert hellos(worker) == 1
        worker.welcome(1, incarnation=incarnation)


def test_a_rejection_of_before_the_hello_is_ignored(rig: Any) -> None:
    """While greeting, an unknown peer is what one is; only if no welcome ever comes it was about the hello, and is told."""
    worker = rig(connect_timeout_s=30.0)
    worker.start()
    assert worker.hear(Rejected("unknown_peer", "late"), attachment=0) == []
    assert worker.hear(Rejected("malformed", "late"), attachment=0) == []
    worker.hear(Rejected("version", "no"), attachment=3)
    assert not worker.stopped, "said to an attachment that isn't ours"
    worker.tick(30.0)
    assert worker.stopped.reason == "the broker hasn't taken this worker for 30 s; it said last: late"


def test_a_full_broker_is_asked_again(rig: Any) -> None:
    """`limit` isn't the end."""
    worker = rig()
    worker.start()
    worker.sent.clear()
    for _ in range(3):
        worker.hear(Rejected("limit", "too many peers"), attachment=0)
    worker.tick(1.9)
    assert not hellos(worker)
    worker.tick(0.2)
    assert hellos(worker) == 1


def test_groups_04_a_worker_that_is_refused_again_and_again_ends_with_the_sentence(rig: Any) -> None:
    """It tries as long as it may, then says what the broker said, and not that nobody answers; taken meanwhile, it stays."""
    worker = rig(connect_timeout_s=30.0)
    worker.start()
    for _ in range(29):
        if hellos(worker):
            worker.sent.clear()
            worker.hear(Rejected("limit", "rank 0 of group 'g' is worker 'g0'"), attachment=0)
        worker.tick(1.0)
    assert not worker.stopped
    worker.tick(1.1)
    assert worker.stopped.exit_code == 3
    assert worker.stopped.reason == (
        "the broker hasn't taken this worker for 30 s; it said last: rank 0 of group 'g' is worker 'g0'"
    )
    other = rig(connect_timeout_s=30.0)
    other.start()
    other.hear(Rejected("limit", "rank 0 of group 'g' is worker 'g0'"), attachment=0)
    other.welcome(1)
    other.tick(60.0)
    other.tick(31.0)
    assert "no broker answers" in other.stopped.reason


@pytest.mark.parametrize(
    ("code", "exit_code"), [("version", 3), ("conflict", 2)], ids=["other version", "other spec of that name"]
)
def test_streaming_38_a_worker_that_does_not_fit_ends_with_the_sentence(rig: Any, code: str, exit_code: int) -> None:
    """The broker's words are the reason."""
    worker = rig()
    worker.start()
    worker.hear(Rejected(code, "broker has 2.0.0, you have 1.2.3"), attachment=0)
    assert (worker.stopped.exit_code, worker.stopped.reason) == (exit_code, "broker has 2.0.0, you have 1.2.3")
    assert worker.core.wake_at is None
    assert worker.tick(100.0) == []


def test_streaming_38_a_broker_of_another_version_is_refused_with_both_named(rig: Any) -> None:
    """Major and minor must be the same; the rest may differ."""
    worker = rig()
    worker.start()
    worker.welcome(version="1.3.0")
    assert worker.stopped.exit_code == 3
    assert "1.3.0" in worker.stopped.reason
    assert "1.2.3" in worker.stopped.reason


def test_streaming_38_another_protocol_ends_the_worker(rig: Any) -> None:
    """The frames themselves say that the versions don't fit."""
    worker = rig()
    worker.start()
    worker.do(Malformed(worker.now, "version", "the peer speaks protocol 2, this side 1"))
    assert worker.stopped.exit_code == 3


def test_streaming_34_what_is_no_message_changes_nothing(rig: Any) -> None:
    """It is counted and logged."""
    worker = rig().ready()
    worker.do(Malformed(worker.now, "malformed", "header is not msgpack"))
    assert worker.core.counters["malformed"] == 1
    assert not worker.sent
    assert worker.stopped is None


@pytest.mark.parametrize(("attachment", "heartbeat_s", "missed"), [(0, 1.0, 3), (1, 0.0, 3), (1, 1.0, 0), (1, -1.0, 3)])
def test_streaming_34_a_welcome_without_sense_is_dropped(
    rig: Any, attachment: int, heartbeat_s: float, missed: int
) -> None:
    """An interval of nothing would make the loop spin."""
    worker = rig()
    worker.start()
    worker.hear(Welcome("w", "1.2.3", heartbeat_s, missed, {}), attachment)
    assert worker.core.status()["state"] == "greeting"
    assert worker.core.counters["malformed"] == 1


def test_no_broker_ends_the_worker_after_the_limit(rig: Any) -> None:
    """Hello is repeated over new connections until then; exit code 3 says that nobody answered."""
    worker = rig(connect_timeout_s=10.0)
    worker.start()
    while worker.stopped is None:
        worker.now = worker.core.wake_at
        worker.tick()
    assert worker.now == 110.0
    assert hellos(worker) == 4
    assert worker.stopped.exit_code == 3
    assert "tcp://127.0.0.1:7461" in worker.stopped.reason


def test_the_limit_counts_from_the_loss_of_the_broker(rig: Any) -> None:
    """A worker of many hours waits as long as a new one."""
    worker = rig(connect_timeout_s=10.0).ready()
    for _ in range(100):
        worker.tick(1.0)
        worker.hear(Heartbeat())
    worker.tick(3.0)
    lost_at = worker.now
    while worker.stopped is None:
        worker.now = worker.core.wake_at
        worker.tick()
    assert worker.now == lost_at + 10.0


def test_a_worker_that_may_not_reconnect_ends_with_its_broker(rig: Any) -> None:
    """`reconnect = false`: loss is the end."""
    worker = rig(reconnect=False).ready()
    worker.tick(3.0)
    assert worker.stopped.exit_code == 3


def test_a_broker_that_leaves_is_waited_for(rig: Any) -> None:
    """Its Goodbye is a loss that is known at once."""
    worker = rig().ready().live()
    worker.hear(Goodbye("restart"))
    assert hellos(worker) == 1
    assert worker.jobs["draw"].attachment == 0


def test_streaming_35_a_full_outbox_is_a_lost_broker(rig: Any) -> None:
    """What waits is dropped with the connection."""
    worker = rig().ready()
    actions = worker.do(OutboxFull(worker.now))
    assert any(isinstance(action, Connect) for action in actions)
    assert worker.do(OutboxFull(worker.now)) == [], "once"


@pytest.mark.parametrize(("kind", "exit_code"), [("request", 2), ("stage", 1)])
def test_a_failing_build_ends_the_worker(rig: Any, kind: str, exit_code: int) -> None:
    """Wrong settings are exit code 2, everything else 1; the broker gets a Goodbye with the reason."""
    worker = rig()
    worker.start()
    worker.welcome()
    worker.fail("draw", kind, "no such file")
    assert worker.stopped.exit_code == exit_code
    assert "no such file" in worker.stopped.reason
    assert isinstance(worker.sent[-1], Goodbye)
    assert "draw" in worker.sent[-1].reason


def test_weights_are_loaded_once(rig: Any) -> None:
    """A second Welcome starts no second build, and finds the first one still running."""
    worker = rig()
    worker.start()
    worker.welcome(1)
    worker.welcome(2)
    for stage in ("draw", "show"):
        worker.finish(stage)
    assert [message.stage for message in worker.sent if isinstance(message, StageReady)] == ["draw", "show"]
    assert not worker.jobs


def test_streaming_22_a_stage_that_hangs_after_its_worker_was_given_up_ends_the_process(rig: Any, toy: Any) -> None:
    """Only a new process gets rid of a thread that never returns; the hung stage isn't announced again."""
    worker = rig(stuck_s=20.0).ready().live()
    worker.hear(toy.task(0))
    worker.sent.clear()
    worker.hear(Rejected("unknown_peer", "a stage hung"), attachment=0)
    worker.welcome(2)
    assert [m.stage for m in worker.sent if isinstance(m, StageReady)] == ["show"]
    for _ in range(20):
        worker.hear(Heartbeat(), attachment=2)
        worker.tick(1.0)
    assert worker.stopped.exit_code == 1
    assert worker.stopped.reason.startswith("draw")


def test_a_stage_that_comes_back_in_time_is_used_again(rig: Any, toy: Any) -> None:
    """A slow stage is no hung one."""
    worker = rig(stuck_s=20.0).ready().live()
    worker.hear(toy.task(0))
    worker.welcome(2)
    worker.tick(2.0)
    worker.hear(Heartbeat(), attachment=2)
    worker.finish("draw")
    worker.finish("draw")
    for _ in range(40):
        worker.hear(Heartbeat(), attachment=2)
        worker.tick(1.0)
    assert worker.stopped is None
    assert not any(isinstance(message, StageFailed) for message in worker.sent)
