"""What a rank that follows keeps of what the broker sent to all ranks, until the leader decides what is done with it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from reelwire.group_messages import Have, LeaderTensor
from reelwire.messages import Artifact, Failure, InitializeStage, RunJob, RunTask
from reelwire.tensors import TensorRef

from .group_events import AnyAction, FilesFound, FindFiles, TakeIn, TakenIn

Body = InitializeStage | RunTask | RunJob
B = TypeVar("B", InitializeStage, RunTask)


@dataclass(slots=True)
class Kept:
    """One body.

    Attributes:
        body: what was sent.
        is_here: its tensors were copied, or its files were looked for.
        files: path of each file of a job that is here.
        lacks: some aren't.
        failure: its tensors couldn't be copied.
    """

    body: Body
    is_here: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    lacks: bool = False
    failure: Failure | None = None


class Bodies:
    """All that were sent and may be asked for.

    Attributes:
        newest: the highest number that came.
    """

    def __init__(self) -> None:
        """Nothing has come."""
        self.newest = 0
        self._kept: dict[int, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, body: Body) -> list[AnyAction] | None:
        """Keep a body; what is to be done before it is here, if anything, or None when it came before."""
        if body.sequence <= self.newest:
            return None
        self.newest = body.sequence
        kept = self._kept[body.sequence] = Kept(body)
        if isinstance(body, RunJob):
            return [FindFiles(body)]
        kept.is_here = _is_inline(body)
        return [] if kept.is_here else [TakeIn(body)]

    def taken_in(self, event: TakenIn) -> Have | None:
        """The tensors of a body were copied, or couldn't be: that is said when it is asked for."""
        kept = self._kept.get(event.body.sequence)
        if kept is None or kept.is_here:
            return None
        kept.body, kept.failure, kept.is_here = event.body, event.failure, True
        return Have(event.body.sequence)

    def found(self, event: FilesFound) -> Have | None:
        """The files of a job were looked for."""
        kept = self._kept.get(event.sequence)
        if kept is None or kept.is_here:
            return None
        kept.files, kept.lacks, kept.is_here = dict(event.files), bool(event.missing), True
        return Have(event.sequence, kept.lacks)

    def have(self, number: int) -> Have | None:
        """What the leader is told of a body that is here."""
        kept = self._kept.get(number)
        return Have(number, kept.lacks) if kept is not None and kept.is_here else None

    def all_here(self) -> Iterable[Have]:
        """The same of all, in order."""
        return [have for number in self._kept if (have := self.have(number)) is not None]

    def pop(self, number: int) -> Kept | None:
        """A body that is asked for, which happens once; None when it isn't here."""
        kept = self._kept.get(number)
        if kept is None or not kept.is_here:
            return None
        return self._kept.pop(number)

    def drop(self, below: int) -> None:
        """Drop those that won't be asked for."""
        for number in [number for number in self._kept if number < below]:
            del self._kept[number]


def with_control(task: RunTask, artifact: str, control: Artifact) -> RunTask:
    """The task with the control that its reservation was bound to."""
    return replace(task, inputs={**task.inputs, artifact: control})


def completed(body: B, share: Callable[[LeaderTensor, TensorRef | None], TensorRef]) -> B:
    """The body with those of its tensors that only the leader was sent; in an order that is the same on all ranks.

    Args:
        body: what was sent.
        share: gives such a tensor, of what is known of it, and at the leader of the tensor itself; called in order.
    """
    artifacts = body.artifacts
    for each in body.broadcast:
        artifact = artifacts[each.artifact]
        tensors = dict(artifact.tensors)
        tensors[each.tensor] = share(each, tensors.pop(each.tensor, None))
        artifacts[each.artifact] = Artifact(artifact.values, tensors)
    return body.with_artifacts(artifacts)


def _is_inline(body: InitializeStage | RunTask) -> bool:
    return all(artifact.is_inline for artifact in body.artifacts.values())
