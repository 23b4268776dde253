"""S13: a transaction system is identified by the sequence of its snapshots."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path

import pytest

from janitor.run.guards import LastInProgress, check_history, check_transaction_system
from janitor.state.base import KnownIds, StoreRecord
from janitor.sweep.transactions import Problem, observe, refresh
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Kit, Topic, encode_state, janitor, pointer, topic, visibility
from tests.simulation.manager import Manager
from tests.transaction.managers import served
from tests.transaction.vectors import TEPHRA
from tms_core.clock import ManualClock
from tms_core.tables.base import Store
from tms_core.tables.memory import MemoryStore
from tms_core.transaction.codec.snapshot import read_snapshot, write_snapshot
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage
from tms_core.transaction.model import InProgressType, VisibilityState
from tms_core.transaction.rpc.client import ServiceSource
from tms_core.transaction.source.source import DirectorySource, Rejection, SnapshotSource

TTL_SECONDS = 86400
OURS, COMMITTED, OPEN = pointer(NOW_MS - 10 * HOUR), pointer(NOW_MS - 9 * HOUR), pointer(NOW_MS - 8 * HOUR)


def known_janitor(store: Store, **fields: object) -> tuple[Kit, Topic]:
    """Return a janitor that used a snapshot with an invalid and optionally an in-progress transaction."""
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
    orders.tx(OURS, NOW_MS - MINUTE).tx(COMMITTED, NOW_MS).plain(NOW_MS - 2 * DAY)
    kit = janitor(store)
    kit.snapshots.implausible = True
    kit.snapshots.invalid = [OURS]
    kit.snapshots.in_progress = fields.get("in_progress", ())  # type: ignore[assignment]
    kit.engine.run_once(adopt=True)
    kit.clock.advance(MINUTE)
    return kit, orders


def reasons(kit: Kit) -> list[str]:
    return [note.message for note in kit.engine.run_once().guards if note.guard == "identity" and note.tripped]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"invalid": [OURS, COMMITTED]}, f"transaction {COMMITTED} is invalid in the snapshot"),
        ({"invalid": [COMMITTED]}, f"transaction {COMMITTED} is invalid in the snapshot"),
        ({"in_progress": [COMMITTED]}, f"transaction {COMMITTED} is in progress in the snapshot"),
        ({"invalid": [OURS, pointer(NOW_MS)]}, f"transaction {pointer(NOW_MS)} is invalid in the snapshot"),
    ],
)
def test_snapshot_that_reverts_a_decision_blocks_the_run(
    store: Store, fields: dict[str, list[int]], words: str
) -> None:
    kit, orders = known_janitor(store)
    orders.plain(NOW_MS - 2 * DAY)
    for name, pointers in fields.items():
        setattr(kit.snapshots, name, pointers)
    before = (orders.pointers(), orders.times(), kit.state.boundary())
    [reason] = reasons(kit)
    assert words in reason
    assert "janitor adopt" in reason
    assert (orders.pointers(), orders.times(), kit.state.boundary()) == before
    assert kit.engine.preview().tripped
    assert kit.engine.boundary()[0] is None
    kit.engine.adopt()
    assert reasons(kit) == []
    assert orders.times() == [NOW_MS - MINUTE, NOW_MS]


@pytest.mark.parametrize(
    "fields",
    [
        {"invalid": [OURS, OPEN]},
        {"invalid": []},
        {"in_progress": [OPEN]},
        {"in_progress": [OURS], "invalid": []},
        {"invalid": [OURS, pointer(NOW_MS) + 1]},
        {"in_progress": [pointer(NOW_MS) + 1]},
    ],
    ids=["timed out", "truncated", "still open", "recovered from its log", "new and failed", "new"],
)
def test_snapshot_with_consistent_history_is_accepted(store: Store, fields: dict[str, list[int]]) -> None:
    kit, _ = known_janitor(store, in_progress=[OPEN])
    kit.snapshots.in_progress = []
    for name, pointers in fields.items():
        setattr(kit.snapshots, name, pointers)
    assert reasons(kit) == []


def test_id_listed_again_after_removal_had_been_decided(store: Store) -> None:
    kit, _ = known_janitor(store)
    late = pointer(NOW_MS) + 1
    kit.snapshots.invalid = [OURS, late]
    assert reasons(kit) == []
    kit.clock.advance(MINUTE)
    kit.snapshots.invalid = [OURS]
    assert reasons(kit) == []
    kit.clock.advance(MINUTE)
    kit.snapshots.invalid = [OURS, late]
    assert reasons(kit) != []


@pytest.mark.parametrize("newest", [pointer(NOW_MS) - 1, pointer(NOW_MS)])
def test_snapshot_older_than_the_last_allows_ttl_deletes_only(store: Store, newest: int) -> None:
    kit, orders = known_janitor(store, in_progress=[OPEN])
    kit.snapshots.age_ms, kit.snapshots.write_pointer = 90_000, newest
    kit.snapshots.invalid = [OURS, COMMITTED]
    orders.plain(NOW_MS - 2 * DAY)
    report = kit.engine.run_once()
    assert (report.tripped, report.snapshot) == (False, None)
    assert any("is older than the snapshot that was used last" in note.message for note in report.guards)
    assert orders.times() == [NOW_MS - MINUTE, NOW_MS]
    assert orders.pointers() == [-OURS, COMMITTED]
    kit.clock.advance(MINUTE)
    kit.snapshots.age_ms, kit.snapshots.write_pointer, kit.snapshots.invalid = 0, None, [OURS, OPEN]
    kit.snapshots.in_progress = []
    assert reasons(kit) == []


def test_new_invalid_id_below_the_boundary_withdraws_it(store: Store) -> None:
    kit, orders = known_janitor(store)
    proven = kit.state.boundary()
    assert proven is not None
    # Without the in-progress list, like after an upgrade or an adoption.
    kit.state.save_note("in_progress", None)
    kit.snapshots.invalid = [proven.bound - 1, OURS]
    assert kit.engine.boundary()[0] is None
    kit.engine.run_once(patterns=("default:orders",))
    assert kit.state.boundary() is None
    assert orders.pointers() == [-OURS, COMMITTED]


@pytest.mark.parametrize("seed", range(12))
def test_history_of_any_manager_trips_no_guard(tmp_path: Path, seed: int) -> None:
    """Play timeouts, checkpoints, aborts and truncation with complete and truncated files of every version."""
    chance = random.Random(seed)
    manager = Manager(NOW_MS)
    kit = janitor(MemoryStore(), snapshots=DirectorySource(tmp_path))
    for turn in range(60):
        now_ms = kit.clock.now_ms()
        for _ in range(chance.randrange(3)):
            draw_action(manager, chance, now_ms)
        data = snapshot_of(manager, now_ms, version=chance.choice([1, 2, 3, 4]))
        half = turn > 0 and chance.random() < 0.2
        (tmp_path / f"snapshot.{now_ms}").write_bytes(data[: len(data) // 2] if half else data)
        report = kit.engine.run_once(adopt=turn == 0)
        assert [note.message for note in report.guards if note.tripped] == []
        assert report.snapshot is not None
        kit.clock.advance(chance.choice([1, 1000, 20_000]))


@pytest.mark.parametrize("folder", ["recovery-local", "recovery-sequencefile"])
def test_snapshots_of_tephra_one_by_one_trip_no_guard(tmp_path: Path, folder: str) -> None:
    """Use snapshots that Tephra wrote, and its state after recovery from snapshots and logs."""
    files = sorted((TEPHRA / folder).glob("snapshot.*"))
    clock = ManualClock(int(files[0].suffix[1:]), monotonic_ms=DAY)
    kit = janitor(MemoryStore(), snapshots=DirectorySource(tmp_path), clock=clock)
    seen: list[VisibilityState] = []

    def run() -> None:
        report = kit.engine.run_once(adopt=not seen)
        assert [note.message for note in report.guards if note.tripped] == []
        usable = kit.engine.transactions().usable
        assert usable is not None
        seen.append(usable)

    for file in files:
        clock.advance(int(file.suffix[1:]) - clock.now_ms())
        shutil.copy(file, tmp_path)
        run()
    shutil.copytree(TEPHRA / folder, tmp_path / "recovered")
    clock.advance(1000)
    with TransactionManager(DirectoryStorage(tmp_path / "recovered"), clock) as recovered:
        (tmp_path / f"snapshot.{clock.now_ms()}").write_bytes(recovered.encoded_snapshot())
    run()
    assert [str(state.timestamp_ms) for state in seen[:-1]] == [file.suffix[1:] for file in files]
    assert seen[-1].write_pointer > seen[0].write_pointer
    assert any(state.invalid for state in seen)


def draw_action(manager: Manager, chance: random.Random, now_ms: int) -> None:
    """Draw an action of a client, the clock or an operator."""
    manager.expire(now_ms)
    running = [pointer for pointer, entry in manager.in_progress.items() if entry.type is not InProgressType.CHECKPOINT]
    if not running or chance.random() < 0.3:
        manager.start(now_ms, chance.choice([5000, 60_000]), long=chance.random() < 0.3)
        return
    one = chance.choice(running)
    match chance.randrange(5):
        case 0:
            manager.checkpoint(one, now_ms)
        case 1:
            manager.commit(one)
        case 2:
            # Some clients commit without their checkpoints, which stay in progress.
            manager.abort(one, (), long=manager.in_progress[one].is_long)
        case 3:
            manager.invalidate(one)
        case _:
            manager.truncate(chance.choice([*manager.invalid, 0]))


def snapshot_of(manager: Manager, now_ms: int, version: int) -> bytes:
    stream = BytesIO()
    write_snapshot(stream, read_snapshot(BytesIO(manager.snapshot(now_ms))), version)
    return stream.getvalue()


# --- damaged files ---------------------------------------------------------------------------------------------------


def test_flipped_bit_in_a_snapshot_is_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some flipped bits are undetectable: in times, visibility bounds and new pointers. They must be harmless."""
    invalid = [OURS + number * 7 for number in range(40)]
    later = NOW_MS + MINUTE
    before = visibility(NOW_MS, invalid, [OPEN])
    data = encode_state(visibility(later, [*invalid, pointer(NOW_MS) + 5], [OPEN, pointer(NOW_MS) + 9]))
    original = read_snapshot(BytesIO(data)).visibility
    previous = LastInProgress(before.write_pointer, before.open_pointers)
    known_ids = KnownIds({}, before.invalid)
    alone = with_history = harmful = 0
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / f"snapshot.{later}").write_bytes(bytes(changed))
        tx = refresh(DirectorySource(tmp_path), later, interval_seconds=60, allowance_ms=300_000)
        if tx.usable is None:
            continue
        alone += 1
        new = observe(known_ids, tx.usable.invalid, later).new
        record = StoreRecord("", "", 0, before.timestamp_ms, before.write_pointer)
        if check_transaction_system(record, tx.usable) or check_history(previous, tx.usable, known_ids, new):
            continue
        with_history += 1
        wrongly_invalid = set(tx.usable.invalid) - set(original.invalid)
        harmful += any(pointer <= before.write_pointer for pointer in wrongly_invalid)
    with capsys.disabled():
        sys.stdout.write(f"\n{8 * len(data)} bits: {alone} accepted alone, {with_history} after a good snapshot\n")
    assert harmful == 0, "a decided transaction must not become invalid"
    assert with_history < alone < 8 * len(data)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"invalid": [0, OURS]}, "0 is invalid"),
        ({"invalid": [-5]}, "-5 is invalid"),
        ({"invalid": [OURS, pointer(NOW_MS) + 1]}, "is invalid, and its write pointer is"),
        ({"in_progress": [pointer(NOW_MS) + 1]}, "is in progress, and its write pointer is"),
        ({"in_progress": [-1]}, "-1 is in progress"),
    ],
)
def test_snapshot_with_impossible_ids_is_skipped(tmp_path: Path, fields: dict[str, list[int]], words: str) -> None:
    (tmp_path / f"snapshot.{NOW_MS - 1000}").write_bytes(encode_state(visibility(NOW_MS - 1000, [OURS])))
    (tmp_path / f"snapshot.{NOW_MS}").write_bytes(
        encode_state(visibility(NOW_MS, fields.get("invalid", ()), fields.get("in_progress", ())))
    )
    loaded = DirectorySource(tmp_path).latest()
    assert loaded.name == f"snapshot.{NOW_MS - 1000}"
    [rejected] = loaded.rejected
    assert rejected.reason is Rejection.IMPLAUSIBLE
    assert words in rejected.detail


# --- live sources ----------------------------------------------------------------------------------------------------

#: An impossible id, above the write pointer.
IMPOSSIBLE = pointer(NOW_MS + HOUR)


@contextmanager
def manager_source(manager: TransactionManager) -> Iterator[SnapshotSource]:
    yield manager


@contextmanager
def service_source(manager: TransactionManager) -> Iterator[SnapshotSource]:
    with served(manager) as service:
        yield ServiceSource(service.address)


@pytest.mark.parametrize("open_source", [manager_source, service_source])
def test_manager_with_impossible_ids_allows_ttl_deletes_only(
    store: Store, tmp_path: Path, open_source: Callable[[TransactionManager], AbstractContextManager[SnapshotSource]]
) -> None:
    """Use a manager that recovered from a damaged file."""
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
    orders.tx(OURS, NOW_MS - MINUTE).plain(NOW_MS - 2 * DAY)
    (tmp_path / f"snapshot.{NOW_MS}").write_bytes(encode_state(visibility(NOW_MS, [OURS, IMPOSSIBLE])))
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with TransactionManager(DirectoryStorage(tmp_path), clock) as manager, open_source(manager) as source:
        kit = janitor(store, snapshots=source, clock=clock)
        report = kit.engine.run_once(adopt=True)
        state = kit.engine.transactions()
    assert (report.snapshot, report.boundary, state.problem) == (None, None, Problem.UNREADABLE)
    assert f"is damaged: {IMPOSSIBLE} is invalid" in state.message
    assert orders.pointers() == [OURS]
