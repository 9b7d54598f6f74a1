"""A kind of job as data: what a request of it may say, which media it takes, and what it says of its progress.

Workers announce the kinds that they can do, as they do with streams; the broker reads them, checks requests against them
before any worker sees one, and knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .checks import shown
from .errors import RequestError
from .spec import NAMES_MAX, Parameter, Plain, SpecError, check_parameters

MediaKind = Literal["video", "image"]
MEDIA_MAX = 64
"""Most files of one input."""
RESERVED = ("kind", "key", "priority", "output", "media")
"""What fields of a request are called that aren't the kind's own."""


@dataclass(frozen=True, slots=True)
class MediaInput:
    """Files that a request may bring.

    Attributes:
        name: the input's name.
        kind: what they must be.
        least: how many at least.
        most: how many at most.
        frames_max: most frames of a video; a picture has one.
        pixels_max: most pixels of a frame.
    """

    name: str
    kind: MediaKind
    least: int = 0
    most: int = 1
    frames_max: int = 100_000
    pixels_max: int = 8192 * 8192


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything that the broker and a client need to know about one kind of job.

    Attributes:
        name: what requests ask for, such as ``v2v``.
        description: one sentence.
        parameters: what a request may say.
        media: the files that it may bring.
        stages: what progress speaks of, in order; ``preparing`` before them and ``encoding`` after them are every job's.
        suffix: of the result's file: ``.mp4`` or ``.png``.
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()
    media: tuple[MediaInput, ...] = ()
    stages: tuple[str, ...] = ("denoise",)
    suffix: str = ".mp4"

    def input(self, name: str) -> MediaInput:
        """The media input of that name.

        Raises:
            RequestError: there is none; the message says which there are.
        """
        for each in self.media:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in self.media) or "none"
        raise RequestError(name, f"is no input of {self.name!r}; accepted: {known}")


def validate_job(spec: JobSpec) -> None:
    """Check that a kind of job doesn't contradict itself.

    Raises:
        SpecError: it does; the sentence names the culprit.
    """
    groups = {
        "parameter": [each.name for each in spec.parameters],
        "input": [each.name for each in spec.media],
        "stage": list(spec.stages),
    }
    if not spec.name:
        raise SpecError("a kind of job has an empty name")
    for kind, names in groups.items():
        if len(names) > NAMES_MAX:
            raise SpecError(f"{spec.name}: there are {len(names)} {kind}s; accepted: {NAMES_MAX}")
        for name in names:
            if not name:
                raise SpecError(f"{spec.name}: a {kind} has an empty name")
            if names.count(name) > 1:
                raise SpecError(f"{spec.name}: {kind} {name!r} is named twice")
    for name in (*groups["parameter"], *groups["input"]):
        if name in RESERVED or (name in groups["parameter"] and name in groups["input"]):
            raise SpecError(f"{spec.name}: {name!r} can't be a name of the kind's own: it has another meaning already")
    for each in spec.media:
        if each.kind not in ("video", "image"):
            raise SpecError(f"{spec.name}: input {each.name!r} takes {each.kind!r}; accepted: video, image")
        if not 0 <= each.least <= each.most <= MEDIA_MAX or each.most < 1:
            raise SpecError(
                f"{spec.name}: input {each.name!r} takes {each.least} to {each.most} files, not 0 to {MEDIA_MAX}"
            )
        if each.frames_max < 1 or each.pixels_max < 1:
            raise SpecError(f"{spec.name}: input {each.name!r} accepts nothing")
    for parameter in spec.parameters:
        if parameter.multiple_of is not None and (parameter.kind != "integer" or parameter.multiple_of < 1):
            raise SpecError(f"{spec.name}: parameter {parameter.name!r} has no steps of {parameter.multiple_of}")
    if spec.suffix not in (".mp4", ".png"):
        raise SpecError(f"{spec.name}: a result is no {spec.suffix!r} file; accepted: .mp4, .png")


def check_job(
    spec: JobSpec, parameters: Mapping[str, Plain], media: Mapping[str, int]
) -> dict[str, bool | int | float | str | None]:
    """The parameters of a request, complete; what it brings is counted.

    Args:
        spec: of the kind.
        parameters: as given.
        media: name of the input to the number of its files.

    Raises:
        RequestError: a parameter or an input is unknown, missing, of another type or out of its bounds.
    """
    for name in dict.fromkeys((*media, *(each.name for each in spec.media))):
        wanted, count = spec.input(name), media.get(name, 0)
        if not wanted.least <= count <= wanted.most:
            span = f"{wanted.least}" if wanted.least == wanted.most else f"{wanted.least} to {wanted.most}"
            what = "none is given" if count == 0 else f"{count} are given"
            raise RequestError(name, f"{what}; accepted by {spec.name!r}: {span} of kind {wanted.kind}")
    own = {parameter.name for parameter in spec.parameters}
    for name in parameters:
        if name not in own:
            known = ", ".join((*sorted(own), *(each.name for each in spec.media))) or "none"
            raise RequestError(name, f"is no field of {spec.name!r}; accepted: {known}")
    return check_parameters(spec, parameters)


def unknown_kind(kind: str, known: tuple[JobSpec, ...]) -> RequestError:
    """The refusal of a kind that nobody can do."""
    names = ", ".join(spec.name for spec in known)
    reason = f"accepted: {names}" if names else "no worker that is attached does jobs"
    return RequestError("kind", f"unknown kind {shown(kind)}; {reason}")
