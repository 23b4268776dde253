"""Histories of real processes: no history violates an invariant, and the check detects a deliberate bug."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.processes.history import History, Violation
from tests.support import size

pytestmark = pytest.mark.timeout(1200)

#: The duration of the disturbances, in seconds; 120 is the full size.
SECONDS = size("TMS_TEST_PROCESS_SECONDS", 8)
SEED = size("TMS_TEST_FIRST_SEED", 0)
#: The time limit for the detection of a deliberate bug, in seconds.
PLANTED_SECONDS = 60


def play(folder: Path, seed: int, seconds: float, *, outside: bool = False) -> History:
    """Run the history of a seed; print the seed and its events, or add them and the folder of logs to the error."""
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
def test_random_history_of_processes_holds_every_invariant(tmp_path: Path) -> None:
    assert play(tmp_path, SEED, SECONDS).events["orders"] > 0


def test_publish_outside_the_transaction_breaks_an_invariant(tmp_path: Path) -> None:
    with pytest.raises(Violation, match="R1"):
        play(tmp_path, SEED, PLANTED_SECONDS, outside=True)
