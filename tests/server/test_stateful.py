"""The whole server against a model, through its client, with the janitor at work in between.

``tms serve`` as it is, on LevelDB: HTTP, the transaction service, the janitor inside. Only its clock is the test's, and
the janitor's jobs are done when a history says so. After each step every topic is read by somebody outside
transactions and by somebody in one, and every consumer's lag is looked at. ``TMS_TEST_HISTORIES`` is how many histories
there are.
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
from tests.server.told import Reader, Topic, Tx
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
#: The consumer group, and where it begins.
GROUP, BEGINNING = "worker", MessageId(0, 0)
TIMEOUT_SECONDS = 300
EMPTY = Transaction(0, 0, 0)
#: A ttl, and how far time goes at once.
TTLS = (5 * MINUTE, HOUR, 2 * DAY)
STEPS = (1, 3 * SECOND, MINUTE, 2 * MINUTE, 4 * MINUTE, HOUR, DAY)


class Undone(Exception):
    """What a program fails with."""


class Jobs:
    """In the place of the janitor's schedule: nothing runs unless the test does it."""

    def __init__(self, *_: object) -> None:
        self.chores: list[Callable[[], object]] = []
        self._asked = threading.Event()

    def add(self, _: str, __: object, function: Callable[[], object], *, at_once: bool) -> None:
        assert at_once
        self.chores.append(function)

    def next_run_ms(self, _: str) -> None:
        """Return no time: the next run is unknown."""

    def start(self) -> None:
        """Do nothing: the janitor has no thread."""

    def run_now(self, _: str) -> None:
        """The daemon wakes its own loop with this, to look whether it is to end."""
        self._asked.set()

    def watch(self, wait_seconds: float) -> None:
        self._asked.wait(wait_seconds)
        self._asked.clear()

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
        made: list[Jobs] = []

        def schedule(*_: object) -> Jobs:
            made.append(Jobs())
            return made[-1]

        with patch("janitor.app.serve.Schedule", schedule):
            started = self._stack.enter_context(serving(None, environ, {}, clock=clock))
        assert started.transactions is not None
        [self._jobs] = made
        self._janitor = cast(Embedded, started.companions["janitor"]).daemon
        self.client = self._stack.enter_context(Client(started.url, transactions=started.transactions))
        self.transactions = self._stack.enter_context(TransactionClient(started.transactions))

    def clean(self) -> None:
        """Run all jobs of the janitor once."""
        for chore in self._jobs.chores:
            chore()
        assert self._janitor.status().failing == {}

    def stop(self) -> None:
        self._stack.close()


class History(RuleBasedStateMachine):
    """Something that could have happened."""

    txs = Bundle("txs")
    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tms-history-"))
        self.clock = ManualClock(NOW_MS, monotonic_ms=DAY)
        self.server = Server(self.folder, self.clock)
        self.topics: dict[str, Topic] = {}
        self.begun: list[Tx] = []
        #: Which transactions have stored payloads of which topics that are not published.
        self.hidden: set[tuple[Tx, Topic]] = set()
        #: What was begun before the last restart.
        self.interrupted: set[Tx] = set()
        self.numbers = count()

    def teardown(self) -> None:
        """However a history ends, the janitor comes once more, and again when most has expired."""
        try:
            for step_ms in (1, HOUR):
                self.let_time_pass(step_ms, cleaned=True)
                self.readers_get_what_they_have_to_get()
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
        fates=st.lists(st.sampled_from(("open", "committed", "aborted", "invalid")), min_size=4, max_size=6),
        stored=st.booleans(),
    )
    def begin_with_something(self, ttl_ms: int, fates: list[str], *, stored: bool) -> None:
        """Transactions that have ended in all ways, so that what happens then happens to something."""
        for name in NAMES:
            self.create(name, ttl_ms)
            for fate in fates:
                tx = self.begin()
                self.publish_in(tx, name, 2, stored=stored)
                if fate == "committed":
                    self.commit(tx)
                elif fate == "aborted":
                    self.roll_back(tx)
                elif fate == "invalid":
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
        self.topics[name].tell_time(self.now_ms)

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
    def publish_some_time(self, name: str, number: int) -> None:
        if name in self.topics:
            payloads = self.payloads(number)
            self.server.client.publish_async(name, payloads)
            self.server.client.flush(PATIENCE_SECONDS)
            self.topics[name].add(payloads, self.now_ms)

    @rule(number=st.integers(1, 3), reads=st.sampled_from(NAMES), fails=st.booleans())
    def read_process_write(self, number: int, reads: str, *, fails: bool) -> None:
        """In one transaction: what a consumer has not read, and something published to every topic."""
        if reads not in self.topics:
            return
        payloads = {name: self.payloads(number) for name in self.topics}
        read: list[Message] = []
        tx = Tx(EMPTY, 0)
        with suppress(Undone), self.server.client.transaction() as together:
            reader = self.beside(together.transaction)
            read += together.consume(reads, GROUP)
            for name, given in payloads.items():
                together.publish(name, given)
            if fails:
                raise Undone
        behind = self.topics[reads].positions.get(GROUP)
        self.topics[reads].check_group(read, reader, self.now_ms, behind=behind)
        if fails:
            self.topics[reads].fail(read, self.now_ms)
        else:
            tx.fate = "committed"
            tx.transaction = together.transaction
            for name, given in payloads.items():
                self.topics[name].add(given, self.now_ms, tx=tx)
            if read:
                self.topics[reads].positions[GROUP] = read[-1].id

    @rule(target=txs)
    def begin_to_write(self) -> Tx:
        return self.begin()

    def begin(self) -> Tx:
        transaction = self.server.transactions.start_short(TIMEOUT_SECONDS)
        tx = Tx(transaction, self.now_ms + TIMEOUT_SECONDS * 1000)
        self.begun.append(tx)
        return tx

    @rule(tx=txs, name=st.sampled_from(NAMES), number=st.integers(1, 3), stored=st.booleans())
    def write(self, tx: Tx, name: str, number: int, *, stored: bool) -> None:
        self.publish_in(tx, name, number, stored=stored)

    def publish_in(self, tx: Tx, name: str, number: int, *, stored: bool) -> None:
        if name not in self.topics or self.is_ancient(tx):
            return
        topic, payloads = self.topics[name], self.payloads(number)
        if tx.fate != "open":
            # Its client does not know yet.
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
            # Readers would take these messages for all there is.
            with pytest.raises(BadRequest, match="not published"):
                self.server.client.publish(name, payloads, transaction=tx.transaction)
            return
        written = self.server.client.publish(name, payloads, transaction=tx.transaction)
        topic.add(payloads, self.now_ms, tx=tx)
        tx.published.append((topic, written))

    def is_ancient(self, tx: Tx) -> bool:
        return self.now_ms - (tx.expires_ms - TIMEOUT_SECONDS * 1000) > DAY

    def commit(self, tx: Tx) -> None:
        for topic, payloads in tx.stored.items():
            if self.topics.get(topic.name) is topic and not self.is_ancient(tx):
                if tx.fate != "open":
                    with pytest.raises(TransactionEnded):
                        self.server.client.publish(topic.name, [], transaction=tx.transaction)
                    continue
                written = self.server.client.publish(topic.name, [], transaction=tx.transaction)
                topic.add(payloads, self.now_ms, tx=tx)
                self.hidden.discard((tx, topic))
                tx.published.append((topic, written))
        if tx.fate != "open":
            with pytest.raises(TransactionError):
                self.server.transactions.commit(tx.transaction.transaction_id)
            return
        if tx in self.interrupted:
            # The service would not know that it was told of changes.
            with pytest.raises(Conflict, match="canCommit"):
                self.server.transactions.commit(tx.transaction.transaction_id)
            self.server.transactions.can_commit(tx.transaction.transaction_id, ())
        self.server.transactions.commit(tx.transaction.transaction_id)
        tx.fate = "committed"

    def roll_back(self, tx: Tx) -> None:
        if tx.fate != "open":
            return
        for topic, written in tx.published:
            if self.topics.get(topic.name) is topic:
                self.server.client.rollback(topic.name, written)
                for sent in topic.sent:
                    sent.taken_back |= sent.tx is tx
        self.server.transactions.abort(tx.transaction)
        tx.fate = "aborted"

    @rule(tx=consumes(txs), end=st.sampled_from((commit, commit, roll_back)))
    def finish(self, tx: Tx, end: Callable[[History, Tx], None]) -> None:
        end(self, tx)

    @rule(tx=txs)
    def give_up(self, tx: Tx) -> None:
        self.invalidate(tx)

    def invalidate(self, tx: Tx) -> None:
        assert self.server.transactions.invalidate(tx.transaction.transaction_id) == (tx.fate == "open")
        tx.fate = "invalid" if tx.fate == "open" else tx.fate

    # --- reading -----------------------------------------------------------------------------------------------------

    @rule(target=readers)
    def begin_to_read(self) -> Reader:
        return self.reader()

    def reader(self) -> Reader:
        transaction = self.server.transactions.start_short(TIMEOUT_SECONDS)
        self.server.transactions.abort(transaction)
        return self.beside(transaction)

    def beside(self, transaction: Transaction) -> Reader:
        """Who reads in a transaction that has just begun."""
        undecided = frozenset(tx for tx in self.begun if tx.fate == "open")
        return Reader(transaction, undecided, frozenset(tx for tx in self.begun if tx.fate == "invalid"))

    @rule(reader=readers)
    def read_in(self, reader: Reader) -> None:
        for name, topic in self.topics.items():
            topic.check(list(self.server.client.poll(name, transaction=reader.transaction)), reader, self.now_ms)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def read_on(self, name: str, data: st.DataObject) -> None:
        """From each message on, and behind it, comes what a whole reading has there."""
        if name not in self.topics:
            return
        whole = list(self.server.client.poll(name))
        if whole:
            at = data.draw(st.integers(0, len(whole) - 1))
            assert list(self.server.client.poll(name, start=whole[at].id)) == whole[at:]
            assert list(self.server.client.poll(name, start=whole[at].id, inclusive=False)) == whole[at + 1 :]
            assert list(self.server.client.poll(name, start=whole[0].id, limit=at + 1)) == whole[: at + 1]
            assert list(self.server.client.poll(name, start=whole[at].time)) == [
                message for message in whole if message.id.publish_ms >= whole[at].id.publish_ms
            ]

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def consume(self, name: str, data: st.DataObject) -> None:
        """Somebody who reads for ever gets as much as there is, and goes on behind it the next time."""
        if name in self.topics:
            behind = self.topics[name].positions.get("eternal")
            there = list(self.server.client.poll(name, start=behind, inclusive=behind is None))
            number = data.draw(st.integers(0, len(there)))
            with self.server.client.consume(name, consumer="eternal") as coming:
                assert list(islice(coming, number)) == there[:number]
                coming.commit()
            if number:
                self.topics[name].positions["eternal"] = there[number - 1].id

    @rule(name=st.sampled_from(NAMES), consumer=st.sampled_from(("one", "two")), data=st.data())
    def say_position(self, name: str, consumer: str, data: st.DataObject) -> None:
        """Say how far a consumer has read; nowhere: forget it."""
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

    # --- what happens by itself --------------------------------------------------------------------------------------

    @rule(step_ms=st.sampled_from(STEPS), cleaned=st.booleans())
    def let_time_pass(self, step_ms: int, *, cleaned: bool) -> None:
        self.clock.advance(step_ms)
        for topic in self.topics.values():
            topic.tell_time(self.now_ms)
        for tx in self.begun:
            if tx.fate == "open" and tx.expires_ms <= self.now_ms:
                # The service gives it up some time now.
                self.server.transactions.invalidate(tx.transaction.transaction_id)
                tx.fate = "invalid"
        if cleaned:
            self.server.clean()

    @rule()
    def restart(self) -> None:
        self.server.stop()
        self.server = Server(self.folder, self.clock)
        self.interrupted.update(self.begun)

    # --- what is always true -----------------------------------------------------------------------------------------

    @invariant()
    def readers_get_what_they_have_to_get(self) -> None:
        reader = self.reader()
        for name, topic in self.topics.items():
            topic.check(list(self.server.client.poll(name)), None, self.now_ms)
            topic.check(list(self.server.client.poll(name, transaction=reader.transaction)), reader, self.now_ms)

    @invariant()
    def consumers_are_as_far_as_they_said(self) -> None:
        for name, topic in self.topics.items():
            found = {one.name: one for one in self.server.client.positions(name)}
            group, said = found.pop(GROUP, None), topic.positions.get(GROUP)
            # A group's position is there from its first poll on, and goes on over what nobody will ever see.
            assert group is not None or said is None
            if group is not None:
                assert said is None or rank(group.position) >= rank(said)
                assert topic.passed_over(said or BEGINNING, group.position, self.now_ms) == []
                assert group.lag_messages <= topic.unread(said or BEGINNING, self.now_ms)[1]
            alone = {consumer: position for consumer, position in topic.positions.items() if consumer != GROUP}
            assert {consumer: one.position for consumer, one in found.items()} == alone
            for one in found.values():
                least, most = topic.unread(one.position, self.now_ms)
                assert least <= one.lag_messages <= most


#: Other tests cover every line of it; to trace it would double the time.
TestHistories = pytest.mark.no_cover(pytest.mark.timeout(7200)(History.TestCase))
TestHistories.settings = settings(
    max_examples=size("TMS_TEST_HISTORIES", 4),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
