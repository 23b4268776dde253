"""Mutation tests of the simulation: it must find each planted bug.

Each bug breaks one rule. Its failing history must pass without the bug. Some of these histories are shrunk, and must
become short enough to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tests.simulation.history import History, HistoryFailed, play
from tests.simulation.shrink import find_failure, format_failure, shrink
from tests.support import Plant
from tms_core.rowkey import Cutoff
from tms_core.tables.base import PointerSet
from tms_core.tables.lease import Lease
from tms_core.tables.leveldb import manifest
from tms_core.topic import TopicMetadata

#: Seeds tried for each bug; most are found by the first few.
SEEDS = 400
#: Maximum operations of a readable history.
READABLE = 16


def skip_lineage_check(patch: pytest.MonkeyPatch) -> None:
    """S13: identify a store by path and inode only."""
    patch.setattr(guards, "check_lineage", lambda *known: (known[-1], None))


def adopt_any_store(patch: pytest.MonkeyPatch) -> None:
    """S13: let a scheduled ``--adopt`` adopt a restored backup."""
    patch.setattr(prepare, "_has_no_adopted_store", lambda _: True)


def skip_reference_search(patch: pytest.MonkeyPatch) -> None:
    """L5: do not search for messages that refer to a payload."""
    patch.setattr(steps, "find_referenced", lambda *_: iter(()))


def treat_undecided_as_decided(patch: pytest.MonkeyPatch) -> None:
    """L5: treat transactions in progress as decided."""
    patch.setattr(TransactionView, "is_undecided", lambda *_: False)


def advance_cutoff_by_1_ms(patch: pytest.MonkeyPatch) -> None:
    """L3: delete a row whose age equals its ttl."""
    patch.setattr(Cutoff, "at", classmethod(lambda cls, now, ttl: cls(max(0, now - ttl * 1000 + 1))))


def treat_current_generation_as_old(patch: pytest.MonkeyPatch) -> None:
    """L2: delete rows of the current generation."""
    patch.setattr(TopicMetadata, "old_below", property(lambda topic: abs(topic.generation) + 1))


def treat_in_progress_as_invalid(patch: pytest.MonkeyPatch) -> None:
    """L4: invert rows of transactions in progress."""

    def is_invalid(view: TransactionView, pointer: int) -> bool:
        return view.snapshot is not None and (view.snapshot.is_invalid(pointer) or view.snapshot.is_undecided(pointer))

    patch.setattr(TransactionView, "is_invalid", is_invalid)
    patch.setattr(TransactionView, "candidates", lambda _: PointerSet(range(1, 2**63)))


def ignore_cutoff_jumps(patch: pytest.MonkeyPatch) -> None:
    """S8: advance every frontier to the cutoff of the rules."""
    patch.setattr(policy, "_is_jump", lambda *_: False)


def end_holds_at_once(patch: pytest.MonkeyPatch) -> None:
    """S8: release every hold in the next run."""
    patch.setattr(policy, "elapsed_ms", lambda since, now: max(elapsed_ms(since, now), 3_600_000))


def skip_clock_guard(patch: pytest.MonkeyPatch) -> None:
    """S7: accept a clock that is ahead."""
    patch.setattr(guards, "check_clock", lambda *_: None)


def skip_store_guard(patch: pytest.MonkeyPatch) -> None:
    """S13: accept a copy as the store."""
    patch.setattr(guards, "check_store", lambda *_: None)


def skip_metadata_recheck(patch: pytest.MonkeyPatch) -> None:
    """S2: delete a batch after its topic has changed."""
    patch.setattr(executor, "MOVED", None)


def ignore_protection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Terms, "protects", lambda *_: False)


def ignore_plan_ranges(patch: pytest.MonkeyPatch) -> None:
    """Let ``apply`` delete rows outside its plan."""
    patch.setattr(steps, "allowed", lambda *arguments: arguments[3])


def count_every_pass_as_full(patch: pytest.MonkeyPatch) -> None:
    """S4: prove a boundary after a search of the latest rows only."""
    conclude_run = conclude.conclude_run

    def conclude_boldly(run: Run, *rest: Any) -> None:
        conclude_run(replace(run, kind="full"), *rest)

    patch.setattr(conclude, "conclude_run", conclude_boldly)
    patch.setattr(Run, "proves", property(lambda run: run.ready.tx.usable is not None))


def prove_snapshot_bound(patch: pytest.MonkeyPatch) -> None:
    """S4: prove like a region server, without the transactions that may still write."""

    def prove(evidence: Sequence[Evidence], *_: Any) -> boundary.Boundary:
        bounds = [interval.bound for interval in evidence]
        return boundary.Boundary(min(bounds)) if bounds and min(bounds) > 0 else boundary.Boundary.none("")

    patch.setattr(boundary, "prove", prove)


def prove_after_partial_pass(patch: pytest.MonkeyPatch) -> None:
    """S4: count a pass over some topics as a pass over all."""
    patch.setattr(passes, "is_complete", lambda *_: True)
    patch.setattr(Run, "proves", property(lambda run: run.full and run.ready.tx.usable is not None))


def count_without_inverting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StoreExecutor, "_invert", lambda _, found: Done(cells=found.cells))


def skip_unknown_topics(patch: pytest.MonkeyPatch) -> None:
    """L4: do not invert rows of unknown topics."""
    judged = steps._judge_cells

    def only_known(part: Part, cells: Any) -> Iterator[Any]:
        return (found for found in judged(part, cells) if not isinstance(found, Invalid) or found.work is not None)

    patch.setattr(steps, "_judge_cells", only_known)


def parse_unreadable_metadata(patch: pytest.MonkeyPatch) -> None:
    """L1: replace a ttl that does not parse."""
    parse = TopicMetadata.parse
    patch.setattr(TopicMetadata, "parse", lambda key, value: parse(key, value.replace(b"soon", b"1")))


def defer_pause_to_next_run(patch: pytest.MonkeyPatch) -> None:
    """Do not check before a batch whether its topic was paused."""
    patch.setattr(Permission, "allows", lambda permission, _: permission.pauses() is not None)


def check_pause_per_batch_only(patch: pytest.MonkeyPatch) -> None:
    """Check pauses before each batch only; inversion relies on the check at the start of a topic."""
    patch.setattr(Run, "paused", property(lambda _: (), lambda *_: None))


def ignore_stop_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Permission, "raise_if_stopping", lambda _: None)


def ignore_lost_lease(patch: pytest.MonkeyPatch) -> None:
    """S12: acquire the lease and never check it again."""
    patch.setattr(Lease, "check", lambda _: None)


def prove_with_skipped_topics(patch: pytest.MonkeyPatch) -> None:
    """S4: count a pass with skipped topics as complete."""
    patch.setattr(Run, "has_skipped_topics", False)


def quarantine_forever(patch: pytest.MonkeyPatch) -> None:
    """S9: never probe a quarantined topic."""
    patch.setattr(
        guards,
        "find_quarantined",
        lambda strikes, _: frozenset(topic for topic, record in strikes.items() if record.probe_ms is not None),
    )


def skip_intent(patch: pytest.MonkeyPatch) -> None:
    """Do not record the intent of a run, which the recovery after a crash needs."""
    patch.setattr(SqliteState, "intend", lambda *_: None)


def record_intent_of_first_batch_only(patch: pytest.MonkeyPatch) -> None:
    furthest = outcome._range_stop

    def not_further(finding: Any) -> bytes:
        return finding.batch.keys[-1] + b"\x00" if isinstance(finding, Due) else furthest(finding)

    patch.setattr(outcome, "_range_stop", not_further)


def overwrite_ledger_entry(patch: pytest.MonkeyPatch) -> None:
    """Overwrite the ledger entry of the previous batch."""
    patch.setattr(outcome, "_merge_entries", lambda _, entry: entry)


def run_full_pass_as_incremental(patch: pytest.MonkeyPatch) -> None:
    """S4: prove a boundary over topics that an incremental pass skipped."""
    patch.setattr(Run, "incremental", True)


def truncate_unproven_ids(patch: pytest.MonkeyPatch) -> None:
    """S4: truncate ids whose transactions may still publish."""
    patch.setattr(feedback, "proven_ids", lambda listed, *_: listed)


def judge_old_generations_by_snapshot(patch: pytest.MonkeyPatch) -> None:
    """S16: treat an unlisted positive pointer as committed, also in generations that no rollback reaches."""

    def signed(work: Any, _: object, pointer: int | None, known: str) -> int | None:
        plain = pointer is None or pointer <= 0
        return pointer if plain or (known == CommitState.COMMITTED and not work._is_void(pointer)) else -(pointer or 0)

    patch.setattr(writer, "commit_state", lambda pointer, snapshot, _: commit_state(pointer, snapshot, Rule.EXPIRED))
    patch.setattr(restore._Restore, "_restored_pointer", signed)


def skip_restore_conflicts(patch: pytest.MonkeyPatch) -> None:
    """S16: restore into a target that has rows of the same transaction."""
    patch.setattr(Conflicts, "refuse", lambda _: None)


def skip_snapshot_history_check(patch: pytest.MonkeyPatch) -> None:
    """S13: accept the snapshot of another transaction service if its write pointer is higher."""
    patch.setattr(guards, "check_history", lambda *_: None)


def skip_log_damage_check(patch: pytest.MonkeyPatch) -> None:
    """Open a damaged log, whose records LevelDB then drops."""
    patch.setattr(manifest, "find_damage", lambda _: None)


def keep_refuted_boundary(patch: pytest.MonkeyPatch) -> None:
    """S4: keep the boundary published after an audit refuted it."""
    patch.setattr(boundary, "refute", lambda *_: None)


def withdraw_refuted_boundary_only(patch: pytest.MonkeyPatch) -> None:
    """S4: withdraw a refuted boundary but keep its evidence."""
    patch.setattr(boundary, "refute", lambda state, *_: state.save_boundary(None))


#: The invariants that each bug may break, and the first seed to try; all other seeds follow.
PLANTED: dict[Plant, tuple[set[str], int]] = {
    skip_lineage_check: ({"frontier overrun", "false boundary", "aborted message visible"}, 0),
    adopt_any_store: ({"no permission"}, 15),
    skip_reference_search: ({"live row lost"}, 11),
    treat_undecided_as_decided: ({"live row lost"}, 0),
    advance_cutoff_by_1_ms: ({"live row lost"}, 0),
    treat_current_generation_as_old: ({"live row lost", "ledger incomplete"}, 0),
    treat_in_progress_as_invalid: ({"committed message hidden"}, 14),
    ignore_cutoff_jumps: ({"frontier overrun"}, 0),
    end_holds_at_once: ({"frontier overrun"}, 0),
    skip_clock_guard: ({"frontier overrun", "live row lost"}, 11),
    skip_store_guard: ({"frontier overrun", "false boundary", "aborted message visible"}, 126),
    skip_metadata_recheck: ({"live row lost", "frontier overrun"}, 6),
    ignore_protection: ({"live row lost"}, 6),
    ignore_plan_ranges: ({"plan overrun"}, 215),
    count_every_pass_as_full: ({"false boundary", "incomplete pass"}, 78),
    prove_snapshot_bound: ({"false boundary"}, 21),
    prove_after_partial_pass: ({"false boundary"}, 52),
    count_without_inverting: ({"false boundary", "incomplete pass", "ledger incomplete"}, 0),
    skip_unknown_topics: ({"false boundary"}, 12),
    parse_unreadable_metadata: ({"live row lost", "frontier overrun"}, 5),
    defer_pause_to_next_run: ({"no permission"}, 5),
    check_pause_per_batch_only: ({"no permission", "false boundary", "frontier overrun"}, 344),
    ignore_stop_request: ({"no permission"}, 9),
    ignore_lost_lease: ({"no permission"}, 29),
    prove_with_skipped_topics: ({"false boundary"}, 52),
    quarantine_forever: ({"incomplete pass"}, 7),
    skip_intent: ({"ledger incomplete"}, 33),
    record_intent_of_first_batch_only: ({"ledger incomplete"}, 131),
    overwrite_ledger_entry: ({"ledger incomplete"}, 7),
    run_full_pass_as_incremental: ({"false boundary", "incomplete pass"}, 0),
    truncate_unproven_ids: ({"aborted message visible"}, 9),
    judge_old_generations_by_snapshot: ({"aborted message visible"}, 18),
    skip_restore_conflicts: ({"wrong payloads"}, 76),
    skip_snapshot_history_check: ({"committed message hidden"}, 7),
    skip_log_damage_check: ({"live row lost"}, 0),
    keep_refuted_boundary: ({"false boundary"}, 0),
    withdraw_refuted_boundary_only: ({"incomplete pass", "false boundary"}, 0),
}


#: Bugs whose failing histories are shrunk. Not all bugs, because shrinking plays parts of a history about 100 times.
SHRUNK = (
    skip_log_damage_check,
    treat_undecided_as_decided,
    ignore_lost_lease,
    count_without_inverting,
    prove_snapshot_bound,
    skip_restore_conflicts,
    judge_old_generations_by_snapshot,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bug_breaks_its_invariant(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    found = first_failure(plant, monkeypatch)

    invariants, _ = PLANTED[plant]
    assert found.violation.invariant in invariants, format_failure(found)


@pytest.mark.parametrize("plant", SHRUNK, ids=lambda plant: plant.__name__)
def test_shrink_history_of_planted_bug_is_readable(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    found = first_failure(plant, monkeypatch)
    with monkeypatch.context() as patch:
        plant(patch)
        short = shrink(found)

    assert short.violation.invariant == found.violation.invariant
    assert len(short.history) <= READABLE, format_failure(short)
    play(short.history)


def first_failure(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> HistoryFailed:
    """Return the failure of the first history that fails with the bug and passes without it."""
    _, first = PLANTED[plant]
    for seed in (*range(first, SEEDS), *range(first)):
        with monkeypatch.context() as patch:
            plant(patch)
            found = find_failure(seed)
        if found is not None and passes_without_bug(found.history):
            return found
    pytest.fail(f"{SEEDS} histories did not find the bug")


def passes_without_bug(history: History) -> bool:
    """Return whether a history holds every invariant without a planted bug."""
    try:
        play(history)
    except HistoryFailed:
        return False
    return True
