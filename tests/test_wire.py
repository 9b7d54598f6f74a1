"""Frames that are no message: whatever a stranger sends, decoding says so with its own error and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reelwire import codec, tensors, wire
from reelwire import messages as m
from reelwire.controls import KeyState
from reelwire.errors import VersionMismatch, WireError
from reelwire.group_messages import LeaderTensor
from reelwire.spec import Edge, Parameter, StageSpec, StreamSpec, TensorInput

LIMITS = wire.Limits()
SPEC = StreamSpec("toy", (StageSpec("make", ("control",), ("frames",)),), (Edge("control"), Edge("frames")),
                  ("control",), ("frames",), ("make",), "control", 9, 5, 4, 16.0, control_names=("w",),
                  control_aliases={"up": "w"}, parameters=(Parameter("seed", "integer", "of the noise", default=0),),
                  tensors=(TensorInput("image", "uint8", (-1, -1, 3)),))  # fmt: skip
ARTIFACT = m.Artifact({"keys": ["w"], "deep": {"a": [1, 2.5, None, b"x"]}}, {"x": tensors.from_array(np.eye(3))})
EXAMPLES: list[tuple[m.Message, wire.Direction[Any]]] = [
    (m.ClientHello("1.2.3", "me"), wire.TO_BROKER),
    (m.OpenSession("key", "toy", 3, {"prompt": "x"}, {"image": tensors.from_array(np.ones((2, 2, 3), np.uint8))}),
     wire.TO_BROKER),
    (m.SetKeys("s", KeyState(3, ("w",), 2, ("w",), 1)), wire.TO_BROKER),
    (m.SubmitControl("s", None, ARTIFACT), wire.TO_BROKER),
    (m.WorkerHello("1.2.3", "w", "cpu", (SPEC,), (m.StageOffer("toy", "make", 2, 1 << 30),), {"torch": "2"}),
     wire.TO_BROKER),
    (m.StageFailed("s", "make", 1, 1, "run", 4, m.Failure("stage", "boom", "make", 4)), wire.TO_BROKER),
    (m.TaskDone("s", "make", 1, 1, 0, {"frames": ARTIFACT, "more": ARTIFACT}, {"pose": [1.0]}, 0.5), wire.TO_BROKER),
    (m.Welcome("me", "1.2.3", 1.0, 3, {"frame_bytes_max": 9}, (SPEC,)), wire.TO_CLIENT),
    (m.Chunk("s", 0, {"frames": ARTIFACT}, m.Applied("tap", ARTIFACT, 3), {"a": None},
             m.ChunkTiming(1.0, 0.5, None, {"make": m.StageTiming(0.0, 0.1, 0.2, 0.3)}), True), wire.TO_CLIENT),
    (m.SessionEnded("s", "failed", m.Failure("overload", "full", retry_after_s=2.0)), wire.TO_CLIENT),
    (m.RunTask("s", "toy", "make", 1, 1, 0, {"control": ARTIFACT}, True, False), wire.TO_WORKER),
    (m.InitializeStage("s", "toy", "make", 1, 1, 3, {}, {}, ARTIFACT, 4, (LeaderTensor("handed", "y", "int8", (2, 3)),)),
     wire.TO_WORKER),
]  # fmt: skip


def packed(value: Any) -> bytes:
    data: bytes | None = msgpack.packb(value)
    assert data is not None
    return data


def header(*parts: Any) -> list[bytes]:
    """The header frame of exactly these parts."""
    return [packed(list(parts))]


def said(name: Any, body: Any, attachment: int = 0) -> list[bytes]:
    """The header of one message with any body."""
    return header(wire.MAGIC, wire.PROTOCOL, attachment, [name, packed(body)])


def frames_of(*messages: m.Message) -> list[bytes]:
    """The frames of messages that travel together."""
    return [bytes(frame) for frame in wire.encode(messages, 7)]


def refused(frames: Sequence[bytes | memoryview], direction: wire.Direction[Any], limits: wire.Limits = LIMITS) -> str:
    with pytest.raises(WireError) as caught:
        wire.decode(frames, direction, limits)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def survives(frames: Sequence[bytes], direction: wire.Direction[Any]) -> None:
    """Decoding gives an envelope or one of its two errors; anything else fails the test."""
    try:
        envelope = wire.decode(frames, direction, LIMITS)
    except (WireError, VersionMismatch) as error:
        size = len(str(error))
    else:
        size = 0
        assert {type(message).__name__ for message in envelope.messages} <= set(direction.kinds)
        assert sum(envelope.sizes) <= sum(map(len, frames))
        again = wire.decode(wire.encode(envelope.messages, envelope.attachment), direction, LIMITS)
        assert repr(again.messages) == repr(envelope.messages)  # equality would fail for a NaN among plain values
    assert size < 500


def mutated(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """The frames with a few things wrong."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(frames)) if frames else 0
        match rng.randrange(6):
            case 0 if frames and frames[at]:
                data = bytearray(frames[at])
                data[rng.randrange(len(data))] = rng.randrange(256)
                frames[at] = bytes(data)
            case 1 if frames:
                frames[at] = frames[at][: rng.randint(0, len(frames[at]))]
            case 2 if frames:
                frames[at] += rng.randbytes(rng.randint(1, 8))
            case 3 if frames:
                del frames[at]
            case 4:
                frames.insert(at, rng.randbytes(rng.randint(0, 40)))
            case _ if frames:
                cut = rng.randint(0, len(frames[at]))
                frames[at] = frames[at][:cut] + rng.randbytes(rng.randint(0, 4)) + frames[at][cut:]
    return frames


@pytest.mark.parametrize(("message", "direction"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_streaming_34_damaged_frames_are_a_wire_error_and_nothing_else(
    message: m.Message, direction: wire.Direction[Any]
) -> None:
    """Bytes changed, cut, added; frames lost, swapped in: the outcome is a message or one of decoding's two errors."""
    rng = random.Random(type(message).__name__)
    frames = frames_of(message)
    for _ in range(400):
        survives(mutated(frames, rng), direction)


@pytest.mark.parametrize(("message", "direction"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_streaming_34_values_of_another_type_are_a_wire_error_and_nothing_else(
    message: m.Message, direction: wire.Direction[Any]
) -> None:
    """Any value inside the header may be replaced by any other: decoding raises its own errors only."""
    rng = random.Random(type(message).__name__)
    first, *rest = frames_of(message)
    strange: list[Any] = [None, True, -1, 1 << 63, 1.5, float("nan"), float("inf"), "", "run", b"\xff", [], [[]], {},
                          {"a": 1}, {"": None}, ["uint8", [2], 0], ["float32", [-1], 0], "x" * 999]  # fmt: skip
    for _ in range(400):
        head = msgpack.unpackb(first)
        tree = [*head[3][::2], msgpack.unpackb(head[3][1])]
        replace_somewhere(tree, copy.deepcopy(rng.choice(strange)), rng)
        head[3] = [tree[0], packed(tree[1])]
        survives([packed(head), *rest], direction)
        replace_somewhere(head, copy.deepcopy(rng.choice(strange)), rng)
        survives([packed(head), *rest], direction)


@pytest.mark.parametrize("direction", [wire.TO_BROKER, wire.TO_CLIENT, wire.TO_WORKER], ids=["up", "client", "worker"])
def test_streaming_34_a_damaged_batch_is_refused_as_a_whole(direction: wire.Direction[Any]) -> None:
    """Several messages in one: the outcome is all of them or one of decoding's two errors."""
    rng = random.Random(1)
    messages = [message for message, way in EXAMPLES if way is direction] * 2
    for _ in range(400):
        rng.shuffle(messages)
        frames = frames_of(*messages)
        assert wire.decode(frames, direction, LIMITS).messages == tuple(messages)
        survives(mutated(frames, rng), direction)


def replace_somewhere(tree: Any, value: Any, rng: random.Random) -> None:
    """Put a value in the place of one inside a tree of lists and dicts."""
    while True:
        places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        place = rng.choice(places)
        inner = tree[place]
        if not isinstance(inner, list | dict) or not inner or rng.random() < 0.25:
            tree[place] = value
            return
        tree = inner


def opening(tensors: Any = None, parameters: Any = None) -> list[bytes]:
    """The header of a request with these two fields."""
    given = [{} if each is None else each for each in (parameters, tensors)]
    return said("OpenSession", ["k", "p", 1, *given, "late", "asap", [2, 9]])


ACK = packed(["s", 1, [2, 9]])
TWICE = {"i": ["uint8", [1], 0], "j": ["uint8", [1], 0]}
LATER = {"i": ["uint8", [1], 1], "j": ["uint8", [1], 0]}

deep: Any = 1
for _ in range(600):
    deep = [deep]


@given(
    st.lists(st.binary(max_size=60), max_size=3),
    st.sampled_from([wire.TO_BROKER, wire.TO_CLIENT, wire.TO_WORKER]),
)
@example([b"GET / HTTP/1.1\r\n"], wire.TO_BROKER)
@example([], wire.TO_CLIENT)
@example([packed(deep)], wire.TO_BROKER)
@example(header("reelwire", deep, 0, []), wire.TO_BROKER)
@example(header("reelwire", wire.PROTOCOL, deep, []), wire.TO_BROKER)
@example(header("reelwire", wire.PROTOCOL, 0, deep), wire.TO_BROKER)
@example(said("Ack", deep), wire.TO_BROKER)
@example([b"\x91" * 100_000], wire.TO_BROKER)
def test_streaming_34_random_bytes_are_a_wire_error_and_nothing_else(
    frames: list[bytes], direction: wire.Direction[Any]
) -> None:
    """HTTP, noise, no frame at all, nesting a thousand deep: the answer is one of decoding's two errors."""
    survives(frames, direction)


DIRECTIONS: list[wire.Direction[Any]] = [wire.TO_BROKER, wire.TO_CLIENT, wire.TO_WORKER]
json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.sampled_from(DIRECTIONS).flatmap(
        lambda direction: st.tuples(st.just(direction), st.sampled_from(sorted(direction.kinds)))
    ),
    json_like,
)
def test_streaming_34_a_body_of_random_values_is_a_wire_error_and_nothing_else(
    where: tuple[wire.Direction[Any], str], body: Any
) -> None:
    """A header in order with any msgpack for a body: decoding raises its own errors only."""
    direction, name = where
    survives(said(name, body, 3), direction)


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([], "message without a frame"),
        ([b""], "header is not msgpack"),
        ([b"\xc1"], "header is not msgpack"),
        ([packed(1)], "header is not one of reelwire"),
        (header("reelwire"), "header is not one of reelwire"),
        (header("other", wire.PROTOCOL, 0, ["Ack", ACK]), "header is not one of reelwire"),
        (header("reelwire", "2", 0, ["Ack", ACK]), "the protocol's version is not a number"),
        (header("reelwire", wire.PROTOCOL, 0), "header has 3 parts instead of 4"),
        (header("reelwire", wire.PROTOCOL, -1, ["Ack", ACK]), "attachment is not a number of 0 and more"),
        (header("reelwire", wire.PROTOCOL, True, ["Ack", ACK]), "attachment is not a number of 0 and more"),
        (header("reelwire", wire.PROTOCOL, 0, {"Ack": ACK}), "the messages are not a list of 1 to 256 names, each with its body"),
        (header("reelwire", wire.PROTOCOL, 0, []), "the messages are not a list of 1 to 256 names, each with its body"),
        (header("reelwire", wire.PROTOCOL, 0, ["Ack"]), "the messages are not a list of 1 to 256 names, each with its body"),
        (header("reelwire", wire.PROTOCOL, 0, ["Ack", ACK] * 257), "the messages are not a list of 1 to 256 names"),
        (header("reelwire", wire.PROTOCOL, 0, ["Ack", ["s", 1, [2, 9]]]), "Ack's body is not bytes"),
        (header("reelwire", wire.PROTOCOL, 0, ["Ack", b"\xc1"]), "Ack is not msgpack"),
        (header("reelwire", wire.PROTOCOL, 0, ["Ack", ACK, "Ack", packed(["s"])]), "Ack is not a list of the 3 fields of Ack"),
        (said(b"Ack", []), "the message's name is not a text"),
        (said("Chunk", []), "message 'Chunk' is unknown in this direction"),
        (said("x" * 999, []), f"message '{'x' * 40}' is unknown"),
        (said("Ack", {"session": "s"}), "Ack is not a list of the 3 fields of Ack"),
        (said("Ack", ["s"]), "Ack is not a list of the 3 fields of Ack"),
        (said("Ack", ["s", 1, [2]]), "Ack.credit is not a list of the 2 fields of Credit"),
        (said("Ack", ["s", 1.0, [2, 9]]), "Ack.chunks is not a 64-bit integer"),
        (said("Ack", ["s", True, [2, 9]]), "Ack.chunks is not a 64-bit integer"),
        (said("Ack", ["s", 1 << 63, [2, 9]]), "Ack.chunks is not a 64-bit integer"),
        (said("Ack", ["s", 1, [2, -1.0]]), "Credit.nbytes is not a 64-bit integer"),
        (said("Ack", [b"s", 1, [2, 9]]), "Ack.session is not a text"),
        (said("Heartbeat", [float("nan"), [], []]), "Heartbeat.busy_for_s is not a finite number"),
        (said("Heartbeat", ["1", [], []]), "Heartbeat.busy_for_s is not a finite number"),
        (said("Heartbeat", [1.0, [], [["s", None]]]), "ControlGrant.control_limit is not a 64-bit integer"),
        (said("EndSession", ["s", "stop"]), "EndSession.mode is not one of drain, cancel"),
        (said("SetKeys", ["s", [1, "w", 0, [], 0]]), "KeyState.held is not a list"),
        (said("SetKeys", ["s", [1, ["w", 1], 0, [], 0]]), "KeyState.held is not a text"),
        (said("SubmitControl", ["s", "1", [{}, {}]]), "SubmitControl.index is not a 64-bit integer"),
        (said("MemoryProbed", ["o", "x"]), "MemoryProbed.probe is not bytes"),
        (opening(parameters=[]), "OpenSession.parameters is not a map"),
        (opening(parameters={"a": deep}), "OpenSession.parameters['a'] is not nested 16 or fewer deep"),
        (opening({"i": ["uint8", [1], 0]}), "OpenSession.tensors['i']: frame 0 of 0 isn't"),
        (opening({"i": ["uint8", [1], -1]}), "frame -1 of 0 isn't"),
        (opening({"i": ["uint8", 1, 0]}), "OpenSession.tensors['i'] is not a tensor"),
        (opening({"i": [1]}), "OpenSession.tensors['i'] is not a tensor"),
        (opening({"i": ["uint8", [1], ["own er", "s", 1, 0]]}), "'own er' names no shared memory"),
        (opening({"i": ["uint8", [1], ["o", "s", -1, 0]]}), "generations and offsets of 0 and more"),
        ([*said("Ack", ["s", 1, [2, 9]]), b"x"], "Ack refers to 0 of 1 frames"),
        ([*header("reelwire", wire.PROTOCOL, 0, ["Ack", ACK] * 2), b"x"], "a batch of 2 messages refers to 0 of 1 frames"),
        ([*opening(TWICE), b"x", b"y"], "frame 0 is referred to in"),
        ([*opening(LATER), b"x", b"y"], "in place of frame 0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_streaming_34_the_error_says_what_is_wrong(frames: list[bytes], sentence: str) -> None:
    """Each fault has its sentence, which names the field."""
    assert sentence in refused(frames, wire.TO_BROKER)


def test_streaming_38_another_protocol_is_named_with_ours() -> None:
    """A header of another version is recognised as such, whatever follows."""
    with pytest.raises(VersionMismatch, match=f"the peer speaks protocol 1, this side {wire.PROTOCOL}"):
        wire.decode(header("reelwire", 1, 0, "Ack", ["s", 1]), wire.TO_BROKER, LIMITS)
    with pytest.raises(VersionMismatch, match=f"the peer speaks protocol 9, this side {wire.PROTOCOL}"):
        wire.decode(header("reelwire", 9, {"new": "layout"}), wire.TO_BROKER, LIMITS)


def test_streaming_34_sizes_are_limited_before_anything_is_read() -> None:
    """Too many frames, a header or a frame that is too large: refused with the size and what is accepted."""
    frames = frames_of(EXAMPLES[1][0])
    size = len(frames[1])
    assert "message of 2 frames; accepted: 1" in refused(frames, wire.TO_BROKER, wire.Limits(frames_max=1))
    assert "accepted: 8" in refused(frames, wire.TO_BROKER, wire.Limits(header_bytes_max=8))
    narrow = wire.Limits(frame_bytes_max=len(frames[0]))
    big = [frames[0], bytes(len(frames[0]) + 1)]
    assert f"frame of {len(big[1])} bytes; accepted: {len(frames[0])}" in refused(big, wire.TO_BROKER, narrow)
    total = size + len(frames[0])
    exact = wire.Limits(size, len(frames[0]), 2, total)
    wire.decode(frames, wire.TO_BROKER, exact)
    less = dataclasses.replace(exact, message_bytes_max=total - 1)
    assert f"message of {total} bytes; accepted: {total - 1}" in refused(frames, wire.TO_BROKER, less)
    assert exact.part_bytes_max == max(size, len(frames[0]))


def test_nothing_but_plain_msgpack_is_read() -> None:
    """Extension types, among them timestamps, are refused, so no code of anybody's runs when bytes are read."""
    for data in (msgpack.ExtType(5, b"x"), msgpack.Timestamp(1)):
        refused(said("Ack", ["s", data, [2, 9]]), wire.TO_BROKER)
        refused(opening(parameters={"a": data}), wire.TO_BROKER)


def test_what_can_not_be_sent_is_the_senders_fault() -> None:
    """A numpy scalar, an integer of 65 bits, half a surrogate pair: encoding is a ValueError that names the message."""
    for value in (np.float32(1), 1 << 64, "\ud800", object()):
        with pytest.raises(ValueError, match="OpenSession can't be encoded"):
            wire.encode(m.OpenSession("k", "p", 1, {"a": value}), 0)  # type: ignore[dict-item]


def test_tensors_travel_beside_the_header_without_a_copy() -> None:
    """One frame per tensor, in the order of the fields, over the very bytes of the array."""
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    frames = wire.encode(m.OpenSession("k", "p", 1, {}, {"image": tensors.from_array(image)}), 0)
    assert len(frames) == 2
    image[0, 0, 0] = 99
    assert memoryview(frames[1])[0] == 99


def test_a_message_knows_its_own_size_among_others() -> None:
    """Each message of a batch is as large as it is alone, its frames included."""
    messages = [message for message, direction in EXAMPLES if direction is wire.TO_BROKER]
    together = wire.decode(wire.encode(messages, 7), wire.TO_BROKER, LIMITS)
    alone = [wire.decode(wire.encode(message, 7), wire.TO_BROKER, LIMITS).sizes[0] for message in messages]
    assert list(together.sizes) == alone
    assert together.sizes[1] > 12


def test_after_prepare_no_message_waits_for_its_compiler() -> None:
    """All encoders and decoders of both directions are there, also those of the values inside of the messages."""
    wire.prepare(wire.TO_CLIENT, m.ToClient)
    made = codec.encoder.cache_info().misses, codec.decoder.cache_info().misses
    for message, direction in EXAMPLES:
        if direction is wire.TO_CLIENT:
            wire.decode(wire.encode(message, 3), direction, LIMITS)
    assert (codec.encoder.cache_info().misses, codec.decoder.cache_info().misses) == made


def beat(nbytes: int = 0, frames: int = 0) -> wire.Packed:
    """A message with a body and frames of so many bytes."""
    return wire.Packed("Heartbeat", bytes(nbytes), [bytes(nbytes)] * frames)


def test_streaming_11_small_messages_travel_together_within_bounds() -> None:
    """Up to 64 KiB of tensors, 128 KiB of header and 256 messages, of one attachment, and what their receiver takes."""
    many = wire.Batch(1, beat(), LIMITS)
    assert [many.add(1, beat()) for _ in range(wire.TOGETHER_MAX)] == [True] * 255 + [False]
    assert not wire.Batch(1, beat(), LIMITS).add(2, beat())
    header = wire.Batch(1, beat(), LIMITS)
    assert header.add(1, beat(wire.TOGETHER_HEADER_BYTES_MAX - 200))
    assert not header.add(1, beat(200))
    assert len(header.frames()[0]) <= header.nbytes <= wire.TOGETHER_HEADER_BYTES_MAX
    tensors_ = wire.Batch(1, beat(), LIMITS)
    assert not tensors_.add(1, beat(1 + wire.TOGETHER_TENSOR_BYTES_MAX // 2, frames=2))
    assert tensors_.add(1, beat(wire.TOGETHER_TENSOR_BYTES_MAX // 2, frames=2))
    assert not tensors_.add(1, beat(1, frames=1))
    assert 0 <= tensors_.nbytes - sum(wire.sizes_of(tensors_.frames())) <= wire.HEADER_BYTES + 2 * wire.ENTRY_BYTES
    for narrow in (wire.Limits(header_bytes_max=78), wire.Limits(frames_max=2), wire.Limits(message_bytes_max=156)):
        one = wire.Batch(1, beat(4, frames=1), narrow)
        assert not one.add(1, beat(9, frames=1))
        assert one.frames()[1:] == [bytes(4)]


def test_streaming_11_a_large_message_travels_alone() -> None:
    """Behind a batch that begins with one nothing more is put."""
    large = wire.Batch(1, beat(wire.TOGETHER_TENSOR_BYTES_MAX + 1, frames=1), LIMITS)
    assert not large.add(1, beat(1, frames=1))
    assert not large.add(1, beat())
    assert wire.Batch(1, wire.pack(m.Heartbeat()), LIMITS).frames() == wire.encode(m.Heartbeat(), 1)
