"""S2: the janitor rereads the topic before each batch and drops the batch if the topic changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from janitor.rules.policy import Delete, Row, advance, decide
from janitor.state.base import EVERYTHING
from janitor.sweep.transactions import TransactionView
from tests.builders import HOUR, MINUTE, NOW_MS, Call, Kit, Topic, adopted_janitor, pointer, topic, watch
from tms_core.errors import MetadataError
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import Store, TxCell
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId, TopicMetadata

TTL_SECONDS = 3600
DUE_MS = [NOW_MS - 2 * HOUR + number for number in range(9)]
LIVE_MS = [NOW_MS - HOUR // 2 + number for number in range(3)]
#: Upper limit of store calls of each sweep below.
CALLS = 300

CHANGES: dict[str, Callable[[Topic], object]] = {
    "ttl lengthened": lambda orders: orders.describe(ttl_seconds=10 * TTL_SECONDS),
    "ttl shortened": lambda orders: orders.describe(ttl_seconds=60),
    "deleted": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS, generation=-1),
    "deleted and created again": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS, generation=2),
    "an old generation brought back": lambda orders: orders.describe(ttl_seconds=10 * TTL_SECONDS, generation=1),
    "made unreadable": lambda orders: orders.write_metadata(b"{"),
}


def set_up(store: Store) -> tuple[Kit, Topic]:
    """Return a store after its first pass, with rows that came due since."""
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
    other = topic(store, "default:other", ttl_seconds=TTL_SECONDS)
    kit = adopted_janitor(store, batch_rows=2)
    for described in (orders, other):
        described.plain(*DUE_MS, *LIVE_MS).stored(pointer(NOW_MS - 2 * HOUR), *DUE_MS, *LIVE_MS)
    return kit, orders


class DeletionCheck:
    """A watcher that checks each deleted row by the rules and the current metadata."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.records = kit.state.frontiers()
        self.wrong: list[bytes] = []

    def __call__(self, call: Call) -> None:
        if call.name in ("message.delete", "payload.delete"):
            self.wrong += [key for key in call.arguments[0] if not self.allows(call.name, key)]

    def allows(self, name: str, raw: bytes) -> bool:
        table = "message" if name == "message.delete" else "payload"
        key = MessageKey.parse(raw) if table == "message" else PayloadKey.parse(raw)
        if key is None:
            return False
        described = self.read_metadata(key.topic)
        if described is None:
            return False
        now = self.kit.state.anchor()
        assert now is not None
        reach, _ = advance(
            self.records.get(key.topic),
            described,
            now,
            hold_seconds=3600,
            allowance_ms=self.kit.engine.deps.terms.lifetime.allowance_ms,
        )
        snapshot = self.kit.snapshots.latest().snapshot
        transactions = TransactionView(snapshot, NOW_MS, self.kit.engine.deps.terms.lifetime.undecided_ms)
        row = Row("message" if table == "message" else "payload", key)
        return isinstance(decide(row, described, reach, transactions, False, None), Delete)

    def read_metadata(self, wanted: TopicId) -> TopicMetadata | None:
        try:
            return TopicMetadata.parse(wanted.prefix, self.kit.store.metadata.get(wanted.prefix) or b"")
        except MetadataError:
            return None


class ChangeAtCall:
    """A watcher that changes the topic's metadata before the k-th store call."""

    def __init__(self, change: Callable[[], object], at_call: int, check: Callable[[Call], None]) -> None:
        self.change, self.at_call, self.check = change, at_call, check
        self.calls = 0
        self.is_changed = False

    def __call__(self, call: Call) -> None:
        self.calls += 1
        # No store can prevent a change between the read of the topic and the delete, which was allowed
        # before the change.
        if self.calls >= self.at_call and not self.is_changed and not call.name.endswith(".delete"):
            self.is_changed = True
            self.change()
        self.check(call)


@pytest.mark.parametrize("name", CHANGES)
def test_topic_changed_at_any_call_loses_no_live_row(name: str) -> None:
    for at_call in range(1, CALLS):
        kit, orders = set_up(MemoryStore())
        check = DeletionCheck(kit)
        change = ChangeAtCall(partial(CHANGES[name], orders), at_call, check)
        watch(kit.store, before=change)
        report = kit.engine.run_once()
        assert check.wrong == [], f"at call {at_call}"
        assert set(LIVE_MS) <= set(orders.times())
        assert set(LIVE_MS) <= set(orders.stored_times())
        assert report.errors == []
        if not change.is_changed:
            break
    assert not change.is_changed
    assert at_call > 20


def test_ttl_extended_between_batches_keeps_remaining_rows(store: Store) -> None:
    kit, orders = set_up(store)

    def lengthen(call: Call) -> None:
        if call.name == "message.delete" and DUE_MS[0] not in orders.times():
            orders.describe(ttl_seconds=10 * TTL_SECONDS)

    watch(store, after=lengthen)
    report = kit.engine.run_once()
    assert orders.times() == DUE_MS[2:] + LIVE_MS
    assert orders.stored_times() == DUE_MS + LIVE_MS
    assert topic(store, "default:other", ttl_seconds=TTL_SECONDS).times() == LIVE_MS
    assert report.errors == []


def test_topic_that_changes_forever_does_not_block_others(store: Store) -> None:
    kit, orders = set_up(store)
    before = kit.state.frontiers()[orders.id]
    kit.clock.advance(60_000)
    versions = iter(range(1, 1000))

    def change(call: Call) -> None:
        if call.name == "metadata.get" and call.arguments == (orders.id.prefix,):
            orders.describe(ttl_seconds=TTL_SECONDS, version=str(next(versions)))

    watch(store, before=change)
    report = kit.engine.run_once()
    assert orders.times() == DUE_MS + LIVE_MS
    assert topic(store, "default:other", ttl_seconds=TTL_SECONDS).times() == LIVE_MS
    assert "default:orders" in " ".join(report.errors)
    assert kit.state.frontiers()[orders.id] == before


def test_apply_stops_at_a_changed_topic(store: Store, tmp_path: Path) -> None:
    kit, orders = set_up(store)
    file = tmp_path / "plan.json"
    kit.engine.preview(out=file)

    def lengthen(call: Call) -> None:
        if call.name == "message.delete":
            orders.describe(ttl_seconds=10 * TTL_SECONDS)

    watch(store, after=lengthen)
    kit.engine.carry_out(file)
    assert orders.times() == DUE_MS[2:] + LIVE_MS


@pytest.mark.parametrize("during_sweep", [True, False])
def test_ttl_shortened_during_sweep_keeps_referenced_payloads(store: Store, during_sweep: bool) -> None:
    kit, orders = set_up(store)
    late = pointer(NOW_MS - 20 * MINUTE)
    orders.stored(late, NOW_MS - 20 * MINUTE).ref(late, NOW_MS - 10 * MINUTE)

    def shorten(call: Call) -> None:
        if call.name == "payload.keys":
            orders.describe(ttl_seconds=60)

    if during_sweep:
        watch(store, before=shorten)
    else:
        orders.describe(ttl_seconds=60)
    kit.restart(hold_seconds=0).engine.run_once()
    assert orders.times() == ([*LIVE_MS, NOW_MS - 10 * MINUTE] if during_sweep else [])
    assert orders.stored_times() == [NOW_MS - 20 * MINUTE] * during_sweep


def test_topic_changed_during_leveldb_sweep_loses_no_live_row(tmp_path: Path) -> None:
    for name, change in CHANGES.items():
        with LevelDBStore(tmp_path / name, create=True) as store:
            kit, orders = set_up(store)
            check = DeletionCheck(kit)
            watch(store, before=ChangeAtCall(partial(change, orders), 9, check))
            kit.engine.run_once()
            assert check.wrong == []
            assert set(LIVE_MS) <= set(orders.times())


INVALID = pointer(NOW_MS - 10 * HOUR)


class PauseAtCall:
    """A watcher that pauses a topic before the k-th store call and records later writes to the topic."""

    def __init__(self, kit: Kit, described: Topic, at_call: int) -> None:
        self.kit, self.topic, self.at_call = kit, described, at_call
        self.calls = 0
        self.at = ""
        self.written: list[str] = []
        watch(kit.store, before=self)

    def __call__(self, call: Call) -> None:
        self.calls += 1
        if self.calls == self.at_call:
            self.at = call.name
            self.kit.state.pause(str(self.topic.id), 0)
        if self.at and call.name.endswith((".delete", ".invert")):
            first = call.arguments[0][0]
            if (first.key if isinstance(first, TxCell) else first).startswith(self.topic.id.prefix):
                self.written.append(call.name)


def test_pause_at_any_call_stops_after_the_current_batch() -> None:
    written = set()
    for at_call in range(1, CALLS):
        kit, orders = set_up(MemoryStore())
        other = topic(kit.store, "default:other", ttl_seconds=TTL_SECONDS)
        for described in (orders, other):
            described.tx(INVALID, NOW_MS, NOW_MS)
        kit.snapshots.invalid = [INVALID]
        kit.state.save_last_full_pass_ms(0)
        pause = PauseAtCall(kit, orders, at_call)
        report = kit.engine.run_once()
        if not pause.at:
            break
        has_started = pause.at == "metadata.get" or pause.at.endswith((".delete", ".invert"))
        assert len(pause.written) <= has_started, f"at call {at_call}, {pause.at}"
        written |= set(pause.written)
        assert other.times() == [*LIVE_MS, NOW_MS, NOW_MS]
        assert other.stored_times() == LIVE_MS
        assert other.pointers()[-2:] == [-INVALID] * 2
        assert report.errors == []
        kit.state.resume(str(orders.id))
        report = kit.engine.run_once()
        assert report.held_topics() == {}
        assert (orders.times(), orders.stored_times()) == (other.times(), LIVE_MS)
        assert INVALID not in orders.pointers()
    assert at_call > 40
    assert written == {"message.delete", "payload.delete", "message.invert"}


def test_pause_of_all_topics_writes_nothing_without_failure(store: Store) -> None:
    kit, orders = set_up(store)
    orders.tx(INVALID, NOW_MS)
    kit.snapshots.invalid = [INVALID]
    kit.state.pause(EVERYTHING, NOW_MS)
    before = (orders.messages(), orders.stored_times())
    report = kit.engine.run_once()
    assert (orders.messages(), orders.stored_times()) == before
    assert (report.errors, report.tripped, kit.state.runs(1)[0].result) == ([], False, "done")
    assert [note.guard for note in report.guards] == ["paused"]
