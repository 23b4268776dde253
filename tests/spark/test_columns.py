"""The law over columns says of every row what ``decide`` says of it by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from janitor.policy import Delete, Frontier, Invert, Keep, Row, Rule, decide
from janitor.spark.columns import ACTIONS, RULES, DataTable, Pointers, Policy, Verdicts, split
from janitor.txstate import TransactionView
from tests.janitor.test_differential import LIFETIME, LONG_MAX, Scene, scenes
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.topic import TopicId, TopicMetadata


def policy(scene: Scene) -> Policy:
    topics: dict[TopicId, tuple[TopicMetadata, Frontier]] = {}
    for key in scene.metadata:
        topic = TopicId.from_prefix(key)
        assert topic is not None
        metadata, frontier = scene.topic(topic)
        if metadata is not None and frontier is not None:
            topics[topic] = (metadata, frontier)
    return Policy(topics, TransactionView(scene.snapshot, scene.now_ms, LIFETIME.undecided_ms))


def words(verdicts: Verdicts) -> list[tuple[str, str]]:
    return [(ACTIONS[action], RULES[rule]) for action, rule in zip(verdicts.action, verdicts.rule, strict=True)]


def said(law: Policy, row: Row, expires_ms: int | None = None) -> tuple[str, str]:
    """What ``decide`` says, in the words of the columns; both answers to L5's question, where it is asked."""
    topic, frontier = law.topics.get(row.key.topic, (None, None)) if row.key else (None, None)
    free, needed = (
        decide(row, topic, frontier, law.transactions, referenced, expires_ms) for referenced in (False, True)
    )
    if free != needed:
        assert isinstance(free, Delete)
        return "candidate", str(free.rule)
    match free:
        case Keep(reason):
            return "keep", str(reason)
        case Delete(rule):
            return "delete", str(rule)
        case Invert():
            return "invert", str(Rule.INVALID_TRANSACTION)


def pointers_of(values: Sequence[int | None]) -> Pointers:
    value = np.array([0 if pointer is None else pointer for pointer in values], dtype=np.int64)
    return Pointers(value, np.array([pointer is not None for pointer in values], dtype=np.bool_))


@given(scenes(), st.data())
def test_given_random_messages_when_judged_as_columns_then_each_verdict_is_the_laws(
    scene: Scene, data: st.DataObject
) -> None:
    law, keys = policy(scene), sorted(scene.messages)
    never = [scene.now_ms - 1, scene.now_ms, scene.now_ms + 1, 0, LONG_MAX]
    expires = [data.draw(st.sampled_from(never)) for _ in keys]
    values = [scene.messages[key].pointer for key in keys]
    rows = split("message", keys)
    judged = law.judge("message", rows, pointers_of(values), np.array(expires, dtype=np.int64))
    wanted = [
        said(law, Row("message", MessageKey.parse(key), pointer), None if expires_ms == LONG_MAX else expires_ms)
        for key, pointer, expires_ms in zip(keys, values, expires, strict=True)
    ]
    assert words(judged) == wanted


@given(scenes())
def test_given_random_payloads_when_judged_as_columns_then_each_verdict_is_the_laws(scene: Scene) -> None:
    law, keys = policy(scene), sorted(scene.payloads)
    judged = law.judge("payload", split("payload", keys))
    assert words(judged) == [said(law, Row("payload", PayloadKey.parse(key))) for key in keys]


@given(scenes())
def test_given_random_keys_when_taken_apart_then_every_number_is_that_of_the_key(scene: Scene) -> None:
    tables: list[tuple[DataTable, list[bytes]]] = [
        ("message", sorted(scene.messages)),
        ("payload", sorted(scene.payloads)),
    ]
    for table, keys in tables:
        rows = split(table, keys)
        for at, key in enumerate(keys):
            parsed = MessageKey.parse(key) if table == "message" else PayloadKey.parse(key)
            if parsed is None:
                assert rows.topic[at] == -1
                continue
            assert rows.topics[rows.topic[at]] == parsed.topic
            numbers = (rows.generation[at], rows.time_ms[at], rows.sequence[at])
            assert numbers == (parsed.generation, parsed.time_ms, parsed.sequence)
            assert rows.pointer[at] == (parsed.write_pointer if isinstance(parsed, PayloadKey) else 0)


def test_given_no_keys_when_judged_then_there_are_no_verdicts() -> None:
    law = policy(Scene(0))
    assert words(law.judge("message", split("message", []))) == []
