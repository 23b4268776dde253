"""The side table: rows that belong to a store and are not part of CDAP's tables.

CDAP's format has no place for three facts: a TTL of a single message (rule L6), the position of a named consumer, and
the claims of its transactions. They are stored in one small sorted table: a separate LevelDB folder, a table
``tms.side`` in HBase, or memory. The first byte of a key is its kind. In HBase it also has the leases of leaders and
the gaps of late rows (:mod:`tms_core.server.ha.member`, :mod:`tms_core.server.ha.sealed_ranges`).

An expiry has two rows. ``e`` + time + message key is in the order of the expiry, for the janitor. ``m`` + message key
has the time, for fetches. Both are written and synced before the message, so a message with a TTL is never visible
without it. For an expiry without a message, the janitor deletes a row that does not exist, which is not an error. New
messages never use its id (:meth:`Expiries.keys`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple, Self

from tms_core.rowkey import MessageKey, stop_key
from tms_core.tables.base import Page, every, pages
from tms_core.topic import TopicId

#: First bytes of keys: an expiry by its moment, an expiry by its message.
_BY_TIME, _BY_MESSAGE = b"e", b"m"
_TIME_BYTES = 8
#: The number of expiries in one read.
_MOMENTS = 8192


class SideChange(NamedTuple):
    """A conditional change of rows, as for :meth:`SideTable.exchange`."""

    key: bytes
    expected: bytes | None
    value: bytes
    puts: Sequence[tuple[bytes, bytes]] = ()
    deletes: Sequence[bytes] = ()


class SideTable(ABC):
    """A small sorted table; threads may share it. Writes are durable on return, in one batch if possible.

    Attributes:
        private: whether only one process at a time writes to it and to the store, without late writes of an earlier
            one.
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
        """Write a row if it still has the expected value, and change other rows with it. Durable on return.

        If the change is not atomic, the order is: the row, ``puts``, ``deletes``.

        Args:
            key, expected, value: the row, its expected value (None: it does not exist), and its new value.
            deletes: keys of other rows to delete.

        Returns:
            Whether the row had the expected value; if not, nothing was done.
        """
        return self.exchange_each([SideChange(key, expected, value, puts, deletes)])[0]

    @abstractmethod
    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        """Make each change as :meth:`exchange`, in one write if possible; return for each whether it was made."""

    def have_one_leader(self, *keys: bytes) -> bool:
        """Return whether it is always one server that leads what all these rows are about."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close the table; closing twice is not an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemorySide(SideTable):
    """Gone when the process is."""

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
        """Do nothing: no file is open."""


class Expiry(NamedTuple):
    """The expiry of a message with a TTL.

    Attributes:
        expires_ms: the first millisecond in which it is expired.
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
    """Messages that live shorter than their topic says (rule L6); threads may share it."""

    def __init__(self, table: SideTable) -> None:
        self._table = table

    def put(self, moments: Iterable[tuple[bytes, int]]) -> None:
        """Announce when messages come due, before they are written. Durable on return.

        Args:
            moments: message keys, each with the first moment in ms at which it is gone.
        """
        rows = []
        for key, expires_ms in moments:
            moment = _pack(expires_ms)
            rows += [(_BY_MESSAGE + key, moment), (_BY_TIME + moment + key, b"")]
        self._table.put(rows)

    def due(self, now_ms: int, limit: int) -> list[Expiry]:
        """Return at most ``limit`` messages that are expired at a time, the earliest first.

        Pass deleted entries to :meth:`forget`, or the next call returns them again.
        """
        page = self._table.rows(_BY_TIME, _BY_TIME + _pack(now_ms + 1), limit)
        return [expiry for key, _ in page.items if (expiry := _expiry(key)) is not None]

    def due_pages(self, now_ms: int, limit: int) -> Iterator[list[Expiry]]:
        """Yield all of them, at most ``limit`` at a time; concurrent changes do no harm."""
        for page in pages(self._table.rows, _BY_TIME, _BY_TIME + _pack(now_ms + 1), limit):
            yield [expiry for key, _ in page.items if (expiry := _expiry(key)) is not None]

    def expires_ms(self, key: bytes) -> int | None:
        """Return the first time at which a message is expired; None: only the TTL of its topic applies."""
        value = self._table.get(_BY_MESSAGE + key)
        return None if value is None else int.from_bytes(value, "big")

    def between(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, int]]]:
        """Return the messages with their own TTLs in a range of keys, each with its expiry."""
        last = stop_key(_BY_MESSAGE) if stop is None else _BY_MESSAGE + stop
        page = self._table.rows(_BY_MESSAGE + start, last, limit)
        items = [(key[len(_BY_MESSAGE) :], int.from_bytes(value, "big")) for key, value in page.items]
        return Page(items, page.resume and page.resume[len(_BY_MESSAGE) :])

    def moments(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return the expiry times of messages whose keys lie between the first and the last of some ordered keys."""
        return dict(every(self.between, keys[0], keys[-1] + b"\0", _MOMENTS)) if keys else {}

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        """Return keys of messages with a TTL, as a table of them; their ids are in use even if the message was never
        written.
        """
        page = self.between(start, stop, limit)
        return Page([key for key, _ in page.items], page.resume)

    def forget(self, expiries: Iterable[Expiry]) -> None:
        """Drop processed entries; unknown ones are not an error."""
        keys: list[bytes] = []
        for expiry in expiries:
            key = expiry.key
            # In this order: as long as the second is there, it comes up again.
            keys += [_BY_MESSAGE + key, _BY_TIME + _pack(expiry.expires_ms) + key]
        self._table.delete(keys)


def _pack(moment_ms: int) -> bytes:
    return moment_ms.to_bytes(_TIME_BYTES, "big")


def _expiry(key: bytes) -> Expiry | None:
    start = len(_BY_TIME) + _TIME_BYTES
    message = MessageKey.parse(key[start:])
    return None if message is None else Expiry(*message, int.from_bytes(key[len(_BY_TIME) : start], "big"))
