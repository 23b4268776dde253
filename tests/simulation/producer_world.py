"""Producers under random faults: the real service, manager and tables with one clock.

A seed draws the steps of a history. These invariants hold in every history, and a failed check names its invariant:

* **Q8** after the registration of an instance, no message of an older instance becomes visible
* **Q9** an acknowledged request is stored exactly once, despite repetitions and crashes of the server
* **Q10** no transactional reader sees a write after the end of its transaction
* **Q12** a late write of a former leader changes nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from uuid import UUID

from tests.builders import DAY, HOUR, NOW_MS, SECOND
from tests.simulation import group_world
from tests.simulation.faulty_writes import FaultyWrites, ServerKilled
from tests.simulation.group_world import FaultySide, Violation
from tms_core.clock import ManualClock
from tms_core.errors import BadRequest, MessagingError, ProducerFenced, StoreError, TmsError
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.producers.last_request import LANE_ROWS, LastRequest
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import TransactionOutcome, clean_producer_rows
from tms_core.messaging.publish.workers import Batch, PublishFuture
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import generation_prefix, pointer_prefix, stop_key
from tms_core.server.ha.sealed_ranges import Gaps
from tms_core.tables.base import MESSAGES, PAYLOADS
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import Transaction, transaction_ms

BILLS, ORDERS = TopicId("default", "bills"), TopicId("default", "orders")
LIFETIME_MS = HOUR
#: Attempts of a request before its producer gives up.
ATTEMPTS = 6
#: Maximum number of messages of each kind of request.
_ROWS = {"publish": 1, "store": 2, "publish stored": 0}


def is_private(faults: Sequence[str]) -> bool:
    """Return whether requests may be announced ahead under these faults."""
    return "late" not in faults


@dataclass
class Instance:
    """An instance of the producer and its messages."""

    uuid: UUID
    generation: int = 0
    sequence: int = 0
    tx: Transaction | None = None
    label: str = ""
    #: Messages published in the transaction, payloads stored in it, and unanswered messages outside.
    sent: list[tuple[TopicId, bytes]] = field(default_factory=list)
    stored: list[tuple[TopicId, bytes]] = field(default_factory=list)
    unanswered: list[tuple[TopicId, bytes]] = field(default_factory=list)

    def end(self) -> None:
        self.tx, self.sent, self.stored = None, [], []


class ProducerWorld:
    #: Possible faults of a write of messages or payloads.
    write_faults: tuple[str, ...] = ("before", "after")

    def __init__(self, random: Random) -> None:
        self.random = random
        self.clock = ManualClock(NOW_MS, monotonic_ms=DAY)
        self.side, self.store = FaultySide(), MemoryStore()
        #: Reads for checks, without faults.
        self._messages, self._payloads = (
            partial(self.store.message.read, MESSAGES),
            partial(self.store.payload.read, PAYLOADS),
        )
        #: Possible faults of a write to the side table: ``late`` only if other servers may write, too.
        self.faults = ("before", "after", "late") if random.random() < 0.5 else ("before", "after")
        self.side.private = is_private(self.faults)
        self.writes = FaultyWrites(random, self.store.message, self.store.payload)
        self.manager = TransactionManager(MemoryStorage(), self.clock)
        self.event_counts: Counter[str] = Counter()
        self._served = self.serve()
        for topic in (BILLS, ORDERS):
            self.service.create_topic(topic, {"ttl": "864000000"})
        self.instances: list[Instance] = []
        #: Other producers by name, each with one instance.
        self.others: dict[str, Instance] = {}
        self.plain: list[Transaction] = []
        #: Messages that must be visible once, may be visible, and must not be visible.
        self.acknowledged: list[tuple[TopicId, bytes]] = []
        self.doubtful: set[tuple[TopicId, bytes]] = set()
        self.never: set[tuple[TopicId, bytes]] = set()
        #: Outcomes of transactions by label.
        self.outcomes: dict[str, TransactionOutcome] = {}
        self.number = 0

    @property
    def service(self) -> MessagingService:
        """The service that clients reach."""
        return self._served

    def serve(self) -> MessagingService:
        figures = LIFETIME_MS // 1000
        cache_bytes = self.random.choice((0, 1 << 20))
        options = ServiceOptions(max_lifetime_seconds=figures, grace_seconds=figures, cache_bytes=cache_bytes)
        return MessagingService(self.store, self.clock, options, side=self.side, transactions=self.manager)

    def close(self) -> None:
        self.service.close()
        self.manager.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Register a new instance; the server may be killed at any write, and the instance retries.

        The previous instance may publish until then.
        """
        if self.instances and self.instances[-1].tx is None and self.random.random() < 0.4:
            self._send(self.instances[-1], self.random.choice((BILLS, ORDERS)), attempts=1)
        instance, before = Instance(UUID(int=self.random.getrandbits(128))), list(self.instances)
        self.side.fault = self._fault()
        known = self._repeated(lambda: self.service.producers.register(BILLS, "importer", instance.uuid))
        if known is None:
            return
        instance.generation = known.generation
        # One of 32 sequence numbers shares its position with most messages of others.
        instance.sequence = self.random.choice((0, 26, 30, 31))
        for previous in before:
            if previous.generation >= instance.generation:
                raise Violation("Q8: two instances have the same generation")
            self.never.update(previous.sent + previous.stored)
            self.never.update(sent for sent in previous.unanswered if sent[1] not in self._visible(sent[0]))
            if previous.tx is not None:
                self.outcomes[previous.label] = TransactionOutcome.ABORTED
        if known.previous is not None:
            self.event_counts[f"previous {known.previous.outcome.value}"] += 1
            if self.outcomes[known.previous.label] is not known.previous.outcome:
                raise Violation(f"Q8: {known.previous.label} is reported as {known.previous.outcome.value}")
        self.instances.append(instance)

    def send(self) -> None:
        """Publish as any instance; the response may be lost, or the server killed at any write."""
        instance = self._instance()
        if instance is None:
            return
        self._send(instance, self.random.choice((BILLS, ORDERS)))

    def begin(self) -> None:
        instance = self._instance()
        if instance is not None and instance.tx is None:
            self._begin(instance)

    def load(self) -> None:
        """Store payloads, publish them and commit as the newest instance."""
        if not self.instances or self.instances[-1].tx is not None:
            return
        instance, topic = self.instances[-1], self.random.choice((BILLS, ORDERS))
        self._begin(instance)
        for kind in ("store", "store", "publish stored"):
            if instance.tx is not None:
                self._send(instance, topic, kind)
        if instance.tx is not None:
            self._finish(instance, instance.tx)

    def finish(self) -> None:
        """Commit or roll back as any instance."""
        instance = self._instance()
        if instance is not None and instance.tx is not None:
            self._finish(instance, instance.tx)

    def late(self) -> None:
        """End a transaction before or during a publish without a producer."""
        tx = self.manager.start_short()
        payload = self._payload()
        self.never.add((BILLS, payload))
        ends: list[Callable[[], object]] = [
            lambda: self.manager.abort(tx),
            lambda: self.manager.invalidate(tx.transaction_id),
            lambda: self.manager.commit(tx.transaction_id),
        ]
        end = self.random.choice(ends)
        if end is not ends[-1]:
            # A killed server would hide whether a committed publish was acknowledged.
            self.writes.fault = self.random.choice(("", "after"))
        self.event_counts["publish after the end"] += 1
        if self.random.random() < 0.5:
            end()
        else:
            self.writes.during_write.append(end)
        try:
            self.service.publish(BILLS, [payload], pointer=tx.write_pointer)
        except MessagingError:
            return
        except ServerKilled:
            self.restart()
            return
        finally:
            self.writes.during_write.clear()
            self.writes.heal()
        raise Violation("Q10: a publish in an ended transaction was acknowledged")

    def publish(self) -> None:
        """Publish without a producer, between the announced requests."""
        payload = self._payload()
        self.service.publish(BILLS, [payload])
        self.acknowledged.append((BILLS, payload))

    def together(self) -> None:
        """Publish concurrently as other producers, and repeat unanswered requests."""
        left: list[tuple[Sent, list[bytes]]] = []
        for name in self.random.sample("abc", self.random.choice((1, 2, 3, 3))):
            other = self.others.setdefault(name, Instance(UUID(int=self.random.getrandbits(128))))
            other.generation = self.service.producers.register(BILLS, name, other.uuid).generation
            other.sequence += self.random.choice((1, 1, 1, 5, 31))
            number = LANE_ROWS + 1 if self.random.random() < 0.03 else self.random.choice((1, 1, 3))
            payloads = [self._payload() for _ in range(number)]
            left.append((Sent(BILLS, name, other.generation, other.sequence), payloads))
        self.side.fault = self._fault()
        self.writes.fault = self._write_fault()
        for _ in range(ATTEMPTS):
            unanswered = []
            for one, answer in zip(left, self._at_once(left), strict=True):
                try:
                    answer.result()
                except BadRequest as error:
                    raise Violation(f"Q9: {error}") from error
                except (ServerKilled, TmsError):
                    unanswered.append(one)
                else:
                    self.acknowledged += [(BILLS, payload) for payload in one[1]]
            self.side.fault = ""
            self.writes.heal()
            self.event_counts["lane assigned"] += any(one.lane for one in self._last())
            if not unanswered:
                return
            # One of several concurrent requests may be repeated alone.
            left = unanswered if self.random.random() < 0.5 else unanswered[:1]
            self.doubtful.update((BILLS, payload) for one in unanswered for payload in one[1])
            if self.random.random() < 0.7:
                self.restart()
            if self.random.random() < 0.3:
                self.publish()
        raise Violation("Q9: a request got no response")

    def _at_once(self, requests: Sequence[tuple[Sent, list[bytes]]]) -> list[PublishFuture[RollbackRange | None]]:
        batches: list[Batch] = []
        self.service.workers.run = batches.append  # type: ignore[assignment,method-assign]
        answers = [self.service.submit_publish(BILLS, payloads, sent=sent) for sent, payloads in requests]
        del self.service.workers.run
        for batch in batches:
            batch()
        return answers

    def _last(self) -> list[LastRequest]:
        return [LastRequest.parse(value) for _, value in self.side.rows(b"q", b"r", 10).items]

    def wait(self) -> None:
        self.clock.advance(self.random.choice((1, SECOND, 11 * SECOND)))
        self.manager.expire()

    def step_clock(self) -> None:
        self.clock.step(-2 * SECOND)
        self.restart()

    def restart(self) -> None:
        self._served.close()
        self._served = self.serve()

    def arrive(self) -> None:
        """Apply the late writes of a former leader."""
        while self.side.late:
            self.event_counts["late write"] += 1
            self.side.late.pop()()
            self.service.invalidate()

    def sweep(self) -> None:
        """Run the janitor's cleanup, and truncate the ids of transactions that can no longer write."""
        seen = self.manager.visibility()
        clean_producer_rows(self.side, seen.is_invalid, seen.is_undecided, lambda *_: False, 0)
        closed = [one for one in seen.invalid if transaction_ms(one) + 2 * LIFETIME_MS < self.clock.now_ms()]
        for pointer in closed:
            for topic in (BILLS, ORDERS):
                self.service.rollback(topic, pointer)
        self.event_counts["ids truncated"] += len(closed)
        self.manager.truncate_invalid(closed)

    def rest(self) -> None:
        self.clock.advance(2 * LIFETIME_MS + 1)
        self.manager.expire()

    def calm(self) -> None:
        """Time out all transactions, and clean up the failed ones."""
        self.rest()
        self.sweep()

    # -- the invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        seen = Counter((topic, payload) for topic in (BILLS, ORDERS) for payload in self._visible(topic))
        for sent, times in seen.items():
            if times > 1:
                raise Violation(f"Q9: {sent} exists {times} times")
            if sent in self.never:
                raise Violation(f"Q8, Q10: {sent} is visible")
        missing = [sent for sent in self.acknowledged if sent not in seen]
        if missing:
            raise Violation(f"Q9: {missing} was acknowledged, but does not exist")
        unexpected = set(seen) - set(self.acknowledged) - self.doubtful
        if unexpected:
            raise Violation(f"Q9: {unexpected} is visible, but was not acknowledged")

    def drain(self) -> None:
        """Apply late writes, clean up, and check the result."""
        self.arrive()
        self.calm()
        self.check()

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _begin(self, instance: Instance) -> None:
        instance.tx = self.manager.start_short(self.random.choice((10, 600, 600)))
        instance.label = f"{instance.generation} {instance.tx.transaction_id}"

    def _finish(self, instance: Instance, tx: Transaction) -> None:
        sent = instance.sent
        self.never.update(instance.stored)
        instance.end()
        self.outcomes[instance.label] = TransactionOutcome.ABORTED
        if self.random.random() < 0.7:
            try:
                self.manager.commit(tx.transaction_id)
            except TmsError:
                self.event_counts["commit rejected"] += 1
                return
            if set(sent) & self.never:
                raise Violation(f"Q8: {sent} was committed after a newer instance registered")
            self.outcomes[instance.label] = TransactionOutcome.COMMITTED
            self.acknowledged += sent
            return
        self.never.update(sent)
        self.side.fault = self._fault()
        steps: list[Callable[[], None]] = [
            lambda: self.service.producers.roll_back(self._sent(instance), tx.write_pointer),
            lambda: self.service.rollback(BILLS, tx.write_pointer),
            lambda: self.service.rollback(ORDERS, tx.write_pointer),
        ]
        if self.random.random() < 0.4:
            # A client that aborts after an incomplete rollback.
            steps.pop(self.random.randrange(len(steps)))
            self.event_counts["rollback incomplete"] += 1
        try:
            for step in steps:
                step()
        except (TmsError, ServerKilled):
            self.manager.invalidate(tx.transaction_id)
            self.restart()
        else:
            self.manager.abort(tx)
            self._late(instance, tx)
        finally:
            self.side.fault = ""

    def _send(self, instance: Instance, topic: TopicId, kind: str = "", attempts: int = ATTEMPTS) -> None:
        kind = kind or self._draw_request(instance, topic)
        payloads = [self._payload() for _ in range(_ROWS[kind] and self.random.randint(1, _ROWS[kind]))]
        these = [(topic, payload) for payload in payloads]
        instance.sequence += 1
        sent, tx = self._sent(instance), instance.tx
        pointer = None if tx is None else tx.write_pointer
        self.side.fault = self._fault()
        self.writes.fault = self._write_fault()
        newest = max(one.generation for one in self.instances)

        def publish() -> object:
            if kind == "store" and pointer is not None:
                self.service.store(topic, payloads, pointer=pointer, sent=sent)
            else:
                self.service.publish(topic, payloads, pointer=pointer, sent=sent)
            if self.random.random() < 0.2:
                self.event_counts["response lost"] += 1
                raise ServerKilled
            return True

        done = self._repeated(publish, restarts=self.random.random() < 0.7, attempts=attempts)
        self.writes.heal()
        self.event_counts["request announced ahead"] += bool(done) and any(
            one.announces(*sent[2:4]) for one in self._last()
        )
        self.event_counts[kind] += bool(done)
        if instance.generation < newest:
            self.never.update(these)
            if done:
                raise Violation("Q8: the request of an older instance was executed")
        elif tx is not None:
            self._note(instance, topic, kind, these)
            if not done:
                # Invalidate an uncertain transaction, like the client.
                self.manager.invalidate(tx.transaction_id)
                self.never.update(instance.sent + instance.stored)
                self.outcomes[instance.label] = TransactionOutcome.ABORTED
                instance.end()
        elif done:
            self.acknowledged += these
        else:
            self.doubtful.update(these)
            instance.unanswered += these

    def _note(self, instance: Instance, topic: TopicId, kind: str, these: list[tuple[TopicId, bytes]]) -> None:
        if kind == "publish":
            instance.sent += these
        elif kind == "store":
            instance.stored += these
        else:
            instance.sent += [one for one in instance.stored if one[0] == topic]
            instance.stored = [one for one in instance.stored if one[0] != topic]

    def _draw_request(self, instance: Instance, topic: TopicId) -> str:
        """Draw the next request; stored payloads are published before other messages of the topic."""
        if instance.tx is None:
            return "publish"
        stored = any(one[0] == topic for one in instance.stored)
        if stored and self.random.random() < 0.5:
            return "publish stored"
        begun = any(one[0] == topic for one in instance.sent)
        return "store" if stored or (not begun and self.random.random() < 0.5) else "publish"

    def _late(self, instance: Instance, tx: Transaction) -> None:
        """Publish after the abort; the server must reject it."""
        payload = self._payload()
        self.never.add((BILLS, payload))
        instance.sequence += 1
        try:
            self.service.publish(BILLS, [payload], pointer=tx.write_pointer, sent=self._sent(instance))
        except MessagingError:
            return
        raise Violation("Q10: a publish after the abort was acknowledged")

    def _repeated(self, ask: Callable[[], Any], *, restarts: bool = True, attempts: int = ATTEMPTS) -> Any:
        """Repeat a request until it has a response; return None if it was rejected or never got a response."""
        for _ in range(attempts):
            try:
                return ask()
            except ProducerFenced:
                self.event_counts["instance fenced"] += 1
                return None
            except (ServerKilled, StoreError):
                self.event_counts["server killed"] += 1
                self.fail(restarts=restarts)
            except BadRequest as error:
                raise Violation(f"Q9: {error}") from error
            except TmsError:
                return None
            finally:
                self.side.fault = ""
        return None

    def fail(self, *, restarts: bool) -> None:
        """Recover after a crash or a store error; others may publish before the retry."""
        if restarts:
            self.restart()
            self.side.fault = ""
            self.writes.heal()
        if not self.side.fault and not self.writes.fault and self.random.random() < 0.3:
            self.publish()

    def _instance(self) -> Instance | None:
        """Draw an instance, mostly the newest."""
        if not self.instances:
            return None
        return self.instances[-1] if self.random.random() < 0.7 else self.random.choice(self.instances)

    def _sent(self, instance: Instance) -> Sent:
        return Sent(BILLS, "importer", instance.generation, instance.sequence, instance.label)

    def _payload(self) -> bytes:
        self.number += 1
        return b"%d" % self.number

    def _fault(self) -> str:
        return self.random.choice(("",) * 5 + self.faults)

    def _write_fault(self) -> str:
        return self.random.choice(("",) * 4 + self.write_faults)

    def _visible(self, topic: TopicId) -> list[bytes]:
        """Return the payloads of a topic visible to a new transaction, also after undecided rows."""
        reader, prefix = self.manager.visibility().dummy_transaction(), generation_prefix(topic.prefix, 1)
        # Read without a server, whose reads may repair a defect.
        gaps = Gaps.parse(self.side.get(b"g" + prefix))
        seen: list[bytes] = []
        for key, value in self._messages(prefix, stop_key(prefix), 10_000).items:
            if gaps.hides(int.from_bytes(key[len(prefix) :], "big")):
                continue
            if value.pointer is None or _sees(reader, value.pointer):
                seen += [value.payload] if value.payload is not None else self._stored(topic, value.pointer or 0)
        return seen

    def _stored(self, topic: TopicId, pointer: int) -> list[bytes]:
        prefix = pointer_prefix(topic.prefix, 1, pointer)
        rows = self._payloads(prefix, stop_key(prefix), 100).items
        return [payload for _, payload in rows]


def _sees(reader: Transaction, pointer: int) -> bool:
    return pointer > 0 and reader.is_visible(pointer)


#: Relative frequency of each step.
WEIGHTS: dict[str, float] = {
    "send": 12,
    "together": 5,
    "begin": 5,
    "load": 0.3,
    "finish": 5,
    "register": 3,
    "late": 2,
    "publish": 2,
    "wait": 2,
    "arrive": 1.5,
    "restart": 1,
    "step_clock": 0.7,
    "sweep": 1,
    "rest": 0.5,
    "calm": 1,
}


def play(seed: int) -> Counter[str]:
    return group_world.play(seed, make=ProducerWorld, weights=WEIGHTS)
