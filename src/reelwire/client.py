"""The SDK: a connection to a broker. Never imports torch."""

from __future__ import annotations

import getpass
import math
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from numpy.typing import ArrayLike

from . import __version__, checks, wire
from . import client_events as e
from .client_core import ClientCore
from .client_door import deadline, left
from .client_job import Job, JobStatus, only, submitted
from .client_job_request import MediaPath, MediaPaths, job_request
from .client_loop import LINGER_S, Link, check_endpoint
from .client_memory import ClientMemory
from .client_request import FramesPolicy, Image, session_request
from .client_session import ANSWER_TIMEOUT_S, Session
from .client_view import SessionView
from .endpoints import DEFAULT_ENDPOINT as DEFAULT_ENDPOINT
from .errors import BrokerUnreachable, ConfigError, RequestError
from .job_spec import JobSpec
from .messages import ControlBinding, Credit, Jobs, Pace, Welcome
from .parts import NAME_CHARACTERS_MAX
from .spec import Plain, StreamSpec

T = TypeVar("T")
ENDPOINT_VARIABLE = "REELWIRE_BROKER"
CLOSE_TIMEOUT_S = 4 * LINGER_S
OWN_NAME_CHARACTERS_MAX = 100
"""Of a user's name or of a host's, in the name that a client has by itself; far below what a name may have."""


def status_call(now: float, call: int) -> e.Ask:
    """The call for the broker's status."""
    return e.Ask(now, call, None)


def jobs_call(now: float, call: int) -> e.AskJob:
    """The call for where all jobs stand."""
    return e.AskJob(now, call, "")


def job_call(job: object) -> Callable[[float, int], e.AskJob]:
    """The call for where one job stands.

    Raises:
        RequestError: it has no such name.
    """
    if not isinstance(job, str) or not job:
        raise RequestError("id", f"{checks.shown(job)} is not accepted; accepted: the id of a job")
    return lambda now, call: e.AskJob(now, call, job)


def statuses(answer: object) -> list[JobStatus]:
    """The jobs of an answer, for the application."""
    return [JobStatus.of(info) for info in cast("Jobs", answer).jobs]


def own_name() -> str:
    """What a client is called that wasn't given a name: ``user@host``, the same for all programs of one person there."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # the system has no name for whoever runs this
        user = "user"
    return "@".join(checks.printable(text)[:OWN_NAME_CHARACTERS_MAX] for text in (user, socket.gethostname()))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or (name and not name.strip()) or not name.isprintable():
        raise RequestError(
            "name", f"{checks.shown(name)} is not accepted; accepted: a text that can be shown in one line"
        )
    if len(name) > NAME_CHARACTERS_MAX:
        raise RequestError("name", f"a name of {len(name)} characters; accepted: {NAME_CHARACTERS_MAX}")


class ClientShell:
    """What a connection is to threads and to event loops alike; `Client` says what the arguments mean."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        name: str = "",
        connect_timeout_s: float = 5.0,
        frame_bytes_max: int = 256 << 20,
        output_credit_chunks: int = Credit().chunks,
        output_credit_bytes: int = Credit().nbytes,
        shared_memory: bool = True,
    ) -> None:
        """Check the settings, and begin to connect."""
        self.endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        check_endpoint(self.endpoint)
        try:
            checks.check_seconds("connect_timeout_s", connect_timeout_s)
            checks.check_count("frame_bytes_max", frame_bytes_max, most=checks.BYTES_MAX)
            checks.check_truth("shared_memory", shared_memory)
            checks.check_count("output_credit_chunks", output_credit_chunks)
            checks.check_count("output_credit_bytes", output_credit_bytes, most=checks.BYTES_MAX)
        except ConfigError as error:
            raise RequestError(error.field, error.reason) from None
        _check_name(name)
        self._connect_timeout_s = connect_timeout_s
        limits = wire.Limits(frame_bytes_max=frame_bytes_max)
        said = {"frame_bytes_max": limits.frame_bytes_max, "header_bytes_max": limits.header_bytes_max}
        core = ClientCore(__version__, name or own_name(), said, Credit(output_credit_chunks, output_credit_bytes))
        self._link = Link(core, self.endpoint, limits, ClientMemory(shared_memory, frame_bytes_max))
        self._finalizer = weakref.finalize(self, self._link.leave)
        self._finalizer.atexit = False  # the loop's own exit handler also waits
        self._began()

    def _began(self) -> None:
        """The connection is being made; to be overridden by whoever waits for it."""

    def _unanswered(self) -> BrokerUnreachable:
        seconds = f"{self._connect_timeout_s:g} s"
        return BrokerUnreachable(f"no reelwire broker answered at {self.endpoint} within {seconds}")

    def _view(self, opened: object) -> SessionView:
        with self._link.lock:
            return self._link.core.sessions[cast("str", opened)]

    def __repr__(self) -> str:
        with self._link.lock:
            return f"<{type(self).__name__} of {self.endpoint}: {self._link.core.phase}>"


class Client(ClientShell):
    """A connection to a broker; every method may be called from any thread.

    If the connection is lost, the sessions that live on it fail, and the client connects again by itself: later calls
    wait for that, `connect_timeout_s` at most. A client that is dropped, or a process that ends, leaves without waiting
    for anything; the broker cancels its sessions. Jobs go on without it.

    Args:
        endpoint: ``tcp://HOST:PORT`` or ``ipc://PATH``; without one the environment variable ``REELWIRE_BROKER`` says
            it, or it is ``tcp://127.0.0.1:7461``.
        name: whose the jobs of this client are: all clients of one name wait in one line, take turns with those of other
            names, and share one limit, also after they have connected anew. ``user@host`` if it is empty.
        connect_timeout_s: how long to wait for the broker's answer, in seconds.
        frame_bytes_max: largest tensor that is accepted from the broker, in bytes; the broker is told, and fails a
            session whose chunks are larger.
        output_credit_chunks: chunks of a session that may be on their way to the application; the session waits while
            so many were sent and not taken. It counts up to what the pipeline's output edge holds, 2 for the world
            model: more changes nothing.
        output_credit_bytes: bytes of such chunks, at most; one chunk may go over it, or a large one could never come.
        shared_memory: whether workers on this machine, of this user, may hand chunks over through shared memory, where
            that can be had: the same frames with less copying. What travels inside of messages otherwise.

    Attributes:
        endpoint: where it connects to.

    Raises:
        RequestError: the endpoint has another form.
        BrokerUnreachable: nobody answers in time.
        VersionMismatch: the broker has a version that doesn't fit; both are named.
        OverloadError: the broker takes no more clients now.
    """

    def _began(self) -> None:
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
        /,
        pipeline: str,
        *,
        image: Image | None = None,
        prompt: str | None = None,
        seed: int = 0,
        chunks: int | None = None,
        frames: int | None = None,
        frames_policy: FramesPolicy = "strict",
        tensors: Mapping[str, ArrayLike] | None = None,
        control_binding: ControlBinding = "late",
        pace: Pace = "asap",
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
            control_binding: ``late``: a chunk's keys are those that are down when it begins, so that a change shows as
                soon as it can; ``early``: those that were down when its turn was fixed, up to two chunks ahead.
                Controls that are submitted are what they are.
            pace: ``asap``, or ``realtime``: no further ahead of the media clock than the output credit, or than
                the pipeline's output edge where that holds less.
            wait_ready: return when the session is initialized, so that what its initialization refuses is raised here;
                otherwise as soon as it exists.
            timeout: seconds that all of it may take: to connect, where that isn't done or was lost (`connect_timeout_s` at
                most), to read the picture, and to open the session, which is cancelled if they are over.
            parameters: what else the pipeline takes.

        Raises:
            RequestError: a field is refused; `field` names it.
            OverloadError: there is no room for it now, or no worker at all; `retry_after_s` says when to try again.
            SessionFailed: its initialization failed.
            BrokerUnreachable: the connection is lost.
            TimeoutError: it wasn't opened in time.
        """
        until = deadline(timeout)
        request = session_request(
            self._attached(until),
            pipeline,
            image=image,
            prompt=prompt,
            seed=seed,
            chunks=chunks,
            frames=frames,
            frames_policy=frames_policy,
            tensors=tensors,
            control_binding=control_binding,
            pace=pace,
            wait_ready=wait_ready,
            **parameters,
        )
        answer = self._link.call(request.event, left(until))
        return Session(self, self._link, request, self._view(answer))

    @property
    def job_kinds(self) -> dict[str, JobSpec]:
        """What jobs can be submitted, by name. Raises as `status` does."""
        return {spec.name: spec for spec in self._attached().jobs}

    def submit_edit(
        self,
        /,
        task: str,
        *,
        prompt: str | None = None,
        video: MediaPaths | None = None,
        images: MediaPaths = (),
        media: Mapping[str, MediaPaths] | None = None,
        seed: int | None = None,
        profile: str | None = None,
        key: str | None = None,
        priority: int = 0,
        output: MediaPath | None = None,
        timeout: float | None = None,
        **parameters: Plain,
    ) -> Job:
        """Submit a job; when this returns it is durable, and will be done whatever happens to client or broker.

        What can be checked is checked before anything is sent. Files are hashed and uploaded, unless the broker has the
        same content already. If the connection is lost meanwhile all of it is said again over the next one, which is
        waited for `connect_timeout_s` at most: under one key there is never a second job.

        A file is a path here, or ``"broker:/absolute/path"`` on the broker's host, below one of its media roots.

        Args:
            task: the kind of job, one of `job_kinds`.
            prompt: the text that says what to do.
            video: for the input ``video``: a file, or several in a list where the kind takes several.
            images: for the input ``images``, likewise.
            media: files for inputs of other names.
            seed: what the noise depends on.
            profile: how exactly and how fast, such as ``pristine`` or ``lossless``.
            key: unique for all time; by default a random one. A job that was submitted under it before is that job.
            priority: higher ones go first; -100 to 100.
            output: where the result is to lie on the broker's host as well, below one of its media roots.
            timeout: seconds that all of it may take. If they are over the job may have been accepted; submitting it again
                under the same key tells.
            parameters: what else the kind takes. None stands for what isn't given.

        Raises:
            RequestError: a field is refused; `field` names it: ``kind``, ``steps``, ``video``, ``images[1]``.
            OverloadError: there is no room for it now, or no worker does jobs; `retry_after_s` says when to try again.
            BrokerUnreachable: the connection is lost, or the broker stops.
            TimeoutError: it wasn't accepted in time.
        """
        until = deadline(timeout)
        request = job_request(
            self._attached(until),
            task,
            prompt=prompt,
            video=video,
            images=images,
            media=media,
            seed=seed,
            profile=profile,
            key=key,
            priority=priority,
            output=output,
            proceed=lambda: left(until),
            **parameters,
        )
        return Job(self, self._link, submitted(self._link, request, self._connect_timeout_s, until))

    def job(self, id: str, timeout: float = ANSWER_TIMEOUT_S) -> Job:  # noqa: A002  it is what `Job.id` says
        """A job that was submitted by whomever, by its id.

        Raises:
            JobError: the broker knows no such job.
            BrokerUnreachable: the connection is lost.
            TimeoutError: no answer within `timeout` seconds.
        """
        question = job_call(id)
        self._attached()
        return Job(self, self._link, only(self._link.call(question, timeout)))

    def jobs(self, timeout: float = ANSWER_TIMEOUT_S) -> list[JobStatus]:
        """Where all jobs stand that the broker knows, newest first; of very many, the newest.

        Without their `facts`, which one job's own status has. Raises as `status` does.
        """
        self._attached()
        return statuses(self._link.call(jobs_call, timeout))

    def status(self, timeout: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """What the broker has: workers, sessions, counters.

        Raises:
            BrokerUnreachable: the connection is lost.
            TimeoutError: no answer within `timeout` seconds.
        """
        self._attached()
        return dict(cast("Mapping[str, Any]", self._link.call(status_call, timeout)))

    def close(self) -> None:
        """Say goodbye and disconnect; the sessions that are still open are cancelled. Closing again does nothing."""
        self._link.leave()
        self._link.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _attached(self, until: float = math.inf) -> Welcome:
        allowed = left(min(until, deadline(self._connect_timeout_s)))
        try:
            return cast("Welcome", self._link.call(e.Attach, allowed))
        except TimeoutError:
            left(until)  # raises if it is the caller's time that is over
            raise self._unanswered() from None


def first_pipelines(client: Client, timeout_s: float) -> dict[str, StreamSpec]:
    """What sessions can be opened of, by name, once the first worker has come.

    Args:
        client: connected.
        timeout_s: how long to wait for it, in seconds.

    Raises:
        TimeoutError: none came.
        BrokerUnreachable: the connection is lost.
    """
    return _first(client, lambda: client.pipelines, timeout_s)


def first_job_kinds(client: Client, timeout_s: float) -> dict[str, JobSpec]:
    """What jobs can be submitted, by name, once the first worker that does any has come: see `first_pipelines`."""
    return _first(client, lambda: client.job_kinds, timeout_s)


@contextmanager
def watching_connection(client: Client, told: Callable[[bool], None]) -> Iterator[None]:
    """Have `told` called with whether the broker can be reached, whenever that changes while the block runs.

    Args:
        client: connected.
        told: called in whatever thread finds out, which nothing else of the client gets past meanwhile.
    """
    link, was_there = client._link, True  # noqa: SLF001  the client is of this module

    def changed() -> None:
        nonlocal was_there
        is_there = link.core.phase == "attached"
        if is_there != was_there and link.core.phase != "gone":
            was_there = is_there
            told(is_there)

    with link.watching("", changed):
        with link.lock:
            changed()  # it may be lost already
        yield


def _first(client: Client, known: Callable[[], dict[str, T]], timeout_s: float) -> dict[str, T]:
    until, told = deadline(timeout_s), threading.Event()
    with client._link.watching("", told.set):  # noqa: SLF001  the client is of this module
        while not (found := known()):
            told.wait(left(until))
            told.clear()
    return found
