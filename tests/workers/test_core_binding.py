"""The worker's core: a control that was reserved is bound when its chunk begins, from the newest keys that came."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from reelwire.binding import keys_control
from reelwire.controls import KeyState
from reelwire.messages import Applied, Artifact, RunTask, StageFailed, TaskDone, TaskStarted

SESSIONS = ("a", "b")


def held(revision: int, *keys: str, **more: Any) -> KeyState:
    return KeyState(revision, keys, **more)


def started(worker: Any) -> list[tuple[int, Applied | None]]:
    return [(message.index, message.applied) for message in worker.sent if isinstance(message, TaskStarted)]


def bound(worker: Any) -> list[Applied]:
    return [applied for _, applied in started(worker) if applied is not None]


def test_streaming_15_a_reservation_is_bound_to_what_came_with_it(rig: Any, toy: Any) -> None:
    """With no newer register, the one that the task brought; said when it begins, and again with the result."""
    worker = rig().ready().live()
    worker.hear(toy.reserve(0, keys=held(3, "w")))
    applied = Applied("held", keys_control(("w",), reset_pose=False), 3)
    assert worker.sent == [TaskStarted("s", "draw", 1, 1, 0, applied)]
    worker.finish("draw")
    assert worker.sent[1] == TaskDone("s", "draw", 1, 1, 0, {}, {}, 0.1, applied)


def test_streaming_15_the_thread_gets_the_control_among_its_inputs(rig: Any, toy: Any) -> None:
    """The stage sees no difference between a reserved control and a fixed one; its other inputs stay."""
    worker = rig().ready().live()
    given = toy.reserve(0, keys=held(1, "w"))
    more = Artifact({"x": 1})
    worker.hear(RunTask("s", "toy", "draw", 1, 1, 0, {"more": more}, True, False, reservation=given.reservation))
    work = worker.jobs["draw"].work
    assert work.inputs == {"more": more, "control": keys_control(("w",), reset_pose=False)}


def test_streaming_15_keys_that_come_while_the_task_waits_are_applied(rig: Any, toy: Any) -> None:
    """A newer register replaces the task's own; an older and a repeated one change nothing."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.hear(toy.reserve(1, keys=held(3, "w")))
    for keys in (held(5, "d"), held(4, "s"), held(5, "a")):
        worker.hear(toy.set_keys(keys))
    assert started(worker) == [(0, None)]
    worker.finish("draw")
    assert started(worker)[1] == (1, Applied("held", keys_control(("d",), reset_pose=False), 5))


def test_streaming_15_keys_that_come_after_the_start_are_for_the_next_chunk(rig: Any, toy: Any) -> None:
    """Neither the running job nor its result changes; the next reservation has them, although its own are older."""
    worker = rig().ready().live()
    worker.hear(toy.reserve(0, keys=held(1, "w")))
    worker.hear(toy.set_keys(held(2, "d")))
    assert worker.jobs["draw"].work.inputs["control"].values["keys"] == ["w"]
    worker.finish("draw")
    assert worker.sent[-1].applied.revision == 1
    worker.hear(toy.reserve(1, keys=held(1, "w")))
    assert started(worker)[1] == (1, Applied("held", keys_control(("d",), reset_pose=False), 2))


def test_streaming_15_a_tap_is_applied_once(rig: Any, toy: Any) -> None:
    """It goes before what is held, and counts as consumed from then on; a reservation that says so gets the held keys."""
    worker = rig().ready().live()
    keys = held(4, "w", tap_revision=2, tap_keys=("d", "w"))
    worker.hear(toy.reserve(0, keys=keys, tap_revision=1))
    worker.finish("draw")
    worker.hear(toy.reserve(1, keys=keys, tap_revision=2))
    assert started(worker) == [
        (0, Applied("tap", keys_control(("d", "w"), reset_pose=False), 4, 2)),
        (1, Applied("held", keys_control(("w",), reset_pose=False), 4, 2)),
    ]


def test_streaming_15_keys_that_were_given_up_give_an_empty_control(rig: Any, toy: Any) -> None:
    """The chunk was promised, so it is made; nothing moves."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.hear(toy.reserve(1, keys=held(1, "w"), tap_revision=1))
    worker.hear(toy.set_keys(held(2, tap_revision=1)))
    worker.finish("draw")
    assert started(worker)[1] == (1, Applied("still", keys_control((), reset_pose=False), 2, 1))


def test_streaming_15_the_first_pose_is_asked_for_once(rig: Any, toy: Any) -> None:
    """By the chunk that follows the request; the reservation after it says that it was."""
    worker = rig().ready().live()
    worker.hear(toy.reserve(0, keys=held(2, "w", reset_pose_revision=1)))
    worker.finish("draw")
    worker.hear(toy.reserve(1, keys=held(2, "w", reset_pose_revision=1), pose_revision=1))
    asked = [(applied.control.values["reset_pose"], applied.pose_revision) for applied in bound(worker)]
    assert asked == [(True, 1), (False, 1)]


def test_streaming_15_an_explicit_control_is_never_touched(rig: Any, toy: Any) -> None:
    """Whatever keys came for the session."""
    worker = rig().ready().live()
    worker.hear(toy.set_keys(held(9, "w")))
    worker.hear(toy.task(0))
    assert worker.jobs["draw"].work == toy.task(0)
    assert started(worker) == [(0, None)]


def test_streaming_15_keys_belong_to_their_session_and_epoch(rig: Any, toy: Any) -> None:
    """Another session's, an older attempt's and a released session's are dropped; a new attempt begins with none."""
    worker = rig().ready().live("a", epoch=2).live("b")
    worker.hear(toy.set_keys(held(7, "d"), "b"))
    worker.hear(toy.set_keys(held(8, "d"), "a", epoch=1))
    worker.hear(toy.set_keys(held(8, "d"), "a", epoch=2, stage_epoch=2))
    worker.hear(toy.set_keys(held(8, "d"), "unknown"))
    worker.hear(toy.reserve(0, "a", epoch=2, keys=held(1, "w")))
    worker.hear(toy.set_keys(held(9, "s"), "a", epoch=2))
    worker.hear(toy.initialize("a", epoch=3))
    worker.hear(toy.reserve(0, "a", epoch=3, keys=held(1, "w")))
    worker.hear(toy.release("b"))
    worker.hear(toy.set_keys(held(8, "d"), "b"))
    while "draw" in worker.jobs:
        worker.finish("draw")
    assert [applied.revision for applied in bound(worker)] == [1, 1]
    assert worker.core.status()["dropped"] == {"stale": 1, "late": 3}


def test_streaming_15_an_unbound_reservation_dies_with_its_epoch(rig: Any, toy: Any) -> None:
    """Released or replaced before it began, it is neither bound nor answered."""
    worker = rig().ready().live("a").live("b")
    worker.hear(toy.task(0, "a"))
    worker.hear(toy.reserve(1, "a", keys=held(1, "w")))
    worker.hear(toy.reserve(0, "b", keys=held(1, "w")))
    worker.hear(toy.release("a"))
    worker.hear(toy.initialize("b", epoch=2))
    while "draw" in worker.jobs:
        worker.finish("draw")
    assert started(worker) == [(0, None)]


def test_streaming_15_a_reservation_of_a_failed_session_fails_unbound(rig: Any, toy: Any) -> None:
    """Like any task that waits behind the one that raised."""
    worker = rig().ready().live()
    worker.hear(toy.task(0))
    worker.hear(toy.reserve(1, keys=held(1, "w")))
    worker.fail("draw")
    assert started(worker) == [(0, None)]
    assert [message.index for message in worker.sent if isinstance(message, StageFailed)] == [0, 1]


class Player:
    """One session of a broker that keeps the rules: one reservation unbound at a time, registers sent while it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.keys = KeyState()
        self.begin()

    def begin(self) -> None:
        """A new attempt: everything but the register starts again."""
        self.epoch += 1
        self.next_index = 0
        self.unbound = False
        self.tap_revision = self.pose_revision = 0
        self.arrived = KeyState()
        self.taps: list[int] = []

    def press(self, chance: random.Random) -> None:
        """The next register: some keys down, now and then a one-shot or a request for the first pose."""
        before = self.keys
        taps = chance.random() < 0.4
        self.keys = KeyState(
            before.revision + 1,
            tuple(sorted(chance.sample("adsw", chance.randrange(3)))),
            before.tap_revision + taps,
            (chance.choice("adsw"),) if taps else chance.choice([before.tap_keys, ()]),
            before.reset_pose_revision + (chance.random() < 0.2),
        )


class Table:
    """A worker's core and two such sessions, over a wire that keeps its order and takes its time."""

    def __init__(self, rig: Any, toy: Any, seed: int) -> None:
        self.chance = random.Random(seed)
        self.toy = toy
        self.worker = rig(slots=4, mailbox=4).ready()
        self.players = {name: Player(name) for name in SESSIONS}
        self.attachment = 1
        self.on_the_way: deque[Any] = deque()
        self.heard = 0
        self.said: dict[tuple[str, int, int], Applied] = {}
        self.done: list[tuple[str, int, int]] = []
        for player in self.players.values():
            self.on_the_way.append(toy.initialize(player.name, epoch=player.epoch))

    def step(self) -> None:
        """One thing happens."""
        player = self.players[self.chance.choice(SESSIONS)]
        what = self.chance.choices(
            ["keys", "task", "deliver", "finish", "again", "lose"], weights=[6, 6, 10, 5, 0.2, 0.1]
        )[0]
        if what == "keys":
            player.press(self.chance)
            if player.unbound:
                self.on_the_way.append(self.toy.set_keys(player.keys, player.name, player.epoch))
        elif what == "task":
            self.admit(player)
        elif what == "deliver" and self.on_the_way:
            self.deliver(self.on_the_way.popleft())
        elif what == "finish" and "draw" in self.worker.jobs:
            self.worker.finish("draw")
        elif what == "again":
            self.begin_again(player)
        elif what == "lose":
            self.attachment += 1
            self.on_the_way.clear()
            self.worker.welcome(self.attachment)
            for each in self.players.values():
                self.begin_again(each)
        self.listen()

    def settle(self) -> None:
        """Everything arrives and everything is done."""
        while self.on_the_way:
            self.deliver(self.on_the_way.popleft())
        while "draw" in self.worker.jobs:
            self.worker.finish("draw")
        self.listen()

    def begin_again(self, player: Player) -> None:
        """The attempt is given up, and the next one begins; the register is that of the session and stays."""
        self.on_the_way.append(self.toy.release(player.name, epoch=player.epoch))
        player.begin()
        self.on_the_way.append(self.toy.initialize(player.name, epoch=player.epoch))

    def admit(self, player: Player) -> None:
        """The next control: by index, or a reservation if none is unbound."""
        index = player.next_index
        if self.chance.random() < 0.2:
            self.on_the_way.append(self.toy.task(index, player.name, epoch=player.epoch))
        elif not player.unbound:
            player.unbound = True
            consumed = {"tap_revision": player.tap_revision, "pose_revision": player.pose_revision}
            self.on_the_way.append(self.toy.reserve(index, player.name, player.epoch, keys=player.keys, **consumed))
        else:
            return
        player.next_index += 1

    def deliver(self, message: Any) -> None:
        """The worker hears it; what keys it knows then is noted."""
        player = self.players[message.session]
        keys = getattr(message, "keys", None) or getattr(getattr(message, "reservation", None), "keys", None)
        if keys is not None and message.epoch == player.epoch and keys.revision > player.arrived.revision:
            player.arrived = keys
        self.worker.hear(message, self.attachment)
        self.listen()

    def listen(self) -> None:
        """What the worker said since, as a broker reads it, with what a start must have applied."""
        for message in self.worker.sent[self.heard :]:
            if not isinstance(message, TaskStarted | TaskDone):
                continue
            player = self.players[message.session]
            key = (message.session, message.epoch, message.index)
            if isinstance(message, TaskDone):
                assert message.applied == self.said.get(key)
                self.done.append(key)
            elif message.applied is not None:
                assert key not in self.said, "bound twice"
                self.said[key] = message.applied
                if message.epoch == player.epoch:
                    self.judge(player, message.applied)
        self.heard = len(self.worker.sent)

    def judge(self, player: Player, applied: Applied) -> None:
        """The newest register that had arrived was read: an unconsumed one-shot, else what is held, else nothing."""
        keys = player.arrived
        assert applied.revision == keys.revision
        names = list(keys.held)
        if keys.tap_keys and keys.tap_revision > player.tap_revision:
            names = list(keys.tap_keys)
            player.taps.append(keys.tap_revision)
        assert applied.control.values["keys"] == names
        assert (applied.source == "still") == (not names)
        assert applied.control.values["reset_pose"] == (keys.reset_pose_revision > player.pose_revision)
        player.tap_revision, player.pose_revision = applied.tap_revision, applied.pose_revision
        player.unbound = False
        assert len(set(player.taps)) == len(player.taps), "a one-shot was applied twice"


@pytest.mark.seeds(40)
def test_streaming_15_whatever_the_schedule_the_newest_keys_that_came_are_applied(
    rig: Any, toy: Any, seed: int
) -> None:
    """Registers, tasks, results, new attempts and lost attachments in any order: each chunk says what it applied, once."""
    table = Table(rig, toy, seed)
    for _ in range(800):
        table.step()
    table.settle()
    assert len(table.said) > 20
    assert not any(player.unbound for player in table.players.values())
    assert "duplicate" not in table.worker.core.status()["dropped"]
