"""The state's table in HBase: rows of one cell each, and one row that is changed by compare-and-set.

All cells and their delete markers have the timestamp 1, except the root and the cell that shows the server's clock.
Therefore nothing depends on the clocks of HBase's servers: the later write of a cell counts, and a marker hides exactly
the existing cell. In return, a deleted key must never be used again, because its marker would hide the new cell.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from tms_core.clock import Clock
from tms_core.errors import StateError, StateUnavailable, StoreError, StoreNotFound, StoreUnavailable
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import KEYS, ROWS, HBaseRows, batches
from tms_core.tables.hbase.schema import FAMILY, JANITOR_TABLE, create_tables, janitor_table_spec
from tms_core.tables.hbase.thrift import ThriftConnection
from tms_core.tables.hbase.wire.security import ThriftSecurity

#: The table's name in its namespace.
TABLE = JANITOR_TABLE
#: The only column.
COLUMN = FAMILY + b":v"

#: The maximum number of rows, and bytes of their values, in one call.
_BATCH_ROWS, _BATCH_BYTES = 1000, 4 << 20
#: The number of rows in a page.
_PAGE_ROWS = 1000
_TIMESTAMP = 1
#: The row whose cell gets the server's timestamp, and the size of its random value in bytes.
_CLOCK, _TOKEN_BYTES = b"clock", 8


class JanitorTable:
    """The rows of the table by key.

    Args:
        pool: connections to Thrift 1 servers.
        namespace: the HBase namespace.
        prefix: the prefix of all keys in HBase, which callers do not see.
    """

    def __init__(self, pool: HBasePool, namespace: str, prefix: bytes, clock: Clock) -> None:
        self.name = f"{namespace}:{TABLE}"
        self._pool = pool
        self._spec = janitor_table_spec(namespace)
        self._prefix = prefix
        self._closed = False
        self._rows = HBaseRows(pool, self.name.encode(), clock)

    def open(self, thrift2: Sequence[str], timeout_seconds: float, security: ThriftSecurity | None = None) -> None:
        """Create the table if it does not exist.

        Args:
            thrift2: ``HOST:PORT`` of Thrift 2 servers that create the table; empty: a Thrift 1 server creates it.
            timeout_seconds: the timeout of a call to a Thrift 2 server.
            security: the security of that connection; None: plain text without a login.

        Raises:
            StateError: the table does not exist and cannot be created (the hint has the command that creates it), or
                HBase does not respond.
        """
        with self._convert_errors():
            try:
                self._rows.get(self._prefix or b"\x00")
            except StoreNotFound:
                if not thrift2:
                    self._create(self._create_plainly)
                    return
                admin = HBasePool(
                    thrift2, connections=1, timeout_seconds=timeout_seconds, service="HbaseAdmin", security=security
                )
                with closing(admin):
                    self._create(lambda: create_tables(admin, [self._spec]))

    def close(self) -> None:
        """Close the connections; every later call raises an error."""
        self._closed = True
        self._pool.close()

    def get(self, key: bytes) -> bytes | None:
        """Return a value; None if it does not exist."""
        with self._convert_errors():
            value, _ = self._rows.get(self._prefix + key or b"\x00").get(COLUMN, (None, 0))
        return value

    def removal(self, key: bytes) -> str:
        """Return the command of HBase's shell that deletes a row."""
        row = "".join(f"\\x{byte:02x}" for byte in self._prefix + key)
        return f"deleteall '{self.name}', \"{row}\""

    def server_ms(self) -> int | None:
        """Return the time of the region server of the row ``clock``; None if an old cell with a later time hides it."""
        row, token = self._prefix + _CLOCK, secrets.token_bytes(_TOKEN_BYTES)
        with self._convert_errors():
            self._rows.put([(row, {COLUMN: token})])
            # The token shows that this is the cell just written, and not the cell of another process.
            value, timestamp_ms = self._rows.get(row).get(COLUMN, (None, 0))
        return timestamp_ms if value == token else None

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the existing values."""
        found = {}
        with self._convert_errors():
            for some in batches(keys, _BATCH_ROWS):
                for row, cells in self._rows.get_many([self._prefix + key for key in some]):
                    found[row[len(self._prefix) :]] = cells[COLUMN][0]
        return found

    def scan(self, start: bytes, stop: bytes, *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values of ``[start, stop)`` in order; with ``keys_only`` all values are empty."""
        at, end = self._prefix + start, self._prefix + stop
        ended = False
        while not ended:
            with self._convert_errors():
                rows, ended = self._rows.fetch(at, end, _PAGE_ROWS, KEYS if keys_only else ROWS)
            for row in rows:
                yield row.row[len(self._prefix) :], row.columns[COLUMN].value
            if rows:
                at = rows[-1].row + b"\x00"

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Write rows durably, but not atomically."""
        some: list[tuple[bytes, bytes]] = []
        size = 0
        for key, value in rows:
            some.append((key, value))
            size += len(value)
            if len(some) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                self._put(some)
                some, size = [], 0
        if some:
            self._put(some)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete rows; their keys must not be written again."""
        for some in batches(keys, _BATCH_ROWS):
            with self._convert_errors():
                self._rows.mark([self._prefix + key for key in some], _TIMESTAMP)

    def swap(self, key: bytes, old: bytes, new: bytes) -> tuple[bool, bool]:
        """Replace a value if it is still the old value (empty: if it does not exist).

        Returns:
            Whether it was replaced, and whether a "no" is certain: after a broken connection the call is repeated, and
            the "no" may be the response to the repeated call.
        """
        calls = 0

        def work(connection: ThriftConnection) -> bool:
            nonlocal calls
            calls += 1
            return self._rows.check_and_put(connection, self._prefix + key, COLUMN, old, new)

        with self._convert_errors():
            done = self._pool.run(work)
        return done, calls == 1

    def _put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        with self._convert_errors():
            self._rows.put(((self._prefix + key, {COLUMN: value}) for key, value in rows), _TIMESTAMP)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of HBase's tables into errors of the state."""
        if self._closed:
            raise StateError(f"{self.name}: this state is closed.")
        try:
            yield
        except StoreUnavailable as error:
            raise StateUnavailable(error.message, error.hint) from error
        except StoreError as error:
            raise StateError(error.message, error.hint) from error

    def _create_plainly(self) -> None:
        with self._pool.connection() as connection:
            connection.happybase.create_table(self.name, self._spec.families())

    def _create(self, create: Callable[[], object]) -> None:
        try:
            create()
        except StoreError as error:
            try:
                # Another process may have created it at the same time.
                self._rows.get(self._prefix or b"\x00")
            except StoreError:
                raise self._missing(error.message) from error

    def _missing(self, reason: str) -> StateError:
        return StateError(
            f"Table {self.name}, where the janitor keeps its state, does not exist and could not be created. {reason}",
            f"Create it in the HBase shell: {self._spec.shell_line()}",
        )
