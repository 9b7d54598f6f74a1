"""A streaming pipeline as data: stages, what flows between them, and the limits of both.

A `StreamSpec` is announced by the workers that serve it and read by the broker, which knows no model: admission,
prefetch, backpressure and placement follow from what stands here. Artifacts are named; the edge of an artifact is its
bounded buffer between the one producer and the consumers.

The world model, drawn::

    encode_request --(2)--> [encode] --condition(2)--> [denoise] --latent(2)--> [decode] --frames(2)--> client
                                        client --control(2)----^
    prefetch: encode_request, depth 2, follows control         latency anchor: control
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .checks import shown
from .errors import RequestError as RequestError
from .errors import UsageError

NAMES_MAX = 256
"""Most stages, edges, parameters and so on of one spec: a broker checks what a stranger announced."""
CAPACITY_MAX = 1024
"""Most chunks of one edge, and of the prefetch window."""
COUNT_MAX = 1 << 31
"""Most chunks of a session, and frames of a chunk."""

ParameterKind = Literal["string", "integer", "number", "boolean"]
Plain = bool | int | float | str | bytes | list["Plain"] | dict[str, "Plain"] | None


class SpecError(UsageError):
    """A StreamSpec contradicts itself; the message names the culprit."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The bounded buffer of one artifact, counted in chunks."""

    artifact: str
    capacity: int = 2


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage actor: a single owner that runs one task at a time, in chunk order for a session.

    Attributes:
        name: the stage's name.
        consumes: artifacts of chunk i that the stage needs to make its outputs for chunk i.
        produces: artifacts that it makes for chunk i.
        request_tensors: tensors of the request that its initialization gets (``"image"``).
        settles: it may say of a result that all later ones are the same, and isn't run again then (rule 8); only for a
            stage that consumes nothing but what is prefetched.
    """

    name: str
    consumes: tuple[str, ...]
    produces: tuple[str, ...]
    request_tensors: tuple[str, ...] = ()
    settles: bool = False


@dataclass(frozen=True, slots=True)
class Prefetch:
    """An external input that the broker itself issues ahead of the input it follows (rules 1 to 7).

    Attributes:
        artifact: the external input that the broker issues.
        depth: how far its cursor may run ahead of the followed one, in chunks.
        follows: the external input that the client supplies.
        refill_after: the stage whose end refills the window.
        refill: ``after_stage``; or, to measure what that is good for: ``with_control``, when a control is accepted, or
            ``never``, nothing is issued ahead of its control.
    """

    artifact: str
    depth: int
    follows: str
    refill_after: str
    refill: Literal["after_stage", "with_control", "never"] = "after_stage"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named value that a session request may carry.

    `minimum`, `maximum` bound numbers (inclusive); for strings they bound the length. `choices` lists what is
    accepted, if that is a closed set. With `multiple_of` an integer must be so many times something above `minimum`:
    1 and 4 stand for counts of the form 4k+1.
    """

    name: str
    kind: ParameterKind
    description: str
    default: bool | int | float | str | None = None
    required: bool = False
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()
    multiple_of: int | None = None


FLOATS = {"float": ("float32", "float64")}
"""What a `TensorInput` of dtype ``float`` accepts."""


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor that a request or a control may carry.

    Attributes:
        name: its name.
        dtype: as in `tensors.ITEM_BYTES`, or ``float`` for float32 and float64 alike.
        shape: its dimensions; -1 is any size.
        required: whether it must be there; for a control: wherever the control has tensors.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    required: bool = False


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Everything that the broker and a client need to know about one streaming pipeline.

    Attributes:
        name: the name that sessions ask for.
        stages: all stages.
        edges: one per artifact, external inputs and outputs included.
        external_inputs: artifacts that no stage makes.
        outputs: artifacts that go to the client, all of one index together.
        initialize_order: stage names. What the initialization of one hands out is given to all later ones.
        release_order: stage names; empty: the reverse of `initialize_order`.
        prefetch: see `Prefetch`; None when all external inputs come from the client.
        control: the external input that carries the client's controls.
        latency_anchor: the external input whose acceptance starts the clock of a chunk; None: the first one.
        control_names: canonical key names; a control may name no others.
        control_aliases: other spellings, alias to canonical name.
        control_tensors: tensors that an explicit control may carry.
        chunks_max: most chunks of one session.
        frames_first: pixel frames of chunk 0.
        frames_next: pixel frames of every later chunk.
        frame_stride: pixel frames per latent frame; valid frame counts are `frame_stride * k + 1`.
        fps: frames per second of the output.
        parameters: what a request may say.
        tensors: tensors that a request may carry.
    """

    name: str
    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]
    external_inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initialize_order: tuple[str, ...]
    control: str
    chunks_max: int
    frames_first: int
    frames_next: int
    fps: float
    release_order: tuple[str, ...] = ()
    prefetch: Prefetch | None = None
    latency_anchor: str | None = None
    frame_stride: int = 1
    control_names: tuple[str, ...] = ()
    control_aliases: Mapping[str, str] = field(default_factory=dict)
    control_tensors: tuple[TensorInput, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    tensors: tuple[TensorInput, ...] = ()

    def stage(self, name: str) -> StageSpec:
        """The stage of that name.

        Raises:
            KeyError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def capacity(self, artifact: str) -> int:
        """How many chunks of `artifact` its edge holds."""
        for edge in self.edges:
            if edge.artifact == artifact:
                return edge.capacity
        raise KeyError(artifact)

    def releases(self) -> tuple[str, ...]:
        """Stage names in the order in which a session is released."""
        return self.release_order or self.initialize_order[::-1]

    def control_stage(self) -> StageSpec:
        """The stage that consumes the client's control."""
        return next(stage for stage in self.stages if self.control in stage.consumes)

    def frames_of(self, index: int) -> int:
        """Pixel frames of chunk `index`."""
        return self.frames_first if index == 0 else self.frames_next

    def frames_in(self, chunks: int) -> int:
        """Pixel frames of the first `chunks` chunks."""
        return 0 if chunks == 0 else self.frames_first + (chunks - 1) * self.frames_next

    def chunks_in(self, frames: int, policy: Literal["strict", "truncate"] = "strict") -> int:
        """Chunks that hold exactly `frames` pixel frames; with `truncate`, the most that fit in them.

        Raises:
            RequestError: the count isn't `frame_stride * k + 1`, or doesn't fill whole chunks.
        """
        stride = self.frame_stride
        if frames < 1 or (frames - 1) % stride:
            raise RequestError("frames", f"{frames} is not a count of the form {stride}k+1; {self._counts(frames)}")
        chunks = 0 if frames < self.frames_first else 1 + (frames - self.frames_first) // self.frames_next
        if chunks == 0 or (policy == "strict" and self.frames_in(chunks) != frames):
            raise RequestError("frames", f"{frames} doesn't fill whole chunks; {self._counts(frames)}")
        return chunks

    def _counts(self, frames: int) -> str:
        """Which counts of frames are accepted, with two that are near."""
        below = self.frames_first + max(0, (frames - self.frames_first) // self.frames_next) * self.frames_next
        return f"accepted: {self.frames_first} + {self.frames_next}*n, such as {below} or {below + self.frames_next}"

    def canonical_key(self, name: str) -> str:
        """The canonical name of a control key or of one of its aliases.

        Raises:
            RequestError: neither; the message lists what is accepted.
        """
        if name in self.control_names:
            return name
        if name in self.control_aliases:
            return self.control_aliases[name]
        known = ", ".join((*self.control_names, *sorted(self.control_aliases)))
        raise RequestError("control", f"unknown key {shown(name)}; accepted: {known or 'none'}")


def validate(spec: StreamSpec) -> None:
    """Check that the dataflow is one: connected, acyclic, bounded, each artifact made once.

    Raises:
        SpecError: it isn't; the sentence names the culprit.
    """
    _check_names(spec)
    _check_connections(spec)
    _check_order(spec)
    _check_controls(spec)
    _check_numbers(spec)


def _check_names(spec: StreamSpec) -> None:
    groups = {
        "stage": [stage.name for stage in spec.stages],
        "edge": [edge.artifact for edge in spec.edges],
        "external input": list(spec.external_inputs),
        "output": list(spec.outputs),
        "parameter": [parameter.name for parameter in spec.parameters],
        "tensor": [tensor.name for tensor in spec.tensors],
        "control name": list(spec.control_names),
        "control tensor": [tensor.name for tensor in spec.control_tensors],
    }
    for stage in spec.stages:
        groups[f"input of {stage.name!r}"] = list(stage.consumes)
        groups[f"request tensor of {stage.name!r}"] = list(stage.request_tensors)
    for kind, names in groups.items():
        if len(names) > NAMES_MAX:
            raise SpecError(f"{spec.name}: there are {len(names)} {kind}s; accepted: {NAMES_MAX}")
        for name in names:
            if not name:
                raise SpecError(f"{spec.name}: a {kind} has an empty name")
            if names.count(name) > 1:
                raise SpecError(f"{spec.name}: {kind} {name!r} is named twice")
    known = {tensor.name for tensor in spec.tensors}
    for stage in spec.stages:
        for name in stage.request_tensors:
            if name not in known:
                raise SpecError(f"{spec.name}: stage {stage.name!r} asks for the unknown tensor {name!r}")


def _check_connections(spec: StreamSpec) -> None:
    producer: dict[str, str] = dict.fromkeys(spec.external_inputs, "an external input")
    for stage in spec.stages:
        for artifact in stage.produces:
            if artifact in producer:
                raise SpecError(f"{spec.name}: {artifact!r} is made by {producer[artifact]} and by {stage.name!r}")
            producer[artifact] = repr(stage.name)
    edges = {edge.artifact: edge.capacity for edge in spec.edges}
    consumed = {artifact for stage in spec.stages for artifact in stage.consumes}
    for stage in spec.stages:
        if not stage.consumes:
            raise SpecError(f"{spec.name}: stage {stage.name!r} consumes nothing")
        for artifact in stage.consumes:
            if artifact not in producer:
                raise SpecError(f"{spec.name}: input {artifact!r} of stage {stage.name!r} is connected to nothing")
    for artifact in producer:
        if artifact not in consumed and artifact not in spec.outputs:
            raise SpecError(f"{spec.name}: {artifact!r} is made but nobody takes it")
        if artifact not in edges:
            raise SpecError(f"{spec.name}: {artifact!r} has no edge, so its buffer would have no bound")
    for artifact in edges:
        if artifact not in producer:
            raise SpecError(f"{spec.name}: the edge of {artifact!r} has no producer")
    for artifact in spec.outputs:
        if artifact not in producer or artifact in spec.external_inputs:
            raise SpecError(f"{spec.name}: output {artifact!r} can't be reached: no stage makes it")
    if not spec.outputs:
        raise SpecError(f"{spec.name}: there is no output")


def _check_order(spec: StreamSpec) -> None:
    known = set(spec.external_inputs)
    left = list(spec.stages)
    while left:
        ready = [stage for stage in left if known.issuperset(stage.consumes)]
        if not ready:
            stuck = ", ".join(sorted(stage.name for stage in left))
            raise SpecError(f"{spec.name}: the stages {stuck} wait for each other in a cycle")
        for stage in ready:
            known.update(stage.produces)
            left.remove(stage)
    names = sorted(stage.name for stage in spec.stages)
    if sorted(spec.initialize_order) != names:
        raise SpecError(f"{spec.name}: initialize_order must name each stage once")
    if spec.release_order and sorted(spec.release_order) != names:
        raise SpecError(f"{spec.name}: release_order must name each stage once")


def _check_controls(spec: StreamSpec) -> None:
    inputs = spec.external_inputs
    if spec.control not in inputs:
        raise SpecError(f"{spec.name}: control {spec.control!r} is not an external input")
    if sum(spec.control in stage.consumes for stage in spec.stages) != 1:
        raise SpecError(f"{spec.name}: control {spec.control!r} must be consumed by exactly one stage")
    if spec.latency_anchor is not None and spec.latency_anchor not in inputs:
        raise SpecError(f"{spec.name}: latency anchor {spec.latency_anchor!r} is not an external input")
    for alias, name in spec.control_aliases.items():
        if name not in spec.control_names:
            raise SpecError(f"{spec.name}: alias {alias!r} stands for the unknown key {name!r}")
    issued = {spec.control}
    if spec.prefetch is not None:
        prefetch = spec.prefetch
        if prefetch.artifact not in inputs or prefetch.artifact == spec.control:
            raise SpecError(f"{spec.name}: prefetched {prefetch.artifact!r} is not an external input of its own")
        if prefetch.follows != spec.control:
            raise SpecError(f"{spec.name}: prefetch must follow the control {spec.control!r}")
        if prefetch.refill_after not in {stage.name for stage in spec.stages}:
            raise SpecError(f"{spec.name}: refill after the unknown stage {prefetch.refill_after!r}")
        if not 1 <= prefetch.depth <= CAPACITY_MAX:
            raise SpecError(f"{spec.name}: prefetch depth {prefetch.depth} is not 1 to {CAPACITY_MAX}")
        issued.add(prefetch.artifact)
    for stage in spec.stages:
        if stage.settles and stage.consumes != (spec.prefetch.artifact if spec.prefetch else None,):
            raise SpecError(f"{spec.name}: stage {stage.name!r} can't settle: it consumes more than what is prefetched")
    for artifact in inputs:
        if artifact not in issued:
            raise SpecError(f"{spec.name}: nobody supplies the external input {artifact!r}")


def _check_numbers(spec: StreamSpec) -> None:
    for edge in spec.edges:
        if not 1 <= edge.capacity <= CAPACITY_MAX:
            raise SpecError(
                f"{spec.name}: the edge of {edge.artifact!r} has capacity {edge.capacity}, not 1 to {CAPACITY_MAX}"
            )
    counts = {
        "chunks_max": spec.chunks_max,
        "frames_first": spec.frames_first,
        "frames_next": spec.frames_next,
        "frame_stride": spec.frame_stride,
    }
    for name, count in counts.items():
        if not 1 <= count <= COUNT_MAX:
            raise SpecError(f"{spec.name}: {name} is {count}, not 1 to {COUNT_MAX}")
    if not (math.isfinite(spec.fps) and spec.fps > 0):
        raise SpecError(f"{spec.name}: fps is {spec.fps}, not a positive number")


def check_registrable(spec: StreamSpec) -> None:
    """What a broker demands beyond `validate` before it serves a spec.

    Within a control grant nothing may be refused for room, so the control edge may hold no more than the edges that the
    condition has to pass (the artifact that is prefetched, and what the control's stage consumes besides).

    Raises:
        SpecError: the spec can't keep that promise.
    """
    validate(spec)
    if spec.prefetch is None:
        return
    partners = {spec.prefetch.artifact, *spec.control_stage().consumes} - {spec.control}
    least = min(partners, key=spec.capacity)
    if spec.capacity(spec.control) > spec.capacity(least):
        raise SpecError(
            f"{spec.name}: the edge of {spec.control!r} holds {spec.capacity(spec.control)} chunks, "
            f"more than the {spec.capacity(least)} of {least!r}"
        )


class HasParameters(Protocol):
    """A spec that says what a request may say."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All of them."""
        ...


def check_parameters(spec: HasParameters, given: Mapping[str, Plain]) -> dict[str, bool | int | float | str | None]:
    """The parameters of a request, complete: checked against the spec, with its defaults filled in.

    None stands for a parameter that wasn't given, so complete parameters can be checked again.

    Raises:
        RequestError: a parameter is unknown, missing, of another type or out of its bounds.
    """
    known = {parameter.name: parameter for parameter in spec.parameters}
    for name in given:
        if name not in known:
            raise RequestError(name, f"unknown parameter; accepted: {', '.join(known) or 'none'}")
    complete: dict[str, bool | int | float | str | None] = {}
    for name, parameter in known.items():
        if given.get(name) is None:
            if parameter.required:
                raise RequestError(name, f"is required ({parameter.description})")
            complete[name] = parameter.default
            continue
        complete[name] = _check_parameter(parameter, given[name])
    return complete


def check_tensors(accepted: tuple[TensorInput, ...], given: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Check dtype and shape of tensors, by name, against what is accepted.

    Raises:
        RequestError: a tensor is unknown, missing, of another dtype or of another shape.
    """
    known = {tensor.name: tensor for tensor in accepted}
    for name in given:
        if name not in known:
            raise RequestError(name, f"unknown tensor; accepted: {', '.join(known) or 'none'}")
    for name, tensor in known.items():
        wanted = f"{tensor.dtype}[{', '.join('any' if size == -1 else str(size) for size in tensor.shape)}]"
        if name not in given:
            if tensor.required:
                raise RequestError(name, f"is required; accepted: {wanted}")
            continue
        dtype, shape = given[name]
        fits = len(shape) == len(tensor.shape) and all(
            want in (-1, have) and have > 0 for want, have in zip(tensor.shape, shape, strict=True)
        )
        if dtype not in FLOATS.get(tensor.dtype, (tensor.dtype,)) or not fits:
            raise RequestError(name, f"is {dtype}{list(shape)}; accepted: {wanted}")


def _check_parameter(parameter: Parameter, value: Plain) -> bool | int | float | str:
    name = parameter.name
    accepted = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}[parameter.kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and parameter.kind != "boolean"):
        raise RequestError(name, f"{shown(value)} is not {_article(parameter.kind)}")
    if isinstance(value, str):
        if parameter.choices and value not in parameter.choices:
            raise RequestError(name, f"{shown(value)} is not accepted; accepted: {', '.join(parameter.choices)}")
        size: float = len(value.strip())
        unit = " characters"
    else:
        assert isinstance(value, bool | int | float)
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(name, f"{value} is not a finite number")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise RequestError(
                name, f"an integer of {value.bit_length()} bits doesn't fit; accepted: 64 bits with sign"
            )
        size, unit = value, ""
    if parameter.minimum is not None and size < parameter.minimum:
        if isinstance(value, str) and size == 0:
            raise RequestError(name, "is empty; accepted: any text")
        raise RequestError(name, f"{size}{unit} is below the least accepted, {parameter.minimum}")
    if parameter.maximum is not None and size > parameter.maximum:
        raise RequestError(name, f"{size}{unit} is above the most accepted, {parameter.maximum}")
    if parameter.multiple_of is not None and isinstance(value, int):
        stride, first = parameter.multiple_of, int(parameter.minimum or 0)
        if (value - first) % stride:
            near = value - (value - first) % stride
            raise RequestError(
                name, f"{value} is not of the form {stride}k+{first}; accepted: such as {near} or {near + stride}"
            )
    return value


def _article(kind: ParameterKind) -> str:
    return {"string": "a text", "integer": "an integer", "number": "a number", "boolean": "true or false"}[kind]
