"""The ledger: exact ranges, numbers of rows, rules, policies and runs of deletions."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from janitor.rules.policy import Frontier, Rule, admit
from janitor.run.plan_file import parse
from janitor.state.base import ClockAnchor, LedgerEntry
from janitor.sweep.findings import Batch, Done, Due
from janitor.sweep.outcome import Ledger, Outcome, open_announcements
from janitor.sweep.run import TopicWork
from tests.builders import (
    DAY,
    HOUR,
    MINUTE,
    NOW_MS,
    Call,
    Kit,
    ProcessKilled,
    Topic,
    fail_at,
    janitor,
    pointer,
    topic,
    unknown_topic,
    watch,
    watch_state,
)
from tests.janitor.state.entries import entry
from tms_core.errors import StateBusy, StateError, StoreError
from tms_core.rowkey import MessageKey, PayloadKey, generation_prefix, time_prefix
from tms_core.tables.base import KEYS, MESSAGES, Store
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId, TopicMetadata

TTL_SECONDS = 86400
INVALID = pointer(NOW_MS - 10 * HOUR)
OTHER = pointer(NOW_MS - 9 * HOUR)
#: Upper limit of store calls of each sweep below.
CALLS = 300
#: Counters of deleted and inverted rows.
COUNTED = ("rows_deleted_total", "rows_inverted_total")


class Subject(NamedTuple):
    topic: str
    generation: int
    table: str
    rule: str


def fill(store: Store) -> Topic:
    """Store rows of every fate."""
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS, generation=3)
    due = [NOW_MS - 2 * DAY + number for number in range(5)]
    orders.plain(*due, NOW_MS).tx(INVALID, NOW_MS - 1, NOW_MS).stored(pointer(due[0]), *due).stored(
        OTHER, due[0], NOW_MS
    )
    orders.at(1).plain(NOW_MS, NOW_MS).stored(pointer(NOW_MS), NOW_MS)
    orders.at(2).plain(5, NOW_MS)
    topic(store, "default:gone", ttl_seconds=60, generation=-2).plain(1, NOW_MS).tx(INVALID, NOW_MS)
    unknown_topic(store, "default:stray").tx(INVALID, 7).tx(OTHER, 8)
    return orders


def filled(store: Store) -> Kit:
    """Return a janitor that has adopted a store with rows of every fate."""
    fill(store)
    return janitor(store, batch_rows=2, invalid=[INVALID, OTHER]).adopt()


@pytest.fixture
def kit(store: MemoryStore) -> Kit:
    return filled(store)


class DeletionSpy:
    """A watcher that records deleted and inverted keys by the subjects of their ledger entries."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.taken: dict[Subject, list[bytes]] = defaultdict(list)
        watch(store, before=self)

    def __call__(self, call: Call) -> None:
        table, _, operation = call.name.partition(".")
        if operation == "delete":
            for key in call.arguments[0]:
                self.taken[self.subject_of(table, key)].append(key)
        elif operation == "invert":
            for cell in call.arguments[0]:
                self.taken[self.subject_of(table, cell.key)._replace(rule="invalid_transaction")].append(cell.key)

    def subject_of(self, table: str, raw: bytes) -> Subject:
        key = MessageKey.parse(raw) if table == "message" else PayloadKey.parse(raw)
        assert key is not None
        current = {"default:orders": 3, "default:gone": 3}[str(key.topic)] if str(key.topic) != "default:stray" else 0
        rule = "old_generation" if key.generation < current else "expired"
        return Subject(str(key.topic), key.generation, table, rule)


def entries(kit: Kit, run_id: str | None = None) -> dict[Subject, LedgerEntry]:
    found = kit.state.ledger(1000, run_id=run_id)
    by_subject = {Subject(str(e.topic), e.generation, e.table, e.rule): e for e in found}
    assert len(by_subject) == len(found)
    return by_subject


def test_ledger_covers_exactly_the_keys_that_were_deleted(kit: Kit) -> None:
    spy = DeletionSpy(kit.store)
    report = kit.engine.run_once()
    found = entries(kit)
    assert set(found) == set(spy.taken)
    assert {about.rule for about in found} == {"expired", "old_generation", "invalid_transaction"}
    assert {about.table for about in found} == {"message", "payload"}
    for about, keys in spy.taken.items():
        entry = found[about]
        assert (entry.start, entry.stop, entry.rows) == (min(keys), max(keys) + b"\x00", len(keys))
        assert (entry.run_id, entry.at_ms) == (report.id, NOW_MS)
    assert sum(entry.rows or 0 for entry in found.values()) == sum(entry.rows for entry in report.topics)


def test_ledger_entry_names_its_policy_and_snapshot(kit: Kit) -> None:
    kit.snapshots.age_ms, kit.snapshots.write_pointer = 7, pointer(NOW_MS)
    kit.engine.run_once()
    expired = entries(kit)[Subject("default:orders", 3, "message", "expired")]
    assert (expired.oldest_ms, expired.newest_ms) == (NOW_MS - 2 * DAY, NOW_MS - 2 * DAY + 4)
    assert expired.snapshot_timestamp_ms == NOW_MS - 7
    assert entries(kit)[Subject("default:gone", 2, "message", "old_generation")].metadata_generation == -2


def test_ledger_of_an_applied_plan_has_deleted_rows_and_no_held_rows(kit: Kit) -> None:
    plan = parse(kit.engine.plan().document, "the plan")
    kit.restart(protect=("default:*",)).engine.run_once()
    assert {entry.rule for entry in kit.state.ledger(10)} == {"invalid_transaction"}
    spy = DeletionSpy(kit.store)
    report = kit.engine.apply(plan)
    found = {about: entry.rows for about, entry in entries(kit, report.id).items()}
    assert found == {about: len(keys) for about, keys in spy.taken.items()} != {}


def test_ledger_by_key_finds_the_entry_and_no_neighbour(kit: Kit) -> None:
    spy = DeletionSpy(kit.store)
    kit.engine.run_once()
    about = Subject("default:orders", 3, "message", "expired")
    keys, entry = sorted(spy.taken[about]), entries(kit)[about]
    for key in keys:
        assert kit.state.ledger(10, topic=entry.topic, key=key) == [entry]
    for beside in (keys[0][:-1], keys[-1] + b"\x00", keys[-1][:-1] + b"\xff"):
        assert entry not in kit.state.ledger(10, topic=entry.topic, key=beside)


def test_ttl_that_changes_in_a_sweep_makes_an_entry_for_each(kit: Kit) -> None:
    orders = topic(kit.store, "default:orders", ttl_seconds=TTL_SECONDS, generation=3)
    orders.plain(NOW_MS - DAY + 1)
    shorter = TTL_SECONDS - 60

    def shorten(call: Call) -> None:
        if call.name == "message.delete":
            orders.describe(ttl_seconds=shorter, generation=3)

    spy = DeletionSpy(kit.store)
    watch(kit.store, after=shorten)
    covers_at_announcement: list[bool] = []
    watch(kit.store, before=lambda call: covers_at_announcement.append(announced(kit, call)))
    kit.engine.run_once()
    assert NOW_MS - DAY + 1 not in orders.times()
    found = [e for e in kit.state.ledger(100) if e.topic == orders.id and e.generation == 3 and e.table == "message"]
    deleted = sorted(spy.taken[Subject("default:orders", 3, "message", "expired")])
    by_ttl = {entry.ttl_seconds: entry for entry in found if entry.rule == "expired"}
    assert set(by_ttl) <= {TTL_SECONDS, shorter}
    assert sum(entry.rows or 0 for entry in by_ttl.values()) == len(deleted)
    assert by_ttl[shorter].cutoff_ms == NOW_MS - shorter * 1000
    assert by_ttl[shorter].stop == deleted[-1] + b"\x00"
    assert all(covers_at_announcement)


def announced(kit: Kit, call: Call) -> bool:
    """Return whether all keys of a delete were announced."""
    if not call.name.endswith(".delete"):
        return True
    intents = kit.state.intents()
    return all(
        any(i.table == call.name.partition(".")[0] and i.start <= key < i.stop for i in intents)
        for key in call.arguments[0]
    )


def test_announcement_covers_all_possible_deletes(kit: Kit) -> None:
    made: dict[Subject, LedgerEntry] = {}

    def note(call: Call) -> None:
        if call.name == "state.intend":
            [e] = call.arguments
            assert made.setdefault(Subject(str(e.topic), e.generation, e.table, e.rule), e) is e

    watch_state(kit.state, before=note)
    kit.engine.run_once()
    prefix = b"default:orders:"
    assert made[Subject("default:orders", 3, "message", "expired")].stop == time_prefix(prefix, 3, NOW_MS - DAY)
    assert made[Subject("default:orders", 3, "payload", "expired")].stop == generation_prefix(prefix, 4)
    assert made[Subject("default:orders", 1, "message", "old_generation")].stop == generation_prefix(prefix, 2)
    assert made[Subject("default:orders", 3, "message", "invalid_transaction")].stop == generation_prefix(prefix, 4)
    for about, found in entries(kit).items():
        assert made[about].start == found.start
        assert made[about].stop >= found.stop


def test_announcement_of_payloads_of_processed_messages_covers_them(kit: Kit) -> None:
    orders = TopicMetadata(TopicId("default", "orders"), 3, TTL_SECONDS)
    work = TopicWork(orders, b"", Frontier.open(NOW_MS, orders), admit(orders, ClockAnchor(NOW_MS, 0, "")))
    batch = Batch("payload", 3, Rule.PROCESSED, [PayloadKey(orders.topic, 3, pointer(NOW_MS), NOW_MS, 0).pack()])
    due = Due(work, kit.store.payload, batch, 0, None, None)
    Ledger(kit.state, kit.clock, "run", None).announce(due, batch.keys[0])
    [made] = kit.state.intents()
    assert made.start <= batch.keys[0] < made.stop


def test_announcement_that_fails_deletes_nothing(kit: Kit) -> None:
    spy = DeletionSpy(kit.store)
    watch_state(
        kit.state,
        before=fail_at(
            "state.intend", StateError("No space left on device."), lambda call: call.arguments[0].table == "message"
        ),
    )
    with pytest.raises(StateError, match="No space left"):
        kit.engine.run_once()
    assert spy.taken == {}
    assert kit.state.runs(1)[0].result == "failed"
    assert kit.state.strikes() == {}


def kill_at_call(kit: Kit, at_call: int) -> bool:
    """Sweep, and kill the process at the k-th store call; return whether the sweep reached it."""
    calls = 0

    def count(_: Call) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise ProcessKilled

    watch(kit.store, before=count)
    try:
        kit.engine.run_once()
    except ProcessKilled:
        return True
    return False


def keys_of(store: Store) -> dict[str, set[bytes]]:
    return {
        "message": set(store.message.read(KEYS, b"", None, 10_000).items),
        "payload": set(store.payload.read(KEYS, b"", None, 10_000).items),
    }


def pointers_of(store: Store) -> dict[bytes, int | None]:
    return {key: pointer for key, (pointer, _) in store.message.read(MESSAGES, b"", None, 10_000).items}


def test_kill_at_any_store_call_leaves_all_deletes_in_the_ledger() -> None:
    recorded = negated = 0
    for at_call in range(1, CALLS):
        kit = filled(MemoryStore())
        before, pointers = keys_of(kit.store), pointers_of(kit.store)
        if not kill_at_call(kit, at_call):
            break
        [run] = kit.state.unfinished_runs()
        assert (run.result, kit.state.ledger(10)) == ("", [])
        after = keys_of(kit.store)
        next_one = kit.restart().engine
        assert next_one.recover() == [run.id]
        found = kit.state.ledger(1000)
        for table, keys in before.items():
            for key in keys - after[table]:
                assert [e for e in found if e.table == table and e.start <= key < e.stop and e.run_id == run.id]
        inverted = [entry for entry in found if entry.rule == "invalid_transaction"]
        for key, present in pointers_of(kit.store).items():
            if present != pointers[key]:
                negated += 1
                assert [e for e in inverted if e.start <= key < e.stop and e.run_id == run.id]
        assert {entry.rows for entry in found} <= {None}
        assert (kit.state.intents(), kit.state.unfinished_runs()) == ([], [])
        closed = kit.state.run(run.id)
        assert closed is not None
        assert closed.result == "lost"
        assert next_one.recover() == []
        assert len(kit.state.ledger(1000)) == len(found)
        recorded += len(found)
    assert at_call > 40
    assert recorded > 100
    assert negated > 10


def test_kill_after_a_run_was_closed_duplicates_no_entry(kit: Kit) -> None:
    dying = [True]
    watch_state(kit.state, before=fail_at("state.clear_intents", ProcessKilled, lambda _: dying[0]))
    with pytest.raises(ProcessKilled):
        kit.engine.run_once()
    dying[0] = False
    found = entries(kit)
    assert kit.state.intents()
    assert (kit.engine.recover(), entries(kit), kit.state.intents()) == ([], found, [])


def fail_once(kit: Kit, at_call: int) -> bool:
    """Sweep with a state that fails at the k-th call; return whether the sweep reached it."""
    calls = 0

    def count(_: Call) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise StateBusy("it is being written by another process.")

    watch_state(kit.state, before=count)
    with suppress(StateBusy):
        kit.engine.run_once()
    failed, calls = calls >= at_call, at_call
    return failed


def test_state_that_fails_once_anywhere_counts_each_row_once() -> None:
    for at_call in range(1, CALLS):
        kit = filled(MemoryStore())
        spy = DeletionSpy(kit.store)
        if not fail_once(kit, at_call):
            break
        kit.run_after(MINUTE)
        found: Counter[Subject] = Counter()
        for one in kit.state.ledger(1000):
            found[Subject(str(one.topic), one.generation, one.table, one.rule)] += one.rows or 0
        assert found == {about: len(keys) for about, keys in spy.taken.items()}
        counted = [number for key, number in kit.state.counters().items() if key.name in COUNTED]
        assert sum(counted) == sum(found.values())
    assert at_call > 60


def test_announcement_is_open_until_its_own_subject_has_a_result() -> None:
    announced = [entry(start=b"c", stop=b"z"), entry(topic=TopicId("default", "other"), start=b"c", stop=b"z")]
    elsewhere: list[dict[str, Any]] = [{"generation": 2}, {"table": "payload"}, {"rule": "x"}, {"stop": b"c"}]
    results = [entry(start=b"d", stop=b"e"), *(entry(**other) for other in elsewhere), announced[1]]
    assert open_announcements(announced, results) == announced[:1]


def test_concurrent_parts_are_announced_and_counted(kit: Kit) -> None:
    orders = TopicMetadata(TopicId("default", "orders"), 3, TTL_SECONDS)
    frontier = Frontier.open(NOW_MS, orders)
    work = TopicWork(orders, b"", frontier, admit(orders, ClockAnchor(NOW_MS, 0, "")))
    batches = [
        Batch("message", 3, Rule.EXPIRED, [MessageKey(orders.topic, 3, ms, n).pack() for n in range(2)])
        for ms in (5, 1, 9)
    ]
    ledger, outcome = Ledger(kit.state, kit.clock, "run", None), Outcome()
    for batch in batches:
        due = Due(work, kit.store.message, batch, 0, None, None)
        entry = ledger.announce(due, batch.keys[0])
        assert any(i.start <= batch.keys[0] and batch.keys[-1] < i.stop for i in kit.state.intents())
        failed = Done(entry=entry, stop="unsure", error=StoreError("the disk is full."))
        outcome.add(due, failed if batch is batches[-1] else Done(batch.keys, entry=entry))
    late, early, last = batches
    [taken], [unsure] = outcome.deletions.values(), outcome.unsure
    assert (taken.start, taken.stop, taken.rows) == (early.keys[0], late.keys[-1] + b"\x00", 4)
    assert (unsure.start, unsure.stop, unsure.rows) == (last.keys[0], last.keys[-1] + b"\x00", None)
