"""The invariants, checked after every operation.

* **live row lost**: a row that the rules keep is missing. Payloads of committed or undecided transactions are live as
  long as a message refers to them or may refer to them later (L5).
* **unexpected row**: a row exists that was never written or was deleted, or its value differs from the written one.
* **aborted message visible**, **committed message hidden**: a transactional reader with the current lists does not see
  exactly the committed messages.
* **wrong payloads**: a committed message has payloads that were not stored for it.
* **false boundary**: a row up to a bound of the janitor has a positive pointer that was not committed.
* **frontier overrun**: a row was deleted before the end of its hold, by a clock ahead, or without an adoption.
* **no permission**: a row of a paused topic was changed, or a run continued after a stop request or a lost lease,
  beyond the batch in progress.
* **ledger incomplete**: no ledger entry has the key range, rule and run of a deleted or inverted row, or the entries
  count more rows than were changed.
* **plan overrun**: an ``apply`` wrote outside its plan file, or a plan wrote at all.
* **incomplete pass**: a pass in a settled world left rows that the rules delete.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.model import ALLOWANCE_MS, GRACE_MS, LIFETIME_MS, SECOND_MS, START_MS, Row, Topic, topic_id
from tests.simulation.reference import is_old
from tests.simulation.store import ALL
from tests.simulation.world import ExpiredMessages, World
from tms_core.tables.base import MESSAGES, PAYLOADS
from tms_core.transaction.model import TX_PER_MS


class Violation(AssertionError):
    """A broken invariant."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


@dataclass(frozen=True)
class PlanScope:
    """The content of a plan file: ranges by table, and pointers by topic."""

    ranges: list[tuple[str, bytes, bytes]]
    pointers: frozenset[tuple[str, int | None]]

    @classmethod
    def read(cls, path: Path) -> PlanScope:
        entries: list[dict[str, Any]] = json.loads(path.read_text())["topics"]
        return cls(
            [
                (entry["table"], bytes.fromhex(part["start"]), bytes.fromhex(part["stop"]))
                for entry in entries
                for part in entry["ranges"]
                if entry["held"] in (None, "first_contact")
            ],
            frozenset((entry["topic"], int(pointer)) for entry in entries for pointer in entry["pointers"]),
        )

    def includes(self, row: Row) -> bool:
        return any(table == row.table and start <= row.key < stop for table, start, stop in self.ranges)


class CommandCheck:
    """A check of a command's writes against the state before the command.

    Args:
        may_write: whether the command may write.
        allowed: the plan file that it applies.

    Attributes:
        paused: topics paused at its start.
        is_stopping: whether the janitor has received a stop request.
        changes: number of rows deleted or inverted so far.
    """

    def __init__(self, world: World, *, may_write: bool = True, allowed: PlanScope | None = None) -> None:
        self._world = world
        self._may_write = may_write
        self._allowed = allowed
        self._topics = dict(world.topics)
        self._undecided = world.may_need_payload()
        self._present = frozenset(world.rows)
        self._both = False
        self.paused = frozenset(world.reference.paused)
        self.is_stopping = False
        self._ended = False
        self._on_the_way = 0
        self.changes = 0

    def check_until_interruption(self, call: str, batch_rows: int) -> None:
        """Check the writes before a concurrent operation, which happens before the store call ``call``.

        From now on the janitor must use the new metadata (S2), except for a batch between its metadata read and its
        delete. In the same window it cannot know of a pause or a stop request.
        """
        self.check_writes()
        self._both = call == "delete"
        self._on_the_way = batch_rows if call in ("get", "delete", "invert") else 0

    def check_end(self) -> None:
        self._ended = True

    @property
    def topics(self) -> dict[str, Topic]:
        return self._topics

    def check_writes(self) -> None:
        """Compare the store with the model, and check the permission of every change."""
        deleted, inverted = find_changes(self._world)
        for row in deleted:
            del self._world.rows[row.id]
            self._world.gone[row.table, row.tail] = row
        for row in inverted:
            row.negated = True
        changed = deleted + inverted
        if changed:
            self._check_permission(changed)
        self.changes += len(changed)
        staying = {
            (row.topic, row.generation, row.pointer)
            for row in self._world.rows.values()
            if row.refers and row.id in self._present
        }
        for row in deleted:
            self._check_deleted(row, (row.topic, row.generation, row.pointer) in staying)
        for row in inverted:
            self._check_inverted(row)
        self._world.event_counts["rows deleted"] += len(deleted)
        self._world.event_counts["rows inverted"] += len(inverted)

    def _check_permission(self, changed: list[Row]) -> None:
        world = self._world
        what = describe(changed[0])
        if not self._may_write:
            raise Violation("plan overrun", f"a plan changed {what}")
        if not world.reference.adopted:
            raise Violation("frontier overrun", f"{what} was changed without an adoption of the store")
        if world.error_ms > ALLOWANCE_MS:
            raise Violation("frontier overrun", f"{what} was changed by a clock {world.error_ms / 1000:.0f} s ahead")
        late = changed if self._ended else [row for row in changed if row.topic in world.reference.paused]
        if len(late) > self._on_the_way or any(row.topic in self.paused & world.reference.paused for row in late):
            reason = "after a stop request or a lost lease" if self._ended else "in a paused topic"
            raise Violation("no permission", f"{describe(late[0])} was changed {reason}")

    def _check_deleted(self, row: Row, referenced: bool) -> None:
        world = self._world
        if self._allowed is not None and not self._allowed.includes(row):
            raise Violation("plan overrun", f"{describe(row)} is not in a range of the plan")
        both = (self._topics, world.topics) if self._both else (world.topics,)
        rules = {_rule(row, topics.get(row.topic)) for topics in (self._topics, world.topics)}
        world.unrecorded.append(ExpiredMessages(row, frozenset(rules)))
        objections = [
            world.reference.objection(
                row,
                topics.get(row.topic),
                world.now_ms,
                world.wall_ms,
                undecided=row.pointer in self._undecided,
                referenced=referenced,
            )
            for topics in both
        ]
        if all(objections):
            invariant, reason = objections[-1] or ("", "")
            raise Violation(invariant, f"{describe(row)}: {reason}")

    def _check_inverted(self, row: Row) -> None:
        self._world.unrecorded.append(ExpiredMessages(row, frozenset({"invalid_transaction"})))
        if self._allowed is not None and (row.topic, row.pointer) not in self._allowed.pointers:
            raise Violation("plan overrun", f"{describe(row)} was inverted, but its pointer is not in the plan")
        if row.pointer in self._world.committed:
            raise Violation("committed message hidden", f"{describe(row)} was inverted")
        if row.pointer in self._world.manager.in_progress:
            raise Violation(
                "committed message hidden", f"{describe(row)} was inverted, but its transaction may still commit"
            )


def check_ledger(world: World, run_id: str | None, changes: int) -> None:
    """Check that the ledger has every change so far."""
    for row, rules in world.unrecorded:
        if run_id is None and "invalid_transaction" in rules:
            continue  # Inversions have no intent: the row itself shows them.
        entries = world.state.ledger(1000, topic=topic_id(row.topic), key=row.key)
        fitting = [e for e in entries if (e.table, e.generation) == (row.table, row.generation) and e.rule in rules]
        if not fitting:
            raise Violation("ledger incomplete", describe(row))
    world.unrecorded.clear()
    if run_id is not None:
        recorded = sum(entry.rows or 0 for entry in world.state.ledger(1000, run_id=run_id))
        if recorded != changes:
            raise Violation("ledger incomplete", f"{changes} rows were changed, but the ledger has {recorded}")


def _rule(row: Row, topic: Topic | None) -> str:
    return "old_generation" if topic is not None and is_old(row.generation, topic.generation) else "expired"


def find_changes(world: World) -> tuple[list[Row], list[Row]]:
    """Return deleted and inverted rows; any other difference from the model is a violation."""
    messages = dict(world.store.message.read(MESSAGES, b"", None, ALL).items)
    payloads = dict(world.store.payload.read(PAYLOADS, b"", None, ALL).items)
    deleted, inverted = [], []
    for (table, key), row in world.rows.items():
        found = (key in messages) if table == "message" else (key in payloads)
        if not found:
            deleted.append(row)
        elif table == "message":
            pointer = messages[key].pointer
            if row.readable and row.pointer is not None and pointer == -row.pointer:
                inverted.append(row)
            elif pointer != (-row.pointer if row.pointer and row.negated else row.pointer):
                raise Violation("unexpected row", f"{describe(row)} has the pointer {pointer}")
    for table, keys in (("message", messages.keys()), ("payload", payloads.keys())):
        known = {row.key for row in world.rows.values() if row.table == table}
        if keys - known:
            raise Violation("unexpected row", f"a deleted {table} row exists: {min(keys - known).hex()}")
    return deleted, inverted


def check_reader(world: World) -> None:
    """Check that a transactional reader sees exactly the committed messages."""
    reader = world.manager.reader()
    for row in world.rows.values():
        if row.table != "message" or row.pointer is None or row.lost_cause:
            continue
        visible = not row.negated and reader.is_visible(row.pointer)
        if visible and row.pointer not in world.committed:
            raise Violation("aborted message visible", describe(row))
        if not visible and row.pointer in world.committed and row.origin is None:
            raise Violation("committed message hidden", describe(row))


def check_payloads(world: World) -> None:
    """Check that a committed message has only the payloads stored for it."""
    stored: dict[tuple[str, int, int | None], set[tuple[str, int]]] = {}
    for row in world.rows.values():
        if row.table == "payload":
            stored.setdefault((row.topic, row.generation, row.pointer), set()).add(row.home)
    for row in world.rows.values():
        read = row.refers and not row.negated and row.pointer in world.committed
        if read and stored.get((row.topic, row.generation, row.pointer), set()) - {row.home}:
            raise Violation("wrong payloads", describe(row))


def check_claims(world: World) -> None:
    """Check that no uncommitted positive pointer is at or below a stated bound."""
    if not world.boundaries:
        return
    for row in world.rows.values():
        if row.readable and row.pointer is not None and not row.lost_cause and row.pointer not in world.committed:
            check_bounds(row.pointer, describe(row), world.boundaries)


def check_searched(world: World, check: CommandCheck) -> None:
    """Check that the next complete run after a refuted boundary searched every row (S4)."""
    if check.paused or world.reference.paused or world.store.faults:
        return
    for row in world.rows.values():
        if row.readable and row.pointer in world.refuted & world.manager.invalid:
            raise Violation("incomplete pass", f"{describe(row)}, which refuted the boundary")
    world.refuted.clear()


def check_bounds(pointer: int, what: str, boundaries: Collection[tuple[str, int]]) -> None:
    for name, bound in boundaries:
        if pointer <= bound:
            raise Violation("false boundary", f"{name} is {bound}, but {what} exists")


def check_complete(world: World) -> None:
    """Check that an unhindered pass left no row that the rules delete."""
    staying = {(row.topic, row.generation, row.pointer) for row in world.rows.values() if row.refers}
    for row in world.rows.values():
        topic = world.topics.get(row.topic)
        if row.readable and row.pointer in world.manager.invalid:
            raise Violation("incomplete pass", f"{describe(row)} of an invalid transaction")
        if row.unrecognized or topic is None:
            continue
        old = is_old(row.generation, topic.generation)
        expired = row.generation == topic.generation and row.time_ms < world.wall_ms - topic.ttl_seconds * 1000
        referenced = row.table == "payload" and (row.topic, row.generation, row.pointer) in staying
        if old or (expired and not referenced):
            raise Violation("incomplete pass", f"{describe(row)}, which is {'old' if old else 'expired'}")


def check_boundary_reached(world: World, prune_bound: int) -> None:
    """Check that the boundary is maximal after an unhindered pass with all transactions decided."""
    if world.feeds_back and any(row.readable and row.lost_cause for row in world.rows.values()):
        return  # An audit may have refuted it: the row's id was on the list.
    writable = (world.wall_ms - LIFETIME_MS - GRACE_MS) * TX_PER_MS - 1
    expected = min(writable, prune_bound)
    boundaries = dict(world.boundaries)
    if boundaries.get("the boundary") != expected:
        raise Violation(
            "incomplete pass", f"the boundary is {boundaries.get('the boundary')}, but {expected} can be proven"
        )


def describe(row: Row) -> str:
    """Describe a row, with its time relative to the start of the history."""
    seconds = (row.time_ms - START_MS) / SECOND_MS
    text = f"{row.table} row of {topic_id(row.topic)}, generation {row.generation}, at {seconds:.3f} s"
    return text if row.pointer is None else f"{text}, pointer {row.pointer}"
