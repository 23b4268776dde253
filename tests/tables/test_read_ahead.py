"""Reading keys ahead: the same results as the table, with few calls for small topics."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.report import Report
from janitor.rules.policy import Rule
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Call, Kit, Topic, janitor, pointer, topic, watch
from tests.support import record_calls
from tms_core.errors import StoreError, StoreUnavailable
from tms_core.tables.base import CELLS, KEYS, MESSAGES, MessageValue, Origin, Page, Projection, TxCell
from tms_core.tables.memory import MemoryMessageTable, MemoryPayloadTable, MemoryStore
from tms_core.tables.read_ahead import ReadAhead

T = TypeVar("T")

KEYS_PER_CALL = 100


class ExpensiveMessages(MemoryMessageTable):
    """A table with expensive calls, some of whose rows may be unreadable."""

    keys_per_call = KEYS_PER_CALL
    broken: bytes | None = None

    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        page: Page[Any] = super().read(want, start, stop, limit)
        if self.broken in [item if isinstance(item, bytes) else item[0] for item in page.items]:
            raise StoreUnavailable("a row cannot be read")
        return page


class ExpensivePayloads(MemoryPayloadTable):
    keys_per_call = KEYS_PER_CALL


class ExpensiveStore(MemoryStore):
    """A store in memory with expensive calls, like HBase."""

    message: ExpensiveMessages

    def __init__(self, *, expensive: bool = True) -> None:
        super().__init__()
        if expensive:
            self.message = ExpensiveMessages(self.calls)
            self.payload = ExpensivePayloads(self.calls)


def ahead_of(store: ExpensiveStore, most_keys: int = 1000) -> ReadAhead:
    return ReadAhead(store.message, most_keys)


def filled(keys: list[bytes]) -> ExpensiveStore:
    store = ExpensiveStore()
    store.message.put([(key, MessageValue(number or None, b"")) for number, key in enumerate(keys)])
    return store


def all_of(read: Any, start: bytes, stop: bytes | None, limit: int) -> list[Any]:
    found: list[Any] = []
    resume: bytes | None = start
    while resume is not None and (stop is None or resume < stop):
        page = read(resume, stop, limit)
        assert len(page.items) <= limit or isinstance(page.items[0], TxCell)
        found += page.items
        resume = page.resume
    return found


ANY_KEYS = st.binary(min_size=1, max_size=2)


@given(
    st.lists(ANY_KEYS, unique=True, max_size=60),
    st.lists(st.tuples(st.sampled_from(["first", "keys", "cells"]), ANY_KEYS, ANY_KEYS | st.none()), max_size=20),
    st.integers(1, 70),
    st.integers(1, 5),
)
def test_read_ahead_returns_the_same_rows_as_the_table(
    keys: list[bytes], questions: list[tuple[str, bytes, bytes | None]], most_keys: int, limit: int
) -> None:
    store = filled(keys)
    ahead = ahead_of(store, most_keys)
    for kind, start, stop in sorted(questions, key=lambda question: question[1]):
        if kind == "first":
            assert ahead.first(start) == store.message.first(start)
        elif stop is None or start < stop:
            want: Projection[Any] = KEYS if kind == "keys" else CELLS
            mine, its = partial(ahead.read, want), partial(store.message.read, want)
            assert all_of(mine, start, stop, limit) == all_of(its, start, stop, limit)


def test_read_ahead_of_small_steps_grows() -> None:
    store = filled([b"%05d" % number for number in range(5000)])
    ahead = ahead_of(store)
    for number in range(5000):
        assert ahead.first(b"%05d" % number) == b"%05d" % number
    assert store.calls["keys"] < 15
    assert ahead.take_spared() == 5000 - store.calls["keys"]


def test_read_ahead_of_large_steps_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled([b"%05d" % number for number in range(5000)])
    ahead = ahead_of(store)
    reads = record_calls(monkeypatch, store.message, "read")
    for number in range(0, 5000, 500):
        ahead.first(b"%05d" % number)
    assert [limit for *_, limit in reads] == [KEYS_PER_CALL // 4] * 10
    assert ahead.take_spared() == 0


def test_read_ahead_of_medium_ranges_needs_few_calls() -> None:
    store = filled([b"%03d%03d" % (topic, number) for topic in range(100) for number in range(300)])
    ahead = ahead_of(store, 2000)
    store.calls.clear()
    key, found = ahead.first(b""), 0
    while key is not None:
        stop = b"%s999" % key[:3]
        found += len(ahead.read(KEYS, key, stop, 2000).items)
        key = ahead.first(stop)
    assert found == 100 * 300
    # Besides the pages, one read at the start finds nothing, and a page may end within a range.
    assert store.calls["keys"] < 50


def test_read_ahead_of_a_broken_row_fails_only_at_that_row() -> None:
    store = filled([b"a", b"b", b"c"])
    store.message.broken = b"c"
    ahead = ahead_of(store)
    assert (ahead.first(b"a"), ahead.first(b"b")) == (b"a", b"b")
    with pytest.raises(StoreError):
        ahead.first(b"c")
    store.message.broken = None
    assert ahead.first(b"a") == b"a"
    store.message.broken = b"c"
    assert [cell.key for cell in ahead.read(CELLS, b"b", b"c", 10).items] == [b"b"]
    with pytest.raises(StoreError):
        ahead.read(CELLS, b"c", None, 10)


def small_topics(store: MemoryStore, number: int) -> list[Topic]:
    """Create topics of four rows each: two expired, one of an invalid transaction."""
    topics = [topic(store, f"default:t{one:04d}", ttl_seconds=3600) for one in range(number)]
    for each in topics:
        each.plain(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 1, NOW_MS - MINUTE).tx(INVALID, NOW_MS - MINUTE + 1)
        each.stored(FREE, NOW_MS - 2 * HOUR)
    return topics


INVALID, FREE = pointer(NOW_MS - DAY), pointer(NOW_MS - 2 * HOUR)


def sweep(store: MemoryStore) -> tuple[Kit, Report]:
    kit = janitor(store, invalid=[INVALID])
    return kit, kit.engine.run_once(adopt=True)


@pytest.mark.no_cover
def test_sweep_of_many_small_topics_reads_ahead_and_reports_it() -> None:
    store, cheap = ExpensiveStore(), ExpensiveStore(expensive=False)
    for each in (store, cheap):
        small_topics(each, 500)
        each.calls.clear()
    (_, report), (_, plain) = sweep(store), sweep(cheap)
    assert report.topics == plain.topics
    assert report.total(Rule.EXPIRED) == 500 * 3
    assert report.total(Rule.INVALID_TRANSACTION) == 500
    assert store.message.read(MESSAGES, b"", None, 10_000) == cheap.message.read(MESSAGES, b"", None, 10_000)
    assert plain.seeks_spared == 0
    assert plain.seeks_spared == 0
    reads = ("keys", "cells")
    # Two calls a topic look for messages that need its payloads.
    assert sum(cheap.calls[name] for name in reads) > 500 * 6
    assert sum(store.calls[name] for name in reads) < 500 * 2 + 100
    assert report.seeks_spared > 500 * 4
    assert report.store_calls < plain.store_calls


def test_sweep_finds_rows_published_between_two_steps() -> None:
    store = ExpensiveStore()
    topic(store, "default:orders", ttl_seconds=3600).plain(NOW_MS - 2 * HOUR)
    late = topic(store, "default:late", ttl_seconds=3600)
    delete = store.message.delete

    def publish_after_delete(keys: list[bytes], origin: Origin | None) -> None:
        delete(keys, origin)
        late.tx(INVALID, NOW_MS - MINUTE).stored(FREE, NOW_MS - 2 * HOUR)

    vars(store.message)["delete"] = publish_after_delete
    _, report = sweep(store)
    assert late.pointers() == [-INVALID]
    assert late.stored_times() == []
    assert report.errors == []


def test_sweep_counts_each_row_once_if_topic_changes_during_read_ahead() -> None:
    store = ExpensiveStore()
    orders = topic(store, "default:orders", ttl_seconds=3600)
    orders.plain(*range(NOW_MS - 3 * HOUR, NOW_MS - 3 * HOUR + 12))
    deletes: list[int] = []

    def move(call: Call) -> None:
        deletes.append(len(call.arguments[0]))
        if len(deletes) == 1:
            orders.describe(ttl_seconds=7200)

    watch(store, after=lambda call: move(call) if call.name == "message.delete" else None)
    report = janitor(store, batch_rows=5).engine.run_once(adopt=True)
    assert report.errors == []
    assert (report.total(Rule.EXPIRED), sum(deletes), orders.times()) == (12, 12, [])
