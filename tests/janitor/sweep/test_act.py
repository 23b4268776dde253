"""Runs with an archive: rows that cannot be archived stay, and the rest of the run continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from janitor.rules.policy import Rule
from janitor.state.base import CounterKey
from tests.builders import DAY, HOUR, NOW_MS, SECOND, adopted_janitor, fail_at, janitor, pointer, topic, watch
from tms_core.errors import ArchiveError, StoreError
from tms_core.tables.memory import MemoryStore


class ArchivedBatch:
    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.discarded = False

    def discard(self) -> None:
        self.discarded = True


class MemoryArchive:
    """An archive in memory that can fail from the n-th batch on, and leave out a key."""

    def __init__(self, *, full_after: int | None = None, leaves: bytes | None = None) -> None:
        self.kept: list[ArchivedBatch] = []
        self.checks = 0
        self.expired: list[tuple[int, int]] = []
        self._full_after = full_after
        self._leaves = leaves

    def begin(self, run_id: str, transactions: Any) -> MemoryArchive:
        return self

    def expire(self, keep_days: int, now_ms: int) -> int:
        self.expired.append((keep_days, now_ms))
        return 0

    def save(self, topic: Any, generation: int, table: Any, rule: Rule, keys: Sequence[bytes]) -> ArchivedBatch:
        self.checks += 1
        if self._full_after is not None and len(self.kept) >= self._full_after:
            raise ArchiveError("the archive's disk is full.")
        self.kept.append(ArchivedBatch([key for key in keys if key != self._leaves]))
        return self.kept[-1]


def test_archive_that_fills_up_keeps_the_rest_in_the_store() -> None:
    store = MemoryStore()
    orders, events = topic(store, "default:orders", ttl_seconds=60), topic(store, "default:events", ttl_seconds=60)
    doomed = pointer(NOW_MS - 30 * SECOND)
    events.plain(*range(NOW_MS - HOUR, NOW_MS - HOUR + 3)).tx(doomed, NOW_MS - 20 * SECOND)
    orders.plain(*range(NOW_MS - HOUR, NOW_MS - HOUR + 3)).tx(doomed, NOW_MS - 20 * SECOND)
    cellar = MemoryArchive(full_after=1)
    kit = janitor(store, archive=cellar, batch_rows=2, invalid=[doomed])

    report = kit.engine.run_once(adopt=True)

    assert report.total(Rule.EXPIRED) == len(cellar.kept[0].keys) == 2
    assert cellar.checks == 2, "the first error ends the archiving of the run"
    assert (len(events.times()), len(orders.times())) == (2, 4)
    [error] = report.errors
    assert "the archive's disk is full." in error
    # Inversion needs no archive, and a full disk is not a fault of the topic.
    assert (events.pointers(), orders.pointers()) == ([None, -doomed], [None, None, None, -doomed])
    assert kit.state.strikes() == {}
    assert kit.state.counters()[CounterKey("delete_errors_total", (("table", "message"), ("reason", "archive")))] == 1
    assert kit.state.runs(1)[0].result == "partial"
    assert kit.state.boundary() is None

    kit.restart(archive=None).engine.run_once()
    assert (len(events.times()), len(orders.times())) == (1, 1)


def test_sweep_keeps_a_row_that_the_archive_could_not_save() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=60)
    orders.plain(NOW_MS - HOUR, NOW_MS - HOUR + 1)
    [first, _] = [key.pack() for key, _ in orders.messages()]
    report = janitor(store, archive=MemoryArchive(leaves=first)).engine.run_once(adopt=True)
    assert (report.total(Rule.EXPIRED), orders.times()) == (1, [NOW_MS - HOUR])


@pytest.mark.parametrize("change", ["moved", "paused", "unreadable"])
def test_topic_that_changes_while_archived_keeps_its_rows(change: str) -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=60)
    orders.plain(NOW_MS - HOUR)
    cellar = MemoryArchive()
    kit = janitor(store, archive=cellar)
    save = cellar.save

    def interrupted(*arguments: Any) -> ArchivedBatch:
        kept = save(*arguments)
        if change == "moved":
            orders.describe(ttl_seconds=7200)
        elif change == "unreadable":
            watch(store, before=fail_at("metadata.get", StoreError("it is gone")))
        else:
            kit.state.pause("default:*", NOW_MS)
        return kept

    cellar.save = interrupted  # type: ignore[method-assign, assignment]
    kit.engine.run_once(adopt=True)
    assert orders.times() == [NOW_MS - HOUR]
    assert [kept.discarded for kept in cellar.kept] == [True]


def test_prune_history_deletes_old_archived_days_unless_the_clock_is_doubtful() -> None:
    cellar = MemoryArchive()
    kit = adopted_janitor(MemoryStore(), archive=cellar)
    kit.engine.prune_history()
    kit.clock.step(DAY)
    kit.engine.prune_history()
    assert cellar.expired == [(7, NOW_MS)]
