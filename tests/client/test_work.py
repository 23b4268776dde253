"""Consumer groups of the client: exactly once with several workers, despite failures at any step."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any, cast

import pytest

from tests.client.faults import Faults, When, faulty_client, forget_changes
from tests.kit.client import BILLS, ORDERS, committed
from tests.support import act_before, each_raises, in_event_loop, record_calls
from tms_core.client import (
    AsyncClient,
    BadRequest,
    Client,
    ConsumerConflict,
    GroupWork,
    MessageId,
    NotInProgress,
    OpenClaim,
    Participant,
    PostCommitFailed,
    Retry,
    ServiceUnavailable,
    TmsError,
    TopicNotFound,
    Transaction,
    TransactionClient,
    TransactionContext,
    Unanswered,
)
from tms_core.client.testing import InProcess
from tms_core.clock import ManualClock
from tms_core.consumers.claims import Backoff
from tms_core.transaction.rpc import calls

DEAD = f"{ORDERS}-dead"
#: The idle time after which a loop ends, in seconds.
IDLE = 0.5
START = MessageId(0, 0)


#: The pauses of a waiting worker.
QUICK = Retry(first_seconds=0.005, factor=1.5, longest_seconds=0.05)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.client.work.IDLE", QUICK)


class Crash(Exception):
    """The end of the process of a worker."""


def bill(client: Client, limit: int | None = None, **options: str) -> int:
    count = 0
    with client.transaction() as tx:
        for order in tx.consume(ORDERS, "billing", limit=limit, **options):
            tx.publish(BILLS, [b"bill of " + order.payload])
            count += 1
    return count


def bill_batches(client: Client, **options: Any) -> None:
    """Process batches of orders until there are no more."""
    for tx, batch in client.work(ORDERS, "billing", idle_seconds=IDLE, **options):
        tx.publish(BILLS, [order.payload for order in batch])


def record_starts(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> list[Transaction]:
    """Record the transactions that start from now on."""
    starts: list[Transaction] = []
    record_start = server.manager._record_start

    def record(*given: Any) -> Transaction:
        starts.append(record_start(*given))
        return starts[-1]

    monkeypatch.setattr(server.manager, "_record_start", record)
    return starts


# --- tx.consume ------------------------------------------------------------------------------------------------------


def test_consume_left_early_gives_the_rest_next(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    with client.transaction() as tx:
        for order in tx.consume(ORDERS, "billing"):
            tx.publish(BILLS, [order.payload])
            break
    with client.transaction() as tx:
        assert next(tx.consume(ORDERS, "billing")).payload == b"2"
        tx.roll_back()
    assert bill(client) == 2
    assert committed(client) == [b"1", b"bill of 2", b"bill of 3"]
    assert client.claims(ORDERS, "billing") == []


def test_consume_returns_messages_up_to_its_limit_and_continues(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    with client.transaction() as tx:
        found = [[order.payload for order in tx.consume(ORDERS, "billing", limit=limit)] for limit in (2, None, None)]
    assert found == [[b"1", b"2"], [b"3"], []]


@in_event_loop
async def test_async_consume_returns_messages_up_to_its_limit_once(server: InProcess, client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    found = []
    async with server.async_client() as loop:
        for limit in (2, None, None):
            async with loop.transaction() as tx:
                found.append([order.payload async for order in tx.consume(ORDERS, "billing", limit=limit)])
    assert found == [[b"1", b"2"], [b"3"], []]


def test_consume_without_order_shares_the_messages(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    with client.transaction() as tx:
        assert [order.payload for order in tx.consume(ORDERS, "billing", limit=1, order="none")] == [b"1"]
        assert bill(client, order="none") == 2


def test_claim_of_a_transaction_is_shown_and_protects_its_consumer(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    _, last = client.poll(ORDERS)
    with client.transaction() as tx:
        assert len(list(tx.consume(ORDERS, "billing"))) == 2
        assert client.claims(ORDERS, "billing") == [OpenClaim(tx.transaction.transaction_id, START, last.id, 1)]
        each_raises(
            ConsumerConflict,
            lambda: client.delete_position(ORDERS, "billing"),
            lambda: client.set_position(ORDERS, "billing", START),
        )


@pytest.mark.parametrize("delete", [False, True])
def test_forced_change_of_a_consumer_ends_the_transaction_that_holds_it(client: Client, delete: bool) -> None:
    client.publish(ORDERS, [b"1"])

    def work() -> None:
        with client.transaction() as tx:
            tx.publish(BILLS, [order.payload for order in tx.consume(ORDERS, "billing")])
            if delete:
                client.delete_position(ORDERS, "billing", force=True)
            else:
                client.set_position(ORDERS, "billing", START, force=True)

    with pytest.raises(TmsError, match="not in progress"):
        work()
    assert committed(client) == []
    assert bill(client) == 1


def test_roll_back_counts_the_delivery_of_messages_that_were_handed_over(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    with client.transaction() as tx:
        for order in tx.consume(ORDERS, "billing"):
            if order.payload == b"2":
                tx.roll_back()
                break
    [failed] = client.failed(ORDERS, "billing")
    assert (failed.last, failed.deliveries) == (order.id, 1)


def test_bad_arguments_of_work_are_rejected(client: Client) -> None:
    wrong: list[dict[str, Any]] = [{"order": "fifo"}, {"batch": 0}, {"max_deliveries": 0}]
    for options in wrong:
        with pytest.raises(BadRequest):
            client.work(ORDERS, "billing", **options)
    with client.transaction() as tx:
        with pytest.raises(BadRequest, match="fifo"):
            next(tx.consume(ORDERS, "billing", order="fifo"))
        tx.roll_back()
    with pytest.raises(TopicNotFound):
        list(client.work("default:missing", "billing", idle_seconds=IDLE))


@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("step", ["poll", "rollback", "PUT billing"])
def test_consume_after_a_lost_response_bills_each_order_once(
    server: InProcess, client: Client, faults: Faults, clock: ManualClock, step: str, when: When
) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    faults.at(step, when, times=1)
    with faulty_client(server, faults) as faulty:
        for fails in (True, False):
            try:
                with faulty.transaction() as tx:
                    for order in tx.consume(ORDERS, "billing"):
                        tx.publish(BILLS, [order.payload])
                    if fails:
                        raise Crash
            except (Crash, Unanswered):
                pass
    for late in faults.late:
        late()
    bill(client)
    clock.advance(60_000)
    server.manager.expire()
    bill(client)
    assert sorted(payload[-1:] for payload in committed(client)) == [b"1", b"2"]


# --- client.work -----------------------------------------------------------------------------------------------------


def test_work_commits_each_batch_before_it_returns_the_next(client: Client) -> None:
    client.publish(ORDERS, [b"%d" % number for number in range(5)])
    sizes: list[int] = []
    for tx, batch in client.work(ORDERS, "billing", batch=2, idle_seconds=IDLE):
        assert len(committed(client)) == sum(sizes)
        tx.publish(BILLS, [order.payload for order in batch])
        sizes.append(len(batch))
    assert sizes == [2, 2, 1]
    assert committed(client) == [b"%d" % number for number in range(5)]
    assert client.positions(ORDERS)[0].lag_messages <= 1


def test_work_after_an_error_or_a_break_returns_the_batch_again(client: Client) -> None:
    client.publish(ORDERS, [b"1"])

    def work_and_fail() -> None:
        for tx, batch in client.work(ORDERS, "billing"):
            tx.publish(BILLS, [batch[0].payload])
            raise Crash

    with pytest.raises(Crash):
        work_and_fail()
    assert client.claims(ORDERS, "billing") == []
    for tx, batch in client.work(ORDERS, "billing"):
        tx.publish(BILLS, [batch[0].payload])
        break
    assert committed(client) == []
    work = client.work(ORDERS, "billing")
    for tx, batch in work:
        tx.publish(BILLS, [batch[0].payload])
        work.stop()
    assert committed(client) == [b"1"]


def test_work_moves_a_message_that_always_fails_to_dead_letters(client: Client) -> None:
    client.publish(ORDERS, [b"%d" % number for number in range(20)])
    given: Counter[bytes] = Counter()
    for tx, batch in client.work(ORDERS, "billing", batch=8, max_deliveries=3, idle_seconds=IDLE):
        given.update(order.payload for order in batch)
        if any(order.payload == b"13" for order in batch):
            tx.roll_back()
        else:
            tx.publish(BILLS, [order.payload for order in batch])
    assert given[b"13"] == 3
    assert committed(client) == [b"%d" % number for number in range(20) if number != 13]
    assert committed(client, DEAD) == [b"13"]


def test_work_while_a_failed_message_waits_gives_others_and_asks_seldom(
    server: InProcess, client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.groups, "_backoff", Backoff(4_000, 4_000))
    starts = record_starts(server, monkeypatch)
    client.publish(ORDERS, [b"bad"])
    given: list[bytes] = []
    work = client.work(ORDERS, "billing", order="none")
    good = threading.Timer(1.0, lambda: client.publish(ORDERS, [b"good"]))
    for tx, batch in work:
        given += [order.payload for order in batch]
        if len(given) == 1:
            tx.roll_back()
            good.start()
        elif given[-1] == b"good":
            assert len(starts) <= 6
            clock.advance(6_000)
        else:
            work.stop()
    good.join()
    assert given == [b"bad", b"good", b"bad"]


def process_orders(faulty: Client, **options: Any) -> Counter[bytes]:
    """Turn orders into bills; return the delivery count of each order."""
    given: Counter[bytes] = Counter()
    for tx, batch in faulty.work(ORDERS, "billing", idle_seconds=2, **options):
        given.update(order.payload for order in batch)
        tx.publish(BILLS, [order.payload for order in batch])
    return given


@pytest.mark.parametrize("order", ["partition", "none"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["poll", "publish", "commitAndStart"])
def test_work_while_the_server_does_not_answer_counts_no_delivery(
    server: InProcess, client: Client, faults: Faults, step: str, when: When, order: str
) -> None:
    client.publish(ORDERS, [b"%d" % number for number in range(4)])
    faults.at(step, when, times=5)
    with faulty_client(server, faults) as faulty:
        given = process_orders(faulty, order=order, batch=2, max_deliveries=1)
    assert faults.seen[step] > 5 or (step, when) == ("commitAndStart", "after")
    assert committed(client) == [b"0", b"1", b"2", b"3"]
    assert set(given) == {b"0", b"1", b"2", b"3"}
    assert "orders-dead" not in [topic.topic for topic in client.topics("default")]


def test_work_on_a_stopped_server_raises_after_the_idle_time() -> None:
    with (
        Client("http://127.0.0.1:1", transactions="127.0.0.1:1") as client,
        pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:1 .*Connection refused") as caught,
    ):
        list(client.work(ORDERS, "billing", idle_seconds=IDLE))
    assert "transactions=" in caught.value.hint


@pytest.mark.parametrize("topic", [ORDERS, "default:ord*"])
def test_work_whose_server_stops_after_the_last_batch_raises(
    server: InProcess, client: Client, faults: Faults, topic: str
) -> None:
    def bill_and_stop(work: GroupWork) -> None:
        for tx, batch in work:
            faults.at("poll", "before")
            tx.publish(BILLS, [order.payload for order in batch])

    client.publish(ORDERS, [b"1"])
    with faulty_client(server, faults) as faulty, pytest.raises(Unanswered):
        bill_and_stop(faulty.work(topic, "billing", idle_seconds=IDLE))
    assert committed(client) == [b"1"]


def test_work_after_a_cut_counts_no_delivery(server: InProcess, client: Client, faults: Faults) -> None:
    client.publish(ORDERS, [b"1"])

    def heal_later(step: str) -> None:
        if step == "start" and faults.seen[step] > 3:
            faults.heal()

    faults.on_step = heal_later
    for step in ("commitAndStart", "invalidate", "rollback"):
        faults.at(step, "before")
    with faulty_client(server, faults) as faulty:
        batches = faulty.work(ORDERS, "billing", order="none", max_deliveries=1, idle_seconds=2)
        for tx, batch in batches:
            if faults.seen["start"] == 1:
                faults.at("start", "before", times=2)
            tx.publish(BILLS, [order.payload for order in batch])
    assert committed(client) == [b"1"]
    assert server.manager.clients() == {}


@pytest.mark.parametrize("pattern", [False, True])
def test_work_on_a_topic_without_room_for_dead_letters_is_rejected(client: Client, pattern: bool) -> None:
    long, longest = "default:" + "x" * 250, "default:" + "y" * 251
    for topic in (long, longest):
        client.create_topic(topic)
        client.publish(topic, [b"bad"])
    pattern_text = f"{longest[:-1]}*" if pattern else longest
    with pytest.raises(BadRequest, match="250"):
        list(client.work(pattern_text, "billing", max_deliveries=1, idle_seconds=IDLE))
    assert [len(batch) for _, batch in client.work(pattern_text, "billing", idle_seconds=IDLE)] == [1]
    for tx, _ in client.work(long, "billing", max_deliveries=1, idle_seconds=IDLE):
        tx.roll_back()
    assert committed(client, f"{long}-dead") == [b"bad"]


def test_idle_work_starts_few_transactions(server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.publish(ORDERS, [b"1"])
    starts = record_starts(server, monkeypatch)
    taken = threading.Event()
    timer = threading.Timer(1.0, lambda: client.publish(ORDERS, [b"2"]))
    work = client.work(ORDERS, "billing")
    for _, batch in work:
        if batch[0].payload == b"1":
            timer.start()
        else:
            taken.set()
            work.stop()
    timer.join()
    assert taken.is_set()
    # Two for the messages, one without messages, and one before the decision on the second message.
    assert len(starts) <= 4


@pytest.mark.parametrize("when", ["before", "after", "late"])
def test_work_without_a_response_to_a_commit_bills_each_order_once(
    server: InProcess, client: Client, faults: Faults, clock: ManualClock, when: When
) -> None:
    client.publish(ORDERS, [b"%d" % number for number in range(4)])
    faults.at("commitAndStart", when, times=1)
    with faulty_client(server, faults) as faulty:
        bill_batches(faulty, batch=2)
    assert committed(client) == [b"0", b"1", b"2", b"3"]
    for late in faults.late:
        with suppress(NotInProgress):
            late()
    # A transaction without a response to its start has done nothing, and times out.
    clock.advance(60_000)
    server.manager.expire()
    assert committed(client) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_work_while_the_service_is_away_bills_each_order_once(
    server: InProcess, client: Client, faults: Faults, clock: ManualClock, when: When
) -> None:
    client.publish(ORDERS, [b"%d" % number for number in range(4)])

    def heal_later(step: str) -> None:
        if step == "start" and faults.seen[step] > 2:
            faults.heal()
            # An unfinished transaction times out.
            clock.advance(60_000)
            server.manager.expire()

    faults.on_step = heal_later
    faults.at("commitAndStart", when)
    for step in ("invalidate", "abort"):
        faults.at(step, "before")
    with faulty_client(server, faults) as faulty:
        for tx, batch in faulty.work(ORDERS, "billing", batch=2, idle_seconds=IDLE):
            if faults.seen["start"] == 1:
                faults.at("start", "before", times=2)
            tx.publish(BILLS, [order.payload for order in batch])
    assert faults.seen["start"] > 2
    assert committed(client) == [b"0", b"1", b"2", b"3"]
    assert server.manager.clients() == {}


def test_work_with_a_service_of_tephra_commits_and_starts_separately(
    server: InProcess, client: Client, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(cast("dict[str, Any]", calls._CALLS), "commitAndStart")
    client.publish(ORDERS, [b"%d" % number for number in range(4)])
    with faulty_client(server, faults) as faulty:
        bill_batches(faulty, batch=2)
    assert committed(client) == [b"0", b"1", b"2", b"3"]
    assert (faults.seen["commitAndStart"], faults.seen["commit"], faults.seen["start"]) == (1, 2, 3)
    assert server.manager.clients() == {}


def test_work_with_a_manager_that_forgot_asks_again(
    server: InProcess, client: Client, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_changes(server, faults, monkeypatch, "commit_and_start")
    client.publish(ORDERS, [b"1"])
    with faulty_client(server, faults) as faulty:
        bill_batches(faulty)
    assert committed(client) == [b"1"]
    assert (faults.seen["commitAndStart"], faults.seen["canCommit"]) == (2, 1)


class CheckpointParticipant(Participant):
    """A participant that takes a checkpoint in its first commit."""

    def __init__(self, tx: TransactionContext) -> None:
        self._tx, self._is_done = tx, False

    def commit_tx(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._tx.checkpoint()


def test_work_commits_the_pointer_of_a_checkpoint(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = record_calls(monkeypatch, TransactionClient, "commit_and_start")
    client.publish(ORDERS, [b"1"])
    transactions = []
    for tx, _ in client.work(ORDERS, "billing", idle_seconds=IDLE):
        tx.register(CheckpointParticipant(tx))
        transactions.append(tx)
    [tx], [(_, transaction_id, write_pointer, *_)] = transactions, commits
    assert (transaction_id, write_pointer) == (tx.transaction.transaction_id, tx.transaction.write_pointer)
    assert write_pointer > transaction_id


class CrashingParticipant(Participant):
    def post_tx_commit(self) -> None:
        raise Crash


def test_work_with_a_participant_that_fails_ends_the_next_transaction(server: InProcess, client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2"])

    def process_batches() -> None:
        for tx, batch in client.work(ORDERS, "billing", batch=1):
            tx.register(CrashingParticipant())
            tx.publish(BILLS, [order.payload for order in batch])

    with pytest.raises(PostCommitFailed):
        process_batches()
    assert committed(client) == [b"1"]
    assert server.manager.clients() == {}


def test_work_stopped_while_it_commits_ends_the_next_transaction(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    work = client.work(ORDERS, "billing", batch=1)
    act_before(monkeypatch, server.manager, "commit_and_start", work.stop)
    assert [[order.payload for order in batch] for _, batch in work] == [[b"1"]]
    assert client.claims(ORDERS, "billing") == []
    assert server.manager.clients() == {}


def hold_commits(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Delay commits that start the next transaction; return the events of a commit and of the release."""
    commit = server.manager.commit_and_start
    reached, resume = threading.Event(), threading.Event()

    def commit_and_wait(*given: Any) -> Transaction:
        next_transaction = commit(*given)
        reached.set()
        resume.wait(10)
        return next_transaction

    monkeypatch.setattr(server.manager, "commit_and_start", commit_and_wait)
    return reached, resume


@in_event_loop
async def test_work_cancelled_while_it_commits_ends_the_next_transaction(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    reached, resume = hold_commits(server, monkeypatch)

    async def bills(loop: AsyncClient) -> None:
        async for tx, batch in loop.work(ORDERS, "billing", batch=1):
            await tx.publish(BILLS, [order.payload for order in batch])

    async with server.async_client() as loop:
        task = asyncio.create_task(bills(loop))
        await asyncio.to_thread(reached.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        resume.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert committed(client) == [b"1"]
    assert server.manager.clients() == {}


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "participant fails"])
def test_work_of_a_closed_client_commits_its_batch_and_ends(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    reached, resume = hold_commits(server, monkeypatch)

    async def main() -> int:
        batches = 0
        async with server.async_client() as loop:

            async def close() -> None:
                await asyncio.to_thread(reached.wait, 10)
                asyncio.get_running_loop().call_later(0.1, resume.set)
                await loop.close()

            closing = asyncio.create_task(close())
            with pytest.raises(PostCommitFailed) if fails else nullcontext():
                async for tx, batch in loop.work(ORDERS, "billing", batch=1):
                    if fails:
                        await tx.register(CrashingParticipant())
                    await tx.publish(BILLS, [order.payload for order in batch])
                    batches += 1
            await closing
        return batches

    assert asyncio.run(main()) == 1
    assert committed(client) == [b"1"]
    assert server.manager.clients() == {}


@in_event_loop
async def test_async_work_that_fails_gets_its_batch_again(server: InProcess, client: Client) -> None:
    client.publish(ORDERS, [b"1"])

    async def work_and_fail(loop: AsyncClient) -> None:
        async for tx, _ in loop.work(ORDERS, "billing"):
            await tx.publish(BILLS, [b"x"])
            raise Crash

    async with server.async_client() as loop:
        with pytest.raises(Crash):
            await work_and_fail(loop)
        work = loop.work(ORDERS, "billing")
        async for tx, batch in work:
            await tx.publish(BILLS, [order.payload for order in batch])
            work.stop()
    assert committed(client) == [b"1"]


@pytest.mark.parametrize("order", ["partition", "none"])
def test_work_of_three_copies_with_one_crash_makes_300_bills(server: InProcess, client: Client, order: str) -> None:
    client.publish(ORDERS, [b"%d" % number for number in range(300)])
    batches = count(1)
    crashed: list[GroupWork] = []

    def copy() -> None:
        with server.client() as mine:
            # On a slow machine, a waiting copy becomes idle before the other copies have finished.
            for _ in range(20):
                work = mine.work(ORDERS, "billing", batch=10, order=order, idle_seconds=1)
                for tx, batch in work:
                    tx.publish(BILLS, [b"bill of " + one.payload for one in batch])
                    if next(batches) == 7:
                        # The process is dead, so its transaction times out.
                        server.manager.invalidate(tx.transaction.transaction_id)
                        crashed.append(work)
                        return
                if len(committed(mine)) >= 300:
                    return

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(copy) for _ in range(3)]:
            done.result()
    assert len(crashed) == 1
    assert sorted(committed(client)) == sorted(b"bill of %d" % number for number in range(300))
    assert client.claims(ORDERS, "billing") == []


# --- reading without waiting -----------------------------------------------------------------------------------------


def test_unordered_read_gives_undecided_messages_late_and_once(server: InProcess, client: Client) -> None:
    with client.transaction() as undecided:
        client.publish(ORDERS, [b"late"], transaction=undecided.transaction)
        client.publish(ORDERS, [b"1", b"2"])
        with client.consume(ORDERS, consumer="printer", read="unordered") as messages:
            assert [next(messages).payload, next(messages).payload] == [b"1", b"2"]
            messages.commit()
    with client.consume(ORDERS, consumer="printer", read="unordered") as messages:
        assert next(messages).payload == b"late"
        messages.commit()
        messages.stop()
        assert not list(messages)
    assert not client.claims(ORDERS, "printer")
    assert client.position(ORDERS, "printer") != START
    assert not server.manager.visibility().in_progress


def test_unordered_read_left_in_a_batch_gives_the_rest_next(client: Client) -> None:
    client.publish(ORDERS, [b"1", b"2", b"3"])
    with client.consume(ORDERS, consumer="printer", read="unordered") as messages:
        assert [next(messages).payload, next(messages).payload] == [b"1", b"2"]
    with client.consume(ORDERS, consumer="printer", read="unordered") as messages:
        assert next(messages).payload == b"2", "its processing is not certain"


def test_unordered_read_of_a_deleted_topic_leaves_no_transaction_open(server: InProcess, client: Client) -> None:
    client.publish(ORDERS, [b"1"])
    messages = client.consume(ORDERS, consumer="audit", read="unordered")
    next(messages)
    client.delete_topic(ORDERS)
    with pytest.raises(TopicNotFound):
        next(messages)
    assert server.manager.clients() == {}


@pytest.mark.parametrize(
    "options", [{"read": "dirty"}, {"read": "unordered"}, {"read": "unordered", "consumer": "x", "start": START}]
)
def test_consume_with_invalid_options_is_rejected(client: Client, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        client.consume(ORDERS, **options)
