"""What fits its receiver, found out before it is sent: a message that is too large fails its session by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from reelwire import wire
from reelwire.messages import Artifact, FromBroker, InitializeStage, OpenSession
from reelwire.spec import StreamSpec
from reelwire.tensors import Shared

from .config import BrokerConfig

ATTACHMENT_MAX = (1 << 63) - 1
HANDED_BYTES_MAX = 4096
"""Room that a request leaves in the header of an InitializeStage for what stages hand on."""


def limits_of(said: Mapping[str, int], config: BrokerConfig) -> wire.Limits | None:
    """What a peer accepts: what its hello said, else what the broker accepts; None for numbers that are no limits."""
    known = {field.name: said[field.name] for field in fields(wire.Limits) if field.name in said}
    return None if any(value < 1 for value in known.values()) else replace(config.wire_limits(), **known)


def fitted(
    message: FromBroker, limits: wire.Limits, artifacts: Iterable[Artifact] = ()
) -> tuple[wire.Packed, str | None]:
    """A message as it is sent, and why its receiver doesn't accept it; None when it does.

    Tensors of its `artifacts` that are in shared memory count as if they were inside of it: whether something is too
    large doesn't depend on where it was made.
    """
    packed = wire.pack(message)
    header_bytes = wire.HEADER_BYTES + wire.ENTRY_BYTES + len(packed.name) + len(packed.body)
    sizes = wire.sizes_of(packed.buffers)
    for artifact in artifacts:
        if artifact.tensors:
            sizes += [tensor.nbytes for tensor in artifact.tensors.values() if isinstance(tensor.place, Shared)]
    if sizes or header_bytes > limits.header_bytes_max or header_bytes > limits.message_bytes_max:
        return packed, limits.misfit([header_bytes, *sizes])
    return packed, None


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
