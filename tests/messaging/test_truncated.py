"""Claims and producers' notes are voided before their id leaves the invalid list."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.builders import NOW_MS
from tests.kit.messaging import BILLS, GROUP, ORDERS, GroupKit, Instance, group_kit
from tests.support import raising
from tests.transaction.managers import served
from tms_core.consumers.claim_rows import all_claims
from tms_core.errors import StoreError
from tms_core.messaging.producers.rows import TransactionOutcome
from tms_core.server.managing import release_rows
from tms_core.tables.side import MemorySide
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import Transaction
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import OutcomeUnknown

#: A time after the start of all transactions of a test.
LATER_MS = NOW_MS + 60_000


@pytest.fixture(params=["memory", "leveldb"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupKit]:
    with group_kit(request.param, tmp_path) as made:
        made.service.close()
        made.manager.close()
        made.manager = TransactionManager(MemoryStorage(), made.clock, release=partial(release_rows, made.side))
        made.service = made.serve()
        made.service.create_topic(BILLS)
        yield made


def by_id(manager: TransactionManager, tx: Transaction) -> object:
    return manager.truncate_invalid([tx.transaction_id])


def before_now(manager: TransactionManager, _: Transaction) -> object:
    # A later transaction has started, so no older transaction can start.
    manager._clock._clock.advance(10)  # type: ignore[attr-defined]
    manager.abort(manager.start_short())
    return manager.truncate_invalid_before(NOW_MS + 1)


def before_a_later_time(manager: TransactionManager, _: Transaction) -> object:
    return manager.truncate_invalid_before(LATER_MS)


def reset(manager: TransactionManager, _: Transaction) -> object:
    manager.reset()
    return True


WAYS = [by_id, before_now, before_a_later_time, reset]


@pytest.mark.parametrize("way", WAYS)
def test_claims_of_a_truncated_id_are_delivered_again(
    kit: GroupKit, caplog: pytest.LogCaptureFixture, way: Callable[[TransactionManager, Transaction], object]
) -> None:
    kit.publish(b"a", b"b")
    done, dead = kit.begin(), kit.begin()
    assert kit.any(done, limit=1) == [b"a"]
    assert kit.any(dead) == [b"b"]
    kit.commit(done)
    kit.time_out(dead)
    with caplog.at_level(logging.INFO):
        assert way(kit.manager, dead)
    assert kit.manager.status(dead.transaction_id) == "ended"
    assert re.search(r"\b1 claims .*\b0 transactions", caplog.text)
    # Committed messages are not delivered again.
    assert kit.any(kit.begin()) == [b"b"]


@pytest.mark.parametrize("way", WAYS)
def test_producer_of_a_truncated_id_learns_that_it_is_aborted(
    kit: GroupKit, way: Callable[[TransactionManager, Transaction], object]
) -> None:
    one, tx = Instance(kit), kit.begin()
    one.publish(b"a", tx=tx, label="file 1")
    kit.time_out(tx)
    assert way(kit.manager, tx)
    previous = Instance(kit).previous
    assert previous is not None
    assert previous.outcome is TransactionOutcome.ABORTED


def test_reset_gives_up_claims_of_transactions_in_progress(kit: GroupKit) -> None:
    kit.publish(b"a")
    assert kit.poll(kit.begin()) == [b"a"]
    kit.manager.reset()
    assert kit.poll(kit.begin()) == [b"a"]


def test_truncation_that_cannot_give_up_claims_takes_no_id_off(kit: GroupKit) -> None:
    kit.publish(b"a")
    tx = kit.begin()
    assert kit.poll(tx) == [b"a"]
    kit.time_out(tx)
    kit.manager._release = raising(StoreError("the disk is full"))
    for way in WAYS:
        with pytest.raises(StoreError):
            way(kit.manager, tx)
        assert kit.manager.status(tx.transaction_id) == "invalid"


@pytest.mark.parametrize("way", [by_id, before_now, before_a_later_time])
def test_truncation_leaves_an_id_that_is_being_written_with(
    kit: GroupKit, way: Callable[[TransactionManager, Transaction], object]
) -> None:
    tx, other = kit.begin(), kit.begin()
    assert kit.manager.begin_write(tx.transaction_id)
    for one in (tx, other):
        kit.time_out(one)
    # Its claim is being written, and would exist after the truncation.
    way(kit.manager, tx)
    assert kit.manager.status(tx.transaction_id) == "invalid"
    kit.manager.end_write(tx.transaction_id)
    assert way(kit.manager, tx)
    assert kit.manager.status(tx.transaction_id) == "ended"


def test_truncation_of_ids_that_are_not_listed_gives_up_nothing(kit: GroupKit) -> None:
    kit.publish(b"a")
    tx = kit.begin()
    assert kit.poll(tx) == [b"a"]
    assert not kit.manager.truncate_invalid([tx.transaction_id, 7])
    assert not kit.manager.truncate_invalid_before(1)
    kit.commit(tx)
    assert not kit.manager.truncate_invalid([tx.transaction_id])
    assert kit.service.consumers.get(ORDERS, GROUP).id == kit.ids()[-1]


def test_truncate_with_a_damaged_claim_is_a_fault_of_the_server(
    kit: GroupKit, caplog: pytest.LogCaptureFixture
) -> None:
    kit.publish(b"a")
    tx = kit.begin()
    assert kit.poll(tx) == [b"a"]
    kit.time_out(tx)
    [(key, _, _)] = all_claims(kit.side)
    kit.side.put([(key, b"damaged")])
    with served(kit.manager) as service, TransactionClient(service.address) as client, pytest.raises(OutcomeUnknown):
        client.truncate_invalid([tx.transaction_id])
    assert kit.manager.invalid_size() == 1
    assert "truncateInvalidTx failed" in caplog.text


def test_release_of_rows_reads_no_manager_and_changes_nothing_of_others() -> None:
    side = MemorySide()
    side.put([(b"x", b"1")])
    release_rows(side, lambda _: True)
    assert side.get(b"x") == b"1"
