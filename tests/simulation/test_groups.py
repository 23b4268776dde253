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
from tests.support import seeds
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
#: How many histories a planted bug has to be found in.
ENOUGH = 60


@pytest.mark.seeded
def test_histories_of_groups_hold_every_invariant() -> None:
    reached: Counter[str] = Counter()
    for seed in SEEDS:
        reached += play(seed)
    assert set(reached) == {
        "died",
        "answer lost",
        "came again",
        "waited",
        "left",
        "late",
        "swept",
        "not all taken back",
        "a guest",
        "truncated",
        "woke up too late",
        "went on",
    }


@pytest.mark.seeded
def test_histories_of_two_servers_that_share_topics_hold_every_invariant() -> None:
    reached: Counter[str] = Counter()
    for seed in SEEDS:
        reached += play(seed, make=SlotWorld, weights=SLOT_WEIGHTS)
    assert {"died", "late", "swept", "a server died", "handed back"} <= set(reached)


# --- planted bugs ----------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
true_outcome = claims.claim_outcome


def counts_as(wrong: ClaimOutcome) -> Plant:
    """Open claims count as something else."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def claim_outcome(pointer: int, reader: Any) -> ClaimOutcome:
            found = true_outcome(pointer, reader)
            return wrong if found is ClaimOutcome.OPEN else found

        monkeypatch.setattr(
            claims, "claim_outcomes", lambda pointers, reader: {one: claim_outcome(one, reader) for one in pointers}
        )
        monkeypatch.setattr(groups, "claim_outcome", claim_outcome)

    return plant


def written_behind_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Positions.move
    waiting: list[Callable[[], None]] = []

    def later(self: Positions, *given: Any, **more: Any) -> None:
        if given[1] is None:
            # A group is registered.
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


def second_claim_while_one_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "_blocking_transaction", lambda *_: None)


def no_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "_free", lambda *_: None)


def writes_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionManager, "note_written", lambda *_: None)


def side_rows_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (group_world, engine, managing):
        monkeypatch.setattr(module, "release_void_claims", lambda *_: 0)


def truncated_with_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managing, "release_rows", lambda *_: None)


def least_base_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = retention._position_after
    monkeypatch.setattr(retention, "_position_after", lambda base: behind(base) + 1)


def announced_to_no_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "start_after", lambda *given: given[-1])


def positions_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_topics, "first_unread", lambda *_: 0)
    # What was let go lies before most of them, and keeps ids up alone.
    monkeypatch.setattr(open_topics, "announced_in", lambda *_: 0)


def undecided_inside_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "runs", lambda after, until, _: [(after, until)])


def side_not_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(self: MemorySide, changes: Sequence[SideChange]) -> list[bool]:
        for change in changes:
            self.put([(change.key, change.value), *change.puts])
            self.delete(change.deletes)
        return [True] * len(changes)

    monkeypatch.setattr(MemorySide, "exchange_each", exchange)


def released_rows_read_from_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_topics.OpenTopics, "first_kept", lambda *_: 0)


def interruptions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        groups, "settle_claim", lambda claim, **given: claims.settle_claim(claim, **given | {"interrupted": 0})
    )


def waiting_messages_taken_for_read(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = claims._segments
    monkeypatch.setattr(claims, "_segments", lambda *given: [one for one in segments(*given) if not one.retry_ms])


def freed_claims_still_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Positions, "touch", lambda *_: None)


BUGS: list[Plant] = [
    freed_claims_still_remembered,
    waiting_messages_taken_for_read,
    interruptions_count,
    released_rows_read_from_cache,
    written_behind_the_answer,
    second_claim_while_one_is_open,
    no_roll_back,
    writes_not_noted,
    side_rows_not_looked_at,
    truncated_with_claims,
    least_base_off_by_one,
    announced_to_no_consumer,
    positions_not_asked,
    undecided_inside_a_claim,
    side_not_fenced,
]


def assert_found(histories: Iterable[object]) -> None:
    """Play one history after the other until one of them breaks an invariant."""
    with pytest.raises(Violation, match="Q"):
        deque(histories, maxlen=0)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(counts_as(ClaimOutcome.VOID), id="open_counts_as_free"),
        pytest.param(counts_as(ClaimOutcome.DONE), id="open_counts_as_done"),
        *BUGS,
    ],
)
def test_given_a_planted_bug_when_histories_are_played_then_one_of_them_finds_it(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert_found(play(seed) for seed in range(ENOUGH))


def nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessagingService, "start_over", lambda *_: True)


#: With where to begin to look, which only saves time: all other seeds follow.
@pytest.mark.parametrize(("plant", "first"), [(nothing_is_forgotten, 50), (side_not_fenced, 0)])
def test_planted_bug_of_two_servers_that_share_topics_is_found(
    plant: Plant, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    weights = SLOT_WEIGHTS | {"swing": 3, "step_clock": 2}
    seeds = (*range(first, 2 * ENOUGH), *range(first))
    assert_found(play(seed, make=SlotWorld, weights=weights) for seed in seeds)


def test_given_a_side_table_that_is_cut_off_then_the_write_is_done_or_not_or_later() -> None:
    side = FaultySide()
    for fault, there in (("before", None), ("late", None), ("after", b"2")):
        side.fault = fault
        with pytest.raises(Exception, match="died"):
            side.exchange(b"k", None, b"2")
        assert side.get(b"k") == there
    assert side.late.pop()() == [False]
