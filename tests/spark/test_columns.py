"""The deletion rules on columns: the same verdict as ``decide`` for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janitor.report import DataTable
from janitor.rules.policy import Delete, Frontier, Hold, Invert, Keep, Row, Rule, decide
from janitor.spark.columns import ACTIONS, RULES, Decisions, Pointers, Policy, split
from janitor.sweep.transactions import TransactionView
from tests.builders import visibility
from tests.janitor.rules.test_differential import LIFETIME, LONG_MAX, Scene, scenes
from tms_core.rowkey import Cutoff, MessageKey, PayloadKey
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import VisibilityState


def policy(scene: Scene) -> Policy:
    topics: dict[TopicId, tuple[TopicMetadata, Frontier]] = {}
    for key in scene.metadata:
        topic = TopicId.from_prefix(key)
        assert topic is not None
        metadata, frontier = scene.topic(topic)
        if metadata is not None and frontier is not None:
            topics[topic] = (metadata, frontier)
    return Policy(topics, TransactionView(scene.snapshot, scene.now_ms, LIFETIME.undecided_ms))


def words(verdicts: Decisions) -> list[tuple[str, str]]:
    return [(ACTIONS[action], RULES[rule]) for action, rule in zip(verdicts.action, verdicts.rule, strict=True)]


def verdict(rules: Policy, row: Row, expires_ms: int | None = None) -> tuple[str, str]:
    """Return the verdict of ``decide`` in the terms of columns, with both answers to L5."""
    topic, frontier = rules.topics.get(row.key.topic, (None, None)) if row.key else (None, None)
    free, needed = (
        decide(row, topic, frontier, rules.transactions, referenced, expires_ms) for referenced in (False, True)
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


@settings(max_examples=50)
@given(scenes(), st.data())
def test_verdicts_of_random_messages_as_columns_match_decide(scene: Scene, data: st.DataObject) -> None:
    rules, keys = policy(scene), sorted(scene.messages)
    never = [scene.now_ms - 1, scene.now_ms, scene.now_ms + 1, 0, LONG_MAX]
    expires = [data.draw(st.sampled_from(never)) for _ in keys]
    values = [scene.messages[key].pointer for key in keys]
    rows = split("message", keys)
    judged = rules.judge("message", rows, pointers_of(values), np.array(expires, dtype=np.int64))
    wanted = [
        verdict(rules, Row("message", MessageKey.parse(key), pointer), None if expires_ms == LONG_MAX else expires_ms)
        for key, pointer, expires_ms in zip(keys, values, expires, strict=True)
    ]
    assert words(judged) == wanted


@pytest.mark.no_cover
@settings(max_examples=50)
@given(scenes())
def test_verdicts_of_random_payloads_as_columns_match_decide(scene: Scene) -> None:
    rules, keys = policy(scene), sorted(scene.payloads)
    judged = rules.judge("payload", split("payload", keys))
    assert words(judged) == [verdict(rules, Row("payload", PayloadKey.parse(key))) for key in keys]


@settings(max_examples=50)
@given(scenes())
def test_split_of_random_keys_matches_parsed_keys(scene: Scene) -> None:
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


def test_judge_without_keys_returns_no_verdicts() -> None:
    rules = policy(Scene(0))
    assert words(rules.judge("message", split("message", []))) == []


NOW, TTL, CUTOFF, HELD_AT = 1_700_000_000_000, 3600, 1_700_000_000_000 - 3_600_000, 1_700_000_000_000 - 7_200_000
TOPIC = TopicId("default", "events")
DOOMED, OPEN, NEWEST = 5_000_000, 6_000_000, NOW * 10**6
GENERATIONS = (-(2**31), -1, 0, 1, 2, 3, 4, 2**31 - 1)
TIMES = (-(2**63), -1, 0, *(at + step for at in (HELD_AT, CUTOFF, NOW) for step in (-1, 0, 1)), LONG_MAX)
POINTERS = (None, -(2**63), -DOOMED, 0, DOOMED, OPEN, (NOW - 90_300_000) * 10**6, NEWEST, NEWEST + 1, LONG_MAX)
SNAPSHOT = visibility(NOW, [DOOMED], [OPEN], NEWEST)


def frontiers(topic: TopicMetadata) -> list[Frontier]:
    """Return frontiers: open, held, held in an earlier generation, and closed."""
    rules = Frontier.open(NOW, topic)
    lagging = replace(rules, cutoff=Cutoff(HELD_AT), hold=Hold.FRONTIER)
    return [rules, lagging, replace(lagging, generation=2), Frontier.closed(NOW, topic, Hold.PAUSED)]


@pytest.mark.parametrize("snapshot", [None, SNAPSHOT])
@pytest.mark.parametrize("generation", [3, -3])
def test_verdicts_at_every_boundary_match_decide(generation: int, snapshot: VisibilityState | None) -> None:
    topic = TopicMetadata(TOPIC, generation, TTL)
    view = TransactionView(snapshot, NOW, LIFETIME.undecided_ms)
    for frontier in frontiers(topic):
        rules = Policy({TOPIC: (topic, frontier)}, view)
        messages = sorted(
            (MessageKey(TOPIC, *numbers, 0).pack(), pointer, expires_ms)
            for numbers, pointer, expires_ms in product(
                product(GENERATIONS, TIMES), (pointer or 0 for pointer in POINTERS), (NOW - 1, NOW, NOW + 1, LONG_MAX)
            )
        )
        keys = [key for key, _, _ in messages]
        pointers = pointers_of([pointer for _, pointer, _ in messages])
        expires = np.array([expires_ms for _, _, expires_ms in messages], dtype=np.int64)
        judged = words(rules.judge("message", split("message", keys), pointers, expires))
        assert judged == [
            verdict(
                rules, Row("message", MessageKey.parse(key), pointer), None if expires_ms == LONG_MAX else expires_ms
            )
            for key, pointer, expires_ms in messages
        ]
        stored = sorted(
            PayloadKey(TOPIC, row, pointer or 0, ms, 0).pack()
            for row, pointer, ms in product(GENERATIONS, POINTERS, TIMES)
        )
        judged = words(rules.judge("payload", split("payload", stored)))
        assert judged == [verdict(rules, Row("payload", PayloadKey.parse(key))) for key in stored]
