"""What the janitor has to remember from one run to the next.

Nearly everything here exists to make a deletion *less* likely: a janitor without memory could not tell a jump of a
frontier from the passing of time (rule S8), a copy of a store from the store (rule S13), or an invalid transaction
whose client may still write from one that is finished. So memory that is lost is never dangerous: the store is a
first contact again. Memory that is wrong would be, and therefore what belongs together is written together
(:meth:`State.transaction`).

Times are milliseconds since the epoch; write pointers, bounds and times are signed 64-bit numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from tms_core.topic import TopicId

#: Later than any clock shows: where the wall time of readings lies of a boot whose clock is known to be wrong.
UNKNOWN_MS = 2**62

#: Bytes of randomness in a store's mark: enough that no two stores ever get the same.
MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The one store this state is about (rule S13).

    Attributes:
        mark: a random name given at first contact; another mark is another store.
        identity: ``Store.identity()`` when it was last found right.
        adopted_ms: when it was adopted; None as long as nobody has.
        snapshot_timestamp_ms: of the newest transaction snapshot used so far; None before the first.
        snapshot_write_pointer: that snapshot's write pointer; one below it is another transaction system's.
    """

    mark: str
    identity: str
    adopted_ms: int | None = None
    snapshot_timestamp_ms: int | None = None
    snapshot_write_pointer: int | None = None

    @classmethod
    def first_contact(cls, identity: str, token_hex: Callable[[int], str]) -> StoreRecord:
        """A record of a store met just now, not adopted.

        Args:
            identity: ``Store.identity()``.
            token_hex: makes that many random bytes, as hex: ``secrets.token_hex``.
        """
        return cls(token_hex(MARK_BYTES), identity)


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """A reading of a machine's clocks (``tms_core.clock.Clock``) to measure elapsed time from (rule S7).

    Attributes:
        wall_ms: wall time; from ``UNKNOWN_MS`` on it can only be compared with other readings of the same boot.
    """

    wall_ms: int
    running_ms: int
    boot_id: str

    def comparable(self, other: ClockAnchor) -> bool:
        """Whether the time between the two readings can be told."""
        known = self.wall_ms < UNKNOWN_MS
        if known != (other.wall_ms < UNKNOWN_MS):
            return False
        return known or (bool(self.boot_id) and self.boot_id == other.boot_id)


@dataclass(frozen=True, slots=True)
class PendingJump:
    """What a topic wants to become that is more than time alone allows, and since when it waits."""

    generation: int
    ttl_seconds: int
    since: ClockAnchor


@dataclass(frozen=True, slots=True)
class FrontierRecord:
    """How far deleting has come in one topic (rule S8).

    Attributes:
        generation: the metadata generation last applied, signed; 0 before the first.
        cutoff_ms: the cut-off last applied.
        at: when that was.
        first_seen_ms: when the topic was first met.
        pending: a held jump.
        approved: generation and ttl in seconds of the jump that was approved.
    """

    generation: int
    cutoff_ms: int
    at: ClockAnchor
    first_seen_ms: int
    pending: PendingJump | None = None
    approved: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class OpenIdRecord:
    """An invalid transaction's write pointer, and whether its rows can all have been seen.

    Attributes:
        scanned_ms: when the last complete pass that covered it began; None: none has.
        closed_ms: when a thorough pass closed it; None: its client may still write, or no such pass has come since.
    """

    pointer: int
    first_seen_ms: int
    scanned_ms: int | None = None
    closed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, as ``janitor history`` shows it; ``result`` and ``report`` are empty until it has finished.

    Attributes:
        heartbeat_ms: when it last showed that it was alive (rule S10).
    """

    id: str
    mode: str
    started_ms: int
    finished_ms: int | None = None
    result: str = ""
    report: str = ""
    heartbeat_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Topics nothing is done in until somebody resumes them; ``pattern`` is a shell pattern on ``NS:TOPIC``."""

    pattern: str
    since_ms: int


#: The pattern that stands for everything.
EVERYTHING = "*:*"


@dataclass(frozen=True, slots=True)
class Strikes:
    """Failures of one topic in a row (rule S9).

    Attributes:
        count: how many runs in a row failed in it.
        error: what the last one said.
        quarantined_ms: when it was put aside; None while it is still retried in every run.
        probe_ms: when it will be tried again; None while it is not put aside.
    """

    count: int
    last_ms: int
    error: str
    quarantined_ms: int | None = None
    probe_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Rows of one topic, generation and table that one run took by one rule.

    Attributes:
        rule: ``expired``, ``old_generation`` or ``invalid_transaction``.
        start: the first key that was taken.
        stop: just behind the last one. Rows between the two may have stayed: those the rule did not take.
        rows: how many; None when the run died and the number with it, and ``stop`` is then where it might have come to.
        metadata_generation, ttl_seconds, cutoff_ms: the policy it was taken by.
        snapshot_timestamp_ms: of the transaction snapshot in use; None without one.
    """

    run_id: str
    at_ms: int
    topic: TopicId
    generation: int
    table: str
    rule: str
    start: bytes
    stop: bytes
    rows: int | None
    oldest_ms: int | None
    newest_ms: int | None
    metadata_generation: int
    ttl_seconds: int
    cutoff_ms: int
    snapshot_timestamp_ms: int | None


class CounterKey(NamedTuple):
    """One series of a counter: its name without the prefix, and its labels in order."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TopicCount:
    """What the background count found in one topic.

    Attributes:
        size_bytes: of keys and payloads, in both tables.
        oldest_ms, newest_ms: publish times; None when it is empty.
        counted_ms: when the count of this topic was finished.
    """

    messages: int
    size_bytes: int
    oldest_ms: int | None
    newest_ms: int | None
    counted_ms: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """One key interval ``[start, stop)`` of the message table that a pass left clean (rule S4).

    Attributes:
        stop: None is the end of the table.
        snapshot_timestamp_ms: of the snapshot the pass worked with.
        bound: that snapshot's prune upper bound.
        started_ms: when the pass began.
    """

    start: bytes
    stop: bytes | None
    snapshot_timestamp_ms: int
    bound: int
    started_ms: int
    run_id: str


@dataclass(frozen=True, slots=True)
class Claim:
    """No row carries a positive write pointer of an invalid transaction up to and including ``bound``."""

    bound: int
    made_ms: int
    run_id: str


class State(ABC):
    """The janitor's memory of one store.

    Every method raises ``StoreError`` when the memory cannot be read or written, and ``StoreBusy`` when another
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
        former store (frontiers, open ids, evidence, claim, the last thorough pass) is forgotten: topics and pointers
        of the same name mean something else there. Runs stay.
        """

    @abstractmethod
    def anchor(self) -> ClockAnchor | None:
        """The clocks as last seen."""

    @abstractmethod
    def save_anchor(self, anchor: ClockAnchor) -> None: ...

    @abstractmethod
    def frontiers(self) -> dict[TopicId, FrontierRecord]:
        """The frontier of every topic ever met."""

    @abstractmethod
    def save_frontiers(self, records: Mapping[TopicId, FrontierRecord]) -> None:
        """Remember these frontiers; those of other topics stay as they are."""

    @abstractmethod
    def open_ids(self) -> dict[int, OpenIdRecord]:
        """Invalid transactions by write pointer, the closed ones among them."""

    @abstractmethod
    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        """Remember these; a record that did not change costs no write, and those of other pointers stay."""

    @abstractmethod
    def forget_open_ids(self, pointers: Iterable[int]) -> None:
        """Drop pointers that left the invalid list; unknown ones are no error."""

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
        """The lease as its holder wrote it; None when nobody ever did. Cheap: it is asked before every batch."""

    @abstractmethod
    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write the lease if it is still ``expected``; returns whether it was."""

    # -- runs and what they did -------------------------------------------------------------------------------------

    @abstractmethod
    def created_ms(self) -> int | None:
        """When this memory began; None before anybody said so. Nothing older is known."""

    @abstractmethod
    def save_created_ms(self, created_ms: int) -> None:
        """Say when this memory began, unless that is known."""

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
        self, limit: int, *, topic: TopicId | None = None, run_id: str | None = None, key: bytes | None = None
    ) -> list[LedgerEntry]:
        """The last ``limit`` entries, newest first; of one topic (those whose range holds a key), or of one run."""

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
        """Every counter since this memory began."""

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
            StoreError: there is a run of this id.
        """

    @abstractmethod
    def finish_run(self, run_id: str, finished_ms: int, result: str, report: str) -> None:
        """Remember how a run ended; ``report`` is its report as JSON.

        Raises:
            StoreError: no such run began.
        """

    @abstractmethod
    def runs(self, limit: int) -> list[RunRecord]:
        """The last ``limit`` runs, newest first."""

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
