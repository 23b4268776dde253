"""Marks that a table of HBase loses when a snapshot is restored over it (rule S13).

A table that was restored, or dropped and cloned from a snapshot, has the name, the regions and the start codes it had
(``docs/hbase.md``, "What a restored table keeps"). But either takes a table that is disabled, or makes one, and HBase
then writes whether the table is enabled anew: a cell in ``hbase:meta``, with the time. Nothing else writes it: not the
end of a server, a split, a move, or an ``alter``.

The trade: a table that was only disabled and enabled cannot be told from a restored one. HBase 1 has no such cell, and
nothing is noticed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tms_core.tables.base import TableName
from tms_core.tables.hbase.pool import HBasePool

_META, _STATE = b"hbase:meta", b"table:state"


class TableStates:
    """Since when the tables of a store have been as they are.

    Args:
        pool: connections to Thrift 1 servers.
        names: the tables' full names.
    """

    def __init__(self, pool: HBasePool, names: Mapping[TableName, bytes]) -> None:
        self._pool = pool
        self._names = names

    def remembered(self) -> dict[str, Any]:
        """The milliseconds at which each table was last made, enabled or disabled; without those where it is not said.

        Raises:
            StoreError: as any call.
        """
        names = list(self._names.values())
        found = dict(
            self._pool.run(lambda connection: connection.table(_META).rows(names, [_STATE], include_timestamp=True))
        )
        return {table: found[name][_STATE][1] for table, name in self._names.items() if _STATE in found.get(name, {})}

    def restored_since(self, known: Mapping[str, Any]) -> str | None:
        """How it shows that a table may be another one than the one remembered; None: nothing shows that.

        Raises:
            StoreError: as any call.
        """
        if not known:
            return None
        present = self.remembered()
        for table, before_ms in known.items():
            now_ms = present.get(table)
            if now_ms is None:
                return f"the {table} table is gone"
            if now_ms != before_ms:
                when = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="seconds")
                return f"the {table} table was disabled, or made anew, and enabled at {when}"
        return None
