"""What the janitor has to remember from one run to the next.

Nearly everything here exists to make a deletion *less* likely: a janitor without state could not tell a jump of a
frontier from the passing of time (rule S8), a copy of a store from the store (rule S13), or an invalid transaction
whose client may still write from one that is finished. So state that is lost is never dangerous: the store is a
first contact again. State that is wrong would be, and therefore what belongs together is written together
(:meth:`State.transaction`).

Times are milliseconds since the epoch; write pointers, bounds and times are signed 64-bit numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from janitor.state.records import (
    EVERYTHING,
    MARK_BYTES,
    UNKNOWN_MS,
    Claim,
    ClockAnchor,
    CounterKey,
    Evidence,
    FrontierRecord,
    KnownIds,
    LedgerEntry,
    OpenIdRecord,
    Pause,
    PendingJump,
    RunRecord,
    StoreRecord,
    Strikes,
    TopicCount,
)
from tms_core.topic import TopicId

__all__ = [
    "EVERYTHING",
    "MARK_BYTES",
    "UNKNOWN_MS",
    "Claim",
    "ClockAnchor",
    "CounterKey",
    "Evidence",
    "FrontierRecord",
    "KnownIds",
    "LedgerEntry",
    "OpenIdRecord",
    "Pause",
    "PendingJump",
    "RunRecord",
    "State",
    "StoreRecord",
    "Strikes",
    "TopicCount",
]


class State(ABC):
    """What the janitor remembers of one store.

    Every method raises ``StateError`` when the state cannot be read or written, and ``StateBusy`` when another
    process is writing it for longer than one is willing to wait.
    """

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Write all that is saved inside the block, or, when it raises or the process dies, nothing of it.

        What was saved is durable when the block has ended. Blocks nest: an inner one that raises undoes its own part.
        One thread at a time is inside.
        """

    @abstractmethod
    def store(self) -> StoreRecord | None:
        """The store this state is about; None before the first contact."""

    @abstractmethod
    def save_store(self, record: StoreRecord) -> None:
        """Remember the store.

        A state is about one store at most. With another ``mark`` than the one remembered, what was learnt about the
        former store (frontiers, open ids, evidence, claim, the last thorough pass, strikes, counts, notes) is
        forgotten: topics and pointers of the same name mean something else there. What was done stays (runs, ledger,
        counters), and so do an operator's pauses and the lease.
        """

    @abstractmethod
    def anchor(self) -> ClockAnchor | None:
        """The clocks as last seen."""

    @abstractmethod
    def save_anchor(self, anchor: ClockAnchor) -> None: ...

    def clock_ms(self) -> int | None:
        """What time it is where the state is kept, by a clock that runs elsewhere (rule S7); None: there is none."""
        return None

    @abstractmethod
    def frontiers(self) -> dict[TopicId, FrontierRecord]:
        """The frontier of every topic ever met."""

    @abstractmethod
    def save_frontiers(self, records: Mapping[TopicId, FrontierRecord]) -> None:
        """Remember these frontiers; those of other topics stay as they are."""

    @abstractmethod
    def open_ids(self) -> dict[int, OpenIdRecord]:
        """Invalid transactions by write pointer, the closed ones among them.

        One object each, and there may be a million: what every pass needs is in :meth:`known_ids`.
        """

    @abstractmethod
    def known_ids(self, now_ms: int, window_ms: int) -> KnownIds:
        """Invalid transactions, the closed ones as bare pointers. Cheap while no more are closed.

        One counts as closed if a thorough pass closed it that began at least ``window_ms`` after the transaction did,
        and not after ``now_ms``: a lifetime that was raised since opens it again, and so does a clock set back.

        Args:
            now_ms: what time it is.
            window_ms: how long after a transaction's begin something of it can be published.
        """

    @abstractmethod
    def lowest_open(self, limit: int) -> tuple[int, list[OpenIdRecord]]:
        """How many ids no thorough pass has closed, and the lowest ``limit`` of them."""

    @abstractmethod
    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        """Remember these; a record that did not change costs no write, and those of other pointers stay."""

    @abstractmethod
    def forget_open_ids(self, pointers: Iterable[int]) -> None:
        """Drop pointers that left the invalid list; unknown ones are no error."""

    @abstractmethod
    def forget_closed_ids(self, pointers: Iterable[int], before_ms: int) -> None:
        """Drop those of these pointers that were closed before; others, and unknown ones, are no error."""

    # -- an operator's words, and what topics did to deserve a rest -------------------------------------------------

    @abstractmethod
    def pauses(self) -> list[Pause]:
        """What is paused, by pattern. Cheap: it is asked before every batch."""

    @abstractmethod
    def pause(self, pattern: str, since_ms: int) -> None:
        """Pause topics; a pattern that is paused already stays so since then."""

    @abstractmethod
    def resume(self, pattern: str) -> bool:
        """Take a pause back; returns whether there was one of exactly this pattern."""

    @abstractmethod
    def strikes(self) -> dict[TopicId, Strikes]:
        """Topics that failed, the quarantined ones among them."""

    @abstractmethod
    def save_strikes(self, changed: Mapping[TopicId, Strikes | None]) -> None:
        """Remember failures; None forgets a topic's. Those of other topics stay."""

    # -- the lease (rule S12) ---------------------------------------------------------------------------------------

    @abstractmethod
    def lease(self) -> bytes | None:
        """The lease as its holder wrote it; None when there never was one. Cheap: it is asked before every batch."""

    @abstractmethod
    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write the lease if it is still ``expected``; returns whether it was."""

    # -- runs and what they did -------------------------------------------------------------------------------------

    @abstractmethod
    def created_ms(self) -> int | None:
        """When this state began; None before that was recorded. Nothing older is known."""

    @abstractmethod
    def save_created_ms(self, created_ms: int) -> None:
        """Record when this state began, unless that is known."""

    @abstractmethod
    def beat(self, run_id: str, heartbeat_ms: int) -> None:
        """Remember that a run is alive; without effect on one that is unknown or finished."""

    @abstractmethod
    def unfinished_runs(self) -> list[RunRecord]:
        """Runs that began and did not end, oldest first."""

    @abstractmethod
    def add_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        """Remember what was taken."""

    @abstractmethod
    def ledger(
        self,
        limit: int,
        *,
        topic: TopicId | None = None,
        run_id: str | None = None,
        key: bytes | None = None,
        patterns: Sequence[str] = (),
    ) -> list[LedgerEntry]:
        """The last ``limit`` entries, newest first.

        Args:
            topic: only of this topic.
            run_id: only of this run, whatever the topic.
            key: only those whose range holds the key; with ``topic``.
            patterns: only of topics that fit one of these shell patterns; none for all.
        """

    @abstractmethod
    def ledger_generations(self, topic: TopicId) -> list[int]:
        """Of which generations of a topic the ledger has entries, in order."""

    @abstractmethod
    def ledger_since_ms(self) -> int | None:
        """From when on no entry was forgotten, as far as those that are left tell; None when they tell of none."""

    @abstractmethod
    def intend(self, entry: LedgerEntry) -> None:
        """Remember what a run is about to take.

        Cheap, because it comes before the first batch of every topic: it survives the death of the process, and of
        the machine only as well as the deletes it announces, which are not synced batch by batch either.
        """

    @abstractmethod
    def intents(self) -> list[LedgerEntry]:
        """What was announced and not cleared since, oldest first; a last one that was cut short is left out."""

    @abstractmethod
    def clear_intents(self) -> None:
        """Forget what was announced: the ledger has it now."""

    @abstractmethod
    def prune_ledger(self, before_ms: int, keep: int) -> int:
        """Forget entries that are older, and the oldest beyond ``keep`` of them; returns how many."""

    @abstractmethod
    def counters(self) -> dict[CounterKey, float]:
        """Every counter since this state began, with what runs have booked that go on."""

    @abstractmethod
    def book(self, run_id: str, amounts: Mapping[CounterKey, float]) -> None:
        """Remember what a run has come to so far, in place of what it booked before.

        Cheap, and in no transaction. It survives the death of the process. Without effect on a run that is unknown or
        finished: ending a run makes it obsolete in the same transaction, which adds the final amounts.

        Raises:
            StateError: it could not be written.
        """

    @abstractmethod
    def booked(self, run_id: str) -> dict[CounterKey, float]:
        """What a run has booked that goes on; nothing of any other."""

    @abstractmethod
    def add_counters(self, amounts: Mapping[CounterKey, float]) -> None:
        """Add to counters; unknown ones begin at 0."""

    @abstractmethod
    def counts(self) -> dict[TopicId, TopicCount]:
        """What the background count last found."""

    @abstractmethod
    def save_counts(self, changed: Mapping[TopicId, TopicCount | None]) -> None:
        """Remember counts; None forgets a topic's."""

    @abstractmethod
    def note(self, name: str) -> Any:
        """A small JSON value that was left under a name; None without one."""

    @abstractmethod
    def save_note(self, name: str, value: Any) -> None:
        """Leave a small JSON value under a name; None removes it."""

    @abstractmethod
    def begin_run(self, run: RunRecord) -> None:
        """Remember that a run has begun.

        Raises:
            StateError: there is a run of this id.
        """

    @abstractmethod
    def finish_run(self, run_id: str, finished_ms: int, result: str, report: str) -> None:
        """Remember how a run ended; ``report`` is its report as JSON.

        Raises:
            StateError: no such run began.
        """

    @abstractmethod
    def runs(self, limit: int, before_ms: int | None = None) -> list[RunRecord]:
        """The last ``limit`` runs, newest first.

        Args:
            before_ms: only those that began before; None: all.
        """

    @abstractmethod
    def run(self, run_id: str) -> RunRecord | None:
        """One run; None when it is unknown or was forgotten."""

    @abstractmethod
    def prune_runs(self, before_ms: int) -> int:
        """Forget runs that began before; returns how many."""

    @abstractmethod
    def evidence(self) -> list[Evidence]:
        """Intervals left clean, in key order."""

    @abstractmethod
    def replace_evidence(self, evidence: Sequence[Evidence]) -> None:
        """Remember these intervals and no others."""

    @abstractmethod
    def claim(self) -> Claim | None:
        """What was last claimed."""

    @abstractmethod
    def save_claim(self, claim: Claim | None) -> None:
        """Remember a claim; None withdraws it."""

    @abstractmethod
    def last_thorough_ms(self) -> int | None:
        """When the last pass that looked at everything was completed; None: none was."""

    @abstractmethod
    def save_last_thorough_ms(self, completed_ms: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Let go; closing twice is no error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
