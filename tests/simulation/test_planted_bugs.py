"""Tests of the simulation itself: it must find each planted bug.

Each bug breaks one rule, as a careless change would. The history that shows it must pass without the bug. Some of these
histories are shortened, and must become short enough to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from janitor import boundary
from janitor.archive import restore, writer
from janitor.archive.conflicts import Conflicts
from janitor.archive.writer import CommitState, commit_state
from janitor.rules import policy
from janitor.rules.policy import Rule, elapsed_ms
from janitor.run import conclude, feedback, guards, passes, prepare
from janitor.state.base import Evidence
from janitor.state.sqlite.state import SqliteState
from janitor.sweep import executor, outcome, steps
from janitor.sweep.executor import Permission, StoreExecutor
from janitor.sweep.findings import Done, Due, Invalid
from janitor.sweep.run import Run, Terms
from janitor.sweep.scan import Part
from janitor.sweep.transactions import TransactionView
from tests.simulation.history import Failed, History, play
from tests.simulation.shrink import failure_of, shortest, tell
from tms_core.rowkey import Cutoff
from tms_core.tables.base import PointerSet
from tms_core.tables.lease import Lease
from tms_core.tables.leveldb import manifest
from tms_core.topic import TopicMetadata

#: Seeds tried for each bug; most are found by the first few.
SEEDS = 400
#: A history longer than this is not short.
READABLE = 16

Plant = Callable[[pytest.MonkeyPatch], None]


def a_backup_put_back_is_the_store_itself(patch: pytest.MonkeyPatch) -> None:
    """S13: path and inode are all that is looked at."""
    patch.setattr(guards, "check_lineage", lambda *known: (known[-1], None))


def adopt_accepts_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    """S13: ``--adopt`` in a timer adopts a backup that was put back."""
    patch.setattr(prepare, "_knows_none", lambda _: True)


def no_search_for_references(patch: pytest.MonkeyPatch) -> None:
    """L5: nobody looks for the message that a payload belongs to."""
    patch.setattr(steps, "find_referenced", lambda *_: iter(()))


def nothing_is_undecided(patch: pytest.MonkeyPatch) -> None:
    """L5: what is in progress counts as decided."""
    patch.setattr(TransactionView, "is_undecided", lambda *_: False)


def cut_off_a_moment_late(patch: pytest.MonkeyPatch) -> None:
    """L3: a row aged exactly its ttl goes."""
    patch.setattr(Cutoff, "at", classmethod(lambda cls, now, ttl: cls(max(0, now - ttl * 1000 + 1))))


def current_generation_is_old(patch: pytest.MonkeyPatch) -> None:
    """L2: one generation too many."""
    patch.setattr(TopicMetadata, "old_below", property(lambda topic: abs(topic.generation) + 1))


def whatever_is_in_progress_is_invalid(patch: pytest.MonkeyPatch) -> None:
    """L4: all that is not visible now is inverted."""

    def is_invalid(view: TransactionView, pointer: int) -> bool:
        return view.snapshot is not None and (view.snapshot.is_invalid(pointer) or view.snapshot.is_undecided(pointer))

    patch.setattr(TransactionView, "is_invalid", is_invalid)
    patch.setattr(TransactionView, "candidates", lambda _: PointerSet(range(1, 2**63)))


def nothing_jumps(patch: pytest.MonkeyPatch) -> None:
    """S8: every frontier advances as far as the rules."""
    patch.setattr(policy, "_is_jump", lambda *_: False)


def a_hold_is_over_at_once(patch: pytest.MonkeyPatch) -> None:
    """S8: what was held once goes with the next run."""
    patch.setattr(policy, "elapsed_ms", lambda since, now: max(elapsed_ms(since, now), 3_600_000))


def no_clock_guard(patch: pytest.MonkeyPatch) -> None:
    """S7: a clock that is ahead is believed."""
    patch.setattr(guards, "check_clock", lambda *_: None)


def no_store_guard(patch: pytest.MonkeyPatch) -> None:
    """S13: a copy is taken for the store."""
    patch.setattr(guards, "check_store", lambda *_: None)


def metadata_is_read_once(patch: pytest.MonkeyPatch) -> None:
    """S2: a batch goes whatever became of its topic meanwhile."""

    patch.setattr(executor, "MOVED", None)


def nothing_is_protected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Terms, "protects", lambda *_: False)


def apply_knows_no_ranges(patch: pytest.MonkeyPatch) -> None:
    """``apply`` deletes whatever the rules delete."""
    patch.setattr(steps, "allowed", lambda *arguments: arguments[3])


def every_pass_counts_as_full(patch: pytest.MonkeyPatch) -> None:
    """S4: proven after a search of the latest rows only."""
    conclude_run = conclude.conclude_run

    def conclude_boldly(run: Run, *rest: Any) -> None:
        conclude_run(replace(run, kind="full"), *rest)

    patch.setattr(conclude, "conclude_run", conclude_boldly)
    patch.setattr(Run, "proves", property(lambda run: run.ready.tx.usable is not None))


def prove_to_the_snapshots_bound(patch: pytest.MonkeyPatch) -> None:
    """S4: proven as in a region server, without asking who may still write."""

    def prove(evidence: Sequence[Evidence], *_: Any) -> boundary.Boundary:
        bounds = [interval.bound for interval in evidence]
        return boundary.Boundary(min(bounds)) if bounds and min(bounds) > 0 else boundary.Boundary.none("")

    patch.setattr(boundary, "prove", prove)


def prove_after_part_of_the_store(patch: pytest.MonkeyPatch) -> None:
    """S4: a pass over some topics counts for all."""
    patch.setattr(passes, "is_complete", lambda *_: True)
    patch.setattr(Run, "proves", property(lambda run: run.full and run.ready.tx.usable is not None))


def inversion_is_only_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreExecutor, "_invert", lambda _, found: Done(cells=found.cells))


def unknown_topics_are_passed_by(patch: pytest.MonkeyPatch) -> None:
    """L4: rows of topics nobody knows are left as they are."""
    judged = steps._judge_cells

    def only_known(part: Part, cells: Any) -> Iterator[Any]:
        return (found for found in judged(part, cells) if not isinstance(found, Invalid) or found.work is not None)

    patch.setattr(steps, "_judge_cells", only_known)


def unreadable_topics_get_a_ttl(patch: pytest.MonkeyPatch) -> None:
    """L1: metadata that does not parse is made to."""
    parse = TopicMetadata.parse
    patch.setattr(TopicMetadata, "parse", lambda key, value: parse(key, value.replace(b"soon", b"1")))


def a_pause_counts_from_the_next_run(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks before a batch whether its topic was paused meanwhile."""
    patch.setattr(Permission, "allows", lambda permission, _: permission.pauses() is not None)


def a_pause_counts_until_the_run_begins(patch: pytest.MonkeyPatch) -> None:
    """What is paused is asked for before each batch only, and inverting takes it that a topic was looked at before."""
    patch.setattr(Run, "paused", property(lambda _: (), lambda *_: None))


def a_word_to_stop_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Permission, "raise_if_stopping", lambda _: None)


def a_lost_lease_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """S12: the lease is taken and never looked at again."""
    patch.setattr(Lease, "check", lambda _: None)


def prove_with_topics_put_aside(patch: pytest.MonkeyPatch) -> None:
    """S4: a pass counts as complete though it has passed topics by."""
    patch.setattr(Run, "has_skipped_topics", False)


def quarantine_without_end(patch: pytest.MonkeyPatch) -> None:
    """S9: what failed three times is never probed."""
    patch.setattr(
        guards,
        "find_quarantined",
        lambda strikes, _: frozenset(topic for topic, record in strikes.items() if record.probe_ms is not None),
    )


def nothing_is_announced(patch: pytest.MonkeyPatch) -> None:
    """What a run took that died is known to nobody."""
    patch.setattr(SqliteState, "intend", lambda *_: None)


def announced_as_far_as_the_first_batch(patch: pytest.MonkeyPatch) -> None:
    furthest = outcome._range_stop

    def not_further(finding: Any) -> bytes:
        return finding.batch.keys[-1] + b"\x00" if isinstance(finding, Due) else furthest(finding)

    patch.setattr(outcome, "_range_stop", not_further)


def only_the_last_batch_is_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    """An entry is written over by the next batch."""
    patch.setattr(outcome, "_merge_entries", lambda _, entry: entry)


def full_passes_are_incremental(patch: pytest.MonkeyPatch) -> None:
    """S4: a boundary rests on topics that were left alone, with rows that are due and were not inverted for it."""
    patch.setattr(Run, "incremental", True)


def whatever_is_listed_is_proven(patch: pytest.MonkeyPatch) -> None:
    """S4: transactions leave the invalid list in which something may yet be published."""
    patch.setattr(feedback, "proven_ids", lambda listed, *_: listed)


def old_generations_are_judged_by_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    """S16: a positive pointer that no list names counts as committed, also where no rollback could reach it."""

    def signed(work: Any, _: object, pointer: int | None, known: str) -> int | None:
        plain = pointer is None or pointer <= 0
        return pointer if plain or (known == CommitState.COMMITTED and not work._is_void(pointer)) else -(pointer or 0)

    patch.setattr(writer, "commit_state", lambda pointer, snapshot, _: commit_state(pointer, snapshot, Rule.EXPIRED))
    patch.setattr(restore._Restore, "_restored_pointer", signed)


def whatever_is_in_the_way_is_written_beside(patch: pytest.MonkeyPatch) -> None:
    """S16: nobody asks what the target has of a transaction."""
    patch.setattr(Conflicts, "refuse", lambda _: None)


def any_snapshot_may_follow(patch: pytest.MonkeyPatch) -> None:
    """S13: another system's snapshot is believed as long as its write pointer is higher."""
    patch.setattr(guards, "check_history", lambda *_: None)


def logs_are_opened_unread(patch: pytest.MonkeyPatch) -> None:
    """What LevelDB drops of a damaged log is gone."""
    patch.setattr(manifest, "find_damage", lambda _: None)


def a_refuted_boundary_stands(patch: pytest.MonkeyPatch) -> None:
    """S4: an audit refutes, and the boundary is published and relied on as before."""
    patch.setattr(boundary, "refute", lambda *_: None)


def a_refuted_boundary_is_only_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """S4: the next run looks at the latest rows, and goes by what was covered before."""
    patch.setattr(boundary, "refute", lambda state, *_: state.save_boundary(None))


PLANTED: dict[Plant, set[str]] = {
    a_backup_put_back_is_the_store_itself: {"frontier overrun", "false boundary", "aborted message visible"},
    adopt_accepts_whatever_is_there: {"no permission"},
    no_search_for_references: {"live row lost"},
    nothing_is_undecided: {"live row lost"},
    cut_off_a_moment_late: {"live row lost"},
    current_generation_is_old: {"live row lost", "not in the ledger"},
    whatever_is_in_progress_is_invalid: {"committed message hidden"},
    nothing_jumps: {"frontier overrun"},
    a_hold_is_over_at_once: {"frontier overrun"},
    no_clock_guard: {"frontier overrun", "live row lost"},
    no_store_guard: {"frontier overrun", "false boundary", "aborted message visible"},
    metadata_is_read_once: {"live row lost", "frontier overrun"},
    nothing_is_protected: {"live row lost"},
    apply_knows_no_ranges: {"plan overrun"},
    every_pass_counts_as_full: {"false boundary", "left behind"},
    prove_to_the_snapshots_bound: {"false boundary"},
    prove_after_part_of_the_store: {"false boundary"},
    inversion_is_only_counted: {"false boundary", "left behind", "not in the ledger"},
    unknown_topics_are_passed_by: {"false boundary"},
    unreadable_topics_get_a_ttl: {"live row lost", "frontier overrun"},
    a_pause_counts_from_the_next_run: {"no permission"},
    a_pause_counts_until_the_run_begins: {"no permission", "false boundary", "frontier overrun"},
    a_word_to_stop_is_not_heard: {"no permission"},
    a_lost_lease_is_not_noticed: {"no permission"},
    prove_with_topics_put_aside: {"false boundary"},
    quarantine_without_end: {"left behind"},
    nothing_is_announced: {"not in the ledger"},
    announced_as_far_as_the_first_batch: {"not in the ledger"},
    only_the_last_batch_is_in_the_ledger: {"not in the ledger"},
    full_passes_are_incremental: {"false boundary", "left behind"},
    whatever_is_listed_is_proven: {"aborted message visible"},
    old_generations_are_judged_by_the_snapshot: {"aborted message visible"},
    whatever_is_in_the_way_is_written_beside: {"payloads mixed"},
    any_snapshot_may_follow: {"committed message hidden"},
    logs_are_opened_unread: {"live row lost"},
    a_refuted_boundary_stands: {"false boundary"},
    a_refuted_boundary_is_only_withdrawn: {"left behind", "false boundary"},
}


#: The first seed to try, for bugs that few histories show; all other seeds follow.
RARE: dict[Plant, int] = {
    apply_knows_no_ranges: 215,
    no_store_guard: 126,
    prove_with_topics_put_aside: 52,
    nothing_is_announced: 33,
    whatever_is_in_the_way_is_written_beside: 76,
    whatever_is_listed_is_proven: 9,
    old_generations_are_judged_by_the_snapshot: 18,
    any_snapshot_may_follow: 7,
    only_the_last_batch_is_in_the_ledger: 7,
    whatever_is_in_progress_is_invalid: 14,
    no_clock_guard: 11,
    unknown_topics_are_passed_by: 12,
    a_word_to_stop_is_not_heard: 9,
    metadata_is_read_once: 6,
    nothing_is_protected: 6,
    a_pause_counts_until_the_run_begins: 344,
    a_lost_lease_is_not_noticed: 29,
    quarantine_without_end: 7,
    unreadable_topics_get_a_ttl: 5,
    a_pause_counts_from_the_next_run: 5,
    announced_as_far_as_the_first_batch: 131,
    every_pass_counts_as_full: 78,
    prove_after_part_of_the_store: 52,
    prove_to_the_snapshots_bound: 21,
    adopt_accepts_whatever_is_there: 15,
    no_search_for_references: 11,
}


#: Bugs whose failing histories are shortened. All of them would take most of the time of this module, because
#: shortening plays parts of a history a hundred times.
SHORTENED = (
    logs_are_opened_unread,
    nothing_is_undecided,
    a_lost_lease_is_not_noticed,
    inversion_is_only_counted,
    prove_to_the_snapshots_bound,
    whatever_is_in_the_way_is_written_beside,
    old_generations_are_judged_by_the_snapshot,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bug_breaks_its_invariant(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    found = first_failure(plant, monkeypatch)

    assert found.violation.invariant in PLANTED[plant], tell(found)


@pytest.mark.parametrize("plant", SHORTENED, ids=lambda plant: plant.__name__)
def test_failing_history_is_shortened(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    found = first_failure(plant, monkeypatch)
    with monkeypatch.context() as patch:
        plant(patch)
        short = shortest(found)

    assert short.violation.invariant == found.violation.invariant
    assert len(short.history) <= READABLE, tell(short)
    play(short.history)


def first_failure(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> Failed:
    """Return the failure of the first history that fails with the bug and passes without it."""
    first = RARE.get(plant, 0)
    for seed in (*range(first, SEEDS), *range(first)):
        with monkeypatch.context() as patch:
            plant(patch)
            found = failure_of(seed)
        if found is not None and passes_alone(found.history):
            return found
    pytest.fail(f"{SEEDS} histories did not show it")


def passes_alone(history: History) -> bool:
    """Return whether a history holds every invariant without a planted bug."""
    try:
        play(history)
    except Failed:
        return False
    return True
