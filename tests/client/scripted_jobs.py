"""What a broker says about jobs, made of plain messages: files by their content, jobs by their key, results in parts."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reelwire import messages as m
from reelwire.job_parts import FILE_PART_BYTES, parts_of
from reelwire.job_spec import JobSpec, MediaInput
from reelwire.messages import Failure, JobInfo
from reelwire.spec import Parameter
from reelwire.tensors import Inline, TensorRef, inline_buffer

StandIn = Any  # of conftest.py
KINDS = (
    JobSpec(
        "v2v", "edits a clip",
        (Parameter("prompt", "string", "what to do", required=True), Parameter("seed", "integer", "of the noise", default=0),
         Parameter("steps", "integer", "how many", default=4, minimum=1, maximum=100),
         Parameter("profile", "string", "how", default="pristine", choices=("pristine", "lossless"))),
        (MediaInput("video", "video", 1), MediaInput("images", "image", 0, 3), MediaInput("masks", "video", 0, 2)),
    ),
    JobSpec("ads2v", "puts one clip into another", media=(MediaInput("video", "video", 1, 2),)),
    JobSpec("t2i", "draws a picture", (Parameter("prompt", "string", "of what", required=True),), suffix=".png"),
)  # fmt: skip
LOST = m.Rejected("unknown_peer", "who is that?")


class ScriptedJobs:
    """Answers a `StandIn`'s client; what is durable outlives connections, all else ends with them.

    Attributes:
        files: content by hash.
        jobs: where each job stands, by id.
        requests: what was submitted, by the job's id.
        results: content by the job's id.
        lose_before: kinds of messages at whose next arrival the connection is lost, unheard.
        lose_after: the same, once they were answered for.
        window_parts: of an upload, on their way.
        result_parts: made of each part of a result, before it is sent.
    """

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self.files: dict[str, bytes] = {}
        self.jobs: dict[str, JobInfo] = {}
        self.requests: dict[str, m.SubmitJob] = {}
        self.results: dict[str, bytes] = {}
        self.window_parts = 2
        self.lose_before: list[type] = []
        self.lose_after: list[type] = []
        self.result_parts: Callable[[m.ResultPart], list[Any]] = lambda part: [part]
        self.lock = threading.Lock()
        self.forget()
        stand_in.jobs, stand_in.more = KINDS, self.answers
        stand_in.before = self.before

    def forget(self) -> None:
        """A connection is over."""
        self.uploads: dict[str, tuple[m.BeginUpload, bytearray]] = {}
        self.watched: set[str] = set()
        self.fetched: dict[int, int] = {}
        self.is_lost = False

    def before(self, message: Any) -> None:
        """Look at every message before it is answered."""
        if isinstance(message, m.ClientHello):
            self.forget()

    def answers(self, message: Any) -> list[Any]:
        """What a broker would say, unless the connection is to be lost now."""
        with self.lock:
            if self.is_lost:  # what was sent before the client knew
                return []
            if type(message) in self.lose_before:
                self.lose_before.remove(type(message))
                self.is_lost = True
                return [LOST]
            answers = self.answered(message)
            if type(message) in self.lose_after:
                self.lose_after.remove(type(message))
                self.is_lost = True
                return [*answers[: len(answers) // 2], LOST]
            return answers

    def answered(self, message: Any) -> list[Any]:
        """What a broker would say."""
        match message:
            case m.BeginUpload():
                return self.begin(message)
            case m.UploadPart():
                return self.take(message)
            case m.SubmitJob():
                return self.submit(message)
            case m.AskJobs(request=request, job=""):
                return [m.Jobs(request, tuple(reversed(self.jobs.values())), len(self.jobs))]
            case m.AskJobs() | m.CancelJob() | m.DeleteJob() if message.job not in self.jobs:
                failure = Failure("request", f"there is no job {message.job}", field="job")
                return [m.JobRefused(failure, request=message.request)]
            case m.AskJobs(request=request, job=job):
                return [m.Jobs(request, (self.jobs[job],), 1)]
            case m.CancelJob(request=request, job=job):
                self.jobs[job] = replace(self.jobs[job], state="cancelled")
                told = [m.JobChanged(self.jobs[job])] if job in self.watched else []
                return [m.Jobs(request, (self.jobs[job],), 1), *told]
            case m.DeleteJob(request=request, job=job):
                return [m.Jobs(request, (self.jobs.pop(job),), 1)]
            case m.WatchJob(job=job, on=True, request=request) if job not in self.jobs:
                return [m.JobRefused(Failure("request", f"there is no job {job}", field="job"), request=request)]
            case m.WatchJob(job=job, on=on):
                (self.watched.add if on else self.watched.discard)(job)
                return [m.JobChanged(self.jobs[job])] if on else []
            case m.FetchResult():
                return self.fetch(message)
        return []

    def begin(self, begin: m.BeginUpload) -> list[Any]:
        """A file is to come, unless it is here."""
        if begin.sha256 in self.files:
            return [m.UploadStored(begin.upload)]
        assert begin.upload not in self.uploads, "one name, one upload"
        self.uploads[begin.upload] = (begin, bytearray())
        grant = m.UploadGrant(begin.upload, self.window_parts)
        return [grant, grant]

    def take(self, part: m.UploadPart) -> list[Any]:
        """A part of it."""
        begin, held = self.uploads[part.upload]
        assert part.index == len(held) // FILE_PART_BYTES, "in order"
        held += inline_buffer(part.data)
        if len(held) < begin.nbytes:
            assert len(held) % FILE_PART_BYTES == 0, "whole parts but for the last"
            return [m.UploadGrant(part.upload, part.index + 1 + self.window_parts)]
        if (len(held), hashlib.sha256(held).hexdigest()) != (begin.nbytes, begin.sha256):
            return [m.UploadRefused(part.upload, Failure("request", "has another hash", field=begin.field))]
        self.files[begin.sha256] = bytes(held)
        return [m.UploadStored(part.upload)]

    def submit(self, request: m.SubmitJob) -> list[Any]:
        """A job, once per key."""
        for job, known in self.requests.items():
            if known.key == request.key:
                return [m.JobAccepted(request.key, self.jobs[job])]
        for files in request.media.values():
            for file in files:
                assert file.path or file.sha256 in self.files, "a file of a request was uploaded before"
        job = f"j{len(self.requests) + 1}"
        self.requests[job] = request
        self.jobs[job] = JobInfo(job, request.kind, "queued", request.key, "me-1", request.priority, position=1)
        return [m.JobAccepted(request.key, self.jobs[job])]

    def fetch(self, message: m.FetchResult) -> list[Any]:
        """Parts of a result below the limit, each once."""
        content = self.results.get(message.job)
        if content is None:
            failure = Failure("request", f"job {message.job} has no result", field="job")
            return [m.JobRefused(failure, request=message.request)]
        first = self.fetched.get(message.request, message.first)
        self.fetched[message.request] = message.parts
        assert message.parts <= parts_of(len(content))
        parts: list[Any] = []
        for index in range(first, message.parts):
            data = content[index * FILE_PART_BYTES : (index + 1) * FILE_PART_BYTES]
            ref = TensorRef("uint8", (len(data),), Inline(data))
            parts += self.result_parts(m.ResultPart(message.request, index, ref))
        return parts

    def change(self, job: str, **to: Any) -> None:
        """A job goes on; who watches is told. From any thread."""
        if "state" in to:
            to["position"] = 0
        with self.lock:
            self.jobs[job] = replace(self.jobs[job], **to)
            if job in self.watched:
                self.stand_in.say(m.JobChanged(self.jobs[job]))

    def succeed(self, job: str, content: bytes, **to: Any) -> None:
        """A job is done; `to` may say something else of it than is true."""
        with self.lock:
            self.results[job] = content
        what = {
            "result_bytes": len(content),
            "result_sha256": hashlib.sha256(content).hexdigest(),
            "suffix": ".mp4",
            **to,
        }
        self.change(job, state="succeeded", **what)

    def restart(self, *, keeps: bool = True) -> None:
        """The broker is another one, with the same state, or with none."""
        with self.lock:
            if not keeps:
                self.jobs.clear()
            self.is_lost = True
        self.stand_in.say(LOST)
