"""The ledger: what runs took, newest first, by topic and by run.

Entries lie together as they were added, in pages, in the order of their numbers, so that listing the last ones and
forgetting the oldest reads few rows. An entry has a row of its own under its topic besides, because there may be
thousands of runs between two of the same topic; and each run leads to its pages. What a page's key tells, how many
entries it has and how old the oldest is, lets the others be passed over unread when entries are forgotten.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, NamedTuple

from janitor.state.documents import Documents, newest_first, oldest_first, packed
from janitor.state.records import LedgerEntry, row_of
from tms_core.topic import TopicId

#: Rows: a page; an entry by topic; a page by run.
PAGE, BY_TOPIC, BY_RUN = b"l", b"t", b"i"
#: Entries of a page, at most: some tens of kilobytes as they are stored.
PAGE_ENTRIES = 500
_TOKEN_BYTES = 6
_NOTHING = {"next": 1, "since_ms": None}


class LedgerPage(NamedTuple):
    """What a page's key tells.

    Attributes:
        first: the lowest number.
        earliest_ms: the lowest ``at_ms``.
        entries: how many.
        token: random; part of the keys of its entries' rows.
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
        """Its key without the first byte."""
        numbers = newest_first(self.first) + oldest_first(self.earliest_ms)
        return numbers + self.entries.to_bytes(2, "big") + self.token


class _Numbered(NamedTuple):
    number: int
    entry: LedgerEntry


class RecordedLedger(Documents):
    """The part of the state that is the ledger."""

    def add_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        """Remember what was taken."""
        added = list(entries)

        def add() -> None:
            told = self._json("ledger", _NOTHING)
            numbered = [_Numbered(number, entry) for number, entry in enumerate(added, told["next"])]
            for begin in range(0, len(numbered), PAGE_ENTRIES):
                token = secrets.token_bytes(_TOKEN_BYTES)
                page = numbered[begin : begin + PAGE_ENTRIES]
                rows = [packed(entry_row(each.entry)) for each in page]
                self._put_page(page, rows, token)
                for each, row in zip(page, rows, strict=True):
                    self._put_row(_topic_key(each, token), row)
            self._save("ledger", {**told, "next": told["next"] + len(added)})

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
        """The last ``limit`` entries, newest first.

        Args:
            topic: only of this topic.
            run_id: only of this run, whatever the topic.
            key: only those whose range holds the key; with ``topic``.
            patterns: only of topics that fit one of these shell patterns; none for all.
        """
        if run_id is not None:
            found = (entry for entry in self._of_run(run_id) if entry.run_id == run_id)
        elif topic is not None:
            found = (entry for entry in self._of_topic(topic) if key is None or entry.start <= key < entry.stop)
        else:
            pages = (_numbered(value) for _, value in self._scan(PAGE))
            found = (each.entry for page in pages for each in reversed(page))
        fitting = (entry for entry in found if not patterns or _fits(str(entry.topic), patterns))
        return list(islice(fitting, limit))

    def ledger_generations(self, topic: TopicId) -> list[int]:
        """Of which generations of a topic the ledger has entries, in order."""
        prefix = BY_TOPIC + topic.prefix
        at = len(prefix) + 8
        return sorted({int.from_bytes(key[at : at + 8], "big") - 2**63 for key in self._keys(prefix)})

    def ledger_since_ms(self) -> int | None:
        """From when on no entry was forgotten, as far as those that are left tell; None when they tell of none."""
        since_ms: int | None = self._json("ledger", _NOTHING)["since_ms"]
        return since_ms

    def prune_ledger(self, before_ms: int, keep: int) -> int:
        """Forget entries that are older, and the oldest beyond ``keep`` of them; returns how many."""
        return self._write(lambda: self._prune(before_ms, keep))

    def _prune(self, before_ms: int, keep: int) -> int:
        forgotten, oldest = 0, None
        for page in [LedgerPage.parse(key[1:]) for key in self._keys(PAGE)]:
            if page.earliest_ms >= before_ms and page.entries <= keep:
                keep -= page.entries
                oldest = page
                continue
            present = self._entries(page)
            young = [each for each in present if each.entry.at_ms >= before_ms]
            left = young[max(0, len(young) - keep) :]
            keep -= len(left)
            forgotten += len(present) - len(left)
            oldest = self._shrink(page, present, left) or oldest
        if forgotten:
            told, left = self._json("ledger", _NOTHING), self._entries(oldest) if oldest else []
            self._save("ledger", {**told, "since_ms": left[0].entry.at_ms if left else None})
        return forgotten

    def _shrink(self, page: LedgerPage, present: list[_Numbered], left: list[_Numbered]) -> LedgerPage | None:
        """Keep only these entries of a page."""
        for run_id in {each.entry.run_id for each in present}:
            self._delete_row(_run_prefix(run_id) + page.tail)
        kept = {each.number for each in left}
        for each in present:
            if each.number not in kept:
                self._delete_row(_topic_key(each, page.token))
        self._delete_row(PAGE + page.tail)
        return self._put_page(left, [packed(entry_row(each.entry)) for each in left], page.token) if left else None

    def _put_page(self, numbered: list[_Numbered], rows: list[bytes], token: bytes) -> LedgerPage:
        earliest_ms = min(each.entry.at_ms for each in numbered)
        page = LedgerPage(numbered[0].number, earliest_ms, len(numbered), token)
        # Each row as it is packed already, with its number before it.
        parts = (b"[%d,%b" % (each.number, row[1:]) for each, row in zip(numbered, rows, strict=True))
        self._put_row(PAGE + page.tail, b"[%b]" % b",".join(parts))
        for run_id in {each.entry.run_id for each in numbered}:
            self._put_row(_run_prefix(run_id) + page.tail, b"")
        return page

    def _of_run(self, run_id: str) -> Iterator[LedgerEntry]:
        prefix = _run_prefix(run_id)
        for key in self._keys(prefix):
            yield from (each.entry for each in reversed(self._entries(LedgerPage.parse(key[len(prefix) :]))))

    def _of_topic(self, topic: TopicId) -> Iterator[LedgerEntry]:
        return (entry_of(json.loads(value)) for _, value in self._scan(BY_TOPIC + topic.prefix))

    def _entries(self, page: LedgerPage) -> list[_Numbered]:
        """Oldest first; none of a page that another process has just forgotten."""
        value = self._row(PAGE + page.tail)
        return [] if value is None else _numbered(value)


def entry_row(entry: LedgerEntry) -> list[Any]:
    """An entry as JSON values."""
    run_id, at_ms, topic, *rest = row_of(entry)
    return [run_id, at_ms, topic.namespace, topic.topic, *rest]


def entry_of(row: Sequence[Any]) -> LedgerEntry:
    """An entry from JSON values."""
    run_id, at_ms, namespace, topic, generation, table, rule, start, stop, *rest = row
    name = TopicId(namespace, topic)
    return LedgerEntry(run_id, at_ms, name, generation, table, rule, bytes.fromhex(start), bytes.fromhex(stop), *rest)


def _numbered(value: bytes) -> list[_Numbered]:
    return [_Numbered(number, entry_of(columns)) for number, *columns in json.loads(value)]


def _topic_key(each: _Numbered, token: bytes) -> bytes:
    generation = oldest_first(each.entry.generation)
    return BY_TOPIC + each.entry.topic.prefix + newest_first(each.number) + generation + token


def _run_prefix(run_id: str) -> bytes:
    name = run_id.encode()
    return BY_RUN + len(name).to_bytes(2, "big") + name


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
