"""The side table: rows that belong to a store and are not part of CDAP's tables.

CDAP's format cannot store the TTL of a single message (rule L6), the position of a named consumer, and the claims of
its transactions. One small sorted table stores them: a separate LevelDB folder, a table ``tms.side`` in HBase, or
memory. The first byte of a key is its kind. In HBase, the table also has the leases of leaders and the gaps of late
rows (:mod:`tms_core.server.ha.member`, :mod:`tms_core.server.ha.sealed_ranges`).

An expiry has two rows. ``e`` + time + message key sorts by time, for the janitor. ``m`` + message key has the time as
its value, for fetches. Both are written and synced before the message, so a message with a TTL is never visible
without its expiry. For an expiry without a message, the janitor deletes a row that does not exist, which is not an
error. New messages never use its id (:meth:`Expiries.keys`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple, Self

from tms_core.rowkey import MessageKey, stop_key
from tms_core.tables.base import Page, iterate_items, pages
from tms_core.topic import TopicId

#: First bytes of keys: an expiry by its time, an expiry by its message.
_BY_TIME, _BY_MESSAGE = b"e", b"m"
_TIME_BYTES = 8
#: The number of expiries in one read.
_PAGE_ROWS = 8192


class SideChange(NamedTuple):
    """A conditional change of rows: the arguments of :meth:`SideTable.exchange`."""

    key: bytes
    expected: bytes | None
    value: bytes
    puts: Sequence[tuple[bytes, bytes]] = ()
    deletes: Sequence[bytes] = ()


class SideTable(ABC):
    """A small sorted table; threads may share it. Writes are durable on return, in one batch if possible.

    Attributes:
        private: whether only one process at a time writes to the table and the store, without late writes of an
            earlier process.
    """

    private = False

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Return one row's value."""

    @abstractmethod
    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        """Return at most ``limit`` rows of ``[start, stop)`` in key order."""

    @abstractmethod
    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Write rows, in this order if the write is not atomic."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete rows, in this order if the deletion is not atomic; the deletion may be lost in a crash."""

    def exchange(
        self,
        key: bytes,
        expected: bytes | None,
        value: bytes,
        puts: Sequence[tuple[bytes, bytes]] = (),
        deletes: Sequence[bytes] = (),
    ) -> bool:
        """Write a row and change other rows, if the row still has the expected value. Durable on return.

        If the change is not atomic, the order is: the row, ``puts``, ``deletes``.

        Args:
            key, expected, value: the row, its expected value (None: it does not exist), and its new value.
            deletes: keys of other rows to delete.

        Returns:
            Whether the row had the expected value; if not, nothing was changed.
        """
        return self.exchange_each([SideChange(key, expected, value, puts, deletes)])[0]

    @abstractmethod
    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        """Make each change as :meth:`exchange`, in one write if possible; return whether each change was made."""

    def have_one_leader(self, *keys: bytes) -> bool:
        """Return whether the topics of all these rows always have the same leader."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close the table; closing twice is not an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemorySide(SideTable):
    """A side table in the memory of the process."""

    private = True

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._values: dict[bytes, bytes] = {}
        self._lock = Lock()

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        with self._lock:
            first = bisect_left(self._keys, start)
            last = len(self._keys) if stop is None else bisect_left(self._keys, stop)
            keys = self._keys[first : min(last, first + limit)]
            resume = keys[-1] + b"\0" if first + limit < last else None
            return Page([(key, self._values[key]) for key in keys], resume)

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        with self._lock:
            self._values.update(rows)
            self._keys = sorted(self._values)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._values.pop(key, None)
            self._keys = sorted(self._values)

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        with self._lock:
            return [self._exchange(change) for change in changes]

    def _exchange(self, change: SideChange) -> bool:
        if self._values.get(change.key) != change.expected:
            return False
        self._values.update([(change.key, change.value), *change.puts])
        for obsolete in change.deletes:
            self._values.pop(obsolete, None)
        self._keys = sorted(self._values)
        return True

    def close(self) -> None:
        """Do nothing, because no file is open."""


class Expiry(NamedTuple):
    """The expiry of a message with a TTL.

    Attributes:
        expires_ms: the first millisecond in which the message is expired.
    """

    topic: TopicId
    generation: int
    publish_ms: int
    sequence: int
    expires_ms: int

    @property
    def key(self) -> bytes:
        """Return the message's row key."""
        return MessageKey(self.topic, self.generation, self.publish_ms, self.sequence).pack()


class Expiries:
    """The expiries of messages whose TTL is shorter than their topic's (rule L6); threads may share it."""

    def __init__(self, table: SideTable) -> None:
        self._table = table

    def put(self, expiries: Iterable[tuple[bytes, int]]) -> None:
        """Store the expiries of messages; call it before the messages are written. Durable on return.

        Args:
            expiries: message keys, each with the first millisecond in which the message is expired.
        """
        rows = []
        for key, expires_ms in expiries:
            time = _pack(expires_ms)
            rows += [(_BY_MESSAGE + key, time), (_BY_TIME + time + key, b"")]
        self._table.put(rows)

    def due(self, now_ms: int, limit: int) -> list[Expiry]:
        """Return at most ``limit`` messages that have expired by ``now_ms``, the earliest first.

        Pass deleted entries to :meth:`delete`, or the next call returns them again.
        """
        page = self._table.rows(_BY_TIME, _BY_TIME + _pack(now_ms + 1), limit)
        return [expiry for key, _ in page.items if (expiry := _expiry(key)) is not None]

    def due_pages(self, now_ms: int, limit: int) -> Iterator[list[Expiry]]:
        """Yield all messages that have expired by ``now_ms``, at most ``limit`` at a time, also during changes."""
        for page in pages(self._table.rows, _BY_TIME, _BY_TIME + _pack(now_ms + 1), limit):
            yield [expiry for key, _ in page.items if (expiry := _expiry(key)) is not None]

    def expires_ms(self, key: bytes) -> int | None:
        """Return the first millisecond in which a message is expired; None: only the TTL of its topic applies."""
        value = self._table.get(_BY_MESSAGE + key)
        return None if value is None else int.from_bytes(value, "big")

    def between(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, int]]]:
        """Return the keys of messages with a separate TTL in a range, each with its expiry."""
        last = stop_key(_BY_MESSAGE) if stop is None else _BY_MESSAGE + stop
        page = self._table.rows(_BY_MESSAGE + start, last, limit)
        items = [(key[len(_BY_MESSAGE) :], int.from_bytes(value, "big")) for key, value in page.items]
        return Page(items, page.resume and page.resume[len(_BY_MESSAGE) :])

    def expiry_times(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return the expiry times of all messages from the first to the last of some ordered keys."""
        return dict(iterate_items(self.between, keys[0], keys[-1] + b"\0", _PAGE_ROWS)) if keys else {}

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        """Return the keys of messages with a separate TTL, written or not: new messages must not use their ids."""
        page = self.between(start, stop, limit)
        return Page([key for key, _ in page.items], page.resume)

    def delete(self, expiries: Iterable[Expiry]) -> None:
        """Delete processed expiries; an unknown expiry is not an error."""
        keys: list[bytes] = []
        for expiry in expiries:
            key = expiry.key
            # In this order: if a crash leaves the second row, the janitor finds and deletes the expiry again.
            keys += [_BY_MESSAGE + key, _BY_TIME + _pack(expiry.expires_ms) + key]
        self._table.delete(keys)


def _pack(time_ms: int) -> bytes:
    return time_ms.to_bytes(_TIME_BYTES, "big")


def _expiry(key: bytes) -> Expiry | None:
    start = len(_BY_TIME) + _TIME_BYTES
    message = MessageKey.parse(key[start:])
    return None if message is None else Expiry(*message, int.from_bytes(key[len(_BY_TIME) : start], "big"))
