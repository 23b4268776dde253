"""Hold ``transaction``: a message stays for a while after its commit, however late the commit is."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from janitor.rules.policy import Frontier, Hold
from janitor.sweep.transactions import SEEN_MS, DecidedTransactions, limit_to_decided, update_decided
from tests.builders import HOUR, LIFETIME, MINUTE, NOW_MS, SECOND, pointer, visibility
from tests.janitor.run.served_store import ServedStore
from tests.kit.messaging import ORDERS, read_payloads
from tms_core.rowkey import LONG_MAX, Cutoff
from tms_core.tables.base import KEYS

HOLDING = {"ttl": "60", "hold": "transaction"}


class HoldKit(ServedStore):
    """A server with a topic whose messages expire after a minute, and a janitor that sweeps every minute."""

    def __init__(self, stack: ExitStack, properties: dict[str, str]) -> None:
        super().__init__(stack, properties, cache_bytes=0)
        self.janitor = self.made()
        self.janitor.engine.run_once(adopt=True)
        self.pass_time(30 * MINUTE)

    def pass_time(self, ms: int) -> None:
        while ms > 0:
            self.clock.advance(min(ms, MINUTE))
            self.janitor.engine.run_once(incremental=True)
            ms -= MINUTE

    def seen(self, **options: Any) -> list[bytes]:
        plain = read_payloads(self.service, ORDERS)
        tx = self.manager.start_short()
        found = read_payloads(self.service, ORDERS, transaction=tx)
        self.manager.abort(tx)
        assert set(found) <= set(plain)
        return found


@pytest.mark.parametrize("own_ttl", [None, 60])
@pytest.mark.parametrize("stored", [False, True])
def test_late_commit_is_seen_for_five_minutes(stack: ExitStack, own_ttl: int | None, stored: bool) -> None:
    kit = HoldKit(stack, HOLDING if own_ttl is None else {**HOLDING, "ttl": "864000"})
    tx = kit.manager.start_short(600)
    if stored:
        kit.service.store(ORDERS, [b"late"], pointer=tx.write_pointer)
        kit.clock.advance(1)
    kit.service.publish(ORDERS, [] if stored else [b"late"], pointer=tx.write_pointer, ttl_seconds=own_ttl)
    kit.pass_time(61 * SECOND)
    kit.manager.commit(tx.transaction_id)
    assert kit.seen() == [b"late"]
    kit.pass_time(SEEN_MS - MINUTE)
    assert kit.seen() == [b"late"]
    kit.pass_time(20 * MINUTE)
    assert kit.seen() == []
    assert kit.store.message.read(KEYS, b"", None, 10).items == []
    assert kit.store.payload.read(KEYS, b"", None, 10).items == [] or own_ttl is not None


def test_decided_by_an_old_snapshot_moves_to_its_time() -> None:
    allowance_ms = LIFETIME.allowance_ms
    open_since = pointer(NOW_MS - MINUTE)
    first = update_decided(NOW_MS, None, visibility(NOW_MS, in_progress=[open_since]), LIFETIME)
    over_ms = NOW_MS - HOUR - allowance_ms - SEEN_MS
    assert first == DecidedTransactions(over_ms, NOW_MS - MINUTE - allowance_ms, NOW_MS)
    soon = update_decided(NOW_MS + SEEN_MS - 1, first, visibility(NOW_MS + SEEN_MS - 1), LIFETIME)
    assert soon == replace(first, before_ms=over_ms + SEEN_MS - 1)
    later = update_decided(NOW_MS + SEEN_MS, first, visibility(NOW_MS + SEEN_MS), LIFETIME)
    assert later == DecidedTransactions(first.next_ms, NOW_MS + SEEN_MS - allowance_ms, NOW_MS + SEEN_MS)


def test_decided_by_an_older_snapshot_starts_again_without_loss() -> None:
    known = DecidedTransactions(NOW_MS - MINUTE, NOW_MS - SECOND, NOW_MS)
    found = update_decided(NOW_MS, known, visibility(NOW_MS - 1), LIFETIME)
    assert found == DecidedTransactions(known.before_ms, NOW_MS - 1 - LIFETIME.allowance_ms, NOW_MS - 1)


def test_limit_to_decided_lowers_only_a_later_cutoff() -> None:
    frontier = Frontier(NOW_MS, Cutoff(100), Cutoff(100), 1)
    assert limit_to_decided(frontier, 100).hold is None
    lowered = limit_to_decided(frontier, 99)
    assert (lowered.cutoff, lowered.hold, lowered.decided_ms) == (Cutoff(99), Hold.TRANSACTION, 99)
    assert frontier.decided_ms == LONG_MAX
