"""What is remembered of the canary's messages, and the figures that are made of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from janitor.picture import CanaryFigures
from janitor.state.base import ClockAnchor, CounterKey, State

#: Messages that went early; ever one is an emergency.
EARLY = CounterKey("canary_early_total")
#: Under this name the memory keeps it.
NOTE = "canary"


class Waiting(NamedTuple):
    """A message that was seen in the store and is waited for to go.

    Attributes:
        due_ms: the first moment at which it may, by the clock it was published by.
        running_ms, boot_id: when it was published, by the machine's running time.
    """

    publish_ms: int
    sequence: int
    due_ms: int
    running_ms: int
    boot_id: str

    @property
    def published(self) -> ClockAnchor:
        return ClockAnchor(self.publish_ms, self.running_ms, self.boot_id)


@dataclass(frozen=True, slots=True)
class Watch:
    """What is remembered from one look to the next.

    Attributes:
        generation: that of the topic the messages were published to.
        sequence: of the next message.
        published: messages published so far.
        late_ms: how late those were that went last; None before the first.
    """

    generation: int = 0
    sequence: int = 0
    published: int = 0
    late_ms: int | None = None
    waiting: tuple[Waiting, ...] = ()

    @classmethod
    def load(cls, state: State) -> Watch:
        note = state.note(NOTE)
        return cls(**{**note, "waiting": tuple(Waiting(*item) for item in note["waiting"])}) if note else cls()

    def save(self, state: State) -> None:
        state.save_note(NOTE, asdict(self))


def figures(state: State, *, enabled: bool, now_ms: int | None = None) -> CanaryFigures:
    """What became of the messages, from the memory alone.

    Args:
        enabled: whether the settings want a canary.
        now_ms: the present; a message that is due and still there is as late as it has waited by then.
    """
    watch = Watch.load(state)
    waited_ms = [] if now_ms is None else [now_ms - message.due_ms for message in watch.waiting]
    late_ms = max((ms for ms in (watch.late_ms, *waited_ms) if ms is not None and ms >= 0), default=None)
    return CanaryFigures(
        enabled=enabled,
        published=watch.published,
        early=int(state.counters().get(EARLY, 0)),
        late_seconds=None if late_ms is None else late_ms / 1000,
        waiting=len(watch.waiting),
    )
