"""The ledger: deletions of runs, newest first, by topic and by run.

Entries are stored in pages, sorted by number, so that listing the last entries and deleting the oldest reads few rows.
An entry also has a row under its topic, because there may be thousands of runs between two entries of a topic; and each
run has rows that refer to its pages. The key of a page has the number of its entries and the time of the oldest, so the
deletion of old entries skips young pages without reading them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from janitor.state.documents import Documents, damage_as_error, newest_first, oldest_first, pack_value, parse_value
from janitor.state.records import LedgerEntry, row_of
from tms_core.topic import TopicId

#: Key prefixes: a page; an entry by topic; a page by run.
PAGE, BY_TOPIC, BY_RUN = b"l", b"t", b"i"
#: The maximum number of entries in a page; some tens of stored kilobytes.
PAGE_ENTRIES = 500
_TOKEN_BYTES = 6
#: The positions of run id and time in the row of a numbered entry.
_RUN_ID, _AT_MS = 4, 5
#: The mark of a key in hex without the prefix of its topic.
_TOPIC_MARK = "+"
#: The fields of an entry that are not in its key under the topic.
_Rest = tuple[str, int, str, str, str, str, int | None, int | None, int | None, int, int, int, int | None]
#: A page: number, namespace, topic and generation of each entry, and the rest of each entry.
_Page = tuple[list[tuple[int, str, str, int]], list[_Rest]]


class LedgerPage(NamedTuple):
    """The key of a page.

    Attributes:
        first: the lowest number of its entries.
        earliest_ms: the lowest ``at_ms`` of its entries.
        entries: the number of its entries.
        token: random bytes, which are part of the keys of its entries' rows.
    """

    first: int
    earliest_ms: int
    entries: int
    token: bytes

    @classmethod
    def parse(cls, tail: bytes) -> LedgerPage:
        """Read a key without its first byte."""
        first = 2**63 - 1 - int.from_bytes(tail[:8], "big")
        earliest_ms = int.from_bytes(tail[8:16], "big") - 2**63
        return cls(first, earliest_ms, int.from_bytes(tail[16:18], "big"), tail[18:])

    @property
    def tail(self) -> bytes:
        """Return its key without the first byte."""
        numbers = newest_first(self.first) + oldest_first(self.earliest_ms)
        return numbers + self.entries.to_bytes(2, "big") + self.token


class RecordedLedger(Documents):
    """The ledger in the state."""

    def add_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        """Append deletions to the ledger, in their order."""
        added = list(entries)

        def add() -> None:
            first, since_ms = self._numbers()
            rows = [[number, *_entry_row(entry)] for number, entry in enumerate(added, first)]
            # Save the number and the pages in one transaction, so that numbers are unique.
            for begin in range(0, len(rows), PAGE_ENTRIES):
                self._put_page(rows[begin : begin + PAGE_ENTRIES])
            self._save("ledger", (first + len(added), since_ms))

        if added:
            self._write(add)

    def ledger(
        self,
        limit: int,
        *,
        topic: TopicId | None = None,
        run_id: str | None = None,
        key: bytes | None = None,
        patterns: Sequence[str] = (),
    ) -> list[LedgerEntry]:
        """Return the last ``limit`` entries, newest first.

        Args:
            topic: only entries of this topic.
            run_id: only entries of this run, of all topics.
            key: only entries whose range contains the key; with ``topic``.
            patterns: only entries of topics that match one of these shell patterns; empty: all.
        """
        if run_id is not None:
            found = (entry for entry in self._of_run(run_id) if entry.run_id == run_id)
        elif topic is not None:
            found = (entry for entry in self._of_topic(topic) if key is None or entry.start <= key < entry.stop)
        else:
            found = (_entry_of(key, row[1:]) for key, value in self._scan(PAGE) for row in reversed(_rows(key, value)))
        matches = (entry for entry in found if not patterns or _matches(str(entry.topic), patterns))
        return list(islice(matches, limit))

    def ledger_generations(self, topic: TopicId) -> list[int]:
        """Return the generations of a topic with ledger entries, sorted."""
        prefix = BY_TOPIC + topic.prefix
        return sorted({_generation(key, prefix) for key in self._keys(prefix)})

    def ledger_since_ms(self) -> int | None:
        """Return the time since which the ledger is complete; None if no entries were deleted, or if all were."""
        return self._numbers()[1]

    def prune_ledger(self, before_ms: int, keep: int) -> int:
        """Delete older entries, and the oldest beyond ``keep`` entries; return the number of deleted entries."""
        return self._write(lambda: self._prune(before_ms, keep))

    def _prune(self, before_ms: int, keep: int) -> int:
        deleted, oldest = 0, None
        for page in [LedgerPage.parse(key[1:]) for key in self._keys(PAGE)]:
            if page.earliest_ms >= before_ms and page.entries <= keep:
                keep -= page.entries
                oldest = page
                continue
            present = self._entries(page)
            young = [row for row in present if row[_AT_MS] >= before_ms]
            remaining = young[max(0, len(young) - keep) :]
            keep -= len(remaining)
            deleted += len(present) - len(remaining)
            for key in self._keys_of(page, present):
                self._delete_row(key)
            if remaining:
                oldest = self._put_page(remaining)
        if deleted:
            rest = self._entries(oldest) if oldest else []
            self._save("ledger", (self._numbers()[0], rest[0][_AT_MS] if rest else None))
        return deleted

    def _put_page(self, rows: list[list[Any]]) -> LedgerPage:
        """Write a page of numbered entries, and their rows under topics and runs."""
        earliest_ms = min(row[_AT_MS] for row in rows)
        page = LedgerPage(rows[0][0], earliest_ms, len(rows), secrets.token_bytes(_TOKEN_BYTES))
        own, *of_topics = self._keys_of(page, rows)
        # Pack each rest once, for the page and for the row under the topic.
        parts = [pack_value(row[_RUN_ID:]) for row in rows]
        self._put_row(own, b"[%b,[%b]]" % (pack_value([row[:_RUN_ID] for row in rows]), b",".join(parts)))
        for key, part in zip_longest(of_topics, parts, fillvalue=b""):
            self._put_row(key, part)
        return page

    def _keys_of(self, page: LedgerPage, rows: list[list[Any]]) -> Iterator[bytes]:
        """Yield the keys of a page, of its entries under their topics, and under its runs."""
        yield PAGE + page.tail
        for number, namespace, topic, generation, *_ in rows:
            prefix = TopicId(namespace, topic).prefix
            yield BY_TOPIC + prefix + newest_first(number) + oldest_first(generation) + page.token
        for run_id in {row[_RUN_ID] for row in rows}:
            yield _run_prefix(run_id) + page.tail

    def _of_run(self, run_id: str) -> Iterator[LedgerEntry]:
        prefix = _run_prefix(run_id)
        for key in self._keys(prefix):
            page = LedgerPage.parse(key[len(prefix) :])
            yield from (_entry_of(PAGE + page.tail, row[1:]) for row in reversed(self._entries(page)))

    def _of_topic(self, topic: TopicId) -> Iterator[LedgerEntry]:
        prefix = BY_TOPIC + topic.prefix
        for key, value in self._scan(prefix):
            rest = parse_value(_Rest, key, value)
            yield _entry_of(key, [topic.namespace, topic.topic, _generation(key, prefix), *rest])

    def _entries(self, page: LedgerPage) -> list[list[Any]]:
        """Return the rows of a page, oldest first; empty if another process has just deleted the page."""
        key = PAGE + page.tail
        value = self._row(key)
        return [] if value is None else _rows(key, value)

    def _numbers(self) -> tuple[int, int | None]:
        """Return the number of the next entry, and the time of the oldest entry after older ones were deleted."""
        return self._value(tuple[int, int | None], "ledger") or (1, None)


def _entry_row(entry: LedgerEntry) -> list[Any]:
    """Return an entry as JSON values, starting with the values in its key under the topic."""
    run_id, at_ms, topic, generation, table, rule, start, stop, *rest = row_of(entry)
    prefix = topic.prefix
    keys = _short(start, prefix), _short(stop, prefix)
    return [topic.namespace, topic.topic, generation, run_id, at_ms, table, rule, *keys, *rest]


def _entry_of(key: bytes, row: Sequence[Any]) -> LedgerEntry:
    """Return an entry from JSON values.

    Args:
        key: the key of the row that has them.
    """
    namespace, topic, generation, run_id, at_ms, table, rule, start, stop, *rest = row
    name = TopicId(namespace, topic)
    prefix = name.prefix
    with damage_as_error(key):
        keys = _long(start, prefix), _long(stop, prefix)
    return LedgerEntry(run_id, at_ms, name, generation, table, rule, *keys, *rest)


def _short(key: bytes, prefix: bytes) -> str:
    """Return a key in hex; the prefix of the topic is replaced by a mark."""
    return _TOPIC_MARK + key[len(prefix) :].hex() if key.startswith(prefix) else key.hex()


def _long(text: str, prefix: bytes) -> bytes:
    return prefix + bytes.fromhex(text[1:]) if text.startswith(_TOPIC_MARK) else bytes.fromhex(text)


def _rows(key: bytes, value: bytes) -> list[list[Any]]:
    """Return the numbered entries of a page."""
    heads, parts = parse_value(_Page, key, value)
    with damage_as_error(key):
        return [[*head, *part] for head, part in zip(heads, parts, strict=True)]


def _generation(key: bytes, prefix: bytes) -> int:
    at = len(prefix) + 8
    return int.from_bytes(key[at : at + 8], "big") - 2**63


def _run_prefix(run_id: str) -> bytes:
    name = run_id.encode()
    return BY_RUN + len(name).to_bytes(2, "big") + name


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
