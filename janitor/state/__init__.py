"""What the janitor remembers between runs, and where."""

from __future__ import annotations

from janitor.state.base import (
    EVERYTHING,
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
    State,
    StoreRecord,
    Strikes,
    TopicCount,
)
from janitor.state.sqlite.state import SqliteState

__all__ = [
    "EVERYTHING",
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
    "SqliteState",
    "State",
    "StoreRecord",
    "Strikes",
    "TopicCount",
]
