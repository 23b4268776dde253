"""The log of a transaction manager in the side table, so that each leader can continue the log of the previous leader.

The log is a chain of numbered cells. Each cell is written once, by HBase's compare-and-set on an empty cell. A new
leader reads the whole chain, and closes it with a cell of its own. A former leader that wakes up later cannot append,
because its next cell exists; its earlier edits were read. A cell has all edits that are queued at the same time, so one
write serves many responses.

A snapshot is a set of rows under a name that is never reused. The *root* names the current snapshot and the first cell
of the log after it. The root changes by compare-and-set, so a former leader cannot replace it. After a snapshot, older
cells are deleted, except the cells that close a log: each may still block a late write, and there is only a small one
for each change of the leader.

A call without a write is valid if this server has the lease afterwards, like a read of the store
(:mod:`tms_core.server.ha.leadership`).
"""

from __future__ import annotations

import io
import json
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from tms_core.errors import FormatError, StoreError, StoreFull, Unavailable
from tms_core.rowkey import stop_key
from tms_core.tables.base import iterate_items
from tms_core.tables.side import SideTable
from tms_core.transaction.codec.edits import Edit, decode_edit
from tms_core.transaction.codec.snapshot import read_snapshot, write_snapshot
from tms_core.transaction.manager.journal import GroupLog, LogFailed, LogFull
from tms_core.transaction.manager.storage import MemoryStorage, RecoveredLog, StorageElsewhere
from tms_core.transaction.model import Snapshot

#: Key prefixes: the root, a cell of the log, a part of a snapshot.
_ROOT, _CELL, _PART = b"xr", b"xl", b"xs"
#: The first byte of a cell: the cell has edits, or closes the log of the previous manager.
_EDITS, _CLOSES = b"e", b"t"
#: The maximum size of a row in bytes, far below HBase's default limit (10 MiB).
ROW_BYTES = 1 << 20
_NAME_BYTES = 8
_NUMBER, _LENGTH = struct.Struct(">Q"), struct.Struct(">I")
_ROWS = 1000

#: Returns whether this server has kept the lease since the function was created.
LeaseCheck = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class LogRoot:
    """The root of the log, in JSON.

    Attributes:
        name: the name of the snapshot's rows, in hexadecimal.
        parts: the number of these rows.
        first: the number of the first cell of the log after the snapshot.
        taken_ms: the time of the snapshot.
        address: ``HOST:PORT`` of its manager's service.
        log: the identity of this log, different for every store.
    """

    name: str
    parts: int
    first: int
    taken_ms: int
    address: str
    log: str

    @classmethod
    def parse(cls, value: bytes) -> LogRoot:
        """Parse the row.

        Raises:
            FormatError: the row is damaged.
        """
        try:
            root = cls(**json.loads(value))
            bytes.fromhex(root.name)
            if [type(field) for field in asdict(root).values()] != [str, int, int, int, str, str]:
                raise ValueError("a field has another type")
        except (ValueError, TypeError) as error:
            raise FormatError(f"the root of the transaction log in the side table cannot be read: {error}") from error
        return root

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


class SideStorage:
    """A transaction manager's storage in a side table that several servers share; each server has one.

    Args:
        side: the table; the caller closes it.
        lease: called at a takeover; returns a function that returns whether this server has had the lease since then.
        recover: reads the state of an exclusive manager, for the first takeover of an empty table; None: no state.

    Attributes:
        address: the address of this manager's service, for the other servers.
        name: the identity of the log; empty before the first takeover.
    """

    def __init__(
        self, side: SideTable, lease: Callable[[], LeaseCheck], recover: Callable[[], RecoveredLog] | None = None
    ) -> None:
        self._side = side
        self._lease = lease
        self._recover_previous = recover or MemoryStorage().recover
        self.address = self.name = ""
        self._has_lease: LeaseCheck = lambda: False
        #: The last known value of the root, and the values that it may have after changes without a response.
        self._root: bytes | None = None
        self._possible_roots: set[bytes] = set()
        self._log: SideLog | None = None
        self._first_cell = self._deleted_to = 0
        #: The time of the last snapshot for which a log was started, and the number of that log's first cell.
        self._log_start = (-1, 0)

    def recover(self) -> RecoveredLog:
        """Take over from the previous manager: close its log, and read its edits.

        Raises:
            StorageElsewhere: this server is not the leader, or lost leadership in between.
            StoreError: the table cannot be read or written.
            FormatError: its contents are damaged.
        """
        try:
            self._has_lease = self._lease()
        except Unavailable as error:
            raise StorageElsewhere(error.message, error.hint) from error
        while True:
            value = self._side.get(_ROOT)
            try:
                found, first_cell = self._take_over(value)
            except FormatError:
                # The previous manager may have replaced the snapshot during this read: read again if the root has
                # changed.
                if self._side.get(_ROOT) == value:
                    raise
                continue
            if self._side.get(_ROOT) == value:
                break
        self._root, self._first_cell, self._log = value, first_cell, None
        self._possible_roots.clear()
        self._log_start, self._deleted_to = (-1, 0), 0
        return found

    def log(self, timestamp_ms: int) -> SideLog:
        """Start the log after the snapshot with this time."""
        self._log_start = (timestamp_ms, self._next)
        self._log = SideLog(self._side, self._next, self._has_lease)
        return self._log

    def save(self, snapshot: Snapshot) -> None:
        """Replace the previous snapshot, and delete the log before it.

        Raises:
            StorageElsewhere: another server has taken over.
            StoreError: it could not be written.
        """
        snapshot_ms = snapshot.visibility.timestamp_ms
        start_ms, first = self._log_start
        if start_ms != snapshot_ms:
            first = self._next
        # List old rows before the change of the root: rows that appear later may belong to the next leader's snapshot.
        old = [key for key, _ in iterate_items(self._side.rows, _PART, stop_key(_PART), _ROWS)]
        name = secrets.token_bytes(_NAME_BYTES)
        parts = _parts(snapshot)
        for number, part in enumerate(parts):
            self._side.put([(_part_key(name, number), part)])
        self._change_root(LogRoot(name.hex(), len(parts), first, snapshot_ms, self.address, self.name).pack())
        self._side.delete(old)
        self._delete_cells(first)

    def close(self) -> None:
        """Do nothing: the caller closes the table."""

    @property
    def _next(self) -> int:
        """Return the number of the next cell that this manager writes."""
        return self._first_cell if self._log is None else self._log.next

    def _take_over(self, value: bytes | None) -> tuple[RecoveredLog, int]:
        """Close the log of a root; return its snapshot and edits, and the number of this manager's first cell."""
        if value is None:
            self.name = secrets.token_hex(_NAME_BYTES)
            cells, first_cell = self._close_log(0)
            if any(cell.startswith(_EDITS) for cell in cells):
                raise FormatError("the root of the transaction log in the side table is missing, but its cells exist")
            return self._recover_previous(), first_cell
        root = LogRoot.parse(value)
        self.name = root.log
        cells, first_cell = self._close_log(root.first)
        return RecoveredLog(self._snapshot(root), _edits(cells), root.taken_ms), first_cell

    def _close_log(self, first: int) -> tuple[list[bytes], int]:
        """Close a log, and return its cells, and the number after the closing cell."""
        cells: list[bytes] = []
        closing_cell = _CLOSES + secrets.token_bytes(_NAME_BYTES)
        while True:
            at = first + len(cells)
            for key, value in iterate_items(self._side.rows, _cell_key(at), stop_key(_CELL), _ROWS):
                if key != _cell_key(first + len(cells)):
                    raise FormatError(f"cell {first + len(cells)} of the transaction log in the side table is missing")
                cells.append(value)
            at = first + len(cells)
            if not self._has_lease():
                # Without the lease, this would close the log of the current leader, and lose its later decisions. A
                # leader that starts after this check competes for the same cell, or closes the log after it.
                raise leadership_lost_error()
            if self._side.exchange(_cell_key(at), None, closing_cell):
                return cells, at + 1

    def _snapshot(self, root: LogRoot) -> Snapshot:
        name = bytes.fromhex(root.name)
        parts = [
            value for _, value in iterate_items(self._side.rows, _part_key(name, 0), _part_key(name, root.parts), _ROWS)
        ]
        if len(parts) != root.parts:
            raise FormatError(f"the transaction snapshot in the side table has {len(parts)} of {root.parts} rows")
        return read_snapshot(io.BytesIO(b"".join(parts)))

    def _change_root(self, value: bytes) -> None:
        # An earlier change without a response may have succeeded; then its value is the expected value.
        present = self._side.get(_ROOT)
        if present in self._possible_roots:
            self._root = present
        self._possible_roots.add(value)
        if not self._side.exchange(_ROOT, self._root, value):
            raise leadership_lost_error()
        self._root = value
        self._possible_roots.clear()

    def _delete_cells(self, first: int) -> None:
        """Delete the cells before ``first``, except cells that close a log."""
        if self._deleted_to:
            # This manager has written all of these cells, so none of them closes a log.
            obsolete = [_cell_key(number) for number in range(self._deleted_to, first)]
        else:
            rows = iterate_items(self._side.rows, _CELL, _cell_key(first), _ROWS)
            obsolete = [key for key, value in rows if not value.startswith(_CLOSES)]
        self._side.delete(obsolete)
        self._deleted_to = first


class SideLog(GroupLog):
    """The open log of this manager: the chain of cells from a number on.

    Args:
        first: the number of its first cell.
        has_lease: returns whether this server has kept the lease since its takeover.

    Attributes:
        next: the number of its next cell.
    """

    def __init__(self, side: SideTable, first: int, has_lease: LeaseCheck) -> None:
        super().__init__()
        self._side = side
        self._has_lease = has_lease
        self.next = first

    def sync(self, position: int) -> None:
        super().sync(position)
        # Also for calls without a write, because a former leader must not respond from outdated state.
        if not self._has_lease():
            raise self._failed(leadership_lost_error())

    def close(self) -> None:
        """Do nothing: the log holds no resources."""

    def _put(self, first: int, edits: Sequence[bytes]) -> None:
        data = b"".join(_LENGTH.pack(len(edit)) + edit for edit in edits)
        for start in range(0, len(data), ROW_BYTES):
            if not self._side.exchange(_cell_key(self.next), None, _EDITS + data[start : start + ROW_BYTES]):
                raise leadership_lost_error()
            self.next += 1

    def _failed(self, failure: OSError | StoreError) -> LogFailed:
        kind = LogFull if isinstance(failure, StoreFull) else LogFailed
        return kind(
            f"the transaction log in the side table could not be written: {failure}",
            "Acknowledged changes are durable. The leader continues without a restart.",
        )


def read_root(side: SideTable) -> LogRoot | None:
    """Return the root of the log in a side table; None: the table has no log.

    Raises:
        StoreError: the table cannot be read.
        FormatError: the root is damaged.
    """
    value = side.get(_ROOT)
    return None if value is None else LogRoot.parse(value)


def leadership_lost_error() -> StorageElsewhere:
    """Return the error of a manager whose server is a former leader."""
    return StorageElsewhere("Another server has taken over the transactions.", "Try again in a few seconds.")


def _edits(cells: Sequence[bytes]) -> Iterator[Edit]:
    """Yield the edits in cells; ignore a last edit that is incomplete."""
    # After a takeover, a manager saves a snapshot before it writes edits, so all edits are from one manager.
    data = b"".join(cell[1:] for cell in cells if cell.startswith(_EDITS))
    at = 0
    while len(data) - at >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(data, at)
        start, at = at + _LENGTH.size, at + _LENGTH.size + size
        if at <= len(data):
            yield decode_edit(data[start:at])


def _parts(snapshot: Snapshot) -> list[bytes]:
    stream = io.BytesIO()
    write_snapshot(stream, snapshot)
    data = stream.getvalue()
    return [data[start : start + ROW_BYTES] for start in range(0, len(data), ROW_BYTES)]


def _cell_key(number: int) -> bytes:
    return _CELL + _NUMBER.pack(number)


def _part_key(name: bytes, number: int) -> bytes:
    return _PART + name + _LENGTH.pack(number)
