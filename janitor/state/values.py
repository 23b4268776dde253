"""Conversion between this project's values and JSON, based on their types.

The state, the control socket, Spark tasks and printed JSON use this pair of functions, so a new field needs no further
code. A dataclass becomes an object, and a named tuple an array. The state also stores dataclasses as arrays, which are
shorter. Reading creates only the types that the reader names, independent of the JSON.

Unknown fields are ignored, and missing fields get their defaults, because the two sides may have different versions.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import date
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Union

from tms_core.topic import TopicId

#: The constructor of a collection, by its annotation.
_COLLECTIONS: Mapping[Any, Callable[[list[Any]], Any]] = {
    list: list,
    collections.abc.Sequence: list,
    set: set,
    frozenset: frozenset,
}
#: The JSON names of a field ``topic`` with a topic id: namespace and name.
_NAMESPACE, _TOPIC = "tms_namespace", "topic"
#: Types that exist in JSON.
_PLAIN = (str, int, float, bool)

Convert = Callable[[Any], Any]


class Pointer(int):
    """A write pointer in a model; in JSON a decimal string, because many JSON tools would round the number."""


def pack(value: Any) -> Any:
    """Return the value as a JSON value.

    Bytes become hex; a mapping becomes an object if all its keys are strings, otherwise a list of pairs.

    Raises:
        TypeError: the value has a type without a JSON form.
    """
    kind: Any = type(value)
    return _writer(kind)(value)


def unpack(kind: Any, value: Any) -> Any:
    """Return the value that :func:`pack` has converted.

    Args:
        kind: the type of the value, as in an annotation.
        value: the JSON value.

    Raises:
        ValueError, TypeError: the JSON value does not have this type.
    """
    return _reader(kind)(value)


@cache
def _writer(kind: Any) -> Convert:
    """Return the function that packs values of a class."""
    if kind is Pointer:
        return str
    if kind is types.NoneType or issubclass(kind, _PLAIN):
        return _identity
    if issubclass(kind, bytes):
        return bytes.hex
    if issubclass(kind, Mapping):
        return _pack_mapping
    if issubclass(kind, (list, tuple, Set)):
        return lambda items: [pack(item) for item in items]
    if dataclasses.is_dataclass(kind):
        return partial(_pack_fields, tuple(field.name for field in dataclasses.fields(kind)))
    if issubclass(kind, (Path, date)):
        return str
    raise TypeError(f"{kind.__name__} has no form in JSON")


def _pack_mapping(value: Mapping[Any, Any]) -> Any:
    if all(isinstance(key, str) for key in value):
        return {str(key): pack(item) for key, item in value.items()}
    return [[pack(key), pack(item)] for key, item in value.items()]


def _pack_fields(names: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        item = getattr(value, name)
        # Fast path: a status has a hundred thousand fields, and nearly all are plain values.
        if item is None or type(item) in _PLAIN:
            found[name] = item
        elif type(item) is TopicId and name == _TOPIC:
            found[_NAMESPACE], found[name] = item.namespace, item.topic
        else:
            found[name] = pack(item)
    return found


@cache
def _reader(kind: Any) -> Convert:
    """Return the function that reads values of a type."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return _identity
    if origin is not None:
        return _generic_reader(kind, origin, typing.get_args(kind))
    if kind is types.NoneType or kind in _PLAIN:
        return lambda value: _require_type(kind, value)
    if kind is bytes:
        return bytes.fromhex
    if kind is Pointer:
        return lambda value: Pointer(_require_type(str, value))
    if issubclass(kind, (Enum, Path)):
        return typing.cast(Convert, kind)
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return _row_reader(kind, [_reader(hints[name]) for name in kind._fields])
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        # Skip fields that the class itself computes.
        fields = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind) if field.init}
        return partial(_make, kind, fields, _row_reader(typing.cast(Convert, kind), list(fields.values())))
    return lambda _: _refuse(kind)


def _make(kind: Any, fields: Mapping[str, Convert], of_row: Convert, value: Any) -> Any:
    if type(value) is list:
        return of_row(value)
    value = _require_type(dict, value)
    if _NAMESPACE in value and _NAMESPACE not in fields:
        value = {**value, _TOPIC: [value[_NAMESPACE], value.get(_TOPIC)]}
    return kind(**{name: read(value[name]) for name, read in fields.items() if name in value})


def _row_reader(make: Callable[..., Any], readers: Sequence[Convert]) -> Convert:
    """Return the function that reads a value from an array of its fields; trailing fields may be missing."""
    return lambda row: make(*(read(item) for read, item in zip(readers, _require_type(list, row), strict=False)))


def _generic_reader(kind: Any, origin: Any, arguments: tuple[Any, ...]) -> Convert:
    if origin is Literal:
        return lambda value: value if value in arguments else _refuse_literal(value, arguments)
    if origin in (Union, types.UnionType):
        # Only ``X | None`` is supported: JSON cannot distinguish the types of other unions.
        members = [argument for argument in arguments if argument is not types.NoneType]
        if len(members) != 1:
            return lambda _: _refuse(kind)
        of_value = _reader(members[0])
        return lambda value: None if value is None else of_value(value)
    if origin is tuple and arguments[1:] != (...,):
        items = [_reader(argument) for argument in arguments]
        return lambda value: tuple(read(item) for read, item in zip(items, _require_type(list, value), strict=True))
    if origin in (dict, collections.abc.Mapping, collections.Counter):
        return _mapping_reader(collections.Counter if origin is collections.Counter else dict, *arguments)
    make = tuple if origin is tuple else _COLLECTIONS.get(origin)
    if make is None:
        return lambda _: _refuse(kind)
    of_item = _reader(arguments[0])
    return lambda value: make([of_item(item) for item in _require_type(list, value)])


def _mapping_reader(make: Callable[[dict[Any, Any]], Any], key_kind: Any, item_kind: Any = int) -> Convert:
    of_key, of_item = _reader(key_kind), _reader(item_kind)

    def read(value: Any) -> Any:
        pairs = value.items() if isinstance(value, dict) else _require_type(list, value)
        return make({of_key(key): of_item(item) for key, item in pairs})

    return read


def _identity(value: Any) -> Any:
    return value


def _require_type(kind: type, value: Any) -> Any:
    """Return the value if it has exactly this type; an int also counts as a float."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{kind.__name__} expected, not {type(value).__name__}")


def _refuse(kind: Any) -> Any:
    raise TypeError(f"{kind} has no form in JSON")


def _refuse_literal(value: Any, known: tuple[Any, ...]) -> Any:
    raise ValueError(f"{value!r} is not one of {known}")
