"""Conflicts between archived rows and rows in the target of a restore (invariant S16).

Readers find a row by its key, and the payloads of a message by its transaction: all rows of the payload table with the
transaction's pointer, from any client. Two conflicts are possible if rows return to another topic or generation.
Another message may have the same key. And if a transaction wrote to both topics, its message in the target would get
the payloads of both. Neither can be undone, so both are detected before the first write.

An existing row with the archived value is not a conflict, because a restore may be repeated. The sign of a pointer does
not matter. The detection reads the archive twice, and the keys of the target once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from janitor.archive.writer import pick_rows
from janitor.rules.policy import Transactions
from tms_core.errors import Refused
from tms_core.messaging.producers.rows import announced_ahead
from tms_core.rowkey import PayloadKey, generation_prefix, java_abs, pointer_prefix, stop_key
from tms_core.tables.base import CELLS, KEYS, MESSAGES, PAYLOADS, Reads, iterate_items, pages
from tms_core.tables.side import SideTable
from tms_core.topic import TopicMetadata

#: The number of rows in a page of the target.
_PAGE_ROWS = 1000
#: The maximum number of transactions that an error names.
_NAMED = 3


class RestoredRow(NamedTuple):
    """An archived row in its restored form.

    Attributes:
        key: its new key.
        pointer: the pointer of its transaction, whose sign does not matter.
        payload: the payload; None for a message that takes its payload from the payload table.
        is_selected: whether this restore writes the row.
    """

    key: bytes
    pointer: int | None
    payload: bytes | None
    is_selected: bool


class Conflicts:
    """A comparison of archived rows with the target.

    Call :meth:`expect` for transactions with archived payloads, then :meth:`read_target`, then :meth:`compare` for all
    files, then :meth:`refuse`.

    Args:
        store: the target's store; only read.
        topic: the target.
        transactions: the transactions that may still write.
        same_topic: whether the rows come from this topic, so that rows of its current generation cannot conflict.
        heartbeat: called with the number of read rows.
        side: the side table with the announcements of producers; None without announcements.
    """

    def __init__(
        self,
        store: Reads,
        topic: TopicMetadata,
        transactions: Transactions,
        *,
        same_topic: bool,
        heartbeat: Callable[[int], None],
        side: SideTable | None = None,
    ) -> None:
        self._store = store
        self._transactions = transactions
        self._heartbeat = heartbeat
        prefix, generation = topic.topic.prefix, topic.generation
        self._topic = topic
        self._home = generation if same_topic else None
        self._start, self._stop = generation_prefix(prefix, generation), generation_prefix(prefix, generation + 1)
        #: The generations of restored payloads and of messages that refer to them, by transaction.
        self._origins: dict[int, set[int]] = {}
        #: Digests of a transaction's payloads and such messages: in the target, and in the archive by generation.
        self._present: dict[int, dict[bytes, bytes]] = {}
        self._archived: dict[int, dict[int, dict[bytes, bytes]]] = {}
        #: Transactions with payloads, and with messages that refer to them, in the target or in the archive.
        self._stored: set[int] = set()
        self._referred: set[int] = set()
        #: Digests of restored rows by key, if rows of several generations are restored.
        self._arrived: dict[bytes, bytes] = {}
        self._clashes: list[bytes] = []
        #: The ranges reserved for producers; restored rows of the topic itself may be in them.
        self._announced = [] if side is None or same_topic else announced_ahead(side, self._start)
        self._in_announced: list[bytes] = []

    def expect(self, pointer: int, generation: int) -> None:
        """Record that this restore writes a payload, or a message that refers to a payload."""
        self._origins.setdefault(java_abs(pointer), set()).add(generation)

    def read_target(self) -> None:
        """Read the target's rows of the expected transactions.

        Raises:
            StoreError: the target cannot be read.
        """
        other_pointers = {pointer for pointer, origins in self._origins.items() if origins != {self._home}}
        if not other_pointers:
            return
        for pointer in sorted(self._stored_pointers(other_pointers)):
            self._stored.add(pointer)
            self._present[pointer] = dict(self._payloads(pointer))
        for key, pointer in self._references(other_pointers):
            self._referred.add(pointer)
            self._present.setdefault(pointer, {})[key] = _digest(pointer, None)

    def compare(self, table: str, generation: int, rows: list[RestoredRow], *, mixed: bool) -> None:
        """Compare archived rows with rows of the target and of other generations.

        Args:
            table: ``message`` or ``payload``.
            generation: the generation of the archived rows.
            rows: the rows, by ascending key.
            mixed: whether rows of several generations are restored.

        Raises:
            StoreError: the target cannot be read.
        """
        digests = {row.key: _digest(row.pointer if table == "message" else None, row.payload) for row in rows}
        keys = [row.key for row in rows if row.is_selected]
        self._clashes += [key for key, digest in self._found(table, keys) if digest != digests[key]]
        if table == "message":
            self._in_announced += [key for key in keys if any(start <= key < stop for start, stop in self._announced)]
        if mixed:
            self._clashes += [key for key in keys if self._arrived.setdefault(key, digests[key]) != digests[key]]
        for row in rows:
            pointer = java_abs(row.pointer or 0)
            if (table == "payload" or row.payload is None) and self._in_doubt(pointer):
                (self._stored if table == "payload" else self._referred).add(pointer)
                known = self._archived.setdefault(pointer, {})
                known.setdefault(generation, {})[row.key] = digests[row.key]

    def refuse(self) -> None:
        """Raise an error if there is a conflict.

        Raises:
            Refused: there is a conflict.
        """
        found = []
        if self._clashes:
            found.append(
                f"{len(self._clashes)} of its rows have the same key as an archived row but another value, the first "
                f"row is {min(self._clashes).hex()}"
            )
        if self._in_announced:
            found.append(f"{len(self._in_announced)} rows are in ranges that producers have announced for their rows")
        if mixed := sorted(pointer for pointer in self._stored & self._referred if self._mixes(pointer)):
            found.append(
                f"{len(mixed)} transactions have other payloads in the topic than in the archive: "
                f"{_describe_pointers(mixed)}"
            )
        if writing := sorted(self._writing()):
            found.append(
                f"{len(writing)} transactions are in progress and may write to the topic: {_describe_pointers(writing)}"
            )
        if found:
            raise Refused(
                f"Nothing is restored to {self._topic.topic}: {'; '.join(found)}.",
                "Restore to another topic (--to), or restore fewer rows (--run, --since, --until), so that old and new "
                "messages are not mixed.",
            )

    @property
    def any_in_doubt(self) -> bool:
        """Return whether all archived rows of some transactions must be compared."""
        return any(map(self._in_doubt, self._origins))

    def _in_doubt(self, pointer: int) -> bool:
        return pointer in self._present or len(self._origins.get(pointer, ())) > 1

    def _writing(self) -> Iterator[int]:
        """Yield transactions that may still publish to the target; their messages would get restored payloads."""
        for pointer, origins in self._origins.items():
            if origins != {self._home} and self._transactions.is_undecided(pointer):
                yield pointer

    def _mixes(self, pointer: int) -> bool:
        """Return whether the rows of a transaction, present and restored, come from more than one generation."""
        archived = {origin: self._archived.get(pointer, {}).get(origin, {}) for origin in self._origins[pointer]}
        present = self._present.get(pointer, {})
        if self._home in archived:
            archived[self._home] |= present
        parts = [present, *archived.values()]
        return not any(all(part.items() <= whole.items() for part in parts) for whole in archived.values())

    # -- the target ----------------------------------------------------------------------------------------------

    def _found(self, table: str, keys: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys and digests of the target's rows with these keys."""
        if table == "message":
            for page in pick_rows(partial(self._store.message.read, MESSAGES), keys):
                yield from ((key, _digest(value.pointer, value.payload)) for key, value in page)
        else:
            for stored in pick_rows(partial(self._store.payload.read, PAYLOADS), keys):
                yield from ((key, _digest(None, value)) for key, value in stored)

    def _stored_pointers(self, pointers: Iterable[int]) -> set[int]:
        """Return the transactions that have payloads in the target, among the given transactions."""
        found: set[int] = set()
        for page in pages(partial(self._store.payload.read, KEYS), self._start, self._stop, _PAGE_ROWS):
            found.update(key.write_pointer for raw in page.items if (key := PayloadKey.parse(raw)) is not None)
            found.intersection_update(pointers)
            self._heartbeat(len(page.items))
        return found

    def _payloads(self, pointer: int) -> Iterator[tuple[bytes, bytes]]:
        start = pointer_prefix(self._topic.topic.prefix, self._topic.generation, pointer)
        rows = iterate_items(partial(self._store.payload.read, PAYLOADS), start, stop_key(start), _PAGE_ROWS)
        yield from ((key, _digest(None, value)) for key, value in rows)

    def _references(self, pointers: set[int]) -> Iterator[tuple[bytes, int]]:
        """Yield the target's messages that take their payload from rows of these transactions."""
        for page in pages(partial(self._store.message.read, CELLS), self._start, self._stop, _PAGE_ROWS):
            hits = {cell.key: java_abs(cell.pointer) for cell in page.items if cell.refers}
            keys = [key for key, pointer in hits.items() if pointer in pointers]
            # Some stores must read the value to determine whether a row refers to a payload.
            for found in pick_rows(partial(self._store.message.read, MESSAGES), keys):
                yield from ((key, hits[key]) for key, value in found if value.payload is None)
            self._heartbeat(len(page.items))


def _describe_pointers(pointers: list[int]) -> str:
    return ", ".join(map(str, pointers[:_NAMED])) + (", …" if len(pointers) > _NAMED else "")


def _digest(pointer: int | None, payload: bytes | None) -> bytes:
    """Return a digest of a row's value."""
    head = f"{None if pointer is None else java_abs(pointer)} {payload is None} ".encode()
    return blake2b(head + (payload or b""), digest_size=16).digest()
