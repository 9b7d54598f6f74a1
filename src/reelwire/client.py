"""The SDK: a connection to a broker. Never imports torch."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import __version__, checks, media, wire
from . import client_events as e
from .client_core import ClientCore
from .client_loop import LINGER_S, Link, check_endpoint
from .client_session import ANSWER_TIMEOUT_S, Session
from .client_values import session_length, tensor_refs
from .client_view import RETRY_AFTER_S
from .endpoints import DEFAULT_ENDPOINT as DEFAULT_ENDPOINT
from .errors import BrokerUnreachable, ConfigError, OverloadError, RequestError
from .messages import ClientHello, OpenSession, Welcome
from .spec import Plain, StreamSpec, check_parameters, check_tensors
from .tensors import TensorRef

ENDPOINT_VARIABLE = "REELWIRE_BROKER"

Image = str | os.PathLike[str] | ArrayLike


class Client:
    """A connection to a broker; every method may be called from any thread.

    If the connection is lost, the sessions that live on it fail, and the client connects again by itself: later calls
    wait for that, `connect_timeout_s` at most. A client that is dropped, or a process that ends, leaves without waiting
    for anything; the broker cancels its sessions.

    Args:
        endpoint: ``tcp://HOST:PORT`` or ``ipc://PATH``; without one the environment variable ``REELWIRE_BROKER`` says
            it, or it is ``tcp://127.0.0.1:7461``.
        name: how the client is called in the broker's status; the broker finds a name if it is empty.
        connect_timeout_s: how long to wait for the broker's answer, in seconds.
        frame_bytes_max: largest tensor that is accepted from the broker, in bytes; the broker is told, and fails a
            session whose chunks are larger.

    Attributes:
        endpoint: where it connects to.

    Raises:
        RequestError: the endpoint has another form.
        BrokerUnreachable: nobody answers in time.
        VersionMismatch: the broker has a version that doesn't fit; both are named.
        OverloadError: the broker takes no more clients now.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        name: str = "",
        connect_timeout_s: float = 5.0,
        frame_bytes_max: int = 256 << 20,
    ) -> None:
        """Connect, and wait until the broker has answered."""
        self.endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        check_endpoint(self.endpoint)
        try:
            checks.check_seconds("connect_timeout_s", connect_timeout_s)
            checks.check_count("frame_bytes_max", frame_bytes_max, most=checks.BYTES_MAX)
        except ConfigError as error:
            raise RequestError(error.field, error.reason) from None
        try:
            wire.encode(ClientHello(__version__, name), 0)
        except ValueError:
            raise RequestError("name", f"{name!r} is not a text") from None
        self._connect_timeout_s = connect_timeout_s
        limits = wire.Limits(frame_bytes_max=frame_bytes_max)
        said = {"frame_bytes_max": limits.frame_bytes_max, "header_bytes_max": limits.header_bytes_max}
        self._link = Link(ClientCore(__version__, name, said), self.endpoint, limits)
        self._finalizer = weakref.finalize(self, self._link.leave)
        self._finalizer.atexit = False  # the loop's own exit handler also waits
        try:
            self._attached()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The name under which the broker knows this client. Raises as `status` does."""
        return self._attached().name

    @property
    def pipelines(self) -> dict[str, StreamSpec]:
        """What sessions can be opened of, by name. Raises as `status` does."""
        return {spec.name: spec for spec in self._attached().specs}

    def open_session(
        self,
        pipeline: str,
        *,
        image: Image | None = None,
        prompt: str | None = None,
        seed: int = 0,
        chunks: int | None = None,
        frames: int | None = None,
        frames_policy: Literal["strict", "truncate"] = "strict",
        tensors: Mapping[str, ArrayLike] | None = None,
        wait_ready: bool = True,
        timeout: float | None = None,
        **parameters: Plain,
    ) -> Session:
        """Open a session; what can be checked is checked before anything is sent.

        Args:
            pipeline: name of the pipeline.
            image: the first picture: a file that `media.load_image` reads, or uint8 [height, width, 3] RGB. One that is
                larger than the broker accepts is reduced as `media.shrink` does.
            prompt: the text that describes the world.
            seed: what the noise depends on.
            chunks: length of the session in chunks; give this or `frames`.
            frames: length of the session in pixel frames.
            frames_policy: ``strict`` refuses a number of frames that doesn't fill whole chunks, ``truncate`` shortens it.
            tensors: other tensors that the pipeline takes, by name.
            wait_ready: return when the session is initialized, so that what its initialization refuses is raised here;
                otherwise as soon as it exists.
            timeout: seconds to wait at most; the session is cancelled if they are over.
            parameters: what else the pipeline takes.

        Raises:
            RequestError: a field is refused; `field` names it.
            OverloadError: there is no room for it now, or no worker at all; `retry_after_s` says when to try again.
            SessionFailed: its initialization failed.
            BrokerUnreachable: the connection is lost.
            TimeoutError: it wasn't opened in time.
        """
        welcome = self._attached()
        spec = _spec(pipeline, welcome)
        length = session_length(spec, chunks, frames, frames_policy)
        complete = check_parameters(spec, _given(spec, prompt, seed, parameters))
        refs = _tensors(
            spec,
            image,
            {} if tensors is None else tensors,
            welcome.limits.get("image_bytes_max", media.IMAGE_BYTES_MAX),
        )
        _check_sizes(refs, welcome)
        key = secrets.token_hex(16)
        _check_encodable(OpenSession(key, pipeline, length, complete, refs), welcome)
        answer = self._link.call(
            lambda now, call: e.Open(now, call, key, pipeline, length, complete, refs, wait_ready), timeout
        )
        with self._link.lock:
            view = self._link.core.sessions[cast("str", answer)]
        return Session(self, self._link, spec, view, complete)

    def status(self, timeout: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """What the broker has: workers, sessions, counters.

        Raises:
            BrokerUnreachable: the connection is lost.
            TimeoutError: no answer within `timeout` seconds.
        """
        self._attached()
        answer = self._link.call(lambda now, call: e.Ask(now, call, None), timeout)
        return dict(cast("Mapping[str, Any]", answer))

    def close(self) -> None:
        """Say goodbye and disconnect; the sessions that are still open are cancelled. Closing again does nothing."""
        self._link.leave()
        self._link.join(4 * LINGER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        with self._link.lock:
            return f"<Client of {self.endpoint}: {self._link.core.phase}>"

    def _attached(self) -> Welcome:
        try:
            answer = self._link.call(e.Attach, self._connect_timeout_s)
        except TimeoutError:
            raise BrokerUnreachable(
                f"no reelwire broker answered at {self.endpoint} within {self._connect_timeout_s:g} s"
            ) from None
        return cast("Welcome", answer)


def _spec(pipeline: object, welcome: Welcome) -> StreamSpec:
    known = {spec.name: spec for spec in welcome.specs}
    if not isinstance(pipeline, str):
        raise RequestError("pipeline", f"{pipeline!r} is not a text; accepted: {', '.join(sorted(known)) or 'a name'}")
    if not known:  # which ones there will be only the workers know, so that the name can't be called wrong
        raise OverloadError(f"no worker serves {pipeline!r} now: the broker has no worker", RETRY_AFTER_S)
    if pipeline not in known:
        raise RequestError("pipeline", f"{pipeline!r} is unknown; accepted: {', '.join(sorted(known))}")
    return known[pipeline]


def _check_sizes(refs: Mapping[str, TensorRef], welcome: Welcome) -> None:
    most = welcome.limits.get("frame_bytes_max", wire.Limits().frame_bytes_max)
    for name, ref in refs.items():
        if ref.nbytes > most:
            raise RequestError(name, f"takes {ref.nbytes} bytes; accepted by the broker: {most}")


def _check_encodable(message: OpenSession, welcome: Welcome) -> None:
    try:
        header = wire.encode(message, 0)[0]
    except ValueError as error:
        raise RequestError("parameters", f"hold a value that can't be sent ({error})") from None
    most = welcome.limits.get("header_bytes_max", wire.Limits().header_bytes_max)
    if len(header) > most:
        raise RequestError("parameters", f"take {len(header)} bytes; accepted: {most}")


def _given(spec: StreamSpec, prompt: str | None, seed: int, parameters: Mapping[str, Plain]) -> dict[str, Plain]:
    given: dict[str, Plain] = dict(parameters)
    if prompt is not None:
        given["prompt"] = prompt
    if seed != 0 or any(parameter.name == "seed" for parameter in spec.parameters):
        given["seed"] = seed
    return given


def _tensors(
    spec: StreamSpec, image: Image | None, others: Mapping[str, ArrayLike], image_bytes_max: int
) -> dict[str, TensorRef]:
    if not isinstance(others, Mapping):
        raise RequestError("tensors", f"are a {type(others).__name__}; accepted: a mapping of names to arrays")
    given = dict(others)
    if image is not None:
        if all(tensor.name != "image" for tensor in spec.tensors):
            raise RequestError("image", f"{spec.name!r} takes no picture")
        if isinstance(image, str | os.PathLike):
            given["image"] = media.load_image(image, image_bytes_max)
        else:
            given["image"] = media.shrink(_as_array(image), image_bytes_max)
    refs = tensor_refs(given)
    check_tensors(spec.tensors, {name: (ref.dtype, ref.shape) for name, ref in refs.items()})
    return refs


def _as_array(image: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(image)
    except (TypeError, ValueError) as error:
        raise RequestError("image", f"is no array ({error}); accepted: a file, or uint8[height, width, 3]") from None
