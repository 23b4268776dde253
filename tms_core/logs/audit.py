"""The audit log: requests and their principals, as one JSON object per line, independent of the format of other logs.

It is always enabled, because operators need it after an event that they did not foresee. Each line has the same fields,
and event names are stable, because programs search for them. The number of lines that a client without permissions can
cause is limited, so that it cannot fill the disk or hide other lines. See ``docs/reference/access.md``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from tms_core.errors import shortened
from tms_core.logs.loggers import AUDIT, get_logger

#: The largest number of lines per minute of each event that a client without permissions can cause.
MAX_LINES_PER_MINUTE = 60
_MINUTE_MS = 60_000
#: The longest field in a line whose text a client chooses, in characters.
MAX_FIELD_CHARACTERS = 300

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
        principal: the authenticated caller; None: unknown, because the service requires no token.
        address: the remote address of the connection.
        verb: an HTTP method, or a call of the transaction service or of the control socket.
        object_: the target of the verb.
        result: ``done``, ``refused`` or ``failed``.
        suppressed: the number of omitted lines of this event since its previous line.
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
    # Cut each word first, so that one long word does not displace all others.
    text = shortened(text)
    return f"{text[:MAX_FIELD_CHARACTERS]}…" if len(text) > MAX_FIELD_CHARACTERS else text


class BoundedAudit:
    """An audit log with at most :data:`MAX_LINES_PER_MINUTE` lines of each event a minute.

    Args:
        monotonic_ms: a monotonic clock.
    """

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._minute = -1
        self._written: Counter[Event] = Counter()
        self._suppressed: Counter[Event] = Counter()

    def record(self, event: Event, *, principal: str | None, address: str, verb: str, object_: str) -> None:
        """Write a line about a rejected request, or count it as suppressed in the next line of the event."""
        minute = self._monotonic_ms() // _MINUTE_MS
        if minute != self._minute:
            self._minute = minute
            self._written.clear()
        self._written[event] += 1
        if self._written[event] > MAX_LINES_PER_MINUTE:
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
