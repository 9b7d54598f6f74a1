"""Worker groups as the broker forms and ends them: every event in every state, epochs, and who is taken into which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.events import Received
from reelwire.broker.groups import Group

from .fake_groups import EARLIER, KIND, Hall, hello, in_state

NEWER = EARLIER + 1


@pytest.fixture
def hall() -> Hall:
    """A broker's eighth incarnation, with nobody attached."""
    return Hall()


STATES = ("gathering", "rejoining", "opening", "forming", "formed", "waiting")
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
    "leader is cut off": lambda hall, group, leader, other: hall.drop(leader, "unreachable", returns=True),
    "other is cut off": lambda hall, group, leader, other: hall.drop(other, "unreachable", returns=True),
    "other is back": lambda hall, group, leader, other: hall.rank(1, group.world, epoch=group.epoch),
    "too slow": lambda hall, group, leader, other: hall.advance(100.0),
}
STALE = {"": "stale_epochs"}
"""What is only counted, under which name."""
PROTOCOL = {"": "out_of_protocol"}
OVER = "over"
DISBANDED: tuple[str, ...] = ()
"""The ranks that are left of a group that gathers."""
TABLE: dict[str, tuple[Any, ...]] = {
    #                          gathering      rejoining   opening    forming    formed     waiting
    "leader says opened":     (STALE,         PROTOCOL,   "forming", PROTOCOL,  PROTOCOL,  PROTOCOL),
    "leader says formed":     (STALE,         PROTOCOL,   PROTOCOL,  "formed",  PROTOCOL,  PROTOCOL),
    "other says opened":      (PROTOCOL,      PROTOCOL,   PROTOCOL,  PROTOCOL,  PROTOCOL,  PROTOCOL),
    "other says formed":      (PROTOCOL,      PROTOCOL,   PROTOCOL,  PROTOCOL,  PROTOCOL,  PROTOCOL),
    "leader says lost":       (STALE,         DISBANDED,  OVER,      OVER,      OVER,      OVER),
    "other says lost":        (STALE,         DISBANDED,  OVER,      OVER,      OVER,      OVER),
    "an older epoch":         (STALE,         STALE,      STALE,     STALE,     STALE,     STALE),
    "lost of an older epoch": (STALE,         STALE,      STALE,     STALE,     STALE,     STALE),
    "leader is dropped":      ((1,),          (1,),       OVER,      OVER,      OVER,      OVER),
    "other is dropped":       ((0,),          (0,),       OVER,      OVER,      OVER,      OVER),
    "other says hello again": ((0, 1),        (1,),       OVER,      OVER,      OVER,      OVER),
    "leader is cut off":      ((1,),          (1,),       OVER,      OVER,      "waiting", "waiting"),
    "other is cut off":       ((0,),          (0,),       OVER,      OVER,      "waiting", "waiting"),
    "other is back":          ((0, 1),        (0, 1),     OVER,      OVER,      "formed",  "waiting"),
    "too slow":               ((0, 1),        DISBANDED,  OVER,      OVER,      "formed",  OVER),
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


@pytest.mark.parametrize("state", STATES[2:5])
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
    members = tuple(m.Member(rank, "host", 100 + rank, 7 + rank) for rank in range(3))
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


def test_groups_04_a_rank_that_died_while_the_broker_was_away_is_told_of(hall: Hall) -> None:
    """Ranks that come back and say who is dead all leave: the dead one, and those that haven't come, are named."""
    ranks = [hall.rank(rank, 4, epoch=EARLIER) for rank in (0, 1, 2)]
    hall.say(ranks[0], m.RanksLost(EARLIER, (2,), "its process is gone"))
    assert [hall.heard(peer) for peer in ranks] == [[m.EndGroup(EARLIER, (2, 3), "its process is gone")]] * 3


def test_groups_04_a_group_that_begins_and_ends_at_once_is_only_over(hall: Hall) -> None:
    """Nobody is told of a beginning after the end."""
    group, leader, other = in_state(hall, "forming")
    hall.groups.hear(leader, Received(hall.desk.now, b"", 0, m.GroupFormed(group.epoch), 10))
    hall.groups.hear(other, Received(hall.desk.now, b"", 0, m.RanksLost(group.epoch, (0,), "dead"), 10))
    hall.put_right()
    assert (hall.formed, [each for each, _ in hall.over]) == ([], [group])


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
