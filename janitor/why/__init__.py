"""Why a message is still there and when it will go, or which run took it."""

from __future__ import annotations

from janitor.why.answer import Found, Memory, Missing, Trace, Why
from janitor.why.fate import Fate, judge
from janitor.why.question import remembered, why

__all__ = ["Fate", "Found", "Memory", "Missing", "Trace", "Why", "judge", "remembered", "why"]
