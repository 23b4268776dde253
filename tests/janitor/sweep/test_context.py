"""The data of a pass before it starts: topics, frontiers and scope."""

from __future__ import annotations

from dataclasses import replace

import pytest

from janitor.rules.policy import Hold, admit
from janitor.state.base import ClockAnchor, FrontierRecord
from janitor.sweep.run import Run, Terms
from janitor.sweep.transactions import TransactionView
from tests.builders import LIFETIME, NOW_MS, prepared, topic, unknown_topic
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId, TopicMetadata, encode_properties

NOW = ClockAnchor(NOW_MS, 1000, "boot")
ORDERS, RETURNS = TopicId("default", "orders"), TopicId("default", "returns")
TERMS = Terms(3600, (), LIFETIME, lifetime_known=True, snapshot_interval_seconds=60)


def metadata(topic_id: TopicId, ttl_seconds: int = 60, generation: int = 1) -> TopicMetadata:
    return TopicMetadata(topic_id, generation, ttl_seconds)


def make(
    store: MemoryStore,
    *,
    protect: tuple[str, ...] = (),
    label: Hold | None = None,
    patterns: tuple[str, ...] = (),
    records: dict[TopicId, FrontierRecord] | None = None,
) -> Run:
    transactions = TransactionView(None, NOW_MS, LIFETIME.undecided_ms)
    terms = replace(TERMS, protect=protect)
    return Run(
        store,
        terms,
        transactions,
        records or {},
        replace(prepared(store), now=NOW, measured=NOW),
        label=label,
        patterns=patterns,
    )


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    topic(store, str(ORDERS), ttl_seconds=60)
    return store


def test_l1_unreadable_metadata_makes_the_topic_unknown(store: MemoryStore) -> None:
    unknown_topic(store, str(RETURNS)).write_metadata(b'{"generation":"1"}')
    store.metadata.compare_and_set(b"not a topic", None, encode_properties({"generation": "1", "ttl": "60"}))
    run = make(store)
    run.load_topics()
    assert set(run.topics) == {ORDERS.prefix}
    assert set(run.unparsed) == {RETURNS.prefix, b"not a topic"}
    assert "ttl None" in run.unparsed[RETURNS.prefix]


@pytest.mark.parametrize("label", [None, Hold.FIRST_CONTACT])
@pytest.mark.parametrize("protect", [(), ("*",)])
def test_load_topics_judges_by_the_given_time(store: MemoryStore, protect: tuple[str, ...], label: Hold | None) -> None:
    run = make(store, protect=protect, label=label, records={ORDERS: admit(metadata(ORDERS), NOW)})
    run = replace(run, transactions=replace(run.transactions, now_ms=NOW_MS - 5000))
    run.load_topics()
    work = run.topics[ORDERS.prefix]
    assert (work.frontier.now_ms, work.frontier.due.ms) == (NOW_MS - 5000, NOW_MS - 65_000)
    assert work.record.at == NOW


@pytest.mark.parametrize(
    ("ahead_ms", "hold"), [(LIFETIME.allowance_ms, None), (LIFETIME.allowance_ms + 1, Hold.FRONTIER)]
)
def test_load_topics_holds_only_a_jump_above_the_clock_allowance(
    store: MemoryStore, ahead_ms: int, hold: Hold | None
) -> None:
    record = replace(admit(metadata(ORDERS), NOW), cutoff_ms=NOW_MS - 60_000 - ahead_ms)
    run = make(store, records={ORDERS: record})
    run.load_topics()
    assert run.topics[ORDERS.prefix].frontier.hold is hold


def test_s2_unreadable_metadata_read_again_makes_the_topic_unknown(store: MemoryStore) -> None:
    run = make(store)
    run.load_topics()
    unknown_topic(store, str(ORDERS)).write_metadata(b"{")
    run.reread(ORDERS.prefix)
    assert (run.topics, set(run.unparsed)) == ({}, {ORDERS.prefix})


def test_scope_of_patterns_has_only_topics_that_fit(store: MemoryStore) -> None:
    prefixes = (ORDERS.prefix, RETURNS.prefix, b"not a topic")
    assert [make(store, patterns=("*:o*",)).in_scope(prefix) for prefix in prefixes] == [True, False, False]
    assert all(make(store).in_scope(prefix) for prefix in prefixes)


def test_s2_missing_metadata_read_again_makes_the_topic_unknown(store: MemoryStore) -> None:
    run = make(store)
    run.load_topics()
    run = replace(run, store=MemoryStore())
    run.reread(ORDERS.prefix)
    assert (run.topics, run.unparsed) == ({}, {})


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("default:orders", True),
        ("default:*", True),
        ("*:orders", True),
        ("default:order?", True),
        ("default:order", False),
        ("orders", False),
        ("DEFAULT:orders", False),
        ("default:[a-n]*", False),
    ],
)
def test_topic_matches_a_pattern_of_its_whole_name(pattern: str, fits: bool) -> None:
    assert ORDERS.matches((pattern,)) is fits
    assert ORDERS.matches(("x:y", pattern)) is fits
    assert replace(TERMS, protect=(pattern,)).protects(ORDERS) is fits
