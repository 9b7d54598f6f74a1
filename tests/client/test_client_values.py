"""From what an application holds to what travels, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reelwire import messages as m
from reelwire.client_values import array_of, control_artifact, control_of, frames_of, outputs_of, tensor_refs
from reelwire.controls import Control
from reelwire.errors import ControlError, RequestError, WireError
from reelwire.messages import Artifact
from reelwire.spec import Edge, StageSpec, StreamSpec, TensorInput
from reelwire.tensors import Inline, TensorRef, from_array

SPEC = StreamSpec(
    "toy", (StageSpec("make", ("control",), ("frames", "depth")),), (Edge("control"), Edge("frames"), Edge("depth")),
    ("control",), ("frames", "depth"), ("make",), "control", 9, 5, 4, 16.0, control_names=("a", "w"),
    control_aliases={"up": "w"}, control_tensors=(TensorInput("poses", "float", (-1, 4, 4), required=True), TensorInput("intrinsics", "float", (4,))),
)  # fmt: skip
FRAMES = from_array(np.zeros((2, 4, 4, 3), np.uint8))


@pytest.mark.parametrize("control", [
    Control(keys=[]), Control(keys=["a", "w"], reset_pose=True), Control(poses=np.eye(4)[None]),
    Control(poses=np.eye(4, dtype=np.float32)[None], intrinsics=np.ones((2, 4)), reset_pose=True),
    Control(poses=np.eye(4)[None], translation_norm=0.25),
])  # fmt: skip
def test_streaming_16_a_control_comes_back_as_it_was_given(control: Control) -> None:
    """Keys, poses and flags, bit for bit."""
    assert control_of(control_artifact(control, SPEC)) == control


def test_streaming_17_a_control_that_the_stream_does_not_have_is_refused_with_its_code() -> None:
    """Aliases become canonical names; another key is unknown, another array malformed."""
    assert control_artifact(Control(keys=["up"]), SPEC).values == {"keys": ["w"], "reset_pose": False}
    for control, code in ((Control(keys=["q"]), "unknown_key"),
                          (Control(poses=np.eye(4)[None], action=np.ones((1, 4))), "malformed")):  # fmt: skip
        with pytest.raises(ControlError) as caught:
            control_artifact(control, SPEC)
        assert caught.value.code == code


@pytest.mark.parametrize("artifact", [
    Artifact({}), Artifact({"keys": "w"}), Artifact({"keys": [1]}), Artifact({"keys": [], "reset_pose": 1}),
    Artifact({"keys": []}, {"poses": from_array(np.eye(4)[None])}), Artifact({}, {"poses": from_array(np.eye(3))}),
    Artifact({"translation_norm": "far"}, {"poses": from_array(np.eye(4)[None])}),
    Artifact({}, {"shapes": from_array(np.eye(3))}), Artifact({}, {"poses": TensorRef("bfloat16", (1,), Inline(b"00"))}),
])  # fmt: skip
def test_an_artifact_that_is_no_control_is_the_brokers_fault(artifact: Artifact) -> None:
    """Whatever a chunk claims to have applied, reading it raises a WireError and nothing else."""
    with pytest.raises(WireError):
        control_of(artifact)


def chunk(outputs: dict[str, Artifact]) -> m.Chunk:
    applied = m.Applied("held", Artifact({"keys": []}))
    return m.Chunk("s", 0, outputs, applied, {}, m.ChunkTiming(0, 0, None, {}), False)


def test_streaming_18_all_outputs_of_a_chunk_are_there() -> None:
    """Plain values and arrays of every output; the frames are those of the first one."""
    depth = Artifact({"unit": "m"}, {"depth": from_array(np.ones(3, np.float32))})
    outputs = outputs_of(chunk({"frames": Artifact({"n": 2}, {"frames": FRAMES, "mask": FRAMES}), "depth": depth}))
    assert outputs["depth"]["unit"] == "m"
    assert outputs["depth"]["depth"].tolist() == [1, 1, 1]
    assert frames_of(outputs, SPEC).shape == (2, 4, 4, 3)
    only = outputs_of(chunk({"frames": Artifact({}, {"pixels": FRAMES})}))
    assert frames_of(only, SPEC).shape == (2, 4, 4, 3)


@pytest.mark.parametrize("tensors", [
    {}, {"a": FRAMES, "b": FRAMES}, {"frames": from_array(np.zeros((2, 4, 4, 3), np.float32))},
    {"frames": from_array(np.zeros((4, 4, 3), np.uint8))}, {"frames": from_array(np.zeros((2, 4, 4, 1), np.uint8))},
])  # fmt: skip
def test_an_output_without_frames_is_named(tensors: dict[str, TensorRef]) -> None:
    """What came instead stands in the error."""
    with pytest.raises(WireError, match=r"a chunk of 'toy' holds .* instead of frames as uint8"):
        frames_of(outputs_of(chunk({"frames": Artifact({}, tensors)})), SPEC)


def test_what_is_no_array_is_named() -> None:
    """Texts, objects and ragged lists can't be sent; the error names the tensor."""
    wrong: list[Any] = ["far", object(), [[1], [1, 2]], np.zeros(2, "M8[s]")]
    for value in wrong:
        with pytest.raises(RequestError) as caught:
            tensor_refs({"depth": value})
        assert caught.value.field == "depth"
    with pytest.raises(WireError, match="tensor 'x': numpy has no bfloat16"):
        array_of("x", TensorRef("bfloat16", (1,), Inline(b"00")))
