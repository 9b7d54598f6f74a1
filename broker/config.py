"""Settings of a broker: every limit has a name with its unit and a default."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from reelwire import checks
from reelwire.errors import ConfigError
from reelwire.wire import Limits


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """What a broker is told at its start.

    Attributes:
        listen: endpoint to bind, ``tcp://HOST:PORT`` (``*`` as the port: any free one) or ``ipc://PATH``.
        insecure: bind to an address that other machines reach although nothing is encrypted.
        heartbeat_s: interval of signs of life, both ways.
        missed: intervals of silence after which a peer is dead.
        busy_for_s_max: longest silence that a peer may announce, in seconds.
        client_grace_s: how long a session outlives a client that is lost without a word; nobody resumes it in this version.
        control_idle_s: a session without a control for so long is closed.
        stall_s: a session whose client acknowledges nothing for so long is closed; and a file that comes in parts, from a
            worker or a client, is given up if a part that is owed doesn't come for so long.
        placement_timeout_s: how long a session waits for room at the workers.
        initialize_timeout_s: a stage that says nothing for so long while it initializes a session is hung.
        task_timeout_s: a stage that says nothing for so long while it has a task is hung.
        close_timeout_s: how long the end of a session may take, from the word that ends it; a stage that says nothing
            for so long while a session that ends waits for it is hung.
        drain_s: how long a broker that was asked to stop waits for its sessions.
        result_keep_s: how long chunks that nobody acknowledged outlive their session's stages, and how long a job that has ended
            is remembered, with its result.
        retry_after_s: what a refused client is advised to wait.
        release_attempts: how often the release of a stage is tried.
        sessions_max: most sessions at once.
        peers_max: most clients and workers at once.
        sessions_per_client_max: most sessions at once of one client.
        request_bytes_max: most bytes of all requests that are kept because their stages aren't all initialized.
        frame_bytes_max: largest tensor of a message.
        header_bytes_max: largest header of a message.
        message_bytes_max: largest message.
        control_bytes_max: largest control message.
        image_bytes_max: largest tensor of a session request.
        outbox_bytes_max: most bytes that wait for one peer, and most that the socket has for it and hasn't sent; small
            messages, up to 16 MiB, aren't counted among the latter.
        outbox_messages_max: most messages that wait for one peer.
        turn_messages_max: messages that are read before the loop sends what they lead to.
        status_sessions_max: sessions that a status lists one by one.
        linger_s: how long the last messages may take to leave at the end.
        state_dir: folder of what must outlive the broker, which no other broker uses; empty: below the user's state
            folder, by the endpoint, or for an endpoint with any free port a temporary one that is removed at the end.
        media_roots: folders on the broker's host below which requests may name files.
        jobs_queued_max: most jobs that wait.
        jobs_queued_per_client_max: most of them of one client.
        jobs_kept_max: most jobs that have ended and are remembered; those that ended first are forgotten first.
        job_attempts: how often a job is begun whose workers are lost.
        checkpoint_steps: steps of a job between two states that are kept.
        rejoin_s: how long after its start a broker waits for the workers that have a job.
        group_timeout_s: how long the ranks of a group may take to meet, their weights aside.
        upload_bytes_max: largest file of a request.
        uploads_per_client_max: most uploads of one client that aren't part of a job yet; a further one takes the place of the
            oldest that is complete for a minute, or is refused.
        upload_bytes_per_client_max: most bytes of all these uploads of one client, in the same way.
        result_bytes_max: largest file that a job may make; of an eighth of `state_bytes_max` there is always room for it in
            the end.
        state_bytes_max: most bytes of all files that belong to jobs; results make room for others, fetched ones first. A
            quarter is for what jobs make, an eighth for their results alone.
    """

    listen: str = "tcp://127.0.0.1:7461"
    insecure: bool = False
    heartbeat_s: float = 1.0
    missed: int = 3
    busy_for_s_max: float = 600.0
    client_grace_s: float = 30.0
    control_idle_s: float = 300.0
    stall_s: float = 120.0
    placement_timeout_s: float = 30.0
    initialize_timeout_s: float = 300.0
    task_timeout_s: float = 300.0
    close_timeout_s: float = 30.0
    drain_s: float = 60.0
    result_keep_s: float = 86400.0
    retry_after_s: float = 5.0
    release_attempts: int = 3
    sessions_max: int = 4096
    peers_max: int = 10_000
    sessions_per_client_max: int = 1024
    request_bytes_max: int = 1 << 30
    frame_bytes_max: int = 256 << 20
    header_bytes_max: int = 1 << 20
    message_bytes_max: int = 512 << 20
    control_bytes_max: int = 64 << 10
    image_bytes_max: int = 32 << 20
    outbox_bytes_max: int = 64 << 20
    outbox_messages_max: int = 10_000
    turn_messages_max: int = 64
    status_sessions_max: int = 256
    linger_s: float = 1.0
    state_dir: str = ""
    media_roots: tuple[str, ...] = ()
    jobs_queued_max: int = 1000
    jobs_queued_per_client_max: int = 100
    jobs_kept_max: int = 10_000
    job_attempts: int = 3
    checkpoint_steps: int = 5
    rejoin_s: float = 10.0
    group_timeout_s: float = 60.0
    upload_bytes_max: int = 1 << 30
    uploads_per_client_max: int = 64
    upload_bytes_per_client_max: int = 8 << 30
    result_bytes_max: int = 4 << 30
    state_bytes_max: int = 64 << 30

    def __post_init__(self) -> None:
        """Check every setting.

        Raises:
            ConfigError: one is of another type or out of its bounds; it names the field.
        """
        for field in fields(self):
            _check(field.name, str(field.type), getattr(self, field.name))
        least = self.frame_bytes_max + self.header_bytes_max
        if self.message_bytes_max < least:
            raise ConfigError(
                "message_bytes_max",
                f"{self.message_bytes_max} is less than a header and a frame; accepted: {least} or more",
            )
        if not self.listen.startswith(("tcp://", "ipc://")):
            raise ConfigError("listen", f"{self.listen!r} is no endpoint; accepted: tcp://HOST:PORT or ipc://PATH")

    def limits(self) -> dict[str, int]:
        """What a peer is told of the limits at its hello; the units are in the names."""
        names = ("control_bytes_max", "image_bytes_max", "sessions_max", "upload_bytes_max")
        return asdict(self.wire_limits()) | {name: getattr(self, name) for name in names}

    def wire_limits(self) -> Limits:
        """What is accepted of one message."""
        return Limits(self.frame_bytes_max, self.header_bytes_max, message_bytes_max=self.message_bytes_max)


def _check(name: str, kind: str, value: object) -> None:
    if name == "state_dir":
        if not isinstance(value, str) or (value and not value.startswith("/")):
            raise ConfigError(name, f"{checks.shown(value)} is not accepted; accepted: the absolute path of a folder")
    elif name == "media_roots":
        if not isinstance(value, tuple) or not all(isinstance(root, str) and root.startswith("/") for root in value):
            raise ConfigError(name, f"{checks.shown(value)} is not accepted; accepted: absolute paths of folders")
    elif kind == "str":
        checks.check_text(name, value)
    elif kind == "bool":
        checks.check_truth(name, value)
    elif kind == "int":
        checks.check_count(name, value, most=checks.BYTES_MAX if "_bytes_" in name else checks.COUNT_MAX)
    else:
        checks.check_seconds(name, value)
