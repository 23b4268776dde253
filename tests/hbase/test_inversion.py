"""S6 on HBase: an inversion never restores a row or makes a pointer positive, despite concurrent changes.

A test runs every script of deletes and rollbacks by other clients between the read and the write of an inversion and
after the write, and flushes or compacts the table after each step. A major compaction drops the delete marker, so a
write under the marker would become visible.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import happybase
import pytest

from janitor.rules.policy import Rule
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Snapshots, janitor, pointer, topic
from tests.hbase.server import HBaseServer
from tests.hbase.tables import PatientStore, Tables
from tests.hbase.thrift_calls import SleeplessClock, watch_calls
from tests.kit.proxy import HONEST, Conduct, Fault, Proxy
from tms_core.clock import ManualClock
from tms_core.tables.base import CELLS
from tms_core.tables.hbase.rows import CHANGES_AT_ONCE, POINTERS
from tms_core.tables.hbase.schema import PAYLOAD_COLUMN, POINTER_COLUMN
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.thrift import ConnectionLost

BUCKETS = 1
INVALID = pointer(NOW_MS - DAY)
BODY = b"a payload that the inversion must not read"

Step = Literal["nothing", "delete", "rollback"]
#: The changes of a row by other clients: after the read, right before the compare-and-set, and right after it.
SCRIPTS: list[tuple[Step, ...]] = list(product(("nothing", "delete", "rollback"), repeat=3))


def cell(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.shared(buckets=BUCKETS)


@pytest.fixture
def store(hbase_tables: Tables, namespace: str) -> Iterator[HBaseStore]:
    with hbase_tables.open(namespace, buckets=BUCKETS) as opened:
        yield opened


def invert(store: HBaseStore, **options: Any) -> int:
    """Sweep and return the number of inverted rows."""
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    kit = janitor(store, clock=clock, snapshots=Snapshots(clock, [INVALID]), **options)
    report = kit.engine.run_once(adopt=True)
    assert report.errors == []
    return report.total(Rule.INVALID_TRANSACTION)


@dataclass
class OtherClients:
    """Other clients, which follow a script for each row, and call ``after_step`` after each step."""

    message: happybase.Table
    scripts: dict[bytes, tuple[Step, ...]]
    after_step: Callable[[], object]
    deleted: set[bytes] = field(default_factory=set)
    seen: list[bytes] = field(default_factory=list)
    _scan: list[bytes | None] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            if name == "scannerOpenWithScan":
                self._scan.append(arguments[1].filterString)
            elif name == "scannerClose" and self._scan[-1] == POINTERS.filter and not self.seen:
                self.seen = sorted(self.scripts)
                for row in self.seen:
                    self._change(row, 0)
                self.after_step()
            elif name == "checkAndPut":
                self._change(arguments[1], 1)
                self.after_step()

    def after(self, name: str, arguments: tuple[Any, ...], _answer: Any) -> None:
        if name == "checkAndPut":
            with self._lock:
                self._check(arguments[1])
                self._change(arguments[1], 2)
                self.after_step()
                self._check(arguments[1])

    def _change(self, row: bytes, number: int) -> None:
        match self.scripts[row][number]:
            case "delete":
                self.message.delete(row)
                self.deleted.add(row)
            case "rollback" if row not in self.deleted:
                self.message.put(row, {POINTER_COLUMN: cell(-INVALID)})

    def _check(self, row: bytes) -> None:
        """Check the row after the janitor's attempt."""
        found = self.message.row(row)
        if row in self.deleted:
            assert found == {}
        else:
            assert found == {POINTER_COLUMN: cell(-INVALID), PAYLOAD_COLUMN: BODY}


@pytest.mark.parametrize("command", ["nothing", "flush", "compact"])
def test_inversion_racing_with_other_writes_restores_no_deleted_row(
    hbase: HBaseServer, store: HBaseStore, message: happybase.Table, namespace: str, command: str
) -> None:
    topic(store, "default:orders", ttl_seconds=7 * 86_400).tx(
        INVALID, *range(NOW_MS - HOUR, NOW_MS - HOUR + len(SCRIPTS)), body=BODY
    )
    rows = [row for row, _ in message.scan()]
    table = f"{namespace}:tms.message"
    others = OtherClients(
        message,
        dict(zip(rows, SCRIPTS, strict=True)),
        (lambda: None) if command == "nothing" else lambda: hbase.command(command, table),
    )
    watch_calls(store.pool, others.before, others.after)

    inverted = invert(store)

    # The janitor inverts a row unless another client has changed it before.
    assert inverted == sum(script[:2] == ("nothing", "nothing") for script in SCRIPTS)
    assert others.seen == rows
    hbase.command("compact", table)
    found = dict(message.scan())
    assert set(found) == set(rows) - others.deleted
    assert {values[POINTER_COLUMN] for values in found.values()} == {cell(-INVALID)}
    assert invert(store) == 0
    assert dict(message.scan()) == found


@pytest.fixture
def answers(store: HBaseStore) -> list[tuple[bytes, bytes]]:
    """Return the received columns and values of the message table."""
    received: list[tuple[bytes, bytes]] = []

    def after(name: str, _arguments: tuple[Any, ...], answer: Any) -> None:
        if name in {"scannerGetList", "getRowWithColumns", "getRowsWithColumns"}:
            received.extend((column, cell.value) for row in answer for column, cell in row.columns.items())

    watch_calls(store.pool, after=after)
    return received


def test_inversion_reads_no_payload(store: HBaseStore, answers: list[tuple[bytes, bytes]]) -> None:
    orders = topic(store, "default:orders", ttl_seconds=7 * 86_400)
    orders.tx(INVALID, *range(NOW_MS - HOUR, NOW_MS - HOUR + 50), body=BODY)
    orders.plain(*range(NOW_MS - 50, NOW_MS), body=BODY)
    answers.clear()
    assert invert(store) == 50
    assert (POINTER_COLUMN, cell(INVALID)) in answers
    assert {value for column, value in answers if column == PAYLOAD_COLUMN} == {b""}


def test_inversion_with_lost_response_reads_the_pointer(store: HBaseStore, answers: list[tuple[bytes, bytes]]) -> None:
    orders = topic(store, "default:orders", ttl_seconds=7 * 86_400)
    orders.tx(INVALID, *range(NOW_MS - HOUR, NOW_MS - HOUR + 12), body=BODY)
    broken: set[bytes] = set()

    def lose_response(name: str, arguments: tuple[Any, ...], _answer: Any) -> None:
        if name == "checkAndPut" and arguments[1] not in broken:
            broken.add(arguments[1])
            raise ConnectionLost("the response is lost")

    watch_calls(store.pool, after=lose_response)
    vars(store.pool)["_clock"] = SleeplessClock()
    answers.clear()
    assert invert(store) == 12
    assert len(broken) == 12
    assert {value for column, value in answers if column == PAYLOAD_COLUMN} == {b""}
    assert set(orders.pointers()) == {-INVALID}


@pytest.mark.parametrize("when", ["before the page", "after the page"])
def test_cells_with_future_timestamps_are_deleted_by_next_run(
    hbase: HBaseServer, store: HBaseStore, message: happybase.Table, namespace: str, when: str
) -> None:
    # A new topic, because these keys cannot be put again for an hour.
    orders = topic(store, f"default:t{secrets.token_hex(4)}", ttl_seconds=60)
    orders.plain(*range(NOW_MS - HOUR, NOW_MS - HOUR + 30))
    live = [NOW_MS - MINUTE + 1]
    orders.plain(*live)
    rows = [row for row, _ in message.scan()][:30:3]
    late_ms = time.time_ns() // 1_000_000 + HOUR

    def write_ahead() -> None:
        for row in rows:
            message.put(row, {PAYLOAD_COLUMN: BODY}, timestamp=late_ms)
        rows.clear()

    if when == "before the page":
        write_ahead()
    else:
        watch_calls(store.pool, lambda name, _: write_ahead() if name == "mutateRowsTs" else None)
    kit = janitor(store)
    first = kit.engine.run_once(adopt=True)
    kit.engine.run_once()

    assert rows == []
    assert first.total(Rule.EXPIRED) == 30
    assert orders.times() == live
    assert 0 < store.ahead_ms <= HOUR
    hbase.command("compact", f"{namespace}:tms.message")
    assert len(list(message.scan())) == 1


def test_row_rewritten_with_future_timestamps_fails_its_topic(store: HBaseStore, message: happybase.Table) -> None:
    orders = topic(store, f"default:t{secrets.token_hex(4)}", ttl_seconds=60).plain(NOW_MS - HOUR)
    [(row, _)] = message.scan()
    ahead_ms = [time.time_ns() // 1_000_000 + HOUR]

    def write_ahead(name: str, _arguments: tuple[Any, ...], _answer: Any) -> None:
        if name in {"mutateRows", "mutateRowsTs"}:
            ahead_ms[0] += 1000
            message.put(row, {PAYLOAD_COLUMN: BODY}, timestamp=ahead_ms[0])

    message.put(row, {PAYLOAD_COLUMN: BODY}, timestamp=ahead_ms[0])
    watch_calls(store.pool, after=write_ahead)
    report = janitor(store).engine.run_once(adopt=True)
    [error] = report.errors
    assert "still exist after 3 deletes" in error
    assert str(orders.id) in error
    assert (report.total(Rule.EXPIRED), report.boundary) == (0, None)


def test_inversion_with_truncated_response_reports_each_row(
    hbase: HBaseServer, store: HBaseStore, message: happybase.Table, namespace: str
) -> None:
    orders = topic(store, "default:orders", ttl_seconds=7 * 86_400)
    orders.tx(INVALID, *range(NOW_MS - HOUR, NOW_MS - HOUR + CHANGES_AT_ONCE + 8), body=BODY)
    cells = store.message.read(CELLS, b"", None, 100).items
    rows = [row for row, _ in message.scan()]
    message.delete(rows[5])
    message.put(rows[7], {POINTER_COLUMN: cell(INVALID + 1)})
    unchanged = [number not in (5, 7) for number in range(len(rows))]
    with Proxy(hbase.thrift) as proxy:
        for after_bytes in (0, 1, 40, 400, 800, 1200):
            # Another pointer each time, so that calls that the server still processes for a lost connection fail.
            wp = INVALID + 2 + after_bytes
            for row, is_unchanged in zip(rows, unchanged, strict=True):
                if is_unchanged:
                    message.put(row, {POINTER_COLUMN: cell(wp)})
            with PatientStore([proxy.address], namespace=namespace, connections=1, clock=SleeplessClock()) as through:
                proxy.treat(cut_first(after_bytes))
                assert through.message.invert([one._replace(pointer=wp) for one in cells]) == unchanged
                assert proxy.struck == 1
    assert len(list(message.scan())) == len(rows) - 1


def cut_first(after_bytes: int) -> Callable[[int], Conduct]:
    return lambda number: Conduct(down=Fault("cut", after_bytes)) if number == 0 else HONEST
