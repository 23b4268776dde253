"""The part of Thrift's binary protocol that Tephra's transaction service needs.

Thrift messages are self-describing. A struct is decoded into a dictionary by field number, and a caller reads a field
by number and kind, which is enough for two dozen methods. Lists of ids, which may be long, are decoded into arrays. Any
client may send frames, so every size is checked against the available bytes before memory is allocated, and unused
values are skipped.

The tests compare this module with thriftpy2 and the interface in ``transaction.thrift``.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from tms_core.errors import FormatError

#: The fields of a struct, by number.
Fields = dict[int, Any]

#: The deepest nesting of structs and lists; the interface needs three levels.
_MAX_DEPTH = 16
#: The largest number of fields and unused values in a message, because each takes time.
_MAX_VALUES = 100_000
#: The largest number of strings in all lists of a message. Each needs about 150 bytes in addition to its own.
MAX_STRINGS = 250_000
#: The first bytes of a message with a version; older writers start with the length of the name.
_VERSION_1 = 0x80010000
_VERSION_MASK = 0xFFFF0000

_BYTE = struct.Struct(">b")
_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")
_FIELD = struct.Struct(">bh")
_LIST_FIELD = struct.Struct(">bhbi")
_STOP = b"\0"


class Kind(IntEnum):
    """The type of a value, with the numbers of the protocol."""

    STOP = 0
    BOOL = 2
    BYTE = 3
    DOUBLE = 4
    I16 = 6
    I32 = 8
    I64 = 10
    STRING = 11
    STRUCT = 12
    MAP = 13
    SET = 14
    LIST = 15


class MessageKind(IntEnum):
    """The type of a message, with the numbers of the protocol."""

    CALL = 1
    REPLY = 2
    EXCEPTION = 3
    ONE_WAY = 4


class Failure(IntEnum):
    """The kinds of Thrift's application exception, with which a service responds if a method has no result."""

    UNKNOWN_METHOD = 1
    INTERNAL_ERROR = 6
    PROTOCOL_ERROR = 7


class TooManyStrings(FormatError):
    """A message has more than :data:`MAX_STRINGS` strings in its lists; the remaining strings were not read.

    Attributes:
        request: the message without its fields.
    """

    request: RpcMessage


class RpcMessage(NamedTuple):
    """A call or a response.

    Attributes:
        number: the number of the call, which its response repeats.
        fields: the arguments, or the result: field 0 is the return value, other fields are declared exceptions.
    """

    kind: int
    name: str
    number: int
    fields: Fields


# --- writing ---------------------------------------------------------------------------------------------------------


def message(kind: MessageKind, name: str, number: int, *fields: bytes) -> bytes:
    """Encode a message without its frame; the functions below encode ``fields``."""
    encoded = name.encode()
    head = struct.pack(">Ii", _VERSION_1 | kind, len(encoded)) + encoded
    return b"".join((head, _INT.pack(number), *fields, _STOP))


def boolean(number: int, value: bool) -> bytes:
    """Encode a boolean field."""
    return _FIELD.pack(Kind.BOOL, number) + (b"\1" if value else b"\0")


def i32(number: int, value: int) -> bytes:
    """Encode a field of 32 bits."""
    return _FIELD.pack(Kind.I32, number) + _INT.pack(value)


def i64(number: int, value: int) -> bytes:
    """Encode a field of 64 bits."""
    return _FIELD.pack(Kind.I64, number) + _LONG.pack(value)


def string(number: int, value: str | bytes) -> bytes:
    """Encode a field of text or bytes, which have the same encoding."""
    encoded = value.encode() if isinstance(value, str) else value
    return b"".join((_FIELD.pack(Kind.STRING, number), _INT.pack(len(encoded)), encoded))


def structure(number: int, *fields: bytes) -> bytes:
    """Encode a field with a struct."""
    return b"".join((_FIELD.pack(Kind.STRUCT, number), *fields, _STOP))


def i64s(number: int, values: Sequence[int], kind: Kind = Kind.LIST) -> bytes:
    """Encode a field with a list or a set of 64-bit numbers."""
    return _LIST_FIELD.pack(kind, number, Kind.I64, len(values)) + _encode_longs(values)


def strings(number: int, values: Collection[str] | Collection[bytes], kind: Kind = Kind.LIST) -> bytes:
    """Encode a field with a list or a set of texts or byte strings."""
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    parts = [part for value in encoded for part in (_INT.pack(len(value)), value)]
    return b"".join((_LIST_FIELD.pack(kind, number, Kind.STRING, len(encoded)), *parts))


# --- reading ---------------------------------------------------------------------------------------------------------


def read_message(data: bytes) -> RpcMessage:
    """Decode the message in a frame.

    Raises:
        TooManyStrings: the message has more than :data:`MAX_STRINGS` strings in lists.
        FormatError: the bytes are not a message.
    """
    reader = _FieldReader(data)
    kind, name, number = _read_head(reader)
    try:
        return RpcMessage(kind, name, number, reader.fields())
    except TooManyStrings as error:
        error.request = RpcMessage(kind, name, number, {})
        raise


def read_head(data: bytes) -> RpcMessage:
    """Decode the head of the message in a frame; the result has no fields.

    Raises:
        FormatError: the bytes are not a message.
    """
    return RpcMessage(*_read_head(_FieldReader(data)), {})


def _read_head(reader: _FieldReader) -> tuple[int, str, int]:
    first: int = reader.number(_INT)
    if first < 0:
        if first & _VERSION_MASK != _VERSION_1:
            raise FormatError(f"a message of version {first & 0xFFFFFFFF:08x}, not {_VERSION_1:08x}")
        kind, name = first & 0xFF, reader.text(reader.number(_INT))
    else:
        name, kind = reader.text(first), reader.number(_BYTE)
    return kind, name, reader.number(_INT)


def read_struct(data: bytes) -> Fields:
    """Decode the fields of a struct; ignore bytes after it, as Thrift does.

    Raises:
        FormatError: the bytes are not a struct.
    """
    return _FieldReader(data).fields()


def integer(fields: Fields, number: int, default: int | None = None) -> int:
    """Return a field that is a number.

    Raises:
        FormatError: the field is missing without a default, or is not a number.
    """
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise FormatError(f"field {number} is not a number")
    return value


class _FieldReader:
    """A reader of the bytes of a complete message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._remaining_values = _MAX_VALUES
        self._remaining_strings = MAX_STRINGS

    def number(self, layout: struct.Struct) -> int:
        """Return one number."""
        try:
            value: int = layout.unpack_from(self._data, self._at)[0]
        except struct.error as error:
            raise FormatError(f"the {len(self._data)} bytes end inside a value") from error
        self._at += layout.size
        return value

    def fields(self, depth: int = 0) -> Fields:
        """Return the fields of a struct; fields of unsupported kinds are omitted."""
        found: Fields = {}
        while kind := self.number(_BYTE):
            number = self.number(_SHORT)
            value = self._value(kind, depth + 1)
            if value is not None:
                found[number] = value
        return found

    def text(self, size: int) -> str:
        """Return the next ``size`` bytes as text."""
        try:
            return self._read_bytes(size).decode()
        except UnicodeDecodeError as error:
            raise FormatError("a name that is not text") from error

    def _read_bytes(self, size: int) -> bytes:
        start = self._at
        self._skip_bytes(size)
        return self._data[start : self._at]

    def _skip_bytes(self, size: int) -> None:
        if size < 0 or size > len(self._data) - self._at:
            raise FormatError(f"a length of {size}, but only {len(self._data) - self._at} bytes remain")
        self._at += size

    def _count_value(self) -> None:
        if not self._remaining_values:
            raise FormatError(f"more than {_MAX_VALUES} values")
        self._remaining_values -= 1

    def _value(self, kind: int, depth: int) -> Any:
        """Return one value; None for a skipped value."""
        self._count_value()
        match kind:
            case Kind.I64:
                return self.number(_LONG)
            case Kind.I32:
                return self.number(_INT)
            case Kind.STRING:
                return self._read_bytes(self.number(_INT))
            case Kind.BOOL:
                return self.number(_BYTE) != 0
            case Kind.STRUCT:
                return self.fields(self._check_depth(depth))
            case Kind.LIST | Kind.SET:
                return self._list(self._check_depth(depth))
        return self._skip(kind, depth)

    def _list(self, depth: int) -> array[int] | list[bytes] | None:
        kind, count = self.number(_BYTE), self.number(_INT)
        if count < 0:
            raise FormatError(f"a list of {count}")
        if kind == Kind.I64:
            return _decode_longs(self._read_bytes(count * _LONG.size))
        if kind == Kind.STRING:
            if count > self._remaining_strings:
                raise TooManyStrings(f"a list of {count} strings, but at most {self._remaining_strings} are allowed")
            self._remaining_strings -= count
            return [self._read_bytes(self.number(_INT)) for _ in range(count)]
        self._skip_all(kind, count, depth)
        return None

    def _skip_all(self, kind: int, count: int, depth: int) -> None:
        """Skip the values of a list."""
        if kind in _FIXED_BYTES:
            self._skip_bytes(count * _FIXED_BYTES[kind])
            return
        for _ in range(count):
            self._skip(kind, depth)

    def _skip(self, kind: int, depth: int) -> None:
        """Skip one value."""
        self._count_value()
        if kind in _FIXED_BYTES:
            self._skip_bytes(_FIXED_BYTES[kind])
        elif kind == Kind.STRING:
            self._skip_bytes(self.number(_INT))
        elif kind == Kind.STRUCT:
            while inner := self.number(_BYTE):
                self.number(_SHORT)
                self._skip(inner, self._check_depth(depth + 1))
        elif kind in (Kind.LIST, Kind.SET):
            inner, count = self.number(_BYTE), self.number(_INT)
            self._skip_all(inner, count, self._check_depth(depth + 1))
        elif kind == Kind.MAP:
            key_kind, value_kind = self.number(_BYTE), self.number(_BYTE)
            for _ in range(self.number(_INT)):
                self._skip(key_kind, self._check_depth(depth + 1))
                self._skip(value_kind, depth + 1)
        else:
            raise FormatError(f"a value of kind {kind}, which does not exist")

    @staticmethod
    def _check_depth(depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise FormatError(f"structs and lists in more than {_MAX_DEPTH} levels")
        return depth


_FIXED_BYTES: dict[int, int] = {Kind.BOOL: 1, Kind.BYTE: 1, Kind.I16: 2, Kind.I32: 4, Kind.I64: 8, Kind.DOUBLE: 8}


def _encode_longs(values: Sequence[int]) -> bytes:
    numbers = array("q", values)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def _decode_longs(data: bytes) -> array[int]:
    numbers = array("q")
    numbers.frombytes(data)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
