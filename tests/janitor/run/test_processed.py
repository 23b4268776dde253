"""Rule L7: rows that all consumers have processed are deleted; unread rows are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from janitor.cli.why import lines
from janitor.report import Report
from janitor.rules.policy import Hold, Rule
from tests.builders import HOUR, Snapshots, watch
from tests.janitor.run.served_store import ServedStore
from tests.kit.messaging import GROUP, ORDERS, READ_NONE, read_payloads
from tests.support import act_before, raising
from tms_core.consumers.retention import announce, announced
from tms_core.errors import StoreError
from tms_core.messaging.groups.claims import GroupPoll, Order
from tms_core.rowkey import MessageId, MessageKey
from tms_core.tables.base import KEYS, MESSAGES
from tms_core.tables.side import MemorySide, SideChange, SideTable
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import Transaction

CONSUMED = {"ttl": "8640000", "retention": "consumed"}


class ProcessedKit(ServedStore):
    """A server with a topic whose processed messages are deleted, and a janitor."""

    def __init__(self, stack: ExitStack, side: SideTable | None = None) -> None:
        super().__init__(stack, CONSUMED, side)
        self.janitor = self.made()
        self.janitor.engine.run_once(adopt=True)

    def register(self, name: str = GROUP, message: MessageId = READ_NONE) -> None:
        self.service.consumers.put(ORDERS, name, message)

    def publish(self, *payloads: bytes) -> None:
        self.service.publish(ORDERS, list(payloads))
        self.clock.advance(1)

    def claim(self, name: str = GROUP, limit: int = 10) -> Transaction:
        tx = self.manager.start_short()
        self.service.groups.poll(ORDERS, name, GroupPoll(tx, limit, order=Order.NONE))
        return tx

    def process(self, name: str = GROUP, limit: int = 10) -> None:
        self.manager.commit(self.claim(name, limit).transaction_id)

    def publish_processed(self, *payloads: bytes, limit: int = 10) -> None:
        """Register the group, publish messages, and process some of them."""
        self.register()
        self.publish(*payloads)
        self.process(limit=limit)

    def sweep(self, after_ms: int = 2 * HOUR) -> Report:
        self.clock.advance(after_ms)
        return self.janitor.engine.run_once()

    def left(self) -> list[bytes]:
        rows = self.store.message.read(MESSAGES, ORDERS.prefix, None, 1000).items
        return [value.payload or b"stored" for _, value in rows]

    def fetched(self, start: MessageId | None = None) -> list[bytes]:
        return read_payloads(self.service, ORDERS, start, inclusive=False)

    def ids(self) -> list[MessageId]:
        keys = [MessageKey.parse(key) for key in self.store.message.read(KEYS, ORDERS.prefix, None, 1000).items]
        return [MessageId(key.publish_ms, key.sequence) for key in keys if key is not None]

    def metadata(self) -> TopicMetadata:
        return TopicMetadata.parse(ORDERS.prefix, self.store.metadata.get(ORDERS.prefix) or b"")


@pytest.fixture
def kit() -> Iterator[ProcessedKit]:
    with ExitStack() as stack:
        yield ProcessedKit(stack)


def test_sweep_deletes_processed_messages_of_an_idle_group(kit: ProcessedKit) -> None:
    kit.publish_processed(b"a", b"b", b"c", limit=2)
    planned = kit.janitor.engine.preview()
    assert planned.total(Rule.PROCESSED) == 0
    kit.clock.advance(2 * HOUR)
    planned, report = kit.janitor.engine.preview(), kit.sweep(0)
    assert (planned.total(Rule.PROCESSED), report.total(Rule.PROCESSED)) == (2, 2)
    assert kit.left() == [b"c"]
    [entry] = [entry for entry in kit.janitor.state.ledger(10) if entry.rule == "processed"]
    assert (entry.rows, entry.table) == (2, "message")


@pytest.mark.parametrize("end", ["open", "invalid", "rolled back"])
def test_sweep_keeps_messages_of_an_uncommitted_claim(kit: ProcessedKit, end: str) -> None:
    kit.register()
    kit.publish(b"a")
    kit.clock.advance(2 * HOUR)
    tx = kit.claim()
    if end == "invalid":
        kit.manager.invalidate(tx.transaction_id)
    elif end == "rolled back":
        kit.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id)
        kit.manager.abort(tx)
    kit.sweep(0)
    assert kit.left() == [b"a"]


def test_sweep_keeps_messages_processed_after_a_gap(kit: ProcessedKit) -> None:
    kit.register()
    kit.publish(b"a", b"b", b"c")
    first = kit.claim(limit=1)
    kit.process(limit=1)
    kit.manager.invalidate(first.transaction_id)
    kit.sweep()
    assert kit.left() == [b"a", b"b", b"c"]


def test_slowest_of_several_consumers_counts_until_it_is_forgotten(kit: ProcessedKit) -> None:
    kit.register()
    kit.register("slow")
    kit.publish(b"a")
    kit.publish(b"b")
    kit.process()
    kit.register("slow", kit.ids()[0])
    kit.sweep()
    assert kit.left() == [b"b"]
    kit.service.consumers.delete(ORDERS, "slow")
    kit.sweep(0)
    assert kit.left() == []


def test_sweep_keeps_processed_rows_until_the_hold_has_passed(kit: ProcessedKit) -> None:
    kit.publish_processed(b"a")
    kit.sweep(HOUR - 1)  # one millisecond of the hold has passed
    assert kit.left() == [b"a"]
    kit.sweep(1)
    assert kit.left() == []


def test_sweep_keeps_processed_rows_since_an_open_transaction(kit: ProcessedKit) -> None:
    kit.register()
    kit.publish(b"before")
    tx = kit.manager.start_long("job")
    kit.publish(b"since")
    kit.process()
    kit.sweep()
    assert kit.left() == [b"since"]
    kit.manager.commit(tx.transaction_id)
    kit.sweep(0)
    assert kit.left() == []


def test_sweep_without_a_usable_snapshot_keeps_processed_rows(kit: ProcessedKit) -> None:
    kit.publish_processed(b"a")
    kit.clock.advance(2 * HOUR)
    kit.janitor.restart(snapshots=Snapshots(kit.clock, error=OSError("none"))).engine.run_once()
    assert kit.left() == [b"a"]


def test_sweep_deletes_stored_payloads_with_their_processed_message(kit: ProcessedKit) -> None:
    kit.register()
    for _ in range(2):
        tx = kit.manager.start_short()
        kit.service.store(ORDERS, [b"x", b"y"], pointer=tx.write_pointer)
        kit.clock.advance(1)
        kit.service.publish(ORDERS, [], pointer=tx.write_pointer)
        kit.manager.commit(tx.transaction_id)
        kit.clock.advance(1)
    kit.process(limit=3)
    kit.clock.advance(2 * HOUR)
    planned, report = kit.janitor.engine.preview(), kit.sweep(0)
    assert planned.total(Rule.PROCESSED) == report.total(Rule.PROCESSED) == 3
    assert len(kit.store.payload.read(KEYS, b"", None, 10).items) == 2
    assert kit.fetched() == [b"x", b"y"]


def test_own_ttl_of_a_processed_message_is_forgotten_when_due(kit: ProcessedKit) -> None:
    kit.register()
    kit.service.publish(ORDERS, [b"short"], ttl_seconds=7 * 3600)
    kit.process()
    assert kit.sweep().total(Rule.PROCESSED) == 1
    report = kit.sweep(6 * HOUR)
    assert (report.total(Rule.EXPIRED), report.total(Rule.PROCESSED)) == (0, 0)
    assert kit.side.rows(b"e", b"f", 10).items == []


def test_s8_retention_set_on_a_topic_in_use_is_held(kit: ProcessedKit) -> None:
    kit.service.update_topic(ORDERS, {"ttl": "8640000"})
    kit.publish_processed(b"a")
    kit.sweep()
    kit.service.update_topic(ORDERS, CONSUMED)
    [entry] = kit.janitor.engine.preview().topics
    assert (entry.rule, entry.held, entry.rows) == (Rule.PROCESSED, Hold.FRONTIER, 1)
    assert kit.sweep(0).held_rows() == 1
    assert announced(kit.side, kit.metadata()) == 0
    assert kit.sweep(HOUR - 1).held_rows() == 1
    assert kit.left() == [b"a"]
    assert kit.janitor.engine.approve((str(ORDERS),)) == [ORDERS]
    kit.sweep(0)
    assert kit.left() == []


def test_topic_out_of_scope_protected_or_paused_announces_nothing(kit: ProcessedKit) -> None:
    kit.publish_processed(b"a")
    kit.clock.advance(2 * HOUR)
    kit.janitor.engine.run_once(patterns=("other:*",))
    kit.janitor.restart(protect=("default:*",)).engine.run_once()
    kit.janitor.state.pause(str(ORDERS), kit.clock.now_ms())
    kit.janitor.engine.run_once()
    assert (kit.left(), announced(kit.side, kit.metadata())) == ([b"a"], 0)


def test_plan_announces_nothing_and_applies_only_the_planned_rows(kit: ProcessedKit, tmp_path: Any) -> None:
    kit.publish_processed(b"a")
    kit.clock.advance(2 * HOUR)
    kit.publish(b"b")
    kit.janitor.engine.preview(out=tmp_path / "plan")
    assert announced(kit.side, kit.metadata()) == 0
    kit.process()
    kit.clock.advance(2 * HOUR)
    kit.janitor.engine.carry_out(tmp_path / "plan")
    assert kit.left() == [b"b"]


def test_announcement_does_not_apply_to_a_topic_created_again(kit: ProcessedKit) -> None:
    kit.publish_processed(b"a")
    kit.sweep()
    assert announced(kit.side, kit.metadata()) > 0
    kit.service.delete_topic(ORDERS)
    kit.service.create_topic(ORDERS, CONSUMED)
    kit.register()
    assert announced(kit.side, kit.metadata()) == 0
    assert kit.service.consumers.get(ORDERS, GROUP).id == READ_NONE


def test_sweep_with_unreadable_consumers_keeps_all_and_reports_it(kit: ProcessedKit) -> None:
    kit.publish_processed(b"a")
    kit.side.put([(b"c" + ORDERS.prefix + b"\0\0\0\1broken", b"?")])
    report = kit.sweep()
    assert kit.left() == [b"a"]
    assert any("cannot be read" in note.message for note in report.guards)
    assert not report.errors


class WatchedSide(MemorySide):
    """A side table that calls a function before each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.on_read: Any = None

    def get(self, key: bytes) -> bytes | None:
        self._tell()
        return super().get(key)

    def rows(self, *arguments: Any) -> Any:
        self._tell()
        return super().rows(*arguments)

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        self._tell()
        return super().exchange_each(changes)

    def _tell(self) -> None:
        if self.on_read is not None:
            self.on_read()


def _swept_while(moment: int, previous: bool) -> tuple[int, bool, list[bytes]]:
    """Sweep; before the operation with this number, register another consumer, or move one back.

    Returns:
        The number of operations, whether the consumer was registered, and its deleted unread messages.
    """
    with ExitStack() as stack:
        side = WatchedSide()
        kit = ProcessedKit(stack, side)
        kit.register()
        kit.publish(b"a")
        kit.publish(b"b")
        kit.publish(b"c")
        kit.process(limit=2)
        ids = kit.ids()
        if previous:
            kit.register("late", ids[1])
        kit.clock.advance(2 * HOUR)
        done: list[MessageId] = []
        count = 0

        def tick(*_: object) -> None:
            nonlocal count
            count += 1
            if count == moment:
                side.on_read = None
                kit.register("late")
                done.append(kit.service.consumers.get(ORDERS, "late").id)
                side.on_read = tick

        side.on_read = tick
        watch(kit.store, before=tick)
        kit.janitor.engine.run_once()
        side.on_read = None
        first_id = done[0] if done else MessageId(2**62, 0)
        there = kit.ids()
        return count, bool(done), [str(one).encode() for one in ids if one > first_id and one not in there]


@pytest.mark.parametrize("previous", [False, True])
def test_trap_f_consumer_registered_during_a_pass_loses_nothing(previous: bool) -> None:
    total, _, _ = _swept_while(-1, previous)
    assert total > 10
    for moment in range(1, total + 1):
        _, began, lost = _swept_while(moment, previous)
        assert (began, lost) == (True, []), moment


def test_trap_f_consumer_registered_after_a_pass_starts_after_its_rows(kit: ProcessedKit) -> None:
    kit.publish_processed(b"a", b"b")
    last = kit.ids()[-1]
    kit.sweep()
    kit.register("new")
    kit.register(GROUP, READ_NONE)
    assert [kit.service.consumers.get(ORDERS, name).id for name in ("new", GROUP)] == [last, last]


def test_announcement_that_fails_deletes_nothing(kit: ProcessedKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.publish_processed(b"a")
    with monkeypatch.context() as failing:
        failing.setattr(kit.side, "exchange", raising(StoreError("broken")))
        kit.sweep()
    assert kit.left() == [b"a"]
    kit.sweep(0)
    assert kit.left() == []


def test_fetch_of_rows_deleted_as_consumed_returns_none_from_cache(kit: ProcessedKit) -> None:
    kit.register()
    kit.publish(b"a", b"b")
    kit.publish(b"c")
    kit.process(limit=1)
    kit.sweep()
    assert kit.left() == kit.fetched() == [b"b", b"c"]
    # Released rows that are not deleted yet are visible to readers without a group.
    announce(kit.side, kit.metadata(), 1 << 62)
    assert kit.left() == kit.fetched() == [b"b", b"c"]


def test_fetch_after_retention_is_unset_returns_no_deleted_rows(kit: ProcessedKit) -> None:
    kit.register()
    kit.publish(b"a")
    kit.publish(b"b")
    kit.process(limit=1)
    kit.sweep()
    kit.service.update_topic(ORDERS, {"ttl": CONSUMED["ttl"]})
    assert kit.left() == kit.fetched() == [b"b"]


def test_fetch_at_tail_of_consumed_topic_reads_no_side_row(kit: ProcessedKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.register()
    kit.publish(b"a")
    assert kit.fetched() == [b"a"]
    monkeypatch.setattr(kit.side, "get", raising(StoreError("read")))
    assert kit.fetched(kit.ids()[-1]) == []


def test_why_of_a_processed_message_names_the_rule_and_its_run(kit: ProcessedKit) -> None:
    kit.register()
    kit.publish(b"a")
    kit.publish(b"b")
    kit.process(limit=1)
    kit.clock.advance(2 * HOUR)
    first, second = kit.ids()
    why = kit.janitor.engine.why(ORDERS, first)
    [found] = why.found
    assert (found.fate.rule, found.fate.action) == (Rule.PROCESSED, "delete")
    assert any("all consumers" in line for line in lines(why))
    [found] = kit.janitor.engine.why(ORDERS, second).found
    assert (found.fate.rule, found.fate.action) == (Rule.EXPIRED, "keep")
    kit.sweep(0)
    [missing] = kit.janitor.engine.why(ORDERS, first).missing
    assert [(trace.rule, trace.certain) for trace in missing.taken] == [("processed", True)]


def test_two_announcements_keep_the_higher_position(kit: ProcessedKit, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = kit.metadata()
    act_before(monkeypatch, kit.side, "exchange", lambda: announce(kit.side, topic, 7))
    announce(kit.side, topic, 9)
    announce(kit.side, topic, 8)
    assert announced(kit.side, topic) == 9
