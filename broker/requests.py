"""Checking what a client asks for, before anything is started."""

from __future__ import annotations

from dataclasses import replace

from reelwire.checks import shown
from reelwire.errors import RequestError
from reelwire.messages import Failure, OpenSession
from reelwire.parts import KEY_CHARACTERS_MAX
from reelwire.spec import StreamSpec, check_parameters, check_tensors
from reelwire.tensors import Inline

from .desk import Desk
from .fitting import initialize_sizes, largest_field
from .peers import Peer
from .placement import Placement, Served


def check_request(request: OpenSession, spec: StreamSpec, image_bytes_max: int) -> OpenSession:
    """The request with complete parameters.

    Raises:
        RequestError: a field is wrong; it says which, and what is accepted.
    """
    if not 0 < len(request.key) <= KEY_CHARACTERS_MAX:
        raise RequestError("key", f"has {len(request.key)} characters; accepted: 1 to {KEY_CHARACTERS_MAX}")
    if not 1 <= request.chunks <= spec.chunks_max:
        raise RequestError("chunks", f"{request.chunks} is not accepted; accepted: 1 to {spec.chunks_max}")
    if request.credit.chunks < 0 or request.credit.nbytes < 0:
        raise RequestError(
            "credit", f"{request.credit.chunks} chunks, {request.credit.nbytes} bytes; accepted: 0 and more"
        )
    for name, ref in request.tensors.items():
        if not isinstance(ref.place, Inline):
            raise RequestError(name, "is in shared memory; accepted: tensors inside of the message")
        if ref.nbytes > image_bytes_max:
            raise RequestError(name, f"has {ref.nbytes} bytes; accepted: {image_bytes_max}")
    check_tensors(spec.tensors, {name: (ref.dtype, ref.shape) for name, ref in request.tensors.items()})
    return replace(request, parameters=check_parameters(spec, request.parameters))


def refusal(
    request: OpenSession, nbytes: int, peer: Peer, placement: Placement, desk: Desk, *, sessions: int
) -> Failure | OpenSession:
    """Why a session isn't opened, or the request with complete parameters.

    Args:
        request: what is asked for.
        nbytes: size of the message that asks.
        peer: who asks.
        placement: what is served.
        desk: settings, and what other requests take.
        sessions: how many are open.
    """
    config = desk.config
    served = placement.served.get(request.pipeline)
    if served is None or not served.workers:
        known = ", ".join(spec.name for spec in placement.specs()) or "none"
        return Failure("request", f"unknown pipeline {shown(request.pipeline)}; accepted: {known}", field="pipeline")
    try:
        complete = check_request(request, served.spec, config.image_bytes_max)
    except RequestError as error:
        return Failure("request", error.reason, field=error.field)
    stage = served.unserved_stage()
    full = (
        f"{sessions} sessions are open already"
        if sessions >= config.sessions_max
        else f"the client has {len(peer.sessions)} sessions already"
        if len(peer.sessions) >= config.sessions_per_client_max
        else f"requests of {desk.request_bytes} bytes wait already"
        if desk.request_bytes + nbytes > config.request_bytes_max
        else f"no worker has stage {stage!r} of {request.pipeline!r}"
        if stage is not None
        else ""
    )
    if full:
        return Failure("overload", full, retry_after_s=config.retry_after_s)
    return _too_large(complete, served) or complete


def _too_large(request: OpenSession, served: Served) -> Failure | None:
    """Why no worker of some stage could be told of the session."""
    for stage in served.spec.stages:
        sizes = initialize_sizes(request, served.spec, stage.name)
        reasons = [actor.limits.misfit(sizes) for actor in served.actors[stage.name].values()]
        if None not in reasons:
            text = f"the request doesn't fit what workers accept: {reasons[0]}"
            return Failure("request", text, field=largest_field(request))
    return None
