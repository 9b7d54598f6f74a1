"""Values to trees of lists, maps and scalars, and back: what `wire` packs into bytes and unpacks from them.

The functions of each class are written from its type hints, as source, and compiled once: a closure per field is several
times slower, and what is written by hand forgets a field. A record is a list of its fields, in their order; a tensor is
``[dtype, shape, place]``, where the place is the number of a frame or ``[owner, segment, generation, offset]``. Nothing
that a stranger may send is taken on trust: every value is checked for its exact type, and an error names the field.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, cast

from . import tensors
from .errors import WireError
from .tensors import Inline, Shared, TensorRef

PLAIN_DEPTH_MAX = 16
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
LEAVES = frozenset({type(None), bool, int, float, str, bytes})
"""Types of plain values that hold no others."""

Buffer = bytes | memoryview
Path = str | tuple["Path", str]
"""A field by its name, or the entry of a map: the map's path and the key."""
Encoder = Callable[[Any, list[Buffer]], Any]
Decoder = Callable[[Any, "Frames", Path], Any]


class Frames:
    """The frames of tensors; they are taken in order, each once, and numbered anew for each message.

    Args:
        frames: all frames, the header first.

    Attributes:
        next: place of the frame that is taken next.
    """

    __slots__ = ("_first", "_frames", "next")

    def __init__(self, frames: Sequence[Buffer]) -> None:
        """Start after the header."""
        self._frames = frames
        self._first = self.next = 1

    def begin(self) -> int:
        """The next message begins; the place of its first frame."""
        self._first = self.next
        return self._first

    def take(self, number: int, path: Path) -> Buffer:
        """The frame of that number in this message.

        Raises:
            WireError: there is none, or another one is next.
        """
        place = self._first + number
        if number < 0 or place >= len(self._frames):
            raise WireError(f"{_said(path)}: frame {number} of {len(self._frames) - self._first} isn't there")
        if place != self.next:
            due = self.next - self._first
            raise WireError(f"{_said(path)}: frame {number} is referred to in place of frame {due}")
        self.next += 1
        return self._frames[place]


@cache
def encoder(hint: Any) -> Encoder:
    """The function that makes a tree of a value of that type; tensors' bytes are appended to the buffers, not copied.

    Raises:
        TypeError: the type has no place on the wire.
    """
    names: dict[str, Any] = {"encode_tensor": _encode_tensor}
    if is_dataclass(hint) and hint is not TensorRef:
        members = [_encoding(member, f"value.{name}", names) for name, member in _members(hint)]
        body = f"[{', '.join(members)}]"
    else:
        body = _encoding(hint, "value", names)
    return cast("Encoder", _compiled(hint, "value, buffers", [f"return {body}"], names))


@cache
def decoder(hint: Any) -> Decoder:
    """The function that makes a value of that type of a tree, or raises a WireError that names the field.

    Raises:
        TypeError: the type has no place on the wire.
    """
    names: dict[str, Any] = dict(_DECODING_NAMES)
    if is_dataclass(hint) and hint is not TensorRef:
        lines = _record_decoding(hint, names)
    else:
        lines = [*_decoding(hint, "value", "path", names), "return value"]
    return cast("Decoder", _compiled(hint, "value, frames, path", lines, names))


# --- the source ------------------------------------------------------------------------------------------------------


def _compiled(hint: Any, parameters: str, lines: Iterable[str], names: dict[str, Any]) -> Any:
    source = "\n".join([f"def function({parameters}):", *(f"    {line}" for line in lines)])
    exec(compile(source, f"<codec of {hint}>", "exec"), names)  # noqa: S102  # made of our own type hints alone
    return names["function"]


def _encoding(hint: Any, value: str, names: dict[str, Any]) -> str:
    """An expression for the tree of what `value` says, an expression too; those that it calls are put into `names`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is TensorRef:
        return f"encode_tensor({value}, buffers)"
    if hint in _SCALARS or hint is float or origin is Literal or _is_plain(hint) or _is_scalar_union(hint):
        return value
    if is_dataclass(hint):
        return f"{_named(names, 'encode', hint, encoder)}({value}, buffers)"
    if origin is tuple:
        each = _encoding(args[0], "each", names)
        return f"list({value})" if each == "each" else f"[{each} for each in {value}]"
    if origin is Mapping:
        each = _encoding(args[1], "each", names)
        return f"dict({value})" if each == "each" else f"{{key: {each} for key, each in {value}.items()}}"
    if _is_optional(hint):
        some = _encoding(args[0], value, names)
        return value if some == value else f"(None if {value} is None else {some})"
    raise TypeError(f"no encoding for {hint}")


def _record_decoding(kind: Any, names: dict[str, Any]) -> list[str]:
    members = _members(kind)
    lines = [
        f"if type(value) is not list or len(value) != {len(members)}:",
        f"    raise refusal(path, 'a list of the {len(members)} fields of {kind.__name__}')",
    ]
    if members:
        lines.append("".join(f"_{name}, " for name, _ in members) + "= value")
    for name, member in members:
        lines += _decoding(member, f"_{name}", repr(f"{kind.__name__}.{name}"), names)
    names["kind"] = kind
    if hasattr(kind, "__post_init__") or "__slots__" not in vars(kind):
        return [*lines, f"return kind({', '.join(f'_{name}' for name, _ in members)})"]
    # What a frozen class's own __init__ does costs twice as much, because it goes through object.__setattr__.
    names["new"] = object.__new__
    names |= {f"set_{name}": vars(kind)[name].__set__ for name, _ in members}
    return [*lines, "self = new(kind)", *(f"set_{name}(self, _{name})" for name, _ in members), "return self"]


def _decoding(hint: Any, value: str, path: str, names: dict[str, Any]) -> list[str]:
    """Lines that check the variable `value`, and make a value of the tree in it; what they call is put into `names`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is TensorRef:
        return [f"{value} = decode_tensor({value}, frames, {path})"]
    if _is_plain(hint):
        return [f"if type({value}) not in LEAVES:", f"    check_plain({value}, {path})"]
    if hint in _SCALARS:
        wrong, accepted = _SCALARS[hint]
        return [f"if {wrong.format(value)}:", f"    raise refusal({path}, {accepted!r})"]
    if hint is float:
        return [f"if type({value}) is not float or not isfinite({value}):", f"    {value} = number({value}, {path})"]
    if origin is Literal:
        wrong, accepted = f"type({value}) is not str or {value} not in {args!r}", f"one of {', '.join(args)}"
        return [f"if {wrong}:", f"    raise refusal({path}, {accepted!r})"]
    if is_dataclass(hint):
        return [f"{value} = {_named(names, 'decode', hint, decoder)}({value}, frames, {path})"]
    if origin is tuple:
        item = _named(names, "decode", args[0], decoder)
        return [
            f"if type({value}) is not list:",
            f"    raise refusal({path}, 'a list')",
            f"{value} = tuple([{item}(each, frames, {path}) for each in {value}]) if {value} else ()",
        ]
    if origin is Mapping:
        made = f"check_plain_map({value}, {path})"
        if not _is_plain(args[1]):
            made = f"{value} = decode_map({value}, {_named(names, 'decode', args[1], decoder)}, frames, {path})"
        return [
            f"if type({value}) is not dict:",
            f"    raise refusal({path}, MAP)",
            f"if {value}:",
            f"    {made}",
        ]
    if _is_optional(hint):
        return [f"if {value} is not None:", *(f"    {line}" for line in _decoding(args[0], value, path, names))]
    if _is_scalar_union(hint):
        kinds = _named(names, "kinds", hint, lambda union: _union(typing.get_args(union)))
        return [f"{kinds}({value}, {path})"]
    raise TypeError(f"no decoding for {hint}")


def _named(names: dict[str, Any], what: str, hint: Any, make: Callable[[Any], Any]) -> str:
    """The name under which the function for a type stands in `names`."""
    name = f"{what}_{getattr(hint, '__name__', 'value')}"
    made = make(hint)
    while names.setdefault(name, made) is not made:
        name += "_"
    return name


def _members(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return [(member.name, hints[member.name]) for member in fields(kind)]


def _is_plain(hint: Any) -> bool:
    """Whether it is `spec.Plain`, which refers to itself and so equals nothing once it is resolved."""
    return any(typing.get_origin(arg) is dict for arg in typing.get_args(hint))


def _is_optional(hint: Any) -> bool:
    args = typing.get_args(hint)
    return typing.get_origin(hint) in (Union, types.UnionType) and len(args) == 2 and args[1] is type(None)


def _is_scalar_union(hint: Any) -> bool:
    accepted = (*_SCALARS, float, type(None))
    union = typing.get_origin(hint) in (Union, types.UnionType)
    return union and not _is_optional(hint) and all(arg in accepted for arg in typing.get_args(hint))


# --- what it calls ---------------------------------------------------------------------------------------------------

_MAP = "a map with texts as keys"
_SCALARS: dict[Any, tuple[str, str]] = {
    bool: ("type({0}) is not bool", "true or false"),
    int: ("type({0}) is not int or not INT_MIN <= {0} <= INT_MAX", "a 64-bit integer"),
    str: ("type({0}) is not str", "a text"),
    bytes: ("type({0}) is not bytes", "bytes"),
}
"""Type to what is wrong, and what is accepted."""


def _said(path: Path) -> str:
    return path if isinstance(path, str) else f"{_said(path[0])}[{path[1][:40]!r}]"


def _refusal(path: Path, accepted: str) -> WireError:
    return WireError(f"{_said(path)} is not {accepted}")


def _number(value: Any, path: Path) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _refusal(path, "a finite number")
    return float(value)


def _union(kinds: tuple[Any, ...]) -> Callable[[Any, Path], None]:
    inner: dict[Any, Decoder] = {kind: decoder(kind) for kind in kinds if kind is not type(None)}

    def check(value: Any, path: Path) -> None:
        if type(value) not in kinds:
            raise _refusal(path, f"one of {', '.join(kind.__name__ for kind in kinds)}")
        if value is not None:
            inner[type(value)](value, Frames(()), path)

    return check


def _decode_map(value: dict[Any, Any], item: Decoder, frames: Frames, path: Path) -> dict[str, Any]:
    made = {}
    for key, each in value.items():
        if type(key) is not str:
            raise _refusal(path, _MAP)
        made[key] = item(each, frames, (path, key))
    return made


def _check_plain_map(value: dict[Any, Any], path: Path) -> None:
    for key, each in value.items():
        if type(key) is not str:
            raise _refusal(path, _MAP)
        if type(each) not in LEAVES:
            _check_plain(each, (path, key))


def _check_plain(value: Any, path: Path, depth: int = 0) -> None:
    """Check a list or a map, which came out of an unpacker and belongs to nobody else."""
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            raise _refusal(path, _MAP)
        value = value.values()
    elif type(value) is not list:
        raise _refusal(path, "a plain value")
    if value and depth >= PLAIN_DEPTH_MAX:
        raise _refusal(path, f"nested {PLAIN_DEPTH_MAX} or fewer deep")
    if not LEAVES.issuperset(map(type, value)):
        for each in value:
            if type(each) not in LEAVES:
                _check_plain(each, path, depth + 1)


def _encode_tensor(ref: TensorRef, buffers: list[Buffer]) -> Any:
    tensors.check(ref)
    place = ref.place
    if isinstance(place, Shared):
        return [ref.dtype, ref.shape, [place.owner, place.segment, place.generation, place.offset]]
    buffers.append(place.buffer)
    return [ref.dtype, ref.shape, len(buffers) - 1]


def _decode_tensor(value: Any, frames: Frames, path: Path) -> TensorRef:
    if type(value) is not list or len(value) != 3:
        raise _refusal(path, "a tensor")
    dtype, shape, where = value
    if type(dtype) is not str or type(shape) is not list or not _INT.issuperset(map(type, shape)):
        raise _refusal(path, "a tensor")
    if type(where) is int:
        place = _new(Inline)
        _set_buffer(place, frames.take(where, path))
        ref: TensorRef = _new(TensorRef)
        _set_dtype(ref, dtype)
        _set_shape(ref, tuple(shape))
        _set_place(ref, place)
    elif type(where) is list and tuple(map(type, where)) == (str, str, int, int):
        ref = TensorRef(dtype, tuple(shape), Shared(*where))
    else:
        raise _refusal(path, "a tensor")
    tensors.check(ref)
    return ref


_INT = frozenset({int})
# As in `_record_decoding`: half of what the classes' own __init__ take.
_new: Callable[[Any], Any] = object.__new__
_set_buffer = vars(Inline)["buffer"].__set__
_set_dtype, _set_shape, _set_place = (vars(TensorRef)[name].__set__ for name in ("dtype", "shape", "place"))
_DECODING_NAMES: dict[str, Any] = {
    "INT_MIN": INT_MIN,
    "INT_MAX": INT_MAX,
    "LEAVES": LEAVES,
    "MAP": _MAP,
    "check_plain": _check_plain,
    "check_plain_map": _check_plain_map,
    "decode_map": _decode_map,
    "decode_tensor": _decode_tensor,
    "isfinite": math.isfinite,
    "number": _number,
    "refusal": _refusal,
}
