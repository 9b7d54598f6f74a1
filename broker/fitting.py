"""What fits its receiver, found out before it is sent: a message that is too large fails its session by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from reelwire import wire
from reelwire.messages import Artifact, Chunk, InitializeStage, OpenSession, RunTask, SetStageKeys
from reelwire.spec import StreamSpec

from .config import BrokerConfig

ATTACHMENT_MAX = (1 << 63) - 1
HANDED_BYTES_MAX = 4096
"""Room that a request leaves in the header of an InitializeStage for what stages hand on."""
STAGE_TIMING_BYTES_MAX = 64
"""What the times of one stage take in a header, beside the stage's name."""


def limits_of(said: Mapping[str, int], config: BrokerConfig) -> wire.Limits | None:
    """What a peer accepts: what its hello said, else what the broker accepts; None for numbers that are no limits."""
    known = {field.name: said[field.name] for field in fields(wire.Limits) if field.name in said}
    return None if any(value < 1 for value in known.values()) else replace(config.wire_limits(), **known)


def misfit(message: InitializeStage | RunTask | SetStageKeys, limits: wire.Limits) -> str | None:
    """Why a worker doesn't accept a message; None when it does."""
    return limits.misfit(wire.sizes_of(wire.encode(message, ATTACHMENT_MAX)))


def chunk_misfit(chunk: Chunk, stages: Iterable[str], limits: wire.Limits) -> str | None:
    """Why a client doesn't accept a chunk that has passed `stages`, whose times aren't in it yet; None when it does."""
    sizes = wire.sizes_of(wire.encode(chunk, ATTACHMENT_MAX))
    sizes[0] += sum(STAGE_TIMING_BYTES_MAX + len(stage.encode()) for stage in stages)
    return limits.misfit(sizes)


def initialize_sizes(request: OpenSession, spec: StreamSpec, stage: str) -> list[int]:
    """The bytes of the frames that a stage's InitializeStage will have for a request, with room for what is handed."""
    names = spec.stage(stage).request_tensors
    message = InitializeStage(
        session="",
        pipeline=spec.name,
        stage=stage,
        epoch=1,
        stage_epoch=1,
        chunks=request.chunks,
        parameters=request.parameters,
        tensors={name: request.tensors[name] for name in names if name in request.tensors},
        handed=Artifact(),
    )
    sizes = wire.sizes_of(wire.encode(message, ATTACHMENT_MAX))
    return [sizes[0] + HANDED_BYTES_MAX, *sizes[1:]]


def largest_field(request: OpenSession) -> str:
    """The parameter or tensor of a request that takes most bytes."""
    nbytes = {name: len(value.encode()) if isinstance(value, str) else 0 for name, value in request.parameters.items()}
    nbytes |= {name: ref.nbytes for name, ref in request.tensors.items()}
    return max(nbytes, key=nbytes.__getitem__, default="parameters")
