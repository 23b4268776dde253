"""Random histories of one topic, compared with the plain reference after every step."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.builders import HOUR, MINUTE, SECOND, Kit, janitor
from tests.kit.messaging import MAKERS, named, reader
from tests.messaging.reference import Book, Row, Spot
from tms_core.errors import BadRequest, ClockJumped, TransactionExpired
from tms_core.messaging.model import RollbackRange
from tms_core.rowkey import MessageId, MessageKey, PayloadKey
from tms_core.tables.base import KEYS, PAYLOADS
from tms_core.transaction.model import TX_PER_MS, Transaction

ALLOWANCE_MS = 5 * MINUTE
LIFETIME_MS = HOUR
BODIES = st.lists(st.sampled_from([b"", b"a", b"b" * 50, b"c" * 3000]), min_size=1, max_size=4)
TTLS = st.sampled_from([None, None, None, 1, 60, 7200])
NOWHERE = Spot(0, 0)
STEPS_MS = [0, 1, 999, SECOND, SECOND + 1, MINUTE, MINUTE + 1, ALLOWANCE_MS, HOUR // 2, HOUR, HOUR + 1, 2 * HOUR]


@dataclass
class Tx:
    """A transaction of a client.

    Attributes:
        pending: whether it has stored payloads that it has not published; None: a restarted service may not know.
        refers: whether a message refers to its stored payloads.
    """

    pointer: int
    published: list[RollbackRange] = field(default_factory=list)
    pending: bool | None = False
    refers: bool = False


class History(RuleBasedStateMachine):
    """One topic, its clients, its clock and its janitor."""

    maker = "memory"

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.kit = MAKERS[self.maker](Path(self._folder.name))
        self.kit.restart(cache_bytes=20_000)
        self.kit.create("orders", ttl="3600")
        self.book = Book(3600)
        self.generation = 1
        self._begin_time()
        self.janitor_kit = self._janitor()
        self.open: list[Tx] = []
        self.invalid: list[int] = []
        self.readers: list[Transaction] = []
        self.pointer = 0
        self.last = NOWHERE
        self.announced = NOWHERE

    def teardown(self) -> None:
        self.kit.close()
        self._folder.cleanup()

    def _janitor(self) -> Kit:
        return janitor(self.kit.store, clock=self.kit.clock, hold_seconds=0, lifetime_known=True).adopt()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _begin_time(self) -> None:
        self.forgiven_until_ms = self.kit.clock.monotonic_ms()
        self.lead_ms = self.kit.clock.now_ms() - self.forgiven_until_ms
        self.highest_lead_ms = self.lead_ms
        self.ahead_ms = self.past_ms = 0
        self.now_ms = self.kit.clock.now_ms()

    def _look(self) -> None:
        """What time it is for the service, which looks after each step: it never goes back.

        ``ahead_ms`` says how far the wall clock is ahead; that is forgiven a millisecond for each second. One that was
        set back, and is right again, is believed. So is one that was behind the rows when the service started, and has
        caught up with them.
        """
        monotonic_ms = self.kit.clock.monotonic_ms()
        lead_ms = self.kit.clock.now_ms() - monotonic_ms
        if abs(lead_ms - self.highest_lead_ms) <= ALLOWANCE_MS < lead_ms - self.lead_ms:
            self.lead_ms = self.highest_lead_ms
        started_ms, now_ms = monotonic_ms + self.lead_ms, self.kit.clock.now_ms()
        if lead_ms - self.lead_ms > ALLOWANCE_MS and started_ms < self.past_ms - ALLOWANCE_MS <= now_ms:
            self.lead_ms = lead_ms
        seconds = (monotonic_ms - self.forgiven_until_ms) // SECOND
        ahead_ms = self.kit.clock.now_ms() - monotonic_ms - self.lead_ms
        self.ahead_ms = min(ahead_ms, max(0, ahead_ms - seconds))
        if self.ahead_ms > ALLOWANCE_MS:
            self.ahead_ms = ahead_ms
            self.forgiven_until_ms = monotonic_ms
        else:
            self.ahead_ms = max(0, self.ahead_ms)
            self.lead_ms += ahead_ms - self.ahead_ms
            self.forgiven_until_ms = self.forgiven_until_ms + seconds * SECOND if self.ahead_ms else monotonic_ms
        self.highest_lead_ms = max(self.highest_lead_ms, self.lead_ms)
        self.now_ms = max(self.now_ms, self.kit.clock.now_ms() - max(0, self.ahead_ms - ALLOWANCE_MS))

    @rule(step_ms=st.sampled_from(STEPS_MS))
    def wait(self, step_ms: int) -> None:
        self.kit.clock.advance(step_ms)

    @rule(step_ms=st.sampled_from(STEPS_MS), sign=st.sampled_from([-1, 1]))
    def step_the_clock(self, step_ms: int, sign: int) -> None:
        self.kit.clock.step(sign * step_ms)

    @rule()
    def restart(self) -> None:
        self.kit.restart()
        # A restart forgets rows that the janitor deleted at the end of the topic, except for rows with their own TTL.
        self.last = max([self.announced, *(row.spot for row in self.book.rows)])
        self._begin_time()
        self.past_ms = self.last.ms
        for tx in self.open:
            # The service reads stored payloads from the store, except for pointers ahead of its clock. The store does
            # not show whether payloads were stored before or after a message that refers to them.
            is_unknown = tx.pointer > (self.kit.clock.now_ms() + ALLOWANCE_MS) * TX_PER_MS
            if tx.pending and (is_unknown or tx.refers):
                tx.pending = None

    # -- producers ----------------------------------------------------------------------------------------------------

    @rule(bodies=BODIES, ttl=TTLS)
    def publish(self, bodies: list[bytes], ttl: int | None) -> None:
        if self.ahead_ms > ALLOWANCE_MS:
            with pytest.raises(ClockJumped):
                self.kit.publish("orders", *bodies, ttl=ttl)
            return
        self.kit.publish("orders", *bodies, ttl=ttl)
        self._written(None, bodies, ttl)

    @rule()
    def begin(self) -> None:
        self.pointer = max(self.pointer + 1, self.kit.clock.now_ms() * TX_PER_MS)
        self.open.append(Tx(self.pointer))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), bodies=BODIES, ttl=TTLS, stored=st.booleans())
    def publish_in_a_transaction(self, data: st.DataObject, bodies: list[bytes], ttl: int | None, stored: bool) -> None:
        tx = data.draw(st.sampled_from(self.open))
        wanted = [] if stored else bodies
        if self.ahead_ms > ALLOWANCE_MS:
            with pytest.raises(ClockJumped):
                self.kit.publish("orders", *wanted, pointer=tx.pointer, ttl=ttl)
            return
        rows: Sequence[bytes | None] = wanted or [None]
        if tx.pointer // TX_PER_MS + LIFETIME_MS <= self._next().ms:
            with pytest.raises(TransactionExpired):
                self.kit.publish("orders", *wanted, pointer=tx.pointer, ttl=ttl)
            return
        if wanted and tx.pending:
            with pytest.raises(BadRequest):
                self.kit.publish("orders", *wanted, pointer=tx.pointer, ttl=ttl)
            return
        try:
            published = self.kit.publish("orders", *wanted, pointer=tx.pointer, ttl=ttl)
        except BadRequest:
            assert (bool(wanted), tx.pending) == (True, None)
            return
        tx.published.append(published)
        tx.pending = False
        tx.refers = tx.refers or not wanted
        first = self._written(tx.pointer, rows, ttl)
        assert published == RollbackRange(tx.pointer, *first, *first.plus(len(rows) - 1))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), bodies=BODIES)
    def store(self, data: st.DataObject, bodies: list[bytes]) -> None:
        tx = data.draw(st.sampled_from(self.open))
        before = self._payloads()
        try:
            self.kit.put("orders", tx.pointer, *bodies)
        except (ClockJumped, TransactionExpired):
            assert self._payloads() == before
            return
        tx.pending = True
        new = {key: payload for key, payload in self._payloads().items() if key not in before}
        assert list(new.values()) == bodies
        spots = [Spot(key.write_ms, key.sequence) for key in new]
        mine = [Spot(key.write_ms, key.sequence) for key in before if key.write_pointer == tx.pointer]
        assert spots == [spots[0].plus(number) for number in range(len(spots))]
        assert spots[0] > max(mine, default=Spot(-1, 0))
        assert spots[0].ms >= self.now_ms
        self.book.stored.setdefault(tx.pointer, []).extend(zip(spots, bodies, strict=True))

    def _payloads(self) -> dict[PayloadKey, bytes]:
        rows = self.kit.store.payload.read(PAYLOADS, b"", None, 1_000_000).items
        keys = {PayloadKey.parse(key): payload for key, payload in rows}
        return {key: payload for key, payload in keys.items() if key and key.generation == self.generation}

    def _next(self) -> Spot:
        return max(self.last.plus(1), Spot(self.now_ms, 0))

    def _written(self, pointer: int | None, payloads: Sequence[bytes | None], ttl: int | None) -> Spot:
        first = self._next()
        for number, payload in enumerate(payloads):
            spot = first.plus(number)
            expires_ms = None if ttl is None else spot.ms + ttl * 1000 + 1
            self.book.rows.append(Row(spot, pointer, payload, expires_ms))
        self.last = first.plus(len(payloads) - 1)
        if ttl is not None:
            self.announced = self.last
        return first

    # -- ends of transactions -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.open.remove(data.draw(st.sampled_from(self.open)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        tx = data.draw(st.sampled_from(self.open))
        self.open.remove(tx)
        for published in tx.published:
            self.kit.service.rollback(named("orders"), published)
        for row in self.book.rows:
            if row.pointer == tx.pointer:
                row.pointer = -tx.pointer

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        tx = data.draw(st.sampled_from(self.open))
        self.open.remove(tx)
        self.invalid.append(tx.pointer)

    # -- the topic ----------------------------------------------------------------------------------------------------

    @rule(ttl=st.sampled_from([60, 3600, 7200]))
    def change_the_ttl(self, ttl: int) -> None:
        self.kit.service.update_topic(named("orders"), {"ttl": str(ttl)})
        self.book.ttl_seconds = ttl

    @rule(ttl=st.sampled_from([60, 3600]))
    def make_it_again(self, ttl: int) -> None:
        self.kit.service.delete_topic(named("orders"))
        self.kit.create("orders", ttl=str(ttl))
        self.generation += 1
        self.book, self.last, self.announced = Book(ttl), NOWHERE, NOWHERE
        for tx in self.open:
            tx.published.clear()
            tx.pending = tx.refers = False

    @rule()
    def sweep(self) -> None:
        """The janitor takes what is due and nothing else, and keeps all that a message refers to."""
        self.janitor_kit.snapshots.invalid = sorted(self.invalid)
        self.janitor_kit.snapshots.in_progress = sorted(tx.pointer for tx in self.open)
        self.janitor_kit.snapshots.write_pointer = max(self.pointer, 1)
        self.janitor_kit.engine.run_once()
        keys = [MessageKey.parse(key) for key in self.kit.store.message.read(KEYS, b"", None, 1_000_000).items]
        there = {Spot(*key[2:]) for key in keys if key is not None and key.generation == self.generation}
        cutoff_ms = self.kit.clock.now_ms() - self.book.ttl_seconds * 1000
        assert all(row.spot in there or row.spot.ms < cutoff_ms for row in self.book.rows)
        self.book.rows = [row for row in self.book.rows if row.spot in there]
        # Readers that started before the failure of a transaction stop at its rows, or skip inverted rows.
        self.readers = [reader for reader in self.readers if set(self.invalid) <= set(reader.invalids)]

    # -- consumers ----------------------------------------------------------------------------------------------------

    @rule()
    def begin_reading(self) -> None:
        self.readers = [*self.readers[-2:], self._reader()]

    def _reader(self) -> Transaction:
        self.pointer = max(self.pointer + 1, self.kit.clock.now_ms() * TX_PER_MS)
        return reader(
            self.pointer - 1,
            invalid=self.invalid,
            in_progress=[tx.pointer for tx in self.open],
            write_pointer=self.pointer,
        )

    @rule(data=st.data(), inclusive=st.booleans(), limit=st.sampled_from([1, 2, 3, 7, 2**31 - 1]))
    def fetch(self, data: st.DataObject, inclusive: bool, limit: int) -> None:
        who = data.draw(st.sampled_from([None, *self.readers]))
        start = data.draw(self._starts())
        found = self.kit.fetch("orders", start, inclusive=inclusive, limit=limit, transaction=who)
        assert found == self.book.fetch(self.now_ms, start, inclusive, limit, who)

    def _starts(self) -> st.SearchStrategy[MessageId | int | None]:
        known = [MessageId.parse(message.id) for message in self.book.fetch(0, None, True, 2**31, None)]
        times = [row.spot.ms for row in self.book.rows]
        starts: list[MessageId | int | None] = [None, 0, *known, *times]
        starts += [known_id._replace(payload_ms=0, payload_sequence=0) for known_id in known]
        starts += [known_id._replace(sequence=(known_id.sequence + 1) % 65_536) for known_id in known]
        starts += [known_id._replace(payload_ms=known_id.payload_ms + 1) for known_id in known]
        starts += [max(0, ms + near) for ms in times for near in (-1, 1)]
        return st.sampled_from(starts)

    @invariant()
    def everybody_sees_what_they_should(self) -> None:
        self._look()
        for who in (None, self._reader()):
            assert self.kit.fetch("orders", transaction=who) == self.book.fetch(self.now_ms, None, True, 2**31, who)


class LevelDBHistory(History):
    maker = "leveldb"


@pytest.mark.no_cover
@pytest.mark.parametrize(("history", "examples"), [(History, 60), (LevelDBHistory, 15)])
def test_service_answers_any_history_as_the_reference(history: type[RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(
        history,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
