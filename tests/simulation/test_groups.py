"""The simulation of consumer groups: no history breaks an invariant, and each planted bug is found."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from janitor.run import engine
from tests.simulation import group_world
from tests.simulation.group_world import FaultySide, GroupWorld, Violation, play
from tests.simulation.slot_world import SLOT_WEIGHTS, SlotWorld
from tests.support import Plant, replacing, seeds
from tms_core.consumers import claims, retention
from tms_core.consumers.claims import ClaimOutcome
from tms_core.consumers.positions import Positions
from tms_core.messaging.groups import claims as groups
from tms_core.messaging.groups.claims import Groups
from tms_core.messaging.publish import open_topics
from tms_core.messaging.service import MessagingService
from tms_core.server import managing
from tms_core.tables.side import MemorySide, SideChange
from tms_core.transaction.manager.manager import TransactionManager

SEEDS = seeds(50)
#: Number of histories that must find each planted bug.
HISTORIES_PER_BUG = 60


@pytest.mark.seeded
def test_histories_of_groups_hold_every_invariant() -> None:
    event_counts: Counter[str] = Counter()
    for seed in SEEDS:
        event_counts += play(seed)
    assert set(event_counts) == {
        "server killed",
        "response lost",
        "batch redelivered",
        "delivery delayed",
        "worker disappeared",
        "late write",
        "rows deleted",
        "rollback incomplete",
        "guest registered",
        "ids truncated",
        "commit too late",
        "next transaction started",
    }


@pytest.mark.seeded
def test_histories_of_two_servers_hold_every_invariant() -> None:
    event_counts: Counter[str] = Counter()
    for seed in SEEDS:
        event_counts += play(seed, make=SlotWorld, weights=SLOT_WEIGHTS)
    assert {"server killed", "late write", "rows deleted", "one of two servers killed", "slots handed back"} <= set(
        event_counts
    )


# --- planted bugs ----------------------------------------------------------------------------------------------------

true_outcome = claims.claim_outcome


def count_open_claims_as(wrong: ClaimOutcome) -> Plant:
    """Return a bug that counts open claims as ``wrong``."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def claim_outcome(pointer: int, reader: Any) -> ClaimOutcome:
            found = true_outcome(pointer, reader)
            return wrong if found is ClaimOutcome.OPEN else found

        monkeypatch.setattr(
            claims, "claim_outcomes", lambda pointers, reader: {one: claim_outcome(one, reader) for one in pointers}
        )
        monkeypatch.setattr(groups, "claim_outcome", claim_outcome)

    return plant


def write_position_after_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Positions.move
    waiting: list[Callable[[], None]] = []

    def later(self: Positions, *given: Any, **more: Any) -> None:
        if given[1] is None:
            # A new group must be registered at once.
            move(self, *given, **more)
            return
        if waiting:
            waiting.pop()()
        waiting.append(lambda: move(self, *given, **more))

    def lost(self: GroupWorld) -> None:
        waiting.clear()
        restart(self)

    restart = GroupWorld.restart
    monkeypatch.setattr(Positions, "move", later)
    monkeypatch.setattr(GroupWorld, "restart", lost)


def skip_void_claim_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (group_world, engine, managing):
        monkeypatch.setattr(module, "release_void_claims", lambda *_: 0)


def advance_retention_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = retention._position_after
    monkeypatch.setattr(retention, "_position_after", lambda base: behind(base) + 1)


def reuse_read_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_topics, "first_unread", lambda *_: 0)
    # Most announced deletions precede the positions, and would keep the ids correct.
    monkeypatch.setattr(open_topics, "announced_in", lambda *_: 0)


def skip_side_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(self: MemorySide, changes: Sequence[SideChange]) -> list[bool]:
        for change in changes:
            self.put([(change.key, change.value), *change.puts])
            self.delete(change.deletes)
        return [True] * len(changes)

    monkeypatch.setattr(MemorySide, "exchange_each", exchange)


def treat_delayed_messages_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = claims._segments
    monkeypatch.setattr(claims, "_segments", lambda *given: [one for one in segments(*given) if not one.retry_ms])


BUGS: dict[str, Plant] = {
    "open_counts_as_free": count_open_claims_as(ClaimOutcome.VOID),
    "open_counts_as_done": count_open_claims_as(ClaimOutcome.DONE),
    "keep_freed_claims_in_cache": replacing(Positions, "touch", lambda *_: None),
    "treat_delayed_messages_as_read": treat_delayed_messages_as_read,
    "count_interruptions_as_deliveries": replacing(
        groups, "settle_claim", lambda claim, **given: claims.settle_claim(claim, **given | {"interrupted": 0})
    ),
    "read_deleted_rows_from_cache": replacing(open_topics.OpenTopics, "first_kept", lambda *_: 0),
    "write_position_after_answer": write_position_after_answer,
    "allow_second_open_claim": replacing(Groups, "_blocking_transaction", lambda *_: None),
    "skip_claim_rollback": replacing(Groups, "_replace_by_marks", lambda *_: None),
    "skip_write_note": replacing(TransactionManager, "note_written", lambda *_: None),
    "skip_void_claim_release": skip_void_claim_release,
    "truncate_ids_with_claims": replacing(managing, "release_rows", lambda *_: None),
    "advance_retention_by_one": advance_retention_by_one,
    "ignore_reads_since_announcement": replacing(retention, "start_after", lambda *given: given[-1]),
    "reuse_read_ids": reuse_read_ids,
    "claim_undecided_messages": replacing(groups, "runs", lambda after, until, _: [(after, until)]),
    "skip_side_fence": skip_side_fence,
}


def assert_found(histories: Iterable[object]) -> None:
    """Play histories until one breaks an invariant."""
    with pytest.raises(Violation, match="Q"):
        deque(histories, maxlen=0)


@pytest.mark.parametrize("plant", BUGS.values(), ids=BUGS)
def test_planted_bug_breaks_an_invariant(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert_found(play(seed) for seed in range(HISTORIES_PER_BUG))


#: The first seed only saves time; all other seeds follow.
@pytest.mark.parametrize(
    ("plant", "first"),
    [(replacing(MessagingService, "invalidate_topics", lambda *_: True), 50), (skip_side_fence, 0)],
    ids=["keep_cache_after_handover", "skip_side_fence"],
)
def test_planted_bug_of_two_servers_breaks_an_invariant(
    plant: Plant, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    weights = SLOT_WEIGHTS | {"swing": 3, "step_clock": 2}
    seeds = (*range(first, 2 * HISTORIES_PER_BUG), *range(first))
    assert_found(play(seed, make=SlotWorld, weights=weights) for seed in seeds)


def test_faulty_side_write_follows_its_fault() -> None:
    side = FaultySide()
    for fault, there in (("before", None), ("late", None), ("after", b"2")):
        side.fault = fault
        with pytest.raises(Exception, match="died"):
            side.exchange(b"k", None, b"2")
        assert side.get(b"k") == there
    assert side.late.pop()() == [False]
