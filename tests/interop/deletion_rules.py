"""The expected rows of a swept store, judged row by row, for comparison with CDAP."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

from janitor.rules.policy import Delete, Frontier, Invert, Row, decide
from janitor.sweep.transactions import TransactionView
from tests.builders import every
from tms_core.rowkey import MessageKey, PayloadKey, java_abs
from tms_core.tables.base import MESSAGES, PAYLOADS, MessageValue, Store
from tms_core.topic import TopicMetadata
from tms_core.transaction.codec.snapshot import read_snapshot, write_snapshot


def kept_rows(store: Store, view: TransactionView, now_ms: int) -> tuple[dict[bytes, MessageValue], dict[bytes, bytes]]:
    """Return the rows of the message and payload tables that the rules keep, by key."""
    topics = {key: TopicMetadata.parse(key, value) for key, value in store.metadata.rows()}

    def verdict(row: Row, referenced: bool) -> object:
        topic = topics.get(row.key.topic.prefix) if row.key else None
        return decide(row, topic, Frontier.open(now_ms, topic) if topic else None, view, referenced, None)

    messages: dict[bytes, MessageValue] = {}
    references = set()
    for key, value in every(store.message, MESSAGES):
        parsed = MessageKey.parse(key)
        decision = verdict(Row("message", parsed, value.pointer), False)
        if isinstance(decision, Delete):
            continue
        if value.payload is None and value.pointer is not None and parsed:
            references.add((parsed.topic, parsed.generation, java_abs(value.pointer)))
        inverted = isinstance(decision, Invert) and value.pointer is not None
        messages[key] = value._replace(pointer=-(value.pointer or 0)) if inverted else value
    payloads: dict[bytes, bytes] = {}
    for key, body in every(store.payload, PAYLOADS):
        row = PayloadKey.parse(key)
        referenced = row is not None and (row.topic, row.generation, row.write_pointer) in references
        if not isinstance(verdict(Row("payload", row), referenced), Delete):
            payloads[key] = body
    return messages, payloads


def empty_invalid_list(snapshot: Path, into: Path) -> None:
    """Write a copy of a snapshot without its invalid transactions, as after pruning."""
    with snapshot.open("rb") as stream:
        whole = read_snapshot(stream)
    with into.open("wb") as stream:
        write_snapshot(stream, replace(whole, visibility=replace(whole.visibility, invalid=array("q"))))
