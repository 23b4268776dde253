"""Conversion between this project's values and JSON, by their types alone.

The state, the control socket, Spark's tasks and printed JSON use this one pair of functions, so a new field needs no
further code. A dataclass is an object, and a named tuple an array. Reading creates only types that the reader names,
whatever is in the JSON.

Unknown fields are ignored, and missing fields get their defaults, because the two sides may have different versions.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Set
from datetime import date
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

#: How a collection is made of its items, by what it is annotated as.
_COLLECTIONS: Mapping[Any, Callable[[list[Any]], Any]] = {
    list: list,
    collections.abc.Sequence: list,
    set: set,
    frozenset: frozenset,
}
#: Types that JSON has itself.
_PLAIN = (str, int, float, bool)

Reader = Callable[[Any], Any]


def pack(value: Any) -> Any:
    """Return the value as JSON has it.

    Bytes become hex; a mapping becomes an object where all its keys are strings, and a list of pairs where not.

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
    if isinstance(value, (list, tuple, Set)):
        return [pack(item) for item in value]
    kind: Any = type(value)
    if names := _names(kind):
        return {name: pack(getattr(value, name)) for name in names}
    if isinstance(value, (Path, date)):
        return str(value)
    raise TypeError(f"{kind.__name__} has no form in JSON")


def unpack(kind: Any, value: Any) -> Any:
    """Read what :func:`pack` made of a value.

    Args:
        kind: its type, as it would be annotated.
        value: what JSON has.

    Raises:
        ValueError, TypeError: it is no such value.
    """
    return _reader(kind)(value)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; none of other types."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


@cache
def _reader(kind: Any) -> Reader:
    """Return the function that reads values of a type."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return _as_it_is
    if origin is not None:
        return _generic_reader(kind, origin, typing.get_args(kind))
    if kind is types.NoneType or kind in _PLAIN:
        return lambda value: _checked(kind, value)
    if kind is bytes:
        return bytes.fromhex
    if issubclass(kind, (Enum, Path)):
        return typing.cast(Reader, kind)
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        items = [_reader(hints[name]) for name in kind._fields]
        return lambda value: kind(*(read(item) for read, item in zip(items, _checked(list, value), strict=False)))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        # A field that the class itself computes is written and not read.
        fields = [(field.name, _reader(hints[field.name])) for field in dataclasses.fields(kind) if field.init]
        return lambda value: _make(kind, fields, _checked(dict, value))
    return lambda _: _refuse(kind)


def _make(kind: Any, fields: list[tuple[str, Reader]], given: dict[str, Any]) -> Any:
    return kind(**{name: read(given[name]) for name, read in fields if name in given})


def _generic_reader(kind: Any, origin: Any, arguments: tuple[Any, ...]) -> Reader:
    if origin is Literal:
        return lambda value: value if value in arguments else _refuse_literal(value, arguments)
    if origin in (Union, types.UnionType):
        # Only ``X | None``: JSON does not tell other unions apart.
        wanted = [argument for argument in arguments if argument is not types.NoneType]
        if len(wanted) != 1:
            return lambda _: _refuse(kind)
        of_value = _reader(wanted[0])
        return lambda value: None if value is None else of_value(value)
    if origin is tuple and arguments[1:] != (...,):
        items = [_reader(argument) for argument in arguments]
        return lambda value: tuple(read(item) for read, item in zip(items, _checked(list, value), strict=True))
    if origin in (dict, collections.abc.Mapping, collections.Counter):
        return _mapping_reader(collections.Counter if origin is collections.Counter else dict, *arguments)
    make = tuple if origin is tuple else _COLLECTIONS.get(origin)
    if make is None:
        return lambda _: _refuse(kind)
    of_item = _reader(arguments[0])
    return lambda value: make([of_item(item) for item in _checked(list, value)])


def _mapping_reader(make: Callable[[dict[Any, Any]], Any], key_kind: Any, item_kind: Any = int) -> Reader:
    of_key, of_item = _reader(key_kind), _reader(item_kind)

    def read(value: Any) -> Any:
        pairs = value.items() if isinstance(value, dict) else _checked(list, value)
        return make({of_key(key): of_item(item) for key, item in pairs})

    return read


def _as_it_is(value: Any) -> Any:
    return value


def _checked(kind: type, value: Any) -> Any:
    """Return the value, if it is of that very type; a whole number will do for a float."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{type(value).__name__} where there should be {kind.__name__}")


def _refuse(kind: Any) -> Any:
    raise TypeError(f"{kind} has no form in JSON")


def _refuse_literal(value: Any, known: tuple[Any, ...]) -> Any:
    raise ValueError(f"{value!r} is not one of {known}")
