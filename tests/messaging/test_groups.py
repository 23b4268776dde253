"""Consumer groups: delivered messages, and claims after the end of a transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import HOUR, MINUTE, NOW_MS, SECOND
from tests.kit.messaging import GROUP, ORDERS, READ_NONE, GroupKit, group_kit, read_payloads
from tests.support import act_before, raising
from tms_core.consumers.claim_rows import release_void_claims
from tms_core.errors import BadRequest, ConsumerConflict, ConsumerNotFound, StoreError, TopicNotFound, Unavailable
from tms_core.messaging.groups import claims as groups
from tms_core.messaging.groups.claims import GroupPoll, Order
from tms_core.messaging.ids import position
from tms_core.rowkey import MessageId
from tms_core.tables.base import KEYS
from tms_core.topic import TopicId
from tms_core.transaction.model import Transaction, transaction_ms


@pytest.fixture(params=["memory", "leveldb"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupKit]:
    with group_kit(request.param, tmp_path) as made:
        yield made


def test_poll_after_a_commit_continues_after_the_claim(kit: GroupKit) -> None:
    kit.publish(b"a", b"b", b"c")
    assert kit.process(2) == [b"a", b"b"]
    assert kit.process(2) == [b"c"]
    assert kit.poll(kit.begin()) == []
    assert kit.claims() == []
    assert kit.base() == kit.ids()[-1]


# --- in order --------------------------------------------------------------------------------------------------------


def test_poll_in_order_with_an_open_claim_names_its_holder(kit: GroupKit) -> None:
    kit.publish(b"a", b"b")
    one, two = kit.begin(), kit.begin()
    assert kit.poll(one, 1) == [b"a"]
    assert kit.ask(two)[:4] == ([], 0, one.transaction_id, None)
    # The same transaction continues after its own claim.
    assert kit.poll(one, 1) == [b"b"]
    assert [claim.pointer for claim in kit.claims()] == [one.transaction_id] * 2


def test_poll_of_a_transaction_older_than_a_commit_is_held(kit: GroupKit) -> None:
    kit.publish(b"a", b"b")
    early, one = kit.begin(), kit.begin()
    assert kit.poll(one, 1) == [b"a"]
    kit.commit(one)
    assert kit.ask(early).held == one.transaction_id
    # Also after a third transaction has merged the claim into the base.
    assert kit.fail(1) == [b"b"]
    assert kit.base() == kit.ids()[0]
    assert kit.ask(early).held == one.transaction_id


def test_poll_after_a_restart_is_held_if_the_group_moved_since(kit: GroupKit) -> None:
    kit.publish(b"a", b"b", b"c")
    early, one = kit.begin(), kit.begin()
    assert kit.poll(one, 1) == [b"a"]
    kit.commit(one)
    third = kit.begin()
    assert kit.poll(third, 1) == [b"b"]
    kit.restart()
    # The service no longer knows which transaction was merged into the base, but the third transaction has claims.
    assert kit.ask(early).held == early.transaction_id
    assert kit.poll(third, 1) == [b"c"]
    kit.roll_back(third)
    assert kit.ask(early).held is not None
    kit.clock.advance(1)
    assert kit.poll(kit.begin(), 1) == [b"b"]


def test_poll_after_a_restart_continues_if_the_group_did_not_move(kit: GroupKit) -> None:
    kit.publish(b"a")
    kit.clock.advance(1)
    reader = kit.begin()
    kit.clock.advance(1)
    kit.restart()
    assert kit.poll(reader) == [b"a"]


def test_poll_of_an_old_transaction_of_a_forgotten_group_waits(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "KNOWN_GROUPS", 1)
    kit.publish(b"a", b"b")
    early, one = kit.begin(), kit.begin()
    assert kit.poll(one, 1) == [b"a"]
    kit.commit(one)
    assert kit.fail(1) == [b"b"]
    assert kit.ask(early).held == one.transaction_id
    kit.service.consumers.put(ORDERS, "other", READ_NONE)
    for expected in ([b"a"], [b"b"]):
        assert kit.process(1, group="other") == expected
    assert kit.ask(early).held == early.transaction_id
    assert kit.poll(kit.begin(), 1) == [b"b"]


def fail(kit: GroupKit, tx: Transaction, how: str) -> None:
    if how == "rolled back":
        kit.roll_back(tx)
    elif how == "invalidated":
        kit.time_out(tx)
    else:
        kit.clock.advance(11 * SECOND)
        kit.manager.expire()


@pytest.mark.parametrize("end", ["rolled back", "invalidated", "timed out"])
def test_poll_after_a_failed_transaction_gives_half_at_once(kit: GroupKit, end: str) -> None:
    kit.publish(*(b"%d" % number for number in range(6)))
    one = kit.begin(timeout_seconds=10)
    assert len(kit.poll(one, 4)) == 4
    fail(kit, one, end)
    # The rest of the failed claim has been delivered once.
    for payloads, deliveries in (([b"0", b"1"], 2), ([b"2", b"3"], 2), ([b"4", b"5"], 1)):
        tx = kit.begin()
        found = kit.ask(tx, 4)
        assert ([message.payload for message in found.messages], found.deliveries) == (payloads, deliveries)
        kit.commit(tx)


@pytest.mark.parametrize("end", ["timed out", "invalidated", "rolled back"])
def test_poll_after_a_crash_counts_only_rolled_back_deliveries(kit: GroupKit, end: str) -> None:
    kit.publish(*(b"%d" % number for number in range(4)))
    one = kit.begin(timeout_seconds=10)
    assert len(kit.poll(one, 4)) == 4
    kit.restart()
    fail(kit, one, end)
    found = kit.ask(kit.begin(), 4)
    assert (len(found.messages), found.deliveries) == ((2, 2) if end == "rolled back" else (4, 1))


def test_poll_after_claims_failed_before_and_after_a_restart_counts_the_latter(kit: GroupKit) -> None:
    kit.publish(b"a")
    for deliveries, restarts in ((1, True), (1, False), (2, True), (2, False), (3, False)):
        tx = kit.begin()
        assert kit.ask(tx).deliveries == deliveries
        if restarts:
            kit.restart()
        kit.time_out(tx)


def test_poll_of_an_always_failing_message_finally_returns_it_alone(kit: GroupKit) -> None:
    kit.publish(*(b"%d" % number for number in range(8)))
    processed: list[bytes] = []
    alone: list[tuple[list[bytes], int]] = []
    for _ in range(30):
        tx = kit.begin()
        found = kit.ask(tx, 8, max_deliveries=4)
        payloads = [message.payload for message in found.messages]
        if not payloads:
            break
        if found.deliveries > 4:
            alone.append((payloads, found.deliveries))
            kit.commit(tx)
        elif b"5" in payloads:
            kit.roll_back(tx)
        else:
            processed += payloads
            kit.commit(tx)
    assert alone == [([b"5"], 5)]
    assert processed == [b"%d" % number for number in range(8) if number != 5]


def test_poll_of_two_groups_gives_each_every_message(kit: GroupKit) -> None:
    kit.publish(b"a")
    kit.service.consumers.put(ORDERS, "mail", READ_NONE)
    one, two = kit.begin(), kit.begin()
    assert kit.poll(one) == kit.poll(two, group="mail") == [b"a"]


def test_poll_in_order_waits_for_a_transaction_in_progress(kit: GroupKit) -> None:
    producer = kit.begin()
    kit.publish(b"a")
    kit.publish(b"b", tx=producer)
    kit.publish(b"c")
    assert kit.process() == [b"a"]
    assert kit.ask(kit.begin())[:4] == ([], 0, None, None)
    kit.commit(producer)
    assert kit.poll(kit.begin()) == [b"b", b"c"]


def test_base_moves_past_messages_of_invalid_transactions(kit: GroupKit) -> None:
    producer = kit.begin()
    kit.publish(b"a", b"b", tx=producer)
    kit.time_out(producer)
    found = kit.ask(kit.begin())
    assert found.messages == []
    assert found.position is not None
    assert kit.base() == kit.ids()[-1]


def test_poll_of_stored_payloads_continues_inside_after_a_limit(kit: GroupKit) -> None:
    producer = kit.begin()
    kit.service.store(ORDERS, [b"a", b"b", b"c"], pointer=producer.write_pointer)
    kit.publish(tx=producer)
    kit.commit(producer)
    kit.publish(b"d")
    for expected in ([b"a", b"b"], [b"c", b"d"], []):
        assert kit.process(2) == expected


def test_poll_after_a_restart_keeps_claims_and_position(kit: GroupKit) -> None:
    kit.publish(b"a", b"b", b"c")
    one = kit.begin()
    assert kit.poll(one, 1) == [b"a"]
    kit.restart()
    assert kit.ask(kit.begin()).held == one.transaction_id
    kit.commit(one)
    kit.restart()
    assert kit.poll(kit.begin()) == [b"b", b"c"]


# --- without an order ------------------------------------------------------------------------------------------------


def test_poll_without_order_shares_messages_among_transactions(kit: GroupKit) -> None:
    kit.publish(b"a", b"b", b"c")
    one, two, three = kit.begin(), kit.begin(), kit.begin()
    assert (kit.any(one, 1), kit.any(two, 1), kit.any(three, 5)) == ([b"a"], [b"b"], [b"c"])
    kit.commit(two)
    kit.roll_back(one)
    assert kit.process(order=Order.NONE) == [b"a"]
    kit.commit(three)
    assert kit.any(kit.begin()) == []
    assert kit.base() == kit.ids()[-1]
    assert kit.claims() == []


@pytest.mark.parametrize("cached", [True, False])
def test_poll_without_order_skips_undecided_messages_until_decided(kit: GroupKit, cached: bool) -> None:
    producers = [kit.begin() for _ in range(2)]
    kit.publish(b"a")
    kit.publish(b"1", b"1", tx=producers[0])
    kit.publish(b"b")
    kit.publish(b"2", tx=producers[1])
    kit.publish(b"c")
    if not cached:
        kit.restart()
    one = kit.begin()
    assert kit.any(one, 2) == [b"a", b"b"]
    assert kit.any(one, 5) == [b"c"]
    assert len(kit.claims()) == 3
    assert kit.any(one) == []
    kit.commit(one)
    kit.commit(producers[0])
    kit.time_out(producers[1])
    assert kit.process(order=Order.NONE) == [b"1", b"1"]
    assert kit.any(kit.begin()) == []
    assert (kit.claims(), kit.base()) == ([], kit.ids()[-1])


# --- messages that failed --------------------------------------------------------------------------------------------


def test_poll_of_a_failed_batch_waits_longer_after_each_failure(kit: GroupKit) -> None:
    kit.restart(retry_seconds=2, longest_retry_seconds=7)
    kit.publish(b"bad")
    waits = []
    for _ in range(4):
        assert kit.fail(order=Order.NONE) == [b"bad"]
        failed_ms = kit.clock.now_ms()
        while not (found := kit.ask(tx := kit.begin(), order=Order.NONE)).messages:
            assert found.wait_ms is not None
            kit.manager.abort(tx)
            kit.clock.advance(found.wait_ms)
        kit.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, READ_NONE)
        kit.manager.abort(tx)
        waits.append((kit.clock.now_ms() - failed_ms) / SECOND)
    # The delay is rounded up by at most a quarter.
    assert [least <= wait <= least * 1.25 for least, wait in zip((2, 4, 7, 7), waits, strict=True)] == [True] * 4, waits


@pytest.mark.parametrize("end", ["rolled back", "timed out"])
def test_poll_without_order_returns_others_while_failed_messages_wait(kit: GroupKit, end: str) -> None:
    kit.restart(retry_seconds=10)
    kit.publish(b"bad", b"good")
    one = kit.begin()
    assert kit.any(one, 1) == [b"bad"]
    kit.roll_back(one) if end == "rolled back" else kit.time_out(one)
    assert kit.process(order=Order.NONE) == [b"good"]
    kit.publish(b"new")
    assert kit.process(order=Order.NONE) == [b"new"]
    found = kit.ask(kit.begin(), order=Order.NONE)
    assert (found.messages, found.at_end) == ([], False)
    # From this position, a plain poll waits for new messages until the retry time.
    assert found.position is not None
    assert found.position > kit.ids()[-1]
    kit.clock.advance(13 * SECOND)
    assert kit.any(kit.begin()) == [b"bad"]


def test_poll_in_order_gives_nothing_while_the_first_message_waits(kit: GroupKit) -> None:
    kit.restart(retry_seconds=10)
    kit.publish(b"bad", b"good")
    assert kit.fail(1) == [b"bad"]
    found = kit.ask(kit.begin())
    assert (found.messages, found.held, found.position, found.at_end) == ([], None, None, False)
    assert found.wait_ms is not None
    assert 10 * SECOND <= found.wait_ms <= 12.5 * SECOND
    kit.clock.advance(found.wait_ms)
    assert kit.process(1) == [b"bad"]
    assert kit.poll(kit.begin()) == [b"good"]


def test_poll_of_a_poison_message_processes_all_others_in_few_attempts(kit: GroupKit) -> None:
    kit.restart(retry_seconds=1, longest_retry_seconds=60)
    kit.publish(*(b"%d" % number for number in range(1000)))
    processed: list[bytes] = []
    attempts = 0
    ends_ms = kit.clock.now_ms() + 600 * SECOND
    while kit.clock.now_ms() < ends_ms:
        tx = kit.begin()
        payloads = kit.any(tx, 500)
        if b"13" in payloads:
            attempts += 1
            kit.roll_back(tx)
        else:
            processed += payloads
            kit.commit(tx)
        kit.clock.advance(100)
    assert sorted(processed, key=int) == [b"%d" % number for number in range(1000) if number != 13]
    assert attempts < 30


def test_poll_of_failed_messages_after_a_restart_still_waits(kit: GroupKit) -> None:
    kit.restart(retry_seconds=10)
    kit.publish(b"bad")
    kit.fail(order=Order.NONE)
    kit.restart()
    assert kit.any(kit.begin()) == []
    kit.clock.advance(13 * SECOND)
    assert kit.any(kit.begin()) == [b"bad"]


def test_poll_after_the_clock_went_back_by_days_does_not_wait_for_them(kit: GroupKit) -> None:
    kit.restart(retry_seconds=10)
    kit.publish(b"bad")
    kit.clock.advance(HOUR // 2)
    kit.fail(order=Order.NONE)
    kit.service.close()
    kit.clock.step(-HOUR // 4)
    kit.restart()
    assert kit.any(kit.begin()) == [b"bad"]


@pytest.mark.parametrize("order", list(Order))
def test_poll_of_a_sealed_topic_is_not_drained_while_messages_wait(kit: GroupKit, order: Order) -> None:
    kit.restart(retry_seconds=10)
    kit.publish(b"bad")
    assert kit.fail(order=order) == [b"bad"]
    kit.service.update_topic(ORDERS, {"partitions": "2"})
    found = kit.ask(kit.begin(), order=order)
    assert (found.sealed, found.drained) == (True, False)
    kit.clock.advance(13 * SECOND)
    assert kit.process(order=order) == [b"bad"]
    found = kit.ask(kit.begin(), order=order)
    assert (found.sealed, found.drained) == (True, True)


def test_unprocessed_messages_of_a_rollback_do_not_wait(kit: GroupKit) -> None:
    kit.restart(retry_seconds=10)
    kit.publish(b"a", b"b")
    one = kit.begin()
    assert kit.any(one) == [b"a", b"b"]
    kit.service.groups.roll_back(ORDERS, GROUP, one.transaction_id, kit.ids()[0])
    kit.commit(one)
    found = kit.ask(kit.begin(), order=Order.NONE)
    assert ([message.payload for message in found.messages], found.deliveries) == ([b"b"], 1)


def test_transaction_gets_no_message_before_its_read_messages(kit: GroupKit) -> None:
    kit.publish(b"a", b"b")
    one, two = kit.begin(), kit.begin()
    assert (kit.any(one, 1), kit.any(two, 1)) == ([b"a"], [b"b"])
    kit.roll_back(one)
    assert kit.ask(two, order=Order.NONE).messages == []
    assert kit.any(kit.begin()) == [b"a"]


@pytest.mark.parametrize("end", ["given back", "failed"])
@pytest.mark.parametrize("order", list(Order))
def test_poll_after_many_batches_came_back_gives_them_together(kit: GroupKit, end: str, order: Order) -> None:
    kit.publish(*(b"%d" % number for number in range(2000)))
    opened = []
    for number in range(400):
        tx = kit.begin()
        kit.any(tx, 5)
        if number % 2:
            kit.commit(tx)
        else:
            opened.append(tx)
    for tx in opened:
        if end == "failed":
            kit.roll_back(tx)
        else:
            kit.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, READ_NONE)
            kit.manager.abort(tx)
    found: list[bytes] = []
    polls = 0
    while payloads := kit.poll(tx := kit.begin(), 500, order=order):
        kit.commit(tx)
        found += payloads
        polls += 1
    assert sorted(found, key=int) == [b"%d" % number for number in range(2000) if number % 10 < 5]
    assert order is Order.NONE or found == sorted(found, key=int)
    # A poll returns half of the failed batches; in order, one response cannot have more.
    assert polls <= (2 if end == "given back" else 600 if order is Order.PARTITION else 20)


def test_poll_without_waits_gives_others_every_other_time(kit: GroupKit) -> None:
    kit.publish(b"bad", b"worse", *(b"%d" % number for number in range(20)))
    failed, done = Counter[bytes](), list[bytes]()
    for _ in range(60):
        payloads = kit.any(tx := kit.begin(), 1)
        if payloads[0] in (b"bad", b"worse"):
            failed.update(payloads)
            kit.roll_back(tx)
        else:
            done += payloads
            kit.commit(tx)
    assert done == [b"%d" % number for number in range(20)]
    assert min(failed.values()) >= 18


def test_poll_of_batches_that_failed_next_to_each_other_gives_half_of_the_limit(kit: GroupKit) -> None:
    kit.publish(*(b"%d" % number for number in range(1000)))
    opened = [kit.begin() for _ in range(200)]
    for tx in opened:
        assert len(kit.any(tx, 5)) == 5
    for tx in opened:
        kit.roll_back(tx)
    sizes = []
    while payloads := kit.any(tx := kit.begin(), 500):
        kit.commit(tx)
        sizes.append(len(payloads))
    assert sizes == [250] * 4


def test_an_outage_in_which_all_batches_fail_leaves_few_marks(kit: GroupKit) -> None:
    kit.restart(retry_seconds=8)
    kit.publish(*(b"%d" % number for number in range(1000)))
    for _ in range(200):
        kit.fail(5, order=Order.NONE)
        kit.clock.advance(10)
    assert len(kit.claims()) <= 4


def test_failed_messages_are_logged_and_shown_with_their_count(kit: GroupKit, caplog: pytest.LogCaptureFixture) -> None:
    kit.restart(retry_seconds=10)
    kit.publish(b"good", b"bad", b"other")
    [_, bad, other] = kit.ids()
    assert kit.process(1, order=Order.NONE) == [b"good"]
    assert kit.fail(2, order=Order.NONE) == [b"bad", b"other"]
    [both] = kit.service.groups.failed(ORDERS, GROUP)
    assert (both.message, both.mark.last, both.mark.tries) == (None, other, 1)
    assert kit.ask(kit.begin(), order=Order.NONE).messages == []
    kit.clock.advance(30 * SECOND)
    three = kit.begin()
    assert kit.any(three, 2) == [b"bad"]
    kit.time_out(three)
    assert kit.fail(1, order=Order.NONE) == [b"other"]
    assert f"message {bad} of default:orders has failed 2 times for consumer billing" in caplog.text
    assert [(one.message, one.mark.tries) for one in kit.service.groups.failed(ORDERS, GROUP)] == [(bad, 2), (other, 2)]
    assert all(one.mark.retry_ms > kit.clock.now_ms() for one in kit.service.groups.failed(ORDERS, GROUP))


def test_roll_back_of_a_message_given_alone_logs_its_failure(kit: GroupKit, caplog: pytest.LogCaptureFixture) -> None:
    kit.publish(b"bad")
    for _ in range(2):
        assert kit.fail() == [b"bad"]
    assert f"message {kit.ids()[0]} of default:orders has failed 2 times for consumer billing" in caplog.text


# --- cost of a poll --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "roll_back"])
def test_turn_with_400_claims_touches_few_rows(kit: GroupKit, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    kit.publish(*(b"%d" % number for number in range(5000)))
    touched: list[int] = []
    rows, get, exchange = kit.side.rows, kit.side.get, kit.side.exchange

    def counted_rows(*given: Any) -> Any:
        page = rows(*given)
        touched.append(1 + len(page.items))
        return page

    def counted_get(key: bytes) -> bytes | None:
        touched.append(1)
        return get(key)

    def counted_exchange(key: bytes, expected: Any, value: bytes, puts: Any = (), deletes: Any = ()) -> bool:
        touched.append(1 + len(puts) + len(deletes))
        return exchange(key, expected, value, puts, deletes)

    monkeypatch.setattr(kit.side, "rows", counted_rows)
    monkeypatch.setattr(kit.side, "get", counted_get)
    monkeypatch.setattr(kit.side, "exchange", counted_exchange)
    costs, opened = [], 0
    for number in (10, 400):
        for _ in range(number - opened):
            assert kit.any(kit.begin(timeout_seconds=3000), 5)
        opened = number
        for _ in range(2):
            touched.clear()
            tx = kit.begin()
            assert kit.any(tx, 5)
            getattr(kit, end)(tx)
            cost = sum(touched)
        costs.append(cost)
    few, many = costs
    assert many <= 2 * few


def test_poll_after_claims_were_freed_gives_their_messages_again(kit: GroupKit) -> None:
    kit.publish(b"a")
    one = kit.begin()
    assert kit.any(one) == [b"a"]
    kit.time_out(one)
    assert release_void_claims(kit.side, lambda pointer: pointer == one.transaction_id, lambda _: False) == 1
    kit.manager.truncate_invalid([one.transaction_id])
    assert kit.any(kit.begin()) == [b"a"]


# --- a position set by hand ------------------------------------------------------------------------------------------


def test_put_of_a_position_with_an_open_claim_needs_force(kit: GroupKit) -> None:
    kit.publish(b"a", b"b")
    one = kit.begin()
    kit.poll(one)
    consumers = kit.service.consumers
    with pytest.raises(ConsumerConflict, match=str(one.transaction_id)):
        consumers.put(ORDERS, GROUP, READ_NONE)
    with pytest.raises(ConsumerConflict, match=str(one.transaction_id)):
        consumers.delete(ORDERS, GROUP)
    assert [claim.pointer for claim in consumers.claims(ORDERS, GROUP)] == [one.transaction_id]
    consumers.put(ORDERS, GROUP, kit.ids()[0], force=True)
    assert kit.manager.status(one.transaction_id) == "invalid"
    assert kit.claims() == []
    assert kit.poll(kit.begin()) == [b"b"]


# --- traps -----------------------------------------------------------------------------------------------------------


def test_trap_a_roll_back_frees_the_claim_before_the_abort(kit: GroupKit) -> None:
    kit.publish(b"a")
    one = kit.begin()
    kit.poll(one)
    kit.service.groups.roll_back(ORDERS, GROUP, one.transaction_id)
    assert [claim.pointer for claim in kit.claims()] == [0]
    kit.manager.abort(one)
    # Readers consider the pointer of an aborted transaction committed.
    assert kit.begin().is_visible(one.transaction_id)
    kit.restart()
    assert kit.poll(kit.begin()) == [b"a"]


def test_trap_a_roll_back_after_the_commit_is_rejected(kit: GroupKit) -> None:
    kit.publish(b"a")
    one = kit.begin()
    kit.poll(one)
    kit.commit(one)
    with pytest.raises(ConsumerConflict, match="has ended"):
        kit.service.groups.roll_back(ORDERS, GROUP, one.transaction_id)
    assert kit.poll(kit.begin()) == []
    # After the end of the claim, another rollback has no effect.
    kit.service.groups.roll_back(ORDERS, GROUP, one.transaction_id)


@pytest.mark.parametrize("consumer", ["plain", "base", "claim"])
def test_trap_d_new_ids_after_the_deletion_of_all_rows_follow_every_position(kit: GroupKit, consumer: str) -> None:
    kit.publish(b"old")
    (read,) = kit.ids()
    if consumer == "plain":
        kit.service.consumers.put(ORDERS, "plain", read)
    else:
        one = kit.begin()
        assert kit.poll(one) == [b"old"]
        if consumer == "base":
            kit.commit(one)
            assert kit.poll(kit.begin()) == []
            assert kit.claims() == []
    kit.store.message.delete(kit.store.message.read(KEYS, b"", None, 10).items)
    kit.service.close()
    kit.clock.step(-5 * SECOND)
    kit.service = kit.serve()
    kit.publish(b"new")
    (new,) = kit.ids()
    assert new > read
    if consumer == "plain":
        assert read_payloads(kit.service, ORDERS, read, inclusive=False) == [b"new"]
    elif consumer == "base":
        assert kit.poll(kit.begin()) == [b"new"]


def test_trap_d_position_ahead_of_the_topic_precedes_new_ids(kit: GroupKit) -> None:
    ahead = MessageId(NOW_MS + 2 * SECOND, 7)
    kit.service.consumers.put(ORDERS, GROUP, ahead)
    kit.publish(b"a")
    assert kit.ids() == [MessageId(NOW_MS + 2 * SECOND, 8)]


def test_position_in_the_future_skips_messages_until_then(kit: GroupKit) -> None:
    kit.service.consumers.put(ORDERS, GROUP, MessageId(NOW_MS + HOUR, 0))
    kit.publish(b"a")
    kit.restart()
    kit.publish(b"b")
    assert [one.publish_ms for one in kit.ids()] == [NOW_MS, NOW_MS]
    assert kit.poll(kit.begin()) == []


def test_trap_e_poll_of_an_ended_or_too_old_transaction_claims_nothing(kit: GroupKit) -> None:
    kit.publish(b"a")
    late = kit.begin(timeout_seconds=10 * 3600)
    ended, unknown = kit.begin(), Transaction(5, 7, 7)
    kit.commit(ended)
    kit.clock.advance(HOUR - 1)
    assert transaction_ms(late.transaction_id) == NOW_MS
    assert kit.poll(late) == [b"a"]
    kit.roll_back(late)
    late = kit.begin(timeout_seconds=10 * 3600)
    kit.clock.advance(HOUR)
    for tx, reason in ((late, "older than 3600 s"), (ended, "older|not in progress"), (unknown, "older")):
        with pytest.raises(ConsumerConflict, match=reason):
            kit.poll(tx)
    with pytest.raises(ConsumerConflict, match="not in progress"):
        kit.poll(Transaction(1, late.transaction_id + HOUR * 1_000_000, 1))
    assert [claim.pointer for claim in kit.claims()] == [0]


def test_poll_of_a_transaction_that_ends_takes_its_claim_back(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.publish(b"a")
    one = kit.begin()
    act_before(monkeypatch, kit.side, "exchange", lambda: kit.time_out(one))
    with pytest.raises(ConsumerConflict, match="not in progress"):
        kit.poll(one)
    # It is not a delivery, so it leaves no mark.
    assert kit.claims() == []


def test_poll_of_a_transaction_that_ends_before_its_claim_writes_none(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.publish(b"a")
    one = kit.begin()
    act_before(monkeypatch, kit.service.consumers, "lock", lambda: kit.manager.abort(one))
    monkeypatch.setattr(kit.side, "exchange", raising(AssertionError("a claim is written")))
    with pytest.raises(ConsumerConflict, match="not in progress"):
        kit.poll(one)


@pytest.mark.parametrize("end", ["abort", "commit"])
def test_poll_without_a_response_keeps_messages_once(kit: GroupKit, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    kit.publish(b"a", b"b", b"c")
    one = kit.begin()
    assert kit.poll(one, 1) == [b"a"]
    # A rollback before the claim of this poll has found no claim.
    stop = kit.manager.abort if end == "abort" else kit.commit
    act_before(monkeypatch, kit.side, "exchange", lambda: stop(one))
    with pytest.raises(ConsumerConflict, match="not in progress"):
        kit.poll(one, 1)
    found: list[bytes] = []
    while payloads := kit.poll(two := kit.begin()):
        found += payloads
        kit.commit(two)
    assert found == ([b"a", b"b", b"c"] if end == "abort" else [b"b", b"c"])


def test_trap_g_recreated_topic_has_no_claims(kit: GroupKit) -> None:
    kit.publish(b"a")
    kit.poll(kit.begin())
    kit.service.delete_topic(ORDERS)
    kit.service.create_topic(ORDERS)
    with pytest.raises(ConsumerNotFound):
        kit.poll(kit.begin())
    with pytest.raises(ConsumerNotFound):
        kit.service.groups.failed(ORDERS, GROUP)
    kit.service.consumers.put(ORDERS, GROUP, READ_NONE)
    assert kit.claims() == []
    kit.publish(b"b")
    assert kit.poll(kit.begin()) == [b"b"]


def test_trap_c_late_claim_of_a_previous_server_is_rejected(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.publish(b"a")
    kit.roll_back(kit.begin())
    next_one, one, two = kit.serve(), kit.begin(), kit.begin()
    found = []

    def poll_first() -> None:
        kit.clock.advance(-SECOND)
        found.extend(next_one.groups.poll(ORDERS, GROUP, GroupPoll(two, 10)).messages)

    act_before(monkeypatch, kit.side, "exchange", poll_first)
    with pytest.raises(Unavailable, match=GROUP):
        kit.poll(one)
    assert [message.payload for message in found] == [b"a"]
    assert [claim.pointer for claim in kit.claims()] == [two.transaction_id]
    next_one.close()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_poll_with_a_failing_side_table_claims_nothing(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.publish(b"a")
    with monkeypatch.context() as broken:
        broken.setattr(kit.side, "exchange", raising(StoreError("broken")))
        with pytest.raises(StoreError):
            kit.poll(kit.begin())
    monkeypatch.setattr(kit.side, "exchange", lambda *_: False)
    with pytest.raises(Unavailable, match=GROUP):
        kit.poll(kit.begin())
    assert kit.claims() == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *(({"limit": 0}, "at least 1"), ({"max_deliveries": 0}, "at least 1")),
        *(({"group": "a\0b"}, r"'a\\x00b'"), ({"group": "x" * 10_240}, "'xxx")),
    ],
)
def test_poll_with_bad_input_claims_nothing(kit: GroupKit, options: dict[str, Any], reason: str) -> None:
    kit.publish(b"a")
    with pytest.raises(BadRequest, match=reason):
        kit.poll(kit.begin(), **options)
    assert kit.claims() == []


def test_poll_and_roll_back_of_missing_objects_are_rejected(kit: GroupKit) -> None:
    groups = kit.service.groups
    with pytest.raises(ConsumerNotFound):
        kit.poll(kit.begin(), group="mail")
    with pytest.raises(BadRequest, match="not a transaction"):
        kit.poll(Transaction(1, -1, -1))
    with pytest.raises(BadRequest, match=r"^0 "):
        groups.roll_back(ORDERS, GROUP, 0)
    with pytest.raises(TopicNotFound):
        groups.roll_back(TopicId("default", "gone"), GROUP, 1)


def test_poll_with_the_largest_limit_still_limits_bytes(kit: GroupKit) -> None:
    kit.publish(*[b"x" * 1000] * 50)
    found = kit.ask(kit.begin(), 2**31 - 1, limit_bytes=10_000, order=Order.NONE)
    assert len(found.messages) == 8


def test_poll_of_an_idle_group_has_the_next_position(kit: GroupKit) -> None:
    empty = kit.ask(kit.begin()).position
    kit.publish(b"a")
    kit.process()
    last_position = kit.ask(kit.begin()).position
    kit.clock.advance(MINUTE)
    kit.publish(b"b")
    assert empty is not None
    assert last_position is not None
    assert position(empty.publish_ms, empty.sequence) <= position(*kit.ids()[0][:2])
    assert read_payloads(kit.service, ORDERS, last_position) == [b"b"]


def test_groups_without_claims_take_bounded_memory(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_MAX_ROWS", 10)
    for number in range(40):
        kit.service.consumers.put(ORDERS, f"g{number}", READ_NONE)
        assert not kit.ask(kit.begin(), group=f"g{number}").messages
        kit.service.consumers.delete(ORDERS, f"g{number}")
    assert len(kit.service.groups._rows) <= 10
