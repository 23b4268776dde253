"""The number of messages before and after a plan or a run."""

from __future__ import annotations

import pytest

from janitor.rules.policy import Reason
from janitor.run.passes import LEDGER_ENTRIES, MESSAGES_MS
from janitor.state.records import NOT_COUNTED, MessagesLeft
from janitor.stats.topic_sizes import TopicSizeCounter
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, Call, Kit, Topic, janitor, topic, unknown_topic, watch
from tests.janitor.state.entries import entry
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

OTHER = TopicId("default", "other")


@pytest.fixture
def store() -> MemoryStore:
    """Return a store in which three of five messages of one topic are due, and none of another topic."""
    store = MemoryStore()
    topic(store, "default:other", ttl_seconds=86400).plain(NOW_MS - HOUR)
    topic(store, "default:orders", ttl_seconds=3600).plain(
        *(NOW_MS - 2 * HOUR + n for n in range(3)), NOW_MS - 1, NOW_MS
    )
    return store


def with_counts(kit: Kit, age_ms: int = 20 * SECOND) -> Kit:
    """Save counts of the topics with this age; return the janitor."""
    TopicSizeCounter(kit.store, kit.state, kit.clock, rows_per_second=1_000_000).step()
    kit.clock.advance(age_ms)
    return kit


def test_plan_and_run_with_counts_report_the_messages_left(store: MemoryStore) -> None:
    kit = with_counts(janitor(store))
    expected = MessagesLeft(6, 3, NOW_MS)
    assert kit.engine.plan().report.messages == expected
    assert kit.engine.run_once(adopt=True).messages == expected
    assert kit.engine.run_once().messages == NOT_COUNTED, "no row was deleted"


def test_messages_left_of_some_topics_need_only_their_counts(store: MemoryStore) -> None:
    kit = with_counts(janitor(store))
    kit.state.save_counts({OTHER: None})
    assert kit.engine.plan().report.messages == NOT_COUNTED
    assert kit.engine.plan(patterns=("default:orders",)).report.messages == MessagesLeft(5, 2, NOW_MS)


def test_messages_left_of_a_swept_topic_need_a_new_count(store: MemoryStore) -> None:
    kit = with_counts(janitor(store))
    kit.engine.run_once(adopt=True)
    kit.clock.advance(2 * HOUR)
    assert kit.engine.plan().report.messages == NOT_COUNTED
    assert with_counts(kit).engine.plan().report.messages == MessagesLeft(3, 1, NOW_MS + 2 * HOUR + 20 * SECOND)


def test_plan_with_a_ledger_shorter_than_the_counts_reports_no_messages(store: MemoryStore) -> None:
    kit = with_counts(janitor(store))
    elsewhere = entry(topic=OTHER, at_ms=NOW_MS - MINUTE)
    kit.state.add_ledger([elsewhere] * LEDGER_ENTRIES)
    assert kit.engine.plan().report.messages == MessagesLeft(6, 3, NOW_MS)
    gone = entry(topic=TopicId("default", "gone"), at_ms=NOW_MS + 1)
    kit.state.add_ledger([gone] * LEDGER_ENTRIES)
    assert kit.engine.plan().report.messages == NOT_COUNTED


@pytest.mark.parametrize(("age_ms", "known"), [(MESSAGES_MS, True), (MESSAGES_MS + 1, False), (-DAY, False)])
def test_messages_left_by_a_wrong_count_is_unknown(store: MemoryStore, age_ms: int, known: bool) -> None:
    kit = with_counts(janitor(store), 0)
    kit.clock.step(age_ms) if age_ms < 0 else kit.clock.advance(age_ms)
    assert (kit.engine.plan(patterns=("default:orders",)).report.messages != NOT_COUNTED) is known


def test_messages_left_with_old_generations_add_deleted_topics(store: MemoryStore) -> None:
    topic(store, "default:retired", ttl_seconds=3600).plain(NOW_MS - 1, NOW_MS)
    kit = with_counts(janitor(store))
    topic(store, "default:retired", ttl_seconds=3600, generation=-1)
    assert kit.engine.plan().report.messages == MessagesLeft(8, 3, NOW_MS)
    topic(store, "default:orders", ttl_seconds=3600, generation=2)
    assert kit.engine.plan().report.messages == NOT_COUNTED


def test_run_does_not_count_a_topic_created_during_it_as_unknown() -> None:
    store = MemoryStore()
    topic(store, "default:a", ttl_seconds=3600).plain(NOW_MS)
    unknown_topic(store, "default:z").plain(NOW_MS)
    kit = janitor(store)
    created: list[Topic] = []

    def create(call: Call) -> None:
        if call.name == "message.keys" and not created:
            created.append(topic(store, "default:b", ttl_seconds=3600))
            created[0].plain(NOW_MS, NOW_MS + 1)

    watch(store, before=create)
    assert kit.engine.run_once(adopt=True).totals.kept[Reason.UNKNOWN_TOPIC] == 1, "only that of default:z"
    assert len(created[0].times()) == 2
