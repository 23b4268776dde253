"""The log of a transaction manager in rows beside the store, so that one server after the other can run the manager.

The log is a chain of cells with numbers, each written once: a cell is put only where there is none, by HBase's own
compare-and-set. The next leader reads the chain completely and writes a cell of its own there. So a former leader,
however late it wakes, finds its next place taken and can append nothing any more; and its earlier edits were read. A
cell holds all that was waited for at the same time, so that one journey serves many answers.

A snapshot is some rows of a name that is never used again, and the *root* says which of them counts and with which cell
the log goes on behind it. The root, too, changes only from what its writer has read, so of two that write snapshots at
the same time one is told that it has been deposed. What is behind it then is deleted, but for the cells that were put
by those who took over: each may still be in the way of something late, and there is a small one for each change.

What only asks and writes nothing counts if this server has still had the lease afterwards, as with the data read from
the store (:mod:`tms_core.server.ha.leadership`).
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
from tms_core.tables.base import every
from tms_core.tables.side import SideTable
from tms_core.transaction.codec.edits import Edit, decode_edit
from tms_core.transaction.codec.snapshot import read_snapshot, write_snapshot
from tms_core.transaction.manager.journal import GroupLog, LogFailed, LogFull
from tms_core.transaction.manager.storage import MemoryStorage, Recovered, StorageElsewhere
from tms_core.transaction.model import Snapshot

#: Keys: the root, a cell of the log, a part of a snapshot.
_ROOT, _CELL, _PART = b"xr", b"xl", b"xs"
#: What a cell of the log begins with: it has edits, or another manager goes on from here.
_EDITS, _TAKEN_OVER = b"e", b"t"
#: Bytes in a row: far below what HBase takes by default (10 MiB).
ROW_BYTES = 1 << 20
_NAME_BYTES = 8
_NUMBER, _LENGTH = struct.Struct(">Q"), struct.Struct(">I")
_ROWS = 1000

#: Says whether something has held without a pause since it was asked for.
Still = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class LogRoot:
    """Where the state starts, in JSON.

    Attributes:
        name: of the snapshot's rows, in hexadecimal.
        first: the number of the first cell of the log behind it.
        taken_ms: the snapshot's time.
        address: ``HOST:PORT`` where its manager's service is reached.
        log: what tells this log from that of any other store.
    """

    name: str
    parts: int
    first: int
    taken_ms: int
    address: str
    log: str

    @classmethod
    def parse(cls, value: bytes) -> LogRoot:
        """Read the row.

        Raises:
            FormatError: it cannot be read.
        """
        try:
            root = cls(**json.loads(value))
            bytes.fromhex(root.name)
            if [type(field) for field in asdict(root).values()] != [str, int, int, int, str, str]:
                raise ValueError("something in it is of another kind")
        except (ValueError, TypeError) as error:
            raise FormatError(f"the root of the transaction log beside the store cannot be read: {error}") from error
        return root

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


class SideStorage:
    """A transaction manager's storage in a side table that several servers share; made by each of them.

    Args:
        side: the table; stays the caller's.
        lease: asked when a manager takes over: returns whether this server has had the lead since.
        former: reads what there was before anything is in the table; None: nothing.

    Attributes:
        address: where the manager's service is reached, for the other servers.
        name: what tells this log from that of any other store; empty before the first takeover.
    """

    def __init__(
        self, side: SideTable, lease: Callable[[], Still], former: Callable[[], Recovered] | None = None
    ) -> None:
        self._side = side
        self._lease = lease
        self._former = former or MemoryStorage().recover
        self.address = self.name = ""
        self._still: Still = lambda: False
        #: What the root holds as far as is known, and what else it may hold, because a change was not answered.
        self._root: bytes | None = None
        self._tried: set[bytes] = set()
        self._log: SideLog | None = None
        self._free = self._deleted_to = 0
        #: The time of the last snapshot that a log was begun for, and the number of that log's first cell.
        self._begun = (-1, 0)

    def recover(self) -> Recovered:
        """Take over from the manager before: close its log, and read its edits.

        Raises:
            StorageElsewhere: this server is not the leader, or lost leadership in between.
            StoreError: the table cannot be read or written.
            FormatError: its contents are damaged.
        """
        try:
            self._still = self._lease()
        except Unavailable as error:
            raise StorageElsewhere(error.message, error.hint) from error
        while True:
            value = self._side.get(_ROOT)
            try:
                found, free = self._taken_over(value)
            except FormatError:
                # The manager before may have kept another snapshot at this moment, and deleted what that one replaces.
                if self._side.get(_ROOT) == value:
                    raise
                continue
            if self._side.get(_ROOT) == value:
                break
        self._root, self._free, self._log = value, free, None
        self._tried.clear()
        self._begun, self._deleted_to = (-1, 0), 0
        return found

    def log(self, timestamp_ms: int) -> SideLog:
        """Return the log after the snapshot of that time."""
        self._begun = (timestamp_ms, self._next)
        self._log = SideLog(self._side, self._next, self._still)
        return self._log

    def save(self, snapshot: Snapshot) -> None:
        """Replace the previous snapshot, and delete the log before it.

        Raises:
            StorageElsewhere: another server has taken over.
            StoreError: it could not be written.
        """
        taken_ms = snapshot.visibility.timestamp_ms
        begun_ms, first = self._begun
        if begun_ms != taken_ms:
            first = self._next
        # Before the root is changed: a name that is there now and not in the root is in no root that counts later.
        old = [key for key, _ in every(self._side.rows, _PART, stop_key(_PART), _ROWS)]
        name = secrets.token_bytes(_NAME_BYTES)
        parts = _parts(snapshot)
        for number, part in enumerate(parts):
            self._side.put([(_part_key(name, number), part)])
        self._change_root(LogRoot(name.hex(), len(parts), first, taken_ms, self.address, self.name).pack())
        self._side.delete(old)
        self._forget_cells(first)

    def close(self) -> None:
        """Nothing was opened."""

    @property
    def _next(self) -> int:
        """Return the number of the next cell, of those this manager writes."""
        return self._free if self._log is None else self._log.next

    def _taken_over(self, value: bytes | None) -> tuple[Recovered, int]:
        """Return the snapshot and log of a root, and the first own cell."""
        if value is None:
            self.name = secrets.token_hex(_NAME_BYTES)
            cells, free = self._ended(0)
            if any(cell.startswith(_EDITS) for cell in cells):
                raise FormatError(
                    "the root of the transaction log beside the store is missing, and its cells are there"
                )
            return self._former(), free
        root = LogRoot.parse(value)
        self.name = root.log
        cells, free = self._ended(root.first)
        return Recovered(self._snapshot(root), _edits(cells), root.taken_ms), free

    def _ended(self, first: int) -> tuple[list[bytes], int]:
        """Return the cells of the log, behind which its writer can put no more, and the first number behind ours."""
        cells: list[bytes] = []
        ours = _TAKEN_OVER + secrets.token_bytes(_NAME_BYTES)
        while True:
            at = first + len(cells)
            for key, value in every(self._side.rows, _cell_key(at), stop_key(_CELL), _ROWS):
                if key != _cell_key(first + len(cells)):
                    raise FormatError(f"cell {first + len(cells)} of the transaction log beside the store is missing")
                cells.append(value)
            at = first + len(cells)
            if not self._still():
                # Or this would end the log of who leads now, which would not know what is decided behind it. Who
                # leads from here on takes the same place, or the next.
                raise deposed()
            if self._side.exchange(_cell_key(at), None, ours):
                return cells, at + 1

    def _snapshot(self, root: LogRoot) -> Snapshot:
        name = bytes.fromhex(root.name)
        parts = [value for _, value in every(self._side.rows, _part_key(name, 0), _part_key(name, root.parts), _ROWS)]
        if len(parts) != root.parts:
            raise FormatError(
                f"of the transaction snapshot beside the store {len(parts)} of {root.parts} rows are there"
            )
        return read_snapshot(io.BytesIO(b"".join(parts)))

    def _change_root(self, value: bytes) -> None:
        present = self._side.get(_ROOT)
        if present in self._tried:
            self._root = present
        self._tried.add(value)
        if not self._side.exchange(_ROOT, self._root, value):
            raise deposed()
        self._root = value
        self._tried.clear()

    def _forget_cells(self, first: int) -> None:
        """Delete the cells before one, except those that close a log."""
        if self._deleted_to:
            # All of them are ours.
            gone = [_cell_key(number) for number in range(self._deleted_to, first)]
        else:
            rows = every(self._side.rows, _CELL, _cell_key(first), _ROWS)
            gone = [key for key, value in rows if not value.startswith(_TAKEN_OVER)]
        self._side.delete(gone)
        self._deleted_to = first


class SideLog(GroupLog):
    """The chain of cells while it is written.

    Args:
        first: the number of its first cell.

    Attributes:
        next: the number of the next one.
    """

    def __init__(self, side: SideTable, first: int, still: Still) -> None:
        super().__init__()
        self._side = side
        self._still = still
        self.next = first

    def sync(self, position: int) -> None:
        super().sync(position)
        if not self._still():
            raise self._failed(deposed())

    def close(self) -> None:
        """Nothing was opened."""

    def _put(self, first: int, edits: Sequence[bytes]) -> None:
        data = b"".join(_LENGTH.pack(len(edit)) + edit for edit in edits)
        for start in range(0, len(data), ROW_BYTES):
            if not self._side.exchange(_cell_key(self.next), None, _EDITS + data[start : start + ROW_BYTES]):
                raise deposed()
            self.next += 1

    def _failed(self, failure: OSError | StoreError) -> LogFailed:
        kind = LogFull if isinstance(failure, StoreFull) else LogFailed
        return kind(
            f"the transaction log beside the store could not be written: {failure}",
            "What was acknowledged is there; the server that leads goes on by itself.",
        )


def root_of(side: SideTable) -> LogRoot | None:
    """What there is of a log in a side table; None: there never was one.

    Raises:
        StoreError: the table cannot be read.
        FormatError: its contents are damaged.
    """
    value = side.get(_ROOT)
    return None if value is None else LogRoot.parse(value)


def deposed() -> StorageElsewhere:
    """Return the error of a manager whose server is a former leader."""
    return StorageElsewhere("Another server has taken over the transactions.", "Try again in some seconds.")


def _edits(cells: Sequence[bytes]) -> Iterator[Edit]:
    """Yield the edits in cells; the last one counts only if its manager wrote all of it."""
    # Who takes over keeps a snapshot before it writes an edit, so what counts is all of one manager.
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
