"""P24: the processor time of a version, a help text and a completion, for which users and shells wait.

Each command runs several times in separate processes; the figure is the highest median of all commands.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from statistics import median

from benchmarks.figure import Figure, report

RUNS = 7
_PROGRAMS = {"janitor": "janitor.cli.main", "tms": "tms_core.cli.main"}


def processor_seconds(module: str, arguments: list[str], environment: dict[str, str]) -> float:
    """Return the processor time of one command, including its process."""
    program = f"from tms_core.cli import entry; entry.main({module!r})"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", program, *arguments], env=os.environ | environment, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    seconds: dict[str, float] = {}
    for name, module in _PROGRAMS.items():
        completion = {f"_{name.upper()}_COMPLETE": "bash_complete", "COMP_WORDS": f"{name} ", "COMP_CWORD": "1"}
        commands: dict[str, tuple[list[str], dict[str, str]]] = {
            f"{name} --version": (["--version"], {}),
            f"{name} --help": (["--help"], {}),
            f"completion of {name}": ([], completion),
        }
        for words, (arguments, environment) in commands.items():
            seconds[words] = median(processor_seconds(module, arguments, environment) for _ in range(RUNS))
    details = {words: round(elapsed, 3) for words, elapsed in seconds.items()}
    report(
        Figure(
            "P24",
            "processor time of a version, help or completion, s",
            max(seconds.values()),
            at_most=0.3,
            details=details,
        )
    )


if __name__ == "__main__":
    main()
