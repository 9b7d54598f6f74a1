"""Worker groups in the whole broker: what is fanned out, where sessions live, and what the loss of a rank leads to."""

from __future__ import annotations

import dataclasses
from typing import Any

from reelwire import messages as m
from reelwire.broker.actions import Send
from reelwire.broker.events import Received
from reelwire.broker.group import Group
from reelwire.controls import Keys
from reelwire.group_messages import BROADCAST_BYTES_MIN as LARGE
from reelwire.group_messages import LeaderTensor
from reelwire.job_spec import JobSpec
from reelwire.spec import Parameter
from reelwire.tensors import Inline, Shared, TensorRef

from .fake_groups import EARLIER, KIND, hello
from .fake_peers import world
from .fake_ranks import Rank, Team

RUN, INITIALIZE = "RunTask", "InitializeStage"


def numbers(team: Team) -> list[int]:
    """The numbers of the bodies that all ranks were told; they are the same at all ranks, and rise by one."""
    told = team.sequences()
    assert all(each == told[0] for each in told)
    found = [number for _, number in told[0]]
    assert found == list(range(1, len(found) + 1))
    return found


def bodies(team: Team) -> list[Any]:
    """The bodies themselves, in the leader's order."""
    assert all(rank.bodies == team.leader.bodies for rank in team.ranks)
    return team.leader.bodies


def session(rig: Any, chunks: int = 6, **asked: Any) -> tuple[Any, str]:
    """A client and its session."""
    client = rig.client()
    return client, client.open(chunks=chunks, **asked)


def of(rig: Any, name: str = "g") -> dict[str, Any]:
    """What the status says of a group."""
    return next((group for group in rig.core.status()["groups"] if group["name"] == name), {})


# --- fan-out ------------------------------------------------------------------------------------------------------------


def test_groups_01_grouped_work_goes_to_every_rank_by_number(rig: Any) -> None:
    """Each rank is told each initialization and each task of a grouped stage, once, under one number that rises by one."""
    team = Team(rig, size=3).start()
    client, name = session(rig)
    assert client.state(name)[0] == "ready"
    for index in range(4):
        assert isinstance(client.submit(name, index), m.ControlAccepted)
        team.leader.finish("encode")
        team.leader.finish("denoise")
        team.leader.finish("decode")
        client.ack(name, index + 1)
    assert numbers(team) == [1, 2, 3, 4, 5]
    told = bodies(team)
    assert [type(body).__name__ for body in told] == [INITIALIZE, RUN, RUN, RUN, RUN]
    assert {body.stage for body in told} == {"denoise"}
    assert [body.index for body in told[1:]] == [0, 1, 2, 3]
    assert len(client.chunks(name)) == 4
    assert of(rig)["sequence"] == 5


def test_groups_01_everything_else_goes_to_the_leader_alone(rig: Any) -> None:
    """Other stages' work, releases and newer keys are said to rank 0, and have no number."""
    team = Team(rig).start()
    client, name = session(rig, control_binding="late")
    keys = Keys(world())
    team.leader.starts = False
    for pressed in ("w", "a"):
        keys.press(pressed)
        client.keys(name, keys)
        rig.turn()
        if team.leader.jobs["encode"]:
            team.leader.finish("encode")
    assert team.leader.heard(m.SetStageKeys)
    client.end(name, "cancel")
    assert client.ended(name) is not None
    assert {type(word).__name__ for word in team.ranks[1].inbox} == {"Welcome", "JoinGroup", INITIALIZE, RUN}
    alone = [word for word in team.leader.heard(m.RunTask) if word.stage != "denoise"]
    assert alone
    assert all(word.sequence == 0 for word in alone)
    assert sorted(team.leader.released_stages()) == ["decode", "denoise", "encode"]
    assert numbers(team) == [1, 2]


def test_groups_01_a_body_is_encoded_once(rig: Any) -> None:
    """What all ranks are told is the same value, made ready for the wire once."""
    team = Team(rig, size=4).start()
    client, name = session(rig)
    client.submit(name, 0)
    peer = rig.core._peers.workers["g0"]
    done = m.TaskDone(name, "encode", 1, 1, 0, {"condition": m.Artifact()}, {}, 0.1)
    actions = rig.core.handle(Received(rig.now, peer.route, peer.attachment, done, 10, b""))
    words = [(action, action.message) for action in actions if isinstance(action, Send)]
    sends = [action for action, word in words if isinstance(word, m.RunTask) and word.stage == "denoise"]
    assert [action.route for action in sends] == [rank.route for rank in team.ranks]
    assert len({id(action.packed) for action in sends}) == 1
    assert all(action.packed is not None and action.is_work for action in sends)


def inline(nbytes: int) -> TensorRef:
    """A tensor that comes with its message."""
    return TensorRef("uint8", (nbytes,), Inline(bytes(nbytes)))


def sizes(artifact: m.Artifact) -> dict[str, int]:
    """Bytes of its tensors."""
    return {name: tensor.nbytes for name, tensor in artifact.tensors.items()}


def test_groups_01_a_large_input_is_sent_to_the_leader_alone(rig: Any) -> None:
    """All ranks are told the same of it, so that they take it from the leader; what is small all are sent."""
    team = Team(rig, size=3).start()
    client, name = session(rig)
    client.submit(name, 0)
    made = {"a": inline(LARGE), "b": inline(LARGE - 1), "c": inline(0), "d": inline(3 * LARGE)}
    team.leader.finish("encode", outputs={"condition": m.Artifact({"mark": 1}, made)})
    tasks = [rank.bodies[-1] for rank in team.ranks]
    wanted = (LeaderTensor("condition", "a", "uint8", (LARGE,)), LeaderTensor("condition", "d", "uint8", (3 * LARGE,)))
    assert all(task.broadcast == wanted for task in tasks)
    assert sizes(tasks[0].inputs["condition"]) == {"a": LARGE, "b": LARGE - 1, "c": 0, "d": 3 * LARGE}
    for task in tasks[1:]:
        assert sizes(task.inputs["condition"]) == {"b": LARGE - 1, "c": 0}
        assert task.inputs["condition"].values == {"mark": 1}
        assert dataclasses.replace(task, inputs=tasks[0].inputs) == tasks[0]
    assert [numbers(team), sum(each.nbytes for each in wanted)] == [[1, 2], 4 * LARGE]
    rank = team.ranks[2]
    rank.inbox.remove(tasks[2])
    rank.attach()
    assert rank.bodies[-1] == tasks[1], "nor is it said again"


def test_groups_01_a_session_s_large_tensors_are_sent_to_the_leader_alone(rig: Any) -> None:
    """Those of its request, and those that are handed on."""
    encode, denoise, decode = world().stages
    stages = (encode, dataclasses.replace(denoise, request_tensors=("image",)), decode)
    team = Team(rig, size=2, spec=world(stages=stages)).start()
    team.leader.silent.add(m.InitializeStage)
    image = TensorRef("uint8", (200, 200, 3), Inline(bytes(120000)))
    rig.client().open(tensors={"image": image})
    for _ in range(2):
        team.leader.initialized(team.leader.last(m.InitializeStage), handed=m.Artifact({}, {"x": inline(LARGE)}))
    told, follows = (rank.bodies[-1] for rank in team.ranks)
    assert told.broadcast == follows.broadcast
    assert [(each.artifact, each.tensor) for each in told.broadcast] == [("tensors", "image"), ("handed", "x")]
    assert (told.tensors, sizes(told.handed)) == ({"image": image}, {"x": LARGE})
    assert (follows.tensors, follows.handed) == ({}, m.Artifact())
    assert follows.parameters == told.parameters


def test_groups_01_what_all_ranks_can_open_is_not_broadcast(rig: Any) -> None:
    """A large tensor in shared memory is a reference for all of them, and a group of one has nobody to give one to."""
    group = Group("g", 2)
    shared = TensorRef("uint8", (LARGE,), Shared("owner", "segment", 1))
    inputs = {"condition": m.Artifact({}, {"x": shared})}
    task = m.RunTask("s", "world", "denoise", 1, 1, 0, inputs, True, False)
    assert group.number(task) == dataclasses.replace(task, sequence=1)
    inputs["condition"] = m.Artifact({}, {"x": inline(LARGE)})
    assert group.number(task).broadcast
    assert not Group("one", 1).number(task).broadcast


def test_groups_01_a_task_must_fit_every_rank(rig: Any) -> None:
    """What is too large for one rank fails the session by name, and takes no number."""
    team = Team(rig, size=2)
    team.limits = [{}, {"frame_bytes_max": 1000}]
    team.start()
    client, name = session(rig)
    client.submit(name, 0)
    large = m.Artifact({}, {"x": TensorRef("uint8", (1001,), Inline(bytes(1001)))})
    team.leader.finish("encode", outputs={"condition": large})
    ended = client.ended(name)
    assert ended is not None
    assert "frame of 1001 bytes; accepted: 1000" in ended.failure.message
    assert numbers(team) == [1]
    other = rig.client(b"other")
    second = other.open()
    other.submit(second, 0)
    team.leader.finish("encode")
    team.leader.finish("denoise")
    assert numbers(team) == [1, 2, 3]


def test_groups_01_what_is_handed_on_must_fit_every_rank(rig: Any) -> None:
    """Also a rank that came after the limits were first asked for; then nobody is told of the session."""
    team = Team(rig, size=2)
    team.limits = [{}, {"frame_bytes_max": 1000}]
    team.ranks = []
    team.start_rank(0)
    client, name = session(rig)
    team.leader.silent.add(m.InitializeStage)
    team.start_rank(1)
    large = m.Artifact({}, {"x": TensorRef("uint8", (1001,), Inline(bytes(1001)))})
    team.leader.initialized(team.leader.last(m.InitializeStage), handed=large)
    team.leader.initialized(team.leader.last(m.InitializeStage))
    assert client.ended(name).failure.kind == "request"
    assert "frame of 1001 bytes; accepted: 1000" in client.ended(name).failure.message
    assert numbers(team) == []


def test_groups_01_a_request_must_fit_every_rank(rig: Any, kit: Any) -> None:
    """A session whose prompt one of the ranks doesn't take is refused before it lives anywhere."""
    spec = dataclasses.replace(world(), parameters=(Parameter("prompt", "string", "what is seen", default=""),))
    team = Team(rig, size=2, spec=spec)
    team.limits = [{}, {"header_bytes_max": 6000}]
    team.start()
    client = rig.client()
    assert client.open(parameters={"prompt": "x" * 3000}) == ""
    refused = client.last(m.SessionRefused).failure
    assert (refused.kind, refused.field) == ("request", "prompt")


def test_groups_01_nothing_is_forwarded_into_a_grouped_stage(rig: Any) -> None:
    """Its inputs must reach every rank, so they come by the broker; what it makes its leader gives on by itself."""
    team = Team(rig, size=2, forwards=True, mailbox=2).start()
    client, name = session(rig)
    for index in range(2):
        client.submit(name, index)
    for _ in range(2):
        team.leader.finish("encode")
        team.leader.finish("denoise")
        team.leader.finish("decode")
    awaits = {stage: set() for stage in ("encode", "denoise", "decode")}  # type: dict[str, set[str]]
    for task in team.leader.heard(m.RunTask):
        awaits[task.stage] |= set(task.awaits)
    assert awaits == {"encode": set(), "denoise": set(), "decode": {"latent"}}
    assert all(sorted(task.inputs) == ["condition", "control"] for task in bodies(team)[1:])
    assert len(client.chunks(name)) == 2


# --- who is placed where ------------------------------------------------------------------------------------------------


def test_groups_04_sessions_wait_until_the_group_has_formed(rig: Any) -> None:
    """A grouped stage takes nobody before all ranks have met, although its leader says that it is ready."""
    team = Team(rig, size=2)
    team.forms = False
    team.start()
    client, name = session(rig)
    assert client.state(name)[0] == "opening"
    assert of(rig)["state"] == "forming"
    worker = next(each for each in rig.core.status()["workers"] if each["name"] == "g0")
    assert (worker["ready"], worker["group"], worker["rank"]) == (False, "g", 0)
    team.leader.say(m.GroupFormed(team.leader.epoch))
    assert client.state(name)[0] == "ready"
    assert all(each["ready"] for each in rig.core.status()["workers"])


def test_groups_05_a_session_lives_at_one_of_two_groups(rig: Any) -> None:
    """Two groups side by side share the sessions; each has its own numbers, and the loss of one is nothing to the other."""
    one, two = Team(rig, "one", 2, slots=1).start(), Team(rig, "two", 3, slots=1).start()
    clients = [rig.client(str(number).encode()) for number in range(3)]
    names = [client.open() for client in clients]
    assert [client.state(name)[0] for client, name in zip(clients, names, strict=True)] == ["ready", "ready", "opening"]
    for client, name in zip(clients, names, strict=True):
        client.submit(name, 0)
    for team in (one, two):
        team.leader.finish("encode")
        team.leader.finish("denoise")
        assert numbers(team) == [1, 2]
    one.ranks[1].say(m.Goodbye("killed"))
    assert clients[0].ended(names[0]).failure.kind == "worker_lost"
    assert clients[1].ended(names[1]) is None
    assert one.leader.last(m.EndGroup).lost == (1,)
    assert not any(rank.heard(m.EndGroup) for rank in two.ranks)
    two.leader.finish("decode")
    assert len(clients[1].chunks(names[1])) == 1
    assert of(rig, "one") == {}
    one.start()
    assert clients[2].state(names[2])[0] == "ready"
    assert len(one.ranks[1].bodies) == 1
    assert one.leader.epoch > two.leader.epoch


def test_groups_04_ranks_that_lead_nobody_serve_nothing(rig: Any) -> None:
    """A pipeline of which only other ranks are there is unknown; they show no stages, and clients aren't told of them."""
    team = Team(rig, size=3)
    team.ranks = []
    client = rig.client()
    for rank in (1, 2):
        team.ranks.append(Rank(team, rank, f"g{rank}".encode()))
        team.ranks[-1].attach()
    assert len(client.heard(m.Welcome)) == 1
    assert client.open() == ""
    assert client.last(m.SessionRefused).failure.field == "pipeline"
    status = rig.core.status()
    assert status["pipelines"] == {}
    assert [(each["rank"], each["stages"], each["ready"]) for each in status["workers"]] == [
        (1, [], False),
        (2, [], False),
    ]
    assert (of(rig)["state"], of(rig)["missing"]) == ("gathering", [0])


def test_groups_04_clients_hear_which_kinds_can_be_asked_for(rig: Any) -> None:
    """They are welcomed again when a leader comes, and when its group is over."""
    client = rig.client()
    team = Team(rig).start()
    assert client.last(m.Welcome).jobs == (KIND,)
    team.ranks[1].say(m.Goodbye("killed"))
    assert client.last(m.Welcome).jobs == ()


# --- shared memory --------------------------------------------------------------------------------------------------------


def test_groups_01_what_a_grouped_stage_reads_must_be_open_to_every_rank(rig: Any) -> None:
    """One rank on another machine keeps its input out of shared memory; what only the leader reads stays in it."""
    near = Team(rig, "near", 2, memory=True).start()
    client, name = session(rig)
    shared = rig.core.sessions[name].seats.shared
    assert shared == {"encode": ("condition",), "denoise": ("latent",), "decode": ("frames",)}
    client.end(name, "cancel")
    near.leader.say(m.Goodbye())
    Team(rig, "far", 2, memory=True, maps=(True, False)).start()
    name = client.open("again")
    shared = rig.core.sessions[name].seats.shared
    assert shared == {"encode": (), "denoise": ("latent",), "decode": ("frames",)}


def test_groups_01_a_rank_that_can_open_it_later_turns_it_on(rig: Any) -> None:
    """The answer of a rank that leads nobody counts for the sessions at its leader, from the next task on."""
    team = Team(rig, size=2, memory=True, maps=(True, False)).start()
    client, name = session(rig)
    client.submit(name, 0)
    memory = rig.core.sessions[name].seats
    assert memory.shared["encode"] == ()
    team.ranks[1].say(m.MemoryProbed("g0-0", rig.memory.probe("g0-0")))
    assert memory.shared["encode"] == ("condition",)
    client.submit(name, 1)
    for _ in range(2):
        team.leader.make("encode", "denoise", "decode")
    assert [task.shared for task in team.leader.heard(m.RunTask) if task.stage == "encode"][-1] == ("condition",)


def test_groups_01_what_all_ranks_read_comes_back_when_the_leader_is_through(rig: Any) -> None:
    """A grouped task's inputs are free again, and not before, when its leader says that it is done."""
    team = Team(rig, size=3, memory=True).start()
    client, name = session(rig, chunks=8)
    for index in range(5):
        client.submit(name, index)
        team.leader.finish("encode")
        team.leader.finish("denoise")
        rig.turn()
        team.leader.finish("decode")
        client.ack(name, index + 1)
        rig.turn()
    assert team.leader.memory.returned >= 10
    assert team.leader.memory.broken == set()


def test_groups_01_a_lost_rank_breaks_what_it_read(rig: Any) -> None:
    """What another worker wrote for a grouped stage must not be written again when a rank of the group is lost."""
    encoder = rig.worker("encoder", stages=("encode",), memory=True, slots=1)
    team = Team(rig, size=2, stages=("denoise", "decode")).start()
    client, name = session(rig)
    client.submit(name, 0)
    encoder.finish("encode")
    assert team.ranks[1].heard(m.RunTask)
    team.ranks[1].say(m.Goodbye("killed"))
    rig.turn()
    assert client.ended(name) is not None
    assert len(encoder.memory.broken) == 1


# --- refusals -------------------------------------------------------------------------------------------------------------


def test_groups_06_a_rank_that_differs_is_told_why(rig: Any) -> None:
    """It is refused before anything runs, by a sentence that names what differs and what is accepted."""
    leader = rig.stranger(b"leader")
    leader.say(hello("leader", 0, 2), attachment=0)
    other = rig.stranger(b"other")
    other.say(hello("other", 1, 2, packages={"torch": "2.12"}), attachment=0)
    refused = other.last(m.Rejected)
    assert refused.code == "conflict"
    assert refused.message == (
        "group 'g': version of torch is '2.12' at rank 1, '2.13' at rank 0; accepted: the same at all ranks"
    )
    assert of(rig)["missing"] == [1]


def test_groups_06_a_rank_with_an_epoch_of_nobody_leaves(rig: Any) -> None:
    """It is welcome, told that its epoch is over, and dropped: its stages never serve, and clients hear nothing of it."""
    client = rig.client()
    stale = rig.stranger(b"stale")
    rig.core._groups._ended[EARLIER] = None
    stale.say(hello("stale", 0, 2, epoch=EARLIER), attachment=0)
    assert [type(word) for word in stale.inbox] == [m.Welcome, m.EndGroup]
    assert rig.core.status()["workers"] == []
    assert len(client.heard(m.Welcome)) == 1
    assert rig.core.status()["pipelines"] == {}


def test_a_worker_alone_with_a_kind_of_job_is_its_own_group(rig: Any) -> None:
    """It serves its stream as ever, whether or not it has formed: only what is grouped waits for that."""
    worker = rig.worker(jobs=(JobSpec("t2v", "a video"),))
    client, name = session(rig)
    assert client.state(name)[0] == "ready"
    assert of(rig, "w")["state"] == "opening"
    worker.say(m.GroupFormed(worker.last(m.LeadGroup).epoch))
    assert of(rig, "w")["state"] == "formed"
