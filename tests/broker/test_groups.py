"""Worker groups as the broker forms and ends them: every event in every state, epochs, and who is taken into which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.groups import Group
from reelwire.spec import Parameter

from .fake_groups import EARLIER, KIND, Hall, hello

NEWER = EARLIER + 1


@pytest.fixture
def hall() -> Hall:
    """A broker's eighth incarnation, with nobody attached."""
    return Hall()


def in_state(hall: Hall, state: str) -> tuple[Any, Any, Any]:
    """A group of two or, while it gathers, of three ranks, of which two are there; with its ranks 0 and 1."""
    if state in ("gathering", "rejoining"):
        epoch = EARLIER if state == "rejoining" else 0
        leader, other = (hall.rank(rank, 3, epoch=epoch) for rank in (0, 1))
    else:
        leader, other = hall.rank(0), hall.rank(1)
    group: Any = hall.groups.by_name["g"]
    if state in ("forming", "formed"):
        hall.say(leader, m.GroupOpened(group.epoch, "ipc:///link", "host:2"))
    if state == "formed":
        hall.say(leader, m.GroupFormed(group.epoch))
    return group, leader, other


STATES = ("gathering", "rejoining", "opening", "forming", "formed")
EVENTS: dict[str, Any] = {
    "leader says opened": lambda hall, group, leader, other: hall.say(leader, m.GroupOpened(group.epoch, "l", "s")),
    "leader says formed": lambda hall, group, leader, other: hall.say(leader, m.GroupFormed(group.epoch)),
    "other says opened": lambda hall, group, leader, other: hall.say(other, m.GroupOpened(group.epoch, "l", "s")),
    "other says formed": lambda hall, group, leader, other: hall.say(other, m.GroupFormed(group.epoch)),
    "leader says lost": lambda hall, group, leader, other: hall.say(leader, m.RanksLost(group.epoch, (1,), "dead")),
    "other says lost": lambda hall, group, leader, other: hall.say(other, m.RanksLost(group.epoch, (0,), "dead")),
    "an older epoch": lambda hall, group, leader, other: hall.say(leader, m.GroupFormed(EARLIER - 1)),
    "lost of an older epoch": lambda hall, group, leader, other: hall.say(other, m.RanksLost(EARLIER - 1, (0,), "old")),
    "leader is dropped": lambda hall, group, leader, other: hall.drop(leader),
    "other is dropped": lambda hall, group, leader, other: hall.drop(other),
    "other says hello again": lambda hall, group, leader, other: hall.rank(1, group.world, epoch=0),
    "too slow": lambda hall, group, leader, other: hall.advance(100.0),
}
STALE = {"": "stale_epochs"}
"""What is only counted, under which name."""
PROTOCOL = {"": "out_of_protocol"}
OVER = "over"
DISBANDED: tuple[str, ...] = ()
"""The ranks that are left of a group that gathers."""
TABLE: dict[str, tuple[Any, ...]] = {
    #                          gathering      rejoining   opening    forming    formed
    "leader says opened":     (STALE,         PROTOCOL,   "forming", PROTOCOL,  PROTOCOL),
    "leader says formed":     (STALE,         PROTOCOL,   PROTOCOL,  "formed",  PROTOCOL),
    "other says opened":      (PROTOCOL,      PROTOCOL,   PROTOCOL,  PROTOCOL,  PROTOCOL),
    "other says formed":      (PROTOCOL,      PROTOCOL,   PROTOCOL,  PROTOCOL,  PROTOCOL),
    "leader says lost":       (STALE,         DISBANDED,  OVER,      OVER,      OVER),
    "other says lost":        (STALE,         DISBANDED,  OVER,      OVER,      OVER),
    "an older epoch":         (STALE,         STALE,      STALE,     STALE,     STALE),
    "lost of an older epoch": (STALE,         STALE,      STALE,     STALE,     STALE),
    "leader is dropped":      ((1,),          (1,),       OVER,      OVER,      OVER),
    "other is dropped":       ((0,),          (0,),       OVER,      OVER,      OVER),
    "other says hello again": ((0, 1),        (1,),       OVER,      OVER,      OVER),
    "too slow":               ((0, 1),        DISBANDED,  OVER,      OVER,      "formed"),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", TABLE)
def test_groups_04_every_event_in_every_state(hall: Hall, state: str, event: str) -> None:
    """What doesn't fit the state is counted and changes nothing; the rest leads where the table says."""
    group, leader, other = in_state(hall, state)
    before, told = group.state, {peer.attachment: len(hall.heard(peer)) for peer in (leader, other)}
    expected = TABLE[event][STATES.index(state)]
    EVENTS[event](hall, group, leader, other)
    if isinstance(expected, dict):
        assert hall.desk.counters[expected[""]] == 1
        assert group.state == before
        assert {peer.attachment: len(hall.heard(peer)) for peer in (leader, other)} == told
    elif isinstance(expected, tuple):
        assert group.state == "gathering"
        assert tuple(group.ranks) == expected
        assert ("g" in hall.groups.by_name) == bool(expected)
        assert not hall.over
    else:
        assert group.state == expected
        assert (hall.over != []) == (expected == OVER)


@pytest.mark.parametrize("state", STATES[2:])
@pytest.mark.parametrize("who", [0, 1])
def test_groups_04_a_lost_rank_ends_the_epoch_for_all(hall: Hall, state: str, who: int) -> None:
    """Whoever is left is told which rank is dead, and is dropped; the group is forgotten, and its end is noted once."""
    group, *ranks = in_state(hall, state)
    hall.drop(ranks[who], "not heard for 3.0 s")
    left = ranks[1 - who]
    reason = f"rank {who} (g{who}) is gone: not heard for 3.0 s"
    assert hall.heard(left)[-1] == m.EndGroup(group.epoch, (who,), reason)
    assert not any(isinstance(word, m.EndGroup) for word in hall.heard(ranks[who]))
    assert left.gone
    assert hall.groups.by_name == {}
    assert hall.over == [(group, reason)]
    assert hall.groups.wake_at is None


def test_groups_04_the_epoch_rises_and_the_replacement_is_met(hall: Hall) -> None:
    """The ranks of a group that is over come back as new ones, and meet in a higher epoch."""
    first = hall.form()
    hall.drop(first.ranks[1])
    second = hall.form()
    assert second is not first
    assert second.epoch > first.epoch > EARLIER
    assert second.epoch >> 32 == first.epoch >> 32 == 8


def test_groups_04_forming_says_to_each_what_it_needs(hall: Hall) -> None:
    """Rank 0 learns who belongs to the group, the others where it is found; all get one secret, another each time."""
    leader = hall.rank(0, 3)
    assert hall.heard(leader) == []
    others = [hall.rank(rank, 3) for rank in (2, 1)]
    group = hall.groups.by_name["g"]
    lead = hall.heard(leader)[-1]
    members = tuple(m.Member(rank, "host", 100 + rank) for rank in range(3))
    assert lead == m.LeadGroup(group.epoch, lead.secret, members)
    assert len(lead.secret) == 32
    assert [hall.heard(peer) for peer in others] == [[], []]
    hall.say(leader, m.GroupOpened(group.epoch, "tcp://host:1", "host:2"))
    join = m.JoinGroup(group.epoch, lead.secret, members, "tcp://host:1", "host:2")
    assert [hall.heard(peer) for peer in others] == [[join], [join]]
    hall.say(leader, m.GroupFormed(group.epoch))
    assert hall.formed == [group]
    assert hall.desk.is_job_due
    assert hall.desk.freed
    again = Hall(8)
    for rank in (1, 0, 2):
        again.rank(rank, 3)
    other = next(word for told in again.told.values() for word in told if isinstance(word, m.LeadGroup))
    hall.drop(leader)
    hall.rank(0, 3)
    hall.rank(1, 3)
    third = hall.rank(2, 3).group
    assert third is not None
    assert len({lead.secret, third.secret}) == 2
    assert other.epoch == lead.epoch


def test_groups_04_a_dead_rank_that_the_leader_names_is_told_to_the_others(hall: Hall) -> None:
    """Of the ranks that are said to be lost only those that exist are passed on, with the reason."""
    group = hall.form(3)
    ranks = dict(group.ranks)
    hall.say(ranks[0], m.RanksLost(group.epoch, (2, 2, 99, -1), "its process is gone"))
    word = m.EndGroup(group.epoch, (2,), "ranks 2 are lost: its process is gone")
    assert [hall.heard(peer)[-1] for peer in ranks.values()] == [word] * 3
    assert all(peer.gone for peer in ranks.values())


def test_groups_04_who_meets_too_slowly_is_given_up(hall: Hall) -> None:
    """An epoch that isn't formed in time is over for all; while a rank says that it is busy its time hasn't begun."""
    group, leader, other = in_state(hall, "forming")
    hall.advance(50.0)
    other.busy_until = hall.desk.now + 200.0
    hall.advance(20.0)
    assert group.state == "forming"
    assert hall.groups.wake_at == pytest.approx(1000.0 + 50.0 + 200.0 + 60.0)
    hall.advance(230.0)
    assert group.state == "forming"
    hall.advance(11.0)
    assert group.state == "over"
    assert hall.heard(leader)[-1] == m.EndGroup(group.epoch, (), "its ranks didn't meet within 60 s")


def test_groups_04_a_leaders_address_is_bounded(hall: Hall) -> None:
    """What others are told to connect to has a bound; beyond it the epoch is over."""
    group, leader, _ = in_state(hall, "opening")
    hall.say(leader, m.GroupOpened(group.epoch, "tcp://" + "x" * 300, "host:2"))
    assert group.state == "over"
    assert "256 characters" in hall.over[0][1]


def test_groups_04_a_group_of_one_is_formed_like_any_other(hall: Hall) -> None:
    """A worker that does jobs and says no group is told to lead itself, and is formed when it says so."""
    peer = hall.attach(hello("w", group=None))
    group = hall.groups.by_name["w"]
    assert peer.group is group
    assert (group.world, group.state) == (1, "opening")
    assert hall.heard(peer) == [m.LeadGroup(group.epoch, group.secret, (m.Member(0, "", 0),))]
    hall.say(peer, m.GroupFormed(group.epoch))
    assert group.takes_jobs
    assert hall.groups.kinds() == (KIND,)


def test_groups_04_a_group_of_one_may_open_first(hall: Hall) -> None:
    """It may also say where it could be found, as any leader does."""
    leader = hall.rank(0, 1)
    group: Any = hall.groups.by_name["g"]
    hall.say(leader, m.GroupOpened(group.epoch, "", ""))
    assert group.state == "forming"
    hall.say(leader, m.GroupFormed(group.epoch))
    assert group.state == "formed"


def test_groups_04_a_worker_without_jobs_is_no_group(hall: Hall) -> None:
    """One that only serves a stream by itself belongs to none, and is told nothing."""
    said = hello("w", group=None, jobs=())
    alone = replace(said, stages=tuple(replace(offer, grouped=False) for offer in said.stages))
    peer = hall.attach(alone)
    assert peer.group is None
    assert hall.groups.by_name == {}
    for message in (m.GroupOpened(1, "", ""), m.GroupFormed(1), m.RanksLost(1, (0,), "")):
        hall.say(peer, message)
    assert hall.desk.counters["out_of_protocol"] == 3
    hall.drop(peer)


# --- after a broker's restart ------------------------------------------------------------------------------------------


def test_groups_04_a_group_that_has_formed_goes_on_under_the_next_broker(hall: Hall) -> None:
    """When all ranks say the same epoch it is kept, bodies go on after the highest number, and held jobs are handed on."""
    held = (m.HeldJob("j", 2),)
    hall.rank(1, 3, epoch=EARLIER, sequence=41)
    hall.rank(0, 3, epoch=EARLIER, sequence=40, held=held)
    group = hall.groups.by_name["g"]
    assert group.state == "gathering"
    assert hall.groups.wake_at == 1010.0
    last = hall.rank(2, 3, epoch=EARLIER, sequence=41)
    assert (group.state, group.epoch, group.sequence, group.held) == ("formed", EARLIER, 41, held)
    assert hall.formed == [group]
    assert hall.heard(last) == []
    assert hall.groups.wake_at is None


@pytest.mark.parametrize("late", [0, 1, 2])
def test_groups_04_a_rank_that_has_begun_anew_ends_the_epoch_of_the_others(hall: Hall, late: int) -> None:
    """They are told who isn't in it any more, leave, and all meet in a new one."""
    old = [hall.rank(rank, 3, epoch=EARLIER) for rank in range(3) if rank != late]
    hall.rank(late, 3, epoch=0)
    word = m.EndGroup(EARLIER, (late,), "another rank has begun anew")
    assert [hall.heard(peer) for peer in old] == [[word], [word]]
    assert all(peer.gone for peer in old)
    assert list(hall.groups.by_name["g"].ranks) == [late]
    for rank in range(3):
        if rank != late:
            hall.rank(rank, 3)
    assert hall.groups.by_name["g"].state == "opening"
    assert not hall.over


@pytest.mark.parametrize(("first", "second"), [(0, EARLIER), (NEWER, EARLIER)])
def test_groups_04_a_newcomer_of_an_older_epoch_leaves_again(hall: Hall, first: int, second: int) -> None:
    """It is told that its epoch is over, and nobody else is disturbed."""
    stays = hall.rank(0, 3, epoch=first)
    goes = hall.rank(1, 3, epoch=second)
    assert hall.heard(goes) == [m.EndGroup(second, (0, 2), "the group has no such epoch any more")]
    assert goes.gone
    assert hall.groups.by_name["g"].ranks == {0: stays}


def test_groups_04_ranks_of_an_older_epoch_leave_for_a_newer_one(hall: Hall) -> None:
    """Of two epochs of former brokers the newer one may still be whole."""
    stale = hall.rank(1, 2, epoch=EARLIER)
    hall.rank(0, 2, epoch=NEWER)
    assert hall.heard(stale)[-1] == m.EndGroup(EARLIER, (0,), "another rank is in a later epoch")
    hall.rank(1, 2, epoch=NEWER, name="another")
    assert hall.groups.by_name["g"].state == "formed"


def test_groups_04_who_waits_too_long_for_the_others_leaves(hall: Hall) -> None:
    """An epoch of which not all ranks come back within `rejoin_s` of the first is over; jobs aren't told of it."""
    alone = hall.rank(2, 3, epoch=EARLIER)
    hall.advance(9.0)
    second = hall.rank(0, 3, epoch=EARLIER)
    hall.advance(1.5)
    word = m.EndGroup(EARLIER, (1,), "not all ranks came back within 10 s")
    assert [hall.heard(peer) for peer in (alone, second)] == [[word], [word]]
    assert hall.groups.by_name == {}
    assert not hall.over


def test_groups_04_an_epoch_of_this_broker_can_not_come_back(hall: Hall) -> None:
    """A rank that was lost and says the epoch that ended with it leaves; with 0 it is welcome."""
    group = hall.form()
    hall.drop(group.ranks[1])
    back = hall.rank(1, epoch=group.epoch)
    assert [type(word) for word in hall.heard(back)] == [m.EndGroup]
    assert back.gone
    assert hall.groups.by_name == {}
    hall.form()


def test_groups_04_an_adopted_epoch_ends_for_good(hall: Hall) -> None:
    """Also one of an earlier broker isn't brought up again after it has ended here."""
    for rank in (0, 1):
        hall.rank(rank, epoch=EARLIER)
    hall.drop(hall.groups.by_name["g"].ranks[0])
    assert hall.rank(0, epoch=EARLIER).gone
    assert hall.rank(1, epoch=EARLIER).gone
    assert len(hall.over) == 1


def test_groups_04_a_group_of_one_keeps_its_weights_when_it_was_not_heard(hall: Hall) -> None:
    """It has met itself in any case: with the epoch that it was given it is formed at once."""
    group = hall.form(1)
    hall.drop(group.leader)
    assert [each for each, _ in hall.over] == [group]
    hall.rank(0, 1, epoch=group.epoch, sequence=6)
    again = hall.groups.by_name["g"]
    assert (again.state, again.epoch, again.sequence) == ("formed", group.epoch, 6)


def test_groups_04_nobody_makes_an_epoch_up(hall: Hall) -> None:
    """One that this broker hasn't given yet, and one that another group has, are nobody's."""
    group = hall.form(1)
    for epoch in (group.epoch, group.epoch + 1):
        assert hall.rank(0, 1, "other", epoch=epoch).gone
    assert list(hall.groups.by_name) == ["g"]


# --- who is taken ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({"group": ""}, "malformed", "a group has a name"),
    "a long name": ({"group": "g" * 300}, "limit", "group has 300 characters; accepted: 256"),
    "a long fingerprint": ({"fingerprint": "f" * 300}, "limit", "fingerprint has 300 characters; accepted: 256"),
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


@pytest.mark.parametrize("state", ["gathering", "rejoining", "opening", "forming", "formed"])
def test_groups_06_a_rank_is_taken_once(hall: Hall, state: str) -> None:
    """Another worker under the same number waits until the first is gone, which may be a moment away."""
    group, leader, _ = in_state(hall, state)
    epoch = EARLIER if state == "rejoining" else 0
    objection = hall.objection(hello("another", 0, group.world, epoch=epoch))
    assert objection == ("limit", "rank 0 of group 'g' is worker 'g0'; accepted: one of each, once that is gone")
    hall.drop(leader)
    assert hall.objection(hello("another", 0, group.world, epoch=epoch)) is None


def test_groups_06_a_restarted_rank_may_differ_because_the_others_leave(hall: Hall) -> None:
    """Nobody is compared with ranks whose group ends when the newcomer is taken, or who leave for it."""
    group = hall.form()
    hall.rank(1, version="0.1.9")
    assert group.state == "over"
    hall.drop(hall.groups.by_name["g"].ranks[1])
    hall.rank(0, 3, epoch=EARLIER)
    hall.rank(1, 2, version="0.1.9")
    assert hall.groups.by_name["g"].world == 2


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


def test_groups_05_two_groups_side_by_side(hall: Hall) -> None:
    """Each has its own epoch, secret and numbers, and the end of one leaves the other as it is."""
    one, two = hall.form(2, "one"), hall.form(3, "two")
    assert one.epoch != two.epoch
    release = m.RunJob("j", 1, "t2v", {}, {}, None, 0, 5, 0)
    for _ in range(3):
        one.send(hall.desk, one.number(release))
    two.send(hall.desk, two.number(release))
    hall.put_right()
    assert (one.sequence, two.sequence) == (3, 1)
    numbers = {
        peer.name: [w.sequence for w in hall.heard(peer) if isinstance(w, m.RunJob)]
        for g in (one, two)
        for peer in g.ranks.values()
    }
    assert numbers == {"one0": [1, 2, 3], "one1": [1, 2, 3], "two0": [1], "two1": [1], "two2": [1]}
    hall.drop(one.ranks[1])
    assert (one.state, two.state) == ("over", "formed")
    assert list(hall.groups.formed()) == [two]


# --- leaving and draining ----------------------------------------------------------------------------------------------


def test_groups_04_a_rank_that_drains_drains_its_group(hall: Hall) -> None:
    """All ranks of a group that has begun take nothing new; one that still gathers isn't asked for the others."""
    group = hall.form()
    assert hall.groups.drained(group.ranks[1]) == tuple(group.ranks.values())
    assert group.takes_jobs
    group.ranks[1].draining = True
    assert not group.takes_jobs
    assert not group.is_open
    lone = hall.rank(0, 2, "other")
    assert hall.groups.drained(lone) == (lone,)


def test_groups_04_a_drained_group_ends_without_an_error(hall: Hall) -> None:
    """When its leader says goodbye after all is done, the end is counted as a leave."""
    group = hall.form()
    for peer in group.ranks.values():
        peer.draining = True
    hall.drop(group.leader, "left", left=True)
    assert hall.desk.counters["groups_left"] == 1
    assert hall.desk.counters["groups_lost"] == 0
    again = hall.form()
    again.job = "j"
    again.leader.draining = True
    hall.drop(again.leader, "left", left=True)
    assert hall.desk.counters["groups_lost"] == 1


def test_groups_04_a_rank_that_leaves_again_is_not_formed_with(hall: Hall) -> None:
    """Ranks wait for the replacement of one that drains while they gather, rather than load their weights for it."""
    hall.rank(0).draining = True
    hall.rank(1)
    group: Any = hall.groups.by_name["g"]
    assert group.state == "gathering"
    hall.drop(group.leader, "left", left=True)
    hall.rank(0)
    assert group.state == "opening"


def test_groups_04_a_draining_rank_is_adopted_with_its_group(hall: Hall) -> None:
    """A group that comes back as a whole goes on, and takes nothing new if one of its ranks was asked to stop."""
    hall.rank(0, epoch=EARLIER).draining = True
    hall.rank(1, epoch=EARLIER)
    group = hall.groups.by_name["g"]
    assert group.state == "formed"
    assert all(peer.draining for peer in group.ranks.values())


# --- what is said of groups --------------------------------------------------------------------------------------------


def test_the_status_says_what_there_is(hall: Hall) -> None:
    """A group's name, state, epoch, job and ranks with their devices, as plain data; also who is missing."""
    group = hall.form()
    group.job = "j"
    hall.rank(1, 2, "late")
    first, second = hall.groups.status()
    assert first == {
        "name": "g",
        "state": "formed",
        "epoch": group.epoch,
        "world": 2,
        "job": "j",
        "kinds": ["t2v"],
        "sequence": 0,
        "draining": False,
        "ranks": [{"rank": 0, "name": "g0", "device": "cpu"}, {"rank": 1, "name": "g1", "device": "cpu"}],
        "missing": [],
    }
    assert (second["state"], second["kinds"], second["missing"]) == ("gathering", [], [0])


def test_a_group_takes_what_all_of_its_ranks_take(hall: Hall) -> None:
    """Of each limit the smallest holds."""
    ranks = hall.form().ranks
    ranks[0].limits = replace(ranks[0].limits, frame_bytes_max=5)
    ranks[1].limits = replace(ranks[1].limits, header_bytes_max=7)
    group = Group("g", 2, ranks=ranks)
    assert (group.limits().frame_bytes_max, group.limits().header_bytes_max) == (5, 7)


def test_other_ranks_serve_nothing(hall: Hall) -> None:
    """A pipeline is served by who leads; ranks that are alone don't count, and a worker turned away doesn't either."""
    hall.rank(1)
    assert hall.placement.specs() == ()
    leader = hall.rank(0)
    assert len(hall.placement.specs()) == 1
    assert list(hall.placement.served["world"].workers.values()) == [leader]
    hall.placement.check()
    grouped = {stage: actor.group is not None for (_, stage), actor in leader.actors.items()}
    assert grouped == {"encode": False, "denoise": True, "decode": False}
