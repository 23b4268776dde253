"""Ownership of transactions: only the first principal may write in or end a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.builders import DAY, NOW_MS
from tests.server.client import Answer, Client, encode_for_json
from tests.server.conftest import Serving, serving
from tests.server.identities import PrincipalClient, TokenIdentities
from tms_core.clock import ManualClock
from tms_core.errors import ConsumerConflict, TransactionEnded
from tms_core.rowkey import MessageId
from tms_core.server.managing import offset
from tms_core.tables.base import MESSAGES
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import TX_PER_MS, Transaction

START = "0" * 40
#: The topics of the victim and of the attacker.
VICTIMS, OWN = "/v1/namespaces/default/topics/orders", "/v1/namespaces/other/topics/mine"


class OwnerClient(PrincipalClient):
    """A client of a victim and a colleague in ``default``, and of an attacker in ``other``."""

    def __init__(
        self, server: Serving, client: Client, identities: TokenIdentities, manager: TransactionManager
    ) -> None:
        roles = {"victim": "owner", "colleague": "publisher", "attacker": "stranger"}
        super().__init__(server, client, {who: identities.good(role) for who, role in roles.items()})
        self.manager = manager
        for topic in (TopicId("default", "orders"), TopicId("other", "mine")):
            server.service.create_topic(topic)
            server.service.publish(topic, [b"a", b"b"])
            server.service.consumers.put(topic, "g", MessageId(0, 0))

    def publish(self, who: str, path: str, pointer: int, **headers: str) -> Answer:
        body = {"messages": ["never"], "transactionWritePointer": str(pointer)}
        return self.ask(who, "POST", f"{path}/publish", body, **headers)

    def claim(self, who: str, path: str, tx: Transaction) -> Answer:
        return self.ask(who, "POST", f"{path}/consumers/g/poll", {"limit": 1, "transaction": encode_for_json(tx)})

    def register(self, who: str, path: str, name: str = "p") -> Answer:
        return self.ask(who, "POST", f"{path}/producers/{name}", {"instance": str(uuid4())})

    def begin_as_victim(self) -> Transaction:
        """Return a transaction in which the victim has published."""
        tx = self.manager.start_short()
        assert self.publish("victim", VICTIMS, tx.write_pointer).status == 200
        return tx


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[OwnerClient]:
    clock, identities = ManualClock(NOW_MS, monotonic_ms=DAY), TokenIdentities(tmp_path)
    with (
        TransactionManager(MemoryStorage(), clock) as manager,
        serving(clock=clock, transactions=manager, gate=identities.gate) as server,
        Client(server.port) as client,
    ):
        yield OwnerClient(server, client, identities, manager)


def send_as_attacker(kind: str, clients: OwnerClient, pointer: int) -> Answer:
    """Send a request of the attacker to its own topic, with any pointer."""
    generation = clients.register("attacker", OWN).json["generation"]
    signed = {"x_tms_producer": "other:mine/p", "x_tms_generation": generation, "x_tms_sequence": "1"}
    named = {"transactionWritePointer": str(pointer)}
    match kind:
        case "publish":
            return clients.publish("attacker", OWN, pointer)
        case "publish as a producer":
            return clients.publish("attacker", OWN, pointer, **signed)
        case "store":
            return clients.ask("attacker", "POST", f"{OWN}/store", {"messages": ["x"], **named})
        case "note of a producer":
            return clients.ask("attacker", "POST", f"{OWN}/store", {"messages": [], **named}, **signed)
        case "claim":
            return clients.claim("attacker", OWN, Transaction(pointer, pointer, pointer))
        case "group roll back":
            return clients.ask("attacker", "POST", f"{OWN}/consumers/g/rollback", named)
    return clients.ask("attacker", "POST", f"{OWN}/rollback", named)


@pytest.mark.parametrize(
    "kind", ["publish", "publish as a producer", "store", "note of a producer", "claim", "group roll back", "roll back"]
)
def test_pointer_of_another_principal_is_rejected_like_an_unknown_pointer(clients: OwnerClient, kind: str) -> None:
    tx = clients.manager.checkpoint(clients.begin_as_victim())
    known = send_as_attacker(kind, clients, tx.transaction_id)
    unknown = send_as_attacker(kind, clients, tx.transaction_id - 17)
    never = send_as_attacker(kind, clients, tx.write_pointer + 17)
    checkpoint = send_as_attacker(kind, clients, tx.write_pointer)
    found = [
        (answer.status, answer.text.replace(str(pointer), "ID"), answer.headers.get("x-tms-fenced"))
        for answer, pointer in (
            (known, tx.transaction_id),
            (unknown, tx.transaction_id - 17),
            (never, tx.write_pointer + 17),
            (checkpoint, tx.write_pointer),
        )
    ]
    assert len(set(found)) == 1
    assert found[0][0] == (200 if kind == "group roll back" else 409)
    # No later request of the attacker ends the transaction of the victim.
    assert clients.register("attacker", OWN).status == 200
    put = clients.ask("attacker", "PUT", f"{OWN}/consumers/g", {"position": START}, x_tms_force="true")
    assert put.status == 200
    assert clients.ask("attacker", "DELETE", f"{OWN}/producers/p").status == 200
    assert clients.manager.status(tx.transaction_id) == "in progress"
    clients.manager.commit(tx.transaction_id)


def test_requests_of_two_principals_in_one_batch_stay_separate(clients: OwnerClient) -> None:
    tx, service = clients.begin_as_victim(), clients.server.service
    batches: list[Any] = []
    service.workers.run = batches.append  # type: ignore[assignment,method-assign]
    topic = TopicId("default", "orders")
    answers = [
        service.submit_publish(topic, [b"x"], pointer=tx.write_pointer, principal=who) for who in ("owner", "stranger")
    ]
    del service.workers.run
    for batch in batches:
        batch()
    assert answers[0].result() is not None
    with pytest.raises(TransactionEnded, match="is not in progress"):
        answers[1].result()


# --- calls that end transactions -------------------------------------------------------------------------------------


def test_force_ends_no_claims_of_another_principal(clients: OwnerClient) -> None:
    tx = clients.begin_as_victim()
    assert clients.claim("victim", VICTIMS, tx).status == 200
    registry, topic = clients.server.service.consumers, TopicId("default", "orders")
    with pytest.raises(ConsumerConflict, match="principals, "):
        registry.put(topic, "g", MessageId(0, 0), force=True, principal="colleague")
    with pytest.raises(ConsumerConflict, match="principals, "):
        registry.delete(topic, "g", force=True, principal="colleague")
    clients.server.service.groups.roll_back(topic, "g", tx.transaction_id, principal="colleague")
    assert len(registry.claims(topic, "g")) == 1
    # The owner of the claims may end them.
    assert clients.ask("victim", "DELETE", f"{VICTIMS}/consumers/g", x_tms_force="true").status == 200
    assert clients.manager.status(tx.transaction_id) == "invalid"


def test_consumer_change_that_is_rejected_takes_no_transaction(clients: OwnerClient) -> None:
    registry, topic = clients.server.service.consumers, TopicId("default", "orders")
    tx = clients.begin_as_victim()
    assert clients.claim("victim", VICTIMS, tx).status == 200
    # As after a restart.
    clients.manager._state.owners.clear()
    with pytest.raises(ConsumerConflict, match="1 transactions, "):
        registry.put(topic, "g", MessageId(0, 0), principal="colleague")
    assert clients.publish("victim", VICTIMS, tx.write_pointer).status == 200


def test_registration_waits_for_transactions_of_another_principal(clients: OwnerClient) -> None:
    generation = clients.register("victim", VICTIMS).json["generation"]
    tx = clients.manager.start_short()
    signed = {"x_tms_producer": "default:orders/p", "x_tms_generation": generation, "x_tms_sequence": "1"}
    assert clients.publish("victim", VICTIMS, tx.write_pointer, **signed).status == 200
    for answer in (
        *(clients.register("colleague", VICTIMS) for _ in range(2)),
        clients.ask("colleague", "DELETE", f"{VICTIMS}/producers/p"),
    ):
        assert (answer.status, "belongs to another principal" in answer.text) == (503, True)
    # The fenced owner may end its transaction.
    assert clients.publish("victim", VICTIMS, tx.write_pointer, **{**signed, "x_tms_sequence": "2"}).status == 409
    assert clients.manager.status(tx.transaction_id) == "in progress"
    clients.manager.commit(tx.transaction_id)
    assert clients.register("colleague", VICTIMS).json["former"]["outcome"] == "committed"


# --- roll backs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort", "truncate"])
def test_roll_back_of_a_transaction_that_has_ended_is_rejected(clients: OwnerClient, end: str) -> None:
    tx = clients.begin_as_victim()
    if end == "commit":
        clients.manager.commit(tx.transaction_id)
    elif end == "abort":
        clients.server.service.rollback(TopicId("default", "orders"), tx.write_pointer, principal="owner")
        clients.manager.abort(tx)
    else:
        clients.manager.invalidate(tx.transaction_id)
        clients.manager.truncate_invalid([tx.transaction_id])
    before = [value for _, value in clients.server.store.message.read(MESSAGES, b"", None, 100).items]
    body = {"transactionWritePointer": str(tx.write_pointer)}
    answer = clients.ask("victim", "POST", f"{VICTIMS}/rollback", body)
    assert (answer.status, "neither in progress nor invalid" in answer.text) == (409, True)
    assert [value for _, value in clients.server.store.message.read(MESSAGES, b"", None, 100).items] == before


# --- ids -------------------------------------------------------------------------------------------------------------


def test_roll_back_of_an_invalid_transaction_is_done(clients: OwnerClient) -> None:
    tx = clients.begin_as_victim()
    clients.manager.invalidate(tx.transaction_id)
    body = {"transactionWritePointer": str(tx.write_pointer)}
    assert clients.ask("victim", "POST", f"{VICTIMS}/rollback", body).status == 200
    pointers = [value.pointer for _, value in clients.server.store.message.read(MESSAGES, b"", None, 100).items]
    assert -tx.write_pointer in pointers


def test_offsets_of_ids_are_drawn_from_the_whole_millisecond() -> None:
    drawn = [offset() for _ in range(1000)]
    assert 0 <= min(drawn) < max(drawn) < TX_PER_MS
    assert max(drawn) > TX_PER_MS // 2


def test_ids_start_somewhere_in_their_millisecond_and_grow() -> None:
    clock, offsets = ManualClock(NOW_MS), iter([999_999, 5, 123_456, 7, 0])
    with TransactionManager(MemoryStorage(), clock, offset=lambda: next(offsets)) as manager:
        first = manager.start_short().transaction_id
        assert first == NOW_MS * TX_PER_MS + 999_999
        # Ids of one millisecond are consecutive.
        assert manager.start_short().transaction_id == first + 1
        clock.advance(1)
        third = manager.start_short()
        assert third.transaction_id == (NOW_MS + 1) * TX_PER_MS + 123_456
        assert manager.checkpoint(third).write_pointer == third.transaction_id + 1
        clock.advance(1)
        assert manager.start_short().transaction_id == (NOW_MS + 2) * TX_PER_MS
