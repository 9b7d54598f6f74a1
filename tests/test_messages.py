"""The messages as a protocol: closed, frozen, and each of them survives the wire."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reelwire import group_messages, job_messages, messages, parts, wire, worker_messages
from reelwire.spec import Plain
from reelwire.tensors import ITEM_BYTES, Inline, Shared, TensorRef

KINDS: list[type] = sorted({*typing.get_args(wire.Sendable)}, key=lambda kind: kind.__name__)
DIRECTIONS: list[tuple[wire.Direction[Any], object]] = [
    (wire.TO_BROKER, messages.ToBroker),
    (wire.TO_CLIENT, messages.ToClient),
    (wire.TO_WORKER, messages.ToWorker),
    (wire.TO_RANK, group_messages.ToRank),
    (wire.TO_LEADER, group_messages.ToLeader),
]

integers = st.integers(-(1 << 63), (1 << 63) - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8)
scalars: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: integers,
    float: floats,
    str: texts,
    bytes: st.binary(max_size=8),
    type(None): st.none(),
}
plain = st.recursive(
    st.one_of(*scalars.values()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensor_refs(draw: st.DrawFn) -> TensorRef:
    """A small tensor of any dtype, in a frame or in shared memory."""
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    if draw(st.booleans()):
        name, number = st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True), st.integers(0, (1 << 63) - 1)
        return TensorRef(dtype, shape, Shared(draw(name), draw(name), draw(number), draw(number)))
    nbytes = TensorRef(dtype, shape, Inline(b"")).nbytes
    return TensorRef(dtype, shape, Inline(draw(st.binary(min_size=nbytes, max_size=nbytes))))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint, as the protocol understands it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is TensorRef:
        return tensor_refs()
    if hint in scalars:
        return scalars[hint]
    if hint == Plain or any(typing.get_origin(arg) is dict for arg in args):
        return plain
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=2).map(tuple)
    if origin is Mapping:
        return st.dictionaries(texts, values_of(args[1]), max_size=2)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, args))
    assert dataclasses.is_dataclass(hint), hint
    hints = typing.get_type_hints(hint)
    members = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(hint)}
    return st.builds(typing.cast("Any", hint), **members)


def directions_of(kind: type) -> list[wire.Direction[Any]]:
    """The ways that a message may travel."""
    return [direction for direction, _ in DIRECTIONS if kind in direction.kinds.values()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    """Encoding and decoding any value of any message gives an equal value, in each direction that it may take."""
    message = data.draw(values_of(kind))
    attachment = data.draw(st.integers(0, (1 << 63) - 1))
    frames = wire.encode(message, attachment)
    assert directions_of(kind)
    for direction in directions_of(kind):
        assert wire.decode(frames, direction, wire.Limits()) == wire.Envelope(attachment, (message,))


def test_each_direction_is_a_closed_set() -> None:
    """A direction knows exactly the messages of its union, by their own names, and every message has a direction."""
    for direction, union in DIRECTIONS:
        assert {name: kind.__name__ for name, kind in direction.kinds.items()} == {
            kind.__name__: kind.__name__ for kind in typing.get_args(union)
        }
    assert all(directions_of(kind) for kind in KINDS)


@pytest.mark.parametrize("module", [messages, parts, worker_messages])
def test_everything_that_travels_is_a_frozen_slotted_value(module: types.ModuleType) -> None:
    """Messages and their parts can't be changed once they are made, and have no attributes beside their fields."""
    found = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__]
    assert found
    for kind in found:
        assert dataclasses.is_dataclass(kind), kind
        assert typing.cast("Any", kind).__dataclass_params__.frozen, kind
        assert "__slots__" in kind.__dict__, kind


def test_no_class_of_the_module_is_forgotten() -> None:
    """Every class stands in a union, or is a part of one that does."""
    found = {
        kind
        for module in (messages, worker_messages, job_messages, group_messages)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
    }
    hints = {hint for kind in KINDS for hint in typing.get_type_hints(kind).values()}
    inner = {arg for hint in hints for arg in (hint, *typing.get_args(hint))}
    assert set(KINDS) <= found
    assert found - set(KINDS) <= inner


def test_an_artifact_knows_its_size() -> None:
    """Its bytes are those of its tensors."""
    tensor = TensorRef("float32", (2, 3), Inline(bytes(24)))
    assert messages.Artifact({"a": 1}, {"x": tensor, "y": tensor}).nbytes == 48
    assert messages.Artifact().nbytes == 0
