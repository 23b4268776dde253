"""Claims of consumer groups: void claims are released before ids leave the invalid list (trap b)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from uuid import uuid4

import pytest

from janitor.run.prepare import Feedback
from tests.builders import DAY, HOUR
from tests.janitor.run.served_store import ServedStore
from tests.kit.messaging import GROUP, ORDERS, READ_NONE
from tests.support import raising
from tms_core.consumers.claim_rows import claims_of
from tms_core.consumers.claims import ConsumerGroup
from tms_core.errors import StoreError
from tms_core.messaging.groups.claims import GroupPoll
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import LastTransaction, TransactionOutcome
from tms_core.transaction.model import TX_PER_MS


class ClaimKit(ServedStore):
    """A server with a consumer group, and a janitor with feedback of proven ids."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack, {"ttl": "8640000"})
        self.service.consumers.put(ORDERS, GROUP, READ_NONE)
        self.janitor = self.made(feedback=Feedback(self.manager, ("messaging",)))
        self.janitor.engine.run_once(adopt=True)

    def poll(self) -> tuple[int, list[bytes]]:
        tx = self.manager.start_short()
        given = self.service.groups.poll(ORDERS, GROUP, GroupPoll(tx, 10))
        return tx.transaction_id, [message.payload for message in given.messages]

    def claims(self, generation: int = 1) -> list[tuple[int, int]]:
        group = ConsumerGroup(ORDERS, generation, GROUP)
        return [(claim.pointer, claim.tries) for _, claim in claims_of(self.side, group)]

    def invalid(self) -> list[int]:
        return list(self.manager.visibility().invalid)

    def pass_days(self) -> None:
        """Advance the clock until an id is closed and leaves the list."""
        for _ in range(3):
            self.clock.advance(DAY)
            self.janitor.engine.run_once()


@pytest.fixture
def kit() -> Iterator[ClaimKit]:
    with ExitStack() as stack:
        yield ClaimKit(stack)


def test_trap_b_void_claim_is_freed_before_its_id_leaves_the_list(kit: ClaimKit) -> None:
    kit.service.publish(ORDERS, [b"a", b"b"])
    pointer, payloads = kit.poll()
    assert payloads == [b"a", b"b"]
    kit.manager.invalidate(pointer)
    kit.janitor.engine.preview()
    assert kit.claims() == [(pointer, 1)], "a plan changes nothing"
    kit.pass_days()
    assert kit.invalid() == []
    assert kit.claims() == [(0, 0)]
    # Without the release, readers would treat the claim as done.
    assert kit.poll()[1] == [b"a", b"b"]


def test_trap_b_claim_that_cannot_be_freed_keeps_its_id(kit: ClaimKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.service.publish(ORDERS, [b"a"])
    pointer, _ = kit.poll()
    kit.manager.invalidate(pointer)
    with monkeypatch.context() as failing:
        failing.setattr(kit.side, "exchange", raising(StoreError("broken")))
        for _ in range(3):
            kit.clock.advance(DAY)
            with pytest.raises(StoreError):
                kit.janitor.engine.run_once()
            # Evidence from an interrupted run would remain.
            evidence = kit.janitor.state.evidence()
            assert all(interval.started_ms <= pointer // TX_PER_MS for interval in evidence)
    assert kit.invalid() == [pointer]
    kit.pass_days()
    assert (kit.invalid(), kit.claims()) == ([], [(0, 0)])


def test_sweep_keeps_open_and_committed_claims(kit: ClaimKit) -> None:
    kit.service.publish(ORDERS, [b"a"])
    done, _ = kit.poll()
    kit.manager.commit(done)
    kit.clock.advance(HOUR)
    kit.janitor.engine.run_once()
    assert kit.claims() == [(done, 1)]
    kit.service.publish(ORDERS, [b"b"])
    opened, payloads = kit.poll()
    kit.janitor.engine.run_once()
    assert payloads == [b"b"]
    assert kit.claims() == [(opened, 1)]


def test_sweep_deletes_claims_of_a_topic_created_again(kit: ClaimKit) -> None:
    kit.service.publish(ORDERS, [b"a"])
    kit.poll()
    kit.service.delete_topic(ORDERS)
    kit.service.create_topic(ORDERS)
    kit.janitor.engine.run_once()
    assert kit.claims() == []


def test_idle_producer_is_forgotten_and_its_failure_marked(kit: ClaimKit) -> None:
    instance, tx = uuid4(), kit.manager.start_short()
    known = kit.service.producers.register(ORDERS, "importer", instance)
    sent = Sent(ORDERS, "importer", known.generation, 1, "file 17")
    kit.service.publish(ORDERS, [b"a"], pointer=tx.write_pointer, sent=sent)
    kit.manager.invalidate(tx.transaction_id)
    kit.pass_days()
    assert kit.invalid() == []
    heir = kit.service.producers.register(ORDERS, "importer", uuid4())
    assert heir.previous == LastTransaction(tx.write_pointer, "file 17", TransactionOutcome.ABORTED)
    for days, there in ((6, 1), (2, 0)):
        kit.clock.advance(days * DAY)
        kit.janitor.engine.run_once()
        assert len(kit.service.producers.of(ORDERS)) == there
