"""The simulation itself is put to the test: bugs of the kind it is there for are planted, and it must find each.

A simulation that finds nothing proves nothing, unless it is known to find what there is. Each bug breaks one rule in
the way a hurried change would. The failing history must come out short enough to be read, and must pass without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from janitor import boundary, conclude, feedback, frontier, guards, inversions, payloads, permission, quarantine
from janitor.engine import Engine
from janitor.frontier import elapsed_ms
from janitor.ledger import Ledger
from janitor.permission import Permission
from janitor.state.base import Evidence
from janitor.state.sqlite import SqliteState
from janitor.sweep import Sweep
from janitor.txstate import TransactionView
from janitor.walk import Walk
from janitor.world import Terms, World
from tests.simulation.history import Failed, History, play
from tests.simulation.shrink import failure_of, shortest, tell
from tms_core.lease import Lease
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicMetadata

#: Seeds tried for each bug; most are found by the first few.
SEEDS = 400
#: A history longer than this is not short.
READABLE = 16

Plant = Callable[[pytest.MonkeyPatch], None]


def no_search_for_references(patch: pytest.MonkeyPatch) -> None:
    """L5: nobody looks for the message that a payload belongs to."""
    patch.setattr(payloads, "find_referenced", lambda *_: set())


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


def nothing_jumps(patch: pytest.MonkeyPatch) -> None:
    """S8: every frontier advances as far as the law."""
    patch.setattr(frontier, "_jumps", lambda *_: False)


def a_hold_is_over_at_once(patch: pytest.MonkeyPatch) -> None:
    """S8: what was held once goes with the next run."""
    patch.setattr(frontier, "elapsed_ms", lambda since, now: max(elapsed_ms(since, now), 3_600_000))


def no_clock_guard(patch: pytest.MonkeyPatch) -> None:
    """S7: a clock that is ahead is believed."""
    patch.setattr(guards, "check_clock", lambda *_: None)


def no_store_guard(patch: pytest.MonkeyPatch) -> None:
    """S13: a copy is taken for the store."""
    patch.setattr(guards, "check_store", lambda *_: None)


def metadata_is_read_once(patch: pytest.MonkeyPatch) -> None:
    """S2: a batch goes whatever became of its topic meanwhile."""

    patch.setattr(Sweep, "_refuse_if_moved", lambda *_: None)


def nothing_is_protected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Terms, "protects", lambda *_: False)


def apply_knows_no_ranges(patch: pytest.MonkeyPatch) -> None:
    """``apply`` deletes whatever the law takes."""
    patch.setattr(Walk, "allowed", lambda *arguments: arguments[3])


def every_pass_counts_as_thorough(patch: pytest.MonkeyPatch) -> None:
    """S4: claimed after a search of the latest rows only."""
    conclude_run = conclude.conclude_run

    def conclude_boldly(current: conclude.Pass, *rest: Any) -> None:
        current.world.thorough = True
        conclude_run(current, *rest)

    patch.setattr(conclude, "conclude_run", conclude_boldly)
    patch.setattr(conclude.Pass, "proves", property(lambda current: current.ready.tx.usable is not None))


def claim_to_the_snapshots_bound(patch: pytest.MonkeyPatch) -> None:
    """S4: claimed as in a region server, without asking who may still write."""

    def claim(evidence: Sequence[Evidence], *_: Any) -> boundary.Boundary:
        bounds = [interval.bound for interval in evidence]
        return boundary.Boundary(min(bounds)) if bounds and min(bounds) > 0 else boundary.Boundary.none("")

    patch.setattr(boundary, "claim", claim)


def claim_after_part_of_the_store(patch: pytest.MonkeyPatch) -> None:
    """S4: a pass over some topics counts for all."""
    patch.setattr(conclude.Pass, "complete", True)
    patch.setattr(conclude.Pass, "proves", property(lambda c: c.world.thorough and c.ready.tx.usable is not None))


def inversion_is_only_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sweep, "invert", lambda *arguments: [True] * len(arguments[3]))


def unknown_topics_are_passed_by(patch: pytest.MonkeyPatch) -> None:
    """L4: rows of topics nobody knows are left as they are."""
    inverts = inversions.Inversions._inverts

    def only_known(step: inversions.Inversions, cell: Any) -> Any:
        key = inverts(step, cell)
        return key if key is not None and key.topic.prefix in step._walk.world.topics else None

    patch.setattr(inversions.Inversions, "_inverts", only_known)


def unreadable_topics_get_a_ttl(patch: pytest.MonkeyPatch) -> None:
    """L1: metadata that does not parse is made to."""
    parse = TopicMetadata.parse
    patch.setattr(TopicMetadata, "parse", lambda key, value: parse(key, value.replace(b"soon", b"1")))


def a_pause_counts_from_the_next_run(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks before a batch whether its topic was paused meanwhile."""
    patch.setattr(permission, "fnmatchcase", lambda *_: False)


def a_pause_counts_until_the_run_begins(patch: pytest.MonkeyPatch) -> None:
    """What is paused is asked for before each batch only, and inverting takes it that a topic was looked at before."""
    patch.setattr(World, "paused", property(lambda _: (), lambda *_: None))


def a_word_to_stop_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Permission, "_stop_if_halted", lambda _: None)


def a_lost_lease_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """S12: the lease is taken and never looked at again."""
    patch.setattr(Lease, "check", lambda _: None)


def claim_with_topics_put_aside(patch: pytest.MonkeyPatch) -> None:
    """S4: a pass counts as complete though it has passed topics by."""
    patch.setattr(World, "has_aside", False)


def quarantine_without_end(patch: pytest.MonkeyPatch) -> None:
    """S9: what failed three times is never probed."""
    patch.setattr(
        quarantine,
        "quarantined",
        lambda strikes, _: frozenset(topic for topic, record in strikes.items() if record.probe_ms is not None),
    )


def nothing_is_announced(patch: pytest.MonkeyPatch) -> None:
    """What a run took that died is known to nobody."""
    patch.setattr(SqliteState, "intend", lambda *_: None)


def announced_as_far_as_the_first_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_furthest", lambda *arguments: arguments[2].keys[-1] + b"\x00")


def only_the_last_batch_is_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    """An entry is written over by the next batch."""
    add = Ledger._add

    def forget_and_add(ledger: Ledger, key: Any, keys: Sequence[bytes], *rest: int) -> None:
        entry = ledger._entries[key]
        ledger._entries[key] = replace(entry, start=keys[0], stop=keys[0], rows=0)
        add(ledger, key, keys, *rest)

    patch.setattr(Ledger, "_add", forget_and_add)


def thorough_passes_are_patient(patch: pytest.MonkeyPatch) -> None:
    """S4: a claim rests on topics that were left alone, with rows that are due and were not inverted for it."""
    engine_world = Engine._world

    def world(engine: Engine, *arguments: Any, **options: Any) -> World:
        made = engine_world(engine, *arguments, **options)
        made.patient = True
        return made

    patch.setattr(Engine, "_world", world)


def whatever_is_listed_is_proven(patch: pytest.MonkeyPatch) -> None:
    """S4: transactions leave the invalid list in which something may yet be published."""
    patch.setattr(feedback, "proven", lambda listed, *_: listed)


PLANTED: dict[Plant, set[str]] = {
    no_search_for_references: {"live row lost"},
    nothing_is_undecided: {"live row lost"},
    cut_off_a_moment_late: {"live row lost"},
    current_generation_is_old: {"live row lost"},
    whatever_is_in_progress_is_invalid: {"committed message hidden"},
    nothing_jumps: {"frontier overrun"},
    a_hold_is_over_at_once: {"frontier overrun"},
    no_clock_guard: {"frontier overrun", "live row lost"},
    no_store_guard: {"frontier overrun", "false claim", "aborted message visible"},
    metadata_is_read_once: {"live row lost", "frontier overrun"},
    nothing_is_protected: {"live row lost"},
    apply_knows_no_ranges: {"plan overrun"},
    every_pass_counts_as_thorough: {"false claim", "left behind"},
    claim_to_the_snapshots_bound: {"false claim"},
    claim_after_part_of_the_store: {"false claim"},
    inversion_is_only_counted: {"false claim", "left behind", "not in the ledger"},
    unknown_topics_are_passed_by: {"false claim"},
    unreadable_topics_get_a_ttl: {"live row lost", "frontier overrun"},
    a_pause_counts_from_the_next_run: {"no permission"},
    a_pause_counts_until_the_run_begins: {"no permission", "false claim", "frontier overrun"},
    a_word_to_stop_is_not_heard: {"no permission"},
    a_lost_lease_is_not_noticed: {"no permission"},
    claim_with_topics_put_aside: {"false claim"},
    quarantine_without_end: {"left behind"},
    nothing_is_announced: {"not in the ledger"},
    announced_as_far_as_the_first_batch: {"not in the ledger"},
    only_the_last_batch_is_in_the_ledger: {"not in the ledger"},
    thorough_passes_are_patient: {"false claim", "left behind"},
    whatever_is_listed_is_proven: {"aborted message visible"},
}


#: Where to begin to look for those that few histories show: only that saves time, since all others follow.
RARE: dict[Plant, int] = {
    apply_knows_no_ranges: 108,
    a_pause_counts_until_the_run_begins: 75,
    announced_as_far_as_the_first_batch: 131,
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_and_told_in_few_words(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RARE.get(plant, 0)
    for seed in (*range(first, SEEDS), *range(first)):
        # Given a janitor with a bug, when histories are played until one fails that does not without the bug,
        with monkeypatch.context() as patch:
            plant(patch)
            found = failure_of(seed)
            if found is None or not passes(patch, found.history):
                continue

            # then what is left of that history is short,
            plant(patch)
            short = shortest(found)
            assert len(short.history) <= READABLE, tell(short)

        # shows what the bug breaks, and passes without it.
        assert short.violation.invariant in PLANTED[plant], tell(short)
        play(short.history)
        return
    pytest.fail(f"{SEEDS} histories did not show it")


def passes(patch: pytest.MonkeyPatch, history: History) -> bool:
    """Whether a history holds every invariant once all patches are undone."""
    patch.undo()
    try:
        play(history)
    except Failed:
        return False
    return True
