"""Aborts of transactions with rows that were not rolled back: the manager invalidates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.messaging import BILLS, GROUP, ORDERS, GroupKit, Instance, group_kit, read_committed
from tests.support import act_before, raising
from tms_core.errors import Conflict, StoreError, TransactionEnded
from tms_core.messaging import service as messaging_service
from tms_core.messaging.producers.rows import TransactionOutcome
from tms_core.server import managing
from tms_core.server.managing import find_undecided
from tms_core.tables.memory import MemoryMessageTable
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage
from tms_core.transaction.model import Transaction


@pytest.fixture(params=["memory", "leveldb"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupKit]:
    with group_kit(request.param, tmp_path) as made:
        made.service.create_topic(BILLS)
        yield made


def invalid(kit: GroupKit) -> list[int]:
    return list(kit.manager.visibility().invalid)


def restart(kit: GroupKit, folder: Path) -> None:
    """Restart the server and the manager, as after a crash: only the log, the store and the side table remain."""
    kit.service.close()
    kit.manager._storage.close()
    kit.manager = TransactionManager(DirectoryStorage(folder), kit.clock)
    find_undecided(kit.store, kit.side, kit.manager)
    kit.service = kit.serve()


@pytest.fixture
def log_folder(kit: GroupKit, tmp_path: Path) -> Path:
    """Replace the manager of the kit with a manager on disk; return its folder."""
    kit.service.close()
    kit.manager.close()
    kit.manager = TransactionManager(DirectoryStorage(tmp_path / "tx"), kit.clock)
    kit.service = kit.serve()
    return tmp_path / "tx"


# --- messages --------------------------------------------------------------------------------------------------------


def test_commit_while_a_roll_back_is_in_flight_is_rejected(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    tx = kit.begin()
    published = kit.publish(b"a", tx=tx)
    assert published is not None
    refused = list[str]()

    def commit() -> None:
        with pytest.raises(Conflict, match="rolled back") as caught:
            kit.commit(tx)
        refused.append(caught.value.message)

    act_before(monkeypatch, messaging_service, "roll_back", commit)
    kit.service.rollback(ORDERS, published)
    assert refused
    kit.commit(tx)
    assert kit.manager.status(tx.transaction_id) == "ended"
    with pytest.raises(TransactionEnded):
        kit.service.rollback(ORDERS, published)


STEPS: dict[str, Callable[[GroupKit, int], object]] = {
    "publish": lambda kit, pointer: kit.service.publish(ORDERS, [b"a", b"b"], pointer=pointer),
    "publish elsewhere": lambda kit, pointer: kit.service.publish(BILLS, [b"c"], pointer=pointer),
    "store": lambda kit, pointer: kit.service.store(ORDERS, [b"a"], pointer=pointer),
    "publish stored": lambda kit, pointer: kit.service.publish(ORDERS, [], pointer=pointer),
    "roll back": lambda kit, pointer: kit.service.rollback(ORDERS, pointer),
}


@pytest.mark.parametrize(
    ("steps", "is_invalid"),
    [
        (["publish"], True),
        (["publish", "publish", "roll back"], False),
        (["publish", "publish elsewhere", "roll back"], True),
        (["store"], False),
        (["store", "publish stored"], True),
    ],
    ids=str,
)
def test_abort_is_invalid_if_published_messages_are_left(kit: GroupKit, steps: list[str], is_invalid: bool) -> None:
    tx = kit.begin()
    assert kit.poll(tx) == []
    for step in steps:
        STEPS[step](kit, tx.write_pointer)
    kit.manager.abort(tx)
    assert invalid(kit) == ([tx.transaction_id] if is_invalid else [])
    assert [read_committed(kit, topic) for topic in (ORDERS, BILLS)] == [[], []]
    with pytest.raises(TransactionEnded):
        kit.publish(tx=tx)


def test_abort_after_the_roll_back_of_each_range_stays_an_abort(kit: GroupKit) -> None:
    tx = kit.begin()
    for published in [kit.publish(b"a", b"b", tx=tx), kit.publish(b"c", tx=tx)]:
        assert published is not None
        kit.service.rollback(ORDERS, published)
    kit.manager.abort(tx)
    assert (invalid(kit), read_committed(kit, ORDERS)) == ([], [])


def test_abort_after_half_of_the_rollbacks_invalidates(kit: GroupKit) -> None:
    tx = kit.begin()
    first, _ = kit.publish(b"a", tx=tx), kit.publish(b"b", tx=tx)
    assert first is not None
    for _ in range(3):
        # A repeated rollback counts once.
        kit.service.rollback(ORDERS, first)
    kit.manager.abort(tx)
    assert (invalid(kit), read_committed(kit, ORDERS)) == ([tx.transaction_id], [])


def test_abort_of_messages_of_a_checkpoint_makes_all_invalid(kit: GroupKit) -> None:
    tx = kit.manager.checkpoint(kit.begin())
    kit.publish(b"never", tx=tx)
    # The client has lost the checkpoint.
    kit.manager.abort(replace(tx, write_pointer=tx.transaction_id, checkpoint_write_pointers=()))
    assert invalid(kit) == [tx.transaction_id, tx.write_pointer]


def test_abort_after_a_time_out_leaves_published_messages_hidden(kit: GroupKit) -> None:
    tx = kit.begin(1)
    kit.publish(b"never", tx=tx)
    kit.clock.advance(2000)
    assert kit.manager.expire() == 1
    kit.manager.abort(tx)
    assert (invalid(kit), read_committed(kit, ORDERS)) == ([tx.transaction_id], [])


def test_abort_after_a_write_that_failed_makes_it_invalid(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    tx = kit.begin()
    with monkeypatch.context() as patch:
        patch.setattr(type(kit.store.message), "put", raising(StoreError("the disk is full")))
        with suppress(StoreError):
            kit.publish(b"perhaps", tx=tx)
    kit.manager.abort(tx)
    assert invalid(kit) == [tx.transaction_id]


def test_abort_after_a_roll_back_that_failed_makes_it_invalid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with group_kit("memory", tmp_path) as kit:
        tx = kit.begin()
        kit.publish(b"a", b"b", tx=tx)
        invert = MemoryMessageTable.invert
        # The store fails after half of the rows.
        monkeypatch.setattr(MemoryMessageTable, "invert", lambda self, cells, _: [*invert(self, cells[:1]), False])
        kit.service.rollback(ORDERS, tx.write_pointer)
        kit.manager.abort(tx)
        assert (invalid(kit), read_committed(kit, ORDERS)) == ([tx.transaction_id], [])


# --- groups and producers --------------------------------------------------------------------------------------------


def test_abort_of_a_claim_invalidates_and_redelivers_its_messages(kit: GroupKit) -> None:
    kit.publish(b"order")
    tx = kit.begin()
    assert kit.poll(tx) == [b"order"]
    kit.manager.abort(tx)
    assert invalid(kit) == [tx.transaction_id]
    assert kit.poll(kit.begin()) == [b"order"]


def test_abort_after_a_claim_rollback_in_two_steps_stays_an_abort(kit: GroupKit) -> None:
    kit.publish(b"a", b"b")
    tx = kit.begin()
    found = kit.ask(tx).messages
    kit.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, kit.ids()[0])
    assert len(found) == len(kit.ids())
    kit.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id)
    kit.manager.abort(tx)
    assert invalid(kit) == []


def test_abort_after_a_rollback_of_half_a_claim_invalidates(kit: GroupKit) -> None:
    kit.publish(b"a", b"b")
    tx = kit.begin()
    assert kit.poll(tx) == [b"a", b"b"]
    kit.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, kit.ids()[0])
    kit.manager.abort(tx)
    assert invalid(kit) == [tx.transaction_id]
    # After a failed delivery, a poll returns fewer messages.
    assert kit.poll(kit.begin()) == [b"a"]


@pytest.mark.parametrize("writes", [True, False], ids=["publishes", "only starts"])
def test_abort_unknown_to_the_producer_is_reported_as_aborted(kit: GroupKit, writes: bool) -> None:
    one, tx = Instance(kit), kit.begin()
    if writes:
        one.publish(b"a", tx=tx, label="file 1")
        kit.service.rollback(BILLS, tx.write_pointer)
    else:
        one.begin(tx, "file 1")
    kit.manager.abort(tx)
    assert invalid(kit) == [tx.transaction_id]
    previous = Instance(kit).previous
    assert previous is not None
    assert previous.outcome is TransactionOutcome.ABORTED


# --- restarts --------------------------------------------------------------------------------------------------------


def publish(kit: GroupKit, tx: Transaction) -> None:
    kit.publish(b"order", tx=tx)


def claim(kit: GroupKit, tx: Transaction) -> None:
    kit.publish(b"order")
    assert kit.poll(tx) == [b"order"]


def begin(kit: GroupKit, tx: Transaction) -> None:
    Instance(kit).begin(tx, "file 1")


@pytest.mark.parametrize("writes", [publish, claim, begin])
def test_abort_after_a_restart_makes_it_invalid(
    kit: GroupKit, log_folder: Path, writes: Callable[[GroupKit, Transaction], None]
) -> None:
    tx, other = kit.begin(), kit.begin()
    writes(kit, tx)
    restart(kit, log_folder)
    kit.manager.abort(tx)
    kit.manager.abort(other)
    assert invalid(kit) == [tx.transaction_id]


def test_abort_after_a_restart_and_a_complete_roll_back_stays_an_abort(kit: GroupKit, log_folder: Path) -> None:
    kit.publish(b"order")
    tx = kit.begin()
    assert kit.poll(tx) == [b"order"]
    kit.publish(b"a", b"b", tx=tx)
    restart(kit, log_folder)
    kit.publish(b"c", tx=tx)
    kit.service.rollback(ORDERS, tx.write_pointer)
    kit.roll_back(tx)
    assert invalid(kit) == []


def test_abort_after_a_partial_restart_is_invalid(
    kit: GroupKit, log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managing, "MAX_ROWS", 2)
    monkeypatch.setattr(managing, "PAGE_ROWS", 1)
    tx = kit.begin()
    kit.publish(b"a", b"b", b"c", tx=tx)
    restart(kit, log_folder)
    # Everything was rolled back, but the manager does not know.
    kit.service.rollback(ORDERS, tx.write_pointer)
    kit.manager.abort(tx)
    assert invalid(kit) == [tx.transaction_id]
    kit.manager.abort(kit.begin())
    assert invalid(kit) == [tx.transaction_id]
