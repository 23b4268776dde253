"""The canary itself: publishes, looks, counts, and takes its topic back."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from janitor import guards
from janitor.canary.watch import EARLY, NOTE, Waiting, Watch
from janitor.own import CANARY_TOPIC, OURS, OWNER, is_own
from janitor.state.base import UNKNOWN_MS, ClockAnchor, State
from tms_core.clock import Clock
from tms_core.errors import MetadataError, StoreError
from tms_core.lease import Lease
from tms_core.rowkey import MessageKey, generation_prefix
from tms_core.tables.base import MessageValue, Store
from tms_core.topic import TopicMetadata, encode_properties

TOPIC = CANARY_TOPIC

#: How long a message lives: long enough to be watched, short enough to be news.
TTL_SECONDS = 300
#: How often one is published, in seconds.
PUBLISH_SECONDS = 60
#: No more are published while so many wait: whoever pauses the janitor for a month shall not find a month of them.
MOST_WAITING = 100
#: How far two clocks of one machine may differ without one having been set: they are not read at the same moment.
AGREE_MS = 1_000

_PAGE_ROWS = 1_000
_SEQUENCES = 1 << 16

_log = logging.getLogger(__name__)


class Canary:
    """The canary of one store, to be looked after every few seconds.

    Args:
        store: is written to, in the canary's topic and its metadata only, and only once it is adopted.
        state: where what is watched is kept.
        clock: what messages are dated and measured by.
        enabled: without it the topic, if there is one, is taken back.
        allowance_ms: how far a wall clock may jump without a sweep being stopped (``janitor.clock_allowance_seconds``).
        lease: the lease sweeps run under; nothing is done while it is not held. None where there is none. It is not
            checked before every write, as a sweep does: two janitors would at worst both publish.
    """

    def __init__(
        self,
        store: Store,
        state: State,
        clock: Clock,
        *,
        enabled: bool,
        allowance_ms: int = 300_000,
        lease: Lease | None = None,
    ) -> None:
        self._store = store
        self._state = state
        self._clock = clock
        self._enabled = enabled
        self._allowance_ms = allowance_ms
        self._lease = lease
        self._published_at_ms: int | None = None
        self._searched: int | None = None
        self._retired = False
        self._warned = False

    def tick(self) -> None:
        """Look for the messages there are, and publish one if it is time.

        Raises:
            StoreError: the store or the state could not be read or written.
        """
        if self._retired or not self._may_write():
            return
        raw = self._store.metadata.get(TOPIC.prefix)
        topic = None if raw is None else _parsed(raw)
        stranger = raw is not None and (topic is None or not is_own(topic))
        if not self._enabled:
            self._retire(raw, None if stranger else topic)
        elif stranger:
            self._leave_alone()
        elif topic is None or topic.deleted:
            self._create(raw, topic)
        else:
            watch = self._look(topic, self._known(topic))
            self._publish(topic, watch)

    # -- the topic -------------------------------------------------------------------------------------------------

    def _may_write(self) -> bool:
        """Whether the store is adopted, the same as then, and nobody else's turn."""
        record = self._state.store()
        if record is None or record.adopted_ms is None or record.identity != self._store.identity():
            return False
        return self._lease is None or self._lease.held

    def _leave_alone(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("topic %s is there and not the janitor's own: there is no canary; see janitor.canary", TOPIC)

    def _create(self, raw: bytes | None, deleted: TopicMetadata | None) -> None:
        generation = 1 if deleted is None else 1 - deleted.generation
        self._write(raw, {"generation": str(generation), "ttl": str(TTL_SECONDS), OWNER: OURS})

    def _retire(self, raw: bytes | None, topic: TopicMetadata | None) -> None:
        """Delete the topic as CDAP would; its rows then are of an old generation."""
        if topic is not None and not topic.deleted:
            self._write(raw, {**topic.properties, "generation": str(-topic.generation)})
            return
        self._state.save_note(NOTE, None)
        self._retired = True

    def _write(self, expected: bytes | None, properties: Mapping[str, str]) -> None:
        """Write the topic's metadata, unless somebody else just did; the next tick sees what came of it."""
        self._store.metadata.compare_and_set(TOPIC.prefix, expected, encode_properties(properties))

    # -- looking ---------------------------------------------------------------------------------------------------

    def _known(self, topic: TopicMetadata) -> Watch:
        """What to look for: nothing that was published under another generation or ttl."""
        watch = Watch.load(self._state)
        waiting = watch.waiting if watch.generation == topic.generation else ()
        same = tuple(message for message in waiting if message.due_ms == _due_ms(topic, message.publish_ms))
        watch = replace(watch, generation=topic.generation, waiting=same)
        return self._adopt(topic, watch) if self._searched != topic.generation else watch

    def _adopt(self, topic: TopicMetadata, watch: Watch) -> Watch:
        """Also watch what else lies in the topic: a process died, or the memory was lost, after it was published."""
        prefix = TOPIC.prefix
        start, stop = (generation_prefix(prefix, topic.generation + more) for more in (0, 1))
        now = guards.read_clocks(self._clock)
        known = {_key(topic, message) for message in watch.waiting}
        found = [
            Waiting(key.publish_ms, key.sequence, due_ms, now.running_ms - now.wall_ms + key.publish_ms, now.boot_id)
            for raw, value in self._store.message.rows(start, stop, _PAGE_ROWS).items
            if raw not in known and (key := MessageKey.parse(raw)) is not None
            if (due_ms := _due_ms(topic, key.publish_ms)) == _written_due_ms(value)
        ]
        self._searched = topic.generation
        if not found:
            return watch
        waiting = (*sorted(found), *watch.waiting)[-MOST_WAITING:]
        return replace(watch, waiting=waiting, sequence=max(watch.sequence, found[-1].sequence + 1) % _SEQUENCES)

    def _look(self, topic: TopicMetadata, watch: Watch) -> Watch:
        """Count what has gone since the last look."""
        there = tuple(message for message in watch.waiting if self._is_there(_key(topic, message)))
        # Read after looking: what is missed went before this moment.
        now = guards.read_clocks(self._clock)
        gone = [self._late_ms(message, now) for message in watch.waiting if message not in there]
        late = [late_ms for late_ms in gone if late_ms is not None and late_ms >= 0]
        early = [late_ms for late_ms in gone if late_ms is not None and late_ms < 0]
        for late_ms in early:
            _log.error(
                "a message of %s went %.3f s before it was due; live messages may go, too", TOPIC, -late_ms / 1000
            )
        watch = replace(watch, waiting=there, late_ms=max(late, default=watch.late_ms))
        if watch != Watch.load(self._state):
            with self._state.transaction():
                self._state.add_counters({EARLY: len(early)} if early else {})
                watch.save(self._state)
        return watch

    def _late_ms(self, message: Waiting, now: ClockAnchor) -> int | None:
        """How long after it was due it was missed, negative if that was too early; None where nobody can tell."""
        true_ms = guards.measured(message.published, now).wall_ms
        if true_ms >= UNKNOWN_MS:
            return None
        excused = now.wall_ms >= message.due_ms and now.wall_ms - true_ms <= self._allowance_ms + AGREE_MS
        late_ms = true_ms - message.due_ms
        return max(0, late_ms) if excused else late_ms

    def _is_there(self, key: bytes) -> bool:
        return self._store.message.first(key, key + b"\x00") is not None

    # -- publishing ------------------------------------------------------------------------------------------------

    def _publish(self, topic: TopicMetadata, watch: Watch) -> None:
        now = guards.read_clocks(self._clock)
        last_ms = self._published_at_ms
        if last_ms is not None and now.running_ms - last_ms < PUBLISH_SECONDS * 1000:
            return
        if len(watch.waiting) >= MOST_WAITING:
            return
        due_ms = _due_ms(topic, now.wall_ms)
        message = Waiting(now.wall_ms, watch.sequence, due_ms, now.running_ms, now.boot_id)
        payload = json.dumps({"due_ms": due_ms}).encode()
        self._store.message.put([(_key(topic, message), MessageValue(None, payload))])
        self._published_at_ms = now.running_ms
        if not self._is_there(_key(topic, message)):
            raise StoreError(f"A message of {TOPIC} is not there after it was published.", "Look at the store's log.")
        replace(
            watch,
            sequence=(watch.sequence + 1) % _SEQUENCES,
            published=watch.published + 1,
            waiting=(*watch.waiting, message),
        ).save(self._state)


def _parsed(raw: bytes) -> TopicMetadata | None:
    try:
        return TopicMetadata.parse(TOPIC.prefix, raw)
    except MetadataError:
        return None


def _due_ms(topic: TopicMetadata, publish_ms: int) -> int:
    """The first moment at which a message is older than its topic's ttl (rule L3)."""
    return publish_ms + topic.ttl_seconds * 1000 + 1


def _key(topic: TopicMetadata, message: Waiting) -> bytes:
    return MessageKey(TOPIC, topic.generation, message.publish_ms, message.sequence).pack()


def _written_due_ms(value: MessageValue) -> Any:
    """What a message says of when it is due; None of one that is none of ours."""
    try:
        payload = json.loads(value.payload or b"")
    except ValueError:
        return None
    return payload.get("due_ms") if isinstance(payload, dict) else None
