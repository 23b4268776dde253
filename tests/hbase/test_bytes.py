"""Rows in HBase equal CDAP's rows byte for byte, as read by another client.

The rows are the worked examples of ``docs/reference/formats/rows.md``: namespace ``default``, topic ``t1``, generation
1, published at 1500000000000 with write pointer 1500000000000000007, in tables of 16 buckets.
"""

from __future__ import annotations

from collections.abc import Iterator

import happybase
import pytest

from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import CELLS, KEYS, MESSAGES, PAYLOADS, MessageValue, TxCell
from tms_core.tables.hbase.store import HBaseStore
from tms_core.topic import TopicId

TOPIC = TopicId("default", "t1")
PUBLISH_MS, POINTER = 1_500_000_000_000, 1_500_000_000_000_000_007
PREFIX = "64656661756c743a74313a00000001"
TIME = "0000015d3ef79800"
PLUS, MINUS = "14d1120d7b160007", "eb2eedf284e9fff9"

#: The sequence number, and the salt and key in hex.
STORED = [(0, "0f", f"{PREFIX}{TIME}0000"), (1, "0e", f"{PREFIX}{TIME}0001"), (65535, "0f", f"{PREFIX}{TIME}ffff")]
P, T, C, M = b"d:\x00\x00\x00p", b"d:\x00\x00\x00t", b"d:\x00\x00\x00c", b"d:m"


@pytest.fixture(scope="module")
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.shared(buckets=16)


@pytest.fixture
def store(hbase: HBaseServer, namespace: str) -> Iterator[HBaseStore]:
    with HBaseStore(hbase.settings(namespace, buckets=16)) as opened:
        yield opened


@pytest.mark.parametrize(("sequence", "salt", "key"), STORED)
def test_message_row_matches_worked_example(
    store: HBaseStore, witness: happybase.Connection, namespace: str, sequence: int, salt: str, key: str
) -> None:
    packed = MessageKey(TOPIC, 1, PUBLISH_MS, sequence).pack()
    assert packed.hex() == key
    store.message.put([(packed, MessageValue(None, b"hi"))])
    row = bytes.fromhex(salt + key)
    assert witness.table(f"{namespace}:tms.message".encode()).row(row) == {P: b"hi"}
    store.message.delete([packed])
    assert witness.table(f"{namespace}:tms.message".encode()).row(row) == {}


@pytest.mark.parametrize(
    ("value", "cells"),
    [
        (MessageValue(None, b"hi"), {P: b"hi"}),
        (MessageValue(None, b""), {P: b""}),
        (MessageValue(POINTER, b"hi"), {P: b"hi", T: bytes.fromhex(PLUS)}),
        (MessageValue(POINTER, b""), {P: b"", T: bytes.fromhex(PLUS)}),
        (MessageValue(POINTER, None), {T: bytes.fromhex(PLUS)}),
        (MessageValue(-POINTER, b"hi"), {P: b"hi", T: bytes.fromhex(MINUS)}),
    ],
)
def test_message_cells_match_cdap_for_each_kind(
    store: HBaseStore,
    witness: happybase.Connection,
    namespace: str,
    request: pytest.FixtureRequest,
    value: MessageValue,
    cells: dict[bytes, bytes],
) -> None:
    # A new key for each value, because cells of earlier values could hide a difference.
    key = TOPIC.prefix + b"\x00\x00\x00\x01" + request.node.nodeid.encode()
    store.message.put([(key, value)])
    rows = witness.table(f"{namespace}:tms.message".encode()).scan()
    assert [found for row, found in rows if row[1:] == key] == [cells]
    assert store.message.read(MESSAGES, key, key + b"\x00", 9).items == [(key, value)]
    assert store.message.read(KEYS, key, key + b"\x00", 9).items == [key]


def test_inversion_changes_only_the_pointer_bytes(
    store: HBaseStore, witness: happybase.Connection, namespace: str
) -> None:
    key = MessageKey(TOPIC, 2, PUBLISH_MS, 7).pack()
    store.message.put([(key, MessageValue(POINTER, b"hi"))])
    [cell] = store.message.read(CELLS, key, key + b"\x00", 9).items
    assert store.message.invert([cell]) == [True]
    rows = dict(witness.table(f"{namespace}:tms.message".encode()).scan())
    assert [cells for row, cells in rows.items() if row[1:] == key] == [{P: b"hi", T: bytes.fromhex(MINUS)}]


def test_inversion_of_cells_of_unusual_length_matches_cdap(
    store: HBaseStore, witness: happybase.Connection, namespace: str
) -> None:
    keys = [MessageKey(TOPIC, 3, PUBLISH_MS, sequence).pack() for sequence in range(3)]
    store.message.put([(key, MessageValue(POINTER, None)) for key in keys])
    message = witness.table(f"{namespace}:tms.message".encode())
    longer, shorter, usual = sorted((row for row, _ in message.scan() if row[1:] in keys), key=lambda row: row[1:])
    message.put(longer, {T: bytes.fromhex(PLUS) + b"more"})
    message.put(shorter, {T: bytes.fromhex(PLUS)[:7]})
    cells = store.message.read(CELLS, keys[0], keys[-1] + b"\x00", 9).items
    assert cells == [TxCell(keys[0], POINTER, refers=True), TxCell(keys[2], POINTER, refers=True)]
    assert store.message.read(MESSAGES, keys[0], keys[0] + b"\x00", 9).items == [(keys[0], MessageValue(POINTER, None))]
    assert store.message.invert([*cells, TxCell(keys[1], POINTER, refers=True)]) == [True, True, False]
    pointers = [message.row(row)[T] for row in (longer, shorter, usual)]
    assert pointers == [bytes.fromhex(MINUS) + b"more", bytes.fromhex(PLUS)[:7], bytes.fromhex(MINUS)]


def test_payload_row_matches_worked_example(store: HBaseStore, witness: happybase.Connection, namespace: str) -> None:
    key = PayloadKey(TOPIC, 1, POINTER, PUBLISH_MS, 2).pack()
    store.payload.put([(key, b"body")])
    row = bytes.fromhex("0d" + PREFIX + PLUS + TIME + "0002")
    assert dict(witness.table(f"{namespace}:tms.payload".encode()).scan()) == {row: {C: b"body"}}


def test_metadata_row_has_no_salt(store: HBaseStore, witness: happybase.Connection, namespace: str) -> None:
    json = bytes.fromhex("7b2267656e65726174696f6e223a2231222c2274746c223a22363034383030227d")
    assert json == b'{"generation":"1","ttl":"604800"}'
    assert store.metadata.compare_and_set(TOPIC.prefix, None, json)
    rows = dict(witness.table(f"{namespace}:tms.meta".encode()).scan())
    assert rows == {bytes.fromhex("64656661756c743a74313a"): {M: json}}


def test_rows_written_by_another_client_are_read_unchanged(
    hbase: HBaseServer, hbase_tables: Tables, witness: happybase.Connection
) -> None:
    namespace = hbase_tables.shared(buckets=16)
    message = witness.table(f"{namespace}:tms.message".encode())
    for _, salt, key in STORED:
        message.put(bytes.fromhex(salt + key), {P: b"hi", T: bytes.fromhex(PLUS)})
    witness.table(f"{namespace}:tms.payload".encode()).put(
        bytes.fromhex("0d" + PREFIX + PLUS + TIME + "0002"), {C: b"body"}
    )
    witness.table(f"{namespace}:tms.meta".encode()).put(TOPIC.prefix, {M: b"{}"})
    # Reads need no bucket count.
    with HBaseStore(hbase.settings(namespace)) as store:
        value = MessageValue(POINTER, b"hi")
        assert store.message.read(MESSAGES, b"", None, 9).items == [(bytes.fromhex(key), value) for _, _, key in STORED]
        assert store.payload.read(PAYLOADS, b"", None, 9).items == [
            (PayloadKey(TOPIC, 1, POINTER, PUBLISH_MS, 2).pack(), b"body")
        ]
        assert store.metadata.rows() == [(TOPIC.prefix, b"{}")]
