"""Transactions over the state's table: what is changed inside one is gathered here and written at its end.

Inside one, its thread reads what it has changed; other threads and processes read what counts at that moment.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from heapq import merge
from threading import RLock, get_ident
from typing import Any, TypeVar

from janitor.state.hbase.commit import ATTEMPTS, Commits, LostRace, crowded, lost
from janitor.state.hbase.table import JanitorTable
from janitor.state.hbase.view import BlockGone, Changes, View, packed
from tms_core.clock import Clock, SystemClock
from tms_core.errors import StateError
from tms_core.tables.hbase.pool import HBasePool

T = TypeVar("T")


class HBaseTransactions:
    """The state's table on a cluster. Threads may share one; processes may each have their own on the same table.

    Args:
        thrift: ``HOST:PORT`` of each Thrift 1 server.
        namespace: the HBase namespace.
        thrift2: of Thrift 2 servers, with which the table is made if it is not there.
        connections: how many may be open at once.
        timeout_seconds: the longest one call may take.
        clock: our own clock.
        prefix: what the keys of this state begin with, where several share the table.

    Attributes:
        pool: the connections; its ``calls`` counts Thrift calls.

    Raises:
        StoreNotFound: the table is not there and cannot be made.
        StateError: HBase cannot be asked, or what is there is not ours.
    """

    def __init__(
        self,
        thrift: Sequence[str],
        *,
        namespace: str = "cdap_system",
        thrift2: Sequence[str] = (),
        connections: int = 4,
        timeout_seconds: float = 30,
        clock: Clock | None = None,
        prefix: bytes = b"",
    ) -> None:
        self._clock = clock or SystemClock()
        self.pool = HBasePool(thrift, connections=connections, timeout_seconds=timeout_seconds, clock=self._clock)
        self._table = JanitorTable(self.pool, namespace, prefix, self._clock)
        self._commits = Commits(self._table)
        self._where = self._table.name
        self._lock = RLock()
        self._inside: int | None = None
        self._changes: Changes | None = None
        try:
            self._table.open(thrift2, timeout_seconds)
            self._commits.root()
        except StateError:
            self.pool.close()
            raise

    def close(self) -> None:
        self._table.close()
        self.pool.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            outer = self._changes
            if outer is None:
                self._changes, self._inside = Changes(self._commits.present()), get_ident()
                try:
                    yield
                    self._commits.commit(self._changes)
                finally:
                    self._changes = self._inside = None
                return
            before = outer.copy()
            try:
                yield
            except BaseException:
                self._changes = before
                raise

    # -- the lease: never part of a transaction, whose end might come too late for it ------------------------------

    def lease(self) -> bytes | None:
        return self._commits.root().lease

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        return self._commits.swap_lease(expected, value)

    # -- for the parts of the state -------------------------------------------------------------------------------

    def _read_view(self, read: Callable[[View], T]) -> T:
        """Read values of one moment: the transaction's, or the present."""
        if self._changes is not None and self._inside == get_ident():
            try:
                return read(self._changes)
            except BlockGone:
                raise lost(self._where) from None
        for _ in range(ATTEMPTS):
            with suppress(BlockGone):
                return read(self._commits.present())
        raise crowded(self._where)

    def _json(self, name: str, default: Any = None) -> Any:
        """One value; a new object each time."""
        value = self._read_view(lambda view: view.value(name))
        return default if value is None else json.loads(value)

    def _write(self, work: Callable[[], T]) -> T:
        """Do one change, by itself or as part of the transaction; by itself again if another process came before."""
        if self._inside == get_ident():
            return work()
        for _ in range(ATTEMPTS - 1):
            with suppress(LostRace), self.transaction():
                return work()
        with self.transaction():
            return work()

    def _save(self, name: str, value: Any) -> None:
        """Change a value, inside a transaction; None removes it, and one that did not change costs no write."""
        new = None if value is None else packed(value)
        if new != self._read_view(lambda view: view.value(name)):
            self._save_packed(name, new)

    def _save_packed(self, name: str, value: bytes | None) -> None:
        """Change a value that is packed already, inside a transaction."""
        changes = self._changing()
        changes.touched.add(name)
        changes.values[name] = value

    def _put_row(self, key: bytes, value: bytes) -> None:
        """Write a row of history, inside a transaction."""
        self._changing().rows[key] = zlib.compress(value, 1)

    def _delete_row(self, key: bytes) -> None:
        self._changing().rows[key] = None

    def _row(self, key: bytes) -> bytes | None:
        return self._rows_of([key]).get(key)

    def _rows_of(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Rows of history that there are."""
        changed = self._changed_rows()
        found = self._table.get_many([key for key in keys if key not in changed]) if keys else {}
        found |= {key: value for key in keys if (value := changed.get(key)) is not None}
        return {key: zlib.decompress(found[key]) for key in keys if key in found}

    def _scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows of history from ``start`` until before ``stop``, in order."""
        return ((key, zlib.decompress(value)) for key, value in self._merged(start, stop, keys_only=False))

    def _scan_keys(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        return (key for key, _ in self._merged(start, stop, keys_only=True))

    def _merged(self, start: bytes, stop: bytes, *, keys_only: bool) -> Iterator[tuple[bytes, bytes]]:
        changed = self._changed_rows()
        new = sorted((key, row) for key, row in changed.items() if row is not None and start <= key < stop)
        stored = self._table.scan(start, stop, keys_only=keys_only)
        return merge(((key, row) for key, row in stored if key not in changed), new)

    def _changing(self) -> Changes:
        if self._changes is None:
            raise StateError(f"{self._where}: changes are made inside a transaction.")
        return self._changes

    def _changed_rows(self) -> Mapping[bytes, bytes | None]:
        if self._changes is None or self._inside != get_ident():
            return {}
        return self._changes.rows
