"""Search for failures with new seeds: ``make fuzz SECONDS=3600``.

``make test`` plays the same histories and examples in every run. This program plays new ones, round after round, until
the time is over or a round fails. Hypothesis keeps failing examples in ``.hypothesis`` and tries them first in the next
round.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable

DEFAULT_SECONDS = 600
#: The first seed is below this number, so that it is easy to copy.
MANY = 1_000_000_000


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def explore(
    seconds: float, run_round: Callable[[int], int], first_seed: Callable[[], int], monotonic: Callable[[], float]
) -> int:
    """Run rounds until ``seconds`` have passed or one fails; the round that runs when the time is over is completed.

    Args:
        seconds: for how long new rounds start; at least one runs.
        run_round: plays all tests from a first seed and returns their exit code.
        first_seed: returns the first seed of the next round.
        monotonic: a monotonic clock, in seconds.

    Returns:
        The exit code of the last round: 0 if no round failed.
    """
    end, rounds = monotonic() + seconds, 0
    while True:
        rounds += 1
        seed = first_seed()
        say(f"round {rounds}, first seed {seed}")
        if code := run_round(seed):
            repeat = f"TMS_TEST_FUZZ=1 TMS_TEST_FIRST_SEED={seed} make test PYTEST_ARGS='NAME OF THE FAILED TEST'"
            say(f"round {rounds} failed; repeat it with: {repeat}")
            return code
        if monotonic() >= end:
            say(f"{rounds} rounds passed")
            return 0


def main(arguments: list[str]) -> int:
    """Explore for the number of seconds in ``arguments`` with as many processes as ``WORKERS`` says."""
    tests = ["-n", os.environ.get("WORKERS", "4"), "--dist", "worksteal", "-q", "-m", "hypothesis or seeded"]

    def run_round(seed: int) -> int:
        given = {**os.environ, "TMS_TEST_FUZZ": "1", "TMS_TEST_FIRST_SEED": str(seed)}
        return subprocess.run([sys.executable, "-m", "pytest", *tests], env=given, check=False).returncode

    seconds = float(arguments[0]) if arguments else DEFAULT_SECONDS
    return explore(seconds, run_round, lambda: secrets.randbelow(MANY), time.monotonic)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
