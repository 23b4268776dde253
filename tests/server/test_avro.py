"""CDAP's Avro encoding: worked examples byte for byte, round trips, and rejections."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kit.avro import block, decoded, long
from tms_core.errors import BadRequest
from tms_core.messaging.model import FetchedMessage, FetchRequest, MessageList, RollbackRange, SharedList
from tms_core.rowkey import MessageId
from tms_core.server.codec.avro import AvroCodec
from tms_core.topic import INT_MAX
from tms_core.transaction.codec.thrift import decode_transaction, encode_transaction
from tms_core.transaction.model import Transaction

AVRO = AvroCodec()
T, W = 1_500_000_000_000, 1_500_000_000_000_000_007
WRITE_POINTER = "00 8e 80 b0 b1 af 83 89 d1 29"
ID = MessageId(T, 0)
#: The transaction of the worked example: its own pointer, the read pointer one less, nothing else.
TRANSACTION = Transaction(W - 1, W, W)
TRANSACTION_HEX = (
    "0a000114d1120d7b1600070a000214d1120d7b1600060f00030a000000000f00040a000000000a00057fffffffffffffff08000600000001"
    "0a000714d1120d7b1600070f00080a000000000800090000000100"
)

LONGS = st.integers(-(2**63), 2**63 - 1)
INTS = st.integers(-(2**31), 2**31 - 1)


# --- worked examples -------------------------------------------------------------------------------------------------


def test_avro_poll_is_decoded() -> None:
    assert AVRO.read_poll(bytes.fromhex("04 01 02 02")) == FetchRequest(None, True, INT_MAX)
    assert AVRO.read_poll(b"\x02" + long(T) + bytes.fromhex("00 00 14 02")) == FetchRequest(T, False, 10)


def test_avro_poll_in_a_transaction_is_cdaps_example() -> None:
    data = bytes.fromhex(TRANSACTION_HEX)
    assert data == encode_transaction(TRANSACTION)
    found = AVRO.read_poll(b"\x04\x01\x02\x00" + long(len(data)) + data).transaction
    assert found is not None
    assert encode_transaction(found) == data


# --- round trips -----------------------------------------------------------------------------------------------------


@given(st.none() | LONGS, st.lists(st.tuples(st.lists(st.binary(max_size=300), min_size=1), st.booleans()), max_size=4))
@example(None, [([b"x" * length for length in (0, 63, 64, 8191, 8192, 20_000)], False)])
def test_avro_publish_of_any_blocks_is_complete(pointer: int | None, blocks: list[tuple[list[bytes], bool]]) -> None:
    head = b"\x02" if pointer is None else b"\x00" + long(pointer)
    body = head + b"".join(block(items, sized=sized) for items, sized in blocks) + b"\0"
    assert AVRO.read_publish(body) == (pointer, [item for items, _ in blocks for item in items], None)


@given(LONGS, LONGS, INTS, LONGS, INTS)
def test_avro_range_is_read_as_written(
    pointer: int, start_ms: int, start_sequence: int, end_ms: int, end_sequence: int
) -> None:
    written = RollbackRange(pointer, start_ms, start_sequence, end_ms, end_sequence)
    assert AVRO.write_published(written) == b"\0" + b"".join(map(long, written))
    assert AVRO.read_rollback(AVRO.write_published(written)) == written


@given(st.lists(st.lists(st.binary(max_size=9000), max_size=30), max_size=4))
def test_avro_messages_are_decoded_in_order(payloads: list[list[bytes]]) -> None:
    pages = [
        [FetchedMessage(MessageId(T, number).pack(), payload) for number, payload in enumerate(page)]
        for page in payloads
    ]
    expected = [message for page in pages for message in page]
    assert decoded(b"".join(AVRO.write_messages(pages))) == expected


def block_sizes(*pages: Sequence[FetchedMessage]) -> list[int]:
    """Return the number of messages in each written piece."""
    return [len(decoded(piece.removesuffix(b"\0") + b"\0")) for piece in AVRO.write_messages(pages)]


def test_avro_messages_are_written_in_blocks_of_60000_bytes() -> None:
    # id, payload and 8 make 1,000 bytes a message, so 60 of them close a block
    message, large = (FetchedMessage(ID.pack(), b"x" * size) for size in (972, 100_000))
    pages = [[message] * 100, [], [message] * 30]
    assert block_sizes(*pages) == [60, 0, 60, 10]
    assert len(decoded(b"".join(AVRO.write_messages(pages)))) == 130
    assert block_sizes([message, large, large, message]) == [2, 1, 1]


def test_avro_shared_messages_are_encoded_once_in_blocks_of_60000_bytes() -> None:
    shared = SharedList(MessageList([ID.pack()] * 25, [b"x" * 979] * 25))
    assert block_sizes(shared, shared, shared) == [50, 25]
    encoded = shared.encoded
    assert block_sizes(shared) == [25]
    assert shared.encoded is encoded


# --- rejections ------------------------------------------------------------------------------------------------------

PUBLISH = bytes.fromhex(f"{WRITE_POINTER} 04 02 61 04 62 63 00")
ROLLBACK = AVRO.write_published(RollbackRange(W, T, 0, T, 1))
POLL = b"\x00\x28" + ID.pack() + b"\x01\x00\x14\x00" + long(len(bytes.fromhex(TRANSACTION_HEX)))
POLL += bytes.fromhex(TRANSACTION_HEX)


@pytest.mark.parametrize("at", range(len(POLL)))
def test_avro_poll_cut_anywhere_is_rejected(at: int) -> None:
    with pytest.raises(BadRequest):
        AVRO.read_poll(POLL[:at])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (PUBLISH + b"\0", "1 bytes"),
        (b"\x04\x00", "branch 2 does not exist"),
        (b"\x01\x00", "branch -1 does not exist"),
        (b"\x02\x02\x01", "negative"),
        (b"\x02" + long(2**62) + b"\x02a", "truncated"),
        (b"\x02\x02" + long(2**40) + b"a", "truncated"),
        (b"\x00" + b"\x80" * 10 + b"\0", "more than 64 bits"),
        (b"\x00" + b"\xff" * 9 + b"\x02" + b"\0", "more than 64 bits"),
        (b"\x02\x02" + b"\xff" * 11 + b"\0", "more than 64 bits"),
        (b"", "truncated"),
    ],
)
def test_invalid_avro_publish_is_rejected_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        AVRO.read_publish(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (ROLLBACK + b"\0", "1 bytes"),
        (b"\x02", "transactionWritePointer"),
        (b"\x00" + long(W) + long(T) + long(2**31) + long(T) + b"\0", "more than 32 bits"),
    ],
)
def test_invalid_avro_rollback_is_rejected_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        AVRO.read_rollback(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (POLL + b"\0", "1 bytes"),
        (b"\x06\x01\x02\x02", "branch 3 does not exist"),
        (b"\x04\x02\x02\x02", "boolean .* 2"),
        (b"\x00\x26" + ID.pack()[1:] + b"\x01\x02\x02", "20 bytes, not 19"),
        (b"\x00\x00" + b"\x01\x02\x02", "20 bytes, not 0"),
        (b"\x00\x01", "the length -1 is negative"),
        (b"\x04\x01" + b"\x00" + long(0) + b"\x02", "limit of 0"),
        (b"\x02" + long(-1) + b"\x01\x02\x02", "-1 "),
        (b"\x04\x01\x02\x00\x04hi", "transaction: "),
        (b"\x04\x01\x02\x00\x02\x00", "transaction: field 2"),
    ],
)
def test_invalid_avro_poll_is_rejected_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        AVRO.read_poll(body)


@given(st.binary(max_size=60))
def test_any_avro_bytes_are_decoded_or_a_bad_request(body: bytes) -> None:
    for read in (AVRO.read_publish, AVRO.read_rollback, AVRO.read_poll):
        with suppress(BadRequest):
            read(body)


@pytest.mark.parametrize("more", [b"\0", bytes(20)])
def test_avro_poll_uses_the_first_20_bytes_of_a_longer_id(more: bytes) -> None:
    data = ID.pack() + more
    assert AVRO.read_poll(b"\x00" + long(len(data)) + data + b"\x01\x02\x02").start == ID


def test_avro_poll_skips_bytes_after_a_transaction() -> None:
    data = bytes.fromhex(TRANSACTION_HEX) + b"zz"
    assert AVRO.read_poll(b"\x04\x01\x02\x00" + long(len(data)) + data).transaction == decode_transaction(data[:-2])
