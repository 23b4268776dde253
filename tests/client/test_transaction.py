"""Transactions of the client: atomicity, the order of calls, and participants."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext, suppress
from itertools import islice

import pytest

from tests.builders import NOW_MS
from tests.client.faults import Faults, faulty_async_client, faulty_client
from tests.kit.client import BILLS, ORDERS, Changes, visible
from tests.support import PATIENCE_SECONDS, each_raises, in_event_loop
from tms_core.client import (
    BadRequest,
    Client,
    Conflict,
    Invalidated,
    Limits,
    NotInProgress,
    Participant,
    PostCommitFailed,
    TopicNotFound,
    Transaction,
    TransactionError,
    Unanswered,
)
from tms_core.client.testing import InProcess
from tms_core.clock import ManualClock


class Recorder(Participant):
    """A participant that records its calls, each with its write pointer.

    Args:
        fails: the name of the call that fails.
    """

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, int]] = []
        self._fails = fails
        self._pointer = 0

    def start_tx(self, transaction: Transaction) -> None:
        self._pointer = transaction.write_pointer
        self._note("start")

    def update_tx(self, transaction: Transaction) -> None:
        self._pointer = transaction.write_pointer
        self._note("update")

    def tx_changes(self) -> Collection[bytes]:
        self._note("changes")
        return ()

    def commit_tx(self) -> None:
        self._note("commit")

    def post_tx_commit(self) -> None:
        self._note("post")

    def rollback_tx(self) -> None:
        self._note("rollback")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _note(self, name: str) -> None:
        self.calls.append((name, self._pointer))
        if name == self._fails:
            raise LookupError(name)


@pytest.mark.parametrize("ends", ["error", "roll back"])
def test_client_publish_in_a_failed_transaction_is_rolled_back(client: Client, server: InProcess, ends: str) -> None:
    def work() -> None:
        with client.transaction() as tx:
            client.publish(ORDERS, [b"never seen"], transaction=tx.transaction)
            client.within(60).store(BILLS, [b"never seen"], transaction=tx.transaction)
            client.within(60).publish(BILLS, [], transaction=tx.transaction)
            tx.checkpoint()
            client.publish(ORDERS, [b"never seen"], transaction=tx.transaction)
            if ends == "error":
                raise ZeroDivisionError
            tx.roll_back()

    with suppress(ZeroDivisionError):
        work()
    assert visible(server) == []
    # All messages were rolled back, so the transaction need not stay on the invalid list.
    assert server.manager.invalid_size() == 0


def test_rejected_client_publish_does_not_fail_the_transaction(client: Client, server: InProcess) -> None:
    with client.transaction() as tx:
        client.publish(ORDERS, [b"a"], transaction=tx.transaction)
        with suppress(TopicNotFound):
            client.publish("default:nowhere", [b"a"], transaction=tx.transaction)
    assert visible(server) == [b"a"]


def test_publish_of_the_client_without_a_response_cannot_be_committed(server: InProcess, faults: Faults) -> None:
    faults.at("publish", "after")

    def work() -> None:
        with faulty_client(server, faults) as client, client.transaction() as tx, suppress(Unanswered):
            client.publish(ORDERS, [b"a"], transaction=tx.transaction)

    with pytest.raises(Invalidated):
        work()
    assert visible(server) == []


def test_unanswered_client_publish_invalidates_the_transaction(server: InProcess, faults: Faults) -> None:
    faults.at("publish", "after")
    with faulty_client(server, faults) as client:
        tx = client.transaction()
        with pytest.raises(Unanswered), tx:
            client.publish(ORDERS, [b"a"], transaction=tx.transaction)
        assert server.manager.status(tx.transaction.transaction_id) == "invalid"
    assert visible(server) == []


@pytest.mark.parametrize("ended", ["committed", "rolled back"])
def test_roll_back_after_the_end_is_rejected(client: Client, server: InProcess, ended: str) -> None:
    with client.transaction() as tx:
        tx.publish(ORDERS, [b"a"])
        if ended == "rolled back":
            tx.roll_back()
    with pytest.raises(NotInProgress):
        tx.roll_back()
    assert visible(server) == ([b"a"] if ended == "committed" else [])


def test_everything_after_a_roll_back_is_rejected(client: Client, server: InProcess) -> None:
    with client.transaction() as tx:
        tx.publish(ORDERS, [b"a"])
        tx.roll_back()
        tx.roll_back()
        calls: list[Callable[[], object]] = [
            lambda: tx.publish(ORDERS, [b"b"]),
            lambda: tx.publish_stored(ORDERS, [tx.transaction.write_pointer]),
            lambda: tx.register(Recorder()),
            lambda: tx.poll(ORDERS),
            lambda: next(tx.consume(ORDERS, "billing")),
            lambda: client.publish(ORDERS, [b"c"], transaction=tx.transaction),
            lambda: client.store(ORDERS, [b"c"], transaction=tx.transaction),
            tx.checkpoint,
        ]
        each_raises(NotInProgress, *calls, match="rolled back")
    assert (visible(server), server.manager.invalid_size()) == ([], 0)


FORKED = """
import os
from tms_core.client import NotInProgress
from tms_core.client.testing import in_process

with in_process() as server, server.client() as client:
    client.create_topic("default:orders")
    with client.transaction() as tx:
        tx.publish("default:orders", [b"1"])
        child = os.fork()
        if not child:
            refused = 0
            for call in (lambda: tx.publish("default:orders", [b"2"]), tx.roll_back, tx.checkpoint):
                try:
                    call()
                except NotInProgress as error:
                    refused += "before a fork" in str(error)
            # Neither the end of the block nor an error in it affects the transaction of the parent.
            tx.__exit__(SystemExit, SystemExit(), None)
            try:
                tx.__exit__(None, None, None)
            except NotInProgress:
                refused += 1
            os._exit(refused)
        _, status = os.waitpid(child, 0)
    with client.transaction() as tx:
        print(os.waitstatus_to_exitcode(status), [one.payload for one in tx.poll("default:orders")])
"""


def test_transaction_in_a_forked_child_is_rejected_and_stays_the_parents() -> None:
    command = [sys.executable, "-c", FORKED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ended.stdout == "4 [b'1']\n", ended.stderr


def test_publish_beyond_the_transaction_buffer_keeps_the_order(server: InProcess) -> None:
    limits = Limits(transaction_bytes=1000, request_bytes=300)
    expected = [b"%03d" % number * 30 for number in range(50)]
    with server.client(limits=limits) as client:
        with client.transaction() as tx:
            tx.publish(BILLS, [bytes(900)])
            for message in expected:
                tx.publish(ORDERS, [message])
        assert [message.payload for message in client.poll(ORDERS)] == expected
        assert [len(message.payload) for message in client.poll(BILLS)] == [900]
        assert server.store.payload.first(b"") is not None


@pytest.mark.parametrize(("size", "requests"), [(0, 3), (200, 8)])
def test_publish_of_many_messages_splits_requests(server: InProcess, faults: Faults, size: int, requests: int) -> None:
    with faulty_client(server, faults, limits=Limits(request_bytes=300)) as client, client.transaction() as tx:
        tx.publish(ORDERS, [bytes(size)] * 8)
    assert faults.seen["publish"] == requests
    assert len(visible(server)) == 8


def test_call_before_the_start_or_after_the_end_is_rejected(client: Client) -> None:
    tx = client.transaction()
    with pytest.raises(NotInProgress, match=r"with client\.transaction\(\) as tx"):
        tx.publish(ORDERS, [b"a"])
    with tx:
        pass
    each_raises(
        NotInProgress, lambda: tx.publish(ORDERS, [b"a"]), lambda: tx.poll(ORDERS), tx.checkpoint, match="has ended"
    )


def test_long_transaction_that_fails_is_invalidated(client: Client, server: InProcess) -> None:
    with pytest.raises(ZeroDivisionError):
        transact(client, long=True, fail=ZeroDivisionError)
    assert server.manager.invalid_size() == 1


def test_service_knows_holder_and_timeout_of_a_transaction(client: Client, server: InProcess) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    found = []
    # The second transaction starts with the commit of the first one.
    for tx, _ in islice(client.work(ORDERS, "billing", batch=1, timeout_seconds=7), 2):
        [entry] = server.manager.visibility().in_progress
        found.append((server.manager.clients()[tx.transaction.transaction_id], entry.expiration_ms))
    assert found == [(f"{os.getpid()}@{socket.gethostname()}", NOW_MS + 7_000)] * 2


# --- participants ----------------------------------------------------------------------------------------------------


def test_participants_are_called_in_order_before_the_publish(server: InProcess, faults: Faults) -> None:
    recorder = Recorder()
    steps: list[str] = []
    faults.on_step = lambda step: steps.append(f"{step} after {recorder.names[-1:]}")
    with faulty_client(server, faults) as client, client.transaction() as tx:
        tx.publish(ORDERS, [b"a"])
        tx.register(recorder)
    assert recorder.names == ["start", "changes", "commit", "post"]
    assert steps == ["start after []", "publish after ['commit']", "commit after ['commit']"]


def transact(
    client: Client, *participants: Participant, long: bool = False, fail: type[Exception] | None = None
) -> None:
    """Publish ``a`` in a transaction of some participants, which may fail at its end."""
    with client.transaction(long=long) as tx:
        tx.publish(ORDERS, [b"a"])
        for participant in participants:
            tx.register(participant)
        if fail is not None:
            raise fail


def test_checkpoint_lets_participants_write_before_it_and_changes_their_pointer(
    client: Client, server: InProcess
) -> None:
    recorder = Recorder()
    with client.transaction() as tx:
        first = tx.transaction.write_pointer
        tx.publish(ORDERS, [b"a"])
        tx.register(recorder)
        tx.checkpoint()
        tx.publish(ORDERS, [b"b"])
        second = tx.transaction.write_pointer
    assert first < second
    assert recorder.calls[:3] == [("start", first), ("commit", first), ("update", second)]
    assert visible(server) == [b"a", b"b"]


@pytest.mark.parametrize("where", ["start", "changes", "commit"])
def test_participant_that_fails_rolls_all_back(client: Client, server: InProcess, where: str) -> None:
    first, failing = Recorder(), Recorder(where)
    with pytest.raises(LookupError, match=where):
        transact(client, first, failing)
    assert first.names[-1] == failing.names[-1] == "rollback"
    assert visible(server) == []


def test_participant_that_cannot_roll_back_leaves_it_invalid(client: Client, server: InProcess) -> None:
    first, failing, last = Recorder(), Recorder("rollback"), Recorder()
    with pytest.raises(LookupError, match="rollback") as caught:
        transact(client, first, failing, last, fail=ZeroDivisionError)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert first.names[-1] == last.names[-1] == "rollback"
    assert server.manager.invalid_size() == 1


def test_failing_rollback_after_a_lost_commit_still_rolls_back_others(server: InProcess, faults: Faults) -> None:
    last = Recorder()
    faults.at("commit", "before")
    with faulty_client(server, faults) as client, pytest.raises(LookupError):
        transact(client, Recorder("rollback"), last)
    assert last.names[-1] == "rollback"
    assert server.manager.invalid_size() == 1


def test_participant_that_fails_after_the_commit_leaves_it_committed(client: Client, server: InProcess) -> None:
    last = Recorder()
    with pytest.raises(PostCommitFailed, match="post") as caught:
        transact(client, Recorder("post"), last)
    assert isinstance(caught.value.__cause__, LookupError)
    assert last.names[-1] == "post"
    assert visible(server) == [b"a"]


def test_second_of_two_equal_changes_is_rolled_back(client: Client, server: InProcess) -> None:
    loser = Changes(b"row")

    def work() -> None:
        with client.transaction() as tx:
            tx.register(loser)
            tx.publish(ORDERS, [b"second"])
            with client.transaction() as other:
                other.register(Changes(b"row"))
                other.publish(ORDERS, [b"first"])

    with pytest.raises(Conflict):
        work()
    assert visible(server) == [b"first"]
    assert loser.calls == ["rollback"]
    assert server.manager.invalid_size() == 0


class AsyncParticipant(Participant):
    """A participant with asynchronous methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def start_tx(self, transaction: Transaction) -> None:
        await asyncio.sleep(0)
        self.calls.append("start")

    def commit_tx(self) -> Awaitable[None]:
        return asyncio.sleep(0)

    async def rollback_tx(self) -> None:
        self.calls.append("rollback")


@in_event_loop
async def test_async_participants_are_awaited(server: InProcess) -> None:
    slow = AsyncParticipant()
    async with server.async_client() as client, client.transaction() as tx:
        await tx.register(slow)
        await tx.publish(ORDERS, [b"a"])
        await tx.checkpoint()
    assert slow.calls == ["start"]
    assert visible(server) == [b"a"]


def test_participant_that_waits_without_a_loop_is_rejected(client: Client, server: InProcess) -> None:
    slow = AsyncParticipant()
    with pytest.raises(TypeError, match="AsyncClient"):
        transact(client, slow)
    assert slow.calls == ["rollback"]
    assert visible(server) == []


# --- interrupts and ignored errors -----------------------------------------------------------------------------------


def interrupt_at(faults: Faults, step: str) -> None:
    """Interrupt the client at the first request of a step."""

    def interrupt(met: str) -> None:
        if met == step and faults.seen[met] == 1:
            raise KeyboardInterrupt

    faults.on_step = interrupt


@pytest.mark.parametrize("step", ["publish", "commit"])
def test_interrupt_while_it_waits_invalidates_and_never_aborts(server: InProcess, faults: Faults, step: str) -> None:
    interrupt_at(faults, step)
    with faulty_client(server, faults) as client, pytest.raises(KeyboardInterrupt), client.transaction() as tx:
        tx.publish(ORDERS, [b"a"])
    assert faults.seen["abort"] == 0
    assert faults.seen["invalidate"] == 1
    assert visible(server) == []


@in_event_loop
async def test_task_cancelled_while_it_publishes_invalidates(server: InProcess, faults: Faults) -> None:
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()
    task: asyncio.Task[None]

    def on_step(step: str) -> None:
        if step == "publish":
            loop.call_soon(task.cancel)
            arrived.set()

    async def work() -> None:
        faults.on_step = on_step
        async with faulty_async_client(server, faults) as client, client.transaction() as tx:
            await tx.publish(ORDERS, [b"a"])

    task = asyncio.create_task(work())
    await arrived.wait()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert faults.seen["abort"] == 0
    assert faults.seen["invalidate"] == 1
    assert visible(server) == []


@in_event_loop
async def test_close_during_a_cancelled_start_ends_the_transaction(server: InProcess) -> None:
    ended: list[str] = []
    go = threading.Event()

    def start_late() -> str:
        assert go.wait(10)
        return "begun"

    client = server.async_client(limits=Limits(connections=1))
    wire = client._wire
    task = asyncio.create_task(wire.start_or_undo(start_late, ended.append))
    await asyncio.sleep(0)
    # The thread has returned, but the loop has not run: the task still waits.
    go.set()
    wire._threads.submit(lambda: None).result()
    task.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    for thread in threading.enumerate():
        if thread.name.startswith("Thread") and not thread.daemon:
            thread.join(PATIENCE_SECONDS)
    assert ended == ["begun"]


@pytest.mark.parametrize("moment", ["under way", "done", "answered"])
@pytest.mark.parametrize("long", [False, True])
@in_event_loop
async def test_task_cancelled_while_it_begins_aborts(
    server: InProcess, faults: Faults, moment: str, long: bool
) -> None:
    loop = asyncio.get_running_loop()
    began, cancelled, done = threading.Event(), threading.Event(), threading.Event()

    def cancel() -> None:
        if moment != "under way":
            began.set()
            client._wire._threads.submit(done.set)
            assert done.wait(PATIENCE_SECONDS)
        if moment == "answered":
            loop.call_soon(task.cancel)
        else:
            task.cancel()
        cancelled.set()

    def on_step(step: str) -> None:
        if step == "start":
            loop.call_soon_threadsafe(cancel)
            # The client has no other thread.
            assert (cancelled if moment == "under way" else began).wait(PATIENCE_SECONDS)

    async def work() -> None:
        async with client.transaction(long=long):
            raise AssertionError("the transaction has started")

    faults.on_step = on_step
    async with faulty_async_client(server, faults, limits=Limits(connections=1)) as client:
        task = asyncio.create_task(work())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (faults.seen["start"], faults.seen["abort"]) == (1, 1)
    assert server.manager.clients() == {}


@in_event_loop
async def test_task_cancelled_before_it_begins_does_nothing(server: InProcess, faults: Faults) -> None:
    busy = threading.Event()

    async def work() -> None:
        async with client.transaction():
            raise AssertionError("the transaction has started")

    async with faulty_async_client(server, faults, limits=Limits(connections=1)) as client:
        client._wire._threads.submit(busy.wait)
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        busy.set()
    assert not faults.seen


class InterruptedRecorder(Recorder):
    """A participant that raises ``KeyboardInterrupt``."""

    def _note(self, name: str) -> None:
        try:
            super()._note(name)
        except LookupError as error:
            raise KeyboardInterrupt from error


@pytest.mark.parametrize("long", [False, True])
def test_interrupt_in_a_roll_back_leaves_it_invalid(client: Client, server: InProcess, long: bool) -> None:
    failing, interrupted, last = Recorder("rollback"), InterruptedRecorder("rollback"), Recorder()
    with pytest.raises(KeyboardInterrupt):
        transact(client, failing, interrupted, last, long=long, fail=ZeroDivisionError)
    assert last.names[-1] == "rollback"
    assert len(server.manager.visibility().in_progress) == 0
    assert server.manager.invalid_size() == 1


def test_interrupt_after_the_commit_leaves_it_committed(client: Client, server: InProcess) -> None:
    last = Recorder()
    with pytest.raises(KeyboardInterrupt):
        transact(client, InterruptedRecorder("post"), last)
    assert last.names[-1] == "post"
    assert visible(server) == [b"a"]


@pytest.mark.parametrize("step", ["rollback", "abort"])
def test_interrupt_during_a_rollback_invalidates(server: InProcess, faults: Faults, step: str) -> None:
    def work() -> None:
        with faulty_client(server, faults) as client, client.transaction() as tx:
            tx.publish(ORDERS, [b"a"])
            tx.publish("default:missing", [b"b"])

    interrupt_at(faults, step)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert faults.seen["invalidate"] == 1
    assert len(server.manager.visibility().in_progress) == 0
    assert visible(server) == []


def test_interrupt_while_it_looks_at_the_outcome_invalidates(server: InProcess, faults: Faults) -> None:
    interrupt_at(faults, "invalidate")
    faults.at("commit", "before")
    with faulty_client(server, faults) as client, pytest.raises(KeyboardInterrupt), client.transaction() as tx:
        tx.publish(ORDERS, [b"a"])
    assert len(server.manager.visibility().in_progress) == 0
    assert visible(server) == []


@pytest.mark.parametrize("step", ["rollback", "abort"])
@in_event_loop
async def test_task_cancelled_during_a_rollback_invalidates(server: InProcess, faults: Faults, step: str) -> None:
    loop = asyncio.get_running_loop()
    cancelled = threading.Event()

    def cancel() -> None:
        task.cancel()
        cancelled.set()

    def on_step(met: str) -> None:
        if met == step:
            loop.call_soon_threadsafe(cancel)
        if met == step == "abort":
            # The step does not end before the cancellation.
            assert cancelled.wait(PATIENCE_SECONDS)

    async def work() -> None:
        async with faulty_async_client(server, faults) as client, client.transaction() as tx:
            await tx.publish(ORDERS, [b"a"])
            await tx.publish("default:missing", [b"b"])

    faults.on_step = on_step
    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert faults.seen["invalidate"] == 1
    assert len(server.manager.visibility().in_progress) == 0
    assert visible(server) == []


@pytest.mark.parametrize(("fail", "end"), [(None, "post"), (ZeroDivisionError, "rollback")])
def test_thousands_of_participants_are_all_called(
    client: Client, server: InProcess, fail: type[Exception] | None, end: str
) -> None:
    last = Recorder()
    with nullcontext() if fail is None else pytest.raises(fail):
        transact(client, *[Participant()] * 3000, last, fail=fail)
    assert last.names[-1] == end
    assert server.manager.invalid_size() == 0


def test_transaction_entered_twice_is_rejected(client: Client, server: InProcess) -> None:
    context = client.transaction()

    def work() -> None:
        with context:
            context.publish(ORDERS, [b"outer"])
            with context:
                context.publish(ORDERS, [b"inner"])

    with pytest.raises(TransactionError, match=r"client\.transaction\(\)"):
        work()
    with pytest.raises(TransactionError, match=r"client\.transaction\(\)"):
        context.__enter__()
    assert len(server.manager.visibility().in_progress) == 0
    assert visible(server) == []


@pytest.mark.parametrize("messages", [b"one", "two", ["three"], [None], 5])
def test_publish_without_a_payload_is_rejected(client: Client, server: InProcess, messages: list[bytes]) -> None:
    with pytest.raises(BadRequest), client.transaction() as tx:
        tx.publish(ORDERS, messages)
    assert visible(server) == []
    assert server.manager.invalid_size() == 0


def test_transaction_with_a_failed_store_cannot_commit(server: InProcess, faults: Faults) -> None:
    faults.at("store", "before", times=1)
    with faulty_client(server, faults, limits=Limits(transaction_bytes=1)) as client:

        def work() -> None:
            with client.transaction() as tx:
                with pytest.raises(Unanswered):
                    tx.publish(ORDERS, [b"lost"])
                tx.publish(BILLS, [b"kept"])

        with pytest.raises(Invalidated):
            work()
    assert visible(server) == []
    assert server.manager.invalid_size() == 1


def test_rollback_by_pointer_hides_all_of_it_in_the_topic(server: InProcess, client: Client) -> None:
    transaction = server.manager.start_short()
    for payload in (b"1", b"2"):
        client.publish(ORDERS, [payload], transaction=transaction)
    client.publish(BILLS, [b"3"], transaction=transaction)
    client.rollback(ORDERS, transaction.write_pointer)
    server.manager.commit(transaction.transaction_id)
    with client.transaction() as tx:
        assert [message.payload for message in tx.poll(ORDERS)] == []
        assert [message.payload for message in tx.poll(BILLS)] == [b"3"]


@pytest.mark.parametrize("transaction_bytes", [1, 1000])
def test_roll_back_of_messages_with_ttls_hides_all(server: InProcess, transaction_bytes: int) -> None:
    with server.client(limits=Limits(transaction_bytes=transaction_bytes)) as other, other.transaction() as tx:
        tx.publish(ORDERS, [b"1"])
        tx.publish(ORDERS, [b"2", b"3"], ttl=60)
        tx.roll_back()
    assert (visible(server), server.manager.invalid_size()) == ([], 0)


@pytest.mark.parametrize("transaction_bytes", [1, 4, 1000])
def test_transaction_with_ttls_keeps_the_order(server: InProcess, clock: ManualClock, transaction_bytes: int) -> None:
    with server.client(limits=Limits(transaction_bytes=transaction_bytes)) as other:
        with other.transaction() as tx:
            tx.publish(ORDERS, [b"1", b"2"])
            tx.publish(ORDERS, [b"3"], ttl=60)
            tx.publish(ORDERS, [b"4"])
            tx.publish(BILLS, [b"5"], ttl=60)
            tx.publish(ORDERS, [b"6"])
        with other.transaction() as tx:
            assert [message.payload for message in tx.poll(ORDERS)] == [b"1", b"2", b"3", b"4", b"6"]
        clock.advance(60_001)
        with other.transaction() as tx:
            assert [message.payload for message in tx.poll(ORDERS)] == [b"1", b"2", b"4", b"6"]
            assert [message.payload for message in tx.poll(BILLS)] == []
