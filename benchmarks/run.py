"""``make bench``: run each benchmark in a separate process, so that memory and caches do not affect the next one.

Standard output has only the JSON lines, in the order of the measurements; standard error has the table and errors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def scripts(ids: Iterable[str]) -> list[Path]:
    """Return the scripts of the named benchmarks (``p1``, ``P8``), or of all of them, ordered by number.

    Raises:
        SystemExit: a benchmark does not exist.
    """
    found = {path.stem.partition("_")[0]: path for path in HERE.glob("p[0-9]*.py")}
    wanted = [name.lower() for name in ids] or list(found)
    if unknown := [name for name in wanted if name not in found]:
        sys.exit(f"unknown benchmark: {', '.join(unknown)}; choose from {', '.join(sorted(found, key=_number))}")
    return [found[name] for name in sorted(wanted, key=_number)]


def measure(script: Path) -> Iterator[dict[str, Any]]:
    """Run a benchmark; print and yield each figure immediately.

    Raises:
        CalledProcessError: the benchmark failed.
    """
    command = [sys.executable, "-m", f"benchmarks.{script.stem}"]
    with subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main(ids: list[str]) -> int:
    """Run the benchmarks, and print the table; return 0 if all scripts succeeded and all bars were met."""
    table = Table("id", "figure", "value", "bar", "met")
    failed = False
    for script in scripts(ids):
        try:
            for figure in measure(script):
                table.add_row(figure["id"], figure["figure"], f"{figure['value']:,.3g}", figure["bar"], _met(figure))
                failed = failed or not figure["met"]
        except subprocess.CalledProcessError as error:
            table.add_row(script.stem.partition("_")[0].upper(), "did not finish", "", "", f"exit {error.returncode}")
            failed = True
    Console(stderr=True).print(table)
    return int(failed)


def _number(name: str) -> int:
    return int(name[1:])


def _met(figure: dict[str, Any]) -> str:
    return "yes" if figure["met"] else "NO"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
