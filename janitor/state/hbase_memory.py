"""Transactions over the memory's table: what is changed inside one is gathered here and written at its end.

First the new blocks and rows of history are written, then the root is replaced, then goes what no longer counts. So
a process that dies in between leaves blocks that do not count, which the next one removes, or a page of history
without its effect; never an effect without its history.

Nobody is kept waiting: whoever replaces the root first has committed. The other one writes again on the new root when
nothing it has read or changed is different there, and otherwise has lost the race.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from heapq import merge
from threading import RLock, get_ident
from typing import Any, TypeVar

from janitor.state.hbase_root import Root
from janitor.state.hbase_table import JanitorTable
from janitor.state.hbase_view import BLOCK, CLOSED, Changes, Committed, Gone, View, packed, with_changes
from tms_core.clock import Clock, SystemClock
from tms_core.errors import StoreBusy, StoreError, StoreUnavailable
from tms_core.lease import LeaseRecord
from tms_core.tables.hbase_pool import HBasePool

T = TypeVar("T")

ROOT = b"root"
#: How often something is tried that another process came before.
_ATTEMPTS = 5
_TOKEN_BYTES = 6
#: What was learnt about the store: only who has the lease, or never had one, may say so (rules S4 and S12).
_FENCED = ("store", "anchor", "frontiers", "ids", "evidence", "claim", "thorough", "strikes")
#: Rows of history that have the same key when they are written again; all others are written once.
_RENEWED = (b"r", b"q")
#: What a refused process can do.
_AGAIN = "Nothing was changed; do it again."


class LostRace(StoreBusy):
    """Another process has changed what a transaction read or changed."""


class HBaseMemory:
    """The memory's table on a cluster. Threads may share one; processes may each have their own on the same table.

    Args:
        thrift: ``HOST:PORT`` of each Thrift 1 server.
        namespace: the HBase namespace.
        thrift2: of Thrift 2 servers, with which the table is made if it is not there.
        connections: how many may be open at once.
        timeout_seconds: the longest one call may take.
        clock: our own clock.
        prefix: what the keys of this memory begin with, where several share the table.

    Attributes:
        pool: the connections; its ``calls`` counts Thrift calls.

    Raises:
        StoreNotFound: the table is not there and cannot be made.
        StoreError: HBase cannot be asked, or what is there is not ours.
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
        self._where = self._table.name
        self._closed = False
        self._lock = RLock()
        self._inside: int | None = None
        self._changes: Changes | None = None
        #: Held while the root is replaced, so that our own lease that is renewed meanwhile is not taken for another's.
        self._replacing = RLock()
        self._mine: bytes | None = None
        self._tidy = False
        #: The blocks last read, as they are stored, by name.
        self._read: dict[str, tuple[tuple[str, ...], bytes]] = {}
        try:
            self._table.open(thrift2, timeout_seconds)
            self._root()
        except StoreError:
            self.pool.close()
            raise

    def close(self) -> None:
        self._closed = True
        self.pool.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            outer = self._changes
            if outer is None:
                self._changes, self._inside = Changes(self._committed(self._root())), get_ident()
                try:
                    yield
                    self._commit(self._changes)
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
        return self._root().lease

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        with self._replacing:
            for _ in range(_ATTEMPTS):
                root = self._root()
                if root.lease != expected:
                    return False
                token = secrets.token_hex(_TOKEN_BYTES)
                if self._replace(root, root.next(token, lease=value)):
                    record = LeaseRecord.parse(value)
                    self._mine = value if record is not None and record.holder else None
                    return True
        raise self._crowded()

    # -- for the parts of the memory ------------------------------------------------------------------------------

    def _look(self, read: Callable[[View], T]) -> T:
        """Read values of one moment: the transaction's, or the present."""
        if self._changes is not None and self._inside == get_ident():
            try:
                return read(self._changes)
            except Gone:
                raise self._lost() from None
        for _ in range(_ATTEMPTS):
            with suppress(Gone):
                return read(self._committed(self._root()))
        raise self._crowded()

    def _json(self, name: str, default: Any = None) -> Any:
        """One value; a new object each time."""
        value = self._look(lambda view: view.value(name))
        return default if value is None else json.loads(value)

    def _write(self, work: Callable[[], T]) -> T:
        """Do one change, by itself or as part of the transaction; by itself again if another process came before."""
        if self._inside == get_ident():
            return work()
        for _ in range(_ATTEMPTS - 1):
            with suppress(LostRace), self.transaction():
                return work()
        with self.transaction():
            return work()

    def _save(self, name: str, value: Any) -> None:
        """Change a value, inside a transaction; None removes it, and one that did not change costs no write."""
        new = None if value is None else packed(value)
        if new != self._look(lambda view: view.value(name)):
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

    def _walk(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows of history from ``start`` until before ``stop``, in order."""
        return ((key, zlib.decompress(value)) for key, value in self._merged(start, stop, keys_only=False))

    def _walk_keys(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        return (key for key, _ in self._merged(start, stop, keys_only=True))

    def _merged(self, start: bytes, stop: bytes, *, keys_only: bool) -> Iterator[tuple[bytes, bytes]]:
        self._ensure_open()
        changed = self._changed_rows()
        new = sorted((key, row) for key, row in changed.items() if row is not None and start <= key < stop)
        stored = self._table.walk(start, stop, keys_only=keys_only)
        return merge(((key, row) for key, row in stored if key not in changed), new)

    def _changing(self) -> Changes:
        if self._changes is None:
            raise StoreError(f"{self._where}: changes are made inside a transaction.")
        return self._changes

    def _changed_rows(self) -> Mapping[bytes, bytes | None]:
        if self._changes is None or self._inside != get_ident():
            return {}
        return self._changes.rows

    # -- root and blocks ------------------------------------------------------------------------------------------

    def _root(self) -> Root:
        self._ensure_open()
        return Root.parse(self._table.get(ROOT), self._where)

    def _committed(self, root: Root) -> Committed:
        return Committed(root, self._load)

    def _load(self, name: str, keys: Sequence[str]) -> bytes:
        known, stored = self._read.get(name, ((), b""))
        if known != keys:
            parts = self._table.get_many([bytes.fromhex(key) for key in keys])
            if len(parts) < len(keys):
                raise Gone
            stored = b"".join(parts[bytes.fromhex(key)] for key in keys)
            self._remember(name, keys, stored)
        return zlib.decompress(stored)

    def _remember(self, name: str, keys: Sequence[str], stored: bytes) -> None:
        if not name.startswith(CLOSED):
            self._read[name] = (tuple(keys), stored)

    def _commit(self, changes: Changes) -> None:
        if not changes.values and not changes.rows:
            return
        history = {key: value for key, value in changes.rows.items() if value is not None}
        base, in_doubt = changes.base.root, False
        try:
            self._table.put(history.items())
            for _ in range(_ATTEMPTS):
                with self._replacing:
                    if self._is_fenced_off(base, changes):
                        base = self._rebased(base, changes)
                    root, blocks = with_changes(base, changes.values, secrets.token_hex(_TOKEN_BYTES))
                    self._table.put(blocks.items())
                    in_doubt = True
                    done = self._replace(base, root)
                    in_doubt = False
                if done:
                    break
                self._table.delete(blocks)
                base = self._rebased(base, changes)
            else:
                raise self._crowded()
        except StoreError:
            if not in_doubt:
                with suppress(StoreError):
                    self._table.delete(key for key in history if not key.startswith(_RENEWED))
            raise
        for name in changes.values.keys() & root.blocks.keys():
            keys = root.blocks[name]
            self._remember(name, keys, b"".join(blocks[bytes.fromhex(key)] for key in keys))
        self._remove_what_went(base, root, [key for key, value in changes.rows.items() if value is None])

    def _is_fenced_off(self, root: Root, changes: Changes) -> bool:
        """Whether this process says what only a holder of the lease may say, and the root shows another one."""
        fenced = any(name.partition(".")[0] in _FENCED for name in changes.values)
        return fenced and self._mine is not None and root.lease != self._mine

    def _rebased(self, base: Root, changes: Changes) -> Root:
        """The present root, on which the changes may be written as they are.

        Raises:
            LostRace: they rest on what is different there.
            StoreBusy: another process has the lease.
        """
        present = self._root()
        if self._is_fenced_off(present, changes):
            record = LeaseRecord.parse(present.lease)
            raise StoreBusy(
                f"{self._where}: {record.holder if record and record.holder else 'nobody'} has the lease now, and "
                "what was learnt under the former one is not written.",
                "The next holder goes on from there.",
            )
        if any(present.entry(name) != base.entry(name) for name in changes.touched):
            raise self._lost()
        return present

    def _replace(self, base: Root, root: Root) -> bool:
        """Replace the root; returns whether it was.

        Raises:
            StoreUnavailable: that cannot be told.
        """
        done, sure = self._table.swap(ROOT, base.packed, root.packed)
        if done or sure:
            return done
        present = self._root()
        if root.recent[-1] in present.recent:
            return True
        if present.version - base.version > len(present.recent):
            raise StoreUnavailable(
                f"The connection to HBase broke while {self._where} was written, and others have written since.",
                "See what is there before it is done again.",
            )
        return False

    def _remove_what_went(self, base: Root, root: Root, rows: Iterable[bytes]) -> None:
        went = [*rows, *map(bytes.fromhex, base.named() - root.named())]
        if not self._tidy:
            # What processes have left that died before they could replace the root; no other can be of its version.
            named, end = root.named(), BLOCK + (root.version + 1).to_bytes(8, "big")
            went += [key for key, _ in self._table.walk(BLOCK, end, keys_only=True) if key.hex() not in named]
            self._tidy = True
        self._table.delete(dict.fromkeys(went))

    def _ensure_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self._where}: this memory is closed.")

    def _lost(self) -> LostRace:
        return LostRace(f"{self._where} was changed by another process at this moment.", _AGAIN)

    def _crowded(self) -> StoreBusy:
        return StoreBusy(f"{self._where} is being written by other processes all the time.", _AGAIN)
