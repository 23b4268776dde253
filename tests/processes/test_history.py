"""Histories of real processes: no history breaks an invariant, and a planted bug is found."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.processes.history import History, Violation
from tests.support import size

pytestmark = pytest.mark.timeout(1200)

#: For how long something happens to the processes, in seconds; 120 is the full size.
SECONDS = size("TMS_TEST_PROCESS_SECONDS", 8)
SEED = size("TMS_TEST_FIRST_SEED", 0)
#: Within what time a planted bug is found.
PLANTED_SECONDS = 60


def play(folder: Path, seed: int, seconds: float, *, outside: bool = False) -> History:
    """Play the history of a seed; says the seed, what has happened, and where the logs are."""
    history = History(folder, seed, outside)
    try:
        history.disturb(seconds)
        started = time.monotonic()
        history.finish()
        history.events["seconds to finish"] = round(time.monotonic() - started)
    except BaseException as error:
        error.add_note(
            f"TMS_TEST_FIRST_SEED={seed} TMS_TEST_PROCESS_SECONDS={seconds}: {dict(history.events)}, {folder}"
        )
        raise
    finally:
        history.close()
    sys.stdout.write(f"seed {seed}: {dict(history.events)}\n")
    return history


@pytest.mark.seeded
def test_history_of_processes_breaks_no_invariant(tmp_path: Path) -> None:
    history = play(tmp_path, SEED, SECONDS)
    assert history.events["orders"] > 0


def test_bills_published_outside_the_transaction_are_found_within_a_minute(tmp_path: Path) -> None:
    with pytest.raises(Violation, match="R1"):
        play(tmp_path, SEED, PLANTED_SECONDS, outside=True)
