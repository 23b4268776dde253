"""A server that dies before it answers, at each step of a transaction: what is visible in the end, and to whom.

What the client says must be true of the store, whatever it was told: a transaction that it calls committed is visible
whole, one that it calls failed never is, and where it says that nobody knows, it is one of the two. Nothing whose
outcome was unknown is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.client.faults import Faults, When, faulty_async_client, faulty_client
from tms_core.client import (
    Conflict,
    Invalidated,
    Limits,
    OutcomeUnknown,
    Participant,
    TmsError,
    TopicNotFound,
    Unanswered,
)
from tms_core.client.testing import InProcess
from tms_core.clock import ManualClock

#: Two messages go to the server before commit, by ``store``; in the other topic they are published as they are.
SMALL = Limits(transaction_bytes=3)
ORDERS, BILLS = "default:orders", "default:bills"


class Changes(Participant):
    """Takes part, and writes down what it is told.

    Attributes:
        told: the names of its methods, in order.
    """

    def __init__(self, key: bytes = b"key") -> None:
        self.told: list[str] = []
        self._key = key

    def tx_changes(self) -> list[bytes]:
        return [self._key]

    def commit_tx(self) -> None:
        self.told.append("commit")

    def post_tx_commit(self) -> None:
        self.told.append("post")

    def rollback_tx(self) -> None:
        self.told.append("rollback")


def transact(site: InProcess, faults: Faults, participant: Participant, *, fail_last: bool = False) -> None:
    """A transaction that stores, publishes and commits; with ``fail_last`` its last publish is refused."""
    with faulty_client(site, faults, limits=SMALL) as client, client.transaction() as tx:
        tx.register(participant)
        tx.publish(ORDERS, [b"stored 1", b"stored 2"])
        tx.publish(BILLS, [b"1"])
        if fail_last:
            tx.publish("default:missing", [b"2"])


def transact_in_loop(site: InProcess, faults: Faults, participant: Participant, *, fail_last: bool = False) -> None:
    """The same with an event loop."""

    async def main() -> None:
        async with faulty_async_client(site, faults, limits=SMALL) as client, client.transaction() as tx:
            await tx.register(participant)
            await tx.publish(ORDERS, [b"stored 1", b"stored 2"])
            await tx.publish(BILLS, [b"1"])
            if fail_last:
                await tx.publish("default:missing", [b"2"])

    asyncio.run(main())


Transact = Callable[..., None]


@pytest.fixture(params=[transact, transact_in_loop], ids=["sync", "async"])
def transacts(request: pytest.FixtureRequest) -> Transact:
    """A transaction of either client."""
    found: Transact = request.param
    return found


def visible(site: InProcess) -> list[bytes]:
    """What a transaction that begins now sees."""
    with site.client() as client, client.transaction() as tx:
        return [message.payload for topic in (ORDERS, BILLS) for message in tx.poll(topic)]


def bill(site: InProcess, faults: Faults, participant: Participant) -> None:
    """A transaction that reads what a consumer has not, publishes it again, and moves its position."""
    with faulty_client(site, faults) as client, client.transaction() as tx:
        for order in tx.consume(ORDERS, "billing"):
            tx.publish(BILLS, [order.payload])
        tx.register(participant)


def bill_in_loop(site: InProcess, faults: Faults, participant: Participant) -> None:
    """The same with an event loop."""

    async def main() -> None:
        async with faulty_async_client(site, faults) as client, client.transaction() as tx:
            async for order in tx.consume(ORDERS, "billing"):
                await tx.publish(BILLS, [order.payload])
            await tx.register(participant)

    asyncio.run(main())


def time_out(site: InProcess, clock: ManualClock) -> None:
    """Have all transactions that are still in progress given up."""
    clock.advance(3_600_000)
    site.manager.expire()


ALL = [b"stored 1", b"stored 2", b"1"]


@pytest.fixture
def settled(site: InProcess, clock: ManualClock) -> Callable[[], list[bytes]]:
    """What is visible now, and also after all that is in progress has timed out."""

    def found() -> list[bytes]:
        now = visible(site)
        time_out(site, clock)
        assert visible(site) == now
        return now

    return found


def test_given_no_fault_when_it_commits_then_all_is_visible_and_participants_know(
    site: InProcess, faults: Faults, transacts: Transact, settled: Callable[[], list[bytes]]
) -> None:
    changes = Changes()
    transacts(site, faults, changes)
    assert settled() == ALL
    assert changes.told == ["commit", "post"]
    assert faults.seen == {"start": 1, "store": 1, "publish": 2, "canCommit": 1, "commit": 1}
    assert site.manager.invalid_size() == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_no_answer_to_the_begin_when_tried_again_then_it_is_done(
    site: InProcess, faults: Faults, transacts: Transact, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("start", when, times=1)
    transacts(site, faults, Changes())
    assert settled() == ALL


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_never_an_answer_to_the_begin_when_it_fails_then_there_is_nothing(
    site: InProcess, faults: Faults, transacts: Transact, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("start", when)
    changes = Changes()
    with pytest.raises(OutcomeUnknown):
        transacts(site, faults, changes)
    assert changes.told == []
    assert settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["store", "publish"])
def test_given_no_answer_to_what_it_writes_when_it_fails_then_it_is_invalidated_and_never_aborted(
    site: InProcess, faults: Faults, transacts: Transact, step: str, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at(step, when, times=1)
    changes = Changes()
    with pytest.raises(Unanswered):
        transacts(site, faults, changes)
    assert changes.told[-1] == "rollback"
    assert faults.seen["commit"] == faults.seen["abort"] == 0
    assert site.manager.invalid_size() == 1
    assert settled() == []


@pytest.mark.parametrize("step", ["store", "publish"])
def test_given_a_write_that_arrives_when_all_is_over_then_nobody_sees_it(
    site: InProcess, faults: Faults, step: str, settled: Callable[[], list[bytes]]
) -> None:
    faults.at(step, "late", times=1)
    with pytest.raises(Unanswered):
        transact(site, faults, Changes())
    [late] = faults.late
    late()
    assert settled() == []
    with site.client() as client:
        assert [message.payload for topic in (ORDERS, BILLS) for message in client.poll(topic)] == []


@pytest.mark.parametrize("forgotten", ["begun", "asked"])
def test_given_a_manager_that_forgot_what_was_changed_when_asked_again_then_it_commits(
    site: InProcess, faults: Faults, transacts: Transact, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    commit = site.manager.commit

    def restarted(pointer: int) -> None:
        """As a manager that has recovered what was on its disk."""
        with monkeypatch.context() as once, site.manager._durable.looking() as state:
            once.setattr(state, "recovered_pointer", pointer)
            if faults.seen["commit"] == 1:
                state.committing.pop(pointer, None)
            commit(pointer)

    monkeypatch.setattr(site.manager, "commit", restarted)
    changes = Changes() if forgotten == "asked" else Participant()
    transacts(site, faults, changes)
    assert visible(site) == ALL
    assert (faults.seen["commit"], faults.seen["canCommit"]) == (2, 1 + (forgotten == "asked"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_one_lost_answer_to_can_commit_when_asked_again_then_it_commits(
    site: InProcess, faults: Faults, transacts: Transact, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("canCommit", when, times=1)
    transacts(site, faults, Changes())
    assert settled() == ALL


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_never_an_answer_to_can_commit_when_it_fails_then_it_is_invalidated_and_never_aborted(
    site: InProcess, faults: Faults, transacts: Transact, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("canCommit", when)
    changes = Changes()
    with pytest.raises(OutcomeUnknown):
        transacts(site, faults, changes)
    assert changes.told == ["rollback"]
    assert faults.seen["abort"] == faults.seen["publish"] == 0
    assert site.manager.invalid_size() == 1
    assert settled() == []


def test_given_a_commit_that_was_not_done_when_its_answer_is_lost_then_it_is_invalidated(
    site: InProcess, faults: Faults, transacts: Transact, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("commit", "before")
    changes = Changes()
    with pytest.raises(Invalidated):
        transacts(site, faults, changes)
    assert changes.told == ["commit", "rollback"]
    assert faults.seen["commit"] == 1
    assert faults.seen["abort"] == 0
    assert site.manager.invalid_size() == 1
    assert settled() == []


def test_given_a_commit_that_was_done_when_its_answer_is_lost_then_it_is_found_committed(
    site: InProcess, faults: Faults, transacts: Transact, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("commit", "after")
    changes = Changes()
    transacts(site, faults, changes)
    assert changes.told == ["commit", "post"]
    assert faults.seen["commit"] == 1
    assert faults.seen["rollback"] == 0
    assert settled() == ALL


def test_given_a_commit_that_arrives_when_all_is_over_then_it_is_refused(
    site: InProcess, faults: Faults, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("commit", "late")
    with pytest.raises(Invalidated):
        transact(site, faults, Changes())
    [late] = faults.late
    assert b"not in progress" in str(late()).encode()
    assert settled() == []


@pytest.mark.parametrize(("when", "expected"), [("before", []), ("after", ALL)])
def test_given_a_service_that_dies_at_the_commit_for_good_when_it_is_back_then_all_is_there_or_nothing(
    site: InProcess, faults: Faults, transacts: Transact, when: When, expected: list[bytes], clock: ManualClock
) -> None:
    changes = Changes()
    faults.at("commit", when)
    faults.at("invalidate", "before")
    with pytest.raises(OutcomeUnknown, match="not known whether transaction"):
        transacts(site, faults, changes)
    # Nothing is taken back of what may be committed, and nobody is told that it was.
    assert changes.told == ["commit"]
    assert faults.seen["rollback"] == faults.seen["abort"] == 0
    time_out(site, clock)
    assert visible(site) == expected


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_no_answer_to_the_invalidation_when_asked_again_then_what_happened_is_found_out(
    site: InProcess, faults: Faults, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("commit", "before")
    faults.at("invalidate", when, times=1)
    with pytest.raises(Invalidated):
        transact(site, faults, Changes())
    assert settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_one_lost_answer_to_a_rollback_when_asked_again_then_it_is_aborted(
    site: InProcess, faults: Faults, transacts: Transact, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("rollback", when, times=1)
    with pytest.raises(Conflict):
        with_conflict(site, faults, transacts)
    assert faults.seen["abort"] == 1
    assert site.manager.invalid_size() == 0
    assert settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_never_an_answer_to_a_rollback_when_it_fails_then_it_is_invalidated_and_never_aborted(
    site: InProcess, faults: Faults, transacts: Transact, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("rollback", when)
    with pytest.raises(Conflict):
        with_conflict(site, faults, transacts)
    assert faults.seen["abort"] == 0
    assert site.manager.invalid_size() == 1
    assert settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_given_never_an_answer_to_the_abort_when_it_fails_then_nothing_is_visible(
    site: InProcess, faults: Faults, transacts: Transact, when: When, settled: Callable[[], list[bytes]]
) -> None:
    faults.at("abort", when)
    with pytest.raises(Conflict):
        with_conflict(site, faults, transacts)
    assert faults.seen["abort"] > 0
    assert settled() == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("bills", [bill, bill_in_loop], ids=["sync", "async"])
@pytest.mark.parametrize(
    "step", ["start", "poll", "PUT billing", "publish", "commit", "rollback", "abort", "invalidate"]
)
def test_given_never_an_answer_at_a_step_when_it_is_done_again_then_what_was_read_counts_once(
    site: InProcess, faults: Faults, clock: ManualClock, bills: Transact, step: str, when: When
) -> None:
    with site.client() as client:
        client.publish(ORDERS, [b"1"])
    faults.at(step, when)
    with suppress(TmsError):
        bills(site, faults, Changes())
    faults.heal()
    # Where it was left to time out, its claim is free only then.
    time_out(site, clock)
    bills(site, faults, Changes())
    bills(site, faults, Changes())
    assert visible(site) == [b"1", b"1"]


def with_conflict(site: InProcess, faults: Faults, transacts: Transact) -> None:
    """A transaction whose commit is refused, because another one changes the same while it publishes."""
    done: list[str] = []

    def other(step: str) -> None:
        if step == "commit" and not done:
            done.append(step)
            with site.client() as client, client.transaction() as tx:
                tx.register(Changes())

    faults.meanwhile = other
    transacts(site, faults, Changes())


def test_given_a_refused_publish_when_it_fails_then_what_was_published_is_taken_back_and_it_is_aborted(
    site: InProcess, faults: Faults, transacts: Transact, settled: Callable[[], list[bytes]]
) -> None:
    changes = Changes()
    with pytest.raises(TopicNotFound):
        transacts(site, faults, changes, fail_last=True)
    assert changes.told == ["commit", "rollback"]
    assert faults.seen["rollback"] == 2
    assert faults.seen["abort"] == 1
    assert site.manager.invalid_size() == 0
    assert settled() == []
