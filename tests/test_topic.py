"""Topics: CDAP's names, stored properties byte for byte, and old generations."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tms_core.errors import MetadataError
from tms_core.topic import (
    INT_MAX,
    INT_MIN,
    TopicId,
    TopicMetadata,
    encode_properties,
    first_kept_generation,
    parse_java_int,
)

KEY = b"default:t1:"


def stored(generation: str, ttl: str) -> bytes:
    return encode_properties({"generation": generation, "ttl": ttl})


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["default:t1", "a:b", "N_1:T-x_2", "_:-", "0:0"])
def test_name_is_parsed_and_written_as_in_cdap(text: str) -> None:
    topic = TopicId.parse(text)
    assert str(topic) == text
    assert topic.prefix == f"{text}:".encode()
    assert TopicId.from_prefix(topic.prefix) == topic


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "t1",
        "default:",
        ":t1",
        "default:t1:",
        "a:b:c",
        "a-b:t1",
        "default:t.1",
        "default:t 1",
        "default:t1\n",
        "défaut:t1",
        "default:t\udc80",
    ],
)
def test_parse_of_a_name_invalid_in_cdap_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="namespace:topic"):
        TopicId.parse(text)


@pytest.mark.parametrize("prefix", [b"", b"default:t1", b"default:t1:x", b"default:t1::", b"a:b:c:", b"a-b:t:", b"::"])
def test_topic_from_an_invalid_prefix_is_none(prefix: bytes) -> None:
    assert TopicId.from_prefix(prefix) is None


def test_names_that_start_alike_sort_otherwise_as_rows() -> None:
    names = [TopicId("a", "t1"), TopicId("a", "t1-x"), TopicId("a", "t10")]
    assert sorted(names) == names
    assert sorted(topic.prefix for topic in names) == [b"a:t1-x:", b"a:t10:", b"a:t1:"]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("+5", 5),
        ("-1", -1),
        ("007", 7),
        ("2147483647", INT_MAX),
        ("-2147483648", INT_MIN),
        ("٤٢", 42),
        ("１２", 12),
        ("0" * 5000 + "1", 1),
    ],
)
def test_parse_java_int_of_valid_text_returns_the_number(text: str, value: int) -> None:
    assert parse_java_int(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "-",
        "--1",
        "+-1",
        "1-",
        " 1",
        "1 ",
        "1\n",
        "1.5",
        "1e3",
        "0x10",
        "1_000",
        "1L",
        "²",
        "½",
        "Ⅷ",
        "ten",
        "2147483648",
        "-2147483649",
        "9" * 20,
        "1" * 5000,
        "𝟏",
    ],
)
def test_parse_java_int_of_invalid_text_returns_none(text: str) -> None:
    assert parse_java_int(text) is None


@given(st.integers(2 * INT_MIN, 2 * INT_MAX))
def test_parse_java_int_accepts_only_32_bits(value: int) -> None:
    assert parse_java_int(str(value)) == (value if INT_MIN <= value <= INT_MAX else None)


# --- stored properties -----------------------------------------------------------------------------------------------


def test_metadata_written_by_cdap_is_parsed_and_encoded_alike() -> None:
    value = bytes.fromhex("7b2267656e65726174696f6e223a2231222c2274746c223a22363034383030227d")
    properties = {"generation": "1", "ttl": "604800"}
    topic = TopicMetadata.parse(KEY, value)
    assert (topic.topic, topic.generation, topic.ttl_seconds) == (TopicId("default", "t1"), 1, 604_800)
    assert topic.properties == properties
    assert not topic.deleted
    assert encode_properties(properties) == value


def test_metadata_with_other_properties_keeps_them() -> None:
    value = b'{"generation":"-3","owner":"me","ttl":"+1"}'
    topic = TopicMetadata.parse(KEY, value)
    assert (topic.generation, topic.ttl_seconds, topic.deleted) == (-3, 1, True)
    assert topic.properties == {"generation": "-3", "owner": "me", "ttl": "+1"}


@pytest.mark.parametrize("generation", [str(-INT_MAX), "-1", "1", str(INT_MAX)])
@pytest.mark.parametrize("ttl", ["1", str(INT_MAX)])
def test_generation_and_ttl_at_their_edges_are_parsed(generation: str, ttl: str) -> None:
    found = TopicMetadata.parse(KEY, stored(generation, ttl))
    assert (found.generation, found.ttl_seconds) == (int(generation), int(ttl))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("generation", value) for value in ("0", "-0", str(INT_MIN), str(INT_MAX + 1), "", "one")),
        *(("ttl", value) for value in ("0", "-1", str(INT_MAX + 1), "", "1.5", "1h")),
    ],
)
def test_impossible_generation_or_ttl_names_topic_and_value(name: str, value: str) -> None:
    with pytest.raises(MetadataError, match=f"default:t1: {name} '{value}'"):
        TopicMetadata.parse(KEY, encode_properties({"generation": "1", "ttl": "1", name: value}))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xfd", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ('{"generation":"1","ttl":"1"}'.encode("utf-16"), "not JSON"),
        (b'{"generation":"1","generation":"5","ttl":"1"}', "twice"),
        (b"null", "not a JSON object of strings"),
        (b'["generation"]', "not a JSON object of strings"),
        (b'{"generation":1,"ttl":"1"}', "not a JSON object of strings"),
        (b'{"generation":"1","ttl":"1","x":null}', "not a JSON object of strings"),
        (b"{}", "generation None"),
        (b'{"generation":"1"}', "ttl None"),
    ],
)
def test_metadata_of_invalid_bytes_raises_with_topic_and_reason(value: bytes, why: str) -> None:
    with pytest.raises(MetadataError, match=f"topic default:t1: .*{why}"):
        TopicMetadata.parse(KEY, value)


@pytest.mark.parametrize("key", [b"", b"default:t1", b"default:t1:x", b"a.b:t:"])
def test_metadata_of_an_invalid_key_raises(key: bytes) -> None:
    with pytest.raises(MetadataError, match="namespace:topic"):
        TopicMetadata.parse(key, stored("1", "1"))


@pytest.mark.parametrize(
    ("properties", "value"),
    [
        ({}, b"{}"),
        ({"b": "2", "a": "1"}, b'{"a":"1","b":"2"}'),
        ({"a": "<b>='&'"}, rb'{"a":"\u003cb\u003e\u003d\u0027\u0026\u0027"}'),
        ({"=": "\u2028\u2029"}, rb'{"\u003d":"\u2028\u2029"}'),
        ({"a": '"\\/\t\n\r\b\f\x01'}, rb'{"a":"\"\\/\t\n\r\b\f\u0001"}'),
        ({"a": "ä€𝄞"}, '{"a":"ä€𝄞"}'.encode()),
    ],
)
def test_properties_are_encoded_as_by_gson(properties: dict[str, str], value: bytes) -> None:
    assert encode_properties(properties) == value


@given(st.dictionaries(st.text(), st.text(), max_size=4))
def test_properties_of_any_text_read_back_without_html_characters(properties: dict[str, str]) -> None:
    value = encode_properties(properties)
    assert json.loads(value) == properties
    assert not set(value) & set(b"<>&='")


# --- generations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "metadata", "old"),
    [
        (3, 5, True),
        (3, -3, True),
        (6, 5, False),
        (6, 6, False),
        (6, -5, False),
        (4, 5, True),
        (5, 5, False),
        (4, -5, True),
        (5, -5, True),
        (1, 1, False),
        (1, -1, True),
        (2, -1, False),
        (INT_MAX - 1, INT_MAX, True),
        (INT_MAX, INT_MAX, False),
        (INT_MAX, -INT_MAX, True),
    ],
)
def test_data_generation_is_old_exactly_as_in_cdap(data: int, metadata: int, old: bool) -> None:
    topic = TopicMetadata(TopicId("default", "t1"), metadata, 60)
    assert topic.is_old(data) is old
    assert (data < topic.old_below) is old


@pytest.mark.parametrize(("generation", "first"), [(0, 1), (1, 1), (-1, 2), (7, 7), (-7, 8), (-INT_MAX, 2**31)])
def test_first_kept_generation_of_a_deleted_topic_is_the_next(generation: int, first: int) -> None:
    assert first_kept_generation(generation) == first
