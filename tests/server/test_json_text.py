"""JSON: Avro's field names, values that survive JavaScript, and error messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tms_core.errors import BadRequest
from tms_core.messaging.model import FetchedMessage, FetchRequest, RollbackRange
from tms_core.rowkey import MessageId
from tms_core.server.codec.bodies import CHUNK_BYTES
from tms_core.server.codec.json_text import POLL_MESSAGES, JsonCodec, read_properties

JSON = JsonCodec()
T, W = 1_500_000_000_000, 1_500_000_000_000_000_007
ID = MessageId(T, 3)
RANGE = {"startTimestamp": T, "startSequenceId": 0, "endTimestamp": T, "endSequenceId": 1}


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("given_", "read"),
    [
        ({}, (None, [], None)),
        ({"messages": ["a", "ä"]}, (None, [b"a", "ä".encode()], None)),
        ({"messages": [{"base64": "//79"}, ""]}, (None, [b"\xff\xfe\xfd", b""], None)),
        ({"transactionWritePointer": W, "messages": None}, (W, [], None)),
        ({"transactionWritePointer": str(W), "ttlSeconds": 60}, (W, [], 60)),
        ({"transactionWritePointer": None, "messages": [], "ttlSeconds": "60"}, (None, [], 60)),
    ],
)
def test_json_publish_is_decoded(given_: Any, read: Any) -> None:
    assert JSON.read_publish(body(given_)) == read


@pytest.mark.parametrize(
    ("given_", "read"),
    [
        ({}, FetchRequest(None, True, POLL_MESSAGES)),
        ({"startFrom": None, "limit": None, "transaction": None}, FetchRequest(None, True, POLL_MESSAGES)),
        ({"startFrom": {"id": str(ID)}, "inclusive": False, "limit": 9000}, FetchRequest(ID, False, 9000)),
        ({"startFrom": {"timeMs": str(T)}}, FetchRequest(T, True, POLL_MESSAGES)),
        ({"startFrom": {"timeMs": T}}, FetchRequest(T, True, POLL_MESSAGES)),
    ],
)
def test_json_poll_is_decoded(given_: Any, read: FetchRequest) -> None:
    assert JSON.read_poll(body(given_)) == read


def test_published_range_has_its_64_bit_numbers_as_text_and_is_read_again() -> None:
    written = RollbackRange(W, T, 0, T + 1, 65535)
    answer = JSON.write_published(written)
    assert JSON.read_rollback(answer) == written
    span = {"startTimestamp": str(T), "startSequenceId": 0, "endTimestamp": str(T + 1), "endSequenceId": 65535}
    assert json.loads(answer) == {"transactionWritePointer": str(W), "rollbackRange": span}


def test_json_rollback_of_a_group_may_have_the_id_to_start_after() -> None:
    assert JSON.read_group_rollback(body({"transactionWritePointer": W})) == (W, None)
    assert JSON.read_group_rollback(body({"transactionWritePointer": W, "after": str(ID)})) == (W, ID)


def test_messages_beyond_a_chunk_are_pieces_of_one_array() -> None:
    pieces = list(JSON.write_messages([[], [FetchedMessage(ID.pack(), b"x" * 1000)] * 200]))
    assert (pieces[0], len(pieces) > 2) == (b"", True)
    assert max(map(len, pieces)) < CHUNK_BYTES + 1100
    assert len(json.loads(b"".join(pieces))) == 200


@given(st.lists(st.lists(st.binary(max_size=40) | st.text(max_size=40).map(str.encode)), max_size=3))
def test_json_messages_contain_every_payload(payloads: list[list[bytes]]) -> None:
    pages = [[FetchedMessage(ID.pack(), payload) for payload in page] for page in payloads]
    found = json.loads(b"".join(JSON.write_messages(pages)))
    assert [entry["id"] for entry in found] == [str(ID)] * sum(map(len, payloads))
    read = JSON.read_publish(body({"messages": [entry["payload"] for entry in found]}))
    assert read.messages == [payload for page in payloads for payload in page]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"ttlSeconds":NaN}', "NaN"),
        (b'{"messages":[],"messages":[]}', "twice"),
        (b"[]", "not a JSON object"),
        (body({"ttl": 5}), "ttl: .*messages, transactionWritePointer, ttlSeconds"),
        (body({"messages": "a"}), "messages: .* array"),
        (body({"messages": ""}), "messages: .* array"),
        (body({"messages": {}}), "messages: .* array"),
        (body({"messages": 0}), "messages: .* array"),
        (body({"messages": False}), "messages: .* array"),
        (body({"messages": [1]}), "messages: .* text or"),
        (body({"messages": [{"base64": "a", "more": 1}]}), "messages: .* text or"),
        (body({"messages": [{"base64": "a"}]}), "messages: .* not base64"),
        (body({"messages": [{"base64": 5}]}), "messages: .* not base64"),
        (body({"messages": ["\ud800"]}), "surrogate"),
        (body({"transactionWritePointer": True}), "transactionWritePointer: .*64-bit"),
        (body({"transactionWritePointer": 2**63}), "transactionWritePointer: .*64-bit"),
        (body({"transactionWritePointer": "1.5"}), "transactionWritePointer: .*64-bit"),
        (body({"ttlSeconds": 2**31}), "ttlSeconds: .*32-bit"),
    ],
)
def test_invalid_json_publish_is_rejected_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        JSON.read_publish(data)


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        ({"startFrom": "0"}, "startFrom: "),
        ({"startFrom": {"id": "00"}}, "startFrom.id: .*40 hex digits"),
        ({"startFrom": {"id": str(ID), "timeMs": 1}}, "startFrom: "),
        ({"startFrom": {"timeMs": -1}}, "-1 "),
        ({"inclusive": 1}, "inclusive: "),
        ({"limit": 0}, "limit of 0"),
        ({"limit": 2**31}, "limit: .*32-bit"),
        ({"transaction": "!"}, "transaction: .* not base64"),
        ({"transaction": "AAAA"}, "transaction: "),
        ({"start": 0}, "start: "),
    ],
)
def test_invalid_json_poll_is_rejected_with_the_reason(given_: Any, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        JSON.read_poll(body(given_))


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        ({"rollbackRange": None}, "rollbackRange: .* not an object"),
        ({"rollbackRange": RANGE | {"start": 0}}, "rollbackRange.start: "),
        ({"rollbackRange": RANGE | {"endSequenceId": 2**31}}, "rollbackRange.endSequenceId: .*32-bit"),
        ({"rollbackRange": RANGE | {"endTimestamp": 2**63}}, "rollbackRange.endTimestamp: .*64-bit"),
    ],
)
def test_invalid_json_rollback_is_rejected_with_the_reason(given_: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        JSON.read_rollback(body({"transactionWritePointer": W} | given_))


@pytest.mark.parametrize(
    ("data", "properties"),
    [
        (b"", {}),
        (b" \n", {}),
        (b"{}", {}),
        (b'{"ttl":"60"}', {"ttl": "60"}),
        (
            b'{"ttl":60,"ratio":1.50,"on":true,"off":false}',
            {"ttl": "60", "ratio": "1.50", "on": "true", "off": "false"},
        ),
    ],
)
def test_properties_are_read_as_the_text_they_were_written_in(data: bytes, properties: dict[str, str]) -> None:
    assert read_properties(data) == properties


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "not a JSON object"),
        (b'[["ttl","60"]]', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"ttl=60", "not JSON"),
        (b'\xef\xbb\xbf{"ttl":"60"}', "not JSON"),
        (b"{'ttl':'60'}", "not JSON"),
        (b"{ttl:60}", "not JSON"),
        (b'{"ttl":null}', "ttl: .* text"),
        (b'{"ttl":{}}', "ttl: .* text"),
        (b'{"a":"1","a":"2"}', "twice"),
        (b'{"ttl":Infinity}', "Infinity"),
    ],
)
def test_invalid_json_properties_are_rejected_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        read_properties(data)
