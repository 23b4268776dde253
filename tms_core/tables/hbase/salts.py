"""The rows of a salted table by keys without salts: of one salt, or of all salts in key order.

A salt is the first byte of a row, a hash of the other bytes, so the rows of a topic are spread over all salts. A sweep
scans each salt separately, in storage order. A reader in key order merges the salts. Neither needs the number of
buckets: a seek from each salt to the next finds the existing salts, and also rows under a wrong salt.

A writer must know the number of buckets, because CDAP never finds a row under a wrong salt. The number is configured;
CDAP's tables have it in an attribute that only Thrift 2 reads; and it determines the salt of each existing row.
Therefore the configured number is checked against attribute and rows before the first row is written.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from tms_core.errors import StoreError
from tms_core.logs.loggers import get_logger
from tms_core.rowkey import java_hash, salt
from tms_core.tables.base import KeyRange, Origin, Page, TableName
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import KEYS, HBaseRows, Query, Row, after_salt, newest
from tms_core.tables.hbase.schema import BUCKETS_ATTRIBUTE, MAX_BUCKETS, buckets_of, table_name

#: The number of rows of a page whose salts are checked; if one salt is wrong, all rows are checked.
_CHECKED_ROWS = 64
#: The number of rows under each salt that are read to find the number of buckets.
_SAMPLED_ROWS = 8
#: The number of rows that are read under each salt in addition to its share of a page.
_AHEAD_ROWS = 16
logger = get_logger(__name__)


class SaltedRows(NamedTuple):
    """Keys without salt, each with its row, or the first of its rows if the key has rows under several salts."""

    keys: list[bytes]
    rows: list[Row]


class Salts(ABC):
    """Some or all rows of a table, by keys without salt."""

    def __init__(self, rows: HBaseRows) -> None:
        self.rows = rows

    @abstractmethod
    def page(self, start: bytes, stop: bytes | None, limit: int, query: Query) -> Page[SaltedRows]:
        """Return rows in key order, each key once."""

    @abstractmethod
    def ranges(self, start: bytes, stop: bytes | None) -> list[KeyRange]:
        """Return the ranges of rows for a range of keys."""

    @abstractmethod
    def places(self, keys: Sequence[bytes], origin: Origin | None) -> list[list[bytes]]:
        """Return the rows in which each key may be stored."""

    def delete(self, keys: Sequence[bytes], origin: Origin | None) -> None:
        """Delete all rows of these keys."""
        if not keys:
            return
        if origin and origin.salts is not None and not all(key in origin.salts for key in keys):
            # A row that was written after the read may be newer than the origin's timestamp.
            origin = None
        rows = [row for places in self.places(keys, origin) for row in places]
        if not rows:
            return
        self.rows.delete(rows, origin.newest_ms if origin else None)
        self.rows.regions.add_deleted(rows)


class OneSalt(Salts):
    """The rows under one salt.

    Args:
        buckets: the number of salts, to count rows under a wrong salt; None: unknown.
    """

    def __init__(self, rows: HBaseRows, byte: int, buckets: int | None) -> None:
        super().__init__(rows)
        self._salt = bytes([byte])
        self._end = after_salt(byte)
        self._buckets = buckets

    def page(self, start: bytes, stop: bytes | None, limit: int, query: Query) -> Page[SaltedRows]:
        [(first, last)] = self.ranges(start, stop)
        rows, ended = self.rows.fetch(first, last, limit, query)
        keys = [row.row[1:] for row in rows]
        if self._buckets is not None:
            self.rows.count_wrong_salts(self._count_wrong_keys(keys, self._buckets))
        return Page(SaltedRows(keys, rows), None if ended else keys[-1] + b"\x00", Origin(newest(rows)))

    def ranges(self, start: bytes, stop: bytes | None) -> list[KeyRange]:
        return [KeyRange(self._salt + start, self._end if stop is None else self._salt + stop)]

    def places(self, keys: Sequence[bytes], origin: Origin | None) -> list[list[bytes]]:
        return [[self._salt + key] for key in keys]

    def _count_wrong_keys(self, keys: list[bytes], buckets: int) -> int:
        some = keys[:: len(keys) // _CHECKED_ROWS + 1]
        if all(salt(key, buckets) == self._salt for key in some):
            return 0
        return sum(salt(key, buckets) != self._salt for key in keys)


class AllSalts(Salts):
    """All rows of a table, merged.

    Args:
        buckets: the number of salts, which saves a search for the salts.
    """

    def __init__(self, rows: HBaseRows, buckets: int, threads: Executor) -> None:
        super().__init__(rows)
        self._buckets = buckets
        self._threads = threads

    def page(self, start: bytes, stop: bytes | None, limit: int, query: Query) -> Page[SaltedRows]:
        salts = self._salts()
        if not salts:
            return Page(SaltedRows([], []), None, Origin(0, {}))
        chunk = min(limit, limit // len(salts) * 2 + _AHEAD_ROWS)
        share = query._replace(page_bytes=query.page_bytes // len(salts) * 2 + 1)
        parts = [OneSalt(self.rows, byte, self._buckets) for byte in salts]
        heads = self._threads.map(lambda part: part.page(start, stop, chunk, share), parts)
        streams = [_stream(part, head, stop, chunk, share) for part, head in zip(parts, heads, strict=True)]
        keys: list[bytes] = []
        firsts: list[Row] = []
        places: dict[bytes, Sequence[int]] = {}
        resume, newest_ms, size = None, 0, 0
        for key, same in groupby(merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
            if len(keys) == limit or size >= query.page_bytes:
                resume = keys[-1] + b"\x00"
                break
            rows = [row for _, row in same]
            keys.append(key)
            firsts.append(rows[0])
            places[key] = [row.row[0] for row in rows]
            newest_ms = max(newest_ms, newest(rows))
            size += sum(len(cell.value) for cell in rows[0].columns.values()) if query.whole else 0
        return Page(SaltedRows(keys, firsts), resume, Origin(newest_ms, places))

    def ranges(self, start: bytes, stop: bytes | None) -> list[KeyRange]:
        return [where for byte in self._salts() for where in OneSalt(self.rows, byte, None).ranges(start, stop)]

    def places(self, keys: Sequence[bytes], origin: Origin | None) -> list[list[bytes]]:
        known = origin.salts if origin and origin.salts is not None else {}
        salts = () if known else self._salts()
        return [[bytes([byte]) + key for byte in known.get(key, salts)] for key in keys]

    def _salts(self) -> list[int]:
        return [*range(self._buckets), *self.rows.salts(after_salt(self._buckets - 1))]


class SaltSample(NamedTuple):
    """A sample of rows under each existing salt.

    Attributes:
        rows: the absolute value of the key's hash, and the salt, for each row.
    """

    rows: list[tuple[int, int]]

    def count_matches(self, buckets: int) -> int:
        """Return the number of rows whose salt matches a number of buckets."""
        return sum(digest % buckets == byte for digest, byte in self.rows)

    def fits(self, buckets: int) -> bool:
        """Return whether no other number of buckets matches clearly more rows.

        CDAP or another program may have written a few rows under any salt. If keys are similar, a multiple of the right
        number matches nearly as many rows.
        """
        return self.count_matches(buckets) * 10 >= max(map(self.count_matches, range(1, MAX_BUCKETS + 1))) * 9

    def best(self) -> int | None:
        """Return the number of buckets that matches most rows; None if others match as many, or it matches too few."""
        first, second, *_ = sorted(
            ((self.count_matches(number), number) for number in range(1, MAX_BUCKETS + 1)), reverse=True
        )
        return first[1] if first[0] > second[0] and first[0] * 2 > len(self.rows) else None


def read_sample(rows: HBaseRows) -> SaltSample:
    """Return a sample of the rows of a table."""
    found = [
        row.row
        for byte in rows.salts()
        for row in rows.fetch(bytes([byte]), after_salt(byte), _SAMPLED_ROWS, KEYS).rows
    ]
    return SaltSample([(abs(java_hash(row[1:])), row[0]) for row in found])


def _stream(
    part: OneSalt, page: Page[SaltedRows], stop: bytes | None, chunk: int, query: Query
) -> Iterator[tuple[bytes, Row]]:
    """Yield the rows of a page and of all following pages."""
    yield from zip(*page.items, strict=True)
    while page.resume is not None:
        page = part.page(page.resume, stop, chunk, query)
        yield from zip(*page.items, strict=True)


class Buckets:
    """The configured number of buckets, compared with the tables once; threads may share it.

    Args:
        number: the configured number.
        admin: connections to Thrift 2 servers; None: the descriptors of the tables are not read.
    """

    def __init__(
        self, number: int, tables: Mapping[TableName, HBaseRows], namespace: str, admin: HBasePool | None
    ) -> None:
        self._number = number
        self._tables = tables
        self._namespace = namespace
        self._admin = admin
        self._lock = threading.Lock()
        self._is_checked = False

    @property
    def known(self) -> int | None:
        """Return the number of buckets after a successful check, else None."""
        return self._number if self._is_checked else None

    def check(self) -> int:
        """Check that the tables do not contradict the number of buckets, and return the number.

        Raises:
            StoreError: the tables have another number, or cannot be read.
        """
        with self._lock:
            if not self._is_checked:
                self._check_tables(self._number)
                self._is_checked = True
        return self._number

    def _check_tables(self, number: int) -> None:
        numbers = self._numbers_in_attributes()
        for table, own in numbers.items():
            if own != number:
                raise StoreError(
                    f"{self._name(table)} has {own} buckets, but storage.hbase.buckets is {number}.",
                    f"Set storage.hbase.buckets to {own}.",
                )
        samples = {table: read_sample(rows) for table, rows in self._tables.items()}
        for table, sample in samples.items():
            if not sample.fits(number):
                raise self._mismatch(table, sample, number)
        if not numbers and not any(sample.rows for sample in samples.values()):
            logger.info(
                "storage.hbase.buckets is assumed to be %d: the tables of %s are empty, and their number of buckets "
                "cannot be read without storage.hbase.thrift2",
                number,
                self._namespace,
            )

    def _numbers_in_attributes(self) -> dict[TableName, int]:
        """Return the numbers of buckets in the tables' attributes, by table; omit tables without the attribute."""
        if self._admin is None:
            return {}
        numbers = {table: buckets_of(self._admin, self._namespace, table) for table in self._tables}
        return {table: own for table, own in numbers.items() if own is not None}

    def _mismatch(self, table: TableName, sample: SaltSample, number: int) -> StoreError:
        own = sample.best()
        return StoreError(
            f"{self._name(table)} does not have {number} buckets (storage.hbase.buckets): "
            f"{len(sample.rows) - sample.count_matches(number)} of {len(sample.rows)} rows are under another salt.",
            f"Set storage.hbase.buckets to {own or f'the value of {BUCKETS_ATTRIBUTE} (HBase shell: describe)'}.",
        )

    def _name(self, table: TableName) -> str:
        return table_name(self._namespace, table).decode()
