"""The entry point of the installed command ``janitor`` (:mod:`tms_core.cli.entry`)."""

from __future__ import annotations

from tms_core.cli import entry


def main() -> None:
    """Run the command and exit with its code."""
    entry.main("janitor.cli.main")
