"""What the janitor remembers between runs, and where."""

from __future__ import annotations

from janitor.state.base import (
    Claim,
    ClockAnchor,
    Evidence,
    FrontierRecord,
    OpenIdRecord,
    PendingJump,
    RunRecord,
    State,
    StoreRecord,
)
from janitor.state.sqlite import SqliteState

__all__ = [
    "Claim",
    "ClockAnchor",
    "Evidence",
    "FrontierRecord",
    "OpenIdRecord",
    "PendingJump",
    "RunRecord",
    "SqliteState",
    "State",
    "StoreRecord",
]
