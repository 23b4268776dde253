"""The audit log: requests and their principals, as one JSON object per line, independent of the format of other logs.

It is always on, so operators need not foresee that they need it. Each line has the same fields, and event names are
stable, because programs search for them. The number of lines that a client without permissions can cause is bounded, so
that it cannot fill the disk or hide other lines. See ``docs/reference/access.md``, "The audit log".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from tms_core.errors import shortened
from tms_core.logs.loggers import AUDIT, get_logger

#: How many lines of one event that anybody can cause are written a minute.
MOST_PER_MINUTE = 60
_MINUTE_MS = 60_000
#: How much of what a client chooses is in a line, in characters.
MOST_CHARACTERS = 300

logger = get_logger(AUDIT)


class Event(StrEnum):
    """The names of all events."""

    UNAUTHORIZED = "request.unauthorized"
    FORBIDDEN = "request.forbidden"
    LIMITED = "request.limited"
    TOPIC_CREATE = "topic.create"
    TOPIC_UPDATE = "topic.update"
    TOPIC_DELETE = "topic.delete"
    PRODUCER_DELETE = "producer.delete"
    CONSUMER_FORCE = "consumer.force"
    ROLLBACK = "messages.rollback"
    GROUP_ROLLBACK = "claims.rollback"
    TRUNCATE = "transactions.truncate"
    RESET = "transactions.reset"
    INVALIDATE = "transactions.invalidate"
    DECISION = "control.decision"
    CONTROL_FORBIDDEN = "control.forbidden"


def record(
    event: Event,
    *,
    principal: str | None = None,
    address: str = "",
    verb: str,
    object_: str = "",
    result: str,
    suppressed: int = 0,
) -> None:
    """Write one line.

    Args:
        principal: who; None: not known, as where no token is asked for.
        address: where the connection comes from.
        verb: what was asked: a method of HTTP, a call of the transaction service or of the control socket.
        object_: on what.
        result: ``done``, ``refused`` or ``failed``.
        suppressed: how many lines of this event were left out before this one.
    """
    fields = {
        "event": event.value,
        "principal": principal,
        "address": address,
        "verb": _cut(verb),
        "object": _cut(object_),
        "result": result,
    }
    if suppressed:
        fields["suppressed"] = str(suppressed)
    logger.log(logging.INFO, event.value, extra={"fields": fields})


def _cut(text: str) -> str:
    # Words are cut first; a text may have many of them.
    text = shortened(text)
    return f"{text[:MOST_CHARACTERS]}…" if len(text) > MOST_CHARACTERS else text


class BoundedAudit:
    """Writes at most :data:`MOST_PER_MINUTE` lines of each event a minute.

    Args:
        monotonic_ms: a monotonic clock.
    """

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._minute = -1
        self._written: Counter[Event] = Counter()
        self._suppressed: Counter[Event] = Counter()

    def record(self, event: Event, *, principal: str | None, address: str, verb: str, object_: str) -> None:
        """Write one line of something refused, or count it as left out; the next line of its event says how many."""
        minute = self._monotonic_ms() // _MINUTE_MS
        if minute != self._minute:
            self._minute = minute
            self._written.clear()
        self._written[event] += 1
        if self._written[event] > MOST_PER_MINUTE:
            self._suppressed[event] += 1
            return
        suppressed = self._suppressed.pop(event, 0)
        record(
            event,
            principal=principal,
            address=address,
            verb=verb,
            object_=object_,
            result="refused",
            suppressed=suppressed,
        )
