"""Request and response bodies: the client's encoding equals the server's, in pieces of any size."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW_MS
from tms_core.client import BadRequest, MessageId, Transaction, Unanswered
from tms_core.client.protocol.messages import (
    Message,
    MessageDecoder,
    decode_published,
    decode_published_json,
    encode_poll,
    encode_publish,
    encode_publish_json,
    encode_rollback,
    milliseconds,
    seconds,
)
from tms_core.errors import FormatError
from tms_core.messaging.model import FetchedMessage as Row
from tms_core.messaging.model import FetchRequest, RollbackRange
from tms_core.server.codec.avro import AvroCodec
from tms_core.server.codec.bodies import PublishRequest
from tms_core.server.codec.json_text import JsonCodec
from tms_core.topic import INT_MAX

AVRO, JSON = AvroCodec(), JsonCodec()
LONGS = st.integers(0, 2**63 - 1)
INTS = st.integers(0, 2**16 - 1)
PAYLOADS = st.lists(st.binary(max_size=300), max_size=20)
IDS = st.builds(MessageId, LONGS, INTS, LONGS, INTS)
RANGES = st.builds(RollbackRange, LONGS, LONGS, INTS, LONGS, INTS)
READER = Transaction(read_pointer=5, transaction_id=7, write_pointer=7, invalids=(1, 3), in_progress=(4,))


@given(st.none() | LONGS, PAYLOADS)
def test_server_decodes_an_encoded_publish(pointer: int | None, payloads: list[bytes]) -> None:
    assert AVRO.read_publish(encode_publish(pointer, payloads)) == PublishRequest(pointer, payloads)
    assert JSON.read_publish(encode_publish_json(pointer, payloads, 60)) == PublishRequest(pointer, payloads, 60)


@given(st.none() | IDS, st.booleans(), st.none() | st.integers(1, INT_MAX))
def test_server_decodes_an_encoded_poll(start: MessageId | None, inclusive: bool, limit: int | None) -> None:
    body = encode_poll(start, limit, READER, inclusive=inclusive)
    found = AVRO.read_poll(body)
    assert (found.start, found.inclusive, found.limit) == (start, inclusive, limit or INT_MAX)
    assert found.transaction is not None
    assert list(found.transaction.invalids) == [1, 3]
    assert found.transaction.transaction_id == 7


def test_poll_from_a_time_is_sent_in_milliseconds() -> None:
    start = datetime.fromtimestamp(NOW_MS / 1000, timezone(timedelta(hours=2)))
    assert AVRO.read_poll(encode_poll(start, None, None, inclusive=True)) == FetchRequest(NOW_MS)


@given(RANGES)
def test_response_to_a_publish_is_sent_unchanged_in_a_rollback(published: RollbackRange) -> None:
    body = AVRO.write_published(published)
    assert decode_published(body) == published
    assert encode_rollback(published) == body
    assert decode_published_json(JSON.write_published(published)) == published


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        *((decode_published, body) for body in (b"", b"\2", b"\0\2", b"\0" + b"\2" * 6, b"\0" + b"\xff" * 11)),
        (decode_published, b"\2" + b"\2" * 5),
        *((decode_published_json, body) for body in (b"", b"[]", b"{}")),
        (decode_published_json, b'{"transactionWritePointer": "x", "rollbackRange": {}}'),
    ],
)
def test_decode_of_an_invalid_publish_response_is_rejected(decode: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(FormatError):
        decode(body)


# --- messages in pieces ----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(IDS, st.binary(max_size=300)), max_size=10), max_size=4), st.data())
def test_decode_of_any_pieces_gives_messages(pages: list[list[tuple[MessageId, bytes]]], data: st.DataObject) -> None:
    body = b"".join(AVRO.write_messages([[Row(id_.pack(), payload) for id_, payload in page] for page in pages]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=30)))
    decoder, found = MessageDecoder(), list[Message]()
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        found += decoder.feed(body[start:stop])
    decoder.end()
    assert found == [Message(id_, payload) for page in pages for id_, payload in page]


def test_decode_of_blocks_with_a_size_skips_the_size() -> None:
    item = b"\x28" + bytes(20) + b"\x04hi"
    decoder = MessageDecoder()
    assert [message.payload for message in decoder.feed(b"\1" + b"\x30" + item + b"\0")] == [b"hi"]
    decoder.end()


@pytest.mark.parametrize(
    "body", [b"", b"\x02", b"\x02\x28" + bytes(20) + b"\x04h", b"\x02\x28" + bytes(20) + b"\x04hi"]
)
def test_end_of_a_truncated_response_is_unanswered(body: bytes) -> None:
    decoder = MessageDecoder()
    decoder.feed(body)
    with pytest.raises(Unanswered, match="truncated"):
        decoder.end()


@pytest.mark.parametrize(
    "body", [b"\x02\x26" + bytes(40), b"\x02\x28" + bytes(20) + b"\x01", b"\0\0", b"\xff" * 11, b"<html>" + b"a" * 40]
)
def test_decode_of_an_invalid_response_is_unanswered(body: bytes) -> None:
    with pytest.raises(Unanswered, match="cannot be read"):
        MessageDecoder().feed(body)


def test_decode_of_a_large_message_in_pieces_joins_it_once() -> None:
    payload = bytes(range(256)) * 4096
    body = b"".join(AVRO.write_messages([[Row(MessageId(1, 0).pack(), payload)]]))
    decoder = MessageDecoder()
    found = [message for at in range(0, len(body), 1000) for message in decoder.feed(body[at : at + 1000])]
    assert found == [Message(MessageId(1, 0), payload)]


# --- times -----------------------------------------------------------------------------------------------------------


def test_message_time_is_the_time_of_its_publish() -> None:
    assert Message(MessageId(NOW_MS, 0), b"").time == datetime.fromtimestamp(NOW_MS / 1000, UTC)


@pytest.mark.parametrize(
    ("time", "message"),
    [
        (datetime(2026, 1, 1), "time zone"),  # noqa: DTZ001 that is the point
        (datetime(1969, 12, 31, tzinfo=UTC), "before 1970"),
    ],
)
def test_time_without_a_zone_or_before_1970_is_rejected(time: datetime, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        milliseconds(time)


def test_time_within_a_millisecond_is_rounded_down() -> None:
    assert milliseconds(datetime(1970, 1, 1, 0, 0, 1, 1999, tzinfo=UTC)) == 1001


@pytest.mark.parametrize("limit", [0, -1, INT_MAX + 1])
def test_poll_with_an_invalid_limit_is_rejected(limit: int) -> None:
    with pytest.raises(BadRequest, match="limit"):
        encode_poll(None, limit, None, inclusive=True)


@pytest.mark.parametrize(
    ("ttl", "expected"),
    [(60, 60), (timedelta(minutes=1), 60), (timedelta(seconds=1.5), 2), ("90", 90), ("1h30m", 5400), ("1500ms", 2)],
)
def test_ttl_is_converted_to_whole_seconds(ttl: timedelta | int | str, expected: int) -> None:
    assert seconds(ttl) == expected


@pytest.mark.parametrize(
    "ttl", [0, -1, 2**31, timedelta(0), timedelta(days=30_000), "", "soon", "7 d", "0d", "-1d", "9" * 15 + "d"]
)
def test_invalid_ttl_is_rejected(ttl: timedelta | int | str) -> None:
    with pytest.raises(BadRequest, match="ttl"):
        seconds(ttl)
