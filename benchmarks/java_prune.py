"""How fast CDAP itself cleans a LevelDB store: the yardstick for a sweep of ours on a copy of the same store.

``python -m benchmarks.java_prune [STORE]`` prints one JSON line. Without ``STORE`` (a folder of the ``system.tms.*``
databases) CDAP's classes first write one of a million messages, half of them past their ttl. A given store is judged
at ``--now`` and never touched: CDAP cleans a copy. The seconds are those of the deleting alone, inside a warm JVM with
the store open and read once, so that Java's start is not measured.
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
    """Let CDAP write a store of plain messages in ten topics, half of them past their ttl at ``now_ms``.

    Raises:
        JavaFailed: see :meth:`Interop.build` and :meth:`Interop.run`.
    """
    java = Interop()
    java.build()
    java.run("fill", store, "--now", now_ms, "--rows", rows)


def prune_copy(store: Path, now_ms: int) -> dict[str, Any]:
    """Let CDAP clean a copy of ``store`` as its own cleanup thread would at ``now_ms``.

    Returns:
        ``message_rows`` and ``payload_rows`` before, ``messages_deleted``, ``payloads_deleted`` and ``deleted``, the
        ``seconds`` the deleting took, and ``rows_per_second``.

    Raises:
        JavaFailed: see :meth:`Interop.build` and :meth:`Interop.run`; also when foreign keys end CDAP's cleaning.
    """
    java = Interop()
    java.build()
    with tempfile.TemporaryDirectory(prefix="java-prune-") as scratch:
        copy = shutil.copytree(store, Path(scratch) / "messaging")
        [result] = java.run("prune", copy, "--now", now_ms)
    return result | {"rows_per_second": round(result["deleted"] / result["seconds"])}


def main() -> None:
    """Measure, and print the line."""
    parser = argparse.ArgumentParser(description="How fast CDAP itself cleans a LevelDB store.")
    parser.add_argument("store", nargs="?", type=Path, help="a folder of the system.tms.* databases")
    parser.add_argument("--now", type=int, default=time.time_ns() // 1_000_000, help="milliseconds; default: now")
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
