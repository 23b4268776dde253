"""Producers of the client: exactly-once publishing, fencing, and the outcome of the previous instance."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from uuid import UUID

import pytest

from tests.client.faults import Faults, When, faulty_async_client, faulty_client
from tests.kit.client import BILLS, ORDERS, committed
from tests.support import each_raises, in_event_loop, raising
from tms_core.client import (
    Attempt,
    BadRequest,
    Client,
    Invalidated,
    Limits,
    NotInProgress,
    Participant,
    PreviousTransaction,
    ProducerFenced,
    ProducerNotFound,
    TmsError,
    Unanswered,
)
from tms_core.client.testing import InProcess
from tms_core.clock import ManualClock
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.topics.partitions import hash_key
from tms_core.topic import TopicId
from tms_core.transaction.rpc.client import TransactionClient

#: The client sends each message of a transaction at once.
SMALL = Limits(transaction_bytes=1)


def last_transaction(client: Client) -> PreviousTransaction | None:
    """Return the last transaction as the next instance receives it."""
    with client.producer(BILLS, "importer") as producer:
        return producer.previous


def test_previous_instance_in_a_transaction_is_fenced(server: InProcess) -> None:
    with server.client(limits=SMALL) as client:
        tx = client.producer(BILLS, "importer").__enter__().transaction().__enter__()
        tx.publish(BILLS, [b"sent"])
        client.producer(BILLS, "importer").__enter__()
        with pytest.raises(ProducerFenced):
            tx.publish(BILLS, [b"late"])
        tx.roll_back()
        with suppress(ProducerFenced):
            tx.__exit__(None, None, None)
        assert committed(client) == []


def test_unregistered_or_badly_named_producer_is_rejected(client: Client) -> None:
    with pytest.raises(NotInProgress, match="not registered"):
        client.producer(BILLS, "importer").publish([b"a"])
    with pytest.raises(BadRequest), client.producer(BILLS, "a/b"):
        pass


# --- empty transactions ----------------------------------------------------------------------------------------------


class File(Participant):
    """A participant that records its outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def post_tx_commit(self) -> None:
        self.outcomes.append("committed")

    def rollback_tx(self) -> None:
        self.outcomes.append("rolled back")


def detach_manager(server: InProcess) -> None:
    """Detach the transaction manager from the server, as with a separate transaction service."""
    server.service.producers._transactions = server.service.producers._requests._transactions = None


@pytest.mark.parametrize("managed", [True, False])
def test_older_instance_that_only_reads_is_fenced_at_commit(server: InProcess, client: Client, managed: bool) -> None:
    client.publish(ORDERS, [b"1", b"2"])
    if not managed:
        detach_manager(server)
    file = File()
    with client.producer(BILLS, "importer") as one:
        context = one.transaction("file 2")
        tx = context.__enter__()
        tx.register(file)
        assert [message.payload for message in tx.consume(ORDERS, "billing")] == [b"1", b"2"]
        two = client.producer(BILLS, "importer").__enter__()
        with pytest.raises(ProducerFenced):
            context.__exit__(None, None, None)
        assert file.outcomes == ["rolled back"]
        with two.transaction("file 2") as tx:
            tx.register(file)
            assert [message.payload for message in tx.consume(ORDERS, "billing")] == [b"1", b"2"]
        assert file.outcomes == ["rolled back", "committed"]
        assert last_transaction(client) == PreviousTransaction(tx.transaction.transaction_id, "file 2", "committed")
    assert (committed(client), server.manager.clients()) == ([], {})


@pytest.mark.parametrize("managed", [True, False])
@in_event_loop
async def test_newer_instance_ends_a_transaction_that_only_reads(
    server: InProcess, client: Client, faults: Faults, managed: bool
) -> None:
    client.publish(ORDERS, [b"1"])
    if not managed:
        detach_manager(server)
    outcomes: list[PreviousTransaction | None] = []
    pointers: list[int] = []

    def on_step(step: str) -> None:
        if step == "commit" and not outcomes:
            outcomes.append(None)
            outcomes[0] = last_transaction(client)

    faults.on_step = on_step
    async with faulty_async_client(server, faults) as loop, loop.producer(BILLS, "importer") as one:
        for _ in range(2):
            context = one.transaction("orders")
            tx = await context.__aenter__()
            assert [message.payload async for message in tx.consume(ORDERS, "billing")] == [b"1"]
            pointers.append(tx.transaction.transaction_id)
            with pytest.raises(ProducerFenced):
                await context.__aexit__(None, None, None)
    assert outcomes == [PreviousTransaction(pointers[0], "orders", "aborted")]
    with client.transaction() as later:
        assert [message.payload for message in later.consume(ORDERS, "billing")] == [b"1"]


@pytest.mark.parametrize("limits", [Limits(), SMALL])
def test_transaction_that_publishes_sends_nothing_else(server: InProcess, faults: Faults, limits: Limits) -> None:
    with faulty_client(server, faults, limits=limits) as client, client.producer(BILLS, "importer") as producer:
        client.publish(ORDERS, [b"12"])
        before = faults.seen["publish"]
        with producer.transaction("x") as tx:
            for message in tx.consume(ORDERS, "billing"):
                tx.publish(BILLS, [message.payload])
        assert (faults.seen["publish"] - before, faults.seen["store"]) == (1, int(limits is SMALL))
        with pytest.raises(KeyError), producer.transaction("y"):
            raise KeyError
        with client.transaction() as tx:
            list(tx.consume(ORDERS, "billing"))
        assert (faults.seen["publish"] - before, faults.seen["store"]) == (1, int(limits is SMALL))
        assert committed(client) == [b"12"]


@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("times", [1, 1000])
def test_note_without_a_response_leaves_all_or_nothing(
    server: InProcess, client: Client, faults: Faults, when: When, times: int
) -> None:
    client.publish(ORDERS, [b"1"])
    faults.at("store", when, times)
    with faulty_client(server, faults) as other, other.producer(BILLS, "importer") as producer:
        with pytest.raises(Unanswered) if times > 1 else nullcontext(), producer.transaction("x") as tx:
            list(tx.consume(ORDERS, "billing"))
        for late in faults.late:
            late()
    outcome = "committed" if times == 1 else "aborted" if when == "after" else None
    found = last_transaction(client)
    assert (found.outcome if found else None) == outcome
    with client.transaction() as tx:
        assert [message.payload for message in tx.consume(ORDERS, "billing")] == ([] if times == 1 else [b"1"])


@pytest.mark.parametrize(
    "properties", [{"partitions": "2"}, {"transactions": "forbidden"}, {"transactions": "required"}]
)
def test_home_of_any_kind_knows_transactions_that_only_read(client: Client, properties: dict[str, str]) -> None:
    client.create_topic("default:home", properties=properties)
    client.publish(ORDERS, [b"1"])
    with client.producer("default:home", "importer") as producer, producer.transaction("x") as tx:
        list(tx.consume(ORDERS, "billing"))
    with client.producer("default:home", "importer") as producer:
        assert producer.previous == PreviousTransaction(tx.transaction.transaction_id, "x", "committed")


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [" 17", "17 ", " ", "file 17", "a  b", "50%", "a%20b", "a+b/c", "a\nb", "\0", "é✓"])
def test_next_instance_receives_a_label_of_any_characters_unchanged(client: Client, label: str) -> None:
    with client.producer(BILLS, "importer") as producer, producer.transaction(label) as tx:
        tx.publish(BILLS, [b"a"])
    found = last_transaction(client)
    assert found is not None
    assert (found.label, found.outcome) == (label, "committed")


@pytest.mark.parametrize("label", ["\ud800", b"x", 17, None])
def test_label_of_another_type_is_rejected_first(server: InProcess, client: Client, label: str) -> None:
    with client.producer(BILLS, "importer") as producer, pytest.raises(BadRequest, match=re.escape(repr(label))):
        producer.transaction(label)
    assert server.manager.clients() == {}


def test_label_that_is_too_long_is_rejected_before_anything_is_done(client: Client) -> None:
    with client.producer(BILLS, "importer") as producer:
        for label in ("x" * 1001, "ü" * 501):
            with pytest.raises(BadRequest, match="is too long"):
                producer.transaction(label)
        with producer.transaction("ü" * 500) as tx:
            tx.publish(BILLS, [b"a"])


@pytest.mark.parametrize("end", ["commit", "roll back", "leave", "nothing sent"])
def test_next_instance_knows_the_last_transaction_of_the_previous(server: InProcess, client: Client, end: str) -> None:
    limits = Limits() if end == "nothing sent" else SMALL
    with server.client(limits=limits) as other, other.producer(BILLS, "importer") as producer:
        context = producer.transaction("file 17 – ü")
        tx = context.__enter__()
        tx.publish(ORDERS, [b"aa"])
        if end != "leave":
            tx.roll_back() if end != "commit" else None
            context.__exit__(None, None, None)
        found = last_transaction(client)
    if end == "nothing sent":
        assert found is None
    else:
        outcome = "committed" if end == "commit" else "aborted"
        assert found == PreviousTransaction(tx.transaction.transaction_id, "file 17 – ü", outcome)
    assert committed(client, ORDERS) == ([b"aa"] if end == "commit" else [])


def test_register_with_transactions_elsewhere_finds_the_outcome(server: InProcess, client: Client) -> None:
    detach_manager(server)
    expected = None
    for outcome in ("aborted", "committed", "aborted"):
        with server.client(limits=SMALL) as other, other.producer(BILLS, "importer") as producer:
            context = producer.transaction(outcome)
            tx = context.__enter__()
            tx.publish(BILLS, [outcome.encode()])
            if outcome == "committed":
                context.__exit__(None, None, None)
            if expected is None or outcome == "committed":
                expected = PreviousTransaction(tx.transaction.transaction_id, outcome, outcome)
            # After a report of the later aborted transaction, the next instance would repeat the committed one.
            assert last_transaction(client) == expected
    assert committed(client) == [b"committed"]


def begin_transactions(client: Client, *labels: str) -> list[Any]:
    """Return open transactions of one instance that have published."""
    producer = client.producer(BILLS, "importer").__enter__()
    contexts = [producer.transaction(label) for label in labels]
    for label, context in zip(labels, contexts, strict=True):
        context.__enter__().publish(BILLS, [label.encode()])
    return contexts


def refuse_to_commit(contexts: list[Any]) -> None:
    for context in contexts:
        with pytest.raises(TmsError):
            context.__exit__(None, None, None)


def test_next_instance_hides_open_transactions_managed_elsewhere(server: InProcess, client: Client) -> None:
    detach_manager(server)
    with server.client(limits=SMALL) as other:
        contexts = begin_transactions(other, "one", "two", "three")
        contexts.pop(0).__exit__(None, None, None)
        found = last_transaction(client)
        assert found is not None
        assert (found.label, found.outcome) == ("one", "committed")
        assert server.manager.invalid_size() == 2
        refuse_to_commit(contexts)
        assert last_transaction(client) == found
    assert committed(client) == [b"one"]


def test_next_instance_hides_an_open_checkpoint_managed_elsewhere(server: InProcess, client: Client) -> None:
    detach_manager(server)
    older = server.service.producers.register(TopicId.parse(BILLS), "importer", UUID(int=1))
    transaction = server.manager.start_short()
    pointer = server.manager.checkpoint(transaction).write_pointer
    sent = Sent(TopicId.parse(BILLS), "importer", older.generation, 1, "one")
    server.service.publish(TopicId.parse(BILLS), [b"one"], pointer=pointer, sent=sent)
    assert last_transaction(client) == PreviousTransaction(pointer, "one", "aborted")
    with pytest.raises(NotInProgress):
        server.manager.commit(transaction.transaction_id)


def test_next_instance_of_a_deleted_producer_hides_open_transactions(server: InProcess, client: Client) -> None:
    detach_manager(server)
    with server.client(limits=SMALL) as other:
        contexts = begin_transactions(other, "one")
        client.delete_producer(BILLS, "importer")
        assert last_transaction(client) is not None
        refuse_to_commit(contexts)
    assert committed(client) == []


@pytest.mark.parametrize("dies", ["before the end", "before the answer"])
def test_next_instance_ends_the_transactions_of_a_dead_instance(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    detach_manager(server)
    with server.client(limits=SMALL) as other:
        contexts = begin_transactions(other, "one", "two")
        with monkeypatch.context() as patched:
            name = "invalidate" if dies == "before the end" else "abort"
            patched.setattr(TransactionClient, name, raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                last_transaction(client)
        found = last_transaction(client)
        assert found is not None
        assert (found.label, found.outcome) == ("two", "aborted")
        refuse_to_commit(contexts)
        # The next instance receives the same outcome.
        assert last_transaction(client) == found
    assert committed(client) == []


@pytest.mark.parametrize("ends", ["commit", "roll back", "leave"])
def test_transactions_that_ended_elsewhere_do_not_pile_up(server: InProcess, client: Client, ends: str) -> None:
    detach_manager(server)
    with server.client(limits=SMALL) as other, other.producer(BILLS, "importer") as producer:
        for number in range(20):
            with producer.transaction(f"committed {number}") as tx:
                tx.publish(BILLS, [b"a"])
            with producer.transaction(f"empty {number}"):
                """Nothing is published in it."""
            context = producer.transaction(f"ended {number}")
            tx = context.__enter__()
            tx.publish(ORDERS, [b"sent at once"])
            if ends == "roll back":
                tx.roll_back()
                context.__exit__(None, None, None)
            elif ends == "commit":
                context.__exit__(None, None, None)
        rows = len(server.service.side.rows(b"t", b"u", 100).items)
        # The end of an abandoned transaction is unknown; of the earlier transactions, one is needed.
        assert rows == 59 if ends == "leave" else rows <= 3
        found = last_transaction(client)
        assert found is not None
        expected = "ended 19" if ends == "commit" else "empty 19"
        assert (found.label, found.outcome) == (expected, "committed")
        assert server.service.side.rows(b"t", b"u", 100).items == []
    assert len(committed(client)) == 20
    assert len(committed(client, ORDERS)) == (20 if ends == "commit" else 0)


@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("step", ["importer", "publish", "store", "commit"])
def test_lost_response_keeps_each_message_once(server: InProcess, faults: Faults, step: str, when: When) -> None:
    faults.at(step, when, times=1)
    with faulty_client(server, faults, limits=SMALL) as client:
        with client.producer(BILLS, "importer") as producer:
            producer.publish([b"1", b"2"])
            for _ in range(2):
                with suppress(Invalidated):
                    with producer.transaction("x") as tx:
                        tx.publish(BILLS, [b"3"])
                        tx.publish(BILLS, [b"4"])
                    break
            for late in faults.late:
                with suppress(TmsError):
                    late()
            assert committed(client) == [b"1", b"2", b"3", b"4"]
        found = last_transaction(client)
    assert found is not None
    assert found.outcome == "committed"


def test_producer_continues_after_a_request_without_a_response(server: InProcess, faults: Faults) -> None:
    with faulty_client(server, faults) as client, client.producer(BILLS, "importer") as producer:
        faults.at("publish", "after")
        with pytest.raises(Unanswered):
            producer.publish([b"1"])
        faults.heal()
        producer.publish([b"2"])
        assert committed(client) == [b"1", b"2"]


def test_repeat_of_a_request_in_flight_is_unanswered_not_rejected(server: InProcess, faults: Faults) -> None:
    def refuse(step: str) -> None:
        if step == "publish" and faults.seen["publish"] > 1:
            server.service.producers._requests.in_flight._busy = BusyProducers()

    faults.on_step = refuse
    faults.at("publish", "before", times=1)
    with (
        faulty_client(server, faults) as client,
        client.producer(BILLS, "importer") as producer,
        pytest.raises(Unanswered),
    ):
        producer.publish([b"1"])


class BusyProducers(dict[bytes, tuple[bytes, int]]):
    """Requests in flight of all producers."""

    def __contains__(self, _: object) -> bool:
        return True


@pytest.mark.parametrize("end", ["commit", "roll back", "fenced"])
def test_publish_stored_commits_the_chosen_payloads_in_order(server: InProcess, client: Client, end: str) -> None:
    service = server.transactions()
    with client.producer(BILLS, "importer") as producer:
        context = producer.transaction("batch 1")
        tx = context.__enter__()
        parts = [service.checkpoint(tx.transaction) for _ in range(3)]
        for number in (2, 1, 0):
            client.store(ORDERS, [b"%d%s" % (number, part) for part in (b"a", b"b")], transaction=parts[number])
        tx.publish_stored(ORDERS, [parts[number].write_pointer for number in (0, 2)])
        assert list(client.poll(ORDERS)) == []
        if end == "fenced":
            last_transaction(client)
            with pytest.raises(ProducerFenced):
                context.__exit__(None, None, None)
        else:
            context.__exit__(None, LookupError() if end == "roll back" else None, None)
    assert committed(client, ORDERS) == ([b"0a", b"0b", b"2a", b"2b"] if end == "commit" else [])
    found = last_transaction(client)
    assert (found.label if found else None) == ("batch 1" if end == "commit" else None)


def test_publish_stored_with_a_ttl_expires(server: InProcess, client: Client, clock: ManualClock) -> None:
    with client.transaction() as tx:
        part = server.transactions().checkpoint(tx.transaction)
        client.store(ORDERS, [b"a", b"b"], transaction=part)
        tx.publish_stored(ORDERS, [part.write_pointer], ttl=60)
    clock.advance(60_000)
    assert committed(client, ORDERS) == [b"a", b"b"]
    clock.advance(1)
    assert committed(client, ORDERS) == []


@in_event_loop
async def test_async_producer_of_several_tasks_publishes_each_message_once(server: InProcess, client: Client) -> None:
    under_way: list[Attempt] = []

    @contextmanager
    def hook(attempt: Attempt) -> Iterator[None]:
        assert not under_way, "the server recognizes the last request only"
        under_way.append(attempt)
        try:
            yield
        finally:
            under_way.pop()

    async with server.async_client(hook=hook) as loop, loop.producer(BILLS, "importer") as producer:
        await asyncio.gather(*(producer.publish([b"%d" % number]) for number in range(5)))
        [state] = await loop.producers(BILLS)
        assert (state.name, state.generation, state.open) == ("importer", producer.generation, {})
        await loop.delete_producer(BILLS, "importer")
        with pytest.raises(ProducerFenced):
            await producer.publish([b"late"])
    assert sorted(committed(client)) == [b"0", b"1", b"2", b"3", b"4"]
    each_raises(
        ProducerNotFound,
        lambda: client.producer_state(BILLS, "importer"),
        lambda: client.delete_producer(BILLS, "importer"),
    )


def test_producer_with_keys_publishes_once_to_partitions_and_routes(server: InProcess, faults: Faults) -> None:
    with server.client() as client:
        client.create_topic("default:parts", properties={"partitions": "3"})
        client.create_topic("default:clicks", properties={"routes": '{"users": 1, "pages": 2}'})
    faults.at("publish", "after", times=2)
    with faulty_client(server, faults) as client, client.producer("default:parts", "importer") as producer:
        for number in range(6):
            producer.publish([b"%d" % number], key=b"%d" % number)
        producer.publish([b"click"], topic="default:clicks", key={"users": b"ada", "pages": b"home"})
        found = [one for number in range(3) for one in committed(client, f"default:parts-{number}")]
        copies = [
            one for name in ("users-0", "pages-0", "pages-1") for one in committed(client, f"default:clicks-{name}")
        ]
    assert found == [b"%d" % number for number in sorted(range(6), key=lambda one: hash_key(b"%d" % one) % 3)]
    assert copies == [b"click"] * 2
