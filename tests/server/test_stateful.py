"""The complete server against a model, through its client, with janitor jobs between the requests.

The test runs ``tms serve`` on LevelDB with HTTP, the transaction service and the embedded janitor. It controls the
clock and starts the jobs of the janitor. After each step, a reader outside transactions and a reader in a
transaction read every topic, and the lag of every consumer is checked. ``TMS_TEST_HISTORIES`` is the number of
histories.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count, islice
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from janitor.app.embedded import Embedded
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND
from tests.server.topic_model import Reader, Topic, Tx
from tests.support import PATIENCE_SECONDS, size
from tms_core.client import (
    Client,
    ConsumerNotFound,
    Message,
    MessageId,
    TopicExists,
    TopicNotFound,
    Transaction,
    TransactionClient,
    TransactionError,
)
from tms_core.clock import ManualClock
from tms_core.consumers.claims import rank
from tms_core.errors import BadRequest, Conflict, TransactionEnded
from tms_core.server.serving import serving

NAMES = ("default:a", "default:a-b")
#: The consumer group, and its first position.
GROUP, BEGINNING = "worker", MessageId(0, 0)
TIMEOUT_SECONDS = 300
EMPTY = Transaction(0, 0, 0)
#: The TTLs of topics, and the steps of the clock, in milliseconds.
TTLS = (5 * MINUTE, HOUR, 2 * DAY)
STEPS = (1, 3 * SECOND, MINUTE, 2 * MINUTE, 4 * MINUTE, HOUR, DAY)


class WorkFailed(Exception):
    """The error of a client program, which rolls back its transaction."""


class Jobs:
    """A schedule of the janitor whose jobs run only when the test calls them."""

    def __init__(self, *_: object) -> None:
        self.tasks: list[Callable[[], object]] = []
        self._woken = threading.Event()

    def add(self, _: str, __: object, function: Callable[[], object], *, at_once: bool) -> None:
        assert at_once
        self.tasks.append(function)

    def next_run_ms(self, _: str) -> None:
        """Return no time: the next run is unknown."""

    def start(self) -> None:
        """Do nothing: the janitor has no thread."""

    def run_now(self, _: str) -> None:
        """Wake the loop of the daemon, which checks whether it must stop."""
        self._woken.set()

    def watch(self, wait_seconds: float) -> None:
        self._woken.wait(wait_seconds)
        self._woken.clear()

    def shutdown(self, *, wait: bool) -> None:
        assert wait


class Server:
    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self._stack = ExitStack()
        environ = {
            "TMS_STORAGE__LEVELDB__PATH": str(folder / "messaging"),
            "TMS_TRANSACTIONS__DIRECTORY": str(folder / "tx"),
            "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0",
            "TMS_TRANSACTIONS__GRACE_SECONDS": "3600",
            "TMS_SERVER__PORT": "0",
            "TMS_JANITOR__STATE": str(folder / "state"),
            "TMS_JANITOR__HTTP__PORT": "0",
            "TMS_JANITOR__HOLD_SECONDS": "0",
        }
        schedules: list[Jobs] = []

        def schedule(*_: object) -> Jobs:
            schedules.append(Jobs())
            return schedules[-1]

        with patch("janitor.app.serve.Schedule", schedule):
            started = self._stack.enter_context(serving(None, environ, {}, clock=clock))
        assert started.transactions is not None
        [self._jobs] = schedules
        self._janitor = cast(Embedded, started.companions["janitor"]).daemon
        self.client = self._stack.enter_context(Client(started.url, transactions=started.transactions))
        self.transactions = self._stack.enter_context(TransactionClient(started.transactions))

    def clean(self) -> None:
        """Run all jobs of the janitor once."""
        for task in self._jobs.tasks:
            task()
        assert self._janitor.status().failing == {}

    def stop(self) -> None:
        self._stack.close()


class History(RuleBasedStateMachine):
    """A random history of requests, times, restarts and janitor jobs."""

    txs = Bundle("txs")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tms-history-"))
        self.clock = ManualClock(NOW_MS, monotonic_ms=DAY)
        self.server = Server(self.folder, self.clock)
        self.topics: dict[str, Topic] = {}
        self.started: list[Tx] = []
        #: Transactions with stored but unpublished payloads, by topic.
        self.hidden: set[tuple[Tx, Topic]] = set()
        #: Transactions that were started before the last restart.
        self.interrupted: set[Tx] = set()
        self.numbers = count()

    def teardown(self) -> None:
        """Run the janitor once more, and again when most messages have expired."""
        try:
            for step_ms in (1, HOUR):
                self.advance_time(step_ms, with_janitor=True)
                self.readers_get_expected_messages()
        finally:
            self.server.stop()
            shutil.rmtree(self.folder)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def payloads(self, number: int) -> list[bytes]:
        return [b"%d" % next(self.numbers) for _ in range(number)]

    # --- topics ------------------------------------------------------------------------------------------------------

    @initialize(
        ttl_ms=st.sampled_from(TTLS),
        states=st.lists(st.sampled_from(("open", "committed", "aborted", "invalid")), min_size=4, max_size=6),
        stored=st.booleans(),
    )
    def create_topics_and_transactions(self, ttl_ms: int, states: list[str], *, stored: bool) -> None:
        """Create topics with transactions in all states, so that later steps affect existing messages."""
        for name in NAMES:
            self.create(name, ttl_ms)
            for state in states:
                tx = self.begin()
                self.publish_in(tx, name, 2, stored=stored)
                if state == "committed":
                    self.commit(tx)
                elif state == "aborted":
                    self.roll_back(tx)
                elif state == "invalid":
                    self.invalidate(tx)

    def create(self, name: str, ttl_ms: int) -> None:
        if name in self.topics:
            with pytest.raises(TopicExists):
                self.server.client.create_topic(name)
            return
        self.server.client.create_topic(name, ttl=ttl_ms // 1000)
        self.topics[name] = Topic(name, ttl_ms)

    def change(self, name: str, ttl_ms: int) -> None:
        if name not in self.topics:
            with pytest.raises(TopicNotFound):
                self.server.client.update_topic(name, ttl=1)
            return
        self.server.client.update_topic(name, ttl=ttl_ms // 1000)
        self.topics[name].ttl_ms = ttl_ms
        self.topics[name].note_expired(self.now_ms)

    def delete(self, name: str, _: int) -> None:
        if self.topics.pop(name, None) is None:
            with pytest.raises(TopicNotFound):
                self.server.client.delete_topic(name)
            return
        self.server.client.delete_topic(name)

    @rule(
        act=st.sampled_from((change, change, create, delete)),
        name=st.sampled_from(NAMES),
        ttl_ms=st.sampled_from(TTLS),
        again=st.booleans(),
    )
    def administer(self, act: Callable[[History, str, int], None], name: str, ttl_ms: int, *, again: bool) -> None:
        act(self, name, ttl_ms)
        if again and name not in self.topics:
            self.create(name, ttl_ms)

    # --- publishing --------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), number=st.integers(1, 4), ttl_seconds=st.sampled_from((None, None, 30, 3000)))
    def publish(self, name: str, number: int, ttl_seconds: int | None) -> None:
        payloads = self.payloads(number)
        if name not in self.topics:
            with pytest.raises(TopicNotFound):
                self.server.client.publish(name, payloads)
            return
        self.server.client.publish(name, payloads, ttl=ttl_seconds)
        self.topics[name].add(payloads, self.now_ms, ttl_ms=None if ttl_seconds is None else ttl_seconds * 1000)

    @rule(name=st.sampled_from(NAMES), number=st.integers(1, 3))
    def publish_async(self, name: str, number: int) -> None:
        if name in self.topics:
            payloads = self.payloads(number)
            self.server.client.publish_async(name, payloads)
            self.server.client.flush(PATIENCE_SECONDS)
            self.topics[name].add(payloads, self.now_ms)

    @rule(number=st.integers(1, 3), reads=st.sampled_from(NAMES), fails=st.booleans())
    def read_process_write(self, number: int, reads: str, *, fails: bool) -> None:
        """Read the unread messages of a group, and publish to every topic, in one transaction."""
        if reads not in self.topics:
            return
        payloads = {name: self.payloads(number) for name in self.topics}
        read: list[Message] = []
        tx = Tx(EMPTY, 0)
        with suppress(WorkFailed), self.server.client.transaction() as transaction:
            reader = self.reader_of(transaction.transaction)
            read += transaction.consume(reads, GROUP)
            for name, given in payloads.items():
                transaction.publish(name, given)
            if fails:
                raise WorkFailed
        after = self.topics[reads].positions.get(GROUP)
        self.topics[reads].check_group(read, reader, self.now_ms, after=after)
        if fails:
            self.topics[reads].note_failure(read, self.now_ms)
        else:
            tx.state = "committed"
            tx.transaction = transaction.transaction
            for name, given in payloads.items():
                self.topics[name].add(given, self.now_ms, tx=tx)
            if read:
                self.topics[reads].positions[GROUP] = read[-1].id

    @rule(target=txs)
    def start_transaction(self) -> Tx:
        return self.begin()

    def begin(self) -> Tx:
        transaction = self.server.transactions.start_short(TIMEOUT_SECONDS)
        tx = Tx(transaction, self.now_ms + TIMEOUT_SECONDS * 1000)
        self.started.append(tx)
        return tx

    @rule(tx=txs, name=st.sampled_from(NAMES), number=st.integers(1, 3), stored=st.booleans())
    def write(self, tx: Tx, name: str, number: int, *, stored: bool) -> None:
        self.publish_in(tx, name, number, stored=stored)

    def publish_in(self, tx: Tx, name: str, number: int, *, stored: bool) -> None:
        if name not in self.topics or self.is_too_old(tx):
            return
        topic, payloads = self.topics[name], self.payloads(number)
        if tx.state != "open":
            # The client does not know the new state yet.
            put = self.server.client.store if stored else self.server.client.publish
            with pytest.raises(TransactionEnded):
                put(name, payloads, transaction=tx.transaction)
            return
        if stored:
            self.server.client.store(name, payloads, transaction=tx.transaction)
            tx.stored.setdefault(topic, []).extend(payloads)
            self.hidden.add((tx, topic))
            return
        if (tx, topic) in self.hidden:
            # Readers would treat these messages as complete, and skip the stored payloads.
            with pytest.raises(BadRequest, match="not published"):
                self.server.client.publish(name, payloads, transaction=tx.transaction)
            return
        written = self.server.client.publish(name, payloads, transaction=tx.transaction)
        topic.add(payloads, self.now_ms, tx=tx)
        tx.published.append((topic, written))

    def is_too_old(self, tx: Tx) -> bool:
        return self.now_ms - (tx.expires_ms - TIMEOUT_SECONDS * 1000) > DAY

    def commit(self, tx: Tx) -> None:
        for topic, payloads in tx.stored.items():
            if self.topics.get(topic.name) is topic and not self.is_too_old(tx):
                if tx.state != "open":
                    with pytest.raises(TransactionEnded):
                        self.server.client.publish(topic.name, [], transaction=tx.transaction)
                    continue
                written = self.server.client.publish(topic.name, [], transaction=tx.transaction)
                topic.add(payloads, self.now_ms, tx=tx)
                self.hidden.discard((tx, topic))
                tx.published.append((topic, written))
        if tx.state != "open":
            with pytest.raises(TransactionError):
                self.server.transactions.commit(tx.transaction.transaction_id)
            return
        if tx in self.interrupted:
            # The restart has lost the changes that the client reported.
            with pytest.raises(Conflict, match="canCommit"):
                self.server.transactions.commit(tx.transaction.transaction_id)
            self.server.transactions.can_commit(tx.transaction.transaction_id, ())
        self.server.transactions.commit(tx.transaction.transaction_id)
        tx.state = "committed"

    def roll_back(self, tx: Tx) -> None:
        if tx.state != "open":
            return
        for topic, written in tx.published:
            if self.topics.get(topic.name) is topic:
                self.server.client.rollback(topic.name, written)
                for sent in topic.sent:
                    sent.rolled_back |= sent.tx is tx
        self.server.transactions.abort(tx.transaction)
        tx.state = "aborted"

    @rule(tx=consumes(txs), end=st.sampled_from((commit, commit, roll_back)))
    def finish(self, tx: Tx, end: Callable[[History, Tx], None]) -> None:
        end(self, tx)

    @rule(tx=txs)
    def invalidate_transaction(self, tx: Tx) -> None:
        self.invalidate(tx)

    def invalidate(self, tx: Tx) -> None:
        assert self.server.transactions.invalidate(tx.transaction.transaction_id) == (tx.state == "open")
        tx.state = "invalid" if tx.state == "open" else tx.state

    # --- reading -----------------------------------------------------------------------------------------------------

    @rule(target=readers)
    def start_reader(self) -> Reader:
        return self.reader()

    def reader(self) -> Reader:
        transaction = self.server.transactions.start_short(TIMEOUT_SECONDS)
        self.server.transactions.abort(transaction)
        return self.reader_of(transaction)

    def reader_of(self, transaction: Transaction) -> Reader:
        """Return the reader of a transaction that has just started."""
        undecided = frozenset(tx for tx in self.started if tx.state == "open")
        return Reader(transaction, undecided, frozenset(tx for tx in self.started if tx.state == "invalid"))

    @rule(reader=readers)
    def read_in(self, reader: Reader) -> None:
        for name, topic in self.topics.items():
            topic.check(list(self.server.client.poll(name, transaction=reader.transaction)), reader, self.now_ms)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def read_from_message(self, name: str, data: st.DataObject) -> None:
        """A poll from or after any message returns the same messages as a complete poll."""
        if name not in self.topics:
            return
        read = list(self.server.client.poll(name))
        if read:
            at = data.draw(st.integers(0, len(read) - 1))
            assert list(self.server.client.poll(name, start=read[at].id)) == read[at:]
            assert list(self.server.client.poll(name, start=read[at].id, inclusive=False)) == read[at + 1 :]
            assert list(self.server.client.poll(name, start=read[0].id, limit=at + 1)) == read[: at + 1]
            assert list(self.server.client.poll(name, start=read[at].time)) == [
                message for message in read if message.id.publish_ms >= read[at].id.publish_ms
            ]

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def consume(self, name: str, data: st.DataObject) -> None:
        """Consume some messages; the next call continues after them."""
        if name in self.topics:
            after = self.topics[name].positions.get("follower")
            unread = list(self.server.client.poll(name, start=after, inclusive=after is None))
            number = data.draw(st.integers(0, len(unread)))
            with self.server.client.consume(name, consumer="follower") as messages:
                assert list(islice(messages, number)) == unread[:number]
                messages.commit()
            if number:
                self.topics[name].positions["follower"] = unread[number - 1].id

    @rule(name=st.sampled_from(NAMES), consumer=st.sampled_from(("one", "two")), data=st.data())
    def set_position(self, name: str, consumer: str, data: st.DataObject) -> None:
        """Set the position of a consumer, or delete the consumer."""
        if name not in self.topics:
            return
        client, positions = self.server.client, self.topics[name].positions
        read = data.draw(st.sampled_from([None, *client.poll(name)]))
        if read is not None:
            client.set_position(name, consumer, read.id)
            positions[consumer] = read.id
        elif positions.pop(consumer, None) is not None:
            client.delete_position(name, consumer)
        else:
            with pytest.raises(ConsumerNotFound):
                client.delete_position(name, consumer)

    # --- time, restarts and the janitor ------------------------------------------------------------------------------

    @rule(step_ms=st.sampled_from(STEPS), with_janitor=st.booleans())
    def advance_time(self, step_ms: int, *, with_janitor: bool) -> None:
        self.clock.advance(step_ms)
        for topic in self.topics.values():
            topic.note_expired(self.now_ms)
        for tx in self.started:
            if tx.state == "open" and tx.expires_ms <= self.now_ms:
                # The service invalidates it at its next check; the test does not wait for it.
                self.server.transactions.invalidate(tx.transaction.transaction_id)
                tx.state = "invalid"
        if with_janitor:
            self.server.clean()

    @rule()
    def restart(self) -> None:
        self.server.stop()
        self.server = Server(self.folder, self.clock)
        self.interrupted.update(self.started)

    # --- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def readers_get_expected_messages(self) -> None:
        reader = self.reader()
        for name, topic in self.topics.items():
            topic.check(list(self.server.client.poll(name)), None, self.now_ms)
            topic.check(list(self.server.client.poll(name, transaction=reader.transaction)), reader, self.now_ms)

    @invariant()
    def positions_of_consumers_are_correct(self) -> None:
        for name, topic in self.topics.items():
            found = {one.name: one for one in self.server.client.positions(name)}
            group, known = found.pop(GROUP, None), topic.positions.get(GROUP)
            # A group has a position after its first poll. It also passes messages that no reader will ever see.
            assert group is not None or known is None
            if group is not None:
                assert known is None or rank(group.position) >= rank(known)
                assert topic.skipped(known or BEGINNING, group.position, self.now_ms) == []
                assert group.lag_messages <= topic.unread_bounds(known or BEGINNING, self.now_ms)[1]
            expected = {consumer: position for consumer, position in topic.positions.items() if consumer != GROUP}
            assert {consumer: one.position for consumer, one in found.items()} == expected
            for one in found.values():
                lowest, highest = topic.unread_bounds(one.position, self.now_ms)
                assert lowest <= one.lag_messages <= highest


#: Without coverage, which would double the time: other tests cover the same lines.
TestHistories = pytest.mark.no_cover(pytest.mark.timeout(7200)(History.TestCase))
TestHistories.settings = settings(
    max_examples=size("TMS_TEST_HISTORIES", 4),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
