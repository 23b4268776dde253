"""A server that fails at each step of a transaction: which messages are visible to which readers.

The result of the client must be true. A committed transaction is completely visible, a failed transaction never is, and
a transaction with an unknown outcome is one of the two. The client never aborts a transaction with an unknown outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.client.faults import Faults, When, faulty_async_client, faulty_client, forget_changes
from tests.kit.client import BILLS, ORDERS, Changes, visible
from tests.support import raising
from tms_core.client import (
    Conflict,
    Invalidated,
    Limits,
    Measured,
    OutcomeUnknown,
    Participant,
    TmsError,
    TopicNotFound,
    Unanswered,
)
from tms_core.client.testing import InProcess
from tms_core.clock import ManualClock

#: The limit above which the client stores messages before the commit.
SMALL = Limits(transaction_bytes=3)


def transact(server: InProcess, faults: Faults, participant: Participant, *, fail_last: bool = False) -> None:
    """Store, publish and commit; with ``fail_last`` the server rejects the last publish."""
    with faulty_client(server, faults, limits=SMALL) as client, client.transaction() as tx:
        tx.register(participant)
        tx.publish(ORDERS, [b"stored 1", b"stored 2"])
        tx.publish(BILLS, [b"1"])
        if fail_last:
            tx.publish("default:missing", [b"2"])


def transact_in_loop(server: InProcess, faults: Faults, participant: Participant, *, fail_last: bool = False) -> None:
    async def main() -> None:
        async with faulty_async_client(server, faults, limits=SMALL) as client, client.transaction() as tx:
            await tx.register(participant)
            await tx.publish(ORDERS, [b"stored 1", b"stored 2"])
            await tx.publish(BILLS, [b"1"])
            if fail_last:
                await tx.publish("default:missing", [b"2"])

    asyncio.run(main())


Transact = Callable[..., None]


def bill(server: InProcess, faults: Faults, participant: Participant) -> None:
    """Read unread messages of a consumer, publish them again and move its position in one transaction."""
    with faulty_client(server, faults) as client, client.transaction() as tx:
        for order in tx.consume(ORDERS, "billing"):
            tx.publish(BILLS, [order.payload])
        tx.register(participant)


def bill_in_loop(server: InProcess, faults: Faults, participant: Participant) -> None:
    async def main() -> None:
        async with faulty_async_client(server, faults) as client, client.transaction() as tx:
            async for order in tx.consume(ORDERS, "billing"):
                await tx.publish(BILLS, [order.payload])
            await tx.register(participant)

    asyncio.run(main())


def time_out(server: InProcess, clock: ManualClock) -> None:
    """Time out all transactions in progress."""
    clock.advance(3_600_000)
    server.manager.expire()


ALL = [b"stored 1", b"stored 2", b"1"]


class Case:
    """A transaction of one of the clients, and a server with faults."""

    def __init__(self, server: InProcess, faults: Faults, clock: ManualClock, transacts: Transact) -> None:
        self.server, self.faults, self.clock, self._transacts = server, faults, clock, transacts
        self.changes = Changes()

    def transact(self, participant: Participant | None = None, *, fail_last: bool = False) -> None:
        self._transacts(self.server, self.faults, participant or self.changes, fail_last=fail_last)

    def settled(self) -> list[bytes]:
        """Return the visible messages; assert that a timeout of all transactions does not change them."""
        now = visible(self.server)
        time_out(self.server, self.clock)
        assert visible(self.server) == now
        return now

    def transact_with_conflict(self) -> None:
        """Run a transaction whose commit conflicts with another transaction."""
        done: list[str] = []

        def commit_other(step: str) -> None:
            if step == "commit" and not done:
                done.append(step)
                with self.server.client() as client, client.transaction() as tx:
                    tx.register(Changes())

        self.faults.on_step = commit_other
        self.transact()


@pytest.fixture(params=[transact, transact_in_loop], ids=["sync", "async"])
def case(request: pytest.FixtureRequest, server: InProcess, faults: Faults, clock: ManualClock) -> Case:
    return Case(server, faults, clock, request.param)


def test_commit_without_faults_shows_messages_and_calls_participants(case: Case) -> None:
    case.transact()
    assert case.settled() == ALL
    assert case.changes.calls == ["commit", "post"]
    assert case.faults.seen == {"start": 1, "store": 1, "publish": 2, "canCommit": 1, "commit": 1}
    assert case.server.manager.invalid_size() == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["start", "canCommit"])
def test_commit_with_one_lost_response_is_retried(case: Case, step: str, when: When) -> None:
    case.faults.at(step, when, times=1)
    case.transact()
    assert case.settled() == ALL


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("step", "calls", "left"), [("start", [], 0), ("canCommit", ["rollback"], 1)])
def test_start_or_can_commit_without_responses_never_aborts(
    case: Case, when: When, step: str, calls: list[str], left: int
) -> None:
    case.faults.at(step, when)
    with pytest.raises(OutcomeUnknown):
        case.transact()
    assert case.changes.calls == calls
    assert case.faults.seen["abort"] == case.faults.seen["publish"] == 0
    assert case.server.manager.invalid_size() == left
    assert case.settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["store", "publish"])
def test_write_without_a_response_invalidates_and_never_aborts(case: Case, step: str, when: When) -> None:
    case.faults.at(step, when, times=1)
    with pytest.raises(Unanswered):
        case.transact()
    assert case.changes.calls[-1] == "rollback"
    assert case.faults.seen["commit"] == case.faults.seen["abort"] == 0
    assert case.server.manager.invalid_size() == 1
    assert case.settled() == []


@pytest.mark.parametrize("case", [transact], ids=["sync"], indirect=True)
@pytest.mark.parametrize("step", ["store", "publish"])
def test_late_write_of_an_unanswered_request_stays_invisible(case: Case, step: str) -> None:
    case.faults.at(step, "late", times=1)
    with pytest.raises(Unanswered):
        case.transact()
    [late] = case.faults.late
    late()
    assert case.settled() == []
    with case.server.client() as client:
        assert [message.payload for topic in (ORDERS, BILLS) for message in client.poll(topic)] == []


@pytest.mark.parametrize("forgotten", ["begun", "asked"])
def test_commit_after_the_manager_forgot_the_changes_is_retried(
    case: Case, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    forget_changes(case.server, case.faults, monkeypatch, "commit")
    changes = Changes() if forgotten == "asked" else Participant()
    case.transact(changes)
    assert visible(case.server) == ALL
    assert (case.faults.seen["commit"], case.faults.seen["canCommit"]) == (2, 1 + (forgotten == "asked"))


def test_commit_that_was_not_done_is_invalidated(case: Case) -> None:
    case.faults.at("commit", "before")
    with pytest.raises(Invalidated):
        case.transact()
    assert case.changes.calls == ["commit", "rollback"]
    assert case.faults.seen["commit"] == 1
    assert case.faults.seen["abort"] == 0
    assert case.server.manager.invalid_size() == 1
    assert case.settled() == []


def test_commit_that_was_done_is_found_committed(case: Case) -> None:
    case.faults.at("commit", "after")
    case.transact()
    assert case.changes.calls == ["commit", "post"]
    assert case.faults.seen["commit"] == 1
    assert case.faults.seen["rollback"] == 0
    assert case.settled() == ALL


def test_late_commit_of_an_invalidated_transaction_is_rejected(case: Case) -> None:
    case.faults.at("commit", "late")
    with pytest.raises(Invalidated):
        case.transact()
    [late] = case.faults.late
    assert b"not in progress" in str(late()).encode()
    assert case.settled() == []


@pytest.mark.parametrize(("when", "expected"), [("before", []), ("after", ALL)])
def test_commit_at_a_dead_service_leaves_all_or_nothing(case: Case, when: When, expected: list[bytes]) -> None:
    case.faults.at("commit", when)
    case.faults.at("invalidate", "before")
    with pytest.raises(OutcomeUnknown):
        case.transact()
    # The client rolls back nothing that may be committed, and reports no commit.
    assert case.changes.calls == ["commit"]
    assert case.faults.seen["rollback"] == case.faults.seen["abort"] == 0
    time_out(case.server, case.clock)
    assert visible(case.server) == expected


@pytest.mark.parametrize("when", ["before", "after"])
def test_invalidation_without_a_response_is_found_out(case: Case, when: When) -> None:
    case.faults.at("commit", "before")
    case.faults.at("invalidate", when, times=1)
    with pytest.raises(Invalidated):
        case.transact()
    assert case.settled() == []


@pytest.mark.parametrize(
    ("times", "aborted"), [(1, True), (1_000_000, False)], ids=["one lost response", "no response"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_rollback_without_responses_aborts_or_invalidates(case: Case, when: When, times: int, aborted: bool) -> None:
    case.faults.at("rollback", when, times=times)
    with pytest.raises(Conflict):
        case.transact_with_conflict()
    assert case.faults.seen["abort"] == aborted
    assert case.server.manager.invalid_size() == (not aborted)
    assert case.settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_conflict_with_an_unanswered_abort_shows_no_message(case: Case, when: When) -> None:
    case.faults.at("abort", when)
    with pytest.raises(Conflict):
        case.transact_with_conflict()
    assert case.faults.seen["abort"] > 0
    assert case.settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("bills", [bill, bill_in_loop], ids=["sync", "async"])
@pytest.mark.parametrize(
    "step", ["start", "poll", "PUT billing", "publish", "commit", "rollback", "abort", "invalidate"]
)
def test_retry_after_no_answer_at_a_step_counts_reads_once(
    server: InProcess, faults: Faults, clock: ManualClock, bills: Transact, step: str, when: When
) -> None:
    with server.client() as client:
        client.publish(ORDERS, [b"1"])
    faults.at(step, when)
    with suppress(TmsError):
        bills(server, faults, Changes())
    faults.heal()
    # The claim of an unfinished transaction is free after its timeout.
    time_out(server, clock)
    bills(server, faults, Changes())
    bills(server, faults, Changes())
    assert visible(server) == [b"1", b"1"]


def test_rejected_publish_rolls_back_and_aborts(case: Case) -> None:
    with pytest.raises(TopicNotFound):
        case.transact(fail_last=True)
    assert case.changes.calls == ["commit", "rollback"]
    assert case.faults.seen["rollback"] == 2
    assert case.faults.seen["abort"] == 1
    assert case.server.manager.invalid_size() == 0
    assert case.settled() == []


# --- events of hooks -------------------------------------------------------------------------------------------------


def test_measure_receives_counts_and_errors_of_each_publish_and_poll(server: InProcess) -> None:
    calls: list[Measured] = []
    with server.client(measure=calls.append) as client:
        client.publish(ORDERS, [b"one", b"three"])
        with client.transaction() as tx:
            tx.publish(BILLS, [b"bill"])
        client.publish_async(ORDERS, [b"later"])
        client.flush()
        assert len(list(client.poll(ORDERS))) == 3
        with pytest.raises(TopicNotFound):
            client.publish("default:nowhere", [b"lost"])
        with pytest.raises(TopicNotFound):
            list(client.poll("default:nowhere"))
        client.topics()
    assert [(one.operation, str(one.topic), one.messages, one.payload_bytes, one.error) for one in calls] == [
        ("publish", "default:orders", 2, 8, ""),
        ("publish", "default:bills", 1, 4, ""),
        ("publish", "default:orders", 1, 5, ""),
        ("poll", "default:orders", 3, 13, ""),
        ("publish", "default:nowhere", 0, 0, "TopicNotFound"),
        ("poll", "default:nowhere", 0, 0, "TopicNotFound"),
    ]
    assert all(one.seconds >= 0 for one in calls)


def test_failing_measure_is_logged_and_publish_succeeds(server: InProcess, caplog: pytest.LogCaptureFixture) -> None:
    with server.client(measure=raising(ValueError("no metrics"))) as client:
        client.publish(ORDERS, [b"one"])
    assert "measure" in caplog.text
    assert visible(server) == [b"one"]
