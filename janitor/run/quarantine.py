"""Topics that fail again and again are put aside, so that the others are done and the log stays readable (rule S9).

A failure is retried in every run. After three in a row the topic is quarantined: nothing of it is read or written for
an hour, then it is probed, then after two hours, and so on up to a day. A store in which nothing works has not got one
bad topic: no failure counts of a run in which no topic was done, nor of one in which several could not be written and
nothing was written anywhere else, as when a disk is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from janitor.state.base import Strikes
from tms_core.topic import TopicId

#: How many failures in a row put a topic aside.
STRIKES = 3
#: How long until the first probe, in milliseconds; doubled for each one that fails.
FIRST_PROBE_MS = 3_600_000
#: The longest time between two probes.
LAST_PROBE_MS = 24 * 3_600_000


def strike(known: Strikes | None, error: str, now_ms: int) -> Strikes:
    """A topic's record after one more failure.

    Args:
        known: what was remembered of it; None before its first failure.
        now_ms: when it failed.
    """
    count = 1 if known is None else known.count + 1
    if count < STRIKES:
        return Strikes(count, now_ms, error)
    since_ms = now_ms if known is None or known.quarantined_ms is None else known.quarantined_ms
    wait_ms = min(LAST_PROBE_MS, FIRST_PROBE_MS << min(count - STRIKES, 10))
    return Strikes(count, now_ms, error, since_ms, now_ms + wait_ms)


def quarantined(strikes: Mapping[TopicId, Strikes], now_ms: int) -> frozenset[TopicId]:
    """Topics that are passed by now: put aside, and not due to be probed.

    A probe that was dated by a clock that has been set back since is not waited for longer than any wait can be.
    """
    return frozenset(
        topic
        for topic, record in strikes.items()
        if record.probe_ms is not None and now_ms < record.probe_ms <= now_ms + LAST_PROBE_MS
    )


def judge(
    strikes: Mapping[TopicId, Strikes],
    failed: Mapping[TopicId, str],
    done: Iterable[TopicId],
    written: Iterable[TopicId],
    now_ms: int,
    *,
    write_failed: bool = True,
) -> dict[TopicId, Strikes | None]:
    """What changes in the records after a run.

    Args:
        failed: topics that failed in it, and why.
        done: topics that did not.
        written: topics in which rows were deleted or inverted.
        write_failed: whether the store refused to write something; then several topics may share one cause.

    Returns:
        New records; None for a topic whose failures are forgotten.
    """
    changed: dict[TopicId, Strikes | None] = dict.fromkeys(set(done) & set(strikes))
    fine = set(done) - set(failed)
    shared = write_failed and len(failed) > 1 and set(written) <= set(failed)
    if fine and not shared:
        changed.update((topic, strike(strikes.get(topic), error, now_ms)) for topic, error in failed.items())
    return changed
