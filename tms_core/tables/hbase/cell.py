"""One cell of HBase's that is compared before it is changed: where the servers of a store agree on who leads.

It has the shape that leases want (``tms_core.tables.lease.LeaseCell``). Its connections are its own and give up soon: a
lease must be renewed in time also while all others are busy with pages, or wait for a region.
"""

from __future__ import annotations

from tms_core.clock import Clock
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import HBaseRows
from tms_core.tables.hbase.schema import FAMILY

_COLUMN = FAMILY + b":v"


class HBaseCell:
    """A cell; threads may share it.

    Args:
        pool: connections to Thrift 1 servers; closed with this.
        table: the full name of a table that is there.
        row: its row's key.
        clock: our own clock.
    """

    def __init__(self, pool: HBasePool, table: bytes, row: bytes, clock: Clock) -> None:
        self._pool = pool
        self._rows = HBaseRows(pool, table, clock)
        self._row = row

    def lease(self) -> bytes | None:
        """The cell's value; None when it was never written.

        Raises:
            StoreError: HBase could not be asked.
        """
        value, _ = self._rows.get(self._row).get(_COLUMN, (None, 0))
        return value

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write ``value`` if ``expected`` is still there; if the connection breaks meanwhile, the cell tells.

        Raises:
            StoreError: HBase could not be asked; after a time-out it may be written all the same.
        """
        return self._rows.replace(_COLUMN, [(self._row, expected or b"", value)])[0]

    def close(self) -> None:
        self._pool.close()
