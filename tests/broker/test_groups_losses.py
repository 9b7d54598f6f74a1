"""The end of an epoch in the whole broker: whatever takes a rank, another broker, and groups that are asked to stop."""

from __future__ import annotations

from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.actions import Forget, Send
from reelwire.broker.config import BrokerConfig
from reelwire.broker.events import Malformed, OutboxFull, TurnEnded, Unreachable
from reelwire.broker.job_record import Saved

from .fake_ranks import Rank, Team


def session(rig: Any, chunks: int = 6, **asked: Any) -> tuple[Any, str]:
    """A client and its session."""
    client = rig.client()
    return client, client.open(chunks=chunks, **asked)


def of(rig: Any, name: str = "g") -> dict[str, Any]:
    """What the status says of a group."""
    return next((group for group in rig.core.status()["groups"] if group["name"] == name), {})


def wait_for(rig: Any, gone: Any) -> None:
    """Let the time pass for which a rank is waited for whose connection broke; the others say that they are alive."""
    gone.attachment = 0
    rig.turn()
    assert of(rig)["state"] == "waiting"
    rig.advance(3.5)


# --- the end of an epoch --------------------------------------------------------------------------------------------------


def unreachable(rig: Any, rank: Any) -> None:
    """Its connection is gone, and it doesn't come back."""
    rig.handle(Unreachable(rig.now, rank.route))
    wait_for(rig, rank)


LOSSES: dict[str, Any] = {
    "goodbye": lambda rig, rank: rank.say(m.Goodbye("killed")),
    "garbage": lambda rig, rank: rig.handle(Malformed(rig.now, rank.route, "malformed", "garbage")),
    "unreachable": unreachable,
    "reads nothing": lambda rig, rank: rig.handle(OutboxFull(rig.now, rank.route)),
    "not its word": lambda rig, rank: rank.say(m.OpenSession("k", "world", 1)),
    "hello again": lambda rig, rank: rank.team.start_rank(rank.rank),
    "named by the leader": lambda rig, rank: rank.team.leader.say(m.RanksLost(rank.epoch, (rank.rank,), "dead")),
    "named by another": lambda rig, rank: rank.team.ranks[-1].say(m.RanksLost(rank.epoch, (rank.rank,), "dead")),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("who", [0, 1])
def test_groups_04_whatever_takes_a_rank_ends_the_epoch(rig: Any, loss: str, who: int) -> None:
    """Sessions fail as with a lost worker, those that are left hear who is lost, and all meet again in a higher epoch."""
    team = Team(rig, size=3).start()
    old, epoch = list(team.ranks), team.leader.epoch
    client, name = session(rig)
    client.submit(name, 0)
    team.leader.finish("encode")
    LOSSES[loss](rig, old[who])
    rig.turn()
    failure = client.ended(name).failure
    assert failure.kind == "worker_lost"
    for rank in old:
        words = rank.heard(m.EndGroup)
        if rank.rank != who or loss.startswith("named"):
            assert [(word.epoch, word.lost) for word in words] == [(epoch, (who,))]
    for rank in old:
        if team.ranks[rank.rank] is rank:
            team.start_rank(rank.rank)
    assert team.leader.epoch > epoch
    assert of(rig)["state"] == "formed"
    again = client.open("again")
    assert client.state(again)[0] == "ready"
    assert len({rank.epoch for rank in team.ranks}) == 1


def test_groups_04_the_end_of_an_epoch_is_the_last_word(rig: Any) -> None:
    """Nothing is said to a rank after it, and nothing that waits for it is dropped: it must get there."""
    team = Team(rig, size=3).start()
    routes = {rank.route for rank in team.ranks[:2]}
    for event in (OutboxFull(rig.now, b"g2"), TurnEnded(rig.now, True)):
        actions = rig.core.handle(event)
        words = [action for action in actions if isinstance(action, Send | Forget) and action.route in routes]
        if isinstance(event, TurnEnded):
            assert [type(word.message) for word in words if isinstance(word, Send)] == [m.EndGroup, m.EndGroup]
            assert not any(isinstance(word, Forget) for word in words)
    assert rig.core.status()["workers"] == []
    assert rig.counter("workers_left") == 2
    assert rig.counter("workers_lost") == 1


def test_groups_04_a_silent_rank_is_noticed(rig: Any) -> None:
    """One that says nothing for three intervals is lost for all, whichever it is."""
    team = Team(rig, size=3).start()
    for _ in range(10):
        rig.now += 0.5
        for rank in (team.ranks[0], team.ranks[2]):
            if rank.attachment:
                rank.say(m.Heartbeat())
        rig.turn()
    word = team.leader.last(m.EndGroup)
    assert word.lost == (1,)
    assert "not heard for" in word.reason
    assert of(rig) == {}


@pytest.mark.parametrize("silent", ["task", "initialize"])
def test_groups_04_a_stage_that_hangs_ends_the_epoch(kit: Any, silent: str) -> None:
    """A grouped stage that says nothing for too long: its leader is taken for lost, and with it the group."""
    rig = kit.Rig(BrokerConfig(task_timeout_s=20.0, initialize_timeout_s=20.0))
    team = Team(rig, size=2).start()
    if silent == "initialize":
        team.leader.silent.add(m.InitializeStage)
    client, name = session(rig)
    if silent == "task":
        client.submit(name, 0)
        team.leader.finish("encode")
    rig.advance(19.0)
    assert client.ended(name) is None
    rig.advance(2.0)
    assert client.ended(name).failure.kind == "worker_lost"
    assert team.ranks[1].last(m.EndGroup).lost == (0,)
    assert rig.core.status()["workers"] == []


def test_groups_04_a_second_process_of_a_rank_is_refused_and_tries_again(rig: Any) -> None:
    """The group works on while the first one lives; when its connection has broken the next hello of the other is taken."""
    team = Team(rig, size=2).start()
    client, name = session(rig)
    second = Rank(team, 1, b"elsewhere")
    second.name, second.pid = "g1", 999
    second.attach()
    assert second.attachment == 0
    word = second.last(m.Rejected)
    assert word.code == "limit"
    assert "rank 1 of group 'g' is worker 'g1' (process 101 on this machine)" in word.message
    assert client.state(name)[0] == "ready"
    assert of(rig)["state"] == "formed"
    rig.handle(Unreachable(rig.now, team.ranks[1].route))
    second.attach()
    assert second.attachment
    assert team.leader.last(m.EndGroup).lost == (1,)


def test_groups_04_jobs_are_told_of_beginnings_and_ends(rig: Any) -> None:
    """A group that has formed is handed on with what its leader holds, and its end once, with the reason."""
    told: list[tuple[Any, ...]] = []
    rig.core._jobs.held = lambda group, jobs: told.append(("formed", group.name, jobs))
    rig.core._jobs.group_over = lambda group, reason: told.append(("over", group.name, reason))
    held = (m.HeldJob("j", 3),)
    team = Team(rig, size=2, held=held).start()
    assert told == [("formed", "g", held)]
    team.ranks[1].say(m.Goodbye("stopped"))
    assert told[1:] == [("over", "g", "rank 1 (g1) is gone: left: stopped")]


# --- another broker ------------------------------------------------------------------------------------------------------


def test_groups_04_a_formed_group_outlives_its_broker(kit: Any) -> None:
    """All ranks attach to the next broker under the epoch that they have; bodies go on after the highest number."""
    first = kit.Rig()
    team = Team(first, size=3).start()
    client, name = session(first)
    client.submit(name, 0)
    team.leader.finish("encode")
    epoch, last = team.leader.epoch, len(team.leader.bodies)
    second = kit.Rig(saved=Saved(incarnation=2))
    team.move_to(second)
    group = of(second)
    assert (group["state"], group["epoch"], group["sequence"]) == ("formed", epoch, last)
    client, name = session(second)
    assert client.state(name)[0] == "ready"
    assert [rank.bodies[-1].sequence for rank in team.ranks] == [last + 1] * 3
    for rank in team.ranks:
        assert not rank.heard(m.EndGroup)
    assert len(team.leader.heard(m.LeadGroup)) == 1


def test_groups_04_a_later_broker_gives_higher_epochs(kit: Any) -> None:
    """Where one rank has begun anew the others leave, and what they meet in then is higher than all before."""
    first = kit.Rig()
    team = Team(first, size=3).start()
    epoch = team.leader.epoch
    second = kit.Rig(saved=Saved(incarnation=2))
    team.ranks[1].epoch = 0
    team.move_to(second)
    assert all(rank.has_left for rank in (team.ranks[0], team.ranks[2]))
    assert [rank.last(m.EndGroup).lost for rank in (team.ranks[0], team.ranks[2])] == [(1, 2), (0, 1)]
    for rank in (0, 2):
        team.start_rank(rank)
    assert team.leader.epoch > epoch
    assert of(second)["state"] == "formed"


def test_groups_04_who_waits_for_the_others_leaves_in_time(kit: Any) -> None:
    """Ranks of an epoch of which one doesn't come back are told so `rejoin_s` after the first came."""
    first = kit.Rig()
    team = Team(first, size=3).start()
    second = kit.Rig(BrokerConfig(rejoin_s=6.0), saved=Saved(incarnation=2))
    gone = team.ranks.pop(1)
    team.move_to(second)
    assert gone.attachment
    second.advance(5.0)
    assert of(second)["state"] == "gathering"
    second.advance(1.5)
    assert [rank.last(m.EndGroup).lost for rank in team.ranks] == [(1,), (1,)]
    assert of(second) == {}


# --- leaving --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_groups_04_a_rank_that_was_asked_to_stop_drains_the_group(rig: Any, who: int) -> None:
    """Whichever it is, nobody is placed there any more, what was accepted is delivered, and the end is no error."""
    team = Team(rig, size=2).start()
    client, name = session(rig)
    client.submit(name, 0)
    team.ranks[who].say(m.Draining())
    late = rig.client(b"late")
    waits = late.open()
    assert late.state(waits)[0] == "opening"
    assert of(rig)["draining"]
    team.leader.finish("encode")
    team.leader.finish("denoise")
    team.leader.finish("decode")
    client.ack(name, 1)
    rig.turn()
    assert len(client.chunks(name)) == 1
    assert client.ended(name).state == "closed"
    team.leader.say(m.Goodbye("stopped as asked for"))
    assert rig.counter("groups_left") == 1
    assert rig.counter("groups_lost") == 0
    assert not [log for log in rig.logs if log.level in ("warning", "error")]
