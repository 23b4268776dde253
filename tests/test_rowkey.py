"""Row keys: CDAP's bytes, their order and their grammar."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tms_core.errors import KeyFormatError
from tms_core.rowkey import (
    GENERATION_BYTES,
    LONG_MAX,
    MESSAGE_TAIL_BYTES,
    NEGATIVE,
    PAYLOAD_TAIL_BYTES,
    Cutoff,
    MessageId,
    MessageKey,
    PayloadKey,
    generation_prefix,
    java_abs,
    java_hash,
    pointer_prefix,
    salt,
    stop_key,
    time_prefix,
    topic_prefix,
)
from tms_core.topic import TopicId

TOPIC = TopicId("default", "t1")
PUBLISH_MS = 1_500_000_000_000
POINTER = 1_500_000_000_000_000_007

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LONG_MIN = -(2**63)

PREFIX = "64656661756c743a74313a"
FIRST = MessageKey(TOPIC, 1, PUBLISH_MS, 0)
LAST = MessageKey(TOPIC, 1, PUBLISH_MS, 65535)
STORED = PayloadKey(TOPIC, 1, POINTER, PUBLISH_MS, 2)

INTS = st.integers(INT_MIN, INT_MAX)
LONGS = st.integers(LONG_MIN, LONG_MAX)
SEQUENCES = st.integers(0, 65535)
TOPICS = st.builds(
    TopicId, st.from_regex(r"[a-zA-Z0-9_]{1,8}", fullmatch=True), st.from_regex(r"[a-zA-Z0-9_-]{1,8}", fullmatch=True)
)


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "time_ms", "text"),
    [
        (FIRST, PUBLISH_MS, PREFIX + "00000001" + "0000015d3ef79800" + "0000"),
        (LAST, PUBLISH_MS, PREFIX + "00000001" + "0000015d3ef79800" + "ffff"),
        (MessageKey(TOPIC, 255, PUBLISH_MS, 32768), PUBLISH_MS, PREFIX + "000000ff" + "0000015d3ef79800" + "8000"),
        (MessageKey(TOPIC, -1, -1, 1), -1, PREFIX + "ffffffff" + "ffffffffffffffff" + "0001"),
        (STORED, PUBLISH_MS, PREFIX + "00000001" + "14d1120d7b160007" + "0000015d3ef79800" + "0002"),
        (
            PayloadKey(TOPIC, 2, -POINTER, PUBLISH_MS, 65535),
            PUBLISH_MS,
            PREFIX + "00000002" + "eb2eedf284e9fff9" + "0000015d3ef79800" + "ffff",
        ),
    ],
)
def test_key_is_packed_and_parsed_as_by_cdap(key: MessageKey | PayloadKey, time_ms: int, text: str) -> None:
    assert key.pack().hex() == text
    assert type(key).parse(bytes.fromhex(text)) == key
    assert key.time_ms == time_ms


@given(
    st.builds(MessageKey, TOPICS, INTS, LONGS, SEQUENCES) | st.builds(PayloadKey, TOPICS, INTS, LONGS, LONGS, SEQUENCES)
)
def test_any_key_is_parsed_as_it_was_packed(key: MessageKey | PayloadKey) -> None:
    assert type(key).parse(key.pack()) == key


@given(st.binary(max_size=60) | st.builds(lambda tail: TOPIC.prefix + tail, st.binary(max_size=30)))
def test_parse_of_any_bytes_is_unrecognized_or_packs_the_same(data: bytes) -> None:
    message, payload = MessageKey.parse(data), PayloadKey.parse(data)
    assert message is None or message.pack() == data
    assert payload is None or payload.pack() == data


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"t1:",
        b"default:t1",
        b"a.b:t1:",
        b"default:t.1:",
        b":t1:",
        b"default::",
        b"a:b:c:",
        b"default:t1::",
        b"a-b:t1:",
        "ä:t1:".encode(),
        b"default:t1:\n",
    ],
)
def test_parse_of_another_prefix_is_none(prefix: bytes) -> None:
    assert MessageKey.parse(prefix + bytes(14)) is None
    assert PayloadKey.parse(prefix + bytes(22)) is None


@pytest.mark.parametrize(("parse", "key"), [(MessageKey.parse, FIRST.pack()), (PayloadKey.parse, STORED.pack())])
def test_parse_of_a_key_of_another_length_or_table_is_unrecognized(parse: Callable[..., object], key: bytes) -> None:
    assert parse(key) is not None
    [other] = {FIRST.pack(), STORED.pack()} - {key}
    assert [parse(key[:-1]), parse(key + b"\x00"), parse(key[1:12]), parse(b""), parse(other)] == [None] * 5


@pytest.mark.parametrize(
    "key",
    [
        FIRST._replace(sequence=65536),
        FIRST._replace(sequence=-1),
        FIRST._replace(generation=2**31),
        FIRST._replace(publish_ms=2**63),
        STORED._replace(write_pointer=LONG_MIN - 1),
        STORED._replace(write_ms=2**63),
        MessageId(0, 65536),
        MessageId(0, 0, 2**63),
    ],
)
def test_pack_of_a_number_that_does_not_fit_is_rejected(key: MessageKey | PayloadKey | MessageId) -> None:
    with pytest.raises(KeyFormatError):
        key.pack()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), SEQUENCES), min_size=2, max_size=2))
def test_message_keys_sort_by_generation_time_and_sequence(parts: list[tuple[int, int, int]]) -> None:
    keys = [MessageKey(TOPIC, *part).pack() for part in parts]
    assert (keys[0] < keys[1]) == (parts[0] < parts[1])


def test_payload_keys_sort_by_transaction_before_time() -> None:
    keys = [PayloadKey(TOPIC, 1, 7, 900, 0), PayloadKey(TOPIC, 1, 8, 100, 0), PayloadKey(TOPIC, 1, -9, 0, 0)]
    assert sorted(keys, key=PayloadKey.pack) == keys


def test_key_after_its_generation_has_a_fixed_length() -> None:
    assert len(FIRST.pack()) == len(TOPIC.prefix) + GENERATION_BYTES + MESSAGE_TAIL_BYTES == 11 + 4 + 10
    assert len(STORED.pack()) == len(TOPIC.prefix) + GENERATION_BYTES + PAYLOAD_TAIL_BYTES == 11 + 4 + 18


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        (generation_prefix(TOPIC.prefix, 1), PREFIX + "00000001"),
        (generation_prefix(TOPIC.prefix, 2), PREFIX + "00000002"),
        (generation_prefix(TOPIC.prefix, -1), PREFIX + "ffffffff"),
        (time_prefix(TOPIC.prefix, 1, PUBLISH_MS), PREFIX + "00000001" + "0000015d3ef79800"),
        (pointer_prefix(TOPIC.prefix, 1, POINTER), PREFIX + "00000001" + "14d1120d7b160007"),
        (pointer_prefix(TOPIC.prefix, 1, -POINTER), PREFIX + "00000001" + "eb2eedf284e9fff9"),
    ],
)
def test_prefix_has_the_documented_bytes(prefix: bytes, text: str) -> None:
    assert prefix.hex() == text


def test_negative_generations_and_times_sort_after_positive_ones() -> None:
    after = generation_prefix(TOPIC.prefix, 2**31)
    last = MessageKey(TOPIC, INT_MAX, LONG_MAX, 65535).pack()
    assert last < after <= MessageKey(TOPIC, INT_MIN, 0, 0).pack()
    edge = generation_prefix(TOPIC.prefix, 1) + NEGATIVE
    assert MessageKey(TOPIC, 1, LONG_MAX, 65535).pack() < edge <= MessageKey(TOPIC, 1, LONG_MIN, 0).pack()


@pytest.mark.parametrize("key", [FIRST.pack(), STORED.pack(), b"default:t1:", b"default:t1:x", b"default:t1::::"])
def test_prefix_of_a_key_that_starts_like_a_topic_is_found(key: bytes) -> None:
    assert topic_prefix(key) == b"default:t1:"


@pytest.mark.parametrize("key", [b"", b":", b"::", b"default", b"default:t1", b"default::x", b"a.b:t:", b"a:t t:\x00"])
def test_prefix_of_a_key_without_a_topic_is_none(key: bytes) -> None:
    assert topic_prefix(key) is None


# --- stop keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "stop"),
    [
        (PREFIX + "00000001", PREFIX + "00000002"),
        (PREFIX + "000000ff", PREFIX + "000001"),
        (PREFIX + "00000001" + "0000015d3ef79800" + "0001", PREFIX + "00000001" + "0000015d3ef79800" + "0002"),
        (PREFIX + "00000001" + "0000015d3ef79800" + "ffff", PREFIX + "00000001" + "0000015d3ef79801"),
        ("ff00ffff", "ff01"),
        *((prefix, None) for prefix in ("", "ff", "ffffff")),
    ],
)
def test_stop_of_a_prefix_raises_the_last_byte_that_can(prefix: str, stop: str | None) -> None:
    assert stop_key(bytes.fromhex(prefix)) == (None if stop is None else bytes.fromhex(stop))


@given(
    st.binary(max_size=4) | st.text("\xfe\xff", max_size=4).map(lambda text: text.encode("latin-1")),
    st.binary(max_size=6),
)
def test_stop_of_any_prefix_separates_its_keys_from_those_after(prefix: bytes, other: bytes) -> None:
    stop = stop_key(prefix)
    assert stop is None or prefix + other < stop
    if other >= prefix and not other.startswith(prefix):
        assert stop is not None
        assert other >= stop


# --- message ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        (MessageId(PUBLISH_MS, 0), "0000015d3ef79800" + "0000" + "0000000000000000" + "0000"),
        (MessageId(PUBLISH_MS, 3, PUBLISH_MS - 5, 2), "0000015d3ef79800" + "0003" + "0000015d3ef797fb" + "0002"),
        (MessageId(PUBLISH_MS, 65535, 1, 32768), "0000015d3ef79800" + "ffff" + "0000000000000001" + "8000"),
    ],
)
def test_message_id_is_packed_and_parsed_as_by_cdap(message_id: MessageId, text: str) -> None:
    assert message_id.pack() == bytes.fromhex(text)
    assert MessageId.parse(bytes.fromhex(text)) == message_id
    assert str(message_id) == text
    assert MessageId.from_hex(text.upper()) == message_id


@pytest.mark.parametrize(("payload_ms", "payload_sequence", "there"), [(0, 0, False), (0, 5, False), (1, 0, True)])
def test_payload_of_an_id_depends_on_its_time_alone(payload_ms: int, payload_sequence: int, there: bool) -> None:
    assert MessageId(PUBLISH_MS, 0, payload_ms, payload_sequence).in_payload_table is there


@pytest.mark.parametrize("size", [0, 19, 21])
def test_message_id_of_another_length_is_rejected(size: int) -> None:
    with pytest.raises(KeyFormatError, match=f"20 .*{size}"):
        MessageId.parse(bytes(size))


@pytest.mark.parametrize("text", ["", "0" * 38, "0" * 39, "0" * 42, "g" * 40, "00 " * 19 + "00", "00" * 20 + "\n"])
def test_message_id_from_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(KeyFormatError, match="40 "):
        MessageId.from_hex(text)


# --- the cut-off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age_ms", "expired"), [(59_999, False), (60_000, False), (60_001, True)])
def test_row_older_than_its_ttl_is_expired(age_ms: int, expired: bool) -> None:
    assert Cutoff.at(PUBLISH_MS, 60).expires(PUBLISH_MS - age_ms) is expired


@pytest.mark.parametrize(("now_ms", "cutoff_ms"), [(0, 0), (59_999, 0), (60_000, 0), (60_001, 1)])
def test_cutoff_of_a_ttl_longer_than_time_is_zero_and_expires_nothing(now_ms: int, cutoff_ms: int) -> None:
    assert Cutoff.at(now_ms, 60) == Cutoff(cutoff_ms)
    assert not Cutoff.at(now_ms, INT_MAX).expires(0)


def test_later_cutoff_is_greater() -> None:
    assert Cutoff(1) < Cutoff(2) <= Cutoff(LONG_MAX)


@pytest.mark.parametrize("cutoff_ms", [-1, 2**63])
def test_cutoff_outside_the_range_of_keys_is_rejected(cutoff_ms: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 2"):
        Cutoff(cutoff_ms)


# --- Java's arithmetic -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pointer", "absolute"),
    [(0, 0), (5, 5), (-5, 5), (LONG_MAX, LONG_MAX), (LONG_MIN + 1, LONG_MAX), (LONG_MIN, LONG_MIN)],
)
def test_java_abs_of_a_pointer_is_that_of_java(pointer: int, absolute: int) -> None:
    assert java_abs(pointer) == absolute


@pytest.mark.parametrize(
    ("key", "digest", "bucket"),
    [
        (FIRST.pack(), -2125096031, "0f"),
        (FIRST._replace(sequence=1).pack(), -2125096030, "0e"),
        (LAST.pack(), -2125096063, "0f"),
        (STORED.pack(), 1806618781, "0d"),
        *((b"", 1, "01"), (b"\0", 31, "0f"), (b"\x7f", 158, "0e"), (b"\x80", -97, "01"), (b"\xff", 30, "0e")),
    ],
)
def test_hash_of_all_signed_bytes_of_a_key_decides_its_salt(key: bytes, digest: int, bucket: str) -> None:
    assert java_hash(key) == digest
    assert salt(key, 16) == bytes.fromhex(bucket)


@pytest.mark.parametrize(("buckets", "bucket"), [(16, "00"), (10, "f8")])
def test_salt_of_the_lowest_hash_is_javas_byte(buckets: int, bucket: str) -> None:
    key = bytes.fromhex("9600f601f4fe")
    assert java_hash(key) == INT_MIN
    assert salt(key, buckets) == bytes.fromhex(bucket)


@given(st.binary(max_size=40), st.sampled_from([1, 2, 16, 128]))
def test_salt_of_any_key_is_below_the_number_of_buckets(key: bytes, buckets: int) -> None:
    assert salt(key, buckets)[0] < buckets
