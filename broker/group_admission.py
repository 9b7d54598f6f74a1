"""Whether a worker fits the group that it wants to be a rank of, found out before it is taken."""

from __future__ import annotations

from collections.abc import Mapping

from reelwire.checks import shown
from reelwire.job_spec import JobSpec, validate_job
from reelwire.messages import Membership, Welcome, WorkerHello
from reelwire.parts import NAME_CHARACTERS_MAX
from reelwire.spec import SpecError
from reelwire.wire import encode

RANKS_MAX = 1024
"""Most ranks of a group."""
NUMBER_MAX = (1 << 63) - 1
"""Largest epoch and sequence."""
KINDS_MAX = 256
"""Most kinds of jobs of one worker."""
KINDS_BYTES_MAX = 256 << 10
"""Of all kinds of jobs together: each client is told of all in one header, beside all pipelines."""
HELD_MAX = 1024
"""Most jobs that a worker may have when it comes."""

Objection = tuple[str, str]
"""A code of `Rejected`, and a sentence. With ``limit`` the worker tries again: time may help."""


def membership_of(hello: WorkerHello) -> Membership | None:
    """A worker's place in its group; one that says none and does jobs or has a grouped stage is a group of its own."""
    if hello.group is not None:
        return hello.group
    if hello.jobs or any(offer.grouped for offer in hello.stages):
        return Membership(hello.name, 0, 1)
    return None


def place_objection(hello: WorkerHello, place: Membership) -> Objection | None:
    """What is wrong with what a rank says of itself, whoever else there is."""
    texts = {"group": place.group, "machine": place.machine, "fingerprint": place.fingerprint}
    for name, text in texts.items():
        if len(text) > NAME_CHARACTERS_MAX:
            return "limit", f"group: {name} has {len(text)} characters; accepted: {NAME_CHARACTERS_MAX}"
        if not text.isprintable():
            return "malformed", f"group: {name} is {shown(text)}; accepted: characters that can be shown"
    if not place.group:
        return "malformed", "group: a group has a name"
    if not 1 <= place.world <= RANKS_MAX:
        return "malformed", f"group: world is {shown(place.world)}; accepted: 1 to {RANKS_MAX}"
    if not 0 <= place.rank < place.world:
        return "malformed", f"group: rank is {shown(place.rank)}; accepted: 0 to {place.world - 1}"
    for name, number in {"epoch": place.epoch, "sequence": place.sequence, "pid": place.pid}.items():
        if not 0 <= number <= NUMBER_MAX:
            return "malformed", f"group: {name} is {shown(number)}; accepted: 0 to {NUMBER_MAX}"
    if place.rank and (hello.stages or hello.jobs or hello.held):
        what = "stages" if hello.stages else "kinds of jobs" if hello.jobs else "jobs that it has"
        return "malformed", f"rank {place.rank} says {what}; accepted: those of rank 0, which speaks for its group"
    return _jobs_objection(hello)


def _jobs_objection(hello: WorkerHello) -> Objection | None:
    """What is wrong with the jobs that a worker does or has."""
    if len(hello.jobs) > KINDS_MAX:
        return "limit", f"{len(hello.jobs)} kinds of jobs; accepted: {KINDS_MAX}"
    if len(hello.held) > HELD_MAX:
        return "limit", f"{len(hello.held)} jobs are there already; accepted: {HELD_MAX}"
    names = [spec.name for spec in hello.jobs]
    for spec in hello.jobs:
        if names.count(spec.name) > 1:
            return "malformed", f"kind of job {shown(spec.name)} is announced twice; accepted: once"
        if len(spec.name) > NAME_CHARACTERS_MAX:
            return "limit", f"a kind of job has a name of {len(spec.name)} characters; accepted: {NAME_CHARACTERS_MAX}"
        try:
            validate_job(spec)
        except SpecError as error:
            return "malformed", str(error)
    for job in hello.held:
        if not 0 < len(job.job) <= NAME_CHARACTERS_MAX or not 1 <= job.attempt <= NUMBER_MAX:
            return "malformed", f"it has attempt {shown(job.attempt)} at job {shown(job.job)}, which can't be"
    return None


def is_same_process(one: Membership, other: Membership) -> bool:
    """Whether two places are those of one process; of processes that don't say who they are nobody knows, and they are."""
    return (one.machine, one.pid, one.started) == (other.machine, other.pid, other.started)


def taken_objection(place: Membership, held: Membership, holder: str) -> Objection:
    """Say to a newcomer that its rank is another process's.

    Args:
        place: where the newcomer wants to be.
        held: what the other one says of itself.
        holder: the name of that worker.
    """
    where = "this" if held.machine == place.machine else "another"
    process = f" (process {held.pid} on {where} machine)" if held.pid else ""
    rank = f"rank {place.rank} of group {shown(place.group)}"
    return "limit", f"{rank} is worker {shown(holder)}{process}; accepted: one process for each rank, once that is gone"


def member_objection(
    hello: WorkerHello, place: Membership, world: int, others: Mapping[int, WorkerHello]
) -> Objection | None:
    """Why a rank doesn't fit the ranks that are attached.

    Args:
        hello: what it says.
        place: where it belongs.
        world: how many ranks the group has.
        others: what each rank that stays has said; there is one.
    """
    name = shown(place.group)
    if place.world != world:
        return "conflict", f"group {name} has {world} ranks, rank {place.rank} counts {place.world}; accepted: {world}"
    for rank, other in others.items():
        for what, (mine, theirs) in _alike(hello, other).items():
            if mine != theirs:
                differs = f"{what} is {shown(mine)} at rank {place.rank}, {shown(theirs)} at rank {rank}"
                return "conflict", f"group {name}: {differs}; accepted: the same at all ranks"
        if hello.specs and other.specs and hello.specs != other.specs:
            differs = f"rank {place.rank} serves other pipelines than rank {rank}"
            return "conflict", f"group {name}: {differs}; accepted: the same at all ranks"
    return None


def _alike(hello: WorkerHello, other: WorkerHello) -> dict[str, tuple[str | None, str | None]]:
    """What two ranks must have in common, as each of them says it."""
    both = (hello, other)
    device, theirs = (one.device.partition(":")[0] for one in both)
    mine, other_print = ("" if one.group is None else one.group.fingerprint for one in both)
    return {
        "version of reelwire": (hello.version, other.version),
        **{f"version of {name}": (hello.packages.get(name), other.packages.get(name)) for name in _packages(both)},
        "fingerprint of weights and options": (mine, other_print),
        "kind of device": (device, theirs),
    }


def _packages(hellos: tuple[WorkerHello, ...]) -> list[str]:
    return list(dict.fromkeys(name for hello in hellos for name in hello.packages))


def kinds_objection(jobs: tuple[JobSpec, ...], known: Mapping[str, JobSpec]) -> Objection | None:
    """Why kinds of jobs can't be announced beside those of other groups."""
    for spec in jobs:
        if known.get(spec.name, spec) != spec:
            return (
                "conflict",
                f"kind of job {shown(spec.name)} is done by another group, which describes it otherwise; accepted: the same spec",
            )
    both = {**known, **{spec.name: spec for spec in jobs}}
    if jobs and len(encode(Welcome("", "", 1.0, 1, {}, (), tuple(both.values())), 0)[0]) > KINDS_BYTES_MAX:
        return "limit", (
            f"all announced kinds of jobs together take over {KINDS_BYTES_MAX} bytes; a client couldn't be told"
        )
    return None
