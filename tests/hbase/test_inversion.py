"""S6 on HBase: an inversion never restores a row or makes a pointer positive, despite concurrent changes.

What somebody else does to a row between our reading it and our writing it, and after, is played through whole: every
script of deletes and rollbacks, with nothing, a flush or a major compaction behind each step. A major compaction is
what makes a careless inversion a resurrection: it drops the marker that hid what was written under it.
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
from tests.hbase.moments import SleeplessClock, watch_calls
from tests.hbase.server import HBaseServer
from tests.hbase.tables import PatientStore, Tables
from tests.kit.proxy import HONEST, Conduct, Fault, Proxy
from tms_core.clock import ManualClock
from tms_core.tables.base import CELLS
from tms_core.tables.hbase.rows import CHANGES_AT_ONCE, POINTERS
from tms_core.tables.hbase.schema import PAYLOAD_COLUMN, POINTER_COLUMN
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.thrift import ConnectionLost

BUCKETS = 1
INVALID = pointer(NOW_MS - DAY)
BODY = b"a payload that nobody shall read"

Step = Literal["nothing", "delete", "rollback"]
#: What others do to a row: after it was read, just before it is compared and set, and just after.
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


@pytest.fixture
def message(witness: happybase.Connection, namespace: str) -> happybase.Table:
    return witness.table(f"{namespace}:tms.message".encode())


def invert(store: HBaseStore, **options: Any) -> int:
    """Sweep and return the number of inverted rows."""
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    kit = janitor(store, clock=clock, snapshots=Snapshots(clock, [INVALID]), **options)
    report = kit.engine.run_once(adopt=True)
    assert report.errors == []
    return report.total(Rule.INVALID_TRANSACTION)


@dataclass
class Others:
    """The other clients, which follow a script for each row."""

    message: happybase.Table
    scripts: dict[bytes, tuple[Step, ...]]
    behind: Callable[[], object]
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
                    self._do(row, 0)
                self.behind()
            elif name == "checkAndPut":
                self._do(arguments[1], 1)
                self.behind()

    def after(self, name: str, arguments: tuple[Any, ...], _answer: Any) -> None:
        if name == "checkAndPut":
            with self._lock:
                self._look(arguments[1])
                self._do(arguments[1], 2)
                self.behind()
                self._look(arguments[1])

    def _do(self, row: bytes, number: int) -> None:
        match self.scripts[row][number]:
            case "delete":
                self.message.delete(row)
                self.deleted.add(row)
            case "rollback" if row not in self.deleted:
                self.message.put(row, {POINTER_COLUMN: cell(-INVALID)})

    def _look(self, row: bytes) -> None:
        """Check the row after the janitor's attempt."""
        found = self.message.row(row)
        if row in self.deleted:
            assert found == {}
        else:
            assert found == {POINTER_COLUMN: cell(-INVALID), PAYLOAD_COLUMN: BODY}


@pytest.mark.parametrize("behind", ["nothing", "flush", "compact"])
def test_inversion_racing_with_other_writes_restores_no_deleted_row(
    hbase: HBaseServer, store: HBaseStore, message: happybase.Table, namespace: str, behind: str
) -> None:
    topic(store, "default:orders", ttl_seconds=7 * 86_400).tx(
        INVALID, *range(NOW_MS - HOUR, NOW_MS - HOUR + len(SCRIPTS)), body=BODY
    )
    rows = [row for row, _ in message.scan()]
    table = f"{namespace}:tms.message"
    others = Others(
        message,
        dict(zip(rows, SCRIPTS, strict=True)),
        (lambda: None) if behind == "nothing" else lambda: hbase.command(behind, table),
    )
    watch_calls(store.pool, others.before, others.after)

    inverted = invert(store)

    # Ours are those that nobody had touched when it came to them.
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
    """Return the columns and values of the message table that were received."""
    came: list[tuple[bytes, bytes]] = []

    def after(name: str, _arguments: tuple[Any, ...], answer: Any) -> None:
        if name in {"scannerGetList", "getRowWithColumns", "getRowsWithColumns"}:
            came.extend((column, cell.value) for row in answer for column, cell in row.columns.items())

    watch_calls(store.pool, after=after)
    return came


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

    def lose_the_answer(name: str, arguments: tuple[Any, ...], _answer: Any) -> None:
        if name == "checkAndPut" and arguments[1] not in broken:
            broken.add(arguments[1])
            raise ConnectionLost("the answer is lost")

    watch_calls(store.pool, after=lose_the_answer)
    vars(store.pool)["_clock"] = SleeplessClock()
    answers.clear()
    assert invert(store) == 12
    assert len(broken) == 12
    assert {value for column, value in answers if column == PAYLOAD_COLUMN} == {b""}
    assert set(orders.pointers()) == {-INVALID}


@pytest.mark.parametrize("when", ["before the page", "behind the page"])
def test_cells_with_future_timestamps_are_deleted_by_next_run(
    hbase: HBaseServer, store: HBaseStore, message: happybase.Table, namespace: str, when: str
) -> None:
    # For an hour these keys cannot be put again.
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
    expected = [number not in (5, 7) for number in range(len(rows))]
    with Proxy(hbase.thrift) as proxy:
        for after_bytes in (0, 1, 40, 400, 800, 1200):
            # A pointer of its own each time: what the server still works off of a lost connection concerns none after.
            wp = INVALID + 2 + after_bytes
            for row, ours in zip(rows, expected, strict=True):
                if ours:
                    message.put(row, {POINTER_COLUMN: cell(wp)})
            with PatientStore([proxy.address], namespace=namespace, connections=1, clock=SleeplessClock()) as through:
                proxy.treat(cut_first(after_bytes))
                assert through.message.invert([one._replace(pointer=wp) for one in cells]) == expected
                assert proxy.struck == 1
    assert len(list(message.scan())) == len(rows) - 1


def cut_first(after_bytes: int) -> Callable[[int], Conduct]:
    return lambda number: Conduct(down=Fault("cut", after_bytes)) if number == 0 else HONEST
