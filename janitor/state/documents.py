"""The state as documents: values by name, and rows in key order, with atomic transactions.

The other modules of this package define the records. A driver stores the documents in a SQLite file or an HBase table.
This module collects the changes of a transaction, and the driver writes them at the commit. The thread of a transaction
reads its own changes; other threads read the committed values.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from heapq import merge
from threading import RLock, get_ident
from typing import Any, Protocol, Self, TypeVar

from janitor.state.records import in_json
from janitor.state.values import unpack
from tms_core.errors import StateBusy, StateError

T = TypeVar("T")

#: The number of attempts for a change that conflicts with other processes.
ATTEMPTS = 5
#: The hint after a conflict.
_RETRY = "Nothing was changed; try again."
_JSON = json.JSONEncoder(separators=(",", ":"), default=in_json)


class LostRace(StateBusy):
    """Another process has changed data that a transaction read or changed."""


class ValueGone(Exception):
    """A value was replaced during the read, and is no longer available."""


class View(Protocol):
    """A consistent view of the values, as bytes: JSON, or columns of ids."""

    def value(self, name: str) -> bytes | None:
        """Return a value; None if it does not exist.

        Raises:
            ValueGone: the value was replaced during the read.
        """
        ...

    def names(self) -> set[str]:
        """Return the names of all values."""
        ...


class KeyedRows(Protocol):
    """Rows by key."""

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of those keys that exist."""
        ...

    def scan(self, start: bytes, stop: bytes, *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values of ``[start, stop)`` in order; with ``keys_only`` all values are empty."""
        ...


class LooseRows(KeyedRows, Protocol):
    """Rows that are changed outside transactions.

    A change is cheap and survives a crash of the process, but possibly not a crash of the machine. That is sufficient,
    since the store does not sync its deletions at once either.
    """

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Write rows; an existing row is replaced."""
        ...

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete rows; their keys must not be written again."""
        ...

    def removal(self, key: bytes) -> str:
        """Return the command that deletes a row, for operators."""
        ...


@dataclass
class Changes:
    """The changes of a transaction, and its view of the values.

    Attributes:
        base: the values at the start of the transaction.
        values: changed values; None for deleted values.
        rows: changed rows of history; None for deleted rows.
        loose: keys of loose rows to delete after the commit.
        touched: names that were read or changed.
    """

    base: View
    values: dict[str, bytes | None] = field(default_factory=dict)
    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    loose: set[bytes] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)

    def value(self, name: str) -> bytes | None:
        self.touched.add(name)
        return self.values[name] if name in self.values else self.base.value(name)

    def names(self) -> set[str]:
        changed = {name for name, value in self.values.items() if value is not None}
        return self.base.names() - self.values.keys() | changed

    def copy(self) -> Changes:
        return Changes(self.base, dict(self.values), dict(self.rows), set(self.loose), set(self.touched))


class Driver(Protocol):
    """A store of documents.

    Attributes:
        name: the file or table, for messages.
        place: the folder or table, as in the settings.
        history: rows that are written once, in transactions.
        loose: rows that are written outside transactions.
        leaf_ids: the maximum number of invalid transactions in a value; each commit writes the list of these values.
    """

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str: ...

    @property
    def leaf_ids(self) -> int: ...

    @property
    def history(self) -> KeyedRows: ...

    @property
    def loose(self) -> LooseRows: ...

    def present(self) -> AbstractContextManager[View]:
        """Return a consistent view of the present values."""
        ...

    def transaction(self) -> AbstractContextManager[Changes]:
        """Yield changes, which are written durably and atomically when the block exits; an error discards them.

        Raises:
            LostRace: another process has changed data that was read or changed; nothing is written.
            StateBusy: another process is writing, or has the lease; nothing is written.
        """
        ...

    def lease(self) -> bytes | None: ...

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool: ...

    def clock_ms(self) -> int | None: ...

    def close(self) -> None: ...


class Documents:
    """The documents of a driver. Threads may share them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = RLock()
        self._inside: int | None = None
        self._changes: Changes | None = None

    def close(self) -> None:
        """Close the driver; a second call has no effect."""
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all changes of the block, or none of them if it raises or the process dies.

        The changes are durable after the block. Blocks nest; an inner block that raises discards its own changes. Only
        one thread at a time executes a block.
        """
        with self._lock:
            outer = self._changes
            if outer is None:
                with self.driver.transaction() as changes:
                    self._changes, self._inside = changes, get_ident()
                    try:
                        yield
                    finally:
                        self._changes = self._inside = None
                return
            before = outer.copy()
            try:
                yield
            except BaseException:
                vars(outer).update(vars(before))
                raise

    def _read(self, read: Callable[[View], T]) -> T:
        """Read from a consistent view: the view of the transaction, or the committed values."""
        if self._changes is not None and self._inside == get_ident():
            try:
                return read(self._changes)
            except ValueGone:
                raise lost_race(self.driver.name) from None
        for _ in range(ATTEMPTS):
            with suppress(ValueGone), self.driver.present() as view:
                return read(view)
        raise too_many_races(self.driver.name)

    def _value(self, kind: type[T], name: str) -> T | None:
        """Return a value as its type, a new object each time; None if it does not exist.

        Raises:
            StateError: the value is damaged.
        """
        value = self._read(lambda view: view.value(name))
        return None if value is None else parse_value(kind, name, value)

    def _write(self, work: Callable[[], T]) -> T:
        """Make a change in the current transaction, or in a new transaction, which is repeated after a conflict."""
        if self._inside == get_ident():
            return work()
        for _ in range(ATTEMPTS - 1):
            with suppress(LostRace), self.transaction():
                return work()
        with self.transaction():
            return work()

    def _save(self, name: str, value: Any) -> None:
        """Save a value (None deletes it); an unchanged value is not written."""
        new = None if value is None else pack_value(value)

        def save() -> None:
            if new != self._read(lambda view: view.value(name)):
                self._save_packed(name, new)

        self._write(save)

    def _save_packed(self, name: str, value: bytes | None) -> None:
        """Save a packed value, inside a transaction."""
        changes = self._require_changes()
        changes.touched.add(name)
        changes.values[name] = value

    def _put_row(self, key: bytes, value: bytes) -> None:
        """Write a row of history, inside a transaction."""
        self._require_changes().rows[key] = value

    def _delete_row(self, key: bytes) -> None:
        self._require_changes().rows[key] = None

    def _row(self, key: bytes) -> bytes | None:
        return self._rows_of([key]).get(key)

    def _rows_of(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the existing rows of history with these keys, in their order."""
        changed = self._changed_rows()
        found = self.driver.history.get_many([key for key in keys if key not in changed]) if keys else {}
        found |= {key: value for key in keys if (value := changed.get(key)) is not None}
        return {key: found[key] for key in keys if key in found}

    def _scan(self, prefix: bytes, start: bytes = b"", *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows of history whose keys start with a prefix, in order, from ``start`` on."""
        begin, stop, changed = max(prefix, start), after(prefix), self._changed_rows()
        new = sorted((key, row) for key, row in changed.items() if row is not None and begin <= key < stop)
        stored = self.driver.history.scan(begin, stop, keys_only=keys_only)
        return merge(((key, row) for key, row in stored if key not in changed), new)

    def _keys(self, prefix: bytes, start: bytes = b"") -> Iterator[bytes]:
        return (key for key, _ in self._scan(prefix, start, keys_only=True))

    def _require_changes(self) -> Changes:
        if self._changes is None:
            raise StateError(f"{self.driver.name}: changes need a transaction.")
        return self._changes

    def _changed_rows(self) -> Mapping[bytes, bytes | None]:
        if self._changes is None or self._inside != get_ident():
            return {}
        return self._changes.rows


def parse_value(kind: Any, part: str | bytes, value: bytes) -> Any:
    """Parse a part of the state; arguments and errors as of :func:`damage_as_error`."""
    with damage_as_error(part):
        return unpack(kind, json.loads(value))


@contextmanager
def damage_as_error(part: str | bytes) -> Iterator[None]:
    """Convert parse errors of the block into a ``StateError``.

    Args:
        part: the name of a value, or the key of a row.

    Raises:
        StateError: the part is damaged.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, zlib.error) as error:
        name = f"value {part}" if isinstance(part, str) else f"row {part.hex()}"
        raise StateError(
            f"the state's {name} is damaged: {error}.",
            "Move the state folder away (HBase: drop the table); nothing is deleted until you adopt the store again.",
        ) from error


def pack_value(value: Any) -> bytes:
    """Return a JSON value, possibly with records in it, as stored bytes."""
    return _JSON.encode(value).encode()


def oldest_first(number: int) -> bytes:
    """Return a signed 64-bit number as eight bytes that sort in ascending order."""
    return (number + 2**63).to_bytes(8, "big")


def newest_first(number: int) -> bytes:
    """Return a signed 64-bit number as eight bytes that sort in descending order."""
    return (2**63 - 1 - number).to_bytes(8, "big")


def after(prefix: bytes) -> bytes:
    """Return the first key after all keys with a prefix, whose last byte must not be 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def lost_race(where: str) -> LostRace:
    """Return the error for a transaction that conflicts with another process."""
    return LostRace(f"{where} was changed by another process at the same time.", _RETRY)


def too_many_races(where: str) -> StateBusy:
    """Return the error for a transaction that conflicts with other processes in all attempts."""
    return StateBusy(f"{where} could not be written, because other processes kept changing it.", _RETRY)
