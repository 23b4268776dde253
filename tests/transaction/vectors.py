"""Tephra's compatibility vectors: bytes that Tephra's classes wrote, and the values in them."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from tms_core.transaction.model import (
    InProgress,
    InProgressType,
    Snapshot,
    Transaction,
    TransactionType,
    VisibilityLevel,
    VisibilityState,
)

TEPHRA = Path(__file__).parents[1] / "vectors" / "tephra"

#: The clock of all vectors, and the first pointer of that millisecond.
TIME_MS = 1_600_000_000_000
BASE = TIME_MS * 1_000_000


def load(path: str) -> Any:
    return json.loads((TEPHRA / path).read_text(encoding="utf-8"))


def names(folder: str, pattern: str = "*") -> list[str]:
    """Return the names of the vectors in a folder, without ``.bin``."""
    found = sorted(path.stem for path in (TEPHRA / folder).glob(f"{pattern}.bin"))
    assert found, f"no vectors {pattern} in {folder}"
    return found


def transaction_of(expected: dict[str, Any]) -> Transaction:
    return Transaction(
        expected["readPointer"],
        expected["transactionId"],
        expected["writePointer"],
        array("q", expected["invalids"]),
        array("q", expected["inProgress"]),
        expected["firstShortInProgress"],
        TransactionType[expected["type"]],
        array("q", expected["checkpointWritePointers"]),
        VisibilityLevel[expected["visibilityLevel"]],
    )


def state_of(expected: dict[str, Any]) -> VisibilityState:
    return VisibilityState(
        timestamp_ms=expected["timestamp"],
        read_pointer=expected["readPointer"],
        write_pointer=expected["writePointer"],
        invalid=array("q", expected["invalid"]),
        in_progress=tuple(_entry(entry) for entry in expected["inProgress"]),
    )


def snapshot_of(expected: dict[str, Any]) -> Snapshot:
    committing, committed = (
        {int(pointer): frozenset(map(bytes.fromhex, keys)) for pointer, keys in expected[name].items()}
        for name in ("committing", "committed")
    )
    return Snapshot(state_of(expected), committing, committed)


def _entry(expected: dict[str, Any]) -> InProgress:
    kind = expected["type"]
    return InProgress(
        expected["writePointer"],
        expected["expiration"],
        expected["visibilityUpperBound"],
        None if kind is None else InProgressType[kind],
        tuple(expected["checkpointWritePointers"]),
    )
