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
from typing import Self

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
    """One run, as ``janitor history`` shows it; ``result`` and ``report`` are empty until it has finished."""

    id: str
    mode: str
    started_ms: int
    finished_ms: int | None = None
    result: str = ""
    report: str = ""


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
