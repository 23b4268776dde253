"""S16: rows restored from the archive are as visible as before, never more."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from janitor.archive import index as archived
from janitor.archive import writer as archive
from janitor.archive.restore import Request
from janitor.archive.writer import CommitState, ParquetArchive
from janitor.rules.policy import Rule
from janitor.state.base import OpenIdRecord
from tests.archives import Undo, keys_of
from tests.builders import HOUR, NOW_MS, SECOND, Topic, janitor, pointer, topic, unknown_topic, visibility
from tests.support import raising
from tms_core.clock import ManualClock
from tms_core.errors import ArchiveError, Refused
from tms_core.messaging.service import MessagingService
from tms_core.rowkey import MessageKey
from tms_core.tables.base import KEYS, Store
from tms_core.tables.side import MemorySide
from tms_core.transaction.model import VisibilityState

STARTED_MS = NOW_MS - 3 * HOUR
COMMITTED, INVALID, OPEN, ROLLED_BACK = (pointer(STARTED_MS, number) for number in (1, 2, 3, 4))
LATER = pointer(NOW_MS, 5)
AT_DELETION = visibility(NOW_MS - SECOND, invalid=[INVALID], in_progress=[OPEN])

#: After all transactions, with a truncated invalid list.
TRUNCATED = visibility(NOW_MS + 1000 * HOUR)


@pytest.fixture
def undo(store: Store, tmp_path: Path) -> Undo:
    made = Undo(store, tmp_path / "archive")
    made.state.pause("default:orders", NOW_MS)
    return made


@pytest.fixture
def orders(store: Store) -> Topic:
    return topic(store, "default:orders", ttl_seconds=86_400)


def visible(orders: Topic, snapshot: VisibilityState) -> list[int]:
    """Return the sequences of messages visible to a transaction with this snapshot."""
    reader = snapshot.dummy_transaction()
    return [
        key.sequence
        for key, value in orders.messages()
        if value.pointer is None or (value.pointer >= 0 and reader.is_visible(value.pointer))
    ]


@pytest.mark.parametrize(
    ("stored", "back"),
    [
        (None, None),
        (COMMITTED, COMMITTED),
        (INVALID, -INVALID),
        (OPEN, -OPEN),
        (LATER, -LATER),
        (-ROLLED_BACK, -ROLLED_BACK),
    ],
)
def test_restore_after_truncation_shows_no_additional_message(
    undo: Undo, orders: Topic, stored: int | None, back: int | None
) -> None:
    orders.plain(STARTED_MS) if stored is None else orders.tx(stored, STARTED_MS)
    seen = visible(orders, AT_DELETION)
    undo.sweep(orders, snapshot=AT_DELETION)
    assert orders.pointers() == []
    undo.restore(orders, snapshot=TRUNCATED)
    assert orders.pointers() == [back]
    assert visible(orders, TRUNCATED) == seen


def test_restore_without_a_snapshot_hides_transactional_rows(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.tx(COMMITTED, STARTED_MS).tx(INVALID, STARTED_MS).plain(STARTED_MS), snapshot=None)
    done = undo.restore(orders, snapshot=TRUNCATED)
    assert orders.pointers() == [-COMMITTED, -INVALID, None]
    assert (done.restored, done.negated) == (3, 2)


def test_restore_of_a_transaction_invalid_now_inverts_its_rows(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.tx(COMMITTED, STARTED_MS), snapshot=AT_DELETION)
    undo.restore(orders, snapshot=visibility(NOW_MS, invalid=[COMMITTED]))
    assert orders.pointers() == [-COMMITTED]


def test_restore_of_a_transaction_once_invalid_inverts_its_rows(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.tx(COMMITTED, STARTED_MS), snapshot=AT_DELETION)
    undo.state.save_open_ids([OpenIdRecord(COMMITTED, NOW_MS, NOW_MS, NOW_MS)])
    undo.restore(orders, snapshot=TRUNCATED)
    assert orders.pointers() == [-COMMITTED]


def test_restore_of_two_runs_inverts_rows_invalid_in_the_first(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.tx(INVALID, STARTED_MS), run_id="run-1", snapshot=AT_DELETION)
    undo.clock.advance(HOUR)
    undo.sweep(orders.tx(INVALID, STARTED_MS + 1), run_id="run-2", snapshot=TRUNCATED)
    undo.restore(orders, snapshot=TRUNCATED, since_ms=STARTED_MS + 1)
    assert orders.pointers() == [-INVALID]


def test_restore_of_reference_keeps_payload_keys(undo: Undo, orders: Topic) -> None:
    orders.ref(INVALID, STARTED_MS).stored(INVALID, STARTED_MS, STARTED_MS + 1)
    before = keys_of(orders, undo.store.payload)
    undo.sweep(orders, snapshot=AT_DELETION)
    undo.restore(orders, snapshot=TRUNCATED)
    assert orders.pointers() == [-INVALID]
    assert keys_of(orders, undo.store.payload) == before


def publish_and_roll_back(store: Store, clock: ManualClock, *, by_cdap: bool) -> Topic:
    """Return a topic recreated between the publish and the rollback of an aborted transaction."""
    orders = unknown_topic(store, "default:orders")
    with MessagingService(store, clock, side=MemorySide()) as service:
        service.create_topic(orders.id)
        published = service.publish(orders.id, [b"aborted"], pointer=COMMITTED)
        service.delete_topic(orders.id)
        service.create_topic(orders.id)
        assert published is not None
        if not by_cdap:
            service.rollback(orders.id, published)
    return orders


def test_rollback_that_missed_an_earlier_generation_stays_hidden(undo: Undo, store: Store) -> None:
    orders = publish_and_roll_back(store, undo.clock, by_cdap=True)
    kit = janitor(store, clock=undo.clock, state=undo.state, archive=ParquetArchive(undo.folder, undo.clock))
    undo.state.resume("default:orders")
    assert kit.engine.run_once(adopt=True).total(Rule.OLD_GENERATION) == 1
    undo.state.pause("default:orders", NOW_MS)
    done = kit.engine.restore(undo.folder, Request(orders.id))
    assert (done.restored, done.negated) == (1, 1)
    assert visible(orders.at(2), kit.snapshots.latest().snapshot) == []


def test_rollback_at_our_server_reaches_the_earlier_generation(undo: Undo, store: Store) -> None:
    orders = publish_and_roll_back(store, undo.clock, by_cdap=False)
    assert orders.pointers() == [-COMMITTED]
    undo.sweep(orders, rule=Rule.OLD_GENERATION, snapshot=AT_DELETION)
    undo.restore(orders, snapshot=TRUNCATED)
    assert orders.at(2).pointers() == [-COMMITTED]


@pytest.mark.parametrize("elder", [True, False])
def test_row_of_old_generation_proves_no_commit(
    undo: Undo, orders: Topic, elder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.tx(COMMITTED, STARTED_MS).tx(COMMITTED + 100, STARTED_MS)
    if elder:
        # Archives of versions before this rule have this state.
        monkeypatch.setattr(archive, "commit_state", lambda *_: CommitState.COMMITTED)
    undo.sweep(orders, rule=Rule.OLD_GENERATION, snapshot=AT_DELETION)
    monkeypatch.undo()
    undo.sweep(orders.at(2).tx(COMMITTED, STARTED_MS + 7), run_id="run-2", snapshot=AT_DELETION)
    orders.describe(ttl_seconds=86_400, generation=3)
    undo.restore(orders, snapshot=TRUNCATED)
    assert orders.at(3).pointers() == [COMMITTED, -COMMITTED - 100, COMMITTED]


@pytest.mark.parametrize("known", ["undecided", "invalid now"])
def test_rejected_proof_keeps_rows_hidden(undo: Undo, orders: Topic, known: str) -> None:
    undo.sweep(orders.tx(COMMITTED, STARTED_MS), rule=Rule.OLD_GENERATION, snapshot=AT_DELETION)
    later = None if known == "undecided" else AT_DELETION
    undo.sweep(orders.at(2).tx(COMMITTED, STARTED_MS + 7), run_id="run-2", snapshot=later)
    orders.describe(ttl_seconds=86_400, generation=3)
    undo.restore(orders, snapshot=visibility(NOW_MS, invalid=[COMMITTED] if later else []))
    assert orders.at(3).pointers() == [-COMMITTED, -COMMITTED]


def test_live_message_is_unchanged_by_restored_rows(undo: Undo, orders: Topic) -> None:
    found = (
        topic(undo.store, "default:found", ttl_seconds=86_400).ref(COMMITTED, STARTED_MS).stored(COMMITTED, STARTED_MS)
    )
    undo.sweep(orders.ref(COMMITTED, STARTED_MS + 1).stored(COMMITTED, STARTED_MS + 1), snapshot=AT_DELETION)
    with pytest.raises(Refused, match=f"have other payloads in the topic .*: {COMMITTED}"):
        undo.restore(orders, found, snapshot=AT_DELETION)
    assert found.stored_times() == [STARTED_MS]


def test_restore_to_a_topic_not_paused_names_the_command(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.plain(STARTED_MS))
    undo.state.resume("default:orders")
    undo.state.pause("default:order", NOW_MS)
    with pytest.raises(Refused, match="janitor pause default:orders"):
        undo.restore(orders)
    with pytest.raises(Refused, match="janitor pause default:orders"):
        undo.restore(orders, orders)
    assert orders.times() == []
    undo.state.pause("default:*", NOW_MS)
    assert undo.restore(orders).restored == 1


def test_restore_to_unreadable_topic_is_refused(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.plain(STARTED_MS))
    deleted = topic(undo.store, "default:deleted", ttl_seconds=60, generation=-3)
    broken = unknown_topic(undo.store, "default:broken").write_metadata(b"{}")
    for target, reason in ((deleted, "is deleted"), (broken, "Nothing is restored")):
        with pytest.raises(Refused, match=reason):
            undo.restore(orders, target)
    with pytest.raises(Refused, match="default:nowhere"):
        undo.restore(orders, unknown_topic(undo.store, "default:nowhere"))
    assert undo.store.message.read(KEYS, b"", None, 9).items == []


def test_restore_to_a_deleted_topic_is_refused_until_it_exists(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.plain(STARTED_MS).tx(COMMITTED, STARTED_MS), snapshot=AT_DELETION)
    orders.describe(ttl_seconds=86_400, generation=-1)
    with pytest.raises(Refused, match="is deleted"):
        undo.restore(orders)
    orders.describe(ttl_seconds=86_400, generation=2)
    undo.restore(orders, snapshot=AT_DELETION)
    assert orders.at(2).pointers() == [None, COMMITTED]


def test_crash_between_archive_and_delete_restores_each_row_once(undo: Undo, orders: Topic) -> None:
    orders.plain(STARTED_MS, STARTED_MS + 1).ref(COMMITTED, STARTED_MS).stored(COMMITTED, STARTED_MS)
    before = orders.messages()
    undo.archive(orders, run_id="died", snapshot=AT_DELETION)
    undo.sweep(orders, run_id="next", snapshot=AT_DELETION)
    assert len(undo.files(orders)) == 4
    done = undo.restore(orders, snapshot=TRUNCATED)
    assert (done.restored, done.already_there) == (4, 4)
    assert orders.messages() == before
    assert orders.stored_times() == [STARTED_MS]


def test_crash_after_archive_before_delete_makes_restore_a_no_op(undo: Undo, orders: Topic) -> None:
    orders.tx(INVALID, STARTED_MS).tx(COMMITTED, STARTED_MS)
    before = orders.messages()
    undo.archive(orders, snapshot=AT_DELETION)
    assert undo.restore(orders, snapshot=TRUNCATED).restored == 0
    assert orders.messages() == before


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_full_disk_of_an_archive_keeps_rows(
    undo: Undo, orders: Topic, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.plain(STARTED_MS)
    with monkeypatch.context() as patch:
        patch.setattr(
            f"os.{step}" if step == "fsync" else f"pathlib.Path.{step}",
            raising(OSError(errno.ENOSPC, "No space left on device")),
        )
        with pytest.raises(ArchiveError, match="No space left"):
            undo.sweep(orders)
    assert orders.times() == [STARTED_MS]
    assert archived.find(undo.folder) == ([], [])


def test_restored_row_deleted_again_keeps_its_commit_state(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.tx(OPEN, STARTED_MS), run_id="run-1", snapshot=AT_DELETION)
    undo.restore(orders, snapshot=AT_DELETION)
    undo.clock.advance(HOUR)
    undo.sweep(orders, run_id="run-2", snapshot=TRUNCATED)
    undo.restore(orders, snapshot=TRUNCATED)
    assert orders.messages()[0][0] == MessageKey(orders.id, 1, STARTED_MS, 0)
    assert orders.pointers() == [-OPEN]
