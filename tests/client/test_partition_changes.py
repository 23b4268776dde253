"""Changes of the number of partitions during use: no message is lost, repeated or out of order.

Each seed determines a history of a real server and real clients. Clients that do not know a change publish messages
outside and in transactions. Several groups commit, roll back or abandon batches, and two workers poll at the same time.
Changes crash at any write of metadata, and groups are set back to the beginning.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest

from tests.kit.messaging import CrashingStore
from tests.support import Plant, replacing, seeds
from tms_core.client import Client, MessageId, Retry, TransactionContext, Unanswered, work
from tms_core.client.testing import InProcess, in_process
from tms_core.client.transactions import partitions
from tms_core.client.transactions.partitions import Rotation
from tms_core.clock import ManualClock
from tms_core.consumers import claim_rows
from tms_core.consumers.claims import ConsumerGroup
from tms_core.errors import TmsError
from tms_core.messaging.groups import positions as consumers
from tms_core.messaging.groups.claims import Groups
from tms_core.messaging.publish import pipeline
from tms_core.messaging.topics.partitions import layout_of
from tms_core.topic import TopicId

EVENTS, BILLS, GROUP = "default:events", "default:bills", "billing"
#: The group of each worker.
WORKERS = (GROUP, GROUP, "audit", "stock")
WHOLE = TopicId("default", "events")
SEEDS = seeds(6)
#: The number of different keys that producers use.
KEYS = 3
QUICK = Retry(first_seconds=0.002, factor=1.5, longest_seconds=0.02)


class Broken(AssertionError):
    """A lost, repeated or misplaced message."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDLE", "FAILED"):
        monkeypatch.setattr(work, name, QUICK)
    monkeypatch.setattr(partitions, "_CHANGING", Retry(attempts=12, first_seconds=0.002, longest_seconds=0.02))


def change(client: Client, number: int) -> None:
    client.update_topic(EVENTS, properties={"partitions": str(number)})


class Batch:
    """The open transaction of a worker, with the messages that it has read."""

    def __init__(self, client: Client, group: str, order: str) -> None:
        self.group = group
        self.tx = client.transaction().__enter__()
        self.payloads = [message.payload for message in self.tx.consume(EVENTS, group, limit=3, order=order)]

    def commit(self) -> list[bytes]:
        """Commit the transaction and return its payloads."""
        self.tx.__exit__(None, None, None)
        return self.payloads


class History:
    """A history of producers, each with its own keys, and workers of groups."""

    def __init__(self, server: InProcess, store: CrashingStore, seed: int, order: str) -> None:
        self.server, self.store, self.order, self.random = server, store, order, Random(seed)
        self.producers = [server.client() for _ in range(2)]
        self.workers = [server.client() for _ in WORKERS]
        self.producing: dict[int, tuple[TransactionContext, list[tuple[bytes, bytes]]]] = {}
        self.batches: dict[int, Batch] = {}
        self.sent: dict[bytes, list[bytes]] = defaultdict(list)
        self.done: dict[str, dict[bytes, list[bytes]]] = {group: defaultdict(list) for group in WORKERS}
        self.number = 0
        self.reached: Counter[str] = Counter()

    def close(self) -> None:
        for client in (*self.producers, *self.workers):
            client.close()

    def play(self, steps: int = 90) -> None:
        names = {"produce": 8, "begin": 3, "decide": 4, "take": 7, "meet": 4, "finish": 9, "change": 1.5, "replay": 0.7}
        for name in self.random.choices(tuple(names), tuple(names.values()), k=steps):
            getattr(self, name)()
        self.drain()

    # -- steps --------------------------------------------------------------------------------------------------------

    def produce(self) -> None:
        """Publish a message, in the transaction of its producer if there is one."""
        who = self.random.randrange(len(self.producers))
        self.number += 1
        key = b"%d.%d" % (who, self.random.randrange(3))
        payload = key + b" %d" % self.number
        if who in self.producing:
            self.producing[who][0].publish(EVENTS, [payload], key=key)
            self.producing[who][1].append((key, payload))
        else:
            self.producers[who].publish(EVENTS, [payload], key=key)
            self.sent[key].append(payload)

    def begin(self) -> None:
        who = self.random.randrange(len(self.producers))
        if who not in self.producing:
            self.producing[who] = (self.producers[who].transaction().__enter__(), [])

    def decide(self) -> None:
        if self.producing:
            tx, messages = self.producing.pop(self.random.choice(sorted(self.producing)))
            if self.random.random() < 0.3:
                tx.roll_back()
                messages = []
            tx.__exit__(None, None, None)
            for key, payload in messages:
                self.sent[key].append(payload)

    def take(self) -> None:
        who = self.random.randrange(len(self.workers))
        if who not in self.batches:
            self.batches[who] = self.batch(who)

    def meet(self) -> None:
        """Let a worker process a batch while a worker of another group polls a sealed partition."""
        free = [who for who in range(len(self.workers)) if who not in self.batches]
        pairs = [(who, other) for who in free for other in free if WORKERS[who] != WORKERS[other]]
        families = self.server.service._families
        settle = families._wait_for_writes

        def concurrent_change(topic: TopicId) -> None:
            families._wait_for_writes = settle
            batch = self.batch(other)
            self.count(batch.group, batch.commit())
            self.reached["met"] += 1
            settle(topic)
            families._wait_for_writes = concurrent_change

        if pairs:
            who, other = self.random.choice(pairs)
            families._wait_for_writes = concurrent_change
            self.batches[who] = self.batch(who)
            families._wait_for_writes = settle

    def replay(self) -> None:
        """Set a group back to the beginning, in the oldest partitions first."""
        group = self.random.choice(WORKERS)
        for who in [who for who, batch in self.batches.items() if batch.group == group]:
            self.batches.pop(who).commit()
        with self.server.client() as client:
            for topic in self.partitions():
                client.set_position(topic, group, MessageId(0, 0))
        self.done[group].clear()
        self.reached["set back"] += 1

    def finish(self) -> None:
        if self.batches:
            batch = self.batches.pop(self.random.choice(sorted(self.batches)))
            chance = self.random.random()
            if chance < 0.15:
                # The worker dies, and its transaction times out.
                self.server.manager.invalidate(batch.tx.transaction.transaction_id)
                return
            if chance < 0.3:
                batch.tx.roll_back()
                batch.payloads = []
            self.count(batch.group, batch.commit())

    def change(self) -> None:
        number = self.random.randint(1, 3)
        if self.random.random() < 0.5:
            change(self.producers[0], number)
            return
        self.store.writes_left = self.random.randrange(12)
        try:
            change(self.producers[0], number)
        except Unanswered:
            self.reached["crash"] += 1
        finally:
            self.store.writes_left = None

    # -- invariants ---------------------------------------------------------------------------------------------------

    def batch(self, who: int) -> Batch:
        """Return the batch of a worker."""
        return Batch(self.workers[who], WORKERS[who], self.order)

    def partitions(self) -> list[TopicId]:
        """Return all partitions that may have messages, oldest first."""
        layout = layout_of(WHOLE, self.server.service.topic(WHOLE))
        return [WHOLE] if layout is None else [one for family in layout.families for one in layout.members(family)]

    def count(self, group: str, payloads: list[bytes]) -> None:
        for payload in payloads:
            key = payload.split()[0]
            done = self.done[group][key]
            done.append(payload)
            if self.order == "partition" and done != self.sent[key][: len(done)]:
                raise Broken(f"{group} has processed {done} of {key!r}; {self.sent[key]} was sent")

    def drain(self) -> None:
        while self.producing:
            self.decide()
        for batch in self.batches.values():
            self.count(batch.group, batch.commit())
        # Without an order, a poll finds a partition that was set back only if the others are empty, one per poll.
        misses, rounds = 0, 2 + (len(self.partitions()) if self.order == "none" and self.reached["set back"] else 0)
        while misses < rounds * len(self.workers):
            batch = self.batch(misses % len(self.workers))
            self.count(batch.group, batch.commit())
            misses = 0 if batch.payloads else misses + 1
        sent = {key: Counter(sent) for key, sent in self.sent.items() if sent}
        for group, done in self.done.items():
            if {key: Counter(found) for key, found in done.items()} != sent:
                raise Broken(f"{group} has processed {dict(done)}; {dict(self.sent)} was sent")


def play(order: str, seed: int) -> Counter[str]:
    store = CrashingStore()
    with in_process(clock=ManualClock(1_700_000_000_000), store=store) as server:
        with server.client() as client:
            client.create_topic(EVENTS, properties={"partitions": "2"} if seed % 2 else {})
        history = History(server, store, seed, order)
        try:
            history.play()
        except (Broken, TmsError) as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            history.close()
    return history.reached


@pytest.mark.seeded
@pytest.mark.no_cover
@pytest.mark.parametrize("order", ["partition", "none"])
def test_changes_of_partitions_keep_each_message_once_in_order(order: str) -> None:
    reached: Counter[str] = Counter()
    for seed in SEEDS:
        reached += play(order, seed)
    assert set(reached) == {"crash", "met", "set back"}


def use_new_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let consumers use the new partitions at once."""
    monkeypatch.setattr(Rotation, "_order", _newest)


def drain_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note a partition that one group has drained for all groups."""
    key = claim_rows.drained_key
    monkeypatch.setattr(claim_rows, "drained_key", lambda group: key(group._replace(name="all")))


def note_drain_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note only the first of several groups that drain a partition."""
    seen = set[TopicId]()

    def row(_: Groups, group: ConsumerGroup, _reader: int) -> list[tuple[bytes, bytes]]:
        first = group.topic not in seen
        seen.add(group.topic)
        return [claim_rows.pack_drained(group, 0)] if first else []

    monkeypatch.setattr(Groups, "_drained_row", row)


def keep_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the drained partitions of a group that is set back."""
    monkeypatch.setattr(consumers, "drained_key", lambda _: b"no such row")


def never_poll_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a consumer poll a drained partition never again."""
    made = Rotation.__init__

    def make(rotation: Rotation, *given: Any) -> None:
        made(rotation, *given)
        rotation._drained = PermanentDict()

    monkeypatch.setattr(Rotation, "__init__", make)


class PermanentDict(dict[TopicId, None]):
    """A dictionary without deletions."""

    def __delitem__(self, key: TopicId) -> None: ...

    def pop(self, key: TopicId, default: Any = None) -> None: ...


def _newest(rotation: Rotation, top: TopicId) -> list[TopicId]:
    layout = rotation._layouts.get(top)
    return [top] if layout is None else layout.members(layout.families[-1])


BUGS: dict[str, Plant] = {
    "skip_drain": replacing(Groups, "_find_earlier", lambda *_: None),
    "skip_seal": replacing(pipeline, "require_open", lambda *_: None),
    "use_new_partitions": use_new_partitions,
    "drain_for_all_groups": drain_for_all_groups,
    "note_drain_once": note_drain_once,
    "keep_drained": keep_drained,
    "never_poll_again": never_poll_again,
}


@pytest.mark.no_cover
@pytest.mark.parametrize("plant", BUGS.values(), ids=BUGS)
def test_planted_bug_breaks_an_invariant(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    def play_histories() -> None:
        for seed in range(24):
            play("partition", seed)

    with pytest.raises(Broken):
        play_histories()
