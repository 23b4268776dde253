"""What a pass knows before it begins: topics, how far each may go, and what is in scope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from janitor.rules.frontier import admit, stand_still
from janitor.rules.policy import Frontier, Hold
from janitor.state.base import ClockAnchor, FrontierRecord
from janitor.sweep.run import PlanLimits, Run, Terms
from janitor.sweep.transactions import TransactionView
from tests.builders import LIFETIME, NOW_MS, Topic, prepared, topic, unknown_topic
from tms_core.tables.base import KeyRange
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
    """A store with the topic of orders, whose rows live a minute."""
    store = MemoryStore()
    topic(store, str(ORDERS), ttl_seconds=60)
    return store


# --- topics ----------------------------------------------------------------------------------------------------------


def test_given_a_store_when_loaded_then_each_topic_is_known_with_what_it_was_read_from(store: MemoryStore) -> None:
    topic(store, str(RETURNS), ttl_seconds=90, generation=-2)
    run = make(store)
    run.load_topics()
    assert set(run.topics) == {ORDERS.prefix, RETURNS.prefix}
    work = run.topics[RETURNS.prefix]
    assert (work.topic, work.raw) == (metadata(RETURNS, 90, -2), store.metadata.get(RETURNS.prefix))
    assert run.unparsed == {}


def test_l1_given_metadata_that_does_not_parse_when_loaded_then_the_topic_is_unknown_and_the_reason_is_kept(
    store: MemoryStore,
) -> None:
    unknown_topic(store, str(RETURNS)).write_metadata(b'{"generation":"1"}')
    store.metadata.compare_and_set(b"not a topic", None, encode_properties({"generation": "1", "ttl": "60"}))
    run = make(store)
    run.load_topics()
    assert set(run.topics) == {ORDERS.prefix}
    assert set(run.unparsed) == {RETURNS.prefix, b"not a topic"}
    assert "ttl None" in run.unparsed[RETURNS.prefix]


# --- how far each may go ---------------------------------------------------------------------------------------------


def test_given_a_remembered_frontier_when_loaded_then_the_topic_advances_from_it(store: MemoryStore) -> None:
    record = admit(metadata(ORDERS, 3600), NOW)
    run = make(store, records={ORDERS: record})
    run.load_topics()
    work = run.topics[ORDERS.prefix]
    assert (work.frontier.hold, work.frontier.cutoff.ms) == (Hold.FRONTIER, NOW_MS - 3_600_000)
    assert work.record.pending is not None


@pytest.mark.parametrize(
    ("ahead_ms", "hold"), [(LIFETIME.allowance_ms, None), (LIFETIME.allowance_ms + 1, Hold.FRONTIER)]
)
def test_given_the_settings_allowance_when_a_cutoff_is_ahead_then_it_is_measured_by_it(
    store: MemoryStore, ahead_ms: int, hold: Hold | None
) -> None:
    record = replace(admit(metadata(ORDERS), NOW), cutoff_ms=NOW_MS - 60_000 - ahead_ms)
    run = make(store, records={ORDERS: record})
    run.load_topics()
    assert run.topics[ORDERS.prefix].frontier.hold is hold


@pytest.mark.parametrize("label", [None, Hold.FIRST_CONTACT])
@pytest.mark.parametrize("protect", [(), ("*",)])
def test_given_a_moment_that_is_not_the_clocks_when_loaded_then_rows_are_judged_by_it(
    store: MemoryStore, protect: tuple[str, ...], label: Hold | None
) -> None:
    run = make(store, protect=protect, label=label, records={ORDERS: admit(metadata(ORDERS), NOW)})
    run = replace(run, transactions=replace(run.transactions, now_ms=NOW_MS - 5000))
    run.load_topics()
    work = run.topics[ORDERS.prefix]
    assert (work.frontier.now_ms, work.frontier.due.ms) == (NOW_MS - 5000, NOW_MS - 65_000)
    assert work.record.at == NOW


def test_given_a_topic_never_seen_when_loaded_then_it_is_held_as_long_as_the_settings_say(store: MemoryStore) -> None:
    run = make(store)
    run.load_topics()
    assert run.topics[ORDERS.prefix].frontier.hold is Hold.FRONTIER
    run = replace(run, terms=replace(TERMS, hold_seconds=0))
    run.load_topics()
    assert run.topics[ORDERS.prefix].frontier == Frontier.open(NOW_MS, metadata(ORDERS))


def test_given_a_protected_topic_when_loaded_then_it_is_closed_and_its_frontier_stands_still(
    store: MemoryStore,
) -> None:
    record = replace(admit(metadata(ORDERS), NOW), at=replace(NOW, wall_ms=NOW_MS - 5000))
    run = make(store, protect=("default:ord*",), records={ORDERS: record})
    run.load_topics()
    work = run.topics[ORDERS.prefix]
    assert work.frontier == Frontier.closed(NOW_MS, metadata(ORDERS), Hold.PROTECTED)
    assert work.record == stand_still(record, NOW)


def test_given_a_first_contact_when_loaded_then_all_that_is_due_may_go_but_for_protected_topics(
    store: MemoryStore,
) -> None:
    topic(store, str(RETURNS), ttl_seconds=60)
    run = make(store, protect=(str(RETURNS),), label=Hold.FIRST_CONTACT)
    run.load_topics()
    assert run.topics[ORDERS.prefix].frontier == Frontier.open(NOW_MS, metadata(ORDERS))
    assert run.topics[ORDERS.prefix].record == admit(metadata(ORDERS), NOW)
    assert run.topics[RETURNS.prefix].frontier.hold is Hold.PROTECTED
    assert run.topics[RETURNS.prefix].record == stand_still(None, NOW)


# --- reading again (S2) ----------------------------------------------------------------------------------------------


def _deleted(orders: Topic) -> None:
    orders.describe(ttl_seconds=60, generation=-1)


def _broken(orders: Topic) -> None:
    orders.write_metadata(b"{")


@pytest.mark.parametrize(("change", "generation"), [(_deleted, -1), (_broken, None)])
def test_s2_given_metadata_that_moved_when_read_again_then_the_topic_is_what_it_says_now(
    store: MemoryStore, change: Callable[[Topic], None], generation: int | None
) -> None:
    run = make(store)
    run.load_topics()
    change(unknown_topic(store, str(ORDERS)))
    assert run.topics[ORDERS.prefix].topic.generation == 1
    run.reread(ORDERS.prefix)
    work = run.topics.get(ORDERS.prefix)
    assert (work and work.topic.generation) == generation
    assert (ORDERS.prefix in run.unparsed) is (generation is None)


def test_s2_given_metadata_that_is_gone_when_read_again_then_the_topic_is_unknown(store: MemoryStore) -> None:
    run = make(store)
    run.load_topics()
    run = replace(run, store=MemoryStore())
    run.reread(ORDERS.prefix)
    assert (run.topics, run.unparsed) == ({}, {})


# --- scope, protection, limits ---------------------------------------------------------------------------------------


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
def test_given_a_shell_pattern_when_it_fits_the_whole_name_then_the_topic_matches(pattern: str, fits: bool) -> None:
    assert ORDERS.matches((pattern,)) is fits
    assert ORDERS.matches(("x:y", pattern)) is fits
    assert replace(TERMS, protect=(pattern,)).protects(ORDERS) is fits


def test_given_no_patterns_when_asked_then_nothing_matches_and_everything_is_in_scope(store: MemoryStore) -> None:
    assert not ORDERS.matches(())
    assert make(store).in_scope(b"whatever")


def test_given_patterns_when_asked_then_only_topics_that_fit_are_in_scope(store: MemoryStore) -> None:
    run = make(store, patterns=("default:o*",))
    assert run.in_scope(ORDERS.prefix)
    assert not run.in_scope(RETURNS.prefix)
    assert not make(store, patterns=("*",)).in_scope(b"not a topic")


def test_given_a_plans_limits_when_asked_then_each_table_and_topic_has_its_own() -> None:
    piece = KeyRange(b"a", b"b")
    limits = PlanLimits({("message", ORDERS): (piece,)}, {})
    assert limits.ranges("message", ORDERS) == (piece,)
    assert limits.ranges("payload", ORDERS) == limits.ranges("message", RETURNS) == ()
