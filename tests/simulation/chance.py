"""Random operations, each drawn for the current state of the world.

The state gives most operations an object: an open transaction, an existing plan. Drawing fixes all parameters of an
operation, so that the history can be replayed without the random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from tests.simulation.commands import (
    Adopt,
    Apply,
    Approve,
    BackUp,
    DamageLog,
    Interruption,
    LoseState,
    Pause,
    Plan,
    Restore,
    RestoreArchived,
    Run,
    Truncate,
    Verify,
    WriteBack,
)
from tests.simulation.model import (
    DAY_MS,
    ERROR_MS,
    HOUR_MS,
    INTERVAL_MS,
    LATE_MS,
    LIFETIME_MS,
    LOST_MS,
    MINUTE_MS,
    SKEW_MS,
    Table,
)
from tests.simulation.operations import (
    Abort,
    Break,
    Checkpoint,
    Commit,
    Create,
    DamageSnapshot,
    Delete,
    FillDisk,
    Garble,
    Invalidate,
    KeyDefect,
    Misconfigure,
    Operation,
    Protect,
    Publish,
    PublishIn,
    PutUnrecognized,
    Reboot,
    SetClock,
    SetTtl,
    SkewServer,
    Start,
    Store,
    Wait,
)
from tests.simulation.world import World

T = TypeVar("T")

#: One name is a prefix of another, and rows do not sort like names.
TOPICS = ("a", "a-b", "b")
TTLS = (10 * 60, 3600, 6 * 3600, 2 * 86400, 10 * 86400)
TIMEOUTS_MS = (30_000, 10 * MINUTE_MS, LIFETIME_MS)
WAITS_MS = (1, 30_000, MINUTE_MS, MINUTE_MS, 10 * MINUTE_MS, 10 * MINUTE_MS, HOUR_MS, HOUR_MS + 1, 2 * HOUR_MS)
LONG_WAITS_MS = (3 * HOUR_MS + 6 * MINUTE_MS, 6 * HOUR_MS, 25 * HOUR_MS, 3 * DAY_MS, 8 * DAY_MS)
#: Age of the newest snapshot; above two intervals it is stale.
AGES_MS = (0, 0, 0, 30_000, INTERVAL_MS, 2 * INTERVAL_MS + 1, None)
ERRORS_MS = (0, 0, 0, ERROR_MS, -ERROR_MS, -HOUR_MS, HOUR_MS, DAY_MS, -3 * DAY_MS, 30 * DAY_MS, LOST_MS)
TABLES: tuple[Table, ...] = ("message", "payload")

#: Relative frequency of each kind of operation.
WEIGHTS = {
    "wait": 20.0,
    "run": 12,
    "publish_in": 10,
    "start": 7,
    "publish": 6,
    "store": 5,
    "commit": 4,
    "set_clock": 2.5,
    "abort": 2,
    "apply": 2,
    "approve": 2,
    "checkpoint": 2,
    "create": 2,
    "damage_snapshot": 2,
    "plan": 2,
    "set_ttl": 2,
    "truncate": 2,
    "adopt": 1.5,
    "back_up": 1.5,
    "delete": 1.5,
    "skew_server": 1.5,
    "pause": 1.5,
    "break_topic": 1,
    "garble": 1,
    "invalidate": 1,
    "protect": 1,
    "put_unrecognized": 1,
    "reboot": 1,
    "restore_archived": 1.5,
    "verify": 1,
    "write_back": 0.7,
    "misconfigure": 0.7,
    "damage_log": 0.3,
    "fill_disk": 0.7,
    "restore": 0.7,
    "lose_state": 0.3,
}


class Chance:
    """A generator of random operations."""

    def __init__(self, random: Random, world: World) -> None:
        self.random = random
        self._world = world

    # -- choices -------------------------------------------------------------------------------------------------

    def happens(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def up_to(self, number: int) -> int:
        return self.random.randint(1, number)

    def topic(self) -> str:
        return self.pick(TOPICS)

    def tx(self) -> int:
        """Return a transaction that its client has not finished; 0 without one."""
        active = [number for number, client in self._world.clients.items() if not client.done]
        return self.pick(active[-4:]) if active else 0

    def next_tx(self) -> int:
        """Return an unused transaction number."""
        return max(self._world.clients, default=0) + 1

    def operation(self) -> Operation:
        """Draw the next operation; an operation that blocks the janitor is reverted soon."""
        if self.happens(0.15) and not self._world.clock_is_right:
            return SetClock(0)
        if self.happens(0.15) and self._world.other_manager is not None:
            return Misconfigure(wrong=False)
        if self.happens(0.15) and not self._world.reference.adopted:
            return Adopt()
        (kind,) = self.random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))
        drawn = getattr(self, kind)()
        assert isinstance(drawn, Operation)
        return drawn

    # -- topics and messages -------------------------------------------------------------------------------------

    def create(self) -> Operation:
        return Create(self.topic(), self.pick(TTLS))

    def delete(self) -> Operation:
        return Delete(self.topic())

    def set_ttl(self) -> Operation:
        return SetTtl(self.topic(), self.pick(TTLS))

    def garble(self) -> Operation:
        return Garble(self.topic(), self.happens(0.4))

    def break_topic(self) -> Operation:
        return Break(self.topic(), self.happens(0.4))

    def protect(self) -> Operation:
        return Protect(self.topic(), self.happens(0.4))

    def publish(self) -> Operation:
        return Publish(self.topic(), self.up_to(3))

    def put_unrecognized(self) -> Operation:
        return PutUnrecognized(self.topic(), self.pick(TABLES), self.pick(tuple(KeyDefect)))

    # -- transactions --------------------------------------------------------------------------------------------

    def start(self) -> Operation:
        return Start(self.next_tx(), self.pick(TIMEOUTS_MS), self.happens(0.3))

    def checkpoint(self) -> Operation:
        return Checkpoint(self.tx())

    def publish_in(self) -> Operation:
        refers = self.happens(0.4)
        rows = 1 if refers else self.up_to(3)
        late_ms = self.pick((0, 0, 0, MINUTE_MS, LATE_MS // 2, LATE_MS))
        return PublishIn(self.tx(), self.topic(), rows, refers, late_ms, self.pick((0, late_ms)))

    def store(self) -> Operation:
        return Store(self.tx(), self.topic(), self.up_to(2))

    def commit(self) -> Operation:
        return Commit(self.tx())

    def abort(self) -> Operation:
        return Abort(self.tx())

    def invalidate(self) -> Operation:
        return Invalidate(self.tx())

    # -- time and snapshots --------------------------------------------------------------------------------------

    def wait(self) -> Operation:
        return Wait(self.pick(WAITS_MS if self.happens(0.85) else LONG_WAITS_MS), self.pick(AGES_MS))

    def skew_server(self) -> Operation:
        return SkewServer(self.pick((0, SKEW_MS, -SKEW_MS)))

    def set_clock(self) -> Operation:
        return SetClock(self.pick(ERRORS_MS))

    def reboot(self) -> Operation:
        return Reboot(self.pick(ERRORS_MS))

    def damage_snapshot(self) -> Operation:
        return DamageSnapshot(self.pick((-1, 0, 10, 50, 90)))

    # -- the janitor and its operator ----------------------------------------------------------------------------

    def run(self) -> Operation:
        batch_rows, patient = self.pick((1, 2, 5, 2000)), self.happens(0.4)
        if self.happens(0.1):
            return Run(topic=self.topic(), batch_rows=batch_rows)
        if self.happens(0.6):
            return Run(batch_rows=batch_rows, patient=patient)
        at_call = self.up_to(self.pick((3, 8, 25)))
        concurrent = self.pick(tuple(Interruption)) if self.happens(0.4) else self._concurrent()
        return Run(batch_rows=batch_rows, patient=patient, at_call=at_call, concurrent=concurrent)

    def _concurrent(self) -> Operation:
        """Draw a concurrent operation of another process."""
        of_topics = (self.create, self.delete, self.set_ttl, self.pause, self.approve)
        of_clients = (self.publish_in, self.publish_in, self.commit, self.abort, self.store)
        return self.pick((*of_topics, *of_clients))()

    def pause(self) -> Operation:
        return Pause(self.pick((None, *TOPICS)), self.happens(0.4))

    def plan(self) -> Operation:
        return Plan(self.up_to(2))

    def apply(self) -> Operation:
        return Apply(self.up_to(2), self.happens(0.2))

    def adopt(self) -> Operation:
        return Adopt()

    def approve(self) -> Operation:
        return Approve(self.pick((None, None, *TOPICS)))

    def verify(self) -> Operation:
        return Verify()

    def write_back(self) -> Operation:
        return WriteBack()

    def misconfigure(self) -> Operation:
        return Misconfigure(self.happens(0.6))

    def damage_log(self) -> Operation:
        return DamageLog(self.up_to(100) - 1, self.happens(0.4))

    def fill_disk(self) -> Operation:
        return FillDisk(self.happens(0.4))

    def truncate(self) -> Operation:
        return Truncate()

    def back_up(self) -> Operation:
        return BackUp(self.up_to(2))

    def restore(self) -> Operation:
        return Restore(self.up_to(2), self.happens(0.5))

    def restore_archived(self) -> Operation:
        return RestoreArchived(self.topic(), self.pick((None, *TOPICS)))

    def lose_state(self) -> Operation:
        return LoseState()
