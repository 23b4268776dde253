"""``janitor completion``."""

from __future__ import annotations

from tms_core.cli.completion import completion

command = completion("janitor")
