"""The side table in HBase (:mod:`tms_core.tables.side`)."""

from __future__ import annotations

from collections.abc import Sequence

from tms_core.clock import Clock, SystemClock
from tms_core.errors import StoreError, StoreNotFound
from tms_core.tables.base import Page
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import ROWS, HBaseRows
from tms_core.tables.hbase.schema import FAMILY, TableSpec
from tms_core.tables.side import SideChange, SideTable

#: The name of the table, its only column, and the key of no row.
HBASE_TABLE, _COLUMN, _NO_ROW = "tms.side", FAMILY + b":v", b"\0"


class HBaseSide(SideTable):
    """A table with one cell per row, without salt, next to CDAP's tables.

    Args:
        pool: connections to Thrift 1 servers; closed with the table.
        create: create the table if it does not exist; otherwise a missing table counts as empty.

    Raises:
        StoreUnavailable: no Thrift server responds, or HBase does not.
        StoreError: the table could not be created.
    """

    def __init__(self, pool: HBasePool, namespace: str, clock: Clock | None = None, *, create: bool = True) -> None:
        spec = TableSpec(namespace, HBASE_TABLE, "NONE")
        self._rows = HBaseRows(pool, spec.full_name.encode(), clock or SystemClock())
        self._pool = pool
        self._may_be_missing = not create
        try:
            try:
                self._rows.get(_NO_ROW)
            except StoreNotFound:
                if create:
                    self._create(spec)
        except StoreError:
            self.close()
            raise

    def get(self, key: bytes) -> bytes | None:
        try:
            value, _ = self._rows.get(key).get(_COLUMN, (None, 0))
        except StoreNotFound:
            if not self._may_be_missing:
                raise
            return None
        return value

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        try:
            found, ended = self._rows.fetch(start, stop, limit, ROWS)
        except StoreNotFound:
            if not self._may_be_missing:
                raise
            return Page([], None)
        items = [(row.row, cell.value) for row in found if (cell := row.columns.get(_COLUMN)) is not None]
        return Page(items, None if ended else found[-1].row + b"\0")

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        if self._may_be_missing:
            # Read first: HBase reports a missing table to a reader, while a writer only exhausts its retries.
            self._rows.get(_NO_ROW)
        self._rows.put((key, {_COLUMN: value}) for key, value in rows)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._rows.delete(keys, None)

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        # Write the compared rows first, because a change that fails must not write its other rows. HBase has no atomic
        # batch across rows, so a crash in between leaves the other rows of a change unwritten.
        made = self._rows.replace(_COLUMN, [(change.key, change.expected or b"", change.value) for change in changes])
        done = [change for change, is_made in zip(changes, made, strict=True) if is_made]
        self.put([row for change in done for row in change.puts])
        self.delete([key for change in done for key in change.deletes])
        return made

    def close(self) -> None:
        self._pool.close()

    def _create(self, spec: TableSpec) -> None:
        try:
            with self._pool.connection() as connection:
                connection.happybase.create_table(spec.full_name, spec.families())
        except StoreError as error:
            try:
                # Another process may have created it at the same time.
                self._rows.get(_NO_ROW)
            except StoreNotFound:
                error.hint = f"Create it in the HBase shell: {spec.shell_line()}"
                raise error from None
