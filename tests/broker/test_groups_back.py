"""Ranks of a formed group that lose their connection and live: who takes its place back, who doesn't, and what goes on."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker import group as group_module
from reelwire.broker.events import TurnEnded, Unreachable

from .fake_groups import Hall
from .fake_ranks import Rank, Team


@pytest.fixture
def hall() -> Hall:
    """A broker's eighth incarnation, with nobody attached."""
    return Hall()


def of(rig: Any, name: str = "g") -> dict[str, Any]:
    """What the status says of a group."""
    return next((group for group in rig.core.status()["groups"] if group["name"] == name), {})


def cut(rig: Any, rank: Rank) -> None:
    """The connection of a rank breaks, and the broker finds that out."""
    rig.handle(Unreachable(rig.now, rank.route))
    rank.attachment = 0
    rig.turn()


def make(team: Team, client: Any, name: str, index: int) -> None:
    """A chunk, from its control to the client."""
    client.submit(name, index)
    for stage in ("encode", "denoise", "decode"):
        team.leader.finish(stage)
    client.ack(name, index + 1)


# --- who says hello again -------------------------------------------------------------------------------------------------


def test_groups_04_a_follower_that_says_hello_again_takes_its_place_back(rig: Any) -> None:
    """Nobody is told of an end, the session at the leader lives, and the numbers go on."""
    team = Team(rig, size=3).start()
    client, epoch = rig.client(), team.leader.epoch
    name = client.open(chunks=6)
    make(team, client, name, 0)
    before = team.ranks[1].attachment
    team.ranks[1].attach()
    assert team.ranks[1].attachment > before
    assert (of(rig)["state"], of(rig)["epoch"]) == ("formed", epoch)
    make(team, client, name, 1)
    assert len(client.chunks(name)) == 2
    assert not any(rank.heard(m.EndGroup) for rank in team.ranks)
    assert [body.sequence for body in team.ranks[1].bodies] == [1, 2, 3]
    assert rig.counter("groups_lost") == 0
    assert rig.counter("groups_whole_again") == 1


def test_groups_04_a_leader_that_says_hello_again_has_given_its_sessions_up(rig: Any) -> None:
    """They fail clearly; the group is the same, and takes the next one under the next number."""
    team = Team(rig, size=2).start()
    client, epoch = rig.client(), team.leader.epoch
    name = client.open(chunks=6)
    client.submit(name, 0)
    team.leader.jobs.clear()
    team.leader.attach()
    assert client.ended(name).failure.kind == "worker_lost"
    assert (of(rig)["state"], of(rig)["epoch"], of(rig)["sequence"]) == ("formed", epoch, 1)
    assert len(team.leader.heard(m.LeadGroup)) == 1
    again = client.open("again", chunks=2)
    assert client.state(again)[0] == "ready"
    assert [rank.bodies[-1].sequence for rank in team.ranks] == [2, 2]


def test_groups_04_all_ranks_may_say_hello_again(rig: Any) -> None:
    """So it is when the broker stood still: the group is the same when the last one has come, and before."""
    team = Team(rig, size=4).start()
    epoch = team.leader.epoch
    for rank in (2, 0, 3, 1):
        team.ranks[rank].attach()
        assert (of(rig)["state"], of(rig)["epoch"]) == ("formed", epoch)
    assert not any(rank.heard(m.EndGroup) for rank in team.ranks)


def test_groups_04_a_rank_hears_again_what_its_old_connection_lost(rig: Any) -> None:
    """Bodies that all others have are said again to one that hasn't, each once, in order; else its group would hang."""
    team = Team(rig, size=3).start()
    client = rig.client()
    name = client.open(chunks=6)
    client.submit(name, 0)
    team.leader.finish("encode")
    rank = team.ranks[2]
    lost = [body for body in rank.bodies if body.sequence > 1]
    rank.inbox = [word for word in rank.inbox if word not in lost]
    rank.attach()
    assert [body.sequence for body in rank.bodies] == [1, 2]
    assert rank.bodies == team.leader.bodies


def test_groups_04_who_has_lost_too_much_ends_the_epoch(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for that has a bound; beyond it the group can't go on."""
    monkeypatch.setattr(group_module, "SENT_MAX", 1)
    team = Team(rig, size=2).start()
    client = rig.client()
    name = client.open(chunks=6)
    client.submit(name, 0)
    team.leader.finish("encode")
    rank = team.ranks[1]
    rank.inbox = [word for word in rank.inbox if not getattr(word, "sequence", 0)]
    rank.attach()
    assert "lost more than can be said again" in rank.last(m.EndGroup).reason
    assert team.leader.last(m.EndGroup).lost == ()
    assert client.ended(name).failure.kind == "worker_lost"
    assert of(rig) == {}


def test_groups_04_bodies_that_are_kept_are_bounded_in_bytes(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first."""
    monkeypatch.setattr(group_module, "SENT_BYTES_MAX", 1000)
    group = hall.form()
    for _ in range(20):
        group.send(hall.desk, group.number(m.RunJob("j", 1, "t2v", {"prompt": "x" * 200}, {}, None, 0, 5, 0)))
    hall.put_right()
    assert not group.send_again(hall.desk, group.ranks[1], 10)
    assert group.send_again(hall.desk, group.ranks[1], 18)
    hall.put_right()
    assert [word.sequence for word in hall.heard(group.ranks[1])[-2:]] == [19, 20]


@pytest.mark.parametrize("differs", [{"pid": 7}, {"machine": "another"}, {"fingerprint": "other"}, {"epoch": 0}])
def test_groups_04_another_process_does_not_take_the_place(hall: Hall, differs: dict[str, Any]) -> None:
    """Who is not the very rank that was there ends the epoch, as its place can only be free if that is dead."""
    group = hall.form()
    group.ranks[1].mute = "unreachable"  # else another process is told that the rank is this one's
    hall.rank(1, **{"epoch": group.epoch, **differs})
    assert group.state == "over"
    assert hall.over[0][1] == "rank 1 (g1) is gone: said hello again"


def test_groups_04_a_group_of_one_takes_its_own_place_back(hall: Hall) -> None:
    """It is the same group, and its jobs are asked for: what its leader has is handed on."""
    group = hall.form(1)
    held = (m.HeldJob("j", 1),)
    hall.rank(0, 1, epoch=group.epoch, sequence=6, held=held)
    assert hall.groups.by_name["g"] is group
    assert (group.state, group.sequence, group.held) == ("formed", 6, held)
    assert hall.parted == [group]
    assert hall.formed == [group, group]
    assert not hall.over


# --- whose connection broke ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_groups_04_a_rank_whose_connection_broke_is_waited_for(rig: Any, who: int) -> None:
    """Meanwhile nobody is placed there, and kinds of jobs can be asked for; when it is back the group goes on as it was."""
    team = Team(rig, size=2).start()
    client, epoch = rig.client(), team.leader.epoch
    name = client.open(chunks=6)
    make(team, client, name, 0)
    client.submit(name, 1)
    cut(rig, team.ranks[who])
    assert (of(rig)["state"], of(rig)["missing"], of(rig)["epoch"]) == ("waiting", [who], epoch)
    assert client.last(m.Welcome).jobs
    other = rig.client(b"other")
    waits = other.open() if who else ""
    rig.advance(1.5)
    if who:
        assert other.state(waits)[0] == "opening"
        assert client.ended(name) is None
        team.leader.finish("encode")  # goes on with what it has: its leader waits for the rank
        assert team.leader.bodies[-1].sequence == 3
    else:
        assert client.ended(name).failure.kind == "worker_lost"
        team.leader.jobs.clear()
    team.ranks[who].attach()
    assert (of(rig)["state"], of(rig)["epoch"]) == ("formed", epoch)
    if who:
        assert other.state(waits)[0] == "ready"
        team.leader.finish("denoise")
        team.leader.finish("decode")
        assert len(client.chunks(name)) == 2
        assert team.ranks[1].bodies == team.leader.bodies
    rig.advance(10.0)
    assert of(rig)["state"] == "formed"
    assert rig.counter("groups_lost") == 0


@pytest.mark.parametrize("who", [0, 1, 2])
def test_groups_04_who_does_not_come_back_has_died(rig: Any, who: int) -> None:
    """The epoch ends within 4 s of the last word that was heard, at the others with the number of the dead."""
    team = Team(rig, size=3).start()
    rig.advance(1.0)
    cut_at = rig.now
    cut(rig, team.ranks[who])
    while of(rig):
        rig.advance(0.5)
        assert rig.now - cut_at < 4.0
    left = [rank for rank in team.ranks if rank.rank != who]
    assert [rank.last(m.EndGroup).lost for rank in left] == [(who,)] * 2
    assert rig.counter("groups_lost") == 1


def test_groups_04_a_broker_that_stood_still_waits_after_it_has_woken(rig: Any) -> None:
    """Its ranks have said hello by then, over connections that it hasn't read yet: the time before doesn't count."""
    team = Team(rig, size=2).start()
    rig.now += 20.0
    for rank in team.ranks:
        rig.handle(Unreachable(rig.now, rank.route))
    rig.handle(TurnEnded(rig.now, False))
    rig.turn()
    assert (of(rig)["state"], of(rig)["missing"]) == ("waiting", [0, 1])
    for rank in team.ranks:
        rank.attach()
    assert of(rig)["state"] == "formed"
    assert not any(rank.heard(m.EndGroup) for rank in team.ranks)


ENDS: dict[str, Any] = {
    "a new process": lambda team: team.start_rank(1),
    "named by the leader": lambda team: team.leader.say(m.RanksLost(team.leader.epoch, (1,), "dead")),
    "named by another": lambda team: team.ranks[2].say(m.RanksLost(team.leader.epoch, (1,), "dead")),
}


@pytest.mark.parametrize("end", ENDS)
def test_groups_04_who_is_known_to_be_dead_is_not_waited_for(rig: Any, end: str) -> None:
    """Another process in its place, or the word of another rank, ends the epoch at once."""
    team = Team(rig, size=3).start()
    old, epoch = list(team.ranks), team.leader.epoch
    cut(rig, team.ranks[1])
    ENDS[end](team)
    assert [(old[rank].last(m.EndGroup).epoch, old[rank].last(m.EndGroup).lost) for rank in (0, 2)] == [
        (epoch, (1,))
    ] * 2
    assert rig.counter("groups_lost") == 1
    for rank in range(3):
        if team.ranks[rank] is old[rank]:
            team.start_rank(rank)
    assert of(rig)["state"] == "formed"
    assert of(rig)["epoch"] > epoch


def test_groups_04_another_rank_that_leaves_ends_what_waits(rig: Any) -> None:
    """While one is away, the loss of another ends the epoch, and both are known to be missing."""
    team = Team(rig, size=3).start()
    cut(rig, team.ranks[1])
    team.ranks[2].say(m.Goodbye("killed"))
    assert team.leader.last(m.EndGroup).lost == (2,)
    assert of(rig) == {}
    back = team.ranks[1]
    back.attach()
    assert back.last(m.EndGroup).epoch == back.epoch


def test_groups_04_a_rank_that_was_asked_to_stop_is_not_waited_for(rig: Any) -> None:
    """It ends when it loses its broker, so nobody comes back."""
    team = Team(rig, size=2).start()
    team.leader.say(m.Draining())
    cut(rig, team.ranks[1])
    assert of(rig) == {}


def test_groups_04_a_draining_group_drains_on(rig: Any) -> None:
    """A rank that comes back to a group of which another was asked to stop takes nothing new either."""
    team = Team(rig, size=2).start()
    team.leader.say(m.Draining())
    team.ranks[1].attach()
    assert of(rig)["state"] == "formed"
    assert all(peer.draining for peer in rig.core._groups.by_name["g"].ranks.values())


def test_groups_01_a_rank_that_is_back_says_anew_what_it_can_open(rig: Any) -> None:
    """Until it does, what a grouped stage reads stays out of shared memory."""
    team = Team(rig, size=2, memory=True).start()
    client = rig.client()
    name = client.open(chunks=6)
    seats = rig.core.sessions[name].seats
    assert seats.shared["encode"] == ("condition",)
    team.ranks[1].maps = False
    team.ranks[1].attach()
    assert seats.shared["encode"] == ()
    team.ranks[1].maps = True
    team.ranks[1].attach()
    assert seats.shared["encode"] == ("condition",)
