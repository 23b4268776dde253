"""The Thrift struct of a transaction.

Each transactional publish and poll contains this struct, and ten thousand invalid ids take 80 kB, so this module packs
it without a Thrift library. ``docs/reference/formats/tephra.md``, "A transaction in Thrift", has the layout;
``transaction.thrift`` next to this module is the complete interface of the transaction service, for Thrift's compilers.
"""

from __future__ import annotations

import struct
from array import array

from tms_core.errors import FormatError
from tms_core.transaction.codec.wire import Fields, Kind, i32, i64s, integer, read_struct
from tms_core.transaction.model import Transaction, TransactionType, VisibilityLevel, ascending

_IDS = struct.Struct(">bhqbhq")
_MIDDLE = struct.Struct(">bhqbhibhq")


def encode_transaction(transaction: Transaction) -> bytes:
    """Encode a transaction as Tephra's ``TransactionCodec``: the struct, without message or frame."""
    return b"".join((*transaction_fields(transaction), b"\0"))


def transaction_fields(transaction: Transaction) -> tuple[bytes, ...]:
    """Return the encoded fields of a transaction, for a struct."""
    return (
        _IDS.pack(Kind.I64, 1, transaction.transaction_id, Kind.I64, 2, transaction.read_pointer),
        i64s(3, transaction.invalids),
        i64s(4, transaction.in_progress),
        # Thrift counts types and levels from 1.
        _MIDDLE.pack(
            *(Kind.I64, 5, transaction.first_short_in_progress),
            *(Kind.I32, 6, transaction.type + 1),
            *(Kind.I64, 7, transaction.write_pointer),
        ),
        i64s(8, transaction.checkpoint_write_pointers),
        i32(9, transaction.visibility_level + 1),
    )


def decode_transaction(data: bytes) -> Transaction:
    """Decode a transaction by the rules of Tephra's ``TransactionConverterUtils``.

    A missing list is empty, a missing level is SNAPSHOT, and any type except SHORT is LONG. Lists are sorted, because
    visibility uses binary search.

    Raises:
        FormatError: the data is not a transaction.
    """
    return transaction_of(read_struct(data))


def transaction_of(fields: Fields) -> Transaction:
    """Return a transaction from its fields.

    Raises:
        FormatError: the fields are not a transaction's.
    """
    level = integer(fields, 9, 1)
    if level not in _LEVELS:
        raise FormatError(f"a transaction with visibility level {level}, which does not exist")
    return Transaction(
        read_pointer=integer(fields, 2),
        transaction_id=integer(fields, 1),
        write_pointer=integer(fields, 7, 0),
        invalids=_pointers(fields, 3),
        in_progress=_pointers(fields, 4),
        first_short_in_progress=integer(fields, 5, 0),
        type=TransactionType.SHORT if fields.get(6) == TransactionType.SHORT + 1 else TransactionType.LONG,
        checkpoint_write_pointers=_pointers(fields, 8),
        visibility_level=_LEVELS[level],
    )


_LEVELS = {level + 1: level for level in VisibilityLevel}


def _pointers(fields: Fields, number: int) -> array[int]:
    values = fields.get(number, array("q"))
    if not isinstance(values, array):
        raise FormatError(f"field {number} is not a list of numbers")
    return ascending(values)
