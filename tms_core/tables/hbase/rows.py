"""The rows of one table in HBase, including salts: short scans, reliable deletes, compare-and-set.

Each page is a scanner that is opened, read and closed on one borrowed connection. Therefore the server has no open
scanner between pages, and any page may be read again after a failure.

**Deletes.** HBase hides cells that are not newer than a delete marker, and sets the timestamps of both by the clock of
the region's current server. After a move to a server whose clock is late, a plain marker can be older than the cells
that it should hide, and the row stays. Every page has the timestamps of its cells. If they are old, the server sets the
marker's timestamp. If they are about as new as the local clock, the marker has the local time. If they are ahead of the
local clock, the marker has their highest timestamp; then, or if they are unknown, the rows are read again before they
count as deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import islice, pairwise
from struct import pack
from typing import Any, NamedTuple, TypeVar

import happybase

from tms_core.clock import Clock
from tms_core.errors import StoreError, TooLarge
from tms_core.logs.loggers import get_logger
from tms_core.tables.base import KeyRange, partial_write_error
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.regions import Regions
from tms_core.tables.hbase.schema import FAMILY
from tms_core.tables.hbase.thrift import HBASE, ThriftConnection, interface

T = TypeVar("T")

logger = get_logger(__name__)

#: The rows of a call that changes them: more rows are hardly faster, and each call has a time limit.
BATCH_ROWS = 2000
#: The number of changes that are sent over one connection before the first response, so they share one round trip.
CHANGES_AT_ONCE = 32
#: The largest clock difference between HBase's servers and this machine, in milliseconds.
CLOCKS_MS = 300_000
#: The bytes of values after which a page stops.
PAGE_BYTES = 8 << 20
#: The first request of a page of rows of unknown size: in a page of the usual size, and in a small one.
_FIRST_ROWS, _FEW_ROWS = 64, 4
#: The largest number of attempts to delete rows that still exist.
_ATTEMPTS = 3

#: A row of a scan, as the client returns it: ``.row``, and ``.columns`` from name to cell.
Row = Any
#: The cells of a requested row: value and timestamp of each column.
Cells = dict[bytes, tuple[bytes, int]]


#: Thrift's binary protocol: the headers of fields by type and number, and the end of a struct.
_STRING_1, _STRUCTS_2, _TIMESTAMP_3 = b"\x0b\0\x01", b"\x0f\0\x02\x0c", b"\x0a\0\x03"
_NO_ATTRIBUTES_3, _NO_ATTRIBUTES_4 = (b"\x0d\0" + number + b"\x0b\x0b\0\0\0\0\0" for number in (b"\x03", b"\x04"))
#: The rest of a BatchMutation after its row: one Mutation that deletes the family (isDelete, column, writeToWAL).
_DELETE_FAMILY = (
    b"\x0f\0\x02\x0c\0\0\0\x01\x02\0\x01\x01\x0b\0\x02" + pack(">i", len(FAMILY)) + FAMILY + b"\x02\0\x04\x01\0\0"
)


class Query(NamedTuple):
    """The requested parts of each row.

    Attributes:
        filter: the filter in HBase's filter language; None: whole rows.
        whole: whether the rows include payloads, so that bytes limit a page, too.
        page_bytes: the bytes of values after which a page of whole rows stops.
    """

    filter: bytes | None
    whole: bool
    page_bytes: int = PAGE_BYTES


#: Keys: all cells without their values. A delete needs the newest cell, and a message's pointer may be much newer than
#: its payload.
KEYS = Query(b"KeyOnlyFilter()", whole=False)
#: Keys, one for each row.
FIRST_KEYS = Query(b"FirstKeyOnlyFilter() AND KeyOnlyFilter()", whole=False)
#: Pointers: the values of pointer cells, and the keys of other rows. Without these keys, a page in a long range of rows
#: without pointers would exceed the timeout, and so would each repetition.
POINTERS = Query(
    b"(QualifierFilter(!=, 'binary:\x00\x00\x00t') AND KeyOnlyFilter()) OR QualifierFilter(=, 'binary:\x00\x00\x00t')",
    whole=False,
)
#: Whole rows.
ROWS = Query(None, whole=True)


class Fetched(NamedTuple):
    """Rows in order, and whether the range has no more."""

    rows: list[Row]
    ended: bool


class HBaseRows:
    """One table of HBase.

    Args:
        pool: connections to Thrift 1 servers.

    Attributes:
        ahead_ms: the largest advance of a deleted cell's timestamp over the local clock, in milliseconds.
        wrong_salts: the number of rows found under a wrong salt.
        regions: the regions with deleted rows.
    """

    def __init__(self, pool: HBasePool, name: bytes, clock: Clock) -> None:
        self.pool = pool
        self.name = name
        self.ahead_ms = 0
        self.wrong_salts = 0
        self._lock = threading.Lock()
        self._clock = clock
        self.regions = Regions(pool, name, clock)

    def call_table(self, work: Callable[[happybase.Table], T]) -> T:
        """Make a call on happybase's table, and repeat it on another connection if the connection breaks.

        Args:
            work: makes the call; it may be executed twice.

        Raises:
            StoreError: as :meth:`HBasePool.run`.
        """
        return self.pool.run(lambda connection: work(connection.table(self.name)))

    def get(self, row: bytes) -> Cells:
        """Return one whole row; empty if it does not exist."""
        found: Cells = self.call_table(lambda table: table.row(row, include_timestamp=True))
        return found

    def get_many(self, rows: list[bytes]) -> list[tuple[bytes, Cells]]:
        """Return the whole rows with these keys, without missing rows."""
        found: list[tuple[bytes, Cells]] = self.call_table(lambda table: table.rows(rows, include_timestamp=True))
        return found

    def fetch(self, start: bytes, stop: bytes | None, limit: int, query: Query) -> Fetched:
        """Return at most ``limit`` rows of ``[start, stop)``, fewer if they are large."""
        if stop is not None and start >= stop:
            return Fetched([], ended=True)
        return self.pool.run(lambda connection: self._fetch(connection, start, stop, limit, query))

    def salts(self, start: bytes | None = b"") -> list[int]:
        """Return the salts of the rows from ``start`` on, by a seek from each salt to the next."""
        found: list[int] = []
        while start is not None and (rows := self.fetch(start, None, 1, KEYS).rows):
            found.append(rows[0].row[0])
            start = after_salt(found[-1])
        return found

    def delete(self, rows: Sequence[bytes], newest_ms: int | None) -> None:
        """Delete rows.

        Args:
            newest_ms: the highest timestamp of their cells; None: unknown.

        Raises:
            StoreError: a row still exists after all attempts.
        """
        if not rows:
            return
        now_ms = self._clock.now_ms()
        if newest_ms is not None and newest_ms < now_ms - CLOCKS_MS:
            # The cells are older than the largest clock difference, so a marker with the server's time hides them.
            self.mark(rows, None)
            return
        # A marker with an older timestamp than a cell does not hide it, so use the highest timestamp.
        self.mark(rows, None if newest_ms is None else max(newest_ms, now_ms))
        if newest_ms is None or newest_ms > now_ms:
            self._ensure_deleted(rows, newest_ms or 0)

    def mark(self, rows: Sequence[bytes], timestamp_ms: int | None) -> None:
        """Write a delete marker for each row, which hides cells up to a timestamp (None: the server's time)."""
        for batch in batches(rows, BATCH_ROWS):
            self._mark(batch, timestamp_ms)

    def count_wrong_salts(self, rows: int) -> None:
        """Add to ``wrong_salts``; log the first time."""
        with self._lock:
            is_first = rows and not self.wrong_salts
            self.wrong_salts += rows
        if is_first:
            logger.warning(
                "%s has rows under a wrong salt, so CDAP never finds them: a program has written them with a wrong "
                "number of buckets. The janitor sweeps them as all others",
                self.name.decode(),
            )

    def put(self, rows: Iterable[tuple[bytes, dict[bytes, bytes | None]]], timestamp_ms: int | None = None) -> None:
        """Write cells; a value of None deletes the cell.

        Args:
            rows: key, and cells by column.
            timestamp_ms: the timestamp of all cells; None: the server's current time.

        Raises:
            TooLarge: a cell is above HBase's limit; nothing was written.
            StoreError: as :meth:`call_table`; a part of the rows may be written.
        """
        for number, some in enumerate(batches(rows, BATCH_ROWS)):
            try:
                self.call_table(partial(_put, some, timestamp_ms))
            except TooLarge as error:
                if number:
                    raise partial_write_error(error) from error
                raise

    def replace(self, column: bytes, changes: Sequence[tuple[bytes, bytes, bytes]]) -> list[bool]:
        """Replace a cell's value in each row by compare-and-set.

        If the connection breaks during the changes, this method reads the cells to determine which changes were made.

        Args:
            changes: row, old value (not empty) and new value.

        Returns:
            Whether this call has set the new value, for each row.
        """
        done: list[bool] = []
        in_doubt: list[bytes] = []

        def work(connection: ThriftConnection) -> None:
            while some := changes[len(done) : len(done) + CHANGES_AT_ONCE]:
                rows = [row for row, _, _ in some]
                is_repeated = in_doubt == rows
                in_doubt[:] = rows
                calls = [("checkAndPut", self._check_and_put(row, column, old, new)) for row, old, new in some]
                answers = connection.calls(calls)
                # Read only after the repeated calls: before them, the server may still execute the calls of the lost
                # connection.
                values = self._values(connection, rows, column) if is_repeated and not all(answers) else {}
                done.extend(made or values.get(row) == new for made, (row, _, new) in zip(answers, some, strict=True))
                in_doubt.clear()

        self.pool.run(work)
        return done

    def values(self, rows: list[bytes], column: bytes) -> dict[bytes, bytes]:
        """Return the values of a column in these rows; omit rows without the column."""
        return self.pool.run(lambda connection: self._values(connection, rows, column)) if rows else {}

    def check_and_put(self, connection: ThriftConnection, row: bytes, column: bytes, old: bytes, new: bytes) -> bool:
        """Write a cell if it has the value ``old``. In HBase, an empty ``old`` matches an empty and a missing cell."""
        done: bool = connection.call("checkAndPut", *self._check_and_put(row, column, old, new))
        return done

    def compact(self, ranges: Sequence[KeyRange]) -> None:
        """Request the compaction of regions if it is worthwhile; HBase compacts in the background."""
        self.regions.compact(ranges, self._count)

    def _count(self, key_range: KeyRange, limit: int) -> int:
        found, (start, stop) = 0, key_range
        while found < limit:
            rows, ended = self.fetch(start, stop, min(BATCH_ROWS, limit - found), FIRST_KEYS)
            found += len(rows)
            if ended:
                break
            start = rows[-1].row + b"\x00"
        return found

    def _fetch(
        self, connection: ThriftConnection, start: bytes, stop: bytes | None, limit: int, query: Query
    ) -> Fetched:
        first = _FIRST_ROWS if query.page_bytes >= PAGE_BYTES else _FEW_ROWS
        count = min(limit, first) if query.whole else limit
        scan = interface().Scan(
            startRow=start, stopRow=stop, caching=count, filterString=query.filter, cacheBlocks=False
        )
        scanner = connection.call("scannerOpenWithScan", self.name, scan, {})
        if query.whole:
            page = self._fetch_by_size(connection, scanner, limit, count, query.page_bytes)
        else:
            rows, _ = connection.calls([("scannerGetList", (scanner, limit)), ("scannerClose", (scanner,))])
            page = Fetched(rows, len(rows) < limit)
        _require_order(page.rows, start, stop)
        return page

    def _fetch_by_size(
        self, connection: ThriftConnection, scanner: int, limit: int, count: int, page_bytes: int
    ) -> Fetched:
        """Read whole rows until they have ``page_bytes`` of values; the rows of a call depend on their size."""
        rows: list[Row] = []
        ended, size = False, 0
        while not ended and len(rows) < limit and size < page_bytes:
            count = min(count, limit - len(rows))
            received = connection.call("scannerGetList", scanner, count)
            rows += received
            ended = len(received) < count
            if received:
                size += (received_bytes := sum(len(cell.value) for row in received for cell in row.columns.values()))
                share = min(PAGE_BYTES >> 3, page_bytes - size)
                # At most eight times as many as before, because larger rows may follow.
                count = max(1, min(count << 3, share // (received_bytes // len(received) + 1)))
        connection.call("scannerClose", scanner)
        return Fetched(rows, ended)

    def _mark(self, rows: Sequence[bytes], timestamp_ms: int | None) -> None:
        name = "mutateRows" if timestamp_ms is None else "mutateRowsTs"
        arguments = encode_deletions(self.name, rows, timestamp_ms)
        self.pool.run(lambda connection: connection.calls([(name, arguments)]))

    def _ensure_deleted(self, rows: Sequence[bytes], newest_ms: int) -> None:
        """Read deleted rows, and delete remaining rows again."""
        remaining = self._remaining(rows)
        for _ in range(_ATTEMPTS):
            newest_ms = max([newest_ms, *remaining.values()])
            with self._lock:
                self.ahead_ms = max(self.ahead_ms, newest_ms - self._clock.now_ms())
            if not remaining:
                return
            # HBase keeps a cell that is newer than its marker, so mark with the highest timestamp that was read.
            self.mark(list(remaining), newest_ms)
            remaining = self._remaining(list(remaining))
        raise StoreError(
            f"{len(remaining)} rows of {self.name.decode()} still exist after {_ATTEMPTS} deletes, "
            f"the first is {next(iter(remaining)).hex()}.",
            "Check whether a program writes them, and whether the clocks of HBase's servers agree.",
        )

    def _remaining(self, rows: Sequence[bytes]) -> dict[bytes, int]:
        """Return the existing rows, each with the highest timestamp of its cells."""
        found = [one for some in batches(rows, BATCH_ROWS) for one in self.get_many(some)]
        return {row: newest_of(cells) for row, cells in found}

    def _check_and_put(self, row: bytes, column: bytes, old: bytes, new: bytes) -> tuple[Any, ...]:
        return self.name, row, column, old, HBASE.Mutation(False, column, new), {}

    def _values(self, connection: ThriftConnection, rows: list[bytes], column: bytes) -> dict[bytes, bytes]:
        found = connection.table(self.name).rows(rows, [column])
        return {row: cells[column] for row, cells in found if column in cells}


def _require_order(rows: Sequence[Row], start: bytes, stop: bytes | None) -> None:
    """Check that a scan returns rows of its range in order, because its last row determines the next page.

    Raises:
        StoreError: rows are unordered or outside the range, so a scan would miss rows or never stop.
    """
    keys = [row.row for row in rows]
    in_range = not keys or (b"" < keys[0] >= start and (stop is None or keys[-1] < stop))
    if not in_range or any(one >= other for one, other in pairwise(keys)):
        raise StoreError(
            "HBase's Thrift server returned rows of a scan that are out of order or outside its range.",
            "Check that storage.hbase.thrift is a Thrift 1 server of HBase, without a proxy in between.",
        )


def encode_deletions(table: bytes, rows: Sequence[bytes], timestamp_ms: int | None) -> bytes:
    """Encode the arguments of ``mutateRows``, or with a timestamp ``mutateRowsTs``, that delete the family of each row.

    thriftpy2 encodes the same bytes from an object for each row, which takes several times as long.

    Args:
        timestamp_ms: the timestamp of the delete markers; None: the server's time.
    """
    parts = [_STRING_1, _size(table), table, _STRUCTS_2, _size(rows)]
    for row in rows:
        parts += (_STRING_1, _size(row), row, _DELETE_FAMILY)
    parts.append(
        _NO_ATTRIBUTES_3 if timestamp_ms is None else _TIMESTAMP_3 + pack(">q", timestamp_ms) + _NO_ATTRIBUTES_4
    )
    return b"".join(parts)


def _size(value: Sized) -> bytes:
    return pack(">i", len(value))


def newest(rows: Iterable[Row]) -> int:
    """Return the highest timestamp of the rows' cells; 0 without any."""
    return max([cell.timestamp for row in rows for cell in row.columns.values()], default=0)


def newest_of(cells: Cells) -> int:
    """Return the highest timestamp of a row's cells; 0 without any."""
    return max((timestamp for _, timestamp in cells.values()), default=0)


def _put(
    rows: Sequence[tuple[bytes, dict[bytes, bytes | None]]], timestamp_ms: int | None, table: happybase.Table
) -> None:
    batch = table.batch(timestamp_ms)
    for row, cells in rows:
        batch.put(row, {column: value for column, value in cells.items() if value is not None})
        batch.delete(row, [column for column, value in cells.items() if value is None])
    batch.send()


def after_salt(salt: int) -> bytes | None:
    """Return the start of the rows of the next salt; None: this is the last salt."""
    return bytes([salt + 1]) if salt < 0xFF else None


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most ``size``."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
