"""Files that clients send for requests which they will submit.

::

    BeginUpload --UploadGrant (parts below)--> UploadPart ... --UploadGrant (more)--> ... --UploadStored
                `---> UploadStored (it is here already)        `---> UploadRefused: nothing of it is kept

What no job has yet gives way to what jobs make: a file that its client has to send again costs less than hours of work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from reelwire import messages as m
from reelwire.checks import shown
from reelwire.job_parts import FILE_NAME
from reelwire.messages import Failure

from .desk import cut, short
from .job_desk import JobDesk, Upload
from .job_incoming import Taker
from .job_quota import Giving, Quota
from .peers import Peer

NAME_CHARACTERS_MAX = 256
UPLOAD_KEPT_S = 60.0
"""How long an upload that is complete waits for its request at least, before a later one of its client may take its place."""


class Uploads:
    """Uploads that are on their way; those that are complete stand at the desk.

    Args:
        at: all jobs.
        quota: makes room.
    """

    def __init__(self, at: JobDesk, quota: Quota) -> None:
        """Start with none."""
        self._at = at
        self._quota = quota
        self._coming: dict[Peer, dict[str, Taker]] = {}
        quota.uploads = self._giving

    def has(self, peer: Peer, file: str) -> bool:
        """Whether a client may refer to a file: it has uploaded it, or a job needs it."""
        indexed = self._at.store.find(file)
        if indexed is None:
            return False
        return indexed.jobs > 0 or any(stored.file == file for stored in self._at.uploads.get(peer, {}).values())

    def begin(self, peer: Peer, message: m.BeginUpload) -> None:
        """Say how much of a file may come, or why it may not."""
        at, name = self._at, message.upload
        if name in self._coming.get(peer, {}) or name in at.uploads.get(peer, {}):
            self._drop(peer, name)
            reason = "another upload of this client had that name; accepted: one that is new"
            self._refuse(peer, name, Failure("request", reason, field=message.field))
            return
        failure = self._objection(peer, message)
        if failure is not None:
            self._refuse(peer, name, replace(failure, field=message.field))
        elif self.has(peer, message.sha256):
            at.store.hold(message.sha256, message.nbytes, "upload")
            self._stored(peer, name, message.sha256, message.nbytes)
        else:
            self._receive(peer, message)

    def part(self, peer: Peer, message: m.UploadPart) -> None:
        """Take a part in; those of an upload that was refused may still come for a while."""
        if not self._at.incoming.part(peer, message.upload, message.index, message.data):
            self._at.desk.count("parts_of_no_upload", peer=peer.name)

    def gone(self, peer: Peer) -> None:
        """A client is gone, and with it what no job needs."""
        for name in [*self._coming.get(peer, {}), *self._at.uploads.get(peer, {})]:
            self._drop(peer, name)

    def check(self) -> Counter[str]:
        """Assert the invariants; how often uploads hold each file."""
        at = self._at
        for peer, takers in self._coming.items():
            assert takers, "a client that sends nothing"
            for name, taker in takers.items():
                assert (peer, name) in at.incoming, "an upload that isn't received"
                assert taker.receiving.by == "upload", "an upload that is kept as something else"
        for peer in {*self._coming, *at.uploads}:
            assert not peer.gone, "files of somebody who is gone"
            assert self._count(peer) <= at.config.uploads_per_client_max, "too many uploads"
            assert self._nbytes(peer) <= at.config.upload_bytes_per_client_max, "too many bytes of uploads"
        assert all(at.uploads.values()), "a client without an upload"
        return Counter(stored.file for files in at.uploads.values() for stored in files.values())

    def _objection(self, peer: Peer, message: m.BeginUpload) -> Failure | None:
        at, config, nbytes = self._at, self._at.config, message.nbytes
        if at.draining:
            return Failure("shutdown", "the broker stops")
        if at.stalled:
            return at.not_now()
        if not 0 < len(message.upload) <= NAME_CHARACTERS_MAX:
            reason = f"an upload's name has {len(message.upload)} characters; accepted: 1 to {NAME_CHARACTERS_MAX}"
            return Failure("request", reason)
        if not FILE_NAME.fullmatch(message.sha256):
            reason = f"{shown(message.sha256)} is no SHA-256; accepted: 64 of 0-9 and a-f"
            return Failure("request", reason)
        most = min(config.upload_bytes_max, config.upload_bytes_per_client_max)
        if not 0 <= nbytes <= most:
            return Failure("request", f"has {nbytes} bytes; accepted: 0 to {most}")
        if self._count(peer) >= config.uploads_per_client_max and not self._drop_oldest(peer):
            reason = f"the client has {self._count(peer)} uploads without a job already (uploads_per_client_max)"
            return Failure("overload", reason, retry_after_s=self._retry_after_s(peer))
        while self._nbytes(peer) + nbytes > config.upload_bytes_per_client_max:
            if not self._drop_oldest(peer):
                kept, limit = self._nbytes(peer), config.upload_bytes_per_client_max
                reason = f"the client's uploads without a job have {kept} bytes already, of {limit}"
                advice = self._retry_after_s(peer)
                return Failure("overload", f"{reason} (upload_bytes_per_client_max)", retry_after_s=advice)
        indexed = at.store.find(message.sha256) if self.has(peer, message.sha256) else None
        if indexed is not None:
            if indexed.nbytes == nbytes:
                return None
            return Failure("request", f"has {nbytes} bytes, and {indexed.nbytes} by its SHA-256")
        if not self._quota.make_room(nbytes, "request"):
            return Failure("overload", f"there is no room for {nbytes} bytes", retry_after_s=config.retry_after_s)
        return None

    def _drop_oldest(self, peer: Peer) -> bool:
        """Let go of a client's oldest upload, if its request should have come by now; whether it was."""
        name, oldest = next(iter(self._at.uploads.get(peer, {}).items()), ("", None))
        if oldest is None or self._at.desk.now < oldest.since + UPLOAD_KEPT_S:
            return False
        self._drop(peer, name)
        return True

    def _retry_after_s(self, peer: Peer) -> float:
        """When the oldest upload of a client may be let go of, at the latest."""
        at = self._at
        oldest = next(iter(at.uploads.get(peer, {}).values()), None)
        left_s = 0.0 if oldest is None else oldest.since + UPLOAD_KEPT_S - at.desk.now
        return max(at.config.retry_after_s, left_s)

    def _count(self, peer: Peer) -> int:
        return len(self._coming.get(peer, ())) + len(self._at.uploads.get(peer, ()))

    def _nbytes(self, peer: Peer) -> int:
        """Bytes of all uploads of a client, those that it has only announced included."""
        coming = sum(taker.receiving.nbytes for taker in self._coming.get(peer, {}).values())
        return coming + sum(stored.nbytes for stored in self._at.uploads.get(peer, {}).values())

    def _giving(self) -> Iterator[Giving]:
        """What can make room: first what isn't complete, then what no job has; of the client with the most bytes first."""
        at = self._at
        failure = Failure("overload", "it makes room for what jobs have made", retry_after_s=at.config.retry_after_s)
        for peer in sorted(self._coming, key=self._nbytes, reverse=True):
            for taker in self._coming[peer].values():
                yield taker.receiving.nbytes, partial(at.incoming.end, taker, failure)
        owners: dict[str, list[tuple[Peer, str]]] = {}
        for peer in sorted(at.uploads, key=self._nbytes, reverse=True):
            for name, stored in at.uploads[peer].items():
                owners.setdefault(stored.file, []).append((peer, name))
        for file, names in owners.items():
            indexed = at.store.find(file)
            if indexed is not None and not indexed.jobs:
                yield indexed.nbytes, partial(self._drop_all, names)

    def _drop_all(self, names: list[tuple[Peer, str]]) -> None:
        for peer, name in names:
            self._drop(peer, name)

    def _receive(self, peer: Peer, message: m.BeginUpload) -> None:
        name, what, field = message.upload, (message.sha256, message.nbytes), message.field

        def grant(_first: int, below: int) -> None:
            self._at.desk.send(peer, m.UploadGrant(name, below))

        def done(failure: Failure | None) -> None:
            takers = self._coming[peer]
            del takers[name]
            if not takers:
                del self._coming[peer]
            if failure is None:
                self._stored(peer, name, *what)
            else:
                self._refuse(peer, name, replace(failure, field=field))

        taker = self._at.incoming.begin((peer, name), what, "upload", grant, done)
        self._coming.setdefault(peer, {})[name] = taker

    def _stored(self, peer: Peer, name: str, file: str, nbytes: int) -> None:
        self._at.uploads.setdefault(peer, {})[name] = Upload(file, nbytes, self._at.desk.now)
        self._at.desk.send(peer, m.UploadStored(name))

    def _refuse(self, peer: Peer, name: str, failure: Failure) -> None:
        self._at.desk.count("uploads_refused", peer=peer.name, reason=failure.message)
        self._at.desk.send(peer, m.UploadRefused(cut(name), short(failure)))

    def _drop(self, peer: Peer, name: str) -> None:
        takers = self._coming.get(peer, {})
        taker = takers.pop(name, None)
        if taker is not None:
            self._at.incoming.drop(taker)
            if not takers:
                del self._coming[peer]
        if name in self._at.uploads.get(peer, {}):
            self._at.drop_upload(peer, name)
