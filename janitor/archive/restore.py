"""The restore of archived rows (invariant S16: a restore never shows a row that readers must not see).

A row is restored unchanged, with two exceptions. Its key gets the current generation of its topic, because readers
ignore older generations. Its write pointer stays positive only if its transaction was known to be committed when the
row was archived, and no later fact contradicts that. Otherwise the pointer is inverted, and no transactional reader
sees the row. The outcome of such a transaction cannot be determined later, because the invalid list may have been
truncated since.

The commit of a row of an old generation is proven only by another row of the same transaction that was archived as
committed while its generation was current.

A restore does not change existing rows. Therefore it may be repeated, also after a crash, and a row that was archived
twice is restored once. If the target has another row with the same key, or other rows of the same transaction, nothing
is restored (:mod:`janitor.archive.conflicts`).

Payloads are written before the messages that refer to them, so that no reader gets an incomplete message.
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
        target: the topic to restore to; None for the topic of the rows.
        selection: the selected rows.
        dry_run: whether to count only.
    """

    source: TopicId
    target: TopicId | None = None
    selection: Selection = ANY
    dry_run: bool = False


@dataclass(slots=True)
class RestoreResult:
    """The result of a restore, or of a dry run.

    Attributes:
        generation: the generation of the target, and now of the rows.
        restored: the number of written rows.
        negated: the number of written rows with a negative pointer, which no transactional reader sees.
        already_there: the number of rows that the target already had.
        skipped: the number of rows of the topic that were not selected.
        expired: the number of restored rows that are older than the target's TTL.
        ttl_seconds: a TTL in whole days that would keep all restored rows for a day; None without expired rows.
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
    """A row to restore: its new key, its time, its pointer and its payload."""

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
    """Write archived rows durably into the current generation of a topic.

    All payloads that the messages refer to are restored with them, independent of their run and time of deletion.

    Args:
        store: the target's store; a dry run only reads it, and needs about 200 bytes of memory per row.
        state: has the pauses, and the transactions that were once invalid.
        transactions: the current facts about transactions.
        files: all files of the source (:func:`janitor.archive.index.find_topic`), independent of the selection.
        request: the parameters.
        now_ms: the time that decides whether rows are expired.
        heartbeat: called with the number of read rows.
        side: the side table with the announcements of producers; None without announcements.

    Raises:
        Refused: the target has conflicting rows, is unknown or deleted, or is the source and not paused (except in a
            dry run). If that happens during the restore, written rows stay.
        ArchiveError: a file cannot be read, usually before anything is written; written rows stay.
        StoreError: the store failed; written rows stay.
    """
    work = _Restore(store, state, transactions, request, now_ms, heartbeat, side)
    # If a row was archived twice, prefer the later file, which usually has more information.
    newest_first = sorted(files, key=lambda file: file.summary.deleted_ms, reverse=True)
    messages, payloads = ([f for f in newest_first if f.summary.table == table] for table in ("message", "payload"))
    # S16: read all files before the first write. A later file may show an invalid transaction or a conflict.
    work.survey(messages, payloads)
    work.compare([*payloads, *messages])
    # Write payloads first, so that no reader gets a message whose payload does not exist yet.
    for file in (*payloads, *messages):
        work.restore_file(file)
    return work.finish()


class _Restore:
    """A restore in progress."""

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
        #: Transactions that were once invalid, even if they have left the invalid list since.
        self._void: set[int] = set()
        #: Transactions of rows of old generations, and those among them that are known to be committed.
        self._in_doubt: set[int] = set()
        self._proven: set[int] = set()
        #: Generation and transaction of payloads: with messages that refer to them, and with archived payloads.
        self._referenced: set[tuple[int, int]] = set()
        self._archived: set[tuple[int, int]] = set()
        self._would_write: set[bytes] = set()
        self._result = RestoreResult(request.source, target, self._topic.generation, request.dry_run)

    def survey(self, messages: Sequence[ArchivedFile], payloads: Sequence[ArchivedFile]) -> None:
        """Find invalid and committed transactions, and needed payloads, before the first write."""
        if self._snapshot is None:
            self._result.warnings.append(
                "there is no usable transaction snapshot, so only the outcomes in the archive decide about transactions"
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
        """Check that the target has no conflicting rows.

        Raises:
            Refused: the target has conflicting rows.
        """
        self._conflicts.read_target()
        doubtful, needed = self._conflicts.any_in_doubt, bool(self._referenced)
        selection = [file for file in files if self._selection.may_include_rows_of(file.summary)]
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
            restored = [RestoredRow(self._new_key(p), w, body, self._is_selected(file, p)) for p, w, body in found]
            self._conflicts.compare(table, generation, restored, mixed=mixed)
            self._heartbeat(len(rows))

    def restore_file(self, file: ArchivedFile) -> None:
        """Write the selected rows of a file that the target does not have."""
        table: KeyReads = self._store.message if file.summary.table == "message" else self._store.payload
        for rows in parquet.read(file.path, ("key", "write_pointer", "payload", "verdict")):
            rows_by_key = {row.key: row for row in self._select_rows(file, rows)}
            missing = self._missing(table, sorted(rows_by_key))
            self._result.skipped += len(rows) - len(rows_by_key)
            self._result.already_there += len(rows_by_key) - len(missing)
            if missing:
                self._write(file.summary.table, [rows_by_key[key] for key in missing])
                self._check_visible(table, missing)
            self._heartbeat(len(rows))

    def _writable(self) -> Store:
        if not isinstance(self._store, Store):
            raise read_only_error()
        return self._store

    def finish(self) -> RestoreResult:
        """Return the result with its warnings."""
        result = self._result
        incomplete = sum(not self._has_payload(pointer) for _, pointer in self._referenced - self._archived)
        if incomplete:
            result.warnings.append(
                f"messages of {incomplete} transactions refer to payloads that are neither archived nor in "
                f"{result.target}"
            )
        if result.expired and result.oldest_ms is not None:
            ttl_seconds = -(-(self._now_ms - result.oldest_ms) // 1000) + _DAY_SECONDS
            days = -(-ttl_seconds // _DAY_SECONDS)
            result.ttl_seconds = min(days * _DAY_SECONDS, INT_MAX)
            ttl = f"{days}d" if result.ttl_seconds < INT_MAX else f"{INT_MAX}"
            until = "when the topic is resumed" if self._same_topic else "with the next run, unless the topic is paused"
            result.warnings.append(
                f"{result.expired} restored rows are older than the ttl of {result.target} "
                f"({duration(self._topic.ttl_seconds * 1000)}), and the janitor deletes them again {until}; to keep "
                f"them for a day, first set the ttl of the topic to {ttl}"
            )
        return result

    # -- the target ----------------------------------------------------------------------------------------------

    def _target(self, topic: TopicId) -> TopicMetadata:
        """Return the present metadata of the target.

        Raises:
            Refused: a restore may not write to the target.
        """
        value = self._store.metadata.get(topic.prefix)
        if value is None:
            raise Refused(f"Topic {topic} does not exist.", "Create it, or choose another topic with --to NS:TOPIC.")
        try:
            found = TopicMetadata.parse(topic.prefix, value)
        except MetadataError as error:
            raise Refused(f"Nothing is restored: {error}.", "Correct the properties of the topic first.") from error
        if found.deleted:
            raise Refused(
                f"Topic {topic} is deleted, so nobody could read its rows.",
                "Create it again, or choose another topic with --to NS:TOPIC.",
            )
        paused = topic.matches(pause.pattern for pause in self._state.pauses())
        if self._must_be_paused and not paused:
            raise Refused(
                f"Topic {topic} is not paused, so the janitor could delete the restored rows at once.",
                f"Pause it: janitor pause {topic}",
            )
        return found

    def _refuse_if_moved(self) -> None:
        """Check the target again before each write, as a sweep does (invariant S2)."""
        present = self._target(self._topic.topic)
        if present.generation != self._topic.generation:
            raise Refused(
                f"Topic {self._topic.topic} was created again during the restore.",
                "Restore again. The janitor deletes the rows that were already written, as an old generation.",
            )

    # -- rows ----------------------------------------------------------------------------------------------------

    def _select_rows(self, file: ArchivedFile, rows: list[tuple[Any, ...]]) -> Iterator[_Row]:
        """Yield the selected and needed rows in their restored form."""
        for key, pointer, payload, recorded in rows:
            parts = self._parts(file, key)
            if self._is_selected(file, parts):
                yield _Row(
                    self._new_key(parts), parts.time_ms, self._restored_pointer(file, pointer, recorded), payload
                )

    def _is_selected(self, file: ArchivedFile, parts: MessageKey | PayloadKey) -> bool:
        """Return whether a row is selected, or a restored message refers to it."""
        if isinstance(parts, PayloadKey):
            transaction = (parts.generation, java_abs(parts.write_pointer))
            self._archived.add(transaction)
            if transaction in self._referenced:
                return True
        return self._selection.includes(file.summary.run_id, parts.time_ms)

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
        # The recorded outcome of rows of old generations does not count: it was not known when they were archived.
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
            # S2: check right before each write. A new generation is another topic.
            self._refuse_if_moved()
            if table == "message":
                self._writable().message.put([(row.key, MessageValue(row.pointer, row.payload)) for row in rows])
            else:
                self._writable().payload.put([(row.key, row.payload or b"") for row in rows])
        self._count(table, rows)

    def _check_visible(self, table: KeyReads, keys: list[bytes]) -> None:
        """Check that written rows are visible: in HBase, a delete marker from a server with a fast clock may hide them.

        Raises:
            StoreError: a row is hidden.
        """
        if hidden := self._missing(table, keys):
            raise StoreError(
                f"{len(hidden)} rows that were restored to the {table.name} table are not visible, the first row is "
                f"{hidden[0].hex()}.",
                "HBase's delete markers are in the future, because a server's clock was ahead: restore again when that "
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
            raise ArchiveError(f"{file.path} has a row that does not belong to {self._result.source}: {key.hex()}.")
        return parts


def _require_value(file: ArchivedFile, pointer: int | None, payload: bytes | None) -> None:
    """Check that a message has a payload or a transaction, as all archived messages have.

    Raises:
        ArchiveError: it has neither.
    """
    if pointer is None and payload is None:
        raise ArchiveError(
            f"{file.path} has a message with neither a payload nor a transaction.",
            "The janitor did not write it: move the file out of the archive.",
        )
