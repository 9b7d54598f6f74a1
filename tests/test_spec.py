"""A StreamSpec: what it computes, what it refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reelwire.errors import RequestError
from reelwire.spec import (
    Edge,
    Parameter,
    Prefetch,
    SpecError,
    StageSpec,
    StreamSpec,
    TensorInput,
    check_parameters,
    check_registrable,
    check_tensors,
    validate,
)

WORLD = StreamSpec(
    name="world",
    stages=(
        StageSpec("encode", ("encode_request",), ("condition",), ("image",)),
        StageSpec("denoise", ("condition", "control"), ("latent",)),
        StageSpec("decode", ("latent",), ("frames",)),
    ),
    edges=(Edge("encode_request"), Edge("condition"), Edge("control"), Edge("latent"), Edge("frames")),
    external_inputs=("encode_request", "control"),
    outputs=("frames",),
    initialize_order=("encode", "decode", "denoise"),
    control="control",
    chunks_max=341,
    frames_first=9,
    frames_next=12,
    frame_stride=4,
    fps=16.0,
    prefetch=Prefetch("encode_request", 2, "control", "denoise"),
    latency_anchor="control",
    control_names=("w", "a"),
    control_aliases={"ArrowUp": "w"},
    parameters=(
        Parameter("prompt", "string", "what the world is", required=True, minimum=1, maximum=20),
        Parameter("seed", "integer", "of the noise", default=0, minimum=0, maximum=2**63 - 1),
        Parameter("tries", "integer", "how often", default=1, maximum=1234567),
        Parameter("shift", "number", "of the schedule", default=5.0, minimum=0.5),
        Parameter("fast", "boolean", "skips a pass", default=False),
        Parameter("policy", "string", "what to do", default="strict", choices=("strict", "loose")),
    ),
    tensors=(TensorInput("image", "uint8", (-1, -1, 3), required=True), TensorInput("mask", "bool", (2, 2))),
)


def test_the_drawn_world_is_valid_and_registrable() -> None:
    """The example of the module's docstring passes every check."""
    check_registrable(WORLD)


def stage(number: int, **changes: Any) -> tuple[StageSpec, ...]:
    """The world's stages with one of them changed."""
    stages = list(WORLD.stages)
    stages[number] = replace(stages[number], **changes)
    return tuple(stages)


FAULTS: list[tuple[Mapping[str, Any], str]] = [
    ({"stages": stage(2, name="encode")}, "stage 'encode' is named twice"),
    ({"stages": stage(0, name="")}, "a stage has an empty name"),
    ({"edges": (*WORLD.edges, Edge("latent"))}, "edge 'latent' is named twice"),
    ({"external_inputs": ("control", "control")}, "external input 'control' is named twice"),
    ({"outputs": ("frames", "frames")}, "output 'frames' is named twice"),
    ({"parameters": WORLD.parameters[:1] * 2}, "parameter 'prompt' is named twice"),
    ({"tensors": WORLD.tensors[:1] * 2}, "tensor 'image' is named twice"),
    ({"control_names": ("w", "w")}, "control name 'w' is named twice"),
    ({"control_tensors": (TensorInput("poses", "float", (4,)),) * 2}, "control tensor 'poses' is named twice"),
    ({"stages": stage(1, consumes=("control", "condition", "control"))}, "'denoise' 'control' is named twice"),
    ({"stages": stage(0, request_tensors=("image", "image"))}, "request tensor of 'encode' 'image' is named twice"),
    ({"stages": stage(0, request_tensors=("depth",))}, "stage 'encode' asks for the unknown tensor 'depth'"),
    ({"prefetch": Prefetch("encode_request", 10**7, "control", "denoise")}, "10000000 is not 1 to 1024"),
    ({"edges": (*WORLD.edges[:-1], replace(WORLD.edges[-1], capacity=1025))}, "has capacity 1025, not 1 to 1024"),
    ({"chunks_max": 1 << 40}, "chunks_max is 1099511627776, not 1 to 2147483648"),
    ({"stages": stage(2, produces=("frames", "latent"))}, "'latent' is made by 'denoise' and by 'decode'"),
    ({"stages": stage(2, produces=("frames", "control"))}, "'control' is made by an external input and by 'decode'"),
    ({"stages": stage(0, consumes=())}, "stage 'encode' consumes nothing"),
    ({"stages": stage(2, consumes=("latents",))}, "input 'latents' of stage 'decode' is connected to nothing"),
    ({"stages": stage(0, produces=("condition", "extra"))}, "'extra' is made but nobody takes it"),
    ({"edges": WORLD.edges[:-1]}, "'frames' has no edge, so its buffer would have no bound"),
    ({"edges": (*WORLD.edges, Edge("ghost"))}, "the edge of 'ghost' has no producer"),
    ({"outputs": ("frames", "sound")}, "output 'sound' can't be reached: no stage makes it"),
    ({"outputs": ("frames", "control")}, "output 'control' can't be reached: no stage makes it"),
    (
        {"stages": stage(0, consumes=("encode_request", "frames"))},
        "the stages decode, denoise, encode wait for each other in a cycle",
    ),
    ({"initialize_order": ("encode", "decode")}, "initialize_order must name each stage once"),
    ({"initialize_order": ("encode", "decode", "decode")}, "initialize_order must name each stage once"),
    ({"release_order": ("encode",)}, "release_order must name each stage once"),
    ({"control": "condition"}, "control 'condition' is not an external input"),
    ({"stages": stage(2, consumes=("latent", "control"))}, "control 'control' must be consumed by exactly one stage"),
    ({"latency_anchor": "latent"}, "latency anchor 'latent' is not an external input"),
    ({"control_aliases": {"up": "z"}}, "alias 'up' stands for the unknown key 'z'"),
    ({"prefetch": Prefetch("latent", 2, "control", "denoise")}, "'latent' is not an external input of its own"),
    ({"prefetch": Prefetch("control", 2, "control", "denoise")}, "'control' is not an external input of its own"),
    ({"prefetch": Prefetch("encode_request", 2, "latent", "denoise")}, "prefetch must follow the control 'control'"),
    ({"prefetch": Prefetch("encode_request", 2, "control", "x")}, "refill after the unknown stage 'x'"),
    ({"prefetch": Prefetch("encode_request", 0, "control", "denoise")}, "prefetch depth 0 is not 1 to 1024"),
    ({"prefetch": None}, "nobody supplies the external input 'encode_request'"),
    ({"edges": (Edge("encode_request", 0), *WORLD.edges[1:])}, "the edge of 'encode_request' has capacity 0, not 1 to"),
    ({"control_names": tuple(str(n) for n in range(257))}, "there are 257 control names; accepted: 256"),
    ({"chunks_max": 0}, "chunks_max is 0, not 1 to"),
    ({"frames_first": 0}, "frames_first is 0, not 1 to"),
    ({"frames_next": -1}, "frames_next is -1, not 1 to"),
    ({"frame_stride": 0}, "frame_stride is 0, not 1 to"),
    ({"fps": 0.0}, "fps is 0.0, not a positive number"),
    ({"fps": float("nan")}, "fps is nan, not a positive number"),
]


@pytest.mark.parametrize(("changes", "sentence"), FAULTS, ids=[sentence[:50] for _, sentence in FAULTS])
def test_validate_names_the_culprit(changes: Mapping[str, Any], sentence: str) -> None:
    """Each way for a dataflow to be none is refused with a sentence that names the spec and what is at fault."""
    with pytest.raises(SpecError) as caught:
        validate(replace(WORLD, **changes))
    assert str(caught.value).startswith("world: ")
    assert sentence in str(caught.value)


def test_a_spec_without_an_output_is_refused() -> None:
    """A pipeline that gives the client nothing isn't one."""
    spec = StreamSpec("sink", (StageSpec("eat", ("control",), ()),), (Edge("control"),), ("control",), (), ("eat",),
                      "control", 1, 1, 1, 1.0)  # fmt: skip
    with pytest.raises(SpecError, match="sink: there is no output"):
        validate(spec)


@pytest.mark.parametrize("least", ["encode_request", "condition"])
def test_a_control_edge_that_holds_more_than_its_condition_can_is_not_registrable(least: str) -> None:
    """Within a grant nothing may be refused for room; such a spec is valid, but a broker doesn't serve it."""
    edges = tuple(Edge(edge.artifact, 1 if edge.artifact == least else 2) for edge in WORLD.edges)
    spec = replace(WORLD, edges=edges)
    validate(spec)
    with pytest.raises(SpecError, match=f"the edge of 'control' holds 2 chunks, more than the 1 of '{least}'"):
        check_registrable(spec)


def test_without_prefetch_the_control_edge_may_hold_what_it_likes() -> None:
    """There is no condition that it could be ahead of."""
    spec = StreamSpec("plain", (StageSpec("make", ("control",), ("out",)),), (Edge("control", 9), Edge("out", 1)),
                      ("control",), ("out",), ("make",), "control", 1, 1, 1, 1.0)  # fmt: skip
    check_registrable(spec)
    assert spec.control_stage().name == "make"


def test_streaming_21_stages_are_released_in_the_reverse_order_unless_said_otherwise() -> None:
    """The order of release is its own where the spec names one."""
    assert WORLD.releases() == ("denoise", "decode", "encode")
    other = replace(WORLD, release_order=("decode", "denoise", "encode"))
    validate(other)
    assert other.releases() == ("decode", "denoise", "encode")


def test_lookups_by_name() -> None:
    """Stages and capacities are found by name, and a name that isn't there is a KeyError."""
    assert WORLD.stage("decode").produces == ("frames",)
    assert WORLD.capacity("latent") == 2
    assert WORLD.control_stage().name == "denoise"
    for missing in (lambda: WORLD.stage("x"), lambda: WORLD.capacity("x")):
        with pytest.raises(KeyError):
            missing()


def test_streaming_17_a_key_has_a_canonical_name() -> None:
    """Names and aliases lead to the canonical name; another name is refused with the list of what is accepted."""
    assert (WORLD.canonical_key("a"), WORLD.canonical_key("ArrowUp")) == ("a", "w")
    with pytest.raises(RequestError, match="unknown key 'q'; accepted: w, a, ArrowUp"):
        WORLD.canonical_key("q")
    with pytest.raises(RequestError, match="accepted: none"):
        replace(WORLD, control_names=(), control_aliases={}).canonical_key("q")


def test_frames_of_chunks() -> None:
    """The first chunk has fewer frames than the others."""
    assert [WORLD.frames_of(index) for index in range(3)] == [9, 12, 12]
    assert [WORLD.frames_in(chunks) for chunks in range(4)] == [0, 9, 21, 33]


@given(st.integers(1, 400))
def test_chunks_in_inverts_frames_in(chunks: int) -> None:
    """A count that fills whole chunks gives these chunks under both policies."""
    frames = WORLD.frames_in(chunks)
    assert WORLD.chunks_in(frames) == chunks
    assert WORLD.chunks_in(frames, "truncate") == chunks


@given(st.integers(-50, 2000), st.sampled_from(["strict", "truncate"]))
def test_chunks_in_accepts_whole_chunks_or_truncates_to_them(
    frames: int, policy: Literal["strict", "truncate"]
) -> None:
    """What is accepted fits into the frames; strict leaves no frame over, truncate less than a chunk."""
    whole = frames >= 9 and (frames - 1) % 4 == 0 and (policy == "truncate" or (frames - 9) % 12 == 0)
    if not whole:
        with pytest.raises(RequestError, match=f"frames: {frames} "):
            WORLD.chunks_in(frames, policy)
        return
    left = frames - WORLD.frames_in(WORLD.chunks_in(frames, policy))
    assert left == 0 if policy == "strict" else 0 <= left < 12


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        (10, "frames: 10 is not a count of the form 4k+1; accepted: 9 + 12*n, such as 9 or 21"),
        (0, "frames: 0 is not a count of the form 4k+1; accepted: 9 + 12*n, such as 9 or 21"),
        (13, "frames: 13 doesn't fill whole chunks; accepted: 9 + 12*n, such as 9 or 21"),
        (5, "frames: 5 doesn't fill whole chunks; accepted: 9 + 12*n, such as 9 or 21"),
    ],
)
def test_a_refused_number_of_frames_says_which_are_accepted(frames: int, sentence: str) -> None:
    """The sentence names the nearest counts that would do."""
    with pytest.raises(RequestError) as caught:
        WORLD.chunks_in(frames)
    assert str(caught.value) == sentence


def test_parameters_are_completed_with_defaults() -> None:
    """What isn't given takes its default, in the order of the spec."""
    assert check_parameters(WORLD, {"prompt": " a hill ", "shift": 3}) == {
        "prompt": " a hill ",
        "seed": 0,
        "tries": 1,
        "shift": 3,
        "fast": False,
        "policy": "strict",
    }


def test_complete_parameters_can_be_checked_again() -> None:
    """A parameter without a default stays None, which stands for not given."""
    spec = replace(WORLD, parameters=(Parameter("width", "integer", "of the picture"),))
    complete = check_parameters(spec, {})
    assert complete == {"width": None}
    assert check_parameters(spec, complete) == complete


@pytest.mark.parametrize(
    ("given_", "sentence"),
    [
        ({}, "prompt: is required (what the world is)"),
        ({"prompt": "x", "size": 1}, "size: unknown parameter; accepted: prompt, seed, tries, shift, fast, policy"),
        ({"prompt": ""}, "prompt: is empty; accepted: any text"),
        ({"prompt": "  "}, "prompt: is empty; accepted: any text"),
        ({"prompt": "x" * 21}, "prompt: 21 characters is above the most accepted, 20"),
        ({"prompt": 3}, "prompt: 3 is not a text"),
        ({"prompt": None}, "prompt: is required (what the world is)"),
        ({"prompt": "x", "seed": 1.0}, "seed: 1.0 is not an integer"),
        ({"prompt": "x", "seed": True}, "seed: True is not an integer"),
        ({"prompt": "x", "seed": -1}, "seed: -1 is below the least accepted, 0"),
        ({"prompt": "x", "seed": 2**63}, "seed: an integer of 64 bits doesn't fit; accepted: 64 bits with sign"),
        ({"prompt": "x", "tries": 12345678}, "tries: 12345678 is above the most accepted, 1234567"),
        ({"prompt": "x", "shift": 2**70}, "shift: an integer of 71 bits doesn't fit; accepted: 64 bits with sign"),
        ({"prompt": "x", "shift": "5"}, "shift: '5' is not a number"),
        ({"prompt": "x", "shift": float("nan")}, "shift: nan is not a finite number"),
        ({"prompt": "x", "shift": float("inf")}, "shift: inf is not a finite number"),
        ({"prompt": "x", "shift": 0.25}, "shift: 0.25 is below the least accepted, 0.5"),
        ({"prompt": "x", "fast": 1}, "fast: 1 is not true or false"),
        ({"prompt": "x", "policy": "wild"}, "policy: 'wild' is not accepted; accepted: strict, loose"),
    ],
)
def test_a_refused_parameter_is_named(given_: Mapping[str, Any], sentence: str) -> None:
    """The error carries the parameter's name, and the sentence says what is accepted."""
    with pytest.raises(RequestError) as caught:
        check_parameters(WORLD, given_)
    assert str(caught.value) == sentence
    assert caught.value.field == sentence.split(":", maxsplit=1)[0]


IMAGE = ("uint8", (4, 5, 3))


def test_tensors_fit_their_declared_shape() -> None:
    """A free dimension takes any size but zero; an optional tensor may be missing."""
    check_tensors(WORLD.tensors, {"image": IMAGE})
    check_tensors(WORLD.tensors, {"image": IMAGE, "mask": ("bool", (2, 2))})


@pytest.mark.parametrize(
    ("given_", "sentence"),
    [
        ({}, "image: is required; accepted: uint8[any, any, 3]"),
        ({"image": ("float32", (4, 5, 3))}, "image: is float32[4, 5, 3]; accepted: uint8[any, any, 3]"),
        ({"image": ("uint8", (4, 5, 4))}, "image: is uint8[4, 5, 4]; accepted: uint8[any, any, 3]"),
        ({"image": ("uint8", (4, 5))}, "image: is uint8[4, 5]; accepted: uint8[any, any, 3]"),
        ({"image": ("uint8", (0, 5, 3))}, "image: is uint8[0, 5, 3]; accepted: uint8[any, any, 3]"),
        ({"image": IMAGE, "mask": ("bool", (2, 3))}, "mask: is bool[2, 3]; accepted: bool[2, 2]"),
        ({"image": IMAGE, "depth": IMAGE}, "depth: unknown tensor; accepted: image, mask"),
    ],
)
def test_a_refused_tensor_is_named(given_: Mapping[str, tuple[str, tuple[int, ...]]], sentence: str) -> None:
    """The error carries the tensor's name, and the sentence says what is accepted."""
    with pytest.raises(RequestError) as caught:
        check_tensors(WORLD.tensors, given_)
    assert str(caught.value) == sentence
