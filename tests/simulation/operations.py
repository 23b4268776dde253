"""Operations of servers, clients, clocks and disks, with fixed parameters, so that a history can be replayed.

An operation whose precondition does not hold does nothing. Therefore any part of a history is a history, and a failing
history can be shrunk by removing operations.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum, StrEnum

from tests.simulation.model import LIFETIME_MS, Client, Row, Table, Topic, topic_id
from tests.simulation.world import World
from tms_core.rowkey import MessageKey, PayloadKey


@dataclass(frozen=True)
class Operation:
    def on(self, world: World) -> None:
        """Apply the operation to the world."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the constructor call without default values."""
        given = [(item.name, getattr(self, item.name), item.default) for item in fields(self)]
        shown = [f"{name}={_code(value)}" for name, value, default in given if default is MISSING or value != default]
        return f"{type(self).__name__}({', '.join(shown)})"


def _code(value: object) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)


# --- topics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Create(Operation):
    topic: str
    ttl_seconds: int

    def on(self, world: World) -> None:
        known = world.topics.get(self.topic)
        if known is None:
            world.set_topic(self.topic, Topic(1, self.ttl_seconds))
        elif known.generation < 0 and not known.garbled:
            world.set_topic(self.topic, Topic(1 - known.generation, self.ttl_seconds))


@dataclass(frozen=True, repr=False)
class Delete(Operation):
    topic: str

    def on(self, world: World) -> None:
        known = world.usable_topic(self.topic)
        if known is not None:
            world.set_topic(self.topic, Topic(-known.generation, known.ttl_seconds))


@dataclass(frozen=True, repr=False)
class SetTtl(Operation):
    topic: str
    ttl_seconds: int

    def on(self, world: World) -> None:
        known = world.usable_topic(self.topic)
        if known is not None:
            world.set_topic(self.topic, Topic(known.generation, self.ttl_seconds))


@dataclass(frozen=True, repr=False)
class Garble(Operation):
    """Make a topic's metadata unreadable, or repair it."""

    topic: str
    on_purpose: bool = True

    def on(self, world: World) -> None:
        known = world.topics.get(self.topic)
        if known is not None:
            world.set_topic(self.topic, Topic(known.generation, known.ttl_seconds, garbled=self.on_purpose))


@dataclass(frozen=True, repr=False)
class Protect(Operation):
    """Add a topic to ``janitor.protect``, or remove it."""

    topic: str
    protected: bool = True

    def on(self, world: World) -> None:
        names = world.reference.protected
        (names.add if self.protected else names.discard)(self.topic)


@dataclass(frozen=True, repr=False)
class Break(Operation):
    """Fail all writes to rows of the topic, or stop failing."""

    topic: str
    broken: bool = True

    def on(self, world: World) -> None:
        faults, prefix = world.store.faults, topic_id(self.topic).prefix
        (faults.add if self.broken else faults.discard)(prefix)


@dataclass(frozen=True, repr=False)
class FillDisk(Operation):
    """Fill the disk of the janitor, or free it."""

    full: bool = True

    def on(self, world: World) -> None:
        world.store.faults.full = self.full


# --- publishing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Publish(Operation):
    topic: str
    rows: int = 1

    def on(self, world: World) -> None:
        world.write_messages(self.topic, self.rows)


class KeyDefect(StrEnum):
    """The defect of an unrecognized key."""

    SHORT = "short"
    LONG = "long"
    GENERATION = "generation"
    TIME = "time"
    TOPIC = "topic"


@dataclass(frozen=True, repr=False)
class PutUnrecognized(Operation):
    """Write a row of another program."""

    topic: str
    table: Table
    defect: KeyDefect

    def on(self, world: World) -> None:
        name = "nobody" if self.defect is KeyDefect.TOPIC else self.topic
        generation = 0 if self.defect is KeyDefect.GENERATION else 1
        time_ms = -1 if self.defect is KeyDefect.TIME else 1
        if self.table == "message":
            key = MessageKey(topic_id(name), generation, time_ms, 0).pack()
        else:
            key = PayloadKey(topic_id(name), generation, 1, time_ms, 0).pack()
        if self.defect is KeyDefect.SHORT:
            key = key[:-1]
        elif self.defect is KeyDefect.LONG:
            key += b"\x00"
        if (self.table, key) not in world.rows:
            world.write_unrecognized(Row(self.table, key, name, generation, time_ms, unrecognized=True))


# --- transactions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Start(Operation):
    """Start a transaction; ``tx`` names it in the history."""

    tx: int
    timeout_ms: int = LIFETIME_MS
    long: bool = False

    def on(self, world: World) -> None:
        if self.tx not in world.clients:
            pointer = world.manager.start(world.server_ms, self.timeout_ms, long=self.long)
            world.clients[self.tx] = Client([pointer], self.long)


@dataclass(frozen=True, repr=False)
class TransactionOperation(Operation):
    """An operation of a client in its transaction, which may already be invalid."""

    tx: int

    def on(self, world: World) -> None:
        client = world.clients.get(self.tx)
        if client is not None and not client.done:
            self.by(client, world)

    def by(self, client: Client, world: World) -> None:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Checkpoint(TransactionOperation):
    def by(self, client: Client, world: World) -> None:
        pointer = world.manager.checkpoint(client.id, world.server_ms)
        if pointer is not None:
            client.pointers.append(pointer)


@dataclass(frozen=True, repr=False)
class PublishIn(TransactionOperation):
    """Publish in a transaction, with a payload or a reference to stored payloads.

    Attributes:
        late_ms: time since the server's lifetime check of the write.
        in_flight_ms: time since the server assigned the times of the rows, which land now.
    """

    topic: str
    rows: int = 1
    refers: bool = False
    late_ms: int = 0
    in_flight_ms: int = 0

    def by(self, client: Client, world: World) -> None:
        if world.accepts(client, self.late_ms):
            if client.id in world.manager.invalid and world.usable_topic(self.topic) is not None:
                world.event_counts["publish in an invalid transaction"] += 1
            client.topics.add(self.topic)
            pointer = client.write_pointer
            in_flight_ms = min(self.in_flight_ms, self.late_ms)
            world.write_messages(self.topic, self.rows, pointer, refers=self.refers, in_flight_ms=in_flight_ms)


@dataclass(frozen=True, repr=False)
class Store(TransactionOperation):
    """Store payloads for a later reference. The server does not check the lifetime."""

    topic: str
    rows: int = 1

    def by(self, client: Client, world: World) -> None:
        world.write_payloads(self.topic, self.rows, client.write_pointer)


@dataclass(frozen=True, repr=False)
class Commit(TransactionOperation):
    """Commit; roll back if the transaction is no longer in progress."""

    def by(self, client: Client, world: World) -> None:
        world.finish(client, commit=True)


@dataclass(frozen=True, repr=False)
class Abort(TransactionOperation):
    def by(self, client: Client, world: World) -> None:
        world.finish(client, commit=False)


@dataclass(frozen=True, repr=False)
class Invalidate(TransactionOperation):
    """Invalidate the transaction; requests in flight may still arrive."""

    def by(self, client: Client, world: World) -> None:
        world.manager.invalidate(client.id)


# --- time and snapshots ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Wait(Operation):
    """Let time pass.

    Attributes:
        snapshot_age_ms: age of the snapshot written during the wait; None: no snapshot.
    """

    milliseconds: int
    snapshot_age_ms: int | None = 0

    def on(self, world: World) -> None:
        if self.snapshot_age_ms is None:
            world.pass_time(self.milliseconds)
            return
        age_ms = min(self.snapshot_age_ms, self.milliseconds)
        world.pass_time(self.milliseconds - age_ms)
        world.write_snapshot()
        world.pass_time(age_ms)


@dataclass(frozen=True, repr=False)
class SkewServer(Operation):
    """Set the skew of the server's clock."""

    milliseconds: int

    def on(self, world: World) -> None:
        world.set_skew(self.milliseconds)


@dataclass(frozen=True, repr=False)
class SetClock(Operation):
    """Step the janitor's clock to this offset from true time."""

    error_ms: int

    def on(self, world: World) -> None:
        world.set_clock(self.error_ms)


@dataclass(frozen=True, repr=False)
class Reboot(Operation):
    error_ms: int = 0

    def on(self, world: World) -> None:
        world.reboot(self.error_ms)


@dataclass(frozen=True, repr=False)
class DamageSnapshot(Operation):
    """Truncate or delete the newest snapshot.

    Attributes:
        keep: remaining share in percent; negative: the file is deleted.
    """

    keep: int

    def on(self, world: World) -> None:
        for path in world.snapshot_files()[-1:]:
            if self.keep < 0:
                path.unlink()
            else:
                data = path.read_bytes()
                path.write_bytes(data[: len(data) * self.keep // 100])


@dataclass(frozen=True, repr=False)
class Misconfigure(Operation):
    """Set ``transactions.directory`` to another transaction service, or correct it."""

    wrong: bool = True

    def on(self, world: World) -> None:
        if not self.wrong:
            world.other_manager = None
        elif world.other_manager is None:
            world.misread_snapshots()
