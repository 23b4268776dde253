"""How far each consumer is behind: counted in the background, exactly, within the budget of the other count.

What counts is :mod:`tms_core.consumers.lag`'s to say; here it is said of all topics, again and again, and kept with its
time for metrics and status. A count of many rows takes many *turns*: in each, every topic that is due or under way is
read for one turn's worth of rows at most. So a consumer that is a billion messages behind does not keep the figures of
those who are almost there from being fresh.

Nothing is written here but the note the figures are kept in: counting consumes nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from janitor.state.base import State
from janitor.sweep.permission import never
from janitor.sweep.rate_limit import Pacer
from tms_core.clock import Clock
from tms_core.consumers import lag
from tms_core.consumers.lag import Counting, Lag
from tms_core.consumers.positions import Floor, Positions
from tms_core.errors import Halted, MetadataError, StoreError
from tms_core.tables.base import Reads
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId, TopicMetadata

#: The note that figures are kept in: a list of objects, one for each consumer.
NOTE = "consumers"
#: Rows that are read for one topic before the next one has its turn.
TURN_ROWS = 100_000

#: A topic and the generation its consumers are of.
Life = tuple[TopicId, int]

_log = logging.getLogger(__name__)


class _Turns(NamedTuple):
    """A topic's count under way."""

    topic: TopicMetadata
    counting: Counting

    @property
    def life(self) -> Life:
        return self.topic.topic, self.topic.generation


class LagCount:
    """Counts what the consumers of one store have not read, again and again.

    Args:
        store: is only read; a face that cannot write will do.
        positions: of all consumers.
        expiries: messages with a ttl of their own.
        floor: what holds unread messages; None: nothing does.
        state: where figures are kept.
        clock: what they are dated by.
        pacer: the budget, shared with everything else that counts.
        refresh_seconds: how old a figure may become before it is made again.
        halted: whether the process is ending; asked before every page.
    """

    def __init__(
        self,
        store: Reads,
        positions: Positions,
        expiries: Expiries,
        floor: Floor | None,
        state: State,
        clock: Clock,
        pacer: Pacer,
        *,
        refresh_seconds: int = 60,
        halted: Callable[[], bool] = never,
    ) -> None:
        self._store = store
        self._positions = positions
        self._expiries = expiries
        self._floor = floor
        self._state = state
        self._clock = clock
        self._pacer = pacer
        self._refresh_ms = refresh_seconds * 1000
        self._halted = halted
        self._under_way: deque[_Turns] = deque()
        self._tried_ms: dict[Life, int] = {}
        self._failing: set[Life] = set()
        self._saved: list[dict[str, Any]] = state.note(NOTE) or []
        self._figures: dict[Life, list[dict[str, Any]]] = {}
        for figures in self._saved:
            life = (TopicId(figures["tms_namespace"], figures["topic"]), figures["generation"])
            self._figures.setdefault(life, []).append(figures)

    def step(self) -> None:
        """Count what is due, until nothing is under way, or until halted; to be called now and then.

        A topic that cannot be read keeps the figures it had, with their time, and is tried again when it is due again.

        Raises:
            StoreError: the metadata or the positions could not be read, or the figures not be saved.
        """
        try:
            self._collect()
            while self._under_way:
                for _ in range(len(self._under_way)):
                    self._take_turn(self._under_way.popleft())
                self._save()
                self._collect()
        except Halted:
            return
        finally:
            self._save()

    def _collect(self) -> None:
        """Find out which topics have consumers, and begin with those that are due."""
        topics = {(topic.topic, topic.generation): topic for topic in self._living()}
        present = {topics[life]: found for life, found in self._positions.all().items() if life in topics}
        self._under_way = deque(turns for turns in self._under_way if turns.topic in present)
        lives = {(topic.topic, topic.generation) for topic in present}
        self._tried_ms = {life: at_ms for life, at_ms in self._tried_ms.items() if life in lives}
        self._figures = {life: figures for life, figures in self._figures.items() if life in lives}
        busy = {turns.life for turns in self._under_way}
        for topic, found in present.items():
            counting = lag.count(self._store, self._expiries, topic, found, self._floor, self._clock.now_ms())
            turns = _Turns(topic, counting)
            if turns.life not in busy and self._is_due(turns.life):
                self._under_way.append(turns)

    def _living(self) -> list[TopicMetadata]:
        living = []
        for key, value in self._store.metadata.rows():
            try:
                topic = TopicMetadata.parse(key, value)
            except MetadataError:
                continue
            if not topic.deleted:
                living.append(topic)
        return living

    def _is_due(self, life: Life) -> bool:
        tried_ms = self._tried_ms.get(life)
        return tried_ms is None or self._clock.running_ms() - tried_ms >= self._refresh_ms

    def _take_turn(self, turns: _Turns) -> None:
        rows = 0
        try:
            while rows < TURN_ROWS:
                if self._halted():
                    raise Halted("the count was asked to stop.")
                read = next(turns.counting)
                # An empty page was a look into the store, too.
                self._pacer.pay(max(read, 1))
                rows += max(read, 1)
        except StopIteration as end:
            self._finished(turns, end.value)
        except StoreError as error:
            self._failed(turns, error)
        else:
            self._under_way.append(turns)

    def _finished(self, turns: _Turns, lags: list[Lag]) -> None:
        self._tried_ms[turns.life] = self._clock.running_ms()
        self._failing.discard(turns.life)
        self._figures[turns.life] = [_figures(turns.topic, found, self._clock.now_ms()) for found in lags]

    def _failed(self, turns: _Turns, error: StoreError) -> None:
        self._tried_ms[turns.life] = self._clock.running_ms()
        if turns.life not in self._failing:
            self._failing.add(turns.life)
            _log.warning("how far the consumers of %s are could not be counted: %s", turns.topic.topic, error)

    def _save(self) -> None:
        found = [figures for life in sorted(self._figures) for figures in self._figures[life]]
        if found != self._saved:
            self._state.save_note(NOTE, found)
            self._saved = found


def _figures(topic: TopicMetadata, found: Lag, counted_ms: int) -> dict[str, Any]:
    return {
        "tms_namespace": topic.topic.namespace,
        "topic": topic.topic.topic,
        "generation": topic.generation,
        "consumer": found.position.name,
        "position_ms": found.position.id.publish_ms,
        "updated_ms": found.position.updated_ms,
        "lag_messages": found.messages,
        "oldest_unread_ms": found.oldest_ms,
        "expired": found.expired,
        "counted_ms": counted_ms,
    }
