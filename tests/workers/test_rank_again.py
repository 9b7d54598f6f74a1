"""What a rank that follows says again over the link, as it may have been lost; and what it does when something was."""

from __future__ import annotations

from typing import Any

from reelwire.group_messages import Decision, Farewell, Have, Outcome, RankHello
from reelwire.workers.group_events import StepJob
from reelwire.workers.lockstep import AGAIN_S

from .group_rig import EPOCH, FollowRig, LeadRig, initialize, task
from .test_rank import code, stop

HELLO = RankHello(EPOCH, b"secret", 1)


def test_groups_02_a_hello_is_said_until_the_leader_decides_something(toy: Any) -> None:
    """By that it shows that it has heard it."""
    rig = FollowRig(toy.spec).greeted()
    rig.tick(3 * AGAIN_S)
    assert set(rig.told) == {HELLO}
    assert 2 <= len(rig.told) <= 3
    rig.told.clear()
    rig.decide("form", round=1)
    rig.tick(3 * AGAIN_S)
    assert not rig.told


def test_groups_02_what_a_rank_has_is_said_until_it_is_asked_for_or_dropped(toy: Any) -> None:
    """Each body, now and then, also while others come all the time."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("form", round=1)
    rig.done()
    rig.told.clear()
    rig.hear(initialize(1), task(2), task(3, 1))
    rig.told.clear()
    for number in range(4, 10):
        rig.tick(AGAIN_S / 2)
        rig.hear(task(number, number))
    assert rig.told.count(Have(1)) >= 2
    rig.decide("initialize", sequence=1, below=9)
    rig.done()
    rig.told.clear()
    rig.tick(2 * AGAIN_S)
    assert set(rig.told) == {Have(9)}


def test_groups_11_a_wish_to_stop_is_said_until_all_leave(toy: Any) -> None:
    """Else the rank would end in an error after its drain."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("form", round=1)
    rig.done()
    stop(rig)
    rig.told.clear()
    rig.tick(2 * AGAIN_S)
    assert set(rig.told) == {Farewell("asked to stop", in_order=True)}
    rig.decide("leave")
    rig.done()
    rig.told.clear()
    rig.tick(AGAIN_S)
    assert not rig.told


def test_groups_02_a_decision_that_was_lost_comes_again(toy: Any) -> None:
    """What comes behind it isn't done before; then both are."""
    rig = FollowRig(toy.spec).greeted()
    rig.decide("step")
    rig.done()
    lost, behind = Decision(2, "step"), Decision(3, "step")
    rig.link(behind)
    assert rig.order is None
    for decision in (lost, behind):
        rig.link(decision)
    for _ in range(2):
        assert isinstance(rig.order, StepJob)
        rig.done()
    assert rig.told == [Outcome(1), Outcome(2), Outcome(3)]
    assert code(rig) is None


def test_groups_02_a_leader_says_again_what_is_not_answered(toy: Any) -> None:
    """In order, and no more when all have answered it."""
    rig = LeadRig(toy.spec, world=3).formed()
    rig.running()
    rig.done(stage="high", step=1, steps=9)
    first, second = rig.told[-2:]
    said = len(rig.told)
    rig.answer(1)
    rig.tick(2 * AGAIN_S)
    assert rig.told[said:] == [first, second] * 2
    rig.answer(2)
    said = len(rig.told)
    rig.tick(AGAIN_S)
    assert rig.told[said:] == [second]
    rig.answer()
    said = len(rig.told)
    rig.tick(2 * AGAIN_S)
    assert len(rig.told) == said, "only this rank's own thread is waited for"
