"""Consumer groups under random faults: the real service, manager and tables with one clock.

A seed draws the steps of a history. These invariants hold in every history, and a failed check names its invariant:

* **Q1** each committed message is in exactly one committed transaction of each group
* **Q2** the messages of a worker are visible if, and only if, its claim is done
* **Q3** in an ordered group, commits follow the order of the ids
* **Q4** every message is processed in the end
* **Q5** truncating the invalid list after a run of the janitor changes nothing
* **Q6** a sweep deletes no message that a group has not processed, including a group registered during the sweep
* **Q7** no new id is at or before an id that a group has read or claimed
* **Q11** an unordered group receives only committed messages
* **Q12** a late write of a former leader changes nothing
* **Q14** a delivery counts only if the program received the messages and then failed or disappeared
* **Q13** after a sweep, a reader without a transaction receives the rows of the store
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.builders import DAY, HOUR, NOW_MS, SECOND, janitor
from tests.kit.messaging import read_payloads
from tms_core.clock import ManualClock
from tms_core.consumers.claim_rows import all_claims, release_void_claims
from tms_core.errors import StoreError, TmsError
from tms_core.messaging.groups.claims import GroupPoll, Order
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import MessageId, generation_prefix
from tms_core.server import managing
from tms_core.tables.base import KEYS, MESSAGES, Page
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideChange
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import Transaction, transaction_ms

ORDERS, BILLS = TopicId("default", "orders"), TopicId("default", "bills")
GROUPS = {"strict": Order.PARTITION, "shared": Order.NONE}
LIFETIME_MS = HOUR


class Violation(AssertionError):
    """A broken invariant."""


class FaultySide(MemorySide):
    """A side table whose next write fails before it, fails after it, or is delayed.

    Attributes:
        fault: ``before``, ``after`` or ``late``; empty: none.
        late: the delayed writes.
        visitor: number of the read from now that makes a call, and the call; None: no call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""
        self.late: list[Callable[[], object]] = []
        self.visitor: tuple[int, Callable[[], None]] | None = None

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        self._visited()
        return super().rows(start, stop, limit)

    def get(self, key: bytes) -> bytes | None:
        self._visited()
        return super().get(key)

    def _visited(self) -> None:
        if self.visitor is not None:
            left, call = self.visitor
            self.visitor = (left - 1, call) if left else None
            if not left:
                call()

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        def write() -> list[bool]:
            return super(FaultySide, self).exchange_each(changes)

        fault, self.fault = self.fault, ""
        if fault == "late":
            self.late.append(write)
        elif fault != "before":
            done = write()
            if not fault:
                return done
        if fault:
            raise StoreError("the server died")
        return [True] * len(changes)


@dataclass
class Worker:
    """A worker's batch, and the ids of its messages."""

    group: str
    tx: Transaction
    payloads: list[bytes]
    ids: list[bytes]
    failed: bool = False


@dataclass
class GroupWorld:
    """A server, its groups, producers and workers, and their expected results."""

    random: Random
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_MS, monotonic_ms=DAY))
    side: FaultySide = field(default_factory=FaultySide)
    event_counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        # Looked up at the call, so that a planted bug can replace it.
        self.manager = TransactionManager(
            MemoryStorage(), self.clock, release=lambda is_leaving: managing.release_rows(self.side, is_leaving)
        )
        self.service = self.serve()
        self.service.create_topic(ORDERS, {"ttl": "864000000", "retention": "consumed"})
        self.service.create_topic(BILLS, {"ttl": "864000000"})
        for group in GROUPS:
            self.service.consumers.put(ORDERS, group, MessageId(0, 0))
        self.janitor = janitor(
            self.store,
            clock=self.clock,
            snapshots=self.manager,
            side=self.side,
            hold_seconds=0,
            snapshot_interval_seconds=60,
        )
        self.janitor.engine.run_once(adopt=True)
        self.guest: bytes | None = None
        self.producers: dict[int, tuple[Transaction, list[bytes]]] = {}
        self.workers: list[Worker] = []
        #: The transaction that a worker's commit began, which claims its next batch.
        self.next: Transaction | None = None
        self.committed: set[bytes] = set()
        self.done: dict[str, Counter[bytes]] = {group: Counter() for group in GROUPS}
        #: Count of failures by message.
        self.failed: dict[str, Counter[bytes]] = {group: Counter() for group in GROUPS}
        self.last: bytes = b""
        self.number = 0

    def serve(self) -> MessagingService:
        return MessagingService(
            self.store,
            self.clock,
            ServiceOptions(
                max_lifetime_seconds=LIFETIME_MS // 1000,
                grace_seconds=LIFETIME_MS // 1000,
                cache_bytes=self.random.choice((0, 1 << 20)),
                retry_seconds=self.random.choice((0, 4)),
            ),
            side=self.side,
            transactions=self.manager,
        )

    def close(self) -> None:
        self.service.close()
        self.manager.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        self.committed.update(self._published(None))

    def produce(self) -> None:
        """Publish in a transaction that stays open for a while."""
        tx = self.manager.start_short(600)
        self.producers[tx.transaction_id] = (tx, self._published(tx))

    def decide(self) -> None:
        """Commit, roll back or invalidate the transaction of a producer."""
        if not self.producers:
            return
        pointer = self.random.choice(sorted(self.producers))
        tx, payloads = self.producers.pop(pointer)
        if self.random.random() < 0.6 and self._commit(tx):
            self.committed.update(payloads)
        elif self.random.random() < 0.5:
            if self.random.random() < 0.8:
                self.service.rollback(ORDERS, pointer)
            self.manager.abort(tx)
        else:
            self.manager.invalidate(pointer)

    def work(self) -> None:
        """Poll as a worker; the response may be lost, or the server killed while it writes the claim."""
        group = self.random.choice(sorted(GROUPS))
        tx, self.next = self.next or self.manager.start_short(self.random.choice((10, 60))), None
        self.side.fault = self.random.choice(("",) * 7 + ("before", "after", "late"))
        try:
            given = self.service.groups.poll(
                ORDERS, group, GroupPoll(tx, self.random.randint(1, 4), order=GROUPS[group])
            )
        except TmsError:
            self.event_counts["server killed"] += 1
            self.manager.invalidate(tx.transaction_id)
            self.restart()
            return
        finally:
            self.side.fault = ""
        payloads, ids = [one.payload for one in given.messages], [one.id for one in given.messages]
        for worker in self.workers:
            if self.manager.status(worker.tx.transaction_id) == "invalid":
                self._fail(worker)
        failed = max((self.failed[group][payload] for payload in payloads), default=0)
        if given.deliveries > failed + 1:
            raise Violation(f"Q14: {group} gets {payloads} in delivery {given.deliveries} after {failed} failures")
        self.event_counts["batch redelivered"] += given.deliveries > 1
        if not payloads:
            self._give_back(Worker(group, tx, [], []))
        elif self.random.random() < 0.1:
            self.event_counts["response lost"] += 1
            self.manager.invalidate(tx.transaction_id)
            with suppress(TmsError):
                self.service.groups.roll_back(ORDERS, group, tx.transaction_id, MessageId(0, 0))
        else:
            if not set(payloads) <= self.committed:
                raise Violation(f"Q11: {group} got {payloads}, but not all of them are committed")
            self.service.publish(BILLS, [group.encode() + b" " + one for one in payloads], pointer=tx.write_pointer)
            self.workers.append(Worker(group, tx, payloads, ids))

    def finish(self) -> None:
        """Commit or roll back a worker, or let it disappear; its transaction may have timed out."""
        if not self.workers:
            return
        worker = self.workers.pop(self.random.randrange(len(self.workers)))
        chance = self.random.random()
        if chance < 0.6:
            if self._commit(worker.tx, continues=self.random.random() < 0.5):
                self._count(worker)
            else:
                self._fail(worker)
        elif chance < 0.85:
            self._fail(worker)
            self._give_back(worker)
        else:
            self._fail(worker)
            self.event_counts["worker disappeared"] += 1

    def wait(self) -> None:
        self.clock.advance(self.random.choice((1, SECOND, 11 * SECOND, 70 * SECOND)))
        self.manager.expire()

    def step_clock(self) -> None:
        """Step the wall clock back by some seconds, and restart the server."""
        self.clock.step(-self.random.choice((2, 5)) * SECOND)
        self.restart()

    def restart(self) -> None:
        self.service.close()
        self.service = self.serve()

    def arrive(self) -> None:
        """Apply the late writes of a former leader, whose client received no response and gave up."""
        while self.side.late:
            self.event_counts["late write"] += 1
            self.side.late.pop()()

    def sweep(self) -> None:
        """Run the janitor; sometimes a group that reads nothing is added or removed during the run."""
        self.clock.advance(1)
        before = self._rows()
        if self.random.random() < 0.5:
            self.side.visitor = (self.random.randrange(12), self.visit)
        self.janitor.engine.run_once()
        self.side.visitor = None
        there = self._rows()
        gone = {key: payload for key, payload in before.items() if key not in there}
        open_ = {payload for _, payloads in self.producers.values() for payload in payloads}
        for key, payload in gone.items():
            unread = [group for group in GROUPS if payload in self.committed and payload not in self.done[group]]
            if unread or payload in open_ or (self.guest is not None and key > self.guest):
                raise Violation(f"Q6: {payload!r} is deleted, but {unread or 'a guest or a producer'} still needs it")
        found = read_payloads(self.service, ORDERS)
        if found != list(there.values()):
            raise Violation(f"Q13: a plain reader gets {found}, but the store has {list(there.values())}")
        self.event_counts["rows deleted"] += len(gone)

    def visit(self) -> None:
        """Register the guest group at the first message, or delete it."""
        if self.guest is None:
            self.service.consumers.put(ORDERS, "guest", MessageId(0, 0))
            self.guest = self.service.consumers.get(ORDERS, "guest").id.pack()[:10]
            self.event_counts["guest registered"] += 1
        else:
            self.service.consumers.delete(ORDERS, "guest")
            self.guest = None

    def truncate(self) -> None:
        """Free void claims, and truncate the ids of transactions that can no longer write.

        Sometimes an operator truncates them without a run of the janitor.
        """
        invalid = self.manager.visibility()
        if self.random.random() < 0.5:
            release_void_claims(self.side, invalid.is_invalid, lambda _: False)
        closed = [one for one in invalid.invalid if transaction_ms(one) + 2 * LIFETIME_MS < self.clock.now_ms()]
        self._negate(closed)
        self.event_counts["ids truncated"] += len(closed)
        self.manager.truncate_invalid(closed)

    def rest(self) -> None:
        """Wait two hours: open transactions time out, and ids are closed.

        No write is delayed for longer; afterwards an id may leave the invalid list.
        """
        self.arrive()
        self.clock.advance(2 * LIFETIME_MS + 1)
        self.manager.expire()
        self.producers.clear()
        for worker in self.workers:
            self._fail(worker)
        self.workers.clear()

    def calm(self) -> None:
        """Process and delete all messages, then step the clock back and restart the server."""
        self.rest()
        self.publish()
        self._process_all()
        if self.guest is not None:
            self.visit()
        self.sweep()
        self.step_clock()
        self.publish()

    # -- the invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for group, done in self.done.items():
            twice = [payload for payload, times in done.items() if times > 1]
            if twice:
                raise Violation(f"Q1: {group} has processed {twice} twice")
        with_outputs = {group.encode() + b" " + one for group, done in self.done.items() for one in done}
        visible = self._visible(BILLS)
        if sorted(visible) != sorted(with_outputs):
            raise Violation(f"Q2: {sorted(visible)} is visible, but {sorted(with_outputs)} was processed")

    def drain(self) -> None:
        """Decide all transactions, process the rest with reliable workers, and check the results."""
        self.arrive()
        self.rest()
        self.truncate()
        self._process_all()
        for group in GROUPS:
            if set(self.done[group]) != self.committed:
                missing = sorted(self.committed - set(self.done[group]))
                raise Violation(f"Q1, Q4: {group} never got {missing}")
        self.check()

    def _process_all(self) -> None:
        """Process all messages with reliable workers."""
        for group, order in GROUPS.items():
            for _ in range(200):
                tx = self.manager.start_short()
                try:
                    given = self.service.groups.poll(ORDERS, group, GroupPoll(tx, 3, order=order))
                except TmsError as error:
                    raise Violation(f"Q4: the request of a single worker is rejected: {error}") from error
                worker = Worker(group, tx, [one.payload for one in given.messages], [one.id for one in given.messages])
                if not worker.payloads:
                    self.manager.abort(tx)
                    if given.wait_ms is None:
                        break
                    self.event_counts["delivery delayed"] += 1
                    self.clock.advance(given.wait_ms)
                    continue
                bills = [group.encode() + b" " + one for one in worker.payloads]
                self.service.publish(BILLS, bills, pointer=tx.write_pointer)
                if not self._commit(tx):
                    raise Violation("Q4: a single worker cannot commit")
                self._count(worker)

    def _rows(self) -> dict[bytes, bytes]:
        rows = self.store.message.read(MESSAGES, ORDERS.prefix, ORDERS.prefix + b"\xff", 10_000).items
        return {key[-10:]: value.payload or b"" for key, value in rows}

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _published(self, tx: Transaction | None) -> list[bytes]:
        payloads = []
        for _ in range(self.random.randint(1, 3)):
            self.number += 1
            payloads.append(b"%d" % self.number)
        prefix = generation_prefix(ORDERS.prefix, 1)
        read = max(
            [self.service.consumers.get(ORDERS, group).id.pack()[:10] for group in GROUPS]
            + [claim.last.pack()[:10] for _, _, claim in all_claims(self.side)]
        )
        known = set(self.store.message.read(KEYS, prefix, None, 10_000).items)
        self.service.publish(ORDERS, payloads, pointer=None if tx is None else tx.write_pointer)
        new = [key for key in self.store.message.read(KEYS, prefix, prefix + b"\x80", 10_000).items if key not in known]
        if min(new)[-10:] <= read:
            raise Violation("Q7: a new id is at or before the position of a group")
        return payloads

    def _commit(self, tx: Transaction, *, continues: bool = False) -> bool:
        """Commit a transaction, and begin the next with it if the worker continues; return success."""
        try:
            if continues:
                self.next = self.manager.commit_and_start(tx.transaction_id, self.random.choice((10, 60)))
                self.event_counts["next transaction started"] += 1
            else:
                self.manager.commit(tx.transaction_id)
        except TmsError:
            self.event_counts["commit too late"] += 1
            return False
        return True

    def _count(self, worker: Worker) -> None:
        self.done[worker.group].update(worker.payloads)
        if GROUPS[worker.group] is Order.PARTITION:
            if worker.ids[0] <= self.last:
                raise Violation("Q3: the output of a later commit is before earlier outputs")
            self.last = worker.ids[-1]

    def _fail(self, worker: Worker) -> None:
        if not worker.failed:
            worker.failed = True
            self.failed[worker.group].update(worker.payloads)

    def _give_back(self, worker: Worker) -> None:
        """Roll back claims and messages, then abort, like the client; invalidate after an error."""
        pointer = worker.tx.transaction_id
        self.side.fault = self.random.choice(("",) * 5 + ("before", "after", "late")) if worker.payloads else ""
        steps: list[Callable[[], None]] = [
            lambda: self.service.groups.roll_back(ORDERS, worker.group, pointer),
            lambda: self.service.rollback(BILLS, pointer),
        ]
        if self.random.random() < 0.1:
            # A client that aborts after an incomplete rollback.
            steps.pop(self.random.randrange(len(steps)))
            self.event_counts["rollback incomplete"] += 1
        try:
            for step in steps:
                step()
            self.manager.abort(worker.tx)
        except TmsError:
            self.manager.invalidate(pointer)
            self.restart()
        finally:
            self.side.fault = ""

    def _negate(self, pointers: Sequence[int]) -> None:
        for pointer in pointers:
            for topic in (ORDERS, BILLS):
                self.service.rollback(topic, pointer)

    def _visible(self, topic: TopicId) -> list[bytes]:
        reader = self.manager.visibility().dummy_transaction()
        rows = self.store.message.read(MESSAGES, topic.prefix, topic.prefix + b"\xff", 10_000).items
        found = [(value.pointer or 0, value.payload or b"") for _, value in rows]
        return [payload for pointer, payload in found if pointer > 0 and reader.is_visible(pointer)]


#: Relative frequency of each step.
WEIGHTS: dict[str, float] = {
    "work": 12,
    "finish": 9,
    "publish": 4,
    "produce": 2,
    "decide": 3,
    "wait": 3,
    "arrive": 1,
    "sweep": 1,
    "visit": 0.5,
    "step_clock": 0.7,
    "restart": 0.7,
    "truncate": 0.7,
    "rest": 0.3,
    "calm": 0.3,
}


class PlayableWorld(Protocol):
    event_counts: Counter[str]

    def check(self) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...


def play(
    seed: int,
    steps: int = 60,
    make: Callable[[Random], PlayableWorld] = GroupWorld,
    weights: Mapping[str, float] = WEIGHTS,
) -> Counter[str]:
    """Play the history of a seed on a world; return the count of each event."""
    random = Random(seed)
    world = make(random)
    names: list[str] = []
    try:
        for name in random.choices(tuple(weights), tuple(weights.values()), k=steps):
            names.append(name)
            getattr(world, name)()
            world.check()
        world.drain()
    except Violation as violation:
        violation.add_note(f"seed {seed}: {', '.join(names)}")
        raise
    finally:
        world.close()
    return world.event_counts
