"""An abort hides nothing, so the manager invalidates a transaction of which something was not taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.messaging.group_desk import GROUP, ORDERS, GroupDesk, opened
from tests.messaging.test_producers import BILLS, Instance, seen
from tms_core.errors import Conflict, StoreError, TransactionEnded
from tms_core.messaging.producers.rows import TransactionOutcome
from tms_core.messaging.publish.rollback import roll_back
from tms_core.server import managing
from tms_core.server.managing import find_undecided
from tms_core.tables.memory import MemoryMessageTable
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage
from tms_core.transaction.model import Transaction


@pytest.fixture(params=["memory", "leveldb"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupDesk]:
    with opened(request.param, tmp_path) as made:
        made.service.create_topic(BILLS)
        yield made


def invalid(desk: GroupDesk) -> list[int]:
    return list(desk.manager.visibility().invalid)


def restart(desk: GroupDesk, folder: Path) -> None:
    """Start server and manager again, as after a crash: nothing but log, store and side table is left."""
    desk.service.close()
    desk.manager._storage.close()
    desk.manager = TransactionManager(DirectoryStorage(folder), desk.clock)
    find_undecided(desk.store, desk.side, desk.manager)
    desk.service = desk.serve()


@pytest.fixture
def kept(desk: GroupDesk, tmp_path: Path) -> Path:
    """The folder of a manager whose log survives, in the place of the desk's."""
    desk.service.close()
    desk.manager.close()
    desk.manager = TransactionManager(DirectoryStorage(tmp_path / "tx"), desk.clock)
    desk.service = desk.serve()
    return tmp_path / "tx"


# --- messages --------------------------------------------------------------------------------------------------------


def test_commit_while_a_roll_back_is_under_way_is_refused(desk: GroupDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    tx = desk.begin()
    published = desk.publish(b"a", tx=tx)
    assert published is not None
    refused = list[str]()

    def committing(*given: Any) -> int:
        with pytest.raises(Conflict, match="is being rolled back") as caught:
            desk.commit(tx)
        refused.append(caught.value.message)
        return roll_back(*given)

    monkeypatch.setattr("tms_core.messaging.service.roll_back", committing)
    desk.service.rollback(ORDERS, published)
    assert refused
    desk.commit(tx)
    assert desk.manager.status(tx.transaction_id) == "ended"
    with pytest.raises(TransactionEnded):
        desk.service.rollback(ORDERS, published)


def test_abort_of_published_messages_makes_it_invalid(desk: GroupDesk) -> None:
    tx = desk.begin()
    desk.publish(b"never", b"seen", tx=tx)
    desk.manager.abort(tx)
    assert invalid(desk) == [tx.transaction_id]
    assert seen(desk, ORDERS) == []


@pytest.mark.parametrize("by", ["range", "pointer"])
def test_abort_after_a_complete_roll_back_stays_an_abort(desk: GroupDesk, by: str) -> None:
    tx = desk.begin()
    ranges = [desk.publish(b"a", b"b", tx=tx), desk.publish(b"c", tx=tx)]
    if by == "pointer":
        desk.service.rollback(ORDERS, tx.write_pointer)
    for published in ranges if by == "range" else []:
        assert published is not None
        desk.service.rollback(ORDERS, published)
    desk.manager.abort(tx)
    assert (invalid(desk), seen(desk, ORDERS)) == ([], [])


def test_abort_after_one_of_two_roll_backs_makes_it_invalid(desk: GroupDesk) -> None:
    tx = desk.begin()
    first, _ = desk.publish(b"a", tx=tx), desk.publish(b"b", tx=tx)
    assert first is not None
    for _ in range(3):
        # A roll back may be repeated, and counts once.
        desk.service.rollback(ORDERS, first)
    desk.manager.abort(tx)
    assert (invalid(desk), seen(desk, ORDERS)) == ([tx.transaction_id], [])


def test_abort_after_a_roll_back_in_one_of_two_topics_makes_it_invalid(desk: GroupDesk) -> None:
    tx = desk.begin()
    for topic in (ORDERS, BILLS):
        desk.service.publish(topic, [b"a"], pointer=tx.write_pointer)
    desk.service.rollback(ORDERS, tx.write_pointer)
    desk.manager.abort(tx)
    assert invalid(desk) == [tx.transaction_id]
    assert [seen(desk, topic) for topic in (ORDERS, BILLS)] == [[], []]


def test_abort_of_messages_of_a_checkpoint_makes_all_invalid(desk: GroupDesk) -> None:
    tx = desk.manager.checkpoint(desk.begin())
    desk.publish(b"never", tx=tx)
    # A client that has lost the checkpoint.
    desk.manager.abort(replace(tx, write_pointer=tx.transaction_id, checkpoint_write_pointers=()))
    assert invalid(desk) == [tx.transaction_id, tx.write_pointer]


def test_abort_of_stored_payloads_stays_an_abort(desk: GroupDesk) -> None:
    tx = desk.begin()
    desk.service.store(ORDERS, [b"a"], pointer=tx.write_pointer)
    desk.manager.abort(tx)
    assert invalid(desk) == []
    with pytest.raises(TransactionEnded):
        desk.publish(tx=tx)


def test_abort_of_stored_payloads_that_are_published_makes_it_invalid(desk: GroupDesk) -> None:
    tx = desk.begin()
    desk.service.store(ORDERS, [b"a"], pointer=tx.write_pointer)
    desk.publish(tx=tx)
    desk.manager.abort(tx)
    assert (invalid(desk), seen(desk, ORDERS)) == ([tx.transaction_id], [])


def test_abort_after_a_time_out_leaves_published_messages_hidden(desk: GroupDesk) -> None:
    tx = desk.begin(1)
    desk.publish(b"never", tx=tx)
    desk.clock.advance(2000)
    assert desk.manager.expire() == 1
    desk.manager.abort(tx)
    assert (invalid(desk), seen(desk, ORDERS)) == ([tx.transaction_id], [])


def test_abort_after_a_write_that_failed_makes_it_invalid(desk: GroupDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    tx, table = desk.begin(), type(desk.store.message)

    def fails(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(table, "put", fails)
        with suppress(StoreError):
            desk.publish(b"perhaps", tx=tx)
    desk.manager.abort(tx)
    assert invalid(desk) == [tx.transaction_id]


def test_abort_after_a_roll_back_that_failed_makes_it_invalid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with opened("memory", tmp_path) as desk:
        tx = desk.begin()
        desk.publish(b"a", b"b", tx=tx)
        invert = MemoryMessageTable.invert
        # Half of it, and then the store goes away.
        monkeypatch.setattr(MemoryMessageTable, "invert", lambda self, cells, _: [*invert(self, cells[:1]), False])
        desk.service.rollback(ORDERS, tx.write_pointer)
        desk.manager.abort(tx)
        assert (invalid(desk), seen(desk, ORDERS)) == ([tx.transaction_id], [])


# --- groups and producers --------------------------------------------------------------------------------------------


def test_abort_of_a_claim_makes_it_invalid_and_the_messages_come_again(desk: GroupDesk) -> None:
    desk.publish(b"order")
    tx = desk.begin()
    assert desk.poll(tx) == [b"order"]
    desk.manager.abort(tx)
    assert invalid(desk) == [tx.transaction_id]
    assert desk.poll(desk.begin()) == [b"order"]


def test_abort_of_a_poll_that_claimed_nothing_stays_an_abort(desk: GroupDesk) -> None:
    tx = desk.begin()
    assert desk.poll(tx) == []
    desk.manager.abort(tx)
    assert invalid(desk) == []


def test_abort_after_a_claim_was_given_back_in_two_steps_stays_an_abort(desk: GroupDesk) -> None:
    desk.publish(b"a", b"b")
    tx = desk.begin()
    found = desk.ask(tx).messages
    desk.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, desk.ids()[0])
    assert len(found) == len(desk.ids())
    desk.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id)
    desk.manager.abort(tx)
    assert invalid(desk) == []


def test_abort_after_half_of_a_claim_was_given_back_makes_it_invalid(desk: GroupDesk) -> None:
    desk.publish(b"a", b"b")
    tx = desk.begin()
    assert desk.poll(tx) == [b"a", b"b"]
    desk.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, desk.ids()[0])
    desk.manager.abort(tx)
    assert invalid(desk) == [tx.transaction_id]
    # After a try that came to nothing there are fewer at once.
    assert desk.poll(desk.begin()) == [b"a"]


@pytest.mark.parametrize("writes", [True, False], ids=["publishes", "only begins"])
def test_abort_that_a_producer_was_not_told_of_is_told_as_aborted(desk: GroupDesk, writes: bool) -> None:
    one, tx = Instance(desk), desk.begin()
    if writes:
        one.publish(b"a", tx=tx, label="file 1")
        desk.service.rollback(BILLS, tx.write_pointer)
    else:
        one.begin(tx, "file 1")
    desk.manager.abort(tx)
    assert invalid(desk) == [tx.transaction_id]
    former = Instance(desk).former
    assert former is not None
    assert former.outcome is TransactionOutcome.ABORTED


# --- restarts --------------------------------------------------------------------------------------------------------


def publish(desk: GroupDesk, tx: Transaction) -> None:
    desk.publish(b"order", tx=tx)


def claim(desk: GroupDesk, tx: Transaction) -> None:
    desk.publish(b"order")
    assert desk.poll(tx) == [b"order"]


def begin(desk: GroupDesk, tx: Transaction) -> None:
    Instance(desk).begin(tx, "file 1")


@pytest.mark.parametrize("writes", [publish, claim, begin])
def test_abort_after_a_restart_makes_it_invalid(
    desk: GroupDesk, kept: Path, writes: Callable[[GroupDesk, Transaction], None]
) -> None:
    tx, other = desk.begin(), desk.begin()
    writes(desk, tx)
    restart(desk, kept)
    desk.manager.abort(tx)
    desk.manager.abort(other)
    assert invalid(desk) == [tx.transaction_id]


def test_abort_after_a_restart_and_a_complete_roll_back_stays_an_abort(desk: GroupDesk, kept: Path) -> None:
    desk.publish(b"order")
    tx = desk.begin()
    assert desk.poll(tx) == [b"order"]
    desk.publish(b"a", b"b", tx=tx)
    restart(desk, kept)
    desk.publish(b"c", tx=tx)
    desk.service.rollback(ORDERS, tx.write_pointer)
    desk.roll_back(tx)
    assert invalid(desk) == []


def test_abort_after_a_restart_that_did_not_find_all_makes_it_invalid(
    desk: GroupDesk, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managing, "MOST_ROWS", 2)
    monkeypatch.setattr(managing, "PAGE_ROWS", 1)
    tx = desk.begin()
    desk.publish(b"a", b"b", b"c", tx=tx)
    restart(desk, kept)
    # All of it is taken back, but nobody knows.
    desk.service.rollback(ORDERS, tx.write_pointer)
    desk.manager.abort(tx)
    assert invalid(desk) == [tx.transaction_id]
    later = desk.begin()
    desk.manager.abort(later)
    assert invalid(desk) == [tx.transaction_id]
