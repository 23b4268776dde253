"""What a damaged log makes of the rows of a real LevelDB folder.

The simulated store has no log. So its message rows are written to LevelDB, whose process dies with them in its log.
That is damaged, and the folder opened as the janitor opens it.
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

#: Records of the log, at most.
RECORDS = 8


class Written(NamedTuple):
    """A folder as a process left it that has died.

    Attributes:
        log: of the message table.
        last_at: the first byte of its last record.
        last: the keys that were written with that.
    """

    folder: Path
    log: Path
    last_at: int
    last: frozenset[bytes]


def write(folder: Path, rows: Sequence[tuple[bytes, MessageValue]]) -> Written:
    """Have a process write rows and die."""
    together, last_at = -(-len(rows) // RECORDS), 0
    with LevelDBStore(folder / "writing", create=True) as store:
        for start in range(0, len(rows), together):
            last_at, batch = _log(store.path).stat().st_size, rows[start : start + together]
            store.message.put(batch)
        shutil.copytree(store.path, folder / "left")
    return Written(folder / "left", _log(folder / "left"), last_at, frozenset(key for key, _ in batch))


def tear(written: Written, percent: int) -> None:
    """Leave so much of the last record."""
    size = written.log.stat().st_size
    written.log.write_bytes(written.log.read_bytes()[: written.last_at + (size - written.last_at) * percent // 100])


def flip(written: Written, percent: int) -> None:
    """Change one bit, so far into the log."""
    data = bytearray(written.log.read_bytes())
    data[min(len(data) * percent // 100, len(data) - 1)] ^= 1
    written.log.write_bytes(data)


def keys_left(written: Written) -> frozenset[bytes]:
    """The keys that are there when the folder is opened."""
    with LevelDBStore(written.folder) as store:
        return frozenset(store.message.read(KEYS, b"", None, ALL).items)


def _log(store: Path) -> Path:
    (log,) = find_tables(store)["message"].glob("*.log")
    return log
