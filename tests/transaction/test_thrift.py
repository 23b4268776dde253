"""Transactions in Thrift: Tephra's bytes, thriftpy2's bytes, and invalid bytes."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.transport.buffered import TCyBufferedTransport

from tests.transaction.raw_client import load_interface
from tests.transaction.vectors import load, transaction_of
from tms_core.errors import FormatError
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.thrift import decode_transaction, encode_transaction
from tms_core.transaction.codec.wire import Kind, MessageKind, read_message, read_struct
from tms_core.transaction.model import Transaction, TransactionType, VisibilityLevel

FRAMES = load("thrift/frames.json")
I64 = st.integers(-(2**63), 2**63 - 1)
POINTERS = st.lists(I64, max_size=20, unique=True).map(sorted)


class _Bytes:
    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def read(self, size: int) -> bytes:
        found, self.data = self.data[:size], self.data[size:]
        return found

    def write(self, data: bytes) -> None:
        self.data += data

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


def witness_writes(struct: Any) -> bytes:
    out = _Bytes()
    protocol = TCyBinaryProtocol(TCyBufferedTransport(out))
    protocol.write_struct(struct)
    protocol.trans.flush()
    return out.data


def witness_reads(data: bytes) -> Any:
    found = load_interface().TTransaction()
    TCyBinaryProtocol(TCyBufferedTransport(_Bytes(data))).read_struct(found)
    return found


@pytest.mark.parametrize("vector", load("thrift/ttransaction.json"))
def test_transaction_of_tephra_is_encoded_and_decoded_alike(vector: dict[str, Any]) -> None:
    assert encode_transaction(transaction_of(vector)).hex() == vector["hex"]
    assert decode_transaction(bytes.fromhex(vector["hex"])) == transaction_of(vector)


@given(
    numbers=st.tuples(I64, I64, I64, I64),
    invalids=POINTERS,
    in_progress=POINTERS,
    checkpoints=POINTERS,
    kind=st.sampled_from(TransactionType),
    level=st.sampled_from(VisibilityLevel),
)
def test_any_transaction_is_encoded_as_by_thriftpy2(
    numbers: tuple[int, int, int, int],
    invalids: list[int],
    in_progress: list[int],
    checkpoints: list[int],
    kind: TransactionType,
    level: VisibilityLevel,
) -> None:
    read, transaction_id, write, first_short = numbers
    one = Transaction(read, transaction_id, write, invalids, in_progress, first_short, kind, checkpoints, level)
    data = encode_transaction(one)
    seen = witness_reads(data)
    assert (seen.readPointer, seen.transactionId, seen.writePointer, seen.firstShort) == numbers
    assert (seen.invalids, seen.inProgress, seen.checkpointWritePointers) == (invalids, in_progress, checkpoints)
    assert (seen.type, seen.visibilityLevel) == (kind + 1, level + 1)
    assert witness_writes(seen) == data
    assert encode_transaction(decode_transaction(data)) == data


def test_missing_fields_have_the_defaults_of_java() -> None:
    found = decode_transaction(wire.i64(1, 5) + wire.i64(2, 3) + b"\0")
    none = array("q")
    assert found == Transaction(3, 5, 0, none, none, 0, TransactionType.LONG, none, VisibilityLevel.SNAPSHOT)


@pytest.mark.parametrize(("number", "kind"), [(1, "SHORT"), (2, "LONG"), (0, "LONG"), (3, "LONG"), (-1, "LONG")])
def test_every_type_but_short_is_long(number: int, kind: str) -> None:
    data = b"".join((wire.i64(1, 5), wire.i64(2, 3), wire.i32(6, number), b"\0"))
    assert decode_transaction(data).type is TransactionType[kind]


def test_unordered_lists_are_sorted() -> None:
    data = b"".join((wire.i64(1, 5), wire.i64(2, 3), wire.i64s(3, [9, 1, 9, 4]), b"\0"))
    assert list(decode_transaction(data).invalids) == [1, 4, 9]


def test_fields_of_a_later_version_are_skipped() -> None:
    known = wire.i64(1, 5) + wire.i64(2, 3)
    strings = wire.strings(20, ["a", "b"])
    structs = bytes([Kind.LIST, 0, 21, Kind.STRUCT, 0, 0, 0, 2]) + wire.i64(1, 7) + b"\0" + b"\0"
    mapping = bytes([Kind.MAP, 0, 22, Kind.STRING, Kind.LIST, 0, 0, 0, 1]) + b"\0\0\0\1k" + bytes([3, 0, 0, 0, 2, 7, 7])
    sets = bytes([Kind.SET, 0, 23, Kind.SET, 0, 0, 0, 1, Kind.I16, 0, 0, 0, 1, 0, 7])
    rest = bytes([Kind.DOUBLE, 0, 24]) + bytes(8) + bytes([Kind.BYTE, 0, 25, 7, Kind.I16, 0, 26, 0, 7])
    nested = bytes([Kind.LIST, 0, 27, Kind.BOOL, 0, 0, 0, 3, 1, 0, 1]) + bytes(
        [Kind.LIST, 0, 28, Kind.DOUBLE, 0, 0, 0, 0]
    )
    text = bytes([Kind.LIST, 0, 29, Kind.LIST, 0, 0, 0, 1, Kind.STRING, 0, 0, 0, 1, 0, 0, 0, 1, 7])
    data = b"".join((known, strings, structs, mapping, sets, rest, nested, text, wire.boolean(30, value=True), b"\0"))
    assert decode_transaction(data).transaction_id == 5
    assert read_struct(data) == {1: 5, 2: 3, 20: [b"a", b"b"], 30: True}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes "),
        (b"\0", "field . is not a number"),
        (wire.i64(1, 5) + b"\0", "field 2 is not a number"),
        (wire.string(1, "5") + wire.i64(2, 3) + b"\0", "field 1 is not a number"),
        (wire.i64(1, 5) + wire.i64(2, 3) + wire.i64(3, 7) + b"\0", "field 3 .*list"),
        (wire.i64(1, 5) + wire.i64(2, 3) + wire.i32(9, 4) + b"\0", "level 4"),
        (wire.i64(1, 5) + wire.i64(2, 3) + wire.i64s(9, []) + b"\0", "field 9 is not a number"),
        (wire.i64(1, 5)[:-1], " bytes end"),
        (bytes([Kind.LIST, 0, 3, Kind.I64]) + b"\x7f\xff\xff\xff", "17179869176, .* 0 bytes"),
        (bytes([Kind.LIST, 0, 3, Kind.I64]) + b"\xff\xff\xff\xff", "a list of -1"),
        (bytes([Kind.STRING, 0, 3]) + b"\xff\xff\xff\xff", "length of -1"),
        (bytes([Kind.LIST, 0, 3, Kind.BOOL]) + b"\x7f\xff\xff\xff\1", "2147483647, .* 1 bytes"),
        (bytes([1, 0, 3]), "kind 1"),
        (bytes([Kind.LIST, 0, 3, 0, 0, 0, 0, 1]), "kind 0"),
        (bytes([Kind.STRUCT, 0, 1]) * 40, "more than 16 levels"),
        (bytes([Kind.LIST, 0, 1, *([Kind.LIST, 0, 0, 0, 1] * 40)]), "more than 16 levels"),
        (bytes([Kind.LIST, 0, 1, Kind.MAP, 0, 0, 0, 1, *([Kind.MAP, 2, 0, 0, 0, 1] * 40)]), "more than 16 levels"),
    ],
)
def test_invalid_transaction_is_a_format_error(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_transaction(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\0".join([b"", *[bytes([Kind.BOOL, 0, 9])] * 100_001]) + b"\0\0",
        bytes([Kind.LIST, 0, 9, Kind.STRUCT]) + (100_001).to_bytes(4) + bytes(100_002),
        bytes([Kind.LIST, 0, 9, Kind.LIST]) + (100_001).to_bytes(4) + bytes([Kind.BOOL, 0, 0, 0, 0]) * 100_001 + b"\0",
        bytes([Kind.MAP, 0, 9, Kind.BOOL, Kind.BOOL]) + (50_001).to_bytes(4) + bytes(100_003),
    ],
    ids=["fields", "structs", "lists", "maps"],
)
def test_struct_with_too_many_values_is_rejected(data: bytes) -> None:
    with pytest.raises(FormatError, match="more than 100000 values"):
        read_struct(data.removeprefix(b"\0"))


@pytest.mark.parametrize(("kind", "size"), [(Kind.BOOL, 1), (Kind.DOUBLE, 8)])
def test_skipped_list_counts_as_one_value(kind: Kind, size: int) -> None:
    data = bytes([Kind.LIST, 0, 9, kind]) + (1_000_000).to_bytes(4) + bytes(1_000_000 * size)
    assert read_struct(data + bytes([Kind.I32, 0, 1, 0, 0, 0, 5, 0])) == {1: 5}
    with pytest.raises(FormatError, match=f"{1_000_000 * size}.* {1_000_000 * size - 1} "):
        read_struct(data[:-1])


@given(st.binary(max_size=300))
@example(b"\x0f\x00\x03\x0c\x7f\xff\xff\xff" + bytes(200))
def test_any_bytes_are_a_transaction_or_a_format_error(data: bytes) -> None:
    with suppress(FormatError):
        assert decode_transaction(data).visibility_level in VisibilityLevel


@given(st.data())
def test_changed_byte_gives_a_transaction_or_a_format_error(data: st.DataObject) -> None:
    vector = bytearray.fromhex(load("thrift/ttransaction.json")[0]["hex"])
    vector[data.draw(st.integers(0, len(vector) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FormatError):
        assert decode_transaction(bytes(vector)).visibility_level in VisibilityLevel


def test_transaction_cut_at_any_byte_is_a_format_error() -> None:
    data = bytes.fromhex(load("thrift/ttransaction.json")[0]["hex"])
    for size in range(len(data)):
        with pytest.raises(FormatError):
            decode_transaction(data[:size])


@pytest.mark.parametrize("vector", FRAMES, ids=lambda vector: f"{vector['direction']} {vector['call']}")
def test_frame_of_tephra_contains_one_message(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame_hex"])
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    found = read_message(frame[4:])
    assert vector["call"].startswith(found.name)
    assert found.kind == (MessageKind.CALL if vector["direction"] == "request" else MessageKind.REPLY)


def test_messages_have_the_bytes_of_tephra() -> None:
    frames = {(vector["direction"], vector["call"]): bytes.fromhex(vector["frame_hex"])[4:] for vector in FRAMES}
    call, reply = MessageKind.CALL, MessageKind.REPLY
    pointer = 1600000000000000002
    made = {
        ("request", "startShort"): wire.message(call, "startShort", 0),
        ("request", 'startShortWithClientIdAndTimeOut("me",30)'): wire.message(
            call, "startShortWithClientIdAndTimeOut", 0, wire.string(1, "me"), wire.i32(2, 30)
        ),
        ("request", f'canCommitOrThrow({pointer},{{"k1"}})'): wire.message(
            call, "canCommitOrThrow", 0, wire.i64(1, pointer), wire.strings(2, [b"k1"], Kind.SET)
        ),
        ("request", f"commitOrThrow({pointer},{pointer})"): wire.message(
            call, "commitOrThrow", 0, wire.i64(1, pointer), wire.i64(2, pointer)
        ),
        ("request", "truncateInvalidTx({7})"): wire.message(call, "truncateInvalidTx", 0, wire.i64s(1, [7], Kind.SET)),
        ("reply", 'status -> "OK"'): wire.message(reply, "status", 0, wire.string(0, "OK")),
        ("reply", "invalidateTx(5) -> false"): wire.message(reply, "invalidateTx", 0, wire.boolean(0, value=False)),
        ("reply", "resetState -> void"): wire.message(reply, "resetState", 0),
        ("reply", "truncateInvalidTx({7}) -> TBoolean(false)"): wire.message(
            reply, "truncateInvalidTx", 0, wire.structure(0, wire.boolean(1, value=False))
        ),
        ("reply", "commitOrThrow -> conflict(k1, me)"): wire.message(
            reply,
            "commitOrThrow",
            0,
            wire.structure(2, wire.i64(1, pointer), wire.string(2, "k1"), wire.string(3, "me")),
        ),
    }
    assert {name: data.hex() for name, data in made.items()} == {name: frames[name].hex() for name in made}


def test_message_without_a_version_is_read() -> None:
    old = b"\0\0\0\6status" + bytes([MessageKind.CALL]) + b"\0\0\0\7" + b"\0"
    assert read_message(old) == (MessageKind.CALL, "status", 7, {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02\0\1\0\0\0\0\0\0\0\0\0", "version 80020001"),
        (b"\x80\1\0\1\0\0\0\1\xff\0\0\0\0\0", "not text"),
        (b"\x80\1\0\1\x7f\0\0\1", str(0x7F000001)),
        (b"GET / HTTP/1.1\r\n\r\n", str(int.from_bytes(b"GET "))),
    ],
)
def test_invalid_message_is_a_format_error(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_message(data)
