"""Consumer groups: what is given out to which transaction, and what that comes to when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import HOUR, MINUTE, NOW_MS, SECOND
from tests.messaging.group_desk import GROUP, ORDERS, READ_NONE, GroupDesk, opened
from tests.support import raising
from tms_core.consumers.claim_rows import free_void
from tms_core.errors import BadRequest, ConsumerConflict, ConsumerNotFound, StoreError, TopicNotFound, Unavailable
from tms_core.messaging.groups import claims as groups
from tms_core.messaging.groups.claims import GroupPoll, Order
from tms_core.messaging.ids import position
from tms_core.messaging.model import FetchRequest
from tms_core.rowkey import MessageId
from tms_core.tables.base import KEYS
from tms_core.topic import TopicId
from tms_core.transaction.model import Transaction, transaction_ms


@pytest.fixture(params=["memory", "leveldb"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupDesk]:
    with opened(request.param, tmp_path) as made:
        yield made


# --- in order --------------------------------------------------------------------------------------------------------


def test_given_a_committed_transaction_when_the_next_one_polls_then_it_goes_on_behind_it(desk: GroupDesk) -> None:
    desk.publish(b"a", b"b", b"c")
    one = desk.begin()
    assert desk.poll(one, 2) == [b"a", b"b"]
    desk.commit(one)
    two = desk.begin()
    assert desk.poll(two, 2) == [b"c"]
    desk.commit(two)
    assert desk.poll(desk.begin()) == []
    assert desk.claims() == []
    assert desk.base() == desk.ids()[-1]


def test_given_an_open_claim_when_another_transaction_polls_in_order_then_it_is_told_which_one_holds_it(
    desk: GroupDesk,
) -> None:
    desk.publish(b"a", b"b")
    one, two = desk.begin(), desk.begin()
    assert desk.poll(one, 1) == [b"a"]
    assert desk.ask(two)[:4] == ([], 0, one.transaction_id, None)
    # The same transaction goes on behind its own claim.
    assert desk.poll(one, 1) == [b"b"]
    assert [claim.pointer for claim in desk.claims()] == [one.transaction_id] * 2


def test_given_a_transaction_that_began_before_another_one_was_committed_then_it_does_not_build_upon_that(
    desk: GroupDesk,
) -> None:
    desk.publish(b"a", b"b")
    early, one = desk.begin(), desk.begin()
    assert desk.poll(one, 1) == [b"a"]
    desk.commit(one)
    assert desk.ask(early).held == one.transaction_id
    # Also when a third one has merged the claim into the base.
    third = desk.begin()
    assert desk.poll(third, 1) == [b"b"]
    desk.roll_back(third)
    assert desk.base() == desk.ids()[0]
    assert desk.ask(early).held == one.transaction_id


def test_given_a_server_that_was_started_anew_when_a_group_has_moved_since_a_transaction_began_then_it_is_given_nothing(
    desk: GroupDesk,
) -> None:
    desk.publish(b"a", b"b", b"c")
    early, one = desk.begin(), desk.begin()
    assert desk.poll(one, 1) == [b"a"]
    desk.commit(one)
    third = desk.begin()
    assert desk.poll(third, 1) == [b"b"]
    desk.restart()
    # Which transaction was merged into the base is not known any more; its own claims tell the third one enough.
    assert desk.ask(early).held == early.transaction_id
    assert desk.poll(third, 1) == [b"c"]
    desk.roll_back(third)
    assert desk.ask(early).held is not None
    desk.clock.advance(1)
    assert desk.poll(desk.begin(), 1) == [b"b"]


def test_given_a_server_that_was_started_anew_when_a_group_has_not_moved_since_then_a_transaction_goes_on(
    desk: GroupDesk,
) -> None:
    desk.publish(b"a")
    desk.clock.advance(1)
    reader = desk.begin()
    desk.clock.advance(1)
    desk.restart()
    assert desk.poll(reader) == [b"a"]


def test_given_more_groups_than_are_remembered_then_a_transaction_that_began_before_builds_upon_none(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "KNOWN_GROUPS", 1)
    desk.publish(b"a", b"b")
    early, one = desk.begin(), desk.begin()
    assert desk.poll(one, 1) == [b"a"]
    desk.commit(one)
    third = desk.begin()
    assert desk.poll(third, 1) == [b"b"]
    desk.roll_back(third)
    assert desk.ask(early).held == one.transaction_id
    desk.service.consumers.put(ORDERS, "other", READ_NONE)
    for expected in ([b"a"], [b"b"]):
        other = desk.begin()
        assert desk.poll(other, 1, group="other") == expected
        desk.commit(other)
    assert desk.ask(early).held == early.transaction_id
    assert desk.poll(desk.begin(), 1) == [b"b"]


@pytest.mark.parametrize("end", ["rolled back", "invalidated", "timed out"])
def test_given_a_transaction_that_failed_then_its_messages_come_again_at_once_and_fewer_together(
    desk: GroupDesk, end: str
) -> None:
    desk.publish(*(b"%d" % number for number in range(6)))
    one = desk.begin(timeout_seconds=10)
    assert len(desk.poll(one, 4)) == 4
    if end == "rolled back":
        desk.roll_back(one)
    elif end == "invalidated":
        desk.time_out(one)
    else:
        desk.clock.advance(11 * SECOND)
        desk.manager.expire()
    two = desk.begin()
    found = desk.ask(two, 4)
    assert ([message.payload for message in found.messages], found.deliveries) == ([b"0", b"1"], 2)
    desk.commit(two)
    # The rest of the claim that failed has been given out once.
    third = desk.begin()
    found = desk.ask(third, 4)
    assert ([message.payload for message in found.messages], found.deliveries) == ([b"2", b"3"], 2)
    desk.commit(third)
    found = desk.ask(desk.begin(), 4)
    assert ([message.payload for message in found.messages], found.deliveries) == ([b"4", b"5"], 1)


@pytest.mark.parametrize("end", ["timed out", "invalidated", "rolled back"])
def test_poll_after_the_server_died_counts_only_what_the_program_gave_back(desk: GroupDesk, end: str) -> None:
    desk.publish(*(b"%d" % number for number in range(4)))
    one = desk.begin(timeout_seconds=10)
    assert len(desk.poll(one, 4)) == 4
    desk.restart()
    if end == "rolled back":
        desk.roll_back(one)
    elif end == "invalidated":
        desk.time_out(one)
    else:
        desk.clock.advance(11 * SECOND)
        desk.manager.expire()
    found = desk.ask(desk.begin(), 4)
    assert (len(found.messages), found.deliveries) == ((2, 2) if end == "rolled back" else (4, 1))


def test_poll_after_claims_failed_before_and_after_a_restart_counts_the_latter(desk: GroupDesk) -> None:
    desk.publish(b"a")
    for deliveries, restarts in ((1, True), (1, False), (2, True), (2, False), (3, False)):
        tx = desk.begin()
        assert desk.ask(tx).deliveries == deliveries
        if restarts:
            desk.restart()
        desk.time_out(tx)


def test_given_a_message_that_always_fails_then_it_ends_up_alone_when_it_is_given_out_for_the_last_time(
    desk: GroupDesk,
) -> None:
    desk.publish(*(b"%d" % number for number in range(8)))
    processed: list[bytes] = []
    alone: list[tuple[list[bytes], int]] = []
    for _ in range(30):
        tx = desk.begin()
        found = desk.ask(tx, 8, max_deliveries=4)
        payloads = [message.payload for message in found.messages]
        if not payloads:
            break
        if found.deliveries > 4:
            alone.append((payloads, found.deliveries))
            desk.commit(tx)
        elif b"5" in payloads:
            desk.roll_back(tx)
        else:
            processed += payloads
            desk.commit(tx)
    assert alone == [([b"5"], 5)]
    assert processed == [b"%d" % number for number in range(8) if number != 5]


def test_given_groups_of_one_topic_then_each_gets_every_message(desk: GroupDesk) -> None:
    desk.publish(b"a")
    desk.service.consumers.put(ORDERS, "mail", READ_NONE)
    one, two = desk.begin(), desk.begin()
    assert desk.poll(one) == desk.poll(two, group="mail") == [b"a"]


def test_given_a_transaction_in_progress_then_what_lies_behind_its_messages_waits_for_it(desk: GroupDesk) -> None:
    producer = desk.begin()
    desk.publish(b"a")
    desk.publish(b"b", tx=producer)
    desk.publish(b"c")
    one = desk.begin()
    assert desk.poll(one) == [b"a"]
    desk.commit(one)
    assert desk.ask(desk.begin())[:4] == ([], 0, None, None)
    desk.commit(producer)
    assert desk.poll(desk.begin()) == [b"b", b"c"]


def test_given_messages_that_will_never_be_seen_then_the_base_goes_on_over_them(desk: GroupDesk) -> None:
    producer = desk.begin()
    desk.publish(b"a", b"b", tx=producer)
    desk.time_out(producer)
    found = desk.ask(desk.begin())
    assert found.messages == []
    assert found.position is not None
    assert desk.base() == desk.ids()[-1]


def test_given_stored_payloads_when_a_limit_ends_among_them_then_the_group_goes_on_inside(desk: GroupDesk) -> None:
    producer = desk.begin()
    desk.service.store(ORDERS, [b"a", b"b", b"c"], pointer=producer.write_pointer)
    desk.publish(tx=producer)
    desk.commit(producer)
    desk.publish(b"d")
    for expected in ([b"a", b"b"], [b"c", b"d"], []):
        tx = desk.begin()
        assert desk.poll(tx, 2) == expected
        desk.commit(tx)


def test_given_a_group_that_is_served_anew_then_nothing_is_forgotten(desk: GroupDesk) -> None:
    desk.publish(b"a", b"b", b"c")
    one = desk.begin()
    assert desk.poll(one, 1) == [b"a"]
    desk.restart()
    assert desk.ask(desk.begin()).held == one.transaction_id
    desk.commit(one)
    desk.restart()
    assert desk.poll(desk.begin()) == [b"b", b"c"]


# --- without an order ------------------------------------------------------------------------------------------------


def test_given_no_order_then_transactions_share_the_messages(desk: GroupDesk) -> None:
    desk.publish(b"a", b"b", b"c")
    one, two, three = desk.begin(), desk.begin(), desk.begin()
    assert (desk.any(one, 1), desk.any(two, 1), desk.any(three, 5)) == ([b"a"], [b"b"], [b"c"])
    desk.commit(two)
    desk.roll_back(one)
    four = desk.begin()
    assert desk.any(four) == [b"a"]
    desk.commit(four)
    desk.commit(three)
    assert desk.any(desk.begin()) == []
    assert desk.base() == desk.ids()[-1]
    assert desk.claims() == []


def test_given_a_claim_of_another_one_when_nothing_else_is_there_then_no_answer_says_to_wait_for_a_message(
    desk: GroupDesk,
) -> None:
    desk.publish(b"a")
    one = desk.begin()
    assert desk.any(one) == [b"a"]
    assert desk.ask(desk.begin(), order=Order.NONE).position is None
    desk.time_out(one)
    assert desk.any(desk.begin()) == [b"a"]


@pytest.mark.parametrize("cached", [True, False])
def test_given_no_order_when_something_is_not_decided_then_it_is_left_out_and_comes_later(
    desk: GroupDesk, cached: bool
) -> None:
    producers = [desk.begin() for _ in range(2)]
    desk.publish(b"a")
    desk.publish(b"1", b"1", tx=producers[0])
    desk.publish(b"b")
    desk.publish(b"2", tx=producers[1])
    desk.publish(b"c")
    if not cached:
        desk.restart()
    one = desk.begin()
    assert desk.any(one, 2) == [b"a", b"b"]
    assert desk.any(one, 5) == [b"c"]
    assert len(desk.claims()) == 3
    assert desk.any(one) == []
    desk.commit(one)
    desk.commit(producers[0])
    desk.time_out(producers[1])
    two = desk.begin()
    assert desk.any(two) == [b"1", b"1"]
    desk.commit(two)
    assert desk.any(desk.begin()) == []
    assert (desk.claims(), desk.base()) == ([], desk.ids()[-1])


# --- messages that failed -------------------------------------------------------------------------------------------


def test_poll_of_a_failed_batch_waits_longer_after_each_failure(desk: GroupDesk) -> None:
    desk.restart(retry_seconds=2, longest_retry_seconds=7)
    desk.publish(b"bad")
    waits = []
    for _ in range(4):
        tx = desk.begin()
        assert desk.any(tx) == [b"bad"]
        desk.roll_back(tx)
        failed_ms = desk.clock.now_ms()
        while not (found := desk.ask(tx := desk.begin(), order=Order.NONE)).messages:
            assert found.wait_ms is not None
            desk.manager.abort(tx)
            desk.clock.advance(found.wait_ms)
        desk.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, READ_NONE)
        desk.manager.abort(tx)
        waits.append((desk.clock.now_ms() - failed_ms) / SECOND)
    # Rounded up by a quarter at most.
    assert [least <= wait <= least * 1.25 for least, wait in zip((2, 4, 7, 7), waits, strict=True)] == [True] * 4, waits


@pytest.mark.parametrize("end", ["rolled back", "timed out"])
def test_poll_without_order_gives_other_messages_while_failed_ones_wait(desk: GroupDesk, end: str) -> None:
    desk.restart(retry_seconds=10)
    desk.publish(b"bad", b"good")
    one = desk.begin()
    assert desk.any(one, 1) == [b"bad"]
    desk.roll_back(one) if end == "rolled back" else desk.time_out(one)
    two = desk.begin()
    assert desk.any(two) == [b"good"]
    desk.commit(two)
    desk.publish(b"new")
    three = desk.begin()
    assert desk.any(three) == [b"new"]
    desk.commit(three)
    found = desk.ask(desk.begin(), order=Order.NONE)
    assert (found.messages, found.at_end) == ([], False)
    # From there a plain poll waits for new messages, and no longer than that.
    assert found.position is not None
    assert found.position > desk.ids()[-1]
    desk.clock.advance(13 * SECOND)
    assert desk.any(desk.begin()) == [b"bad"]


def test_poll_in_order_gives_nothing_while_the_first_message_waits(desk: GroupDesk) -> None:
    desk.restart(retry_seconds=10)
    desk.publish(b"bad", b"good")
    one = desk.begin()
    assert desk.poll(one, 1) == [b"bad"]
    desk.roll_back(one)
    found = desk.ask(desk.begin())
    assert (found.messages, found.held, found.position, found.at_end) == ([], None, None, False)
    assert found.wait_ms is not None
    assert 10 * SECOND <= found.wait_ms <= 12.5 * SECOND
    desk.clock.advance(found.wait_ms)
    two = desk.begin()
    assert desk.poll(two, 1) == [b"bad"]
    desk.commit(two)
    assert desk.poll(desk.begin()) == [b"good"]


def test_poll_of_a_poison_message_processes_all_others_in_few_attempts(desk: GroupDesk) -> None:
    desk.restart(retry_seconds=1, longest_retry_seconds=60)
    desk.publish(*(b"%d" % number for number in range(1000)))
    processed: list[bytes] = []
    attempts = 0
    ends_ms = desk.clock.now_ms() + 600 * SECOND
    while desk.clock.now_ms() < ends_ms:
        tx = desk.begin()
        payloads = desk.any(tx, 500)
        if b"13" in payloads:
            attempts += 1
            desk.roll_back(tx)
        else:
            processed += payloads
            desk.commit(tx)
        desk.clock.advance(100)
    assert sorted(processed, key=int) == [b"%d" % number for number in range(1000) if number != 13]
    assert attempts < 30


def test_poll_of_failed_messages_after_a_restart_still_waits(desk: GroupDesk) -> None:
    desk.restart(retry_seconds=10)
    desk.publish(b"bad")
    one = desk.begin()
    desk.any(one)
    desk.roll_back(one)
    desk.restart()
    assert desk.any(desk.begin()) == []
    desk.clock.advance(13 * SECOND)
    assert desk.any(desk.begin()) == [b"bad"]


def test_poll_after_the_clock_went_back_by_days_does_not_wait_for_them(desk: GroupDesk) -> None:
    desk.restart(retry_seconds=10)
    desk.publish(b"bad")
    desk.clock.advance(HOUR // 2)
    one = desk.begin()
    desk.any(one)
    desk.roll_back(one)
    desk.service.close()
    desk.clock.step(-HOUR // 4)
    desk.restart()
    assert desk.any(desk.begin()) == [b"bad"]


@pytest.mark.parametrize("order", list(Order))
def test_poll_of_a_sealed_topic_is_not_drained_while_messages_wait(desk: GroupDesk, order: Order) -> None:
    desk.restart(retry_seconds=10)
    desk.publish(b"bad")
    one = desk.begin()
    assert desk.poll(one, order=order) == [b"bad"]
    desk.roll_back(one)
    desk.service.update_topic(ORDERS, {"partitions": "2"})
    found = desk.ask(desk.begin(), order=order)
    assert (found.sealed, found.drained) == (True, False)
    desk.clock.advance(13 * SECOND)
    two = desk.begin()
    assert desk.poll(two, order=order) == [b"bad"]
    desk.commit(two)
    found = desk.ask(desk.begin(), order=order)
    assert (found.sealed, found.drained) == (True, True)


def test_messages_given_back_unprocessed_do_not_wait(desk: GroupDesk) -> None:
    desk.restart(retry_seconds=10)
    desk.publish(b"a", b"b")
    one = desk.begin()
    assert desk.any(one) == [b"a", b"b"]
    desk.service.groups.roll_back(ORDERS, GROUP, one.transaction_id, desk.ids()[0])
    desk.commit(one)
    found = desk.ask(desk.begin(), order=Order.NONE)
    assert ([message.payload for message in found.messages], found.deliveries) == ([b"b"], 1)


@pytest.mark.parametrize("end", ["given back", "failed"])
@pytest.mark.parametrize("order", list(Order))
def test_poll_after_many_batches_came_back_gives_them_together(desk: GroupDesk, end: str, order: Order) -> None:
    desk.publish(*(b"%d" % number for number in range(2000)))
    opened = []
    for number in range(400):
        tx = desk.begin()
        desk.any(tx, 5)
        if number % 2:
            desk.commit(tx)
        else:
            opened.append(tx)
    for tx in opened:
        if end == "failed":
            desk.roll_back(tx)
        else:
            desk.service.groups.roll_back(ORDERS, GROUP, tx.transaction_id, READ_NONE)
            desk.manager.abort(tx)
    found: list[bytes] = []
    polls = 0
    while payloads := desk.poll(tx := desk.begin(), 500, order=order):
        desk.commit(tx)
        found += payloads
        polls += 1
    assert sorted(found, key=int) == [b"%d" % number for number in range(2000) if number % 10 < 5]
    assert order is Order.NONE or found == sorted(found, key=int)
    # Of failed batches half goes at a time; in order that is all that one answer can have.
    assert polls <= (2 if end == "given back" else 600 if order is Order.PARTITION else 20)


def test_poll_without_waits_gives_other_messages_every_other_time_while_one_always_fails(desk: GroupDesk) -> None:
    desk.publish(b"bad", b"worse", *(b"%d" % number for number in range(20)))
    failed, done = Counter[bytes](), list[bytes]()
    for _ in range(60):
        payloads = desk.any(tx := desk.begin(), 1)
        if payloads[0] in (b"bad", b"worse"):
            failed.update(payloads)
            desk.roll_back(tx)
        else:
            done += payloads
            desk.commit(tx)
    assert done == [b"%d" % number for number in range(20)]
    assert min(failed.values()) >= 18


def test_poll_of_batches_that_failed_next_to_each_other_gives_half_of_the_limit(desk: GroupDesk) -> None:
    desk.publish(*(b"%d" % number for number in range(1000)))
    opened = [desk.begin() for _ in range(200)]
    for tx in opened:
        assert len(desk.any(tx, 5)) == 5
    for tx in opened:
        desk.roll_back(tx)
    sizes = []
    while payloads := desk.any(tx := desk.begin(), 500):
        desk.commit(tx)
        sizes.append(len(payloads))
    assert sizes == [250] * 4


def test_an_outage_in_which_all_batches_fail_leaves_few_marks(desk: GroupDesk) -> None:
    desk.restart(retry_seconds=8)
    desk.publish(*(b"%d" % number for number in range(1000)))
    for _ in range(200):
        tx = desk.begin()
        desk.any(tx, 5)
        desk.roll_back(tx)
        desk.clock.advance(10)
    assert len(desk.claims()) <= 4


def test_failed_messages_are_named_in_the_log_and_shown_with_their_count(
    desk: GroupDesk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.restart(retry_seconds=10)
    desk.publish(b"good", b"bad", b"other")
    [_, bad, other] = desk.ids()
    one = desk.begin()
    assert desk.any(one, 1) == [b"good"]
    desk.commit(one)
    two = desk.begin()
    assert desk.any(two, 2) == [b"bad", b"other"]
    desk.roll_back(two)
    [both] = desk.service.groups.failed(ORDERS, GROUP)
    assert (both.message, both.mark.last, both.mark.tries) == (None, other, 1)
    desk.clock.advance(30 * SECOND)
    three = desk.begin()
    assert desk.any(three, 2) == [b"bad"]
    desk.time_out(three)
    four = desk.begin()
    assert desk.any(four, 1) == [b"other"]
    desk.roll_back(four)
    assert f"message {bad} of default:orders has failed 2 times for consumer billing" in caplog.text
    assert [(one.message, one.mark.tries) for one in desk.service.groups.failed(ORDERS, GROUP)] == [
        (bad, 2),
        (other, 2),
    ]
    assert all(one.mark.retry_ms > desk.clock.now_ms() for one in desk.service.groups.failed(ORDERS, GROUP))


# --- what a turn costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "roll_back"])
def test_turn_with_400_open_claims_touches_no_more_rows_than_with_10(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    desk.publish(*(b"%d" % number for number in range(5000)))
    touched: list[int] = []
    rows, get, exchange = desk.side.rows, desk.side.get, desk.side.exchange

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

    monkeypatch.setattr(desk.side, "rows", counted_rows)
    monkeypatch.setattr(desk.side, "get", counted_get)
    monkeypatch.setattr(desk.side, "exchange", counted_exchange)
    costs, opened = [], 0
    for number in (10, 400):
        for _ in range(number - opened):
            assert desk.any(desk.begin(timeout_seconds=3000), 5)
        opened = number
        for _ in range(2):
            touched.clear()
            tx = desk.begin()
            assert desk.any(tx, 5)
            getattr(desk, end)(tx)
            cost = sum(touched)
        costs.append(cost)
    few, many = costs
    assert many <= 2 * few


def test_poll_after_the_position_was_set_in_the_same_millisecond_reads_claims_again(desk: GroupDesk) -> None:
    desk.publish(b"a", b"b")
    one = desk.begin()
    assert desk.any(one, 1) == [b"a"]
    desk.service.consumers.put(ORDERS, GROUP, READ_NONE, force=True)
    assert desk.any(desk.begin()) == [b"a", b"b"]


def test_poll_after_claims_were_freed_and_their_id_left_the_list_gives_the_messages_again(desk: GroupDesk) -> None:
    desk.publish(b"a")
    one = desk.begin()
    assert desk.any(one) == [b"a"]
    desk.time_out(one)
    assert free_void(desk.side, lambda pointer: pointer == one.transaction_id, lambda _: False) == 1
    desk.manager.truncate_invalid([one.transaction_id])
    assert desk.any(desk.begin()) == [b"a"]


# --- a position set by hand ------------------------------------------------------------------------------------------


def test_given_an_open_claim_when_the_position_is_set_then_that_is_refused_unless_forced(desk: GroupDesk) -> None:
    desk.publish(b"a", b"b")
    one = desk.begin()
    desk.poll(one)
    consumers = desk.service.consumers
    with pytest.raises(ConsumerConflict, match=str(one.transaction_id)):
        consumers.put(ORDERS, GROUP, READ_NONE)
    with pytest.raises(ConsumerConflict, match=str(one.transaction_id)):
        consumers.delete(ORDERS, GROUP)
    assert [claim.pointer for claim in consumers.claims(ORDERS, GROUP)] == [one.transaction_id]
    consumers.put(ORDERS, GROUP, desk.ids()[0], force=True)
    assert desk.manager.status(one.transaction_id) == "invalid"
    assert desk.claims() == []
    assert desk.poll(desk.begin()) == [b"b"]


def test_given_a_consumer_when_it_shall_only_be_registered_then_its_position_stays(desk: GroupDesk) -> None:
    desk.publish(b"a")
    one = desk.begin()
    desk.poll(one)
    desk.commit(one)
    with pytest.raises(ConsumerConflict, match="already"):
        desk.service.consumers.put(ORDERS, GROUP, READ_NONE, only_new=True)
    desk.service.consumers.put(ORDERS, GROUP, READ_NONE)
    assert desk.poll(desk.begin()) == [b"a"]


# --- traps -----------------------------------------------------------------------------------------------------------


def test_trap_a_given_a_transaction_that_is_rolled_back_then_its_claim_is_gone_before_the_abort(
    desk: GroupDesk,
) -> None:
    desk.publish(b"a")
    one = desk.begin()
    desk.poll(one)
    desk.service.groups.roll_back(ORDERS, GROUP, one.transaction_id)
    assert [claim.pointer for claim in desk.claims()] == [0]
    desk.manager.abort(one)
    # Readers see the pointer of an aborted transaction as committed.
    assert desk.begin().is_visible(one.transaction_id)
    desk.restart()
    assert desk.poll(desk.begin()) == [b"a"]


def test_trap_a_given_a_committed_transaction_then_what_it_has_claimed_cannot_be_given_back(desk: GroupDesk) -> None:
    desk.publish(b"a")
    one = desk.begin()
    desk.poll(one)
    desk.commit(one)
    with pytest.raises(ConsumerConflict, match="has ended"):
        desk.service.groups.roll_back(ORDERS, GROUP, one.transaction_id)
    assert desk.poll(desk.begin()) == []
    # Once nothing of it is left, that it is asked for again does no harm.
    desk.service.groups.roll_back(ORDERS, GROUP, one.transaction_id)


@pytest.mark.parametrize("consumer", ["plain", "base", "claim"])
def test_trap_d_given_all_rows_deleted_a_restart_and_a_clock_that_stepped_back_then_new_messages_are_read(
    desk: GroupDesk, consumer: str
) -> None:
    desk.publish(b"old")
    (read,) = desk.ids()
    if consumer == "plain":
        desk.service.consumers.put(ORDERS, "plain", read)
    else:
        one = desk.begin()
        assert desk.poll(one) == [b"old"]
        if consumer == "base":
            desk.commit(one)
            assert desk.poll(desk.begin()) == []
            assert desk.claims() == []
    desk.store.message.delete(desk.store.message.read(KEYS, b"", None, 10).items)
    desk.service.close()
    desk.clock.step(-5 * SECOND)
    desk.service = desk.serve()
    desk.publish(b"new")
    (new,) = desk.ids()
    assert new > read
    if consumer == "plain":
        pages = desk.service.fetch(ORDERS, FetchRequest(read, inclusive=False))
        assert [message.payload for page in pages for message in page] == [b"new"]
    elif consumer == "base":
        assert desk.poll(desk.begin()) == [b"new"]


def test_trap_d_given_a_position_ahead_of_the_topic_then_no_id_before_it_is_given_out(desk: GroupDesk) -> None:
    ahead = MessageId(NOW_MS + 2 * SECOND, 7)
    desk.service.consumers.put(ORDERS, GROUP, ahead)
    desk.publish(b"a")
    assert desk.ids() == [MessageId(NOW_MS + 2 * SECOND, 8)]


def test_given_a_position_far_in_the_future_then_what_comes_until_then_is_left_out_as_was_asked(
    desk: GroupDesk,
) -> None:
    desk.service.consumers.put(ORDERS, GROUP, MessageId(NOW_MS + HOUR, 0))
    desk.publish(b"a")
    desk.restart()
    desk.publish(b"b")
    assert [one.publish_ms for one in desk.ids()] == [NOW_MS, NOW_MS]
    assert desk.poll(desk.begin()) == []


def test_trap_e_given_a_transaction_past_its_lifetime_or_ended_then_it_claims_nothing(desk: GroupDesk) -> None:
    desk.publish(b"a")
    late = desk.begin(timeout_seconds=10 * 3600)
    ended, unknown = desk.begin(), Transaction(5, 7, 7)
    desk.commit(ended)
    desk.clock.advance(HOUR - 1)
    assert transaction_ms(late.transaction_id) == NOW_MS
    assert desk.poll(late) == [b"a"]
    desk.roll_back(late)
    late = desk.begin(timeout_seconds=10 * 3600)
    desk.clock.advance(HOUR)
    for tx, reason in ((late, "older than 3600 s"), (ended, "older|not in progress"), (unknown, "older")):
        with pytest.raises(ConsumerConflict, match=reason):
            desk.poll(tx)
    with pytest.raises(ConsumerConflict, match="not in progress"):
        desk.poll(Transaction(1, late.transaction_id + HOUR * 1_000_000, 1))
    assert [claim.pointer for claim in desk.claims()] == [0]


def test_given_a_transaction_that_ends_while_its_claim_is_written_then_the_claim_is_taken_back(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.publish(b"a")
    one = desk.begin()
    exchange = desk.side.exchange

    def late(*given: Any) -> bool:
        desk.manager.invalidate(one.transaction_id)
        return exchange(*given)

    monkeypatch.setattr(desk.side, "exchange", late)
    with pytest.raises(ConsumerConflict, match="not in progress"):
        desk.poll(one)
    # It counts as no delivery, so not even a mark is left.
    assert desk.claims() == []


@pytest.mark.parametrize("end", ["abort", "commit"])
def test_given_a_client_that_ends_its_transaction_without_the_answer_of_its_poll_then_no_message_is_lost_or_doubled(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    desk.publish(b"a", b"b", b"c")
    one = desk.begin()
    assert desk.poll(one, 1) == [b"a"]
    exchange = desk.side.exchange

    def late(*given: Any) -> bool:
        monkeypatch.undo()
        # A roll back that came before this poll's claim has found none of it.
        desk.manager.abort(one) if end == "abort" else desk.commit(one)
        return exchange(*given)

    monkeypatch.setattr(desk.side, "exchange", late)
    with pytest.raises(ConsumerConflict, match="not in progress"):
        desk.poll(one, 1)
    found: list[bytes] = []
    while payloads := desk.poll(two := desk.begin()):
        found += payloads
        desk.commit(two)
    assert found == ([b"a", b"b", b"c"] if end == "abort" else [b"b", b"c"])


def test_trap_g_given_a_topic_made_again_then_it_has_no_claims(desk: GroupDesk) -> None:
    desk.publish(b"a")
    desk.poll(desk.begin())
    desk.service.delete_topic(ORDERS)
    desk.service.create_topic(ORDERS)
    with pytest.raises(ConsumerNotFound):
        desk.poll(desk.begin())
    desk.service.consumers.put(ORDERS, GROUP, READ_NONE)
    assert desk.claims() == []
    desk.publish(b"b")
    assert desk.poll(desk.begin()) == [b"b"]


def test_trap_c_given_a_late_claim_of_a_deposed_server_when_the_next_ones_clock_is_behind_then_it_is_refused(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.publish(b"a")
    desk.roll_back(desk.begin())
    next_one, one, two = desk.serve(), desk.begin(), desk.begin()
    exchange, found = desk.side.exchange, []

    def late(*given: Any) -> bool:
        monkeypatch.undo()
        desk.clock.advance(-SECOND)
        found.extend(next_one.groups.poll(ORDERS, GROUP, GroupPoll(two, 10)).messages)
        return exchange(*given)

    monkeypatch.setattr(desk.side, "exchange", late)
    with pytest.raises(Unavailable, match="changed meanwhile"):
        desk.poll(one)
    assert [message.payload for message in found] == [b"a"]
    assert [claim.pointer for claim in desk.claims()] == [two.transaction_id]
    next_one.close()


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_given_a_store_that_fails_then_nothing_is_given_out(desk: GroupDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.publish(b"a")
    with monkeypatch.context() as broken:
        broken.setattr(desk.side, "exchange", raising(StoreError("broken")))
        with pytest.raises(StoreError):
            desk.poll(desk.begin())
    monkeypatch.setattr(desk.side, "exchange", lambda *_: False)
    with pytest.raises(Unavailable, match="changed meanwhile"):
        desk.poll(desk.begin())
    assert desk.claims() == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *(({"limit": 0}, "at least 1"), ({"max_deliveries": 0}, "at least 1")),
        *(({"group": "a\0b"}, "cannot be a consumer"), ({"group": "x" * 10_240}, "cannot be a consumer")),
    ],
)
def test_given_bad_input_then_it_is_refused_and_nothing_is_claimed(
    desk: GroupDesk, options: dict[str, Any], reason: str
) -> None:
    desk.publish(b"a")
    with pytest.raises(BadRequest, match=reason):
        desk.poll(desk.begin(), **options)
    assert desk.claims() == []


def test_given_what_is_not_there_then_that_is_said(desk: GroupDesk) -> None:
    groups = desk.service.groups
    with pytest.raises(ConsumerNotFound):
        desk.poll(desk.begin(), group="mail")
    with pytest.raises(BadRequest, match="no transaction"):
        desk.poll(Transaction(1, -1, -1))
    with pytest.raises(BadRequest, match="no write pointer"):
        groups.roll_back(ORDERS, GROUP, 0)
    with pytest.raises(TopicNotFound):
        groups.roll_back(TopicId("default", "gone"), GROUP, 1)


def test_given_the_largest_limit_then_the_bytes_are_limited_all_the_same(desk: GroupDesk) -> None:
    desk.publish(*[b"x" * 1000] * 50)
    found = desk.ask(desk.begin(), 2**31 - 1, limit_bytes=10_000, order=Order.NONE)
    assert len(found.messages) == 8


def test_given_an_idle_group_then_the_answer_says_from_where_the_next_message_may_come(desk: GroupDesk) -> None:
    empty = desk.ask(desk.begin()).position
    desk.publish(b"a")
    one = desk.begin()
    desk.poll(one)
    desk.commit(one)
    behind = desk.ask(desk.begin()).position
    desk.clock.advance(MINUTE)
    desk.publish(b"b")
    assert empty is not None
    assert behind is not None
    assert position(empty.publish_ms, empty.sequence) <= position(*desk.ids()[0][:2])
    pages = desk.service.fetch(ORDERS, FetchRequest(behind))
    assert [message.payload for page in pages for message in page] == [b"b"]


def test_groups_without_claims_take_bounded_memory(desk: GroupDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_MOST_KEPT", 10)
    for number in range(40):
        desk.service.consumers.put(ORDERS, f"g{number}", READ_NONE)
        assert not desk.ask(desk.begin(), group=f"g{number}").messages
        desk.service.consumers.delete(ORDERS, f"g{number}")
    assert len(desk.service.groups._rows) <= 10
