"""Measure how fast CDAP cleans a LevelDB store, to compare it with a sweep of the janitor on the same store.

``python -m benchmarks.java_prune [STORE]`` prints one JSON line. Without ``STORE`` (a folder of the ``system.tms.*``
databases) CDAP's classes first write a store of a million messages, half of them expired. CDAP cleans a copy of a given
store as of ``--now``. The time includes only the deletion, in a warm JVM that has read the open store once, and not the
start of Java.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.interop.java import Interop

ROWS = 1_000_000


def fill(store: Path, now_ms: int, rows: int = ROWS) -> None:
    """Write a store of plain messages in ten topics with CDAP's classes, half of them expired at ``now_ms``.

    Raises:
        JavaFailed: see :meth:`Interop.build` and :meth:`Interop.run`.
    """
    java = Interop()
    java.build()
    java.run("fill", store, "--now", now_ms, "--rows", rows)


def prune_copy(store: Path, now_ms: int) -> dict[str, Any]:
    """Clean a copy of ``store`` with CDAP's classes, as CDAP's cleanup thread does at ``now_ms``.

    Returns:
        ``message_rows`` and ``payload_rows`` before, ``messages_deleted``, ``payloads_deleted`` and ``deleted``, the
        ``seconds`` of the deletion, and ``rows_per_second``.

    Raises:
        JavaFailed: see :meth:`Interop.build` and :meth:`Interop.run`; also if unrecognized keys stop CDAP's cleanup.
    """
    java = Interop()
    java.build()
    with tempfile.TemporaryDirectory(prefix="java-prune-") as scratch:
        copy = shutil.copytree(store, Path(scratch) / "messaging")
        [result] = java.run("prune", copy, "--now", now_ms)
    return result | {"rows_per_second": round(result["deleted"] / result["seconds"])}


def main() -> None:
    """Measure CDAP's cleanup, and print the JSON line."""
    parser = argparse.ArgumentParser(description="Measure how fast CDAP cleans a LevelDB store.")
    parser.add_argument("store", nargs="?", type=Path, help="folder of the system.tms.* databases")
    parser.add_argument(
        "--now", type=int, default=time.time_ns() // 1_000_000, help="time of the cleanup, ms since 1970; default: now"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help=f"messages to write without STORE; default {ROWS}")
    arguments = parser.parse_args()
    if reason := Interop.available():
        sys.exit(reason)
    if arguments.store:
        result = prune_copy(arguments.store, arguments.now)
    else:
        with tempfile.TemporaryDirectory(prefix="java-prune-store-") as scratch:
            fill(Path(scratch) / "messaging", arguments.now, arguments.rows)
            result = prune_copy(Path(scratch) / "messaging", arguments.now)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
