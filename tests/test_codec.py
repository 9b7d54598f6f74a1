"""Functions compiled from type hints: strict about types, and silent about nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from reelwire import codec
from reelwire.errors import WireError
from reelwire.spec import Plain


@dataclass(frozen=True, slots=True)
class Inner:
    """A part."""

    name: str
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    """One field of each sort; some are called as the compiled code calls its own things."""

    value: int
    frames: tuple[Inner, ...]
    path: Mapping[str, Inner]
    kind: Literal["one", "two's"]
    names: Mapping[str, Plain] = field(default_factory=dict)
    either: int | float | str | None = None
    deep: tuple[tuple[int, ...], ...] = ()
    buffers: bytes = b""
    refusal: bool = False


@dataclass(frozen=True, slots=True)
class Nothing:
    """No field at all."""


WHOLE = Outer(1, (Inner("a", 2.0), Inner("b")), {"k": Inner("c", 1.0)}, "two's", {"p": [1, {"q": None}]}, 2.5, ((1, 2), ()),
              b"x", True)  # fmt: skip
TREE: list[Any] = [1, [["a", 2.0], ["b", None]], {"k": ["c", 1.0]}, "two's", {"p": [1, {"q": None}]}, 2.5, [[1, 2], []],
                   b"x", True]  # fmt: skip


def decoded(kind: Any, tree: Any) -> Any:
    return codec.decoder(kind)(tree, codec.Frames([b""]), "it")


def test_a_record_is_a_list_of_its_fields() -> None:
    """There and back, whatever the fields are called."""
    assert codec.encoder(Outer)(WHOLE, []) == TREE
    assert decoded(Outer, TREE) == WHOLE
    assert codec.encoder(Nothing)(Nothing(), []) == []
    assert decoded(Nothing, []) == Nothing()


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ((0,), 1.0, "Outer.value is not a 64-bit integer"),
        ((0,), -(1 << 63) - 1, "Outer.value is not a 64-bit integer"),
        ((1,), {}, "Outer.frames is not a list"),
        ((1, 0), ["a"], "Outer.frames is not a list of the 2 fields of Inner"),
        ((1, 0, 0), 1, "Inner.name is not a text"),
        ((1, 0, 1), float("inf"), "Inner.weight is not a finite number"),
        ((2,), [], "Outer.path is not a map with texts as keys"),
        ((2, 1), ["c", 1.0], "Outer.path is not a map with texts as keys"),
        ((2, "x" * 99), 5, f"Outer.path['{'x' * 40}'] is not a list of the 2 fields of Inner"),
        ((3,), "three", "Outer.kind is not one of one, two's"),
        ((3,), [], "Outer.kind is not one of one, two's"),
        ((4, 5), "x", "Outer.names is not a map with texts as keys"),
        ((4, "p"), {1: 2}, "Outer.names['p'] is not a map with texts as keys"),
        ((4, "p"), [[object()]], "Outer.names['p'] is not a plain value"),
        ((5,), True, "Outer.either is not one of int, float, str, NoneType"),
        ((5,), float("nan"), "Outer.either is not a finite number"),
        ((6, 0, 1), "2", "Outer.deep is not a 64-bit integer"),
        ((7,), "x", "Outer.buffers is not bytes"),
        ((8,), 1, "Outer.refusal is not true or false"),
    ],
)
def test_streaming_34_the_error_names_the_field(place: tuple[Any, ...], value: Any, sentence: str) -> None:
    """Every wrong value in a tree is refused with where it stands and what is accepted there."""
    wrong = [TREE[0], [["a", 2.0]], {"k": ["c", 1.0]}, "one", {"p": []}, None, [[1, 2]], b"", False]
    decoded(Outer, wrong)
    *way, last = place
    inner: Any = wrong
    for step in way:
        inner = inner[step]
    inner[last] = value
    with pytest.raises(WireError) as caught:
        decoded(Outer, wrong)
    assert str(caught.value) == sentence


def test_streaming_34_plain_values_are_nested_so_deep_and_no_deeper() -> None:
    """16 lists in one another with something in the innermost are accepted, 17 aren't."""
    tree: Any = 1
    for _ in range(codec.PLAIN_DEPTH_MAX):
        tree = [tree]
    assert decoded(Outer, [*TREE[:4], {"p": tree}, *TREE[5:]]).names == {"p": tree}
    with pytest.raises(WireError, match=r"Outer.names\['p'\] is not nested 16 or fewer deep"):
        decoded(Outer, [*TREE[:4], {"p": [tree]}, *TREE[5:]])


def test_whole_numbers_become_floats() -> None:
    """A number without a fraction may be written as an integer where a float is meant."""
    assert repr(decoded(Inner, ["a", 3]).weight) == "3.0"
    assert repr(decoded(Outer, [*TREE[:5], 3, *TREE[6:]]).either) == "3"


def test_a_type_that_has_no_place_on_the_wire_is_our_error() -> None:
    """It is found when the functions are compiled, not when a message comes."""
    for hint in (object, set[int], complex, int | list[int]):
        with pytest.raises(TypeError, match="no encoding for"):
            codec.encoder(hint)
        with pytest.raises(TypeError, match="no decoding for"):
            codec.decoder(hint)
