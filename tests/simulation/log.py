"""A damaged log of a real LevelDB folder.

The simulated store has no log. Therefore its message rows are written to LevelDB, whose process dies with the rows in
its log. The log is damaged, and the folder is opened like the janitor opens it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.simulation.store import ALL
from tms_core.tables.base import KEYS, MessageValue
from tms_core.tables.leveldb.layout import find_tables
from tms_core.tables.leveldb.store import LevelDBStore

#: Maximum number of log records.
RECORDS = 8


class KilledStore(NamedTuple):
    """The store of a killed process.

    Attributes:
        log: the log of the message table.
        last_at: the offset of its last record.
        last: the keys of its last record.
    """

    folder: Path
    log: Path
    last_at: int
    last: frozenset[bytes]


def write_and_kill(folder: Path, rows: Sequence[tuple[bytes, MessageValue]]) -> KilledStore:
    """Write rows and copy the folder before it is closed."""
    together, last_at = -(-len(rows) // RECORDS), 0
    with LevelDBStore(folder / "writing", create=True) as store:
        for start in range(0, len(rows), together):
            last_at, batch = _log(store.path).stat().st_size, rows[start : start + together]
            store.message.put(batch)
        shutil.copytree(store.path, folder / "left")
    return KilledStore(folder / "left", _log(folder / "left"), last_at, frozenset(key for key, _ in batch))


def truncate_last_record(store: KilledStore, percent: int) -> None:
    """Truncate the last record to a percentage of its size."""
    size = store.log.stat().st_size
    store.log.write_bytes(store.log.read_bytes()[: store.last_at + (size - store.last_at) * percent // 100])


def flip_bit(store: KilledStore, percent: int) -> None:
    """Flip one bit at a percentage of the log."""
    data = bytearray(store.log.read_bytes())
    data[min(len(data) * percent // 100, len(data) - 1)] ^= 1
    store.log.write_bytes(data)


def keys_left(store: KilledStore) -> frozenset[bytes]:
    """Open the folder and return its keys."""
    with LevelDBStore(store.folder) as opened:
        return frozenset(opened.message.read(KEYS, b"", None, ALL).items)


def _log(store: Path) -> Path:
    (log,) = find_tables(store)["message"].glob("*.log")
    return log
