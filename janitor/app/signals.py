"""Turns signals into a request to stop between two batches, not wherever the program happens to be.

The first SIGTERM or SIGINT asks, and what is under way ends within a batch. The second ends the process at once.
Nothing is lost by that either: LevelDB recovers, and the next janitor closes the run.
"""

from __future__ import annotations

from functools import partial

from tms_core.cli import entry

#: Handles signals while a block runs (:func:`tms_core.cli.entry.ending`).
ending = partial(entry.ending, said=b"stopping after this batch; a second Ctrl-C or SIGTERM stops at once\n")
