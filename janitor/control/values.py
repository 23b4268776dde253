"""Conversion between this project's values and JSON, by their types alone.

The results of an engine consist of a few kinds: dataclasses and named tuples, enums, bytes, numbers, and collections of
these. One pair of functions converts all of them exactly, and a new result needs no further code. Only types that the
reader names are created, whatever the other side sends.

Unknown fields are ignored, and missing fields get their defaults, because the two sides may have different versions.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

from tms_core import errors
from tms_core.errors import StoreError, TmsError

#: No question and no line of an answer may be longer, in bytes: a plan of a million ranges is about half of that.
MAX_BYTES = 256 << 20
#: Every error that an answer can raise; a janitor manages no transactions.
KINDS: Mapping[str, type[TmsError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TmsError) and not issubclass(kind, errors.TransactionError)
}
#: How a collection is made of its items, by what it is annotated as.
_COLLECTIONS: Mapping[Any, Callable[[list[Any]], Any]] = {
    list: list,
    collections.abc.Sequence: list,
    set: set,
    frozenset: frozenset,
}
#: Types that JSON has itself.
_PLAIN = (str, int, float, bool)


def pack(value: Any) -> Any:
    """Return the value as JSON has it.

    Bytes become hex, a dataclass or a named tuple an object; a mapping becomes an object where all its keys are
    strings, and a list of pairs where not.

    Raises:
        TypeError: a value of another kind.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {str(key): pack(item) for key, item in value.items()}
        return [[pack(key), pack(item)] for key, item in value.items()]
    kind: Any = type(value)
    if hints := _fields(kind):
        return {name: pack(getattr(value, name)) for name in hints}
    if isinstance(value, (list, tuple, Set)):
        return [pack(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form on the wire")


def unpack(kind: Any, value: Any) -> Any:
    """Read what :func:`pack` made of a value.

    Args:
        kind: its type, as it would be annotated.
        value: what JSON has.

    Raises:
        ValueError, TypeError: it is no such value.
    """
    if kind is Any:
        return value
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is not None:
        return _unpack_generic(kind, origin, arguments, value)
    if kind is types.NoneType or kind in _PLAIN:
        return _checked(kind, value)
    if kind is bytes:
        return bytes.fromhex(value)
    if issubclass(kind, (Enum, Path)):
        return kind(value)
    given = _checked(dict, value)
    return kind(**{name: unpack(hint, given[name]) for name, hint in _fields(kind).items() if name in given})


def _unpack_generic(kind: Any, origin: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    if origin in (Union, types.UnionType):
        return _unpack_union(kind, arguments, value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {arguments}")
        return value
    if origin is tuple:
        items = _checked(list, value)
        kinds = [arguments[0]] * len(items) if arguments[1:] == (...,) else arguments
        return tuple(unpack(item_kind, item) for item_kind, item in zip(kinds, items, strict=True))
    if origin in (dict, collections.abc.Mapping, collections.Counter):
        pairs = value.items() if isinstance(value, dict) else _checked(list, value)
        kinds = (*arguments, int)
        found = {unpack(kinds[0], key): unpack(kinds[1], item) for key, item in pairs}
        return collections.Counter(found) if origin is collections.Counter else found
    if origin in _COLLECTIONS:
        return _COLLECTIONS[origin]([unpack(arguments[0], item) for item in _checked(list, value)])
    raise TypeError(f"{kind} has no form on the wire")


def _unpack_union(kind: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    """Only ``X | None``: JSON does not tell other unions apart."""
    wanted = [argument for argument in arguments if argument is not types.NoneType]
    if len(wanted) != 1:
        raise TypeError(f"{kind} has no form on the wire")
    return None if value is None else unpack(wanted[0], value)


def _checked(kind: type, value: Any) -> Any:
    """Return the value, if it is of that very type; a whole number will do for a float."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{type(value).__name__} where there should be {kind.__name__}")


@cache
def _fields(kind: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass or a named tuple, and their types; none of other types."""
    if not dataclasses.is_dataclass(kind) and not hasattr(kind, "_fields"):
        return {}
    hints = typing.get_type_hints(kind)
    names = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind)]
    return {name: hints[name] for name in names}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return one line.

    Raises:
        StoreError: it is longer than the other side takes.
    """
    line = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_BYTES:
        raise StoreError(
            f"{len(line) >> 20} MB are too much to be handed from one process to the other ({MAX_BYTES >> 20} MB).",
            "Ask for fewer topics at once (--topic), or stop the janitor that holds the store meanwhile.",
        )
    return line


def lines(pieces: Iterable[bytes], max_bytes: int = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the messages in the pieces of a response, without a truncated last one.

    Raises:
        ValueError: a line is not a message, or too long.
    """
    pending = bytearray()
    for piece in pieces:
        searched = len(pending)
        pending += piece
        while (end := pending.find(b"\n", searched)) >= 0:
            message = json.loads(pending[:end])
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")
            yield message
            del pending[: end + 1]
            searched = 0
        if len(pending) > max_bytes:
            raise ValueError(f"a line of more than {max_bytes} bytes")


def pack_error(error: TmsError) -> dict[str, str]:
    """Return an error as JSON values."""
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def encode_error(error: TmsError) -> bytes:
    """Return an error as the last line of an answer."""
    return encode({"error": pack_error(error)})


def read_error(found: Any) -> TmsError:
    """Return the error that the other side raised; for an unknown kind, the root of all errors."""
    given = found if isinstance(found, dict) else {}
    kind = KINDS.get(str(given.get("kind")), TmsError)
    return kind(str(given.get("message", "no reason was given")), str(given.get("hint", "")))
