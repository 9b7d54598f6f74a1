"""Which rank is taken into which group, and by which sentence the others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.spec import Parameter

from .fake_groups import EARLIER, KIND, Hall, hello, in_state


@pytest.fixture
def hall() -> Hall:
    """A broker's eighth incarnation, with nobody attached."""
    return Hall()


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({"group": ""}, "malformed", "a group has a name"),
    "a long name": ({"group": "g" * 300}, "limit", "group has 300 characters; accepted: 256"),
    "a long fingerprint": ({"fingerprint": "f" * 300}, "limit", "fingerprint has 300 characters; accepted: 256"),
    "a name for no terminal": ({"group": "g\x1b[2J"}, "malformed", "group is 'g\\x1b[2J'; accepted: characters that"),
    "an empty world": ({"size": 0}, "malformed", "world is 0; accepted: 1 to 1024"),
    "a huge world": ({"size": 5000}, "malformed", "world is 5000; accepted: 1 to 1024"),
    "a rank beyond": ({"rank": 2}, "malformed", "rank is 2; accepted: 0 to 1"),
    "a rank below": ({"rank": -1}, "malformed", "rank is -1; accepted: 0 to 1"),
    "an epoch below 0": ({"epoch": -1}, "malformed", "epoch is -1; accepted: 0 to"),
    "an epoch beyond": ({"epoch": 1 << 63}, "malformed", "epoch is 9223372036854775808; accepted: 0 to"),
    "a sequence below 0": ({"sequence": -1}, "malformed", "sequence is -1"),
    "a process id below 0": ({"pid": -1}, "malformed", "pid is -1"),
    "another rank's kinds": ({"jobs": (KIND,)}, "malformed", "rank 1 says kinds of jobs; accepted: those of rank 0"),
    "another rank's jobs": ({"held": (m.HeldJob("j", 1),)}, "malformed", "rank 1 says jobs that it has"),
    "another rank's stages": ({"stages": hello("x").stages}, "malformed", "rank 1 says stages"),
    "a kind without a name": (
        {"rank": 0, "jobs": (replace(KIND, name=""),)}, "malformed", "a kind of job has an empty name",
    ),
    "a kind twice": ({"rank": 0, "jobs": (KIND, KIND)}, "malformed", "'t2v' is announced twice"),
    "a kind with a long name": (
        {"rank": 0, "jobs": (replace(KIND, name="k" * 300),)}, "limit", "a name of 300 characters; accepted: 256",
    ),
    "too many kinds": ({"rank": 0, "jobs": (KIND,) * 300}, "limit", "300 kinds of jobs; accepted: 256"),
    "kinds that no client could be told": (
        {"rank": 0, "jobs": tuple(replace(KIND, name=f"k{i}", description="d" * 9000) for i in range(30))},
        "limit", "take over 262144 bytes",
    ),
    "too many jobs": ({"rank": 0, "held": (m.HeldJob("j", 1),) * 1025}, "limit", "1025 jobs are there already"),
    "a job without an attempt": ({"rank": 0, "held": (m.HeldJob("j", 0),)}, "malformed", "attempt 0 at job 'j'"),
    "a job without a name": ({"rank": 0, "held": (m.HeldJob("", 1),)}, "malformed", "at job ''"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_groups_06_what_makes_no_sense_is_refused(hall: Hall, case: str) -> None:
    """Whatever is wrong with what a rank says of itself is named, and what is accepted."""
    said, code, sentence = REFUSED[case]
    objection = hall.objection(hello("w", **{"rank": 1, **said}))
    assert objection is not None
    assert objection[0] == code
    assert sentence in objection[1]


MIXED: dict[str, tuple[dict[str, Any], str]] = {
    "reelwire": ({"version": "0.1.9"}, "group 'g': version of reelwire is '0.1.9' at rank 1, '0.1.0' at rank 0"),
    "torch": ({"packages": {"torch": "2.12"}}, "version of torch is '2.12' at rank 1, '2.13' at rank 0"),
    "no torch": ({"packages": {}}, "version of torch is None at rank 1, '2.13' at rank 0"),
    "weights": ({"fingerprint": "abc"}, "fingerprint of weights and options is 'abc' at rank 1, '' at rank 0"),
    "device": ({"device": "cuda:0"}, "kind of device is 'cuda' at rank 1, 'cpu' at rank 0"),
    "pipeline": ({"specs": (replace(hello("x").specs[0], fps=8.0),)}, "rank 1 serves other pipelines than rank 0"),
    "world": ({"size": 4}, "group 'g' has 3 ranks, rank 1 counts 4"),
}


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("epoch", [0, EARLIER])
def test_groups_06_mixed_groups_are_refused(hall: Hall, case: str, epoch: int) -> None:
    """A rank that isn't like those that are there isn't taken, and the sentence says what differs."""
    said, sentence = MIXED[case]
    hall.rank(0, 3, epoch=epoch)
    objection = hall.objection(hello("w", 1, **{"size": 3, "epoch": epoch, **said}))
    assert objection is not None
    assert objection[0] == "conflict"
    assert sentence in objection[1]
    assert "accepted:" in objection[1]
    assert hall.objection(hello("w", 1, 3, epoch=epoch)) is None


@pytest.mark.parametrize("state", ["gathering", "rejoining", "opening", "forming", "formed", "waiting"])
def test_groups_06_a_rank_is_taken_once(hall: Hall, state: str) -> None:
    """Another worker under the same number waits until the first is gone, which may be a moment away."""
    group, leader, _ = in_state(hall, state)
    epoch = EARLIER if state == "rejoining" else 0
    objection = hall.objection(hello("another", 0, group.world, epoch=epoch))
    holder = "rank 0 of group 'g' is worker 'g0' (process 100 on this machine)"
    assert objection == ("limit", f"{holder}; accepted: one process for each rank, once that is gone")
    hall.drop(leader)
    assert hall.objection(hello("another", 0, group.world, epoch=epoch)) is None


@pytest.mark.parametrize("state", ["gathering", "rejoining", "opening", "forming", "formed", "waiting"])
@pytest.mark.parametrize("epoch", [0, EARLIER, EARLIER - 1])
@pytest.mark.parametrize("other", [{"pid": 999}, {"started": 999}, {"machine": "elsewhere"}])
def test_groups_04_a_second_process_does_not_replace_a_living_rank(
    hall: Hall, state: str, epoch: int, other: dict[str, Any]
) -> None:
    """Whoever comes under a rank's name, but as another process, is told whose the rank is; it gets in once that is gone."""
    group, leader, _ = in_state(hall, state)
    said = hello("g0", 0, group.world, epoch=epoch, **other)
    objection = hall.objection(said)
    assert objection is not None
    assert objection[0] == "limit"
    where = "another" if "machine" in other else "this"
    assert f"rank 0 of group 'g' is worker 'g0' (process 100 on {where} machine)" in objection[1]
    assert hall.groups.by_name["g"] is group
    leader.mute = "unreachable"  # its connection has just broken
    assert hall.objection(said) is None
    leader.mute = ""
    hall.drop(leader, "unreachable", returns=True)
    assert hall.objection(said) is None


def test_groups_04_a_process_of_a_later_epoch_has_its_rank(hall: Hall) -> None:
    """Where ranks come back to a broker, one of an epoch that is over keeps nobody out, though it is alive."""
    old = hall.rank(0, 3, epoch=EARLIER)
    hall.rank(0, 3, epoch=EARLIER + 1, pid=999)
    assert hall.heard(old) == [] or old.gone
    assert [peer.name for peer in hall.groups.by_name["g"].ranks.values()] == ["g0"]
    assert hall.groups.by_name["g"].epoch == EARLIER + 1


def test_groups_04_a_process_without_a_number_is_taken_for_the_same(hall: Hall) -> None:
    """A worker that is no group's rank, and says nothing of its process, replaces its old self as any worker does."""
    first = hall.attach(hello("w", group=None))
    second = hall.attach(hello("w", group=None))
    assert first.gone
    assert hall.groups.by_name["w"].leader is second


def test_groups_06_a_restarted_rank_may_differ_because_the_others_leave(hall: Hall) -> None:
    """Nobody is compared with ranks whose group ends when the newcomer is taken, or who leave for it."""
    group = hall.form()
    hall.rank(1, version="0.1.9")
    assert group.state == "over"
    hall.drop(hall.groups.by_name["g"].ranks[1])
    hall.rank(0, 3, epoch=EARLIER)
    hall.rank(1, 2, version="0.1.9")
    assert hall.groups.by_name["g"].world == 2


def test_groups_06_who_goes_with_whom(hall: Hall) -> None:
    """With one rank go all of a group that has begun, so what they serve keeps nobody from coming; others stay."""
    group, other = hall.form(3), hall.form(1, "other")
    late = hall.rank(1, 2, "late")
    numbers = [peer.attachment for peer in group.ranks.values()]
    new, back = (hello("g1", 1, 3, epoch=epoch) for epoch in (0, group.epoch))
    assert hall.groups.going_with(new, (numbers[1],)) == set(numbers)
    assert hall.groups.going_with(new, (numbers[2], other.leader.attachment)) == {*numbers, other.leader.attachment}
    assert hall.groups.going_with(new, (late.attachment,)) == {late.attachment}
    assert hall.groups.going_with(new, ()) == set()
    assert hall.groups.going_with(back, (numbers[1],)) == {numbers[1]}
    hall.drop(group.ranks[1], "unreachable", returns=True)
    assert hall.groups.going_with(back, ()) == set()
    assert hall.groups.going_with(new, ()) == {numbers[0], numbers[2]}


def test_groups_05_a_kind_means_the_same_in_all_groups(hall: Hall) -> None:
    """Another group may do the same kind; one that describes it differently isn't taken while the first is there."""
    hall.form(1, "a")
    changed = (replace(KIND, parameters=(Parameter("prompt", "string", "otherwise"),)),)
    other = replace(KIND, name="i2i")
    objection = hall.objection(hello("b0", 0, 1, "b", jobs=changed))
    assert objection is not None
    assert objection[0] == "conflict"
    assert "'t2v'" in objection[1]
    hall.rank(0, 1, "b", jobs=(other, KIND))
    assert hall.groups.kinds() == (KIND, other)
    assert hall.objection(hello("a0", 0, 1, "a", jobs=changed)) is not None
    hall.drop(hall.groups.by_name["b"].leader)
    assert hall.objection(hello("a0", 0, 1, "a", jobs=changed)) is None
    assert hall.groups.kinds() == (KIND,)


def test_groups_05_a_kind_goes_with_who_announced_it(hall: Hall) -> None:
    """Nobody is kept from describing a kind otherwise by a leader that it replaces, or that leaves for it."""
    changed = (replace(KIND, description="otherwise"),)
    hall.rank(0, 3, "a", name="w")
    hall.rank(1, 3, "a")
    assert hall.objection(hello("w", 0, 1, "b", jobs=changed)) is None
    assert hall.objection(hello("v", 0, 1, "b", jobs=changed)) is not None
    hall.rank(0, 2, "old", epoch=EARLIER, name="u", jobs=())
    hall.drop(hall.peers.workers["w"])
    hall.drop(hall.peers.workers["u"])
    hall.rank(0, 2, "old", epoch=EARLIER, name="u")
    assert hall.objection(hello("v", 0, 2, "old", epoch=EARLIER + 1, jobs=changed)) is None
