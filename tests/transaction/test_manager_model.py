"""Random histories of the manager with crashes, against a simple model.

The model keeps transactions, and computes lists and pointers on demand. The manager keeps lists and pointers. Storage
is in memory, uses the real codecs, and keeps only synced edits after a crash.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tests.builders import encode_snapshot
from tests.support import size
from tests.transaction.managers import BASE, NOW_MS, state
from tms_core.clock import ManualClock
from tms_core.errors import Conflict, NotInProgress, TruncateTimeError
from tms_core.transaction.codec.edits import Edit, decode_edit, encode_edit
from tms_core.transaction.codec.snapshot import read_snapshot
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.state import ManagerState
from tms_core.transaction.manager.storage import RecoveredLog
from tms_core.transaction.model import (
    DEFAULT_TIMEOUT_SECONDS,
    NO_TX_IN_PROGRESS,
    Snapshot,
    Transaction,
    TransactionType,
)

LONG_MS = 86_400_000


class Disk:
    """A storage in memory that keeps only synced edits after a crash."""

    def __init__(self) -> None:
        self.snapshots: dict[int, bytes] = {}
        self.logs: dict[int, Journal] = {}

    def recover(self) -> RecoveredLog:
        newest = max(self.snapshots, default=0)
        snapshot = read_snapshot(io.BytesIO(self.snapshots[newest])) if newest else None
        edits = [edit for number in sorted(self.logs) if number >= newest for edit in self.logs[number].kept()]
        return RecoveredLog(snapshot, iter(edits), max([newest, *self.logs]))

    def log(self, timestamp_ms: int) -> Journal:
        assert timestamp_ms not in self.logs
        self.logs[timestamp_ms] = Journal()
        return self.logs[timestamp_ms]

    def save(self, snapshot: Snapshot) -> None:
        self.snapshots[snapshot.visibility.timestamp_ms] = encode_snapshot(snapshot)

    def close(self) -> None:
        """Keep the storage open."""


@dataclass
class Journal:
    """A log that loses its unsynced end in a crash."""

    edits: list[bytes] = field(default_factory=list)
    synced: int = 0

    def append(self, edit: Edit) -> int:
        self.edits.append(encode_edit(edit))
        return len(self.edits)

    def sync(self, position: int) -> None:
        self.synced = max(self.synced, position)

    def close(self) -> None:
        """Keep the storage open."""

    def kept(self) -> Iterator[Edit]:
        return map(decode_edit, self.edits[: self.synced])


@dataclass
class Tx:
    """A transaction of the model, or a checkpoint whose transaction was aborted without it.

    Its logged expiration is a wall time; its timeout is a monotonic time.
    """

    id: int
    long: bool
    expires_ms: int
    deadline_ms: int
    bound: int
    checkpoints: list[int] = field(default_factory=list)
    orphan: bool = False
    changes: frozenset[bytes] | None = None

    @property
    def pointers(self) -> list[int]:
        return [self.id, *self.checkpoints]


class Model:
    def __init__(self) -> None:
        self.write = self.read = BASE
        #: The read pointer after a recovery: in contrast to ``read``, timeouts advance it.
        self.read_on_disk = BASE
        #: The highest pointer that was issued before the last restart.
        self.recovered = BASE
        self.open: dict[int, Tx] = {}
        self.invalid: set[int] = set()
        self.commits: list[tuple[int, frozenset[bytes]]] = []

    @property
    def pointers(self) -> list[int]:
        return sorted(pointer for one in self.open.values() for pointer in one.pointers)

    def first_short(self) -> int:
        shorts = [pointer for one in self.open.values() for pointer in (one.checkpoints if one.long else one.pointers)]
        return min(shorts, default=NO_TX_IN_PROGRESS)

    def issue(self, now_ms: int) -> int:
        self.write = max(self.write + 1, now_ms * 1_000_000)
        return self.write

    def begin(self, now_ms: int, monotonic_ms: int, timeout_ms: int, *, long: bool) -> Tx:
        bound = self.pointers[0] - 1 if self.open else self.read
        pointer = self.issue(now_ms)
        self.open[pointer] = Tx(pointer, long, now_ms + timeout_ms, monotonic_ms + timeout_ms, min(bound, pointer - 1))
        return self.open[pointer]

    def read_up_to(self, pointer: int) -> None:
        self.read, self.read_on_disk = max(self.read, pointer), max(self.read_on_disk, pointer)

    def conflicts(self, pointer: int, changes: frozenset[bytes]) -> bool:
        return any(at > pointer and keys & changes for at, keys in self.commits)

    def commit(self, one: Tx) -> None:
        at = self.write + 1
        if one.changes:
            self.commits.append((at, one.changes))
        del self.open[one.id]
        self.read_up_to(one.pointers[-1])
        self.commits = [(at, keys) for at, keys in self.commits if at >= self.first_short()]

    def give_up(self, one: Tx) -> None:
        del self.open[one.id]
        self.invalid.update(one.pointers)

    def committed(self) -> dict[int, frozenset[bytes]]:
        merged: dict[int, frozenset[bytes]] = {}
        for at, keys in self.commits:
            merged[at] = merged.get(at, frozenset()) | keys
        return merged


#: The steps of clients with a transaction; most clients ask before they commit.
DECISIONS = ("ask", "ask commit", "ask commit", "commit", "abort", "invalidate")


class Histories(RuleBasedStateMachine):
    begun = Bundle("begun")

    @initialize(target=begun, kinds=st.lists(st.booleans(), min_size=2, max_size=4))
    def first_start(self, kinds: list[bool]) -> object:
        self.clock = ManualClock(NOW_MS)
        self.disk = Disk()
        self.manager = TransactionManager(self.disk, self.clock)
        self.model = Model()
        # Histories start with transactions, because hypothesis may leave out the rule that starts them.
        return multiple(*(self.start(long, 5) for long in kinds))

    @rule(target=begun, long=st.booleans(), seconds=st.integers(1, 5))
    def start(self, long: bool, seconds: int) -> Transaction:
        return self._start(
            lambda: self.manager.start_long() if long else self.manager.start_short(seconds), long, seconds
        )

    def _start(self, start: Callable[[], Transaction], long: bool, seconds: int) -> Transaction:
        invalid, in_progress = sorted(self.model.invalid), self.model.pointers
        first_short, read = self.model.first_short(), self.model.read
        timeout_ms = LONG_MS if long else seconds * 1000
        expected = self.model.begin(self.clock.now_ms(), self.clock.monotonic_ms(), timeout_ms, long=long)
        one = start()
        assert (one.transaction_id, one.write_pointer, one.read_pointer) == (expected.id, expected.id, read)
        assert (list(one.invalids), list(one.in_progress)) == (invalid, in_progress)
        assert one.first_short_in_progress == first_short
        return one

    @rule(target=begun, one=begun)
    def checkpoint(self, one: Transaction) -> object:
        parent = self.model.open.get(one.transaction_id)
        if parent is None:
            with pytest.raises(NotInProgress):
                self.manager.checkpoint(one)
            return multiple()
        parent.checkpoints.append(self.model.issue(self.clock.now_ms()))
        found = self.manager.checkpoint(one)
        assert found == replace(
            one, write_pointer=parent.checkpoints[-1], checkpoint_write_pointers=tuple(parent.checkpoints)
        )
        return found

    @rule(one=begun, changes=st.frozensets(st.sampled_from([b"a", b"\x00\xff"])), steps=st.sampled_from(DECISIONS))
    def decide(self, one: Transaction, changes: frozenset[bytes], steps: str) -> None:
        # One rule for all decisions: hypothesis may leave out rules, and then nothing conflicts or ends.
        for step in steps.split():
            match step:
                case "ask":
                    self.ask(one, changes)
                case "commit":
                    self.commit(one)
                case "abort":
                    self.abort(one)
                case _:
                    self.invalidate(one)

    def ask(self, one: Transaction, changes: frozenset[bytes]) -> None:
        known = self.model.open.get(one.transaction_id)
        if known is None:
            with pytest.raises(NotInProgress):
                self.manager.can_commit(one.transaction_id, changes)
        elif self.model.conflicts(known.id, changes):
            with pytest.raises(Conflict):
                self.manager.can_commit(known.id, changes)
        else:
            self.manager.can_commit(known.id, changes)
            known.changes = changes

    def commit(self, one: Transaction) -> None:
        if self._commits(one, self.manager.commit):
            self.manager.commit(one.transaction_id)

    @rule(target=begun, one=begun, seconds=st.integers(1, 5))
    def commit_and_start(self, one: Transaction, seconds: int) -> object:
        if not self._commits(one, self.manager.commit_and_start):
            return multiple()
        return self._start(lambda: self.manager.commit_and_start(one.transaction_id, seconds), False, seconds)

    def _commits(self, one: Transaction, commit: Callable[[int], object]) -> bool:
        """Have the model commit one if that may be committed, else see that it is refused."""
        known = self.model.open.get(one.transaction_id)
        if known is None:
            with pytest.raises(NotInProgress):
                commit(one.transaction_id)
        elif known.changes is not None and self.model.conflicts(known.id, known.changes):
            with pytest.raises(Conflict):
                commit(known.id)
        elif known.changes is None and known.id <= self.model.recovered:
            with pytest.raises(Conflict, match="canCommit"):
                commit(known.id)
        else:
            self.model.commit(known)
            return True
        return False

    def abort(self, one: Transaction) -> None:
        self.manager.abort(one)
        known = self.model.open.get(one.transaction_id)
        named = set(one.checkpoint_write_pointers)
        if known is None:
            # After a restart, writes in progress are unknown.
            if one.transaction_id not in self.model.invalid or one.transaction_id <= self.model.recovered:
                return
            if one.type is TransactionType.SHORT:
                self.model.invalid -= {one.transaction_id, *named}
                self._forget_orphans(named)
                self.model.read_up_to(one.transaction_id)
        elif known.long:
            self.model.give_up(known)
        else:
            del self.model.open[known.id]
            for pointer in set(known.checkpoints) - named:
                self.model.open[pointer] = replace(known, id=pointer, checkpoints=[], orphan=True, changes=None)
            self.model.read_up_to(known.id)

    def _forget_orphans(self, named: set[int]) -> None:
        for pointer in named & self.model.open.keys():
            del self.model.open[pointer]

    def invalidate(self, one: Transaction) -> None:
        known = self.model.open.get(one.transaction_id)
        assert self.manager.invalidate(one.transaction_id) == (known is not None)
        if known is not None:
            self.model.give_up(known)
            if not known.long:
                self.model.read_up_to(known.id)

    @rule(milliseconds=st.sampled_from([1, 900, 3_000, LONG_MS]), expires=st.booleans())
    def time_passes(self, milliseconds: int, expires: bool) -> None:
        self.clock.advance(milliseconds)
        if expires:
            self._expire()

    @rule(milliseconds=st.sampled_from([-5_000, -1, 2]))
    def clock_steps(self, milliseconds: int) -> None:
        self.clock.step(milliseconds)

    def _expire(self) -> None:
        late = [one for one in self.model.open.values() if self.clock.monotonic_ms() > one.deadline_ms]
        assert self.manager.expire() == sum(len(one.pointers) for one in late)
        for one in late:
            self.model.give_up(one)
            if not one.long:
                self.model.read_on_disk = max(self.model.read_on_disk, one.id)

    @rule(ones=st.lists(begun, max_size=4))
    def truncate(self, ones: list[Transaction]) -> None:
        ids = {one.write_pointer for one in ones}
        assert self.manager.truncate_invalid(ids) == bool(ids & self.model.invalid)
        self.model.invalid -= ids

    @rule(back_ms=st.sampled_from([-1, 0, 1_000]))
    def truncate_before(self, back_ms: int) -> None:
        before_ms = self.clock.now_ms() - back_ms
        bound = before_ms * 1_000_000
        if any(pointer < bound for pointer in self.model.pointers):
            with pytest.raises(TruncateTimeError):
                self.manager.truncate_invalid_before(before_ms)
            return
        gone = {pointer for pointer in self.model.invalid if pointer < bound}
        assert self.manager.truncate_invalid_before(before_ms) == bool(gone)
        self.model.invalid -= gone

    @rule()
    def snapshot(self) -> None:
        self.manager.take_snapshot()
        self.model.read_on_disk = self.model.read

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        if clean:
            self.manager.close()
        else:
            self.model.read = self.model.read_on_disk
        self.manager = TransactionManager(self.disk, self.clock)
        self.model.read_on_disk = self.model.read
        self.model.recovered = self.model.write
        for one in self.model.open.values():
            # The monotonic clock of another machine, or after a restart, starts from another value.
            one.deadline_ms = self.clock.monotonic_ms() + self._remaining_ms(one)

    def _remaining_ms(self, one: Tx) -> int:
        """Return the timeout of a transaction after a restart; a wall clock set back does not extend it."""
        own_ms, remaining_ms = one.expires_ms - one.id // 1_000_000, one.expires_ms - self.clock.now_ms()
        if own_ms > 0:
            remaining_ms = min(remaining_ms, own_ms)
        elif not one.long:
            remaining_ms = min(remaining_ms, DEFAULT_TIMEOUT_SECONDS * 1000)
        return max(0, remaining_ms)

    @invariant()
    def the_manager_knows_what_the_model_knows(self) -> None:
        found = state(self.manager)
        seen = found.visibility
        assert (seen.read_pointer, seen.write_pointer) == (self.model.read, self.model.write)
        assert set(seen.invalid) == self.model.invalid
        assert [entry.write_pointer for entry in seen.in_progress] == self.model.pointers
        by_pointer = {entry.write_pointer: entry for entry in seen.in_progress}
        for one in self.model.open.values():
            entry = by_pointer[one.id]
            assert (entry.expiration_ms, entry.visibility_upper_bound) == (one.expires_ms, one.bound)
            assert (entry.is_long, list(entry.checkpoints)) == (one.long, one.checkpoints)
        checked = {one.id: one.changes for one in self.model.open.values() if one.changes is not None}
        assert (found.committing, found.committed) == (checked, self.model.committed())


TestHistories = pytest.mark.no_cover(Histories.TestCase)
TestHistories.settings = settings(max_examples=2 * size("TMS_TEST_EXAMPLES", 60), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("forgetful", [False, True], ids=["unchanged", "commits unknown transactions"])
def test_kill_at_any_step_commits_one_of_two_conflicting_transactions(
    monkeypatch: pytest.MonkeyPatch, forgetful: bool
) -> None:
    if forgetful:
        monkeypatch.setattr(ManagerState, "recovered_pointer", property(lambda _: 0, lambda *_: None), raising=False)
    steps = set(permutations((0, 0, 1, 1)))
    committed = {(order, killed): commits(order, killed) for order in steps for killed in range(5)}
    # The transaction that had asked is rejected; the other transaction asks after the restart.
    assert any(len(found) == 2 for found in committed.values()) == forgetful
    assert committed[(0, 0, 1, 1), 1] == ({0, 1} if forgetful else {1})


def commits(order: tuple[int, ...], killed: int) -> set[int]:
    """Return which of two conflicting transactions commit if the manager is killed before a step."""
    disk, clock = Disk(), ManualClock(NOW_MS)
    manager = TransactionManager(disk, clock)
    pointers = [manager.start_short().transaction_id for _ in range(2)]
    checked, refused, found = set[int](), set[int](), set[int]()
    for at, which in enumerate(order):
        if at == killed:
            manager = TransactionManager(disk, clock)
        try:
            if which not in checked:
                checked.add(which)
                manager.can_commit(pointers[which], [b"k"])
            elif which not in refused:
                manager.commit(pointers[which])
                found.add(which)
        except Conflict:
            refused.add(which)
    return found


def test_kill_keeps_the_last_checked_changes() -> None:
    disk, clock = Disk(), ManualClock(NOW_MS)
    manager = TransactionManager(disk, clock)
    pointer = manager.start_short().transaction_id
    manager.can_commit(pointer, [b"a"])
    manager.can_commit(pointer, [b"b"])
    assert state(TransactionManager(disk, clock)).committing == {pointer: frozenset([b"b"])}
