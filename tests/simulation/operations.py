"""Everything that can happen at the site, each with its parameters fixed, so that a history can be played again.

An operation whose precondition does not hold does nothing. So any part of a history is a history, and a failing one can
be made shorter by leaving things out.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import StrEnum

from janitor.report import Report
from tests.simulation.invariants import Allowed, Watch
from tests.simulation.model import IN_FLIGHT_MS, LIFETIME_MS, Client, Row, Table, Topic, topic_id
from tests.simulation.site import Crash, Site
from tms_core.errors import Refused, StoreError
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.transaction.model import TX_PER_MS


@dataclass(frozen=True)
class Operation:
    """Something that happens."""

    def on(self, site: Site) -> None:
        """Let it happen.

        Raises:
            Violation: the janitor did what it must not.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        """As one would write it: what is at its default is left out."""
        given = [(item.name, getattr(self, item.name), item.default) for item in fields(self)]
        shown = [f"{name}={value!r}" for name, value, default in given if default is MISSING or value != default]
        return f"{type(self).__name__}({', '.join(shown)})"


# --- topics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Create(Operation):
    """Create a topic, for the first time or again."""

    topic: str
    ttl_seconds: int

    def on(self, site: Site) -> None:
        known = site.topics.get(self.topic)
        if known is None:
            site.set_topic(self.topic, Topic(1, self.ttl_seconds))
        elif known.generation < 0 and not known.garbled:
            site.set_topic(self.topic, Topic(1 - known.generation, self.ttl_seconds))


@dataclass(frozen=True, repr=False)
class Delete(Operation):
    topic: str

    def on(self, site: Site) -> None:
        known = site.usable_topic(self.topic)
        if known is not None:
            site.set_topic(self.topic, Topic(-known.generation, known.ttl_seconds))


@dataclass(frozen=True, repr=False)
class SetTtl(Operation):
    topic: str
    ttl_seconds: int

    def on(self, site: Site) -> None:
        known = site.usable_topic(self.topic)
        if known is not None:
            site.set_topic(self.topic, Topic(known.generation, self.ttl_seconds))


@dataclass(frozen=True, repr=False)
class Garble(Operation):
    """Make a topic's metadata unreadable, or readable again."""

    topic: str
    on_purpose: bool = True

    def on(self, site: Site) -> None:
        known = site.topics.get(self.topic)
        if known is not None:
            site.set_topic(self.topic, Topic(known.generation, known.ttl_seconds, garbled=self.on_purpose))


@dataclass(frozen=True, repr=False)
class Protect(Operation):
    """Put a topic under ``janitor.protect``, or take it out."""

    topic: str
    protected: bool = True

    def on(self, site: Site) -> None:
        names = site.reference.protected
        (names.add if self.protected else names.discard)(self.topic)


# --- publishing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Publish(Operation):
    """Publish without a transaction."""

    topic: str
    rows: int = 1

    def on(self, site: Site) -> None:
        site.write_messages(self.topic, self.rows)


class Odd(StrEnum):
    """What can be wrong with a key."""

    SHORT = "short"
    LONG = "long"
    GENERATION = "generation"
    TIME = "time"
    TOPIC = "topic"


@dataclass(frozen=True, repr=False)
class PutForeign(Operation):
    """Somebody else's program writes a row of its own."""

    topic: str
    table: Table
    odd: Odd

    def on(self, site: Site) -> None:
        name = "nobody" if self.odd is Odd.TOPIC else self.topic
        generation = 0 if self.odd is Odd.GENERATION else 1
        time_ms = -1 if self.odd is Odd.TIME else 1
        if self.table == "message":
            key = MessageKey(topic_id(name), generation, time_ms, 0).pack()
        else:
            key = PayloadKey(topic_id(name), generation, 1, time_ms, 0).pack()
        if self.odd is Odd.SHORT:
            key = key[:-1]
        elif self.odd is Odd.LONG:
            key += b"\x00"
        if (self.table, key) not in site.rows:
            site.write_foreign(Row(self.table, key, name, generation, time_ms, foreign=True))


# --- transactions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Start(Operation):
    """Start a transaction; ``tx`` names it in the history."""

    tx: int
    timeout_ms: int = LIFETIME_MS
    long: bool = False

    def on(self, site: Site) -> None:
        if self.tx not in site.clients:
            pointer = site.manager.start(site.server_ms, self.timeout_ms, long=self.long)
            site.clients[self.tx] = Client([pointer], self.long)


@dataclass(frozen=True, repr=False)
class OfTransaction(Operation):
    """Something a client does in its transaction, which it may not know to be invalid."""

    tx: int

    def on(self, site: Site) -> None:
        client = site.clients.get(self.tx)
        if client is not None and not client.done:
            self.by(client, site)

    def by(self, client: Client, site: Site) -> None:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Checkpoint(OfTransaction):
    def by(self, client: Client, site: Site) -> None:
        pointer = site.manager.checkpoint(client.id, site.server_ms)
        if pointer is not None:
            client.pointers.append(pointer)


@dataclass(frozen=True, repr=False)
class PublishIn(OfTransaction):
    """Publish in a transaction, with payload or as a reference to what was stored.

    Attributes:
        late_ms: how long ago the server let the write pass.
        in_flight_ms: how long ago it gave the rows their time; they appear only now.
    """

    topic: str
    rows: int = 1
    refers: bool = False
    late_ms: int = 0
    in_flight_ms: int = 0

    def by(self, client: Client, site: Site) -> None:
        if site.accepts(client, self.late_ms):
            if client.id in site.manager.invalid and site.usable_topic(self.topic) is not None:
                site.reached["published while invalid"] += 1
            client.topics.add(self.topic)
            pointer = client.write_pointer
            in_flight_ms = min(self.in_flight_ms, IN_FLIGHT_MS, site.server_ms - pointer // TX_PER_MS)
            site.write_messages(self.topic, self.rows, pointer, refers=self.refers, in_flight_ms=in_flight_ms)


@dataclass(frozen=True, repr=False)
class Store(OfTransaction):
    """Store payloads, to be referred to later. The server does not check the lifetime here."""

    topic: str
    rows: int = 1

    def by(self, client: Client, site: Site) -> None:
        site.write_payloads(self.topic, self.rows, client.write_pointer)


@dataclass(frozen=True, repr=False)
class Commit(OfTransaction):
    """Commit; a client whose transaction is not in progress any more learns it now, and rolls back."""

    def by(self, client: Client, site: Site) -> None:
        site.finish(client, commit=True)


@dataclass(frozen=True, repr=False)
class Abort(OfTransaction):
    def by(self, client: Client, site: Site) -> None:
        site.finish(client, commit=False)


@dataclass(frozen=True, repr=False)
class Invalidate(OfTransaction):
    """Give the transaction up; what is on its way to the server may still arrive."""

    def by(self, client: Client, site: Site) -> None:
        site.manager.invalidate(client.id)


# --- time and snapshots ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Wait(Operation):
    """Let time pass.

    Attributes:
        snapshot_age_ms: how old the snapshot is that the transaction service has written by then; None: none.
    """

    milliseconds: int
    snapshot_age_ms: int | None = 0

    def on(self, site: Site) -> None:
        if self.snapshot_age_ms is None:
            site.pass_time(self.milliseconds)
            return
        age_ms = min(self.snapshot_age_ms, self.milliseconds)
        site.pass_time(self.milliseconds - age_ms)
        site.write_snapshot()
        site.pass_time(age_ms)


@dataclass(frozen=True, repr=False)
class SkewServer(Operation):
    """The server's clock is off by a little."""

    milliseconds: int

    def on(self, site: Site) -> None:
        site.set_skew(self.milliseconds)


@dataclass(frozen=True, repr=False)
class SetClock(Operation):
    """Step the janitor's clock to be ahead of honest time by that much."""

    error_ms: int

    def on(self, site: Site) -> None:
        site.set_clock(self.error_ms)


@dataclass(frozen=True, repr=False)
class Reboot(Operation):
    error_ms: int = 0

    def on(self, site: Site) -> None:
        site.reboot(self.error_ms)


@dataclass(frozen=True, repr=False)
class DamageSnapshot(Operation):
    """Something happens to the newest snapshot.

    Attributes:
        keep: the share of it that is left, in percent; less than nothing: the file is gone.
    """

    keep: int

    def on(self, site: Site) -> None:
        for path in site.snapshot_files()[-1:]:
            if self.keep < 0:
                path.unlink()
            else:
                data = path.read_bytes()
                path.write_bytes(data[: len(data) * self.keep // 100])


# --- the janitor -----------------------------------------------------------------------------------------------------


class Trouble(StrEnum):
    """What can go wrong inside a run."""

    CRASH = "crash"
    ERROR = "error"


@dataclass(frozen=True, repr=False)
class Run(Operation):
    """One pass.

    Attributes:
        topic: the only topic in scope; None for all.
        at_call: before which of its store calls ``meanwhile`` happens.
        meanwhile: another operation, or the process dies, or the store fails.
    """

    adopt: bool = False
    topic: str | None = None
    batch_rows: int = 2000
    at_call: int = 0
    meanwhile: Operation | Trouble | None = None

    def on(self, site: Site) -> None:
        if self.adopt and not site.clock_is_right:
            return
        watch = Watch(site)
        if self.adopt:
            site.was_adopted()
        elif self.meanwhile is not None:
            site.store.alarm.set(self.at_call, lambda call: self._interrupt(site, watch, call))
        patterns = () if self.topic is None else (str(topic_id(self.topic)),)
        report = None
        try:
            report = site.engine(self.batch_rows).run_once(adopt=self.adopt, patterns=patterns)
        except Crash:
            site.reached["crashed"] += 1
        except StoreError:
            site.reached["failed"] += 1
        site.store.alarm.clear()
        watch.judge()
        if report is not None:
            self._learn(site, watch, report)
        site.read_claims()

    def _interrupt(self, site: Site, watch: Watch, call: str) -> None:
        if self.meanwhile is Trouble.CRASH:
            raise Crash
        if self.meanwhile is Trouble.ERROR:
            raise StoreError("the disk is full.")
        if isinstance(self.meanwhile, Operation):
            watch.interrupted(call)
            self.meanwhile.on(site)

    def _learn(self, site: Site, watch: Watch, report: Report) -> None:
        """Take note of what the janitor now remembers."""
        if report.tripped:
            site.reached["stopped"] += 1
            return
        site.clock_was_remembered()
        seen = {
            name: topic
            for name, topic in site.topics.items()
            if self.topic in (None, name) and not _failed(name, report)
        }
        site.reference.observe(watch.topics, seen, site.now_ms)
        complete = not report.errors and self.topic is None and report.snapshot is not None
        if complete and report.thorough:
            site.restored_in_place = False
        site.reached["held"] += report.held_rows()
        site.reached["claimed"] += report.boundary is not None


def _failed(name: str, report: Report) -> bool:
    """Whether the topic is one that the run left undone."""
    starts = (f"{topic_id(name)}: ", f"topic {topic_id(name)} ")
    return any(error.startswith(starts) for error in report.errors)


@dataclass(frozen=True, repr=False)
class Plan(Operation):
    """Preview, into a plan file."""

    slot: int

    def on(self, site: Site) -> None:
        watch = Watch(site, may_write=False)
        report = site.engine().plan(out=site.folder / f"plan.{self.slot}")
        watch.judge()
        site.read_claims()
        if report.boundary is not None:
            site.claims.append(("the boundary in a plan", report.boundary))


@dataclass(frozen=True, repr=False)
class Apply(Operation):
    """Carry out a plan file."""

    slot: int
    adopt: bool = False

    def on(self, site: Site) -> None:
        path = site.folder / f"plan.{self.slot}"
        if not path.exists() or (self.adopt and not site.clock_is_right):
            return
        watch = Watch(site, allowed=Allowed.read(path))
        try:
            report = site.engine().apply(path, adopt=self.adopt)
        except Refused:
            site.reached["refused"] += 1
            return
        if self.adopt:
            site.was_adopted()
        watch.judge()
        if not report.tripped:
            site.clock_was_remembered()
            site.reached["applied"] += 1
        site.read_claims()


# --- the operator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Adopt(Operation):
    """Accept the store; the operator has looked at the clock first."""

    def on(self, site: Site) -> None:
        if site.clock_is_right:
            site.engine().adopt()
            site.was_adopted()
            site.read_claims()


@dataclass(frozen=True, repr=False)
class Approve(Operation):
    """Let held frontiers go: of one topic, or all and the clock, at which the operator has looked first."""

    topic: str | None = None

    def on(self, site: Site) -> None:
        if self.topic is None and not site.clock_is_right:
            return
        patterns = () if self.topic is None else (str(topic_id(self.topic)),)
        try:
            site.engine().approve(patterns)
        except Refused:
            return
        topics = {name: topic for name, topic in site.topics.items() if self.topic in (None, name)}
        site.reference.approve(topics, site.now_ms)
        if self.topic is None:
            site.clock_was_remembered()


@dataclass(frozen=True, repr=False)
class Truncate(Operation):
    """Drop from the invalid list what the janitor claims to be clean.

    An operator who has restored a backup in place waits for a pass that looks at everything, as the runbook says.
    """

    def on(self, site: Site) -> None:
        if site.restored_in_place or site.state.store() is None:
            return
        claim, _ = site.engine().boundary()
        if claim is not None:
            site.reached["truncated"] += site.manager.truncate(claim.bound)


@dataclass(frozen=True, repr=False)
class BackUp(Operation):
    slot: int

    def on(self, site: Site) -> None:
        site.back_up(self.slot)


@dataclass(frozen=True, repr=False)
class Restore(Operation):
    """Put a backup in the store's place."""

    slot: int
    in_place: bool

    def on(self, site: Site) -> None:
        if site.restore(self.slot, in_place=self.in_place):
            site.read_claims()


@dataclass(frozen=True, repr=False)
class LoseState(Operation):
    """Remove the janitor's memory."""

    def on(self, site: Site) -> None:
        site.lose_state()
        site.read_claims()
