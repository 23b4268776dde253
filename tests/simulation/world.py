"""The simulated world: a messaging server, a transaction service, a store, and a janitor that works on it.

The store is a ``MemoryStore``, the snapshots are files in Tephra's format, and each command has a new ``Engine`` on
persistent state. Only the server, its clients and time are models; only operations advance time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from janitor.archive.writer import ParquetArchive
from janitor.rules.ranges import Lifetime
from janitor.run.prepare import load_last_in_progress
from janitor.state.records import LINEAGE
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.run import Terms
from tests.builders import FileEngine
from tests.simulation.manager import Manager
from tests.simulation.model import (
    ALLOWANCE_MS,
    ERROR_MS,
    GRACE_MS,
    HOLD_MS,
    INTERVAL_MS,
    LATE_MS,
    LIFETIME_MS,
    LOST_MS,
    SKEW_MS,
    START_MS,
    UNNOTICED_MS,
    Client,
    Row,
    RowId,
    Table,
    Topic,
    topic_id,
)
from tests.simulation.reference import Reference
from tests.simulation.store import ALL, SimulatedStore
from tms_core.clock import ManualClock
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import KEYS, MESSAGES, MessageValue
from tms_core.tables.lease import Lease
from tms_core.transaction.model import TX_PER_MS
from tms_core.transaction.source.source import DirectorySource


class Backup(NamedTuple):
    """A copy of the store and of the model of its rows."""

    store: SimulatedStore
    rows: dict[RowId, Row]
    topics: dict[str, Topic]


class ExpiredMessages(NamedTuple):
    """A deleted or inverted row, and the rules that permit the change."""

    row: Row
    rules: frozenset[str]


class _Anchor(NamedTuple):
    """The clocks that the janitor last recorded: boot, expected wall clock, true time."""

    boot: int
    wall_ms: int
    at_ms: int


class World:
    """The simulated world.

    Args:
        folder: an empty folder for snapshots and plan files.

    Attributes:
        now_ms: true time.
        skew_ms: offset of the server's clock from true time.
        error_ms: offset of the janitor's clock from true time.
        rows: the model of the store's rows.
        committed: write pointers of committed transactions.
        feeds_back: whether the janitor truncates proven ids itself.
        archives: whether rows are archived before their deletion.
        gone: deleted rows by table and tail.
        brought_back: unlisted pointers of failed transactions whose rows a backup restored.
        other_manager: another transaction service, while the janitor reads its snapshots by mistake.
        refuted: pointers that refuted a boundary, until a run has searched all rows for them.
        boundaries: bounds that the janitor currently states, each with its source.
        unrecorded: changes of an unfinished run, which the ledger must have.
        event_counts: count of each event.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.snapshots = folder / "snapshots"
        self.snapshots.mkdir()
        self.other_snapshots = folder / "other"
        self.other_snapshots.mkdir()
        self.now_ms = START_MS
        self.skew_ms = 0
        self.error_ms = 0
        self.clock = ManualClock(START_MS, boot_id="boot 1")
        self.store = SimulatedStore()
        self.state = SqliteState.in_memory()
        self.manager = Manager(START_MS)
        self.other_manager: Manager | None = None
        self.reference = Reference()
        self.rows: dict[RowId, Row] = {}
        self.topics: dict[str, Topic] = {}
        self.clients: dict[int, Client] = {}
        self.backups: dict[int, Backup] = {}
        self.committed: set[int] = set()
        self.feeds_back = False
        self.archives = False
        self.gone: dict[RowId, Row] = {}
        self.brought_back: set[int] = set()
        self.refuted: set[int] = set()
        self.boundaries: list[tuple[str, int]] = []
        self.unrecorded: list[ExpiredMessages] = []
        self.event_counts: Counter[str] = Counter()
        self._boots = 1
        self._identities = 1
        self._anchor: _Anchor | None = None
        self._tokens = 0
        self._accepted: tuple[str, int] | None = None
        self._sequences: Counter[int] = Counter()

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def server_ms(self) -> int:
        return self.now_ms + self.skew_ms

    @property
    def wall_ms(self) -> int:
        return self.now_ms + self.error_ms

    @property
    def clock_is_right(self) -> bool:
        return abs(self.error_ms) <= ERROR_MS

    @property
    def looks_right(self) -> bool:
        """Whether clock and settings pass the check of an operator."""
        return self.clock_is_right and self.other_manager is None

    def pass_time(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.clock.advance(milliseconds)
        self.manager.expire(self.server_ms)

    def set_skew(self, skew_ms: int) -> None:
        if abs(skew_ms) <= SKEW_MS:
            self.skew_ms = skew_ms
            self.pass_time(0)

    def set_clock(self, error_ms: int) -> None:
        """Step the janitor's clock, unless the step looks like a machine that was switched off.

        Before the janitor has recorded the clocks of a boot, it only knows that the last boot was earlier.
        """
        noticed = abs(error_ms) <= ERROR_MS or error_ms > UNNOTICED_MS or error_ms <= LOST_MS
        if noticed or (self._anchor is not None and self._anchor.boot == self._boots):
            self.clock.step(error_ms - self.error_ms)
            self.error_ms = error_ms

    def reboot(self, error_ms: int) -> None:
        """Reboot the janitor's machine with this clock error."""
        self._boots += 1
        self.clock.reboot(f"boot {self._boots}")
        self.clock.step(-self.error_ms)
        self.error_ms = 0
        self.set_clock(error_ms)

    def accept_clock(self) -> None:
        self._anchor = _Anchor(self._boots, self.wall_ms, self.now_ms)

    def remember_clock(self) -> None:
        """Record the clocks after a run, to detect later steps, except for a boot in the past."""
        anchor = self._anchor
        if anchor is None or (anchor.boot != self._boots and self.wall_ms >= anchor.wall_ms):
            self.accept_clock()
        elif anchor.boot == self._boots:
            self._anchor = _Anchor(anchor.boot, anchor.wall_ms + self.now_ms - anchor.at_ms, self.now_ms)

    # -- the server ----------------------------------------------------------------------------------------------

    def set_topic(self, name: str, topic: Topic) -> None:
        key = topic_id(name).prefix
        self.store.metadata.compare_and_set(key, self.store.metadata.get(key), topic.encode())
        self.topics[name] = topic

    def usable_topic(self, name: str) -> Topic | None:
        topic = self.topics.get(name)
        return topic if topic is not None and topic.usable else None

    def write_messages(
        self, name: str, count: int, pointer: int | None = None, *, refers: bool = False, in_flight_ms: int = 0
    ) -> None:
        topic = self.usable_topic(name)
        if topic is None:
            return
        for _ in range(count):
            time_ms, sequence = self._stamp(in_flight_ms)
            key = MessageKey(topic_id(name), topic.generation, time_ms, sequence).pack()
            self.store.message.put([(key, MessageValue(pointer, None if refers else b"m"))])
            self._add(Row("message", key, name, topic.generation, time_ms, pointer, refers))

    def write_payloads(self, name: str, count: int, pointer: int) -> None:
        topic = self.usable_topic(name)
        if topic is None:
            return
        for _ in range(count):
            time_ms, sequence = self._stamp(0)
            key = PayloadKey(topic_id(name), topic.generation, pointer, time_ms, sequence).pack()
            self.store.payload.put([(key, b"p")])
            self._add(Row("payload", key, name, topic.generation, time_ms, pointer))

    def write_unrecognized(self, row: Row) -> None:
        if row.table == "message":
            self.store.message.put([(row.key, MessageValue(None, b"f"))])
        else:
            self.store.payload.put([(row.key, b"f")])
        self._add(row)

    def _add(self, row: Row) -> None:
        self.rows[row.id] = row

    def _stamp(self, in_flight_ms: int) -> tuple[int, int]:
        """Return an unused time and sequence number."""
        time_ms = self.server_ms - in_flight_ms
        self._sequences[time_ms] += 1
        return time_ms, self._sequences[time_ms] - 1

    def accepts(self, client: Client, late_ms: int) -> bool:
        """Return whether the server admitted a write ``late_ms`` ago; it checks the lifetime, not the lists."""
        checked_ms = self.server_ms - late_ms
        begun_ms = client.write_pointer // TX_PER_MS
        return not client.done and late_ms <= LATE_MS and begun_ms <= checked_ms < begun_ms + LIFETIME_MS

    def may_need_payload(self) -> frozenset[int]:
        """Return the pointers of transactions that may still publish and commit."""
        now_ms = self.server_ms
        return frozenset(p for p in self.manager.in_progress if now_ms < p // TX_PER_MS + LIFETIME_MS)

    def roll_back(self, client: Client) -> bool:
        """Invert the client's rows of current generations; return False if a topic is unusable."""
        if any(self.usable_topic(name) is None for name in client.topics):
            return False
        for row in self._readable(client.pointers):
            if row.generation == self.topics[row.topic].generation:
                self._negate(row)
        return True

    def finish(self, client: Client, *, commit: bool) -> None:
        """Commit, else roll back and abort, else invalidate, like Tephra's client."""
        client.done = True
        if commit and self.manager.commit(client.id):
            self.committed |= set(client.pointers)
        elif self.roll_back(client):
            self.manager.abort(client.id, client.pointers[1:], long=client.long)
            self._give_up(self._readable(client.pointers))
        else:
            self.manager.invalidate(client.id)

    def _negate(self, row: Row) -> None:
        found = self.store.message.read(MESSAGES, row.key, row.key + b"\x00", 1).items
        if found and row.pointer is not None:
            self.store.message.put([(row.key, found[0][1]._replace(pointer=-row.pointer))])
        row.negated = True

    def _readable(self, pointers: Iterable[int]) -> list[Row]:
        wanted = set(pointers)
        return [row for row in self.rows.values() if row.readable and row.pointer in wanted]

    def _give_up(self, rows: Iterable[Row]) -> None:
        """Mark rows of failed transactions that are on no list."""
        for row in rows:
            if row.readable and row.pointer is not None:
                row.lost_cause = not self.known(row.pointer)

    def known(self, pointer: int) -> bool:
        """Return whether the transaction service knows the state of the pointer's transaction."""
        manager = self.manager
        return pointer in self.committed or pointer in manager.invalid or pointer in manager.in_progress

    # -- snapshots -----------------------------------------------------------------------------------------------

    def write_snapshot(self) -> None:
        name = f"snapshot.{self.server_ms}"
        (self.snapshots / name).write_bytes(self.manager.snapshot(self.server_ms))
        if self.other_manager is not None:
            (self.other_snapshots / name).write_bytes(self.other_manager.snapshot(self.server_ms))
        for old in self.snapshot_files()[:-3]:
            old.unlink()

    def snapshot_files(self) -> list[Path]:
        """Return the snapshot files, oldest first."""
        return sorted(self.snapshots.glob("snapshot.*"), key=lambda path: int(path.suffix[1:]))

    def misread_snapshots(self) -> None:
        """Let the janitor read the snapshots of another transaction service with higher ids.

        That service lists as invalid the ids that were committed here by the last used snapshot. Without such ids the
        two services cannot be distinguished, and nothing happens.
        """
        record = self.state.store()
        then = load_last_in_progress(self.state, record) if record is not None else None
        if then is None:
            return
        decided = {pointer for pointer in self.committed if then.had_issued(pointer)} - then.pointers
        if decided:
            self.other_manager = Manager(self.server_ms)
            self.other_manager.write_pointer = max(self.other_manager.write_pointer, self.manager.write_pointer) + 1000
            self.other_manager.invalid = decided
            self.write_snapshot()

    def write_back(self) -> Row | None:
        """Revert the inversion of a row below the boundary; return the row or None."""
        proven = self.engine().boundary()[0] if self.state.store() is not None else None
        for row in self.rows.values():
            if proven is None or not row.negated or row.pointer not in self.manager.invalid:
                continue
            if row.pointer <= proven.bound:
                ((key, value),) = self.store.message.read(MESSAGES, row.key, row.key + b"\x00", 1).items
                self.store.message.put([(key, value._replace(pointer=row.pointer))])
                row.negated = False
                return row
        return None

    # -- backups -------------------------------------------------------------------------------------------------

    def back_up(self, slot: int) -> None:
        rows = {row_id: replace(row) for row_id, row in self.rows.items()}
        self.backups[slot] = Backup(self.store.copy(0), rows, dict(self.topics))

    def restore(self, slot: int, *, in_place: bool) -> bool:
        """Replace the store by a backup, with the same identity or, like a copy, a new one.

        Both are a first contact, except for a backup in place that is newer than the sequence the janitor recorded.
        """
        backup = self.backups.get(slot)
        if backup is None:
            return False
        if not in_place:
            self._identities += 1
        if not in_place or backup.store.sequence < (self.state.note(LINEAGE) or {}).get("sequence", 0):
            self.reference.adopted = False
        self.store = backup.store.copy(self._identities)
        self.rows = {row_id: replace(row) for row_id, row in backup.rows.items()}
        self.topics = dict(backup.topics)
        self._give_up(self.rows.values())
        self.brought_back |= {row.pointer for row in self.rows.values() if row.lost_cause and row.pointer is not None}
        return True

    # -- the archive ---------------------------------------------------------------------------------------------

    @property
    def archive_folder(self) -> Path:
        return self.folder / "archive"

    def record_restored(self, target: str) -> int:
        """Record rows restored from the archive; return how many committed rows are hidden."""
        topic, hidden = self.topics[target], 0
        # Archived rows may still exist if their delete failed.
        archived = {(row.table, row.tail): row for row in self.rows.values() if not row.unrecognized} | self.gone
        for table, key, pointer in self._stored():
            if (table, key) in self.rows:
                continue
            tail = key[-10:] if table == "message" else key[-18:]
            known = archived.get((table, tail))
            if known is None:
                continue
            row = replace(known, key=key, topic=target, generation=topic.generation, origin=known.home)
            if table == "message" and row.pointer is not None:
                row.negated = pointer is not None and pointer < 0
                row.lost_cause = row.pointer in self.brought_back and not row.negated
                hidden += row.negated and row.pointer in self.committed
            self._add(row)
        return hidden

    def _stored(self) -> Iterator[tuple[Table, bytes, int | None]]:
        for key, value in self.store.message.read(MESSAGES, b"", None, ALL).items:
            yield "message", key, value.pointer
        for key in self.store.payload.read(KEYS, b"", None, ALL).items:
            yield "payload", key, None

    # -- the janitor ---------------------------------------------------------------------------------------------

    @property
    def terms(self) -> Terms:
        return Terms(
            hold_seconds=HOLD_MS // 1000,
            protect=tuple(sorted(str(topic_id(name)) for name in self.reference.protected)),
            lifetime=Lifetime(LIFETIME_MS, GRACE_MS, ALLOWANCE_MS),
            lifetime_known=True,
            snapshot_interval_seconds=INTERVAL_MS // 1000,
        )

    def engine(self, batch_rows: int = 2000, **options: Any) -> FileEngine:
        """Return a new engine, like every command; ``options`` are those of ``Engine``."""
        return FileEngine(
            self.store,
            self.state,
            DirectorySource(self.snapshots if self.other_manager is None else self.other_snapshots),
            self.clock,
            self.terms,
            token_hex=self._token_hex,
            batch_rows=batch_rows,
            archive=ParquetArchive(self.archive_folder, self.clock) if self.archives else None,
            **options,
        )

    def take_lease(self, holder: str = "janitor") -> Lease:
        """Take the lease from its holder, like a process that holds the store's lock."""
        lease = Lease(self.state, holder, 60, self.clock)
        lease.acquire(sole=True)
        return lease

    def _token_hex(self, size: int) -> str:
        self._tokens += 1
        return f"{self._tokens:0{2 * size}x}"

    def lose_state(self) -> None:
        self.state.close()
        self.state = SqliteState.in_memory()
        self.reference.forget()
        self._accepted = None
        self._anchor = None
        self.unrecorded.clear()
        self.reference.paused.clear()

    @property
    def has_adopted(self) -> bool:
        """Whether the janitor's state has an adopted store, not necessarily this one."""
        return self._accepted is not None

    def record_adoption(self, *, anyway: bool = False) -> bool:
        """Record a new adoption of store, transaction system and clock; return whether there was one."""
        record = self.state.store()
        accepted = (record.mark, record.adopted_ms) if record and record.adopted_ms is not None else None
        if accepted is None or (not anyway and accepted == self._accepted):
            return False
        if not self.reference.adopted:
            self.reference.forget()
        self._accepted = accepted
        self.reference.adopt(self.topics, self.now_ms)
        self.accept_clock()
        return True

    def read_boundary(self) -> None:
        self.boundaries = []
        if self.state.store() is not None:
            proven, would_be = self.engine().boundary()
            if proven is not None:
                self.boundaries.append(("the boundary", proven.bound))
            if would_be.bound is not None:
                self.boundaries.append(("the boundary as it would be now", would_be.bound))
