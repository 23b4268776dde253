"""The restore of archived rows (invariant S16: a restore never shows a row that readers must not see).

A row returns unchanged, with two exceptions. Its key gets the current generation of its topic, because older
generations are not read. Its write pointer stays positive only if its transaction was known to be committed when the
row was archived, and no later fact contradicts that. Otherwise the pointer is inverted, and no transactional reader
sees the row. The outcome of such a transaction cannot be found out later, because the invalid list may have been
truncated since.

For a row of an old generation, a commit is proven only by another row of the same transaction that was archived as
committed from the generation that was current then.

Existing rows are not changed. Therefore a restore may be repeated, also after it died, and a row that is archived twice
returns once. If the target has another row under the same key, or of the same transaction, nothing is restored
(:mod:`janitor.archive.conflicts`).

Payloads are written before the messages that refer to them, so that no reader gets a message without its parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from janitor.archive import parquet
from janitor.archive.conflicts import Conflicts, RestoredRow
from janitor.archive.index import ANY, ArchivedFile, Selection
from janitor.archive.writer import CommitState, pick
from janitor.rules.policy import Rule
from janitor.state.base import State
from janitor.sweep.transactions import TransactionView
from tms_core.errors import ArchiveError, MetadataError, Refused, StoreError
from tms_core.logs.printable import duration
from tms_core.rowkey import Cutoff, MessageKey, PayloadKey, java_abs, pointer_prefix, stop_key
from tms_core.tables.base import KEYS, KeyReads, MessageValue, Reads, Store
from tms_core.tables.read_only import read_only_error
from tms_core.tables.side import SideTable
from tms_core.topic import INT_MAX, TopicId, TopicMetadata

#: The margin of a proposed TTL, in seconds, so that restored rows are not deleted at once.
_DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters of a restore.

    Attributes:
        source: the topic of the rows.
        target: another topic to write them to; None: the same.
        selection: the selected rows.
        dry_run: only count.
    """

    source: TopicId
    target: TopicId | None = None
    selection: Selection = ANY
    dry_run: bool = False


@dataclass(slots=True)
class RestoreResult:
    """The result of a restore, or of a dry run.

    Attributes:
        generation: the generation of the target, which the rows are in now.
        restored: written rows.
        negated: written rows with a negative pointer, which no transactional reader sees.
        already_there: rows that the target had.
        skipped: rows of the topic that were not selected.
        expired: restored rows that are older than the target's TTL.
        ttl_seconds: a TTL in whole days that would keep all of them for one more day; None: no row is expired.
    """

    source: TopicId
    target: TopicId
    generation: int
    dry_run: bool
    restored: int = 0
    messages: int = 0
    payloads: int = 0
    negated: int = 0
    already_there: int = 0
    skipped: int = 0
    expired: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    ttl_seconds: int | None = None
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "source": str(self.source), "target": str(self.target)}


class _Row(NamedTuple):
    """A row on its way back: its new key, its time, and stored payloads under it."""

    key: bytes
    time_ms: int
    pointer: int | None
    payload: bytes | None


def restore(
    store: Reads,
    state: State,
    transactions: TransactionView,
    files: Sequence[ArchivedFile],
    request: Request,
    now_ms: int,
    heartbeat: Callable[[int], None],
    side: SideTable | None = None,
) -> RestoreResult:
    """Write archived rows into a topic's current generation; durable on return.

    All payloads that the messages refer to return with them, whenever and by whichever run they were deleted.

    Args:
        store: the target's store; a dry run only reads it, and needs about 200 bytes of memory per row.
        state: the paused topics, and the transactions that were once invalid.
        transactions: the current facts about transactions.
        files: all files of the source (:func:`janitor.archive.index.find_topic`), independent of the selection.
        request: the parameters.
        now_ms: the time by which rows count as expired.
        heartbeat: called with the number of read rows.
        side: the table with the announcements of producers; None: no announcements.

    Raises:
        Refused: the target is unknown, deleted, or the source itself and not paused (except in a dry run); if that
            happened during the restore, written rows stay. Or the target has conflicting rows.
        ArchiveError: a file cannot be read, usually before anything is written; written rows stay.
        StoreError: the store failed; written rows stay.
    """
    work = _Restore(store, state, transactions, request, now_ms, heartbeat, side)
    # Of a row that was archived twice the later file mostly knows more.
    newest_first = sorted(files, key=lambda file: file.summary.deleted_ms, reverse=True)
    messages, payloads = ([f for f in newest_first if f.summary.table == table] for table in ("message", "payload"))
    # S16: all files are read before the first write. A later file may show that a transaction was void, or a conflict.
    work.survey(messages, payloads)
    work.compare([*payloads, *messages])
    # Payloads first, or a reader could meet a message whose payload is not there yet.
    for file in (*payloads, *messages):
        work.bring_back(file)
    return work.finish()


class _Restore:
    """One restore under way."""

    def __init__(
        self,
        store: Reads,
        state: State,
        transactions: TransactionView,
        request: Request,
        now_ms: int,
        heartbeat: Callable[[int], None],
        side: SideTable | None,
    ) -> None:
        self._store = store
        self._state = state
        self._snapshot = transactions.snapshot
        self._now_ms = now_ms
        self._selection = request.selection
        self._heartbeat = heartbeat
        target = request.target or request.source
        self._same_topic = target == request.source
        self._must_be_paused = self._same_topic and not request.dry_run
        self._topic = self._target(target)
        self._cutoff = Cutoff.at(now_ms, self._topic.ttl_seconds)
        self._conflicts = Conflicts(
            store, self._topic, transactions, same_topic=self._same_topic, heartbeat=heartbeat, side=side
        )
        #: Transactions that were once known to be invalid, though they may have left the invalid list since.
        self._void: set[int] = set()
        #: Transactions of rows of old generations, and the ones of them that are known to be committed.
        self._in_doubt: set[int] = set()
        self._proven: set[int] = set()
        #: Generation and transaction of payloads: referred to by messages, and contained in the archive.
        self._referenced: set[tuple[int, int]] = set()
        self._archived: set[tuple[int, int]] = set()
        self._would_write: set[bytes] = set()
        self._result = RestoreResult(request.source, target, self._topic.generation, request.dry_run)

    def survey(self, messages: Sequence[ArchivedFile], payloads: Sequence[ArchivedFile]) -> None:
        """Read the facts that decide, before anything is written: void and proven transactions, and needed payloads."""
        if self._snapshot is None:
            self._result.warnings.append(
                "there is no usable transaction snapshot, so only what was known when the rows were archived counts"
            )
        self._void.update(self._state.open_ids())
        for file in sorted(messages, key=lambda file: file.summary.rule != Rule.OLD_GENERATION):
            self._survey_messages(file)
        for file in payloads:
            for rows in parquet.read(file.path, ["key"]):
                found = [self._parts(file, key) for (key,) in rows]
                for parts in found:
                    if isinstance(parts, PayloadKey) and self._is_selected(file, parts):
                        self._conflicts.expect(parts.write_pointer, parts.generation)
                self._heartbeat(len(rows))

    def _survey_messages(self, file: ArchivedFile) -> None:
        old = file.summary.rule == Rule.OLD_GENERATION
        columns = ["key", "write_pointer", "verdict", *(["payload"] if file.summary.references else [])]
        for rows in parquet.read(file.path, columns):
            for key, pointer, recorded, *payload in rows:
                if recorded == CommitState.INVALID:
                    self._void.add(pointer)
                elif old and pointer is not None:
                    self._in_doubt.add(pointer)
                elif recorded == CommitState.COMMITTED and pointer in self._in_doubt:
                    self._proven.add(pointer)
                parts = self._parts(file, key)
                if payload == [None] and self._is_selected(file, parts):
                    _require_value(file, pointer, None)
                    self._referenced.add((parts.generation, java_abs(pointer)))
                    self._conflicts.expect(pointer, parts.generation)
            self._heartbeat(len(rows))

    def compare(self, files: Sequence[ArchivedFile]) -> None:
        """Make sure that the target has no conflicting rows.

        Raises:
            Refused: it has.
        """
        self._conflicts.read_target()
        doubtful, needed = self._conflicts.any_in_doubt, bool(self._referenced)
        selection = [file for file in files if self._selection.may_take(file.summary)]
        mixed = len({file.summary.generation for file in selection}) > 1
        for file in files:
            if doubtful or file in selection or (needed and file.summary.table == "payload"):
                self._compare(file, mixed=mixed)
        self._conflicts.refuse()

    def _compare(self, file: ArchivedFile, *, mixed: bool) -> None:
        table, generation = file.summary.table, file.summary.generation
        for rows in parquet.read(file.path, ("key", "write_pointer", "payload")):
            found = [(self._parts(file, key), pointer, payload) for key, pointer, payload in rows]
            if table == "message":
                for _, pointer, payload in found:
                    _require_value(file, pointer, payload)
            arrivals = [RestoredRow(self._new_key(p), w, body, self._is_selected(file, p)) for p, w, body in found]
            self._conflicts.compare(table, generation, arrivals, mixed=mixed)
            self._heartbeat(len(rows))

    def bring_back(self, file: ArchivedFile) -> None:
        """Write the selected rows of one file that the target does not have."""
        table: KeyReads = self._store.message if file.summary.table == "message" else self._store.payload
        for rows in parquet.read(file.path, ("key", "write_pointer", "payload", "verdict")):
            rows_by_key = {row.key: row for row in self._select_rows(file, rows)}
            missing = self._missing(table, sorted(rows_by_key))
            self._result.skipped += len(rows) - len(rows_by_key)
            self._result.already_there += len(rows_by_key) - len(missing)
            if missing:
                self._write(file.summary.table, [rows_by_key[key] for key in missing])
                self._make_sure(table, missing)
            self._heartbeat(len(rows))

    def _writable(self) -> Store:
        if not isinstance(self._store, Store):
            raise read_only_error()
        return self._store

    def finish(self) -> RestoreResult:
        """Return the result, with what there is to say about it."""
        result = self._result
        lacking = sum(not self._has_payload(pointer) for _, pointer in self._referenced - self._archived)
        if lacking:
            result.warnings.append(
                f"messages of {lacking} transactions refer to payloads that are neither archived nor in {result.target}"
            )
        if result.expired and result.oldest_ms is not None:
            ttl_seconds = -(-(self._now_ms - result.oldest_ms) // 1000) + _DAY_SECONDS
            days = -(-ttl_seconds // _DAY_SECONDS)
            result.ttl_seconds = min(days * _DAY_SECONDS, INT_MAX)
            ttl = f"{days}d" if result.ttl_seconds < INT_MAX else f"{INT_MAX}"
            until = "when the topic is resumed" if self._same_topic else "with the next run, unless the topic is paused"
            result.warnings.append(
                f"{result.expired} of these rows are older than the ttl of {result.target} "
                f"({duration(self._topic.ttl_seconds * 1000)}) and the janitor deletes them again {until}; to keep "
                f"them for a day, first set the ttl of the topic to {ttl}"
            )
        return result

    # -- the target ----------------------------------------------------------------------------------------------

    def _target(self, topic: TopicId) -> TopicMetadata:
        """Return the present metadata of the target.

        Raises:
            Refused: nothing may be written to it.
        """
        value = self._store.metadata.get(topic.prefix)
        if value is None:
            raise Refused(f"Topic {topic} does not exist.", "Create it, or name another one with --to NS:TOPIC.")
        try:
            found = TopicMetadata.parse(topic.prefix, value)
        except MetadataError as error:
            raise Refused(f"Nothing is restored: {error}.", "Correct its properties first.") from error
        if found.deleted:
            raise Refused(
                f"Topic {topic} is deleted, so its rows could not be read.",
                "Create it again, or name another one with --to NS:TOPIC.",
            )
        paused = topic.matches(pause.pattern for pause in self._state.pauses())
        if self._must_be_paused and not paused:
            raise Refused(
                f"Topic {topic} is not paused, so the janitor could delete the restored rows again at once.",
                f"janitor pause {topic}",
            )
        return found

    def _refuse_if_moved(self) -> None:
        """Check the target again before each write, as a sweep does (invariant S2)."""
        present = self._target(self._topic.topic)
        if present.generation != self._topic.generation:
            raise Refused(
                f"Topic {self._topic.topic} was created again while this command wrote to it.",
                "The janitor deletes the rows that were already written, as an old generation. Restore again.",
            )

    # -- rows ----------------------------------------------------------------------------------------------------

    def _select_rows(self, file: ArchivedFile, rows: list[tuple[Any, ...]]) -> Iterator[_Row]:
        """Yield the rows that are selected or needed, as they come back."""
        for key, pointer, payload, recorded in rows:
            parts = self._parts(file, key)
            if self._is_selected(file, parts):
                yield _Row(
                    self._new_key(parts), parts.time_ms, self._restored_pointer(file, pointer, recorded), payload
                )

    def _is_selected(self, file: ArchivedFile, parts: MessageKey | PayloadKey) -> bool:
        """Return whether a row is selected, or a returning message refers to it."""
        if isinstance(parts, PayloadKey):
            transaction = (parts.generation, java_abs(parts.write_pointer))
            self._archived.add(transaction)
            if transaction in self._referenced:
                return True
        return self._selection.takes(file.summary.run_id, parts.time_ms)

    def _new_key(self, parts: MessageKey | PayloadKey) -> bytes:
        return parts._replace(topic=self._topic.topic, generation=self._topic.generation).pack()

    def _has_payload(self, pointer: int) -> bool:
        """Return whether the target has any payload of the transaction."""
        start = pointer_prefix(self._topic.topic.prefix, self._topic.generation, pointer)
        return self._store.payload.first(start, stop_key(start)) is not None

    def _restored_pointer(self, file: ArchivedFile, pointer: int | None, recorded: str) -> int | None:
        """Return the pointer of a restored message: positive only if the message is known to be visible."""
        if pointer is None or pointer <= 0:
            return pointer
        # Older archives have an outcome for rows of old generations, but could not know it.
        old = file.summary.rule == Rule.OLD_GENERATION
        committed = pointer in self._proven if old else recorded == CommitState.COMMITTED
        return pointer if committed and not self._is_void(pointer) else -pointer

    def _is_void(self, pointer: int) -> bool:
        return pointer in self._void or (self._snapshot is not None and self._snapshot.is_invalid(pointer))

    def _missing(self, table: KeyReads, keys: list[bytes]) -> list[bytes]:
        """Return the keys without a row in the target."""
        present = {key for page in pick(partial(table.read, KEYS), lambda key: key, len, keys) for key in page}
        return [key for key in keys if key not in present and key not in self._would_write]

    def _write(self, table: str, rows: list[_Row]) -> None:
        if self._result.dry_run:
            self._would_write.update(row.key for row in rows)
        else:
            # S2: right before each write. In a new generation the rows would be those of another topic.
            self._refuse_if_moved()
            if table == "message":
                self._writable().message.put([(row.key, MessageValue(row.pointer, row.payload)) for row in rows])
            else:
                self._writable().payload.put([(row.key, row.payload or b"") for row in rows])
        self._count(table, rows)

    def _make_sure(self, table: KeyReads, keys: list[bytes]) -> None:
        """Check that written rows are visible: HBase hides a row under a delete marker with a future time, as a server
        with a fast clock leaves.

        Raises:
            StoreError: a row is hidden.
        """
        if hidden := self._missing(table, keys):
            raise StoreError(
                f"{len(hidden)} rows that were restored to the {table.name} table cannot be seen, "
                f"the first one {hidden[0].hex()}.",
                "HBase's delete marks are in the future, because a server's clock was ahead: restore again when that "
                "time has passed, or restore to another topic with --to.",
            )

    def _count(self, table: str, rows: list[_Row]) -> None:
        result = self._result
        result.restored += len(rows)
        if table == "message":
            result.messages += len(rows)
            result.negated += sum(row.pointer is not None and row.pointer < 0 for row in rows)
        else:
            result.payloads += len(rows)
        times = sorted(row.time_ms for row in rows)
        result.expired += bisect_left(times, self._cutoff.ms)
        result.oldest_ms = times[0] if result.oldest_ms is None else min(result.oldest_ms, times[0])
        result.newest_ms = times[-1] if result.newest_ms is None else max(result.newest_ms, times[-1])

    def _parts(self, file: ArchivedFile, key: bytes) -> MessageKey | PayloadKey:
        parts = MessageKey.parse(key) if file.summary.table == "message" else PayloadKey.parse(key)
        if parts is None or parts.topic != self._result.source:
            raise ArchiveError(f"{file.path} holds a row that is not of {self._result.source}: {key.hex()}.")
        return parts


def _require_value(file: ArchivedFile, pointer: int | None, payload: bytes | None) -> None:
    """See that a message has something in it, as each that the janitor archives has.

    Raises:
        ArchiveError: it has not.
    """
    if pointer is None and payload is None:
        raise ArchiveError(
            f"{file.path} holds a message with neither a payload nor a transaction.",
            "The janitor did not write it: move the file out of the archive.",
        )
